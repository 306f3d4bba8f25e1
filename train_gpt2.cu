// train_gpt2.cu: GPT-2 and two Transformers on the GPU, the same sections as train_gpt2.c, which
// says what is computed and is what this is held against (dev/test_cuda.sh, `make test-cuda`).
//
//   s_tu  = q_t . k_u / sqrt(HS),  out_t = sum_u exp(s_tu) v_u / sum_u exp(s_tu)      softmax
//   s_tu  = phi(q_t) . phi(k_u),   out_t = sum_u s_tu v_u / (sum_u s_tu + 1e-6)       linear
//   over u <= t, phi(x) = elu(x) + 1                [arXiv 1706.03762 eq. 1, 2006.16236 eq. 7]
//   a block: x += W_proj attention(W_qkv norm(x)),  x += W_out gelu(W_fc norm(x) + b1) + b2
//
// Attention never stores anything of size T x T (FlashAttention: arXiv 2205.14135, 2307.08691): a
// tile of queries walks over tiles of keys, the sums relative to a running maximum, and the
// backward recomputes the weights from each row's log-sum-exp. BF16 with head sizes 64, 128 and 192
// takes tensor cores; other sizes and FP32 a general kernel. Linear attention goes through the same
// tiles with its own weights. Its form with a state, which by count does less from T = 256 (HS 64),
// 448 (128), 640 (192) on, is in dev/attention/linear_attention.cu, not measured beside the tiles.
//
// nvcc -DPRECISION_BF16 (train_gpt2_gpu): weights and activations in bf16, through the typedef
// floatX, and the residual stream, which is kept of every block: in fp32 a step took 4% longer;
// fp32: master weights, statistics, softmax, logits. Without it (train_gpt2_gpu_fp32) all is fp32,
// no TF32.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. Only --accumulate N waits between its batches. No
// float is added atomically: same bits every time. The residual is added in the epilogue of the
// matrix product before it: a kernel that adds and normalizes too was no faster (BF16, C = 192).
//
// Sections: [mix] attention; [layers] matrix product, normalize, embedding, cross-entropy; [norm]
// LayerNorm, GELU; [mlp] the hidden layer; [model]; [train]; [main]. [optimizer] AdamW and the sums
// over rows are in util/.
//
// Figures of the CausalRN paper; their results and the time of a step on an H200: README.md.
//   ./train_gpt2_gpu --preset copy-s128                              Fig. 3, 4: the Transformer
//   ./train_gpt2_gpu --preset copy-s128 --model linear-transformer   Fig. 4
// Differences from the papers: those of train_gpt2.c.

#define READS_IMAGES
#define RESIDUAL_X // see above
#include "data/tasks.h"
#include "util/published.h"
#include "util/asked.cuh"
#include "util/optimizer.cuh"
#include "util/patches.cuh" // and with it sums, warp, cuda_training, cuda, gemm, training

// ------------------------------------------------------------------------------------------------
// [mix] Attention: softmax over pairs of positions, or linear with a state.

#define ARCHITECTURE "gpt2"
enum { GPT2, TRANSFORMER, LINEAR };

#define LINEAR_EPS 1e-6f

// phi: the linear Transformer's feature map, elu(x) + 1 without its cancellation; 0 below -87.
static __device__ inline float phi(float x)
{
    return x > 0 ? x + 1 : exp2_fast(LOG2E * x);
}

// phi_slope: phi' where phi is `feature`.
static __device__ inline float phi_slope(float feature)
{
    return fminf(feature, 1);
}

#ifdef PRECISION_BF16
// ---- tiles: [ROWS][HS + 8], so that ldmatrix meets every bank once; blocks of WARPS warps

// tile_fetch: start copying rows row .. row+ROWS-1 of x (T,HS), `stride` apart, into a tile; rows
// from T on become 0.
template <int HS, int ROWS, int WARPS>
static __device__ inline void tile_fetch(floatX *tile, const floatX *x, int stride, int row, int T)
{
    const int r = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4 * WARPS) {
        if (ROWS % (4 * WARPS) && i + r >= ROWS)
            break;
        const bool inside = row + i + r < T;
        const floatX *from = x + (size_t)(inside ? row + i + r : 0) * stride + column;
#pragma unroll
        for (int c = 0; c < HS; c += 64)
            copy_async(tile + (i + r) * (HS + 8) + column + c, from + c, inside);
    }
}

// tile_place: this block's head (x) and which of its `blocks` tiles (y), tiles that walk far before
// those that do not. Heads go together whose others, of `walked` elements in two matrices, stay in
// the second-level cache. FROM_END: the last heads first: where the kernel before has ended.
template <int FROM_END> static __device__ inline int2 tile_place(int blocks, size_t walked)
{
    enum { CACHED = 1 << 23 }; // elements: 16 MiB
    const int heads = gridDim.x / blocks;
    const int together = walked < CACHED ? (int)(CACHED / walked) : 1;
    const int first = (int)blockIdx.x / blocks / together * together;
    const int i = blockIdx.x - first * blocks, count = min(together, heads - first);
    const int head = first + i % count;
    return {FROM_END ? heads - 1 - head : head, i / count};
}

// tile_dots: c[i] (16 x 16G) += own_i (16 rows, HS) other_i^T (16G rows, HS) for two tiles i, the
// second ROWS (own) and OT (other) rows after the first. own is at row_at, other at column_at of
// the first 16x16; the first KEEP tiles of own come from registers instead.
template <int HS, int ROWS, int OT, int G, int KEEP>
static __device__ inline void tile_dots(float c[2][2 * G][4], const uint4 kept[][HS / 16],
                                        const floatX *own, const floatX *other)
{
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 a = i < KEEP ? kept[i][k]
                                     : ldmatrix<0>(own + i * ROWS * (HS + 8) + 16 * k);
#pragma unroll
            for (int n = 0; n < G; n++) {
                const uint4 b = ldmatrix<0>(other + (i * OT + 16 * n) * (HS + 8) + 16 * k);
                mma(c[i][2 * n], a, b.x, b.y);
                mma(c[i][2 * n + 1], a, b.z, b.w);
            }
        }
}

// pairs_dots: s (16 MT x OT) += x (16 MT rows, HS) y (OT rows, HS)^T, tiles in shared memory.
template <int HS, int MT, int OT>
static __device__ inline void pairs_dots(float s[MT][OT / 8][4], const floatX *x, const floatX *y)
{
    enum { LD = HS + 8 };
    x += row_at(threadIdx.x % WARP, LD), y += column_at(threadIdx.x % WARP, LD);
#pragma unroll
    for (int c = 0; c < HS; c += 16) {
        uint4 a[MT];
#pragma unroll
        for (int m = 0; m < MT; m++)
            a[m] = ldmatrix<0>(x + 16 * m * LD + c);
#pragma unroll
        for (int n = 0; n < OT / 16; n++) {
            const uint4 b = ldmatrix<0>(y + 16 * n * LD + c);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(s[m][2 * n], a[m], b.x, b.y);
                mma(s[m][2 * n + 1], a[m], b.z, b.w);
            }
        }
    }
}

// pairs_sum: o (16 MT x HS) += s (16 MT x OT), in bf16, z (OT rows, HS), a tile in shared memory.
template <int HS, int MT, int OT>
static __device__ inline void pairs_sum(float o[MT][HS / 8][4], const float s[MT][OT / 8][4],
                                        const floatX *z)
{
    enum { LD = HS + 8 };
    z += row_at(threadIdx.x % WARP, LD);
#pragma unroll
    for (int n = 0; n < OT / 16; n++) {
        uint4 a[MT];
#pragma unroll
        for (int m = 0; m < MT; m++)
            a[m] = accumulator_pack(&s[m][2 * n]);
#pragma unroll
        for (int c = 0; c < HS / 16; c++) {
            const uint4 b = ldmatrix<1>(z + 16 * n * LD + 16 * c);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(o[m][2 * c], a[m], b.x, b.y);
                mma(o[m][2 * c + 1], a[m], b.z, b.w);
            }
        }
    }
}

// ---- forward

// pairs_mask: s, a warp's weights of 16 MT rows from `row` and OT others from `from`, = value where
// the other does not exist or, causal, comes after the row, KEYS: before it.
template <int MT, int OT, int KEYS>
static __device__ inline void pairs_mask(float s[MT][OT / 8][4], float value, int row, int from,
                                         int T, int causal)
{
    row += threadIdx.x % WARP / 4, from += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < MT * OT / 2; i++) {
        const int m = i / (OT / 2), n = i / 4 % (OT / 8), other = from + 8 * n + i % 2;
        const int own = row + 16 * m + i % 4 / 2 * 8;
        if (other >= T || (causal && (KEYS ? other < own : other > own)))
            s[m][n][i % 4] = value;
    }
}

// softmax_step: s = p relative to 2^top, from q.k, and sum += it. Where the largest exponent of one
// of the warp's rows has outgrown its top by 8, the tops of all of them move up to their largest,
// and o and sum with them: what p rounds to does not depend on top.
template <int HS, int MT, int OT>
static __device__ inline void softmax_step(float s[MT][OT / 8][4], float o[MT][HS / 8][4],
                                           float top[MT][2], float sum[MT][2])
{
    const float factor = LOG2E * rsqrtf((float)HS);
    float high[MT][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < OT / 8; n++)
            most = fmaxf(most, fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        high[i / 2][i % 2] = factor * fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        grown |= high[i / 2][i % 2] > top[i / 2][i % 2] + 8;
    }
    if (__any_sync(~0u, grown))
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const float higher = fmaxf(top[i / 2][i % 2], high[i / 2][i % 2]);
            const float shrink = exp2_fast(top[i / 2][i % 2] - higher);
            top[i / 2][i % 2] = higher;
            sum[i / 2][i % 2] *= shrink;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                o[i / 2][n][i % 2 * 2] *= shrink;
                o[i / 2][n][i % 2 * 2 + 1] *= shrink;
            }
        }
#pragma unroll
    for (int i = 0; i < MT * OT / 2; i++) {
        float *p = &s[i / (OT / 2)][i / 4 % (OT / 8)][i % 4];
        *p = exp2_fast(fmaf(*p, factor, -top[i / (OT / 2)][i % 4 / 2]));
        sum[i / (OT / 2)][i % 4 / 2] += *p;
    }
}

// tile_store: rows row .. row+15 of y, `stride` apart, those below `end` = factor sum, a warp's
// 16 x HS accumulators, of which a lane has rows g, g + 8 and a factor for each. They go through
// `tile`, 16 rows of shared memory that no other warp reads, so that a lane stores 16 bytes. x not
// NULL: times phi', the same rows of x being the features.
template <int HS>
static __device__ inline void tile_store(floatX *y, floatX *tile, const float sum[HS / 8][4],
                                         float factor0, float factor1, const floatX *x, int stride,
                                         int row, int end)
{
    enum { LD = HS + 8 };
    const int lane = threadIdx.x % WARP, r = lane / 8, column = lane % 8 * 8;
    floatX *own = tile + lane / 4 * LD + lane % 4 * 2;
    if (row >= end)
        return;
    __syncwarp(); // nobody reads what stands there any more
    if (x) {
#pragma unroll
        for (int i = 0; i < HS / 16; i++) // rows r + 4 (i % 4), columns from 64 (i / 4)
            copy_async(tile + (r + i % 4 * 4) * LD + column + i / 4 * 64,
                       x + (size_t)min(row + r + i % 4 * 4, end - 1) * stride + column + i / 4 * 64,
                       true);
        copy_wait();
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < HS / 4; i++) {
        const int half = i % 2, n = i / 2;
        Pack<floatX, 2> *to = (Pack<floatX, 2> *)(own + 8 * half * LD + 8 * n);
        float a = (half ? factor1 : factor0) * sum[n][2 * half];
        float b = (half ? factor1 : factor0) * sum[n][2 * half + 1];
        if (x) {
            a *= phi_slope((float)to->v[0]);
            b *= phi_slope((float)to->v[1]);
        }
        *(uint32_t *)to = pack2(a, b);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HS / 16; i++)
        if (row + r + i % 4 * 4 < end)
            *(uint4 *)(y + (size_t)(row + r + i % 4 * 4) * stride + column + i / 4 * 64) =
                *(const uint4 *)(tile + (r + i % 4 * 4) * LD + column + i / 4 * 64);
}

// forward_store: out and lse (linear: norm) of a warp's 16 MT queries of one head, from `row`, as
// far as `end`. tile: see tile_store.
template <int HS, int LINEAR, int MT>
static __device__ inline void forward_store(floatX *out, float *lse, floatX *tile,
                                            const float o[MT][HS / 8][4], const float top[MT][2],
                                            const float sum[MT][2], int head, int row, int end,
                                            int T, int C, int NH)
{
    float total[MT][2];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const int u = row + 8 * i + threadIdx.x % WARP / 4;
        float *all = &total[i / 2][i % 2];
        *all = sum[i / 2][i % 2];
        *all += __shfl_xor_sync(~0u, *all, 1);
        *all += __shfl_xor_sync(~0u, *all, 2);
        *all += LINEAR ? LINEAR_EPS : 0;
        if (u < end && threadIdx.x % 4 == 0)
            lse[(size_t)head * T + u] = LINEAR ? *all : LN2 * (top[i / 2][i % 2] + log2f(*all));
    }
    out += (size_t)(head / NH) * T * C + head % NH * HS;
#pragma unroll
    for (int m = 0; m < MT; m++)
        tile_store<HS>(out, tile + 16 * m * (HS + 8), o[m], 1 / total[m][0], 1 / total[m][1], NULL,
                       C, row + 16 * m, end);
}

// ---- backward

// backward_bytes: shared memory of a block of attention_backward_kernel.
static size_t backward_bytes(int HS, int WARPS, int OT)
{
    return (size_t)(2 * 16 * WARPS + 4 * OT) * (HS + 8) * sizeof(floatX) + 2 * OT * sizeof(float2);
}

// out_fetch: load what tile_stats needs of 8 N rows of out (T,HS) and lse from `row`, a lane a
// quarter of N of them; from `end` on the last one again.
template <int HS, int N>
static __device__ inline void out_fetch(Pack<floatX, 8> rows[N][HS / 32], float weight[N],
                                        const floatX *out, const float *lse, int C, int row,
                                        int end)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int r = min(row + 8 * i + (int)threadIdx.x % WARP / 4, end - 1);
        weight[i] = lse[r];
        out += (size_t)r * C + threadIdx.x % 4 * 8;
#pragma unroll
        for (int c = 0; c < HS / 32; c++)
            rows[i][c] = *(const Pack<floatX, 8> *)(out + 32 * c);
        out -= (size_t)r * C + threadIdx.x % 4 * 8;
    }
}

// tile_stats: stats and own = (log2 of the softmax's divisor or, PHI, 1 / norm; D = dout.out) of
// 8 N rows from `row`, to a row's four lanes; 0 from `end` on. dout: these rows in shared memory.
template <int HS, int PHI, int N>
static __device__ inline void tile_stats(float2 *stats, float2 own[N],
                                         const Pack<floatX, 8> out[N][HS / 32],
                                         const float weight[N], const floatX *dout, int row,
                                         int end)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int r = row + 8 * i + lane / 4;
        float D = 0;
#pragma unroll
        for (int c = 0; c < HS / 32; c++) {
            const Pack<floatX, 8> y = *(const Pack<floatX, 8> *)(dout + (8 * i + lane / 4) *
                                                                 (HS + 8) + 32 * c + lane % 4 * 8);
#pragma unroll
            for (int k = 0; k < 8; k++)
                D += (float)out[i][c].v[k] * (float)y.v[k];
        }
        D += __shfl_xor_sync(~0u, D, 1);
        D += __shfl_xor_sync(~0u, D, 2);
        own[i] = {r < end ? PHI ? 1 / weight[i] : LOG2E * weight[i] : 0, D};
        if (r < end && lane % 4 == 0)
            stats[r] = own[i];
    }
}

// backward_step: a = q.k becomes p, b = dout.v becomes ds, for a warp's 16 rows from `row` and 8N
// others from `from`: SIDE 0: rows are queries, SIDE 1: keys. The queries' stats are own's, this
// lane's two, or others'. masked: not every pair is seen.
template <int HS, int SIDE, int N>
static __device__ inline void backward_step(float a[N][4], float b[N][4], const float2 own[2],
                                            const float2 *others, int row, int from, int T,
                                            int causal, bool masked)
{
    const float factor = LOG2E * rsqrtf((float)HS);
    const int lane = threadIdx.x % WARP, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        const float2 z = SIDE ? others[i / 4 * 8 + 2 * t + i % 2] : own[i % 4 / 2];
        float *p = &a[i / 4][i % 4], *ds = &b[i / 4][i % 4];
        *p = exp2_fast(fmaf(*p, factor, -z.x));
        *ds = (*ds - z.y) * *p;
    }
    if (masked) { // selected, not multiplied: what an unseen pair gave may be infinite
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int r = row + i % 4 / 2 * 8 + lane / 4, c = from + i / 4 * 8 + 2 * t + i % 2;
            const int query = SIDE ? c : r, key = SIDE ? r : c;
            const bool seen = key < T && !(causal && key > query);
            const bool alone = causal ? query == 0 : T == 1; // p is 1 whatever q.k
            a[i / 4][i % 4] = seen ? a[i / 4][i % 4] : 0;
            b[i / 4][i % 4] = seen && !alone ? b[i / 4][i % 4] : 0;
        }
    }
}

// attention_backward_kernel: SIDE 0: dq of 16 WARPS queries of a head, and their stats (B,NH,T);
// SIDE 1, after it: dk, dv of as many keys. A warp owns 16 of them and walks over the others, the
// keys or the queries, OT at a time, the next already on their way.
template <int HS, int SIDE, int WARPS, int OT, int BLOCKS>
static __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)
    attention_backward_kernel(floatX *dqkv, float2 *stats, const floatX *dout, const floatX *out,
                              const float *lse, const floatX *qkv, int T, int C, int NH, int causal)
{
    enum { ROWS = 16 * WARPS, LD = HS + 8, STAGE = 2 * OT * LD };
    enum { KEEP = HS <= 128 ? 2 : !SIDE, G = KEEP == 1 ? 2 : 1 }; // what registers allow
    extern __shared__ __align__(16) floatX tiles[]; // own [2][ROWS][LD], others [2][2][OT][LD]
    const int lane = threadIdx.x % WARP;
    const int2 place = tile_place<!SIDE>((T + ROWS - 1) / ROWS, (size_t)T * 2 * HS);
    const int head = place.x, nth = place.y;
    const int end = SIDE ? min(T, (nth + 1) * ROWS) : T - nth * ROWS;
    const int first = SIDE ? nth * ROWS : max(0, end - ROWS); // see attention_rows_kernel
    const int row = first + threadIdx.x / WARP * 16;          // of this warp
    const int begin = SIDE && causal ? first / OT : 0;
    const int last = ((causal && !SIDE ? end : T) - 1) / OT;
    const size_t at = (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    const size_t out_at = (size_t)(head / NH) * T * C + head % NH * HS;
    const floatX *q = qkv + at, *k = q + C, *v = k + C, *g = dout + out_at;
    floatX *own = tiles, *others = tiles + 2 * ROWS * LD;
    float2 *other_stats = (float2 *)(others + 2 * STAGE), own_stats[2];
    uint4 kept[2][HS / 16]; // the first KEEP are in use
    float dx[HS / 8][4] = {}, dv[SIDE ? HS / 8 : 1][4] = {}; // dx: dq or dk
    stats += (size_t)head * T;
    const auto fetch = [=](int j) {
        floatX *to = others + j % 2 * STAGE;
        tile_fetch<HS, OT, WARPS>(to, SIDE ? q : k, 3 * C, j * OT, T);
        tile_fetch<HS, OT, WARPS>(to + OT * LD, SIDE ? g : v, SIDE ? C : 3 * C, j * OT, T);
        const int i = j * OT + threadIdx.x, inside = i < T;
        if (SIDE && threadIdx.x < OT)
            copy_async(other_stats + j % 2 * OT + threadIdx.x, stats + (inside ? i : 0), inside);
    };
    tile_fetch<HS, ROWS, WARPS>(own, SIDE ? k : q, 3 * C, first, end);
    tile_fetch<HS, ROWS, WARPS>(own + ROWS * LD, SIDE ? v : g, SIDE ? 3 * C : C, first, end);
    fetch(begin);
    Pack<floatX, 8> rows[2][HS / 32]; // of out, on their way with the tiles
    float weight[2];
    if (!SIDE)
        out_fetch<HS, 2>(rows, weight, out + out_at, lse + (size_t)head * T, C, row, end);
    own += (row - first) * LD + row_at(lane, LD);
    copy_wait();
    __syncthreads();
    if (!SIDE)
        tile_stats<HS, 0, 2>(stats, own_stats, rows, weight, tiles + (ROWS + row - first) * LD, row,
                             end);
#pragma unroll
    for (int i = 0; i < KEEP * HS / 16; i++) // tile, then column
        kept[i / (HS / 16)][i % (HS / 16)] =
            ldmatrix<0>(own + i / (HS / 16) * ROWS * LD + i % (HS / 16) * 16);
    for (int j = begin; j <= last; j++) {
        copy_wait();
        __syncthreads(); // the others of j are there; nobody reads those of j - 1 any more
        if (j < last)
            fetch(j + 1);
        if (row >= end)
            continue;
#pragma unroll 1
        for (int from = j * OT; from < (j + 1) * OT; from += 16 * G) {
            const int away = from - row; // of their first from ours
            const floatX *other = others + (j % 2 * 2 * OT + from - j * OT) * LD;
            if (from >= T || (causal && (SIDE ? away <= -16 : away >= 16)))
                continue;
            float s[2][2 * G][4] = {}; // q.k, then p; dout.v, then ds
            tile_dots<HS, ROWS, OT, G, KEEP>(s, kept, own, other + column_at(lane, LD));
            other += row_at(lane, LD);
            backward_step<HS, SIDE, 2 * G>(
                s[0], s[1], own_stats, other_stats + j % 2 * OT + from - j * OT, row, from, T,
                causal, (causal && away > -16 * G && away < 16) || from + 16 * G > T || T == 1);
#pragma unroll
            for (int n = 0; n < G; n++) {
                const uint4 p = accumulator_pack(&s[0][2 * n]), ds = accumulator_pack(&s[1][2 * n]);
#pragma unroll
                for (int c = 0; c < HS / 16; c++) {
                    const uint4 x = ldmatrix<1>(other + 16 * n * LD + 16 * c);
                    mma(dx[2 * c], ds, x.x, x.y);
                    mma(dx[2 * c + 1], ds, x.z, x.w);
                    if (SIDE) {
                        const uint4 y = ldmatrix<1>(other + (OT + 16 * n) * LD + 16 * c);
                        mma(dv[SIDE ? 2 * c : 0], p, y.x, y.y);
                        mma(dv[SIDE ? 2 * c + 1 : 0], p, y.z, y.w);
                    }
                }
            }
        }
    }
    floatX *tile = tiles + (row - first) * LD;
    const float scale = rsqrtf((float)HS);
    tile_store<HS>(dqkv + at + (SIDE ? C : 0), tile, dx, scale, scale, NULL, 3 * C, row, end);
    if (SIDE)
        tile_store<HS>(dqkv + at + 2 * C, tile + ROWS * LD, (const float(*)[4])dv, 1, 1, NULL,
                       3 * C, row, end);
}

// ---- softmax forward, linear attention

// These results have one form: y_r = sum over the others o that row r sees of w_ro z_o, with
//             rows, others         w_ro                            z
// SOFTMAX_OUT   queries, keys      exp(q_r.k_o / sqrt(HS))         v        out = y / sum of w
//   LINEAR_OUT  queries, keys      phi(q_r).phi(k_o)               v        out = y / norm
//   LINEAR_DQ   queries, keys      (dout_r.v_o - D_r) / norm_r     phi(k)   dq = y phi'(q)
//   LINEAR_DK   keys, queries      (v_r.dout_o - D_o) / norm_o     phi(q)   dk = y phi'(k)
//   LINEAR_DV   keys, queries      phi(k_r).phi(q_o) / norm_o      dout     dv = y
// and D = dout.out.
enum { SOFTMAX_OUT, LINEAR_OUT, LINEAR_DQ, LINEAR_DK, LINEAR_DV };

// linear_weights: s, products of a warp's 16 MT rows and OT others, become w of the table above.
template <int PASS, int MT, int OT>
static __device__ inline void linear_weights(float s[MT][OT / 8][4], const float2 own[MT][2],
                                             const float2 *others)
{
#pragma unroll
    for (int i = 0; i < MT * OT / 2; i++) {
        const int m = i / (OT / 2), n = i / 4 % (OT / 8);
        const float2 z = PASS == LINEAR_DQ ? own[m][i % 4 / 2]
                                           : others[8 * n + threadIdx.x % 4 * 2 + i % 2];
        s[m][n][i % 4] = (s[m][n][i % 4] - (PASS == LINEAR_DV ? 0 : z.y)) * z.x;
    }
}

// rows_step: a warp's 16 MT rows from `row`, y in shared memory, and OT others from `from`: what
// stands in the table as w comes from y and other_y and is summed with z into o. sum: of w; of the
// softmax all three are relative to 2^top.
template <int HS, int PASS, int MT, int OT>
static __device__ inline void rows_step(float o[MT][HS / 8][4], float top[MT][2], float sum[MT][2],
                                        const float2 own[MT][2], const float2 *stats,
                                        const floatX *y, const floatX *other_y, const floatX *z,
                                        int row, int from, int T, int causal)
{
    enum { KEYS = PASS >= LINEAR_DK, SOFTMAX = PASS == SOFTMAX_OUT };
    float s[MT][OT / 8][4] = {};
    pairs_dots<HS, MT, OT>(s, y, other_y);
    if (PASS >= LINEAR_DQ)
        linear_weights<PASS, MT, OT>(s, own, stats);
    if (from + OT > T || (causal && (KEYS ? from < row + 16 * MT - 1 : from + OT > row + 1)))
        pairs_mask<MT, OT, KEYS>(s, SOFTMAX ? -INFINITY : 0, row, from, T, causal);
    if (SOFTMAX)
        softmax_step<HS, MT, OT>(s, o, top, sum); // key 0 comes first: now the top is above -inf
#pragma unroll
    for (int i = 0; PASS == LINEAR_OUT && i < MT * OT / 2; i++)
        sum[i / (OT / 2)][i % 4 / 2] += s[i / (OT / 2)][i / 4 % (OT / 8)][i % 4];
    pairs_sum<HS, MT, OT>(o, s, z);
}

// rows_bytes: shared memory of a block of attention_rows_kernel.
static size_t rows_bytes(int HS, int WARPS, int MT, int OT)
{
    return (size_t)(16 * WARPS * MT + 4 * OT) * (HS + 8) * sizeof(floatX) + 2 * OT * sizeof(float2);
}

// attention_rows_kernel: PASS: which of the table, for 16 WARPS MT rows of one head: a warp has
// 16 MT of them and walks over the others, OT at a time, the next already on their way. The block
// that has fewer queries has the first ones: there are few keys to walk over with half its warps
// idle. y: out, or dqkv. norm, or the softmax's lse, is OUT's to write; stats (B,NH,T), 1 / norm
// and D, LINEAR_DQ's, before LINEAR_DK and LINEAR_DV.
template <int HS, int PASS, int WARPS, int MT, int OT, int BLOCKS>
static __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)
    attention_rows_kernel(floatX *y, float *norm, float2 *stats, const floatX *dout,
                          const floatX *out, const floatX *qkv, int T, int C, int NH, int causal)
{
    enum { ROWS = 16 * WARPS * MT, LD = HS + 8, STAGE = 2 * OT * LD, KEYS = PASS >= LINEAR_DK };
    enum { OUT = PASS <= LINEAR_OUT, DQ = PASS == LINEAR_DQ, DK = PASS == LINEAR_DK,
           DV = PASS == LINEAR_DV };
    enum { FEW = OT > 16 ? OT / 2 : OT }; // others of a step where a warp has no more to see
    extern __shared__ __align__(16) floatX tiles[]; // x [ROWS][LD], twice others [2][OT][LD], stats
    const int2 place = tile_place<PASS == SOFTMAX_OUT || DQ || DV>((T + ROWS - 1) / ROWS,
                                                                   (size_t)T * 2 * HS);
    const int head = place.x, nth = place.y; // of its tiles
    const int end = KEYS ? min(T, (nth + 1) * ROWS) : T - nth * ROWS;
    const int first = KEYS ? nth * ROWS : max(0, end - ROWS);
    const int row = first + threadIdx.x / WARP * 16 * MT; // of this warp
    const int begin = KEYS && causal ? first / OT : 0;
    const int last = ((causal && !KEYS ? end : T) - 1) / OT;
    const size_t at = (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    const size_t out_at = (size_t)(head / NH) * T * C + head % NH * HS;
    const floatX *q = qkv + at, *k = q + C, *v = k + C, *g = OUT ? NULL : dout + out_at;
    const floatX *other_y = OUT ? k : DQ ? v : DK ? g : q, *other_z = OUT ? v : DQ ? k : DK ? q : g;
    float2 *other_stats = (float2 *)(tiles + ROWS * LD + 2 * STAGE), own_stats[MT][2];
    floatX *own = tiles + (row - first) * LD;
    float o[MT][HS / 8][4] = {}, top[MT][2], sum[MT][2] = {};
    for (int i = 0; i < 2 * MT; i++)
        top[i / 2][i % 2] = -INFINITY;
    stats += (size_t)head * T;
    const auto fetch = [=](int j) {
        floatX *to = tiles + ROWS * LD + j % 2 * STAGE;
        tile_fetch<HS, OT, WARPS>(to, other_y, DK ? C : 3 * C, j * OT, T);
        tile_fetch<HS, OT, WARPS>(to + OT * LD, other_z, DV ? C : 3 * C, j * OT, T);
        const int i = j * OT + threadIdx.x, inside = i < T;
        if (KEYS && threadIdx.x < OT)
            copy_async(other_stats + j % 2 * OT + threadIdx.x, stats + (inside ? i : 0), inside);
    };
    tile_fetch<HS, ROWS, WARPS>(tiles, OUT ? q : DQ ? g : DK ? v : k, DQ ? C : 3 * C, first, end);
    fetch(begin);
    if (DQ) {
        Pack<floatX, 8> rows[2 * MT][HS / 32]; // of out, on their way with the tiles
        float weight[2 * MT];
        out_fetch<HS, 2 * MT>(rows, weight, out + out_at, norm + (size_t)head * T, C, row, end);
        copy_wait();
        __syncthreads();
        tile_stats<HS, 1, 2 * MT>(stats, own_stats[0], rows, weight, own, row, end);
    }
    for (int j = begin; j <= last; j++) {
        const floatX *others = tiles + ROWS * LD + j % 2 * STAGE;
        copy_wait();
        __syncthreads(); // the others of j are there; nobody reads those of j - 1 any more
        if (j < last)
            fetch(j + 1);
        const int seen = (causal && !KEYS ? min(T, row + 16 * MT) : T) - j * OT; // by any row
        if (row >= end || seen <= 0 || (KEYS && causal && (j + 1) * OT <= row))
            continue;
        const int skip = KEYS && causal && row - j * OT >= FEW ? OT - FEW : 0; // others before all
        const int from = j * OT + skip;
        const float2 *z = other_stats + j % 2 * OT + skip;
        others += skip * LD;
        if (seen > FEW && !skip)
            rows_step<HS, PASS, MT, OT>(o, top, sum, own_stats, z, own, others, others + OT * LD,
                                        row, from, T, causal);
        else
            rows_step<HS, PASS, MT, FEW>(o, top, sum, own_stats, z, own, others, others + OT * LD,
                                         row, from, T, causal);
    }
    if (OUT)
        forward_store<HS, PASS, MT>(y, norm, own, o, top, sum, head, row, end, T, C, NH);
#pragma unroll
    for (int m = 0; m < (OUT ? 0 : MT); m++)
        tile_store<HS>(y + at + (DK ? C : DV ? 2 * C : 0), own + 16 * m * LD, o[m], 1, 1,
                       DV ? NULL : DK ? k : q, 3 * C, row + 16 * m, end);
}
#endif

// ---- any head size and type: a warp a row

enum { GENERAL_WARPS = 4 };

// attention_general_kernel: out and lse (PHI: norm) of positions t0 .. t0+count-1 of T, a warp a
// query. Softmax as it goes: o and sum are relative to the largest logit so far. A warp has 2 HS
// floats of shared memory.
template <int PHI>
static __global__ void attention_general_kernel(floatX *out, float *lse, const floatX *qkv,
                                                size_t rows, int T, int t0, int count, int C,
                                                int NH, int causal)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % WARP, HS = C / NH;
    const size_t row = blockIdx.x * (size_t)GENERAL_WARPS + threadIdx.x / WARP, head = row / count;
    const int t = t0 + row % count, end = causal ? t + 1 : T;
    const floatX *x = qkv + head / NH * T * 3 * C + head % NH * HS;
    float *q = shared + threadIdx.x / WARP * 2 * HS, *o = q + HS;
    const float factor = LOG2E * rsqrtf((float)HS);
    float top = -INFINITY, sum = 0;
    if (row >= rows)
        return;
    for (int h = lane; h < HS; h += WARP) {
        const float value = (float)x[(size_t)t * 3 * C + h];
        q[h] = PHI ? value : factor * value;
        o[h] = 0;
    }
    for (int u = 0; u < end; u++) {
        const floatX *k = x + (size_t)u * 3 * C + C, *v = k + C;
        float p = 0, shrink = 1;
        for (int h = lane; h < HS; h += WARP)
            p += q[h] * (float)k[h];
        p = warp_sum(p);
        if (!PHI) { // u = 0: shrink = 2^-inf = 0
            const float higher = fmaxf(top, p);
            shrink = exp2_fast(top - higher);
            p = exp2_fast(p - higher);
            top = higher;
        }
        sum = sum * shrink + p;
        for (int h = lane; h < HS; h += WARP)
            o[h] = o[h] * shrink + p * (float)v[h];
    }
    sum += PHI ? LINEAR_EPS : 0;
    for (int h = lane; h < HS; h += WARP)
        out[(head / NH * count + t - t0) * C + head % NH * HS + h] = (floatX)(o[h] / sum);
    if (lane == 0)
        lse[row] = PHI ? sum : LN2 * (top + log2f(sum));
}

// attention_general_grad_kernel: SIDE 0: dq, a warp a query, and stats (B,NH,T) (see tile_stats);
// SIDE 1, after it: dk, dv, a warp a key. A warp has 4 HS floats of shared memory.
template <int PHI, int SIDE>
static __global__ void
attention_general_grad_kernel(floatX *dqkv, float2 *stats, const floatX *dout, const floatX *out,
                              const float *lse, const floatX *qkv, size_t rows, int T, int C,
                              int NH, int causal)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % WARP, HS = C / NH;
    const size_t row = blockIdx.x * (size_t)GENERAL_WARPS + threadIdx.x / WARP, head = row / T;
    const int own = row % T, begin = SIDE && causal ? own : 0, end = causal && !SIDE ? own + 1 : T;
    const size_t at = head / NH * T * 3 * C + head % NH * HS;
    const size_t out_at = head / NH * T * C + head % NH * HS;
    const floatX *x = qkv + at + (SIDE ? C : 0) + (size_t)own * 3 * C;
    const floatX *y = SIDE ? x + C : dout + out_at + (size_t)own * C;
    float *a = shared + threadIdx.x / WARP * 4 * HS, *b = a + HS, *dx = b + HS, *dv = dx + HS;
    const float scale = PHI ? 1 : rsqrtf((float)HS);
    float D = 0;
    if (row >= rows)
        return;
    for (int h = lane; h < HS; h += WARP) {
        a[h] = (float)x[h];
        b[h] = (float)y[h];
        dx[h] = dv[h] = 0;
        if (!SIDE)
            D += b[h] * (float)out[out_at + (size_t)own * C + h];
    }
    D = warp_sum(D);
    const float2 own_stats = {SIDE ? 0 : PHI ? 1 / lse[row] : LOG2E * lse[row], D};
    if (!SIDE && lane == 0)
        stats[row] = own_stats;
    for (int i = begin; i < end; i++) {
        const floatX *c = qkv + at + (SIDE ? 0 : C) + (size_t)i * 3 * C;
        const floatX *d = SIDE ? dout + out_at + (size_t)i * C : c + C;
        const float2 z = SIDE ? stats[head * T + i] : own_stats;
        const bool alone = !PHI && (causal ? (SIDE ? i : own) == 0 : T == 1); // p is 1
        float p = 0, ds = 0;
        for (int h = lane; h < HS; h += WARP) {
            p += a[h] * (float)c[h];
            ds += b[h] * (float)d[h];
        }
        p = warp_sum(p);
        p = PHI ? p * z.x : exp2_fast(p * (LOG2E * scale) - z.x);
        ds = alone ? 0 : (PHI ? z.x : p) * (warp_sum(ds) - z.y);
        for (int h = lane; h < HS; h += WARP) {
            dx[h] += ds * (float)c[h];
            if (SIDE)
                dv[h] += p * (float)d[h];
        }
    }
    floatX *to = dqkv + at + (SIDE ? C : 0) + (size_t)own * 3 * C;
    for (int h = lane; h < HS; h += WARP) {
        to[h] = (floatX)(dx[h] * (PHI ? phi_slope((float)x[h]) : scale));
        if (SIDE)
            to[C + h] = (floatX)dv[h];
    }
}

// ---- launchers

// attention_tiled: whether the tiles take this head size; they exist in BF16 alone.
static int attention_tiled(size_t HS)
{
    return sizeof(floatX) == 2 && (HS == 64 || HS == 128 || HS == 192);
}

// attention_check: die over a head size that the general kernels' shared memory, as much as the
// device gives a block, does not hold.
static void attention_check(size_t HS)
{
    int bytes = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    const size_t most = (size_t)bytes / (GENERAL_WARPS * 4 * sizeof(float)); // of the backward
    if (HS > most)
        die(EXIT_USAGE, "--heads: heads of %zu channels, expected at most %zu on this GPU\n"
            "hint: more --heads; train_gpt2 takes any number", HS, most);
}

// attention_fits: die unless C is a multiple of NH and a row's and a head's numbers fit an int.
static void attention_fits(size_t T, size_t C, size_t NH)
{
    if (NH == 0 || C == 0 || C % NH)
        die(EXIT_USAGE, "attention: %zu channels do not divide into %zu heads", C, NH);
    if (T > 1 << 24 || C > 1 << 24)
        die(EXIT_MEMORY, "attention: T = %zu, C = %zu, expected at most 2^24", T, C);
}

#ifdef PRECISION_BF16
// attention_rows_tiled, attention_backward_tiled: launch the tiles of one head size; WARPS, MT, OT;
// y, norm, stats: see the kernels. BLOCKS: blocks a multiprocessor shall have registers for.
template <int HS, int PASS, int WARPS, int MT, int OT, int BLOCKS>
static void attention_rows_tiled(floatX *y, float *norm, float *stats, const floatX *dout,
                                 const floatX *out, const floatX *qkv, size_t B, size_t T, size_t C,
                                 size_t NH, int causal, cudaStream_t stream)
{
    const size_t rows = 16 * WARPS * MT;
    LAUNCH((attention_rows_kernel<HS, PASS, WARPS, MT, OT, BLOCKS>),
           B * NH * ((T + rows - 1) / rows), WARPS * WARP, rows_bytes(HS, WARPS, MT, OT), stream,
           y, norm, (float2 *)stats, dout, out, qkv, (int)T, (int)C, (int)NH, causal);
}

// attention_backward_tiled: see attention_rows_tiled.
template <int HS, int SIDE, int WARPS, int OT, int BLOCKS>
static void attention_backward_tiled(floatX *dqkv, const floatX *dout, const floatX *out,
                                     const float *lse, const floatX *qkv, float *scratch, size_t B,
                                     size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    LAUNCH((attention_backward_kernel<HS, SIDE, WARPS, OT, BLOCKS>),
           B * NH * ((T + 16 * WARPS - 1) / (16 * WARPS)), WARPS * WARP,
           backward_bytes(HS, WARPS, OT), stream, dqkv, (float2 *)scratch, dout, out, lse,
           qkv, (int)T, (int)C, (int)NH, causal);
}

// linear_backward_tiled: the three gradients, dq first: it has the stats that the others need.
template <int HS, int WARPS, int MT, int OT, int BLOCKS>
static void linear_backward_tiled(floatX *dqkv, const floatX *dout, const floatX *out,
                                  const float *norm, const floatX *qkv, float *scratch, size_t B,
                                  size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    float *read = (float *)norm; // LINEAR_OUT alone writes it
    attention_rows_tiled<HS, LINEAR_DQ, WARPS, MT, OT, BLOCKS>(dqkv, read, scratch, dout, out, qkv,
                                                               B, T, C, NH, causal, stream);
    attention_rows_tiled<HS, LINEAR_DK, WARPS, MT, OT, BLOCKS>(dqkv, read, scratch, dout, out, qkv,
                                                               B, T, C, NH, causal, stream);
    attention_rows_tiled<HS, LINEAR_DV, WARPS, MT, OT, BLOCKS>(dqkv, read, scratch, dout, out, qkv,
                                                               B, T, C, NH, causal, stream);
}
#endif

// attention_forward_general, attention_backward_general: launch what takes any head size; forward:
// positions t .. t+count-1 of T.
static void attention_forward_general(floatX *out, float *lse, const floatX *qkv, size_t B,
                                      size_t T, size_t t, size_t count, size_t C, size_t NH,
                                      int causal, int linear, cudaStream_t stream)
{
    const size_t rows = B * NH * count, grid = (rows + GENERAL_WARPS - 1) / GENERAL_WARPS;
    WITH_FLAG(PHI, linear,
              LAUNCH(attention_general_kernel<PHI>, grid, GENERAL_WARPS * WARP,
                     GENERAL_WARPS * 2 * (C / NH) * 4, stream, out, lse, qkv, rows, (int)T, (int)t,
                     (int)count, (int)C, (int)NH, causal));
}

// attention_backward_general: see attention_forward_general.
static void attention_backward_general(floatX *dqkv, const floatX *dout, const floatX *out,
                                       const float *lse, const floatX *qkv, float *scratch,
                                       size_t B, size_t T, size_t C, size_t NH, int causal,
                                       int linear, cudaStream_t stream)
{
    const size_t rows = B * NH * T, grid = (rows + GENERAL_WARPS - 1) / GENERAL_WARPS;
    const size_t bytes = GENERAL_WARPS * 4 * (C / NH) * 4;
    WITH_FLAG(PHI, linear,
              LAUNCH((attention_general_grad_kernel<PHI, 0>), grid, GENERAL_WARPS * WARP, bytes,
                     stream, dqkv, (float2 *)scratch, dout, out, lse, qkv, rows, (int)T, (int)C,
                     (int)NH, causal);
              LAUNCH((attention_general_grad_kernel<PHI, 1>), grid, GENERAL_WARPS * WARP, bytes,
                     stream, dqkv, (float2 *)scratch, dout, out, lse, qkv, rows, (int)T, (int)C,
                     (int)NH, causal));
}

// attention_forward_any: attention_forward or, linear, linear_attention_forward.
static void attention_forward_any(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                                  size_t C, size_t NH, int causal, int linear, cudaStream_t stream)
{
    attention_fits(T, C, NH);
    if (!attention_tiled(C / NH)) {
        attention_forward_general(out, lse, qkv, B, T, 0, T, C, NH, causal, linear, stream);
        return;
    }
#ifdef PRECISION_BF16
#define FORWARD_TILED(HS, PASS, WARPS, MT, OT, BLOCKS) \
    attention_rows_tiled<HS, PASS, WARPS, MT, OT, BLOCKS>(out, lse, NULL, NULL, NULL, qkv, B, T, \
                                                          C, NH, causal, stream)
    switch (linear ? -(int)(C / NH) : (int)(C / NH)) {
    case 64: FORWARD_TILED(64, SOFTMAX_OUT, 4, 2, 32, 3); break;
    case 128: FORWARD_TILED(128, SOFTMAX_OUT, 4, 2, 32, 2); break;
    case 192: FORWARD_TILED(192, SOFTMAX_OUT, 6, 1, 32, 2); break;
    case -64: FORWARD_TILED(64, LINEAR_OUT, 4, 2, 32, 3); break;
    case -128: FORWARD_TILED(128, LINEAR_OUT, 4, 2, 32, 2); break;
    case -192: FORWARD_TILED(192, LINEAR_OUT, 4, 2, 16, 2);
    }
#endif
}

// attention_backward_any: attention_backward or, linear, linear_attention_backward.
static void attention_backward_any(floatX *dqkv, const floatX *dout, const floatX *out,
                                   const float *lse, const floatX *qkv, float *scratch, size_t B,
                                   size_t T, size_t C, size_t NH, int causal, int linear,
                                   cudaStream_t stream)
{
    attention_fits(T, C, NH);
    if (!attention_tiled(C / NH)) {
        attention_backward_general(dqkv, dout, out, lse, qkv, scratch, B, T, C, NH, causal, linear,
                                   stream);
        return;
    }
#ifdef PRECISION_BF16
#define BACKWARD_TILED(HS, WARPS, OT, DQ_BLOCKS, DKV_BLOCKS) \
    attention_backward_tiled<HS, 0, WARPS, OT, DQ_BLOCKS>(dqkv, dout, out, lse, qkv, scratch, B, \
                                                          T, C, NH, causal, stream), \
    attention_backward_tiled<HS, 1, WARPS, OT, DKV_BLOCKS>(dqkv, dout, out, lse, qkv, scratch, B, \
                                                           T, C, NH, causal, stream)
#define LINEAR_TILED(HS, WARPS, MT, OT, BLOCKS) \
    linear_backward_tiled<HS, WARPS, MT, OT, BLOCKS>(dqkv, dout, out, lse, qkv, scratch, B, T, C, \
                                                     NH, causal, stream)
    switch (linear ? -(int)(C / NH) : (int)(C / NH)) {
    case 64: BACKWARD_TILED(64, 4, 64, 3, 3); break;
    case 128: BACKWARD_TILED(128, 4, 32, 2, 2); break;
    case 192: BACKWARD_TILED(192, 4, 32, 2, 2); break;
    case -64: LINEAR_TILED(64, 4, 2, 32, 3); break;
    case -128: LINEAR_TILED(128, 4, 2, 32, 2); break;
    case -192: LINEAR_TILED(192, 4, 2, 16, 2);
    }
#endif
}

// attention_forward: out (B,T,C) = softmax attention of qkv (B,T,3C): q at 0, k at C, v at 2C, and
// head h of NH at h HS in each, HS = C / NH. Position t of a head sees u <= t; with causal = 0 all:
//   s_tu = q_t . k_u / sqrt(HS),  lse_t = log sum_u exp(s_tu),  out_t = sum_u exp(s_tu - lse_t) v_u
// lse (B,NH,T) = is kept for the backward pass, in nats; no (T,T) is stored. qkv and out start at a
// multiple of 16 bytes. Dies unless C is a multiple of NH and T, C are at most 2^24.
static void attention_forward(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                              size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_forward_any(out, lse, qkv, B, T, C, NH, causal, 0, stream);
}

// attention_backward: dqkv (B,T,3C) = from dout (B,T,C) and the forward's out, lse and qkv. With
// p_tu = exp(s_tu - lse_t), recomputed, and ds_tu = p_tu (dout_t . v_u - dout_t . out_t)/sqrt(HS):
//   dq_t = sum_u ds_tu k_u,  dk_u = sum_t ds_tu q_t,  dv_u = sum_t p_tu dout_t
// scratch: (B,NH,T,2) floats. A position that sees only itself gets dq = 0 exactly.
static void attention_backward(floatX *dqkv, const floatX *dout, const floatX *out,
                               const float *lse, const floatX *qkv, float *scratch, size_t B,
                               size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_backward_any(dqkv, dout, out, lse, qkv, scratch, B, T, C, NH, causal, 0, stream);
}

// features_kernel: phi of q and k of qkv (N,3C) in their place, a warp a row, the last rows first:
// see tile_place.
template <int VEC> static __global__ void features_kernel(floatX *qkv, size_t N, int C)
{
    typedef Pack<floatX, VEC> Each;
    const size_t row = row_of_warp();
    for (int c = threadIdx.x % WARP * VEC; c < 2 * C && row < N; c += WARP * VEC) {
        Each *x = (Each *)(qkv + (N - 1 - row) * 3 * C + c), y = *x;
#pragma unroll
        for (int k = 0; k < VEC; k++)
            y.v[k] = (floatX)phi((float)y.v[k]);
        *x = y;
    }
}

// linear_attention_forward: out (B,T,C) = linear attention of qkv (B,T,3C), laid out as for
// attention_forward. Position t of a head sees u <= t; with causal = 0 all:
//   s_tu = phi(q_t) . phi(k_u),  norm_t = sum_u s_tu + 1e-6,  out_t = sum_u s_tu v_u / norm_t
// norm (B,NH,T) = is kept for the backward pass. Where every feature underflows to 0, out is 0.
// phi(q) and phi(k) = take the place of q and k in qkv: every tile would take them again.
static void linear_attention_forward(floatX *out, float *norm, floatX *qkv, size_t B, size_t T,
                                     size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_fits(T, C, NH);
    WITH_FLAG(WIDE, C % 8 == 0,
              LAUNCH(features_kernel<WIDE ? 8 : 1>, (B * T + ROW_WARPS - 1) / ROW_WARPS,
                     ROW_WARPS * WARP, 0, stream, qkv, B * T, (int)C));
    attention_forward_any(out, norm, qkv, B, T, C, NH, causal, 1, stream);
}

// linear_attention_backward: dqkv (B,T,3C) = gradients of q, k, v from dout (B,T,C) and from out,
// norm and qkv, where phi(q), phi(k) stand, of the forward; scratch: (B,NH,T,2) floats. With
// ds_tu = (dout_t . v_u - dout_t . out_t) / norm_t:
//   dq_t = phi'(q_t) sum_u ds_tu phi(k_u),  dk_u = phi'(k_u) sum_t ds_tu phi(q_t),
//   dv_u = sum_t s_tu / norm_t dout_t
static void linear_attention_backward(floatX *dqkv, const floatX *dout, const floatX *out,
                                      const float *norm, const floatX *qkv, float *scratch,
                                      size_t B, size_t T, size_t C, size_t NH, int causal,
                                      cudaStream_t stream)
{
    attention_backward_any(dqkv, dout, out, norm, qkv, scratch, B, T, C, NH, causal, 1, stream);
}

// ---- decoding

// linear_decode_kernel: a block a sequence and head, a thread columns i of the state S (HS,HS) and
// elements i of z (HS), which stand one behind the other: S += phi(k) v^T, z += phi(k), out = S^T
// phi(q) / (phi(q) . z + 1e-6). Shared memory: 3 HS floats.
static __global__ void linear_decode_kernel(floatX *out, float *state, const floatX *qkv, int C,
                                            int NH)
{
    extern __shared__ float shared[];
    const int HS = C / NH;
    float *q = shared, *k = q + HS, *z = k + HS;
    float *S = state + (size_t)blockIdx.x * HS * (HS + 1);
    const floatX *x = qkv + (size_t)(blockIdx.x / NH) * 3 * C + blockIdx.x % NH * HS;
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        q[i] = phi((float)x[i]);
        k[i] = phi((float)x[C + i]);
        z[i] = S[HS * HS + i] += k[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        const float v = (float)x[2 * C + i];
        float sum = 0, norm = LINEAR_EPS;
        for (int j = 0; j < HS; j++) {
            const float s = S[j * HS + i] += k[j] * v;
            sum += q[j] * s;
            norm += q[j] * z[j];
        }
        out[(size_t)(blockIdx.x / NH) * C + blockIdx.x % NH * HS + i] = (floatX)(sum / norm);
    }
}

// attention_decode: position t of D sequences: out (D,C) = softmax attention of qkv (D,3C) over the
// positions before and itself; cache (D,T,3C): their qkv so far, which it extends; lse (D,NH):
// scratch.
static void attention_decode(floatX *out, float *lse, floatX *cache, const floatX *qkv, size_t D,
                             size_t t, size_t T, size_t C, size_t NH, cudaStream_t stream)
{
    const size_t row = 3 * C * sizeof(floatX);
    CUDA_CHECK(cudaMemcpy2DAsync(cache + t * 3 * C, T * row, qkv, row, row, D,
                                 cudaMemcpyDeviceToDevice, stream));
    attention_forward_general(out, lse, cache, D, T, t, 1, C, NH, 1, 0, stream);
}

// linear_attention_decode: the same with state (D,NH,HS,HS+1), which t = 0 clears first.
static void linear_attention_decode(floatX *out, float *state, const floatX *qkv, size_t D,
                                    size_t t, size_t C, size_t NH, cudaStream_t stream)
{
    const size_t HS = C / NH;
    if (t == 0)
        CUDA_CHECK(cudaMemsetAsync(state, 0, D * C * (HS + 1) * sizeof(float), stream));
    LAUNCH(linear_decode_kernel, D * NH, HS < 1024 ? HS : 1024, 3 * HS * sizeof(float), stream, out,
           state, qkv, (int)C, (int)NH);
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
// [norm] LayerNorm, GELU.  (shared)

#define LAYERNORM_EPS 1e-5f
enum { GELU_THREADS = 256 };

// reciprocal: 1 / x on the special-function unit, relative error 2^-23; below 2^-126 it is 0.
static __device__ inline float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// layernorm_forward_kernel: a warp a row.
template <int WIDTH>
static __global__ void layernorm_forward_kernel(floatX *out, float *mean, float *rstd,
                                                const floatR *x, const float *weight,
                                                const float *bias, size_t N, int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    if (row >= N)
        return;
    const Moments m = row_moments<floatR, WIDTH>(x + row * n, n, LAYERNORM_EPS);
#pragma unroll
    for (int c = lane; c < n; c += WARP)
        out[row * n + c] =
            (floatX)(((float)x[row * n + c] - m.mean) * m.rstd * weight[c] + bias[c]);
    if (lane == 0) {
        mean[row] = m.mean;
        rstd[row] = m.rstd;
    }
}

// layernorm_backward_kernel: a warp a row: dx += (first: =) rstd (d - mean(d) - z mean(d z)), d =
// dout weight, z = (x - mean) rstd.
template <int WIDTH>
static __global__ void layernorm_backward_kernel(floatX *dx, const floatX *__restrict__ dout,
                                                 const floatR *__restrict__ x, const float *mean,
                                                 const float *rstd,
                                                 const float *__restrict__ weight, size_t N, int C,
                                                 int first)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float sum = 0, dot = 0;
    if (row >= N)
        return;
    const float mean_n = mean[row], rstd_n = rstd[row];
    dx += row * n;
    dout += row * n;
    x += row * n;
#pragma unroll
    for (int c = lane; c < n; c += WARP) {
        const float d = (float)dout[c] * weight[c];
        sum += d;
        dot += d * ((float)x[c] - mean_n) * rstd_n;
    }
    sum = warp_sum(sum) / (float)n;
    dot = warp_sum(dot) / (float)n;
#pragma unroll
    for (int c = lane; c < n; c += WARP) {
        const float z = ((float)x[c] - mean_n) * rstd_n;
        const float d = rstd_n * ((float)dout[c] * weight[c] - sum - z * dot);
        dx[c] = (floatX)(first ? d : (float)dx[c] + d);
    }
}

// layernorm_slices_kernel: partial (2,COLUMN_SLICES,C) = column sums of dout z and of dout in every
// slice of the N rows; a thread a column, ROW_WARPS warps side by side on the rows.
static __global__ void layernorm_slices_kernel(float *partial, const floatX *__restrict__ dout,
                                               const floatR *__restrict__ x,
                                               const float *__restrict__ mean,
                                               const float *__restrict__ rstd, size_t N, int C)
{
    const int c = blockIdx.x / COLUMN_SLICES * WARP + threadIdx.x % WARP;
    size_t first;
    const int rows = slice_rows(&first, N);
    float by_z = 0, plain = 0;
    dout += first * C + min(c, C - 1);
    x += first * C + min(c, C - 1);
#pragma unroll 8
    for (int n = threadIdx.x / WARP; n < rows; n += ROW_WARPS) {
        const float d = (float)dout[(size_t)n * C];
        by_z += d * ((float)x[(size_t)n * C] - mean[first + n]) * rstd[first + n];
        plain += d;
    }
    columns_sum<1, ROW_WARPS>(partial, &by_z, c, C);
    columns_sum<1, ROW_WARPS>(partial + (size_t)COLUMN_SLICES * C, &plain, c, C);
}

// norm_forward: out (N,C) = the model's norm of x (N,C): LayerNorm, out = weight (x - mean) rstd +
// bias, or without a weight normalize; mean (LayerNorm alone), rstd (N) =.
static void norm_forward(floatX *out, float *mean, float *rstd, const floatR *x,
                         const float *weight, const float *bias, size_t N, size_t C,
                         cudaStream_t stream)
{
    if (weight)
        LAUNCH_ROWS(layernorm_forward_kernel, N, C, stream, out, mean, rstd, x, weight, bias, N,
                    (int)C);
    else
        normalize_forward(out, rstd, x, N, C, stream);
}

// norm_backward: dx (N,C) += (first: =), dweight (C) +=, dbias (C) += from dout (N,C), the
// forward's x, weight and what it wrote. partial (COLUMN_SLICES,2C): scratch.
static void norm_backward(floatX *dx, float *dweight, float *dbias, float *partial,
                          const floatX *dout, const floatX *out, const float *mean,
                          const float *rstd, const floatR *x, const float *weight, size_t N,
                          size_t C, int first, cudaStream_t stream)
{
    if (!weight) {
        normalize_backward(dx, dout, C, out, rstd, N, C, first, stream);
        return;
    }
    LAUNCH_ROWS(layernorm_backward_kernel, N, C, stream, dx, dout, x, mean, rstd, weight, N, (int)C,
                first);
    LAUNCH(layernorm_slices_kernel, (C + WARP - 1) / WARP * COLUMN_SLICES, ROW_WARPS * WARP, 0,
           stream, partial, dout, x, mean, rstd, N, (int)C);
    LAUNCH(slices_sum_kernel, (2 * C + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0, stream,
           dweight, dbias, partial, COLUMN_SLICES, C, COLUMN_SLICES, C, C, 0);
}

// gelu: x times p = 1 / (1 + exp(-y)), y an odd polynomial; *slope = its derivative. TANH: y =
// 2 sqrt(2/pi) (x + 0.044715 x^3). Else the erf form, where p is the normal distribution function
// and y a fit to log(p / (1 - p)). Error at most 3e-7 max(1, |x|), of the slope 1e-6. y = -ln(2) x
// sum_i c_i x^2i, in which x^2 is at most 30^2 or 6^2: p is 0 or 1 there.
template <int TANH> static __device__ inline float gelu(float x, float *slope)
{
    const float tanh_form[] = {-2.3022082f, -0.10294324f};
    const float erf_form[] = {-2.302209014f, -0.1048338121f, 9.208674431e-5f, 1.604630799e-4f,
                              -1.160382740e-5f, 3.946843695e-7f, -5.429578177e-9f};
    const int n = TANH ? 2 : 7;
    const float *c = TANH ? tanh_form : erf_form;
    const float square = fminf(x * x, TANH ? 900 : 36);
    float y = c[n - 1], dy = (2 * n - 1) * c[n - 1];
#pragma unroll
    for (int i = n - 2; i >= 0; i--) {
        y = fmaf(y, square, c[i]);
        dy = fmaf(dy, square, (2 * i + 1) * c[i]);
    }
    const float e = exp2_fast(fminf(x * y, 126)), p = reciprocal(1 + e);
    *slope = p - LN2 * x * dy * (e * p * p); // e p p = p (1 - p), but exact where p rounds to 1
    return x * p;
}

// gelu_forward_kernel: out (n) = gelu of x; n a multiple of VEC.
template <int TANH, int VEC>
static __global__ void gelu_forward_kernel(floatX *out, const floatX *x, size_t n)
{
    enum { AT_ONCE = 2 };
    typedef Pack<floatX, VEC> Each;
    const size_t first = blockIdx.x * (size_t)(GELU_THREADS * AT_ONCE * VEC) + threadIdx.x * VEC;
    Each a[AT_ONCE] = {};
    float slope;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
        if (first + j * GELU_THREADS * VEC < n)
            a[j] = *(const Each *)(x + first + j * GELU_THREADS * VEC);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
#pragma unroll
        for (int k = 0; k < VEC; k++)
            a[j].v[k] = (floatX)gelu<TANH>((float)a[j].v[k], &slope);
        if (first + j * GELU_THREADS * VEC < n)
            *(Each *)(out + first + j * GELU_THREADS * VEC) = a[j];
    }
}

// gelu_forward: out (N,OC) = gelu of x (N,OC), in its tanh form or its erf form; out may be x.
static void gelu_forward(floatX *out, const floatX *x, size_t N, size_t OC, int tanh_form,
                         cudaStream_t stream)
{
    const size_t vec = OC % 8 ? 1 : 8, each = 2 * GELU_THREADS * vec, n = N * OC;
    WITH_FLAG(TANH, tanh_form, WITH_FLAG(WIDE, vec == 8,
              LAUNCH((gelu_forward_kernel<TANH, WIDE ? 8 : 1>), (n + each - 1) / each,
                     GELU_THREADS, 0, stream, out, x, n)));
}

// gelu_backward_kernel: dx (N,OC) = dout gelu'(x), and partial (COLUMN_SLICES,OC) = its column sums
// of each slice: a warp a row of 32 VEC columns, ROW_WARPS of them side by side.
template <int TANH, int VEC>
static __global__ void __launch_bounds__(ROW_WARPS * WARP, 3)
    gelu_backward_kernel(floatX *dx, float *partial, const floatX *dout, const floatX *x, size_t N,
                         int OC)
{
    enum { AT_ONCE = 2 };
    typedef Pack<floatX, VEC> Each;
    const int o = (blockIdx.x / COLUMN_SLICES * WARP + threadIdx.x % WARP) * VEC;
    size_t first;
    const int rows = slice_rows(&first, N);
    float sum[VEC] = {}, slope;
    for (int row = threadIdx.x / WARP; row < rows && o < OC; row += AT_ONCE * ROW_WARPS) {
        Each a[AT_ONCE], d[AT_ONCE]; // all on their way before the first is needed
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const size_t at = (first + min(row + j * ROW_WARPS, rows - 1)) * OC + o;
            a[j] = *(const Each *)(x + at);
            d[j] = *(const Each *)(dout + at);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (row + j * ROW_WARPS >= rows)
                break;
            Each y;
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                gelu<TANH>((float)a[j].v[k], &slope);
                slope *= (float)d[j].v[k];
                sum[k] += slope;
                y.v[k] = (floatX)slope;
            }
            *(Each *)(dx + (first + row + j * ROW_WARPS) * OC + o) = y;
        }
    }
    columns_sum<VEC, ROW_WARPS>(partial, sum, o, OC);
}

// gelu_backward: dx (N,OC) = dout (N,OC) gelu'(x), dbias (OC) += its column sums; dx may alias
// dout. partial (COLUMN_SLICES,OC): scratch.
static void gelu_backward(floatX *dx, float *dbias, float *partial, const floatX *dout,
                          const floatX *x, size_t N, size_t OC, int tanh_form, cudaStream_t stream)
{
    const size_t vec = OC % 8 ? 1 : 8;
    const size_t grid = (OC + WARP * vec - 1) / (WARP * vec) * COLUMN_SLICES;
    WITH_FLAG(TANH, tanh_form, WITH_FLAG(WIDE, vec == 8,
              LAUNCH((gelu_backward_kernel<TANH, WIDE ? 8 : 1>), grid, ROW_WARPS * WARP, 0, stream,
                     dx, partial, dout, x, N, (int)OC)));
    LAUNCH(slices_sum_kernel, (OC + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0, stream,
           dbias, NULL, partial, COLUMN_SLICES, OC, 0, 0, OC, 0);
}

// ------------------------------------------------------------------------------------------------
// [mlp] The hidden layer: products with GELU in their epilogue.

#ifdef PRECISION_BF16
// A block has SLAB of the 4C hidden channels, a warp SLAB_OWN of them, whose weights stay in its
// registers, and walks over the tokens, SLAB_ROWS at a time, the next two tiles on their way. Lane
// 4g + t has SLAB_LANE channels from SLAB_LANE t on: the order in which a warp's columns stand in
// the products of mma is its own choice. 24 warps of 16 channels, which fit too, take a fifth
// longer than 12 of 32: they store 32 bytes of a row at a time and read every tile twice as often.
enum { SLAB = 128, SLAB_WARPS = 4, SLAB_ROWS = 32, SLAB_STAGES = 3, SLAB_BLOCKS = 3 };
enum { SLAB_OWN = SLAB / SLAB_WARPS, SLAB_LANE = SLAB_OWN / 4, SLAB_N = SLAB_OWN / 8 };

// slab_bytes: shared memory of a block of hidden_kernel.
static size_t slab_bytes(int C, int BACKWARD)
{
    return SLAB_STAGES * SLAB_ROWS * (C + 8 + (BACKWARD ? SLAB + 8 : 0)) * sizeof(floatX);
}

// slab_slots: how many blocks share the N rows of a slab: in all as many as an H200 runs at once,
// each with at least four tiles, or its weights cost more than they give.
static size_t slab_slots(size_t N, size_t C)
{
    const size_t slots = COLUMN_SLICES * SLAB_BLOCKS / (4 * C / SLAB);
    return std::min({slots, (N + 4 * SLAB_ROWS - 1) / (4 * SLAB_ROWS), (size_t)COLUMN_SLICES});
}

// slab_weights: this lane's part of a warp's SLAB_OWN columns from `column` of weight, (4C,C) or,
// BACKWARD, (C,4C), as b of mma.
template <int C, int BACKWARD>
static __device__ inline void slab_weights(uint32_t b[C / 16][SLAB_N][2], const floatX *weight,
                                           int column)
{
    typedef Pack<uint32_t, SLAB_N> Columns;
    const int n = threadIdx.x % WARP / 4, k = threadIdx.x % 4 * 2;
    column += n / 2 * SLAB_LANE;
#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        if (BACKWARD) { // of a lane's columns in two rows every second one
            const Columns x = *(const Columns *)(weight + (size_t)(8 * i + k) * 4 * C + column);
            const Columns y = *(const Columns *)(weight + (size_t)(8 * i + k + 1) * 4 * C + column);
#pragma unroll
            for (int j = 0; j < SLAB_N; j++)
                b[i / 2][j][i % 2] = n % 2 ? x.v[j] >> 16 | (y.v[j] & 0xffff0000)
                                           : (x.v[j] & 0xffff) | y.v[j] << 16;
        } else
#pragma unroll
            for (int j = 0; j < SLAB_N; j++)
                b[i / 2][j][i % 2] = *(const uint32_t *)(
                    weight + (size_t)(column + 2 * j + n % 2) * C + 8 * i + k);
    }
}

// normal_cdf: the normal distribution function, (1 + tanh(x (a + b x^2))) / 2 with a, b fitted to
// 1.4e-4; with the special-function unit's tanh, 2^-11 of it off, the error is at most 4e-4.
static __device__ inline float normal_cdf(float x)
{
    float y = x * fmaf(0.0352820566f, x * x, 0.798801416f);
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(y));
    return fmaf(y, 0.5f, 0.5f);
}

// gelu_fast: gelu(x), error at most 4e-4 max(1, |x|): a fifth of what bf16 may be off by at 1. The
// three operations fewer than gelu's are an eighth of hidden_kernel's.
template <int TANH> static __device__ inline float gelu_fast(float x)
{
    float slope;
    return TANH ? gelu<1>(x, &slope) : x * normal_cdf(x);
}

// gelu_slope: gelu'(x), error at most 4e-4; of the erf form p + x exp(-x^2/2) / sqrt(2 pi), p
// the normal distribution function.
template <int TANH> static __device__ inline float gelu_slope(float x)
{
    float slope;
    if (TANH) {
        gelu<1>(x, &slope);
        return slope;
    }
    return fmaf(x, exp2_fast(fmaf(x * x, -0.5f * LOG2E, -1.32574806f)), normal_cdf(x));
}

// hidden_rows: a lane's channels of one token, whose products, begun with the bias, c has in its
// rows 0-7 or, half, 8-15: y = c, g = gelu(y) or, BACKWARD, y = c gelu'(h), sum += y; stored if
// `inside`.
template <int TANH, int BACKWARD>
static __device__ inline void hidden_rows(floatX *y, floatX *g, float sum[SLAB_LANE],
                                          const float c[SLAB_N][4], const floatX *h, int half,
                                          bool inside)
{
    typedef Pack<uint32_t, SLAB_N> Pairs;
    Pack<floatX, SLAB_LANE> in;
    Pairs out, active;
    if (BACKWARD)
        in = *(const Pack<floatX, SLAB_LANE> *)h;
#pragma unroll
    for (int k = 0; k < SLAB_N; k++) {
        float v[2] = {c[k][2 * half], c[k][2 * half + 1]};
#pragma unroll
        for (int i = 0; BACKWARD && i < 2; i++) {
            v[i] *= gelu_slope<TANH>((float)in.v[2 * k + i]);
            sum[2 * k + i] += v[i];
        }
        out.v[k] = pack2(v[0], v[1]);
        if (!BACKWARD)
            active.v[k] = pack2(gelu_fast<TANH>(v[0]), gelu_fast<TANH>(v[1]));
    }
    if (inside)
        *(Pairs *)y = out;
    if (inside && !BACKWARD)
        *(Pairs *)g = active;
}

// hidden_sums: partial, the place of this lane's columns, = the warp's sums of them.
static __device__ inline void hidden_sums(float *partial, float sum[SLAB_LANE])
{
#pragma unroll
    for (int k = 0; k < SLAB_LANE; k++) {
        for (int other = 4; other < WARP; other *= 2)
            sum[k] += __shfl_xor_sync(~0u, sum[k], other);
        if (threadIdx.x % WARP < 4)
            partial[k] = sum[k];
    }
}

// hidden_kernel: see hidden_forward, hidden_backward; H = 4C, w its weight, (H,C) or (C,H). y: h or
// dh. partial (slots,H), (slots,C): column sums of dh and of x, of each slot's rows.
template <int C, int TANH, int BACKWARD>
static __global__ void __launch_bounds__(SLAB_WARPS * WARP, SLAB_BLOCKS)
    hidden_kernel(floatX *y, floatX *g, float *partial, const floatX *x, const floatX *h,
                  const floatX *w, const floatX *bias, int N, int slots)
{
    enum { H = 4 * C, LD = C + 8, H_LD = SLAB + 8, H_AT = SLAB_ROWS * LD };
    enum { STAGE = H_AT + (BACKWARD ? SLAB_ROWS * H_LD : 0) };
    extern __shared__ __align__(16) floatX tiles[]; // [SLAB_STAGES], each x and, BACKWARD, h
    __shared__ float sums[SLAB_WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int slab = blockIdx.x % (H / SLAB), slot = blockIdx.x / (H / SLAB);
    const int own = warp * SLAB_OWN + lane % 4 * SLAB_LANE; // the first of this lane's columns
    const int column = slab * SLAB + own;
    uint32_t b[C / 16][SLAB_N][2];
    float start[SLAB_N][2] = {}, sum[SLAB_LANE] = {}, x_sum = 0; // sum: of these columns of dh
    const auto fetch = [=](int i) {
        const int row = (slot + i * slots) * SLAB_ROWS;
        floatX *to = tiles + i % SLAB_STAGES * STAGE;
        if (row < N) {
            tile_fetch<C, SLAB_ROWS, SLAB_WARPS>(to, x, C, row, N);
            if (BACKWARD)
                tile_fetch<SLAB, SLAB_ROWS, SLAB_WARPS>(to + H_AT, h + slab * SLAB, H, row, N);
        }
        copy_commit();
    };
    slab_weights<C, BACKWARD>(b, w, slab * SLAB + warp * SLAB_OWN);
    fetch(0);
    fetch(1);
#pragma unroll
    for (int k = 0; !BACKWARD && k < SLAB_LANE; k++)
        start[k / 2][k % 2] = (float)bias[column + k];
    for (int i = 0; (slot + i * slots) * SLAB_ROWS < N; i++) {
        const floatX *tile = tiles + i % SLAB_STAGES * STAGE;
        const int first = (slot + i * slots) * SLAB_ROWS;
        copy_wait_all_but<1>();
        __syncthreads(); // tile i is there; nobody reads tile i - 1 any more
        fetch(i + 2);
#pragma unroll 1
        for (int m = 0; m < SLAB_ROWS; m += 16) {
            float c[SLAB_N][4];
#pragma unroll
            for (int k = 0; k < 4 * SLAB_N; k++)
                c[k / 4][k % 4] = start[k / 4][k % 2];
#pragma unroll
            for (int k = 0; k < C / 16; k++) {
                const uint4 a = ldmatrix<0>(tile + row_at(lane, LD) + m * LD + 16 * k);
#pragma unroll
                for (int j = 0; j < SLAB_N; j++)
                    mma(c[j], a, b[k][j][0], b[k][j][1]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = m + 8 * half + lane / 4;
                const bool inside = first + row < N;
                const size_t at = (size_t)(first + row) * H + column;
                const floatX *in = tile + H_AT + row * H_LD + own;
                hidden_rows<TANH, BACKWARD>(y + at, g + at, sum, c, in, half, inside);
            }
        }
        if (BACKWARD)
#pragma unroll
            for (int k = 0; k < SLAB_ROWS; k += SLAB_WARPS)
                x_sum += (float)tile[(k + warp) * LD + slab * WARP + lane];
    }
    if (BACKWARD) {
        hidden_sums(partial + (size_t)slot * H + column, sum);
        sums[warp][lane] = x_sum;
        __syncthreads();
        for (int k = 1; k < SLAB_WARPS; k++)
            x_sum += sums[k][lane];
        if (warp == 0)
            partial[(size_t)slots * H + slot * C + slab * WARP + lane] = x_sum;
    }
}

// hidden_launch: hidden_kernel for C and GELU's form.
static void hidden_launch(floatX *y, floatX *g, float *partial, const floatX *x, const floatX *h,
                          const floatX *w, const floatX *bias, size_t N, size_t C, int tanh_form,
                          cudaStream_t stream)
{
    const size_t slots = slab_slots(N, C);
#define HIDDEN(C) \
    WITH_FLAG(TANH, tanh_form, WITH_FLAG(BACKWARD, h != NULL, \
              LAUNCH((hidden_kernel<C, TANH, BACKWARD>), slots * (4 * C / SLAB), \
                     SLAB_WARPS * WARP, slab_bytes(C, BACKWARD), stream, y, g, partial, x, h, w, \
                     bias, (int)N, (int)slots)))
    switch (C) {
    case 64: HIDDEN(64); break;
    case 128: HIDDEN(128); break;
    case 192: HIDDEN(192);
    }
}

// hidden_fused: whether hidden_kernel takes N rows of C channels.
static int hidden_fused(size_t N, size_t C)
{
    return (C == 64 || C == 128 || C == 192) && N < 1 << 30;
}
#endif

// hidden_forward: h (N,4C) = inp (N,C) weight (4C,C)^T + bias (4C), g (N,4C) = gelu of h, in its
// tanh form or its erf form.
static void hidden_forward(floatX *g, floatX *h, const floatX *inp, const floatX *weight,
                           const floatX *bias, size_t N, size_t C, int tanh_form,
                           cudaStream_t stream)
{
#ifdef PRECISION_BF16
    if (hidden_fused(N, C)) {
        hidden_launch(h, g, NULL, inp, NULL, weight, bias, N, C, tanh_form, stream);
        return;
    }
#endif
    matmul_forward(h, inp, weight, bias, N, C, 4 * C, stream);
    gelu_forward(g, h, N, 4 * C, tanh_form, stream);
}

// hidden_backward: dh (N,4C) = dout (N,C) weight (C,4C) times gelu'(h), dbias (4C) += its column
// sums, dbias_out (C) += those of dout. partial (COLUMN_SLICES,5C): scratch.
static void hidden_backward(floatX *dh, float *dbias, float *dbias_out, float *partial,
                            const floatX *dout, const floatX *h, const floatX *weight, size_t N,
                            size_t C, int tanh_form, cudaStream_t stream)
{
    const size_t H = 4 * C;
#ifdef PRECISION_BF16
    if (hidden_fused(N, C)) {
        const size_t slots = slab_slots(N, C);
        hidden_launch(dh, NULL, partial, dout, h, weight, NULL, N, C, tanh_form, stream);
        slices_sum(dbias, dbias_out, partial, slots, H, slots, C, H, 0, stream);
        return;
    }
#endif
    float *rest = partial + COLUMN_SLICES * H;
    matmul_backward_input(dh, dout, weight, N, H, C, stream);
    gelu_backward(dh, dbias, partial, dh, h, N, H, tanh_form, stream);
    bias_slices(rest, dout, N, C, C, stream);
    slices_sum(dbias_out, NULL, rest, COLUMN_SLICES, C, 0, 0, C, 0, stream);
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding, published weights.  (ports train_gpt2.c[model])

typedef struct {
    int model, causal, layers, heads, channels, task; // model: GPT2, TRANSFORMER or LINEAR
    const char *init_from;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *wpe, *ln1_w, *ln1_b, *qkv_w, *qkv_b, *proj_w, *proj_b, *ln2_w, *ln2_b;
    float *patch_w, *cls, *fc_w, *fc_b, *out_w, *out_b, *lnf_w, *lnf_b, *head_w;
} Params;

// What matrix products read, in floatX; head_w (Vp,C): rows from V on 0; if it is tied, of wte.
typedef struct {
    floatX *qkv_w, *qkv_b, *proj_w, *fc_w, *fc_b, *out_w, *head_w, *patch_w;
    floatX *proj_b, *out_b;
} Copies;

typedef struct {
    floatR *x, *mid;
    float *mean1, *rstd1, *mean2, *rstd2, *mean_y, *rstd_y, *lse, *norm, *logits, *losses;
    float *patches;
    floatX *r1, *qkv, *o, *r2, *h, *g, *y, *rounded;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch: sums in slices, of
// a layer's weights (bias_sums: of its MLP's biases) until the layer ends.
typedef struct {
    float *partial, *stats, *qkv_sums, *proj_sums, *fc_sums, *out_sums, *bias_sums;
    floatX *dx, *dr, *dqkv, *d_o, *dh, *dlogits;
    Asked asked;
} Dacts;

// Decoding: what the layers remember (qkv so far, or the state), tokens read, residual stream,
// means and 1/deviations (2,D), log-sum-exps, logits.
typedef struct {
    floatX *cache;
    int *tokens;
    floatR *x;
    float *state, *moments, *lse, *logits;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, NH, L, decode_B, positions; // positions: that are learned
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

#define MODELS "gpt2|transformer|linear-transformer"

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    static const char *const names[] = {"gpt2", "transformer", "linear-transformer"};
    return names[c->model];
}

// params_plan: the table of parameters; patch: numbers of a patch, 0: tokens. A tensor whose first
// dimension is 0 does not exist: gpt2's alone are what norms learn and attention's biases, tokens'
// alone wte and a head that is tied to it.
static void params_plan(Model *m, size_t patch)
{
    const size_t L = m->L, C = m->C, V = m->V, gpt2 = m->config.model == GPT2;
    const size_t L_gpt2 = gpt2 ? L : 0, C_gpt2 = gpt2 ? C : 0, V_head = gpt2 && !patch ? 0 : V;
    const double std = 0.02, out_std = 0.02 / sqrt(2 * (double)L), embed_std = gpt2 ? 0.02 : 1;
    const int decay = gpt2 ? DECAY : NO_DECAY; // the tied embedding is a matrix like others
    const Tensor params[] = {
        {"wte", {patch ? 0 : V, C}, INIT_NORMAL(embed_std), decay, 1, offsetof(Params, wte)},
        {"wpe", {m->positions, C}, INIT_NORMAL(embed_std), decay, 1, offsetof(Params, wpe)},
        {"ln1_w", {L_gpt2, C}, INIT_ONE, NO_DECAY, 1, offsetof(Params, ln1_w)},
        {"ln1_b", {L_gpt2, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, ln1_b)},
        {"qkv_w", {L, 3 * C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, qkv_w)},
        {"qkv_b", {L_gpt2, 3 * C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, qkv_b)},
        {"proj_w", {L, C, C}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, proj_w)},
        {"proj_b", {L_gpt2, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, proj_b)},
        {"ln2_w", {L_gpt2, C}, INIT_ONE, NO_DECAY, 1, offsetof(Params, ln2_w)},
        {"ln2_b", {L_gpt2, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, ln2_b)},
        {"fc_w", {L, 4 * C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, fc_w)},
        {"fc_b", {L, 4 * C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, fc_b)},
        {"out_w", {L, C, 4 * C}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, out_w)},
        {"out_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, out_b)},
        {"lnf_w", {C_gpt2}, INIT_ONE, NO_DECAY, 1, offsetof(Params, lnf_w)},
        {"lnf_b", {C_gpt2}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, lnf_b)},
        {"head_w", {V_head, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
        {"patch_w", {patch ? C : 0, patch}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, patch_w)},
        {"cls", {patch ? C : 0}, INIT_NORMAL(embed_std), decay, 1, offsetof(Params, cls)},
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
}

// partial_size: elements of scratch for sums in slices that are added up at once: of the head, of
// tokens or patches, of the norms' weights.
static size_t partial_size(const Model *m, size_t patch)
{
    const size_t N = m->B * m->T, C = m->C, V = m->V;
    return std::max({input_scratch(N, V, C, patch), weight_scratch(m->rows, m->Vp * C, 0),
                     COLUMN_SLICES * 2 * C});
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config;
    m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t NH = m->NH = (size_t)config->heads, HS = C / NH, Vp = m->Vp = (V + 31) / 32 * 32;
    const size_t D = m->decode_B = !config->causal ? 0 : B < 32 ? B : 32, two = D ? 2 : 0;
    const size_t linear = config->model == LINEAR ? L : 0, softmax = L - linear;
    const size_t patch = m->device.D = task_patch(m->task, &config->task_options);
    const size_t positions = m->positions = task_longest(shape), N = B * T;
    const size_t L_gpt2 = config->model == GPT2 ? L : 0, B_gpt2 = config->model == GPT2 ? B : 0;
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    const DeviceTensor copies[] = {
        DEVICE("qkv_w", floatX, Copies, qkv_w, L, 3 * C, C),
        DEVICE("qkv_b", floatX, Copies, qkv_b, L_gpt2, 3 * C),
        DEVICE("proj_w", floatX, Copies, proj_w, L, C, C),
        DEVICE("fc_w", floatX, Copies, fc_w, L, 4 * C, C),
        DEVICE("fc_b", floatX, Copies, fc_b, L, 4 * C),
        DEVICE("proj_b", floatX, Copies, proj_b, L_gpt2, C),
        DEVICE("out_b", floatX, Copies, out_b, L, C),
        DEVICE("out_w", floatX, Copies, out_w, L, C, 4 * C),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
        DEVICE("patch_w", floatX, Copies, patch_w, patch ? C : 0, patch),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", floatR, Acts, x, L + 1, B, T, C), DEVICE("r1", floatX, Acts, r1, L, B, T, C),
        DEVICE("mean1", float, Acts, mean1, L_gpt2, B, T),
        DEVICE("rstd1", float, Acts, rstd1, L, B, T),
        DEVICE(linear ? "features_v" : "qkv", floatX, Acts, qkv, L, B, T, 3 * C),
        DEVICE("lse", float, Acts, lse, softmax, B, NH, T),
        DEVICE("normaliser", float, Acts, norm, linear, B, NH, T),
        DEVICE("o", floatX, Acts, o, L, B, T, C), DEVICE("mid", floatR, Acts, mid, L, B, T, C),
        DEVICE("r2", floatX, Acts, r2, L, B, T, C),
        DEVICE("mean2", float, Acts, mean2, L_gpt2, B, T),
        DEVICE("rstd2", float, Acts, rstd2, L, B, T),
        DEVICE("h", floatX, Acts, h, L, B, T, 4 * C), DEVICE("g", floatX, Acts, g, L, B, T, 4 * C),
        DEVICE("y", floatX, Acts, y, B, T, C), DEVICE("mean_y", float, Acts, mean_y, B_gpt2, T),
        DEVICE("rstd_y", float, Acts, rstd_y, B, T),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
        DEVICE("patches", float, Acts, patches, patch ? B : 0, T, patch),
        DEVICE("rounded_patches", floatX, Acts, rounded, patch ? B : 0, T, patch),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("dqkv", floatX, Dacts, dqkv, B, T, 3 * C),
        DEVICE("do", floatX, Dacts, d_o, B, T, C), DEVICE("dh", floatX, Dacts, dh, B, T, 4 * C),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("stats", float, Dacts, stats, B, NH, T, 2),
        DEVICE("partial", float, Dacts, partial, partial_size(m, patch)),
        DEVICE("qkv_sums", float, Dacts, qkv_sums, weight_scratch(N, 3 * C * C, 3 * C)),
        DEVICE("proj_sums", float, Dacts, proj_sums, weight_scratch(N, C * C, C)),
        DEVICE("fc_sums", float, Dacts, fc_sums, weight_scratch(N, 4 * C * C, 0)),
        DEVICE("out_sums", float, Dacts, out_sums, weight_scratch(N, 4 * C * C, 0)),
        DEVICE("bias_sums", float, Dacts, bias_sums, COLUMN_SLICES * 5 * C),
    };
    const DeviceTensor decoder[] = {
        DEVICE("cache", floatX, Decoder, cache, D ? softmax : 0, D, positions, 3 * C),
        DEVICE("state", float, Decoder, state, D ? linear : 0, D, NH, HS * (HS + 1)),
        DEVICE("tokens", int, Decoder, tokens, D), DEVICE("x", floatR, Decoder, x, D, C),
        DEVICE("moments", float, Decoder, moments, two, D),
        DEVICE("lse", float, Decoder, lse, D, NH), DEVICE("logits", float, Decoder, logits, D, Vp),
    };
    params_plan(m, patch);
    device_plan(&m->copies_arena, "weights in " PRECISION_NAME, ROWS(copies));
    device_plan(&m->acts_arena, "activations", ROWS(acts));
    device_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    device_plan(&m->decoder_arena, "decoding state", ROWS(decoder));
}

// model_copies: which parameters have copies in floatX, and where; and where patches go.
static void model_copies(Model *m)
{
    const size_t L = m->L, C = m->C, w = L * C * C;
    const Params p = m->params;
    const Copies c = m->copies;
    const WeightCopy copies[] = {{p.qkv_w, c.qkv_w, 3 * w, 0},
                                 {p.qkv_b, c.qkv_b, 3 * L * C, 0},
                                 {p.proj_w, c.proj_w, w, 0},
                                 {p.fc_w, c.fc_w, 4 * w, 0},
                                 {p.fc_b, c.fc_b, 4 * L * C, 0},
                                 {p.proj_b, c.proj_b, L * C, 0},
                                 {p.out_b, c.out_b, L * C, 0},
                                 {p.out_w, c.out_w, 4 * w, 0},
                                 {p.head_w ? p.head_w : p.wte, c.head_w, m->V * C, 0},
                                 {p.patch_w, c.patch_w, m->device.D * C, 0}};
    device_pieces(&m->device, ROWS(copies));
    device_patches(&m->device, m->acts.patches);
}

// model_flops: floating-point operations of one update: per token 6 a weight, the head's included,
// and per channel, layer and token 12 a pair of positions, or 12 HS with a state.
static double model_flops(const Model *m)
{
    double pairs = m->config.causal ? ((double)m->T + 1) / 2 : (double)m->T;
    double mixed = m->config.model == LINEAR ? (double)(m->C / m->NH) : pairs;
    double weights = (double)(m->L * 12 * m->C * m->C + m->V * m->C * m->rows / (m->B * m->T));
    return (double)m->config.training.accumulate * (double)(m->B * m->T) *
           (6 * weights + 12 * (double)(m->L * m->C) * mixed);
}

// from: element n of x, NULL where x does not exist.
template <typename X> static X *from(X *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, heads = n * m->NH;
    const Acts a = m->acts;
    return {.x = a.x + C, .mid = a.mid + C, .mean1 = from(a.mean1, n), .rstd1 = a.rstd1 + n,
            .mean2 = from(a.mean2, n), .rstd2 = a.rstd2 + n, .lse = from(a.lse, heads),
            .norm = from(a.norm, heads), .r1 = a.r1 + C, .qkv = a.qkv + 3 * C, .o = a.o + C,
            .r2 = a.r2 + C, .h = a.h + 4 * C, .g = a.g + 4 * C};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Params *p, size_t l, size_t C)
{
    const size_t b = l * C, w = l * C * C;
    return {.ln1_w = from(p->ln1_w, b), .ln1_b = from(p->ln1_b, b), .qkv_w = p->qkv_w + 3 * w,
            .qkv_b = from(p->qkv_b, 3 * b), .proj_w = p->proj_w + w,
            .proj_b = from(p->proj_b, b), .ln2_w = from(p->ln2_w, b),
            .ln2_b = from(p->ln2_b, b), .fc_w = p->fc_w + 4 * w, .fc_b = p->fc_b + 4 * b,
            .out_w = p->out_w + 4 * w, .out_b = p->out_b + b};
}

// layer_copies: the weights of layer l in floatX.
static Copies layer_copies(const Copies *c, size_t l, size_t C)
{
    const size_t b = l * C, w = l * C * C;
    return {.qkv_w = c->qkv_w + 3 * w, .qkv_b = from(c->qkv_b, 3 * b), .proj_w = c->proj_w + w,
            .fc_w = c->fc_w + 4 * w, .fc_b = c->fc_b + 4 * b, .out_w = c->out_w + 4 * w,
            .head_w = c->head_w, .proj_b = from(c->proj_b, b), .out_b = c->out_b + b};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, L = m->L, N = B * T;
    const int causal = m->config.causal, gpt2 = m->config.model == GPT2;
    const Params all = m->params;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    cudaStream_t stream = device->stream;
    input_forward(acts.x, acts.rounded, device, all.wte, m->copies.patch_w, all.cls, all.wpe, B, T,
                  C, stream);
    for (size_t l = 0; l < L; l++) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(&m->params, l, C);
        const Copies w = layer_copies(&m->copies, l, C);
        norm_forward(k.r1, k.mean1, k.rstd1, k.x, p.ln1_w, p.ln1_b, N, C, stream);
        matmul_forward(k.qkv, k.r1, w.qkv_w, w.qkv_b, N, C, 3 * C, stream);
        if (k.norm)
            linear_attention_forward(k.o, k.norm, k.qkv, B, T, C, NH, causal, stream);
        else
            attention_forward(k.o, k.lse, k.qkv, B, T, C, NH, causal, stream);
        matmul_residual(k.mid, k.x, k.o, w.proj_w, w.proj_b, N, C, C, stream);
        norm_forward(k.r2, k.mean2, k.rstd2, k.mid, p.ln2_w, p.ln2_b, N, C, stream);
        hidden_forward(k.g, k.h, k.r2, w.fc_w, w.fc_b, N, C, gpt2, stream);
        matmul_residual(k.x + N * C, k.mid, k.g, w.out_w, w.out_b, N, 4 * C, C, stream);
    }
    norm_forward(acts.y, acts.mean_y, acts.rstd_y, acts.x + L * N * C, all.lnf_w, all.lnf_b, N, C,
                 stream);
    const Asked asked = m->dacts.asked;
    const floatX *y = asked_gather(asked, acts.y, device->targets, N, m->rows, C, stream);
    matmul_residual<float>(acts.logits, NULL, y, m->copies.head_w, NULL, m->rows, C, m->Vp, stream);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, asked.where, device->input, N, m->rows, m->V, m->Vp, stream);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, L = m->L, N = B * T;
    const int causal = m->config.causal, gpt2 = m->config.model == GPT2;
    const Params all = m->params, sums = m->grads;
    const Acts acts = m->acts;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(sums.head_w ? sums.head_w : sums.wte, 0, NULL, d.partial, d.dlogits,
                           asked_or(d.asked, acts.y), m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, d.dr), d.dlogits, m->copies.head_w, m->rows, C, m->Vp,
                          stream);
    asked_scatter(d.dr, d.asked, N, C, stream);
    norm_backward(d.dx, sums.lnf_w, sums.lnf_b, d.partial, d.dr, acts.y, acts.mean_y, acts.rstd_y,
                  acts.x + L * N * C, all.lnf_w, N, C, 1, stream);
    for (size_t l = L; l-- > 0;) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(&m->params, l, C), g = layer_params(&m->grads, l, C);
        const Copies w = layer_copies(&m->copies, l, C);
        slices_wait();
        matmul_backward_weight(g.out_w, 0, NULL, d.out_sums, d.dx, k.g, N, 4 * C, C, C, 1, stream);
        hidden_backward(d.dh, g.fc_b, g.out_b, d.bias_sums, d.dx, k.h, w.out_w, N, C, gpt2, stream);
        matmul_backward_weight(g.fc_w, 0, NULL, d.fc_sums, d.dh, k.r2, N, C, 4 * C, 4 * C, 1,
                               stream);
        matmul_backward_input(d.dr, d.dh, w.fc_w, N, C, 4 * C, stream);
        norm_backward(d.dx, g.ln2_w, g.ln2_b, d.partial, d.dr, k.r2, k.mean2, k.rstd2, k.mid,
                      p.ln2_w, N, C, 0, stream);
        matmul_backward_weight(g.proj_w, 0, g.proj_b, d.proj_sums, d.dx, k.o, N, C, C, C, 1,
                               stream);
        matmul_backward_input(d.d_o, d.dx, w.proj_w, N, C, C, stream);
        if (k.norm)
            linear_attention_backward(d.dqkv, d.d_o, k.o, k.norm, k.qkv, d.stats, B, T, C, NH,
                                      causal, stream);
        else
            attention_backward(d.dqkv, d.d_o, k.o, k.lse, k.qkv, d.stats, B, T, C, NH, causal,
                               stream);
        matmul_backward_weight(g.qkv_w, 0, g.qkv_b, d.qkv_sums, d.dqkv, k.r1, N, C, 3 * C, 3 * C,
                               1, stream);
        matmul_backward_input(d.dr, d.dqkv, w.qkv_w, N, C, 3 * C, stream);
        norm_backward(d.dx, g.ln1_w, g.ln1_b, d.partial, d.dr, k.r1, k.mean1, k.rstd1, k.x, p.ln1_w,
                      N, C, 0, stream);
        slices_flush(stream);
    }
    input_backward(sums.wte, sums.patch_w, sums.cls, sums.wpe, d.partial, d.dx, acts.rounded,
                   &m->device, B, T, m->V, C, stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. Dies when t is past the T learned positions.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, NH = m->NH, T = m->positions, V = m->V, Vp = m->Vp, HS = C / NH;
    const int gpt2 = m->config.model == GPT2;
    const Params all = m->params;
    const Dacts d = m->dacts;
    const Decoder memory = m->decoder;
    float *mean = memory.moments, *rstd = memory.moments + m->decode_B;
    cudaStream_t stream = m->device.stream;
    decode_check(t, T);
    CUDA_CHECK(cudaMemcpyAsync(memory.tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(memory.x, memory.tokens, all.wte, all.wpe + t * C, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        const Params p = layer_params(&m->params, l, C);
        const Copies w = layer_copies(&m->copies, l, C);
        const size_t at = l * m->decode_B * C;
        norm_forward(d.dr, mean, rstd, memory.x, p.ln1_w, p.ln1_b, D, C, stream);
        matmul_forward(d.dqkv, d.dr, w.qkv_w, w.qkv_b, D, C, 3 * C, stream);
        if (m->config.model == LINEAR)
            linear_attention_decode(d.d_o, memory.state + at * (HS + 1), d.dqkv, D, t, C, NH,
                                    stream);
        else
            attention_decode(d.d_o, memory.lse, memory.cache + at * 3 * T, d.dqkv, D, t, T, C, NH,
                             stream);
        matmul_residual(memory.x, memory.x, d.d_o, w.proj_w, w.proj_b, D, C, C, stream);
        norm_forward(d.dr, mean, rstd, memory.x, p.ln2_w, p.ln2_b, D, C, stream);
        matmul_forward(d.dh, d.dr, w.fc_w, w.fc_b, D, C, 4 * C, stream);
        gelu_forward(d.dh, d.dh, D, 4 * C, gpt2, stream);
        matmul_residual(memory.x, memory.x, d.dh, w.out_w, w.out_b, D, 4 * C, C, stream);
    }
    norm_forward(d.dr, mean, rstd, memory.x, all.lnf_w, all.lnf_b, D, C, stream);
    matmul_residual<float>(memory.logits, NULL, d.dr, m->copies.head_w, NULL, D, C, Vp, stream);
    return device_logits(&m->device, memory.logits, D, V, Vp, m->decode_B);
}

// Where a published GPT-2 keeps each parameter; its linear layers are transposed, masks ignored.
static const Published PUBLISHED[] = {
    {"wte", "wte.weight", 0, 0, 0},           {"wpe", "wpe.weight", 0, 0, 1},
    {"ln1_w", "ln_1.weight", 1, 0, 0},        {"ln1_b", "ln_1.bias", 1, 0, 0},
    {"qkv_w", "attn.c_attn.weight", 1, 1, 0}, {"qkv_b", "attn.c_attn.bias", 1, 0, 0},
    {"proj_w", "attn.c_proj.weight", 1, 1, 0}, {"proj_b", "attn.c_proj.bias", 1, 0, 0},
    {"ln2_w", "ln_2.weight", 1, 0, 0},        {"ln2_b", "ln_2.bias", 1, 0, 0},
    {"fc_w", "mlp.c_fc.weight", 1, 1, 0},     {"fc_b", "mlp.c_fc.bias", 1, 0, 0},
    {"out_w", "mlp.c_proj.weight", 1, 1, 0},  {"out_b", "mlp.c_proj.bias", 1, 0, 0},
    {"lnf_w", "ln_f.weight", 0, 0, 0},        {"lnf_b", "ln_f.bias", 0, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

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
// [main] Options, presets, start.  (ports train_gpt2.c[main])

#define PAPER "--layers 12 --heads 1 --channels 192 --batch-size 320 --lr 5e-4 --warmup 50 " \
    "--schedule constant --steps 2000"
#define TEXT "--task text --layers 6 --heads 6 --channels 384 --batch-size 64 --context 256 "
#define WEB "--model gpt2 --task text --vocab gpt2 --context 1024 --batch-size 4 " \
    "--accumulate 128 --steps 19073 --lr 6e-4 --warmup 700 --beta2 0.95 --weight-decay 0.1 "
static const Preset PRESETS[] = {
    {"main", "--string-size 32 --channels 128 --lr 1e-3 --schedule constant --steps 300",
     "32 letters on two cores"},
    {"copy-s16", PAPER " --string-size 16", "the paper's Transformer, Fig. 4"},
    {"copy-s32", PAPER " --string-size 32", "the paper's Transformer, Fig. 4"},
    {"copy-s64", PAPER " --string-size 64", "the paper's Transformer, Fig. 4"},
    {"copy-s128", PAPER " --string-size 128", "the paper's Transformer, Fig. 3 and 4"},
    {"copy-s256", PAPER " --string-size 256", "the paper's Transformer, Fig. 4"},
    {"shakespeare", TEXT "--lr 1e-3 --lr-min 1e-4 --warmup 100 --beta2 0.99 --steps 400 "
     "--eval-every 25", "characters of --text FILE, a GPU's work; 2500 steps memorise 1 MB"},
    {"gpt2", WEB "--layers 12 --heads 12 --channels 768", "124M, updates of half a million tokens"},
    {"gpt2-medium", WEB "--layers 24 --heads 16 --channels 1024", "355M"},
    {"gpt2-large", WEB "--layers 36 --heads 20 --channels 1280", "774M"},
    {"gpt2-xl", WEB "--layers 48 --heads 25 --channels 1600", "1558M"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"model", OPT_CHOICE, &c->model, "transformer", 0, 0, MODELS, DEFINES_MODEL,
         "the paper's baselines, or GPT-2"},
        {"causal", OPT_CHOICE, &c->causal, "yes", 0, 0, "no|yes", DEFINES_MODEL, "no: all see all"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"heads", OPT_INT, &c->heads, "2", 1, 1 << 16, "NH", DEFINES_MODEL, "of attention"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "NH times HS"},
        {"init-from", OPT_STRING, &c->init_from, NULL, 0, 0, "FILE", RUNTIME,
         "start gpt2 from published weights (safetensors)"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    if (c->channels % c->heads)
        die(EXIT_USAGE, "--channels %d: expected a multiple of --heads %d: every head has as many "
            "channels\nhint: --heads %d --channels %d", c->channels, c->heads, c->heads,
            (c->channels / c->heads + 1) * c->heads);
    task_causal_check(&TASKS[c->task], &c->task_options, c->causal);
    if (c->init_from && c->model != GPT2)
        die(EXIT_USAGE, "--init-from: expected --model gpt2, whose weights the file holds, got "
            "--model %s", model_name(c));
    if (c->init_from && (c->training.load || c->training.resume || c->training.embed_std > 0))
        die(EXIT_USAGE, "--init-from and --%s: expected one of them, each gives first weights",
            c->training.load ? "load" : c->training.resume ? "resume" : "embed-std");
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g FLOPs an update", model_flops(&m));
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
                  "train_gpt2_gpu: GPT-2 and Transformers on the GPU. Without options: copying 16 "
                  "letters.", preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 1);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    char name[64];
    snprintf(name, sizeof name, "%s, " PRECISION_NAME, model_name(&config));
    training_print(name, &model.weights, "wte,wpe", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model.device.name = cuda_start();
    attention_check((size_t)(config.channels / config.heads));
    cuda_memory_check(model_bytes(&model));
    const size_t free_bytes = cuda_memory_free();
    model_alloc(&model);
    printf("GPU memory: %.2f GiB taken\n", (double)(free_bytes - cuda_memory_free()) / GIB);
    if (config.init_from)
        published_load(&model.weights.params, config.init_from, PUBLISHED, model.L,
                       "lm_head.weight", "wte");
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
