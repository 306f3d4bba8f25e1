// training.h: what every training run has, whatever its model: its options and its checkpoints.
//
// A checkpoint is a safetensors file: params.*, m.*, v.* in full precision, and string metadata:
// architecture, format_version, step (updates done), every option that defines model, data and
// training, and data_checksum, of what is trained on, if that is a file. It replaces the run's
// previous one at once or not at all.
#ifndef SEQ_UTIL_TRAINING_H
#define SEQ_UTIL_TRAINING_H

#include "log.h"
#include "options.h"
#include "tensors.h"
#include "threads.h"
#include <signal.h>

#define CHECKPOINT_NAME "checkpoint.safetensors"
#define CHECKPOINT_VERSION "1"

enum { CONSTANT, COSINE };

typedef struct {
    int batch_size, accumulate, steps, schedule, warmup;
    int eval_every, save_every, print_every, threads;
    double lr, lr_min, grad_clip, weight_decay, beta1, beta2, adam_eps, stop_at, embed_std;
    uint64_t seed;
    const char *out, *load, *dump, *preset;
    int resume, force, help;
} Training;

// training_options: add the options that every training run has to the command line.
static inline void training_options(Options *options, Training *t)
{
    const Option rows[] = {
        {"batch-size", OPT_INT, &t->batch_size, "32", 1, 1 << 20, "sequences", DEFINES_TRAINING,
         "sequences in a batch"},
        {"accumulate", OPT_INT, &t->accumulate, "1", 1, 1 << 20, "batches", DEFINES_TRAINING,
         "batches whose gradients make one update"},
        {"steps", OPT_INT, &t->steps, "1000", 0, 1e9, "updates", DEFINES_TRAINING,
         "0: evaluate only, write no run"},
        {"lr", OPT_REAL, &t->lr, "2e-3", 0, 1e30, "rate", DEFINES_TRAINING, "after warm-up"},
        {"warmup", OPT_INT, &t->warmup, "50", 0, 1e9, "updates", DEFINES_TRAINING,
         "linear warm-up, 0 = none"},
        {"schedule", OPT_CHOICE, &t->schedule, "cosine", 0, 0, "constant|cosine", DEFINES_TRAINING,
         "after warm-up"},
        {"lr-min", OPT_REAL, &t->lr_min, "0", 0, 1e30, "rate", DEFINES_TRAINING,
         "the cosine's end"},
        {"grad-clip", OPT_REAL, &t->grad_clip, "1", 0, 1e30, "norm", DEFINES_TRAINING,
         "clip the gradient to this global norm, 0 = never"},
        {"weight-decay", OPT_REAL, &t->weight_decay, "0", 0, 1e3, "rate", DEFINES_TRAINING,
         "decoupled, on matrices"},
        {"beta1", OPT_REAL, &t->beta1, "0.9", 0, 0.999999, "0..1", DEFINES_TRAINING,
         "AdamW, first moment"},
        {"beta2", OPT_REAL, &t->beta2, "0.999", 0, 0.999999, "0..1", DEFINES_TRAINING,
         "AdamW, second moment"},
        {"adam-eps", OPT_REAL, &t->adam_eps, "1e-8", 1e-15, 1, "number", DEFINES_TRAINING,
         "AdamW, added to the root of the second moment"},
        {"stop-at", OPT_REAL, &t->stop_at, "0", 0, 1, "accuracy", DEFINES_TRAINING,
         "stop when a training batch reaches it, 0 = never"},
        {"embed-std", OPT_REAL, &t->embed_std, "0", 0, 1e3, "number", DEFINES_TRAINING,
         "embeddings start as N(0, number), 0 = as the model has them"},
        {"seed", OPT_U64, &t->seed, "1", 0, 0, "number", DEFINES_TRAINING, "of weights and data"},
        {"threads", OPT_INT, &t->threads, "0", 0, 1024, "threads", RUNTIME, "0 = all cores"},
        {"eval-every", OPT_INT, &t->eval_every, "0", 0, 1e9, "updates", RUNTIME,
         "evaluate on fresh sequences, 0 = at the end"},
        {"save-every", OPT_INT, &t->save_every, "500", 0, 1e9, "updates", RUNTIME,
         "write " CHECKPOINT_NAME ", 0 = at the end"},
        {"print-every", OPT_INT, &t->print_every, "50", 1, 1e9, "updates", RUNTIME,
         "a line on the console"},
        {"out", OPT_STRING, &t->out, NULL, 0, 0, "DIR", RUNTIME,
         "the run's directory [the next free runs/TASK-MODEL-NNN]"},
        {"resume", OPT_FLAG, &t->resume, NULL, 0, 0, "", RUNTIME, "go on with the run in --out"},
        {"force", OPT_FLAG, &t->force, NULL, 0, 0, "", RUNTIME, "overwrite the run in --out"},
        {"load", OPT_STRING, &t->load, NULL, 0, 0, "FILE", RUNTIME,
         "start from the weights of a checkpoint"},
        {"dump", OPT_STRING, &t->dump, NULL, 0, 0, "FILE", RUNTIME,
         "write the first batch, its activations and gradients; with --steps 0: and exit"},
        {"preset", OPT_STRING, &t->preset, NULL, 0, 0, "NAME", RUNTIME,
         "options by name, see below"},
        {"help", OPT_FLAG, &t->help, NULL, 0, 0, "", RUNTIME, "print this and exit"},
    };
    options_add(options, rows, sizeof rows / sizeof *rows);
}

// training_check: die over training options that contradict each other.
static inline void training_check(const Training *t)
{
    if (t->resume && t->force)
        die(EXIT_USAGE, "--resume and --force: expected one of them, --force starts over");
    if (t->resume && t->load)
        die(EXIT_USAGE,
            "--resume and --load: expected one of them, --resume reads the checkpoint in --out");
    if (t->resume && t->dump)
        die(EXIT_USAGE, "--resume and --dump: expected one of them, a dump is the first batch\n"
                        "hint: --load FILE --steps 0 --dump FILE dumps a checkpoint's weights");
    if (t->dump && t->accumulate > 1)
        die(EXIT_USAGE, "--dump and --accumulate %d: expected --accumulate 1, a dump is one batch",
            t->accumulate);
    if (t->resume && !t->out)
        die(EXIT_USAGE, "--resume needs --out DIR, the directory of the run to go on with");
    if (t->steps == 0 && (t->resume || t->out))
        die(EXIT_USAGE, "--steps 0 writes no run: expected no --out or --resume\n"
                        "hint: --load FILE --steps 0 evaluates a checkpoint");
    if (t->lr_min > t->lr)
        die(EXIT_USAGE, "--lr-min: expected at most --lr (%g), got %g", t->lr, t->lr_min);
}

// What the batches of an update come to: mean loss over all their targets, mean accuracy.
typedef struct {
    double loss, acc;
    double targets, last; // of all batches; of the last one that had any
    size_t n;             // batches
} Update;

// update_add: another batch, of mean loss and accuracy over its own `targets`, before its gradients
// are added to `grads`. A batch's gradients are of its own mean, so those so far are brought to its
// scale: with the same number of targets in every batch nothing is multiplied.
static inline void update_add(Update *u, Arena *grads, double loss, double acc, double targets)
{
    u->acc += (acc - u->acc) / (double)++u->n;
    if (targets == 0)
        return;
    if (u->last > 0 && u->last != targets)
        arena_scale(grads, u->last / targets);
    u->last = targets;
    u->targets += targets;
    u->loss += (loss - u->loss) * (targets / u->targets);
}

// update_end: after the last batch: `grads` becomes the gradient of the mean over all targets, as
// one large batch would give.
static inline void update_end(const Update *u, Arena *grads)
{
    if (u->last != u->targets)
        arena_scale(grads, u->last / u->targets);
}

// learning_rate: of update `step` (from 0): linear to lr over the first `warmup` updates, lr/warmup
// at step 0; then constant, or half a cosine from lr to lr_min, which the last of `steps` updates
// has.
static inline double learning_rate(const Training *t, long step)
{
    if (step < t->warmup)
        return t->lr * (double)(step + 1) / t->warmup;
    if (t->schedule == CONSTANT)
        return t->lr;
    double span = (double)t->steps - 1 - t->warmup,
           done = span > 0 ? (double)(step - t->warmup) / span : 1;
    return t->lr_min +
           (t->lr - t->lr_min) * 0.5 * (1 + cos(3.14159265358979323846 * (done < 1 ? done : 1)));
}

// What is trained: parameters, their gradients and the optimiser's moments, of one table.
typedef struct {
    Arena params, grads, m, v;
} Weights;

// weights_plan: lay out the four arenas for n rows of parameters.
static inline void weights_plan(Weights *w, const Tensor *rows, int n, size_t real_size)
{
    arena_plan(&w->params, "parameters", rows, n, real_size);
    arena_plan(&w->grads, "gradients", rows, n, real_size);
    arena_plan(&w->m, "first moments", rows, n, real_size);
    arena_plan(&w->v, "second moments", rows, n, real_size);
}

// weights_alloc: allocate, draw the initial parameters from `seed`, clear the rest; `params` and
// `grads` are the structs of pointers to fill.
static inline void weights_alloc(Weights *w, void *params, void *grads, uint64_t seed)
{
    arena_alloc(&w->params, params);
    arena_alloc(&w->grads, grads);
    arena_alloc(&w->m, NULL);
    arena_alloc(&w->v, NULL);
    arena_fill(&w->grads, 0);
    arena_fill(&w->m, 0);
    arena_fill(&w->v, 0);
    arena_init(&w->params, seed);
}

// weights_free: give the memory back.
static inline void weights_free(Weights *w)
{
    arena_free(&w->params);
    arena_free(&w->grads);
    arena_free(&w->m);
    arena_free(&w->v);
}

// training_print: the line that says what the run will cost: parameters (those named in
// `embeddings` apart), FLOPs a step of `tokens` tokens, bytes to allocate, threads.
static inline void training_print(const char *name, const Weights *w, const char *embeddings,
                                  double flops, size_t tokens, size_t bytes)
{
    size_t all = arena_elements(&w->params, NULL), rest = arena_elements(&w->params, embeddings);
    printf("%s: %zu parameters + %zu in embeddings, %.3g FLOPs a step, %.3g a token, %.1f MiB, %zu "
           "threads (%s)\n",
           name, rest, all - rest, flops, flops / (double)tokens, (double)bytes / (1 << 20),
           threads_count(), OPENMP_WORD);
    fflush(stdout);
}

// ---- files

// training_write: write the list's tensors to `path` with the metadata architecture,
// format_version, step, every option that defines the run, and data_checksum; see st_write for
// failures.
static inline void training_write(const char *path, const TensorList *list, const Options *options,
                                  const char *architecture, long step)
{
    StMeta meta[OPTIONS_MAX + 4];
    char values[OPTIONS_MAX][OPTION_VALUE_MAX], step_text[32];
    snprintf(step_text, sizeof step_text, "%ld", step);
    const StMeta first[] = {{"architecture", architecture},
                            {"format_version", CHECKPOINT_VERSION},
                            {"step", step_text}};
    size_t n = 3;
    memcpy(meta, first, sizeof first);
    for (int i = 0; i < options->n; i++)
        if (options->rows[i].defines) {
            option_format(&options->rows[i], values[i], OPTION_VALUE_MAX);
            meta[n].key = options->rows[i].name;
            meta[n++].value = values[i];
        }
    if (options->data_checksum) {
        meta[n].key = "data_checksum";
        meta[n++].value = options->data_checksum;
    }
    st_write(path, meta, n, list->tensors, list->n);
}

// checkpoint_save: write parameters and moments after `step` updates to `path`.
static inline void checkpoint_save(const char *path, const Weights *w, const Options *options,
                                   const char *architecture, long step)
{
    TensorList *list = (TensorList *)alloc_zero(1, sizeof *list, "tensor list");
    list_add_arena(list, "params.", &w->params);
    list_add_arena(list, "m.", &w->m);
    list_add_arena(list, "v.", &w->v);
    training_write(path, list, options, architecture, step);
    free(list);
}

// checkpoint_check: die unless the file's metadata fits this run: architecture, format version and
// each option of class `level` or above, at DEFINES_TRAINING also the data's checksum. --steps may
// change under a constant schedule; an option of training or of a task that the file lacks counts
// as its default, --task itself does not. Returns the file's step.
static inline long checkpoint_check(const StFile *file, const char *path, const Options *options,
                                    const char *architecture, int level, int schedule)
{
    const char *got = st_meta(file, "architecture"), *version = st_meta(file, "format_version");
    const char *step_text = st_meta(file, "step");
    char ours[OPTION_VALUE_MAX];
    if (!got || strcmp(got, architecture))
        die(EXIT_DATA, "%s: expected a checkpoint of %s, got one of %s", path, architecture,
            got ? got : "unknown origin");
    if (!version || strcmp(version, CHECKPOINT_VERSION))
        die(EXIT_DATA, "%s: expected format version " CHECKPOINT_VERSION ", got %s", path,
            version ? version : "none");
    for (int i = 0; i < options->n; i++) {
        const Option *o = &options->rows[i];
        const char *theirs = st_meta(file, o->name);
        if (o->defines < level || (schedule == CONSTANT && !strcmp(o->name, "steps")))
            continue;
        option_format(o, ours, sizeof ours);
        if (!theirs && o->defines != DEFINES_MODEL && strcmp(o->name, "task"))
            theirs = o->def; // the program that wrote the file did not have this option
        if (!theirs)
            die(EXIT_DATA, "%s: expected --%s in its metadata, got none", path, o->name);
        if (strcmp(theirs, ours))
            die(EXIT_DATA, "%s: was made with --%s %s, this run has %s\nhint: give --%s %s%s", path,
                o->name, theirs, ours, o->name, theirs,
                strcmp(o->name, "steps") ? "" : "; only --schedule constant lets them change");
    }
    const char *data = st_meta(file, "data_checksum"), *ours_data = options->data_checksum;
    if (level <= DEFINES_TRAINING && (data || ours_data) &&
        (!data || !ours_data || strcmp(data, ours_data)))
        die(EXIT_DATA, "%s: was trained on a file of checksum %s, this run's is %s\nhint: give the "
            "file it was trained on, with or without --val as then; --load FILE takes the weights "
            "only", path,
            data ? data : "(none)", ours_data ? ours_data : "(none)");
    size_t digits = step_text ? strspn(step_text, "0123456789") : 0;
    if (!digits || digits > 10 || step_text[digits] || strtol(step_text, NULL, 10) > 1000000000)
        die(EXIT_DATA, "%s: expected a step number in its metadata, got %s", path,
            step_text ? step_text : "none");
    return strtol(step_text, NULL, 10);
}

// checkpoint_load: read a checkpoint. With `resume` parameters and moments, and all options that
// define the run must agree; else (--load) the parameters, and the model's options must. Returns
// its step.
static inline long checkpoint_load(const char *path, Weights *w, const Options *options,
                                   const char *architecture, int resume, int schedule)
{
    StFile *file = st_open(path);
    int level = resume ? DEFINES_TRAINING : DEFINES_MODEL;
    long step = checkpoint_check(file, path, options, architecture, level, schedule);
    if (!arena_shaped(&w->params, file, "params.")) // an option of the data may be the reason
        checkpoint_check(file, path, options, architecture, DEFINES_DATA, schedule);
    size_t n = 3 * arena_count(&w->params);
    arena_match(&w->params, file, path, "params.");
    if (file->header.n != n)
        die(EXIT_DATA,
            "%s: expected %zu tensors, got %zu\nhint: is it a dump, or of another version?", path,
            n, file->header.n);
    arena_match(&w->m, file, path, "m.");
    arena_match(&w->v, file, path, "v.");
    st_verify(file);
    arena_read(&w->params, file, path, "params.");
    if (resume) {
        arena_read(&w->m, file, path, "m.");
        arena_read(&w->v, file, path, "v.");
    }
    st_close(file);
    return step;
}

// dump_write: write one batch as --dump does: inputs and targets (B,T), the loss, and the arenas
// params.*, grads.*, acts.*.
static inline void dump_write(const char *path, const int *inputs, const int *targets, size_t B,
                              size_t T, double loss, const Weights *w, const Arena *acts,
                              const Options *options, const char *architecture)
{
    struct stat st;
    if (!stat(path, &st) && S_ISREG(st.st_mode) && st.st_size && !file_has_tensor(path, "inputs"))
        die(EXIT_USAGE, "--dump %s: expected a new file or an older dump, got another file\n"
            "hint: nothing was changed; give another name", path);
    const size_t batch[] = {B, T, 0}, one[] = {1, 0}, real_size = w->params.real_size;
    TensorList *list = (TensorList *)alloc_zero(1, sizeof *list, "tensor list");
    double loss_real; // room for either size
    real_set(&loss_real, 0, real_size, loss);
    list_add(list, "", "inputs", ST_I32, batch, inputs);
    list_add(list, "", "targets", ST_I32, batch, targets);
    list_add(list, "", "loss", real_size == 8 ? ST_F64 : ST_F32, one, &loss_real);
    list_add_arena(list, "params.", &w->params);
    list_add_arena(list, "grads.", &w->grads);
    list_add_arena(list, "acts.", acts);
    training_write(path, list, options, architecture, 0);
    free(list);
    printf("dump: %s, loss %.6f\n", path, loss);
}

// ---- runs

// training_load: first weights that are not the model's own: with --load all of a checkpoint, else
// with --embed-std the embeddings of tokens, positions and <CLS>: the same numbers, scaled.
static inline void training_load(const Training *t, Weights *w, const Options *options,
                                 const char *architecture)
{
    const Init init = INIT_NORMAL(t->embed_std);
    if (t->load)
        checkpoint_load(t->load, w, options, architecture, 0, t->schedule);
    else if (t->embed_std > 0)
        for (int k = 0; k < w->params.n; k++)
            if (name_in_list(w->params.table[k].name, "wte,wpe,cls"))
                arena_draw(&w->params, k, init, t->seed);
}

// training_clean: remove what killed runs left behind in a directory: half-written checkpoints.
static inline void training_clean(const char *dir)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (!strncmp(e->d_name, CHECKPOINT_NAME ST_TEMP, strlen(CHECKPOINT_NAME ST_TEMP)))
            unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
}

// training_interrupted: 0, or the number of the signal that asked the run to end: Ctrl-C, SIGTERM.
static inline volatile sig_atomic_t *training_interrupted(void)
{
    static volatile sig_atomic_t number;
    return &number;
}

// training_on_interrupt: the handler; a second signal ends the program at once.
static inline void training_on_interrupt(int number)
{
    *training_interrupted() = number;
    signal(number, SIG_DFL);
}

// training_catch_interrupt: from now on Ctrl-C and SIGTERM, unless they are ignored, end the run
// after its present step.
static inline void training_catch_interrupt(void)
{
    const int numbers[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 2; i++)
        if (signal(numbers[i], training_on_interrupt) == SIG_IGN)
            signal(numbers[i], SIG_IGN);
}

// training_start: open the run: its directory, log.csv and, with --resume, its checkpoint, whose
// path is put in `path` (LOG_PATH); with --force the old checkpoint goes. Without steps there is no
// run. Ctrl-C is caught from here on. Returns the step to start from.
static inline long training_start(Log *log, char *path, const Training *t, Weights *w,
                                  const Options *options, const char *architecture,
                                  const char *task, const char *model, const char *device)
{
    long step = 0;
    struct stat st;
    training_catch_interrupt();
    *log = log_none();
    if (t->steps == 0)
        return 0;
    log_take_dir(log, t->out, task, model, t->resume, t->force);
    log_path(log, CHECKPOINT_NAME, path);
    if (t->resume && access(path, R_OK))
        die(EXIT_DATA, "%s: cannot read: %s\nhint: --resume goes on with a run that has saved",
            path, strerror(errno));
    if ((!lstat(path, &st) && !S_ISREG(st.st_mode)) || access(log->dir, W_OK | X_OK))
        die(EXIT_DATA, "%s: cannot be written\nhint: remove it, or give another --out", path);
    log_open(log);
    training_clean(log->dir);
    if (t->resume)
        step = checkpoint_load(path, w, options, architecture, 1, t->schedule);
    else if (unlink(path) && errno != ENOENT)
        die(EXIT_DATA, "%s: cannot remove: %s", path, strerror(errno));
    int fresh = log_start(log, t->resume ? step : -1);
    if (fresh) {
        options_print(log->csv, "#", options);
        log_header(log, device);
    }
    printf("run %s, from step %ld\n", log->dir, step);
    return step;
}

// training_stop_if_bad: die over a loss or gradient norm that is not finite, naming the first value
// that is not among parameters, activations and gradients. This step has changed no weight.
static inline void training_stop_if_bad(const char *what, double value, long step, const Weights *w,
                                        const Arena *acts)
{
    const Arena *arenas[] = {&w->params, acts, &w->grads};
    const char *name = NULL;
    size_t index = 0, i = 0;
    if (is_finite_bits(value))
        return;
    for (; i < 3 && !name; i++)
        name = arena_first_bad(arenas[i], &index);
    die(EXIT_FAIL,
        "step %ld: the %s is %g; first bad value: %s %s[%zu]; no weight was changed\n"
        "hint: a smaller --lr, a longer --warmup or a smaller --grad-clip; a checkpoint, if any, "
        "is of an earlier step",
        step, what, value, name ? arenas[i - 1]->what : "none", name ? name : "", index);
}

// training_over: 1 if the run ends before training step `step`: the steps are done, it was
// interrupted, or --stop-at is reached.
static inline int training_over(const Training *t, const Log *log, long step)
{
    return step >= t->steps || *training_interrupted() ||
           (t->stop_at > 0 && log->last_acc >= t->stop_at);
}

// training_begin: the first thing a trainer does: files must not take the place of a closed stdout,
// and a full disk or a closed pipe is an error like others, not a signal.
static inline void training_begin(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            exit(EXIT_DATA);
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

// training_end: the trainer's exit code; dies if what it printed was not written.
static inline int training_end(void)
{
    if (fflush(stdout) || ferror(stdout))
        die(EXIT_DATA, "stdout: cannot write: %s", strerror(errno));
    return *training_interrupted() ? 128 + *training_interrupted() : 0;
}

// training_result: the RESULT line. first_99 is -1 if no training batch reached 99%; greedy < 0 if
// the model does not decode. Without an evaluation (loss NaN) nothing is said of loss and accuracy.
static inline void training_result(Log *log, const char *task, const char *model,
                                   const char *size_name, int size, const LogRow *val,
                                   double greedy, double ms_per_step)
{
    const int evaluated = is_finite_bits(val->loss);
    if (*training_interrupted() && log->csv)
        log_line(log, "interrupted: saved%s; the same options with --out %s --resume go on\n",
                 evaluated ? "" : ", not evaluated", log->dir);
    log_line(log, "RESULT task=%s model=%s %s=%d steps=%ld first_99=%ld ", task, model, size_name,
             size, val->step, log->first_99);
    if (evaluated)
        printf("accuracy=%.4f ", val->acc);
    if (evaluated && greedy >= 0)
        printf("greedy_accuracy=%.4f ", greedy);
    if (val->bits > 0)
        printf("bits_per_char=%.4f ", val->bits);
    if (val->constant > 0)
        printf("macro=%.4f micro=%.4f scaled=%.4f constant=%.4f ", val->macro, val->micro,
               val->scaled, val->constant);
    if (evaluated)
        printf("loss=%.6f ", val->loss);
    printf("ms_per_step=%.3f seconds=%.1f\n", ms_per_step, seconds_now() - log->started);
}

#endif
