// gla_reference.h: gated linear attention forward and backward in double, token after token, as the
// equations on top of train_metala.c stand. No CUDA.
#ifndef SEQ_DEV_GLA_REFERENCE_H
#define SEQ_DEV_GLA_REFERENCE_H

#include "../../util/check.h"

enum { REFERENCE_CS = 64 }; // tokens between states that are kept

// What the reference makes of a head: out, dv (T,DV); dq, dk, dg (T,DK); S_T and dS_0 (DK,DV).
typedef struct {
    double *out, *dv, *dq, *dk, *dg, *final, *dinitial;
} GlaReference;

// A head: rows of q, k, g, `keys` apart, of v, dout `values` apart; initial, dfinal NULL: zero.
typedef struct {
    const float *q, *k, *g, *v, *dout, *initial, *dfinal;
    size_t T, DK, DV, keys, values;
    double scale;
} GlaHead;

// gla_reference_new: memory for a head, all of it at `out`: free that.
static GlaReference gla_reference_new(size_t T, size_t DK, size_t DV)
{
    GlaReference r;
    r.out = (double *)alloc_zero(2 * T * DV + 3 * T * DK + 2 * DK * DV, 8, "reference");
    r.dv = r.out + T * DV, r.dq = r.dv + T * DV, r.dk = r.dq + T * DK, r.dg = r.dk + T * DK;
    r.final = r.dg + T * DK, r.dinitial = r.final + DK * DV;
    return r;
}

// reference_forward_step: next = S_t from S = S_{t-1} (may be the same); out (DV), unless NULL.
static void reference_forward_step(double *out, double *next, const double *S, const GlaHead *x,
                                   size_t t)
{
    const float *v = x->v + t * x->values;
    for (size_t j = 0; j < x->DV && out; j++)
        out[j] = 0;
    for (size_t i = 0; i < x->DK; i++) {
        const double a = exp((double)x->g[t * x->keys + i]), k = (double)x->k[t * x->keys + i];
        const double q = x->scale * (double)x->q[t * x->keys + i];
        for (size_t j = 0; j < x->DV; j++) {
            next[i * x->DV + j] = a * S[i * x->DV + j] + k * (double)v[j];
            if (out)
                out[j] += q * next[i * x->DV + j];
        }
    }
}

// reference_backward_step: gradients of token t from S_{t-1} and D, the gradient of S_t but for
// this token's output, which becomes that of S_{t-1}.
static void reference_backward_step(GlaReference r, double *D, const double *S, const GlaHead *x,
                                    size_t t)
{
    const float *v = x->v + t * x->values, *dout = x->dout + t * x->values;
    for (size_t i = 0; i < x->DK; i++) {
        const size_t at = t * x->keys + i, to = t * x->DK + i;
        const double a = exp((double)x->g[at]), k = (double)x->k[at], q = (double)x->q[at];
        for (size_t j = 0; j < x->DV; j++) {
            double *D_ij = D + i * x->DV + j;
            const double S_ij = S[i * x->DV + j], o = x->scale * (double)dout[j];
            r.dq[to] += o * (a * S_ij + k * (double)v[j]);
            *D_ij += q * o;
            r.dk[to] += *D_ij * (double)v[j];
            r.dv[t * x->DV + j] += *D_ij * k;
            *D_ij *= a;
            r.dg[to] += *D_ij * S_ij;
        }
    }
}

// gla_reference: r, zero before, = of a head.
static void gla_reference(GlaReference r, const GlaHead *x)
{
    const size_t size = x->DK * x->DV, chunks = (x->T + REFERENCE_CS - 1) / REFERENCE_CS;
    double *kept = (double *)alloc_zero((chunks + REFERENCE_CS + 1) * size, 8, "reference");
    double *each = kept + chunks * size; // S before every token of a chunk
    for (size_t i = 0; i < size; i++) {
        r.final[i] = x->initial ? (double)x->initial[i] : 0;
        r.dinitial[i] = x->dfinal ? (double)x->dfinal[i] : 0;
    }
    for (size_t t = 0; t < x->T; t++) {
        if (t % REFERENCE_CS == 0)
            memcpy(kept + t / REFERENCE_CS * size, r.final, size * 8);
        reference_forward_step(r.out + t * x->DV, r.final, r.final, x, t);
    }
    for (size_t c = chunks; c-- > 0;) {
        const size_t lo = c * REFERENCE_CS, left = x->T - lo;
        const size_t n = left < REFERENCE_CS ? left : REFERENCE_CS;
        memcpy(each, kept + c * size, size * 8);
        for (size_t t = 0; t < n; t++)
            reference_forward_step(NULL, each + (t + 1) * size, each + t * size, x, lo + t);
        for (size_t t = n; t-- > 0;)
            reference_backward_step(r, r.dinitial, each + t * size, x, lo + t);
    }
    free(kept);
}

#endif
