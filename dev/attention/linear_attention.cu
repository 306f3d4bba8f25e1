// linear_attention.cu: the linear Transformer's attention, causal or not, forward and backward:
// out_t = sum_u phi(q_t).phi(k_u) v_u / norm_t, phi = elu + 1.  [Katharopoulos et al. 2020]
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o linear_attention dev/attention/linear_attention.cu
//
// Quadratic: the tiles of train_gpt2.cu with weights phi(q).phi(k) instead of exponentials: work
// grows with T^2. Chunks, causal only: 64 positions at a time, everything before them through a
// state; all four results are one kernel, whose pass says what is X, Y and Z in
//   y_t = sum over u of (X_t.Y_u) Z_u = in the chunk, masked: (X Y^T) Z, before it: X (sum Y^T Z)
//   pass 0   X = phi(q)     Y = phi(k)     Z = v, 1      out = y / (the column of the 1), u <= t
//   pass 1   X = dout, -D   Y = v, 1       Z = phi(k)    dq = y phi'(q) / norm            u <= t
//   pass 2   X = v, 1       Y = dout, -D   Z = phi(q) / norm      dk = y phi'(k)          u >= t
//   pass 3   X = phi(k)     Y = phi(q)     Z = dout / norm        dv = y                  u >= t
// with D = dout.out (in two bf16: high and low part). State and sums are fp32, bf16 only as an
// operand. A block has 64 of Z's columns, so X Y^T is made HS/64 times.
//
// ms (TFLOP/s of the quadratic form: 4 and 10 HS a pair) at (B,T,NH,HS), causal, L2 flushed; an
// H200, 2026-11-29.
//    version                                    (320,258,1,192) (8,2048,16,128) (16,1024,12,64)
//  forward
//  1 naive: a block a query                              9.0 (0.9)
//  2 a warp a query; FP32's, and any head size's         4.8 (1.7)     46.7 (2.9)     26.0 (1.2)
//  3 chunks                                             0.179 (46)    0.223 (617)    0.083 (311)
//  8 quadratic tiles: linear_attention_forward          0.092 (89)    0.544 (253)    0.131 (198)
//  backward
//  1 naive                                              53.2 (0.4)
//  2 a warp a row                                        9.0 (2.5)    141.8 (2.4)     41.0 (1.5)
//  3 chunks                                             0.676 (30)     1.00 (342)    0.444 (145)
//  8 quadratic tiles: linear_attention_backward         0.372 (55)     2.05 (167)    0.463 (139)
//  9 linear_attention_forward and _backward             0.464 (44)     2.60 (132)    0.594 (109)
// Chunks are 2.4 and 2 times as fast at T = 2048, 1.6 and 1.04 at 1024, and half as fast at 258,
// the copying task's length, which the trainer's tiles are made for.
//
// Products of 64 x 64 x 64 a head on paper, forward, T = 64 n: quadratic (HS/64) n (n + 1), chunks
// (HS/64)^2 (1 + 2 + 64/HS) n: the chunks win from n = 4 (HS 64), 7 (128), 10 (192) on.
#include "attention_bench.cuh"

#ifdef PRECISION_BF16
enum { CHUNK_WARPS = 4, CHUNK_THREADS = CHUNK_WARPS * WARP };
enum { CHUNK = 64, LDZ = CHUNK + 24 }; // 16 columns more for the 1, 8 against bank conflicts

// chunk_bytes: shared memory of a block of linear_chunk_kernel.
static size_t chunk_bytes(int HS)
{
    const size_t xy = 2 * CHUNK * (HS + 24), z = CHUNK * LDZ, state = (HS + 16) * LDZ;
    return (xy + z + state) * sizeof(floatX);
}

// chunk_fetch: start copying rows row .. row+63, W columns, of x (T, ), `stride` apart, into a tile
// [64][LD]; rows from T on become 0. A thread always has the same elements: see chunk_map.
template <int W, int LD>
static __device__ inline void chunk_fetch(floatX *tile, const floatX *x, int stride, int row, int T)
{
    const int r = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < CHUNK; i += CHUNK_THREADS / 8) {
        const bool inside = row + i + r < T;
        const floatX *from = x + (size_t)(inside ? row + i + r : 0) * stride + column;
#pragma unroll
        for (int c = 0; c < W; c += 64)
            copy_async(tile + (i + r) * LD + column + c, from + c, inside);
    }
}

// chunk_map: this thread's elements of a tile that chunk_fetch brought = phi of them (PHI), times
// 1/norm of their row (stats (T,2), unless NULL); 0 from T on.
template <int W, int LD, int PHI>
static __device__ inline void chunk_map(floatX *tile, const float2 *stats, int row, int T)
{
#pragma unroll 1
    for (int i = threadIdx.x / 8; i < CHUNK; i += CHUNK_THREADS / 8) {
        const float factor = row + i >= T ? 0 : stats ? stats[row + i].x : 1;
#pragma unroll
        for (int c = 0; c < W; c += 64) {
            Pack<floatX, 8> *p = (Pack<floatX, 8> *)(tile + i * LD + threadIdx.x % 8 * 8 + c);
            Pack<floatX, 8> v = *p;
#pragma unroll
            for (int n = 0; n < 8; n++)
                v.v[n] = (floatX)(factor * (PHI ? phi((float)v.v[n]) : (float)v.v[n]));
            *p = v;
        }
    }
}

// chunk_columns: the 16 columns at `tile` of this thread's row (there are 64) = a, b, 0, ..., 0.
static __device__ inline void chunk_columns(floatX *tile, int ld, float a, float b)
{
    uint4 *p = (uint4 *)(tile + threadIdx.x * ld);
    p[0] = {pack2(a, b), 0, 0, 0};
    p[1] = {0, 0, 0, 0};
}

// linear_stats_kernel: stats (B,NH,T,2) = 1 / norm and D = dout.out of each row, a warp a row.
static __global__ void linear_stats_kernel(float2 *stats, const floatX *dout, const floatX *out,
                                           const float *norm, size_t rows, int T, int C, int NH)
{
    const size_t row = blockIdx.x * (size_t)GENERAL_WARPS + threadIdx.x / WARP, head = row / T;
    const int HS = C / NH;
    float D = 0;
    if (row >= rows)
        return;
    const size_t at = (head / NH * T + row % T) * C + head % NH * HS;
    for (int h = threadIdx.x % WARP; h < HS; h += WARP)
        D += (float)dout[at + h] * (float)out[at + h];
    D = warp_sum(D);
    if (threadIdx.x % WARP == 0)
        stats[row] = {1 / norm[row], D};
}

// linear_chunk_kernel: see the top: `to` (B,T, ) and norm of 64 columns of one head, by one pass.
// Rows of x, y, z, of `to` and of the raw q or k that phi' is of, are *_stride apart.
template <int HS, int PASS>
static __global__ void __launch_bounds__(CHUNK_THREADS, 2)
    linear_chunk_kernel(floatX *to, float *norm, const floatX *x, const floatX *y, const floatX *z,
                        const floatX *slope, const float2 *stats, int to_stride, int x_stride,
                        int y_stride, int z_stride, int T, int NH)
{
    enum { ONE = PASS == 0, MINUS_D = PASS == 1 || PASS == 2, REVERSE = PASS >= 2 };
    enum { LD = HS + 24, KT = HS / 16 + MINUS_D, NP = 4 + ONE, MS = (KT + 3) / 4 };
    enum { XY = CHUNK * LD };
    extern __shared__ __align__(16) floatX tiles[]; // x, y [64][LD]; z [64], state [16 KT][LDZ]
    floatX *xs = tiles, *ys = xs + XY, *zs = ys + XY, *state = zs + CHUNK * LDZ;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, t = lane % 4;
    const int x_at = row_at(lane, LD), y_at = column_at(lane, LD), z_at = row_at(lane, LDZ);
    const int head = blockIdx.x / (HS / 64), slab = blockIdx.x % (HS / 64) * 64;
    const int chunks = (T + CHUNK - 1) / CHUNK, b = head / NH, h = head % NH * HS;
    float sum[MS][2 * NP][4] = {}; // state: sum of Y^T Z, 16 rows in every 64 a warp
    x += (size_t)b * T * x_stride + h, y += (size_t)b * T * y_stride + h;
    z += (size_t)b * T * z_stride + h + slab, to += (size_t)b * T * to_stride + h + slab;
    slope += (size_t)b * T * to_stride + h + slab;
    stats += (size_t)head * T;
    const auto fetch = [=](int i) {
        const int row = (REVERSE ? chunks - 1 - i : i) * CHUNK;
        chunk_fetch<HS, LD>(xs, x, x_stride, row, T);
        chunk_fetch<HS, LD>(ys, y, y_stride, row, T);
        chunk_fetch<64, LDZ>(zs, z, z_stride, row, T);
    };
    fetch(0);
    for (int i = 0; i < chunks; i++) {
        const int row = (REVERSE ? chunks - 1 - i : i) * CHUNK;
        copy_wait();
        if (PASS == 0 || PASS == 3) {
            chunk_map<HS, LD, 1>(xs, NULL, row, T);
            chunk_map<HS, LD, 1>(ys, NULL, row, T);
        }
        if (PASS == 1 || PASS == 2)
            chunk_map<64, LDZ, 1>(zs, REVERSE ? stats : NULL, row, T);
        if (PASS == 3)
            chunk_map<64, LDZ, 0>(zs, stats, row, T);
        if (threadIdx.x < CHUNK) {
            const int inside = row + (int)threadIdx.x < T;
            const float D = MINUS_D && inside ? -stats[row + threadIdx.x].y : 0;
            const float high = __bfloat162float(__float2bfloat16(D));
            if (ONE)
                chunk_columns(zs + 64, LDZ, inside ? 1 : 0, 0);
            if (MINUS_D) {
                chunk_columns((REVERSE ? ys : xs) + HS, LD, high, D - high);
                chunk_columns((REVERSE ? xs : ys) + HS, LD, 1, 1);
            }
        }
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int n = 0; n < 4 * NP; n++) // two columns of one row at a time
                if (warp + 4 * m < KT)
                    *(uint32_t *)(state + (16 * (warp + 4 * m) + n % 2 * 8 + lane / 4) * LDZ +
                                  n / 2 * 8 + 2 * t) =
                        pack2(sum[m][n / 2][n % 2 * 2], sum[m][n / 2][n % 2 * 2 + 1]);
        __syncthreads();
        float a[8][4] = {}, out[2 * NP][4] = {};
#pragma unroll
        for (int k = 0; k < KT; k++) {
            const uint4 f = ldmatrix<0>(xs + 16 * warp * LD + 16 * k + x_at);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint4 g = ldmatrix<0>(ys + 16 * n * LD + 16 * k + y_at);
                mma(a[2 * n], f, g.x, g.y);
                mma(a[2 * n + 1], f, g.z, g.w);
            }
#pragma unroll
            for (int n = 0; n < NP; n++) {
                const uint4 g = ldmatrix<1>(state + 16 * k * LDZ + 16 * n + z_at);
                mma(out[2 * n], f, g.x, g.y);
                mma(out[2 * n + 1], f, g.z, g.w);
            }
        }
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int own = 16 * warp + n % 4 / 2 * 8 + lane / 4, other = n / 4 * 8 + 2 * t + n % 2;
            if (REVERSE ? other < own : other > own)
                a[n / 4][n % 4] = 0;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 f = accumulator_pack(&a[2 * k]);
#pragma unroll
            for (int n = 0; n < NP; n++) {
                const uint4 g = ldmatrix<1>(zs + 16 * k * LDZ + 16 * n + z_at);
                mma(out[2 * n], f, g.x, g.y);
                mma(out[2 * n + 1], f, g.z, g.w);
#pragma unroll
                for (int m = 0; m < MS; m++)
                    if (warp + 4 * m < KT) {
                        const floatX *at = ys + 16 * k * LD + 16 * (warp + 4 * m) + y_at;
                        const uint4 c = ldmatrix<1>(at);
                        mma(sum[m][2 * n], c, g.x, g.y);
                        mma(sum[m][2 * n + 1], c, g.z, g.w);
                    }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 16 * warp + 8 * half + lane / 4;
            float factor = 1;
            if (ONE) {
                const float total = LINEAR_EPS +
                                    __shfl_sync(~0u, out[ONE ? 8 : 0][2 * half], lane / 4 * 4);
                factor = 1 / total;
                if (slab == 0 && t == 0 && r < T)
                    norm[(size_t)head * T + r] = total;
            } else if (PASS == 1 && r < T)
                factor = stats[r].x;
            const size_t at = (size_t)r * to_stride + 2 * t;
#pragma unroll
            for (int n = 0; n < 8 && r < T; n++) {
                float v[2] = {factor * out[n][2 * half], factor * out[n][2 * half + 1]};
                for (int c = 0; c < 2 && MINUS_D; c++)
                    v[c] *= phi_slope(phi((float)slope[at + 8 * n + c]));
                *(uint32_t *)(to + at + 8 * n) = pack2(v[0], v[1]);
            }
        }
        __syncthreads(); // all have read this chunk and the state
        if (i + 1 < chunks)
            fetch(i + 1);
    }
}

// linear_chunk_pass: launch a pass for one head size.
template <int HS, int PASS>
static void linear_chunk_pass(floatX *to, float *norm, const floatX *x, const floatX *y,
                              const floatX *z, const floatX *slope, const float *stats,
                              const int stride[4], const Attention *p, cudaStream_t stream)
{
    LAUNCH((linear_chunk_kernel<HS, PASS>), p->B * p->NH * (HS / 64), CHUNK_THREADS,
           chunk_bytes(HS), stream, to, norm, x, y, z, slope, (const float2 *)stats, stride[0],
           stride[1], stride[2], stride[3], (int)p->T, (int)p->NH);
}

// linear_chunk_forward: out, norm: as linear_attention_forward, causal.
template <int HS> static void linear_chunk_forward(const Attention *p, cudaStream_t stream)
{
    const int C = (int)p->C, wide = 3 * C, stride[] = {C, wide, wide, wide};
    const floatX *q = p->qkv;
    linear_chunk_pass<HS, 0>((floatX *)p->out.data, (float *)p->lse.data, q, q + C, q + 2 * C, q,
                             p->scratch, stride, p, stream);
}

// linear_chunk_backward: dqkv: as linear_attention_backward, causal.
template <int HS> static void linear_chunk_backward(const Attention *p, cudaStream_t stream)
{
    const int C = (int)p->C, wide = 3 * C;
    const int sq[] = {wide, C, wide, wide}, sk[] = {wide, wide, C, wide};
    const int sv[] = {wide, wide, wide, C};
    const floatX *q = p->qkv, *k = q + C, *v = k + C;
    const size_t rows = p->B * p->NH * p->T;
    floatX *dqkv = (floatX *)p->dqkv.data;
    LAUNCH(linear_stats_kernel, (rows + GENERAL_WARPS - 1) / GENERAL_WARPS, GENERAL_WARPS * WARP, 0,
           stream, (float2 *)p->scratch, p->dout, p->in_out, p->in_lse, rows, (int)p->T, C,
           (int)p->NH);
    linear_chunk_pass<HS, 1>(dqkv, NULL, p->dout, v, k, q, p->scratch, sq, p, stream);
    linear_chunk_pass<HS, 2>(dqkv + C, NULL, v, p->dout, q, k, p->scratch, sk, p, stream);
    linear_chunk_pass<HS, 3>(dqkv + 2 * C, NULL, k, q, p->dout, k, p->scratch, sv, p, stream);
}

static void run_forward_chunks(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    switch (x->C / x->NH) {
    case 64: linear_chunk_forward<64>(x, stream); break;
    case 128: linear_chunk_forward<128>(x, stream); break;
    default: linear_chunk_forward<192>(x, stream);
    }
}

static void run_backward_chunks(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    switch (x->C / x->NH) {
    case 64: linear_chunk_backward<64>(x, stream); break;
    case 128: linear_chunk_backward<128>(x, stream); break;
    default: linear_chunk_backward<192>(x, stream);
    }
    attention_split(x, stream);
}

static const char *refuse_chunks(const void *problem)
{
    return ((const Attention *)problem)->causal ? refuse_tiled<1, 1, 1>(problem) : "causal only";
}
#endif

static const BenchKernel forward_kernels[] = {
    {1, "naive: a block a query", run_forward_naive<1>, refuse_naive},
    {2, "a warp a query; FP32's", run_forward_general<1>, NULL},
#ifdef PRECISION_BF16
    {3, "chunks", run_forward_chunks, refuse_chunks},
#endif
    {8, "linear_attention_forward", run_forward_any<1>, NULL},
};

static const BenchKernel backward_kernels[] = {
    {1, "naive: a block a row", run_backward_naive<1>, refuse_naive},
    {2, "a warp a row; FP32's", run_backward_general<1>, NULL},
#ifdef PRECISION_BF16
    {3, "chunks", run_backward_chunks, refuse_chunks},
#endif
    {8, "linear_attention_backward", run_backward_any<1>, NULL},
    {9, "forward + backward", run_both<1>, NULL},
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "linear_attention: the linear Transformer's, its own shapes");
    const int n = sizeof forward_kernels / sizeof *forward_kernels;
    const int failed = attention_ladder(forward_kernels, n, 0, 1, &bench) +
                       attention_ladder(backward_kernels, n + 1, 1, 1, &bench);
    return failed ? EXIT_FAIL : 0;
}
