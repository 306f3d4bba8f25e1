// cuda.h: what every CUDA program here needs and no paper describes: errors with their place, the
// device and its memory, arenas on it, launches that are checked, graphs, times.
//
// Exit code 4 (EXIT_MEMORY) is anything that CUDA or the GPU refuses. TIMING (nvcc -DTIMING) runs a
// step kernel by kernel, not as a graph, and prints what each kernel took.
#ifndef SEQ_UTIL_CUDA_H
#define SEQ_UTIL_CUDA_H

#include "tensors.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "built for a GPU older than compute capability 8.0: make cuda ARCH=80, or newer"
#endif
#define GIB (1024.0 * 1024.0 * 1024.0)
#define CUDA_TEXT_OF(...) #__VA_ARGS__
#define CUDA_TEXT(...) CUDA_TEXT_OF(__VA_ARGS__)

// ---- errors

// CUDA_CHECK(call): die with file, line, call and reason unless it succeeded.
#define CUDA_CHECK(call) cuda_check((call), __FILE__, __LINE__, #call)

// cuda_check: see CUDA_CHECK.
static inline void cuda_check(cudaError_t error, const char *file, int line, const char *call)
{
    if (error != cudaSuccess)
        die(EXIT_MEMORY, "%s:%d: %s: %s (%s)", file, line, call, cudaGetErrorString(error),
            cudaGetErrorName(error));
}

// ---- the device

// cuda_probe_kernel: never runs; whether it could says whether this program has code for the GPU.
static __global__ void cuda_probe_kernel(void)
{
}

// cuda_start: take device 0, print a line about it, return its name; dies, each with its own words,
// without a driver, one too old, no visible GPU, or a GPU that this program has no code for.
static inline const char *cuda_start(void)
{
    int driver = 0, count = 0;
    const int built = CUDART_VERSION;
    CUDA_CHECK(cudaDriverGetVersion(&driver)); // 0: there is none
    cudaError_t error = cudaGetDeviceCount(&count);
    if (driver == 0)
        die(EXIT_MEMORY, "no CUDA driver: this program needs an NVIDIA GPU with its driver\n"
            "hint: nvidia-smi should list the GPU; the CPU trainer has the name without _gpu");
    if (error == cudaErrorInsufficientDriver)
        die(EXIT_MEMORY, "CUDA driver too old: it serves CUDA %d.%d, this program was built with "
            "CUDA %d.%d\nhint: update the driver, or build with an older toolkit", driver / 1000,
            driver % 1000 / 10, built / 1000, built % 1000 / 10);
    if (error == cudaErrorNoDevice || (!error && count == 0)) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        die(EXIT_MEMORY, "no visible GPU: there is a driver for CUDA %d.%d, but it shows no GPU "
            "(CUDA_VISIBLE_DEVICES is %s%s%s)\nhint: unset it, or see what nvidia-smi -L lists",
            driver / 1000, driver % 1000 / 10, visible ? "\"" : "", visible ? visible : "not set",
            visible ? "\"" : "");
    }
    CUDA_CHECK(error);
    static cudaDeviceProp p;
    cudaFuncAttributes attributes;
    size_t free_bytes, total;
    CUDA_CHECK(cudaSetDevice(0));
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    error = cudaFuncGetAttributes(&attributes, cuda_probe_kernel);
    if (error || p.major < 8)
        die(EXIT_MEMORY, "%s: this program was built for architectures %s (900 = sm_90), this GPU "
            "is sm_%d%d%s\nhint: make cuda ARCH=%d%d, for a GPU of 8.0 or newer", p.name,
            CUDA_TEXT(__CUDA_ARCH_LIST__), p.major, p.minor,
            error ? "" : ", and 8.0 is the least it works with", p.major, p.minor);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    printf("GPU: %s, sm_%d%d, %d multiprocessors, %.2f of %.2f GiB free, CUDA %d.%d (driver "
           "%d.%d)\n", p.name, p.major, p.minor, p.multiProcessorCount, (double)free_bytes / GIB,
           (double)total / GIB, built / 1000, built % 1000 / 10, driver / 1000,
           driver % 1000 / 10);
    return p.name;
}

// cuda_memory_free: bytes of device memory that nobody has.
static inline size_t cuda_memory_free(void)
{
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

// cuda_memory_check: print that the run needs `bytes` of device memory; dies if fewer are free.
static inline void cuda_memory_check(size_t bytes)
{
    size_t free_bytes = cuda_memory_free();
    printf("GPU memory: %.2f GiB needed, %.2f GiB free\n", (double)bytes / GIB,
           (double)free_bytes / GIB);
    if (bytes > free_bytes)
        die(EXIT_MEMORY, "GPU memory: this run needs %.2f GiB, %.2f GiB are free\nhint: a smaller "
            "--batch-size, or fewer --layers", (double)bytes / GIB, (double)free_bytes / GIB);
    fflush(stdout);
}

// device_new: `bytes` of device memory, zeroed; dies with EXIT_MEMORY naming `what`. Free with
// cudaFree.
static inline void *device_new(size_t bytes, const char *what)
{
    void *p = NULL;
    cudaError_t error = cudaMalloc(&p, bytes ? bytes : 1);
    if (error)
        die(EXIT_MEMORY, "%s: cannot allocate %.2f GiB on the GPU, %.2f GiB are free: %s", what,
            (double)bytes / GIB, (double)cuda_memory_free() / GIB, cudaGetErrorString(error));
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    return p;
}

// pinned_new: `bytes` of host memory, zeroed, that the GPU can read and write while both work. Free
// with cudaFreeHost.
static inline void *pinned_new(size_t bytes, const char *what)
{
    void *p = NULL;
    cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    if (error)
        die(EXIT_MEMORY, "%s: cannot pin %.2f GiB of host memory: %s", what, (double)bytes / GIB,
            cudaGetErrorString(error));
    memset(p, 0, bytes);
    return p;
}

// ---- arenas

// A tensor on the device: its table row, the bytes of an element, and, where rows of the last axis
// are not one behind the other, `pitch`: elements from one to the next (0: as many as the row has).
// shift > 0: no storage of its own; it starts `shift` elements into the tensor of the row before.
typedef struct {
    Tensor tensor;
    size_t size, pitch, shift;
} DeviceTensor;

// Rows of a device arena's table. DEVICE: one row of the last axis behind the other; SPACED: with
// pitch and shift. ROWS: a table, and how many rows it has.
#define DEVICE(name, element, type, field, ...) \
    {ACTIVATION(name, type, field, __VA_ARGS__), sizeof(element), 0, 0}
#define SPACED(name, element, pitch, shift, type, field, ...) \
    {ACTIVATION(name, type, field, __VA_ARGS__), sizeof(element), pitch, shift}
#define ROWS(table) table, sizeof(table) / sizeof *(table)

typedef struct {
    const char *what;
    DeviceTensor rows[TENSORS_MAX];
    int n;
    size_t start[TENSORS_MAX]; // byte offset of each tensor
    size_t bytes;
    char *base; // on the device
} DeviceArena;

// Tensors of a device arena start on 256-byte boundaries.
enum { DEVICE_ALIGN = 256 };

// device_rows: rows of the last axis of a tensor, and elements from one to the next.
static inline size_t device_rows(const DeviceTensor *t, size_t *pitch)
{
    size_t last = t->tensor.shape[tensor_dims(&t->tensor) - 1];
    *pitch = t->pitch ? t->pitch : last;
    return tensor_size(&t->tensor) / last;
}

// device_plan: lay out the n rows; nothing is allocated. a->bytes is then what device_alloc takes.
static inline void device_plan(DeviceArena *a, const char *what, const DeviceTensor *rows, int n)
{
    arena_fits(what, n);
    memset(a, 0, sizeof *a);
    a->what = what;
    a->n = n;
    for (int i = 0; i < n; i++) {
        size_t pitch = 0, count = 0, bytes;
        a->rows[i] = rows[i];
        a->start[i] = rows[i].shift ? a->start[i - 1] + rows[i].shift * rows[i].size : a->bytes;
        if (!tensor_size(&rows[i].tensor) || rows[i].shift)
            continue;
        count = device_rows(&rows[i], &pitch);
        bytes = size_mul(size_mul(count, pitch, what), rows[i].size, what);
        arena_grow(&a->bytes, (bytes / DEVICE_ALIGN + 1) * DEVICE_ALIGN, bytes, what);
    }
}

// device_alloc: allocate a planned arena and set the pointers of the struct at `fields`. It starts
// as zeros; with POISON as NaN.
static inline void device_alloc(DeviceArena *a, void *fields)
{
    a->base = (char *)device_new(a->bytes, a->what);
#ifdef POISON
    CUDA_CHECK(cudaMemset(a->base, CANARY, a->bytes));
#endif
    for (int i = 0; i < a->n; i++) {
        const Tensor *t = &a->rows[i].tensor;
        void *data = tensor_size(t) ? a->base + a->start[i] : NULL;
        memcpy((char *)fields + t->field, &data, sizeof data);
    }
}

// device_download: out (size of the tensor) = row i of the arena, as floats.
static inline void device_download(float *out, const DeviceArena *a, int i)
{
    const DeviceTensor *t = &a->rows[i];
    size_t pitch = 0, n = tensor_size(&t->tensor), rows = device_rows(t, &pitch), last = n / rows;
    char *raw = (char *)alloc_zero(n, t->size, t->tensor.name);
    CUDA_CHECK(cudaMemcpy2D(raw, last * t->size, a->base + a->start[i], pitch * t->size,
                            last * t->size, rows, cudaMemcpyDeviceToHost));
    for (size_t k = 0; k < n; k++)
        out[k] = t->size == 2 ? __bfloat162float(((__nv_bfloat16 *)raw)[k]) : ((float *)raw)[k];
    free(raw);
}

// device_copy_out: host = a new arena with what the device arena holds now, as floats.
static inline void device_copy_out(Arena *host, const DeviceArena *a)
{
    Tensor table[TENSORS_MAX];
    for (int i = 0; i < a->n; i++)
        table[i] = a->rows[i].tensor;
    arena_plan(host, a->what, table, a->n, sizeof(float));
    arena_alloc(host, NULL);
    for (int i = 0; i < a->n; i++)
        if (tensor_size(&table[i]))
            device_download((float *)arena_data(host, i), a, i);
}

// mirror_new: the same layout as the host arena (canaries and all) in device memory; sets the
// pointers of the struct at `fields`, NULL for none. Free its base with cudaFree.
static inline Arena mirror_new(const Arena *host, void *fields)
{
    Arena a = *host;
    a.base = (char *)device_new(a.bytes, a.what);
    for (int i = 0; i < a.n && fields; i++) {
        void *data = tensor_size(&a.table[i]) ? arena_data(&a, i) : NULL;
        memcpy((char *)fields + a.table[i].field, &data, sizeof data);
    }
    return a;
}

// mirror_up: the device's copy = the host's.
static inline void mirror_up(const Arena *device, const Arena *host)
{
    CUDA_CHECK(cudaMemcpy(device->base, host->base, host->bytes, cudaMemcpyHostToDevice));
}

// mirror_down: the host's copy = the device's; dies if a canary was overwritten there.
static inline void mirror_down(Arena *host, const Arena *device)
{
    CUDA_CHECK(cudaMemcpy(host->base, device->base, host->bytes, cudaMemcpyDeviceToHost));
    arena_check(host);
}

// ---- times

#ifdef TIMING
enum { TIMING_ON = 1, MARKS_MAX = 1 << 14 };

static struct {
    cudaEvent_t events[MARKS_MAX];
    const char *names[MARKS_MAX];
    int n;
} timing_marks;

// timing_mark: what the stream has done since the mark before is called `name`.
static inline void timing_mark(const char *name, cudaStream_t stream)
{
    auto *m = &timing_marks;
    if (m->n == MARKS_MAX)
        return;
    CUDA_CHECK(cudaEventCreate(&m->events[m->n]));
    CUDA_CHECK(cudaEventRecord(m->events[m->n], stream));
    m->names[m->n++] = name;
}

// timing_report: print the time under each name since timing_clear, in the order of the first mark.
static inline void timing_report(const char *title)
{
    auto *m = &timing_marks;
    float time, all;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaEventElapsedTime(&all, m->events[0], m->events[m->n - 1]));
    printf("%s: %.3f ms\n", title, all);
    for (int i = 1; i < m->n; i++) {
        const char *name = m->names[i];
        double sum = 0;
        int calls = 0;
        for (int k = i; name && k < m->n; k++)
            if (m->names[k] && !strcmp(m->names[k], name)) {
                CUDA_CHECK(cudaEventElapsedTime(&time, m->events[k - 1], m->events[k]));
                sum += time;
                calls++;
                m->names[k] = NULL; // counted
            }
        if (name)
            printf("  %8.3f ms %5d calls %8.1f us each  %.90s\n", sum, calls,
                   1e3 * sum / calls, name);
    }
}

// timing_clear: forget all marks and set the first.
static inline void timing_clear(cudaStream_t stream)
{
    auto *m = &timing_marks;
    while (m->n)
        CUDA_CHECK(cudaEventDestroy(m->events[--m->n]));
    timing_mark("start", stream);
}
#else
enum { TIMING_ON = 0 };
#define timing_mark(name, stream) ((void)(stream))
#define timing_report(title) ((void)0)
#define timing_clear(stream) ((void)(stream))
#endif

// ---- launches

// LAUNCH(kernel, grid, block, smem, stream, arguments): launch and check, naming file, line and
// kernel. grid: blocks, any number; smem: bytes of dynamic shared memory, as many as the GPU has.
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
    do { \
        const unsigned blocks_ = cuda_fits((const void *)(kernel), #kernel, (grid), (block), \
                                           (smem), __FILE__, __LINE__); \
        (kernel)<<<blocks_, (block), (smem), (stream)>>>(__VA_ARGS__); \
        cuda_check(cudaGetLastError(), __FILE__, __LINE__, "launch of " #kernel); \
        timing_mark(#kernel, (stream)); \
    } while (0)

// cuda_fits: make `kernel` launchable with this grid, block and dynamic shared memory (above 48 KiB
// a kernel must ask for it); returns the grid. Dies naming the kernel if its registers, the device
// or the grid's 2^31 - 1 do not allow it.
static inline unsigned cuda_fits(const void *kernel, const char *name, size_t grid, dim3 block,
                                 size_t smem, const char *file, int line)
{
    const size_t threads = (size_t)block.x * block.y * block.z;
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, kernel));
    if (threads > (size_t)a.maxThreadsPerBlock)
        die(EXIT_MEMORY, "%s:%d: %s: a block of %zu threads, this GPU takes at most %d of its %d "
            "registers each", file, line, name, threads, a.maxThreadsPerBlock, a.numRegs);
    if (grid == 0 || grid > 0x7fffffff)
        die(EXIT_MEMORY, "%s:%d: %s: %zu blocks, expected 1 to 2147483647\nhint: a smaller "
            "--batch-size", file, line, name, grid);
    if (smem + a.sharedSizeBytes > 48 * 1024) {
        int most;
        CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        if (smem + a.sharedSizeBytes > (size_t)most)
            die(EXIT_MEMORY, "%s:%d: %s: %zu bytes of shared memory a block, this GPU has %d", file,
                line, name, smem + a.sharedSizeBytes, most);
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)smem));
    }
    return (unsigned)grid;
}

// ---- graphs

// graph_begin: from now on the stream records instead of running.
static inline void graph_begin(cudaStream_t stream)
{
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

// graph_end: what the stream has recorded, ready to be launched any number of times.
static inline cudaGraphExec_t graph_end(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return exec;
}

#endif
