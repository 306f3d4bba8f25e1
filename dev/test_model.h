// test_model.h: the tests that every trainer's model must pass, whatever its layer: derivatives,
// goldens, decoding, independence, accumulation, stopping, whole runs. Included by test_X.c after
// train_X.c, dev/testing_model.h and dev/test_layers.h. A name like A14 is a row of the list of
// cases that this project keeps: failures that users of other programs have reported.
//
// test_X.c defines, before it includes this file:
//   VARIANTS, MAINS                   how many configurations the two functions below have
//   MAIN_WORDS, SMALL                 words of MAIN_OPTION (or else --model), and options of a
//                                     model that takes no time
//   CAUSAL(c), HEAD(m)                where a configuration says it, and the head, NULL if tied
//   NO_POSITIONS                      where it may be decoded without end
// and anywhere:
//   variant_config(i, B, T, &c)       tiny configuration of variant i < VARIANTS; 0: there is none
//   main_config(i, B, T, C, L)        that of model i < MAINS, as people would train it
//   config_text(&c)                   the name of a variant
// and its list of tests begins with LAYER_TESTS and MODEL_TESTS.
#ifndef SEQ_DEV_TEST_MODEL_H
#define SEQ_DEV_TEST_MODEL_H

#include "../util/log.h"

#ifndef MAIN_OPTION
#define MAIN_OPTION "--model"
#endif
#ifndef ZEROS_OVERFLOW // does the gradient where all but a large head is 0?
#define ZEROS_OVERFLOW 1
#endif

// base_config: the training options that tests start from, for the task ANY; B sequences of T.
static inline Config base_config(int B, int T)
{
    Config c;
    memset(&c, 0, sizeof c);
    c.task = ANY;
    c.task_options.string_size = T;
    c.training = (Training){.batch_size = B, .accumulate = 1, .steps = 100, .lr = 1e-3, .seed = 1};
    c.training.beta1 = 0.9;
    c.training.beta2 = 0.999;
    c.training.adam_eps = 1e-8;
    return c;
}

static int variant_config(int i, int B, int T, Config *c);
static Config main_config(int i, int B, int T, int C, int L);
static const char *config_text(const Config *c);

// model_make: an allocated model with training batch 0.
static inline Model *model_make(Config c)
{
    Model *m = alloc_zero(1, sizeof *m, "model");
    model_plan(m, &c);
    model_alloc(m);
    task_batch(m->task, &c.task_options, 1, STREAM_TRAIN, 0, &m->batch);
    return m;
}

// model_random: the same, with every parameter of order one, so that every gradient is.
static inline Model *model_random(Config c)
{
    Model *m = model_make(c);
    for (int k = 0; k < m->weights.params.n; k++)
        normal_fill(arena_data(&m->weights.params, k), tensor_size(&m->weights.params.table[k]),
                    0.5);
    return m;
}

// model_drop: free a model.
static inline void model_drop(Model *m)
{
    model_free(m);
    free(m);
}

// model_run: forward, then gradients from zero.
static inline void model_run(Model *m)
{
    model_forward(m);
    model_zero_grad(m);
    model_backward(m);
}

// model_loss: the loss of the model's batch.
static inline double model_loss(void *context)
{
    Model *m = context;
    model_forward(m);
    return m->loss;
}

// test_model_derivatives: every tensor of the parameter table, every variant; backward adds.
static inline void test_model_derivatives(void)
{
    char what[200];
    Config c;
    any_vocabulary = 5;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant_config(i, 2, 5, &c))
            continue;
        Model *m = model_random(c);
        Arena *grads = &m->weights.grads;
        model_run(m);
        const double scale = gradient_norm(grads);
        float *once = copy_of(grads->base, grads->bytes);
        for (int k = 0; k < grads->n; k++) {
            size_t n = tensor_size(&grads->table[k]);
            snprintf(what, sizeof what, "%s: gradient of %s", config_text(&c),
                     grads->table[k].name);
            central_difference(what, model_loss, m, arena_data(&m->weights.params, k),
                               arena_data(grads, k), n, scale);
        }
        model_forward(m);
        model_backward(m);
        for (int k = 0; k < grads->n; k++) {
            size_t n = tensor_size(&grads->table[k]);
            float *x = arena_data(grads, k), *want = once + grads->start[k] / sizeof(float);
            for (size_t j = 0; j < n; j++)
                want[j] *= 2;
            agree("model_backward adds", x, want, sizeof(float), n, GRAD, scale);
        }
        model_drop(m);
    }
    any_vocabulary = 29;
}

// golden_arena: compare every tensor of an arena that the file has as prefix + name; returns how
// many.
static inline int golden_arena(const Arena *a, StFile *file, const char *prefix, double bound,
                        double scale)
{
    int n = 0;
    char name[LIST_NAME], what[600];
    for (int k = 0; k < a->n; k++) {
        size_t size = tensor_size(&a->table[k]);
        snprintf(name, sizeof name, "%s%s", prefix, a->table[k].name);
        const StEntry *entry = st_find(file, name);
        if (!entry || !size)
            continue;
        double *want = take(st_count(entry) * sizeof *want);
        st_read_real(file, entry, want, sizeof *want);
        snprintf(what, sizeof what, "%.500s: %s", file->path, name);
        if (CHECK(st_count(entry) == size, "%s: %zu elements, got %zu", what, st_count(entry),
                  size))
            agree(what, arena_data(a, k), want, sizeof *want, size, bound, scale);
        n++;
    }
    return n;
}

// golden_options: set in c the model's options that a golden's metadata names.
static inline void golden_options(const StFile *file, Config *c)
{
    static Options options;
    const Training training = c->training;
    const int task = c->task;
    options.n = 0;
    config_options(&options, c);
    options_reset(&options);
    for (int i = 0; i < options.n; i++)
        if (options.rows[i].defines == DEFINES_MODEL && st_meta(file, options.rows[i].name))
            option_set(&options.rows[i], st_meta(file, options.rows[i].name));
    c->training = training;
    c->task = task;
}

// golden_model: a model with the options, sizes, parameters and batch of a golden; sizes(file, &c)
// fills in what its shapes say of the model's.
static inline Model *golden_model(StFile *file, const char *path,
                                  void (*sizes)(const StFile *, Config *))
{
    const StEntry *inputs = st_find(file, "inputs");
    const StEntry *patches = st_find(file, "acts.patches"), *wte = st_find(file, "params.wte");
    Config c = base_config((int)inputs->shape[0], 0);
    golden_options(file, &c);
    c.task_options.string_size = (int)inputs->shape[1];
    any_vocabulary = wte ? wte->shape[0] : 0;
    if (patches) { // an image of one row
        c.task = IMAGES;
        c.task_options.images = images_small(1, patches->shape[1] - 1, patches->shape[2],
                                             st_find(file, "params.head_w")->shape[0], 1);
    }
    sizes(file, &c);
    Model *m = model_make(c);
    if (patches)
        st_read_real(file, patches, m->batch.patches, sizeof *m->batch.patches);
    st_read_int32(file, inputs, m->batch.inputs);
    st_read_int32(file, st_find(file, "targets"), m->batch.targets);
    arena_read(&m->weights.params, file, path, "params.");
    return m;
}

// goldens_check: activations (n_acts of them), loss and gradients of every file that a script in
// dev/ref wrote to `directory`, n_files.
static inline void goldens_check(const char *directory, int n_files, int n_acts,
                                 void (*sizes)(const StFile *, Config *))
{
    const double forward = IS_DOUBLE ? 1e-9 : BOUND_FORWARD_FP32;
    char path[512];
    int files = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%.400s", directory, e->d_name);
        StFile *file = st_open(path);
        Model *m = golden_model(file, path, sizes);
        double loss;
        st_read_real(file, st_find(file, "loss"), &loss, sizeof loss);
        model_run(m);
        double scale = gradient_norm(&m->weights.grads);
        int acts = golden_arena(&m->acts_arena, file, "acts.", forward, 0);
        int grads = golden_arena(&m->weights.grads, file, "grads.",
                                 IS_DOUBLE ? 1e-9 : BOUND_GRAD_FP32, scale);
        CHECK(acts == n_acts + (m->batch.D > 0) && grads == (int)arena_count(&m->weights.grads),
              "%s: %d activations, %d gradients", path, acts, grads);
        CHECK(fabs(m->loss - loss) <= forward * loss, "%s: loss %.12g, got %.12g", path, loss,
              m->loss);
        model_drop(m);
        st_close(file);
        give_all_back();
        files++;
    }
    if (d)
        closedir(d);
    CHECK(files == n_files, "%s: expected %d goldens, found %d (run from the repository's root)",
          directory, n_files, files);
    any_vocabulary = 29;
}

// decode_all: logits (B,T,V) of the batch's inputs, decoded token by token.
static inline float *decode_all(Model *m)
{
    float *logits = reals(m->B * m->T * m->V);
    int *tokens = take(m->B * sizeof *tokens);
    for (size_t t = 0; t < m->T; t++) {
        for (size_t b = 0; b < m->B; b++)
            tokens[b] = m->batch.inputs[b * m->T + t];
        const float *row = model_decode(m, tokens, t, m->B);
        for (size_t b = 0; b < m->B; b++)
            memcpy(logits + (b * m->T + t) * m->V, row + b * m->V, m->V * sizeof *row);
    }
    return logits;
}

// test_decode: decoding = parallel for every causal variant, T=1 too, and at T=130; starting anew
// forgets (B22).
static inline void test_decode(void)
{
    const double bound = IS_DOUBLE ? 1e-11 : 1e-5;
    static const int lengths[] = {1, 12, 130};
    Config c;
    for (int i = 0; i < VARIANTS; i++)
        for (size_t k = 0; k < 3; k++, give_all_back()) {
            if (!variant_config(i, 2, lengths[k], &c))
                continue;
            Model *m = model_random(c);
            size_t n = m->B * m->T * m->V;
            if (m->decode_B) {
                model_forward(m);
                float *once = decode_all(m), *twice = decode_all(m);
                agree(config_text(&c), once, m->acts.logits, sizeof(float), n, bound, 0);
                CHECK(same_bits(once, twice, n), "B22: %s: decoding starts anew", config_text(&c));
            }
            model_drop(m);
        }
}

// test_decode_stops: once a run is interrupted nothing more is decoded, and the task has no score.
static inline void test_decode_stops(void)
{
    Config c;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant_config(i, 2, 12, &c))
            continue;
        Model *m = model_random(c);
        int *said = take(m->T * sizeof *said);
        for (int stop = 0; stop < 2 && m->decode_B; stop++) {
            *training_interrupted() = stop ? SIGINT : 0;
            const size_t n = decode(m, said, m->batch.inputs, 1, m->T, 1, (Sampler){0});
            const double score = greedy(m);
            *training_interrupted() = 0;
            CHECK(n == (stop ? 0 : m->T) && (score < 0) == stop,
                  "%s, interrupted %d: decoded %zu positions, score %g", config_text(&c), stop, n,
                  score);
        }
        model_drop(m);
    }
}

// decode_past: decode position T, one too many.
static inline void decode_past(void *context)
{
    Model *m = context;
    model_decode(m, m->batch.inputs, m->T, 1);
}

// decode_far: decode position 10 T.
static inline void decode_far(void *context)
{
    Model *m = context;
    model_decode(m, m->batch.inputs, 10 * m->T, 1);
}

// forward_of: a forward pass, for batches that must be refused.
static inline void forward_of(void *context)
{
    model_forward(context);
}

// test_refused: B19: decoding past the positions; A16: targets and tokens out of range.
static inline void test_refused(void)
{
    static const int targets[] = {29, 30, -2, INT32_MIN, INT32_MAX};
    static const int tokens[] = {29, -1, INT32_MIN, INT32_MAX};
    Model *m = model_random(main_config(0, 2, 6, 8, 2));
#ifdef NO_POSITIONS
    CHECK(!run_child(decode_past, m).code && !run_child(decode_far, m).code, "no last position");
#else
    expect_die(decode_past, m, EXIT_USAGE, "past the 6 learned");
    expect_die(decode_far, m, EXIT_USAGE, "past the 6 learned");
#endif
    for (size_t i = 0; i < 5; i++) {
        int keep = m->batch.targets[11];
        m->batch.targets[11] = targets[i];
        expect_die(forward_of, m, EXIT_DATA, "expected a target from 0 to 28");
        m->batch.targets[11] = keep;
    }
    for (size_t i = 0; i < 4; i++) {
        int keep = m->batch.inputs[0];
        m->batch.inputs[0] = tokens[i];
        expect_die(forward_of, m, EXIT_DATA, "expected a token from 0 to 28");
        m->batch.inputs[0] = keep;
    }
    model_drop(m);
}

// test_independence: every variant: logits before a changed token keep their bits when causal;
// other rows of the batch keep theirs; rows permute with the batch (B22).
static inline void test_independence(void)
{
    enum { B = 3, T = 40, AT = 33 };
    Config c;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant_config(i, B, T, &c))
            continue;
        Model *m = model_random(c);
        size_t row = T * m->V;
        float *x = m->acts.logits;
        int *inputs = m->batch.inputs, first[T];
        model_forward(m);
        float *before = copy_of(x, B * row * sizeof *x);
        inputs[T + AT] = (inputs[T + AT] + 1) % 29; // row 1
        model_forward(m);
        CHECK(same_bits(x, before, row) && same_bits(x + 2 * row, before + 2 * row, row),
              "%s: rows are independent", config_text(&c));
        CHECK(!m->decode_B || same_bits(x + row, before + row, AT * m->V), "%s: causal",
              config_text(&c));
        CHECK(!same_bits(x + row + AT * m->V, before + row + AT * m->V, m->V),
              "%s: the changed token changes its logits", config_text(&c));
        memcpy(before, x, B * row * sizeof *x);
        memcpy(first, inputs, sizeof first);
        memmove(inputs, inputs + T, (B - 1) * sizeof first);
        memcpy(inputs + (B - 1) * T, first, sizeof first);
        model_forward(m);
        CHECK(same_bits(x, before + row, (B - 1) * row) &&
                  same_bits(x + (B - 1) * row, before, row),
              "B22: %s: rows permute", config_text(&c));
        model_drop(m);
    }
}

// test_poison: A24: every variant: with NaN in every activation and scratch the gradients keep
// their bits; B22: and after another batch.
static inline void test_poison(void)
{
    Config c;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant_config(i, 2, 35, &c))
            continue;
        Model *m = model_random(c);
        model_run(m);
        float *clean = copy_of(m->weights.grads.base, m->weights.grads.bytes);
        arena_fill(&m->acts_arena, CANARY);
        arena_fill(&m->dacts_arena, CANARY);
        model_run(m);
        CHECK(!memcmp(clean, m->weights.grads.base, m->weights.grads.bytes),
              "A24: %s: NaN left in buffers", config_text(&c));
        for (int step = 1; step >= 0; step--) {
            task_batch(m->task, &m->config.task_options, 1, STREAM_TRAIN, step, &m->batch);
            model_run(m);
        }
        CHECK(!memcmp(clean, m->weights.grads.base, m->weights.grads.bytes),
              "B22: %s: another batch in between", config_text(&c));
        arena_check(&m->weights.grads);
        arena_check(&m->acts_arena);
        arena_check(&m->dacts_arena);
        model_drop(m);
    }
}

// test_ignored: A15: a batch without targets: loss 0, all gradients 0, an update moves nothing.
static inline void test_ignored(void)
{
    for (int i = 0; i < MAINS; i++, give_all_back()) {
        Model *m = model_random(main_config(i, 1, 8, 8, 2));
        for (size_t t = 0; t < m->T; t++)
            m->batch.targets[t] = IGNORE;
        char *before = trained_copy(&m->weights);
        model_run(m);
        adamw(&m->weights, &m->config.training, 1e-3, 1, 0);
        CHECK(m->loss == 0 && gradient_norm(&m->weights.grads) == 0, "A15: loss %g", m->loss);
        CHECK(trained_same(&m->weights, before), "A15: nothing moved");
        model_drop(m);
    }
}

// one_update: in a child: everything an update touches, decoding too; NULL: nothing.
static inline void one_update(void *config)
{
    LogRow row;
    Model *m = config ? model_make(*(Config *)config) : NULL;
    if (!m)
        return;
    train_step(m, 0, &row);
    if (m->decode_B)
        greedy(m);
}

// test_memory: the peak resident size grows by what the plan says, to 5%. Many narrow layers take
// as much memory as a few wide ones and less time.
static inline void test_memory(void)
{
    for (int i = 0; i < MAINS; i++) {
        Config c = main_config(i, IS_DOUBLE ? 24 : 48, 32, 48, 24);
        Model plan;
        model_plan(&plan, &c);
        double before = 1024.0 * (double)run_child(one_update, NULL).peak_kib;
        double grown = 1024.0 * (double)run_child(one_update, &c).peak_kib - before;
        double planned = (double)model_bytes(&plan);
#ifdef POISON
        grown = planned; // sanitizers take memory of their own
#endif
        CHECK(fabs(grown - planned) < 0.05 * planned, "planned %.0f bytes, took %.0f", planned,
              grown);
    }
}

// test_threads: 1, 2 and 3 threads: loss and gradients keep their bits.
static inline void test_threads(void)
{
    for (int i = 0; i < 2 * MAINS; i++, give_all_back()) {
        Config c = main_config(i / 2, 8, 90, 96, 2);
        float *one = NULL;
        double loss = 0;
        CAUSAL(c) = i & 1;
        for (int threads = 1; threads <= 3; threads++) {
            threads_set(threads);
            draws = 0;
            Model *m = model_random(c);
            Arena *grads = &m->weights.grads;
            model_run(m);
            one = one ? one : copy_of(grads->base, grads->bytes);
            loss = threads == 1 ? m->loss : loss;
            CHECK(loss == m->loss && !memcmp(one, grads->base, grads->bytes),
                  "E04: %s: %d threads, the bits of one", config_text(&c), threads);
            model_drop(m);
        }
        threads_set(1);
    }
}

// test_train_step: an update is clipped gradients of its own batch into AdamW, at the rate of its
// step; what is logged; B05: T=1 and B=1 train.
static inline void test_train_step(void)
{
    static const double clips[] = {0, 1e-3, 1e3};
    LogRow row;
    for (size_t i = 0; i < 3; i++, give_all_back()) {
        Config c = main_config(0, 2, 5, 8, 2);
        c.training.grad_clip = clips[i];
        c.training.warmup = 10;
        Model *x = model_random(c), *y = model_make(c);
        arena_copy_values(&y->weights.params, &x->weights.params);
        train_step(x, 3, &row);
        task_batch(y->task, &c.task_options, 1, STREAM_TRAIN, 3, &y->batch);
        model_run(y);
        double norm = gradient_norm(&y->weights.grads);
        adamw(&y->weights, &c.training, 0.4 * c.training.lr, i == 1 ? 1e-3 / norm : 1, 3);
        CHECK(arenas_equal(&x->weights.params, &y->weights.params), "a step, clip %g", clips[i]);
        CHECK(row.step == 3 && row.loss == y->loss && row.grad_norm == norm &&
                  fabs(row.lr - 4e-4) < 1e-15,
              "what a step logs, clip %g", clips[i]);
        double sum = 0; // the norm of the whole table
        for (int k = 0; k < y->weights.grads.n; k++) {
            const float *g = arena_data(&y->weights.grads, k);
            sum += dot(g, g, tensor_size(&y->weights.grads.table[k]));
        }
        CHECK(fabs(norm - sqrt(sum)) <= 1e-12 * norm, "gradient norm %.17g, got %.17g", sqrt(sum),
              norm);
        model_drop(x);
        model_drop(y);
    }
    for (int i = 0; i < VARIANTS; i++) {
        Config c;
        if (!variant_config(i, 1, 1, &c))
            continue;
        Model *m = model_random(c);
        for (long step = 0; step < 3; step++)
            train_step(m, step, &row);
        CHECK(is_finite_bits(row.loss) && row.grad_norm > 0, "B05: %s: T=1, B=1", config_text(&c));
        model_drop(m);
        give_all_back();
    }
}

// relative: the largest relative error of arenas got and want, tensor by tensor, in L2; tensors far
// below the largest are measured against that.
static inline double relative(const Arena *got, const Arena *want)
{
    double worst = 0, largest = gradient_norm(want);
    for (int k = 0; k < want->n; k++) {
        size_t n = tensor_size(&want->table[k]);
        if (!n)
            continue;
        Comparison x = compare(arena_data(got, k), sizeof(float), arena_data(want, k),
                               sizeof(float), n, 1, 0);
        double error = x.rel_l2 * fmin(1, x.norm_ref / (1e-3 * largest));
        worst = x.norm_ref == 0 || error <= worst ? worst : error; // NaN stays
    }
    return worst;
}

// test_accumulate: F06: updates of 8 sequences as 8 x 1, 4 x 2 and 1 x 8, with uneven targets;
// F02: the step and rate that are logged count updates.
static inline void test_accumulate(void)
{
    static const int sizes[] = {8, 4, 1};
    const double tight = IS_DOUBLE ? 1e-6 : 1;
    for (int i = 0; i < MAINS; i++, give_all_back()) {
        Model *m[3];
        LogRow row[3];
        for (int k = 0; k < 3; k++) {
            Config c = main_config(i, sizes[k], 3, 8, 2);
            c.training.accumulate = 8 / c.training.batch_size;
            c.training.warmup = 10;
            c.training.adam_eps = 1e-4; // the gradient of gpt2's key biases is rounding only
            draws = 0;
            m[k] = model_random(c);
            forward_backward(m[k], 0);
        }
        for (int k = 1; k < 3; k++) {
            double error = relative(&m[k]->weights.grads, &m[0]->weights.grads);
            CHECK(error < 1e-5 * tight, "F06: %s: gradients of %zu x %d: %.3g",
                  config_text(&m[k]->config), m[k]->B, m[k]->config.training.accumulate, error);
        }
        for (long step = 0; step < 3; step++)
            for (int k = 0; k < 3; k++) {
                train_step(m[k], step, &row[k]);
                CHECK(fabs(row[k].loss - row[0].loss) <= 1e-6 * tight * row[0].loss &&
                          fabs(row[k].acc - row[0].acc) < 1e-12,
                      "F06: loss %.9g, accuracy %g, expected %.9g, %g", row[k].loss, row[k].acc,
                      row[0].loss, row[0].acc);
                CHECK(row[k].step == step && row[k].lr == row[0].lr, "F02: step %ld, lr %g",
                      row[k].step, row[k].lr);
            }
        for (int k = 1; k < 3; k++) {
            double error = relative(&m[k]->weights.params, &m[0]->weights.params);
            CHECK(error < 1e-5 * tight, "F06: weights after 3 updates: %.3g", error);
        }
        for (int k = 0; k < 3; k++)
            model_drop(m[k]);
    }
}

// test_unseen: A21: embeddings of tokens that three batches do not hold keep their bits, with the
// smallest eps too.
static inline void test_unseen(void)
{
    for (int i = 0; i < MAINS; i++, give_all_back()) {
        Config c = main_config(i, 1, 2, 8, 2);
        LogRow row;
        int seen[29] = {0}, moved = 0;
        c.task = COPYING;
        c.training.adam_eps = 1e-15;
        Model *m = model_random(c);
        if (!HEAD(m)) { // tied to the embedding, it moves all of it
            model_drop(m);
            continue;
        }
        float *before = copy_of(m->params.wte, 29 * m->C * sizeof *before);
        for (long step = 0; step < 3; step++) {
            train_step(m, step, &row);
            for (size_t t = 0; t < m->T; t++)
                seen[m->batch.inputs[t]] = 1;
        }
        for (size_t v = 0; v < 29; v++) {
            int same = same_bits(before + v * m->C, m->params.wte + v * m->C, m->C);
            CHECK(same == !seen[v], "A21: token %zu, %sseen", v, seen[v] ? "" : "un");
            moved += !same;
        }
        CHECK(moved >= 2 && moved < 9, "A21: %d tokens moved", moved);
        model_drop(m);
    }
}

enum { CHANGED = 78 }; // exit code of a child that changed a weight before it died
static Model *watched;
static const char *watched_copy;

// exit_if_changed: at exit: if the step that stopped the run has changed a weight or moment, the
// exit code says so.
static inline void exit_if_changed(void)
{
    if (!trained_same(&watched->weights, watched_copy))
        _exit(CHANGED);
}

// train_watched: a hundred steps, see exit_if_changed.
static inline void train_watched(void *context)
{
    LogRow row;
    watched = context;
    atexit(exit_if_changed);
    for (long step = 0; step < 100; step++) {
        watched_copy = trained_copy(&watched->weights);
        train_step(watched, step, &row);
    }
}

// stop_if_bad: what train_step does with a gradient norm.
static inline void stop_if_bad(void *context)
{
    Model *m = context;
    training_stop_if_bad("gradient norm", gradient_norm(&m->weights.grads), 7, &m->weights,
                         &m->acts_arena);
}

// test_stop: A27, F08: a loss, a gradient, a learning rate that is not finite or far too large ends
// the run with exit code 1 and changes nothing; every tensor's first and last gradient counts.
static inline void test_stop(void)
{
    const double huge = IS_DOUBLE ? 1e308 : 1e38;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        Config c;
        if (!variant_config(i, 2, 5, &c))
            continue;
        Model *m = model_random(c);
        float *read = m->params.wte + (size_t)m->batch.inputs[0] * m->C + 5, keep = *read;
        *read = NAN;
        expect_die(train_watched, m, EXIT_FAIL, "step 0");
        *read = keep;
        m->config.training.lr = huge;
        expect_die(train_watched, m, EXIT_FAIL, "no weight was changed");
        arena_fill(&m->weights.params, 0); // loss ln 29; gradients overflow
        m->config.training.lr = c.training.lr;
        if (HEAD(m) && ZEROS_OVERFLOW) { // a tied one would make the loss overflow first
            normal_fill(HEAD(m), m->V * m->C, huge / 10);
            expect_die(train_watched, m, EXIT_FAIL, "step 0: the gradient norm");
        }
        model_drop(m);
    }
    Model *m = model_random(main_config(0, 2, 5, 8, 2));
    model_run(m);
    CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "a finite gradient");
    for (int k = 0; k < m->weights.grads.n; k++)
        for (int i = 0; i < 4; i++) {
            const Tensor *row = &m->weights.grads.table[k];
            if (!tensor_size(row))
                continue;
            float *g = arena_data(&m->weights.grads, k);
            float *at = g + (i & 1 ? tensor_size(row) - 1 : 0);
            float keep = *at;
            *at = i & 2 ? NAN : INFINITY;
            expect_die(stop_if_bad, m, EXIT_FAIL, row->name);
            *at = keep;
        }
    model_drop(m);
}

// run_options: fill the trainer's own configuration from a line of options.
static inline void run_options(Options *options, const char *line)
{
    static char text[4096];
    enum { RUN_WORDS = 48 };
    char *words[RUN_WORDS] = {"train_" ARCHITECTURE}, *w;
    int n = 1;
    snprintf(text, sizeof text, "%s", line);
    for (w = strtok(text, " "); w && n < RUN_WORDS; w = strtok(NULL, " "))
        words[n++] = w;
    CHECK(!w, "%s: more than %d words", line, RUN_WORDS);
    memset(&config, 0, sizeof config);
    options->n = 0;
    config_options(options, &config);
    options_parse(options, PRESETS, n, words, "", preset_cost);
    config_check(&config);
}

// run: train() with these options, its console output hidden; the model after it.
static inline Model *run(const char *line)
{
    static Options options;
    run_options(&options, line);
    fflush(stdout);
    int console = dup(STDOUT_FILENO), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    if (config.task == IMAGES || config.task_options.images.path)
        task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 1);
    Model *m = model_make(config);
    train(m, &options);
    fflush(stdout);
    dup2(console, STDOUT_FILENO);
    close(console);
    close(nowhere);
    return m;
}

// refused_options: parse a line that must be refused.
static inline void refused_options(void *context)
{
    static Options options;
    run_options(&options, context);
}

// presets_check: every preset parses and has a cost.
static inline void presets_check(void)
{
    static Options options;
    char line[64], cost[64];
    for (const Preset *p = PRESETS; p->name; p++) {
        snprintf(line, sizeof line, "--preset %s", p->name);
        run_options(&options, line);
        preset_cost(cost, sizeof cost);
        CHECK(strstr(cost, "FLOPs"), "--preset %s: %s", p->name, cost);
    }
}

// test_resume: two runs of 12 steps, and one of 7 resumed to 12, end in the same bits, moments too.
static inline void test_resume(void)
{
    static const char *const models[] = MAIN_WORDS;
    char line[4096], name[2] = "";
    for (int model = 0; model < MAINS; model++) {
        static const char *const ends[] = {"--steps 12", "--steps 7", "--steps 12 --resume",
                                           "--steps 12"};
        Model *m[4];
        for (int i = 0; i < 4; i++) {
            name[0] = (char)('0' + (i == 2 ? 1 : i));
            snprintf(line, sizeof line, SMALL MAIN_OPTION " %s --out %s %s", models[model],
                     in_dir(name), ends[i]);
            m[i] = run(line);
        }
        char *whole = trained_copy(&m[0]->weights);
        CHECK(trained_same(&m[2]->weights, whole), "%s: resumed = unbroken", models[model]);
        CHECK(trained_same(&m[3]->weights, whole), "%s: two runs are equal", models[model]);
        CHECK(!trained_same(&m[1]->weights, whole), "%s: 7 steps are not 12", models[model]);
        for (int i = 0; i < 4; i++)
            model_drop(m[i]);
        empty_dir("");
        give_all_back();
    }
}

// test_main_preset: slow: `make run` with five other seeds.
static inline void test_main_preset(void)
{
    char line[4096];
    for (int seed = 2; seed <= 6 && !IS_DOUBLE; seed++) {
        snprintf(line, sizeof line, "--preset %s --seed %d --out %s", PRESETS[0].name, seed,
                 in_dir("main"));
        threads_set(2);
        double start = seconds_now();
        Model *m = run(line);
        LogRow row = evaluate(m, 0);
        double own = greedy(m);
        printf("preset %s, seed %d: accuracy %.4f, greedy %.4f, %.1f s\n", PRESETS[0].name, seed,
               row.acc, own, seconds_now() - start);
        CHECK(row.acc >= 0.99 && own >= 0.99, "preset %s, seed %d: %.4f, %.4f", PRESETS[0].name,
              seed, row.acc, own);
        empty_dir("");
        model_drop(m);
        threads_set(1);
    }
}

typedef struct {
    const char *name;
    void (*run)(void);
    int slow;
} TestRow;

// tests_run: every test of the list (n), with the word `long` the slow ones too, or the one that is
// named; returns the exit code.
static inline int tests_run(const TestRow *tests, size_t n, int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "";
    int known = !*word || !strcmp(word, "long");
    make_dir();
    threads_set(1); // most tests are smaller than what starting a thread costs
    for (size_t i = 0; i < n; i++) {
        int named = !strcmp(word, tests[i].name), failed = *test_count(1), passed = *test_count(0);
        double start = seconds_now();
        known |= named;
        if (!named && ((*word && strcmp(word, "long")) || (tests[i].slow && !*word)))
            continue;
        tests[i].run();
        give_all_back();
        printf("%-20s %6d passed, %d failed, %.2f s\n", tests[i].name, *test_count(0) - passed,
               *test_count(1) - failed, seconds_now() - start);
    }
    if (!known)
        die(EXIT_USAGE, "expected long, the name of a test or nothing, got \"%s\"", word);
    return test_report();
}

// MODEL_TESTS: the rows of TESTS that this file has.
#define MODEL_TESTS \
    {"model derivatives", test_model_derivatives, 0}, \
    {"decode", test_decode, 0}, \
    {"decode stops", test_decode_stops, 0}, \
    {"refused", test_refused, 0}, \
    {"independence", test_independence, 0}, \
    {"poison", test_poison, 0}, \
    {"ignored targets", test_ignored, 0}, \
    {"memory", test_memory, 0}, \
    {"threads", test_threads, 0}, \
    {"train step", test_train_step, 0}, \
    {"accumulate", test_accumulate, 0}, \
    {"unseen tokens", test_unseen, 0}, \
    {"stop", test_stop, 0}, \
    {"resume", test_resume, 0}, \
    {"main preset", test_main_preset, 1}

#endif
