// train_metala.cu: MetaLA and gated linear attention (GLA) on the GPU, the same model as
// train_metala.c, which says what is computed and is what this is held against (dev/test_cuda.sh).
//
//   S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(DK)
//   alpha_t = exp(g_t),  g_t = ln sigmoid(z_t) / tau,  k_t = 1 - alpha_t, or free
//   c = SiLU(p) norm_head(o + sigmoid(a v)),  a = sum_i q_i w_i k_i  [2411.10741, 2312.06635]
//   x += W_out c;  x += W_down (SiLU(f) e),  f, e = W_gu norm(x)
//
// Token by token all is fp32 but q, k and v. Threads have 32 numbers of a row or column of S each
// in registers. Backward, dq is made with S from the first token on, dk and dv with its gradient D
// from the last: nothing is divided by alpha. dg_t = dg_{t+1} + q_t dq_t - k_t dk_t, anew every 64
// tokens from the row sums of S D there.
//
// By chunks of 64 (BF16, mma.sync), b_t the sum of g from the chunk's first token to t, C its last,
// S before the chunk and D behind it, s = 1 / sqrt(DK):                 [2312.06635, 4.2]
//   A_tu = sum_i q_ti k_ui exp(b_ti - b_ui),  o_t = s (S^T (q_t exp(b_t)) + sum_u A_tu v_u), u <= t
//   S' = diag(exp(b_C)) S + sum_u (k_u exp(b_C - b_u)) v_u^T
//   dA_tu = s do_t . v_u,  dv_u = s sum_t A_tu do_t + D^T (k_u exp(b_C - b_u))
//   dq_t = s exp(b_t) S do_t + sum_u dA_tu k_u exp(b_t - b_u)
//   dk_u = exp(b_C - b_u) D v_u + sum_t dA_tu q_t exp(b_t - b_u)
//   D' = diag(exp(b_C)) D + s sum_t (q_t exp(b_t)) do_t^T
// A kernel takes S through the chunks and leaves what stands before each; another makes o of all
// chunks at once. Back the same: D, then dq, dk, dg, dv. No exponent is ever above 0: between two
// blocks of 16 tokens both factors are relative to b at the end of the earlier one, within a block
// pairs are taken one by one, in fp32. S, D, b and dg are fp32; what enters a product is one bf16.
// dg_t is all that flows from before t to t and later, a sum without a difference but for pairs in
// a block of 16: with strong gates q dq - k dk would leave the rounding of its terms.
//
// nvcc -DPRECISION_BF16 (train_metala_gpu): weights and activations in bf16, through the typedef
// floatX; fp32: master weights, the residual stream, z and g, S but for its copies between kernels,
// and all sums. k = -expm1(g) is rounded as k, not as alpha. Augmentation, head norm and gate are
// one kernel, in fp32. Without it (train_metala_gpu_fp32) all is fp32, no TF32.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. Only --accumulate N waits between its batches. No
// float is added atomically: same bits every time. q, v, p and k (tied: z) are one matrix product.
//
// Letters: those of train_metala.c; K = NH DK. Sections: [mix] recurrence, gates, reading; [block]
// convolution, SiLU; [layers] matrix product, norm, embedding, cross-entropy; [model]; [train];
// [main]. [optimizer] AdamW and the sums over rows are in util/.
//
//   ./train_metala_gpu --preset mqar, mqar-80; see train_metala.c
// Differences from the papers: those of train_metala.c.

#include "data/tasks.h"
#include "util/asked.cuh"
#include "util/chunk.cuh"
#include "util/optimizer.cuh"
#include "util/sums.cuh" // and with it warp, cuda_training, cuda, gemm, training
#pragma nv_diag_suppress 177    // [layers] has more than this model needs

// ------------------------------------------------------------------------------------------------
// [mix] Gates, the recurrence by tokens or by chunks of them, and how it is read.

#define ARCHITECTURE "metala"
enum { TIED, FREE, RANK = 16 }; // the key; the free gate's rank
enum { AUTO, RECURRENT, CHUNK };
#define LEAST_GATE -30.0f // of g: exp(-30) = 9e-14

// What a recurrence is told: elements from one token's q, k and v to the next's, and so of their
// gradients; those of g are NH DK apart, of o NH DV.
typedef struct {
    size_t B, T, NH, DK, DV, q_pitch, k_pitch, v_pitch;
    float scale;
} GlaShape;

// Its inputs; dout only on the way back.
typedef struct {
    const floatX *q, *k, *v, *dout;
    const float *g;
} GlaInputs;

// ---- token by token: P neighbouring threads have 32 numbers each of a row or column of S

// Forward a thread owns a value and sums over keys: o. Backward there are three passes, each like
// the forward one, so that no sum leaves a warp: dq, a key's, with S again from the first token on;
// dk and dv, with D, the gradient of S, from the last.
enum { PASS_O, PASS_DQ, PASS_DK, PASS_DV };
enum { COLS = 32, HEAD_MOST = 8 * COLS };

// WITH_HEAD: the statement with P as a constant, the least of 1, 2, 4, 8 with n <= 32 P.
#define WITH_HEAD(n, ...) \
    do { \
        if ((n) <= COLS) { enum { P = 1 }; __VA_ARGS__; } \
        else if ((n) <= 2 * COLS) { enum { P = 2 }; __VA_ARGS__; } \
        else if ((n) <= 4 * COLS) { enum { P = 4 }; __VA_ARGS__; } \
        else { enum { P = 8 }; __VA_ARGS__; } \
    } while (0)

// part_of: what faded multiplies by: exp(g), or exp(g) - 1 where that is above -1/2: a long memory
// would lose its length in an exp(g) next to 1.
static __device__ inline float part_of(float g)
{
    return g > -0.7f ? expm1f(g) : expf(g);
}

// faded: exp(g) x + add, from part_of(g).
static __device__ inline float faded(float x, float part, float add)
{
    return (part > 0 ? 0 : x) + fmaf(part, x, add);
}

// What a thread needs of a position. At its x = threadIdx.x: what S is read with, and what is added
// to S times `own`, which is at its y; the gate of x or y; the y of dk's k or dq's q; q dq.
typedef struct {
    float read, add, gate, own, y, qdq;
} Position;

// value_at: x[i], 0 beyond the head.
template <typename X> static __device__ inline float value_at(const X *x, int i, int n)
{
    return i < n ? (float)x[i] : 0;
}

// position_fetch: position `at` (b T + t) of head h; dg: see recurrent_kernel.
template <int PASS>
static __device__ inline Position position_fetch(GlaInputs in, const float *dg, size_t at, int h,
                                                 int y, GlaShape s)
{
    const int DK = (int)s.DK, DV = (int)s.DV, x = threadIdx.x;
    const floatX *q = in.q + at * s.q_pitch + h * DK, *k = in.k + at * s.k_pitch + h * DK;
    const floatX *v = in.v + at * s.v_pitch + h * DV;
    const floatX *dout = in.dout + (at * s.NH + h) * DV;
    const float *g = in.g + (at * s.NH + h) * DK;
    if (PASS == PASS_O)
        return {value_at(q, x, DK), value_at(k, x, DK), value_at(g, x, DK), value_at(v, y, DV)};
    if (PASS == PASS_DV)
        return {value_at(k, x, DK), value_at(q, x, DK), value_at(g, x, DK),
                s.scale * value_at(dout, y, DV)};
    if (PASS == PASS_DQ)
        return {value_at(dout, x, DV), value_at(v, x, DV), value_at(g, y, DK), value_at(k, y, DK),
                value_at(q, y, DK)};
    return {value_at(v, x, DV), value_at(dout, x, DV), value_at(g, y, DK),
            s.scale * value_at(q, y, DK), value_at(k, y, DK),
            value_at(dg + (at * s.NH + h) * DK, y, DK)};
}

// recurrent_kernel: a pass for 32 y of a head, values of S's columns (PASS_O, PASS_DV) or keys of
// its rows; x is the other index. From state `first` (NULL: 0) to `last` (NULL: not asked for),
//   M = diag(alpha) M + add own,  out = scale M read               PASS_O, PASS_DQ
//   M += add own,  out = M read,  M = diag(alpha) M                PASS_DK, PASS_DV
// PASS_O leaves M before every CS-th token in states (B,NH,NC,DK,DV), unless NULL. PASS_DQ leaves q
// dq in dg; of it PASS_DK makes dg_t = dg_{t+1} + q dq - k dk, which starts anew at the end of each
// CS tokens from the row sums of S D there; S after the last token is `final`. In these dq and dk
// what a token reads of itself is left out: it cancels, and would leave its rounding.
template <int P, int PASS>
static __global__ void __launch_bounds__(COLS * P, 1)
recurrent_kernel(floatX *out, size_t pitch, float *dg, float *states, float *last,
                 const float *first, const float *final, GlaInputs in, GlaShape s)
{
    enum { OWN_KEY = PASS == PASS_DQ || PASS == PASS_DK };
    enum { BACK = PASS == PASS_DK || PASS == PASS_DV };
    __shared__ __align__(16) float shared[2][3][COLS * P];
    const int lane = threadIdx.x % P, T = (int)s.T, DV = (int)s.DV, NC = (T + CS - 1) / CS;
    const int X = (int)(OWN_KEY ? s.DV : s.DK), Y = (int)(OWN_KEY ? s.DK : s.DV);
    const int slabs = (Y + COLS - 1) / COLS, y = blockIdx.x % slabs * COLS + threadIdx.x / P;
    const size_t head = blockIdx.x / slabs, size = s.DK * s.DV, at0 = head / s.NH * s.T;
    const int h = (int)(head % s.NH);
    float M[COLS], gate = 0;
    const auto place = [=](int n) { // of element n in S; -1: beyond the head
        const int x = 4 * (n / 4 * P + lane) + n % 4;
        return x >= X || y >= Y ? -1 : OWN_KEY ? y * DV + x : x * DV + y;
    };
#pragma unroll
    for (int n = 0; n < COLS; n++)
        M[n] = first && place(n) >= 0 ? first[head * size + place(n)] : 0;
    Position next = position_fetch<PASS>(in, dg, at0 + (BACK ? T - 1 : 0), h, y, s);
    for (int i = 0; i < T; i++) {
        const int t = BACK ? T - 1 - i : i;
        const Position p = next;
        const float own_part = OWN_KEY ? part_of(p.gate) : 0;
        float(*to)[COLS * P] = shared[i % 2], sum[OWN_KEY ? 2 : 1] = {}, flow[1] = {};
        to[0][threadIdx.x] = p.read;
        to[1][threadIdx.x] = p.add;
        if (!OWN_KEY)
            to[2][threadIdx.x] = part_of(p.gate);
        if (i + 1 < T)
            next = position_fetch<PASS>(in, dg, at0 + (BACK ? t - 1 : t + 1), h, y, s);
        if (PASS == PASS_O && states && t % CS == 0)
            for (int n = 0; n < COLS; n++)
                if (place(n) >= 0)
                    states[(head * NC + t / CS) * size + place(n)] = M[n];
        if (PASS == PASS_DK && (t == T - 1 || t % CS == CS - 1)) {
            const float *S = t == T - 1 ? final + head * size
                                        : states + (head * NC + t / CS + 1) * size;
            for (int n = 0; n < COLS && (first || t < T - 1); n++)
                flow[0] += place(n) < 0 ? 0 : M[n] * S[place(n)];
            row_reduce<P, 0>(flow, NULL);
            gate = flow[0];
        }
        __syncthreads(); // who still reads the position before reads the other half
#pragma unroll
        for (int n = 0; n < COLS; n += 4) {
            const int x = 4 * (n / 4 * P + lane);
            const Pack<float, 4> read = *(const Pack<float, 4> *)(to[0] + x);
            const Pack<float, 4> add = *(const Pack<float, 4> *)(to[1] + x);
            Pack<float, 4> part = {};
            if (!OWN_KEY)
                part = *(const Pack<float, 4> *)(to[2] + x);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float part_j = OWN_KEY ? own_part : part.v[j];
                float *m = &M[n + j];
                *m = BACK ? *m : faded(*m, part_j, OWN_KEY ? 0 : add.v[j] * p.own);
                if (OWN_KEY) { // what is read without the token's own part, and of that part
                    sum[0] = fmaf(read.v[j], *m, sum[0]);
                    sum[OWN_KEY] = fmaf(read.v[j], add.v[j], sum[OWN_KEY]);
                }
                *m = OWN_KEY || BACK ? fmaf(add.v[j], p.own, *m) : *m;
                sum[0] = OWN_KEY ? sum[0] : fmaf(read.v[j], *m, sum[0]);
                *m = BACK ? faded(*m, part_j, 0) : *m;
            }
        }
        row_reduce<P, 0>(sum, NULL);
        const float scale = BACK ? 1 : s.scale, others = p.y * scale * sum[0];
        const float result = scale * (OWN_KEY ? fmaf(p.own, sum[OWN_KEY], sum[0]) : sum[0]);
        const size_t at = at0 + t;
        if (PASS == PASS_DK)
            gate += p.qdq - others;
        if (lane == 0 && y < Y) {
            out[at * pitch + h * Y + y] = (floatX)result;
            if (PASS == PASS_DQ || PASS == PASS_DK)
                dg[(at * s.NH + h) * Y + y] = PASS == PASS_DQ ? others : gate;
        }
    }
#pragma unroll
    for (int n = 0; n < COLS; n++)
        if (last && place(n) >= 0)
            last[head * size + place(n)] = M[n];
}

#ifdef PRECISION_BF16
// ---- 64 tokens at a time on tensor cores, heads of 8, 16, ..., 128 keys and values

enum { CHUNK_THREADS = 128, GRADS_THREADS = 256, BLOCK = 16 };

// Shared memory of heads of WK keys and WV values, elements of bf16 or bytes: a tile of keys (LK
// apart), of values, of a state; of fp32 by keys (LB). LDA: between rows of dA, whose 16x16 blocks
// on the diagonal are fp32 and so reach into the next one. OUTPUT: q, k and b, then S and v in
// their place. GRADS: q, k, b, dA, A, sums, then v, do, S, D, in whose place come three of fp32.
template <int WK, int WV> struct Space {
    enum { LK = WK + 8, LV = WV + 8, LB = WK + 4, LDA = CS + BLOCK + 8 };
    enum { KEYS = CS * LK, VALUES = CS * LV, STATE = WK * LV, GATES = 2 * CS * LB };
    enum { OUTPUT_BYTES = 2 * (2 * KEYS + GATES) };
    enum { SUMS = 2 * 11 * WK, REST_AT = 2 * KEYS + GATES + CS * LDA + TILE + SUMS };
    enum { REST = 2 * VALUES + 2 * STATE > 3 * GATES ? 2 * VALUES + 2 * STATE : 3 * GATES };
    enum { GRADS_BYTES = 2 * (REST_AT + REST) };
    static_assert(STATE <= 2 * KEYS && VALUES <= GATES);
};

// WITH_WIDTHS: the statement with WK and WV as constants: DK and DV rounded up.
#define WITH_WIDTHS(DK, DV, ...) \
    do { \
        if ((DK) <= 32 && (DV) <= 32) { enum { WK = 32, WV = 32 }; __VA_ARGS__; } \
        else if ((DK) <= 32 && (DV) <= 64) { enum { WK = 32, WV = 64 }; __VA_ARGS__; } \
        else if ((DK) <= 64 && (DV) <= 64) { enum { WK = 64, WV = 64 }; __VA_ARGS__; } \
        else if ((DK) <= 64) { enum { WK = 64, WV = 128 }; __VA_ARGS__; } \
        else { enum { WK = 128, WV = 128 }; __VA_ARGS__; } \
    } while (0)

// gates_fetch: start copying 64 rows of g, `stride` apart, into a tile [64][W + 4] of fp32; what is
// not among the first `rows` rows and `columns` columns becomes 0: it fades nothing.
template <int W, int THREADS>
static __device__ inline void gates_fetch(float *tile, const float *g, size_t stride, int rows,
                                          int columns)
{
    for (int i = threadIdx.x; i < CS * W / 4; i += THREADS) {
        const int r = i / (W / 4), c = i % (W / 4) * 4;
        const bool inside = r < rows && c < columns;
        copy_async((floatX *)(tile + r * (W + 4) + c),
                   (const floatX *)(inside ? g + r * stride + c : g), inside);
    }
}

// state_fetch: start copying a state (DK,DV) into a tile [WK][WV + 8]; 0 beyond.
template <int WK, int WV, int THREADS>
static __device__ inline void state_fetch(floatX *tile, const floatX *state, int DK, int DV)
{
    for (int i = threadIdx.x; i < WK * WV / 8; i += THREADS) {
        const int r = i / (WV / 8), c = i % (WV / 8) * 8;
        const bool inside = r < DK && c < DV;
        copy_async(tile + r * (WV + 8) + c, inside ? state + r * DV + c : state, inside);
    }
}

// gates_sum: b, in units of ln 2, in the place of g: b_t = the sum of g from row 0 to t; the first
// W threads have a column each.
template <int W> static __device__ inline void gates_sum(float *b)
{
    float sum = 0;
    if (threadIdx.x < W)
#pragma unroll 16
        for (int t = 0; t < CS; t++)
            b[t * (W + 4) + threadIdx.x] = sum += LOG2E * b[t * (W + 4) + threadIdx.x];
}

// end_at: b at the last row of a block of 16; block -1: 0, as before the chunk.
static __device__ inline float end_at(const float *b, int block, int ld, int column)
{
    return block < 0 ? 0 : b[(BLOCK * block + BLOCK - 1) * ld + column];
}

// faded2: the two of x times 2^low, 2^high.
static __device__ inline uint32_t faded2(uint32_t x, float low, float high)
{
    return pack2(unpack(x, 0) * exp2_fast(low), unpack(x, 1) * exp2_fast(high));
}

// fade_left: a left operand of mma, rows r and r + 8 of x at four columns, times 2^(b_t - b_m) or,
// SIGN -1, 2^(b_m - b_t): b at row r and the first of the columns, rows ld apart, b_m at that
// column, NULL: 0.
template <int SIGN>
static __device__ inline uint4 fade_left(uint4 x, const float *b, int ld, const float *b_m)
{
    const float2 p = *(const float2 *)b, q = *(const float2 *)(b + 8 * ld);
    const float2 r = *(const float2 *)(b + 8), s = *(const float2 *)(b + 8 * ld + 8);
    float2 m = {}, n = {};
    if (b_m) {
        m = *(const float2 *)b_m;
        n = *(const float2 *)(b_m + 8);
    }
    return {faded2(x.x, SIGN * (p.x - m.x), SIGN * (p.y - m.y)),
            faded2(x.y, SIGN * (q.x - m.x), SIGN * (q.y - m.y)),
            faded2(x.z, SIGN * (r.x - n.x), SIGN * (r.y - n.y)),
            faded2(x.w, SIGN * (s.x - n.x), SIGN * (s.y - n.y))};
}

// chunk_states_kernel: a block takes R keys, a warp 16, and N values of a head's S, which starts as
// `first` (NULL: 0) and ends as `last` (NULL: not asked for), through its chunks while the next one
// is being fetched: states (B,NH,NC,DK,DV) = S before each, NULL: not asked for,
//   S = diag(exp(b_C)) S + sum_u (k_u exp(b_C - b_u)) v_u^T
// BACK: D from the last chunk to the first, states = D before, that is after the chunk's tokens,
//   D = diag(exp(b_C)) D + scale sum_t (q_t exp(b_t)) dout_t^T
template <int R, int N, int BACK>
static __global__ void __launch_bounds__(2 * R)
chunk_states_kernel(floatX *states, float *last, const float *first, GlaInputs in, GlaShape s)
{
    enum { THREADS = 2 * R, LX = R + 8, LY = N + 8, LG = R + 4 };
    enum { STAGE = CS * LX + CS * LY + 2 * CS * LG };
    extern __shared__ __align__(16) floatX tiles[]; // twice k, v, g; BACK: q, dout, g
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, T = (int)s.T;
    const int DK = (int)s.DK, DV = (int)s.DV, chunks = (T + CS - 1) / CS;
    const int slabs_k = (DK + R - 1) / R, slabs_v = (DV + N - 1) / N;
    const size_t head = blockIdx.x / (slabs_k * slabs_v), h = head % s.NH, b = head / s.NH;
    const int key = blockIdx.x / slabs_v % slabs_k * R, value = blockIdx.x % slabs_v * N;
    const int own = 16 * warp, row = key + own + lane / 4;
    const size_t x_pitch = BACK ? s.q_pitch : s.k_pitch, y_pitch = BACK ? s.NH * DV : s.v_pitch;
    const floatX *x = (BACK ? in.q : in.k) + b * T * x_pitch + h * DK + key;
    const floatX *y = (BACK ? in.dout : in.v) + b * T * y_pitch + h * DV + value;
    const float *g = in.g + (b * T * s.NH + h) * DK + key;
    float S[N / 8][4];
    const auto fetch = [=](int i) {
        const int t0 = (BACK ? chunks - 1 - i : i) * CS, rows = T - t0;
        floatX *to = tiles + i % 2 * STAGE;
        tile_fetch<CS, R, THREADS>(to, x + t0 * x_pitch, (int)x_pitch, rows, DK - key);
        tile_fetch<CS, N, THREADS>(to + CS * LX, y + t0 * y_pitch, (int)y_pitch, rows, DV - value);
        gates_fetch<R, THREADS>((float *)(to + CS * LX + CS * LY), g + t0 * s.NH * DK, s.NH * DK,
                                rows, DK - key);
    };
    const auto place = [=](int i) { // of element i in S (DK,DV); -1: beyond the head
        const int r = row + i % 4 / 2 * 8, c = value + i / 4 * 8 + lane % 4 * 2 + i % 2;
        return r < DK && c < DV ? (int)(r * DV + c) : -1;
    };
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        S[i / 4][i % 4] = first && place(i) >= 0 ? first[head * DK * DV + place(i)] : 0;
    fetch(0);
    for (int i = 0; i < chunks; i++) {
        const int c = BACK ? chunks - 1 - i : i;
        const floatX *xs = tiles + i % 2 * STAGE, *ys = xs + CS * LX;
        const float *gs = (const float *)(ys + CS * LY) + own + lane / 4;
        float sum[2] = {}, fade[4][8];
        uint4 left[4];
        copy_wait();
        __syncthreads(); // this chunk is there; nobody reads the one before any more
        if (i + 1 < chunks)
            fetch(i + 1);
        if (states)
            rows_store<N>(states + ((head * chunks + c) * DK + key + own) * DV + value, S, 1, DV,
                          DK - key - own, DV - value);
        // fade: of tokens 2 l, 2 l + 1 of each 8, at the warp's keys r and r + 8, as an operand has
        // them; b_C - b_u is a sum from the end, b_t one from the start
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int e = BACK ? n : 7 - n, l = lane % 4;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float low = LOG2E * gs[(8 * e + 2 * l) * LG + 8 * r];
                const float high = LOG2E * gs[(8 * e + 2 * l + 1) * LG + 8 * r];
                float pair = low + high, others = 0;
                const float beside = __shfl_xor_sync(~0u, pair, 1);
                others += (BACK ? l & 1 : !(l & 1)) ? beside : 0;
                pair += beside;
                const float far = __shfl_xor_sync(~0u, pair, 2);
                others += (BACK ? l & 2 : !(l & 2)) ? far : 0;
                fade[e / 2][e % 2 * 4 + 2 * r] = sum[r] + others + (BACK ? low : high);
                fade[e / 2][e % 2 * 4 + 2 * r + 1] = sum[r] + others + (BACK ? low + high : 0);
                sum[r] += pair + far;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 f = ldmatrix<1>(xs + 16 * k * LX + own + column_at(lane, LX));
            uint32_t *parts[] = {&f.x, &f.y, &f.z, &f.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float scale = BACK ? s.scale : 1;
                *parts[j] = pack2(scale * unpack(*parts[j], 0) * exp2_fast(fade[k][2 * j]),
                                  scale * unpack(*parts[j], 1) * exp2_fast(fade[k][2 * j + 1]));
            }
            left[k] = f;
        }
#pragma unroll
        for (int n = 0; n < N / 2; n++)
            S[n / 4][n % 4] *= exp2_fast(sum[n % 4 / 2]);
        add_product<N, CS>(S, left, NULL, ys + row_at(lane, LY), 0, 3);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (last && place(i) >= 0)
            last[head * DK * DV + place(i)] = S[i / 4][i % 4];
}

// diagonal_scores: a block's own 16 tokens: a, as a left operand of mma, = sum_i q_ti k_ui 2^(b_ti
// - b_ui) for u <= t, else 0; q, k, b: its first row. Lane 4 r + l has rows r and r + 8 and every
// fourth four channels.
template <int WK>
static __device__ inline uint4 diagonal_scores(const floatX *q, const floatX *k, const float *b)
{
    enum { LK = WK + 8, LB = WK + 4 };
    const int lane = threadIdx.x % WARP, r = lane / 4, l = lane % 4;
    float a[3][8] = {}; // rows r, r + 8, r + 8 with columns 0 to 7, 0 to 7, 8 to 15
#pragma unroll 1
    for (int c = 4 * l; c < WK; c += 16) {
        float q_t[2][4], b_t[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 q2 = *(const uint2 *)(q + (r + 8 * half) * LK + c);
            const Pack<float, 4> b4 = *(const Pack<float, 4> *)(b + (r + 8 * half) * LB + c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                q_t[half][i] = unpack(i < 2 ? q2.x : q2.y, i % 2);
                b_t[half][i] = b4.v[i];
            }
        }
#pragma unroll
        for (int u = 0; u < 16; u++) {
            const uint2 k2 = *(const uint2 *)(k + u * LK + c);
            const Pack<float, 4> b_u = *(const Pack<float, 4> *)(b + u * LB + c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float k_u = unpack(i < 2 ? k2.x : k2.y, i % 2);
#pragma unroll
                for (int half = u / 8; half < 2; half++) {
                    const float ahead = b_t[half][i] - b_u.v[i]; // above 0: masked below
                    const float fade = exp2_fast(u / 8 < half ? ahead : fminf(ahead, 0));
                    float *to = &a[u / 8 + half][u % 8];
                    *to = fmaf(q_t[half][i] * fade, k_u, *to);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 3; n++) // a row's four lanes: each keeps the sums of columns 2 l, 2 l + 1
#pragma unroll
        for (int far = 2; far > 0; far /= 2)
#pragma unroll
            for (int i = 0; i < 2 * far; i++) {
                const float low = a[n][i], high = a[n][i + 2 * far];
                a[n][i] = (l & far ? high : low) +
                          __shfl_xor_sync(~0u, l & far ? low : high, far);
            }
    const bool low = 2 * l <= r, high = 2 * l + 1 <= r;
    return {pack2(low ? a[0][0] : 0, high ? a[0][1] : 0), pack2(a[1][0], a[1][1]), 0,
            pack2(low ? a[2][0] : 0, high ? a[2][1] : 0)};
}

// chunk_output_kernel: o of a chunk, by a block; a warp has 16 rows. A, without the scale, stays in
// pairs (B,NH,NC,64,64) unless NULL; blocks above the diagonal stay as they are. Between two blocks
// of 16, t in one and u in an earlier one J, A is a product of q_t exp(b_t - b_m) and k_u exp(b_m -
// b_u), m the last row of J: no exponent is above 0.
template <int WK, int WV>
static __global__ void __launch_bounds__(CHUNK_THREADS, WK > 64 ? 3 : 4)
chunk_output_kernel(floatX *o, floatX *pairs, const floatX *states, GlaInputs in, GlaShape s)
{
    typedef Space<WK, WV> Sp;
    enum { LK = Sp::LK, LV = Sp::LV, LB = Sp::LB };
    extern __shared__ __align__(16) floatX tiles[];
    floatX *qs = tiles, *ks = qs + Sp::KEYS, *ss = tiles, *vs = ks + Sp::KEYS;
    float *bs = (float *)(ks + Sp::KEYS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, own = 16 * warp;
    const int DK = (int)s.DK, DV = (int)s.DV, chunks = (int)((s.T + CS - 1) / CS);
    const size_t head = blockIdx.x / chunks, h = head % s.NH, t0 = blockIdx.x % chunks * CS;
    const size_t token = head / s.NH * s.T + t0;
    const int rows = (int)(s.T - t0), l2 = lane % 4 * 2;
    float dots[3][2][4] = {};
    uint4 a[4], q_in[WK / 16];
    tile_fetch<CS, WK, CHUNK_THREADS>(qs, in.q + token * s.q_pitch + h * DK, (int)s.q_pitch, rows,
                                      DK);
    tile_fetch<CS, WK, CHUNK_THREADS>(ks, in.k + token * s.k_pitch + h * DK, (int)s.k_pitch, rows,
                                      DK);
    gates_fetch<WK, CHUNK_THREADS>(bs, in.g + (token * s.NH + h) * DK, s.NH * DK, rows, DK);
    copy_wait();
    __syncthreads();
    gates_sum<WK>(bs);
    __syncthreads();
    const uint4 diagonal = diagonal_scores<WK>(qs + own * LK, ks + own * LK, bs + own * LB);
    __syncwarp(); // the block's own keys have been read: they fade to its last row
    for (int i = lane; i < 16 * WK / 2; i += WARP) {
        const int r = own + i / (WK / 2), c = i % (WK / 2) * 2;
        const float *m = bs + (own + 15) * LB + c, *b = bs + r * LB + c;
        uint32_t *x = (uint32_t *)(ks + r * LK + c);
        *x = faded2(*x, m[0] - b[0], m[1] - b[1]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WK / 16; k++) {
        const uint4 q = ldmatrix<0>(qs + own * LK + 16 * k + row_at(lane, LK));
        const float *b = bs + (own + lane / 4) * LB + 16 * k + l2;
        q_in[k] = fade_left<1>(q, b, LB, NULL);
#pragma unroll
        for (int j = 0; j < 3; j++)
            if (j < warp)
                mma16(dots[j], fade_left<1>(q, b, LB, bs + (16 * j + 15) * LB + 16 * k + l2),
                      ldmatrix<0>(ks + 16 * j * LK + 16 * k + column_at(lane, LK)));
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        a[j] = j == warp ? diagonal : j < 3 && j < warp ? accumulator_pack(dots[j]) : uint4{};
    __syncthreads(); // S and v may take the place of q, k and b
    state_fetch<WK, WV, CHUNK_THREADS>(ss, states + (size_t)blockIdx.x * DK * DV, DK, DV);
    tile_fetch<CS, WV, CHUNK_THREADS>(vs, in.v + token * s.v_pitch + h * DV, (int)s.v_pitch, rows,
                                      DV);
    if (pairs) {
        floatX *to = pairs + ((size_t)blockIdx.x * CS + own + lane / 4) * CS + l2;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= warp) {
                *(uint32_t *)(to + 16 * j) = a[j].x;
                *(uint32_t *)(to + 16 * j + 8 * CS) = a[j].y;
                *(uint32_t *)(to + 16 * j + 8) = a[j].z;
                *(uint32_t *)(to + 16 * j + 8 * CS + 8) = a[j].w;
            }
    }
    copy_wait();
    __syncthreads();
    float out[WV / 8][4] = {};
    add_product<WV, WK>(out, q_in, NULL, ss + row_at(lane, LV), 0, WK);
    add_product<WV, CS>(out, a, NULL, vs + row_at(lane, LV), 0, warp);
    rows_store<WV>(o + ((token + own) * s.NH + h) * DV, out, s.scale, s.NH * DV, rows - own, DV);
}

// diagonal_grads: of a block's own 16 tokens, N channels, one a lane at a time, in fp32: from dA
// (16,16), rows ld_a apart, and q, k, b at the block's first row and the first of the channels
//   dq_t = sum_u dA_tu k_u 2^(b_t - b_u),  dk_u = sum_t dA_tu q_t 2^(b_t - b_u)          u <= t
//   dg_t = sum over u >= t of q_u dq_u - k_u dk_u, without the pairs t = u
// k becomes k 2^(b_15 - b), q becomes q 2^(b - b_m), m the row before the block, 0 without one.
template <int WK, int N>
static __device__ inline void diagonal_grads(float *dq, float *dk, float *dg, floatX *q, floatX *k,
                                             const float *b, const float *dA, int ld_a, bool first)
{
    enum { LK = WK + 8, LB = WK + 4 };
    for (int c = threadIdx.x % WARP; c < N; c += WARP) {
        float q_t[16], k_t[16], b_t[16], dq_t[16], dk_t[16], sum = 0;
        const float before = first ? 0 : b[c - LB];
#pragma unroll
        for (int t = 0; t < 16; t++) {
            q_t[t] = (float)q[t * LK + c];
            k_t[t] = (float)k[t * LK + c];
            b_t[t] = b[t * LB + c];
            dq_t[t] = dk_t[t] = 0;
        }
#pragma unroll
        for (int t = 0; t < 16; t++)
#pragma unroll
            for (int u0 = 0; u0 < t; u0 += 4) {
                const Pack<float, 4> d = *(const Pack<float, 4> *)(dA + t * ld_a + u0);
#pragma unroll
                for (int u = u0; u < u0 + 4 && u < t; u++) {
                    const float x = d.v[u - u0] * exp2_fast(b_t[t] - b_t[u]);
                    dq_t[t] = fmaf(x, k_t[u], dq_t[t]);
                    dk_t[u] = fmaf(x, q_t[t], dk_t[u]);
                }
            }
#pragma unroll
        for (int t = 15; t >= 0; t--) {
            const float own = dA[t * ld_a + t]; // cancels in dg, but for its rounding
            dg[t * LB + c] = sum += q_t[t] * dq_t[t] - k_t[t] * dk_t[t];
            dq[t * LB + c] = fmaf(own, k_t[t], dq_t[t]);
            dk[t * LB + c] = fmaf(own, q_t[t], dk_t[t]);
            q[t * LK + c] = (floatX)(q_t[t] * exp2_fast(b_t[t] - before));
            k[t * LK + c] = (floatX)(k_t[t] * exp2_fast(b_t[15] - b_t[t]));
        }
    }
}

// move_anchor: acc (16 x N) times 2^(b_to - b_from) of each column, of the ends of two blocks.
template <int N>
static __device__ inline void move_anchor(float acc[N / 8][4], const float *b, int ld, int to,
                                          int from)
{
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const int c = n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
        const float f = exp2_fast(end_at(b, to, ld, c) - end_at(b, from, ld, c));
        acc[n / 2][n % 2] *= f;
        acc[n / 2][n % 2 + 2] *= f;
    }
}

// flow_sum: sum (N) = column sums of x acc (16 x N) times 2^(b_to - b_from), x rows ld_x apart.
template <int N>
static __device__ inline void flow_sum(float *sum, const float acc[N / 8][4], const floatX *x,
                                       int ld_x, const float *b, int ld, int to, int from)
{
    const int top = threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const int c = n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
        float y = (float)x[top * ld_x + c] * acc[n / 2][n % 2] +
                  (float)x[(top + 8) * ld_x + c] * acc[n / 2][n % 2 + 2];
        for (int i = 4; i < WARP; i *= 2)
            y += __shfl_xor_sync(~0u, y, i);
        if (top == 0)
            sum[c] = y * exp2_fast(end_at(b, to, ld, c) - end_at(b, from, ld, c));
    }
}

// grads_finish: out (rows of `pitch`, 16 x N) = d + acc 2^(sign (b_t - b_m)), m: see end_at; and in
// the place of d the product x acc, which is q or k times the second part.
template <int N>
static __device__ inline void grads_finish(floatX *out, size_t pitch, int rows, int columns,
                                           float *d, float acc[N / 8][4], const floatX *x, int ld_x,
                                           const float *b, const float *own_b, int ld, int m,
                                           float sign)
{
    const int top = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int r = top + i % 4 / 2 * 8, c = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const float fade = exp2_fast(sign * (own_b[r * ld + c] - end_at(b, m, ld, c)));
        const float y = acc[i / 4][i % 4], diagonal = d[r * ld + c];
        d[r * ld + c] = (float)x[r * ld_x + c] * y;
        acc[i / 4][i % 4] = fmaf(y, fade, diagonal);
    }
    rows_store<N>(out, acc, 1, pitch, rows, columns);
}

// What chunk_grads_kernel has in shared memory; sums [11][WK]: rows of flows that pass over the
// start of a block of 16 or the whole chunk. dq, dk, dg take the place of v, dout, S and D.
template <int WK, int WV> struct GradsTiles {
    typedef Space<WK, WV> Sp;
    floatX *q, *k, *dA, *A, *v, *dout, *S, *D;
    float *b, *sums, *dq, *dk, *dg;
    __device__ GradsTiles(floatX *at)
    {
        q = at, k = q + Sp::KEYS, b = (float *)(k + Sp::KEYS);
        dA = (floatX *)(b + Sp::GATES / 2), A = dA + CS * Sp::LDA, sums = (float *)(A + TILE);
        v = at + Sp::REST_AT, dout = v + Sp::VALUES, S = dout + Sp::VALUES, D = S + Sp::STATE;
        dq = (float *)v, dk = dq + Sp::GATES / 2, dg = dk + Sp::GATES / 2;
    }
};

// chunk_scores_grads: dA_tu = scale dout_t . v_u, u <= t: two of the blocks of 16 of the warp's
// rows, in bf16, on the diagonal in fp32.
template <int WK, int WV>
static __device__ inline void chunk_scores_grads(GradsTiles<WK, WV> x, float scale)
{
    enum { LV = Space<WK, WV>::LV, LDA = Space<WK, WV>::LDA };
    const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP, own = 16 * warp;
    for (int j = threadIdx.x / CHUNK_THREADS * 2, n = 0; n < 2 && j <= warp; n++, j++) {
        float d[2][4] = {};
#pragma unroll
        for (int k = 0; k < WV / 16; k++)
            mma16(d, ldmatrix<0>(x.dout + own * LV + 16 * k + row_at(lane, LV)),
                  ldmatrix<0>(x.v + 16 * j * LV + 16 * k + column_at(lane, LV)));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = lane / 4 + i % 4 / 2 * 8, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const float y = scale * d[i / 4][i % 4];
            floatX *row = x.dA + (own + r) * LDA + 16 * j;
            if (j < warp)
                row[c] = (floatX)y;
            else
                ((float *)row)[c] = c <= r ? y : 0;
        }
    }
}

// chunk_values_grads: the warp's 16 rows and half the columns of dv = scale A^T dout + (k exp(b_C -
// b)) D; and what q and k get from S and D: dq = scale dout S^T, dk = v D^T, of half their columns.
template <int WK, int WV>
static __device__ inline void chunk_values_grads(floatX *dv, size_t pitch, int rows, int columns,
                                                 float dq[WK / 16][4], float dk[WK / 16][4],
                                                 GradsTiles<WK, WV> x, float scale)
{
    enum { LK = WK + 8, LV = WV + 8, LB = WK + 4, N = WV / 2, NK = WK / 2 };
    const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP, own = 16 * warp;
    const int half = threadIdx.x / CHUNK_THREADS;
    float d[N / 8][4] = {};
    uint4 left[4], faded_k[WK / 16];
#pragma unroll
    for (int i = 0; i < 4; i++)
        left[i] = i >= warp ? ldmatrix<1>(x.A + 16 * i * LDC + own + column_at(lane, LDC))
                            : uint4{};
    add_product<WV, CS, N>(d, left, NULL, x.dout + half * N + row_at(lane, LV), warp, 3);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        d[i / 4][i % 4] *= scale;
#pragma unroll
    for (int k = 0; k < WK / 16; k++) {
        const int c = 16 * k + lane % 4 * 2;
        faded_k[k] = fade_left<-1>(ldmatrix<0>(x.k + own * LK + 16 * k + row_at(lane, LK)),
                                   x.b + (own + lane / 4) * LB + c, LB, x.b + (CS - 1) * LB + c);
    }
    add_product<WV, WK, N>(d, faded_k, NULL, x.D + half * N + row_at(lane, LV), 0, WK);
    rows_store<N>(dv + half * N, d, 1, pitch, rows, columns - half * N);
#pragma unroll
    for (int k = 0; k < WV / 16; k++) {
        const uint4 dout = ldmatrix<0>(x.dout + own * LV + 16 * k + row_at(lane, LV));
        const uint4 v = ldmatrix<0>(x.v + own * LV + 16 * k + row_at(lane, LV));
#pragma unroll
        for (int n = 0; n < NK / 16; n++) {
            const int at = (half * NK + 16 * n) * LV + 16 * k + column_at(lane, LV);
            mma16(&dq[2 * n], dout, ldmatrix<0>(x.S + at));
            mma16(&dk[2 * n], v, ldmatrix<0>(x.D + at));
        }
    }
#pragma unroll
    for (int i = 0; i < NK / 2; i++)
        dq[i / 4][i % 4] *= scale;
    if (threadIdx.x < WK) { // what flows over the whole chunk: exp(b_C) times row sums of S D
        const floatX *S = x.S + threadIdx.x * LV, *D = x.D + threadIdx.x * LV;
        float sum = 0;
        for (int j = 0; j < WV; j += 8) {
            const Pack<floatX, 8> s8 = *(const Pack<floatX, 8> *)(S + j);
            const Pack<floatX, 8> d8 = *(const Pack<floatX, 8> *)(D + j);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum = fmaf((float)s8.v[i], (float)d8.v[i], sum);
        }
        x.sums[10 * WK + threadIdx.x] = sum * exp2_fast(x.b[(CS - 1) * LB + threadIdx.x]);
    }
}

// chunk_keys_grads: dq and dk of the warp's 16 rows and half their columns, from those of S and D.
// The sum for dq, over earlier blocks, is kept relative to b at the end of the last block added,
// that for dk, over later ones, to b at the end of the block before: to move it takes one factor a
// column.
template <int WK, int WV>
static __device__ inline void chunk_keys_grads(floatX *to_q, size_t q_pitch, floatX *to_k,
                                               size_t k_pitch, int rows, int columns,
                                               float dq[WK / 16][4], float dk[WK / 16][4],
                                               GradsTiles<WK, WV> x)
{
    enum { LK = WK + 8, LB = WK + 4, LDA = Space<WK, WV>::LDA, N = WK / 2 };
    const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP, own = 16 * warp;
    const int half = threadIdx.x / CHUNK_THREADS * N, at = own * LB + half;
    const floatX *qs = x.q + half, *ks = x.k + half;
    const float *b = x.b + half;
    for (int j = 0; j < warp; j++) {
        flow_sum<N>(x.sums + (warp * (warp - 1) / 2 + j) * WK + half, dq, qs + own * LK, LK, b, LB,
                    warp - 1, j - 1);
        move_anchor<N>(dq, b, LB, j, j - 1);
        const uint4 left = ldmatrix<0>(x.dA + own * LDA + 16 * j + row_at(lane, LDA));
#pragma unroll
        for (int n = 0; n < N / 16; n++)
            mma16(&dq[2 * n], left,
                  ldmatrix<1>(ks + 16 * j * LK + 16 * n + row_at(lane, LK)));
    }
    flow_sum<N>(x.sums + (6 + warp) * WK + half, dk, ks + own * LK, LK, b, LB, 3, warp);
    for (int i = 3; i > warp; i--) {
        move_anchor<N>(dk, b, LB, i, i - 1);
        const uint4 left = ldmatrix<1>(x.dA + 16 * i * LDA + own + column_at(lane, LDA));
#pragma unroll
        for (int n = 0; n < N / 16; n++)
            mma16(&dk[2 * n], left,
                  ldmatrix<1>(qs + 16 * i * LK + 16 * n + row_at(lane, LK)));
    }
    grads_finish<N>(to_q + half, q_pitch, rows, columns - half, x.dq + at, dq, qs + own * LK, LK, b,
                    b + own * LB, LB, warp - 1, 1);
    grads_finish<N>(to_k + half, k_pitch, rows, columns - half, x.dk + at, dk, ks + own * LK, LK, b,
                    b + own * LB, LB, warp, -1);
}

// chunk_gates_grads: dg of the chunk, a thread a channel and a block of 16 rows at a time. dg_t is
// the sum of all that flows from before t, S or a token w < t, to a token u >= t or to D, and is
// added up from flows alone: between the block and others suffixes of q dq and prefixes of k dk,
// past it the sums; only within the block, in fp32, it is a difference.
template <int WK, int WV>
static __device__ inline void chunk_gates_grads(float *dg, size_t pitch, int rows, int columns,
                                                GradsTiles<WK, WV> x)
{
    enum { LB = WK + 4 };
    for (int i = threadIdx.x; i < 4 * WK; i += GRADS_THREADS) {
        const int c = i % WK, block = i / WK, at = BLOCK * block * LB + c;
        float past = x.sums[10 * WK + c], in = 0;
        for (int k = block + 1; k < 4; k++)
            past += x.sums[(k * (k - 1) / 2 + block) * WK + c];
        for (int k = 0; k < block; k++)
            past += x.sums[(6 + k) * WK + c];
#pragma unroll
        for (int t = BLOCK - 1; t >= 0; t--) {
            in += x.dq[at + t * LB];
            x.dg[at + t * LB] += in;
        }
#pragma unroll
        for (int t = 0; t < BLOCK; t++) {
            if (BLOCK * block + t < rows && c < columns)
                dg[(BLOCK * block + t) * pitch + c] = x.dg[at + t * LB] + past;
            past += x.dk[at + t * LB];
        }
    }
}

// chunk_grads_kernel: dq, dk, dg, dv of a chunk, by a block; two warps have 16 rows, each half of
// their columns. states, dstates: S before the chunk, D, the gradient of S after it.
template <int WK, int WV>
static __global__ void __launch_bounds__(GRADS_THREADS, WK > 64 ? 1 : 2)
chunk_grads_kernel(floatX *dq, floatX *dk, float *dg, floatX *dv, const floatX *pairs,
                   const floatX *states, const floatX *dstates, GlaInputs in, GlaShape s)
{
    enum { LK = WK + 8, LB = WK + 4, N = WK / 2, LDA = Space<WK, WV>::LDA };
    extern __shared__ __align__(16) floatX tiles[];
    const GradsTiles<WK, WV> x(tiles);
    const int DK = (int)s.DK, DV = (int)s.DV, chunks = (int)((s.T + CS - 1) / CS);
    const size_t head = blockIdx.x / chunks, h = head % s.NH, t0 = blockIdx.x % chunks * CS;
    const size_t token = head / s.NH * s.T + t0, values = (token * s.NH + h) * DV;
    const size_t keys = (token * s.NH + h) * DK, size = (size_t)DK * DV;
    const int rows = (int)(s.T - t0), own = threadIdx.x / WARP % 4 * 16;
    const int half = threadIdx.x / CHUNK_THREADS * N, at = own * LB + half;
    const size_t to_q = (token + own) * s.q_pitch + h * DK;
    const size_t to_k = (token + own) * s.k_pitch + h * DK;
    const size_t to_v = (token + own) * s.v_pitch + h * DV;
    float dq_own[WK / 16][4] = {}, dk_own[WK / 16][4] = {};
    tile_fetch<CS, WK, GRADS_THREADS>(x.q, in.q + token * s.q_pitch + h * DK, (int)s.q_pitch, rows,
                                      DK);
    tile_fetch<CS, WK, GRADS_THREADS>(x.k, in.k + token * s.k_pitch + h * DK, (int)s.k_pitch, rows,
                                      DK);
    tile_fetch<CS, WV, GRADS_THREADS>(x.v, in.v + token * s.v_pitch + h * DV, (int)s.v_pitch, rows,
                                      DV);
    tile_fetch<CS, WV, GRADS_THREADS>(x.dout, in.dout + values, (int)s.NH * DV, rows, DV);
    gates_fetch<WK, GRADS_THREADS>(x.b, in.g + keys, s.NH * DK, rows, DK);
    state_fetch<WK, WV, GRADS_THREADS>(x.S, states + blockIdx.x * size, DK, DV);
    state_fetch<WK, WV, GRADS_THREADS>(x.D, dstates + blockIdx.x * size, DK, DV);
    for (int i = threadIdx.x; i < CS * CS / 8; i += GRADS_THREADS)
        if (i % 8 / 2 <= i / 8 / 16) // above the diagonal there is nothing
            copy_async(x.A + i / 8 * LDC + i % 8 * 8,
                       pairs + (size_t)blockIdx.x * CS * CS + i * 8, true);
    copy_wait();
    __syncthreads();
    gates_sum<WK>(x.b);
    chunk_scores_grads(x, s.scale);
    __syncthreads();
    chunk_values_grads(dv + to_v, s.v_pitch, rows - own, DV, dq_own, dk_own, x, s.scale);
    __syncthreads(); // v, dout, S and D have been read
    diagonal_grads<WK, N>(x.dq + at, x.dk + at, x.dg + at, x.q + own * LK + half,
                          x.k + own * LK + half, x.b + at, (float *)(x.dA + own * LDA + own),
                          LDA / 2, own == 0);
    __syncthreads();
    chunk_keys_grads(dq + to_q, s.q_pitch, dk + to_k, s.k_pitch, rows - own, DK, dq_own, dk_own, x);
    __syncthreads();
    chunk_gates_grads(dg + keys, s.NH * DK, rows, DK, x);
}

// chunk_states: launch chunk_states_kernel, with as many values a block as leave it 200 blocks.
template <int WK, int N, int BACK>
static void chunk_states(floatX *states, float *last, const float *first, GlaInputs in, GlaShape s,
                         cudaStream_t stream)
{
    enum { R = WK < 64 ? WK : 64, STAGE = CS * (R + 8 + N + 8 + 2 * (R + 4)) };
    const size_t blocks = s.B * s.NH * ((s.DK + R - 1) / R) * ((s.DV + N - 1) / N);
    if constexpr (N > 16)
        if (blocks < 200)
            return chunk_states<WK, N / 2, BACK>(states, last, first, in, s, stream);
    LAUNCH((chunk_states_kernel<R, N, BACK>), blocks, 2 * R, 4 * STAGE, stream, states, last, first,
           in, s);
}
#endif

// ---- the launchers

// gla_form: the form for heads of DK keys and DV values where --form asks for `form`. AUTO: by
// chunks, in BF16 and where the GPU has the shared memory, from 32 keys on. Dies if CHUNK cannot be
// had.
static int gla_form(size_t DK, size_t DV, int form)
{
    int most = 0, need = 1;
#ifdef PRECISION_BF16
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    WITH_WIDTHS(DK, DV, need = Space<WK, WV>::GRADS_BYTES);
#endif
    const int takes = DK % 8 == 0 && DV % 8 == 0 && DK <= 128 && DV <= 128 && need <= most;
    if (form == CHUNK && !takes)
        die(EXIT_USAGE, "--form chunk: heads of %zu keys and %zu values in " PRECISION_NAME
            "; expected multiples of 8 up to 128, in BF16, on a GPU with the shared memory of "
            "sm_90\nhint: --form auto", DK, DV);
    return form != AUTO ? form : takes && DK >= 32 ? CHUNK : RECURRENT;
}

// What a forward pass keeps for the backward pass, NC = ceil(T / 64). Tokens: tiles (B,NH,NC,DK,DV)
// = S before each 64, NULL: not kept. Chunks: the same in states, which the forward pass needs; and
// pairs (B,NH,NC,64,64) = A, NULL: not kept.
typedef struct {
    float *tiles;
    floatX *states, *pairs;
} GlaKept;

// gla_forward: o (B,T,NH,DV) = of every head, S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale
// S_t^T q_t: q, k (B,T,NH,DK), v (B,T,NH,DV), g (B,T,NH,DK) from LEAST_GATE to 0. S_0 = initial
// (B,NH,DK,DV), NULL: zero; final (B,NH,DK,DV) = S_T unless NULL, may alias initial where no
// backward pass follows, which reads initial and, by tokens, final; kept =. form: RECURRENT, DK,
// DV <= 256; or CHUNK if gla_form gives it, with floatX arrays and their rows on 16 bytes.
static void gla_forward(floatX *o, GlaKept kept, float *final, const floatX *q, const floatX *k,
                        const float *g, const floatX *v, const float *initial, GlaShape s, int form,
                        cudaStream_t stream)
{
    const GlaInputs in = {q, k, v, NULL, g};
    assert(s.DK <= HEAD_MOST && s.DV <= HEAD_MOST && s.T < INT_MAX / 2 && s.q_pitch < INT_MAX &&
           s.k_pitch < INT_MAX && s.v_pitch < INT_MAX);
#ifdef PRECISION_BF16
    const size_t chunks = s.B * s.NH * ((s.T + CS - 1) / CS);
    if (form == CHUNK) {
        WITH_WIDTHS(s.DK, s.DV,
            chunk_states<WK, WV < 64 ? WV : 64, 0>(kept.states, final, initial, in, s, stream);
            LAUNCH((chunk_output_kernel<WK, WV>), chunks, CHUNK_THREADS,
                   (Space<WK, WV>::OUTPUT_BYTES), stream, o, kept.pairs, kept.states, in, s));
        return;
    }
#endif
    WITH_HEAD(s.DK, LAUNCH((recurrent_kernel<P, PASS_O>), s.B * s.NH * ((s.DV + COLS - 1) / COLS),
                           COLS * P, 0, stream, o, s.NH * s.DV, NULL, kept.tiles, final, initial,
                           NULL, in, s));
}

// gla_backward: dq, dk, dv, laid out as q, k and v, dg (B,T,NH,DK) =, dinitial (B,NH,DK,DV) =
// (NULL: not asked for), from d_o (B,T,NH,DV), dfinal (B,NH,DK,DV), the gradient of S_T (NULL:
// zero), and the forward's kept, final (CHUNK: not read), q, k, g, v and initial. dstates
// (B,NH,NC,DK,DV): scratch of CHUNK.
static void gla_backward(floatX *dq, floatX *dk, float *dg, floatX *dv, float *dinitial,
                         floatX *dstates, const floatX *d_o, const float *dfinal, GlaKept kept,
                         const float *final, const floatX *q, const floatX *k, const float *g,
                         const floatX *v, const float *initial, GlaShape s, int form,
                         cudaStream_t stream)
{
    const GlaInputs in = {q, k, v, d_o, g};
    const size_t keys = s.B * s.NH * ((s.DK + COLS - 1) / COLS);
#ifdef PRECISION_BF16
    const size_t chunks = s.B * s.NH * ((s.T + CS - 1) / CS);
    if (form == CHUNK) {
        WITH_WIDTHS(s.DK, s.DV,
            chunk_states<WK, WV < 64 ? WV : 64, 1>(dstates, dinitial, dfinal, in, s, stream);
            LAUNCH((chunk_grads_kernel<WK, WV>), chunks, GRADS_THREADS,
                   (Space<WK, WV>::GRADS_BYTES), stream, dq, dk, dg, dv, kept.pairs, kept.states,
                   dstates, in, s));
        return;
    }
#endif
    WITH_HEAD(s.DV,
        LAUNCH((recurrent_kernel<P, PASS_DQ>), keys, COLS * P, 0, stream, dq, s.q_pitch, dg, NULL,
               NULL, initial, NULL, in, s);
        LAUNCH((recurrent_kernel<P, PASS_DK>), keys, COLS * P, 0, stream, dk, s.k_pitch, dg,
               kept.tiles, NULL, dfinal, final, in, s));
    WITH_HEAD(s.DK, LAUNCH((recurrent_kernel<P, PASS_DV>),
                           s.B * s.NH * ((s.DV + COLS - 1) / COLS), COLS * P, 0, stream, dv,
                           s.v_pitch, NULL, NULL, dinitial, dfinal, NULL, in, s));
}

// ---- gates, and how o is read

// sigmoid: 1 / (1 + exp(-x)), relative error 1e-6; far out 0 or 1.
static __device__ inline float sigmoid(float x)
{
    return __fdividef(1, 1 + exp2_fast(-LOG2E * x));
}

// gates_forward_kernel: a thread an element.
static __global__ void gates_forward_kernel(float *g, floatX *k, size_t pitch, size_t n, int K,
                                            float tau)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const float z = g[i], x = (fminf(z, 0) - log1pf(expf(-fabsf(z)))) / tau;
    g[i] = z != z ? z : fmaxf(x, LEAST_GATE);
    if (k)
        k[i / K * pitch + i % K] = (floatX)-expm1f(g[i]);
}

// gates_forward: g (N,K) = max(ln sigmoid(z) / tau, -30) in the place of z; k (N,K), rows `pitch`
// apart, NULL: not asked for, = 1 - exp(g), as -expm1(g): 2e-5 at z = 8.
static void gates_forward(float *g, floatX *k, size_t pitch, size_t N, size_t K, float tau,
                          cudaStream_t stream)
{
    const size_t n = N * K;
    LAUNCH(gates_forward_kernel, (n + ROW_WARPS * WARP - 1) / (ROW_WARPS * WARP), ROW_WARPS * WARP,
           0, stream, g, k, pitch, n, (int)K, tau);
}

// The four things that a token's row has: q at 0, v at K, p at K + C, k at K + 2 C; heads side by
// side in each; `pitch` from one token's to the next's.
typedef struct {
    size_t N, pitch;
    int NH, DK, DV, K, C;
} Tokens;

// Where a warp's head of a token starts in these, and in rows of K and of C.
typedef struct {
    size_t token, q, v, p, k, keys, values;
    int h;
} HeadRow;

// head_row: of this warp; its token is >= N where there is none.
static __device__ inline HeadRow head_row(Tokens s)
{
    const size_t i = row_of_warp(), n = i / s.NH, at = n * s.pitch;
    const int h = (int)(i % s.NH), keys = h * s.DK, values = h * s.DV;
    return {n, at + keys, at + s.K + values, at + s.K + s.C + values, at + s.K + 2 * s.C + keys,
            n * s.K + keys, n * s.C + values, h};
}

// read_row: y = (x - mean) rstd, x = o + sigmoid(a v) of a head, elements lane + 32 i, *rstd = 1 /
// sqrt(var + 1e-5), w of the head, NULL: x = o; returns a = sum_i q_i w_i k_i. sigmoid(x) - 1/2 is
// tanh(x/2) / 2: the half, which the norm takes away, would cost a small o its digits.
template <int P>
static __device__ inline float read_row(float (&y)[P], float *rstd, const floatX *o,
                                        const floatX *row, const float *w, HeadRow r, Tokens s)
{
    const int lane = threadIdx.x % WARP;
    float a = 0, sum = 0, squares = 0;
    for (int i = lane; w && i < s.DK; i += WARP)
        a += (float)row[r.q + i] * w[i] * (float)row[r.k + i];
    a = warp_sum(a);
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int j = lane + WARP * i;
        y[i] = j < s.DV ? (float)o[r.values + j] : 0;
        if (w && j < s.DV)
            y[i] += tanhf(a * (float)row[r.v + j] / 2) / 2;
        sum += y[i];
    }
    const float mean = warp_sum(sum) / (float)s.DV;
#pragma unroll
    for (int i = 0; i < P; i++) {
        y[i] = lane + WARP * i < s.DV ? y[i] - mean : 0;
        squares += y[i] * y[i];
    }
    *rstd = rsqrtf(warp_sum(squares) / (float)s.DV + 1e-5f);
#pragma unroll
    for (int i = 0; i < P; i++)
        y[i] *= *rstd;
    return a;
}

// read_forward_kernel: a warp a head.
template <int P>
static __global__ void read_forward_kernel(floatX *c, const floatX *__restrict__ o,
                                           const floatX *__restrict__ row, const float *w, Tokens s)
{
    const HeadRow r = head_row(s);
    float y[P], rstd;
    if (r.token >= s.N)
        return;
    read_row<P>(y, &rstd, o, row, w ? w + r.h * s.DK : NULL, r, s);
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int j = threadIdx.x % WARP + WARP * i;
        if (j < s.DV) {
            const float p = (float)row[r.p + j];
            c[r.values + j] = (floatX)(p * sigmoid(p) * y[i]);
        }
    }
}

// read_forward: c (N,C) = SiLU(p) n, n = LayerNorm, eps 1e-5, by heads of o + sigmoid(a v), a =
// sum_i q_i w_i k_i of a head, or without w of o; o (N,C), rows of q, v, p and k, w (K), NULL: no.
static void read_forward(floatX *c, const floatX *o, const floatX *row, const float *w, Tokens s,
                         cudaStream_t stream)
{
    WITH_HEAD(s.DV, LAUNCH(read_forward_kernel<P>, (s.N * s.NH + ROW_WARPS - 1) / ROW_WARPS,
                           ROW_WARPS * WARP, 0, stream, c, o, row, w, s));
}

// read_backward_kernel: a warp a head.
template <int P>
static __global__ void read_backward_kernel(floatX *d_o, floatX *drow, float *da,
                                            const floatX *__restrict__ dc,
                                            const floatX *__restrict__ o,
                                            const floatX *__restrict__ row, const float *w,
                                            Tokens s)
{
    const HeadRow r = head_row(s);
    float y[P], dn[P], rstd, sum = 0, sum_y = 0, da_h = 0;
    if (r.token >= s.N)
        return;
    const float a = read_row<P>(y, &rstd, o, row, w ? w + r.h * s.DK : NULL, r, s);
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int j = threadIdx.x % WARP + WARP * i;
        dn[i] = 0;
        if (j < s.DV) {
            const float p = (float)row[r.p + j], f = sigmoid(p), d = (float)dc[r.values + j];
            dn[i] = d * p * f;
            drow[r.p + j] = (floatX)(d * y[i] * (f + p * f * (1 - f)));
        }
        sum += dn[i];
        sum_y += dn[i] * y[i];
    }
    sum = warp_sum(sum) / (float)s.DV;
    sum_y = warp_sum(sum_y) / (float)s.DV;
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int j = threadIdx.x % WARP + WARP * i;
        if (j < s.DV) {
            const float v = (float)row[r.v + j], f = sigmoid(a * v);
            const float d = rstd * (dn[i] - sum - y[i] * sum_y);
            d_o[r.values + j] = (floatX)d;
            da_h += d * f * (1 - f) * v;
        }
    }
    da_h = warp_sum(da_h);
    if (da && threadIdx.x % WARP == 0) {
        da[(r.token * s.NH + r.h) * 2] = a;
        da[(r.token * s.NH + r.h) * 2 + 1] = da_h;
    }
}

// read_backward: d_o (N,C) =, the part of p of drow =, da (N,NH,2) = a and its gradient (NULL: no
// w) from dc (N,C) and the forward's o, row, w. With n the norm's output, r = sigmoid(a v):
//   dn = dc SiLU(p),  do = rstd (dn - mean(dn) - n mean(dn n)),  da = sum of do r (1 - r) v
static void read_backward(floatX *d_o, floatX *drow, float *da, const floatX *dc, const floatX *o,
                          const floatX *row, const float *w, Tokens s, cudaStream_t stream)
{
    WITH_HEAD(s.DV, LAUNCH(read_backward_kernel<P>, (s.N * s.NH + ROW_WARPS - 1) / ROW_WARPS,
                           ROW_WARPS * WARP, 0, stream, d_o, drow, da, dc, o, row, w, s));
}

// gates_backward_kernel: a warp a head.
static __global__ void gates_backward_kernel(floatX *drow, floatX *dz, const float *__restrict__ dg,
                                             const floatX *__restrict__ d_o,
                                             const float *__restrict__ da,
                                             const floatX *__restrict__ row,
                                             const float *__restrict__ g, const float *w, float tau,
                                             Tokens s)
{
    const HeadRow r = head_row(s);
    const int lane = threadIdx.x % WARP;
    if (r.token >= s.N)
        return;
    const float a = w ? da[(r.token * s.NH + r.h) * 2] : 0;
    const float da_h = w ? da[(r.token * s.NH + r.h) * 2 + 1] : 0;
    for (int i = lane; i < s.DK; i += WARP) {
        const float g_i = g[r.keys + i], dw = w ? da_h * w[r.h * s.DK + i] : 0;
        const float dk = (float)drow[r.k + i] + dw * (float)row[r.q + i];
        const float d = dg[r.keys + i] - (dz ? 0 : expf(g_i) * dk);
        const float dz_i = g_i <= LEAST_GATE ? 0 : d * -expm1f(tau * g_i) / tau;
        if (w)
            drow[r.q + i] = (floatX)((float)drow[r.q + i] + dw * (float)row[r.k + i]);
        drow[r.k + i] = (floatX)(dz ? dk : dz_i);
        if (dz)
            dz[r.keys + i] = (floatX)dz_i;
    }
    for (int j = lane; w && j < s.DV; j += WARP) {
        const float f = sigmoid(a * (float)row[r.v + j]);
        const float e = (float)d_o[r.values + j] * f * (1 - f);
        drow[r.v + j] = (floatX)((float)drow[r.v + j] + a * e);
    }
}

// augment_slices_kernel: partial (COLUMN_SLICES,K) = sums of da q k over every slice of the tokens.
static __global__ void augment_slices_kernel(float *partial, const float *__restrict__ da,
                                             const floatX *__restrict__ row, Tokens s)
{
    const int c = blockIdx.x / COLUMN_SLICES * WARP + threadIdx.x % WARP, own = min(c, s.K - 1);
    size_t first;
    const int rows = slice_rows(&first, s.N);
    float sum = 0;
#pragma unroll 8
    for (int n = threadIdx.x / WARP; n < rows; n += ROW_WARPS) {
        const floatX *q = row + (first + n) * s.pitch + own;
        const float da_h = da[((first + n) * s.NH + own / s.DK) * 2 + 1];
        sum += da_h * (float)q[0] * (float)q[s.K + 2 * s.C];
    }
    columns_sum<1, ROW_WARPS>(partial, &sum, c, s.K);
}

// gates_backward: what augmentation adds to the parts of q, v and k of drow, dw (K) += and dz, from
// dg (N,K), d_o (N,C), da (N,NH,2), drow and the forward's row, g, w (NULL: no augmentation). Of
// tied keys, k = 1 - exp(g), dz takes the place of dk in drow; else it is dz (N,K), then not NULL.
//   dq = da w k,  dk = da q w,  dv = a do r (1 - r),  dw = sum over tokens of da q k
//   dz = (dg - exp(g) dk) sigmoid(-z) / tau, 0 where g is -30; sigmoid(-z) = 1 - exp(tau g)
// partial (COLUMN_SLICES,K): scratch.
static void gates_backward(floatX *drow, floatX *dz, float *dw, float *partial, const float *dg,
                           const floatX *d_o, const float *da, const floatX *row, const float *g,
                           const float *w, float tau, Tokens s, cudaStream_t stream)
{
    LAUNCH(gates_backward_kernel, (s.N * s.NH + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0,
           stream, drow, dz, dg, d_o, da, row, g, w, tau, s);
    if (!w)
        return;
    LAUNCH(augment_slices_kernel, (s.K + WARP - 1) / WARP * COLUMN_SLICES, ROW_WARPS * WARP, 0,
           stream, partial, da, row, s);
    slices_sum(dw, NULL, partial, COLUMN_SLICES, (size_t)s.K, 0, 0, (size_t)s.K, 0, stream);
}

// ------------------------------------------------------------------------------------------------
// [block] What stands around the recurrence: convolution, SiLU, products in rows of their own.

enum { STRIP = 16, CONV_SLICES = 128, CONV_THREADS = ROW_WARPS * WARP, WINDOW = 4, EACH = 4 };

// silu_slope: the derivative of SiLU(x) = x sigmoid(x).
static __device__ inline float silu_slope(float x)
{
    const float p = sigmoid(x);
    return p + x * p * (1 - p);
}

// What the convolution's kernels are told: strips of STRIP positions, groups of VEC channels.
typedef struct {
    int T, C;
    size_t B, strips, groups;
} Conv;

// window_push: x moves up by one, and its last are VEC channels of a row; NULL: zeros.
template <int W, int VEC>
static __device__ inline void window_push(float (&x)[W][VEC], const floatX *row)
{
    Pack<floatX, VEC> last = {};
    if (row)
        last = *(const Pack<floatX, VEC> *)row;
#pragma unroll
    for (int w = 0; w < W; w++)
#pragma unroll
        for (int v = 0; v < VEC; v++)
            x[w][v] = w + 1 < W ? x[w + 1][v] : (float)last.v[v];
}

// conv_forward_kernel: a thread a strip of VEC channels, the window in registers.
template <int W, int VEC>
static __global__ void conv_forward_kernel(floatX *__restrict__ out, floatX *window,
                                           const floatX *__restrict__ x,
                                           const float *__restrict__ weight, Conv s)
{
    const size_t i = blockIdx.x * (size_t)CONV_THREADS + threadIdx.x, b = i / s.groups / s.strips;
    const int c = (int)(i % s.groups) * VEC, t0 = (int)(i / s.groups % s.strips) * STRIP;
    float seen[W][VEC] = {};
    if (b >= s.B)
        return;
    x += b * s.T * s.C + c;
    out += b * s.T * s.C + c;
    window = window ? window + b * (W - 1) * s.C + c : NULL;
#pragma unroll
    for (int w = 0; w < W - 1; w++) {
        const int t = t0 - (W - 1) + w;
        window_push<W, VEC>(seen, t >= 0 ? x + (size_t)t * s.C
                                         : window ? window + (t + W - 1) * s.C : NULL);
    }
    for (int t = t0; t < min(t0 + STRIP, s.T); t++) {
        Pack<floatX, VEC> y;
        window_push<W, VEC>(seen, x + (size_t)t * s.C);
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            float u = 0;
            for (int w = 0; w < W; w++)
                u += weight[(c + v) * W + w] * seen[w][v];
            y.v[v] = (floatX)(u * sigmoid(u));
        }
        *(Pack<floatX, VEC> *)(out + (size_t)t * s.C) = y;
    }
#pragma unroll
    for (int w = 1; w < W; w++)
        for (int v = 0; v < VEC && window; v++)
            window[(w - 1) * s.C + v] = (floatX)seen[w][v];
}

// conv_backward_kernel: a warp takes 32 VEC channels and every `slices`-th strip: dx =, and partial
// (slices,C,W) = its part of the sum for the weights. The gradient of a row is due W - 1 rows
// later, so that strips overlap by as many.
template <int W, int VEC>
static __global__ void conv_backward_kernel(floatX *__restrict__ dx, float *partial,
                                            const floatX *__restrict__ dout,
                                            const floatX *__restrict__ x,
                                            const float *__restrict__ weight, Conv s, size_t slices)
{
    const size_t warps = (s.groups + WARP - 1) / WARP, task = row_of_warp(), slice = task / warps;
    const int c = (int)(task % warps * WARP + threadIdx.x % WARP) * VEC;
    float seen[W][VEC], du[W][VEC], taps[W][VEC], sums[W][VEC] = {};
    if (slice >= slices || c >= s.C)
        return;
#pragma unroll
    for (int w = 0; w < W; w++)
        for (int v = 0; v < VEC; v++)
            taps[w][v] = weight[(c + v) * W + w];
    for (size_t i = slice; i < s.B * s.strips; i += slices) {
        const int t0 = (int)(i % s.strips) * STRIP, t1 = min(t0 + STRIP, s.T);
        const size_t first = i / s.strips * s.T;
#pragma unroll
        for (int w = 0; w < W; w++) {
            const int t = t0 - W + w;
            window_push<W, VEC>(seen, t >= 0 ? x + (first + t) * s.C + c : NULL);
            window_push<W, VEC>(du, NULL);
        }
        for (int t = t0; t < t1 + W - 1; t++) {
            const bool inside = t < s.T, own = t < t1;
            Pack<floatX, VEC> due;
            window_push<W, VEC>(seen, inside ? x + (first + t) * s.C + c : NULL);
            window_push<W, VEC>(du, inside ? dout + (first + t) * s.C + c : NULL);
#pragma unroll
            for (int v = 0; v < VEC; v++) {
                float u = 0, sum = 0;
                for (int w = 0; w < W; w++)
                    u += taps[w][v] * seen[w][v];
                du[W - 1][v] *= silu_slope(u);
                for (int w = 0; w < W; w++) { // row t - W + 1 is read at it and w later
                    sum += taps[W - 1 - w][v] * du[w][v];
                    sums[w][v] += own ? du[W - 1][v] * seen[w][v] : 0;
                }
                due.v[v] = (floatX)sum;
            }
            if (t - W + 1 >= t0)
                *(Pack<floatX, VEC> *)(dx + (first + t - W + 1) * s.C + c) = due;
        }
    }
#pragma unroll
    for (int w = 0; w < W; w++)
        for (int v = 0; v < VEC; v++)
            partial[(slice * s.C + c + v) * W + w] = sums[w][v];
}

// conv_of: see Conv.
static Conv conv_of(size_t B, size_t T, size_t C, size_t vec)
{
    assert(T < INT_MAX / 2 && C * WINDOW < INT_MAX / 2);
    return {(int)T, (int)C, B, (T + STRIP - 1) / STRIP, C / vec};
}

// WITH_CONV: the statement with WIDTH, 2 or 4, and VEC as constants: two channels a thread where
// their number is even.
#define WITH_CONV(W, C, ...) \
    do { \
        if ((W) == 2 && (C) % 2 == 0) { enum { WIDTH = 2, VEC = 2 }; __VA_ARGS__; } \
        else if ((W) == 2) { enum { WIDTH = 2, VEC = 1 }; __VA_ARGS__; } \
        else if ((C) % 2 == 0) { enum { WIDTH = 4, VEC = 2 }; __VA_ARGS__; } \
        else { enum { WIDTH = 4, VEC = 1 }; __VA_ARGS__; } \
    } while (0)

// conv_forward: out (B,T,C) = SiLU(u), u_t[c] = sum_w weight[c,w] x_{t-W+1+w}[c], weight (C,W), x
// (B,T,C). window (B,W-1,C): the rows before the first, which the last W - 1 replace: for T <=
// STRIP; NULL: zeros. W: 2 or 4.
static void conv_forward(floatX *out, floatX *window, const floatX *x, const float *weight,
                         size_t B, size_t T, size_t C, size_t W, cudaStream_t stream)
{
    assert((W == 2 || W == WINDOW) && (!window || T <= STRIP));
    WITH_CONV(W, C,
        const Conv s = conv_of(B, T, C, VEC);
        LAUNCH((conv_forward_kernel<WIDTH, VEC>),
               (B * s.strips * s.groups + CONV_THREADS - 1) / CONV_THREADS, CONV_THREADS, 0, stream,
               out, window, x, weight, s));
}

// conv_backward: dx (B,T,C) =, dweight (C,W) += from dout (B,T,C) and the forward's x and weight.
// partial (CONV_SLICES,C,W): scratch.
static void conv_backward(floatX *dx, float *dweight, float *partial, const floatX *dout,
                          const floatX *x, const float *weight, size_t B, size_t T, size_t C,
                          size_t W, cudaStream_t stream)
{
    WITH_CONV(W, C,
        const Conv s = conv_of(B, T, C, VEC);
        const size_t slices = std::min(B * s.strips, (size_t)CONV_SLICES);
        const size_t warps = slices * ((s.groups + WARP - 1) / WARP);
        LAUNCH((conv_backward_kernel<WIDTH, VEC>), (warps + ROW_WARPS - 1) / ROW_WARPS,
               ROW_WARPS * WARP, 0, stream, dx, partial, dout, x, weight, s, slices);
        slices_sum(dweight, NULL, partial, slices, C * W, 0, 0, C * W, 0, stream));
}

// gated_kernel: VEC neighbours a thread: out (N,H) = SiLU(f) e or, with dout, out (N,2H) = df, de.
template <int VEC>
static __global__ void gated_kernel(floatX *__restrict__ out, const floatX *__restrict__ dout,
                                    const floatX *__restrict__ fe, size_t N, size_t H)
{
    typedef Pack<floatX, VEC> Some;
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * VEC;
    const size_t at = i / H * 2 * H + i % H;
    if (i >= N * H)
        return;
    Some f = *(const Some *)(fe + at), e = *(const Some *)(fe + at + H);
    const Some d = dout ? *(const Some *)(dout + i) : Some{};
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        const float f_k = (float)f.v[k], e_k = (float)e.v[k], y = f_k * sigmoid(f_k);
        f.v[k] = (floatX)(dout ? (float)d.v[k] * e_k * silu_slope(f_k) : y * e_k);
        e.v[k] = (floatX)((float)d.v[k] * y);
    }
    if (!dout)
        *(Some *)(out + i) = f;
    else {
        *(Some *)(out + at) = f;
        *(Some *)(out + at + H) = e;
    }
}

// gated_backward: df and de, the halves of a row of dfe (N,2H), = from dout (N,H) and the forward's
// fe; without dout: see gated_forward.
static void gated_backward(floatX *dfe, const floatX *dout, const floatX *fe, size_t N, size_t H,
                           cudaStream_t stream)
{
    const size_t each = H % EACH ? 1 : EACH, threads = ROW_WARPS * WARP;
    const size_t grid = (N * H / each + threads - 1) / threads;
    if (each == 1)
        LAUNCH(gated_kernel<1>, grid, threads, 0, stream, dfe, dout, fe, N, H);
    else
        LAUNCH(gated_kernel<EACH>, grid, threads, 0, stream, dfe, dout, fe, N, H);
}

// gated_forward: out (N,H) = SiLU(f) e, f and e the halves of a row of fe (N,2H).
static void gated_forward(floatX *out, const floatX *fe, size_t N, size_t H, cudaStream_t stream)
{
    gated_backward(out, NULL, fe, N, H, stream);
}

// product: out (N,OC), rows `ld_out` apart, = inp (N,C), rows `ld` apart, by the weight (OC,C) or,
// not `turned`, (C,OC), + bias (OC), NULL for none; add: out +=.
static void product(floatX *out, size_t ld_out, const floatX *inp, size_t ld, const floatX *weight,
                    const floatX *bias, int turned, int add, size_t N, size_t C, size_t OC,
                    cudaStream_t stream)
{
    const Gemm g = {.out = out, .add = add ? out : NULL, .bias = bias, .x = inp, .y = weight,
                    .type = FLOATX_TYPE, .in = FLOATX_TYPE, .y_t = turned, .M = N, .N = OC, .K = C,
                    .ld_out = ld_out, .ld_x = ld, .ld_y = turned ? C : OC};
    gemm(&g, stream);
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
// [model] Tensors, forward, backward, decoding.  (ports train_metala.c[model])

typedef struct {
    int key, layers, heads, channels, key_channels, hidden, conv, augment, scale, form, task;
    double tau;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *conv_w, *qv_w, *a_w, *low_w, *up_w, *up_b, *aug_w, *gate_w, *gate_b, *out_w, *gu_w;
    float *down_w, *head_w;
} Params;

// What matrix products read, in floatX: in_w (L,2K+2C,C) is qv_w, gate_w, a_w, in_b 0 but for
// gate_b; head_w (Vp,C): rows from V on 0.
typedef struct {
    floatX *in_w, *in_b, *low_w, *up_w, *out_w, *gu_w, *down_w, *head_w;
} Copies;

// rstd: of the norms that give r1, r2 and y; row: q and v, p, k.
typedef struct {
    float *x, *rstd1, *g, *S, *mid, *rstd2, *rstd, *logits, *losses;
    floatX *r1, *xc, *row, *p, *k, *low, *o, *c, *r2, *gu, *h, *y;
    GlaKept kept;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *partial, *dg, *da;
    floatX *dx, *dr, *dxc, *drow, *dlow, *dz, *dstates, *d_o, *dc, *dgu, *dh, *dlogits;
    Asked asked;
} Dacts;

// Decoding: what the layers remember, S of every head and the last inputs of the convolution;
// tokens read, residual stream, factors of norms, logits.
typedef struct {
    floatX *window;
    int *tokens;
    float *S, *x, *rstd, *logits;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, NH, DK, DV, K, P, H, W, L, decode_B; // K = NH DK, P: of row
    size_t asked, rows; // that the head reads, of a sequence and of the batch: asked.cuh
    float tau, scale;     // of the gates; of what is read
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
    return c->key == FREE ? "free" : "tied";
}

// params_plan: the table of parameters; all decay, as in Zoology. A tensor whose first dimension is
// 0 does not exist.
static void params_plan(Model *m)
{
    const size_t L = m->L, C = m->C, V = m->V, K = m->K, H = m->H, W = m->W;
    const size_t L_free = m->config.key == FREE ? L : 0, L_aug = m->config.augment ? L : 0;
    const double std = 0.02, out_std = 0.02 / sqrt(2 * (double)L), flat = W ? sqrt(1.0 / W) : 0;
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, wte)},
        {"conv_w", {W ? L : 0, C, W}, INIT_UNIFORM(flat), DECAY, 1, offsetof(Params, conv_w)},
        {"qv_w", {L, K + C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, qv_w)},
        {"a_w", {L, K, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, a_w)},
        {"low_w", {L_free, RANK, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, low_w)},
        {"up_w", {L_free, K, RANK}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, up_w)},
        {"up_b", {L_free, K}, INIT_ZERO, DECAY, 1, offsetof(Params, up_b)},
        {"aug_w", {L_aug, K}, INIT_ZERO, DECAY, 1, offsetof(Params, aug_w)},
        {"gate_w", {L, C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, gate_w)},
        {"gate_b", {L, C}, INIT_ZERO, DECAY, 1, offsetof(Params, gate_b)},
        {"out_w", {L, C, C}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, out_w)},
        {"gu_w", {L, 2 * H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, gu_w)},
        {"down_w", {L, C, H}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, down_w)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
}

// partial_size: elements of scratch for sums in slices: the largest of all that is summed so.
static size_t partial_size(const Model *m)
{
    const size_t N = m->B * m->T, C = m->C, K = m->K, H = m->H;
    const size_t sizes[] = {(K + C) * C, C * C, K * C, RANK * C, K * RANK, 2 * H * C};
    size_t most = std::max({token_scratch(N, m->V, C), COLUMN_SLICES * K, CONV_SLICES * C * m->W,
                            weight_scratch(m->rows, m->Vp * C, 0)});
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        most = std::max(most, weight_scratch(N, sizes[i], std::max(K, C)));
    return most;
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config, m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t K = m->K = config->key_channels ? (size_t)config->key_channels : C / 2;
    const size_t NH = m->NH = (size_t)config->heads, DK = m->DK = K / NH, DV = m->DV = C / NH;
    const size_t H = m->H = config->hidden ? (size_t)config->hidden : (C * 8 / 3 + 255) / 256 * 256;
    const size_t P = m->P = (2 * K + 2 * C + 7) / 8 * 8, Vp = m->Vp = (V + 31) / 32 * 32;
    const size_t W = m->W = 2 * (size_t)config->conv, L_conv = W ? L : 0;
    const size_t L_free = config->key == FREE ? L : 0, B_free = L_free ? B : 0;
    const size_t D = m->decode_B = B < 32 ? B : 32, size = DK * DV;
    const size_t by_chunk = config->form == CHUNK ? L : 0;
    const size_t eval_B = std::min(B, B * T / shape.eval_T); // its chunks may be more
    const size_t chunks = NH * std::max(B * ((T + CS - 1) / CS),
                                        eval_B * ((shape.eval_T + CS - 1) / CS));
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    m->tau = (float)config->tau, m->scale = config->scale ? (float)(1 / sqrt((double)DK)) : 1;
    const DeviceTensor copies[] = {
        DEVICE("in_w", floatX, Copies, in_w, L, 2 * K + 2 * C, C),
        DEVICE("in_b", floatX, Copies, in_b, L, 2 * K + 2 * C),
        DEVICE("low_w", floatX, Copies, low_w, L_free, RANK, C),
        DEVICE("up_w", floatX, Copies, up_w, L_free, K, RANK),
        DEVICE("out_w", floatX, Copies, out_w, L, C, C),
        DEVICE("gu_w", floatX, Copies, gu_w, L, 2 * H, C),
        DEVICE("down_w", floatX, Copies, down_w, L, C, H),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", float, Acts, x, L + 1, B, T, C), DEVICE("r1", floatX, Acts, r1, L, B, T, C),
        DEVICE("rstd1", float, Acts, rstd1, L, B, T),
        DEVICE("xc", floatX, Acts, xc, L_conv, B, T, C),
        SPACED("qv", floatX, P, 0, Acts, row, L, B, T, K + C),
        SPACED("p", floatX, P, K + C, Acts, p, L, B, T, C),
        SPACED("k", floatX, P, C, Acts, k, L, B, T, K),
        DEVICE("low", floatX, Acts, low, L_free, B, T, RANK),
        DEVICE("g", float, Acts, g, L, B, T, K), DEVICE("o", floatX, Acts, o, L, B, T, C),
        DEVICE("tiles, 64", float, Acts, kept.tiles, L - by_chunk, chunks, size),
        DEVICE("states", floatX, Acts, kept.states, by_chunk, chunks, size),
        DEVICE("pairs", floatX, Acts, kept.pairs, by_chunk, chunks, CS, CS),
        DEVICE("S", float, Acts, S, L, B, NH, size), DEVICE("c", floatX, Acts, c, L, B, T, C),
        DEVICE("mid", float, Acts, mid, L, B, T, C), DEVICE("r2", floatX, Acts, r2, L, B, T, C),
        DEVICE("rstd2", float, Acts, rstd2, L, B, T),
        DEVICE("gu", floatX, Acts, gu, L, B, T, 2 * H), DEVICE("h", floatX, Acts, h, L, B, T, H),
        DEVICE("y", floatX, Acts, y, B, T, C), DEVICE("rstd", float, Acts, rstd, B, T),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("dxc", floatX, Dacts, dxc, B, T, C), DEVICE("drow", floatX, Dacts, drow, B, T, P),
        DEVICE("dlow", floatX, Dacts, dlow, B_free, T, RANK),
        DEVICE("dz", floatX, Dacts, dz, B_free, T, K), DEVICE("dg", float, Dacts, dg, B, T, K),
        DEVICE("da", float, Dacts, da, B, T, 2 * NH), DEVICE("do", floatX, Dacts, d_o, B, T, C),
        DEVICE("dc", floatX, Dacts, dc, B, T, C), DEVICE("dgu", floatX, Dacts, dgu, B, T, 2 * H),
        DEVICE("dh", floatX, Dacts, dh, B, T, H),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("dstates", floatX, Dacts, dstates, by_chunk ? chunks : 0, size),
        DEVICE("partial", float, Dacts, partial, partial_size(m)),
    };
    const DeviceTensor decoder[] = {
        DEVICE("S", float, Decoder, S, L, D, NH, size),
        DEVICE("window", floatX, Decoder, window, L_conv, D, W - 1, C),
        DEVICE("tokens", int, Decoder, tokens, D), DEVICE("x", float, Decoder, x, D, C),
        DEVICE("rstd", float, Decoder, rstd, D), DEVICE("logits", float, Decoder, logits, D, Vp),
    };
    params_plan(m);
    device_plan(&m->copies_arena, "weights in " PRECISION_NAME, ROWS(copies));
    device_plan(&m->acts_arena, "activations", ROWS(acts));
    device_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    device_plan(&m->decoder_arena, "decoding state", ROWS(decoder));
}

// model_copies: which parameters have copies in floatX, and where.
static void model_copies(Model *m)
{
    const size_t L = m->L, C = m->C, K = m->K, H = m->H, n = 2 * K + 2 * C;
    const Params p = m->params;
    const Copies c = m->copies;
    const WeightCopy copies[] = {{p.qv_w, c.in_w, (K + C) * C, n * C},
                                 {p.gate_w, c.in_w + (K + C) * C, C * C, n * C},
                                 {p.a_w, c.in_w + (K + 2 * C) * C, K * C, n * C},
                                 {p.gate_b, c.in_b + K + C, C, n},
                                 {p.low_w, c.low_w, L * RANK * C, 0},
                                 {p.up_w, c.up_w, L * K * RANK, 0},
                                 {p.out_w, c.out_w, L * C * C, 0},
                                 {p.gu_w, c.gu_w, 2 * L * H * C, 0},
                                 {p.down_w, c.down_w, L * C * H, 0},
                                 {p.head_w, c.head_w, m->V * C, 0}};
    device_pieces(&m->device, ROWS(copies));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 22 DK DV a head and layer in the recurrence, 5 of them forward.
static double model_flops(const Model *m)
{
    const size_t N = m->B * m->T, unread = m->V * m->C * (N - m->rows) / N; // see asked.cuh
    const double weights = (double)(arena_elements(&m->weights.params, "wte") - unread);
    return (double)m->config.training.accumulate * (double)N *
           (6 * weights + 22 * (double)(m->L * m->K * m->DV));
}

// from: x + n, or NULL for a tensor that does not exist.
template <typename X> static X *from(X *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, K = n * m->K, P = n * m->P, H = n * m->H;
    const size_t heads = l * m->B * m->NH, size = m->DK * m->DV;
    const size_t chunks = heads * ((m->T + CS - 1) / CS);
    const Acts *a = &m->acts;
    return {.x = a->x + C, .rstd1 = a->rstd1 + n, .g = a->g + K, .S = a->S + heads * size,
            .mid = a->mid + C, .rstd2 = a->rstd2 + n, .r1 = a->r1 + C,
            .xc = (m->W ? a->xc : a->r1) + C, .row = a->row + P, .k = a->k + P,
            .low = from(a->low, n * RANK), .o = a->o + C, .c = a->c + C, .r2 = a->r2 + C,
            .gu = a->gu + 2 * H, .h = a->h + H,
            .kept = {from(a->kept.tiles, chunks * size), from(a->kept.states, chunks * size),
                     from(a->kept.pairs, chunks * CS * CS)}};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, w = C * m->C, K = l * m->K;
    return {.conv_w = from(p->conv_w, C * m->W), .qv_w = p->qv_w + C * (m->K + m->C),
            .a_w = p->a_w + C * m->K, .low_w = from(p->low_w, C * RANK),
            .up_w = from(p->up_w, K * RANK), .up_b = from(p->up_b, K),
            .aug_w = from(p->aug_w, K), .gate_w = p->gate_w + w, .gate_b = p->gate_b + C,
            .out_w = p->out_w + w, .gu_w = p->gu_w + 2 * C * m->H,
            .down_w = p->down_w + C * m->H};
}

// layer_copies: the weights of layer l in floatX.
static Copies layer_copies(const Model *m, size_t l)
{
    const Copies *c = &m->copies;
    const size_t C = l * m->C, n = l * 2 * (m->K + m->C);
    return {c->in_w + n * m->C, c->in_b + n, from(c->low_w, RANK * C),
            from(c->up_w, l * m->K * RANK), c->out_w + C * m->C, c->gu_w + 2 * C * m->H,
            c->down_w + C * m->H, c->head_w};
}

// tokens_of: the rows of N tokens.
static Tokens tokens_of(const Model *m, size_t N)
{
    return {N, m->P, (int)m->NH, (int)m->DK, (int)m->DV, (int)m->K, (int)m->C};
}

// gla_shape: the recurrence of B sequences of T tokens.
static GlaShape gla_shape(const Model *m, size_t B, size_t T)
{
    return {B, T, m->NH, m->DK, m->DV, m->P, m->P, m->P, m->scale};
}

// block_forward: next (B,T,C), may be k.x, = the block of k.x; fills k. While decoding T = 1, and
// initial = k.S and window (B,W-1,C) take the token in; in training both are NULL.
static void block_forward(const Model *m, Acts k, Params p, Copies w, float *next,
                          const float *initial, floatX *window, size_t B, size_t T, int form)
{
    const size_t N = B * T, C = m->C, K = m->K, P = m->P, H = m->H;
    const Tokens tokens = tokens_of(m, N);
    cudaStream_t stream = m->device.stream;
    normalize_forward(k.r1, k.rstd1, k.x, N, C, stream);
    if (p.conv_w)
        conv_forward(k.xc, window, k.r1, p.conv_w, B, T, C, m->W, stream);
    product(k.row, P, k.xc, C, w.in_w, w.in_b, 1, 0, N, C, K + 2 * C + (w.low_w ? K : 0), stream);
    if (w.low_w) {
        matmul_forward(k.low, k.xc, w.low_w, NULL, N, C, RANK, stream);
        matmul_residual<float>(k.g, NULL, k.low, w.up_w, p.up_b, N, RANK, K, stream);
    } else
        matmul_residual<float>(k.g, NULL, k.xc, w.in_w + (K + 2 * C) * C, NULL, N, C, K, stream);
    gates_forward(k.g, w.low_w ? NULL : k.k, P, N, K, m->tau, stream);
    gla_forward(k.o, k.kept, k.S, k.row, k.k, k.g, k.row + K, initial, gla_shape(m, B, T), form,
                stream);
    read_forward(k.c, k.o, k.row, p.aug_w, tokens, stream);
    matmul_residual<float>(k.mid, k.x, k.c, w.out_w, NULL, N, C, C, stream);
    normalize_forward(k.r2, k.rstd2, k.mid, N, C, stream);
    matmul_forward(k.gu, k.r2, w.gu_w, NULL, N, C, 2 * H, stream);
    gated_forward(k.h, k.gu, N, H, stream);
    matmul_residual<float>(next, k.mid, k.h, w.down_w, NULL, N, H, C, stream);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, rows = m->rows, N = B * T;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    cudaStream_t stream = device->stream;
    embed_forward(acts.x, device->inputs, m->params.wte, NULL, B, T, C, stream);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l), layer_copies(m, l),
                      acts.x + (l + 1) * N * C, NULL, NULL, B, T, m->config.form);
    normalize_forward(acts.y, acts.rstd, acts.x + m->L * N * C, N, C, stream);
    const Asked asked = m->dacts.asked;
    const floatX *y = asked_gather(asked, acts.y, device->targets, N, rows, C, stream);
    matmul_residual<float>(acts.logits, NULL, y, m->copies.head_w, NULL, rows, C, m->Vp, stream);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, asked.where, device->input, N, rows, m->V, m->Vp, stream);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, Copies w, floatX *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, K = m->K, P = m->P, H = m->H;
    const Dacts d = m->dacts;
    const Tokens tokens = tokens_of(m, N);
    floatX *dk = d.drow + K + 2 * C;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(g.down_w, 0, NULL, d.partial, dx, k.h, N, H, C, C, 1, stream);
    matmul_backward_input(d.dh, dx, w.down_w, N, H, C, stream);
    gated_backward(d.dgu, d.dh, k.gu, N, H, stream);
    matmul_backward_weight(g.gu_w, 0, NULL, d.partial, d.dgu, k.r2, N, C, 2 * H, 2 * H, 1, stream);
    matmul_backward_input(d.dr, d.dgu, w.gu_w, N, C, 2 * H, stream);
    normalize_backward(dx, d.dr, C, k.r2, k.rstd2, N, C, 0, stream);
    matmul_backward_weight(g.out_w, 0, NULL, d.partial, dx, k.c, N, C, C, C, 1, stream);
    matmul_backward_input(d.dc, dx, w.out_w, N, C, C, stream);
    read_backward(d.d_o, d.drow, p.aug_w ? d.da : NULL, d.dc, k.o, k.row, p.aug_w, tokens, stream);
    gla_backward(d.drow, dk, d.dg, d.drow + K, NULL, d.dstates, d.d_o, NULL, k.kept, k.S, k.row,
                 k.k, k.g, k.row + K, NULL, gla_shape(m, B, T), m->config.form, stream);
    gates_backward(d.drow, d.dz, g.aug_w, d.partial, d.dg, d.d_o, d.da, k.row, k.g, p.aug_w,
                   m->tau, tokens, stream);
    matmul_backward_weight(g.qv_w, 0, NULL, d.partial, d.drow, k.xc, N, C, K + C, P, 1, stream);
    matmul_backward_weight(g.gate_w, 0, g.gate_b, d.partial, d.drow + K + C, k.xc, N, C, C, P, 1,
                           stream);
    matmul_backward_weight(g.a_w, 0, NULL, d.partial, dk, k.xc, N, C, K, P, 1, stream);
    product(d.dxc, C, d.drow, P, w.in_w, NULL, 0, 0, N, 2 * K + 2 * C, C, stream);
    if (w.low_w) {
        matmul_backward_weight(g.up_w, 0, g.up_b, d.partial, d.dz, k.low, N, RANK, K, K, 1, stream);
        matmul_backward_input(d.dlow, d.dz, w.up_w, N, RANK, K, stream);
        matmul_backward_weight(g.low_w, 0, NULL, d.partial, d.dlow, k.xc, N, C, RANK, RANK, 1,
                               stream);
        product(d.dxc, C, d.dlow, RANK, w.low_w, NULL, 0, 1, N, RANK, C, stream);
    }
    if (p.conv_w)
        conv_backward(d.dr, g.conv_w, d.partial, d.dxc, k.r1, p.conv_w, B, T, C, m->W, stream);
    normalize_backward(dx, p.conv_w ? d.dr : d.dxc, C, k.r1, k.rstd1, N, C, 0, stream);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(m->grads.head_w, 0, NULL, d.partial, d.dlogits,
                           asked_or(d.asked, m->acts.y), m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, d.dr), d.dlogits, m->copies.head_w, m->rows, C, m->Vp,
                          stream);
    asked_scatter(d.dr, d.asked, N, C, stream);
    normalize_backward(d.dx, d.dr, C, m->acts.y, m->acts.rstd, N, C, 1, stream);
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &m->params, l),
                       layer_params(m, &m->grads, l), layer_copies(m, l), d.dx);
    embed_backward(m->grads.wte, NULL, d.partial, d.dx, m->device.inputs, m->B, m->T, m->V, C,
                   stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C;
    const Dacts d = m->dacts;
    const Decoder memory = m->decoder;
    float *x = memory.x, *rstd = memory.rstd;
    cudaStream_t stream = m->device.stream;
    Acts k = {.x = x, .rstd1 = rstd, .g = d.dg, .mid = x, .rstd2 = rstd, .r1 = d.dr,
              .xc = m->W ? d.dxc : d.dr, .row = d.drow, .k = d.drow + m->K + 2 * C, .low = d.dlow,
              .o = d.d_o, .c = d.dc, .r2 = d.dr, .gu = d.dgu, .h = d.dh};
    if (t == 0)
        CUDA_CHECK(cudaMemsetAsync(m->decoder_arena.base, 0, m->decoder_arena.bytes, stream));
    CUDA_CHECK(cudaMemcpyAsync(memory.tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(x, memory.tokens, m->params.wte, NULL, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        k.S = memory.S + l * m->decode_B * m->K * m->DV;
        block_forward(m, k, layer_params(m, &m->params, l), layer_copies(m, l), x, k.S,
                      from(memory.window, l * m->decode_B * (m->W - 1) * C), D, 1, RECURRENT);
    }
    normalize_forward(d.dr, rstd, x, D, C, stream);
    matmul_residual<float>(memory.logits, NULL, d.dr, m->copies.head_w, NULL, D, C, m->Vp, stream);
    return device_logits(&m->device, memory.logits, D, m->V, m->Vp, m->decode_B);
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
// [main] Options, presets, start.  (ports train_metala.c[main])

#define PAIRS "--task mqar --weight-decay 0.1 "
static const Preset PRESETS[] = {
    {"small", "--vocab-size 64 --eval-batches 8", "4 pairs in 64 tokens, few symbols"},
    {"main", "--task copying --string-size 8 --conv 4 --key-channels 64 --lr 4e-3", "8 letters"},
    {"mqar", PAIRS "--max-length 256 --pairs 16 --channels 64 --key-channels 64 --hidden 256 "
     "--batch-size 256 --lr 2.15e-3 --steps 6000 --warmup 300", "16 pairs in 256 tokens"},
    {"mqar-80", PAIRS "--max-length 512 --pairs 80 --channels 128 --key-channels 128 --hidden 512 "
     "--batch-size 128 --lr 4.64e-4 --steps 12000 --warmup 600", "the paper's hardest, Table A7"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"key", OPT_CHOICE, &c->key, "tied", 0, 0, "tied|free", DEFINES_MODEL,
         "tied: 1 - alpha; free: its own, and alpha of rank 16"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"heads", OPT_INT, &c->heads, "2", 1, 1 << 16, "NH", DEFINES_MODEL, "each its own state"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "NH times DV"},
        {"key-channels", OPT_INT, &c->key_channels, "0", 0, 1 << 16, "K", DEFINES_MODEL, "0 = C/2"},
        {"hidden", OPT_INT, &c->hidden, "64", 0, 1 << 20, "H", DEFINES_MODEL, "of MLP, 0 = 8/3 C"},
        {"conv", OPT_CHOICE, &c->conv, "2", 0, 0, "0|2|4", DEFINES_MODEL, "convolution's width"},
        {"augment", OPT_CHOICE, &c->augment, "yes", 0, 0, "no|yes", DEFINES_MODEL, "by own value"},
        {"scale", OPT_CHOICE, &c->scale, "yes", 0, 0, "no|yes", DEFINES_MODEL, "by 1 / sqrt(DK)"},
        {"tau", OPT_REAL, &c->tau, "16", 1e-3, 1e6, "tau", DEFINES_MODEL, "lengthens the memory"},
        {"form", OPT_CHOICE, &c->form, "auto", 0, 0, "auto|recurrent|chunk", RUNTIME,
         "token by token, or 64 at a time on tensor cores; auto: by shape"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    options_default(options, "task", "mqar");
    options_default(options, "lr", "3e-3");
    options_default(options, "steps", "600");
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    const int K = c->key_channels ? c->key_channels : c->channels / 2;
    if (c->channels % c->heads || c->channels < 2 * c->heads)
        die(EXIT_USAGE, "--channels %d: expected a multiple of --heads %d, at least two a head: "
            "the norm of one is 0", c->channels, c->heads);
    if (!K || K % c->heads)
        die(EXIT_USAGE, "--key-channels %d: expected a multiple of --heads %d", K, c->heads);
    if (std::max(K, c->channels) / c->heads > HEAD_MOST)
        die(EXIT_USAGE, "--heads %d: expected heads of at most %d channels, got %d\nhint: more "
            "--heads; ./train_metala, on the CPU, takes any", c->heads, HEAD_MOST,
            std::max(K, c->channels) / c->heads);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g FLOPs an update, %.3g GB", model_flops(&m), 1e-9 * model_bytes(&m));
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
                  "train_metala_gpu: MetaLA and GLA on the GPU. Without options: a small MQAR.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    const char *gpu = cuda_start();
    const size_t K = config.key_channels ? config.key_channels : config.channels / 2;
    config.form = gla_form(K / config.heads, config.channels / config.heads, config.form);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    char name[64];
    snprintf(name, sizeof name, "%s, " PRECISION_NAME, model_name(&config));
    training_print(name, &model.weights, "wte", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model.device.name = gpu;
    cuda_memory_check(model_bytes(&model));
    const size_t free_bytes = cuda_memory_free();
    model_alloc(&model);
    printf("GPU memory: %.2f GiB taken\n", (double)(free_bytes - cuda_memory_free()) / GIB);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
