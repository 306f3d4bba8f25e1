// short_conv.cu: a causal convolution of 4 positions over T, every channel for itself, and SiLU, of
// (B,T,C), C contiguous, as two ladders, forward and backward; fp32, with -DPRECISION_BF16 bf16.
//
//     nvcc -O3 -DPRECISION_BF16 -gencode arch=compute_90a,code=sm_90a -o short_conv \
//         dev/conv/short_conv.cu && ./short_conv
//     bash dev/emulate/ladder.sh dev/conv/short_conv.cu -DPRECISION_BF16     its checks, no GPU
//
//   z_t = sum_{w=0..3} K[c,w] x_{t-3+w},  out_t = z_t sigmoid(z_t)           x_{-3..-1} = h0
//   dz_t = dout_t s (1 + z_t (1 - s)),  s = sigmoid(z_t)                     z is computed again
//   dx_t = sum_w K[c,w] dz_{t+3-w},  dK[c,w] = sum_{b,t} dz_t x_{t-3+w}
//
// hT are the last three of h0 and x; their gradient dhT is added to that of the rows they are.
// Bytes: forward reads x and writes out, backward reads x and dout and writes dx: 2 and 3 B T C
// elements. A row serves four outputs: who reads it once keeps the three before it in registers.
// An element of 4 bytes (bf16) at 4.2 TB/s leaves 28 issue slots forward, of 6 bytes 42 backward;
// about 14 and 26 are needed: bound by memory.
//
// GB/s (% of a copy) in bf16, L2 flushed; an H200, 2026-11-29:
//                                                  (256,40,384)  (8,2048,3072) (1,65536,1024)
//   forward  1  a thread an output                     515 (28)       631 (15)       635 (15)
//            2  16-byte accesses, four rows            983 (54)      1523 (37)      1549 (38)
//            3  a strip of 16 rows a thread           1044 (57)      2934 (71)      2987 (72)
//            4  32 rows, 8 of them in flight           933 (51)      2364 (58)      2411 (59)
//            5  64 rows, 8 of them in flight           817 (45)      2468 (60)      2541 (62)
//            6  4 with 8-byte accesses                1087 (59)      2669 (65)      2747 (67)
//   backward 1  a thread a dx; a thread a K[c,w]       5.6 (0.2)       21 (0.5)      7.5 (0.2)
//            2  dz to memory in fp32; dx; dK           120 (5)        216 (5)        210 (5)
//            3  one pass, strips of 16 rows            567 (24)      1535 (37)      1516 (37)
//            4  one pass, strips of 64 rows            611 (26)      1916 (46)      1882 (45)
//            5  4 with 8-byte accesses                 780 (34)      2084 (50)      2041 (49)
// Backward 8-byte accesses win over 16-byte ones: they leave registers for more threads at once.
// The one-pass kernels read three rows before a strip, and backward three after it, a second time.
//
// dK is the same in every run: a thread adds up its strips, a block its threads in order, and a
// second kernel the blocks, in double; how the work is cut depends on the shape alone.
#include "../../util/cuda.h"
#include "../bench.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#define TYPE BENCH_BF16
#define TYPE_NAME "bf16"
#else
typedef float floatX;
#define TYPE BENCH_F32
#define TYPE_NAME "fp32"
#endif

enum { WINDOW = 4, CARRY = WINDOW - 1, THREADS = 256, LANES = 32, HIGH = THREADS / LANES };
enum { BLOCKS = 1024, MOST_PARTS = 512, CHUNK = 256 };

typedef struct {
    floatX *out, *hT;               // (B,T,C), (B,3,C) or NULL
    floatX *dx, *dh0;               // (B,T,C), (B,3,C) or NULL
    float *dweight;                 // (C,4)
    const floatX *dout, *dhT;       // (B,T,C), (B,3,C) or NULL = 0
    const floatX *x, *h0, *weight;  // (B,T,C), (B,3,C) or NULL = 0, (C,4)
    size_t B, T, C;
    float *work; // work_floats(B,T,C): dz (B,T,C), or sums of parts (parts,C,4)
} Conv;

// ---- reference, in double ----

// row_of: row t of x of sequence b, before 0 of h0, NULL where there is none.
static const float *row_of(const float *x, const float *h0, size_t b, ptrdiff_t t, size_t T,
                           size_t C)
{
    if (t >= 0)
        return x + (b * T + (size_t)t) * C;
    return h0 ? h0 + (b * CARRY + (size_t)(t + CARRY)) * C : NULL;
}

// silu_slope: *out = z sigmoid(z); returns its derivative.
static double silu_slope(double *out, double z)
{
    const double s = 1 / (1 + exp(-z));
    *out = z * s;
    return s * (1 + z * (1 - s));
}

typedef struct {
    double *out, *hT, *dx, *dh0, *dweight; // as in Conv; all are there
} Reference;

// conv_ref: all of Conv's outputs, of the host's arrays.
static void conv_ref(Reference r, const float *dout, const float *dhT, const float *x,
                     const float *h0, const float *weight, size_t B, size_t T, size_t C)
{
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0; t < T; t++)
            for (size_t c = 0; c < C; c++) {
                const size_t at = (b * T + t) * C + c;
                double z = 0;
                for (int w = 0; w < WINDOW; w++) {
                    const float *row = row_of(x, h0, b, (ptrdiff_t)t - CARRY + w, T, C);
                    z += row ? (double)weight[c * WINDOW + w] * row[c] : 0;
                }
                const double dz = dout[at] * silu_slope(&r.out[at], z);
                for (int w = 0; w < WINDOW; w++) { // dx and dh0 start as zeros
                    const ptrdiff_t from = (ptrdiff_t)t - CARRY + w;
                    const float *row = row_of(x, h0, b, from, T, C);
                    double *d = from < 0 ? r.dh0 + (b * CARRY + (size_t)(from + CARRY)) * C
                                         : r.dx + (b * T + (size_t)from) * C;
                    d[c] += weight[c * WINDOW + w] * dz;
                    r.dweight[c * WINDOW + w] += row ? dz * row[c] : 0;
                }
            }
        for (size_t j = 0; j < CARRY; j++) {
            const ptrdiff_t t = (ptrdiff_t)(T + j) - CARRY;
            const float *row = row_of(x, h0, b, t, T, C);
            double *d = t < 0 ? r.dh0 + (b * CARRY + T + j) * C : r.dx + (b * T + (size_t)t) * C;
            for (size_t c = 0; c < C; c++) {
                r.hT[(b * CARRY + j) * C + c] = row ? row[c] : 0;
                d[c] += dhT ? dhT[(b * CARRY + j) * C + c] : 0;
            }
        }
    }
}

// ---- rows of VEC channels ----

template <int BYTES> struct Word;
template <> struct Word<2> { typedef unsigned short Type; };
template <> struct Word<4> { typedef unsigned Type; };
template <> struct Word<8> { typedef uint2 Type; };
template <> struct Word<16> { typedef uint4 Type; };

// Row: VEC elements of an array, loaded and stored with one instruction.
template <int VEC> struct Row {
    typedef typename Word<VEC * sizeof(floatX)>::Type Bits;
    Bits bits;
};

template <int VEC> static __device__ __forceinline__ Row<VEC> load(const floatX *p)
{
    Row<VEC> row;
    row.bits = *(const typename Row<VEC>::Bits *)p;
    return row;
}

template <int VEC> static __device__ __forceinline__ void widen(float (&v)[VEC], Row<VEC> row)
{
    floatX x[VEC];
    memcpy(x, &row, sizeof x);
    for (int i = 0; i < VEC; i++)
        v[i] = (float)x[i];
}

// store: with __stcg; a plain assignment the compiler splits into 4-byte stores.
template <int VEC> static __device__ __forceinline__ void store(floatX *p, const float (&v)[VEC])
{
    floatX x[VEC];
    typename Row<VEC>::Bits bits;
    for (int i = 0; i < VEC; i++)
        x[i] = (floatX)v[i];
    memcpy(&bits, x, sizeof bits);
    __stcg((typename Row<VEC>::Bits *)p, bits);
}

// load_weight: weight (C,4) of VEC channels from c on, by position.
template <int VEC>
static __device__ __forceinline__ void load_weight(float (&k)[WINDOW][VEC], const floatX *weight,
                                                   size_t c)
{
    for (int j = 0; j < WINDOW; j++) {
        float v[VEC];
        widen(v, load<VEC>(weight + c * WINDOW + j * VEC));
        for (int i = 0; i < VEC; i++)
            k[(j * VEC + i) % WINDOW][(j * VEC + i) / WINDOW] = v[i];
    }
}

// load_before: v = row t of x, VEC channels from c on; before row 0 h0's, zeros without.
template <int VEC>
static __device__ __forceinline__ void load_before(float (&v)[VEC], const floatX *x,
                                                   const floatX *h0, size_t b, ptrdiff_t t,
                                                   size_t T, size_t C, size_t c)
{
    for (int i = 0; i < VEC; i++)
        v[i] = 0;
    if (t >= 0)
        widen(v, load<VEC>(x + (b * T + t) * C + c));
    else if (h0)
        widen(v, load<VEC>(h0 + (b * CARRY + t + CARRY) * C + c));
}

// sigmoid: 1 / (1 + exp(-z)). exp2f of a number scaled in fp32 and __fdividef are off by a few ulp;
// exp(-z) = inf gives 0.
static __device__ __forceinline__ float sigmoid(float z)
{
    return __fdividef(1.0f, 1.0f + exp2f(-1.4426950408889634f * z));
}

// convolve: z = k applied to the three rows before and x.
template <int VEC>
static __device__ __forceinline__ void convolve(float (&z)[VEC], const float (&k)[WINDOW][VEC],
                                                const float (&before)[CARRY][VEC],
                                                const float (&x)[VEC])
{
    for (int i = 0; i < VEC; i++)
        z[i] = k[0][i] * before[0][i] + k[1][i] * before[1][i] + k[2][i] * before[2][i] +
               k[3][i] * x[i];
}

// push: v becomes the last of the three rows.
template <int VEC>
static __device__ __forceinline__ void push(float (&rows)[CARRY][VEC], const float (&v)[VEC])
{
    for (int i = 0; i < VEC; i++) {
        rows[0][i] = rows[1][i];
        rows[1][i] = rows[2][i];
        rows[2][i] = v[i];
    }
}

// ---- forward 1, 2: a thread the outputs of one row ----

// rows_kernel: a thread VEC channels of one row of out, from four rows of x; the last one of a
// sequence also writes hT.
template <int VEC>
static __global__ void rows_kernel(Conv p)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, n = p.C / VEC;
    if (i >= p.B * p.T * n)
        return;
    const size_t c = i % n * VEC, t = i / n % p.T, b = i / n / p.T;
    float k[WINDOW][VEC], before[CARRY][VEC], x[VEC], z[VEC];
    load_weight(k, p.weight, c);
    for (int w = 0; w < CARRY; w++)
        load_before(before[w], p.x, p.h0, b, (ptrdiff_t)t - CARRY + w, p.T, p.C, c);
    widen(x, load<VEC>(p.x + (b * p.T + t) * p.C + c));
    convolve(z, k, before, x);
    for (int j = 0; j < VEC; j++)
        z[j] *= sigmoid(z[j]);
    store(p.out + (b * p.T + t) * p.C + c, z);
    if (t + 1 < p.T || !p.hT)
        return;
    push(before, x);
    for (int w = 0; w < CARRY; w++)
        store(p.hT + (b * CARRY + w) * p.C + c, before[w]);
}

// ---- forward 3 to 5: a thread walks down a strip ----

// strip_kernel: a thread VEC channels of STRIP rows, U rows of loads in flight, the three rows
// before in registers. NS strips a sequence; the last one writes hT.
template <int VEC, int STRIP, int U>
static __global__ void strip_kernel(Conv p, size_t NS)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, n = p.C / VEC;
    if (i >= p.B * NS * n)
        return;
    const size_t c = i % n * VEC, t0 = i / n % NS * STRIP, b = i / n / NS, at = b * p.T * p.C + c;
    const size_t t1 = t0 + STRIP < p.T ? t0 + STRIP : p.T;
    float k[WINDOW][VEC], before[CARRY][VEC];
    load_weight(k, p.weight, c);
    for (int w = 0; w < CARRY; w++)
        load_before(before[w], p.x, p.h0, b, (ptrdiff_t)t0 - CARRY + w, p.T, p.C, c);
    for (size_t t = t0; t < t1; t += U) {
        Row<VEC> rows[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < t1)
                rows[u] = load<VEC>(p.x + at + (t + u) * p.C);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < t1) {
                float x[VEC], z[VEC];
                widen(x, rows[u]);
                convolve(z, k, before, x);
                for (int j = 0; j < VEC; j++)
                    z[j] *= sigmoid(z[j]);
                store(p.out + at + (t + u) * p.C, z);
                push(before, x);
            }
    }
    for (int w = 0; w < CARRY && p.hT && t1 == p.T; w++)
        store(p.hT + (b * CARRY + w) * p.C + c, before[w]);
}

// ---- backward 1, 2: several passes ----

// dz_at: the gradient of z_t of one channel, 0 from T on; *x (4): the rows that z_t is of.
static __device__ float dz_at(const Conv &p, float (&x)[WINDOW], size_t b, ptrdiff_t t, size_t c)
{
    float z = 0;
    for (int w = 0; w < WINDOW; w++) {
        float v[1] = {0};
        if (t < (ptrdiff_t)p.T)
            load_before(v, p.x, p.h0, b, t - CARRY + w, p.T, p.C, c);
        x[w] = v[0];
        z += (float)p.weight[c * WINDOW + w] * x[w];
    }
    const float s = sigmoid(z);
    return t < (ptrdiff_t)p.T ? (float)p.dout[(b * p.T + t) * p.C + c] * s * (1 + z * (1 - s)) : 0;
}

// dx_kernel: a thread one channel of one row of dx, or of dh0; dz of four rows from `dz` (B,T,C),
// NULL: computed.
static __global__ void dx_kernel(Conv p, const float *dz)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, rows = p.T + CARRY;
    if (i >= p.B * rows * p.C)
        return;
    const size_t c = i % p.C, e = i / p.C % rows, b = i / p.C / rows; // row e is row e - 3 of x
    float sum = e >= p.T && p.dhT ? (float)p.dhT[(b * CARRY + e - p.T) * p.C + c] : 0;
    for (int w = 0; w < WINDOW; w++) { // z of row e - w reads row e
        const ptrdiff_t t = (ptrdiff_t)e - w;
        float x[WINDOW];
        if (t >= 0 && t < (ptrdiff_t)p.T)
            sum += (float)p.weight[c * WINDOW + w] *
                   (dz ? dz[(b * p.T + t) * p.C + c] : dz_at(p, x, b, t, c));
    }
    if (e >= CARRY)
        p.dx[(b * p.T + e - CARRY) * p.C + c] = (floatX)sum;
    else if (p.dh0)
        p.dh0[(b * CARRY + e) * p.C + c] = (floatX)sum;
}

// dweight_kernel: dweight (C,4) =, one thread an element, over all rows, in double.
static __global__ void dweight_kernel(Conv p)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= p.C * WINDOW)
        return;
    double sum = 0;
    for (size_t b = 0; b < p.B; b++)
        for (size_t t = 0; t < p.T; t++) {
            float x[WINDOW];
            const float dz = dz_at(p, x, b, (ptrdiff_t)t, i / WINDOW);
            sum += (double)dz * x[i % WINDOW];
        }
    p.dweight[i] = (float)sum;
}

// dz_kernel: dz (B,T,C) =, one thread an element.
static __global__ void dz_kernel(Conv p, float *dz)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    float x[WINDOW];
    if (i < p.B * p.T * p.C)
        dz[i] = dz_at(p, x, i / p.C / p.T, (ptrdiff_t)(i / p.C % p.T), i % p.C);
}

// parts_kernel: sums (parts,C,4) = of dz x over CHUNK rows each, one thread an element.
static __global__ void parts_kernel(Conv p, float *sums, const float *dz, size_t parts)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, n = p.C * WINDOW;
    if (i >= parts * n)
        return;
    const size_t c = i % p.C, w = i / p.C % WINDOW, part = i / n, end = p.B * p.T;
    float sum = 0;
    for (size_t row = part * CHUNK; row < (part + 1) * CHUNK && row < end; row++) {
        float x[1];
        load_before(x, p.x, p.h0, row / p.T, (ptrdiff_t)(row % p.T) - CARRY + (ptrdiff_t)w, p.T,
                    p.C, c);
        sum += dz[row * p.C + c] * x[0];
    }
    sums[part * n + c * WINDOW + w] = sum;
}

// total_kernel: dweight (n) = the sum of sums (parts,n) over parts, in double.
static __global__ void total_kernel(float *dweight, const float *sums, size_t parts, size_t n)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    double sum = 0;
#pragma unroll 8
    for (size_t part = 0; part < parts; part++)
        sum += sums[part * n + i];
    dweight[i] = (float)sum;
}

// ---- backward 3 to 5: one pass ----

// convolve_back: dx of row t - 3 from dz of it and of the rows until t; from T on there is dhT.
template <int VEC>
static __device__ __forceinline__ void convolve_back(float (&dx)[VEC],
                                                     const float (&k)[WINDOW][VEC],
                                                     const float (&dzs)[CARRY][VEC],
                                                     const float (&dz)[VEC], const Conv &p,
                                                     size_t b, size_t t, size_t c)
{
    for (int i = 0; i < VEC; i++)
        dx[i] = k[3][i] * dzs[0][i] + k[2][i] * dzs[1][i] + k[1][i] * dzs[2][i] + k[0][i] * dz[i];
    if (t < p.T || !p.dhT)
        return;
    float more[VEC];
    widen(more, load<VEC>(p.dhT + (b * CARRY + t - p.T) * p.C + c));
    for (int i = 0; i < VEC; i++)
        dx[i] += more[i];
}

// back_strip: rows t0 to t0 + STRIP - 1 of dx of sequence b, VEC channels from c on, of the first
// strip also dh0; dk += what these rows add to dweight. Rows of dz from the strip on until three
// after it: the last three are the next strip's, which adds them to dweight. U rows in flight.
template <int VEC, int STRIP, int U>
static __device__ __forceinline__ void back_strip(float (&dk)[WINDOW][VEC],
                                                  const float (&k)[WINDOW][VEC], const Conv &p,
                                                  size_t b, size_t t0, size_t c)
{
    const size_t at = b * p.T * p.C + c, t1 = t0 + STRIP < p.T ? t0 + STRIP : p.T;
    float before[CARRY][VEC], dzs[CARRY][VEC] = {};
    for (int w = 0; w < CARRY; w++)
        load_before(before[w], p.x, p.h0, b, (ptrdiff_t)t0 - CARRY + w, p.T, p.C, c);
    for (size_t t = t0; t < t1 + CARRY; t += U) {
        Row<VEC> rows[U], douts[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < p.T && t + u < t1 + CARRY) {
                rows[u] = load<VEC>(p.x + at + (t + u) * p.C);
                douts[u] = load<VEC>(p.dout + at + (t + u) * p.C);
            }
#pragma unroll
        for (int u = 0; u < U; u++)
            if (t + u < t1 + CARRY) {
                float x[VEC] = {}, z[VEC], dz[VEC] = {}, dx[VEC];
                if (t + u < p.T) {
                    widen(x, rows[u]);
                    widen(dz, douts[u]);
                    convolve(z, k, before, x);
                    for (int i = 0; i < VEC; i++) {
                        const float s = sigmoid(z[i]);
                        dz[i] *= s * (1 + z[i] * (1 - s));
                    }
                }
                for (int i = 0; i < VEC; i++) {
                    const float mine = t + u < t1 ? dz[i] : 0;
                    for (int w = 0; w < CARRY; w++)
                        dk[w][i] += mine * before[w][i];
                    dk[CARRY][i] += mine * x[i];
                }
                convolve_back(dx, k, dzs, dz, p, b, t + u, c);
                if (t + u >= t0 + CARRY)
                    store(p.dx + at + (t + u - CARRY) * p.C, dx);
                else if (t0 == 0 && p.dh0)
                    store(p.dh0 + (b * CARRY + t + u) * p.C + c, dx);
                push(before, x);
                push(dzs, dz);
            }
    }
}

// back_kernel: dx, dh0 =, sums (parts,C,4) = what dweight is the sum of. A block has LANES threads
// of VEC channels side by side and HIGH of them in time; part i of a block takes every parts-th
// group of HIGH strips, of NS a sequence. Grid: parts x tiles of channels, the tile first.
template <int VEC, int STRIP, int U>
static __global__ void __launch_bounds__(THREADS)
    back_kernel(Conv p, float *sums, size_t NS, size_t parts, size_t tiles)
{
    __shared__ float shared[HIGH * LANES * VEC * WINDOW];
    const int lane = threadIdx.x % LANES, g = threadIdx.x / LANES;
    const size_t part = blockIdx.x / tiles, first = blockIdx.x % tiles * (LANES * VEC);
    const size_t c = first + lane * VEC;
    float dk[WINDOW][VEC] = {}, k[WINDOW][VEC];
    if (c < p.C) {
        load_weight(k, p.weight, c);
        for (size_t s = part * HIGH + g; s < p.B * NS; s += parts * HIGH)
            back_strip<VEC, STRIP, U>(dk, k, p, s / NS, s % NS * STRIP, c);
    }
    for (int i = 0; i < VEC; i++)
        for (int w = 0; w < WINDOW; w++)
            shared[((w * VEC + i) * HIGH + g) * LANES + lane] = dk[w][i];
    __syncthreads();
    for (int j = threadIdx.x; j < LANES * VEC * WINDOW; j += THREADS) {
        const int l = j % LANES, i = j / LANES % VEC, w = j / LANES / VEC;
        float sum = 0;
        for (int h = 0; h < HIGH; h++)
            sum += shared[((w * VEC + i) * HIGH + h) * LANES + l];
        if (first + l * VEC < p.C)
            sums[(part * p.C + first + l * VEC + i) * WINDOW + w] = sum;
    }
}

// ---- the ladders ----

// fits: whether all arrays and rows allow accesses of `bytes` bytes.
static int fits(const Conv *p, size_t bytes)
{
    const void *arrays[] = {p->out, p->hT,  p->dx, p->dh0,   p->dout,
                            p->dhT, p->x,   p->h0, p->weight};
    size_t bits = p->C * sizeof(floatX);
    for (int i = 0; i < 9; i++)
        bits |= (size_t)arrays[i];
    return bits % bytes == 0;
}

// blocks: of THREADS threads, one for each of n.
static size_t blocks(size_t n) { return (n + THREADS - 1) / THREADS; }

enum { WIDE = 16 / sizeof(floatX), HALF = WIDE / 2 };

template <int VEC>
static void rows(const Conv *p, cudaStream_t stream)
{
    LAUNCH((rows_kernel<VEC>), blocks(p->B * p->T * (p->C / VEC)), THREADS, 0, stream, *p);
}

static void forward1(const void *problem, cudaStream_t stream)
{
    rows<1>((const Conv *)problem, stream);
}

static void forward2(const void *problem, cudaStream_t stream)
{
    const Conv *p = (const Conv *)problem;
    fits(p, 16) ? rows<WIDE>(p, stream) : rows<1>(p, stream);
}

template <int VEC, int STRIP, int U>
static void strips(const Conv *p, cudaStream_t stream)
{
    const size_t NS = (p->T + STRIP - 1) / STRIP;
    LAUNCH((strip_kernel<VEC, STRIP, U>), blocks(p->B * NS * (p->C / VEC)), THREADS, 0, stream,
           *p, NS);
}

template <int VEC, int STRIP, int U>
static void forward(const void *problem, cudaStream_t stream)
{
    const Conv *p = (const Conv *)problem;
    fits(p, VEC * sizeof(floatX)) ? strips<VEC, STRIP, U>(p, stream)
                                  : strips<1, STRIP, U>(p, stream);
}

// total: dweight from the sums in p's work at `sums`.
static void total(const Conv *p, const float *sums, size_t parts, cudaStream_t stream)
{
    LAUNCH(total_kernel, blocks(p->C * WINDOW), THREADS, 0, stream, p->dweight, sums, parts,
           p->C * WINDOW);
}

static void backward1(const void *problem, cudaStream_t stream)
{
    const Conv *p = (const Conv *)problem;
    LAUNCH(dx_kernel, blocks(p->B * (p->T + CARRY) * p->C), THREADS, 0, stream, *p, NULL);
    LAUNCH(dweight_kernel, blocks(p->C * WINDOW), THREADS, 0, stream, *p);
}

static void backward2(const void *problem, cudaStream_t stream)
{
    const Conv *p = (const Conv *)problem;
    const size_t n = p->B * p->T * p->C, parts = (p->B * p->T + CHUNK - 1) / CHUNK;
    float *dz = p->work, *sums = p->work + n;
    LAUNCH(dz_kernel, blocks(n), THREADS, 0, stream, *p, dz);
    LAUNCH(dx_kernel, blocks(p->B * (p->T + CARRY) * p->C), THREADS, 0, stream, *p, dz);
    LAUNCH(parts_kernel, blocks(parts * p->C * WINDOW), THREADS, 0, stream, *p, sums, dz, parts);
    total(p, sums, parts, stream);
}

// back: about BLOCKS blocks in all, but no part without strips.
template <int VEC, int STRIP, int U>
static void back(const Conv *p, cudaStream_t stream)
{
    const size_t NS = (p->T + STRIP - 1) / STRIP, groups = (p->B * NS + HIGH - 1) / HIGH;
    const size_t tiles = (p->C + LANES * VEC - 1) / (LANES * VEC);
    size_t parts = BLOCKS / tiles < 1 ? 1 : BLOCKS / tiles;
    parts = parts < MOST_PARTS ? parts : MOST_PARTS;
    parts = parts < groups ? parts : groups;
    LAUNCH((back_kernel<VEC, STRIP, U>), parts * tiles, THREADS, 0, stream, *p, p->work, NS, parts,
           tiles);
    total(p, p->work, parts, stream);
}

template <int VEC, int STRIP, int U>
static void backward(const void *problem, cudaStream_t stream)
{
    const Conv *p = (const Conv *)problem;
    fits(p, VEC * sizeof(floatX)) ? back<VEC, STRIP, U>(p, stream) : back<1, STRIP, U>(p, stream);
}

static const BenchKernel forward_kernels[] = {
    {1, "thread an output", forward1, NULL},
    {2, "16-byte accesses, four rows", forward2, NULL},
    {3, "strip of 16 rows", forward<WIDE, 16, 4>, NULL},
    {4, "strip of 32 rows, 8 in flight", forward<WIDE, 32, 8>, NULL},
    {5, "strip of 64 rows, 8 in flight", forward<WIDE, 64, 8>, NULL},
    {6, "4 with half the width", forward<HALF, 32, 8>, NULL},
};

static const BenchKernel backward_kernels[] = {
    {1, "thread a dx, thread a weight", backward1, NULL},
    {2, "dz in memory, dx, parts of dK", backward2, NULL},
    {3, "one pass, strip of 16 rows", backward<WIDE, 16, 4>, NULL},
    {4, "one pass, strip of 64 rows", backward<WIDE, 64, 4>, NULL},
    {5, "4 with half the width", backward<HALF, 64, 4>, NULL},
};

// work_floats: what a kernel needs at most.
static size_t work_floats(size_t B, size_t T, size_t C)
{
    const size_t parts = (B * T + CHUNK - 1) / CHUNK;
    return size_mul(size_mul(B, T, "work"), C, "work") +
           (parts > MOST_PARTS ? parts : MOST_PARTS) * C * WINDOW;
}

// ---- main ----

// An array of a case: on the device, on the host, and what a kernel should write to it.
typedef struct {
    BenchBuffer d;
    float *h;
    double *ref;
    size_t n;
    BenchType type;
} Array;

enum { X, H0, WEIGHT, DOUT, DHT, INPUTS, OUT = INPUTS, HT, DX, DH0, DWEIGHT, ARRAYS };

typedef struct {
    size_t B, T, C;
    int state;    // h0, hT, dh0 and dhT are there
    size_t shift; // elements the arrays lie past alignment
    float scale;  // of x: 100 takes SiLU to both its ends
} Shape;

// arrays_make: all arrays of a shape; inputs uniform around 0, some exactly 0, and the reference.
static void arrays_make(Array *a, const Shape *s)
{
    const size_t n = s->B * s->T * s->C, m = s->B * CARRY * s->C, k = s->C * WINDOW;
    const size_t counts[ARRAYS] = {n, m, k, n, m, n, m, n, m, k};
    for (int i = 0; i < ARRAYS; i++) {
        const BenchType type = i == DWEIGHT ? BENCH_F32 : TYPE;
        const size_t count = counts[i];
        a[i] = (Array){bench_alloc(count, type, s->shift * bench_elem(type)),
                       (float *)alloc_zero(i < INPUTS ? count : 1, 4, "values"),
                       (double *)alloc_zero(i < INPUTS ? 1 : count, 8, "reference"), count, type};
        for (size_t j = 0; j < count && i < INPUTS; j++) {
            const float u = bench_uniform(1 + (uint64_t)i + s->T, j);
            a[i].h[j] = u < .05f ? 0 : (i <= H0 ? s->scale : 1) * (2 * u - 1);
        }
        if (i < INPUTS)
            bench_upload(&a[i].d, type, a[i].h, count);
    }
    const Reference r = {a[OUT].ref, a[HT].ref, a[DX].ref, a[DH0].ref, a[DWEIGHT].ref};
    conv_ref(r, a[DOUT].h, s->state ? a[DHT].h : NULL, a[X].h,
             s->state ? a[H0].h : NULL, a[WEIGHT].h, s->B, s->T, s->C);
}

// output: array a as an output of a case.
static BenchOutput output(const char *name, Array *a, double bound)
{
    const BenchOutput o = {name, &a->d, a->type, a->n, a->ref, bound};
    return o;
}

// run_shape: all kernels of both ladders on one shape. Returns the number of failures.
static int run_shape(const Shape *s, const BenchOptions *opt)
{
    Array a[ARRAYS];
    arrays_make(a, s);
    BenchBuffer work = bench_alloc(work_floats(s->B, s->T, s->C), BENCH_F32, 0);
    floatX *d[ARRAYS];
    for (int i = 0; i < ARRAYS; i++)
        d[i] = s->state || (i != H0 && i != HT && i != DH0 && i != DHT) ? (floatX *)a[i].d.data
                                                                        : NULL;
    const Conv p = {d[OUT], d[HT], d[DX], d[DH0], (float *)a[DWEIGHT].d.data, d[DOUT], d[DHT],
                    d[X], d[H0], d[WEIGHT], s->B, s->T, s->C, (float *)work.data};
    const double fine = TYPE == BENCH_F32 ? 1e-5 : 1e-2, coarse = TYPE == BENCH_F32 ? 1e-4 : 2e-2;
    const BenchOutput outs[] = {output("out", &a[OUT], fine), output("hT", &a[HT], 0)};
    const BenchOutput grads[] = {output("dx", &a[DX], coarse), output("dK", &a[DWEIGHT], 1e-4),
                                 output("dh0", &a[DH0], coarse)};
    const double bytes = (double)(s->B * s->T * s->C * sizeof(floatX));
    char name[2][128];
    for (int i = 0; i < 2; i++)
        snprintf(name[i], sizeof name[i], "conv (%zu,%zu,%zu) %s %s%s", s->B, s->T, s->C,
                 TYPE_NAME, i ? "backward" : "forward", s->state ? " with state" : "");
    const BenchCase forward_case = {name[0], &p, forward_kernels,
                                    sizeof forward_kernels / sizeof *forward_kernels, outs,
                                    s->state ? 2 : 1, 2 * bytes, 0, "GB"};
    const BenchCase backward_case = {name[1], &p, backward_kernels,
                                     sizeof backward_kernels / sizeof *backward_kernels, grads,
                                     s->state ? 3 : 2, 3 * bytes, 0, "GB"};
    int failed = bench_case(&forward_case, opt) + bench_case(&backward_case, opt);
    if (!bench_guards(&work))
        failed++, printf("  FAILED: wrote outside the scratch memory\n");
    for (int i = 0; i < ARRAYS; i++)
        bench_free(&a[i].d), free(a[i].h), free(a[i].ref);
    bench_free(&work);
    return failed;
}

// run_checks: lengths around the window and the strips, odd channels, with and without state and
// alignment; untimed. Returns the number of failures.
static int run_checks(const BenchOptions *opt)
{
    static const size_t Ts[] = {1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 67, 1000, 4097,
                                65536};
    static const size_t Cs[] = {1, 3, 8, 33, 64, 384};
    BenchOptions o = *opt;
    o.check_only = 1;
    o.self_test = 0;
    int failed = 0, cases = 0;
    for (size_t i = 0; i < sizeof Ts / sizeof *Ts; i++)
        for (size_t j = 0; j < sizeof Cs / sizeof *Cs; j++) {
            const size_t B = 1 + (i + j) % 3;
            const Shape s = {B, Ts[i], Cs[j], (int)((i + j) % 2), (i + 2 * j) % 5 == 4,
                             (i + j) % 4 == 3 ? 100.f : 2.f};
            if (B * s.T * s.C > 300000 && s.C > 3) // the reference and the emulation are slow
                continue;
            failed += run_shape(&s, &o);
            cases++;
        }
    const Shape wide[] = {{40, 5, 384, 1, 0, 2}, {700, 1, 264, 0, 0, 2}, {2, 130, 520, 1, 0, 2}};
    for (int i = 0; i < 3; i++, cases++)
        failed += run_shape(&wide[i], &o);
    printf("short_conv: %d small cases, %d failures\n", cases, failed);
    return failed;
}

int main(int argc, char **argv)
{
    static const size_t timed[][3] = {{256, 40, 384}, {8, 2048, 3072}, {1, 65536, 1024}};
    const BenchOptions opt = bench_options(argc, argv, "short_conv: causal convolution of 4 and "
                                           "SiLU of (B,T,C), " TYPE_NAME);
    int failed = 0;
    if (opt.B || opt.T || opt.C) {
        const Shape s = {opt.B ? opt.B : 1, opt.T ? opt.T : 1, opt.C ? opt.C : 1, 1, 0, 2};
        failed = run_shape(&s, &opt);
        printf("%d failures\n", failed);
        return failed ? EXIT_FAIL : 0;
    }
    if (!opt.time_only)
        failed += run_checks(&opt);
    for (int i = 0; i < 3 && !opt.check_only; i++) {
        const Shape s = {timed[i][0], timed[i][1], timed[i][2], 0, 0, 2};
        failed += run_shape(&s, &opt);
    }
    printf("%d failures\n", failed);
    return failed ? EXIT_FAIL : 0;
}
