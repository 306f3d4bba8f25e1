// warp.cuh: what kernels are made of: warps, rows, reductions, instructions of tensor cores.
#ifndef SEQ_UTIL_WARP_CUH
#define SEQ_UTIL_WARP_CUH

#include "cuda_training.h"

enum { WARP = 32, ROW_WARPS = 8 }; // kernels that give a row to a warp have blocks of ROW_WARPS

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

// warp_max: maximum of x over the 32 lanes, to all of them.
static __device__ inline float warp_max(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// block_sum: sum of x over the block's threads (a multiple of 32), to all of them, in a fixed
// order.
static __device__ double block_sum(double x)
{
    __shared__ double part[WARP];
    for (int i = WARP / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    __syncthreads(); // part may still be read from the call before
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < (int)blockDim.x / WARP; i++)
        x += part[i];
    return x;
}

// row_reduce: v[k] = sum (MAX: maximum) of v[k] over P threads side by side, K values at once,
// in a fixed order. P > 32: the whole block, of at most 256 threads, calls it; red: 8 K floats of
// shared memory.
template <int P, int MAX, int K> static __device__ inline void row_reduce(float (&v)[K], float *red)
{
#pragma unroll
    for (int lanes = (P < WARP ? P : WARP) / 2; lanes > 0; lanes /= 2)
        for (int k = 0; k < K; k++) {
            const float other = __shfl_xor_sync(~0u, v[k], lanes);
            v[k] = MAX ? fmaxf(v[k], other) : v[k] + other;
        }
    if (P <= WARP)
        return;
    __syncthreads();
    for (int k = 0; k < K && threadIdx.x % WARP == 0; k++)
        red[8 * k + threadIdx.x / WARP] = v[k];
    __syncthreads();
    for (int k = 0; k < K; k++) {
        v[k] = red[8 * k];
        for (int i = 1; i < P / WARP; i++)
            v[k] = MAX ? fmaxf(v[k], red[8 * k + i]) : v[k] + red[8 * k + i];
    }
}

// exp2_fast: 2^x on the special-function unit: relative error 2^-22, below 2^-126 it is 0.
static __device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// logsumexp_step: add 2^x to the sum that 2^max sum stands for; *max = the largest x. Equal values
// are not subtracted: inf - inf is NaN.
static __device__ inline void logsumexp_step(float *max, float *sum, float x)
{
    const float above = x == *max ? 0 : x - *max, e = exp2_fast(-fabsf(above));
    *sum = above > 0 ? *sum * e + 1 : *sum + e;
    *max = fmaxf(*max, x);
}

// logsumexp_add: add 2^other_max other_sum to the sum that 2^max sum stands for; *max = the larger
// one. Signs are free. Equal values: as above.
static __device__ inline void logsumexp_add(float *max, float *sum, float other_max,
                                            float other_sum)
{
    const float top = fmaxf(*max, other_max);
    *sum = *sum * (*max == top ? 1 : exp2_fast(*max - top)) +
           other_sum * (other_max == top ? 1 : exp2_fast(other_max - top));
    *max = top;
}

#ifdef PRECISION_BF16
// pack2: two floats as bf16 in one register, x in the low half.
static __device__ inline uint32_t pack2(float x, float y)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *(const uint32_t *)&v;
}

// load2, store2: two neighbouring elements.
static __device__ inline float2 load2(const floatX *p)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)p);
}

// store2: see load2.
static __device__ inline void store2(floatX *p, float x, float y)
{
    *(__nv_bfloat162 *)p = __floats2bfloat162_rn(x, y);
}

// mul2: product of two packed pairs.
static __device__ inline uint32_t mul2(uint32_t x, uint32_t y)
{
    const __nv_bfloat162 v = __hmul2(*(__nv_bfloat162 *)&x, *(__nv_bfloat162 *)&y);
    return *(const uint32_t *)&v;
}

// mma: c (16x8) += a (16x16) b (16x8), bf16 in, fp32 out. Lane 4g + t holds of c rows g and g+8 at
// columns 2t, 2t+1; of a the same rows at k = 2t, 2t+1, then k + 8; of b column g at the same k.
static __device__ inline void mma(float c[4], uint4 a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// mma_dots: c = products of rows x (c[0], c[1]) and y (c[2], c[3]) of one matrix with rows z of
// another, H channels; each pointer is the lane's row plus 8t. A sum may run over channels in any
// order, so both operands take them 16 bytes a lane.
static __device__ inline void mma_dots(float c[4], const floatX *x, const floatX *y,
                                       const floatX *z, int H)
{
    c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll 1
    for (int h = 0; h < H; h += 32) {
        const uint4 p = *(const uint4 *)(x + h), q = *(const uint4 *)(y + h);
        const uint4 s = *(const uint4 *)(z + h);
        mma(c, {p.x, q.x, p.y, q.y}, s.x, s.y);
        mma(c, {p.z, q.z, p.w, q.w}, s.z, s.w);
    }
}

// ldmatrix: the four 8x8 quarters of a 16x16 tile of bf16 in shared memory, each lane with the
// address p of 8 elements in a row. p at row_at: an a of mma or, TRANS, b's x, y and z, w with the
// rows as k; p at column_at: b's x, y and z, w with the rows as columns or, TRANS, an a with the
// rows as k. (Registers that mma wants side by side come side by side.)
template <int TRANS> static __device__ inline uint4 ldmatrix(const floatX *p)
{
    uint4 f;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w) : "r"(at) : "memory");
    return f;
}

// copy_async: start copying 16 bytes from global to shared memory; not `inside`: 16 zeros.
static __device__ inline void copy_async(floatX *to, const floatX *from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : :
                 "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

// copy_async: the same for the two floats of a row's statistics.
static __device__ inline void copy_async(float2 *to, const float2 *from, bool inside)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" : :
                 "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 8 : 0)
                 : "memory");
}

// copy_wait: until all that this thread copies has arrived.
static __device__ inline void copy_wait(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

// copy_commit, copy_wait_all_but: what this thread has started to copy since the last call is a
// group; until all its groups but the latest PENDING have arrived.
static __device__ inline void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// copy_wait_all_but: see copy_commit.
template <int PENDING> static __device__ inline void copy_wait_all_but(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// row_at, column_at: where in a 16x16 tile, its rows ld apart, ldmatrix's lane reads.
static __device__ inline int row_at(int lane, int ld)
{
    return lane % 16 * ld + lane / 16 * 8;
}

// column_at: see row_at.
static __device__ inline int column_at(int lane, int ld)
{
    return (lane / 16 * 8 + lane % 8) * ld + lane / 8 % 2 * 8;
}

// accumulator_pack: columns 0-15 of a 16x16 product, two accumulators of mma, as an a of mma.
static __device__ inline uint4 accumulator_pack(const float c[2][4])
{
    return {pack2(c[0][0], c[0][1]), pack2(c[0][2], c[0][3]), pack2(c[1][0], c[1][1]),
            pack2(c[1][2], c[1][3])};
}
#endif

// row_of_warp: the number of this warp's row, for kernels that give a row to a warp.
static __device__ inline size_t row_of_warp(void)
{
    return blockIdx.x * (size_t)ROW_WARPS + threadIdx.x / WARP;
}

// LAUNCH_ROWS: a kernel that gives each of `rows` rows of n elements to a warp. Where n is a common
// number it is a constant there (else 0): the loops over the row unroll, and its loads fly
// together.
#define LAUNCH_ROWS(kernel, rows, n, stream, ...) \
    do { \
        const size_t grid_ = ((rows) + ROW_WARPS - 1) / ROW_WARPS; \
        if ((n) == 192) \
            LAUNCH(kernel<192>, grid_, ROW_WARPS * WARP, 0, stream, __VA_ARGS__); \
        else if ((n) == 768) \
            LAUNCH(kernel<768>, grid_, ROW_WARPS * WARP, 0, stream, __VA_ARGS__); \
        else \
            LAUNCH(kernel<0>, grid_, ROW_WARPS * WARP, 0, stream, __VA_ARGS__); \
    } while (0)

// WITH_FLAG: the statement with NAME as a constant 0 or 1, for kernels that have it as a template.
#define WITH_FLAG(NAME, flag, ...) \
    do { \
        if (flag) { enum { NAME = 1 }; __VA_ARGS__; } \
        else { enum { NAME = 0 }; __VA_ARGS__; } \
    } while (0)

#define EPS 1e-8f
#define LN2 0.6931471805599453f
#define LOG2E 1.4426950408889634f

typedef struct {
    float mean, rstd;
} Moments;

// row_moments: mean and 1/sqrt(biased variance + eps) of x (n), by a warp. The mean is taken about
// x[0], so that a constant row has variance exactly 0. WIDTH: n where it is a constant, else 0.
// VEC: elements of a load, which divide n.
template <typename X, int WIDTH, int VEC = 1>
static __device__ inline Moments row_moments(const X *x, int size, float eps)
{
    typedef Pack<X, VEC> Each;
    const int lane = threadIdx.x % WARP, n = WIDTH ? WIDTH : size;
    float first = (float)x[0], sum = 0, squares = 0;
#pragma unroll
    for (int i = lane; i < n / VEC; i += WARP)
        for (int k = 0; k < VEC; k++)
            sum += (float)((const Each *)x)[i].v[k] - first;
    const float mean = first + warp_sum(sum) / (float)n;
#pragma unroll
    for (int i = lane; i < n / VEC; i += WARP)
        for (int k = 0; k < VEC; k++) {
            const float d = (float)((const Each *)x)[i].v[k] - mean;
            squares += d * d;
        }
    return {mean, rsqrtf(warp_sum(squares) / (float)n + eps)};
}

// A part of a row of logits: the largest, of equals the lowest index, sum of exp(logit - top).
typedef struct {
    float top, sum;
    int best;
} Peak;

// peak_of_warp: the Peak of all lanes' parts together, to all of them.
static __device__ inline Peak peak_of_warp(Peak a)
{
    for (int i = WARP / 2; i > 0; i /= 2) {
        const Peak b = {__shfl_xor_sync(~0u, a.top, i), __shfl_xor_sync(~0u, a.sum, i),
                        __shfl_xor_sync(~0u, a.best, i)};
        const Peak high = b.top > a.top || (b.top == a.top && b.best < a.best) ? b : a;
        a.sum = a.sum > 0 ? a.sum * exp2_fast(LOG2E * (a.top - high.top)) : a.sum;
        a.sum += b.sum > 0 ? b.sum * exp2_fast(LOG2E * (b.top - high.top)) : b.sum;
        a = {high.top, a.sum, high.best};
    }
    return a;
}

#endif
