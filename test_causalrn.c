// test_causalrn.c: the tests of train_causalrn.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, plain sums to 1e-12); the
// fp32 build judges the arithmetic (the bounds of util/check.h, exp_ps, convergence).
//
// Sections: [tools] variants, layers, models; [mix] [model] [training] the tests, in the order of
// the trainer; [main]. What trainers have in common is tested by dev/test_layers.h, and the layer
// is held against dev/ref/causalrn_plain.h. A name like A14 is a row of the list of cases that this
// project keeps: failures that users of other programs have reported.

#include "dev/testing.h" // first: it asks for GNU extensions
#include "data/tasks.h"

// A second task beside copying, of any T (--string-size) and V: random tokens and targets, each
// fourth target left out. The trainer's table of tasks is replaced by one that has it.
static size_t any_vocabulary = 29;

// any_shape: T = string_size, V = any_vocabulary; nothing is visible, so BiRN may have it.
static TaskShape any_shape(const TaskOptions *options)
{
    TaskShape shape = {(size_t)options->string_size, any_vocabulary, 1, 0, "T", 0};
    return shape;
}

// any_fill: inputs (T) and targets (T), uniform.
static void any_fill(const TaskOptions *options, uint64_t seed, uint64_t stream, int *inputs,
                     int *targets)
{
    uint32_t V = (uint32_t)any_vocabulary;
    for (int t = 0; t < options->string_size; t++) {
        inputs[t] = (int)rand_below(seed, stream, 2 * (uint64_t)t, V);
        targets[t] = t % 4 == 1 ? IGNORE : (int)rand_below(seed, stream, 2 * (uint64_t)t + 1, V);
    }
}

static const Task TEST_TASKS[] = {
    {"copying", "", "^|$abcdefghijklmnopqrstuvwxyz", copying_shape, copying_fill, copying_score},
    {"any", "", "", any_shape, any_fill, copying_score},
};
enum { COPYING, ANY };
#define TASKS TEST_TASKS
#define TESTING
#include "train_causalrn.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/ref/causalrn_plain.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, layers, models.

enum { VARIANTS = 2 * 3 * 2 * 4 * 2 };

// variant: combination i of VARIANTS in *mix; 0 if the model does not allow it.
static int variant(int i, Mix *mix)
{
    *mix = (Mix){i % 2, i / 2 % 3, i / 6 % 4, i / 24 % 2, i / 48};
    return mix->model == QUADRATIC || (mix->activation == EXP && mix->prenorm != EXACT);
}

// mix_text: the name of a variant, in a buffer that the next call uses again.
static const char *mix_text(Mix mix)
{
    static const char *const models[] = {"quadratic", "linear"};
    static const char *const prenorms[] = {"exact", "approx", "none"};
    static const char *const activations[] = {"exp", "relu", "elu", "gelu"};
    static char text[96];
    snprintf(text, sizeof text, "%s %s %s%s%s", models[mix.model], prenorms[mix.prenorm],
             activations[mix.activation], mix.causal ? "" : " BiRN",
             mix.postnorm ? "" : " no-post");
    return text;
}

// Some variants by name.
static const Mix PAPER_MIX = {QUADRATIC, EXACT, EXP, 1, 1};
static const Mix LINEAR_MIX = {LINEAR, APPROX, EXP, 1, 1};

// One mix layer by itself.
typedef struct {
    Mix mix;
    size_t B, T, H, n, work_size; // n = B T H
    float *a, *b, *out, *dout, *da, *db, *work;
    Saved saved;
} Layer;

// layer_make: a layer of random a, b and dout.
static Layer layer_make(Mix mix, size_t B, size_t T, size_t H)
{
    size_t n = B * T * H;
    Layer l = {.mix = mix, .B = B, .T = T, .H = H, .n = n, .work_size = mix_work(T, H)};
    l.a = normals(n, 1);
    l.b = normals(n, 1);
    l.dout = normals(n, 1);
    l.out = reals(n);
    l.da = reals(n);
    l.db = reals(n);
    l.work = reals(threads_count() * l.work_size);
    l.saved.s = reals(n);
    if (mix.model == QUADRATIC) {
        l.saved.p = reals(n);
        l.saved.scale = reals(B * T);
    } else {
        l.saved.max = reals(n);
        l.saved.sum = reals(n);
    }
    return l;
}

// layer_forward: fills out and saved.
static void layer_forward(Layer *l)
{
    mix_forward(l->out, l->saved, l->a, l->b, l->work, l->work_size, l->B, l->T, l->H, l->mix);
}

// layer_run: forward and backward.
static void layer_run(Layer *l)
{
    layer_forward(l);
    mix_backward(l->da, l->db, l->dout, l->saved, l->a, l->b, l->work, l->work_size, l->B, l->T,
                 l->H, l->mix);
}

// layer_loss: out . dout, of which da and db are the gradients.
static double layer_loss(void *context)
{
    Layer *l = context;
    layer_forward(l);
    return dot(l->out, l->dout, l->n);
}

// config_make: a configuration for the task ANY.
static Config config_make(Mix mix, int B, int T, int C, int H, int L)
{
    Config c = {mix, L, C, H, ANY, {.string_size = T}, {0}};
    c.training = (Training){.batch_size = B, .steps = 100, .lr = 1e-3, .seed = 1};
    c.training.beta1 = 0.9;
    c.training.beta2 = 0.999;
    c.training.adam_eps = 1e-8;
    return c;
}

// model_make: an allocated model with training batch 0.
static Model *model_make(Config c)
{
    Model *m = alloc_zero(1, sizeof *m, "model");
    model_plan(m, &c);
    model_alloc(m);
    task_batch(m->task, &c.task_options, 1, STREAM_TRAIN, 0, &m->batch);
    return m;
}

// model_random: the same, with every parameter of order one, so that every gradient is.
static Model *model_random(Config c)
{
    Model *m = model_make(c);
    for (int k = 0; k < m->weights.params.n; k++)
        normal_fill(arena_data(&m->weights.params, k), tensor_size(&m->weights.params.table[k]),
                    0.5);
    return m;
}

// model_drop: free a model.
static void model_drop(Model *m)
{
    model_free(m);
    free(m);
}

// model_run: forward, then gradients from zero.
static void model_run(Model *m)
{
    model_forward(m);
    model_zero_grad(m);
    model_backward(m);
}

// model_loss: the loss of the model's batch.
static double model_loss(void *context)
{
    Model *m = context;
    model_forward(m);
    return m->loss;
}

// against_plain: run the layer and compare every sequence of it with plain_mix; gradients in which
// terms of norm `size` cancel are asked no more than those terms allow: see agree_or_tiny.
static void against_plain(Layer *l, double size)
{
    size_t n = l->T * l->H;
    double *out = take(n * sizeof *out), *da = take(n * sizeof *da), *db = take(n * sizeof *db);
    char what[160];
    layer_run(l);
    for (size_t i = 0; i < l->B; i++) {
        size_t at = i * n;
        plain_mix(out, da, db, doubles(l->a + at, n), doubles(l->b + at, n),
                  doubles(l->dout + at, n), l->T, l->H, l->mix);
        double tiny = fmax(size, 1e-6 * fmax(norm_of(da, n), norm_of(db, n)));
        snprintf(what, sizeof what, "%s T=%zu H=%zu row %zu: out", mix_text(l->mix), l->T, l->H, i);
        agree(what, l->out + at, out, sizeof *out, n, FORWARD, 0);
        strcpy(strrchr(what, ' '), " da");
        agree_or_tiny(what, l->da + at, da, n, GRAD, tiny);
        strcpy(strrchr(what, ' '), " db");
        agree_or_tiny(what, l->db + at, db, n, GRAD, tiny);
    }
}

// ------------------------------------------------------------------------------------------------
// [mix] The layer: derivatives, the plain form, identities, extremes.

// test_psi: A10: gelu far out; the slopes at 0; NaN stays NaN whatever the activation.
static void test_psi(void)
{
    static const double far[] = {10, 10.5, 13.24, 100, 1e4, 3e19};
    float slope, other;
    for (size_t i = 0; i < 6; i++) {
        const float x = far[i];
        CHECK(psi(GELU, x, &slope) == x && slope == 1, "A10: gelu(%g)", far[i]);
        CHECK(fabs(psi(GELU, -x, &other)) < 1e-6 && fabs(other) < 1e-6, "A10: gelu(%g)", -far[i]);
    }
    CHECK(psi(RELU, 0, &slope) == 0 && slope == 0, "relu at 0");
    CHECK(psi(ELU, 0, &slope) == 0 && slope == 1, "elu at 0");
    CHECK(psi(ELU, 1000, &slope) == 1000 && slope == 1, "elu at 1000");
    for (int k = EXP; k <= GELU; k++)
        CHECK(isnan(psi(k, NAN, &slope)), "activation %d keeps NaN", k);
}

// Inputs and outputs of the running log-sum-exp.
typedef struct {
    float *x, *dl, *max, *sum;
    double *scratch;
    size_t T, H;
    int causal;
} Lse;

// lse_at: l at position t, channel h, of the position that t sees: t itself, or the last.
static double lse_at(const Lse *s, size_t t, size_t h)
{
    size_t i = (s->causal ? t : s->T - 1) * s->H + h;
    return s->max[i] + log((double)s->sum[i]);
}

// lse_loss: l . dl.
static double lse_loss(void *context)
{
    Lse *s = context;
    double loss = 0;
    logcumsumexp_forward(s->max, s->sum, s->scratch, s->x, s->T, s->H);
    for (size_t i = 0; i < s->T * s->H; i++)
        loss += s->dl[i] * lse_at(s, i / s->H, i % s->H);
    return loss;
}

// lse_make: room for T positions of H channels.
static Lse lse_make(size_t T, size_t H, double std)
{
    size_t n = T * H;
    return (Lse){normals(n, std), normals(n, 1), reals(n), reals(n), take(H * 8), T, H, 1};
}

// test_logcumsumexp: against plain sums in long double, forward and backward, and central
// differences, causal or not; values over 100 apart.
static void test_logcumsumexp(void)
{
    static const size_t shapes[][2] = {{1, 1}, {5, 3}, {130, 17}};
    for (size_t k = 0; k < 12; k++, give_all_back()) {
        size_t T = shapes[k / 4][0], H = shapes[k / 4][1], n = T * H;
        Lse s = lse_make(T, H, k & 2 ? 60 : 1);
        float *l = reals(n), *dx = reals(n);
        double *want = take(n * 8), *want_dx = take(n * 8);
        s.causal = k & 1;
        lse_loss(&s);
        for (size_t h = 0; h < H; h++) {
            long double sum = 0;
            for (size_t t = 0; t < T; t++) {
                sum += exp((long double)s.x[t * H + h]);
                want[t * H + h] = log(sum);
            }
            for (size_t u = 0; u < T; u++)
                for (size_t v = 0; v < (s.causal ? u + 1 : T); v++)
                    want_dx[v * H + h] += s.dl[u * H + h] *
                                          exp(s.x[v * H + h] -
                                              want[(s.causal ? u : T - 1) * H + h]);
        }
        for (size_t i = 0; i < n; i++)
            l[i] = s.max[i] + log(s.sum[i]);
        logcumsumexp_backward(dx, s.scratch, s.dl, s.max, s.sum, s.x, T, H, s.causal);
        agree("logcumsumexp", l, want, 8, n, FORWARD, 0);
        agree("logcumsumexp dx", dx, want_dx, 8, n, GRAD, 0);
        if (T < 100)
            central_difference("logcumsumexp dx", lse_loss, &s, s.x, dx, n, 1);
    }
}

// lse_case: one channel x (n): l must be `want` (n), to 1e-4; equal NaN and Inf count as equal.
static void lse_case(const char *name, size_t n, const double *x, const double *want)
{
    Lse s = lse_make(n, 1, 1);
    for (size_t i = 0; i < n; i++)
        s.x[i] = x[i];
    logcumsumexp_forward(s.max, s.sum, s.scratch, s.x, n, 1);
    for (size_t i = 0; i < n; i++) {
        double got = lse_at(&s, i, 0);
        CHECK(got == want[i] || fabs(got - want[i]) < 1e-4 || (isnan(got) && isnan(want[i])),
              "%s: l[%zu] = %g, expected %g", name, i, got, want[i]);
    }
}

// test_lse_cases: A01, A02, A03: -inf, +inf and NaN.
static void test_lse_cases(void)
{
    const double inf = INFINITY, nan = NAN;
    lse_case("A01", 7, (double[]){2, -inf, -inf, 1, -inf, -inf, 3},
             (double[]){2, 2, 2, 2.3133, 2.3133, 2.3133, 3.4076});
    lse_case("A01", 7, (double[]){2, 1, -inf, 1, -inf, -inf, 3},
             (double[]){2, 2.3133, 2.3133, 2.5514, 2.5514, 2.5514, 3.4938});
    lse_case("A02", 4, (double[]){-inf, -inf, 0, 1}, (double[]){-inf, -inf, 0, 1.3133});
    lse_case("A02", 3, (double[]){0, nan, 1}, (double[]){0, nan, nan});
    lse_case("A02", 3, (double[]){nan, 0, 1}, (double[]){nan, nan, nan});
    lse_case("A02", 3, (double[]){0, inf, 1}, (double[]){0, inf, inf});
    lse_case("A02", 2, (double[]){-inf, -inf}, (double[]){-inf, -inf});

    Lse s = lse_make(3, 1, 1);
    float dx[3];
    for (int causal = 0; causal < 2; causal++) {
        for (int t = 0; t < 3; t++) {
            s.x[t] = t < 2 ? -INFINITY : 2;
            s.dl[t] = 1;
        }
        logcumsumexp_forward(s.max, s.sum, s.scratch, s.x, 3, 1);
        logcumsumexp_backward(dx, s.scratch, s.dl, s.max, s.sum, s.x, 3, 1, causal);
        CHECK(dx[0] == 0 && dx[1] == 0 && dx[2] == (causal ? 1 : 3), "A03: dx = %g %g %g",
              (double)dx[0], (double)dx[1], (double)dx[2]);
    }
}

// test_mix_derivatives: every variant against central differences; H=1 has variance 0, so with a
// normalization nothing depends on a and b, and T=1 has a single pair.
static void test_mix_derivatives(void)
{
    static const size_t shapes[][3] = {{2, 5, 7}, {2, 1, 6}, {1, 5, 1}, {3, 2, 4}, {1, 1, 1}};
    Mix mix;
    char what[160];
    for (int i = 0; i < VARIANTS; i++)
        for (size_t k = 0; variant(i, &mix) && k < 5; k++, give_all_back()) {
            Layer l = layer_make(mix, shapes[k][0], shapes[k][1], shapes[k][2]);
            double scale = sqrt(dot(l.dout, l.dout, l.n));
            layer_run(&l);
            snprintf(what, sizeof what, "%s B=%zu T=%zu H=%zu", mix_text(mix), l.B, l.T, l.H);
            central_difference(what, layer_loss, &l, l.a, l.da, l.n, scale);
            central_difference(what, layer_loss, &l, l.b, l.db, l.n, scale);
        }
}

// test_mix_plain: B01: every variant against the plain form, T across the block's boundary.
static void test_mix_plain(void)
{
    static const size_t lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 258};
    Mix mix;
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
        for (int i = 0; i < VARIANTS; i++)
            if (variant(i, &mix) && (lengths[k] < 100 || mix.postnorm)) {
                Layer l = layer_make(mix, lengths[k] < 60 ? 2 : 1, lengths[k], 7);
                against_plain(&l, 0);
                give_all_back();
            }
    for (int i = 0; i < VARIANTS; i++) // the terms that cancel at H=1 are r = 1e4 times dout
        if (variant(i, &mix)) {
            Layer l = layer_make(mix, 1, 5, 1);
            against_plain(&l, 1e4);
            give_all_back();
            l = layer_make(mix, 1, 40, 65);
            against_plain(&l, 0);
            give_all_back();
        }
}

// test_linear_is_quadratic: the factored sum equals all pairs, outputs and gradients.
static void test_linear_is_quadratic(void)
{
    const double bound = IS_DOUBLE ? 1e-9 : 1e-5;
    double worst = 0, worst_grad = 0;
    for (int i = 0; i < 16; i++, give_all_back()) {
        Mix mix = {QUADRATIC, i & 1 ? APPROX : NONE, EXP, i >> 1 & 1, i >> 2 & 1};
        Layer q = layer_make(mix, 2, i & 8 ? 130 : 19, 33), l;
        draws = 0;
        mix.model = LINEAR;
        l = layer_make(mix, q.B, q.T, q.H);
        layer_run(&q);
        layer_run(&l);
        worst = fmax(worst, agree(mix_text(mix), l.out, q.out, sizeof(float), q.n, bound, 0));
        double da = agree(mix_text(mix), l.da, q.da, sizeof(float), q.n, GRAD * 100, 0);
        double db = agree(mix_text(mix), l.db, q.db, sizeof(float), q.n, GRAD * 100, 0);
        worst_grad = fmax(worst_grad, fmax(da, db));
    }
    printf("linear against quadratic: worst relative L2 %.3g, gradients %.3g\n", worst, worst_grad);
    CHECK(worst_grad < (IS_DOUBLE ? 1e-9 : BOUND_GRAD_FP32), "gradients: %.3g", worst_grad);
}

// test_scale: with post norm a factor on a row of s, which is a constant added to a row of a or to
// all of b, changes nothing but rounding when it is a power of two, and up to eps otherwise.
static void test_scale(void)
{
    for (int i = 0; i < 8; i++, give_all_back()) {
        Mix mix = {i & 1, NONE, EXP, i >> 1 & 1, 1};
        const double shift = i & 4 ? 0.5 : 3 * log(2.0), exact = IS_DOUBLE ? 1e-11 : 1e-5;
        Layer l = layer_make(mix, 1, 9, 33);
        layer_forward(&l);
        float *before = copy_of(l.out, l.n * sizeof(float));
        for (size_t k = 0; k < l.n; k++) {
            l.a[k] += shift * (double)(k / l.H); // another one for each row
            l.b[k] -= shift;
        }
        layer_forward(&l);
        agree("a constant added to a row", l.out, before, sizeof(float), l.n, i & 4 ? 1e-5 : exact,
              0);
    }
}

// test_extremes: H=3072 and rows that are one-hot times 1e4, constant, or a hundred times larger:
// finite and as the plain form; also A14 for the layer. For BiRN the one-hot b outweighs all else
// in every row of s, and the gradient is the little that is left of terms of the size of dout: its
// own error is 0.18 in fp32, 2e-9 in double (quadratic, H=3072), so it is measured against dout.
static void test_extremes(void)
{
    const Mix mixes[] = {
        PAPER_MIX, LINEAR_MIX, {QUADRATIC, EXACT, EXP, 0, 1}, {LINEAR, APPROX, EXP, 0, 1}};
    for (size_t i = 0; i < 8; i++, give_all_back()) {
        const size_t T = 6, H = i < 4 ? 3072 : 192;
        Layer l = layer_make(mixes[i % 4], 1, T, H);
        for (size_t h = 0; h < H; h++) {
            l.a[1 * H + h] = l.b[2 * H + h] = h == 5 ? 1e4 : 0;
            l.b[3 * H + h] = h == 7 ? -1e4 : 0;
            l.a[4 * H + h] *= 100;
            l.b[5 * H + h] = 1234.1;
        }
        against_plain(&l, l.mix.causal ? 0 : sqrt(dot(l.dout, l.dout, l.n)));
    }
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        Mix mix;
        if (!variant(i, &mix))
            continue;
        Layer l = layer_make(mix, 1, 3, 256);
        for (size_t k = 0; k < l.n; k++) {
            l.a[k] = mix.prenorm == NONE ? 2.5 : 1234.1;
            l.b[k] = k / l.H == 1 ? 0 : l.a[k];
        }
        layer_run(&l);
        int finite = first_not_finite(l.out, l.n, sizeof(float)) == l.n &&
                     first_not_finite(l.da, l.n, sizeof(float)) == l.n &&
                     first_not_finite(l.db, l.n, sizeof(float)) == l.n;
        CHECK(finite, "A14: %s: constant rows: finite", mix_text(mix));
        CHECK(!mix.postnorm || all_zero(l.out, l.n), "A14: %s: constant rows: 0", mix_text(mix));
    }
}

// ------------------------------------------------------------------------------------------------
// [model] The whole model: derivatives, goldens, decoding, independence.

// test_model_derivatives: every tensor of the parameter table, every variant; backward adds.
static void test_model_derivatives(void)
{
    Mix mix;
    char what[160];
    any_vocabulary = 5;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant(i, &mix))
            continue;
        Model *m = model_random(config_make(mix, 2, 5, 8, 6, 2));
        Arena *grads = &m->weights.grads;
        double scale = 0;
        model_run(m);
        scale = gradient_norm(grads);
        float *once = copy_of(grads->base, grads->bytes);
        for (int k = 0; k < grads->n; k++) {
            size_t n = tensor_size(&grads->table[k]);
            snprintf(what, sizeof what, "%s: gradient of %s", mix_text(mix), grads->table[k].name);
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

// golden_model: a model with the variant, sizes, parameters and batch of a golden.
static Model *golden_model(StFile *file, const char *path)
{
    static const char *const names[] = {"model", "prenorm", "postnorm", "activation", "causal"};
    static Options options;
    Config c = config_make(PAPER_MIX, 0, 0, 0, 0, 0);
    const Training training = c.training;
    options.n = 0;
    config_options(&options, &c);
    for (int i = 0; i < options.n; i++)
        for (size_t k = 0; k < 5; k++)
            if (!strcmp(options.rows[i].name, names[k]))
                option_set(&options.rows[i], st_meta(file, names[k]));
    const size_t *left = st_find(file, "params.left_w")->shape;
    const StEntry *inputs = st_find(file, "inputs");
    any_vocabulary = st_find(file, "params.wte")->shape[0];
    c.training = training;
    c.layers = (int)left[0];
    c.hidden = (int)left[1];
    c.channels = (int)left[2];
    c.training.batch_size = (int)inputs->shape[0];
    c.task_options.string_size = (int)inputs->shape[1];
    Model *m = model_make(c);
    st_read_int32(file, inputs, m->batch.inputs);
    st_read_int32(file, st_find(file, "targets"), m->batch.targets);
    arena_read(&m->weights.params, file, path, "params.");
    return m;
}

// golden_arena: compare every tensor of an arena that the file has as prefix + name; returns how
// many.
static int golden_arena(const Arena *a, StFile *file, const char *prefix, double bound,
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

// test_goldens: activations, loss and gradients of every file that dev/ref/causalrn.py wrote.
static void test_goldens(void)
{
    const char *directory = "dev/ref/causalrn_goldens";
    const double forward = IS_DOUBLE ? 1e-9 : BOUND_FORWARD_FP32;
    char path[512];
    int files = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%.400s", directory, e->d_name);
        StFile *file = st_open(path);
        Model *m = golden_model(file, path);
        double loss;
        st_read_real(file, st_find(file, "loss"), &loss, sizeof loss);
        model_run(m);
        double scale = gradient_norm(&m->weights.grads);
        int acts = golden_arena(&m->acts_arena, file, "acts.", forward, 0);
        int grads = golden_arena(&m->weights.grads, file, "grads.",
                                 IS_DOUBLE ? 1e-9 : BOUND_GRAD_FP32, scale);
        CHECK(acts == 5 && grads == m->weights.grads.n, "%s: %d activations, %d gradients", path,
              acts, grads);
        CHECK(fabs(m->loss - loss) <= forward * loss, "%s: loss %.12g, got %.12g", path, loss,
              m->loss);
        model_drop(m);
        st_close(file);
        give_all_back();
        files++;
    }
    if (d)
        closedir(d);
    CHECK(files == 9, "%s: expected 9 goldens, found %d (run from the repository's root)",
          directory, files);
    any_vocabulary = 29;
}

// decode_all: logits (B,T,V) of the batch's inputs, decoded token by token.
static float *decode_all(Model *m)
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

// test_decode: decoding = parallel for every causal variant, T=1 too, and at T=130 (B21); starting
// anew forgets (B22); linear = quadratic with the same norm (B21).
static void test_decode(void)
{
    const double bound = IS_DOUBLE ? 1e-11 : 1e-5;
    static const size_t lengths[] = {1, 12, 130};
    Mix mix;
    for (int i = 0; i < VARIANTS; i++)
        for (size_t k = 0; variant(i, &mix) && mix.causal && k < 3; k++, give_all_back()) {
            if (lengths[k] == 130 && (mix.activation != EXP || !mix.postnorm))
                continue;
            Model *m = model_random(config_make(mix, 2, (int)lengths[k], 8, 11, 2));
            size_t n = m->B * m->T * m->V;
            model_forward(m);
            float *once = decode_all(m), *twice = decode_all(m);
            agree(mix_text(mix), once, m->acts.logits, sizeof(float), n, bound, 0);
            CHECK(same_bits(once, twice, n), "B22: %s: decoding starts anew", mix_text(mix));
            model_drop(m);
        }
    for (int i = 0; i < 4; i++, give_all_back()) {
        Mix q = {QUADRATIC, i & 1 ? NONE : APPROX, EXP, 1, i >> 1}, l = q;
        l.model = LINEAR;
        Model *x = model_random(config_make(q, 2, 130, 8, 11, 2));
        Model *y = model_make(config_make(l, 2, 130, 8, 11, 2));
        arena_copy_values(&y->weights.params, &x->weights.params);
        model_forward(x);
        model_forward(y);
        agree("B21: linear = quadratic, logits", y->acts.logits, x->acts.logits, sizeof(float),
              2 * 130 * x->V, IS_DOUBLE ? 1e-9 : 1e-5, 0);
        model_drop(x);
        model_drop(y);
    }
}

// decode_past: decode position T, one too many.
static void decode_past(void *context)
{
    Model *m = context;
    model_decode(m, m->batch.inputs, m->T, 1);
}

// decode_far: decode position 10 T.
static void decode_far(void *context)
{
    Model *m = context;
    model_decode(m, m->batch.inputs, 10 * m->T, 1);
}

// forward_of: a forward pass, for batches that must be refused.
static void forward_of(void *context)
{
    model_forward(context);
}

// test_refused: B19: decoding past the positions; A16: targets and tokens out of range.
static void test_refused(void)
{
    static const int targets[] = {29, 30, -2, INT32_MIN, INT32_MAX};
    static const int tokens[] = {29, -1, INT32_MIN, INT32_MAX};
    Model *m = model_random(config_make(LINEAR_MIX, 2, 6, 8, 11, 2));
    expect_die(decode_past, m, EXIT_USAGE, "past the 6 learned");
    expect_die(decode_far, m, EXIT_USAGE, "past the 6 learned");
    for (size_t i = 0; i < 5; i++) {
        int keep = m->batch.targets[11];
        m->batch.targets[11] = targets[i];
        expect_die(forward_of, m, EXIT_DATA,
             "expected a target from 0 to 28");
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
static void test_independence(void)
{
    enum { B = 3, T = 40, AT = 33 };
    Mix mix;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant(i, &mix))
            continue;
        Model *m = model_random(config_make(mix, B, T, 8, 11, 2));
        size_t row = T * m->V;
        float *x = m->acts.logits;
        int *inputs = m->batch.inputs, first[T];
        model_forward(m);
        float *before = copy_of(x, B * row * sizeof *x);
        inputs[T + AT] = (inputs[T + AT] + 1) % 29; // row 1
        model_forward(m);
        CHECK(same_bits(x, before, row) && same_bits(x + 2 * row, before + 2 * row, row),
              "%s: rows are independent", mix_text(mix));
        CHECK(!mix.causal || same_bits(x + row, before + row, AT * m->V), "%s: causal",
              mix_text(mix));
        CHECK(!same_bits(x + row + AT * m->V, before + row + AT * m->V, m->V),
              "%s: the changed token changes its logits", mix_text(mix));
        memcpy(before, x, B * row * sizeof *x);
        memcpy(first, inputs, sizeof first);
        memmove(inputs, inputs + T, (B - 1) * sizeof first);
        memcpy(inputs + (B - 1) * T, first, sizeof first);
        model_forward(m);
        CHECK(same_bits(x, before + row, (B - 1) * row) &&
                  same_bits(x + (B - 1) * row, before, row),
              "B22: %s: rows permute", mix_text(mix));
        model_drop(m);
    }
}

// test_poison: A24: every variant: with NaN in every activation and scratch the gradients keep
// their bits; B22: and after another batch.
static void test_poison(void)
{
    Mix mix;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        if (!variant(i, &mix))
            continue;
        Model *m = model_random(config_make(mix, 2, 35, 8, 11, 2));
        model_run(m);
        float *clean = copy_of(m->weights.grads.base, m->weights.grads.bytes);
        arena_fill(&m->acts_arena, CANARY);
        arena_fill(&m->dacts_arena, CANARY);
        model_run(m);
        CHECK(!memcmp(clean, m->weights.grads.base, m->weights.grads.bytes),
              "A24: %s: NaN left in buffers", mix_text(mix));
        for (int step = 1; step >= 0; step--) {
            task_batch(m->task, &m->config.task_options, 1, STREAM_TRAIN, step, &m->batch);
            model_run(m);
        }
        CHECK(!memcmp(clean, m->weights.grads.base, m->weights.grads.bytes),
              "B22: %s: another batch in between", mix_text(mix));
        arena_check(&m->weights.grads);
        arena_check(&m->acts_arena);
        arena_check(&m->dacts_arena);
        model_drop(m);
    }
}

// test_ignored: A15: a batch without targets: loss 0, all gradients 0, an update moves nothing.
static void test_ignored(void)
{
    for (int i = 0; i < 2; i++, give_all_back()) {
        Model *m = model_random(config_make(i ? LINEAR_MIX : PAPER_MIX, 1, 8, 8, 11, 2));
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

// test_sizes: the paper's number of parameters; the loss of a new model is close to ln 29.
static void test_sizes(void)
{
    Config c = config_make(PAPER_MIX, 4, 16, 192, 192, 12);
    Model plan;
    c.task = COPYING;
    model_plan(&plan, &c);
    CHECK(arena_elements(&plan.weights.params, "wte,wpe") == 1337280,
          "parameters: 1337280, got %zu", arena_elements(&plan.weights.params, "wte,wpe"));
    CHECK(plan.T == 34 && plan.V == 29, "copying 16 letters: T=34, V=29");
    double weights = 12.0 * 3 * 192 * 192 + 29 * 192, pairs = 12.0 * 192 * 17.5;
    double flops = 4 * 34 * (6 * weights + 25 * pairs), got = model_flops(&plan);
    CHECK(fabs(got - flops) <= 1e-12 * flops, "FLOPs a step: %g, got %g", flops, got);
    c.layers = 2;
    for (int model = QUADRATIC; model <= LINEAR; model++) {
        c.mix = model == LINEAR ? LINEAR_MIX : PAPER_MIX;
        Model *m = model_make(c);
        model_forward(m);
        CHECK(fabs(m->loss - log(29.0)) < 0.15, "loss at init near ln 29 = 3.367, got %g", m->loss);
        model_drop(m);
    }
}

// one_update: in a child: everything an update touches, decoding too; NULL: nothing.
static void one_update(void *config)
{
    LogRow row;
    Model *m = config ? model_make(*(Config *)config) : NULL;
    if (!m)
        return;
    train_step(m, 0, &row);
    if (m->decode_B)
        greedy(m);
}

// test_memory: the peak resident size grows by what the plan says, to 5%.
static void test_memory(void)
{
    for (int model = QUADRATIC; model <= LINEAR; model++) {
        Config c = config_make(model == LINEAR ? LINEAR_MIX : PAPER_MIX, 24, 128, 96, 96, 6);
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
static void test_threads(void)
{
    for (int i = 0; i < 4; i++, give_all_back()) {
        Mix mix = i & 1 ? LINEAR_MIX : PAPER_MIX;
        float *one = NULL;
        double loss = 0;
        mix.causal = i < 2;
        for (int threads = 1; threads <= 3; threads++) {
            threads_set(threads);
            draws = 0;
            Model *m = model_random(config_make(mix, 8, 90, 96, 100, 2));
            Arena *grads = &m->weights.grads;
            model_run(m);
            one = one ? one : copy_of(grads->base, grads->bytes);
            loss = threads == 1 ? m->loss : loss;
            CHECK(loss == m->loss && !memcmp(one, grads->base, grads->bytes),
                  "E04: %s: %d threads, the bits of one", mix_text(mix), threads);
            model_drop(m);
        }
        threads_set(1);
    }
}

// ------------------------------------------------------------------------------------------------
// [training] Learning rates, AdamW, stopping over NaN, whole runs.

// test_train_step: an update is clipped gradients of its own batch into AdamW, at the rate of its
// step; what is logged; B05: T=1 and B=1 train.
static void test_train_step(void)
{
    static const double clips[] = {0, 1e-3, 1e3};
    LogRow row;
    for (size_t i = 0; i < 3; i++, give_all_back()) {
        Config c = config_make(PAPER_MIX, 2, 5, 8, 11, 2);
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
        Mix mix;
        if (!variant(i, &mix))
            continue;
        Model *m = model_random(config_make(mix, 1, 1, 5, 3, 1));
        for (long step = 0; step < 3; step++)
            train_step(m, step, &row);
        CHECK(is_finite_bits(row.loss) && row.grad_norm > 0, "B05: %s: T=1, B=1", mix_text(mix));
        model_drop(m);
        give_all_back();
    }
}

// test_unseen: A21: embeddings of tokens that three batches do not hold keep their bits, with the
// smallest eps too.
static void test_unseen(void)
{
    for (int i = 0; i < 2; i++, give_all_back()) {
        Config c = config_make(i ? LINEAR_MIX : PAPER_MIX, 1, 2, 8, 11, 2);
        LogRow row;
        int seen[29] = {0}, moved = 0;
        c.task = COPYING;
        c.training.adam_eps = 1e-15;
        Model *m = model_random(c);
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
static void exit_if_changed(void)
{
    if (!trained_same(&watched->weights, watched_copy))
        _exit(CHANGED);
}

// train_watched: a hundred steps, see exit_if_changed.
static void train_watched(void *context)
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
static void stop_if_bad(void *context)
{
    Model *m = context;
    training_stop_if_bad("gradient norm", gradient_norm(&m->weights.grads), 7, &m->weights,
                         &m->acts_arena);
}

// test_stop: A27, F08: a loss, a gradient, a learning rate that is not finite or far too large ends
// the run with exit code 1 and changes nothing; every tensor's first and last gradient counts.
static void test_stop(void)
{
    const double huge = IS_DOUBLE ? 1e308 : 1e38;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        Mix mix;
        if (!variant(i, &mix))
            continue;
        Config c = config_make(mix, 2, 5, 8, 11, 2);
        Model *m = model_random(c);
        float *wpe = m->params.wpe, keep = wpe[5];
        wpe[5] = NAN;
        expect_die(train_watched, m, EXIT_FAIL, "step 0");
        wpe[5] = keep;
        m->config.training.lr = huge;
        expect_die(train_watched, m, EXIT_FAIL, "no weight was changed");
        arena_fill(&m->weights.params, 0); // loss ln 29; gradients overflow
        normal_fill(m->params.head_w, m->V * m->C, huge / 10);
        m->config.training.lr = c.training.lr;
        expect_die(train_watched, m, EXIT_FAIL,
             "step 0: the gradient norm");
        model_drop(m);
    }
    Model *m = model_random(config_make(PAPER_MIX, 2, 5, 8, 11, 2));
    model_run(m);
    CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "a finite gradient");
    for (int k = 0; k < m->weights.grads.n; k++)
        for (int i = 0; i < 4; i++) {
            const Tensor *row = &m->weights.grads.table[k];
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
static void run_options(Options *options, const char *line)
{
    static char text[1024];
    char *words[32] = {"train_causalrn"};
    int n = 1;
    snprintf(text, sizeof text, "%s", line);
    for (char *w = strtok(text, " "); w && n < 32; w = strtok(NULL, " "))
        words[n++] = w;
    memset(&config, 0, sizeof config);
    options->n = 0;
    config_options(options, &config);
    options_parse(options, PRESETS, n, words, "", preset_cost);
    config_check(&config);
}

// run: train() with these options, its console output hidden; the model after it.
static Model *run(const char *line)
{
    static Options options;
    run_options(&options, line);
    Model *m = model_make(config);
    fflush(stdout);
    int console = dup(STDOUT_FILENO), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    train(m, &options);
    fflush(stdout);
    dup2(console, STDOUT_FILENO);
    close(console);
    close(nowhere);
    return m;
}

// refused_options: parse a line that must be refused.
static void refused_options(void *context)
{
    static Options options;
    run_options(&options, context);
}

// test_options: combinations without meaning are refused with their reason; every preset parses.
static void test_options(void)
{
    static const char *const bad[][2] = {
        {"--model linear --activation relu", "--activation exp"},
        {"--model linear --prenorm exact", "--prenorm approx or none"},
        {"--causal no", "--causal"},
        {"--prenorm approx --hidden 1201", "at most 1200"},
        {"--adam-eps 0", "--adam-eps"},
        {"--lr nan", "--lr"},
        {"--grad-clip -1", "--grad-clip"},
    };
    static Options options;
    char line[64], cost[64];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    for (const Preset *p = PRESETS; p->name; p++) {
        snprintf(line, sizeof line, "--preset %s", p->name);
        run_options(&options, line);
        preset_cost(cost, sizeof cost);
        CHECK(strstr(cost, "FLOPs"), "--preset %s: %s", p->name, cost);
    }
    run_options(&options, "--model linear");
    CHECK(config.mix.prenorm == APPROX && config.mix.causal && config.mix.postnorm,
          "linear: approx");
    run_options(&options, "");
    CHECK(config.mix.prenorm == EXACT && config.mix.activation == EXP, "quadratic: exact, exp");
}

#define SMALL "--string-size 4 --channels 16 --hidden 24 --batch-size 4 --schedule constant "

// test_resume: two runs of 12 steps, and one of 7 resumed to 12, end in the same bits, moments too.
static void test_resume(void)
{
    static const char *const models[] = {"quadratic", "linear"};
    char line[4096], name[2] = "";
    for (int model = 0; model < 2; model++) {
        static const char *const ends[] = {"--steps 12", "--steps 7", "--steps 12 --resume",
                                           "--steps 12"};
        Model *m[4];
        for (int i = 0; i < 4; i++) {
            name[0] = (char)('0' + (i == 2 ? 1 : i));
            snprintf(line, sizeof line, SMALL "--model %s --out %s %s", models[model], in_dir(name),
                     ends[i]);
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

// test_convergence: 8 letters are learnt within 300 steps; reading its own output the model is as
// good. fp32.
static void test_convergence(void)
{
    static Options options;
    LogRow row = {0};
    long first = -1, step = 0;
    if (IS_DOUBLE)
        return;
    run_options(&options, "--string-size 8 --channels 64 --hidden 64 --lr 1e-3 --schedule constant "
                          "--steps 300");
    Model *m = model_make(config);
    for (; step < 300; step++) {
        train_step(m, step, &row);
        first = first < 0 && row.acc >= 0.99 ? step : first;
    }
    row = evaluate(m, step);
    double parallel = task_score(m->task, &m->batch, m->decode_B), own = greedy(m);
    printf("8 letters: 99%% at step %ld, then %.4f, greedy %.4f\n", first, row.acc, own);
    CHECK(first > 0 && row.acc >= 0.99, "8 letters: accuracy %.4f", row.acc);
    CHECK(own == parallel, "8 letters: greedy accuracy %.4f, parallel %.4f", own, parallel);
    model_drop(m);
}

// test_main_preset: slow: `make run` with five other seeds.
static void test_main_preset(void)
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

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const struct {
    const char *name;
    void (*run)(void);
    int slow;
} TESTS[] = {
    {"comparison", test_comparison, 0},
    {"matmul", test_matmul, 0},
    {"normalize", test_normalize, 0},
    {"embed", test_embed, 0},
    {"crossentropy", test_crossentropy, 0},
    {"exp", test_exp, 0},
    {"psi", test_psi, 0},
    {"logcumsumexp", test_logcumsumexp, 0},
    {"log-sum-exp cases", test_lse_cases, 0},
    {"mix derivatives", test_mix_derivatives, 0},
    {"mix, plain form", test_mix_plain, 0},
    {"linear = quadratic", test_linear_is_quadratic, 0},
    {"scale", test_scale, 0},
    {"extremes", test_extremes, 0},
    {"model derivatives", test_model_derivatives, 0},
    {"goldens", test_goldens, 0},
    {"decode", test_decode, 0},
    {"refused", test_refused, 0},
    {"independence", test_independence, 0},
    {"poison", test_poison, 0},
    {"ignored targets", test_ignored, 0},
    {"sizes", test_sizes, 0},
    {"memory", test_memory, 0},
    {"threads", test_threads, 0},
    {"adamw", test_adamw, 0},
    {"gradient norm", test_gradient_norm, 0},
    {"zero gradients", test_zero_gradients, 0},
    {"train step", test_train_step, 0},
    {"unseen tokens", test_unseen, 0},
    {"stop", test_stop, 0},
    {"options", test_options, 0},
    {"resume", test_resume, 0},
    {"convergence", test_convergence, 0},
    {"main preset", test_main_preset, 1},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "";
    int known = !*word || !strcmp(word, "long");
    make_dir();
    threads_set(1); // most tests are smaller than what starting a thread costs
    for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++) {
        int named = !strcmp(word, TESTS[i].name), failed = *test_count(1), passed = *test_count(0);
        double start = seconds_now();
        known |= named;
        if (!named && ((*word && strcmp(word, "long")) || (TESTS[i].slow && !*word)))
            continue;
        TESTS[i].run();
        give_all_back();
        printf("%-20s %6d passed, %d failed, %.2f s\n", TESTS[i].name, *test_count(0) - passed,
               *test_count(1) - failed, seconds_now() - start);
    }
    if (!known)
        die(EXIT_USAGE, "expected long, the name of a test or nothing, got \"%s\"", word);
    return test_report();
}
