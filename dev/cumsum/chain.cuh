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

typedef unsigned long long Word;
#define WORD_EMPTY (~0ull) // a NaN that no arithmetic produces: the hardware's own is 0x7fff...

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

// words_clear_kernel: n words become empty. The next kernel of the stream, if launched `early`, may
// begin meanwhile; words_cleared, called by every thread of it, waits for their end.
static __global__ void words_clear_kernel(Word *w, size_t n)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step)
        w[i] = WORD_EMPTY;
}

static __device__ __forceinline__ void words_cleared(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// words_bytes: scratch for the sums and carries of tiles of `rows` rows or more.
static inline size_t words_bytes(size_t B, size_t T, size_t D, size_t rows)
{
    return 16 * size_mul(size_mul(B, T / rows + 2, "work"), D, "work");
}

// words_clear: make n words empty, with a kernel that chain_launch's may overlap if `early`.
static inline void words_clear(Word *w, size_t n, int early, cudaStream_t stream)
{
    if (!early) {
        CUDA_CHECK(cudaMemsetAsync(w, 0xFF, n * sizeof *w, stream));
        return;
    }
    words_clear_kernel<<<n < 65536 ? (unsigned)((n + 255) / 256) : 256, 256, 0, stream>>>(w, n);
    CUDA_CHECK(cudaGetLastError());
}

// chain_launch: launch `kernel` on t's tiles with smem bytes of dynamic shared memory; early: while
// words_clear's kernel still runs, where the device can.
static inline void chain_launch(const void *kernel, const char *name, const Tiling *t, size_t smem,
                                int early, void **args, cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    int major;
    bench_fits(kernel, name, THREADS, smem);
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    memset(&overlap, 0, sizeof overlap);
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config;
    memset(&config, 0, sizeof config);
    config.gridDim = dim3(tiling_grid(t, kernel, smem));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = early && major >= 9;
    CUDA_CHECK(cudaLaunchKernelExC(&config, kernel, args));
}

// scan_words: what a scan of (B,T,D) with tiles of `lanes` threads of `vec` channels by max_rows
// rows a thread needs before its kernel: a Tiling, and its empty words in `work`.
static inline Tiling scan_words(Word **sums, Word **carries, Word *work, size_t B, size_t T,
                                size_t D, int lanes, int vec, int max_rows, int group, int early,
                                cudaStream_t stream)
{
    Tiling t = tiling(B, T, D, lanes, vec, max_rows, group);
    size_t n = group > 1 ? B * t.NT * D : 0, m = B * t.NG * D;
    *sums = work;
    *carries = work + n;
    if (t.single_pass)
        words_clear(work, n + m, early, stream);
    return t;
}

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

// load, store, store_shared: VEC consecutive floats, as one 16-byte access if VEC is 4. The stores
// are spelled out: the compiler splits a plain *(float4 *) in the larger kernels into four 4-byte
// stores, each of which touches every sector of a warp's row.
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
    if constexpr (VEC == 4)
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
                     "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    else
        for (int i = 0; i < VEC; i++)
            p[i] = v[i];
}

template <int VEC>
static __device__ __forceinline__ void store_shared(float *p, const float (&v)[VEC])
{
    if constexpr (VEC == 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                         (unsigned)__cvta_generic_to_shared(p)),
                     "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    else
        for (int i = 0; i < VEC; i++)
            p[i] = v[i];
}

// tile_fetch: start copying the thread's rows of p from x to its places in shared memory, THREADS
// VEC floats apart. tile_load: v = the rows, read at `from` and every `stride` floats; rows that do
// not exist: none.
template <int VEC, int ROWS>
static __device__ __forceinline__ void tile_fetch(float *to, const float *x, const Place &p,
                                                  ptrdiff_t step)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r < p.rows)
            copy_async<VEC>(to + r * THREADS * VEC, x + p.first + r * step);
}

template <int VEC, int ROWS>
static __device__ __forceinline__ void tile_load(float (&v)[ROWS][VEC], const float *from,
                                                 ptrdiff_t stride, int rows, float none)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < VEC; c++)
            v[r][c] = none;
        if (r < rows)
            load(v[r], from + r * stride);
    }
}

// Cells: (R,W) values in shared memory; gets and puts: VEC of them. Planes: the same for a V of two
// floats, first all the first ones, then all the second: 16-byte accesses without bank conflicts,
// where Cells puts 8 lanes to a bank.
template <typename V, int R, int W>
struct Cells {
    V v[R][W];
    __device__ __forceinline__ V get(int r, int c) const { return v[r][c]; }
    __device__ __forceinline__ void put(int r, int c, V x) { v[r][c] = x; }
    template <int VEC>
    __device__ __forceinline__ void gets(V (&x)[VEC], int r, int c) const
    {
        for (int i = 0; i < VEC; i++)
            x[i] = v[r][c + i];
    }
    template <int VEC>
    __device__ __forceinline__ void puts(int r, int c, const V (&x)[VEC])
    {
        for (int i = 0; i < VEC; i++)
            v[r][c + i] = x[i];
    }
};

template <typename V, int R, int W>
struct Planes {
    __align__(16) float a[R][W], b[R][W];
    __device__ __forceinline__ V get(int r, int c) const { return {a[r][c], b[r][c]}; }
    __device__ __forceinline__ void put(int r, int c, V x)
    {
        auto [first, second] = x;
        a[r][c] = first, b[r][c] = second;
    }
    template <int VEC>
    __device__ __forceinline__ void gets(V (&x)[VEC], int r, int c) const
    {
        float first[VEC], second[VEC];
        load(first, a[r] + c), load(second, b[r] + c);
        for (int i = 0; i < VEC; i++)
            x[i] = {first[i], second[i]};
    }
    template <int VEC>
    __device__ __forceinline__ void puts(int r, int c, const V (&x)[VEC])
    {
        float first[VEC], second[VEC];
        for (int i = 0; i < VEC; i++) {
            auto [one, two] = x[i];
            first[i] = one, second[i] = two;
        }
        store_shared(a[r] + c, first), store_shared(b[r] + c, second);
    }
};

// Sums: what a block of HIGH rows of threads, W channels wide, keeps of its tile: the total of each
// row of threads (Total: its type), what the tile's rows above it hold, and what all earlier tiles
// hold.
template <template <typename, int, int> class Array, typename V, typename Total, int H, int W>
struct Sums {
    enum { HIGH = H, WIDE = W, PARTS = THREADS / W };
    Array<Total, H, W> total;
    Array<V, H, W> before;
    Array<V, PARTS, W> part;
    Array<V, 1, W> carry;
};

// tile_chain: before and carry from total, which the caller has written and passed a barrier after.
// sums (B,NT,D), carries (B,NG,D): words, empty at the start (unused if NT is 1). A tile's sum is
// published as soon as it is known; the carry into a group of GROUPS tiles (GROUPS 1: into a tile)
// by the last tile of the group before. AHEAD totals are read at a time: a store between two of
// them would hold the second back. join(a,b): a, then b; none: what adds nothing; start(i): what
// channel i of (B,D) starts from; end(i,sum): takes what it ends with. Ends with a barrier. The
// next tile's first write is to total, which is not read after that.
template <int GROUPS, int AHEAD, typename S, typename V, typename Join, typename Start,
          typename End>
static __device__ __forceinline__ void tile_chain(S &sh, Word *sums, Word *carries, const Place &p,
                                                  size_t D, const Tiling &tl, V none, Join join,
                                                  Start start, End end)
{
    const int EACH = GROUPS > 1 ? GROUPS / S::PARTS : 1;
    const int q = threadIdx.x / S::WIDE, cw = threadIdx.x % S::WIDE;
    const size_t c = p.c0 + cw;
    const int own = c < D;
    V sum = none;
    if (q == 0) {
#pragma unroll
        for (int i = 0; i < S::HIGH; i += AHEAD) {
            V v[AHEAD];
            for (int j = 0; j < AHEAD; j++)
                v[j] = sh.total.get(i + j, cw);
            for (int j = 0; j < AHEAD; j++) {
                sh.before.put(i + j, cw, sum);
                sum = join(sum, v[j]);
            }
        }
        if (GROUPS > 1 && tl.NT > 1 && own)
            word_put(&sums[((size_t)p.b * tl.NT + p.k) * D + c], sum);
    }
    if (GROUPS > 1) { // add the earlier tiles of the group, a few in each part
        unsigned k0 = p.k / GROUPS * GROUPS + q * EACH;
        int count = own && p.k > k0 ? p.k - k0 < EACH ? (int)(p.k - k0) : EACH : 0;
        V s = none, v[EACH];
        words_wait(v, &sums[((size_t)p.b * tl.NT + k0) * D + c], D, count, none);
        for (int i = 0; i < EACH; i++)
            s = join(s, v[i]);
        sh.part.put(q, cw, s);
        __syncthreads();
    }
    if (q == 0 && own) {
        unsigned G = p.k / GROUPS;
        V s = G ? word_wait<V>(&carries[((size_t)p.b * tl.NG + G) * D + c]) : start(p.b * D + c);
        for (int i = 0; i < S::PARTS && GROUPS > 1; i++)
            s = join(s, sh.part.get(i, cw));
        sh.carry.put(0, cw, s);
        sum = join(s, sum);
        if (p.k % GROUPS == GROUPS - 1 && p.k + 1 < tl.NT)
            word_put(&carries[((size_t)p.b * tl.NG + G + 1) * D + c], sum);
        if (p.k + 1 == tl.NT)
            end(p.b * D + c, sum);
    }
    __syncthreads();
}

// blocks_for: blocks of 128 threads for so many threads; dies if they do not fit a grid.
static inline unsigned blocks_for(size_t threads)
{
    size_t n = (threads + 127) / 128;
    if (n > INT32_MAX)
        die(EXIT_MEMORY, "scan: %zu blocks, expected at most 2^31 - 1", n);
    return (unsigned)n;
}

// aligned16: rows of D floats at each of the pointers (NULL counts) start on 16-byte boundaries.
static inline int aligned16(size_t D, const void *a, const void *b, const void *c, const void *d)
{
    return D % 4 == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

#endif
