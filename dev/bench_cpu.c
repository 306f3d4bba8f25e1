// bench_cpu.c: speed of the CPU trainer's kernels, as ratios measured in one run on one machine:
// the matrix product beside OpenBLAS sgemm (where libopenblas is installed), the pair loop's
// exponentials beside a scalar expf loop, and one thread beside all. `make bench`.
#pragma GCC diagnostic ignored "-Wunused-function"
#define TESTING
#include "../train_causalrn.c"
#include <dlfcn.h>

// cblas_sgemm's signature; order 101 is row-major, 111 and 112 are no transpose and transpose.
typedef void (*Sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                      const float *a, int lda, const float *b, int ldb, float beta, float *c,
                      int ldc);

enum { REPEATS = 15, BATCH = 64 };

// find_sgemm: OpenBLAS's sgemm, or NULL where it is not installed; it runs on `threads` threads.
static Sgemm find_sgemm(int threads)
{
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    Sgemm sgemm = NULL;
    void (*set_threads)(int) = NULL;
    void *found;
    if (library && (found = dlsym(library, "cblas_sgemm")))
        memcpy(&sgemm, &found, sizeof sgemm);
    if (library && (found = dlsym(library, "openblas_set_num_threads")))
        memcpy(&set_threads, &found, sizeof set_threads);
    if (set_threads)
        set_threads(threads);
    return sgemm;
}

// by_value: order of two doubles, for qsort.
static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// median: of REPEATS seconds.
static double median(double *seconds)
{
    qsort(seconds, REPEATS, sizeof *seconds, by_value);
    return seconds[REPEATS / 2];
}

// random_array: n standard normal numbers.
static float *random_array(size_t n, uint64_t stream)
{
    float *x = alloc_zero(n, sizeof(float), "benchmark");
    for (size_t i = 0; i < n; i++)
        x[i] = rand_normal(1, stream, i);
    return x;
}

// bench_matmul: out (N,OC) = inp (N,C) weight (OC,C)^T, ours and OpenBLAS's turn by turn.
static void bench_matmul(Sgemm sgemm, size_t N, size_t C, size_t OC)
{
    float *inp = random_array(N * C, 1), *weight = random_array(OC * C, 2);
    float *out = random_array(N * OC, 3), *ref = random_array(N * OC, 4);
    double ours[REPEATS], theirs[REPEATS], flops = 2.0 * (double)(N * C * OC);
    for (int r = 0; r < REPEATS; r++) {
        double start = seconds_now();
        matmul_forward(out, inp, weight, NULL, N, C, OC, 0);
        ours[r] = seconds_now() - start;
        start = seconds_now();
        if (sgemm)
            sgemm(101, 111, 112, (int)N, (int)OC, (int)C, 1, inp, (int)C, weight, (int)C, 0, ref,
                  (int)OC);
        theirs[r] = seconds_now() - start;
    }
    printf("matmul %5zu x %4zu x %4zu    %7.1f GFLOP/s", N, C, OC, 1e-9 * flops / median(ours));
    if (sgemm)
        printf("   OpenBLAS %7.1f   ratio %.2f   difference %.1e", 1e-9 * flops / median(theirs),
               median(theirs) / median(ours), compare(out, 4, ref, 4, N * OC, 1e-5, 0).rel_l2);
    printf("\n");
    free(inp), free(weight), free(out), free(ref);
}

// bench_pairs: mix_forward and mix_backward of the exact exponential layer, in exponentials a
// second.
static double bench_pairs(size_t T, size_t H, int backward)
{
    const Mix mix = {QUADRATIC, EXACT, EXP, 1, 1};
    size_t n = BATCH * T * H, work_size = mix_work(T, H);
    float *a = random_array(n, 1), *b = random_array(n, 2), *o = random_array(n, 3);
    float *da = random_array(n, 4), *db = random_array(n, 5), *work;
    Saved saved = {random_array(n, 6), random_array(n, 7), random_array(BATCH * T, 8), NULL, NULL};
    double seconds[REPEATS];
    work = alloc_zero(threads_count() * work_size, sizeof(float), "work");
    mix_forward(o, saved, a, b, work, work_size, BATCH, T, H, mix);
    for (int r = 0; r < REPEATS; r++) {
        double start = seconds_now();
        if (backward)
            mix_backward(da, db, o, saved, a, b, work, work_size, BATCH, T, H, mix);
        else
            mix_forward(o, saved, a, b, work, work_size, BATCH, T, H, mix);
        seconds[r] = seconds_now() - start;
    }
    free(a), free(b), free(o), free(da), free(db), free(work);
    free(saved.s), free(saved.p), free(saved.scale);
    return (double)(BATCH * T * (T + 1) / 2 * H) / median(seconds);
}

// bench_expf: exponentials a second of libm's expf in a loop, on one thread.
static double bench_expf(void)
{
    enum { N = 1 << 16 };
    float *x = random_array(N, 1);
    double seconds[REPEATS];
    volatile float keep = 0;
    for (int r = 0; r < REPEATS; r++) {
        double start = seconds_now();
        float sum = 0;
        for (int i = 0; i < N; i++)
            sum += expf(x[i]);
        keep = sum;
        seconds[r] = seconds_now() - start;
    }
    (void)keep;
    free(x);
    return N / median(seconds);
}

// main: every table once with one thread, once with all.
int main(void)
{
    const size_t T = 66, H = 96,
                 sizes[][3] = {{8192, 192, 192}, {2112, 96, 96}, {1024, 1024, 1024}};
    double forward[2], backward[2], scalar = bench_expf();
    int all = (int)threads_count();
    for (int i = 0; i < (all > 1 ? 2 : 1); i++) {
        int threads = i ? all : 1;
        threads_set(threads);
        Sgemm sgemm = find_sgemm(threads);
        printf("%d thread%s (%s)%s\n", threads, threads > 1 ? "s" : "", OPENMP_WORD,
               sgemm ? "" : "; libopenblas.so.0 is not installed: no comparison");
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            bench_matmul(sgemm, sizes[k][0], sizes[k][1], sizes[k][2]);
        forward[i] = bench_pairs(T, H, 0);
        backward[i] = bench_pairs(T, H, 1);
        printf(
            "pair loop T=%zu H=%zu forward  %.2e exp/s, %.1f x a scalar expf loop on one thread\n",
            T, H, forward[i], forward[i] / scalar);
        printf("pair loop T=%zu H=%zu backward %.2e exp/s, %.1f x\n", T, H, backward[i],
               backward[i] / scalar);
    }
    if (all > 1)
        printf("%d threads beside 1: forward %.2f x, backward %.2f x\n", all,
               forward[1] / forward[0], backward[1] / backward[0]);
    return 0;
}
