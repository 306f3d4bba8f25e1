// cuda_training.h: what a training run on the GPU needs around its kernels: the number type, the
// weights on the device and their copies for matrix products, and batches on their way to it.
//
// The host makes batch i + 1 while the GPU works on batch i: each has a slot of pinned memory, and
// nothing waits for a step but whoever reads its result.
#ifndef SEQ_UTIL_CUDA_TRAINING_H
#define SEQ_UTIL_CUDA_TRAINING_H

#include "../data/tasks.h"
#include "gemm.h"
#include "training.h"

// floatX: weights in matrix products, and activations.
#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#define FLOATX_TYPE CUDA_R_16BF
#define PRECISION_NAME "BF16"
#else
typedef float floatX;
#define FLOATX_TYPE CUDA_R_32F
#define PRECISION_NAME "FP32"
#endif

// floatR: the residual stream: fp32, but where a trainer says RESIDUAL_X, and why, floatX.
#ifdef RESIDUAL_X
typedef floatX floatR;
#else
typedef float floatR;
#endif

// What the host tells the device about a step.
typedef struct {
    double lr, over_c1, over_c2; // rate; 1 / (1 - beta^(step + 1)) for the two moments
    double unit;                 // what a target counts: 1 / targets that count, 0 if none does
    double rescale;              // what loss and gradient of the update are multiplied by
    int first;                   // of the update's batches: its loss does not add to another's
} StepInput;

// What the device tells the host. stopped: this or an earlier step had a loss or norm that was not
// finite, and no weight changes any more.
typedef struct {
    double loss, norm, scale;
    int stopped;
} StepResult;

// A batch on its way: host memory that the GPU copies from and to, all of it whatever the batch's
// own B and T.
enum { SLOTS = 2 };
typedef struct {
    StepInput *input; // followed by the batch's inputs and targets
    StepResult *result; // followed by its predictions
    Batch batch;
    cudaEvent_t done;
    double lr, acc; // accuracy: sum over the update's batches before this one
} Slot;

// All weights in pieces of at most PIECE elements, one a block: where each starts in the arenas
// (elements), its copy in floatX (NULL: none), and how it is trained.
enum { PIECE = 2048 };
typedef struct {
    size_t at;
    floatX *copy;
    double lr_scale;
    int n, decay;
} Piece;

typedef struct {
    Piece *pieces;    // (n) on the device
    double *partials; // (n) on the device
    size_t n;
} Pieces;

// Where the floatX copies of a tensor are: its runs of `run` elements stand `step` elements apart.
typedef struct {
    const float *of; // on the device
    floatX *copy;
    size_t run, step;
} WeightCopy;

// The GPU's side of a run.
typedef struct {
    const char *name; // of the GPU
    cudaStream_t stream;
    cudaGraphExec_t graph, update; // a training step; with --accumulate one batch, then the update
    Weights weights;       // laid out as the host's
    Pieces pieces;
    StepInput *input;
    StepResult *result;
    size_t tokens;                       // B T: room for the largest batch
    int *inputs, *targets, *predictions; // (tokens), after *input and *result
    size_t D;                            // numbers of a patch, set before the start; 0: tokens
    float *patches;                      // (tokens,D): see device_patches
    Slot slots[SLOTS];
    long started, ended; // training steps given to the device, and taken back
    double ended_at;     // seconds
    float *logits;       // on the host: see device_logits
} Device;

// device_input_bytes: what goes to the device with a batch of n tokens.
static inline size_t device_input_bytes(size_t n)
{
    return sizeof(StepInput) + 2 * n * sizeof(int);
}

// device_result_bytes: what comes back.
static inline size_t device_result_bytes(size_t n)
{
    return sizeof(StepResult) + n * sizeof(int);
}

// device_bytes: device memory that device_start takes for these weights and B sequences of T.
static inline size_t device_bytes(const Weights *w, size_t B, size_t T)
{
    return 4 * w->params.bytes + GEMM_WORKSPACE + device_input_bytes(B * T) +
           device_result_bytes(B * T);
}

// device_start: the device's weights (with `params` and `grads` the structs of pointers to fill),
// room for batches of B sequences of T tokens, or of fewer that are longer, a stream, and what gemm
// needs.
static inline void device_start(Device *d, const Weights *host, void *params, void *grads, size_t B,
                                size_t T)
{
    d->weights.params = mirror_new(&host->params, params);
    d->weights.grads = mirror_new(&host->grads, grads);
    d->weights.m = mirror_new(&host->m, NULL);
    d->weights.v = mirror_new(&host->v, NULL);
    d->input = (StepInput *)device_new(device_input_bytes(B * T), "batch");
    d->result = (StepResult *)device_new(device_result_bytes(B * T), "batch");
    d->tokens = B * T;
    d->inputs = (int *)(d->input + 1);
    d->targets = d->inputs + B * T;
    d->predictions = (int *)(d->result + 1);
    for (int i = 0; i < SLOTS; i++) {
        Slot *s = &d->slots[i];
        s->input = (StepInput *)pinned_new(device_input_bytes(B * T), "batch");
        s->result = (StepResult *)pinned_new(device_result_bytes(B * T), "batch");
        int *inputs = (int *)(s->input + 1);
        s->batch = {B, T, inputs, inputs + B * T, (int *)(s->result + 1), B};
        CUDA_CHECK(cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    gemm_start();
}

// device_patches: of a started device whose D is not 0: batches have patches, which go to `patches`
// (tokens,D) on it.
static inline void device_patches(Device *d, float *patches)
{
    d->patches = patches;
    for (int i = 0; i < SLOTS && d->D; i++)
        d->slots[i].batch.patches =
            (float *)pinned_new(size_mul(d->tokens, d->D * sizeof(float), "patches"), "patches");
}

// device_pieces: cut the device's weights into pieces; the n rows of `copies` say which tensors
// have copies.
static inline void device_pieces(Device *d, const WeightCopy *copies, int n)
{
    const Arena *a = &d->weights.params;
    Pieces *p = &d->pieces;
    Piece *pieces = NULL;
    for (int counting = 1; counting >= 0; counting--) {
        p->n = 0;
        for (int k = 0; k < a->n; k++) {
            const Tensor *row = &a->table[k];
            const size_t size = tensor_size(row);
            WeightCopy copy = {NULL, NULL, size, 0};
            for (int i = 0; i < n && size; i++)
                if (copies[i].of == arena_data(a, k))
                    copy = copies[i];
            for (size_t i = 0, length; i < size; i += length, p->n++) {
                length = copy.run - i % copy.run;
                length = length < PIECE ? length : (size_t)PIECE;
                floatX *to = copy.copy ? copy.copy + i / copy.run * copy.step + i % copy.run : NULL;
                if (!counting)
                    pieces[p->n] = {a->start[k] / sizeof(float) + i, to, row->lr_scale, (int)length,
                                    row->decay};
            }
        }
        if (counting)
            pieces = (Piece *)alloc_zero(p->n, sizeof *pieces, "pieces");
    }
    p->pieces = (Piece *)device_new(p->n * sizeof *pieces, "pieces");
    p->partials = (double *)device_new(p->n * sizeof(double), "partial sums");
    CUDA_CHECK(cudaMemcpy(p->pieces, pieces, p->n * sizeof *pieces, cudaMemcpyHostToDevice));
    free(pieces);
}

// device_weights_up: the device's weights, gradients and moments = the host's.
static inline void device_weights_up(Device *d, const Weights *host)
{
    mirror_up(&d->weights.params, &host->params);
    mirror_up(&d->weights.grads, &host->grads);
    mirror_up(&d->weights.m, &host->m);
    mirror_up(&d->weights.v, &host->v);
    CUDA_CHECK(cudaDeviceSynchronize()); // the copies above are not in the stream
}

// device_weights_down: the host's weights, gradients and moments = the device's.
static inline void device_weights_down(Weights *host, const Device *d)
{
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
    mirror_down(&host->params, &d->weights.params);
    mirror_down(&host->grads, &d->weights.grads);
    mirror_down(&host->m, &d->weights.m);
    mirror_down(&host->v, &d->weights.v);
}

// device_logits: a copy on the host of the device's logits (D,V), rows `pitch` apart there, D <=
// most; waits for the stream. The next call overwrites it.
static inline const float *device_logits(Device *d, const float *logits, size_t D, size_t V,
                                         size_t pitch, size_t most)
{
    if (!d->logits)
        d->logits = (float *)alloc_zero(most * V, sizeof(float), "logits");
    CUDA_CHECK(cudaMemcpy2DAsync(d->logits, V * sizeof(float), logits, pitch * sizeof(float),
                                 V * sizeof(float), D, cudaMemcpyDeviceToHost, d->stream));
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
    return d->logits;
}

// slot_up: the slot's batch to the device.
static inline void slot_up(const Slot *slot, Device *d)
{
    CUDA_CHECK(cudaMemcpyAsync(d->input, slot->input, device_input_bytes(d->tokens),
                               cudaMemcpyHostToDevice, d->stream));
    if (d->D)
        CUDA_CHECK(cudaMemcpyAsync(d->patches, slot->batch.patches,
                                   d->tokens * d->D * sizeof(float), cudaMemcpyHostToDevice,
                                   d->stream));
}

// slot_down: loss, norm and predictions back to the slot.
static inline void slot_down(const Slot *slot, const Device *d)
{
    CUDA_CHECK(cudaMemcpyAsync(slot->result, d->result, device_result_bytes(d->tokens),
                               cudaMemcpyDeviceToHost, d->stream));
}

#endif
