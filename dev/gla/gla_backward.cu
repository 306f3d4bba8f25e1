// gla_backward.cu: gradients of gated linear attention: dq, dk, dg (fp32), dv, dS_0 from dout, dS_T
// and the forward's inputs. The equations are in gla_walk.cuh; gates are fp32.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o gla_backward dev/gla/gla_backward.cu -lcublas -lcublasLt
//
// NOT YET MEASURED.
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
