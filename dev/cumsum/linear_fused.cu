// linear_fused.cu: the Linear CausalRN layer between its matrix products as one kernel each way.
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp -o linear
//          dev/cumsum/linear_fused.cu     (one line), then ./linear
//
// Per sequence, rows a_u, b_v of H channels, mu = normalize (approx) or identity (none):
//   l_u = log sum over v<=u of exp(mu(b_v))   per channel
//   z_u = exp(mu(a_u) + l_u) / 2^K_u          2^K: the power of two just above the row's maximum
//   o_u = normalize(z_u)                      undoes 2^K (and 1/(u+1), left out), but for eps
// normalize(x) = (x - mean) / sqrt(var + 1e-8), biased variance, no scale.   [CausalRN eq. 5, app.
// A, C, D] Backward, with g = do and r the reciprocal deviations:
//   dz = r_z (g - mean(g) - o mean(g o)),  da = dz z,  R_v = da_v + exp(l_v - l_v+1) R_v+1,
//   db = exp(mu(b) - l) R,  then both through mu.
// Sums are in plain fp32 (H <= 491 and approx: |mu(b)| <= sqrt(H), nothing overflows) or, LOG, as
// pairs s 2^m with m the running maximum; the plain form scans da / exp(l) and needs no
// coefficient.
//
// P = H/12 threads side by side on a row, 256/P rows of threads: a tile; a thread holds ROWS rows.
// All tiles, sequence after sequence, are dealt in equal runs to as many blocks as the device holds
// at once: 320 sequences on 132 multiprocessors, whole sequences to each, would leave a fifth of
// them idle. A block walks its run's last sequence first, so that where a run ends inside a
// sequence, the sum so far is ready when the next block comes to need it, as the last thing it does
// (backward: mirrored). The next tile's rows are on their way to shared memory meanwhile. Where
// runs end depends on the device, and so do the last bits. Saved for backward: the sum (LOG: its
// log2) before each tile, carry (B, ceil(T/TILE), H) fp32; everything else (statistics, sums, z) is
// recomputed from a and b. H <= 3072; H = 12 P takes 8- or 16-byte accesses, another H the same
// kernel with scalar, masked ones.
//
// ms (% of copy) on an H200, 2026-11-29; bytes counted: 3 arrays forward, 5 backward:
//   (320,258,192); last: (320,256,3072)   bf16 approx      fp32 approx     bf16 none   H=3072 bf16
//   forward: a copy of as much            0.0238        0.0452        0.0238        0.3513
//   1  256 threads on one row        1.0753 (2%)             -             -             -
//   2  one row a thread             0.0524 (45%)  0.0600 (75%)             -             -
//   3  two rows a thread            0.0410 (58%)  0.0548 (82%)             -             -
//   4  one row, log space           0.0656 (36%)             -  0.0581 (41%)  1.1504 (31%)
//   5  two rows, log space          0.0591 (40%)             -  0.0521 (46%)  0.9170 (38%)
//   6  one row, 1 more block        0.0525 (45%)  0.0598 (76%)             -             -
//   7  two rows, 1 more block       0.0415 (57%)  0.0566 (80%)             -             -
//   backward: a copy of as much           0.0377        0.0754        0.0378        0.5854
//   1  256 threads on one row        2.6866 (1%)             -             -             -
//   2  one row a thread             0.0703 (54%)  0.0893 (84%)             -             -
//   3  two rows a thread            0.0787 (48%)  0.0908 (83%)             -             -
//   4  one row, log space           0.0980 (39%)             -  0.0841 (45%)  1.9021 (31%)
//   5  two rows, log space          0.1084 (35%)             -  0.0907 (42%)  1.8570 (32%)
//   6  one row, 1 more block        0.0812 (46%)  0.1068 (70%)             -             -
//   7  two rows, 1 more block       0.0844 (45%)  0.1178 (64%)             -             -
// Forward 3 and backward 2 win (log space: 5 and 4; H = 3072: 5 and 5). Why the others lose: 1:
// barriers, one row at a time. One row a thread forward: twice the shared-memory traffic a row. Two
// rows backward: 213 registers, or spills. More blocks: shorter runs than sequences, so that blocks
// wait for each other. ncu: forward 37 us (the rest is launch and clearing the words), 46
// instructions an element, issue slots 60% busy, DRAM 46%; backward 67 us, 84 instructions. H =
// 3072: some 14 barriers for each tile of 2 rows. LOG drifts with T: the steps' roundings add up,
// db is off by 3e-4 at T = 65536 (plain stays within 1e-4).
#include "cases.cuh"
#include "chain.cuh"
#include <float.h>

typedef struct {
    void *o, *da, *db;        // (B,T,H)
    float *carry;             // (B, ceil(T/TILE), H): written by forward, read by backward
    Word *words;              // (blocks, H): where runs of tiles meet
    const void *a, *b, *dout; // (B,T,H)
    BenchType type;           // of all (B,T,H) arrays
    int norm;                 // 1 approx, 0 none
    int B, T, H;
} Linear;

enum { N = 12, MAX_BLOCKS = 1024 }; // N channels a thread: 3 times 4
#define LOG2E 1.4426950408889634f
#define EPS 1e-8f

typedef __nv_bfloat16 bf16;

// ---- rows: load, store, reduce, normalize ----

// Raw<X>: 4 elements as they lie in memory.
template <typename X>
struct Raw;
template <>
struct Raw<float> {
    typedef float4 T;
};
template <>
struct Raw<bf16> {
    typedef uint2 T;
};

// inside: 1 if the thread's channel i exists.
template <int P, int FULL>
static __device__ __forceinline__ int inside(int i, int H)
{
    return FULL || 4 * ((int)threadIdx.x % P + P * (i / 4)) + i % 4 < H;
}

// A thread's channels are 4 (p + P j) + 0..3, p = threadIdx % P, j = 0..2. `row` below is its
// channel 0.

// row_fetch: start copying the thread's 12 channels of a row to its place in shared memory, to[256
// j].
template <typename X, int P, int FULL>
static __device__ __forceinline__ void row_fetch(typename Raw<X>::T *to, const X *row, int H)
{
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (FULL) {
            unsigned at = (unsigned)__cvta_generic_to_shared(to + THREADS * j);
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at),
                         "l"(row + 4 * P * j), "n"(4 * sizeof(X))
                         : "memory");
        } else {
            X v[4];
            for (int i = 0; i < 4; i++)
                v[i] = inside<P, 0>(4 * j + i, H) ? row[4 * P * j + i] : X(0.f);
            memcpy(to + THREADS * j, v, sizeof v);
        }
    }
}

static __device__ __forceinline__ void unpack(float *v, float4 raw) { memcpy(v, &raw, 16); }

static __device__ __forceinline__ void unpack(float *v, uint2 raw)
{
    v[0] = __uint_as_float(raw.x << 16), v[1] = __uint_as_float(raw.x & 0xFFFF0000u);
    v[2] = __uint_as_float(raw.y << 16), v[3] = __uint_as_float(raw.y & 0xFFFF0000u);
}

static __device__ __forceinline__ float4 pack(const float *v, float)
{
    return {v[0], v[1], v[2], v[3]};
}

static __device__ __forceinline__ uint2 pack(const float *v, bf16)
{
    __nv_bfloat162 lo = __floats2bfloat162_rn(v[0], v[1]), hi = __floats2bfloat162_rn(v[2], v[3]);
    uint2 raw;
    memcpy(&raw.x, &lo, 4), memcpy(&raw.y, &hi, 4);
    return raw;
}

// row_read: what row_fetch brought, once it is there; 0 for a row that is not.
template <typename X>
static __device__ __forceinline__ void row_read(float (&v)[N], const typename Raw<X>::T *from,
                                                int exists)
{
    if (!exists) {
        for (int i = 0; i < N; i++)
            v[i] = 0;
        return;
    }
#pragma unroll
    for (int j = 0; j < 3; j++)
        unpack(v + 4 * j, from[THREADS * j]);
}

template <typename X, int P, int FULL>
static __device__ __forceinline__ void row_store(X *row, const float (&v)[N], int H)
{
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (FULL)
            *(typename Raw<X>::T *)(row + 4 * P * j) = pack(v + 4 * j, X(0.f));
        else
            for (int i = 0; i < 4; i++)
                if (inside<P, 0>(4 * j + i, H))
                    row[4 * P * j + i] = X(v[4 * j + i]);
    }
}

// row_reduce: v[k] = sum (MAX: maximum) of v[k] over the P threads of the row, in a fixed order,
// for K values at once. red: 8 K floats of shared memory. For P > 32 all threads of the block must
// call it.
template <int P, int MAX, int K>
static __device__ __forceinline__ void row_reduce(float (&v)[K], float *red)
{
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int lane = (P < 32 ? P : 32) / 2; lane > 0; lane /= 2) {
            float other = __shfl_xor_sync(~0u, v[k], lane);
            v[k] = MAX ? fmaxf(v[k], other) : v[k] + other;
        }
    if (P > 32) {
        const int warps = P > 32 ? P / 32 : 1, warp = threadIdx.x / 32;
        __syncthreads();
        for (int k = 0; k < K && threadIdx.x % 32 == 0; k++)
            red[8 * k + warp] = v[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++) {
            const float *r = red + 8 * k + warp / warps * warps;
            v[k] = r[0];
            for (int i = 1; i < warps; i++)
                v[k] = MAX ? fmaxf(v[k], r[i]) : v[k] + r[i];
        }
    }
}

// row_normalize: x[k] = (x[k] - mean) rstd scale for K rows, rstd[k] = 1 / sqrt(var + eps), two
// passes; x0 is a value of about the row's size, the same in its threads: an equal row gives
// exactly 0. 0 beyond H.
template <int P, int FULL, int K>
static __device__ __forceinline__ void row_normalize(float (&x)[K][N], float (&rstd)[K],
                                                     const float (&x0)[K], float scale, int H,
                                                     float *red)
{
    float sum[K], inv_H = 1.0f / H;
#pragma unroll
    for (int k = 0; k < K; k++) {
        sum[k] = 0;
        for (int i = 0; i < N; i++) {
            x[k][i] = inside<P, FULL>(i, H) ? x[k][i] - x0[k] : 0;
            sum[k] += x[k][i];
        }
    }
    row_reduce<P, 0>(sum, red);
#pragma unroll
    for (int k = 0; k < K; k++) {
        float mean = sum[k] * inv_H;
        sum[k] = 0;
        for (int i = 0; i < N; i++) {
            x[k][i] = inside<P, FULL>(i, H) ? x[k][i] - mean : 0;
            sum[k] = fmaf(x[k][i], x[k][i], sum[k]);
        }
    }
    row_reduce<P, 0>(sum, red);
#pragma unroll
    for (int k = 0; k < K; k++) {
        rstd[k] = rsqrtf(fmaf(sum[k], inv_H, EPS)); // 2 ulp
        for (int i = 0; i < N; i++)
            x[k][i] *= rstd[k] * scale;
    }
}

// ---- sums: s (plain) or s 2^m (LOG) ----

typedef struct {
    float m, s;
} Sum;

// exp2_fast: ex2.approx, 2 ulp; 0 below 2^-126.
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2_fast: lg2.approx, off by 2^-22 near 1 and 2 ulp elsewhere; -inf at 0.
static __device__ __forceinline__ float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ Sum sum_empty(void) { return {-FLT_MAX, 0}; }

template <int LOG>
static __device__ __forceinline__ Sum sum_join(Sum a, Sum b)
{
    if (!LOG)
        return {0, a.s + b.s};
    float m = fmaxf(a.m, b.m);
    return {m, a.s * exp2_fast(a.m - m) + b.s * exp2_fast(b.m - m)};
}

// sums_local: s[r] = sum over the thread's rows up to r of 2^b, b (ROWS,N) in units of log 2; rows
// from `rows` on add nothing.
template <int LOG, int ROWS>
static __device__ __forceinline__ void sums_local(Sum (&s)[ROWS][N], const float (*b)[N], int rows)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < N; i++)
            s[r][i] = {LOG ? b[r][i] : 0, LOG ? 1 : exp2_fast(b[r][i])};
        if (r >= rows)
            for (int i = 0; i < N; i++)
                s[r][i] = sum_empty();
        for (int i = 0; i < N && r; i++)
            s[r][i] = sum_join<LOG>(s[r - 1][i], s[r][i]);
    }
}

// shared_put, shared_get: the thread's 12 channels in row g of a shared array (HIGH,12 P), 16 bytes
// each.
template <int P>
static __device__ __forceinline__ void shared_put(float *to, const float (&v)[N])
{
#pragma unroll
    for (int j = 0; j < 3; j++)
        ((float4 *)to)[threadIdx.x / P * 3 * P + threadIdx.x % P + P * j] =
            *(const float4 *)(v + 4 * j);
}

template <int P>
static __device__ __forceinline__ void shared_get(float (&v)[N], const float *from)
{
#pragma unroll
    for (int j = 0; j < 3; j++)
        *(float4 *)(v + 4 * j) =
            ((const float4 *)from)[threadIdx.x / P * 3 * P + threadIdx.x % P + P * j];
}

// sums_before: add to s what comes before the thread's rows: the block's earlier threads and, in
// the threads that own a column, run: everything before the tile (LOG: a pair; plain: s + m, m a
// rounding error carried along), which moves on to the next tile. ts, tm: shared (HIGH,12 P). Two
// barriers.
template <int P, int LOG, int ROWS, int COLS>
static __device__ __forceinline__ void sums_before(Sum (&s)[ROWS][N], Sum (&run)[COLS], float *ts,
                                                   float *tm)
{
    const int HIGH = THREADS / P, W = N * P;
    float v[N], m[N];
    for (int i = 0; i < N; i++)
        v[i] = s[ROWS - 1][i].s, m[i] = s[ROWS - 1][i].m;
    shared_put<P>(ts, v);
    if (LOG)
        shared_put<P>(tm, m);
    __syncthreads();
    for (int j = 0; j < COLS; j++) {
        int c = threadIdx.x + THREADS * j;
        if (c >= W)
            break;
        Sum tile = LOG ? run[j] : Sum{0, run[j].m};
#pragma unroll
        for (int g = 0; g < HIGH; g++) {
            Sum own = {LOG ? tm[g * W + c] : 0, ts[g * W + c]};
            Sum before = LOG ? tile : Sum{0, run[j].s + tile.s};
            ts[g * W + c] = before.s;
            if (LOG)
                tm[g * W + c] = before.m;
            tile = sum_join<LOG>(tile, own);
        }
        if (LOG) {
            run[j] = tile;
        } else { // run += tile with the error kept: the larger of the two first
            float sum = run[j].s + tile.s, big = fmaxf(run[j].s, tile.s);
            run[j] = {fminf(run[j].s, tile.s) - (sum - big), sum};
        }
    }
    __syncthreads();
    shared_get<P>(v, ts);
    if (LOG)
        shared_get<P>(m, tm);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++)
            s[r][i] = sum_join<LOG>(Sum{m[i], v[i]}, s[r][i]);
}

// row_exp: z = 2^a s / 2^K, K the integer just above the row's largest log2, and top[r], the
// largest z. The scale is a power of two, so exact, and carries no gradient. Plain: s becomes z /
// s. Beyond H: anything.
template <int P, int FULL, int LOG, int ROWS>
static __device__ __forceinline__ void row_exp(float (&z)[ROWS][N], float (&top)[ROWS],
                                               const float (*a)[N], Sum (&s)[ROWS][N], int H,
                                               float *red)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        top[r] = LOG ? -FLT_MAX : 0;
        for (int i = 0; i < N; i++) {
            float w = LOG ? a[r][i] + s[r][i].m : exp2_fast(a[r][i]);
            z[r][i] = LOG ? w : w * s[r][i].s;
            s[r][i].s = LOG ? s[r][i].s : w;
            if (inside<P, FULL>(i, H))
                top[r] = fmaxf(top[r], LOG ? w + log2_fast(s[r][i].s) : z[r][i]);
        }
    }
    row_reduce<P, 1>(top, red);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float K = floorf(top[r]) + 1; // LOG; plain: 2^-K from the exponent's bits
        float scale = __uint_as_float((253u << 23) - (__float_as_uint(top[r]) & 0x7F800000u));
        top[r] = LOG ? exp2_fast(top[r] - K) : top[r] * scale;
        for (int i = 0; i < N; i++) {
            z[r][i] = LOG ? exp2_fast(z[r][i] - K) * s[r][i].s : z[r][i] * scale;
            s[r][i].s *= LOG ? 1 : scale;
        }
    }
}

// ---- forward ----

// rows_open: rows of a and b (K of them) to mu(a), mu(b) in units of log 2, and their rstd.
template <int P, int FULL, int NORM, int K>
static __device__ __forceinline__ void rows_open(float (&x)[K][N], float (&rstd)[K], float *first,
                                                 int H, float *red)
{
    float x0[K];
    if (!NORM) {
        for (int k = 0; k < K; k++)
            for (int i = 0; i < N; i++)
                x[k][i] *= LOG2E;
        return;
    }
    if (P <= 32) {
        for (int k = 0; k < K; k++)
            x0[k] = __shfl_sync(~0u, x[k][0], 0, P < 32 ? P : 32);
    } else {
        __syncthreads();
        for (int k = 0; k < K && threadIdx.x % P == 0; k++)
            first[threadIdx.x / P * K + k] = x[k][0];
        __syncthreads();
        for (int k = 0; k < K; k++)
            x0[k] = first[threadIdx.x / P * K + k];
    }
    row_normalize<P, FULL>(x, rstd, x0, LOG2E, H, red);
}

// Run: the block's share of the tiles, first to last, and where it stands: tile k of sequence b.
typedef struct {
    unsigned first, last, b, k, NT;
} Run;

// run_start, run_next: forward (DIR 1) a run's sequences from its last to its first and each
// sequence's tiles upwards; backward (DIR -1) the mirror image. run_next returns 0 at the end.
template <int DIR>
static __device__ __forceinline__ Run run_start(unsigned B, unsigned NT)
{
    unsigned long long tiles = (unsigned long long)B * NT;
    Run r = {(unsigned)(tiles * blockIdx.x / gridDim.x),
             (unsigned)(tiles * (blockIdx.x + 1) / gridDim.x - 1), 0, 0, NT};
    unsigned from = DIR > 0 ? r.last : r.first;
    r.b = from / NT;
    r.k = DIR > 0 ? (r.b * NT > r.first ? 0 : r.first % NT)
                  : ((r.b + 1) * NT <= r.last ? NT - 1 : r.last % NT);
    return r;
}

template <int DIR>
static __device__ __forceinline__ int run_next(Run &r)
{
    unsigned at = r.b * r.NT + r.k;
    if (DIR > 0) {
        if (at < r.last && r.k + 1 < r.NT)
            r.k++;
        else if (r.b * r.NT <= r.first)
            return 0;
        else
            r.b--, r.k = r.b * r.NT > r.first ? 0 : r.first % r.NT;
    } else {
        if (at > r.first && r.k > 0)
            r.k--;
        else if ((r.b + 1) * r.NT > r.last)
            return 0;
        else
            r.b++, r.k = (r.b + 1) * r.NT <= r.last ? r.NT - 1 : r.last % r.NT;
    }
    return 1;
}

// linear_forward_kernel: o (B,T,H) =, carry (B, ceil(T/TILE), H) = from a, b (B,T,H). words
// (blocks, H): empty at the start.
template <typename X, int P, int FULL, int ROWS, int NORM, int LOG, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_forward_kernel(X *o, float *carry, Word *words, const X *a, const X *b, int B, int T,
                          int channels)
{
    const int HIGH = THREADS / P, W = N * P, COLS = (W + THREADS - 1) / THREADS, TILE = HIGH * ROWS;
    const int H = FULL ? W : channels;
    extern __shared__ float4 dynamic[]; // (2 ROWS, 3, THREADS) times 4 elements, fetched
    __shared__ float4 ts[HIGH * W / 4], tm[LOG ? HIGH * W / 4 : 1];
    __shared__ float red[16 * ROWS], first[8 * ROWS];
    const int g = threadIdx.x / P;
    typename Raw<X>::T *raw = (typename Raw<X>::T *)dynamic + threadIdx.x;
    auto fetch = [&](const Run &at) {
        const int t0 = at.k * TILE + g * ROWS;
        const size_t from = ((size_t)at.b * T + t0) * H + threadIdx.x % P * 4;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (t0 + r < T) {
                row_fetch<X, P, FULL>(raw + 3 * r * THREADS, a + from + r * H, H);
                row_fetch<X, P, FULL>(raw + 3 * (ROWS + r) * THREADS, b + from + r * H, H);
            }
    };
    Run next = run_start<1>(B, (T + TILE - 1) / TILE);
    Sum run[COLS];
    fetch(next);
    for (int more = 1, begin = 1; more;) {
        const Run at = next;
        const int t0 = at.k * TILE + g * ROWS, rows = T - t0;
        const size_t to = ((size_t)at.b * T + t0) * H + threadIdx.x % P * 4;
        float x[2 * ROWS][N], rstd[2 * ROWS], z[ROWS][N], top[ROWS], rz[ROWS];
        Sum s[ROWS][N];
        copies_wait();
        for (int r = 0; r < ROWS; r++) {
            row_read<X>(x[r], raw + 3 * r * THREADS, r < rows);
            row_read<X>(x[ROWS + r], raw + 3 * (ROWS + r) * THREADS, r < rows);
        }
        more = run_next<1>(next);
        if (more)
            fetch(next);
        rows_open<P, FULL, NORM>(x, rstd, first, H, red);
        sums_local<LOG>(s, x + ROWS, rows);
        for (int j = 0; j < COLS; j++) {
            int c = threadIdx.x + THREADS * j;
            if (c >= H)
                break;
            if (at.k == 0)
                run[j] = LOG ? sum_empty() : Sum{0, 0};
            else if (begin)
                run[j] = word_wait<Sum>(&words[(size_t)blockIdx.x * H + c]);
            carry[((size_t)at.b * at.NT + at.k) * H + c] =
                LOG ? run[j].m + log2_fast(run[j].s) : run[j].s + run[j].m;
        }
        sums_before<P, LOG>(s, run, (float *)ts, (float *)tm);
        begin = !more || next.b != at.b;
        for (int j = 0; j < COLS && begin && at.k + 1 < at.NT; j++) {
            int c = threadIdx.x + THREADS * j;
            if (c < H) // the sequence goes on in the next block
                word_put(&words[(size_t)(blockIdx.x + 1) * H + c], run[j]);
        }
        row_exp<P, FULL, LOG>(z, top, x, s, H, red);
        row_normalize<P, FULL>(z, rz, top, 1, H, red);
        for (int r = 0; r < ROWS; r++)
            if (r < rows)
                row_store<X, P, FULL>(o + to + r * H, z[r], H);
    }
}

// ---- backward ----

// scan_back: y[r] = sum of y over the thread's rows from r on and all later rows of the sequence
// (plain), or the scan R = y + exp2(l - later l) R (LOG). back: in the threads that own a column, R
// and l of the first row after the tile; moves on to the tile before. ts (HIGH,W), tl (HIGH + 1,W):
// shared. Two barriers.
template <int P, int LOG, int ROWS, int COLS>
static __device__ __forceinline__ void scan_back(float (&y)[ROWS][N], const float (&l)[ROWS][N],
                                                 Sum (&back)[COLS], float *ts, float *tl)
{
    const int HIGH = THREADS / P, W = N * P;
    float in[N], l_in[N];
#pragma unroll
    for (int r = ROWS - 2; r >= 0; r--)
        for (int i = 0; i < N; i++)
            y[r][i] += y[r + 1][i] * (LOG ? exp2_fast(l[r][i] - l[r + 1][i]) : 1);
    shared_put<P>(ts, y[0]);
    if (LOG)
        shared_put<P>(tl, l[0]);
    __syncthreads();
    for (int j = 0; j < COLS; j++) {
        int c = threadIdx.x + THREADS * j;
        if (c >= W)
            break;
        float R = back[j].s, later = back[j].m;
        if (LOG)
            tl[HIGH * W + c] = later;
#pragma unroll
        for (int g = HIGH - 1; g >= 0; g--) {
            float own = ts[g * W + c], now = LOG ? tl[g * W + c] : 0;
            ts[g * W + c] = R;
            R = LOG ? fmaf(exp2_fast(now - later), R, own) : R + own;
            later = now;
        }
        back[j] = {later, R};
    }
    __syncthreads();
    shared_get<P>(in, ts);
    if (LOG)
        shared_get<P>(l_in, tl + W);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++)
            y[r][i] = LOG ? fmaf(exp2_fast(l[r][i] - l_in[i]), in[i], y[r][i]) : y[r][i] + in[i];
    if (LOG)
        __syncthreads(); // l_in were other threads' l, and tl is the next tile's tm
}

// row_means: means[k] = (sum of u, sum of u v) over the row for K pairs of rows.
template <int P, int FULL, int K>
static __device__ __forceinline__ void row_means(float (&means)[2 * K], const float (*u)[N],
                                                 const float (*v)[N], int H, float *red)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        means[2 * k] = means[2 * k + 1] = 0;
        for (int i = 0; i < N; i++) {
            float d = inside<P, FULL>(i, H) ? u[k][i] : 0;
            means[2 * k] += d;
            means[2 * k + 1] = fmaf(d, v[k][i], means[2 * k + 1]);
        }
    }
    row_reduce<P, 0>(means, red);
    for (int k = 0; k < 2 * K; k++)
        means[k] *= 1.0f / H;
}

// linear_backward_kernel: da, db (B,T,H) = from dout, a, b (B,T,H), carry as linear_forward_kernel
// with the same tile wrote it. words (blocks, H): empty at the start.
template <typename X, int P, int FULL, int ROWS, int NORM, int LOG, int BLOCKS>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_backward_kernel(X *da, X *db, Word *words, const X *dout, const X *a, const X *b,
                           const float *carry, int B, int T, int channels)
{
    const int HIGH = THREADS / P, W = N * P, COLS = (W + THREADS - 1) / THREADS, TILE = HIGH * ROWS;
    const int H = FULL ? W : channels;
    extern __shared__ float4 dynamic[]; // (3 ROWS, 3, THREADS) times 4 elements, fetched
    __shared__ float4 ts[HIGH * W / 4], tr[LOG ? 1 : HIGH * W / 4],
        tm[LOG ? (HIGH + 1) * W / 4 : 1];
    __shared__ float red[32 * ROWS], first[8 * ROWS];
    const int g = threadIdx.x / P;
    typename Raw<X>::T *raw = (typename Raw<X>::T *)dynamic + threadIdx.x;
    float saved[COLS]; // the next tile's carry
    auto fetch = [&](const Run &at) {
        const int t0 = at.k * TILE + g * ROWS;
        const size_t from = ((size_t)at.b * T + t0) * H + threadIdx.x % P * 4;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (t0 + r < T) {
                row_fetch<X, P, FULL>(raw + 3 * r * THREADS, a + from + r * H, H);
                row_fetch<X, P, FULL>(raw + 3 * (ROWS + r) * THREADS, b + from + r * H, H);
                row_fetch<X, P, FULL>(raw + 3 * (2 * ROWS + r) * THREADS, dout + from + r * H, H);
            }
        for (int j = 0, c = threadIdx.x; j < COLS; j++, c += THREADS)
            saved[j] = c < H ? carry[((size_t)at.b * at.NT + at.k) * H + c] : 0;
    };
    Run next = run_start<-1>(B, (T + TILE - 1) / TILE);
    Sum back[COLS];
    fetch(next);
    for (int more = 1, begin = 1; more;) {
        const Run at = next;
        const int t0 = at.k * TILE + g * ROWS, rows = T - t0;
        const size_t to = ((size_t)at.b * T + t0) * H + threadIdx.x % P * 4;
        float x[2 * ROWS][N], rstd[2 * ROWS], o[ROWS][N], z[ROWS][N], top[ROWS], rz[ROWS];
        float y[ROWS][N], l[ROWS][N], means[2 * ROWS];
        Sum s[ROWS][N], run[COLS];
        copies_wait();
        for (int r = 0; r < ROWS; r++) {
            row_read<X>(x[r], raw + 3 * r * THREADS, r < rows);
            row_read<X>(x[ROWS + r], raw + 3 * (ROWS + r) * THREADS, r < rows);
            row_read<X>(y[r], raw + 3 * (2 * ROWS + r) * THREADS, r < rows);
        }
        for (int j = 0; j < COLS; j++)
            run[j] = LOG ? Sum{at.k ? saved[j] : -FLT_MAX, at.k ? 1.f : 0.f} : Sum{0, saved[j]};
        more = run_next<-1>(next);
        if (more)
            fetch(next);
        rows_open<P, FULL, NORM>(x, rstd, first, H, red);
        sums_local<LOG>(s, x + ROWS, rows);
        sums_before<P, LOG>(s, run, (float *)ts, (float *)tm);
        row_exp<P, FULL, LOG>(z, top, x, s, H, red);
        memcpy(o, z, sizeof o);
        row_normalize<P, FULL>(o, rz, top, 1, H, red);
        // o = normalize(z), y = do: dz = rz (do - mean(do) - o mean(do o))
        row_means<P, FULL, ROWS>(means, y, o, H, red);
        // z = exp(a + l): da = dl = dz z, now in z; y = what the scan takes
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++) {
                float dz = rz[r] * (y[r][i] - (means[2 * r] + o[r][i] * means[2 * r + 1]));
                z[r][i] *= dz;
                l[r][i] = LOG ? s[r][i].m + log2_fast(s[r][i].s) : 0;
                y[r][i] = LOG ? z[r][i] : dz * s[r][i].s;
            }
        for (int j = 0, c = threadIdx.x; j < COLS && begin && c < H; j++, c += THREADS)
            back[j] = at.k + 1 == at.NT ? Sum{INFINITY, 0}
                                        : word_wait<Sum>(&words[(size_t)blockIdx.x * H + c]);
        scan_back<P, LOG>(y, l, back, (float *)(LOG ? ts : tr), (float *)tm);
        begin = !more || next.b != at.b;
        for (int j = 0, c = threadIdx.x; j < COLS && begin && at.k && c < H; j++, c += THREADS)
            word_put(&words[(size_t)(blockIdx.x - 1) * H + c],
                     back[j]); // it goes on in the block before
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++)
                y[r][i] *= exp2_fast(x[ROWS + r][i] - l[r][i]);
        // through mu: dx = rstd (d - mean(d) - mu mean(d mu)); x is mu / log 2
        const float unit = 1 / (LOG2E * LOG2E);
        for (int side = 0; side < 2 && NORM; side++) {
            row_means<P, FULL, ROWS>(means, side ? y : z, x + side * ROWS, H, red);
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < N; i++) {
                    float &d = side ? y[r][i] : z[r][i], mu = x[side * ROWS + r][i];
                    d = rstd[side * ROWS + r] *
                        (d - (means[2 * r] + mu * (means[2 * r + 1] * unit)));
                }
        }
        for (int r = 0; r < ROWS; r++)
            if (r < rows) {
                row_store<X, P, FULL>(da + to + r * H, z[r], H);
                row_store<X, P, FULL>(db + to + r * H, y[r], H);
            }
    }
}

// ---- launchers ----

// launch: forward (BACK 0) or backward; carry passes between those of equal P and ROWS.
template <typename X, int P, int FULL, int ROWS, int NORM, int LOG, int BLOCKS, int BACK>
static void launch(const Linear *p, cudaStream_t stream)
{
    const size_t tile = THREADS / P * ROWS, tiles = p->B * ((p->T + tile - 1) / tile);
    const size_t smem = (BACK ? 3 : 2) * ROWS * N * THREADS * sizeof(X);
    const void *kernel;
    if constexpr (BACK)
        kernel = (const void *)linear_backward_kernel<X, P, FULL, ROWS, NORM, LOG, BLOCKS>;
    else
        kernel = (const void *)linear_forward_kernel<X, P, FULL, ROWS, NORM, LOG, BLOCKS>;
    if (tiles > INT32_MAX)
        die(EXIT_MEMORY, "linear: %zu tiles, expected at most 2^31 - 1", tiles);
    const char *name = BACK ? "linear_backward_kernel" : "linear_forward_kernel";
    Tiling t = {0, 0, 0, 0, (unsigned)tiles, 1};
    bench_fits(kernel, name, THREADS, smem);
    words_clear(p->words, tiling_grid(&t, kernel, smem) * (size_t)p->H, 0, stream);
    void *forward[] = {(void *)&p->o, (void *)&p->carry, (void *)&p->words, (void *)&p->a,
                       (void *)&p->b, (void *)&p->B,     (void *)&p->T,     (void *)&p->H};
    void *backward[] = {(void *)&p->da, (void *)&p->db, (void *)&p->words, (void *)&p->dout,
                        (void *)&p->a,  (void *)&p->b,  (void *)&p->carry, (void *)&p->B,
                        (void *)&p->T,  (void *)&p->H};
    chain_launch(kernel, name, &t, smem, 0, BACK ? backward : forward, stream);
}

// by_norm, by_shape: from run-time options to a compiled kernel. plain: 1 allows sums without
// logarithms.
template <typename X, int P, int FULL, int ROWS, int BLOCKS, int BACK>
static void by_norm(const Linear *p, int plain, cudaStream_t stream)
{
    if (p->norm && plain && p->H <= 491)
        launch<X, P, FULL, ROWS, 1, 0, BLOCKS, BACK>(p, stream);
    else if (p->norm)
        launch<X, P, FULL, ROWS, 1, 1, BLOCKS, BACK>(p, stream);
    else
        launch<X, P, FULL, ROWS, 0, 1, BLOCKS, BACK>(p, stream);
}

template <typename X, int ROWS, int BLOCKS, int BACK>
static void by_shape(const Linear *p, int plain, int naive, cudaStream_t stream)
{
    int aligned = (((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->o | (uintptr_t)p->da |
                    (uintptr_t)p->db | (uintptr_t)p->dout) &
                   15) == 0;
    if (p->H > 3072)
        die(EXIT_USAGE, "linear: H = %d, expected at most 3072", p->H);
    if (p->H == 192 && aligned && !naive)
        by_norm<X, 16, 1, ROWS, BLOCKS, BACK>(p, plain, stream);
    else if (p->H <= 384 && !naive)
        by_norm<X, 32, 0, ROWS, BLOCKS, BACK>(p, plain, stream);
    else if (p->H == 3072 && aligned)
        by_norm<X, 256, 1, ROWS, BLOCKS, BACK>(p, plain, stream);
    else
        by_norm<X, 256, 0, ROWS, BLOCKS, BACK>(p, plain, stream);
}

// linear: what the table holds. ROWS rows a thread, BLOCKS blocks a multiprocessor; plain sums or
// not; naive: the whole block on one row.
template <int ROWS, int BLOCKS, int PLAIN, int NAIVE, int BACK>
static void linear(const void *problem, cudaStream_t stream)
{
    const Linear *p = (const Linear *)problem;
    if (p->B == 0 || p->T == 0 || p->H == 0)
        return;
    if (p->type == BENCH_F32)
        by_shape<float, ROWS, BLOCKS, BACK>(p, PLAIN, NAIVE, stream);
    else
        by_shape<bf16, ROWS, BLOCKS, BACK>(p, PLAIN, NAIVE, stream);
}

static const BenchKernel forward_kernels[] = {
    {1, "256 threads on one row", linear<1, 2, 1, 1, 0>, NULL},
    {2, "one row a thread", linear<1, 3, 1, 0, 0>, NULL},
    {3, "two rows a thread", linear<2, 2, 1, 0, 0>, NULL},
    {4, "one row a thread, log space", linear<1, 2, 0, 0, 0>, NULL},
    {5, "two rows a thread, log space", linear<2, 2, 0, 0, 0>, NULL},
    {6, "one row a thread, 4 blocks", linear<1, 4, 1, 0, 0>, NULL},
    {7, "two rows a thread, 3 blocks", linear<2, 3, 1, 0, 0>, NULL},
};

static const BenchKernel backward_kernels[] = {
    {1, "256 threads on one row", linear<1, 2, 1, 1, 1>, NULL},
    {2, "one row a thread", linear<1, 2, 1, 0, 1>, NULL},
    {3, "two rows a thread", linear<2, 1, 1, 0, 1>, NULL},
    {4, "one row a thread, log space", linear<1, 2, 0, 0, 1>, NULL},
    {5, "two rows a thread, log space", linear<2, 1, 0, 0, 1>, NULL},
    {6, "one row a thread, 3 blocks", linear<1, 3, 1, 0, 1>, NULL},
    {7, "two rows a thread, 2 blocks", linear<2, 2, 1, 0, 1>, NULL},
};

enum { NUM_KERNELS = 7 };

// ---- reference, in double ----

// normalize_ref: y (H) = normalize(x), returns the reciprocal deviation. May alias.
static double normalize_ref(double *y, const double *x, int H)
{
    double mean = 0, var = 0, x0 = x[0];
    for (int i = 0; i < H; i++)
        mean += (x[i] - x0) / H;
    for (int i = 0; i < H; i++)
        y[i] = x[i] - x0 - mean;
    for (int i = 0; i < H; i++)
        var += y[i] * y[i] / H;
    for (int i = 0; i < H; i++)
        y[i] /= sqrt(var + 1e-8);
    return 1 / sqrt(var + 1e-8);
}

// normalize_back: d (H) = r (d - mean(d) - y mean(d y)), the gradient through y = normalize(x).
static void normalize_back(double *d, const double *y, double r, int H)
{
    double m = 0, my = 0;
    for (int i = 0; i < H; i++)
        m += d[i] / H, my += d[i] * y[i] / H;
    for (int i = 0; i < H; i++)
        d[i] = r * (d[i] - m - y[i] * my);
}

// sequence_ref: one sequence, the file comment's equations. o (T,H) =; with g (T,H) also da, db
// (T,H) =. Plain sums in l, and pair sums in the gradient, straight from db_v = exp(b_v) sum over
// u>=v of da_u / exp(l_u), with exponents joined before they are taken.
static void sequence_ref(double *o, double *da, double *db, const double *a, const double *b,
                         const double *g, int T, int H, int norm)
{
    size_t n = (size_t)T * H;
    double *w = (double *)alloc_zero(4 * n + 3 * (size_t)T, 8, "reference");
    double *ma = w, *mb = w + n, *l = w + 2 * n, *z = w + 3 * n, *ra = w + 4 * n, *rb = ra + T,
           *rz = rb + T;
    memcpy(ma, a, n * 8);
    memcpy(mb, b, n * 8);
    for (int t = 0; t < T; t++) {
        double *at = ma + (size_t)t * H, *bt = mb + (size_t)t * H, *lt = l + (size_t)t * H;
        double *zt = z + (size_t)t * H, top = -INFINITY;
        ra[t] = norm ? normalize_ref(at, at, H) : 1;
        rb[t] = norm ? normalize_ref(bt, bt, H) : 1;
        for (int i = 0; i < H; i++) {
            double before = t ? lt[i - H] : -INFINITY, hi = fmax(before, bt[i]),
                   lo = fmin(before, bt[i]);
            lt[i] = hi + log1p(exp(lo - hi));
            top = fmax(top, at[i] + lt[i]);
        }
        double K = floor(top / log(2.0)) + 1;
        for (int i = 0; i < H; i++)
            zt[i] = exp(at[i] + lt[i] - K * log(2.0));
        rz[t] = normalize_ref(o + (size_t)t * H, zt, H);
    }
    for (int t = T - 1; t >= 0 && g; t--) {
        size_t at = (size_t)t * H;
        memcpy(da + at, g + at, H * 8);
        normalize_back(da + at, o + at, rz[t], H);
        for (int i = 0; i < H; i++) {
            size_t k = at + i;
            da[k] *= z[k];
            z[k] = da[k] + (t + 1 < T ? exp(l[k] - l[k + H]) * z[k + H] : 0); // z now holds R
            db[k] = exp(mb[k] - l[k]) * z[k];
        }
        if (norm) {
            normalize_back(da + at, ma + at, ra[t], H);
            normalize_back(db + at, mb + at, rb[t], H);
        }
    }
    free(w);
}

// linear_ref: all sequences. Arrays (B,T,H); g NULL: forward only.
static void linear_ref(double *o, double *da, double *db, const float *a, const float *b,
                       const float *g, int B, int T, int H, int norm)
{
    size_t n = (size_t)T * H;
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < B; i++) {
        double *w = (double *)alloc_zero(3 * n, 8, "reference");
        for (size_t j = 0; j < n; j++)
            w[j] = a[i * n + j], w[n + j] = b[i * n + j], w[2 * n + j] = g[i * n + j];
        sequence_ref(o + i * n, da + i * n, db + i * n, w, w + n, w + 2 * n, T, H, norm);
        free(w);
    }
}

// check_ref: the reference's gradient against central differences, T = 5, H = 6. Returns the
// failures.
static int check_ref(int norm)
{
    enum { T = 5, H = 6, n = T * H };
    double x[2][n], g[n], o[n], d[2][n], other[2][n];
    int failed = 0;
    for (int i = 0; i < n; i++) {
        x[0][i] = 4 * bench_uniform(1, i) - 2, x[1][i] = 4 * bench_uniform(2, i) - 2;
        g[i] = bench_uniform(3, i) - .5;
    }
    sequence_ref(o, d[0], d[1], x[0], x[1], g, T, H, norm);
    for (int i = 0; i < 2 * n; i++) {
        double *v = &x[i / n][i % n], keep = *v, slope = 0;
        for (int sign = -1; sign <= 1; sign += 2) {
            *v = keep + sign * 1e-5;
            sequence_ref(o, other[0], other[1], x[0], x[1], NULL, T, H, norm);
            for (int j = 0; j < n; j++)
                slope += sign * o[j] * g[j] / 2e-5;
        }
        *v = keep;
        failed += !(fabs(slope - d[i / n][i % n]) < 1e-6 * (1 + fabs(slope)));
    }
    if (failed)
        printf("  FAILED: %d gradients of the reference against central differences\n", failed);
    return failed;
}

// ---- main ----

// run_shape: forward and backward of one shape, all kernels of the mask (bit num). harsh: one-hot
// rows, constant rows, large values where norm allows them. Returns the failures.
static int run_shape(int B, int T, int H, BenchType type, int norm, int harsh, size_t shift,
                     unsigned mask, const BenchOptions *opt)
{
    size_t n = size_mul(size_mul(B, T, "rows"), H, "elements");
    char name[128];
    int failed = 0, bf = type == BENCH_BF16;
    Array in[3], out[3]; // a, b, dout; o, da, db
    for (int i = 0; i < 3; i++) {
        in[i] = array_new(n, type, shift), out[i] = array_new(n, type, shift);
#pragma omp parallel for
        for (size_t j = 0; j < n; j++) {
            float v = bench_uniform(i, 2 * j) + bench_uniform(i, 2 * j + 1) - 1;
            size_t row = j / H, c = j % H, kind = (row + 3 * i + 2) % 7; // row 0 is of no kind
            in[i].h[j] = i == 2 ? v : 3 * v + .5f;
            if (harsh && i < 2)
                in[i].h[j] = kind == 0 ? (c == row % H ? 50 : 0) : kind == 1 && norm ? 1234 : 8 * v;
        }
        array_upload(&in[i]);
    }
    BenchBuffer carry = bench_alloc(n, BENCH_F32, 0);
    BenchBuffer words = bench_alloc((size_t)MAX_BLOCKS * H * 2, BENCH_F32, 0);
    linear_ref(out[0].ref, out[1].ref, out[2].ref, in[0].h, in[1].h, in[2].h, B, T, H, norm);
    Linear p = {out[0].d.data,        out[1].d.data, out[2].d.data, (float *)carry.data,
                (Word *)words.data, in[0].d.data,  in[1].d.data,  in[2].d.data,
                type,               norm,          B,             T,
                H};
    // H = 3, approx: in our first row mu(a) is nearly -mu(b). There one rounding of mu (6e-8) moves
    // o by 4e-6, and its gradient by 8e-6 of a value of which the way back through mu leaves a
    // 400th.
    int ill = H <= 3 && norm && !bf;
    double forward_bound = bf ? BOUND_FORWARD_BF16 : ill ? 1e-4 : BOUND_FORWARD_FP32;
    double grad_bound = bf ? BOUND_GRAD_BF16 : ill ? 1e-2 : BOUND_GRAD_FP32;
    BenchOutput outputs[] = {array_output("o", &out[0], forward_bound),
                             array_output("da", &out[1], grad_bound),
                             array_output("db", &out[2], grad_bound)};
    for (int k = 0; k < 2 * NUM_KERNELS; k++) {
        int back = k >= NUM_KERNELS, i = k % NUM_KERNELS;
        if (!(mask & 1u << (i + 1)))
            continue;
        snprintf(name, sizeof name, "linear %s %s %s (%d,%d,%d)", back ? "backward" : "forward",
                 bf ? "bf16" : "fp32", norm ? "approx" : "none", B, T, H);
        BenchCase c = {name, &p, (back ? backward_kernels : forward_kernels) + i, 1, outputs + back,
                       1 + back, (back ? 5.0 : 3.0) * (double)(n * bench_elem(type)), 0, "GB"};
        if (back)
            forward_kernels[i].fn(&p, 0); // carry, as this kernel wants it
        failed += bench_case(&c, opt);
    }
    failed += scratch_spoilt(&carry) || scratch_spoilt(&words);
    arrays_free(in, 3), arrays_free(out, 3);
    bench_free(&carry), bench_free(&words);
    return failed;
}

static int run_checks(const BenchOptions *opt)
{
    static const int Ts[] = {1, 2, 31, 32, 33, 1000}, Hs[] = {1, 3, 33, 192, 384, 500, 3072};
    int failed = check_ref(0) + check_ref(1), cases = 2;
    BenchOptions o = small_options(opt);
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 7; j++)
            for (int k = 0; k < 4; k++, cases++) // H = 1: o = 0 and no gradient, exactly
                failed += run_shape(Hs[j] > 1000 ? 1 : 1 + (i + j) % 3, Ts[i], Hs[j],
                                    k % 2 ? BENCH_BF16 : BENCH_F32, k / 2,
                                    Hs[j] > 3 && (i + j + k) % 3 == 0, 0,
                                    Ts[i] > 100 && Hs[j] > 500 ? 12 : 254, &o);
    failed += run_shape(1, 4097, 192, BENCH_F32, 1, 0, 0, 254, &o);
    failed += run_shape(1, 65536, 33, BENCH_F32, 1, 0, 0, 12, &o);
    failed += run_shape(2, 65, 192, BENCH_F32, 1, 0, 4, 254, &o); // not aligned
    failed += run_shape(2, 65, 192, BENCH_BF16, 0, 0, 2, 254, &o);
    for (int rows = 65535; rows <= 65537; rows++, cases++)
        failed += run_shape(rows, 3, 8, BENCH_F32, 1, 0, 0, 12, &o);
    printf("linear: %d small cases, %d failures\n", cases + 4, failed);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions opt = bench_options(argc, argv, "linear_fused: Linear CausalRN layer; --C is H");
    int failed = 0;
    if (shape_given(&opt)) {
        for (int k = 0; k < 4; k++)
            failed +=
                run_shape(opt.B ? (int)opt.B : 1, opt.T ? (int)opt.T : 1, opt.C ? (int)opt.C : 1,
                          k % 2 ? BENCH_BF16 : BENCH_F32, k / 2, 0, 0, 254, &opt);
        return failed ? EXIT_FAIL : 0;
    }
    if (!opt.time_only)
        failed += run_checks(&opt);
    if (!opt.check_only) {
        failed += run_shape(320, 258, 192, BENCH_BF16, 1, 0, 0, 254, &opt);
        failed += run_shape(320, 258, 192, BENCH_F32, 1, 0, 0, 204, &opt);
        failed += run_shape(320, 258, 192, BENCH_BF16, 0, 0, 0, 48, &opt);
        failed += run_shape(320, 256, 3072, BENCH_BF16, 1, 0, 0, 48, &opt);
    }
    return failed ? EXIT_FAIL : 0;
}
