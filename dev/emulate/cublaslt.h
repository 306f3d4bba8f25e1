// cublaslt.h: the part of cuBLASLt that util/gemm.h uses, for emulate.h: a matrix product, each sum
// in double and rounded once. Shapes, strides and the memory behind them are checked.
#ifndef SEQ_DEV_CUBLASLT_H
#define SEQ_DEV_CUBLASLT_H

#include <cublasLt.h>

// A layout: columns one behind the other, each of `rows` elements, ld apart.
struct EmuLayout {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batch;
    int64_t stride;
};

struct EmuProduct {
    cublasOperation_t trans_a, trans_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
    int bias_type;
};

// emu_element_size: bytes.
static size_t emu_element_size(int type)
{
    return type == CUDA_R_32F ? sizeof(float) : sizeof(__nv_bfloat16);
}

// emu_get, emu_put: element i.
static double emu_get(const void *p, int type, size_t i)
{
    return type == CUDA_R_32F ? ((const float *)p)[i]
                              : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}
static void emu_put(void *p, int type, size_t i, double x)
{
    if (type == CUDA_R_32F)
        ((float *)p)[i] = (float)x;
    else
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16((float)x);
}

// emu_in_memory: die unless the matrices that p and its layout describe are device memory.
static void emu_in_memory(const void *p, const EmuLayout &l, const char *what)
{
    const size_t elements = (size_t)(l.batch - 1) * (size_t)l.stride +
                            (l.columns - 1) * (size_t)l.ld + l.rows;
    emu_on_device(p, elements * emu_element_size(l.type), what);
}

// emu_rows: a batch of matrices as floats, op(matrix) without its transposition: element (i,k) of
// matrix n at (n * rows + i) * columns + k.
static std::vector<float> emu_rows(const void *p, const EmuLayout &l, bool trans)
{
    const size_t rows = trans ? l.columns : l.rows, columns = trans ? l.rows : l.columns;
    std::vector<float> out;
    out.reserve((size_t)l.batch * rows * columns);
    for (size_t n = 0; n < (size_t)l.batch; n++)
        for (size_t i = 0; i < rows; i++)
            for (size_t k = 0; k < columns; k++)
                out.push_back((float)emu_get(p, l.type, n * (size_t)l.stride +
                                             (trans ? k + i * (size_t)l.ld
                                                    : i + k * (size_t)l.ld)));
    return out;
}

// emu_gemm: D = alpha op(A) op(B) + beta C + bias, D (M,N) as columns, a bias for each row.
static void emu_gemm(const EmuProduct &p, float alpha, const void *A, const EmuLayout &a,
                     const void *B, const EmuLayout &b, float beta, const void *C, void *D,
                     const EmuLayout &d)
{
    const bool ta = p.trans_a == CUBLAS_OP_T, tb = p.trans_b == CUBLAS_OP_T;
    const size_t M = d.rows, N = d.columns, K = ta ? a.rows : a.columns;
    const std::vector<float> x = emu_rows(A, a, ta), y = emu_rows(B, b, !tb);
    for (size_t n = 0; n < (size_t)d.batch; n++)
        for (size_t j = 0; j < N; j++)
            for (size_t i = 0; i < M; i++) {
                const float *xi = &x[(n * M + i) * K], *yj = &y[(n * N + j) * K];
                const size_t at = n * (size_t)d.stride + i + j * (size_t)d.ld;
                double sum = 0;
                for (size_t k = 0; k < K; k++)
                    sum += (double)xi[k] * yj[k];
                sum *= alpha;
                sum += beta != 0 ? beta * emu_get(C, d.type, at) : 0;
                sum += p.bias ? emu_get(p.bias, d.type, i) : 0;
                emu_put(D, d.type, at, sum);
            }
}

// emu_attribute: *field = *value; dies if their sizes differ.
template <class X> static void emu_attribute(X *field, const void *value, size_t bytes)
{
    if (bytes != sizeof *field)
        emu_fail("cuBLASLt", "an attribute of the wrong size");
    memcpy(field, value, bytes);
}

// ---- the calls, with cuBLASLt's names and contracts

extern "C" {
const char *cublasLtGetStatusString(cublasStatus_t)
{
    return "the emulated cuBLASLt refuses it";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = (cublasLtHandle_t)&emu_queue;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t columns, int64_t ld)
{
    *layout = (cublasLtMatrixLayout_t) new EmuLayout{type, rows, columns, ld, 1, 0};
    const bool known = type == CUDA_R_32F || type == CUDA_R_16BF;
    return known && (int64_t)rows <= ld ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes)
{
    EmuLayout *l = (EmuLayout *)layout;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: emu_attribute(&l->batch, value, bytes); break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        emu_attribute(&l->stride, value, bytes);
        break;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete (EmuLayout *)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *desc = (cublasLtMatmulDesc_t) new EmuProduct{CUBLAS_OP_N, CUBLAS_OP_N,
                                                  CUBLASLT_EPILOGUE_DEFAULT, NULL, -1};
    return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS
                                                                : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    EmuProduct *p = (EmuProduct *)desc;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: emu_attribute(&p->trans_a, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_TRANSB: emu_attribute(&p->trans_b, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: emu_attribute(&p->epilogue, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: emu_attribute(&p->bias, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: emu_attribute(&p->bias_type, value, bytes); break;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete (EmuProduct *)desc;
    return CUBLAS_STATUS_SUCCESS;
}

// Preferences choose among algorithms; here there is one.
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *wish)
{
    *wish = (cublasLtMatmulPreference_t)&emu_queue;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t *, int *found)
{
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a_layout, const void *B,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *C,
                              cublasLtMatrixLayout_t, void *D, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t)
{
    const EmuProduct p = *(EmuProduct *)desc;
    const EmuLayout a = *(EmuLayout *)a_layout, b = *(EmuLayout *)b_layout;
    const EmuLayout d = *(EmuLayout *)d_layout;
    const bool ta = p.trans_a == CUBLAS_OP_T, tb = p.trans_b == CUBLAS_OP_T;
    const float alpha_now = *(const float *)alpha, beta_now = *(const float *)beta;
    if (d.rows != (ta ? a.columns : a.rows) || d.columns != (tb ? b.rows : b.columns) ||
        (ta ? a.rows : a.columns) != (tb ? b.columns : b.rows) || a.batch != b.batch ||
        a.batch != d.batch || a.type != b.type)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p.bias && (p.epilogue != CUBLASLT_EPILOGUE_BIAS || p.bias_type != (int)d.type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    emu_in_memory(A, a, "matrix product, first factor");
    emu_in_memory(B, b, "matrix product, second factor");
    emu_in_memory(D, d, "matrix product, result");
    if (beta_now != 0)
        emu_in_memory(C, d, "matrix product, what is added");
    if (p.bias)
        emu_on_device(p.bias, d.rows * emu_element_size(d.type), "matrix product, bias");
    emu_queue_push([=] { emu_gemm(p, alpha_now, A, a, B, b, beta_now, C, D, d); });
    return CUBLAS_STATUS_SUCCESS;
}
}

#endif
