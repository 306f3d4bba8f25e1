// rng.h: counter-based random numbers. A number is a pure function of (seed, stream, i): nothing is
// stored, nothing advances, so a resumed run, another thread count and the GPU all draw the same
// ones.
//
// The function is two rounds of a 64-bit finaliser (xor-shift, multiply; the constants are
// Stafford's "Mix13") over the three words, each spread by an odd constant. Seed 0 is a seed like
// any other.
#ifndef SEQ_UTIL_RNG_H
#define SEQ_UTIL_RNG_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define SEQ_HOST_DEVICE __host__ __device__
#else
#define SEQ_HOST_DEVICE
#endif

// The streams in use. Initialisation draws tensor k of a table from STREAM_INIT + k; a task's
// sequence n takes every number it needs from one stream of its own, STREAM_TRAIN + n or
// STREAM_EVAL + n.
#define STREAM_INIT 0x0100000000000000u
#define STREAM_TRAIN 0x0200000000000000u
#define STREAM_EVAL 0x0300000000000000u
#define STREAM_SAMPLE 0x0400000000000000u

// rand_mix: the finaliser: every bit of z moves every bit of the result.
SEQ_HOST_DEVICE
static inline uint64_t rand_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// rand_u64: number i of `stream` under `seed`: uniform over all 64-bit values.
SEQ_HOST_DEVICE
static inline uint64_t rand_u64(uint64_t seed, uint64_t stream, uint64_t i)
{
    uint64_t key = rand_mix(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) ^ stream;
    return rand_mix(rand_mix(key) + i * 0xd1342543de82ef95u);
}

// rand_u32: number i of `stream` under `seed`: uniform over all 32-bit values.
SEQ_HOST_DEVICE
static inline uint32_t rand_u32(uint64_t seed, uint64_t stream, uint64_t i)
{
    return (uint32_t)(rand_u64(seed, stream, i) >> 32);
}

// rand_below: uniform integer in [0, n), n >= 1; the bias is below n / 2^32.
SEQ_HOST_DEVICE
static inline uint32_t rand_below(uint64_t seed, uint64_t stream, uint64_t i, uint32_t n)
{
    return (uint32_t)(((uint64_t)rand_u32(seed, stream, i) * n) >> 32);
}

// rand_uniform: uniform in [0, 1), a multiple of 2^-53.
SEQ_HOST_DEVICE
static inline double rand_uniform(uint64_t seed, uint64_t stream, uint64_t i)
{
    return (double)(rand_u64(seed, stream, i) >> 11) * (1.0 / 9007199254740992.0);
}

// rand_normal: standard normal by Box and Muller, from uniforms 2i and 2i + 1 of the stream.
SEQ_HOST_DEVICE
static inline double rand_normal(uint64_t seed, uint64_t stream, uint64_t i)
{
    double u = 1.0 - rand_uniform(seed, stream, 2 * i), v = rand_uniform(seed, stream, 2 * i + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
