// gla_bench.cuh: what the ladders of gated linear attention share: shapes, inputs, references, rows
// of their tables. Some of the kernels are train_metala.cu's own, which is included whole.
#ifndef SEQ_DEV_GLA_BENCH_CUH
#define SEQ_DEV_GLA_BENCH_CUH

#define TESTING
#pragma nv_diag_suppress 177 // most of the trainer is not used here
#include "../../train_metala.cu"
#include "gla_walk.cuh"
#include "../bench.cuh"
#include "gla_plain.cuh"
#include "gla_reference.h"

static const BenchType GLA_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;

// Gates. MetaLA's, g = ln sigmoid(z) / 16 and k = 1 - exp(g): z around 0, -5, -10, -21, 3 with
// deviation 1. HGRN2's, g = ln sigmoid(f): f around -2. Z_FREE: free keys, z around 0, deviation 2.
// HARD: g 0 or down to -30; BEYOND: down to -50, or -infinity. OPEN: g 0. ALIKE: z 0 throughout.
typedef enum {
    Z_FREE, Z_0, Z_5, Z_10, Z_21, Z_3, HGRN2, HARD, BEYOND, OPEN, ALIKE, KINDS
} GateKind;
static const char *const KIND_NAMES[] = {"", " z 0", " z -5", " z -10", " z -21", " z 3",
                                         " HGRN2 f -2", " g to -30", " g to -inf", " g 0",
                                         " z 0 constant"};

// Inputs and outputs, in the order of their buffers.
enum { Q, K, G, V, DOUT, INITIAL, DFINAL, INPUTS };
enum { OUT, FINAL, DQ, DK_, DG, DV_, DINITIAL, OUTPUTS };

// A shape on the device. Inputs stand between rows of NaN; S_0 and the gradient of S_T are NULL
// unless stateful. work, dots, row_states, last, out: of the plain kernels; kept, dstates: of the
// trainer's; walk, dims: of those of gla_walk.cuh.
typedef struct {
    size_t B, T, NH, DK, DV;
    GateKind kind;
    int stateful;
    float scale;
    BenchBuffer inputs[INPUTS], outputs[OUTPUTS];
    void *in[INPUTS];
    double *refs[OUTPUTS];
    float *work, *dots, *last, *row_states;
    floatX *out, *dstates;
    GlaKept kept;
#ifdef PRECISION_BF16
    GlaWork walk;
    Gla dims;
#endif
} Ladder;

// ladder_elements: how many an input or output, i in its enum, has.
static size_t ladder_elements(const Ladder *x, int i, int input)
{
    const size_t tokens = x->B * x->T * x->NH, state = x->B * x->NH * x->DK * x->DV;
    if (input)
        return i == V || i == DOUT ? tokens * x->DV : i < V ? tokens * x->DK : state;
    return i == OUT || i == DV_ ? tokens * x->DV : i == FINAL || i == DINITIAL ? state
                                                                              : tokens * x->DK;
}

// ladder_type: of an input or output.
static BenchType ladder_type(int i, int input)
{
    const int wide = input ? i == G || i > DOUT : i == FINAL || i == DG || i == DINITIAL;
    return wide ? BENCH_F32 : GLA_TYPE;
}

// normal: number i of a stream, nearly normal: four uniform ones added up, mean 0, deviation 1.
static float normal(uint64_t seed, uint64_t i)
{
    float sum = 0;
    for (int k = 0; k < 4; k++)
        sum += bench_uniform(seed, 4 * i + k) - 0.5f;
    return 1.7320508f * sum;
}

// gate_of: g number i of a kind.
static float gate_of(GateKind kind, uint64_t i)
{
    static const float centres[KINDS] = {0, 0, -5, -10, -21, 3, -2};
    const float u = bench_uniform(6, i), centre = centres[kind];
    const float z = kind == ALIKE ? 0 : centre + (kind == Z_FREE ? 2 : 1) * normal(5, i);
    const float sigmoid = (z < 0 ? z : 0) - log1pf(expf(-fabsf(z)));
    if (kind == HARD)
        return u < 0.3f ? 0 : -30 * bench_uniform(7, i);
    if (kind == BEYOND)
        return u < 0.3f ? 0 : u < 0.9f ? -50 * bench_uniform(7, i) : -INFINITY;
    return kind == OPEN ? 0 : kind == HGRN2 ? sigmoid : sigmoid / 16;
}

// ladder_input: an input, on the host, to be freed; sequences repeat after b_period, heads after
// h_period.
static float *ladder_input(const Ladder *x, int input, size_t b_period, size_t h_period)
{
    const size_t n = ladder_elements(x, input, 1), state = x->DK * x->DV;
    const size_t width = input == V || input == DOUT ? x->DV : x->DK;
    const int free_keys = x->kind == Z_FREE || x->kind >= HARD;
    float *h = (float *)alloc_zero(n, 4, "input");
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        if (input > DOUT) {
            const size_t b = i / state / x->NH % b_period, head = i / state % x->NH % h_period;
            h[i] = 0.3f * normal(8 + input, (b * h_period + head) * state + i % state);
            continue;
        }
        const size_t b = i / width / x->NH / x->T % b_period, t = i / width / x->NH % x->T;
        const size_t head = i / width % x->NH % h_period;
        const size_t at = ((b * x->T + t) * h_period + head) * width + i % width;
        h[i] = input == G                ? gate_of(x->kind, at)
               : input == K && !free_keys ? -expm1f(gate_of(x->kind, at))
                                          : normal(1 + input, at);
        if (input == K && free_keys)
            h[i] /= sqrtf((float)x->DK);
    }
    return h;
}

// ladder_references: all references, heads and sequences that repeat computed once.
static void ladder_references(Ladder *x, float *const h[INPUTS], size_t b_period, size_t h_period)
{
    const size_t nb = x->B < b_period ? x->B : b_period, nh = x->NH < h_period ? x->NH : h_period;
    const size_t state = x->DK * x->DV;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < nb * nh; i++) {
        const size_t head = i / nh * x->NH + i % nh, first = i / nh * x->T * x->NH + i % nh;
        const GlaReference r = gla_reference_new(x->T, x->DK, x->DV);
        const GlaHead of = {h[Q] + first * x->DK, h[K] + first * x->DK, h[G] + first * x->DK,
                            h[V] + first * x->DV, h[DOUT] + first * x->DV,
                            x->stateful ? h[INITIAL] + head * state : NULL,
                            x->stateful ? h[DFINAL] + head * state : NULL, x->T, x->DK, x->DV,
                            x->NH * x->DK, x->NH * x->DV, (double)x->scale};
        const double *from[OUTPUTS] = {r.out, r.final, r.dq, r.dk, r.dg, r.dv, r.dinitial};
        gla_reference(r, &of);
        for (size_t b = i / nh; b < x->B; b += nb)
            for (size_t to = i % nh; to < x->NH; to += nh)
                for (int o = 0; o < OUTPUTS; o++) {
                    const size_t width = o == OUT || o == DV_ ? x->DV : x->DK;
                    if (o == FINAL || o == DINITIAL)
                        memcpy(x->refs[o] + (b * x->NH + to) * state, from[o], state * 8);
                    for (size_t t = 0; t < x->T && o != FINAL && o != DINITIAL; t++)
                        memcpy(x->refs[o] + ((b * x->T + t) * x->NH + to) * width,
                               from[o] + t * width, width * 8);
                }
        free(r.out);
    }
}

// scratch_of: n elements of device memory, all NaN; n may be 0.
template <class X> static X *scratch_of(size_t n)
{
    X *p;
    CUDA_CHECK(cudaMalloc(&p, (n + 1) * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0xFF, n * sizeof(X)));
    return p;
}

// ladder_scratch: what the kernels need beside inputs and outputs.
static void ladder_scratch(Ladder *x)
{
    const size_t heads = x->B * x->NH, keys = heads * x->T * x->DK, state = heads * x->DK * x->DV;
    const Plain d = {(int)x->T, (int)x->NH, (int)x->DK, (int)x->DV, x->scale};
    const int naive = heads * x->T * x->DK * x->DV <= 400000000;
    x->work = scratch_of<float>(naive ? heads * plain_work(d.T, d.DK, d.DV) : 0);
    x->dots = scratch_of<float>(keys);
    x->last = scratch_of<float>(state);
    x->row_states = scratch_of<float>(state);
    x->out = scratch_of<floatX>(heads * x->T * x->DV);
    const size_t chunks = heads * ((x->T + CS - 1) / CS);
    x->kept.tiles = scratch_of<float>(chunks * x->DK * x->DV);
    x->kept.states = scratch_of<floatX>(chunks * x->DK * x->DV);
    x->kept.pairs = scratch_of<floatX>(chunks * CS * CS);
    x->dstates = scratch_of<floatX>(chunks * x->DK * x->DV);
#ifdef PRECISION_BF16
    const size_t steps = heads * ((x->T + ST - 1) / ST);
    x->dims = gla_dims(x->B, x->T, x->NH, x->DK, x->DV, x->NH * x->DK, x->NH * x->DK,
                       x->NH * x->DV, x->scale);
    const size_t segments = x->dims.segments, fragments = (x->DK + 15) / 16 * 16 * 128;
    x->walk = {scratch_of<floatX>(keys), scratch_of<floatX>(keys),
               scratch_of<floatX>(steps * ST * ST), scratch_of<float>(steps * x->DK),
               scratch_of<float>(heads * segments * x->DK), scratch_of<float>(state * segments),
               scratch_of<float>(state * segments), x->dots,
               scratch_of<uint4>((chunks + heads) * fragments / 8)};
#endif
}

// ladder_setup: inputs, references and buffers of a shape.
static Ladder ladder_setup(size_t B, size_t T, size_t NH, size_t DK, size_t DV, GateKind kind,
                           int stateful, size_t b_period, size_t h_period)
{
    Ladder x = {B, T, NH, DK, DV, kind, stateful, 1 / sqrtf((float)DK)};
    const size_t pad = 16384;
    float *h[INPUTS];
    for (int i = 0; i < INPUTS; i++) {
        const size_t n = ladder_elements(&x, i, 1);
        h[i] = ladder_input(&x, i, b_period, h_period);
        x.inputs[i] = bench_alloc(n + 2 * pad, ladder_type(i, 1), 0);
        BenchBuffer inside = x.inputs[i];
        inside.data = (char *)inside.data + pad * bench_elem(ladder_type(i, 1));
        bench_upload(&inside, ladder_type(i, 1), h[i], n);
        x.in[i] = i > DOUT && !stateful ? NULL : inside.data;
    }
    for (int o = 0; o < OUTPUTS; o++) {
        x.outputs[o] = bench_alloc(ladder_elements(&x, o, 0), ladder_type(o, 0), 0);
        x.refs[o] = (double *)alloc_zero(ladder_elements(&x, o, 0), 8, "references");
    }
    ladder_references(&x, h, b_period, h_period);
    for (int i = 0; i < INPUTS; i++)
        free(h[i]);
    ladder_scratch(&x);
    return x;
}

// ladder_free: give all of it back.
static void ladder_free(Ladder *x)
{
    void *scratch[] = {x->work, x->dots, x->last, x->row_states, x->out, x->dstates,
                       x->kept.tiles, x->kept.states, x->kept.pairs};
    for (int i = 0; i < INPUTS; i++)
        bench_free(&x->inputs[i]);
    for (int o = 0; o < OUTPUTS; o++) {
        bench_free(&x->outputs[o]);
        free(x->refs[o]);
    }
    for (void *p : scratch)
        CUDA_CHECK(cudaFree(p));
#ifdef PRECISION_BF16
    void *walk[] = {x->walk.fq, x->walk.fk, x->walk.pairs, x->walk.fade, x->walk.total,
                    x->walk.starts, x->walk.ends, x->walk.states};
    for (void *p : walk)
        CUDA_CHECK(cudaFree(p));
#endif
}

// ---- rows of the tables

// Inputs and outputs as the kernels take them.
#define IN(x, i) ((const floatX *)(x)->in[i])
#define OUT_OF(x, o) ((floatX *)(x)->outputs[o].data)
#define GATES(x) ((const float *)(x)->in[G])
#define STATE(x, o) ((float *)(x)->outputs[o].data)

// plain_start: the state that a plain kernel starts from and overwrites.
static void plain_start(float *to, const void *from, const Ladder *x, cudaStream_t stream)
{
    const size_t bytes = x->B * x->NH * x->DK * x->DV * sizeof(float);
    if (from)
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
    else
        CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream));
}

// plain_of: dimensions for the plain kernels.
static Plain plain_of(const Ladder *x)
{
    return {(int)x->T, (int)x->NH, (int)x->DK, (int)x->DV, x->scale};
}

// WITH_SIZE: the statement with SIZE = n rounded up where REGISTERS, else 0.
#define WITH_SIZE(REGISTERS, n, ...) \
    do { \
        if (!(REGISTERS)) { enum { SIZE = 0 }; __VA_ARGS__; } \
        else if ((n) <= 32) { enum { SIZE = 32 }; __VA_ARGS__; } \
        else if ((n) <= 64) { enum { SIZE = 64 }; __VA_ARGS__; } \
        else { enum { SIZE = 128 }; __VA_ARGS__; } \
    } while (0)

// refuse_naive: why the kernels with S in memory do not take a shape, or NULL.
static const char *refuse_naive(const void *problem)
{
    const Ladder *x = (const Ladder *)problem;
    return x->B * x->NH * x->T * x->DK * x->DV > 400000000 ? "it would take too long" : NULL;
}

// refuse_registers: likewise with S in registers.
static const char *refuse_registers(const void *problem)
{
    const Ladder *x = (const Ladder *)problem;
    return x->DK <= 128 && x->DV <= 128 ? NULL : "DK and DV up to 128";
}

// run_forward_recurrent, run_backward_recurrent: the recurrence, a thread a column or row of S.
template <int REGISTERS> static void run_forward_recurrent(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    plain_start(STATE(x, FINAL), x->in[INITIAL], x, stream);
    WITH_SIZE(REGISTERS, x->DK,
        LAUNCH((recurrent_value_kernel<SIZE, 0>), x->B * x->NH, (unsigned)x->DV, 0, stream,
               OUT_OF(x, OUT), STATE(x, FINAL), IN(x, Q), IN(x, K), GATES(x), IN(x, V),
               plain_of(x)));
}
template <int REGISTERS>
static void run_backward_recurrent(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    plain_start(STATE(x, DINITIAL), x->in[DFINAL], x, stream);
    WITH_SIZE(REGISTERS, x->DK,
        LAUNCH((recurrent_value_kernel<SIZE, 1>), x->B * x->NH, (unsigned)x->DV, 0, stream,
               OUT_OF(x, DV_), STATE(x, DINITIAL), IN(x, K), IN(x, Q), GATES(x), IN(x, DOUT),
               plain_of(x)));
    plain_start(x->last, x->in[INITIAL], x, stream);
    plain_start(x->row_states, x->in[DFINAL], x, stream);
    WITH_SIZE(REGISTERS, x->DV,
        LAUNCH((recurrent_key_kernel<SIZE, 0>), x->B * x->NH, (unsigned)x->DK, 0, stream,
               OUT_OF(x, DQ), NULL, x->dots, x->last, IN(x, Q), IN(x, K), IN(x, DOUT), IN(x, V),
               GATES(x), NULL, plain_of(x));
        LAUNCH((recurrent_key_kernel<SIZE, 1>), x->B * x->NH, (unsigned)x->DK, 0, stream,
               OUT_OF(x, DK_), STATE(x, DG), x->dots, x->row_states, IN(x, K), IN(x, Q), IN(x, V),
               IN(x, DOUT), GATES(x), x->last, plain_of(x)));
}

// plain_forward: chunks as loops.
static void plain_forward(floatX *out, float *final, const Ladder *x, cudaStream_t stream)
{
    LAUNCH(plain_forward_kernel, x->B * x->NH, PLAIN_THREADS, 0, stream, out, final, x->work,
           IN(x, Q), IN(x, K), GATES(x), IN(x, V), (const float *)x->in[INITIAL], plain_of(x));
}

// run_forward_plain, run_backward_plain: the same as kernels of a table; the second makes S before
// every chunk first.
static void run_forward_plain(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    plain_forward(OUT_OF(x, OUT), STATE(x, FINAL), x, stream);
}
static void run_backward_plain(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    plain_forward(x->out, NULL, x, stream);
    plain_start(STATE(x, DINITIAL), x->in[DFINAL], x, stream);
    LAUNCH(plain_backward_kernel, x->B * x->NH, PLAIN_THREADS, 0, stream, OUT_OF(x, DQ),
           OUT_OF(x, DK_), STATE(x, DG), OUT_OF(x, DV_), STATE(x, DINITIAL), x->work, IN(x, DOUT),
           IN(x, Q), IN(x, K), GATES(x), IN(x, V), plain_of(x));
}

// trainer_shape: for the trainer's kernels.
static GlaShape trainer_shape(const Ladder *x)
{
    return {x->B, x->T, x->NH, x->DK, x->DV, x->NH * x->DK, x->NH * x->DK, x->NH * x->DV, x->scale};
}

// trainer_kept: what its form keeps.
static GlaKept trainer_kept(const Ladder *x, int form)
{
    return {form == RECURRENT ? x->kept.tiles : NULL, x->kept.states, x->kept.pairs};
}

// run_forward_trainer: KEEP: what a backward pass needs too.
template <int FORM, int KEEP>
static void run_forward_trainer(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    GlaKept kept = trainer_kept(x, FORM);
    if (!KEEP)
        kept.tiles = NULL, kept.pairs = NULL;
    gla_forward(OUT_OF(x, OUT), kept, STATE(x, FINAL), IN(x, Q), IN(x, K), GATES(x), IN(x, V),
                (const float *)x->in[INITIAL], trainer_shape(x), FORM, stream);
}

// run_backward_trainer: from what the last forward pass of that form kept.
template <int FORM> static void run_backward_trainer(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    gla_backward(OUT_OF(x, DQ), OUT_OF(x, DK_), STATE(x, DG), OUT_OF(x, DV_), STATE(x, DINITIAL),
                 x->dstates, IN(x, DOUT), (const float *)x->in[DFINAL], trainer_kept(x, FORM),
                 STATE(x, FINAL), IN(x, Q), IN(x, K), GATES(x), IN(x, V),
                 (const float *)x->in[INITIAL], trainer_shape(x), FORM, stream);
}

// run_both_trainer: forward, then backward, as a training step has them.
template <int FORM> static void run_both_trainer(const void *problem, cudaStream_t stream)
{
    run_forward_trainer<FORM, 1>(problem, stream);
    run_backward_trainer<FORM>(problem, stream);
}

// refuse_tokens: why the trainer's recurrence does not take a shape, or NULL.
static const char *refuse_tokens(const void *problem)
{
    return ((const Ladder *)problem)->kind == BEYOND ? "g below -30" : refuse_registers(problem);
}

#ifdef PRECISION_BF16
// refuse_walk: why the tensor cores do not take a shape, or NULL.
static const char *refuse_walk(const void *problem)
{
    const Ladder *x = (const Ladder *)problem;
    const int fits = x->DK % 8 == 0 && x->DV % 8 == 0 && x->DK <= 128 && x->DV <= 128;
    return fits ? NULL : "DK and DV of 8, 16, ..., 128";
}

// refuse_trainer: why the trainer's chunks do not take a shape, or NULL.
static const char *refuse_trainer(const void *problem)
{
    return ((const Ladder *)problem)->kind == BEYOND ? "g below -30" : refuse_walk(problem);
}

// walk_dims: ONE: sequences are never cut.
template <int ONE> static Gla walk_dims(const Ladder *x)
{
    Gla d = x->dims;
    if (ONE)
        d.segments = 1, d.per = (d.T + ST - 1) / ST;
    return d;
}

// run_forward_walk, run_backward_walk: the walks of gla_walk.cuh, ONE as in walk_dims.
template <int ONE> static void run_forward_walk(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    gla_walk_forward(OUT_OF(x, OUT), STATE(x, FINAL), x->walk, IN(x, Q), IN(x, K), GATES(x),
                     IN(x, V), (const float *)x->in[INITIAL], x->B, walk_dims<ONE>(x), stream);
}

// walk_backward: kept: work is as run_forward_walk left it.
template <int ONE> static void walk_backward(const Ladder *x, int kept, cudaStream_t stream)
{
    gla_walk_backward(OUT_OF(x, DQ), OUT_OF(x, DK_), STATE(x, DG), OUT_OF(x, DV_),
                      STATE(x, DINITIAL), x->walk, IN(x, DOUT), (const float *)x->in[DFINAL],
                      IN(x, Q), IN(x, K), GATES(x), IN(x, V), (const float *)x->in[INITIAL], x->B,
                      walk_dims<ONE>(x), kept, stream);
}
template <int ONE> static void run_backward_walk(const void *problem, cudaStream_t stream)
{
    walk_backward<ONE>((const Ladder *)problem, 0, stream);
}

// run_both: forward, then backward, as a training step has them.
static void run_both(const void *problem, cudaStream_t stream)
{
    run_forward_walk<0>(problem, stream);
    walk_backward<0>((const Ladder *)problem, 1, stream);
}
#endif

// ---- cases

// ladder_outputs: those of a direction with their references and bounds; returns how many.
static int ladder_outputs(BenchOutput *to, Ladder *x, int backward)
{
    static const char *const names[OUTPUTS] = {"out", "S_T", "dq", "dk", "dg", "dv", "dS_0"};
    const int bf16 = sizeof(floatX) == 2, first = backward ? DQ : OUT;
    const int count = backward ? OUTPUTS - DQ : DQ;
    double largest = 0;
    for (int o = 0; o < count; o++) {
        const size_t n = ladder_elements(x, first + o, 0);
        double squares = 0;
        to[o] = {names[first + o], &x->outputs[first + o], ladder_type(first + o, 0), n,
                 x->refs[first + o], backward ? (bf16 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32)
                                              : (bf16 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32)};
        for (size_t i = 0; i < n; i++)
            squares += to[o].ref[i] * to[o].ref[i];
        largest = fmax(largest, sqrt(squares));
    }
    for (int o = 0; o < count && backward; o++)
        to[o].largest = largest;
    return count;
}

// ladder_keep: what the trainer's backward kernels that run take from a forward pass.
static void ladder_keep(const Ladder *x, const BenchOptions *bench)
{
    if (!refuse_tokens(x) && (!bench->kernel || bench->kernel == 4))
        run_forward_trainer<RECURRENT, 1>(x, 0);
#ifdef PRECISION_BF16
    if (!refuse_trainer(x) && (!bench->kernel || bench->kernel == 5))
        run_forward_trainer<CHUNK, 1>(x, 0);
#endif
}

// ladder_case: the table's kernels on one shape, forward or backward; returns the failures. Bytes:
// every input and output once.
static int ladder_case(Ladder *x, const BenchKernel *kernels, int num_kernels, int backward,
                       const BenchOptions *bench)
{
    BenchOutput outputs[OUTPUTS];
    char name[160];
    snprintf(name, sizeof name, "gla %s %s (%zu,%zu,%zu,%zu,%zu)%s%s",
             backward ? "backward" : "forward", sizeof(floatX) == 2 ? "bf16" : "fp32", x->B, x->T,
             x->NH, x->DK, x->DV, KIND_NAMES[x->kind], x->stateful ? ", S_0 given" : "");
    const int count = ladder_outputs(outputs, x, backward);
    if (backward)
        ladder_keep(x, bench);
    const double tokens = (double)(x->B * x->T * x->NH), keys = tokens * (double)x->DK;
    const double size = sizeof(floatX), values = tokens * (double)x->DV;
    const double bytes = backward ? keys * (4 * size + 8) + values * 3 * size
                                  : keys * (2 * size + 4) + values * 2 * size;
    BenchCase c = {name, x, kernels, num_kernels, outputs, count, bytes, 0, "GB"};
    return bench_case(&c, bench);
}

// wild: how many numbers of a head (others: of all other heads) are not finite, of n on the device,
// `width` numbers of each head in turn.
static size_t wild(const BenchBuffer *b, BenchType type, size_t n, size_t width, size_t heads,
                   size_t head, int others)
{
    char *h = (char *)alloc_zero(n, bench_elem(type), "output");
    size_t found = 0;
    CUDA_CHECK(cudaMemcpy(h, b->data, b->bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) {
        const float x = type == BENCH_F32 ? ((float *)h)[i] : (float)((__nv_bfloat16 *)h)[i];
        found += !isfinite(x) && (i / width % heads == head) != others;
    }
    free(h);
    return found;
}

// ladder_nan: a NaN in any input, states too, must be seen in an output of its head, and in none of
// another; returns the failures.
static int ladder_nan(Ladder *x, const BenchKernel *k, int backward)
{
    BenchOutput outputs[OUTPUTS];
    const BenchOptions chosen = {k->num};
    const int count = ladder_outputs(outputs, x, backward);
    int failed = 0;
    for (int i = 0; i < INPUTS; i++) {
        if (!backward && (i == DOUT || i == DFINAL))
            continue;
        const size_t size = bench_elem(ladder_type(i, 1)), at = ladder_elements(x, i, 1) / x->B / 2;
        const size_t numbers = i > DOUT ? x->DK * x->DV : i == V || i == DOUT ? x->DV : x->DK;
        const size_t head = at / numbers % x->NH;
        char saved[4], *p = (char *)x->in[i] + at * size;
        size_t seen = 0, spread = 0;
        CUDA_CHECK(cudaMemcpy(saved, p, size, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemset(p, 0xFF, size));
        if (backward)
            ladder_keep(x, &chosen);
        k->fn(x, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(p, saved, size, cudaMemcpyHostToDevice));
        for (int o = 0; o < count; o++) {
            const int which = (backward ? DQ : OUT) + o;
            const size_t width = which == FINAL || which == DINITIAL ? x->DK * x->DV
                                 : which == OUT || which == DV_      ? x->DV
                                                                     : x->DK;
            seen += wild(outputs[o].buffer, outputs[o].type, outputs[o].n, width, x->NH, head, 0);
            spread += wild(outputs[o].buffer, outputs[o].type, outputs[o].n, width, x->NH, head, 1);
        }
        if (seen == 0 || spread > 0)
            printf("  kernel %d: a NaN in input %d is seen %zu times, in other heads %zu FAILED\n",
                   k->num, i, seen, spread);
        failed += seen == 0 || spread > 0;
    }
    return failed;
}

// ladder_causal: another token t changes its own output and no bit of one before it; returns 1 if
// not. The shape has one sequence.
static int ladder_causal(Ladder *x, const BenchKernel *k)
{
    const size_t row = x->NH * x->DV * sizeof(floatX), t = x->T / 2, bytes = x->T * row;
    char *before = (char *)alloc_zero(2 * bytes, 1, "outputs"), *behind = before + bytes;
    k->fn(x, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(before, x->outputs[OUT].data, bytes, cudaMemcpyDeviceToHost));
    for (int i = Q; i <= V; i++) {
        const size_t width = ladder_elements(x, i, 1) / x->B / x->T * bench_elem(ladder_type(i, 1));
        char *at = (char *)x->in[i] + t * width; // of the only sequence
        CUDA_CHECK(cudaMemset(at, 0, width));
    }
    k->fn(x, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(behind, x->outputs[OUT].data, bytes, cudaMemcpyDeviceToHost));
    const int same = memcmp(before, behind, t * row) == 0;
    const int other = memcmp(before + t * row, behind + t * row, row) != 0;
    if (!same || !other)
        printf("  kernel %d: token %zu changed, outputs before it %s, its own %s FAILED\n", k->num,
               t, same ? "did not" : "did", other ? "did" : "did not");
    free(before);
    return !same || !other;
}

// ladder_small: every kernel on one small shape, of two sequences' two heads that repeat; returns
// the failures.
static int ladder_small(const BenchKernel *kernels, int num_kernels, int backward,
                        const BenchOptions *bench, size_t B, size_t T, size_t NH, size_t DK,
                        size_t DV, GateKind kind, int stateful)
{
    BenchOptions check = *bench;
    check.check_only = 1;
    Ladder x = ladder_setup(B, T, NH, DK, DV, kind, stateful, 2, 2);
    int failed = ladder_case(&x, kernels, num_kernels, backward, &check);
    ladder_free(&x);
    return failed;
}

// ladder_properties: NaN and causality, of every kernel.
static int ladder_properties(const BenchKernel *kernels, int num_kernels, int backward,
                             const BenchOptions *bench)
{
    int failed = 0;
    for (const BenchKernel *k = kernels; k < kernels + num_kernels; k++)
        if (!bench->kernel || bench->kernel == k->num) {
            Ladder x = ladder_setup(1, 150, 3, 32, 16, Z_FREE, 1, 1, 3);
            failed += ladder_nan(&x, k, backward);
            failed += !backward && ladder_causal(&x, k);
            ladder_free(&x);
        }
    return failed;
}

// ladder_checks: every kernel at lengths around those of steps and chunks, sizes with and without
// padding, all gates, and lengths at which few heads are cut in segments. Own shape: --B, --T, --C
// (one head, DK = DV). Returns the failures.
static int ladder_checks(const BenchKernel *kernels, int num_kernels, int backward,
                         const BenchOptions *bench)
{
    static const size_t lengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 255, 258, 1000};
    static const size_t sizes[] = {8, 16, 32, 60, 64, 100, 128};
    int failed = 0, cases = 0;
    if (bench->B || bench->T || bench->C) {
        const size_t C = bench->C ? bench->C : 64;
        for (int kind = 0; kind < KINDS; kind++)
            failed += ladder_small(kernels, num_kernels, backward, bench, bench->B ? bench->B : 1,
                                   bench->T ? bench->T : 65, 1, C, C, (GateKind)kind, kind % 2);
        return failed;
    }
    for (int i = 0; i < 11; i++)
        for (int n = 0; n < 7; n++, cases++)
            failed += ladder_small(kernels, num_kernels, backward, bench, lengths[i] > 300 ? 1 : 3,
                                   lengths[i], i % 2 ? 1 : 3, sizes[n], sizes[(n + i) % 7],
                                   (GateKind)((i * 7 + n) % KINDS), (i + n) % 2);
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < 2; i++, cases++)
            failed += ladder_small(kernels, num_kernels, backward, bench, 1, i ? 700 : 130, 1,
                                   i ? 64 : 128, i ? 128 : 64, (GateKind)kind, i);
    failed += ladder_properties(kernels, num_kernels, backward, bench);
    printf("checks: %d shapes, %d failed\n", cases, failed);
    return failed;
}

// ladder_run: checks and tables of a ladder; returns the number of failures.
static int ladder_run(const BenchKernel *kernels, int num_kernels, int backward,
                      const BenchOptions *bench)
{
    static const size_t shapes[][5] = {{8, 2048, 16, 128, 128}, {1, 16384, 16, 128, 128},
                                       {32, 512, 16, 64, 64}};
    const int own = bench->B || bench->T || bench->C;
    int failed = 0;
    if (!bench->time_only)
        failed += ladder_checks(kernels, num_kernels, backward, bench);
    for (const size_t *s : shapes)
        if (!bench->check_only && !own) {
            Ladder x = ladder_setup(s[0], s[1], s[2], s[3], s[4], Z_0, 0, 1, 2);
            failed += ladder_case(&x, kernels, num_kernels, backward, bench);
            ladder_free(&x);
        }
    return failed;
}

#endif
