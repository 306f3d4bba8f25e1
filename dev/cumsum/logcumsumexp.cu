// logcumsumexp.cu: y_t = log(sum over s<=t of exp(x_s)) along T of (B,T,D), fp32, and its gradient.
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp -o lcse
//          dev/cumsum/logcumsumexp.cu     (one line), then ./lcse
//
// Bytes: forward 8 B T D; backward (dy, x, y read, dx written) 16 B T D.
// GB/s (% of copy) on an H200, 2026-11-29, (320,258,192) / (8,4096,1024) / (1,65536,1024):
//   forward: a copy of as many bytes                     3895 / 4087 / 4217
//   1  a thread a channel                                1053 (27%) /  161 (4%) /   21 (0%)
//   2  one pass as cumsum.cu 5, pairs, 272-row tiles     2757 (71%) / 2792 (68%) / 2953 (70%)
//   3  2 with tiles of 144 rows, 3 blocks, not 2         2548 (65%) / 3034 (74%) / 3100 (74%)
//   4  one exp an element, 144 rows, next tile in flight 3084 (79%) / 3422 (84%) / 3317 (79%)
//   5  the same, 272 rows                                3450 (89%) / 3501 (86%) / 3578 (85%)
//   6  5 without the next tile in flight                 3244 (83%) / 3242 (79%) / 3467 (82%)
//   7  one exp, 288 rows of 32 channels, flat            3231 (83%) / 3226 (79%) / 3434 (81%)
//   backward: a copy of as many bytes                    4139 / 4220 / 4234
//   1  a thread a channel                                1732 (42%) /  281 (7%) /   37 (1%)
//   2  one pass, tiles of 96 rows, 2 blocks              3638 (88%) / 3839 (91%) / 3949 (93%)
//   3  one pass, tiles of 64 rows, 3 blocks              3094 (75%) / 3576 (85%) / 3630 (86%)
// Forward 5 and backward 2 are the ones to take. Before their 16-byte stores stayed whole (see
// store in chain.cuh) the one-exp kernels were slower than 3, which had 63 / 71 / 71%;
// torch.logcumsumexp took 2.9, 23 and 182 times as long as 3 then did.
// What an element costs a multiprocessor in cycles, counted by hand: its share of a copy 0.44; 2,
// 3: three exponentials or logarithms 0.19, some 26 instructions 0.20, and the joins; 4 to 7: two
// 0.13, some 14 instructions 0.11. 7 besides: joins read ahead, no bank conflicts, tiles that hold
// all 258 rows of the first shape with three blocks, no wait at the start for cleared words.
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
#include "cases.cuh"
#include "chain.cuh"
#include <float.h>

typedef struct {
    float *y, *hT;       // forward: (B,T,D), (B,D) or NULL
    float *dx;           // backward: (B,T,D)
    const float *x, *h0; // (B,T,D), (B,D) or NULL = -inf
    const float *dy;     // backward: (B,T,D); y is then read
    size_t B, T, D;
    int reverse; // sums run from T-1 down to 0
    Word *work;  // words_bytes(B,T,D,SHORTEST)
} Lcse;

enum { GROUP = 16, SHORTEST = 32 }; // tiles to a group, rows of the shortest tile

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

// pair_join_once: pair_join with one exponential, and one step more from sum to sum.
static __device__ __forceinline__ Pair pair_join_once(Pair a, Pair b)
{
    float m = max_nan(a.m, b.m), e = exp_below(fminf(a.m, b.m), m);
    return {m, a.m < b.m ? fmaf(a.s, e, b.s) : fmaf(b.s, e, a.s)};
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

static void forward1(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    if (empty(p))
        return;
    walk_kernel<<<blocks_for(p->B * p->D), 128, 0, stream>>>(p->y, p->hT, p->x, p->h0, p->B, p->T,
                                                             p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

// pairs_chain: tile_chain for pairs that start from h0 (B,D), or NULL; hT (B,D) =, or NULL.
template <int AHEAD, typename S, typename Join>
static __device__ __forceinline__ void pairs_chain(S &sh, float *hT, Word *sums, Word *carries,
                                                   const Place &p, const float *h0, size_t D,
                                                   const Tiling &tl, Join join)
{
    tile_chain<GROUP, AHEAD>(
        sh, sums, carries, p, D, tl, pair_empty(), join,
        [&](size_t i) { return h0 ? pair_add(pair_empty(), h0[i]) : pair_empty(); },
        [&](size_t i, Pair sum) {
            if (hT)
                hT[i] = pair_log(sum);
        });
}

// chain_kernel: y (B,T,D) =, hT (B,D) = (or NULL) from x, h0; the walk of cumsum.cu's chain_kernel
// over pairs.
template <int VEC, int LX, int ROWS, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    chain_kernel(float *y, float *hT, Word *sums, Word *carries, const float *x, const float *h0,
                 size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX;
    __shared__ Sums<Cells, Pair, Pair, HIGH, W> sh;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC; // place in the tile
    const ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        const Place at = place(tile, g, w, W, HIGH, B, T, D, reverse, tl);
        float v[ROWS][VEC];
        tile_load(v, x + at.first, step, at.rows, -INFINITY);
        for (int c = 0; c < VEC; c++) { // the thread's total: the maximum first, then the terms
            Pair p = pair_empty();
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                p.m = max_nan(p.m, v[r][c]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                p.s += exp_below(v[r][c], p.m);
            sh.total.put(g, w + c, p);
        }
        __syncthreads();
        pairs_chain<1>(sh, hT, sums, carries, at, h0, D, tl,
                       [](Pair a, Pair b) { return pair_join(a, b); });
        for (int c = 0; c < VEC; c++) {
            Pair p = pair_join(sh.carry.get(0, w + c), sh.before.get(g, w + c));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                p = pair_add(p, v[r][c]);
                v[r][c] = pair_log(p);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < at.rows)
                store(y + at.first + r * step, v[r]);
    }
}

// again: y = of the thread's rows, from x again, as pairs after what comes before them.
template <int VEC>
static __device__ __forceinline__ void again(float *y, const float *x, const Pair (&carry)[VEC],
                                             const Pair (&before)[VEC], ptrdiff_t step, int rows)
{
    Pair sum[VEC];
    for (int c = 0; c < VEC; c++)
        sum[c] = pair_join(carry[c], before[c]);
#pragma unroll 4
    for (int r = 0; r < rows; r++) {
        float v[VEC];
        load(v, x + r * step);
        for (int c = 0; c < VEC; c++) {
            sum[c] = pair_add(sum[c], v[c]);
            v[c] = pair_log(sum[c]);
        }
        store(y + r * step, v);
    }
}

// SumsOf: the shared memory of stream_kernel.
template <int FLAT, int HIGH, int W>
struct SumsOf {
    typedef Sums<Cells, Pair, Pair, HIGH, W> Type;
};
template <int HIGH, int W>
struct SumsOf<1, HIGH, W> {
    typedef Sums<Planes, Pair, Pair, HIGH, W> Type;
};

// stream_kernel: as chain_kernel, with one exponential and one logarithm an element. A thread takes
// all its terms relative to its own largest x, once, and sums them: S_r. With everything before
// them in A, relative to M, the larger of the two maxima, y = M + log(A + S_r B). That is as good
// as pairs if the sum is at least 2^-16 of e^M from the thread's first row on: terms that vanish
// (2^-126) do not count, and the logarithm is off by 2^-22 of its value, as for a pair of T = 2^16:
// 4e-6, also where a pair would give x exactly. Otherwise (jumps, leading -inf, +inf, NaN) the
// thread reads its rows again and adds them as pairs. ASYNC: the next tile is on its way to shared
// memory meanwhile. FLAT: shared arrays as Planes, joins with one exponential, and a start while
// the words are still being cleared. y must not alias x.
template <int VEC, int LX, int ROWS, int BLOCKS, int ASYNC, int FLAT>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    stream_kernel(float *y, float *hT, Word *sums, Word *carries, const float *x, const float *h0,
                  size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX;
    extern __shared__ float4 dynamic[];
    __shared__ typename SumsOf<FLAT, HIGH, W>::Type sh;
    float *next = (float *)dynamic + threadIdx.x * VEC;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC; // place in the tile
    const ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    auto fetch = [&](unsigned tile) {
        tile_fetch<VEC, ROWS>(next, x, place(tile, g, w, W, HIGH, B, T, D, reverse, tl), step);
    };
    if (ASYNC)
        fetch(blockIdx.x);
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        const Place p = place(tile, g, w, W, HIGH, B, T, D, reverse, tl);
        float v[ROWS][VEC];
        if (ASYNC)
            copies_wait();
        tile_load(v, ASYNC ? next : x + p.first, ASYNC ? THREADS * VEC : step, p.rows, -INFINITY);
        if (ASYNC && tile + gridDim.x < tl.tiles)
            fetch(tile + gridDim.x);
        Pair own[VEC], carry[VEC], before[VEC];
        for (int c = 0; c < VEC; c++) {
            float sum = 0, top = -FLT_MAX;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                top = max_nan(top, v[r][c]);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                v[r][c] = sum += exp_fast(v[r][c] - top);
            own[c] = {top, top == INFINITY ? 1 : sum}; // sum: inf - inf is NaN
        }
        sh.total.puts(g, w, own);
        if (FLAT && tile == blockIdx.x)
            words_cleared();
        __syncthreads();
        pairs_chain<FLAT ? 8 : 1>(sh, hT, sums, carries, p, h0, D, tl, [](Pair a, Pair b) {
            return FLAT ? pair_join_once(a, b) : pair_join(a, b);
        });
        float M[VEC], A[VEC], scale[VEC];
        int near = 1; // false for NaN
        sh.carry.gets(carry, 0, w);
        sh.before.gets(before, g, w);
        sh.total.gets(own, g, w); // rather than registers held until here
        for (int c = 0; c < VEC; c++) {
            M[c] = max_nan(max_nan(carry[c].m, before[c].m), own[c].m);
            A[c] = carry[c].s * exp_fast(carry[c].m - M[c]) +
                   before[c].s * exp_fast(before[c].m - M[c]);
            scale[c] = exp_fast(own[c].m - M[c]);
            near &= fmaf(v[0][c], scale[c], A[c]) >= 0x1p-16f;
        }
        if (!near) {
            again(y + p.first, x + p.first, carry, before, step, p.rows);
            continue;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < VEC; c++)
                v[r][c] = M[c] + log_fast(fmaf(v[r][c], scale[c], A[c]));
            if (r < p.rows)
                store(y + p.first + r * step, v[r]);
        }
    }
}

// scan_launch: clear the words and launch a one-pass kernel of either direction (`vec`: with
// 16-byte accesses, `lanes` threads side by side). smem: bytes of dynamic shared memory; early: see
// chain_launch.
static void scan_launch(const Lcse *p, const void *kernel, int vec, int lanes, int max_rows,
                        size_t smem, int early, float *out, float *hT, const float *in0,
                        const float *in1, const float *in2, cudaStream_t stream)
{
    if (empty(p))
        return;
    Word *sums, *carries;
    Tiling t = scan_words(&sums, &carries, p->work, p->B, p->T, p->D, lanes, vec ? 4 : 1, max_rows,
                          GROUP, early, stream);
    size_t T = p->T, D = p->D;
    unsigned B = (unsigned)p->B;
    int reverse = p->reverse;
    void *forward[] = {&out, &hT, &sums, &carries, &in0, &in1, &T, &D, &B, &reverse, &t};
    void *backward[] = {&out, &sums, &carries, &in0, &in1, &in2, &T, &D, &B, &reverse, &t};
    chain_launch(kernel, "logcumsumexp one pass", &t, smem, early && t.single_pass,
                 in2 ? backward : forward, stream);
}

template <int ROWS, int BLOCKS>
static void forward_chain(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->y, p->x, p->hT, p->h0);
    const void *kernel = vec ? (const void *)chain_kernel<4, 16, ROWS, BLOCKS>
                             : (const void *)chain_kernel<1, 32, ROWS, BLOCKS>;
    scan_launch(p, kernel, vec, vec ? 16 : 32, ROWS, 0, 0, p->y, p->hT, p->x, p->h0, NULL, stream);
}

template <int LX, int ROWS, int BLOCKS, int ASYNC, int FLAT>
static void forward_stream(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->y, p->x, p->hT, p->h0);
    const void *kernel = vec ? (const void *)stream_kernel<4, LX, ROWS, BLOCKS, ASYNC, FLAT>
                             : (const void *)stream_kernel<1, 32, ROWS, BLOCKS, ASYNC, FLAT>;
    size_t smem = ASYNC ? (vec ? 16 : 4) * ROWS * THREADS : 0;
    scan_launch(p, kernel, vec, vec ? LX : 32, ROWS, smem, FLAT, p->y, p->hT, p->x, p->h0, NULL,
                stream);
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
    const int W = LX * VEC, HIGH = THREADS / LX;
    __shared__ Sums<Cells, Affine, Affine, HIGH, W> sh;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC;
    const ptrdiff_t step = reverse ? (ptrdiff_t)D : -(ptrdiff_t)D;
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        const Place at = place(tile, g, w, W, HIGH, B, T, D, !reverse, tl);
        float r[ROWS][VEC], e[ROWS][VEC], c[ROWS][VEC]; // dy; x, its share; y, the coefficient
        float later[VEC];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < VEC; j++)
                r[i][j] = e[i][j] = c[i][j] = 0;
            if (i < at.rows) {
                load(r[i], dy + at.first + i * step);
                load(e[i], x + at.first + i * step);
                load(c[i], y + at.first + i * step);
            }
        }
        for (int j = 0; j < VEC; j++)
            later[j] = FLT_MAX; // at the first position, where R is 0
        if (at.rows && at.t0)
            load(later, y + at.first - step);
        for (int j = 0; j < VEC; j++) {
            Affine p = {1, 0};
            later[j] = finite(later[j]);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                float now = finite(c[i][j]);
                e[i][j] = exp_fast(finite_above(e[i][j]) - now);
                c[i][j] = i < at.rows ? exp_fast(now - later[j]) : 1;
                later[j] = now;
                p = affine_join(p, {c[i][j], r[i][j]});
            }
            sh.total.put(g, w + j, p);
        }
        __syncthreads();
        tile_chain<GROUP, 1>(
            sh, sums, carries, at, D, tl, Affine{1, 0},
            [](Affine a, Affine b) { return affine_join(a, b); },
            [](size_t) { return Affine{0, 0}; }, [](size_t, Affine) {});
        for (int j = 0; j < VEC; j++) {
            Affine in = sh.before.get(g, w + j);
            float R = fmaf(in.a, sh.carry.get(0, w + j).r, in.r);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                R = fmaf(c[i][j], R, r[i][j]);
                r[i][j] = e[i][j] * R;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (i < at.rows)
                store(dx + at.first + i * step, r[i]);
    }
}

template <int ROWS, int BLOCKS>
static void backward_chain(const void *problem, cudaStream_t stream)
{
    const Lcse *p = (const Lcse *)problem;
    int vec = aligned16(p->D, p->dx, p->dy, p->x, p->y);
    const void *kernel = vec ? (const void *)chain_backward_kernel<4, 16, ROWS, BLOCKS>
                             : (const void *)chain_backward_kernel<1, 32, ROWS, BLOCKS>;
    scan_launch(p, kernel, vec, vec ? 16 : 32, ROWS, 0, 0, p->dx, NULL, p->dy, p->x, p->y, stream);
}

// ---- main ----

enum { NUM_FORWARD = 7, NUM_BACKWARD = 3 };

static const BenchKernel forward_kernels[NUM_FORWARD] = {
    {1, "thread a channel", forward1, NULL},
    {2, "one pass, 272 rows", forward_chain<17, 2>, NULL},
    {3, "one pass, 144 rows", forward_chain<9, 3>, NULL},
    {4, "one exp a row, next tile, 144 rows", forward_stream<16, 9, 3, 1, 0>, NULL},
    {5, "one exp a row, next tile, 272 rows", forward_stream<16, 17, 2, 1, 0>, NULL},
    {6, "one exp a row, 272 rows", forward_stream<16, 17, 2, 0, 0>, NULL},
    {7, "one exp a row, 288 rows, flat", forward_stream<8, 9, 3, 0, 1>, NULL},
};

static const BenchKernel backward_kernels[NUM_BACKWARD] = {
    {1, "thread a channel", backward1, NULL},
    {2, "one pass, 96 rows", backward_chain<6, 2>, NULL},
    {3, "one pass, 64 rows", backward_chain<4, 3>, NULL},
};

// run_shape: forward and backward of one shape, all kernels. harsh: a tenth of x is -inf and one in
// 200 jumps by up to 200; otherwise x is in [-3, 3). Returns the failures.
static int run_shape(const Shape *s, const BenchOptions *opt)
{
    size_t n = s->B * s->T * s->D, m = s->B * s->D;
    char name[2][128];
    enum { X, H0, Y, HT, DY, DX, ARRAYS };
    Array a[ARRAYS];
    for (int i = 0; i < ARRAYS; i++)
        a[i] = array_new(i == H0 || i == HT ? m : n, BENCH_F32, i == H0 || i == HT ? 0 : s->shift);
    BenchBuffer work = bench_alloc(words_bytes(s->B, s->T, s->D, SHORTEST) / 4, BENCH_F32, 0);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        float u = bench_uniform(1 + s->T, i);
        size_t t = i / s->D % s->T; // the first is finite, so that y is: compare() wants it so
        int first = t == (s->reverse ? s->T - 1 : 0);
        a[X].h[i] = 6 * u - 3;
        if (s->harsh && (u < .1f || u > .995f) && !first)
            a[X].h[i] = u < .1f ? -INFINITY : 4e4f * (u - .995f);
        a[DY].h[i] = 2 * bench_uniform(7, i) - 1;
    }
    for (size_t i = 0; i < m; i++)
        a[H0].h[i] = 3 * bench_uniform(2, i);
    lcse_ref_forward(a[Y].ref, a[HT].ref, a[X].h, s->state ? a[H0].h : NULL, s->B, s->T, s->D,
                     s->reverse);
    array_upload(&a[X]), array_upload(&a[DY]), array_upload(&a[H0]);
    Lcse p = {(float *)a[Y].d.data, s->state ? (float *)a[HT].d.data : NULL,
              (float *)a[DX].d.data, (const float *)a[X].d.data,
              s->state ? (const float *)a[H0].d.data : NULL, (const float *)a[DY].d.data, s->B,
              s->T, s->D, s->reverse, (Word *)work.data};
    for (int i = 0; i < 2; i++)
        snprintf(name[i], sizeof name[i], "logcumsumexp %s(%zu,%zu,%zu) %s", i ? "backward " : "",
                 s->B, s->T, s->D, s->reverse ? "reverse" : "forward");
    BenchOutput outputs[] = {array_output("y", &a[Y], 1e-6), array_output("hT", &a[HT], 1e-6)};
    BenchCase c = {name[0], &p, forward_kernels, NUM_FORWARD, outputs, s->state ? 2 : 1,
                   8.0 * (double)n, 0, "GB"};
    int failed = bench_case(&c, opt);
    for (size_t i = 0; i < n; i++)
        a[Y].h[i] = (float)a[Y].ref[i];
    array_upload(&a[Y]);
    lcse_ref_backward(a[DX].ref, a[DY].h, a[X].h, a[Y].h, s->B, s->T, s->D, s->reverse);
    // R is a product of up to T exponentials, each up to 2^-22 off: at T = 65536 without a reset
    // (-inf, a jump) 1.1e-4 was measured, with the serial kernel as with the others
    BenchOutput grads[] = {array_output("dx", &a[DX], fmax(1e-5, 1e-6 * sqrt((double)s->T)))};
    BenchCase cb = {name[1], &p, backward_kernels, NUM_BACKWARD, grads, 1, 16.0 * (double)n, 0,
                    "GB"};
    failed += bench_case(&cb, opt) + scratch_spoilt(&work);
    arrays_free(a, ARRAYS);
    bench_free(&work);
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
    const size_t T = pad + n + after, N = T * D;
    int failed = 0;
    float *h_got = (float *)alloc_zero(N, 4, "got");
    double *hT = (double *)alloc_zero(D, 8, "hT");
    enum { X, Y, DY, DX, ARRAYS };
    Array a[ARRAYS];
    for (int i = 0; i < ARRAYS; i++)
        a[i] = array_new(N, BENCH_F32, 0);
    BenchBuffer work = bench_alloc(words_bytes(1, T, D, SHORTEST) / 4, BENCH_F32, 0);
    for (size_t i = 0; i < N; i++) {
        size_t t = i / D;
        a[X].h[i] = t < pad ? -INFINITY : x[t - pad < n ? t - pad : n - 1];
        a[DY].h[i] = 1;
    }
    lcse_ref_forward(a[Y].ref, hT, a[X].h, NULL, 1, T, D, 0);
    for (size_t t = 0; t < n; t++)
        failed += !alike(a[Y].ref[(pad + t) * D], want[t], 1e-4);
    array_upload(&a[X]), array_upload(&a[DY]);
    Lcse p = {(float *)a[Y].d.data, NULL, (float *)a[DX].d.data, (const float *)a[X].d.data, NULL,
              (const float *)a[DY].d.data, 1, T, D, 0, (Word *)work.data};
    for (int k = 0; k < NUM_FORWARD; k++) {
        forward_kernels[k].fn(&p, 0);
        CUDA_CHECK(cudaMemcpy(h_got, p.y, N * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < N; i++)
            if (!alike(h_got[i], a[Y].ref[i], 1e-4) && ++failed == 1)
                printf("  forward %d: at %zu got %g, expected %g\n", k + 1, i, h_got[i],
                       a[Y].ref[i]);
    }
    for (int k = 0; k < NUM_BACKWARD && dx; k++) {
        backward_kernels[k].fn(&p, 0);
        CUDA_CHECK(cudaMemcpy(h_got, p.dx, N * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < N; i++) {
            float exact = i / D < pad ? 0 : dx[i / D - pad];
            if (h_got[i] != exact && ++failed == 1)
                printf("  backward %d: at %zu got %g, expected %g\n", k + 1, i, h_got[i], exact);
        }
    }
    arrays_free(a, ARRAYS);
    bench_free(&work);
    free(h_got), free(hT);
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
    static const size_t pads[] = {0, 40, 300, 5000};
    BenchOptions o = small_options(opt);
    int cases = 0, failed = run_small(run_shape, &o, &cases);
    for (int i = 0; i < 4; i++)
        for (size_t D = 1; D <= 4; D += 3, cases += 6) {
            for (int j = 0; j < 2; j++)
                failed += run_special(a01[j], y01[j], NULL, 7, pads[i], pads[3 - i], D);
            for (int j = 0; j < 3; j++)
                failed += run_special(a02[j], y02[j], NULL, 4, pads[i], pads[3 - i], D);
            failed += run_special(a03, y03, dx03, 3, pads[i], 0, D);
        }
    for (size_t rows = 65535; rows <= 65537; rows++, cases += 2) {
        const Shape tall = {rows, 3, 1, 0, 1, 1, 0}, flat = {1, 3, rows, 1, 0, 1, 0};
        failed += run_shape(&tall, &o) + run_shape(&flat, &o);
    }
    printf("logcumsumexp: %d small cases, %d failures\n", cases, failed);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions opt =
        bench_options(argc, argv, "logcumsumexp over T of (B,T,C), fp32, and its gradient");
    return run_scan(run_shape, run_checks, 0, &opt) ? EXIT_FAIL : 0;
}
