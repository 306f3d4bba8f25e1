// emulate.h: runs a train_*.cu on the CPU, without a GPU, so that it can be held against its
// oracle.
//
// prepare.py turns the .cu into C++ that g++ compiles with this header in front; make test-emulated
// does both, and compares. A kernel is then an ordinary function, and a launch calls it once for
// every thread of every block:
//
//   blocks    one after the other.
//   threads   of the block that runs are coroutines, each on its own stack. A thread runs until it
//             must wait for others: at __syncthreads for the block, at a shuffle, vote, mma or
//             ldmatrix for its warp. Which warp goes on then is drawn at random (EMULATE_SEED=N
//             draws otherwise), and so is at which end of its lanes it starts (block.h).
//   warp      operations wait for all 32 lanes; the last to arrive does the work for all of them,
//             lane by lane, with the fragments laid out as the PTX manual says (ptx.h).
//   cp.async  keeps its bytes back until the thread waits for them.
//   stream    a queue. Work is done when somebody waits for it, never before; a graph is a list of
//             work that is queued whenever it is launched (runtime.h).
//   cuBLASLt  is three loops, and sums in double (cublaslt.h).
//
// What it sees, beside wrong results, which build/diff finds (faults.cu has one of each):
//   - races of warps: without its __syncthreads one warp reads what another, by the draw, has not
//     written yet, or has written over. Two seeds whose results differ in one bit have found one.
//   - memory that was never written: shared memory and, with -DPOISON, the arenas start as NaN, and
//     what cp.async is to write is NaN until it arrives.
//   - writes up to 512 bytes behind the dynamic shared memory or an allocation: guards stand there.
//     ldmatrix and cp.async outside of the dynamic shared memory.
//   - an operation of the full warp that a lane has left, or that others do not take part in; a
//     block of which all that is left waits.
//   - misaligned float4 and the like, with g++ -fsanitize=alignment.
//   - a host that reads before it waits; that hands host memory to the device or the reverse; that
//     copies in the default stream while the other has work, or records what a graph cannot hold.
// What it cannot see: what the real cuBLASLt does; registers, occupancy, speed; the last bits of
// ex2.approx, __log2f, __sinf, __fdividef and of the tensor cores' sums (here the C library's, and
// one sum after the other); races of blocks, each of which ends before the next begins, and of the
// lanes of a warp between two operations; reads behind an array, and all that stays inside an
// allocation.
//
// EMULATE_KERNELS=FILE appends the names of the kernels that ran.
#ifndef SEQ_DEV_EMULATE_H
#define SEQ_DEV_EMULATE_H

#include <cmath>
#include <cstring>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

// ---- the language: what nvcc knows and g++ does not

#undef __shared__
#define __shared__ a declaration that prepare.py does not know
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH_LIST__ 900

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

using std::isfinite;

// min, max: of two numbers, of the type that arithmetic would give them.
template <class A, class B> static inline typename std::common_type<A, B>::type min(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B> static inline typename std::common_type<A, B>::type max(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)a > (C)b ? (C)a : (C)b;
}

// rsqrtf: 1 / sqrt(x).
extern "C" float rsqrtf(float x) noexcept
{
    return 1 / sqrtf(x);
}

// emu_float_as_uint: the bits of x.
static inline unsigned emu_float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
// emu_uint_as_float: the float with these bits.
static inline float emu_uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define __float_as_uint(x) emu_float_as_uint(x)
#define __uint_as_float(x) emu_uint_as_float(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __fdividef(x, y) ((x) / (y))
#define __fmul_rn(x, y) ((x) * (y))
#define __ffs(x) __builtin_ffs((int)(x))
#define __popc(x) __builtin_popcount(x)

// sincospif: sine and cosine of pi x.
static inline void sincospif(float x, float *sine, float *cosine)
{
    *sine = (float)sin(M_PI * (double)x);
    *cosine = (float)cos(M_PI * (double)x);
}

// __stcg: a store that passes by the L1.
template <class X> static inline void __stcg(X *p, X x)
{
    *p = x;
}

#include "block.h"
#include "ptx.h"
#include "runtime.h"
#include "cublaslt.h"

// ---- launches: the LAUNCH of util/cuda.h with a call in place of <<< >>>

#include "../../util/cuda.h"
#undef LAUNCH
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
    do { \
        const unsigned blocks_ = cuda_fits((const void *)(kernel), #kernel, (grid), (block), \
                                           (smem), __FILE__, __LINE__); \
        emu_launch((kernel), #kernel, blocks_, (block), (smem))(__VA_ARGS__); \
        emu_in_stream(stream); \
        timing_mark(#kernel, (stream)); \
    } while (0)

// emu_launch: a function that queues the kernel with the arguments it is called with.
template <class... P>
static auto emu_launch(void (*kernel)(P...), const char *name, unsigned grid, dim3 block,
                       size_t dynamic_bytes)
{
    return [=](P... arguments) {
        emu_queue_push([=] {
            emu_run_grid(name, grid, block, dynamic_bytes, [=] { kernel(arguments...); });
        });
    };
}

#endif
