// pairwise_backward.cu: da and db of the quadratic CausalRN layer from ds and what forward left.
// The equations are on top of pairwise.cuh, which holds kernel 2's statistics and the centring; the
// others are here.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o pairwise_backward dev/pairwise/pairwise_backward.cu
//
// ms a layer at (320,258,192), causal, exact, exp: 2.053e9 exponentials; H200, 2026-11-29, L2
// flushed; ex2 alone runs at 4155 Gexp/s here. Runs 1-4 are commits de36c55, fa206b3, 50743e6 and
// 5f1983e; of run 4 only FP32 took place: BF16 of the kernels you read is NOT YET MEASURED.
//    version                                       BF16 ms  Gexp/s   FP32 ms  Gexp/s
//  1 naive: a block a row of a, then of b           26.3        78    25.2        82   runs 3, 4
//  2 s1, s2 with 4 x 4 pairs a thread, then rows:
//      two exponentials a pair; any H; FP32's        5.09      404     5.03      408   runs 3, 4
//  3 one pass, e as an mma operand, s1 and s2 from
//      the tensor cores; 32 v x 32 channels a
//      warp, 12 warps an SM                          1.525    1346     -           -   run 1
//    two sequences a block                           1.598    1285     -           -   run 2
//    no s1 (its sums are channel means), 16 v a
//      warp, 24 warps an SM; 0.117 of it is da       1.344    1528     -           -   run 3
//    three barriers a chunk, not five; ldmatrix;
//      da's M and b by cp.async                      -           -     -           -   now
//  4 1/8 of the exponentials by polynomial           1.389    1478     -           -   run 3
// Losers. 1: every pair twice, with four block reductions. 2: two passes, and r, M, N in memory.
// 4: 6 more issue slots, and issue, not ex2, is what runs out (2/8: 1.400). Two sequences a block:
// its 12 warps end together, so no other block fills the end.
#include "pairwise_bench.cuh"

// block_sum2: two sums over the block's 128 threads, to all of them; `shared` holds 8 floats.
__device__ static float2 block_sum2(float x, float y, float *shared)
{
    x = warp_sum(x);
    y = warp_sum(y);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = x;
        shared[4 + threadIdx.x / 32] = y;
    }
    __syncthreads();
    return make_float2(shared[0] + shared[1] + shared[2] + shared[3],
                       shared[4] + shared[5] + shared[6] + shared[7]);
}

// backward_naive_kernel: the plain form: a block owns row `own` of a (SIDE 0: da) or of b (SIDE 1:
// db) and walks over the other index; dpre = r (dz - mean(dz) - z mean(dz z)) for every pair, so
// twice.
template <int ACT, int SIDE>
__global__ void __launch_bounds__(128)
    backward_naive_kernel(floatX *dx, const floatX *ds, const float *scale, const floatX *ac,
                          const floatX *bc, int T, int H, PairOptions opt)
{
    extern __shared__ float acc[]; // [H]
    __shared__ float shared[8];
    const size_t row = blockIdx.x, row0 = row / T * T;
    const int own = (int)(row - row0);
    const int first = opt.causal && SIDE ? own : 0, end = opt.causal && !SIDE ? own + 1 : T;
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        acc[d] = 0;
    for (int other = first; other < end; other++) {
        const size_t at_u = (row0 + (SIDE ? other : own)) * H,
                     at_v = (row0 + (SIDE ? own : other)) * H;
        const float f = scale[at_u / H];
        float2 sum = {0, 0};
        float r = 1, value, slope;
        if (opt.norm == NORM_EXACT) {
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float x = to_float(ac[at_u + d]) + to_float(bc[at_v + d]); // the mean is 0
                sum.y += x * x;
            }
            r = rsqrtf(block_sum2(0, sum.y, shared).y / (float)H + PAIR_EPS);
            sum = make_float2(0, 0);
            for (int d = threadIdx.x; d < H; d += blockDim.x) {
                float z = (to_float(ac[at_u + d]) + to_float(bc[at_v + d])) * r;
                psi<ACT>(z, &value, &slope);
                float dz = f * to_float(ds[at_u + d]) * slope;
                sum.x += dz;
                sum.y += dz * z;
            }
            sum = block_sum2(sum.x, sum.y, shared);
        }
        for (int d = threadIdx.x; d < H; d += blockDim.x) {
            float z = (to_float(ac[at_u + d]) + to_float(bc[at_v + d])) * r;
            psi<ACT>(z, &value, &slope);
            float dz = f * to_float(ds[at_u + d]) * slope;
            acc[d] += r * (dz - sum.x / (float)H - z * sum.y / (float)H);
        }
    }
    for (int d = threadIdx.x; d < H; d += blockDim.x)
        from_float(&dx[row * H + d], acc[d]);
}

// pair_general_db_kernel: a thread owns rows v0 .. v0+7 of one channel:
// db_v = sum_u r g e - N - M (a + b).
template <int ACT>
__global__ void __launch_bounds__(128)
    pair_general_db_kernel(floatX *db, const floatX *__restrict__ ds,
                           const float *__restrict__ scale, const floatX *__restrict__ ac,
                           const floatX *__restrict__ bc, const float *__restrict__ R,
                           const float *__restrict__ M, const float *__restrict__ N, int T, int H,
                           PairOptions opt)
{
    const GeneralRows k = general_rows(T, H);
    const int v0 = k.row, d = k.d;
    const size_t row0 = k.row0;
    float b[ROWS_G], acc[ROWS_G] = {};
    if (d >= H)
        return;
    load_rows(b, bc, k, T, H);
    for (int u = opt.causal ? v0 : 0; u < T; u++) {
        const float a = to_float(ac[(row0 + u) * H + d]);
        const float g = scale[row0 + u] * to_float(ds[(row0 + u) * H + d]);
        const size_t at = (row0 + u) * T + v0;
#pragma unroll
        for (int i = 0; i < ROWS_G; i++)
            if (v0 + i < T && (!opt.causal || v0 + i <= u)) {
                float r = R[at + i], value, slope;
                psi<ACT>((a + b[i]) * r, &value, &slope);
                acc[i] = fmaf(r * g, slope, acc[i]);
                if (opt.norm == NORM_EXACT)
                    acc[i] -= fmaf(M[at + i], a + b[i], N[at + i]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        if (v0 + i < T)
            from_float(&db[(row0 + v0 + i) * H + d], acc[i]);
}

// pair_general_da_kernel: a thread owns rows u0 .. u0+7 of one channel:
// da_u = g P - sum_v N + M (a + b), where g P = ds p: p carries the scale.
__global__ void __launch_bounds__(128)
    pair_general_da_kernel(floatX *da, const floatX *__restrict__ ds, const floatX *__restrict__ p,
                           const floatX *__restrict__ ac, const floatX *__restrict__ bc,
                           const float *__restrict__ M, const float *__restrict__ N, int T, int H,
                           PairOptions opt)
{
    const GeneralRows k = general_rows(T, H);
    const int u0 = k.row, d = k.d;
    const size_t row0 = k.row0;
    float a[ROWS_G], acc[ROWS_G] = {};
    if (d >= H)
        return;
    load_rows(a, ac, k, T, H);
    const int v_end = opt.norm != NORM_EXACT ? 0 : opt.causal ? min(u0 + ROWS_G, T) : T;
    for (int v = 0; v < v_end; v++) {
        const float b = to_float(bc[(row0 + v) * H + d]);
#pragma unroll
        for (int i = 0; i < ROWS_G; i++)
            if (u0 + i < T && (!opt.causal || v <= u0 + i)) {
                const size_t at = (row0 + u0 + i) * T + v;
                acc[i] += fmaf(M[at], a[i] + b, N[at]);
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS_G; i++)
        if (u0 + i < T) {
            const size_t at = (row0 + u0 + i) * H + d;
            from_float(&da[at], to_float(ds[at]) * to_float(p[at]) - acc[i]);
        }
}

// ---- fast path (BF16) ----

#ifdef PRECISION_BF16

// pack2: two floats as bf16 in one register, x in the low half.
__device__ inline uint32_t pack2(float x, float y)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *(uint32_t *)&v;
}

// mul2: product of two packed pairs of bf16.
__device__ inline uint32_t mul2(uint32_t x, uint32_t y)
{
    __nv_bfloat162 v = __hmul2(*(__nv_bfloat162 *)&x, *(__nv_bfloat162 *)&y);
    return *(uint32_t *)&v;
}
// mma_bf16_first: c = a b: the first of a sum, without eight registers of zeros.
__device__ inline void mma_bf16_first(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

enum { TILE_V = 32, CHUNK_U = 16, MT_STRIDE = CHUNK_U + 8 };

// The block's shared memory. A tile's 32 x 16 pairs: row v = 16m + 8 half + g of a u stands at 16m
// + 2g
// + half, so that a lane's two rows are neighbours.
typedef struct {
    float *ag;         // [CHUNK_U][H/4][a: 4, g: 4]
    float *rl;         // [CHUNK_U][2][8][log2(e) r: 2, log2(r): 2]
    float *s2;         // [H/32][CHUNK_U][TILE_V]  each slice's share of s2
    __nv_bfloat16 *g2; // [CHUNK_U][H/4][g a: 4, g: 4]  the mma's B operands of e' and e' b
    __nv_bfloat16 *ab; // [2][CHUNK_U][H+8]  channels in the order of pair_place
    __nv_bfloat16 *bb; // [TILE_V][H+8]  likewise
    __nv_bfloat16 *mt; // [TILE_V][MT_STRIDE]  -M, transposed
} PairShared;

// pair_shared: cut the block's dynamic memory; returns its size in bytes (x NULL: only that).
__host__ __device__ inline size_t pair_shared(PairShared *x, char *base, int H)
{
    const size_t f = CHUNK_U * H, pairs = CHUNK_U * TILE_V, share = (size_t)H / 32 * pairs;
    if (x) {
        x->ag = (float *)base;
        x->rl = x->ag + 2 * f;
        x->s2 = x->rl + 2 * pairs;
        x->g2 = (__nv_bfloat16 *)(x->s2 + share);
        x->ab = x->g2 + 2 * f;
        x->bb = x->ab + 2 * CHUNK_U * (H + 8);
        x->mt = x->bb + TILE_V * (H + 8);
    }
    return 4 * (2 * f + 2 * pairs + share) +
           2 * (2 * f + (2 * CHUNK_U + TILE_V) * (H + 8) + TILE_V * MT_STRIDE);
}

// A lane's part of a warp's 16 rows v by 32 channels: rows g and g+8 (half), channels 16c + 4t + j:
// the layout of mma's A operand and of its accumulator at once, k = 2t, 2t+1, 2t+8, 2t+9 being 4t
// .. 4t+3.
typedef struct {
    float b[2][2][4];   // [c][half][j]
    float acc[2][2][4]; // db
    uint32_t bb[2][4];  // b in BF16: an A operand
} PairTile;

// pair_place: where channels d, d+1 (d a multiple of 4; d+2, d+3: 8 further) of a row of ab or bb
// stand: in each 16, column 8n + 2t + i is channel 4t + 2n + i, so that ldmatrix delivers a
// PairTile's channels.
__device__ inline int pair_place(int d) { return d / 16 * 16 + d % 16 / 2; }

// A thread's part of a chunk of 16 u on its way to shared memory: rows own_u + 8k, four channels
// from own_d; own_u = threadIdx / (H/4), own_d = 4 (threadIdx % (H/4)), 2H threads.
typedef struct {
    uint2 a[2], ds[2];
    float scale[2];
} PairFetch;

// pair_fetch_u: rows u0 .. u0+15 of a, ds and scale from global memory, 0 beyond T.
__device__ inline PairFetch pair_fetch_u(const floatX *ac, const floatX *ds, const float *scale,
                                         int u0, int own_u, int own_d, int T, int H)
{
    PairFetch f;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = u0 + own_u + 8 * k;
        f.a[k] = f.ds[k] = make_uint2(0, 0);
        f.scale[k] = 0;
        if (u < T) {
            f.a[k] = *(const uint2 *)(ac + (size_t)u * H + own_d);
            f.ds[k] = *(const uint2 *)(ds + (size_t)u * H + own_d);
            f.scale[k] = scale[u];
        }
    }
    return f;
}

// pair_store_u: what pair_fetch_u fetched, to x.ag, x.g2 and ab, with g = scale ds.
__device__ inline void pair_store_u(const PairShared &x, __nv_bfloat16 *ab, const PairFetch &f,
                                    int own_u, int d, int H)
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int u = own_u + 8 * k;
        const float2 a0 = load2((const floatX *)&f.a[k].x), a1 = load2((const floatX *)&f.a[k].y);
        const float2 d0 = load2((const floatX *)&f.ds[k].x), d1 = load2((const floatX *)&f.ds[k].y);
        const float4 g = {f.scale[k] * d0.x, f.scale[k] * d0.y, f.scale[k] * d1.x,
                          f.scale[k] * d1.y};
        float4 *ag = (float4 *)&x.ag[2 * (u * H + d)];
        ag[0] = make_float4(a0.x, a0.y, a1.x, a1.y);
        ag[1] = g;
        *(uint4 *)&x.g2[2 * (u * H + d)] =
            make_uint4(pack2(g.x * a0.x, g.y * a0.y), pack2(g.z * a1.x, g.w * a1.y),
                       pack2(g.x, g.y), pack2(g.z, g.w));
        uint32_t *place = (uint32_t *)&ab[u * (H + 8) + pair_place(d)];
        place[0] = f.a[k].x;
        place[4] = f.a[k].y;
    }
}

// pair_backward_r: one warp of four (quarter): r and log2(r) of 16 v by 8 u of the chunk in ab from
// the tensor cores; masked pairs get an exponent of MASKED.
template <int STATS, int CAUSAL>
__device__ inline void pair_backward_r(const PairShared &x, const __nv_bfloat16 *ab,
                                       const float *astat, const float *bstat, int v0, int u0,
                                       int T, int H, float inv_H, int quarter, int g, int t)
{
    const int m = quarter % 2, n = quarter / 2;
    const __nv_bfloat16 *b0 = x.bb + (16 * m + g) * (H + 8) + 8 * t, *b1 = b0 + 8 * (H + 8);
    const __nv_bfloat16 *a = ab + (8 * n + g) * (H + 8) + 8 * t;
    float c[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int d = 0; STATS && d < H; d += 32) {
        const uint4 p = *(const uint4 *)(b0 + d), q = *(const uint4 *)(b1 + d);
        const uint4 s = *(const uint4 *)(a + d);
        mma_bf16(c, p.x, q.x, p.y, q.y, s.x, s.y);
        mma_bf16(c, p.z, q.z, p.w, q.w, s.z, s.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int u = u0 + 8 * n + 2 * t + i % 2, v = v0 + 16 * m + g + i / 2 * 8;
        const int in = u < T && v < T && (!CAUSAL || v <= u);
        float r = 1;
        if (STATS && in)
            r = pair_r(astat[u], bstat[v], c[i], inv_H);
        float *rl = x.rl + 2 * (u - u0) * TILE_V + 32 * m + 4 * g + i / 2;
        rl[0] = in ? LOG2E * r : 0.0f;
        rl[2] = in ? __log2f(r) : MASKED;
    }
}

// pair_backward_rows: rows u .. u_end-1 of the chunk against the warp's first NH halves (of 8 rows
// v): e' = r e straight from the exponent, acc += g e', and with STATS the slice's share of the sum
// over channels of g e' (a + b) from the tensor cores, the same in all eight columns of an mma.
// NPOLY of 8 exponentials go to the FMA pipe.
template <int NH, int STATS, int NPOLY>
__device__ __forceinline__ void pair_backward_rows(PairTile &tile, const PairShared &x, int u,
                                                   int u_end, int H, int warp, int g, int t)
{
    const int m = warp % 2, slice = warp / 2;
    const float *ag = x.ag + 2 * (u * H + 32 * slice + 4 * t);
    const float *rl = x.rl + 2 * u * TILE_V + 32 * m + 4 * g;
    const __nv_bfloat16 *g2 = x.g2 + 2 * (u * H + 32 * slice + 4 * t);
    float *s2 = x.s2 + (slice * CHUNK_U + u) * TILE_V + 16 * m + 2 * g;
#pragma unroll 1
    for (; u < u_end; u++, ag += 2 * H, g2 += 2 * H, rl += 2 * TILE_V, s2 += TILE_V) {
        float r[4], sum[4]; // r: r of both rows, log2(r) of both rows
        load4(r, rl);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint32_t e[4] = {0, 0, 0, 0};
            float a[4], gu[4];
            load4(a, ag + 32 * c);
            load4(gu, ag + 32 * c + 4);
#pragma unroll
            for (int half = 0; half < NH; half++) {
                float y[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int i = 4 * half + j;
                    y[j] = fmaf(a[j] + tile.b[c][half][j], r[half], r[2 + half]);
                    y[j] = i * NPOLY % 8 < NPOLY ? exp2_poly(y[j]) : exp2_mufu(y[j]);
                    tile.acc[c][half][j] = fmaf(gu[j], y[j], tile.acc[c][half][j]);
                }
                e[half] = pack2(y[0], y[1]);
                e[half + 2] = pack2(y[2], y[3]);
            }
            if (STATS) {
                const uint4 k = *(const uint4 *)(g2 + 32 * c);
                const uint32_t *b = tile.bb[c];
                if (c == 0)
                    mma_bf16_first(sum, e[0], e[1], e[2], e[3], k.x, k.y);
                else
                    mma_bf16(sum, e[0], e[1], e[2], e[3], k.x, k.y);
                mma_bf16(sum, mul2(e[0], b[0]), mul2(e[1], b[1]), mul2(e[2], b[2]),
                         mul2(e[3], b[3]), k.z, k.w);
            }
        }
        if (STATS && t == 0)
            store2(s2, sum[0], sum[2]);
    }
}

// ldmatrix4: four 8x8 matrices of BF16, rows at the lanes' addresses p: an A operand of mma or,
// TRANS, two B operands.
template <int TRANS> __device__ inline uint4 ldmatrix4(const __nv_bfloat16 *p)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(p);
    uint4 f;
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w) : "r"(at) : "memory");
    return f;
}

// pair_m_product: acc -= M^T a over the chunk's 16 u, -M taken from x.mt and a from ab.
__device__ inline void pair_m_product(PairTile &tile, const PairShared &x, const __nv_bfloat16 *ab,
                                      int H, int warp, int lane)
{
    const int row = lane % 16, column = lane / 16 * 8;
    const uint4 m = ldmatrix4<0>(x.mt + (warp % 2 * 16 + row) * MT_STRIDE + column);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint4 b = ldmatrix4<1>(ab + row * (H + 8) + warp / 2 * 32 + 16 * c + column);
#pragma unroll
        for (int n = 0; n < 2; n++) { // accumulator columns 2t, 2t+1 are channels 4t+2n, 4t+2n+1
            float(*acc)[4] = tile.acc[c];
            float f[4] = {acc[0][2 * n], acc[0][2 * n + 1], acc[1][2 * n], acc[1][2 * n + 1]};
            mma_bf16(f, m.x, m.y, m.z, m.w, n ? b.z : b.x, n ? b.w : b.y);
            acc[0][2 * n] = f[0], acc[0][2 * n + 1] = f[1];
            acc[1][2 * n] = f[2], acc[1][2 * n + 1] = f[3];
        }
    }
}

// pair_store_db: db = acc - mean over channels of sum_u r g e - b sum_u M. What acc holds is
// already short of M^T a, whose mean over channels is 0 with a's. sum_m: this thread's part of its
// lane's row.
template <int STATS>
__device__ inline void pair_store_db(floatX *db, const PairTile &tile, const PairShared &x,
                                     float sum_m, int v0, int T, int H)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warps = H / 16, m = warp % 2, slice = warp / 2;
    float *all_m = x.ag, *all_n = x.ag + warps * TILE_V; // [warp][TILE_V], [slice][TILE_V]
    all_m[warp * TILE_V + lane] = sum_m;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
        for (int i = 0; i < 8; i++)
            sum += tile.acc[i / 4][half][i % 4];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0)
            all_n[slice * TILE_V + 16 * m + 2 * g + half] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = 16 * m + 2 * g + half, v = v0 + 16 * m + 8 * half + g;
        float sum = 0, mean = 0;
#pragma unroll 1
        for (int w = 0; STATS && w < warps; w++)
            sum += all_m[w * TILE_V + at];
#pragma unroll 1
        for (int w = 0; STATS && w < H / 32; w++)
            mean += all_n[w * TILE_V + at];
        mean /= (float)H;
#pragma unroll
        for (int c = 0; c < 2 && v < T; c++) {
            const float *f = tile.acc[c][half], *b = tile.b[c][half];
            floatX *out = db + (size_t)v * H + 32 * slice + 16 * c + 4 * t;
            store2(out, f[0] - mean - b[0] * sum, f[1] - mean - b[1] * sum);
            store2(out + 2, f[2] - mean - b[2] * sum, f[3] - mean - b[3] * sum);
        }
    }
}

// pair_backward_kernel: a block owns 32 rows v of one sequence (db), a warp 16 of them by 32
// channels, and walks over u in chunks of 16. With STATS (exact) also M (B,T,Tp) in BF16, Tp = T
// rounded up to 32, 0 where masked. N is not needed: sum_u N_uv is the mean over channels of sum_u
// r g e.
template <int STATS, int CAUSAL, int NPOLY>
__global__ void __launch_bounds__(768, 1)
    pair_backward_kernel(floatX *db, __nv_bfloat16 *M, const floatX *__restrict__ ds,
                         const float *__restrict__ scale, const floatX *__restrict__ ac,
                         const floatX *__restrict__ bc, const float *__restrict__ astat,
                         const float *__restrict__ bstat, int B, int T, int H)
{
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int v0 = (int)(blockIdx.x / B) * TILE_V, stride_M = (T + TILE_V - 1) / TILE_V * TILE_V;
    const int lane_v = lane / 16 * 16 + lane % 2 * 8 + lane / 2 % 8; // the pair kept at `lane`
    const size_t row0 = (size_t)(blockIdx.x % B) * T;
    float sum_m = 0;
    PairShared x;
    PairTile tile;
    pair_shared(&x, shared, H);
    const int last_quarter = (int)blockDim.x / 32 - 4; // r is made by the last four warps
    const int own_u = threadIdx.x / (H / 4), own_d = threadIdx.x % (H / 4) * 4;
    const float inv_H = 1.0f / (float)H;
    for (int v = own_u; v < TILE_V; v += 8) {
        uint2 raw = {0, 0};
        if (v0 + v < T)
            raw = *(const uint2 *)(bc + (row0 + v0 + v) * H + own_d);
        uint32_t *place = (uint32_t *)&x.bb[v * (H + 8) + pair_place(own_d)];
        place[0] = raw.x;
        place[4] = raw.y;
    }
    int u0 = CAUSAL ? v0 : 0;
    pair_store_u(x, x.ab,
                 pair_fetch_u(ac + row0 * H, ds + row0 * H, scale + row0, u0, own_u, own_d, T, H),
                 own_u, own_d, H);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int c = i / 2, half = i % 2, v = warp % 2 * 16 + 8 * half + g;
        const __nv_bfloat16 *bv = &x.bb[v * (H + 8) + warp / 2 * 32 + 16 * c + 2 * t];
        tile.bb[c][half] = *(const uint32_t *)bv,
        tile.bb[c][half + 2] = *(const uint32_t *)(bv + 8);
        const float2 lo = load2(bv), hi = load2(bv + 8);
        tile.b[c][half][0] = lo.x, tile.b[c][half][1] = lo.y;
        tile.b[c][half][2] = hi.x, tile.b[c][half][3] = hi.y;
        for (int j = 0; j < 4; j++)
            tile.acc[c][half][j] = 0;
    }
    if (warp >= last_quarter)
        pair_backward_r<STATS, CAUSAL>(x, x.ab, astat + row0, bstat + row0, v0, u0, T, H, inv_H,
                                       warp - last_quarter, g, t);
    __syncthreads();
    for (int k = 0; u0 < T; u0 += CHUNK_U, k ^= 1) { // chunk u0's a is in ab[k]
        __nv_bfloat16 *ab = x.ab + k * CHUNK_U * (H + 8),
                      *ab_next = x.ab + (1 - k) * CHUNK_U * (H + 8);
        for (int i = 0; i < CHUNK_U; i += 8) {
            const int end = min(i + 8, T - u0), halves = (u0 + i - v0) / 8 + 1 - warp % 2 * 2;
            if (!CAUSAL || halves >= 2)
                pair_backward_rows<2, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
            else if (halves == 1)
                pair_backward_rows<1, STATS, NPOLY>(tile, x, i, end, H, warp, g, t);
        }
        __syncthreads();
        const PairFetch next = pair_fetch_u(ac + row0 * H, ds + row0 * H, scale + row0,
                                            u0 + CHUNK_U, own_u, own_d, T, H);
        for (int i = warp; STATS && i < CHUNK_U; i += blockDim.x / 32) {
            const int u = u0 + i, v = v0 + lane_v, in = u < T && v < T && (!CAUSAL || v <= u);
            const float r = LN2 * x.rl[2 * i * TILE_V + lane / 2 * 4 + lane % 2];
            float s2 = 0;
#pragma unroll 2
            for (int w = 0; w < H / 32; w++)
                s2 += x.s2[(w * CHUNK_U + i) * TILE_V + lane];
            const __nv_bfloat16 m = __float2bfloat16(in ? r * r * inv_H * s2 : 0.0f);
            x.mt[lane_v * MT_STRIDE + i] = __hneg(m);
            sum_m += __bfloat162float(m);
            if (u < T)
                M[(row0 + u) * stride_M + v] = m;
        }
        pair_store_u(x, ab_next, next, own_u, own_d, H);
        __syncthreads();
        if (STATS)
            pair_m_product(tile, x, ab, H, warp, lane);
        if (warp >= last_quarter)
            pair_backward_r<STATS, CAUSAL>(x, ab_next, astat + row0, bstat + row0, v0, u0 + CHUNK_U,
                                           T, H, inv_H, warp - last_quarter, g, t);
        __syncthreads();
    }
    pair_store_db<STATS>(db + row0 * H, tile, x, sum_m, v0, T, H);
}

enum { MS_STRIDE = TILE_V + 8 };

// cp_async16: start copying 16 bytes from global to shared memory.
__device__ inline void cp_async16(__nv_bfloat16 *to, const __nv_bfloat16 *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// pair_fetch_da: start copying rows v .. v+31 of b to bs [TILE_V][H+8] and M's tile of rows u ..
// u+31 to ms [TILE_V][MS_STRIDE]; rows from T on repeat the last: M is 0 for such v, such u are not
// stored.
__device__ inline void pair_fetch_da(__nv_bfloat16 *bs, __nv_bfloat16 *ms, const floatX *bc,
                                     const __nv_bfloat16 *M, int u, int v, int T, int H)
{
    for (int i = threadIdx.x / (H / 8); i < TILE_V; i += 8) {
        const int d = threadIdx.x % (H / 8) * 8;
        cp_async16(&bs[i * (H + 8) + d], bc + (size_t)min(v + i, T - 1) * H + d);
    }
    for (int k = threadIdx.x; k < TILE_V * 4; k += blockDim.x)
        cp_async16(&ms[k / 4 * MS_STRIDE + k % 4 * 8],
                   M + (size_t)min(u + k / 4, T - 1) * ((T + TILE_V - 1) / TILE_V * TILE_V) + v +
                       k % 4 * 8);
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// pair_da_kernel: da = ds p - sum_v N - a sum_v M - M b for 32 rows u of one sequence, a warp 32
// channels (H threads); sum_v N is the mean over channels of ds p, sum_v M is M times a column of
// ones.
template <int CAUSAL>
__global__ void __launch_bounds__(384, 2)
    pair_da_kernel(floatX *da, const floatX *__restrict__ ds, const floatX *__restrict__ p,
                   const floatX *__restrict__ ac, const floatX *__restrict__ bc,
                   const __nv_bfloat16 *__restrict__ M, int B, int T, int H)
{
    extern __shared__ __align__(16) char shared[]; // [2] of bs and ms
    __shared__ float means[12][TILE_V];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (T + TILE_V - 1) / TILE_V, tile_u = tiles - 1 - (int)(blockIdx.x / B);
    const int u0 = tile_u * TILE_V, last = CAUSAL ? tile_u : tiles - 1;
    const int stage = TILE_V * (H + 8 + MS_STRIDE), ms_at = TILE_V * (H + 8);
    const size_t row0 = (size_t)(blockIdx.x % B) * T;
    const uint32_t ones = 0x3f803f80;
    float acc[2][4][4] = {}, sum_m[2][4] = {}; // [m][n] over rows 16m, channels 8n
    bc += row0 * H;
    M += row0 * tiles * TILE_V;
    pair_fetch_da((__nv_bfloat16 *)shared, (__nv_bfloat16 *)shared + ms_at, bc, M, u0, 0, T, H);
    for (int i = 0; i <= last; i++) {
        __nv_bfloat16 *bs = (__nv_bfloat16 *)shared + i % 2 * stage, *ms = bs + ms_at;
        __nv_bfloat16 *next = (__nv_bfloat16 *)shared + (i + 1) % 2 * stage;
        if (i < last) {
            pair_fetch_da(next, next + ms_at, bc, M, u0, (i + 1) * TILE_V, T, H);
            asm volatile("cp.async.wait_group 1;" : : : "memory");
        } else
            asm volatile("cp.async.wait_group 0;" : : : "memory");
        __syncthreads();
        uint4 m[2][2]; // [m][k]
#pragma unroll
        for (int j = 0; j < 4; j++)
            m[j / 2][j % 2] = ldmatrix4<0>(ms + (j / 2 * 16 + lane % 16) * MS_STRIDE +
                                           j % 2 * 16 + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < 5; n++) {
            uint4 f = {ones, ones, ones, ones};
            if (n < 4)
                f = ldmatrix4<1>(&bs[lane * (H + 8) + 32 * warp + 8 * n]);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float *c = n < 4 ? acc[j][n] : sum_m[j];
                mma_bf16(c, m[j][0].x, m[j][0].y, m[j][0].z, m[j][0].w, f.x, f.y);
                mma_bf16(c, m[j][1].x, m[j][1].y, m[j][1].z, m[j][1].w, f.z, f.w);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4;
         i++) { // rows 8i + g: acc = ds p - M b, and the sum of ds p over channels
        const size_t at = (row0 + min(u0 + 8 * i + g, T - 1)) * H + 32 * warp + 2 * t;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 x = load2(ds + at + 8 * n), y = load2(p + at + 8 * n);
            float *f = &acc[i / 2][n][i % 2 * 2];
            sum += x.x * y.x + x.y * y.y;
            f[0] = x.x * y.x - f[0], f[1] = x.y * y.y - f[1];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0)
            means[warp][8 * i + g] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int u = u0 + 8 * i + g;
        const size_t at = (row0 + u) * H + 32 * warp + 2 * t;
        float mean = 0;
        for (int w = 0; w < H / 32; w++)
            mean += means[w][8 * i + g];
        mean /= (float)H;
#pragma unroll
        for (int n = 0; n < 4 && u < T; n++) {
            const float2 x = load2(ac + at + 8 * n);
            const float *f = &acc[i / 2][n][i % 2 * 2], m = sum_m[i / 2][i % 2 * 2];
            store2(da + at + 8 * n, f[0] - mean - x.x * m, f[1] - mean - x.y * m);
        }
    }
}

// pair_product_kernel: da = ds p, two channels a thread (approx and none).
__global__ void pair_product_kernel(floatX *da, const floatX *ds, const floatX *p, size_t n)
{
    size_t i = 2 * (blockIdx.x * (size_t)blockDim.x + threadIdx.x);
    if (i < n) {
        float2 x = load2(ds + i), y = load2(p + i);
        store2(da + i, x.x * y.x, x.y * y.y);
    }
}

#endif // PRECISION_BF16

// ---- the ladder ----

// pair_uncenter: approx: da, db through the two normalizes, in place; otherwise nothing: the
// gradients of exact already are those of the uncentred a and b.
static void pair_uncenter(const PairLayer *x, cudaStream_t stream)
{
    const size_t rows = x->B * x->T;
    const unsigned grid = pair_grid((rows + 7) / 8);
    if (x->opt.norm != NORM_APPROX)
        return;
    pair_uncenter_kernel<<<grid, 256, 0, stream>>>(x->da, x->ac, x->astat, rows, (int)x->H);
    pair_uncenter_kernel<<<grid, 256, 0, stream>>>(x->db, x->bc, x->bstat, rows, (int)x->H);
    CUDA_CHECK(cudaGetLastError());
}

static void run_naive(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const unsigned grid = pair_grid(x->B * x->T);
    const int T = (int)x->T, H = (int)x->H;
    PAIR_CHECK(x->opt.act, (backward_naive_kernel<ACT, 0><<<grid, 128, 4 * x->H, stream>>>(
                               x->da, x->ds, x->scale, x->ac, x->bc, T, H, x->opt)));
    PAIR_CHECK(x->opt.act, (backward_naive_kernel<ACT, 1><<<grid, 128, 4 * x->H, stream>>>(
                               x->db, x->ds, x->scale, x->ac, x->bc, T, H, x->opt)));
    pair_uncenter(x, stream);
}

static void run_general(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    for (size_t b = 0; b < x->B; b += pair_group(x->B, x->T)) {
        const PairLayer y = pair_part(x, b);
        const unsigned grid = pair_rows_grid(&y);
        const float *R = (const float *)y.scratch, *M = R + y.B * y.T * y.T;
        const float *N = M + y.B * y.T * y.T;
        pair_stats(&y, y.ds, stream);
        PAIR_CHECK(y.opt.act, (pair_general_db_kernel<ACT><<<grid, 128, 0, stream>>>(
                                  y.db, y.ds, y.scale, y.ac, y.bc, R, M, N, (int)y.T, (int)y.H,
                                  y.opt)));
        pair_general_da_kernel<<<grid, 128, 0, stream>>>(y.da, y.ds, y.p, y.ac, y.bc, M, N,
                                                         (int)y.T, (int)y.H, y.opt);
        CUDA_CHECK(cudaGetLastError());
    }
    pair_uncenter(x, stream);
}

static const char *refuse_naive(const void *layer)
{
    return ((const PairLayer *)layer)->H > 12000 ? "48 KiB of sums" : NULL;
}

#ifdef PRECISION_BF16

// run_da: from the M that the last run of pair_backward_kernel left in the scratch.
static void run_da(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const size_t smem = 4 * TILE_V * (x->H + 8 + MS_STRIDE);
    auto kernel = x->opt.causal ? pair_da_kernel<1> : pair_da_kernel<0>;
    bench_fits((const void *)kernel, "pair_da_kernel", (int)x->H, smem);
    kernel<<<pair_grid(x->B * ((x->T + TILE_V - 1) / TILE_V)), (unsigned)x->H, smem, stream>>>(
        x->da, x->ds, x->p, x->ac, x->bc, (const __nv_bfloat16 *)x->scratch, (int)x->B, (int)x->T,
        (int)x->H);
    CUDA_CHECK(cudaGetLastError());
}

// run_fast: NPOLY of 8 exponentials on the FMA pipe, where |exponents| < 126 is certain.
template <int NPOLY> static void run_fast(const void *layer, cudaStream_t stream)
{
    const PairLayer *x = (const PairLayer *)layer;
    const size_t smem = pair_shared(NULL, NULL, (int)x->H), n = x->B * x->T * x->H;
    const unsigned grid = pair_grid(x->B * ((x->T + TILE_V - 1) / TILE_V));
    auto kernel = pair_backward_kernel<0, 1, 0>;
    if (x->opt.norm == NORM_EXACT)
        kernel = x->opt.causal ? pair_backward_kernel<1, 1, NPOLY>
                               : pair_backward_kernel<1, 0, NPOLY>;
    else if (!x->opt.causal)
        kernel = pair_backward_kernel<0, 0, 0>;
    bench_fits((const void *)kernel, "pair_backward_kernel", 2 * (int)x->H, smem);
    kernel<<<grid, 2 * (unsigned)x->H, smem, stream>>>(
        x->db, (__nv_bfloat16 *)x->scratch, x->ds, x->scale, x->ac, x->bc, x->astat, x->bstat,
        (int)x->B, (int)x->T, (int)x->H);
    CUDA_CHECK(cudaGetLastError());
    if (x->opt.norm == NORM_EXACT)
        run_da(layer, stream);
    else
        pair_product_kernel<<<pair_grid((n / 2 + 255) / 256), 256, 0, stream>>>(x->da, x->ds, x->p,
                                                                                n);
    CUDA_CHECK(cudaGetLastError());
    pair_uncenter(x, stream);
}

static const char *refuse_fast(const void *layer)
{
    return pair_is_fast((const PairLayer *)layer, 384) ? NULL
                                                       : "exp and H a multiple of 64 to 384 only";
}

#endif

static const BenchKernel kernels[] = {
    {1, "naive: a block a row, every pair twice", run_naive, refuse_naive},
    {2, "pair a thread, then rows; FP32's", run_general, NULL},
#ifdef PRECISION_BF16
    {3, "one pass, sums on tensor cores", run_fast<0>, refuse_fast},
    {4, "3, 1/8 of exps by polynomial", run_fast<1>, refuse_fast},
#endif
};

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {
        {1, 2, 33},  {3, 31, 33},  {2, 33, 192},  {1, 258, 192},  {1, 514, 64},   {1, 1000, 64},
        {2, 7, 512}, {1, 97, 320}, {2, 31, 3072}, {65537, 2, 64}, {32769, 2, 17}, {1, 2, 12289}};
    static const PairLadder ladder = {
        "backward", 1,    kernels, sizeof kernels / sizeof *kernels, shapes,
        sizeof shapes / sizeof *shapes, NULL,
#ifdef PRECISION_BF16
        run_da, refuse_fast, "da", 0
#endif
    };
    return pair_ladder(argc, argv, &ladder);
}
