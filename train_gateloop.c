// train_gateloop.c: GateLoop on the CPU: a linear recurrence whose transitions the data choose.
//
// "GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling" (arXiv 2311.01927). The
// memory is a complex number for each channel. A token turns it by an angle and shrinks it, both of
// its own choosing, and adds to it:
//
//   h_t = a_t h_{t-1} + k_t v_t,  a_t = r_t exp(i theta_t),  y_t = q_t Re(h_t)
//   x  += W_out (SiLU(g_t) y_t)
//   q, k, v, g = W_qkvg u;  alpha, beta = W_gate u + bias;  r = sigmoid(alpha), theta = beta
//
// u is the block's input, after its norm in --wiring pre. --head-size HS: the memory of a head is a
// matrix S, HS by HS: S_t = diag(a_t) S_{t-1} + k_t v_t^T, y_t = Re(S_t)^T q_t. The same without
// memory, as attention, is dev/scan/gateloop_forms.h, which tests hold equal.
//
//   --transition  r, theta                         what it is for
//   sep           sigmoid(alpha), beta             the paper's
//   sep-relu      sigmoid(alpha), max(beta, 0)     its author's notebook
//   cart          sigmoid(|z|), arg z              z = alpha + i beta; r from 1/2: cannot forget
//   real-pos      sigmoid(alpha), 0                no angle
//   real-signed   sigmoid(|alpha|), 0 or pi        a keeps the sign of alpha
//   stable-exp    exp(-exp(alpha)), beta           LRU's
//   fixed         sigmoid(alpha), beta             learned numbers, which no token changes
//   fixed-real    sigmoid(alpha), 0                the same, no angle
//   ones          1, 0                             linear attention
//
// Blocks: pre, x += mix(norm(x)), x += mlp(norm(x)), a norm at the end; paper, x = norm(x +
// mix(x)), x = norm(x + mlp(x)). norm is LayerNorm, eps 1e-5; mlp = W_down gelu(W_fc x + b) + b,
// gelu in its tanh form. No positions, no dropout; the head has its own matrix.
//
// Letters: C channels (the paper's d), NH = C / HS heads; F channels in the MLP; B sequences of T
// positions, N = B T, NT tiles of TILE positions; V symbols, L layers; D are decoded at once.
// Sections: [mix] gates, recurrence; [norm] LayerNorm; [layers] matrix product, ...; [optimizer]
// AdamW; [model] tensors, forward, backward, decoding; [train] the loop; [main] start.
//
//   ./train_gateloop                     sums since a reset: 0.83 after 1000 steps, two CPU cores
//   ./train_gateloop --preset horizon    after 2000: 0.97 to 1.0; --transition real-pos 0.49
//   dev/figures/gateloop_*.sh            the figures, and --preset wikitext103, which was not run
//
// Differences from the paper, whose complex model was never published; its text was not at hand, so
// equations have no numbers: pre is the default; --gn-groups has no weights, and eps 1e-8; fixed
// starts with |a| between 1/2 and 1 - 2^-8, like RetNet's, its logits with noise of 0.3; warm-up
// starts at lr/warmup, not 0; fp32 throughout.

#include "data/tasks.h" // and with it check, log, options, rng, tensors, threads, training
#include <tgmath.h>
#ifdef REAL_IS_DOUBLE // the tests build this file a second time in double precision
#define float double
#endif
#pragma GCC diagnostic ignored "-Wunused-function" // [layers] has more than this model needs

// From [layers]:
static inline float exp_ps(float x);
static void row_moments(const float *x, size_t n, float *mean, float *var);

// ------------------------------------------------------------------------------------------------
// [mix] Gates and the recurrence.

#define ARCHITECTURE "gateloop"
#define TRANSITIONS "sep|sep-relu|cart|real-pos|real-signed|stable-exp|fixed|fixed-real|ones"
enum { SEP, SEP_RELU, CART, REAL_POS, REAL_SIGNED, STABLE_EXP, FIXED, FIXED_REAL, ONES };
enum { PRE, PAPER, TILE = 16 }; // where norms stand; positions between saved states

// sigmoid: 1 / (1 + exp(-x)); 0 and 1 far out.
static inline float sigmoid(float x)
{
    return 1 / (1 + exp_ps(-x));
}

// A transition, and how ln |a| and its angle move with its logits alpha and beta.
typedef struct {
    float re, im, r_alpha, r_beta, angle_alpha, angle_beta;
} Gate;

// gate_parts: how many logits a transition of this `kind`, a word of TRANSITIONS, has.
static size_t gate_parts(int kind)
{
    return kind == ONES ? 0 : kind == REAL_POS || kind == REAL_SIGNED || kind == FIXED_REAL ? 1 : 2;
}

// gate: the transition of channel c of token n from logits (N,parts C); finite ones give finite
// numbers. cart at 0 has the angle 0 and no gradient; 1e-12 keeps its 1/|z|^2 finite near it. What
// is fixed has, at logits of 0, |a| = 1 - 2^-x = sigmoid(ln(2^x - 1)), x from 1 to 8 by channel.
static inline Gate gate(const float *logits, size_t n, size_t c, size_t C, int kind)
{
    if (kind == ONES)
        return (Gate){.re = 1};
    const float *row = logits + n * gate_parts(kind) * C;
    const float most = 88, tiny = 1e-12, x = 1 + 7 * (c + 0.5) / C; // exp(most) is finite
    const float alpha = row[c] + (kind == FIXED || kind == FIXED_REAL ? log(exp2(x) - 1) : 0);
    const float beta = gate_parts(kind) > 1 ? row[C + c] : 0, sign = alpha < 0 ? -1 : 1;
    if (kind == REAL_SIGNED)
        return (Gate){.re = sign * sigmoid(sign * alpha), .r_alpha = sign * sigmoid(-sign * alpha)};
    if (kind == CART) {
        const float m = hypot(alpha, beta), over = 1 / (m + tiny / m), r = sigmoid(m);
        const float y = alpha * over, z = beta * over, slope = sigmoid(-m);
        return (Gate){m == 0 ? r : r * (alpha / m), m == 0 ? 0 : r * (beta / m), slope * y,
                      slope * z, -z * over, y * over};
    }
    const float angle = kind == SEP_RELU && beta < 0 ? 0 : beta;
    const float rate = exp_ps(alpha > most ? most : alpha);
    const float r = kind == STABLE_EXP ? exp_ps(-rate) : sigmoid(alpha);
    return (Gate){r * cos(angle), r * sin(angle), kind == STABLE_EXP ? -rate : sigmoid(-alpha), 0,
                  0, kind != SEP_RELU || beta > 0};
}

// gates_forward: a (N,2C) = real and imaginary parts of the transitions of logits (N,parts C).
static void gates_forward(float *a, const float *logits, size_t N, size_t C, int kind)
{
#pragma omp parallel for if (N * C > 4096)
    for (size_t i = 0; i < N * C; i++) {
        const Gate z = gate(logits, i / C, i % C, C, kind);
        a[i / C * 2 * C + i % C] = z.re;
        a[i / C * 2 * C + C + i % C] = z.im;
    }
}

// gates_backward: dlogits (N,parts C) = from w (N,2C), r dL/dr and dL/dtheta, and the logits.
static void gates_backward(float *dlogits, const float *w, const float *logits, size_t N, size_t C,
                           int kind)
{
    const size_t parts = gate_parts(kind);
#pragma omp parallel for if (N * C > 4096)
    for (size_t i = 0; i < N * C * (parts > 0); i++) {
        const size_t row = i / C * C, c = i % C;
        const Gate z = gate(logits, i / C, c, C, kind);
        const float r = w[2 * row + c], angle = w[2 * row + C + c];
        dlogits[row * parts + c] = z.r_alpha * r + z.angle_alpha * angle;
        if (parts > 1)
            dlogits[row * parts + C + c] = z.r_beta * r + z.angle_beta * angle;
    }
}

// row_step: channel c of a token: next (C,2,HS), real and imaginary part of the memory, = a S + k
// v, y (C) += q Re(next); of the token q (C), k and v C and 2 C further, and a (2C). next may be S.
static inline void row_step(float *y, float *next, const float *S, const float *q, const float *a,
                            size_t c, size_t C, size_t HS)
{
    const size_t x = c * 2 * HS, h = c / HS * HS;
    for (size_t m = 0; m < HS; m++) {
        const float re = S[x + m], im = S[x + HS + m];
        next[x + m] = a[c] * re - a[C + c] * im + q[C + c] * q[2 * C + h + m];
        next[x + HS + m] = a[c] * im + a[C + c] * re;
        y[h + m] += q[c] * next[x + m];
    }
}

// token_step: all channels of a token, y =; see row_step.
static inline void token_step(float *y, float *next, const float *S, const float *q, const float *a,
                              size_t C, size_t HS)
{
    memset(y, 0, C * sizeof *y);
#pragma omp simd
    for (size_t c = 0; c < C * (HS == 1); c++) // numbers, no vectors
        row_step(y, next, S, q, a, c, C, 1);
    for (size_t c = 0; c < C * (HS > 1); c++)
        row_step(y, next, S, q, a, c, C, HS);
}

// gateloop_forward: y (B,T,C) = q_t Re(h_t), h_t = a_t h_{t-1} + k_t v_t, of qkvg (B,T,4C): q at 0,
// k at C, v at 2C, and a (B,T,2C), see gates_forward; by heads of HS, see row_step. Before the
// first token the memory is initial (B,C,2,HS), NULL: 0; final (B,C,2,HS) = the last, may alias
// initial; tiles (B,NT,C,2,HS) = that before every TILE-th token, NULL: not asked for.
static void gateloop_forward(float *y, float *tiles, float *final, const float *qkvg,
                             const float *a, const float *initial, size_t B, size_t T, size_t C,
                             size_t HS)
{
    const size_t size = C * 2 * HS, bytes = size * sizeof *y, NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < B; b++) { // threads own sequences
        float *S = final + b * size;
        initial ? memmove(S, initial + b * size, bytes) : memset(S, 0, bytes);
        for (size_t t = 0, bt = b * T; t < T; t++, bt++) {
            if (tiles && t % TILE == 0)
                memcpy(tiles + (b * NT + t / TILE) * size, S, bytes);
            token_step(y + bt * C, S, S, qkvg + bt * 4 * C, a + bt * 2 * C, C, HS);
        }
    }
}

// row_step_backward: channel c of a token, from dy (C) and G (C,2,HS), what later tokens pass to
// its memory: dq (C), dk (at C) =, dv (at 2C) +=; w (2C) = r dL/dr, dL/dtheta; G becomes what
// passes to S, the memory before the token. With G_t = q dy + G, complex:
//   dq = dy . Re(S_t),  dk = v . Re(G_t),  dv = k Re(G_t),  w = sum G_t conj(a S),  G = conj(a) G_t
static inline void row_step_backward(float *dq, float *w, float *G, const float *dy, const float *S,
                                     const float *q, const float *a, size_t c, size_t C, size_t HS)
{
    const size_t at = c * 2 * HS, h = c / HS * HS;
    const float re = a[c], im = a[C + c], k = q[C + c];
    float dq_c = 0, dk_c = 0, r = 0, angle = 0;
    for (size_t m = 0; m < HS; m++) {
        const float x = re * S[at + m] - im * S[at + HS + m], v = q[2 * C + h + m], d = dy[h + m];
        const float y = re * S[at + HS + m] + im * S[at + m];
        const float g = G[at + m] + q[c] * d, g_im = G[at + HS + m];
        dq_c += d * (x + k * v);
        dk_c += v * g;
        dq[2 * C + h + m] += k * g;
        r += g * x + g_im * y;
        angle += g_im * x - g * y;
        G[at + m] = re * g + im * g_im;
        G[at + HS + m] = re * g_im - im * g;
    }
    dq[c] = dq_c, dq[C + c] = dk_c;
    w[c] = r, w[C + c] = angle;
}

// gateloop_work: elements of scratch a thread needs: the states of a tile, G, and outputs.
static size_t gateloop_work(size_t C, size_t HS)
{
    return (C * ((TILE + 1) * 2 * HS + 1) + 15) / 16 * 16;
}

// gateloop_backward: dqkvg (B,T,4C), all but g's part, =; w (B,T,2C), r dL/dr and dL/dtheta, =;
// dinitial (B,C,2,HS) = (NULL: not asked for), from dy (B,T,C), dfinal (B,C,2,HS), the gradient of
// final (NULL: 0), and the forward's tiles, qkvg, a; work (threads, gateloop_work) is scratch. The
// states of a tile are computed again from the one before it: nothing is divided by a.
static void gateloop_backward(float *dqkvg, float *w, float *dinitial, const float *dy,
                              const float *dfinal, const float *tiles, const float *qkvg,
                              const float *a, float *work, size_t B, size_t T, size_t C, size_t HS)
{
    const size_t size = C * 2 * HS, bytes = size * sizeof *work, NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < B; b++) {
        float *S = work + threads_index() * gateloop_work(C, HS), *G = S + TILE * size;
        dfinal ? memcpy(G, dfinal + b * size, bytes) : memset(G, 0, bytes);
        for (size_t tile = NT; tile-- > 0;) {
            const size_t first = b * T + tile * TILE, n = tile + 1 < NT ? TILE : T - tile * TILE;
            memcpy(S, tiles + (b * NT + tile) * size, bytes);
            for (size_t i = 0, bt = first; i + 1 < n; i++, bt++) // S: before each of its tokens
                token_step(G + size, S + (i + 1) * size, S + i * size, qkvg + bt * 4 * C,
                           a + bt * 2 * C, C, HS);
            for (size_t i = n; i-- > 0;) {
                const size_t bt = first + i;
                const float *dy_t = dy + bt * C, *q = qkvg + bt * 4 * C, *a_t = a + bt * 2 * C;
                float *dq = dqkvg + bt * 4 * C, *w_t = w + bt * 2 * C;
                memset(dq + 2 * C, 0, C * sizeof *dq);
#pragma omp simd
                for (size_t c = 0; c < C * (HS == 1); c++)
                    row_step_backward(dq, w_t, G, dy_t, S + i * size, q, a_t, c, C, 1);
                for (size_t c = 0; c < C * (HS > 1); c++)
                    row_step_backward(dq, w_t, G, dy_t, S + i * size, q, a_t, c, C, HS);
            }
        }
        if (dinitial)
            memcpy(dinitial + b * size, G, bytes);
    }
}

// output_forward: z (N,C) = SiLU(g) y, y (N,C), g at 3C of qkvg (N,4C).
static void output_forward(float *z, const float *y, const float *qkvg, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t c = 0; c < C; c++)
            z[n * C + c] = qkvg[n * 4 * C + 3 * C + c] * sigmoid(qkvg[n * 4 * C + 3 * C + c]) *
                           y[n * C + c];
}

// output_backward: dy (N,C) =, g's part of dqkvg (N,4C) = from dz (N,C) and the forward's y, qkvg.
static void output_backward(float *dy, float *dqkvg, const float *dz, const float *y,
                            const float *qkvg, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            const float g = qkvg[n * 4 * C + 3 * C + c], p = sigmoid(g), d = dz[n * C + c];
            dy[n * C + c] = d * g * p;
            dqkvg[n * 4 * C + 3 * C + c] = d * y[n * C + c] * p * (1 + g * (1 - p));
        }
}

// ------------------------------------------------------------------------------------------------
// [norm] LayerNorm, and GELU's tanh form.  (shared)

// layernorm_forward: out (N,C) = weight (x - mean) / sqrt(var + 1e-5) + bias, rows of x (N,C).
static void layernorm_forward(float *out, const float *x, const float *weight, const float *bias,
                              size_t N, size_t C)
{
    const float eps = 1e-5;
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        float mean, var;
        row_moments(x + n * C, C, &mean, &var);
        const float rstd = 1 / sqrt(var + eps);
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = (x[n * C + c] - mean) * rstd * weight[c] + bias[c];
    }
}

// add_columns: sum (C) += the sums over n of x (N,C), in double; threads own channels.
static void add_columns(float *sum, const float *x, size_t N, size_t C)
{
    enum { STRIP = 16 };
#pragma omp parallel for if (N * C > 65536)
    for (size_t c0 = 0; c0 < C; c0 += STRIP) {
        const size_t strip = C - c0 < STRIP ? C - c0 : STRIP;
        double total[STRIP] = {0};
        for (size_t n = 0; n < N; n++)
            for (size_t c = 0; c < strip; c++)
                total[c] += x[n * C + c0 + c];
        for (size_t c = 0; c < strip; c++)
            sum[c0 + c] += total[c];
    }
}

// layernorm_backward: dx (N,C) +=, dweight (C) +=, dbias (C) += from dout (N,C), overwritten, and
// the forward's x and weight. With z = (x - mean) rstd and d = dout weight:
//   dx = rstd (d - mean(d) - z mean(d z)),  dweight = sum_n dout z,  dbias = sum_n dout
static void layernorm_backward(float *dx, float *dweight, float *dbias, float *dout,
                               const float *x, const float *weight, size_t N, size_t C)
{
    const float eps = 1e-5, over_C = 1 / (double)C;
    add_columns(dbias, dout, N, C);
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        const float *x_n = x + n * C;
        float *dx_n = dx + n * C, *dout_n = dout + n * C, mean, var, sum = 0, sum_z = 0;
        row_moments(x_n, C, &mean, &var);
        const float rstd = 1 / sqrt(var + eps);
#pragma omp simd reduction(+ : sum, sum_z)
        for (size_t c = 0; c < C; c++) {
            sum += dout_n[c] * weight[c];
            sum_z += dout_n[c] * weight[c] * (x_n[c] - mean) * rstd;
        }
        for (size_t c = 0; c < C; c++) {
            const float z = (x_n[c] - mean) * rstd;
            dx_n[c] += rstd * (dout_n[c] * weight[c] - sum * over_C - z * (sum_z * over_C));
            dout_n[c] *= z;
        }
    }
    add_columns(dweight, dout, N, C);
}

// gelu_tanh: x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), y = sqrt(2/pi) (x + 0.044715 x^3); *slope =
// its derivative. Beyond 30 the factor is 0 or 1, and y, whose cube may overflow, is that of 30.
static inline float gelu_tanh(float x, float *slope)
{
    const float far = 30, root = 0.79788456080286536, cubic = 0.044715;
    const float a = x > far ? far : x < -far ? -far : x;
    const float p = 1 / (1 + exp_ps(-2 * root * (a + cubic * a * a * a)));
    *slope = p + 2 * root * a * (1 + 3 * cubic * a * a) * p * (1 - p);
    return x * p;
}

// ------------------------------------------------------------------------------------------------
// [layers] What every architecture here is made of.  (shared)

// exp_ps: exp(x) as a polynomial, which compilers vectorise (they do not vectorise libm's): with k
// the rounded x/ln 2 and f = x - k ln 2, exp(x) = 2^k p(f), p of degree 6. Relative error < 2e-7
// from -87 to 88; 0 below -87.7, inf above 88.38, NaN stays. In double precision: libm's.
static inline float exp_ps(float x)
{
#ifdef REAL_IS_DOUBLE
    return exp(x);
#else
    const float lowest = -88, highest = 89, log2_e = 1.44269504088896341, rounder = 3 << 22;
    const float ln2_high = 0.693359375, ln2_low = -2.12194440054690583e-4;
    const float c2 = 0.5000000008982932, c3 = 0.1666657684599401, c4 = 0.04166652455270952;
    const float c5 = 0.008363202971578512, c6 = 0.0013928201930897837;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    float shifted = x * log2_e + rounder; // its low mantissa bits are now the integer k
    float k = shifted - rounder, f = x - k * ln2_high - k * ln2_low, scale;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23; // k = -127 makes 0, k = 128 makes inf
    memcpy(&scale, &bits, sizeof scale);
    return scale * (1 + f * (1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6))))));
#endif
}

// The matrix product works on tiles of MR rows by two vectors of columns that stay in registers, on
// panels of MC x KC of x that stay in the L2 cache and NR x KC of y that stay in the L1.
#ifdef __AVX512F__
enum { VECTOR_BYTES = 64, MR = 12 };
#else
enum { VECTOR_BYTES = 32, MR = 6 };
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
enum { VECTOR = VECTOR_BYTES / sizeof(float), NR = 2 * VECTOR, MC = 96, KC = 256, NC = 8 * NR };

// gemm_tile: tile (MR,NR) = x^T y of packed panels x (K,MR), y (K,NR).
static inline void gemm_tile(float *restrict tile, const float *restrict x, const float *restrict y,
                             size_t K)
{
    Vector sum[MR][2];
    memset(sum, 0, sizeof sum);
    for (size_t k = 0; k < K; k++) {
        Vector y0 = ((const Vector *)(y + k * NR))[0], y1 = ((const Vector *)(y + k * NR))[1];
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            sum[i][0] += x[k * MR + i] * y0;
            sum[i][1] += x[k * MR + i] * y1;
        }
    }
    memcpy(tile, sum, sizeof sum);
}

// gemm_pack: to (ceil(n/width) panels of (K,width)) = x (n,K) read with strides, padded with zeros.
static inline void gemm_pack(float *to, const float *x, size_t row, size_t col, size_t n, size_t K,
                             size_t width)
{
    for (size_t i0 = 0; i0 < n; i0 += width, to += width * K)
        if (col == 1) // read along the contiguous side of x
            for (size_t i = 0; i < width; i++)
                for (size_t k = 0; k < K; k++)
                    to[k * width + i] = i0 + i < n ? x[(i0 + i) * row + k] : 0;
        else
            for (size_t k = 0; k < K; k++)
                for (size_t i = 0; i < width; i++)
                    to[k * width + i] = i0 + i < n ? x[(i0 + i) * row + k * col] : 0;
}

// gemm: out (M,N) = or, with accumulate, += x (M,K) y (K,N). x[m,k] is at m * x_row + k * x_col and
// y[k,n] at k * y_row + n * y_col: either may be a transpose. Threads own tiles of out, and a sum
// over K has one order, so their number does not matter.
static void gemm(float *out, const float *x, size_t x_row, size_t x_col, const float *y,
                 size_t y_row, size_t y_col, size_t M, size_t N, size_t K, int accumulate)
{
    size_t m_blocks = (M + MC - 1) / MC, n_blocks = (N + NC - 1) / NC;
#pragma omp parallel for schedule(static) if (M * N * K > 1 << 20)
    for (size_t block = 0; block < m_blocks * n_blocks; block++) {
        _Alignas(64) float xs[MC * KC], ys[NR * KC], tile[MR * NR];
        size_t m0 = block / n_blocks * MC, m1 = m0 + MC < M ? m0 + MC : M;
        size_t n0 = block % n_blocks * NC, n1 = n0 + NC < N ? n0 + NC : N;
        for (size_t k0 = 0; k0 < K; k0 += KC) {
            size_t k_size = K - k0 < KC ? K - k0 : KC;
            int add = accumulate || k0;
            gemm_pack(xs, x + m0 * x_row + k0 * x_col, x_row, x_col, m1 - m0, k_size, MR);
            for (size_t n = n0; n < n1; n += NR) {
                size_t cols = n1 - n < NR ? n1 - n : NR;
                gemm_pack(ys, y + k0 * y_row + n * y_col, y_col, y_row, cols, k_size, NR);
                for (size_t m = m0; m < m1; m += MR) {
                    size_t rows = m1 - m < MR ? m1 - m : MR;
                    gemm_tile(tile, xs + (m - m0) * k_size, ys, k_size);
                    for (size_t i = 0; i < rows; i++)
                        for (size_t j = 0; j < cols; j++) {
                            float *o = out + (m + i) * N + n + j;
                            *o = add ? *o + tile[i * NR + j] : tile[i * NR + j];
                        }
                }
            }
        }
    }
}

// matmul_forward: out (N,OC) = (accumulate: +=) inp (N,C) weight (OC,C)^T + bias (OC), NULL: none.
static void matmul_forward(float *out, const float *inp, const float *weight, const float *bias,
                           size_t N, size_t C, size_t OC, int accumulate)
{
    gemm(out, inp, C, 1, weight, 1, C, N, OC, C, accumulate);
#pragma omp parallel for if (N * OC > 65536)
    for (size_t n = 0; n < N; n++)
        for (size_t o = 0; bias && o < OC; o++)
            out[n * OC + o] += bias[o];
}

// matmul_backward: dinp (N,C) = or, with accumulate, += dout (N,OC) weight; dweight (OC,C) +=
// dout^T inp; dbias (OC), NULL for none, += column sums of dout, in double.
static void matmul_backward(float *dinp, float *dweight, float *dbias, const float *dout,
                            const float *inp, const float *weight, size_t N, size_t C, size_t OC,
                            int accumulate)
{
    gemm(dinp, dout, OC, 1, weight, C, 1, N, C, OC, accumulate);
    gemm(dweight, dout, 1, OC, inp, C, 1, OC, C, N, 1);
    enum { STRIP = 32 };
    for (size_t o0 = 0; dbias && o0 < OC; o0 += STRIP) {
        size_t strip = OC - o0 < STRIP ? OC - o0 : STRIP;
        double sum[STRIP] = {0};
        for (size_t n = 0; n < N; n++)
            for (size_t o = 0; o < strip; o++)
                sum[o] += dout[n * OC + o0 + o];
        for (size_t o = 0; o < strip; o++)
            dbias[o0 + o] += sum[o];
    }
}

// row_moments: mean and biased variance of x (n), summed in double: one value of 1e4 must not drown
// the others. The mean is taken about x[0], so that a constant row has variance exactly 0.
static void row_moments(const float *x, size_t n, float *mean, float *var)
{
    double sum = 0, squares = 0, first = x[0];
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i] - first;
    const float m = first + sum / (double)n;
#pragma omp simd reduction(+ : squares)
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - m) * (x[i] - m);
    *mean = m;
    *var = squares / (double)n;
}

// normalize_row: out (n) = (x - mean) / sqrt(var + 1e-8), biased variance. out may alias x.
static void normalize_row(float *out, const float *x, size_t n)
{
    const float eps = 1e-8;
    float mean, var;
    row_moments(x, n, &mean, &var);
    float rstd = 1 / sqrt(var + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = (x[i] - mean) * rstd;
}

// normalize_row_backward: dx (n) = or, with accumulate, += rstd (dout - mean(dout) - z mean(dout
// z)), z = normalize(x). dx may alias dout.
static void normalize_row_backward(float *dx, const float *dout, const float *x, size_t n,
                                   int accumulate)
{
    const float eps = 1e-8;
    float mean, var, sum = 0, sum_z = 0;
    row_moments(x, n, &mean, &var);
    float rstd = 1 / sqrt(var + eps);
#pragma omp simd reduction(+ : sum, sum_z)
    for (size_t i = 0; i < n; i++) {
        sum += dout[i];
        sum_z += dout[i] * (x[i] - mean) * rstd;
    }
    for (size_t i = 0; i < n; i++) {
        float d = rstd * (dout[i] - sum / n - (x[i] - mean) * rstd * (sum_z / n));
        dx[i] = accumulate ? dx[i] + d : d;
    }
}

// normalize_forward: out (N,C) = normalize_row of every row of x (N,C).
static void normalize_forward(float *out, const float *x, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
        normalize_row(out + n * C, x + n * C, C);
}

// normalize_backward: dx (N,C) += from dout (N,C) and the forward's x (N,C).
static void normalize_backward(float *dx, const float *dout, const float *x, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
        normalize_row_backward(dx + n * C, dout + n * C, x + n * C, C, 1);
}

// embed_forward: out (B,T,C) = wte[token] + wpe[t]; tokens (B,T), wte (V,C), wpe (T,C).
static void embed_forward(float *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C)
{
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * T; i++)
        for (size_t c = 0; c < C; c++)
            out[i * C + c] = wte[(size_t)tokens[i] * C + c] + (wpe ? wpe[i % T * C + c] : 0);
}

// embed_backward: dwte (V,C) +=, dwpe (T,C) += from dout (B,T,C). Threads own channels, not tokens,
// so that repeated tokens neither race nor change the order of a sum.
static void embed_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, size_t B,
                           size_t T, size_t C)
{
    enum { STRIP = 16 };
#pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += STRIP)
        for (size_t i = 0; i < B * T; i++)
            for (size_t c = c0; c < C && c < c0 + STRIP; c++) {
                dwte[(size_t)tokens[i] * C + c] += dout[i * C + c];
                if (dwpe) // a model may have no positions
                    dwpe[i % T * C + c] += dout[i * C + c];
            }
}

// argmax: index of the largest of x (n), the lowest of equals.
static int argmax(const float *x, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return (int)best;
}

// crossentropy: losses (N) = -log softmax(logits)[target] in nats, 0 where the target is IGNORE;
// predictions (N) = argmax; dlogits (N,V) = the mean loss's gradient (softmax - onehot) / count;
// logits (N,V), targets (N). Returns the mean over the targets that count, 0 if none does.
static double crossentropy(float *losses, int *predictions, float *dlogits, const float *logits,
                           const int *targets, size_t N, size_t V)
{
    double total = 0, count = 0;
    for (size_t n = 0; n < N; n++)
        count += targets[n] != IGNORE;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const float *x = logits + n * V;
        float *dx = dlogits + n * V;
        int target = targets[n], top = predictions[n] = argmax(x, V);
        double sum = 0;
        for (size_t i = 0; i < V; i++)
            sum += dx[i] = exp_ps(x[i] - x[top]);
        losses[n] = target == IGNORE ? 0 : log(sum) + x[top] - x[target];
        const float scale = target == IGNORE ? 0 : 1 / (sum * count);
        for (size_t i = 0; i < V; i++)
            dx[i] *= scale;
        if (target != IGNORE)
            dx[target] -= 1 / count;
    }
    for (size_t n = 0; n < N; n++)
        total += losses[n];
    return count > 0 ? total / count : 0;
}

// ------------------------------------------------------------------------------------------------
// [optimizer] Gradient norm, AdamW.  (shared)

// gradient_norm: root of the sum of squares over all tensors, in double.
static double gradient_norm(const Arena *grads)
{
    double sum = 0;
    for (int k = 0; k < grads->n; k++) {
        const float *g = arena_data(grads, k);
        size_t n = tensor_size(&grads->table[k]);
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < n; i++)
            sum += (double)g[i] * g[i];
    }
    return sqrt(sum);
}

// adamw: one update of every tensor; gradients are first multiplied by grad_scale (clipping):
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  n = step + 1,
//   p -= lr lr_scale ((m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps) + weight_decay p)
// Moments below 1e-37, next to the denormals, which are slow, become 0.  [arXiv 1711.05101]
static void adamw(Weights *w, const Training *t, double lr, double grad_scale, long step)
{
    const float beta1 = t->beta1, beta2 = t->beta2, rest1 = 1 - t->beta1, rest2 = 1 - t->beta2;
    const float over_c1 = 1 / (1 - pow(t->beta1, (double)step + 1)), eps = t->adam_eps;
    const float over_c2 = 1 / (1 - pow(t->beta2, (double)step + 1)), s = grad_scale, tiny = 1e-37;
    for (int k = 0; k < w->params.n; k++) {
        const Tensor *row = &w->params.table[k];
        const float rate = lr * row->lr_scale, decay = row->decay ? t->weight_decay : 0;
        const float *g = arena_data(&w->grads, k);
        float *p = arena_data(&w->params, k), *m = arena_data(&w->m, k), *v = arena_data(&w->v, k);
        size_t n = tensor_size(row);
#pragma omp parallel for simd if (n > 65536)
        for (size_t i = 0; i < n; i++) {
            float g_i = s * g[i];
            float m_i = beta1 * m[i] + rest1 * g_i, v_i = beta2 * v[i] + rest2 * g_i * g_i;
            m[i] = m_i = fabs(m_i) < tiny ? 0 : m_i;
            v[i] = v_i = v_i < tiny ? 0 : v_i;
            p[i] -= rate * (m_i * over_c1 / (sqrt(v_i * over_c2) + eps) + decay * p[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding.

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

typedef struct {
    float *x, *r1, *qkvg, *gate, *a, *tiles, *S, *y, *yn, *z, *mid, *r2, *f, *h;
    float *last, *logits, *losses;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *dqkvg, *dgate, *w, *dy, *dz, *dh, *dlogits, *work;
} Dacts;

typedef struct { float *S; } State; // what a layer remembers while decoding

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, HS, gates, F, L, decode_B; // gates: logits of all transitions
    Weights weights;
    Params params, grads;
    Acts acts;
    Dacts dacts;
    State state;
    Arena acts_arena, dacts_arena, state_arena;
    Batch batch;
    double loss; // nats, mean over the supervised positions of the batch
} Model;

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    static char word[16];
    option_word(TRANSITIONS, c->transition, word, sizeof word);
    return word;
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

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
    weights_plan(&m->weights, ROWS(params));
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
    const size_t F = m->F = hidden ? hidden : 3 * C;
    const size_t gates = m->gates = gate_parts(config->transition) * C;
    const size_t D = m->decode_B = B < 32 ? B : 32, L_gn = config->gn_groups ? L : 0;
    const size_t L_gates = gates ? L : 0, NT = B * T / TILE + B;
    const Tensor acts[] = { // x[0] is the embedding; see block_forward
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r1", Acts, r1, L, B, T, C),
        ACTIVATION("qkvg", Acts, qkvg, L, B, T, 4 * C),
        ACTIVATION("gate", Acts, gate, L_gates, B, T, gates),
        ACTIVATION("a", Acts, a, L, B, T, 2 * C), ACTIVATION("S", Acts, S, L, B, C, 2 * HS),
        ACTIVATION("tiles", Acts, tiles, L, NT, C, 2 * HS), // for any B, T of as many tokens
        ACTIVATION("y", Acts, y, L, B, T, C), ACTIVATION("yn", Acts, yn, L_gn, B, T, C),
        ACTIVATION("z", Acts, z, L, B, T, C), ACTIVATION("mid", Acts, mid, L, B, T, C),
        ACTIVATION("r2", Acts, r2, L, B, T, C), ACTIVATION("f", Acts, f, L, B, T, F),
        ACTIVATION("h", Acts, h, L, B, T, F), ACTIVATION("last", Acts, last, B, T, C),
        ACTIVATION("logits", Acts, logits, B, T, V), ACTIVATION("losses", Acts, losses, B, T),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("dqkvg", Dacts, dqkvg, B, T, 4 * C), ACTIVATION("w", Dacts, w, B, T, 2 * C),
        ACTIVATION("dgate", Dacts, dgate, gates ? B : 0, T, gates),
        ACTIVATION("dy", Dacts, dy, B, T, C), ACTIVATION("dz", Dacts, dz, B, T, C),
        ACTIVATION("dh", Dacts, dh, B, T, F), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, threads_count(), gateloop_work(C, HS)),
    };
    const Tensor state[] = {ACTIVATION("S", State, S, L, D, C, 2 * HS)};
    params_plan(m);
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 48 HS a channel and layer in the recurrence, 10 of them forward.
static double model_flops(const Model *m)
{
    const size_t tokens = (size_t)m->config.training.accumulate * m->B * m->T;
    return (double)tokens * (6 * (double)arena_elements(&m->weights.params, "wte") +
                             48 * (double)(m->L * m->C * m->HS));
}

// from: x + n, or NULL for a tensor that does not exist.
static float *from(float *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, F = n * m->F, row = m->C * 2 * m->HS;
    const Acts *a = &m->acts;
    return (Acts){.x = a->x + C, .r1 = a->r1 + C, .qkvg = a->qkvg + 4 * C,
                  .gate = from(a->gate, n * m->gates), .a = a->a + n * 2 * m->C,
                  .tiles = a->tiles + l * (m->B * m->T / TILE + m->B) * row,
                  .S = a->S + l * m->B * row, .y = a->y + C, .yn = (a->yn ? a->yn : a->y) + C,
                  .z = a->z + C, .mid = a->mid + C, .r2 = a->r2 + C, .f = a->f + F, .h = a->h + F};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, F = l * m->F;
    return (Params){.norm1_w = p->norm1_w + C, .norm1_b = p->norm1_b + C,
                    .qkvg_w = p->qkvg_w + 4 * C * m->C, .qkvg_b = from(p->qkvg_b, 4 * C),
                    .gate_w = from(p->gate_w, C * m->gates),
                    .gate_b = from(p->gate_b, l * m->gates), .out_w = p->out_w + C * m->C,
                    .norm2_w = p->norm2_w + C, .norm2_b = p->norm2_b + C,
                    .fc_w = p->fc_w + F * m->C, .fc_b = p->fc_b + F, .down_w = p->down_w + F * m->C,
                    .down_b = p->down_b + C};
}

// block_forward: next (B,T,C) = a block of k.x (B,T,C); fills k, the layer's activations. pre: r1 =
// norm(x), mid = x + mix(r1), r2 = norm(mid), next = mid + mlp(r2); paper: r1 = x + mix(x), mid =
// norm(r1), r2 = mid + mlp(mid), next = norm(r2). k.S, the last state, starts from `initial`.
static void block_forward(const Model *m, Acts k, Params p, float *next, const float *initial,
                          size_t B, size_t T)
{
    const size_t N = B * T, C = m->C, F = m->F, G = (size_t)m->config.gn_groups;
    const int kind = m->config.transition, paper = m->config.wiring == PAPER;
    float *u = paper ? k.x : k.r1, *sum = paper ? k.r1 : k.mid, *in = paper ? k.mid : k.r2;
    if (!paper)
        layernorm_forward(k.r1, k.x, p.norm1_w, p.norm1_b, N, C);
    matmul_forward(k.qkvg, u, p.qkvg_w, p.qkvg_b, N, C, 4 * C, 0);
    if (p.gate_b && !p.gate_w) // fixed: nothing and the bias
        memset(k.gate, 0, N * m->gates * sizeof *k.gate);
    matmul_forward(k.gate, u, p.gate_w, p.gate_b, N, p.gate_w ? C : 0, m->gates, 0);
    gates_forward(k.a, k.gate, N, C, kind);
    gateloop_forward(k.y, k.tiles, k.S, k.qkvg, k.a, initial, B, T, C, m->HS);
    if (G)
        normalize_forward(k.yn, k.y, N * G, C / G);
    output_forward(k.z, k.yn, k.qkvg, N, C);
    memcpy(sum, k.x, N * C * sizeof *sum);
    matmul_forward(sum, k.z, p.out_w, NULL, N, C, C, 1);
    layernorm_forward(in, sum, paper ? p.norm1_w : p.norm2_w, paper ? p.norm1_b : p.norm2_b, N, C);
    matmul_forward(k.f, in, p.fc_w, p.fc_b, N, C, F, 0);
#pragma omp parallel for simd if (N * F > 65536)
    for (size_t i = 0; i < N * F; i++) {
        float slope;
        k.h[i] = gelu_tanh(k.f[i], &slope);
    }
    sum = paper ? k.r2 : next;
    memcpy(sum, k.mid, N * C * sizeof *sum);
    matmul_forward(sum, k.h, p.down_w, p.down_b, N, F, C, 1);
    if (paper)
        layernorm_forward(next, k.r2, p.norm2_w, p.norm2_b, N, C);
}

// head_forward: logits (N,V) = of x (N,C), after a norm in --wiring pre, which goes to `last`.
static void head_forward(const Model *m, float *logits, float *last, const float *x, size_t N)
{
    const Params *p = &m->params;
    p->norm_w ? layernorm_forward(last, x, p->norm_w, p->norm_b, N, m->C)
              : (void)memcpy(last, x, N * m->C * sizeof *last);
    matmul_forward(logits, last, p->head_w, p->head_b, N, m->C, m->V, 0);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    embed_forward(acts.x, m->batch.inputs, m->params.wte, NULL, m->B, m->T, C);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l),
                      acts.x + (l + 1) * N * C, NULL, m->B, m->T);
    head_forward(m, acts.logits, acts.last, acts.x + m->L * N * C, N);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, float *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, F = m->F, bytes = N * C * sizeof *dx;
    const size_t G = (size_t)m->config.gn_groups, paper = m->config.wiring == PAPER;
    const Dacts d = m->dacts;
    float *du = paper ? dx : d.dr; // of a branch's input: added to the stream, or before its norm
    const float *u = paper ? k.x : k.r1, *sum = paper ? k.r1 : k.mid, *in = paper ? k.mid : k.r2;
    if (paper) {
        memcpy(d.dr, dx, bytes), memset(dx, 0, bytes);
        layernorm_backward(dx, g.norm2_w, g.norm2_b, d.dr, k.r2, p.norm2_w, N, C);
    }
    matmul_backward(d.dh, g.down_w, g.down_b, dx, k.h, p.down_w, N, F, C, 0);
#pragma omp parallel for simd if (N * F > 65536)
    for (size_t i = 0; i < N * F; i++) {
        float slope;
        gelu_tanh(k.f[i], &slope);
        d.dh[i] *= slope;
    }
    matmul_backward(du, g.fc_w, g.fc_b, d.dh, in, p.fc_w, N, C, F, (int)paper);
    if (paper)
        memcpy(d.dr, dx, bytes), memset(dx, 0, bytes);
    layernorm_backward(dx, paper ? g.norm1_w : g.norm2_w, paper ? g.norm1_b : g.norm2_b, d.dr, sum,
                       paper ? p.norm1_w : p.norm2_w, N, C);
    matmul_backward(d.dz, g.out_w, NULL, dx, k.z, p.out_w, N, C, C, 0);
    output_backward(d.dy, d.dqkvg, d.dz, k.yn, k.qkvg, N, C);
    if (G) {
        memset(d.dz, 0, N * C * sizeof *d.dz);
        normalize_backward(d.dz, d.dy, k.y, N * G, C / G);
    }
    gateloop_backward(d.dqkvg, d.w, NULL, G ? d.dz : d.dy, NULL, k.tiles, k.qkvg, k.a, d.work,
                      B, T, C, m->HS);
    gates_backward(d.dgate, d.w, k.gate, N, C, m->config.transition);
    matmul_backward(du, g.qkvg_w, g.qkvg_b, d.dqkvg, u, p.qkvg_w, N, C, 4 * C, (int)paper);
    matmul_backward(du, g.gate_w, g.gate_b, d.dgate, u, p.gate_w, N, p.gate_w ? C : 0, m->gates, 1);
    if (!paper)
        layernorm_backward(dx, g.norm1_w, g.norm1_b, d.dr, k.x, p.norm1_w, N, C);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C, end = m->L * N * C;
    const Params p = m->params, g = m->grads;
    const Dacts d = m->dacts;
    float *dlast = p.norm_w ? d.dr : d.dx;
    matmul_backward(dlast, g.head_w, g.head_b, d.dlogits, m->acts.last, p.head_w, N, C, m->V, 0);
    if (p.norm_w) {
        memset(d.dx, 0, N * C * sizeof *d.dx);
        layernorm_backward(d.dx, g.norm_w, g.norm_b, d.dr, m->acts.x + end, p.norm_w, N, C);
    }
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &p, l), layer_params(m, &g, l), d.dx);
    embed_backward(g.wte, NULL, d.dx, m->batch.inputs, m->B, m->T, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const Dacts d = m->dacts;
    Acts k = {.x = d.dx, .r1 = d.dr, .qkvg = d.dqkvg, .gate = d.dgate, .a = d.w, .y = d.dy,
              .yn = d.dy, .z = d.dz, .mid = d.dy, .r2 = d.dr, .f = d.dh, .h = d.dh};
    if (t == 0)
        arena_fill(&m->state_arena, 0);
    embed_forward(d.dx, tokens, m->params.wte, NULL, D, 1, m->C);
    for (size_t l = 0; l < m->L; l++) {
        k.S = m->state.S + l * m->decode_B * m->C * 2 * m->HS;
        block_forward(m, k, layer_params(m, &m->params, l), d.dx, k.S, D, 1);
    }
    head_forward(m, d.dlogits, d.dr, d.dx, D);
    return d.dlogits;
}

// ------------------------------------------------------------------------------------------------
// [train] The loop: memory, batches, updates, evaluation, checkpoints.  (shared)

// model_bytes: what model_alloc will allocate, but for the batch's tokens.
static size_t model_bytes(const Model *m)
{
    return 4 * m->weights.params.bytes + m->acts_arena.bytes + m->dacts_arena.bytes +
           m->state_arena.bytes;
}

// model_alloc: allocate a planned model and draw its initial weights from the seed.
static void model_alloc(Model *m)
{
    arena_alloc(&m->acts_arena, &m->acts);
    arena_alloc(&m->dacts_arena, &m->dacts);
    arena_alloc(&m->state_arena, &m->state);
    batch_alloc(&m->batch, m->B, m->T);
    weights_alloc(&m->weights, &m->params, &m->grads, m->config.training.seed);
}

// model_free: give everything back.
static void model_free(Model *m)
{
    weights_free(&m->weights);
    arena_free(&m->acts_arena);
    arena_free(&m->dacts_arena);
    arena_free(&m->state_arena);
    batch_free(&m->batch);
}

// model_zero_grad: clear the gradients of the parameters.
static void model_zero_grad(Model *m)
{
    arena_fill(&m->weights.grads, 0);
}

// load_batch: inputs, targets = batch `number` of STREAM_TRAIN or STREAM_EVAL, of its own B and T.
static void load_batch(Model *m, uint64_t stream, long number)
{
    const Config *c = &m->config;
    task_batch(m->task, &c->task_options, c->training.seed, stream, number, &m->batch);
    m->B = m->batch.B, m->T = m->batch.T;
}

// forward_backward: gradients of update `step`, from its batches; dies when a loss is not finite.
static Update forward_backward(Model *m, long step)
{
    Update u = {0};
    const int n = m->config.training.accumulate;
    model_zero_grad(m);
    for (int i = 0; i < n; i++) {
        load_batch(m, STREAM_TRAIN, step * n + i);
        model_forward(m);
        training_stop_if_bad("loss", m->loss, step, &m->weights, &m->acts_arena);
        update_add(&u, &m->weights.grads, m->loss, task_score(m->task, &m->batch, m->B),
                   batch_targets(&m->batch));
        model_backward(m);
    }
    update_end(&u, &m->weights.grads);
    arenas_check(&m->weights.grads, &m->acts_arena, &m->dacts_arena);
    return u;
}

// train_step: update `step`; row = what is logged. Loss and accuracy are before the update.
static void train_step(Model *m, long step, LogRow *row)
{
    const Training *t = &m->config.training;
    double start = seconds_now();
    const Update u = forward_backward(m, step);
    double norm = gradient_norm(&m->weights.grads), lr = learning_rate(t, step);
    training_stop_if_bad("gradient norm", norm, step, &m->weights, &m->acts_arena);
    adamw(&m->weights, t, lr, t->grad_clip > 0 ? fmin(1, t->grad_clip / norm) : 1, step);
    *row = log_train_row(step, u.loss, u.acc, lr, norm, seconds_now() - start, u.n * m->B * m->T);
}

// evaluate: loss and accuracy on sequences never trained on, each prediction given the true past.
static LogRow evaluate(Model *m, long step)
{
    Evaluation sum = {0};
    const TaskOptions *options = &m->config.task_options;
    for (long i = 0; i < task_eval_batches(m->task, options, m->batch.rows); i++) {
        load_batch(m, STREAM_EVAL, i);
        model_forward(m);
        training_stop_if_bad("loss on fresh sequences", m->loss, step, &m->weights, &m->acts_arena);
        evaluation_add(&sum, m->task, options, &m->batch, m->loss);
    }
    return evaluation_row(&sum, step);
}

// decode: said (D,n) = the token chosen at each position when the model reads the first `given`
// tokens of inputs (D,n) and then what it said. Returns n, or how far it came when interrupted.
static size_t decode(Model *m, int *said, const int *inputs, size_t given, size_t n, size_t D,
                     Sampler sampler)
{
    int *tokens = alloc_zero(D, sizeof(int), "tokens");
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
    decode(m, m->batch.predictions, m->batch.inputs, prompt, m->T, m->decode_B, (Sampler){0});
    return *training_interrupted() ? -1 : task_score(m->task, &m->batch, m->decode_B);
}

// train: take an allocated model through its configuration until the steps are done, --stop-at is
// reached or Ctrl-C is pressed; evaluate, save and print RESULT.
static void train(Model *m, const Options *options)
{
    const Training *t = &m->config.training;
    const char *task = m->task->name, *model = model_name(&m->config);
    Log log;
    LogRow row = {0}, val = {0};
    char checkpoint[LOG_PATH];
    training_load(t, &m->weights, options, ARCHITECTURE);
    if (t->dump) {
        forward_backward(m, 0);
        dump_write(t->dump, m->batch.inputs, m->batch.targets, m->B, m->T, m->loss, &m->weights,
                   &m->acts_arena, options, ARCHITECTURE);
        if (t->steps == 0)
            return;
    }
    long step = training_start(&log, checkpoint, t, &m->weights, options, ARCHITECTURE, task,
                               model, "CPU");
    for (;; step++) {
        int last = training_over(t, &log, step);
        if (last || (t->eval_every && step && step % t->eval_every == 0)) {
            val = evaluate(m, step);
            log_eval(&log, &val);
        }
        if (log.csv && (last || (log.steps && t->save_every && step % t->save_every == 0)))
            checkpoint_save(checkpoint, &m->weights, options, ARCHITECTURE, step);
        if (last)
            break;
        train_step(m, step, &row);
        log_step(&log, &row, t->steps, (step + 1) % t->print_every == 0);
    }
    const TaskOptions *o = &m->config.task_options;
    TaskShape s = m->task->shape(o);
    double own = m->decode_B && s.prompt < m->T ? greedy(m) : -1;
    if (own >= 0)
        task_show(m->task, o, m->batch.inputs, m->batch.predictions);
    if (o->sample && !*training_interrupted())
        task_show_sample(m->task, o, decode(m, o->said, o->read, o->prompt_n, o->read_n, 1,
                                            task_sampler(o, t->seed)));
    training_result(&log, task, model, s.size_name, s.size, &val, own, log_ms_per_step(&log));
    log_close(&log);
}

// ------------------------------------------------------------------------------------------------
// [main] Options, presets, start.

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
                  "train_gateloop: GateLoop on the CPU. Without options: sums since a reset.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    training_print(model_name(&config), &model.weights, "wte", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model_alloc(&model);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
