// train_deltanet.cu: DeltaNet on the GPU, the same model as train_deltanet.c, which says what is
// computed and is what this is held against (dev/test_cuda.sh, `make test-cuda`).
//
//   e_t = v_t - S_{t-1} k_t,   S_t = S_{t-1} + beta_t e_t k_t^T,   o_t = S_t q_t / sqrt(HS)
//   q, k, v = SiLU(conv(W_qkv r)),  q, k of length 1,  beta = range sigmoid(W_b r),  range 1 or 2
//   x += W_proj norm_head(o);  x += W_down (SiLU(g) y),  g, y = W_gu norm(x)      r = norm(x)
//   norm is RMSNorm, eps 1e-6                                        [arXiv 2406.06484, 2411.12537]
//
// Token by token all is fp32 but q, k and v. A thread has 32 columns of a row of S in registers, so
// that a head of 32 is one warp. A row needs no other row in the forward pass; in the backward the
// gradients of q and k are sums over rows. The forward keeps u = beta e; the backward walks from
// S_T to S_0: S_{t-1} = S_t - u_t k_t^T inverts nothing and amplifies no error.
//
// By chunks of 64 (BF16, mma.sync), rows Q, K, V, O of a chunk and their gradients, b = diag(beta),
// s = 1 / sqrt(HS), S, D before and S', D' after it, D the gradient of S [2406.06484, WY form]:
//   A = strictly lower (b K K^T),  M = (I + A)^-1 b,  P = lower (Q K^T) with its diagonal
//   E = V - K S^T,  N = M E,  O = s (Q S^T + P N),  S' = S + N^T K        row i of N is u_i
//   dN = s P^T dO + K D'^T,  dV = M^T dN,  D = D' + s dO^T Q - dV^T K
//   X = s lower (dO N^T),  F = strictly lower (dV N^T),  dbeta_i = dV_i . N_i / beta_i^2
//   dQ = X K + s dO S,     dK = X^T Q + N D' - dV S - (F + F^T) K
// The paper's W = M K and U = M V are never made: nothing to store, and N is no difference of two
// rounded numbers. Nor needs the gradient an inverse: of (I + A) N = b E, that of k_i . k_j, j < i,
// is - dV_i . N_j.
//
// nvcc -DPRECISION_BF16 (train_deltanet_gpu): weights and activations in bf16, through the typedef
// floatX; fp32: master weights, the residual stream, which is kept of every block, beta and all
// sums. Keys are normalized in fp32 and then rounded: |k|^2 is 1 up to 4e-4. The gradient of the
// residual stream is in bf16. Without it (train_deltanet_gpu_fp32) all is fp32, no TF32.
//
// A step is one CUDA graph without a host in it: the host makes the next batch meanwhile, and reads
// loss, norm and predictions of the step before. Only --accumulate N waits between its batches. No
// float is added atomically: same bits every time. One pass over memory is one kernel: convolution,
// SiLU, length of q and k, beta; and the same backward, which computes again what stands between.
// Residuals are added in the epilogue of a matrix product, for which W_qkv and W_b are one matrix.
//
// Sections: [mix] the delta rule; [block] convolution, norms, SwiGLU;
// [layers] matrix product, embedding, cross-entropy; [model]; [train]; [main]. [optimizer] AdamW
// and the sums over rows are in util/.
//
// Figures (dev/figures/; README.md has what was measured):
//   ./train_deltanet_gpu --preset parity, modular, brackets [--eigenvalues nonneg]       Table 3
//   ./train_deltanet_gpu --preset s5-swaps, s5-triples, s5, s5-tokens                    Fig. 4
// Differences from the papers: those of train_deltanet.c.

#include "data/tasks.h"
#include "util/asked.cuh"
#include "util/chunk.cuh"
#include "util/optimizer.cuh"
#include "util/sums.cuh" // and with it warp, cuda_training, cuda, gemm, training
#pragma nv_diag_suppress 177    // [layers] has more than this model needs

// ------------------------------------------------------------------------------------------------
// [mix] The delta rule: a matrix S for each head, by tokens or by chunks of them.

#define ARCHITECTURE "deltanet"
enum { NONNEG, SIGNED }; // the largest beta is 1, 2
enum { AUTO, RECURRENT, CHUNK };
enum { CHUNK_THREADS = 128 }; // that take a chunk, of CS = 64 tokens

// ---- token by token: a block a head, P threads a row of S, with 32 columns each in registers

enum { COLS = 32, HEAD_MOST = 4 * COLS };

// WITH_HEAD: the statement with P as a constant, and WIDTH = 32 P, the width of S: HS rounded up.
#define WITH_HEAD(HS, ...) \
    do { \
        if ((HS) <= COLS) { enum { P = 1, WIDTH = COLS }; __VA_ARGS__; } \
        else if ((HS) <= 2 * COLS) { enum { P = 2, WIDTH = 2 * COLS }; __VA_ARGS__; } \
        else { enum { P = 4, WIDTH = 4 * COLS }; __VA_ARGS__; } \
    } while (0)

// column_of: which column of S the thread's element n is. Neighbours take turns by four, so that
// they read neighbouring float4 of a key.
template <int P> static __device__ inline int column_of(int n)
{
    return (n / 4 * P + threadIdx.x % P) * 4 + n % 4;
}

// lanes_sum: sum of x over `lanes` neighbours, a power of two, to all of them.
static __device__ inline float lanes_sum(float x, int lanes)
{
    for (int i = lanes / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// place_in_state: of the thread's element n in S (HS,HS); -1: beyond the head.
template <int P> static __device__ inline int place_in_state(int n, int HS)
{
    const int row = threadIdx.x / P, column = column_of<P>(n);
    return row < HS && column < HS ? row * HS + column : -1;
}

// What a thread needs of a position: k and q at its column x = threadIdx.x, the others at its row;
// 0 beyond the head.
typedef struct {
    float k, q, v, u, dout, beta;
} Position;

// position_fetch: position `at` (b T + t) of head h; u and dout NULL: not needed.
static __device__ inline Position
position_fetch(const floatX *__restrict__ qkv, const float *__restrict__ beta,
               const float *__restrict__ u, const floatX *__restrict__ dout, size_t at, int h,
               int row, int NH, int HS)
{
    const int x = threadIdx.x, C = NH * HS;
    Position p = {0, 0, 0, 0, 0, beta[at * NH + h]};
    qkv += at * 3 * C + h * HS;
    if (x < HS) {
        p.q = (float)qkv[x];
        p.k = (float)qkv[C + x];
    }
    if (row < HS) {
        p.v = (float)qkv[2 * C + row];
        p.u = u ? u[at * C + h * HS + row] : 0;
        p.dout = dout ? (float)dout[at * C + h * HS + row] : 0;
    }
    return p;
}

// recurrent_forward_kernel: see delta_forward. k and q of a position are in shared memory, those of
// the next one on their way.
template <int P>
static __global__ void __launch_bounds__(COLS * P * P)
recurrent_forward_kernel(floatX *out, float *u, float *final, const floatX *qkv, const float *beta,
                         const float *initial, int T, int NH, int HS)
{
    __shared__ __align__(16) float shared[2][2][COLS * P];
    const int x = threadIdx.x, row = x / P, h = blockIdx.x % NH;
    const size_t at0 = (size_t)(blockIdx.x / NH) * T, head = (size_t)blockIdx.x * HS * HS;
    const float scale = rsqrtf((float)HS);
    float S[COLS];
#pragma unroll
    for (int n = 0; n < COLS; n++) {
        const int i = place_in_state<P>(n, HS);
        S[n] = i < 0 || !initial ? 0 : initial[head + i];
    }
    Position next = position_fetch(qkv, beta, NULL, NULL, at0, h, row, NH, HS);
    for (int t = 0; t < T; t++) {
        const Position p = next;
        if (x < COLS * P) {
            shared[t % 2][0][x] = p.k;
            shared[t % 2][1][x] = p.q;
        }
        if (t + 1 < T)
            next = position_fetch(qkv, beta, NULL, NULL, at0 + t + 1, h, row, NH, HS);
        __syncthreads(); // who still reads position t - 1 reads the other half
        const float4 *k = (const float4 *)shared[t % 2][0] + x % P;
        const float4 *q = (const float4 *)shared[t % 2][1] + x % P;
        float dot[4] = {}, o[4] = {};
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            const float4 k4 = k[n / 4 * P];
            const float k_n[] = {k4.x, k4.y, k4.z, k4.w};
            dot[n % 4] += S[n] * k_n[n % 4];
        }
        const float u_t = p.beta * (p.v - lanes_sum(dot[0] + dot[1] + (dot[2] + dot[3]), P));
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            const float4 k4 = k[n / 4 * P], q4 = q[n / 4 * P];
            const float k_n[] = {k4.x, k4.y, k4.z, k4.w}, q_n[] = {q4.x, q4.y, q4.z, q4.w};
            S[n] += u_t * k_n[n % 4];
            o[n % 4] += S[n] * q_n[n % 4];
        }
        const float o_t = scale * lanes_sum(o[0] + o[1] + (o[2] + o[3]), P);
        const size_t to = ((at0 + t) * NH + h) * HS + row;
        if (x % P == 0 && row < HS) {
            out[to] = (floatX)o_t;
            if (u)
                u[to] = u_t;
        }
    }
#pragma unroll
    for (int n = 0; n < COLS; n++)
        if (place_in_state<P>(n, HS) >= 0)
            final[head + place_in_state<P>(n, HS)] = S[n];
}

// rows_reduce: sums of x over a warp's 32 / P rows: P of the columns, x[0] .. x[P-1], remain with
// each lane, elements n, n + 1, ... of its part, n = lane - lane % P. A lane gives its neighbour at
// distance N half of the 2 N elements that it has, and adds what it gets to the half that it keeps.
template <int P> static __device__ inline void rows_reduce(float (&x)[COLS])
{
#pragma unroll
    for (int N = COLS / 2; N >= P; N /= 2) {
        const bool upper = threadIdx.x & N;
#pragma unroll
        for (int n = 0; n < COLS / 2; n++)
            if (n < N) {
                const float low = x[n], high = x[n + N];
                x[n] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, N);
            }
    }
}

// recurrent_backward_kernel: see delta_backward. S and its gradient G go back a position at a time;
// with du = G k once G has the output's part: dv = beta du, dbeta = du e, dk = G^T u - S_{t-1}^T
// dv. Sums over the rows of a block go through shared memory where it is more than one warp.
template <int P>
static __global__ void __launch_bounds__(COLS * P * P)
recurrent_backward_kernel(floatX *dqkv, float *dbeta, float *dinitial, const floatX *dout,
                          const float *dfinal, const float *u, const float *final,
                          const floatX *qkv, const float *beta, int T, int NH, int HS)
{
    enum { WIDTH = COLS * P, WARPS = P * P };
    __shared__ __align__(16) float shared[2][2][WIDTH];
    __shared__ float sums[WARPS][2 * WIDTH];
    __shared__ float betas[WARPS];
    const int x = threadIdx.x, lane = x % WARP, warp = x / WARP, row = x / P;
    const int h = blockIdx.x % NH, C = NH * HS;
    const size_t at0 = (size_t)(blockIdx.x / NH) * T, head = (size_t)blockIdx.x * HS * HS;
    const float scale = rsqrtf((float)HS);
    float S[COLS], G[COLS], dq[COLS], dk[COLS];
#pragma unroll
    for (int n = 0; n < COLS; n++) {
        const int i = place_in_state<P>(n, HS);
        S[n] = i < 0 ? 0 : final[head + i];
        G[n] = i < 0 || !dfinal ? 0 : dfinal[head + i];
    }
    Position next = position_fetch(qkv, beta, u, dout, at0 + T - 1, h, row, NH, HS);
    for (int t = T - 1; t >= 0; t--) {
        const Position p = next;
        const size_t at = at0 + t;
        floatX *to = dqkv + at * 3 * C + h * HS;
        if (x < WIDTH) {
            shared[t % 2][0][x] = p.k;
            shared[t % 2][1][x] = p.q;
        }
        if (t > 0)
            next = position_fetch(qkv, beta, u, dout, at - 1, h, row, NH, HS);
        __syncthreads();
        const float4 *k = (const float4 *)shared[t % 2][0] + x % P;
        const float4 *q = (const float4 *)shared[t % 2][1] + x % P;
        const float d = scale * p.dout;
        float du[4] = {}, old[4] = {};
#pragma unroll
        for (int n = 0; n < COLS; n++)
            dq[n] = d * S[n];
        rows_reduce<P>(dq);
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            const float4 k4 = k[n / 4 * P], q4 = q[n / 4 * P];
            const float k_n[] = {k4.x, k4.y, k4.z, k4.w}, q_n[] = {q4.x, q4.y, q4.z, q4.w};
            G[n] += d * q_n[n % 4];
            S[n] -= p.u * k_n[n % 4];
            du[n % 4] += G[n] * k_n[n % 4];
            old[n % 4] += S[n] * k_n[n % 4];
        }
        const float du_t = lanes_sum(du[0] + du[1] + (du[2] + du[3]), P), dv = p.beta * du_t;
        const float e = p.v - lanes_sum(old[0] + old[1] + (old[2] + old[3]), P);
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            const float4 k4 = k[n / 4 * P];
            const float k_n[] = {k4.x, k4.y, k4.z, k4.w};
            dk[n] = p.u * G[n] - dv * S[n];
            G[n] -= dv * k_n[n % 4];
        }
        rows_reduce<P>(dk);
        if (x % P == 0 && row < HS)
            to[2 * C + row] = (floatX)dv;
        float dbeta_x = warp_sum(x % P ? 0 : du_t * e);
        if constexpr (WARPS == 1) {
            if (x < HS) {
                to[x] = (floatX)dq[0];
                to[C + x] = (floatX)dk[0];
            }
        } else {
#pragma unroll
            for (int i = 0; i < P; i++) {
                const int column = column_of<P>(lane - lane % P + i);
                sums[warp][column] = dq[i];
                sums[warp][WIDTH + column] = dk[i];
            }
            if (lane == 0)
                betas[warp] = dbeta_x;
            __syncthreads(); // the barrier of the next position keeps them until they are read
            float sum = 0;
            for (int w = 0; w < WARPS && x < 2 * WIDTH; w++)
                sum += sums[w][x];
            if (x < 2 * WIDTH && x % WIDTH < HS)
                to[x / WIDTH * C + x % WIDTH] = (floatX)sum;
            for (int w = 1; w < WARPS && x == 0; w++)
                dbeta_x += betas[w];
        }
        if (x == 0)
            dbeta[at * NH + h] = dbeta_x;
    }
#pragma unroll
    for (int n = 0; n < COLS; n++)
        if (dinitial && place_in_state<P>(n, HS) >= 0)
            dinitial[head + place_in_state<P>(n, HS)] = G[n];
}

#ifdef PRECISION_BF16
// ---- 64 tokens at a time on tensor cores, heads of 8, 16, ..., 128 channels.
// A kernel over all chunks makes M and P. S, or D on the way back, runs through the chunks of a
// head in registers: what S does to a row of values it does without the others, so a warp has 16
// rows of S for good, 16 columns of V, E, N and O, and works on the transposes: E^T = V^T - S K^T,
// N^T = E^T M^T, O^T = s (S Q^T + N^T P^T), S += N^T K: what one product leaves in registers is the
// left operand of the next. Where heads are few, four warps share this. A last kernel over all
// chunks makes dq, dk and dbeta.
// A, M by substitution, S and D are fp32. What S and D are made of, M, E, N, dN and dV, enters
// those products as the sum of two bf16 numbers, all else as one. For repeated keys and beta near 2
// rounding M costs a tenth of the output; N and dV rounded, an error that grows as sqrt(T).

// Elements of `pairs` a chunk; between rows of the fp32 arrays of chunk_pairs_kernel: A by columns,
// M / beta by rows.
enum { PAIRS = 3 * CS * CS, LDA = CS + 4, LDM = CS + 16 };
#define BETA_LEAST 9.094947e-13f // 2^-40 in the place of 0: moves nothing and can be divided by

// Shared memory, elements of bf16 or bytes. ROWS: a tile of 64 rows. chunk_pairs_kernel: two tiles
// or Tm, then A and beta. WALK: a chunk, but for 16 columns of x a warp. SHARED: S, E and N, of 16
// rows, with low parts. chunk_grads_kernel: four tiles, the last as large as X and F, and S.
template <int WIDTH> struct Space {
    enum { ROWS = CS * (WIDTH + 8), LAST = (int)ROWS > 2 * (int)TILE ? (int)ROWS : 2 * (int)TILE };
    enum { TM = (int)ROWS > CS * (int)LDM ? 2 * ROWS : 2 * CS * LDM };
    enum { PAIRS_BYTES = 2 * TM + 4 * CS * (LDA + 1), WALK = 2 * ROWS + 3 * TILE + CS * 8 };
    enum { SHARED = 16 * (WIDTH + 8) + 64 * LDC };
    enum { S_AT = 3 * ROWS + LAST, GRADS_BYTES = 2 * (S_AT + WIDTH * (WIDTH + 8)) };
};

// pairs_fetch: start copying a chunk's M (high and low part) and P into three tiles; of the 16x16
// blocks above the diagonal, which nobody reads, nothing.
template <int THREADS>
static __device__ inline void pairs_fetch(floatX *tile, const floatX *pairs)
{
#pragma unroll
    for (int i = threadIdx.x; i < PAIRS / 8; i += THREADS) {
        const int r = i / 8, c = i % 8;
        if (c / 2 <= r % CS / 16)
            copy_async(tile + r * LDC + c * 8, pairs + i * 8, true);
    }
}

// subtract: x_i -= a_i y for i = first .. 15; a: shared memory, at a multiple of 16 bytes.
static __device__ inline void subtract(float x[16], const float *a, float y, int first)
{
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const Pack<float, 4> f = *(const Pack<float, 4> *)(a + i);
#pragma unroll
        for (int k = i; k < i + 4; k++)
            x[k] -= k < first ? 0 : f.v[k - i] * y;
    }
}

// substitute: M of a chunk, its high and low part (64,64) =, from A by columns: (I + A) Tm = I row
// by row, M = Tm diag(beta). A warp has 16 columns, which nobody else needs, a column two lanes,
// that share the products with rows of earlier blocks of 16. Tm: shared memory.
static __device__ inline void substitute(floatX *hi, float *Tm, const float *A, const float *beta)
{
    const int lane = threadIdx.x % WARP, half = lane / 16;
    const int first = threadIdx.x / WARP * 16, c = first + lane % 16;
    for (int row = first; row < CS; row += 16) {
        float x[16] = {};
#pragma unroll 2
        for (int j = first + half; j < row; j += 2)
            subtract(x, A + j * LDA + row, Tm[j * LDM + c], 0);
#pragma unroll
        for (int i = 0; i < 16; i++)
            x[i] += __shfl_xor_sync(~0u, x[i], 16) + (row + i == c ? 1 : 0);
#pragma unroll
        for (int j = 0; j < 15; j++)
            subtract(x, A + (row + j) * LDA + row, x[j], j + 1);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i % 2 == half) {
                const size_t at = (size_t)(row + i) * CS + c;
                const float m = x[i] * beta[c];
                Tm[(row + i) * LDM + c] = x[i];
                hi[at] = (floatX)m;
                hi[CS * CS + at] = (floatX)(m - (float)(floatX)m);
            }
        __syncwarp();
    }
}

// chunk_pairs_kernel: a block a chunk, a warp 16 rows of it: pairs (B,NH,NC,3,64,64) = M, high and
// low part, and P; 16x16 blocks above the diagonal stay as they are.
template <int WIDTH>
static __global__ void __launch_bounds__(CHUNK_THREADS)
chunk_pairs_kernel(floatX *pairs, const floatX *qkv, const float *beta, int T, int NH, int HS)
{
    enum { LD = WIDTH + 8, TM = Space<WIDTH>::TM };
    extern __shared__ __align__(16) floatX tiles[]; // k, q [64][LD], then Tm; A [64][64], beta [64]
    floatX *ks = tiles, *qs = ks + CS * LD;
    float *Tm = (float *)tiles, *A = Tm + TM / 2, *betas = A + CS * LDA;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, C = NH * HS;
    const int chunks = (T + CS - 1) / CS, h = blockIdx.x / chunks % NH;
    const int t0 = blockIdx.x % chunks * CS, rows = T - t0;
    const size_t token = (size_t)(blockIdx.x / chunks / NH) * T + t0, at = token * 3 * C + h * HS;
    float a[8][4] = {}, p[8][4] = {};
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(ks, qkv + at + C, 3 * C, rows, HS);
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(qs, qkv + at, 3 * C, rows, HS);
    for (int i = threadIdx.x; i < CS; i += CHUNK_THREADS)
        betas[i] = fmaxf(i < rows ? beta[(token + i) * NH + h] : 0, BETA_LEAST);
    pairs += (size_t)blockIdx.x * PAIRS;
    copy_wait();
    __syncthreads();
    const int own = 16 * warp * LD + row_at(lane, LD);
    add_dots<WIDTH>(a, Rows{ks + own}, ks + column_at(lane, LD), warp);
    add_dots<WIDTH>(p, Rows{qs + own}, ks + column_at(lane, LD), warp);
    __syncthreads(); // tiles have been read: Tm may stand there
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = 16 * warp + i % 4 / 2 * 8 + lane / 4, j = i / 4 * 8 + lane % 4 * 2 + i % 2;
        A[j * LDA + row] = betas[row] * a[i / 4][i % 4];
        p[i / 4][i % 4] = j <= row ? p[i / 4][i % 4] : 0;
    }
    rows_store<CS>(pairs + (2 * CS + 16 * warp) * CS, p, 1, CS, 16, 16 * warp + 16);
    __syncthreads();
    substitute(pairs, Tm, A, betas);
}

// walk_fetch: start copying what a walk needs of chunk c of a head, whose first q, x and pairs are
// given: k, q [64][WIDTH + 8], M, P [3][64][72], and W columns of x.
template <int WIDTH, int W, int THREADS>
static __device__ inline void walk_fetch(floatX *to, const floatX *q, const floatX *x, int x_pitch,
                                         const floatX *pairs, int c, int T, int C, int HS,
                                         int columns)
{
    enum { ROWS = Space<WIDTH>::ROWS };
    const int rows = T - c * CS;
    q += (size_t)c * CS * 3 * C;
    tile_fetch<CS, WIDTH, THREADS>(to, q + C, 3 * C, rows, HS);
    tile_fetch<CS, WIDTH, THREADS>(to + ROWS, q, 3 * C, rows, HS);
    pairs_fetch<THREADS>(to + 2 * ROWS, pairs + (size_t)c * PAIRS);
    tile_fetch<CS, W, THREADS>(to + 2 * ROWS + 3 * TILE, x + (size_t)c * CS * x_pitch, x_pitch,
                               rows, columns);
}

// state_at: of element i of a product's columns from `column` on, 16 rows from `row` on, in S
// (HS,HS); -1: beyond the head.
static __device__ inline int state_at(int i, int row, int column, int HS)
{
    const int lane = threadIdx.x % WARP, r = row + lane / 4 + i % 4 / 2 * 8;
    const int c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    return r < HS && c < HS ? r * HS + c : -1;
}

// chunk_walk_kernel: a block takes 16 WARPS rows of a head's S, which starts as `first` (NULL: 0)
// and ends as `last`, through its chunks while the next one is being fetched: out = o, u = N,
// states = S before each chunk, from x = v. BACK: D / s from the last chunk to the first: out = dv,
// states = D', from x = dout.
template <int WIDTH, int WARPS, int BACK>
static __global__ void __launch_bounds__(32 * WARPS)
chunk_walk_kernel(floatX *out, floatX *u, floatX *states, float *last, const floatX *x,
                  const float *first, const floatX *qkv, const floatX *pairs, int T, int NH, int HS)
{
    enum { W = 16 * WARPS, LDX = W + 8, LD = WIDTH + 8, ROWS = CS * LD };
    enum { STAGE = Space<WIDTH>::WALK + CS * W };
    extern __shared__ __align__(16) floatX tiles[]; // twice what walk_fetch fetches
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, C = NH * HS;
    const int x_pitch = BACK ? C : 3 * C, out_pitch = BACK ? 3 * C : C;
    const int slabs = (HS + W - 1) / W, head = blockIdx.x / slabs, slab = blockIdx.x % slabs * W;
    const int row = slab + 16 * warp, chunks = (T + CS - 1) / CS, channel = head % NH * HS;
    const size_t token = (size_t)(head / NH) * T, state = (size_t)head * HS * HS;
    const float s = rsqrtf((float)HS), factor = BACK ? s : 1;
    float S[WIDTH / 8][4];
    const auto fetch = [=](int i) {
        walk_fetch<WIDTH, W, 32 * WARPS>(
            tiles + i % 2 * STAGE, qkv + token * 3 * C + channel,
            x + token * x_pitch + channel + slab, x_pitch, pairs + (size_t)head * chunks * PAIRS,
            BACK ? chunks - 1 - i : i, T, C, HS, HS - slab);
    };
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const int at = state_at(i, row, 0, HS);
        S[i / 4][i % 4] = first && at >= 0 ? first[state + at] / factor : 0;
    }
    fetch(0);
    for (int i = 0; i < chunks; i++) {
        const int c = BACK ? chunks - 1 - i : i, rows = T - c * CS, right = row_at(lane, LD);
        const floatX *ks = tiles + i % 2 * STAGE, *qs = ks + ROWS, *ms = qs + ROWS;
        const floatX *ps = ms + 2 * TILE, *xs = ps + TILE + 16 * warp;
        const size_t at = token + (size_t)c * CS;
        copy_wait();
        __syncthreads(); // this chunk is there; nobody reads the one before any more
        if (i + 1 < chunks)
            fetch(i + 1);
        if (states) // a backward pass is to follow
            rows_store<WIDTH>(states + (((size_t)head * chunks + c) * HS + row) * HS, S, factor, HS,
                              HS - row, HS);
        float y[8][4] = {}, z[8][4] = {}; // E^T, O^T; BACK: dN^T / s, dV^T / s
        uint4 s_left[WIDTH / 16], hi[4], lo[4];
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++)
            s_left[k] = accumulator_pack(&S[2 * k]);
        if constexpr (BACK) {
            uint4 g[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                g[k] = ldmatrix<1>(xs + 16 * k * LDX + column_at(lane, LDX));
            add_by_lower<0>(y, g, NULL, ps + row_at(lane, LDC));
            add_dots<WIDTH>(y, s_left, ks + column_at(lane, LD), 3);
            add_product<WIDTH, CS>(S, g, NULL, qs + right, 0, 3);
            split_pack(hi, lo, y);
            add_by_lower<0>(z, hi, lo, ms + row_at(lane, LDC));
            columns_store<8>(out + at * out_pitch + channel + row, z, s, out_pitch, rows, HS - row);
#pragma unroll
            for (int k = 0; k < 32; k++)
                z[k / 4][k % 4] = -z[k / 4][k % 4];
            split_pack(hi, lo, z);
        } else {
            float n[8][4] = {}; // N^T
            add_dots<WIDTH>(y, s_left, ks + column_at(lane, LD), 3);
            add_dots<WIDTH>(z, s_left, qs + column_at(lane, LD), 3);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint4 v = ldmatrix<1>(xs + 16 * k * LDX + row_at(lane, LDX));
                const uint32_t v_k[] = {v.x, v.z, v.y, v.w};
#pragma unroll
                for (int j = 0; j < 8; j++)
                    y[2 * k + j / 4][j % 4] = unpack(v_k[j / 2], j % 2) - y[2 * k + j / 4][j % 4];
            }
            split_pack(hi, lo, y);
            add_by_lower<1>(n, hi, lo, ms + column_at(lane, LDC));
            split_pack(hi, lo, n);
            add_by_lower<1>(z, hi, NULL, ps + column_at(lane, LDC));
            columns_store<8>(out + at * C + channel + row, z, s, C, rows, HS - row);
            if (states)
                columns_store<8>(u + at * C + channel + row, n, 1, C, rows, HS - row);
        }
        add_product<WIDTH, CS>(S, hi, lo, ks + right, 0, 3);
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        if (last && state_at(i, row, 0, HS) >= 0)
            last[state + state_at(i, row, 0, HS)] = factor * S[i / 4][i % 4];
}

// chunk_split_kernel: the same for 16 rows of S, where a head's rows are too few to give every
// multiprocessor its warps. Four warps fetch; each of the others has 16 tokens of a chunk and a
// fourth of the columns of S. They meet three times in a chunk, to show each other S, E and N.
template <int WIDTH, int BACK>
static __global__ void __launch_bounds__(2 * CHUNK_THREADS)
chunk_split_kernel(floatX *out, floatX *u, floatX *states, float *last, const floatX *x,
                   const float *first, const floatX *qkv, const floatX *pairs, int T, int NH,
                   int HS)
{
    enum { N = WIDTH / 4, LD = WIDTH + 8, ROWS = CS * LD, LDX = 24 };
    enum { STAGE = Space<WIDTH>::WALK + CS * 16 };
    extern __shared__ __align__(16) floatX tiles[]; // twice what walk_fetch fetches, S, E, N
    floatX *const ss = tiles + 2 * STAGE, *const es = ss + 16 * LD, *const ns = es + 32 * LDC;
    const int warp = threadIdx.x / WARP - 4, lane = threadIdx.x % WARP, C = NH * HS;
    const int x_pitch = BACK ? C : 3 * C, out_pitch = BACK ? 3 * C : C;
    const int slabs = (HS + 15) / 16, head = blockIdx.x / slabs, row = blockIdx.x % slabs * 16;
    const int chunks = (T + CS - 1) / CS, channel = head % NH * HS, own = 16 * warp;
    const int column = N * warp, right = own * LD + column_at(lane, LD);
    const size_t token = (size_t)(head / NH) * T, state = (size_t)head * HS * HS;
    const float s = rsqrtf((float)HS), factor = BACK ? s : 1;
    float S[N / 8][4];
    const auto fetch = [=](int i) {
        walk_fetch<WIDTH, 16, CHUNK_THREADS>(
            tiles + i % 2 * STAGE, qkv + token * 3 * C + channel,
            x + token * x_pitch + channel + row, x_pitch, pairs + (size_t)head * chunks * PAIRS,
            BACK ? chunks - 1 - i : i, T, C, HS, HS - row);
    };
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int at = warp < 0 ? -1 : state_at(i, row, column, HS);
        S[i / 4][i % 4] = first && at >= 0 ? first[state + at] / factor : 0;
    }
    if (warp < 0)
        fetch(0);
    else
        rows_store<N>(ss + column, S, 1, LD, 16, N);
    for (int i = 0; i < chunks; i++) {
        const int c = BACK ? chunks - 1 - i : i, rows = T - c * CS - own;
        const floatX *ks = tiles + i % 2 * STAGE, *qs = ks + ROWS, *ms = qs + ROWS;
        const floatX *ps = ms + 2 * TILE, *xs = ps + TILE;
        const size_t at = token + (size_t)c * CS + own;
        float y[2][4] = {}, z[2][4] = {}; // of the warp's tokens: E^T, O^T; BACK: dN^T / s
        uint4 hi[4], lo[4];
        copy_wait();
        __syncthreads(); // this chunk and S are there
        if (warp < 0) {
            if (i + 1 < chunks)
                fetch(i + 1);
            continue;
        }
        if (states) // a backward pass is to follow
            rows_store<N>(states + (((size_t)head * chunks + c) * HS + row) * HS + column, S,
                          factor, HS, HS - row, HS - column);
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++) { // BACK: two sums, which wait half as long
            const uint4 left = ldmatrix<0>(ss + 16 * k + row_at(lane, LD));
            mma16(BACK && k % 2 ? z : y, left, ldmatrix<0>(ks + 16 * k + right));
            if (!BACK)
                mma16(z, left, ldmatrix<0>(qs + 16 * k + right));
        }
        if constexpr (BACK) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                hi[k] = ldmatrix<1>(xs + 16 * k * LDX + column_at(lane, LDX));
                if (k >= warp)
                    add_block<0>(k % 2 ? z : y, NULL, hi[k], NULL,
                                 ps + 16 * (k * LDC + warp) + row_at(lane, LDC));
            }
#pragma unroll
            for (int k = 0; k < 8; k++)
                y[k / 4][k % 4] += z[k / 4][k % 4];
            split_store(es + own, y);
            add_product<WIDTH, CS, N>(S, hi, NULL, qs + column + row_at(lane, LD), 0, 3);
        } else {
            const uint4 v = ldmatrix<1>(xs + own * LDX + row_at(lane, LDX));
            const uint32_t v_k[] = {v.x, v.z, v.y, v.w};
#pragma unroll
            for (int k = 0; k < 8; k++)
                y[k / 4][k % 4] = unpack(v_k[k / 2], k % 2) - y[k / 4][k % 4];
            split_store(es + own, y);
        }
        part_sync<CHUNK_THREADS>(); // E, or dN
        float n[2][4] = {}, rest[2][4] = {}; // N^T; BACK: dV^T / s
        split_load(hi, lo, es);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (BACK ? k >= warp : k <= warp)
                add_block<!BACK>(n, rest, hi[k], lo + k,
                                 ms + 16 * (BACK ? k * LDC + warp : warp * LDC + k) +
                                     (BACK ? row_at(lane, LDC) : column_at(lane, LDC)));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            n[k / 4][k % 4] += rest[k / 4][k % 4];
            y[k / 4][k % 4] = (BACK ? -1 : 1) * n[k / 4][k % 4];
        }
        split_store(ns + own, y);
        if (BACK)
            columns_store<2>(out + at * out_pitch + channel + row, n, s, out_pitch, rows,
                             HS - row);
        else if (states)
            columns_store<2>(u + at * C + channel + row, n, 1, C, rows, HS - row);
        part_sync<CHUNK_THREADS>(); // N, or -dV
        split_load(hi, lo, ns);
        add_product<WIDTH, CS, N>(S, hi, lo, ks + column + row_at(lane, LD), 0, 3);
        rows_store<N>(ss + column, S, 1, LD, 16, N);
        if constexpr (!BACK) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k <= warp)
                    add_block<1>(z, NULL, hi[k], NULL,
                                 ps + 16 * (warp * LDC + k) + column_at(lane, LDC));
            columns_store<2>(out + at * C + channel + row, z, s, C, rows, HS - row);
        }
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (last && warp >= 0 && state_at(i, row, column, HS) >= 0)
            last[state + state_at(i, row, column, HS)] = factor * S[i / 4][i % 4];
}

// chunk_grads_kernel: dq, dk and dbeta of a chunk, by a block; a warp has 16 rows of each. With X
// and F made, q takes the place of dout, X and F that of dv, D' that of S.
template <int WIDTH>
static __global__ void __launch_bounds__(CHUNK_THREADS, WIDTH > 64 ? 2 : 3)
chunk_grads_kernel(floatX *dqkv, float *dbeta, const floatX *dout, const floatX *u,
                   const floatX *states, const floatX *dstates, const floatX *qkv,
                   const float *beta, int T, int NH, int HS)
{
    enum { LD = WIDTH + 8, ROWS = CS * LD, S_AT = Space<WIDTH>::S_AT };
    extern __shared__ __align__(16) floatX tiles[]; // dout, n, k, dv [64][LD], S [WIDTH][LD]
    floatX *gs = tiles, *ns = gs + ROWS, *ks = ns + ROWS, *vs = ks + ROWS, *ss = tiles + S_AT;
    floatX *xs = vs, *fs = xs + TILE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, C = NH * HS;
    const int chunks = (T + CS - 1) / CS, h = blockIdx.x / chunks % NH;
    const int t0 = blockIdx.x % chunks * CS, rows = T - t0, own = 16 * warp;
    const size_t token = (size_t)(blockIdx.x / chunks / NH) * T + t0, state = blockIdx.x;
    const size_t at = token * 3 * C + h * HS, out_at = token * C + h * HS;
    const int left = own * LD + row_at(lane, LD), right = row_at(lane, LD);
    const float s = rsqrtf((float)HS);
    float x[8][4] = {}, f[8][4] = {}, d[WIDTH / 8][4] = {}, e[WIDTH / 8][4] = {};
    uint4 a[4], lo[4];
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(gs, dout + out_at, C, rows, HS);
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(ns, u + out_at, C, rows, HS);
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(vs, dqkv + at + 2 * C, 3 * C, rows, HS);
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(ks, qkv + at + C, 3 * C, rows, HS);
    tile_fetch<WIDTH, WIDTH, CHUNK_THREADS>(ss, states + state * HS * HS, HS, HS, HS);
    copy_wait();
    __syncthreads();
    add_dots<WIDTH>(f, Rows{vs + left}, ns + column_at(lane, LD), warp);
    add_dots<WIDTH>(x, Rows{gs + left}, ns + column_at(lane, LD), warp);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = own + i % 4 / 2 * 8 + g, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r == c && r < rows) {
            const size_t to = (token + r) * NH + h;
            const float b = fmaxf(beta[to], BETA_LEAST);
            dbeta[to] = f[i / 4][i % 4] / b / b;
        }
        x[i / 4][i % 4] = c <= r ? x[i / 4][i % 4] : 0;
        f[i / 4][i % 4] = c < r ? f[i / 4][i % 4] : 0;
    }
    add_product<WIDTH, WIDTH>(d, Rows{gs + left}, NULL, ss + right, 0, WIDTH);
    split_pack(a, lo, x);
    add_product<WIDTH, CS>(d, a, NULL, ks + right, 0, warp);
    rows_store<WIDTH>(dqkv + at + (size_t)own * 3 * C, d, s, 3 * C, rows - own, HS);
    add_product<WIDTH, WIDTH>(e, Rows{vs + left}, NULL, ss + right, 0, WIDTH);
    split_pack(a, lo, f);
    add_product<WIDTH, CS>(e, a, NULL, ks + right, 0, warp);
    __syncthreads(); // dout, dv and S have been read
    tile_fetch<CS, WIDTH, CHUNK_THREADS>(gs, qkv + at, 3 * C, rows, HS);
    tile_fetch<WIDTH, WIDTH, CHUNK_THREADS>(ss, dstates + state * HS * HS, HS, HS, HS);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int to = (own + i % 2 * 8 + g) * LDC + i / 2 * 8 + lane % 4 * 2, v = i % 2 * 2;
        if (i / 4 <= warp) {
            *(uint32_t *)(xs + to) = pack2(s * x[i / 2][v], s * x[i / 2][v + 1]);
            *(uint32_t *)(fs + to) = pack2(f[i / 2][v], f[i / 2][v + 1]);
        }
    }
    copy_wait();
    __syncthreads();
    const int column = own + column_at(lane, LDC);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = i >= warp ? ldmatrix<1>(fs + 16 * i * LDC + column) : uint4{};
    add_product<WIDTH, CS>(e, a, NULL, ks + right, warp, 3);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        e[i / 4][i % 4] = -e[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = i >= warp ? ldmatrix<1>(xs + 16 * i * LDC + column) : uint4{};
    add_product<WIDTH, CS>(e, a, NULL, gs + right, warp, 3);
    add_product<WIDTH, WIDTH>(e, Rows{ns + left}, NULL, ss + right, 0, WIDTH);
    rows_store<WIDTH>(dqkv + at + C + (size_t)own * 3 * C, e, 1, 3 * C, rows - own, HS);
}

// chunk_walk: launch chunk_walk_kernel with WARPS, or fewer where there would not be 100 blocks,
// about as many as a GPU has multiprocessors; where not even with 4, chunk_split_kernel.
template <int WIDTH, int WARPS, int BACK>
static void chunk_walk(floatX *out, floatX *u, floatX *states, float *last, const floatX *x,
                       const float *first, const floatX *qkv, const floatX *pairs, size_t B,
                       size_t T, size_t NH, size_t HS, cudaStream_t stream)
{
    const bool few = B * NH * (WIDTH / 16 / WARPS) < 100;
    if constexpr (WARPS > 4)
        if (few)
            return chunk_walk<WIDTH, WARPS / 2, BACK>(out, u, states, last, x, first, qkv, pairs, B,
                                                      T, NH, HS, stream);
    if constexpr (WARPS == 4)
        if (few) {
            LAUNCH((chunk_split_kernel<WIDTH, BACK>), B * NH * ((HS + 15) / 16), 2 * CHUNK_THREADS,
                   4 * (Space<WIDTH>::WALK + CS * 16) + 2 * Space<WIDTH>::SHARED, stream, out, u,
                   states, last, x, first, qkv, pairs, (int)T, (int)NH, (int)HS);
            return;
        }
    LAUNCH((chunk_walk_kernel<WIDTH, WARPS, BACK>),
           B * NH * ((HS + 16 * WARPS - 1) / (16 * WARPS)), 32 * WARPS,
           4 * (Space<WIDTH>::WALK + CS * 16 * WARPS), stream, out, u, states, last, x, first, qkv,
           pairs, (int)T, (int)NH, (int)HS);
}
#endif

// ---- the launchers

// delta_form: the form for heads of HS channels where --form asks for `form`. AUTO: by chunks, in
// BF16 and where the GPU has the shared memory, from 64 channels on, where they are many times as
// fast; smaller heads keep the precision of the recurrence. Dies if CHUNK cannot be had.
static int delta_form(size_t HS, int form)
{
    int most = 0, need = 1;
#ifdef PRECISION_BF16
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    WITH_HEAD(HS, need = 4 * (Space<WIDTH>::WALK + CS * WIDTH));
#endif
    const int takes = HS % 8 == 0 && need <= most;
    if (form == CHUNK && !takes)
        die(EXIT_USAGE, "--form chunk: heads of %zu channels in " PRECISION_NAME "; expected a "
            "multiple of 8, in BF16, on a GPU with the shared memory of sm_80 or sm_90\n"
            "hint: --form auto", HS);
    return form != AUTO ? form : takes && HS >= 64 ? CHUNK : RECURRENT;
}

// What a forward pass keeps for the backward pass. Tokens: u (B,T,C). Chunks, NC = ceil(T / 64):
// pairs (B,NH,NC,3,64,64) = M and P; states (B,NH,NC,HS,HS) = S before each, and N (B,T,C), both
// NULL: not kept.
typedef struct {
    float *u;
    floatX *N, *pairs, *states;
} Kept;

// delta_forward: out (B,T,C) = the delta rule of qkv (B,T,3C): q at 0, k at C, v at 2C, and head h
// of NH at h HS in each, HS = C / NH; beta (B,T,NH), eigenvalues 1 - beta |k|^2:
//   u_t = beta_t (v_t - S_{t-1} k_t),  S_t = S_{t-1} + u_t k_t^T,  out_t = S_t q_t / sqrt(HS)
// S_0 = initial (B,NH,HS,HS), values by keys, NULL: zero; final (B,NH,HS,HS) = S_T (CHUNK: unless
// NULL), may alias initial; kept =. HS <= 128. form: RECURRENT, or CHUNK if delta_form gives it,
// with |q|, |k| <= 1 but for rounding, beta in [0,2] and floatX arrays that start on 16 bytes.
static void delta_forward(floatX *out, Kept kept, float *final, const floatX *qkv,
                          const float *beta, const float *initial, size_t B, size_t T, size_t C,
                          size_t NH, int form, cudaStream_t stream)
{
    const size_t HS = C / NH;
    assert(HS <= HEAD_MOST);
#ifdef PRECISION_BF16
    const size_t chunks = B * NH * ((T + CS - 1) / CS);
    if (form == CHUNK) {
        WITH_HEAD(HS,
            LAUNCH(chunk_pairs_kernel<WIDTH>, chunks, CHUNK_THREADS, Space<WIDTH>::PAIRS_BYTES,
                   stream, kept.pairs, qkv, beta, (int)T, (int)NH, (int)HS);
            chunk_walk<WIDTH, WIDTH / 16, 0>(out, kept.N, kept.states, final, qkv + 2 * C, initial,
                                             qkv, kept.pairs, B, T, NH, HS, stream));
        return;
    }
#endif
    WITH_HEAD(HS, LAUNCH(recurrent_forward_kernel<P>, B * NH, COLS * P * P, 0, stream, out, kept.u,
                         final, qkv, beta, initial, (int)T, (int)NH, (int)HS));
}

// delta_backward: dqkv (B,T,3C) =, dbeta (B,T,NH) =, dinitial (B,NH,HS,HS) = (NULL: not asked for),
// from dout (B,T,C), dfinal (B,NH,HS,HS), the gradient of S_T (NULL: zero), and the forward's kept,
// final (CHUNK: not read), qkv, beta. dstates (B,NH,NC,HS,HS): scratch of CHUNK.
static void delta_backward(floatX *dqkv, float *dbeta, float *dinitial, floatX *dstates,
                           const floatX *dout, const float *dfinal, Kept kept, const float *final,
                           const floatX *qkv, const float *beta, size_t B, size_t T, size_t C,
                           size_t NH, int form, cudaStream_t stream)
{
    const size_t HS = C / NH;
    assert(HS <= HEAD_MOST);
#ifdef PRECISION_BF16
    const size_t chunks = B * NH * ((T + CS - 1) / CS);
    if (form == CHUNK) {
        WITH_HEAD(HS,
            chunk_walk<WIDTH, WIDTH / 16, 1>(dqkv + 2 * C, NULL, dstates, dinitial, dout, dfinal,
                                             qkv, kept.pairs, B, T, NH, HS, stream);
            LAUNCH(chunk_grads_kernel<WIDTH>, chunks, CHUNK_THREADS, Space<WIDTH>::GRADS_BYTES,
                   stream, dqkv, dbeta, dout, kept.N, kept.states, dstates, qkv, beta, (int)T,
                   (int)NH, (int)HS));
        return;
    }
#endif
    WITH_HEAD(HS, LAUNCH(recurrent_backward_kernel<P>, B * NH, COLS * P * P, 0, stream, dqkv, dbeta,
                         dinitial, dout, dfinal, kept.u, final, qkv, beta, (int)T, (int)NH,
                         (int)HS));
}

// ------------------------------------------------------------------------------------------------
// [block] What stands around the recurrence: short convolution, SiLU, norms, SwiGLU.

enum { WINDOW = 4, STRIP = 10 }; // positions the convolution sees; that a thread takes
enum { CONV_SLICES = 128, NORM_SLICES = 128, NORM_ROWS = 8192, EACH = 4 };
#define RMS_EPS 1e-6f

// sigmoid: 1 / (1 + exp(-x)); far out 0 or 1.
static __device__ inline float sigmoid(float x)
{
    return 1 / (1 + exp2_fast(-LOG2E * x));
}

// silu: x sigmoid(x); *slope = its derivative.
static __device__ inline float silu(float x, float *slope)
{
    const float p = sigmoid(x);
    *slope = p * (1 + x * (1 - p));
    return x * p;
}

// ---- from a row p (3C and b) to q, k, v and beta: a head is 4 channels in each of G lanes, a
// power of two, side by side (VEC 4) or G apart (VEC 1); a warp has 32 / G heads of q, k and v

// What these kernels are told. P: channels of a row of p: 3C, then b, then zeros; `first`: the head
// of 3 NH that SiLU starts at; lanes: G. `parts` warps take a row, `strips` a sequence.
typedef struct {
    int T, NH, HS, P, first, lanes, vec;
    float range; // the largest beta
    size_t parts, strips;
} Shape;

// Where a thread's channels are: its head of 3 NH; the first channel; how many of its groups of
// VEC, `lanes` VEC apart, lie in the head.
typedef struct {
    int head, channel, groups, lanes;
} Place;

// place_of: see Place; `part`: which heads the warp has.
template <int VEC> static __device__ inline Place place_of(Shape s, size_t part)
{
    const int lane = threadIdx.x % WARP, j = lane % s.lanes;
    const int head = (int)part * (WARP / s.lanes) + lane / s.lanes, left = s.HS - VEC * j;
    const int groups = (left + VEC * s.lanes - 1) / (VEC * s.lanes);
    return {head, head * s.HS + VEC * j, head < 3 * s.NH && left > 0 ? groups : 0, s.lanes};
}

// channels_load: the thread's channels of a row, 0 where it has none and for NULL.
template <int VEC>
static __device__ inline void channels_load(float (&to)[EACH], const floatX *__restrict__ row,
                                            Place place)
{
#pragma unroll
    for (int k = 0; k < EACH / VEC; k++) {
        Pack<floatX, VEC> v = {};
        if (row && k < place.groups)
            v = *(const Pack<floatX, VEC> *)(row + place.channel + k * VEC * place.lanes);
        for (int i = 0; i < VEC; i++)
            to[k * VEC + i] = (float)v.v[i];
    }
}

// channels_store: row = the thread's channels.
template <int VEC>
static __device__ inline void channels_store(floatX *row, const float (&x)[EACH], Place place)
{
#pragma unroll
    for (int k = 0; k < EACH / VEC; k++) {
        Pack<floatX, VEC> v;
        for (int i = 0; i < VEC; i++)
            v.v[i] = (floatX)x[k * VEC + i];
        if (k < place.groups)
            *(Pack<floatX, VEC> *)(row + place.channel + k * VEC * place.lanes) = v;
    }
}

// weights_load: the convolution's weights (3C,4) of the thread's channels; 1 for the row itself
// where there is none.
template <int VEC>
static __device__ inline void weights_load(float (&to)[WINDOW][EACH], const float *conv_w,
                                           Place place)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int c = place.channel + i / VEC * VEC * place.lanes + i % VEC;
        for (int w = 0; w < WINDOW; w++)
            to[w][i] = i / VEC >= place.groups ? 0 : conv_w ? conv_w[c * WINDOW + w]
                       : w == WINDOW - 1;
    }
}

// shift: x[w] = x[w + 1]; the last stays.
static __device__ inline void shift(float (&x)[WINDOW][EACH])
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
        for (int w = 0; w + 1 < WINDOW; w++)
            x[w][i] = x[w + 1][i];
}

// activate: a = SiLU, or nothing, of what the convolution makes of the window x; slope (NULL: not
// asked for).
static __device__ inline void activate(float (&a)[EACH], float *slope,
                                       const float (&x)[WINDOW][EACH],
                                       const float (&weight)[WINDOW][EACH], bool with_silu)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float z = 0, s = 1;
        for (int w = 0; w < WINDOW; w++)
            z += weight[w][i] * x[w][i];
        a[i] = with_silu ? silu(z, &s) : z;
        if (slope)
            slope[i] = s;
    }
}

// activate_forward_kernel: a warp takes STRIP positions and 32 / G heads, the window of p in
// registers. See activate_forward.
template <int VEC>
static __global__ void activate_forward_kernel(floatX *__restrict__ qkv, float *__restrict__ beta,
                                               floatX *window, const floatX *__restrict__ p,
                                               const float *__restrict__ conv_w, Shape s,
                                               size_t B)
{
    const size_t task = row_of_warp(), strip = task / s.parts, b = strip / s.strips;
    const int t0 = (int)(strip % s.strips) * STRIP, C3 = 3 * s.NH * s.HS, lane = threadIdx.x % WARP;
    if (b >= B)
        return;
    const Place place = place_of<VEC>(s, task % s.parts);
    float x[WINDOW][EACH], weight[WINDOW][EACH], a[EACH];
    const int h = place.head - 2 * s.NH; // of v
    p += b * s.T * s.P;
    qkv += b * s.T * C3;
    beta += b * s.T * s.NH;
    weights_load<VEC>(weight, conv_w, place);
#pragma unroll
    for (int w = 0; w < WINDOW - 1; w++) {
        const int t = t0 + w - (WINDOW - 1);
        const floatX *before = window ? window + (b * (WINDOW - 1) + w) * C3 : NULL;
        channels_load<VEC>(x[w + 1], t < 0 ? before : p + (size_t)t * s.P, place);
    }
#pragma unroll
    for (int i = 0; i < STRIP; i++) {
        const int t = t0 + i;
        const bool inside = t < s.T;
        float squares = 0;
        shift(x);
        channels_load<VEC>(x[WINDOW - 1], inside ? p + (size_t)t * s.P : NULL, place);
        activate(a, NULL, x, weight, place.head >= s.first);
#pragma unroll
        for (int j = 0; j < EACH; j++)
            squares += a[j] * a[j];
        squares = lanes_sum(squares, s.lanes);
        const float r = h < 0 ? rsqrtf(squares + RMS_EPS) : 1;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            a[j] *= r;
        if (inside)
            channels_store<VEC>(qkv + (size_t)t * C3, a, place);
        if (inside && h >= 0 && h < s.NH && lane % s.lanes == 0)
            beta[(size_t)t * s.NH + h] = s.range * sigmoid((float)p[(size_t)t * s.P + C3 + h]);
        if (window && t == s.T - 1)
            for (int w = 0; w < WINDOW - 1; w++)
                channels_store<VEC>(window + (b * (WINDOW - 1) + w) * C3, x[w + 1], place);
    }
}

// activate_backward_kernel: a block takes 32 / G heads and every `slices`-th eight strips, a warp
// each: dp =, and partial (slices,3C,4) = its sum for the weights. The gradient of a row is due
// three rows later, so that strips overlap by three. See activate_backward.
template <int VEC>
static __global__ void
activate_backward_kernel(floatX *__restrict__ dp, float *partial, const floatX *__restrict__ dqkv,
                         const float *__restrict__ dbeta, const floatX *__restrict__ p,
                         const float *__restrict__ beta, const float *__restrict__ conv_w, Shape s,
                         size_t B, size_t slices)
{
    __shared__ float sums[ROW_WARPS][WARP * EACH * WINDOW];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, C3 = 3 * s.NH * s.HS;
    const int lag = conv_w ? WINDOW - 1 : 0;
    const size_t slice = blockIdx.x / s.parts, end = B * s.strips;
    const Place place = place_of<VEC>(s, blockIdx.x % s.parts);
    const int h = place.head - 2 * s.NH;
    float x[WINDOW][EACH], dz[WINDOW][EACH], weight[WINDOW][EACH], dweight[WINDOW][EACH] = {};
    float a[EACH], slope[EACH];
    weights_load<VEC>(weight, conv_w, place);
    for (size_t strip = slice * ROW_WARPS + warp; strip < end; strip += slices * ROW_WARPS) {
        const int t0 = (int)(strip % s.strips) * STRIP;
        const size_t row0 = strip / s.strips * s.T;
#pragma unroll
        for (int w = 0; w < WINDOW; w++) {
            const int t = t0 + w - WINDOW;
            channels_load<VEC>(x[w], t < 0 ? NULL : p + (row0 + t) * s.P, place);
            for (int i = 0; i < EACH; i++)
                dz[w][i] = 0;
        }
#pragma unroll 2
        for (int k = 0; k < STRIP + WINDOW - 1; k++) {
            const int t = t0 + k, due = t - lag;
            const bool inside = t < s.T, own = k < STRIP && inside;
            float squares = 0, dot = 0;
            shift(x);
            shift(dz);
            channels_load<VEC>(x[WINDOW - 1], inside ? p + (row0 + t) * s.P : NULL, place);
            channels_load<VEC>(dz[WINDOW - 1], inside ? dqkv + (row0 + t) * C3 : NULL, place);
            activate(a, slope, x, weight, place.head >= s.first);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                squares += a[i] * a[i];
                dot += a[i] * dz[WINDOW - 1][i];
            }
            squares = lanes_sum(squares, s.lanes);
            dot = lanes_sum(dot, s.lanes);
            const float r = h < 0 ? rsqrtf(squares + RMS_EPS) : 1, sum = h < 0 ? r * r * dot : 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                dz[WINDOW - 1][i] = r * (dz[WINDOW - 1][i] - a[i] * sum) * slope[i];
                a[i] = lag ? 0 : dz[WINDOW - 1][i]; // from here on: the gradient that is due
                for (int w = 0; w < WINDOW && lag; w++) {
                    a[i] += weight[w][i] * dz[WINDOW - 1 - w][i];
                    dweight[w][i] += own ? dz[WINDOW - 1][i] * x[w][i] : 0;
                }
            }
            if (due >= t0 && due < min(t0 + STRIP, s.T))
                channels_store<VEC>(dp + (row0 + due) * s.P, a, place);
            const size_t row = row0 + t;
            for (int i = h; own && h >= 0 && i < s.P - C3 && lane % s.lanes == 0; i += s.NH) {
                const float y = i < s.NH ? beta[row * s.NH + h] : 0; // beyond b: 0
                const float d = i < s.NH ? dbeta[row * s.NH + h] : 0;
                dp[row * s.P + C3 + i] = (floatX)(d * y * (1 - y / s.range));
            }
        }
    }
    if (!lag)
        return;
    for (int i = 0; i < EACH * WINDOW; i++)
        sums[warp][lane * EACH * WINDOW + i] = dweight[i % WINDOW][i / WINDOW];
    __syncthreads();
    for (int j = warp; j < EACH * WINDOW; j += ROW_WARPS) {
        const int e = j / WINDOW, c = place.channel + e / VEC * VEC * s.lanes + e % VEC;
        float sum = 0;
        for (int w = 0; w < ROW_WARPS; w++)
            sum += sums[w][lane * EACH * WINDOW + j];
        if (e / VEC < place.groups)
            partial[(slice * C3 + c) * WINDOW + j % WINDOW] = sum;
    }
}

// shape_of: see Shape; VEC is 4 where that divides a head, else 1.
static Shape shape_of(size_t T, size_t C, size_t NH, size_t P, size_t first, float range)
{
    const size_t HS = C / NH, vec = HS % 4 == 0 ? 4 : 1;
    size_t lanes = 1;
    while (lanes < WARP && lanes * vec < HS)
        lanes *= 2;
    const size_t heads = WARP / lanes; // of a warp
    return {(int)T, (int)NH, (int)HS, (int)P, (int)first, (int)lanes, (int)vec, range,
            (3 * NH + heads - 1) / heads, (T + STRIP - 1) / STRIP};
}

// activate_forward: from p (N,P), rows of q, k and v side by side, b (NH), and zeros:
//   qkv (N,3C) = SiLU(sum_w conv_w[c,w] p_{t-3+w}[c]), heads of q and k over sqrt(|.|^2 + 1e-6)
//   beta (B,T,NH) = range sigmoid(b)
// conv_w (3C,4), NULL: no convolution; SiLU from head `first` of 3 NH on. window (B,3,3C): the rows
// before the first, which the last three replace: for T <= 10; NULL: zeros.
static void activate_forward(floatX *qkv, float *beta, floatX *window, const floatX *p,
                             const float *conv_w, size_t B, size_t T, size_t C, size_t NH, size_t P,
                             size_t first, float range, cudaStream_t stream)
{
    const Shape s = shape_of(T, C, NH, P, first, range);
    const size_t grid = (B * s.strips * s.parts + ROW_WARPS - 1) / ROW_WARPS;
    if (s.vec == 4)
        LAUNCH(activate_forward_kernel<4>, grid, ROW_WARPS * WARP, 0, stream, qkv, beta,
               window, p, conv_w, s, B);
    else
        LAUNCH(activate_forward_kernel<1>, grid, ROW_WARPS * WARP, 0, stream, qkv, beta,
               window, p, conv_w, s, B);
}

// activate_backward: dp (N,P) =, dconv_w (3C,4) += from dqkv (N,3C), dbeta (N,NH) and the forward's
// p, beta, conv_w. partial (CONV_SLICES,3C,4): scratch. With y = r SiLU(z), r the factor of a head:
// dSiLU = r (dy - y (y . dy)).
static void activate_backward(floatX *dp, float *dconv_w, float *partial, const floatX *dqkv,
                              const float *dbeta, const floatX *p, const float *beta,
                              const float *conv_w, size_t B, size_t T, size_t C, size_t NH,
                              size_t P, size_t first, float range, cudaStream_t stream)
{
    const Shape s = shape_of(T, C, NH, P, first, range);
    const size_t warps = (B * s.strips + ROW_WARPS - 1) / ROW_WARPS, n = 3 * C * WINDOW;
    const size_t slices = warps < CONV_SLICES ? warps : CONV_SLICES;
    if (s.vec == 4)
        LAUNCH(activate_backward_kernel<4>, s.parts * slices, ROW_WARPS * WARP, 0, stream, dp,
               partial, dqkv, dbeta, p, beta, conv_w, s, B, slices);
    else
        LAUNCH(activate_backward_kernel<1>, s.parts * slices, ROW_WARPS * WARP, 0, stream, dp,
               partial, dqkv, dbeta, p, beta, conv_w, s, B, slices);
    if (conv_w)
        LAUNCH(slices_sum_kernel, (n + ROW_WARPS * WARP - 1) / (ROW_WARPS * WARP), ROW_WARPS * WARP,
               0, stream, dconv_w, NULL, partial, (int)slices, n, 0, 0, n, 0);
}

// ---- norms, SwiGLU

// rmsnorm_forward_kernel: a warp a row.
template <typename X>
static __global__ void rmsnorm_forward_kernel(floatX *__restrict__ out, const X *__restrict__ x,
                                              const float *__restrict__ weight, size_t N, int C)
{
    const size_t row = row_of_warp();
    const int lane = threadIdx.x % WARP;
    float squares = 0;
    if (row >= N)
        return;
    out += row * C;
    x += row * C;
#pragma unroll 4
    for (int c = lane; c < C; c += WARP)
        squares += (float)x[c] * (float)x[c];
    const float r = rsqrtf(warp_sum(squares) / (float)C + RMS_EPS);
#pragma unroll 4
    for (int c = lane; c < C; c += WARP)
        out[c] = (floatX)((float)x[c] * r * weight[c]);
}

// rmsnorm_forward: out (N,C) = weight x / sqrt(mean(x^2) + 1e-6), rows of x (N,C), weight (C).
template <typename X>
static void rmsnorm_forward(floatX *out, const X *x, const float *weight, size_t N, size_t C,
                            cudaStream_t stream)
{
    LAUNCH(rmsnorm_forward_kernel<X>, (N + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0, stream,
           out, x, weight, N, (int)C);
}

// rmsnorm_backward_kernel: a block takes K rows, a warp every eighth: dx, and partial (slices,C) =
// the block's sum of dout x r. With d = dout weight: dx += (first: =) r (d - x r^2 mean(d x)).
template <typename X>
static __global__ void
rmsnorm_backward_kernel(floatX *__restrict__ dx, float *partial, const floatX *__restrict__ dout,
                        const X *__restrict__ x, const float *__restrict__ weight, size_t N,
                        size_t K, int C, int first)
{
    extern __shared__ float factor[]; // (K): r of each row
    __shared__ float sums[ROW_WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t row0 = blockIdx.x * K;
    const int rows = row0 < N ? (int)min(K, N - row0) : 0;
    dx += row0 * C;
    dout += row0 * C;
    x += row0 * C;
#pragma unroll 4
    for (int n = warp; n < rows; n += ROW_WARPS) {
        const size_t at = (size_t)n * C;
        float squares = 0, dot = 0;
        for (int c = lane; c < C; c += WARP) {
            squares += (float)x[at + c] * (float)x[at + c];
            dot += (float)dout[at + c] * weight[c] * (float)x[at + c];
        }
        const float r = rsqrtf(warp_sum(squares) / (float)C + RMS_EPS);
        const float mean = r * r * warp_sum(dot) / (float)C;
        for (int c = lane; c < C; c += WARP) {
            const float d = r * ((float)dout[at + c] * weight[c] - (float)x[at + c] * mean);
            dx[at + c] = (floatX)(first ? d : (float)dx[at + c] + d);
        }
        if (lane == 0)
            factor[n] = r;
    }
    __syncthreads();
    for (int c0 = 0; c0 < C; c0 += WARP) {
        const int c = c0 + lane;
        float sum = 0;
#pragma unroll 8
        for (int n = warp; n < rows; n += ROW_WARPS)
            sum += c < C ? (float)dout[(size_t)n * C + c] * (float)x[(size_t)n * C + c] * factor[n]
                         : 0;
        sums[warp][lane] = sum;
        __syncthreads();
        for (int w = 1; w < ROW_WARPS && warp == 0; w++)
            sum += sums[w][lane];
        if (warp == 0 && c < C)
            partial[(size_t)blockIdx.x * C + c] = sum;
        __syncthreads();
    }
}

// norm_slices: slices of the sum for a norm's weight, over N rows.
static size_t norm_slices(size_t N)
{
    const size_t n = (N + NORM_ROWS - 1) / NORM_ROWS;
    return n > NORM_SLICES ? n : NORM_SLICES;
}

// rmsnorm_backward: dx (N,C) += (first: =), dweight (C) += from dout (N,C) and the forward's x and
// weight. partial (norm_slices,C): scratch.
template <typename X>
static void rmsnorm_backward(floatX *dx, float *dweight, float *partial, const floatX *dout,
                             const X *x, const float *weight, size_t N, size_t C, int first,
                             cudaStream_t stream)
{
    const size_t slices = norm_slices(N), K = (N + slices - 1) / slices;
    LAUNCH(rmsnorm_backward_kernel<X>, slices, ROW_WARPS * WARP, K * sizeof(float), stream, dx,
           partial, dout, x, weight, N, K, (int)C, first);
    LAUNCH(slices_sum_kernel, (C + ROW_WARPS * WARP - 1) / (ROW_WARPS * WARP), ROW_WARPS * WARP, 0,
           stream, dweight, NULL, partial, (int)slices, C, 0, 0, C, 0);
}

// swiglu_kernel: VEC neighbours a thread: out (N,H) = SiLU(g) y; with dout: out (N,2H) = dgu.
template <int VEC>
static __global__ void swiglu_kernel(floatX *__restrict__ out, const floatX *__restrict__ dout,
                                     const floatX *__restrict__ gu, size_t n, size_t H)
{
    typedef Pack<floatX, VEC> Each;
    const size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * VEC;
    const size_t at = i / H * 2 * H + i % H; // of g; y stands H behind it
    if (i >= n)
        return;
    Each g = *(const Each *)(gu + at), y = *(const Each *)(gu + at + H), d = {};
    if (dout)
        d = *(const Each *)(dout + i);
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float slope;
        const float a = silu((float)g.v[k], &slope), y_k = (float)y.v[k], d_k = (float)d.v[k];
        g.v[k] = (floatX)(dout ? d_k * y_k * slope : a * y_k);
        y.v[k] = (floatX)(d_k * a);
    }
    if (dout) {
        *(Each *)(out + at) = g;
        *(Each *)(out + at + H) = y;
    } else
        *(Each *)(out + i) = g;
}

// swiglu_backward: dgu (N,2H) = from dout (N,H) and the forward's gu; without dout: see
// swiglu_forward.
static void swiglu_backward(floatX *dgu, const floatX *dout, const floatX *gu, size_t N, size_t H,
                            cudaStream_t stream)
{
    const size_t n = N * H, each = ROW_WARPS * WARP * (H % EACH ? 1 : EACH);
    const size_t grid = (n + each - 1) / each;
    if (H % EACH)
        LAUNCH(swiglu_kernel<1>, grid, ROW_WARPS * WARP, 0, stream, dgu, dout, gu, n, H);
    else
        LAUNCH(swiglu_kernel<EACH>, grid, ROW_WARPS * WARP, 0, stream, dgu, dout, gu, n, H);
}

// swiglu_forward: out (N,H) = SiLU(g) y, g and y the halves of a row of gu (N,2H).
static void swiglu_forward(floatX *out, const floatX *gu, size_t N, size_t H, cudaStream_t stream)
{
    swiglu_backward(out, NULL, gu, N, H, stream);
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
// [model] Tensors, forward, backward, decoding.  (ports train_deltanet.c[model])

typedef struct {
    int eigenvalues, layers, heads, channels, hidden, conv, qk_silu, form, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *norm1_w, *qkv_w, *beta_w, *conv_w, *norm_o_w, *proj_w, *norm2_w, *gu_w, *down_w;
    float *norm_w, *head_w;
} Params;

// What matrix products read, in floatX: in_w (L,P,C) is qkv_w, beta_w and rows of 0; head_w (Vp,C):
// rows from V on 0.
typedef struct {
    floatX *in_w, *proj_w, *gu_w, *down_w, *head_w;
} Copies;

typedef struct {
    float *x, *beta, *S, *mid, *logits, *losses;
    floatX *r1, *p, *b, *qkv, *o, *z, *r2, *gu, *h, *y;
    Kept kept;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *partial, *dbeta;
    floatX *dstates, *dx, *dr, *dqkv, *dp, *d_o, *dz, *dgu, *dh, *dlogits;
    Asked asked;
} Dacts;

// Decoding: what the layers remember, S of every head and the last inputs of the convolution;
// tokens read, residual stream, logits.
typedef struct {
    floatX *window;
    int *tokens;
    float *S, *x, *logits;
} Decoder;

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, Vp, C, NH, H, L, P, decode_B, silu_from; // P: 3C + NH rounded up to eights
    size_t asked, rows; // that the head reads, of a sequence and of the batch: asked.cuh
    float range;                                             // the largest beta
    Weights weights;      // the host's, for files
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
    return c->eigenvalues == SIGNED ? "signed" : "nonneg";
}

// hidden_size: of the MLP: --hidden, or 8/3 of the channels rounded up to a multiple of 256.
static size_t hidden_size(const Config *c)
{
    return c->hidden ? (size_t)c->hidden : ((size_t)c->channels * 8 / 3 + 255) / 256 * 256;
}

// params_plan: the table of parameters; all decay, as the authors' do. Xavier's uniform numbers
// have the gain 2^-2.5. A tensor whose first dimension is 0 does not exist.
static void params_plan(Model *m)
{
    const size_t L = m->L, C = m->C, V = m->V, NH = m->NH, H = m->H, conv = m->config.conv ? L : 0;
    const double std = 0.02, out_std = 0.02 / sqrt(2 * (double)L);
    const double gain = pow(2, -2.5), square = gain * sqrt(3 / (double)C);
    const double flat = gain * sqrt(6 / (double)(C + NH));
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, wte)},
        {"norm1_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm1_w)},
        {"qkv_w", {L, 3 * C, C}, INIT_UNIFORM(square), DECAY, 1, offsetof(Params, qkv_w)},
        {"beta_w", {L, NH, C}, INIT_UNIFORM(flat), DECAY, 1, offsetof(Params, beta_w)},
        {"conv_w", {conv, 3 * C, WINDOW}, INIT_UNIFORM(0.5), DECAY, 1, offsetof(Params, conv_w)},
        {"norm_o_w", {L, C / NH}, INIT_ONE, DECAY, 1, offsetof(Params, norm_o_w)},
        {"proj_w", {L, C, C}, INIT_UNIFORM(square), DECAY, 1, offsetof(Params, proj_w)},
        {"norm2_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm2_w)},
        {"gu_w", {L, 2 * H, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, gu_w)},
        {"down_w", {L, C, H}, INIT_NORMAL(out_std), DECAY, 1, offsetof(Params, down_w)},
        {"norm_w", {C}, INIT_ONE, DECAY, 1, offsetof(Params, norm_w)},
        {"head_w", {V, C}, INIT_NORMAL(std), DECAY, 1, offsetof(Params, head_w)},
    };
    weights_plan(&m->weights, ROWS(params), sizeof(float));
}

// partial_size: elements of scratch for sums in slices: the largest of all that is summed so.
static size_t partial_size(const Model *m)
{
    const size_t N = m->B * m->T, C = m->C, V = m->V, H = m->H;
    const size_t sizes[] = {(3 * C + m->NH) * C, C * C, 2 * H * C};
    const size_t others[] = {token_scratch(N, V, C), norm_slices(N) * C,
                             norm_slices(N * m->NH) * (C / m->NH), CONV_SLICES * 3 * C * WINDOW};
    size_t most = weight_scratch(m->rows, m->Vp * C, 0);
    for (size_t size : sizes)
        most = std::max(most, weight_scratch(N, size, 0));
    for (size_t other : others)
        most = std::max(most, other);
    return most;
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config;
    m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t NH = m->NH = (size_t)config->heads, HS = C / NH, H = m->H = hidden_size(config);
    const size_t D = m->decode_B = B < 32 ? B : 32, L_conv = config->conv ? L : 0;
    const size_t Vp = m->Vp = (V + 31) / 32 * 32, P = m->P = (3 * C + NH + 7) / 8 * 8;
    const size_t by_chunk = config->form == CHUNK ? L : 0, by_token = L - by_chunk;
    const size_t eval_B = std::min(B, B * T / shape.eval_T); // its chunks may be more
    const size_t chunks = NH * std::max(B * ((T + CS - 1) / CS),
                                        eval_B * ((shape.eval_T + CS - 1) / CS));
    const size_t asked = m->asked = asked_each(shape), rows = m->rows = asked_rows(asked, B, T);
    m->silu_from = config->conv || config->qk_silu ? 0 : 2 * NH;
    m->range = (float)(1 + config->eigenvalues);
    const DeviceTensor copies[] = {
        DEVICE("in_w", floatX, Copies, in_w, L, P, C),
        DEVICE("proj_w", floatX, Copies, proj_w, L, C, C),
        DEVICE("gu_w", floatX, Copies, gu_w, L, 2 * H, C),
        DEVICE("down_w", floatX, Copies, down_w, L, C, H),
        DEVICE("head_w", floatX, Copies, head_w, Vp, C),
    };
    const DeviceTensor acts[] = { // names that the CPU has too are the same numbers
        DEVICE("x", float, Acts, x, L + 1, B, T, C), DEVICE("r1", floatX, Acts, r1, L, B, T, C),
        SPACED("p", floatX, P, 0, Acts, p, L, B, T, 3 * C),
        SPACED("b", floatX, P, 3 * C, Acts, b, L, B, T, NH),
        DEVICE("qkv", floatX, Acts, qkv, L, B, T, 3 * C),
        DEVICE("beta", float, Acts, beta, L, B, T, NH), // of u only one exists
        DEVICE("u", float, Acts, kept.u, by_token, B, T, C),
        DEVICE("S", float, Acts, S, by_token, B, NH, HS * HS),
        DEVICE("u", floatX, Acts, kept.N, by_chunk, B, T, C),
        DEVICE("pairs", floatX, Acts, kept.pairs, by_chunk, chunks, 3 * CS, CS),
        DEVICE("states", floatX, Acts, kept.states, by_chunk, chunks, HS, HS),
        DEVICE("o", floatX, Acts, o, L, B, T, C),
        DEVICE("z", floatX, Acts, z, L, B, T, C), DEVICE("mid", float, Acts, mid, L, B, T, C),
        DEVICE("r2", floatX, Acts, r2, L, B, T, C), DEVICE("gu", floatX, Acts, gu, L, B, T, 2 * H),
        DEVICE("h", floatX, Acts, h, L, B, T, H), DEVICE("y", floatX, Acts, y, B, T, C),
        SPACED(asked ? "logits, asked" : "logits", float, Vp, 0, Acts, logits, B, rows / B, V),
        DEVICE("losses", float, Acts, losses, B, T),
    };
    const DeviceTensor dacts[] = {
        DEVICE("dx", floatX, Dacts, dx, B, T, C), DEVICE("dr", floatX, Dacts, dr, B, T, C),
        DEVICE("dqkv", floatX, Dacts, dqkv, B, T, 3 * C), DEVICE("dp", floatX, Dacts, dp, B, T, P),
        DEVICE("dbeta", float, Dacts, dbeta, B, T, NH), DEVICE("do", floatX, Dacts, d_o, B, T, C),
        DEVICE("dz", floatX, Dacts, dz, B, T, C), DEVICE("dgu", floatX, Dacts, dgu, B, T, 2 * H),
        DEVICE("dh", floatX, Dacts, dh, B, T, H),
        DEVICE("dlogits", floatX, Dacts, dlogits, rows, Vp),
        ASKED_TENSORS(asked ? B : 0, asked, T, C),
        DEVICE("dstates", floatX, Dacts, dstates, by_chunk ? chunks : 0, HS, HS),
        DEVICE("partial", float, Dacts, partial, partial_size(m)),
    };
    const DeviceTensor decoder[] = {
        DEVICE("S", float, Decoder, S, L, D, NH, HS * HS),
        DEVICE("window", floatX, Decoder, window, L_conv, D, WINDOW - 1, 3 * C),
        DEVICE("tokens", int, Decoder, tokens, D), DEVICE("x", float, Decoder, x, D, C),
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
    const size_t L = m->L, C = m->C, H = m->H, P = m->P;
    const Params p = m->params;
    const Copies c = m->copies;
    const WeightCopy copies[] = {{p.qkv_w, c.in_w, 3 * C * C, P * C},
                                 {p.beta_w, c.in_w + 3 * C * C, m->NH * C, P * C},
                                 {p.proj_w, c.proj_w, L * C * C, 0},
                                 {p.gu_w, c.gu_w, 2 * L * H * C, 0},
                                 {p.down_w, c.down_w, L * C * H, 0},
                                 {p.head_w, c.head_w, m->V * C, 0}};
    device_pieces(&m->device, ROWS(copies));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 22 HS a channel and layer in the recurrence, 6 of them forward.
static double model_flops(const Model *m)
{
    const size_t N = m->B * m->T, unread = m->V * m->C * (N - m->rows) / N; // see asked.cuh
    const double weights = (double)(arena_elements(&m->weights.params, "wte") - unread);
    const size_t HS = m->C / m->NH; // by chunks 6 HS and 4 CS forward, of a triangular matrix half
    const size_t each = m->config.form == CHUNK ? 18 * HS + 12 * CS : 22 * HS;
    return (double)m->config.training.accumulate * (double)N *
           (6 * weights + (double)(m->L * m->C * each));
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, NH = n * m->NH, P = n * m->P, H = n * m->H;
    const size_t square = (m->C / m->NH) * (m->C / m->NH), heads = l * m->B * m->NH;
    const size_t chunks = heads * ((m->T + CS - 1) / CS);
    const Acts *a = &m->acts;
    return {.x = a->x + C, .beta = a->beta + NH, .S = a->S ? a->S + heads * square : NULL,
            .mid = a->mid + C, .r1 = a->r1 + C, .p = a->p + P, .qkv = a->qkv + 3 * C,
            .o = a->o + C, .z = a->z + C, .r2 = a->r2 + C, .gu = a->gu + 2 * H, .h = a->h + H,
            .kept = {a->kept.u + C, a->kept.N + C, a->kept.pairs + chunks * 3 * CS * CS,
                     a->kept.states + chunks * square}};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, w = C * m->C, H = C * m->H, HS = m->C / m->NH;
    return {.norm1_w = p->norm1_w + C, .qkv_w = p->qkv_w + 3 * w,
            .beta_w = p->beta_w + C * m->NH,
            .conv_w = m->config.conv ? p->conv_w + 3 * C * WINDOW : NULL,
            .norm_o_w = p->norm_o_w + l * HS, .proj_w = p->proj_w + w, .norm2_w = p->norm2_w + C,
            .gu_w = p->gu_w + 2 * H, .down_w = p->down_w + H};
}

// layer_copies: the weights of layer l in floatX.
static Copies layer_copies(const Model *m, size_t l)
{
    const Copies *c = &m->copies;
    const size_t C = l * m->C;
    return {c->in_w + C * m->P, c->proj_w + C * m->C, c->gu_w + 2 * C * m->H,
            c->down_w + C * m->H, c->head_w};
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, H = m->H, L = m->L, P = m->P, N = B * T;
    const Params all = m->params;
    const Acts acts = m->acts;
    const Device *device = &m->device;
    cudaStream_t stream = device->stream;
    embed_forward(acts.x, device->inputs, all.wte, NULL, B, T, C, stream);
    for (size_t l = 0; l < L; l++) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(m, &m->params, l);
        const Copies w = layer_copies(m, l);
        rmsnorm_forward(k.r1, k.x, p.norm1_w, N, C, stream);
        matmul_forward(k.p, k.r1, w.in_w, NULL, N, C, P, stream);
        activate_forward(k.qkv, k.beta, NULL, k.p, p.conv_w, B, T, C, NH, P, m->silu_from, m->range,
                         stream);
        delta_forward(k.o, k.kept, k.S, k.qkv, k.beta, NULL, B, T, C, NH, m->config.form, stream);
        rmsnorm_forward(k.z, k.o, p.norm_o_w, N * NH, C / NH, stream);
        matmul_residual<float>(k.mid, k.x, k.z, w.proj_w, NULL, N, C, C, stream);
        rmsnorm_forward(k.r2, k.mid, p.norm2_w, N, C, stream);
        matmul_forward(k.gu, k.r2, w.gu_w, NULL, N, C, 2 * H, stream);
        swiglu_forward(k.h, k.gu, N, H, stream);
        matmul_residual<float>(k.x + N * C, k.mid, k.h, w.down_w, NULL, N, H, C, stream);
    }
    rmsnorm_forward(acts.y, acts.x + L * N * C, all.norm_w, N, C, stream);
    const Asked asked = m->dacts.asked;
    const floatX *y = asked_gather(asked, acts.y, device->targets, N, m->rows, C, stream);
    matmul_residual<float>(acts.logits, NULL, y, m->copies.head_w, NULL, m->rows, C, m->Vp, stream);
    crossentropy(acts.losses, device->predictions, m->dacts.dlogits, device->result, acts.logits,
                 device->targets, asked.where, device->input, N, m->rows, m->V, m->Vp, stream);
}

// in_backward_weight: dqkv_w (3C,C) +=, dbeta_w (NH,C) += dp (N,P)^T r (N,C). partial: scratch.
static void in_backward_weight(float *dqkv_w, float *dbeta_w, float *partial, const floatX *dp,
                               const floatX *r, size_t N, size_t C, size_t NH, size_t P,
                               cudaStream_t stream)
{
    const size_t n = 3 * C * C, size = n + NH * C, slices = slices_of(N, size), K = N / slices;
    const Gemm g = {.out = partial, .x = dp, .y = r, .type = CUDA_R_32F, .in = FLOATX_TYPE,
                    .x_t = 1, .M = 3 * C + NH, .N = C, .K = K, .ld_out = C, .ld_x = P, .ld_y = C,
                    .batch = slices, .out_step = size, .x_step = K * P, .y_step = K * C};
    gemm(&g, stream);
    LAUNCH(slices_sum_kernel, (size + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0, stream,
           dqkv_w, NULL, partial, (int)slices, size, 0, 0, n, (size_t)(dbeta_w - dqkv_w));
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t B = m->B, T = m->T, C = m->C, NH = m->NH, H = m->H, L = m->L, P = m->P, N = B * T;
    const Params all = m->params, sums = m->grads;
    const Acts acts = m->acts;
    const Dacts d = m->dacts;
    cudaStream_t stream = m->device.stream;
    matmul_backward_weight(sums.head_w, 0, NULL, d.partial, d.dlogits, asked_or(d.asked, acts.y),
                           m->rows, C, m->V, m->Vp, 0, stream);
    matmul_backward_input(asked_or(d.asked, d.dr), d.dlogits, m->copies.head_w, m->rows, C, m->Vp,
                          stream);
    asked_scatter(d.dr, d.asked, N, C, stream);
    rmsnorm_backward(d.dx, sums.norm_w, d.partial, d.dr, acts.x + L * N * C, all.norm_w, N, C, 1,
                     stream);
    for (size_t l = L; l-- > 0;) {
        const Acts k = layer_acts(m, l);
        const Params p = layer_params(m, &m->params, l), g = layer_params(m, &m->grads, l);
        const Copies w = layer_copies(m, l);
        matmul_backward_weight(g.down_w, 0, NULL, d.partial, d.dx, k.h, N, H, C, C, 1, stream);
        matmul_backward_input(d.dh, d.dx, w.down_w, N, H, C, stream);
        swiglu_backward(d.dgu, d.dh, k.gu, N, H, stream);
        matmul_backward_weight(g.gu_w, 0, NULL, d.partial, d.dgu, k.r2, N, C, 2 * H, 2 * H, 1,
                               stream);
        matmul_backward_input(d.dr, d.dgu, w.gu_w, N, C, 2 * H, stream);
        rmsnorm_backward(d.dx, g.norm2_w, d.partial, d.dr, k.mid, p.norm2_w, N, C, 0, stream);
        matmul_backward_weight(g.proj_w, 0, NULL, d.partial, d.dx, k.z, N, C, C, C, 1, stream);
        matmul_backward_input(d.dz, d.dx, w.proj_w, N, C, C, stream);
        rmsnorm_backward(d.d_o, g.norm_o_w, d.partial, d.dz, k.o, p.norm_o_w, N * NH, C / NH, 1,
                         stream);
        delta_backward(d.dqkv, d.dbeta, NULL, d.dstates, d.d_o, NULL, k.kept, k.S, k.qkv, k.beta, B,
                       T, C, NH, m->config.form, stream);
        activate_backward(d.dp, g.conv_w, d.partial, d.dqkv, d.dbeta, k.p, k.beta, p.conv_w, B, T,
                          C, NH, P, m->silu_from, m->range, stream);
        in_backward_weight(g.qkv_w, g.beta_w, d.partial, d.dp, k.r1, N, C, NH, P, stream);
        matmul_backward_input(d.dr, d.dp, w.in_w, N, C, P, stream);
        rmsnorm_backward(d.dx, g.norm1_w, d.partial, d.dr, k.x, p.norm1_w, N, C, 0, stream);
    }
    embed_backward(sums.wte, NULL, d.partial, d.dx, m->device.inputs, B, T, m->V, C, stream);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, NH = m->NH, H = m->H, P = m->P, V = m->V, Vp = m->Vp;
    const size_t size = m->decode_B * C * (C / NH);
    const Dacts d = m->dacts;
    const Decoder memory = m->decoder;
    cudaStream_t stream = m->device.stream;
    if (t == 0)
        CUDA_CHECK(cudaMemsetAsync(m->decoder_arena.base, 0, m->decoder_arena.bytes, stream));
    CUDA_CHECK(cudaMemcpyAsync(memory.tokens, tokens, D * sizeof(int), cudaMemcpyHostToDevice,
                               stream));
    embed_forward(memory.x, memory.tokens, m->params.wte, NULL, D, 1, C, stream);
    for (size_t l = 0; l < m->L; l++) {
        const Params p = layer_params(m, &m->params, l);
        const Copies w = layer_copies(m, l);
        float *S = memory.S + l * size;
        floatX *window = p.conv_w ? memory.window + l * m->decode_B * (WINDOW - 1) * 3 * C : NULL;
        rmsnorm_forward(d.dr, memory.x, p.norm1_w, D, C, stream);
        matmul_forward(d.dp, d.dr, w.in_w, NULL, D, C, P, stream);
        activate_forward(d.dqkv, d.dbeta, window, d.dp, p.conv_w, D, 1, C, NH, P, m->silu_from,
                         m->range, stream);
        delta_forward(d.d_o, {}, S, d.dqkv, d.dbeta, S, D, 1, C, NH, RECURRENT, stream);
        rmsnorm_forward(d.dz, d.d_o, p.norm_o_w, D * NH, C / NH, stream);
        matmul_residual<float>(memory.x, memory.x, d.dz, w.proj_w, NULL, D, C, C, stream);
        rmsnorm_forward(d.dr, memory.x, p.norm2_w, D, C, stream);
        matmul_forward(d.dgu, d.dr, w.gu_w, NULL, D, C, 2 * H, stream);
        swiglu_forward(d.dh, d.dgu, D, H, stream);
        matmul_residual<float>(memory.x, memory.x, d.dh, w.down_w, NULL, D, H, C, stream);
    }
    rmsnorm_forward(d.dr, memory.x, m->params.norm_w, D, C, stream);
    matmul_residual<float>(memory.logits, NULL, d.dr, m->copies.head_w, NULL, D, C, Vp, stream);
    return device_logits(&m->device, memory.logits, D, V, Vp, m->decode_B);
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
// [main] Options, presets, start.  (ports train_deltanet.c[main])

#define ANSWERS "--channels 128 --hidden 0 --batch-size 256 --lr 1e-3 --lr-min 1e-6 " \
    "--eval-batches 211 "
#define PARITY_RUN ANSWERS "--task parity --layers 2 --steps 20000 --warmup 2000 --grad-clip 0"
#define MODULAR_RUN ANSWERS "--layers 3 --steps 100000 --warmup 10000 --weight-decay 0.1 --task "
#define WORDS "--channels 128 --hidden 0 --conv no --batch-size 512 --steps 60000 --lr 1e-4 " \
    "--schedule constant --warmup 0 --weight-decay 0.01 --eval-batches 30 --task "
static const Preset PRESETS[] = {
    {"small", "--max-length 24 --eval-min-length 25 --eval-max-length 80 --eval-batches 32",
     "parity, short"},
    {"main", "--task copying --string-size 16 --lr 2e-3 --steps 600", "16 letters on two cores"},
    {"parity", PARITY_RUN, "Table 3, at the authors' batch of 256 and 20000 steps"},
    {"modular", MODULAR_RUN "modular", "Table 3, at a batch of 256; the paper's is 1024"},
    {"brackets", MODULAR_RUN "brackets", "Table 3, at a batch of 256"},
    {"s5-swaps", WORDS "s5 --elements swaps --layers 1", "Fig. 4; the paper takes 312500 steps"},
    {"s5-triples", WORDS "s5 --elements triples --layers 5", "Fig. 4"},
    {"s5", WORDS "s5 --layers 5", "Fig. 4"},
    {"s5-tokens", WORDS "s5 --tokens-per-element 4 --layers 5", "Fig. 4"},
    {"z60", WORDS "z60 --layers 5", "Fig. 8"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"eigenvalues", OPT_CHOICE, &c->eigenvalues, "signed", 0, 0, "nonneg|signed", DEFINES_MODEL,
         "of a step: beta in (0,1) or (0,2)"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"heads", OPT_INT, &c->heads, "4", 1, 1 << 16, "NH", DEFINES_MODEL, "each its own state"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "NH times HS"},
        {"hidden", OPT_INT, &c->hidden, "64", 0, 1 << 20, "H", DEFINES_MODEL,
         "of the MLP, 0 = 8/3 C rounded up to a multiple of 256"},
        {"conv", OPT_CHOICE, &c->conv, "yes", 0, 0, "no|yes", DEFINES_MODEL,
         "short convolution of q, k and v"},
        {"qk-silu", OPT_CHOICE, &c->qk_silu, "no", 0, 0, "no|yes", DEFINES_MODEL,
         "SiLU on q and k where there is no convolution"},
        {"form", OPT_CHOICE, &c->form, "auto", 0, 0, "auto|recurrent|chunk", RUNTIME,
         "token by token, or 64 at a time on tensor cores; auto: by shape"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    options_default(options, "task", "parity");
    options_default(options, "lr", "4e-3");
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    if (c->channels % c->heads)
        die(EXIT_USAGE, "--channels %d: expected a multiple of --heads %d: every head has as many "
            "channels\nhint: --heads %d --channels %d", c->channels, c->heads, c->heads,
            (c->channels / c->heads + 1) * c->heads);
    if (c->channels / c->heads > HEAD_MOST)
        die(EXIT_USAGE, "--heads: expected heads of at most %d channels, got %d\n"
            "hint: more --heads; ./train_deltanet, on the CPU, takes any", HEAD_MOST,
            c->channels / c->heads);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g FLOPs an update", model_flops(&m));
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
                  "train_deltanet_gpu: DeltaNet on the GPU. Without options: a small parity.",
                  preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    const char *gpu = cuda_start();
    config.form = delta_form((size_t)(config.channels / config.heads), config.form);
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
