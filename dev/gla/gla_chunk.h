// gla_chunk.h: gated linear attention by chunks of CS tokens, in plain C: what kernels of that form
// are held against. One head of one sequence; test_metala.c holds it against the recurrence
//
//   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,  o_t = s S_t^T q_t          S (DK,DV), g <= 0
//
// In a chunk let b_t be the sum of g from its first token to t, that included, and C its last
// token. Then, with S the state before the chunk:                       [arXiv 2312.06635, 4.2]
//
//   A_tu = s sum_i q_ti k_ui exp(b_ti - b_ui) for u <= t, otherwise 0
//   o_t  = s S^T (q_t exp(b_t)) + sum_u A_tu v_u
//   S   <- diag(exp(b_C)) S + sum_u (k_u exp(b_C - b_u)) v_u^T
//
// exp(-b_u) by itself overflows, so no such factor is ever taken: rows come in blocks of 16, and of
// a block t and an earlier one u the sum is a product of q_t exp(b_t - b_m) and k_u exp(b_m - b_u),
// m a row between them: both exponents are <= 0. Within a block they are taken pair by pair.
// Masked pairs are never looked at. g is clamped at -30, so that 64 of them add up to no more than
// 1920, of which fp32 knows 1e-4; where it is clamped its gradient is 0.
//
// GLA_REAL is the type of all arrays, by default float. `highest` in GlaChunk is the largest
// exponent that was taken; above 0 it is an error.
#ifndef SEQ_DEV_GLA_CHUNK_H
#define SEQ_DEV_GLA_CHUNK_H

#include "../../util/check.h"

#ifndef GLA_REAL
#define GLA_REAL float
#endif
enum { GLA_BLOCK = 16, GLA_LEAST = -30 }; // rows of a block; what g is clamped at

// What the forward pass keeps, for NC = ceil(T / CS) chunks, and scratch.
typedef struct {
    size_t T, DK, DV, CS, NC;
    GLA_REAL *b, *A, *S; // (T,DK), (NC,CS,CS), (NC+1,DK,DV)
    GLA_REAL *work;      // (CS,CS) and (2,16,DK)
    double highest;
} GlaChunk;

// gla_chunk_make: allocate for T tokens of a head of DK keys and DV values in chunks of CS.
static inline GlaChunk gla_chunk_make(size_t T, size_t DK, size_t DV, size_t CS)
{
    GlaChunk c = {T, DK, DV, CS, (T + CS - 1) / CS, NULL, NULL, NULL, NULL, -INFINITY};
    const size_t size = sizeof(GLA_REAL);
    c.b = (GLA_REAL *)alloc_zero(T * DK, size, "chunks");
    c.A = (GLA_REAL *)alloc_zero(c.NC * CS * CS, size, "chunks");
    c.S = (GLA_REAL *)alloc_zero((c.NC + 1) * DK * DV, size, "chunks");
    c.work = (GLA_REAL *)alloc_zero(CS * CS + 2 * GLA_BLOCK * DK, size, "chunks");
    return c;
}

// gla_chunk_free: give the memory back.
static inline void gla_chunk_free(GlaChunk *c)
{
    free(c->b);
    free(c->A);
    free(c->S);
    free(c->work);
}

// gla_fade: exp(x), x <= 0; notes the largest x.
static inline GLA_REAL gla_fade(GlaChunk *c, GLA_REAL x)
{
    c->highest = x > c->highest || x != x ? (double)x : c->highest;
    return exp(x);
}

// gla_faded: out (n,DK) = x (n,DK) exp(+-(b_t - b_m)), rows t of b (n,DK) and a row b_m (DK); sign
// 1: rows after m, -1: rows before it.
static inline void gla_faded(GlaChunk *c, GLA_REAL *out, const GLA_REAL *x, const GLA_REAL *b,
                             const GLA_REAL *b_m, size_t n, int sign)
{
    for (size_t i = 0; i < n * c->DK; i++)
        out[i] = x[i] * gla_fade(c, sign * (b[i] - b_m[i % c->DK]));
}

// gla_dot: x . y of n numbers.
static inline GLA_REAL gla_dot(const GLA_REAL *x, const GLA_REAL *y, size_t n)
{
    GLA_REAL sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

// gla_chunk_scores: A (n,CS) of one chunk of n tokens, rows from 0, from q, k, b (n,DK): block by
// block, what is above the diagonal = 0.
static inline void gla_chunk_scores(GlaChunk *c, GLA_REAL *A, const GLA_REAL *q, const GLA_REAL *k,
                                    const GLA_REAL *b, size_t n, double s)
{
    const size_t DK = c->DK, CS = c->CS;
    GLA_REAL *q_m = c->work + CS * CS, *k_m = q_m + GLA_BLOCK * DK;
    memset(A, 0, CS * CS * sizeof *A);
    for (size_t t0 = 0; t0 < n; t0 += GLA_BLOCK) {
        const size_t rows = (n - t0 < GLA_BLOCK ? n : t0 + GLA_BLOCK) - t0;
        gla_faded(c, q_m, q + t0 * DK, b + t0 * DK, b + t0 * DK, rows, 1); // m = t0
        for (size_t u0 = 0; u0 < t0; u0 += GLA_BLOCK) {
            gla_faded(c, k_m, k + u0 * DK, b + u0 * DK, b + t0 * DK, GLA_BLOCK, -1);
            for (size_t t = 0; t < rows; t++)
                for (size_t u = 0; u < GLA_BLOCK; u++)
                    A[(t0 + t) * CS + u0 + u] = s * gla_dot(q_m + t * DK, k_m + u * DK, DK);
        }
        for (size_t t = t0; t < t0 + rows; t++)
            for (size_t u = t0; u <= t; u++) {
                GLA_REAL sum = 0;
                for (size_t i = 0; i < DK; i++)
                    sum += q[t * DK + i] * k[u * DK + i] *
                           gla_fade(c, b[t * DK + i] - b[u * DK + i]);
                A[t * CS + u] = s * sum;
            }
    }
}

// gla_chunk_forward: out (T,DV) = and c's arrays = from q, k, g (T,DK), v (T,DV), s, and the
// initial S (DK,DV), NULL: zero. The final one is the last of c->S.
static inline void gla_chunk_forward(GLA_REAL *out, GlaChunk *c, const GLA_REAL *q,
                                     const GLA_REAL *k, const GLA_REAL *g, const GLA_REAL *v,
                                     const GLA_REAL *initial, double s)
{
    const size_t DK = c->DK, DV = c->DV, CS = c->CS;
    for (size_t i = 0; i < DK * DV; i++)
        c->S[i] = initial ? initial[i] : 0;
    for (size_t at = 0; at < c->NC; at++) {
        const size_t lo = at * CS, n = c->T - lo < CS ? c->T - lo : CS;
        GLA_REAL *b = c->b + lo * DK, *A = c->A + at * CS * CS, *S = c->S + at * DK * DV;
        GLA_REAL *next = S + DK * DV, *last = b + (n - 1) * DK, *o = out + lo * DV;
        for (size_t i = 0; i < n * DK; i++) {
            const GLA_REAL g_i = g[lo * DK + i];
            b[i] = (i < DK ? 0 : b[i - DK]) + (g_i < GLA_LEAST ? GLA_LEAST : g_i);
        }
        gla_chunk_scores(c, A, q + lo * DK, k + lo * DK, b, n, s);
        memset(o, 0, n * DV * sizeof *o);
        for (size_t t = 0; t < n; t++) {
            for (size_t i = 0; i < DK; i++) {
                const GLA_REAL q_i = s * q[(lo + t) * DK + i] * gla_fade(c, b[t * DK + i]);
                for (size_t j = 0; j < DV; j++)
                    o[t * DV + j] += q_i * S[i * DV + j];
            }
            for (size_t u = 0; u <= t; u++)
                for (size_t j = 0; j < DV; j++)
                    o[t * DV + j] += A[t * CS + u] * v[(lo + u) * DV + j];
        }
        for (size_t i = 0; i < DK * DV; i++)
            next[i] = gla_fade(c, last[i / DV]) * S[i];
        for (size_t u = 0; u < n; u++)
            for (size_t i = 0; i < DK; i++) {
                const GLA_REAL k_i = k[(lo + u) * DK + i] * gla_fade(c, last[i] - b[u * DK + i]);
                for (size_t j = 0; j < DV; j++)
                    next[i * DV + j] += k_i * v[(lo + u) * DV + j];
            }
    }
}

// Gradients of a head: of q, k, g (T,DK), of v (T,DV), of the initial S (DK,DV).
typedef struct {
    GLA_REAL *q, *k, *g, *v, *initial;
} GlaGrads;

// gla_chunk_scores_backward: dq, dk (n,DK) += of one chunk, from dA (n,CS), s in it, and q, k, b
// (n,DK). The row m between two blocks is the first of the block whose dq, the last of the block
// whose dk is wanted:
//   dq_t = sum_u dA_tu k_u exp(b_t - b_u),  dk_u = sum_t dA_tu q_t exp(b_t - b_u),  u <= t
static inline void gla_chunk_scores_backward(GlaChunk *c, GLA_REAL *dq, GLA_REAL *dk,
                                             const GLA_REAL *dA, const GLA_REAL *q,
                                             const GLA_REAL *k, const GLA_REAL *b, size_t n)
{
    const size_t DK = c->DK, CS = c->CS;
    GLA_REAL *faded = c->work + CS * CS;
    for (size_t x0 = 0; x0 < n; x0 += GLA_BLOCK) { // the block whose dq and dk are wanted
        const size_t x1 = n - x0 < GLA_BLOCK ? n : x0 + GLA_BLOCK;
        for (size_t y0 = 0; y0 < n; y0 += GLA_BLOCK) {
            const size_t y1 = n - y0 < GLA_BLOCK ? n : y0 + GLA_BLOCK, before = y0 < x0;
            const GLA_REAL *b_m = b + (before ? x0 : x1 - 1) * DK;
            if (y0 == x0)
                continue;
            gla_faded(c, faded, (before ? k : q) + y0 * DK, b + y0 * DK, b_m, y1 - y0,
                      before ? -1 : 1);
            for (size_t x = x0; x < x1; x++)
                for (size_t i = 0; i < DK; i++) {
                    GLA_REAL sum = 0;
                    for (size_t y = y0; y < y1; y++)
                        sum += dA[before ? x * CS + y : y * CS + x] * faded[(y - y0) * DK + i];
                    const GLA_REAL ahead = b[x * DK + i] - b_m[i];
                    if (before)
                        dq[x * DK + i] += sum * gla_fade(c, ahead);
                    else
                        dk[x * DK + i] += sum * gla_fade(c, -ahead);
                }
        }
        for (size_t t = x0; t < x1; t++)
            for (size_t u = x0; u <= t; u++)
                for (size_t i = 0; i < DK; i++) {
                    const GLA_REAL d = dA[t * CS + u] *
                                       gla_fade(c, b[t * DK + i] - b[u * DK + i]);
                    dq[t * DK + i] += d * k[u * DK + i];
                    dk[u * DK + i] += d * q[t * DK + i];
                }
    }
}

// gla_chunk_gates_backward: dg (n,DK) of one chunk = R_i + sum over u >= t of (q dq - k dk), R (DK)
// the row sums of S_out dS_out; g (n,DK): 0 where it is clamped.
static inline void gla_chunk_gates_backward(const GlaChunk *c, GLA_REAL *dg, const GLA_REAL *R,
                                            const GLA_REAL *dq, const GLA_REAL *dk,
                                            const GLA_REAL *q, const GLA_REAL *k,
                                            const GLA_REAL *g, size_t n)
{
    for (size_t i = 0; i < c->DK; i++) {
        GLA_REAL sum = R[i];
        for (size_t t = n; t-- > 0;) {
            const size_t at = t * c->DK + i;
            sum += q[at] * dq[at] - k[at] * dk[at];
            dg[at] = g[at] < GLA_LEAST ? 0 : sum;
        }
    }
}

// gla_chunk_backward: d = the gradients from dout (T,DV), dfinal (DK,DV), NULL: zero, and the
// forward's arrays. With D the gradient of the outgoing S, from the last chunk to the first:
//   dA_tu = s dout_t . v_u,  dv_u = sum_t A_tu dout_t + D^T (k_u exp(b_C - b_u))
//   dq_t += s exp(b_t) (S dout_t),  dk_u += exp(b_C - b_u) (D v_u)
//   R = row sums of S_out D,  D <- diag(exp(b_C)) D + s sum_t (q_t exp(b_t)) dout_t^T
// R is computed from S and what the chunk adds to it, as a kernel does that has no S_out.
static inline void gla_chunk_backward(GlaGrads d, const GLA_REAL *dout, const GLA_REAL *dfinal,
                                      GlaChunk *c, const GLA_REAL *q, const GLA_REAL *k,
                                      const GLA_REAL *g, const GLA_REAL *v, double s)
{
    const size_t DK = c->DK, DV = c->DV, CS = c->CS;
    GLA_REAL *D = d.initial, *dA = c->work;
    GLA_REAL *R = (GLA_REAL *)alloc_zero(DK, sizeof *R, "chunks");
    memset(d.q, 0, c->T * DK * sizeof *d.q);
    memset(d.k, 0, c->T * DK * sizeof *d.k);
    memset(d.v, 0, c->T * DV * sizeof *d.v);
    for (size_t i = 0; i < DK * DV; i++)
        D[i] = dfinal ? dfinal[i] : 0;
    for (size_t at = c->NC; at-- > 0;) {
        const size_t lo = at * CS, n = c->T - lo < CS ? c->T - lo : CS;
        const GLA_REAL *b = c->b + lo * DK, *last = b + (n - 1) * DK, *S = c->S + at * DK * DV;
        const GLA_REAL *Q = q + lo * DK, *K = k + lo * DK, *V = v + lo * DV, *dO = dout + lo * DV;
        GLA_REAL *dQ = d.q + lo * DK, *dK = d.k + lo * DK, *dV = d.v + lo * DV;
        for (size_t t = 0; t < n; t++)
            for (size_t u = 0; u <= t; u++) {
                dA[t * CS + u] = s * gla_dot(dO + t * DV, V + u * DV, DV);
                for (size_t j = 0; j < DV; j++)
                    dV[u * DV + j] += c->A[(at * CS + t) * CS + u] * dO[t * DV + j];
            }
        gla_chunk_scores_backward(c, dQ, dK, dA, Q, K, b, n);
        for (size_t i = 0; i < DK; i++)
            R[i] = gla_fade(c, last[i]) * gla_dot(S + i * DV, D + i * DV, DV);
        for (size_t t = 0; t < n; t++)
            for (size_t i = 0; i < DK; i++) {
                const GLA_REAL left = gla_fade(c, last[i] - b[t * DK + i]);
                const GLA_REAL wrote = left * gla_dot(D + i * DV, V + t * DV, DV);
                dQ[t * DK + i] += s * gla_fade(c, b[t * DK + i]) *
                                  gla_dot(S + i * DV, dO + t * DV, DV);
                dK[t * DK + i] += wrote;
                R[i] += K[t * DK + i] * wrote;
                for (size_t j = 0; j < DV; j++)
                    dV[t * DV + j] += K[t * DK + i] * left * D[i * DV + j];
            }
        gla_chunk_gates_backward(c, d.g + lo * DK, R, dQ, dK, Q, K, g + lo * DK, n);
        for (size_t i = 0; i < DK; i++) {
            for (size_t j = 0; j < DV; j++)
                D[i * DV + j] *= gla_fade(c, last[i]);
            for (size_t t = 0; t < n; t++) {
                const GLA_REAL q_i = s * Q[t * DK + i] * gla_fade(c, b[t * DK + i]);
                for (size_t j = 0; j < DV; j++)
                    D[i * DV + j] += q_i * dO[t * DV + j];
            }
        }
    }
    free(R);
}

#endif
