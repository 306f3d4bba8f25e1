// pairwise_backward.cu: da and db of the quadratic CausalRN layer from ds and what forward left.
// The equations are on top of pairwise.cuh, which holds every kernel but the naive one.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o pairwise_backward dev/pairwise/pairwise_backward.cu
//
// ms a layer at (320,258,192), causal, exact, exp: 2.053e9 exponentials; H200, 2026-11-29, L2
// flushed; ex2 alone runs at 4155 Gexp/s here. Runs 1-4 are commits de36c55, fa206b3, 50743e6 and
// 5f1983e; of run 4 only FP32 took place: BF16 of the kernels you read is NOT YET MEASURED.
//    version                                       BF16 ms  Gexp/s   FP32 ms  Gexp/s
//  1 naive: a block a row of a, then of b           26.3        78    25.2        82   runs 3, 4
//  2 s1, s2 with 4 x 4 pairs a thread, then rows:
//      two exponentials a pair; any H; FP32's        5.09      404     5.03      408   runs 3, 4
//  3 one pass, e as an mma operand, s1 and s2 from
//      the tensor cores; 32 v x 32 channels a
//      warp, 12 warps an SM                          1.525    1346     -           -   run 1
//    two sequences a block                           1.598    1285     -           -   run 2
//    no s1 (its sums are channel means), 16 v a
//      warp, 24 warps an SM; 0.117 of it is da       1.344    1528     -           -   run 3
//    three barriers a chunk, not five; ldmatrix;
//      da's M and b by cp.async                      -           -     -           -   now
//  4 1/8 of the exponentials by polynomial           1.389    1478     -           -   run 3
//  5 2/8                                             1.400    1466     -           -   run 3
// Losers. 1: every pair twice, with four block reductions. 2: two passes, and r, M, N in memory.
// 4, 5: 6 more issue slots, and issue, not ex2, is what runs out. Two sequences a block: its 12
// warps end together, so no other block fills the end.
#include "pairwise_bench.cuh"

// block_sum2: two sums over the block's 128 threads, to all of them; `shared` holds 8 floats.
__device__ static float2 block_sum2(float x, float y, float *shared)
{
    x = warp_sum(x);
    y = warp_sum(y);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = x;
        shared[4 + threadIdx.x / 32] = y;
    }
    __syncthreads();
    return make_float2(shared[0] + shared[1] + shared[2] + shared[3],
                       shared[4] + shared[5] + shared[6] + shared[7]);
}

// backward_naive_kernel: the plain form: a block owns row `own` of a (SIDE 0: da) or of b (SIDE 1:
// db) and walks over the other index; dpre = r (dz - mean(dz) - z mean(dz z)) for every pair, so
// twice.
template <int ACT, int SIDE>
__global__ void __launch_bounds__(128)
    backward_naive_kernel(floatX *dx, const floatX *ds, const float *scale, const floatX *ac,
                          const floatX *bc, int T, int H, PairOptions opt)
{
    extern __shared__ float acc[]; // [H]
    __shared__ float shared[8];
    const size_t row = blockIdx.x, row0 = row / T * T;
    const int own = (int)(row - row0);
    const int first = opt.causal && SIDE ? own : 0, end = opt.causal && !SIDE ? own + 1 : T;
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        acc[d] = 0;
    for (int other = first; other < end; other++) {
        const size_t at_u = (row0 + (SIDE ? other : own)) * H,
                     at_v = (row0 + (SIDE ? own : other)) * H;
        const float f = scale[at_u / H];
        float2 sum = {0, 0};
        float r = 1, value, slope;
        if (opt.norm == NORM_EXACT) {
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float x = to_float(ac[at_u + d]) + to_float(bc[at_v + d]); // the mean is 0
                sum.y += x * x;
            }
            r = rsqrtf(block_sum2(0, sum.y, shared).y / (float)H + PAIR_EPS);
            sum = make_float2(0, 0);
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float z = (to_float(ac[at_u + d]) + to_float(bc[at_v + d])) * r;
                psi<ACT>(z, &value, &slope);
                float dz = f * to_float(ds[at_u + d]) * slope;
                sum.x += dz;
                sum.y += dz * z;
            }
            sum = block_sum2(sum.x, sum.y, shared);
        }
        for (int d = threadIdx.x; d < H; d += blockDim.x) {
            float z = (to_float(ac[at_u + d]) + to_float(bc[at_v + d])) * r;
            psi<ACT>(z, &value, &slope);
            float dz = f * to_float(ds[at_u + d]) * slope;
            acc[d] += r * (dz - sum.x / (float)H - z * sum.y / (float)H);
        }
    }
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        from_float(&dx[row * H + d], acc[d]);
}

static void run_naive(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    const unsigned grid = pair_grid(x->B * x->T);
    floatX *da = (floatX *)x->da.data, *db = (floatX *)x->db.data, *ds = (floatX *)x->ds.data;
    floatX *ac = (floatX *)x->ac.data, *bc = (floatX *)x->bc.data;
    const float *scale = (const float *)x->scale.data;
    PAIR_CHECK(x->opt.act, (backward_naive_kernel<ACT, 0><<<grid, 128, 4 * x->H, stream>>>(
                             da, ds, scale, ac, bc, (int)x->T, (int)x->H, x->opt)));
    PAIR_CHECK(x->opt.act, (backward_naive_kernel<ACT, 1><<<grid, 128, 4 * x->H, stream>>>(
                             db, ds, scale, ac, bc, (int)x->T, (int)x->H, x->opt)));
    pair_uncenter(da, db, ac, bc, (float *)x->astat.data, (float *)x->bstat.data, x->B, x->T, x->H,
                  x->opt.norm, stream);
}

#define BACKWARD_ARGS(x) \
    (floatX *)x->da.data, (floatX *)x->db.data, (floatX *)x->ds.data, (floatX *)x->p.data, \
        (float *)x->scale.data, (floatX *)x->ac.data, (floatX *)x->bc.data, \
        (float *)x->astat.data, (float *)x->bstat.data, x->scratch, x->B, x->T, x->H, x->opt

static void run_general(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_backward_general(BACKWARD_ARGS(x), stream);
}

static const char *refuse_naive(const void *problem)
{
    return ((const PairProblem *)problem)->H > 12000 ? "48 KiB of sums" : NULL;
}

#ifdef PRECISION_BF16
template <int NPOLY> static void run_fast(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_backward_fast<NPOLY>(BACKWARD_ARGS(x), stream);
}

static const char *refuse_fast(const void *problem)
{
    const PairProblem *x = (const PairProblem *)problem;
    return pair_path(x->H, x->opt, 1) == PAIR_FAST ? NULL
                                                   : "exp and H a multiple of 64 to 512 only";
}
#endif

#ifdef PRECISION_BF16
static void run_da(const void *problem, cudaStream_t stream) // M as the last run left it
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_da_kernel<1><<<pair_grid(x->B * ((x->T + 31) / 32)), (unsigned)x->H,
                        4 * TILE_V *(x->H + 8 + MS_STRIDE), stream>>>(
        (floatX *)x->da.data, (floatX *)x->ds.data, (floatX *)x->p.data, (floatX *)x->ac.data,
        (floatX *)x->bc.data, (__nv_bfloat16 *)x->scratch, (int)x->B, (int)x->T, (int)x->H);
    CUDA_CHECK(cudaGetLastError());
}
#endif

static void run_launcher(const void *problem, cudaStream_t stream)
{
    const PairProblem *x = (const PairProblem *)problem;
    pair_backward(BACKWARD_ARGS(x), stream);
}

static const BenchKernel kernels[] = {
    {1, "naive: a block a row, every pair twice", run_naive, refuse_naive},
    {2, "pair a thread, then rows; FP32's", run_general, NULL},
#ifdef PRECISION_BF16
    {3, "one pass, sums on tensor cores", run_fast<0>, refuse_fast},
    {4, "3, 1/8 of exps by polynomial", run_fast<1>, refuse_fast},
    {5, "3, 2/8", run_fast<2>, refuse_fast},
#endif
    {8, "pair_backward", run_launcher, NULL},
};

enum { NUM_KERNELS = sizeof kernels / sizeof *kernels };

// run_case: every kernel on one shape; returns the number of failures.
static int run_case(size_t B, size_t T, size_t H, PairOptions opt, int kind,
                    const BenchOptions *bench)
{
    PairProblem x = pair_setup(B, T, H, opt, 1, kind);
    const double bound = sizeof(floatX) == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
    const BenchOutput outputs[] = {{"da", &x.da, PAIR_TYPE, B * T * H, x.ref_da, bound},
                                   {"db", &x.db, PAIR_TYPE, B * T * H, x.ref_db, bound}};
    char name[160];
    snprintf(name, sizeof name, "%s", pair_name(&x, "backward"));
    BenchCase c = {name,
                   &x,
                   kernels,
                   NUM_KERNELS,
                   outputs,
                   2,
                   6.0 * (double)(B * T * H * sizeof(floatX)),
                   pair_exps(&x),
                   "Gexp"};
    int failed = bench_case(&c, bench);
#ifdef PRECISION_BF16
    if (!bench->check_only && x.H == 192)
        printf("     da alone: %.4f ms\n", bench_time(run_da, &x, bench->reps).median);
#endif
    pair_free(&x);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions bench = bench_options(argc, argv, "pairwise_backward: --C is H");
    BenchOptions check = bench;
    const PairOptions exact = {ACT_EXP, NORM_EXACT, 1, 0};
    static const size_t shapes[][3] = {
        {1, 2, 33},  {3, 31, 33},  {2, 33, 192},  {1, 258, 192},  {1, 514, 64},   {1, 1000, 64},
        {2, 7, 512}, {1, 97, 320}, {2, 31, 3072}, {65537, 2, 64}, {32769, 2, 17}, {1, 2, 12289}};
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
