// test_causalrn.c: the tests of train_causalrn.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, plain sums to 1e-12); the
// fp32 build judges the arithmetic (the bounds of util/check.h, exp_ps, convergence).
//
// Sections: [tools] variants, layers; [mix] [model] [training] the tests, in the order of the
// trainer; [main]. What trainers have in common is tested by dev/test_layers.h and test_model.h,
// and the layer is held against dev/ref/causalrn_plain.h. A name like A14 is a row of the list of
// cases that this project keeps: failures that users of other programs have reported.

#include "dev/testing.h" // first: it asks for GNU extensions
#define READS_IMAGES
#include "dev/test_tasks.h"
#define TESTING
#include "train_causalrn.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/ref/causalrn_plain.h"

enum { VARIANTS = 2 * 3 * 2 * 4 * 2, MAINS = 2 };
#define MAIN_WORDS {"quadratic", "linear"}
#define SMALL_MODEL "--channels 16 --hidden 24 --batch-size 4 --schedule constant "
#define SMALL "--string-size 4 " SMALL_MODEL
#define CAUSAL(c) (c).mix.causal
#define HEAD(m) (m)->params.head_w
#include "dev/test_model.h"
#include "dev/test_patches.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, layers.

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
    Config c = base_config(B, T);
    c.mix = mix;
    c.layers = L;
    c.channels = C;
    c.hidden = H;
    return c;
}

// variant_config: see dev/test_model.h.
static int variant_config(int i, int B, int T, Config *c)
{
    Mix mix;
    int ok = variant(i, &mix);
    *c = config_make(mix, B, T, 8, 11, 2);
    return ok;
}

// main_config: the paper's model and the linear one.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i ? LINEAR_MIX : PAPER_MIX, B, T, C, C + 4, L);
}

// config_text: the name of a configuration.
static const char *config_text(const Config *c)
{
    return mix_text(c->mix);
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
// [model] The whole model: goldens, linear against quadratic, sizes.

// golden_sizes: what the shapes of a golden say of the model.
static void golden_sizes(const StFile *file, Config *c)
{
    const size_t *left = st_find(file, "params.left_w")->shape;
    c->layers = (int)left[0];
    c->hidden = (int)left[1];
    c->channels = (int)left[2];
}

// test_goldens: what dev/ref/causalrn.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/causalrn_goldens", 10, 5, golden_sizes);
}

// test_linear_model: B21: linear = quadratic with the same norm, the whole model.
static void test_linear_model(void)
{
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
    for (int n = 1; n <= 3; n++) { // batches an update
        plan.config.training.accumulate = n;
        double flops = n * 4 * 34 * (6 * weights + 25 * pairs), got = model_flops(&plan);
        CHECK(fabs(got - flops) <= 1e-12 * flops, "FLOPs a step: %g, got %g", flops, got);
    }
    c.layers = 2;
    for (int model = QUADRATIC; model <= LINEAR; model++) {
        c.mix = model == LINEAR ? LINEAR_MIX : PAPER_MIX;
        Model *m = model_make(c);
        model_forward(m);
        CHECK(fabs(m->loss - log(29.0)) < 0.15, "loss at init near ln 29 = 3.367, got %g", m->loss);
        model_drop(m);
    }
}

// ------------------------------------------------------------------------------------------------
// [training] Options, convergence.

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
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "--model linear");
    CHECK(config.mix.prenorm == APPROX && config.mix.causal && config.mix.postnorm,
          "linear: approx");
    run_options(&options, "");
    CHECK(config.mix.prenorm == EXACT && config.mix.activation == EXP, "quadratic: exact, exp");
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

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const TestRow TESTS[] = {
    LAYER_TESTS,
    MODEL_TESTS,
    IMAGE_TESTS,
    {"psi", test_psi, 0},
    {"logcumsumexp", test_logcumsumexp, 0},
    {"log-sum-exp cases", test_lse_cases, 0},
    {"mix derivatives", test_mix_derivatives, 0},
    {"mix, plain form", test_mix_plain, 0},
    {"linear = quadratic", test_linear_is_quadratic, 0},
    {"scale", test_scale, 0},
    {"extremes", test_extremes, 0},
    {"goldens", test_goldens, 0},
    {"linear model", test_linear_model, 0},
    {"sizes", test_sizes, 0},
    {"options", test_options, 0},
    {"convergence", test_convergence, 0},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    return tests_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
