// emulate.h: runs a train_*.cu on the CPU, without a GPU, so that it can be held against its oracle.
//
// prepare.py turns the .cu into C++ that g++ compiles with this header in front; make
// test-emulated does both, and compares. A kernel is then an ordinary function, and a launch calls
// it once for every thread of every block:
//
//   blocks    one after the other.
//   threads   of the block that runs are coroutines, each on its own stack. A thread runs until it
//             must wait for others: at __syncthreads for the block, at a shuffle, vote, mma or
//             ldmatrix for its warp. Which warp goes on then is drawn at random (EMULATE_SEED),
//             and so is which of its lanes starts.
//   warp      operations wait for all 32 lanes; the last to arrive does the work for all of them,
//             lane by lane, as the PTX manual lays the fragments out.
//   cp.async  keeps its bytes back until the thread waits for them.
//   streams   one queue. Work is done when somebody waits for it, never before; a graph is a list
//             of work that is queued whenever it is launched (runtime.h).
//   cuBLASLt  is three loops and sums in double (cublaslt.h).
//
// What it sees, beside wrong results, which build/diff finds:
//   - races: a missing __syncthreads lets one warp read what another, by the draw, has not written
//     yet or has written over. Two seeds that differ in one bit have found one.
//   - memory that was never written: device, pinned and shared memory start as NaN, and what
//     cp.async is about to write is NaN until it arrives.
//   - writes behind the dynamic shared memory, or behind an allocation: guards stand there.
//     ldmatrix and cp.async outside of the dynamic shared memory.
//   - an operation of the full warp that a lane has left, or that others do not take part in; a
//     block of which some wait for what never comes.
//   - misaligned float4 and the like, with -fsanitize=alignment.
//   - a host that reads before it waits; that hands host memory to the device or the reverse; that
//     copies in the default stream while the other one is at work, or records what cannot be.
// What it cannot see: what the real cuBLASLt does; registers, occupancy, speed; the last bits of
// ex2.approx, __log2f, __fdividef and of the tensor cores' sums (here those of the C library and of
// one sum after the other); races of blocks with blocks, of which one is through before the next
// begins; reads behind an array; races of one warp's lanes within a statement.
#ifndef SEQ_DEV_EMULATE_H
#define SEQ_DEV_EMULATE_H

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <vector>
#include "../../util/check.h"
#include "../../util/rng.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>

// ---- the language: what nvcc knows and g++ does not

// Shared variables of fixed size lie in one section, so that a block can find them poisoned.
#undef __shared__
#define __shared__ static __attribute__((section("emu_shared")))
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
#define __float_as_uint(x) emu_float_as_uint(x)
#define __log2f(x) log2f(x)
#define __fdividef(x, y) ((x) / (y))
#define __ffs(x) __builtin_ffs((int)(x))

// ---- the block that runs

enum { EMU_WARP = 32, EMU_THREADS = 1024, EMU_POISON = 0xff, EMU_GUARD = 512 };
enum { EMU_STACK = (256 << 10) + 1088 }; // the odd part: stacks do not share their cache lines

enum EmuWait { EMU_NOTHING, EMU_FOR_WARP, EMU_FOR_BLOCK };

// A copy of cp.async that has not arrived: bytes from `from` (NULL: zeros).
struct EmuCopy {
    void *to;
    const void *from;
    size_t bytes;
};

struct EmuThread {
    jmp_buf place; // where it goes on
    bool has_place, left;
    EmuWait waits;
    unsigned long since; // the count, of its warp or block, that it waits to see passed
    std::vector<EmuCopy> copies;
};

// What each lane brings to an operation of its warp, and takes from it.
struct EmuLane {
    uint64_t word;
    int source;          // shuffle: whose word it takes
    const uint16_t *row; // ldmatrix: the row that it points to
    uint32_t a[4], b[2], r[4]; // mma's operands; ldmatrix's result
    float c[4], *d[4];
};

struct EmuWarp {
    int alive, arrived;
    const char *operation; // that the arrived wait in
    unsigned long count;   // operations done
    EmuLane lanes[EMU_WARP];
};

static struct {
    const char *kernel;
    const std::function<void()> *body;
    int threads, alive, arrived; // arrived at __syncthreads
    unsigned long count;         // of them passed
    char *dynamic;               // dynamic shared memory, and its size
    size_t dynamic_bytes;
} emu_block;

static EmuThread emu_threads[EMU_THREADS];
static EmuWarp emu_warps[EMU_THREADS / EMU_WARP];
static int emu_current;
static jmp_buf emu_scheduler;

// emu_die: end the program with exit code 1 and what is wrong in which kernel, block and thread.
static void emu_die(const char *what)
{
    die(EXIT_FAIL, "emulation: %s: %s in block %u, thread %u", emu_block.kernel, what, blockIdx.x,
        threadIdx.x);
}

// emu_random: uniform in [0, n); the draws depend on EMULATE_SEED alone.
static uint32_t emu_random(uint32_t n)
{
    static const char *seed = getenv("EMULATE_SEED");
    static const uint64_t value = seed ? strtoull(seed, NULL, 10) : 1;
    static uint64_t drawn;
    return rand_below(value, 0, drawn++, n);
}

// emu_warp: the warp of the thread that runs.
static inline EmuWarp *emu_warp(void)
{
    return &emu_warps[emu_current / EMU_WARP];
}

// emu_lane: its lane.
static inline EmuLane *emu_lane(void)
{
    return &emu_warp()->lanes[emu_current % EMU_WARP];
}

// emu_give_back: let the scheduler choose who runs; returns when it has chosen this thread.
static void emu_give_back(void)
{
    if (!_setjmp(emu_threads[emu_current].place))
        _longjmp(emu_scheduler, 1);
}

// emu_wait: the same, but not before `count` has moved on.
static void emu_wait(EmuWait waits, unsigned long count)
{
    EmuThread *t = &emu_threads[emu_current];
    t->waits = waits;
    t->since = count;
    emu_give_back();
}

// emu_may_run: whether thread i is neither through nor waiting.
static bool emu_may_run(int i)
{
    const EmuThread *t = &emu_threads[i];
    if (t->waits == EMU_FOR_WARP)
        return !t->left && emu_warps[i / EMU_WARP].count != t->since;
    return !t->left && (t->waits == EMU_NOTHING || emu_block.count != t->since);
}

// emu_barrier_open: let the block go on if all of it that is left has arrived.
static void emu_barrier_open(void)
{
    if (emu_block.alive && emu_block.arrived == emu_block.alive) {
        emu_block.arrived = 0;
        emu_block.count++;
    }
}

// emu_live: all that a coroutine does: one kernel after the other.
static void emu_live(void)
{
    for (;;) {
        (*emu_block.body)();
        EmuThread *t = &emu_threads[emu_current];
        t->left = true;
        t->copies.clear();
        emu_block.alive--;
        emu_warp()->alive--;
        if (emu_warp()->arrived)
            emu_die("a lane returns while its warp waits for it");
        emu_barrier_open();
        emu_give_back();
    }
}

// emu_run: let thread i run until it gives back; its first time it is put on a stack of its own.
static void emu_run(int i)
{
    static char *stacks;
    EmuThread *t = &emu_threads[i];
    emu_current = i;
    threadIdx.x = (unsigned)i;
    t->waits = EMU_NOTHING;
    if (!stacks) {
        void *p = mmap(NULL, (size_t)EMU_STACK * EMU_THREADS, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            die(EXIT_MEMORY, "emulation: no memory for the threads' stacks");
        stacks = (char *)p;
    }
    if (_setjmp(emu_scheduler))
        return;
    if (t->has_place)
        _longjmp(t->place, 1);
    t->has_place = true;
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + (size_t)i * EMU_STACK;
    context.uc_stack.ss_size = EMU_STACK;
    makecontext(&context, emu_live, 0);
    setcontext(&context);
}

// emu_run_warp: let every thread of warp w that may run do so, from either end; whether any could.
static bool emu_run_warp(int w)
{
    const int n = std::min((int)EMU_WARP, emu_block.threads - EMU_WARP * w);
    const bool back = emu_random(2);
    bool any = false;
    for (int k = 0; k < n; k++) {
        const int i = EMU_WARP * w + (back ? n - 1 - k : k);
        if (emu_may_run(i)) {
            emu_run(i);
            any = true;
        }
    }
    return any;
}

extern "C" char __start_emu_shared[], __stop_emu_shared[];

// emu_run_block: run the block blockIdx from poisoned shared memory to its end.
static void emu_run_block(void)
{
    static std::vector<char> memory;
    const int warps = (emu_block.threads + EMU_WARP - 1) / EMU_WARP;
    const size_t bytes = emu_block.dynamic_bytes;
    memory.assign(bytes + 1024 + EMU_GUARD, (char)EMU_POISON);
    emu_block.dynamic = (char *)(((size_t)memory.data() + 1023) / 1024 * 1024);
    memset(__start_emu_shared, EMU_POISON, (size_t)(__stop_emu_shared - __start_emu_shared));
    emu_block.alive = emu_block.threads;
    emu_block.arrived = 0;
    for (int w = 0; w < warps; w++) {
        emu_warps[w].alive = std::min((int)EMU_WARP, emu_block.threads - EMU_WARP * w);
        emu_warps[w].arrived = 0;
    }
    for (int i = 0; i < emu_block.threads; i++) {
        emu_threads[i].left = false;
        emu_threads[i].waits = EMU_NOTHING;
    }
    while (emu_block.alive) {
        const int first = (int)emu_random((uint32_t)warps);
        int k = 0;
        while (k < warps && !emu_run_warp((first + k) % warps))
            k++;
        if (k == warps)
            emu_die("all that is left waits, for one another");
    }
    for (int i = 0; i < EMU_GUARD; i++)
        if (emu_block.dynamic[bytes + (size_t)i] != (char)EMU_POISON)
            emu_die("a write behind the dynamic shared memory");
}

// emu_run_grid: a kernel, one block of `threads` after the other.
static void emu_run_grid(const char *kernel, unsigned grid, dim3 block, size_t dynamic_bytes,
                         const std::function<void()> &body)
{
    emu_block.kernel = kernel;
    emu_block.body = &body;
    emu_block.threads = (int)block.x;
    emu_block.dynamic_bytes = dynamic_bytes;
    blockDim = block;
    gridDim = dim3(grid);
    if (block.y != 1 || block.z != 1)
        emu_die("a block of more than one dimension");
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        emu_run_block();
}

// ---- what waits for others

// __syncthreads: every thread of the block that has not returned.
static void __syncthreads(void)
{
    const unsigned long count = emu_block.count;
    if (emu_warp()->arrived)
        emu_die("__syncthreads while other lanes wait in an operation of the warp");
    emu_block.arrived++;
    emu_barrier_open();
    if (emu_block.count == count)
        emu_wait(EMU_FOR_BLOCK, count);
}

// emu_together: wait for all lanes; the last to arrive calls work. Dies unless all 32 are to come
// and are in the same `operation`.
static void emu_together(const char *operation, unsigned mask, void (*work)(EmuLane *lanes))
{
    EmuWarp *w = emu_warp();
    if (mask != ~0u)
        emu_die("an operation of a part of the warp, which is not emulated");
    if (w->alive != EMU_WARP)
        emu_die("an operation of 32 lanes, of which some have returned or never were");
    if (w->arrived && strcmp(w->operation, operation))
        emu_die("lanes of one warp wait in different operations");
    w->operation = operation;
    if (++w->arrived < EMU_WARP) {
        emu_wait(EMU_FOR_WARP, w->count);
        return;
    }
    w->arrived = 0;
    work(w->lanes);
    w->count++;
}

// __syncwarp: every lane.
static void __syncwarp(void)
{
    emu_together("__syncwarp", ~0u, [](EmuLane *) {});
}

// __shfl_xor_sync: the x of lane ^ other.
template <class X> static X __shfl_xor_sync(unsigned mask, X x, int other)
{
    EmuLane *lane = emu_lane();
    static_assert(sizeof x <= sizeof lane->word, "a shuffle moves at most 64 bits");
    memcpy(&lane->word, &x, sizeof x);
    lane->source = emu_current % EMU_WARP ^ other;
    emu_together("__shfl_xor_sync", mask, [](EmuLane *lanes) {
        uint64_t words[EMU_WARP];
        for (int l = 0; l < EMU_WARP; l++)
            words[l] = lanes[lanes[l].source].word;
        for (int l = 0; l < EMU_WARP; l++)
            lanes[l].word = words[l];
    });
    memcpy(&x, &lane->word, sizeof x);
    return x;
}

// __ballot_sync: bit l: lane l's x.
static unsigned __ballot_sync(unsigned mask, bool x)
{
    emu_lane()->word = x;
    emu_together("__ballot_sync", mask, [](EmuLane *lanes) {
        uint64_t votes = 0;
        for (int l = 0; l < EMU_WARP; l++)
            votes |= lanes[l].word << l;
        for (int l = 0; l < EMU_WARP; l++)
            lanes[l].word = votes;
    });
    return (unsigned)emu_lane()->word;
}

// __any_sync: whether any lane's x is true.
static bool __any_sync(unsigned mask, bool x)
{
    return __ballot_sync(mask, x) != 0;
}

// ---- PTX: prepare.py makes of an instruction a call of its name, dots as underlines, with the
// operands in the order written

// ex2_approx_ftz_f32: y = 2^x, numbers too small for a normal float taken as 0.
static void ex2_approx_ftz_f32(float &y, float x)
{
    const float least = 1.17549435e-38f;
    y = exp2f(fabsf(x) < least ? 0 : x);
    y = fabsf(y) < least ? 0 : y;
}

// emu_bf16: the low or high half of a register as a number.
static inline float emu_bf16(uint32_t pair, int high)
{
    const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// emu_mma: d (16x8) = a (16x16) b (16x8) + c. Lane 4 g + t holds: of a, the pairs at column 2 t and
// 2 t + 8 of rows g and g + 8 (in the order (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)); of b, rows
// 2 t, 2 t + 1 and these + 8 of column g; of c and d, columns 2 t, 2 t + 1 of rows g and g + 8.
static void emu_mma(EmuLane *lanes)
{
    float a[16][16], b[16][8];
    for (int l = 0; l < EMU_WARP; l++)
        for (int i = 0; i < 8; i++) {
            const int g = l / 4, k = l % 4 * 2 + i / 4 * 8 + i % 2;
            a[g + i / 2 % 2 * 8][k] = emu_bf16(lanes[l].a[i / 2], i % 2);
            if (i / 2 % 2 == 0)
                b[k][g] = emu_bf16(lanes[l].b[i / 4], i % 2);
        }
    for (int l = 0; l < EMU_WARP; l++)
        for (int i = 0; i < 4; i++) {
            const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            float sum = lanes[l].c[i];
            for (int k = 0; k < 16; k++)
                sum += a[row][k] * b[k][column];
            *lanes[l].d[i] = sum;
        }
}

// mma: see emu_mma.
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3)
{
    const EmuLane given = {.a = {a0, a1, a2, a3}, .b = {b0, b1}, .c = {c0, c1, c2, c3},
                           .d = {&d0, &d1, &d2, &d3}};
    *emu_lane() = given;
    emu_together("mma", ~0u, emu_mma);
}

// __cvta_generic_to_shared: p as an offset into the dynamic shared memory.
static size_t __cvta_generic_to_shared(const void *p)
{
    return (size_t)((const char *)p - emu_block.dynamic);
}

// emu_shared: back from the offset; dies unless `bytes` bytes are there, aligned to as many.
static char *emu_shared(uint32_t at, size_t bytes)
{
    if (at + bytes > emu_block.dynamic_bytes)
        emu_die("ldmatrix or cp.async outside of the dynamic shared memory");
    if (at % bytes)
        emu_die("ldmatrix or cp.async of a misaligned address");
    return emu_block.dynamic + at;
}

// emu_load: register m of lane l = two elements of matrix m, whose eight rows are where lanes 8 m to
// 8 m + 7 point: elements 2 (l % 4) and the next of row l / 4; TRANS: of column l / 4.
template <int TRANS> static void emu_load(EmuLane *lanes)
{
    for (int l = 0; l < EMU_WARP; l++)
        for (int m = 0; m < 4; m++) {
            const int k = l % 4 * 2;
            const EmuLane *rows = lanes + 8 * m;
            const uint32_t low = TRANS ? rows[k].row[l / 4] : rows[l / 4].row[k];
            const uint32_t high = TRANS ? rows[k + 1].row[l / 4] : rows[l / 4].row[k + 1];
            lanes[l].r[m] = low | high << 16;
        }
}

// ldmatrix: four 8x8 matrices of 16-bit elements; see emu_load.
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2,
                                                     uint32_t &r3, uint32_t at)
{
    EmuLane *lane = emu_lane();
    lane->row = (const uint16_t *)emu_shared(at, 16);
    emu_together("ldmatrix", ~0u, emu_load<0>);
    r0 = lane->r[0], r1 = lane->r[1], r2 = lane->r[2], r3 = lane->r[3];
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2,
                                                           uint32_t &r3, uint32_t at)
{
    EmuLane *lane = emu_lane();
    lane->row = (const uint16_t *)emu_shared(at, 16);
    emu_together("ldmatrix.trans", ~0u, emu_load<1>);
    r0 = lane->r[0], r1 = lane->r[1], r2 = lane->r[2], r3 = lane->r[3];
}

// cp_async_ca_shared_global: start copying the first `given` of `bytes` bytes, zeros for the rest.
static void cp_async_ca_shared_global(uint32_t at, const void *from, int bytes, int given)
{
    char *to = emu_shared(at, (size_t)bytes);
    if ((size_t)from % (size_t)bytes)
        emu_die("cp.async from a misaligned address");
    memset(to, EMU_POISON, (size_t)bytes);
    emu_threads[emu_current].copies.push_back({to, from, (size_t)given});
    emu_threads[emu_current].copies.push_back({to + given, NULL, (size_t)(bytes - given)});
}

// cp_async_cg_shared_global: the same; the GPU's first-level cache does not keep it.
static void cp_async_cg_shared_global(uint32_t at, const void *from, int bytes, int given)
{
    cp_async_ca_shared_global(at, from, bytes, given);
}

// cp_async_wait_all: all that this thread copies arrives.
static void cp_async_wait_all(void)
{
    for (const EmuCopy &c : emu_threads[emu_current].copies)
        c.from ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes);
    emu_threads[emu_current].copies.clear();
}

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
