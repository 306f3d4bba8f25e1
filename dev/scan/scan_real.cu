// scan_real.cu: h_t = a_t h_{t-1} + x_t along T of (B,T,C), C contiguous, a of the same shape, and
// its gradient, as a ladder; fp32, and with -DPRECISION_BF16 a, x, da, dx bf16 and states fp32.
//
//     nvcc -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -o scan_real
//          dev/scan/scan_real.cu     (one line), then ./scan_real
//     bash dev/emulate/ladder.sh dev/scan/scan_real.cu [-DPRECISION_BF16]     its checks, no GPU
//
// Equations, schemes and what happens to infinities: scan.cuh. Bytes of an element: forward reads a
// and x and writes h, 12 (bf16 8); backward reads a, g, h and writes dx and da, 20 (bf16 14).
//
// Kernels (those of scan_complex.cu are the same), each in both directions:
//   1  a thread a channel
//   2  a thread 16 bytes of channels, 8 rows of loads in flight
//   3  chunks of 64 rows: what each does to a state, the states between them, every row again
//   4  a warp walks 32 channels (bf16: 64), 7 stages of 16 rows on their way to shared memory
//   5  4 with 3 stages on their way          6  4 with twice the channels a warp
//   7  a block of 8 warps walks 32 channels, a tile of 256 rows (backward 192) at a time, and has
//      the next one on its way
//   8  tiles of 128 rows (96) x 64 channels, a block each, states passed on from tile to tile
//   9  8 with the next tile on its way      10  9 with tiles of 256 rows (192) x 32 channels
//  11  one of the others, by the shape
// 1 and 2 have too few bytes in flight, 3 reads a and x twice. 4 to 6 need enough columns: at
// B 8 C 1536 there are 384 strips of 32, three a multiprocessor, each with 28 KB on its way (back
// 42), where 22 KB a multiprocessor would hide a microsecond at 4.25 TB/s; a row of a strip costs
// a warp some 14 instructions, and there is time for 60. Rows of fewer columns, or columns that do
// not start on 16-byte boundaries, need tiles that wait for each other.
//
// ms (% of a copy of as many bytes) at (8,T,1536), fp32, L2 flushed, on an NVIDIA H200, 2026-11-30;
// -: not measured.
//        forward, T=1024   T=4096        backward, T=1024   T=4096
//   1     0.460 (8)        1.807 (8)      0.492 (13)        1.956 (12)
//   2     0.137 (28)       0.538 (27)     0.189 (33)        0.742 (32)
//   3     0.071 (53)       0.261 (55)     0.097 (64)          -
//   4     0.039 (98)       0.151 (95)     0.065 (95)        0.268 (88)
//   5     0.040 (95)       0.150 (96)     0.065 (95)          -
//   6     0.040 (94)       0.158 (91)     0.066 (93)          -
//   7     0.042 (89)       0.165 (87)     0.074 (84)          -
//   8     0.042 (90)       0.152 (94)     0.068 (91)          -
//   9     0.042 (91)       0.150 (96)     0.067 (92)          -
//  10     0.044 (87)       0.160 (90)     0.073 (85)          -
// 11 was 4 then. Over a long T its warps drift apart, and memory slows down:
//        forward, T=4096   T=16384       T=65536       backward, T=4096  T=16384      T=65536
//   4     0.150 (94)       0.613 (93)     2.50 (90)      0.266 (89)      1.075 (88)   4.37 (86)
//   5     0.148 (96)       0.590 (97)     2.41 (93)      0.254 (93)      1.037 (91)   4.23 (89)
//   8     0.150 (94)       0.583 (98)     2.32 (97)      0.250 (94)      0.985 (96)   3.93 (96)
//   9     0.149 (95)       0.582 (98)     2.32 (97)      0.251 (94)      0.990 (96)   3.95 (95)
// so that 11 is 9 forward and 8 backward there.
#include "scan_ladder.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#define TYPE_NAME "bf16, states fp32"
#else
typedef float floatX;
#define TYPE_NAME "fp32"
#endif

int main(int argc, char **argv)
{
    return scan_main<floatX>(argc, argv, "scan_real: h_t = a_t h_{t-1} + x_t over T of (B,T,C), "
                             TYPE_NAME ", and its gradient");
}
