// delta_kernels.cuh: the delta rule by chunks of 64 tokens on tensor cores (BF16, mma.sync),
// forward and backward, for head sizes that are multiples of 8 up to 128. It needs a trainer's
// [cuda] and the instructions of train_gpt2.cu (ldmatrix, copy_async, ...), which stand before it.
//
// S maps keys to values, (values, keys). In a chunk with rows Q, K, V, O, their gradients dQ ...
// dO, b = diag(beta), scale s = 1 / sqrt(HS), S before and S' after it:   [arXiv 2406.06484, WY
// form]
//
//   A = strictly lower (b K K^T),  M = (I + A)^-1 b,  P = lower (Q K^T) with its diagonal
//   E = V - K S^T,  N = M E,  O = s (Q S^T + P N),  S' = S + N^T K
//
// and with D, D' the gradients of S, S':
//
//   dN = s P^T dO + K D'^T,  dV = M^T dN,  D = D' + s dO^T Q - dV^T K
//   X = s lower (dO N^T),    F = strictly lower (dV N^T)
//   dQ = X K + s dO S,       dK = X^T Q + N D' - dV S - (F + F^T) K
//   dbeta_i = dV_i . N_i / beta_i^2
//
// W = M K and U = M V of the paper are never made: one product more a chunk, but nothing to store,
// and N does not come out as the difference of two rounded numbers. The gradient through the
// inverse needs no inverse either: (I + A) N = b E, so that of k_i . k_j, j < i, is - dV_i . N_j.
//
// A kernel over all chunks makes M and P. S and D run through the chunks of a head in registers:
// all that S does to a row of values, it does without the other rows, so a warp has 16 rows of S
// for good, 16 columns of V, E, N, O, and works on the transposes: E^T = V^T - S K^T, N^T = E^T
// M^T, O^T = s (S Q^T + N^T P^T), S += N^T K: what one product leaves in registers is the left
// operand of the next. A last kernel over all chunks makes dQ, dK and dbeta from S and D, which
// were stored.
//
// Precision: A, M by substitution and the running S and D are fp32. What S and D are made of, M, E,
// N, dN and dV, enters those products as the sum of two bf16 numbers, all else as one. For repeated
// keys and beta near 2 rounding M costs a tenth of the output, and with N and dV rounded the error
// grows with the square root of T.
#ifndef SEQ_DEV_DELTA_KERNELS_CUH
#define SEQ_DEV_DELTA_KERNELS_CUH

#ifdef PRECISION_BF16
// ---- what the kernels share

// A chunk; elements between rows of its 64x64 tiles in shared memory; of `pairs` a chunk. About as
// many blocks as a GPU has multiprocessors: fewer would leave some idle.
enum { DELTA_CS = 64, DELTA_LD = DELTA_CS + 8, DELTA_TILE = DELTA_CS * DELTA_LD };
enum { DELTA_PAIRS = 3 * DELTA_CS * DELTA_CS, DELTA_THREADS = 128, DELTA_BLOCKS = 100 };

// delta_beta: beta as it is used: 2^-40 for 0, which moves nothing and can be divided by.
static __device__ inline float delta_beta(float beta)
{
    return fmaxf(beta, 9.094947e-13f);
}

// unpack2: the two numbers of pack2.
static __device__ inline float2 unpack2(uint32_t x)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)&x);
}

// transpose: of an 8x8 matrix of bf16, columns 2t, 2t+1 of row g in lane 4g + t.
static __device__ inline uint32_t transpose(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// delta_fetch: start copying rows 0 .. ROWS-1 of x, `stride` elements apart, into a tile
// [ROWS][W + 8]; what is not among the first `rows` rows and `columns` columns becomes 0.
template <int ROWS, int W, int THREADS>
static __device__ inline void delta_fetch(floatX *tile, const floatX *x, int stride, int rows,
                                          int columns)
{
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * (W / 8); i += THREADS) {
        const int r = i / (W / 8), c = i % (W / 8) * 8;
        const bool inside = r < rows && c < columns;
        copy_async(tile + r * (W + 8) + c, x + (inside ? (size_t)r * stride + c : 0), inside);
    }
}

// delta_fetch_pairs: start copying a chunk's M (high and low part) and P into three tiles; of the
// 16x16 blocks above the diagonal, which nobody reads, nothing.
template <int THREADS>
static __device__ inline void delta_fetch_pairs(floatX *tile, const floatX *pairs)
{
#pragma unroll
    for (int i = threadIdx.x; i < DELTA_PAIRS / 8; i += THREADS) {
        const int r = i / 8, c = i % 8;
        if (c / 2 <= r % DELTA_CS / 16)
            copy_async(tile + r * DELTA_LD + c * 8, pairs + i * 8, true);
    }
}

// row_store: columns 2t, 2t+1 (left) and 8+2t, 9+2t (right) of a row of 16, from its four lanes 4g
// + t: 8 bytes a lane, so that sectors of 32 bytes are written whole. columns: how many there are.
static __device__ inline void row_store(floatX *row, uint32_t left, uint32_t right, bool inside,
                                        int columns)
{
    const int odd = threadIdx.x & 1, column = odd * 8 + threadIdx.x % 4 / 2 * 4;
    const uint32_t other = __shfl_xor_sync(~0u, odd ? left : right, 1);
    if (inside && column < columns)
        *(uint2 *)(row + column) = {odd ? other : left, odd ? right : other};
}

// delta_store_rows: rows 0 .. 15 of `to`, `stride` apart, = factor c (16 x HS); what is not among
// the first `rows` rows and `columns` columns stays.
template <int HS>
static __device__ inline void delta_store_rows(floatX *to, const float c[HS / 8][4], float factor,
                                               size_t stride, int rows, int columns)
{
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < HS / 8; i++) { // 16 columns of rows g, then g + 8
        const int n = i / 2 * 2, r = i % 2 * 8, v = i % 2 * 2;
        row_store(to + (g + r) * stride + 8 * n, pack2(factor * c[n][v], factor * c[n][v + 1]),
                  pack2(factor * c[n + 1][v], factor * c[n + 1][v + 1]), g + r < rows,
                  columns - 8 * n);
    }
}

// delta_store_columns: the same for c (16 x 64) by its transpose, 64 rows of 16 columns.
static __device__ inline void delta_store_columns(floatX *to, const float c[8][4], float factor,
                                                  size_t stride, int rows, int columns)
{
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < 8; n++)
        row_store(to + (8 * n + g) * stride, transpose(pack2(factor * c[n][0], factor * c[n][1])),
                  transpose(pack2(factor * c[n][2], factor * c[n][3])), 8 * n + g < rows, columns);
}

// delta_pack: c (16 x 64) as left operands of mma; lo: what rounding has taken from it.
static __device__ inline void delta_pack(uint4 hi[4], uint4 lo[4], const float c[8][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float rest[2][4];
        hi[k] = accumulator_pack(&c[2 * k]);
        const uint32_t x[] = {hi[k].x, hi[k].y, hi[k].z, hi[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpack2(x[i]);
            rest[i / 2][i % 2 * 2] = c[2 * k + i / 2][i % 2 * 2] - v.x;
            rest[i / 2][i % 2 * 2 + 1] = c[2 * k + i / 2][i % 2 * 2 + 1] - v.y;
        }
        lo[k] = accumulator_pack(rest);
    }
}

// delta_state_dots: c (16 x 64) += S tile^T for 16 rows of S (16 x HS), rounded, and a tile of 64
// rows, at column_at.
template <int HS>
static __device__ inline void delta_state_dots(float c[8][4], const float S[HS / 8][4],
                                               const floatX *tile)
{
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const uint4 a = accumulator_pack(&S[2 * k]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint4 b = ldmatrix<0>(tile + 16 * n * (HS + 8) + 16 * k);
            mma(c[2 * n], a, b.x, b.y);
            mma(c[2 * n + 1], a, b.z, b.w);
        }
    }
}

// delta_add: c (16 x HS) += a (16 x 64) times a tile of 64 rows, at row_at; of a only the blocks of
// 16 columns first .. last. LOW: a + lo for a.
template <int HS, int LOW>
static __device__ inline void delta_add(float c[HS / 8][4], const uint4 a[4], const uint4 *lo,
                                        const floatX *tile, int first, int last)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (first <= k && k <= last)
#pragma unroll
            for (int n = 0; n < HS / 16; n++) {
                const uint4 b = ldmatrix<1>(tile + 16 * k * (HS + 8) + 16 * n);
                mma(c[2 * n], a[k], b.x, b.y);
                mma(c[2 * n + 1], a[k], b.z, b.w);
                if (LOW) {
                    mma(c[2 * n], lo[k], b.x, b.y);
                    mma(c[2 * n + 1], lo[k], b.z, b.w);
                }
            }
}

// delta_by_lower: c (16 x 64) += a L for a lower triangular L (64 x 64), at row_at; TRANS: a L^T, L
// at column_at. LOW: (a + lo) (L + the tile behind it) instead, less lo times that tile.
template <int TRANS, int LOW>
static __device__ inline void delta_by_lower(float c[8][4], const uint4 a[4], const uint4 *lo,
                                             const floatX *L)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = TRANS ? k : 0; n < (TRANS ? 4 : k + 1); n++) {
            const int row = 16 * (TRANS ? n : k), column = 16 * (TRANS ? k : n);
            const floatX *at = L + row * DELTA_LD + column;
            const uint4 b = ldmatrix<!TRANS>(at);
            mma(c[2 * n], a[k], b.x, b.y);
            mma(c[2 * n + 1], a[k], b.z, b.w);
            if (LOW) {
                const uint4 d = ldmatrix<!TRANS>(at + DELTA_TILE);
                mma(c[2 * n], lo[k], b.x, b.y);
                mma(c[2 * n + 1], lo[k], b.z, b.w);
                mma(c[2 * n], a[k], d.x, d.y);
                mma(c[2 * n + 1], a[k], d.z, d.w);
            }
        }
}

// delta_lower_dots: c (16 x 64) = rows a of tiles [64][HS + 8] times all rows of another, up to the
// diagonal: this warp's rows at row_at, the others at column_at.
template <int HS>
static __device__ inline void delta_lower_dots(float c[8][4], const floatX *own,
                                               const floatX *other)
{
    const int warp = threadIdx.x / WARP;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const uint4 a = ldmatrix<0>(own + 16 * k);
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (n <= warp) {
                const uint4 b = ldmatrix<0>(other + 16 * n * (HS + 8) + 16 * k);
                mma(c[2 * n], a, b.x, b.y);
                mma(c[2 * n + 1], a, b.z, b.w);
            }
    }
}

// delta_rows_times: c (16 x HS) += rows of a tile, at row_at, times one of HS rows, at row_at.
template <int HS>
static __device__ inline void delta_rows_times(float c[HS / 8][4], const floatX *own,
                                               const floatX *other)
{
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const uint4 a = ldmatrix<0>(own + 16 * k);
#pragma unroll
        for (int n = 0; n < HS / 16; n++) {
            const uint4 b = ldmatrix<1>(other + 16 * k * (HS + 8) + 16 * n);
            mma(c[2 * n], a, b.x, b.y);
            mma(c[2 * n + 1], a, b.z, b.w);
        }
    }
}

// delta_scale: c *= factor.
template <int N> static __device__ inline void delta_scale(float c[N][4], float factor)
{
#pragma unroll
    for (int i = 0; i < 4 * N; i++)
        c[i / 4][i % 4] *= factor;
}

// delta_state_load, delta_state_store: 16 rows of a state x (hs,hs) from `row` on, times a factor,
// from (NULL: zero) and to memory. Columns and rows from hs on are 0.
template <int HS>
static __device__ inline void delta_state_load(float S[HS / 8][4], const float *x, float factor,
                                               int row, int hs)
{
    const int g = row + threadIdx.x % WARP / 4, t = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < HS / 2; i++) {
        const int r = g + i % 4 / 2 * 8, c = i / 4 * 8 + t + i % 2;
        S[i / 4][i % 4] = x && r < hs && c < hs ? factor * x[r * hs + c] : 0;
    }
}
template <int HS>
static __device__ inline void delta_state_store(float *x, const float S[HS / 8][4], float factor,
                                                int row, int hs)
{
    const int g = row + threadIdx.x % WARP / 4, t = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < HS / 2; i++) {
        const int r = g + i % 4 / 2 * 8, c = i / 4 * 8 + t + i % 2;
        if (r < hs && c < hs)
            x[r * hs + c] = factor * S[i / 4][i % 4];
    }
}

// ---- M and P of every chunk

// Elements between rows of the fp32 arrays of delta_pairs_kernel: A by columns, M / beta by rows.
enum { DELTA_LDA = DELTA_CS + 4, DELTA_LDM = DELTA_CS + 16 };

// delta_pairs_bytes: shared memory of a block of delta_pairs_kernel.
static size_t delta_pairs_bytes(int HS)
{
    const size_t tiles = 2 * DELTA_CS * (HS + 8) * sizeof(floatX);
    const size_t M = DELTA_CS * DELTA_LDM * sizeof(float);
    return (tiles > M ? tiles : M) + (DELTA_CS * DELTA_LDA + DELTA_CS) * sizeof(float);
}

// delta_subtract: x_i -= a_i y for i = first .. 15; a: shared memory, at a multiple of 16 bytes.
static __device__ inline void delta_subtract(float x[16], const float *a, float y, int first)
{
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const Pack<float, 4> f = *(const Pack<float, 4> *)(a + i);
#pragma unroll
        for (int k = i; k < i + 4; k++)
            x[k] -= k < first ? 0 : f.v[k - i] * y;
    }
}

// delta_substitute: M of a chunk, its high and low part (64,64) =, from A by columns: (I + A) Tm =
// I row by row, Tm times diag(beta). A warp has 16 columns, which nobody else needs, a column two
// lanes, that share the products with rows of earlier blocks of 16. Tm: shared memory.
static __device__ inline void delta_substitute(floatX *hi, float *Tm, const float *A,
                                               const float *beta)
{
    const int lane = threadIdx.x % WARP, half = lane / 16;
    const int first = threadIdx.x / WARP * 16, c = first + lane % 16;
    for (int row = first; row < DELTA_CS; row += 16) {
        float x[16] = {};
#pragma unroll 2
        for (int j = first + half; j < row; j += 2)
            delta_subtract(x, A + j * DELTA_LDA + row, Tm[j * DELTA_LDM + c], 0);
#pragma unroll
        for (int i = 0; i < 16; i++)
            x[i] += __shfl_xor_sync(~0u, x[i], 16) + (row + i == c ? 1 : 0);
#pragma unroll
        for (int j = 0; j < 15; j++)
            delta_subtract(x, A + (row + j) * DELTA_LDA + row, x[j], j + 1);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i % 2 == half) {
                const size_t at = (size_t)(row + i) * DELTA_CS + c;
                const float m = x[i] * beta[c];
                Tm[(row + i) * DELTA_LDM + c] = x[i];
                hi[at] = (floatX)m;
                hi[DELTA_CS * DELTA_CS + at] = (floatX)(m - (float)(floatX)m);
            }
        __syncwarp();
    }
}

// delta_pairs_kernel: a block a chunk, a warp 16 rows of it: pairs (B,NH,NC,3,64,64) = M, high and
// low part, and P; 16x16 blocks above the diagonal stay as they are.
template <int HS>
static __global__ void __launch_bounds__(DELTA_THREADS)
    delta_pairs_kernel(floatX *pairs, const floatX *q, const floatX *k, const float *beta, int T,
                       int NH, int hs, int pitch)
{
    enum { LD = HS + 8, TILES = 2 * DELTA_CS * LD / 2, FLOATS = DELTA_CS * DELTA_LDM };
    extern __shared__ __align__(16) floatX tiles[]; // k, q [64][LD], then Tm; A [64][64], beta [64]
    floatX *ks = tiles, *qs = ks + DELTA_CS * LD;
    float *Tm = (float *)tiles, *A = Tm + ((int)TILES > (int)FLOATS ? (int)TILES : (int)FLOATS);
    float *betas = A + DELTA_CS * DELTA_LDA;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int chunks = (T + DELTA_CS - 1) / DELTA_CS, head = blockIdx.x / chunks;
    const int t0 = blockIdx.x % chunks * DELTA_CS, rows = T - t0;
    const size_t token = (size_t)(head / NH) * T + t0, at = token * pitch + head % NH * hs;
    float a[8][4] = {}, p[8][4] = {};
    delta_fetch<DELTA_CS, HS, DELTA_THREADS>(ks, k + at, pitch, rows, hs);
    delta_fetch<DELTA_CS, HS, DELTA_THREADS>(qs, q + at, pitch, rows, hs);
    if (threadIdx.x < DELTA_CS)
        betas[threadIdx.x] = delta_beta(
            (int)threadIdx.x < rows ? beta[(token + threadIdx.x) * NH + head % NH] : 0);
    pairs += (size_t)blockIdx.x * DELTA_PAIRS;
    copy_wait();
    __syncthreads();
    const int own = 16 * warp * LD + row_at(lane, LD), other = column_at(lane, LD);
    delta_lower_dots<HS>(a, ks + own, ks + other);
    delta_lower_dots<HS>(p, qs + own, ks + other);
    __syncthreads(); // tiles have been read: Tm may stand there
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = 16 * warp + i % 4 / 2 * 8 + lane / 4, j = i / 4 * 8 + lane % 4 * 2 + i % 2;
        A[j * DELTA_LDA + row] = betas[row] * a[i / 4][i % 4];
        p[i / 4][i % 4] = j <= row ? p[i / 4][i % 4] : 0;
    }
    delta_store_rows<DELTA_CS>(pairs + (2 * DELTA_CS + 16 * warp) * DELTA_CS, p, 1, DELTA_CS, 16,
                               16 * warp + 16);
    __syncthreads();
    delta_substitute(pairs, Tm, A, betas);
}

// ---- forward

// delta_head_bytes: shared memory of a block of delta_forward_kernel or delta_backward_kernel.
static size_t delta_head_bytes(int HS, int WARPS)
{
    const size_t rows = DELTA_CS * (2 * (HS + 8) + 16 * WARPS + 8);
    return 2 * (rows + 3 * DELTA_TILE) * sizeof(floatX);
}

// delta_forward_kernel: a block has 16 WARPS rows of a head's S and goes through its chunks, while
// the next one is being fetched. Where WARPS < 4, there are warps that fetch and do nothing else.
template <int HS, int WARPS>
static __global__ void __launch_bounds__(WARPS > 4 ? 32 * WARPS : DELTA_THREADS)
    delta_forward_kernel(floatX *o, floatX *n, floatX *states, float *final, const floatX *q,
                         const floatX *k, const floatX *v, const floatX *pairs,
                         const float *initial, int T, int NH, int hs, int pitch)
{
    enum { THREADS = WARPS > 4 ? 32 * WARPS : DELTA_THREADS, W = 16 * WARPS };
    enum { LD = HS + 8, LDV = W + 8, ROWS = DELTA_CS * LD };
    enum { STAGE = 2 * ROWS + 3 * DELTA_TILE + DELTA_CS * LDV };
    extern __shared__ __align__(16) floatX tiles[]; // twice: k, q [64][LD], M, P [3][64][72], v
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int slabs = (hs + W - 1) / W, head = blockIdx.x / slabs, slab = blockIdx.x % slabs * W;
    const int row = slab + 16 * warp, chunks = (T + DELTA_CS - 1) / DELTA_CS;
    const size_t token = (size_t)(head / NH) * T, C = (size_t)NH * hs;
    const float s = rsqrtf((float)hs);
    const bool keep = states; // a backward pass is to follow
    float S[HS / 8][4];
    q += token * pitch + head % NH * hs, k += token * pitch + head % NH * hs;
    v += token * pitch + head % NH * hs + slab;
    o += token * C + head % NH * hs + row, n += token * C + head % NH * hs + row;
    pairs += (size_t)head * chunks * DELTA_PAIRS;
    states += ((size_t)head * chunks * hs + row) * hs;
    const auto fetch = [=](int c) {
        floatX *to = tiles + c % 2 * STAGE;
        const int rows = T - c * DELTA_CS;
        const size_t at = (size_t)c * DELTA_CS * pitch;
        delta_fetch<DELTA_CS, HS, THREADS>(to, k + at, pitch, rows, hs);
        delta_fetch<DELTA_CS, HS, THREADS>(to + ROWS, q + at, pitch, rows, hs);
        delta_fetch_pairs<THREADS>(to + 2 * ROWS, pairs + (size_t)c * DELTA_PAIRS);
        delta_fetch<DELTA_CS, W, THREADS>(to + 2 * ROWS + 3 * DELTA_TILE, v + at, pitch, rows,
                                          hs - slab);
    };
    delta_state_load<HS>(S, initial ? initial + (size_t)head * hs * hs : NULL, 1, row, hs);
    fetch(0);
    for (int c = 0; c < chunks; c++) {
        const floatX *ks = tiles + c % 2 * STAGE, *qs = ks + ROWS, *ms = qs + ROWS;
        const floatX *ps = ms + 2 * DELTA_TILE, *vs = ps + DELTA_TILE;
        const int rows = T - c * DELTA_CS;
        copy_wait();
        __syncthreads(); // this chunk is there; nobody reads the one before any more
        if (c + 1 < chunks)
            fetch(c + 1);
        if (warp >= WARPS)
            continue;
        if (keep)
            delta_store_rows<HS>(states + (size_t)c * hs * hs, S, 1, hs, hs - row, hs);
        float e[8][4] = {}, out[8][4] = {}, next[8][4] = {};
        uint4 hi[4], lo[4];
        delta_state_dots<HS>(e, S, ks + column_at(lane, LD));
        delta_state_dots<HS>(out, S, qs + column_at(lane, LD));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 f = ldmatrix<1>(vs + 16 * i * LDV + 16 * warp + row_at(lane, LDV));
            const uint32_t x[] = {f.x, f.z, f.y, f.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 y = unpack2(x[j]);
                float *to = &e[2 * i + j / 2][j % 2 * 2];
                to[0] = y.x - to[0], to[1] = y.y - to[1];
            }
        }
        delta_pack(hi, lo, e);
        delta_by_lower<1, 1>(next, hi, lo, ms + column_at(lane, DELTA_LD));
        delta_pack(hi, lo, next);
        delta_add<HS, 1>(S, hi, lo, ks + row_at(lane, LD), 0, 3);
        delta_by_lower<1, 0>(out, hi, NULL, ps + column_at(lane, DELTA_LD));
        delta_store_columns(o + (size_t)c * DELTA_CS * C, out, s, C, rows, hs - row);
        if (keep)
            delta_store_columns(n + (size_t)c * DELTA_CS * C, next, 1, C, rows, hs - row);
    }
    if (final && warp < WARPS)
        delta_state_store<HS>(final + (size_t)head * hs * hs, S, 1, row, hs);
}

// ---- backward

// delta_backward_kernel: the same way back: a block has 16 WARPS rows of D / s, s = 1 / sqrt(HS),
// and dout in the place of v; dstates: D' of every chunk.
template <int HS, int WARPS>
static __global__ void __launch_bounds__(WARPS > 4 ? 32 * WARPS : DELTA_THREADS)
    delta_backward_kernel(floatX *dv, floatX *dstates, float *dinitial, const floatX *dout,
                          const float *dfinal, const floatX *q, const floatX *k,
                          const floatX *pairs, int T, int NH, int hs, int pitch)
{
    enum { THREADS = WARPS > 4 ? 32 * WARPS : DELTA_THREADS, W = 16 * WARPS };
    enum { LD = HS + 8, LDV = W + 8, ROWS = DELTA_CS * LD };
    enum { STAGE = 2 * ROWS + 3 * DELTA_TILE + DELTA_CS * LDV };
    extern __shared__ __align__(16) floatX tiles[]; // as in delta_forward_kernel, dout for v
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int slabs = (hs + W - 1) / W, head = blockIdx.x / slabs, slab = blockIdx.x % slabs * W;
    const int row = slab + 16 * warp, chunks = (T + DELTA_CS - 1) / DELTA_CS;
    const size_t token = (size_t)(head / NH) * T, C = (size_t)NH * hs;
    const float s = rsqrtf((float)hs);
    float D[HS / 8][4];
    q += token * pitch + head % NH * hs, k += token * pitch + head % NH * hs;
    dv += token * pitch + head % NH * hs + row;
    dout += token * C + head % NH * hs + slab;
    pairs += (size_t)head * chunks * DELTA_PAIRS;
    dstates += ((size_t)head * chunks * hs + row) * hs;
    const auto fetch = [=](int c) {
        floatX *to = tiles + c % 2 * STAGE;
        const int rows = T - c * DELTA_CS;
        const size_t at = (size_t)c * DELTA_CS;
        delta_fetch<DELTA_CS, HS, THREADS>(to, k + at * pitch, pitch, rows, hs);
        delta_fetch<DELTA_CS, HS, THREADS>(to + ROWS, q + at * pitch, pitch, rows, hs);
        delta_fetch_pairs<THREADS>(to + 2 * ROWS, pairs + (size_t)c * DELTA_PAIRS);
        delta_fetch<DELTA_CS, W, THREADS>(to + 2 * ROWS + 3 * DELTA_TILE, dout + at * C, (int)C,
                                          rows, hs - slab);
    };
    delta_state_load<HS>(D, dfinal ? dfinal + (size_t)head * hs * hs : NULL, 1 / s, row, hs);
    fetch(chunks - 1);
    for (int c = chunks - 1; c >= 0; c--) {
        const floatX *ks = tiles + c % 2 * STAGE, *qs = ks + ROWS, *ms = qs + ROWS;
        const floatX *ps = ms + 2 * DELTA_TILE, *gs = ps + DELTA_TILE;
        copy_wait();
        __syncthreads(); // this chunk is there; nobody reads the one after it any more
        if (c > 0)
            fetch(c - 1);
        if (warp >= WARPS)
            continue;
        float dn[8][4] = {}, e[8][4] = {};
        uint4 g[4], hi[4], lo[4];
        delta_store_rows<HS>(dstates + (size_t)c * hs * hs, D, s, hs, hs - row, hs);
#pragma unroll
        for (int i = 0; i < 4; i++)
            g[i] = ldmatrix<1>(gs + 16 * i * LDV + 16 * warp + column_at(lane, LDV));
        delta_by_lower<0, 0>(dn, g, NULL, ps + row_at(lane, DELTA_LD));
        delta_state_dots<HS>(dn, D, ks + column_at(lane, LD));
        delta_add<HS, 0>(D, g, NULL, qs + row_at(lane, LD), 0, 3);
        delta_pack(hi, lo, dn);
        delta_by_lower<0, 1>(e, hi, lo, ms + row_at(lane, DELTA_LD));
        delta_store_columns(dv + (size_t)c * DELTA_CS * pitch, e, s, pitch, T - c * DELTA_CS,
                            hs - row);
        delta_scale<8>(e, -1);
        delta_pack(hi, lo, e);
        delta_add<HS, 1>(D, hi, lo, ks + row_at(lane, LD), 0, 3);
    }
    if (dinitial && warp < WARPS)
        delta_state_store<HS>(dinitial + (size_t)head * hs * hs, D, s, row, hs);
}

// delta_grads_bytes: shared memory of a block of delta_grads_kernel.
static size_t delta_grads_bytes(int HS)
{
    const size_t tile = DELTA_CS * (HS + 8), two = 2 * DELTA_TILE;
    return (3 * tile + (tile > two ? tile : two) + HS * (HS + 8)) * sizeof(floatX);
}

// delta_grads_kernel: dq, dk (rows `pitch` apart) and dbeta of a chunk, by a block; a warp has 16
// rows of each. With X and F made, q takes the place of dout, X and F that of dv, D' that of S.
template <int HS>
static __global__ void __launch_bounds__(DELTA_THREADS, 2)
    delta_grads_kernel(floatX *dq, floatX *dk, float *dbeta, const floatX *dout, const floatX *dv,
                       const floatX *n, const floatX *states, const floatX *dstates,
                       const floatX *q, const floatX *k, const float *beta, int T, int NH, int hs,
                       int pitch)
{
    enum { LD = HS + 8, ROWS = DELTA_CS * LD, THREADS = DELTA_THREADS };
    enum { SPACE = (int)ROWS > 2 * (int)DELTA_TILE ? (int)ROWS : 2 * (int)DELTA_TILE };
    extern __shared__ __align__(16) floatX tiles[]; // dout, n, k, dv [64][LD], S [HS][LD]
    floatX *gs = tiles, *ns = gs + ROWS, *ks = ns + ROWS, *vs = ks + ROWS, *ss = vs + SPACE;
    floatX *xs = vs, *fs = xs + DELTA_TILE;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4;
    const int chunks = (T + DELTA_CS - 1) / DELTA_CS, head = blockIdx.x / chunks;
    const int t0 = blockIdx.x % chunks * DELTA_CS, rows = T - t0, own = 16 * warp;
    const size_t token = (size_t)(head / NH) * T + t0, C = (size_t)NH * hs;
    const size_t at = token * pitch + head % NH * hs, out_at = token * C + head % NH * hs;
    const size_t state = (size_t)blockIdx.x * hs * hs;
    const int left = own * LD + row_at(lane, LD), right = row_at(lane, LD);
    const float s = rsqrtf((float)hs);
    float x[8][4] = {}, f[8][4] = {}, d[HS / 8][4] = {}, e[HS / 8][4] = {};
    uint4 a[4], lo[4];
    delta_fetch<DELTA_CS, HS, THREADS>(gs, dout + out_at, (int)C, rows, hs);
    delta_fetch<DELTA_CS, HS, THREADS>(ns, n + out_at, (int)C, rows, hs);
    delta_fetch<DELTA_CS, HS, THREADS>(vs, dv + at, pitch, rows, hs);
    delta_fetch<DELTA_CS, HS, THREADS>(ks, k + at, pitch, rows, hs);
    delta_fetch<HS, HS, THREADS>(ss, states + state, hs, hs, hs);
    copy_wait();
    __syncthreads();
    delta_lower_dots<HS>(x, gs + left, ns + column_at(lane, LD));
    delta_lower_dots<HS>(f, vs + left, ns + column_at(lane, LD));
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = own + i % 4 / 2 * 8 + g, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r == c && r < rows) {
            const size_t to = (token + r) * NH + head % NH;
            const float b = delta_beta(beta[to]);
            dbeta[to] = f[i / 4][i % 4] / b / b;
        }
        x[i / 4][i % 4] = c <= r ? s * x[i / 4][i % 4] : 0;
        f[i / 4][i % 4] = c < r ? f[i / 4][i % 4] : 0;
    }
    delta_rows_times<HS>(d, gs + left, ss + right);
    delta_scale<HS / 8>(d, s);
    delta_pack(a, lo, x);
    delta_add<HS, 0>(d, a, NULL, ks + right, 0, warp);
    delta_store_rows<HS>(dq + at + (size_t)own * pitch, d, 1, pitch, rows - own, hs);
    delta_rows_times<HS>(e, vs + left, ss + right);
    delta_pack(a, lo, f);
    delta_add<HS, 0>(e, a, NULL, ks + right, 0, warp);
    __syncthreads(); // dout, dv and S have been read
    delta_fetch<DELTA_CS, HS, THREADS>(gs, q + at, pitch, rows, hs);
    delta_fetch<HS, HS, THREADS>(ss, dstates + state, hs, hs, hs);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int to = (own + i % 2 * 8 + g) * DELTA_LD + i / 2 * 8 + lane % 4 * 2, v = i % 2 * 2;
        if (i / 4 <= warp) {
            *(uint32_t *)(xs + to) = pack2(x[i / 2][v], x[i / 2][v + 1]);
            *(uint32_t *)(fs + to) = pack2(f[i / 2][v], f[i / 2][v + 1]);
        }
    }
    copy_wait();
    __syncthreads();
    const int column = own + column_at(lane, DELTA_LD);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = i >= warp ? ldmatrix<1>(fs + 16 * i * DELTA_LD + column) : uint4{};
    delta_add<HS, 0>(e, a, NULL, ks + right, warp, 3);
    delta_scale<HS / 8>(e, -1);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = i >= warp ? ldmatrix<1>(xs + 16 * i * DELTA_LD + column) : uint4{};
    delta_add<HS, 0>(e, a, NULL, gs + right, warp, 3);
    delta_rows_times<HS>(e, ns + left, ss + right);
    delta_store_rows<HS>(dk + at + (size_t)own * pitch, e, 1, pitch, rows - own, hs);
}

// ---- launchers

// delta_chunk_takes: whether the chunk kernels take a head size; other sizes need the recurrence.
static bool delta_chunk_takes(size_t HS)
{
    return HS % 8 == 0 && HS > 0 && HS <= 128;
}

// delta_chunk_fits: dies unless what the chunk kernels count in an int fits one.
static void delta_chunk_fits(size_t T, size_t NH, size_t HS, size_t pitch)
{
    if (!delta_chunk_takes(HS) || T > (size_t)1 << 30 || pitch % 8 || pitch > (size_t)1 << 24 ||
        NH * HS > (size_t)1 << 24)
        die(EXIT_USAGE, "delta rule by chunks: head size %zu, %zu tokens, rows %zu apart; expected "
            "head sizes 8, 16, ..., 128 and rows a multiple of 8 apart", HS, T, pitch);
}

// delta_warps: how many groups of 16 of the WIDTH rows of a head's state a block takes: all, or
// fewer where that leaves multiprocessors without a block.
static int delta_warps(size_t heads, int WIDTH)
{
    int warps = WIDTH / 16;
    while (warps > 1 && heads * (WIDTH / 16 / warps) < DELTA_BLOCKS)
        warps /= 2;
    return warps;
}

// DELTA_SIZE: the statement with HS as a constant: the width of the tiles for a head size.
#define DELTA_SIZE(size, ...) \
    do { \
        if ((size) <= 32) { enum { HS = 32 }; __VA_ARGS__; } \
        else if ((size) <= 64) { enum { HS = 64 }; __VA_ARGS__; } \
        else { enum { HS = 128 }; __VA_ARGS__; } \
    } while (0)

// DELTA_WARPS: the statement with WARPS as a constant, a power of two up to HS / 16.
#define DELTA_WARPS(warps, ...) \
    do { \
        if ((warps) == 1) { enum { WARPS = 1 }; __VA_ARGS__; } \
        else if ((warps) == 2) { enum { WARPS = 2 }; __VA_ARGS__; } \
        else if ((warps) == 4) { enum { WARPS = HS < 64 ? 1 : 4 }; __VA_ARGS__; } \
        else { enum { WARPS = HS < 128 ? 1 : 8 }; __VA_ARGS__; } \
    } while (0)

// delta_chunk_forward: o (B,T,NH*HS) = the delta rule of q, k, v and beta (B,T,NH), a head at a
// time:
//   u_t = beta_t (v_t - S_{t-1} k_t),  S_t = S_{t-1} + u_t k_t^T,  o_t = S_t q_t / sqrt(HS)
// Row (b,t) of q, k and v is `pitch` elements after the one before it, head h at h HS; |q|, |k| <=
// 1 but for rounding, beta in [0,2]. S_0 = initial (B,NH,HS,HS), values by keys, NULL: zero; final
// (B,NH,HS,HS) = S_T, unless NULL; may alias initial. Kept for the backward pass, NC = ceil(T/64):
// pairs (B,NH,NC,3,64,64) = M and P of every chunk, states (B,NH,NC,HS,HS) = S before it, u
// (B,T,NH*HS) =; states and u NULL: there will be none. Floats other than floatX are fp32. HS a
// multiple of 8, at most 128, pitch one of 8, floatX arrays start on 16 bytes, or it dies.
static void delta_chunk_forward(floatX *o, floatX *pairs, floatX *states, floatX *u, float *final,
                                const floatX *q, const floatX *k, const floatX *v,
                                const float *beta, const float *initial, size_t B, size_t T,
                                size_t NH, size_t size, size_t pitch, cudaStream_t stream)
{
    const size_t chunks = (T + DELTA_CS - 1) / DELTA_CS, heads = B * NH;
    delta_chunk_fits(T, NH, size, pitch);
    DELTA_SIZE(size,
        LAUNCH(delta_pairs_kernel<HS>, heads * chunks, DELTA_THREADS, delta_pairs_bytes(HS), stream,
               pairs, q, k, beta, (int)T, (int)NH, (int)size, (int)pitch);
        DELTA_WARPS(delta_warps(heads, HS),
            LAUNCH((delta_forward_kernel<HS, WARPS>),
                   heads * ((size + 16 * WARPS - 1) / (16 * WARPS)),
                   WARPS > 4 ? 32 * WARPS : DELTA_THREADS, delta_head_bytes(HS, WARPS), stream, o,
                   u, states, final, q, k, v, pairs, initial, (int)T, (int)NH, (int)size,
                   (int)pitch)));
}

// delta_chunk_backward: dq, dk, dv (rows as q's) =, dbeta (B,T,NH) =, dinitial (B,NH,HS,HS) =
// unless NULL, from dout (B,T,NH*HS), dfinal (B,NH,HS,HS), the gradient of S_T, NULL: zero, and
// what the forward pass was given and kept. dstates (B,NH,NC,HS,HS): scratch.
static void delta_chunk_backward(floatX *dq, floatX *dk, floatX *dv, float *dbeta, float *dinitial,
                                 floatX *dstates, const floatX *dout, const float *dfinal,
                                 const floatX *pairs, const floatX *states, const floatX *u,
                                 const floatX *q, const floatX *k, const float *beta, size_t B,
                                 size_t T, size_t NH, size_t size, size_t pitch,
                                 cudaStream_t stream)
{
    const size_t chunks = (T + DELTA_CS - 1) / DELTA_CS, heads = B * NH;
    delta_chunk_fits(T, NH, size, pitch);
    DELTA_SIZE(size,
        DELTA_WARPS(delta_warps(heads, HS),
            LAUNCH((delta_backward_kernel<HS, WARPS>),
                   heads * ((size + 16 * WARPS - 1) / (16 * WARPS)),
                   WARPS > 4 ? 32 * WARPS : DELTA_THREADS, delta_head_bytes(HS, WARPS), stream, dv,
                   dstates, dinitial, dout, dfinal, q, k, pairs, (int)T, (int)NH, (int)size,
                   (int)pitch));
        LAUNCH(delta_grads_kernel<HS>, heads * chunks, DELTA_THREADS, delta_grads_bytes(HS), stream,
               dq, dk, dbeta, dout, dv, u, states, dstates, q, k, beta, (int)T, (int)NH, (int)size,
               (int)pitch));
}
#endif

#endif
