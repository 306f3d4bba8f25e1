// patches.h: what a model reads of a batch: tokens, or an image's patches and then <CLS>.
//
//   x_t = wte[token_t] + wpe_t        x_t = W_patch patch_t + wpe_t,  x_{T-1} = cls + wpe_{T-1}
//
// Included by train_X.c after `float` may have become double, and before its [mix]: it calls what
// [layers] has. [CausalRN paper, Fig. 7; spec: no bias]
#ifndef SEQ_UTIL_PATCHES_H
#define SEQ_UTIL_PATCHES_H

#include "../data/batch.h"

// From [layers]:
static void gemm(float *out, const float *x, size_t x_row, size_t x_col, const float *y,
                 size_t y_row, size_t y_col, size_t M, size_t N, size_t K, int accumulate);
static void embed_forward(float *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C);
static void embed_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, size_t B,
                           size_t T, size_t C);

// input_forward: out (B,T,C) = what the first layer reads of a batch. Of tokens, D = 0: see
// embed_forward. Of images: patches (B,T,D) = the batch's, 0 where <CLS> stands, and
//   out_bt = patch_w patches_bt + wpe_t, and at T-1 cls + wpe_{T-1}
// wte (V,C) or patch_w (C,D), cls (C); wpe (T,C).
static void input_forward(float *out, float *patches, const Batch *batch, const float *wte,
                          const float *patch_w, const float *cls, const float *wpe, size_t C)
{
    const size_t T = batch->T, N = batch->B * T, D = batch->D;
    if (!D) {
        embed_forward(out, batch->inputs, wte, wpe, batch->B, T, C);
        return;
    }
    for (size_t i = 0; i < N * D; i++)
        patches[i] = batch->patches[i];
    gemm(out, patches, D, 1, patch_w, 1, D, N, C, D, 0);
#pragma omp parallel for if (N * C > 65536)
    for (size_t i = 0; i < N; i++)
        for (size_t c = 0; c < C; c++)
            out[i * C + c] += wpe[i % T * C + c] + (i % T == T - 1 ? cls[c] : 0);
}

// input_backward: dwte (V,C) +=, or dpatch_w (C,D) += and dcls (C) +=; dwpe (T,C) +=; from dout
// (B,T,C), the batch and the forward's patches. Threads own elements: sums have one order.
static void input_backward(float *dwte, float *dpatch_w, float *dcls, float *dwpe,
                           const float *dout, const float *patches, const Batch *batch, size_t C)
{
    const size_t B = batch->B, T = batch->T, D = batch->D;
    if (!D) {
        embed_backward(dwte, dwpe, dout, batch->inputs, B, T, C);
        return;
    }
    gemm(dpatch_w, dout, 1, C, patches, D, 1, C, D, B * T, 1); // <CLS>'s patches are 0
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < T * C; i++) {
        double sum = 0;
        for (size_t b = 0; b < B; b++)
            sum += dout[b * T * C + i];
        dwpe[i] += sum;
        if (i / C == T - 1)
            dcls[i % C] += sum;
    }
}

#endif
