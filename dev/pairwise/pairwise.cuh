// pairwise.cuh: the quadratic CausalRN layer on the GPU, forward and backward.
//
// Layout (B,T,H): sequence b, position u (query) or v (memory), channel d. For every pair v <= u
//     z_uv[d] = r_uv (a_u[d] + b_v[d])      O_u[d] = sum_v psi(z)      P_u[d] = sum_v r_uv psi'(z)
// with a, b centred over channels and r_uv = 1/sqrt(va_u + vb_v + 2 a_u.b_v / H + eps) (norm exact),
// or a, b normalized or raw and r = 1 (approx, none). Given g = dL/dO and e = psi'(z), backward is
//     s1_uv = sum_d g e,  s2_uv = sum_d g e z,  N_uv = r s1 / H,  M_uv = r^2 s2 / H
//     da_u[d] = g P - sum_v N_uv - a_u[d] sum_v M_uv - (M b)_u[d]
//     db_v[d] = sum_u r g e - sum_u N_uv - b_v[d] sum_u M_uv - (M^T a)_v[d]
// Nothing of size T x T x H exists. Two paths:
//   fast    exp and H a multiple of 64, at most 512; statistics of pairs on the tensor cores inside
//           the pair loop. Backward only in BF16: it keeps M (T x T bf16 a sequence) as scratch.
//   general every H, T, psi and type: r, M, N are T x T fp32 scratch, a group of sequences at a time.
//
// An H200 issues 16 ex2 but 128 other instructions a clock and SM: an exponential has 8 issue slots
// before it is not the bottleneck. The fast loops use about 5.5 (forward) and 6 (backward), so some
// of the exponentials go to a polynomial on the FMA pipe (exp2_poly).
#ifndef SEQ_DEV_PAIRWISE_CUH
#define SEQ_DEV_PAIRWISE_CUH

#include "../bench.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
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

// ---- small device helpers ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float *p, float x) { *p = x; }
__device__ inline void from_float(__nv_bfloat16 *p, float x) { *p = __float2bfloat16(x); }

__device__ inline float2 load2(const float *p) { return *(const float2 *)p; }
__device__ inline float2 load2(const __nv_bfloat16 *p)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)p);
}
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
__device__ inline void mma_bf16_first(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                      uint32_t b0, uint32_t b1)
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

// group_sync: a barrier of the `threads` threads (a multiple of 32) of one of a block's groups.
//
// Why groups: a block's warp w always runs on the SM's scheduler w % 4, so blocks of 3 or 6 warps (H =
// 192) leave a quarter of the machine idle. A fast block is (threads of a row, groups): its groups
// take different sequences and share nothing, only their number makes the warps a multiple of four.
__device__ inline void group_sync(int group, int threads)
{
    asm volatile("bar.sync %0, %1;" : : "r"(group + 1), "r"(threads) : "memory");
}

// pair_groups: how many groups of `warps` warps make a multiple of four; 1 for large groups.
static size_t pair_groups(size_t warps)
{
    return warps > 6 || warps % 4 == 0 ? 1 : warps % 2 == 0 ? 2 : warps == 5 ? 1 : 4;
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

// row_scale: what O_u and P_u are multiplied by: 2^-k with 2^k the power of two just above the row's
// largest |O| (post: exact, and the norm that follows cancels it), or one over the number of terms.
__device__ inline float row_scale(float row_max, int u, int T, PairOptions opt)
{
    if (!opt.post)
        return 1.0f / (float)(opt.causal ? u + 1 : T);
    int k = (int)(__float_as_uint(row_max) >> 23) - 126;
    return row_max > 0 && k < 126 && k > -126 ? exp2f((float)-k) : 1.0f;
}

// ---- rows: centring and statistics ----

// pair_center_kernel: one warp a row of x (rows,H); the first `rows` rows are a's, then b's.
// exact: y = x - mean, stat = mean(y^2) of the stored y. approx: y = normalize(x), stat = 1/deviation.
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

// pair_center: ac, bc (B,T,H) = the centred (exact), normalized (approx) or unchanged (none) a, b;
// astat, bstat (B,T) = variance (exact), 1/deviation (approx), unused (none). ac may be a, bc b.
// In BF16 ac and bc are rounded once and the variance is that of the rounded values.
static void pair_center(floatX *ac, floatX *bc, float *astat, float *bstat, const floatX *a,
                        const floatX *b, size_t B, size_t T, size_t H, int norm, cudaStream_t stream)
{
    size_t rows = B * T;
    if (norm == NORM_NONE) {
        if (ac != a)
            CUDA_CHECK(cudaMemcpyAsync(ac, a, rows * H * sizeof *a, cudaMemcpyDefault, stream));
        if (bc != b)
            CUDA_CHECK(cudaMemcpyAsync(bc, b, rows * H * sizeof *b, cudaMemcpyDefault, stream));
        return;
    }
    pair_center_kernel<<<(unsigned)((2 * rows + 7) / 8), 256, 0, stream>>>(ac, bc, astat, bstat, a, b,
                                                                           rows, (int)H, norm);
    CUDA_CHECK(cudaGetLastError());
}

// pair_uncenter_kernel: one warp a row: dx = rstd (dy - mean(dy) - y mean(dy y)), in place on dy.
__global__ void pair_uncenter_kernel(floatX *dy, const floatX *y, const float *rstd, size_t rows, int H)
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
// outside 0..T-1 repeat the nearest), as an mma accumulator: c[0], c[1] are row g at columns 2t, 2t+1
// and c[2], c[3] row g+8. A sum may run over channels in any order: both operands take them 16 bytes
// a lane. FP32: hi*hi + hi*lo + lo*hi in TF32, as accurate as fp32 products.
__device__ inline void pair_dots(float c[4], const __nv_bfloat16 *bc, const __nv_bfloat16 *ac, int v,
                                 int u, int T, int H)
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

__device__ inline void pair_dots(float c[4], const float *bc, const float *ac, int v, int u, int T, int H)
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
                                   const float *bstat, const float *astat, int v, int u, int T, int H,
                                   int norm)
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

// pair_forward_row: one v against rows FIRST .. ROWS-1 of two channels, those below `mask` (DIAGONAL)
// masked; NPOLY of the sixteen exponentials go to the FMA pipe.
template <int NPOLY, int FIRST, int DIAGONAL>
__device__ __forceinline__ void pair_forward_row(float2 o[ROWS], float2 p[ROWS], const float2 a[ROWS],
                                                 float2 b, const float *rs_v, int mask)
{
    float4 r0 = *(const float4 *)rs_v, r1 = *(const float4 *)(rs_v + 4);
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

// pair_forward_kernel: a group owns rows u0 .. u0+7 of one sequence, a thread two channels of them
// (48 registers); r of a chunk of v is made by the warps on the tensor cores. Rows are cut from the
// end of the sequence, so that the ragged tile is the one with the fewest v, and the longest go first.
template <int CAUSAL, int NPOLY>
__global__ void __launch_bounds__(384, 2)
pair_forward_kernel(floatX *s, floatX *p, float *scale, const floatX *__restrict__ ac,
                    const floatX *__restrict__ bc, const float *__restrict__ astat,
                    const float *__restrict__ bstat, int B, int T, int H, PairOptions opt)
{
    __shared__ __align__(16) float all_rs[4][CHUNK_V][ROWS];
    __shared__ float all_maxima[4][8][ROWS];
    extern __shared__ float all_as[]; // [group][ROWS][H]: every thread's own channels of a
    const int group = threadIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32, d = 2 * threadIdx.x;
    const int blocks = (B + blockDim.y - 1) / blockDim.y, u0 = T - ROWS * (int)(blockIdx.x / blocks + 1);
    const int b = blockIdx.x % blocks * blockDim.y + group;
    float(*rs)[ROWS] = all_rs[group], (*maxima)[ROWS] = all_maxima[group];
    float *as = all_as + group * ROWS * H + d;
    float2 a[ROWS], o[ROWS] = {}, q[ROWS] = {};
    if (b >= B)
        return;
    for (int i = 0; i < ROWS; i++) {
        float2 x = load2(ac + ((size_t)b * T + max(u0 + i, 0)) * H + d);
        store2(&as[i * H], x.x, x.y);
    }
    const int v_stop = CAUSAL ? u0 + ROWS : T, v_full = CAUSAL ? u0 : T;
    for (int v0 = 0; v0 < v_stop; v0 += CHUNK_V) {
        size_t row0 = (size_t)b * T;   // the sequence's first row; made anew for every chunk, unknown
        asm volatile("" : "+l"(row0)); // to the compiler, which would keep ten addresses in registers
        const floatX *bc0 = bc + row0 * H;
        group_sync(group, blockDim.x);
        for (int i = 16 * warp; i < min(CHUNK_V, v_stop - v0); i += 16 * warps)
            pair_r_tile(&rs[i], bc0, ac + row0 * H, bstat + row0, astat + row0, v0 + i, u0, T, H,
                        opt.norm);
        group_sync(group, blockDim.x);
#pragma unroll
        for (int i = 0; i < ROWS; i++) // again for every chunk: no registers for them until here
            a[i] = load2(&as[i * H]);
        const floatX *b_v = bc0 + (size_t)v0 * H + d;
        const float *rs_v = rs[0];
        const int v_end = min(v0 + CHUNK_V, v_stop);
        int v = v0;
#pragma unroll 2
        for (int n = min(v_end, v_full) - v; n > 0; n--, v++, b_v += H, rs_v += ROWS)
            pair_forward_row<NPOLY, 0, 0>(o, q, a, load2(b_v), rs_v, 0);
        if (CAUSAL) { // the triangle at the end of the rows, a third of it masked
#pragma unroll 1
            for (; v < min(v_end, u0 + ROWS / 2); v++, b_v += H, rs_v += ROWS)
                pair_forward_row<0, 0, 1>(o, q, a, load2(b_v), rs_v, v - u0);
#pragma unroll 1
            for (; v < v_end; v++, b_v += H, rs_v += ROWS)
                pair_forward_row<0, ROWS / 2, 1>(o, q, a, load2(b_v), rs_v, v - u0);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float m = warp_max(fmaxf(fabsf(o[i].x), fabsf(o[i].y)));
        if (lane == 0)
            maxima[warp][i] = m;
    }
    group_sync(group, blockDim.x);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (u0 + i < 0)
            continue;
        float m = 0;
        for (int w = 0; w < warps; w++)
            m = fmaxf(m, maxima[w][i]);
        m = row_scale(m, u0 + i, T, opt);
        const size_t row = (size_t)b * T + u0 + i;
        store2(s + row * H + d, o[i].x * m, o[i].y * m);
        store2(p + row * H + d, q[i].x * (m * LN2), q[i].y * (m * LN2)); // r had a factor log2(e)
        if (threadIdx.x == 0)
            scale[row] = m;
    }
}

// ---- general path: any H, T, psi, type; r, M, N in scratch ----

enum { TILE = 32, TILE_K = 16, TILE_PAD = TILE + 4 };

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

// pair_stats_kernel: R, M, N (group,T,T) for a 32 x 32 tile of pairs, 4 x 4 a thread (64 threads), so
// that the sums over channels stay in registers. ds NULL: only R. Pairs with v > u are not written.
template <int ACT>
__global__ void __launch_bounds__(64)
pair_stats_kernel(float *R, float *M, float *N, const floatX *ds, const float *scale, const floatX *ac,
                  const floatX *bc, const float *astat, const float *bstat, int T, int H, PairOptions opt)
{
    __shared__ __align__(16) float as[TILE_K][TILE_PAD], bs[TILE_K][TILE_PAD], gs[TILE_K][TILE_PAD];
    const int tiles = (T + TILE - 1) / TILE;
    const int u0 = blockIdx.x / tiles % tiles * TILE, v0 = blockIdx.x % tiles * TILE;
    const size_t row0 = (size_t)(blockIdx.x / tiles / tiles) * T;
    const int i0 = threadIdx.x / 8 * 4, j0 = threadIdx.x % 8 * 4;
    const float k = ACT == ACT_EXP ? LOG2E : 1.0f, inv_H = 1.0f / (float)H;
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
        int u = u0 + i0 + i / 4, v = v0 + j0 + i % 4, in = u < T && v < T && (!opt.causal || v <= u);
        r[i / 4][i % 4] = !in ? 0.0f : opt.norm != NORM_EXACT ? 1.0f :
                          pair_r(astat[row0 + u], bstat[row0 + v], r[i / 4][i % 4], inv_H);
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
                if (ACT == ACT_EXP)
                    slope = exp2_mufu(LOG2E * z);
                else
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
    (void)k;
}

// pair_general_forward_kernel: a thread owns rows u0 .. u0+7 of one channel; with post the sums are
// written as they are and pair_rescale_kernel follows.
template <int ACT>
__global__ void __launch_bounds__(128)
pair_general_forward_kernel(floatX *s, floatX *p, float *scale, const floatX *__restrict__ ac,
                            const floatX *__restrict__ bc, const float *__restrict__ R, int T, int H,
                            PairOptions opt)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS - 1) / ROWS;
    const int d = blockIdx.x % slices * 128 + threadIdx.x, u0 = blockIdx.x / slices % tiles * ROWS;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float a[ROWS], o[ROWS] = {}, q[ROWS] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        a[i] = to_float(ac[(row0 + min(u0 + i, T - 1)) * H + d]);
    for (int v = 0; v < (opt.causal ? min(u0 + ROWS, T) : T); v++) {
        const float b = to_float(bc[(row0 + v) * H + d]);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (u0 + i < T && (!opt.causal || v <= u0 + i)) {
                float r = R[(row0 + u0 + i) * T + v], value, slope;
                psi<ACT>((a[i] + b) * r, &value, &slope);
                o[i] += value;
                q[i] = fmaf(r, slope, q[i]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
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
pair_general_db_kernel(floatX *db, const floatX *__restrict__ ds, const float *__restrict__ scale,
                       const floatX *__restrict__ ac, const floatX *__restrict__ bc,
                       const float *__restrict__ R, const float *__restrict__ M,
                       const float *__restrict__ N, int T, int H, PairOptions opt)
{
    const int slices = (H + 127) / 128, tiles = (T + ROWS - 1) / ROWS;
    const int d = blockIdx.x % slices * 128 + threadIdx.x, v0 = blockIdx.x / slices % tiles * ROWS;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float b[ROWS], acc[ROWS] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        b[i] = to_float(bc[(row0 + min(v0 + i, T - 1)) * H + d]);
    for (int u = opt.causal ? v0 : 0; u < T; u++) {
        const float a = to_float(ac[(row0 + u) * H + d]);
        const float g = scale[row0 + u] * to_float(ds[(row0 + u) * H + d]);
        const size_t at = (row0 + u) * T + v0;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (v0 + i < T && (!opt.causal || v0 + i <= u)) {
                float r = R[at + i], value, slope;
                psi<ACT>((a + b[i]) * r, &value, &slope);
                acc[i] = fmaf(r * g, slope, acc[i]);
                if (opt.norm == NORM_EXACT)
                    acc[i] -= fmaf(M[at + i], a + b[i], N[at + i]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
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
    const int slices = (H + 127) / 128, tiles = (T + ROWS - 1) / ROWS;
    const int d = blockIdx.x % slices * 128 + threadIdx.x, u0 = blockIdx.x / slices % tiles * ROWS;
    const size_t row0 = (size_t)(blockIdx.x / slices / tiles) * T;
    float a[ROWS], acc[ROWS] = {};
    if (d >= H)
        return;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        a[i] = to_float(ac[(row0 + min(u0 + i, T - 1)) * H + d]);
    const int v_end = opt.norm != NORM_EXACT ? 0 : opt.causal ? min(u0 + ROWS, T) : T;
    for (int v = 0; v < v_end; v++) {
        const float b = to_float(bc[(row0 + v) * H + d]);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (u0 + i < T && (!opt.causal || v <= u0 + i)) {
                const size_t at = (row0 + u0 + i) * T + v;
                acc[i] += fmaf(M[at], a[i] + b, N[at]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (u0 + i < T) {
            const size_t at = (row0 + u0 + i) * H + d;
            from_float(&da[at], to_float(ds[at]) * to_float(p[at]) - acc[i]);
        }
}

// ---- backward, fast path (BF16) ----

#ifdef PRECISION_BF16

enum { TILE_V = 32, CHUNK_U = 16, MT_STRIDE = CHUNK_U + 8 };

// The block's shared memory, laid out so that the pair loop needs one pointer an array. Pairs of a
// tile are stored at 4g + q for row v = 8q + g: the four rows of a lane side by side. g2 is the mma's
// B operands of e' and e' b: even columns (g, 0) give s1, odd ones (g a, g) give s2.
typedef struct {
    float *ag;                 // [CHUNK_U][H/4][a: 4, g: 4]
    float *rl;                 // [CHUNK_U][log2(e) r: TILE_V, log2(r): TILE_V]
    float *s;                  // [H/32][CHUNK_U][2][TILE_V]  each warp's share of r s1 and of s2
    __nv_bfloat16 *g2;         // [CHUNK_U][H/4][g: 4, g a: 4, 0: 4, g: 4]
    __nv_bfloat16 *ab;         // [CHUNK_U][H+8]
    __nv_bfloat16 *mt;         // [TILE_V][MT_STRIDE]  -M, transposed
} PairShared;

// pair_shared: cut the block's dynamic memory; returns its size in bytes (x NULL: only that).
__host__ __device__ inline size_t pair_shared(PairShared *x, char *base, int H)
{
    size_t f = CHUNK_U * H, pairs = 2 * CHUNK_U * TILE_V, share = (size_t)H / 32 * pairs;
    if (x) {
        x->ag = (float *)base;
        x->rl = x->ag + 2 * f;
        x->s = x->rl + pairs;
        x->g2 = (__nv_bfloat16 *)(x->s + share);
        x->ab = x->g2 + 4 * f;
        x->mt = x->ab + CHUNK_U * (H + 8);
    }
    return 4 * (2 * f + pairs + share) + 2 * (4 * f + CHUNK_U * (H + 8) + TILE_V * MT_STRIDE);
}

// A warp's 32 rows v (8q + g: q = 2m + half) by 32 channels (32 warp + 16c + 4t + j), in the layout
// of mma's A operand and of its accumulator at once: k = 2t, 2t+1, 2t+8, 2t+9 are channels 4t .. 4t+3.
typedef struct {
    float b[2][2][2][4];   // [m][c][half][j]
    float acc[2][2][2][4]; // db
    uint32_t bb[2][2][4];  // b in BF16: an A operand
} PairTile;

// pair_load_u: rows u0 .. u0+15 of a and g = scale ds into shared memory, 0 beyond T.
__device__ inline void pair_load_u(PairShared x, const floatX *ac, const floatX *ds, const float *scale,
                                   int u0, int T, int H)
{
    for (int i = threadIdx.x; i < CHUNK_U * H / 4; i += blockDim.x) {
        int u = i / (H / 4), d = i % (H / 4) * 4;
        float4 a = {0, 0, 0, 0}, g = {0, 0, 0, 0};
        uint2 raw = {0, 0};
        if (u0 + u < T) {
            const size_t at = (size_t)(u0 + u) * H + d;
            const float f = scale[u0 + u];
            raw = *(const uint2 *)(ac + at);
            float2 lo = load2(ac + at), hi = load2(ac + at + 2);
            a = make_float4(lo.x, lo.y, hi.x, hi.y);
            lo = load2(ds + at), hi = load2(ds + at + 2);
            g = make_float4(f * lo.x, f * lo.y, f * hi.x, f * hi.y);
        }
        float4 *ag = (float4 *)&x.ag[2 * (u * H + d)];
        ag[0] = a;
        ag[1] = g;
        *(uint2 *)&x.ab[u * (H + 8) + d] = raw;
        uint4 *g2 = (uint4 *)&x.g2[4 * (u * H + d)];
        const uint32_t lo = pack2(g.x, g.y), hi = pack2(g.z, g.w);
        g2[0] = make_uint4(lo, hi, pack2(g.x * a.x, g.y * a.y), pack2(g.z * a.z, g.w * a.w));
        g2[1] = make_uint4(0, 0, lo, hi);
    }
}

// pair_dots_share: s (in the place of s1) = this warp's 32 channels of b_v . a_u for the tile's pairs.
__device__ inline void pair_dots_share(const PairShared &x, const PairTile &tile, int H, int warp,
                                       int g, int t)
{
    float *out = x.s + 2 * warp * CHUNK_U * TILE_V;
    for (int n = 0; n < 2; n++) {
        float c[2][4] = {};
        for (int k = 0; k < 2; k++) {
            uint2 a = *(const uint2 *)&x.ab[(8 * n + g) * (H + 8) + 32 * warp + 16 * k + 4 * t];
            for (int m = 0; m < 2; m++)
                mma_bf16(c[m], tile.bb[m][k][0], tile.bb[m][k][1], tile.bb[m][k][2],
                         tile.bb[m][k][3], a.x, a.y);
        }
        for (int m = 0; m < 2; m++)
            for (int j = 0; j < 2; j++)
                store2(&out[2 * (8 * n + 2 * t + j) * TILE_V + 4 * g + 2 * m], c[m][j], c[m][j + 2]);
    }
}

// pair_backward_rows: rows u .. u_end-1 of the chunk against NQ of the tile's four groups of eight v:
// e' = r e straight from the exponent, acc += g e', and with STATS the warp's share of the sums over
// channels of g e' and g e' (a + b) from the tensor cores. NPOLY of 8 exponentials on the FMA pipe.
template <int NQ, int STATS, int NPOLY>
__device__ __forceinline__ void pair_backward_rows(PairTile &tile, const PairShared &x, int u, int u_end,
                                                   int H, int warp, int g, int t)
{
    const float *ag = x.ag + 2 * (u * H + 32 * warp + 4 * t), *rl = x.rl + 2 * u * TILE_V + 4 * g;
    const __nv_bfloat16 *g2 = x.g2 + 4 * (u * H + 32 * warp + 4 * t) + g % 2 * 4;
    float *s = x.s + 2 * (warp * CHUNK_U + u) * TILE_V + 4 * g;
#pragma unroll 1
    for (; u < u_end; u++) {
        float r[4], lr[4], sum[2][4] = {};
        load4(r, rl);
        load4(lr, rl + TILE_V);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float a[4], gu[4];
            load4(a, ag + 32 * c);
            load4(gu, ag + 32 * c + 4);
            const uint2 b1 = *(const uint2 *)(g2 + 64 * c), b2 = *(const uint2 *)(g2 + 64 * c + 8);
#pragma unroll
            for (int m = 0; m < (NQ + 1) / 2; m++) {
                uint32_t e[4] = {0, 0, 0, 0};
#pragma unroll
                for (int half = 0; half < 2 && 2 * m + half < NQ; half++) {
                    float y[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int q = 2 * m + half, i = 4 * half + j;
                        y[j] = fmaf(a[j] + tile.b[m][c][half][j], r[q], lr[q]);
                        y[j] = i * NPOLY % 8 < NPOLY ? exp2_poly(y[j]) : exp2_mufu(y[j]);
                        tile.acc[m][c][half][j] = fmaf(gu[j], y[j], tile.acc[m][c][half][j]);
                    }
                    e[half] = pack2(y[0], y[1]);
                    e[half + 2] = pack2(y[2], y[3]);
                }
                if (STATS) {
                    const uint32_t *b = tile.bb[m][c];
                    if (c == 0)
                        mma_bf16_first(sum[m], e[0], e[1], e[2], e[3], b1.x, b1.y);
                    else
                        mma_bf16(sum[m], e[0], e[1], e[2], e[3], b1.x, b1.y);
                    mma_bf16(sum[m], mul2(e[0], b[0]), mul2(e[1], b[1]), mul2(e[2], b[2]),
                             mul2(e[3], b[3]), b2.x, b2.y);
                }
            }
        }
        if (STATS && t == 0) { // s1 in the even columns, s2 in the odd ones, of rows g and g+8
            *(float4 *)s = make_float4(sum[0][0], sum[0][2], sum[1][0], sum[1][2]);
            *(float4 *)(s + TILE_V) = make_float4(sum[0][1], sum[0][3], sum[1][1], sum[1][3]);
        }
        ag += 2 * H;
        g2 += 4 * H;
        rl += 2 * TILE_V;
        s += 2 * TILE_V;
    }
}

// pair_m_product: acc -= M^T a over the chunk's 16 u, -M taken from x.mt.
__device__ inline void pair_m_product(PairTile &tile, const PairShared &x, int H, int warp, int g, int t)
{
    const uint16_t *ab = (const uint16_t *)x.ab;
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int n = 0; n < 2; n++) { // accumulator columns 2t, 2t+1 are channels 4t+2n, 4t+2n+1
            const int d = 32 * warp + 16 * c + g / 2 * 4 + g % 2 + 2 * n, k = 2 * t * (H + 8) + d;
            const uint32_t b0 = ab[k] | (uint32_t)ab[k + H + 8] << 16;
            const uint32_t b1 = ab[k + 8 * (H + 8)] | (uint32_t)ab[k + 9 * (H + 8)] << 16;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const __nv_bfloat16 *mt = x.mt + (16 * m + g) * MT_STRIDE + 2 * t;
                float(*acc)[4] = tile.acc[m][c];
                float f[4] = {acc[0][2 * n], acc[0][2 * n + 1], acc[1][2 * n], acc[1][2 * n + 1]};
                mma_bf16(f, *(const uint32_t *)mt, *(const uint32_t *)(mt + 8 * MT_STRIDE),
                         *(const uint32_t *)(mt + 8), *(const uint32_t *)(mt + 8 * MT_STRIDE + 8),
                         b0, b1);
                acc[0][2 * n] = f[0], acc[0][2 * n + 1] = f[1];
                acc[1][2 * n] = f[2], acc[1][2 * n + 1] = f[3];
            }
        }
}

// pair_backward_kernel: a group owns 32 rows v of one sequence (db), a warp 32 of their channels, and
// walks over u in chunks of 16. Also M (B,T,Tp) in BF16, Tp = T rounded up to 32 (0 where masked), and
// row_sums (B,Tp/32,T) = (sum of M, sum of N) over the block's v. Written only with STATS (exact).
template <int STATS, int CAUSAL, int NPOLY, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
pair_backward_kernel(floatX *db, __nv_bfloat16 *M, float2 *row_sums, const floatX *__restrict__ ds,
                     const float *__restrict__ scale, const floatX *__restrict__ ac,
                     const floatX *__restrict__ bc, const float *__restrict__ astat,
                     const float *__restrict__ bstat, int B, int T, int H)
{
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int group = threadIdx.y, blocks = (B + blockDim.y - 1) / blockDim.y;
    const int g = lane / 4, t = lane % 4, v0 = (int)(blockIdx.x / blocks) * TILE_V;
    const int tiles = (T + TILE_V - 1) / TILE_V, lane_v = v0 + 8 * t + g; // the pair kept at `lane`
    const size_t b = blockIdx.x % blocks * blockDim.y + group, row0 = b * T;
    const float inv_H = 1.0f / (float)H;
    float sum_m = 0, sum_n = 0;
    PairShared x;
    PairTile tile;
    if (b >= (size_t)B)
        return;
    pair_shared(&x, shared + group * pair_shared(NULL, NULL, H), H);
#pragma unroll
    for (int i = 0; i < 8; i++) { // m, c, half
        const int m = i / 4, c = i / 2 % 2, half = i % 2, v = v0 + 16 * m + 8 * half + g;
        const int d = 32 * warp + 16 * c + 4 * t;
        uint2 raw = {0, 0};
        if (v < T)
            raw = *(const uint2 *)(bc + (row0 + v) * H + d);
        tile.bb[m][c][half] = raw.x, tile.bb[m][c][half + 2] = raw.y;
        float2 lo = load2((const __nv_bfloat16 *)&raw.x), hi = load2((const __nv_bfloat16 *)&raw.y);
        tile.b[m][c][half][0] = lo.x, tile.b[m][c][half][1] = lo.y;
        tile.b[m][c][half][2] = hi.x, tile.b[m][c][half][3] = hi.y;
#pragma unroll
        for (int j = 0; j < 4; j++)
            tile.acc[m][c][half][j] = 0;
    }
    const float b_var = STATS && lane_v < T ? bstat[row0 + lane_v] : 0.0f;
    for (int u0 = CAUSAL ? v0 : 0; u0 < T; u0 += CHUNK_U) {
        pair_load_u(x, ac + row0 * H, ds + row0 * H, scale + row0, u0, T, H);
        group_sync(group, blockDim.x);
        if (STATS) {
            pair_dots_share(x, tile, H, warp, g, t);
            group_sync(group, blockDim.x);
        }
        for (int i = warp; i < CHUNK_U; i += warps) {
            const int u = u0 + i, in = u < T && lane_v < T && (!CAUSAL || lane_v <= u);
            float r = 1, dot = 0;
            for (int w = 0; STATS && w < warps; w++)
                dot += x.s[2 * (w * CHUNK_U + i) * TILE_V + lane];
            if (STATS && in)
                r = pair_r(astat[row0 + u], b_var, dot, inv_H);
            x.rl[2 * i * TILE_V + lane] = in ? LOG2E * r : 0.0f;
            x.rl[(2 * i + 1) * TILE_V + lane] = in ? __log2f(r) : MASKED;
        }
        group_sync(group, blockDim.x);
        for (int i = 0; i < CHUNK_U; i += 8) {
            const int end = min(i + 8, T - u0), nq = CAUSAL ? (u0 + i - v0) / 8 + 1 : 4;
            if (nq >= 4)
                pair_backward_rows<4, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
            else if (nq == 3)
                pair_backward_rows<3, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
            else if (nq == 2)
                pair_backward_rows<2, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
            else
                pair_backward_rows<1, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
        }
        group_sync(group, blockDim.x);
        for (int i = warp; STATS && i < CHUNK_U; i += warps) {
            const int u = u0 + i, in = u < T && lane_v < T && (!CAUSAL || lane_v <= u);
            float s1 = 0, s2 = 0, r = LN2 * x.rl[2 * i * TILE_V + lane];
            for (int w = 0; w < warps; w++) {
                s1 += x.s[2 * (w * CHUNK_U + i) * TILE_V + lane];
                s2 += x.s[(2 * (w * CHUNK_U + i) + 1) * TILE_V + lane];
            }
            const __nv_bfloat16 mb = __float2bfloat16(in ? r * r * inv_H * s2 : 0.0f);
            const float m = __bfloat162float(mb), n = in ? inv_H * s1 : 0.0f;
            x.mt[(lane_v - v0) * MT_STRIDE + i] = __hneg(mb);
            sum_m += m;
            sum_n += n;
            const float row_m = warp_sum(m), row_n = warp_sum(n);
            if (u < T) {
                M[(row0 + u) * tiles * TILE_V + lane_v] = mb;
                if (lane == 0)
                    row_sums[(b * tiles + v0 / TILE_V) * T + u] = make_float2(row_m, row_n);
            }
        }
        group_sync(group, blockDim.x);
        if (STATS) {
            pair_m_product(tile, x, H, warp, g, t);
            group_sync(group, blockDim.x);
        }
    }
    x.s[2 * warp * TILE_V + lane] = sum_m; // nobody reads s after the loop's last barrier
    x.s[(2 * warp + 1) * TILE_V + lane] = sum_n;
    group_sync(group, blockDim.x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int v = v0 + 8 * i + g;
        float m = 0, n = 0;
        for (int w = 0; STATS && w < warps; w++) {
            m += x.s[2 * w * TILE_V + 4 * g + i];
            n += x.s[(2 * w + 1) * TILE_V + 4 * g + i];
        }
#pragma unroll
        for (int c = 0; c < 2 && v < T; c++) {
            const float *f = tile.acc[i / 2][c][i % 2], *bv = tile.b[i / 2][c][i % 2];
            floatX *out = db + (row0 + v) * H + 32 * warp + 16 * c + 4 * t;
            store2(out, f[0] - n - bv[0] * m, f[1] - n - bv[1] * m);
            store2(out + 2, f[2] - n - bv[2] * m, f[3] - n - bv[3] * m);
        }
    }
}

// pair_da_kernel: da = ds p - sum_v N - a sum_v M - M b for 32 rows u of one sequence; a warp takes 32
// channels. Lane 4g+t reads eight v of M at once, so b's rows stand in shared memory in that order.
template <int CAUSAL>
__global__ void __launch_bounds__(512)
pair_da_kernel(floatX *da, const floatX *__restrict__ ds, const floatX *__restrict__ p,
               const floatX *__restrict__ ac, const floatX *__restrict__ bc,
               const __nv_bfloat16 *__restrict__ M, const float2 *__restrict__ row_sums, int B, int T,
               int H)
{
    extern __shared__ __align__(16) char shared[];
    __nv_bfloat16 *bs = (__nv_bfloat16 *)shared; // [TILE_V][H+8]
    __shared__ float2 sums[TILE_V];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (T + TILE_V - 1) / TILE_V, tile_u = tiles - 1 - (int)(blockIdx.x / B);
    const int u0 = tile_u * TILE_V, last = CAUSAL ? tile_u : tiles - 1;
    const size_t b = blockIdx.x % B, row0 = b * T;
    float acc[2][4][4] = {}; // [m][n] over rows 16m, channels 8n
    if (threadIdx.x < TILE_V) {
        float2 s = {0, 0};
        for (int i = 0; i <= last && u0 + (int)threadIdx.x < T; i++) {
            float2 f = row_sums[(b * tiles + i) * T + u0 + threadIdx.x];
            s.x += f.x, s.y += f.y;
        }
        sums[threadIdx.x] = s;
    }
    for (int i = 0; i <= last; i++) {
        __syncthreads();
        for (int k = threadIdx.x; k < TILE_V * H / 8; k += blockDim.x) {
            const int v = k / (H / 8), d = k % (H / 8) * 8, at = v / 2 % 4 * 8 + v / 8 * 2 + v % 2;
            uint4 raw = {0, 0, 0, 0};
            if (i * TILE_V + v < T)
                raw = *(const uint4 *)(bc + (row0 + i * TILE_V + v) * H + d);
            *(uint4 *)&bs[at * (H + 8) + d] = raw;
        }
        __syncthreads();
        uint4 m[2][2]; // [m][half]: row 16m + 8 half + g, v = 8t .. 8t+7
        for (int j = 0; j < 4; j++) {
            const int u = min(u0 + 8 * j + g, T - 1);
            m[j / 2][j % 2] =
                *(const uint4 *)(M + (row0 + u) * tiles * TILE_V + i * TILE_V + 8 * t);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t f[4];
            const uint32_t at = (uint32_t)__cvta_generic_to_shared(
                &bs[lane * (H + 8) + 32 * warp + 8 * n]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
            for (int k = 0; k < 2; k++) {
                const uint4 x = m[k][0], y = m[k][1];
                mma_bf16(acc[k][n], x.x, y.x, x.y, y.y, f[0], f[1]);
                mma_bf16(acc[k][n], x.z, y.z, x.w, y.w, f[2], f[3]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) { // m, n, half
        const int u = i / 8 * 16 + i % 2 * 8 + g, d = 32 * warp + i / 2 % 4 * 8 + 2 * t;
        const float *f = &acc[i / 8][i / 2 % 4][i % 2 * 2];
        const size_t at = (row0 + u0 + u) * H + d;
        if (u0 + u < T) {
            float2 g2 = load2(ds + at), p2 = load2(p + at), a2 = load2(ac + at), s = sums[u];
            store2(da + at, g2.x * p2.x - s.y - a2.x * s.x - f[0],
                   g2.y * p2.y - s.y - a2.y * s.x - f[1]);
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
#define PAIR_FORWARD_POLY 2 // of 16 exponentials
#endif
#ifndef PAIR_BACKWARD_POLY
#define PAIR_BACKWARD_POLY 1 // of 8
#endif

enum { PAIR_GENERAL, PAIR_FAST };

// pair_path: the fastest path that can run; the fast kernels read 16 bytes at a time and cudaMalloc's
// pointers plus whole rows of H are aligned for that.
static int pair_path(size_t H, PairOptions opt, int backward)
{
    int fast = opt.act == ACT_EXP && H % 64 == 0 && H <= 512;
    return fast && (!backward || sizeof(floatX) == 2) ? PAIR_FAST : PAIR_GENERAL;
}

// pair_grid: blocks as an unsigned, or die: a grid has at most 2^31-1.
static unsigned pair_grid(size_t blocks)
{
    if (blocks > 0x7fffffff)
        die(EXIT_MEMORY, "pairwise: %zu blocks, expected at most 2^31-1\nhint: a smaller batch", blocks);
    return (unsigned)blocks;
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
    return backward && opt.norm == NORM_EXACT ? B * T * tiles * (64 + 8) : 0;
}

#define PAIR_ACT(act, CALL) \
    do { \
        if ((act) == ACT_RELU) { enum { ACT = ACT_RELU }; CALL; } \
        else if ((act) == ACT_ELU) { enum { ACT = ACT_ELU }; CALL; } \
        else if ((act) == ACT_GELU) { enum { ACT = ACT_GELU }; CALL; } \
        else { enum { ACT = ACT_EXP }; CALL; } \
        CUDA_CHECK(cudaGetLastError()); \
    } while (0)

// pair_forward_fast: NPOLY of 16 exponentials on the FMA pipe, where |exponents| < 126 is certain.
template <int NPOLY>
static void pair_forward_fast(floatX *s, floatX *p, float *scale, const floatX *ac, const floatX *bc,
                              const float *astat, const float *bstat, size_t B, size_t T, size_t H,
                              PairOptions opt, cudaStream_t stream)
{
    const size_t groups = pair_groups(H / 64);
    unsigned grid = pair_grid((B + groups - 1) / groups * ((T + ROWS - 1) / ROWS));
    auto kernel = pair_forward_kernel<1, 0>;
    if (opt.norm == NORM_EXACT)
        kernel = opt.causal ? pair_forward_kernel<1, NPOLY> : pair_forward_kernel<0, NPOLY>;
    else if (!opt.causal)
        kernel = pair_forward_kernel<0, 0>;
    dim3 block((unsigned)H / 2, (unsigned)groups);
    bench_fits((const void *)kernel, "pair_forward_kernel", (int)(block.x * block.y), 0);
    kernel<<<grid, block, groups * ROWS * H * 4, stream>>>(s, p, scale, ac, bc, astat, bstat, (int)B,
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
    const size_t tasks = (T + ROWS - 1) / ROWS * ((H + 127) / 128);
    float *R = (float *)scratch;
    for (size_t b = 0; b < B; b += group) {
        const size_t n = b + group < B ? group : B - b, x = b * T * H, y = b * T;
        PAIR_ACT(opt.act, (pair_stats_kernel<ACT><<<pair_grid(n * tiles * tiles), 64, 0, stream>>>(
                              R, NULL, NULL, NULL, NULL, ac + x, bc + x, astat + y, bstat + y, (int)T,
                              (int)H, opt)));
        PAIR_ACT(opt.act, (pair_general_forward_kernel<ACT><<<pair_grid(n * tasks), 128, 0, stream>>>(
                              s + x, p + x, scale + y, ac + x, bc + x, R, (int)T, (int)H, opt)));
    }
    if (opt.post)
        pair_rescale_kernel<<<pair_grid((B * T + 7) / 8), 256, 0, stream>>>(s, p, scale, B * T, (int)H,
                                                                            opt);
    CUDA_CHECK(cudaGetLastError());
}

// pair_forward: s, p (B,T,H) = scale_u O_u and scale_u P_u, scale (B,T) = 2^-k (post) or one over the
// number of terms; from pair_center's ac, bc (B,T,H), astat, bstat (B,T). scratch: pair_scratch_bytes.
static void pair_forward(floatX *s, floatX *p, float *scale, const floatX *ac, const floatX *bc,
                         const float *astat, const float *bstat, void *scratch, size_t B, size_t T,
                         size_t H, PairOptions opt, cudaStream_t stream)
{
    if (pair_path(H, opt, 0) == PAIR_FAST)
        pair_forward_fast<PAIR_FORWARD_POLY>(s, p, scale, ac, bc, astat, bstat, B, T, H, opt, stream);
    else
        pair_forward_general(s, p, scale, ac, bc, astat, bstat, scratch, B, T, H, opt, stream);
}

// pair_uncenter: approx: da, db (B,T,H) through the two normalizes, in place; otherwise nothing: the
// gradients of exact already are those of the uncentred a and b.
static void pair_uncenter(floatX *da, floatX *db, const floatX *ac, const floatX *bc, const float *astat,
                          const float *bstat, size_t B, size_t T, size_t H, int norm, cudaStream_t stream)
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
    const size_t tasks = (T + ROWS - 1) / ROWS * ((H + 127) / 128);
    float *R = (float *)scratch, *M = R + TT, *N = M + TT;
    for (size_t b = 0; b < B; b += group) {
        const size_t n = b + group < B ? group : B - b, x = b * T * H, y = b * T;
        PAIR_ACT(opt.act, (pair_stats_kernel<ACT><<<pair_grid(n * tiles * tiles), 64, 0, stream>>>(
                              R, M, N, ds + x, scale + y, ac + x, bc + x, astat + y, bstat + y, (int)T,
                              (int)H, opt)));
        PAIR_ACT(opt.act, (pair_general_db_kernel<ACT><<<pair_grid(n * tasks), 128, 0, stream>>>(
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
    const size_t tiles = (T + TILE_V - 1) / TILE_V, groups = pair_groups(H / 32);
    const size_t smem = groups * pair_shared(NULL, NULL, (int)H);
    const unsigned grid = pair_grid((B + groups - 1) / groups * tiles);
    const dim3 block((unsigned)H, (unsigned)groups);
    __nv_bfloat16 *M = (__nv_bfloat16 *)scratch;
    float2 *row_sums = (float2 *)(M + B * T * tiles * TILE_V);
    auto kernel = pair_backward_kernel<0, 1, 0, 512, 1>;
    if (opt.norm != NORM_EXACT)
        kernel = opt.causal ? kernel : pair_backward_kernel<0, 0, 0, 512, 1>;
    else if (H <= 192)
        kernel = opt.causal ? pair_backward_kernel<1, 1, NPOLY, 384, 1>
                            : pair_backward_kernel<1, 0, NPOLY, 384, 1>;
    else
        kernel = opt.causal ? pair_backward_kernel<1, 1, 0, 512, 1>
                            : pair_backward_kernel<1, 0, 0, 512, 1>;
    bench_fits((const void *)kernel, "pair_backward_kernel", (int)(block.x * block.y), smem);
    kernel<<<grid, block, smem, stream>>>(db, M, row_sums, ds, scale, ac, bc, astat, bstat,
                                                (int)B, (int)T, (int)H);
    CUDA_CHECK(cudaGetLastError());
    if (opt.norm == NORM_EXACT) {
        auto da_kernel = opt.causal ? pair_da_kernel<1> : pair_da_kernel<0>;
        da_kernel<<<pair_grid(B * tiles), (unsigned)H, TILE_V * (H + 8) * 2, stream>>>(da, ds, p, ac, bc, M, row_sums,
                                                                      (int)B, (int)T, (int)H);
    } else
        pair_product_kernel<<<pair_grid((B * T * H / 2 + 255) / 256), 256, 0, stream>>>(da, ds, p,
                                                                                      B * T * H);
    CUDA_CHECK(cudaGetLastError());
    pair_uncenter(da, db, ac, bc, astat, bstat, B, T, H, opt.norm, stream);
}

#endif

// pair_backward: da, db (B,T,H) = gradients of the a, b that pair_center read, from ds (B,T,H), the
// gradient of s, and what pair_center and pair_forward left: p, scale, ac, bc, astat, bstat.
static void pair_backward(floatX *da, floatX *db, const floatX *ds, const floatX *p, const float *scale,
                          const floatX *ac, const floatX *bc, const float *astat, const float *bstat,
                          void *scratch, size_t B, size_t T, size_t H, PairOptions opt,
                          cudaStream_t stream)
{
#ifdef PRECISION_BF16
    if (pair_path(H, opt, 1) == PAIR_FAST) {
        pair_backward_fast<PAIR_BACKWARD_POLY>(da, db, ds, p, scale, ac, bc, astat, bstat, scratch, B, T,
                                               H, opt, stream);
        return;
    }
#endif
    pair_backward_general(da, db, ds, p, scale, ac, bc, astat, bstat, scratch, B, T, H, opt, stream);
}

#endif
