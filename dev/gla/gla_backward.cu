// gla_backward.cu: gradients of gated linear attention: dq, dk, dg (fp32), dv, dS_0 from dout, dS_T
// and the forward's inputs. The equations are in gla_walk.cuh; gates are fp32.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o gla_backward dev/gla/gla_backward.cu -lcublas -lcublasLt
//
// ms at (B,T,NH,DK,DV), bf16, ln sigmoid(z) / 16 with z around 0, L2 flushed, on an NVIDIA H200,
// 2026-11-30; the others have not been measured.
//    version                   (8,2048,16,128,128) (1,16384,16,128,128) (32,512,16,64,64)
//  1 the recurrence, S and D in memory: a thread a column for dv, a row for dq, then dk, dg
//  2 S and D in registers
//  3 chunks of 64 as loops over memory, after a forward pass
//  4 train_metala's recurrence, from what a forward pass kept
//  5 train_metala's chunks, likewise: S and D before and behind every 64 tokens in memory
//  6 walks through steps of 16 tokens:
//    dv, dq, dk one after the other,
//    nothing kept                      1.083               4.879               0.498
//  7 6, few heads cut in segments      1.084               1.245               0.497
//  8 forward, then 5
//  9 forward, then 7 with what the forward pass left
//
// On paper, bytes a token and head, DK = DV = 128, arrays of bf16 256, of fp32 512: all once 2816,
// 0.17 ms at the first shape and 4.25 TB/s. 5: q, dO, g, D: 1536; q, k, v, dO, g, S, D, A, then
// dq, dk, dv, dg: 3968: 5504, 0.34 ms. 7: dv as in the forward pass: 1088; dq: q, k, v, dO, g,
// then dq, q dq, S: 2816; dk: q, k, v, dO, g, q dq, S, then dk, dg: 3328: 7232, 0.45 ms, and 1600
// more, 0.1 ms, where the forward pass left nothing. Instructions of a step of 16 tokens and warp:
// dq 1200, dk 1350, 8 warps, on 4 schedulers: 310,000 and 340,000 clocks a multiprocessor, 0.18
// and 0.2 ms.
#include "gla_bench.cuh"

static const BenchKernel kernels[] = {
    {1, "recurrence, S in memory", run_backward_recurrent<0>, refuse_naive},
    {2, "recurrence, a row a thread", run_backward_recurrent<1>, refuse_registers},
    {3, "chunks as loops, fp32", run_backward_plain, refuse_naive},
    {4, "train_metala's, by tokens", run_backward_trainer<RECURRENT>, refuse_tokens},
#ifdef PRECISION_BF16
    {5, "train_metala's, states of 64 tokens", run_backward_trainer<CHUNK>, refuse_trainer},
    {6, "16 tokens a step, tensor cores", run_backward_walk<1>, refuse_walk},
    {7, "6, few heads cut in segments", run_backward_walk<0>, refuse_walk},
    {8, "5, forward + backward", run_both_trainer<CHUNK>, refuse_trainer},
    {9, "7, forward + backward", run_both, refuse_walk},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "gla_backward: gated linear attention, its own shapes");
    return ladder_run(kernels, sizeof kernels / sizeof *kernels, 1, &bench) ? EXIT_FAIL : 0;
}
