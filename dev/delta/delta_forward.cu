// delta_forward.cu: o_t = s S_t q_t of the delta rule. The equations are in delta_kernels.cuh.
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
