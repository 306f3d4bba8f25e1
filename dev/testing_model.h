// testing_model.h: what every test of a trainer needs: arrays that free themselves, comparisons,
// central differences.
//
// Included after the trainer: with -DREAL_IS_DOUBLE `float` means double in it, here too.
#ifndef SEQ_DEV_TESTING_MODEL_H
#define SEQ_DEV_TESTING_MODEL_H

#include "../util/training.h"
#include <float.h>

#ifdef REAL_IS_DOUBLE
enum { IS_DOUBLE = 1 };
#else
enum { IS_DOUBLE = 0 };
#endif
static const double FORWARD = IS_DOUBLE ? 1e-12 : BOUND_FORWARD_FP32;
static const double GRAD = IS_DOUBLE ? 1e-12 : BOUND_GRAD_FP32;
static const double NUMERIC = 1e-6; // analytic against central differences, double

static void *taken[4096];
static int n_taken;
static uint64_t draws;

// take: n zeroed bytes that live until the test's end.
static inline void *take(size_t n)
{
    if (n_taken == sizeof taken / sizeof *taken)
        die(EXIT_FAIL, "a test takes more than %d arrays", n_taken);
    return taken[n_taken++] = alloc_zero(n, 1, "test");
}

// give_all_back: free what the test took and start its random numbers again.
static inline void give_all_back(void)
{
    while (n_taken)
        free(taken[--n_taken]);
    draws = 0;
}

// reals: n zeros.
static inline float *reals(size_t n)
{
    return take(n * sizeof(float));
}

// guarded: n zeros, then 64 NaNs: a read past the end spreads them, a write removes them.
static inline float *guarded(size_t n)
{
    float *x = reals(n + 64);
    for (size_t i = n; i < n + 64; i++)
        x[i] = NAN;
    return x;
}

// normal_fill: x (n) = normal numbers of standard deviation std, new ones at every call of a test.
static inline void normal_fill(float *x, size_t n, double std)
{
    draws++;
    for (size_t i = 0; i < n; i++)
        x[i] = std * rand_normal(7, draws, i);
}

// normals: n normal numbers of standard deviation std.
static inline float *normals(size_t n, double std)
{
    float *x = reals(n);
    normal_fill(x, n, std);
    return x;
}

// copy_of: a copy of n bytes.
static inline void *copy_of(const void *x, size_t n)
{
    return memcpy(take(n), x, n);
}

// doubles: a copy of x (n) in double.
static inline double *doubles(const float *x, size_t n)
{
    double *y = take(n * sizeof *y);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i];
    return y;
}

// dot: the sum of x (n) y (n), in double.
static inline double dot(const float *x, const float *y, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * y[i];
    return sum;
}

// norm_of: the norm of a double array x (n).
static inline double norm_of(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

// same_bits: 1 if x (n) and y (n) agree in every bit.
static inline int same_bits(const float *x, const float *y, size_t n)
{
    return !memcmp(x, y, n * sizeof(float));
}

// all_zero: 1 if every element of x (n) is 0.
static inline int all_zero(const float *x, size_t n)
{
    size_t i = 0;
    while (i < n && x[i] == 0)
        i++;
    return i == n;
}

// agree: one check that got (n) is ref (n), of element size ref_size, within bound; scale_norm as
// in compare. Returns the relative L2 error.
static inline double agree(const char *what, const float *got, const void *ref, size_t ref_size,
                           size_t n, double bound, double scale_norm)
{
    Comparison c = compare(got, sizeof(float), ref, ref_size, n, bound, scale_norm);
    CHECK(c.ok, "%s: relative L2 %.3g (bound %.3g), max error %.3g of %.3g at %zu of %zu: got %.9g",
          what, c.rel_l2, bound, c.max_err, c.max_ref, c.worst, n, (double)got[c.worst]);
    return c.rel_l2;
}

// agree_or_tiny: the same, where also an error of norm up to bound * size passes: for a gradient
// that is what is left of terms of norm `size` after they cancel.
static inline void agree_or_tiny(const char *what, const float *got, const double *ref, size_t n,
                                 double bound, double size)
{
    double error = 0;
    for (size_t i = 0; i < n; i++)
        error += ((double)got[i] - ref[i]) * ((double)got[i] - ref[i]);
    if (sqrt(error) <= bound * size) // false for NaN
        CHECK(1, "%s", what);
    else
        agree(what, got, ref, sizeof *ref, n, bound, 0);
}

// central_difference: one check that dx (n) is the gradient of loss(context) by x (n), which is
// left as it was. A gradient that should be 0 may be off by NUMERIC * scale. Double build only.
static inline void central_difference(const char *what, double (*loss)(void *), void *context,
                                      float *x, const float *dx, size_t n, double scale)
{
    double *numeric = alloc_zero(n, sizeof *numeric, "central differences");
    for (size_t i = 0; i < n && IS_DOUBLE; i++) {
        const float keep = x[i], h = 1e-5;
        x[i] = keep + h;
        double above = loss(context);
        x[i] = keep - h;
        numeric[i] = (above - loss(context)) / (2 * h);
        x[i] = keep;
    }
    if (IS_DOUBLE)
        agree(what, dx, numeric, sizeof *numeric, n, NUMERIC, scale);
    free(numeric);
}

// arenas_equal: 1 if two arenas of one table hold the same bits.
static inline int arenas_equal(const Arena *x, const Arena *y)
{
    return x->bytes == y->bytes && !memcmp(x->base, y->base, x->bytes);
}

// arena_copy_values: to = from, two arenas of one table.
static inline void arena_copy_values(Arena *to, const Arena *from)
{
    memcpy(to->base, from->base, from->bytes);
}

// trained_copy: the bytes of parameters and moments.
static inline char *trained_copy(const Weights *w)
{
    size_t n = w->params.bytes;
    char *bytes = take(3 * n);
    memcpy(bytes, w->params.base, n);
    memcpy(bytes + n, w->m.base, n);
    memcpy(bytes + 2 * n, w->v.base, n);
    return bytes;
}

// trained_same: 1 if parameters and moments still have those bytes.
static inline int trained_same(const Weights *w, const char *bytes)
{
    size_t n = w->params.bytes;
    return !memcmp(bytes, w->params.base, n) && !memcmp(bytes + n, w->m.base, n) &&
           !memcmp(bytes + 2 * n, w->v.base, n);
}

#endif
