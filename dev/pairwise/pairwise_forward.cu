// pairwise_forward.cu: O_u[d] = sum_v psi(z_uv[d]), P_u[d] = sum_v r_uv psi'(z_uv[d]): the
// quadratic CausalRN layer. The equations are on top of pairwise.cuh, which holds every kernel but
// the naive one.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o pairwise_forward dev/pairwise/pairwise_forward.cu
//
// ms a layer at (320,258,192), causal, exact, exp: 2.053e9 exponentials; H200, 2026-11-29, L2
// flushed; ex2 alone runs at 4155 Gexp/s here. Runs 1-4 are commits de36c55, fa206b3, 50743e6 and
// 5f1983e; of run 4 only FP32 took place: BF16 of the kernels you read is NOT YET MEASURED.
//    version                                       BF16 ms  Gexp/s   FP32 ms  Gexp/s
//  1 naive: a block a position, pair after pair      6.49      316     6.31      326   runs 3, 4
//  2 r as a T x T array, 8 rows a thread, any H      2.25      911     2.25      914   runs 3, 4
//  3 r in the loop by tensor cores, 8 rows x 2
//      channels a thread, 24 warps an SM             0.686    2991     0.839    2448   run 1
//    in blocks of 12 warps, 4 sequences              0.683    3004     0.877    2341   run 2
//    6 rows, 30 warps                                0.729    2815     0.953    2154   run 3
//    8 rows, b fetched two rows ahead, no spills     -           -     0.852    2410   run 4: now
//  4 1/16 of the exponentials by polynomial          0.669    3070     0.861    2384   runs 1, 4
//  5 2/16                                            0.686    2992     0.895    2294   runs 1, 4
//  6 3/16                                            0.690    2976     0.913    2249   runs 1, 4
//  7 4/16                                            0.703    2919     0.961    2137   runs 1, 4
//    centring alone, in front of any of them         0.041       -     0.063       -   runs 3, 4
// Losers. 1: the statistics of every pair by a block reduction. 2: a load of r for every pair.
// 4-7: a polynomial takes 6 (FP32: 8) more issue slots, and issue, not ex2, is what runs out. Six
// rows: less work for a load of r. Blocks of 12 warps: the schedulers were balanced anyway.
#include "pairwise_bench.cuh"

// block_sum: over the block's 128 threads, to all of them; `shared` holds 4 floats.
__device__ static float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    return shared[0] + shared[1] + shared[2] + shared[3];
}

// forward_naive_kernel: a block a position u; the statistics of every pair from its channels, the
// sums in shared memory. Takes what pair_center left, like the others.
template <int ACT>
__global__ void __launch_bounds__(128)
    forward_naive_kernel(floatX *s, floatX *p, float *scale, const floatX *ac, const floatX *bc,
                         int T, int H, PairOptions opt)
{
    extern __shared__ float sums[]; // [2][H]
    __shared__ float shared[4];
    const size_t row = blockIdx.x, row0 = row / T * T;
    const int u = (int)(row - row0);
    const floatX *a = ac + row * H;
    for (int d = threadIdx.x; d < 2 * H; d += blockDim.x)
        sums[d] = 0;
    for (int v = 0; v < (opt.causal ? u + 1 : T); v++) {
        const floatX *b = bc + (row0 + v) * H;
        float r = 1, sum = 0, value, slope;
        if (opt.norm == NORM_EXACT) {
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float x = to_float(a[d]) + to_float(b[d]); // the mean is 0
                sum += x * x;
            }
            r = rsqrtf(block_sum(sum, shared) / (float)H + PAIR_EPS);
        }
        for (int d = threadIdx.x; d < H; d += blockDim.x) {
            psi<ACT>((to_float(a[d]) + to_float(b[d])) * r, &value, &slope);
            sums[d] += value;
            sums[H + d] += r * slope;
        }
    }
    float m = 0;
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        m = fmaxf(m, fabsf(sums[d]));
    m = warp_max(m);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = m;
    __syncthreads();
    m = row_scale(fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3])), u, T, opt);
    for (int d = threadIdx.x; d < H; d += blockDim.x) {
        from_float(&s[row * H + d], m * sums[d]);
        from_float(&p[row * H + d], m * sums[H + d]);
    }
    if (threadIdx.x == 0)
        scale[row] = m;
}

static void run_naive(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    PAIR_CHECK(x->opt.act,
             (forward_naive_kernel<ACT><<<pair_grid(x->B * x->T), 128, 8 * x->H, stream>>>(
                 (floatX *)x->s.data, (floatX *)x->p.data, (float *)x->scale.data,
                 (floatX *)x->ac.data, (floatX *)x->bc.data, (int)x->T, (int)x->H, x->opt)));
}

#define FORWARD_ARGS(x) \
    (floatX *)x->s.data, (floatX *)x->p.data, (float *)x->scale.data, (floatX *)x->ac.data, \
        (floatX *)x->bc.data, (float *)x->astat.data, (float *)x->bstat.data

static void run_general(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_forward_general(FORWARD_ARGS(x), x->scratch, x->B, x->T, x->H, x->opt, stream);
}

template <int NPOLY> static void run_fast(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_forward_fast<NPOLY>(FORWARD_ARGS(x), x->B, x->T, x->H, x->opt, stream);
}

static void run_center(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_center((floatX *)x->ac.data, (floatX *)x->bc.data, (float *)x->astat.data,
                (float *)x->bstat.data, (floatX *)x->a.data, (floatX *)x->b.data, x->B, x->T, x->H,
                x->opt.norm, stream);
}

static void run_launcher(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    run_center(problem, stream);
    pair_forward(FORWARD_ARGS(x), x->scratch, x->B, x->T, x->H, x->opt, stream);
}

static const char *refuse_naive(const void *problem)
{
    return ((const PairProblem *)problem)->H > 6000 ? "48 KiB of sums" : NULL;
}

static const char *refuse_fast(const void *problem)
{
    const PairProblem *x = (const PairProblem *)problem;
    return pair_path(x->H, x->opt, 0) == PAIR_FAST ? NULL
                                                   : "exp and H a multiple of 64 to 512 only";
}

static const BenchKernel kernels[] = {
    {1, "naive: a block a position", run_naive, refuse_naive},
    {2, "r in memory, 8 rows a thread", run_general, NULL},
    {3, "r on tensor cores, 8 x 2 a thread", run_fast<0>, refuse_fast},
    {4, "3, 1/16 of exps by polynomial", run_fast<1>, refuse_fast},
    {5, "3, 2/16", run_fast<2>, refuse_fast},
    {6, "3, 3/16", run_fast<3>, refuse_fast},
    {7, "3, 4/16", run_fast<4>, refuse_fast},
    {8, "centring + pair_forward", run_launcher, NULL},
};

enum { NUM_KERNELS = sizeof kernels / sizeof *kernels };

// run_case: every kernel on one shape; returns the number of failures.
static int run_case(size_t B, size_t T, size_t H, PairOptions opt, int kind,
                    const BenchOptions *bench)
{
    PairProblem x = pair_setup(B, T, H, opt, 0, kind);
    const double bound = sizeof(floatX) == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    const BenchOutput outputs[] = {{"scale", &x.scale, BENCH_F32, B * T, x.ref_scale, 1e-6},
                                   {"p", &x.p, PAIR_TYPE, B * T * H, x.ref_p, bound},
                                   {"s", &x.s, PAIR_TYPE, B * T * H, x.ref_s, bound}};
    char name[160];
    snprintf(name, sizeof name, "%s", pair_name(&x, "forward"));
    BenchCase c = {name,
                   &x,
                   kernels,
                   NUM_KERNELS,
                   outputs,
                   3,
                   4.0 * (double)(B * T * H * sizeof(floatX)),
                   pair_exps(&x),
                   "Gexp"};
    int failed = bench_case(&c, bench);
    if (!bench->check_only) {
        BenchTime t = bench_time(run_center, &x, bench->reps);
        char text[96];
        snprintf(text, sizeof text, "%.4f ms median, %.1f GB/s", t.median,
                 c.bytes * 1e-6 / t.median);
        printf("     centring alone: %s\n", text);
        if (bench->csv)
            bench_row(pair_name(&x, "centring"), text);
    }
    pair_free(&x);
    return failed;
}

// check_post: with post, every row's scale is a power of two that brings its largest |s| into
// [1/2, 1], and s / scale, p / scale are the sums; returns the number of kernels that fail.
static int check_post(size_t B, size_t T, size_t H, int act)
{
    PairOptions opt = {act, NORM_EXACT, 1, 0};
    PairProblem x = pair_setup(B, T, H, opt, 0, 0);
    const size_t n = B * T * H;
    const double bound = sizeof(floatX) == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    floatX *h = (floatX *)alloc_zero(n, sizeof *h, "post");
    double *got = (double *)alloc_zero(n, 8, "post");
    float *scale = (float *)alloc_zero(B * T, 4, "post");
    int failed = 0;
    x.opt.post = 1;
    for (int k = 0; k < NUM_KERNELS; k++) {
        if (kernels[k].refuse && kernels[k].refuse(&x))
            continue;
        kernels[k].fn(&x, 0);
        CUDA_CHECK(cudaMemcpy(scale, x.scale.data, B * T * 4, cudaMemcpyDefault));
        int ok = 1;
        for (int is_p = 0; is_p < 2; is_p++) {
            CUDA_CHECK(cudaMemcpy(h, (is_p ? x.p : x.s).data, n * sizeof *h, cudaMemcpyDefault));
            for (size_t i = 0; i < B * T; i++) {
                double most = 0;
                for (size_t d = i * H; d < (i + 1) * H; d++) {
                    got[d] = (double)(float)h[d];
                    most = fmax(most, fabs(got[d]));
                    got[d] *= x.ref_scale[i] / scale[i];
                }
                int e;
                ok &=
                    frexp(scale[i], &e) == 0.5 && (is_p || most == 0 || (most >= 0.5 && most <= 1));
            }
            ok &= compare(got, 8, is_p ? x.ref_p : x.ref_s, 8, n, bound, 0).ok;
        }
        failed += !ok;
        if (!ok)
            printf("  kernel %d FAILED with post, (%zu,%zu,%zu) %s\n", kernels[k].num, B, T, H,
                   pair_acts[act]);
    }
    free(h), free(got), free(scale);
    pair_free(&x);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions bench = bench_options(argc, argv, "pairwise_forward: --C is H");
    BenchOptions check = bench;
    const PairOptions exact = {ACT_EXP, NORM_EXACT, 1, 0};
    static const size_t shapes[][3] = {{1, 1, 1},     {1, 2, 33},    {3, 31, 33},    {2, 33, 192},
                                       {1, 258, 192}, {1, 514, 64},  {1, 1000, 64},  {2, 7, 512},
                                       {1, 97, 320},  {2, 31, 3072}, {65537, 1, 64}, {32769, 2, 1},
                                       {1, 2, 12289}};
    int failed = 0;
    check.check_only = 1;
    if (bench.B && bench.T && bench.C) {
        failed = run_case(bench.B, bench.T, bench.C, exact, 0, &bench);
    } else {
        if (!bench.time_only) {
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
                failed += run_case(shapes[i][0], shapes[i][1], shapes[i][2], exact, 0, &check);
            for (int i = 0; i < 4 * 3 * 2; i++) {
                PairOptions opt = {i % 4, i / 4 % 3, i / 12, 0};
                failed += run_case(2, 45, 64, opt, 0, &check) + run_case(2, 45, 33, opt, 0, &check);
            }
            failed += run_case(2, 50, 64, exact, 1, &check); // constant rows
            for (int act = 0; act < 4; act++)
                failed += check_post(2, 70, 192, act) + check_post(2, 9, 33, act);
            check.kernel = 8; // the whole layer, centring and its rounding included
            for (int i = 0; i < 4; i++)
                failed += run_case(4, 258, 192, (PairOptions){ACT_EXP, i % 3, i < 3, 0}, 2, &check);
            printf("checks: %d failed\n", failed);
        }
        if (!bench.check_only) {
            pair_ceiling(&bench);
            failed += run_case(320, 258, 192, exact, 0, &bench);
        }
    }
    return failed ? EXIT_FAIL : 0;
}
