// test_patches.h: the tests of a trainer that reads images: batches, what the first layer reads,
// derivatives, independence, evaluations, whole runs, what is refused. Included after
// dev/test_model.h; test_X.c defines SMALL_MODEL as well, SMALL without the size of its task.
#ifndef SEQ_DEV_TEST_PATCHES_H
#define SEQ_DEV_TEST_PATCHES_H

// image_config: variant i on images of 4 x 6 pixels, 6 patches of 8 numbers; 0: it is causal.
static inline int image_config(int i, int B, Config *c)
{
    if (!variant_config(i, B, 1, c) || CAUSAL(*c))
        return 0;
    c->task = IMAGES;
    c->task_options.images = images_small(4, 6, 2, 5, 2);
    return 1;
}

// image_drop: free a model, and unmap its images.
static inline void image_drop(Model *m)
{
    images_close(&m->config.task_options.images);
    model_drop(m);
}

// test_image_derivatives: every tensor of the parameter table; backward adds; NaN in buffers.
static inline void test_image_derivatives(void)
{
    char what[200];
    Config c;
    int seen = 0;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!image_config(i, 2, &c))
            continue;
        Model *m = model_random(c);
        Arena *grads = &m->weights.grads;
        model_run(m);
        const double scale = gradient_norm(grads);
        float *once = copy_of(grads->base, grads->bytes);
        for (int k = 0; k < grads->n; k++) {
            const size_t n = tensor_size(&grads->table[k]);
            const char *name = grads->table[k].name;
            snprintf(what, sizeof what, "%s, images: gradient of %s", config_text(&c), name);
            central_difference(what, model_loss, m, arena_data(&m->weights.params, k),
                               arena_data(grads, k), n, scale);
            seen += n && (!strcmp(name, "patch_w") || !strcmp(name, "cls"));
            CHECK(!n || strcmp(name, "wte"), "%s: no tokens", config_text(&c));
        }
        arena_fill(&m->acts_arena, CANARY);
        arena_fill(&m->dacts_arena, CANARY);
        model_run(m);
        CHECK(!memcmp(once, grads->base, grads->bytes), "%s: NaN left in buffers", config_text(&c));
        model_forward(m);
        model_backward(m);
        for (int k = 0; k < grads->n; k++) {
            const size_t n = tensor_size(&grads->table[k]);
            float *want = once + grads->start[k] / sizeof(float);
            for (size_t j = 0; j < n; j++)
                want[j] *= 2;
            agree("model_backward adds", arena_data(grads, k), want, sizeof(float), n, GRAD, scale);
        }
        arena_check(&m->weights.grads);
        arena_check(&m->acts_arena);
        image_drop(m);
    }
    CHECK(seen && seen % 2 == 0, "patch_w and cls have gradients: %d", seen);
}

// pixel_at: pixel (y, x, channel) of image i as the model is to read it.
static inline double pixel_at(const Images *im, size_t i, size_t y, size_t x, size_t channel)
{
    const unsigned char *p = im->file.map + IMAGES_HEADER + im->train + im->test;
    return im->levels[channel][p[((i * im->H + y) * im->W + x) * im->channels + channel]];
}

// test_image_input: x is what the equations say, straight from the file's pixels, <CLS> last; and
// the one target is the label of the image.
static inline void test_image_input(void)
{
    Config c = main_config(MAINS - 1, 3, 1, 8, 1);
    CAUSAL(c) = 0;
    c.task = IMAGES;
    c.task_options.images = images_small(4, 6, 2, 5, 2);
    Model *m = model_random(c);
    const Images *im = &m->config.task_options.images;
    const size_t T = 7, C = 8, D = 8;
    double *want = take(3 * T * C * sizeof *want);
    model_forward(m);
    CHECK(m->T == T && m->V == 5 && m->batch.D == D, "T=%zu V=%zu D=%zu", m->T, m->V, m->batch.D);
    for (size_t i = 0; i < 3 * T * C; i++) {
        const size_t b = i / (T * C), t = i / C % T, ch = i % C;
        const size_t image = images_index(im, 1, STREAM_TRAIN + b);
        want[i] = m->params.wpe[t * C + ch] + (t == T - 1 ? m->params.cls[ch] : 0);
        for (size_t d = 0; d < D && t < T - 1; d++)
            want[i] += m->params.patch_w[ch * D + d] *
                       pixel_at(im, image, t / 3 * 2 + d / 4, t % 3 * 2 + d / 2 % 2, d % 2);
        CHECK(m->batch.targets[b * T + t] ==
                  (t < T - 1 ? IGNORE : im->file.map[IMAGES_HEADER + image]), "target %zu", i);
    }
    agree("x of images", m->acts.x, want, sizeof *want, 3 * T * C, FORWARD, 0);
    image_drop(m);
}

// unopened: a batch of images whose file is not open, in a child.
static inline void unopened(void *batch)
{
    TaskOptions o;
    memset(&o, 0, sizeof o);
    o.images.patch = 2;
    task_batch(&TASKS[IMAGES], &o, 1, STREAM_TRAIN, 0, (Batch *)batch);
}

// test_image_batch: whatever was in a batch before, inputs are 0, targets ignored but for <CLS>'s,
// patches 0 where it stands, and all of that past the last of 7 images to evaluate on.
static inline void test_image_batch(void)
{
    TaskOptions o;
    Batch batch;
    memset(&o, 0, sizeof o);
    o.images = images_small(4, 6, 2, 5, 2);
    const size_t B = 3, T = 7, D = 8;
    batch_alloc(&batch, B, T);
    task_batch(&TASKS[IMAGES], &o, 1, STREAM_EVAL, 0, &batch);
    CHECK(batch.B == B && batch.T == T && batch.D == D, "B=%zu T=%zu D=%zu", batch.B, batch.T,
          batch.D);
    for (long number = 0; number < 3; number++) {
        memset(batch.inputs, 1, B * T * sizeof *batch.inputs);
        memset(batch.targets, 1, B * T * sizeof *batch.targets);
        memset(batch.patches, 1, B * T * D * sizeof *batch.patches);
        task_batch(&TASKS[IMAGES], &o, 1, STREAM_EVAL, number, &batch);
        for (size_t i = 0; i < B * T; i++) {
            const int image = number * 3 + (long)(i / T) < 7, cls = i % T == T - 1;
            size_t zeros = 0;
            for (size_t d = 0; d < D; d++)
                zeros += batch.patches[i * D + d] == 0;
            CHECK(batch.inputs[i] == 0 && (batch.targets[i] != IGNORE) == (image && cls) &&
                      (zeros == D) == (!image || cls),
                  "batch %ld, position %zu: input %d, target %d, %zu zeros", number, i,
                  batch.inputs[i], batch.targets[i], zeros);
        }
    }
    batch_check(&batch, 5);
    CHECK(batch_targets(&batch) == 1, "%g targets", batch_targets(&batch));
    expect_die(unopened, &batch, EXIT_FAIL, "--task images: a batch is asked for before task_open");
    images_close(&o.images);
    batch_free(&batch);
}

// test_image_reach: <CLS> sees every patch; other images keep their bits, and move with their rows.
static inline void test_image_reach(void)
{
    Config c;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!image_config(i, 3, &c))
            continue;
        Model *m = model_random(c);
        const size_t row = m->T * m->V, D = m->batch.D, n = m->T * D;
        float *x = m->acts.logits;
        model_forward(m);
        float *before = copy_of(x, 3 * row * sizeof *x);
        for (size_t t = 0; t + 1 < m->T; t++) {
            m->batch.patches[n + t * D + t % D] += 1;
            model_forward(m);
            CHECK(same_bits(x, before, row) && same_bits(x + 2 * row, before + 2 * row, row) &&
                      !same_bits(x + 2 * row - m->V, before + 2 * row - m->V, m->V),
                  "%s: patch %zu reaches <CLS> of its image alone", config_text(&c), t);
            m->batch.patches[n + t * D + t % D] -= 1;
        }
        task_batch(m->task, &m->config.task_options, 1, STREAM_TRAIN, 0, &m->batch);
        memmove(m->batch.patches, m->batch.patches + n, 2 * n * sizeof *m->batch.patches);
        model_forward(m);
        CHECK(same_bits(x, before + row, 2 * row), "%s: rows move", config_text(&c));
        image_drop(m);
    }
}

// test_image_evaluation: every held-out image counts once, whatever the batch: 7 of them, in three
// batches of 3 or seven of 1.
static inline void test_image_evaluation(void)
{
    LogRow rows[2];
    for (int k = 0; k < 2; k++) {
        Config c = main_config(0, k ? 1 : 3, 1, 8, 1);
        CAUSAL(c) = 0;
        c.task = IMAGES;
        c.task_options.images = images_small(4, 6, 2, 5, 2);
        draws = 0;
        Model *m = model_random(c);
        rows[k] = evaluate(m, 0);
        const double right = rows[k].acc * 7;
        CHECK(fabs(right - round(right)) < 1e-9, "%g of 7 right", right);
        c.task_options.eval_batches = 1;
        CHECK(task_eval_batches(m->task, &c.task_options, 3) == 1, "--eval-batches 1");
        image_drop(m);
    }
    CHECK(fabs(rows[0].acc - rows[1].acc) < 1e-12, "accuracy %g in threes, %g one by one",
          rows[0].acc, rows[1].acc);
    CHECK(fabs(rows[0].loss - rows[1].loss) < 1e-5 * rows[0].loss, "loss %.9g in threes, %.9g",
          rows[0].loss, rows[1].loss);
}

// refused_run: a run that must end with an error, in a child; its console says nothing else.
static inline void refused_run(void *line)
{
    if (freopen("/dev/null", "wb", stdout))
        run((const char *)line);
}

// image_line: options of a run of model 0, 1, ... on a file of in_dir, in a buffer that the next
// call uses again.
static inline char *image_line(int model, const char *file, const char *rest)
{
    static const char *const models[] = MAIN_WORDS;
    static char line[4096];
    snprintf(line, sizeof line, SMALL_MODEL MAIN_OPTION " %s --task images --patch 2 --causal no "
             "--images %s %s", models[model], in_dir(file), rest);
    return line;
}

// test_image_resume: a run in two parts ends in the bits of one in one.
static inline void test_image_resume(void)
{
    static const char *const runs[][2] = {
        {"whole", "--steps 4"}, {"parts", "--steps 2"}, {"parts", "--steps 4 --resume"}};
    char rest[2200];
    images_put(in_dir("a"), 4, 6, 2, 5, 14);
    for (int model = 0; model < MAINS; model++, empty_dir("whole"), empty_dir("parts")) {
        char *whole = NULL;
        for (int i = 0; i < 3; i++) {
            snprintf(rest, sizeof rest, "--out %s %s", in_dir(runs[i][0]), runs[i][1]);
            Model *m = run(image_line(model, "a", rest));
            whole = whole ? whole : trained_copy(&m->weights);
            CHECK(trained_same(&m->weights, whole) == (i != 1), "model %d, images, run %d", model,
                  i);
            image_drop(m);
        }
    }
}

// test_image_refused: files, patches and options that do not fit end with the reason.
static inline void test_image_refused(void)
{
    static const char *const others[] = {"wide", "classes", "grey"};
    static const char *const bad[][2] = {
        {"--task images --causal no", "needs --images FILE"},
        {"--task images", "expected --causal no"},
        {"--task images --causal no --patch 0 --images ", "--patch"},
        {"--task images --causal no --patch 3 --images ", "a patch that divides both"},
        {"--task images --causal no --sample 3 --images ", "expected no --sample"},
        {"--images ", "--images is for --task images"},
    };
    char rest[2200];
    images_put(in_dir("a"), 4, 6, 2, 5, 14);
    images_put(in_dir("wide"), 4, 8, 2, 5, 14);
    images_put(in_dir("classes"), 4, 6, 2, 6, 14);
    images_put(in_dir("grey"), 4, 6, 1, 5, 14);
    images_put(in_dir("other"), 4, 6, 2, 5, 16);
    images_put(in_dir("few"), 4, 6, 2, 5, 6);
    snprintf(rest, sizeof rest, "--steps 2 --out %s", in_dir("run"));
    image_drop(run(image_line(0, "a", rest)));
    snprintf(rest, sizeof rest, "--load %s/run/" CHECKPOINT_NAME, dir);
    for (size_t i = 0; i < 3; i++)
        expect_die(refused_run, image_line(0, others[i], rest), EXIT_DATA, "expected shape");
    snprintf(rest, sizeof rest, "--steps 3 --resume --out %s", in_dir("run"));
    expect_die(refused_run, image_line(0, "other", rest), EXIT_DATA, "trained on a file of check");
    expect_die(refused_run, image_line(0, "absent", ""), EXIT_DATA, "cannot read");
    expect_die(refused_run, image_line(0, "few", ""), EXIT_DATA, "need 4 images for a batch");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const int file = bad[i][0][strlen(bad[i][0]) - 1] == ' ';
        snprintf(rest, sizeof rest, SMALL_MODEL "%s%s", bad[i][0], file ? in_dir("a") : "");
        expect_die(refused_run, rest, EXIT_USAGE, bad[i][1]);
    }
    empty_dir("");
}

// IMAGE_TESTS: the rows of TESTS that this file has.
#define IMAGE_TESTS \
    {"image derivatives", test_image_derivatives, 0}, \
    {"image input", test_image_input, 0}, \
    {"image batch", test_image_batch, 0}, \
    {"image reach", test_image_reach, 0}, \
    {"image evaluation", test_image_evaluation, 0}, \
    {"image resume", test_image_resume, 0}, \
    {"image refused", test_image_refused, 0}

#endif
