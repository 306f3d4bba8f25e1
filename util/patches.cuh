// patches.cuh: what a model reads of a batch on the GPU: patches.h, which says what is computed.
// Patches are rounded to floatX for matrix products. Included before a trainer's [mix]: it calls
// what [layers] has.
#ifndef SEQ_UTIL_PATCHES_CUH
#define SEQ_UTIL_PATCHES_CUH

#include "sums.cuh"

// From [layers]:
template <typename X>
static void matmul_residual(X *out, const X *add, const floatX *inp, const floatX *weight,
                            const X *bias, size_t N, size_t C, size_t OC, cudaStream_t stream);
static void matmul_backward_weight(float *dweight, size_t step, float *dbias, float *partial,
                                   const floatX *dout, const floatX *inp, size_t N, size_t C,
                                   size_t OC, size_t pitch, size_t parts, cudaStream_t stream);
static void embed_forward(floatR *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C, cudaStream_t stream);
static void embed_backward(float *dwte, float *dwpe, float *partial, const floatX *dout,
                           const int *tokens, size_t B, size_t T, size_t V, size_t C,
                           cudaStream_t stream);

// patches_kernel: a warp a position: out (B,T,C) = wpe_t, at T-1 plus cls; rounded (B,T,D) =
// patches.
template <int WIDTH>
static __global__ void patches_kernel(floatR *out, floatX *rounded, const float *patches,
                                      const float *cls, const float *wpe, size_t N, size_t T,
                                      size_t D, int C)
{
    const size_t row = row_of_warp();
    const int n = WIDTH ? WIDTH : C;
    if (row >= N)
        return;
    const size_t t = row % T;
    for (int c = threadIdx.x % WARP; c < n; c += WARP)
        out[row * n + c] = (floatR)(wpe[t * n + c] + (t == T - 1 ? cls[c] : 0));
    for (size_t d = threadIdx.x % WARP; d < D; d += WARP)
        rounded[row * D + d] = (floatX)patches[row * D + d];
}

// input_forward: out (B,T,C) = what the first layer reads of the device's batch: see patches.h;
// rounded (B,T,D) = its patches; patch_w (C,D) in floatX.
static inline void input_forward(floatR *out, floatX *rounded, const Device *device,
                                 const float *wte, const floatX *patch_w, const float *cls,
                                 const float *wpe, size_t B, size_t T, size_t C,
                                 cudaStream_t stream)
{
    const size_t N = B * T, D = device->D;
    if (!D) {
        embed_forward(out, device->inputs, wte, wpe, B, T, C, stream);
        return;
    }
    LAUNCH_ROWS(patches_kernel, N, C, stream, out, rounded, device->patches, cls, wpe, N, T, D,
                (int)C);
    matmul_residual<floatR>(out, out, rounded, patch_w, NULL, N, D, C, stream);
}

// position_sums_kernel: dwpe (T,C) += and, at T-1, dcls (C) += the sum over the batch of dout
// (B,T,C); a thread owns an element.
static __global__ void position_sums_kernel(float *dwpe, float *dcls, const floatX *dout, size_t B,
                                            size_t T, size_t C)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    float sum = 0;
    if (i >= T * C)
        return;
#pragma unroll 8
    for (size_t b = 0; b < B; b++)
        sum += (float)dout[b * T * C + i];
    dwpe[i] += sum;
    if (i / C == T - 1)
        dcls[i % C] += sum;
}

// input_scratch: elements of scratch that input_backward needs.
static inline size_t input_scratch(size_t N, size_t V, size_t C, size_t D)
{
    return D ? slices_of(N, C * D) * C * D : token_scratch(N, V, C);
}

// input_backward: dwte (V,C) +=, or dpatch_w (C,D) += and dcls (C) +=; dwpe (T,C) +=; from dout
// (B,T,C), the batch on the device and the forward's rounded patches. partial (input_scratch):
// scratch.
static inline void input_backward(float *dwte, float *dpatch_w, float *dcls, float *dwpe,
                                  float *partial, const floatX *dout, const floatX *rounded,
                                  const Device *device, size_t B, size_t T, size_t V, size_t C,
                                  cudaStream_t stream)
{
    const size_t D = device->D;
    if (!D) {
        embed_backward(dwte, dwpe, partial, dout, device->inputs, B, T, V, C, stream);
        return;
    }
    matmul_backward_weight(dpatch_w, 0, NULL, partial, dout, rounded, B * T, D, C, C, 1, stream);
    LAUNCH(position_sums_kernel, (T * C + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0,
           stream, dwpe, dcls, dout, B, T, C);
}

#endif
