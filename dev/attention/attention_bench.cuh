// attention_bench.cuh: what the attention ladders share: what attention.cuh takes from a trainer,
// shapes, inputs, the double-precision reference in the plain form.
#ifndef SEQ_DEV_ATTENTION_BENCH_CUH
#define SEQ_DEV_ATTENTION_BENCH_CUH

#include "../bench.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
#endif

enum { WARP = 32 };
#define LOG2E 1.4426950408889634f

// LAUNCH(kernel, grid, block, smem, stream, arguments): launch and check.
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
    do { \
        bench_fits((const void *)(kernel), #kernel, (block), (smem)); \
        (kernel)<<<bench_grid(grid), (block), (smem), (stream)>>>(__VA_ARGS__); \
        bench_cuda(cudaGetLastError(), #kernel, __FILE__, __LINE__); \
    } while (0)

// bench_grid: blocks as an unsigned, or die: a grid has 1 to 2^31-1.
static inline unsigned bench_grid(size_t blocks)
{
    if (blocks == 0 || blocks > 0x7fffffff)
        die(EXIT_MEMORY, "attention: %zu blocks, expected 1 to 2^31-1", blocks);
    return (unsigned)blocks;
}

// Pack: N consecutive elements, moved by one load or store.
template <typename X, int N> struct alignas(sizeof(X) * N) Pack {
    X v[N];
};

// warp_sum: sum of x over the 32 lanes, to all of them.
static __device__ inline float warp_sum(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// exp2_fast: 2^x on the special-function unit: relative error 2^-22, below 2^-126 it is 0.
static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#include "attention.cuh"
#endif
