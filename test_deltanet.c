// test_deltanet.c: the tests of train_deltanet.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, recurrence = chunks to
// 1e-12); the fp32 build judges the arithmetic (the bounds of util/check.h, convergence).
//
// Sections: [tools] variants, one layer of the delta rule; [mix] [block] [model] [training] the
// tests, in the order of the trainer; [main]. What trainers have in common is tested by
// dev/test_layers.h and test_model.h. The delta rule by chunks, dev/delta/delta_chunk.h, must equal
// the recurrence. A name like A07 is a row of the list of cases that this project keeps: failures
// that users of other programs have reported.

#include "dev/testing.h" // first: it asks for GNU extensions
#include "dev/test_tasks.h"
#define TESTING
#include "train_deltanet.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/delta/delta_chunk.h"

enum { VARIANTS = 2 * 3 * 2, MAINS = 2 };
#define MAIN_OPTION "--eigenvalues"
#define MAIN_WORDS {"nonneg", "signed"}
#define NO_POSITIONS
#define ZEROS_OVERFLOW 0
#define SMALL "--task copying --string-size 4 --channels 16 --heads 2 --hidden 20 --batch-size 4 " \
    "--schedule constant "
#define CAUSAL(c) (c).conv // the model is always causal
#define HEAD(m) (m)->params.head_w
#include "dev/test_model.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, one layer of the delta rule.

// config_make: a configuration for the task ANY, with the convolution.
static Config config_make(int eigenvalues, int B, int T, int C, int NH, int L)
{
    Config c = base_config(B, T);
    c.eigenvalues = eigenvalues;
    c.channels = C;
    c.heads = NH;
    c.hidden = C + 2;
    c.layers = L;
    c.conv = 1;
    return c;
}

// variant_config: see dev/test_model.h: both ranges, with and without convolution, without it with
// SiLU on q and k, one head and two.
static int variant_config(int i, int B, int T, Config *c)
{
    *c = config_make(i % 2, B, T, 8, i / 6 ? 2 : 1, 2);
    c->conv = i / 2 % 3 == 0;
    c->qk_silu = i / 2 % 3 == 2;
    return 1;
}

// main_config: both ranges.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i, B, T, C, 2, L);
}

// config_text: the name of a configuration, in a buffer that the next call uses again.
static const char *config_text(const Config *c)
{
    static char text[96];
    snprintf(text, sizeof text, "%s, %d heads of %d%s%s", model_name(c), c->heads,
             c->channels / c->heads, c->conv ? "" : ", no convolution", c->qk_silu ? ", SiLU" : "");
    return text;
}

// One layer of the delta rule by itself: inputs, outputs, gradients.
typedef struct {
    size_t B, T, C, NH, HS, n, states; // n = B T C, states = B NH HS HS
    float *qkv, *beta, *initial, *out, *u, *final, *dout, *dfinal, *dqkv, *dbeta, *dinitial, *work;
} Layer;

// unit_heads: divide every head of q and k by its norm, as activate_forward does.
static void unit_heads(Layer *l)
{
    for (size_t i = 0; i < l->B * l->T * 2 * l->NH; i++) {
        float *x = l->qkv + i / (2 * l->NH) * 3 * l->C + i % (2 * l->NH) * l->HS;
        const float r = over_norm(x, l->HS, 1);
        for (size_t j = 0; j < l->HS; j++)
            x[j] *= r;
    }
}

// layer_make: a layer of random q, k, v, unit q and k, beta over all of 0 to 2, initial state.
static Layer layer_make(size_t B, size_t T, size_t NH, size_t HS)
{
    Layer l = {.B = B, .T = T, .C = NH * HS, .NH = NH, .HS = HS, .n = B * T * NH * HS,
               .states = B * NH * HS * HS};
    float **all[] = {&l.qkv, &l.beta, &l.initial, &l.out, &l.u, &l.final, &l.dout, &l.dfinal,
                     &l.dqkv, &l.dbeta, &l.dinitial};
    const size_t sizes[] = {3 * l.n, B * T * NH, l.states, l.n, l.n, l.states, l.n, l.states,
                            3 * l.n, B * T * NH, l.states};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *all[i] = guarded(sizes[i]);
    normal_fill(l.qkv, 3 * l.n, 1);
    normal_fill(l.beta, B * T * NH, 2);
    normal_fill(l.initial, l.states, 1);
    normal_fill(l.dout, l.n, 1);
    normal_fill(l.dfinal, l.states, 1);
    beta_forward(l.beta, l.beta, B * T * NH, 2);
    unit_heads(&l);
    l.work = reals(threads_count() * delta_work(HS));
    return l;
}

// layer_forward: fills out, u and final.
static void layer_forward(Layer *l)
{
    delta_forward(l->out, l->u, l->final, l->qkv, l->beta, l->initial, l->B, l->T, l->C, l->NH);
}

// layer_run: forward and backward.
static void layer_run(Layer *l)
{
    layer_forward(l);
    delta_backward(l->dqkv, l->dbeta, l->dinitial, l->dout, l->dfinal, l->u, l->final, l->qkv,
                   l->beta, l->work, l->B, l->T, l->C, l->NH);
}

// layer_loss: out . dout + final . dfinal, of which the layer's gradients are the gradients.
static double layer_loss(void *context)
{
    Layer *l = context;
    layer_forward(l);
    return dot(l->out, l->dout, l->n) + dot(l->final, l->dfinal, l->states);
}

// layer_text: what a layer is, in a buffer that the next call uses again.
static const char *layer_text(const Layer *l, const char *part)
{
    static char text[128];
    snprintf(text, sizeof text, "delta rule B=%zu T=%zu NH=%zu HS=%zu: %s", l->B, l->T, l->NH,
             l->HS, part);
    return text;
}

// columns: out (T,HS) = head i, of B NH, of channels from `first` of x (B,T,width).
static float *columns(const Layer *l, const float *x, size_t i, size_t first, size_t width)
{
    float *out = reals(l->T * l->HS);
    for (size_t t = 0; t < l->T; t++)
        memcpy(out + t * l->HS,
               x + (i / l->NH * l->T + t) * width + first + i % l->NH * l->HS,
               l->HS * sizeof *x);
    return out;
}

// against_chunks: the layer's recurrence and its gradients against chunks of CS, head by head;
// |Tm_ij| is at most 2. Bounds: those of an fp32 comparison of two fp32 programs, or `bound`.
static void against_chunks(Layer *l, size_t CS, double bound)
{
    const double forward = bound > 0 ? bound : FORWARD, grad = bound > 0 ? bound : GRAD;
    const size_t n = l->T * l->HS, size = l->HS * l->HS;
    layer_run(l);
    for (size_t i = 0; i < l->B * l->NH; i++) {
        const float *q = columns(l, l->qkv, i, 0, 3 * l->C);
        const float *k = columns(l, l->qkv, i, l->C, 3 * l->C);
        const float *v = columns(l, l->qkv, i, 2 * l->C, 3 * l->C);
        const float *dout = columns(l, l->dout, i, 0, l->C);
        float *beta = reals(l->T), *dbeta = reals(l->T), *out = reals(n), most = 0;
        DeltaGrads g = {reals(n), reals(n), reals(n), reals(l->T), reals(size)};
        for (size_t t = 0; t < l->T; t++) {
            beta[t] = l->beta[(i / l->NH * l->T + t) * l->NH + i % l->NH];
            dbeta[t] = l->dbeta[(i / l->NH * l->T + t) * l->NH + i % l->NH];
        }
        DeltaChunk c = delta_chunk_make(l->T, l->HS, CS);
        delta_chunk_forward(out, &c, q, k, v, beta, l->initial + i * size);
        delta_chunk_backward(g, dout, l->dfinal + i * size, &c, q, k, v, beta);
        for (size_t j = 0; j < c.NC * CS * CS; j++)
            most = fabs(c.Tm[j]) > most || isnan(c.Tm[j]) ? fabs(c.Tm[j]) : most;
        CHECK(most <= 2 * (1 + 1e-5), "%s %.9g", layer_text(l, "|Tm| at most 2, got"),
              (double)most);
        agree(layer_text(l, "out"), columns(l, l->out, i, 0, l->C), out, sizeof *out, n, forward,
              0);
        agree(layer_text(l, "final"), l->final + i * size, c.S + c.NC * size, sizeof *out, size,
              forward, 0);
        agree(layer_text(l, "dq"), columns(l, l->dqkv, i, 0, 3 * l->C), g.q, sizeof *out, n, grad,
              0);
        agree(layer_text(l, "dk"), columns(l, l->dqkv, i, l->C, 3 * l->C), g.k, sizeof *out, n,
              grad, 0);
        agree(layer_text(l, "dv"), columns(l, l->dqkv, i, 2 * l->C, 3 * l->C), g.v, sizeof *out, n,
              grad, 0);
        agree(layer_text(l, "dbeta"), dbeta, g.beta, sizeof *out, l->T, grad, 0);
        agree(layer_text(l, "dinitial"), l->dinitial + i * size, g.initial, sizeof *out, size,
              grad, 0);
        delta_chunk_free(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// [mix] The delta rule: derivatives, chunks, extremes.

// test_delta_derivatives: every input against central differences, states too; beta exactly 0 and
// 2 among them; keys of other lengths than 1.
static void test_delta_derivatives(void)
{
    static const size_t shapes[][4] = {{2, 5, 2, 3}, {1, 1, 1, 4}, {2, 3, 3, 1}, {1, 9, 1, 5}};
    for (size_t k = 0; k < 8; k++, give_all_back()) {
        const size_t *s = shapes[k / 2];
        Layer l = layer_make(s[0], s[1], s[2], s[3]);
        l.beta[0] = 0;
        l.beta[l.B * l.T * l.NH - 1] = 2;
        if (k & 1)
            normal_fill(l.qkv, 3 * l.n, 0.7);
        layer_run(&l);
        const double scale = norm_of(doubles(l.dqkv, 3 * l.n), 3 * l.n);
        central_difference(layer_text(&l, "dqkv"), layer_loss, &l, l.qkv, l.dqkv, 3 * l.n, scale);
        central_difference(layer_text(&l, "dbeta"), layer_loss, &l, l.beta, l.dbeta,
                           l.B * l.T * l.NH, scale);
        central_difference(layer_text(&l, "dinitial"), layer_loss, &l, l.initial, l.dinitial,
                           l.states, scale);
    }
}

// test_delta_chunks: section 5.4: recurrence = chunks, whose length divides T or not, forward and
// backward, all heads; the guards stay.
static void test_delta_chunks(void)
{
    static const size_t lengths[] = {1, 2, 3, 63, 64, 65, 100, 255, 1000};
    for (size_t k = 0; k < 9; k++)
        for (size_t CS = 16; CS <= 64; CS *= 4, give_all_back()) {
            Layer l = layer_make(1 + k % 2, lengths[k], 2, k % 2 ? 12 : 32);
            against_chunks(&l, CS, 0);
            CHECK(isnan(l.out[l.n]) && isnan(l.dqkv[3 * l.n]) && isnan(l.final[l.states]) &&
                      isnan(l.dbeta[l.B * l.T * l.NH]) && isnan(l.dinitial[l.states]),
                  "%s", layer_text(&l, "nothing past the end is written"));
        }
}

// test_delta_extremes: beta 0 everywhere: S stays, no output depends on v, but the gradient of beta
// lives; beta 2 everywhere: a reflection each, twice the same is none; A07: a zero key at t = 3
// leaves S as it is, gradients are finite; the same for q.
static void test_delta_extremes(void)
{
    Layer l = layer_make(1, 6, 1, 8);
    for (size_t t = 0; t < 6; t++)
        l.beta[t] = 0;
    layer_run(&l);
    CHECK(same_bits(l.final, l.initial, 64), "beta 0: S stays");
    CHECK(!all_zero(l.dbeta, 6) && same_bits(l.dinitial, l.dinitial, 64), "beta 0: dbeta lives");
    for (size_t t = 0; t < 6; t++)
        CHECK(all_zero(l.dqkv + t * 24 + 16, 8), "beta 0: v has no gradient");
    give_all_back();

    l = layer_make(1, 2, 1, 8);
    l.beta[0] = l.beta[1] = 2;
    memset(l.qkv + 16, 0, 8 * sizeof(float)); // v
    memset(l.qkv + 40, 0, 8 * sizeof(float));
    memcpy(l.qkv + 32, l.qkv + 8, 8 * sizeof(float)); // the same key
    layer_run(&l);
    agree("two equal reflections are none", l.final, l.initial, sizeof(float), 64, 2e-6, 0);
    give_all_back();

    for (int part = 0; part < 2; part++, give_all_back()) { // q, k
        l = layer_make(1, 6, 1, 8);
        float *raw = normals(6 * 24, 1), *dout = normals(6 * 24, 1), *dx = reals(6 * 24);
        memset(raw + 3 * 24 + part * 8, 0, 8 * sizeof(float));
        activate_forward(l.qkv, raw, 6, 8, 1, 0);
        CHECK(all_zero(l.qkv + 3 * 24 + part * 8, 8), "A07: a zero head stays zero");
        l.T = 3;
        layer_forward(&l);
        float *before = copy_of(l.final, 64 * sizeof(float));
        l.T = 4;
        layer_forward(&l);
        CHECK(same_bits(before, l.final, 64) == part, "A07: a zero key leaves S, q does not");
        CHECK(part || all_zero(l.out + 24, 8), "A07: a zero q reads nothing");
        l.T = 6;
        layer_run(&l);
        activate_backward(dx, l.dqkv, raw, 6, 8, 1, 0);
        CHECK(first_not_finite(dx, 144, sizeof *dx) == 144 &&
                  first_not_finite(l.dbeta, 6, sizeof *dx) == 6,
              "A07: finite gradients");
        activate_backward(dx, dout, raw, 6, 8, 1, 0);
        double slope = 0; // SiLU'(0) = 1/2 and 1 / sqrt(1e-6) = 1000
        for (size_t j = 0; j < 8; j++)
            slope = fmax(slope, fabs(dx[3 * 24 + part * 8 + j] / 500 -
                                     dout[3 * 24 + part * 8 + j]));
        CHECK(slope < 1e-4, "A07: at a zero head the gradient is 500 dout, off by %g", slope);
    }
}

// structured: a layer of HS 32 with keys that are all the same, or take turns between two, and beta
// 1.999, as a layer that tracks a state has.
static Layer structured(size_t T, int keys)
{
    Layer l = layer_make(1, T, 1, 32);
    for (size_t t = 0; t < T; t++) {
        const size_t from = keys == 1 ? 0 : rand_below(5, 5, t, 2);
        memmove(l.qkv + t * 96 + 32, l.qkv + from * 96 + 32, 32 * sizeof(float));
        l.beta[t] = 1.999;
    }
    return l;
}

// test_delta_structured: section 5.2: 4096 identical keys, or two that take turns, with beta 1.999:
// S stays bounded, and chunks agree: identical keys put 1e-7 of rounding into 64 reflections, so
// that fp32 chunks may be off by 5e-4 (measured: 4e-4 over 4096 tokens).
static void test_delta_structured(void)
{
    for (int k = 0; k < 4; k++, give_all_back()) {
        Layer l = structured(k & 1 ? 4096 : 256, 1 + k / 2);
        double most = 0;
        memset(l.initial, 0, l.states * sizeof(float));
        against_chunks(&l, 64, IS_DOUBLE ? 1e-9 : 5e-4);
        for (size_t i = 0; i < l.states; i++)
            most = fabs(l.final[i]) > most || isnan(l.final[i]) ? fabs(l.final[i]) : most;
        printf("%d keys, T=%zu: largest element of S %.3g\n", 1 + k / 2, l.T, most);
        CHECK(most < 500, "%d keys, T=%zu: largest element of S %g", 1 + k / 2, l.T, most);
    }
}

// test_delta_split: B21: 130 tokens at once, one by one, and as 1 + 63 + 64 + 2, carrying S and the
// convolution's window: the same bits.
static void test_delta_split(void)
{
    enum { T = 130, NH = 2, C = 16, C3 = 3 * C };
    static const size_t parts[][5] = {{T}, {1, 63, 64, 2}, {0}}; // 0: one by one
    float *x = normals(T * C3, 1), *weight = normals(C3 * WINDOW, 0.5), *beta = normals(T * NH, 1);
    float *outs[3];
    for (int k = 0; k < 3; k++) {
        float *S = reals(C * C / NH), *window = reals((WINDOW - 1 + T) * C3), *y = reals(T * C3);
        float *u = reals(T * C);
        outs[k] = reals(T * C);
        memcpy(window + (WINDOW - 1) * C3, x, T * C3 * sizeof *x);
        for (size_t t = 0, i = 0, n; t < T; t += n, i++) {
            n = parts[k][0] ? parts[k][i] : 1;
            conv_forward(y + t * C3, x + t * C3, window + t * C3, weight, 1, n, C3);
            activate_forward(y + t * C3, y + t * C3, n, C, NH, 0);
            delta_forward(outs[k] + t * C, u, S, y + t * C3, beta + t * NH, S, 1, n, C, NH);
        }
        CHECK(same_bits(outs[0], outs[k], T * C), "B21: split %d", k);
    }
    CHECK(!all_zero(outs[0], T * C), "B21: an output");
}

// test_beta: section 5.6: beta in (0, range), 0 and the range themselves far out, its derivative.
static void test_beta(void)
{
    float b[] = {-200, -1, 0, 1, 200}, beta[5], dbeta[] = {1, 1, 1, 1, 1}, db[5];
    for (int range = 1; range <= 2; range++) {
        beta_forward(beta, b, 5, range);
        beta_backward(db, dbeta, beta, 5, range);
        CHECK(beta[0] < 1e-38 && beta[2] == range / 2.0 && beta[4] == range, "beta: %g %g %g",
              (double)beta[0], (double)beta[2], (double)beta[4]);
        for (int i = 0; i < 5; i++) {
            const double p = 1 / (1 + exp(-(double)b[i]));
            CHECK(fabs(beta[i] - range * p) < 1e-6 && fabs(db[i] - range * p * (1 - p)) < 1e-6,
                  "beta(%g) = %g, derivative %g", (double)b[i], (double)beta[i], (double)db[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// [block] Convolution, SiLU and norms, SwiGLU.

// The convolution by itself, for central differences.
typedef struct {
    float *out, *x, *before, *weight, *dout;
    size_t B, T, C;
} Conv;

// conv_loss: out . dout.
static double conv_loss(void *context)
{
    Conv *c = context;
    conv_forward(c->out, c->x, c->before, c->weight, c->B, c->T, c->C);
    return dot(c->out, c->dout, c->B * c->T * c->C);
}

// test_conv: B02: T shorter than the window and longer, with what stands before and without: the
// plain sum, central differences, dweight adds. B07: 65535 channels and more.
static void test_conv(void)
{
    for (size_t k = 0; k < 12; k++, give_all_back()) {
        static const size_t lengths[] = {1, 2, 3, 4, 5, 9};
        const size_t B = 2, T = lengths[k / 2], C = 19, n = B * T * C, m = B * (WINDOW - 1) * C;
        Conv c = {guarded(n), normals(n, 1), k & 1 ? normals(m, 1) : NULL, normals(C * WINDOW, 1),
                  normals(n, 1), B, T, C};
        float *dx = guarded(n), *dbefore = c.before ? guarded(m) : NULL, *dw = reals(C * WINDOW);
        double *want = take(n * sizeof *want);
        for (size_t i = 0; i < n; i++)
            for (size_t w = 0; w < WINDOW; w++) {
                const size_t at = i / C % T + w, ch = i % C; // in x with three rows before it
                want[i] += c.weight[ch * WINDOW + w] *
                           (at >= 3    ? c.x[(i / C / T * T + at - 3) * C + ch]
                            : c.before ? c.before[(i / C / T * 3 + at) * C + ch]
                                       : 0.0);
            }
        conv_loss(&c);
        agree("B02: convolution", c.out, want, sizeof *want, n, FORWARD, 0);
        conv_backward(dx, dbefore, dw, c.dout, c.x, c.before, c.weight, B, T, C);
        central_difference("B02: convolution dx", conv_loss, &c, c.x, dx, n, 1);
        central_difference("B02: convolution dweight", conv_loss, &c, c.weight, dw, C * WINDOW, 1);
        if (c.before)
            central_difference("B02: convolution dbefore", conv_loss, &c, c.before, dbefore, m, 1);
        CHECK(isnan(dx[n]) && (!dbefore || isnan(dbefore[m])), "B02: nothing past the end");
        float *twice = copy_of(dw, C * WINDOW * sizeof *dw);
        conv_backward(dx, dbefore, twice, c.dout, c.x, c.before, c.weight, B, T, C);
        for (size_t i = 0; i < C * WINDOW; i++)
            twice[i] /= 2;
        agree("convolution: dweight adds", twice, dw, sizeof *dw, C * WINDOW, GRAD, 0);
    }
    for (size_t C = 65535; C <= 65537; C++, give_all_back()) {
        float *x = normals(2 * C, 1), *weight = normals(C * WINDOW, 1), *out = reals(2 * C);
        float *dx = reals(2 * C), *dw = reals(C * WINDOW);
        conv_forward(out, x, NULL, weight, 1, 2, C);
        conv_backward(dx, NULL, dw, x, x, NULL, weight, 1, 2, C);
        const float *last = weight + (C - 1) * WINDOW;
        CHECK(fabs(out[2 * C - 1] - (last[3] * x[2 * C - 1] + last[2] * x[C - 1])) < 1e-5 &&
                  fabs(dx[C - 1] - (last[3] * x[C - 1] + last[2] * x[2 * C - 1])) < 1e-5 &&
                  fabs(dw[C * WINDOW - 2] - x[2 * C - 1] * x[C - 1]) < 1e-5,
              "B07: %zu channels", C);
    }
}

// activate_loss, rmsnorm_loss, swiglu_loss: outputs . dout; of activate_forward N rows of q, k, v
// of C channels in OC heads, SiLU from channel `accumulate` on.
static double activate_loss(void *context)
{
    Pair *p = context;
    activate_forward(p->out, p->x, p->N, p->C, p->OC, (size_t)p->accumulate);
    return dot(p->out, p->dout, p->N * 3 * p->C);
}

static double rmsnorm_loss(void *context)
{
    Pair *p = context;
    rmsnorm_forward(p->out, p->x, p->w, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

static double swiglu_loss(void *context)
{
    Pair *p = context;
    swiglu_forward(p->out, p->x, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_activate: SiLU and unit heads: central differences, unit length, what SiLU leaves out.
static void test_activate(void)
{
    for (int k = 0; k < 6; k++, give_all_back()) {
        Pair p = {.N = 3, .C = 12, .OC = k / 3 ? 3 : 1, .accumulate = k % 3 == 0 ? 0 : 24};
        const size_t n = p.N * 3 * p.C;
        float *dx = reals(n);
        p.x = normals(n, k % 3 == 2 ? 3 : 1);
        p.out = reals(n);
        p.dout = normals(n, 1);
        activate_loss(&p);
        activate_backward(dx, p.dout, p.x, p.N, p.C, p.OC, (size_t)p.accumulate);
        central_difference("SiLU and unit heads", activate_loss, &p, p.x, dx, n, 1);
        for (size_t i = 0; i < p.N * 2 * p.OC; i++) {
            const float *y = p.out + i / (2 * p.OC) * 36 + i % (2 * p.OC) * (12 / p.OC);
            CHECK(fabs(dot(y, y, 12 / p.OC) - 1) < 1e-3, "a unit head, %g", dot(y, y, 12 / p.OC));
        }
        for (size_t c = 24; c < 36; c++)
            CHECK(fabs(p.out[c] - p.x[c] / (1 + exp(-(double)p.x[c]))) < 1e-6, "v = SiLU");
        CHECK((p.out[0] * p.x[0] >= 0 && p.out[1] * p.x[1] >= 0), "signs stay");
        activate_backward(p.dout, p.dout, p.x, p.N, p.C, p.OC, (size_t)p.accumulate);
        CHECK(same_bits(dx, p.dout, n), "dx may alias dout");
    }
    float slope;
    const float far[] = {-1000, 1000, -88, 88};
    for (int i = 0; i < 4; i++) {
        const float y = silu(far[i], &slope);
        CHECK(fabs(y - (far[i] > 0 ? far[i] : 0)) < 1e-30 && fabs(slope - (far[i] > 0)) < 1e-30,
              "SiLU(%g) = %g, slope %g", (double)far[i], (double)y, (double)slope);
    }
    CHECK(isnan(silu(NAN, &slope)) && isnan(slope), "SiLU keeps NaN");
}

// test_rmsnorm: central differences, the plain form, += of both; section 5.13: a zero row gives 0
// and a finite gradient of 1000 dout weight.
static void test_rmsnorm(void)
{
    static const size_t shapes[][2] = {{1, 1}, {3, 7}, {5, 16}, {40, 33}, {2, 3072}};
    for (size_t k = 0; k < 5; k++, give_all_back()) {
        const size_t N = shapes[k][0], C = shapes[k][1], n = N * C;
        Pair p = {.N = N, .C = C, .x = normals(n, 2), .w = normals(C, 1), .dout = normals(n, 1)};
        float *dx = reals(n), *dw = reals(C), *dout = copy_of(p.dout, n * sizeof *dout);
        double *want = take(n * sizeof *want);
        p.out = reals(n);
        for (size_t i = 0; i < n; i++) {
            const float *row = p.x + i / C * C;
            want[i] = p.x[i] / sqrt(dot(row, row, C) / (double)C + 1e-6) * p.w[i % C];
        }
        rmsnorm_loss(&p);
        agree("rmsnorm", p.out, want, sizeof *want, n, FORWARD, 0);
        rmsnorm_backward(dx, dw, dout, p.x, p.w, N, C);
        if (n < 200) {
            central_difference("rmsnorm dx", rmsnorm_loss, &p, p.x, dx, n, 1);
            central_difference("rmsnorm dweight", rmsnorm_loss, &p, p.w, dw, C, 1);
        }
        float *dx2 = copy_of(dx, n * sizeof *dx), *dw2 = copy_of(dw, C * sizeof *dw);
        memcpy(dout, p.dout, n * sizeof *dout);
        rmsnorm_backward(dx2, dw2, dout, p.x, p.w, N, C);
        for (size_t i = 0; i < n; i++)
            dx2[i] /= 2;
        for (size_t i = 0; i < C; i++)
            dw2[i] /= 2;
        agree("rmsnorm_backward adds to dx", dx2, dx, sizeof *dx, n, GRAD, 1);
        CHECK(same_bits(dw2, dw, C), "rmsnorm_backward adds to dweight");
        memset(p.x, 0, n * sizeof *p.x);
        memset(dx, 0, n * sizeof *dx);
        memcpy(dout, p.dout, n * sizeof *dout);
        rmsnorm_loss(&p);
        rmsnorm_backward(dx, dw2, dout, p.x, p.w, N, C);
        CHECK(all_zero(p.out, n), "5.13: a zero row gives 0");
        for (size_t i = 0; i < n; i++)
            want[i] = 1000 * (double)p.dout[i] * p.w[i % C];
        agree("5.13: the gradient at a zero row", dx, want, sizeof *want, n, GRAD, 0);
    }
}

// test_swiglu: central differences and the plain form.
static void test_swiglu(void)
{
    enum { N = 4, H = 21 };
    Pair p = {.N = N, .C = H, .x = normals(2 * N * H, 2), .out = reals(N * H)};
    float *dx = reals(2 * N * H);
    double *want = take(N * H * sizeof *want);
    p.dout = normals(N * H, 1);
    swiglu_loss(&p);
    swiglu_backward(dx, p.dout, p.x, N, H);
    for (size_t i = 0; i < N * H; i++) {
        const double g = p.x[i / H * 2 * H + i % H];
        want[i] = g / (1 + exp(-g)) * p.x[i / H * 2 * H + H + i % H];
    }
    agree("swiglu", p.out, want, sizeof *want, N * H, FORWARD, 0);
    central_difference("swiglu dx", swiglu_loss, &p, p.x, dx, 2 * N * H, 1);
}

// ------------------------------------------------------------------------------------------------
// [model] The whole model: goldens, decoding, sizes, initial weights.

// golden_sizes: what the shapes of a golden say of the model.
static void golden_sizes(const StFile *file, Config *c)
{
    const size_t *down = st_find(file, "params.down_w")->shape;
    c->layers = (int)down[0];
    c->channels = (int)down[1];
    c->hidden = (int)down[2];
}

// test_goldens: what dev/ref/deltanet.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/deltanet_goldens", 6, 6, golden_sizes);
}

// test_decode_lengths: decoding = parallel at every length around a chunk's, for both ranges.
static void test_decode_lengths(void)
{
    static const int lengths[] = {1, 2, 63, 64, 65, 255, 1000};
    for (int k = 0; k < 14; k++, give_all_back()) {
        Model *m = model_random(config_make(k % 2, 1, lengths[k / 2], 8, 2, 1));
        model_forward(m);
        agree("decoded", decode_all(m), m->acts.logits, sizeof(float), m->T * m->V,
              IS_DOUBLE ? 1e-11 : 1e-5, 0);
        model_drop(m);
    }
}

// test_widths: B06: odd sizes and B = 1 to 3: decoding = parallel, all gradients are finite.
static void test_widths(void)
{
    static const int sizes[][3] = {{4, 1, 1}, {6, 3, 5}, {12, 2, 31}, {36, 4, 7}, {100, 5, 33}};
    for (int k = 0; k < 15; k++, give_all_back()) {
        const int *s = sizes[k / 3];
        Config c = config_make(k % 2, k % 3 + 1, 7, s[0], s[1], 1);
        c.hidden = s[2];
        Model *m = model_random(c);
        model_run(m);
        agree(config_text(&m->config), decode_all(m), m->acts.logits, sizeof(float),
              m->B * m->T * m->V, IS_DOUBLE ? 1e-11 : 1e-5, 0);
        CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "B06: %s", config_text(&m->config));
        model_drop(m);
    }
}

// test_sizes: the paper's numbers of parameters; the loss of a new model is close to ln V; B10:
// sizes beyond 32 bits.
static void test_sizes(void)
{
    static const struct {
        int V, L, conv;
        size_t parameters;
    } rows[] = {{3, 2, 1, 529856},   {10, 3, 1, 796128},  {12, 3, 1, 796640},
                {127, 1, 0, 295584}, {127, 5, 0, 1347360}};
    Model plan;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        any_vocabulary = (size_t)rows[k].V;
        Config c = config_make(SIGNED, 1, 4, 128, 4, rows[k].L);
        c.conv = rows[k].conv;
        c.hidden = 0;
        model_plan(&plan, &c);
        CHECK(arena_elements(&plan.weights.params, NULL) == rows[k].parameters,
              "parameters: %zu, got %zu", rows[k].parameters,
              arena_elements(&plan.weights.params, NULL));
    }
    const int hidden[][2] = {{128, 512}, {1024, 2816}, {2048, 5632}};
    for (int k = 0; k < 3; k++) {
        Config c = config_make(SIGNED, 1, 4, hidden[k][0], 4, 1);
        c.hidden = 0;
        CHECK(hidden_size(&c) == (size_t)hidden[k][1], "hidden of %d channels: %zu", hidden[k][0],
              hidden_size(&c));
    }
    any_vocabulary = 50257;
    Config c = config_make(SIGNED, 96, 1024, 768, 12, 12);
    model_plan(&plan, &c);
    CHECK(model_bytes(&plan) > 2 * sizeof(float) * 96 * 1024 * 50257, "B10: planned %zu bytes",
          model_bytes(&plan));
    for (int k = 0; k < 4; k++) {
        any_vocabulary = k & 1 ? 65 : 29;
        Model *m = model_make(config_make(k / 2, 8, 16, 64, 2, 2));
        model_forward(m);
        const double want = log((double)any_vocabulary);
        CHECK(fabs(m->loss - want) < 0.15, "%s: loss at init near %g, got %g",
              config_text(&m->config), want, m->loss);
        model_drop(m);
    }
    any_vocabulary = 29;
}

// test_initial: the deviations and the largest numbers that new weights have, from the authors'
// formulas; beta is half its range; all decay.
static void test_initial(void)
{
    static const struct {
        const char *name;
        double most, deviation; // most 0: normal
    } rows[] = {{"qkv_w", 0.02706, 0}, {"beta_w", 0.0377, 0}, {"proj_w", 0.02706, 0},
                {"conv_w", 0.5, 0},    {"wte", 0, 0.02},      {"gu_w", 0, 0.02},
                {"down_w", 0, 0.01},   {"head_w", 0, 0.02},   {"norm1_w", 0, 1},
                {"norm2_w", 0, 1},     {"norm_o_w", 0, 1},    {"norm_w", 0, 1}};
    Config c = config_make(SIGNED, 2, 8, 128, 4, 2); // sqrt(2 L) = 2
    c.hidden = 0;
    Model *m = model_make(c);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int k = 0;
        while (strcmp(m->weights.params.table[k].name, rows[i].name))
            k++;
        const float *x = arena_data(&m->weights.params, k);
        const size_t n = tensor_size(&m->weights.params.table[k]);
        const double got = sqrt(dot(x, x, n) / (double)n), most = rows[i].most;
        const double want = most > 0 ? most / sqrt(3.0) : rows[i].deviation;
        double largest = 0;
        for (size_t j = 0; j < n; j++)
            largest = fmax(largest, fabs(x[j]));
        CHECK(fabs(got - want) <= 0.05 * want, "%s: deviation %g, got %g", rows[i].name, want, got);
        CHECK(most == 0 || (largest <= 1.001 * most && largest > 0.98 * most), "%s: up to %g",
              rows[i].name, largest);
        CHECK(m->weights.params.table[k].decay, "%s: decays", rows[i].name);
    }
    model_forward(m);
    for (size_t i = 0; i < m->L * m->B * m->T * m->NH; i++)
        CHECK(fabs(m->acts.beta[i] - 1) < 0.5, "beta at init %g", (double)m->acts.beta[i]);
    model_drop(m);
}

// test_flops: what a step costs: weights and recurrence.
static void test_flops(void)
{
    Config c = config_make(SIGNED, 4, 34, 192, 3, 12);
    Model plan;
    c.training.accumulate = 2;
    c.hidden = 512;
    model_plan(&plan, &c);
    const double layer = 4 * 192 * 192 + 3 * 192 + 3 * 192 * 4 + 3 * 192 * 512 + 2 * 192 + 64;
    const double want = 2 * 4 * 34 * (6 * (12 * layer + 29 * 192 + 192) + 22 * 12 * 192 * 64.0);
    CHECK(fabs(model_flops(&plan) - want) <= 1e-12 * want, "FLOPs an update: %g, got %g", want,
          model_flops(&plan));
}

// ------------------------------------------------------------------------------------------------
// [training] Options, evaluation at other lengths, convergence.

// test_options: combinations without meaning are refused with their reason; every preset parses;
// without options the model learns parity with eigenvalues of both signs.
static void test_options(void)
{
    static const char *const bad[][2] = {
        {"--channels 50 --heads 3", "--channels 50: expected a multiple of --heads 3"},
        {"--channels 2 --heads 3", "--channels 2: expected a multiple of --heads 3"},
        {"--heads 0", "--heads: expected a whole number from 1"},
        {"--eigenvalues negative", "--eigenvalues: expected one of nonneg|signed"},
        {"--conv 4", "--conv: expected one of no|yes"},
        {"--elements pairs", "--elements: expected one of all|swaps|triples"},
        {"--multiply maybe", "--multiply"},
        {"--tokens-per-element 0", "--tokens-per-element"},
        {"--model signed", "unknown option"},
    };
    static Options options;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "");
    CHECK(config.eigenvalues == SIGNED && config.task == PARITY && config.conv,
          "without options: parity, signed, with the convolution");
    run_options(&options, "--preset s5-swaps");
    CHECK(config.task == S5 && !config.conv && config.task_options.elements == ELEMENTS_SWAPS &&
              config.layers == 1,
          "--preset s5-swaps");
}

// test_evaluation: an evaluation reads longer sequences in fewer rows, training goes on at its own
// length with the same bits as without; every task trains and evaluates.
static void test_evaluation(void)
{
    static const char *const tasks[] = {"parity", "modular", "brackets", "s5", "z60"};
    char line[4096];
    for (int k = 0; k < 5; k++, give_all_back()) {
        char *weights[2];
        for (int every = 0; every < 2; every++) {
            snprintf(line, sizeof line, "--task %s --channels 8 --heads 2 --hidden 9 --batch-size "
                     "5 --max-length 9 --eval-min-length 10 --eval-max-length 30 --steps 4 "
                     "--eval-every %d --curve %s --out %s", tasks[k], every, in_dir("curve"),
                     in_dir("run"));
            Model *m = run(line);
            CHECK(m->batch.rows == 5 && m->B == (k < 3 ? 40 / 29 : 50 / 31) &&
                      m->T == (k < 3 ? 29 : 31),
                  "%s: an evaluation of %zu x %zu", tasks[k], m->B, m->T);
            weights[every] = trained_copy(&m->weights);
            CHECK(!every || trained_same(&m->weights, weights[0]), "%s: evaluations change nothing",
                  tasks[k]);
            size_t n;
            unsigned char *curve = get_file(in_dir("curve"), &n);
            CHECK(!strncmp((char *)curve, "tokens,sequences,accuracy\n", 26) && n > 30, "curve");
            free(curve);
            model_drop(m);
            empty_dir("");
        }
    }
}

// test_convergence: copying is learnt by both ranges, read back as well; parity of up to 12 bits by
// the signed range, beyond that length too, where the other stays at chance. fp32.
static void test_convergence(void)
{
    static const char *const words[] = MAIN_WORDS;
    static Options options;
    for (int k = 0; k < 4 && !IS_DOUBLE; k++) {
        const int parity = k / 2, steps = parity ? 400 : 300;
        LogRow row = {0};
        char line[512];
        snprintf(line, sizeof line, "--task %s --string-size 4 --eigenvalues %s --steps %d "
                 "--hidden 64 --channels 32 --heads 2 --batch-size 32 --lr 5e-3 --max-length 12 "
                 "--eval-min-length 13 --eval-max-length 30 --eval-batches 20",
                 parity ? "parity" : "copying", words[k % 2], steps);
        run_options(&options, line);
        Model *m = model_make(config);
        for (long step = 0; step < steps; step++)
            train_step(m, step, &row);
        row = evaluate(m, steps);
        printf("%s, %s: accuracy %.4f, scaled %.4f\n", TASKS[config.task].name, words[k % 2],
               row.acc, row.scaled);
        if (parity && k % 2)
            CHECK(row.scaled >= 0.8, "parity, signed: %.4f", row.scaled);
        if (parity && !(k % 2))
            CHECK(row.scaled < 0.3, "parity, nonneg: %.4f", row.scaled);
        if (!parity) {
            const double own = greedy(m);
            CHECK(row.acc > 0.97 && own > 0.97, "copying: %.4f, greedy %.4f", row.acc, own);
        }
        model_drop(m);
    }
}

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const TestRow TESTS[] = {
    LAYER_TESTS,
    MODEL_TESTS,
    {"delta derivatives", test_delta_derivatives, 0},
    {"delta chunks", test_delta_chunks, 0},
    {"delta extremes", test_delta_extremes, 0},
    {"delta structured", test_delta_structured, 0},
    {"delta split", test_delta_split, 0},
    {"beta", test_beta, 0},
    {"conv", test_conv, 0},
    {"activate", test_activate, 0},
    {"rmsnorm", test_rmsnorm, 0},
    {"swiglu", test_swiglu, 0},
    {"goldens", test_goldens, 0},
    {"decode lengths", test_decode_lengths, 0},
    {"widths", test_widths, 0},
    {"sizes", test_sizes, 0},
    {"initial weights", test_initial, 0},
    {"flops", test_flops, 0},
    {"options", test_options, 0},
    {"evaluation", test_evaluation, 0},
    {"convergence", test_convergence, 0},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    return tests_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
