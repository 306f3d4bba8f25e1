// attention_reference.h: attention forward and backward in double, row after row as the equations
// on top of train_gpt2.cu stand, and inputs for it. No CUDA.
#ifndef SEQ_DEV_ATTENTION_REFERENCE_H
#define SEQ_DEV_ATTENTION_REFERENCE_H

#include "../../util/check.h"

// reference_dot: x.y over n.
static double reference_dot(const double *x, const double *y, size_t n)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

// reference_add: y += a x over n.
static void reference_add(double *y, double a, const double *x, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        y[i] += a * x[i];
}

// reference_head: out (T,HS), lse (T) (linear: norm), and d (3,T,HS) = dq, dk, dv of one head, from
// qkv (T, 3C) and dout (T,C), both at the head's first channel.
static void reference_head(double *out, double *lse, double *d, const float *qkv, const float *dout,
                           size_t T, size_t C, size_t HS, int causal, int linear)
{
    const double scale = linear ? 1 : 1 / sqrt((double)HS);
    double *x = (double *)alloc_zero(3 * T * HS + HS + 2 * T, 8, "reference"); // q, k, v
    double *g = x + 3 * T * HS, *p = g + HS, *s = p + T;
    double *dq = d, *dk = d + T * HS, *dv = dk + T * HS;
    for (size_t i = 0; i < 3 * T * HS; i++) {
        const double raw = (double)qkv[i / HS % T * 3 * C + i / HS / T * C + i % HS];
        x[i] = linear && i < 2 * T * HS ? (raw > 0 ? raw + 1 : exp(raw)) : raw;
    }
    for (size_t t = 0; t < T; t++) {
        const double *q = x + t * HS, *k = x + T * HS, *v = k + T * HS;
        const size_t n = causal ? t + 1 : T;
        double top = -INFINITY, sum = 0, D;
        for (size_t u = 0; u < n; u++) {
            s[u] = scale * reference_dot(q, k + u * HS, HS);
            top = fmax(top, s[u]);
        }
        for (size_t u = 0; u < n; u++)
            sum += p[u] = linear ? s[u] : exp(s[u] - top);
        sum += linear ? 1e-6 : 0;
        lse[t] = linear ? sum : top + log(sum);
        memset(out + t * HS, 0, HS * sizeof *out);
        for (size_t u = 0; u < n; u++)
            reference_add(out + t * HS, p[u] /= sum, v + u * HS, HS);
        for (size_t i = 0; i < HS; i++)
            g[i] = (double)dout[t * C + i];
        D = reference_dot(g, out + t * HS, HS);
        for (size_t u = 0; u < n; u++) {
            double ds = (reference_dot(g, v + u * HS, HS) - D) * (linear ? 1 / sum : p[u] * scale);
            ds = linear || n > 1 ? ds : 0; // p = 1 whatever q and k are
            reference_add(dq + t * HS, ds, k + u * HS, HS);
            reference_add(dk + u * HS, ds, q, HS);
            reference_add(dv + u * HS, p[u], g, HS);
        }
    }
    for (size_t i = 0; linear && i < 2 * T * HS; i++)
        d[i] *= x[i] > 1 ? 1 : x[i]; // phi' = phi where x <= 0
    free(x);
}

// reference_attention: out (B,T,C), lse (B,NH,T), dq, dk, dv (B,T,C) from qkv (B,T,3C) and dout
// (B,T,C). Heads and sequences that repeat with the periods given are computed once.
static void reference_attention(double *out, double *lse, double *dq, double *dk, double *dv,
                                const float *qkv, const float *dout, size_t B, size_t T, size_t C,
                                size_t NH, int causal, int linear, size_t b_period, size_t h_period)
{
    const size_t HS = C / NH, nb = B < b_period ? B : b_period, nh = NH < h_period ? NH : h_period;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < nb * nh; i++) {
        const size_t b0 = i / nh, h0 = i % nh;
        double *o = (double *)alloc_zero(4 * T * HS + T, 8, "reference"), *d = o + T * HS;
        double *l = d + 3 * T * HS;
        reference_head(o, l, d, qkv + b0 * T * 3 * C + h0 * HS, dout + b0 * T * C + h0 * HS, T, C,
                       HS, causal, linear);
        for (size_t b = b0; b < B; b += nb)
            for (size_t h = h0; h < NH; h += nh)
                for (size_t t = 0; t < T; t++) {
                    const size_t at = (b * T + t) * C + h * HS;
                    lse[(b * NH + h) * T + t] = l[t];
                    memcpy(out + at, o + t * HS, HS * 8);
                    memcpy(dq + at, d + t * HS, HS * 8);
                    memcpy(dk + at, d + (T + t) * HS, HS * 8);
                    memcpy(dv + at, d + (2 * T + t) * HS, HS * 8);
                }
        free(o);
    }
}

#endif
