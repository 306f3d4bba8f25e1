// scan.cuh: the kernels of scan_real.cu and scan_complex.cu: h_t = a_t h_{t-1} + x_t along T of
// (B,T,C), C contiguous, and its gradient, of numbers that are real or complex.
//
//   forward    h_t = a_t h_{t-1} + x_t,  h_{-1} = h0,  hT = h_{T-1}
//   backward   dx_t = g_t + s_{t+1},  da_t = dx_t conj(h_{t-1}),  s_t = conj(a_t) dx_t,
//              s_T = dhT,  dh0 = s_0        g: the gradient of h;  s_t: what h_{t-1} gets from t on
//
// Backward is a scan of the same kind from the end, and reads no a_{t+1} from another tile. Both
// are written once: position i is time i forward and T-1-i backward, and the state that is handed
// on is h or s. A run of positions takes a state s to A s + H; (A, H) then (A', H') is
// (A' A, A' H + H'). Nothing is divided by a product, and no logarithm is taken.
//
// Schemes:
//   walk    a thread takes its channels from one end to the other, U rows of loads in flight
//   chunks  (A, H) of every chunk; the states between chunks, one after the other; every row again
//   ring    a warp walks 32 VEC channels; the next STAGES - 1 stages of ROWS rows are on their way
//           to shared memory (cp.async). The arithmetic is walk's, to the bit.
//   tiles   a block holds a tile of rows x channels in registers: (A, H) of each thread's rows, of
//           the rows of threads above it, the state before the tile, every row again. One block for
//           all tiles of its channels (column), or a block a tile, and states passed on in global
//           memory (chain). With ASYNC the next tile is on its way meanwhile.
// A block's tiles and the order of its sums depend on the shape alone: the same bits in every run.
//
// Infinities and NaN: where A s + H is not finite, the rows are walked one by one instead, so that
// what comes out is what the recurrence gives, also where A has left fp32's range: 0 for a = 2 and
// h = x = 0, infinity for a = 1/2 and h0 = infinity. (A state beyond 3.4e38 that comes back into
// range within one tile is the exception.)
#ifndef SEQ_DEV_SCAN_CUH
#define SEQ_DEV_SCAN_CUH

#include "../../util/cuda.h"
#include "../bench.cuh"

enum { THREADS = 256, CHUNK = 64 };

// ---- numbers: float and Complex; in memory also bf16, which is read as float ----

struct __align__(8) Complex {
    float re, im;
};

// value: x as it is computed with. narrow: *to = x, rounded where memory is bf16.
static __device__ __forceinline__ float value(float x) { return x; }
static __device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ Complex value(Complex x) { return x; }

static __device__ __forceinline__ void narrow(float *to, float x) { *to = x; }
static __device__ __forceinline__ void narrow(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16(x);
}
static __device__ __forceinline__ void narrow(Complex *to, Complex x) { *to = x; }

// conj_of: x with -im; a real number stays.
static __device__ __forceinline__ float conj_of(float x) { return x; }
static __device__ __forceinline__ Complex conj_of(Complex x) { return {x.re, -x.im}; }

// add: x + y.
static __device__ __forceinline__ float add(float x, float y) { return x + y; }
static __device__ __forceinline__ Complex add(Complex x, Complex y)
{
    return {x.re + y.re, x.im + y.im};
}

// mul: x y, rounded: the compiler does not make one rounding of it and a sum that follows, which
// it would in one kernel and not in another.
static __device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
static __device__ __forceinline__ Complex mul(Complex x, Complex y)
{
    return {fmaf(x.re, y.re, -(x.im * y.im)), fmaf(x.re, y.im, x.im * y.re)};
}

// mul_add: x y + z.
static __device__ __forceinline__ float mul_add(float x, float y, float z) { return fmaf(x, y, z); }
static __device__ __forceinline__ Complex mul_add(Complex x, Complex y, Complex z)
{
    return {fmaf(x.re, y.re, fmaf(-x.im, y.im, z.re)), fmaf(x.re, y.im, fmaf(x.im, y.re, z.im))};
}

// is_finite: no part is NaN or infinite. all_nan: every part is NaN. set_one: *x = 1.
static __device__ __forceinline__ int is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
static __device__ __forceinline__ int is_finite(Complex x)
{
    return is_finite(x.re) && is_finite(x.im);
}

static __device__ __forceinline__ int all_nan(float x) { return x != x; }
static __device__ __forceinline__ int all_nan(Complex x) { return x.re != x.re && x.im != x.im; }

static __device__ __forceinline__ void set_one(float *x) { *x = 1; }
static __device__ __forceinline__ void set_one(Complex *x) { *x = {1, 0}; }

// ---- the problem ----

template <typename I>
struct ValueOf {
    typedef float V;
};
template <>
struct ValueOf<Complex> {
    typedef Complex V;
};

// I: the type of a and x in memory; V: that of states. hT may be h0, dh0 may be dhT.
template <typename I>
struct Scan {
    typedef typename ValueOf<I>::V V;
    V *h, *hT;        // (B,T,C), which backward reads, (B,C) or NULL
    I *dx, *da;       // (B,T,C)
    V *dh0;           // (B,C) or NULL
    const I *a, *x;   // (B,T,C)
    const V *h0;      // (B,C) or NULL = 0
    const V *g, *dhT; // (B,T,C), (B,C) or NULL = 0
    size_t B, T, C;
    char *work; // scan_work_bytes
};

// Affine: what a run of positions does to a state: s becomes a s + h.
template <typename V>
struct Affine {
    V a, h;
};

// nothing: leaves a state as it is.
template <typename V>
static __device__ __forceinline__ Affine<V> nothing(void)
{
    Affine<V> f = {V{}, V{}};
    set_one(&f.a);
    return f;
}

// join: f, then g.
template <typename V>
static __device__ __forceinline__ Affine<V> join(Affine<V> f, Affine<V> g)
{
    return {mul(g.a, f.a), mul_add(g.a, f.h, g.h)};
}

// Row: a row of VEC channels: a; x or g; before: h_{t-1}, of backward.
template <typename V, int VEC, int BACK>
struct Row {
    V a[VEC], x[VEC], before[BACK ? VEC : 1];
};

// advance: the state after a row of one channel; x becomes h_t or dx_t, and backward a da_t.
template <int BACK, typename V>
static __device__ __forceinline__ V advance(V s, V &a, V &x, V before)
{
    if (!BACK)
        return x = mul_add(a, s, x);
    x = add(x, s);
    s = mul(conj_of(a), x);
    a = mul(x, conj_of(before));
    return s;
}

// joined: f, then a row.
template <int BACK, typename V>
static __device__ __forceinline__ Affine<V> joined(Affine<V> f, V a, V x)
{
    if (!BACK)
        return {mul(a, f.a), mul_add(a, f.h, x)};
    return {mul(conj_of(a), f.a), mul(conj_of(a), add(x, f.h))};
}

// ---- memory ----

// Bits: so many bytes that move as one.
template <int BYTES>
struct Bits;
template <>
struct Bits<2> {
    typedef unsigned short Type;
};
template <>
struct Bits<4> {
    typedef unsigned Type;
};
template <>
struct Bits<8> {
    typedef uint2 Type;
};
template <>
struct Bits<16> {
    typedef uint4 Type;
};

// store_bits: spelled out, as the compiler may take a plain store of 16 bytes apart.
static __device__ __forceinline__ void store_bits(void *p, unsigned short x)
{
    asm volatile("st.global.b16 [%0], %1;" : : "l"(p), "h"(x) : "memory");
}
static __device__ __forceinline__ void store_bits(void *p, unsigned x)
{
    asm volatile("st.global.b32 [%0], %1;" : : "l"(p), "r"(x) : "memory");
}
static __device__ __forceinline__ void store_bits(void *p, uint2 x)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(p), "r"(x.x), "r"(x.y) : "memory");
}
static __device__ __forceinline__ void store_bits(void *p, uint4 x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 : : "l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// get: v = VEC elements at p, which lie on a boundary of as many bytes. put: the reverse, to global
// memory.
template <int VEC, typename V, typename E>
static __device__ __forceinline__ void get(V (&v)[VEC], const E *p)
{
    typename Bits<VEC * sizeof(E)>::Type bits =
        *(const typename Bits<VEC * sizeof(E)>::Type *)p;
    E e[VEC];
    memcpy(e, &bits, sizeof e);
#pragma unroll
    for (int c = 0; c < VEC; c++)
        v[c] = value(e[c]);
}

template <int VEC, typename V, typename E>
static __device__ __forceinline__ void put(E *p, const V (&v)[VEC])
{
    typename Bits<VEC * sizeof(E)>::Type bits;
    E e[VEC];
#pragma unroll
    for (int c = 0; c < VEC; c++)
        narrow(&e[c], v[c]);
    memcpy(&bits, e, sizeof e);
    store_bits(p, bits);
}

// copy_async: start copying BYTES from global to shared memory, or, of `given` 0, zeros.
template <int BYTES>
static __device__ __forceinline__ void copy_async(void *to, const void *from, int given = BYTES)
{
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     : : "r"(at), "l"(from), "r"(given) : "memory");
    else if (BYTES == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                     : : "r"(at), "l"(from), "r"(given) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     : : "r"(at), "l"(from), "r"(given) : "memory");
}

// copies_commit: the copies since the last call are a group. copies_wait: until all but the latest
// PENDING groups of this thread have arrived.
static __device__ __forceinline__ void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

template <int PENDING>
static __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// row_at: offset of channel 0 of position i of sequence b; the next is row_step further.
template <int BACK, typename I>
static __device__ __forceinline__ size_t row_at(const Scan<I> &p, size_t b, size_t i)
{
    return (b * p.T + (BACK ? p.T - 1 - i : i)) * p.C;
}

template <int BACK, typename I>
static __device__ __forceinline__ ptrdiff_t row_step(const Scan<I> &p)
{
    return BACK ? -(ptrdiff_t)p.C : (ptrdiff_t)p.C;
}

// before_at: where h of the time before position i stands; NULL: it is 0. `at`: the offset of the
// position and channel c.
template <typename I>
static __device__ __forceinline__ const typename Scan<I>::V *before_at(const Scan<I> &p, size_t b,
                                                                       size_t i, size_t c,
                                                                       size_t at)
{
    if (i + 1 < p.T)
        return p.h + at - p.C;
    return p.h0 ? p.h0 + b * p.C + c : NULL;
}

// row_get: channels c to c + VEC - 1 of position i, whose offset is `at`. row_put: its outputs.
template <int VEC, int BACK, typename I, typename V>
static __device__ __forceinline__ void row_get(Row<V, VEC, BACK> &r, const Scan<I> &p, size_t b,
                                               size_t i, size_t c, size_t at)
{
    get(r.a, p.a + at);
    if constexpr (BACK) {
        const V *before = before_at(p, b, i, c, at);
        get(r.x, p.g + at);
#pragma unroll
        for (int v = 0; v < VEC; v++)
            r.before[v] = V{};
        if (before)
            get(r.before, before);
    } else {
        get(r.x, p.x + at);
    }
}

template <int VEC, int BACK, typename I, typename V>
static __device__ __forceinline__ void row_put(const Scan<I> &p, size_t at,
                                               const Row<V, VEC, BACK> &r)
{
    if constexpr (BACK) {
        put(p.dx + at, r.x);
        put(p.da + at, r.a);
    } else {
        put(p.h + at, r.x);
    }
}

// start_of: the state before position 0 of channel i of (B,C). end_at: takes the last one.
template <int BACK, typename I>
static __device__ __forceinline__ typename Scan<I>::V start_of(const Scan<I> &p, size_t i)
{
    const typename Scan<I>::V *from = BACK ? p.dhT : p.h0;
    return from ? from[i] : typename Scan<I>::V{};
}

template <int BACK, typename I>
static __device__ __forceinline__ void end_at(const Scan<I> &p, size_t i, typename Scan<I>::V s)
{
    typename Scan<I>::V *to = BACK ? p.dh0 : p.hT;
    if (to)
        to[i] = s;
}

// walked: the state after n positions from i on, one by one.
template <int BACK, typename I, typename V>
static __device__ __forceinline__ V walked(V s, const Scan<I> &p, size_t b, size_t c, size_t i,
                                           size_t n)
{
    for (size_t last = i + n < p.T ? i + n : p.T; i < last; i++) {
        Row<V, 1, BACK> r;
        row_get(r, p, b, i, c, row_at<BACK>(p, b, i) + c);
        s = advance<BACK>(s, r.a[0], r.x[0], r.before[0]);
    }
    return s;
}

// trusted: whether `end`, s after a run of positions that do f to it, is what walking them gives.
// (A state that is NaN in all its parts stays so.)
template <typename V>
static __device__ __forceinline__ int trusted(V end, V s)
{
    return is_finite(end) || all_nan(s);
}

// ---- walk ----

// walk_kernel: a thread takes VEC channels through T, U rows at a time.
template <typename I, int VEC, int U, int BACK>
static __global__ void walk_kernel(const Scan<I> p)
{
    typedef typename Scan<I>::V V;
    const size_t n = p.C / VEC, k = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (k >= p.B * n)
        return;
    const size_t b = k / n, c = k % n * VEC;
    V s[VEC];
    for (int v = 0; v < VEC; v++)
        s[v] = start_of<BACK>(p, b * p.C + c + v);
    const ptrdiff_t step = row_step<BACK>(p);
    size_t at = row_at<BACK>(p, b, 0) + c;
    for (size_t i = 0; i < p.T; i += U, at += U * step) {
        Row<V, VEC, BACK> r[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < p.T)
                row_get(r[u], p, b, i + u, c, at + u * step);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < p.T) {
                for (int v = 0; v < VEC; v++)
                    s[v] = advance<BACK>(s[v], r[u].a[v], r[u].x[v], r[u].before[BACK ? v : 0]);
                row_put(p, at + u * step, r[u]);
            }
    }
    for (int v = 0; v < VEC; v++)
        end_at<BACK>(p, b * p.C + c + v, s[v]);
}

// ---- chunks ----

// chunk_kernel: a thread takes VEC channels through a chunk. PASS 1: of (B,NC,C) = what the chunk
// does to a state. PASS 2: the rows, from the states of.h before each chunk; the last makes hT or
// dh0.
template <typename I, int VEC, int PASS, int BACK>
static __global__ void chunk_kernel(const Scan<I> p, Affine<typename Scan<I>::V> *of)
{
    typedef typename Scan<I>::V V;
    const int U = 4;
    const size_t n = p.C / VEC, NC = (p.T + CHUNK - 1) / CHUNK;
    const size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (k >= p.B * NC * n)
        return;
    const size_t c = k % n * VEC, j = k / n % NC, b = k / n / NC, i0 = j * CHUNK;
    of += (b * NC + j) * p.C + c;
    Affine<V> f[VEC];
    for (int v = 0; v < VEC; v++)
        f[v] = PASS == 1 ? nothing<V>() : of[v];
    const ptrdiff_t step = row_step<BACK>(p);
    size_t at = row_at<BACK>(p, b, i0) + c;
    for (size_t i = i0; i < i0 + CHUNK && i < p.T; i += U, at += U * step) {
        Row<V, VEC, BACK> r[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < p.T)
                row_get(r[u], p, b, i + u, c, at + u * step);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < p.T) {
                for (int v = 0; v < VEC; v++)
                    if (PASS == 1)
                        f[v] = joined<BACK>(f[v], r[u].a[v], r[u].x[v]);
                    else
                        f[v].h = advance<BACK>(f[v].h, r[u].a[v], r[u].x[v],
                                               r[u].before[BACK ? v : 0]);
                if (PASS == 2)
                    row_put(p, at + u * step, r[u]);
            }
    }
    for (int v = 0; v < VEC; v++) {
        if (PASS == 1)
            of[v] = f[v];
        else if (j == NC - 1)
            end_at<BACK>(p, b * p.C + c + v, f[v].h);
    }
}

// chunk_scan_kernel: of.h (B,NC,C) become the states before each chunk.
template <typename I, int BACK>
static __global__ void chunk_scan_kernel(const Scan<I> p, Affine<typename Scan<I>::V> *of)
{
    typedef typename Scan<I>::V V;
    const size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x, NC = (p.T + CHUNK - 1) / CHUNK;
    const int U = 8;
    if (k >= p.B * p.C)
        return;
    const size_t b = k / p.C, c = k % p.C;
    V s = start_of<BACK>(p, k);
    of += b * NC * p.C + c;
    for (size_t j = 0; j < NC; j += U) {
        Affine<V> f[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (j + u < NC)
                f[u] = of[(j + u) * p.C];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (j + u < NC) {
                of[(j + u) * p.C].h = s;
                const V end = mul_add(f[u].a, s, f[u].h);
                s = trusted(end, s) ? end : walked<BACK>(s, p, b, c, (j + u) * CHUNK, CHUNK);
            }
    }
}

// ---- ring ----

// RingOf: bytes of a stage: a, x or g, h_{t-1}, each (ROWS,W).
template <typename I, int VEC, int ROWS, int BACK>
struct RingOf {
    typedef typename Scan<I>::V V;
    enum {
        W = 32 * VEC,
        A = ROWS * W * sizeof(I),
        X = ROWS * W * (BACK ? sizeof(V) : sizeof(I)),
        STAGE = A + X + (BACK ? ROWS * W * sizeof(V) : 0)
    };
};

// Lane's part of a copy of rows of W elements by a warp, 16 bytes each: its column, the first of
// its rows, and how many rows further the next.
template <int W, typename E>
struct Piece {
    enum { SIZE = 16 / sizeof(E), WIDE = W / SIZE, HIGH = 32 / WIDE };
    static_assert(WIDE <= 32, "a warp copies whole rows");
    static __device__ __forceinline__ int column(void) { return threadIdx.x % WIDE * SIZE; }
    static __device__ __forceinline__ int row(void) { return threadIdx.x / WIDE; }
};

// ring_fetch: a warp starts copying the first `rows` of ROWS rows of W elements, `step` apart from
// `from` on, but only the first `channels` of each.
template <int W, int ROWS, typename E>
static __device__ __forceinline__ void ring_fetch(char *to, const E *from, ptrdiff_t step, int rows,
                                                  int channels)
{
    typedef Piece<W, E> Mine;
    if (Mine::column() >= channels)
        return;
    from += Mine::row() * step + Mine::column();
    to += threadIdx.x * 16;
#pragma unroll
    for (int r = 0; r < ROWS; r += Mine::HIGH) {
        if (Mine::row() + r < rows)
            copy_async<16>(to + r * W * (int)sizeof(E), from);
        from += Mine::HIGH * step;
    }
}

// ring_fetch_first: the same of one row, `row`: from h0, NULL: zeros, and `safe` may be read.
template <int W, typename E>
static __device__ __forceinline__ void ring_fetch_first(char *to, const E *h0, const E *safe,
                                                        int row, int channels)
{
    typedef Piece<W, E> Mine;
    if (Mine::row() == 0 && Mine::column() < channels)
        copy_async<16>(to + (row * W + Mine::column()) * sizeof(E),
                       h0 ? h0 + Mine::column() : safe, h0 ? 16 : 0);
}

// ring_get: row r of a stage, the lane's channels.
template <typename I, int VEC, int ROWS, int BACK, typename V>
static __device__ __forceinline__ void ring_get(Row<V, VEC, BACK> &row, const char *stage, int r)
{
    typedef RingOf<I, VEC, ROWS, BACK> R;
    const int at = r * R::W + threadIdx.x * VEC;
    get(row.a, (const I *)stage + at);
    if constexpr (BACK) {
        get(row.x, (const V *)(stage + R::A) + at);
        get(row.before, (const V *)(stage + R::A + R::X) + at);
    } else {
        get(row.x, (const I *)(stage + R::A) + at);
    }
}

// ring_rows: the first `rows` rows of a stage: states s, and the outputs from `at` on, if the lane
// has channels of its own. All of them are read before the first is written.
template <typename I, int VEC, int ROWS, int BACK, typename V>
static __device__ __forceinline__ void ring_rows(V (&s)[VEC], const Scan<I> &p, const char *stage,
                                                 size_t at, int rows, int own)
{
    const ptrdiff_t step = row_step<BACK>(p);
    Row<V, VEC, BACK> row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (r < rows)
            ring_get<I, VEC, ROWS, BACK>(row[r], stage, r);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VEC; v++)
            if (r < rows)
                s[v] = advance<BACK>(s[v], row[r].a[v], row[r].x[v], row[r].before[BACK ? v : 0]);
    if (!own)
        return;
#pragma unroll
    for (int r = 0; r < ROWS; r++, at += step)
        if (r < rows)
            row_put(p, at, row[r]);
}

// ring_kernel: a block of one warp takes 32 VEC channels of a sequence through T. Rows of a, x, g,
// h and h0 start on 16-byte boundaries. Dynamic shared memory: STAGES stages.
template <typename I, int VEC, int ROWS, int STAGES, int BACK>
static __global__ void __launch_bounds__(32) ring_kernel(const Scan<I> p)
{
    typedef typename Scan<I>::V V;
    typedef RingOf<I, VEC, ROWS, BACK> R;
    extern __shared__ float4 dynamic[];
    char *ring = (char *)dynamic;
    const size_t strips = (p.C + R::W - 1) / R::W, b = blockIdx.x / strips;
    const size_t c0 = blockIdx.x % strips * R::W, c = c0 + threadIdx.x * VEC;
    const int channels = p.C - c0 < R::W ? (int)(p.C - c0) : R::W, own = c < p.C;
    const ptrdiff_t step = row_step<BACK>(p);
    size_t at = row_at<BACK>(p, b, 0) + c0; // of the stage to be fetched next
    auto fetch = [&](size_t i) { // the stage that starts at position i, if there is one
        if (i < p.T) {
            char *to = ring + i / ROWS % STAGES * R::STAGE;
            const int rows = p.T - i < ROWS ? (int)(p.T - i) : ROWS;
            ring_fetch<R::W, ROWS>(to, p.a + at, step, rows, channels);
            if constexpr (BACK) {
                const int first = p.T - i <= ROWS; // time 0 is among them, as the last row
                ring_fetch<R::W, ROWS>(to + R::A, p.g + at, step, rows, channels);
                ring_fetch<R::W, ROWS>(to + R::A + R::X, (const V *)p.h + at - p.C, step,
                                       rows - first, channels);
                if (first)
                    ring_fetch_first<R::W>(to + R::A + R::X, p.h0 ? p.h0 + b * p.C + c0 : NULL,
                                           p.g, rows - 1, channels);
            } else {
                ring_fetch<R::W, ROWS>(to + R::A, p.x + at, step, rows, channels);
            }
            at += ROWS * step;
        }
        copies_commit(); // also if it is empty: groups are counted
    };
    V s[VEC];
    for (int v = 0; v < VEC; v++)
        s[v] = own ? start_of<BACK>(p, b * p.C + c + v) : V{};
    size_t out = at + threadIdx.x * VEC;
    for (int k = 0; k < STAGES - 1; k++)
        fetch((size_t)k * ROWS);
    for (size_t i = 0; i < p.T; i += ROWS, out += ROWS * step) {
        copies_wait<STAGES - 2>();
        __syncwarp(); // every lane's copies are there, and the stage before this one is read
        fetch(i + (STAGES - 1) * ROWS);
        const char *stage = ring + i / ROWS % STAGES * R::STAGE;
        if (p.T - i >= ROWS)
            ring_rows<I, VEC, ROWS, BACK>(s, p, stage, out, ROWS, own);
        else
            ring_rows<I, VEC, ROWS, BACK>(s, p, stage, out, (int)(p.T - i), own);
    }
    for (int v = 0; v < VEC && own; v++)
        end_at<BACK>(p, b * p.C + c + v, s[v]);
}

// ---- tiles ----

typedef struct {
    unsigned B;
    unsigned NT;    // tiles along T
    unsigned NC;    // tiles along C
    unsigned rows;  // rows of a thread
    unsigned tiles; // B NT NC, the tile's time changing slowest
} Tiling;

// Word: as many bytes as a state has, all ones as long as nobody has put one there (a NaN that no
// arithmetic makes). It is its own flag: no fence, no second trip to L2. word_put: hand s on in *w.
// word_wait: s = what is put into *w, once it is there.
static __device__ __forceinline__ void word_put(float *w, float s)
{
    const unsigned bits = __float_as_uint(s);
    *(volatile unsigned *)w = bits == ~0u ? 0x7fffffffu : bits;
}
static __device__ __forceinline__ void word_put(Complex *w, Complex s)
{
    unsigned long long bits;
    memcpy(&bits, &s, 8);
    *(volatile unsigned long long *)w = bits == ~0ull ? 0x7fffffff7fffffffull : bits;
}

static __device__ __forceinline__ void word_wait(float &s, const float *w)
{
    unsigned bits;
    do
        bits = *(const volatile unsigned *)w;
    while (bits == ~0u);
    memcpy(&s, &bits, 4);
}
static __device__ __forceinline__ void word_wait(Complex &s, const Complex *w)
{
    unsigned long long bits;
    do
        bits = *(const volatile unsigned long long *)w;
    while (bits == ~0ull);
    memcpy(&s, &bits, 8);
}

// TileOf: a block of LX lanes of VEC channels by HIGH rows of threads, ROWS rows each; bytes of
// shared memory of the next tile: (ROWS,THREADS,VEC) of a, of x or g, of h_{t-1}.
template <typename I, int VEC, int LX, int ROWS, int BACK>
struct TileOf {
    typedef typename Scan<I>::V V;
    typedef Row<V, VEC, BACK> Rows[ROWS];
    enum {
        W = LX * VEC,
        HIGH = THREADS / LX,
        N = ROWS * THREADS * VEC,
        A = N * sizeof(I),
        X = N * (BACK ? sizeof(V) : sizeof(I)),
        NEXT = A + X + (BACK ? N * sizeof(V) : 0)
    };
};

// Place of a thread in a tile.
typedef struct {
    unsigned k, b; // tile along T, sequence
    size_t c0;     // first channel of the tile
    size_t i, c;   // the thread's first position and channel
    int rows;      // how many of its rows exist; 0 if its channel does not
    size_t first;  // offset of its first row and channel
} Place;

// place: of this thread in tile number `tile` of all.
template <typename T, int BACK, typename I>
static __device__ __forceinline__ Place place(unsigned tile, const Scan<I> &p, const Tiling &t)
{
    Place at;
    at.k = tile / (t.B * t.NC);
    at.b = tile / t.NC % t.B;
    at.c0 = (size_t)(tile % t.NC) * T::W;
    at.i = ((size_t)at.k * T::HIGH + threadIdx.x / (THREADS / T::HIGH)) * t.rows;
    at.c = at.c0 + threadIdx.x % (THREADS / T::HIGH) * (T::W * T::HIGH / THREADS);
    at.rows = at.c >= p.C || at.i >= p.T ? 0
              : p.T - at.i < t.rows ? (int)(p.T - at.i)
                                    : (int)t.rows;
    at.first = row_at<BACK>(p, at.b, at.i) + at.c;
    return at;
}

// tile_fetch: start copying the thread's rows to where it alone will read them.
template <typename I, int VEC, int LX, int ROWS, int BACK>
static __device__ __forceinline__ void tile_fetch(char *next, const Scan<I> &p, const Place &at)
{
    typedef TileOf<I, VEC, LX, ROWS, BACK> T;
    typedef typename T::V V;
    size_t from = at.first;
#pragma unroll
    for (int r = 0; r < ROWS; r++, from += row_step<BACK>(p)) {
        const int to = (r * THREADS + threadIdx.x) * VEC;
        if (r >= at.rows)
            continue;
        copy_async<VEC * sizeof(I)>((I *)next + to, p.a + from);
        if constexpr (BACK) {
            const V *before = before_at(p, at.b, at.i + r, at.c, from);
            copy_async<VEC * sizeof(V)>((V *)(next + T::A) + to, p.g + from);
            copy_async<VEC * sizeof(V)>((V *)(next + T::A + T::X) + to, before ? before : p.g,
                                        before ? VEC * sizeof(V) : 0);
        } else {
            copy_async<VEC * sizeof(I)>((I *)(next + T::A) + to, p.x + from);
        }
    }
}

// tile_get: the thread's rows, from where tile_fetch has put them or (ASYNC 0) from memory; rows
// that do not exist do nothing to a state.
template <typename I, int VEC, int LX, int ROWS, int ASYNC, int BACK>
static __device__ __forceinline__ void tile_get(typename TileOf<I, VEC, LX, ROWS, BACK>::Rows &rows,
                                                const char *next, const Scan<I> &p, const Place &at)
{
    typedef TileOf<I, VEC, LX, ROWS, BACK> T;
    typedef typename T::V V;
    size_t from = at.first;
#pragma unroll
    for (int r = 0; r < ROWS; r++, from += row_step<BACK>(p)) {
        const int to = (r * THREADS + threadIdx.x) * VEC;
        for (int v = 0; v < VEC; v++) {
            const Affine<V> none = nothing<V>();
            rows[r].a[v] = none.a;
            rows[r].x[v] = rows[r].before[BACK ? v : 0] = none.h;
        }
        if (r >= at.rows)
            continue;
        if constexpr (!ASYNC) {
            row_get(rows[r], p, at.b, at.i + r, at.c, from);
        } else {
            get(rows[r].a, (const I *)next + to);
            if constexpr (BACK) {
                get(rows[r].x, (const V *)(next + T::A) + to);
                get(rows[r].before, (const V *)(next + T::A + T::X) + to);
            } else {
                get(rows[r].x, (const I *)(next + T::A) + to);
            }
        }
    }
}

// tile_states: by the thread of channel c of the tile, w of W in it: of[g] (HIGH,W), what row g of
// threads does to a state, becomes what the rows before it do, and s, the state before the tile,
// the one after it. carry: what of[g] are to be applied to.
template <int HIGH, int W, int BACK, typename I, typename V>
static __device__ __forceinline__ V tile_states(Affine<V> (*of)[W], V *carry, V s, Affine<V> all,
                                                const Scan<I> &p, const Place &at, int w,
                                                unsigned rows)
{
    const V end = mul_add(all.a, s, all.h);
    *carry = s;
    if (trusted(end, s))
        return end;
    *carry = V{};
    for (int g = 0; g < HIGH; g++) { // the states themselves
        of[g][w].a = V{}, of[g][w].h = s;
        s = walked<BACK>(s, p, at.b, at.c0 + w, ((size_t)at.k * HIGH + g) * rows, rows);
    }
    return s;
}

// tile_kernel: COLUMN: a block takes all tiles of its channels, one after the other, and keeps the
// state. Otherwise block j takes tiles j, j + grid, ..., all of which come after the tiles it
// waits for, and passes states on in words (B,NT,C), empty at the start; the grid is at most what
// the device holds at once.
template <typename I, int VEC, int LX, int ROWS, int BLOCKS, int ASYNC, int COLUMN, int BACK>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    tile_kernel(const Scan<I> p, typename Scan<I>::V *words, const Tiling t)
{
    typedef TileOf<I, VEC, LX, ROWS, BACK> T;
    typedef typename T::V V;
    typedef Affine<V> Map;
    extern __shared__ float4 dynamic[];
    __shared__ Map of[T::HIGH][T::W];
    __shared__ V carry[T::W];
    char *next = (char *)dynamic;
    const int g = threadIdx.x / LX, w = threadIdx.x % LX * VEC;
    const unsigned stride = COLUMN ? t.B * t.NC : gridDim.x;
    V s = V{}; // of the thread that has the states of a channel
    if (ASYNC)
        tile_fetch<I, VEC, LX, ROWS, BACK>(next, p, place<T, BACK>(blockIdx.x, p, t));
    for (unsigned tile = blockIdx.x; tile < t.tiles; tile += stride) {
        const Place at = place<T, BACK>(tile, p, t);
        typename T::Rows rows;
        if (ASYNC) {
            copies_commit();
            copies_wait<0>();
        }
        tile_get<I, VEC, LX, ROWS, ASYNC, BACK>(rows, next, p, at);
        if (ASYNC && tile + stride < t.tiles)
            tile_fetch<I, VEC, LX, ROWS, BACK>(next, p, place<T, BACK>(tile + stride, p, t));
        for (int v = 0; v < VEC; v++) {
            Map f = nothing<V>();
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                f = joined<BACK>(f, rows[r].a[v], rows[r].x[v]);
            of[g][w + v] = f;
        }
        __syncthreads();
        const size_t c = at.c0 + threadIdx.x;
        if (threadIdx.x < T::W && c < p.C) {
            Map all = nothing<V>();
#pragma unroll
            for (int j = 0; j < T::HIGH; j++) {
                const Map one = of[j][threadIdx.x];
                of[j][threadIdx.x] = all;
                all = join(all, one);
            }
            if (at.k == 0)
                s = start_of<BACK>(p, at.b * p.C + c);
            else if (!COLUMN)
                word_wait(s, &words[((size_t)at.b * t.NT + at.k) * p.C + c]);
            s = tile_states<T::HIGH, T::W, BACK>(of, &carry[threadIdx.x], s, all, p, at,
                                                 threadIdx.x, t.rows);
            if (at.k + 1 == t.NT)
                end_at<BACK>(p, at.b * p.C + c, s);
            else if (!COLUMN)
                word_put(&words[((size_t)at.b * t.NT + at.k + 1) * p.C + c], s);
        }
        __syncthreads();
        for (int v = 0; v < VEC; v++) {
            V state = mul_add(of[g][w + v].a, carry[w + v], of[g][w + v].h);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                state = advance<BACK>(state, rows[r].a[v], rows[r].x[v],
                                      rows[r].before[BACK ? v : 0]);
        }
        size_t to = at.first;
#pragma unroll
        for (int r = 0; r < ROWS; r++, to += row_step<BACK>(p))
            if (r < at.rows)
                row_put(p, to, rows[r]);
    }
}

// ---- launches ----

// scan_empty: nothing to do; hT and dh0, of T = 0, are not touched.
template <typename I>
static int scan_empty(const Scan<I> *p)
{
    return p->B == 0 || p->T == 0 || p->C == 0;
}

// scan_wide: 16-byte accesses are aligned, in all arrays.
template <typename I>
static int scan_wide(const Scan<I> *p)
{
    const void *all[] = {p->h, p->hT, p->dx, p->da, p->dh0, p->a, p->x, p->h0, p->g, p->dhT};
    uintptr_t bits = 0;
    for (int i = 0; i < 10; i++)
        bits |= (uintptr_t)all[i];
    return p->C * sizeof(I) % 16 == 0 && bits % 16 == 0;
}

// scan_work_bytes: scratch for chunks and chain, whichever asks for more.
static inline size_t scan_work_bytes(size_t B, size_t T, size_t C, size_t size)
{
    const size_t rows = 32; // of the shortest tile; a chunk's entry is twice a word
    return size_mul(size_mul(B, T / rows + 2, "scan work"), size_mul(C, 2 * size, "scan work"),
                    "scan work");
}

enum { SMALL = 128 }; // threads of a block of walk and chunks

// blocks_of: blocks of SMALL threads for n of them.
static inline size_t blocks_of(size_t n) { return (n + SMALL - 1) / SMALL; }

// walk: launches walk_kernel.
template <typename I, int VEC, int U, int BACK>
static void walk(const Scan<I> *p, cudaStream_t stream)
{
    LAUNCH((walk_kernel<I, VEC, U, BACK>), blocks_of(p->B * (p->C / VEC)), SMALL, 0, stream, *p);
}

// chunks: (A, H) of the chunks, the states between them, every row: three kernels, p->work between.
template <typename I, int VEC, int BACK>
static void chunks(const Scan<I> *p, cudaStream_t stream)
{
    auto *of = (Affine<typename Scan<I>::V> *)p->work;
    const size_t n = blocks_of(p->B * ((p->T + CHUNK - 1) / CHUNK) * (p->C / VEC));
    LAUNCH((chunk_kernel<I, VEC, 1, BACK>), n, SMALL, 0, stream, *p, of);
    LAUNCH((chunk_scan_kernel<I, BACK>), blocks_of(p->B * p->C), SMALL, 0, stream, *p, of);
    LAUNCH((chunk_kernel<I, VEC, 2, BACK>), n, SMALL, 0, stream, *p, of);
}

// ring: launches ring_kernel, a warp a strip of 32 VEC channels.
template <typename I, int VEC, int ROWS, int STAGES, int BACK>
static void ring(const Scan<I> *p, cudaStream_t stream)
{
    typedef RingOf<I, VEC, ROWS, BACK> R;
    const size_t strips = p->B * ((p->C + R::W - 1) / R::W);
    LAUNCH((ring_kernel<I, VEC, ROWS, STAGES, BACK>), strips, 32, STAGES * R::STAGE,
           stream, *p);
}

// tiles: NT of equal length, none longer than HIGH ROWS.
template <typename I, int VEC, int LX, int ROWS, int BLOCKS, int ASYNC, int COLUMN, int BACK>
static void tiles(const Scan<I> *p, cudaStream_t stream)
{
    typedef TileOf<I, VEC, LX, ROWS, BACK> T;
    typedef typename Scan<I>::V V;
    const size_t most = T::HIGH * ROWS, NT = (p->T + most - 1) / most;
    const size_t NC = (p->C + T::W - 1) / T::W;
    const size_t n = size_mul(size_mul(p->B, NT, "tiles"), NC, "tiles");
    if (n > INT32_MAX)
        die(EXIT_MEMORY, "scan: %zu tiles, expected at most 2^31 - 1", n);
    const unsigned rows = (unsigned)((p->T + NT * T::HIGH - 1) / (NT * T::HIGH));
    const Tiling t = {(unsigned)p->B, (unsigned)NT, (unsigned)NC, rows, (unsigned)n};
    auto kernel = tile_kernel<I, VEC, LX, ROWS, BLOCKS, ASYNC, COLUMN, BACK>;
    const size_t smem = ASYNC ? (size_t)T::NEXT : 0;
    size_t grid = COLUMN ? p->B * NC : n;
    if (!COLUMN && NT > 1) {
        int blocks, sms;
        bench_fits((const void *)kernel, "tile_kernel", THREADS, smem);
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void *)kernel,
                                                                 THREADS, smem));
        CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        grid = n < (size_t)blocks * sms ? n : (size_t)blocks * sms;
        CUDA_CHECK(cudaMemsetAsync(p->work, 0xFF, p->B * NT * p->C * sizeof(V), stream));
    }
    LAUNCH(kernel, grid, THREADS, smem, stream, *p, (V *)p->work, t);
}

#endif
