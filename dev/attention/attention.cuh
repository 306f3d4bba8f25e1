// attention.cuh: attention on the GPU, forward and backward, softmax and linear (elu + 1) weights.
//
// qkv (B,T,3C) rows hold q at 0, k at C, v at 2C, head h at h HS in each. With s_tu = q_t.k_u:
//   softmax  out_t = sum_u p_tu v_u,  p_tu = exp(s_tu / sqrt(HS) - lse_t)
//   linear   out_t = sum_u p_tu v_u,  p_tu = phi(q_t).phi(k_u) / norm_t,  norm_t = sum_u + 1e-6
// over u <= t, or all u. Backward recomputes p from qkv and lse (norm); with D_t = dout_t.out_t
//   ds_tu = p_tu (dout_t.v_u - D_t)          linear: (dout_t.v_u - D_t) / norm_t
//   dq_t = sum_u ds_tu k_u,  dk_u = sum_t ds_tu q_t,  dv_u = sum_t p_tu dout_t
// where softmax has 1/sqrt(HS) on dq and dk, linear phi of q and k in the sums and phi' of them on
// the results. Nothing of size T x T exists and nothing is added atomically.
//
// Two paths: BF16 with HS 64, 128 or 192 in tiles on the tensor cores (FlashAttention's order:
// arXiv 2205.14135, 2307.08691, but dq by a kernel of its own, which makes 7 products of 5 and
// needs no sum across blocks); every other HS, and FP32, a warp a row.
//
// Needs floatX, WARP, LOG2E, warp_sum, exp2_fast and LAUNCH from whoever includes it.
#ifndef SEQ_DEV_ATTENTION_CUH
#define SEQ_DEV_ATTENTION_CUH

#define LN2 0.6931471805599453f
#define LINEAR_EPS 1e-6f

// WITH_FLAG: the statement with NAME as a constant 0 or 1, for kernels that have it as a template.
#define WITH_FLAG(NAME, flag, ...) \
    do { \
        if (flag) { enum { NAME = 1 }; __VA_ARGS__; } \
        else { enum { NAME = 0 }; __VA_ARGS__; } \
    } while (0)

// phi: the linear Transformer's feature map, elu(x) + 1 without its cancellation; 0 below -87.
static __device__ inline float phi(float x)
{
    return x > 0 ? x + 1 : exp2_fast(LOG2E * x);
}

// phi_slope: phi'(x).
static __device__ inline float phi_slope(float x)
{
    return x > 0 ? 1 : exp2_fast(LOG2E * x);
}

#ifdef PRECISION_BF16
// ---- instructions

// mma: c (16x8) += a (16x16) b (16x8), bf16 in, fp32 out. Lane 4g + t holds of c rows g and g+8 at
// columns 2t, 2t+1; of a the same rows at k = 2t, 2t+1, then k + 8; of b column g at the same k.
static __device__ inline void mma(float c[4], uint4 a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
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

// ---- tiles: [ROWS][HS + 8], so that ldmatrix meets every bank once; blocks of WARPS warps

// row_at, column_at: where in a 16x16 tile, its rows ld apart, ldmatrix's lane reads.
static __device__ inline int row_at(int lane, int ld) { return lane % 16 * ld + lane / 16 * 8; }
static __device__ inline int column_at(int lane, int ld)
{
    return (lane / 16 * 8 + lane % 8) * ld + lane / 8 % 2 * 8;
}

// pack2: two floats as bf16, x in the low half.
static __device__ inline uint32_t pack2(float x, float y)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

// accumulator_pack: columns 0-15 of a 16x16 product, two accumulators of mma, as an a of mma.
static __device__ inline uint4 accumulator_pack(const float c[2][4])
{
    return {pack2(c[0][0], c[0][1]), pack2(c[0][2], c[0][3]), pack2(c[1][0], c[1][1]),
            pack2(c[1][2], c[1][3])};
}

// tile_fetch: start copying rows row .. row+ROWS-1 of x (T,HS), `stride` apart, into a tile; rows
// from T on become 0. A thread always has the same elements of a tile: see tile_phi.
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

// tile_phi: the tile = phi of it; each thread does what it copied itself, so copy_wait is enough.
template <int HS, int ROWS, int WARPS> static __device__ inline void tile_phi(floatX *tile)
{
    floatX *x = tile + threadIdx.x / 8 * (HS + 8) + threadIdx.x % 8 * 8;
#pragma unroll 1
    for (int i = 0; i + (int)threadIdx.x / 8 < ROWS; i += 4 * WARPS)
#pragma unroll
        for (int c = 0; c < HS; c += 64)
#pragma unroll
            for (int k = 0; k < 8; k += 4) { // fewer registers than 8 at once
                Pack<floatX, 4> *p = (Pack<floatX, 4> *)(x + i * (HS + 8) + c + k), v = *p;
#pragma unroll
                for (int n = 0; n < 4; n++)
                    v.v[n] = (floatX)phi((float)v.v[n]);
                *p = v;
            }
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

// ---- forward

// forward_mask: s, a warp's products of 16 MT queries from `row` and OT keys from `key`, = value
// where the key does not exist or comes after the query.
template <int MT, int OT>
static __device__ inline void forward_mask(float s[MT][OT / 8][4], float value, int row, int key,
                                           int T, int causal)
{
    row += threadIdx.x % WARP / 4, key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < MT * OT / 2; i++) {
        const int m = i / (OT / 2), n = i / 4 % (OT / 8), u = key + 8 * n + i % 2;
        if (u >= T || (causal && u > row + 16 * m + i % 4 / 2 * 8))
            s[m][n][i % 4] = value;
    }
}

// softmax_step: s = p relative to 2^top, from q.k, and sum += it. Where a row's largest logit has
// outgrown its top by 2^8, every top moves up to its row's largest, and o and sum with it: what p
// rounds to does not depend on top.
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

// forward_store: out and lse (linear: norm) of a warp's 16 MT queries of one head, from `row`.
template <int HS, int LINEAR, int MT>
static __device__ inline void forward_store(floatX *out, float *lse, const float o[MT][HS / 8][4],
                                            const float top[MT][2], const float sum[MT][2],
                                            int head, int row, int T, int C, int NH)
{
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const int u = row + 16 * (i / 2) + 8 * (i % 2) + g;
        float total = sum[i / 2][i % 2];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        total += LINEAR ? LINEAR_EPS : 0;
        const float inverse = 1 / total;
        if (u >= T)
            continue;
        if (t == 0)
            lse[(size_t)head * T + u] = LINEAR ? total : LN2 * (top[i / 2][i % 2] + log2f(total));
        floatX *y = out + ((size_t)(head / NH) * T + u) * C + head % NH * HS + 2 * t;
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
            *(uint32_t *)(y + 8 * n) = pack2(o[i / 2][n][i % 2 * 2] * inverse,
                                             o[i / 2][n][i % 2 * 2 + 1] * inverse);
    }
}

// forward_bytes: shared memory of a block of attention_forward_kernel.
static size_t forward_bytes(int HS, int WARPS, int MT, int OT)
{
    return (size_t)(16 * WARPS * MT + 4 * OT) * (HS + 8) * sizeof(floatX);
}

// attention_forward_kernel: out and lse (linear: norm) of 16 WARPS MT queries of one head: a warp
// has 16 MT of them and walks over the keys, OT at a time, the next already on their way.
template <int HS, int LINEAR, int WARPS, int MT, int OT, int BLOCKS>
static __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)
    attention_forward_kernel(floatX *out, float *lse, const floatX *qkv, int T, int C, int NH,
                             int causal)
{
    enum { ROWS = 16 * WARPS * MT, LD = HS + 8, STAGE = 2 * OT * LD };
    extern __shared__ __align__(16) floatX tiles[]; // q [ROWS][LD], then twice k, v [OT][LD]
    const int lane = threadIdx.x % WARP, blocks = (T + ROWS - 1) / ROWS;
    const int head = blockIdx.x / blocks;
    const int first = (blocks - 1 - blockIdx.x % blocks) * ROWS; // causal: the longest come first
    const int row = first + threadIdx.x / WARP * 16 * MT;        // of this warp
    const int last = ((causal ? min(first + ROWS, T) : T) - 1) / OT;
    const floatX *x = qkv + (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    float o[MT][HS / 8][4] = {}, top[MT][2], sum[MT][2] = {};
    for (int i = 0; i < 2 * MT; i++)
        top[i / 2][i % 2] = -INFINITY;
    tile_fetch<HS, ROWS, WARPS>(tiles, x, 3 * C, first, T);
    tile_fetch<HS, OT, WARPS>(tiles + ROWS * LD, x + C, 3 * C, 0, T);
    tile_fetch<HS, OT, WARPS>(tiles + (ROWS + OT) * LD, x + 2 * C, 3 * C, 0, T);
    for (int j = 0; j <= last; j++) {
        floatX *keys = tiles + ROWS * LD + j % 2 * STAGE;
        floatX *next = tiles + ROWS * LD + (j + 1) % 2 * STAGE;
        copy_wait();
        if (LINEAR)
            tile_phi<HS, OT, WARPS>(keys);
        if (LINEAR && j == 0)
            tile_phi<HS, ROWS, WARPS>(tiles);
        __syncthreads(); // keys, v are there; nobody reads `next` any more
        if (j < last) {
            tile_fetch<HS, OT, WARPS>(next, x + C, 3 * C, (j + 1) * OT, T);
            tile_fetch<HS, OT, WARPS>(next + OT * LD, x + 2 * C, 3 * C, (j + 1) * OT, T);
        }
        if (row >= T || (causal && j * OT >= row + 16 * MT))
            continue;
        const floatX *own = tiles + (row - first) * LD + row_at(lane, LD);
        const floatX *k = keys + column_at(lane, LD), *v = keys + OT * LD + row_at(lane, LD);
        float s[MT][OT / 8][4] = {};
#pragma unroll
        for (int c = 0; c < HS; c += 16) {
            uint4 a[MT];
#pragma unroll
            for (int m = 0; m < MT; m++)
                a[m] = ldmatrix<0>(own + 16 * m * LD + c);
#pragma unroll
            for (int n = 0; n < OT / 16; n++) {
                const uint4 b = ldmatrix<0>(k + 16 * n * LD + c);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma(s[m][2 * n], a[m], b.x, b.y);
                    mma(s[m][2 * n + 1], a[m], b.z, b.w);
                }
            }
        }
        if ((j + 1) * OT > T || (causal && (j + 1) * OT > row + 1))
            forward_mask<MT, OT>(s, LINEAR ? 0 : -INFINITY, row, j * OT, T, causal);
        if (!LINEAR) // every row sees key 0, which comes first: from here on its top is above -inf
            softmax_step<HS, MT, OT>(s, o, top, sum);
#pragma unroll
        for (int i = 0; LINEAR && i < MT * OT / 2; i++)
            sum[i / (OT / 2)][i % 4 / 2] += s[i / (OT / 2)][i / 4 % (OT / 8)][i % 4];
#pragma unroll
        for (int n = 0; n < OT / 16; n++) {
            uint4 a[MT];
#pragma unroll
            for (int m = 0; m < MT; m++)
                a[m] = accumulator_pack(&s[m][2 * n]);
#pragma unroll
            for (int c = 0; c < HS / 16; c++) {
                const uint4 b = ldmatrix<1>(v + 16 * n * LD + 16 * c);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma(o[m][2 * c], a[m], b.x, b.y);
                    mma(o[m][2 * c + 1], a[m], b.z, b.w);
                }
            }
        }
    }
    forward_store<HS, LINEAR, MT>(out, lse, o, top, sum, head, row, T, C, NH);
}

// ---- backward

// backward_bytes: shared memory of a block of attention_backward_kernel.
static size_t backward_bytes(int HS, int WARPS, int OT)
{
    return (size_t)(2 * 16 * WARPS + 4 * OT) * (HS + 8) * sizeof(floatX) + 2 * OT * sizeof(float2);
}

// tile_stats: (log2 of the softmax's divisor, or 1 / norm; D = dout.out) of row `row` of out
// (T,HS), 0 from T on, to the four lanes of a row. dout: that row alone.
template <int HS, int LINEAR>
static __device__ inline float2 tile_stats(const floatX *dout, const floatX *out, const float *lse,
                                           int C, int row, int T)
{
    float D = 0, weight = 0;
    if (row < T) {
#pragma unroll
        for (int c = threadIdx.x % 4 * 8; c < HS; c += 32) {
            const Pack<floatX, 8> x = *(const Pack<floatX, 8> *)(out + (size_t)row * C + c);
            const Pack<floatX, 8> y = *(const Pack<floatX, 8> *)(dout + c);
#pragma unroll
            for (int i = 0; i < 8; i++)
                D += (float)x.v[i] * (float)y.v[i];
        }
        weight = LINEAR ? 1 / lse[row] : LOG2E * lse[row];
    }
    D += __shfl_xor_sync(~0u, D, 1);
    return {weight, D + __shfl_xor_sync(~0u, D, 2)};
}

// tile_store: rows row .. row+15 of dx, rows 3C apart, those below T = factor sum, a warp's 16 x HS
// accumulators. x not NULL: times phi' of it, the same rows of qkv.
template <int HS>
static __device__ inline void tile_store(floatX *dx, const float sum[HS / 8][4], const floatX *x,
                                         float factor, int C, int row, int T)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half + lane / 4;
        const size_t at = (size_t)r * 3 * C + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < HS / 8 && r < T; n++) {
            float y[2] = {factor * sum[n][2 * half], factor * sum[n][2 * half + 1]};
            if (x)
                for (int i = 0; i < 2; i++)
                    y[i] *= phi_slope((float)x[at + 8 * n + i]);
            *(uint32_t *)(dx + at + 8 * n) = pack2(y[0], y[1]);
        }
    }
}

// backward_step: a = q.k becomes p, b = dout.v becomes ds, for a warp's 16 rows from `row` and 8N
// others from `from`: SIDE 0: rows are queries, SIDE 1: keys. The queries' stats are own's, this
// lane's two, or others'. masked: not every pair is seen.
template <int HS, int LINEAR, int SIDE, int N>
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
        *p = LINEAR ? *p * z.x : exp2_fast(fmaf(*p, factor, -z.x));
        *ds = (*ds - z.y) * (LINEAR ? z.x : *p);
    }
    if (masked) { // selected, not multiplied: what an unseen pair gave may be infinite
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int r = row + i % 4 / 2 * 8 + lane / 4, c = from + i / 4 * 8 + 2 * t + i % 2;
            const int query = SIDE ? c : r, key = SIDE ? r : c;
            const bool seen = key < T && !(causal && key > query);
            const bool alone = !LINEAR && (causal ? query == 0 : T == 1); // p is 1 whatever q.k
            a[i / 4][i % 4] = seen ? a[i / 4][i % 4] : 0;
            b[i / 4][i % 4] = seen && !alone ? b[i / 4][i % 4] : 0;
        }
    }
}

// attention_backward_kernel: SIDE 0: dq of 16 WARPS queries of a head, and their stats (B,NH,T);
// SIDE 1, after it: dk, dv of as many keys. A warp owns 16 of them and walks over the others, the
// keys or the queries, OT at a time, the next already on their way.
template <int HS, int LINEAR, int SIDE, int WARPS, int OT, int BLOCKS>
static __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)
    attention_backward_kernel(floatX *dqkv, float2 *stats, const floatX *dout, const floatX *out,
                              const float *lse, const floatX *qkv, int T, int C, int NH, int causal)
{
    enum { ROWS = 16 * WARPS, LD = HS + 8, STAGE = 2 * OT * LD };
    enum { KEEP = HS <= 128 ? 2 : !SIDE, G = KEEP == 1 ? 2 : 1 }; // what registers allow
    extern __shared__ __align__(16) floatX tiles[]; // own [2][ROWS][LD], others [2][2][OT][LD]
    const int lane = threadIdx.x % WARP, t = lane % 4;
    const int blocks = (T + ROWS - 1) / ROWS, head = blockIdx.x / blocks, nth = blockIdx.x % blocks;
    const int first = (SIDE ? nth : blocks - 1 - nth) * ROWS; // causal: the longest come first
    const int row = first + threadIdx.x / WARP * 16;        // of this warp
    const int begin = SIDE && causal ? first / OT : 0;
    const int last = ((causal && !SIDE ? min(first + ROWS, T) : T) - 1) / OT;
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
    tile_fetch<HS, ROWS, WARPS>(own, SIDE ? k : q, 3 * C, first, T);
    tile_fetch<HS, ROWS, WARPS>(own + ROWS * LD, SIDE ? v : g, SIDE ? 3 * C : C, first, T);
    fetch(begin);
    own += (row - first) * LD + row_at(lane, LD);
    copy_wait();
    if (LINEAR)
        tile_phi<HS, ROWS, WARPS>(tiles);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < KEEP * HS / 16; i++) // tile, then column
        kept[i / (HS / 16)][i % (HS / 16)] =
            ldmatrix<0>(own + i / (HS / 16) * ROWS * LD + i % (HS / 16) * 16);
    for (int i = 0; !SIDE && i < 2; i++) {
        const int r = row + 8 * i + lane / 4;
        own_stats[i] = tile_stats<HS, LINEAR>(tiles + (ROWS + r - first) * LD, out + out_at,
                                              lse + (size_t)head * T, C, r, T);
        if (r < T && t == 0)
            stats[r] = own_stats[i];
    }
    for (int j = begin; j <= last; j++) {
        copy_wait();
        if (LINEAR)
            tile_phi<HS, OT, WARPS>(others + j % 2 * STAGE);
        __syncthreads(); // the others of j are there; nobody reads those of j - 1 any more
        if (j < last)
            fetch(j + 1);
        if (row >= T)
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
            backward_step<HS, LINEAR, SIDE, 2 * G>(
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
    tile_store<HS>(dqkv + at + (SIDE ? C : 0), dx, LINEAR ? qkv + at + (SIDE ? C : 0) : NULL,
                   LINEAR ? 1 : rsqrtf((float)HS), C, row, T);
    if (SIDE)
        tile_store<HS>(dqkv + at + 2 * C, (const float(*)[4])dv, NULL, 1, C, row, T);
}
#endif

// ---- any head size and type: a warp a row

enum { GENERAL_WARPS = 4 };

// attention_general_kernel: out and lse (linear: norm), a warp a query. Softmax as it goes: o and
// sum are relative to the largest logit so far. A warp has 2 HS floats of shared memory.
template <int LINEAR>
static __global__ void attention_general_kernel(floatX *out, float *lse, const floatX *qkv,
                                                size_t rows, int T, int C, int NH, int causal)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % WARP, HS = C / NH;
    const size_t row = blockIdx.x * (size_t)GENERAL_WARPS + threadIdx.x / WARP, head = row / T;
    const int t = row % T, end = causal ? t + 1 : T;
    const floatX *x = qkv + head / NH * T * 3 * C + head % NH * HS;
    float *q = shared + threadIdx.x / WARP * 2 * HS, *o = q + HS;
    const float factor = LOG2E * rsqrtf((float)HS);
    float top = -INFINITY, sum = 0;
    if (row >= rows)
        return;
    for (int h = lane; h < HS; h += WARP) {
        const float value = (float)x[(size_t)t * 3 * C + h];
        q[h] = LINEAR ? phi(value) : factor * value;
        o[h] = 0;
    }
    for (int u = 0; u < end; u++) {
        const floatX *k = x + (size_t)u * 3 * C + C, *v = k + C;
        float p = 0, shrink = 1;
        for (int h = lane; h < HS; h += WARP)
            p += q[h] * (LINEAR ? phi((float)k[h]) : (float)k[h]);
        p = warp_sum(p);
        if (!LINEAR) { // u = 0: shrink = 2^-inf = 0
            const float higher = fmaxf(top, p);
            shrink = exp2_fast(top - higher);
            p = exp2_fast(p - higher);
            top = higher;
        }
        sum = sum * shrink + p;
        for (int h = lane; h < HS; h += WARP)
            o[h] = o[h] * shrink + p * (float)v[h];
    }
    sum += LINEAR ? LINEAR_EPS : 0;
    for (int h = lane; h < HS; h += WARP)
        out[(head / NH * T + t) * C + head % NH * HS + h] = (floatX)(o[h] / sum);
    if (lane == 0)
        lse[row] = LINEAR ? sum : LN2 * (top + log2f(sum));
}

// attention_general_grad_kernel: SIDE 0: dq, a warp a query, and stats (B,NH,T) (see tile_stats);
// SIDE 1, after it: dk, dv, a warp a key. A warp has 4 HS floats of shared memory.
template <int LINEAR, int SIDE>
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
    const float scale = LINEAR ? 1 : rsqrtf((float)HS);
    float D = 0;
    if (row >= rows)
        return;
    for (int h = lane; h < HS; h += WARP) {
        a[h] = LINEAR ? phi((float)x[h]) : (float)x[h];
        b[h] = (float)y[h];
        dx[h] = dv[h] = 0;
        if (!SIDE)
            D += b[h] * (float)out[out_at + (size_t)own * C + h];
    }
    D = warp_sum(D);
    const float2 own_stats = {SIDE ? 0 : LINEAR ? 1 / lse[row] : LOG2E * lse[row], D};
    if (!SIDE && lane == 0)
        stats[row] = own_stats;
    for (int i = begin; i < end; i++) {
        const floatX *c = qkv + at + (SIDE ? 0 : C) + (size_t)i * 3 * C;
        const floatX *d = SIDE ? dout + out_at + (size_t)i * C : c + C;
        const float2 z = SIDE ? stats[head * T + i] : own_stats;
        const bool alone = !LINEAR && (causal ? (SIDE ? i : own) == 0 : T == 1); // p is 1
        float p = 0, ds = 0;
        for (int h = lane; h < HS; h += WARP) {
            p += a[h] * (LINEAR ? phi((float)c[h]) : (float)c[h]);
            ds += b[h] * (float)d[h];
        }
        p = warp_sum(p);
        p = LINEAR ? p * z.x : exp2_fast(p * (LOG2E * scale) - z.x);
        ds = alone ? 0 : (LINEAR ? z.x : p) * (warp_sum(ds) - z.y);
        for (int h = lane; h < HS; h += WARP) {
            dx[h] += ds * (LINEAR ? phi((float)c[h]) : (float)c[h]);
            if (SIDE)
                dv[h] += p * (float)d[h];
        }
    }
    floatX *to = dqkv + at + (SIDE ? C : 0) + (size_t)own * 3 * C;
    for (int h = lane; h < HS; h += WARP) {
        to[h] = (floatX)(dx[h] * (LINEAR ? phi_slope((float)x[h]) : scale));
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

// attention_fits: die unless C is a multiple of NH and a row's and a head's numbers fit an int.
static void attention_fits(size_t T, size_t C, size_t NH)
{
    if (NH == 0 || C == 0 || C % NH)
        die(EXIT_USAGE, "attention: %zu channels do not divide into %zu heads", C, NH);
    if (T > 1 << 24 || C > 1 << 24)
        die(EXIT_MEMORY, "attention: T = %zu, C = %zu, expected at most 2^24", T, C);
}

#ifdef PRECISION_BF16
// attention_forward_tiled, attention_backward_tiled: launch the tiles of one head size. WARPS, MT,
// OT: see the kernels. BLOCKS: blocks a multiprocessor shall have registers for.
template <int HS, int LINEAR, int WARPS, int MT, int OT, int BLOCKS>
static void attention_forward_tiled(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                                    size_t C, size_t NH, int causal, cudaStream_t stream)
{
    const size_t rows = 16 * WARPS * MT;
    LAUNCH((attention_forward_kernel<HS, LINEAR, WARPS, MT, OT, BLOCKS>),
           B * NH * ((T + rows - 1) / rows), WARPS * WARP, forward_bytes(HS, WARPS, MT, OT), stream,
           out, lse, qkv, (int)T, (int)C, (int)NH, causal);
}
template <int HS, int LINEAR, int SIDE, int WARPS, int OT, int BLOCKS>
static void attention_backward_tiled(floatX *dqkv, const floatX *dout, const floatX *out,
                                     const float *lse, const floatX *qkv, float *scratch, size_t B,
                                     size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    LAUNCH((attention_backward_kernel<HS, LINEAR, SIDE, WARPS, OT, BLOCKS>),
           B * NH * ((T + 16 * WARPS - 1) / (16 * WARPS)), WARPS * WARP,
           backward_bytes(HS, WARPS, OT), stream, dqkv, (float2 *)scratch, dout, out, lse,
           qkv, (int)T, (int)C, (int)NH, causal);
}
#endif

// attention_forward_general, attention_backward_general: launch what takes any head size.
static void attention_forward_general(floatX *out, float *lse, const floatX *qkv, size_t B,
                                      size_t T, size_t C, size_t NH, int causal, int linear,
                                      cudaStream_t stream)
{
    const size_t rows = B * NH * T, grid = (rows + GENERAL_WARPS - 1) / GENERAL_WARPS;
    WITH_FLAG(LINEAR, linear,
              LAUNCH(attention_general_kernel<LINEAR>, grid, GENERAL_WARPS * WARP,
                     GENERAL_WARPS * 2 * (C / NH) * 4, stream, out, lse, qkv, rows, (int)T, (int)C,
                     (int)NH, causal));
}
static void attention_backward_general(floatX *dqkv, const floatX *dout, const floatX *out,
                                       const float *lse, const floatX *qkv, float *scratch,
                                       size_t B, size_t T, size_t C, size_t NH, int causal,
                                       int linear, cudaStream_t stream)
{
    const size_t rows = B * NH * T, grid = (rows + GENERAL_WARPS - 1) / GENERAL_WARPS;
    const size_t bytes = GENERAL_WARPS * 4 * (C / NH) * 4;
    WITH_FLAG(LINEAR, linear,
              LAUNCH((attention_general_grad_kernel<LINEAR, 0>), grid, GENERAL_WARPS * WARP, bytes,
                     stream, dqkv, (float2 *)scratch, dout, out, lse, qkv, rows, (int)T, (int)C,
                     (int)NH, causal);
              LAUNCH((attention_general_grad_kernel<LINEAR, 1>), grid, GENERAL_WARPS * WARP, bytes,
                     stream, dqkv, (float2 *)scratch, dout, out, lse, qkv, rows, (int)T, (int)C,
                     (int)NH, causal));
}

// attention_forward_any: attention_forward or, linear, linear_attention_forward.
static void attention_forward_any(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                                  size_t C, size_t NH, int causal, int linear, cudaStream_t stream)
{
    attention_fits(T, C, NH);
    if (!attention_tiled(C / NH)) {
        attention_forward_general(out, lse, qkv, B, T, C, NH, causal, linear, stream);
        return;
    }
#ifdef PRECISION_BF16
#define FORWARD_TILED(HS, WARPS, MT, OT, BLOCKS) \
    attention_forward_tiled<HS, LINEAR, WARPS, MT, OT, BLOCKS>(out, lse, qkv, B, T, C, NH, causal, \
                                                               stream)
    WITH_FLAG(LINEAR, linear, switch (C / NH) {
        case 64: FORWARD_TILED(64, 4, 2, 32, 3); break;
        case 128: FORWARD_TILED(128, 4, 2, 32, 2); break;
        default: FORWARD_TILED(192, 6, 1, 32, 2);
    });
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
    attention_backward_tiled<HS, LINEAR, 0, WARPS, OT, DQ_BLOCKS>( \
        dqkv, dout, out, lse, qkv, scratch, B, T, C, NH, causal, stream), \
    attention_backward_tiled<HS, LINEAR, 1, WARPS, OT, DKV_BLOCKS>( \
        dqkv, dout, out, lse, qkv, scratch, B, T, C, NH, causal, stream)
    WITH_FLAG(LINEAR, linear, switch (C / NH) {
        case 64: BACKWARD_TILED(64, 4, 64, 3, 3); break;
        case 128: BACKWARD_TILED(128, 4, 32, 2, 2); break;
        default: BACKWARD_TILED(192, 4, 32, 2, 2);
    });
#endif
}

// attention_forward: out (B,T,C) = softmax attention of qkv (B,T,3C), NH heads of C/NH channels;
// lse (B,NH,T) = natural log of each row's sum of exp(q.k / sqrt(HS)), for the backward. qkv and
// out start at a multiple of 16 bytes.
static void attention_forward(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                              size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_forward_any(out, lse, qkv, B, T, C, NH, causal, 0, stream);
}

// attention_backward: dqkv (B,T,3C) = from dout (B,T,C) and what the forward had and left: out,
// lse, qkv. scratch: (B,NH,T,2) floats. A position that sees only itself gets dq = 0 exactly.
static void attention_backward(floatX *dqkv, const floatX *dout, const floatX *out,
                               const float *lse, const floatX *qkv, float *scratch, size_t B,
                               size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_backward_any(dqkv, dout, out, lse, qkv, scratch, B, T, C, NH, causal, 0, stream);
}

// linear_attention_forward: out (B,T,C) = attention with weights phi(q).phi(k) / norm, norm
// (B,NH,T) = their sum + 1e-6, phi = elu + 1; features that all underflow give 0.
static void linear_attention_forward(floatX *out, float *norm, const floatX *qkv, size_t B,
                                     size_t T, size_t C, size_t NH, int causal, cudaStream_t stream)
{
    attention_forward_any(out, norm, qkv, B, T, C, NH, causal, 1, stream);
}

// linear_attention_backward: dqkv (B,T,3C) = as attention_backward.
static void linear_attention_backward(floatX *dqkv, const floatX *dout, const floatX *out,
                                      const float *norm, const floatX *qkv, float *scratch,
                                      size_t B, size_t T, size_t C, size_t NH, int causal,
                                      cudaStream_t stream)
{
    attention_backward_any(dqkv, dout, out, norm, qkv, scratch, B, T, C, NH, causal, 1, stream);
}

#endif
