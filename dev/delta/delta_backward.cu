// delta_backward.cu: gradients of the delta rule. The equations are in delta_kernels.cuh.
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
