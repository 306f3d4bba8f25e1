// scan_complex.cu: h_t = a_t h_{t-1} + x_t along T of (B,T,C), C contiguous, all of it complex64
// (real and imaginary part side by side), and its gradient, as a ladder.
//
//     nvcc -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -o scan_complex
//          dev/scan/scan_complex.cu     (one line), then ./scan_complex
//     bash dev/emulate/ladder.sh dev/scan/scan_complex.cu     its checks, no GPU
//
// Equations, schemes and what happens to infinities: scan.cuh; the kernels: scan_real.cu. The
// gradient of z = x + iy is dL/dx + i dL/dy, so that backward multiplies by conj(a) and conj(h).
// Bytes of an element: forward 24, backward 40. A warp of kernel 4 walks 32 channels, 256 bytes of
// each row, in stages of 8 rows; the tiles of 7 to 10 are as many bytes as those of real numbers.
//
// ms (% of a copy of as many bytes) forward at (8,1024,1536), L2 flushed, on an NVIDIA H200,
// 2026-11-30, kernels 1 to 11: 0.475 (16), 0.152 (48), 0.128 (58), 0.074 (99), 0.075 (98), 0.082
// (90), 0.076 (97), 0.080 (92), 0.079 (93), 0.082 (90), 0.074 (99). Backward: 1 0.625 (19), 2 0.218
// (55), others not measured.
#include "scan_ladder.cuh"

int main(int argc, char **argv)
{
    return scan_main<Complex>(argc, argv, "scan_complex: h_t = a_t h_{t-1} + x_t over T of (B,T,C),"
                              " complex64, and its gradient");
}
