// delta_backward.cu: gradients of the delta rule: dq, dk, dv, dbeta, dS_0 from dout, dS_T and what
// the forward pass kept. The equations are in train_deltanet.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o delta_backward dev/delta/delta_backward.cu -lcublas -lcublasLt
//
// ms (TFLOP/s, 16 HS^2 + 1664 HS a token and head) at (B,T,NH,HS), bf16, L2 flushed, on an NVIDIA
// H200, 2026-11-30. The second shape's 16 rows of S in one warp instead of four: 1.517, 2.843.
//    version                       (8,2048,16,128) (1,16384,16,128) (32,512,16,64) (8,2048,32,64)
//  1 the recurrence, S and D in memory: a thread a row for dv, then a thread a column for dq, dk
//  2 S and D in registers
//  3 chunks as loops over memory, a block a head
//  4 chunks on tensor cores: D, dv
//    one by one; then dq, dk, dbeta   0.476 (262)     0.788 (158)     0.201 (224)    0.369 (244)
//  5 forward, with all that a
//    backward pass needs; backward    0.794 (157)     1.412 (88.2)    0.380 (119)    0.698 (129)
//
// On paper, HS 128, a chunk, products of 64x64x128 as in delta_forward.cu: D K^T, dO^T Q 2 each,
// dV^T K 4, dN^T M 1.9, dO^T P 0.6; dO N^T, dV N^T, X K, X^T Q, F K, F^T K 0.6 each, dO S, dV S,
// N D 2 each: 20.2, 8300 clocks. Memory: D: 63 KiB read, 48 written; dq, dk: 144 read, 32 written:
// 287 KiB, 16200 clocks at 4.2 TB/s: 0.29 ms at the first shape, 0.5 ms with the forward pass.
#include "delta_bench.cuh"

static const BenchKernel kernels[] = {
    {1, "recurrence, S in memory", run_backward_recurrent<0>, refuse_naive},
    {2, "recurrence, a row a thread", run_backward_recurrent<1>, refuse_registers},
    {3, "chunks as loops, fp32", run_backward_plain, refuse_naive},
#ifdef PRECISION_BF16
    {4, "chunks on tensor cores", run_backward_chunk, refuse_chunk},
    {5, "forward + backward", run_both, refuse_chunk},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "delta_backward: the delta rule, its own shapes");
    return delta_ladder(kernels, sizeof kernels / sizeof *kernels, 1, &bench) ? EXIT_FAIL : 0;
}
