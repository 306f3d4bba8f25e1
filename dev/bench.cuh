// bench.cuh: what every kernel ladder in dev/ shares: options, buffers, check, timing, table.
//
// A ladder has a table of BenchKernel and, for each shape, a BenchCase: its problem (any struct,
// handed to every kernel), its outputs with their double-precision references, and the work of one
// call. After bench_options(), bench_case() takes each chosen kernel through the same steps:
//   refuse? -> outputs poisoned with NaN -> run -> compare, guard bands -> same bits in 20 runs
//           -> timed, L2 flushed before every call -> same bits, compared again -> a row
// A kernel that fails any of them gets the word FAILED where its speed would stand. The yardstick
// is cudaMemcpyAsync of the case's bytes (half read, half written) under the same flush.
#ifndef SEQ_DEV_BENCH_CUH
#define SEQ_DEV_BENCH_CUH

#include "../util/check.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <getopt.h>
#include <time.h>

// BLOB: the hash of a ladder, FILE, with all of the repository that it includes; FLAGS with -arch:
//   cat $(nvcc -MM FLAGS FILE | grep -o '\bdev/[^ ]*') | git hash-object --stdin
// nvcc -DBLOB="\"HASH\""
#ifndef BLOB
#define BLOB "-"
#endif

// CUDA_CHECK(call): die with the call's text and CUDA's reason unless it returns cudaSuccess.
#ifndef CUDA_CHECK // util/cuda.h has it too
#define CUDA_CHECK(call) bench_cuda((call), #call, __FILE__, __LINE__)
#endif

static inline void bench_cuda(cudaError_t e, const char *what, const char *file, int line)
{
    if (e != cudaSuccess)
        die(EXIT_MEMORY, "%s:%d: %s: %s", file, line, what, cudaGetErrorString(e));
}

// bench_fits: make `kernel` launchable with `threads` a block and `smem` bytes of dynamic shared
// memory (opts in where, with its static memory, they pass 48 KiB); dies naming the kernel if
// registers or device do not allow it.
static inline void bench_fits(const void *kernel, const char *name, int threads, size_t smem)
{
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, kernel));
    if (a.maxThreadsPerBlock < threads)
        die(EXIT_MEMORY, "%s: a block of %d threads, expected at most %d (%d registers each)", name,
            threads, a.maxThreadsPerBlock, a.numRegs);
    if (smem + a.sharedSizeBytes > 48 * 1024 &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem))
        die(EXIT_MEMORY, "%s: %zu bytes of shared memory a block: too many here", name, smem);
}

// ---- options ----

typedef struct {
    int kernel;     // number in the table, 0 = all
    size_t B, T, C; // shape; 0 = the ladder's own shapes
    int reps;       // timed calls
    int check_only; // no timing
    int time_only;  // the ladder leaves out its small cases, and replays of its large ones
    int self_test;  // inject faults and demand that the check sees them
    int csv;        // also print tab-separated rows for dev/results/
} BenchOptions;

// bench_size: the whole of `text` as an integer in 1..2^40, or die naming the option.
static inline size_t bench_size(const char *option, const char *text)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < 1 || v > (1LL << 40))
        die(EXIT_USAGE, "--%s: expected an integer from 1 to 2^40, got %s", option, text);
    return (size_t)v;
}

// bench_options: parse the command line; dies on anything unknown. --help prints `usage` first.
static inline BenchOptions bench_options(int argc, char **argv, const char *usage)
{
    static const struct option table[] = {
        {"kernel", 1, 0, 'k'}, {"B", 1, 0, 'B'}, {"T", 1, 0, 'T'}, {"C", 1, 0, 'C'},
        {"reps", 1, 0, 'r'}, {"check-only", 0, 0, 'c'}, {"self-test", 0, 0, 's'},
        {"csv", 0, 0, 'v'}, {"time-only", 0, 0, 't'}, {"help", 0, 0, 'h'}, {0, 0, 0, 0}};
    BenchOptions o = {0, 0, 0, 0, 30, 0, 0, 0, 0};
    int id;
    while ((id = getopt_long(argc, argv, "", table, NULL)) != -1)
        switch (id) {
        case 'k': o.kernel = strcmp(optarg, "all") ? (int)bench_size("kernel", optarg) : 0; break;
        case 'B': o.B = bench_size("B", optarg); break;
        case 'T': o.T = bench_size("T", optarg); break;
        case 'C': o.C = bench_size("C", optarg); break;
        case 'r': o.reps = (int)bench_size("reps", optarg); break;
        case 'c': o.check_only = 1; break;
        case 't': o.time_only = 1; break;
        case 's': o.self_test = 1; break;
        case 'v': o.csv = 1; break;
        case 'h':
            printf("%s\n  --kernel N|all  --B N --T N --C N  --reps N\n"
                   "  --check-only  --time-only  --self-test  --csv\n", usage);
            exit(0);
        default: die(EXIT_USAGE, "%s: see --help", argv[optind - 1]);
        }
    if (optind < argc)
        die(EXIT_USAGE, "%s: expected only options\nhint: --help lists them", argv[optind]);
    return o;
}

// ---- buffers ----

enum { BENCH_GUARD = 4096, BENCH_GUARD_BYTE = 0xA5 };

typedef enum { BENCH_F32, BENCH_BF16 } BenchType;

// A device array between two guard bands of 4 KiB.
typedef struct {
    char *base;
    void *data;   // = base + BENCH_GUARD + shift
    size_t bytes; // of the array
    size_t shift;
} BenchBuffer;

static inline size_t bench_elem(BenchType type) { return type == BENCH_F32 ? 4 : 2; }

// bench_alloc: n elements between guard bands, `shift` bytes past a 256-byte boundary (0, or a
// multiple of the element, below 4096, to be an unaligned caller). Contents: NaN.
static inline BenchBuffer bench_alloc(size_t n, BenchType type, size_t shift)
{
    BenchBuffer b = {NULL, NULL, size_mul(n, bench_elem(type), "bench buffer"), shift};
    CUDA_CHECK(cudaMalloc(&b.base, b.bytes + shift + 2 * BENCH_GUARD));
    CUDA_CHECK(cudaMemset(b.base, BENCH_GUARD_BYTE, b.bytes + shift + 2 * BENCH_GUARD));
    b.data = b.base + BENCH_GUARD + shift;
    CUDA_CHECK(cudaMemset(b.data, 0xFF, b.bytes));
    return b;
}

static inline void bench_free(BenchBuffer *b)
{
    CUDA_CHECK(cudaFree(b->base));
    b->base = NULL;
}

// bench_guards: 1 if no byte of either guard band has changed.
static inline int bench_guards(const BenchBuffer *b)
{
    unsigned char band[2][BENCH_GUARD];
    int same = 1;
    CUDA_CHECK(cudaMemcpy(band[0], (char *)b->data - BENCH_GUARD, BENCH_GUARD, cudaMemcpyDefault));
    CUDA_CHECK(cudaMemcpy(band[1], (char *)b->data + b->bytes, BENCH_GUARD, cudaMemcpyDefault));
    for (int i = 0; i < BENCH_GUARD; i++)
        same &= band[0][i] == BENCH_GUARD_BYTE && band[1][i] == BENCH_GUARD_BYTE;
    return same;
}

// bench_upload: copy h_x (n floats) into the buffer. Type bf16: rounded to nearest even, in h_x
// itself too, so that the reference sees what the kernel sees.
static inline void bench_upload(BenchBuffer *b, BenchType type, float *h_x, size_t n)
{
    if (type == BENCH_F32) {
        CUDA_CHECK(cudaMemcpy(b->data, h_x, n * 4, cudaMemcpyHostToDevice));
        return;
    }
    __nv_bfloat16 *h = (__nv_bfloat16 *)alloc_zero(n, 2, "bf16 staging");
    for (size_t i = 0; i < n; i++) {
        h[i] = __float2bfloat16(h_x[i]);
        h_x[i] = __bfloat162float(h[i]);
    }
    CUDA_CHECK(cudaMemcpy(b->data, h, n * 2, cudaMemcpyHostToDevice));
    free(h);
}

// bench_uniform: value i of stream `seed`, uniform in [0, 1): a hash of the counter.
static inline float bench_uniform(uint64_t seed, uint64_t i)
{
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u + seed * 0xD1B54A32D192ED03u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (float)((z ^ (z >> 31)) >> 40) * (1.0f / 16777216.0f);
}

// ---- cases ----

typedef struct {
    const char *name;
    BenchBuffer *buffer;
    BenchType type;
    size_t n;
    const double *ref; // (n) on the host
    double bound;      // on the relative L2 error, see compare()
    double largest;    // > 0: norm of the largest gradient, likewise
} BenchOutput;

typedef struct {
    int num; // 1 = naive
    const char *name;
    void (*fn)(const void *problem, cudaStream_t stream);
    const char *(*refuse)(const void *problem); // NULL, or why it cannot run
} BenchKernel;

typedef struct {
    const char *name; // "cumsum (320,258,192) forward"
    const void *problem;
    const BenchKernel *kernels;
    int num_kernels;
    const BenchOutput *outputs;
    int num_outputs;
    double bytes;     // read + written by one call; what the copy moves
    double work;      // in units of `unit`; 0 = bytes
    const char *unit; // "GB", "TFLOP", "Gexp": printed per second
} BenchCase;

// bench_bits_kernel: sum += a hash of every 2-byte half and its index; integers: any order will do.
static __global__ void bench_bits_kernel(unsigned long long *sum, const uint16_t *x, size_t n)
{
    unsigned long long s = 0;
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step)
        s += (x[i] + 0x9E3779B97F4A7C15ull) * (2 * i + 1);
    atomicAdd(sum, s);
}

// bench_bits: a checksum of all outputs' bits.
static inline unsigned long long bench_bits(const BenchCase *c)
{
    unsigned long long *d_sum, sum = 0;
    CUDA_CHECK(cudaMalloc(&d_sum, 8));
    CUDA_CHECK(cudaMemset(d_sum, 0, 8));
    for (int i = 0; i < c->num_outputs; i++) {
        const BenchBuffer *b = c->outputs[i].buffer;
        const size_t blocks = b->bytes / 2 / 256 + 1;
        bench_bits_kernel<<<blocks < 1024 ? (unsigned)blocks : 1024, 256>>>(
            d_sum, (const uint16_t *)b->data, b->bytes / 2);
        CUDA_CHECK(cudaGetLastError());
    }
    CUDA_CHECK(cudaMemcpy(&sum, d_sum, 8, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(d_sum));
    return sum;
}

// bench_run: poison every output and run kernel k once, to its end.
static inline void bench_run(const BenchCase *c, const BenchKernel *k)
{
    for (int i = 0; i < c->num_outputs; i++)
        CUDA_CHECK(cudaMemset(c->outputs[i].buffer->data, 0xFF, c->outputs[i].buffer->bytes));
    k->fn(c->problem, 0);
    bench_cuda(cudaGetLastError(), k->name, c->name, k->num);
    bench_cuda(cudaDeviceSynchronize(), k->name, c->name, k->num);
}

// bench_check: every output against its reference, guard bands included. worst = the largest
// relative error. Returns 1 if all is well, otherwise says on stdout what is not (unless quiet).
static inline int bench_check(const BenchCase *c, double *worst, int quiet)
{
    int ok = 1;
    *worst = 0;
    for (int i = 0; i < c->num_outputs; i++) {
        const BenchOutput *o = &c->outputs[i];
        float *h = (float *)alloc_zero(o->n, 4, "output on the host");
        CUDA_CHECK(cudaMemcpy(h, o->buffer->data, o->buffer->bytes, cudaMemcpyDeviceToHost));
        if (o->type == BENCH_BF16)
            for (size_t j = o->n; j-- > 0;) // from the end: widening in place
                h[j] = __bfloat162float(((const __nv_bfloat16 *)h)[j]);
        Comparison r = compare(h, 4, o->ref, 8, o->n, o->bound, o->largest);
        int guards = bench_guards(o->buffer);
        if ((!r.ok || !guards) && !quiet)
            printf("  %s: relative L2 %.2e (bound %.0e); at %zu of %zu %.9g, expected %.9g%s\n",
                   o->name, r.rel_l2, o->bound, r.worst, o->n, h[r.worst], o->ref[r.worst],
                   guards ? "" : "; wrote outside the array");
        ok &= r.ok && guards;
        *worst = fmax(*worst, r.rel_l2);
        free(h);
    }
    return ok;
}

// ---- time ----

static __global__ void bench_flush_kernel(float *sink, const float4 *x, size_t n)
{
    float s = 0;
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step)
        s += x[i].x;
    if (s == 12345.0f) // never: the buffer is zero
        *sink = s;
}

// bench_flush: fill L2 with clean lines of an unrelated 256 MiB (read, not written: dirty lines
// would be written back at the next kernel's expense).
static inline void bench_flush(cudaStream_t stream)
{
    static float *x = NULL;
    const size_t bytes = (size_t)256 << 20;
    if (!x) {
        CUDA_CHECK(cudaMalloc(&x, bytes));
        CUDA_CHECK(cudaMemset(x, 0, bytes));
    }
    bench_flush_kernel<<<1056, 256, 0, stream>>>(x, (const float4 *)x, bytes / 16);
    CUDA_CHECK(cudaGetLastError());
}

typedef struct {
    float median, min; // milliseconds
} BenchTime;

static inline int bench_by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// bench_time: `reps` calls of fn(problem), each after a flush, after 3 calls to warm up.
static inline BenchTime bench_time(void (*fn)(const void *, cudaStream_t), const void *problem,
                                   int reps)
{
    float *ms = (float *)alloc_zero(reps, 4, "timings"), warm_up;
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = -3; i < reps; i++) {
        bench_flush(0);
        CUDA_CHECK(cudaEventRecord(start, 0));
        fn(problem, 0);
        CUDA_CHECK(cudaEventRecord(stop, 0));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(i < 0 ? &warm_up : &ms[i], start, stop));
    }
    qsort(ms, reps, 4, bench_by_value);
    BenchTime t = {(ms[(reps - 1) / 2] + ms[reps / 2]) / 2, ms[0]};
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    free(ms);
    return t;
}

typedef struct {
    char *from, *to;
    size_t bytes;
} BenchCopy;

static inline void bench_copy(const void *problem, cudaStream_t stream)
{
    const BenchCopy *c = (const BenchCopy *)problem;
    CUDA_CHECK(cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDeviceToDevice, stream));
}

// bench_row: a line for dev/results/NAME.tsv: date, device, blob, benchmark, result.
static inline void bench_row(const char *benchmark, const char *result)
{
    cudaDeviceProp p;
    char date[16];
    time_t now = time(NULL);
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("%s\t%s\t%s\t%s\t%s\n", date, p.name, BLOB, benchmark, result);
}

// bench_self_test: run k, spoil an output in five ways, in turn; returns how many the check misses.
static inline int bench_self_test(const BenchCase *c, const BenchKernel *k)
{
    const BenchOutput *o = &c->outputs[c->num_outputs - 1];
    const size_t size = bench_elem(o->type), n = o->buffer->bytes;
    const struct {
        ptrdiff_t at;
        int byte, count;
    } faults[] = {{(ptrdiff_t)(n - size), 0xFF, (int)size},       // the last element never written
                  {(ptrdiff_t)(o->n / 2 * size), 0xFF, (int)size}, // a NaN in the middle
                  {0, 0x7E, (int)size},                           // large but finite
                  {(ptrdiff_t)n, 0, 1}, {-1, 0, 1}};              // outside the array
    int missed = 0;
    double worst;
    for (int i = 0; i < 5; i++) {
        char *at = (char *)o->buffer->data + faults[i].at;
        bench_run(c, k);
        CUDA_CHECK(cudaMemset(at, faults[i].byte, faults[i].count));
        missed += bench_check(c, &worst, 1);
        CUDA_CHECK(cudaMemset(at, BENCH_GUARD_BYTE, faults[i].count));
    }
    printf("  self-test: kernel %d: %d of 5 faults seen\n", k->num, 5 - missed);
    return missed;
}

// bench_yardstick: GB/s of a device-to-device copy that moves the case's bytes; prints the heading.
static inline double bench_yardstick(const BenchCase *c, int reps)
{
    BenchCopy y = {NULL, NULL, (size_t)(c->bytes / 2)};
    CUDA_CHECK(cudaMalloc(&y.from, y.bytes));
    CUDA_CHECK(cudaMalloc(&y.to, y.bytes));
    CUDA_CHECK(cudaMemset(y.from, 1, y.bytes));
    BenchTime t = bench_time(bench_copy, &y, reps);
    double gbs = 2e-6 * (double)y.bytes / t.median;
    printf("%s: %.1f MB; a copy of as many takes %.4f ms, %.0f GB/s\n", c->name, c->bytes / 1e6,
           t.median, gbs);
    printf("  %-2s %-36s %9s %9s %7s/s %6s %9s\n", "", "kernel", "median ms", "min ms", c->unit,
           "% copy", "rel. L2");
    CUDA_CHECK(cudaFree(y.from));
    CUDA_CHECK(cudaFree(y.to));
    return gbs;
}

// bench_kernel: check one kernel on one case, three runs of it if check_only, one if time_only,
// else 20, all to the same bits; unless check_only, time it. 1 if it failed.
static inline int bench_kernel(const BenchCase *c, const BenchKernel *k, const BenchOptions *opt,
                               double copy_gbs)
{
    double error;
    char result[256], benchmark[256];
    bench_run(c, k);
    int ok = bench_check(c, &error, 0);
    unsigned long long bits = bench_bits(c);
    const int runs = opt->check_only ? 3 : opt->time_only ? 1 : 20;
    for (int r = 2; r <= runs && ok; r++) {
        bench_run(c, k);
        if (bench_bits(c) != bits)
            ok = 0, printf("  run %d differs in its bits from the first\n", r);
    }
    if (ok && opt->self_test)
        ok = bench_self_test(c, k) == 0;
    BenchTime t = {0, 0};
    if (ok && !opt->check_only) {
        t = bench_time(k->fn, c->problem, opt->reps);
        ok = bench_bits(c) == bits && bench_check(c, &error, 0);
    }
    if (!ok)
        printf("  %-2d %-36s FAILED on %s\n", k->num, k->name, c->name);
    if (!ok || opt->check_only)
        return !ok;
    double rate = (c->work > 0 ? c->work : c->bytes / 1e9) / (1e-3 * t.median);
    double percent = 100 * 1e-6 * c->bytes / t.median / copy_gbs;
    printf("  %-2d %-36s %9.4f %9.4f %9.1f %6.1f %9.1e\n", k->num, k->name, t.median, t.min, rate,
           percent, error);
    snprintf(benchmark, sizeof benchmark, "%s kernel %d (%s)", c->name, k->num, k->name);
    snprintf(result, sizeof result, "%.4f ms median, %.4f min, %.1f %s/s, %.1f%% of copy, %.1e off",
             t.median, t.min, rate, c->unit, percent, error);
    if (opt->csv)
        bench_row(benchmark, result);
    return 0;
}

// bench_case: the chosen kernels on one case; returns the number of failures.
static inline int bench_case(const BenchCase *c, const BenchOptions *opt)
{
    double copy_gbs = opt->check_only ? 0 : bench_yardstick(c, opt->reps);
    int failed = 0;
    for (const BenchKernel *k = c->kernels; k < c->kernels + c->num_kernels; k++) {
        const char *why = k->refuse ? k->refuse(c->problem) : NULL;
        if (opt->kernel && opt->kernel != k->num)
            continue;
        if (!why)
            failed += bench_kernel(c, k, opt, copy_gbs);
        else if (!opt->check_only)
            printf("  %-2d %-36s skipped: %s\n", k->num, k->name, why);
    }
    return failed;
}

#endif
