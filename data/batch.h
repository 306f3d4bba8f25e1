// batch.h: batches of a task's sequences, whatever the task, and evaluations: loss and score of
// many batches, and the curve of accuracy by length.
#ifndef SEQ_DATA_BATCH_H
#define SEQ_DATA_BATCH_H

#include "../util/training.h"
#include "task.h"

// ---- batches

// task_eval_rows: sequences in a batch of the evaluation, where B are trained on together: as many
// as fit its memory, at most B. Dies if that is none.
static inline size_t task_eval_rows(TaskShape shape, size_t B)
{
    const size_t rows = B * shape.T / shape.eval_T;
    if (!rows)
        die(EXIT_USAGE, "--batch-size %zu: an evaluation reads sequences of %zu tokens, a batch "
            "has %zu\nhint: --batch-size %zu, or a shorter --eval-max-length", B, shape.eval_T,
            B * shape.T, (shape.eval_T + shape.T - 1) / shape.T);
    return rows < B ? rows : B;
}

// task_longest: the longest sequence a model reads, of training or of evaluation.
static inline size_t task_longest(TaskShape shape)
{
    return shape.T > shape.eval_T ? shape.T : shape.eval_T;
}

// One batch: what the model reads, what it should say and what it says. B and T are those of the
// sequences in it; rows is the B it was made for. Of images the inputs are 0 and patches are read.
typedef struct {
    size_t B, T;
    int *inputs, *targets, *predictions; // (B,T)
    size_t rows, D; // D: numbers of a patch, 0: there are tokens
    float *patches; // (B,T,D), made by the first task_batch if nobody did
} Batch;

// batch_alloc: room for B sequences of T tokens.
static inline void batch_alloc(Batch *batch, size_t B, size_t T)
{
    batch->B = batch->rows = B;
    batch->T = T;
    batch->D = 0;
    batch->patches = NULL;
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
    free(batch->patches);
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

// task_patch: numbers of a patch of the task's images; 0: it has tokens.
static inline size_t task_patch(const Task *task, const TaskOptions *options)
{
    return task->fill ? 0 : images_D(&options->images);
}

// image_sequence: patches (T,D) = those of an image, then zeros where <CLS> stands, whose target is
// the label; inputs (T) = 0, other targets (T) = IGNORE. Past the last image: zeros, and no target.
static inline void image_sequence(const Images *im, uint64_t seed, uint64_t stream, float *patches,
                                  int *inputs, int *targets)
{
    const size_t T = images_P(im) + 1, D = images_D(im);
    memset(patches, 0, T * D * sizeof *patches);
    for (size_t t = 0; t < T; t++) {
        inputs[t] = 0;
        targets[t] = IGNORE;
    }
    targets[T - 1] = images_fill(im, seed, stream, patches); // -1 is IGNORE
}

// task_batch: fill inputs and targets with sequences number * B to number * B + B - 1 of the family
// `stream` (STREAM_TRAIN or STREAM_EVAL) under `seed`; B and T change with the family where it has
// a length of its own. The result does not depend on the threads. Dies if a sequence has more
// targets than the task's shape says: who counts on that would leave the others out.
static inline void task_batch(const Task *task, const TaskOptions *options, uint64_t seed,
                              uint64_t stream, long number, Batch *batch)
{
    const TaskShape shape = task->shape(options);
    if (shape.eval_T != shape.T) {
        const int evaluate = stream >= STREAM_EVAL;
        batch->B = evaluate ? task_eval_rows(shape, batch->rows) : batch->rows;
        batch->T = evaluate ? shape.eval_T : shape.T;
    }
    const size_t B = batch->B, T = batch->T, D = batch->D = task_patch(task, options);
    if (D && !batch->patches)
        batch->patches = (float *)alloc_zero(size_mul(B, T * D, "batch"), sizeof(float), "batch");
    if (task->fill ? !task->symbols && !options->text.train.n && !options->text.val.n : !D)
        die(EXIT_FAIL, "--task %s: a batch is asked for before task_open", task->name);
    size_t most = 0;
#pragma omp parallel for reduction(max : most)
    for (size_t b = 0; b < B; b++) {
        const uint64_t own = stream + (uint64_t)number * B + b;
        int *inputs = batch->inputs + b * T, *targets = batch->targets + b * T;
        if (D)
            image_sequence(&options->images, seed, own, batch->patches + b * T * D, inputs,
                           targets);
        else
            task->fill(options, seed, own, inputs, targets);
        size_t asked = 0;
        for (size_t t = 0; t < T && shape.asked; t++)
            asked += targets[t] != IGNORE;
        most = asked > most ? asked : most;
    }
    if (most > shape.asked)
        die(EXIT_FAIL, "--task %s: internal error: a sequence has %zu targets, its shape says at "
            "most %zu", task->name, most, shape.asked);
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

// ---- evaluation

// Sums over the batches of an evaluation. Of tasks with a chance also: of each token, how often it
// is the target, is said where there is one, and is both; at each position, in how many sequences
// there is a target and in how many all targets so far are predicted: with one target that is the
// accuracy by length. Where a task restarts, both by tokens since, and of each target by itself.
typedef struct {
    double nats, score, targets, sequences, characters, chance;
    const char *curve;
    size_t V, T, *wanted, *said, *hit, *asked, *right; // three of (V), two of (T)
    int held_out; // of a file, which is no fresh data
} Evaluation;

// task_of_file: whether a task's sequences come from a file, of which a part is held out.
static inline int task_of_file(const Task *task)
{
    return !task->fill || !task->symbols; // images, text
}

// task_eval_batches: how many batches an evaluation takes, where B sequences are trained on
// together: --eval-batches, or as many as hold B sequences; of text and images no more than hold
// what is held out; none once the run is interrupted, so that it saves.
static inline long task_eval_batches(const Task *task, const TaskOptions *options, size_t B)
{
    const long asked = options->eval_batches;
    const size_t rows = task_eval_rows(task->shape(options), B);
    if (*training_interrupted())
        return 0;
    if (!task_of_file(task))
        return asked ? asked : (long)((B + rows - 1) / rows);
    const size_t W = task->fill ? text_windows(&options->text.val, (size_t)options->text.context)
                                : options->images.test;
    const long all = (long)((W + B - 1) / B);
    return asked && asked < all ? asked : all;
}

// evaluation_count: the targets of a batch of V symbols, for accuracies by token and the curve.
static inline void evaluation_count(Evaluation *e, const Batch *batch, size_t V, int restart)
{
    const size_t T = batch->T;
    if (!e->T) {
        e->T = T;
        e->V = V;
        e->wanted = (size_t *)alloc_zero(3 * V + 2 * T, sizeof(size_t), "evaluation");
        e->said = e->wanted + V;
        e->hit = e->said + V;
        e->asked = e->hit + V;
        e->right = e->asked + T;
    }
    for (size_t b = 0; b < batch->B; b++)
        for (size_t t = 0, all = 1, at = 0; t < T; t++, at++) {
            const int target = batch->targets[b * T + t], said = batch->predictions[b * T + t];
            at = restart && batch->inputs[b * T + t] == restart ? 0 : at;
            if (target == IGNORE)
                continue;
            all = (all || restart) && said == target;
            e->wanted[target]++;
            e->said[said]++;
            e->hit[target] += said == target;
            e->asked[at]++;
            e->right[at] += all;
        }
}

// evaluation_add: add a batch whose mean loss over its targets is `loss`.
static inline void evaluation_add(Evaluation *e, const Task *task, const TaskOptions *options,
                                  const Batch *batch, double loss)
{
    size_t rows = 0, targets = 0;
    for (size_t b = 0; b < batch->B; b++) {
        size_t before = targets;
        for (size_t i = b * batch->T; i < (b + 1) * batch->T; i++)
            targets += batch->targets[i] != IGNORE;
        rows += targets > before; // those without a target come last
    }
    e->nats += loss * (double)targets;
    e->score += rows ? task_score(task, batch, rows) * (double)rows : 0;
    e->targets += (double)targets;
    e->sequences += (double)rows;
    e->chance = task->chance;
    e->curve = options->curve;
    e->held_out = task_of_file(task);
    if (task->chance >= 0)
        evaluation_count(e, batch, task->shape(options).V, task->restart);
    if (!task->symbols)
        e->characters += (double)text_characters(&options->text, batch->targets,
                                                 batch->B * batch->T);
}

#define CURVE_HEADER "tokens,sequences,accuracy\n"

// curve_check: die unless --curve is a file that can be written, and a new or an empty one or an
// older curve: an evaluation writes it, before the run is saved. `out`, the run's directory or
// NULL, may be yet to come. Changes nothing.
static inline void curve_check(const char *path, const char *out)
{
    char start[sizeof CURVE_HEADER] = "";
    struct stat st;
    const size_t n = out ? strlen(out) : 0;
    const int made = lstat(path, &st) && errno == ENOENT;
    if (!stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode) && !access(path, W_OK))
        return; // a pipe or a terminal: whoever reads it must not see it close
    if (n && !strncmp(path, out, n) && path[n] == '/' && stat(out, &st) && errno == ENOENT)
        return;
    FILE *f = fopen(path, "ab+");
    if (!f)
        die(EXIT_DATA, "--curve %s: cannot write: %s", path, strerror(errno));
    rewind(f);
    const size_t got = fread(start, 1, sizeof start - 1, f);
    fclose(f);
    if (made)
        unlink(path);
    if (got && strcmp(start, CURVE_HEADER))
        die(EXIT_USAGE, "--curve %s: expected a new file or an older curve, got another", path);
}

// evaluation_curve: write the accuracy by the number of tokens read when it is asked for (parity:
// the bits; words: BOS and the elements); numbers that no sequence has are left out.
static inline void evaluation_curve(const Evaluation *e)
{
    FILE *f = fopen(e->curve, "wb");
    int bad = !f || fputs(CURVE_HEADER, f) < 0;
    for (size_t t = 0; t < e->T && !bad; t++)
        if (e->asked[t])
            bad = fprintf(f, "%zu,%zu,%.9g\n", t + 1, e->asked[t],
                          (double)e->right[t] / (double)e->asked[t]) < 0;
    if ((f && fclose(f)) || bad)
        die(EXIT_DATA, "--curve %s: cannot write: %s", e->curve, strerror(errno));
}

// evaluation_row: what is logged of an evaluation after `step` updates, NaN if there was no data or
// the run was interrupted, perhaps in the middle; writes the curve. The sums are used up. macro is
// the mean over tokens that are wanted or said of how often they are said where they are wanted,
// micro the share of all targets that is predicted.
static inline LogRow evaluation_row(Evaluation *e, long step)
{
    if (*training_interrupted()) {
        free(e->wanted);
        memset(e, 0, sizeof *e);
    }
    LogRow row = {step, "val", e->nats / e->targets, e->score / e->sequences, 0, 0, 0, 0, 0, 0, 0,
                  0, 0, e->held_out};
    double tokens = 0;
    if (e->characters > 0)
        row.bits = e->nats / log(2.0) / e->characters;
    if (!e->T)
        return row;
    row.scaled = (row.acc - e->chance) / (1 - e->chance);
    for (size_t v = 0; v < e->V; v++) {
        row.constant = fmax(row.constant, (double)e->wanted[v] / e->targets);
        row.micro += (double)e->hit[v] / e->targets;
        row.macro += e->wanted[v] ? (double)e->hit[v] / (double)e->wanted[v] : 0;
        tokens += e->wanted[v] || e->said[v];
    }
    row.macro /= tokens > 0 ? tokens : 1;
    if (e->curve)
        evaluation_curve(e);
    free(e->wanted);
    memset(e, 0, sizeof *e);
    return row;
}

#endif
