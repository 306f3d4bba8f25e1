// cases.cuh: what the ladders of this folder share on the host: the arrays of a case, its shapes.
#ifndef SEQ_DEV_CASES_CUH
#define SEQ_DEV_CASES_CUH

#include "../bench.cuh"

// An array of a case, on the device and on the host, with what a kernel should write to it.
typedef struct {
    BenchBuffer d;
    float *h;
    double *ref;
    size_t n;
    BenchType type;
} Array;

// array_new: n elements, NaN on the device, `shift` bytes past alignment, and 0 on the host.
static inline Array array_new(size_t n, BenchType type, size_t shift)
{
    Array a = {bench_alloc(n, type, shift), (float *)alloc_zero(n, 4, "values on the host"),
               (double *)alloc_zero(n, 8, "reference"), n, type};
    return a;
}

// array_upload: the device's elements = the host's, which become what their type rounds them to.
static inline void array_upload(Array *a) { bench_upload(&a->d, a->type, a->h, a->n); }

// array_output: what a kernel writes, to be held against a's reference.
static inline BenchOutput array_output(const char *name, Array *a, double bound)
{
    BenchOutput o = {name, &a->d, a->type, a->n, a->ref, bound};
    return o;
}

// arrays_free: give `count` arrays back.
static inline void arrays_free(Array *a, int count)
{
    for (int i = 0; i < count; i++)
        bench_free(&a[i].d), free(a[i].h), free(a[i].ref);
}

// scratch_spoilt: 0, or 1 with a message if a kernel wrote outside its scratch memory.
static inline int scratch_spoilt(const BenchBuffer *b)
{
    if (bench_guards(b))
        return 0;
    printf("  FAILED: wrote outside the scratch memory\n");
    return 1;
}

// small_options: options for cases that are only checked.
static inline BenchOptions small_options(const BenchOptions *opt)
{
    BenchOptions o = *opt;
    o.check_only = 1;
    o.self_test = 0;
    return o;
}

typedef struct {
    size_t B, T, D;
    int reverse, state; // state: with h0 and hT
    int harsh;          // with extreme values, where the ladder has them
    size_t shift;       // bytes the arrays lie past alignment
} Shape;

typedef int (*RunShape)(const Shape *s, const BenchOptions *opt);

// run_small: all lengths and widths that matter, both ways; with and without state and alignment.
// Counts them in *cases and returns the failures.
static inline int run_small(RunShape run, const BenchOptions *small, int *cases)
{
    static const size_t Ts[] = {1, 2, 31, 32, 33, 1000, 4097, 65536}, Ds[] = {1, 3, 33, 192};
    int failed = 0;
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++)
            for (int reverse = 0; reverse < 2; reverse++, ++*cases) {
                Shape s = {(size_t)(1 + (i + j) % 3), Ts[i], Ds[j], reverse,
                           (i + j + reverse) % 2, (i + j) % 4 > 0,
                           (size_t)((i + reverse) % 4 ? 0 : 4)};
                failed += run(&s, small);
            }
    return failed;
}

// shape_given: whether the command line names a shape.
static inline int shape_given(const BenchOptions *opt) { return opt->B || opt->T || opt->C; }

// run_scan: the shape given on the command line, or the checks and the three shapes that are timed;
// `both`: in both directions. Returns the failures.
static inline int run_scan(RunShape run, int (*checks)(const BenchOptions *opt), int both,
                           const BenchOptions *opt)
{
    static const size_t shapes[][3] = {{320, 258, 192}, {8, 4096, 1024}, {1, 65536, 1024}};
    int failed = 0;
    if (shape_given(opt)) {
        for (int reverse = 0; reverse <= both; reverse++) {
            Shape s = {opt->B ? opt->B : 1, opt->T ? opt->T : 1, opt->C ? opt->C : 1, reverse,
                       !reverse, 1, 0};
            failed += run(&s, opt);
        }
        return failed;
    }
    if (!opt->time_only)
        failed += checks(opt);
    for (int i = 0; i < 3 && !opt->check_only; i++)
        for (int reverse = 0; reverse <= both; reverse++) {
            Shape s = {shapes[i][0], shapes[i][1], shapes[i][2], reverse, 0, 0, 0};
            failed += run(&s, opt);
        }
    return failed;
}

#endif
