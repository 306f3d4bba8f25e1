// train_causalrn.cu: CausalRN and BiRN on the GPU, the same sections as train_causalrn.c, which
// says what is computed and is what this is held against (dev/test_cuda.sh, `make test-cuda`).
//
//   r   = normalize(x)                         (x - mean) / sqrt(var + 1e-8), nothing learned
//   a_u = W_right r_u + bias                   the query side
//   b_v = W_left r_v                           the memory side
//   s_u = 1/(u+1) sum_{v<=u} psi(mu(a_u + b_v))                                       [eq. 4, 5]
//   x  += W_out normalize(s) + bias            the whole block: no MLP, no attention beside it
//
// "An All-MLP Sequence Modeling Architecture That Excels at Copying" (ICML 2024 NGSM workshop). The
// quadratic model (mu: every pair normalized) never stores (T,T,H): the variance of a pair comes
// from one matrix product, var(a+b) = var a + var b + 2 (a.b)/H for centred a and b, and only
// exponential and sums are left for every pair and channel. The linear model factors: s = exp(a)
// cumsum exp(b).
//
// nvcc -DPRECISION_BF16 (train_causalrn_gpu): weights and activations in bf16, through the typedef
// floatX; fp32: master weights, the residual stream, statistics, sums over positions, exponentials,
// logits. The gradient of the residual stream is in bf16. Without it (train_causalrn_gpu_fp32) all
// is fp32, no TF32. Of a layer is kept for the backward: r, o and their rstd; linear: a, b and the
// sum before every tile; quadratic: centred a, b, their variances and (fast kernels) p. x is
// updated in place: only --dump keeps it of every layer.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. No float is added atomically: same bits every
// time.
//
// Sections: [mix] the layer; [layers] matrix product, normalize, embedding, cross-entropy; [model];
// [train]; [main]. [optimizer] AdamW and the sums over rows are in util/.
//
// Figures of the paper, each run on one H200 (README.md has the measurements):
//   ./train_causalrn_gpu --preset copy-s128     Fig. 3: 59 s, 99% near step 166; 600 steps: Fig. 2,
//     with --prenorm exact|approx|none, --postnorm yes|no, --activation exp|relu|elu
//   ./train_causalrn_gpu --preset copy-s16 ... copy-s256, --model linear, --stop-at 0.99     Fig. 4
// Differences from the paper: those of train_causalrn.c.

#define READS_IMAGES
#include "data/tasks.h"
#include "util/asked.cuh"
#include "util/optimizer.cuh"
#include "util/patches.cuh" // and with it sums, warp, cuda_training, cuda, gemm, training
#include "util/rows.cuh"

// ------------------------------------------------------------------------------------------------
// [mix] The layer: every position paired with every earlier one.

#define ARCHITECTURE "causalrn"
enum { QUADRATIC, LINEAR };
enum { EXACT, APPROX, NONE, AUTO };
enum { EXP, RELU, ELU, GELU };

typedef struct {
    int model, prenorm, activation; // of the enums above
    int causal, postnorm;           // 0 or 1
} Mix;

// What the forward saves for the backward. Quadratic: ac, bc (B,T,H) what enters the pairs, va, vb
// (B,T) (see prepare), scale (B,T), o_rstd (B,T) of the post norm, and for the fast kernels p
// (B,T,H). Linear: carry (B,tiles,H), the sum before each tile, or its log2 (LOG). While decoding
// the same is what a layer remembers of B sequences: quadratic all b so far, linear max, sum (B,H)
// alone.
typedef struct {
    floatX *ac, *bc, *p;
    float *va, *vb, *scale, *o_rstd, *carry, *max, *sum;
} Saved;

// normalize_backward: see [layers].
static void normalize_backward(floatX *dx, const floatX *dout, size_t pitch, const floatX *out,
                               const float *rstd, size_t N, size_t C, int first,
                               cudaStream_t stream);

// psi: the activation; *slope = its derivative (0 at 0 for relu).
template <int ACTIVATION> static __device__ inline float psi(float z, float *slope)
{
    float e;
    switch (ACTIVATION) {
    case EXP: return *slope = expf(z);
    case RELU: *slope = z > 0 ? 1 : 0; return z < 0 ? 0 : z; // keeps NaN
    case ELU:
        e = expf(z);
        *slope = z > 0 ? 1 : e;
        return z > 0 ? z : e - 1;
    default:
        e = 0.5f * (1 + erff(z * 0.70710678118654752f));
        *slope = e + z * 0.39894228040143268f * expf(-0.5f * z * z);
        return z * e;
    }
}

// WITH_ACTIVATION: the statement with ACT and WIDTH as constants, for kernels that have them as
// templates. WIDTH: H if that is 192, the paper's, else 0.
#define WITH_ACTIVATION(activation, H, ...) \
    do { \
        if ((H) == 192) { enum { WIDTH = 192 }; WITH_ACT(activation, __VA_ARGS__) } \
        else { enum { WIDTH = 0 }; WITH_ACT(activation, __VA_ARGS__) } \
    } while (0)
#define WITH_ACT(activation, ...) \
    if ((activation) == EXP) { enum { ACT = EXP }; __VA_ARGS__; } \
    else if ((activation) == RELU) { enum { ACT = RELU }; __VA_ARGS__; } \
    else if ((activation) == ELU) { enum { ACT = ELU }; __VA_ARGS__; } \
    else { enum { ACT = GELU }; __VA_ARGS__; }

// prepare_kernel: a warp a row: see prepare. Of row i of a, b the result is row i / count * T + t +
// i % count.
template <int WIDTH>
static __global__ void prepare_kernel(floatX *ac, floatX *bc, float *va, float *vb, const floatX *a,
                                      const floatX *b, size_t rows, int T, int t, int count, int H,
                                      int prenorm)
{
    const size_t task = row_of_warp(), i = task % rows, row = i / count * T + t + i % count;
    const int n = WIDTH ? WIDTH : H, lane = threadIdx.x % WARP, is_b = task >= rows;
    if (task >= 2 * rows)
        return;
    const floatX *__restrict__ x = (is_b ? b : a) + i * 2 * n;
    floatX *__restrict__ y = (is_b ? bc : ac) + row * n;
    const Moments m = prenorm == NONE ? Moments{0, 1} : row_moments<floatX, WIDTH>(x, n, EPS);
    const float factor = prenorm == APPROX ? m.rstd : 1;
    float squares = 0;
#pragma unroll
    for (int h = lane; h < n; h += WARP) {
        const floatX value = (floatX)(((float)x[h] - m.mean) * factor);
        squares += (float)value * (float)value;
        y[h] = value;
    }
    squares = warp_sum(squares) / (float)n;
    if (lane == 0)
        (is_b ? vb : va)[row] = prenorm == EXACT ? squares : factor;
}

// prepare: ac, bc (B,T,H) = what enters the pairs for positions t .. t+count-1, a, b (B,count,H),
// rows of these 2H apart: exact: x minus its row mean, and va, vb (B,T) = the variances of what is
// stored; approx: normalize(x), va, vb = 1 / deviation; none: x.
static void prepare(Saved saved, const floatX *a, const floatX *b, size_t B, size_t T, size_t t,
                    size_t count, size_t H, int prenorm, cudaStream_t stream)
{
    LAUNCH_ROWS(prepare_kernel, 2 * B * count, H, stream, saved.ac, saved.bc, saved.va, saved.vb, a,
                b, B * count, (int)T, (int)t, (int)count, (int)H, prenorm);
}

// pair_rstd: 1 / deviation of a pair: var(a + b) = var a + var b + 2 (a . b)/H for centred a, b.
// Rounding below 0 is clamped.
static __device__ inline float pair_rstd(float va, float vb, float dot, int H)
{
    return rsqrtf(fmaxf(va + vb + 2 * dot / (float)H, 0) + EPS);
}

// row_scale: what a row's sums over n positions are multiplied by: with post norm 2^-k, k such that
// the largest |s| comes into [1/2, 1), which the norm undoes exactly (up to eps), and no square
// overflows; else 1/n.
static __device__ inline float row_scale(float top, int n, int postnorm)
{
    const int k = (int)(__float_as_uint(top) >> 23) - 126;
    if (!postnorm)
        return 1 / (float)n;
    return top > 0 && k < 126 && k > -126 ? exp2f((float)-k) : 1;
}

// pair_finish: by a warp: from a row's sums s (H) over n positions, scaled in place (row_scale):
// out (H) = normalize(s) with post norm, else s; saved.scale and o_rstd of `row`. Returns the
// scale.
static __device__ inline float pair_finish(floatX *out, Saved saved, float *s, size_t row, int n,
                                           int H, int postnorm)
{
    const int lane = threadIdx.x % WARP;
    float top = 0;
    for (int h = lane; h < H; h += WARP)
        top = fmaxf(top, fabsf(s[h]));
    const float scale = row_scale(warp_max(top), n, postnorm);
    for (int h = lane; h < H; h += WARP)
        s[h] *= scale;
    __syncwarp();
    const Moments m = postnorm ? row_moments<float, 0>(s, H, EPS) : Moments{0, 1};
    for (int h = lane; h < H; h += WARP)
        out[h] = (floatX)((s[h] - m.mean) * m.rstd);
    if (lane == 0) {
        saved.scale[row] = scale;
        saved.o_rstd[row] = m.rstd;
    }
    return scale;
}

// ---- quadratic, any shape, activation and type: a warp owns a position

// A warp's row of floats, h = lane, lane + 32, ...: in registers where WIDTH is its length, else in
// shared memory.
template <int WIDTH> struct WarpRow {
    float kept[WIDTH / WARP + 1], *shared;
    __device__ float &operator[](int h) { return WIDTH ? kept[h / WARP] : shared[h]; }
};

// pair_warp_rstd: by a warp: r of own row x (n) and another position's y (n); 1 unless exact.
template <int WIDTH>
static __device__ inline float pair_warp_rstd(WarpRow<WIDTH> &x, const floatX *y, float vx,
                                              float vy, int n, int prenorm)
{
    float dot = 0;
    if (prenorm != EXACT)
        return 1;
#pragma unroll
    for (int h = threadIdx.x % WARP; h < n; h += WARP)
        dot += x[h] * (float)y[h];
    return pair_rstd(vx, vy, warp_sum(dot), n);
}

// pair_sum_kernel: out (B,count,H) of positions t .. t+count-1 of T, and their saved.scale, o_rstd
// (as out), from saved.ac, bc, va, vb. A warp has 2H floats of shared memory.
template <int ACT, int WIDTH>
static __global__ void pair_sum_kernel(floatX *out, Saved saved, size_t rows, int T, int t,
                                       int count, int H, Mix mix)
{
    extern __shared__ float shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n = WIDTH ? WIDTH : H;
    const size_t row = blockIdx.x * (size_t)(blockDim.x / WARP) + warp, row0 = row / count * T;
    const int u = t + row % count, positions = mix.causal ? u + 1 : T;
    float *memory = shared + warp * 2 * n, slope;
    WarpRow<WIDTH> a = {.shared = memory + n}, s = {.shared = memory};
    if (row >= rows)
        return;
#pragma unroll
    for (int h = lane; h < n; h += WARP) {
        a[h] = (float)saved.ac[(row0 + u) * n + h];
        s[h] = 0;
    }
    for (size_t v = row0; v < row0 + positions; v++) {
        const floatX *__restrict__ b = saved.bc + v * n;
        const float r = pair_warp_rstd(a, b, saved.va[row0 + u], saved.vb[v], n, mix.prenorm);
#pragma unroll
        for (int h = lane; h < n; h += WARP)
            s[h] += psi<ACT>(r * (a[h] + (float)b[h]), &slope);
    }
#pragma unroll
    for (int h = lane; h < n; h += WARP)
        memory[h] = s[h];
    __syncwarp();
    pair_finish(out + row * n, saved, memory, row, positions, n, mix.postnorm);
}

// pair_grad_kernel: dx (B,T,H), rows 2H apart, = for own position u (SIDE 0) da_u = sum_v q, for v
// (SIDE 1) db_v = sum_u q; q = r g e' + N + M (a + b), g = scale ds, e' = psi'(z), z = r (a + b),
// and for exact N = -r (sum_h g e')/H, M = -r^2 (sum_h g e' z)/H. A warp shares 2H floats.
template <int ACT, int WIDTH, int SIDE>
static __global__ void pair_grad_kernel(floatX *dx, const floatX *ds, Saved saved, size_t rows,
                                        int T, int H, Mix mix)
{
    extern __shared__ float shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n = WIDTH ? WIDTH : H;
    const size_t row = blockIdx.x * (size_t)(blockDim.x / WARP) + warp, row0 = row / T * T;
    const floatX *own = SIDE ? saved.bc : saved.ac, *other = SIDE ? saved.ac : saved.bc;
    const float *v_own = SIDE ? saved.vb : saved.va, *v_other = SIDE ? saved.va : saved.vb;
    const size_t first = SIDE && mix.causal ? row : row0;
    const size_t end = SIDE || !mix.causal ? row0 + T : row + 1;
    const int exact = mix.prenorm == EXACT;
    WarpRow<WIDTH> x = {.shared = shared + warp * 2 * n}, sum = {.shared = x.shared + n};
    float slope;
    if (row >= rows)
        return;
#pragma unroll
    for (int h = lane; h < n; h += WARP) {
        x[h] = (float)own[row * n + h];
        sum[h] = 0;
    }
    for (size_t k = first; k < end; k++) {
        const floatX *__restrict__ y = other + k * n, *__restrict__ g = ds + (SIDE ? k : row) * n;
        const float scale = saved.scale[SIDE ? k : row];
        const float r = pair_warp_rstd(x, y, v_own[row], v_other[k], n, mix.prenorm);
        float s1 = 0, s2 = 0;
#pragma unroll
        for (int h = lane; h < n; h += WARP) {
            const float pair = x[h] + (float)y[h];
            psi<ACT>(r * pair, &slope);
            const float ge = scale * (float)g[h] * slope;
            s1 += ge;
            s2 += ge * r * pair;
            sum[h] += r * ge;
        }
        if (!exact)
            continue;
        const float N = -r * warp_sum(s1) / (float)n, M = -r * r * warp_sum(s2) / (float)n;
#pragma unroll
        for (int h = lane; h < n; h += WARP)
            sum[h] += fmaf(M, x[h] + (float)y[h], N);
    }
#pragma unroll
    for (int h = lane; h < n; h += WARP)
        dx[row * 2 * n + h] = (floatX)sum[h];
}

// pair_warps: warps of a block of the two kernels above, by their shared memory.
static size_t pair_warps(size_t H)
{
    return H <= 1024 ? 8 : H <= 4096 ? 2 : 1;
}

// pair_sum: see pair_sum_kernel.  [eq. 4 and 6]
static void pair_sum(floatX *out, Saved saved, size_t B, size_t T, size_t t, size_t count, size_t H,
                     Mix mix, cudaStream_t stream)
{
    const size_t W = pair_warps(H), rows = B * count, grid = (rows + W - 1) / W;
    WITH_ACTIVATION(mix.activation, H,
                    LAUNCH((pair_sum_kernel<ACT, WIDTH>), grid, W * WARP, W * 8 * H, stream, out,
                           saved, rows, (int)T, (int)t, (int)count, (int)H, mix));
}

// pair_grad: da, db (B,T,H), rows 2H apart; see pair_grad_kernel.
static void pair_grad(floatX *da, floatX *db, const floatX *ds, Saved saved, size_t B, size_t T,
                      size_t H, Mix mix, cudaStream_t stream)
{
    const size_t W = pair_warps(H), rows = B * T, grid = (rows + W - 1) / W;
    WITH_ACTIVATION(mix.activation, H,
                    LAUNCH((pair_grad_kernel<ACT, WIDTH, 0>), grid, W * WARP, W * 8 * H, stream, da,
                           ds, saved, rows, (int)T, (int)H, mix);
                    LAUNCH((pair_grad_kernel<ACT, WIDTH, 1>), grid, W * WARP, W * 8 * H, stream, db,
                           ds, saved, rows, (int)T, (int)H, mix));
}

// pair_fast: whether the fast kernels take it: bf16, exact, exp, causal, H a multiple of 64 to 384.
static int pair_fast(size_t H, Mix mix)
{
    return sizeof(floatX) == 2 && mix.model == QUADRATIC && mix.prenorm == EXACT &&
           mix.activation == EXP && mix.causal && H % 64 == 0 && H <= 384;
}

#ifdef PRECISION_BF16
// ---- quadratic, fast: all that is elementwise in pairs and channels is one add, one multiply, one
// exponential and the sums; deviations and M run on the tensor cores. For a pair and channel with e
// = exp(z): s_u = sum_v e, p_u = sum_v r e; backward, -N summed over u (v) being the mean over
// channels of sum_u (sum_v) r g e,
//   da_u = g p_u - mean - a_u sum_v M - (M b)_u
//   db_v = sum_u r g e - mean - b_v sum_u M - (M^T a)_v
// with M = r^2 (sum_h g e z)/H (T,T), the general kernels' M with its sign turned, of which -M is
// kept in bf16: the only thing of that size.

enum { ROWS_U = 8, CHUNK_V = 96 };                              // forward
enum { TILE_V = 32, CHUNK_U = 16 };                             // backward

// pair_r_tile: by a warp: rs[i][j] = log2(e) r of the pair (u+j, v+i), 16 x 8; positions outside
// 0..T-1 repeat the nearest.
static __device__ inline void pair_r_tile(float (*rs)[ROWS_U], const floatX *ac, const floatX *bc,
                                          const float *va, const float *vb, int u, int v, int T,
                                          int H)
{
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    float c[4];
    mma_dots(c, bc + (size_t)min(v + g, T - 1) * H + 8 * t,
             bc + (size_t)min(v + g + 8, T - 1) * H + 8 * t,
             ac + (size_t)min(max(u + g, 0), T - 1) * H + 8 * t, H);
    for (int i = 0; i < 4; i++)
        rs[g + i / 2 * 8][2 * t + i % 2] =
            LOG2E * pair_rstd(va[min(max(u + 2 * t + i % 2, 0), T - 1)],
                              vb[min(v + g + i / 2 * 8, T - 1)], c[i], H);
}

// pair_forward_row: one v against rows FIRST .. of two channels of u; not those below `mask`.
template <int FIRST, int DIAGONAL>
static __device__ __forceinline__ void pair_forward_row(float2 s[ROWS_U], float2 p[ROWS_U],
                                                        const float2 a[ROWS_U], float2 b,
                                                        const float *rs, int mask)
{
    const float4 r0 = *(const float4 *)rs, r1 = *(const float4 *)(rs + 4);
    const float r[ROWS_U] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
#pragma unroll
    for (int i = FIRST; i < ROWS_U; i++) {
        const float x = exp2_fast(DIAGONAL && i < mask ? -INFINITY : (a[i].x + b.x) * r[i]);
        const float y = exp2_fast(DIAGONAL && i < mask ? -INFINITY : (a[i].y + b.y) * r[i]);
        s[i].x += x;
        s[i].y += y;
        p[i].x = fmaf(r[i], x, p[i].x);
        p[i].y = fmaf(r[i], y, p[i].y);
    }
}

// pair_forward_kernel: a block owns eight u of a sequence, a thread two of their channels; r of 96
// v at a time comes from the tensor cores. Rows are cut from the end of the sequence: a ragged tile
// is the one with the fewest v, and the longest go first. Then a warp finishes a row.
static __global__ void __launch_bounds__(256, 3)
pair_forward_kernel(floatX *out, Saved saved, int B, int T, int H, int postnorm)
{
    __shared__ __align__(16) float rs[CHUNK_V][ROWS_U];
    extern __shared__ float kept[]; // [a, s, p][ROWS_U][H]: every thread's own channels
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int u0 = T - ROWS_U * (int)(blockIdx.x / B + 1), h = 2 * threadIdx.x;
    const size_t row0 = (size_t)(blockIdx.x % B) * T; // the sequence's first row
    float2 *own = (float2 *)(kept + h);
    const floatX *bc = saved.bc + row0 * H;
    for (int i = 0; i < ROWS_U; i++) {
        own[i * H / 2] = load2(saved.ac + (row0 + max(u0 + i, 0)) * H + h);
        own[(ROWS_U + i) * H / 2] = own[(2 * ROWS_U + i) * H / 2] = {0, 0};
    }
    for (int v0 = 0; v0 < u0 + ROWS_U; v0 += CHUNK_V) {
        const int end = min(v0 + CHUNK_V, u0 + ROWS_U);
        __syncthreads();
        for (int i = 16 * warp; i < end - v0; i += 16 * warps)
            pair_r_tile(&rs[i], saved.ac + row0 * H, bc, saved.va + row0, saved.vb + row0, u0,
                        v0 + i, T, H);
        __syncthreads();
        float2 a[ROWS_U], s[ROWS_U], p[ROWS_U]; // in registers for the pair loop alone: else the
#pragma unroll                                  // compiler, short of them above, spills inside it
        for (int i = 0; i < ROWS_U; i++) {
            a[i] = own[i * H / 2];
            s[i] = own[(ROWS_U + i) * H / 2];
            p[i] = own[(2 * ROWS_U + i) * H / 2];
        }
        const floatX *b = bc + (size_t)v0 * H + h;
        const float *r = rs[0];
        int n = min(end, u0) - v0, v = v0 + max(n, 0);
        if (n >= 4) { // two rows of b are on their way while two are in use
            __nv_bfloat162 b0 = *(const __nv_bfloat162 *)b, b1 = *(const __nv_bfloat162 *)(b + H);
#pragma unroll 1
            for (; n >= 4; n -= 2, r += 2 * ROWS_U) {
                b += 2 * H;
                const __nv_bfloat162 b2 = *(const __nv_bfloat162 *)b;
                const __nv_bfloat162 b3 = *(const __nv_bfloat162 *)(b + H);
                pair_forward_row<0, 0>(s, p, a, __bfloat1622float2(b0), r, 0);
                pair_forward_row<0, 0>(s, p, a, __bfloat1622float2(b1), r + ROWS_U, 0);
                b0 = b2;
                b1 = b3;
            }
        }
#pragma unroll 1
        for (; n > 0; n--, b += H, r += ROWS_U)
            pair_forward_row<0, 0>(s, p, a, load2(b), r, 0);
#pragma unroll 1
        for (; v < min(end, u0 + ROWS_U / 2); v++, b += H, r += ROWS_U) // the triangle at the end
            pair_forward_row<0, 1>(s, p, a, load2(b), r, v - u0);
#pragma unroll 1
        for (; v < end; v++, b += H, r += ROWS_U)
            pair_forward_row<ROWS_U / 2, 1>(s, p, a, load2(b), r, v - u0);
#pragma unroll
        for (int i = 0; i < ROWS_U; i++) {
            own[(ROWS_U + i) * H / 2] = s[i];
            own[(2 * ROWS_U + i) * H / 2] = p[i];
        }
    }
    __syncthreads();
    for (int i = warp; i < ROWS_U; i += warps)
        if (u0 + i >= 0) {
            const size_t row = row0 + u0 + i;
            const float *p = kept + (2 * ROWS_U + i) * H;
            const float scale = pair_finish(out + row * H, saved, kept + (ROWS_U + i) * H, row,
                                            u0 + i + 1, H, postnorm);
            for (int k = lane; k < H; k += WARP)
                saved.p[row * H + k] = (floatX)(p[k] * (scale * LN2)); // r had a factor log2(e)
        }
}

// The backward block's shared memory. A tile's 32 v by 16 u: row v = 16m + 8 half + g of a u stands
// at 16m + 2g + half, so that a lane's two rows are neighbours. Channels of ab and bb stand in the
// order of pair_place.
typedef struct {
    float *ag;  // [CHUNK_U][H/4][a: 4, g: 4]
    float *rl;  // [CHUNK_U][2][8][log2(e) r: 2, log2(r): 2]
    float *s2;  // [H/32][CHUNK_U][TILE_V]: each slice's share of sum_h r g e (a + b)
    floatX *g2; // [CHUNK_U][H/4][g a: 4, g: 4]: the mma's B operands of r e and r e b
    floatX *ab; // [CHUNK_U][H+8]
    floatX *bb; // [TILE_V][H+8]
    floatX *end;
} PairShared;

// pair_shared: cut the block's dynamic memory at base.
static __host__ __device__ inline PairShared pair_shared(char *base, int H)
{
    PairShared x;
    x.ag = (float *)base;
    x.rl = x.ag + 2 * CHUNK_U * H;
    x.s2 = x.rl + 2 * CHUNK_U * TILE_V;
    x.g2 = (floatX *)(x.s2 + H / 32 * CHUNK_U * TILE_V);
    x.ab = x.g2 + 2 * CHUNK_U * H;
    x.bb = x.ab + CHUNK_U * (H + 8);
    x.end = x.bb + TILE_V * (H + 8);
    return x;
}

// pair_place: where channels h, h+1 (h a multiple of 4; h+2, h+3: 8 further) of a row of ab or bb
// stand: in each 16, column 8n + 2t + i is channel 4t + 2n + i, so that mma's operands and its
// accumulators give a lane the same channels, 4t .. 4t+3.
static __device__ inline int pair_place(int h)
{
    return h / 16 * 16 + h % 16 / 2;
}

// A lane's part of a warp's 16 rows v by 32 channels: rows g and g+8 (half), channels 16c + 4t + j.
typedef struct {
    float b[2][2][4];   // [c][half][j]
    float acc[2][2][4]; // db
    uint4 bb[2];        // b in bf16: an A operand
} PairTile;

// A thread's part of a chunk of 16 u on its way to shared memory: rows own_u, own_u + 8, four
// channels from own_h.
typedef struct {
    uint2 a[2], ds[2];
    float scale[2];
} PairFetch;

// pair_fetch: rows u0 .. u0+15 of a, ds and scale from global memory, 0 beyond T.
static __device__ inline PairFetch pair_fetch(const floatX *ac, const floatX *ds,
                                              const float *scale, int u0, int own_u, int own_h,
                                              int T, int H)
{
    PairFetch f = {};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = u0 + own_u + 8 * k;
        if (u < T) {
            f.a[k] = *(const uint2 *)(ac + (size_t)u * H + own_h);
            f.ds[k] = *(const uint2 *)(ds + (size_t)u * H + own_h);
            f.scale[k] = scale[u];
        }
    }
    return f;
}

// pair_store: what pair_fetch fetched, to x.ag, x.g2 and x.ab, with g = scale ds.
static __device__ inline void pair_store(const PairShared &x, const PairFetch &f, int own_u, int h,
                                         int H)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = own_u + 8 * k;
        const float2 a0 = load2((const floatX *)&f.a[k].x), a1 = load2((const floatX *)&f.a[k].y);
        float2 g0 = load2((const floatX *)&f.ds[k].x), g1 = load2((const floatX *)&f.ds[k].y);
        g0 = {f.scale[k] * g0.x, f.scale[k] * g0.y};
        g1 = {f.scale[k] * g1.x, f.scale[k] * g1.y};
        float4 *ag = (float4 *)&x.ag[2 * (u * H + h)];
        ag[0] = {a0.x, a0.y, a1.x, a1.y};
        ag[1] = {g0.x, g0.y, g1.x, g1.y};
        *(uint4 *)&x.g2[2 * (u * H + h)] = {pack2(g0.x * a0.x, g0.y * a0.y),
                                            pack2(g1.x * a1.x, g1.y * a1.y), pack2(g0.x, g0.y),
                                            pack2(g1.x, g1.y)};
        uint32_t *place = (uint32_t *)&x.ab[u * (H + 8) + pair_place(h)];
        place[0] = f.a[k].x;
        place[4] = f.a[k].y;
    }
}

// pair_backward_r: one warp of four (quarter): r and log2(r) of 16 v by 8 u of the chunk in x.ab;
// pairs that do not exist get r = 0 and an exponent of -126.
static __device__ inline void pair_backward_r(const PairShared &x, const float *va, const float *vb,
                                              int v0, int u0, int T, int H, int quarter)
{
    const int m = quarter % 2, n = quarter / 2, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const floatX *b = x.bb + (16 * m + g) * (H + 8) + 8 * t;
    float c[4];
    mma_dots(c, b, b + 8 * (H + 8), x.ab + (8 * n + g) * (H + 8) + 8 * t, H);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int u = u0 + 8 * n + 2 * t + i % 2, v = v0 + 16 * m + g + i / 2 * 8;
        const int pair = u < T && v <= u;
        const float r = pair ? pair_rstd(va[u], vb[v], c[i], H) : 1;
        float *rl = x.rl + 2 * (u - u0) * TILE_V + 32 * m + 4 * g + i / 2;
        rl[0] = pair ? LOG2E * r : 0;
        rl[2] = pair ? __log2f(r) : -126;
    }
}

// pair_backward_rows: rows u .. end-1 of the chunk against the warp's first NH halves (of 8 rows
// v): r e straight from the exponent, acc += r g e, and the slice's share of s2, the same in all
// eight columns of an mma.
template <int NH>
static __device__ __forceinline__ void pair_backward_rows(PairTile &tile, const PairShared &x,
                                                          int u, int end, int H)
{
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const int m = warp % 2, slice = warp / 2;
    const float *ag = x.ag + 2 * (u * H + 32 * slice + 4 * t);
    const float *rl = x.rl + 2 * u * TILE_V + 32 * m + 4 * g;
    const floatX *g2 = x.g2 + 2 * (u * H + 32 * slice + 4 * t);
    float *s2 = x.s2 + (slice * CHUNK_U + u) * TILE_V + 16 * m + 2 * g;
#pragma unroll 1
    for (; u < end; u++, ag += 2 * H, g2 += 2 * H, rl += 2 * TILE_V, s2 += TILE_V) {
        const float4 r4 = *(const float4 *)rl;
        const float r[2] = {r4.x, r4.y}, log_r[2] = {r4.z, r4.w};
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const Pack<float, 4> a = *(const Pack<float, 4> *)(ag + 32 * c);
            const Pack<float, 4> k = *(const Pack<float, 4> *)(ag + 32 * c + 4);
            const uint4 b = tile.bb[c], gs = *(const uint4 *)(g2 + 32 * c);
            uint32_t e[2][2] = {};
#pragma unroll
            for (int half = 0; half < NH; half++) {
                float y[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    y[j] = exp2_fast(fmaf(a.v[j] + tile.b[c][half][j], r[half], log_r[half]));
                    tile.acc[c][half][j] = fmaf(k.v[j], y[j], tile.acc[c][half][j]);
                }
                e[0][half] = pack2(y[0], y[1]);
                e[1][half] = pack2(y[2], y[3]);
            }
            mma(sum, {e[0][0], e[0][1], e[1][0], e[1][1]}, gs.x, gs.y);
            mma(sum, {mul2(e[0][0], b.x), mul2(e[0][1], b.y), mul2(e[1][0], b.z),
                      mul2(e[1][1], b.w)}, gs.z, gs.w);
        }
        if (t == 0)
            *(float2 *)s2 = {sum[0], sum[2]};
    }
}

// pair_store_db: db (T,H), rows 2H apart, = acc - its mean over channels - b sum_u M. sum_m: this
// thread's part of its lane's row, of -M.
static __device__ inline void pair_store_db(floatX *db, const PairTile &tile, const PairShared &x,
                                            float sum_m, int v0, int T, int H)
{
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int warps = H / 16, m = warp % 2, slice = warp / 2;
    float *all_m = x.ag, *all_n = x.ag + warps * TILE_V; // [warp][TILE_V], [slice][TILE_V]
    all_m[warp * TILE_V + lane] = sum_m;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
        for (int i = 0; i < 8; i++)
            sum += tile.acc[i / 4][half][i % 4];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == 0)
            all_n[slice * TILE_V + 16 * m + 2 * g + half] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = 16 * m + 2 * g + half, v = v0 + 16 * m + 8 * half + g;
        float sum = 0, mean = 0;
#pragma unroll 1
        for (int w = 0; w < warps; w++)
            sum += all_m[w * TILE_V + at];
#pragma unroll 1
        for (int w = 0; w < H / 32; w++)
            mean += all_n[w * TILE_V + at];
        mean /= (float)H;
#pragma unroll
        for (int c = 0; c < 2 && v < T; c++) {
            const float *f = tile.acc[c][half], *b = tile.b[c][half];
            floatX *to = db + (size_t)v * 2 * H + 32 * slice + 16 * c + 4 * t;
            store2(to, f[0] - mean + b[0] * sum, f[1] - mean + b[1] * sum);
            store2(to + 2, f[2] - mean + b[2] * sum, f[3] - mean + b[3] * sum);
        }
    }
}

// pair_backward_kernel: a block owns 32 v of a sequence, a warp 16 of them by 32 channels, and
// walks over u in chunks of 16: db but for M^T a, and minus_M (B,T,Tp), Tp = T rounded up to 32, 0
// where there is no pair.
static __global__ void __launch_bounds__(768, 1)
pair_backward_kernel(floatX *db, floatX *minus_M, const floatX *ds, Saved saved, int B, int T,
                     int H)
{
    extern __shared__ __align__(16) char block_memory[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int v0 = (int)(blockIdx.x / B) * TILE_V, Tp = (T + TILE_V - 1) / TILE_V * TILE_V;
    const int lane_v = v0 + lane / 16 * 16 + lane % 2 * 8 + lane / 2 % 8; // the pair kept at `lane`
    const int quarter = warp - ((int)blockDim.x / WARP - 4); // r is made by the last four warps
    const int own_u = threadIdx.x / (H / 4), own_h = threadIdx.x % (H / 4) * 4;
    const size_t row0 = (size_t)(blockIdx.x % B) * T;
    const PairShared x = pair_shared(block_memory, H);
    const floatX *ac = saved.ac + row0 * H;
    const float *va = saved.va + row0, *vb = saved.vb + row0, *scale = saved.scale + row0;
    float sum_m = 0;
    PairTile tile;
    ds += row0 * H;
    minus_M += row0 * Tp + v0;
    for (int i = threadIdx.x; i < 4 * v0; i += blockDim.x)
        *(uint4 *)(minus_M + (size_t)(i / 4) * Tp + i % 4 * 8) = {0, 0, 0, 0};
    for (int v = own_u; v < TILE_V; v += 8) {
        uint2 raw = {0, 0};
        if (v0 + v < T)
            raw = *(const uint2 *)(saved.bc + (row0 + v0 + v) * H + own_h);
        uint32_t *place = (uint32_t *)&x.bb[v * (H + 8) + pair_place(own_h)];
        place[0] = raw.x;
        place[4] = raw.y;
    }
    pair_store(x, pair_fetch(ac, ds, scale, v0, own_u, own_h, T, H), own_u, own_h, H);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const floatX *b = x.bb + (warp % 2 * 16 + g) * (H + 8) + warp / 2 * 32 + 16 * c + 2 * t;
        for (int half = 0; half < 2; half++, b += 8 * (H + 8)) {
            const float2 lo = load2(b), hi = load2(b + 8);
            const float values[] = {lo.x, lo.y, hi.x, hi.y};
            (half ? tile.bb[c].y : tile.bb[c].x) = *(const uint32_t *)b;
            (half ? tile.bb[c].w : tile.bb[c].z) = *(const uint32_t *)(b + 8);
            for (int j = 0; j < 4; j++) {
                tile.b[c][half][j] = values[j];
                tile.acc[c][half][j] = 0;
            }
        }
    }
    if (quarter >= 0)
        pair_backward_r(x, va, vb, v0, v0, T, H, quarter);
    __syncthreads();
    for (int u0 = v0; u0 < T; u0 += CHUNK_U) {
        for (int i = 0; i < CHUNK_U; i += 8) {
            const int end = min(i + 8, T - u0), halves = (u0 + i - v0) / 8 + 1 - warp % 2 * 2;
            if (halves >= 2)
                pair_backward_rows<2>(tile, x, i, end, H);
            else if (halves == 1)
                pair_backward_rows<1>(tile, x, i, end, H);
        }
        __syncthreads();
        const PairFetch next = pair_fetch(ac, ds, scale, u0 + CHUNK_U, own_u, own_h, T, H);
        for (int i = warp; i < CHUNK_U; i += blockDim.x / WARP) {
            const int u = u0 + i, pair = u < T && lane_v <= u;
            const float r = LN2 * x.rl[2 * i * TILE_V + lane / 2 * 4 + lane % 2];
            float s2 = 0;
#pragma unroll 2
            for (int w = 0; w < H / 32; w++)
                s2 += x.s2[(w * CHUNK_U + i) * TILE_V + lane];
            const floatX m = (floatX)(pair ? -r * r / (float)H * s2 : 0);
            sum_m += (float)m;
            if (u < T)
                minus_M[(size_t)u * Tp + lane_v - v0] = m;
        }
        pair_store(x, next, own_u, own_h, H);
        __syncthreads();
        if (quarter >= 0)
            pair_backward_r(x, va, vb, v0, u0 + CHUNK_U, T, H, quarter);
        __syncthreads();
    }
    pair_store_db(db + row0 * 2 * H, tile, x, sum_m, v0, T, H);
}

// pair_close_kernel: a warp a row u: da, rows 2H apart, = g p - mean - a sum_v M; of da -= M b and
// db -= M^T a the pairs from position `corner` on.
template <int WIDTH>
static __global__ void pair_close_kernel(floatX *da, floatX *db, const floatX *__restrict__ ds,
                                         Saved saved, const floatX *__restrict__ minus_M,
                                         size_t rows, int T, int H, int corner)
{
    const size_t row = row_of_warp(), row0 = row / T * T;
    const int n = WIDTH ? WIDTH : H, lane = threadIdx.x % WARP, u = row % T;
    const int Tp = (T + TILE_V - 1) / TILE_V * TILE_V;
    float sum = 0, sum_m = 0;
    if (row >= rows)
        return;
    for (int v = 2 * lane; v < Tp; v += 2 * WARP) {
        const float2 m = load2(minus_M + row * Tp + v);
        sum_m += m.x + m.y;
    }
#pragma unroll
    for (int h = 2 * lane; h < n; h += 2 * WARP) {
        const float2 g = load2(ds + row * n + h), p = load2(saved.p + row * n + h);
        sum += g.x * p.x + g.y * p.y;
    }
    sum_m = warp_sum(sum_m);
    const float mean = warp_sum(sum) / (float)n;
#pragma unroll
    for (int h = 2 * lane; h < n; h += 2 * WARP) {
        const float2 g = load2(ds + row * n + h), p = load2(saved.p + row * n + h);
        const float2 a = load2(saved.ac + row * n + h);
        store2(da + row * 2 * n + h, g.x * p.x - mean + a.x * sum_m,
               g.y * p.y - mean + a.y * sum_m);
    }
    for (int h = 2 * lane; h < n && u >= corner; h += 2 * WARP) {
        float2 x = load2(da + row * 2 * n + h), y = load2(db + row * 2 * n + h);
        for (int k = corner; k < T; k++) {
            const float2 a = load2(saved.ac + (row0 + k) * n + h);
            const float2 b = load2(saved.bc + (row0 + k) * n + h);
            const float m_uk = (float)minus_M[row * Tp + k];
            const float m_ku = (float)minus_M[(row0 + k) * Tp + u];
            x = {x.x + m_uk * b.x, x.y + m_uk * b.y};
            y = {y.x + m_ku * a.x, y.y + m_ku * a.y};
        }
        store2(da + row * 2 * n + h, x.x, x.y);
        store2(db + row * 2 * n + h, y.x, y.y);
    }
}

// pair_forward: out (B,T,H), saved.scale, o_rstd, p = from saved.ac, bc, va, vb.  [eq. 4]
static void pair_forward(floatX *out, Saved saved, size_t B, size_t T, size_t H, Mix mix,
                         cudaStream_t stream)
{
    LAUNCH(pair_forward_kernel, B * ((T + ROWS_U - 1) / ROWS_U), H / 2, 3 * ROWS_U * H * 4, stream,
           out, saved, (int)B, (int)T, (int)H, mix.postnorm);
}

// pair_backward: da, db (B,T,H), rows 2H apart, = from ds (B,T,H) and what the forward saved;
// minus_M (B,T,Tp): scratch.
static void pair_backward(floatX *da, floatX *db, const floatX *ds, Saved saved, floatX *minus_M,
                          size_t B, size_t T, size_t H, cudaStream_t stream)
{
    const size_t tiles = (T + TILE_V - 1) / TILE_V, Tp = tiles * TILE_V;
    // cuBLAS is three times faster where rows and columns come in eights
    const size_t corner = T / 8 * 8;
    Gemm g = {.out = da, .add = da, .x = minus_M, .y = saved.bc, .type = FLOATX_TYPE,
              .in = FLOATX_TYPE, .M = T, .N = H, .K = corner, .ld_out = 2 * H, .ld_x = Tp,
              .ld_y = H, .batch = B, .out_step = 2 * T * H, .x_step = T * Tp, .y_step = T * H};
    LAUNCH(pair_backward_kernel, B * tiles, 2 * H, (size_t)pair_shared(NULL, (int)H).end, stream,
           db, minus_M, ds, saved, (int)B, (int)T, (int)H);
    LAUNCH_ROWS(pair_close_kernel, B * T, H, stream, da, db, ds, saved, minus_M, B * T, (int)T,
                (int)H, (int)corner);
    if (corner == 0)
        return;
    gemm(&g, stream); // da -= M b
    g.out = db;
    g.add = db;
    g.y = saved.ac;
    g.x_t = 1;
    g.M = corner;
    g.K = T;
    gemm(&g, stream); // db -= M^T a
}
#endif

// ---- linear: a block a sequence or a part of one, P threads side by side on a position, 12
// channels each in registers (util/rows.cuh)

enum { LINEAR_THREADS = 256 };

// Fewer sequences than LINEAR_FULL would leave most of the GPU idle. They are cut into parts of
// whole tiles, at most LINEAR_PARTS blocks, two a multiprocessor of an H200: one kernel makes the
// sum of each part alone, the next from these, in their order, the sum before each part, and the
// third starts from there. Fewer tiles than LINEAR_LEAST are not worth two kernels more.
#ifndef LINEAR_PARTS // dev/emulate/test.sh has all three smaller; LINEAR_FULL <= LINEAR_PARTS
#define LINEAR_PARTS 264
#define LINEAR_FULL 128
#define LINEAR_LEAST 8
#endif

// How every sequence is cut: into `count` parts of `span` tiles, the last of what is left. max, sum
// (B,count,H): each part's own sum, 2^max sum. before_max, before_sum: that of all parts before it,
// in the backward of all after it, without causal of all; NULL: there is nothing before.
typedef struct {
    int count, span;
    float *max, *sum, *before_max, *before_sum;
} Parts;

// linear_threads: P for H channels, VEC of which are neighbours in a thread (WITH_ROWS).
static size_t linear_threads(size_t H)
{
    return H % 4 == 0 && H <= 16 * CH ? 16 : H % 4 == 0 && H <= 32 * CH ? 32 : LINEAR_THREADS;
}

// linear_tile: positions of a tile, which the block takes at a time.
static size_t linear_tile(size_t H)
{
    return LINEAR_THREADS / linear_threads(H);
}

// row_sums: x = 2^x times the sums in y (LOG: whose log2 is y) of a row that sees n positions, 0
// beyond H; scaled by a power of two with post norm (see row_scale), else by 1/n. Returns the
// largest.
template <int P, int VEC, int LOG>
static __device__ inline float row_sums(float (&x)[CH], const float (&y)[CH], int n, int H,
                                        int postnorm, float *red)
{
    float top[1] = {-INFINITY};
#pragma unroll
    for (int i = 0; i < CH; i++) {
        x[i] = LOG ? x[i] + y[i] : exp2_fast(x[i]) * y[i];
        top[0] = fmaxf(top[0], row_channel<P, VEC>(i / VEC) < H ? x[i] : -INFINITY);
    }
    if (LOG || postnorm)
        row_reduce<P, 1>(top, red);
    const float shift = !postnorm ? log2f((float)n) : isfinite(top[0]) ? floorf(top[0]) + 1 : 0;
    const float scale = LOG ? 1 : row_scale(top[0], n, postnorm);
#pragma unroll
    for (int i = 0; i < CH; i++)
        x[i] = row_channel<P, VEC>(i / VEC) >= H ? 0 : LOG ? exp2_fast(x[i] - shift) : x[i] * scale;
    return LOG ? exp2_fast(top[0] - shift) : top[0] * scale;
}

// linear_sums_kernel: parts.max, sum = of each part the sum of exp(mu(b)), b (B,T,H), rows 2H
// apart, mu = normalize if approx; without LOG (see linear_forward_kernel) max is 0. A thread adds
// up every HIGH-th position, then the block what its threads have.
template <int P, int VEC, int WIDTH>
static __global__ void __launch_bounds__(LINEAR_THREADS, 3)
linear_sums_kernel(Parts parts, const floatX *b, int T, int size, Mix mix)
{
    enum { HIGH = LINEAR_THREADS / P, W = P * CH, LOG = !WIDTH };
    extern __shared__ float shared[];
    float *maxs = shared, *sums = maxs + HIGH * W, *red = sums + HIGH * W, max[CH], sum[CH];
    const int g = threadIdx.x / P, approx = mix.prenorm == APPROX, H = WIDTH ? WIDTH : size;
    const int start = blockIdx.x % parts.count * parts.span * HIGH;
    const int end = min(start + parts.span * HIGH, T);
    b += blockIdx.x / parts.count * (size_t)T * 2 * H;
    Raw<VEC> raw[1] = {row_fetch<P, VEC>(b + (size_t)min(start + g, T - 1) * 2 * H, H)};
#pragma unroll
    for (int i = 0; i < CH; i++) {
        max[i] = LOG ? -INFINITY : 0;
        sum[i] = 0;
    }
    for (int t0 = start; t0 < end; t0 += HIGH) {
        float x[1][CH], rstd[1];
        rows_open<P, VEC, 1>(x, rstd, raw, H, approx, red);
        raw[0] = row_fetch<P, VEC>(b + (size_t)min(t0 + HIGH + g, T - 1) * 2 * H, H);
#pragma unroll
        for (int i = 0; i < CH && t0 + g < T; i++)
            if (LOG)
                logsumexp_step(&max[i], &sum[i], x[0][i]);
            else
                sum[i] += exp2_fast(x[0][i]);
    }
    row_store<P, VEC>(maxs + g * W, max, W);
    row_store<P, VEC>(sums + g * W, sum, W);
    __syncthreads();
    for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
        float m = -INFINITY, s = 0;
#pragma unroll
        for (int i = 0; i < HIGH; i++)
            logsumexp_add(&m, &s, maxs[i * W + h], sums[i * W + h]);
        parts.max[blockIdx.x * H + h] = m;
        parts.sum[blockIdx.x * H + h] = s;
    }
}

// linear_join_kernel: parts.before_max, before_sum = from parts.max, sum, added in the order of
// the parts or (backward) from the last on; without causal all of them, for every part. A thread
// owns one of the sequences' n = B H channels.
static __global__ void linear_join_kernel(Parts parts, size_t n, int H, int causal, int backward)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    const float *__restrict__ max = parts.max, *__restrict__ sum = parts.sum;
    float *__restrict__ before_max = parts.before_max, *__restrict__ before_sum = parts.before_sum;
    float m = -INFINITY, s = 0;
    if (i >= n)
        return;
    for (int pass = causal; pass < 2; pass++)
#pragma unroll 8
        for (int p = 0; p < parts.count; p++) {
            const int part = backward ? parts.count - 1 - p : p;
            const size_t at = (i / H * parts.count + part) * H + i % H;
            if (pass == 1) {
                before_max[at] = m;
                before_sum[at] = s;
            }
            if (causal || pass == 0)
                logsumexp_add(&m, &s, max[at], sum[at]);
        }
}

// linear_forward_kernel: o (B,T,H), saved.carry (B,tiles,H) = from a, b (B,T,H), rows of these 2H
// apart, and the sum before each part. LOG: sums are kept as their logs and never overflow; without
// it only for approx and H <= 491. Without causal a first pass over b makes the sum that every
// position sees, unless parts have it. Decoding (saved.max not NULL): these are positions t ..
// t+T-1, and saved.max, sum = the sum up to there. CUT: there is more than one part.
template <int P, int VEC, int WIDTH, int CUT>
static __global__ void __launch_bounds__(LINEAR_THREADS, 3)
linear_forward_kernel(floatX *o, Saved saved, Parts parts, const floatX *a, const floatX *b, int T,
                      int t, int size, Mix mix)
{
    enum { HIGH = LINEAR_THREADS / P, W = P * CH, LOG = !WIDTH };
    extern __shared__ float shared[];
    float *ls = shared, *max = ls + HIGH * W, *sum = max + W, *red = sum + W;
    const int g = threadIdx.x / P, approx = mix.prenorm == APPROX, H = WIDTH ? WIDTH : size;
    const int causal = WIDTH || mix.causal;
    const int start = CUT ? blockIdx.x % parts.count * parts.span * HIGH : 0;
    const int end = CUT ? min(start + parts.span * HIGH, T) : T;
    const size_t sequence = CUT ? blockIdx.x / parts.count : blockIdx.x, row0 = sequence * T;
    float *carry = saved.carry + sequence * ((T + HIGH - 1) / HIGH) * H;
    for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
        max[h] = parts.before_max ? parts.before_max[blockIdx.x * H + h] : -INFINITY;
        sum[h] = parts.before_max ? parts.before_sum[blockIdx.x * H + h] : 0;
    }
    for (int pass = CUT || causal; pass < 2; pass++) {
        size_t at = (row0 + min(start + g, T - 1)) * 2 * H; // rows from T on repeat the last
        Raw<VEC> raw[2] = {row_fetch<P, VEC>(a + at, H), row_fetch<P, VEC>(b + at, H)};
        for (int t0 = start; t0 < end; t0 += HIGH) {
            const int exists = t0 + g < T, add = causal || pass == 0;
            float x[2][CH], y[CH], rstd[2];
            rows_open<P, VEC, 2>(x, rstd, raw, H, approx, red);
            at = (row0 + min(t0 + HIGH + g, T - 1)) * 2 * H; // the next tile is on its way
            raw[0] = row_fetch<P, VEC>(a + at, H);
            raw[1] = row_fetch<P, VEC>(b + at, H);
#pragma unroll
            for (int i = 0; i < CH; i++)
                y[i] = LOG ? exists ? x[1][i] : -INFINITY : exists ? exp2_fast(x[1][i]) : 0;
            __syncthreads();
            row_store<P, VEC>(ls + g * W, y, W);
            __syncthreads();
            for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
                float m = max[h], s = sum[h];
                if (saved.carry && pass == 1 && (causal || t0 == 0))
                    carry[(size_t)(t0 / HIGH) * H + h] = LOG ? m + __log2f(s) : s;
                column_sums<HIGH, W, LOG>(ls + h, &m, &s, add);
                max[h] = m;
                sum[h] = s;
            }
            __syncthreads();
            if (pass == 0)
                continue;
            row_load<P, VEC>(y, ls + g * W);
            const int n = causal ? t + t0 + g + 1 : T;
            const float top = row_sums<P, VEC, LOG>(x[0], y, n, H, mix.postnorm, red);
            if (mix.postnorm)
                rows_normalize<P, VEC, 1>((float(&)[1][CH])x[0], (float(&)[1])rstd[0], {top}, H,
                                          red);
            if (exists)
                row_store<P, VEC>(o + (row0 + t0 + g) * H, x[0], H);
        }
    }
    for (int h = threadIdx.x; h < H && saved.max; h += LINEAR_THREADS) {
        saved.max[blockIdx.x * H + h] = max[h];
        saved.sum[blockIdx.x * H + h] = sum[h];
    }
}

// row_ds: g = ds s from g = dout; the row's sums are x, the largest of them top. x is used up.
template <int P, int VEC>
static __device__ inline void row_ds(float (&g)[CH], float (&x)[1][CH], float top, int H,
                                     int postnorm, float *red)
{
    float s[CH], sums[2] = {0, 0}, rstd[1] = {1};
    memcpy(s, x[0], sizeof s);
    if (postnorm)
        rows_normalize<P, VEC, 1>(x, rstd, {top}, H, red);
#pragma unroll
    for (int i = 0; i < CH; i++) {
        sums[0] += g[i];
        sums[1] = fmaf(g[i], x[0][i], sums[1]);
    }
    row_reduce<P, 0>(sums, red);
    const float mean = postnorm ? sums[0] / (float)H : 0, dot = postnorm ? sums[1] / (float)H : 0;
#pragma unroll
    for (int i = 0; i < CH; i++)
        g[i] = rstd[0] * (g[i] - mean - x[0][i] * dot) * s[i];
}

// linear_backward_kernel: da, db (B,T,H), rows 2H apart, = from dout (B,T,H) and the forward's a,
// b, carry. Per channel, from the last position to the first, with l_t the log of the sum s_t:
//   LOG: R_t = ds_t s_t + exp(l_t - l_{t+1}) R_{t+1},  db_t = exp(b_t - l_t) R_t, 0 where b is -inf
//   else R_t = ds_t s_t / s_t + R_{t+1},  db_t = exp(b_t) R_t, where ds_t s_t includes exp(a_t)
// Without causal every position saw l_T; pass 0 sums R, the same for all, and pass 1 makes da, db.
// R_t 2^-l_t is a sum over the positions from t on, so parts are joined as the forward's. SUMS:
// only parts.max, sum = each part's own: -l (LOG, causal; else 0) and R of its first position. CUT:
// as in the forward.
template <int P, int VEC, int WIDTH, int CUT, int SUMS>
static __global__ void __launch_bounds__(LINEAR_THREADS, 3)
linear_backward_kernel(floatX *da, floatX *db, const floatX *dout, const float *carry, Parts parts,
                       const floatX *a, const floatX *b, int T, int size, Mix mix)
{
    enum { HIGH = LINEAR_THREADS / P, W = P * CH, LOG = !WIDTH };
    extern __shared__ float shared[];
    float *ls = shared, *gs = ls + HIGH * W, *R = gs + HIGH * W, *later = R + W, *red = later + W;
    const int g = threadIdx.x / P, approx = mix.prenorm == APPROX, H = WIDTH ? WIDTH : size;
    const int causal = WIDTH || mix.causal, tiles = (T + HIGH - 1) / HIGH;
    const int start = CUT ? blockIdx.x % parts.count * parts.span : 0;
    const int end = CUT ? min(start + parts.span, tiles) : tiles;
    const size_t sequence = CUT ? blockIdx.x / parts.count : blockIdx.x, row0 = sequence * T;
    carry += sequence * tiles * H;
    for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
        R[h] = CUT && !SUMS ? parts.before_sum[blockIdx.x * H + h] : 0;
        later[h] = CUT && !SUMS ? -parts.before_max[blockIdx.x * H + h] : INFINITY;
    }
    for (int pass = CUT ? !SUMS : causal; pass < 2 - SUMS; pass++)
        for (int k = end - 1; k >= start; k--) {
            const int t0 = k * HIGH, exists = t0 + g < T;
            const size_t row = row0 + min(t0 + g, T - 1), at = row * 2 * H;
            const Raw<VEC> raw[] = {row_fetch<P, VEC>(a + at, H), row_fetch<P, VEC>(b + at, H)};
            const Raw<VEC> raw_g = row_fetch<P, VEC>(dout + row * H, H);
            float x[2][CH], d[2][CH], l[CH], z[1][CH], rstd[2];
            rows_open<P, VEC, 2>(x, rstd, raw, H, approx, red);
#pragma unroll
            for (int i = 0; i < CH; i++)
                l[i] = LOG ? exists ? x[1][i] : -INFINITY : exists ? exp2_fast(x[1][i]) : 0;
            row_store<P, VEC>(ls + g * W, l, W);
            __syncthreads();
            for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
                float m = carry[(causal ? (size_t)k * H : 0) + h], s = LOG ? 1 : m;
                column_sums<HIGH, W, LOG>(ls + h, &m, &s, causal);
            }
            __syncthreads();
            row_load<P, VEC>(l, ls + g * W);
#pragma unroll
            for (int i = 0; i < CH; i++) {
                d[0][i] = exists ? (float)raw_g.v[i / VEC].v[i % VEC] : 0;
                z[0][i] = x[0][i];
            }
            const int n = causal ? t0 + g + 1 : T;
            const float top = row_sums<P, VEC, LOG>(z[0], l, n, H, mix.postnorm, red);
            row_ds<P, VEC>(d[0], z, top, H, mix.postnorm, red);
#pragma unroll
            for (int i = 0; i < CH; i++)
                z[0][i] = LOG ? d[0][i] : __fdividef(d[0][i], l[i]);
            row_store<P, VEC>(gs + g * W, z[0], W);
            __syncthreads();
            for (int h = threadIdx.x; h < H; h += LINEAR_THREADS) {
                float r = R[h], l1 = later[h];
#pragma unroll
                for (int i = HIGH - 1; i >= 0; i--) {
                    const float l = ls[i * W + h], next = l == l1 ? 1 : exp2_fast(l - l1);
                    r = (LOG && causal ? next : 1) * r + (causal || pass == 0 ? gs[i * W + h] : 0);
                    gs[i * W + h] = r;
                    l1 = l;
                }
                R[h] = r;
                later[h] = l1;
            }
            __syncthreads();
            if (pass == 0)
                continue;
            row_load<P, VEC>(d[1], gs + g * W);
#pragma unroll
            for (int i = 0; i < CH; i++) {
                const int real = row_channel<P, VEC>(i / VEC) < H && x[1][i] > -INFINITY;
                d[1][i] *= real ? exp2_fast(LOG ? x[1][i] - l[i] : x[1][i]) : 0;
            }
            if (approx)
                rows_normalize_backward<P>(d, x, rstd, H, red);
            if (exists) {
                row_store<P, VEC>(da + at, d[0], H);
                row_store<P, VEC>(db + at, d[1], H);
            }
        }
    for (int h = threadIdx.x; h < H && SUMS; h += LINEAR_THREADS) {
        parts.max[blockIdx.x * H + h] = LOG && causal ? -later[h] : 0;
        parts.sum[blockIdx.x * H + h] = R[h];
    }
}

// WITH_ROWS: the statement with P, VEC, WIDTH as constants, for H channels; WIDTH with approx and
// causal alone.
#define WITH_ROWS(H, mix, ...) \
    do { \
        const size_t p_ = linear_threads(H); \
        if (H == 192 && mix.prenorm == APPROX && mix.causal) \
            { enum { P = 16, VEC = 4, WIDTH = 192 }; __VA_ARGS__; } \
        else if (p_ == 16) { enum { P = 16, VEC = 4, WIDTH = 0 }; __VA_ARGS__; } \
        else if (p_ == 32) { enum { P = 32, VEC = 4, WIDTH = 0 }; __VA_ARGS__; } \
        else if (H % 4 == 0) { enum { P = LINEAR_THREADS, VEC = 4, WIDTH = 0 }; __VA_ARGS__; } \
        else { enum { P = LINEAR_THREADS, VEC = 1, WIDTH = 0 }; __VA_ARGS__; } \
    } while (0)

// linear_parts: how B sequences of T positions are cut; scratch: 4 LINEAR_PARTS H floats, whatever
// B and T are; T = 1 needs none.
static Parts linear_parts(float *scratch, size_t B, size_t T, size_t H)
{
    const size_t tiles = (T + linear_tile(H) - 1) / linear_tile(H), n = LINEAR_PARTS * H;
    assert(T < INT_MAX / 2);
    const size_t most = B < LINEAR_FULL && tiles >= LINEAR_LEAST ? LINEAR_PARTS / B : 1;
    const size_t span = (tiles + most - 1) / most, count = (tiles + span - 1) / span;
    if (count == 1)
        return {1, (int)span};
    return {(int)count, (int)span, scratch, scratch + n, scratch + 2 * n, scratch + 3 * n};
}

// linear_forward: out (B,T,H) = the layer's output for a, b (B,T,H), rows of these 2H apart;
// saved.carry =. Decoding: positions t .. t+T-1, T = 1, the sum before them in saved.max, sum; see
// the kernel. scratch: see linear_parts.  [eq. 5]
static void linear_forward(floatX *out, Saved saved, const floatX *a, const floatX *b,
                           float *scratch, size_t B, size_t T, size_t t, size_t H, Mix mix,
                           cudaStream_t stream)
{
    Parts parts = linear_parts(scratch, B, T, H);
    const size_t blocks = B * parts.count, smem = 4 * (2 * LINEAR_THREADS * CH + 32);
    if (parts.count > 1) {
        WITH_ROWS(H, mix, LAUNCH((linear_sums_kernel<P, VEC, WIDTH>), blocks, LINEAR_THREADS, smem,
                                 stream, parts, b, (int)T, (int)H, mix));
        LAUNCH(linear_join_kernel, (B * H + WARP - 1) / WARP, WARP, 0, stream, parts, B * H, (int)H,
               mix.causal, 0);
    }
    if (t > 0) {
        parts.before_max = saved.max;
        parts.before_sum = saved.sum;
    }
    WITH_FLAG(CUT, parts.count > 1, WITH_ROWS(H, mix,
              LAUNCH((linear_forward_kernel<P, VEC, WIDTH, CUT>), blocks, LINEAR_THREADS,
                     4 * (LINEAR_THREADS * CH + 2 * P * CH + 32), stream, out, saved, parts, a, b,
                     (int)T, (int)t, (int)H, mix)));
}

// linear_backward: da, db (B,T,H) = from dout (B,T,H), what the forward saved and its a, b; rows of
// da, db, a, b are 2H apart. scratch: see linear_parts.
static void linear_backward(floatX *da, floatX *db, const floatX *dout, Saved saved,
                            const floatX *a, const floatX *b, float *scratch, size_t B, size_t T,
                            size_t H, Mix mix, cudaStream_t stream)
{
    const Parts parts = linear_parts(scratch, B, T, H);
    const size_t blocks = B * parts.count;
    if (parts.count > 1) {
        WITH_ROWS(H, mix, LAUNCH((linear_backward_kernel<P, VEC, WIDTH, 1, 1>), blocks,
                                 LINEAR_THREADS, 4 * (2 * LINEAR_THREADS * CH + 2 * P * CH + 32),
                                 stream, da, db, dout, saved.carry, parts, a, b, (int)T, (int)H,
                                 mix));
        LAUNCH(linear_join_kernel, (B * H + WARP - 1) / WARP, WARP, 0, stream, parts, B * H, (int)H,
               mix.causal, 1);
    }
    WITH_FLAG(CUT, parts.count > 1, WITH_ROWS(H, mix,
              LAUNCH((linear_backward_kernel<P, VEC, WIDTH, CUT, 0>), blocks, LINEAR_THREADS,
                     4 * (2 * LINEAR_THREADS * CH + 2 * P * CH + 32), stream, da, db, dout,
                     saved.carry, parts, a, b, (int)T, (int)H, mix)));
}

// ---- both

// mix_check: die over an H that the kernels' registers or shared memory do not hold.
static void mix_check(size_t H, Mix mix)
{
    const size_t most = mix.model == LINEAR ? LINEAR_THREADS * CH : 16384;
    if (H > most)
        die(EXIT_USAGE, "--hidden %zu: expected at most %zu for --model %s on the GPU\n"
            "hint: train_causalrn takes any number", H, most,
            mix.model == LINEAR ? "linear" : "quadratic");
}

// mix_scratch: bytes of scratch that mix_forward and mix_backward need.
static size_t mix_scratch(size_t B, size_t T, size_t H, Mix mix)
{
    if (mix.model == LINEAR)
        return 4 * LINEAR_PARTS * H * sizeof(float);
    return pair_fast(H, mix) ? B * T * ((T + 31) / 32 * 32) * sizeof(floatX) : 0;
}

// mix_forward: out (B,T,H) = the layer's output for a, b (B,T,H), rows of these 2H apart; saved =
// what the backward needs; scratch of mix_scratch bytes.  [eq. 4-6]
static void mix_forward(floatX *out, Saved saved, const floatX *a, const floatX *b, void *scratch,
                        size_t B, size_t T, size_t H, Mix mix, cudaStream_t stream)
{
    if (mix.model == LINEAR) {
        linear_forward(out, saved, a, b, (float *)scratch, B, T, 0, H, mix, stream);
        return;
    }
    prepare(saved, a, b, B, T, 0, T, H, mix.prenorm, stream);
#ifdef PRECISION_BF16
    if (pair_fast(H, mix)) {
        pair_forward(out, saved, B, T, H, mix, stream);
        return;
    }
#endif
    pair_sum(out, saved, B, T, 0, T, H, mix, stream);
}

// mix_backward: da, db (B,T,H) = from dout (B,T,H), which is overwritten, the forward's out, what
// it saved and its a, b (B,T,H); rows of da, db, a, b are 2H apart; scratch of mix_scratch bytes.
static void mix_backward(floatX *da, floatX *db, floatX *dout, Saved saved, const floatX *out,
                         const floatX *a, const floatX *b, void *scratch, size_t B, size_t T,
                         size_t H, Mix mix, cudaStream_t stream)
{
    const size_t rows = B * T;
    if (mix.model == LINEAR) {
        linear_backward(da, db, dout, saved, a, b, (float *)scratch, B, T, H, mix, stream);
        return;
    }
    if (mix.postnorm)
        normalize_backward(dout, dout, H, out, saved.o_rstd, rows, H, 1, stream);
#ifdef PRECISION_BF16
    if (pair_fast(H, mix)) {
        pair_backward(da, db, dout, saved, (floatX *)scratch, B, T, H, stream);
        return;
    }
#endif
    (void)scratch;
    pair_grad(da, db, dout, saved, B, T, H, mix, stream);
    if (mix.prenorm != APPROX)
        return;
    normalize_backward(da, da, 2 * H, saved.ac, saved.va, rows, H, 1, stream);
    normalize_backward(db, db, 2 * H, saved.bc, saved.vb, rows, H, 1, stream);
}

// mix_decode: position t of D sequences: out (D,H) = the layer's output for a, b (D,H), rows of
// these 2H apart, given what it remembers of the positions before, to which it adds: O(H) for
// linear, O(t H) for quadratic.
static void mix_decode(floatX *out, Saved memory, const floatX *a, const floatX *b, size_t D,
                       size_t t, size_t T, size_t H, Mix mix, cudaStream_t stream)
{
    if (mix.model == LINEAR) {
        linear_forward(out, memory, a, b, NULL, D, 1, t, H, mix, stream);
        return;
    }
    prepare(memory, a, b, D, T, t, 1, H, mix.prenorm, stream);
    pair_sum(out, memory, D, T, t, 1, H, mix, stream);
}

// ------------------------------------------------------------------------------------------------
// [layers] What every architecture here is made of.  (shared)

// matmul_residual: out (N,OC) = add (N,OC) + inp (N,C) weight (OC,C)^T + bias (OC); add may be out;
// add and bias NULL for none. X: float or floatX.
template <typename X>
static void matmul_residual(X *out, const X *add, const floatX *inp, const floatX *weight,
                            const X *bias, size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = out, .add = add, .bias = bias, .x = inp, .y = weight,
                    .type = sizeof(X) == 4 ? CUDA_R_32F : FLOATX_TYPE, .in = FLOATX_TYPE, .y_t = 1,
                    .M = N, .N = OC, .K = C, .ld_out = OC, .ld_x = C, .ld_y = C};
    gemm(&g, stream);
}

// matmul_forward: out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), NULL for none.
static void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                           size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    matmul_residual<floatX>(out, NULL, inp, weight, bias, N, C, OC, stream);
}

// matmul_backward_input: dinp (N,C) = dout (N,OC) weight (OC,C).
static void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, size_t N,
                                  size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = dinp, .x = dout, .y = weight, .type = FLOATX_TYPE, .in = FLOATX_TYPE,
                    .M = N, .N = C, .K = OC, .ld_out = C, .ld_x = OC, .ld_y = C};
    gemm(&g, stream);
}

// weight_scratch: elements of scratch that matmul_backward_weight needs for n weights, OC biases.
static size_t weight_scratch(size_t N, size_t n, size_t OC)
{
    return slices_of(N, n) * n + COLUMN_SLICES * OC;
}

// matmul_backward_weight: dweight (OC,C) += dout (N,OC)^T inp (N,C), rows of dout `pitch` apart;
// this for `parts` of OC columns each of dout, their gradients `step` elements apart. parts 0: one,
// multiplied with the rest of its row, as tensor cores want, step 0. dbias (OC), NULL for none, +=
// the column sums of the first part. partial (weight_scratch): scratch.
static void matmul_backward_weight(float *dweight, size_t step, float *dbias, float *partial,
                                   const floatX *dout, const floatX *inp, size_t N, size_t C,
                                   size_t OC, size_t pitch, size_t parts, cudaStream_t stream)
{
    const size_t columns = parts ? parts * OC : pitch, n = columns * C, slices = slices_of(N, n);
    const Gemm g = {.out = partial, .x = dout, .y = inp, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                    .x_t = 1, .M = columns, .N = C, .K = N / slices, .ld_out = C,
                    .ld_x = pitch, .ld_y = C, .batch = slices, .out_step = n,
                    .x_step = N / slices * pitch, .y_step = N / slices * C};
    gemm(&g, stream);
    if (dbias)
        bias_slices(partial + slices * n, dout, N, OC, pitch, stream);
    slices_sum(dweight, dbias, partial, slices, n, COLUMN_SLICES, dbias ? OC : 0, OC * C, step,
               stream);
}

// normalize_forward_kernel: a warp a row.
template <int WIDTH>
static __global__ void normalize_forward_kernel(floatX *__restrict__ out, float *rstd,
                                                const floatR *__restrict__ x, size_t N, int C)
{
    enum { VEC = WIDTH ? 2 : 1 };
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    if (row >= N)
        return;
    const Moments m = row_moments<floatR, WIDTH, VEC>(x + row * n, n, EPS);
#pragma unroll
    for (int c = VEC * lane; c < n; c += VEC * WARP) {
        Pack<floatX, VEC> y;
        for (int k = 0; k < VEC; k++)
            y.v[k] = (floatX)(((float)x[row * n + c + k] - m.mean) * m.rstd);
        *(Pack<floatX, VEC> *)(out + row * n + c) = y;
    }
    if (lane == 0)
        rstd[row] = m.rstd;
}

// normalize_forward: out (N,C) = (x - mean) rstd for every row of x (N,C), rstd (N) = 1 / sqrt(var
// + 1e-8); biased variance, nothing learned. LAUNCH_ROWS' common C: rows start at even elements.
static void normalize_forward(floatX *out, float *rstd, const floatR *x, size_t N, size_t C,
                              cudaStream_t stream)
{
    LAUNCH_ROWS(normalize_forward_kernel, N, C, stream, out, rstd, x, N, (int)C);
}

// normalize_backward_kernel: a warp a row.
template <int WIDTH>
static __global__ void normalize_backward_kernel(floatX *dx, const floatX *dout, size_t pitch,
                                                 const floatX *__restrict__ out, const float *rstd,
                                                 size_t N, int C, int first)
{
    enum { VEC = WIDTH ? 2 : 1, STEP = VEC * WARP };
    typedef Pack<floatX, VEC> Each;
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float sum = 0, dot = 0;
    Each kept[WIDTH / STEP + 1], x = {}; // kept: of dout, where the loops unroll
    if (row >= N)
        return;
    dx += row * pitch;
    dout += row * pitch;
    out += row * n;
#pragma unroll
    for (int c = VEC * lane; c < n; c += STEP) {
        const Each g = kept[WIDTH ? c / STEP : 0] = *(const Each *)(dout + c);
        for (int k = 0; k < VEC; k++) {
            sum += (float)g.v[k];
            dot += (float)g.v[k] * (float)out[c + k];
        }
    }
    sum = warp_sum(sum) / (float)n;
    dot = warp_sum(dot) / (float)n;
    const float factor = rstd[row];
#pragma unroll
    for (int c = VEC * lane; c < n; c += STEP) {
        const Each g = WIDTH ? kept[c / STEP] : *(const Each *)(dout + c);
        if (!first)
            x = *(const Each *)(dx + c);
        for (int k = 0; k < VEC; k++)
            x.v[k] = (floatX)((first ? 0 : (float)x.v[k]) +
                              factor * ((float)g.v[k] - sum - (float)out[c + k] * dot));
        *(Each *)(dx + c) = x;
    }
}

// normalize_backward: dx (N,C) += (first: =) the gradient of x from dout (N,C) and what the forward
// wrote; rows of dx and dout are `pitch` apart, of LAUNCH_ROWS' common C an even number; with
// `first` dx may be dout.
static void normalize_backward(floatX *dx, const floatX *dout, size_t pitch, const floatX *out,
                               const float *rstd, size_t N, size_t C, int first,
                               cudaStream_t stream)
{
    LAUNCH_ROWS(normalize_backward_kernel, N, C, stream, dx, dout, pitch, out, rstd, N, (int)C,
                first);
}

// embed_forward_kernel: a warp a token.
template <int WIDTH>
static __global__ void embed_forward_kernel(floatR *out, const int *tokens, const float *wte,
                                            const float *wpe, size_t N, size_t T, int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C;
    if (row >= N)
        return;
    wte += (size_t)tokens[row] * n;
    wpe = wpe ? wpe + row % T * n : NULL;
#pragma unroll
    for (int c = threadIdx.x % WARP; c < n; c += WARP)
        out[row * n + c] = (floatR)(wte[c] + (wpe ? wpe[c] : 0));
}

// embed_forward: out (B,T,C) = wte[token] + wpe[t]; tokens (B,T), wte (V,C), wpe (T,C), NULL for
// none.
static void embed_forward(floatR *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C, cudaStream_t stream)
{
    LAUNCH_ROWS(embed_forward_kernel, B * T, C, stream, out, tokens, wte, wpe, B * T, T, (int)C);
}

// embed_backward: dwte (V,C) +=, dwpe (T,C), NULL for none, += from dout (B,T,C). partial
// (token_scratch): scratch.
static void embed_backward(float *dwte, float *dwpe, float *partial, const floatX *dout,
                           const int *tokens, size_t B, size_t T, size_t V, size_t C,
                           cudaStream_t stream)
{
    token_sums(dwte, partial, dout, tokens, B * T, V, C, stream);
    if (dwpe)
        batch_sums(dwpe, dout, B, T * C, stream);
}

// crossentropy_kernel: WARPS warps a row of logits (R,V), rows pitch apart. With 32 of them a row
// has a block, and is still in the caches when it is read again, from the end.
template <int WARPS>
static __global__ void __launch_bounds__(WARPS > 1 ? WARPS * WARP : ROW_WARPS * WARP)
    crossentropy_kernel(float *losses, int *predictions, floatX *dlogits,
                        const float *__restrict__ logits, const int *targets, const int *where,
                        const StepInput *step, size_t R, int V, int pitch)
{
    enum { STRIDE = 4 * WARPS * WARP };
    __shared__ Peak peaks[WARP];
    const size_t row = WARPS > 1 ? blockIdx.x : row_of_warp();
    const int i = threadIdx.x % (WARPS * WARP), lane = threadIdx.x % WARP;
    if (row >= R)
        return;
    const float *x = logits + row * pitch;
    Peak peak = {-INFINITY, 0, min(4 * i, V)};
#pragma unroll 4
    for (int v = 4 * i; v < V; v += STRIDE) {
        Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        const float before = peak.top;
        for (int k = 0; k < 4; k++) {
            y.v[k] = v + k < V ? y.v[k] : -INFINITY;
            peak.best = y.v[k] > peak.top ? v + k : peak.best;
            peak.top = y.v[k] > peak.top ? y.v[k] : peak.top;
        }
        peak.sum *= exp2_fast(LOG2E * (before - peak.top)); // at first 0 times 0
        for (int k = 0; k < 4; k++)
            peak.sum += exp2_fast(LOG2E * (y.v[k] - peak.top));
    }
    peak = peak_of_warp(peak);
    if (WARPS > 1) {
        if (lane == 0)
            peaks[threadIdx.x / WARP] = peak;
        __syncthreads();
        peak = peak_of_warp(peaks[lane]);
    }
    const int64_t at = where ? where[row] : (int64_t)row;
    const int target = at < 0 ? IGNORE : targets[at];
    if (i == 0 && at >= 0) {
        losses[at] = target == IGNORE ? 0 : logf(peak.sum) + peak.top - x[target];
        predictions[at] = peak.best;
    }
    const float unit = target == IGNORE ? 0 : (float)step->unit, factor = unit / peak.sum;
#pragma unroll 4
    for (int v = (pitch - 4) / STRIDE * STRIDE + 4 * i; v >= 0; v -= STRIDE) {
        if (v >= pitch)
            continue;
        const Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        Pack<floatX, 4> d;
        for (int k = 0; k < 4; k++) {
            const float p = v + k < V ? factor * exp2_fast(LOG2E * (y.v[k] - peak.top)) : 0;
            d.v[k] = (floatX)(p - (v + k == target ? unit : 0));
        }
        *(Pack<floatX, 4> *)(dlogits + row * pitch + v) = d;
    }
}

// crossentropy: losses (N) = -log softmax(logits)[target] in nats, 0 where the target is IGNORE;
// predictions (N) = argmax; dlogits (R,V) = the gradient (softmax - onehot) step->unit of the loss;
// result->loss: see loss_kernel; unit = 1 / targets that count makes it their mean. logits (R,V)
// and dlogits: rows `pitch` apart, a multiple of 4, dlogits 0 between them. targets (N). where (R):
// see Asked; positions without a row have loss and prediction 0; NULL: R = N, each has one.
static void crossentropy(float *losses, int *predictions, floatX *dlogits, StepResult *result,
                         const float *logits, const int *targets, const int *where,
                         const StepInput *step, size_t N, size_t R, size_t V, size_t pitch,
                         cudaStream_t stream)
{
    if (where) {
        CUDA_CHECK(cudaMemsetAsync(losses, 0, N * sizeof *losses, stream));
        CUDA_CHECK(cudaMemsetAsync(predictions, 0, N * sizeof *predictions, stream));
    }
    if (V >= 4096)
        LAUNCH(crossentropy_kernel<WARP>, R, WARP * WARP, 0, stream, losses, predictions, dlogits,
               logits, targets, where, step, R, (int)V, (int)pitch);
    else
        LAUNCH(crossentropy_kernel<1>, (R + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0, stream,
               losses, predictions, dlogits, logits, targets, where, step, R, (int)V, (int)pitch);
    LAUNCH(loss_kernel, 1, 1024, 0, stream, result, losses, step, N);
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding.  (ports train_causalrn.c[model])

typedef struct {
    Mix mix;
    int layers, channels, hidden, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *patch_w, *cls, *wpe, *right_w, *right_b, *left_w, *out_w, *out_b, *head_w;
} Params;

// The weights that matrix products read, in floatX: those of both sides in one matrix ab_w (L,2H,C)
// with biases ab_b (L,2H), the left ones 0; out_w (L,C,H), head_w (Vp,C), rows from V on 0.
typedef struct {
    floatX *ab_w, *ab_b, *out_w, *head_w, *patch_w;
} Copies;

typedef struct {
    float *x, *r_rstd, *y_rstd, *logits, *losses, *patches;
    floatX *r, *a, *b, *o, *y, *rounded;
    Saved saved;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *partial;
    floatX *dx, *dr, *da, *db, *d_o, *dlogits;
    Asked asked;
    char *work;
} Dacts;

// Decoding: what the layers remember, tokens read, residual stream, logits.
typedef struct {
    Saved memory;
    int *tokens;
    float *x, *logits;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, H, L, decode_B, positions; // positions: that are learned
    size_t asked, rows; // that the head reads, of a sequence and of the batch: asked.cuh
    Weights weights;      // the host's, for files
    Params params, grads; // on the device, as all below
    Device device;
    Copies copies;
    Acts acts;
    Dacts dacts;
    Decoder decoder;
    DeviceArena copies_arena, acts_arena, dacts_arena, decoder_arena;
    Batch batch;    // the one that model_forward sees next, or has seen
    double loss;    // nats, mean over the supervised positions of the batch
    double targets; // of the update's batches so far
} Model;

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    return c->mix.model == LINEAR ? "linear" : "quadratic";
}

// model_plan: sizes and tensor tables for a configuration; nothing is allocated. The task decides T
// and V. A tensor whose first dimension is 0 does not exist.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config, m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t H = m->H = (size_t)config->hidden, Vp = m->Vp = (V + 31) / 32 * 32;
    const size_t positions = m->positions = task_longest(shape);
    const size_t D = m->decode_B = !config->mix.causal ? 0 : B < 32 ? B : 32;
    const size_t quadratic = config->mix.model == QUADRATIC ? L : 0, linear = L - quadratic;
    const size_t dump = config->training.dump != NULL, tile = linear_tile(H);
    // In place unless a dump is to show them: the residual stream; a and b of the quadratic model
    const size_t xs = dump ? L + 1 : 1, abs = dump || linear ? L : 1;
    const size_t work = mix_scratch(B, T, H, config->mix), carry = B * ((T + tile - 1) / tile);
    const size_t eval_carry = B * T / shape.eval_T * ((shape.eval_T + tile - 1) / tile);
    const size_t patch = m->device.D = task_patch(m->task, &config->task_options);
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    const size_t partial = std::max( // of the embedding, head_w, out_w, both sides
        {input_scratch(B * T, V, C, patch), weight_scratch(rows, Vp * C, 0),
         weight_scratch(B * T, H * C, C), weight_scratch(B * T, 2 * H * C, H)});
    const double std = 0.02, out_std = 0.02 / sqrt((double)L);
    const Tensor params[] = {
        {"wte", {patch ? 0 : V, C}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, wte)},
        {"wpe", {positions, C}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, wpe)},
        {"right_w", {L, H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, right_w)},
        {"right_b", {L, H}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, right_b)},
        {"left_w", {L, H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, left_w)},
        {"out_w", {L, C, H}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, out_w)},
        {"out_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, out_b)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
        {"patch_w", {patch ? C : 0, patch}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, patch_w)},
        {"cls", {patch ? C : 0}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, cls)},
    };
    const DeviceTensor copies[] = {
        DEVICE("ab_w", floatX, Copies, ab_w, L, 2 * H, C),
        DEVICE("ab_b", floatX, Copies, ab_b, L, 2 * H),
        DEVICE("out_w", floatX, Copies, out_w, L, C, H),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
        DEVICE("patch_w", floatX, Copies, patch_w, patch ? C : 0, patch),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", float, Acts, x, xs, B, T, C), DEVICE("r", floatX, Acts, r, L, B, T, C),
        DEVICE("r_rstd", float, Acts, r_rstd, L, B, T),
        SPACED("a", floatX, 2 * H, 0, Acts, a, abs, B, T, H),
        SPACED("b", floatX, 2 * H, H, Acts, b, abs, B, T, H),
        DEVICE("o", floatX, Acts, o, L, B, T, H),
        DEVICE("pair_a", floatX, Acts, saved.ac, quadratic, B, T, H),
        DEVICE("pair_b", floatX, Acts, saved.bc, quadratic, B, T, H),
        DEVICE("pair_p", floatX, Acts, saved.p, pair_fast(H, config->mix) ? L : 0, B, T, H),
        DEVICE("var_a", float, Acts, saved.va, quadratic, B, T),
        DEVICE("var_b", float, Acts, saved.vb, quadratic, B, T),
        DEVICE("pair_scale", float, Acts, saved.scale, quadratic, B, T),
        DEVICE("o_rstd", float, Acts, saved.o_rstd, quadratic, B, T),
        DEVICE("carry", float, Acts, saved.carry, linear, std::max(carry, eval_carry), H),
        DEVICE("y", floatX, Acts, y, B, T, C), DEVICE("y_rstd", float, Acts, y_rstd, B, T),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
        DEVICE("patches", float, Acts, patches, patch ? B : 0, T, patch),
        DEVICE("rounded_patches", floatX, Acts, rounded, patch ? B : 0, T, patch),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("do", floatX, Dacts, d_o, B, T, H),
        SPACED("da", floatX, 2 * H, 0, Dacts, da, B, T, H),
        SPACED("db", floatX, 2 * H, H, Dacts, db, B, T, H),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("partial", float, Dacts, partial, partial), DEVICE("work", char, Dacts, work, work),
    };
    const DeviceTensor decoder[] = {
        DEVICE("max", float, Decoder, memory.max, D ? linear : 0, D, H),
        DEVICE("sum", float, Decoder, memory.sum, D ? linear : 0, D, H),
        DEVICE("a", floatX, Decoder, memory.ac, D ? quadratic : 0, D, positions, H),
        DEVICE("b", floatX, Decoder, memory.bc, D ? quadratic : 0, D, positions, H),
        DEVICE("var_a", float, Decoder, memory.va, D ? quadratic : 0, D, positions),
        DEVICE("var_b", float, Decoder, memory.vb, D ? quadratic : 0, D, positions),
        DEVICE("scale", float, Decoder, memory.scale, D ? quadratic : 0, D),
        DEVICE("o_rstd", float, Decoder, memory.o_rstd, D ? quadratic : 0, D),
        DEVICE("tokens", int, Decoder, tokens, D), DEVICE("x", float, Decoder, x, D, C),
        DEVICE("logits", float, Decoder, logits, D, Vp),
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
    device_plan(&m->copies_arena, "weights in " PRECISION_NAME, ROWS(copies));
    device_plan(&m->acts_arena, "activations", ROWS(acts));
    device_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    device_plan(&m->decoder_arena, "decoding state", ROWS(decoder));
}

// model_copies: which parameters have copies in floatX, and where; and where patches go.
static void model_copies(Model *m)
{
    const size_t L = m->L, C = m->C, H = m->H;
    const WeightCopy copies[] = {{m->params.right_w, m->copies.ab_w, H * C, 2 * H * C},
                                 {m->params.left_w, m->copies.ab_w + H * C, H * C, 2 * H * C},
                                 {m->params.right_b, m->copies.ab_b, H, 2 * H},
                                 {m->params.out_w, m->copies.out_w, L * C * H, 0},
                                 {m->params.head_w, m->copies.head_w, m->V * C, 0},
                                 {m->params.patch_w, m->copies.patch_w, m->device.D * C, 0}};
    device_pieces(&m->device, ROWS(copies));
    device_patches(&m->device, m->acts.patches);
}

// model_flops: floating-point operations of one training step, exponentials included: 6 per weight
// and token; per channel and pair 17, and 8 in the products for exact; or 40 per channel and token.
static double model_flops(const Model *m)
{
    const Mix mix = m->config.mix;
    double pairs = mix.causal ? ((double)m->T + 1) / 2 : (double)m->T;
    double layer = mix.model == LINEAR ? 40 : (mix.prenorm == EXACT ? 25 : 17) * pairs;
    double weights = (double)(m->L * 3 * m->C * m->H + m->V * m->C * m->rows / (m->B * m->T));
    return (double)m->config.training.accumulate * (double)(m->B * m->T) *
           (6 * weights + (double)(m->L * m->H) * layer);
}

// saved_at: of L layers' saved tensors those of layer l; N positions, H channels, carry of `tiles`
// tiles, D sequences decoded.
static Saved saved_at(Saved s, size_t l, size_t N, size_t H, size_t tiles, size_t D)
{
    if (s.ac)
        return {s.ac + l * N * H, s.bc + l * N * H, s.p ? s.p + l * N * H : NULL, s.va + l * N,
                s.vb + l * N, s.scale + l * (D ? D : N), s.o_rstd + l * (D ? D : N)};
    return {.carry = s.carry ? s.carry + l * tiles * H : NULL,
            .max = s.max ? s.max + l * D * H : NULL, .sum = s.sum ? s.sum + l * D * H : NULL};
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t N = m->B * m->T, C = l * N * m->C, H = l * N * m->H, tile = linear_tile(m->H);
    const size_t dump = m->config.training.dump != NULL;
    const size_t x = dump ? C : 0, ab = dump || m->config.mix.model == LINEAR ? 2 * H : 0;
    const Acts a = m->acts;
    return {.x = a.x + x, .r_rstd = a.r_rstd + l * N, .r = a.r + C, .a = a.a + ab, .b = a.b + ab,
            .o = a.o + H,
            .saved = saved_at(a.saved, l, N, m->H, m->B * ((m->T + tile - 1) / tile), 0)};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, H = m->H, L = m->L, N = B * T;
    const Params p = m->params;
    const Copies w = m->copies;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    cudaStream_t stream = device->stream;
    input_forward(acts.x, acts.rounded, device, p.wte, w.patch_w, p.cls, p.wpe, B, T, C, stream);
    for (size_t l = 0; l < L; l++) {
        const Acts k = layer_acts(m, l), next = layer_acts(m, l + 1); // of L: x alone
        normalize_forward(k.r, k.r_rstd, k.x, N, C, stream);
        matmul_forward(k.a, k.r, w.ab_w + l * 2 * H * C, w.ab_b + l * 2 * H, N, C, 2 * H, stream);
        mix_forward(k.o, k.saved, k.a, k.b, m->dacts.work, B, T, H, m->config.mix, stream);
        matmul_residual(next.x, k.x, k.o, w.out_w + l * C * H, p.out_b + l * C, N, H, C, stream);
    }
    normalize_forward(acts.y, acts.y_rstd, layer_acts(m, L).x, N, C, stream);
    const Asked asked = m->dacts.asked;
    const floatX *y = asked_gather(asked, acts.y, device->targets, N, m->rows, C, stream);
    matmul_residual<float>(acts.logits, NULL, y, w.head_w, NULL, m->rows, C, m->Vp, stream);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, asked.where, device->input, N, m->rows, m->V, m->Vp, stream);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, H = m->H, L = m->L, N = B * T;
    const Params g = m->grads;
    const Copies w = m->copies;
    const Acts acts = m->acts;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(g.head_w, 0, NULL, d.partial, d.dlogits, asked_or(d.asked, acts.y),
                           m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, d.dr), d.dlogits, w.head_w, m->rows, C, m->Vp, stream);
    asked_scatter(d.dr, d.asked, N, C, stream);
    normalize_backward(d.dx, d.dr, C, acts.y, acts.y_rstd, N, C, 1, stream);
    for (size_t l = L; l-- > 0;) {
        const Acts k = layer_acts(m, l);
        const size_t i = l * H * C;
        matmul_backward_weight(g.out_w + i, 0, g.out_b + l * C, d.partial, d.dx, k.o, N, H, C, C, 1,
                               stream);
        matmul_backward_input(d.d_o, d.dx, w.out_w + i, N, H, C, stream);
        mix_backward(d.da, d.db, d.d_o, k.saved, k.o, k.a, k.b, d.work, B, T, H, m->config.mix,
                     stream);
        matmul_backward_weight(g.right_w + i, (size_t)(g.left_w - g.right_w), g.right_b + l * H,
                               d.partial, d.da, k.r, N, C, H, 2 * H, 2, stream);
        matmul_backward_input(d.dr, d.da, w.ab_w + 2 * i, N, C, 2 * H, stream);
        normalize_backward(d.dx, d.dr, C, k.r, k.r_rstd, N, C, 0, stream);
    }
    input_backward(g.wte, g.patch_w, g.cls, g.wpe, d.partial, d.dx, acts.rounded, &m->device, B, T,
                   m->V, C, stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. Dies when t is past the T learned positions.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, H = m->H, T = m->positions, V = m->V, Vp = m->Vp;
    const Params p = m->params;
    const Copies w = m->copies;
    const Dacts d = m->dacts;
    const Decoder *decoder = &m->decoder;
    cudaStream_t stream = m->device.stream;
    decode_check(t, T);
    CUDA_CHECK(cudaMemcpyAsync(decoder->tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(decoder->x, decoder->tokens, p.wte, p.wpe + t * C, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        const Saved s = saved_at(decoder->memory, l, m->decode_B * T, H, 0, m->decode_B);
        normalize_forward(d.dr, d.partial, decoder->x, D, C, stream);
        matmul_forward(d.da, d.dr, w.ab_w + l * 2 * H * C, w.ab_b + l * 2 * H, D, C, 2 * H, stream);
        mix_decode(d.d_o, s, d.da, d.db, D, t, T, H, m->config.mix, stream);
        matmul_residual(decoder->x, decoder->x, d.d_o, w.out_w + l * C * H, p.out_b + l * C, D, H,
                        C, stream);
    }
    normalize_forward(d.dr, d.partial, decoder->x, D, C, stream);
    matmul_residual<float>(decoder->logits, NULL, d.dr, w.head_w, NULL, D, C, Vp, stream);
    return device_logits(&m->device, decoder->logits, D, V, Vp, m->decode_B);
}

// ------------------------------------------------------------------------------------------------
// [train] The loop: memory, batches, updates, evaluation, checkpoints.  (shared)

// model_bytes: what model_alloc will allocate, but for the batch's tokens.
static size_t model_bytes(const Model *m)
{
    return device_bytes(&m->weights, m->B, m->T) + m->copies_arena.bytes + m->acts_arena.bytes +
           m->dacts_arena.bytes + m->decoder_arena.bytes;
}

// model_alloc: allocate a planned model and draw its initial weights from the seed.
static void model_alloc(Model *m)
{
    weights_alloc(&m->weights, NULL, NULL, m->config.training.seed);
    device_start(&m->device, &m->weights, &m->params, &m->grads, m->B, m->T);
    device_alloc(&m->copies_arena, &m->copies);
    CUDA_CHECK(cudaMemset(m->copies_arena.base, 0, m->copies_arena.bytes)); // what stays 0
    device_alloc(&m->acts_arena, &m->acts);
    device_alloc(&m->dacts_arena, &m->dacts);
    device_alloc(&m->decoder_arena, &m->decoder);
    model_copies(m);
    m->batch = m->device.slots[0].batch;
}

// model_free: give everything back.
static void model_free(Model *m)
{
    weights_free(&m->weights);
    CUBLAS_CHECK(cublasLtDestroy(gemm_handle));
    CUDA_CHECK(cudaDeviceReset()); // with all that is on it
}

// model_upload: the device's weights and moments = the host's.
static void model_upload(Model *m)
{
    device_weights_up(&m->device, &m->weights);
    pieces_copy(&m->device);
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
}

// model_zero_grad: clear the gradients of the parameters.
static void model_zero_grad(Model *m)
{
    pieces_zero(&m->device);
}

// load_batch: the slot's inputs, targets = batch `number` of STREAM_TRAIN or STREAM_EVAL, of its
// own B and T. And what the device is told: of training, the update it belongs to, in which batches
// count by their targets; until the last of them is known a target counts 1 / (B T).
static void load_batch(Model *m, Slot *slot, uint64_t stream, long number)
{
    const Config *c = &m->config;
    const Training *t = &c->training;
    const int n = stream == STREAM_TRAIN ? t->accumulate : 1, part = (int)(number % n);
    task_batch(m->task, &c->task_options, t->seed, stream, number, &slot->batch);
    batch_check(&slot->batch, m->V);
    m->B = slot->batch.B, m->T = slot->batch.T, m->rows = asked_rows(m->asked, m->B, m->T);
    const double step = (double)(number / n), N = (double)(m->B * m->T);
    const double count = batch_targets(&slot->batch);
    m->targets = part ? m->targets + count : count;
    slot->lr = learning_rate(t, number / n);
    *slot->input = {slot->lr, 1 / (1 - pow(t->beta1, step + 1)), 1 / (1 - pow(t->beta2, step + 1)),
                    n > 1 ? 1 / N : count > 0 ? 1 / count : 0,
                    n == 1 ? 1 : m->targets > 0 ? N / m->targets : 0, part == 0};
    m->batch = slot->batch;
}

// run_batch: forward and, if asked, backward of one batch, now; the device has nothing else to do.
static void run_batch(Model *m, uint64_t stream, long number, int backward)
{
    Slot *slot = &m->device.slots[0];
    load_batch(m, slot, stream, number);
    slot_up(slot, &m->device);
    model_zero_grad(m);
    model_forward(m);
    if (backward)
        model_backward(m);
    slot_down(slot, &m->device);
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
    m->loss = slot->result->loss;
}

// stop_if_bad: die at step `step` over a loss or gradient norm that is not finite, of the `n`
// batches from `number` on. The device has changed no weight since, so they are run again, to name
// the first value that is not.
static void stop_if_bad(Model *m, const char *what, double value, long step, uint64_t stream,
                        long number, int n)
{
    Arena acts;
    if (is_finite_bits(value))
        return;
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
    for (int i = 0; i < n; i++) {
        run_batch(m, stream, number + i, stream == STREAM_TRAIN);
        if (!is_finite_bits(m->loss))
            break;
    }
    device_weights_down(&m->weights, &m->device);
    device_copy_out(&acts, &m->acts_arena);
    training_stop_if_bad(what, value, step, &m->weights, &acts);
}

// update_kernels: the update that gradients so far give; they are cleared for the next.
static void update_kernels(Model *m)
{
    const Training *t = &m->config.training;
    Device *d = &m->device;
    gradient_norm(d->result, &d->weights.grads, &d->pieces, d->input, t->grad_clip, d->stream);
    adamw(&d->weights, t, &d->pieces, d->input, d->result, d->stream);
    model_zero_grad(m);
}

// train_graphs: what the device does in a step, as graphs. Its kernels have been loaded by a run of
// the same batch. One batch and the update are one graph, several two.
static void train_graphs(Model *m, long step)
{
    Device *d = &m->device;
    const int n = m->config.training.accumulate;
    run_batch(m, STREAM_TRAIN, step * n, 1);
    model_zero_grad(m);
    graph_begin(d->stream);
    model_forward(m);
    model_backward(m);
    if (n == 1)
        update_kernels(m);
    d->graph = graph_end(d->stream);
    if (n == 1)
        return;
    graph_begin(d->stream);
    update_kernels(m);
    d->update = graph_end(d->stream);
}

// train_step: give the device training step `step`: its batches, the update, results back. Nothing
// waits for it here but, with --accumulate, each of its batches for the one before.
static void train_step(Model *m, long step)
{
    Device *d = &m->device;
    Slot *slot = &d->slots[step % SLOTS];
    const int n = m->config.training.accumulate;
    if (!d->graph && !TIMING_ON)
        train_graphs(m, step);
    if (d->started == d->ended)
        d->ended_at = seconds_now();
    slot->acc = 0;
    for (int i = 0; i < n; i++) {
        if (i) {
            slot_down(slot, d);
            CUDA_CHECK(cudaStreamSynchronize(d->stream));
            slot->acc += task_score(m->task, &slot->batch, slot->batch.B);
        }
        load_batch(m, slot, STREAM_TRAIN, step * n + i);
        slot_up(slot, d);
        if (TIMING_ON) {
            model_forward(m);
            model_backward(m);
        } else
            CUDA_CHECK(cudaGraphLaunch(d->graph, d->stream));
    }
    if (TIMING_ON)
        update_kernels(m);
    else if (n > 1)
        CUDA_CHECK(cudaGraphLaunch(d->update, d->stream));
    slot_down(slot, d);
    CUDA_CHECK(cudaEventRecord(slot->done, d->stream));
    d->started = step + 1;
}

// train_step_end: wait for the oldest step that the device was given; row = what is logged. Loss
// and accuracy are before the update.
static void train_step_end(Model *m, LogRow *row)
{
    Device *d = &m->device;
    const long step = d->ended;
    const int n = m->config.training.accumulate;
    const Slot *slot = &d->slots[step % SLOTS];
    CUDA_CHECK(cudaEventSynchronize(slot->done));
    const double now = seconds_now(), seconds = now - d->ended_at;
    const StepResult r = *slot->result;
    d->ended = step + 1;
    d->ended_at = now;
    stop_if_bad(m, "loss", r.loss, step, STREAM_TRAIN, step * n, n);
    stop_if_bad(m, "gradient norm", r.norm, step, STREAM_TRAIN, step * n, n);
    const size_t B = slot->batch.B, T = slot->batch.T;
    const double acc = (slot->acc + task_score(m->task, &slot->batch, B)) / n;
    *row = log_train_row(step, r.loss, acc, slot->lr, r.norm, seconds, (size_t)n * B * T);
}

// evaluate: loss and accuracy on sequences never trained on, each prediction given the true past.
static LogRow evaluate(Model *m, long step)
{
    Evaluation sum = {};
    const TaskOptions *options = &m->config.task_options;
    for (long i = 0; i < task_eval_batches(m->task, options, m->batch.rows); i++) {
        run_batch(m, STREAM_EVAL, i, 0);
        stop_if_bad(m, "loss on fresh sequences", m->loss, step, STREAM_EVAL, i, 1);
        evaluation_add(&sum, m->task, options, &m->batch, m->loss);
    }
    return evaluation_row(&sum, step);
}

// decode: said (D,n) = the token chosen at each position when the model reads the first `given`
// tokens of inputs (D,n) and then what it said. Returns n, or how far it came when interrupted.
static size_t decode(Model *m, int *said, const int *inputs, size_t given, size_t n, size_t D,
                     Sampler sampler)
{
    int *tokens = (int *)alloc_zero(D, sizeof(int), "tokens");
    size_t t = 0;
    for (; t < n && !*training_interrupted(); t++) {
        for (size_t i = 0; i < D; i++)
            tokens[i] = t < given ? inputs[i * n + t] : said[i * n + t - 1];
        const float *logits = model_decode(m, tokens, t, D), *x = logits;
        for (size_t i = 0; i < D; i++, x += m->V)
            said[i * n + t] = sampler_choose(&sampler, x, sizeof(float), m->V, i, t);
    }
    free(tokens);
    return t;
}

// greedy: accuracy on decode_B sequences when the model reads what it said; -1 if interrupted.
static double greedy(Model *m)
{
    size_t prompt = m->task->shape(&m->config.task_options).prompt;
    decode(m, m->batch.predictions, m->batch.inputs, prompt, m->T, m->decode_B, {});
    return *training_interrupted() ? -1 : task_score(m->task, &m->batch, m->decode_B);
}

// dump: write training batch 0 with its activations and gradients to the file of --dump.
static void dump(Model *m, const Options *options)
{
    Arena acts;
    run_batch(m, STREAM_TRAIN, 0, 1);
    stop_if_bad(m, "loss", m->loss, 0, STREAM_TRAIN, 0, 1);
    device_weights_down(&m->weights, &m->device);
    device_copy_out(&acts, &m->acts_arena);
    dump_write(m->config.training.dump, m->batch.inputs, m->batch.targets, m->B, m->T, m->loss,
               &m->weights, &acts, options, ARCHITECTURE);
    arena_free(&acts);
}

enum { MFU_STEPS = 50 }; // runs of fewer print no MFU

// train: take an allocated model through its configuration until the steps are done, --stop-at is
// reached or Ctrl-C is pressed; evaluate, save and print RESULT. The device is given a step before
// the one before it is done; it is waited for where its result decides what comes next.
static void train(Model *m, const Options *options)
{
    const Training *t = &m->config.training;
    const char *task = m->task->name, *model = model_name(&m->config);
    Log log;
    LogRow row = {}, val = {};
    char checkpoint[LOG_PATH];
    training_load(t, &m->weights, options, ARCHITECTURE);
    model_upload(m);
    if (t->dump) {
        dump(m, options);
        if (t->steps == 0)
            return;
    }
    long step = training_start(&log, checkpoint, t, &m->weights, options, ARCHITECTURE, task,
                               model, m->device.name);
    m->device.started = m->device.ended = step;
    model_upload(m);
    model_zero_grad(m);
    for (;; step++) {
        const int eval = t->eval_every && step && step % t->eval_every == 0;
        const int save = t->save_every && step % t->save_every == 0;
        int last = training_over(t, &log, step);
        const long wait = last || eval || save || t->stop_at > 0 ? step : step - SLOTS + 1;
        while (m->device.ended < wait) {
            train_step_end(m, &row);
            log_step(&log, &row, t->steps, (row.step + 1) % t->print_every == 0);
        }
        last = last || (t->stop_at > 0 && training_over(t, &log, step));
        if (last || eval) {
            val = evaluate(m, step);
            log_eval(&log, &val);
        }
        if (log.csv && (last || (log.steps && save))) {
            device_weights_down(&m->weights, &m->device);
            checkpoint_save(checkpoint, &m->weights, options, ARCHITECTURE, step);
        }
        if (last)
            break;
        timing_clear(m->device.stream);
        train_step(m, step);
        if (log.steps == 4)
            timing_report("a step");
    }
    const TaskOptions *o = &m->config.task_options;
    TaskShape shape = m->task->shape(o);
    double acc = m->decode_B && shape.prompt < m->T ? greedy(m) : -1;
    if (acc >= 0)
        task_show(m->task, o, m->batch.inputs, m->batch.predictions);
    if (o->sample && !*training_interrupted())
        task_show_sample(m->task, o, decode(m, o->said, o->read, o->prompt_n, o->read_n, 1,
                                            task_sampler(o, t->seed)));
    if (log.steps >= MFU_STEPS)
        gemm_print_mfu(model_flops(m), log_ms_per_step(&log), FLOATX_TYPE, m->device.stream);
    training_result(&log, task, model, shape.size_name, shape.size, &val, acc,
                    log_ms_per_step(&log));
    log_close(&log);
}

// ------------------------------------------------------------------------------------------------
// [main] Options, presets, start.  (ports train_causalrn.c[main])

#define BATCH_320 "--batch-size 320 --schedule constant "
#define PAPER BATCH_320 "--layers 12 --channels 192 --hidden 192 --lr 5e-4 --steps 2000"
static const Preset PRESETS[] = {
    {"main", "--string-size 32 --channels 96 --hidden 96 --lr 1e-3 --schedule constant --steps 600",
     "`make run`: 32 letters on two cores"},
    {"copy-s16", PAPER " --string-size 16", "the paper's model, Fig. 4"},
    {"copy-s32", PAPER " --string-size 32", "the paper's model, Fig. 4"},
    {"copy-s64", PAPER " --string-size 64", "the paper's model, Fig. 4"},
    {"copy-s128", PAPER " --string-size 128", "the paper's model, Fig. 2, 3 and 4"},
    {"copy-s256", PAPER " --string-size 256", "the paper's model, Fig. 4"},
    {"state-expansion", BATCH_320 "--model linear --layers 6 --channels 96 --hidden 384 --lr 1e-3 "
     "--steps 1500 --string-size 64", "accuracy against state: --hidden 96 to 1536"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"model", OPT_CHOICE, &c->mix.model, "quadratic", 0, 0, "quadratic|linear", DEFINES_MODEL,
         "all pairs, or the factored sum"},
        {"causal", OPT_CHOICE, &c->mix.causal, "yes", 0, 0, "no|yes", DEFINES_MODEL, "no: BiRN"},
        {"prenorm", OPT_CHOICE, &c->mix.prenorm, "auto", 0, 0, "exact|approx|none|auto",
         DEFINES_MODEL, "normalize pairs, sides, nothing; auto: exact, for linear approx"},
        {"postnorm", OPT_CHOICE, &c->mix.postnorm, "yes", 0, 0, "no|yes", DEFINES_MODEL, "of s"},
        {"activation", OPT_CHOICE, &c->mix.activation, "exp", 0, 0, "exp|relu|elu|gelu",
         DEFINES_MODEL, "of every pair"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "width of x"},
        {"hidden", OPT_INT, &c->hidden, "256", 1, 1 << 16, "H", DEFINES_MODEL, "width of the sum"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
}

// config_check: resolve --prenorm auto; die over combinations that make no sense, with the reason.
static void config_check(Config *c)
{
    Mix *mix = &c->mix;
    if (mix->prenorm == AUTO)
        mix->prenorm = mix->model == LINEAR ? APPROX : EXACT;
    if (mix->model == LINEAR && (mix->activation != EXP || mix->prenorm == EXACT))
        die(EXIT_USAGE, "--model linear: expected --activation exp and --prenorm approx or none: "
            "else the sum over pairs does not factor\nhint: --model quadratic takes all of them");
    task_causal_check(&TASKS[c->task], &c->task_options, mix->causal);
    if (mix->model == QUADRATIC && mix->prenorm == APPROX && c->hidden > 1200)
        die(EXIT_USAGE, "--hidden %d: expected at most 1200 for --model quadratic --prenorm "
            "approx: sums reach T exp(2 sqrt(H))\nhint: --model linear has no limit", c->hidden);
}

static Config config;
// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g FLOPs a step", model_flops(&m));
}

#ifndef TESTING
// main: parse, plan, print what it will cost, train.
int main(int argc, char **argv)
{
    static Model model;
    static Options options;
    training_begin();
    config_options(&options, &config);
    options_parse(&options, PRESETS, argc, argv,
                  "train_causalrn_gpu: CausalRN on the GPU. Without options: copying 16 letters.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    mix_check((size_t)config.hidden, config.mix);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 1);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    training_print("CausalRN, " PRECISION_NAME, &model.weights, "wte,wpe", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model.device.name = cuda_start();
    cuda_memory_check(model_bytes(&model));
    const size_t free_bytes = cuda_memory_free();
    model_alloc(&model);
    printf("GPU memory: %.2f GiB taken\n", (double)(free_bytes - cuda_memory_free()) / GIB);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
