// runtime.h: the part of CUDA's runtime that util/cuda*.h and the trainers use, for emulate.h: a
// GPU with half a GiB of memory, one stream, events, graphs.
//
// Device memory is host memory that starts as NaN and has a guard behind it. The stream is a queue
// of closures; nothing in it is done before somebody waits for it, the worst that a GPU could do.
// An event is a place in the queue. A graph is the list of what was queued while it was recorded.
#ifndef SEQ_DEV_RUNTIME_H
#define SEQ_DEV_RUNTIME_H

#include <deque>
#include <map>

// ---- memory

enum EmuPlace { EMU_DEVICE, EMU_PINNED };

struct EmuAllocation {
    size_t bytes;
    EmuPlace place;
};

// As much as keeps gemm_rate, a matrix product of 8192 x 8192, from running: it asks for more.
static const size_t EMU_MEMORY = (size_t)500 << 20;
static std::map<const char *, EmuAllocation> emu_memory;
static size_t emu_memory_used;

// emu_fail: end the program with exit code 1 and what the host did wrong.
static void emu_fail(const char *call, const char *what)
{
    die(EXIT_FAIL, "emulation: %s: %s", call, what);
}

// emu_bytes_at: bytes from p to the end of its allocation in `place`, 0 if there is none.
static size_t emu_bytes_at(const void *p, EmuPlace place)
{
    auto next = emu_memory.upper_bound((const char *)p);
    if (next == emu_memory.begin())
        return 0;
    auto found = std::prev(next);
    const size_t offset = (size_t)((const char *)p - found->first);
    return found->second.place == place && offset < found->second.bytes
               ? found->second.bytes - offset : 0;
}

// emu_on_device, emu_on_host: die unless `bytes` bytes at p are, or none of them is, the device's.
static void emu_on_device(const void *p, size_t bytes, const char *call)
{
    if (emu_bytes_at(p, EMU_DEVICE) < bytes)
        emu_fail(call, "fewer bytes of device memory there than it touches");
}
static void emu_on_host(const void *p, const char *call)
{
    if (emu_bytes_at(p, EMU_DEVICE))
        emu_fail(call, "device memory where host memory belongs");
}

// emu_guards: die if an allocation was written behind.
static void emu_guards(void)
{
    for (const auto &a : emu_memory)
        for (int i = 0; i < EMU_GUARD; i++)
            if (a.first[a.second.bytes + (size_t)i] != (char)EMU_POISON)
                emu_fail("guards", "a kernel or copy wrote behind an allocation");
}

// emu_alloc: poisoned memory in `place`.
static cudaError_t emu_alloc(void **p, size_t bytes, EmuPlace place)
{
    if (place == EMU_DEVICE && bytes > EMU_MEMORY - emu_memory_used)
        return cudaErrorMemoryAllocation;
    *p = aligned_alloc(512, (bytes + EMU_GUARD + 511) / 512 * 512);
    if (!*p)
        return cudaErrorMemoryAllocation;
    memset(*p, EMU_POISON, bytes + EMU_GUARD);
    emu_memory[(const char *)*p] = {bytes, place};
    emu_memory_used += place == EMU_DEVICE ? bytes : 0;
    return cudaSuccess;
}

// ---- the stream

typedef std::vector<std::function<void()>> EmuWork;

static std::deque<std::function<void()>> emu_queue;
static long emu_queued, emu_done; // since the start
static EmuWork *emu_recording;    // the graph that is being recorded

// emu_queue_push: work for the stream, or for the graph.
static void emu_queue_push(std::function<void()> work)
{
    if (emu_recording) {
        emu_recording->push_back(work);
        return;
    }
    emu_queue.push_back(work);
    emu_queued++;
}

// emu_queue_run: do what was queued before `until`.
static void emu_queue_run(long until)
{
    while (emu_done < until) {
        const std::function<void()> work = emu_queue.front();
        emu_queue.pop_front();
        emu_done++;
        work();
    }
    emu_guards();
}

// emu_waits: for a call that waits for the stream, which a graph cannot hold.
static cudaError_t emu_waits(const char *call)
{
    if (emu_recording)
        emu_fail(call, "cannot be recorded into a graph");
    emu_queue_run(emu_queued);
    return cudaSuccess;
}

// emu_default_stream: for a call in the default stream, which does not wait for the other.
static void emu_default_stream(const char *call)
{
    if (emu_recording)
        emu_fail(call, "cannot be recorded into a graph");
    if (!emu_queue.empty())
        emu_fail(call, "in the default stream, while another has work: a race");
}

// emu_in_stream: after work for a stream was queued: of the default stream, which everything in it
// waits for, it is done at once.
static void emu_in_stream(cudaStream_t stream)
{
    if (!stream && !emu_recording)
        emu_queue_run(emu_queued);
}

// emu_copy: `rows` rows of `row` bytes, their starts a pitch apart.
static void emu_copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t row,
                     size_t rows, cudaMemcpyKind kind)
{
    if (!row || !rows)
        return;
    if (to_pitch < row || from_pitch < row)
        emu_fail("copy", "rows that overlap");
    if (kind == cudaMemcpyDefault)
        kind = emu_bytes_at(from, EMU_DEVICE) ? emu_bytes_at(to, EMU_DEVICE)
                                                    ? cudaMemcpyDeviceToDevice
                                                    : cudaMemcpyDeviceToHost
                                              : cudaMemcpyHostToDevice;
    if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice)
        emu_on_device(to, (rows - 1) * to_pitch + row, "copy to the device");
    else
        emu_on_host(to, "copy to the host");
    if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)
        emu_on_device(from, (rows - 1) * from_pitch + row, "copy from the device");
    else
        emu_on_host(from, "copy from the host");
    for (size_t i = 0; i < rows; i++)
        memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, row);
}

// emu_set: bytes of device memory.
static void emu_set(void *p, int value, size_t bytes)
{
    if (bytes)
        emu_on_device(p, bytes, "cudaMemset");
    memset(p, value, bytes);
}

// ---- the calls, with CUDA's names and contracts

extern "C" {
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulation (no GPU)");
    p->major = 9;
    p->multiProcessorCount = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    *value = 227 << 10; // of an H100 or H200
    return attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? cudaSuccess
                                                                : cudaErrorInvalidValue;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *)
{
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = EMU_THREADS;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int)
{
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = EMU_MEMORY;
    *free_bytes = EMU_MEMORY - emu_memory_used;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    return emu_alloc(p, bytes, EMU_DEVICE);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned)
{
    return emu_alloc(p, bytes, EMU_PINNED);
}

cudaError_t cudaFree(void *p)
{
    emu_waits("cudaFree");
    if (p) {
        emu_on_device(p, 1, "cudaFree");
        emu_memory_used -= emu_memory[(const char *)p].bytes;
        emu_memory.erase((const char *)p);
        free(p);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    emu_default_stream("cudaMemset");
    emu_set(p, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream)
{
    emu_queue_push([=] { emu_set(p, value, bytes); });
    emu_in_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t row,
                         size_t rows, cudaMemcpyKind kind)
{
    emu_default_stream("cudaMemcpy");
    emu_copy(to, to_pitch, from, from_pitch, row, rows, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind);
}

// Of memory that is not pinned, a copy to the device takes what it holds at the call, and one from
// the device waits.
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t row, size_t rows, cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    if (kind == cudaMemcpyHostToDevice && !emu_bytes_at(from, EMU_PINNED)) {
        if (emu_recording)
            emu_fail("cudaMemcpyAsync", "records a copy of memory that is not pinned");
        const char *bytes = (const char *)from;
        const std::vector<char> now(bytes, bytes + (rows - 1) * from_pitch + row);
        emu_queue_push([=] {
            emu_copy(to, to_pitch, now.data(), from_pitch, row, rows, kind);
        });
        return cudaSuccess;
    }
    emu_queue_push([=] { emu_copy(to, to_pitch, from, from_pitch, row, rows, kind); });
    emu_in_stream(stream);
    if (kind == cudaMemcpyDeviceToHost && !emu_bytes_at(to, EMU_PINNED))
        emu_waits("cudaMemcpyAsync to memory that is not pinned");
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = (cudaStream_t)&emu_queue;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return emu_waits("cudaStreamSynchronize");
}

cudaError_t cudaDeviceSynchronize(void)
{
    return emu_waits("cudaDeviceSynchronize");
}

cudaError_t cudaDeviceReset(void)
{
    emu_waits("cudaDeviceReset");
    emu_names();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = (cudaEvent_t) new long(0);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    return cudaEventCreate(event);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    if (emu_recording)
        emu_fail("cudaEventRecord", "cannot be recorded into a graph here");
    *(long *)event = emu_queued;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    emu_queue_run(*(long *)event);
    return cudaSuccess;
}

// No time passes; 1 ms does as well as any other.
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t)
{
    *ms = 1;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete (long *)event;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode)
{
    if (emu_recording)
        emu_fail("cudaStreamBeginCapture", "is recording already");
    emu_recording = new EmuWork;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph)
{
    *graph = (cudaGraph_t)emu_recording;
    emu_recording = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    *exec = (cudaGraphExec_t) new EmuWork(*(EmuWork *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete (EmuWork *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t)
{
    for (const std::function<void()> &work : *(EmuWork *)exec)
        emu_queue_push(work);
    return cudaSuccess;
}
}

// cudaFuncGetAttributes: of a kernel by its type; nvcc's headers have it for nvcc alone.
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, void (*kernel)(void))
{
    return cudaFuncGetAttributes(a, (const void *)kernel);
}

#endif
