// gla_walk.cuh: gated linear attention on tensor cores, forward and backward, bf16 in and out.
//
//   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,  o_t = s S_t^T q_t          S (DK,DV), g <= 0, fp32
//
// S stays in registers, in fp32, while it walks through a sequence, ST = 16 tokens a step: a block
// of 16 is all that is ever looked at pair by pair, and there are no tiles between such blocks. For
// a step with S before it, D the gradient of S behind it, a_t = exp(g_t), w(u,t) = a_{u+1} ... a_t,
// w_t = w(-1,t) = a_0 ... a_t and v_u = w(u,15), all of them vectors over the keys i:
//   A_tu = s sum_i q_ti k_ui w_i(u,t), u <= t;         dA_tu = s dO_t . V_u
//   O_t  = S^T (s q_t w_t) + sum_{u<=t} A_tu V_u,      S' = w_15 S + sum_u (k_u v_u) V_u^T
//   dV_u = D^T (k_u v_u) + sum_{t>=u} A_tu dO_t,       D' = w_15 D + sum_t (s q_t w_t) dO_t^T
//   dQ_t = s w_t (S dO_t) + sum_{u<=t} dA_tu w(u,t) k_u
//   dK_u = v_u (D V_u) + sum_{t>=u} dA_tu w(u,t) q_t
//   dG_t = R + sum_{u>=t} (q_u dQ'_u - k_u dK'_u)
// with R the row sums of S D at the next multiple of CS = 64 tokens or at the end. dQ' and dK' lack
// the pair t = u: it cancels, and what rounding left of it would drown dG where gates are strong.
// At the end the last token's part of R = S_T D cancels against k dK': so R takes S_T unrounded,
// and D as rounded as dK' has it. The only exponents are g; a w is a product of a's, and nothing is
// divided by one: no exponent is above 0, nothing overflows, exp(-inf) = 0 is a gate like others.
//
// O and dV are one kernel, S or D^T in warps of 16 values, the second from right to left; dQ and dK
// another, in warps of 16 keys. Both wait for nothing but a ring of steps that cp.async fills. What
// they share stands in memory: s q_t w_t, k_u v_u, A and w_15, by a kernel over all steps (pairs).
// Where there are few heads, sequences are cut in segments: a walk without outputs from S = 0 says
// what each adds, and combine_kernel what each starts from.
//
// DK, DV: 8, 16, ..., 128. Arrays start on 16 bytes. No float is added atomically.
#ifndef SEQ_DEV_GLA_WALK_CUH
#define SEQ_DEV_GLA_WALK_CUH

#include "../../util/chunk.cuh"

#ifdef PRECISION_BF16
// Tokens of a step; elements between rows of a 16x16 tile of bf16, of fp32; steps a chunk; steps in
// flight. FEW: blocks of 4 warps that fill a GPU twice.
enum { ST = 16, LDA = ST + 8, LDF = ST + 4, CHUNK_STEPS = CS / ST, FEW = 264 };

// Dimensions and scale. Rows of q and dq are q_pitch elements apart, of k and dk k_pitch, of v and
// dv v_pitch, those of g and dg NH DK, of o and dout NH DV. A sequence has `segments` of `per`
// steps.
typedef struct {
    int T, NH, DK, DV, q_pitch, k_pitch, v_pitch, segments, per;
    float scale;
} Gla;

// Scratch. fq, fk (B,T,NH,DK): s q w, k v; of NS steps a head: pairs (B,NH,NS,16,16) = A, fade
// (B,NH,NS,DK) = w_15; of segments: total (B,NH,segments,DK), the product of fade, and
// starts, ends (B,NH,segments,DK,DV), S before and D behind each. Backward: states, S behind each
// chunk, and what rounding took from the last, as fragments of warps of 16 keys, 16 DV rounded up
// to 32, 64 or 128, numbers each; dots (B,T,NH,DK) = q dQ'.
typedef struct {
    floatX *fq, *fk, *pairs;
    float *fade, *total, *starts, *ends, *dots;
    uint4 *states;
} GlaWork;

// A tile of ROWS rows of W, LD apart in shared memory, that comes again with every step of a walk:
// what a thread copies of it is always the same, so that little is computed anew. move: elements
// from one step's to the next's.
template <typename X, int ROWS, int W, int LD, int THREADS> struct Feed {
    enum { PIECE = 16 / sizeof(X), EACH_ROW = W / PIECE, MANY = THREADS > ROWS * EACH_ROW };
    enum { STEP = MANY ? ROWS : THREADS / EACH_ROW };
    const X *from;
    size_t stride;
    ptrdiff_t move;
    int row, at;
    static_assert(THREADS % EACH_ROW == 0 && ROWS % STEP == 0);

    // start: x: of the first step, its rows stride apart; from `columns` on there are zeros.
    __device__ void start(const X *x, size_t stride, ptrdiff_t move, int columns)
    {
        const int r = threadIdx.x / EACH_ROW, c = threadIdx.x % EACH_ROW * PIECE;
        *this = {x + r * stride + c, STEP * stride, move, c < columns ? r : INT_MAX / 2,
                 r * LD + c};
    }

    // fetch: start copying the next step's, of which only `rows` are there.
    __device__ void fetch(X *tile, int rows)
    {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; i++)
            if (!MANY || at < ROWS * LD)
                copy_async((floatX *)(tile + at + i * STEP * LD),
                           (const floatX *)(from + i * stride), row + i * STEP < rows);
        from += move;
    }
};

// ---- pairs: q and k with their gates, A, a warp a step

enum { PAIR_WARPS = 4, PAIR_W = 64, PAIR_LD = PAIR_W + 4, PAIR_FLOATS = 3 * ST * PAIR_LD };

// pair_dots: acc += products of 4 channels i of rows of q and k, (a (16,PAIR_LD), 4 at a time):
// acc[s] = the pair s of columns p and 15 - p of A, which have 17 together: from (p,p) down to
// (15,p), then from (15-p,15-p). k runs down the rows and is multiplied by a on the way.
static __device__ inline void pair_dots(float (&acc)[ST + 1], const float *q, const float *k,
                                        const float *a, int p)
{
    typedef Pack<float, 4> Four;
    const Four other = *(const Four *)(k + (ST - 1 - p) * PAIR_LD);
    Four kw = *(const Four *)(k + p * PAIR_LD);
#pragma unroll
    for (int s = 0; s <= ST; s++) {
        const int row = (s < ST - p ? p + s : s - 1) * PAIR_LD;
        const Four q4 = *(const Four *)(q + row), a4 = *(const Four *)(a + row);
#pragma unroll
        for (int i = 0; i < 4 && s > 0; i++)
            kw.v[i] = s == ST - p ? other.v[i] : kw.v[i] * a4.v[i];
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[s] += q4.v[i] * kw.v[i];
    }
}

// pairs_kernel: fq, fk, fade and pairs, see GlaWork, of `steps` = B NH NS steps.
static __global__ void __launch_bounds__(32 * PAIR_WARPS, 4)
pairs_kernel(GlaWork work, const floatX *q, const floatX *k, const float *g, size_t steps, Gla d)
{
    extern __shared__ __align__(16) float rows_of[]; // a warp: q, k, a [16][PAIR_LD]
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, NS = (d.T + ST - 1) / ST;
    const size_t step = blockIdx.x * (size_t)PAIR_WARPS + warp, K = (size_t)d.NH * d.DK;
    float *qs = rows_of + warp * PAIR_FLOATS, *ks = qs + ST * PAIR_LD, *as = ks + ST * PAIR_LD;
    float acc[ST + 1] = {};
    if (step >= steps)
        return;
    const int t0 = (int)(step % NS) * ST, head = (int)(step / NS), h = head % d.NH;
    const size_t token = (size_t)(head / d.NH) * d.T + t0;
    for (int c0 = 0; c0 < d.DK; c0 += PAIR_W) {
        const int c = c0 + 2 * lane;
        const size_t at = token * K + h * d.DK + c;
        float2 w = {1, 1}, sum = {0, 0};
#pragma unroll 8
        for (int t = 0; t < ST; t++) {
            const bool inside = t0 + t < d.T && c < d.DK;
            const size_t q_at = (token + t) * d.q_pitch + h * d.DK + c;
            const size_t k_at = (token + t) * d.k_pitch + h * d.DK + c;
            const float2 g_t = inside ? *(const float2 *)(g + at + t * K) : float2{0, 0};
            const float2 q_t = inside ? load2(q + q_at) : float2{0, 0};
            const float2 k_t = inside ? load2(k + k_at) : float2{0, 0};
            const float2 a = {exp2_fast(LOG2E * g_t.x), exp2_fast(LOG2E * g_t.y)};
            *(float2 *)(qs + t * PAIR_LD + 2 * lane) = q_t;
            *(float2 *)(ks + t * PAIR_LD + 2 * lane) = k_t;
            *(float2 *)(as + t * PAIR_LD + 2 * lane) = a;
            sum.x += g_t.x, sum.y += g_t.y;
            w.x *= a.x, w.y *= a.y;
            if (inside)
                store2(work.fq + at + t * K, d.scale * w.x * q_t.x, d.scale * w.y * q_t.y);
        }
        w = {1, 1};
#pragma unroll 8
        for (int t = ST - 1; t >= 0; t--) {
            const float2 k_t = *(const float2 *)(ks + t * PAIR_LD + 2 * lane);
            const float2 a = *(const float2 *)(as + t * PAIR_LD + 2 * lane);
            if (t0 + t < d.T && c < d.DK)
                store2(work.fk + at + t * K, w.x * k_t.x, w.y * k_t.y);
            w.x *= a.x, w.y *= a.y;
        }
        if (c < d.DK)
            *(float2 *)(work.fade + step * d.DK + c) = {exp2_fast(LOG2E * sum.x),
                                                        exp2_fast(LOG2E * sum.y)};
        __syncwarp();
#pragma unroll 1
        for (int i = lane / 8 * 4; i < PAIR_W; i += 16)
            pair_dots(acc, qs + i, ks + i, as + i, lane % 8);
        __syncwarp();
    }
    floatX *A = (floatX *)qs; // (16,16)
    *(uint4 *)(A + 8 * lane) = {0, 0, 0, 0};
    __syncwarp();
#pragma unroll
    for (int s = 0; s <= ST; s++) {
        const int p = lane % 8, second = s >= ST - p, row = second ? s - 1 : p + s;
        acc[s] += __shfl_xor_sync(~0u, acc[s], 8);
        acc[s] += __shfl_xor_sync(~0u, acc[s], 16);
        if (lane / 8 == s % 4)
            A[row * ST + (second ? ST - 1 - p : p)] = (floatX)(d.scale * acc[s]);
    }
    __syncwarp();
    *(uint4 *)(work.pairs + step * ST * ST + 8 * lane) = *(const uint4 *)(A + 8 * lane);
}

// ---- a walk: which steps of which head a block takes; slabs: of values or keys

typedef struct {
    int head, segment, slab, first, end; // steps first .. end - 1
} Walk;

// walk_of: see Walk; slabs of `size` of n.
static __device__ inline Walk walk_of(Gla d, int n, int size)
{
    const int slabs = (n + size - 1) / size, i = blockIdx.x / slabs, NS = (d.T + ST - 1) / ST;
    const int segment = i % d.segments;
    return {i / d.segments, segment, (int)(blockIdx.x % slabs) * size, segment * d.per,
            min(NS, (segment + 1) * d.per)};
}

// ---- values: O and S, or dV and D from right to left

// Elements of a stage of the ring of value_walk_kernel: two tiles of keys, x, A, fade (floats).
template <int W, int WARPS> struct ValueStage {
    enum { LD = W + 8, LDX = 16 * WARPS + 8, X = 2 * ST * LD, A = X + ST * LDX };
    enum { FADE = A + ST * LDA, SIZE = FADE + 2 * W, RING = 4 };
};

// value_walk_kernel: a block takes 16 WARPS columns of S, as S^T, through a segment's steps, S =
// first or zero, in the end last: O from read = fq, write = fk, x = v. BACK: D: dV from read = fk,
// write = fq, x = dO. out NULL: only last, and by the first slab total.
template <int W, int WARPS, int BACK>
static __global__ void __launch_bounds__(32 * WARPS)
value_walk_kernel(floatX *out, float *last, float *total, const floatX *read, const floatX *write,
                  const floatX *pairs, const float *fade, const floatX *x, const float *first,
                  int x_pitch, int out_pitch, Gla d)
{
    typedef ValueStage<W, WARPS> Stage;
    enum { LD = Stage::LD, LDX = Stage::LDX, RING = Stage::RING, THREADS = 32 * WARPS };
    enum { MINE = (W + THREADS - 1) / THREADS };
    extern __shared__ __align__(16) floatX tiles[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, NS = (d.T + ST - 1) / ST;
    const Walk w = walk_of(d, d.DV, 16 * WARPS);
    const int row = w.slab + 16 * warp + lane / 4, K = d.NH * d.DK, h = w.head % d.NH;
    const size_t token = (size_t)(w.head / d.NH) * d.T, step0 = (size_t)w.head * NS;
    const size_t state = ((size_t)w.head * d.segments + w.segment) * d.DK * d.DV;
    const int step = BACK ? -1 : 1, start = BACK ? w.end - 1 : w.first, count = w.end - w.first;
    const size_t at0 = token + start * ST;
    Feed<floatX, ST, W, LD, THREADS> reads, writes;
    Feed<floatX, ST, 16 * WARPS, LDX, THREADS> values;
    Feed<floatX, ST, ST, LDA, THREADS> dots;
    Feed<float, 1, W, W, THREADS> gates;
    reads.start(read + at0 * K + h * d.DK, K, step * ST * K, d.DK);
    writes.start(write + at0 * K + h * d.DK, K, step * ST * K, d.DK);
    values.start(x + at0 * x_pitch + h * d.DV + w.slab, x_pitch, step * ST * x_pitch,
                 d.DV - w.slab);
    dots.start(pairs + (step0 + start) * ST * ST, ST, step * ST * ST, ST);
    gates.start(fade + (step0 + start) * d.DK, 0, step * d.DK, d.DK);
    const auto fetch = [&](int i) {
        if (i < count) {
            floatX *to = tiles + i % RING * Stage::SIZE;
            const int rows = d.T - (start + step * i) * ST;
            if (out)
                reads.fetch(to, rows);
            writes.fetch(to + ST * LD, rows);
            values.fetch(to + Stage::X, rows);
            if (out)
                dots.fetch(to + Stage::A, ST);
            gates.fetch((float *)(to + Stage::FADE), 1);
        }
        copy_commit();
    };
    float S[W / 8][4], product[MINE];
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        const int r = row + i % 4 / 2 * 8, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const bool inside = first && r < d.DV && c < d.DK;
        S[i / 4][i % 4] = inside ? first[state + (size_t)c * d.DV + r] : 0;
    }
#pragma unroll
    for (int i = 0; i < MINE; i++)
        product[i] = 1;
    for (int i = 0; i < RING - 1; i++)
        fetch(i);
    for (int i = 0; i < count; i++) {
        const floatX *at = tiles + i % RING * Stage::SIZE, *xs = at + Stage::X + 16 * warp;
        const float *fades = (const float *)(at + Stage::FADE);
        const int t0 = (start + step * i) * ST;
        copy_wait_all_but<RING - 2>();
        __syncthreads(); // this step is there; nobody reads the one before any more
        fetch(i + RING - 1);
        const uint4 x_left = ldmatrix<1>(xs + column_at(lane, LDX));
        if (out) {
            float y[2][4] = {}, z[2][4] = {}; // two sums wait half as long
            mma16(y, x_left, BACK ? ldmatrix<1>(at + Stage::A + row_at(lane, LDA))
                                  : ldmatrix<0>(at + Stage::A + column_at(lane, LDA)));
#pragma unroll
            for (int k = 0; k < W / 16; k++)
                mma16(k % 2 ? y : z, accumulator_pack(&S[2 * k]),
                      ldmatrix<0>(at + 16 * k + column_at(lane, LD)));
#pragma unroll
            for (int k = 0; k < 8; k++)
                y[k / 4][k % 4] += z[k / 4][k % 4];
            columns_store<2>(out + (token + t0) * out_pitch + h * d.DV + w.slab + 16 * warp, y, 1,
                             out_pitch, d.T - t0, d.DV - w.slab - 16 * warp);
        }
#pragma unroll
        for (int n = 0; n < W / 8; n++) {
            const float2 f = *(const float2 *)(fades + 8 * n + lane % 4 * 2);
            S[n][0] *= f.x, S[n][1] *= f.y, S[n][2] *= f.x, S[n][3] *= f.y;
        }
        add_product<W, ST>(S, &x_left, NULL, at + ST * LD + row_at(lane, LD), 0, 0);
#pragma unroll
        for (int n = 0; n < MINE; n++)
            if ((int)threadIdx.x + n * THREADS < W)
                product[n] *= fades[threadIdx.x + n * THREADS];
    }
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        const int r = row + i % 4 / 2 * 8, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (last && r < d.DV && c < d.DK)
            last[state + (size_t)c * d.DV + r] = S[i / 4][i % 4];
    }
#pragma unroll
    for (int n = 0; n < MINE; n++)
        if (!out && w.slab == 0 && (int)threadIdx.x + n * THREADS < d.DK)
            total[((size_t)w.head * d.segments + w.segment) * d.DK + threadIdx.x + n * THREADS] =
                product[n];
}

// combine_kernel: segments (B,NH,segments,DK,DV), what each adds to S, become what each starts
// from, S_0 = initial (B,NH,DK,DV) or zero; last (NULL: not asked for) = what comes behind. BACK:
// from the last one to the first. A thread an element of S, n of them.
template <int BACK>
static __global__ void combine_kernel(float *segments, float *last, const float *total,
                                      const float *initial, size_t n, Gla d)
{
    const size_t e = blockIdx.x * (size_t)blockDim.x + threadIdx.x, size = (size_t)d.DK * d.DV;
    const size_t head = e / size, at = e % size;
    if (e >= n)
        return;
    float run = initial ? initial[e] : 0;
    for (int i = 0; i < d.segments; i++) {
        const size_t segment = head * d.segments + (BACK ? d.segments - 1 - i : i);
        const float added = segments[segment * size + at];
        segments[segment * size + at] = run;
        run = run * total[segment * d.DK + at / d.DV] + added;
    }
    if (last)
        last[e] = run;
}

// ---- keys: dQ and S, or dK, dG and D from right to left

// A stage of the ring of key_walk_kernel, elements: rows of values that are read and written, of
// keys that are multiplied with what is found and written, then floats: g, and BACK dots. OWN: of a
// warp, behind the ring: what it writes [16][LDA], pairs and dots of values [16][LDF], diagonal.
template <int W, int WARPS, int BACK> struct KeyStage {
    enum { LD = W + 8, N = 16 * WARPS, LDK = N + 8, LDG = N + 4, RING = 3 };
    enum { WRITE = ST * LD, MINE = 2 * ST * LD, KEYS = MINE + ST * LDK, G = KEYS + ST * LDK };
    enum { DOTS = G + 2 * ST * LDG, SIZE = DOTS + (BACK ? 2 * ST * LDG : 0) };
    enum { OWN = ST * LDA + 2 * (2 * ST * LDF + ST), BYTES = 2 * (RING * SIZE + WARPS * OWN) };
};

// gates_of: of the lane's channel: a = exp(g) of the 16 tokens of a step (g: LD apart); of its own
// 8 of them, those of its half of the warp: before w_t, behind v_t; returns w_15.
template <int LD>
static __device__ inline float gates_of(float a[ST], float before[8], float behind[8],
                                        const float *g, int half)
{
    float sum = 0, product = 1, own[8];
#pragma unroll
    for (int t = 0; t < ST; t++) {
        const float g_t = g[t * LD];
        sum += g_t;
        a[t] = exp2_fast(LOG2E * g_t);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        own[i] = half ? a[8 + i] : a[i];
        product *= own[i];
        before[i] = product;
    }
    const float other = __shfl_xor_sync(~0u, product, 16);
    product = half ? 1 : other;
#pragma unroll
    for (int i = 7; i >= 0; i--) {
        before[i] *= half ? other : 1;
        behind[i] = product;
        product *= own[i];
    }
    return exp2_fast(LOG2E * sum);
}

// pairs_walk: found (8) = of the lane's channel and own 8 tokens r the sum over tokens w before it
// (BACK: behind it) of dA_rw key_w and the gates between them. Of the keys a lane has every second,
// key[m] of token 2 m + half; dA (16,LDF): first the 8 even w, then the odd ones.
template <int BACK>
static __device__ inline void pairs_walk(float found[8], float key[8], const float a[ST],
                                         const float *dA, int half)
{
#pragma unroll
    for (int i = 1; i < ST; i++) {
        const int r = BACK ? ST - 1 - i : i;
        const float fade = BACK ? a[r + 1 < ST ? r + 1 : 0] : a[r];
        float sum = 0, row[8];
#pragma unroll
        for (int m = 0; m < 8; m += 4)
            *(Pack<float, 4> *)(row + m) = *(const Pack<float, 4> *)(dA + r * LDF + 8 * half + m);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const bool even = BACK ? 2 * m > r : 2 * m < r;
            const bool odd = BACK ? 2 * m + 1 > r : 2 * m + 1 < r;
            if (even && odd)
                key[m] *= fade;
            else if (even || odd)
                key[m] *= half == (odd ? 1 : 0) ? fade : 1;
            if (even || odd)
                sum += row[m] * key[m];
        }
        sum += __shfl_xor_sync(~0u, sum, 16);
        found[r % 8] = r / 8 == half ? sum : found[r % 8];
    }
}

// states_keep: kept, a lane's fragments, = a warp's 16 rows of S, rounded, or with low what
// rounding takes from them.
template <int W>
static __device__ inline void states_keep(uint4 *kept, const float S[W / 8][4], int low)
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        const uint4 hi = accumulator_pack(&S[2 * n]);
        const uint32_t x[] = {hi.x, hi.y, hi.z, hi.w};
        float rest[2][4];
#pragma unroll
        for (int k = 0; k < 8; k++)
            rest[k / 4][k % 4] = S[2 * n + k / 4][k % 4] - unpack(x[k / 2], k % 2);
        kept[n * WARP] = low ? accumulator_pack(rest) : hi;
    }
}

// states_dot: R += products of rows lane / 4 and + 8 of what states_keep kept and of D, rounded as
// dK' has it: the lane's part.
template <int W>
static __device__ inline void states_dot(float R[2], const uint4 *kept, const float D[W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        const uint4 S_n = kept[n * WARP], D_n = accumulator_pack(&D[2 * n]);
        const uint32_t x[] = {S_n.x, S_n.y, S_n.z, S_n.w}, y[] = {D_n.x, D_n.y, D_n.z, D_n.w};
#pragma unroll
        for (int k = 0; k < 8; k++)
            R[k / 2 % 2] += unpack(x[k / 2], k % 2) * unpack(y[k / 2], k % 2);
    }
}

// key_walk_kernel: a block takes 16 WARPS rows of S through a segment's steps, S = first or zero:
// dx = dQ, dots = q dQ' and states, from mine = q, keys = k, xr = dO, xw = v. BACK: D: dx = dK and
// dg from dots and states, mine = k, keys = q, xr = v, xw = dO. Pitches: of dx and mine, keys, xr,
// xw. Half of a warp has 8 tokens of a step, a lane one of 16 channels.
template <int W, int WARPS, int BACK>
static __global__ void __launch_bounds__(32 * WARPS, 2)
key_walk_kernel(floatX *dx, float *dg, float *dots, uint4 *states, const floatX *mine,
                const floatX *keys, const floatX *xr, const floatX *xw, const float *g,
                const float *first, int4 pitch, Gla d)
{
    typedef KeyStage<W, WARPS, BACK> Stage;
    enum { LD = Stage::LD, LDK = Stage::LDK, LDG = Stage::LDG, N = Stage::N, RING = Stage::RING };
    enum { THREADS = 32 * WARPS };
    extern __shared__ __align__(16) floatX tiles[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = lane / 16;
    const Walk w = walk_of(d, d.DK, N);
    const int K = d.NH * d.DK, h = w.head % d.NH, c = 16 * warp + lane % 16, DKS = (d.DK + 15) / 16;
    const int chunks = (d.T + CS - 1) / CS, NS = (d.T + ST - 1) / ST, row = 16 * warp + lane / 4;
    const size_t token = (size_t)(w.head / d.NH) * d.T, channel = (size_t)h * d.DK + w.slab;
    const size_t state = ((size_t)w.head * d.segments + w.segment) * d.DK * d.DV;
    floatX *ops = tiles + RING * Stage::SIZE + warp * Stage::OWN;
    float *dA = (float *)(ops + ST * LDA), *dS = dA + ST * LDF, *diagonal = dS + ST * LDF;
    const bool inside = w.slab + c < d.DK, there = w.slab / 16 + warp < DKS; // a key, a warp's
    const int behind_it = DKS * (W / 16) * WARP; // fragments of a chunk's states
    const int way = BACK ? -1 : 1, start = BACK ? w.end - 1 : w.first, count = w.end - w.first;
    const int left = d.DK - w.slab;
    const size_t at0 = token + start * ST;
    Feed<floatX, ST, W, LD, THREADS> reads, writes;
    Feed<floatX, ST, N, LDK, THREADS> mines, writers;
    Feed<float, ST, N, LDG, THREADS> gates, found_dots;
    reads.start(xr + at0 * pitch.z + h * d.DV, pitch.z, way * ST * pitch.z, d.DV);
    writes.start(xw + at0 * pitch.w + h * d.DV, pitch.w, way * ST * pitch.w, d.DV);
    mines.start(mine + at0 * pitch.x + channel, pitch.x, way * ST * pitch.x, left);
    writers.start(keys + at0 * pitch.y + channel, pitch.y, way * ST * pitch.y, left);
    gates.start(g + at0 * K + channel, K, way * ST * K, left);
    found_dots.start(dots + at0 * K + channel, K, way * ST * K, left);
    const auto fetch = [&](int i) {
        if (i < count) {
            floatX *to = tiles + i % RING * Stage::SIZE;
            const int rows = d.T - (start + way * i) * ST;
            reads.fetch(to, rows);
            writes.fetch(to + Stage::WRITE, rows);
            mines.fetch(to + Stage::MINE, rows);
            writers.fetch(to + Stage::KEYS, rows);
            gates.fetch((float *)(to + Stage::G), rows);
            if (BACK)
                found_dots.fetch((float *)(to + Stage::DOTS), rows);
        }
        copy_commit();
    };
    float S[W / 8][4], run = 0; // run: BACK: dg of the token behind, from the chunk's end on
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        const int r = w.slab + row + i % 4 / 2 * 8, j = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const bool given = first && r < d.DK && j < d.DV;
        S[i / 4][i % 4] = given ? first[state + (size_t)r * d.DV + j] : 0;
    }
    for (int i = 0; i < RING - 1; i++)
        fetch(i);
    for (int i = 0; i < count; i++) {
        const floatX *at = tiles + i % RING * Stage::SIZE, *xws = at + Stage::WRITE;
        const floatX *ks = at + Stage::KEYS + c, *ms = at + Stage::MINE + c;
        const int step = start + way * i, t0 = step * ST, own = 8 * half, rows = d.T - t0 - own;
        const size_t mine0 = (token + t0 + own) * pitch.x + channel + c; // of own tokens, channel
        const size_t key0 = (token + t0 + own) * K + channel + c;
        uint4 *kept = states + (((size_t)w.head * (chunks + 1) + step / CHUNK_STEPS) * DKS +
                                w.slab / 16 + warp) * (W / 16) * WARP + lane;
        const bool ends = step % CHUNK_STEPS == CHUNK_STEPS - 1 || step == NS - 1; // a chunk
        float a[ST], before[8], behind[8], key[8], found[8] = {};
        copy_wait_all_but<RING - 2>();
        __syncthreads(); // this step is there; nobody reads the one before any more
        fetch(i + RING - 1);
        const float fade = gates_of<LDG>(a, before, behind, (const float *)(at + Stage::G) + c,
                                         half);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float k = (float)ks[(own + m) * LDK];
            ops[(own + m) * LDA + lane % 16] =
                (floatX)(k * (BACK ? d.scale * before[m] : behind[m]));
            key[m] = (float)ks[(2 * m + half) * LDK];
        }
        float p[2][4] = {}, y[2][4] = {}; // dA / s; of 16 keys and tokens S xr^T
#pragma unroll
        for (int k = 0; k < W / 16; k++) {
            mma16(y, accumulator_pack(&S[2 * k]), ldmatrix<0>(at + 16 * k + column_at(lane, LD)));
            mma16(p, ldmatrix<0>(at + 16 * k + row_at(lane, LD)),
                  ldmatrix<0>(xws + 16 * k + column_at(lane, LD)));
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int r = lane / 4 + k % 4 / 2 * 8, column = k / 4 * 8 + lane % 4 * 2 + k % 2;
            const float x = d.scale * p[k / 4][k % 4];
            dA[r * LDF + column % 2 * 8 + column / 2] = (BACK ? column > r : column < r) ? x : 0;
            dS[r * LDF + column] = y[k / 4][k % 4];
            if (r == column)
                diagonal[r] = x;
        }
        if (BACK && ends) { // R, of rows lane / 4 and + 8, then of the lane's channel
            float R[2] = {};
            for (int low = 0; there && low <= (step == NS - 1); low++)
                states_dot<W>(R, kept + low * behind_it, S);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                R[k] += __shfl_xor_sync(~0u, R[k], 1);
                R[k] += __shfl_xor_sync(~0u, R[k], 2);
                R[k] = __shfl_sync(~0u, R[k], lane % 8 * 4);
            }
            run = lane % 16 < 8 ? R[0] : R[1];
        }
        __syncwarp();
        pairs_walk<BACK>(found, key, a, dA, half);
        float y_own[8], part = 0;
        *(Pack<float, 4> *)y_own = *(const Pack<float, 4> *)(dS + lane % 16 * LDF + 8 * half);
        *(Pack<float, 4> *)(y_own + 4) =
            *(const Pack<float, 4> *)(dS + lane % 16 * LDF + 8 * half + 4);
#pragma unroll
        for (int m = 7; m >= 0; m--) {
            const int t = own + m;
            const float dx_t = found[m] + y_own[m] * (BACK ? behind[m] : d.scale * before[m]);
            const float dot = (float)ms[t * LDK] * dx_t;
            if (inside && m < rows)
                dx[mine0 + m * pitch.x] = (floatX)(dx_t + diagonal[t] * (float)ks[t * LDK]);
            if (inside && m < rows && !BACK)
                dots[key0 + m * K] = dot;
            if (BACK)
                part += ((const float *)(at + Stage::DOTS))[t * LDG + c] - dot;
            found[m] = part; // BACK: dg within the half
        }
        if constexpr (BACK) {
            const float other = __shfl_xor_sync(~0u, part, 16);
#pragma unroll
            for (int m = 0; m < 8; m++)
                if (inside && m < rows)
                    dg[key0 + m * K] = run + (half ? 0 : other) + found[m];
            run += part + other;
        }
        const float fades[] = {__shfl_sync(~0u, fade, lane / 4),
                               __shfl_sync(~0u, fade, lane / 4 + 8)};
#pragma unroll
        for (int n = 0; n < W / 2; n++)
            S[n / 4][n % 4] *= fades[n / 2 % 2];
        const uint4 op = ldmatrix<1>(ops + column_at(lane, LDA));
        add_product<W, ST>(S, &op, NULL, xws + row_at(lane, LD), 0, 0);
        for (int low = 0; !BACK && ends && there && low <= (step == NS - 1); low++)
            states_keep<W>(kept + low * behind_it, S, low);
    }
}

// ---- the launchers

// WITH_WIDTH: the statement with W = n rounded up to 32, 64 or 128, and WARPS that fetch so wide
// rows.
#define WITH_WIDTH(n, ...) \
    do { \
        if ((n) <= 32) { enum { W = 32, WARPS = 2 }; __VA_ARGS__; } \
        else if ((n) <= 64) { enum { W = 64, WARPS = 4 }; __VA_ARGS__; } \
        else { enum { W = 128, WARPS = 4 }; __VA_ARGS__; } \
    } while (0)

// gla_dims: see Gla. Segments: of at least 256 tokens, whole chunks, until there are FEW blocks.
static Gla gla_dims(size_t B, size_t T, size_t NH, size_t DK, size_t DV, size_t q_pitch,
                    size_t k_pitch, size_t v_pitch, float scale)
{
    const size_t most = DK > DV ? DK : DV, blocks = B * NH * ((most + 63) / 64);
    const size_t NS = (T + ST - 1) / ST, wanted = blocks < FEW ? FEW / blocks : 1;
    size_t per = (NS + wanted - 1) / wanted;
    per = (per + CHUNK_STEPS - 1) / CHUNK_STEPS * CHUNK_STEPS; // whole chunks, at least four
    per = per < 4 * CHUNK_STEPS ? 4 * CHUNK_STEPS : per;
    per = per < NS && wanted > 1 ? per : NS;
    return {(int)T, (int)NH, (int)DK, (int)DV, (int)q_pitch, (int)k_pitch,
            (int)v_pitch, (int)((NS + per - 1) / per), (int)per, scale};
}

// gla_pairs: fq, fk, pairs and fade of work = from q, k, g.
static void gla_pairs(GlaWork work, const floatX *q, const floatX *k, const float *g, size_t B,
                      Gla d, cudaStream_t stream)
{
    const size_t steps = B * d.NH * (((size_t)d.T + ST - 1) / ST);
    LAUNCH(pairs_kernel, (steps + PAIR_WARPS - 1) / PAIR_WARPS, 32 * PAIR_WARPS,
           PAIR_WARPS * PAIR_FLOATS * sizeof(float), stream, work, q, k, g, steps, d);
}

// value_walk: out = O (BACK: dV) from x = v (dout), S_0 = first (D: dfinal), NULL: zero; last = S_T
// (dS_0), NULL: not asked for. Where there are segments, `segments` = what each starts from; out
// NULL: only that.
template <int BACK>
static void value_walk(floatX *out, float *last, float *segments, GlaWork work, const floatX *x,
                       const float *first, size_t B, Gla d, cudaStream_t stream)
{
    const floatX *read = BACK ? work.fk : work.fq, *write = BACK ? work.fq : work.fk;
    const int C = d.NH * d.DV, x_pitch = BACK ? C : d.v_pitch, out_pitch = BACK ? d.v_pitch : C;
    const size_t states = B * d.NH * d.DK * d.DV;
    const bool cut = d.segments > 1;
    WITH_WIDTH(d.DK,
        const size_t slabs = (d.DV + 16 * WARPS - 1) / (16 * WARPS);
        const size_t blocks = B * d.NH * d.segments * slabs;
        const size_t bytes = 2 * ValueStage<W, WARPS>::SIZE * ValueStage<W, WARPS>::RING;
        if (cut) {
            LAUNCH((value_walk_kernel<W, WARPS, BACK>), blocks, 32 * WARPS, bytes, stream, NULL,
                   segments, work.total, read, write, work.pairs, work.fade, x, NULL, x_pitch,
                   out_pitch, d);
            LAUNCH(combine_kernel<BACK>, (states + 255) / 256, 256, 0, stream, segments, last,
                   work.total, first, states, d);
        }
        if (out)
            LAUNCH((value_walk_kernel<W, WARPS, BACK>), blocks, 32 * WARPS, bytes, stream, out,
                   cut ? NULL : last, work.total, read, write, work.pairs, work.fade, x,
                   cut ? segments : first, x_pitch, out_pitch, d));
}

// gla_walk_forward: out (B,T,NH,DV) = and final (B,NH,DK,DV) = S_T (NULL: not asked for) from q, k,
// g (B,T,NH,DK), v (B,T,NH,DV), S_0 = initial (NULL: zero); final may alias initial; work: scratch.
static void gla_walk_forward(floatX *out, float *final, GlaWork work, const floatX *q,
                             const floatX *k, const float *g, const floatX *v, const float *initial,
                             size_t B, Gla d, cudaStream_t stream)
{
    gla_pairs(work, q, k, g, B, d, stream);
    value_walk<0>(out, final, work.starts, work, v, initial, B, d, stream);
}

// gla_walk_backward: dq, dk, dg, dv like q, k, g, v = and dinitial (B,NH,DK,DV) = (NULL: not asked
// for) from dout, dfinal (NULL: zero) and the forward's inputs. work: scratch; `kept`: it is as the
// forward pass has left it, which saves one kernel of four.
static void gla_walk_backward(floatX *dq, floatX *dk, float *dg, floatX *dv, float *dinitial,
                              GlaWork work, const floatX *dout, const float *dfinal,
                              const floatX *q, const floatX *k, const float *g, const floatX *v,
                              const float *initial, size_t B, Gla d, int kept, cudaStream_t stream)
{
    const int C = d.NH * d.DV;
    const bool cut = d.segments > 1;
    if (!kept)
        gla_pairs(work, q, k, g, B, d, stream);
    if (cut && !kept)
        value_walk<0>(NULL, NULL, work.starts, work, v, initial, B, d, stream);
    value_walk<1>(dv, dinitial, work.ends, work, dout, dfinal, B, d, stream);
    WITH_WIDTH(d.DV,
        const size_t blocks = B * d.NH * d.segments * ((d.DK + 16 * WARPS - 1) / (16 * WARPS));
        LAUNCH((key_walk_kernel<W, WARPS, 0>), blocks, 32 * WARPS, (KeyStage<W, WARPS, 0>::BYTES),
               stream, dq, NULL, work.dots, work.states, q, k, dout, v, g,
               cut ? work.starts : initial, (int4{d.q_pitch, d.k_pitch, C, d.v_pitch}), d);
        LAUNCH((key_walk_kernel<W, WARPS, 1>), blocks, 32 * WARPS, (KeyStage<W, WARPS, 1>::BYTES),
               stream, dk, dg, work.dots, work.states, k, q, v, dout, g,
               cut ? work.ends : dfinal, (int4{d.k_pitch, d.q_pitch, d.v_pitch, C}), d));
}
#endif

#endif
