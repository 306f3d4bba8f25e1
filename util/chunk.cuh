// chunk.cuh: products of chunks of 64 tokens on tensor cores: a warp has 16 rows of a product as
// accumulators of mma, the right operand is a tile in shared memory, whose rows stand 8 elements
// further apart than they are long, so that ldmatrix meets no bank twice.
#ifndef SEQ_UTIL_CHUNK_CUH
#define SEQ_UTIL_CHUNK_CUH

#include "warp.cuh"

// Tokens of a chunk; elements between rows of a 64x64 tile, and of the tile.
enum { CS = 64, LDC = CS + 8, TILE = CS * LDC };

#ifdef PRECISION_BF16
// unpack: number i of the two of pack2.
static __device__ inline float unpack(uint32_t x, int i)
{
    return (float)((const floatX *)&x)[i];
}

// transpose: of an 8x8 matrix of bf16, columns 2t, 2t+1 of row g in lane 4g + t.
static __device__ inline uint32_t transpose(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// tile_fetch: start copying rows 0 .. ROWS-1 of x, `stride` elements apart, into a tile
// [ROWS][W + 8]; what is not among the first `rows` rows and `columns` columns becomes 0. A thread
// keeps to its columns.
template <int ROWS, int W, int THREADS>
static __device__ inline void tile_fetch(floatX *tile, const floatX *x, int stride, int rows,
                                         int columns)
{
    enum { STEP = THREADS / (W / 8) };
    const int c = threadIdx.x % (W / 8) * 8, r0 = threadIdx.x / (W / 8);
    const floatX *from = x + (size_t)r0 * stride + c;
    static_assert(ROWS % STEP == 0 && THREADS % (W / 8) == 0);
    rows = c < columns ? rows : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += (size_t)STEP * stride)
        copy_async(tile + (r0 + i) * (W + 8) + c, r0 + i < rows ? from : x, r0 + i < rows);
}

// part_sync: __syncthreads for THREADS threads of a block, those that call it.
template <int THREADS> static __device__ inline void part_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// row_store: columns 2t, 2t+1 (left) and 8+2t, 9+2t (right) of a row of 16 come from its four lanes
// 4g + t and are written as 8 bytes a lane, so that sectors of 32 bytes are written whole. Nothing
// is written unless the row is `inside`, nor at columns from `columns` on.
static __device__ inline void row_store(floatX *row, uint32_t left, uint32_t right, bool inside,
                                        int columns)
{
    const int odd = threadIdx.x & 1, column = odd * 8 + threadIdx.x % 4 / 2 * 4;
    const uint32_t other = __shfl_xor_sync(~0u, odd ? left : right, 1);
    if (inside && column < columns)
        *(uint2 *)(row + column) = {odd ? other : left, odd ? right : other};
}

// rows_store: rows 0 .. 15 of `to`, `stride` apart, = factor c (16 x HS); what is not among the
// first `rows` rows and `columns` columns stays.
template <int HS>
static __device__ inline void rows_store(floatX *to, const float c[HS / 8][4], float factor,
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

// columns_store: rows_store of the transpose of factor c, c (16 x 8N): 8N rows of 16 columns.
template <int N>
static __device__ inline void columns_store(floatX *to, const float c[N][4], float factor,
                                            size_t stride, int rows, int columns)
{
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < N; n++)
        row_store(to + (8 * n + g) * stride, transpose(pack2(factor * c[n][0], factor * c[n][1])),
                  transpose(pack2(factor * c[n][2], factor * c[n][3])), 8 * n + g < rows, columns);
}

// split_pack: c (16 x 64) as left operands of mma: hi = c rounded, lo = what rounding took from it.
static __device__ inline void split_pack(uint4 hi[4], uint4 lo[4], const float c[8][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float rest[2][4];
        hi[k] = accumulator_pack(&c[2 * k]);
        const uint32_t x[] = {hi[k].x, hi[k].y, hi[k].z, hi[k].w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            rest[i / 4][i % 4] = c[2 * k + i / 4][i % 4] - unpack(x[i / 2], i % 2);
        lo[k] = accumulator_pack(rest);
    }
}

// split_store: c (16x16) into two tiles of 16 rows, one behind the other: c rounded, and what
// rounding took from it.
static __device__ inline void split_store(floatX *tile, const float c[2][4])
{
    const int at = threadIdx.x % WARP / 4 * LDC + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float left = c[i / 2][i % 2 * 2], right = c[i / 2][i % 2 * 2 + 1];
        const uint32_t hi = pack2(left, right);
        uint32_t *to = (uint32_t *)(tile + at + i % 2 * 8 * LDC + i / 2 * 8);
        to[0] = hi;
        to[8 * LDC] = pack2(left - unpack(hi, 0), right - unpack(hi, 1));
    }
}

// split_load: the tiles of split_store, of 64 columns, as left operands of mma.
static __device__ inline void split_load(uint4 hi[4], uint4 lo[4], const floatX *tile)
{
    tile += row_at(threadIdx.x % WARP, LDC);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        hi[k] = ldmatrix<0>(tile + 16 * k);
        lo[k] = ldmatrix<0>(tile + 16 * LDC + 16 * k);
    }
}

// mma16: c (16x16) += a (16x16) b (16x16), b as ldmatrix gives it.
static __device__ inline void mma16(float c[2][4], uint4 a, uint4 b)
{
    mma(c[0], a, b.x, b.y);
    mma(c[1], a, b.z, b.w);
}

// 16 rows of a tile, at row_at, as left operands, which are loaded where they are needed.
struct Rows {
    const floatX *tile;
    __device__ uint4 operator[](int k) const { return ldmatrix<0>(tile + 16 * k); }
};

// add_dots: c (16 x 64) += a (16 x HS) times the transpose of a tile of 64 rows, at column_at. Of
// the tile only the blocks 0 .. last of 16 rows count. A: uint4 [HS / 16], or Rows.
template <int HS, typename A>
static __device__ inline void add_dots(float c[8][4], A a, const floatX *tile, int last)
{
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const uint4 left = a[k];
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (n <= last)
                mma16(&c[2 * n], left, ldmatrix<0>(tile + 16 * n * (HS + 8) + 16 * k));
    }
}

// add_product: c (16 x N) += a (16 x ROWS) times N columns of a tile [ROWS][HS + 8], at row_at. Of
// a only the blocks first .. last of 16 columns count. With lo, not NULL, a + lo is multiplied.
template <int HS, int ROWS, int N = HS, typename A>
static __device__ inline void add_product(float c[N / 8][4], A a, const uint4 *lo,
                                          const floatX *tile, int first, int last)
{
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        if (first <= k && k <= last) {
            const uint4 left = a[k];
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                const uint4 b = ldmatrix<1>(tile + 16 * k * (HS + 8) + 16 * n);
                mma16(&c[2 * n], left, b);
                if (lo)
                    mma16(&c[2 * n], lo[k], b);
            }
        }
}

// add_block: c (16x16) += a L for a block L (16x16), TRANS: a L^T. With lo, which may be NULL, also
// d += lo L + a M, M the block one tile behind L: what rounding took from a and from L. d may be c.
template <int TRANS>
static __device__ inline void add_block(float c[2][4], float d[2][4], uint4 a, const uint4 *lo,
                                        const floatX *L)
{
    const uint4 b = ldmatrix<!TRANS>(L);
    mma16(c, a, b);
    if (lo) {
        mma16(d, *lo, b);
        mma16(d, a, ldmatrix<!TRANS>(L + TILE));
    }
}

// add_by_lower: c (16 x 64) += a L for a lower triangular L (64 x 64), at row_at; TRANS: a L^T, L
// at column_at. lo: as in add_block, with d = c.
template <int TRANS>
static __device__ inline void add_by_lower(float c[8][4], const uint4 a[4], const uint4 *lo,
                                           const floatX *L)
{
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = TRANS ? k : 0; n < (TRANS ? 4 : k + 1); n++)
            add_block<TRANS>(&c[2 * n], &c[2 * n], a[k], lo ? lo + k : NULL,
                             L + 16 * (TRANS ? n * LDC + k : k * LDC + n));
}
#endif

#endif
