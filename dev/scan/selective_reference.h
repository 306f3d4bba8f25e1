// selective_reference.h: Mamba's scan with its softplus, skip and gate, forward and backward in
// double, channel by channel, token after token, as train_mamba.c has it. No CUDA.
#ifndef SEQ_DEV_SELECTIVE_REFERENCE_H
#define SEQ_DEV_SELECTIVE_REFERENCE_H

#include "../../util/check.h"

// One sequence: inputs; what is made of them. The last three outputs +=, dbc too.
typedef struct {
    size_t T, H, S;
    int range;
    const float *x, *raw, *xz, *bc, *dout; // (T,H), (T,H), (T,2H), (T,2S), (T,H)
    const float *A_log, *dt_b, *skip;      // (H,S), (H), (H)
    const float *initial, *dfinal;         // (S,H), NULL: 0
    double *g, *final, *dx, *draw, *dz, *dbc, *dinitial; // (T,H), (S,H), (T,H) three times, (T,2S),
    double *dA_log, *dskip, *ddt_b;                      // (S,H), (H,S), (H), (H)
} SelectiveSequence;

// selective_gate: y SiLU(z) and with d, the gradient of that, *dz; returns SiLU(z).
static double selective_gate(double *dz, double d, double y, double z)
{
    const double p = 1 / (1 + exp(-z));
    *dz = d * y * p * (1 + z * (1 - p));
    return z * p;
}

// selective_channel: channel c of q; h (T + 1,S) and a (T,S), E (T,S): scratch.
static void selective_channel(const SelectiveSequence *q, size_t c, double *h, double *E)
{
    const size_t T = q->T, H = q->H, S = q->S;
    const double rest = q->range - 1, skip = q->skip[c];
    double G[64] = {0}, rate[64]; // S <= 64
    for (size_t s = 0; s < S; s++) {
        rate[s] = -exp(fmin((double)q->A_log[c * S + s], 44));
        h[s] = q->initial ? (double)q->initial[s * H + c] : 0;
        G[s] = q->dfinal ? (double)q->dfinal[s * H + c] : 0;
    }
    for (size_t t = 0; t < T; t++) {
        const double raw = (double)q->raw[t * H + c] + (double)q->dt_b[c];
        const double dt = fmax(raw, 0) + log1p(exp(-fabs(raw))), x = q->x[t * H + c];
        double y = skip * x, unused;
        for (size_t s = 0; s < S; s++) {
            const double e = E[t * S + s] = q->range * exp(dt * rate[s]);
            double *next = h + (t + 1) * S + s;
            *next = (e - rest) * h[t * S + s] + dt * x * (double)q->bc[t * 2 * S + s];
            y += (double)q->bc[t * 2 * S + S + s] * *next;
        }
        q->g[t * H + c] = y * selective_gate(&unused, 0, 0, (double)q->xz[t * 2 * H + H + c]);
        q->dx[t * H + c] = y; // for the way back
    }
    for (size_t t = T; t-- > 0;) {
        const double raw = (double)q->raw[t * H + c] + (double)q->dt_b[c];
        const double dt = fmax(raw, 0) + log1p(exp(-fabs(raw))), x = q->x[t * H + c];
        const double d = q->dout[t * H + c];
        const double dy = d * selective_gate(&q->dz[t * H + c], d, q->dx[t * H + c],
                                             (double)q->xz[t * 2 * H + H + c]);
        double sum = 0, ddt = 0;
        for (size_t s = 0; s < S; s++) {
            const double B = q->bc[t * 2 * S + s], C = q->bc[t * 2 * S + S + s], e = E[t * S + s];
            const double g = G[s] + C * dy, w = e * h[t * S + s] * g;
            q->dbc[t * 2 * S + s] += g * dt * x;
            q->dbc[t * 2 * S + S + s] += dy * h[(t + 1) * S + s];
            sum += B * g;
            ddt += rate[s] * w;
            q->dA_log[c * S + s] += q->A_log[c * S + s] > 44 ? 0 : dt * w * rate[s];
            G[s] = (e - rest) * g;
        }
        q->dx[t * H + c] = dt * sum + skip * dy;
        q->draw[t * H + c] = (ddt + x * sum) / (1 + exp(-raw));
        q->ddt_b[c] += q->draw[t * H + c];
        q->dskip[c] += dy * x;
    }
    for (size_t s = 0; s < S; s++)
        q->final[s * H + c] = h[T * S + s], q->dinitial[s * H + c] = G[s];
}

// selective_sequence: all channels of q.
static void selective_sequence(const SelectiveSequence *q)
{
    double *h = (double *)alloc_zero((2 * q->T + 1) * q->S, sizeof *h, "reference");
    for (size_t c = 0; c < q->H; c++)
        selective_channel(q, c, h, h + (q->T + 1) * q->S);
    free(h);
}

#endif
