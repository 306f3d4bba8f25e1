// pairwise_forward.cu: O_u[d] = sum_v psi(z_uv[d]), P_u[d] = sum_v r_uv psi'(z_uv[d]): the
// quadratic CausalRN layer. The equations are on top of pairwise.cuh, which holds kernel 2 and the
// centring; the others are here.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o pairwise_forward dev/pairwise/pairwise_forward.cu
//
// ms a layer at (320,258,192), causal, exact, exp: 2.053e9 exponentials; H200, 2026-11-29, L2
// flushed; ex2 alone runs at 4155 Gexp/s here. Runs 1-4 are commits de36c55, fa206b3, 50743e6 and
// 5f1983e; of run 4 only FP32 took place: BF16 of the kernels you read is NOT YET MEASURED.
//    version                                       BF16 ms  Gexp/s   FP32 ms  Gexp/s
//  1 naive: a block a position, pair after pair      6.49      316     6.31      326   runs 3, 4
//  2 r as a T x T array, 8 rows a thread, any H      2.25      911     2.25      914   runs 3, 4
//  3 r in the loop by tensor cores, 8 rows x 2
//      channels a thread, 24 warps an SM             0.686    2991     0.839    2448   run 1
//    in blocks of 12 warps, 4 sequences              0.683    3004     0.877    2341   run 2
//    6 rows, 30 warps                                0.729    2815     0.953    2154   run 3
//    8 rows, b fetched two rows ahead, no spills     -           -     0.852    2410   run 4: now
//  4 1/16 of the exponentials by polynomial          0.669    3070     0.861    2384   runs 1, 4
//  5 4/16                                            0.703    2919     0.961    2137   runs 1, 4
//  6 all in half precision, two at a time            NOT YET MEASURED     -           -
//    centring alone, in front of any of them         0.041       -     0.063       -   runs 3, 4
// Losers. 1: the statistics of every pair by a block reduction. 2: a load of r for every pair.
// 4, 5: a polynomial takes 6 (FP32: 8) more issue slots, and issue, not ex2, is what runs out (2/16
// and 3/16 lie between). By its code, 6 too: sm_90 splits ex2.f16x2 into two instructions,
// one a value, so packing and unpacking only add: 7.4 issue slots an exponential, not 5.8.
// Six rows: less work for a load of r. Blocks of 12 warps: the schedulers were balanced anyway.
#include <cuda_fp16.h>
#include "pairwise_bench.cuh"

// block_sum: over the block's 128 threads, to all of them; `shared` holds 4 floats.
__device__ static float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    return shared[0] + shared[1] + shared[2] + shared[3];
}

// forward_naive_kernel: a block a position u; the statistics of every pair from its channels, the
// sums in shared memory. Takes what pair_center left, like the others.
template <int ACT>
__global__ void __launch_bounds__(128)
    forward_naive_kernel(floatX *s, floatX *p, float *scale, const floatX *ac, const floatX *bc,
                         int T, int H, PairOptions opt)
{
    extern __shared__ float sums[]; // [2][H]
    __shared__ float shared[4];
    const size_t row = blockIdx.x, row0 = row / T * T;
    const int u = (int)(row - row0);
    const floatX *a = ac + row * H;
    for (int d = threadIdx.x; d < 2 * H; d += blockDim.x)
        sums[d] = 0;
    __syncthreads(); // sums[H + d] was cleared by another thread than d's
    for (int v = 0; v < (opt.causal ? u + 1 : T); v++) {
        const floatX *b = bc + (row0 + v) * H;
        float r = 1, sum = 0, value, slope;
        if (opt.norm == NORM_EXACT) {
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float x = to_float(a[d]) + to_float(b[d]); // the mean is 0
                sum += x * x;
            }
            r = rsqrtf(block_sum(sum, shared) / (float)H + PAIR_EPS);
        }
        for (int d = threadIdx.x; d < H; d += blockDim.x) {
            psi<ACT>((to_float(a[d]) + to_float(b[d])) * r, &value, &slope);
            sums[d] += value;
            sums[H + d] += r * slope;
        }
    }
    float m = 0;
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        m = fmaxf(m, fabsf(sums[d]));
    m = warp_max(m);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = m;
    __syncthreads();
    m = row_scale(fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3])), u, T, opt);
    for (int d = threadIdx.x; d < H; d += blockDim.x) {
        from_float(&s[row * H + d], m * sums[d]);
        from_float(&p[row * H + d], m * sums[H + d]);
    }
    if (threadIdx.x == 0)
        scale[row] = m;
}

// ---- fast path ----

enum { ROWS = 8, CHUNK_V = 96 };

// mma_tf32: c (16x8) += a (16x8) b (8x8) in tf32: lane 4g + t holds rows g, g+8 at k = t, t+4.
__device__ inline void mma_tf32(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

// exp2_packed: 2^(x-5) and 2^(y-5) in half precision, for two exponents at once: PTX bounds its
// error by 2^-9.9, rounding an exponent to half adds 2^-8.5 where it is largest. Half ends at 2^16,
// and |z| <= sqrt(H-1) is 2^19.94 at H = 192: hence the 5.
enum { PACKED = -1, PACKED_SHIFT = 5 };

__device__ inline float2 exp2_packed(float x, float y)
{
    __half2 h = __floats2half2_rn(x - PACKED_SHIFT, y - PACKED_SHIFT);
    uint32_t bits = *(uint32_t *)&h;
    asm("ex2.approx.f16x2 %0, %0;" : "+r"(bits));
    return __half22float2(*(__half2 *)&bits);
}

// pair_forward_row: one v against rows FIRST .. ROWS-1 of two channels, those below `mask`
// (DIAGONAL) masked; NPOLY of the sixteen exponentials go to the FMA pipe, or with PACKED all go to
// the special-function unit in halves.
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
        if (NPOLY == PACKED) {
            const float2 e = exp2_packed(x, y);
            x = e.x, y = e.y;
        } else {
            x = 2 * i * NPOLY % 16 < NPOLY ? exp2_poly(x) : exp2_mufu(x);
            y = (2 * i + 1) * NPOLY % 16 < NPOLY ? exp2_poly(y) : exp2_mufu(y);
        }
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
    constexpr int REST = NPOLY == PACKED ? PACKED : 0; // for rows that are not in step
    constexpr float UNSHIFT = NPOLY == PACKED ? 1 << PACKED_SHIFT : 1;
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
            pair_forward_row<REST, 0, 0>(o, q, a, load2(b_v), rs_v, 0);
        if (CAUSAL) { // the triangle at the end of the rows, a third of it masked
#pragma unroll 1
            for (; v < min(v_end, u0 + ROWS / 2); v++, b_v += H, rs_v += ROWS)
                pair_forward_row<REST, 0, 1>(o, q, a, load2(b_v), rs_v, v - u0);
#pragma unroll 1
            for (; v < v_end; v++, b_v += H, rs_v += ROWS)
                pair_forward_row<REST, ROWS / 2, 1>(o, q, a, load2(b_v), rs_v, v - u0);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            store2(&own[(ROWS + i) * H], o[i].x, o[i].y);
            store2(&own[(2 * ROWS + i) * H], q[i].x, q[i].y);
        }
    }
    for (int i = 0; i < ROWS; i++) {
        const float2 o = load2(&own[(ROWS + i) * H]);
        const float m = UNSHIFT * warp_max(fmaxf(fabsf(o.x), fabsf(o.y)));
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
        const float f = UNSHIFT * m;
        store2(s + row * H + d, o.x * f, o.y * f);
        store2(p + row * H + d, q.x * (f * LN2), q.y * (f * LN2)); // r had a factor log2(e)
        if (threadIdx.x == 0)
            scale[row] = m;
    }
}

// ---- the ladder ----

static void run_naive(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    PAIR_CHECK(x->opt.act,
               (forward_naive_kernel<ACT><<<pair_grid(x->B * x->T), 128, 8 * x->H, stream>>>(
                   x->s, x->p, x->scale, x->ac, x->bc, (int)x->T, (int)x->H, x->opt)));
}

// run_fast: NPOLY of 16 exponentials on the FMA pipe, where |exponents| < 126 is certain.
template <int NPOLY> static void run_fast(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const unsigned grid = pair_grid(x->B * ((x->T + ROWS - 1) / ROWS));
    auto kernel = pair_forward_kernel<1, 0>;
    if (x->opt.norm == NORM_EXACT)
        kernel = x->opt.causal ? pair_forward_kernel<1, NPOLY> : pair_forward_kernel<0, NPOLY>;
    else if (!x->opt.causal)
        kernel = pair_forward_kernel<0, 0>;
    const size_t smem = 3 * ROWS * x->H * 4;
    bench_fits((const void *)kernel, "pair_forward_kernel", (int)x->H / 2, smem + 1024);
    kernel<<<grid, (unsigned)x->H / 2, smem, stream>>>(x->s, x->p, x->scale, x->ac, x->bc,
                                                       x->astat, x->bstat, (int)x->B, (int)x->T,
                                                       (int)x->H, x->opt);
    CUDA_CHECK(cudaGetLastError());
}

// run_layer: all of it, from a and b, by the fastest kernel that can run.
static void run_layer(const void *layer, cudaStream_t stream)
{
    pair_center(layer, stream);
    if (pair_is_fast((const PairLayer *)layer, 512))
        run_fast<0>(layer, stream);
    else
        pair_forward_general(layer, stream);
}

static const char *refuse_naive(const void *layer)
{
    return ((const PairLayer *)layer)->H > 6000 ? "48 KiB of sums" : NULL;
}

static const char *refuse_fast(const void *layer)
{
    return pair_is_fast((const PairLayer *)layer, 512) ? NULL
                                                       : "exp and H a multiple of 64 to 512 only";
}

#ifdef PRECISION_BF16
static const char *refuse_packed(const void *layer)
{
    const PairLayer *x = (const PairLayer *)layer;
    return pair_is_fast(x, 192) && x->opt.norm == NORM_EXACT ? NULL : "exact and H to 192 only";
}
#endif

static const BenchKernel kernels[] = {
    {1, "naive: a block a position", run_naive, refuse_naive},
    {2, "r in memory, 8 rows a thread", pair_forward_general, NULL},
    {3, "r on tensor cores, 8 x 2 a thread", run_fast<0>, refuse_fast},
    {4, "3, 1/16 of exps by polynomial", run_fast<1>, refuse_fast},
    {5, "3, 4/16", run_fast<4>, refuse_fast},
#ifdef PRECISION_BF16
    {6, "3, pairs of exps in half precision", run_fast<PACKED>, refuse_packed},
#endif
    {8, "centring + the fastest", run_layer, NULL},
};

enum { NUM_KERNELS = sizeof kernels / sizeof *kernels };

// check_post: with post, every row's scale is a power of two that brings its largest |s| into
// [1/2, 1], and s / scale, p / scale are the sums; returns the number of kernels that fail.
static int check_post(size_t B, size_t T, size_t H, int act)
{
    PairOptions opt = {act, NORM_EXACT, 1, 0};
    PairProblem x = pair_setup(B, T, H, opt, 0, 0);
    const size_t n = B * T * H;
    floatX *h = (floatX *)alloc_zero(n, sizeof *h, "post");
    double *got = (double *)alloc_zero(n, 8, "post");
    float *scale = (float *)alloc_zero(B * T, 4, "post");
    int failed = 0;
    x.layer.opt.post = 1;
    for (int k = 0; k < NUM_KERNELS; k++) {
        if (kernels[k].refuse && kernels[k].refuse(&x.layer))
            continue;
        kernels[k].fn(&x.layer, 0);
        CUDA_CHECK(cudaMemcpy(scale, x.layer.scale, B * T * 4, cudaMemcpyDefault));
        int ok = 1;
        for (int is_p = 0; is_p < 2; is_p++) {
            const floatX *from = is_p ? x.layer.p : x.layer.s;
            CUDA_CHECK(cudaMemcpy(h, from, n * sizeof *h, cudaMemcpyDefault));
            for (size_t i = 0; i < B * T; i++) {
                double most = 0;
                for (size_t d = i * H; d < (i + 1) * H; d++) {
                    got[d] = (double)(float)h[d];
                    most = fmax(most, fabs(got[d]));
                    got[d] *= x.ref_scale[i] / scale[i];
                }
                int e;
                ok &=
                    frexp(scale[i], &e) == 0.5 && (is_p || most == 0 || (most >= 0.5 && most <= 1));
            }
            ok &= compare(got, 8, is_p ? x.ref_p : x.ref_s, 8, n, BOUND_FORWARD, 0).ok;
        }
        failed += !ok;
        if (!ok)
            printf("  kernel %d FAILED with post, (%zu,%zu,%zu) %s\n", kernels[k].num, B, T, H,
                   pair_acts[act]);
    }
    free(h), free(got), free(scale);
    pair_free(&x);
    return failed;
}

// more_checks: rows that are constant, and the scales of post.
static int more_checks(const PairLadder *ladder, const BenchOptions *check)
{
    int failed = pair_case(ladder, 2, 50, 64, (PairOptions){ACT_EXP, NORM_EXACT, 1, 0}, 1, check);
    for (int act = 0; act < 4; act++)
        failed += check_post(2, 70, 192, act) + check_post(2, 9, 33, act);
    return failed;
}

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {{1, 1, 1},     {1, 2, 33},    {3, 31, 33},    {2, 33, 192},
                                       {1, 258, 192}, {1, 514, 64},  {1, 1000, 64},  {2, 7, 512},
                                       {1, 97, 320},  {2, 31, 3072}, {65537, 1, 64}, {32769, 2, 1},
                                       {1, 2, 12289}};
    static const PairLadder ladder = {
        "forward",   0,        kernels,    NUM_KERNELS, shapes, sizeof shapes / sizeof *shapes,
        more_checks, pair_center, NULL,    "centring",  4};
    return pair_ladder(argc, argv, &ladder);
}
