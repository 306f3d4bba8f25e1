// pairwise.cuh: the quadratic CausalRN layer on the GPU, forward and backward.
//
// Layout (B,T,H): sequence b, position u (query) or v (memory), channel d. For every pair v <= u
//     z_uv[d] = r_uv (a_u[d] + b_v[d])      O_u[d] = sum_v psi(z)      P_u[d] = sum_v r_uv psi'(z)
// with a, b centred over channels and r_uv = 1/sqrt(va_u + vb_v + 2 a_u.b_v / H + eps) (norm
// exact), or a, b normalized or raw and r = 1 (approx, none). Given g = dL/dO and e = psi'(z),
// backward is
//     s1_uv = sum_d g e,  s2_uv = sum_d g e z,  N_uv = r s1 / H,  M_uv = r^2 s2 / H
//     da_u[d] = g P - sum_v N_uv - a_u[d] sum_v M_uv - (M b)_u[d]
//     db_v[d] = sum_u r g e - sum_u N_uv - b_v[d] sum_u M_uv - (M^T a)_v[d]
// Nothing of size T x T x H exists. This file has what both ladders need: types, exponentials, the
// centring of rows, and the general path: every H, T, psi and type, with r, M, N as T x T fp32
// scratch for a group of sequences at a time. Each ladder has its own kernels, the fast path among
// them: exp and H a multiple of 64, statistics of pairs on the tensor cores inside the pair loop.
//
// An H200 issues 16 ex2 but 128 other instructions a clock and SM: an exponential has 8 issue
// slots before it is not the bottleneck. The fast loops use about 6 (forward) and 7 (backward). On
// paper the rest pays for a few exponentials on the FMA pipe (exp2_poly); measured, it did not. The
// counters (Nsight Compute) have the schedulers issuing in 70% of the clocks forward and 62%
// backward, the ex2 unit busy in 72% and 40%.
#ifndef SEQ_DEV_PAIRWISE_CUH
#define SEQ_DEV_PAIRWISE_CUH

#include "../bench.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
typedef __nv_bfloat162 floatX2;
#else
typedef float floatX;
typedef float2 floatX2;
#endif

enum { ACT_EXP, ACT_RELU, ACT_ELU, ACT_GELU };
enum { NORM_EXACT, NORM_APPROX, NORM_NONE };

// What the layer computes. post: outputs scaled for a norm that follows, otherwise means over v.
typedef struct {
    int act, norm, causal, post;
} PairOptions;

// One layer: its arrays on the device, sizes and options. The launchers take it as a BenchCase's
// problem.
typedef struct {
    floatX *a, *b;               // (B,T,H) the inputs
    floatX *ac, *bc;             // (B,T,H) what pair_center makes of them
    float *astat, *bstat;        // (B,T) likewise
    floatX *s, *p;               // (B,T,H) = scale_u O_u and scale_u P_u
    float *scale;                // (B,T) = 2^-k (post), or one over the number of terms
    floatX *ds, *da, *db;        // (B,T,H) gradients of s, a, b
    void *scratch;               // pair_scratch_bytes
    size_t B, T, H;
    PairOptions opt;
} PairLayer;

#define PAIR_EPS 1e-8f
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define MASKED (-126.0f) // as a power of two: 1.2e-38, and safe in exp2_poly

// ---- helpers ----

// pair_grid: blocks as an unsigned, or die: a grid has at most 2^31-1.
static unsigned pair_grid(size_t blocks)
{
    if (blocks > 0x7fffffff)
        die(EXIT_MEMORY, "pairwise: %zu blocks, expected at most 2^31-1\nhint: a smaller batch",
            blocks);
    return (unsigned)blocks;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float *p, float x) { *p = x; }
__device__ inline void from_float(__nv_bfloat16 *p, float x) { *p = __float2bfloat16(x); }

__device__ inline float2 load2(const float *p) { return *(const float2 *)p; }
__device__ inline float2 load2(const __nv_bfloat16 *p)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)p);
}
__device__ inline float2 to_float2(float2 x) { return x; }
__device__ inline float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline void store2(float *p, float x, float y) { *(float2 *)p = make_float2(x, y); }
__device__ inline void store2(__nv_bfloat16 *p, float x, float y)
{
    *(__nv_bfloat162 *)p = __floats2bfloat162_rn(x, y);
}


// warp_sum, warp_max: over the 32 lanes, to all of them.
__device__ inline float warp_sum(float x)
{
    for (int i = 16; i > 0; i >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
}
__device__ inline float warp_max(float x)
{
    for (int i = 16; i > 0; i >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
    return x;
}

// mma_bf16: c (16x8) += a (16x16) b (16x8), bf16 in, fp32 out; fragments as PTX's m16n8k16: lane =
// 4g + t holds rows g, g+8 of a at k = 2t, 2t+1, 2t+8, 2t+9, and column g of b at the same k.
__device__ inline void mma_bf16(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// exp2_mufu: 2^x on the special-function unit; relative error 2^-22, results below 2^-126 are 0.
__device__ inline float exp2_mufu(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp2_poly: 2^x on the FMA and integer pipes, -126 <= x < 127; relative error 7.5e-5 (BF16: a
// fiftieth of the result's rounding), 1.6e-7 in FP32.
__device__ inline float exp2_poly(float x)
{
    float t = x + 12582912.0f;       // 1.5 * 2^23: the low bits of t are now round(x)
    float f = x - (t - 12582912.0f); // in [-1/2, 1/2]
#ifdef PRECISION_BF16
    float p = fmaf(f, 0.05517166853f, 0.24261112512f);
    p = fmaf(p, f, 0.69326096773f);
    p = fmaf(p, f, 0.99992805719f);
#else
    float p = fmaf(f, 0.00133908633f, 0.00967603177f);
    p = fmaf(p, f, 0.05550356954f);
    p = fmaf(p, f, 0.24022106826f);
    p = fmaf(p, f, 0.69314718246f);
    p = fmaf(p, f, 1.00000011921f);
#endif
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
}

// psi: *value = psi(z) and *slope = psi'(z). relu'(0) = 0.
template <int ACT> __device__ inline void psi(float z, float *value, float *slope)
{
    if (ACT == ACT_RELU) {
        *slope = z > 0 ? 1.0f : 0.0f;
        *value = z > 0 ? z : 0.0f;
    } else if (ACT == ACT_GELU) {
        float cdf = 0.5f * erfcf(-0.70710678118654752f * z);
        *value = z * cdf;
        *slope = cdf + z * 0.3989422804014327f * exp2_mufu(-0.5f * LOG2E * z * z);
    } else if (ACT == ACT_ELU) {
        *slope = z > 0 ? 1.0f : exp2_mufu(LOG2E * z);
        *value = z > 0 ? z : expm1f(z);
    } else
        *value = *slope = exp2_mufu(LOG2E * z);
}

// row_scale: what O_u and P_u are multiplied by: 2^-k with 2^k the power of two just above the
// row's largest |O| (post: exact, and the norm that follows cancels it), or one over the number of
// terms.
__device__ inline float row_scale(float row_max, int u, int T, PairOptions opt)
{
    if (!opt.post)
        return 1.0f / (float)(opt.causal ? u + 1 : T);
    int k = (int)(__float_as_uint(row_max) >> 23) - 126;
    return row_max > 0 && k < 126 && k > -126 ? exp2f((float)-k) : 1.0f;
}

// ---- rows: centring and statistics ----

// pair_center_kernel: one warp a row of x (rows,H); the first `rows` rows are a's, then b's.
// exact: y = x - mean, stat = mean(y^2) of the stored y. approx: y = normalize(x), stat =
// 1/deviation.
__global__ void pair_center_kernel(floatX *ac, floatX *bc, float *astat, float *bstat,
                                   const floatX *a, const floatX *b, size_t rows, int H, int norm)
{
    size_t row = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= 2 * rows)
        return;
    int is_b = row >= rows;
    row -= is_b ? rows : 0;
    const floatX *x = (is_b ? b : a) + row * H;
    floatX *y = (is_b ? bc : ac) + row * H;
    float first = to_float(x[0]), sum = 0, sum2 = 0, rstd = 1;
    for (int d = lane; d < H; d += 32)
        sum += to_float(x[d]) - first;
    float mean = first + warp_sum(sum) / (float)H;
    if (norm == NORM_APPROX) {
        for (int d = lane; d < H; d += 32)
            sum2 += (to_float(x[d]) - mean) * (to_float(x[d]) - mean);
        rstd = rsqrtf(warp_sum(sum2) / (float)H + PAIR_EPS);
    }
    sum2 = 0;
    __syncwarp(); // y may be x: every lane has read x[0]
    for (int d = lane; d < H; d += 32) {
        from_float(&y[d], (to_float(x[d]) - mean) * rstd);
        sum2 += to_float(y[d]) * to_float(y[d]);
    }
    sum2 = warp_sum(sum2) / (float)H;
    if (lane == 0)
        (is_b ? bstat : astat)[row] = norm == NORM_APPROX ? rstd : sum2;
}

// pair_center_wide_kernel: the same with the row in registers, for even H <= 64 PAIRS.
template <int PAIRS>
__global__ void pair_center_wide_kernel(floatX *ac, floatX *bc, float *astat, float *bstat,
                                        const floatX *a, const floatX *b, size_t rows, int H,
                                        int norm)
{
    size_t row = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= 2 * rows)
        return;
    int is_b = row >= rows;
    row -= is_b ? rows : 0;
    const floatX *x = (is_b ? b : a) + row * H + 2 * lane;
    floatX *y = (is_b ? bc : ac) + row * H + 2 * lane;
    float2 f[PAIRS];
    float sum = 0, sum2 = 0, rstd = 1;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        f[i] = 2 * lane + 64 * i < H ? load2(x + 64 * i) : make_float2(0, 0);
    const float first = __shfl_sync(0xffffffffu, f[0].x, 0);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        sum += 2 * lane + 64 * i < H ? (f[i].x - first) + (f[i].y - first) : 0.0f;
    const float mean = first + warp_sum(sum) / (float)H;
    if (norm == NORM_APPROX) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            if (2 * lane + 64 * i < H)
                sum2 += (f[i].x - mean) * (f[i].x - mean) + (f[i].y - mean) * (f[i].y - mean);
        rstd = rsqrtf(warp_sum(sum2) / (float)H + PAIR_EPS);
    }
    sum2 = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        if (2 * lane + 64 * i < H) {
            store2(y + 64 * i, (f[i].x - mean) * rstd, (f[i].y - mean) * rstd);
            f[i] = load2(y + 64 * i); // as rounded
            sum2 += f[i].x * f[i].x + f[i].y * f[i].y;
        }
    sum2 = warp_sum(sum2) / (float)H;
    if (lane == 0)
        (is_b ? bstat : astat)[row] = norm == NORM_APPROX ? rstd : sum2;
}

// pair_center: ac, bc (B,T,H) = the centred (exact), normalized (approx) or unchanged (none) a, b;
// astat, bstat (B,T) = variance (exact), 1/deviation (approx), unused (none). ac may be a, bc b.
// In BF16 ac and bc are rounded once and the variance is that of the rounded values.
static void pair_center(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const size_t rows = x->B * x->T, bytes = rows * x->H * sizeof(floatX);
    if (x->opt.norm == NORM_NONE) {
        if (x->ac != x->a)
            CUDA_CHECK(cudaMemcpyAsync(x->ac, x->a, bytes, cudaMemcpyDefault, stream));
        if (x->bc != x->b)
            CUDA_CHECK(cudaMemcpyAsync(x->bc, x->b, bytes, cudaMemcpyDefault, stream));
        return;
    }
    auto kernel = x->H % 2 || x->H > 512 ? pair_center_kernel
                  : x->H <= 192          ? pair_center_wide_kernel<3>
                                         : pair_center_wide_kernel<8>;
    kernel<<<pair_grid((2 * rows + 7) / 8), 256, 0, stream>>>(
        x->ac, x->bc, x->astat, x->bstat, x->a, x->b, rows, (int)x->H, x->opt.norm);
    CUDA_CHECK(cudaGetLastError());
}

// pair_uncenter_kernel: one warp a row: dx = rstd (dy - mean(dy) - y mean(dy y)), in place on dy.
__global__ void pair_uncenter_kernel(floatX *dy, const floatX *y, const float *rstd, size_t rows,
                                     int H)
{
    size_t row = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows)
        return;
    floatX *dy_r = dy + row * H;
    const floatX *y_r = y + row * H;
    float sum = 0, dot = 0;
    for (int d = lane; d < H; d += 32) {
        sum += to_float(dy_r[d]);
        dot += to_float(dy_r[d]) * to_float(y_r[d]);
    }
    sum = warp_sum(sum) / (float)H;
    dot = warp_sum(dot) / (float)H;
    for (int d = lane; d < H; d += 32)
        from_float(&dy_r[d], rstd[row] * (to_float(dy_r[d]) - sum - to_float(y_r[d]) * dot));
}

// pair_r: 1/sqrt(variance of the pair); a variance that rounding made negative counts as 0.
__device__ inline float pair_r(float avar, float bvar, float dot, float inv_H)
{
    return rsqrtf(fmaxf(avar + bvar + 2.0f * inv_H * dot, 0.0f) + PAIR_EPS);
}

// ---- general path: any H, T, psi, type; r, M, N in scratch ----

enum { TILE = 32, TILE_K = 16, TILE_PAD = TILE + 4, ROWS_G = 8 };

// pair_load_tile: xs[k][i] = scale_i x[row+i][d+k] for 32 rows and 16 channels, 0 outside T and H;
// 64 threads.
__device__ inline void pair_load_tile(float (*xs)[TILE_PAD], const floatX *x, const float *scale,
                                      int row, int d, int T, int H)
{
    int i = threadIdx.x / 2, k0 = threadIdx.x % 2 * (TILE_K / 2);
    float f = scale && row + i < T ? scale[row + i] : 1.0f;
    for (int k = k0; k < k0 + TILE_K / 2; k++)
        xs[k][i] = row + i < T && d + k < H ? f * to_float(x[(size_t)(row + i) * H + d + k]) : 0.0f;
}

__device__ inline void load4(float x[4], const float *p)
{
    float4 v = *(const float4 *)p;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// pair_stats_kernel: R, M, N (group,T,T) for a 32 x 32 tile of pairs, 4 x 4 a thread (64 threads),
// so that the sums over channels stay in registers. ds NULL: only R. Pairs with v > u are not
// written.
template <int ACT>
__global__ void __launch_bounds__(64)
    pair_stats_kernel(float *R, float *M, float *N, const floatX *ds, const float *scale,
                      const floatX *ac, const floatX *bc, const float *astat, const float *bstat,
                      int T, int H, PairOptions opt)
{
    __shared__ __align__(16) float as[TILE_K][TILE_PAD], bs[TILE_K][TILE_PAD], gs[TILE_K][TILE_PAD];
    const int tiles = (T + TILE - 1) / TILE;
    const int u0 = blockIdx.x / tiles % tiles * TILE, v0 = blockIdx.x % tiles * TILE;
    const size_t row0 = (size_t)(blockIdx.x / tiles / tiles) * T;
    const int i0 = threadIdx.x / 8 * 4, j0 = threadIdx.x % 8 * 4;
    const float inv_H = 1.0f / (float)H;
    float r[4][4] = {}, s1[4][4] = {}, s2[4][4] = {}, a[4], b[4], g[4];
    if (opt.causal && v0 > u0)
        return;
    for (int d = 0; d < H && opt.norm == NORM_EXACT; d += TILE_K) {
        __syncthreads();
        pair_load_tile(as, ac + row0 * H, NULL, u0, d, T, H);
        pair_load_tile(bs, bc + row0 * H, NULL, v0, d, T, H);
        __syncthreads();
        for (int c = 0; c < TILE_K; c++) {
            load4(a, &as[c][i0]);
            load4(b, &bs[c][j0]);
            for (int i = 0; i < 16; i++)
                r[i / 4][i % 4] = fmaf(a[i / 4], b[i % 4], r[i / 4][i % 4]);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int u = u0 + i0 + i / 4, v = v0 + j0 + i % 4,
            in = u < T && v < T && (!opt.causal || v <= u);
        r[i / 4][i % 4] = !in ? 0.0f
                          : opt.norm != NORM_EXACT
                              ? 1.0f
                              : pair_r(astat[row0 + u], bstat[row0 + v], r[i / 4][i % 4], inv_H);
        if (in)
            R[(row0 + u) * T + v] = r[i / 4][i % 4];
    }
    for (int d = 0; d < H && ds && opt.norm == NORM_EXACT; d += TILE_K) {
        __syncthreads();
        pair_load_tile(as, ac + row0 * H, NULL, u0, d, T, H);
        pair_load_tile(bs, bc + row0 * H, NULL, v0, d, T, H);
        pair_load_tile(gs, ds + row0 * H, scale + row0, u0, d, T, H);
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < TILE_K; c++) {
            load4(a, &as[c][i0]);
            load4(b, &bs[c][j0]);
            load4(g, &gs[c][i0]);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float z = (a[i / 4] + b[i % 4]) * r[i / 4][i % 4], value, slope;
                psi<ACT>(z, &value, &slope);
                s1[i / 4][i % 4] += g[i / 4] * slope;
                s2[i / 4][i % 4] += g[i / 4] * slope * z;
            }
        }
    }
    if (!ds || opt.norm != NORM_EXACT)
        return;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int u = u0 + i0 + i / 4, v = v0 + j0 + i % 4;
        float x = r[i / 4][i % 4] * inv_H;
        if (u < T && v < T && (!opt.causal || v <= u)) {
            N[(row0 + u) * T + v] = x * s1[i / 4][i % 4];
            M[(row0 + u) * T + v] = x * r[i / 4][i % 4] * s2[i / 4][i % 4];
        }
    }
}

// A thread's share of the row kernels: eight rows from `row` on, of one sequence, at channel d.
typedef struct {
    int row, d;
    size_t row0; // the sequence's first row
} GeneralRows;

// general_rows: the share of this thread of 128; load_rows: x[i] = the channel of its rows, those
// beyond T repeating the last.
__device__ inline GeneralRows general_rows(int T, int H)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS_G - 1) / ROWS_G;
    return {(int)(blockIdx.x / slices % tiles) * ROWS_G,
            (int)(blockIdx.x % slices * 128 + threadIdx.x),
            (size_t)(blockIdx.x / slices / tiles) * T};
}
__device__ inline void load_rows(float x[ROWS_G], const floatX *all, GeneralRows k, int T, int H)
{
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        x[i] = to_float(all[(k.row0 + min(k.row + i, T - 1)) * H + k.d]);
}

// pair_general_forward_kernel: a thread owns rows u0 .. u0+7 of one channel; with post the sums are
// written as they are and pair_rescale_kernel follows.
template <int ACT>
__global__ void __launch_bounds__(128)
    pair_general_forward_kernel(floatX *s, floatX *p, float *scale, const floatX *__restrict__ ac,
                                const floatX *__restrict__ bc, const float *__restrict__ R, int T,
                                int H, PairOptions opt)
{
    const GeneralRows k = general_rows(T, H);
    const int u0 = k.row, d = k.d;
    const size_t row0 = k.row0;
    float a[ROWS_G], o[ROWS_G] = {}, q[ROWS_G] = {};
    if (d >= H)
        return;
    load_rows(a, ac, k, T, H);
    for (int v = 0; v < (opt.causal ? min(u0 + ROWS_G, T) : T); v++) {
        const float b = to_float(bc[(row0 + v) * H + d]);
#pragma unroll
        for (int i = 0; i < ROWS_G; i++)
            if (u0 + i < T && (!opt.causal || v <= u0 + i)) {
                float r = R[(row0 + u0 + i) * T + v], value, slope;
                psi<ACT>((a[i] + b) * r, &value, &slope);
                o[i] += value;
                q[i] = fmaf(r, slope, q[i]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        if (u0 + i < T) {
            const size_t row = row0 + u0 + i;
            float m = opt.post ? 1.0f : row_scale(0, u0 + i, T, opt);
            from_float(&s[row * H + d], m * o[i]);
            from_float(&p[row * H + d], m * q[i]);
            if (d == 0)
                scale[row] = m;
        }
}

// pair_rescale_kernel: one warp a row: s, p times 2^-k, exact; scale = 2^-k.
__global__ void pair_rescale_kernel(floatX *s, floatX *p, float *scale, size_t rows, int H,
                                    PairOptions opt)
{
    size_t row = blockIdx.x * (size_t)(blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    float m = 0;
    if (row >= rows)
        return;
    for (int d = lane; d < H; d += 32)
        m = fmaxf(m, fabsf(to_float(s[row * H + d])));
    m = row_scale(warp_max(m), 0, 1, opt);
    for (int d = lane; d < H; d += 32) {
        from_float(&s[row * H + d], m * to_float(s[row * H + d]));
        from_float(&p[row * H + d], m * to_float(p[row * H + d]));
    }
    if (lane == 0)
        scale[row] = m;
}

// ---- launchers ----

#define PAIR_CHECK(act, CALL) \
    do { \
        if ((act) == ACT_RELU) { \
            enum { ACT = ACT_RELU }; \
            CALL; \
        } else if ((act) == ACT_ELU) { \
            enum { ACT = ACT_ELU }; \
            CALL; \
        } else if ((act) == ACT_GELU) { \
            enum { ACT = ACT_GELU }; \
            CALL; \
        } else { \
            enum { ACT = ACT_EXP }; \
            CALL; \
        } \
        CUDA_CHECK(cudaGetLastError()); \
    } while (0)

// pair_group: sequences that the general path handles at once: 256 MiB of r, M and N, at least one.
static size_t pair_group(size_t B, size_t T)
{
    size_t n = ((size_t)256 << 20) / (12 * T * T);
    return n < 1 ? 1 : n < B ? n : B;
}

// pair_scratch_bytes: enough for the general path's r, M, N and for the fast backward's M in BF16.
static size_t pair_scratch_bytes(size_t B, size_t T)
{
    const size_t general = 12 * T * T * pair_group(B, T), fast = B * T * ((T + 31) / 32) * 64;
    return general > fast ? general : fast;
}

// pair_is_fast: the fast kernels can run, for H up to `most`. They read 16 bytes at a time:
// cudaMalloc's pointers plus whole rows of H are aligned for that.
static int pair_is_fast(const PairLayer *x, size_t most)
{
    return x->opt.act == ACT_EXP && x->H % 64 == 0 && x->H <= most;
}

// pair_part: the sequences from b on that the general path handles at once, as a layer.
static PairLayer pair_part(const PairLayer *x, size_t b)
{
    const size_t group = pair_group(x->B, x->T), at = b * x->T * x->H, row = b * x->T;
    PairLayer part = *x;
    part.B = group < x->B - b ? group : x->B - b;
    part.ac += at, part.bc += at, part.s += at, part.p += at;
    part.ds += at, part.da += at, part.db += at;
    part.astat += row, part.bstat += row, part.scale += row;
    return part;
}

// pair_stats: scratch = r, then M and N, each (B,T,T), of a part; ds NULL: r alone.
static void pair_stats(const PairLayer *x, const floatX *ds, cudaStream_t stream)
{
    const size_t tiles = (x->T + TILE - 1) / TILE, TT = x->B * x->T * x->T;
    const unsigned grid = pair_grid(x->B * tiles * tiles);
    float *R = (float *)x->scratch;
    PAIR_CHECK(x->opt.act, (pair_stats_kernel<ACT><<<grid, 64, 0, stream>>>(
                               R, R + TT, R + 2 * TT, ds, x->scale, x->ac, x->bc, x->astat,
                               x->bstat, (int)x->T, (int)x->H, x->opt)));
}

// pair_rows_grid: blocks of a kernel in which a thread owns eight rows of a channel.
static unsigned pair_rows_grid(const PairLayer *x)
{
    return pair_grid(x->B * ((x->T + ROWS_G - 1) / ROWS_G) * ((x->H + 127) / 128));
}

// pair_forward_general: s, p, scale of any shape and psi.
static void pair_forward_general(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const size_t rows = x->B * x->T;
    for (size_t b = 0; b < x->B; b += pair_group(x->B, x->T)) {
        const PairLayer y = pair_part(x, b);
        pair_stats(&y, NULL, stream);
        PAIR_CHECK(y.opt.act,
                   (pair_general_forward_kernel<ACT><<<pair_rows_grid(&y), 128, 0, stream>>>(
                       y.s, y.p, y.scale, y.ac, y.bc, (const float *)y.scratch, (int)y.T, (int)y.H,
                       y.opt)));
    }
    if (x->opt.post)
        pair_rescale_kernel<<<pair_grid((rows + 7) / 8), 256, 0, stream>>>(
            x->s, x->p, x->scale, rows, (int)x->H, x->opt);
    CUDA_CHECK(cudaGetLastError());
}

#endif
