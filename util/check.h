// check.h: one way to fail, one way to allocate, one way to compare two arrays, one way to count
// tests.
//
// Everything that goes wrong in this project ends in die(): one line that says what was wrong, what
// was expected and what to do, and an exit code that scripts can tell apart. Everything that must
// agree (CPU and GPU, float and double, chunked and recurrent) goes through compare().
#ifndef SEQ_UTIL_CHECK_H
#define SEQ_UTIL_CHECK_H

#ifdef __FAST_MATH__
#error "built with -ffast-math or -Ofast, which delete NaN checks: use -O3 -fno-math-errno instead"
#endif

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define SEQ_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define SEQ_NORETURN __attribute__((noreturn))
#else
#define SEQ_PRINTF(f, a)
#define SEQ_NORETURN
#endif

// Exit codes. 0 is success.
enum { EXIT_FAIL = 1, EXIT_USAGE = 2, EXIT_DATA = 3, EXIT_MEMORY = 4 };

// mask_controls: in text (n bytes) '?' takes the place of what a terminal may obey: control
// characters but those in `keep`, and bytes 0x80 to 0x9F outside of UTF-8 characters above U+009F.
static inline void mask_controls(char *text, size_t n, const char *keep)
{
    unsigned char *p = (unsigned char *)text;
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = p[i], next = i + 1 < n ? p[i + 1] : 0;
        const size_t more = c < 0xc2 || c > 0xf4 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        const int least = c == 0xc2 || c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80; // of `next`
        size_t k = 1;
        while (k <= more && i + k < n && (p[i + k] & 0xc0) == 0x80)
            k++;
        if (more && k > more && next >= least)
            i += more;
        else if ((c < 32 && !(c && strchr(keep, c))) || (c > 126 && c < 0xa0))
            p[i] = '?';
    }
}

// masked: a copy of a name in room (size), without control characters.
static inline const char *masked(const char *name, char *room, size_t size)
{
    snprintf(room, size, "%s", name);
    mask_controls(room, strlen(room), "");
    return room;
}

// print_message: `kind` and the message on stderr. A message of two lines is an error and its hint:
// "--lr: expected a number above 0, got -1\nhint: ..."; every other control character, which can
// only come from a value that is quoted, is shown as '?', so that no input can forge a line.
static inline void print_message(const char *kind, const char *fmt, va_list args)
{
    char text[8192];
    char *hint = NULL;
    vsnprintf(text, sizeof text, fmt, args);
    for (char *at = strchr(fmt, '\n') ? text : NULL; at && (at = strstr(at, "\nhint: "));)
        hint = at++;
    mask_controls(text, hint ? (size_t)(hint - text) : strlen(text), "");
    if (hint)
        mask_controls(hint + 1, strlen(hint + 1), "");
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", kind, text);
}

// die: print `error: ` and the message on stderr and exit with `code`; see print_message.
SEQ_NORETURN SEQ_PRINTF(2, 3) static inline void die(int code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    print_message("error", fmt, args);
    va_end(args);
    exit(code);
}

// warn: print `warning: ` and the message on stderr and go on.
SEQ_PRINTF(1, 2)
static inline void warn(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    print_message("warning", fmt, args);
    va_end(args);
}

// size_mul: a * b; dies with EXIT_MEMORY naming `what` when the product does not fit a size_t.
static inline size_t size_mul(size_t a, size_t b, const char *what)
{
    if (b && a > SIZE_MAX / b)
        die(EXIT_MEMORY,
            "%s: %zu x %zu does not fit in memory\nhint: make the model or the batch smaller", what,
            a, b);
    return a * b;
}

// alloc_zero: n * size bytes, zeroed, aligned for any type; dies with EXIT_MEMORY naming `what`.
// Free with free(). Large blocks come from calloc, which maps zero pages without touching them.
static inline void *alloc_zero(size_t n, size_t size, const char *what)
{
    size_t bytes = size_mul(n, size, what);
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p)
        die(EXIT_MEMORY, "%s: cannot allocate %.2f GiB\nhint: make the model or the batch smaller",
            what, (double)bytes / (1024.0 * 1024.0 * 1024.0));
    return p;
}

// real_at: element i of an array of float (size 4) or double (size 8).
static inline double real_at(const void *x, size_t i, size_t size)
{
    return size == 8 ? ((const double *)x)[i] : (double)((const float *)x)[i];
}

// real_set: x[i] = value in an array of float (size 4) or double (size 8).
static inline void real_set(void *x, size_t i, size_t size, double value)
{
    if (size == 8)
        ((double *)x)[i] = value;
    else
        ((float *)x)[i] = (float)value;
}

// is_finite_bits: 1 if x is neither NaN nor Inf, decided on the bits, whatever the compiler
// assumes.
static inline int is_finite_bits(double x)
{
    uint64_t u;
    memcpy(&u, &x, 8);
    return (u & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

// first_not_finite: index of the first NaN or Inf of x (n), n if there is none. size is 4 or 8.
static inline size_t first_not_finite(const void *x, size_t n, size_t size)
{
    size_t i = 0;
    while (i < n && is_finite_bits(real_at(x, i, size)))
        i++;
    return i;
}

// The bounds of every comparison in this project: relative L2 error; the largest error may be
// MAX_OVER_L2 times the bound times the largest reference value.
#define BOUND_FORWARD_FP32 1e-5
#define BOUND_GRAD_FP32 1e-4
#define BOUND_FORWARD_BF16 1e-2
#define BOUND_GRAD_BF16 2e-2
#define MAX_OVER_L2 10.0

typedef struct {
    double rel_l2;   // ||got - ref|| / ||ref||; 0 if both are 0, inf if only ref is
    double max_err;  // max |got - ref|
    double max_ref;  // max |ref|
    double norm_ref; // ||ref||
    size_t worst;    // index of max_err, or of the first value that is not finite
    int finite;      // every value of both is finite
    int ok;
} Comparison;

// compare: got (n) against ref (n), each of element size 4 or 8 bytes. ok = all finite, rel_l2 <=
// bound and max_err <= MAX_OVER_L2 * bound * max_ref. With scale_norm > 0 (the largest gradient's
// norm) a reference whose norm is below 1e-6 of it is noise, and only ||got - ref|| <= bound *
// scale_norm is asked.
static inline Comparison compare(const void *got, size_t got_size, const void *ref, size_t ref_size,
                                 size_t n, double bound, double scale_norm)
{
    Comparison c = {0, 0, 0, 0, 0, 1, 0};
    double err2 = 0, ref2 = 0;
    for (size_t i = 0; i < n; i++) {
        double g = real_at(got, i, got_size), r = real_at(ref, i, ref_size), e = fabs(g - r);
        if (!is_finite_bits(g) || !is_finite_bits(r)) {
            c.finite = 0;
            c.worst = i;
            c.rel_l2 = c.max_err = INFINITY;
            return c;
        }
        err2 += e * e;
        ref2 += r * r;
        if (fabs(r) > c.max_ref)
            c.max_ref = fabs(r);
        if (e > c.max_err) {
            c.max_err = e;
            c.worst = i;
        }
    }
    c.norm_ref = sqrt(ref2);
    c.rel_l2 = err2 == 0 ? 0 : ref2 == 0 ? INFINITY : sqrt(err2 / ref2);
    if (scale_norm > 0 && c.norm_ref < 1e-6 * scale_norm)
        c.ok = sqrt(err2) <= bound * scale_norm;
    else
        c.ok = c.rel_l2 <= bound && c.max_err <= MAX_OVER_L2 * bound * c.max_ref;
    return c;
}

// test_count: the process's count of passed (failed = 0) or failed (failed = 1) checks.
static inline int *test_count(int failed)
{
    static int counts[2];
    return &counts[failed != 0];
}

// test_check: count one check; a failed one prints where it stands and what it says.
SEQ_PRINTF(4, 5)
static inline int test_check(int ok, const char *file, int line, const char *fmt, ...)
{
    va_list args;
    ++*test_count(!ok);
    if (!ok) {
        printf("FAIL %s:%d: ", file, line);
        va_start(args, fmt);
        vprintf(fmt, args);
        va_end(args);
        printf("\n");
    }
    return ok;
}

// CHECK(condition, "what should hold, with values", ...)
#define CHECK(...) CHECK_AT(__VA_ARGS__, "")
#define CHECK_AT(cond, fmt, ...) test_check((cond) != 0, __FILE__, __LINE__, fmt "%s", __VA_ARGS__)

// test_report: print the closing line `N passed, N failed`; returns the exit code.
static inline int test_report(void)
{
    printf("%d passed, %d failed\n", *test_count(0), *test_count(1));
    return *test_count(1) || !*test_count(0) ? EXIT_FAIL : 0;
}

#endif
