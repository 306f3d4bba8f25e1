// delta_reference.h: the delta rule forward and backward in double, token after token, as the
// equations on top of train_deltanet.c stand. No CUDA.
#ifndef SEQ_DEV_DELTA_REFERENCE_H
#define SEQ_DEV_DELTA_REFERENCE_H

#include "../../util/check.h"

// What the reference makes of a head, rows (T,HS): out; dq, dk, dv; dbeta (T); S_T and dS_0
// (HS,HS), values by keys.
typedef struct {
    double *out, *dq, *dk, *dv, *dbeta, *final, *dinitial;
} DeltaReference;

// delta_reference_new: memory for a head, all of it at `out`: free that.
static DeltaReference delta_reference_new(size_t T, size_t HS)
{
    DeltaReference r;
    r.out = (double *)alloc_zero(4 * T * HS + T + 2 * HS * HS, 8, "reference");
    r.dq = r.out + T * HS, r.dk = r.dq + T * HS, r.dv = r.dk + T * HS, r.dbeta = r.dv + T * HS;
    r.final = r.dbeta + T, r.dinitial = r.final + HS * HS;
    return r;
}

// reference_forward_step: S becomes S_t; the error e, u = beta e and out (HS) = from q, k, v, beta
// of token t.
static void reference_forward_step(double *out, double *u, double *e, double *S, const float *q,
                                   const float *k, const float *v, double beta, size_t HS)
{
    for (size_t i = 0; i < HS; i++) {
        double *row = S + i * HS, sum = (double)v[i], o = 0;
        for (size_t j = 0; j < HS; j++)
            sum -= row[j] * (double)k[j];
        e[i] = sum;
        u[i] = beta * sum;
        for (size_t j = 0; j < HS; j++) {
            row[j] += u[i] * (double)k[j];
            o += row[j] * (double)q[j];
        }
        out[i] = o / sqrt((double)HS);
    }
}

// reference_backward_step: from S_t and the gradient G of it to S_{t-1} and its gradient, with the
// gradients (HS) of token t, from its u and e; returns dbeta.
static double reference_backward_step(double *dq, double *dk, double *dv, double *S, double *G,
                                      const double *u, const double *e, const float *dout,
                                      const float *q, const float *k, double beta, size_t HS)
{
    const double s = 1 / sqrt((double)HS);
    double dbeta = 0;
    for (size_t i = 0; i < HS; i++) {
        double *row = S + i * HS, *grad = G + i * HS, du = 0;
        const double d = s * (double)dout[i];
        for (size_t j = 0; j < HS; j++) {
            dq[j] += d * row[j];
            grad[j] += d * (double)q[j];
            du += grad[j] * (double)k[j];
        }
        dbeta += du * e[i];
        dv[i] = beta * du;
        for (size_t j = 0; j < HS; j++) {
            dk[j] += grad[j] * u[i];
            row[j] -= u[i] * (double)k[j];
            dk[j] -= row[j] * dv[i];
            grad[j] -= dv[i] * (double)k[j];
        }
    }
    return dbeta;
}

// delta_reference: r = of one head, from q, k, v (T, ) `pitch` apart, dout `stride` apart, beta
// likewise `heads` apart, initial and dfinal (HS,HS), NULL: zero.
static void delta_reference(DeltaReference r, const float *q, const float *k, const float *v,
                            size_t pitch, const float *dout, size_t stride, const float *beta,
                            size_t heads, const float *initial, const float *dfinal, size_t T,
                            size_t HS)
{
    double *S = (double *)alloc_zero(HS * HS + 2 * T * HS, 8, "reference");
    double *u = S + HS * HS, *e = u + T * HS;
    for (size_t i = 0; i < HS * HS; i++) {
        S[i] = initial ? (double)initial[i] : 0;
        r.dinitial[i] = dfinal ? (double)dfinal[i] : 0;
    }
    for (size_t t = 0; t < T; t++)
        reference_forward_step(r.out + t * HS, u + t * HS, e + t * HS, S, q + t * pitch,
                               k + t * pitch, v + t * pitch, (double)beta[t * heads], HS);
    memcpy(r.final, S, HS * HS * 8);
    for (size_t t = T; t-- > 0;)
        r.dbeta[t] = reference_backward_step(
            r.dq + t * HS, r.dk + t * HS, r.dv + t * HS, S, r.dinitial, u + t * HS, e + t * HS,
            dout + t * stride, q + t * pitch, k + t * pitch, (double)beta[t * heads], HS);
    free(S);
}

#endif
