// training.h: what every training run has, whatever its model: its options and its checkpoints.
//
// A checkpoint is a safetensors file: params.*, m.*, v.* in full precision, and string metadata: architecture,
// format_version, step (updates done) and every option that defines model, data and training. It replaces the
// run's previous one at once or not at all.
#ifndef SEQ_UTIL_TRAINING_H
#define SEQ_UTIL_TRAINING_H

#include "log.h"
#include "options.h"
#include "tensors.h"

#define CHECKPOINT_NAME "checkpoint.safetensors"
#define CHECKPOINT_VERSION "1"

enum { CONSTANT, COSINE };

typedef struct {
    int batch_size, steps, schedule, warmup, eval_every, save_every, print_every, threads;
    double lr, lr_min, grad_clip, weight_decay, beta1, beta2, adam_eps, stop_at;
    uint64_t seed;
    const char *out, *load, *dump, *preset;
    int resume, force, help;
} Training;

// The option rows of a Training t.
#define TRAINING_OPTIONS(t) \
    {"batch-size", OPT_INT, &(t).batch_size, "32", 1, 1 << 20, "sequences", DEFINES_TRAINING, "in a batch"}, \
    {"steps", OPT_INT, &(t).steps, "1000", 0, 1e9, "updates", DEFINES_TRAINING, "0: evaluate, train nothing"}, \
    {"lr", OPT_REAL, &(t).lr, "1e-3", 0, 1e30, "rate", DEFINES_TRAINING, "learning rate after warm-up"}, \
    {"warmup", OPT_INT, &(t).warmup, "50", 0, 1e9, "updates", DEFINES_TRAINING, "linear warm-up, 0 = none"}, \
    {"schedule", OPT_CHOICE, &(t).schedule, "constant", 0, 0, "constant|cosine", DEFINES_TRAINING, \
     "after warm-up"}, \
    {"lr-min", OPT_REAL, &(t).lr_min, "0", 0, 1e30, "rate", DEFINES_TRAINING, "the cosine's end"}, \
    {"grad-clip", OPT_REAL, &(t).grad_clip, "1", 0, 1e30, "norm", DEFINES_TRAINING, \
     "clip gradients to this global norm, 0 = never"}, \
    {"weight-decay", OPT_REAL, &(t).weight_decay, "0", 0, 1e3, "rate", DEFINES_TRAINING, \
     "decoupled, on matrices"}, \
    {"beta1", OPT_REAL, &(t).beta1, "0.9", 0, 0.999999, "", DEFINES_TRAINING, "AdamW, first moment"}, \
    {"beta2", OPT_REAL, &(t).beta2, "0.999", 0, 0.999999, "", DEFINES_TRAINING, "AdamW, second moment"}, \
    {"adam-eps", OPT_REAL, &(t).adam_eps, "1e-8", 1e-15, 1, "", DEFINES_TRAINING, "AdamW, denominator"}, \
    {"stop-at", OPT_REAL, &(t).stop_at, "0", 0, 1, "accuracy", DEFINES_TRAINING, \
     "stop when a training batch reaches it, 0 = never"}, \
    {"seed", OPT_U64, &(t).seed, "1", 0, 0, "number", DEFINES_TRAINING, "of weights and data"}, \
    {"threads", OPT_INT, &(t).threads, "0", 0, 1024, "threads", RUNTIME, "0 = all cores"}, \
    {"eval-every", OPT_INT, &(t).eval_every, "0", 0, 1e9, "updates", RUNTIME, \
     "evaluate on fresh data, 0 = at the end"}, \
    {"save-every", OPT_INT, &(t).save_every, "500", 0, 1e9, "updates", RUNTIME, \
     "write " CHECKPOINT_NAME ", 0 = at the end"}, \
    {"print-every", OPT_INT, &(t).print_every, "50", 1, 1e9, "updates", RUNTIME, "a line on the console"}, \
    {"out", OPT_STRING, &(t).out, NULL, 0, 0, "DIR", RUNTIME, "the run's directory [next free runs/TASK-MODEL-NNN]"}, \
    {"resume", OPT_FLAG, &(t).resume, NULL, 0, 0, "", RUNTIME, "go on with the run in --out"}, \
    {"force", OPT_FLAG, &(t).force, NULL, 0, 0, "", RUNTIME, "overwrite the run in --out"}, \
    {"load", OPT_STRING, &(t).load, NULL, 0, 0, "FILE", RUNTIME, "start from a checkpoint's weights"}, \
    {"dump", OPT_STRING, &(t).dump, NULL, 0, 0, "FILE", RUNTIME, \
     "write the first batch's tensors and gradients (with --steps 0: and exit)"}, \
    {"preset", OPT_STRING, &(t).preset, NULL, 0, 0, "NAME", RUNTIME, "a named set of options, see below"}, \
    {"help", OPT_FLAG, &(t).help, NULL, 0, 0, "", RUNTIME, "print this and exit"}

// training_check: die over training options that contradict each other.
static inline void training_check(const Training *t)
{
    if (t->resume && t->force)
        die(EXIT_USAGE, "--resume and --force: expected one of them, --resume goes on, --force starts over");
    if (t->resume && t->load)
        die(EXIT_USAGE, "--resume and --load: expected one of them, --resume reads the checkpoint in --out");
    if (t->resume && !t->out)
        die(EXIT_USAGE, "--resume needs --out DIR, the directory of the run to go on with");
    if (t->lr_min > t->lr)
        die(EXIT_USAGE, "--lr-min: expected at most --lr (%g), got %g", t->lr, t->lr_min);
}

// training_meta: fill meta with architecture, format_version, step and the defining options; values live in
// `values`. Returns how many.
static inline size_t training_meta(StMeta *meta, char (*values)[OPTION_VALUE_MAX], const Option *table, int n,
                                   const char *architecture, long step)
{
    size_t count = 3;
    snprintf(values[0], OPTION_VALUE_MAX, "%s", architecture);
    snprintf(values[1], OPTION_VALUE_MAX, CHECKPOINT_VERSION);
    snprintf(values[2], OPTION_VALUE_MAX, "%ld", step);
    meta[0].key = "architecture";
    meta[1].key = "format_version";
    meta[2].key = "step";
    for (int i = 0; i < n; i++)
        if (table[i].defines) {
            meta[count].key = table[i].name;
            option_format(&table[i], values[count++], OPTION_VALUE_MAX);
        }
    for (size_t i = 0; i < count; i++)
        meta[i].value = values[i];
    return count;
}

// training_write: write the list's tensors with the run's metadata to `path`; see st_write for failures.
static inline void training_write(const char *path, const TensorList *list, const Option *table, int n,
                                  const char *architecture, long step)
{
    StMeta meta[OPTIONS_MAX + 3];
    char values[OPTIONS_MAX + 3][OPTION_VALUE_MAX];
    size_t n_meta = training_meta(meta, values, table, n, architecture, step);
    st_write(path, meta, n_meta, list->tensors, list->n);
}

// checkpoint_save: write params, m and v after `step` updates to `path`.
static inline void checkpoint_save(const char *path, const Arena *params, const Arena *m, const Arena *v,
                                   const Option *table, int n, const char *architecture, long step)
{
    static TensorList list;
    list.n = 0;
    list_add_arena(&list, "params.", params);
    list_add_arena(&list, "m.", m);
    list_add_arena(&list, "v.", v);
    training_write(path, &list, table, n, architecture, step);
}

// checkpoint_load: read a checkpoint written by checkpoint_save. With m and v NULL only the weights are read
// (--load) and only options that define the model must agree; else (--resume) all must, but --steps may
// change under a constant schedule. Returns its step. Dies with EXIT_DATA, saying what differs.
static inline long checkpoint_load(const char *path, Arena *params, Arena *m, Arena *v, const Option *table,
                                   int n, const char *architecture, int steps_may_differ)
{
    StFile *file = st_open(path);
    const char *got = st_meta(file, "architecture"), *version = st_meta(file, "format_version");
    const char *step_text = st_meta(file, "step");
    char ours[OPTION_VALUE_MAX], *end = NULL;
    if (!got || strcmp(got, architecture))
        die(EXIT_DATA, "%s: expected a checkpoint of %s, got one of %s", path, architecture, got ? got : "unknown origin");
    if (!version || strcmp(version, CHECKPOINT_VERSION))
        die(EXIT_DATA, "%s: expected format version " CHECKPOINT_VERSION ", got %s", path, version ? version : "none");
    for (int i = 0; i < n; i++) {
        const char *theirs = st_meta(file, table[i].name);
        if (table[i].defines < (m ? DEFINES_TRAINING : DEFINES_MODEL) ||
            (steps_may_differ && !strcmp(table[i].name, "steps")))
            continue;
        option_format(&table[i], ours, sizeof ours);
        if (!theirs || strcmp(theirs, ours))
            die(EXIT_DATA, "%s: was made with --%s %s, this run has %s\nhint: give --%s %s", path, table[i].name,
                theirs ? theirs : "(unknown)", ours, table[i].name, theirs ? theirs : ours);
    }
    long step = step_text ? strtol(step_text, &end, 10) : -1;
    if (step < 0 || end == step_text || *end)
        die(EXIT_DATA, "%s: expected a step number in its metadata, got %s", path, step_text ? step_text : "none");
    st_verify(file);
    size_t read = arena_read(params, file, path, "params.");
    read += m ? arena_read(m, file, path, "m.") + arena_read(v, file, path, "v.") : 0;
    size_t expected = m ? read : 3 * read;
    if (file->n_entries != expected)
        die(EXIT_DATA, "%s: expected %zu tensors, got %zu\nhint: is it a dump, or of another version?", path,
            expected, file->n_entries);
    st_close(file);
    return step;
}

#endif
