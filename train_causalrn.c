// train_causalrn.c: CausalRN and BiRN on the CPU, what train_causalrn.cu is held against.
//
// "An All-MLP Sequence Modeling Architecture That Excels at Copying" (ICML 2024 NGSM workshop). No
// attention: each position sums a nonlinear function of itself paired with every earlier position.
//
//   r   = normalize(x)                         (x - mean) / sqrt(var + 1e-8), nothing learned
//   a_u = W_right r_u + bias                   the query side
//   b_v = W_left r_v                           the memory side
//   s_u = 1/(u+1) sum_{v<=u} psi(mu(a_u + b_v))                                       [eq. 4, 5]
//   x  += W_out normalize(s) + bias            the whole block: no MLP, no attention beside it
//   s_u = 1/T sum_v psi(mu(a_u + b_v))         BiRN, --causal no                          [eq. 6]
//
// --prenorm exact: mu normalizes every pair over its channels. The sum does not factor; the memory
// is all b_v, it grows with T, and the model copies. approx is mu(a_u) + mu(b_v), none a_u + b_v:
// with psi = exp these factor, --model linear: s_u = exp(a_u) * 1/(u+1) sum_{v<=u} exp(b_v), a
// state of H numbers. Is that linear attention? No: there a step adds to a matrix an outer product,
// of rank 1; here it adds diag(exp(b_v)), of rank H, which takes H numbers. As recurrences:
//   linear Transformer  S_t = S_{t-1} + k_t v_t^T         out_t = S_t^T q_t
//   Linear CausalRN     S_t = S_{t-1} + diag(exp(b_t))    out_t = S_t exp(a_t)
//
// Letters: the paper's d_e is C, d_h is H, its i is v, its j is u; B sequences of T positions,
// N = B T, V symbols, L layers; D sequences are decoded at once.
// Sections: [mix] this layer; [layers] matrix product, normalize, embedding, cross-entropy;
// [optimizer] AdamW; [model] tensors, forward, backward, decoding; [train] the loop; [main] start.
//
// On two CPU cores (measured: README.md; the paper's figures: train_causalrn.cu):
//   ./train_causalrn                      copying 16 letters; --preset main: 32, `make run`
//   ./train_causalrn --preset copy-s128   the paper's size, hours here: to compare with the GPU
//   ./train_causalrn --task text --text FILE --sample 60   the bytes of a file, and its own
//   ./train_causalrn --task images --images FILE --causal no --model linear   BiRN, data/images.h
//
// Differences from the paper and its code: eps 1e-8 is inside the root of every normalize (theirs:
// 0, on the deviation); before the post-reduction norm each row of s is divided by a power of two,
// which the norm undoes; warm-up starts at lr/warmup rather than 0; fp32 throughout. --model
// quadratic --prenorm none can overflow, as the paper's would: the run then stops and says so.

#define READS_IMAGES
#include "data/tasks.h" // and with it check, log, options, rng, tensors, threads, training
#include <tgmath.h>
#ifdef REAL_IS_DOUBLE // the tests build this file a second time in double precision
#define float double
#endif
#include "util/patches.h" // what the first layer reads

// From [layers]:
static inline float exp_ps(float x);
static void row_moments(const float *x, size_t n, float *mean, float *var);
static void normalize_row(float *out, const float *x, size_t n);
static void normalize_row_backward(float *dx, const float *dout, const float *x, size_t n,
                                   int accumulate);

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

// psi: the activation; *slope = its derivative (0 at 0 for relu). `activation` is a constant where
// it is called, so the switch costs nothing.
static inline float psi(int activation, float z, float *slope)
{
    const float sqrt_half = 0.70710678118654752, density = 0.39894228040143268; // 1 / sqrt(2 pi)
    float e;
    switch (activation) {
    case EXP: return *slope = exp_ps(z);
    case RELU: *slope = z > 0; return z < 0 ? 0 : z; // keeps NaN
    case ELU:
        e = exp_ps(z);
        *slope = z > 0 ? 1 : e;
        return z > 0 ? z : e - 1;
    default:
        e = (1 + erf(z * sqrt_half)) / 2;
        *slope = e + z * density * exp_ps(-z * z / 2);
        return z * e;
    }
}

// pair_row: one position u against n others: sum (H) = sum_v psi(r_v (a + b_v)), slope (H) = sum_v
// r_v psi'(r_v (a + b_v)); a (H), b (n,H), r (n).  [CausalRN eq. 4, the sum]
static inline void pair_row(int activation, float *sum, float *slope, const float *a,
                            const float *b, const float *r, size_t n, size_t H)
{
    memset(sum, 0, H * sizeof(float));
    memset(slope, 0, H * sizeof(float));
    for (size_t v = 0; v < n; v++) {
        const float *b_v = b + v * H, r_v = r[v];
#pragma omp simd
        for (size_t h = 0; h < H; h++) {
            float d, e = psi(activation, r_v * (a[h] + b_v[h]), &d);
            sum[h] += e;
            slope[h] += r_v * d;
        }
    }
}

// pair_row_backward: the same row, given g (H) = dL/dsum: s1 (n) = sum_h g e', s2 (n) = sum_h g e'
// z with e' = psi'(z), z = r_v (a + b_v); db (n,H) += r_v g e'.
static inline void pair_row_backward(int activation, float *s1, float *s2, float *db,
                                     const float *g, const float *a, const float *b,
                                     const float *r, size_t n, size_t H)
{
    for (size_t v = 0; v < n; v++) {
        const float *b_v = b + v * H, r_v = r[v];
        float *db_v = db + v * H, sum1 = 0, sum2 = 0;
#pragma omp simd reduction(+ : sum1, sum2)
        for (size_t h = 0; h < H; h++) {
            float z = r_v * (a[h] + b_v[h]), d;
            psi(activation, z, &d);
            float gd = g[h] * d;
            sum1 += gd;
            sum2 += gd * z;
            db_v[h] += r_v * gd;
        }
        s1[v] = sum1;
        s2[v] = sum2;
    }
}

// WITH_ACTIVATION: call f with the activation as a constant, so that psi's switch folds away.
#define WITH_ACTIVATION(activation, f, ...) \
    ((activation) == EXP ? f(EXP, __VA_ARGS__) : (activation) == RELU ? f(RELU, __VA_ARGS__) : \
     (activation) == ELU ? f(ELU, __VA_ARGS__) : f(GELU, __VA_ARGS__))

// prepare: y (T,H) = what enters the pairs for x (T,H): exact: x minus its row mean, with var (T) =
// the row's variance; approx: normalize(x); none: x. var is 0 but for exact. y must not alias x.
static void prepare(float *y, float *var, const float *x, size_t T, size_t H, int prenorm)
{
    for (size_t t = 0; t < T; t++, x += H, y += H) {
        float mean = 0;
        var[t] = 0;
        if (prenorm == EXACT)
            row_moments(x, H, &mean, &var[t]);
        for (size_t h = 0; h < H; h++)
            y[h] = x[h] - mean;
        if (prenorm == APPROX)
            normalize_row(y, y, H);
    }
}

// pair_rstd: r (rows,n) = 1/sqrt(var(a_u + b_v) + eps) of rows x n pairs, all from one matrix
// product: var(a + b) = var a + var b + 2 (a . b)/H for centred a (rows,H), b (n,H) with variances
// va, vb. eps = 1e-8; rounding below 0 is clamped. Without exact: r = 1.
static void pair_rstd(float *r, const float *a, const float *va, const float *b, const float *vb,
                      size_t rows, size_t n, size_t H, int prenorm)
{
    const float two_over_H = 2.0 / (double)H, eps = 1e-8;
    for (size_t i = 0; i < rows * n; i++)
        r[i] = 1;
    if (prenorm != EXACT)
        return;
    gemm(r, a, H, 1, b, 1, H, rows, n, H, 0);
    for (size_t u = 0; u < rows; u++)
        for (size_t v = 0; v < n; v++) {
            float var = va[u] + vb[v] + two_over_H * r[u * n + v];
            r[u * n + v] = 1 / sqrt((var > 0 ? var : 0) + eps);
        }
}

// finish_row: from one row's sums s (H) over n positions: with post norm s *= 2^-k, k such that the
// largest |s| comes into [1/2, 1), and out (H) = normalize(s); else s /= n and out = s. Returns the
// factor. The norm undoes the power of two (up to eps): no gradient, and no square overflows.
static float finish_row(float *out, float *s, size_t n, size_t H, int postnorm)
{
    float top = 0;
    int k = 0;
    for (size_t h = 0; h < H; h++)
        top = fabs(s[h]) > top ? fabs(s[h]) : top;
    if (postnorm && isfinite(top))
        frexp(top, &k);
    const float power = ldexp((float)1, k > 126 ? -126 : k < -126 ? 126 : -k);
    const float scale = postnorm ? power : 1.0 / (double)n;
    for (size_t h = 0; h < H; h++)
        out[h] = s[h] *= scale;
    if (postnorm)
        normalize_row(out, s, H);
    return scale;
}

// What the forward saves for the backward: s (B,T,H); quadratic: p (B,T,H), scale (B,T); linear:
// max (B,T,H), sum (B,T,H).
typedef struct {
    float *s, *p, *scale, *max, *sum;
} Saved;

// saved_at: the same for the positions from number n on.
static Saved saved_at(Saved x, size_t n, size_t H)
{
    return x.p ? (Saved){x.s + n * H, x.p + n * H, x.scale + n, NULL, NULL}
               : (Saved){x.s + n * H, NULL, NULL, x.max + n * H, x.sum + n * H};
}

// The pair loop takes this many positions u at a time: r, M and N are (BLOCK,T), never (T,T).
enum { BLOCK = 32 };

// mix_work: elements of scratch a thread needs (quadratic_backward most), an even number.
static size_t mix_work(size_t T, size_t H)
{
    return (2 * T * H + 4 * T + BLOCK * 3 * T + 3 * H + 15) / 16 * 16;
}

// quadratic_forward: one sequence: out (T,H) = the layer's output for the projections a, b (T,H);
// saved =: s the sums, p the sums of r psi', both times scale.  [eq. 4 and 6]
static void quadratic_forward(float *out, Saved saved, const float *a, const float *b, float *work,
                              size_t T, size_t H, Mix mix)
{
    float *a_c = work, *b_c = a_c + T * H, *va = b_c + T * H, *vb = va + T, *r = vb + T;
    prepare(a_c, va, a, T, H, mix.prenorm);
    prepare(b_c, vb, b, T, H, mix.prenorm);
    for (size_t u0 = 0; u0 < T; u0 += BLOCK) {
        size_t rows = T - u0 < BLOCK ? T - u0 : BLOCK, width = mix.causal ? u0 + rows : T;
        pair_rstd(r, a_c + u0 * H, va + u0, b_c, vb, rows, width, H, mix.prenorm);
        for (size_t u = u0; u < u0 + rows; u++) {
            size_t n = mix.causal ? u + 1 : T;
            float *s_u = saved.s + u * H, *p_u = saved.p + u * H;
            WITH_ACTIVATION(mix.activation, pair_row, s_u, p_u, a_c + u * H, b_c,
                            r + (u - u0) * width, n, H);
            saved.scale[u] = finish_row(out + u * H, s_u, n, H, mix.postnorm);
            for (size_t h = 0; h < H; h++)
                p_u[h] *= saved.scale[u];
        }
    }
}

// quadratic_backward: da (T,H) =, db (T,H) = from dout (T,H), what the forward saved and its a, b.
// With g = dL/dsum, P = p / scale, s1 = sum_h g e', s2 = sum_h g e' z, and in their place N = -r
// s1/H, M = -r^2 s2/H of every pair (0 unless prenorm is exact), a and b centred,
//   da_u = g P_u + sum_v N + a_u sum_v M + (M b)_u
//   db_v = sum_u r g e' + sum_u N + b_v sum_u M + (M^T a)_v
static void quadratic_backward(float *da, float *db, const float *dout, Saved saved, const float *a,
                               const float *b, float *work, size_t T, size_t H, Mix mix)
{
    float *a_c = work, *b_c = a_c + T * H, *va = b_c + T * H, *vb = va + T, *sum_N = vb + T;
    float *sum_M = sum_N + T, *g = sum_M + T, *r = g + H, *N = r + BLOCK * T, *M = N + BLOCK * T;
    const float over_H = 1.0 / (double)H;
    prepare(a_c, va, a, T, H, mix.prenorm);
    prepare(b_c, vb, b, T, H, mix.prenorm);
    memset(db, 0, T * H * sizeof(float));
    memset(sum_N, 0, 2 * T * sizeof(float)); // and sum_M
    for (size_t u0 = 0; u0 < T; u0 += BLOCK) {
        size_t rows = T - u0 < BLOCK ? T - u0 : BLOCK, width = mix.causal ? u0 + rows : T;
        pair_rstd(r, a_c + u0 * H, va + u0, b_c, vb, rows, width, H, mix.prenorm);
        for (size_t u = u0; u < u0 + rows; u++) {
            size_t n = mix.causal ? u + 1 : T;
            float *da_u = da + u * H, *r_u = r + (u - u0) * width, *N_u = N + (u - u0) * width;
            float *M_u = M + (u - u0) * width, row_N = 0, row_M = 0;
            memcpy(g, dout + u * H, H * sizeof(float));
            if (mix.postnorm)
                normalize_row_backward(g, g, saved.s + u * H, H, 0);
            for (size_t h = 0; h < H; h++) {
                da_u[h] = g[h] * saved.p[u * H + h];
                g[h] *= saved.scale[u];
            }
            WITH_ACTIVATION(mix.activation, pair_row_backward, N_u, M_u, db, g, a_c + u * H, b_c,
                            r_u, n, H);
            for (size_t v = 0; v < width; v++) {
                int pair = v < n && mix.prenorm == EXACT;
                N_u[v] = pair ? -r_u[v] * N_u[v] * over_H : 0;
                M_u[v] = pair ? -r_u[v] * r_u[v] * M_u[v] * over_H : 0;
                row_N += N_u[v];
                row_M += M_u[v];
                sum_N[v] += N_u[v];
                sum_M[v] += M_u[v];
            }
            for (size_t h = 0; h < H; h++)
                da_u[h] += row_N + a_c[u * H + h] * row_M;
        }
        if (mix.prenorm != EXACT)
            continue;
        gemm(da + u0 * H, M, width, 1, b_c, H, 1, rows, H, width, 1);
        gemm(db, M, 1, width, a_c + u0 * H, H, 1, width, H, rows, 1);
    }
    for (size_t v = 0; v < T; v++)
        for (size_t h = 0; h < H; h++)
            db[v * H + h] += sum_N[v] + b_c[v * H + h] * sum_M[v];
}

// logsumexp_step: add exp(x) to exp(*max) * *sum. Equals are not subtracted: inf - inf is NaN.
static inline void logsumexp_step(float *max, double *sum, float x)
{
    const float top = x > *max ? x : *max;
    *sum = *sum * (*max == top ? 1 : exp_ps(*max - top)) + (x == top ? 1 : exp_ps(x - top));
    *max = top;
}

// logcumsumexp_forward: per channel of x (T,H) the running log-sum-exp l_t = max_t + log(sum_t),
// kept as max, sum (T,H) =: no overflow; -inf is log 0; +inf, NaN stay. carry (H) is scratch.
static void logcumsumexp_forward(float *max, float *sum, double *carry, const float *x, size_t T,
                                 size_t H)
{
    for (size_t t = 0; t < T; t++)
#pragma omp simd
        for (size_t h = 0; h < H; h++) {
            float m = t ? max[(t - 1) * H + h] : -INFINITY;
            double sum_t = t ? carry[h] : 0;
            logsumexp_step(&m, &sum_t, x[t * H + h]);
            max[t * H + h] = m;
            sum[t * H + h] = carry[h] = sum_t;
        }
}

// logcumsumexp_backward: dx (T,H) = from dl (T,H), the gradient of l: every exponent is <= 0:
//   R_t = dl_t + exp(l_t - l_{t+1}) R_{t+1},  dx_t = exp(x_t - l_t) R_t, 0 where x is -inf.
// With causal = 0 every position saw the sequence's l_T; R (H), scratch, is the sum of all dl.
static void logcumsumexp_backward(float *dx, double *R, const float *dl, const float *max,
                                  const float *sum, const float *x, size_t T, size_t H, int causal)
{
    memset(R, 0, H * sizeof *R);
    for (size_t i = 0; i < T * H && !causal; i++)
        R[i % H] += dl[i];
    for (size_t t = T; t-- > 0;) {
        size_t last = (causal ? t : T - 1) * H, next = causal && t + 1 < T ? H : 0;
        const float *max_t = max + last, *sum_t = sum + last, *x_t = x + t * H, *dl_t = dl + t * H;
#pragma omp simd
        for (size_t h = 0; h < H; h++) {
            float ratio = max_t[h] == max_t[h + next] ? 1 : exp_ps(max_t[h] - max_t[h + next]);
            float weight = x_t[h] == max_t[h] ? 1 : exp_ps(x_t[h] - max_t[h]);
            R[h] = causal ? dl_t[h] + ratio * (sum_t[h] / sum_t[h + next]) * R[h] : R[h];
            dx[t * H + h] = (x_t[h] == -INFINITY ? 0 : weight / sum_t[h]) * (float)R[h];
        }
    }
}

// linear_row: s (H) = exp(a + max) sum, scaled, and out (H) for one position that sees n positions,
// whose log-sum is max + log(sum); see finish_row. Shifts by k ln 2 keep exp small.  [eq. 5]
static void linear_row(float *out, float *s, const float *a, const float *max, const float *sum,
                       size_t n, size_t H, int postnorm)
{
    const float ln2 = 0.69314718055994531;
    float top = -INFINITY, shift = 0;
    for (size_t h = 0; h < H; h++)
        top = a[h] + max[h] > top ? a[h] + max[h] : top;
    if (postnorm && isfinite(top))
        shift = floor(top / ln2) * ln2;
#pragma omp simd
    for (size_t h = 0; h < H; h++)
        s[h] = exp_ps(a[h] + max[h] - shift) * sum[h];
    finish_row(out, s, n, H, postnorm);
}

// linear_forward: one sequence: out (T,H) = the layer's output for a, b (T,H); saved =.  [eq. 5]
static void linear_forward(float *out, Saved saved, const float *a, const float *b, float *work,
                           size_t T, size_t H, Mix mix)
{
    double *carry = (double *)work; // aligned: work_size is even
    float *a_n = work + 2 * H, *b_n = a_n + T * H, *var = b_n + T * H;
    prepare(a_n, var, a, T, H, mix.prenorm);
    prepare(b_n, var, b, T, H, mix.prenorm);
    logcumsumexp_forward(saved.max, saved.sum, carry, b_n, T, H);
    for (size_t t = 0; t < T; t++) {
        size_t seen = mix.causal ? t + 1 : T, last = (seen - 1) * H;
        linear_row(out + t * H, saved.s + t * H, a_n + t * H, saved.max + last, saved.sum + last,
                   seen, H, mix.postnorm);
    }
}

// linear_backward: da (T,H) =, db (T,H) = from dout (T,H) and what the forward saved.
static void linear_backward(float *da, float *db, const float *dout, Saved saved, const float *b,
                            float *work, size_t T, size_t H, Mix mix)
{
    float *b_n = work + 2 * H, *var = b_n + T * H;
    prepare(b_n, var, b, T, H, mix.prenorm);
    memcpy(da, dout, T * H * sizeof(float));
    for (size_t t = 0; t < T && mix.postnorm; t++)
        normalize_row_backward(da + t * H, da + t * H, saved.s + t * H, H, 0);
    for (size_t i = 0; i < T * H; i++) // s = exp(a + l): da = dl = ds * s
        da[i] *= saved.s[i];
    logcumsumexp_backward(db, (double *)work, da, saved.max, saved.sum, b_n, T, H, mix.causal);
}

// mix_forward: out (B,T,H) = the layer's output for a, b (B,T,H); saved =; work (threads,work_size)
// is scratch. Threads take whole sequences, so the result is the same for any number.  [eq. 4-6]
static void mix_forward(float *out, Saved saved, const float *a, const float *b, float *work,
                        size_t work_size, size_t B, size_t T, size_t H, Mix mix)
{
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B; i++) {
        size_t at = i * T * H;
        float *w = work + threads_index() * work_size;
        Saved i_saved = saved_at(saved, i * T, H);
        if (mix.model == QUADRATIC)
            quadratic_forward(out + at, i_saved, a + at, b + at, w, T, H, mix);
        else
            linear_forward(out + at, i_saved, a + at, b + at, w, T, H, mix);
    }
}

// mix_backward: da, db (B,T,H) = from dout (B,T,H), what mix_forward saved and its a, b (B,T,H).
static void mix_backward(float *da, float *db, const float *dout, Saved saved, const float *a,
                         const float *b, float *work, size_t work_size, size_t B, size_t T,
                         size_t H, Mix mix)
{
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B; i++) {
        size_t at = i * T * H;
        float *w = work + threads_index() * work_size;
        Saved i_saved = saved_at(saved, i * T, H);
        if (mix.model == QUADRATIC)
            quadratic_backward(da + at, db + at, dout + at, i_saved, a + at, b + at, w, T, H, mix);
        else
            linear_backward(da + at, db + at, dout + at, i_saved, b + at, w, T, H, mix);
        for (size_t t = at; t < at + T * H && mix.prenorm == APPROX; t += H) { // mu(a), mu(b)
            normalize_row_backward(da + t, da + t, a + t, H, 0);
            normalize_row_backward(db + t, db + t, b + t, H, 0);
        }
    }
}

// What a layer remembers of one sequence while decoding. Linear: max, sum (H), whatever the length.
// Quadratic: memory (T,H) and var (T), every prepared b so far.
typedef struct {
    float *max, *sum, *memory, *var;
} State;

// state_at: the state of sequence number i.
static State state_at(State x, size_t i, size_t T, size_t H)
{
    return x.memory ? (State){NULL, NULL, x.memory + i * T * H, x.var + i * T}
                    : (State){x.max + i * H, x.sum + i * H, NULL, NULL};
}

// mix_decode: position t of a sequence: out (H) = the layer's output for a, b (H), given the state
// of the positions before, which it extends: O(H) for linear, O(t H) for quadratic.
static void mix_decode(float *out, State state, const float *a, const float *b, float *work,
                       size_t t, size_t H, Mix mix)
{
    float *a_n = work, *b_n = a_n + H, *s = b_n + H, *p = s + H, *r = p + H, va, vb;
    prepare(a_n, &va, a, 1, H, mix.prenorm);
    prepare(b_n, &vb, b, 1, H, mix.prenorm);
    if (mix.model == QUADRATIC) {
        memcpy(state.memory + t * H, b_n, H * sizeof(float));
        state.var[t] = vb;
        pair_rstd(r, a_n, &va, state.memory, state.var, 1, t + 1, H, mix.prenorm);
        WITH_ACTIVATION(mix.activation, pair_row, s, p, a_n, state.memory, r, t + 1, H);
        finish_row(out, s, t + 1, H, mix.postnorm);
        return;
    }
    for (size_t h = 0; h < H; h++) {
        double sum = t ? state.sum[h] : 0;
        state.max[h] = t ? state.max[h] : -INFINITY;
        logsumexp_step(&state.max[h], &sum, b_n[h]);
        state.sum[h] = sum;
    }
    linear_row(out, s, a_n, state.max, state.sum, t + 1, H, mix.postnorm);
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
    Mix mix;
    int layers, channels, hidden, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *patch_w, *cls, *wpe, *right_w, *right_b, *left_w, *out_w, *out_b, *head_w;
} Params;

typedef struct {
    float *patches, *x, *r, *a, *b, *o, *y, *logits, *losses;
    Saved saved;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *da, *db, *d_o, *dlogits, *work;
} Dacts;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, H, L, decode_B, work_size, positions;
    Weights weights;
    Params params, grads;
    Acts acts;
    Dacts dacts;
    State state; // (L,decode_B) of them
    Arena acts_arena, dacts_arena, state_arena;
    Batch batch;
    double loss; // nats, mean over the supervised positions of the batch
} Model;

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    return c->mix.model == LINEAR ? "linear" : "quadratic";
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

// model_plan: sizes and tensor tables for a configuration; nothing is allocated. The task decides T
// and V. A tensor whose first dimension is 0 does not exist.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config, m->task = &TASKS[config->task];
    const size_t patch = task_patch(m->task, &config->task_options);
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t H = m->H = (size_t)config->hidden, P = m->positions = task_longest(shape);
    const size_t D = m->decode_B = !config->mix.causal ? 0 : B < 32 ? B : 32;
    const size_t quadratic = config->mix.model == QUADRATIC ? L : 0, linear = L - quadratic;
    const double std = 0.02, out_std = 0.02 / sqrt((double)L);
    m->work_size = mix_work(P, H);
    const Tensor params[] = {
        {"wte", {patch ? 0 : V, C}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, wte)},
        {"wpe", {P, C}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, wpe)},
        {"right_w", {L, H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, right_w)},
        {"right_b", {L, H}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, right_b)},
        {"left_w", {L, H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, left_w)},
        {"out_w", {L, C, H}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, out_w)},
        {"out_b", {L, C}, INIT_ZERO, NO_DECAY, 1, offsetof(Params, out_b)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
        {"patch_w", {patch ? C : 0, patch}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, patch_w)},
        {"cls", {patch ? C : 0}, INIT_NORMAL(1), NO_DECAY, 1, offsetof(Params, cls)},
    };
    const Tensor acts[] = { // x[0] is the embedding; r = normalize(x); y = normalize(x[L])
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r", Acts, r, L, B, T, C),
        ACTIVATION("a", Acts, a, L, B, T, H), ACTIVATION("b", Acts, b, L, B, T, H),
        ACTIVATION("o", Acts, o, L, B, T, H), ACTIVATION("s", Acts, saved.s, L, B, T, H),
        ACTIVATION("p", Acts, saved.p, quadratic, B, T, H),
        ACTIVATION("scale", Acts, saved.scale, quadratic, B, T),
        ACTIVATION("max", Acts, saved.max, linear, B, T, H),
        ACTIVATION("sum", Acts, saved.sum, linear, B, T, H),
        ACTIVATION("y", Acts, y, B, T, C), ACTIVATION("logits", Acts, logits, B, T, V),
        ACTIVATION("losses", Acts, losses, B, T),
        ACTIVATION("patches", Acts, patches, patch ? B : 0, T, patch),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("da", Dacts, da, B, T, H), ACTIVATION("db", Dacts, db, B, T, H),
        ACTIVATION("do", Dacts, d_o, B, T, H), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, threads_count(), m->work_size),
    };
    const Tensor state[] = {
        ACTIVATION("max", State, max, D ? linear : 0, D, H),
        ACTIVATION("sum", State, sum, D ? linear : 0, D, H),
        ACTIVATION("memory", State, memory, D ? quadratic : 0, D, P, H),
        ACTIVATION("var", State, var, D ? quadratic : 0, D, P),
    };
    weights_plan(&m->weights, ROWS(params));
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
}

// model_flops: floating-point operations of one training step, exponentials included: 6 per weight
// and token; per channel and pair 17, and 8 in the products for exact; or 40 per channel and token.
static double model_flops(const Model *m)
{
    const Config *c = &m->config;
    double pairs = c->mix.causal ? ((double)m->T + 1) / 2 : (double)m->T;
    double layer = c->mix.model == LINEAR ? 40 : (c->mix.prenorm == EXACT ? 25 : 17) * pairs;
    double weights = (double)(m->L * 3 * m->C * m->H + m->V * m->C), n = c->training.accumulate;
    return n * (double)(m->B * m->T) * (6 * weights + (double)(m->L * m->H) * layer);
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t N = m->B * m->T, C = l * N * m->C, H = l * N * m->H;
    const Acts *all = &m->acts;
    return (Acts){.x = all->x + C, .r = all->r + C, .a = all->a + H, .b = all->b + H,
                  .o = all->o + H, .saved = saved_at(all->saved, l * N, m->H)};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    size_t B = m->B, T = m->T, C = m->C, H = m->H, L = m->L, N = B * T;
    Params p = m->params;
    Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    input_forward(acts.x, acts.patches, &m->batch, p.wte, p.patch_w, p.cls, p.wpe, C);
    for (size_t l = 0; l < L; l++) {
        Acts k = layer_acts(m, l);
        float *next = k.x + N * C; // x of the layer after
        normalize_forward(k.r, k.x, N, C);
        matmul_forward(k.a, k.r, p.right_w + l * H * C, p.right_b + l * H, N, C, H, 0);
        matmul_forward(k.b, k.r, p.left_w + l * H * C, NULL, N, C, H, 0);
        mix_forward(k.o, k.saved, k.a, k.b, m->dacts.work, m->work_size, B, T, H, m->config.mix);
        memcpy(next, k.x, N * C * sizeof(float));
        matmul_forward(next, k.o, p.out_w + l * C * H, p.out_b + l * C, N, H, C, 1);
    }
    normalize_forward(acts.y, acts.x + L * N * C, N, C);
    matmul_forward(acts.logits, acts.y, p.head_w, NULL, N, C, m->V, 0);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    size_t B = m->B, T = m->T, C = m->C, H = m->H, L = m->L, N = B * T;
    Params p = m->params, g = m->grads;
    Acts acts = m->acts;
    Dacts d = m->dacts;
    matmul_backward(d.dr, g.head_w, NULL, d.dlogits, acts.y, p.head_w, N, C, m->V, 0);
    memset(d.dx, 0, N * C * sizeof(float));
    normalize_backward(d.dx, d.dr, acts.x + L * N * C, N, C);
    for (size_t l = L; l-- > 0;) {
        Acts k = layer_acts(m, l);
        size_t w = l * H * C, h = l * H;
        matmul_backward(d.d_o, g.out_w + w, g.out_b + l * C, d.dx, k.o, p.out_w + w, N, H, C, 0);
        mix_backward(d.da, d.db, d.d_o, k.saved, k.a, k.b, d.work, m->work_size, B, T, H,
                     m->config.mix);
        matmul_backward(d.dr, g.right_w + w, g.right_b + h, d.da, k.r, p.right_w + w, N, C, H, 0);
        matmul_backward(d.dr, g.left_w + w, NULL, d.db, k.r, p.left_w + w, N, C, H, 1);
        normalize_backward(d.dx, d.dr, k.x, N, C); // adds to the residual's gradient
    }
    input_backward(g.wte, g.patch_w, g.cls, g.wpe, d.dx, acts.patches, &m->batch, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. Dies when t is past the T learned positions.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, H = m->H, T = m->positions;
    const Params p = m->params;
    const Dacts d = m->dacts;
    decode_check(t, T);
    embed_forward(d.dx, tokens, p.wte, p.wpe + t * C, D, 1, C);
    for (size_t l = 0; l < m->L; l++) {
        normalize_forward(d.dr, d.dx, D, C);
        matmul_forward(d.da, d.dr, p.right_w + l * H * C, p.right_b + l * H, D, C, H, 0);
        matmul_forward(d.db, d.dr, p.left_w + l * H * C, NULL, D, C, H, 0);
#pragma omp parallel for
        for (size_t i = 0; i < D; i++) {
            float *work = d.work + threads_index() * m->work_size;
            State s = state_at(m->state, l * m->decode_B + i, T, H);
            mix_decode(d.d_o + i * H, s, d.da + i * H, d.db + i * H, work, t, H, m->config.mix);
        }
        matmul_forward(d.dx, d.d_o, p.out_w + l * C * H, p.out_b + l * C, D, H, C, 1);
    }
    normalize_forward(d.dr, d.dx, D, C);
    matmul_forward(d.dlogits, d.dr, p.head_w, NULL, D, C, m->V, 0);
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
                  "train_causalrn: CausalRN on the CPU. Without options: copying 16 letters.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 1);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    training_print("CausalRN", &model.weights, "wte,wpe", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model_alloc(&model);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
