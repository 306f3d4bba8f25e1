// gpt2_plain.h: attention as a table of weights (T,T), in double, softmax and linear alike, and its
// derivative through that table. Slow; what the faster forms are held against. Included after
// train_gpt2.c and dev/testing_model.h (take).
#ifndef SEQ_DEV_GPT2_PLAIN_H
#define SEQ_DEV_GPT2_PLAIN_H

// plain_feature: elu(x) + 1 and its derivative.
static inline double plain_feature(double x, double *slope)
{
    *slope = x > 0 ? 1 : exp(x);
    return x > 0 ? x + 1 : exp(x);
}

// plain_head: one head of one sequence: out (T,HS), dq, dk, dv (T,HS) = from q, k, v, dout (T,HS).
// weight[t,u] = e[t,u] / (sum_u e[t,u] + eps), e = exp(q_t . k_u / sqrt(HS)) up to a factor of the
// row, eps = 0; or e = feature(q_t) . feature(k_u), eps = 1e-6. w, dw (T): scratch.
static inline void plain_head(double *out, double *dq, double *dk, double *dv, const double *q,
                              const double *k, const double *v, const double *dout, size_t T,
                              size_t HS, int causal, int linear, double *w, double *dw)
{
    double slope;
    for (size_t t = 0; t < T; t++) {
        const size_t n = causal ? t + 1 : T;
        double top = -INFINITY, sum = linear ? 1e-6 : 0, mean = 0;
        for (size_t u = 0; u < n; u++) {
            w[u] = 0;
            for (size_t i = 0; i < HS; i++)
                w[u] += linear ? plain_feature(q[t * HS + i], &slope) *
                                     plain_feature(k[u * HS + i], &slope)
                               : q[t * HS + i] * k[u * HS + i] / sqrt((double)HS);
            top = w[u] > top ? w[u] : top;
        }
        for (size_t u = 0; u < n; u++)
            sum += w[u] = linear ? w[u] : exp(w[u] - top);
        for (size_t u = 0; u < n; u++) {
            w[u] /= sum;
            dw[u] = 0;
            for (size_t i = 0; i < HS; i++) {
                out[t * HS + i] += w[u] * v[u * HS + i];
                dv[u * HS + i] += w[u] * dout[t * HS + i];
                dw[u] += dout[t * HS + i] * v[u * HS + i];
            }
            mean += w[u] * dw[u];
        }
        for (size_t u = 0; u < n; u++) { // through the division, and then e
            const double de = linear ? (dw[u] - mean) / sum
                                     : w[u] * (dw[u] - mean) / sqrt((double)HS);
            for (size_t i = 0; i < HS; i++) {
                const double q_i = q[t * HS + i], k_i = k[u * HS + i];
                double q_slope = 1, k_slope = 1;
                const double f = linear ? plain_feature(q_i, &q_slope) : q_i;
                const double g = linear ? plain_feature(k_i, &k_slope) : k_i;
                dq[t * HS + i] += de * g * q_slope;
                dk[u * HS + i] += de * f * k_slope;
            }
        }
    }
}

// plain_attention: out (B,T,C), dqkv (B,T,3C) = from qkv (B,T,3C) and dout (B,T,C), head by head.
static inline void plain_attention(double *out, double *dqkv, const float *qkv, const float *dout,
                                   size_t B, size_t T, size_t C, size_t NH, int causal, int linear)
{
    const size_t HS = C / NH, n = T * HS;
    double *x[10]; // q, k, v, dout, out, dq, dk, dv of one head, scratch
    for (size_t i = 0; i < 10; i++)
        x[i] = take(n * sizeof(double));
    for (size_t head = 0; head < B * NH; head++) {
        const size_t b = head / NH, h = head % NH;
        for (size_t t = 0; t < T; t++)
            for (size_t i = 0; i < HS; i++) {
                const size_t row = b * T + t, at = t * HS + i;
                for (size_t part = 0; part < 3; part++)
                    x[part][at] = qkv[row * 3 * C + part * C + h * HS + i];
                x[3][at] = dout[row * C + h * HS + i];
                for (size_t part = 4; part < 8; part++)
                    x[part][at] = 0;
            }
        plain_head(x[4], x[5], x[6], x[7], x[0], x[1], x[2], x[3], T, HS, causal, linear,
                   x[8], x[9]);
        for (size_t t = 0; t < T; t++)
            for (size_t i = 0; i < HS; i++) {
                const size_t row = b * T + t, at = t * HS + i;
                out[row * C + h * HS + i] = x[4][at];
                for (size_t part = 0; part < 3; part++)
                    dqkv[row * 3 * C + part * C + h * HS + i] = x[5 + part][at];
            }
    }
}

#endif
