// train_mamba.cu: Mamba on the GPU, the same model as train_mamba.c, which says what is computed
// and is what this is held against (dev/test_cuda.sh).
//
//   h_t[s] = a_t[s] h_{t-1}[s] + dt_t B_t[s] x_t,   y_t = sum_s C_t[s] h_t[s] + skip x_t
//   a_t[s] = E or 2 E - 1,  E = exp(dt_t A[s]),  A = -exp(A_log)   [arXiv 2312.00752, 2411.12537]
//   u += W_out (y_t SiLU(z_t)),  dt = softplus(raw + bias)
//
// The scan is one kernel forward and one back, from what matrix products leave to what they read:
// softplus, its bias, skip, the gate and their gradients are inside. It reads x, raw, z and writes
// the gated output, 8 bytes an element (BF16); back 14. Each adds 4 bytes for states. Memory is not
// what limits it: an element takes 16 exponentials forward and 32 back.
//
//   threads  a channel has four lanes, each with four of 16 states in registers; a block 64
//            channels, a tile of 16 positions at a time. dt and dt x of a tile are made once, by
//            all threads, and stand in shared memory with B and C, which all channels share.
//   chunks   a block takes all T positions where sequences and channels are many. Else time is cut
//            into chunks, a block each: a first kernel finds what each makes of a state 0 and the
//            product of its transitions, a second strings these together, and the scan then starts
//            everywhere at once. The gradient the same, from the end.
//   backward the state before each tile was kept, and those in it are made again, in registers.
//            Nothing is divided by a.
//   sums     over channels (dB, dC): a warp's by exchange of lanes, a block's in shared memory, and
//            those of blocks added in their order. Over positions and sequences (dA, dskip, the
//            bias of dt): in registers along a chunk, then chunks in their order.
//
// No float is added atomically, and the shape alone cuts the sums: same bits every time. --state
// above 16 goes through the kernels once for every 16, what they add up in fp32.
//
// nvcc -DPRECISION_BF16 (train_mamba_gpu): weights and activations in bf16, through the typedef
// floatX; fp32: master weights, the residual stream, A, skip and biases, dt, the scan with its
// states, and all sums. raw is stored without its bias, which is what is large in it. Without it
// (train_mamba_gpu_fp32) all is fp32, no TF32.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. Only --accumulate N waits between its batches.
//
// Letters: those of train_mamba.c; P numbers of a token in `rank` and `bc`, which stand in one row:
// R of rank, S of B, S of C.
// Sections: [mix] the scan; [block] convolution, SiLU, norm; [layers] matrix product, embedding,
// cross-entropy; [model]; [train]; [main]. [optimizer] AdamW and the sums over rows are in util/.
//
//   ./train_mamba_gpu --preset parity, modular, brackets, s5-swaps, z60; see train_mamba.c
// Differences from the papers: those of train_mamba.c.

#include "data/tasks.h"
#include "util/asked.cuh"
#include "util/optimizer.cuh" // and with it warp, cuda_training, cuda, gemm, training, ...
#include "util/sums.cuh"
#pragma nv_diag_suppress 177 // [layers] has more than this model needs

// ------------------------------------------------------------------------------------------------
// [mix] The selective scan: S numbers of state for each channel.

#define ARCHITECTURE "mamba"
#define EIGENVALUES "nonneg|signed"
enum { NONNEG, SIGNED, TILE = 16 }; // range is 1, 2; positions between saved states

// A channel has LANES neighbouring lanes with OWN states each, a block CHANNELS channels and, of a
// tile, each thread EACH elements of one channel, BESIDE positions apart. PITCH: a row of shared
// memory whose next begins 8 banks on, so that the lanes of 8 channels at 4 positions do not meet.
enum { STATES = 16, OWN = 4, LANES = STATES / OWN, CHANNELS = 64, SCAN_THREADS = CHANNELS * LANES };
enum { BESIDE = SCAN_THREADS / CHANNELS, EACH = TILE / BESIDE, PITCH = CHANNELS + 8 };

// Time is cut into chunks of CHUNK_LEAST positions or more, so that a GPU has FILL threads, where
// it would have a quarter of them, or half in sequences of LONG positions, whose chunks have work
// for a while: to cut takes half as many instructions again.
enum { CHUNK_LEAST = 64, LONG = 1024, FILL = 1 << 16 };

// What the kernels are told. s0: the first of the 16 states that they take; P: from a token's B and
// C, which start at R, to the next's; chunk: positions of a block, `chunks` of them a sequence;
// groups: blocks of channels; first, last: of the passes over the states.
typedef struct {
    int T, H, S, R, P, s0, chunk, chunks, groups, first, last;
    size_t B;
} Scan;

// Where a thread is: sequence b and its first row; the chunk, its positions from t0 to t1; the
// channel and the lane of it that scans; the column of the elements it loads, from row `row`.
typedef struct {
    size_t b, first, chunk;
    int t0, t1, group, c, own, lane, column, row;
} Place;

// place_of: of this thread.
static __device__ inline Place place_of(Scan s)
{
    const int group = (int)(blockIdx.x % (unsigned)s.groups), thread = threadIdx.x;
    const size_t chunk = blockIdx.x / (unsigned)s.groups, b = chunk / s.chunks;
    const int t0 = (int)(chunk % s.chunks) * s.chunk, own = thread / LANES;
    return {b, b * s.T, chunk, t0, min(t0 + s.chunk, s.T), group, group * CHANNELS + own, own,
            thread % LANES, group * CHANNELS + thread % CHANNELS, thread / CHANNELS};
}

// What a block's scan reads of a tile: dt and dt x by channel; B, then C, by state.
typedef struct {
    float2 in[TILE][CHANNELS];
    float4 bc[TILE][2 * LANES];
} Tile;

// Elements of a tile on their way to a thread.
typedef struct {
    floatX x[EACH], raw[EACH], z[EACH], bc[2];
} Loaded;

// softplus: log(1 + exp(x)) = max(x, 0) + 2 artanh(e / (2 + e)), e = exp(-|x|), artanh as a series:
// relative error < 1e-6, which the logarithm of 1 + e would not have. *slope = its derivative.
static __device__ inline float softplus(float x, float *slope)
{
    const float e = exp2_fast(-LOG2E * fabsf(x)), over = __fdividef(1, 1 + e);
    const float z = __fdividef(e, 2 + e), q = z * z;
    const float coefficient[] = {1 / 15.0f, 1 / 13.0f, 1 / 11.0f, 1 / 9.0f, 1 / 7.0f, 1 / 5.0f,
                                 1 / 3.0f, 1};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum = fmaf(sum, q, coefficient[i]);
    *slope = x > 0 ? over : e * over;
    return fmaxf(x, 0) + 2 * z * sum;
}

// silu: x sigmoid(x); *slope = its derivative.
static __device__ inline float silu(float x, float *slope)
{
    const float p = __fdividef(1, 1 + exp2_fast(-LOG2E * x)), y = x * p;
    *slope = fmaf(y, 1 - p, p);
    return y;
}

// rate_of: A = -exp(A_log) in units of ln 2, so that 2^(dt A) is E; A_log above 44 counts as 44.
static __device__ inline float rate_of(float A_log)
{
    return -LOG2E * expf(A_log > 44 ? 44 : A_log);
}

// rates_load: A of the thread's states; 0 where there is none: such a state stays 0.
static __device__ inline void rates_load(float (&A)[OWN], const float *A_log, Place p, Scan s)
{
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int n = s.s0 + p.lane * OWN + k;
        A[k] = p.c < s.H && n < s.S ? rate_of(A_log[(size_t)p.c * s.S + n]) : 0;
    }
}

// grown: range exp(dt A), whose rest after range - 1 is a; at dt 0 exactly range.
template <int RANGE> static __device__ inline float grown(float dt, float A)
{
    return exp2_fast(RANGE == 2 ? fmaf(dt, A, 1) : dt * A);
}

// step: a h + in, E = range exp(dt A); in is x_in B.
template <int RANGE> static __device__ inline float step(float h, float E, float x_in, float B)
{
    return fmaf(E, h, RANGE == 2 ? fmaf(x_in, B, -h) : x_in * B);
}

// rows_left: of the thread's elements of the tile at t number j is a token's if j BESIDE is less.
static __device__ inline int rows_left(int t, Place p, Scan s)
{
    return p.column < s.H ? s.T - t - p.row : 0;
}

// tile_load: start loading what the thread has of the tile at t; 0 where there is nothing.
static __device__ inline void tile_load(Loaded *v, const floatX *__restrict__ x,
                                        const floatX *__restrict__ raw,
                                        const floatX *__restrict__ xz,
                                        const floatX *__restrict__ bc, int t, Place p, Scan s)
{
    const size_t row = p.first + t + p.row, at = row * s.H + p.column;
    const int left = rows_left(t, p, s), beside = BESIDE * s.H, i = threadIdx.x;
    const int n = s.s0 + i % STATES, bc_row = t + i / (2 * STATES);
    const floatX zero = (floatX)0.0f;
    x += at, raw += at, xz += at + (row + 1) * s.H;
    bc += (p.first + bc_row) * s.P + s.R + (i / STATES % 2 ? s.S : 0) + n;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const bool inside = j * BESIDE < left;
        v->x[j] = inside ? x[j * beside] : zero;
        v->raw[j] = inside ? raw[j * beside] : zero;
        v->z[j] = inside ? xz[2 * j * beside] : zero;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int below = j * (SCAN_THREADS / (2 * STATES));
        v->bc[j] = bc_row + below < s.T && n < s.S ? bc[below * s.P] : zero;
    }
}

// tile_fill: the tile at t of what the thread has loaded. Where there is no token, dt is 0: a is 1
// and nothing is added.
static __device__ inline void tile_fill(Tile *tile, const Loaded *v, float bias, int t, Place p,
                                        Scan s)
{
    const int left = rows_left(t, p, s);
    float slope;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const float dt = j * BESIDE < left ? softplus((float)v->raw[j] + bias, &slope) : 0;
        tile->in[p.row + j * BESIDE][threadIdx.x % CHANNELS] = {dt, dt * (float)v->x[j]};
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
        ((float *)tile->bc)[threadIdx.x + j * SCAN_THREADS] = (float)v->bc[j];
}

// lanes_sums: v[k] summed over the four lanes of a channel, to lane k.
static __device__ inline float lanes_sums(const float (&v)[4], int lane)
{
    const bool high = lane & 2, odd = lane & 1;
    const float x = (high ? v[2] : v[0]) + __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
    const float y = (high ? v[3] : v[1]) + __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    return (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 1);
}

// warp_sums: v[k] summed over the eight channels of a warp, the lanes four apart, to channel k.
static __device__ inline float warp_sums(const float (&v)[8])
{
    const int k = threadIdx.x % WARP / LANES;
    float x[4], y[2];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = (k & 4 ? v[i + 4] : v[i]) + __shfl_xor_sync(~0u, k & 4 ? v[i] : v[i + 4], 16);
#pragma unroll
    for (int i = 0; i < 2; i++)
        y[i] = (k & 2 ? x[i + 2] : x[i]) + __shfl_xor_sync(~0u, k & 2 ? x[i] : x[i + 2], 8);
    return (k & 1 ? y[1] : y[0]) + __shfl_xor_sync(~0u, k & 1 ? y[0] : y[1], 4);
}

// own_load: the thread's four states of what stands as (rows,H,STATES).
static __device__ inline void own_load(float (&h)[OWN], const float *x, size_t row, Place p, Scan s)
{
    Pack<float, OWN> v = {};
    if (p.c < s.H)
        v = *(const Pack<float, OWN> *)(x + (row * s.H + p.c) * STATES + p.lane * OWN);
    for (int k = 0; k < OWN; k++)
        h[k] = v.v[k];
}

// own_store: see own_load.
static __device__ inline void own_store(float *x, const float (&h)[OWN], size_t row, Place p,
                                        Scan s)
{
    Pack<float, OWN> v;
    for (int k = 0; k < OWN; k++)
        v.v[k] = h[k];
    if (p.c < s.H)
        *(Pack<float, OWN> *)(x + (row * s.H + p.c) * STATES + p.lane * OWN) = v;
}

// edge_at: where state k of the thread stands in what enters or leaves a scan (B,S,H); -1: nowhere.
static __device__ inline long edge_at(int k, Place p, Scan s)
{
    const int n = s.s0 + p.lane * OWN + k;
    return p.c < s.H && n < s.S ? (long)((p.b * s.S + n) * s.H + p.c) : -1;
}

// edge_load: the state at the chunk's edge where its scan starts: from the carry that
// scan_carry_kernel made or, with one chunk, from `edge` (B,S,H), NULL: 0.
static __device__ inline void edge_load(float (&h)[OWN], const float *carry, const float *edge,
                                        Place p, Scan s)
{
    if (s.chunks > 1)
        own_load(h, carry, s.B * s.chunks + p.chunk, p, s);
#pragma unroll
    for (int k = 0; k < OWN && s.chunks == 1; k++)
        h[k] = edge && edge_at(k, p, s) >= 0 ? edge[edge_at(k, p, s)] : 0;
}

// scan_forward_kernel: a block a chunk of CHANNELS channels, see scan_forward. SUMMARY: instead,
// carry (2,B,chunks,H,STATES) = the product of the chunk's a, and what it makes of a state 0.
template <int RANGE, int SUMMARY>
static __global__ void __launch_bounds__(SCAN_THREADS, SUMMARY ? 4 : 3)
scan_forward_kernel(floatX *g, float *sums, float *states, float *final, float *carry,
                    const floatX *__restrict__ x, const floatX *__restrict__ raw,
                    const floatX *__restrict__ xz, const floatX *__restrict__ bc,
                    const float *initial, const float *A_log, const float *dt_b, const float *skip,
                    Scan s)
{
    __shared__ Tile tile;
    __shared__ float ys[TILE][PITCH];
    const Place p = place_of(s);
    const int column = threadIdx.x % CHANNELS, tiles = (s.T + TILE - 1) / TILE;
    const float bias = p.column < s.H ? dt_b[p.column] : 0;
    const float through = p.column < s.H ? skip[p.column] : 0;
    float A[OWN], h[OWN] = {}, product[OWN] = {1, 1, 1, 1}, slope;
    Loaded next, v;
    rates_load(A, A_log, p, s);
    if (!SUMMARY)
        edge_load(h, carry, initial, p, s);
    tile_load(&next, x, raw, xz, bc, p.t0, p, s);
    for (int t = p.t0; t < p.t1; t += TILE) {
        v = next;
        tile_fill(&tile, &v, bias, t, p, s);
        __syncthreads();
        if (t + TILE < p.t1) // while this tile is scanned
            tile_load(&next, x, raw, xz, bc, t + TILE, p, s);
        if (!SUMMARY && states)
            own_store(states, h, p.b * tiles + t / TILE, p, s);
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
                    const float E = grown<RANGE>(in.x, A[n]);
                    h[n] = step<RANGE>(h[n], E, in.y, B_s[n]);
                    y[k] = fmaf(C_s[n], h[n], y[k]);
                    product[n] *= E - (RANGE - 1);
                }
            }
            if (!SUMMARY)
                ys[i + p.lane][p.own] = lanes_sums(y, p.lane);
        }
        __syncthreads();
        const size_t at = (p.first + t + p.row) * s.H + p.column;
        const int left = rows_left(t, p, s), beside = BESIDE * s.H;
#pragma unroll
        for (int j = 0; j < EACH && !SUMMARY; j++) {
            const bool inside = j * BESIDE < left;
            float y = ys[p.row + j * BESIDE][column];
            y += s.first ? through * (float)v.x[j] : inside ? sums[at + j * beside] : 0;
            if (inside && s.last)
                (g + at)[j * beside] = (floatX)(y * silu((float)v.z[j], &slope));
            else if (inside)
                (sums + at)[j * beside] = y;
        }
    }
    if (SUMMARY) {
        own_store(carry, product, p.chunk, p, s);
        own_store(carry, h, s.B * s.chunks + p.chunk, p, s);
    } else if (p.t1 == s.T) {
#pragma unroll
        for (int k = 0; k < OWN; k++)
            if (edge_at(k, p, s) >= 0)
                final[edge_at(k, p, s)] = h[k];
    }
}

// scan_carry_kernel: a thread a state: what scan_forward_kernel or scan_backward_kernel found of
// chunks becomes what each starts from; the first of them, BACK: the last, from edge (B,S,H), NULL:
// 0.
static __global__ void scan_carry_kernel(float *carry, const float *edge, Scan s, int back)
{
    const size_t i = blockIdx.x * (size_t)SCAN_THREADS + threadIdx.x, row = (size_t)s.H * STATES;
    const size_t b = i / row, e = i % row, c = e / STATES, n = s.s0 + e % STATES;
    if (b >= s.B)
        return;
    float h = edge && n < (size_t)s.S ? edge[(b * s.S + n) * s.H + c] : 0;
    for (int k = 0; k < s.chunks; k++) {
        float *product = carry + (b * s.chunks + (back ? s.chunks - 1 - k : k)) * row + e;
        float *own = product + s.B * s.chunks * row;
        const float start = h;
        h = fmaf(*product, h, *own);
        *own = start;
    }
}

// scan_backward_kernel: a block a chunk of CHANNELS channels, see scan_backward. With G what later
// tokens pass to h, g = G + C dy and w = E h_{t-1} g, E = range exp(dt A):
//   dC = dy h_t,  dB = g dt x,  dx = dt sum B g + skip dy,  ddt = x sum B g + sum A w,  dA = dt w,
// then G = a g. dbc (groups,N,2 STATES) = dB, dC summed over the block's channels; drates (chunks,
// H S + 2 H) = dA, dskip and the bias of dt, summed over the chunk. SUMMARY: instead, carry = the
// product of the chunk's a, and what it passes on when nothing comes from later.
template <int RANGE, int SUMMARY>
static __global__ void __launch_bounds__(SCAN_THREADS, SUMMARY ? 4 : 2)
scan_backward_kernel(floatX *dx, floatX *draw, floatX *dxz, float *dbc, float *drates, float *sums,
                     float *dinitial, float *carry, const floatX *__restrict__ dout,
                     const float *dfinal, const float *__restrict__ states,
                     const floatX *__restrict__ x, const floatX *__restrict__ raw,
                     const floatX *__restrict__ xz, const floatX *__restrict__ bc,
                     const float *A_log, const float *dt_b, const float *skip, Scan s)
{
    __shared__ Tile tile;
    __shared__ float dys[TILE][CHANNELS];
    __shared__ float ys[TILE][PITCH];
    __shared__ float both[2][TILE + 2][PITCH]; // sums of B g and of A w; planes 16 banks apart
    __shared__ float parts[SCAN_THREADS / WARP][TILE][2 * STATES];
    const Place p = place_of(s);
    const int column = threadIdx.x % CHANNELS, tiles = (s.T + TILE - 1) / TILE;
    const int warp = threadIdx.x / WARP, of_warp = threadIdx.x % WARP / LANES;
    const size_t N = s.B * s.T, plane = N * s.H;
    const float bias = p.column < s.H ? dt_b[p.column] : 0;
    const float through = p.column < s.H ? skip[p.column] : 0;
    float A[OWN], G[OWN] = {}, dA[OWN] = {}, product[OWN] = {1, 1, 1, 1}, dskip = 0, dbias = 0;
    float slope, slope_z;
    Loaded v;
    rates_load(A, A_log, p, s);
    if (!SUMMARY)
        edge_load(G, carry, dfinal, p, s);
    for (int t = p.t0 + (p.t1 - p.t0 - 1) / TILE * TILE; t >= p.t0; t -= TILE) {
        const size_t at = (p.first + t + p.row) * s.H + p.column;
        const int left = rows_left(t, p, s), beside = BESIDE * s.H;
        tile_load(&v, x, raw, xz, bc, t, p, s);
        __syncthreads(); // the tile before has been used
        tile_fill(&tile, &v, bias, t, p, s);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const float d = j * BESIDE < left ? (float)(dout + at)[j * beside] : 0;
            dys[p.row + j * BESIDE][column] = d * silu((float)v.z[j], &slope_z);
        }
        __syncthreads();
        if (SUMMARY) {
#pragma unroll 4
            for (int i = TILE - 1; i >= 0; i--) {
                const float4 C = tile.bc[i][LANES + p.lane];
                const float C_s[] = {C.x, C.y, C.z, C.w};
#pragma unroll
                for (int n = 0; n < OWN; n++) {
                    const float a = grown<RANGE>(tile.in[i][p.own].x, A[n]) - (RANGE - 1);
                    G[n] = a * fmaf(C_s[n], dys[i][p.own], G[n]);
                    product[n] *= a;
                }
            }
            continue;
        }
        float before[TILE][OWN], h[OWN], y[4];
        own_load(h, states, p.b * tiles + t / TILE, p, s);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            const float2 in = tile.in[i][p.own];
            const float4 B = tile.bc[i][p.lane], C = tile.bc[i][LANES + p.lane];
            const float B_s[] = {B.x, B.y, B.z, B.w}, C_s[] = {C.x, C.y, C.z, C.w};
            y[i % 4] = 0;
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                before[i][n] = h[n];
                h[n] = step<RANGE>(h[n], grown<RANGE>(in.x, A[n]), in.y, B_s[n]);
                y[i % 4] = fmaf(C_s[n], h[n], y[i % 4]);
            }
            if (i % 4 == 3)
                ys[i - 3 + p.lane][p.own] = lanes_sums(y, p.lane);
        }
        float pair[4]; // of two positions: sums of B g, of A w
#pragma unroll
        for (int i = TILE - 1; i >= 0; i--) {
            const float2 in = tile.in[i][p.own];
            const float4 B = tile.bc[i][p.lane], C = tile.bc[i][LANES + p.lane];
            const float B_s[] = {B.x, B.y, B.z, B.w}, C_s[] = {C.x, C.y, C.z, C.w};
            const float dy = dys[i][p.own];
            float dBC[2 * OWN];
            pair[i % 2] = pair[2 + i % 2] = 0;
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                const float g = fmaf(C_s[n], dy, G[n]), Eg = grown<RANGE>(in.x, A[n]) * g;
                const float w = Eg * before[i][n];
                dBC[n] = g * in.y;
                dBC[OWN + n] = dy * h[n];
                pair[i % 2] = fmaf(B_s[n], g, pair[i % 2]);
                pair[2 + i % 2] = fmaf(A[n], w, pair[2 + i % 2]);
                dA[n] = fmaf(in.x, w, dA[n]);
                G[n] = RANGE == 2 ? Eg - g : Eg;
                h[n] = before[i][n];
            }
            parts[warp][i][of_warp / OWN * STATES + p.lane * OWN + of_warp % OWN] = warp_sums(dBC);
            if (i % 2 == 0)
                both[p.lane / 2][i + p.lane % 2][p.own] = lanes_sums(pair, p.lane);
        }
        __syncthreads();
        const size_t of_z = at + (p.first + t + p.row + 1) * s.H;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (j * BESIDE >= left)
                continue;
            const int i = p.row + j * BESIDE, below = j * beside;
            const float x_i = (float)(x + at)[below], dy = dys[i][column];
            float *sum = sums + at + below;
            float y = ys[i][column] + (s.first ? through * x_i : *sum);
            float Bg = both[0][i][column] + (s.first ? 0 : sum[plane]);
            float Aw = LN2 * both[1][i][column] + (s.first ? 0 : sum[2 * plane]);
            if (!s.last) {
                *sum = y, sum[plane] = Bg, sum[2 * plane] = Aw;
                continue;
            }
            const float dt = softplus((float)(raw + at)[below] + bias, &slope);
            silu((float)(xz + of_z)[2 * below], &slope_z);
            const float d = (x_i * Bg + Aw) * slope;
            (dx + at)[below] = (floatX)(dt * Bg + through * dy);
            (draw + at)[below] = (floatX)d;
            (dxz + of_z)[2 * below] = (floatX)((float)(dout + at)[below] * y * slope_z);
            dskip += dy * x_i;
            dbias += d;
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int k = threadIdx.x + j * SCAN_THREADS, n = k % (2 * STATES);
            const int i = k / (2 * STATES);
            float sum = 0;
            for (int w = 0; w < SCAN_THREADS / WARP; w++)
                sum += parts[w][i][n];
            if (t + i < s.T)
                dbc[(p.group * N + p.first + t + i) * 2 * STATES + n] = sum;
        }
    }
    if (SUMMARY) {
        own_store(carry, product, p.chunk, p, s);
        own_store(carry, G, s.B * s.chunks + p.chunk, p, s);
        return;
    }
    drates += p.chunk * ((size_t)s.H * s.S + 2 * s.H);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        if (edge_at(k, p, s) < 0)
            continue;
        drates[(size_t)p.c * s.S + s.s0 + p.lane * OWN + k] = dA[k];
        if (dinitial && p.t0 == 0)
            dinitial[edge_at(k, p, s)] = G[k];
    }
    __syncthreads();
    both[0][p.row][column] = dskip, both[1][p.row][column] = dbias;
    __syncthreads();
    dskip = dbias = 0;
    for (int i = 0; i < BESIDE; i++)
        dskip += both[0][i][column], dbias += both[1][i][column];
    if (s.last && p.row == 0 && p.column < s.H) {
        drates[(size_t)s.H * s.S + p.column] = dskip;
        drates[(size_t)s.H * s.S + s.H + p.column] = dbias;
    }
}

// scan_bc_kernel: a thread a number of a token: dp's B and C = dbc summed over the groups.
static __global__ void scan_bc_kernel(floatX *dp, const float *dbc, Scan s)
{
    const size_t i = blockIdx.x * (size_t)SCAN_THREADS + threadIdx.x, N = s.B * s.T;
    const size_t row = i / (2 * STATES);
    const int n = s.s0 + (int)(i % STATES), of_C = (int)(i / STATES % 2);
    float sum = 0;
    if (row >= N || n >= s.S)
        return;
#pragma unroll 8
    for (int k = 0; k < s.groups; k++)
        sum += dbc[k * N * 2 * STATES + i];
    dp[row * s.P + s.R + of_C * s.S + n] = (floatX)sum;
}

// scan_rates_kernel: a thread a number: dA_log (H,S), dskip, ddt_b (H) += the sums of drates.
static __global__ void scan_rates_kernel(float *dA_log, float *dskip, float *ddt_b,
                                         const float *drates, const float *A_log, size_t rows,
                                         Scan s)
{
    const size_t i = blockIdx.x * (size_t)SCAN_THREADS + threadIdx.x, H = s.H, n = H * s.S;
    float sum = 0;
    if (i >= n + 2 * H)
        return;
#pragma unroll 8
    for (size_t k = 0; k < rows; k++)
        sum += drates[k * (n + 2 * H) + i];
    if (i < n)
        dA_log[i] += A_log[i] > 44 ? 0 : LN2 * rate_of(A_log[i]) * sum;
    else if (i < n + H)
        dskip[i - n] += sum;
    else
        ddt_b[i - n - H] += sum;
}

// scan_of: see Scan; of the first 16 states.
static Scan scan_of(size_t B, size_t T, size_t H, size_t S, size_t R, size_t P)
{
    const size_t threads = B * H * LANES, most = T / CHUNK_LEAST, fill = FILL / threads;
    const size_t parts = fill < (T < LONG ? 4 : 2) || most < 2 ? 1 : fill < most ? fill : most;
    const size_t chunk = ((T + parts - 1) / parts + TILE - 1) / TILE * TILE;
    const size_t chunks = (T + chunk - 1) / chunk, groups = (H + CHANNELS - 1) / CHANNELS;
    assert(T < INT_MAX / 2 && H * S < INT_MAX && P < INT_MAX && B * chunks * groups < INT_MAX);
    return {(int)T, (int)H, (int)S, (int)R, (int)P, 0, (int)chunk, (int)chunks, (int)groups, 1,
            S <= STATES, B};
}

// scan_next: the next 16 states of s; false after the last.
static bool scan_next(Scan *s)
{
    s->s0 += STATES;
    s->first = 0;
    s->last = s->s0 + STATES >= s->S;
    return s->s0 < s->S;
}

// scan_states: elements of `states` for at most N tokens in at most B sequences.
static size_t scan_states(size_t B, size_t N, size_t H, size_t S)
{
    return (N / TILE + B) * H * ((S + STATES - 1) / STATES * STATES);
}

// scan_chunks: of as many tokens, the most chunks: rows of `drates` and, times 2 H STATES, `carry`.
static size_t scan_chunks(size_t B, size_t N)
{
    return B + N / CHUNK_LEAST;
}

// scan_forward_passes: see scan_forward; s: of scan_of, or the same with other chunks.
static void scan_forward_passes(floatX *g, float *states, float *final, float *sums, float *carry,
                                const floatX *x, const floatX *raw, const floatX *xz,
                                const floatX *p, const float *initial, const float *A_log,
                                const float *dt_b, const float *skip, Scan s, int range,
                                cudaStream_t stream)
{
    const size_t tiles = ((size_t)s.T + TILE - 1) / TILE, grid = s.B * s.chunks * s.groups;
    const size_t carried = (s.B * s.H * STATES + SCAN_THREADS - 1) / SCAN_THREADS;
    do {
        float *kept = states ? states + s.s0 * s.B * tiles * s.H : NULL;
        WITH_FLAG(TWO, range == 2, {
            if (s.chunks > 1) {
                LAUNCH((scan_forward_kernel<1 + TWO, 1>), grid, SCAN_THREADS, 0, stream, g, sums,
                       kept, final, carry, x, raw, xz, p, initial, A_log, dt_b, skip, s);
                LAUNCH(scan_carry_kernel, carried, SCAN_THREADS, 0, stream, carry, initial, s, 0);
            }
            LAUNCH((scan_forward_kernel<1 + TWO, 0>), grid, SCAN_THREADS, 0, stream, g, sums, kept,
                   final, carry, x, raw, xz, p, initial, A_log, dt_b, skip, s);
        });
    } while (scan_next(&s));
}

// scan_forward: g (B,T,H) = y SiLU(z), y = sum_s C_t h_t + skip x_t, h_t = a_t h_{t-1} + dt_t B_t
// x_t, a_t = range exp(dt A) - (range - 1), of x (B,T,H), dt = softplus(raw (B,T,H) + dt_b (H)), z
// at H of xz (B,T,2H), B and C (S) at R of a row of p (N,P), A = -exp(A_log (H,S)), skip (H);
// range 1: a in [0,1], 2: in [-1,1]. Before the first token h is initial (B,S,H), NULL: 0; final
// (B,S,H) = the last, may alias initial; states (scan_states) = what scan_backward needs, NULL: not
// asked for. sums (N,H) and, where T is cut, carry (scan_chunks): scratch; sums for S > 16 alone.
static void scan_forward(floatX *g, float *states, float *final, float *sums, float *carry,
                         const floatX *x, const floatX *raw, const floatX *xz, const floatX *p,
                         const float *initial, const float *A_log, const float *dt_b,
                         const float *skip, size_t B, size_t T, size_t H, size_t S, size_t R,
                         size_t P, int range, cudaStream_t stream)
{
    scan_forward_passes(g, states, final, sums, carry, x, raw, xz, p, initial, A_log, dt_b, skip,
                        scan_of(B, T, H, S, R, P), range, stream);
}

// Scratch of scan_backward: dbc (groups of CHANNELS channels,N,2 STATES), drates (scan_chunks, H S
// + 2 H), carry (scan_chunks,2,H,STATES), for S > 16 sums (3,N,H).
typedef struct {
    float *dbc, *drates, *carry, *sums;
} ScanWork;

// scan_backward_passes: see scan_backward; s: as scan_forward_passes takes it.
static void scan_backward_passes(floatX *dx, floatX *draw, floatX *dxz, floatX *dp, float *dinitial,
                                 float *dA_log, float *ddt_b, float *dskip, ScanWork work,
                                 const floatX *dout, const float *dfinal, const float *states,
                                 const floatX *x, const floatX *raw, const floatX *xz,
                                 const floatX *p, const float *A_log, const float *dt_b,
                                 const float *skip, Scan s, int range, cudaStream_t stream)
{
    const size_t rows = s.B * s.chunks, grid = rows * s.groups, numbers = (size_t)s.H * (s.S + 2);
    const size_t tiles = ((size_t)s.T + TILE - 1) / TILE, of_bc = s.B * s.T * 2 * STATES;
    const size_t carried = (s.B * s.H * STATES + SCAN_THREADS - 1) / SCAN_THREADS;
    do {
        const float *kept = states + s.s0 * s.B * tiles * s.H;
        WITH_FLAG(TWO, range == 2, {
            if (s.chunks > 1) {
                LAUNCH((scan_backward_kernel<1 + TWO, 1>), grid, SCAN_THREADS, 0, stream, dx, draw,
                       dxz, work.dbc, work.drates, work.sums, dinitial, work.carry, dout, dfinal,
                       kept, x, raw, xz, p, A_log, dt_b, skip, s);
                LAUNCH(scan_carry_kernel, carried, SCAN_THREADS, 0, stream, work.carry, dfinal, s,
                       1);
            }
            LAUNCH((scan_backward_kernel<1 + TWO, 0>), grid, SCAN_THREADS, 0, stream, dx, draw,
                   dxz, work.dbc, work.drates, work.sums, dinitial, work.carry, dout, dfinal, kept,
                   x, raw, xz, p, A_log, dt_b, skip, s);
        });
        LAUNCH(scan_bc_kernel, (of_bc + SCAN_THREADS - 1) / SCAN_THREADS, SCAN_THREADS, 0, stream,
               dp, work.dbc, s);
    } while (scan_next(&s));
    LAUNCH(scan_rates_kernel, (numbers + SCAN_THREADS - 1) / SCAN_THREADS, SCAN_THREADS, 0, stream,
           dA_log, dskip, ddt_b, work.drates, A_log, rows, s);
}

// scan_backward: dx, draw (B,T,H) =, z's half of dxz (B,T,2H) =, B's and C's part of dp (N,P) =;
// dA_log (H,S), ddt_b, dskip (H) +=; dinitial (B,S,H) = (NULL: not asked for), from dout (B,T,H),
// that of g, dfinal (B,S,H), that of final (NULL: 0), and the forward's states, x, raw, xz, p and
// weights.
static void scan_backward(floatX *dx, floatX *draw, floatX *dxz, floatX *dp, float *dinitial,
                          float *dA_log, float *ddt_b, float *dskip, ScanWork work,
                          const floatX *dout, const float *dfinal, const float *states,
                          const floatX *x, const floatX *raw, const floatX *xz, const floatX *p,
                          const float *A_log, const float *dt_b, const float *skip, size_t B,
                          size_t T, size_t H, size_t S, size_t R, size_t P, int range,
                          cudaStream_t stream)
{
    scan_backward_passes(dx, draw, dxz, dp, dinitial, dA_log, ddt_b, dskip, work, dout, dfinal,
                         states, x, raw, xz, p, A_log, dt_b, skip, scan_of(B, T, H, S, R, P), range,
                         stream);
}

// ------------------------------------------------------------------------------------------------
// [block] What stands around the scan: convolution with SiLU, norm, products in rows of their own.

// The convolution sees up to WINDOW_MOST positions; a thread takes STRIP of them, VEC channels.
enum { WINDOW_MOST = 16, STRIP = 16, CONV_SLICES = 128, CONV_THREADS = ROW_WARPS * WARP };
#define RMS_EPS 1e-5f

// What its kernels are told: `columns` groups of VEC channels, `strips` of a sequence.
typedef struct {
    int T, H, W;
    size_t strips, columns, B;
} Conv;

// conv_weights: weight (H,W) of channels c on, at the end of a window of TAPS, 0 before; 0 at all
// without such channels.
template <int TAPS, int VEC>
static __device__ inline void conv_weights(float (&to)[TAPS][VEC], const float *weight, int c,
                                           Conv s)
{
#pragma unroll
    for (int k = 0; k < TAPS; k++)
        for (int v = 0; v < VEC; v++)
            to[k][v] = c < s.H && k >= TAPS - s.W
                           ? weight[(size_t)(c + v) * s.W + k - (TAPS - s.W)] : 0;
}

// conv_push: x = the last TAPS rows: all move up, and `row` is the last; NULL: zeros.
template <int TAPS, int VEC>
static __device__ inline void conv_push(float (&x)[TAPS][VEC], const floatX *row)
{
    Pack<floatX, VEC> last = {};
    if (row)
        last = *(const Pack<floatX, VEC> *)row;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        for (int k = 1; k < TAPS; k++)
            x[k - 1][v] = x[k][v];
        x[TAPS - 1][v] = (float)last.v[v];
    }
}

// conv_forward_kernel: a thread a strip of VEC channels, its window in registers.
template <int TAPS, int VEC>
static __global__ void conv_forward_kernel(floatX *__restrict__ u, floatX *window,
                                           const floatX *__restrict__ xz, const float *weight,
                                           const float *bias, Conv s)
{
    const size_t i = blockIdx.x * (size_t)CONV_THREADS + threadIdx.x, strip = i / s.columns;
    const size_t b = strip / s.strips, pitch = 2 * (size_t)s.H;
    const int c = (int)(i % s.columns) * VEC, t0 = (int)(strip % s.strips) * STRIP;
    float x[TAPS][VEC] = {}, w[TAPS][VEC], slope;
    if (b >= s.B)
        return;
    conv_weights<TAPS, VEC>(w, weight, c, s);
    xz += b * s.T * pitch + c;
    u += b * s.T * s.H + c;
    window = window ? window + b * (s.W - 1) * s.H + c : NULL;
#pragma unroll
    for (int t = t0 - TAPS + 1; t < t0; t++) {
        const floatX *before = window && t >= 1 - s.W ? window + (t + s.W - 1) * s.H : NULL;
        conv_push<TAPS, VEC>(x, t < 0 ? before : xz + t * pitch);
    }
#pragma unroll 4
    for (int t = t0; t < min(t0 + STRIP, s.T); t++) {
        Pack<floatX, VEC> out;
        conv_push<TAPS, VEC>(x, xz + t * pitch);
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            float sum = bias[c + v];
            for (int k = 0; k < TAPS; k++)
                sum += w[k][v] * x[k][v];
            out.v[v] = (floatX)silu(sum, &slope);
        }
        *(Pack<floatX, VEC> *)(u + (size_t)t * s.H) = out;
    }
#pragma unroll
    for (int k = 1; k < TAPS; k++) // W - 1 rows remain
        for (int v = 0; v < VEC && window && k > TAPS - s.W; v++)
            window[(k - 1 - TAPS + s.W) * s.H + v] = (floatX)x[k][v];
}

// conv_backward_kernel: a block 32 VEC channels and every `slices`-th eight strips, a warp each:
// dxz =, and partial (slices,H W) and (slices,H) behind it = its sums for weights and bias. The
// gradient of a row is due TAPS - 1 rows later, so that strips overlap by as many.
template <int TAPS, int VEC>
static __global__ void conv_backward_kernel(floatX *__restrict__ dxz, float *partial,
                                            const floatX *__restrict__ du,
                                            const floatX *__restrict__ xz, const float *weight,
                                            const float *bias, Conv s, size_t slices)
{
    __shared__ float sums[ROW_WARPS][(TAPS + 1) * VEC][WARP];
    const size_t parts = (s.columns + WARP - 1) / WARP, slice = blockIdx.x / parts;
    const size_t pitch = 2 * (size_t)s.H;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int c = ((int)(blockIdx.x % parts) * WARP + lane) * VEC;
    const bool inside = c < s.H;
    float x[TAPS][VEC], dz[TAPS][VEC], w[TAPS][VEC], dw[TAPS][VEC] = {}, dbias[VEC] = {}, slope;
    conv_weights<TAPS, VEC>(w, weight, c, s);
    for (size_t i = slice * ROW_WARPS + warp; inside && i < s.B * s.strips;
         i += slices * ROW_WARPS) {
        const int t0 = (int)(i % s.strips) * STRIP, t1 = min(t0 + STRIP, s.T);
        const size_t first = i / s.strips * s.T;
#pragma unroll
        for (int t = t0 - TAPS; t < t0; t++) {
            conv_push<TAPS, VEC>(x, t < 0 ? NULL : xz + (first + t) * pitch + c);
            conv_push<TAPS, VEC>(dz, NULL);
        }
#pragma unroll 1
        for (int t = t0; t < t1 + TAPS - 1; t++) {
            const bool exists = t < s.T, own = t < t1;
            Pack<floatX, VEC> out;
            conv_push<TAPS, VEC>(x, exists ? xz + (first + t) * pitch + c : NULL);
            conv_push<TAPS, VEC>(dz, exists ? du + (first + t) * s.H + c : NULL);
#pragma unroll
            for (int v = 0; v < VEC; v++) {
                float sum = bias[c + v], due = 0;
                for (int k = 0; k < TAPS; k++)
                    sum += w[k][v] * x[k][v];
                silu(sum, &slope);
                const float d = dz[TAPS - 1][v] *= slope;
                for (int k = 0; k < TAPS; k++) {
                    due += w[k][v] * dz[TAPS - 1 - k][v];
                    dw[k][v] += own ? d * x[k][v] : 0;
                }
                dbias[v] += own ? d : 0;
                out.v[v] = (floatX)due;
            }
            if (t - TAPS + 1 >= t0)
                *(Pack<floatX, VEC> *)(dxz + (first + t - TAPS + 1) * pitch + c) = out;
        }
    }
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        for (int k = 0; k < TAPS; k++)
            sums[warp][k * VEC + v][lane] = dw[k][v];
        sums[warp][TAPS * VEC + v][lane] = dbias[v];
    }
    __syncthreads();
    for (int i = warp; i < (TAPS + 1) * VEC && inside; i += ROW_WARPS) {
        const int k = i / VEC - (TAPS - s.W);
        const size_t at = (size_t)c + i % VEC, weights = (size_t)s.H * s.W;
        float sum = 0;
        for (int j = 0; j < ROW_WARPS; j++)
            sum += sums[j][i][lane];
        if (i / VEC == TAPS)
            partial[slices * weights + slice * s.H + at] = sum;
        else if (k >= 0)
            partial[slice * weights + at * s.W + k] = sum;
    }
}

// conv_of: see Conv.
static Conv conv_of(size_t B, size_t T, size_t H, size_t W, size_t vec)
{
    assert(T < INT_MAX / 2 && H * W < INT_MAX / 2);
    return {(int)T, (int)H, (int)W, (T + STRIP - 1) / STRIP, H / vec, B};
}

// WITH_WINDOW: the statement with TAPS and VEC as constants: two channels a thread where H is even
// and the window short.
#define WITH_WINDOW(W, vec, ...) \
    do { \
        if ((W) > 4) { enum { TAPS = WINDOW_MOST, VEC = 1 }; __VA_ARGS__; } \
        else if ((vec) == 2) { enum { TAPS = 4, VEC = 2 }; __VA_ARGS__; } \
        else { enum { TAPS = 4, VEC = 1 }; __VA_ARGS__; } \
    } while (0)

// conv_forward: u (B,T,H) = SiLU(bias[c] + sum_w weight[c,w] x_{t-W+1+w}[c]), weight (H,W), bias
// (H), x the first half of each row (B,T,2H). window (B,W-1,H): the rows before the first, which
// the last W - 1 replace: for T <= STRIP; NULL: zeros.
static void conv_forward(floatX *u, floatX *window, const floatX *xz, const float *weight,
                         const float *bias, size_t B, size_t T, size_t H, size_t W,
                         cudaStream_t stream)
{
    const size_t vec = H % 2 || W > 4 ? 1 : 2;
    const Conv s = conv_of(B, T, H, W, vec);
    const size_t grid = (B * s.strips * s.columns + CONV_THREADS - 1) / CONV_THREADS;
    assert(!window || T <= STRIP);
    WITH_WINDOW(W, vec, LAUNCH((conv_forward_kernel<TAPS, VEC>), grid, CONV_THREADS, 0, stream, u,
                               window, xz, weight, bias, s));
}

// conv_backward: dx, the first half of each row (B,T,2H), =, dweight (H,W), dbias (H) += from du
// (B,T,H) and the forward's xz and weights. partial (CONV_SLICES,H (W+1)): scratch.
static void conv_backward(floatX *dxz, float *dweight, float *dbias, float *partial,
                          const floatX *du, const floatX *xz, const float *weight,
                          const float *bias, size_t B, size_t T, size_t H, size_t W,
                          cudaStream_t stream)
{
    const size_t vec = H % 2 || W > 4 ? 1 : 2;
    const Conv s = conv_of(B, T, H, W, vec);
    const size_t eights = (B * s.strips + ROW_WARPS - 1) / ROW_WARPS;
    const size_t slices = eights < CONV_SLICES ? eights : CONV_SLICES;
    const size_t grid = slices * ((s.columns + WARP - 1) / WARP);
    WITH_WINDOW(W, vec, LAUNCH((conv_backward_kernel<TAPS, VEC>), grid, CONV_THREADS, 0, stream,
                               dxz, partial, du, xz, weight, bias, s, slices));
    slices_sum(dweight, dbias, partial, slices, H * W, slices, H, H * W, 0, stream);
}

// rmsnorm_forward_kernel: a warp a row.
template <int WIDTH>
static __global__ void rmsnorm_forward_kernel(floatX *out, float *rstd, const float *x,
                                              const float *weight, size_t N, int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float squares = 0;
    if (row >= N)
        return;
#pragma unroll
    for (int c = lane; c < n; c += WARP)
        squares = fmaf(x[row * n + c], x[row * n + c], squares);
    const float r = rsqrtf(warp_sum(squares) / (float)n + RMS_EPS);
#pragma unroll
    for (int c = lane; c < n; c += WARP)
        out[row * n + c] = (floatX)(x[row * n + c] * r * weight[c]);
    if (lane == 0)
        rstd[row] = r;
}

// rmsnorm_forward: out (N,C) = weight x rstd, rstd (N) = 1 / sqrt(mean(x^2) + 1e-5), rows of x
// (N,C), weight (C).
static void rmsnorm_forward(floatX *out, float *rstd, const float *x, const float *weight, size_t N,
                            size_t C, cudaStream_t stream)
{
    LAUNCH_ROWS(rmsnorm_forward_kernel, N, C, stream, out, rstd, x, weight, N, (int)C);
}

// rmsnorm_backward_kernel: a warp a row: dx += rstd (d - x rstd^2 mean(d x)), d = dout weight.
template <int WIDTH>
static __global__ void rmsnorm_backward_kernel(floatX *dx, const floatX *__restrict__ dout,
                                               const float *__restrict__ x, const float *rstd,
                                               const float *__restrict__ weight, size_t N, int C)
{
    const size_t row = row_of_warp(), at = row * (WIDTH ? WIDTH : C);
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float dot = 0;
    if (row >= N)
        return;
    const float r = rstd[row];
#pragma unroll
    for (int c = lane; c < n; c += WARP)
        dot += (float)dout[at + c] * weight[c] * x[at + c];
    const float mean = r * r * warp_sum(dot) / (float)n;
#pragma unroll
    for (int c = lane; c < n; c += WARP) {
        const float d = r * ((float)dout[at + c] * weight[c] - x[at + c] * mean);
        dx[at + c] = (floatX)((float)dx[at + c] + d);
    }
}

// rmsnorm_slices_kernel: partial (COLUMN_SLICES,C) = column sums of dout x rstd in every slice of
// the N rows; a thread a column, ROW_WARPS warps side by side on the rows.
static __global__ void rmsnorm_slices_kernel(float *partial, const floatX *__restrict__ dout,
                                             const float *__restrict__ x,
                                             const float *__restrict__ rstd, size_t N, int C)
{
    const int c = blockIdx.x / COLUMN_SLICES * WARP + threadIdx.x % WARP;
    size_t first;
    const int rows = slice_rows(&first, N);
    float sum = 0;
#pragma unroll 8
    for (int n = threadIdx.x / WARP; n < rows; n += ROW_WARPS) {
        const size_t at = (first + n) * C + min(c, C - 1);
        sum += (float)dout[at] * x[at] * rstd[first + n];
    }
    columns_sum<1, ROW_WARPS>(partial, &sum, c, C);
}

// rmsnorm_backward: dx (N,C) +=, dweight (C) += from dout (N,C), the forward's x, rstd and weight.
// partial (COLUMN_SLICES,C): scratch.
static void rmsnorm_backward(floatX *dx, float *dweight, float *partial, const floatX *dout,
                             const float *x, const float *rstd, const float *weight, size_t N,
                             size_t C, cudaStream_t stream)
{
    LAUNCH_ROWS(rmsnorm_backward_kernel, N, C, stream, dx, dout, x, rstd, weight, N, (int)C);
    LAUNCH(rmsnorm_slices_kernel, (C + WARP - 1) / WARP * COLUMN_SLICES, ROW_WARPS * WARP, 0,
           stream, partial, dout, x, rstd, N, (int)C);
    slices_sum(dweight, NULL, partial, COLUMN_SLICES, C, 0, 0, C, 0, stream);
}

// round_kernel: a thread an element.
static __global__ void round_kernel(floatX *out, const float *x, size_t n)
{
    const size_t i = blockIdx.x * (size_t)CONV_THREADS + threadIdx.x;
    if (i < n)
        out[i] = (floatX)x[i];
}

// product: out (N,OC), rows `ld_out` apart, = inp (N,C), rows `ld` apart, by the weight (OC,C) or,
// not `turned`, (C,OC); add: out +=.
static void product(floatX *out, size_t ld_out, const floatX *inp, size_t ld, const floatX *weight,
                    int turned, int add, size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = out, .add = add ? out : NULL, .x = inp, .y = weight,
                    .type = FLOATX_TYPE, .in = FLOATX_TYPE, .y_t = turned, .M = N, .N = OC, .K = C,
                    .ld_out = ld_out, .ld_x = ld, .ld_y = turned ? C : OC};
    gemm(&g, stream);
}

// product_weight: dweight (OC,C) += dout (N,OC)^T inp (N,C), rows of inp `ld` apart. partial
// (weight_scratch): scratch.
static void product_weight(float *dweight, float *partial, const floatX *dout, const floatX *inp,
                           size_t ld, size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const size_t n = OC * C, slices = slices_of(N, n), K = N / slices;
    const Gemm g = {.out = partial, .x = dout, .y = inp, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                    .x_t = 1, .M = OC, .N = C, .K = K, .ld_out = C, .ld_x = OC, .ld_y = ld,
                    .batch = slices, .out_step = n, .x_step = K * OC, .y_step = K * ld};
    gemm(&g, stream);
    slices_sum(dweight, NULL, partial, slices, n, 0, 0, n, 0, stream);
}

// ------------------------------------------------------------------------------------------------
// [layers] What every architecture here is made of.  (shared)

// matmul_residual: out (N,OC) = add (N,OC) + inp (N,C) weight (OC,C)^T + bias (OC); add may be out;
// add and bias NULL for none. X: float or floatX.
template <typename X>
static void matmul_residual(X *out, const X *add, const floatX *inp, const floatX *weight,
                            const X *bias, size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = out, .add = add, .bias = bias, .x = inp, .y = weight,
                    .type = sizeof(X) == 4 ? CUDA_R_32F : FLOATX_TYPE, .in = FLOATX_TYPE, .y_t = 1,
                    .M = N, .N = OC, .K = C, .ld_out = OC, .ld_x = C, .ld_y = C};
    gemm(&g, stream);
}

// matmul_forward: out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), NULL for none.
static void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                           size_t N, size_t C, size_t OC, cudaStream_t stream)
{
    matmul_residual<floatX>(out, NULL, inp, weight, bias, N, C, OC, stream);
}

// matmul_backward_input: dinp (N,C) = dout (N,OC) weight (OC,C).
static void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, size_t N,
                                  size_t C, size_t OC, cudaStream_t stream)
{
    const Gemm g = {.out = dinp, .x = dout, .y = weight, .type = FLOATX_TYPE, .in = FLOATX_TYPE,
                    .M = N, .N = C, .K = OC, .ld_out = C, .ld_x = OC, .ld_y = C};
    gemm(&g, stream);
}

// weight_scratch: elements of scratch that matmul_backward_weight needs for n weights, OC biases.
static size_t weight_scratch(size_t N, size_t n, size_t OC)
{
    return slices_of(N, n) * n + COLUMN_SLICES * OC;
}

// matmul_backward_weight: dweight (OC,C) += dout (N,OC)^T inp (N,C), rows of dout `pitch` apart;
// this for `parts` of OC columns each of dout, their gradients `step` elements apart. parts 0: one,
// multiplied with the rest of its row, as tensor cores want, step 0. dbias (OC), NULL for none, +=
// the column sums of the first part. partial (weight_scratch): scratch.
static void matmul_backward_weight(float *dweight, size_t step, float *dbias, float *partial,
                                   const floatX *dout, const floatX *inp, size_t N, size_t C,
                                   size_t OC, size_t pitch, size_t parts, cudaStream_t stream)
{
    const size_t columns = parts ? parts * OC : pitch, n = columns * C, slices = slices_of(N, n);
    const Gemm g = {.out = partial, .x = dout, .y = inp, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                    .x_t = 1, .M = columns, .N = C, .K = N / slices, .ld_out = C,
                    .ld_x = pitch, .ld_y = C, .batch = slices, .out_step = n,
                    .x_step = N / slices * pitch, .y_step = N / slices * C};
    gemm(&g, stream);
    if (dbias)
        bias_slices(partial + slices * n, dout, N, OC, pitch, stream);
    slices_sum(dweight, dbias, partial, slices, n, COLUMN_SLICES, dbias ? OC : 0, OC * C, step,
               stream);
}

// normalize_forward_kernel: a warp a row.
template <int WIDTH>
static __global__ void normalize_forward_kernel(floatX *__restrict__ out, float *rstd,
                                                const floatR *__restrict__ x, size_t N, int C)
{
    enum { VEC = WIDTH ? 2 : 1 };
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    if (row >= N)
        return;
    const Moments m = row_moments<floatR, WIDTH, VEC>(x + row * n, n, EPS);
#pragma unroll
    for (int c = VEC * lane; c < n; c += VEC * WARP) {
        Pack<floatX, VEC> y;
        for (int k = 0; k < VEC; k++)
            y.v[k] = (floatX)(((float)x[row * n + c + k] - m.mean) * m.rstd);
        *(Pack<floatX, VEC> *)(out + row * n + c) = y;
    }
    if (lane == 0)
        rstd[row] = m.rstd;
}

// normalize_forward: out (N,C) = (x - mean) rstd for every row of x (N,C), rstd (N) = 1 / sqrt(var
// + 1e-8); biased variance, nothing learned. LAUNCH_ROWS' common C: rows start at even elements.
static void normalize_forward(floatX *out, float *rstd, const floatR *x, size_t N, size_t C,
                              cudaStream_t stream)
{
    LAUNCH_ROWS(normalize_forward_kernel, N, C, stream, out, rstd, x, N, (int)C);
}

// normalize_backward_kernel: a warp a row.
template <int WIDTH>
static __global__ void normalize_backward_kernel(floatX *dx, const floatX *dout, size_t pitch,
                                                 const floatX *__restrict__ out, const float *rstd,
                                                 size_t N, int C, int first)
{
    enum { VEC = WIDTH ? 2 : 1, STEP = VEC * WARP };
    typedef Pack<floatX, VEC> Each;
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C, lane = threadIdx.x % WARP;
    float sum = 0, dot = 0;
    Each kept[WIDTH / STEP + 1], x = {}; // kept: of dout, where the loops unroll
    if (row >= N)
        return;
    dx += row * pitch;
    dout += row * pitch;
    out += row * n;
#pragma unroll
    for (int c = VEC * lane; c < n; c += STEP) {
        const Each g = kept[WIDTH ? c / STEP : 0] = *(const Each *)(dout + c);
        for (int k = 0; k < VEC; k++) {
            sum += (float)g.v[k];
            dot += (float)g.v[k] * (float)out[c + k];
        }
    }
    sum = warp_sum(sum) / (float)n;
    dot = warp_sum(dot) / (float)n;
    const float factor = rstd[row];
#pragma unroll
    for (int c = VEC * lane; c < n; c += STEP) {
        const Each g = WIDTH ? kept[c / STEP] : *(const Each *)(dout + c);
        if (!first)
            x = *(const Each *)(dx + c);
        for (int k = 0; k < VEC; k++)
            x.v[k] = (floatX)((first ? 0 : (float)x.v[k]) +
                              factor * ((float)g.v[k] - sum - (float)out[c + k] * dot));
        *(Each *)(dx + c) = x;
    }
}

// normalize_backward: dx (N,C) += (first: =) the gradient of x from dout (N,C) and what the forward
// wrote; rows of dx and dout are `pitch` apart, of LAUNCH_ROWS' common C an even number; with
// `first` dx may be dout.
static void normalize_backward(floatX *dx, const floatX *dout, size_t pitch, const floatX *out,
                               const float *rstd, size_t N, size_t C, int first,
                               cudaStream_t stream)
{
    LAUNCH_ROWS(normalize_backward_kernel, N, C, stream, dx, dout, pitch, out, rstd, N, (int)C,
                first);
}

// embed_forward_kernel: a warp a token.
template <int WIDTH>
static __global__ void embed_forward_kernel(floatR *out, const int *tokens, const float *wte,
                                            const float *wpe, size_t N, size_t T, int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C;
    if (row >= N)
        return;
    wte += (size_t)tokens[row] * n;
    wpe = wpe ? wpe + row % T * n : NULL;
#pragma unroll
    for (int c = threadIdx.x % WARP; c < n; c += WARP)
        out[row * n + c] = (floatR)(wte[c] + (wpe ? wpe[c] : 0));
}

// embed_forward: out (B,T,C) = wte[token] + wpe[t]; tokens (B,T), wte (V,C), wpe (T,C), NULL for
// none.
static void embed_forward(floatR *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C, cudaStream_t stream)
{
    LAUNCH_ROWS(embed_forward_kernel, B * T, C, stream, out, tokens, wte, wpe, B * T, T, (int)C);
}

// embed_backward: dwte (V,C) +=, dwpe (T,C), NULL for none, += from dout (B,T,C). partial
// (token_scratch): scratch.
static void embed_backward(float *dwte, float *dwpe, float *partial, const floatX *dout,
                           const int *tokens, size_t B, size_t T, size_t V, size_t C,
                           cudaStream_t stream)
{
    token_sums(dwte, partial, dout, tokens, B * T, V, C, stream);
    if (dwpe)
        batch_sums(dwpe, dout, B, T * C, stream);
}

// crossentropy_kernel: WARPS warps a row of logits (R,V), rows pitch apart. With 32 of them a row
// has a block, and is still in the caches when it is read again, from the end.
template <int WARPS>
static __global__ void __launch_bounds__(WARPS > 1 ? WARPS * WARP : ROW_WARPS * WARP)
    crossentropy_kernel(float *losses, int *predictions, floatX *dlogits,
                        const float *__restrict__ logits, const int *targets, const int *where,
                        const StepInput *step, size_t R, int V, int pitch)
{
    enum { STRIDE = 4 * WARPS * WARP };
    __shared__ Peak peaks[WARP];
    const size_t row = WARPS > 1 ? blockIdx.x : row_of_warp();
    const int i = threadIdx.x % (WARPS * WARP), lane = threadIdx.x % WARP;
    if (row >= R)
        return;
    const float *x = logits + row * pitch;
    Peak peak = {-INFINITY, 0, min(4 * i, V)};
#pragma unroll 4
    for (int v = 4 * i; v < V; v += STRIDE) {
        Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        const float before = peak.top;
        for (int k = 0; k < 4; k++) {
            y.v[k] = v + k < V ? y.v[k] : -INFINITY;
            peak.best = y.v[k] > peak.top ? v + k : peak.best;
            peak.top = y.v[k] > peak.top ? y.v[k] : peak.top;
        }
        peak.sum *= exp2_fast(LOG2E * (before - peak.top)); // at first 0 times 0
        for (int k = 0; k < 4; k++)
            peak.sum += exp2_fast(LOG2E * (y.v[k] - peak.top));
    }
    peak = peak_of_warp(peak);
    if (WARPS > 1) {
        if (lane == 0)
            peaks[threadIdx.x / WARP] = peak;
        __syncthreads();
        peak = peak_of_warp(peaks[lane]);
    }
    const int64_t at = where ? where[row] : (int64_t)row;
    const int target = at < 0 ? IGNORE : targets[at];
    if (i == 0 && at >= 0) {
        losses[at] = target == IGNORE ? 0 : logf(peak.sum) + peak.top - x[target];
        predictions[at] = peak.best;
    }
    const float unit = target == IGNORE ? 0 : (float)step->unit, factor = unit / peak.sum;
#pragma unroll 4
    for (int v = (pitch - 4) / STRIDE * STRIDE + 4 * i; v >= 0; v -= STRIDE) {
        if (v >= pitch)
            continue;
        const Pack<float, 4> y = *(const Pack<float, 4> *)(x + v);
        Pack<floatX, 4> d;
        for (int k = 0; k < 4; k++) {
            const float p = v + k < V ? factor * exp2_fast(LOG2E * (y.v[k] - peak.top)) : 0;
            d.v[k] = (floatX)(p - (v + k == target ? unit : 0));
        }
        *(Pack<floatX, 4> *)(dlogits + row * pitch + v) = d;
    }
}

// crossentropy: losses (N) = -log softmax(logits)[target] in nats, 0 where the target is IGNORE;
// predictions (N) = argmax; dlogits (R,V) = the gradient (softmax - onehot) step->unit of the loss;
// result->loss: see loss_kernel; unit = 1 / targets that count makes it their mean. logits (R,V)
// and dlogits: rows `pitch` apart, a multiple of 4, dlogits 0 between them. targets (N). where (R):
// see Asked; positions without a row have loss and prediction 0; NULL: R = N, each has one.
static void crossentropy(float *losses, int *predictions, floatX *dlogits, StepResult *result,
                         const float *logits, const int *targets, const int *where,
                         const StepInput *step, size_t N, size_t R, size_t V, size_t pitch,
                         cudaStream_t stream)
{
    if (where) {
        CUDA_CHECK(cudaMemsetAsync(losses, 0, N * sizeof *losses, stream));
        CUDA_CHECK(cudaMemsetAsync(predictions, 0, N * sizeof *predictions, stream));
    }
    if (V >= 4096)
        LAUNCH(crossentropy_kernel<WARP>, R, WARP * WARP, 0, stream, losses, predictions, dlogits,
               logits, targets, where, step, R, (int)V, (int)pitch);
    else
        LAUNCH(crossentropy_kernel<1>, (R + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0, stream,
               losses, predictions, dlogits, logits, targets, where, step, R, (int)V, (int)pitch);
    LAUNCH(loss_kernel, 1, 1024, 0, stream, result, losses, step, N);
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding.  (ports train_mamba.c[model])

typedef struct {
    int eigenvalues, layers, channels, hidden, state, rank, window, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *norm_w, *in_w, *conv_w, *conv_b, *x_w, *dt_w, *dt_b, *A_log, *skip, *out_w;
    float *head_w;
} Params;

// What matrix products read, in floatX; head_w (Vp,C): rows from V on 0.
typedef struct {
    floatX *in_w, *x_w, *dt_w, *out_w, *head_w;
} Copies;

// raw: without the bias of dt; last: the stream in floatX, which the head reads.
typedef struct {
    float *x, *rstd, *states, *h, *logits, *losses;
    floatX *r, *xz, *u, *rank, *bc, *raw, *g, *last;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch; dp (N,P): of rank,
// B and C.
typedef struct {
    float *partial;
    ScanWork work;
    floatX *dx, *dr, *dxz, *du, *dp, *draw, *dg, *dlogits;
    Asked asked;
} Dacts;

// Decoding: state of the scan, last inputs of the convolution; tokens read, residual stream,
// factors of the norm, logits.
typedef struct {
    int *tokens;
    float *h, *x, *rstd, *logits;
    floatX *window;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, H, S, R, P, W, L, decode_B; // P: from a token's rank to the next's
    size_t asked, rows; // that the head reads, of a sequence and of the batch: asked.cuh
    int range;                                         // 1, 2: a = range E - (range - 1)
    Weights weights;                                   // the host's, for files
    Params params, grads; // on the device, as all below
    Device device;
    Copies copies;
    Acts acts;
    Dacts dacts;
    Decoder decoder;
    DeviceArena copies_arena, acts_arena, dacts_arena, decoder_arena;
    Batch batch;    // the one that model_forward sees next, or has seen
    double loss;    // nats, mean over the supervised positions of the batch
    double targets; // of the update's batches so far
} Model;

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    static char word[16];
    option_word(EIGENVALUES, c->eigenvalues, word, sizeof word);
    return word;
}

// params_plan: the table of parameters. All decay but what makes a step: A_log, skip and the bias
// of dt. Steps start between 1e-3 and 1e-1, above the papers' floor of 1e-4.
static void params_plan(Model *m)
{
    const size_t L = m->L, C = m->C, V = m->V, H = m->H, S = m->S, R = m->R, W = m->W;
    const double c = 1 / sqrt((double)C), h = 1 / sqrt((double)H), r = 1 / sqrt((double)R);
    const double w = 1 / sqrt((double)W);
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(1), DECAY, 1, offsetof(Params, wte)},
        {"norm_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm_w)},
        {"in_w", {L, 2 * H, C}, INIT_UNIFORM(c), DECAY, 1, offsetof(Params, in_w)},
        {"conv_w", {L, H, W}, INIT_UNIFORM(w), DECAY, 1, offsetof(Params, conv_w)},
        {"conv_b", {L, H}, INIT_UNIFORM(w), DECAY, 1, offsetof(Params, conv_b)},
        {"x_w", {L, R + 2 * S, H}, INIT_UNIFORM(h), DECAY, 1, offsetof(Params, x_w)},
        {"dt_w", {L, H, R}, INIT_UNIFORM(r), DECAY, 1, offsetof(Params, dt_w)},
        {"dt_b", {L, H}, INIT_STEP(1e-3, 1e-1), NO_DECAY, 1, offsetof(Params, dt_b)},
        {"A_log", {L, H, S}, INIT_LOG_COUNT, NO_DECAY, 1, offsetof(Params, A_log)},
        {"skip", {L, H}, INIT_ONE, NO_DECAY, 1, offsetof(Params, skip)},
        {"out_w", {L, C, H}, INIT_UNIFORM(h), DECAY, 1, offsetof(Params, out_w)},
        {"head_w", {V, C}, INIT_UNIFORM(c), DECAY, 1, offsetof(Params, head_w)},
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
}

// partial_size: elements of scratch for sums in slices: the largest of all that is summed so.
static size_t partial_size(const Model *m)
{
    const size_t N = m->B * m->T, C = m->C, H = m->H, R = m->R, P = R + 2 * m->S;
    const size_t sizes[] = {2 * H * C, P * H, H * R, C * H};
    size_t most = std::max({token_scratch(N, m->V, C), COLUMN_SLICES * C,
                            CONV_SLICES * H * (m->W + 1), weight_scratch(m->rows, m->Vp * C, 0)});
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        most = std::max(most, weight_scratch(N, sizes[i], 0));
    return most;
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config, m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t H = m->H = config->hidden ? (size_t)config->hidden : 2 * C;
    const size_t S = m->S = (size_t)config->state, W = m->W = (size_t)config->window;
    const size_t R = m->R = config->rank ? (size_t)config->rank : (C + 15) / 16;
    const size_t P = m->P = (R + 2 * S + 7) / 8 * 8, Vp = m->Vp = (V + 31) / 32 * 32;
    const size_t D = m->decode_B = B < 32 ? B : 32, L_window = W > 1 ? L : 0;
    const size_t groups = (H + CHANNELS - 1) / CHANNELS, chunks = scan_chunks(B, B * T);
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    m->range = 1 + config->eigenvalues;
    const DeviceTensor copies[] = {
        DEVICE("in_w", floatX, Copies, in_w, L, 2 * H, C),
        DEVICE("x_w", floatX, Copies, x_w, L, R + 2 * S, H),
        DEVICE("dt_w", floatX, Copies, dt_w, L, H, R),
        DEVICE("out_w", floatX, Copies, out_w, L, C, H),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", float, Acts, x, L + 1, B, T, C), DEVICE("r", floatX, Acts, r, L, B, T, C),
        DEVICE("rstd", float, Acts, rstd, L, B, T), DEVICE("xz", floatX, Acts, xz, L, B, T, 2 * H),
        DEVICE("u", floatX, Acts, u, L, B, T, H),
        SPACED("rank", floatX, P, 0, Acts, rank, L, B, T, R),
        SPACED("bc", floatX, P, R, Acts, bc, L, B, T, 2 * S),
        DEVICE("raw, no bias", floatX, Acts, raw, L, B, T, H),
        DEVICE("states", float, Acts, states, L, scan_states(B, B * T, H, S)),
        DEVICE("h", float, Acts, h, L, B, S, H), DEVICE("g", floatX, Acts, g, L, B, T, H),
        DEVICE("last", floatX, Acts, last, B, T, C),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("dxz", floatX, Dacts, dxz, B, T, 2 * H), DEVICE("du", floatX, Dacts, du, B, T, H),
        DEVICE("dp", floatX, Dacts, dp, B, T, P), DEVICE("draw", floatX, Dacts, draw, B, T, H),
        DEVICE("dg", floatX, Dacts, dg, B, T, H),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("dbc", float, Dacts, work.dbc, groups, B, T, 2 * STATES),
        DEVICE("drates", float, Dacts, work.drates, chunks, H * S + 2 * H),
        DEVICE("carry", float, Dacts, work.carry, chunks, 2, H, STATES),
        DEVICE("sums", float, Dacts, work.sums, S > STATES ? (size_t)3 : 0, B, T, H),
        DEVICE("partial", float, Dacts, partial, partial_size(m)),
    };
    const DeviceTensor decoder[] = {
        DEVICE("h", float, Decoder, h, L, D, S, H), DEVICE("x", float, Decoder, x, D, C),
        DEVICE("window", floatX, Decoder, window, L_window, D, W - 1, H),
        DEVICE("tokens", int, Decoder, tokens, D), DEVICE("rstd", float, Decoder, rstd, D),
        DEVICE("logits", float, Decoder, logits, D, Vp),
    };
    params_plan(m);
    device_plan(&m->copies_arena, "weights in " PRECISION_NAME, ROWS(copies));
    device_plan(&m->acts_arena, "activations", ROWS(acts));
    device_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    device_plan(&m->decoder_arena, "decoding state", ROWS(decoder));
}

// model_copies: which parameters have copies in floatX, and where.
static void model_copies(Model *m)
{
    const size_t L = m->L, C = m->C, H = m->H;
    const Params p = m->params;
    const Copies c = m->copies;
    const WeightCopy copies[] = {{p.in_w, c.in_w, L * 2 * H * C, 0},
                                 {p.x_w, c.x_w, L * (m->R + 2 * m->S) * H, 0},
                                 {p.dt_w, c.dt_w, L * H * m->R, 0},
                                 {p.out_w, c.out_w, L * C * H, 0},
                                 {p.head_w, c.head_w, m->V * C, 0}};
    device_pieces(&m->device, ROWS(copies));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 40 S a channel and layer in the scan, 10 of them forward; an exponential counts as one.
static double model_flops(const Model *m)
{
    const size_t N = m->B * m->T, unread = m->V * m->C * (N - m->rows) / N; // see asked.cuh
    const double weights = (double)(arena_elements(&m->weights.params, "wte") - unread);
    return (double)m->config.training.accumulate * (double)N *
           (6 * weights + 40 * (double)(m->L * m->H * m->S));
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t N = m->B * m->T, n = l * N, C = n * m->C, H = n * m->H, P = n * m->P;
    const Acts a = m->acts;
    return {.x = a.x + C, .rstd = a.rstd + n,
            .states = a.states + l * scan_states(m->B, N, m->H, m->S),
            .h = a.h + l * m->B * m->S * m->H, .r = a.r + C, .xz = a.xz + 2 * H, .u = a.u + H,
            .rank = a.rank + P, .bc = a.bc + P, .raw = a.raw + H, .g = a.g + H};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, H = l * m->H;
    return {.norm_w = p->norm_w + C, .in_w = p->in_w + 2 * H * m->C,
            .conv_w = p->conv_w + H * m->W, .conv_b = p->conv_b + H,
            .x_w = p->x_w + H * (m->R + 2 * m->S), .dt_w = p->dt_w + H * m->R,
            .dt_b = p->dt_b + H, .A_log = p->A_log + H * m->S, .skip = p->skip + H,
            .out_w = p->out_w + C * m->H};
}

// layer_copies: the weights of layer l in floatX.
static Copies layer_copies(const Model *m, size_t l)
{
    const Copies *c = &m->copies;
    const size_t H = l * m->H;
    return {c->in_w + 2 * H * m->C, c->x_w + H * (m->R + 2 * m->S), c->dt_w + H * m->R,
            c->out_w + H * m->C, c->head_w};
}

// block_forward: next (B,T,C), may be k.x, = the block of k.x; fills the layer's activations
// k. The scan starts from `initial` (B,S,H), which may be k.h, where it leaves the last state; the
// convolution from `window` (B,W-1,H). NULL: from zeros.
static void block_forward(const Model *m, Acts k, Params p, Copies w, float *next,
                          const float *initial, floatX *window, size_t B, size_t T)
{
    const size_t N = B * T, C = m->C, H = m->H, S = m->S, R = m->R, P = m->P;
    const ScanWork work = m->dacts.work;
    cudaStream_t stream = m->device.stream;
    rmsnorm_forward(k.r, k.rstd, k.x, p.norm_w, N, C, stream);
    matmul_forward(k.xz, k.r, w.in_w, NULL, N, C, 2 * H, stream);
    conv_forward(k.u, window, k.xz, p.conv_w, p.conv_b, B, T, H, m->W, stream);
    product(k.rank, P, k.u, H, w.x_w, 1, 0, N, H, R + 2 * S, stream); // and bc
    product(k.raw, H, k.rank, P, w.dt_w, 1, 0, N, R, H, stream);
    scan_forward(k.g, k.states, k.h, work.sums, work.carry, k.u, k.raw, k.xz, k.rank, initial,
                 p.A_log, p.dt_b, p.skip, B, T, H, S, R, P, m->range, stream);
    matmul_residual<float>(next, k.x, k.g, w.out_w, NULL, N, H, C, stream);
}

// head_forward: logits (rows,V) = of x (N,C), by way of `last`, x in floatX; of its rows with
// targets (N), NULL: of all, see asked_gather.
static void head_forward(const Model *m, float *logits, floatX *last, const float *x,
                         const int *targets, size_t N, size_t rows)
{
    const size_t n = N * m->C;
    LAUNCH(round_kernel, (n + CONV_THREADS - 1) / CONV_THREADS, CONV_THREADS, 0, m->device.stream,
           last, x, n);
    const floatX *y = asked_gather(m->dacts.asked, last, targets, N, rows, m->C, m->device.stream);
    matmul_residual<float>(logits, NULL, y, m->copies.head_w, NULL, rows, m->C, m->Vp,
                           m->device.stream);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    embed_forward(acts.x, device->inputs, m->params.wte, NULL, m->B, m->T, C, device->stream);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l), layer_copies(m, l),
                      acts.x + (l + 1) * N * C, NULL, NULL, m->B, m->T);
    head_forward(m, acts.logits, acts.last, acts.x + m->L * N * C, device->targets, N, m->rows);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, m->dacts.asked.where, device->input, N, m->rows, m->V, m->Vp,
                 device->stream);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, Copies w, floatX *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, H = m->H, S = m->S, R = m->R, P = m->P;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(g.out_w, 0, NULL, d.partial, dx, k.g, N, H, C, C, 1, stream);
    matmul_backward_input(d.dg, dx, w.out_w, N, H, C, stream);
    scan_backward(d.du, d.draw, d.dxz, d.dp, NULL, g.A_log, g.dt_b, g.skip, d.work, d.dg, NULL,
                  k.states, k.u, k.raw, k.xz, k.rank, p.A_log, p.dt_b, p.skip, B, T, H, S, R, P,
                  m->range, stream);
    product_weight(g.dt_w, d.partial, d.draw, k.rank, P, N, R, H, stream);
    product(d.dp, P, d.draw, H, w.dt_w, 0, 0, N, H, R, stream);
    matmul_backward_weight(g.x_w, 0, NULL, d.partial, d.dp, k.u, N, H, R + 2 * S, P, 1, stream);
    product(d.du, H, d.dp, P, w.x_w, 0, 1, N, R + 2 * S, H, stream);
    conv_backward(d.dxz, g.conv_w, g.conv_b, d.partial, d.du, k.xz, p.conv_w, p.conv_b, B, T, H,
                  m->W, stream);
    matmul_backward_weight(g.in_w, 0, NULL, d.partial, d.dxz, k.r, N, C, 2 * H, 2 * H, 1, stream);
    matmul_backward_input(d.dr, d.dxz, w.in_w, N, C, 2 * H, stream);
    rmsnorm_backward(dx, g.norm_w, d.partial, d.dr, k.x, k.rstd, p.norm_w, N, C, stream);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Params p = m->params, g = m->grads;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(g.head_w, 0, NULL, d.partial, d.dlogits,
                           asked_or(d.asked, m->acts.last), m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, d.dx), d.dlogits, m->copies.head_w, m->rows, C, m->Vp,
                          stream);
    asked_scatter(d.dx, d.asked, N, C, stream);
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &p, l), layer_params(m, &g, l),
                       layer_copies(m, l), d.dx);
    embed_backward(g.wte, NULL, d.partial, d.dx, m->device.inputs, m->B, m->T, m->V, C, stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, H = m->H, W = m->W;
    const Dacts d = m->dacts;
    const Decoder memory = m->decoder;
    float *x = memory.x;
    cudaStream_t stream = m->device.stream;
    Acts k = {.x = x, .rstd = memory.rstd, .r = d.dr, .xz = d.dxz, .u = d.du, .rank = d.dp,
              .raw = d.draw, .g = d.dg};
    if (t == 0)
        CUDA_CHECK(cudaMemsetAsync(m->decoder_arena.base, 0, m->decoder_arena.bytes, stream));
    CUDA_CHECK(cudaMemcpyAsync(memory.tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(x, memory.tokens, m->params.wte, NULL, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        floatX *window = memory.window ? memory.window + l * m->decode_B * (W - 1) * H : NULL;
        k.h = memory.h + l * m->decode_B * m->S * H;
        block_forward(m, k, layer_params(m, &m->params, l), layer_copies(m, l), x, k.h, window, D,
                      1);
    }
    head_forward(m, memory.logits, d.dx, x, NULL, D, D);
    return device_logits(&m->device, memory.logits, D, m->V, m->Vp, m->decode_B);
}

// ------------------------------------------------------------------------------------------------
// [train] The loop: memory, batches, updates, evaluation, checkpoints.  (shared)

// model_bytes: what model_alloc will allocate, but for the batch's tokens.
static size_t model_bytes(const Model *m)
{
    return device_bytes(&m->weights, m->B, m->T) + m->copies_arena.bytes + m->acts_arena.bytes +
           m->dacts_arena.bytes + m->decoder_arena.bytes;
}

// model_alloc: allocate a planned model and draw its initial weights from the seed.
static void model_alloc(Model *m)
{
    weights_alloc(&m->weights, NULL, NULL, m->config.training.seed);
    device_start(&m->device, &m->weights, &m->params, &m->grads, m->B, m->T);
    device_alloc(&m->copies_arena, &m->copies);
    CUDA_CHECK(cudaMemset(m->copies_arena.base, 0, m->copies_arena.bytes)); // what stays 0
    device_alloc(&m->acts_arena, &m->acts);
    device_alloc(&m->dacts_arena, &m->dacts);
    device_alloc(&m->decoder_arena, &m->decoder);
    model_copies(m);
    m->batch = m->device.slots[0].batch;
}

// model_free: give everything back.
static void model_free(Model *m)
{
    weights_free(&m->weights);
    CUBLAS_CHECK(cublasLtDestroy(gemm_handle));
    CUDA_CHECK(cudaDeviceReset()); // with all that is on it
}

// model_upload: the device's weights and moments = the host's.
static void model_upload(Model *m)
{
    device_weights_up(&m->device, &m->weights);
    pieces_copy(&m->device);
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
}

// model_zero_grad: clear the gradients of the parameters.
static void model_zero_grad(Model *m)
{
    pieces_zero(&m->device);
}

// load_batch: the slot's inputs, targets = batch `number` of STREAM_TRAIN or STREAM_EVAL, of its
// own B and T. And what the device is told: of training, the update it belongs to, in which batches
// count by their targets; until the last of them is known a target counts 1 / (B T).
static void load_batch(Model *m, Slot *slot, uint64_t stream, long number)
{
    const Config *c = &m->config;
    const Training *t = &c->training;
    const int n = stream == STREAM_TRAIN ? t->accumulate : 1, part = (int)(number % n);
    task_batch(m->task, &c->task_options, t->seed, stream, number, &slot->batch);
    batch_check(&slot->batch, m->V);
    m->B = slot->batch.B, m->T = slot->batch.T, m->rows = asked_rows(m->asked, m->B, m->T);
    const double step = (double)(number / n), N = (double)(m->B * m->T);
    const double count = batch_targets(&slot->batch);
    m->targets = part ? m->targets + count : count;
    slot->lr = learning_rate(t, number / n);
    *slot->input = {slot->lr, 1 / (1 - pow(t->beta1, step + 1)), 1 / (1 - pow(t->beta2, step + 1)),
                    n > 1 ? 1 / N : count > 0 ? 1 / count : 0,
                    n == 1 ? 1 : m->targets > 0 ? N / m->targets : 0, part == 0};
    m->batch = slot->batch;
}

// run_batch: forward and, if asked, backward of one batch, now; the device has nothing else to do.
static void run_batch(Model *m, uint64_t stream, long number, int backward)
{
    Slot *slot = &m->device.slots[0];
    load_batch(m, slot, stream, number);
    slot_up(slot, &m->device);
    model_zero_grad(m);
    model_forward(m);
    if (backward)
        model_backward(m);
    slot_down(slot, &m->device);
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
    m->loss = slot->result->loss;
}

// stop_if_bad: die at step `step` over a loss or gradient norm that is not finite, of the `n`
// batches from `number` on. The device has changed no weight since, so they are run again, to name
// the first value that is not.
static void stop_if_bad(Model *m, const char *what, double value, long step, uint64_t stream,
                        long number, int n)
{
    Arena acts;
    if (is_finite_bits(value))
        return;
    CUDA_CHECK(cudaStreamSynchronize(m->device.stream));
    for (int i = 0; i < n; i++) {
        run_batch(m, stream, number + i, stream == STREAM_TRAIN);
        if (!is_finite_bits(m->loss))
            break;
    }
    device_weights_down(&m->weights, &m->device);
    device_copy_out(&acts, &m->acts_arena);
    training_stop_if_bad(what, value, step, &m->weights, &acts);
}

// update_kernels: the update that gradients so far give; they are cleared for the next.
static void update_kernels(Model *m)
{
    const Training *t = &m->config.training;
    Device *d = &m->device;
    gradient_norm(d->result, &d->weights.grads, &d->pieces, d->input, t->grad_clip, d->stream);
    adamw(&d->weights, t, &d->pieces, d->input, d->result, d->stream);
    model_zero_grad(m);
}

// train_graphs: what the device does in a step, as graphs. Its kernels have been loaded by a run of
// the same batch. One batch and the update are one graph, several two.
static void train_graphs(Model *m, long step)
{
    Device *d = &m->device;
    const int n = m->config.training.accumulate;
    run_batch(m, STREAM_TRAIN, step * n, 1);
    model_zero_grad(m);
    graph_begin(d->stream);
    model_forward(m);
    model_backward(m);
    if (n == 1)
        update_kernels(m);
    d->graph = graph_end(d->stream);
    if (n == 1)
        return;
    graph_begin(d->stream);
    update_kernels(m);
    d->update = graph_end(d->stream);
}

// train_step: give the device training step `step`: its batches, the update, results back. Nothing
// waits for it here but, with --accumulate, each of its batches for the one before.
static void train_step(Model *m, long step)
{
    Device *d = &m->device;
    Slot *slot = &d->slots[step % SLOTS];
    const int n = m->config.training.accumulate;
    if (!d->graph && !TIMING_ON)
        train_graphs(m, step);
    if (d->started == d->ended)
        d->ended_at = seconds_now();
    slot->acc = 0;
    for (int i = 0; i < n; i++) {
        if (i) {
            slot_down(slot, d);
            CUDA_CHECK(cudaStreamSynchronize(d->stream));
            slot->acc += task_score(m->task, &slot->batch, slot->batch.B);
        }
        load_batch(m, slot, STREAM_TRAIN, step * n + i);
        slot_up(slot, d);
        if (TIMING_ON) {
            model_forward(m);
            model_backward(m);
        } else
            CUDA_CHECK(cudaGraphLaunch(d->graph, d->stream));
    }
    if (TIMING_ON)
        update_kernels(m);
    else if (n > 1)
        CUDA_CHECK(cudaGraphLaunch(d->update, d->stream));
    slot_down(slot, d);
    CUDA_CHECK(cudaEventRecord(slot->done, d->stream));
    d->started = step + 1;
}

// train_step_end: wait for the oldest step that the device was given; row = what is logged. Loss
// and accuracy are before the update.
static void train_step_end(Model *m, LogRow *row)
{
    Device *d = &m->device;
    const long step = d->ended;
    const int n = m->config.training.accumulate;
    const Slot *slot = &d->slots[step % SLOTS];
    CUDA_CHECK(cudaEventSynchronize(slot->done));
    const double now = seconds_now(), seconds = now - d->ended_at;
    const StepResult r = *slot->result;
    d->ended = step + 1;
    d->ended_at = now;
    stop_if_bad(m, "loss", r.loss, step, STREAM_TRAIN, step * n, n);
    stop_if_bad(m, "gradient norm", r.norm, step, STREAM_TRAIN, step * n, n);
    const size_t B = slot->batch.B, T = slot->batch.T;
    const double acc = (slot->acc + task_score(m->task, &slot->batch, B)) / n;
    *row = log_train_row(step, r.loss, acc, slot->lr, r.norm, seconds, (size_t)n * B * T);
}

// evaluate: loss and accuracy on sequences never trained on, each prediction given the true past.
static LogRow evaluate(Model *m, long step)
{
    Evaluation sum = {};
    const TaskOptions *options = &m->config.task_options;
    for (long i = 0; i < task_eval_batches(m->task, options, m->batch.rows); i++) {
        run_batch(m, STREAM_EVAL, i, 0);
        stop_if_bad(m, "loss on fresh sequences", m->loss, step, STREAM_EVAL, i, 1);
        evaluation_add(&sum, m->task, options, &m->batch, m->loss);
    }
    return evaluation_row(&sum, step);
}

// decode: said (D,n) = the token chosen at each position when the model reads the first `given`
// tokens of inputs (D,n) and then what it said. Returns n, or how far it came when interrupted.
static size_t decode(Model *m, int *said, const int *inputs, size_t given, size_t n, size_t D,
                     Sampler sampler)
{
    int *tokens = (int *)alloc_zero(D, sizeof(int), "tokens");
    size_t t = 0;
    for (; t < n && !*training_interrupted(); t++) {
        for (size_t i = 0; i < D; i++)
            tokens[i] = t < given ? inputs[i * n + t] : said[i * n + t - 1];
        const float *logits = model_decode(m, tokens, t, D), *x = logits;
        for (size_t i = 0; i < D; i++, x += m->V)
            said[i * n + t] = sampler_choose(&sampler, x, sizeof(float), m->V, i, t);
    }
    free(tokens);
    return t;
}

// greedy: accuracy on decode_B sequences when the model reads what it said; -1 if interrupted.
static double greedy(Model *m)
{
    size_t prompt = m->task->shape(&m->config.task_options).prompt;
    decode(m, m->batch.predictions, m->batch.inputs, prompt, m->T, m->decode_B, {});
    return *training_interrupted() ? -1 : task_score(m->task, &m->batch, m->decode_B);
}

// dump: write training batch 0 with its activations and gradients to the file of --dump.
static void dump(Model *m, const Options *options)
{
    Arena acts;
    run_batch(m, STREAM_TRAIN, 0, 1);
    stop_if_bad(m, "loss", m->loss, 0, STREAM_TRAIN, 0, 1);
    device_weights_down(&m->weights, &m->device);
    device_copy_out(&acts, &m->acts_arena);
    dump_write(m->config.training.dump, m->batch.inputs, m->batch.targets, m->B, m->T, m->loss,
               &m->weights, &acts, options, ARCHITECTURE);
    arena_free(&acts);
}

enum { MFU_STEPS = 50 }; // runs of fewer print no MFU

// train: take an allocated model through its configuration until the steps are done, --stop-at is
// reached or Ctrl-C is pressed; evaluate, save and print RESULT. The device is given a step before
// the one before it is done; it is waited for where its result decides what comes next.
static void train(Model *m, const Options *options)
{
    const Training *t = &m->config.training;
    const char *task = m->task->name, *model = model_name(&m->config);
    Log log;
    LogRow row = {}, val = {};
    char checkpoint[LOG_PATH];
    training_load(t, &m->weights, options, ARCHITECTURE);
    model_upload(m);
    if (t->dump) {
        dump(m, options);
        if (t->steps == 0)
            return;
    }
    long step = training_start(&log, checkpoint, t, &m->weights, options, ARCHITECTURE, task,
                               model, m->device.name);
    m->device.started = m->device.ended = step;
    model_upload(m);
    model_zero_grad(m);
    for (;; step++) {
        const int eval = t->eval_every && step && step % t->eval_every == 0;
        const int save = t->save_every && step % t->save_every == 0;
        int last = training_over(t, &log, step);
        const long wait = last || eval || save || t->stop_at > 0 ? step : step - SLOTS + 1;
        while (m->device.ended < wait) {
            train_step_end(m, &row);
            log_step(&log, &row, t->steps, (row.step + 1) % t->print_every == 0);
        }
        last = last || (t->stop_at > 0 && training_over(t, &log, step));
        if (last || eval) {
            val = evaluate(m, step);
            log_eval(&log, &val);
        }
        if (log.csv && (last || (log.steps && save))) {
            device_weights_down(&m->weights, &m->device);
            checkpoint_save(checkpoint, &m->weights, options, ARCHITECTURE, step);
        }
        if (last)
            break;
        timing_clear(m->device.stream);
        train_step(m, step);
        if (log.steps == 4)
            timing_report("a step");
    }
    const TaskOptions *o = &m->config.task_options;
    TaskShape shape = m->task->shape(o);
    double acc = m->decode_B && shape.prompt < m->T ? greedy(m) : -1;
    if (acc >= 0)
        task_show(m->task, o, m->batch.inputs, m->batch.predictions);
    if (o->sample && !*training_interrupted())
        task_show_sample(m->task, o, decode(m, o->said, o->read, o->prompt_n, o->read_n, 1,
                                            task_sampler(o, t->seed)));
    if (log.steps >= MFU_STEPS)
        gemm_print_mfu(model_flops(m), log_ms_per_step(&log), FLOATX_TYPE, m->device.stream);
    training_result(&log, task, model, shape.size_name, shape.size, &val, acc,
                    log_ms_per_step(&log));
    log_close(&log);
}

// ------------------------------------------------------------------------------------------------
// [main] Options, presets, start.  (ports train_mamba.c[main])

#define PAPER "--channels 128 "
#define ANSWERS PAPER "--batch-size 256 --lr 1e-3 --lr-min 1e-6 --eval-batches 211 "
#define PARITY_RUN ANSWERS "--task parity --layers 2 --steps 20000 --warmup 2000 --grad-clip 0"
#define MODULAR_RUN ANSWERS "--layers 3 --steps 100000 --warmup 10000 --weight-decay 0.1 --task "
#define WORDS PAPER "--layers 5 --batch-size 512 --steps 60000 --lr 1e-4 --schedule constant " \
    "--warmup 0 --weight-decay 0.01 --eval-batches 30 --task "
static const Preset PRESETS[] = {
    {"small", "--max-length 24 --eval-min-length 25 --eval-max-length 80 --eval-batches 32",
     "parity, short"},
    {"main", "--task copying --string-size 6 --lr 4e-3 --steps 600", "6 letters on two cores"},
    {"parity", PARITY_RUN, "Table 3, at the authors' batch of 256 and 20000 steps"},
    {"modular", MODULAR_RUN "modular", "Table 3, at a batch of 256; the paper's is 1024"},
    {"brackets", MODULAR_RUN "brackets", "Table 3, at a batch of 256"},
    {"s5-swaps", WORDS "s5 --elements swaps", "Fig. 4; the paper takes 312500 steps"},
    {"z60", WORDS "z60", "Fig. 8"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"eigenvalues", OPT_CHOICE, &c->eigenvalues, "signed", 0, 0, EIGENVALUES, DEFINES_MODEL,
         "of a step: in [0,1] or [-1,1]"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "of the stream"},
        {"hidden", OPT_INT, &c->hidden, "0", 0, 1 << 20, "H", DEFINES_MODEL, "inside, 0 = 2 C"},
        {"state", OPT_INT, &c->state, "16", 1, 1 << 16, "S", DEFINES_MODEL, "of a channel"},
        {"rank", OPT_INT, &c->rank, "0", 0, 1 << 16, "R", DEFINES_MODEL, "of dt, 0 = C / 16"},
        {"window", OPT_INT, &c->window, "4", 1, WINDOW_MOST, "W", DEFINES_MODEL, "of conv"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    options_default(options, "task", "parity");
    options_default(options, "lr", "2e-3");
    options_default(options, "steps", "1000");
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    const int H = c->hidden ? c->hidden : 2 * c->channels;
    if (c->rank > H)
        die(EXIT_USAGE, "--rank %d: expected at most the %d channels inside a block", c->rank, H);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g MB, %.3g FLOPs an update", 1e-6 * model_bytes(&m), model_flops(&m));
}

#ifndef TESTING
// main: parse, plan, print what it will cost, train.
int main(int argc, char **argv)
{
    static Model model;
    static Options options;
    training_begin();
    config_options(&options, &config);
    options_parse(&options, PRESETS, argc, argv,
                  "train_mamba_gpu: Mamba on the GPU. Without options: a small parity.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    const char *gpu = cuda_start();
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    char name[64];
    snprintf(name, sizeof name, "%s, " PRECISION_NAME, model_name(&config));
    training_print(name, &model.weights, "wte", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model.device.name = gpu;
    cuda_memory_check(model_bytes(&model));
    const size_t free_bytes = cuda_memory_free();
    model_alloc(&model);
    printf("GPU memory: %.2f GiB taken\n", (double)(free_bytes - cuda_memory_free()) / GIB);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
