// gla_forward.cu: o_t = s S_t^T q_t of gated linear attention, S_0 given or zero, S_T asked for.
// The equations are in gla_walk.cuh; gates are fp32.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o gla_forward dev/gla/gla_forward.cu -lcublas -lcublasLt
//
// NOT YET MEASURED.
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
