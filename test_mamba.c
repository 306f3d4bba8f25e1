// test_mamba.c: the tests of train_mamba.c, which is included whole. Run from the root of the
// repository; `long` adds the slow tests. The last line is `N passed, N failed`.
//
// Built twice: as it is, and with -DREAL_IS_DOUBLE, where `float` in the trainer and here means
// double. The double build judges the mathematics (central differences, the recurrence = the plain
// form to 1e-12); the fp32 build judges the arithmetic (the bounds of util/check.h, convergence).
//
// Sections: [tools] variants, one scan and a plain form of it; [mix] [block] [model] [training] the
// tests, in the order of the trainer; [main]. What trainers have in common is tested by
// dev/test_layers.h and test_model.h. A name like A11 is a row of the list of cases that this
// project keeps: failures that users of other programs have reported; sections are those of the
// specification.

#include "dev/testing.h" // first: it asks for GNU extensions
#include "dev/test_tasks.h"
#define TESTING
#include "train_mamba.c"
#include "dev/testing_model.h"
#include "dev/test_layers.h"
#include <sys/mman.h>

enum { VARIANTS = 6, MAINS = 2 };
#define MAIN_OPTION "--eigenvalues"
#define MAIN_WORDS {"nonneg", "signed"}
#define NO_POSITIONS
#define ZEROS_OVERFLOW 0
#define SMALL "--task copying --string-size 4 --channels 12 --state 5 --batch-size 4 " \
    "--schedule constant "
#define CAUSAL(c) (c).eigenvalues // the model is always causal
#define HEAD(m) (m)->params.head_w
#include "dev/test_model.h"

// ------------------------------------------------------------------------------------------------
// [tools] Variants, one scan, a plain form of it.

// config_make: a configuration for the task ANY, with a window of 4.
static Config config_make(int eigenvalues, int B, int T, int C, int S, int L)
{
    Config c = base_config(B, T);
    c.eigenvalues = eigenvalues;
    c.channels = C;
    c.state = S;
    c.window = 4;
    c.layers = L;
    return c;
}

// variant_config: see dev/test_model.h: both ranges; a window of 4, of 1 and of 2; other numbers of
// channels inside, ranks and states go with it.
static int variant_config(int i, int B, int T, Config *c)
{
    static const int windows[] = {4, 1, 2}, hidden[] = {0, 11, 8}, ranks[] = {0, 3, 2};
    *c = config_make(i % 2, B, T, 8, 3 + i / 2, 2);
    c->window = windows[i / 2];
    c->hidden = hidden[i / 2];
    c->rank = ranks[i / 2];
    return 1;
}

// main_config: both ranges, the papers' 16 numbers of state; 4 in double, where exp is slow.
static Config main_config(int i, int B, int T, int C, int L)
{
    return config_make(i, B, T, C, IS_DOUBLE ? 4 : 16, L);
}

// config_text: the name of a configuration, in a buffer that the next call uses again.
static const char *config_text(const Config *c)
{
    static char text[96];
    snprintf(text, sizeof text, "%s, %d states, window %d, hidden %d, rank %d", model_name(c),
             c->state, c->window, c->hidden, c->rank);
    return text;
}

// One scan by itself: inputs, outputs, gradients. raw is what dt is the softplus of.
typedef struct {
    size_t B, T, H, S, n, N2S, states, tiles_n; // n = B T H, N2S = B T 2 S, states = B S H
    float range;
    float *x, *raw, *bc, *initial, *A_log, *skip, *dy, *dfinal;        // given
    float *dt, *A, *y, *tiles, *final;                                 // forward
    float *dx, *draw, *dbc, *dinitial, *dA, *dA_log, *dskip, *work;    // backward
} Scan;

// scan_make: a scan of random inputs and gradients; raw about `mean`, A_log about 0.
static Scan scan_make(int eigenvalues, size_t B, size_t T, size_t H, size_t S, double mean)
{
    Scan l = {.B = B, .T = T, .H = H, .S = S, .n = B * T * H, .N2S = B * T * 2 * S,
              .states = B * S * H, .range = 1 + eigenvalues};
    l.tiles_n = (T + TILE - 1) / TILE * l.states;
    float **all[] = {&l.x, &l.raw, &l.bc, &l.initial, &l.A_log, &l.skip, &l.dy, &l.dfinal,
                     &l.dt, &l.A, &l.y, &l.tiles, &l.final,
                     &l.dx, &l.draw, &l.dbc, &l.dinitial, &l.dA, &l.dA_log, &l.dskip};
    const size_t sizes[] = {l.n, l.n, l.N2S, l.states, H * S, H, l.n, l.states,
                            l.n, H * S, l.n, l.tiles_n, l.states,
                            l.n, l.n, l.N2S, l.states, l.states, H * S, H};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i] = guarded(sizes[i]);
        if (i < 8)
            normal_fill(*all[i], sizes[i], 1);
    }
    for (size_t i = 0; i < l.n; i++)
        l.raw[i] += mean;
    l.work = reals(threads_count() * scan_work(H, S));
    return l;
}

// scan_ahead: fills dt, A, y, tiles and final.
static void scan_ahead(Scan *l)
{
    dt_forward(l->dt, l->raw, l->n);
    rates_forward(l->A, l->A_log, l->H, l->S);
    scan_forward(l->y, l->tiles, l->final, l->x, l->dt, l->bc, l->initial, l->A, l->skip, l->B,
                 l->T, l->H, l->S, l->range);
}

// scan_back: fills dx, draw, dbc, dinitial, dA; adds to dA_log and dskip.
static void scan_back(Scan *l)
{
    scan_backward(l->dx, l->draw, l->dbc, l->dinitial, l->dA, l->dskip, l->dy, l->dfinal, l->tiles,
                  l->x, l->dt, l->bc, l->A, l->skip, l->work, l->B, l->T, l->H, l->S, l->range);
    rates_backward(l->dA_log, l->dA, l->A, l->A_log, l->B, l->H, l->S);
    dt_backward(l->draw, l->draw, l->raw, l->n);
}

// scan_run: forward and backward, dA_log and dskip from zero.
static void scan_run(Scan *l)
{
    memset(l->dA_log, 0, l->H * l->S * sizeof(float));
    memset(l->dskip, 0, l->H * sizeof(float));
    scan_ahead(l);
    scan_back(l);
}

// scan_loss: y . dy + final . dfinal, of which the scan's gradients are the gradients.
static double scan_loss(void *context)
{
    Scan *l = context;
    scan_ahead(l);
    return dot(l->y, l->dy, l->n) + dot(l->final, l->dfinal, l->states);
}

// scan_text: what a scan is, in a buffer that the next call uses again.
static const char *scan_text(const Scan *l, const char *part)
{
    static char text[128];
    snprintf(text, sizeof text, "scan %s B=%zu T=%zu H=%zu S=%zu: %s",
             l->range > 1 ? "signed" : "nonneg", l->B, l->T, l->H, l->S, part);
    return text;
}

// The same scan in double, as the equations say it, every state kept.
typedef struct {
    double *y, *final, *dx, *draw, *dbc, *dinitial, *dA_log, *dskip;
} Plain;

// plain_step: a_t and, in *slope, its derivative by the exponent dt A: E, or 2 E.
static double plain_step(double *slope, double raw, double A_log, int is_signed)
{
    const double dt = raw > 30 ? raw : log1p(exp(raw)), E = exp(-dt * exp(A_log));
    const double a = is_signed ? 2 * E - 1 : E;
    *slope = is_signed ? 2 * E : E; // a + 1 without its rounding
    return a;
}

// plain_state: adds the part of state number s of channel c of sequence b to p; section 2.5, the
// state before each token from a list of all, no tiles.
static void plain_state(Plain *p, const Scan *l, size_t b, size_t c, size_t s, double *h)
{
    const size_t T = l->T, H = l->H, S = l->S, at = (b * S + s) * H + c;
    const double A_log = l->A_log[c * S + s], A = -exp(A_log);
    double slope, G = l->dfinal[at];
    h[0] = l->initial[at];
    for (size_t t = 0; t < T; t++) {
        const size_t i = (b * T + t) * H + c, k = (b * T + t) * 2 * S + s;
        const double raw = l->raw[i], dt = raw > 30 ? raw : log1p(exp(raw));
        h[t + 1] = plain_step(&slope, raw, A_log, l->range > 1) * h[t] + dt * l->bc[k] * l->x[i];
        p->y[i] += l->bc[k + S] * h[t + 1];
    }
    p->final[at] = h[T];
    for (size_t t = T; t-- > 0;) {
        const size_t i = (b * T + t) * H + c, k = (b * T + t) * 2 * S + s;
        const double raw = l->raw[i], dt = raw > 30 ? raw : log1p(exp(raw));
        const double a = plain_step(&slope, raw, A_log, l->range > 1);
        G += (double)l->bc[k + S] * l->dy[i];
        const double through = slope * h[t] * G;
        p->dbc[k + S] += l->dy[i] * h[t + 1];
        p->dbc[k] += G * dt * l->x[i];
        p->dx[i] += G * dt * l->bc[k];
        p->draw[i] += (G * l->bc[k] * l->x[i] + A * through) / (1 + exp(-raw));
        p->dA_log[c * S + s] += dt * through * A;
        G *= a;
    }
    p->dinitial[at] = G;
}

// plain_scan: outputs and gradients of a scan.
static Plain plain_scan(const Scan *l)
{
    Plain p = {take(l->n * 8), take(l->states * 8), take(l->n * 8), take(l->n * 8),
               take(l->N2S * 8), take(l->states * 8), take(l->H * l->S * 8), take(l->H * 8)};
    double *h = take((l->T + 1) * 8);
    for (size_t i = 0; i < l->n; i++) {
        p.y[i] = (double)l->skip[i % l->H] * l->x[i];
        p.dx[i] = (double)l->skip[i % l->H] * l->dy[i];
        p.dskip[i % l->H] += (double)l->dy[i] * l->x[i];
    }
    for (size_t i = 0; i < l->states; i++)
        plain_state(&p, l, i / (l->S * l->H), i % l->H, i / l->H % l->S, h);
    return p;
}

// guards_stand: 1 if nothing past the end of an output was written.
static int guards_stand(const Scan *l)
{
    return isnan(l->y[l->n]) && isnan(l->tiles[l->tiles_n]) && isnan(l->final[l->states]) &&
           isnan(l->dx[l->n]) && isnan(l->draw[l->n]) && isnan(l->dbc[l->N2S]) &&
           isnan(l->dinitial[l->states]) && isnan(l->dA[l->states]) && isnan(l->A[l->H * l->S]) &&
           isnan(l->dA_log[l->H * l->S]) && isnan(l->dskip[l->H]) && isnan(l->dt[l->n]);
}

// against_plain: a scan's outputs and gradients against plain_scan's.
static void against_plain(Scan *l)
{
    const Plain p = plain_scan(l);
    const double scale = norm_of(p.dx, l->n);
    scan_run(l);
    agree(scan_text(l, "y"), l->y, p.y, 8, l->n, FORWARD, 0);
    agree(scan_text(l, "final"), l->final, p.final, 8, l->states, FORWARD, 0);
    agree(scan_text(l, "dx"), l->dx, p.dx, 8, l->n, GRAD, 0);
    agree(scan_text(l, "draw"), l->draw, p.draw, 8, l->n, GRAD, scale);
    agree(scan_text(l, "dB, dC"), l->dbc, p.dbc, 8, l->N2S, GRAD, 0);
    agree(scan_text(l, "dinitial"), l->dinitial, p.dinitial, 8, l->states, GRAD, scale);
    agree(scan_text(l, "dA_log"), l->dA_log, p.dA_log, 8, l->H * l->S, GRAD, scale);
    agree(scan_text(l, "dskip"), l->dskip, p.dskip, 8, l->H, GRAD, 0);
    CHECK(guards_stand(l), "%s", scan_text(l, "nothing past the end is written"));
}

// all_finite: 1 if x (n) has no NaN or Inf.
static int all_finite(const float *x, size_t n)
{
    return first_not_finite(x, n, sizeof *x) == n;
}

// scan_finite: 1 if all outputs and gradients of a scan are.
static int scan_finite(const Scan *l)
{
    return all_finite(l->y, l->n) && all_finite(l->final, l->states) && all_finite(l->dx, l->n) &&
           all_finite(l->draw, l->n) && all_finite(l->dbc, l->N2S) &&
           all_finite(l->dinitial, l->states) && all_finite(l->dA_log, l->H * l->S) &&
           all_finite(l->dskip, l->H);
}

// ------------------------------------------------------------------------------------------------
// [mix] The scan: derivatives, the plain form, extremes.

// test_scan_derivatives: every input against central differences, states too, both ranges; fewer
// and more positions than a tile.
static void test_scan_derivatives(void)
{
    static const size_t shapes[][4] = {{2, 5, 3, 4}, {1, 18, 2, 3}, {1, 1, 4, 1}, {2, 2, 1, 5}};
    for (size_t k = 0; k < 8; k++, give_all_back()) {
        const size_t *s = shapes[k / 2];
        Scan l = scan_make((int)(k % 2), s[0], s[1], s[2], s[3], -0.5);
        scan_run(&l);
        const double scale = norm_of(doubles(l.dx, l.n), l.n);
        struct {
            const char *name;
            float *x, *dx;
            size_t n;
        } rows[] = {{"dx", l.x, l.dx, l.n},
                    {"draw", l.raw, l.draw, l.n},
                    {"dB, dC", l.bc, l.dbc, l.N2S},
                    {"dinitial", l.initial, l.dinitial, l.states},
                    {"dA_log", l.A_log, l.dA_log, l.H * l.S},
                    {"dskip", l.skip, l.dskip, l.H}};
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            central_difference(scan_text(&l, rows[i].name), scan_loss, &l, rows[i].x, rows[i].dx,
                               rows[i].n, scale);
        float *once = copy_of(l.dA_log, l.H * l.S * sizeof *once);
        scan_back(&l);
        for (size_t i = 0; i < l.H * l.S; i++)
            once[i] *= 2;
        agree(scan_text(&l, "dA_log adds"), l.dA_log, once, sizeof *once, l.H * l.S, GRAD, scale);
    }
}

// test_scan_lengths: 2.5: the recurrence = the plain form, at every T, with long memories (dt near
// 0.02) and short ones (near 0.7), channels that fill vectors or do not.
static void test_scan_lengths(void)
{
    static const size_t lengths[] = {1, 2, 5, 15, 16, 17, 31, 255, 2049};
    for (size_t k = 0; k < 36; k++, give_all_back()) {
        const size_t T = lengths[k / 4], H = k % 4 < 2 ? 17 : 32;
        Scan l = scan_make((int)(k % 2), T < 2000 ? 2 : 1, T, H, k % 4 < 2 ? 16 : 3,
                           k % 4 < 2 ? -4 : 0);
        against_plain(&l);
    }
}

// test_scan_extremes: dt huge (E = 0: a is 0, or -1, which keeps what is remembered with its sign
// changed) and tiny (a is 1) everywhere or in turns, A_log of -100, 20 and 1000: finite, and as the
// plain form says; dt 0 changes nothing.
static void test_scan_extremes(void)
{
    static const double raws[][2] = {{50, 50}, {-30, -30}, {50, -30}, {-100, 50}, {-1000, -1000}};
    for (int k = 0; k < 10; k++, give_all_back()) {
        Scan l = scan_make(k % 2, 2, 40, 6, 4, 0);
        for (size_t i = 0; i < l.n; i++)
            l.raw[i] = raws[k / 2][i / 6 % 2] + 0.1 * (double)(i % 6);
        against_plain(&l);
        if (k / 2 == 4)
            CHECK(same_bits(l.final, l.initial, l.states) && all_zero(l.draw, l.n),
                  "%s", scan_text(&l, "steps of length 0 change nothing"));
    }
    for (int k = 0; k < 2; k++, give_all_back()) {
        static const double logs[] = {-100, 20, 1000, -1000};
        Scan l = scan_make(k, 1, 33, 4, 4, 0);
        for (size_t i = 0; i < 16; i++)
            l.A_log[i] = logs[i % 4];
        for (size_t t = 0; t < 33; t++)
            l.raw[t * 4] = t % 3 == 0 ? -1000 : t % 3 == 1 ? 100 : -20;
        scan_run(&l);
        CHECK(scan_finite(&l), "%s", scan_text(&l, "A_log of 1000: finite"));
        for (size_t i = 0; i < 8; i++) { // A_log of -100 and -1000: nothing fades, h is a sum
            const size_t s = i / 4 * 3, c = i % 4;
            double sum = l.initial[s * 4 + c], size = fabs(sum);
            for (size_t t = 0; t < 33; t++) {
                const double wrote = (double)l.dt[t * 4 + c] * l.bc[t * 8 + s] * l.x[t * 4 + c];
                sum += wrote, size += fabs(wrote);
            }
            CHECK(fabs(l.final[s * 4 + c] - sum) < (IS_DOUBLE ? 1e-14 : 1e-6) * size,
                  "A_log of %g: h %.9g, expected %.9g", logs[s], (double)l.final[s * 4 + c], sum);
        }
    }
}

// test_scan_flip: the eigenvalue -1: with E = 0 and nothing written a signed state changes sign at
// every token and keeps its bits; a nonneg one is gone.
static void test_scan_flip(void)
{
    for (int k = 0; k < 2; k++, give_all_back()) {
        enum { T = 2049 };
        Scan l = scan_make(k, 1, T, 8, 2, 0);
        for (size_t i = 0; i < l.n; i++)
            l.raw[i] = 2000, l.x[i] = 0;
        scan_run(&l);
        for (size_t i = 0; i < l.states; i++)
            CHECK(l.final[i] == (k ? -l.initial[i] : 0), "%s", scan_text(&l, "flips"));
        CHECK(scan_finite(&l), "%s", scan_text(&l, "flips: finite"));
    }
}

// test_scan_split: B21, 2.4: 130 tokens at once, one by one, as 1 + 63 + 64 + 2: the same bits of
// outputs and states, whose gradients agree; the convolution carries its window.
static void test_scan_split(void)
{
    enum { T = 130, H = 24, S = 16, W = 4 };
    static const size_t parts[][5] = {{T}, {1, 63, 64, 2}, {0}}; // 0: one by one
    for (int kind = 0; kind < 2; kind++, give_all_back()) {
        Scan l = scan_make(kind, 1, T, H, S, -2);
        float *xz = normals(T * 2 * H, 1), *weight = normals(H * W, 0.5), *bias = normals(H, 1);
        float *outs[3], *ends[3];
        scan_run(&l);
        for (int k = 0; k < 3; k++) {
            float *h = ends[k] = copy_of(l.initial, l.states * sizeof *h), *u = reals(T * H);
            outs[k] = reals(T * H);
            for (size_t t = 0, i = 0, n; t < T; t += n, i++) {
                float window[(W - 1) * H] = {0};
                n = parts[k][0] ? parts[k][i] : 1;
                for (size_t w = 0; w < W - 1; w++)
                    if (t + w >= W - 1)
                        memcpy(window + w * H, xz + (t + w - W + 1) * 2 * H, H * sizeof *h);
                conv_forward(u + t * H, xz + t * 2 * H, window, weight, bias, 1, n, H, W);
                silu_forward(u + t * H, u + t * H, n * H);
                scan_forward(outs[k] + t * H, NULL, h, u + t * H, l.dt + t * H, l.bc + t * 2 * S, h,
                             l.A, l.skip, 1, n, H, S, l.range);
            }
            CHECK(same_bits(outs[0], outs[k], T * H) && same_bits(ends[0], ends[k], l.states),
                  "B21: split %d", k);
        }
        CHECK(!all_zero(outs[0], T * H), "B21: an output");
        const float *dx = copy_of(l.dx, l.n * sizeof *dx);
        const float *d0 = copy_of(l.dinitial, l.states * sizeof *d0);
        float *middle = reals(l.states);
        l.T = 64, l.n = 64 * H; // the first half of the tokens, whose end the second starts from
        scan_ahead(&l);
        memcpy(middle, l.final, l.states * sizeof *middle);
        Scan r = l;
        r.T = T - 64, r.n = r.T * H, r.initial = middle;
        r.x += 64 * H, r.raw += 64 * H, r.dy += 64 * H, r.bc += 64 * 2 * S;
        scan_run(&r);
        agree("2.4: the second part's dx", r.dx, dx + 64 * H, sizeof *dx, r.n, GRAD, 0);
        memcpy(l.dfinal, r.dinitial, l.states * sizeof *middle);
        scan_run(&l);
        agree("2.4: the first part's dx", l.dx, dx, sizeof *dx, l.n, GRAD, 0);
        agree("2.4: dinitial", l.dinitial, d0, sizeof *dx, l.states, GRAD, 0);
    }
}

// test_softplus: A11: softplus of 89, 1e4 and -40; relative error and slope over [-87, 100]; NaN
// stays; every lane of a vector.
static void test_softplus(void)
{
    const double bound = IS_DOUBLE ? 1e-14 : 6e-7;
    double worst = 0, slope = 0;
    for (int i = 0; i <= 18700; i++) {
        const float x = -87 + i * 0.01, one = 1;
        float dx;
        const double e = exp(-fabs((double)x)), want = fmax(x, 0) + log1p(e);
        const double p = x > 0 ? 1 / (1 + e) : e / (1 + e);
        dt_backward(&dx, &one, &x, 1);
        worst = fmax(worst, fabs(softplus(x) / want - 1));
        slope = fmax(slope, fabs(dx / p - 1));
    }
    printf("softplus: relative error %.3g, its slope %.3g\n", worst, slope);
    CHECK(worst < bound && slope < bound, "softplus: %g, slope %g", worst, slope);
    CHECK(softplus(89) == 89 && softplus(1e4) == (float)1e4, "A11: softplus(89), softplus(1e4)");
    CHECK(fabs(softplus(-40) / 4.248354255291589e-18 - 1) < 1e-6, "A11: softplus(-40) = %g",
          (double)softplus(-40));
    CHECK(softplus(-1e4) >= 0 && softplus(-1e4) < 1e-37 && isnan(softplus(NAN)),
          "softplus far down and of NaN");
    float x[17], y[17], dy[17];
    for (size_t n = 1; n <= 17; n++) // E09: vectors and their tails
        for (int k = 0; k < 6; k++) {
            static const double at[] = {-1000, -100, -1, 1, 100, 1000};
            for (size_t i = 0; i < n; i++)
                x[i] = at[k], dy[i] = 1;
            dt_forward(y, x, n);
            dt_backward(dy, dy, x, n);
            for (size_t i = 0; i < n; i++)
                CHECK(fabs(y[i] - y[0]) <= 1e-7 * y[0] && fabs(dy[i] - dy[0]) <= 1e-7 * dy[0] &&
                          dy[i] >= 0 && dy[i] <= 1,
                      "E09: softplus(%g) in lane %zu of %zu", at[k], i, n);
        }
}

// test_decay: A12: 0 <= exp(dt A) <= 1 whatever the weights: with random ones times 1000 what a
// step keeps of a state of 1 is in [0,1], or [-1,1]; A_log = 20 and dt = 100: exp(dt A) = 0; A_log
// = -100: it is 1.
static void test_decay(void)
{
    for (int k = 0; k < 2; k++, give_all_back()) {
        Scan l = scan_make(k, 50, 1, 16, 16, 0);
        for (size_t i = 0; i < l.n; i++)
            l.raw[i] *= 1000, l.x[i] = 0;
        for (size_t i = 0; i < l.H * l.S; i++)
            l.A_log[i] *= 1000;
        l.A_log[0] = 20, l.A_log[1] = -100;
        l.raw[0] = 100;
        for (size_t i = 0; i < l.states; i++)
            l.initial[i] = 1;
        scan_run(&l);
        int inside = 1;
        for (size_t i = 0; i < l.states; i++)
            inside &= l.final[i] >= (k ? -1 : 0) && l.final[i] <= 1; // false for NaN
        CHECK(inside, "A12: %s", scan_text(&l, "what a step keeps"));
        CHECK(l.final[0] == (k ? -1 : 0), "A12: A_log 20, dt 100: %g", (double)l.final[0]);
        CHECK(l.final[l.H] == 1, "A12: A_log -100: %g", (double)l.final[l.H]);
        CHECK(all_finite(l.A, l.H * l.S) && scan_finite(&l), "A12: all is finite");
    }
}

// aliased: n floats of address space where every `period` bytes are the same memory.
static float *aliased(size_t n, size_t period)
{
    const size_t size = (n * sizeof(float) + period - 1) / period * period;
    const char *path = in_dir("states");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    char *base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int bad = fd < 0 || base == MAP_FAILED || ftruncate(fd, (off_t)period);
    for (size_t at = 0; !bad && at < size; at += period)
        bad = mmap(base + at, period, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
              MAP_FAILED;
    if (bad)
        die(EXIT_MEMORY, "aliased: %s", strerror(errno));
    close(fd);
    unlink(path);
    return (float *)base;
}

// test_large: slow: B11, 5.8: more than 2^31 states, of sequences of one token: the last one is
// what it is alone, between others of zeros. Arrays lie in 64 MiB that repeat over all addresses.
static void test_large(void)
{
    enum { B = 32769, H = 4096, S = 16, PERIOD = 64 << 20 };
    const size_t states = (size_t)B * S * H, last = states - S * H, n = (size_t)B * H;
    Scan one = scan_make(SIGNED, 1, 1, H, S, 0), l = one;
    float *row[] = {one.x, one.raw, one.dy, one.bc}, **to[] = {&l.x, &l.dt, &l.dy, &l.bc};
    if (IS_DOUBLE)
        return;
    memset(one.initial, 0, one.states * sizeof(float));
    memset(one.dfinal, 0, one.states * sizeof(float));
    scan_run(&one);
    row[1] = one.dt;
    for (int k = 0; k < 4; k++) {
        const size_t width = k < 3 ? H : 2 * S;
        *to[k] = aliased((size_t)B * width, PERIOD);
        memcpy(*to[k] + (B - 1) * width, row[k], width * sizeof(float));
    }
    l.y = aliased(n, PERIOD), l.dx = aliased(n, PERIOD), l.draw = aliased(n, PERIOD);
    l.dbc = aliased((size_t)B * 2 * S, PERIOD);
    l.tiles = aliased(states, PERIOD), l.final = aliased(states, PERIOD);
    l.dA = aliased(states, PERIOD);
    CHECK(states > (size_t)1 << 31, "B11: %zu states", states);
    double start = seconds_now();
    scan_forward(l.y, l.tiles, l.final, l.x, l.dt, l.bc, NULL, l.A, l.skip, B, 1, H, S, l.range);
    scan_backward(l.dx, l.draw, l.dbc, NULL, l.dA, l.dskip, l.dy, NULL, l.tiles, l.x, l.dt, l.bc,
                  l.A, l.skip, l.work, B, 1, H, S, l.range);
    printf("%zu states: %.1f s\n", states, seconds_now() - start);
    dt_backward(l.draw + n - H, l.draw + n - H, one.raw, H);
    CHECK(same_bits(l.y + n - H, one.y, H), "B11: y of the last sequence");
    CHECK(same_bits(l.final + last, one.final, S * H), "B11: final");
    CHECK(same_bits(l.dx + n - H, one.dx, H), "B11: dx");
    CHECK(same_bits(l.draw + n - H, one.draw, H), "B11: draw");
    CHECK(same_bits(l.dbc + (size_t)B * 2 * S - 2 * S, one.dbc, 2 * S), "B11: dB, dC");
    CHECK(same_bits(l.dA + last, one.dA, S * H), "B11: dA");
}

// test_deterministic: 5.11, E04: dB, dC and dA keep their bits over 1, 2 and 3 threads, and those
// of a sequence do not depend on how many others there are.
static void test_deterministic(void)
{
    for (int k = 0; k < 2; k++, give_all_back()) {
        Scan l = scan_make(k, 7, 50, 40, 16, -2);
        float *dbc = NULL, *dA_log = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            threads_set(threads);
            l.work = reals(threads_count() * scan_work(l.H, l.S));
            scan_run(&l);
            dbc = dbc ? dbc : copy_of(l.dbc, l.N2S * sizeof *dbc);
            dA_log = dA_log ? dA_log : copy_of(l.dA_log, l.H * l.S * sizeof *dbc);
            CHECK(same_bits(dbc, l.dbc, l.N2S) && same_bits(dA_log, l.dA_log, l.H * l.S),
                  "E04: %d threads", threads);
        }
        threads_set(1);
        l.B = 1, l.n /= 7, l.N2S /= 7, l.states /= 7;
        scan_run(&l);
        CHECK(same_bits(dbc, l.dbc, l.N2S), "5.11: a sequence alone");
    }
}

// ------------------------------------------------------------------------------------------------
// [block] Convolution, SiLU and gate, norm.

// The convolution by itself, for central differences.
typedef struct {
    float *out, *x, *before, *weight, *bias, *dout;
    size_t B, T, H, W;
} Conv;

// conv_loss: out . dout.
static double conv_loss(void *context)
{
    Conv *c = context;
    conv_forward(c->out, c->x, c->before, c->weight, c->bias, c->B, c->T, c->H, c->W);
    return dot(c->out, c->dout, c->B * c->T * c->H);
}

// conv_plain: want (B,T,H) as one sum.
static void conv_plain(double *want, const Conv *c)
{
    const size_t past = c->W - 1;
    for (size_t i = 0; i < c->B * c->T * c->H; i++) {
        const size_t ch = i % c->H, t = i / c->H % c->T, b = i / c->H / c->T;
        want[i] = c->bias[ch];
        for (size_t w = 0; w < c->W; w++) { // row t + w of x with `past` rows in front
            const size_t at = t + w;
            want[i] += (double)c->weight[ch * c->W + w] *
                       (at >= past  ? c->x[(b * c->T + at - past) * 2 * c->H + ch]
                        : c->before ? c->before[(b * past + at) * c->H + ch]
                                    : 0);
        }
    }
}

// test_conv: B02, 5.10: T shorter than the window and longer, windows of 1 to 5, with what stands
// before and without: the plain sum, central differences, weights add, z's half stays. B07: 65535
// channels and more.
static void test_conv(void)
{
    static const size_t lengths[] = {1, 2, 3, 4, 5, 9}, windows[] = {4, 4, 1, 2, 5};
    for (size_t k = 0; k < 30; k++, give_all_back()) {
        const size_t B = 2, T = lengths[k / 5], H = 19, n = B * T * H, W = windows[k % 5];
        const size_t m = k % 5 ? B * (W - 1) * H : 0, weights = H * W;
        Conv c = {guarded(n), normals(2 * n, 1), m ? normals(m, 1) : NULL, normals(weights, 1),
                  normals(H, 1), normals(n, 1), B, T, H, W};
        float *dx = guarded(2 * n), *dbefore = m ? guarded(m) : NULL;
        float *dw = reals(weights), *db = reals(H);
        double *want = take(n * sizeof *want);
        for (size_t i = 0; i < 2 * n; i++)
            dx[i] = NAN;
        conv_plain(want, &c);
        conv_loss(&c);
        agree("B02: convolution", c.out, want, sizeof *want, n, FORWARD, 0);
        conv_backward(dx, dbefore, dw, db, c.dout, c.x, c.before, c.weight, B, T, H, W);
        float *whole = reals(2 * n); // the derivative by z's half is 0
        for (size_t i = 0; i < 2 * n; i++) {
            CHECK((i % (2 * H) >= H) == !!isnan(dx[i]), "convolution: dx, z's half");
            whole[i] = isnan(dx[i]) ? 0 : dx[i];
        }
        central_difference("B02: convolution dx", conv_loss, &c, c.x, whole, 2 * n, 1);
        central_difference("B02: convolution dweight", conv_loss, &c, c.weight, dw, weights, 1);
        central_difference("B02: convolution dbias", conv_loss, &c, c.bias, db, H, 1);
        if (m)
            central_difference("B02: convolution dbefore", conv_loss, &c, c.before, dbefore, m, 1);
        CHECK(isnan(c.out[n]) && (!m || isnan(dbefore[m])), "B02: nothing past the end");
        float *twice = copy_of(dw, weights * sizeof *dw);
        conv_backward(dx, dbefore, twice, db, c.dout, c.x, c.before, c.weight, B, T, H, W);
        for (size_t i = 0; i < weights; i++)
            twice[i] /= 2;
        agree("convolution: dweight adds", twice, dw, sizeof *dw, weights, GRAD, 0);
    }
    for (size_t H = 65535; H <= 65537; H++, give_all_back()) {
        float *x = normals(4 * H, 1), *weight = normals(H * 4, 1), *out = reals(2 * H);
        float *dx = reals(4 * H), *dw = reals(H * 4), *bias = normals(H, 1);
        float *dout = normals(2 * H, 1);
        conv_forward(out, x, NULL, weight, bias, 1, 2, H, 4);
        conv_backward(dx, NULL, dw, bias, dout, x, NULL, weight, 1, 2, H, 4);
        const float *last = weight + (H - 1) * 4;
        const double want = last[3] * x[3 * H - 1] + last[2] * x[H - 1] + bias[H - 1] -
                            dout[H - 1] - dout[2 * H - 1];
        CHECK(fabs(out[2 * H - 1] - want) < 1e-5 &&
                  fabs(dx[H - 1] - (last[3] * dout[H - 1] + last[2] * dout[2 * H - 1])) < 1e-5 &&
                  fabs(dw[H * 4 - 2] - dout[2 * H - 1] * x[H - 1]) < 1e-5,
              "B07: %zu channels", H);
    }
}

// silu_loss, gate_loss, rmsnorm_loss: outputs . dout; of gate_forward w is xz.
static double silu_loss(void *context)
{
    Pair *p = context;
    silu_forward(p->out, p->x, p->N * p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

static double gate_loss(void *context)
{
    Pair *p = context;
    gate_forward(p->out, p->x, p->w, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

static double rmsnorm_loss(void *context)
{
    Pair *p = context;
    rmsnorm_forward(p->out, p->x, p->w, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_silu: SiLU and the gate: central differences, values far out, aliases, x's half stays.
static void test_silu(void)
{
    enum { N = 4, H = 21, n = N * H };
    Pair p = {.N = N, .C = H, .x = normals(n, 2), .w = normals(2 * n, 2), .out = reals(n)};
    float *dx = reals(n), *dxz = reals(2 * n);
    p.dout = normals(n, 1);
    silu_loss(&p);
    silu_backward(dx, p.dout, p.x, n);
    central_difference("silu dx", silu_loss, &p, p.x, dx, n, 1);
    silu_loss(&p);
    for (size_t i = 0; i < n; i++)
        CHECK(fabs(p.out[i] - p.x[i] / (1 + exp(-(double)p.x[i]))) < 1e-6, "silu");
    gate_loss(&p);
    gate_backward(dx, dxz, p.dout, p.x, p.w, N, H);
    for (size_t i = 0; i < 2 * n; i++)
        CHECK(i % (2 * H) >= H || dxz[i] == 0, "gate: x's half stays");
    central_difference("gate dy", gate_loss, &p, p.x, dx, n, 1);
    central_difference("gate dz", gate_loss, &p, p.w, dxz, 2 * n, 1);
    gate_loss(&p);
    float *once = copy_of(p.out, n * sizeof *once), *x = copy_of(p.x, n * sizeof *x);
    gate_forward(x, x, p.w, N, H);
    CHECK(same_bits(x, once, n), "gate: out may alias y");
    gate_backward(p.dout, dxz, p.dout, p.x, p.w, N, H);
    CHECK(same_bits(p.dout, dx, n), "gate: dy may alias dout");
    float far[] = {-1000, 1000, -88, 88, NAN}, y[5], slope[] = {1, 1, 1, 1, 1};
    silu_forward(y, far, 5);
    silu_backward(slope, slope, far, 5);
    for (int i = 0; i < 4; i++)
        CHECK(fabs(y[i] - (far[i] > 0 ? far[i] : 0)) < 1e-30 &&
                  fabs(slope[i] - (far[i] > 0)) < 1e-30,
              "SiLU(%g) = %g, slope %g", (double)far[i], (double)y[i], (double)slope[i]);
    CHECK(isnan(y[4]) && isnan(slope[4]), "SiLU keeps NaN");
}

// test_rmsnorm: central differences, the plain form with eps 1e-5, += of both; a zero row gives 0
// and a finite gradient, dout weight / sqrt(1e-5).
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
            want[i] = p.x[i] / sqrt(dot(row, row, C) / (double)C + 1e-5) * p.w[i % C];
        }
        rmsnorm_loss(&p);
        agree("rmsnorm", p.out, want, sizeof *want, n, FORWARD, 0);
        rmsnorm_backward(dx, dw, dout, p.x, p.w, N, C);
        if (n > 1 && n < 200) { // of one number dx is what eps leaves
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
        agree("rmsnorm_backward adds to dweight", dw2, dw, sizeof *dw, C, GRAD, 1);
        memset(p.x, 0, n * sizeof *p.x);
        memset(dx, 0, n * sizeof *dx);
        memcpy(dout, p.dout, n * sizeof *dout);
        rmsnorm_loss(&p);
        rmsnorm_backward(dx, dw2, dout, p.x, p.w, N, C);
        CHECK(all_zero(p.out, n), "a zero row gives 0");
        for (size_t i = 0; i < n; i++)
            want[i] = (double)p.dout[i] * p.w[i % C] / sqrt(1e-5);
        agree("the gradient at a zero row", dx, want, sizeof *want, n, GRAD, 0);
    }
}

// ------------------------------------------------------------------------------------------------
// [model] The whole model: goldens, decoding, sizes, initial weights.

// golden_sizes: what the shapes of a golden say of the model.
static void golden_sizes(const StFile *file, Config *c)
{
    c->layers = (int)st_find(file, "params.norm_w")->shape[0];
    c->channels = (int)st_find(file, "params.norm_w")->shape[1];
}

// test_goldens: what dev/ref/mamba.py wrote.
static void test_goldens(void)
{
    goldens_check("dev/ref/mamba_goldens", 4, 6, golden_sizes);
}

// test_decode_lengths: decoding = parallel at many lengths, for both ranges.
static void test_decode_lengths(void)
{
    static const int lengths[] = {1, 2, 3, 4, 5, 31, 255, 2049};
    for (int k = 0; k < 16; k++, give_all_back()) {
        Model *m = model_random(config_make(k % 2, 1, lengths[k / 2], 8, 4, 1));
        model_forward(m);
        agree("decoded", decode_all(m), m->acts.logits, sizeof(float), m->T * m->V,
              IS_DOUBLE ? 1e-11 : 1e-5, 0);
        model_drop(m);
    }
}

// test_widths: B06: odd sizes and B = 1 to 3: decoding = parallel, all gradients are finite.
static void test_widths(void)
{
    static const int sizes[][3] = {{4, 1, 1}, {6, 3, 5}, {12, 16, 31}, {36, 7, 0}, {100, 5, 33}};
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

// test_sizes: the papers' numbers of parameters; the loss of a new model is close to ln V, from the
// variance 1/3 of its logits; B10: sizes beyond 32 bits.
static void test_sizes(void)
{
    static const struct {
        int V, L, window;
        size_t parameters;
    } rows[] = {{3, 2, 4, 233984}, {3, 2, 1, 232448}, {10, 3, 4, 3 * 116608 + 2 * 10 * 128}};
    Model plan;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        any_vocabulary = (size_t)rows[k].V;
        Config c = config_make(SIGNED, 1, 4, 128, 16, rows[k].L);
        c.window = rows[k].window;
        model_plan(&plan, &c);
        CHECK(arena_elements(&plan.weights.params, NULL) == rows[k].parameters,
              "parameters: %zu, got %zu", rows[k].parameters,
              arena_elements(&plan.weights.params, NULL));
        CHECK(plan.H == 256 && plan.R == 8, "H %zu, R %zu", plan.H, plan.R);
    }
    Config c = config_make(SIGNED, 1, 4, 100, 16, 1);
    model_plan(&plan, &c);
    CHECK(plan.R == 7, "C / 16 rounded up: %zu", plan.R);
    any_vocabulary = 50257;
    c = config_make(SIGNED, 96, 1024, 768, 16, 12);
    model_plan(&plan, &c);
    CHECK(model_bytes(&plan) > 2 * sizeof(float) * 96 * 1024 * 50257, "B10: planned %zu bytes",
          model_bytes(&plan));
    for (int k = 0; k < 4; k++) {
        any_vocabulary = k & 1 ? 65 : 29;
        Model *m = model_make(config_make(k / 2, 8, 16, 64, 16, 2));
        model_forward(m);
        const double want = log((double)any_vocabulary) + 1.0 / 6;
        CHECK(fabs(m->loss - want) < 0.25, "%s: loss at init near %g, got %g",
              config_text(&m->config), want, m->loss);
        model_drop(m);
    }
    any_vocabulary = 29;
}

// ascending: for qsort.
static int ascending(const void *x, const void *y)
{
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

// test_initial: the deviations and the largest numbers that new weights have, from the papers'
// formulas; what decays; A_log = ln s; A13: steps between 1e-3 and 1e-1, log-uniform; signed
// eigenvalues of both signs at the start.
static void test_initial(void)
{
    static const struct {
        const char *name;
        double most, deviation; // most 0: not uniform; deviation 0: no single number
        int decay;
    } rows[] = {{"wte", 0, 1, 1},          {"norm_w", 0, 1, 1},      {"in_w", 0.08839, 0, 1},
                {"conv_w", 0.5, 0, 1},     {"conv_b", 0.5, 0, 1},    {"x_w", 0.0625, 0, 1},
                {"dt_w", 0.35355, 0, 1},   {"dt_b", 0, 0, 0},        {"A_log", 0, 0, 0},
                {"skip", 0, 1, 0},         {"out_w", 0.0625, 0, 1},  {"head_w", 0.08839, 0, 1}};
    Model *m = model_make(config_make(SIGNED, 2, 8, 128, 16, 2));
    CHECK(m->weights.params.n == sizeof rows / sizeof *rows, "all tensors are listed");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const Tensor *t = &m->weights.params.table[i];
        const float *x = arena_data(&m->weights.params, (int)i);
        const size_t n = tensor_size(t);
        const double got = sqrt(dot(x, x, n) / (double)n), most = rows[i].most;
        const double want = most > 0 ? most / sqrt(3.0) : rows[i].deviation;
        double largest = 0;
        for (size_t j = 0; j < n; j++)
            largest = fmax(largest, fabs(x[j]));
        CHECK(!strcmp(t->name, rows[i].name) && t->decay == rows[i].decay, "%s: decays %d", t->name,
              t->decay);
        CHECK(want == 0 || fabs(got - want) <= 0.05 * want, "%s: deviation %g, got %g", t->name,
              want, got);
        CHECK(most == 0 || (largest <= 1.001 * most && largest > 0.97 * most), "%s: up to %g",
              t->name, largest);
    }
    double steps[512];
    for (size_t i = 0; i < 512; i++) { // two layers of 256
        const double b = m->params.dt_b[i];
        steps[i] = log1p(exp(b));
        CHECK(steps[i] > 0.999e-3 && steps[i] < 1.001e-1, "A13: a step of %g", steps[i]);
        for (size_t s = 0; s < 16; s++)
            CHECK(fabs(m->params.A_log[i * 16 + s] - log(s + 1.0)) < 1e-6, "A_log of %zu", s);
    }
    qsort(steps, 512, sizeof *steps, ascending);
    CHECK(fabs(steps[256] / 1e-2 - 1) < 0.2, "A13: median step %g", steps[256]);
    CHECK(steps[128] < 4.5e-3 && steps[384] > 2.2e-2, "A13: quartiles %g, %g", steps[128],
          steps[384]);
    model_forward(m);
    double least = 1, largest = -1;
    for (size_t i = 0; i < m->B * m->T * m->H; i++)
        for (size_t s = 0; s < 16; s++) {
            const double a = 2 * exp((double)m->acts.dt[i] * m->acts.A[s * m->H + i % m->H]) - 1;
            least = fmin(least, a), largest = fmax(largest, a);
        }
    printf("eigenvalues at the start from %.3f to %.3f\n", least, largest);
    CHECK(least < -0.3 && largest > 0.99 && largest <= 1, "2.3: eigenvalues %g to %g", least,
          largest);
    model_drop(m);
}

// test_decay_left_out: with a gradient of 0 and weight decay an update moves all but A_log, skip
// and the bias of dt.
static void test_decay_left_out(void)
{
    Config c = config_make(SIGNED, 2, 8, 16, 16, 1);
    c.training.weight_decay = 0.1;
    Model *m = model_random(c), *before = model_make(c);
    arena_copy_values(&before->weights.params, &m->weights.params);
    model_zero_grad(m);
    adamw(&m->weights, &c.training, 1e-2, 1, 0);
    for (int k = 0; k < m->weights.params.n; k++) {
        const Tensor *t = &m->weights.params.table[k];
        const int stays = !strcmp(t->name, "A_log") || !strcmp(t->name, "skip") ||
                          !strcmp(t->name, "dt_b");
        CHECK(same_bits(arena_data(&m->weights.params, k), arena_data(&before->weights.params, k),
                        tensor_size(t)) == stays, "5.9: %s decays", t->name);
    }
    model_drop(m);
    model_drop(before);
}

// test_flops: what a step costs: weights and scan.
static void test_flops(void)
{
    Config c = config_make(SIGNED, 4, 34, 192, 16, 12);
    Model plan;
    c.training.accumulate = 2;
    model_plan(&plan, &c);
    const double H = 384, layer = 3 * 192 * H + 5 * H + (12 + 32) * H + 12 * H + H + 16 * H + H +
                                  192;
    const double want = 2 * 4 * 34 * (6 * (12 * layer + 29 * 192) + 40 * 12 * 16 * H);
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
        {"--channels 8 --rank 17", "--rank 17: expected at most the 16 channels"},
        {"--hidden 9 --rank 10", "--rank 10: expected at most the 9 channels"},
        {"--window 0", "--window: expected a whole number from 1"},
        {"--window 17", "--window: expected a whole number from 1"},
        {"--state 0", "--state: expected a whole number from 1"},
        {"--eigenvalues negative", "--eigenvalues: expected one of nonneg|signed"},
        {"--elements pairs", "--elements: expected one of all|swaps|triples"},
        {"--model signed", "unknown option"},
    };
    static Options options;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_die(refused_options, (void *)(uintptr_t)bad[i][0], EXIT_USAGE, bad[i][1]);
    presets_check();
    run_options(&options, "");
    CHECK(config.eigenvalues == SIGNED && config.task == PARITY && config.window == 4 &&
              config.state == 16,
          "without options: parity, signed, a window of 4, 16 states");
    run_options(&options, "--preset modular");
    CHECK(config.task == MODULAR && config.layers == 3 && config.channels == 128 &&
              config.training.grad_clip == 1 && config.task_options.max_length == 0,
          "--preset modular");
    run_options(&options, "--preset parity");
    CHECK(config.task == PARITY && config.layers == 2 && config.training.grad_clip == 0,
          "--preset parity");
}

// test_evaluation: an evaluation reads longer sequences in fewer rows, training goes on at its own
// length with the same bits as without; every task trains and evaluates.
static void test_evaluation(void)
{
    static const char *const tasks[] = {"parity", "modular", "brackets", "s5", "z60", "horizon",
                                        "recall"};
    char line[4096];
    for (int k = 0; k < 7; k++, give_all_back()) {
        char *weights[2];
        for (int every = 0; every < 2; every++) {
            snprintf(line, sizeof line, "--task %s --channels 8 --state 3 --batch-size 5 "
                     "--max-length 9 --eval-min-length 10 --eval-max-length 30 --steps 4 "
                     "--eval-every %d --out %s", tasks[k], every, in_dir("run"));
            Model *m = run(line);
            CHECK(m->batch.rows == 5 && m->B < 5 && m->T > 20, "%s: an evaluation of %zu x %zu",
                  tasks[k], m->B, m->T);
            weights[every] = trained_copy(&m->weights);
            CHECK(!every || trained_same(&m->weights, weights[0]), "%s: evaluations change nothing",
                  tasks[k]);
            model_drop(m);
            empty_dir("");
        }
    }
}

// test_convergence: copying is learnt by both ranges, read back as well; parity of up to 15 bits by
// the signed range, beyond that length too, where the other stays at chance. fp32.
static void test_convergence(void)
{
    static const char *const words[] = MAIN_WORDS;
    static Options options;
    for (int k = 0; k < 4 && !IS_DOUBLE; k++) {
        const int parity = k / 2, steps = parity ? 300 : 150;
        LogRow row = {0};
        char line[512];
        snprintf(line, sizeof line, "--task %s --string-size 3 --eigenvalues %s --steps %d "
                 "--channels 24 --batch-size 32 --lr 1e-2 --max-length 16 "
                 "--eval-min-length 17 --eval-max-length 40 --eval-batches 24",
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
    {"scan derivatives", test_scan_derivatives, 0},
    {"scan lengths", test_scan_lengths, 0},
    {"scan extremes", test_scan_extremes, 0},
    {"scan flip", test_scan_flip, 0},
    {"scan split", test_scan_split, 0},
    {"softplus", test_softplus, 0},
    {"decay", test_decay, 0},
    {"deterministic", test_deterministic, 0},
    {"large", test_large, 1},
    {"conv", test_conv, 0},
    {"silu", test_silu, 0},
    {"rmsnorm", test_rmsnorm, 0},
    {"goldens", test_goldens, 0},
    {"decode lengths", test_decode_lengths, 0},
    {"widths", test_widths, 0},
    {"sizes", test_sizes, 0},
    {"initial weights", test_initial, 0},
    {"decay left out", test_decay_left_out, 0},
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
