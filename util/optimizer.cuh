// optimizer.cuh: the section [optimizer] of every train_*.cu: clearing gradients, their norm,
// AdamW, the weights' copies in floatX. All take the weights in pieces (cuda_training.h), a block
// each.
#ifndef SEQ_UTIL_OPTIMIZER_CUH
#define SEQ_UTIL_OPTIMIZER_CUH

#include "warp.cuh"

// ------------------------------------------------------------------------------------------------
// [optimizer] Gradient norm, AdamW.  (ports train_causalrn.c[optimizer])

enum { PIECE_THREADS = 256 }; // of a block, which has a piece of the weights

// zero_kernel: x = 0 in all pieces; a block a piece.
static __global__ void zero_kernel(float *x, const Piece *pieces)
{
    const Piece piece = pieces[blockIdx.x];
    for (int i = threadIdx.x; i < piece.n; i += PIECE_THREADS)
        x[piece.at + i] = 0;
}

// pieces_zero: clear the gradients of all weights.
static inline void pieces_zero(const Device *d)
{
    LAUNCH(zero_kernel, d->pieces.n, PIECE_THREADS, 0, d->stream, (float *)d->weights.grads.base,
           d->pieces.pieces);
}

// copy_kernel: the floatX copies of params; a block a piece.
static __global__ void copy_kernel(const float *params, const Piece *pieces)
{
    const Piece piece = pieces[blockIdx.x];
    for (int i = threadIdx.x; i < piece.n && piece.copy; i += PIECE_THREADS)
        piece.copy[i] = (floatX)params[piece.at + i];
}

// pieces_copy: the floatX copies of all weights that have one.
static inline void pieces_copy(const Device *d)
{
    LAUNCH(copy_kernel, d->pieces.n, PIECE_THREADS, 0, d->stream,
           (const float *)d->weights.params.base, d->pieces.pieces);
}

// squares_kernel: partials (pieces) = the sum of squares of each piece.
static __global__ void squares_kernel(double *partials, const float *grads, const Piece *pieces)
{
    const Piece piece = pieces[blockIdx.x];
    double sum = 0;
    for (int i = threadIdx.x; i < piece.n; i += PIECE_THREADS)
        sum += (double)grads[piece.at + i] * grads[piece.at + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        partials[blockIdx.x] = sum;
}

// norm_kernel: from partials (n), in one block: result->loss *= step->rescale; ->norm = that of the
// rescaled gradient; ->scale = what a gradient is multiplied by: rescale, less where the norm is
// above `clip` (0: never); ->stopped = 1 where loss or norm is not finite.
static __global__ void norm_kernel(StepResult *result, const double *partials,
                                   const StepInput *step, size_t n, double clip)
{
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += partials[i];
    const double rescale = step->rescale, norm = rescale * sqrt(block_sum(sum));
    if (threadIdx.x)
        return;
    result->loss *= rescale;
    result->norm = norm;
    result->scale = rescale * (clip > 0 && norm > clip ? clip / norm : 1);
    if (!isfinite(norm) || !isfinite(result->loss))
        result->stopped = 1; // for good: the host will name the first such step
}

// gradient_norm: root of the sum of squares over all tensors, in double.
static inline void gradient_norm(StepResult *result, const Arena *grads, const Pieces *p,
                                 const StepInput *step, double clip, cudaStream_t stream)
{
    LAUNCH(squares_kernel, p->n, PIECE_THREADS, 0, stream, p->partials, (const float *)grads->base,
           p->pieces);
    LAUNCH(norm_kernel, 1, 1024, 0, stream, result, p->partials, step, p->n, clip);
}

typedef struct {
    float beta1, beta2, rest1, rest2, eps, weight_decay;
} Adam;

// adamw_kernel: see adamw; a block a piece. grad_scale is result->scale; if result->stopped nothing
// changes.
static __global__ void adamw_kernel(float *params, float *m, float *v, const float *grads,
                                    const Piece *pieces, const StepInput *step,
                                    const StepResult *result, Adam adam)
{
    const Piece piece = pieces[blockIdx.x];
    const float rate = (float)(step->lr * piece.lr_scale), scale = (float)result->scale;
    const float over_c1 = (float)step->over_c1, over_c2 = (float)step->over_c2, tiny = 1e-37f;
    const float decay = piece.decay ? adam.weight_decay : 0;
    if (result->stopped)
        return;
    for (int k = threadIdx.x; k < piece.n; k += PIECE_THREADS) {
        const size_t i = piece.at + k;
        const float g = scale * grads[i];
        float m_i = adam.beta1 * m[i] + adam.rest1 * g;
        float v_i = adam.beta2 * v[i] + adam.rest2 * g * g, p = params[i];
        m[i] = m_i = fabsf(m_i) < tiny ? 0 : m_i;
        v[i] = v_i = v_i < tiny ? 0 : v_i;
        params[i] = p -= rate * (m_i * over_c1 / (sqrtf(v_i * over_c2) + adam.eps) + decay * p);
        if (piece.copy)
            piece.copy[k] = (floatX)p;
    }
}

// adamw: one update of every tensor; gradients are first multiplied by grad_scale (clipping):
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  n = step + 1,
//   p -= lr lr_scale ((m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps) + weight_decay p)
// Moments below 1e-37, next to the denormals, which are slow, become 0.  [arXiv 1711.05101]
static inline void adamw(Weights *w, const Training *t, const Pieces *p, const StepInput *step,
                         const StepResult *result, cudaStream_t stream)
{
    const Adam adam = {(float)t->beta1, (float)t->beta2, (float)(1 - t->beta1),
                       (float)(1 - t->beta2), (float)t->adam_eps, (float)t->weight_decay};
    LAUNCH(adamw_kernel, p->n, PIECE_THREADS, 0, stream, (float *)w->params.base,
           (float *)w->m.base, (float *)w->v.base, (const float *)w->grads.base, p->pieces, step,
           result, adam);
}

#endif
