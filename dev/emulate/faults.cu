// faults.cu: kernels with one fault each, which the emulation must see; test.sh runs them all.
// `faults NAME` ends with an error, `faults sound` with exit code 0, `faults --list` prints a line
// `NAME: what the error says` for each.
#include "../../util/cuda.h"

enum { N = 64 };

// What the kernels work on: N numbers each, x = 0 to N - 1, out and what the host has of it.
static float *x, *out, *host;
static cudaStream_t stream;

// reversed_kernel: out = x, last first. SYNC: with the barrier that it needs.
template <int SYNC> static __global__ void reversed_kernel(float *out, const float *x)
{
    __shared__ float kept[N];
    kept[threadIdx.x] = x[threadIdx.x];
    if (SYNC)
        __syncthreads();
    out[threadIdx.x] = kept[N - 1 - threadIdx.x];
}

// dynamic_kernel: writes element `at` of N in dynamic shared memory.
static __global__ void dynamic_kernel(int at)
{
    extern __shared__ float dynamic[];
    dynamic[at] = 1;
}

// store_kernel: x[at] = 1.
static __global__ void store_kernel(float *x, int at)
{
    x[at] = 1;
}

// copy4_kernel: four numbers at once.
static __global__ void copy4_kernel(float *out, const float *x)
{
    *(float4 *)out = *(const float4 *)x;
}

// early_kernel: a shuffle that one lane does not reach.
static __global__ void early_kernel(float *out, const float *x)
{
    if (threadIdx.x == 7)
        return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1);
}

// split_kernel: lanes of a warp wait at two places.
static __global__ void split_kernel(float *out, const float *x)
{
    if (threadIdx.x == 7)
        __syncthreads();
    out[threadIdx.x] = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1);
    if (threadIdx.x != 7)
        __syncthreads();
}

// async_kernel: out = x through shared memory. WAIT: until it is there.
template <int WAIT> static __global__ void async_kernel(float *out, const float *x)
{
    extern __shared__ __align__(16) float arriving[];
    const int i = threadIdx.x;
    if (i % 2 == 0)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" : :
                     "r"((uint32_t)__cvta_generic_to_shared(arriving + i)), "l"(x + i), "r"(8)
                     : "memory");
    if (WAIT)
        asm volatile("cp.async.wait_all;" : : : "memory");
    __syncthreads();
    out[i] = arriving[i];
}

// reverse, async: launch the kernel, and die unless it did what it says.
static void reverse(int sync)
{
    if (sync)
        LAUNCH(reversed_kernel<1>, 1, N, 0, stream, out, x);
    else
        LAUNCH(reversed_kernel<0>, 1, N, 0, stream, out, x);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(host, out, N * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (host[i] != N - 1 - i)
            die(EXIT_FAIL, "wrong: element %d is %g", i, (double)host[i]);
}
static void async(int wait)
{
    if (wait)
        LAUNCH(async_kernel<1>, 1, N, N * sizeof(float), stream, out, x);
    else
        LAUNCH(async_kernel<0>, 1, N, N * sizeof(float), stream, out, x);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(host, out, N * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (host[i] != i)
            die(EXIT_FAIL, "wrong: element %d is %g", i, (double)host[i]);
}

static const struct {
    const char *name, *says;
    void (*run)(void);
} FAULTS[] = {
    {"race", "wrong: element", [] { reverse(0); }},
    {"unwaited copy", "wrong: element", [] { async(0); }},
    {"behind shared memory", "behind the dynamic shared memory",
     [] { LAUNCH(dynamic_kernel, 1, 1, N * sizeof(float), stream, N); }},
    {"behind an allocation", "behind an allocation",
     [] { LAUNCH(store_kernel, 1, 1, 0, stream, x, N); }},
    {"unaligned", "misaligned address", [] { LAUNCH(copy4_kernel, 1, 1, 0, stream, out, x + 1); }},
    {"early return", "of which some have returned|returns while its warp waits",
     [] { LAUNCH(early_kernel, 1, 32, 0, stream, out, x); }},
    {"split warp", "__syncthreads while other lanes|waits, for one another",
     [] { LAUNCH(split_kernel, 1, 32, 0, stream, out, x); }},
    {"half a warp", "of which some have returned or never were",
     [] { LAUNCH(early_kernel, 1, 6, 0, stream, out, x); }},
    {"copy beside work", "in the default stream",
     [] {
         LAUNCH(store_kernel, 1, 1, 0, stream, x, 0);
         CUDA_CHECK(cudaMemcpy(host, x, sizeof(float), cudaMemcpyDeviceToHost));
     }},
    {"host memory", "fewer bytes of device memory",
     [] { CUDA_CHECK(cudaMemsetAsync(host, 0, sizeof(float), stream)); }},
};

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    int known = !strcmp(name, "sound");
    if (!strcmp(name, "--list")) {
        for (const auto &f : FAULTS)
            printf("%s: %s\n", f.name, f.says);
        return 0;
    }
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    x = (float *)device_new(N * sizeof(float), "x");
    out = (float *)device_new(N * sizeof(float), "out");
    host = (float *)pinned_new(N * sizeof(float), "host");
    for (int i = 0; i < N; i++)
        host[i] = (float)i;
    CUDA_CHECK(cudaMemcpy(x, host, N * sizeof(float), cudaMemcpyHostToDevice));
    for (const auto &f : FAULTS)
        if (!strcmp(name, f.name)) {
            f.run();
            known = 1;
        }
    if (!known)
        die(EXIT_USAGE, "%s: no such fault\nhint: --list", name);
    if (!strcmp(name, "sound")) {
        reverse(1);
        async(1);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaDeviceReset());
}
