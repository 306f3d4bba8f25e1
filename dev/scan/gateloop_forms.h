// gateloop_forms.h: two other forms of GateLoop's recurrence, in double: as attention, which needs
// no memory, and as an associative scan, which needs no order. Included after train_gateloop.c,
// whose words for --transition they share; test_gateloop.c holds all three equal.
//
// surrogate attention: y_l = sum_{m<=l} A_lm v_m, for each head the real weights
//   A_lm = sum_c q_lc k_mc exp(sum_{m<j<=l} ln r_jc) cos(sum_{m<j<=l} theta_jc)    c: its channels
// The sums start at l and go back: exponents are <= 0 and nothing is divided, where the quotient of
// two running products underflows after a hundred tokens.
// scan: (a1, x1) then (a2, x2) is (a2 a1, a2 x1 + x2), the identity (1, 0); halves of any length.
#ifndef SEQ_DEV_GATELOOP_FORMS_H
#define SEQ_DEV_GATELOOP_FORMS_H

#include <complex.h>

// gate_logs: ln r and theta of the transition of logits alpha, beta. [the list in train_gateloop.c]
static inline double gate_logs(double *theta, double alpha, double beta, int kind)
{
    const double x = kind == CART          ? hypot(alpha, beta)
                     : kind == REAL_SIGNED ? fabs(alpha)
                                           : alpha;
    *theta = kind == CART                       ? atan2(beta, alpha)
             : kind == REAL_SIGNED && alpha < 0 ? acos(-1.0)
             : kind == SEP_RELU                 ? fmax(beta, 0)
                                                : beta;
    return kind == STABLE_EXP ? -exp(alpha) : fmin(x, 0) - log1p(exp(-fabs(x)));
}

// gate_logs_at: those of channel c of C at a position, from its logits (parts C).
static inline double gate_logs_at(double *theta, const float *logits, size_t c, size_t C, int kind)
{
    const int fixed = kind == FIXED || kind == FIXED_REAL;
    *theta = 0;
    if (kind == ONES)
        return 0;
    return gate_logs(theta, logits[c] + (fixed ? log(exp2(1 + 7 * (c + 0.5) / C) - 1) : 0),
                     gate_parts(kind) > 1 ? (double)logits[C + c] : 0, kind);
}

// surrogate_row: the weights (NH,T) of position l of one sequence, 0 for m > l, from qkvg (T,4C)
// and logits (T,parts C).
static inline void surrogate_row(double *weights, const float *qkvg, const float *logits, size_t l,
                                 size_t T, size_t C, size_t HS, int kind)
{
    memset(weights, 0, C / HS * T * sizeof *weights);
    for (size_t c = 0; c < C; c++) {
        double log_r = 0, angle = 0, theta;
        for (size_t m = l + 1; m-- > 0 && log_r > -750;) { // below, exp is 0
            weights[c / HS * T + m] += (double)qkvg[l * 4 * C + c] * qkvg[m * 4 * C + C + c] *
                                       exp(log_r) * cos(angle);
            log_r += gate_logs_at(&theta, logits + m * gate_parts(kind) * C, c, C, kind);
            angle += theta;
        }
    }
}

// surrogate_forward: y (C) of position l of one sequence.
static inline void surrogate_forward(double *y, const float *qkvg, const float *logits, size_t l,
                                     size_t T, size_t C, size_t HS, int kind)
{
    double *weights = (double *)alloc_zero(C / HS * T, sizeof *weights, "attention");
    surrogate_row(weights, qkvg, logits, l, T, C, HS, kind);
    memset(y, 0, C * sizeof *y);
    for (size_t c = 0; c < C; c++)
        for (size_t m = 0; m <= l; m++)
            y[c] += weights[c / HS * T + m] * qkvg[m * 4 * C + 2 * C + c];
    free(weights);
}

// scan_tree: a, x (n) of one channel: x becomes the state at each position, where that before the
// first is 0, and a the product of the transitions so far.
static inline void scan_tree(double complex *a, double complex *x, size_t n)
{
    const size_t half = n / 2;
    if (n < 2)
        return;
    scan_tree(a, x, half);
    scan_tree(a + half, x + half, n - half);
    for (size_t i = half; i < n; i++) {
        x[i] += a[i] * x[half - 1];
        a[i] *= a[half - 1];
    }
}

#endif
