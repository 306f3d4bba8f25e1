// rows.cuh: rows of channels in registers: P threads side by side share a row, CH channels each, so
// that all that is done to it channel by channel needs no memory, and a sum over it one exchange.
#ifndef SEQ_UTIL_ROWS_CUH
#define SEQ_UTIL_ROWS_CUH

#include "warp.cuh"

enum { CH = 12 };

// A thread's channels of a row as they lie in memory: groups of VEC, P groups apart; and the row's
// first value.
template <int VEC> struct Raw {
    Pack<floatX, VEC> v[CH / VEC];
    floatX first;
};

// row_channel: the first channel of the thread's group j.
template <int P, int VEC> static __device__ inline int row_channel(int j)
{
    return VEC * (threadIdx.x % P + P * j);
}

// row_fetch: the thread's part of a row (H); 0 beyond H.
template <int P, int VEC> static __device__ inline Raw<VEC> row_fetch(const floatX *row, int H)
{
    Raw<VEC> raw = {};
#pragma unroll
    for (int j = 0; j < CH / VEC; j++)
        if (row_channel<P, VEC>(j) < H)
            raw.v[j] = *(const Pack<floatX, VEC> *)(row + row_channel<P, VEC>(j));
    raw.first = row[0];
    return raw;
}

// row_store: row (H) = the thread's part x.
template <int P, int VEC, typename X>
static __device__ inline void row_store(X *row, const float (&x)[CH], int H)
{
#pragma unroll
    for (int j = 0; j < CH / VEC; j++) {
        Pack<X, VEC> raw;
        for (int i = 0; i < VEC; i++)
            raw.v[i] = (X)x[j * VEC + i];
        if (row_channel<P, VEC>(j) < H)
            *(Pack<X, VEC> *)(row + row_channel<P, VEC>(j)) = raw;
    }
}

// row_load: the thread's part x of a row of shared memory (P * CH floats).
template <int P, int VEC> static __device__ inline void row_load(float (&x)[CH], const float *row)
{
#pragma unroll
    for (int j = 0; j < CH / VEC; j++) {
        const auto part = *(const Pack<float, VEC> *)(row + row_channel<P, VEC>(j));
        for (int i = 0; i < VEC; i++)
            x[j * VEC + i] = part.v[i];
    }
}

// rows_normalize: x[k] = (x[k] - mean) rstd[k] over the H channels of K rows, 0 beyond. near[k]: a
// value of about the row's size, the same in all its threads: an equal row gives exactly 0. red: as
// row_reduce's.
template <int P, int VEC, int K>
static __device__ inline void rows_normalize(float (&x)[K][CH], float (&rstd)[K],
                                             const float (&near)[K], int H, float *red)
{
    const float over_H = 1 / (float)H;
    float sum[K] = {}, squares[K] = {};
#pragma unroll
    for (int i = 0; i < K * CH; i++)
        sum[i / CH] += row_channel<P, VEC>(i % CH / VEC) < H ? x[i / CH][i % CH] - near[i / CH] : 0;
    row_reduce<P, 0>(sum, red);
#pragma unroll
    for (int i = 0; i < K * CH; i++) {
        float *v = &x[i / CH][i % CH], mean = fmaf(sum[i / CH], over_H, near[i / CH]);
        *v = row_channel<P, VEC>(i % CH / VEC) < H ? *v - mean : 0;
        squares[i / CH] = fmaf(*v, *v, squares[i / CH]);
    }
    row_reduce<P, 0>(squares, red);
#pragma unroll
    for (int k = 0; k < K; k++) {
        rstd[k] = rsqrtf(fmaf(squares[k], over_H, EPS));
        for (int i = 0; i < CH; i++)
            x[k][i] *= rstd[k];
    }
}

// rows_open: x = K fetched rows, with `normal` normalized, over ln 2: what exp2 takes; rstd: of
// each row, or 1.
template <int P, int VEC, int K>
static __device__ inline void rows_open(float (&x)[K][CH], float (&rstd)[K],
                                        const Raw<VEC> (&raw)[K], int H, int normal, float *red)
{
    float first[K];
#pragma unroll
    for (int i = 0; i < K * CH; i++)
        x[i / CH][i % CH] = (float)raw[i / CH].v[i % CH / VEC].v[i % VEC];
#pragma unroll
    for (int k = 0; k < K; k++) {
        first[k] = (float)raw[k].first;
        rstd[k] = 1;
    }
    if (normal)
        rows_normalize<P, VEC, K>(x, rstd, first, H, red);
#pragma unroll
    for (int i = 0; i < K * CH; i++)
        x[i / CH][i % CH] *= LOG2E;
}

// rows_normalize_backward: back through it for two rows: d[k] = rstd[k] (d[k] - mean(d[k]) - y
// mean(d[k] y)), y = what rows_normalize made, x[k] = y over ln 2, rows_open's; d and x 0 beyond H.
template <int P>
static __device__ inline void rows_normalize_backward(float (&d)[2][CH], const float (&x)[2][CH],
                                                      const float (&rstd)[2], int H, float *red)
{
    const float over_H = 1 / (float)H;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * CH; i++) {
        sums[i / CH] += d[i / CH][i % CH];
        sums[2 + i / CH] = fmaf(d[i / CH][i % CH], x[i / CH][i % CH], sums[2 + i / CH]);
    }
    row_reduce<P, 0>(sums, red);
#pragma unroll
    for (int i = 0; i < 2 * CH; i++) {
        const float mean = sums[i / CH] * over_H;
        const float dot = sums[2 + i / CH] * (over_H / (LOG2E * LOG2E));
        float *v = &d[i / CH][i % CH];
        *v = rstd[i / CH] * (*v - mean - x[i / CH][i % CH] * dot);
    }
}

// column_sums: one channel of a tile of HIGH rows, W apart in shared memory: each becomes the sum
// up to there (LOG: of logs to base 2, and log2 of the sum), from the sum before, *sum (LOG: 2^*max
// *sum), which goes on. add 0: nothing is added, each becomes the sum before.
template <int HIGH, int W, int LOG>
static __device__ inline void column_sums(float *tile, float *max, float *sum, int add)
{
#pragma unroll
    for (int i = 0; i < HIGH; i++) {
        if (LOG && add)
            logsumexp_step(max, sum, tile[i * W]);
        else if (add)
            *sum += tile[i * W];
        tile[i * W] = LOG ? *max + __log2f(*sum) : *sum;
    }
}

#endif
