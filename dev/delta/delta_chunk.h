// delta_chunk.h: the delta rule by chunks of CS tokens, in plain C: what kernels of that form are
// held against. One head of one sequence; test_deltanet.c holds it against the recurrence.
//
// S maps keys to values, (values, keys). In a chunk of n <= CS tokens with rows Q, K, V, diagonal
// b = diag(beta), scale s = 1 / sqrt(HS):   [arXiv 2406.06484, the WY form]
//
//   A  = strictly lower (b K K^T),  Tm = (I + A)^-1    by substitution, row by row
//   W  = Tm b K,  U = Tm b V,  N = U - W S^T           row i of N is u_i of the recurrence
//   P  = lower (Q K^T) with its diagonal
//   O  = s (Q S^T + P N),  S <- S + N^T K
//
// |Tm_ij| <= beta_i for j < i while |k| <= 1: it is beta_i k_i^T (a product of contractions) k_j.
// The inverse must be in fp32: substitution keeps its error small for equal keys, where squaring
// A, A^2, A^4 ... loses everything, and rounding Tm to BF16 costs a tenth of the output.
//
// DELTA_REAL is the type of all arrays, by default float.
#ifndef SEQ_DEV_DELTA_CHUNK_H
#define SEQ_DEV_DELTA_CHUNK_H

#include "../../util/check.h"

#ifndef DELTA_REAL
#define DELTA_REAL float
#endif

// What the forward pass keeps, for NC = ceil(T / CS) chunks, and scratch.
typedef struct {
    size_t T, HS, CS, NC;
    DELTA_REAL *Tm, *W, *N, *S; // (NC,CS,CS), (NC,CS,HS), (NC,CS,HS), (NC+1,HS,HS)
    DELTA_REAL *work;           // 4 arrays (CS,CS) and 4 arrays (CS,HS)
} DeltaChunk;

// delta_chunk_make: allocate for T tokens of a head of HS channels in chunks of CS.
static inline DeltaChunk delta_chunk_make(size_t T, size_t HS, size_t CS)
{
    DeltaChunk c = {T, HS, CS, (T + CS - 1) / CS, NULL, NULL, NULL, NULL, NULL};
    const size_t size = sizeof(DELTA_REAL), work = 4 * CS * CS + 4 * CS * HS;
    c.Tm = (DELTA_REAL *)alloc_zero(c.NC * CS * CS, size, "chunks");
    c.W = (DELTA_REAL *)alloc_zero(c.NC * CS * HS, size, "chunks");
    c.N = (DELTA_REAL *)alloc_zero(c.NC * CS * HS, size, "chunks");
    c.S = (DELTA_REAL *)alloc_zero((c.NC + 1) * HS * HS, size, "chunks");
    c.work = (DELTA_REAL *)alloc_zero(work, size, "chunks");
    return c;
}

// delta_chunk_free: give the memory back.
static inline void delta_chunk_free(DeltaChunk *c)
{
    free(c->Tm);
    free(c->W);
    free(c->N);
    free(c->S);
    free(c->work);
}

enum { CHUNK_PLAIN = 0, CHUNK_ADD = 1, CHUNK_X = 2, CHUNK_Y = 4 };

// chunk_product: out (M,N) = factor x y, x (M,K), y (K,N), all rows contiguous. CHUNK_ADD: +=;
// CHUNK_X: x is the transpose of an array (K,M); CHUNK_Y: y that of an array (N,K).
static inline void chunk_product(DELTA_REAL *out, double factor, const DELTA_REAL *x,
                                 const DELTA_REAL *y, size_t M, size_t N, size_t K, int how)
{
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            DELTA_REAL sum = 0;
            for (size_t k = 0; k < K; k++)
                sum += x[how & CHUNK_X ? k * M + i : i * K + k] *
                       y[how & CHUNK_Y ? j * K + k : k * N + j];
            out[i * N + j] = (how & CHUNK_ADD ? out[i * N + j] : 0) + (DELTA_REAL)factor * sum;
        }
}

// chunk_lower: x (n,n): what stands above the diagonal, or with strict on it, becomes 0.
static inline void chunk_lower(DELTA_REAL *x, size_t n, int strict)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = strict ? i : i + 1; j < n; j++)
            x[i * n + j] = 0;
}

// chunk_scaled: out (n,HS) = row i of x times beta_i.
static inline void chunk_scaled(DELTA_REAL *out, const DELTA_REAL *x, const DELTA_REAL *beta,
                                size_t n, size_t HS)
{
    for (size_t i = 0; i < n * HS; i++)
        out[i] = beta[i / HS] * x[i];
}

// chunk_inverse: Tm (n,n) = (I + A)^-1, A strictly lower: row i = e_i - sum_{j<i} A_ij row j.
static inline void chunk_inverse(DELTA_REAL *Tm, const DELTA_REAL *A, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t m = 0; m < n; m++) {
            DELTA_REAL sum = m == i;
            for (size_t j = 0; j < i; j++)
                sum -= A[i * n + j] * Tm[j * n + m];
            Tm[i * n + m] = sum;
        }
}

// delta_chunk_forward: out (T,HS) = and c's arrays = from q, k, v (T,HS), beta (T) and the initial
// S (HS,HS), NULL: zero. The final one is the last of c->S.
static inline void delta_chunk_forward(DELTA_REAL *out, DeltaChunk *c, const DELTA_REAL *q,
                                       const DELTA_REAL *k, const DELTA_REAL *v,
                                       const DELTA_REAL *beta, const DELTA_REAL *initial)
{
    const size_t HS = c->HS, CS = c->CS;
    const double s = 1 / sqrt((double)HS);
    DELTA_REAL *A = c->work, *P = A + CS * CS, *scaled = P + CS * CS;
    for (size_t i = 0; i < HS * HS; i++)
        c->S[i] = initial ? initial[i] : 0;
    for (size_t at = 0; at < c->NC; at++) {
        const size_t t = at * CS, n = c->T - t < CS ? c->T - t : CS;
        const DELTA_REAL *Q = q + t * HS, *K = k + t * HS, *V = v + t * HS;
        DELTA_REAL *Tm = c->Tm + at * CS * CS, *W = c->W + t * HS, *N = c->N + t * HS;
        DELTA_REAL *S = c->S + at * HS * HS, *next = S + HS * HS;
        chunk_scaled(scaled, K, beta + t, n, HS);
        chunk_product(A, 1, scaled, K, n, n, HS, CHUNK_Y);
        chunk_lower(A, n, 1);
        chunk_inverse(Tm, A, n);
        chunk_product(W, 1, Tm, scaled, n, HS, n, CHUNK_PLAIN);
        chunk_scaled(scaled, V, beta + t, n, HS);
        chunk_product(N, 1, Tm, scaled, n, HS, n, CHUNK_PLAIN); // U
        chunk_product(N, -1, W, S, n, HS, HS, CHUNK_Y | CHUNK_ADD);
        chunk_product(P, 1, Q, K, n, n, HS, CHUNK_Y);
        chunk_lower(P, n, 0);
        chunk_product(out + t * HS, s, Q, S, n, HS, HS, CHUNK_Y);
        chunk_product(out + t * HS, s, P, N, n, HS, n, CHUNK_ADD);
        memcpy(next, S, HS * HS * sizeof *S);
        chunk_product(next, 1, N, K, HS, HS, n, CHUNK_X | CHUNK_ADD);
    }
}

// Gradients of a head: of q, k, v (T,HS), of beta (T), of the initial S (HS,HS).
typedef struct {
    DELTA_REAL *q, *k, *v, *beta, *initial;
} DeltaGrads;

// delta_chunk_inverse_backward: one chunk of n tokens: dk += and dv, dbeta = from dN and dW through
// W = Tm b K, U = Tm b V and Tm = (I + A)^-1. With dVb = Tm^T dN, dKb = Tm^T dW:
//   dTm = strictly lower (dW (b K)^T + dN (b V)^T),  dA = - strictly lower (Tm^T dTm Tm^T)
//   dv = b dVb,  dk += b dKb + b (dA K) + dA^T (b K),  dbeta = row sums of dVb V + (dKb + dA K) K
// x, y (CS,CS) and d, e (CS,HS) are scratch.
static inline void delta_chunk_inverse_backward(DELTA_REAL *dk, DELTA_REAL *dv, DELTA_REAL *dbeta,
                                                const DELTA_REAL *dN, const DELTA_REAL *dW,
                                                const DELTA_REAL *Tm, const DELTA_REAL *K,
                                                const DELTA_REAL *V, const DELTA_REAL *beta,
                                                size_t n, size_t HS, DELTA_REAL *x, DELTA_REAL *y,
                                                DELTA_REAL *d, DELTA_REAL *e)
{
    chunk_scaled(d, V, beta, n, HS);
    chunk_product(x, 1, dN, d, n, n, HS, CHUNK_Y);
    chunk_scaled(d, K, beta, n, HS);
    chunk_product(x, 1, dW, d, n, n, HS, CHUNK_Y | CHUNK_ADD);
    chunk_lower(x, n, 1); // dTm
    chunk_product(y, 1, x, Tm, n, n, n, CHUNK_Y);
    chunk_product(x, -1, Tm, y, n, n, n, CHUNK_X);
    chunk_lower(x, n, 1); // dA
    chunk_product(dk, 1, x, d, n, HS, n, CHUNK_X | CHUNK_ADD);
    chunk_product(d, 1, Tm, dW, n, HS, n, CHUNK_X);
    chunk_product(d, 1, x, K, n, HS, n, CHUNK_ADD); // dKb + dA K
    chunk_product(e, 1, Tm, dN, n, HS, n, CHUNK_X); // dVb
    for (size_t i = 0; i < n; i++) {
        DELTA_REAL sum = 0;
        for (size_t j = i * HS; j < (i + 1) * HS; j++) {
            sum += e[j] * V[j] + d[j] * K[j];
            dk[j] += beta[i] * d[j];
            dv[j] = beta[i] * e[j];
        }
        dbeta[i] = sum;
    }
}

// delta_chunk_backward: g = the gradients from dout (T,HS), dfinal (HS,HS), NULL: zero, and the
// forward's arrays. With D the gradient of the outgoing S, from the last chunk to the first:
//   dN = s P^T dO + K D^T,  dP = lower (dO N^T),  dW = - dN S
//   dQ = s (dP K + dO S),  dK = s dP^T Q + N D + what delta_chunk_inverse_backward adds
//   D <- D + s dO^T Q - dN^T W
static inline void delta_chunk_backward(DeltaGrads g, const DELTA_REAL *dout,
                                        const DELTA_REAL *dfinal, DeltaChunk *c,
                                        const DELTA_REAL *q, const DELTA_REAL *k,
                                        const DELTA_REAL *v, const DELTA_REAL *beta)
{
    const size_t HS = c->HS, CS = c->CS;
    const double s = 1 / sqrt((double)HS);
    DELTA_REAL *P = c->work, *dP = P + CS * CS, *x = dP + CS * CS, *y = x + CS * CS;
    DELTA_REAL *dN = y + CS * CS, *dW = dN + CS * HS, *d = dW + CS * HS, *e = d + CS * HS;
    DELTA_REAL *D = g.initial;
    for (size_t i = 0; i < HS * HS; i++)
        D[i] = dfinal ? dfinal[i] : 0;
    for (size_t at = c->NC; at-- > 0;) {
        const size_t t = at * CS, n = c->T - t < CS ? c->T - t : CS;
        const DELTA_REAL *Q = q + t * HS, *K = k + t * HS, *dO = dout + t * HS;
        const DELTA_REAL *W = c->W + t * HS, *N = c->N + t * HS, *S = c->S + at * HS * HS;
        chunk_product(P, 1, Q, K, n, n, HS, CHUNK_Y);
        chunk_lower(P, n, 0);
        chunk_product(dP, 1, dO, N, n, n, HS, CHUNK_Y);
        chunk_lower(dP, n, 0);
        chunk_product(dN, s, P, dO, n, HS, n, CHUNK_X);
        chunk_product(dN, 1, K, D, n, HS, HS, CHUNK_Y | CHUNK_ADD);
        chunk_product(dW, -1, dN, S, n, HS, HS, CHUNK_PLAIN);
        chunk_product(g.q + t * HS, s, dP, K, n, HS, n, CHUNK_PLAIN);
        chunk_product(g.q + t * HS, s, dO, S, n, HS, HS, CHUNK_ADD);
        chunk_product(g.k + t * HS, s, dP, Q, n, HS, n, CHUNK_X);
        chunk_product(g.k + t * HS, 1, N, D, n, HS, HS, CHUNK_ADD);
        delta_chunk_inverse_backward(g.k + t * HS, g.v + t * HS, g.beta + t, dN, dW,
                                     c->Tm + at * CS * CS, K, v + t * HS, beta + t, n, HS, x, y,
                                     d, e);
        chunk_product(D, s, dO, Q, HS, HS, n, CHUNK_X | CHUNK_ADD);
        chunk_product(D, -1, dN, W, HS, HS, n, CHUNK_X | CHUNK_ADD);
    }
}

#endif
