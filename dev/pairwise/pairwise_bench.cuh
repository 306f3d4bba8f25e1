// pairwise_bench.cuh: what the two ladders share: inputs, the double-precision reference in the
// plain form (one pair at a time, statistics over the channels of the pair), and the exponential
// ceiling.
#ifndef SEQ_DEV_PAIRWISE_BENCH_CUH
#define SEQ_DEV_PAIRWISE_BENCH_CUH

#include "pairwise.cuh"

static const BenchType PAIR_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;

static const double BOUND_FORWARD = sizeof(floatX) == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
static const double BOUND_GRAD = sizeof(floatX) == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;

// The layer's arrays, those of (B,T,H) first.
enum { BUF_A, BUF_B, BUF_AC, BUF_BC, BUF_DS, BUF_S, BUF_P, BUF_DA, BUF_DB, BUF_ASTAT, BUF_BSTAT,
       BUF_SCALE, BUFFERS };

// One shape on device and host: the layer, the buffers that its pointers are into, references.
typedef struct {
    PairLayer layer;
    BenchBuffer buffers[BUFFERS];
    double *ref_s, *ref_p, *ref_scale, *ref_da, *ref_db;
} PairProblem;

// reference_psi: psi and psi' in double.
static void reference_psi(int act, double z, double *value, double *slope)
{
    double cdf = act == ACT_GELU ? 0.5 * erfc(-z * sqrt(0.5)) : 0;
    switch (act) {
    case ACT_RELU: *value = z > 0 ? z : 0, *slope = z > 0; break;
    case ACT_ELU: *value = z > 0 ? z : expm1(z), *slope = z > 0 ? 1 : exp(z); break;
    case ACT_GELU: *value = z * cdf, *slope = cdf + z * exp(-0.5 * z * z) / sqrt(2 * M_PI); break;
    default: *value = *slope = exp(z);
    }
}

// reference_normalize: y = normalize(x) over n; returns 1/deviation. centred: the mean counts as 0.
static double reference_normalize(double *y, const double *x, size_t n, int centred)
{
    double mean = 0, var = 0;
    for (size_t i = 0; i < n; i++)
        mean += (x[i] - x[0]) / (double)n;
    mean = centred ? 0 : mean + x[0];
    for (size_t i = 0; i < n; i++)
        var += (x[i] - mean) * (x[i] - mean) / (double)n;
    double r = 1 / sqrt(var + (double)PAIR_EPS);
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) * r;
    return r;
}

// reference_normalize_backward: dx += r (dy - mean(dy) - y mean(dy y)).
static void reference_normalize_backward(double *dx, const double *dy, const double *y, double r,
                                         size_t n)
{
    double sum = 0, dot = 0;
    for (size_t i = 0; i < n; i++) {
        sum += dy[i] / (double)n;
        dot += dy[i] * y[i] / (double)n;
    }
    for (size_t i = 0; i < n; i++)
        dx[i] += r * (dy[i] - sum - y[i] * dot);
}

// reference_sequence: s, p (T,H) = means over v of psi(z) and of r psi'(z), and, with da not NULL,
// da, db (T,H) = gradients from ds; sections 1 and 1.1 as they stand. post must be 0. With a_r and
// b_r (T) a and b are what pair_center left: centred (exact) or normalized, of 1/deviation a_r and
// b_r (approx).
static void reference_sequence(double *s, double *p, double *da, double *db, const float *a,
                               const float *b, const float *a_r, const float *b_r, const float *ds,
                               size_t T, size_t H, PairOptions opt)
{
    double *an = (double *)alloc_zero(6 * T * H + 4 * H + 2 * T, 8, "reference"), *bn = an + T * H;
    double *dan = bn + T * H, *dbn = dan + T * H, *x = dbn + T * H, *z = x + H, *dz = z + H;
    double *ar = dz + H, *br = ar + T;
    for (size_t u = 0; u < T; u++)
        for (int side = 0; side < 2; side++) {
            double *y = (side ? bn : an) + u * H;
            for (size_t d = 0; d < H; d++)
                y[d] = x[d] = (side ? b : a)[u * H + d];
            if (opt.norm == NORM_APPROX && a_r)
                (side ? br : ar)[u] = (side ? b_r : a_r)[u];
            else if (opt.norm == NORM_APPROX)
                (side ? br : ar)[u] = reference_normalize(y, x, H, 0);
        }
    for (size_t u = 0; u < T; u++)
        for (size_t v = 0; v < (opt.causal ? u + 1 : T); v++) {
            double r = 1, value, slope, n = (double)(opt.causal ? u + 1 : T);
            for (size_t d = 0; d < H; d++)
                z[d] = x[d] = an[u * H + d] + bn[v * H + d];
            if (opt.norm == NORM_EXACT)
                r = reference_normalize(z, x, H, a_r != NULL);
            for (size_t d = 0; d < H; d++) {
                reference_psi(opt.act, z[d], &value, &slope);
                s[u * H + d] += value / n;
                p[u * H + d] += r * slope / n;
                if (da)
                    dz[d] = ds[u * H + d] * slope / n;
            }
            if (!da)
                continue;
            if (opt.norm == NORM_EXACT) {
                memset(x, 0, H * sizeof *x);
                reference_normalize_backward(x, dz, z, r, H);
            } else
                memcpy(x, dz, H * sizeof *x);
            for (size_t d = 0; d < H; d++) {
                dan[u * H + d] += x[d];
                dbn[v * H + d] += x[d];
            }
        }
    for (size_t u = 0; da && u < T; u++) {
        if (opt.norm == NORM_APPROX) {
            reference_normalize_backward(da + u * H, dan + u * H, an + u * H, ar[u], H);
            reference_normalize_backward(db + u * H, dbn + u * H, bn + u * H, br[u], H);
            continue;
        }
        memcpy(da + u * H, dan + u * H, H * sizeof *da);
        memcpy(db + u * H, dbn + u * H, H * sizeof *db);
    }
    free(an);
}

// pair_input: x (rows,H): normal-ish with deviation 1 and mean 0.5, every 16th row with one channel
// of 9 (z near its largest value); kind 1: every 3rd row constant; kind 2: no large channels.
static float *pair_input(uint64_t seed, size_t rows, size_t H, int kind)
{
    float *x = (float *)alloc_zero(rows * H, 4, "input");
#pragma omp parallel for
    for (size_t i = 0; i < rows * H; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += bench_uniform(seed, 4 * i + k) - 0.5f;
        x[i] = 1.7320508f * sum + 0.5f;
        if (kind != 2 && i / H % 16 == 5 && i % H == (7 * (i / H) + seed) % H)
            x[i] = 9;
        if (kind == 1 && i / H % 3 == 0)
            x[i] = i / H % 2 ? 0.0f : 1234.1f;
    }
    return x;
}

// pair_download: n values of a buffer as floats.
static float *pair_download(const BenchBuffer *b, size_t n)
{
    float *x = (float *)alloc_zero(n, 4, "download");
    CUDA_CHECK(cudaMemcpy(x, b->data, b->bytes, cudaMemcpyDeviceToHost));
    if (b->bytes == 2 * n)
        for (size_t i = n; i-- > 0;) // from the end: widening in place
            x[i] = __bfloat162float(((const __nv_bfloat16 *)x)[i]);
    return x;
}

// pair_arrays: a layer's buffers, its scratch and the pointers into them.
static void pair_arrays(PairProblem *x)
{
    PairLayer *y = &x->layer;
    floatX **big[] = {&y->a, &y->b, &y->ac, &y->bc, &y->ds, &y->s, &y->p, &y->da, &y->db};
    float **small[] = {&y->astat, &y->bstat, &y->scale};
    for (int i = 0; i < BUFFERS; i++)
        if (i < BUF_ASTAT) {
            x->buffers[i] = bench_alloc(y->B * y->T * y->H, PAIR_TYPE, 0);
            *big[i] = (floatX *)x->buffers[i].data;
        } else {
            x->buffers[i] = bench_alloc(y->B * y->T, BENCH_F32, 0);
            *small[i - BUF_ASTAT] = (float *)x->buffers[i].data;
        }
    const size_t bytes = pair_scratch_bytes(y->B, y->T);
    CUDA_CHECK(cudaMalloc(&y->scratch, bytes));
    CUDA_CHECK(cudaMemset(y->scratch, 0xFF, bytes)); // NaN
}

// pair_setup: inputs, references and buffers of a shape, a and b centred, and, with backward, the
// forward run for its p and scale. The references start from what the kernels read, the centred
// (and in BF16 rounded) a and b, or with kind 2 from a and b themselves: then they judge the whole
// layer.
static PairProblem pair_setup(size_t B, size_t T, size_t H, PairOptions opt, int backward, int kind)
{
    const size_t n = B * T * H;
    PairProblem x = {};
    x.layer.B = B, x.layer.T = T, x.layer.H = H, x.layer.opt = opt;
    pair_arrays(&x);
    float *h_ds = pair_input(3, B * T, H, 0);
    bench_upload(&x.buffers[BUF_DS], PAIR_TYPE, h_ds, n);
    for (int i = BUF_A; i <= BUF_B; i++) {
        float *h_x = pair_input(i == BUF_A ? 1 : 2, B * T, H, kind);
        bench_upload(&x.buffers[i], PAIR_TYPE, h_x, n);
        free(h_x);
    }
    pair_center(&x.layer, 0);
    const BenchBuffer *from = &x.buffers[kind == 2 ? BUF_A : BUF_AC]; // b's follows a's
    float *h_a = pair_download(&from[0], n), *a_r = pair_download(&x.buffers[BUF_ASTAT], B * T);
    float *h_b = pair_download(&from[1], n), *b_r = pair_download(&x.buffers[BUF_BSTAT], B * T);
    double *ref = (double *)alloc_zero((backward ? 4 : 2) * n + B * T, 8, "references");
    x.ref_s = ref, x.ref_p = ref + n, x.ref_scale = ref + 2 * n;
    x.ref_da = backward ? ref + 2 * n + B * T : NULL;
    x.ref_db = backward ? x.ref_da + n : NULL;
#pragma omp parallel for schedule(dynamic)
    for (size_t b = 0; b < B; b++) {
        const size_t at = b * T * H;
        for (size_t u = 0; u < T; u++)
            x.ref_scale[b * T + u] = 1 / (double)(opt.causal ? u + 1 : T);
        reference_sequence(x.ref_s + at, x.ref_p + at, backward ? x.ref_da + at : NULL,
                           backward ? x.ref_db + at : NULL, h_a + at, h_b + at,
                           kind == 2 ? NULL : a_r + b * T, kind == 2 ? NULL : b_r + b * T,
                           h_ds + at, T, H, opt);
    }
    free(h_a), free(h_b), free(a_r), free(b_r), free(h_ds);
    if (backward)
        pair_forward_general(&x.layer, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    return x;
}

static void pair_free(PairProblem *x)
{
    for (int i = 0; i < BUFFERS; i++)
        bench_free(&x->buffers[i]);
    CUDA_CHECK(cudaFree(x->layer.scratch));
    free(x->ref_s);
}

// pair_exps: exponentials (pairs times channels) of one evaluation, in units of 1e9.
static double pair_exps(const PairLayer *x)
{
    double T = (double)x->T, pairs = x->opt.causal ? T * (T + 1) / 2 : T * T;
    return 1e-9 * (double)x->B * pairs * (double)x->H;
}

static const char *const pair_acts[] = {"exp", "relu", "elu", "gelu"};
static const char *const pair_norms[] = {"exact", "approx", "none"};

// pair_name: "pairwise forward bf16 (B,T,H) exp exact causal", in a buffer that the next call
// reuses.
static const char *pair_name(const PairLayer *x, const char *what)
{
    static char name[160];
    snprintf(name, sizeof name, "pairwise %s %s (%zu,%zu,%zu) %s %s%s", what,
             sizeof(floatX) == 2 ? "bf16" : "fp32", x->B, x->T, x->H, pair_acts[x->opt.act],
             pair_norms[x->opt.norm], x->opt.causal ? "" : " non-causal");
    return name;
}

// ceiling_kernel: eight independent chains of ex2 (POLY: of exp2_poly) a thread and nothing else.
template <int POLY> __global__ void ceiling_kernel(float *out, int n)
{
    float x[8];
    for (int i = 0; i < 8; i++)
        x[i] = -(float)(threadIdx.x + i) / 512.0f;
    for (int k = 0; k < n; k++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = POLY ? exp2_poly(x[i]) : exp2_mufu(x[i]);
    float sum = 0;
    for (int i = 0; i < 8; i++)
        sum += x[i];
    if (sum == 12345.0f) // never
        *out = sum;
}

static void ceiling_mufu(const void *out, cudaStream_t stream)
{
    ceiling_kernel<0><<<132 * 8, 256, 0, stream>>>((float *)out, 1024);
    CUDA_CHECK(cudaGetLastError());
}
static void ceiling_poly(const void *out, cudaStream_t stream)
{
    ceiling_kernel<1><<<132 * 8, 256, 0, stream>>>((float *)out, 1024);
    CUDA_CHECK(cudaGetLastError());
}

// pair_ceiling: print, and with csv record, the rate of ex2 alone and of the polynomial alone.
static void pair_ceiling(const BenchOptions *opt)
{
    BenchBuffer out = bench_alloc(1, BENCH_F32, 0);
    const double n = 132.0 * 8 * 256 * 8 * 1024;
    BenchTime m = bench_time(ceiling_mufu, out.data, opt->reps);
    BenchTime p = bench_time(ceiling_poly, out.data, opt->reps);
    char text[128];
    snprintf(text, sizeof text, "ex2 alone %.0f Gexp/s, polynomial alone %.0f Gexp/s",
             1e-6 * n / m.median, 1e-6 * n / p.median);
    printf("%s\n", text);
    if (opt->csv)
        bench_row(sizeof(floatX) == 2 ? "pairwise ceiling bf16" : "pairwise ceiling fp32", text);
    bench_free(&out);
}

// ---- the ladders ----

// What a ladder has of its own. part: a step of its launchers that is timed by itself where
// part_refuse allows it, NULL for none; it moves part_arrays arrays of (B,T,H), 0 = not only those.
typedef struct PairLadder {
    const char *name;
    int backward;
    const BenchKernel *kernels;
    int num_kernels;
    const size_t (*shapes)[3]; // B, T, H of the checks
    size_t num_shapes;
    int (*more_checks)(const struct PairLadder *, const BenchOptions *); // or NULL
    void (*part)(const void *layer, cudaStream_t stream);
    const char *(*part_refuse)(const void *layer); // or NULL
    const char *part_name;
    int part_arrays;
} PairLadder;

// pair_time_part: print, and with csv record, the time of the ladder's part.
static void pair_time_part(const PairLadder *ladder, const PairLayer *x, const BenchOptions *bench)
{
    const double bytes = (double)(ladder->part_arrays * x->B * x->T * x->H * sizeof(floatX));
    const float ms = bench_time(ladder->part, x, bench->reps).median;
    char text[96];
    int n = snprintf(text, sizeof text, "%.4f ms median", ms);
    if (bytes > 0)
        snprintf(text + n, sizeof text - n, ", %.1f GB/s", bytes * 1e-6 / ms);
    printf("     %s alone: %s\n", ladder->part_name, text);
    if (bench->csv)
        bench_row(pair_name(x, ladder->part_name), text);
}

// pair_case: every kernel on one shape; returns the number of failures.
static int pair_case(const PairLadder *ladder, size_t B, size_t T, size_t H, PairOptions opt,
                     int kind, const BenchOptions *bench)
{
    const size_t n = B * T * H;
    PairProblem x = pair_setup(B, T, H, opt, ladder->backward, kind);
    const BenchOutput forward[] = {
        {"scale", &x.buffers[BUF_SCALE], BENCH_F32, B * T, x.ref_scale, 1e-6},
        {"p", &x.buffers[BUF_P], PAIR_TYPE, n, x.ref_p, BOUND_FORWARD},
        {"s", &x.buffers[BUF_S], PAIR_TYPE, n, x.ref_s, BOUND_FORWARD}};
    const BenchOutput backward[] = {
        {"da", &x.buffers[BUF_DA], PAIR_TYPE, n, x.ref_da, BOUND_GRAD},
        {"db", &x.buffers[BUF_DB], PAIR_TYPE, n, x.ref_db, BOUND_GRAD}};
    char name[160];
    snprintf(name, sizeof name, "%s", pair_name(&x.layer, ladder->name));
    BenchCase c = {name, &x.layer, ladder->kernels, ladder->num_kernels};
    c.outputs = ladder->backward ? backward : forward;
    c.num_outputs = ladder->backward ? 2 : 3;
    c.bytes = (ladder->backward ? 6.0 : 4.0) * (double)(n * sizeof(floatX));
    c.work = pair_exps(&x.layer);
    c.unit = "Gexp";
    int failed = bench_case(&c, bench);
    if (!bench->check_only && ladder->part &&
        !(ladder->part_refuse && ladder->part_refuse(&x.layer)))
        pair_time_part(ladder, &x.layer, bench);
    pair_free(&x);
    return failed;
}

// pair_checks: awkward shapes, every psi and norm, and the whole layer; returns the failures.
static int pair_checks(const PairLadder *ladder, const BenchOptions *check)
{
    const PairOptions exact = {ACT_EXP, NORM_EXACT, 1, 0};
    BenchOptions layer = *check;
    int failed = 0;
    for (size_t i = 0; i < ladder->num_shapes; i++) {
        const size_t *s = ladder->shapes[i];
        failed += pair_case(ladder, s[0], s[1], s[2], exact, 0, check);
    }
    for (int i = 0; i < 4 * 3 * 2; i++) {
        PairOptions opt = {i % 4, i / 4 % 3, i / 12, 0};
        failed += pair_case(ladder, 2, 45, 64, opt, 0, check) +
                  pair_case(ladder, 2, 45, 33, opt, 0, check);
    }
    if (ladder->more_checks)
        failed += ladder->more_checks(ladder, check);
    layer.kernel = ladder->backward ? 0 : 8; // centring and its rounding included
    for (int i = 0; i < 4; i++)
        failed += pair_case(ladder, 4, 258, 192, (PairOptions){ACT_EXP, i % 3, i < 3, 0}, 2,
                            &layer);
    return failed;
}

// pair_ladder: main of a ladder: one shape if it is given, else the checks and the paper's shape.
static int pair_ladder(int argc, char **argv, const PairLadder *ladder)
{
    const PairOptions exact = {ACT_EXP, NORM_EXACT, 1, 0};
    char usage[64];
    snprintf(usage, sizeof usage, "pairwise_%s: --C is H", ladder->name);
    const BenchOptions bench = bench_options(argc, argv, usage);
    BenchOptions check = bench;
    check.check_only = 1;
    if (bench.B && bench.T && bench.C)
        return pair_case(ladder, bench.B, bench.T, bench.C, exact, 0, &bench) ? EXIT_FAIL : 0;
    int failed = 0;
    if (!bench.time_only) {
        failed += pair_checks(ladder, &check);
        printf("checks: %d failed\n", failed);
    }
    if (!bench.check_only) {
        pair_ceiling(&bench);
        failed += pair_case(ladder, 320, 258, 192, exact, 0, &bench);
    }
    return failed ? EXIT_FAIL : 0;
}

#endif
