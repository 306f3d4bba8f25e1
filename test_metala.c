// test_metala.c: the tests of train_metala.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (golden values to 1e-9, central differences,
// recurrence = chunks to 1e-12); the fp32 build judges the arithmetic (the bounds of util/check.h,
// convergence).
//
// Sections: [tools] variants, one layer of the recurrence; [mix] [block] [model] [training] the
// tests, in the order of the trainer; [main]. What trainers have in common is tested by
// dev/test_layers.h and test_model.h. The recurrence by chunks, dev/gla/gla_chunk.h, must equal it.
// A name like A05 is a row of the list of cases that this project keeps: failures that users of
// other programs have reported. M1 to M14 are the pitfalls of the specification, section 6.

#include "dev/testing.h" // first: it asks for GNU extensions
#include "dev/test_tasks.h"
#define TESTING
#include "train_metala.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include "dev/gla/gla_chunk.h"

enum { VARIANTS = 2 * 3 * 2, MAINS = 2 };
#define MAIN_OPTION "--key"
#define MAIN_WORDS {"tied", "free"}
#define NO_POSITIONS
#define ZEROS_OVERFLOW 0
#define SMALL "--task copying --string-size 4 --channels 16 --heads 2 --hidden 20 --batch-size 4 " \
    "--schedule constant "
#define CAUSAL(c) (c).augment // the model is always causal
#define HEAD(m) (m)->params.head_w
#include "dev/test_model.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, one layer of the recurrence.

// config_make: a configuration for the task ANY: all of MetaLA, convolution of two.
static Config config_make(int key, int B, int T, int C, int NH, int L)
{
    Config c = base_config(B, T);
    c.key = key;
    c.channels = C;
    c.heads = NH;
    c.hidden = C + 2;
    c.layers = L;
    c.conv = c.augment = c.scale = 1;
    c.tau = 16;
    return c;
}

// variant_config: see dev/test_model.h: both keys, all convolutions, with and without what a token
// says to itself; heads, their key sizes, scale and tau go with them.
static int variant_config(int i, int B, int T, Config *c)
{
    *c = config_make(i % 2, B, T, 8, i / 6 ? 2 : 1, 2);
    c->conv = i / 2 % 3;
    c->augment = i / 6;
    c->key_channels = i % 4 == 1 ? 6 : 0;
    c->scale = i % 3 > 0;
    c->tau = i % 5 ? 2 : 16;
    return 1;
}

// main_config: MetaLA and GLA.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i ? FREE : TIED, B, T, C, 2, L);
}

// config_text: the name of a configuration, in a buffer that the next call uses again.
static const char *config_text(const Config *c)
{
    static char text[96];
    snprintf(text, sizeof text, "%s, %d heads, %d key channels, conv %d, augment %d", model_name(c),
             c->heads, c->key_channels, 2 * c->conv, c->augment);
    return text;
}

// One layer of the recurrence by itself: inputs, outputs, gradients.
typedef struct {
    size_t B, T, NH, DK, DV, K, C, P, N, states; // N = B T, states = B NH DK DV
    float scale;
    float *qv, *g, *k, *initial, *o, *tiles, *final, *d_o, *dfinal, *dqv, *dg, *dk, *dinitial;
    float *work;
} Layer;

enum { GATES_METALA, GATES_LONG, GATES_SHORT, GATES_HGRN2, GATES_ONE, GATES_LEAST, GATES_RESET,
       GATES_MIXED, GATE_KINDS };
static const char *const GATE_NAMES[] = {"z ~ N(0,2)", "z = 8", "z = -20", "HGRN2, f ~ N(0,3)",
                                         "g = 0", "g = -30", "one g = -30", "exp(-0.01, -5, -50)"};

// hgrn2_gate: ln(low + (1 - low) sigmoid(f)), HGRN2's log gate: tau is 1 there. *slope, *slope_low
// = its derivatives.
static double hgrn2_gate(double f, double low, double *slope, double *slope_low)
{
    const double p = 1 / (1 + exp(-f)), alpha = low + (1 - low) * p;
    *slope = (1 - low) * p * (1 - p) / alpha;
    *slope_low = (1 - p) / alpha;
    return log(alpha);
}

// gates_fill: g and k of a layer: of this kind, k = 1 - exp(g) or, for GLA's sake, of its own.
static void gates_fill(Layer *l, int kind, int tied)
{
    static const double mixed[] = {-0.01, -5, -50};
    const size_t n = l->N * l->K;
    double slope;
    normal_fill(l->k, n, 1);
    normal_fill(l->g, n, kind == GATES_HGRN2 ? 3 : 2);
    for (size_t i = 0; i < n; i++) {
        const size_t t = i / l->K % l->T;
        if (kind == GATES_LONG || kind == GATES_SHORT)
            l->g[i] = kind == GATES_LONG ? 8 : -20;
        if (kind <= GATES_SHORT)
            l->g[i] = -log1p(exp(-(double)l->g[i])) / 16;
        if (kind == GATES_HGRN2)
            l->g[i] = hgrn2_gate(l->g[i], 0, &slope, &slope);
        if (kind >= GATES_ONE)
            l->g[i] = kind == GATES_LEAST || (kind == GATES_RESET && t == l->T / 2) ? -30 : 0;
        if (kind == GATES_MIXED)
            l->g[i] = mixed[rand_below(3, 3, i, 3)];
        if (tied)
            l->k[i] = -expm1((double)l->g[i]);
    }
}

// layer_make: a layer of random q, v, initial state and gradients, with gates of this kind.
static Layer layer_make(size_t B, size_t T, size_t NH, size_t DK, size_t DV, int kind, int tied)
{
    Layer l = {.B = B, .T = T, .NH = NH, .DK = DK, .DV = DV, .K = NH * DK, .C = NH * DV,
               .P = NH * (DK + DV), .N = B * T, .states = B * NH * DK * DV};
    float **all[] = {&l.qv, &l.d_o, &l.initial, &l.dfinal, &l.g, &l.k, &l.o, &l.tiles, &l.final,
                     &l.dqv, &l.dg, &l.dk, &l.dinitial};
    const size_t sizes[] = {l.N * l.P, l.N * l.C, l.states, l.states, l.N * l.K, l.N * l.K,
                            l.N * l.C, (T + TILE - 1) / TILE * l.states, l.states, l.N * l.P,
                            l.N * l.K, l.N * l.K, l.states};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i] = guarded(sizes[i]);
        if (i < 4)
            normal_fill(*all[i], sizes[i], 1);
    }
    gates_fill(&l, kind, tied);
    l.scale = 1 / sqrt((double)DK);
    l.work = reals(threads_count() * gla_work(DK, DV));
    return l;
}

// layer_forward: fills o, tiles and final.
static void layer_forward(Layer *l)
{
    gla_forward(l->o, l->tiles, l->final, l->qv, l->g, l->k, l->initial, l->B, l->T, l->NH, l->DK,
                l->DV, l->scale);
}

// layer_run: forward and backward.
static void layer_run(Layer *l)
{
    layer_forward(l);
    memset(l->dqv, 0, l->N * l->P * sizeof *l->dqv);
    memset(l->dk, 0, l->N * l->K * sizeof *l->dk);
    gla_backward(l->dqv, l->dg, l->dk, l->dinitial, l->d_o, l->dfinal, l->tiles, l->qv, l->g, l->k,
                 l->work, l->B, l->T, l->NH, l->DK, l->DV, l->scale);
}

// layer_loss: o . do + final . dfinal, of which the layer's gradients are the gradients.
static double layer_loss(void *context)
{
    Layer *l = context;
    layer_forward(l);
    return dot(l->o, l->d_o, l->N * l->C) +
           (l->dfinal ? dot(l->final, l->dfinal, l->states) : 0);
}

// layer_text: what a layer is, in a buffer that the next call uses again.
static const char *layer_text(const Layer *l, int kind, const char *part)
{
    static char text[160];
    snprintf(text, sizeof text, "B=%zu T=%zu NH=%zu DK=%zu DV=%zu, %s: %s", l->B, l->T, l->NH,
             l->DK, l->DV, GATE_NAMES[kind], part);
    return text;
}

// columns: out (T,n) = channels from `first` of sequence b of x (B,T,width).
static float *columns(const Layer *l, const float *x, size_t b, size_t first, size_t n,
                      size_t width)
{
    float *out = reals(l->T * n);
    for (size_t t = 0; t < l->T; t++)
        memcpy(out + t * n, x + (b * l->T + t) * width + first, n * sizeof *x);
    return out;
}

// against_chunks: the layer's recurrence and its gradients against chunks of CS, head by head; no
// exponent is above 0 (M1). Sums of 64 gates reach 1920 where they are mixed, of which fp32 knows
// 1e-4: 4e-5 is allowed there (measured: 1.2e-5).
static void against_chunks(Layer *l, size_t CS, int kind)
{
    const size_t T = l->T, DK = l->DK, DV = l->DV, size = DK * DV;
    layer_run(l);
    for (size_t i = 0; i < l->B * l->NH; i++) {
        const size_t b = i / l->NH, h = i % l->NH;
        const float *q = columns(l, l->qv, b, h * DK, DK, l->P);
        const float *v = columns(l, l->qv, b, l->K + h * DV, DV, l->P);
        const float *g = columns(l, l->g, b, h * DK, DK, l->K);
        const float *k = columns(l, l->k, b, h * DK, DK, l->K);
        const float *d_o = columns(l, l->d_o, b, h * DV, DV, l->C);
        float *out = reals(T * DV);
        GlaGrads d = {guarded(T * DK), guarded(T * DK), guarded(T * DK), guarded(T * DV),
                      guarded(size)};
        GlaChunk c = gla_chunk_make(T, DK, DV, CS);
        gla_chunk_forward(out, &c, q, k, g, v, l->initial ? l->initial + i * size : NULL, l->scale);
        gla_chunk_backward(d, d_o, l->dfinal ? l->dfinal + i * size : NULL, &c, q, k, g, v,
                           l->scale);
        CHECK(c.highest <= 0, "%s %g", layer_text(l, kind, "M1: the largest exponent"), c.highest);
        const struct {
            const char *name;
            const float *chunk, *got;
            size_t n;
            double bound;
        } rows[] = {{"o", out, columns(l, l->o, b, h * DV, DV, l->C), T * DV, FORWARD},
                    {"final", c.S + c.NC * size, l->final + i * size, size, FORWARD},
                    {"dq", d.q, columns(l, l->dqv, b, h * DK, DK, l->P), T * DK, GRAD},
                    {"dk", d.k, columns(l, l->dk, b, h * DK, DK, l->K), T * DK, GRAD},
                    {"dv", d.v, columns(l, l->dqv, b, l->K + h * DV, DV, l->P), T * DV, GRAD},
                    {"dg", d.g, columns(l, l->dg, b, h * DK, DK, l->K), T * DK, GRAD},
                    {"dinitial", d.initial, l->dinitial + i * size, size, GRAD}};
        const double scale = norm_of(doubles(rows[3].got, T * DK), T * DK); // a gradient's
        for (size_t r = 0; r < 7; r++)
            agree(layer_text(l, kind, rows[r].name), rows[r].got, rows[r].chunk, sizeof(float),
                  rows[r].n, rows[r].bound * (kind == GATES_MIXED && !IS_DOUBLE ? 4 : 1),
                  r < 2 ? 0 : scale);
        CHECK(isnan(d.q[T * DK]) && isnan(d.k[T * DK]) && isnan(d.g[T * DK]) &&
                  isnan(d.v[T * DV]) && isnan(d.initial[size]),
              "%s", layer_text(l, kind, "nothing past the end is written"));
        gla_chunk_free(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// [mix] Gates, recurrence, reading: golden values, derivatives, chunks, extremes.

// wave: sin(a + 1.3 t + 0.7 i), what section 7 makes its numbers of.
static double wave(double a, size_t t, size_t i)
{
    return sin(a + 1.3 * (double)t + 0.7 * (double)i);
}

// near: one check that got is want to 1e-9, in fp32 to 2e-5 of `size`.
static void near(const char *what, double got, double want, double size)
{
    const double bound = IS_DOUBLE ? 1e-9 : 2e-5 * size;
    CHECK(fabs(got - want) <= bound, "section 7, %s: expected %.12g, got %.12g", what, want, got);
}

// near_sums: the same of the sum of x (rows of n, `row` apart) and of the sum of its absolute
// values; 0 for the latter: it is not given.
static void near_sums(const char *what, const float *x, size_t rows, size_t n, size_t row,
                      double sum, double absolute)
{
    double got = 0, got_absolute = 0;
    for (size_t i = 0; i < rows * n; i++) {
        got += x[i / n * row + i % n];
        got_absolute += fabs(x[i / n * row + i % n]);
    }
    near(what, got, sum, fmax(got_absolute, 1));
    if (absolute > 0)
        near(what, got_absolute, absolute, got_absolute);
}

// test_golden: section 7: MetaLA's layer without its projections; HGRN2's gate.
static void test_golden(void)
{
    enum { T = 7, DK = 3, DV = 4, P = DK + DV };
    Layer l = layer_make(1, T, 1, DK, DV, GATES_METALA, 1);
    float z[T * DK], w[] = {0.3, -0.8, 1.1}, n[T * DV], dn[T * DV], da[T], dw[DK] = {0}, dz[T * DK];
    float core_dq[T * P], core_dk[T * DK];
    double L = 0, slope, slope_low;
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < DK; i++) {
            l.qv[t * P + i] = wave(0.1, t, i);
            z[t * DK + i] = 4 * wave(0.5, t, i) - 6;
        }
        for (size_t j = 0; j < DV; j++) {
            l.qv[t * P + DK + j] = wave(0.9, t, j);
            dn[t * DV + j] = wave(2.3, t, j);
        }
    }
    for (size_t i = 0; i < DK * DV; i++) {
        l.initial[i] = 0.2 * wave(1.7, i / DV, i % DV);
        l.dfinal[i] = 0.5 * wave(3.1, i / DV, i % DV);
    }
    gates_forward(l.g, l.k, z, T * DK, 16);
    layer_forward(&l);
    read_forward(n, l.o, l.qv, l.k, w, T, 1, DK, DV);
    L = dot(n, dn, T * DV) + dot(l.final, l.dfinal, DK * DV);
    near("L", L, 1.148264978375, 1);
    const double alpha[] = {0.7739955823, 0.8623239704, 0.8651079079};
    const double o0[] = {0.0433604867, 0.0202994645, -0.0123087131, -0.0391279106};
    const double o6[] = {0.0321565562, 0.0702468271, 0.0752989176, 0.0449367506};
    const double n6[] = {-1.5538015015, 0.5223067549, 1.1067938597, -0.0752991131};
    for (int i = 0; i < DK; i++)
        near("alpha[0]", exp(l.g[i]), alpha[i], 1);
    for (int j = 0; j < DV; j++) {
        near("o[0]", l.o[j], o0[j], 1);
        near("o[6]", l.o[6 * DV + j], o6[j], 1);
        near("n[6]", n[6 * DV + j], n6[j], 1);
    }
    near_sums("o", l.o, T, DV, DV, 2.6283115441, 4.9229128334);
    near_sums("S_T", l.final, DK, DV, DV, -0.0605395342, 1.3926779757);

    // all gradients, then those of the recurrence alone
    read_backward(l.d_o, l.dqv, l.dk, dw, da, dn, l.o, l.qv, l.k, w, T, 1, DK, DV);
    float rstd, y[DV];
    near("a[6]", read_row(y, &rstd, l.o + 6 * DV, l.qv + 6 * P, l.k + 6 * DK, l.qv + 6 * P + DK, w,
                          DK, DV), -0.0482530654, 1);
    memcpy(core_dq, l.dqv, sizeof core_dq);
    memcpy(core_dk, l.dk, sizeof core_dk);
    gla_backward(l.dqv, l.dg, l.dk, l.dinitial, l.d_o, l.dfinal, l.tiles, l.qv, l.g, l.k, l.work, 1,
                 T, 1, DK, DV, l.scale);
    gates_backward(dz, l.dg, l.dk, l.g, z, T * DK, 16);
    near_sums("dq", l.dqv, T, DK, P, -7.3388353825, 9.5933450146);
    near_sums("dz", dz, T, DK, DK, 1.8587373736, 3.2542973513);
    near_sums("dv", l.dqv + DK, T, DV, P, -1.4533464044, 36.4688054231);
    near_sums("dS0", l.dinitial, DK, DV, DV, -0.1824298944, 18.6874335275);
    near("dw", dw[0], -0.7323933520, 1), near("dw", dw[1], -0.9703004808, 1);
    near("dw", dw[2], -0.4455371261, 1);
    near("dz[0]", dz[0], 0.100733051828, 1), near("dz[0]", dz[1], 0.078437980095, 1);
    near("dz[0]", dz[2], 0.035472576877, 1);
    for (size_t i = 0; i < T * P; i++)
        l.dqv[i] -= core_dq[i];
    for (size_t i = 0; i < T * DK; i++)
        l.dk[i] -= core_dk[i];
    near_sums("core dq", l.dqv, T, DK, P, -6.3398137106, 7.4236030080);
    near_sums("core dk", l.dk, T, DK, DK, -22.5061913114, 62.6609602214);
    near_sums("core dv", l.dqv + DK, T, DV, P, -1.4499625565, 35.5737339027);
    near_sums("core dg", l.dg, T, DK, DK, 10.0908621190, 17.8679244427);
    double y_sum = 0; // y, before the norm: what its mean and deviation say
    for (size_t t = 0; t < T; t++)
        for (size_t j = 0; j < DV; j++) {
            double a = 0;
            for (size_t i = 0; i < DK; i++)
                a += (double)l.qv[t * P + i] * w[i] * l.k[t * DK + i];
            y_sum += l.o[t * DV + j] + 1 / (1 + exp(-a * l.qv[t * P + DK + j]));
        }
    near("y", y_sum, 16.9987677238, 17);
    near("HGRN2's g", hgrn2_gate(-1.7, 0.3, &slope, &slope_low), -0.8961800992, 1);
    near("HGRN2's dg/df", slope, 0.2240094805, 1);
    near("HGRN2's dg/dlb", slope_low, 2.0717508474, 1);
}

// test_derivatives: every input of the recurrence against central differences, states too, with
// keys of their own and tied ones' gates; more than a tile; with and without S_0 and dS_T.
static void test_derivatives(void)
{
    static const size_t shapes[][5] = {{2, 5, 2, 3, 2}, {1, 1, 1, 4, 3}, {2, 3, 3, 1, 2},
                                       {1, 35, 1, 2, 3}};
    static const int kinds[] = {GATES_METALA, GATES_HGRN2, GATES_RESET};
    for (size_t k = 0; k < 12; k++, give_all_back()) {
        const size_t *s = shapes[k % 4];
        const int kind = kinds[k / 4];
        Layer l = layer_make(s[0], s[1], s[2], s[3], s[4], kind, 0);
        l.initial = k % 3 ? l.initial : NULL;
        l.dfinal = k % 2 ? l.dfinal : NULL;
        layer_run(&l);
        const double scale = norm_of(doubles(l.dqv, l.N * l.P), l.N * l.P);
        central_difference(layer_text(&l, kind, "dqv"), layer_loss, &l, l.qv, l.dqv, l.N * l.P,
                           scale);
        central_difference(layer_text(&l, kind, "dg"), layer_loss, &l, l.g, l.dg, l.N * l.K, scale);
        central_difference(layer_text(&l, kind, "dk"), layer_loss, &l, l.k, l.dk, l.N * l.K, scale);
        if (l.initial)
            central_difference(layer_text(&l, kind, "dinitial"), layer_loss, &l, l.initial,
                               l.dinitial, l.states, scale);
    }
}

// test_chunks: section 9.2, M2, M13, M14: recurrence = chunks of 64 and of 16 for every gate at
// every length, with and without S_0 and dS_T, keys tied or not.
static void test_chunks(void)
{
    static const size_t lengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 100, 1000};
    for (int kind = 0; kind < GATE_KINDS; kind++)
        for (int k = 0; k < 10; k++, give_all_back()) {
            Layer l = layer_make(1 + (k == 5), lengths[k], 1 + k % 2, 8, 12, kind, k % 3 > 0);
            l.initial = k % 4 == 1 ? NULL : l.initial;
            l.dfinal = k % 4 == 2 ? NULL : l.dfinal;
            against_chunks(&l, k % 3 == 1 ? 16 : 64, kind);
            CHECK(isnan(l.o[l.N * l.C]) && isnan(l.dqv[l.N * l.P]) && isnan(l.final[l.states]) &&
                      isnan(l.dg[l.N * l.K]) && isnan(l.dk[l.N * l.K]) &&
                      isnan(l.dinitial[l.states]),
                  "%s", layer_text(&l, kind, "nothing past the end is written"));
        }
}

// test_chunk_widths: section 9.2: DK and DV of 16 to 256, different ones, odd multiples of 4.
static void test_chunk_widths(void)
{
    static const size_t sizes[] = {16, 32, 60, 64, 100, 128, 256};
    for (int k = 0; k < 7; k++, give_all_back()) {
        const int kind = k % 2 ? GATES_HGRN2 : GATES_METALA;
        Layer l = layer_make(1, 65, 1, sizes[k], sizes[(k + 3) % 7], kind, 1);
        against_chunks(&l, 64, kind);
    }
}

// test_gates: M3, A05: every finite z gives g between -30 and 0, and tau divides it; where it is
// -30 there is no gradient; NaN stays. M6: 1 - alpha is right to rounding where alpha is near 1,
// also where the difference of two numbers near 1 would be 0.
static void test_gates(void)
{
    static const double zs[] = {-1e30, -1e4, -481, -479, -87, -20, -1e-3, 0, 0.5, 3, 5, 8, 15, 30,
                                80, 1e4, 1e30};
    enum { N = sizeof zs / sizeof *zs };
    float z[N], g[N], k[N], dz[N], dg[N], dk[N];
    for (int tau = 1; tau <= 16; tau += 15) {
        for (int i = 0; i < N; i++)
            z[i] = zs[i], dg[i] = 1, dk[i] = 0;
        gates_forward(g, k, z, N, tau);
        gates_backward(dz, dg, dk, g, z, N, tau);
        for (int i = 0; i < N; i++) {
            const double want = fmax((fmin(zs[i], 0) - log1p(exp(-fabs(zs[i])))) / tau, -30);
            const double slope = want == -30 ? 0 : 1 / (1 + exp(zs[i])) / tau, key = -expm1(want);
            CHECK(g[i] <= 0 && g[i] >= -30 && fabs(g[i] - want) <= 4e-7 * fabs(want) + 1e-38,
                  "M3: z = %g, tau = %d: g = %.9g, expected %.9g", zs[i], tau, (double)g[i], want);
            CHECK(fabs(k[i] - key) <= 1e-6 * key + 1e-38,
                  "M6: z = %g, tau = %d: k = %.9g, expected %.9g", zs[i], tau, (double)k[i], key);
            CHECK(fabs(dz[i] - slope) <= 1e-6 * slope + 1e-37,
                  "z = %g, tau = %d: slope %.9g, expected %.9g", zs[i], tau, (double)dz[i], slope);
        }
    }
    z[0] = NAN;
    gates_forward(g, k, z, 1, 16);
    gates_backward(dz, dg, dk, g, z, 1, 16);
    CHECK(isnan(g[0]) && isnan(k[0]) && isnan(dz[0]), "M3: NaN stays");
    z[0] = 0;
    gates_forward(g, k, z, 1, 16);
    CHECK(fabs(exp(16 * (double)g[0]) - 0.5) < 1e-6, "at z = 0 half is left after 16 tokens");
}

// Gates by themselves, for central differences.
typedef struct {
    float *z, *g, *k, *dg, *dk;
    size_t n;
    int tied;
} Gates;

// gates_loss: g . dg + k . dk.
static double gates_loss(void *context)
{
    Gates *p = context;
    gates_forward(p->g, p->tied ? p->k : NULL, p->z, p->n, 3);
    return dot(p->g, p->dg, p->n) + (p->tied ? dot(p->k, p->dk, p->n) : 0);
}

// test_gate_derivatives: z against central differences, with tied keys and without; dz may be dg.
static void test_gate_derivatives(void)
{
    enum { N = 200 };
    for (int tied = 0; tied < 2; tied++, give_all_back()) {
        Gates p = {normals(N, 4), reals(N), reals(N), normals(N, 1), normals(N, 1), N, tied};
        float *dz = reals(N);
        gates_loss(&p);
        gates_backward(dz, p.dg, tied ? p.dk : NULL, p.g, p.z, N, 3);
        central_difference("gates dz", gates_loss, &p, p.z, dz, N, 1);
        gates_loss(&p);
        gates_backward(p.dg, p.dg, tied ? p.dk : NULL, p.g, p.z, N, 3);
        CHECK(same_bits(dz, p.dg, N), "dz may alias dg");
    }
}

// Reading by itself, for central differences.
typedef struct {
    float *o, *qv, *k, *w, *out, *dout;
    size_t N, NH, DK, DV;
} Reading;

// reading_loss: the normalized heads . dout.
static double reading_loss(void *context)
{
    Reading *r = context;
    read_forward(r->out, r->o, r->qv, r->k, r->w, r->N, r->NH, r->DK, r->DV);
    return dot(r->out, r->dout, r->N * r->NH * r->DV);
}

// test_reading: every input against central differences, heads or one, with w and without; dw adds;
// M11, section 9.4: w = 0 is no w, and eps counts where o is small.
static void test_reading(void)
{
    for (int i = 0; i < 6; i++, give_all_back()) {
        Reading r = {.N = 3, .NH = 1 + i % 3, .DK = 2 + i % 2, .DV = 5};
        const size_t K = r.NH * r.DK, C = r.NH * r.DV, P = K + C, N = r.N;
        r.o = normals(N * C, 0.3), r.qv = normals(N * P, 1), r.k = normals(N * K, 1);
        r.w = i < 3 ? normals(K, 1) : NULL, r.out = reals(N * C), r.dout = normals(N * C, 1);
        float *d_o = reals(N * C), *dqv = guarded(N * P), *dk = guarded(N * K), *dw = reals(K);
        float *da = reals(N * r.NH), *zero = reals(K), *out = reals(N * C);
        for (int times = 0; times < 2; times++)
            read_backward(d_o, dqv, dk, r.w ? dw : NULL, da, r.dout, r.o, r.qv, r.k, r.w, N, r.NH,
                          r.DK, r.DV);
        for (size_t c = 0; c < K; c++)
            dw[c] /= 2;
        central_difference("reading do", reading_loss, &r, r.o, d_o, N * C, 1);
        central_difference("reading dqv", reading_loss, &r, r.qv, dqv, N * P, 1);
        central_difference("reading dk", reading_loss, &r, r.k, dk, N * K, 1);
        if (r.w)
            central_difference("reading dw", reading_loss, &r, r.w, dw, K, 1);
        CHECK(isnan(dqv[N * P]) && isnan(dk[N * K]), "reading: nothing past the end");
        r.w = NULL;
        reading_loss(&r);
        read_forward(out, r.o, r.qv, r.k, zero, N, r.NH, r.DK, r.DV);
        agree("section 9.4: w = 0", out, doubles(r.out, N * C), sizeof(double), N * C,
              IS_DOUBLE ? 1e-12 : 2e-5, 0);
    }
    float o[] = {1e-3, -1e-3}, out[2], qv[3] = {0}, k[1] = {0};
    read_forward(out, o, qv, k, NULL, 1, 1, 1, 2);
    CHECK(fabs(out[0] - 1e-3 / sqrt(1e-6 + 1e-5)) < 1e-6, "M11: eps 1e-5: %g", (double)out[0]);
}

// constant_gates: all gates of a layer g, k or v of every token 1.
static void constant_gates(Layer *l, double g, int ones)
{
    for (size_t i = 0; i < l->N * l->K; i++) {
        l->g[i] = g;
        l->k[i] = ones ? 1 : l->k[i];
    }
    for (size_t i = 0; ones && i < l->N * l->P; i++)
        l->qv[i] = 1;
}

// test_extremes: A05, M1: gates of exp(-1.5), exp(-5), exp(-20), exp(-50), exactly 0 and 1, q = k =
// v = 1, at 64, 65 and 4096 tokens; at 50000 with -5 and -50; all finite, chunks agree, and the
// plain sum of the last state.
static void test_extremes(void)
{
    static const double gates[] = {-1.5, -5, -20, -50, -INFINITY, 0};
    static const size_t lengths[] = {64, 65, 4096, 50000};
    for (int k = 0; k < 6 * 4; k++, give_all_back()) {
        const double g = gates[k / 4];
        const size_t T = lengths[k % 4];
        if (T == 50000 && g != -5 && g != -50)
            continue;
        Layer l = layer_make(1, T, 1, 3, 2, GATES_MIXED, 0);
        constant_gates(&l, g, 1);
        memset(l.initial, 0, l.states * sizeof *l.initial);
        against_chunks(&l, 64, GATES_MIXED);
        const double want = g == 0 ? (double)T : 1 / -expm1(g) * -expm1(g * (double)T);
        CHECK(fabs(l.final[0] - want) <= (IS_DOUBLE ? 1e-12 : 2e-6) * want,
              "A05: g = %g, T = %zu: S = %.9g, expected %.9g", g, T, (double)l.final[0], want);
        CHECK(first_not_finite(l.o, T * 2, sizeof *l.o) == T * 2 &&
                  first_not_finite(l.dqv, T * 5, sizeof *l.o) == T * 5 &&
                  first_not_finite(l.dg, T * 3, sizeof *l.o) == T * 3,
              "A05: g = %g, T = %zu: all finite", g, T);
    }
}

// test_mixed_gates: A06: gates exp(-0.01), exp(-5), exp(-50) at random places of 130 tokens: all
// gradients finite, and those of the recurrence in double: chunks are held against it in
// test_chunks.
static void test_mixed_gates(void)
{
    for (int CS = 16; CS <= 64; CS *= 4, give_all_back()) {
        Layer l = layer_make(2, 130, 2, 8, 8, GATES_MIXED, CS == 16);
        against_chunks(&l, (size_t)CS, GATES_MIXED);
        CHECK(first_not_finite(l.dqv, l.N * l.P, sizeof *l.dqv) == l.N * l.P &&
                  first_not_finite(l.dg, l.N * l.K, sizeof *l.dg) == l.N * l.K &&
                  first_not_finite(l.dinitial, l.states, sizeof *l.dg) == l.states,
              "A06: finite gradients");
    }
}

// test_invariants: section 9.4, M4, M9: with S_0 = 0 and tied keys |S| <= the largest |v|; gates of
// 1 have keys of 0: S stays and o = s S_0^T q; the first token is read at full weight; a token with
// g = 0, as padding has, leaves S to the bit; C1: a gate of 0 with k = 1 replaces a row; C2: keys
// of 1 - alpha give any weights that sum to 1.
static void test_invariants(void)
{
    for (int kind = 0; kind < GATES_ONE; kind++, give_all_back()) {
        Layer l = layer_make(2, 200, 2, 6, 5, kind, 1);
        float most = 0, largest = 0;
        l.initial = NULL;
        layer_forward(&l);
        for (size_t i = 0; i < l.N * l.C; i++)
            most = fmax(most, fabs(l.qv[i / l.C * l.P + l.K + i % l.C]));
        for (size_t i = 0; i < l.states; i++)
            largest = fmax(largest, fabs(l.final[i]));
        CHECK(largest > 0 && largest <= most, "9.4: %s: |S| up to %g, |v| %g", GATE_NAMES[kind],
              (double)largest, (double)most);
    }
    Layer l = layer_make(1, 9, 1, 4, 3, GATES_ONE, 1);
    layer_forward(&l);
    CHECK(same_bits(l.final, l.initial, 12), "9.4, M9: gates of 1 leave S");
    for (size_t t = 0; t < 9; t++)
        for (size_t j = 0; j < 3; j++) {
            double want = 0;
            for (size_t i = 0; i < 4; i++)
                want += 0.5 * l.qv[t * 7 + i] * l.initial[i * 3 + j];
            CHECK(fabs(l.o[t * 3 + j] - want) < 2e-6, "9.4: o = s S_0^T q");
        }
    give_all_back();
    l = layer_make(1, 1, 1, 1, 2, GATES_METALA, 0);
    l.initial = NULL;
    layer_forward(&l);
    CHECK(fabs(l.o[1] - (double)l.qv[0] * l.k[0] * l.qv[2]) < 1e-6, "M4: the first token");
    give_all_back();
    l = layer_make(1, 2, 1, 3, 1, GATES_ONE, 0);
    memcpy(l.k, (float[]){1, 1, 1, 1, 0, 0}, 6 * sizeof(float));
    l.g[3] = -INFINITY;
    layer_forward(&l);
    CHECK(l.final[0] == l.qv[7] && l.final[1] == l.initial[1] + l.qv[3], "C1: a row is replaced");
    give_all_back();
    const double weights[] = {0.1, 0.4, 0.05, 0.45}, alphas[] = {0, 0.2, 0.90909, 0.55};
    l = layer_make(1, 4, 1, 1, 1, GATES_ONE, 0);
    double sum = 0, want = 0;
    for (size_t t = 0; t < 4; t++) {
        const double alpha = sum / (sum + weights[t]);
        sum += weights[t];
        CHECK(fabs(alpha - alphas[t]) < 1e-5, "C2: alpha[%zu] = %g", t, alpha);
        l.g[t] = log(alpha), l.k[t] = 1 - alpha, l.qv[2 * t] = 1;
        want += weights[t] * l.qv[2 * t + 1];
    }
    layer_forward(&l);
    CHECK(fabs(l.o[3] - want) < 1e-6, "C2: any weights: %g, got %g", want, (double)l.o[3]);
}

// piece: T tokens of a layer of one sequence, from `from`, sharing its arrays, with states of its
// own.
static Layer piece(const Layer *l, size_t from, size_t T)
{
    Layer p = *l;
    p.T = p.N = T;
    p.qv += from * l->P, p.dqv += from * l->P, p.o += from * l->C, p.d_o += from * l->C;
    p.g += from * l->K, p.k += from * l->K, p.dg += from * l->K, p.dk += from * l->K;
    p.tiles = reals((T / TILE + 1) * l->states);
    p.initial = reals(l->states), p.final = reals(l->states);
    p.dfinal = reals(l->states), p.dinitial = reals(l->states);
    return p;
}

// test_split: M7, B21: 130 tokens at once, one by one, as 1 + 63 + 64 + 2 and in the middle of a
// tile: states are carried forward, gradients of states back: the same bits, dS_0 too.
static void test_split(void)
{
    static const size_t parts[][5] = {{1, 63, 64, 2}, {7, 123}, {130}, {0}}; // 0: one by one
    for (int k = 0; k < 4; k++, give_all_back()) {
        Layer l = layer_make(1, 130, 2, 5, 3, GATES_METALA, 1), p[130];
        size_t n = 0;
        layer_run(&l);
        float *o = copy_of(l.o, l.N * l.C * sizeof *o), *dg = copy_of(l.dg, l.N * l.K * sizeof *o);
        float *dqv = copy_of(l.dqv, l.N * l.P * sizeof *o);
        for (size_t at = 0; at < 130; at += p[n++].T) {
            p[n] = piece(&l, at, parts[k][0] ? parts[k][n] : 1);
            memcpy(p[n].initial, n ? p[n - 1].final : l.initial, l.states * sizeof *o);
            layer_forward(&p[n]);
        }
        CHECK(same_bits(p[n - 1].final, l.final, l.states) && same_bits(o, l.o, l.N * l.C),
              "M7: split %d, forward", k);
        for (size_t i = n; i-- > 0;) {
            memcpy(p[i].dfinal, i + 1 < n ? p[i + 1].dinitial : l.dfinal, l.states * sizeof *o);
            layer_run(&p[i]);
        }
        CHECK(same_bits(p[0].dinitial, l.dinitial, l.states) && same_bits(dg, l.dg, l.N * l.K) &&
                  same_bits(dqv, l.dqv, l.N * l.P),
              "M7: split %d, backward", k);
    }
}

// test_precision: M5: in fp32 dg is right to 1e-4 of its norm where long memories add up 2000
// tokens: against a form in double that keeps every state.
static void test_precision(void)
{
    enum { T = 2000, DK = 4, DV = 4, SIZE = DK * DV };
    for (int kind = 0; kind < 2; kind++, give_all_back()) {
        Layer l = layer_make(1, T, 1, DK, DV, kind, 1);
        double *S = take((T + 1) * SIZE * sizeof *S), *want = take(T * DK * sizeof *want);
        double D[SIZE];
        layer_run(&l);
        for (size_t x = 0; x < SIZE; x++)
            S[x] = l.initial[x], D[x] = l.dfinal[x];
        for (size_t x = 0; x < T * SIZE; x++) {
            const size_t t = x / SIZE, i = x % SIZE / DV, j = x % DV;
            S[x + SIZE] = exp((double)l.g[t * DK + i]) * S[x] +
                          (double)l.k[t * DK + i] * l.qv[t * 8 + DK + j];
        }
        for (size_t t = T; t-- > 0;)
            for (size_t x = 0; x < SIZE; x++) {
                D[x] += l.scale * l.qv[t * 8 + x / DV] * (double)l.d_o[t * DV + x % DV];
                D[x] *= exp((double)l.g[t * DK + x / DV]);
                want[t * DK + x / DV] += D[x] * S[t * SIZE + x];
            }
        agree("M5: dg", l.dg, want, sizeof *want, T * DK, IS_DOUBLE ? 1e-10 : 1e-5, 0);
    }
}

// ------------------------------------------------------------------------------------------------
// [block] Convolution and SiLU, gating.

// The convolution by itself, for central differences.
typedef struct {
    float *out, *u, *x, *before, *weight, *dout;
    size_t B, T, C, W;
} Conv;

// conv_loss: out . dout.
static double conv_loss(void *context)
{
    Conv *c = context;
    conv_forward(c->out, c->u, c->x, c->before, c->weight, c->B, c->T, c->C, c->W);
    return dot(c->out, c->dout, c->B * c->T * c->C);
}

// test_conv: B02, M8: T shorter than the window and longer, with what stands before and without:
// the plain sum, central differences, dweight adds; pieces of 1 and 2 tokens with the window
// carried give the bits of one run.
static void test_conv(void)
{
    for (size_t k = 0; k < 24; k++, give_all_back()) {
        static const size_t lengths[] = {1, 2, 3, 4, 5, 9};
        const size_t B = 2, T = lengths[k / 4], C = 19, n = B * T * C, W = k & 1 ? 2 : 4;
        float *dx = guarded(n), *dw = reals(C * W), *d = reals(n);
        Conv c = {guarded(n), reals(n), normals(n, 1),
                  k & 2 ? normals(B * (W - 1) * C, 1) : NULL, normals(C * W, 1), normals(n, 1), B,
                  T, C, W};
        double *want = take(n * sizeof *want);
        for (size_t i = 0; i < n; i++) {
            for (size_t w = 0; w < W; w++) {
                const size_t at = i / C % T + w, ch = i % C; // in x with W - 1 rows before it
                want[i] += c.weight[ch * W + w] *
                           (at + 1 >= W ? c.x[(i / C / T * T + at + 1 - W) * C + ch]
                            : c.before  ? c.before[(i / C / T * (W - 1) + at) * C + ch]
                                        : 0.0);
            }
            want[i] /= 1 + exp(-want[i]);
        }
        conv_loss(&c);
        agree("B02: convolution", c.out, want, sizeof *want, n, FORWARD, 0);
        for (int times = 0; times < 2; times++) {
            memcpy(d, c.dout, n * sizeof *d);
            conv_backward(dx, dw, d, c.u, c.x, c.before, c.weight, B, T, C, W);
        }
        for (size_t i = 0; i < C * W; i++)
            dw[i] /= 2;
        central_difference("B02: convolution dx", conv_loss, &c, c.x, dx, n, 1);
        central_difference("B02: convolution dweight", conv_loss, &c, c.weight, dw, C * W, 1);
        CHECK(isnan(dx[n]) && isnan(c.out[n]), "B02: nothing past the end");
        conv_loss(&c);
        float *whole = copy_of(c.out, n * sizeof *whole), *rows = reals((W - 1 + T) * C);
        if (c.before)
            memcpy(rows, c.before, (W - 1) * C * sizeof *rows);
        memcpy(rows + (W - 1) * C, c.x, T * C * sizeof *rows);
        for (size_t t = 0, m; t < T; t += m) { // sequence 0, in pieces of 1, 2, 1, ...
            m = 1 + (t % 3 == 1 && t + 1 < T);
            conv_forward(c.out + t * C, c.u, c.x + t * C, rows + t * C, c.weight, 1, m, C, W);
        }
        CHECK(same_bits(whole, c.out, T * C), "M8: pieces with the window carried");
    }
}

// gated_loss: SiLU(f) e . dout, f and e side by side in x.
static double gated_loss(void *context)
{
    Pair *p = context;
    gated_forward(p->out, p->x, p->x + p->C, 2 * p->C, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_gated: central differences and the plain form; far out 0 or x, slopes 0 or 1; NaN stays.
static void test_gated(void)
{
    enum { N = 4, H = 21 };
    Pair p = {.N = N, .C = H, .x = normals(2 * N * H, 2), .out = reals(N * H)};
    float *dx = reals(2 * N * H);
    double *want = take(N * H * sizeof *want);
    p.dout = normals(N * H, 1);
    gated_loss(&p);
    gated_backward(dx, dx + H, p.dout, p.x, p.x + H, 2 * H, N, H);
    for (size_t i = 0; i < N * H; i++) {
        const double f = p.x[i / H * 2 * H + i % H];
        want[i] = f / (1 + exp(-f)) * p.x[i / H * 2 * H + H + i % H];
    }
    agree("gated", p.out, want, sizeof *want, N * H, FORWARD, 0);
    central_difference("gated dx", gated_loss, &p, p.x, dx, 2 * N * H, 1);
    const float far[] = {-1000, 1000, -88, 88};
    for (int i = 0; i < 4; i++)
        CHECK(fabs(silu_slope(far[i]) - (far[i] > 0)) < 1e-30, "SiLU'(%g) = %g", (double)far[i],
              (double)silu_slope(far[i]));
    CHECK(isnan(silu_slope(NAN)), "SiLU keeps NaN");
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

// test_goldens: what dev/ref/metala.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/metala_goldens", 6, 8, golden_sizes);
}

// test_decode_lengths: decoding = parallel at every length around a tile's, for both keys and
// windows.
static void test_decode_lengths(void)
{
    static const int lengths[] = {1, 2, 3, 15, 16, 17, 255, 1000};
    for (int k = 0; k < 16; k++, give_all_back()) {
        Config c = config_make(k % 2, 1, lengths[k / 2], 8, 2, 1);
        c.conv = 1 + k / 2 % 2;
        Model *m = model_random(c);
        model_forward(m);
        agree("decoded", decode_all(m), m->acts.logits, sizeof(float), m->T * m->V,
              IS_DOUBLE ? 1e-11 : 1e-5, 0);
        model_drop(m);
    }
}

// test_widths: B06: odd sizes and B = 1 to 3: decoding = parallel, all gradients are finite.
static void test_widths(void)
{
    static const int sizes[][4] = {{4, 1, 1, 1}, {6, 3, 5, 9}, {12, 2, 31, 0}, {36, 4, 7, 4},
                                   {100, 5, 33, 0}};
    for (int k = 0; k < 15; k++, give_all_back()) {
        const int *s = sizes[k / 3];
        Config c = config_make(k % 2, k % 3 + 1, 7, s[0], s[1], 1);
        c.hidden = s[2];
        c.key_channels = s[3];
        Model *m = model_random(c);
        model_run(m);
        agree(config_text(&m->config), decode_all(m), m->acts.logits, sizeof(float),
              m->B * m->T * m->V, IS_DOUBLE ? 1e-11 : 1e-5, 0);
        CHECK(is_finite_bits(gradient_norm(&m->weights.grads)), "B06: %s", config_text(&m->config));
        model_drop(m);
    }
}

// test_sizes: the numbers of parameters of the specification, 1.2: a mixer of MetaLA, of GLA, and
// the model of 360M, whose head is the embedding there; the loss of a new model is close to ln V;
// B10, M12: sizes beyond 32 bits.
static void test_sizes(void)
{
    Model plan;
    const size_t C = 1024, mlp = 3 * C * 2816;
    any_vocabulary = 50304;
    for (int key = 0; key < 2; key++) {
        Config c = config_make(key, 1, 4, (int)C, 4, 24);
        c.conv = key ? 0 : 2;
        c.augment = !key;
        c.hidden = 0;
        model_plan(&plan, &c);
        const size_t all = arena_elements(&plan.weights.params, NULL) - 50304 * C;
        const size_t mixer = (all - 50304 * C) / 24 - mlp;
        const size_t want = key ? 4 * C * C + 24 * C + C / 2 + C : 4 * C * C + C + 4 * C + C / 2;
        CHECK(plan.H == 2816 && mixer == want, "%s: H %zu, a mixer of %zu parameters, expected %zu",
              model_name(&c), plan.H, mixer, want);
        CHECK(key || (all > 359800000 && all < 360000000), "360M: %zu parameters", all);
    }
    Config c = config_make(TIED, 96, 1024, 768, 12, 12);
    model_plan(&plan, &c);
    CHECK(model_bytes(&plan) > 2 * sizeof(float) * 96 * 1024 * 50304, "B10: planned %zu bytes",
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

// test_initial: the deviations and the largest numbers that new weights have; all decay; a new
// model forgets half of a row in 16 tokens.
static void test_initial(void)
{
    static const struct {
        const char *name;
        double most, deviation; // most 0: normal
    } rows[] = {{"wte", 0, 0.02},    {"conv_w", 0.5, 0},   {"qv_w", 0, 0.02},  {"a_w", 0, 0.02},
                {"low_w", 0, 0.02},  {"up_w", 0, 0.02},    {"up_b", 0, 0},     {"aug_w", 0, 0},
                {"gate_w", 0, 0.02}, {"gate_b", 0, 0},     {"out_w", 0, 0.01}, {"gu_w", 0, 0.02},
                {"down_w", 0, 0.01}, {"head_w", 0, 0.02}};
    Config c = config_make(FREE, 2, 8, 128, 4, 2); // sqrt(2 L) = 2
    c.hidden = 0;
    c.conv = 2;
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
    CHECK(m->weights.params.n == sizeof rows / sizeof *rows, "all tensors");
    model_forward(m);
    for (size_t i = 0; i < m->L * m->B * m->T * m->K; i++)
        CHECK(fabs(16 * m->acts.g[i] + log(2.0)) < 0.2, "g at init %g", (double)m->acts.g[i]);
    model_drop(m);
}

// test_flops: what a step costs: weights and recurrence.
static void test_flops(void)
{
    Config c = config_make(TIED, 4, 34, 192, 3, 12);
    Model plan;
    c.training.accumulate = 2;
    c.hidden = 512;
    model_plan(&plan, &c);
    const double layer = 4 * 192 * 192 + 2 * 192 + 96 + 192 + 3 * 192 * 512;
    const double want = 2 * 4 * 34 * (6 * (12 * layer + 29 * 192) + 22 * 12 * 96 * 64.0);
    CHECK(fabs(model_flops(&plan) - want) <= 1e-12 * want, "FLOPs an update: %g, got %g", want,
          model_flops(&plan));
}

// ------------------------------------------------------------------------------------------------
// [training] Options, evaluation, convergence.

// test_options: combinations without meaning are refused with their reason; every preset parses;
// without options: MQAR of four pairs in 64 tokens.
static void test_options(void)
{
    static const char *const bad[][2] = {
        {"--channels 50 --heads 3", "--channels 50: expected a multiple of --heads 3"},
        {"--channels 4 --heads 4", "at least two a head"},
        {"--key-channels 9 --heads 2", "--key-channels 9: expected a multiple of --heads 2"},
        {"--heads 0", "--heads: expected a whole number from 1"},
        {"--key own", "--key: expected one of tied|free"},
        {"--conv 3", "--conv: expected one of 0|2|4"},
        {"--tau 0", "--tau"},
        {"--augment maybe", "--augment: expected one of no|yes"},
        {"--noise 2", "--noise"},
        {"--eval-depth 3", "--eval-depth"},
        {"--copies 0", "--copies"},
        {"--model tied", "unknown option"},
    };
    static Options options;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "");
    const TaskShape shape = TASKS[config.task].shape(&config.task_options);
    CHECK(config.task == MQAR && config.key == TIED && config.conv == 1 && config.augment &&
              config.tau == 16 && shape.T == 64 && pairs_of(&config.task_options) == 4,
          "without options: MetaLA and four pairs in 64 tokens");
    run_options(&options, "--preset mqar-80");
    CHECK(TASKS[MQAR].shape(&config.task_options).V == 8192 && config.task_options.pairs == 80 &&
              config.channels == 128 && config.key_channels == 128,
          "--preset mqar-80");
}

// test_evaluation: an evaluation reads longer sequences in fewer rows, training goes on at its own
// length with the same bits as without; every task of recall trains and evaluates.
static void test_evaluation(void)
{
    static const char *const tasks[] = {"mqar", "in-context", "noisy", "fuzzy", "memorization",
                                        "selective", "needle"};
    char line[4096];
    for (int k = 0; k < 7; k++, give_all_back()) {
        char *weights[2];
        for (int every = 0; every < 2; every++) {
            snprintf(line, sizeof line, "--task %s --channels 8 --heads 2 --hidden 9 --batch-size "
                     "5 --max-length 32 --eval-max-length 48 --vocab-size 24 --pairs 2 --copies 5 "
                     "--steps 3 --eval-every %d --out %s", tasks[k], every, in_dir("run"));
            Model *m = run(line);
            const size_t T = k == 1 || k == 2 ? 47 : 48;
            CHECK(m->batch.rows == 5 && m->B == 3 && m->T == T, "%s: an evaluation of %zu x %zu",
                  tasks[k], m->B, m->T);
            weights[every] = trained_copy(&m->weights);
            CHECK(!every || trained_same(&m->weights, weights[0]), "%s: evaluations change nothing",
                  tasks[k]);
            model_drop(m);
            empty_dir("");
        }
    }
}

// accuracy_of: after training with these options, on fresh sequences.
static double accuracy_of(const char *line)
{
    static Options options;
    LogRow row = {0};
    run_options(&options, line);
    Model *m = model_make(config);
    for (long step = 0; step < config.training.steps; step++)
        train_step(m, step, &row);
    row = evaluate(m, config.training.steps);
    printf("%s: accuracy %.4f\n", line, row.acc);
    model_drop(m);
    return row.acc;
}

// test_convergence: MQAR of two pairs is learnt by MetaLA and by GLA, not without the convolution
// that tells a value its key. fp32.
static void test_convergence(void)
{
#define PAIRS_RUN "--max-length 12 --pairs 2 --vocab-size 12 --channels 32 --heads 1 " \
    "--batch-size 32 --hidden 16 --steps 300 --lr 6e-3 --key-channels 32 --eval-batches 8 "
    if (IS_DOUBLE)
        return;
    double acc = accuracy_of(PAIRS_RUN "--key tied");
    CHECK(acc > 0.95, "MetaLA: %.4f", acc);
    acc = accuracy_of(PAIRS_RUN "--key free");
    CHECK(acc > 0.95, "GLA: %.4f", acc);
    acc = accuracy_of(PAIRS_RUN "--key tied --conv 0");
    CHECK(acc < 0.75, "without convolution: %.4f", acc);
}

// test_mqar: slow: the run without options with three seeds.
static void test_mqar(void)
{
    for (int seed = 1; seed <= 3 && !IS_DOUBLE; seed++) {
        char line[64];
        snprintf(line, sizeof line, "--seed %d", seed);
        const double acc = accuracy_of(line);
        CHECK(acc > 0.99, "without options, seed %d: %.4f", seed, acc);
    }
}

// ------------------------------------------------------------------------------------------------
// [main] The list of tests.

static const TestRow TESTS[] = {
    LAYER_TESTS,
    MODEL_TESTS,
    {"golden", test_golden, 0},
    {"derivatives", test_derivatives, 0},
    {"chunks", test_chunks, 0},
    {"chunk widths", test_chunk_widths, 0},
    {"gates", test_gates, 0},
    {"gate derivatives", test_gate_derivatives, 0},
    {"reading", test_reading, 0},
    {"extremes", test_extremes, 0},
    {"mixed gates", test_mixed_gates, 0},
    {"invariants", test_invariants, 0},
    {"split", test_split, 0},
    {"precision", test_precision, 0},
    {"conv", test_conv, 0},
    {"gated", test_gated, 0},
    {"goldens", test_goldens, 0},
    {"decode lengths", test_decode_lengths, 0},
    {"widths", test_widths, 0},
    {"sizes", test_sizes, 0},
    {"initial weights", test_initial, 0},
    {"flops", test_flops, 0},
    {"options", test_options, 0},
    {"evaluation", test_evaluation, 0},
    {"convergence", test_convergence, 0},
    {"mqar", test_mqar, 1},
};

// main: run every test, `long` the slow ones too, or the one that is named.
int main(int argc, char **argv)
{
    return tests_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);
}
