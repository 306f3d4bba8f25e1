// tasks.h: what a model is fed: synthetic tasks, made on the fly (copying; tasks_state.h;
// tasks_recall.h), and text (text.h); batches of them and evaluations. What a task is: task.h.
//
// Every sequence is a pure function of (seed, stream number), and of the files of text: a resumed
// run sees the sequences it would have seen, and the evaluation set is disjoint from all that are
// trained on. A target of IGNORE (-1) is not trained on and not scored.
#ifndef SEQ_DATA_TASKS_H
#define SEQ_DATA_TASKS_H

#include "../util/training.h"
#include "sampler.h"
#include "tasks_recall.h"
#include "tasks_state.h"

// ---- copying [CausalRN paper, section 4]: repeat a random string after a separator

enum { COPY_BOS, COPY_SEP, COPY_EOS, COPY_LETTER, COPY_LETTERS = 26, COPY_VOCAB = 29 };

#ifndef COPYING_CAUSAL // dev/test_cuda.sh, dev/emulate make it 0: BiRN on CPU and GPU
#define COPYING_CAUSAL 1
#endif

// copying_shape: T = 2 (S + 1), V = 29; the prompt is BOS, the string and SEP.
static inline TaskShape copying_shape(const TaskOptions *options)
{
    size_t S = (size_t)options->string_size, T = 2 * (S + 1);
    TaskShape shape = {T, COPY_VOCAB, S + 2, COPYING_CAUSAL, "string_size", options->string_size,
                       T};
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

// ---- text: the next token of windows of a file (text.h)

// text_shape: T = --context, V by --vocab; every target is scored given the true past.
static inline TaskShape text_shape(const TaskOptions *options)
{
    const size_t T = (size_t)options->text.context;
    TaskShape shape = {T, text_V(options->text.vocab), T, 1, "context", options->text.context, T};
    return shape;
}

// text_sequence: inputs (T) = a window of the file, targets (T) = the same one token later; past
// the last window of the held-out part, all IGNORE.
static inline void text_sequence(const TaskOptions *options, uint64_t seed, uint64_t stream,
                                 int *inputs, int *targets)
{
    const int found = text_fill(&options->text, seed, stream, inputs, targets);
    for (int t = 0; !found && t < options->text.context; t++) {
        inputs[t] = 0;
        targets[t] = IGNORE;
    }
}

// ---- the table

static const Task TASKS[] = {
    {"copying", "repeat a random string of letters", "^|$abcdefghijklmnopqrstuvwxyz", copying_shape,
     copying_fill, copying_score, -1, 0},
    {"text", "say the next token of a file", NULL, text_shape, text_sequence, fraction_right, -1,
     0},
    STATE_TASKS,
    RECALL_TASKS,
};

// task_options: add the options of tasks to the command line. The words of --task are the names of
// TASKS in its order.
static inline void task_options(Options *options, int *task, TaskOptions *o)
{
    const Option rows[] = {
        {"task", OPT_CHOICE, task, "copying", 0, 0, "copying|text|" STATE_WORDS "|" RECALL_WORDS,
         DEFINES_DATA, "what to learn"},
        {"string-size", OPT_INT, &o->string_size, "16", 1, 1 << 20, "letters", DEFINES_DATA,
         "copying: letters in a string; T = 2 (letters + 1)"},
    };
    const Option at_the_end[] = {
        {"eval-batches", OPT_INT, &o->eval_batches, "0", 0, 1e9, "batches", RUNTIME,
         "of an evaluation, 0 = one, text: all that is held out"},
        {"sample", OPT_INT, &o->sample, "0", 0, 1e9, "tokens", RUNTIME, "let the model speak"},
        {"prompt", OPT_STRING, &o->prompt, NULL, 0, 0, "TEXT", RUNTIME,
         "what it goes on from [text: a line feed or, for gpt2, the end of a text]"},
        {"temperature", OPT_REAL, &o->temperature, "1", 0, 1e6, "number", RUNTIME,
         "divides the logits, 0 = always the most likely token"},
        {"top-k", OPT_INT, &o->top_k, "0", 0, 1e9, "tokens", RUNTIME,
         "draw from the k most likely, 0 = from all"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
    state_options(options, o);
    recall_options(options, o);
    text_options(options, &o->text);
    options_add(options, at_the_end, sizeof at_the_end / sizeof *at_the_end);
}

// task_encode: tokens (room for one more than the characters) = what --prompt says; their number.
static inline size_t task_encode(const Task *task, const TaskOptions *o, int *tokens)
{
    const char *text = o->prompt ? o->prompt : "", *at;
    size_t n = 0;
    if (!task->symbols)
        return text_encode(&o->text, tokens, text);
    tokens[0] = 0; // without text: the token a sequence begins with
    for (; text[n]; tokens[n++] = (int)(at - task->symbols))
        if (!(at = strchr(task->symbols, text[n])))
            die(EXIT_USAGE, "--prompt: character %zu is no token of --task %s; expected some of %s",
                n, task->name, task->symbols);
    return n ? n : 1;
}

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

// task_not_written: die if a file of text is one that the run in --out writes or removes.
static inline void task_not_written(const TaskOptions *o, const Training *t)
{
    const char *const inputs[] = {o->text.path, o->text.val_path, o->text.table_path};
    const char *const outputs[] = {CHECKPOINT_NAME, "log.csv"};
    char path[LOG_PATH];
    for (int i = 0; i < 6 && t->out; i++) {
        snprintf(path, sizeof path, "%s/%s", t->out, outputs[i % 2]);
        if (text_same(inputs[i / 2], path))
            die(EXIT_USAGE, "%s: expected a text that is no part of the run in --out, got its %s\n"
                "hint: copy the file, or give another --out", inputs[i / 2], outputs[i % 2]);
    }
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

// task_open: after the command line is parsed and before the model is planned: open files, encode
// the prompt, die over what does not fit. A model with `learned_positions` speaks within T.
static inline void task_open(const Task *task, TaskOptions *o, const Training *t, Options *options,
                             int learned_positions)
{
    const char *prompt = o->prompt ? o->prompt : "";
    if (task->symbols && (o->text.path || o->text.val_path || o->text.table_path))
        die(EXIT_USAGE, "--text, --val and --tokenizer are for --task text, this is --task %s\n"
            "hint: give --task text", task->name);
    if (task->chance >= 0)
        state_check(o, task, options);
    recall_check(o, task, options);
    task_eval_rows(task->shape(o), (size_t)t->batch_size);
    if (o->curve)
        curve_check(o->curve, t->out);
    if (o->prompt && !o->sample)
        die(EXIT_USAGE, "--prompt needs --sample N, the number of tokens to say after it");
    if (*prompt && task->symbols && !*task->symbols)
        die(EXIT_USAGE, "--prompt: the tokens of --task %s are numbers; expected no prompt",
            task->name);
    if (!task->symbols) {
        if (!o->text.path && !o->text.val_path && !o->sample && !t->dump)
            die(EXIT_USAGE, "--task text needs --text FILE, --val FILE or --sample N");
        task_not_written(o, t);
        text_open(&o->text, (size_t)t->batch_size, t->steps > 0 || t->dump);
        options->data_checksum = o->text.path ? o->text.checksum : NULL;
    }
    if (!o->sample)
        return;
    const size_t T = task_longest(task->shape(o)), room = strlen(prompt) + (size_t)o->sample;
    o->read = (int *)alloc_zero(room, sizeof(int), "sample");
    o->said = (int *)alloc_zero(room, sizeof(int), "sample");
    o->prompt_n = task_encode(task, o, o->read);
    o->read_n = o->prompt_n + (size_t)o->sample - 1;
    if (learned_positions && o->read_n > T)
        die(EXIT_USAGE, "--sample %d: after a prompt of %zu tokens the model would read %zu, it "
            "learns %zu positions\nhint: at most %zu tokens of prompt and --sample together, or a "
            "model of longer sequences", o->sample, o->prompt_n, o->read_n, T, T + 1);
}

// One batch: what the model reads, what it should say and what it says. B and T are those of the
// sequences in it; rows is the B it was made for.
typedef struct {
    size_t B, T;
    int *inputs, *targets, *predictions; // (B,T)
    size_t rows;
} Batch;

// batch_alloc: room for B sequences of T tokens.
static inline void batch_alloc(Batch *batch, size_t B, size_t T)
{
    batch->B = batch->rows = B;
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
// `stream` (STREAM_TRAIN or STREAM_EVAL) under `seed`; B and T change with the family where it has
// a length of its own. The result does not depend on the threads.
static inline void task_batch(const Task *task, const TaskOptions *options, uint64_t seed,
                              uint64_t stream, long number, Batch *batch)
{
    const TaskShape shape = task->shape(options);
    if (shape.eval_T != shape.T) {
        const int evaluate = stream >= STREAM_EVAL;
        batch->B = evaluate ? task_eval_rows(shape, batch->rows) : batch->rows;
        batch->T = evaluate ? shape.eval_T : shape.T;
    }
    const size_t B = batch->B, T = batch->T;
    if (!task->symbols && !options->text.train.n && !options->text.val.n)
        die(EXIT_FAIL, "--task text: a batch is asked for before task_open");
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

// task_print: a word, then tokens (n) as text on stdout.
static inline void task_print(const Task *task, const TaskOptions *options, const char *word,
                              const int *tokens, size_t n)
{
    fputs(word, stdout);
    if (!task->symbols)
        text_print(&options->text, tokens, n);
    for (size_t i = 0; task->symbols && i < n; i++)
        if (!*task->symbols)
            printf("%d ", tokens[i]);
        else
            putchar(tokens[i] >= 0 && (size_t)tokens[i] < strlen(task->symbols) ?
                    task->symbols[tokens[i]] : '?');
}

// task_show: print one decoded sequence beside its prompt; inputs (T), predictions (T).
static inline void task_show(const Task *task, const TaskOptions *options, const int *inputs,
                             const int *predictions)
{
    const TaskShape shape = task->shape(options);
    task_print(task, options, "prompt  ", inputs, shape.prompt);
    task_print(task, options, "\ndecoded ", predictions + shape.prompt - 1,
               shape.T - shape.prompt + 1);
    printf("\n");
}

// task_sampler: how --sample draws.
static inline Sampler task_sampler(const TaskOptions *o, uint64_t seed)
{
    Sampler sampler = {o->temperature, o->top_k, seed};
    return sampler;
}

// task_show_sample: print --prompt and, right after it, the tokens said when the model had read
// `read`: --sample of them, or fewer.
static inline void task_show_sample(const Task *task, const TaskOptions *o, size_t read)
{
    const size_t said = read < o->prompt_n ? 0 : read - o->prompt_n + 1;
    printf("sample of %zu tokens, temperature %g:\n", said, o->temperature);
    task_print(task, o, "", o->read, o->prompt ? o->prompt_n : 0);
    task_print(task, o, "", o->said + o->prompt_n - 1, said);
    printf("\n");
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
} Evaluation;

// task_eval_batches: how many batches an evaluation takes, where B sequences are trained on
// together: --eval-batches, or as many as hold B sequences; of text no more than hold what is held
// out; none once the run is interrupted, so that it saves.
static inline long task_eval_batches(const Task *task, const TaskOptions *options, size_t B)
{
    const long asked = options->eval_batches;
    const size_t rows = task_eval_rows(task->shape(options), B);
    if (*training_interrupted())
        return 0;
    if (task->symbols)
        return asked ? asked : (long)((B + rows - 1) / rows);
    const size_t W = text_windows(&options->text.val, (size_t)options->text.context);
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
    if (task->chance >= 0)
        evaluation_count(e, batch, task->shape(options).V, task->restart);
    if (!task->symbols)
        e->characters += (double)text_characters(&options->text, batch->targets,
                                                 batch->B * batch->T);
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
                  0, 0};
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
