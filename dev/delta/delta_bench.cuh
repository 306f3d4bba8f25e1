// delta_bench.cuh: what the ladders of the delta rule share: shapes, inputs, references, rows of
// their tables. The kernels but the plain ones are train_deltanet.cu's own, included whole.
#ifndef SEQ_DEV_DELTA_BENCH_CUH
#define SEQ_DEV_DELTA_BENCH_CUH

#define TESTING
#pragma nv_diag_suppress 177 // most of the trainer is not used here
#include "../../train_deltanet.cu"
#include "../bench.cuh"
#include "delta_plain.cuh"
#include "delta_reference.h"

static const BenchType DELTA_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;

// Inputs: unit keys and queries at random, beta in (0,2); two keys in turns, at random, or one key,
// beta 1.999, as state tracking has them; keys without negative numbers, beta in (0.5,1); beta 0 or
// 2 and every fifth key and seventh query zero.
typedef enum { RANDOM, TWO_KEYS, ONE_KEY, POSITIVE, EXTREME, KINDS } DeltaKind;

static const char *const KIND_NAMES[] = {"", " two keys", " one key", " positive keys",
                                         " beta 0 or 2, zero keys"};

// A shape on the device. Inputs stand between rows of NaN. dqkv (B,T,3C) as qkv; split: after a
// backward, dq, dk, dv are taken out of it, so that each is judged by itself. What a forward pass
// keeps: u, pairs, states; work: of the plain kernels; last: S_T of the recurrence.
typedef struct {
    size_t B, T, C, NH, HS;
    DeltaKind kind;
    int stateful, split; // initial and dfinal given
    BenchBuffer inputs[5];
    const floatX *qkv, *dout;
    const float *beta, *initial, *dfinal; // the last two NULL unless stateful
    BenchBuffer out, final, dqkv, dq, dk, dv, dbeta, dinitial;
    floatX *u, *recurrent_u, *pairs, *states, *dstates;
    float *work, *last, *scratch[2];
    double *ref_out, *ref_dq, *ref_dk, *ref_dv, *ref_dqkv, *ref_dbeta, *ref_final, *ref_dinitial;
} Delta;

// delta_normal: normal-ish number i of a stream, deviation 1.
static float delta_normal(uint64_t seed, uint64_t i)
{
    float sum = 0;
    for (int k = 0; k < 4; k++)
        sum += bench_uniform(seed, 4 * i + k) - 0.5f;
    return 1.7320508f * sum;
}

// delta_vector: x (n) = a unit vector by its number; positive: SiLU-like, nothing far below 0.
static void delta_vector(float *x, uint64_t seed, uint64_t number, size_t n, int positive)
{
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        const float z = delta_normal(seed, number * n + i);
        x[i] = positive ? z / (1 + expf(-z)) : z;
        squares += (double)x[i] * (double)x[i];
    }
    for (size_t i = 0; i < n; i++)
        x[i] /= (float)sqrt(squares + 1e-12);
}

// delta_inputs: h_qkv (B,T,3C) and h_beta (B,T,NH) of x's kind; sequences repeat after b_period,
// heads after h_period.
static void delta_inputs(float *h_qkv, float *h_beta, const Delta *x, size_t b_period,
                         size_t h_period)
{
#pragma omp parallel for
    for (size_t i = 0; i < x->B * x->T * x->NH; i++) {
        const size_t b = i / x->NH / x->T % b_period, t = i / x->NH % x->T;
        const size_t h = i % x->NH % h_period, at = (b * x->T + t) * h_period + h;
        float *q = h_qkv + i / x->NH * 3 * x->C + i % x->NH * x->HS, *k = q + x->C;
        const int two = bench_uniform(5, at) < 0.5f;
        const size_t keys = x->kind == TWO_KEYS ? 2 * h + two : h;
        const int same = x->kind == TWO_KEYS || x->kind == ONE_KEY;
        delta_vector(q, 1, at, x->HS, 0);
        delta_vector(k, same ? 3 : 2, same ? keys : at, x->HS, x->kind == POSITIVE);
        for (size_t c = 0; c < x->HS; c++) {
            k[x->C + c] = delta_normal(4, at * x->HS + c);
            if (x->kind == EXTREME && at % 5 == 2)
                k[c] = 0;
            if (x->kind == EXTREME && at % 7 == 3)
                q[c] = 0;
        }
        h_beta[i] = x->kind == RANDOM     ? 2 * bench_uniform(6, at)
                    : x->kind == POSITIVE ? 0.5f + 0.5f * bench_uniform(6, at)
                    : x->kind == EXTREME  ? (bench_uniform(6, at) < 0.3f ? 0.0f : 2.0f)
                                          : 1.999f;
    }
}

// delta_upload: h_x (n) on the device between NaN on either side; the place of its first element.
static void *delta_upload(BenchBuffer *b, BenchType type, float *h_x, size_t n)
{
    const size_t pad = 16384;
    *b = bench_alloc(n + 2 * pad, type, 0);
    BenchBuffer inside = *b;
    inside.data = (char *)b->data + pad * bench_elem(type);
    bench_upload(&inside, type, h_x, n);
    return inside.data;
}

// delta_references: all of x's references, heads and sequences that repeat computed once.
static void delta_references(Delta *x, const float *h_qkv, const float *h_dout,
                             const float *h_beta, const float *h_initial, const float *h_dfinal,
                             size_t b_period, size_t h_period)
{
    const size_t T = x->T, C = x->C, HS = x->HS, NH = x->NH, square = HS * HS;
    const size_t nb = x->B < b_period ? x->B : b_period, nh = NH < h_period ? NH : h_period;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < nb * nh; i++) {
        const size_t b0 = i / nh, h0 = i % nh, head = b0 * NH + h0;
        const float *q = h_qkv + b0 * T * 3 * C + h0 * HS;
        const DeltaReference r = delta_reference_new(T, HS);
        delta_reference(r, q, q + C, q + 2 * C, 3 * C, h_dout + b0 * T * C + h0 * HS, C,
                        h_beta + b0 * T * NH + h0, NH, h_initial ? h_initial + head * square : NULL,
                        h_dfinal ? h_dfinal + head * square : NULL, T, HS);
        for (size_t b = b0; b < x->B; b += nb)
            for (size_t h = h0; h < NH; h += nh) {
                for (size_t t = 0; t < T; t++) {
                    const size_t to = (b * T + t) * C + h * HS, row = HS * 8;
                    double *dqkv = x->ref_dqkv + (b * T + t) * 3 * C + h * HS;
                    memcpy(x->ref_out + to, r.out + t * HS, row);
                    memcpy(x->ref_dq + to, r.dq + t * HS, row);
                    memcpy(x->ref_dk + to, r.dk + t * HS, row);
                    memcpy(x->ref_dv + to, r.dv + t * HS, row);
                    memcpy(dqkv, r.dq + t * HS, row);
                    memcpy(dqkv + C, r.dk + t * HS, row);
                    memcpy(dqkv + 2 * C, r.dv + t * HS, row);
                    x->ref_dbeta[(b * T + t) * NH + h] = r.dbeta[t];
                }
                memcpy(x->ref_final + (b * NH + h) * square, r.final, square * 8);
                memcpy(x->ref_dinitial + (b * NH + h) * square, r.dinitial, square * 8);
            }
        free(r.out);
    }
}

// delta_scratch: n elements of device memory, all NaN.
template <class X> static X *delta_scratch(size_t n)
{
    X *p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0xFF, n * sizeof(X)));
    return p;
}

// delta_setup: inputs, references and buffers of a shape.
static Delta delta_setup(size_t B, size_t T, size_t NH, size_t HS, DeltaKind kind, int stateful,
                         size_t b_period, size_t h_period)
{
    Delta x = {B, T, NH * HS, NH, HS, kind, stateful, 0};
    const size_t n = B * T * x.C, heads = B * NH, square = heads * HS * HS;
    const size_t chunks = heads * ((T + 63) / 64);
    float *h_qkv = (float *)alloc_zero(3 * n, 4, "input"), *h_dout = h_qkv;
    float *h_beta = (float *)alloc_zero(B * T * NH, 4, "input");
    float *h_states = (float *)alloc_zero(2 * square, 4, "input");
    delta_inputs(h_qkv, h_beta, &x, b_period, h_period);
    h_dout = (float *)alloc_zero(n, 4, "input");
    for (size_t i = 0; i < n; i++) {
        const size_t b = i / x.C / T % b_period, t = i / x.C % T, h = i % x.C / HS % h_period;
        h_dout[i] = delta_normal(7, ((b * T + t) * h_period + h) * HS + i % HS);
    }
    for (size_t i = 0; i < 2 * square && stateful; i++) {
        const size_t head = i / (HS * HS) % heads, b = head / NH % b_period;
        const size_t from = (i / square * b_period + b) * h_period + head % NH % h_period;
        h_states[i] = 0.3f * delta_normal(8, from * HS * HS + i % (HS * HS));
    }
    x.qkv = (floatX *)delta_upload(&x.inputs[0], DELTA_TYPE, h_qkv, 3 * n);
    x.dout = (floatX *)delta_upload(&x.inputs[1], DELTA_TYPE, h_dout, n);
    x.beta = (float *)delta_upload(&x.inputs[2], BENCH_F32, h_beta, B * T * NH);
    x.initial = (float *)delta_upload(&x.inputs[3], BENCH_F32, h_states, square);
    x.dfinal = (float *)delta_upload(&x.inputs[4], BENCH_F32, h_states + square, square);
    if (!stateful)
        x.initial = x.dfinal = NULL;
    x.ref_out = (double *)alloc_zero(7 * n + B * T * NH + 2 * square, 8, "references");
    x.ref_dqkv = x.ref_out + n, x.ref_dq = x.ref_dqkv + 3 * n, x.ref_dk = x.ref_dq + n;
    x.ref_dv = x.ref_dk + n, x.ref_dbeta = x.ref_dv + n, x.ref_final = x.ref_dbeta + B * T * NH;
    x.ref_dinitial = x.ref_final + square;
    delta_references(&x, h_qkv, h_dout, h_beta, stateful ? h_states : NULL,
                     stateful ? h_states + square : NULL, b_period, h_period);
    free(h_qkv), free(h_dout), free(h_beta), free(h_states);
    BenchBuffer *outputs[] = {&x.out, &x.dq, &x.dk, &x.dv};
    for (int i = 0; i < 4; i++)
        *outputs[i] = bench_alloc(n, DELTA_TYPE, 0);
    x.dqkv = bench_alloc(3 * n, DELTA_TYPE, 0);
    x.dbeta = bench_alloc(B * T * NH, BENCH_F32, 0);
    x.final = bench_alloc(square, BENCH_F32, 0);
    x.dinitial = bench_alloc(square, BENCH_F32, 0);
    x.u = delta_scratch<floatX>(n), x.recurrent_u = delta_scratch<floatX>(n);
    x.pairs = delta_scratch<floatX>(chunks * 3 * 64 * 64);
    x.states = delta_scratch<floatX>(chunks * HS * HS);
    x.dstates = delta_scratch<floatX>(chunks * HS * HS);
    x.last = delta_scratch<float>(square);
    x.scratch[0] = delta_scratch<float>(square), x.scratch[1] = delta_scratch<float>(square);
    x.work = delta_scratch<float>(heads * plain_work(HS, (T + 63) / 64));
    return x;
}

// delta_free: give back what delta_setup took.
static void delta_free(Delta *x)
{
    BenchBuffer *all[] = {&x->inputs[0], &x->inputs[1], &x->inputs[2], &x->inputs[3],
                          &x->inputs[4], &x->out, &x->final, &x->dqkv, &x->dq, &x->dk, &x->dv,
                          &x->dbeta, &x->dinitial};
    void *scratch[] = {x->u, x->recurrent_u, x->pairs, x->states, x->dstates, x->work, x->last,
                       x->scratch[0], x->scratch[1]};
    for (int i = 0; i < 13; i++)
        bench_free(all[i]);
    for (int i = 0; i < 9; i++)
        CUDA_CHECK(cudaFree(scratch[i]));
    free(x->ref_out);
}

// ---- rows of the tables

// delta_start: the states that the plain kernels start from and overwrite.
static void delta_start(float *to, const float *from, const Delta *x, cudaStream_t stream)
{
    const size_t bytes = x->B * x->C * x->HS * sizeof(float);
    if (from)
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
    else
        CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream));
}

// delta_split: where asked for, copy dq, dk, dv out of dqkv.
static void delta_split(const Delta *x, cudaStream_t stream)
{
    const BenchBuffer *parts[] = {&x->dq, &x->dk, &x->dv};
    const size_t width = x->C * sizeof(floatX);
    for (int i = 0; x->split && i < 3; i++)
        CUDA_CHECK(cudaMemcpy2DAsync(parts[i]->data, width, (char *)x->dqkv.data + i * width,
                                     3 * width, width, x->B * x->T, cudaMemcpyDeviceToDevice,
                                     stream));
}

// The inputs, and the dimensions, as the kernels take them.
#define DELTA_QKV(x) x->qkv, x->qkv + x->C, x->qkv + 2 * x->C, x->beta
#define DELTA_DIMS(x) (int)x->T, (int)x->NH, (int)x->HS, (int)(3 * x->C)

// DELTA_REGISTERS: the statement with SIZE = the head size where REGISTERS, else 0.
#define DELTA_REGISTERS(REGISTERS, hs, ...) \
    do { \
        if (!(REGISTERS)) { enum { SIZE = 0 }; __VA_ARGS__; } \
        else if ((hs) == 32) { enum { SIZE = 32 }; __VA_ARGS__; } \
        else if ((hs) == 64) { enum { SIZE = 64 }; __VA_ARGS__; } \
        else { enum { SIZE = 128 }; __VA_ARGS__; } \
    } while (0)

// refuse_naive: why the kernels with S in memory do not take a shape, or NULL.
static const char *refuse_naive(const void *problem)
{
    const Delta *x = (const Delta *)problem;
    return x->B * x->T * x->C * x->HS > 400000000 ? "it would take too long" : NULL;
}

// refuse_registers: likewise with S in registers.
static const char *refuse_registers(const void *problem)
{
    const size_t HS = ((const Delta *)problem)->HS;
    return HS == 32 || HS == 64 || HS == 128 ? NULL : "head sizes 32, 64 and 128";
}

// run_forward_recurrent, run_backward_recurrent: the recurrence. The backward pass needs the
// forward's u and last S.
template <int REGISTERS>
static void run_forward_recurrent(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    delta_start((float *)x->final.data, x->initial, x, stream);
    DELTA_REGISTERS(REGISTERS, x->HS,
        LAUNCH(recurrent_o_kernel<SIZE>, x->B * x->NH, (unsigned)x->HS, 0, stream,
               (floatX *)x->out.data, x->recurrent_u, (float *)x->final.data, DELTA_QKV(x),
               DELTA_DIMS(x)));
}
template <int REGISTERS>
static void run_backward_recurrent(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    floatX *dq = (floatX *)x->dqkv.data, *dk = dq + x->C, *dv = dk + x->C;
    const floatX *q = x->qkv, *k = q + x->C;
    delta_start((float *)x->dinitial.data, x->dfinal, x, stream);
    delta_start(x->scratch[0], x->last, x, stream);
    delta_start(x->scratch[1], x->dfinal, x, stream);
    DELTA_REGISTERS(REGISTERS, x->HS,
        LAUNCH(recurrent_dv_kernel<SIZE>, x->B * x->NH, (unsigned)x->HS, 0, stream, dv,
               (float *)x->dinitial.data, x->dout, q, k, x->beta, DELTA_DIMS(x));
        LAUNCH(recurrent_dqk_kernel<SIZE>, x->B * x->NH, (unsigned)x->HS, 0, stream, dq, dk,
               (float *)x->dbeta.data, x->scratch[0], x->scratch[1], x->dout, dv, x->recurrent_u, q,
               k, x->beta, DELTA_DIMS(x)));
    delta_split(x, stream);
}

// run_forward_plain, run_backward_plain: chunks as loops.
static void run_forward_plain(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    delta_start((float *)x->final.data, x->initial, x, stream);
    LAUNCH(plain_forward_kernel, x->B * x->NH, PLAIN_THREADS, 0, stream, (floatX *)x->out.data,
           (float *)x->final.data, x->work, DELTA_QKV(x), DELTA_DIMS(x));
}
static void run_backward_plain(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    floatX *dq = (floatX *)x->dqkv.data, *dk = dq + x->C, *dv = dk + x->C;
    delta_start((float *)x->dinitial.data, x->dfinal, x, stream);
    LAUNCH(plain_backward_kernel, x->B * x->NH, PLAIN_THREADS, 0, stream, dq, dk, dv,
           (float *)x->dbeta.data, (float *)x->dinitial.data, x->work, x->dout, x->qkv,
           x->qkv + x->C, x->beta, DELTA_DIMS(x));
    delta_split(x, stream);
}

#ifdef PRECISION_BF16
// refuse_chunk: why the tensor cores do not take a shape, or NULL.
static const char *refuse_chunk(const void *problem)
{
    const size_t HS = ((const Delta *)problem)->HS;
    return HS % 8 == 0 && HS <= HEAD_MOST ? NULL : "head sizes 8, 16, ..., 128";
}

// run_forward_chunk: KEEP: what the backward pass needs too.
template <int KEEP> static void run_forward_chunk(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    const Kept kept = {NULL, KEEP ? x->u : NULL, x->pairs, KEEP ? x->states : NULL};
    delta_forward((floatX *)x->out.data, kept, (float *)x->final.data, x->qkv, x->beta, x->initial,
                  x->B, x->T, x->C, x->NH, CHUNK, stream);
}
static void run_backward_chunk(const void *problem, cudaStream_t stream)
{
    const Delta *x = (const Delta *)problem;
    delta_backward((floatX *)x->dqkv.data, (float *)x->dbeta.data, (float *)x->dinitial.data,
                   x->dstates, x->dout, x->dfinal, {NULL, x->u, x->pairs, x->states}, NULL, x->qkv,
                   x->beta, x->B, x->T, x->C, x->NH, CHUNK, stream);
    delta_split(x, stream);
}

// run_both: forward, then backward, as a training step has them.
static void run_both(const void *problem, cudaStream_t stream)
{
    run_forward_chunk<1>(problem, stream);
    run_backward_chunk(problem, stream);
}
#endif

// ---- cases

// delta_bound: on the relative error of a shape's outputs or gradients. Where beta near 2 meets
// keys that repeat, or is 2 or 0 and nothing is ever forgotten, it is wider (STYLE.md 39): the
// recurrence with a rounded u is off by 4.4e-2 after 4097 tokens of the last kind.
static double delta_bound(const Delta *x, int backward)
{
    const int bf16 = sizeof(floatX) == 2;
    if (x->kind == TWO_KEYS || x->kind == ONE_KEY || x->kind == EXTREME)
        return bf16 ? 5e-2 : 5e-4;
    return backward ? (bf16 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32)
                    : (bf16 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32);
}

// delta_keep: what the backward kernels that run take from a forward pass.
static void delta_keep(const Delta *x, const BenchOptions *bench)
{
    run_forward_recurrent<0>(x, 0);
    CUDA_CHECK(cudaMemcpyAsync(x->last, x->final.data, x->B * x->C * x->HS * sizeof(float),
                               cudaMemcpyDeviceToDevice, 0));
    if (!refuse_naive(x) && (!bench->kernel || bench->kernel == 3))
        run_forward_plain(x, 0);
#ifdef PRECISION_BF16
    if (!refuse_chunk(x))
        run_forward_chunk<1>(x, 0);
#endif
}

// delta_case: the table's kernels on one shape, forward or backward; returns the failures.
static int delta_case(Delta *x, const BenchKernel *kernels, int num_kernels, int backward,
                      const BenchOptions *bench)
{
    const size_t n = x->B * x->T * x->C, rows = x->B * x->T * x->NH, square = x->B * x->C * x->HS;
    const double bound = delta_bound(x, backward), HS = (double)x->HS;
    const BenchOutput forward[] = {{"out", &x->out, DELTA_TYPE, n, x->ref_out, bound},
                                   {"S_T", &x->final, BENCH_F32, square, x->ref_final, bound}};
    const BenchOutput grads[] = {
        {"dqkv", &x->dqkv, DELTA_TYPE, 3 * n, x->ref_dqkv, bound},
        {"dbeta", &x->dbeta, BENCH_F32, rows, x->ref_dbeta, bound},
        {"dS_0", &x->dinitial, BENCH_F32, square, x->ref_dinitial, bound},
        {"dq", &x->dq, DELTA_TYPE, n, x->ref_dq, bound},
        {"dk", &x->dk, DELTA_TYPE, n, x->ref_dk, bound},
        {"dv", &x->dv, DELTA_TYPE, n, x->ref_dv, bound}};
    char name[160];
    snprintf(name, sizeof name, "delta %s %s (%zu,%zu,%zu,%zu)%s%s",
             backward ? "backward" : "forward", sizeof(floatX) == 2 ? "bf16" : "fp32", x->B, x->T,
             x->NH, x->HS, KIND_NAMES[x->kind], x->stateful ? ", S_0 given" : "");
    x->split = backward && bench->check_only;
    if (backward)
        delta_keep(x, bench);
    BenchCase c = {name, x, kernels, num_kernels, backward ? grads : forward,
                   !backward ? 2 : x->split ? 6 : 3,
                   (backward ? 7.0 : 4.0) * (double)(n * sizeof(floatX)),
                   1e-12 * (double)n * (backward ? 16 * HS + 26 * 64 : 6 * HS + 10 * 64), "TFLOP"};
    return bench_case(&c, bench);
}

// delta_recent: ||got - ref|| / ||ref|| over the last 256 tokens of out, on the device.
static double delta_recent(const Delta *x)
{
    const size_t n = x->B * x->T * x->C, begin = x->T > 256 ? x->T - 256 : 0;
    floatX *h = (floatX *)alloc_zero(n, sizeof(floatX), "output");
    double err2 = 0, ref2 = 0;
    CUDA_CHECK(cudaMemcpy(h, x->out.data, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++)
        if (i / x->C % x->T >= begin) {
            const double e = (double)(float)h[i] - x->ref_out[i];
            err2 += e * e, ref2 += x->ref_out[i] * x->ref_out[i];
        }
    free(h);
    return sqrt(err2 / ref2);
}

// delta_structured: each forward kernel's error on keys that repeat, head size 32, over the last
// 256 outputs; beyond 5% (fp32: 5e-4) it fails, but where u is rounded only at T = 256. Returns the
// failures.
static int delta_structured(const BenchKernel *kernels, int num_kernels, const BenchOptions *bench)
{
    static const size_t lengths[] = {256, 512, 4096};
    int failed = 0;
    for (int kind = RANDOM; kind <= ONE_KEY; kind++)
        for (int i = 0; i < 3; i++) {
            Delta x = delta_setup(1, lengths[i], 2, 32, (DeltaKind)kind, 0, 1, 2);
            for (int k = 0; k < num_kernels; k++) {
                if (bench->kernel && bench->kernel != kernels[k].num)
                    continue;
                kernels[k].fn(&x, 0);
                CUDA_CHECK(cudaDeviceSynchronize());
                const double error = delta_recent(&x), bound = delta_bound(&x, 0);
                const int rounded = sizeof(floatX) == 2 && kernels[k].num < 3; // u
                const int ok = isfinite(error) && (error <= bound || (rounded && i > 0));
                printf("  error of the last 256 outputs, T=%zu HS=32%s: kernel %d: %.2e%s\n",
                       x.T, kind ? KIND_NAMES[kind] : " random keys", kernels[k].num, error,
                       ok ? "" : " FAILED");
                failed += !ok;
            }
            delta_free(&x);
        }
    return failed;
}

#ifdef PRECISION_BF16
// delta_inverse: |Tm_ij| = |M_ij| / beta_j <= 2 (1 + 1e-5) where no key is longer than 1 (a rounded
// one may be, by 2^-9: then 2 |k_i| |k_j| times what the factors 1 - beta |k|^2 between them exceed
// 1 by). Returns 1 if it does not hold.
static int delta_inverse(const Delta *x)
{
    const size_t T = x->T, chunks = (T + 63) / 64, heads = x->B * x->NH;
    const size_t n = heads * chunks * 3 * 64 * 64, keys = x->B * T * 3 * x->C;
    floatX *h = (floatX *)alloc_zero(n, sizeof *h, "pairs");
    floatX *h_qkv = (floatX *)alloc_zero(keys, sizeof *h, "keys");
    float *h_beta = (float *)alloc_zero(x->B * T * x->NH, 4, "beta");
    double worst = 0;
    CUDA_CHECK(cudaMemcpy(h, x->pairs, n * sizeof *h, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(h_qkv, x->qkv, keys * sizeof *h, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(h_beta, x->beta, x->B * T * x->NH * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < heads * chunks * 64; i++) { // rows of M
        const size_t head = i / 64 / chunks, t0 = i / 64 % chunks * 64, r = i % 64;
        const floatX *hi = h + i / 64 * 3 * 64 * 64 + r * 64, *lo = hi + 64 * 64;
        double grown = 1;
        for (size_t j = r + 1; j-- > 0 && t0 + r < T;) {
            const size_t t = head / x->NH * T + t0 + j;
            const floatX *k = h_qkv + t * 3 * x->C + x->C + head % x->NH * x->HS;
            const double beta = fmax((double)h_beta[t * x->NH + head % x->NH], 0x1p-40);
            const double Tm = ((double)(float)hi[j] + (double)(float)lo[j]) / beta;
            double square = 0;
            for (size_t c = 0; c < x->HS; c++)
                square += (double)(float)k[c] * (double)(float)k[c];
            worst = fmax(worst, !isfinite(Tm) ? INFINITY : fabs(Tm) / grown / fmax(1, square));
            grown *= fmax(1, fabs(1 - beta * square)) * (j == r ? fmax(1, square) : 1);
        }
    }
    free(h), free(h_qkv), free(h_beta);
    if (worst > 2 * (1 + 1e-5))
        printf("  |Tm| up to %.7f, expected at most 2 (1 + 1e-5) FAILED\n", worst);
    return worst > 2 * (1 + 1e-5);
}
#endif

// delta_small: every kernel on one small shape, which repeats two heads of two sequences; returns
// the failures.
static int delta_small(const BenchKernel *kernels, int num_kernels, int backward,
                       const BenchOptions *bench, size_t B, size_t T, size_t HS, DeltaKind kind,
                       int stateful)
{
    BenchOptions check = *bench;
    check.check_only = 1;
    Delta x = delta_setup(B, T, 2, HS, kind, stateful, 2, 2);
    int failed = delta_case(&x, kernels, num_kernels, backward, &check);
#ifdef PRECISION_BF16
    if (!backward && !refuse_chunk(&x) && (!bench->kernel || bench->kernel > 3))
        failed += delta_inverse(&x);
#endif
    delta_free(&x);
    return failed;
}

// delta_checks: every kernel at lengths around the chunk's, at head sizes with and without padding,
// and with so many heads that blocks take 1, 2, 4 and 8 warps of a head's rows. Own shape: --B,
// --T, --C (two heads). Returns the failures.
static int delta_checks(const BenchKernel *kernels, int num_kernels, int backward,
                        const BenchOptions *bench)
{
    static const size_t lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 255, 1000, 4097};
    static const size_t sizes[] = {32, 64, 128, 8, 40, 72, 20}, batches[] = {13, 25, 50};
    int failed = 0, cases = 0;
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < 11 * 7; i++) {
            const size_t T = bench->T ? bench->T : lengths[i / 7];
            const size_t HS = bench->C ? bench->C / 2 : sizes[i % 7];
            const size_t B = bench->B ? bench->B : T > 1000 ? 1 : 2;
            if ((bench->T && i / 7) || (bench->C && i % 7) || (kind && i % 7 > 2 && T != 65))
                continue;
            if ((kind == TWO_KEYS || kind == ONE_KEY) && T > 256) // see delta_structured
                continue;
            failed += delta_small(kernels, num_kernels, backward, bench, B, T, HS, (DeltaKind)kind,
                                  (i / 7 + i % 7) % 2);
            cases++;
        }
    for (int i = 0; i < 3 * 6 && !bench->B && !bench->T && !bench->C; i++) {
        failed += delta_small(kernels, num_kernels, backward, bench, batches[i / 6], 130,
                              sizes[i % 6], RANDOM, 1);
        cases++;
    }
    printf("checks: %d shapes, %d failed\n", cases, failed);
    return failed;
}

// delta_ladder: checks and tables of a ladder; returns the number of failures.
static int delta_ladder(const BenchKernel *kernels, int num_kernels, int backward,
                        const BenchOptions *bench)
{
    static const size_t shapes[][4] = {
        {8, 2048, 16, 128}, {1, 16384, 16, 128}, {32, 512, 16, 64}, {8, 2048, 32, 64}};
    const int own = bench->B || bench->T || bench->C;
    int failed = 0;
    if (!bench->time_only)
        failed += delta_checks(kernels, num_kernels, backward, bench);
    if (!bench->time_only && !backward && !own)
        failed += delta_structured(kernels, num_kernels, bench);
    for (int i = 0; i < 4 && !bench->check_only && !own; i++) {
        Delta x = delta_setup(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], RANDOM, 0, 1,
                              2);
        failed += delta_case(&x, kernels, num_kernels, backward, bench);
        delta_free(&x);
    }
    return failed;
}

#endif
