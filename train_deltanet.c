// train_deltanet.c: DeltaNet on the CPU, with eigenvalues in [0,1] or [-1,1].
//
// "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484)
// and "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537).
// A head's memory is a matrix S that maps keys to values. A step reads what S has for its key and
// moves it towards its value by a fraction beta: the delta rule, where linear attention only adds.
//
//   e_t = v_t - S_{t-1} k_t                    what S gets wrong
//   S_t = S_{t-1} + beta_t e_t k_t^T  =  S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
//   o_t = S_t q_t / sqrt(HS)
//
// With |k| = 1 the matrix I - beta k k^T has the eigenvalue 1 - beta once, 1 otherwise. With
// --eigenvalues nonneg, beta = sigmoid(b), none is negative, and no such model finds the parity of
// long strings in finite precision (Theorem 1 of 2411.12537). With signed, beta = 2 sigmoid(b):
// beta near 2 reflects, and a step of parity, or a swap of two of five points, is a reflection.
//
//   q, k, v = SiLU(conv(W_qkv r)),  conv causal, 4 positions, each channel for itself
//   q, k    = q / sqrt(|q|^2 + 1e-6), the same for k;  b = W_b r, a number for each head
//   x += W_proj norm_head(o);  x += W_down (SiLU(g) y),  g, y = W_gu norm(x)     r = norm(x)
// norm is RMSNorm, eps 1e-6; norm_head that of each head, of one weight (HS). No biases, positions
// or dropout; the head has its own matrix. --conv no (the runs on S5): SiLU on v only.
//
// Letters: C channels (the papers' d), NH heads of HS = C / NH; H channels in the MLP; B sequences
// of T positions, N = B T; V symbols, L layers; u = beta e; D sequences are decoded at once.
// Sections: [mix] the recurrence; [block] convolution, norms, SiLU; [layers] matrix product, ...;
// [optimizer] AdamW; [model] tensors, forward, backward, decoding; [train] the loop; [main] start.
//
// On two CPU cores (--preset parity, modular, s5-swaps ...: the papers' sizes, for the GPU):
//   ./train_deltanet                        parity at lengths 3 to 24, evaluated from 25 to 80
//   ./train_deltanet --eigenvalues nonneg   the same, which stays at chance there
//
// Differences from the papers: sequences are fresh at every step, where the runs on S5 had a fixed
// set, and 1000 of them are evaluated there; warm-up starts at lr/warmup, not 0; fp32 throughout.

#include "data/tasks.h" // and with it check, log, options, rng, tensors, threads, training
#include <tgmath.h>
#ifdef REAL_IS_DOUBLE // the tests build this file a second time in double precision
#define float double
#endif
#pragma GCC diagnostic ignored "-Wunused-function" // [layers] has more than this model needs

// From [layers]:
static inline float exp_ps(float x);

// ------------------------------------------------------------------------------------------------
// [mix] The delta rule: a matrix S for each head, one token at a time.

#define ARCHITECTURE "deltanet"
enum { NONNEG, SIGNED }; // the largest beta is 1, 2

// beta_forward: beta (n) = range sigmoid(b), b (n); range 1: eigenvalues 1 - beta in (0,1), range
// 2: in (-1,1). Far out beta is 0 or range.
static void beta_forward(float *beta, const float *b, size_t n, float range)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++)
        beta[i] = range / (1 + exp_ps(-b[i]));
}

// beta_backward: db (n) = dbeta (n) beta (1 - beta / range). db may alias dbeta.
static void beta_backward(float *db, const float *dbeta, const float *beta, size_t n, float range)
{
    for (size_t i = 0; i < n; i++)
        db[i] = dbeta[i] * beta[i] * (1 - beta[i] / range);
}

// along: x . y of one head, x, y (HS).
static inline float along(const float *x, const float *y, size_t HS)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < HS; j++)
        sum += x[j] * y[j];
    return sum;
}

// delta_step: one token of one head: out (HS) = S q / sqrt(HS) after S (HS,HS), values by keys, has
// become S + u k^T, u (HS) = beta (v - S k).
static inline void delta_step(float *out, float *u, float *S, const float *q, const float *k,
                              const float *v, float beta, float scale, size_t HS)
{
    for (size_t i = 0; i < HS; i++) {
        float *S_i = S + i * HS;
        const float u_i = beta * (v[i] - along(S_i, k, HS));
#pragma omp simd
        for (size_t j = 0; j < HS; j++)
            S_i[j] += u_i * k[j];
        out[i] = scale * along(S_i, q, HS);
        u[i] = u_i;
    }
}

// delta_forward: out (B,T,C) = the delta rule of qkv (B,T,3C): q at 0, k at C, v at 2C, and head h
// of NH at h HS in each, HS = C / NH; beta (B,T,NH), eigenvalues 1 - beta |k|^2:
//   u_t = beta_t (v_t - S_{t-1} k_t),  S_t = S_{t-1} + u_t k_t^T,  out_t = S_t q_t / sqrt(HS)
// S_0 = initial (B,NH,HS,HS), values by keys, NULL: zero; final (B,NH,HS,HS) = S_T, may alias
// initial; u (B,T,C) = is kept for the backward pass. out may alias u.
static void delta_forward(float *out, float *u, float *final, const float *qkv, const float *beta,
                          const float *initial, size_t B, size_t T, size_t C, size_t NH)
{
    const size_t HS = C / NH, size = HS * HS;
    const float scale = 1 / sqrt((double)HS);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) { // threads own heads of sequences
        const size_t b = i / NH, h = i % NH;
        float *S = final + i * size;
        for (size_t j = 0; j < size; j++)
            S[j] = initial ? initial[i * size + j] : 0;
        for (size_t t = 0; t < T; t++) {
            const size_t at = (b * T + t) * C + h * HS;
            const float *q = qkv + (b * T + t) * 3 * C + h * HS;
            delta_step(out + at, u + at, S, q, q + C, q + 2 * C, beta[(b * T + t) * NH + h], scale,
                       HS);
        }
    }
}

// delta_step_backward: dq, dk, dv (HS) = and returns dbeta, from dout (HS) and the gradient G
// (HS,HS) of S_t, which becomes that of S_{t-1}; S becomes S_{t-1} = S_t - u k^T: beta may be 0 or
// 1, nothing is inverted. With du = G k once G has the output's part:
//   dq = S_t^T dout / sqrt(HS),  dv = beta du,  dbeta = du . e,  dk = G^T u - S_{t-1}^T dv
static inline float delta_step_backward(float *dq, float *dk, float *dv, float *G, float *S,
                                        const float *dout, const float *u, const float *q,
                                        const float *k, const float *v, float beta, float scale,
                                        size_t HS)
{
    double dbeta = 0;
    for (size_t j = 0; j < HS; j++)
        dq[j] = dk[j] = 0;
    for (size_t i = 0; i < HS; i++) {
        float *S_i = S + i * HS, *G_i = G + i * HS, d = scale * dout[i];
#pragma omp simd
        for (size_t j = 0; j < HS; j++) {
            dq[j] += d * S_i[j];
            G_i[j] += d * q[j];
            S_i[j] -= u[i] * k[j];
        }
        const float du = along(G_i, k, HS);
        dbeta += (double)du * (v[i] - along(S_i, k, HS));
        dv[i] = beta * du;
#pragma omp simd
        for (size_t j = 0; j < HS; j++) {
            dk[j] += u[i] * G_i[j] - dv[i] * S_i[j];
            G_i[j] -= dv[i] * k[j];
        }
    }
    return dbeta;
}

// delta_work: elements of scratch a thread needs: S and its gradient.
static size_t delta_work(size_t HS)
{
    return (2 * HS * HS + 15) / 16 * 16;
}

// delta_backward: dqkv (B,T,3C) =, dbeta (B,T,NH) =, dinitial (B,NH,HS,HS) = (NULL: not asked for),
// from dout (B,T,C), dfinal (B,NH,HS,HS), the gradient of S_T (NULL: zero), and the forward's u,
// final, qkv, beta; work (threads, delta_work) is scratch. Walks from S_T back to S_0.
static void delta_backward(float *dqkv, float *dbeta, float *dinitial, const float *dout,
                           const float *dfinal, const float *u, const float *final,
                           const float *qkv, const float *beta, float *work, size_t B, size_t T,
                           size_t C, size_t NH)
{
    const size_t HS = C / NH, size = HS * HS;
    const float scale = 1 / sqrt((double)HS);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        const size_t b = i / NH, h = i % NH;
        float *S = work + threads_index() * delta_work(HS), *G = S + size;
        for (size_t j = 0; j < size; j++) {
            S[j] = final[i * size + j];
            G[j] = dfinal ? dfinal[i * size + j] : 0;
        }
        for (size_t t = T; t-- > 0;) {
            const size_t at = (b * T + t) * C + h * HS;
            const float *q = qkv + at + 2 * (b * T + t) * C;
            float *dq = dqkv + (q - qkv);
            dbeta[(b * T + t) * NH + h] = delta_step_backward(
                dq, dq + C, dq + 2 * C, G, S, dout + at, u + at, q, q + C, q + 2 * C,
                beta[(b * T + t) * NH + h], scale, HS);
        }
        for (size_t j = 0; dinitial && j < size; j++)
            dinitial[i * size + j] = G[j];
    }
}

// ------------------------------------------------------------------------------------------------
// [block] What stands around the recurrence: short convolution, SiLU, norms, SwiGLU.

enum { WINDOW = 4 }; // positions the convolution sees

// conv_row: the row of x (B,T,C) `past` positions before row i, of what stands `before` (B,3,C) a
// sequence, or NULL: zeros.
static inline const float *conv_row(const float *x, const float *before, size_t i, size_t past,
                                    size_t T, size_t C)
{
    const size_t t = i % T;
    return t >= past ? x + (i - past) * C
           : before  ? before + (i / T * (WINDOW - 1) + WINDOW - 1 + t - past) * C
                     : NULL;
}

// conv_forward: out (B,T,C) = sum_w weight[c,w] x_{t-3+w}[c], weight (C,4); x (B,T,C), and what
// stands before it (B,3,C), NULL: zeros.
static void conv_forward(float *out, const float *x, const float *before, const float *weight,
                         size_t B, size_t T, size_t C)
{
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * T; i++) {
        memset(out + i * C, 0, C * sizeof *out);
        for (size_t w = 0; w < WINDOW; w++) {
            const float *row = conv_row(x, before, i, WINDOW - 1 - w, T, C);
            for (size_t c = 0; row && c < C; c++)
                out[i * C + c] += weight[c * WINDOW + w] * row[c];
        }
    }
}

// conv_backward: dx (B,T,C) =, dbefore (B,3,C) = (NULL: not asked for), dweight (C,4) += from dout
// (B,T,C) and the forward's x, before and weight. Sums over B and T are in double; threads own
// channels there.
static void conv_backward(float *dx, float *dbefore, float *dweight, const float *dout,
                          const float *x, const float *before, const float *weight, size_t B,
                          size_t T, size_t C)
{
    enum { STRIP = 16 };
    const size_t rows = T + (dbefore ? WINDOW - 1 : 0);
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * rows; i++) { // row t + 3 of x with `before` in front of it
        const size_t b = i / rows, at = i % rows + WINDOW - 1 - (rows - T);
        float *d = at < WINDOW - 1 ? dbefore + (b * (WINDOW - 1) + at) * C
                                   : dx + (b * T + at - (WINDOW - 1)) * C;
        memset(d, 0, C * sizeof *d);
        for (size_t w = 0; w < WINDOW; w++) // out_t reads row t + w
            if (at >= w && at - w < T)
                for (size_t c = 0; c < C; c++)
                    d[c] += weight[c * WINDOW + w] * dout[(b * T + at - w) * C + c];
    }
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t c0 = 0; c0 < C; c0 += STRIP) {
        double sum[WINDOW][STRIP] = {{0}};
        const size_t strip = C - c0 < STRIP ? C - c0 : STRIP;
        for (size_t i = 0; i < B * T; i++)
            for (size_t w = 0; w < WINDOW; w++) {
                const float *row = conv_row(x, before, i, WINDOW - 1 - w, T, C);
                for (size_t c = 0; row && c < strip; c++)
                    sum[w][c] += dout[i * C + c0 + c] * row[c0 + c];
            }
        for (size_t c = 0; c < strip; c++)
            for (size_t w = 0; w < WINDOW; w++)
                dweight[(c0 + c) * WINDOW + w] += sum[w][c];
    }
}

// silu: x sigmoid(x); *slope = its derivative.
static inline float silu(float x, float *slope)
{
    const float p = 1 / (1 + exp_ps(-x));
    *slope = p * (1 + x * (1 - p));
    return x * p;
}

// over_norm: 1 / sqrt(mean or sum of squares of x (n) + 1e-6), summed in double; `divide`: n or 1.
static float over_norm(const float *x, size_t n, double divide)
{
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (size_t i = 0; i < n; i++)
        squares += (double)x[i] * x[i];
    return 1 / sqrt(squares / divide + 1e-6);
}

// activate_forward: out (N,3C) = from x (N,3C), q, k and v side by side: SiLU, and each head of q
// and k divided by sqrt(|.|^2 + 1e-6): a zero key stays zero. SiLU starts at channel `first`.
static void activate_forward(float *out, const float *x, size_t N, size_t C, size_t NH,
                             size_t first)
{
    const size_t HS = C / NH;
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        float slope, *y = out + n * 3 * C;
        memcpy(y, x + n * 3 * C, first * sizeof *y);
#pragma omp simd private(slope)
        for (size_t c = first; c < 3 * C; c++)
            y[c] = silu(x[n * 3 * C + c], &slope);
        for (size_t h = 0; h < 2 * NH; h++) {
            const float r = over_norm(y + h * HS, HS, 1);
            for (size_t j = 0; j < HS; j++)
                y[h * HS + j] *= r;
        }
    }
}

// activate_backward: dx (N,3C) = from dout (N,3C) and the forward's x. With y = r SiLU(x), r the
// factor of a head: dSiLU = r (dout - y (y . dout)). dx may alias dout.
static void activate_backward(float *dx, const float *dout, const float *x, size_t N, size_t C,
                              size_t NH, size_t first)
{
    const size_t HS = C / NH;
#pragma omp parallel for if (N * C > 65536)
    for (size_t i = 0; i < N * 3 * NH; i++) { // heads of q, of k and of v
        const size_t at = i / (3 * NH) * 3 * C + i % (3 * NH) * HS, c = i % (3 * NH) * HS;
        float a[HS], slope[HS], r = 1, sum = 0;
        for (size_t j = 0; j < HS; j++) {
            const float y = silu(x[at + j], &slope[j]);
            a[j] = c < first ? x[at + j] : y;
            slope[j] = c < first ? 1 : slope[j];
        }
        if (c < 2 * C)
            r = over_norm(a, HS, 1), sum = r * r * along(a, dout + at, HS);
        for (size_t j = 0; j < HS; j++)
            dx[at + j] = r * (dout[at + j] - a[j] * sum) * slope[j];
    }
}

// rmsnorm_forward: out (N,C) = weight x / sqrt(mean(x^2) + 1e-6), rows of x (N,C), weight (C).
static void rmsnorm_forward(float *out, const float *x, const float *weight, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        const float r = over_norm(x + n * C, C, (double)C);
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = x[n * C + c] * r * weight[c];
    }
}

// rmsnorm_backward: dx (N,C) +=, dweight (C) += from dout (N,C), which it overwrites, and the
// forward's x and weight. With r the row's factor and d = dout weight:
//   dx = r (d - x r^2 mean(d x)),  dweight = sum_n dout x r, in double; threads own channels there
static void rmsnorm_backward(float *dx, float *dweight, float *dout, const float *x,
                             const float *weight, size_t N, size_t C)
{
    enum { STRIP = 16 };
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        const float *x_n = x + n * C, r = over_norm(x_n, C, (double)C);
        float *dout_n = dout + n * C, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++)
            sum += dout_n[c] * weight[c] * x_n[c] * r;
        sum /= C;
        for (size_t c = 0; c < C; c++) {
            dx[n * C + c] += r * (dout_n[c] * weight[c] - x_n[c] * r * sum);
            dout_n[c] *= x_n[c] * r;
        }
    }
#pragma omp parallel for if (N * C > 65536)
    for (size_t c0 = 0; c0 < C; c0 += STRIP) {
        const size_t end = C - c0 < STRIP ? C : c0 + STRIP;
        double total[STRIP] = {0};
        for (size_t n = 0; n < N; n++)
            for (size_t c = c0; c < end; c++)
                total[c - c0] += dout[n * C + c];
        for (size_t c = c0; c < end; c++)
            dweight[c] += total[c - c0];
    }
}

// swiglu_forward: out (N,H) = SiLU(g) y, g and y the halves of a row of gu (N,2H).
static void swiglu_forward(float *out, const float *gu, size_t N, size_t H)
{
    float slope;
#pragma omp parallel for private(slope) if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd private(slope)
        for (size_t i = 0; i < H; i++)
            out[n * H + i] = silu(gu[n * 2 * H + i], &slope) * gu[n * 2 * H + H + i];
}

// swiglu_backward: dgu (N,2H) = from dout (N,H) and the forward's gu.
static void swiglu_backward(float *dgu, const float *dout, const float *gu, size_t N, size_t H)
{
#pragma omp parallel for if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t i = 0; i < H; i++) {
            const float *g = gu + n * 2 * H, d = dout[n * H + i];
            float slope;
            dgu[n * 2 * H + H + i] = d * silu(g[i], &slope);
            dgu[n * 2 * H + i] = d * g[H + i] * slope;
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
    int eigenvalues, layers, heads, channels, hidden, conv, qk_silu, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *norm1_w, *qkv_w, *beta_w, *conv_w, *norm_o_w, *proj_w, *norm2_w, *gu_w, *down_w;
    float *norm_w, *head_w;
} Params;

typedef struct {
    float *x, *r1, *p, *b, *conv, *qkv, *beta, *u, *S, *o, *z, *mid, *r2, *gu, *h;
    float *y, *logits, *losses;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *dqkv, *dp, *db, *d_o, *dz, *dgu, *dh, *dlogits, *work;
} Dacts;

// What a layer remembers while decoding: S of every head, and the last inputs of the convolution.
typedef struct {
    float *S, *window;
} State;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, NH, H, L, decode_B, silu_from; // the channel of q, k, v SiLU starts at
    float range; // the largest beta
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
    return c->eigenvalues == SIGNED ? "signed" : "nonneg";
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

// hidden_size: of the MLP: --hidden, or 8/3 of the channels rounded up to a multiple of 256.
static size_t hidden_size(const Config *c)
{
    return c->hidden ? (size_t)c->hidden : ((size_t)c->channels * 8 / 3 + 255) / 256 * 256;
}

// params_plan: the table of parameters; all decay, as the authors' do. Xavier's uniform numbers
// have the gain 2^-2.5. A tensor whose first dimension is 0 does not exist.
static void params_plan(Model *m)
{
    const size_t L = m->L, C = m->C, V = m->V, NH = m->NH, H = m->H, conv = m->config.conv ? L : 0;
    const double std = 0.02, out_std = 0.02 / sqrt(2 * (double)L);
    const double gain = pow(2, -2.5), square = gain * sqrt(3 / (double)C);
    const double flat = gain * sqrt(6 / (double)(C + NH));
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, wte)},
        {"norm1_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm1_w)},
        {"qkv_w", {L, 3 * C, C}, INIT_UNIFORM(square), DECAY, 1, offsetof(Params, qkv_w)},
        {"beta_w", {L, NH, C}, INIT_UNIFORM(flat), DECAY, 1, offsetof(Params, beta_w)},
        {"conv_w", {conv, 3 * C, WINDOW}, INIT_UNIFORM(0.5), DECAY, 1, offsetof(Params, conv_w)},
        {"norm_o_w", {L, C / NH}, INIT_ONE, DECAY, 1, offsetof(Params, norm_o_w)},
        {"proj_w", {L, C, C}, INIT_UNIFORM(square), DECAY, 1, offsetof(Params, proj_w)},
        {"norm2_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm2_w)},
        {"gu_w", {L, 2 * H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, gu_w)},
        {"down_w", {L, C, H}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, down_w)},
        {"norm_w", {C}, INIT_ONE, DECAY, 1, offsetof(Params, norm_w)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
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
    const size_t NH = m->NH = (size_t)config->heads, HS = C / NH, H = m->H = hidden_size(config);
    const size_t D = m->decode_B = B < 32 ? B : 32, L_conv = config->conv ? L : 0;
    m->silu_from = config->conv || config->qk_silu ? 0 : 2 * C, m->range = 1 + config->eigenvalues;
    const Tensor acts[] = { // x[0] is the embedding; p: before the convolution; qkv: normalized
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r1", Acts, r1, L, B, T, C),
        ACTIVATION("p", Acts, p, L, B, T, 3 * C), ACTIVATION("b", Acts, b, L, B, T, NH),
        ACTIVATION("conv", Acts, conv, L_conv, B, T, 3 * C),
        ACTIVATION("qkv", Acts, qkv, L, B, T, 3 * C), ACTIVATION("beta", Acts, beta, L, B, T, NH),
        ACTIVATION("u", Acts, u, L, B, T, C), ACTIVATION("S", Acts, S, L, B, NH, HS * HS),
        ACTIVATION("o", Acts, o, L, B, T, C), ACTIVATION("z", Acts, z, L, B, T, C),
        ACTIVATION("mid", Acts, mid, L, B, T, C), ACTIVATION("r2", Acts, r2, L, B, T, C),
        ACTIVATION("gu", Acts, gu, L, B, T, 2 * H), ACTIVATION("h", Acts, h, L, B, T, H),
        ACTIVATION("y", Acts, y, B, T, C), ACTIVATION("logits", Acts, logits, B, T, V),
        ACTIVATION("losses", Acts, losses, B, T),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("dqkv", Dacts, dqkv, B, T, 3 * C), ACTIVATION("dp", Dacts, dp, B, T, 3 * C),
        ACTIVATION("db", Dacts, db, B, T, NH), ACTIVATION("do", Dacts, d_o, B, T, C),
        ACTIVATION("dz", Dacts, dz, B, T, C), ACTIVATION("dgu", Dacts, dgu, B, T, 2 * H),
        ACTIVATION("dh", Dacts, dh, B, T, H), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, threads_count(), delta_work(HS)),
    };
    const Tensor state[] = {
        ACTIVATION("S", State, S, L, D, NH, HS * HS),
        ACTIVATION("window", State, window, L_conv, D, WINDOW - 1, 3 * C),
    };
    params_plan(m);
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 22 HS a channel and layer in the recurrence, 6 of them forward.
static double model_flops(const Model *m)
{
    const double weights = (double)arena_elements(&m->weights.params, "wte");
    return (double)m->config.training.accumulate * (double)(m->B * m->T) *
           (6 * weights + 22 * (double)(m->L * m->C * (m->C / m->NH)));
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, NH = n * m->NH, H = n * m->H;
    const Acts *a = &m->acts;
    return (Acts){.x = a->x + C, .r1 = a->r1 + C, .p = a->p + 3 * C, .b = a->b + NH,
                  .conv = (m->config.conv ? a->conv : a->p) + 3 * C, .qkv = a->qkv + 3 * C,
                  .beta = a->beta + NH, .u = a->u + C,
                  .S = a->S + l * m->B * m->C * (m->C / m->NH), .o = a->o + C, .z = a->z + C,
                  .mid = a->mid + C, .r2 = a->r2 + C, .gu = a->gu + 2 * H, .h = a->h + H};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, w = C * m->C, H = C * m->H, HS = m->C / m->NH;
    return (Params){.norm1_w = p->norm1_w + C, .qkv_w = p->qkv_w + 3 * w,
                    .beta_w = p->beta_w + C * m->NH,
                    .conv_w = m->config.conv ? p->conv_w + 3 * C * WINDOW : NULL,
                    .norm_o_w = p->norm_o_w + l * HS, .proj_w = p->proj_w + w,
                    .norm2_w = p->norm2_w + C, .gu_w = p->gu_w + 2 * H, .down_w = p->down_w + H};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, H = m->H, L = m->L, N = B * T;
    const Params all = m->params;
    const Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    embed_forward(acts.x, m->batch.inputs, all.wte, NULL, B, T, C);
    for (size_t l = 0; l < L; l++) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(m, &m->params, l);
        float *next = k.x + N * C; // x of the layer after
        rmsnorm_forward(k.r1, k.x, p.norm1_w, N, C);
        matmul_forward(k.p, k.r1, p.qkv_w, NULL, N, C, 3 * C, 0);
        matmul_forward(k.b, k.r1, p.beta_w, NULL, N, C, NH, 0);
        if (p.conv_w)
            conv_forward(k.conv, k.p, NULL, p.conv_w, B, T, 3 * C);
        activate_forward(k.qkv, k.conv, N, C, NH, m->silu_from);
        beta_forward(k.beta, k.b, N * NH, m->range);
        delta_forward(k.o, k.u, k.S, k.qkv, k.beta, NULL, B, T, C, NH);
        rmsnorm_forward(k.z, k.o, p.norm_o_w, N * NH, C / NH);
        memcpy(k.mid, k.x, N * C * sizeof(float));
        matmul_forward(k.mid, k.z, p.proj_w, NULL, N, C, C, 1);
        rmsnorm_forward(k.r2, k.mid, p.norm2_w, N, C);
        matmul_forward(k.gu, k.r2, p.gu_w, NULL, N, C, 2 * H, 0);
        swiglu_forward(k.h, k.gu, N, H);
        memcpy(next, k.mid, N * C * sizeof(float));
        matmul_forward(next, k.h, p.down_w, NULL, N, H, C, 1);
    }
    rmsnorm_forward(acts.y, acts.x + L * N * C, all.norm_w, N, C);
    matmul_forward(acts.logits, acts.y, all.head_w, NULL, N, C, m->V, 0);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, H = m->H, L = m->L, N = B * T;
    const Params all = m->params, sums = m->grads;
    const Acts acts = m->acts;
    const Dacts d = m->dacts;
    matmul_backward(d.dr, sums.head_w, NULL, d.dlogits, acts.y, all.head_w, N, C, m->V, 0);
    memset(d.dx, 0, N * C * sizeof(float));
    rmsnorm_backward(d.dx, sums.norm_w, d.dr, acts.x + L * N * C, all.norm_w, N, C);
    for (size_t l = L; l-- > 0;) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(m, &m->params, l), g = layer_params(m, &m->grads, l);
        float *dconv = d.dqkv, *dp = p.conv_w ? d.dp : d.dqkv;
        matmul_backward(d.dh, g.down_w, NULL, d.dx, k.h, p.down_w, N, H, C, 0);
        swiglu_backward(d.dgu, d.dh, k.gu, N, H);
        matmul_backward(d.dr, g.gu_w, NULL, d.dgu, k.r2, p.gu_w, N, C, 2 * H, 0);
        rmsnorm_backward(d.dx, g.norm2_w, d.dr, k.mid, p.norm2_w, N, C);
        matmul_backward(d.dz, g.proj_w, NULL, d.dx, k.z, p.proj_w, N, C, C, 0);
        memset(d.d_o, 0, N * C * sizeof(float));
        rmsnorm_backward(d.d_o, g.norm_o_w, d.dz, k.o, p.norm_o_w, N * NH, C / NH);
        delta_backward(d.dqkv, d.db, NULL, d.d_o, NULL, k.u, k.S, k.qkv, k.beta, d.work, B, T, C,
                       NH);
        beta_backward(d.db, d.db, k.beta, N * NH, m->range);
        activate_backward(dconv, d.dqkv, k.conv, N, C, NH, m->silu_from);
        if (p.conv_w)
            conv_backward(dp, NULL, g.conv_w, dconv, k.p, NULL, p.conv_w, B, T, 3 * C);
        matmul_backward(d.dr, g.qkv_w, NULL, dp, k.r1, p.qkv_w, N, C, 3 * C, 0);
        matmul_backward(d.dr, g.beta_w, NULL, d.db, k.r1, p.beta_w, N, C, NH, 1);
        rmsnorm_backward(d.dx, g.norm1_w, d.dr, k.x, p.norm1_w, N, C);
    }
    embed_backward(sums.wte, NULL, d.dx, m->batch.inputs, B, T, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, NH = m->NH, H = m->H, size = m->decode_B * C * (C / NH);
    const Dacts d = m->dacts;
    if (t == 0)
        arena_fill(&m->state_arena, 0);
    embed_forward(d.dx, tokens, m->params.wte, NULL, D, 1, C);
    for (size_t l = 0; l < m->L; l++) {
        const Params p = layer_params(m, &m->params, l);
        float *S = m->state.S + l * size;
        rmsnorm_forward(d.dr, d.dx, p.norm1_w, D, C);
        matmul_forward(d.dp, d.dr, p.qkv_w, NULL, D, C, 3 * C, 0);
        matmul_forward(d.db, d.dr, p.beta_w, NULL, D, C, NH, 0);
        if (p.conv_w) {
            float *window = m->state.window + l * m->decode_B * (WINDOW - 1) * 3 * C;
            conv_forward(d.dqkv, d.dp, window, p.conv_w, D, 1, 3 * C);
            for (size_t i = 0; i < D; i++, window += (WINDOW - 1) * 3 * C) { // the oldest goes
                memmove(window, window + 3 * C, (WINDOW - 2) * 3 * C * sizeof *window);
                memcpy(window + (WINDOW - 2) * 3 * C, d.dp + i * 3 * C, 3 * C * sizeof *window);
            }
        }
        activate_forward(d.dqkv, p.conv_w ? d.dqkv : d.dp, D, C, NH, m->silu_from);
        beta_forward(d.db, d.db, D * NH, m->range);
        delta_forward(d.d_o, d.dr, S, d.dqkv, d.db, S, D, 1, C, NH);
        rmsnorm_forward(d.dz, d.d_o, p.norm_o_w, D * NH, C / NH);
        matmul_forward(d.dx, d.dz, p.proj_w, NULL, D, C, C, 1);
        rmsnorm_forward(d.dr, d.dx, p.norm2_w, D, C);
        matmul_forward(d.dgu, d.dr, p.gu_w, NULL, D, C, 2 * H, 0);
        swiglu_forward(d.dh, d.dgu, D, H);
        matmul_forward(d.dx, d.dh, p.down_w, NULL, D, H, C, 1);
    }
    rmsnorm_forward(d.dr, d.dx, m->params.norm_w, D, C);
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

#define ANSWERS "--channels 128 --hidden 0 --batch-size 256 --lr 1e-3 --lr-min 1e-6 " \
    "--eval-batches 211 "
#define PARITY_RUN ANSWERS "--task parity --layers 2 --steps 20000 --warmup 2000 --grad-clip 0"
#define MODULAR_RUN ANSWERS "--layers 3 --steps 100000 --warmup 10000 --weight-decay 0.1 --task "
#define WORDS "--channels 128 --hidden 0 --conv no --batch-size 512 --steps 60000 --lr 1e-4 " \
    "--schedule constant --warmup 0 --weight-decay 0.01 --eval-batches 30 --task "
static const Preset PRESETS[] = {
    {"small", "--max-length 24 --eval-min-length 25 --eval-max-length 80 --eval-batches 32",
     "parity, short"},
    {"main", "--task copying --string-size 16 --lr 2e-3 --steps 600", "16 letters on two cores"},
    {"parity", PARITY_RUN, "Table 3, at the authors' batch of 256 and 20000 steps"},
    {"modular", MODULAR_RUN "modular", "Table 3, at a batch of 256; the paper's is 1024"},
    {"brackets", MODULAR_RUN "brackets", "Table 3, at a batch of 256"},
    {"s5-swaps", WORDS "s5 --elements swaps --layers 1", "Fig. 4; the paper takes 312500 steps"},
    {"s5-triples", WORDS "s5 --elements triples --layers 5", "Fig. 4"},
    {"s5", WORDS "s5 --layers 5", "Fig. 4"},
    {"s5-tokens", WORDS "s5 --tokens-per-element 4 --layers 5", "Fig. 4"},
    {"z60", WORDS "z60 --layers 5", "Fig. 8"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"eigenvalues", OPT_CHOICE, &c->eigenvalues, "signed", 0, 0, "nonneg|signed", DEFINES_MODEL,
         "of a step: beta in (0,1) or (0,2)"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"heads", OPT_INT, &c->heads, "4", 1, 1 << 16, "NH", DEFINES_MODEL, "each its own state"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "NH times HS"},
        {"hidden", OPT_INT, &c->hidden, "64", 0, 1 << 20, "H", DEFINES_MODEL,
         "of the MLP, 0 = 8/3 C rounded up to a multiple of 256"},
        {"conv", OPT_CHOICE, &c->conv, "yes", 0, 0, "no|yes", DEFINES_MODEL,
         "short convolution of q, k and v"},
        {"qk-silu", OPT_CHOICE, &c->qk_silu, "no", 0, 0, "no|yes", DEFINES_MODEL,
         "SiLU on q and k where there is no convolution"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    options_default(options, "task", "parity");
    options_default(options, "lr", "4e-3");
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    if (c->channels % c->heads)
        die(EXIT_USAGE, "--channels %d: expected a multiple of --heads %d: every head has as many "
            "channels\nhint: --heads %d --channels %d", c->channels, c->heads, c->heads,
            (c->channels / c->heads + 1) * c->heads);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
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
                  "train_deltanet: DeltaNet on the CPU. Without options: a small parity.",
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
