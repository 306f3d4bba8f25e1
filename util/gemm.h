// gemm.h: matrix products of cuBLASLt, the one thing on the GPU that is not written out here.
#ifndef SEQ_UTIL_GEMM_H
#define SEQ_UTIL_GEMM_H

#include "cuda.h"
#include <algorithm>
#include <cublasLt.h>

// CUBLAS_CHECK(call): die with file, line, call and reason unless it succeeded.
#define CUBLAS_CHECK(call) cublas_check((call), __FILE__, __LINE__, #call)

// cublas_check: see CUBLAS_CHECK.
static inline void cublas_check(cublasStatus_t status, const char *file, int line, const char *call)
{
    if (status != CUBLAS_STATUS_SUCCESS)
        die(EXIT_MEMORY, "%s:%d: %s: %s", file, line, call, cublasLtGetStatusString(status));
}

// A matrix product out (M,N) = x (M,K) y (K,N) + bias + add, rows of each ld apart; `batch` of
// them, their pointers a step apart.
typedef struct {
    void *out;           // of `type`
    const void *add;     // NULL, or laid out as out, or out itself
    const void *bias;    // NULL, or (N), of `type`
    const void *x, *y;   // of `in`; stored as (K,M) if x_t, as (N,K) if y_t
    cudaDataType_t type, in; // CUDA_R_32F or CUDA_R_16BF
    int x_t, y_t;
    size_t M, N, K, ld_out, ld_x, ld_y, batch, out_step, x_step, y_step;
} Gemm;

enum { GEMM_WORKSPACE = 32 << 20 };
static cublasLtHandle_t gemm_handle;
static inline void *gemm_workspace;

// gemm_size: bytes of an element.
static inline size_t gemm_size(cudaDataType_t type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

// gemm_start: what gemm needs: the handle and 32 MiB.
static inline void gemm_start(void)
{
    CUBLAS_CHECK(cublasLtCreate(&gemm_handle));
    gemm_workspace = device_new(GEMM_WORKSPACE, "matrix product workspace");
}

// gemm_layout: a row-major matrix (rows,n), transposed if t: to cuBLAS one of columns.
static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType_t type, size_t rows, size_t n, int t,
                                          size_t ld, size_t batch, size_t step)
{
    cublasLtMatrixLayout_t layout;
    const int count = (int)batch;
    const int64_t stride = (int64_t)step;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, t ? rows : n, t ? n : rows,
                                            (int64_t)ld));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof count));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(
        layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    return layout;
}

// gemm_alignment: bytes to which both p and a step of `step` bytes are aligned, at most 256.
static inline uint32_t gemm_alignment(const void *p, size_t step)
{
    const uintptr_t bits = (uintptr_t)p | step | 256;
    return (uint32_t)(bits & -bits);
}

#define GEMM_SET(attribute, value) \
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_##attribute, &(value), \
                                                sizeof(value)))
#define GEMM_WISH(attribute, value) \
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_##attribute, \
                                                      &(value), sizeof(value)))

// gemm: see Gemm. fp32 sums, no TF32. To cuBLAS, which thinks in columns, out^T = y^T x^T. Shapes
// and addresses alone choose the algorithm, and none may add atomically: same call, same bits.
// Dies where cuBLASLt has no algorithm.
static inline void gemm(const Gemm *g, cudaStream_t stream)
{
    const cublasOperation_t ops[] = {CUBLAS_OP_N, CUBLAS_OP_T};
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const size_t size = gemm_size(g->type), workspace = GEMM_WORKSPACE;
    const float alpha = 1, beta = g->add ? 1 : 0;
    const void *add = g->add ? g->add : g->out;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t align_x = gemm_alignment(g->x, g->x_step * gemm_size(g->in));
    const uint32_t align_y = gemm_alignment(g->y, g->y_step * gemm_size(g->in));
    const uint32_t align_add = gemm_alignment(add, g->out_step * size);
    const uint32_t align_out = gemm_alignment(g->out, g->out_step * size);
    const uint32_t align_d = g->bias ? std::min(align_out, gemm_alignment(g->bias, 0)) : align_out;
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    GEMM_SET(TRANSA, ops[g->y_t]);
    GEMM_SET(TRANSB, ops[g->x_t]);
    if (g->bias) {
        GEMM_SET(EPILOGUE, epilogue);
        GEMM_SET(BIAS_DATA_TYPE, g->type);
        GEMM_SET(BIAS_POINTER, g->bias);
    }
    const size_t batch = g->batch ? g->batch : 1;
    cublasLtMatrixLayout_t y = gemm_layout(g->in, g->K, g->N, g->y_t, g->ld_y, batch, g->y_step);
    cublasLtMatrixLayout_t x = gemm_layout(g->in, g->M, g->K, g->x_t, g->ld_x, batch, g->x_step);
    cublasLtMatrixLayout_t out =
        gemm_layout(g->type, g->M, g->N, 0, g->ld_out, batch, g->out_step);
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wish));
    GEMM_WISH(MAX_WORKSPACE_BYTES, workspace);
    GEMM_WISH(REDUCTION_SCHEME_MASK, schemes);
    GEMM_WISH(MIN_ALIGNMENT_A_BYTES, align_y);
    GEMM_WISH(MIN_ALIGNMENT_B_BYTES, align_x);
    GEMM_WISH(MIN_ALIGNMENT_C_BYTES, align_add);
    GEMM_WISH(MIN_ALIGNMENT_D_BYTES, align_d);
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(gemm_handle, desc, y, x, out, out, wish, 1, &found,
                                                &n));
    if (n == 0)
        die(EXIT_MEMORY, "cuBLASLt has no matrix product for (%zu,%zu) times (%zu,%zu)", g->M, g->K,
            g->K, g->N);
    CUBLAS_CHECK(cublasLtMatmul(gemm_handle, desc, &alpha, g->y, y, g->x, x, &beta, add, out,
                                g->out, out, &found.algo, gemm_workspace, workspace, stream));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wish));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(y));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(x));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(out));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    timing_mark(g->x_t ? "gemm, weight gradient" : "gemm", stream);
}

// ---- how fast they are

// gemm_fill_kernel: x (words) = numbers of about 1 without a pattern, one fp32 or two bf16 a word:
// a product of zeros is faster.
static __global__ void gemm_fill_kernel(uint32_t *x, size_t words)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words;
         i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t bits = (uint32_t)(i * 2654435761u) ^ (uint32_t)(i >> 7) * 40503u;
        x[i] = 0x3f003f00u | (bits & 0x80ff80ffu); // both halves, and the whole: 0.5 to 2, any sign
    }
}

// gemm_rate: floating-point operations a second of a product of two matrices of 8192 x 8192 of
// `type`, the median of nine; 0 if they do not fit in memory.
static inline double gemm_rate(cudaDataType_t type, cudaStream_t stream)
{
    const size_t n = 8192, bytes = n * n * gemm_size(type);
    float times[9];
    if (cuda_memory_free() < 4 * bytes)
        return 0;
    char *x = (char *)device_new(bytes, "matrix"), *y = (char *)device_new(bytes, "matrix");
    char *out = (char *)device_new(bytes, "matrix");
    const Gemm g = {.out = out, .x = x, .y = y, .type = type, .in = type, .M = n, .N = n, .K = n,
                    .ld_out = n, .ld_x = n, .ld_y = n};
    cudaEvent_t start, end;
    CUDA_CHECK(cudaDeviceSynchronize()); // device_new's zeros do not come in the stream
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    LAUNCH(gemm_fill_kernel, 1024, 256, 0, stream, (uint32_t *)x, bytes / 4);
    LAUNCH(gemm_fill_kernel, 1024, 256, 0, stream, (uint32_t *)y, bytes / 4);
    gemm(&g, stream);
    for (int i = 0; i < 9; i++) {
        CUDA_CHECK(cudaEventRecord(start, stream));
        gemm(&g, stream);
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&times[i], start, end));
        for (int k = i; k > 0 && times[k] < times[k - 1]; k--) {
            const float t = times[k];
            times[k] = times[k - 1];
            times[k - 1] = t;
        }
    }
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(y));
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return 2.0 * (double)n * (double)n * (double)n / (1e-3 * (double)times[4]);
}

// gemm_print_mfu: print what a step of `flops` operations in `ms` makes of the GPU, beside the rate
// of a large matrix product on it.
static inline void gemm_print_mfu(double flops, double ms, cudaDataType_t type, cudaStream_t stream)
{
    const double rate = gemm_rate(type, stream), ours = flops / (1e-3 * ms);
    if (rate > 0)
        printf("MFU: %.1f TFLOP/s, %.1f%% of the %.0f of a matrix product of 8192 x 8192\n",
               1e-12 * ours, 100 * ours / rate, 1e-12 * rate);
}

#endif
