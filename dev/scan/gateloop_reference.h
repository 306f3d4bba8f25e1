// gateloop_reference.h: GateLoop's layer forward and backward in double, channel by channel, token
// after token, as train_gateloop.c has it. No CUDA. Included after one of the train_gateloop.*,
// whose words for --transition it shares.
#ifndef SEQ_DEV_GATELOOP_REFERENCE_H
#define SEQ_DEV_GATELOOP_REFERENCE_H

#include "../../util/check.h"

// A transition, and how ln |a| and its angle move with its logits.
typedef struct {
    double re, im, r_alpha, r_beta, angle_alpha, angle_beta;
} ReferenceGate;

// reference_gate: of logits alpha, beta.  [the list in train_gateloop.c]
static ReferenceGate reference_gate(double alpha, double beta, int kind)
{
    ReferenceGate z = {1, 0, 0, 0, 0, 0};
    const double m = kind == CART ? hypot(alpha, beta) : kind == REAL_SIGNED ? fabs(alpha) : alpha;
    const double rate = kind == STABLE_EXP ? exp(fmin(alpha, 88)) : 0;
    const double r = kind == STABLE_EXP ? exp(-rate) : 1 / (1 + exp(-m)), rest = 1 / (1 + exp(m));
    const double turned = kind == SEP_RELU ? fmax(beta, 0) : beta;
    const double over = m > 0 ? 1 / (m + 1e-12 / m) : 0;
    switch (kind) {
    case ONES: break;
    case CART:
        z.re = m > 0 ? r * alpha / m : r, z.im = m > 0 ? r * beta / m : 0;
        z.r_alpha = rest * alpha * over, z.r_beta = rest * beta * over;
        z.angle_alpha = -beta * over * over, z.angle_beta = alpha * over * over;
        break;
    case REAL_SIGNED:
        z.re = alpha < 0 ? -r : r;
        z.r_alpha = alpha < 0 ? -rest : rest;
        break;
    case REAL_POS: case FIXED_REAL:
        z.re = r, z.r_alpha = rest;
        break;
    default:
        z.re = r * cos(turned), z.im = r * sin(turned);
        z.r_alpha = kind == STABLE_EXP ? -rate : rest;
        z.angle_beta = kind != SEP_RELU || beta > 0;
    }
    return z;
}

// One channel of a sequence: inputs at t times their pitch; what is made of them, (T) each. Of a
// fixed transition dalpha, dbeta are each token's part.
typedef struct {
    const float *q, *k, *v, *g, *alpha, *beta, *dz;
    size_t pitch, logit_pitch, dz_pitch, T;
    double h[2], G[2]; // in: before the first token, gradient of the last; out: the last, the first
    double *z, *dq, *dk, *dv, *dg, *dalpha, *dbeta;
} ReferenceChannel;

// reference_channel: all of x, whose transition alpha counts from `shift`.
static void reference_channel(ReferenceChannel *x, double shift, int kind)
{
    const size_t T = x->T;
    ReferenceGate *gates = (ReferenceGate *)alloc_zero(T, sizeof *gates, "reference");
    double *h = (double *)alloc_zero(2 * T + 2, sizeof *h, "reference"), *G = x->G;
    h[0] = x->h[0], h[1] = x->h[1];
    for (size_t t = 0; t < T; t++) {
        const ReferenceGate z = gates[t] =
            reference_gate(x->alpha ? (double)x->alpha[t * x->logit_pitch] + shift : 0,
                           x->beta ? (double)x->beta[t * x->logit_pitch] : 0, kind);
        const double *in = h + 2 * t, g = (double)x->g[t * x->pitch];
        double *out = h + 2 * t + 2;
        out[0] = z.re * in[0] - z.im * in[1] +
                 (double)x->k[t * x->pitch] * (double)x->v[t * x->pitch];
        out[1] = z.re * in[1] + z.im * in[0];
        x->z[t] = g / (1 + exp(-g)) * (double)x->q[t * x->pitch] * out[0];
    }
    for (size_t t = T; t-- > 0;) {
        const ReferenceGate z = gates[t];
        const double *in = h + 2 * t, q = (double)x->q[t * x->pitch];
        const double k = (double)x->k[t * x->pitch], v = (double)x->v[t * x->pitch];
        const double g = (double)x->g[t * x->pitch], d = (double)x->dz[t * x->dz_pitch];
        const double p = 1 / (1 + exp(-g)), dy = d * g * p;
        const double re = z.re * in[0] - z.im * in[1], im = z.re * in[1] + z.im * in[0];
        G[0] += q * dy;
        const double r = G[0] * re + G[1] * im, angle = G[1] * re - G[0] * im, G_re = G[0];
        x->dq[t] = dy * (re + k * v);
        x->dk[t] = v * G[0];
        x->dv[t] = k * G[0];
        x->dg[t] = d * q * (re + k * v) * p * (1 + g * (1 - p));
        x->dalpha[t] = z.r_alpha * r + z.angle_alpha * angle;
        x->dbeta[t] = z.r_beta * r + z.angle_beta * angle;
        G[0] = z.re * G_re + z.im * G[1];
        G[1] = z.re * G[1] - z.im * G_re;
    }
    x->h[0] = h[2 * T], x->h[1] = h[2 * T + 1];
    free(gates), free(h);
}

#endif
