// train_gateloop.cu: GateLoop on the GPU, the same model as train_gateloop.c, which says what is
// computed, what each --transition is, and is what this is held against (dev/test_cuda.sh).
//
//   h_t = a_t h_{t-1} + k_t v_t,  a_t = r_t exp(i theta_t),  y_t = q_t Re(h_t)
//   x  += W_out (SiLU(g_t) y_t)                                              [arXiv 2311.01927]
//   q, k, v, g = W_qkvg u;  alpha, beta = W_gate u + bias;  r = sigmoid(alpha), theta = beta
//
// The recurrence is one kernel forward and one back: each reads q, k, v, g and the logits alpha,
// beta of a position once, makes the transition in registers, and writes once what follows: 18
// bytes an element forward and 30 back (BF16), 28 and 52 (FP32). Time is cut into tiles, a block
// each:
//
//   warps    of a block have consecutive steps of its tile, a lane one or two channels. Each makes
//            the product A of its transitions and the state X that its steps leave from 0:
//            h behind them = A h + X. Through shared memory a warp gets A, X of those before it.
//   tiles    of the same channels pass the state from block to block, 8 bytes a channel, which are
//            their own flag: all ones is "not yet", and who reads them restores that. Blocks start
//            in the order of their numbers, and no tile waits for one of a higher number.
//   backward the same with G_t = e_t + conj(a_{t+1}) G_{t+1}, last tile first. h is computed again
//            from the state that the forward pass kept at every tile's start; nothing is divided.
//
// What is added to what depends on the shape alone, and no float is added atomically: same bits
// every time. --head-size above 1 has general kernels, a block a head, its memory in global memory:
// correct, and many times as slow.
//
// nvcc -DPRECISION_BF16 (train_gateloop_gpu): weights and activations in bf16, through the typedef
// floatX; fp32: master weights, the residual stream, the logits of the transitions, because r near
// 1 and a phase that adds up need their digits, states and all sums. The gradients of the stream
// and of the logits are in bf16; --wiring paper, where norms make the stream, rounds it. Without it
// (train_gateloop_gpu_fp32) all is fp32, no TF32.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. Only --accumulate N waits between its batches.
// Residuals are added in the epilogue of a matrix product; back, W_qkvg and W_gate are one matrix.
//
// Sections: [mix] the recurrence; [layers] matrix product, embedding, cross-entropy; [norm]
// LayerNorm, GELU; [block] the rest of a block; [model]; [train]; [main]. [optimizer] AdamW and the
// sums over rows are in util/.
//
//   ./train_gateloop_gpu --preset horizon, recall, shakespeare, wikitext103; see train_gateloop.c
// Differences from the paper: those of train_gateloop.c.

#include "data/tasks.h"
#include "util/asked.cuh"
#include "util/optimizer.cuh" // and with it warp, cuda_training, cuda, gemm, training, ...
#include "util/sums.cuh"
#pragma nv_diag_suppress 177 // [layers] has more than this model needs

// ------------------------------------------------------------------------------------------------
// [mix] Gates and the recurrence.

#define ARCHITECTURE "gateloop"
#define TRANSITIONS "sep|sep-relu|cart|real-pos|real-signed|stable-exp|fixed|fixed-real|ones"
enum { SEP, SEP_RELU, CART, REAL_POS, REAL_SIGNED, STABLE_EXP, FIXED, FIXED_REAL, ONES };
enum { PRE, PAPER }; // where norms stand

// GATE_PARTS: how many logits a transition has, by its word in TRANSITIONS.
constexpr int GATE_PARTS[] = {2, 2, 2, 1, 1, 2, 2, 1, 0};

// WITH_KIND: the statement with KIND as a constant; what is fixed differs in its logits alone.
#define WITH_KIND(kind, ...) \
    do { \
        switch (kind) { \
        case SEP: case FIXED: { enum { KIND = SEP }; __VA_ARGS__; } break; \
        case SEP_RELU: { enum { KIND = SEP_RELU }; __VA_ARGS__; } break; \
        case CART: { enum { KIND = CART }; __VA_ARGS__; } break; \
        case REAL_POS: case FIXED_REAL: { enum { KIND = REAL_POS }; __VA_ARGS__; } break; \
        case REAL_SIGNED: { enum { KIND = REAL_SIGNED }; __VA_ARGS__; } break; \
        case STABLE_EXP: { enum { KIND = STABLE_EXP }; __VA_ARGS__; } break; \
        default: { enum { KIND = ONES }; __VA_ARGS__; } \
        } \
    } while (0)

struct alignas(8) Complex {
    float re, im;
};

// times: a b.
static __device__ inline Complex times(Complex a, Complex b)
{
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// onto: a h + x.
static __device__ inline Complex onto(Complex a, Complex h, Complex x)
{
    return {a.re * h.re + (x.re - a.im * h.im), a.re * h.im + (a.im * h.re + x.im)};
}

// onto: the same with a real number x.
static __device__ inline Complex onto(Complex a, Complex h, float x)
{
    return {a.re * h.re + (x - a.im * h.im), a.re * h.im + a.im * h.re};
}

// conj: a with the angle the other way.
static __device__ inline Complex conj(Complex a)
{
    return {a.re, -a.im};
}

// A transition, and how ln |a| and its angle move with its logits alpha and beta.
struct Gate {
    Complex a;
    float r_alpha, r_beta, angle_alpha, angle_beta;
};

// From [norm]:
static __device__ inline float reciprocal(float x);

// sigmoid: 1 / (1 + exp(-x)); *rest = 1 - that, exact where it is small. 0 and 1 far out.
static __device__ inline float sigmoid(float x, float *rest)
{
    const float e = exp2_fast(-LOG2E * x), p = reciprocal(1 + e);
    *rest = p == 0 ? 1 : e * p; // infinity times 0
    return p;
}

// silu: g sigmoid(g); *slope = its derivative.
static __device__ inline float silu(float g, float *slope)
{
    const float p = reciprocal(1 + exp2_fast(-LOG2E * g)), y = g * p;
    *slope = p + y * (1 - p);
    return y;
}

// turn: r exp(i angle), finite for any finite angle. In BF16 on the special-function unit, which
// takes the angle modulo a turn itself, absolute error 2^-21 to a turn or so, then 2^-23 of the
// angle; else from the angle modulo 2 pi in two parts, which beyond 1e6 is any angle.
static __device__ inline Complex turn(float r, float angle)
{
    float sine, cosine;
#ifdef PRECISION_BF16
    sine = __sinf(angle), cosine = __cosf(angle);
#else
    const float n = rintf(angle * 0.15915494f);
    float x = fmaf(n, 1.7484556e-7f, fmaf(n, -6.2831855f, angle));
    x = x > 4 ? 4 : x < -4 ? -4 : x; // NaN stays
    sincospif(x * 0.31830989f, &sine, &cosine);
#endif
    return {r * cosine, r * sine};
}

// gate: the transition of logits alpha, beta, see TRANSITIONS; finite ones give finite numbers.
template <int KIND> static __device__ inline Gate gate(float alpha, float beta)
{
    float rest;
    if constexpr (KIND == ONES)
        return {{1, 0}, 0, 0, 0, 0};
    if constexpr (KIND == REAL_POS) {
        const float r = sigmoid(alpha, &rest);
        return {{r, 0}, rest, 0, 0, 0};
    }
    if constexpr (KIND == REAL_SIGNED) {
        const float sign = alpha < 0 ? -1 : 1, r = sigmoid(fabsf(alpha), &rest);
        return {{sign * r, 0}, sign * rest, 0, 0, 0};
    }
    if constexpr (KIND == CART) { // at 0: angle 0, no gradient
        const float m = hypotf(alpha, beta), over = 1 / (m + 1e-12f / m), r = sigmoid(m, &rest);
        const float y = alpha * over, z = beta * over;
        return {{m == 0 ? r : r * (alpha / m), m == 0 ? 0 : r * (beta / m)}, rest * y, rest * z,
                -z * over, y * over};
    }
    if constexpr (KIND == STABLE_EXP) {
        const float rate = exp2_fast(LOG2E * fminf(alpha, 88));
        return {turn(exp2_fast(-LOG2E * rate), beta), -rate, 0, 0, 1};
    }
    const float r = sigmoid(alpha, &rest);
    if (KIND == SEP_RELU)
        return {turn(r, fmaxf(beta, 0)), rest, 0, 0, beta > 0 ? 1.0f : 0.0f};
    return {turn(r, beta), rest, 0, 0, 1};
}

// What the kernels are told. pitch: logits of a token, 0 where all tokens have the same; shifted:
// alpha counts from fixed_logit; parts: kinds of logits; columns: blocks of a tile, B times groups;
// whole: no tile has a step or a channel beyond T, C.
typedef struct {
    int T, C, HS, tiles, groups, pitch, parts, shifted, whole;
    unsigned columns;
    size_t B;
} Mix;

// fixed_logit: what alpha = 0 stands for where it is a learned number: |a| = 1 - 2^-x, x from 1 to
// 8 by channel.
static __device__ inline float fixed_logit(int c, Mix s)
{
    const float x = 1 + 7 * ((float)c + 0.5f) / (float)s.C;
    return s.shifted ? logf(exp2f(x) - 1) : 0;
}

// gate_of: the transition of channel c of a token, its logits at `row`, of any kind.
static __device__ inline Gate gate_of(const float *row, int c, Mix s, int kind)
{
    const float alpha = s.parts > 0 ? row[c] + fixed_logit(c, s) : 0;
    const float beta = s.parts > 1 ? row[s.C + c] : 0;
    Gate z;
    WITH_KIND(kind, z = gate<KIND>(alpha, beta));
    return z;
}

// ---- memories that are numbers

// A block: MIX_WARPS warps. A thread has FORWARD or BACKWARD steps of one channel, or half as many
// of two; two where there are WIDE sequences times channels or more, so that blocks are many. A
// state is kept every KEPT or KEPT / 2 positions, where the tiles of the backward pass begin.
enum { MIX_WARPS = 8, MIX_THREADS = MIX_WARPS * WARP, FORWARD = 16, BACKWARD = 8 };
enum { KEPT = MIX_WARPS * BACKWARD, WIDE = 16384 };

typedef unsigned long long Word;
#define EMPTY (~0ull) // no arithmetic gives these two NaNs

// word_put: hand v to the block that waits for *w, which is EMPTY.
static __device__ inline void word_put(Word *w, Complex v)
{
    Word bits;
    memcpy(&bits, &v, sizeof bits);
    *(volatile Word *)w = bits == EMPTY ? EMPTY ^ 1ull << 63 : bits;
}

// word_take: the value of *w once it is there; leaves it EMPTY.
static __device__ inline Complex word_take(Word *w)
{
    Word bits;
    Complex v;
    do
        bits = *(volatile Word *)w;
    while (bits == EMPTY);
    *(volatile Word *)w = EMPTY;
    memcpy(&v, &bits, sizeof v);
    return v;
}

// Some elements as they were loaded: a word of two in bf16 is not taken apart before it is used.
#ifdef PRECISION_BF16
template <int VEC> struct Loaded {
    typename std::conditional<VEC == 2, uint32_t, uint16_t>::type bits;
};

// element: number j of x.
template <int VEC> static __device__ inline float element(Loaded<VEC> x, int j)
{
    return __uint_as_float(j ? (uint32_t)x.bits & 0xffff0000 : (uint32_t)x.bits << 16);
}
#else
template <int VEC> using Loaded = Pack<float, VEC>;

// element: number j of x.
template <int VEC> static __device__ inline float element(Loaded<VEC> x, int j)
{
    return x.v[j];
}
#endif

// What a token gives a thread; alpha as it is stored.
template <int VEC> struct Token {
    Loaded<VEC> q, k, v, g;
    Pack<float, VEC> alpha, beta;
};

// token: the one at qkvg and logits or, where it is not `there`, zeros and a transition that is 1.
template <int KIND, int VEC>
static __device__ inline Token<VEC> token(const floatX *__restrict__ qkvg,
                                          const float *__restrict__ logits, Mix s, bool there)
{
    enum { PARTS = GATE_PARTS[KIND] };
    Token<VEC> x = {};
    for (int j = 0; j < VEC; j++) // an alpha of which r is 1
        x.alpha.v[j] = KIND == STABLE_EXP ? -1e30f : 1e30f;
    if (!there)
        return x;
    x.q = *(const Loaded<VEC> *)qkvg;
    x.k = *(const Loaded<VEC> *)(qkvg + s.C);
    x.v = *(const Loaded<VEC> *)(qkvg + 2 * s.C);
    x.g = *(const Loaded<VEC> *)(qkvg + 3 * s.C);
    if (PARTS > 0)
        x.alpha = *(const Pack<float, VEC> *)logits;
    if (PARTS > 1)
        x.beta = *(const Pack<float, VEC> *)(logits + s.C);
    return x;
}

// Where a thread is: of sequence b channels c .. c+VEC-1, its steps t .. t+n-1, t in row `row` of
// all; `inside`: there are such channels.
typedef struct {
    unsigned b, row;
    int tile, t, n, c;
    bool inside;
} Span;

// place: of the first step and channel where rows are `pitch` long.
static __device__ inline size_t place(Span p, int pitch)
{
    return (size_t)p.row * (unsigned)pitch + (unsigned)p.c;
}

// span_of: of this thread, tiles in time's order or, BACK, the last first.
template <int VEC, int STEPS, int WHOLE, int BACK> static __device__ inline Span span_of(Mix s)
{
    const unsigned i = blockIdx.x / s.columns, column = blockIdx.x % s.columns;
    const unsigned b = column / (unsigned)s.groups, group = column % (unsigned)s.groups;
    const int tile = BACK ? s.tiles - 1 - (int)i : (int)i;
    const int t = (tile * MIX_WARPS + (int)(threadIdx.x / WARP)) * STEPS;
    const int c = (int)(group * WARP + threadIdx.x % WARP) * VEC;
    const int n = WHOLE ? STEPS : c < s.C ? min(max(s.T - t, 0), STEPS) : 0;
    return {b, b * (unsigned)s.T + (unsigned)t, tile, t, n, c, WHOLE || c < s.C};
}

// gateloop_forward_kernel: see gateloop_forward. WHOLE: s.whole is 1, so no step has to be asked.
template <int KIND, int VEC, int WHOLE>
static __global__ void __launch_bounds__(MIX_THREADS, 2)
gateloop_forward_kernel(floatX *z, float *y, Complex *states, Complex *final, Word *chain,
                        const floatX *__restrict__ qkvg, const float *__restrict__ logits,
                        const Complex *initial, Mix s)
{
    enum { STEPS = FORWARD / VEC, PARTS = GATE_PARTS[KIND] };
    __shared__ float4 sums[MIX_WARPS][VEC][WARP];
    __shared__ Complex entering[VEC][WARP];
    const Span p = span_of<VEC, STEPS, WHOLE, 0>(s);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, in_pitch = 4 * s.C;
    Token<VEC> u[STEPS];
    float shift[VEC];
    qkvg += place(p, in_pitch);
    logits += place(p, s.pitch);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        u[i] = token<KIND, VEC>(qkvg + i * in_pitch, logits + i * s.pitch, s, i < p.n);
    Complex a[STEPS][VEC], A[VEC], X[VEC], h[VEC];
    float x[STEPS][VEC];
#pragma unroll
    for (int j = 0; j < VEC; j++)
        shift[j] = PARTS ? fixed_logit(p.c + j, s) : 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            a[i][j] = gate<KIND>(u[i].alpha.v[j] + shift[j], u[i].beta.v[j]).a;
            x[i][j] = element(u[i].k, j) * element(u[i].v, j);
            A[j] = i ? times(a[i][j], A[j]) : a[i][j];
            X[j] = i ? onto(a[i][j], X[j], x[i][j]) : Complex{x[i][j], 0};
        }
#pragma unroll
    for (int j = 0; j < VEC; j++)
        sums[warp][j][lane] = {A[j].re, A[j].im, X[j].re, X[j].im};
    __syncthreads();
    Complex P[VEC], Y[VEC]; // of the warps before
    for (int j = 0; j < VEC; j++)
        P[j] = {1, 0}, Y[j] = {0, 0};
#pragma unroll
    for (int w = 0; w < MIX_WARPS - 1 && w < warp; w++)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float4 f = sums[w][j][lane];
            const Complex A_w = {f.x, f.y}, X_w = {f.z, f.w};
            P[j] = w ? times(A_w, P[j]) : A_w;
            Y[j] = w ? onto(A_w, Y[j], X_w) : X_w;
        }
    if (warp == MIX_WARPS - 1) // what leaves the tile comes first: the next one waits for it
#pragma unroll
        for (int j = 0; j < VEC && p.inside; j++) {
            const size_t at = (size_t)p.b * s.C + p.c + j, next = (p.tile + 1) * s.B * s.C;
            const Complex in = p.tile  ? word_take(chain + p.tile * s.B * s.C + at)
                               : initial ? initial[at] : Complex{0, 0};
            const Complex last = onto(A[j], onto(P[j], in, Y[j]), X[j]);
            if (p.tile + 1 < s.tiles)
                word_put(chain + next + at, last);
            else
                final[at] = last;
            entering[j][lane] = in;
        }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const int kept = KEPT / VEC, count = (s.T + kept - 1) / kept;
        h[j] = onto(P[j], entering[j][lane], Y[j]);
        if (states && p.t % kept == 0 && p.n)
            states[((size_t)p.b * count + p.t / kept) * s.C + p.c + j] = h[j];
    }
    z += place(p, s.C);
    y = y ? y + place(p, s.C) : NULL;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        Pack<floatX, VEC> out;
        Pack<float, VEC> out_y;
        float slope;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            h[j] = onto(a[i][j], h[j], x[i][j]);
            out_y.v[j] = element(u[i].q, j) * h[j].re;
            out.v[j] = (floatX)(silu(element(u[i].g, j), &slope) * out_y.v[j]);
        }
        if (i < p.n && y)
            *(Pack<float, VEC> *)(y + i * s.C) = out_y;
        else if (i < p.n)
            *(Pack<floatX, VEC> *)(z + i * s.C) = out;
    }
}

// gateloop_backward_kernel: see gateloop_backward. With p the gradient of y, e = q p and ah = a
// h_{t-1}: dq = p Re(h), dk = v Re(G), dv = k Re(G), r dL/dr and dL/dtheta = G conj(ah). What a
// warp's steps pass back from G = 0 is E = the sum of conj(a_1 .. a_i) e_i over them.
template <int KIND, int VEC, int WHOLE, int GATED>
static __global__ void __launch_bounds__(MIX_THREADS, 2)
gateloop_backward_kernel(floatX *dp, Complex *dinitial, Word *chain,
                         const floatX *__restrict__ dout, const Complex *dfinal,
                         const Complex *__restrict__ states, const floatX *__restrict__ qkvg,
                         const float *__restrict__ logits, Mix s)
{
    enum { STEPS = BACKWARD / VEC, PARTS = GATE_PARTS[KIND] };
    typedef Pack<floatX, VEC> Stored;
    __shared__ float4 sums[MIX_WARPS][VEC][WARP];
    __shared__ Complex back_sums[MIX_WARPS][VEC][WARP];
    __shared__ Complex entering[VEC][WARP];
    const Span p = span_of<VEC, STEPS, WHOLE, 1>(s);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, in_pitch = 4 * s.C;
    Token<VEC> u[STEPS];
    Loaded<VEC> d[STEPS];
    float shift[VEC];
    qkvg += place(p, in_pitch);
    dout += place(p, s.C);
    logits += place(p, s.pitch);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u[i] = token<KIND, VEC>(qkvg + i * in_pitch, logits + i * s.pitch, s, i < p.n);
        d[i] = i < p.n ? *(const Loaded<VEC> *)(dout + i * s.C) : Loaded<VEC>{};
    }
    Complex A[VEC], X[VEC], E[VEC], h[VEC], ah[STEPS][VEC], P[VEC], Y[VEC]; // P, Y: warps behind
    Gate z[STEPS][VEC];
    float dy[STEPS][VEC], dg[STEPS][VEC]; // dg: but for its factor y
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        shift[j] = PARTS ? fixed_logit(p.c + j, s) : 0;
        h[j] = p.inside ? states[((size_t)p.b * s.tiles + p.tile) * s.C + p.c + j] : Complex{0, 0};
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float slope;
            const float d_i = element(d[i], j), factor = silu(element(u[i].g, j), &slope);
            z[i][j] = gate<KIND>(u[i].alpha.v[j] + shift[j], u[i].beta.v[j]);
            dy[i][j] = GATED ? d_i * factor : d_i;
            dg[i][j] = d_i * slope;
            const float x = element(u[i].k, j) * element(u[i].v, j);
            const float e = element(u[i].q, j) * dy[i][j];
            A[j] = i ? times(z[i][j].a, A[j]) : z[i][j].a;
            X[j] = i ? onto(z[i][j].a, X[j], x) : Complex{x, 0};
            E[j] = i ? Complex{E[j].re + A[j].re * e, E[j].im - A[j].im * e}
                     : Complex{A[j].re * e, -A[j].im * e};
        }
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sums[warp][j][lane] = {A[j].re, A[j].im, X[j].re, X[j].im};
        back_sums[warp][j][lane] = E[j];
        P[j] = {1, 0}, Y[j] = {0, 0};
    }
    __syncthreads();
#pragma unroll
    for (int w = MIX_WARPS - 1; w > 0 && w > warp; w--)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float4 f = sums[w][j][lane];
            const Complex A_w = {f.x, -f.y}, E_w = back_sums[w][j][lane];
            P[j] = w < MIX_WARPS - 1 ? times(A_w, P[j]) : A_w;
            Y[j] = w < MIX_WARPS - 1 ? onto(A_w, Y[j], E_w) : E_w;
        }
    if (warp == 0) // what leaves the tile comes first: the one before waits for it
#pragma unroll
        for (int j = 0; j < VEC && p.inside; j++) {
            const size_t at = (size_t)p.b * s.C + p.c + j;
            const Complex in = p.tile + 1 < s.tiles ? word_take(chain + p.tile * s.B * s.C + at)
                               : dfinal ? dfinal[at] : Complex{0, 0};
            const Complex last = onto(conj(A[j]), onto(P[j], in, Y[j]), E[j]);
            if (p.tile)
                word_put(chain + (p.tile - 1) * s.B * s.C + at, last);
            else if (dinitial)
                dinitial[at] = last;
            entering[j][lane] = in;
        }
#pragma unroll
    for (int w = 0; w < MIX_WARPS - 1 && w < warp; w++)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float4 f = sums[w][j][lane];
            h[j] = onto({f.x, f.y}, h[j], {f.z, f.w});
        }
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            ah[i][j] = times(z[i][j].a, h[j]);
            h[j] = {ah[i][j].re + element(u[i].k, j) * element(u[i].v, j), ah[i][j].im};
        }
    __syncthreads();
    const int pitch = (4 + PARTS) * s.C;
    dp += place(p, pitch);
    Complex G[VEC];
#pragma unroll
    for (int j = 0; j < VEC; j++)
        G[j] = onto(P[j], entering[j][lane], Y[j]);
#pragma unroll
    for (int i = STEPS - 1; i >= 0; i--) {
        Stored dq, dk, dv, dg_i, dalpha, dbeta;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float q_i = element(u[i].q, j), k_i = element(u[i].k, j);
            const float v_i = element(u[i].v, j);
            const Gate z_i = z[i][j];
            const Complex x = ah[i][j];
            const float h_i = x.re + k_i * v_i;
            G[j].re += q_i * dy[i][j];
            const float r = G[j].re * x.re + G[j].im * x.im;
            const float angle = G[j].im * x.re - G[j].re * x.im;
            dq.v[j] = (floatX)(dy[i][j] * h_i);
            dk.v[j] = (floatX)(v_i * G[j].re);
            dv.v[j] = (floatX)(k_i * G[j].re);
            dg_i.v[j] = (floatX)(dg[i][j] * q_i * h_i);
            const float across = KIND == CART ? z_i.angle_alpha * angle : -0.0f; // else no term
            dalpha.v[j] = (floatX)(z_i.r_alpha * r + across);
            dbeta.v[j] = (floatX)(z_i.angle_beta * angle + (KIND == CART ? z_i.r_beta * r : -0.0f));
            G[j] = times(conj(z_i.a), G[j]);
        }
        if (i >= p.n)
            continue;
        *(Stored *)(dp + i * pitch) = dq;
        *(Stored *)(dp + (i * pitch + s.C)) = dk;
        *(Stored *)(dp + (i * pitch + 2 * s.C)) = dv;
        if (GATED)
            *(Stored *)(dp + (i * pitch + 3 * s.C)) = dg_i;
        if (PARTS > 0)
            *(Stored *)(dp + (i * pitch + 4 * s.C)) = dalpha;
        if (PARTS > 1)
            *(Stored *)(dp + (i * pitch + 5 * s.C)) = dbeta;
    }
}

// ---- memories that are matrices: heads of any size; a block a head, a thread a column of S (by
// values) or, where sums run over values, a row of it (by keys)

enum { HEAD_KEPT = 16 }; // positions between the states that are kept

// What a block has of a token in shared memory, (HS) each. dy, dg: see gateloop_backward_kernel.
typedef struct {
    float *q, *k, *v, *g, *dy, *dg, *re, *im;
} HeadRow;

// head_row: where they are, and, with t >= 0, the token's numbers in them, between barriers.
static __device__ inline HeadRow head_row(float *shared, const floatX *qkvg, const float *logits,
                                          const floatX *dout, size_t row, int c0, Mix s, int kind)
{
    const int HS = s.HS;
    const HeadRow r = {shared, shared + HS, shared + 2 * HS, shared + 3 * HS, shared + 4 * HS,
                       shared + 5 * HS, shared + 6 * HS, shared + 7 * HS};
    __syncthreads();
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        const floatX *from = qkvg + row * 4 * s.C + c0 + i;
        const Gate z = gate_of(logits + row * s.pitch, c0 + i, s, kind);
        r.q[i] = (float)from[0], r.k[i] = (float)from[s.C], r.v[i] = (float)from[2 * s.C];
        r.g[i] = silu((float)from[3 * s.C], &r.dg[i]);
        r.dy[i] = dout ? (float)dout[row * s.C + c0 + i] : 0;
        r.re[i] = z.a.re, r.im[i] = z.a.im;
    }
    __syncthreads();
    return r;
}

// head_step: column m of the memory: next (HS,2,HS) = a S + k v; returns q Re(next).
static __device__ inline float head_step(float *next, const float *S, HeadRow r, int m, int HS)
{
    float y = 0;
    for (int c = 0; c < HS; c++) {
        const float re = S[2 * c * HS + m], im = S[(2 * c + 1) * HS + m];
        const Complex x = onto({r.re[c], r.im[c]}, {re, im}, {r.k[c] * r.v[m], 0});
        next[2 * c * HS + m] = x.re;
        next[(2 * c + 1) * HS + m] = x.im;
        y += r.q[c] * x.re;
    }
    return y;
}

// heads_forward_kernel: see gateloop_forward.
static __global__ void heads_forward_kernel(floatX *z, float *y, float *states, float *final,
                                            const floatX *qkvg, const float *logits,
                                            const float *initial, Mix s, int kind)
{
    extern __shared__ float shared[];
    const int HS = s.HS, NH = s.C / HS, c0 = blockIdx.x % NH * HS;
    const int kept = (s.T + HEAD_KEPT - 1) / HEAD_KEPT;
    const size_t b = blockIdx.x / NH, size = (size_t)HS * 2 * HS, head = c0 / HS * size;
    float *S = final + blockIdx.x * size;
    for (int m = threadIdx.x; m < HS; m += blockDim.x)
        for (int c = 0; c < 2 * HS; c++)
            S[c * HS + m] = initial ? initial[blockIdx.x * size + c * HS + m] : 0;
    for (int t = 0; t < s.T; t++) {
        const size_t row = b * s.T + t;
        const HeadRow r = head_row(shared, qkvg, logits, NULL, row, c0, s, kind);
        const size_t keep = (b * kept + t / HEAD_KEPT) * NH * size + head;
        for (int m = threadIdx.x; m < HS; m += blockDim.x) {
            for (int c = 0; c < 2 * HS && states && t % HEAD_KEPT == 0; c++)
                states[keep + c * HS + m] = S[c * HS + m];
            const float out = head_step(S, S, r, m, HS);
            if (y)
                y[row * s.C + c0 + m] = out;
            else
                z[row * s.C + c0 + m] = (floatX)(r.g[m] * out);
        }
    }
}

// head_column_backward: column m of G (HS,2,HS) += q dy; dv, dg of channel m at `to`.
static __device__ inline void head_column_backward(floatX *to, float *G, const float *S, HeadRow r,
                                                   int m, Mix s, int gated)
{
    const int HS = s.HS;
    const float dy = r.dy[m] * (gated ? r.g[m] : 1);
    float y = 0, dv = 0;
    for (int c = 0; c < HS; c++) {
        const float re = S[2 * c * HS + m], im = S[(2 * c + 1) * HS + m];
        y += r.q[c] * (r.re[c] * re - r.im[c] * im + r.k[c] * r.v[m]);
        G[2 * c * HS + m] += r.q[c] * dy;
        dv += r.k[c] * G[2 * c * HS + m];
    }
    to[2 * s.C + m] = (floatX)dv;
    if (gated)
        to[3 * s.C + m] = (floatX)(r.dy[m] * r.dg[m] * y);
}

// head_row_backward: dq, dk and the logits' gradients of channel c of a head, at `to`; row c of G
// becomes what passes to S, the memory before the token.
static __device__ inline void head_row_backward(floatX *to, float *G, const float *S, HeadRow r,
                                                Gate z, int c, Mix s, int gated)
{
    const int HS = s.HS;
    float dq = 0, dk = 0, w = 0, angle = 0;
    G += 2 * c * HS, S += 2 * c * HS;
    for (int m = 0; m < HS; m++) {
        const Complex x = times(z.a, {S[m], S[HS + m]}), g = {G[m], G[HS + m]};
        const Complex next = times(conj(z.a), g);
        dq += r.dy[m] * (gated ? r.g[m] : 1) * (x.re + r.k[c] * r.v[m]);
        dk += r.v[m] * g.re;
        w += g.re * x.re + g.im * x.im;
        angle += g.im * x.re - g.re * x.im;
        G[m] = next.re, G[HS + m] = next.im;
    }
    to[c] = (floatX)dq;
    to[s.C + c] = (floatX)dk;
    if (s.parts > 0)
        to[4 * s.C + c] = (floatX)(z.r_alpha * w + z.angle_alpha * angle);
    if (s.parts > 1)
        to[5 * s.C + c] = (floatX)(z.r_beta * w + z.angle_beta * angle);
}

// heads_backward_kernel: see gateloop_backward; work: HEAD_KEPT + 1 matrices a head.
static __global__ void heads_backward_kernel(floatX *dp, float *dinitial, float *work,
                                             const floatX *dout, const float *dfinal,
                                             const float *states, const floatX *qkvg,
                                             const float *logits, Mix s, int kind, int gated)
{
    extern __shared__ float shared[];
    const int HS = s.HS, NH = s.C / HS, c0 = blockIdx.x % NH * HS;
    const int kept = (s.T + HEAD_KEPT - 1) / HEAD_KEPT, pitch = (4 + s.parts) * s.C;
    const size_t b = blockIdx.x / NH, size = (size_t)HS * 2 * HS, own = blockIdx.x * size;
    float *S = work + own * (HEAD_KEPT + 1), *G = S + HEAD_KEPT * size;
    for (int m = threadIdx.x; m < HS; m += blockDim.x)
        for (int c = 0; c < 2 * HS; c++)
            G[c * HS + m] = dfinal ? dfinal[own + c * HS + m] : 0;
    for (int tile = kept - 1; tile >= 0; tile--) {
        const int t0 = tile * HEAD_KEPT, n = min(s.T - t0, HEAD_KEPT);
        const float *from = states + ((b * kept + tile) * NH + c0 / HS) * size;
        for (int m = threadIdx.x; m < HS; m += blockDim.x)
            for (int c = 0; c < 2 * HS; c++)
                S[c * HS + m] = from[c * HS + m];
        for (int i = 0; i + 1 < n; i++) { // S + i size: before token i of the tile
            const HeadRow r =
                head_row(shared, qkvg, logits, NULL, b * s.T + t0 + i, c0, s, kind);
            for (int m = threadIdx.x; m < HS; m += blockDim.x)
                head_step(S + (i + 1) * size, S + i * size, r, m, HS);
        }
        for (int i = n - 1; i >= 0; i--) {
            const size_t row = b * s.T + t0 + i;
            const HeadRow r = head_row(shared, qkvg, logits, dout, row, c0, s, kind);
            floatX *to = dp + row * pitch + c0;
            for (int m = threadIdx.x; m < HS; m += blockDim.x)
                head_column_backward(to, G, S + i * size, r, m, s, gated);
            __syncthreads();
            for (int c = threadIdx.x; c < HS; c += blockDim.x)
                head_row_backward(to, G, S + i * size, r,
                                  gate_of(logits + row * s.pitch, c0 + c, s, kind), c, s, gated);
        }
        __syncthreads();
    }
    for (int m = threadIdx.x; m < HS && dinitial; m += blockDim.x)
        for (int c = 0; c < 2 * HS; c++)
            dinitial[own + c * HS + m] = G[c * HS + m];
}

// ---- the launchers

// mix_of: see Mix; tiles of `tile` positions.
static Mix mix_of(size_t B, size_t T, size_t C, size_t HS, int kind, size_t vec, size_t tile)
{
    const int parts = GATE_PARTS[kind], fixed = kind == FIXED || kind == FIXED_REAL;
    const size_t groups = (C + WARP * vec - 1) / (WARP * vec);
    assert(T < INT_MAX / 2 && 6 * FORWARD * C < INT_MAX);
    assert(B * groups < INT_MAX && B * T < UINT_MAX);
    return {(int)T, (int)C, (int)HS, (int)((T + tile - 1) / tile), (int)groups,
            fixed ? 0 : parts * (int)C, parts, fixed, T % tile == 0 && C % (WARP * vec) == 0,
            (unsigned)(B * groups), B};
}

// mix_wide: whether a lane takes two channels.
static int mix_wide(size_t B, size_t C)
{
    return C % 2 == 0 && B * C >= WIDE;
}

// mix_states: complex numbers that a forward pass of at most N tokens in at most B sequences keeps,
// and mix_words: words of `chain`.
static size_t mix_states(size_t B, size_t N, size_t C, size_t HS)
{
    return (N / (HS > 1 ? (size_t)HEAD_KEPT : KEPT / 2) + B) * C * HS;
}

// mix_words: see mix_states. They start as EMPTY, and are EMPTY again after every pass.
static size_t mix_words(size_t B, size_t N, size_t C)
{
    return (N / (KEPT / 2) + B) * C;
}

// gateloop_forward: z (B,T,C) = SiLU(g_t) y_t or, with y (B,T,C) not NULL, y = alone, y_t = q_t
// Re(h_t), h_t = a_t h_{t-1} + k_t v_t, of qkvg (B,T,4C): q at 0, k at C, v at 2C, g at 3C, and
// the logits (B,T,parts C) of a, where it is fixed (parts C); by heads of HS. Before the first
// token the memory is initial (B,C,2,HS), NULL: 0; final (B,C,2,HS) = the last, may alias initial;
// states (mix_states) = what gateloop_backward needs, NULL: not asked for. chain: see mix_words.
static void gateloop_forward(floatX *z, float *y, float *states, float *final, Word *chain,
                             const floatX *qkvg, const float *logits, const float *initial,
                             size_t B, size_t T, size_t C, size_t HS, int kind,
                             cudaStream_t stream)
{
    const size_t vec = mix_wide(B, C) ? 2 : 1;
    const Mix s = mix_of(B, T, C, HS, kind, vec, MIX_WARPS * FORWARD / vec);
    const size_t grid = B * s.tiles * s.groups, threads = HS < 1024 ? (HS + 31) / 32 * 32 : 1024;
    if (HS > 1) {
        LAUNCH(heads_forward_kernel, B * C / HS, threads, 8 * HS * sizeof(float), stream, z, y,
               states, final, qkvg, logits, initial, s, kind);
        return;
    }
    WITH_KIND(kind, WITH_FLAG(TWO, vec == 2, WITH_FLAG(WHOLE, s.whole,
              LAUNCH((gateloop_forward_kernel<KIND, 1 + TWO, TWO && WHOLE>), grid, MIX_THREADS, 0,
                     stream, z, y, (Complex *)states, (Complex *)final, chain, qkvg, logits,
                     (const Complex *)initial, s))));
}

// gateloop_backward: dp (B,T,(4 + parts) C) = the gradients of q, k, v, g and the logits, side by
// side (g's: if gated), dinitial (B,C,2,HS) = (NULL: not asked for), from dout (B,T,C), that of z
// or, if not gated, y, dfinal (B,C,2,HS), that of final (NULL: 0), and the forward's states, qkvg,
// logits. work (B,C,2,HS,HEAD_KEPT+1): scratch for heads above 1. chain: see mix_words.
static void gateloop_backward(floatX *dp, float *dinitial, Word *chain, float *work,
                              const floatX *dout, const float *dfinal, const float *states,
                              const floatX *qkvg, const float *logits, size_t B, size_t T,
                              size_t C, size_t HS, int kind, int gated, cudaStream_t stream)
{
    const size_t vec = mix_wide(B, C) ? 2 : 1;
    const Mix s = mix_of(B, T, C, HS, kind, vec, KEPT / vec);
    const size_t grid = B * s.tiles * s.groups, threads = HS < 1024 ? (HS + 31) / 32 * 32 : 1024;
    if (HS > 1) {
        LAUNCH(heads_backward_kernel, B * C / HS, threads, 8 * HS * sizeof(float), stream, dp,
               dinitial, work, dout, dfinal, states, qkvg, logits, s, kind, gated);
        return;
    }
    WITH_KIND(kind, WITH_FLAG(TWO, vec == 2, WITH_FLAG(WHOLE, s.whole, WITH_FLAG(GATED, gated,
              LAUNCH((gateloop_backward_kernel<KIND, 1 + TWO, TWO && WHOLE, GATED>), grid,
                     MIX_THREADS, 0, stream, dp, (Complex *)dinitial, chain, dout,
                     (const Complex *)dfinal, (const Complex *)states, qkvg, logits, s)))));
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
// [block] The rest of a block: SiLU of g where y has a norm of its own, a stream that norms round.

enum { EACH_THREADS = 256 };

// output_forward_kernel: a thread an element.
static __global__ void output_forward_kernel(floatX *z, const floatX *y, const floatX *qkvg,
                                             size_t n, size_t C)
{
    const size_t i = blockIdx.x * (size_t)EACH_THREADS + threadIdx.x;
    float slope;
    if (i < n)
        z[i] = (floatX)(silu((float)qkvg[i / C * 4 * C + 3 * C + i % C], &slope) * (float)y[i]);
}

// output_forward: z (N,C) = SiLU(g) y, y (N,C), g at 3C of qkvg (N,4C).
static void output_forward(floatX *z, const floatX *y, const floatX *qkvg, size_t N, size_t C,
                           cudaStream_t stream)
{
    LAUNCH(output_forward_kernel, (N * C + EACH_THREADS - 1) / EACH_THREADS, EACH_THREADS, 0,
           stream, z, y, qkvg, N * C, C);
}

// output_backward_kernel: a thread an element.
static __global__ void output_backward_kernel(floatX *dz, floatX *dp, const floatX *y,
                                              const floatX *qkvg, size_t n, size_t C, size_t pitch)
{
    const size_t i = blockIdx.x * (size_t)EACH_THREADS + threadIdx.x;
    float slope;
    if (i >= n)
        return;
    const float d = (float)dz[i], g = (float)qkvg[i / C * 4 * C + 3 * C + i % C];
    dz[i] = (floatX)(d * silu(g, &slope));
    dp[i / C * pitch + 3 * C + i % C] = (floatX)(d * (float)y[i] * slope);
}

// output_backward: dz (N,C) becomes the gradient of y; g's part, at 3C of dp (N,pitch), =; from the
// forward's y, qkvg.
static void output_backward(floatX *dz, floatX *dp, const floatX *y, const floatX *qkvg, size_t N,
                            size_t C, size_t pitch, cudaStream_t stream)
{
    LAUNCH(output_backward_kernel, (N * C + EACH_THREADS - 1) / EACH_THREADS, EACH_THREADS, 0,
           stream, dz, dp, y, qkvg, N * C, C, pitch);
}

// narrow_kernel: a thread an element.
static __global__ void narrow_kernel(floatX *out, const float *x, size_t n)
{
    const size_t i = blockIdx.x * (size_t)EACH_THREADS + threadIdx.x;
    if (i < n)
        out[i] = (floatX)x[i];
}

// widen_kernel: a thread an element.
static __global__ void widen_kernel(float *out, const floatX *x, size_t n)
{
    const size_t i = blockIdx.x * (size_t)EACH_THREADS + threadIdx.x;
    if (i < n)
        out[i] = (float)x[i];
}

// narrow: out (n) = x (n) in floatX.
static void narrow(floatX *out, const float *x, size_t n, cudaStream_t stream)
{
    LAUNCH(narrow_kernel, (n + EACH_THREADS - 1) / EACH_THREADS, EACH_THREADS, 0, stream, out, x,
           n);
}

// widen: out (n) = x (n) in fp32.
static void widen(float *out, const floatX *x, size_t n, cudaStream_t stream)
{
    LAUNCH(widen_kernel, (n + EACH_THREADS - 1) / EACH_THREADS, EACH_THREADS, 0, stream, out, x,
           n);
}

// backward_input: dinp (N,C) = add (N,C), NULL for none, + dout (N,OC) weight (OC,C), rows of dout
// `pitch` apart. add may not be dinp.
static void backward_input(floatX *dinp, const floatX *add, const floatX *dout, size_t pitch,
                           const floatX *weight, size_t N, size_t C, size_t OC,
                           cudaStream_t stream)
{
    const Gemm g = {.out = dinp, .add = add, .x = dout, .y = weight, .type = FLOATX_TYPE,
                    .in = FLOATX_TYPE, .M = N, .N = C, .K = OC, .ld_out = C, .ld_x = pitch,
                    .ld_y = C};
    gemm(&g, stream);
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding.  (ports train_gateloop.c[model])

typedef struct {
    int transition, wiring, layers, channels, head_size, hidden, gn_groups, proj_bias, head_bias;
    int task;
    double transition_lr;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *norm1_w, *norm1_b, *qkvg_w, *qkvg_b, *gate_w, *gate_b, *out_w, *norm2_w, *norm2_b;
    float *fc_w, *fc_b, *down_w, *down_b, *norm_w, *norm_b, *head_w, *head_b;
} Params;

// What matrix products read, in floatX: in_w (L,4C+gates,C) is qkvg_w and, if it exists, gate_w;
// head_w (Vp,C): rows from V on 0.
typedef struct {
    floatX *in_w, *qkvg_b, *out_w, *fc_w, *fc_b, *down_w, *head_w;
} Copies;

// r1, r2: what the branches read; sum1, sum2: the sums before the norms of --wiring paper.
typedef struct {
    float *x, *gate, *S, *states, *y, *rstd_y, *sum1, *mid, *sum2, *mean1, *rstd1, *mean2, *rstd2;
    float *mean, *rstd, *logits, *losses;
    floatX *r1, *qkvg, *yn, *z, *r2, *f, *h, *last;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch; dp (N,4C+gates): of
// qkvg and the logits of transitions.
typedef struct {
    float *partial, *work;
    Word *chain;
    floatX *dx, *dr, *dp, *dz, *dh, *dlogits;
    Asked asked;
} Dacts;

// Decoding: what the layers remember; tokens read, residual stream, logits of transitions and of
// tokens, y; means and 1/deviations of norms (2,D), 1/deviations of y's groups.
typedef struct {
    int *tokens;
    float *S, *x, *gate, *logits, *y, *moments, *rstd_y;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, HS, gates, F, L, P, decode_B; // gates: logits of all transitions
    Weights weights;                                     // the host's, for files; P: rows of in_w
    size_t asked, rows; // that the head reads, of a sequence and of the batch: asked.cuh
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
    static char word[16];
    option_word(TRANSITIONS, c->transition, word, sizeof word);
    return word;
}

// params_plan: the table of parameters; matrices decay. A tensor whose first dimension is 0 does
// not exist: --transition, --wiring and the options of biases decide.
static void params_plan(Model *m)
{
    const Config *c = &m->config;
    const size_t L = m->L, C = m->C, V = m->V, F = m->F, end = c->wiring == PRE ? C : 0;
    const size_t fixed = c->transition == FIXED || c->transition == FIXED_REAL, gates = m->gates;
    const size_t L_b = gates ? L : 0, L_w = fixed ? 0 : L_b;
    const double std = 1 / sqrt((double)C), phase = c->transition == FIXED ? 0.3 : 0;
    const double rate = c->transition_lr, down = 1 / sqrt((double)F);
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(1), DECAY, 1, offsetof(Params, wte)},
        {"norm1_w", {L, C}, INIT_ONE, NO_DECAY, 1, offsetof(Params, norm1_w)},
        {"norm1_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, norm1_b)},
        {"qkvg_w", {L, 4 * C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, qkvg_w)},
        {"qkvg_b", {c->proj_bias ? L : 0, 4 * C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, qkvg_b)},
        {"gate_w", {L_w, gates, C}, INIT_NORMAL(std), DECAY, rate, offsetof(Params, gate_w)},
        {"gate_b", {L_b, gates}, INIT_NORMAL(phase), NO_DECAY, rate, offsetof(Params, gate_b)},
        {"out_w", {L, C, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, out_w)},
        {"norm2_w", {L, C}, INIT_ONE, NO_DECAY, 1, offsetof(Params, norm2_w)},
        {"norm2_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, norm2_b)},
        {"fc_w", {L, F, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, fc_w)},
        {"fc_b", {L, F}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, fc_b)},
        {"down_w", {L, C, F}, INIT_NORMAL(down), DECAY, 1, offsetof(Params, down_w)},
        {"down_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, down_b)},
        {"norm_w", {end}, INIT_ONE, NO_DECAY, 1, offsetof(Params, norm_w)},
        {"norm_b", {end}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, norm_b)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
        {"head_b", {c->head_bias ? V : 0}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, head_b)},
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
}

// partial_size: elements of scratch for sums in slices: the largest of all that is summed so.
static size_t partial_size(const Model *m)
{
    const size_t N = m->B * m->T, C = m->C, F = m->F, V = m->V, in = 4 * C + m->gates;
    const size_t sizes[][2] = {{in * C, in}, {C * C, 0}, {F * C, F}, {F * C, C}};
    size_t most = std::max({token_scratch(N, V, C), 2 * COLUMN_SLICES * C,
                            weight_scratch(m->rows, m->Vp * C, V)});
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        most = std::max(most, weight_scratch(N, sizes[i][0], sizes[i][1]));
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
    const size_t HS = m->HS = (size_t)config->head_size, hidden = (size_t)config->hidden;
    const size_t F = m->F = hidden ? hidden : 3 * C, Vp = m->Vp = (V + 31) / 32 * 32;
    const size_t gates = m->gates = (size_t)GATE_PARTS[config->transition] * C;
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    const int fixed = config->transition == FIXED || config->transition == FIXED_REAL;
    const size_t P = m->P = 4 * C + (fixed ? 0 : gates), L_gates = P > 4 * C ? L : 0;
    const size_t G = (size_t)config->gn_groups, L_gn = G ? L : 0;
    const size_t D = m->decode_B = B < 32 ? B : 32, D_gn = G ? D : 0;
    const size_t L_b = config->proj_bias ? L : 0, paper = config->wiring == PAPER ? L : 0;
    const size_t B_pre = paper ? 0 : B;
    const DeviceTensor copies[] = {
        DEVICE("in_w", floatX, Copies, in_w, L, P, C),
        DEVICE("qkvg_b", floatX, Copies, qkvg_b, L_b, 4 * C),
        DEVICE("out_w", floatX, Copies, out_w, L, C, C),
        DEVICE("fc_w", floatX, Copies, fc_w, L, F, C), DEVICE("fc_b", floatX, Copies, fc_b, L, F),
        DEVICE("down_w", floatX, Copies, down_w, L, C, F),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", float, Acts, x, L + 1, B, T, C),
        DEVICE(paper ? "u" : "r1", floatX, Acts, r1, L, B, T, C),
        DEVICE("qkvg", floatX, Acts, qkvg, L, B, T, 4 * C),
        DEVICE("gate", float, Acts, gate, L_gates, B, T, gates),
        DEVICE("S", float, Acts, S, L, B, C, 2 * HS),
        DEVICE("states", float, Acts, states, L, mix_states(B, B * T, C, HS), 2),
        DEVICE("y", float, Acts, y, L_gn, B, T, C), DEVICE("yn", floatX, Acts, yn, L_gn, B, T, C),
        DEVICE("rstd_y", float, Acts, rstd_y, L_gn, B, T, G),
        DEVICE("z", floatX, Acts, z, L, B, T, C), DEVICE("r1", float, Acts, sum1, paper, B, T, C),
        DEVICE("mid", float, Acts, mid, L, B, T, C),
        DEVICE("r2", float, Acts, sum2, paper, B, T, C),
        DEVICE(paper ? "mid in " PRECISION_NAME : "r2", floatX, Acts, r2, L, B, T, C),
        DEVICE("f", floatX, Acts, f, L, B, T, F), DEVICE("h", floatX, Acts, h, L, B, T, F),
        DEVICE("mean1", float, Acts, mean1, L, B, T), DEVICE("rstd1", float, Acts, rstd1, L, B, T),
        DEVICE("mean2", float, Acts, mean2, L, B, T), DEVICE("rstd2", float, Acts, rstd2, L, B, T),
        DEVICE("last", floatX, Acts, last, B, T, C), DEVICE("mean", float, Acts, mean, B_pre, T),
        DEVICE("rstd", float, Acts, rstd, B_pre, T),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("dp", floatX, Dacts, dp, B, T, 4 * C + gates),
        DEVICE("dz", floatX, Dacts, dz, B, T, C), DEVICE("dh", floatX, Dacts, dh, B, T, F),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("chain", Word, Dacts, chain, mix_words(B, B * T, C)),
        DEVICE("work", float, Dacts, work, HS > 1 ? B : 0, C, 2 * HS, HEAD_KEPT + 1),
        DEVICE("partial", float, Dacts, partial, partial_size(m)),
    };
    const DeviceTensor decoder[] = {
        DEVICE("S", float, Decoder, S, L, D, C, 2 * HS), DEVICE("x", float, Decoder, x, D, C),
        DEVICE("tokens", int, Decoder, tokens, D),
        DEVICE("gate", float, Decoder, gate, L_gates ? D : 0, gates),
        DEVICE("logits", float, Decoder, logits, D, Vp), DEVICE("y", float, Decoder, y, D_gn, C),
        DEVICE("moments", float, Decoder, moments, 2, D),
        DEVICE("rstd_y", float, Decoder, rstd_y, D_gn, G),
    };
    params_plan(m);
    device_plan(&m->copies_arena, "weights in " PRECISION_NAME, ROWS(copies));
    device_plan(&m->acts_arena, "activations", ROWS(acts));
    device_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    device_plan(&m->decoder_arena, "decoding state", ROWS(decoder));
}

// model_copies: which parameters have copies in floatX, and where; the chain starts empty.
static void model_copies(Model *m)
{
    const size_t L = m->L, C = m->C, F = m->F, P = m->P;
    const Params p = m->params;
    const Copies c = m->copies;
    const WeightCopy copies[] = {{p.qkvg_w, c.in_w, 4 * C * C, P * C},
                                 {p.gate_w, c.in_w + 4 * C * C, (P - 4 * C) * C, P * C},
                                 {p.qkvg_b, c.qkvg_b, 4 * L * C, 0},
                                 {p.out_w, c.out_w, L * C * C, 0},
                                 {p.fc_w, c.fc_w, L * F * C, 0},
                                 {p.fc_b, c.fc_b, L * F, 0},
                                 {p.down_w, c.down_w, L * C * F, 0},
                                 {p.head_w, c.head_w, m->V * C, 0}};
    device_pieces(&m->device, ROWS(copies));
    CUDA_CHECK(cudaMemset(m->dacts.chain, 0xff, mix_words(m->B, m->B * m->T, C) * sizeof(Word)));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 48 HS a channel and layer in the recurrence, 10 of them forward.
static double model_flops(const Model *m)
{
    const size_t N = m->B * m->T, unread = m->V * m->C * (N - m->rows) / N; // see asked.cuh
    const double weights = (double)(arena_elements(&m->weights.params, "wte") - unread);
    return (double)m->config.training.accumulate * (double)N *
           (6 * weights + 48 * (double)(m->L * m->C * m->HS));
}

// from: x + n, or NULL for a tensor that does not exist.
template <typename X> static X *from(X *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t N = m->B * m->T, n = l * N, C = n * m->C, F = n * m->F, b = l * m->B * m->C;
    const size_t G = n * (size_t)m->config.gn_groups;
    const Acts a = m->acts;
    return {.x = a.x + C, .gate = from(a.gate, n * m->gates), .S = a.S + b * 2 * m->HS,
            .states = a.states + l * 2 * mix_states(m->B, N, m->C, m->HS), .y = from(a.y, C),
            .rstd_y = from(a.rstd_y, G), .sum1 = from(a.sum1, C), .mid = a.mid + C,
            .sum2 = from(a.sum2, C), .mean1 = a.mean1 + n, .rstd1 = a.rstd1 + n,
            .mean2 = a.mean2 + n, .rstd2 = a.rstd2 + n, .r1 = a.r1 + C, .qkvg = a.qkvg + 4 * C,
            .yn = from(a.yn, C), .z = a.z + C, .r2 = a.r2 + C, .f = a.f + F, .h = a.h + F,
            .last = a.last};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, F = l * m->F;
    return {.norm1_w = p->norm1_w + C, .norm1_b = p->norm1_b + C,
            .qkvg_w = p->qkvg_w + 4 * C * m->C, .qkvg_b = from(p->qkvg_b, 4 * C),
            .gate_w = from(p->gate_w, C * m->gates), .gate_b = from(p->gate_b, l * m->gates),
            .out_w = p->out_w + C * m->C, .norm2_w = p->norm2_w + C, .norm2_b = p->norm2_b + C,
            .fc_w = p->fc_w + F * m->C, .fc_b = p->fc_b + F, .down_w = p->down_w + F * m->C,
            .down_b = p->down_b + C};
}

// layer_copies: the weights of layer l in floatX.
static Copies layer_copies(const Model *m, size_t l)
{
    const Copies *c = &m->copies;
    const size_t C = l * m->C, F = l * m->F;
    return {c->in_w + C * m->P, from(c->qkvg_b, 4 * C), c->out_w + C * m->C, c->fc_w + F * m->C,
            c->fc_b + F, c->down_w + F * m->C, c->head_w};
}

// block_forward: next (B,T,C) = a block of k.x (B,T,C); fills k, the layer's activations. pre: r1 =
// norm(x), mid = x + mix(r1), r2 = norm(mid), next = mid + mlp(r2); paper: r1 = x + mix(x), mid =
// norm(r1), r2 = mid + mlp(mid), next = norm(r2). k.S, the last state, starts from `initial`.
static void block_forward(const Model *m, Acts k, Params p, Copies w, float *next,
                          const float *initial, size_t B, size_t T)
{
    const size_t N = B * T, C = m->C, F = m->F, G = (size_t)m->config.gn_groups;
    const int paper = m->config.wiring == PAPER;
    const float *logits = k.gate ? k.gate : p.gate_b;
    float *sum = paper ? k.sum1 : k.mid;
    cudaStream_t stream = m->device.stream;
    if (paper)
        narrow(k.r1, k.x, N * C, stream);
    else
        norm_forward(k.r1, k.mean1, k.rstd1, k.x, p.norm1_w, p.norm1_b, N, C, stream);
    matmul_forward(k.qkvg, k.r1, w.in_w, w.qkvg_b, N, C, 4 * C, stream);
    if (k.gate)
        matmul_residual<float>(k.gate, NULL, k.r1, w.in_w + 4 * C * C, p.gate_b, N, C, m->gates,
                               stream);
    gateloop_forward(k.z, k.y, k.states, k.S, m->dacts.chain, k.qkvg, logits, initial, B, T, C,
                     m->HS, m->config.transition, stream);
    if (G) {
        normalize_forward(k.yn, k.rstd_y, k.y, N * G, C / G, stream);
        output_forward(k.z, k.yn, k.qkvg, N, C, stream);
    }
    matmul_residual<float>(sum, k.x, k.z, w.out_w, NULL, N, C, C, stream);
    if (paper) {
        norm_forward(k.r2, k.mean1, k.rstd1, sum, p.norm1_w, p.norm1_b, N, C, stream);
        widen(k.mid, k.r2, N * C, stream);
    } else
        norm_forward(k.r2, k.mean2, k.rstd2, sum, p.norm2_w, p.norm2_b, N, C, stream);
    matmul_forward(k.f, k.r2, w.fc_w, w.fc_b, N, C, F, stream);
    gelu_forward(k.h, k.f, N, F, 1, stream);
    sum = paper ? k.sum2 : next;
    matmul_residual(sum, k.mid, k.h, w.down_w, p.down_b, N, F, C, stream);
    if (paper) {
        norm_forward(k.last, k.mean2, k.rstd2, sum, p.norm2_w, p.norm2_b, N, C, stream);
        widen(next, k.last, N * C, stream);
    }
}

// head_forward: logits (N,V) = of x (N,C), after a norm in --wiring pre, which goes to `last`.
static void head_forward(const Model *m, float *logits, floatX *last, float *mean, float *rstd,
                         const float *x, const int *targets, size_t N, size_t rows)
{
    const Params *p = &m->params;
    cudaStream_t stream = m->device.stream;
    if (p->norm_w) // else `last` is there
        norm_forward(last, mean, rstd, x, p->norm_w, p->norm_b, N, m->C, stream);
    // logits (rows,V), where targets (N) are; NULL: of all
    const floatX *y = asked_gather(m->dacts.asked, last, targets, N, rows, m->C, stream);
    const Gemm g = {.out = logits, .bias = p->head_b, .x = y, .y = m->copies.head_w,
                    .type = CUDA_R_32F, .in = FLOATX_TYPE, .y_t = 1, .M = rows,
                    .N = p->head_b ? m->V : m->Vp, .K = m->C, .ld_out = m->Vp, .ld_x = m->C,
                    .ld_y = m->C};
    gemm(&g, stream);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    embed_forward(acts.x, device->inputs, m->params.wte, NULL, m->B, m->T, C, device->stream);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l), layer_copies(m, l),
                      acts.x + (l + 1) * N * C, NULL, m->B, m->T);
    head_forward(m, acts.logits, acts.last, acts.mean, acts.rstd, acts.x + m->L * N * C,
                 device->targets, N, m->rows);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, m->dacts.asked.where, device->input, N, m->rows, m->V, m->Vp,
                 device->stream);
}

// in_backward: of qkvg and the logits of transitions, from dp: the layer's gradients g +=, du (N,C)
// = add (N,C), NULL for none, + the gradient of their input u (N,C).
static void in_backward(const Model *m, Params g, floatX *du, const floatX *add, const floatX *u,
                        const floatX *in_w)
{
    const size_t N = m->B * m->T, C = m->C, P = m->P, pitch = 4 * C + m->gates, n = P * C;
    const size_t slices = slices_of(N, n), K = N / slices, first = g.qkvg_b ? 0 : 4 * C;
    const Dacts d = m->dacts;
    float *partial = d.partial, *dbias = g.qkvg_b ? g.qkvg_b : g.gate_b;
    cudaStream_t stream = m->device.stream;
    const Gemm gemm_w = {.out = partial, .x = d.dp, .y = u, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                         .x_t = 1, .M = P, .N = C, .K = K, .ld_out = C, .ld_x = pitch, .ld_y = C,
                         .batch = slices, .out_step = n, .x_step = K * pitch, .y_step = K * C};
    gemm(&gemm_w, stream);
    slices_sum(g.qkvg_w, NULL, partial, slices, n, 0, 0, 4 * C * C,
               g.gate_w ? (size_t)(g.gate_w - g.qkvg_w) : 0, stream);
    if (first < pitch) {
        bias_slices(partial, d.dp + first, N, pitch - first, pitch, stream);
        slices_sum(dbias, NULL, partial, COLUMN_SLICES, pitch - first, 0, 0,
                   g.qkvg_b ? 4 * C : pitch, g.gate_b ? (size_t)(g.gate_b - dbias) : 0, stream);
    }
    backward_input(du, add, d.dp, pitch, in_w, N, C, P, stream);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, Copies w, floatX *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, F = m->F, pitch = 4 * C + m->gates;
    const size_t G = (size_t)m->config.gn_groups;
    const int paper = m->config.wiring == PAPER;
    const Dacts d = m->dacts;
    const float *logits = k.gate ? k.gate : p.gate_b;
    floatX *dsum = paper ? d.dr : dx, *du = paper ? dx : d.dr; // of a sum; of a branch's input
    const floatX *add = paper ? dsum : NULL;
    cudaStream_t stream = m->device.stream;
    if (paper)
        norm_backward(d.dr, g.norm2_w, g.norm2_b, d.partial, dx, NULL, k.mean2, k.rstd2, k.sum2,
                      p.norm2_w, N, C, 1, stream);
    matmul_backward_weight(g.down_w, 0, g.down_b, d.partial, dsum, k.h, N, F, C, C, 1, stream);
    matmul_backward_input(d.dh, dsum, w.down_w, N, F, C, stream);
    gelu_backward(d.dh, g.fc_b, d.partial, d.dh, k.f, N, F, 1, stream);
    matmul_backward_weight(g.fc_w, 0, NULL, d.partial, d.dh, k.r2, N, C, F, F, 1, stream);
    backward_input(du, add, d.dh, F, w.fc_w, N, C, F, stream);
    if (paper)
        norm_backward(d.dr, g.norm1_w, g.norm1_b, d.partial, dx, NULL, k.mean1, k.rstd1, k.sum1,
                      p.norm1_w, N, C, 1, stream);
    else
        norm_backward(dx, g.norm2_w, g.norm2_b, d.partial, d.dr, NULL, k.mean2, k.rstd2, k.mid,
                      p.norm2_w, N, C, 0, stream);
    matmul_backward_weight(g.out_w, 0, NULL, d.partial, dsum, k.z, N, C, C, C, 1, stream);
    matmul_backward_input(d.dz, dsum, w.out_w, N, C, C, stream);
    if (G) {
        output_backward(d.dz, d.dp, k.yn, k.qkvg, N, C, pitch, stream);
        normalize_backward(d.dz, d.dz, C / G, k.yn, k.rstd_y, N * G, C / G, 1, stream);
    }
    gateloop_backward(d.dp, NULL, d.chain, d.work, d.dz, NULL, k.states, k.qkvg, logits, B, T, C,
                      m->HS, m->config.transition, !G, stream);
    in_backward(m, g, du, add, k.r1, w.in_w);
    if (!paper)
        norm_backward(dx, g.norm1_w, g.norm1_b, d.partial, d.dr, NULL, k.mean1, k.rstd1, k.x,
                      p.norm1_w, N, C, 0, stream);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Params p = m->params, g = m->grads;
    const Acts acts = m->acts;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    floatX *dlast = p.norm_w ? d.dr : d.dx;
    matmul_backward_weight(g.head_w, 0, g.head_b, d.partial, d.dlogits,
                           asked_or(d.asked, acts.last), m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, dlast), d.dlogits, m->copies.head_w, m->rows, C, m->Vp,
                          stream);
    asked_scatter(dlast, d.asked, N, C, stream);
    if (p.norm_w)
        norm_backward(d.dx, g.norm_w, g.norm_b, d.partial, d.dr, NULL, acts.mean, acts.rstd,
                      acts.x + m->L * N * C, p.norm_w, N, C, 1, stream);
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &p, l), layer_params(m, &g, l),
                       layer_copies(m, l), d.dx);
    embed_backward(g.wte, NULL, d.partial, d.dx, m->device.inputs, m->B, m->T, m->V, C, stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C;
    const Dacts d = m->dacts;
    const Decoder memory = m->decoder;
    float *mean = memory.moments, *rstd = memory.moments + m->decode_B, *x = memory.x;
    cudaStream_t stream = m->device.stream;
    Acts k = {.x = x, .gate = memory.gate, .y = memory.y, .rstd_y = memory.rstd_y, .sum1 = x,
              .mid = x, .sum2 = x, .mean1 = mean, .rstd1 = rstd, .mean2 = mean, .rstd2 = rstd,
              .r1 = d.dr, .qkvg = d.dp, .yn = d.dz, .z = d.dz, .r2 = d.dr, .f = d.dh, .h = d.dh,
              .last = d.dx};
    if (t == 0)
        CUDA_CHECK(cudaMemsetAsync(m->decoder_arena.base, 0, m->decoder_arena.bytes, stream));
    CUDA_CHECK(cudaMemcpyAsync(memory.tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(x, memory.tokens, m->params.wte, NULL, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        k.S = memory.S + l * m->decode_B * C * 2 * m->HS;
        block_forward(m, k, layer_params(m, &m->params, l), layer_copies(m, l), x, k.S, D, 1);
    }
    head_forward(m, memory.logits, d.dx, mean, rstd, x, NULL, D, D);
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
// [main] Options, presets, start.  (ports train_gateloop.c[main])

static const char *const SMALL_HORIZON[][2] = {{"task", "horizon"}, {"lr", "3e-3"},
    {"beta2", "0.98"}, {"weight-decay", "0.05"}, {"eval-batches", "8"}};
static const Preset PRESETS[] = {
    {"main", "--task copying --string-size 4 --channels 64 --head-size 16 --lr 5e-3 "
     "--weight-decay 0 --eval-batches 0 --steps 600", "4 letters in seconds"},
    {"horizon", "--task horizon --steps 2000 --warmup 100", "sums since a reset, 128 tokens"},
    {"recall", "--task recall --channels 128 --hidden 256 --lr 1e-3 --beta2 0.999 --steps 37500 "
     "--warmup 3750 --proj-bias no", "what followed this symbol last; its author's sizes"},
    {"shakespeare", "--task text --vocab ascii --context 256 --channels 256 --layers 6 "
     "--hidden 640 --batch-size 64 --lr 1e-3 --beta2 0.99 --steps 3000 --warmup 100 "
     "--weight-decay 0.1 --eval-batches 0", "characters; weights as GPT-2 of C=256, L=6"},
    {"wikitext103", "--task text --vocab gpt2 --context 512 --channels 624 --layers 12 --hidden "
     "1872 --wiring paper --gn-groups 16 --proj-bias no --head-bias no --batch-size 16 --steps "
     "144000 --warmup 5000 --lr 1.25e-4 --transition-lr 0.8 --weight-decay 0.25 --eval-batches 0",
     "the paper's, ten epochs; not run"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"transition", OPT_CHOICE, &c->transition, "sep", 0, 0, TRANSITIONS, DEFINES_MODEL, "of a"},
        {"wiring", OPT_CHOICE, &c->wiring, "pre", 0, 0, "pre|paper", DEFINES_MODEL, "of norms"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"channels", OPT_INT, &c->channels, "32", 1, 1 << 16, "C", DEFINES_MODEL, "NH times HS"},
        {"head-size", OPT_INT, &c->head_size, "1", 1, 1 << 16, "HS", DEFINES_MODEL, "of a memory"},
        {"hidden", OPT_INT, &c->hidden, "64", 0, 1 << 20, "F", DEFINES_MODEL, "of MLP, 0 = 3 C"},
        {"gn-groups", OPT_INT, &c->gn_groups, "0", 0, 1 << 16, "groups", DEFINES_MODEL,
         "of channels in which y is normalized, 0 = it is not"},
        {"proj-bias", OPT_CHOICE, &c->proj_bias, "yes", 0, 0, "no|yes", DEFINES_MODEL, "of qkvg"},
        {"head-bias", OPT_CHOICE, &c->head_bias, "yes", 0, 0, "no|yes", DEFINES_MODEL, "of logits"},
        {"transition-lr", OPT_REAL, &c->transition_lr, "1", 0, 1e3, "factor", DEFINES_TRAINING,
         "multiplies --lr for what makes a"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    for (size_t i = 0; i < sizeof SMALL_HORIZON / sizeof *SMALL_HORIZON; i++)
        options_default(options, SMALL_HORIZON[i][0], SMALL_HORIZON[i][1]);
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    if (c->channels % c->head_size)
        die(EXIT_USAGE, "--channels %d: expected a multiple of --head-size %d", c->channels,
            c->head_size);
    if (c->gn_groups && (c->channels % c->gn_groups || c->channels < 3 * c->gn_groups))
        die(EXIT_USAGE, "--gn-groups %d: expected equal groups of at least three of --channels %d: "
            "the norm of two is 1 and -1", c->gn_groups, c->channels);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g FLOPs an update, %.3g MB", model_flops(&m), 1e-6 * model_bytes(&m));
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
                  "train_gateloop_gpu: GateLoop on the GPU. Without options: sums since a reset.",
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
