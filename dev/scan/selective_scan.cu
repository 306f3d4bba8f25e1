// selective_scan.cu: Mamba's layer between its matrix products, y SiLU(z) with y = sum_s C h + skip
// x, h_t = a_t h_{t-1} + dt B x, dt = softplus(raw + bias), h_0 in and h_T out, forward and
// backward.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o selective_scan dev/scan/selective_scan.cu -lcublas -lcublasLt
//
// An element is a channel of a token. It takes 16 exponentials forward and 32 backward, and 2 and 4
// such operations more in softplus and gate, of which an H200 makes 3.7e12 a second. Bytes (BF16):
// 8 forward and 14 backward, and 4 each for states, written and read.
// ms by shape (B,T,H), 16 states, [-1,1], BF16, L2 flushed, on an NVIDIA H200, 2026-11-30; [0,1] is
// 1% faster forward, 4 to 8% slower backward. -: not measured.
//    forward                                               (8,2048,2048) (32,256,256) (1024,40,256)
//  1 a thread a channel, h in global memory                        -           -             -
//  2 a thread a channel, states in registers                       -           -             -
//  3 four lanes a channel, dt and dt x of a tile made once       0.382       0.040         0.131
//  4 3 in chunks of 64 positions: summary, carry, scan           0.696       0.052         0.131
//  5 3 with every fourth exponential a polynomial (FMA)          0.384       0.039         0.137
//  6 the trainer's choice of 3 and 4                             0.383       0.040         0.131
//    backward
//  1 a thread a channel: h and what dB and dC add up in memory     -           -             -
//  3 four lanes a channel, h of a tile in registers              1.318       0.144         0.594
//  4 3 in chunks                                                 1.797       0.134         0.594
//  6 the trainer's choice                                        1.328       0.144         0.594
// 1.4e12 exponentials a second forward, 0.8e12 backward: it does not wait for them, and 5 gains
// nothing. 4 is for one sequence: (1,16384,1024) has not been measured.
//
// Checked: T 1, 2, 5, 31, 32, 33, 255, 258, 1000, odd H, B 1, S 1, 16, 19, h_0 and the gradient of
// h_T given or not, both ranges; dt up to 1e4, 1e-26 and exactly 0, A of e^60.
#define TESTING
#pragma nv_diag_suppress 177 // most of the trainer is not used here
#include "../../train_mamba.cu"
#include "../bench.cuh"
#include "selective_reference.h"

static const BenchType SCAN_TYPE = sizeof(floatX) == 2 ? BENCH_BF16 : BENCH_F32;
enum { LADDER_THREADS = 128 };

// raw: as at the start of training; every third token such that dt is 60 or 1e4, or 1e-26 or 0.
typedef enum { NORMAL, HUGE_STEPS, TINY_STEPS, INPUTS } ScanInputs;
static const char *const INPUT_NAMES[] = {"", " dt huge", " dt tiny"};

// A shape on the device. Inputs stand between rows of NaN; states: kept by a forward pass; h, each:
// of the naive backward pass.
typedef struct {
    size_t B, T, H, S;
    int range, stateful; // stateful: initial and dfinal given
    ScanInputs inputs;
    BenchBuffer buffers[10];
    const floatX *x, *raw, *xz, *bc, *dout;
    const float *A_log, *dt_b, *skip, *initial, *dfinal; // the last two NULL unless stateful
    BenchBuffer g, final, dx, draw, dz, dbc, dA_log, dskip, ddt_b, dinitial;
    floatX *dxz;
    float *states, *h, *each;
    ScanWork work;
    double *refs[10]; // of the buffers above, in their order
} Ladder;

// ---- the plain kernels

// naive_forward_kernel: a thread a channel. h (N,S,H), NULL: not asked for: before each token.
static __global__ void naive_forward_kernel(floatX *g, float *final, float *h_out, const floatX *x,
                                            const floatX *raw, const floatX *xz, const floatX *bc,
                                            const float *initial, const float *A_log,
                                            const float *dt_b, const float *skip, Scan s, int range)
{
    const size_t i = blockIdx.x * (size_t)LADDER_THREADS + threadIdx.x, b = i / s.H, c = i % s.H;
    const size_t size = (size_t)s.S * s.H;
    float *h = final + b * size + c, slope;
    if (b >= s.B)
        return;
    for (int n = 0; n < s.S; n++)
        h[n * s.H] = initial ? initial[b * size + n * s.H + c] : 0;
    for (int t = 0; t < s.T; t++) {
        const size_t row = b * s.T + t, at = row * s.H + c;
        const float x_t = (float)x[at], dt = softplus((float)raw[at] + dt_b[c], &slope);
        float y = skip[c] * x_t;
        for (int n = 0; n < s.S; n++) {
            const float E = range * exp2_fast(dt * rate_of(A_log[c * s.S + n]));
            float *h_n = h + n * s.H;
            if (h_out)
                h_out[row * size + n * s.H + c] = *h_n;
            *h_n = (E - (range - 1)) * *h_n + dt * x_t * (float)bc[row * s.P + n];
            y += (float)bc[row * s.P + s.S + n] * *h_n;
        }
        g[at] = (floatX)(y * silu((float)xz[row * 2 * s.H + s.H + c], &slope));
    }
}

// naive_backward_kernel: a thread a channel; each (N,2S,H) = what it adds to dB and dC; G: in
// dinitial (B,S,H); drates as scan_backward_kernel has it, a row a sequence.
static __global__ void naive_backward_kernel(floatX *dx, floatX *draw, floatX *dxz, float *drates,
                                             float *dinitial, float *each, const floatX *dout,
                                             const float *dfinal, const float *h, const floatX *x,
                                             const floatX *raw, const floatX *xz, const floatX *bc,
                                             const float *A_log, const float *dt_b,
                                             const float *skip, Scan s, int range)
{
    const size_t i = blockIdx.x * (size_t)LADDER_THREADS + threadIdx.x, b = i / s.H, c = i % s.H;
    const size_t size = (size_t)s.S * s.H;
    float *G = dinitial + b * size + c, *dA = drates + b * (size + 2 * s.H), slope, slope_z;
    float dskip = 0, dbias = 0;
    if (b >= s.B)
        return;
    for (int n = 0; n < s.S; n++) {
        G[n * s.H] = dfinal ? dfinal[b * size + n * s.H + c] : 0;
        dA[c * s.S + n] = 0;
    }
    for (int t = s.T - 1; t >= 0; t--) {
        const size_t row = b * s.T + t, at = row * s.H + c, of_z = row * 2 * s.H + s.H + c;
        const float x_t = (float)x[at], dt = softplus((float)raw[at] + dt_b[c], &slope);
        const float d = (float)dout[at], dy = d * silu((float)xz[of_z], &slope_z);
        float y = skip[c] * x_t, sum = 0, ddt = 0;
        for (int n = 0; n < s.S; n++) {
            const float rate = rate_of(A_log[c * s.S + n]), A = LN2 * rate;
            const float E = range * exp2_fast(dt * rate);
            const float B = (float)bc[row * s.P + n], C = (float)bc[row * s.P + s.S + n];
            const float before = h[row * size + n * s.H + c], a = E - (range - 1);
            const float next = a * before + dt * x_t * B, g = G[n * s.H] + C * dy;
            const float w = E * before * g;
            y += C * next;
            each[(row * 2 * s.S + n) * s.H + c] = g * dt * x_t;
            each[(row * 2 * s.S + s.S + n) * s.H + c] = dy * next;
            sum += B * g;
            ddt += A * w;
            dA[c * s.S + n] += dt * w;
            G[n * s.H] = a * g;
        }
        const float d_raw = (ddt + x_t * sum) * slope;
        dx[at] = (floatX)(dt * sum + skip[c] * dy);
        draw[at] = (floatX)d_raw;
        dxz[of_z] = (floatX)(d * y * slope_z);
        dskip += dy * x_t;
        dbias += d_raw;
    }
    dA[size + c] = dskip;
    dA[size + s.H + c] = dbias;
}

// each_sum_kernel: dbc (n) = sums over H of each (n,H); a warp a row.
static __global__ void each_sum_kernel(floatX *dbc, const float *each, size_t n, int H)
{
    const size_t row = row_of_warp();
    float sum = 0;
    if (row >= n)
        return;
    for (int c = threadIdx.x % WARP; c < H; c += WARP)
        sum += each[row * H + c];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        dbc[row] = (floatX)sum;
}

// channel_forward_kernel: a thread a channel with its 16 states, LADDER_THREADS channels a block.
template <int RANGE>
static __global__ void __launch_bounds__(LADDER_THREADS)
channel_forward_kernel(floatX *g, float *final, const floatX *__restrict__ x,
                       const floatX *__restrict__ raw, const floatX *__restrict__ xz,
                       const floatX *__restrict__ bc, const float *initial, const float *A_log,
                       const float *dt_b, const float *skip, Scan s)
{
    __shared__ float4 shared[TILE][2 * LANES];
    const int groups = (s.H + LADDER_THREADS - 1) / LADDER_THREADS;
    const int c = (int)(blockIdx.x % groups) * LADDER_THREADS + threadIdx.x;
    const size_t b = blockIdx.x / groups;
    const bool inside = c < s.H;
    float A[STATES], h[STATES], slope;
#pragma unroll
    for (int n = 0; n < STATES; n++) {
        const bool exists = inside && n < s.S;
        A[n] = exists ? rate_of(A_log[(size_t)c * s.S + n]) : 0;
        h[n] = exists && initial ? initial[(b * s.S + n) * s.H + c] : 0;
    }
    for (int t0 = 0; t0 < s.T; t0 += TILE) {
        floatX xs[TILE], raws[TILE], zs[TILE];
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * 2 * STATES; i += LADDER_THREADS) {
            const int t = t0 + i / (2 * STATES), n = i % STATES, of_C = i / STATES % 2;
            const bool exists = t < s.T && n < s.S;
            ((float *)shared)[i] =
                exists ? (float)bc[(b * s.T + t) * s.P + of_C * s.S + n] : 0;
        }
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            const size_t row = b * s.T + min(t0 + i, s.T - 1);
            xs[i] = raws[i] = zs[i] = (floatX)0.0f;
            if (!inside)
                continue;
            xs[i] = x[row * s.H + c];
            raws[i] = raw[row * s.H + c];
            zs[i] = xz[row * 2 * s.H + s.H + c];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            if (t0 + i >= s.T)
                break;
            const float x_t = (float)xs[i], bias = inside ? dt_b[c] : 0;
            const float dt = softplus((float)raws[i] + bias, &slope), in = dt * x_t;
            float y = inside ? skip[c] * x_t : 0;
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                const float4 B = shared[i][k], C = shared[i][LANES + k];
                const float B_s[] = {B.x, B.y, B.z, B.w}, C_s[] = {C.x, C.y, C.z, C.w};
#pragma unroll
                for (int n = 0; n < OWN; n++) {
                    float *h_n = h + k * OWN + n;
                    *h_n = step<RANGE>(*h_n, grown<RANGE>(dt, A[k * OWN + n]), in, B_s[n]);
                    y = fmaf(C_s[n], *h_n, y);
                }
            }
            if (inside)
                g[(b * s.T + t0 + i) * s.H + c] = (floatX)(y * silu((float)zs[i], &slope));
        }
    }
#pragma unroll
    for (int n = 0; n < STATES; n++)
        if (inside && n < s.S)
            final[(b * s.S + n) * s.H + c] = h[n];
}

// exp2_fma: 2^x for x <= 0 without the special-function unit: 2^k p(f), k the nearest whole number:
// relative error 3e-7; below 2^-126 it is 2^-126.
static __device__ inline float exp2_fma(float x)
{
    const float rounder = 3 << 22;
    const float shifted = fmaxf(x, -126) + rounder, f = fmaxf(x, -126) - (shifted - rounder);
    float p = 0.00134004322f;
    p = fmaf(p, f, 0.0096760371f);
    p = fmaf(p, f, 0.0555032721f);
    p = fmaf(p, f, 0.240221074f);
    p = fmaf(p, f, 0.693147207f);
    p = fmaf(p, f, 1.00000008f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

// shared_forward_kernel: scan_forward_kernel of one chunk, a channel's fourth state of each lane by
// exp2_fma.
template <int RANGE>
static __global__ void __launch_bounds__(SCAN_THREADS, 3)
shared_forward_kernel(floatX *g, float *final, const floatX *__restrict__ x,
                      const floatX *__restrict__ raw, const floatX *__restrict__ xz,
                      const floatX *__restrict__ bc, const float *initial, const float *A_log,
                      const float *dt_b, const float *skip, Scan s)
{
    __shared__ Tile tile;
    __shared__ float ys[TILE][PITCH];
    const Place p = place_of(s);
    const float bias = p.column < s.H ? dt_b[p.column] : 0;
    const float through = p.column < s.H ? skip[p.column] : 0;
    float A[OWN], h[OWN], slope;
    Loaded next, v;
    rates_load(A, A_log, p, s);
    edge_load(h, NULL, initial, p, s);
    tile_load(&next, x, raw, xz, bc, 0, p, s);
    for (int t = 0; t < s.T; t += TILE) {
        v = next;
        tile_fill(&tile, &v, bias, t, p, s);
        __syncthreads();
        if (t + TILE < s.T)
            tile_load(&next, x, raw, xz, bc, t + TILE, p, s);
#pragma unroll 2
        for (int i = 0; i < TILE; i += 4) {
            float y[4] = {};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 in = tile.in[i + k][p.own];
                const float4 B = tile.bc[i + k][p.lane], C = tile.bc[i + k][LANES + p.lane];
                const float B_s[] = {B.x, B.y, B.z, B.w}, C_s[] = {C.x, C.y, C.z, C.w};
#pragma unroll
                for (int n = 0; n < OWN; n++) {
                    const float E = n < OWN - 1 ? grown<RANGE>(in.x, A[n])
                                                : RANGE * exp2_fma(in.x * A[n]);
                    h[n] = step<RANGE>(h[n], E, in.y, B_s[n]);
                    y[k] = fmaf(C_s[n], h[n], y[k]);
                }
            }
            ys[i + p.lane][p.own] = lanes_sums(y, p.lane);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = p.row + j * BESIDE;
            const float y = ys[i][threadIdx.x % CHANNELS] + through * (float)v.x[j];
            if (t + i < s.T && p.column < s.H)
                g[(p.first + t + i) * s.H + p.column] =
                    (floatX)(y * silu((float)v.z[j], &slope));
        }
    }
#pragma unroll
    for (int k = 0; k < OWN; k++)
        if (edge_at(k, p, s) >= 0)
            final[edge_at(k, p, s)] = h[k];
}

// ---- rows of the tables

// ladder_scan: the shape as kernels take it, in one chunk or in chunks of CHUNK_LEAST.
static Scan ladder_scan(const Ladder *x, int cut)
{
    Scan s = scan_of(x->B, x->T, x->H, x->S, 0, 2 * x->S);
    s.chunk = cut ? (int)CHUNK_LEAST : (int)((x->T + TILE - 1) / TILE * TILE);
    s.chunks = (int)((x->T + s.chunk - 1) / s.chunk);
    return s;
}

static void run_forward_naive(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    LAUNCH(naive_forward_kernel, (x->B * x->H + LADDER_THREADS - 1) / LADDER_THREADS,
           LADDER_THREADS, 0, stream, (floatX *)x->g.data, (float *)x->final.data, x->h, x->x,
           x->raw, x->xz, x->bc, x->initial, x->A_log, x->dt_b, x->skip, ladder_scan(x, 0),
           x->range);
}

static void run_forward_channel(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    WITH_FLAG(TWO, x->range == 2,
              LAUNCH(channel_forward_kernel<1 + TWO>,
                     x->B * ((x->H + LADDER_THREADS - 1) / LADDER_THREADS), LADDER_THREADS, 0,
                     stream, (floatX *)x->g.data, (float *)x->final.data, x->x, x->raw, x->xz,
                     x->bc, x->initial, x->A_log, x->dt_b, x->skip, ladder_scan(x, 0)));
}

// run_forward: the trainer's kernels in one chunk or CUT.
template <int CUT> static void run_forward(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    scan_forward_passes((floatX *)x->g.data, x->states, (float *)x->final.data, x->work.sums,
                        x->work.carry, x->x, x->raw, x->xz, x->bc, x->initial, x->A_log, x->dt_b,
                        x->skip, ladder_scan(x, CUT), x->range, stream);
}

static void run_forward_shared(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    const Scan s = ladder_scan(x, 0);
    WITH_FLAG(TWO, x->range == 2,
              LAUNCH(shared_forward_kernel<1 + TWO>, x->B * s.groups, SCAN_THREADS, 0, stream,
                     (floatX *)x->g.data, (float *)x->final.data, x->x, x->raw, x->xz, x->bc,
                     x->initial, x->A_log, x->dt_b, x->skip, s));
}

static void run_forward_chosen(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    scan_forward((floatX *)x->g.data, x->states, (float *)x->final.data, x->work.sums,
                 x->work.carry, x->x, x->raw, x->xz, x->bc, x->initial, x->A_log, x->dt_b, x->skip,
                 x->B, x->T, x->H, x->S, 0, 2 * x->S, x->range, stream);
}

// ladder_zero: clear the gradients that are added to.
static void ladder_zero(const Ladder *x, cudaStream_t stream)
{
    CUDA_CHECK(cudaMemsetAsync(x->dA_log.data, 0, x->H * x->S * 4, stream));
    CUDA_CHECK(cudaMemsetAsync(x->dskip.data, 0, x->H * 4, stream));
    CUDA_CHECK(cudaMemsetAsync(x->ddt_b.data, 0, x->H * 4, stream));
}

// ladder_split: copy the gradient of z out of dxz.
static void ladder_split(const Ladder *x, cudaStream_t stream)
{
    const size_t width = x->H * sizeof(floatX);
    CUDA_CHECK(cudaMemcpy2DAsync(x->dz.data, width, x->dxz + x->H, 2 * width, width, x->B * x->T,
                                 cudaMemcpyDeviceToDevice, stream));
}

static void run_backward_naive(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    const Scan s = ladder_scan(x, 0);
    const size_t n = x->B * x->T * 2 * x->S, numbers = x->H * x->S + 2 * x->H;
    ladder_zero(x, stream);
    LAUNCH(naive_backward_kernel, (x->B * x->H + LADDER_THREADS - 1) / LADDER_THREADS,
           LADDER_THREADS, 0, stream, (floatX *)x->dx.data, (floatX *)x->draw.data, x->dxz,
           x->work.drates, (float *)x->dinitial.data, x->each, x->dout, x->dfinal, x->h, x->x,
           x->raw, x->xz, x->bc, x->A_log, x->dt_b, x->skip, s, x->range);
    LAUNCH(each_sum_kernel, (n + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0, stream,
           (floatX *)x->dbc.data, x->each, n, (int)x->H);
    LAUNCH(scan_rates_kernel, (numbers + SCAN_THREADS - 1) / SCAN_THREADS, SCAN_THREADS, 0, stream,
           (float *)x->dA_log.data, (float *)x->dskip.data, (float *)x->ddt_b.data, x->work.drates,
           x->A_log, x->B, s);
    ladder_split(x, stream);
}

// ladder_backward: the trainer's kernels with the chunks of s.
static void ladder_backward(const Ladder *x, Scan s, cudaStream_t stream)
{
    ladder_zero(x, stream);
    scan_backward_passes((floatX *)x->dx.data, (floatX *)x->draw.data, x->dxz,
                         (floatX *)x->dbc.data, (float *)x->dinitial.data, (float *)x->dA_log.data,
                         (float *)x->ddt_b.data, (float *)x->dskip.data, x->work, x->dout,
                         x->dfinal, x->states, x->x, x->raw, x->xz, x->bc, x->A_log, x->dt_b,
                         x->skip, s, x->range, stream);
    ladder_split(x, stream);
}

// run_backward: see run_forward.
template <int CUT> static void run_backward(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    ladder_backward(x, ladder_scan(x, CUT), stream);
}

static void run_backward_chosen(const void *problem, cudaStream_t stream)
{
    const Ladder *x = (const Ladder *)problem;
    ladder_backward(x, scan_of(x->B, x->T, x->H, x->S, 0, 2 * x->S), stream);
}

// refuse_states, refuse_naive: why a kernel does not take a shape, or NULL.
static const char *refuse_states(const void *problem)
{
    return ((const Ladder *)problem)->S > STATES ? "more than 16 states" : NULL;
}
static const char *refuse_naive(const void *problem)
{
    return ((const Ladder *)problem)->h ? NULL : "what it would store does not fit";
}

static const BenchKernel forward_kernels[] = {
    {1, "a thread a channel", run_forward_naive, NULL},
    {2, "a thread a channel, states in registers", run_forward_channel, refuse_states},
    {3, "four lanes a channel", run_forward<0>, NULL},
    {4, "in chunks", run_forward<1>, NULL},
    {5, "exponentials on both units", run_forward_shared, refuse_states},
    {6, "the trainer's choice", run_forward_chosen, NULL},
};
static const BenchKernel backward_kernels[] = {
    {1, "a thread a channel, h stored", run_backward_naive, refuse_naive},
    {3, "four lanes a channel", run_backward<0>, NULL},
    {4, "in chunks", run_backward<1>, NULL},
    {6, "the trainer's choice", run_backward_chosen, NULL},
};

// ---- inputs and references

// ladder_normal: normal-ish number i of a stream, deviation 1.
static float ladder_normal(uint64_t seed, uint64_t i)
{
    float sum = 0;
    for (int k = 0; k < 4; k++)
        sum += bench_uniform(seed, 4 * i + k) - 0.5f;
    return 1.7320508f * sum;
}

// ladder_raw: number i of a sequence's raw, which the bias of dt comes to, between -7 and -2.
static float ladder_raw(uint64_t i, const Ladder *x)
{
    const float z = ladder_normal(2, i);
    if (x->inputs == NORMAL || i % 3)
        return z;
    return x->inputs == HUGE_STEPS ? (i % 2 ? 1e4f : 60) : i % 2 ? -200 : -56;
}

// ladder_upload: h_x (n), which is freed later, on the device between NaN on either side; the place
// of its first element.
static void *ladder_upload(BenchBuffer *b, BenchType type, float *h_x, size_t n)
{
    const size_t pad = 16384;
    *b = bench_alloc(n + 2 * pad, type, 0);
    BenchBuffer inside = *b;
    inside.data = (char *)b->data + pad * bench_elem(type);
    bench_upload(&inside, type, h_x, n);
    return inside.data;
}

// ladder_scratch: n floats of device memory that start as NaN.
static float *ladder_scratch(size_t n)
{
    float *p;
    CUDA_CHECK(cudaMalloc(&p, (n + 1) * sizeof(float)));
    CUDA_CHECK(cudaMemset(p, 0xFF, n * sizeof(float)));
    return p;
}

// ladder_fill: h_x (n) = the numbers of stream `seed`, repeating after `period` of them.
static float *ladder_fill(uint64_t seed, size_t n, size_t period)
{
    float *h_x = (float *)alloc_zero(n + 1, 4, "input");
#pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        h_x[i] = ladder_normal(seed, i % period);
    return h_x;
}

// ladder_references: of all outputs, from the host's inputs as they are on the device; all
// sequences are computed or, with `same`, the first, which the others are.
static void ladder_references(Ladder *x, float *const h[10], int same)
{
    const size_t B = x->B, T = x->T, H = x->H, S = x->S, row = T * H, state = S * H;
    const size_t sizes[] = {row, state, row, row, row, T * 2 * S, state, state, H, H};
    double **r = x->refs;
    for (int k = 0; k < 10; k++) // of dA_log, dskip and ddt_b one for all sequences
        r[k] = (double *)alloc_zero((k < 7 ? B : 1) * sizes[k], 8, "references");
    for (size_t b = 0; b < (same ? 1 : B); b++) {
        const SelectiveSequence q = {
            T, H, S, x->range, h[0] + b * row, h[1] + b * row, h[2] + b * 2 * row,
            h[3] + b * T * 2 * S, h[4] + b * row, h[5], h[6], h[7],
            x->stateful ? h[8] + b * state : NULL, x->stateful ? h[9] + b * state : NULL,
            r[0] + b * row, r[1] + b * state, r[2] + b * row, r[3] + b * row, r[4] + b * row,
            r[5] + b * T * 2 * S, r[6] + b * state, r[7], r[8], r[9]};
        selective_sequence(&q);
    }
    for (int k = 0; k < 7 && same; k++)
        for (size_t b = 1; b < B; b++)
            memcpy(r[k] + b * sizes[k], r[k], sizes[k] * 8);
    for (int k = 7; k < 10 && same; k++)
        for (size_t i = 0; i < sizes[k]; i++)
            r[k][i] *= (double)B;
}

// ladder_setup: inputs, references and buffers of a shape; `same`: all sequences alike.
static Ladder ladder_setup(size_t B, size_t T, size_t H, size_t S, int range, ScanInputs inputs,
                           int stateful, int same)
{
    Ladder x = {B, T, H, S, range, stateful, inputs};
    const size_t n = B * T * H, sequence = same ? T * H : n, state = B * S * H;
    const size_t rows = B * (T / CHUNK_LEAST + 1), groups = (H + CHANNELS - 1) / CHANNELS;
    float *h[10] = {ladder_fill(1, n, sequence), ladder_fill(2, n, sequence),
                    ladder_fill(3, 2 * n, 2 * sequence),
                    ladder_fill(4, B * T * 2 * S, (same ? T : B * T) * 2 * S),
                    ladder_fill(5, n, sequence), ladder_fill(6, H * S, H * S),
                    ladder_fill(7, H, H), ladder_fill(8, H, H),
                    ladder_fill(9, state, same ? S * H : state),
                    ladder_fill(10, state, same ? S * H : state)};
    for (size_t i = 0; i < n; i++)
        h[1][i] = ladder_raw(i % sequence, &x);
    for (size_t i = 0; i < H * S; i++) // one of a step's rates is too large for a float
        h[5][i] = inputs != NORMAL && i % 7 == 3 ? 60 : logf((float)(i % S + 1)) + 0.1f * h[5][i];
    for (size_t i = 0; i < H; i++)
        h[6][i] = -4.5f + 0.9f * h[6][i];
    const size_t sizes[] = {n, n, 2 * n, B * T * 2 * S, n, H * S, H, H, state, state};
    void *on_device[10];
    for (int k = 0; k < 10; k++)
        on_device[k] = ladder_upload(&x.buffers[k], k < 5 ? SCAN_TYPE : BENCH_F32, h[k], sizes[k]);
    x.x = (floatX *)on_device[0], x.raw = (floatX *)on_device[1], x.xz = (floatX *)on_device[2];
    x.bc = (floatX *)on_device[3], x.dout = (floatX *)on_device[4];
    x.A_log = (float *)on_device[5], x.dt_b = (float *)on_device[6], x.skip = (float *)on_device[7];
    x.initial = stateful ? (float *)on_device[8] : NULL;
    x.dfinal = stateful ? (float *)on_device[9] : NULL;
    ladder_references(&x, h, same);
    for (float *p : h)
        free(p);
    x.g = bench_alloc(n, SCAN_TYPE, 0), x.final = bench_alloc(state, BENCH_F32, 0);
    x.dx = bench_alloc(n, SCAN_TYPE, 0), x.draw = bench_alloc(n, SCAN_TYPE, 0);
    x.dz = bench_alloc(n, SCAN_TYPE, 0), x.dbc = bench_alloc(B * T * 2 * S, SCAN_TYPE, 0);
    x.dinitial = bench_alloc(state, BENCH_F32, 0), x.dA_log = bench_alloc(H * S, BENCH_F32, 0);
    x.dskip = bench_alloc(H, BENCH_F32, 0), x.ddt_b = bench_alloc(H, BENCH_F32, 0);
    x.dxz = (floatX *)ladder_scratch(2 * n);
    x.states = ladder_scratch(scan_states(B, B * T, H, S));
    x.work.dbc = ladder_scratch(groups * B * T * 2 * STATES);
    x.work.drates = ladder_scratch(rows * H * (S + 2));
    x.work.carry = ladder_scratch(rows * 2 * H * STATES);
    x.work.sums = ladder_scratch(S > STATES ? 3 * n : 0);
    if (12 * n * S < 16e9) {
        x.h = ladder_scratch(n * S);
        x.each = ladder_scratch(2 * n * S);
    }
    return x;
}

// ladder_free: give back what ladder_setup took.
static void ladder_free(Ladder *x)
{
    BenchBuffer *outs[] = {&x->g, &x->final, &x->dx, &x->draw, &x->dz, &x->dbc, &x->dA_log,
                           &x->dskip, &x->ddt_b, &x->dinitial};
    void *scratch[] = {x->dxz, x->states, x->work.dbc, x->work.drates, x->work.carry,
                       x->work.sums, x->h, x->each};
    for (int k = 0; k < 10; k++) {
        bench_free(&x->buffers[k]);
        bench_free(outs[k]);
        free(x->refs[k]);
    }
    for (void *p : scratch)
        CUDA_CHECK(cudaFree(p));
}

// ---- cases

// ladder_case: both tables' kernels on one shape; returns the failures.
static int ladder_case(Ladder *x, const BenchOptions *bench)
{
    const size_t n = x->B * x->T * x->H, state = x->B * x->S * x->H, size = sizeof(floatX);
    const size_t tokens = x->B * x->T * 2 * x->S, kept = n / TILE * x->S * sizeof(float);
    const double bound = size == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    const double grad = size == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
    const BenchOutput outs[] = {{"g", &x->g, SCAN_TYPE, n, x->refs[0], bound},
                                {"h_T", &x->final, BENCH_F32, state, x->refs[1], bound}};
    const BenchOutput grads[] = {
        {"dx", &x->dx, SCAN_TYPE, n, x->refs[2], grad},
        {"draw", &x->draw, SCAN_TYPE, n, x->refs[3], grad},
        {"dz", &x->dz, SCAN_TYPE, n, x->refs[4], grad},
        {"dB, dC", &x->dbc, SCAN_TYPE, tokens, x->refs[5], grad},
        {"dh_0", &x->dinitial, BENCH_F32, state, x->refs[6], grad},
        {"dA_log", &x->dA_log, BENCH_F32, x->H * x->S, x->refs[7], grad},
        {"dskip", &x->dskip, BENCH_F32, x->H, x->refs[8], grad},
        {"ddt_b", &x->ddt_b, BENCH_F32, x->H, x->refs[9], grad}};
    char name[2][160];
    for (int back = 0; back < 2; back++)
        snprintf(name[back], sizeof name[back], "selective scan %s %s %s S=%zu (%zu,%zu,%zu)%s%s",
                 back ? "backward" : "forward", size == 2 ? "bf16" : "fp32",
                 x->range == 2 ? "signed" : "nonneg", x->S, x->B, x->T, x->H,
                 INPUT_NAMES[x->inputs], x->stateful ? ", h_0 given" : "");
    const BenchCase forward = {name[0], x, forward_kernels, 6, outs, 2,
                               (double)((4 * n + tokens) * size + kept), 1e-9 * (double)(n * x->S),
                               "Gexp"};
    const BenchCase backward = {name[1], x, backward_kernels, 4, grads, 8,
                                (double)((7 * n + 2 * tokens) * size + kept),
                                2e-9 * (double)(n * x->S), "Gexp"};
    const int failed = bench_case(&forward, bench);
    run_forward_chosen(x, 0); // what the backward pass needs
    if (x->h)
        run_forward_naive(x, 0);
    return failed + bench_case(&backward, bench);
}

// ladder_small: every kernel on one small shape; returns the failures.
static int ladder_small(size_t B, size_t T, size_t H, size_t S, int range, ScanInputs inputs,
                        int stateful, const BenchOptions *bench)
{
    BenchOptions check = *bench;
    check.check_only = 1;
    Ladder x = ladder_setup(B, T, H, S, range, inputs, stateful, 0);
    const int failed = ladder_case(&x, &check);
    ladder_free(&x);
    return failed;
}

// ladder_checks: every kernel at lengths around tiles and chunks, blocks of channels that are full
// and not, states that are 16 and not, all inputs and both ranges. Own shape: --B, --T, --C.
// Returns the failures.
static int ladder_checks(const BenchOptions *bench)
{
    static const size_t lengths[] = {1, 2, 5, 31, 32, 33, 255, 258, 1000};
    static const size_t channels[] = {1, 33, 66}, batches[] = {1, 2}, sizes[] = {16, 1, 19, 16};
    const int own = bench->B || bench->T || bench->C;
    int failed = 0, cases = 0;
    for (int i = 0; i < 9 * 3; i++) {
        const size_t T = bench->T ? bench->T : lengths[i / 3];
        const size_t H = bench->C ? bench->C : channels[i % 3];
        const size_t B = bench->B ? bench->B : batches[i % 2];
        if ((bench->T && i / 3) || (bench->C && i % 3))
            continue;
        failed += ladder_small(B, T, H, sizes[i % 4], 1 + i / 2 % 2, NORMAL, i % 2, bench);
        cases++;
    }
    for (int inputs = 1; inputs < INPUTS && !own; inputs++)
        for (int range = 1; range <= 2; range++, cases += 2) {
            failed += ladder_small(2, 33, 20, 16, range, (ScanInputs)inputs, 1, bench);
            failed += ladder_small(1, 150, 9, 16, range, (ScanInputs)inputs, 0, bench);
        }
    printf("checks: %d shapes, %d failed\n", cases, failed);
    return failed;
}

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {
        {8, 2048, 2048}, {32, 256, 256}, {1024, 40, 256}, {1, 16384, 1024}};
    const BenchOptions bench =
        bench_options(argc, argv, "selective_scan: Mamba's layer, its own shapes; C: channels H");
    const int own = bench.B && bench.T && bench.C;
    int failed = 0;
    if (!bench.time_only)
        failed += ladder_checks(&bench);
    for (int i = 0; i < (own ? 1 : 4) && !bench.check_only; i++)
        for (int range = 2; range >= (i ? 2 : 1); range--) { // what the ranges differ by: once
            const size_t B = own ? bench.B : shapes[i][0], T = own ? bench.T : shapes[i][1];
            const size_t H = own ? bench.C : shapes[i][2];
            Ladder x = ladder_setup(B, T, H, STATES, range, NORMAL, 0, 1);
            failed += ladder_case(&x, &bench);
            ladder_free(&x);
        }
    return failed ? EXIT_FAIL : 0;
}
