// train_gpt2.c: GPT-2 and two Transformers on the CPU, what train_gpt2.cu is held against.
//
// Attention: each position asks every earlier one (a query against its key) and averages what they
// hold (their values), weighted by the answers. Per head, of size HS, over u <= t:
//
//   s_tu  = q_t . k_u / sqrt(HS)
//   out_t = sum_u exp(s_tu) v_u / sum_u exp(s_tu)        softmax [arXiv 1706.03762 eq. 1]
//
// The memory is all keys and values, it grows with T. With exp(q . k) replaced by phi(q) . phi(k)
// the sums factor, and the memory is one matrix S and one vector z, whatever T:
//
//   S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t),  phi(x) = elu(x) + 1
//   out_t = S_t^T phi(q_t) / (phi(q_t) . z_t + 1e-6)     linear  [arXiv 2006.16236 eq. 7, 16-20]
//
// A block, of L:  x += W_proj attention(W_qkv norm(x)),  x += W_out gelu(W_fc norm(x) + b1) + b2
//
//   --model              gpt2                      transformer               linear-transformer
//   attention            softmax                   softmax                   linear
//   norm                 scale, shift, eps 1e-5    nothing learned, 1e-8     as transformer
//   biases of attention  yes                       no                        no
//   gelu                 tanh form                 erf form                  erf form
//   embeddings           N(0,0.02)                 N(0,1)                    N(0,1)
//   head                 the token embedding       its own matrix            its own matrix
//
// The baselines of the CausalRN paper (ICML 2024 NGSM workshop), and OpenAI's model of 2019, whose
// published weights --init-from reads. Of images gpt2 has a head of its own.
//
// Letters: C channels, NH heads of size HS = C / NH; B sequences of T positions, N = B T; V
// symbols, L layers; D sequences are decoded at once; phi(q), phi(k) are the papers' features.
// Sections: [mix] attention; [norm], [block] LayerNorm, GELU; [layers] matrix product, embedding,
// cross-entropy; [optimizer] AdamW; [model] tensors, forward, backward, decoding; [train]; [main].
//
// On two CPU cores (the paper's figures: train_gpt2.cu):
//   ./train_gpt2                              copying 16 letters; --model linear-transformer
//   ./train_gpt2 --preset copy-s128           the paper's size, hours here: for the GPU
//   ./train_gpt2 --task text --text FILE --sample 60       the bytes of a file, and its own
//   ./train_gpt2 --task images --images FILE --causal no   its images: data/images.h
//
// Differences from the papers: no dropout; the positions of gpt2 start as N(0,0.02), theirs as
// N(0,0.01); warm-up starts at lr/warmup rather than 0; fp32 throughout.

#define READS_IMAGES
#include "data/tasks.h" // and with it check, log, options, rng, tensors, threads, training
#include "util/published.h"
#include <tgmath.h>
#ifdef REAL_IS_DOUBLE // the tests build this file a second time in double precision
#define float double
#endif
#include "util/patches.h" // what the first layer reads

// From [layers]:
static inline float exp_ps(float x);
static void row_moments(const float *x, size_t n, float *mean, float *var);
static void normalize_forward(float *out, const float *x, size_t N, size_t C);
static void normalize_backward(float *dx, const float *dout, const float *x, size_t N, size_t C);

// ------------------------------------------------------------------------------------------------
// [mix] Attention: softmax over pairs of positions, or linear with a state.

#define ARCHITECTURE "gpt2"
enum { GPT2, TRANSFORMER, LINEAR };

// inner: the sum of x (n) y (n). Not inlined, so that the backward pass gets the forward's bits.
__attribute__((noinline)) static float inner(const float *x, const float *y, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

// add_scaled: y (n) += factor x (n).
static inline void add_scaled(float *y, float factor, const float *x, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        y[i] += factor * x[i];
}

// score: q . k / sqrt(HS) of q, k (HS). Not inlined either, for the same reason.
__attribute__((noinline)) static float score(const float *q, const float *k, size_t HS)
{
    const float scale = 1 / sqrt((double)HS);
    return scale * inner(q, k, HS);
}

// attention_row: one query q (HS) against n keys k and values v, `stride` apart: out (HS) = the
// mean of v_u weighted by exp(s_u), s_u = score(q, k_u). Returns log sum_u exp(s_u). Exponents are
// taken from the largest s so far; when a larger one comes, the sums so far shrink.
static float attention_row(float *out, const float *q, const float *k, const float *v,
                           size_t stride, size_t n, size_t HS)
{
    float max = -INFINITY;
    double sum = 0;
    memset(out, 0, HS * sizeof *out);
    for (size_t u = 0; u < n; u++) {
        float s = score(q, k + u * stride, HS);
        if (s > max) {
            const float shrink = exp_ps(max - s); // 0 at first
            sum *= shrink;
            for (size_t i = 0; i < HS; i++)
                out[i] *= shrink;
            max = s;
        }
        const float p = exp_ps(s - max);
        sum += p;
        add_scaled(out, p, v + u * stride, HS);
    }
    const float over_sum = 1 / sum;
    for (size_t i = 0; i < HS; i++)
        out[i] *= over_sum;
    return max + log(sum);
}

// attention_forward: out (B,T,C) = softmax attention of qkv (B,T,3C): q at 0, k at C, v at 2C, and
// head h of NH at h HS in each, HS = C / NH. Position t of a head sees u <= t; with causal = 0 all:
//   s_tu = q_t . k_u / sqrt(HS),  lse_t = log sum_u exp(s_tu),  out_t = sum_u exp(s_tu - lse_t) v_u
// lse (B,NH,T) = is kept for the backward pass, in nats; no (T,T) is stored.
static void attention_forward(float *out, float *lse, const float *qkv, size_t B, size_t T,
                              size_t C, size_t NH, int causal)
{
    const size_t HS = C / NH, row = 3 * C;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) { // threads own heads of sequences
        const float *q = qkv + i / NH * T * row + i % NH * HS, *k = q + C, *v = k + C;
        float *out_i = out + i / NH * T * C + i % NH * HS;
        for (size_t t = 0; t < T; t++)
            lse[i * T + t] = attention_row(out_i + t * C, q + t * row, k, v, row,
                                           causal ? t + 1 : T, HS);
    }
}

// attention_backward: dqkv (B,T,3C) = from dout (B,T,C) and the forward's out, lse and qkv. With
// p_tu = exp(s_tu - lse_t), recomputed, and ds_tu = p_tu (dout_t . v_u - dout_t . out_t)/sqrt(HS):
//   dq_t = sum_u ds_tu k_u,  dk_u = sum_t ds_tu q_t,  dv_u = sum_t p_tu dout_t
static void attention_backward(float *dqkv, const float *dout, const float *out, const float *lse,
                               const float *qkv, size_t B, size_t T, size_t C, size_t NH,
                               int causal)
{
    const size_t HS = C / NH, row = 3 * C;
    const float scale = 1 / sqrt((double)HS);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        const size_t at = i / NH * T * row + i % NH * HS;
        const float *q = qkv + at, *k = q + C, *v = k + C;
        float *dq = dqkv + at, *dk = dq + C, *dv = dk + C;
        for (size_t t = 0; t < 3 * T; t++) // dq, dk and dv of every position
            memset(dq + t * C, 0, HS * sizeof *dq);
        for (size_t t = 0; t < T; t++) {
            const size_t o = i / NH * T * C + t * C + i % NH * HS;
            const float *q_t = q + t * row, *dout_t = dout + o;
            const float mean = inner(dout_t, out + o, HS); // sum_u p_tu (dout_t . v_u)
            for (size_t u = 0; u < (causal ? t + 1 : T); u++) {
                const float s = score(q_t, k + u * row, HS), p = exp_ps(s - lse[i * T + t]);
                const float ds = p * (inner(dout_t, v + u * row, HS) - mean) * scale;
                add_scaled(dq + t * row, ds, k + u * row, HS);
                add_scaled(dk + u * row, ds, q_t, HS);
                add_scaled(dv + u * row, p, dout_t, HS);
            }
        }
    }
}

// phi: the feature elu(x) + 1 and *slope = its derivative, 1 at 0. Below 0 it is exp(x) as such:
// (exp(x) - 1) + 1 would lose its digits.
static inline float phi(float x, float *slope)
{
    const float e = exp_ps(x);
    *slope = x > 0 ? 1 : e;
    return x > 0 ? x + 1 : e;
}

// state_size: elements of linear attention's state: a matrix S (HS,HS), then a vector z (HS).
static size_t state_size(size_t HS)
{
    return HS * (HS + 1);
}

// state_add: S += phi(x) y^T, z += weight phi(x); x, y (HS).
static void state_add(float *S, const float *x, const float *y, float weight, size_t HS)
{
    float *z = S + HS * HS, slope;
    for (size_t i = 0; i < HS; i++) {
        const float f = phi(x[i], &slope);
        add_scaled(S + i * HS, f, y, HS);
        z[i] += weight * f;
    }
}

// state_read: out (HS) = S^T phi(x); returns z . phi(x).
static float state_read(float *out, const float *S, const float *x, size_t HS)
{
    const float *z = S + HS * HS;
    float slope;
    double sum = 0;
    memset(out, 0, HS * sizeof *out);
    for (size_t i = 0; i < HS; i++) {
        const float f = phi(x[i], &slope);
        add_scaled(out, f, S + i * HS, HS);
        sum += f * z[i];
    }
    return sum;
}

// state_gradient: dx (HS) = phi'(x) (S y + weight z).
static void state_gradient(float *dx, const float *S, const float *x, const float *y, float weight,
                           size_t HS)
{
    const float *z = S + HS * HS;
    for (size_t i = 0; i < HS; i++) {
        float slope;
        phi(x[i], &slope);
        dx[i] = slope * (inner(S + i * HS, y, HS) + weight * z[i]);
    }
}

// linear_attention_step: out (HS) = S^T phi(q) / norm, norm = phi(q) . z + 1e-6, which is returned:
// where every feature underflows to 0, out is 0.
static float linear_attention_step(float *out, const float *S, const float *q, size_t HS)
{
    const float eps = 1e-6, norm = state_read(out, S, q, HS) + eps;
    for (size_t i = 0; i < HS; i++)
        out[i] /= norm;
    return norm;
}

// linear_attention_work: elements of scratch a thread needs: a state and a row.
static size_t linear_attention_work(size_t HS)
{
    return (state_size(HS) + HS + 15) / 16 * 16;
}

// linear_attention_forward: out (B,T,C) = linear attention of qkv (B,T,3C), laid out as for
// attention_forward. Position t of a head sees u <= t; with causal = 0 all:
//   S_t = sum_u phi(k_u) v_u^T,  z_t = sum_u phi(k_u),  norm_t = phi(q_t) . z_t + 1e-6,
//   out_t = S_t^T phi(q_t) / norm_t
// norm (B,NH,T) = is kept for the backward pass; work (threads, linear_attention_work) is scratch.
static void linear_attention_forward(float *out, float *norm, const float *qkv, float *work,
                                     size_t B, size_t T, size_t C, size_t NH, int causal)
{
    const size_t HS = C / NH, row = 3 * C;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        const float *q = qkv + i / NH * T * row + i % NH * HS, *k = q + C, *v = k + C;
        float *out_i = out + i / NH * T * C + i % NH * HS;
        float *S = work + threads_index() * linear_attention_work(HS);
        memset(S, 0, state_size(HS) * sizeof *S);
        for (size_t t = 0; t < T && !causal; t++)
            state_add(S, k + t * row, v + t * row, 1, HS);
        for (size_t t = 0; t < T; t++) {
            if (causal)
                state_add(S, k + t * row, v + t * row, 1, HS);
            norm[i * T + t] = linear_attention_step(out_i + t * C, S, q + t * row, HS);
        }
    }
}

// linear_attention_head_backward: one head of one sequence; `row` apart are q, k, v and their
// gradients, C apart dout and out. With dn_t = dout_t / norm_t and e_t = -(dn_t . out_t), the
// gradients of phi(q_t) . (S_t, z_t), from left to right and then from right to left:
//   dphi(q_t) = S_t dn_t + e_t z_t;  D_t = sum_{u>=t} phi(q_u) dn_u^T, E_t = sum e_u phi(q_u),
//   dphi(k_t) = D_t v_t + E_t,  dv_t = D_t^T phi(k_t)
static void linear_attention_head_backward(float *dq, const float *dout, const float *out,
                                           const float *norm, const float *q, float *S, size_t T,
                                           size_t C, size_t HS, int causal)
{
    const size_t row = 3 * C;
    const float *k = q + C, *v = k + C;
    float *dk = dq + C, *dv = dk + C, *dn = S + state_size(HS);
    for (int pass = 0; pass < 2; pass++) { // S is S, z first and D, E second
        memset(S, 0, state_size(HS) * sizeof *S);
        for (size_t step = 0; step < (causal ? T : 2 * T); step++) {
            const size_t t = pass ? T - 1 - step % T : step % T, at = t * row;
            for (size_t i = 0; i < HS; i++)
                dn[i] = dout[t * C + i] / norm[t];
            const float e = -inner(dn, out + t * C, HS);
            if (step < T && pass)
                state_add(S, q + at, dn, e, HS);
            else if (step < T)
                state_add(S, k + at, v + at, 1, HS);
            if (!causal && step < T) // first the sum over all, then the gradients
                continue;
            if (pass) {
                state_gradient(dk + at, S, k + at, v + at, 1, HS);
                state_read(dv + at, S, k + at, HS);
            } else
                state_gradient(dq + at, S, q + at, dn, e, HS);
        }
    }
}

// linear_attention_backward: dqkv (B,T,3C) = from dout (B,T,C), the forward's out, norm, qkv; work.
static void linear_attention_backward(float *dqkv, const float *dout, const float *out,
                                      const float *norm, const float *qkv, float *work, size_t B,
                                      size_t T, size_t C, size_t NH, int causal)
{
    const size_t HS = C / NH;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < B * NH; i++) {
        const size_t at = i / NH * T * C + i % NH * HS, at3 = i / NH * T * 3 * C + i % NH * HS;
        linear_attention_head_backward(dqkv + at3, dout + at, out + at, norm + i * T, qkv + at3,
                                       work + threads_index() * linear_attention_work(HS), T, C,
                                       HS, causal);
    }
}

// attention_decode: position t of a sequence: out (C) = softmax attention of qkv (3C) over the
// positions before and itself; cache (T,2C): the keys and values so far, which it extends.
static void attention_decode(float *out, float *cache, const float *qkv, size_t t, size_t C,
                             size_t NH)
{
    const size_t HS = C / NH;
    memcpy(cache + t * 2 * C, qkv + C, 2 * C * sizeof *qkv);
    for (size_t h = 0; h < NH; h++)
        attention_row(out + h * HS, qkv + h * HS, cache + h * HS, cache + C + h * HS, 2 * C, t + 1,
                      HS);
}

// linear_attention_decode: the same with state (NH, state_size), which t = 0 clears first.
static void linear_attention_decode(float *out, float *state, const float *qkv, size_t t, size_t C,
                                    size_t NH)
{
    const size_t HS = C / NH;
    if (t == 0)
        memset(state, 0, NH * state_size(HS) * sizeof *state);
    for (size_t h = 0; h < NH; h++) {
        float *S = state + h * state_size(HS);
        const float *q = qkv + h * HS;
        state_add(S, q + C, q + 2 * C, 1, HS);
        linear_attention_step(out + h * HS, S, q, HS);
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
// [block] What stands around attention: the model's norm, GELU.

// norm_forward: out (N,C) = the model's norm of x (N,C): LayerNorm, or without a weight normalize.
static void norm_forward(float *out, const float *x, const float *weight, const float *bias,
                         size_t N, size_t C)
{
    weight ? layernorm_forward(out, x, weight, bias, N, C) : normalize_forward(out, x, N, C);
}

// norm_backward: dx (N,C) +=, dweight (C) +=, dbias (C) += from dout (N,C), which it may overwrite.
static void norm_backward(float *dx, float *dweight, float *dbias, float *dout, const float *x,
                          const float *weight, size_t N, size_t C)
{
    weight ? layernorm_backward(dx, dweight, dbias, dout, x, weight, N, C)
           : normalize_backward(dx, dout, x, N, C);
}

// gelu_erf: x times the normal distribution function at x; *slope = its derivative. A polynomial,
// vectorised, halves the time of a step beside libm's erf; error 1e-7.  [Abramowitz, Stegun 7.1.26]
static inline float gelu_erf(float x, float *slope)
{
    const float sqrt_half = 0.70710678118654752, density = 0.39894228040143268; // 1 / sqrt(2 pi)
    const float z = fabs(x) * sqrt_half, e = exp_ps(-z * z);
#ifdef REAL_IS_DOUBLE
    const float tail = erfc(z) / 2;
#else
    const float rate = 0.3275911, c1 = 0.254829592, c2 = -0.284496736, c3 = 1.421413741;
    const float c4 = -1.453152027, c5 = 1.061405429, t = 1 / (1 + rate * z);
    const float tail = t * (c1 + t * (c2 + t * (c3 + t * (c4 + t * c5)))) * e / 2;
#endif
    const float p = x < 0 ? tail : 1 - tail;
    *slope = p + x * density * e;
    return x * p;
}

// gelu_forward: out (n) = gelu of x (n), in its tanh form or its erf form.
static void gelu_forward(float *out, const float *x, size_t n, int tanh_form)
{
    float slope;
#pragma omp parallel for simd private(slope) if (n > 65536)
    for (size_t i = 0; i < n; i++)
        out[i] = tanh_form ? gelu_tanh(x[i], &slope) : gelu_erf(x[i], &slope);
}

// gelu_backward: dx (n) = dout (n) gelu'(x); dx may alias dout.
static void gelu_backward(float *dx, const float *dout, const float *x, size_t n, int tanh_form)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) {
        float slope;
        tanh_form ? gelu_tanh(x[i], &slope) : gelu_erf(x[i], &slope);
        dx[i] = dout[i] * slope;
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
// [model] Tensors, forward, backward, decoding, published weights.

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

typedef struct {
    float *x, *r1, *qkv, *lse, *norm, *o, *mid, *r2, *h, *g, *y, *logits, *losses, *patches;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *dqkv, *d_o, *dh, *dlogits, *work;
} Dacts;

// What a layer remembers while decoding: the keys and values so far, or the state.
typedef struct {
    float *cache, *state;
} State;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, NH, L, decode_B, positions;
    Weights weights;
    Params params, grads;
    Acts acts;
    Dacts dacts;
    State state;
    Arena acts_arena, dacts_arena, state_arena;
    Batch batch;
    double loss; // nats, mean over the supervised positions of the batch
} Model;

#define MODELS "gpt2|transformer|linear-transformer"

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    static const char *const names[] = {"gpt2", "transformer", "linear-transformer"};
    return names[c->model];
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

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
    const size_t NH = m->NH = (size_t)config->heads, P = m->positions = task_longest(shape);
    const size_t D = m->decode_B = !config->causal ? 0 : B < 32 ? B : 32, HS = C / NH;
    const size_t linear = config->model == LINEAR ? L : 0, softmax = L - linear;
    const size_t patch = task_patch(m->task, &config->task_options);
    const Tensor acts[] = { // x[0] is the embedding; mid: between attention and MLP; y = norm(x[L])
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r1", Acts, r1, L, B, T, C),
        ACTIVATION("qkv", Acts, qkv, L, B, T, 3 * C),
        ACTIVATION("lse", Acts, lse, softmax, B, NH, T),
        ACTIVATION("normaliser", Acts, norm, linear, B, NH, T),
        ACTIVATION("o", Acts, o, L, B, T, C), ACTIVATION("mid", Acts, mid, L, B, T, C),
        ACTIVATION("r2", Acts, r2, L, B, T, C), ACTIVATION("h", Acts, h, L, B, T, 4 * C),
        ACTIVATION("g", Acts, g, L, B, T, 4 * C), ACTIVATION("y", Acts, y, B, T, C),
        ACTIVATION("logits", Acts, logits, B, T, V), ACTIVATION("losses", Acts, losses, B, T),
        ACTIVATION("patches", Acts, patches, patch ? B : 0, T, patch),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("dqkv", Dacts, dqkv, B, T, 3 * C), ACTIVATION("do", Dacts, d_o, B, T, C),
        ACTIVATION("dh", Dacts, dh, B, T, 4 * C), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, linear ? threads_count() : 0, linear_attention_work(HS)),
    };
    const Tensor state[] = {
        ACTIVATION("cache", State, cache, D ? softmax : 0, D, P, 2 * C),
        ACTIVATION("state", State, state, D ? linear : 0, D, NH, state_size(HS)),
    };
    params_plan(m, patch);
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
}

// model_flops: floating-point operations of one update: per token 6 a weight, the head's included,
// and per channel, layer and token 12 a pair of positions, or 12 HS with a state.
static double model_flops(const Model *m)
{
    double pairs = m->config.causal ? ((double)m->T + 1) / 2 : (double)m->T;
    double mixed = m->config.model == LINEAR ? (double)(m->C / m->NH) : pairs;
    double weights = (double)(m->L * 12 * m->C * m->C + m->V * m->C);
    return (double)m->config.training.accumulate * (double)(m->B * m->T) *
           (6 * weights + 12 * (double)(m->L * m->C) * mixed);
}

// from: element n of x, NULL where x does not exist.
static float *from(float *x, size_t n)
{
    return x ? x + n : NULL;
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t N = m->B * m->T, C = l * N * m->C, heads = l * N * m->NH;
    const Acts *a = &m->acts;
    return (Acts){.x = a->x + C, .r1 = a->r1 + C, .qkv = a->qkv + 3 * C, .o = a->o + C,
                  .lse = from(a->lse, heads), .norm = from(a->norm, heads), .mid = a->mid + C,
                  .r2 = a->r2 + C, .h = a->h + 4 * C, .g = a->g + 4 * C};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Params *p, size_t l, size_t C)
{
    const size_t b = l * C, w = l * C * C;
    return (Params){.ln1_w = from(p->ln1_w, b), .ln1_b = from(p->ln1_b, b),
                    .qkv_w = p->qkv_w + 3 * w, .qkv_b = from(p->qkv_b, 3 * b),
                    .proj_w = p->proj_w + w, .proj_b = from(p->proj_b, b),
                    .ln2_w = from(p->ln2_w, b), .ln2_b = from(p->ln2_b, b),
                    .fc_w = p->fc_w + 4 * w, .fc_b = p->fc_b + 4 * b,
                    .out_w = p->out_w + 4 * w, .out_b = p->out_b + b};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, L = m->L, N = B * T;
    const int causal = m->config.causal, gpt2 = m->config.model == GPT2;
    Params all = m->params;
    Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    input_forward(acts.x, acts.patches, &m->batch, all.wte, all.patch_w, all.cls, all.wpe, C);
    for (size_t l = 0; l < L; l++) {
        Acts k = layer_acts(m, l);
        Params p = layer_params(&m->params, l, C);
        float *next = k.x + N * C; // x of the layer after
        norm_forward(k.r1, k.x, p.ln1_w, p.ln1_b, N, C);
        matmul_forward(k.qkv, k.r1, p.qkv_w, p.qkv_b, N, C, 3 * C, 0);
        if (k.norm)
            linear_attention_forward(k.o, k.norm, k.qkv, m->dacts.work, B, T, C, NH, causal);
        else
            attention_forward(k.o, k.lse, k.qkv, B, T, C, NH, causal);
        memcpy(k.mid, k.x, N * C * sizeof(float));
        matmul_forward(k.mid, k.o, p.proj_w, p.proj_b, N, C, C, 1);
        norm_forward(k.r2, k.mid, p.ln2_w, p.ln2_b, N, C);
        matmul_forward(k.h, k.r2, p.fc_w, p.fc_b, N, C, 4 * C, 0);
        gelu_forward(k.g, k.h, N * 4 * C, gpt2);
        memcpy(next, k.mid, N * C * sizeof(float));
        matmul_forward(next, k.g, p.out_w, p.out_b, N, 4 * C, C, 1);
    }
    norm_forward(acts.y, acts.x + L * N * C, all.lnf_w, all.lnf_b, N, C);
    matmul_forward(acts.logits, acts.y, all.head_w ? all.head_w : all.wte, NULL, N, C, m->V, 0);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, L = m->L, N = B * T;
    const int causal = m->config.causal, gpt2 = m->config.model == GPT2;
    Params all = m->params, sums = m->grads;
    Acts acts = m->acts;
    Dacts d = m->dacts;
    matmul_backward(d.dr, all.head_w ? sums.head_w : sums.wte, NULL, d.dlogits, acts.y,
                    all.head_w ? all.head_w : all.wte, N, C, m->V, 0);
    memset(d.dx, 0, N * C * sizeof(float));
    norm_backward(d.dx, sums.lnf_w, sums.lnf_b, d.dr, acts.x + L * N * C, all.lnf_w, N, C);
    for (size_t l = L; l-- > 0;) {
        Acts k = layer_acts(m, l);
        Params p = layer_params(&m->params, l, C), g = layer_params(&m->grads, l, C);
        matmul_backward(d.dh, g.out_w, g.out_b, d.dx, k.g, p.out_w, N, 4 * C, C, 0);
        gelu_backward(d.dh, d.dh, k.h, N * 4 * C, gpt2);
        matmul_backward(d.dr, g.fc_w, g.fc_b, d.dh, k.r2, p.fc_w, N, C, 4 * C, 0);
        norm_backward(d.dx, g.ln2_w, g.ln2_b, d.dr, k.mid, p.ln2_w, N, C);
        matmul_backward(d.d_o, g.proj_w, g.proj_b, d.dx, k.o, p.proj_w, N, C, C, 0);
        if (k.norm)
            linear_attention_backward(d.dqkv, d.d_o, k.o, k.norm, k.qkv, d.work, B, T, C, NH,
                                      causal);
        else
            attention_backward(d.dqkv, d.d_o, k.o, k.lse, k.qkv, B, T, C, NH, causal);
        matmul_backward(d.dr, g.qkv_w, g.qkv_b, d.dqkv, k.r1, p.qkv_w, N, C, 3 * C, 0);
        norm_backward(d.dx, g.ln1_w, g.ln1_b, d.dr, k.x, p.ln1_w, N, C);
    }
    input_backward(sums.wte, sums.patch_w, sums.cls, sums.wpe, d.dx, acts.patches, &m->batch, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. Dies when t is past the T learned positions.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, NH = m->NH, T = m->positions, state = NH * state_size(C / NH);
    const int gpt2 = m->config.model == GPT2;
    const Params all = m->params;
    const Dacts d = m->dacts;
    decode_check(t, T);
    embed_forward(d.dx, tokens, all.wte, all.wpe + t * C, D, 1, C);
    for (size_t l = 0; l < m->L; l++) {
        const Params p = layer_params(&m->params, l, C);
        norm_forward(d.dr, d.dx, p.ln1_w, p.ln1_b, D, C);
        matmul_forward(d.dqkv, d.dr, p.qkv_w, p.qkv_b, D, C, 3 * C, 0);
#pragma omp parallel for
        for (size_t i = 0; i < D; i++) {
            const size_t at = l * m->decode_B + i;
            if (m->config.model == LINEAR)
                linear_attention_decode(d.d_o + i * C, m->state.state + at * state,
                                        d.dqkv + i * 3 * C, t, C, NH);
            else
                attention_decode(d.d_o + i * C, m->state.cache + at * T * 2 * C,
                                 d.dqkv + i * 3 * C, t, C, NH);
        }
        matmul_forward(d.dx, d.d_o, p.proj_w, p.proj_b, D, C, C, 1);
        norm_forward(d.dr, d.dx, p.ln2_w, p.ln2_b, D, C);
        matmul_forward(d.dh, d.dr, p.fc_w, p.fc_b, D, C, 4 * C, 0);
        gelu_forward(d.dh, d.dh, D * 4 * C, gpt2);
        matmul_forward(d.dx, d.dh, p.out_w, p.out_b, D, 4 * C, C, 1);
    }
    norm_forward(d.dr, d.dx, all.lnf_w, all.lnf_b, D, C);
    matmul_forward(d.dlogits, d.dr, gpt2 ? all.wte : all.head_w, NULL, D, C, m->V, 0);
    return d.dlogits;
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
                  "train_gpt2: GPT-2 and Transformers on the CPU. Without options: copying 16 "
                  "letters.", preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 1);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    training_print(model_name(&config), &model.weights, "wte,wpe", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model_alloc(&model);
    if (config.init_from)
        published_load(&model.weights.params, config.init_from, PUBLISHED, model.L,
                       "lm_head.weight", "wte");
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
