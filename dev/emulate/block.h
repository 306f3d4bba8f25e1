// block.h: a block of threads on one CPU core, for emulate.h: each thread a coroutine, woken in
// random order; what makes them wait for one another; and poison where nothing was written.
//
// setjmp keeps where a coroutine stands, longjmp goes there; makecontext gives it its stack, once.
// Between two waits a thread runs alone, so that nothing here needs a lock.
#ifndef SEQ_DEV_BLOCK_H
#define SEQ_DEV_BLOCK_H

#include "../../util/check.h"
#include "../../util/rng.h"
#include <algorithm>
#include <functional>
#include <set>
#include <setjmp.h>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

enum { EMU_WARP = 32, EMU_THREADS = 1024, EMU_POISON = 0xff, EMU_GUARD = 512 };
enum { EMU_STACK = (256 << 10) + 1088 }; // the odd part: stacks do not share their cache lines

enum EmuWait { EMU_NOTHING, EMU_FOR_WARP, EMU_FOR_BLOCK, EMU_FOR_PART };

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
    std::vector<EmuCopy> copies; // of cp.async that have not arrived
    std::vector<size_t> groups;  // how many of them each group has
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
    int part_arrived;            // the same for a part of the block, at bar.sync 1
    unsigned long part_count;
    char *dynamic;               // dynamic shared memory, and its size
    size_t dynamic_bytes;
    std::set<void *> declared; // shared variables of fixed size, so far
} emu_block;

static std::set<std::string> emu_launched; // the names of the kernels that ran

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
    if (t->waits == EMU_FOR_PART)
        return !t->left && emu_block.part_count != t->since;
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
        t->groups.clear();
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

// emu_run_warp: let every thread of warp w that may run do so, from either end; whether any did.
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

// emu_fresh: poison a shared variable of fixed size, in the first thread of a block to declare it.
static void emu_fresh(void *variable, size_t bytes)
{
    if (emu_block.declared.insert(variable).second)
        memset(variable, EMU_POISON, bytes);
}

// emu_run_block: run the block blockIdx from poisoned shared memory to its end.
static void emu_run_block(void)
{
    static std::vector<char> memory;
    const int warps = (emu_block.threads + EMU_WARP - 1) / EMU_WARP;
    const size_t bytes = emu_block.dynamic_bytes;
    memory.assign(bytes + 1024 + EMU_GUARD, (char)EMU_POISON);
    emu_block.dynamic = (char *)(((size_t)memory.data() + 1023) / 1024 * 1024);
    emu_block.declared.clear();
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

// emu_names: append the names of the kernels that ran to the file EMULATE_KERNELS, if that is set.
static void emu_names(void)
{
    const char *path = getenv("EMULATE_KERNELS");
    FILE *f = path ? fopen(path, "ab") : NULL;
    std::string lines;
    for (const std::string &name : emu_launched)
        lines += name + "\n";
    if (f && (fwrite(lines.data(), 1, lines.size(), f) != lines.size() || fclose(f)))
        die(EXIT_DATA, "%s: cannot write", path);
}

// emu_run_grid: a kernel, one block of `threads` after the other.
static void emu_run_grid(const char *kernel, unsigned grid, dim3 block, size_t dynamic_bytes,
                         const std::function<void()> &body)
{
    emu_launched.insert(kernel);
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

// bar_sync: barrier `id`, of as many threads of the block as it says.
static void bar_sync(int id, int threads)
{
    const unsigned long count = emu_block.part_count;
    if (id != 1)
        emu_die("bar.sync of a barrier other than 1, which is not emulated");
    if (emu_warp()->arrived)
        emu_die("bar.sync while other lanes wait in an operation of the warp");
    if (++emu_block.part_arrived < threads)
        return emu_wait(EMU_FOR_PART, count);
    emu_block.part_arrived = 0;
    emu_block.part_count++;
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

// __shfl_sync: the x of lane `from`.
template <class X> static X __shfl_sync(unsigned mask, X x, int from)
{
    EmuLane *lane = emu_lane();
    static_assert(sizeof x <= sizeof lane->word, "a shuffle moves at most 64 bits");
    memcpy(&lane->word, &x, sizeof x);
    lane->source = from;
    emu_together("__shfl_sync", mask, [](EmuLane *lanes) {
        uint64_t words[EMU_WARP];
        for (int l = 0; l < EMU_WARP; l++)
            words[l] = lanes[lanes[l].source].word;
        for (int l = 0; l < EMU_WARP; l++)
            lanes[l].word = words[l];
    });
    memcpy(&x, &lane->word, sizeof x);
    return x;
}

// __shfl_xor_sync: the x of lane ^ other.
template <class X> static X __shfl_xor_sync(unsigned mask, X x, int other)
{
    return __shfl_sync(mask, x, emu_current % EMU_WARP ^ other);
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

// atomicAdd: *x += y; the value before. Between two waits a thread runs alone.
template <class X> static X atomicAdd(X *x, X y)
{
    const X before = *x;
    *x = before + y;
    return before;
}

// __any_sync: whether any lane's x is true.
static bool __any_sync(unsigned mask, bool x)
{
    return __ballot_sync(mask, x) != 0;
}

#endif
