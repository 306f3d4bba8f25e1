// tasks.h: synthetic tasks, made on the fly. A task is one row of the table TASKS and three
// functions: its shape (how long, how many symbols), one sequence of it, and the score of one
// prediction.
//
// Every sequence is a pure function of (seed, stream number): training draws a fresh one each time,
// a resumed run sees the ones it would have seen, and the evaluation set is disjoint from all of
// them. A target of IGNORE (-1) is not trained on and not scored.
#ifndef SEQ_DATA_TASKS_H
#define SEQ_DATA_TASKS_H

#include "../util/check.h"
#include "../util/options.h"
#include "../util/rng.h"

enum { IGNORE = -1 };

// What the tasks can be told; each task reads the fields it knows.
typedef struct {
    int string_size; // copying: letters in a string
} TaskOptions;

typedef struct {
    size_t T;      // tokens in a sequence
    size_t V;      // symbols
    size_t prompt; // leading tokens given when decoding; the model's own output follows
    int causal;    // 1: the targets stand in the inputs, so a bidirectional model would read them
    const char *size_name; // what RESULT calls the size of the task, and the size
    int size;
} TaskShape;

typedef struct {
    const char *name, *help;
    const char *symbols; // one printable character a token
    TaskShape (*shape)(const TaskOptions *options);
    void (*fill)(const TaskOptions *options, uint64_t seed, uint64_t stream, int *inputs,
                 int *targets);
    double (*score)(const int *targets, const int *predictions, size_t T);
} Task;

// ---- copying [CausalRN paper, section 4]: repeat a random string after a separator

enum { COPY_BOS, COPY_SEP, COPY_EOS, COPY_LETTER, COPY_LETTERS = 26, COPY_VOCAB = 29 };

#ifndef COPYING_CAUSAL // dev/test_cuda.sh makes it 0 to compare BiRN on CPU and GPU
#define COPYING_CAUSAL 1
#endif

// copying_shape: T = 2 (S + 1), V = 29; the prompt is BOS, the string and SEP.
static inline TaskShape copying_shape(const TaskOptions *options)
{
    size_t S = (size_t)options->string_size;
    TaskShape shape = {2 * (S + 1), COPY_VOCAB, S + 2, COPYING_CAUSAL, "string_size",
                       options->string_size};
    return shape;
}

// copying_fill: inputs (T) = BOS s_1..s_S SEP s_1..s_S; targets (T) = IGNORE over BOS and the
// string, then s_1..s_S, EOS. Letters are uniform. [CausalRN paper, section 4; the authors' code]
static inline void copying_fill(const TaskOptions *options, uint64_t seed, uint64_t stream,
                                int *inputs, int *targets)
{
    int S = options->string_size;
    inputs[0] = COPY_BOS;
    inputs[S + 1] = COPY_SEP;
    for (int i = 0; i <= S; i++)
        targets[i] = IGNORE;
    for (int i = 0; i < S; i++) {
        int letter = COPY_LETTER + (int)rand_below(seed, stream, (uint64_t)i, COPY_LETTERS);
        inputs[1 + i] = inputs[S + 2 + i] = targets[S + 1 + i] = letter;
    }
    targets[2 * S + 1] = COPY_EOS;
}

// copying_score: accuracy of one sequence: 0 if the last prediction is not EOS or EOS is predicted
// earlier at a supervised position, otherwise the fraction of the letters that is right.
static inline double copying_score(const int *targets, const int *predictions, size_t T)
{
    size_t right = 0, letters = 0;
    if (predictions[T - 1] != COPY_EOS)
        return 0;
    for (size_t t = 0; t + 1 < T; t++) {
        if (targets[t] == IGNORE)
            continue;
        if (predictions[t] == COPY_EOS)
            return 0;
        letters++;
        right += predictions[t] == targets[t];
    }
    return letters ? (double)right / (double)letters : 1;
}

// ---- the table

static const Task TASKS[] = {
    {"copying", "repeat a random string of letters", "^|$abcdefghijklmnopqrstuvwxyz", copying_shape,
     copying_fill, copying_score},
};

// task_options: add the options of tasks to the command line. The words of --task are the names of
// TASKS in its order.
static inline void task_options(Options *options, int *task, TaskOptions *o)
{
    const Option rows[] = {
        {"task", OPT_CHOICE, task, "copying", 0, 0, "copying", DEFINES_DATA, "what to learn"},
        {"string-size", OPT_INT, &o->string_size, "16", 1, 1 << 20, "letters", DEFINES_DATA,
         "copying: letters in a string; T = 2 (letters + 1)"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

// One batch: what the model reads, what it should say and what it says.
typedef struct {
    size_t B, T;
    int *inputs, *targets, *predictions; // (B,T)
} Batch;

// batch_alloc: room for B sequences of T tokens.
static inline void batch_alloc(Batch *batch, size_t B, size_t T)
{
    batch->B = B;
    batch->T = T;
    batch->inputs = (int *)alloc_zero(size_mul(B, T, "batch"), sizeof(int), "batch");
    batch->targets = (int *)alloc_zero(B * T, sizeof(int), "batch");
    batch->predictions = (int *)alloc_zero(B * T, sizeof(int), "batch");
}

// batch_free: give the memory back.
static inline void batch_free(Batch *batch)
{
    free(batch->inputs);
    free(batch->targets);
    free(batch->predictions);
}

// batch_check: die over an input outside 0..V-1 or a target that is neither that nor IGNORE; warn,
// once, of a batch whose targets are all ignored: its loss is 0 and so is its gradient.
static inline void batch_check(const Batch *batch, size_t V)
{
    static int warned;
    size_t T = batch->T, supervised = 0;
    for (size_t i = 0; i < batch->B * T; i++) {
        int input = batch->inputs[i], target = batch->targets[i];
        supervised += target != IGNORE;
        if (input < 0 || (size_t)input >= V)
            die(EXIT_DATA, "batch row %zu, position %zu: expected a token from 0 to %zu, got %d",
                i / T, i % T, V - 1, input);
        if (target != IGNORE && (target < 0 || (size_t)target >= V))
            die(EXIT_DATA,
                "batch row %zu, position %zu: expected a target from 0 to %zu or %d for none, "
                "got %d",
                i / T, i % T, V - 1, IGNORE, target);
    }
    if (!supervised && !warned++)
        warn("every target of a batch is ignored (%d): its loss is 0, it teaches nothing", IGNORE);
}

// batch_targets: how many targets are trained on.
static inline double batch_targets(const Batch *batch)
{
    size_t n = 0;
    for (size_t i = 0; i < batch->B * batch->T; i++)
        n += batch->targets[i] != IGNORE;
    return (double)n;
}

// task_batch: fill inputs and targets with sequences number * B to number * B + B - 1 of the family
// `stream` (STREAM_TRAIN or STREAM_EVAL) under `seed`. The result does not depend on the threads.
static inline void task_batch(const Task *task, const TaskOptions *options, uint64_t seed,
                              uint64_t stream, long number, Batch *batch)
{
    size_t B = batch->B, T = batch->T;
#pragma omp parallel for
    for (size_t b = 0; b < B; b++)
        task->fill(options, seed, stream + (uint64_t)number * B + b, batch->inputs + b * T,
                   batch->targets + b * T);
}

// task_score: mean score of the first B predicted sequences.
static inline double task_score(const Task *task, const Batch *batch, size_t B)
{
    double sum = 0;
    for (size_t b = 0; b < B; b++)
        sum += task->score(batch->targets + b * batch->T, batch->predictions + b * batch->T,
                           batch->T);
    return sum / (double)B;
}

// task_text: tokens (n) as printable characters in text (size), always ending in 0.
static inline void task_text(const Task *task, const int *tokens, size_t n, char *text, size_t size)
{
    size_t i = 0, V = strlen(task->symbols);
    for (; i < n && i + 1 < size; i++)
        text[i] = tokens[i] >= 0 && (size_t)tokens[i] < V ? task->symbols[tokens[i]] : '?';
    text[i] = 0;
}

// task_show: print one decoded sequence beside its prompt; inputs (T), predictions (T).
static inline void task_show(const Task *task, const TaskOptions *options, const int *inputs,
                             const int *predictions)
{
    TaskShape shape = task->shape(options);
    char *text = (char *)alloc_zero(shape.T + 1, 1, "text");
    task_text(task, inputs, shape.prompt, text, shape.T + 1);
    printf("prompt  %s\n", text);
    task_text(task, predictions + shape.prompt - 1, shape.T - shape.prompt + 1, text, shape.T + 1);
    printf("decoded %s\n", text);
    free(text);
}

#endif
