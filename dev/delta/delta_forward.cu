// delta_forward.cu: o_t = s S_t q_t of the delta rule, S_0 given or zero, S_T asked for. The
// equations are in train_deltanet.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o delta_forward dev/delta/delta_forward.cu -lcublas -lcublasLt
//
// ms (TFLOP/s, 6 HS^2 + 640 HS a token and head) at (B,T,NH,HS), bf16, L2 flushed, on an NVIDIA
// H200, 2026-11-30. The second shape's 16 rows of S in one warp instead of four: 0.971, 1.327.
//    version                       (8,2048,16,128) (1,16384,16,128) (32,512,16,64) (8,2048,32,64)
//  1 the recurrence, a thread a row of S, in memory: any type, any head size
//  2 S in registers: it reads q and k of every token in every thread
//  3 chunks as loops over memory, a block a head
//  4 chunks on tensor cores: M and
//    P, then S through the chunks     0.275 (172)     0.584 (80.9)    0.160 (108)    0.292 (118)
//  5 4, and what a backward pass
//    needs: S before every chunk, N   0.321 (147)     0.627 (75.3)    0.180 (96)     0.334 (103)
//
// On paper, HS 128, a chunk: products of 64x64x128 (256 mma.sync of 2048 multiplications, 1270 a
// clock on a multiprocessor): K K^T, Q K^T 0.6 each, S K^T, S Q^T 2 each, N^T K 4, E^T M^T 1.9, N^T
// P^T 0.6: 11.7, 4800 clocks; shared memory, 128 bytes a clock, 5000. Memory: M and P: 32 KiB read,
// 15 written; S: 63 read, 16 written, 64 for a backward pass: 174 KiB, 9800 clocks at 4.2 TB/s. So
// memory decides: 31 chunks a multiprocessor at the first shape, 0.13 ms (4), 0.17 ms (5). With one
// sequence (second shape) S goes through 256 chunks, 16 rows on each multiprocessor. One warp with
// them took 5900 clocks a chunk: 336 mma at 17 clocks. In four warps the last has 96, which is 1000
// to 1600 clocks with three exchanges of S, E and N (shared memory: 1300): 0.2 to 0.25 ms, and M
// and P, 0.1 ms. Measured is 0.58: the exchanges wait for each other.
//
// Error of the last 256 outputs, HS 32, as dev/emulate computes it, at T = 256 / 512 / 4096:
//              2 (u rounded)         3 (N in fp32)         4
// random keys  0.003  0.003  0.003   0.002  0.002  0.002   0.004  0.004  0.004
// two keys     0.022  0.033  0.106   0.002  0.002  0.002   0.012  0.016  0.014
// one key      0.034  0.046  0.122   0.002  0.002  0.002   0.017  0.020  0.031
// With N as one bf16 number in N^T K (a fifth of S's products less) 4 has 2's errors.
#include "delta_bench.cuh"

static const BenchKernel kernels[] = {
    {1, "recurrence, S in memory", run_forward_recurrent<0>, refuse_naive},
    {2, "recurrence, a row a thread", run_forward_recurrent<1>, refuse_registers},
    {3, "chunks as loops, fp32", run_forward_plain, refuse_naive},
#ifdef PRECISION_BF16
    {4, "chunks on tensor cores", run_forward_chunk<0>, refuse_chunk},
    {5, "4, and what a backward pass needs", run_forward_chunk<1>, refuse_chunk},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "delta_forward: the delta rule, its own shapes");
    return delta_ladder(kernels, sizeof kernels / sizeof *kernels, 0, &bench) ? EXIT_FAIL : 0;
}
