// logcumsumexp.cu: y_t = log(sum over s<=t of exp(x_s)) along T of (B,T,D), fp32, and its gradient.
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp -o lcse
//          dev/cumsum/logcumsumexp.cu     (one line), then ./lcse
//
// Bytes: forward 8 B T D; backward (dy, x, y read, dx written) 16 B T D.
// GB/s (% of copy) on an H200, 2026-11-29, (320,258,192) / (8,4096,1024) / (1,65536,1024):
//   forward: a copy of as many bytes                     4109 / 4192 / 4268
//   1  a thread a channel                                1067 (26%) /  161 (4%) /   21 (0%)
//   2  one pass as cumsum.cu 5, pairs, 272-row tiles     2656 (65%) / 2594 (62%) / 2838 (66%)
//   3  2 with tiles of 144 rows, 3 blocks, not 2         2578 (63%) / 2994 (71%) / 3026 (71%)
//   4  one exp an element, 144 rows, next tile in flight 1408 (34%) / 2573 (61%) / 2949 (69%)
//   5  the same, 272 rows                                 708 (17%) / 1296 (31%) / 1507 (35%)
//   6  5 without the next tile in flight                 not measured yet
//   backward: a copy of as many bytes                    4236 / 4278 / 4263
//   1  a thread a channel                                1752 (41%) /  281 (7%) /   37 (1%)
//   2  one pass, tiles of 96 rows, 2 blocks              3617 (85%) / 3771 (88%) / 3839 (90%)
//   3  one pass, tiles of 64 rows, 3 blocks              2944 (70%) / 3456 (81%) / 3544 (83%)
// Forward 3 and backward 2 win so far. torch.logcumsumexp takes 2.9, 23 and 182 times as long as 3.
// 2, 3: three exponentials or logarithms an element, about 30 instructions. 4, 5 were timed on
// run_shape's harsh values, where nearly every warp has a row that jumps and adds its rows as pairs
// after all; timing now takes plain values. Backward 3: more tiles, each with its polls. 2
// exponentials an element both.
//
// A sum is a pair (m, s), worth s exp(m), with m the largest x so far and 1 <= s <= T: adding an x
// costs one exponential, whichever of the two is larger, and reading the value one logarithm. A
// base-2 split into integer and fraction (not tried) would save the second exponential of a tile's
// rows, but log(1) = 0 then no longer makes y = x exact where one term dominates, which the
// gradient's exact zeros rest on. Not finite: an empty sum has m = -FLT_MAX, not -inf, so no (-inf)
// - (-inf) arises; +inf and NaN live in m, whose maximum keeps NaN. -inf prefix -> -inf; after
// +inf: +inf; after NaN: NaN. Gradient: R_t = dy_t + exp(y_t - y_t+1) R_t+1, dx_t = exp(x_t - y_t)
// R_t, every exponent <= 0. A term that is -inf gets 0; among several +inf, each counts as 1 in the
// sums after it (there is no right value).
#include "chain.cuh"
#include <float.h>

typedef struct {
    float *y, *hT;       // forward: (B,T,D), (B,D) or NULL
    float *dx;           // backward: (B,T,D)
    const float *x, *h0; // (B,T,D), (B,D) or NULL = -inf
    const float *dy;     // backward: (B,T,D); y is then read
    size_t B, T, D;
    int reverse; // sums run from T-1 down to 0
    Word *work;  // work_bytes(B,T,D)
} Lcse;

enum { GROUP = 16 };

static size_t work_bytes(size_t B, size_t T, size_t D)
{
    return 16 * size_mul(size_mul(B, T / 32 + 2, "work"), D, "work"); // a tile has 32 rows or more
}

// ---- reference, in double ----

// lcse_ref_forward: y (B,T,D) =, hT (B,D) = from x, h0 (or NULL), not finite values included.
static void lcse_ref_forward(double *y, double *hT, const float *x, const float *h0, size_t B,
                             size_t T, size_t D, int reverse)
{
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
        for (size_t d = 0; d < D; d++) {
            double l = h0 ? h0[b * D + d] : -INFINITY;
            for (size_t i = 0; i < T; i++) {
                size_t at = (b * T + (reverse ? T - 1 - i : i)) * D + d;
                double v = x[at], hi = fmax(l, v), lo = fmin(l, v);
                if (isnan(l) || isnan(v))
                    l = NAN;
                else
                    l = isinf(hi) ? hi : hi + log1p(exp(lo - hi));
                y[at] = l;
            }
            hT[b * D + d] = l;
        }
}

// lcse_ref_backward: dx (B,T,D) = from dy, x and y (as the kernels get it, fp32).
static void lcse_ref_backward(double *dx, const float *dy, const float *x, const float *y, size_t B,
                              size_t T, size_t D, int reverse)
{
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
        for (size_t d = 0; d < D; d++) {
            double R = 0, later = 0;
            for (size_t i = 0; i < T; i++) {
                size_t at = (b * T + (reverse ? i : T - 1 - i)) * D + d;
                double l = y[at], v = x[at];
                R = dy[at] + (i == 0 || l == -INFINITY ? 0 : exp(l - later) * R);
                dx[at] = v == -INFINITY ? 0 : exp(v - l) * R;
                later = l;
            }
        }
}

// ---- pairs ----

typedef struct {
    float m, s; // s exp(m)
} Pair;

static __device__ __forceinline__ Pair pair_empty(void) { return {-FLT_MAX, 0}; }

// max_nan: the larger, NaN if either is (fmaxf would drop it).
static __device__ __forceinline__ float max_nan(float a, float b)
{
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// exp_fast: exp(x) for x <= 0, off by 2 ulp and by 6e-8 |x| relative: at most 2e-7 of the sum it
// goes into; 0 below 2^-126. log_fast: off by 2^-22 near 1, exact at 1, 2 ulp elsewhere; -inf at 0.
static __device__ __forceinline__ float exp_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

static __device__ __forceinline__ float log_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.6931471805599453f;
}

// exp_below: exp(a - b) for a <= b, 1 for a = b = +-inf.
static __device__ __forceinline__ float exp_below(float a, float b)
{
    return a == b ? 1 : exp_fast(a - b);
}

static __device__ __forceinline__ Pair pair_add(Pair p, float x)
{
    float m = max_nan(p.m, x), e = exp_below(fminf(p.m, x), m);
    return {m, x > p.m ? fmaf(p.s, e, 1) : p.s + e};
}

static __device__ __forceinline__ Pair pair_join(Pair a, Pair b)
{
    float m = max_nan(a.m, b.m);
    return {m, a.s * exp_below(a.m, m) + b.s * exp_below(b.m, m)};
}

static __device__ __forceinline__ float pair_log(Pair p) { return p.m + log_fast(p.s); }

// ---- forward ----

// walk_kernel: one thread a channel.
static __global__ void walk_kernel(float *y, float *hT, const float *x, const float *h0, size_t B,
                                   size_t T, size_t D, int reverse)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= B * D)
        return;
    size_t at = (i / D * T + (reverse ? T - 1 : 0)) * D + i % D;
    ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    Pair p = h0 ? pair_add(pair_empty(), h0[i]) : pair_empty();
    for (size_t t = 0; t < T; t++, at += step) {
        p = pair_add(p, x[at]);
        y[at] = pair_log(p);
    }
    if (hT)
        hT[i] = pair_log(p);
}

static int empty(const Lcse *p) { return p->B == 0 || p->T == 0 || p->D == 0; }

static unsigned blocks_for(size_t threads)
{
    size_t n = (threads + 127) / 128;
    if (n > INT32_MAX)
        die(EXIT_MEMORY, "logcumsumexp: %zu blocks, expected at most 2^31 - 1", n);
    return (unsigned)n;
}

static void forward1(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    if (empty(p))
        return;
    walk_kernel<<<blocks_for(p->B * p->D), 128, 0, stream>>>(p->y, p->hT, p->x, p->h0, p->B, p->T,
                                                             p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

// chain_kernel: y (B,T,D) =, hT (B,D) = (or NULL) from x, h0; the walk of cumsum.cu's chain_kernel
// over pairs. sums (B,NT,D), carries (B,NG,D): words, empty at the start (unused if NT is 1).
template <int VEC, int LX, int ROWS, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    chain_kernel(float *y, float *hT, Word *sums, Word *carries, const float *x, const float *h0,
                 size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX, PARTS = THREADS / W, EACH = GROUP / PARTS;
    __shared__ Pair total[HIGH][W], before[HIGH][W], part[PARTS][W], carry[W];
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC; // place in the tile
    const int q = threadIdx.x / W, cw = threadIdx.x % W;        // place in its sums
    const ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        unsigned k = tile / (B * tl.NC), b = tile / tl.NC % B;
        size_t c0 = (size_t)(tile % tl.NC) * W, t0 = ((size_t)k * HIGH + g) * tl.rows;
        int rows = c0 + w >= D || t0 >= T ? 0 : T - t0 < (size_t)tl.rows ? (int)(T - t0) : tl.rows;
        size_t first = (b * T + (reverse ? T - 1 - t0 : t0)) * D + c0 + w; // used only if rows > 0
        float v[ROWS][VEC];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < VEC; c++)
                v[r][c] = -INFINITY;
            if (r < rows)
                load(v[r], x + first + r * step);
        }
        for (int c = 0; c < VEC;
             c++) { // the thread's total: the maximum first, then independent terms
            Pair p = pair_empty();
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                p.m = max_nan(p.m, v[r][c]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                p.s += exp_below(v[r][c], p.m);
            total[g][w + c] = p;
        }
        __syncthreads();
        Pair sum = pair_empty(); // of the tile, in the threads q = 0
        int own = cw + c0 < D;
        if (q == 0) {
#pragma unroll
            for (int i = 0; i < HIGH; i++) {
                before[i][cw] = sum;
                sum = pair_join(sum, total[i][cw]);
            }
            if (tl.NT > 1 && own)
                word_put(&sums[((size_t)b * tl.NT + k) * D + c0 + cw], sum);
        }
        unsigned k0 = k / GROUP * GROUP + q * EACH;
        int count = own && k > k0 ? k - k0 < EACH ? (int)(k - k0) : EACH : 0;
        Pair s = pair_empty(), earlier[EACH]; // EACH earlier tiles of the group
        words_wait(earlier, &sums[((size_t)b * tl.NT + k0) * D + c0 + cw], D, count, pair_empty());
        for (int i = 0; i < EACH; i++)
            s = pair_join(s, earlier[i]);
        part[q][cw] = s;
        __syncthreads();
        if (q == 0 && own) {
            unsigned G = k / GROUP;
            size_t at = (size_t)b * D + c0 + cw;
            s = G    ? word_wait<Pair>(&carries[((size_t)b * tl.NG + G) * D + c0 + cw])
                : h0 ? pair_add(pair_empty(), h0[at])
                     : pair_empty();
            for (int i = 0; i < PARTS; i++)
                s = pair_join(s, part[i][cw]);
            carry[cw] = s;
            sum = pair_join(s, sum);
            if (k % GROUP == GROUP - 1 && k + 1 < tl.NT)
                word_put(&carries[((size_t)b * tl.NG + G + 1) * D + c0 + cw], sum);
            if (hT && k + 1 == tl.NT)
                hT[at] = pair_log(sum);
        }
        __syncthreads();
        for (int c = 0; c < VEC; c++) {
            Pair p = pair_join(carry[w + c], before[g][w + c]);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                p = pair_add(p, v[r][c]);
                v[r][c] = pair_log(p);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows)
                store(y + first + r * step, v[r]);
    }
}

// stream_kernel: as chain_kernel, with one exponential and one logarithm an element. A thread takes
// all its terms relative to its own largest x, once; what comes before enters as A, out = M + log(A
// + S_r B). That is as exact as pairs while the running sum spans less than e^80 within the
// thread's rows (fp32 has e^-87 to spare), which its first row tells; otherwise (jumps, leading
// -inf, +inf, NaN) the rows are added as pairs after all. ASYNC: the next tile is on its way to
// shared memory meanwhile. y must not alias x.
template <int VEC, int LX, int ROWS, int BLOCKS, int ASYNC>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    stream_kernel(float *y, float *hT, Word *sums, Word *carries, const float *x, const float *h0,
                  size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX, PARTS = THREADS / W, EACH = GROUP / PARTS;
    extern __shared__ float4 dynamic[];
    __shared__ Pair total[HIGH][W], before[HIGH][W], part[PARTS][W], carry[W];
    float *next = (float *)dynamic + threadIdx.x * VEC;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC; // place in the tile
    const int q = threadIdx.x / W, cw = threadIdx.x % W;        // place in its sums
    const ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    auto fetch = [&](unsigned tile) {
        Place p = place(tile, g, w, W, HIGH, B, T, D, reverse, tl);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < p.rows)
                copy_async<VEC>(next + r * THREADS * VEC, x + p.first + r * step);
    };
    if (ASYNC)
        fetch(blockIdx.x);
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        const Place p = place(tile, g, w, W, HIGH, B, T, D, reverse, tl);
        float v[ROWS][VEC], x0[VEC], top[VEC];
        if (ASYNC)
            copies_wait();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < VEC; c++)
                v[r][c] = -INFINITY;
            if (r < p.rows)
                load(v[r], ASYNC ? next + r * THREADS * VEC : x + p.first + r * step);
        }
        if (ASYNC && tile + gridDim.x < tl.tiles)
            fetch(tile + gridDim.x);
        for (int c = 0; c < VEC; c++) {
            float sum = 0;
            x0[c] = v[0][c];
            top[c] = -FLT_MAX;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                top[c] = max_nan(top[c], v[r][c]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                v[r][c] = sum += exp_fast(v[r][c] - top[c]);
            total[g][w + c] = {top[c], top[c] == INFINITY ? 1 : sum}; // sum is NaN then: inf - inf
        }
        __syncthreads();
        Pair sum = pair_empty(); // of the tile, in the threads q = 0
        const size_t c = p.c0 + cw;
        const int own = c < D;
        if (q == 0) {
#pragma unroll
            for (int i = 0; i < HIGH; i++) {
                before[i][cw] = sum;
                sum = pair_join(sum, total[i][cw]);
            }
            if (tl.NT > 1 && own)
                word_put(&sums[((size_t)p.b * tl.NT + p.k) * D + c], sum);
        }
        unsigned k0 = p.k / GROUP * GROUP + q * EACH;
        int count = own && p.k > k0 ? p.k - k0 < EACH ? (int)(p.k - k0) : EACH : 0;
        Pair s = pair_empty(), earlier[EACH];
        words_wait(earlier, &sums[((size_t)p.b * tl.NT + k0) * D + c], D, count, pair_empty());
        for (int i = 0; i < EACH; i++)
            s = pair_join(s, earlier[i]);
        part[q][cw] = s;
        __syncthreads();
        if (q == 0 && own) {
            unsigned G = p.k / GROUP;
            size_t at = (size_t)p.b * D + c;
            s = G    ? word_wait<Pair>(&carries[((size_t)p.b * tl.NG + G) * D + c])
                : h0 ? pair_add(pair_empty(), h0[at])
                     : pair_empty();
            for (int i = 0; i < PARTS; i++)
                s = pair_join(s, part[i][cw]);
            carry[cw] = s;
            sum = pair_join(s, sum);
            if (p.k % GROUP == GROUP - 1 && p.k + 1 < tl.NT)
                word_put(&carries[((size_t)p.b * tl.NG + G + 1) * D + c], sum);
            if (hT && p.k + 1 == tl.NT)
                hT[at] = pair_log(sum);
        }
        __syncthreads();
        for (int c = 0; c < VEC; c++) {
            Pair in = pair_join(carry[w + c], before[g][w + c]);
            float M = max_nan(in.m, top[c]), low = fmaxf(in.m, x0[c]);
            if (M - low <= 80 || p.rows == 0) { // false for NaN
                float A = in.s * exp_fast(in.m - M), scale = exp_fast(top[c] - M);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    v[r][c] = M + log_fast(fmaf(v[r][c], scale, A));
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (r < p.rows) {
                        in = pair_add(in, x[p.first + c + r * step]);
                        v[r][c] = pair_log(in);
                    }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < p.rows)
                store(y + p.first + r * step, v[r]);
    }
}

// scan_launch: clear the words and launch a one-pass kernel of either direction (`vec`: with
// 16-byte accesses). smem: bytes of dynamic shared memory.
static void scan_launch(const Lcse *p, const void *kernel, int vec, int max_rows, size_t smem,
                        float *out, float *hT, const float *in0, const float *in1, const float *in2,
                        cudaStream_t stream)
{
    if (empty(p))
        return;
    Tiling t = tiling(p->B, p->T, p->D, vec ? 16 : 32, vec ? 4 : 1, max_rows, GROUP);
    size_t n = p->B * t.NT * p->D, m = p->B * t.NG * p->D, T = p->T, D = p->D;
    unsigned B = (unsigned)p->B;
    int reverse = p->reverse;
    Word *sums = p->work, *carries = sums + n;
    if (t.single_pass)
        CUDA_CHECK(cudaMemsetAsync(p->work, 0xFF, 8 * (n + m), stream));
    bench_fits(kernel, "logcumsumexp one pass", THREADS, smem);
    void *forward[] = {&out, &hT, &sums, &carries, &in0, &in1, &T, &D, &B, &reverse, &t};
    void *backward[] = {&out, &sums, &carries, &in0, &in1, &in2, &T, &D, &B, &reverse, &t};
    CUDA_CHECK(cudaLaunchKernel(kernel, tiling_grid(&t, kernel, smem), THREADS,
                                in2 ? backward : forward, smem, stream));
}

template <int ROWS, int BLOCKS>
static void forward_chain(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->y, p->x, p->hT, p->h0);
    const void *kernel = vec ? (const void *)chain_kernel<4, 16, ROWS, BLOCKS>
                             : (const void *)chain_kernel<1, 32, ROWS, BLOCKS>;
    scan_launch(p, kernel, vec, ROWS, 0, p->y, p->hT, p->x, p->h0, NULL, stream);
}

template <int ROWS, int BLOCKS, int ASYNC>
static void forward_stream(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->y, p->x, p->hT, p->h0);
    const void *kernel = vec ? (const void *)stream_kernel<4, 16, ROWS, BLOCKS, ASYNC>
                             : (const void *)stream_kernel<1, 32, ROWS, BLOCKS, ASYNC>;
    size_t smem = ASYNC ? (vec ? 16 : 4) * ROWS * THREADS : 0;
    scan_launch(p, kernel, vec, ROWS, smem, p->y, p->hT, p->x, p->h0, NULL, stream);
}

// ---- backward ----

// finite: x brought into [-FLT_MAX, FLT_MAX]; NaN stays. With y so limited, and x from above, no
// difference is inf - inf: exp(x - y) is 0 for x = -inf and 1 for x = y = inf. Between two y = -inf
// it is 1 instead of 0, which no x sees: theirs are all -inf.
static __device__ __forceinline__ float finite_above(float x)
{
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(FLT_MAX));
    return x;
}

static __device__ __forceinline__ float finite(float x)
{
    return max_nan(finite_above(x), -FLT_MAX);
}

static __global__ void walk_backward_kernel(float *dx, const float *dy, const float *x,
                                            const float *y, size_t B, size_t T, size_t D,
                                            int reverse)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= B * D)
        return;
    size_t at = (i / D * T + (reverse ? 0 : T - 1)) * D + i % D;
    ptrdiff_t step = reverse ? (ptrdiff_t)D : -(ptrdiff_t)D;
    float R = 0, later = FLT_MAX;
    for (size_t t = 0; t < T; t++, at += step) {
        float now = finite(y[at]);
        R = fmaf(exp_fast(now - later), R, dy[at]); // at the first, R is 0
        later = now;
        dx[at] = exp_fast(finite_above(x[at]) - now) * R;
    }
}

static void backward1(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    if (empty(p))
        return;
    walk_backward_kernel<<<blocks_for(p->B * p->D), 128, 0, stream>>>(p->dx, p->dy, p->x, p->y,
                                                                      p->B, p->T, p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

typedef struct {
    float a, r; // R becomes a R + r
} Affine;

static __device__ __forceinline__ Affine affine_join(Affine first, Affine second)
{
    return {first.a * second.a, fmaf(second.a, first.r, second.r)};
}

// chain_backward_kernel: dx (B,T,D) = from dy, x, y. Positions count from the last time of the
// forward sum. The scan R = dy + c R with c = exp(y - later y) is joined like the pairs, as maps R
// -> a R + r.
template <int VEC, int LX, int ROWS, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    chain_backward_kernel(float *dx, Word *sums, Word *carries, const float *dy, const float *x,
                          const float *y, size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX, PARTS = THREADS / W, EACH = GROUP / PARTS;
    __shared__ Affine total[HIGH][W], before[HIGH][W], part[PARTS][W];
    __shared__ float carry[W];
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC;
    const int q = threadIdx.x / W, cw = threadIdx.x % W;
    const ptrdiff_t step = reverse ? (ptrdiff_t)D : -(ptrdiff_t)D;
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        unsigned k = tile / (B * tl.NC), b = tile / tl.NC % B;
        size_t c0 = (size_t)(tile % tl.NC) * W, t0 = ((size_t)k * HIGH + g) * tl.rows;
        int rows = c0 + w >= D || t0 >= T ? 0 : T - t0 < (size_t)tl.rows ? (int)(T - t0) : tl.rows;
        size_t first = (b * T + (reverse ? t0 : T - 1 - t0)) * D + c0 + w; // used only if rows > 0
        float r[ROWS][VEC], e[ROWS][VEC], c[ROWS][VEC],
            later[VEC]; // dy; x, its share; y, the coefficient
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < VEC; j++)
                r[i][j] = e[i][j] = c[i][j] = 0;
            if (i < rows) {
                load(r[i], dy + first + i * step);
                load(e[i], x + first + i * step);
                load(c[i], y + first + i * step);
            }
        }
        for (int j = 0; j < VEC; j++)
            later[j] = FLT_MAX; // at the first position, where R is 0
        if (rows && t0)
            load(later, y + first - step);
        for (int j = 0; j < VEC; j++) {
            Affine p = {1, 0};
            later[j] = finite(later[j]);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                float now = finite(c[i][j]);
                e[i][j] = exp_fast(finite_above(e[i][j]) - now);
                c[i][j] = i < rows ? exp_fast(now - later[j]) : 1;
                later[j] = now;
                p = affine_join(p, {c[i][j], r[i][j]});
            }
            total[g][w + j] = p;
        }
        __syncthreads();
        Affine sum = {1, 0};
        int own = cw + c0 < D;
        if (q == 0) {
#pragma unroll
            for (int i = 0; i < HIGH; i++) {
                before[i][cw] = sum;
                sum = affine_join(sum, total[i][cw]);
            }
            if (tl.NT > 1 && own)
                word_put(&sums[((size_t)b * tl.NT + k) * D + c0 + cw], sum);
        }
        unsigned k0 = k / GROUP * GROUP + q * EACH;
        int count = own && k > k0 ? k - k0 < EACH ? (int)(k - k0) : EACH : 0;
        Affine s = {1, 0}, earlier[EACH];
        words_wait(earlier, &sums[((size_t)b * tl.NT + k0) * D + c0 + cw], D, count, s);
        for (int i = 0; i < EACH; i++)
            s = affine_join(s, earlier[i]);
        part[q][cw] = s;
        __syncthreads();
        if (q == 0 && own) {
            unsigned G = k / GROUP;
            s = G ? word_wait<Affine>(&carries[((size_t)b * tl.NG + G) * D + c0 + cw])
                  : Affine{0, 0};
            for (int i = 0; i < PARTS; i++)
                s = affine_join(s, part[i][cw]);
            carry[cw] = s.r;
            if (k % GROUP == GROUP - 1 && k + 1 < tl.NT)
                word_put(&carries[((size_t)b * tl.NG + G + 1) * D + c0 + cw], affine_join(s, sum));
        }
        __syncthreads();
        for (int j = 0; j < VEC; j++) {
            Affine in = before[g][w + j];
            float R = fmaf(in.a, carry[w + j], in.r);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                R = fmaf(c[i][j], R, r[i][j]);
                r[i][j] = e[i][j] * R;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (i < rows)
                store(dx + first + i * step, r[i]);
    }
}

template <int ROWS, int BLOCKS>
static void backward_chain(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->dx, p->dy, p->x, p->y);
    const void *kernel = vec ? (const void *)chain_backward_kernel<4, 16, ROWS, BLOCKS>
                             : (const void *)chain_backward_kernel<1, 32, ROWS, BLOCKS>;
    scan_launch(p, kernel, vec, ROWS, 0, p->dx, NULL, p->dy, p->x, p->y, stream);
}

// ---- main ----

enum { NUM_FORWARD = 6, NUM_BACKWARD = 3 };

static const BenchKernel forward_kernels[NUM_FORWARD] = {
    {1, "thread a channel", forward1, NULL},
    {2, "one pass, 272 rows", forward_chain<17, 2>, NULL},
    {3, "one pass, 144 rows", forward_chain<9, 3>, NULL},
    {4, "one exp a row, next tile, 144 rows", forward_stream<9, 3, 1>, NULL},
    {5, "one exp a row, next tile, 272 rows", forward_stream<17, 2, 1>, NULL},
    {6, "one exp a row, 272 rows", forward_stream<17, 2, 0>, NULL},
};

static const BenchKernel backward_kernels[NUM_BACKWARD] = {
    {1, "thread a channel", backward1, NULL},
    {2, "one pass, 96 rows", backward_chain<6, 2>, NULL},
    {3, "one pass, 64 rows", backward_chain<4, 3>, NULL},
};

// run_shape: forward and backward of one shape, all kernels. state: with h0 and hT. harsh: a tenth
// of x is -inf and one in 200 jumps by up to 200; otherwise x is in [-3, 3). Returns the failures.
static int run_shape(size_t B, size_t T, size_t D, int reverse, int state, int harsh, size_t shift,
                     const BenchOptions *opt)
{
    size_t n = B * T * D, m = B * D;
    char name[2][128];
    float *h_x = (float *)alloc_zero(n, 4, "x"), *h_dy = (float *)alloc_zero(n, 4, "dy");
    float *h_h0 = (float *)alloc_zero(m, 4, "h0"), *h_y = (float *)alloc_zero(n, 4, "y");
    double *ref = (double *)alloc_zero(n, 8, "reference"),
           *ref_hT = (double *)alloc_zero(m, 8, "hT");
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        float u = bench_uniform(1 + T, i);
        size_t t = i / D % T; // the first is finite, so that y is: compare() takes no infinities
        int first = t == (reverse ? T - 1 : 0);
        h_x[i] = 6 * u - 3;
        if (harsh && (u < .1f || u > .995f) && !first)
            h_x[i] = u < .1f ? -INFINITY : 4e4f * (u - .995f);
        h_dy[i] = 2 * bench_uniform(7, i) - 1;
    }
    for (size_t i = 0; i < m; i++)
        h_h0[i] = 3 * bench_uniform(2, i);
    lcse_ref_forward(ref, ref_hT, h_x, state ? h_h0 : NULL, B, T, D, reverse);
    BenchBuffer x = bench_alloc(n, BENCH_F32, shift), h0 = bench_alloc(m, BENCH_F32, 0);
    BenchBuffer y = bench_alloc(n, BENCH_F32, shift), hT = bench_alloc(m, BENCH_F32, 0);
    BenchBuffer dy = bench_alloc(n, BENCH_F32, shift), dx = bench_alloc(n, BENCH_F32, shift);
    BenchBuffer work = bench_alloc(work_bytes(B, T, D) / 4, BENCH_F32, 0);
    bench_upload(&x, BENCH_F32, h_x, n);
    bench_upload(&dy, BENCH_F32, h_dy, n);
    bench_upload(&h0, BENCH_F32, h_h0, m);
    Lcse p = {(float *)y.data,
              state ? (float *)hT.data : NULL,
              (float *)dx.data,
              (const float *)x.data,
              state ? (const float *)h0.data : NULL,
              (const float *)dy.data,
              B,
              T,
              D,
              reverse,
              (Word *)work.data};
    for (int i = 0; i < 2; i++)
        snprintf(name[i], sizeof name[i], "logcumsumexp %s(%zu,%zu,%zu) %s", i ? "backward " : "",
                 B, T, D, reverse ? "reverse" : "forward");
    BenchOutput outputs[] = {{"y", &y, BENCH_F32, n, ref, 1e-6},
                             {"hT", &hT, BENCH_F32, m, ref_hT, 1e-6}};
    BenchCase c = {name[0],         &p,      forward_kernels,
                   NUM_FORWARD,     outputs, state ? 2 : 1,
                   8.0 * (double)n, 0,       "GB"};
    int failed = bench_case(&c, opt);
    for (size_t i = 0; i < n; i++)
        h_y[i] = (float)ref[i];
    bench_upload(&y, BENCH_F32, h_y, n);
    lcse_ref_backward(ref, h_dy, h_x, h_y, B, T, D, reverse);
    BenchOutput grads[] = {{"dx", &dx, BENCH_F32, n, ref, 1e-5}};
    BenchCase cb = {name[1], &p,  backward_kernels, NUM_BACKWARD, grads, 1, 16.0 * (double)n,
                    0,       "GB"};
    failed += bench_case(&cb, opt);
    if (!bench_guards(&work))
        failed++, printf("  FAILED: wrote outside the scratch memory\n");
    bench_free(&x), bench_free(&h0), bench_free(&y), bench_free(&hT), bench_free(&dy),
        bench_free(&dx);
    bench_free(&work);
    free(h_x), free(h_dy), free(h_h0), free(h_y), free(ref), free(ref_hT);
    return failed;
}

static int alike(double got, double want, double tolerance)
{
    return isnan(want) ? isnan(got) : got == want || fabs(got - want) <= tolerance;
}

// run_special: x (T of n, then `after` times its last value), behind `pad` times -inf, in every
// channel of D: y as `want` (n) within 1e-4, -inf before it; and, if dx is given (n), the gradient
// of sum y exactly that, 0 before it. Returns the failures.
static int run_special(const float *x, const float *want, const float *dx, size_t n, size_t pad,
                       size_t after, size_t D)
{
    size_t T = pad + n + after, N = T * D;
    int failed = 0;
    float *h_x = (float *)alloc_zero(N, 4, "x"), *h_one = (float *)alloc_zero(N, 4, "dy");
    float *h_got = (float *)alloc_zero(N, 4, "got");
    double *ref = (double *)alloc_zero(N, 8, "y"), *hT = (double *)alloc_zero(D, 8, "hT");
    for (size_t i = 0; i < N; i++) {
        size_t t = i / D;
        h_x[i] = t < pad ? -INFINITY : x[t - pad < n ? t - pad : n - 1];
        h_one[i] = 1;
    }
    lcse_ref_forward(ref, hT, h_x, NULL, 1, T, D, 0);
    for (size_t t = 0; t < n; t++)
        failed += !alike(ref[(pad + t) * D], want[t], 1e-4);
    BenchBuffer bx = bench_alloc(N, BENCH_F32, 0), by = bench_alloc(N, BENCH_F32, 0);
    BenchBuffer bdy = bench_alloc(N, BENCH_F32, 0), bdx = bench_alloc(N, BENCH_F32, 0);
    BenchBuffer work = bench_alloc(work_bytes(1, T, D) / 4, BENCH_F32, 0);
    bench_upload(&bx, BENCH_F32, h_x, N);
    bench_upload(&bdy, BENCH_F32, h_one, N);
    Lcse p = {(float *)by.data,
              NULL,
              (float *)bdx.data,
              (const float *)bx.data,
              NULL,
              (const float *)bdy.data,
              1,
              T,
              D,
              0,
              (Word *)work.data};
    for (int k = 0; k < NUM_FORWARD; k++) {
        forward_kernels[k].fn(&p, 0);
        CUDA_CHECK(cudaMemcpy(h_got, by.data, N * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < N; i++)
            if (!alike(h_got[i], ref[i], 1e-4) && ++failed == 1)
                printf("  forward %d: at %zu got %g, expected %g\n", k + 1, i, h_got[i], ref[i]);
    }
    for (int k = 0; k < NUM_BACKWARD && dx; k++) {
        backward_kernels[k].fn(&p, 0);
        CUDA_CHECK(cudaMemcpy(h_got, bdx.data, N * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < N; i++) {
            float exact = i / D < pad ? 0 : dx[i / D - pad];
            if (h_got[i] != exact && ++failed == 1)
                printf("  backward %d: at %zu got %g, expected %g\n", k + 1, i, h_got[i], exact);
        }
    }
    bench_free(&bx), bench_free(&by), bench_free(&bdy), bench_free(&bdx), bench_free(&work);
    free(h_x), free(h_one), free(h_got), free(ref), free(hT);
    return failed;
}

// run_checks: values that are not finite (cases A01-A03), small and awkward shapes. Returns the
// failures.
static int run_checks(const BenchOptions *opt)
{
    const float I = INFINITY;
    const float a01[2][7] = {{2, -I, -I, 1, -I, -I, 3}, {2, 1, -I, 1, -I, -I, 3}};
    const float y01[2][7] = {{2, 2, 2, 2.3133f, 2.3133f, 2.3133f, 3.4076f},
                             {2, 2.3133f, 2.3133f, 2.5514f, 2.5514f, 2.5514f, 3.4938f}};
    const float a02[3][4] = {{-I, -I, 0, 1}, {0, NAN, 1, 1}, {0, I, 1, I}};
    const float y02[3][4] = {{-I, -I, 0, 1.3133f}, {0, NAN, NAN, NAN}, {0, I, I, I}};
    const float a03[] = {-I, -I, 2}, y03[] = {-I, -I, 2}, dx03[] = {0, 0, 1};
    static const size_t Ts[] = {1, 2, 31, 32, 33, 1000, 4097, 65536}, Ds[] = {1, 3, 33, 192};
    static const size_t pads[] = {0, 40, 300, 5000};
    int failed = 0, cases = 0;
    BenchOptions o = *opt;
    o.check_only = 1;
    o.self_test = 0;
    for (int i = 0; i < 4; i++)
        for (size_t D = 1; D <= 4; D += 3, cases += 6) {
            for (int j = 0; j < 2; j++)
                failed += run_special(a01[j], y01[j], NULL, 7, pads[i], pads[3 - i], D);
            for (int j = 0; j < 3; j++)
                failed += run_special(a02[j], y02[j], NULL, 4, pads[i], pads[3 - i], D);
            failed += run_special(a03, y03, dx03, 3, pads[i], 0, D);
        }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++)
            for (int reverse = 0; reverse < 2; reverse++, cases++)
                failed += run_shape(1 + (i + j) % 3, Ts[i], Ds[j], reverse, (i + j + reverse) % 2,
                                    (i + j) % 4 > 0, (i + reverse) % 4 ? 0 : 4, &o);
    for (size_t rows = 65535; rows <= 65537; rows++, cases += 2) {
        failed += run_shape(rows, 3, 1, 0, 1, 1, 0, &o);
        failed += run_shape(1, 3, rows, 1, 0, 1, 0, &o);
    }
    printf("logcumsumexp: %d small cases, %d failures\n", cases, failed);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions opt =
        bench_options(argc, argv, "logcumsumexp over T of (B,T,C), fp32, and its gradient");
    static const size_t shapes[][3] = {{320, 258, 192}, {8, 4096, 1024}, {1, 65536, 1024}};
    int failed = 0;
    if (opt.B || opt.T || opt.C)
        return run_shape(opt.B ? opt.B : 1, opt.T ? opt.T : 1, opt.C ? opt.C : 1, 0, 1, 1, 0, &opt)
                   ? EXIT_FAIL
                   : 0;
    if (!opt.time_only)
        failed += run_checks(&opt);
    for (int i = 0; i < 3 && !opt.check_only; i++)
        failed += run_shape(shapes[i][0], shapes[i][1], shapes[i][2], 0, 0, 0, 0, &opt);
    return failed ? EXIT_FAIL : 0;
}
