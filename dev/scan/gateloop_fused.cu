// gateloop_fused.cu: GateLoop's layer between its matrix products, SiLU(g) q Re(h) with h_t = a_t
// h_{t-1} + k_t v_t, h_0 in and h_T out, forward and backward, from q, k, v, g, the logits of a.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o gateloop_fused dev/scan/gateloop_fused.cu -lcublas -lcublasLt
//
// Bytes of an element: 18 forward, 30 backward (BF16, logits of a in fp32); 28 and 52 (FP32).
// GB/s (% of a copy of as many bytes), (B,T,C) = (8,1024,2048), BF16, L2 flushed, one H200; at
// (16,2048,1024) 4 makes 3876 (91) forward and 3457 (81) backward, FP32 4187 (98) and 4031 (95).
//    forward
//  1  220 (5)    a thread a channel, all of T
//  2  991 (24)   reduce, carry, scan: three kernels; k, v and the logits read twice
//  3 1883 (46)   one pass, tiles handed on from block to block, one channel a lane
//  4 3713 (88)   3 with two channels a lane
//    backward
//  1  176 (4)    a thread a channel: h of every position written, then read on the way back
//  3 1772 (42)   one pass, h again from the states that the forward pass kept, one channel a lane
//  4 3465 (83)   3 with two channels a lane
// 3 is of a file before, with half as many instructions again; 4 made 3331 (79) and 3168 (75) then.
//
// The trainer takes 4 where there are 16384 sequences times channels or more, else 3, whose tiles
// are twice as long and half as wide: they need half as many steps from block to block.
//
// Checked: T 1, 2, 31, 33, 255, 258, 4096, odd C, B 1, whole tiles and others, h_0 and the gradient
// of h_T given or not, every transition; r near 1, exactly 0, logits up to 1e4.
#define TESTING
#pragma nv_diag_suppress 177 // most of the trainer is not used here
#include "../../train_gateloop.cu"
#include "../bench.cuh"
#include "gateloop_reference.h"

static const BenchType LOOP_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;
enum { CHUNK = 64, LOOP_THREADS = 128 };

// Logits: alpha normal; about 8, a horizon of thousands; every third -200, where r is 0; up to 1e4,
// and where r is 0 an angle of 1e30, of which nothing but a finite sine is asked.
typedef enum { NORMAL, LONG, ZEROS, FAR, INPUTS } LoopInputs;
static const char *const INPUT_NAMES[] = {"", " r near 1", " r 0", " far logits"};

// A shape on the device. Inputs stand between rows of NaN. split: after a backward pass the logits'
// gradients are taken out of dp, so that they are judged by themselves. states: kept by a forward
// pass for one and for two channels a lane; sums, carries: of the three kernels; h: of the naive
// backward pass.
typedef struct {
    size_t B, T, C;
    int transition, stateful, split; // stateful: initial and dfinal given
    LoopInputs inputs;
    BenchBuffer buffers[5];
    const floatX *qkvg, *dz;
    const float *logits, *initial, *dfinal; // the last two NULL unless stateful
    BenchBuffer z, final, dp, dlogits, dinitial;
    float *states[2];
    float4 *sums;
    Complex *carries, *h;
    Word *chain;
    double *ref_z, *ref_final, *ref_dp, *ref_dlogits, *ref_dinitial;
} Loop;

// ---- the plain kernels

// loop_put: the output of a position from its h.
static __device__ inline void loop_put(floatX *z, const floatX *from, Complex h, int C)
{
    float slope;
    *z = (floatX)(silu((float)from[3 * C], &slope) * (float)from[0] * h.re);
}

// naive_forward_kernel: a thread a channel.
static __global__ void naive_forward_kernel(floatX *z, Complex *final, const floatX *qkvg,
                                            const float *logits, const Complex *initial, Mix s,
                                            int kind)
{
    const size_t i = blockIdx.x * (size_t)LOOP_THREADS + threadIdx.x, b = i / s.C;
    const int c = (int)(i % s.C);
    if (b >= s.B)
        return;
    Complex h = initial ? initial[i] : Complex{0, 0};
    for (int t = 0; t < s.T; t++) {
        const size_t row = b * s.T + t;
        const floatX *from = qkvg + row * 4 * s.C + c;
        const Gate a = gate_of(logits + row * s.pitch, c, s, kind);
        h = onto(a.a, h, (float)from[s.C] * (float)from[2 * s.C]);
        loop_put(z + row * s.C + c, from, h, s.C);
    }
    final[i] = h;
}

// chunk_sums_kernel: sums (B,tiles,C) = what a chunk does to a state: A and X; a thread a channel
// of one.
static __global__ void chunk_sums_kernel(float4 *sums, const floatX *qkvg, const float *logits,
                                         Mix s, int kind)
{
    const size_t i = blockIdx.x * (size_t)LOOP_THREADS + threadIdx.x, chunk = i / s.C;
    const int c = (int)(i % s.C), t0 = (int)(chunk % s.tiles) * CHUNK;
    Complex A = {1, 0}, X = {0, 0};
    if (chunk >= s.B * s.tiles)
        return;
    for (int t = t0; t < min(t0 + CHUNK, s.T); t++) {
        const size_t row = chunk / s.tiles * s.T + t;
        const floatX *from = qkvg + row * 4 * s.C + c;
        const Gate a = gate_of(logits + row * s.pitch, c, s, kind);
        A = times(a.a, A);
        X = onto(a.a, X, (float)from[s.C] * (float)from[2 * s.C]);
    }
    sums[i] = {A.re, A.im, X.re, X.im};
}

// chunk_carry_kernel: carries (B,tiles,C) = the state before each chunk, and final; a thread a
// channel.
static __global__ void chunk_carry_kernel(Complex *carries, Complex *final, const float4 *sums,
                                          const Complex *initial, Mix s)
{
    const size_t i = blockIdx.x * (size_t)LOOP_THREADS + threadIdx.x, b = i / s.C;
    if (b >= s.B)
        return;
    Complex h = initial ? initial[i] : Complex{0, 0};
    for (int tile = 0; tile < s.tiles; tile++) {
        const size_t at = (b * s.tiles + tile) * s.C + i % s.C;
        const float4 f = sums[at];
        carries[at] = h;
        h = onto({f.x, f.y}, h, {f.z, f.w});
    }
    final[i] = h;
}

// chunk_scan_kernel: the outputs of a chunk from the state before it; a thread a channel of one.
static __global__ void chunk_scan_kernel(floatX *z, const Complex *carries, const floatX *qkvg,
                                         const float *logits, Mix s, int kind)
{
    const size_t i = blockIdx.x * (size_t)LOOP_THREADS + threadIdx.x, chunk = i / s.C;
    const int c = (int)(i % s.C), t0 = (int)(chunk % s.tiles) * CHUNK;
    if (chunk >= s.B * s.tiles)
        return;
    Complex h = carries[i];
    for (int t = t0; t < min(t0 + CHUNK, s.T); t++) {
        const size_t row = chunk / s.tiles * s.T + t;
        const floatX *from = qkvg + row * 4 * s.C + c;
        const Gate a = gate_of(logits + row * s.pitch, c, s, kind);
        h = onto(a.a, h, (float)from[s.C] * (float)from[2 * s.C]);
        loop_put(z + row * s.C + c, from, h, s.C);
    }
}

// naive_backward_kernel: a thread a channel; h (B,T,C): scratch.
static __global__ void naive_backward_kernel(floatX *dp, Complex *dinitial, Complex *h_out,
                                             const floatX *dz, const Complex *dfinal,
                                             const floatX *qkvg, const float *logits,
                                             const Complex *initial, Mix s, int kind)
{
    const size_t i = blockIdx.x * (size_t)LOOP_THREADS + threadIdx.x, b = i / s.C;
    const int c = (int)(i % s.C), pitch = (4 + s.parts) * s.C;
    if (b >= s.B)
        return;
    Complex h = initial ? initial[i] : Complex{0, 0}, G = dfinal ? dfinal[i] : Complex{0, 0};
    for (int t = 0; t < s.T; t++) {
        const size_t row = b * s.T + t;
        const floatX *from = qkvg + row * 4 * s.C + c;
        h_out[row * s.C + c] = h; // before the token
        h = onto(gate_of(logits + row * s.pitch, c, s, kind).a, h,
                 (float)from[s.C] * (float)from[2 * s.C]);
    }
    for (int t = s.T - 1; t >= 0; t--) {
        const size_t row = b * s.T + t;
        const floatX *from = qkvg + row * 4 * s.C + c;
        floatX *to = dp + row * pitch + c;
        const Gate a = gate_of(logits + row * s.pitch, c, s, kind);
        const Complex x = times(a.a, h_out[row * s.C + c]);
        const float q = (float)from[0], k = (float)from[s.C], v = (float)from[2 * s.C];
        const float d = (float)dz[row * s.C + c], re = x.re + k * v;
        float slope;
        const float dy = d * silu((float)from[3 * s.C], &slope);
        G.re += q * dy;
        const float r = G.re * x.re + G.im * x.im, angle = G.im * x.re - G.re * x.im;
        to[0] = (floatX)(dy * re);
        to[s.C] = (floatX)(v * G.re);
        to[2 * s.C] = (floatX)(k * G.re);
        to[3 * s.C] = (floatX)(d * slope * q * re);
        if (s.parts > 0)
            to[4 * s.C] = (floatX)(a.r_alpha * r + a.angle_alpha * angle);
        if (s.parts > 1)
            to[5 * s.C] = (floatX)(a.r_beta * r + a.angle_beta * angle);
        G = times(conj(a.a), G);
    }
    dinitial[i] = G;
}

// ---- rows of the tables

// loop_blocks: blocks of LOOP_THREADS for n threads.
static size_t loop_blocks(size_t n)
{
    return (n + LOOP_THREADS - 1) / LOOP_THREADS;
}

// The shape as kernels take it, in tiles of `tile` positions and `vec` channels a lane.
static Mix loop_mix(const Loop *x, size_t vec, size_t tile)
{
    return mix_of(x->B, x->T, x->C, 1, x->transition, vec, tile);
}

static void run_forward_naive(const void *problem, cudaStream_t stream)
{
    const Loop *x = (const Loop *)problem;
    LAUNCH(naive_forward_kernel, loop_blocks(x->B * x->C), LOOP_THREADS, 0, stream,
           (floatX *)x->z.data, (Complex *)x->final.data, x->qkvg, x->logits,
           (const Complex *)x->initial, loop_mix(x, 1, x->T), x->transition);
}

static void run_forward_chunks(const void *problem, cudaStream_t stream)
{
    const Loop *x = (const Loop *)problem;
    const Mix s = loop_mix(x, 1, CHUNK);
    const size_t n = x->B * s.tiles * x->C;
    LAUNCH(chunk_sums_kernel, loop_blocks(n), LOOP_THREADS, 0, stream, x->sums, x->qkvg, x->logits,
           s, x->transition);
    LAUNCH(chunk_carry_kernel, loop_blocks(x->B * x->C), LOOP_THREADS, 0, stream, x->carries,
           (Complex *)x->final.data, x->sums, (const Complex *)x->initial, s);
    LAUNCH(chunk_scan_kernel, loop_blocks(n), LOOP_THREADS, 0, stream, (floatX *)x->z.data,
           x->carries, x->qkvg, x->logits, s, x->transition);
}

// run_forward: the trainer's kernel with VEC channels a lane.
template <int VEC> static void run_forward(const void *problem, cudaStream_t stream)
{
    const Loop *x = (const Loop *)problem;
    const Mix s = loop_mix(x, VEC, MIX_WARPS * FORWARD / VEC);
    WITH_KIND(x->transition, WITH_FLAG(WHOLE, s.whole,
              LAUNCH((gateloop_forward_kernel<KIND, VEC, VEC == 2 && WHOLE>),
                     x->B * s.tiles * s.groups, MIX_THREADS, 0, stream, (floatX *)x->z.data, NULL,
                     (Complex *)x->states[VEC - 1], (Complex *)x->final.data, x->chain, x->qkvg,
                     x->logits, (const Complex *)x->initial, s)));
}

// loop_split: where asked for, copy the logits' gradients out of dp.
static void loop_split(const Loop *x, cudaStream_t stream)
{
    const size_t parts = GATE_PARTS[x->transition], width = parts * x->C * sizeof(floatX);
    const size_t pitch = (4 + parts) * x->C * sizeof(floatX);
    if (x->split && parts)
        CUDA_CHECK(cudaMemcpy2DAsync(x->dlogits.data, width,
                                     (char *)x->dp.data + 4 * x->C * sizeof(floatX), pitch, width,
                                     x->B * x->T, cudaMemcpyDeviceToDevice, stream));
}

static void run_backward_naive(const void *problem, cudaStream_t stream)
{
    const Loop *x = (const Loop *)problem;
    LAUNCH(naive_backward_kernel, loop_blocks(x->B * x->C), LOOP_THREADS, 0, stream,
           (floatX *)x->dp.data, (Complex *)x->dinitial.data, x->h, x->dz,
           (const Complex *)x->dfinal, x->qkvg, x->logits, (const Complex *)x->initial,
           loop_mix(x, 1, x->T), x->transition);
    loop_split(x, stream);
}

// run_backward: see run_forward.
template <int VEC> static void run_backward(const void *problem, cudaStream_t stream)
{
    const Loop *x = (const Loop *)problem;
    const Mix s = loop_mix(x, VEC, KEPT / VEC);
    WITH_KIND(x->transition, WITH_FLAG(WHOLE, s.whole,
              LAUNCH((gateloop_backward_kernel<KIND, VEC, VEC == 2 && WHOLE, 1>),
                     x->B * s.tiles * s.groups, MIX_THREADS, 0, stream, (floatX *)x->dp.data,
                     (Complex *)x->dinitial.data, x->chain, x->dz, (const Complex *)x->dfinal,
                     (const Complex *)x->states[VEC - 1], x->qkvg, x->logits, s)));
    loop_split(x, stream);
}

// refuse_two: why two channels a lane do not take a shape, or NULL.
static const char *refuse_two(const void *problem)
{
    return ((const Loop *)problem)->C % 2 ? "an odd number of channels" : NULL;
}

static const BenchKernel forward_kernels[] = {
    {1, "a thread a channel", run_forward_naive, NULL},
    {2, "reduce, carry, scan", run_forward_chunks, NULL},
    {3, "one pass, a channel a lane", run_forward<1>, NULL},
    {4, "one pass, two channels a lane", run_forward<2>, refuse_two},
};
static const BenchKernel backward_kernels[] = {
    {1, "a thread a channel, h stored", run_backward_naive, NULL},
    {3, "one pass, a channel a lane", run_backward<1>, NULL},
    {4, "one pass, two channels a lane", run_backward<2>, refuse_two},
};

// ---- inputs and references

// loop_normal: normal-ish number i of a stream, deviation 1.
static float loop_normal(uint64_t seed, uint64_t i)
{
    float sum = 0;
    for (int k = 0; k < 4; k++)
        sum += bench_uniform(seed, 4 * i + k) - 0.5f;
    return 1.7320508f * sum;
}

// loop_alpha, loop_beta: logits number i, of x's kind.
static float loop_alpha(uint64_t i, const Loop *x)
{
    const float z = loop_normal(1, i), sign = x->transition == STABLE_EXP ? -1 : 1;
    switch (x->inputs) {
    case LONG: return sign * (8 + z);
    case ZEROS: return i % 3 == 1 ? sign * -200 : z;
    case FAR: return i % 8 == 6 ? sign * -200 : (i % 2 ? 1e4f : 1) * z;
    default: return z;
    }
}
static float loop_beta(uint64_t i, const Loop *x)
{
    const float z = loop_normal(2, i);
    return x->inputs != FAR ? z : i % 8 == 6 ? 1e30f : (i % 4 == 2 ? 1e3f : 1) * z;
}

// loop_upload: h_x (n) on the device between NaN on either side; the place of its first element.
static void *loop_upload(BenchBuffer *b, BenchType type, float *h_x, size_t n)
{
    const size_t pad = 16384;
    *b = bench_alloc(n + 2 * pad, type, 0);
    BenchBuffer inside = *b;
    inside.data = (char *)b->data + pad * bench_elem(type);
    bench_upload(&inside, type, h_x, n);
    return inside.data;
}

// loop_scratch: n elements of device memory, all ones: NaN, or EMPTY.
template <class X> static X *loop_scratch(size_t n)
{
    X *p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0xFF, n * sizeof(X)));
    return p;
}

// What the host has of a shape's inputs.
typedef struct {
    float *qkvg, *logits, *dz, *states;
    size_t pitch; // of logits: 0: the same for all tokens
} LoopHost;

// loop_reference: channel c of sequence b of x, for every sequence that repeats it: b, b + period.
static void loop_reference(Loop *x, const LoopHost *h, size_t b, size_t c, size_t period)
{
    const size_t T = x->T, C = x->C, parts = GATE_PARTS[x->transition], row = b * T, n = x->B * C;
    const int fixed = x->transition == FIXED || x->transition == FIXED_REAL;
    const float *q = h->qkvg + row * 4 * C + c, *logit = h->logits + row * h->pitch + c;
    double *out = (double *)alloc_zero(7 * T, sizeof *out, "reference");
    ReferenceChannel r = {q, q + C, q + 2 * C, q + 3 * C, parts > 0 ? logit : NULL,
                          parts > 1 ? logit + C : NULL, h->dz + row * C + c, 4 * C, h->pitch, C, T,
                          {0, 0}, {0, 0}, out, out + T, out + 2 * T, out + 3 * T, out + 4 * T,
                          out + 5 * T, out + 6 * T};
    for (int i = 0; i < 2 && x->stateful; i++) {
        r.h[i] = (double)h->states[2 * (b * C + c) + i];
        r.G[i] = (double)h->states[2 * (n + b * C + c) + i];
    }
    const float alpha_0 = 1 + 7 * ((float)c + 0.5f) / (float)C;
    reference_channel(&r, fixed ? log(exp2((double)alpha_0) - 1) : 0, x->transition);
    for (size_t to = b; to < x->B; to += period) {
        for (size_t t = 0; t < T; t++) {
            x->ref_z[(to * T + t) * C + c] = out[t];
            for (size_t k = 0; k < 4 + parts; k++)
                x->ref_dp[((to * T + t) * (4 + parts) + k) * C + c] = out[(k + 1) * T + t];
            for (size_t k = 0; k < parts; k++)
                x->ref_dlogits[((to * T + t) * parts + k) * C + c] = out[(k + 5) * T + t];
        }
        for (int i = 0; i < 2; i++) {
            x->ref_final[2 * (to * C + c) + i] = r.h[i];
            x->ref_dinitial[2 * (to * C + c) + i] = r.G[i];
        }
    }
    free(out);
}

// loop_inputs: the host's inputs of x, sequences repeating after `period`.
static LoopHost loop_inputs(const Loop *x, size_t period)
{
    const size_t n = x->B * x->T * x->C, C = x->C, parts = GATE_PARTS[x->transition];
    const int fixed = x->transition == FIXED || x->transition == FIXED_REAL;
    const size_t tokens = fixed ? 1 : x->B * x->T, sequence = x->T * C;
    LoopHost h = {(float *)alloc_zero(4 * n, 4, "input"),
                  (float *)alloc_zero(tokens * parts * C + 1, 4, "input"),
                  (float *)alloc_zero(n, 4, "input"),
                  (float *)alloc_zero(4 * x->B * C, 4, "input"), fixed ? 0 : parts * C};
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        const size_t from = i / sequence % period * sequence + i % sequence, row = i / C, c = i % C;
        for (int k = 0; k < 4; k++)
            h.qkvg[(row * 4 + k) * C + c] = loop_normal(3 + k, from);
        h.dz[i] = loop_normal(7, from);
        if (row < tokens && parts > 0)
            h.logits[row * parts * C + c] = loop_alpha(from, x);
        if (row < tokens && parts > 1)
            h.logits[(row * parts + 1) * C + c] = loop_beta(from, x);
    }
    for (size_t i = 0; i < 4 * x->B * C; i++) // the initial states, then the gradients of the last
        h.states[i] = loop_normal(8, i / (2 * x->B * C) * 2 * period * C + i % (2 * period * C));
    return h;
}

// loop_setup: inputs, references and buffers of a shape.
static Loop loop_setup(size_t B, size_t T, size_t C, int transition, LoopInputs inputs,
                       int stateful, size_t period)
{
    Loop x = {B, T, C, transition, stateful, 0, inputs};
    const size_t n = B * T * C, parts = GATE_PARTS[transition], chunks = B * (T / CHUNK + 1) * C;
    const size_t kept = mix_states(B, B * T, C, 1), nb = B < period ? B : period;
    const LoopHost h = loop_inputs(&x, period);
    const size_t logits = (h.pitch ? B * T : 1) * parts * C;
    x.qkvg = (floatX *)loop_upload(&x.buffers[0], LOOP_TYPE, h.qkvg, 4 * n);
    x.dz = (floatX *)loop_upload(&x.buffers[1], LOOP_TYPE, h.dz, n);
    x.logits = (float *)loop_upload(&x.buffers[2], BENCH_F32, h.logits, logits + 1);
    x.initial = (float *)loop_upload(&x.buffers[3], BENCH_F32, h.states, 2 * B * C);
    x.dfinal = (float *)loop_upload(&x.buffers[4], BENCH_F32, h.states + 2 * B * C, 2 * B * C);
    if (!stateful)
        x.initial = x.dfinal = NULL;
    x.ref_z = (double *)alloc_zero((5 + 2 * parts) * n + 4 * B * C, 8, "references");
    x.ref_dp = x.ref_z + n, x.ref_dlogits = x.ref_dp + (4 + parts) * n;
    x.ref_final = x.ref_dlogits + parts * n;
    x.ref_dinitial = x.ref_final + 2 * B * C;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < nb * C; i++)
        loop_reference(&x, &h, i / C, i % C, nb);
    free(h.qkvg), free(h.logits), free(h.dz), free(h.states);
    x.z = bench_alloc(n, LOOP_TYPE, 0);
    x.dp = bench_alloc((4 + parts) * n, LOOP_TYPE, 0);
    x.dlogits = bench_alloc(parts * n, LOOP_TYPE, 0);
    x.final = bench_alloc(2 * B * C, BENCH_F32, 0);
    x.dinitial = bench_alloc(2 * B * C, BENCH_F32, 0);
    x.states[0] = loop_scratch<float>(2 * kept), x.states[1] = loop_scratch<float>(2 * kept);
    x.sums = loop_scratch<float4>(chunks), x.carries = loop_scratch<Complex>(chunks);
    x.h = loop_scratch<Complex>(n), x.chain = loop_scratch<Word>(mix_words(B, B * T, C));
    return x;
}

// loop_free: give back what loop_setup took.
static void loop_free(Loop *x)
{
    BenchBuffer *all[] = {&x->buffers[0], &x->buffers[1], &x->buffers[2], &x->buffers[3],
                          &x->buffers[4], &x->z, &x->final, &x->dp, &x->dlogits,
                          &x->dinitial};
    void *scratch[] = {x->states[0], x->states[1], x->sums, x->carries, x->h, x->chain};
    for (BenchBuffer *b : all)
        bench_free(b);
    for (void *p : scratch)
        CUDA_CHECK(cudaFree(p));
    free(x->ref_z);
}

// ---- cases

// loop_case: both tables' kernels on one shape; returns the failures. With far logits and BF16's
// fast sine an angle of 1e3 is 1e-4 off, which the bounds for BF16 allow.
static int loop_case(Loop *x, const BenchOptions *bench)
{
    const size_t n = x->B * x->T * x->C, states = 2 * x->B * x->C;
    const size_t parts = GATE_PARTS[x->transition], size = sizeof(floatX);
    const double logits = x->transition == FIXED || x->transition == FIXED_REAL ? 0 : 4.0 * parts;
    const double bound = size == 2 ? BOUND_FORWARD_BF16 : 2 * BOUND_FORWARD_FP32; // spec: 2e-5
    const double grad = size == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
    x->split = bench->check_only;
    const BenchOutput outs[] = {{"z", &x->z, LOOP_TYPE, n, x->ref_z, bound},
                                {"h_T", &x->final, BENCH_F32, states, x->ref_final, bound}};
    const BenchOutput grads[] = {
        {"dp", &x->dp, LOOP_TYPE, (4 + parts) * n, x->ref_dp, grad},
        {"dh_0", &x->dinitial, BENCH_F32, states, x->ref_dinitial, grad},
        {"dlogits", &x->dlogits, LOOP_TYPE, parts * n, x->ref_dlogits, grad}};
    char name[2][160], words[16];
    option_word(TRANSITIONS, x->transition, words, sizeof words);
    for (int back = 0; back < 2; back++)
        snprintf(name[back], sizeof name[back], "gateloop %s %s %s (%zu,%zu,%zu)%s%s",
                 back ? "backward" : "forward", size == 2 ? "bf16" : "fp32", words, x->B, x->T,
                 x->C, INPUT_NAMES[x->inputs], x->stateful ? ", h_0 given" : "");
    const BenchCase forward = {name[0], x, forward_kernels, 4, outs, 2,
                               (double)n * (5.0 * (double)size + logits), 0, "GB"};
    const BenchCase backward = {name[1], x, backward_kernels, 3, grads,
                                x->split && parts ? 3 : 2,
                                (double)n * ((9.0 + (double)parts) * (double)size + logits), 0,
                                "GB"};
    const int failed = bench_case(&forward, bench);
    run_forward<1>(x, 0); // what the backward pass needs
    if (!refuse_two(x))
        run_forward<2>(x, 0);
    return failed + bench_case(&backward, bench);
}

// loop_small: every kernel on one small shape; returns the failures.
static int loop_small(size_t B, size_t T, size_t C, int transition, LoopInputs inputs,
                      int stateful, const BenchOptions *bench)
{
    BenchOptions check = *bench;
    check.check_only = 1;
    Loop x = loop_setup(B, T, C, transition, inputs, stateful, B);
    const int failed = loop_case(&x, &check);
    loop_free(&x);
    return failed;
}

// loop_checks: every kernel at lengths around strips and tiles, at odd and even C, where tiles are
// whole and where not, all inputs and transitions. Own shape: --B, --T, --C. Returns the failures.
static int loop_checks(const BenchOptions *bench)
{
    static const size_t lengths[] = {1, 2, 31, 32, 33, 64, 65, 127, 129, 255, 258, 1000, 4096};
    static const size_t channels[] = {1, 33, 64, 70}, batches[] = {1, 2};
    const int own = bench->B || bench->T || bench->C;
    int failed = 0, cases = 0;
    for (int inputs = 0; inputs < INPUTS; inputs++)
        for (int i = 0; i < 13 * 4; i++) {
            const int odd = (i + i / 4) % 2;
            const size_t T = bench->T ? bench->T : lengths[i / 4];
            const size_t C = bench->C ? bench->C : channels[i % 4];
            const size_t B = bench->B ? bench->B : batches[odd];
            if ((bench->T && i / 4) || (bench->C && i % 4) || (inputs && !own && i / 4 % 4 != 2))
                continue;
            failed += loop_small(B, T, C, SEP, (LoopInputs)inputs, odd || inputs, bench);
            cases++;
        }
    for (int transition = 0; transition <= ONES && !own; transition++)
        for (int inputs = 0; inputs < INPUTS; inputs++, cases += 2) {
            failed += loop_small(2, 150, 34, transition, (LoopInputs)inputs, 1, bench);
            failed += loop_small(1, 128, 64, transition, (LoopInputs)inputs, 1, bench);
        }
    printf("checks: %d shapes, %d failed\n", cases, failed);
    return failed;
}

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {
        {8, 1024, 512}, {8, 1024, 2048}, {16, 2048, 1024}, {8, 16384, 512}, {8, 12345, 624}};
    const BenchOptions bench =
        bench_options(argc, argv, "gateloop_fused: GateLoop's layer, its own shapes");
    const int own = bench.B && bench.T && bench.C;
    int failed = 0;
    if (!bench.time_only)
        failed += loop_checks(&bench);
    for (int i = 0; i < (own ? 1 : 5) && !bench.check_only; i++) {
        const size_t B = own ? bench.B : shapes[i][0], T = own ? bench.T : shapes[i][1];
        Loop x = loop_setup(B, T, own ? bench.C : shapes[i][2], SEP, NORMAL, 0, 1);
        failed += loop_case(&x, &bench);
        loop_free(&x);
    }
    return failed ? EXIT_FAIL : 0;
}
