// test_gpt2.c: the tests of train_gpt2.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, plain sums to 1e-12); the
// fp32 build judges the arithmetic (the bounds of util/check.h, convergence).
//
// Sections: [tools] variants, one attention layer; [mix] [block] [model] [training] the tests, in
// the order of the trainer; [main]. What trainers have in common is tested by dev/test_layers.h and
// test_model.h, and attention is held against dev/ref/gpt2_plain.h. A name like A14 is a row of the
// list of cases that this project keeps: failures that users of other programs have reported.

#include "dev/testing.h" // first: it asks for GNU extensions
#define READS_IMAGES
#include "dev/test_tasks.h"
#define TESTING
#include "train_gpt2.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/ref/gpt2_plain.h"

enum { VARIANTS = 3 * 2 * 2, MAINS = 3 };
#define MAIN_WORDS {"gpt2", "transformer", "linear-transformer"}
#define SMALL_MODEL "--channels 16 --heads 2 --batch-size 4 --schedule constant "
#define SMALL "--string-size 4 " SMALL_MODEL
#define CAUSAL(c) (c).causal
#define HEAD(m) (m)->params.head_w // NULL: tied
#include "dev/test_model.h"
#include "dev/test_patches.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, one attention layer.

// config_make: a configuration for the task ANY.
static Config config_make(int model, int B, int T, int C, int NH, int L)
{
    Config c = base_config(B, T);
    c.model = model;
    c.causal = 1;
    c.channels = C;
    c.heads = NH;
    c.layers = L;
    return c;
}

// variant_config: see dev/test_model.h.
static int variant_config(int i, int B, int T, Config *c)
{
    *c = config_make(i % 3, B, T, 8, i / 6 ? 2 : 1, 2);
    c->causal = i / 3 % 2;
    return 1;
}

// main_config: every --model.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i, B, T, C, 2, L);
}

// config_text: the name of a configuration, in a buffer that the next call uses again.
static const char *config_text(const Config *c)
{
    static char text[96];
    snprintf(text, sizeof text, "%s, %d heads of %d%s", model_name(c), c->heads,
             c->channels / c->heads, c->causal ? "" : ", not causal");
    return text;
}

// One attention layer by itself. Behind every array stand NaNs, which a read past it would show.
typedef struct {
    size_t B, T, C, NH, n; // n = B T C
    int causal, linear;
    float *qkv, *out, *saved, *dout, *dqkv, *work;
} Layer;

// layer_make: a layer of random qkv, of standard deviation std, and dout.
static Layer layer_make(size_t B, size_t T, size_t NH, size_t HS, int causal, int linear,
                        double std)
{
    Layer l = {.B = B, .T = T, .C = NH * HS, .NH = NH, .n = B * T * NH * HS, .causal = causal,
               .linear = linear};
    l.qkv = guarded(3 * l.n);
    l.dout = guarded(l.n);
    l.dqkv = guarded(3 * l.n);
    l.out = guarded(l.n);
    l.saved = guarded(B * NH * T);
    normal_fill(l.qkv, 3 * l.n, std);
    normal_fill(l.dout, l.n, 1);
    l.work = reals(threads_count() * linear_attention_work(HS));
    return l;
}

// layer_forward: fills out and saved.
static void layer_forward(Layer *l)
{
    if (l->linear)
        linear_attention_forward(l->out, l->saved, l->qkv, l->work, l->B, l->T, l->C, l->NH,
                                 l->causal);
    else
        attention_forward(l->out, l->saved, l->qkv, l->B, l->T, l->C, l->NH, l->causal);
}

// layer_run: forward and backward.
static void layer_run(Layer *l)
{
    layer_forward(l);
    if (l->linear)
        linear_attention_backward(l->dqkv, l->dout, l->out, l->saved, l->qkv, l->work, l->B, l->T,
                                  l->C, l->NH, l->causal);
    else
        attention_backward(l->dqkv, l->dout, l->out, l->saved, l->qkv, l->B, l->T, l->C, l->NH,
                           l->causal);
}

// layer_loss: out . dout, of which dqkv is the gradient.
static double layer_loss(void *context)
{
    Layer *l = context;
    layer_forward(l);
    return dot(l->out, l->dout, l->n);
}

// layer_text: what a layer is, in a buffer that the next call uses again.
static const char *layer_text(const Layer *l)
{
    static char text[128];
    snprintf(text, sizeof text, "%s%s B=%zu T=%zu NH=%zu HS=%zu", l->linear ? "linear" : "softmax",
             l->causal ? "" : ", not causal", l->B, l->T, l->NH, l->C / l->NH);
    return text;
}

// against_plain: run the layer and compare out, dq, dk and dv with plain_attention's; the guards
// stay, and nothing of them comes in.
static void against_plain(Layer *l)
{
    static const char *const parts[] = {"dq", "dk", "dv"};
    double *out = take(l->n * sizeof *out), *dqkv = take(3 * l->n * sizeof *dqkv);
    double *want = take(l->n * sizeof *want);
    float *got = reals(l->n);
    layer_run(l);
    plain_attention(out, dqkv, l->qkv, l->dout, l->B, l->T, l->C, l->NH, l->causal, l->linear);
    agree(layer_text(l), l->out, out, sizeof *out, l->n, FORWARD, 0);
    // With one position or a head of one channel the linear weights depend on q and k by eps only:
    // what is left of terms of the size of the whole gradient.
    const double scale = (l->linear && (l->T == 1 || l->C == l->NH) ? 1 : 1e-6) *
                         norm_of(dqkv, 3 * l->n);
    for (size_t part = 0; part < 3; part++) {
        char what[160];
        for (size_t i = 0; i < l->n; i++) {
            size_t at = i / l->C * 3 * l->C + part * l->C + i % l->C;
            got[i] = l->dqkv[at];
            want[i] = dqkv[at];
        }
        snprintf(what, sizeof what, "%s: %s", layer_text(l), parts[part]);
        agree_or_tiny(what, got, want, l->n, GRAD, scale);
    }
    CHECK(isnan(l->out[l->n]) && isnan(l->dqkv[3 * l->n]) && isnan(l->saved[l->B * l->NH * l->T]),
          "B03: %s: nothing past the end is written", layer_text(l));
}

// ------------------------------------------------------------------------------------------------
// [mix] Attention: derivatives, the plain form, extremes.

// test_attention_plain: both kinds, causal or not, against the plain form: lengths, B03: sizes of
// heads, B18: many heads, many sequences.
static void test_attention_plain(void)
{
    static const size_t shapes[][4] = { // B, T, NH, HS
        {2, 1, 2, 3}, {2, 2, 1, 4}, {1, 31, 2, 8}, {1, 33, 1, 16}, {1, 65, 3, 7}, {1, 257, 1, 12},
        {2, 9, 2, 1}, {2, 9, 2, 3}, {2, 9, 2, 5}, {2, 9, 2, 20}, {2, 9, 2, 60}, {2, 9, 2, 80},
        {2, 9, 2, 100}, {1, 17, 1, 192}, {33, 2, 33, 2}, {2048, 2, 1, 2}};
    for (size_t k = 0; k < 4 * sizeof shapes / sizeof *shapes; k++, give_all_back()) {
        const size_t *s = shapes[k / 4];
        Layer l = layer_make(s[0], s[1], s[2], s[3], k & 1, k >> 1 & 1, 1);
        against_plain(&l);
    }
}

// test_attention_derivatives: both kinds, causal or not, against central differences.
static void test_attention_derivatives(void)
{
    static const size_t shapes[][4] = {{2, 5, 2, 3}, {1, 1, 1, 4}, {2, 3, 3, 1}, {1, 6, 1, 5}};
    for (size_t k = 0; k < 16; k++, give_all_back()) {
        const size_t *s = shapes[k / 4];
        Layer l = layer_make(s[0], s[1], s[2], s[3], k & 1, k >> 1 & 1, 1);
        layer_run(&l);
        central_difference(layer_text(&l), layer_loss, &l, l.qkv, l.dqkv, 3 * l.n, 1);
    }
}

// test_attention_extremes: scores a hundred apart, at random and rising or falling along the row:
// as the plain form; equal scores of 1e4 give the mean.
static void test_attention_extremes(void)
{
    for (int k = 0; k < 4; k++, give_all_back()) {
        Layer l = layer_make(1, 40, 1, 16, k & 1, 0, 6);
        for (size_t i = 0; i < 40 * 48; i++) // all keys along one direction, rising or falling
            if (k & 2 && i % 48 / 16 == 1)
                l.qkv[i] = (k & 1 ? 0.2 : -0.2) * (double)(i / 48);
        against_plain(&l);
    }
    Layer l = layer_make(1, 5, 1, 8, 1, 0, 1);
    for (size_t t = 0; t < 5; t++)
        for (size_t i = 0; i < 16; i++)
            l.qkv[t * 24 + i] = i >= 8 ? 100 : i % 2 ? 40 : 30; // scores of about 1e4
    layer_run(&l);
    for (size_t i = 0; i < 8; i++) {
        double mean = 0;
        for (size_t t = 0; t < 5; t++)
            mean += l.qkv[t * 24 + 16 + i] / 5.0;
        CHECK(fabs(l.out[32 + i] - mean) < 1e-5, "equal scores of 1e4: the mean %g, got %g", mean,
              (double)l.out[32 + i]);
    }
    CHECK(first_not_finite(l.dqkv, 120, sizeof(float)) == 120, "scores of 1e4: finite gradients");
}

// wave: sin(a + 1.3 t + 0.7 i), what the numbers below are made of; 0 for i = 2 of a head of two.
static float wave(double a, size_t t, size_t i, size_t n)
{
    return i < n ? sin(a + 1.3 * (double)t + 0.7 * (double)i) : 0;
}

// test_linear_golden: linear attention with three keys and two values, the third is 0: values from
// another program (specs/metala.md, section 7), to 1e-9; fp32: to 2e-5 of their size.
static void test_linear_golden(void)
{
    enum { T = 7, HS = 3 };
    Layer l = layer_make(1, T, 1, HS, 1, 1, 1);
    for (size_t i = 0; i < T * HS; i++) {
        l.qkv[i / HS * 9 + i % HS] = 2 * wave(0.1, i / HS, i % HS, 3);
        l.qkv[i / HS * 9 + 3 + i % HS] = 2 * wave(0.5, i / HS, i % HS, 3);
        l.qkv[i / HS * 9 + 6 + i % HS] = wave(0.9, i / HS, i % HS, 2);
        l.dout[i] = wave(2.3, i / HS, i % HS, 2);
    }
    layer_run(&l);
    double sums[6] = {0};
    for (size_t i = 0; i < T * 9; i++) {
        sums[i % 9 / 3 * 2] += l.dqkv[i];
        sums[i % 9 / 3 * 2 + 1] += fabs(l.dqkv[i]);
    }
    const double got[] = {dot(l.out, l.dout, T * HS), l.out[18], l.out[19], l.saved[6],
                          sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]};
    const double want[] = {-0.570430349828, 0.6098897045,  0.4835145539, 75.8206334147,
                           -0.0365128394,   0.3434153393,  0.0105216358, 0.8030239688,
                           -0.8077404836,   3.0594739632};
    for (int i = 0; i < 10; i++)
        CHECK(fabs(got[i] - want[i]) <= (IS_DOUBLE ? 1e-9 : 2e-5 * fmax(1, want[i])),
              "linear attention, golden %d: expected %.12g, got %.12g", i, want[i], got[i]);
}

// test_one_position: A23: T=1: softmax gives dq = 0, dk = 0, dv = dout exactly. The linear one has
// eps in its denominator: the same up to 1e-6 over phi(q) . phi(k).
static void test_one_position(void)
{
    static const size_t sizes[] = {1, 16, 37, 64, 192};
    for (size_t k = 0; k < 20; k++, give_all_back()) {
        Layer l = layer_make(1, 1, 1, sizes[k / 4], k & 1, k >> 1 & 1, 2);
        layer_run(&l);
        double off = 0, dqk = 0;
        for (size_t i = 0; i < l.C; i++) {
            off += fabs(l.dqkv[2 * l.C + i] - l.dout[i]);
            dqk += fabs(l.dqkv[i]) + fabs(l.dqkv[l.C + i]);
        }
        if (l.linear)
            CHECK(off < 1e-4 && dqk < 1e-3, "A23: %s: dv off by %g, dq and dk %g", layer_text(&l),
                  off, dqk);
        else
            CHECK(same_bits(l.dqkv + 2 * l.C, l.dout, l.C) && all_zero(l.dqkv, 2 * l.C) &&
                      same_bits(l.out, l.qkv + 2 * l.C, l.C),
                  "A23: %s: dv off by %g, dq and dk %g", layer_text(&l), off, dqk);
    }
}

// test_phi: A08: no cancellation below 0, value and slope 1 at 0; far out; NaN.
static void test_phi(void)
{
    static const double x[] = {-8, -20, -1, -1e-3}, want[] = {3.3546263e-4, 2.0611536e-9,
                                                               0.36787944, 0.99900050};
    float slope;
    for (int i = 0; i < 4; i++) {
        const float f = phi(x[i], &slope);
        CHECK(fabs(f / want[i] - 1) < 1e-6 && slope == f, "A08: phi(%g) = %g, got %g, slope %g",
              x[i], want[i], (double)f, (double)slope);
    }
    CHECK(phi(0, &slope) == 1 && slope == 1, "A08: phi(0) = 1, slope 1");
    CHECK(phi(3, &slope) == 4 && slope == 1, "phi(3) = 4, slope 1");
    CHECK(phi(1000, &slope) == 1001 && slope == 1, "phi(1000) = 1001, slope 1");
    CHECK(phi(-1000, &slope) == 0 && slope == 0, "phi(-1000) = 0, slope 0");
    CHECK(isnan(phi(NAN, &slope)) && isnan(slope), "phi keeps NaN");
}

// test_underflow: A09: q = k = -200 everywhere: every feature is 0 (in double 1e-87), the output is
// 0, the gradients are finite; at one token of ordinary q and k its own value is the output.
static void test_underflow(void)
{
    enum { T = 7, HS = 4, ROW = 3 * HS, AT = 3 };
    for (int causal = 0; causal < 2; causal++, give_all_back()) {
        Layer l = layer_make(1, T, 1, HS, causal, 1, 1);
        for (size_t i = 0; i < T * ROW; i++)
            l.qkv[i] = i % ROW < 2 * HS ? -200 : l.qkv[i];
        layer_run(&l);
        size_t zero = 0;
        for (size_t i = 0; i < l.n; i++)
            zero += fabs(l.out[i]) < 1e-60;
        CHECK(zero == l.n, "A09: %zu outputs of %zu are 0", zero, l.n);
        CHECK(first_not_finite(l.dqkv, 3 * l.n, sizeof(float)) == 3 * l.n, "A09: gradients");
        for (size_t i = 0; i < 2 * HS; i++)
            l.qkv[AT * ROW + i] = 0.5;
        layer_run(&l);
        agree("A09: one ordinary token", l.out + AT * HS,
              doubles(l.qkv + AT * ROW + 2 * HS, HS), 8, HS, 1e-6, 0);
        CHECK(first_not_finite(l.dqkv, 3 * l.n, sizeof(float)) == 3 * l.n, "A09: gradients");
    }
}

// ------------------------------------------------------------------------------------------------
// [block] GELU, LayerNorm.

// plain_gelu: both forms and their slopes as the formulas say, for |x| up to 15.
static double plain_gelu(double x, int tanh_form, double *slope)
{
    const double pi = acos(-1.0);
    if (tanh_form) {
        double y = sqrt(2 / pi) * (x + 0.044715 * x * x * x), th = tanh(y);
        *slope = (1 + th) / 2 +
                 x / 2 * (1 - th * th) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
        return x * (1 + th) / 2;
    }
    *slope = erfc(-x / sqrt(2.0)) / 2 + x * exp(-x * x / 2) / sqrt(2 * pi);
    return x * erfc(-x / sqrt(2.0)) / 2;
}

// test_gelu: both forms against the formulas; A10: far out x or 0 and slope 1 or 0; NaN stays.
static void test_gelu(void)
{
    static const double far[] = {10, 10.5, 13.24, 100, 1e4, 3e19};
    for (int form = 0; form < 2; form++) {
        double worst = 0, worst_slope = 0, want_slope;
        float slope, y;
        for (double x = -15; x < 15; x += 1e-3) {
            y = form ? gelu_tanh(x, &slope) : gelu_erf(x, &slope);
            double error = fabs(y - plain_gelu((float)x, form, &want_slope));
            double error_slope = fabs(slope - want_slope);
            worst = isnan(worst) || error <= worst * fmax(1, fabs(x)) ? worst
                                                                       : error / fmax(1, fabs(x));
            worst_slope = isnan(worst_slope) || error_slope <= worst_slope ? worst_slope
                                                                            : error_slope;
        }
        printf("gelu, %s form: worst error %.3g of max(1, |x|), of its slope %.3g\n",
               form ? "tanh" : "erf", worst, worst_slope);
        CHECK(worst < (IS_DOUBLE ? 1e-14 : 3e-7), "gelu: error %.3g", worst);
        CHECK(worst_slope < (IS_DOUBLE ? 1e-13 : 4e-6), "gelu: error of the slope %.3g",
              worst_slope);
        for (size_t i = 0; i < 12; i++) {
            const float x = i < 6 ? far[i] : -far[i - 6], want = x > 0 ? x : 0;
            y = form ? gelu_tanh(x, &slope) : gelu_erf(x, &slope);
            CHECK(fabs(y - want) < 1e-6 && fabs(slope - (x > 0)) < 1e-6,
                  "A10: gelu(%g) = %g, slope %g", (double)x, (double)y, (double)slope);
        }
        y = form ? gelu_tanh(NAN, &slope) : gelu_erf(NAN, &slope);
        CHECK(isnan(y) && isnan(slope), "gelu keeps NaN");
    }
    float *x = normals(1000, 3), *out = reals(1000), *dx = reals(1000), slope;
    for (int form = 0; form < 2; form++) {
        gelu_forward(out, x, 1000, form);
        gelu_backward(dx, x, x, 1000, form);
        size_t same = 0;
        for (size_t i = 0; i < 1000; i++) {
            const float y = form ? gelu_tanh(x[i], &slope) : gelu_erf(x[i], &slope);
            same += fabs(out[i] - y) <= 1e-6 * fabs(y) && fabs(dx[i] - x[i] * slope) <= 1e-5;
        }
        CHECK(same == 1000, "gelu of arrays: %zu of 1000 as one by one", same);
    }
}

// layernorm_loss: LayerNorm of x with weight w and bias . dout.
static double layernorm_loss(void *context)
{
    Pair *p = context;
    layernorm_forward(p->out, p->x, p->w, p->bias, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_layernorm: central differences, the plain form, += of all three; A14: constant rows.
static void test_layernorm(void)
{
    static const size_t shapes[][2] = {{1, 1}, {3, 7}, {5, 16}, {40, 33}, {2, 3072}};
    for (size_t k = 0; k < 5; k++, give_all_back()) {
        const size_t N = shapes[k][0], C = shapes[k][1], n = N * C;
        Pair p = {.N = N, .C = C, .x = normals(n, 2), .w = normals(C, 1), .bias = normals(C, 1)};
        float *dx = reals(n), *dw = reals(C), *db = reals(C);
        double *want = take(n * sizeof *want), *want_db = take(C * sizeof *want_db);
        p.out = reals(n);
        p.dout = normals(n, 1);
        for (size_t row = 0; row < N; row++) {
            double mean = 0, var = 0;
            for (size_t c = 0; c < C; c++)
                mean += p.x[row * C + c] / (double)C;
            for (size_t c = 0; c < C; c++)
                var += pow(p.x[row * C + c] - mean, 2) / (double)C;
            for (size_t c = 0; c < C; c++) {
                want[row * C + c] = (p.x[row * C + c] - mean) / sqrt(var + 1e-5) * p.w[c];
                want[row * C + c] += p.bias[c];
                want_db[c] += p.dout[row * C + c];
            }
        }
        layernorm_loss(&p);
        agree("layernorm", p.out, want, sizeof *want, n, FORWARD, 0);
        float *dout = copy_of(p.dout, n * sizeof *dout);
        layernorm_backward(dx, dw, db, dout, p.x, p.w, N, C);
        agree("layernorm dbias", db, want_db, sizeof *want_db, C, GRAD, 0);
        if (n < 200) {
            central_difference("layernorm dx", layernorm_loss, &p, p.x, dx, n, 1);
            central_difference("layernorm dweight", layernorm_loss, &p, p.w, dw, C, 1);
            central_difference("layernorm dbias", layernorm_loss, &p, p.bias, db, C, 0);
        }
        float *dx2 = copy_of(dx, n * sizeof *dx), *dw2 = copy_of(dw, C * sizeof *dw);
        memcpy(dout, p.dout, n * sizeof *dout);
        layernorm_backward(dx2, dw2, db, dout, p.x, p.w, N, C);
        for (size_t i = 0; i < n; i++)
            dx2[i] /= 2;
        for (size_t i = 0; i < C; i++)
            dw2[i] /= 2;
        CHECK(same_bits(dx2, dx, n) && same_bits(dw2, dw, C), "layernorm_backward adds");
        for (size_t i = 0; i < n; i++)
            p.x[i] = 1234.1;
        layernorm_loss(&p);
        CHECK(same_bits(p.out, p.bias, C), "A14: a constant row gives the bias");
    }
}

// ------------------------------------------------------------------------------------------------
// [model] The whole model: goldens, sizes, widths, published weights.

// golden_sizes: what the shapes of a golden say of the model.
static void golden_sizes(const StFile *file, Config *c)
{
    const size_t *fc = st_find(file, "params.fc_w")->shape;
    c->layers = (int)fc[0];
    c->channels = (int)fc[2];
}

// test_goldens: what dev/ref/gpt2.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/gpt2_goldens", 7, 5, golden_sizes);
}

// test_widths: B06: channels that fill no vector, B = 1 to 3: decoding = parallel, all gradients
// are finite.
static void test_widths(void)
{
    static const int sizes[][2] = {{4, 1}, {15, 3}, {12, 2}, {36, 4}, {100, 5}};
    for (int k = 0; k < 15; k++, give_all_back()) {
        const int *s = sizes[k / 3];
        Model *m = model_random(config_make(k % 3, k % 3 + 1, 7, s[0], s[1], 1));
        model_run(m);
        agree(config_text(&m->config), decode_all(m), m->acts.logits, sizeof(float),
              m->B * m->T * m->V, IS_DOUBLE ? 1e-11 : 1e-5, 0);
        CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "B06: %s", config_text(&m->config));
        model_drop(m);
    }
}

// test_sizes: the paper's and the published numbers of parameters; the loss of a new model is close
// to ln V, B20: of 65 symbols ln 65 and not that of a padded number; B10: sizes beyond 32 bits.
static void test_sizes(void)
{
    static const struct {
        int L, NH, C;
        size_t parameters;
    } published[] = {{12, 12, 768, 124439808}, {24, 16, 1024, 354823168}, {36, 20, 1280, 774030080},
                     {48, 25, 1600, 1557611200}};
    Model plan;
    for (int model = TRANSFORMER; model <= LINEAR; model++) {
        Config c = config_make(model, 4, 16, 192, 1, 12);
        c.task = COPYING;
        model_plan(&plan, &c);
        CHECK(arena_elements(&plan.weights.params, "wte,wpe") == 5325504,
              "parameters: 5325504, got %zu", arena_elements(&plan.weights.params, "wte,wpe"));
    }
    any_vocabulary = 50257;
    for (int i = 0; i < 4; i++) {
        Config c = config_make(GPT2, 96, 1024, published[i].C, published[i].NH, published[i].L);
        model_plan(&plan, &c);
        CHECK(arena_elements(&plan.weights.params, NULL) == published[i].parameters,
              "parameters: %zu, got %zu", published[i].parameters,
              arena_elements(&plan.weights.params, NULL));
        CHECK(model_bytes(&plan) > 2 * sizeof(float) * 96 * 1024 * 50257,
              "B10: logits and their gradient alone take %zu bytes, planned %zu",
              2 * sizeof(float) * 96 * 1024 * 50257, model_bytes(&plan));
    }
    for (int k = 0; k < 6; k++) {
        any_vocabulary = k & 1 ? 65 : 29;
        Model *m = model_make(config_make(k / 2, 8, 16, 64, 2, 2));
        model_forward(m);
        const double want = log((double)any_vocabulary);
        CHECK(fabs(m->loss - want) < 0.15, "%s: loss at init near %g, got %g",
              config_text(&m->config), want, m->loss);
        CHECK(arena_elements(&m->acts_arena, NULL) - arena_elements(&m->acts_arena, "logits") ==
                  8 * 16 * any_vocabulary,
              "B20: %zu symbols, no padding", any_vocabulary);
        model_drop(m);
    }
    any_vocabulary = 29;
}

// test_initial: the deviations that new weights have, 0.02 over sqrt(2 L) where a block ends; ones
// and zeros; weight decay on matrices only, gpt2's tied embedding among them.
static void test_initial(void)
{
    static const struct {
        const char *name;
        double gpt2, others; // 0 also for what is not there
        int decay_gpt2, decay_others;
    } rows[] = {{"wte", 0.02, 1, 1, 0},        {"wpe", 0.02, 1, 1, 0},
                {"qkv_w", 0.02, 0.02, 1, 1},   {"proj_w", 0.01, 0.01, 1, 1},
                {"fc_w", 0.02, 0.02, 1, 1},    {"out_w", 0.01, 0.01, 1, 1},
                {"head_w", 0, 0.02, 1, 1},     {"qkv_b", 0, 0, 0, 0},
                {"out_b", 0, 0, 0, 0},         {"ln1_w", 1, 0, 0, 0},
                {"lnf_w", 1, 0, 0, 0},         {"ln2_b", 0, 0, 0, 0}};
    for (int model = GPT2; model <= LINEAR; model++, give_all_back()) {
        Model *m = model_make(config_make(model, 1, 64, 64, 2, 2)); // sqrt(2 L) = 2
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            int k = 0;
            while (strcmp(m->weights.params.table[k].name, rows[i].name))
                k++;
            const Tensor *t = &m->weights.params.table[k];
            const float *x = arena_data(&m->weights.params, k);
            const double want = model == GPT2 ? rows[i].gpt2 : rows[i].others;
            const size_t n = tensor_size(t);
            const double got = n ? sqrt(dot(x, x, n) / (double)n) : 0;
            CHECK(fabs(got - want) <= 0.05 * want, "%s: %s: deviation %g, got %g",
                  config_text(&m->config), t->name, want, got);
            CHECK(t->decay == (model == GPT2 ? rows[i].decay_gpt2 : rows[i].decay_others),
                  "%s: decay of %s", config_text(&m->config), t->name);
        }
        model_drop(m);
    }
}

// test_flops: what a step costs: weights, and pairs or state.
static void test_flops(void)
{
    for (int model = GPT2; model <= LINEAR; model++) {
        Config c = config_make(model, 4, 34, 192, 3, 12);
        Model plan;
        c.training.accumulate = 2;
        model_plan(&plan, &c);
        double weights = 12.0 * 12 * 192 * 192 + 29 * 192;
        double mixed = 12.0 * 12 * 192 * (model == LINEAR ? 64 : 17.5);
        double want = 2 * 4 * 34 * (6 * weights + mixed), got = model_flops(&plan);
        CHECK(fabs(got - want) <= 1e-12 * want, "FLOPs an update: %g, got %g", want, got);
    }
}

#define TINY "dev/ref/gpt2_transformers/"

// tiny_make: a model of the size of the one dev/ref/gpt2_transformers.py made, with its batch.
static Model *tiny_make(void)
{
    StFile *file = st_open(TINY "logits.safetensors");
    const StEntry *inputs = st_find(file, "inputs"), *logits = st_find(file, "logits");
    any_vocabulary = logits->shape[2];
    const int B = (int)inputs->shape[0], T = (int)inputs->shape[1];
    Model *m = model_make(config_make(GPT2, B, T, 12, 3, 2));
    st_read_int32(file, inputs, m->batch.inputs);
    st_close(file);
    any_vocabulary = 29;
    return m;
}

// tiny_load: the published weights at `path`.
static void tiny_load(void *path)
{
    Model *m = tiny_make();
    published_load(&m->weights.params, path, PUBLISHED, m->L, "lm_head.weight", "wte");
    model_drop(m);
}

// published_variant: a copy of the tiny model's file as TMP/name, its tensors under a prefix; the
// tensor `which` is left out (how 0), cut by one row (1), holds a NaN (2), has a row of NaN more
// (5) or another tensor beside it, `extra` (3: changed, 4: the same numbers). The path.
static char *published_variant(const char *name, const char *prefix, const char *which, int how,
                               const char *extra)
{
    StFile *file = st_open(TINY "model.safetensors");
    StTensor tensors[128];
    size_t n = 0;
    for (size_t i = 0; i < file->header.n; i++) {
        const StEntry *e = &file->header.entries[i];
        const char *bare = e->name + (strncmp(e->name, "transformer.", 12) ? 0 : 12);
        const int same = which && !strcmp(bare, which);
        char *full = take(128);
        const size_t count = st_count(e), row = count / e->shape[0];
        double *data = take((count + row) * sizeof *data);
        for (size_t k = count; k < count + row; k++)
            data[k] = NAN;
        st_read_real(file, e, data, sizeof *data);
        snprintf(full, 128, "%s%s", prefix, bare);
        StTensor t = {full, ST_F64, e->ndim, {0}, data};
        memcpy(t.shape, e->shape, sizeof t.shape);
        if (same && how == 1)
            t.shape[0]--;
        if (same && how == 2)
            data[1] = NAN;
        if (same && how == 5)
            t.shape[0]++;
        if (!same || how)
            tensors[n++] = t;
        if (same && extra) {
            double *changed = copy_of(data, st_count(e) * sizeof *data);
            changed[0] += how == 3;
            t.name = extra;
            t.data = changed;
            tensors[n++] = t;
        }
    }
    char *path = in_dir(name);
    st_write(path, NULL, 0, tensors, n);
    st_close(file);
    return path;
}

// test_published: the logits of the transformers library's GPT2LMHeadModel, with and without the
// prefix and a tied head in the file; what does not fit is refused, with the tensor's name.
static void test_published(void)
{
    static const struct {
        const char *which, *extra, *message;
        int how;
    } bad[] = {
        {"h.1.attn.c_attn.weight", NULL, "has no tensor h.1.attn.c_attn.weight", 0},
        {"ln_f.bias", NULL, "has no tensor ln_f.bias", 0},
        {"wte.weight", NULL, "wte.weight: expected shape (", 1},
        {"wpe.weight", NULL, "wpe.weight: expected shape (16,12) or longer, got (15,12)", 1},
        {"h.0.mlp.c_fc.weight", NULL, "mlp.c_fc.weight: expected shape (12,48), got (11,48)", 1},
        {"h.0.ln_1.weight", NULL, "h.0.ln_1.weight: expected shape (12), got (11)", 1},
        {"h.1.mlp.c_proj.bias", NULL, "h.1.mlp.c_proj.bias holds a NaN or Inf at element 1", 2},
        {"h.1.ln_1.weight", "h.2.ln_1.weight", "this model 2 layers", 3},
        {"wte.weight", "lm_head.weight", "lm_head.weight: expected the numbers of wte.weight", 3},
        {"wte.weight", "transformer.lm_head.weight", "lm_head.weight: expected the numbers of", 3},
    };
    Model *m = tiny_make();
    StFile *file = st_open(TINY "logits.safetensors");
    double *want = take(m->B * m->T * m->V * sizeof *want);
    st_read_real(file, st_find(file, "logits"), want, sizeof *want);
    char *paths[] = {TINY "model.safetensors",
                     published_variant("bare", "", NULL, 0, NULL),
                     published_variant("prefixed", "transformer.", NULL, 0, NULL),
                     published_variant("tied", "", "wte.weight", 4, "lm_head.weight"),
                     published_variant("longer", "", "wpe.weight", 5, NULL)};
    fflush(stdout);
    for (int i = 0; i < 5; i++) {
        arena_fill(&m->weights.params, CANARY);
        published_load(&m->weights.params, paths[i], PUBLISHED, m->L, "lm_head.weight", "wte");
        model_forward(m);
        agree(paths[i], m->acts.logits, want, sizeof *want, m->B * m->T * m->V,
              BOUND_FORWARD_FP32, 0);
        agree("decoded", decode_all(m), want, sizeof *want, m->B * m->T * m->V,
              BOUND_FORWARD_FP32, 0);
    }
    CHECK(m->T == 16, "the golden has 16 positions, which bad[] relies on");
    st_close(file);
    model_drop(m);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(tiny_load, published_variant("bad", "", bad[i].which, bad[i].how, bad[i].extra),
                   EXIT_DATA, bad[i].message);
    expect_die(tiny_load, in_dir("absent"), EXIT_DATA, "absent");
    empty_dir("");
}

// ------------------------------------------------------------------------------------------------
// [training] Options, checkpoints, convergence.

// test_options: combinations without meaning are refused with their reason; every preset parses.
static void test_options(void)
{
    static const char *const bad[][2] = {
        {"--channels 50 --heads 3", "--channels 50: expected a multiple of --heads 3"},
        {"--channels 2 --heads 3", "--channels 2: expected a multiple of --heads 3"},
        {"--heads 0", "--heads: expected a whole number from 1"},
        {"--causal no", "--causal"},
        {"--init-from x", "--init-from: expected --model gpt2"},
        {"--model gpt2 --init-from x --load y", "--init-from and --load"},
        {"--model gpt2 --init-from x --out z --resume", "--init-from and --resume"},
        {"--model gpt2 --init-from x --embed-std 0.1", "--init-from and --embed-std"},
        {"--accumulate 0", "--accumulate"},
        {"--model bert", "--model"},
    };
    static Options options;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "");
    CHECK(config.model == TRANSFORMER && config.causal && config.training.accumulate == 1,
          "without options: the paper's Transformer");
}

// load_other: --load of the gpt2 checkpoint that test_tied wrote as another model.
static void load_other(void *line)
{
    run(line);
}

// test_tied: C24: checkpoints of tied and of untied models load, each in its own kind only.
static void test_tied(void)
{
    static const char *const models[] = MAIN_WORDS;
    char line[4096];
    for (int k = 0; k < 3; k++) {
        snprintf(line, sizeof line, SMALL "--model %s --steps 1 --out %s", models[k],
                 in_dir(models[k]));
        Model *m = run(line);
        snprintf(line, sizeof line, SMALL "--model %s --steps 0 --load %s/" CHECKPOINT_NAME,
                 models[k], in_dir(models[k]));
        Model *again = run(line);
        CHECK(arenas_equal(&m->weights.params, &again->weights.params), "C24: %s", models[k]);
        model_drop(m);
        model_drop(again);
        snprintf(line, sizeof line, SMALL "--model %s --steps 0 --load %s/" CHECKPOINT_NAME,
                 models[(k + 1) % 3], in_dir(models[k]));
        expect_die(load_other, line, EXIT_DATA, "--model");
    }
    empty_dir("");
}

// test_small_batches: F07: batches of 1, 2 and 3 with evaluations at every step.
static void test_small_batches(void)
{
    char line[4096];
    for (int B = 1; B <= 3; B++) {
        snprintf(line, sizeof line, "--string-size 2 --channels 8 --batch-size %d --eval-every 1 "
                 "--steps 2 --out %s", B, in_dir("small"));
        Model *m = run(line);
        CHECK(is_finite_bits(m->loss) && m->decode_B == (size_t)B, "F07: B=%d: loss %g", B,
              m->loss);
        model_drop(m);
        empty_dir("");
    }
}

// test_convergence: 8 letters are learnt within 400 steps by every model; reading its own output it
// is as good. fp32.
static void test_convergence(void)
{
    static const char *const models[] = MAIN_WORDS;
    static Options options;
    for (int k = 0; k < 3 && !IS_DOUBLE; k++) {
        LogRow row = {0};
        char line[256];
        long first = -1, step = 0;
        snprintf(line, sizeof line, "--string-size 8 --model %s --steps 400", models[k]);
        run_options(&options, line);
        Model *m = model_make(config);
        for (; step < 400 && first < 0; step++) {
            train_step(m, step, &row);
            first = row.acc >= 0.99 ? step : first;
        }
        row = evaluate(m, step);
        double parallel = task_score(m->task, &m->batch, m->decode_B), own = greedy(m);
        printf("8 letters, %s: 99%% at step %ld, then %.4f, greedy %.4f\n", models[k], first,
               row.acc, own);
        CHECK(first > 0 && row.acc >= 0.97, "8 letters, %s: accuracy %.4f", models[k], row.acc);
        CHECK(fabs(own - parallel) < 0.02, "8 letters, %s: greedy accuracy %.4f, parallel %.4f",
              models[k], own, parallel);
        model_drop(m);
    }
}

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const TestRow TESTS[] = {
    LAYER_TESTS,
    MODEL_TESTS,
    IMAGE_TESTS,
    {"attention, plain form", test_attention_plain, 0},
    {"attention derivatives", test_attention_derivatives, 0},
    {"attention extremes", test_attention_extremes, 0},
    {"linear golden", test_linear_golden, 0},
    {"one position", test_one_position, 0},
    {"phi", test_phi, 0},
    {"underflow", test_underflow, 0},
    {"gelu", test_gelu, 0},
    {"layernorm", test_layernorm, 0},
    {"goldens", test_goldens, 0},
    {"widths", test_widths, 0},
    {"sizes", test_sizes, 0},
    {"initial weights", test_initial, 0},
    {"flops", test_flops, 0},
    {"published weights", test_published, 0},
    {"options", test_options, 0},
    {"tied head", test_tied, 0},
    {"small batches", test_small_batches, 0},
    {"convergence", test_convergence, 0},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    return tests_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
