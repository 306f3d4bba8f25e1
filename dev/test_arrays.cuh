// test_arrays.cuh: arrays that tests of kernels have twice, on the device and in double. To be
// included after a trainer, whose memory and errors it uses.
#ifndef SEQ_DEV_TEST_ARRAYS_CUH
#define SEQ_DEV_TEST_ARRAYS_CUH

// n numbers of `size` bytes each, bf16 (2) or float (4), on the device, and as double here.
typedef struct {
    void *device;
    double *host;
    size_t n, size;
} Array;

// array_new: n elements of `size` bytes, NaN on the device.
static inline Array array_new(size_t n, size_t size)
{
    Array a = {device_new(n * size, "array"), (double *)alloc_zero(n, 8, "array"), n, size};
    CUDA_CHECK(cudaMemset(a.device, 0xff, n * size));
    return a;
}

// array_up: copy the host's numbers to the device, and round them as they are rounded there.
static inline void array_up(Array *a)
{
    char *raw = (char *)alloc_zero(a->n, a->size, "array");
    for (size_t i = 0; i < a->n; i++) {
        if (a->size == 2)
            ((__nv_bfloat16 *)raw)[i] = __float2bfloat16((float)a->host[i]);
        else
            ((float *)raw)[i] = (float)a->host[i];
        a->host[i] = a->size == 2 ? (double)__bfloat162float(((__nv_bfloat16 *)raw)[i])
                                  : (double)((float *)raw)[i];
    }
    CUDA_CHECK(cudaMemcpy(a->device, raw, a->n * a->size, cudaMemcpyHostToDevice));
    free(raw);
}

// array_down: copy the device's numbers to the host.
static inline void array_down(Array *a)
{
    char *raw = (char *)alloc_zero(a->n, a->size, "array");
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(raw, a->device, a->n * a->size, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < a->n; i++)
        a->host[i] = a->size == 2 ? (double)__bfloat162float(((__nv_bfloat16 *)raw)[i])
                                  : (double)((float *)raw)[i];
    free(raw);
}

// array_free: give the memory back.
static inline void array_free(Array *a)
{
    CUDA_CHECK(cudaFree(a->device));
    free(a->host);
}

// head_of: to (T,HS) = a head's part of x, which starts at x and has rows `pitch` apart; back: that
// part of x = to.
static inline void head_of(double *to, double *x, size_t pitch, size_t T, size_t HS, int back)
{
    for (size_t i = 0; i < T * HS; i++) {
        double *at = x + i / HS * pitch + i % HS;
        *(back ? at : to + i) = *(back ? to + i : at);
    }
}

// array_compare: what is on the device with ref, within the bound.
static inline Comparison array_compare(Array *got, const double *ref, double bound)
{
    array_down(got);
    return compare(got->host, 8, ref, 8, got->n, bound, 0);
}

#endif
