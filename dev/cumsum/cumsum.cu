// cumsum.cu: inclusive sum over T of (B,T,D), D contiguous, fp32, forward or reverse, as a ladder.
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -o cumsum dev/cumsum/cumsum.cu && ./cumsum
//
// Bytes: each input read once, each output written once: 8 B T D. Everything else is overhead.
// GB/s (% of copy) on an H200, 2026-11-29, (320,258,192) / (8,4096,1024) / (1,65536,1024):
//   a copy of as many bytes                              3895 / 4146 / 4213
//   1  a thread a channel, a double accumulator          1083 (28%) /  168 (4%) /   22 (0%)
//   2  a thread 4 channels, 8 rows of loads in flight    2554 (66%) /  490 (12%) /   64 (2%)
//   3  chunks of 64 rows: sum, scan the sums, sum again  2070 (53%) / 2150 (52%) / 1831 (43%)
//   4  one pass: 272-row tiles, a chain of carries       3744 (96%) / 3610 (87%) / 3570 (85%)
//   5  one pass: carries chained over groups of 16 tiles 3751 (96%) / 3615 (87%) / 3750 (89%)
//   6  5 with tiles of 144 rows, 3 blocks, not 2         3248 (83%) / 3537 (85%) / 3581 (85%)
//   7  6 + the next tile in flight to shared memory      3286 (84%) / 3593 (87%) / 3702 (88%)
//   8  5 + the same                                      3673 (94%) / 3601 (87%) / 3824 (91%)
//   9  4 + the same                                      3769 (97%) / 3615 (87%) / 3570 (85%)
// 5 is the one to take; 8 is as good. Why the others lose: 1, 2: too few threads where B D is
// small. 3: reads x twice. 4, 9: 241 carries passed on one after another at T = 65536; over short T
// they are as good. 6, 7: 258 rows are two tiles of 144, which then wait for each other. Before
// their 16-byte stores stayed whole (see store in chain.cuh), all one-pass kernels were 3 to 6
// points slower. torch.cumsum took 3.3, 20 and 155 times as long as 5 then did.
//
// Accuracy: within a thread's rows in fp32; every longer sum in double, split into two floats
// (hi, lo) where it meets the rows, out = hi + (lo + local): 20,000,000 ones give 20,000,000.
#include "cases.cuh"
#include "chain.cuh"

typedef struct {
    float *out, *hT;     // (B,T,D), (B,D) or NULL
    const float *x, *h0; // (B,T,D), (B,D) or NULL = 0
    size_t B, T, D;
    int reverse; // the sum runs from T-1 down to 0, and hT is what it reaches at 0
    Word *work; // words_bytes(B,T,D,CHUNK); kernel 3: a double for every chunk and channel
} Cumsum;

enum { CHUNK = 64, GROUP = 16 };

// cumsum_ref: the definition, in double. out (B,T,D) =, hT (B,D) =.
static void cumsum_ref(double *out, double *hT, const float *x, const float *h0, size_t B, size_t T,
                       size_t D, int reverse)
{
    for (size_t b = 0; b < B; b++)
        for (size_t i = 0; i < T; i++) {
            size_t t = reverse ? T - 1 - i : i, row = (b * T + t) * D;
            for (size_t d = 0; d < D; d++) {
                double before = i    ? out[reverse ? row + D + d : row - D + d]
                                : h0 ? h0[b * D + d]
                                     : 0;
                out[row + d] = before + x[row + d];
                hT[b * D + d] = out[row + d];
            }
        }
}

// ---- 1, 2: a thread walks down its channels ----

// walk_kernel: one thread sums VEC channels, U rows of loads in flight. Adds in double.
template <int VEC, int U>
static __global__ void walk_kernel(float *out, float *hT, const float *x, const float *h0, size_t B,
                                   size_t T, size_t D, int reverse)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, n = D / VEC;
    if (i >= B * n)
        return;
    size_t b = i / n, d = i % n * VEC, first = (b * T + (reverse ? T - 1 : 0)) * D + d;
    ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    double sum[VEC];
    for (int c = 0; c < VEC; c++)
        sum[c] = h0 ? h0[b * D + d + c] : 0;
    x += first;
    out += first;
    for (size_t t = 0; t < T; t += U) {
        float v[U][VEC];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < T)
                load(v[u], x + u * step);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < T) {
                for (int c = 0; c < VEC; c++)
                    v[u][c] = (float)(sum[c] += v[u][c]);
                store(out + u * step, v[u]);
            }
        x += U * step;
        out += U * step;
    }
    for (int c = 0; c < VEC && hT; c++)
        hT[b * D + d + c] = (float)sum[c];
}

static int empty(const Cumsum *p) { return p->B == 0 || p->T == 0 || p->D == 0; }

static int wide(const Cumsum *p) { return aligned16(p->D, p->out, p->hT, p->x, p->h0); }

static void cumsum1(const void *problem, cudaStream_t stream)
{
    const Cumsum *p = (const Cumsum *)problem;
    if (empty(p))
        return;
    walk_kernel<1, 1><<<blocks_for(p->B * p->D), 128, 0, stream>>>(p->out, p->hT, p->x, p->h0, p->B,
                                                                   p->T, p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

template <int VEC>
static void walk(const Cumsum *p, cudaStream_t stream)
{
    walk_kernel<VEC, 8><<<blocks_for(p->B * p->D / VEC), 128, 0, stream>>>(
        p->out, p->hT, p->x, p->h0, p->B, p->T, p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

static void cumsum2(const void *problem, cudaStream_t stream)
{
    const Cumsum *p = (const Cumsum *)problem;
    if (empty(p))
        return;
    if (wide(p))
        walk<4>(p, stream);
    else
        walk<1>(p, stream);
}

// ---- 3: reduce, scan, sum again ----

// chunk_kernel: PASS 1: sums (B,NC,D) = sum of each chunk of CHUNK rows. PASS 2: out = the running
// sum of each chunk, started at sums. One thread a chunk and VEC channels.
template <int VEC, int PASS>
static __global__ void chunk_kernel(float *out, double *sums, const float *x, size_t B, size_t T,
                                    size_t D, int reverse)
{
    size_t n = D / VEC, NC = (T + CHUNK - 1) / CHUNK;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= B * NC * n)
        return;
    size_t d = i % n * VEC, k = i / n % NC, b = i / n / NC, t0 = k * CHUNK;
    size_t first = (b * T + (reverse ? T - 1 - t0 : t0)) * D + d;
    ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    double sum[VEC];
    for (int c = 0; c < VEC; c++)
        sum[c] = PASS == 1 ? 0 : sums[(b * NC + k) * D + d + c];
    const int U = 8;
    for (size_t t = t0; t < t0 + CHUNK && t < T; t += U) {
        float v[U][VEC];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < T)
                load(v[u], x + first + (ptrdiff_t)(t + u - t0) * step);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < T) {
                for (int c = 0; c < VEC; c++)
                    v[u][c] = (float)(sum[c] += v[u][c]);
                if (PASS == 2)
                    store(out + first + (ptrdiff_t)(t + u - t0) * step, v[u]);
            }
    }
    for (int c = 0; c < VEC && PASS == 1; c++)
        sums[(b * NC + k) * D + d + c] = sum[c];
}

// chunk_scan_kernel: sums (B,NC,D): each chunk's sum becomes the sum of h0 and all chunks before
// it.
static __global__ void chunk_scan_kernel(double *sums, float *hT, const float *h0, size_t B,
                                         size_t NC, size_t D)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= B * D)
        return;
    double *s = sums + i / D * NC * D + i % D, sum = h0 ? h0[i] : 0;
    for (size_t k = 0; k < NC; k += 8) {
        double v[8];
#pragma unroll
        for (int u = 0; u < 8; u++)
            v[u] = k + u < NC ? s[(k + u) * D] : 0;
#pragma unroll
        for (int u = 0; u < 8; u++) {
            if (k + u < NC)
                s[(k + u) * D] = sum;
            sum += v[u];
        }
    }
    if (hT)
        hT[i] = (float)sum;
}

template <int VEC>
static void chunks(const Cumsum *p, cudaStream_t stream)
{
    size_t NC = (p->T + CHUNK - 1) / CHUNK, n = p->B * NC * p->D;
    double *sums = (double *)p->work;
    chunk_kernel<VEC, 1>
        <<<blocks_for(n / VEC), 128, 0, stream>>>(p->out, sums, p->x, p->B, p->T, p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
    chunk_scan_kernel<<<blocks_for(p->B * p->D), 128, 0, stream>>>(sums, p->hT, p->h0, p->B, NC,
                                                                   p->D);
    CUDA_CHECK(cudaGetLastError());
    chunk_kernel<VEC, 2>
        <<<blocks_for(n / VEC), 128, 0, stream>>>(p->out, sums, p->x, p->B, p->T, p->D, p->reverse);
    CUDA_CHECK(cudaGetLastError());
}

static void cumsum3(const void *problem, cudaStream_t stream)
{
    const Cumsum *p = (const Cumsum *)problem;
    if (empty(p))
        return;
    if (wide(p))
        chunks<4>(p, stream);
    else
        chunks<1>(p, stream);
}

// ---- 4 to 9: one pass ----

// chain_kernel: out (B,T,D) = running sum over T; hT (B,D) = its last row (or NULL); x, h0 as in
// Cumsum; sums and carries as in tile_chain. Block: LX lanes of VEC channels by THREADS/LX
// rows of threads. ASYNC: the next tile is on its way to dynamic shared memory (ROWS,THREADS,VEC)
// while this one is worked on; a thread reads only what it fetched itself, so that costs no
// barrier.
template <int VEC, int LX, int ROWS, int GROUPS, int BLOCKS, int ASYNC>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    chain_kernel(float *out, float *hT, Word *sums, Word *carries, const float *x, const float *h0,
                 size_t T, size_t D, unsigned B, int reverse, Tiling tl)
{
    const int W = LX * VEC, HIGH = THREADS / LX;
    extern __shared__ float4 dynamic[];
    __shared__ Sums<Cells, double, float, HIGH, W> sh;
    float *next = (float *)dynamic + threadIdx.x * VEC;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC; // place in the tile
    const ptrdiff_t step = reverse ? -(ptrdiff_t)D : (ptrdiff_t)D;
    auto fetch = [&](unsigned tile) {
        tile_fetch<VEC, ROWS>(next, x, place(tile, g, w, W, HIGH, B, T, D, reverse, tl), step);
    };
    if (ASYNC)
        fetch(blockIdx.x);
    for (unsigned tile = blockIdx.x; tile < tl.tiles; tile += gridDim.x) {
        const Place p = place(tile, g, w, W, HIGH, B, T, D, reverse, tl);
        float v[ROWS][VEC];
        if (ASYNC)
            copies_wait();
        tile_load(v, ASYNC ? next : x + p.first, ASYNC ? THREADS * VEC : step, p.rows, 0);
        if (ASYNC && tile + gridDim.x < tl.tiles)
            fetch(tile + gridDim.x);
#pragma unroll
        for (int r = 1; r < ROWS; r++)
            for (int c = 0; c < VEC; c++)
                v[r][c] += v[r - 1][c];
        for (int c = 0; c < VEC; c++)
            sh.total.put(g, w + c, v[ROWS - 1][c]);
        __syncthreads();
        tile_chain<GROUPS, 1>(
            sh, sums, carries, p, D, tl, 0.0, [](double a, double b) { return a + b; },
            [&](size_t i) { return h0 ? (double)h0[i] : 0; },
            [&](size_t i, double sum) {
                if (hT)
                    hT[i] = (float)sum;
            });
        float hi[VEC], lo[VEC];
        for (int c = 0; c < VEC; c++) {
            double s = sh.carry.get(0, w + c) + sh.before.get(g, w + c);
            hi[c] = (float)s;
            lo[c] = (float)(s - hi[c]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < VEC; c++)
                v[r][c] = hi[c] + (lo[c] + v[r][c]);
            if (r < p.rows)
                store(out + p.first + r * step, v[r]);
        }
    }
}

// chain: launch chain_kernel with 16-byte accesses if alignment allows, otherwise scalar ones.
template <int ROWS, int GROUPS, int BLOCKS, int ASYNC>
static void chain(const void *problem, cudaStream_t stream)
{
    const Cumsum *p = (const Cumsum *)problem;
    int vec = wide(p) ? 4 : 1, lanes = vec == 4 ? 16 : 32;
    const void *kernel = vec == 4 ? (const void *)chain_kernel<4, 16, ROWS, GROUPS, BLOCKS, ASYNC>
                                  : (const void *)chain_kernel<1, 32, ROWS, GROUPS, BLOCKS, ASYNC>;
    if (empty(p))
        return;
    unsigned B = (unsigned)p->B;
    size_t smem = ASYNC ? 4 * ROWS * THREADS * vec : 0;
    Word *sums, *carries;
    Tiling t = scan_words(&sums, &carries, p->work, p->B, p->T, p->D, lanes, vec, ROWS, GROUPS, 0,
                          stream);
    void *args[] = {(void *)&p->out, (void *)&p->hT, &sums, &carries, (void *)&p->x,
                    (void *)&p->h0,  (void *)&p->T,  (void *)&p->D, &B, (void *)&p->reverse, &t};
    chain_launch(kernel, "cumsum chain_kernel", &t, smem, 0, args, stream);
}

// ---- main ----

// too_long: a single thread walking down a million rows takes seconds.
static const char *too_long(const void *problem)
{
    return ((const Cumsum *)problem)->T > 1000000 ? "a thread a channel is too slow here" : NULL;
}

static const BenchKernel kernels[] = {
    {1, "thread a channel", cumsum1, too_long},
    {2, "thread 4 channels, 8 rows in flight", cumsum2, too_long},
    {3, "sum chunks, scan, sum again", cumsum3, NULL},
    {4, "one pass, chain, 272 rows", chain<17, 1, 2, 0>, NULL},
    {5, "one pass, groups of 16, 272 rows", chain<17, GROUP, 2, 0>, NULL},
    {6, "one pass, groups of 16, 144 rows", chain<9, GROUP, 3, 0>, NULL},
    {7, "6 + next tile in flight", chain<9, GROUP, 3, 1>, NULL},
    {8, "5 + next tile in flight", chain<17, GROUP, 2, 1>, NULL},
    {9, "4 + next tile in flight", chain<17, 1, 2, 1>, NULL},
};

typedef enum { UNIFORM, ONES, LARGE } Values;

// run_values: one case: inputs, reference, all kernels. hT of ones must be exact. Returns the
// number of failures.
static int run_values(const Shape *s, Values values, const BenchOptions *opt)
{
    size_t n = s->B * s->T * s->D, m = s->B * s->D;
    double bound = values == ONES ? 1e-7 : 1e-6;
    char name[128];
    enum { X, H0, OUT, HT, ARRAYS };
    Array a[ARRAYS] = {
        array_new(n, BENCH_F32, s->shift), array_new(m, BENCH_F32, 0),
        array_new(n, BENCH_F32, s->shift), array_new(m, BENCH_F32, 0)};
    BenchBuffer work = bench_alloc(words_bytes(s->B, s->T, s->D, CHUNK) / 4, BENCH_F32, 0);
    for (size_t i = 0; i < n; i++) {
        float u = bench_uniform(1 + s->T, i);
        a[X].h[i] = values == ONES    ? 1
                    : values == LARGE ? 1e10f * (u + .5f)
                    : u < .1f         ? 0
                                      : 2 * u - .7f;
    }
    for (size_t i = 0; i < m; i++)
        a[H0].h[i] = s->state && values != ONES ? 3 * bench_uniform(2, i) : 0;
    cumsum_ref(a[OUT].ref, a[HT].ref, a[X].h, s->state ? a[H0].h : NULL, s->B, s->T, s->D,
               s->reverse);
    array_upload(&a[X]), array_upload(&a[H0]);
    Cumsum p = {(float *)a[OUT].d.data, s->state ? (float *)a[HT].d.data : NULL,
                (const float *)a[X].d.data, s->state ? (const float *)a[H0].d.data : NULL,
                s->B, s->T, s->D, s->reverse, (Word *)work.data};
    BenchOutput outputs[] = {array_output("out", &a[OUT], bound),
                             array_output("hT", &a[HT], values == ONES ? 0 : bound)};
    snprintf(name, sizeof name, "cumsum (%zu,%zu,%zu) %s%s", s->B, s->T, s->D,
             s->reverse ? "reverse" : "forward",
             values == ONES    ? " ones"
             : values == LARGE ? " 1e10"
                               : "");
    BenchCase c = {name, &p, kernels, sizeof kernels / sizeof *kernels, outputs, s->state ? 2 : 1,
                   8.0 * (double)n, 0, "GB"};
    int failed = bench_case(&c, opt) + scratch_spoilt(&work);
    arrays_free(a, ARRAYS);
    bench_free(&work);
    return failed;
}

static int run_shape(const Shape *s, const BenchOptions *opt)
{
    return run_values(s, UNIFORM, opt);
}

// run_checks: the small and the awkward shapes, untimed. Returns the number of failures.
static int run_checks(const BenchOptions *opt)
{
    static const struct {
        Shape shape;
        Values values;
    } others[] = {{{1, 10000, 1, 0, 1, 0, 0}, LARGE},
                  {{1, 10000, 192, 1, 1, 0, 0}, LARGE},
                  {{1, 20000000, 1, 0, 1, 0, 0}, ONES}};
    BenchOptions o = small_options(opt);
    int cases = 0, failed = run_small(run_shape, &o, &cases);
    for (size_t rows = 65535; rows <= 65537; rows++) {
        const Shape shapes[] = {
            {rows, 3, 1, 0, 1, 0, 0}, {1, 3, rows, 1, 1, 0, 0}, {rows, 2, 4, 0, 0, 0, 0}};
        for (int i = 0; i < 3; i++, cases++)
            failed += run_shape(&shapes[i], &o);
    }
    for (int i = 0; i < 3; i++)
        failed += run_values(&others[i].shape, others[i].values, &o);
    BenchBuffer out = bench_alloc(16, BENCH_F32, 0); // no rows: nothing is touched
    uint32_t h[16];
    Cumsum p = {(float *)out.data, NULL, (float *)out.data, NULL, 2, 0, 8, 0, (Word *)out.data};
    for (const BenchKernel *k = kernels; k < kernels + sizeof kernels / sizeof *kernels; k++)
        k->fn(&p, 0);
    CUDA_CHECK(cudaMemcpy(h, out.data, 64, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 16; i++)
        if (h[i] != 0xFFFFFFFFu)
            failed++, printf("  FAILED: T = 0 wrote to the output\n");
    bench_free(&out);
    printf("cumsum: %d small cases, %d failures\n", cases + 4, failed);
    return failed;
}

int main(int argc, char **argv)
{
    BenchOptions opt = bench_options(argc, argv, "cumsum: inclusive sum over T of (B,T,C), fp32");
    int failed = run_scan(run_shape, run_checks, 1, &opt);
    const Shape million = {1, 1000003, 1, 0, 0, 0, 0}; // 20 runs, the same bits
    if (!opt.check_only && !shape_given(&opt))
        failed += run_shape(&million, &opt);
    return failed ? EXIT_FAIL : 0;
}
