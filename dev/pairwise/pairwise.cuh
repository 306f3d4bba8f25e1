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
// Nothing of size T x T x H exists. Two paths:
//   fast    exp and H a multiple of 64, at most 512 (backward 384); statistics of pairs on the
//           tensor cores inside the pair loop. Backward only in BF16: it keeps M (T x T bf16 a
//           sequence) as scratch.
//   general every H, T, psi and type: r, M, N are T x T fp32 scratch, for a group of sequences.
//
// An H200 issues 16 ex2 but 128 other instructions a clock and SM: an exponential has 8 issue
// slots before it is not the bottleneck. The fast loops use about 6 (forward) and 7 (backward). On
// paper the rest pays for a few exponentials on the FMA pipe (exp2_poly); measured, it did not, so
// both launchers use none. The counters (Nsight Compute) have the schedulers issuing in 70% of the
// clocks forward and 62% backward, the ex2 unit busy in 72% and 40%.
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

// pack2: two floats as bf16 in one register, x in the low half.
__device__ inline uint32_t pack2(float x, float y)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *(uint32_t *)&v;
}

// mul2: product of two packed pairs of bf16.
__device__ inline uint32_t mul2(uint32_t x, uint32_t y)
{
    __nv_bfloat162 v = __hmul2(*(__nv_bfloat162 *)&x, *(__nv_bfloat162 *)&y);
    return *(uint32_t *)&v;
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

// mma_bf16_first: c = a b: the first of a sum, without eight registers of zeros.
__device__ inline void mma_bf16_first(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// mma_tf32: c (16x8) += a (16x8) b (8x8) in tf32: lane 4g + t holds rows g, g+8 at k = t, t+4.
__device__ inline void mma_tf32(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
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
static void pair_center(floatX *ac, floatX *bc, float *astat, float *bstat, const floatX *a,
                        const floatX *b, size_t B, size_t T, size_t H, int norm,
                        cudaStream_t stream)
{
    size_t rows = B * T;
    if (norm == NORM_NONE) {
        if (ac != a)
            CUDA_CHECK(cudaMemcpyAsync(ac, a, rows * H * sizeof *a, cudaMemcpyDefault, stream));
        if (bc != b)
            CUDA_CHECK(cudaMemcpyAsync(bc, b, rows * H * sizeof *b, cudaMemcpyDefault, stream));
        return;
    }
    auto kernel = H % 2 || H > 512 ? pair_center_kernel
                  : H <= 192       ? pair_center_wide_kernel<3>
                                   : pair_center_wide_kernel<8>;
    kernel<<<pair_grid((2 * rows + 7) / 8), 256, 0, stream>>>(ac, bc, astat, bstat, a, b, rows,
                                                              (int)H, norm);
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

// ---- forward, fast path ----

enum { ROWS = 8, CHUNK_V = 96 };

// pair_dots: for one warp, c = the 16 x 8 products b_v . a_u of rows v .. v+15 and u .. u+7 (rows
// outside 0..T-1 repeat the nearest), as an mma accumulator: c[0], c[1] are row g at columns 2t,
// 2t+1 and c[2], c[3] row g+8. A sum may run over channels in any order: both operands take them 16
// bytes a lane. FP32: hi*hi + hi*lo + lo*hi in TF32, as accurate as fp32 products.
__device__ inline void pair_dots(float c[4], const __nv_bfloat16 *bc, const __nv_bfloat16 *ac,
                                 int v, int u, int T, int H)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const __nv_bfloat16 *x = bc + (size_t)min(v + g, T - 1) * H + 8 * t;
    const __nv_bfloat16 *y = bc + (size_t)min(v + g + 8, T - 1) * H + 8 * t;
    const __nv_bfloat16 *z = ac + (size_t)min(max(u + g, 0), T - 1) * H + 8 * t;
    c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll 2
    for (int d = 0; d < H; d += 32) {
        uint4 p = *(const uint4 *)(x + d), q = *(const uint4 *)(y + d), s = *(const uint4 *)(z + d);
        mma_bf16(c, p.x, q.x, p.y, q.y, s.x, s.y);
        mma_bf16(c, p.z, q.z, p.w, q.w, s.z, s.w);
    }
}

__device__ inline uint32_t tf32_high(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1fffu; }

__device__ inline void pair_dots(float c[4], const float *bc, const float *ac, int v, int u, int T,
                                 int H)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float *row[3] = {bc + (size_t)min(v + g, T - 1) * H + 4 * t,
                           bc + (size_t)min(v + g + 8, T - 1) * H + 4 * t,
                           ac + (size_t)min(max(u + g, 0), T - 1) * H + 4 * t};
    c[0] = c[1] = c[2] = c[3] = 0;
    for (int d = 0; d < H; d += 16) {
        uint32_t hi[3][4], lo[3][4];
        for (int i = 0; i < 3; i++) {
            float4 f = *(const float4 *)(row[i] + d);
            const float x[4] = {f.x, f.y, f.z, f.w};
            for (int j = 0; j < 4; j++) {
                hi[i][j] = tf32_high(x[j]);
                lo[i][j] = tf32_high(x[j] - __uint_as_float(hi[i][j]));
            }
        }
        for (int j = 0; j < 4; j += 2) {
            mma_tf32(c, lo[0][j], lo[1][j], lo[0][j + 1], lo[1][j + 1], hi[2][j], hi[2][j + 1]);
            mma_tf32(c, hi[0][j], hi[1][j], hi[0][j + 1], hi[1][j + 1], lo[2][j], lo[2][j + 1]);
            mma_tf32(c, hi[0][j], hi[1][j], hi[0][j + 1], hi[1][j + 1], hi[2][j], hi[2][j + 1]);
        }
    }
}

// pair_r: 1/sqrt(variance of the pair); a variance that rounding made negative counts as 0.
__device__ inline float pair_r(float avar, float bvar, float dot, float inv_H)
{
    return rsqrtf(fmaxf(avar + bvar + 2.0f * inv_H * dot, 0.0f) + PAIR_EPS);
}

// pair_r_tile: for one warp, rs[i][j] = log2(e) r of the pair (u+j, v+i), 16 x 8.
__device__ inline void pair_r_tile(float (*rs)[ROWS], const floatX *bc, const floatX *ac,
                                   const float *bstat, const float *astat, int v, int u, int T,
                                   int H, int norm)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float c[4], r[4] = {LOG2E, LOG2E, LOG2E, LOG2E};
    if (norm == NORM_EXACT) {
        pair_dots(c, bc, ac, v, u, T, H);
        for (int i = 0; i < 4; i++)
            r[i] = LOG2E * pair_r(astat[min(max(u + 2 * t + i % 2, 0), T - 1)],
                                  bstat[min(v + g + i / 2 * 8, T - 1)], c[i], 1.0f / (float)H);
    }
    store2(&rs[g][2 * t], r[0], r[1]);
    store2(&rs[g + 8][2 * t], r[2], r[3]);
}

// pair_forward_row: one v against rows FIRST .. ROWS-1 of two channels, those below `mask`
// (DIAGONAL) masked; NPOLY of the sixteen exponentials go to the FMA pipe.
template <int NPOLY, int FIRST, int DIAGONAL>
__device__ __forceinline__ void pair_forward_row(float2 o[ROWS], float2 p[ROWS],
                                                 const float2 a[ROWS], float2 b, const float *rs_v,
                                                 int mask)
{
    const float4 r0 = *(const float4 *)rs_v, r1 = *(const float4 *)(rs_v + 4);
    const float r[ROWS] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
#pragma unroll
    for (int i = FIRST; i < ROWS; i++) {
        float x = (a[i].x + b.x) * r[i], y = (a[i].y + b.y) * r[i];
        if (DIAGONAL) {
            x = i < mask ? MASKED : x;
            y = i < mask ? MASKED : y;
        }
        x = 2 * i * NPOLY % 16 < NPOLY ? exp2_poly(x) : exp2_mufu(x);
        y = (2 * i + 1) * NPOLY % 16 < NPOLY ? exp2_poly(y) : exp2_mufu(y);
        o[i].x += x;
        o[i].y += y;
        p[i].x = fmaf(r[i], x, p[i].x);
        p[i].y = fmaf(r[i], y, p[i].y);
    }
}

// pair_forward_kernel: a block owns rows u0 .. u0+7 of one sequence, a thread two channels of them;
// r of a chunk of v is made by the warps on the tensor cores. Rows are cut from the end of the
// sequence, so that a ragged tile is the one with the fewest v, and the longest go first.
template <int CAUSAL, int NPOLY>
__global__ void __launch_bounds__(256, 3)
    pair_forward_kernel(floatX *s, floatX *p, float *scale, const floatX *__restrict__ ac,
                        const floatX *__restrict__ bc, const float *__restrict__ astat,
                        const float *__restrict__ bstat, int B, int T, int H, PairOptions opt)
{
    __shared__ __align__(16) float rs[CHUNK_V][ROWS];
    __shared__ float maxima[8][ROWS];
    extern __shared__ float kept[]; // [a, o, q][ROWS][H]: every thread's own channels
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, d = 2 * threadIdx.x;
    const int b = blockIdx.x % B, u0 = T - ROWS * (int)(blockIdx.x / B + 1);
    float *own = kept + d;
    for (int i = 0; i < ROWS; i++) {
        float2 x = load2(ac + ((size_t)b * T + max(u0 + i, 0)) * H + d);
        store2(&own[i * H], x.x, x.y);
        store2(&own[(ROWS + i) * H], 0, 0);
        store2(&own[(2 * ROWS + i) * H], 0, 0);
    }
    const int v_stop = CAUSAL ? u0 + ROWS : T, v_full = CAUSAL ? u0 : T;
    for (int v0 = 0; v0 < v_stop; v0 += CHUNK_V) {
        const size_t row0 = (size_t)b * T; // the sequence's first row
        const floatX *bc0 = bc + row0 * H;
        __syncthreads();
        for (int i = 16 * warp; i < min(CHUNK_V, v_stop - v0); i += 16 * warps)
            pair_r_tile(&rs[i], bc0, ac + row0 * H, bstat + row0, astat + row0, v0 + i, u0, T, H,
                        opt.norm);
        __syncthreads();
        float2 a[ROWS], o[ROWS],
            q[ROWS]; // in registers for the pair loop alone: else ptxas, short of
#pragma unroll       // registers in pair_r_tile, spills them inside the loop
        for (int i = 0; i < ROWS; i++) {
            a[i] = load2(&own[i * H]);
            o[i] = load2(&own[(ROWS + i) * H]);
            q[i] = load2(&own[(2 * ROWS + i) * H]);
        }
        const floatX *b_v = bc0 + (size_t)v0 * H + d;
        const float *rs_v = rs[0];
        const int v_end = min(v0 + CHUNK_V, v_stop);
        int n = min(v_end, v_full) - v0, v = v0 + max(n, 0);
        if (n >= 4) { // two rows of b are on their way while two are in use
            floatX2 b0 = *(const floatX2 *)b_v, b1 = *(const floatX2 *)(b_v + H);
#pragma unroll 1
            for (; n >= 4; n -= 2, rs_v += 2 * ROWS) {
                b_v += 2 * H;
                const floatX2 b2 = *(const floatX2 *)b_v, b3 = *(const floatX2 *)(b_v + H);
                pair_forward_row<NPOLY, 0, 0>(o, q, a, to_float2(b0), rs_v, 0);
                pair_forward_row<NPOLY, 0, 0>(o, q, a, to_float2(b1), rs_v + ROWS, 0);
                b0 = b2, b1 = b3;
            }
        }
#pragma unroll 1
        for (; n > 0; n--, b_v += H, rs_v += ROWS)
            pair_forward_row<0, 0, 0>(o, q, a, load2(b_v), rs_v, 0);
        if (CAUSAL) { // the triangle at the end of the rows, a third of it masked
#pragma unroll 1
            for (; v < min(v_end, u0 + ROWS / 2); v++, b_v += H, rs_v += ROWS)
                pair_forward_row<0, 0, 1>(o, q, a, load2(b_v), rs_v, v - u0);
#pragma unroll 1
            for (; v < v_end; v++, b_v += H, rs_v += ROWS)
                pair_forward_row<0, ROWS / 2, 1>(o, q, a, load2(b_v), rs_v, v - u0);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            store2(&own[(ROWS + i) * H], o[i].x, o[i].y);
            store2(&own[(2 * ROWS + i) * H], q[i].x, q[i].y);
        }
    }
    for (int i = 0; i < ROWS; i++) {
        const float2 o = load2(&own[(ROWS + i) * H]);
        const float m = warp_max(fmaxf(fabsf(o.x), fabsf(o.y)));
        if (threadIdx.x % 32 == 0)
            maxima[warp][i] = m;
    }
    __syncthreads();
    for (int i = max(0, -u0); i < ROWS; i++) {
        const float2 o = load2(&own[(ROWS + i) * H]), q = load2(&own[(2 * ROWS + i) * H]);
        const size_t row = (size_t)b * T + u0 + i;
        float m = 0;
        for (int w = 0; w < warps; w++)
            m = fmaxf(m, maxima[w][i]);
        m = row_scale(m, u0 + i, T, opt);
        store2(s + row * H + d, o.x * m, o.y * m);
        store2(p + row * H + d, q.x * (m * LN2), q.y * (m * LN2)); // r had a factor log2(e)
        if (threadIdx.x == 0)
            scale[row] = m;
    }
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

// pair_general_forward_kernel: a thread owns rows u0 .. u0+7 of one channel; with post the sums are
// written as they are and pair_rescale_kernel follows.
template <int ACT>
__global__ void __launch_bounds__(128)
    pair_general_forward_kernel(floatX *s, floatX *p, float *scale, const floatX *__restrict__ ac,
                                const floatX *__restrict__ bc, const float *__restrict__ R, int T,
                                int H, PairOptions opt)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS_G - 1) / ROWS_G;
    const int d = blockIdx.x % slices * 128 + threadIdx.x,
              u0 = blockIdx.x / slices % tiles * ROWS_G;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float a[ROWS_G], o[ROWS_G] = {}, q[ROWS_G] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        a[i] = to_float(ac[(row0 + min(u0 + i, T - 1)) * H + d]);
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

// pair_general_db_kernel: a thread owns rows v0 .. v0+7 of one channel:
// db_v = sum_u r g e - N - M (a + b).
template <int ACT>
__global__ void __launch_bounds__(128)
    pair_general_db_kernel(floatX *db, const floatX *__restrict__ ds,
                           const float *__restrict__ scale, const floatX *__restrict__ ac,
                           const floatX *__restrict__ bc, const float *__restrict__ R,
                           const float *__restrict__ M, const float *__restrict__ N, int T, int H,
                           PairOptions opt)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS_G - 1) / ROWS_G;
    const int d = blockIdx.x % slices * 128 + threadIdx.x,
              v0 = blockIdx.x / slices % tiles * ROWS_G;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float b[ROWS_G], acc[ROWS_G] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        b[i] = to_float(bc[(row0 + min(v0 + i, T - 1)) * H + d]);
    for (int u = opt.causal ? v0 : 0; u < T; u++) {
        const float a = to_float(ac[(row0 + u) * H + d]);
        const float g = scale[row0 + u] * to_float(ds[(row0 + u) * H + d]);
        const size_t at = (row0 + u) * T + v0;
#pragma unroll
        for (int i = 0; i < ROWS_G; i++)
            if (v0 + i < T && (!opt.causal || v0 + i <= u)) {
                float r = R[at + i], value, slope;
                psi<ACT>((a + b[i]) * r, &value, &slope);
                acc[i] = fmaf(r * g, slope, acc[i]);
                if (opt.norm == NORM_EXACT)
                    acc[i] -= fmaf(M[at + i], a + b[i], N[at + i]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        if (v0 + i < T)
            from_float(&db[(row0 + v0 + i) * H + d], acc[i]);
}

// pair_general_da_kernel: a thread owns rows u0 .. u0+7 of one channel:
// da_u = g P - sum_v N + M (a + b), where g P = ds p: p carries the scale.
__global__ void __launch_bounds__(128)
    pair_general_da_kernel(floatX *da, const floatX *__restrict__ ds, const floatX *__restrict__ p,
                           const floatX *__restrict__ ac, const floatX *__restrict__ bc,
                           const float *__restrict__ M, const float *__restrict__ N, int T, int H,
                           PairOptions opt)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS_G - 1) / ROWS_G;
    const int d = blockIdx.x % slices * 128 + threadIdx.x,
              u0 = blockIdx.x / slices % tiles * ROWS_G;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float a[ROWS_G], acc[ROWS_G] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        a[i] = to_float(ac[(row0 + min(u0 + i, T - 1)) * H + d]);
    const int v_end = opt.norm != NORM_EXACT ? 0 : opt.causal ? min(u0 + ROWS_G, T) : T;
    for (int v = 0; v < v_end; v++) {
        const float b = to_float(bc[(row0 + v) * H + d]);
#pragma unroll
        for (int i = 0; i < ROWS_G; i++)
            if (u0 + i < T && (!opt.causal || v <= u0 + i)) {
                const size_t at = (row0 + u0 + i) * T + v;
                acc[i] += fmaf(M[at], a[i] + b, N[at]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        if (u0 + i < T) {
            const size_t at = (row0 + u0 + i) * H + d;
            from_float(&da[at], to_float(ds[at]) * to_float(p[at]) - acc[i]);
        }
}

// ---- backward, fast path (BF16) ----

#ifdef PRECISION_BF16

enum { TILE_V = 32, CHUNK_U = 16, MT_STRIDE = CHUNK_U + 8 };

// The block's shared memory. A tile's 32 x 16 pairs: row v = 16m + 8 half + g of a u stands at 16m
// + 2g
// + half, so that a lane's two rows are neighbours.
typedef struct {
    float *ag;         // [CHUNK_U][H/4][a: 4, g: 4]
    float *rl;         // [CHUNK_U][2][8][log2(e) r: 2, log2(r): 2]
    float *s2;         // [H/32][CHUNK_U][TILE_V]  each slice's share of s2
    __nv_bfloat16 *g2; // [CHUNK_U][H/4][g a: 4, g: 4]  the mma's B operands of e' and e' b
    __nv_bfloat16 *ab; // [2][CHUNK_U][H+8]  channels in the order of pair_place
    __nv_bfloat16 *bb; // [TILE_V][H+8]  likewise
    __nv_bfloat16 *mt; // [TILE_V][MT_STRIDE]  -M, transposed
} PairShared;

// pair_shared: cut the block's dynamic memory; returns its size in bytes (x NULL: only that).
__host__ __device__ inline size_t pair_shared(PairShared *x, char *base, int H)
{
    const size_t f = CHUNK_U * H, pairs = CHUNK_U * TILE_V, share = (size_t)H / 32 * pairs;
    if (x) {
        x->ag = (float *)base;
        x->rl = x->ag + 2 * f;
        x->s2 = x->rl + 2 * pairs;
        x->g2 = (__nv_bfloat16 *)(x->s2 + share);
        x->ab = x->g2 + 2 * f;
        x->bb = x->ab + 2 * CHUNK_U * (H + 8);
        x->mt = x->bb + TILE_V * (H + 8);
    }
    return 4 * (2 * f + 2 * pairs + share) +
           2 * (2 * f + (2 * CHUNK_U + TILE_V) * (H + 8) + TILE_V * MT_STRIDE);
}

// A lane's part of a warp's 16 rows v by 32 channels: rows g and g+8 (half), channels 16c + 4t + j:
// the layout of mma's A operand and of its accumulator at once, k = 2t, 2t+1, 2t+8, 2t+9 being 4t
// .. 4t+3.
typedef struct {
    float b[2][2][4];   // [c][half][j]
    float acc[2][2][4]; // db
    uint32_t bb[2][4];  // b in BF16: an A operand
} PairTile;

// pair_place: where channels d, d+1 (d a multiple of 4; d+2, d+3: 8 further) of a row of ab or bb
// stand: in each 16, column 8n + 2t + i is channel 4t + 2n + i, so that ldmatrix delivers a
// PairTile's channels.
__device__ inline int pair_place(int d) { return d / 16 * 16 + d % 16 / 2; }

// A thread's part of a chunk of 16 u on its way to shared memory: rows own_u + 8k, four channels
// from own_d; own_u = threadIdx / (H/4), own_d = 4 (threadIdx % (H/4)), 2H threads.
typedef struct {
    uint2 a[2], ds[2];
    float scale[2];
} PairFetch;

// pair_fetch_u: rows u0 .. u0+15 of a, ds and scale from global memory, 0 beyond T.
__device__ inline PairFetch pair_fetch_u(const floatX *ac, const floatX *ds, const float *scale,
                                         int u0, int own_u, int own_d, int T, int H)
{
    PairFetch f;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = u0 + own_u + 8 * k;
        f.a[k] = f.ds[k] = make_uint2(0, 0);
        f.scale[k] = 0;
        if (u < T) {
            f.a[k] = *(const uint2 *)(ac + (size_t)u * H + own_d);
            f.ds[k] = *(const uint2 *)(ds + (size_t)u * H + own_d);
            f.scale[k] = scale[u];
        }
    }
    return f;
}

// pair_store_u: what pair_fetch_u fetched, to x.ag, x.g2 and ab, with g = scale ds.
__device__ inline void pair_store_u(const PairShared &x, __nv_bfloat16 *ab, const PairFetch &f,
                                    int own_u, int d, int H)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = own_u + 8 * k;
        const float2 a0 = load2((const floatX *)&f.a[k].x), a1 = load2((const floatX *)&f.a[k].y);
        const float2 d0 = load2((const floatX *)&f.ds[k].x), d1 = load2((const floatX *)&f.ds[k].y);
        const float4 g = {f.scale[k] * d0.x, f.scale[k] * d0.y, f.scale[k] * d1.x,
                          f.scale[k] * d1.y};
        float4 *ag = (float4 *)&x.ag[2 * (u * H + d)];
        ag[0] = make_float4(a0.x, a0.y, a1.x, a1.y);
        ag[1] = g;
        *(uint4 *)&x.g2[2 * (u * H + d)] =
            make_uint4(pack2(g.x * a0.x, g.y * a0.y), pack2(g.z * a1.x, g.w * a1.y),
                       pack2(g.x, g.y), pack2(g.z, g.w));
        uint32_t *place = (uint32_t *)&ab[u * (H + 8) + pair_place(d)];
        place[0] = f.a[k].x;
        place[4] = f.a[k].y;
    }
}

// pair_backward_r: one warp of four (quarter): r and log2(r) of 16 v by 8 u of the chunk in ab from
// the tensor cores; masked pairs get an exponent of MASKED.
template <int STATS, int CAUSAL>
__device__ inline void pair_backward_r(const PairShared &x, const __nv_bfloat16 *ab,
                                       const float *astat, const float *bstat, int v0, int u0,
                                       int T, int H, float inv_H, int quarter, int g, int t)
{
    const int m = quarter % 2, n = quarter / 2;
    const __nv_bfloat16 *b0 = x.bb + (16 * m + g) * (H + 8) + 8 * t, *b1 = b0 + 8 * (H + 8);
    const __nv_bfloat16 *a = ab + (8 * n + g) * (H + 8) + 8 * t;
    float c[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int d = 0; STATS && d < H; d += 32) {
        const uint4 p = *(const uint4 *)(b0 + d), q = *(const uint4 *)(b1 + d);
        const uint4 s = *(const uint4 *)(a + d);
        mma_bf16(c, p.x, q.x, p.y, q.y, s.x, s.y);
        mma_bf16(c, p.z, q.z, p.w, q.w, s.z, s.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int u = u0 + 8 * n + 2 * t + i % 2, v = v0 + 16 * m + g + i / 2 * 8;
        const int in = u < T && v < T && (!CAUSAL || v <= u);
        float r = 1;
        if (STATS && in)
            r = pair_r(astat[u], bstat[v], c[i], inv_H);
        float *rl = x.rl + 2 * (u - u0) * TILE_V + 32 * m + 4 * g + i / 2;
        rl[0] = in ? LOG2E * r : 0.0f;
        rl[2] = in ? __log2f(r) : MASKED;
    }
}

// pair_backward_rows: rows u .. u_end-1 of the chunk against the warp's first NH halves (of 8 rows
// v): e' = r e straight from the exponent, acc += g e', and with STATS the slice's share of the sum
// over channels of g e' (a + b) from the tensor cores, the same in all eight columns of an mma.
// NPOLY of 8 exponentials go to the FMA pipe.
template <int NH, int STATS, int NPOLY>
__device__ __forceinline__ void pair_backward_rows(PairTile &tile, const PairShared &x, int u,
                                                   int u_end, int H, int warp, int g, int t)
{
    const int m = warp % 2, slice = warp / 2;
    const float *ag = x.ag + 2 * (u * H + 32 * slice + 4 * t);
    const float *rl = x.rl + 2 * u * TILE_V + 32 * m + 4 * g;
    const __nv_bfloat16 *g2 = x.g2 + 2 * (u * H + 32 * slice + 4 * t);
    float *s2 = x.s2 + (slice * CHUNK_U + u) * TILE_V + 16 * m + 2 * g;
#pragma unroll 1
    for (; u < u_end; u++, ag += 2 * H, g2 += 2 * H, rl += 2 * TILE_V, s2 += TILE_V) {
        float r[4], sum[4]; // r: r of both rows, log2(r) of both rows
        load4(r, rl);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint32_t e[4] = {0, 0, 0, 0};
            float a[4], gu[4];
            load4(a, ag + 32 * c);
            load4(gu, ag + 32 * c + 4);
#pragma unroll
            for (int half = 0; half < NH; half++) {
                float y[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int i = 4 * half + j;
                    y[j] = fmaf(a[j] + tile.b[c][half][j], r[half], r[2 + half]);
                    y[j] = i * NPOLY % 8 < NPOLY ? exp2_poly(y[j]) : exp2_mufu(y[j]);
                    tile.acc[c][half][j] = fmaf(gu[j], y[j], tile.acc[c][half][j]);
                }
                e[half] = pack2(y[0], y[1]);
                e[half + 2] = pack2(y[2], y[3]);
            }
            if (STATS) {
                const uint4 k = *(const uint4 *)(g2 + 32 * c);
                const uint32_t *b = tile.bb[c];
                if (c == 0)
                    mma_bf16_first(sum, e[0], e[1], e[2], e[3], k.x, k.y);
                else
                    mma_bf16(sum, e[0], e[1], e[2], e[3], k.x, k.y);
                mma_bf16(sum, mul2(e[0], b[0]), mul2(e[1], b[1]), mul2(e[2], b[2]),
                         mul2(e[3], b[3]), k.z, k.w);
            }
        }
        if (STATS && t == 0)
            store2(s2, sum[0], sum[2]);
    }
}

// ldmatrix4, ldmatrix4_trans: four 8x8 matrices of BF16, rows at the lanes' addresses p: an A
// operand (or, transposed, two B operands) of mma.
__device__ inline uint4 ldmatrix4(const __nv_bfloat16 *p)
{
    uint4 f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
                 : "r"((uint32_t)__cvta_generic_to_shared(p))
                 : "memory");
    return f;
}
__device__ inline uint4 ldmatrix4_trans(const __nv_bfloat16 *p)
{
    uint4 f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
                 : "r"((uint32_t)__cvta_generic_to_shared(p))
                 : "memory");
    return f;
}

// pair_m_product: acc -= M^T a over the chunk's 16 u, -M taken from x.mt and a from ab.
__device__ inline void pair_m_product(PairTile &tile, const PairShared &x, const __nv_bfloat16 *ab,
                                      int H, int warp, int lane)
{
    const int row = lane % 16, column = lane / 16 * 8;
    const uint4 m = ldmatrix4(x.mt + (warp % 2 * 16 + row) * MT_STRIDE + column);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint4 b = ldmatrix4_trans(ab + row * (H + 8) + warp / 2 * 32 + 16 * c + column);
#pragma unroll
        for (int n = 0; n < 2; n++) { // accumulator columns 2t, 2t+1 are channels 4t+2n, 4t+2n+1
            float(*acc)[4] = tile.acc[c];
            float f[4] = {acc[0][2 * n], acc[0][2 * n + 1], acc[1][2 * n], acc[1][2 * n + 1]};
            mma_bf16(f, m.x, m.y, m.z, m.w, n ? b.z : b.x, n ? b.w : b.y);
            acc[0][2 * n] = f[0], acc[0][2 * n + 1] = f[1];
            acc[1][2 * n] = f[2], acc[1][2 * n + 1] = f[3];
        }
    }
}

// pair_store_db: db = acc - mean over channels of sum_u r g e - b sum_u M. What acc holds is
// already short of M^T a, whose mean over channels is 0 with a's. sum_m: this thread's part of its
// lane's row.
template <int STATS>
__device__ inline void pair_store_db(floatX *db, const PairTile &tile, const PairShared &x,
                                     float sum_m, int v0, int T, int H)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warps = H / 16, m = warp % 2, slice = warp / 2;
    float *all_m = x.ag, *all_n = x.ag + warps * TILE_V; // [warp][TILE_V], [slice][TILE_V]
    all_m[warp * TILE_V + lane] = sum_m;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
        for (int i = 0; i < 8; i++)
            sum += tile.acc[i / 4][half][i % 4];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0)
            all_n[slice * TILE_V + 16 * m + 2 * g + half] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = 16 * m + 2 * g + half, v = v0 + 16 * m + 8 * half + g;
        float sum = 0, mean = 0;
#pragma unroll 1
        for (int w = 0; STATS && w < warps; w++)
            sum += all_m[w * TILE_V + at];
#pragma unroll 1
        for (int w = 0; STATS && w < H / 32; w++)
            mean += all_n[w * TILE_V + at];
        mean /= (float)H;
#pragma unroll
        for (int c = 0; c < 2 && v < T; c++) {
            const float *f = tile.acc[c][half], *b = tile.b[c][half];
            floatX *out = db + (size_t)v * H + 32 * slice + 16 * c + 4 * t;
            store2(out, f[0] - mean - b[0] * sum, f[1] - mean - b[1] * sum);
            store2(out + 2, f[2] - mean - b[2] * sum, f[3] - mean - b[3] * sum);
        }
    }
}

// pair_backward_kernel: a block owns 32 rows v of one sequence (db), a warp 16 of them by 32
// channels, and walks over u in chunks of 16. With STATS (exact) also M (B,T,Tp) in BF16, Tp = T
// rounded up to 32, 0 where masked. N is not needed: sum_u N_uv is the mean over channels of sum_u
// r g e.
template <int STATS, int CAUSAL, int NPOLY>
__global__ void __launch_bounds__(768, 1)
    pair_backward_kernel(floatX *db, __nv_bfloat16 *M, const floatX *__restrict__ ds,
                         const float *__restrict__ scale, const floatX *__restrict__ ac,
                         const floatX *__restrict__ bc, const float *__restrict__ astat,
                         const float *__restrict__ bstat, int B, int T, int H)
{
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int v0 = (int)(blockIdx.x / B) * TILE_V, stride_M = (T + TILE_V - 1) / TILE_V * TILE_V;
    const int lane_v = lane / 16 * 16 + lane % 2 * 8 + lane / 2 % 8; // the pair kept at `lane`
    const size_t row0 = (size_t)(blockIdx.x % B) * T;
    float sum_m = 0;
    PairShared x;
    PairTile tile;
    pair_shared(&x, shared, H);
    const int last_quarter = (int)blockDim.x / 32 - 4; // r is made by the last four warps
    const int own_u = threadIdx.x / (H / 4), own_d = threadIdx.x % (H / 4) * 4;
    const float inv_H = 1.0f / (float)H;
    for (int v = own_u; v < TILE_V; v += 8) {
        uint2 raw = {0, 0};
        if (v0 + v < T)
            raw = *(const uint2 *)(bc + (row0 + v0 + v) * H + own_d);
        uint32_t *place = (uint32_t *)&x.bb[v * (H + 8) + pair_place(own_d)];
        place[0] = raw.x;
        place[4] = raw.y;
    }
    int u0 = CAUSAL ? v0 : 0;
    pair_store_u(x, x.ab,
                 pair_fetch_u(ac + row0 * H, ds + row0 * H, scale + row0, u0, own_u, own_d, T, H),
                 own_u, own_d, H);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int c = i / 2, half = i % 2, v = warp % 2 * 16 + 8 * half + g;
        const __nv_bfloat16 *bv = &x.bb[v * (H + 8) + warp / 2 * 32 + 16 * c + 2 * t];
        tile.bb[c][half] = *(const uint32_t *)bv,
        tile.bb[c][half + 2] = *(const uint32_t *)(bv + 8);
        const float2 lo = load2(bv), hi = load2(bv + 8);
        tile.b[c][half][0] = lo.x, tile.b[c][half][1] = lo.y;
        tile.b[c][half][2] = hi.x, tile.b[c][half][3] = hi.y;
        for (int j = 0; j < 4; j++)
            tile.acc[c][half][j] = 0;
    }
    if (warp >= last_quarter)
        pair_backward_r<STATS, CAUSAL>(x, x.ab, astat + row0, bstat + row0, v0, u0, T, H, inv_H,
                                       warp - last_quarter, g, t);
    __syncthreads();
    for (int k = 0; u0 < T; u0 += CHUNK_U, k ^= 1) { // chunk u0's a is in ab[k]
        __nv_bfloat16 *ab = x.ab + k * CHUNK_U * (H + 8),
                      *ab_next = x.ab + (1 - k) * CHUNK_U * (H + 8);
        for (int i = 0; i < CHUNK_U; i += 8) {
            const int end = min(i + 8, T - u0), halves = (u0 + i - v0) / 8 + 1 - warp % 2 * 2;
            if (!CAUSAL || halves >= 2)
                pair_backward_rows<2, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
            else if (halves == 1)
                pair_backward_rows<1, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
        }
        __syncthreads();
        const PairFetch next = pair_fetch_u(ac + row0 * H, ds + row0 * H, scale + row0,
                                            u0 + CHUNK_U, own_u, own_d, T, H);
        for (int i = warp; STATS && i < CHUNK_U; i += blockDim.x / 32) {
            const int u = u0 + i, v = v0 + lane_v, in = u < T && v < T && (!CAUSAL || v <= u);
            const float r = LN2 * x.rl[2 * i * TILE_V + lane / 2 * 4 + lane % 2];
            float s2 = 0;
#pragma unroll 2
            for (int w = 0; w < H / 32; w++)
                s2 += x.s2[(w * CHUNK_U + i) * TILE_V + lane];
            const __nv_bfloat16 m = __float2bfloat16(in ? r * r * inv_H * s2 : 0.0f);
            x.mt[lane_v * MT_STRIDE + i] = __hneg(m);
            sum_m += __bfloat162float(m);
            if (u < T)
                M[(row0 + u) * stride_M + v] = m;
        }
        pair_store_u(x, ab_next, next, own_u, own_d, H);
        __syncthreads();
        if (STATS)
            pair_m_product(tile, x, ab, H, warp, lane);
        if (warp >= last_quarter)
            pair_backward_r<STATS, CAUSAL>(x, ab_next, astat + row0, bstat + row0, v0, u0 + CHUNK_U,
                                           T, H, inv_H, warp - last_quarter, g, t);
        __syncthreads();
    }
    pair_store_db<STATS>(db + row0 * H, tile, x, sum_m, v0, T, H);
}

enum { MS_STRIDE = TILE_V + 8 };

// cp_async16: start copying 16 bytes from global to shared memory.
__device__ inline void cp_async16(__nv_bfloat16 *to, const __nv_bfloat16 *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// pair_fetch_da: start copying rows v .. v+31 of b to bs [TILE_V][H+8] and M's tile of rows u ..
// u+31 to ms [TILE_V][MS_STRIDE]; rows from T on repeat the last: M is 0 for such v, such u are not
// stored.
__device__ inline void pair_fetch_da(__nv_bfloat16 *bs, __nv_bfloat16 *ms, const floatX *bc,
                                     const __nv_bfloat16 *M, int u, int v, int T, int H)
{
    for (int i = threadIdx.x / (H / 8); i < TILE_V; i += 8) {
        const int d = threadIdx.x % (H / 8) * 8;
        cp_async16(&bs[i * (H + 8) + d], bc + (size_t)min(v + i, T - 1) * H + d);
    }
    for (int k = threadIdx.x; k < TILE_V * 4; k += blockDim.x)
        cp_async16(&ms[k / 4 * MS_STRIDE + k % 4 * 8],
                   M + (size_t)min(u + k / 4, T - 1) * ((T + TILE_V - 1) / TILE_V * TILE_V) + v +
                       k % 4 * 8);
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// pair_da_kernel: da = ds p - sum_v N - a sum_v M - M b for 32 rows u of one sequence, a warp 32
// channels (H threads); sum_v N is the mean over channels of ds p, sum_v M is M times a column of
// ones.
template <int CAUSAL>
__global__ void __launch_bounds__(384, 2)
    pair_da_kernel(floatX *da, const floatX *__restrict__ ds, const floatX *__restrict__ p,
                   const floatX *__restrict__ ac, const floatX *__restrict__ bc,
                   const __nv_bfloat16 *__restrict__ M, int B, int T, int H)
{
    extern __shared__ __align__(16) char shared[]; // [2] of bs and ms
    __shared__ float means[12][TILE_V];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (T + TILE_V - 1) / TILE_V, tile_u = tiles - 1 - (int)(blockIdx.x / B);
    const int u0 = tile_u * TILE_V, last = CAUSAL ? tile_u : tiles - 1;
    const int stage = TILE_V * (H + 8 + MS_STRIDE), ms_at = TILE_V * (H + 8);
    const size_t row0 = (size_t)(blockIdx.x % B) * T;
    const uint32_t ones = 0x3f803f80;
    float acc[2][4][4] = {}, sum_m[2][4] = {}; // [m][n] over rows 16m, channels 8n
    bc += row0 * H;
    M += row0 * tiles * TILE_V;
    pair_fetch_da((__nv_bfloat16 *)shared, (__nv_bfloat16 *)shared + ms_at, bc, M, u0, 0, T, H);
    for (int i = 0; i <= last; i++) {
        __nv_bfloat16 *bs = (__nv_bfloat16 *)shared + i % 2 * stage, *ms = bs + ms_at;
        __nv_bfloat16 *next = (__nv_bfloat16 *)shared + (i + 1) % 2 * stage;
        if (i < last) {
            pair_fetch_da(next, next + ms_at, bc, M, u0, (i + 1) * TILE_V, T, H);
            asm volatile("cp.async.wait_group 1;" : : : "memory");
        } else
            asm volatile("cp.async.wait_group 0;" : : : "memory");
        __syncthreads();
        uint4 m[2][2]; // [m][k]
#pragma unroll
        for (int j = 0; j < 4; j++)
            m[j / 2][j % 2] =
                ldmatrix4(ms + (j / 2 * 16 + lane % 16) * MS_STRIDE + j % 2 * 16 + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < 5; n++) {
            uint4 f = {ones, ones, ones, ones};
            if (n < 4)
                f = ldmatrix4_trans(&bs[lane * (H + 8) + 32 * warp + 8 * n]);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float *c = n < 4 ? acc[j][n] : sum_m[j];
                mma_bf16(c, m[j][0].x, m[j][0].y, m[j][0].z, m[j][0].w, f.x, f.y);
                mma_bf16(c, m[j][1].x, m[j][1].y, m[j][1].z, m[j][1].w, f.z, f.w);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4;
         i++) { // rows 8i + g: acc = ds p - M b, and the sum of ds p over channels
        const size_t at = (row0 + min(u0 + 8 * i + g, T - 1)) * H + 32 * warp + 2 * t;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 x = load2(ds + at + 8 * n), y = load2(p + at + 8 * n);
            float *f = &acc[i / 2][n][i % 2 * 2];
            sum += x.x * y.x + x.y * y.y;
            f[0] = x.x * y.x - f[0], f[1] = x.y * y.y - f[1];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0)
            means[warp][8 * i + g] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int u = u0 + 8 * i + g;
        const size_t at = (row0 + u) * H + 32 * warp + 2 * t;
        float mean = 0;
        for (int w = 0; w < H / 32; w++)
            mean += means[w][8 * i + g];
        mean /= (float)H;
#pragma unroll
        for (int n = 0; n < 4 && u < T; n++) {
            const float2 x = load2(ac + at + 8 * n);
            const float *f = &acc[i / 2][n][i % 2 * 2], m = sum_m[i / 2][i % 2 * 2];
            store2(da + at + 8 * n, f[0] - mean - x.x * m, f[1] - mean - x.y * m);
        }
    }
}

// pair_product_kernel: da = ds p, two channels a thread (approx and none).
__global__ void pair_product_kernel(floatX *da, const floatX *ds, const floatX *p, size_t n)
{
    size_t i = 2 * (blockIdx.x * (size_t)blockDim.x + threadIdx.x);
    if (i < n) {
        float2 x = load2(ds + i), y = load2(p + i);
        store2(da + i, x.x * y.x, x.y * y.y);
    }
}

#endif // PRECISION_BF16

// ---- launchers ----

#ifndef PAIR_FORWARD_POLY
#define PAIR_FORWARD_POLY 0 // of 16 exponentials
#endif
#ifndef PAIR_BACKWARD_POLY
#define PAIR_BACKWARD_POLY 0 // of 8
#endif

enum { PAIR_GENERAL, PAIR_FAST };

// pair_path: the fastest path that can run; the fast kernels read 16 bytes at a time and
// cudaMalloc's pointers plus whole rows of H are aligned for that.
static int pair_path(size_t H, PairOptions opt, int backward)
{
    int fast = opt.act == ACT_EXP && H % 64 == 0 && H <= (backward ? 384 : 512);
    return fast && (!backward || sizeof(floatX) == 2) ? PAIR_FAST : PAIR_GENERAL;
}

// pair_group: sequences that the general path handles at once: 256 MiB of r, M and N, at least one.
static size_t pair_group(size_t B, size_t T)
{
    size_t n = ((size_t)256 << 20) / (12 * T * T);
    return n < 1 ? 1 : n < B ? n : B;
}

// pair_scratch_bytes: what pair_forward (backward 0) or pair_backward (1) needs as scratch.
static size_t pair_scratch_bytes(size_t B, size_t T, PairOptions opt, int path, int backward)
{
    size_t tiles = (T + 31) / 32;
    if (path == PAIR_GENERAL)
        return (backward ? 12 : 4) * T * T * pair_group(B, T);
    return backward && opt.norm == NORM_EXACT ? B * T * tiles * 64 : 0;
}

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

// pair_forward_fast: NPOLY of 16 exponentials on the FMA pipe, where |exponents| < 126 is certain.
template <int NPOLY>
static void pair_forward_fast(floatX *s, floatX *p, float *scale, const floatX *ac,
                              const floatX *bc, const float *astat, const float *bstat, size_t B,
                              size_t T, size_t H, PairOptions opt, cudaStream_t stream)
{
    const unsigned grid = pair_grid(B * ((T + ROWS - 1) / ROWS));
    auto kernel = pair_forward_kernel<1, 0>;
    if (opt.norm == NORM_EXACT)
        kernel = opt.causal ? pair_forward_kernel<1, NPOLY> : pair_forward_kernel<0, NPOLY>;
    else if (!opt.causal)
        kernel = pair_forward_kernel<0, 0>;
    const size_t smem = 3 * ROWS * H * 4;
    bench_fits((const void *)kernel, "pair_forward_kernel", (int)H / 2, smem + 1024);
    kernel<<<grid, (unsigned)H / 2, smem, stream>>>(s, p, scale, ac, bc, astat, bstat, (int)B,
                                                    (int)T, (int)H, opt);
    CUDA_CHECK(cudaGetLastError());
}

// pair_forward_general: any shape and psi, in groups of sequences that fit the scratch.
static void pair_forward_general(floatX *s, floatX *p, float *scale, const floatX *ac,
                                 const floatX *bc, const float *astat, const float *bstat,
                                 void *scratch, size_t B, size_t T, size_t H, PairOptions opt,
                                 cudaStream_t stream)
{
    const size_t group = pair_group(B, T), tiles = (T + TILE - 1) / TILE;
    const size_t tasks = (T + ROWS_G - 1) / ROWS_G * ((H + 127) / 128);
    float *R = (float *)scratch;
    for (size_t b = 0; b < B; b += group) {
        const size_t n = b + group < B ? group : B - b, x = b * T * H, y = b * T;
        const unsigned grid = pair_grid(n * tiles * tiles);
        PAIR_CHECK(opt.act, (pair_stats_kernel<ACT><<<grid, 64, 0, stream>>>(
                              R, NULL, NULL, NULL, NULL, ac + x, bc + x, astat + y, bstat + y,
                              (int)T, (int)H, opt)));
        PAIR_CHECK(opt.act,
                 (pair_general_forward_kernel<ACT><<<pair_grid(n * tasks), 128, 0, stream>>>(
                     s + x, p + x, scale + y, ac + x, bc + x, R, (int)T, (int)H, opt)));
    }
    if (opt.post)
        pair_rescale_kernel<<<pair_grid((B * T + 7) / 8), 256, 0, stream>>>(s, p, scale, B * T,
                                                                            (int)H, opt);
    CUDA_CHECK(cudaGetLastError());
}

// pair_forward: s, p (B,T,H) = scale_u O_u and scale_u P_u, scale (B,T) = 2^-k (post) or one over
// the number of terms; from pair_center's ac, bc (B,T,H), astat, bstat (B,T). scratch:
// pair_scratch_bytes.
static void pair_forward(floatX *s, floatX *p, float *scale, const floatX *ac, const floatX *bc,
                         const float *astat, const float *bstat, void *scratch, size_t B, size_t T,
                         size_t H, PairOptions opt, cudaStream_t stream)
{
    if (pair_path(H, opt, 0) == PAIR_FAST)
        pair_forward_fast<PAIR_FORWARD_POLY>(s, p, scale, ac, bc, astat, bstat, B, T, H, opt,
                                             stream);
    else
        pair_forward_general(s, p, scale, ac, bc, astat, bstat, scratch, B, T, H, opt, stream);
}

// pair_uncenter: approx: da, db (B,T,H) through the two normalizes, in place; otherwise nothing:
// the gradients of exact already are those of the uncentred a and b.
static void pair_uncenter(floatX *da, floatX *db, const floatX *ac, const floatX *bc,
                          const float *astat, const float *bstat, size_t B, size_t T, size_t H,
                          int norm, cudaStream_t stream)
{
    unsigned grid = pair_grid((B * T + 7) / 8);
    if (norm != NORM_APPROX)
        return;
    pair_uncenter_kernel<<<grid, 256, 0, stream>>>(da, ac, astat, B * T, (int)H);
    pair_uncenter_kernel<<<grid, 256, 0, stream>>>(db, bc, bstat, B * T, (int)H);
    CUDA_CHECK(cudaGetLastError());
}

// pair_backward_general: any shape and psi, in groups of sequences that fit the scratch.
static void pair_backward_general(floatX *da, floatX *db, const floatX *ds, const floatX *p,
                                  const float *scale, const floatX *ac, const floatX *bc,
                                  const float *astat, const float *bstat, void *scratch, size_t B,
                                  size_t T, size_t H, PairOptions opt, cudaStream_t stream)
{
    const size_t group = pair_group(B, T), tiles = (T + TILE - 1) / TILE, TT = group * T * T;
    const size_t tasks = (T + ROWS_G - 1) / ROWS_G * ((H + 127) / 128);
    float *R = (float *)scratch, *M = R + TT, *N = M + TT;
    for (size_t b = 0; b < B; b += group) {
        const size_t n = b + group < B ? group : B - b, x = b * T * H, y = b * T;
        const unsigned grid = pair_grid(n * tiles * tiles);
        PAIR_CHECK(opt.act, (pair_stats_kernel<ACT><<<grid, 64, 0, stream>>>(
                              R, M, N, ds + x, scale + y, ac + x, bc + x, astat + y, bstat + y,
                              (int)T, (int)H, opt)));
        PAIR_CHECK(opt.act,
                 (pair_general_db_kernel<ACT><<<pair_grid(n * tasks), 128, 0, stream>>>(
                     db + x, ds + x, scale + y, ac + x, bc + x, R, M, N, (int)T, (int)H, opt)));
        pair_general_da_kernel<<<pair_grid(n * tasks), 128, 0, stream>>>(
            da + x, ds + x, p + x, ac + x, bc + x, M, N, (int)T, (int)H, opt);
        CUDA_CHECK(cudaGetLastError());
    }
    pair_uncenter(da, db, ac, bc, astat, bstat, B, T, H, opt.norm, stream);
}

#ifdef PRECISION_BF16

// pair_backward_fast: see pair_backward_kernel and pair_da_kernel.
template <int NPOLY>
static void pair_backward_fast(floatX *da, floatX *db, const floatX *ds, const floatX *p,
                               const float *scale, const floatX *ac, const floatX *bc,
                               const float *astat, const float *bstat, void *scratch, size_t B,
                               size_t T, size_t H, PairOptions opt, cudaStream_t stream)
{
    const size_t tiles = (T + TILE_V - 1) / TILE_V, smem = pair_shared(NULL, NULL, (int)H);
    const size_t da_smem = 4 * TILE_V * (H + 8 + MS_STRIDE);
    const unsigned grid = pair_grid(B * tiles);
    __nv_bfloat16 *M = (__nv_bfloat16 *)scratch;
    auto kernel = pair_backward_kernel<0, 1, 0>;
    if (opt.norm == NORM_EXACT)
        kernel = opt.causal ? pair_backward_kernel<1, 1, NPOLY> : pair_backward_kernel<1, 0, NPOLY>;
    else if (!opt.causal)
        kernel = pair_backward_kernel<0, 0, 0>;
    bench_fits((const void *)kernel, "pair_backward_kernel", 2 * (int)H, smem);
    kernel<<<grid, 2 * (unsigned)H, smem, stream>>>(db, M, ds, scale, ac, bc, astat, bstat, (int)B,
                                                    (int)T, (int)H);
    CUDA_CHECK(cudaGetLastError());
    if (opt.norm == NORM_EXACT) {
        auto da_kernel = opt.causal ? pair_da_kernel<1> : pair_da_kernel<0>;
        bench_fits((const void *)da_kernel, "pair_da_kernel", (int)H, da_smem);
        da_kernel<<<grid, (unsigned)H, da_smem, stream>>>(da, ds, p, ac, bc, M, (int)B, (int)T,
                                                          (int)H);
        CUDA_CHECK(cudaGetLastError());
    } else
        pair_product_kernel<<<pair_grid((B * T * H / 2 + 255) / 256), 256, 0, stream>>>(da, ds, p,
                                                                                        B * T * H);
    CUDA_CHECK(cudaGetLastError());
    pair_uncenter(da, db, ac, bc, astat, bstat, B, T, H, opt.norm, stream);
}

#endif

// pair_backward: da, db (B,T,H) = gradients of the a, b that pair_center read, from ds (B,T,H), the
// gradient of s, and what pair_center and pair_forward left: p, scale, ac, bc, astat, bstat.
static void pair_backward(floatX *da, floatX *db, const floatX *ds, const floatX *p,
                          const float *scale, const floatX *ac, const floatX *bc,
                          const float *astat, const float *bstat, void *scratch, size_t B, size_t T,
                          size_t H, PairOptions opt, cudaStream_t stream)
{
#ifdef PRECISION_BF16
    if (pair_path(H, opt, 1) == PAIR_FAST) {
        pair_backward_fast<PAIR_BACKWARD_POLY>(da, db, ds, p, scale, ac, bc, astat, bstat, scratch,
                                               B, T, H, opt, stream);
        return;
    }
#endif
    pair_backward_general(da, db, ds, p, scale, ac, bc, astat, bstat, scratch, B, T, H, opt,
                          stream);
}

#endif
