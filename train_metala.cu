// train_metala.cu: MetaLA and gated linear attention on the GPU, the same model as train_metala.c,
// which says what is computed and is what this is held against (dev/test_cuda.sh).
//
//   S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(DK)

#include "data/tasks.h"
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
// CS tokens from the row sums of S D there; S after the last token is `final`.
template <int P, int PASS>
static __global__ void __launch_bounds__(COLS * P)
recurrent_kernel(floatX *out, size_t pitch, float *dg, float *states, float *last,
                 const float *first, const float *final, GlaInputs in, GlaShape s)
{
    enum { OWN_KEY = PASS == PASS_DQ || PASS == PASS_DK, BACK = PASS == PASS_DK || PASS == PASS_DV };
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
        float(*to)[COLS * P] = shared[i % 2], sum[1] = {}, flow[1] = {};
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
                *m = BACK ? fmaf(add.v[j], p.own, *m) : faded(*m, part_j, add.v[j] * p.own);
                sum[0] = fmaf(read.v[j], *m, sum[0]);
                *m = BACK ? faded(*m, part_j, 0) : *m;
            }
        }
        row_reduce<P, 0>(sum, NULL);
        const float result = (BACK ? 1 : s.scale) * sum[0];
        const size_t at = at0 + t;
        if (PASS == PASS_DK)
            gate += p.qdq - p.y * result;
        if (lane == 0 && y < Y) {
            out[at * pitch + h * Y + y] = (floatX)result;
            if (PASS == PASS_DQ || PASS == PASS_DK)
                dg[(at * s.NH + h) * Y + y] = PASS == PASS_DQ ? p.y * result : gate;
        }
    }
#pragma unroll
    for (int n = 0; n < COLS; n++)
        if (last && place(n) >= 0)
            last[head * size + place(n)] = M[n];
}

// ---- the launchers

// What a forward pass keeps for the backward pass, NC = ceil(T / 64). Tokens: tiles (B,NH,NC,DK,DV)
// = S before each 64, NULL: not kept.
typedef struct {
    float *tiles;
} GlaKept;

// gla_forward: o (B,T,NH,DV) = of every head, S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale
// S_t^T q_t: q, k (B,T,NH,DK), v (B,T,NH,DV), g (B,T,NH,DK) in [-30,0]. S_0 = initial
// (B,NH,DK,DV), NULL: zero; final (B,NH,DK,DV) = S_T, may alias initial; kept =. DK, DV <= 256.
static void gla_forward(floatX *o, GlaKept kept, float *final, const floatX *q, const floatX *k,
                        const float *g, const floatX *v, const float *initial, GlaShape s, int form,
                        cudaStream_t stream)
{
    const GlaInputs in = {q, k, v, NULL, g};
    assert(s.DK <= HEAD_MOST && s.DV <= HEAD_MOST && s.T < INT_MAX && s.NH < INT_MAX);
    WITH_HEAD(s.DK, LAUNCH((recurrent_kernel<P, PASS_O>), s.B * s.NH * ((s.DV + COLS - 1) / COLS),
                           COLS * P, 0, stream, o, s.NH * s.DV, NULL, kept.tiles, final, initial,
                           NULL, in, s));
}

// gla_backward: dq, dk, dv, laid out as q, k and v, dg (B,T,NH,DK) =, dinitial (B,NH,DK,DV) =
// (NULL: not asked for), from d_o (B,T,NH,DV), dfinal (B,NH,DK,DV), the gradient of S_T (NULL:
// zero), and the forward's kept, final, q, k, g, v and initial.
static void gla_backward(floatX *dq, floatX *dk, float *dg, floatX *dv, float *dinitial,
                         const floatX *d_o, const float *dfinal, GlaKept kept, const float *final,
                         const floatX *q, const floatX *k, const float *g, const floatX *v,
                         const float *initial, GlaShape s, int form, cudaStream_t stream)
{
    const GlaInputs in = {q, k, v, d_o, g};
    const size_t keys = s.B * s.NH * ((s.DK + COLS - 1) / COLS);
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

// read_forward: c (N,C) = SiLU(p) n, n = LayerNorm, eps 1e-5, by heads of o + sigmoid(a v), a = sum_i
// q_i w_i k_i of a head, or without w of o; o (N,C), rows of q, v, p and k, w (K), NULL: none.
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
                                            const floatX *__restrict__ row, const float *w, Tokens s)
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

// read_backward: d_o (N,C) =, the part of p of drow =, da (N,NH,2) = a and its gradient (NULL: no w)
// from dc (N,C) and the forward's o, row, w. With n the norm's output, r = sigmoid(a v):
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
// (slices,C,W) = its part of the sum for the weights. The gradient of a row is due W - 1 rows later,
// so that strips overlap by as many.
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

// matmul_forward: out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), NULL for none.
static void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                           size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = out, .bias = bias, .x = inp, .y = weight, .type = FLOATX_TYPE,
                    .in = FLOATX_TYPE, .y_t = 1, .M = N, .N = OC, .K = C, .ld_out = OC, .ld_x = C,
                    .ld_y = C};
    gemm(&g, stream);
}

// matmul_residual: out (N,OC) = add (N,OC) + inp (N,C) weight (OC,C)^T + bias (OC) in fp32; add may
// be out; add and bias NULL for none.
static void matmul_residual(float *out, const float *add, const floatX *inp, const floatX *weight,
                            const float *bias, size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = out, .add = add, .bias = bias, .x = inp, .y = weight, .type = CUDA_R_32F,
                    .in = FLOATX_TYPE, .y_t = 1, .M = N, .N = OC, .K = C, .ld_out = OC, .ld_x = C,
                    .ld_y = C};
    gemm(&g, stream);
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
// this for `parts` of OC columns each of dout, their gradients `step` elements apart; dbias (OC),
// NULL for none, += the column sums of the first part. partial (weight_scratch): scratch.
static void matmul_backward_weight(float *dweight, size_t step, float *dbias, float *partial,
                                   const floatX *dout, const floatX *inp, size_t N, size_t C,
                                   size_t OC, size_t pitch, size_t parts, cudaStream_t stream)
{
    const size_t n = parts * OC * C, rest = dbias ? OC : 0, slices = slices_of(N, n);
    const Gemm g = {.out = partial, .x = dout, .y = inp, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                    .x_t = 1, .M = parts * OC, .N = C, .K = N / slices, .ld_out = C,
                    .ld_x = pitch, .ld_y = C, .batch = slices, .out_step = n,
                    .x_step = N / slices * pitch, .y_step = N / slices * C};
    gemm(&g, stream);
    if (dbias)
        bias_slices(partial + slices * n, dout, N, OC, pitch, stream);
    slices_sum(dweight, dbias, partial, slices, n, COLUMN_SLICES, rest, OC * C, step, stream);
}

// normalize_forward_kernel: a warp a row.
template <int WIDTH>
static __global__ void normalize_forward_kernel(floatX *out, float *rstd, const float *x, size_t N,
                                                int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    if (row >= N)
        return;
    const Moments m = row_moments<float, WIDTH>(x + row * n, n, EPS);
#pragma unroll
    for (int c = lane; c < n; c += WARP)
        out[row * n + c] = (floatX)((x[row * n + c] - m.mean) * m.rstd);
    if (lane == 0)
        rstd[row] = m.rstd;
}

// normalize_forward: out (N,C) = (x - mean) rstd for every row of x (N,C), rstd (N) = 1 / sqrt(var
// + 1e-8); biased variance, nothing learned.
static void normalize_forward(floatX *out, float *rstd, const float *x, size_t N, size_t C,
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
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float sum = 0, dot = 0, kept[WIDTH / WARP + 1]; // of dout, where the loops unroll
    if (row >= N)
        return;
    dx += row * pitch;
    dout += row * pitch;
    out += row * n;
#pragma unroll
    for (int c = lane; c < n; c += WARP) {
        const float g = (float)dout[c];
        sum += g;
        dot += g * (float)out[c];
        if (WIDTH)
            kept[c / WARP] = g;
    }
    sum = warp_sum(sum) / (float)n;
    dot = warp_sum(dot) / (float)n;
    const float factor = rstd[row];
#pragma unroll
    for (int c = lane; c < n; c += WARP) {
        const float g = WIDTH ? kept[c / WARP] : (float)dout[c];
        const float d = factor * (g - sum - (float)out[c] * dot);
        dx[c] = (floatX)(first ? d : (float)dx[c] + d);
    }
}

// normalize_backward: dx (N,C) += (first: =) the gradient of x from dout (N,C) and what the forward
// wrote; rows of dx and dout are `pitch` apart, and with `first` dx may be dout.
static void normalize_backward(floatX *dx, const floatX *dout, size_t pitch, const floatX *out,
                               const float *rstd, size_t N, size_t C, int first,
                               cudaStream_t stream)
{
    LAUNCH_ROWS(normalize_backward_kernel, N, C, stream, dx, dout, pitch, out, rstd, N, (int)C,
                first);
}

// embed_forward_kernel: a warp a token.
template <int WIDTH>
static __global__ void embed_forward_kernel(float *out, const int *tokens, const float *wte,
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
        out[row * n + c] = wte[c] + (wpe ? wpe[c] : 0);
}

// embed_forward: out (B,T,C) = wte[token] + wpe[t]; tokens (B,T), wte (V,C), wpe (T,C), NULL for
// none.
static void embed_forward(float *out, const int *tokens, const float *wte, const float *wpe,
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

// crossentropy_kernel: WARPS warps a row of logits (N,V), rows pitch apart. With 32 of them a row
// has a block, and is still in the caches when it is read again, from the end.
template <int WARPS>
static __global__ void __launch_bounds__(WARPS > 1 ? WARPS * WARP : ROW_WARPS * WARP)
    crossentropy_kernel(float *losses, int *predictions, floatX *dlogits,
                        const float *__restrict__ logits, const int *targets,
                        const StepInput *step, size_t N, int V, int pitch)
{
    enum { STRIDE = 4 * WARPS * WARP };
    __shared__ Peak peaks[WARP];
    const size_t row = WARPS > 1 ? blockIdx.x : row_of_warp();
    const int i = threadIdx.x % (WARPS * WARP), lane = threadIdx.x % WARP;
    if (row >= N)
        return;
    const float *x = logits + row * pitch;
    Peak peak = {-INFINITY, 0, min(4 * i, V)};
#pragma unroll 4
    for (int v = 4 * i; v < V; v += STRIDE) {
        Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        const float before = peak.top;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            y.v[k] = v + k < V ? y.v[k] : -INFINITY;
            peak.best = y.v[k] > peak.top ? v + k : peak.best;
            peak.top = y.v[k] > peak.top ? y.v[k] : peak.top;
        }
        peak.sum *= exp2_fast(LOG2E * (before - peak.top)); // at first 0 times 0
#pragma unroll
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
    const int target = targets[row];
    if (i == 0) {
        losses[row] = target == IGNORE ? 0 : logf(peak.sum) + peak.top - x[target];
        predictions[row] = peak.best;
    }
    const float unit = target == IGNORE ? 0 : (float)step->unit, factor = unit / peak.sum;
#pragma unroll 4
    for (int v = (pitch - 4) / STRIDE * STRIDE + 4 * i; v >= 0; v -= STRIDE) {
        if (v >= pitch)
            continue;
        const Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        Pack<floatX, 4> d;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float p = v + k < V ? factor * exp2_fast(LOG2E * (y.v[k] - peak.top)) : 0;
            d.v[k] = (floatX)(p - (v + k == target ? unit : 0));
        }
        *(Pack<floatX, 4> *)(dlogits + row * pitch + v) = d;
    }
}

// loss_kernel: result->loss = (after the first batch of an update: +=) the sum of losses (N) times
// step->unit, in one block.
static __global__ void loss_kernel(StepResult *result, const float *losses, const StepInput *step,
                                   size_t N)
{
    double sum = 0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x)
        sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        result->loss = (step->first ? 0 : result->loss) + sum * step->unit;
}

// crossentropy: losses (N) = -log softmax(logits)[target] in nats, 0 where the target is IGNORE;
// predictions (N) = argmax; dlogits (N,V) = the gradient (softmax - onehot) step->unit of the loss;
// result->loss: see loss_kernel; unit = 1 / targets that count makes it their mean. logits (N,V)
// and dlogits: rows `pitch` apart, a multiple of 4, dlogits 0 between them. targets (N).
static void crossentropy(float *losses, int *predictions, floatX *dlogits, StepResult *result,
                         const float *logits, const int *targets, const StepInput *step, size_t N,
                         size_t V, size_t pitch, cudaStream_t stream)
{
    if (V >= 4096)
        LAUNCH(crossentropy_kernel<WARP>, N, WARP * WARP, 0, stream, losses, predictions, dlogits,
               logits, targets, step, N, (int)V, (int)pitch);
    else
        LAUNCH(crossentropy_kernel<1>, (N + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0, stream,
               losses, predictions, dlogits, logits, targets, step, N, (int)V, (int)pitch);
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
    floatX *dx, *dr, *dxc, *drow, *dlow, *dz, *d_o, *dc, *dgu, *dh, *dlogits;
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
    const size_t sizes[] = {(K + C) * C, C * C, K * C, RANK * C, K * RANK, 2 * H * C, m->V * C};
    size_t most = std::max(token_scratch(N, m->V, C), COLUMN_SLICES * K);
    most = std::max(most, CONV_SLICES * C * m->W);
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
    const size_t eval_B = std::min(B, B * T / shape.eval_T); // its chunks may be more
    const size_t chunks = NH * std::max(B * ((T + CS - 1) / CS),
                                        eval_B * ((shape.eval_T + CS - 1) / CS));
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
        DEVICE("states", float, Acts, kept.tiles, L, chunks, size),
        DEVICE("S", float, Acts, S, L, B, NH, size), DEVICE("c", floatX, Acts, c, L, B, T, C),
        DEVICE("mid", float, Acts, mid, L, B, T, C), DEVICE("r2", floatX, Acts, r2, L, B, T, C),
        DEVICE("rstd2", float, Acts, rstd2, L, B, T),
        DEVICE("gu", floatX, Acts, gu, L, B, T, 2 * H), DEVICE("h", floatX, Acts, h, L, B, T, H),
        DEVICE("y", floatX, Acts, y, B, T, C), DEVICE("rstd", float, Acts, rstd, B, T),
        SPACED("logits", float, Vp, 0, Acts, logits, B, T, V),
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
        DEVICE("dlogits", floatX, Dacts, dlogits, B, T, Vp),
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
    const double weights = (double)arena_elements(&m->weights.params, "wte");
    return (double)m->config.training.accumulate * (double)(m->B * m->T) *
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
    const size_t heads = l * m->B * m->NH * m->DK * m->DV, chunks = heads * ((m->T + CS - 1) / CS);
    const Acts *a = &m->acts;
    return {.x = a->x + C, .rstd1 = a->rstd1 + n, .g = a->g + K, .S = a->S + heads,
            .mid = a->mid + C, .rstd2 = a->rstd2 + n, .r1 = a->r1 + C,
            .xc = (m->W ? a->xc : a->r1) + C, .row = a->row + P, .k = a->k + P,
            .low = from(a->low, n * RANK), .o = a->o + C, .c = a->c + C, .r2 = a->r2 + C,
            .gu = a->gu + 2 * H, .h = a->h + H, .kept = {a->kept.tiles + chunks}};
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
        matmul_residual(k.g, NULL, k.low, w.up_w, p.up_b, N, RANK, K, stream);
    } else
        matmul_residual(k.g, NULL, k.xc, w.in_w + (K + 2 * C) * C, NULL, N, C, K, stream);
    gates_forward(k.g, w.low_w ? NULL : k.k, P, N, K, m->tau, stream);
    gla_forward(k.o, k.kept, k.S, k.row, k.k, k.g, k.row + K, initial, gla_shape(m, B, T), form,
                stream);
    read_forward(k.c, k.o, k.row, p.aug_w, tokens, stream);
    matmul_residual(k.mid, k.x, k.c, w.out_w, NULL, N, C, C, stream);
    normalize_forward(k.r2, k.rstd2, k.mid, N, C, stream);
    matmul_forward(k.gu, k.r2, w.gu_w, NULL, N, C, 2 * H, stream);
    gated_forward(k.h, k.gu, N, H, stream);
    matmul_residual(next, k.mid, k.h, w.down_w, NULL, N, H, C, stream);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, N = B * T;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    cudaStream_t stream = device->stream;
    embed_forward(acts.x, device->inputs, m->params.wte, NULL, B, T, C, stream);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l), layer_copies(m, l),
                      acts.x + (l + 1) * N * C, NULL, NULL, B, T, m->config.form);
    normalize_forward(acts.y, acts.rstd, acts.x + m->L * N * C, N, C, stream);
    matmul_residual(acts.logits, NULL, acts.y, m->copies.head_w, NULL, N, C, m->Vp, stream);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, device->input, N, m->V, m->Vp, stream);
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
    gla_backward(d.drow, dk, d.dg, d.drow + K, NULL, d.d_o, NULL, k.kept, k.S, k.row, k.k, k.g,
                 k.row + K, NULL, gla_shape(m, B, T), m->config.form, stream);
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
    matmul_backward_weight(m->grads.head_w, 0, NULL, d.partial, d.dlogits, m->acts.y, N, C, m->V,
                           m->Vp, 1, stream);
    matmul_backward_input(d.dr, d.dlogits, m->copies.head_w, N, C, m->Vp, stream);
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
    matmul_residual(memory.logits, NULL, d.dr, m->copies.head_w, NULL, D, C, m->Vp, stream);
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
    Device *d = &m->device;
    device_weights_up(d, &m->weights);
    pieces_copy(d);
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
}

// model_zero_grad: clear the gradients of the parameters.
static void model_zero_grad(Model *m)
{
    pieces_zero(&m->device);
}

// load_batch: the slot's inputs, targets = batch `number` of STREAM_TRAIN or STREAM_EVAL, of its
// own B and T. And what the device is told: of training, the update it belongs to, in which batches
// count by their targets. These are known when the last batch is: until then a target counts 1 / (B
// T).
static void load_batch(Model *m, Slot *slot, uint64_t stream, long number)
{
    const Config *c = &m->config;
    const Training *t = &c->training;
    const int n = stream == STREAM_TRAIN ? t->accumulate : 1, part = (int)(number % n);
    task_batch(m->task, &c->task_options, t->seed, stream, number, &slot->batch);
    batch_check(&slot->batch, m->V);
    m->B = slot->batch.B, m->T = slot->batch.T;
    const double step = (double)(number / n), N = (double)(m->B * m->T);
    const double count = batch_targets(&slot->batch);
    m->targets = part ? m->targets + count : count;
    slot->lr = learning_rate(t, number / n);
    *slot->input = {slot->lr, 1 / (1 - pow(t->beta1, step + 1)), 1 / (1 - pow(t->beta2, step + 1)),
                    n > 1 ? 1 / N : count > 0 ? 1 / count : 0,
                    n == 1 ? 1 : m->targets > 0 ? N / m->targets : 0, part == 0};
    m->batch = slot->batch;
}

// batch_kernels: loss and gradients of the batch on the device.
static void batch_kernels(Model *m)
{
    model_forward(m);
    model_backward(m);
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
    batch_kernels(m);
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
        if (TIMING_ON)
            batch_kernels(m);
        else
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

static const char *const SMALL_MQAR[][2] = {{"task", "mqar"}, {"vocab-size", "64"},
    {"lr", "3e-3"}, {"steps", "600"}, {"eval-batches", "8"}};
#define PAIRS "--task mqar --vocab-size 8192 --weight-decay 0.1 "
static const Preset PRESETS[] = {
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
    for (size_t i = 0; i < sizeof SMALL_MQAR / sizeof *SMALL_MQAR; i++)
        options_default(options, SMALL_MQAR[i][0], SMALL_MQAR[i][1]);
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
