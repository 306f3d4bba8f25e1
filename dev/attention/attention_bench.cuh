// attention_bench.cuh: what the attention ladders share: shapes, inputs, the double-precision
// reference in the plain form. The kernels but the naive ones and those of attention_hopper.cuh are
// train_gpt2.cu's own, which is included whole.
#ifndef SEQ_DEV_ATTENTION_BENCH_CUH
#define SEQ_DEV_ATTENTION_BENCH_CUH

#define TESTING
#pragma nv_diag_suppress 177 // most of the trainer is not used here
#include "../../train_gpt2.cu"
#include "../bench.cuh"
#include "attention_reference.h"

static const BenchType ATT_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;

// A shape on the device. Inputs stand between rows of NaN. split: after a backward, dq, dk, dv
// (B,T,C) are taken out of dqkv, so that each is judged by itself.
typedef struct {
    size_t B, T, C, NH;
    int causal, linear, split;
    BenchBuffer inputs[5];             // of qkv, dout, in_out, in_lse, features
    const floatX *qkv, *dout, *in_out; // in_*: the reference's, for the backward
    const floatX *features; // linear: qkv with phi(q) and phi(k), which the trainer's kernels take
    const float *in_lse;
    BenchBuffer out, lse, dqkv, dq, dk, dv;
    float *scratch;
    double *ref_out, *ref_lse, *ref_dqkv, *ref_dq, *ref_dk, *ref_dv;
} Attention;

// attention_random: h_x[b,t,part,h,i] normal-ish with deviation `size`; sequences repeat after
// b_period, heads after h_period. parts: 3 of qkv, 1 of dout.
static float *attention_random(uint64_t seed, const Attention *x, size_t parts, float size,
                               size_t b_period, size_t h_period)
{
    const size_t HS = x->C / x->NH, width = parts * x->C, n = x->B * x->T * width;
    float *h_x = (float *)alloc_zero(n, 4, "input");
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        const size_t b = i / width / x->T % b_period, t = i / width % x->T;
        const size_t part = i % width / x->C, h = i % x->C / HS % h_period, c = i % HS;
        const uint64_t at = (((b * x->T + t) * parts + part) * h_period + h) * HS + c;
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += bench_uniform(seed, 4 * at + k) - 0.5f;
        h_x[i] = 1.7320508f * size * sum;
    }
    return h_x;
}

// attention_upload: h_x (n) on the device between 64 rows of NaN on either side; the place of its
// first element. BF16: rounded in h_x too.
static void *attention_upload(BenchBuffer *b, BenchType type, float *h_x, size_t n, size_t width)
{
    const size_t pad = 64 * 8 * width;
    *b = bench_alloc(n + 2 * pad, type, 0);
    BenchBuffer inside = *b;
    inside.data = (char *)b->data + pad * bench_elem(type);
    bench_upload(&inside, type, h_x, n);
    return inside.data;
}

// attention_setup: inputs, references and buffers of a shape. size: deviation of q, k, v.
static Attention attention_setup(size_t B, size_t T, size_t NH, size_t HS, int causal, int linear,
                                 float size, size_t b_period, size_t h_period)
{
    Attention x = {B, T, NH * HS, NH, causal, linear, 0};
    const size_t n = B * T * x.C, rows = B * T * NH;
    float *h_qkv = attention_random(1, &x, 3, size, b_period, h_period);
    float *h_dout = attention_random(2, &x, 1, 1, b_period, h_period);
    float *h_out = (float *)alloc_zero(n, 4, "out"), *h_lse = (float *)alloc_zero(rows, 4, "lse");
    x.qkv = (floatX *)attention_upload(&x.inputs[0], ATT_TYPE, h_qkv, 3 * n, 3 * x.C);
    x.dout = (floatX *)attention_upload(&x.inputs[1], ATT_TYPE, h_dout, n, x.C);
    x.features = x.qkv;
    if (linear) {
        float *h_features = (float *)alloc_zero(3 * n, 4, "features");
        for (size_t i = 0; i < 3 * n; i++) {
            const float q = h_qkv[i];
            h_features[i] = i % (3 * x.C) >= 2 * x.C ? q : q > 0 ? q + 1 : expf(q);
        }
        x.features =
            (floatX *)attention_upload(&x.inputs[4], ATT_TYPE, h_features, 3 * n, 3 * x.C);
        free(h_features);
    }
    x.ref_out = (double *)alloc_zero(7 * n + rows, 8, "references");
    x.ref_dqkv = x.ref_out + n, x.ref_dq = x.ref_dqkv + 3 * n, x.ref_dk = x.ref_dq + n;
    x.ref_dv = x.ref_dk + n, x.ref_lse = x.ref_dv + n;
    reference_attention(x.ref_out, x.ref_lse, x.ref_dq, x.ref_dk, x.ref_dv, h_qkv, h_dout, B, T,
                        x.C, NH, causal, linear, b_period, h_period);
    for (size_t i = 0; i < B * T; i++)
        for (int part = 0; part < 3; part++)
            memcpy(x.ref_dqkv + (3 * i + part) * x.C, x.ref_dq + part * n + i * x.C, 8 * x.C);
    for (size_t i = 0; i < n; i++)
        h_out[i] = (float)x.ref_out[i];
    for (size_t i = 0; i < rows; i++)
        h_lse[i] = (float)x.ref_lse[i];
    x.in_out = (floatX *)attention_upload(&x.inputs[2], ATT_TYPE, h_out, n, x.C);
    x.in_lse = (float *)attention_upload(&x.inputs[3], BENCH_F32, h_lse, rows, 1);
    free(h_qkv), free(h_dout), free(h_out), free(h_lse);
    BenchBuffer *outputs[] = {&x.out, &x.dq, &x.dk, &x.dv};
    for (int i = 0; i < 4; i++)
        *outputs[i] = bench_alloc(n, ATT_TYPE, 0);
    x.dqkv = bench_alloc(3 * n, ATT_TYPE, 0);
    x.lse = bench_alloc(rows, BENCH_F32, 0);
    CUDA_CHECK(cudaMalloc(&x.scratch, 2 * rows * sizeof(float)));
    CUDA_CHECK(cudaMemset(x.scratch, 0xFF, 2 * rows * sizeof(float))); // NaN
    return x;
}

// attention_free: give back what attention_setup took.
static void attention_free(Attention *x)
{
    BenchBuffer *all[] = {&x->inputs[0], &x->inputs[1], &x->inputs[2], &x->inputs[3],
                          &x->inputs[4], &x->out, &x->lse, &x->dqkv, &x->dq, &x->dk, &x->dv};
    for (int i = 0; i < 11; i++)
        bench_free(all[i]);
    CUDA_CHECK(cudaFree(x->scratch));
    free(x->ref_out);
}

// attention_split: where asked for, copy dq, dk, dv out of dqkv.
static void attention_split(const Attention *x, cudaStream_t stream)
{
    const BenchBuffer *parts[] = {&x->dq, &x->dk, &x->dv};
    const size_t width = x->C * sizeof(floatX);
    for (int i = 0; x->split && i < 3; i++)
        CUDA_CHECK(cudaMemcpy2DAsync(parts[i]->data, width, (char *)x->dqkv.data + i * width,
                                     3 * width, width, x->B * x->T, cudaMemcpyDefault, stream));
}

// attention_case: the table's kernels on one shape, forward or backward; returns the number of
// failures. Linear with T = 1 or HS = 1: dq and dk are eps away from 0, noise next to dv, and are
// judged only with it.
static int attention_case(Attention *x, const BenchKernel *kernels, int num_kernels, int backward,
                          const BenchOptions *bench)
{
    const size_t n = x->B * x->T * x->C, rows = x->B * x->T * x->NH;
    const double T = (double)x->T, pairs = x->causal ? T * (T + 1) / 2 : T * T;
    const double grad = sizeof(floatX) == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
    const double bound = sizeof(floatX) == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    const BenchOutput forward[] = {{"out", &x->out, ATT_TYPE, n, x->ref_out, bound},
                                   {"lse", &x->lse, BENCH_F32, rows, x->ref_lse, bound}};
    const BenchOutput grads[] = {{"dqkv", &x->dqkv, ATT_TYPE, 3 * n, x->ref_dqkv, grad},
                                 {"dv", &x->dv, ATT_TYPE, n, x->ref_dv, grad},
                                 {"dq", &x->dq, ATT_TYPE, n, x->ref_dq, grad},
                                 {"dk", &x->dk, ATT_TYPE, n, x->ref_dk, grad}};
    const int noise = x->linear && (x->T == 1 || x->C == x->NH);
    char name[160];
    snprintf(name, sizeof name, "%s %s %s (%zu,%zu,%zu,%zu)%s",
             x->linear ? "linear attention" : "attention", backward ? "backward" : "forward",
             sizeof(floatX) == 2 ? "bf16" : "fp32", x->B, x->T, x->NH, x->C / x->NH,
             x->causal ? "" : " non-causal");
    x->split = backward && bench->check_only;
    BenchCase c = {name,
                   x,
                   kernels,
                   num_kernels,
                   backward ? grads : forward,
                   !backward ? 2 : !x->split ? 1 : noise ? 2 : 4,
                   (backward ? 8.0 : 4.0) * (double)(n * sizeof(floatX)),
                   1e-12 * (backward ? 10 : 4) * pairs * (double)(x->B * x->C),
                   "TFLOP"};
    return bench_case(&c, bench);
}

// attention_checks: every shape that a kernel may stumble over; returns the number of failures.
static int attention_checks(const BenchKernel *kernels, int num_kernels, int backward, int linear,
                            const BenchOptions *bench)
{
    static const size_t Ts[] = {1, 2, 31, 33, 63, 64, 65, 255, 258, 1000};
    static const size_t heads[] = {1, 3, 5, 20, 60, 64, 80, 100, 128, 192};
    BenchOptions check = *bench;
    int failed = 0, cases = 0;
    check.check_only = 1;
    for (int i = 0; i < 10 * 10 * 2 + 5; i++) {
        const size_t T = i < 200 ? Ts[i / 20] : i < 203 ? 31 : 258, HS = heads[i / 2 % 10];
        const int tiled = HS == 64 || HS == 128 || HS == 192, causal = i % 2;
        const size_t many = T < 100 ? 2 : 1;
        if (T == 1000 && !tiled && HS != 5)
            continue;
        Attention x = i < 200 ? attention_setup(many, T, many + 1, HS, causal, linear, 1, 4, 4)
                      : i < 203 ? attention_setup(33, 31, 33, i == 200 ? 64 : 20, 1, linear, 1, 2,
                                                  3)
                                : attention_setup(1, 258, 1, i == 203 ? 64 : 192, 1, linear,
                                                  linear ? 4 : 6, 1, 1); // large logits
        failed += attention_case(&x, kernels, num_kernels, backward, &check);
        attention_free(&x);
        cases++;
    }
    printf("checks: %d shapes, %d failed\n", cases, failed);
    return failed;
}

// attention_ladder: checks and tables of a ladder; returns the number of failures.
static int attention_ladder(const BenchKernel *kernels, int num_kernels, int backward, int linear,
                            const BenchOptions *bench)
{
    static const size_t shapes[][4] = {
        {320, 258, 1, 192}, {8, 2048, 16, 128}, {16, 1024, 12, 64}};
    int failed = 0;
    if (!bench->time_only)
        failed += attention_checks(kernels, num_kernels, backward, linear, bench);
    for (int i = 0; i < 3 && !bench->check_only; i++) {
        Attention x = attention_setup(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1,
                                      linear, 1, 2, 4);
        failed += attention_case(&x, kernels, num_kernels, backward, bench);
        attention_free(&x);
    }
    return failed;
}

// ---- naive: a block a row, its weights in shared memory

enum { NAIVE_THREADS = 128 };

// refuse_naive: why the naive kernels do not take a shape, or NULL.
static const char *refuse_naive(const void *problem)
{
    const Attention *x = (const Attention *)problem;
    if (x->T > 6000)
        return "48 KiB of weights";
    return (double)(x->B * x->C) * (double)x->T * (double)x->T > 1e10 ? "it would take too long"
                                                                      : NULL;
}

// naive_dot: x.y over n; linear: phi(x).phi(y).
template <int LINEAR>
static __device__ inline float naive_dot(const floatX *x, const floatX *y, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += LINEAR ? phi((float)x[i]) * phi((float)y[i]) : (float)x[i] * (float)y[i];
    return sum;
}

// naive_forward_kernel: out and lse (linear: norm) of a query.
template <int LINEAR>
static __global__ void __launch_bounds__(NAIVE_THREADS)
    naive_forward_kernel(floatX *out, float *lse, const floatX *qkv, int T, int C, int NH,
                         int causal)
{
    extern __shared__ float shared[];
    const int HS = C / NH, t = blockIdx.x % T, head = blockIdx.x / T, n = causal ? t + 1 : T;
    const floatX *q = qkv + (size_t)(head / NH) * T * 3 * C + head % NH * HS, *k = q + C;
    const size_t at = ((size_t)(head / NH) * T + t) * C + head % NH * HS;
    float top = LINEAR ? 0 : -INFINITY, sum = LINEAR ? LINEAR_EPS : 0;
    for (int u = threadIdx.x; u < n; u += NAIVE_THREADS)
        shared[u] = naive_dot<LINEAR>(q + (size_t)t * 3 * C, k + (size_t)u * 3 * C, HS) *
                    (LINEAR ? 1 : rsqrtf((float)HS));
    __syncthreads();
    for (int u = 0; u < n && !LINEAR; u++)
        top = fmaxf(top, shared[u]);
    for (int u = 0; u < n; u++)
        sum += LINEAR ? shared[u] : expf(shared[u] - top);
    for (int h = threadIdx.x; h < HS; h += NAIVE_THREADS) {
        float o = 0;
        for (int u = 0; u < n; u++)
            o += (LINEAR ? shared[u] : expf(shared[u] - top)) * (float)k[(size_t)u * 3 * C + C + h];
        out[at + h] = (floatX)(o / sum);
    }
    if (threadIdx.x == 0)
        lse[blockIdx.x] = LINEAR ? sum : top + logf(sum);
}

// naive_backward_kernel: SIDE 0: dq of a query; SIDE 1: dk, dv of a key.
template <int LINEAR, int SIDE>
static __global__ void __launch_bounds__(NAIVE_THREADS)
    naive_backward_kernel(floatX *dqkv, const floatX *dout, const floatX *out, const float *lse,
                          const floatX *qkv, int T, int C, int NH, int causal)
{
    extern __shared__ float shared[]; // p [T], ds [T]
    const int HS = C / NH, own = blockIdx.x % T, head = blockIdx.x / T;
    const int begin = causal && SIDE ? own : 0, end = causal && !SIDE ? own + 1 : T;
    const size_t at = (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    const size_t out_at = (size_t)(head / NH) * T * C + head % NH * HS;
    const floatX *other = qkv + at + (SIDE ? 0 : C);
    const float scale = LINEAR ? 1 : rsqrtf((float)HS);
    for (int i = begin + threadIdx.x; i < end; i += NAIVE_THREADS) {
        const int t = SIDE ? i : own, u = SIDE ? own : i;
        const floatX *q = qkv + at + (size_t)t * 3 * C, *k = qkv + at + (size_t)u * 3 * C + C;
        const floatX *g = dout + out_at + (size_t)t * C;
        const float D = naive_dot<0>(g, out + out_at + (size_t)t * C, HS);
        const float z = lse[(size_t)head * T + t], s = naive_dot<LINEAR>(q, k, HS);
        const float p = LINEAR ? s / z : expf(scale * s - z);
        const bool alone = !LINEAR && (causal ? t == 0 : T == 1);
        shared[i] = p;
        shared[T + i] = alone ? 0 : (naive_dot<0>(g, k + C, HS) - D) * (LINEAR ? 1 / z : p);
    }
    __syncthreads();
    floatX *to = dqkv + at + (size_t)own * 3 * C + (SIDE ? C : 0);
    const floatX *x = qkv + at + (size_t)own * 3 * C + (SIDE ? C : 0);
    for (int h = threadIdx.x; h < HS; h += NAIVE_THREADS) {
        float dx = 0, dv = 0;
        for (int i = begin; i < end; i++) {
            const float y = (float)other[(size_t)i * 3 * C + h];
            dx += shared[T + i] * (LINEAR ? phi(y) : y);
            if (SIDE)
                dv += shared[i] * (float)dout[out_at + (size_t)i * C + h];
        }
        to[h] = (floatX)(dx * (LINEAR ? phi_slope(phi((float)x[h])) : scale));
        if (SIDE)
            to[C + h] = (floatX)dv;
    }
}

// What a forward and a backward are called with.
#define FORWARD_ARGS(x) \
    (floatX *)x->out.data, (float *)x->lse.data, x->features, x->B, x->T, x->C, x->NH, x->causal
#define ROWS_ARGS(x) \
    (floatX *)x->out.data, (float *)x->lse.data, NULL, NULL, NULL, x->features, x->B, x->T, x->C, \
        x->NH, x->causal
#define BACKWARD_ARGS(x) \
    (floatX *)x->dqkv.data, x->dout, x->in_out, x->in_lse, x->features, x->scratch, x->B, x->T, \
        x->C, x->NH, x->causal

// run_forward_*, run_backward_*: rows of the ladders' tables.
template <int LINEAR> static void run_forward_naive(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    LAUNCH(naive_forward_kernel<LINEAR>, x->B * x->NH * x->T, NAIVE_THREADS, 4 * x->T, stream,
           (floatX *)x->out.data, (float *)x->lse.data, x->qkv, (int)x->T, (int)x->C, (int)x->NH,
           x->causal);
}
template <int LINEAR> static void run_backward_naive(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    floatX *dqkv = (floatX *)x->dqkv.data;
    LAUNCH((naive_backward_kernel<LINEAR, 0>), x->B * x->NH * x->T, NAIVE_THREADS, 8 * x->T, stream,
           dqkv, x->dout, x->in_out, x->in_lse, x->qkv, (int)x->T, (int)x->C, (int)x->NH,
           x->causal);
    LAUNCH((naive_backward_kernel<LINEAR, 1>), x->B * x->NH * x->T, NAIVE_THREADS, 8 * x->T, stream,
           dqkv, x->dout, x->in_out, x->in_lse, x->qkv, (int)x->T, (int)x->C, (int)x->NH,
           x->causal);
    attention_split(x, stream);
}
template <int LINEAR> static void run_forward_general(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    attention_forward_general((floatX *)x->out.data, (float *)x->lse.data, x->features, x->B, x->T,
                              0, x->T, x->C, x->NH, x->causal, LINEAR, stream);
}
template <int LINEAR> static void run_backward_general(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    attention_backward_general(BACKWARD_ARGS(x), LINEAR, stream);
    attention_split(x, stream);
}
template <int LINEAR> static void run_forward_any(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    attention_forward_any(FORWARD_ARGS(x), LINEAR, stream);
}
template <int LINEAR> static void run_backward_any(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    attention_backward_any(BACKWARD_ARGS(x), LINEAR, stream);
    attention_split(x, stream);
}

// run_both: forward, then backward, as a training step has them.
template <int LINEAR> static void run_both(const void *problem, cudaStream_t stream)
{
    run_forward_any<LINEAR>(problem, stream);
    run_backward_any<LINEAR>(problem, stream);
}

#ifdef PRECISION_BF16
// refuse_tiled: why the tiles with these constants do not take a head size, or NULL.
template <int HS64, int HS128, int HS192> static const char *refuse_tiled(const void *problem)
{
    const Attention *x = (const Attention *)problem;
    const size_t HS = x->C / x->NH;
    return (HS64 && HS == 64) || (HS128 && HS == 128) || (HS192 && HS == 192)
               ? NULL
               : "not of this head size";
}

// run_forward_tiled, run_backward_tiled: the tiles with given constants, for the head sizes given.
// Each head size has its own blocks a multiprocessor: B64, B128, B192, 0 for one left out; backward
// ten times dq's plus dk and dv's.
template <int WARPS, int MT, int OT, int B64, int B128, int B192>
static void run_forward_tiled(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    if constexpr (B64 != 0)
        if (x->C / x->NH == 64)
            attention_rows_tiled<64, SOFTMAX_OUT, WARPS, MT, OT, B64>(ROWS_ARGS(x), stream);
    if constexpr (B128 != 0)
        if (x->C / x->NH == 128)
            attention_rows_tiled<128, SOFTMAX_OUT, WARPS, MT, OT, B128>(ROWS_ARGS(x), stream);
    if constexpr (B192 != 0)
        if (x->C / x->NH == 192)
            attention_rows_tiled<192, SOFTMAX_OUT, WARPS, MT, OT, B192>(ROWS_ARGS(x), stream);
}
template <int HS, int WARPS, int OT, int DQ_BLOCKS, int DKV_BLOCKS>
static void backward_tiled(const Attention *x, cudaStream_t stream)
{
    attention_backward_tiled<HS, 0, WARPS, OT, DQ_BLOCKS>(BACKWARD_ARGS(x), stream);
    attention_backward_tiled<HS, 1, WARPS, OT, DKV_BLOCKS>(BACKWARD_ARGS(x), stream);
}
template <int WARPS, int OT, int B64, int B128, int B192>
static void run_backward_tiled(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    if constexpr (B64 != 0)
        if (x->C / x->NH == 64)
            backward_tiled<64, WARPS, OT, B64 / 10, B64 % 10>(x, stream);
    if constexpr (B128 != 0)
        if (x->C / x->NH == 128)
            backward_tiled<128, WARPS, OT, B128 / 10, B128 % 10>(x, stream);
    if constexpr (B192 != 0)
        if (x->C / x->NH == 192)
            backward_tiled<192, WARPS, OT, B192 / 10, B192 % 10>(x, stream);
    attention_split(x, stream);
}
#endif

#endif
