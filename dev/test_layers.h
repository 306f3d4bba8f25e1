// test_layers.h: tests of the sections that every trainer has in common, [layers] and [optimizer],
// and of the comparison itself. Included by test_X.c after train_X.c and dev/testing_model.h. A
// name like A14 is a row of the list of cases that this project keeps: failures that users of
// other programs have reported.
#ifndef SEQ_DEV_TEST_LAYERS_H
#define SEQ_DEV_TEST_LAYERS_H

// The inputs and outputs of one layer function, for central differences.
typedef struct {
    float *x, *w, *bias, *out, *dout, *base;
    int *tokens, *predictions;
    size_t N, C, OC;
    int accumulate;
} Pair;

// matmul_loss: (base + x w^T + bias) . dout.
static inline double matmul_loss(void *context)
{
    Pair *p = context;
    memcpy(p->out, p->base, p->N * p->OC * sizeof(float));
    matmul_forward(p->out, p->x, p->w, p->bias, p->N, p->C, p->OC, p->accumulate);
    return dot(p->out, p->dout, p->N * p->OC);
}

// matmul_plain: the product and its gradients as three plain loops; see the arguments of
// matmul_forward and matmul_backward. The gradients start at 1.
static inline void matmul_plain(const Pair *p, double *out, double *dx, double *dw, double *dbias)
{
    size_t N = p->N, C = p->C, OC = p->OC;
    for (size_t i = 0; i < N * C; i++)
        dx[i] = p->accumulate;
    for (size_t i = 0; i < OC * C; i++)
        dw[i] = 1;
    for (size_t o = 0; o < OC; o++)
        dbias[o] = 1;
    for (size_t n = 0; n < N; n++)
        for (size_t o = 0; o < OC; o++) {
            double sum = (p->accumulate ? p->base[n * OC + o] : 0) + (p->bias ? p->bias[o] : 0);
            double d = p->dout[n * OC + o];
            for (size_t c = 0; c < C; c++) {
                sum += (double)p->x[n * C + c] * p->w[o * C + c];
                dx[n * C + c] += d * p->w[o * C + c];
                dw[o * C + c] += d * p->x[n * C + c];
            }
            out[n * OC + o] = sum;
            dbias[o] += d;
        }
}

// test_matmul: against plain loops and central differences; B06: any width; with and without bias,
// = and +=.
static inline void test_matmul(void)
{
    static const size_t shapes[][3] = {{1, 1, 1},    {5, 7, 3},     {2, 36, 100},
                                       {13, 19, 33}, {97, 260, 30}, {200, 12, 270}};
    for (size_t i = 0; i < 4 * sizeof shapes / sizeof *shapes; i++, give_all_back()) {
        size_t N = shapes[i / 4][0], C = shapes[i / 4][1], OC = shapes[i / 4][2];
        Pair p = {.N = N, .C = C, .OC = OC, .accumulate = i & 1};
        p.x = normals(N * C, 1);
        p.w = normals(OC * C, 1);
        p.bias = i & 2 ? normals(OC, 1) : NULL;
        p.out = reals(N * OC);
        p.dout = normals(N * OC, 1);
        p.base = normals(N * OC, 1);
        float *dx = reals(N * C), *dw = reals(OC * C), *dbias = reals(OC);
        double *out = take(N * OC * 8), *rx = take(N * C * 8), *rw = take(OC * C * 8);
        double *rb = take(OC * 8);
        matmul_plain(&p, out, rx, rw, rb);
        for (size_t k = 0; k < N * C; k++)
            dx[k] = 1;
        for (size_t k = 0; k < OC * C; k++)
            dw[k] = 1;
        for (size_t k = 0; k < OC; k++)
            dbias[k] = 1;
        matmul_loss(&p);
        matmul_backward(dx, dw, p.bias ? dbias : NULL, p.dout, p.x, p.w, N, C, OC, p.accumulate);
        agree("matmul", p.out, out, 8, N * OC, FORWARD, 0);
        agree("matmul dinp", dx, rx, 8, N * C, GRAD, 0);
        agree("matmul dweight", dw, rw, 8, OC * C, GRAD, 0);
        if (p.bias)
            agree("matmul dbias", dbias, rb, 8, OC, GRAD, 0);
        if (N > 13)
            continue;
        memset(dw, 0, OC * C * sizeof *dw);
        memset(dbias, 0, OC * sizeof *dbias);
        matmul_backward(dx, dw, p.bias ? dbias : NULL, p.dout, p.x, p.w, N, C, OC, 0);
        central_difference("matmul dinp", matmul_loss, &p, p.x, dx, N * C, 0);
        central_difference("matmul dweight", matmul_loss, &p, p.w, dw, OC * C, 0);
        if (p.bias)
            central_difference("matmul dbias", matmul_loss, &p, p.bias, dbias, OC, 0);
    }
}

// plain_normalize: z (n) = (x - mean) / sqrt(var + 1e-8); returns 1 / that root. z may alias x.
// The mean is taken about x[0]: a constant row must give 0, not the ratio of two rounding errors.
static inline double plain_normalize(double *z, const double *x, size_t n)
{
    double first = x[0], mean = first, var = 0;
    for (size_t i = 1; i < n; i++)
        mean += (x[i] - first) / (double)n;
    for (size_t i = 0; i < n; i++)
        var += (x[i] - mean) * (x[i] - mean) / (double)n;
    for (size_t i = 0; i < n; i++)
        z[i] = (x[i] - mean) / sqrt(var + 1e-8);
    return 1 / sqrt(var + 1e-8);
}

// plain_normalize_backward: dx (n) = from dz, z (n) and r, plain_normalize's result. dx may be dz.
static inline void plain_normalize_backward(double *dx, const double *dz, const double *z, double r,
                                            size_t n)
{
    double mean = 0, mean_z = 0;
    for (size_t i = 0; i < n; i++) {
        mean += dz[i] / (double)n;
        mean_z += dz[i] * z[i] / (double)n;
    }
    for (size_t i = 0; i < n; i++)
        dx[i] = r * (dz[i] - mean - z[i] * mean_z);
}

// normalize_loss: normalize(x) . dout.
static inline double normalize_loss(void *context)
{
    Pair *p = context;
    normalize_forward(p->out, p->x, p->N, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_normalize: central differences and the plain form, dx adds; A14: constant and zero rows.
static inline void test_normalize(void)
{
    static const size_t widths[] = {1, 2, 7, 64, 256};
    for (size_t i = 0; i < 5; i++, give_all_back()) {
        size_t N = 3, C = widths[i], n = N * C;
        Pair p = {.N = N, .C = C, .out = reals(n)};
        p.x = normals(n, 2);
        p.dout = normals(n, 1);
        float *dx = reals(n);
        double *z = take(n * 8), *d = doubles(p.dout, n), *x = doubles(p.x, n);
        for (size_t r = 0; r < N; r++) {
            double rstd = plain_normalize(z + r * C, x + r * C, C);
            plain_normalize_backward(d + r * C, d + r * C, z + r * C, rstd, C);
        }
        normalize_loss(&p);
        normalize_backward(dx, p.dout, p.x, N, C);
        agree("normalize", p.out, z, 8, n, FORWARD, 0);
        agree("normalize dx", dx, d, 8, n, GRAD, 10 * sqrt((double)n));
        central_difference("normalize dx", normalize_loss, &p, p.x, dx, n, 1);
        float *twice = copy_of(dx, n * sizeof *dx);
        normalize_backward(twice, p.dout, p.x, N, C);
        for (size_t k = 0; k < n; k++)
            twice[k] /= 2;
        CHECK(same_bits(twice, dx, n), "normalize_backward adds to dx");

        const float values[] = {1234.1, 0, -1e-20, 3e30};
        for (size_t v = 0; v < 4; v++) {
            for (size_t k = 0; k < n; k++)
                p.x[k] = values[v];
            memset(dx, 0, n * sizeof *dx);
            normalize_forward(p.out, p.x, N, C);
            normalize_backward(dx, p.dout, p.x, N, C);
            for (size_t r = 0; r < N; r++) { // variance 0: 1e4 (dout - mean(dout))
                memset(z, 0, C * 8);
                plain_normalize_backward(d, doubles(p.dout + r * C, C), z, 1e4, C);
                agree("A14: dx of a constant row", dx + r * C, d, 8, C, GRAD, 1e4);
            }
            CHECK(all_zero(p.out, n), "A14: %g normalizes to 0", (double)values[v]);
        }
    }
}

// embed_loss: the embedding of tokens . dout; x = wte, w = wpe.
static inline double embed_loss(void *context)
{
    Pair *p = context;
    embed_forward(p->out, p->tokens, p->x, p->w, p->N / 4, 4, p->C);
    return dot(p->out, p->dout, p->N * p->C);
}

// test_embed: central differences; A19: one token, repeated: the plain sum, and the same bits
// twice.
static inline void test_embed(void)
{
    enum { B = 3, T = 4, V = 5, C = 19, MANY = 4096 };
    int tokens[B * T] = {0, 1, 2, 3, 4, 4, 4, 0, 2, 1, 1, 1};
    Pair p = {.N = B * T, .C = C, .tokens = tokens, .out = reals(B * T * C)};
    p.x = normals(V * C, 1);
    p.w = normals(T * C, 1);
    p.dout = normals(B * T * C, 1);
    float *dwte = reals(V * C), *dwpe = reals(T * C);
    embed_backward(dwte, dwpe, p.dout, tokens, B, T, C);
    central_difference("embed dwte", embed_loss, &p, p.x, dwte, V * C, 0);
    central_difference("embed dwpe", embed_loss, &p, p.w, dwpe, T * C, 0);

    int *same = take(MANY * sizeof *same);
    float *dout = normals(MANY * C, 1), *d1 = reals(V * C), *d2 = reals(V * C);
    double sum[C] = {0};
    for (size_t i = 0; i < MANY; i++)
        same[i] = 3;
    for (size_t i = 0; i < MANY * C; i++)
        sum[i % C] += dout[i];
    embed_backward(d1, reals(MANY / 8 * C), dout, same, 8, MANY / 8, C);
    embed_backward(d2, reals(MANY / 8 * C), dout, same, 8, MANY / 8, C);
    agree("A19: dwte of a repeated token", d1 + 3 * C, sum, 8, C, GRAD, 0);
    CHECK(same_bits(d1, d2, V * C), "A19: two runs, the same bits");
    CHECK(all_zero(d1, 3 * C) && all_zero(d1 + 4 * C, C), "A19: other tokens have no gradient");
}

// crossentropy_loss: the mean loss of x = logits.
static inline double crossentropy_loss(void *context)
{
    Pair *p = context;
    return crossentropy(p->out, p->predictions, p->dout, p->x, p->tokens, p->N, p->C);
}

// test_crossentropy: central differences, IGNORE, argmax, large logits; A15: no target at all.
static inline void test_crossentropy(void)
{
    enum { N = 6, V = 7 };
    int targets[N] = {0, IGNORE, 6, 3, IGNORE, 2}, none[N], predictions[N];
    Pair p = {.N = N, .C = V, .tokens = targets, .predictions = predictions, .out = reals(N)};
    p.x = normals(N * V, 2);
    p.dout = reals(N * V);
    float *d = reals(N * V), *again = reals(N);
    double loss = crossentropy(again, predictions, d, p.x, targets, N, V), plain = 0;
    for (size_t n = 0; n < N; n++) {
        double sum = 0;
        for (size_t v = 0; v < V; v++)
            sum += exp((double)p.x[n * V + v]);
        plain += targets[n] == IGNORE ? 0 : (log(sum) - p.x[n * V + (size_t)targets[n]]) / 4;
        if (targets[n] == IGNORE)
            CHECK(all_zero(d + n * V, V) && again[n] == 0, "an ignored target has no gradient");
    }
    CHECK(fabs(loss - plain) < FORWARD * plain, "crossentropy: %.12g, got %.12g", plain, loss);
    CHECK(crossentropy_loss(&p) == loss, "crossentropy with and without gradient agree");
    central_difference("crossentropy", crossentropy_loss, &p, p.x, d, N * V, 0);

    for (size_t n = 0; n < N; n++)
        none[n] = IGNORE;
    memset(d, CANARY, N * V * sizeof *d);
    loss = crossentropy(again, predictions, d, p.x, none, N, V);
    CHECK(loss == 0 && all_zero(d, N * V) && all_zero(again, N), "A15: no target, loss %g", loss);

    float *x = reals(2 * V), losses[2];
    for (size_t v = 0; v < V; v++)
        x[V + v] = v == 2 || v == 4 ? 1e4 : -1e4;
    loss = crossentropy(losses, predictions, d, x, (int[]){3, 4}, 2, V);
    CHECK(predictions[0] == 0 && predictions[1] == 2, "argmax takes the lowest of equals");
    CHECK(fabs(loss - (log(7.0) + log(2.0)) / 2) < 1e-6, "logits of 1e4: loss %g", loss);
    CHECK(first_not_finite(d, 2 * V, sizeof *d) == 2 * V, "logits of 1e4: finite gradient");
}

// exp_array: out (n) = exp_ps of x (n), in vectors.
__attribute__((noinline)) static void exp_array(float *out, const float *x, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = exp_ps(x[i]);
}

// exp_error: the larger of worst and exp_ps's relative error at x.
static inline double exp_error(double worst, float x)
{
    double exact = exp((double)x), error = fabs(exp_ps(x) - exact) / exact;
    return isnan(worst) || error <= worst ? worst : error; // NaN stays
}

// test_exp: STYLE.md 17's promises, E09: every lane as the scalar.
static inline void test_exp(void)
{
    const float edge = 88;
    double worst = 0, below = 0;
    for (long i = 0; i <= 4000000; i++)
        worst = exp_error(worst, -87 + 175 * (double)i / 4e6);
    for (int k = -125; k <= 126; k++) { // where the rounded exponent changes, and where 2^k is
        float at[] = {(k + 0.5) * log(2.0), k * log(2.0)};
        for (int i = 0; i < 2; i++)
            worst = exp_error(exp_error(exp_error(worst, at[i]), at[i] * (1 + FLT_EPSILON)),
                              at[i] * (1 - FLT_EPSILON));
    }
    for (float x = -87; x > -200; x -= 0.001) {
        double error = fabs(exp_ps(x) - exp((double)x));
        below = isnan(below) || error <= below ? below : error;
    }
    printf("exp_ps: worst relative error %.3g, below -87 absolute %.3g\n", worst, below);
    CHECK(worst < 2e-7, "exp_ps from -87 to 88: relative error %.3g", worst);
    CHECK(below < 1.2e-38, "exp_ps below -87: absolute error %.3g", below);
    CHECK(exp_ps(0) == 1 && exp_ps(-INFINITY) == 0 && exp_ps(-1e30) == 0 && exp_ps(-1000) == 0,
          "exp_ps of 0, -inf and large negative numbers");
    CHECK(exp_ps(INFINITY) == INFINITY && exp_ps(1000) == INFINITY && isfinite(exp_ps(edge)),
          "exp_ps of inf, 1000, 88");
    CHECK(isnan(exp_ps(NAN)), "exp_ps keeps NaN");
    for (size_t n = 1; n <= 17; n++) {
        static const double values[] = {-1000, -100, -87.5, -0.1,      0,        1e-30, 3.3,
                                        88.2,  100,  1000,  -INFINITY, INFINITY, NAN};
        float x[17], y[17];
        for (size_t shift = 0; shift < 13; shift++) {
            size_t same = 0;
            for (size_t i = 0; i < n; i++)
                x[i] = values[(i + shift) % 13];
            exp_array(y, x, n);
            for (size_t i = 0; i < n; i++) {
                float one = exp_ps(x[i]);
                same += same_bits(&one, y + i, 1) || (isnan(one) && isnan(y[i]));
            }
            CHECK(same == n, "E09: %zu lanes, of which %zu equal the scalar", n, same);
        }
    }
}

// optimizer_weights: a small table of parameters, allocated: a matrix with decay and two vectors.
static inline void optimizer_weights(Weights *w, size_t rows)
{
    static struct {
        float *matrix, *bias, *gain;
    } params, grads;
    const Tensor table[] = {
        {"matrix", {rows, 33}, INIT_NORMAL(0.5), DECAY, 1, 0},
        {"bias", {rows}, INIT_NORMAL(0.5), NO_DECAY, 2, sizeof(float *)},
        {"gain", {1}, INIT_NORMAL(0.5), NO_DECAY, 0.5, 2 * sizeof(float *)},
    };
    weights_plan(w, table, 3, sizeof(float));
    weights_alloc(w, &params, &grads, 1);
}

// plain_adamw: one update of p, m, v (n) as arXiv 1711.05101 writes it, in double; number from 1.
static inline void plain_adamw(double *p, double *m, double *v, const float *g, size_t n,
                               const Training *t, double rate, double decay, double scale,
                               int number)
{
    for (size_t i = 0; i < n; i++) {
        double d = scale * g[i];
        m[i] = t->beta1 * m[i] + (1 - t->beta1) * d;
        v[i] = t->beta2 * v[i] + (1 - t->beta2) * d * d;
        double m_hat = m[i] / (1 - pow(t->beta1, number));
        double v_hat = v[i] / (1 - pow(t->beta2, number));
        p[i] -= rate * (m_hat / (sqrt(v_hat) + t->adam_eps) + decay * p[i]);
    }
}

// test_adamw: five updates of every tensor, with decay, lr_scale and clipping, against double.
static inline void test_adamw(void)
{
    const Training t = {.beta1 = 0.9, .beta2 = 0.999, .adam_eps = 1e-8, .weight_decay = 0.1};
    Weights w;
    double *p[TENSORS_MAX], *m[TENSORS_MAX], *v[TENSORS_MAX];
    optimizer_weights(&w, 20);
    for (int k = 0; k < w.params.n; k++) {
        size_t n = tensor_size(&w.params.table[k]);
        p[k] = doubles(arena_data(&w.params, k), n);
        m[k] = take(n * sizeof *m[k]);
        v[k] = take(n * sizeof *v[k]);
    }
    for (int step = 0; step < 5; step++) {
        for (int k = 0; k < w.params.n; k++) {
            const Tensor *row = &w.params.table[k];
            float *g = arena_data(&w.grads, k);
            size_t n = tensor_size(row);
            normal_fill(g, n, pow(10, step - 3));
            plain_adamw(p[k], m[k], v[k], g, n, &t, 1e-2 * row->lr_scale, row->decay ? 0.1 : 0, 0.3,
                        step + 1);
        }
        adamw(&w, &t, 1e-2, 0.3, step);
    }
    for (int k = 0; k < w.params.n; k++) {
        size_t n = tensor_size(&w.params.table[k]);
        agree("adamw p", arena_data(&w.params, k), p[k], sizeof *p[k], n, FORWARD, 0);
        agree("adamw m", arena_data(&w.m, k), m[k], sizeof *m[k], n, FORWARD, 0);
        agree("adamw v", arena_data(&w.v, k), v[k], sizeof *v[k], n, FORWARD, 0);
    }
    weights_free(&w);
}

// test_gradient_norm: over every tensor, in double; a NaN or Inf anywhere in a gradient shows.
static inline void test_gradient_norm(void)
{
    Weights w;
    double sum = 0;
    optimizer_weights(&w, 20);
    for (int k = 0; k < w.grads.n; k++) {
        float *g = arena_data(&w.grads, k);
        size_t n = tensor_size(&w.grads.table[k]);
        normal_fill(g, n, 1);
        sum += dot(g, g, n);
    }
    double norm = gradient_norm(&w.grads);
    CHECK(fabs(norm - sqrt(sum)) < 1e-12 * norm, "gradient norm %.17g, got %.17g", sqrt(sum), norm);
    for (int k = 0; k < w.grads.n; k++)
        for (int i = 0; i < 4; i++) {
            float *at = arena_data(&w.grads, k);
            at += i & 1 ? tensor_size(&w.grads.table[k]) - 1 : 0;
            float keep = *at;
            *at = i & 2 ? NAN : INFINITY;
            CHECK(!is_finite_bits(gradient_norm(&w.grads)), "F08: %s", w.grads.table[k].name);
            *at = keep;
        }
    weights_free(&w);
}

// test_zero_gradients: A22: 2000 updates without gradient after 10 real ones do not slow down, and
// leave no denormal numbers.
static inline void test_zero_gradients(void)
{
    const Training t = {.beta1 = 0.9, .beta2 = 0.999, .adam_eps = 1e-8};
    Weights w;
    double first = INFINITY, last = INFINITY; // the fastest of the first and of the last 100
    size_t denormal = 0;
    optimizer_weights(&w, 300);
    for (int step = 0; step < 2010; step++) {
        for (int k = 0; k < w.grads.n && step <= 10; k++)
            normal_fill(arena_data(&w.grads, k), tensor_size(&w.grads.table[k]),
                        step < 10 ? 1e-3 : 0);
        double start = seconds_now();
        adamw(&w, &t, 1e-3, 1, step);
        double seconds = seconds_now() - start;
        first = step >= 10 && step < 110 ? fmin(first, seconds) : first;
        last = step >= 1910 ? fmin(last, seconds) : last;
        for (int k = 0; k < w.m.n && step % 10 == 9; k++) {
            const float *m = arena_data(&w.m, k), *v = arena_data(&w.v, k), least = FLT_MIN;
            for (size_t i = 0; i < tensor_size(&w.m.table[k]); i++)
                denormal += (m[i] != 0 && fabs(m[i]) < least) + (v[i] != 0 && v[i] < least);
        }
    }
    CHECK(denormal == 0, "A22: %zu denormal moments", denormal);
    CHECK(last <= 1.5 * first, "A22: an update took %.3g s, in the end %.3g s", first, last);
    weights_free(&w);
}

// test_comparison: comparisons go red over NaN, Inf, a sign, a skipped element, one wrong element
// of a tiny tensor (E11), and stay green over rounding; noise is measured against the largest.
static inline void test_comparison(void)
{
    enum { N = 100 };
    const size_t size = sizeof(float);
    float *x = normals(N, 1e-6), *y = reals(N), *zero = reals(N);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t at = 0; at < N; at += 33) {
        for (size_t i = 0; i < 3; i++) {
            memcpy(y, x, N * size);
            y[at] = bad[i];
            CHECK(!compare(y, size, x, size, N, 1e-2, 1).ok, "a bad value at %zu is seen", at);
            CHECK(!compare(x, size, y, size, N, 1e-2, 0).ok, "and in the reference");
            CHECK(!compare(y, size, y, size, N, 1e-2, 0).ok, "and in both");
        }
        memcpy(y, x, N * size);
        y[at] = -y[at];
        CHECK(!compare(y, size, x, size, N, BOUND_GRAD_FP32, 0).ok, "a sign at %zu is seen", at);
        y[at] = -y[at] * 1.01;
        CHECK(!compare(y, size, x, size, N, BOUND_GRAD_FP32, 0).ok, "E11: 1%% at %zu is seen", at);
    }
    memcpy(y, x, N * size);
    y[N - 1] = 0;
    CHECK(!compare(y, size, x, size, N, BOUND_GRAD_FP32, 0).ok, "a skipped last element is seen");
    CHECK(!compare(zero, size, x, size, N, BOUND_GRAD_FP32, 0).ok, "zeros for numbers are seen");
    CHECK(!compare(x, size, zero, size, N, BOUND_GRAD_FP32, 0).ok, "numbers for zeros are seen");
    CHECK(compare(zero, size, zero, size, N, BOUND_GRAD_FP32, 0).ok, "zeros agree");
    for (size_t i = 0; i < N; i++)
        y[i] = x[i] * (1 + 1e-6 * (i % 2));
    CHECK(compare(y, size, x, size, N, BOUND_FORWARD_FP32, 0).ok, "E11: rounding passes");
    CHECK(compare(x, size, zero, size, N, BOUND_GRAD_FP32, 1).ok,
          "noise under 1e-4 of the largest");
    CHECK(!compare(x, size, zero, size, N, BOUND_GRAD_FP32, 1e-2).ok, "noise over it is seen");
}

// LAYER_TESTS: the rows of TESTS that this file has.
#define LAYER_TESTS \
    {"comparison", test_comparison, 0}, \
    {"matmul", test_matmul, 0}, \
    {"normalize", test_normalize, 0}, \
    {"embed", test_embed, 0}, \
    {"crossentropy", test_crossentropy, 0}, \
    {"exp", test_exp, 0}, \
    {"adamw", test_adamw, 0}, \
    {"gradient norm", test_gradient_norm, 0}, \
    {"zero gradients", test_zero_gradients, 0}

#endif
