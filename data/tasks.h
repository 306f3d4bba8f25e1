// tasks.h: what a model is fed: synthetic tasks, made on the fly (copying; tasks_state.h;
// tasks_recall.h), text (text.h) and, where READS_IMAGES is defined before, images (images.h). What
// a task is: task.h; batches and evaluations: batch.h.
//
// Every sequence is a pure function of (seed, stream number), and of the files given: a resumed
// run sees the sequences it would have seen, and the evaluation set is disjoint from all that are
// trained on. A target of IGNORE (-1) is not trained on and not scored.
#ifndef SEQ_DATA_TASKS_H
#define SEQ_DATA_TASKS_H

#include "batch.h"
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
                       T, 0};
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
    TaskShape shape = {T, text_V(options->text.vocab), T, 1, "context", options->text.context, T,
                       0};
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

// ---- images: the class of an image, asked for at <CLS> (images.h)

// images_shape: T = patches + 1, V = classes; known once the file is open. No input shows a target.
static inline TaskShape images_shape(const TaskOptions *options)
{
    const size_t P = images_P(&options->images), T = P + 1;
    TaskShape shape = {T, options->images.classes, T, 0, "patches", (int)P, T, 0};
    return shape;
}

#ifdef READS_IMAGES
#define IMAGES_TASK \
    {"images", "say the class of an image", "", images_shape, NULL, fraction_right, -1, 0},
#define IMAGES_WORD "|images"
#else
#define IMAGES_TASK
#define IMAGES_WORD ""
#endif

// ---- the table

static const Task TASKS[] = {
    {"copying", "repeat a random string of letters", "^|$abcdefghijklmnopqrstuvwxyz", copying_shape,
     copying_fill, copying_score, -1, 0},
    {"text", "say the next token of a file", NULL, text_shape, text_sequence, fraction_right, -1,
     0},
    STATE_TASKS,
    RECALL_TASKS,
    IMAGES_TASK
};

// task_options: add the options of tasks to the command line. The words of --task are the names of
// TASKS in its order.
static inline void task_options(Options *options, int *task, TaskOptions *o)
{
    const Option rows[] = {
        {"task", OPT_CHOICE, task, "copying", 0, 0, "copying|text|" STATE_WORDS "|" RECALL_WORDS
         IMAGES_WORD, DEFINES_DATA, "what to learn"},
        {"string-size", OPT_INT, &o->string_size, "16", 1, 1 << 20, "letters", DEFINES_DATA,
         "copying: letters in a string; T = 2 (letters + 1)"},
    };
    const Option at_the_end[] = {
        {"eval-batches", OPT_INT, &o->eval_batches, "0", 0, 1e9, "batches", RUNTIME,
         "of an evaluation, 0 = one; text, images: all that is held out"},
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
    if (*IMAGES_WORD)
        images_options(options, &o->images);
    options_add(options, at_the_end, sizeof at_the_end / sizeof *at_the_end);
}

#define RANGE_WORDS "parity|modular|brackets|needle" // the others' sequences have one length
#define LENGTH_WORDS STATE_WORDS "|" RECALL_WORDS
#define SYMBOL_WORDS "mqar|in-context|noisy|fuzzy|memorization|selective"

// task_unread: die over an option that was typed, has another value than its default, and that only
// other tasks read. A preset's options and defaults may stay where --task is another.
static inline void task_unread(const Task *task, const Options *options)
{
    static const char *const readers[][2] = {
        {"string-size", "copying"}, {"tokens-per-element", "s5|z60"}, {"modulus", "horizon"},
        {"multiply", "brackets"}, {"elements", "s5"}, {"resets", "horizon"},
        {"pairs", "mqar|needle"}, {"vocab-size", SYMBOL_WORDS}, {"noise", "noisy"},
        {"copies", "selective"}, {"examples", RECALL_WORDS}, {"eval-depth", "needle"},
        {"min-length", RANGE_WORDS}, {"max-length", LENGTH_WORDS},
        {"eval-min-length", RANGE_WORDS}, {"eval-max-length", LENGTH_WORDS},
        {"held-out", "text"}, {"vocab", "text"}, {"context", "text"}, {"patch", "images"}};
    char value[OPTION_VALUE_MAX], word[OPTION_VALUE_MAX];
    for (size_t k = 0; k < sizeof readers / sizeof *readers; k++) {
        const Option *o = options_find(options, readers[k][0]);
        int reads = !o || !options->typed[o - options->rows];
        for (int i = 0; !reads && option_word(readers[k][1], i, word, sizeof word); i++)
            reads = !strcmp(word, task->name);
        if (reads)
            continue;
        option_format(o, value, sizeof value);
        if (strcmp(value, o->def))
            die(EXIT_USAGE, "--%s %s is for --task %s, this is --task %s\n"
                "hint: leave --%s out, or give another --task", o->name, value, readers[k][1],
                task->name, o->name);
    }
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

// task_causal_check: die unless a model that is causal, or one that is not, can learn the task.
static inline void task_causal_check(const Task *task, const TaskOptions *o, int causal)
{
    if (!causal && task->shape(o).causal)
        die(EXIT_USAGE, "--causal no: the inputs of --task %s show its targets, a bidirectional "
            "model reads them\nhint: it is for tasks that do not", task->name);
    if (causal && !task->fill)
        die(EXIT_USAGE, "--task %s: expected --causal no: what is in an image does not depend on "
            "the patches above and to the left alone", task->name);
}

// task_not_written: die if a file of text or images is one that the run in --out writes or removes.
static inline void task_not_written(const TaskOptions *o, const Training *t)
{
    const char *const inputs[] = {o->text.path, o->text.val_path, o->text.table_path,
                                  o->images.path};
    const char *const outputs[] = {CHECKPOINT_NAME, "log.csv"};
    char path[LOG_PATH];
    for (int i = 0; i < 8 && t->out; i++) {
        snprintf(path, sizeof path, "%s/%s", t->out, outputs[i % 2]);
        if (text_same(inputs[i / 2], path))
            die(EXIT_USAGE, "%s: expected a file that is no part of the run in --out, got its %s\n"
                "hint: copy the file, or give another --out", inputs[i / 2], outputs[i % 2]);
    }
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
    if (task->fill && o->images.path)
        die(EXIT_USAGE, "--images is for --task images, this is --task %s\n"
            "hint: give --task images --causal no", task->name);
    task_unread(task, options);
    if (task->chance >= 0)
        state_check(o, task);
    recall_check(o, task);
    if (!task->fill) {
        if (o->sample)
            die(EXIT_USAGE, "--sample: --task %s has nothing to say but a class; expected no "
                "--sample", task->name);
        task_not_written(o, t);
        images_open(&o->images, (size_t)t->batch_size, t->steps > 0 || t->dump);
        options->data_checksum = o->images.checksum;
    }
    task_eval_rows(task->shape(o), (size_t)t->batch_size);
    if (o->curve && task->chance < 0)
        die(EXIT_USAGE, "--curve: --task %s has no accuracy by length; expected a task of "
            "states or recall, or no --curve", task->name);
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

// decode_check: die over position t of a model that has learned T of them.
static inline void decode_check(size_t t, size_t T)
{
    if (t >= T)
        die(EXIT_USAGE, "decoding: position %zu is past the %zu learned ones\n"
            "hint: train on longer sequences", t, T);
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

#endif
