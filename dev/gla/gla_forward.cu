// gla_forward.cu: o_t = s S_t^T q_t of gated linear attention, S_0 given or zero, S_T asked for.
// The equations are in gla_walk.cuh; gates are fp32.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o gla_forward dev/gla/gla_forward.cu -lcublas -lcublasLt
//
// ms at (B,T,NH,DK,DV), bf16, ln sigmoid(z) / 16 with z around 0, L2 flushed, on an NVIDIA H200,
// 2026-11-30; 1 to 4 have not been measured.
//    version                   (8,2048,16,128,128) (1,16384,16,128,128) (32,512,16,64,64)
//  1 the recurrence, a thread a column of S, in memory: any type, any head size
//  2 S in registers
//  3 chunks of 64 as loops over memory, all pairs with their own exponential
//  4 train_metala's recurrence
//  5 train_metala's chunks: S before
//    every 64 tokens to memory,
//    then all chunks at once           0.479               0.664               0.189
//  6 S in registers through steps
//    of 16 tokens; q, k with their
//    gates and A from a kernel before  0.383               0.872               0.191
//  7 6, few heads cut in segments      0.383               0.465               0.191
//
// On paper, bytes a token and head, DK = DV = 128: q, k, v, o 256 each, g 512: 1536 once, 0.095 ms
// at the first shape and 4.25 TB/s. 5: k, v, g read, S written (512), q, k, v, g, S read, o: 3584,
// 0.22 ms. 6: q, k, g read, q and k with gates, A, fade written (576): 1600; these and v read, o:
// 1088: 2688, 0.17 ms. Instructions of 6, a step of 16 tokens and warp: 1600 (pairs, one warp a
// step), 400 (walk, 8 warps), on 4 schedulers: 70,000 and 110,000 clocks a multiprocessor, 0.04
// and 0.06 ms. 7: at the second shape 8 segments, the walk twice: 0.06 ms more, and all
// multiprocessors have work.
#include "gla_bench.cuh"

static const BenchKernel kernels[] = {
    {1, "recurrence, S in memory", run_forward_recurrent<0>, refuse_naive},
    {2, "recurrence, a column a thread", run_forward_recurrent<1>, refuse_registers},
    {3, "chunks as loops, fp32", run_forward_plain, refuse_naive},
    {4, "train_metala's, by tokens", run_forward_trainer<RECURRENT, 0>, refuse_tokens},
#ifdef PRECISION_BF16
    {5, "train_metala's, states of 64 tokens", run_forward_trainer<CHUNK, 0>, refuse_trainer},
    {6, "16 tokens a step, tensor cores", run_forward_walk<1>, refuse_walk},
    {7, "6, few heads cut in segments", run_forward_walk<0>, refuse_walk},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "gla_forward: gated linear attention, its own shapes");
    return ladder_run(kernels, sizeof kernels / sizeof *kernels, 0, &bench) ? EXIT_FAIL : 0;
}
