// chain.cuh: what the single-pass scans of this folder share: tiles, 8-byte words between blocks.
//
// A scan over T of (B,T,D) is cut into tiles of (rows x channels); a block takes tiles in the order
// of their time, holds one in registers, and needs from the tiles before it one number (or pair) a
// channel. These pass through global memory as 8-byte words that start as all ones: a word is its
// own flag, so there is no fence and no second trip to L2. Blocks must not wait for tiles that have
// no block yet: the grid is at most what the device holds at once, and block i takes tiles i,
// i + grid, ..., so the earliest unfinished tile never waits for an unfinished one.
// What is added to what depends on tile numbers alone, so the result does not depend on timing.
#ifndef SEQ_DEV_CHAIN_CUH
#define SEQ_DEV_CHAIN_CUH

#include "../bench.cuh"

enum { THREADS = 256 };

typedef struct {
    unsigned NT;     // tiles along T
    unsigned NC;     // tiles along D
    unsigned NG;     // groups of tiles along T
    int rows;        // rows of a thread
    unsigned tiles;  // B * NT * NC, the tile's time changing slowest
    int single_pass; // NT > 1: tiles wait for each other
} Tiling;

// tiling: tiles of at most max_rows rows a thread, `lanes` threads of `vec` channels side by side,
// evenly long. Dies if they do not fit 31 bits.
static inline Tiling tiling(size_t B, size_t T, size_t D, int lanes, int vec, int max_rows, int group)
{
    size_t high = THREADS / lanes, wide = lanes * vec, NT = (T + high * max_rows - 1) / (high * max_rows);
    size_t NC = (D + wide - 1) / wide, tiles = size_mul(size_mul(B, NT, "tiles"), NC, "tiles");
    if (tiles > INT32_MAX / 2)
        die(EXIT_MEMORY, "scan: %zu tiles, expected at most 2^30", tiles);
    Tiling t = {(unsigned)NT, (unsigned)NC, (unsigned)((NT + group - 1) / group),
                (int)((T + NT * high - 1) / (NT * high)), (unsigned)tiles, NT > 1};
    return t;
}

// tiling_grid: blocks to launch: all tiles, or, if tiles wait for each other, what fits at once.
static inline unsigned tiling_grid(const Tiling *t, const void *kernel)
{
    int blocks, sms;
    if (!t->single_pass)
        return t->tiles;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    return t->tiles < (unsigned)(blocks * sms) ? t->tiles : (unsigned)(blocks * sms);
}

typedef unsigned long long Word;
#define WORD_EMPTY (~0ull) // a NaN that no arithmetic produces: the hardware's own is 0x7fff...

// word_put: publish the 8 bytes of v, which other blocks may be waiting for.
template <typename V> static __device__ __forceinline__ void word_put(Word *w, V v)
{
    static_assert(sizeof(V) == 8, "a word is 8 bytes");
    Word bits;
    memcpy(&bits, &v, 8);
    *(volatile Word *)w = bits == WORD_EMPTY ? WORD_EMPTY ^ (1ull << 63) ^ (1ull << 31) : bits;
}

// word_wait: the value of *w, once some block has put it there.
template <typename V> static __device__ __forceinline__ V word_wait(const Word *w)
{
    Word bits;
    V v;
    do
        bits = *(const volatile Word *)w;
    while (bits == WORD_EMPTY);
    memcpy(&v, &bits, 8);
    return v;
}

// load, store: VEC consecutive floats, as one 16-byte access if VEC is 4.
template <int VEC> static __device__ __forceinline__ void load(float (&v)[VEC], const float *p)
{
    if (VEC == 4)
        *(float4 *)v = *(const float4 *)p;
    else
        for (int i = 0; i < VEC; i++)
            v[i] = p[i];
}

template <int VEC> static __device__ __forceinline__ void store(float *p, const float (&v)[VEC])
{
    if (VEC == 4)
        *(float4 *)p = *(const float4 *)v;
    else
        for (int i = 0; i < VEC; i++)
            p[i] = v[i];
}

// aligned16: rows of D floats at each of the pointers (NULL counts) start on 16-byte boundaries.
static inline int aligned16(size_t D, const void *a, const void *b, const void *c, const void *d)
{
    return D % 4 == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

#endif
