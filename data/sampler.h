// sampler.h: one token from the logits of a position.
//
// Everything is in double: a running sum of 50257 probabilities in float ends beside 1. The coin is
// a pure function of (seed, sequence, position), so a sample can be drawn again.
#ifndef SEQ_DATA_SAMPLER_H
#define SEQ_DATA_SAMPLER_H

#include "../util/check.h"
#include "../util/rng.h"

typedef struct {
    double temperature; // below 1e-9 (0): the most likely token, the lowest of equals
    int top_k;          // draw from so many of the most likely; 0, or V and more: from all
    uint64_t seed;
} Sampler;

// sampler_pick: index i of p (n) with probability p[i] / sum p, by a coin in [0, 1); never one with
// p[i] = 0. Dies unless p has a finite positive sum.
static inline size_t sampler_pick(const double *p, size_t n, double coin)
{
    double total = 0, sum = 0;
    size_t last = 0;
    for (size_t i = 0; i < n; i++)
        total += p[i];
    if (!(total > 0) || !is_finite_bits(total))
        die(EXIT_FAIL, "sampling: expected probabilities of a finite positive sum, got %g", total);
    for (size_t i = 0; i < n; i++) {
        sum += p[i];
        if (p[i] > 0 && sum > coin * total)
            return i;
        last = p[i] > 0 ? i : last;
    }
    return last; // coin * total was rounded up to total
}

// sampler_descending: order of doubles, the largest first, for qsort.
static inline int sampler_descending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

// sampler_top_k: clear all of p (n) but the k largest, 1 <= k <= n; of equals the lower index
// stays.
static inline void sampler_top_k(double *p, size_t n, size_t k)
{
    double *sorted = (double *)alloc_zero(n, sizeof *sorted, "sampling");
    memcpy(sorted, p, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, sampler_descending);
    const double least = sorted[k - 1];
    size_t equals = k; // how many that equal `least` stay
    for (size_t i = 0; i < n; i++)
        equals -= p[i] > least;
    for (size_t i = 0; i < n; i++)
        if (p[i] < least || (p[i] == least && !equals))
            p[i] = 0;
        else
            equals -= p[i] == least;
    free(sorted);
}

// sampler_choose: a token from logits (V) of element size real_size (float or double), for position
// t of a sequence. Dies over a logit that is NaN or +Inf, and if all are -Inf.
static inline int sampler_choose(const Sampler *s, const void *logits, size_t real_size, size_t V,
                                 uint64_t sequence, uint64_t t)
{
    size_t best = 0;
    for (size_t i = 0; i < V; i++) {
        double x = real_at(logits, i, real_size);
        if (!is_finite_bits(x) && x != -INFINITY)
            die(EXIT_FAIL, "sampling: the logit of token %zu at position %zu is %g; expected a "
                "finite one", i, (size_t)t, x);
        best = x > real_at(logits, best, real_size) ? i : best;
    }
    const double top = real_at(logits, best, real_size);
    if (top == -INFINITY)
        die(EXIT_FAIL, "sampling: every logit at position %zu is -inf", (size_t)t);
    if (s->temperature < 1e-9)
        return (int)best;
    double *p = (double *)alloc_zero(V, sizeof *p, "sampling");
    for (size_t i = 0; i < V; i++)
        p[i] = exp((real_at(logits, i, real_size) - top) / s->temperature);
    if (s->top_k > 0 && (size_t)s->top_k < V)
        sampler_top_k(p, V, (size_t)s->top_k);
    best = sampler_pick(p, V, rand_uniform(s->seed, STREAM_SAMPLE + sequence, t));
    free(p);
    return (int)best;
}

#endif
