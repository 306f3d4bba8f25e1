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
static inline Tiling tiling(size_t B, size_t T, size_t D, int lanes, int vec, int max_rows,
                            int group)
{
    size_t high = THREADS / lanes, wide = lanes * vec,
           NT = (T + high * max_rows - 1) / (high * max_rows);
    size_t NC = (D + wide - 1) / wide, tiles = size_mul(size_mul(B, NT, "tiles"), NC, "tiles");
    if (tiles > INT32_MAX / 2)
        die(EXIT_MEMORY, "scan: %zu tiles, expected at most 2^30", tiles);
    Tiling t = {(unsigned)NT,
                (unsigned)NC,
                (unsigned)((NT + group - 1) / group),
                (int)((T + NT * high - 1) / (NT * high)),
                (unsigned)tiles,
                NT > 1};
    return t;
}

// tiling_grid: blocks to launch: all tiles, or, if tiles wait for each other or a block fetches the
// next while it works on one, what fits at once. `smem`: its dynamic shared memory.
static inline unsigned tiling_grid(const Tiling *t, const void *kernel, size_t smem)
{
    int blocks, sms;
    if (!t->single_pass && !smem)
        return t->tiles;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, smem));
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    return t->tiles < (unsigned)(blocks * sms) ? t->tiles : (unsigned)(blocks * sms);
}

typedef unsigned long long Word;
#define WORD_EMPTY (~0ull) // a NaN that no arithmetic produces: the hardware's own is 0x7fff...

// word_put: publish the 8 bytes of v, which other blocks may be waiting for.
template <typename V>
static __device__ __forceinline__ void word_put(Word *w, V v)
{
    static_assert(sizeof(V) == 8, "a word is 8 bytes");
    Word bits;
    memcpy(&bits, &v, 8);
    *(volatile Word *)w = bits == WORD_EMPTY ? WORD_EMPTY ^ (1ull << 63) ^ (1ull << 31) : bits;
}

// word_wait: the value of *w, once some block has put it there.
template <typename V>
static __device__ __forceinline__ V word_wait(const Word *w)
{
    Word bits;
    V v;
    do
        bits = *(const volatile Word *)w;
    while (bits == WORD_EMPTY);
    memcpy(&v, &bits, 8);
    return v;
}

// words_wait: v[i] = words w[i * stride], i < count, once all are there; `none` from count on. The
// first looks are in flight together: waiting for one after the other would cost a trip to L2 each.
template <int N, typename V>
static __device__ __forceinline__ void words_wait(V (&v)[N], const Word *w, size_t stride,
                                                  int count, V none)
{
    Word bits[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        bits[i] = i < count ? *(const volatile Word *)(w + i * stride) : 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        while (bits[i] == WORD_EMPTY)
            bits[i] = *(const volatile Word *)(w + i * stride);
        memcpy(&v[i], &bits[i], 8);
        if (i >= count)
            v[i] = none;
    }
}

// copy_async: start copying VEC floats to shared memory; copies_wait: until this thread's have
// arrived.
template <int VEC>
static __device__ __forceinline__ void copy_async(float *to, const float *from)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (VEC == 4)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}

static __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Place of a thread in a tile: its first row and channel.
typedef struct {
    unsigned k, b; // tile along T, batch row
    size_t c0;     // first channel of the tile
    size_t t0;     // the thread's first position in the scan
    int rows;      // how many of its rows exist; 0 if its channel does not
    size_t first;  // offset of row t0 in (B,T,D), used only if rows > 0
} Place;

// place: thread (g, w) of `tile` (W channels, HIGH rows of threads); descending: position 0 is time
// T-1.
static __device__ __forceinline__ Place place(unsigned tile, int g, int w, int W, int HIGH,
                                              unsigned B, size_t T, size_t D, int descending,
                                              const Tiling &tl)
{
    Place p;
    p.k = tile / (B * tl.NC);
    p.b = tile / tl.NC % B;
    p.c0 = (size_t)(tile % tl.NC) * W;
    p.t0 = ((size_t)p.k * HIGH + g) * tl.rows;
    p.rows = p.c0 + w >= D || p.t0 >= T   ? 0
             : T - p.t0 < (size_t)tl.rows ? (int)(T - p.t0)
                                          : tl.rows;
    p.first = (p.b * T + (descending ? T - 1 - p.t0 : p.t0)) * D + p.c0 + w;
    return p;
}

// load, store: VEC consecutive floats, as one 16-byte access if VEC is 4.
template <int VEC>
static __device__ __forceinline__ void load(float (&v)[VEC], const float *p)
{
    if (VEC == 4)
        *(float4 *)v = *(const float4 *)p;
    else
        for (int i = 0; i < VEC; i++)
            v[i] = p[i];
}

template <int VEC>
static __device__ __forceinline__ void store(float *p, const float (&v)[VEC])
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
