// train_metala.c: MetaLA and gated linear attention (GLA) on the CPU.
//
// "MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (arXiv 2411.10741) and
// "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635). A head
// remembers a matrix S, keys by values. A token chooses at what rates its rows fade; MetaLA has no
// keys: a row takes in as much as it loses.   [A31 to A37]
//
//   S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(DK)
//   alpha_t = exp(g_t),  g_t = ln sigmoid(z_t) / tau,  k_t = 1 - alpha_t
//   y_t = o_t + sigmoid(a_t v_t),  a_t = sum_i q_ti w_i k_ti            the token attends to itself
//   q, z, v = W_q u, W_a u, W_v u,  p = W_gate u + b,  u = SiLU(conv(norm(x))), conv causal
//   x += W_out (SiLU(p) norm_head(y));  x += W_down (SiLU(f) e),  f, e = W_gu norm(x)
//
// norm is LayerNorm, eps 1e-8, norm_head that of each head, eps 1e-5, neither with weights. No
// positions, no dropout; the head has its own matrix. w starts at 0, where sigmoid adds 1/2 to all
// of a head and norm_head takes it away.
//
//   --key free      k = W_a u, a key of its own, z = W_2 W_1 u + b of rank 16; with --conv 0 and
//                   --augment no that is GLA, but for the weights of norm_head
//   --conv 0|2|4    W; 0: u = norm(x), no SiLU either
//   --augment no    y = o
//   --tau           16 in both papers: at z = 0 a row loses half in 16 tokens
//
// Letters: C channels (the papers' d), NH heads of DV = C / NH values and DK = K / NH keys, K key
// channels, P = K + C; H channels in the MLP; W the convolution's width; B sequences of T
// positions, N = B T, NT tiles of TILE positions; V symbols, L layers; D are decoded at once.
// Sections: [mix] gates, recurrence, reading; [block] convolution, SiLU; [layers] products, norm;
// [optimizer] AdamW; [model] tensors, forward, backward; [train] the loop; [main] start.
//
//   ./train_metala                    MQAR, 4 pairs in 64 tokens: 99.9% in 600 steps; --conv 0: 25%
//   ./train_metala --preset mqar-80   512 tokens, 80 pairs (Table A7); was not run
//
// Differences from the papers: o is divided by sqrt(DK), as in MetaLA's code (--scale no: the
// paper's); sigmoid stays in the parallel form (A38 drops it); the MLP's output is added to x (A43
// forgets it); g is at least -30 (z = -480 at tau 16), with no gradient there; out_w and down_w
// start smaller, by sqrt(2 L); sequences are fresh at every step; fp32 throughout.

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
// [mix] Gates, the recurrence, and how it is read.

#define ARCHITECTURE "metala"
enum { TIED, FREE, TILE = 16, RANK = 16 }; // positions between saved states; the gate's rank
static const float LEAST_GATE = -30, HALF = -0.7; // of g: exp(-30) = 9e-14, exp(-0.7) = 1/2

// sigmoid: 1 / (1 + exp(-x)); 0 and 1 far out.
static inline float sigmoid(float x)
{
    return 1 / (1 + exp_ps(-x));
}

// gates_forward: g (n) = max(ln sigmoid(z) / tau, -30), may alias z (n); k (n) = 1 - exp(g), NULL:
// not asked for, as -expm1(g): 2e-5 at z = 8. ln sigmoid(z) = min(z, 0) - ln(1 + exp(-|z|)).
static void gates_forward(float *g, float *k, const float *z, size_t n, float tau)
{
#pragma omp parallel for if (n > 4096)
    for (size_t i = 0; i < n; i++) {
        const float x = ((z[i] < 0 ? z[i] : 0) - log1p(exp_ps(-fabs(z[i])))) / tau;
        g[i] = x < LEAST_GATE ? LEAST_GATE : x;
        if (k)
            k[i] = -expm1(g[i]);
    }
}

// gates_backward: dz (n) = (dg - exp(g) dk) sigmoid(-z) / tau from dg, dk (n), of k = 1 - exp(g),
// NULL: there is none, and the forward's g and z; 0 where g is -30. dz may alias dg.
static void gates_backward(float *dz, const float *dg, const float *dk, const float *g,
                           const float *z, size_t n, float tau)
{
#pragma omp parallel for simd if (n > 4096)
    for (size_t i = 0; i < n; i++) {
        const float d = dg[i] - (dk ? exp_ps(g[i]) * dk[i] : 0);
        dz[i] = g[i] == LEAST_GATE ? 0 : d * sigmoid(-z[i]) / tau;
    }
}

// head_step: one token of one head: next (DK,DV) = diag(exp(g)) S + k v^T, out (DV) = scale next^T
// q; q, g, k (DK), v (DV). next may be S. exp(g) = whole + part, of which part is right to rounding
// where exp(g) near 1 is not: a long memory would lose its length.
static inline void head_step(float *out, float *next, const float *S, const float *q,
                             const float *g, const float *k, const float *v, float scale,
                             size_t DK, size_t DV)
{
    memset(out, 0, DV * sizeof *out);
    for (size_t i = 0; i < DK; i++) {
        const float whole = g[i] > HALF, part = whole > 0 ? expm1(g[i]) : exp_ps(g[i]);
        const float q_i = scale * q[i];
#pragma omp simd
        for (size_t j = 0; j < DV; j++) {
            const float S_ij = S[i * DV + j];
            next[i * DV + j] = whole * S_ij + (part * S_ij + k[i] * v[j]);
            out[j] += q_i * next[i * DV + j];
        }
    }
}

// gla_forward: o (B,T,C): of every head of NH, S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t =
// scale S_t^T q_t, C = NH DV, K = NH DK: q at 0 and v at K of qv (B,T,K+C); g, k (B,T,K). S_0 =
// initial (B,NH,DK,DV), NULL: zero; final (B,NH,DK,DV) = S_T, may alias initial; tiles
// (B,NH,NT,DK,DV) = S before every TILE-th token, NULL: not asked for.
static void gla_forward(float *o, float *tiles, float *final, const float *qv, const float *g,
                        const float *k, const float *initial, size_t B, size_t T, size_t NH,
                        size_t DK, size_t DV, float scale)
{
    const size_t K = NH * DK, C = NH * DV, size = DK * DV, NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) { // threads own heads of sequences
        const size_t b = i / NH, h = i % NH;
        float *S = final + i * size;
        initial ? memmove(S, initial + i * size, size * sizeof *S) : memset(S, 0, size * sizeof *S);
        for (size_t t = 0, bt = b * T; t < T; t++, bt++) {
            const float *q = qv + bt * (K + C) + h * DK, *v = qv + bt * (K + C) + K;
            if (tiles && t % TILE == 0)
                memcpy(tiles + (i * NT + t / TILE) * size, S, size * sizeof *S);
            head_step(o + bt * C + h * DV, S, S, q, g + bt * K + h * DK, k + bt * K + h * DK,
                      v + h * DV, scale, DK, DV);
        }
    }
}

// head_step_backward: one token of one head, S (DK,DV) before it: dq, dk (DK), dv (DV) +=, dg (DK)
// = from dout (DV) and D (DK,DV), the gradient of S_t, which becomes that of S. Once D has the
// output's part:
//   dq = scale S_t dout,  dk = D v,  dv = D^T k,  dg = alpha row sums of D S,  D <- diag(alpha) D
static inline void head_step_backward(float *dq, float *dk, float *dv, float *dg, float *D,
                                      const float *dout, const float *S, const float *q,
                                      const float *g, const float *k, const float *v, float scale,
                                      size_t DK, size_t DV)
{
    for (size_t i = 0; i < DK; i++) {
        const float whole = g[i] > HALF, part = whole > 0 ? expm1(g[i]) : exp_ps(g[i]);
        const float *S_i = S + i * DV, q_i = scale * q[i], k_i = k[i];
        float *D_i = D + i * DV, read = 0, wrote = 0, kept = 0;
#pragma omp simd reduction(+ : read, wrote, kept)
        for (size_t j = 0; j < DV; j++) {
            const float d = D_i[j] + q_i * dout[j];
            read += (whole * S_i[j] + (part * S_i[j] + k_i * v[j])) * dout[j];
            wrote += d * v[j];
            kept += d * S_i[j];
            dv[j] += k_i * d;
            D_i[j] = whole * d + part * d;
        }
        dq[i] += scale * read;
        dk[i] += wrote;
        dg[i] = exp_ps(g[i]) * kept;
    }
}

// gla_work: elements of scratch a thread needs: the states of a tile, the gradient, an output.
static size_t gla_work(size_t DK, size_t DV)
{
    return ((TILE + 1) * DK * DV + DV + 15) / 16 * 16;
}

// gla_backward: the parts of q and v of dqv (B,T,K+C) +=, dk (B,T,K) +=, dg (B,T,K) =, dinitial
// (B,NH,DK,DV) = (NULL: not asked for), from d_o (B,T,C), dfinal (B,NH,DK,DV), the gradient of
// final (NULL: 0), and the forward's tiles, qv, g, k; work (threads, gla_work) is scratch. The
// states of a tile are computed again from the one before it: nothing is divided by alpha.
static void gla_backward(float *dqv, float *dg, float *dk, float *dinitial, const float *d_o,
                         const float *dfinal, const float *tiles, const float *qv, const float *g,
                         const float *k, float *work, size_t B, size_t T, size_t NH, size_t DK,
                         size_t DV, float scale)
{
    const size_t K = NH * DK, C = NH * DV, P = K + C, size = DK * DV, bytes = size * sizeof *dg;
    const size_t NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        const size_t b = i / NH, h = i % NH;
        float *S = work + threads_index() * gla_work(DK, DV), *D = S + TILE * size;
        dfinal ? memcpy(D, dfinal + i * size, bytes) : memset(D, 0, bytes);
        for (size_t tile = NT; tile-- > 0;) {
            const size_t first = b * T + tile * TILE, n = tile + 1 < NT ? TILE : T - tile * TILE;
            memcpy(S, tiles + (i * NT + tile) * size, bytes);
            for (size_t t = 0, bt = first; t + 1 < n; t++, bt++) // S: before each of its tokens
                head_step(D + size, S + (t + 1) * size, S + t * size, qv + bt * P + h * DK,
                          g + bt * K + h * DK, k + bt * K + h * DK,
                          qv + bt * P + K + h * DV, scale, DK, DV);
            for (size_t t = n; t-- > 0;) {
                const size_t bt = first + t, at = bt * K + h * DK, q = bt * P + h * DK;
                const size_t v = bt * P + K + h * DV;
                head_step_backward(dqv + q, dk + at, dqv + v, dg + at, D, d_o + bt * C + h * DV,
                                   S + t * size, qv + q, g + at, k + at, qv + v, scale, DK, DV);
            }
        }
        if (dinitial)
            memcpy(dinitial + i * size, D, bytes);
    }
}

// read_row: y (DV) = (x - mean) rstd, x = o + sigmoid(a v) of one head, *rstd = 1 / sqrt(var +
// 1e-5), w (DK), NULL: x = o; returns a = sum_i q_i w_i k_i. sigmoid(x) - 1/2 is tanh(x/2) / 2: the
// half, which the norm takes away, would cost a small o its digits.
static inline float read_row(float *y, float *rstd, const float *o, const float *q, const float *k,
                             const float *v, const float *w, size_t DK, size_t DV)
{
    const float eps = 1e-5;
    float a = 0, mean, var;
    for (size_t i = 0; w && i < DK; i++)
        a += q[i] * w[i] * k[i];
    for (size_t j = 0; j < DV; j++)
        y[j] = o[j] + (w ? tanh(a * v[j] / 2) / 2 : 0);
    row_moments(y, DV, &mean, &var);
    *rstd = 1 / sqrt(var + eps);
    for (size_t j = 0; j < DV; j++)
        y[j] = (y[j] - mean) * *rstd;
    return a;
}

// read_forward: out (N,C) = LayerNorm, eps 1e-5, by heads of o + sigmoid(a v), a = sum_i q_i w_i
// k_i of a head, or without w of o; o (N,C), q and v in qv (N,K+C), k (N,K), w (K), NULL: none.
static void read_forward(float *out, const float *o, const float *qv, const float *k,
                         const float *w, size_t N, size_t NH, size_t DK, size_t DV)
{
    const size_t K = NH * DK, P = K + NH * DV;
    float rstd;
#pragma omp parallel for private(rstd) if (N * P > 4096)
    for (size_t i = 0; i < N * NH; i++) {
        const float *q = qv + i / NH * P + i % NH * DK, *v = qv + i / NH * P + K + i % NH * DV;
        read_row(out + i * DV, &rstd, o + i * DV, q, k + i * DK, v, w ? w + i % NH * DK : NULL, DK,
                 DV);
    }
}

// read_backward: d_o (N,C) =, the parts of q and v of dqv (N,K+C) =, dk (N,K) =, dw (K) += (NULL:
// no w) from dout (N,C) and the forward's o, qv, k, w; da (N,NH) is scratch. With y = out, r =
// sigmoid(a v), e = do r (1 - r):
//   do = rstd (dout - mean(dout) - y mean(dout y)),  da = e . v,  dv = a e
//   dq = da w k,  dk = da q w,  dw = sum over tokens of da q k, in double; threads own channels
static void read_backward(float *d_o, float *dqv, float *dk, float *dw, float *da,
                          const float *dout, const float *o, const float *qv, const float *k,
                          const float *w, size_t N, size_t NH, size_t DK, size_t DV)
{
    const size_t K = NH * DK, P = K + NH * DV;
#pragma omp parallel for if (N * P > 4096)
    for (size_t i = 0; i < N * NH; i++) {
        const size_t q = i / NH * P + i % NH * DK, v = i / NH * P + K + i % NH * DV;
        const float *w_h = w ? w + i % NH * DK : NULL, *d = dout + i * DV;
        float y[DV], rstd, sum = 0, sum_y = 0, da_i = 0;
        const float a = read_row(y, &rstd, o + i * DV, qv + q, k + i * DK, qv + v, w_h, DK, DV);
        for (size_t j = 0; j < DV; j++)
            sum += d[j] / DV, sum_y += d[j] * y[j] / DV;
        for (size_t j = 0; j < DV; j++) {
            const float do_j = rstd * (d[j] - sum - y[j] * sum_y), r = sigmoid(a * qv[v + j]);
            const float e = w ? do_j * r * (1 - r) : 0;
            d_o[i * DV + j] = do_j;
            dqv[v + j] = a * e;
            da_i += e * qv[v + j];
        }
        for (size_t c = 0; c < DK; c++) {
            dqv[q + c] = w ? da_i * w_h[c] * k[i * DK + c] : 0;
            dk[i * DK + c] = w ? da_i * w_h[c] * qv[q + c] : 0;
        }
        da[i] = da_i;
    }
#pragma omp parallel for if (N * K > 65536)
    for (size_t c = 0; c < K * (dw != NULL); c++) {
        double total = 0;
        for (size_t n = 0; n < N; n++)
            total += (double)da[n * NH + c / DK] * qv[n * P + c] * k[n * K + c];
        dw[c] += total;
    }
}

// ------------------------------------------------------------------------------------------------
// [block] What stands around the recurrence: short convolution, SiLU.

// silu_slope: the derivative of SiLU(x) = x sigmoid(x).
static inline float silu_slope(float x)
{
    const float p = sigmoid(x);
    return p + x * p * (1 - p);
}

// conv_row: row `at` of x (B,T,C) of sequence b with what stands before it (B,W-1,C), NULL: zeros,
// in front; NULL for a row of zeros.
static inline const float *conv_row(const float *x, const float *before, size_t b, size_t at,
                                    size_t T, size_t C, size_t W)
{
    if (at >= W - 1)
        return x + (b * T + at - (W - 1)) * C;
    return before ? before + (b * (W - 1) + at) * C : NULL;
}

// conv_forward: u (B,T,C) = sum_w weight[c,w] x_{t-W+1+w}[c], out (B,T,C) = SiLU(u); weight (C,W),
// x (B,T,C), and what stands before it (B,W-1,C), NULL: zeros.
static void conv_forward(float *out, float *u, const float *x, const float *before,
                         const float *weight, size_t B, size_t T, size_t C, size_t W)
{
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * T; i++) {
        float *u_i = u + i * C;
        memset(u_i, 0, C * sizeof *u);
        for (size_t w = 0; w < W; w++) {
            const float *row = conv_row(x, before, i / T, i % T + w, T, C, W);
            for (size_t c = 0; row && c < C; c++)
                u_i[c] += weight[c * W + w] * row[c];
        }
#pragma omp simd
        for (size_t c = 0; c < C; c++)
            out[i * C + c] = u_i[c] * sigmoid(u_i[c]);
    }
}

// conv_backward: dx (B,T,C) =, dweight (C,W) += from dout (B,T,C), which becomes the gradient of u,
// and the forward's u, x, before and weight; dweight is summed in double, threads own channels.
static void conv_backward(float *dx, float *dweight, float *dout, const float *u, const float *x,
                          const float *before, const float *weight, size_t B, size_t T, size_t C,
                          size_t W)
{
    enum { STRIP = 16, MOST = 4 };
#pragma omp parallel for simd if (B * T * C > 65536)
    for (size_t i = 0; i < B * T * C; i++)
        dout[i] *= silu_slope(u[i]);
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * T; i++) {
        memset(dx + i * C, 0, C * sizeof *dx);
        for (size_t ahead = 0; ahead < W && i % T + ahead < T; ahead++) // x_t is read at t + ahead
            for (size_t c = 0; c < C; c++)
                dx[i * C + c] += weight[c * W + W - 1 - ahead] * dout[(i + ahead) * C + c];
    }
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t c0 = 0; c0 < C; c0 += STRIP) {
        const size_t end = C - c0 < STRIP ? C : c0 + STRIP;
        double sum[STRIP][MOST] = {{0}};
        for (size_t i = 0; i < B * T * W; i++) {
            const size_t bt = i / W, w = i % W;
            const float *row = conv_row(x, before, bt / T, bt % T + w, T, C, W);
            for (size_t c = c0; row && c < end; c++)
                sum[c - c0][w] += (double)dout[bt * C + c] * row[c];
        }
        for (size_t i = c0 * W; i < end * W; i++)
            dweight[i] += sum[i / W - c0][i % W];
    }
}

// gated_forward: out (N,H) = SiLU(f) e; rows of f, e (N,H) are `row` apart: H where out is f.
static void gated_forward(float *out, const float *f, const float *e, size_t row, size_t N,
                          size_t H)
{
#pragma omp parallel for if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t i = 0; i < H; i++)
            out[n * H + i] = f[n * row + i] * sigmoid(f[n * row + i]) * e[n * row + i];
}

// gated_backward: df, de (N,H) = from dout (N,H) and the forward's f and e; rows of all but dout
// are `row` apart.
static void gated_backward(float *df, float *de, const float *dout, const float *f, const float *e,
                           size_t row, size_t N, size_t H)
{
#pragma omp parallel for if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t i = 0; i < H; i++) {
            const float d = dout[n * H + i], f_i = f[n * row + i], e_i = e[n * row + i];
            de[n * row + i] = d * f_i * sigmoid(f_i);
            df[n * row + i] = d * e_i * silu_slope(f_i);
        }
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
    int key, layers, heads, channels, key_channels, hidden, conv, augment, scale, task;
    double tau;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *conv_w, *qv_w, *a_w, *low_w, *up_w, *up_b, *aug_w, *gate_w, *gate_b, *out_w, *gu_w;
    float *down_w, *head_w;
} Params;

typedef struct {
    float *x, *r1, *u, *xc, *qv, *p, *low, *z, *g, *k, *o, *tiles, *S, *n, *c, *mid, *r2, *gu, *h;
    float *y, *logits, *losses;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *dxc, *dqv, *dp, *dlow, *dg, *dk, *d_o, *dn, *da, *dgu, *dh;
    float *dlogits, *work;
} Dacts;

// What a layer remembers while decoding: S of every head, and the last inputs of the convolution.
typedef struct { float *S, *window; } State;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, NH, DK, DV, K, P, H, W, L, decode_B; // K = NH DK, P = K + C
    float tau, scale; // of the gates; of what is read
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
    return c->key == FREE ? "free" : "tied";
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

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
        {"qv_w", {L, m->P, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, qv_w)},
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
    weights_plan(&m->weights, ROWS(params));
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *c)
{
    memset(m, 0, sizeof *m);
    m->config = *c, m->task = &TASKS[c->task];
    const TaskShape shape = m->task->shape(&c->task_options);
    const size_t B = m->B = (size_t)c->training.batch_size, T = m->T = shape.T, V = m->V = shape.V;
    const size_t L = m->L = (size_t)c->layers, C = m->C = (size_t)c->channels;
    const size_t K = m->K = c->key_channels ? (size_t)c->key_channels : C / 2, P = m->P = K + C;
    const size_t NH = m->NH = (size_t)c->heads, DK = m->DK = K / NH, DV = m->DV = C / NH;
    const size_t H = m->H = c->hidden ? (size_t)c->hidden : (C * 8 / 3 + 255) / 256 * 256;
    const size_t size = DK * DV, D = m->decode_B = B < 32 ? B : 32, L_free = c->key == FREE ? L : 0;
    const size_t W = m->W = 2 * (size_t)c->conv, L_conv = W ? L : 0, B_free = L_free ? B : 0;
    m->tau = c->tau, m->scale = c->scale ? 1 / sqrt((double)DK) : 1;
    const Tensor acts[] = { // x[0] is the embedding; tiles: for any B, T of as many tokens
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r1", Acts, r1, L, B, T, C),
        ACTIVATION("u", Acts, u, L_conv, B, T, C), ACTIVATION("xc", Acts, xc, L_conv, B, T, C),
        ACTIVATION("qv", Acts, qv, L, B, T, P), ACTIVATION("p", Acts, p, L, B, T, C),
        ACTIVATION("low", Acts, low, L_free, B, T, RANK), ACTIVATION("z", Acts, z, L, B, T, K),
        ACTIVATION("g", Acts, g, L, B, T, K), ACTIVATION("k", Acts, k, L, B, T, K),
        ACTIVATION("o", Acts, o, L, B, T, C), ACTIVATION("n", Acts, n, L, B, T, C),
        ACTIVATION("tiles", Acts, tiles, L, B * T / TILE + B, NH, size),
        ACTIVATION("S", Acts, S, L, B, NH, size), ACTIVATION("y", Acts, y, B, T, C),
        ACTIVATION("c", Acts, c, L, B, T, C), ACTIVATION("mid", Acts, mid, L, B, T, C),
        ACTIVATION("r2", Acts, r2, L, B, T, C), ACTIVATION("gu", Acts, gu, L, B, T, 2 * H),
        ACTIVATION("h", Acts, h, L, B, T, H), ACTIVATION("logits", Acts, logits, B, T, V),
        ACTIVATION("losses", Acts, losses, B, T),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("dxc", Dacts, dxc, B, T, C), ACTIVATION("dqv", Dacts, dqv, B, T, P),
        ACTIVATION("dp", Dacts, dp, B, T, C), ACTIVATION("dg", Dacts, dg, B, T, K),
        ACTIVATION("dlow", Dacts, dlow, B_free, T, RANK), ACTIVATION("dk", Dacts, dk, B, T, K),
        ACTIVATION("do", Dacts, d_o, B, T, C), ACTIVATION("dn", Dacts, dn, B, T, C),
        ACTIVATION("da", Dacts, da, B, T, NH), ACTIVATION("dgu", Dacts, dgu, B, T, 2 * H),
        ACTIVATION("dh", Dacts, dh, B, T, H), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, threads_count(), gla_work(DK, DV)),
    };
    const Tensor state[] = {
        ACTIVATION("S", State, S, L, D, NH, size),
        ACTIVATION("window", State, window, L_conv, D, W - 1, C),
    };
    params_plan(m);
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
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
static float *from(float *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, K = n * m->K, H = n * m->H;
    const size_t size = m->K * m->DV, tiles = l * (m->B * m->T / TILE + m->B);
    const Acts *a = &m->acts;
    return (Acts){.x = a->x + C, .r1 = a->r1 + C, .u = from(a->u, C),
                  .xc = (m->W ? a->xc : a->r1) + C, .qv = a->qv + n * m->P, .p = a->p + C,
                  .low = from(a->low, n * RANK), .z = a->z + K, .g = a->g + K, .k = a->k + K,
                  .o = a->o + C, .tiles = a->tiles + tiles * size, .S = a->S + l * m->B * size,
                  .n = a->n + C, .c = a->c + C, .mid = a->mid + C, .r2 = a->r2 + C,
                  .gu = a->gu + 2 * H, .h = a->h + H};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, w = C * m->C, K = l * m->K;
    return (Params){.conv_w = from(p->conv_w, C * m->W), .qv_w = p->qv_w + C * m->P,
                    .a_w = p->a_w + C * m->K, .low_w = from(p->low_w, C * RANK),
                    .up_w = from(p->up_w, K * RANK), .up_b = from(p->up_b, K),
                    .aug_w = from(p->aug_w, K), .gate_w = p->gate_w + w, .gate_b = p->gate_b + C,
                    .out_w = p->out_w + w, .gu_w = p->gu_w + 2 * C * m->H,
                    .down_w = p->down_w + C * m->H};
}

// block_forward: next (B,T,C), may be k.x, = the block of k.x; fills k. While decoding T = 1, and
// initial = k.S and window (B,W-1,C) take the token in; in training both are NULL.
static void block_forward(const Model *m, Acts k, Params p, float *next, const float *initial,
                          float *window, size_t B, size_t T)
{
    const size_t N = B * T, C = m->C, K = m->K, P = m->P, H = m->H;
    normalize_forward(k.r1, k.x, N, C);
    if (p.conv_w)
        conv_forward(k.xc, k.u, k.r1, window, p.conv_w, B, T, C, m->W);
    for (size_t b = 0, past = (m->W - 1) * C; window && b < B; b++, window += past) {
        memmove(window, window + C, (past - C) * sizeof *window); // the oldest goes
        memcpy(window + past - C, k.r1 + b * C, C * sizeof *window);
    }
    matmul_forward(k.qv, k.xc, p.qv_w, NULL, N, C, P, 0);
    matmul_forward(k.p, k.xc, p.gate_w, p.gate_b, N, C, C, 0);
    matmul_forward(p.low_w ? k.k : k.z, k.xc, p.a_w, NULL, N, C, K, 0);
    if (p.low_w) {
        matmul_forward(k.low, k.xc, p.low_w, NULL, N, C, RANK, 0);
        matmul_forward(k.z, k.low, p.up_w, p.up_b, N, RANK, K, 0);
    }
    gates_forward(k.g, p.low_w ? NULL : k.k, k.z, N * K, m->tau);
    gla_forward(k.o, k.tiles, k.S, k.qv, k.g, k.k, initial, B, T, m->NH, m->DK, m->DV, m->scale);
    read_forward(k.n, k.o, k.qv, k.k, p.aug_w, N, m->NH, m->DK, m->DV);
    gated_forward(k.c, k.p, k.n, C, N, C);
    memmove(k.mid, k.x, N * C * sizeof *next);
    matmul_forward(k.mid, k.c, p.out_w, NULL, N, C, C, 1);
    normalize_forward(k.r2, k.mid, N, C);
    matmul_forward(k.gu, k.r2, p.gu_w, NULL, N, C, 2 * H, 0);
    gated_forward(k.h, k.gu, k.gu + H, 2 * H, N, H);
    memmove(next, k.mid, N * C * sizeof *next);
    matmul_forward(next, k.h, p.down_w, NULL, N, H, C, 1);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, N = B * T;
    const Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    embed_forward(acts.x, m->batch.inputs, m->params.wte, NULL, B, T, C);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l), acts.x + (l + 1) * N * C,
                      NULL, NULL, B, T);
    normalize_forward(acts.y, acts.x + m->L * N * C, N, C);
    matmul_forward(acts.logits, acts.y, m->params.head_w, NULL, N, C, m->V, 0);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, float *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, K = m->K, P = m->P, H = m->H;
    const Dacts d = m->dacts;
    matmul_backward(d.dh, g.down_w, NULL, dx, k.h, p.down_w, N, H, C, 0);
    gated_backward(d.dgu, d.dgu + H, d.dh, k.gu, k.gu + H, 2 * H, N, H);
    matmul_backward(d.dr, g.gu_w, NULL, d.dgu, k.r2, p.gu_w, N, C, 2 * H, 0);
    normalize_backward(dx, d.dr, k.mid, N, C);
    matmul_backward(d.dxc, g.out_w, NULL, dx, k.c, p.out_w, N, C, C, 0);
    gated_backward(d.dp, d.dn, d.dxc, k.p, k.n, C, N, C);
    read_backward(d.d_o, d.dqv, d.dk, g.aug_w, d.da, d.dn, k.o, k.qv, k.k, p.aug_w, N, m->NH,
                  m->DK, m->DV);
    gla_backward(d.dqv, d.dg, d.dk, NULL, d.d_o, NULL, k.tiles, k.qv, k.g, k.k, d.work, B, T,
                 m->NH, m->DK, m->DV, m->scale);
    gates_backward(d.dg, d.dg, p.low_w ? NULL : d.dk, k.g, k.z, N * K, m->tau);
    matmul_backward(d.dxc, g.qv_w, NULL, d.dqv, k.xc, p.qv_w, N, C, P, 0);
    matmul_backward(d.dxc, g.a_w, NULL, p.low_w ? d.dk : d.dg, k.xc, p.a_w, N, C, K, 1);
    matmul_backward(d.dxc, g.gate_w, g.gate_b, d.dp, k.xc, p.gate_w, N, C, C, 1);
    if (p.low_w) {
        matmul_backward(d.dlow, g.up_w, g.up_b, d.dg, k.low, p.up_w, N, RANK, K, 0);
        matmul_backward(d.dxc, g.low_w, NULL, d.dlow, k.xc, p.low_w, N, C, RANK, 1);
    }
    if (p.conv_w)
        conv_backward(d.dr, g.conv_w, d.dxc, k.u, k.r1, NULL, p.conv_w, B, T, C, m->W);
    normalize_backward(dx, p.conv_w ? d.dr : d.dxc, k.x, N, C);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Dacts d = m->dacts;
    matmul_backward(d.dr, m->grads.head_w, NULL, d.dlogits, m->acts.y, m->params.head_w, N, C, m->V,
                    0);
    memset(d.dx, 0, N * C * sizeof *d.dx);
    normalize_backward(d.dx, d.dr, m->acts.x + m->L * N * C, N, C);
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &m->params, l),
                       layer_params(m, &m->grads, l), d.dx);
    embed_backward(m->grads.wte, NULL, d.dx, m->batch.inputs, m->B, m->T, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C;
    const Dacts d = m->dacts;
    Acts k = {.x = d.dx, .r1 = d.dr, .u = d.dn, .xc = m->W ? d.dxc : d.dr, .qv = d.dqv, .p = d.dp,
              .low = d.dlow, .z = d.dg, .g = d.dg, .k = d.dk, .o = d.d_o, .n = d.dn, .c = d.dp,
              .mid = d.d_o, .r2 = d.dr, .gu = d.dgu, .h = d.dh};
    if (t == 0)
        arena_fill(&m->state_arena, 0);
    embed_forward(d.dx, tokens, m->params.wte, NULL, D, 1, C);
    for (size_t l = 0; l < m->L; l++) {
        k.S = m->state.S + l * m->decode_B * m->K * m->DV;
        block_forward(m, k, layer_params(m, &m->params, l), d.dx, k.S,
                      from(m->state.window, l * m->decode_B * (m->W - 1) * C), D, 1);
    }
    normalize_forward(d.dr, d.dx, D, C);
    matmul_forward(d.dlogits, d.dr, m->params.head_w, NULL, D, C, m->V, 0);
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
                  "train_metala: MetaLA and GLA on the CPU. Without options: a small MQAR.",
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
