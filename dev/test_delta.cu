// test_delta.cu: what a dump cannot show of train_deltanet.cu's delta rule, by tokens or by chunks:
// states that come in and go out with their gradients, beta of exactly 0 and 2, keys of zero, equal
// keys; held against the chunks of dev/delta/delta_chunk.h in double. dev/test_cuda.sh builds it
// with -DTESTING, and dev/emulate/test.sh with TRAINER as well: the trainer as prepare.py wrote it.
#ifndef TRAINER
#define TRAINER "../train_deltanet.cu"
#endif
#include TRAINER
#include "test_arrays.cuh"
namespace plain { // the trainer has functions of these names too
#define DELTA_REAL double
#include "delta/delta_chunk.h"
}

enum { RANDOM, TWO_KEYS, ONE_KEY, ZERO_KEYS };
enum { BETA_ANY, BETA_0, BETA_2 };

typedef struct {
    size_t B, T, NH, HS;
    int keys, betas, form;
} Case;

// draw_inputs: qkv (B,T,3C) with q and k of length 1, beta (B,T,NH), and normal numbers for others.
static void draw_inputs(const Case *c, Array *qkv, Array *beta, Array *others, int n)
{
    const size_t C = c->NH * c->HS;
    for (size_t row = 0; row < c->B * c->T; row++)
        for (size_t h = 0; h < 3 * c->NH; h++) {
            double *x = qkv->host + row * 3 * C + h * c->HS, squares = 1e-6;
            const int key = h / c->NH == 1;
            const size_t from = !key || c->keys == RANDOM ? row
                                : c->keys == TWO_KEYS     ? rand_below(1, 2, row * 3 + h, 2)
                                                          : 0;
            for (size_t j = 0; j < c->HS; j++) {
                x[j] = key && c->keys == ZERO_KEYS ? 0
                                                   : rand_normal(1, h, from * c->HS + j);
                squares += x[j] * x[j];
            }
            for (size_t j = 0; j < c->HS && h < 2 * c->NH; j++)
                x[j] /= sqrt(squares);
        }
    for (size_t i = 0; i < beta->n; i++)
        beta->host[i] = c->betas == BETA_0   ? 0
                        : c->betas == BETA_2 ? 2
                                             : 2 * rand_uniform(1, 1000, i);
    array_up(qkv);
    array_up(beta);
    for (int k = 0; k < n; k++) {
        for (size_t i = 0; i < others[k].n; i++)
            others[k].host[i] = rand_normal(1, 2000 + (uint64_t)k, i);
        array_up(&others[k]);
    }
}

// reference: out (B,T,C), final (B,NH,HS,HS), dqkv, dbeta, dinitial = of all heads, in double.
static void reference(const Case *c, double *out, double *final, double *dqkv, double *dbeta,
                      double *dinitial, const Array *qkv, const Array *beta, const Array *dout,
                      const Array *initial, const Array *dfinal)
{
    const size_t T = c->T, HS = c->HS, C = c->NH * HS, n = T * HS, size = HS * HS;
    double *x = (double *)alloc_zero(8 * n + 2 * T, 8, "reference"), *b = x + 8 * n;
    for (size_t i = 0; i < c->B * c->NH; i++) {
        const size_t at = i / c->NH * T, h = i % c->NH;
        plain::DeltaChunk chunk = plain::delta_chunk_make(T, HS, 64);
        const plain::DeltaGrads g = {x + 4 * n, x + 5 * n, x + 6 * n, b + T, dinitial + i * size};
        for (size_t k = 0; k < 3; k++)
            head_of(x + k * n, qkv->host + at * 3 * C + k * C + h * HS, 3 * C, T, HS, 0);
        head_of(x + 3 * n, dout->host + at * C + h * HS, C, T, HS, 0);
        head_of(b, beta->host + at * c->NH + h, c->NH, T, 1, 0);
        plain::delta_chunk_forward(x + 7 * n, &chunk, x, x + n, x + 2 * n, b,
                                   initial->host + i * size);
        memcpy(final + i * size, chunk.S + chunk.NC * size, size * 8);
        plain::delta_chunk_backward(g, x + 3 * n, dfinal->host + i * size, &chunk, x, x + n,
                                    x + 2 * n, b);
        head_of(x + 7 * n, out + at * C + h * HS, C, T, HS, 1);
        for (size_t k = 0; k < 3; k++)
            head_of(x + (4 + k) * n, dqkv + at * 3 * C + k * C + h * HS, 3 * C, T, HS, 1);
        head_of(b + T, dbeta + at * c->NH + h, c->NH, T, 1, 1);
        plain::delta_chunk_free(&chunk);
    }
    free(x);
}

// agrees: check that `got` is `ref` within the bound.
static void agrees(const Case *c, const char *what, Array *got, const double *ref, double bound)
{
    const Comparison e = array_compare(got, ref, bound);
    CHECK(e.ok, "form %d B=%zu T=%zu NH=%zu HS=%zu, keys %d, betas %d: %s: relative error %.3g, "
          "bound %g", c->form, c->B, c->T, c->NH, c->HS, c->keys, c->betas, what, e.rel_l2, bound);
}

// test_case: forward and backward of one case, from a state to a state. By chunks, keys that repeat
// or beta 2, where nothing is forgotten, have the wider bound of STYLE.md 39.
static void test_case(Case c)
{
    const size_t N = c.B * c.T, C = c.NH * c.HS, states = c.B * C * c.HS, X = sizeof(floatX);
    const size_t chunks = c.form == CHUNK ? c.B * c.NH * ((c.T + CS - 1) / CS) : 1;
    const int wide = c.form == CHUNK && (c.keys == TWO_KEYS || c.keys == ONE_KEY ||
                                         c.betas == BETA_2);
    const double forward = wide ? 5e-2 : X == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    const double grad = wide ? 5e-2 : X == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
    Array qkv = array_new(3 * N * C, X), beta = array_new(N * c.NH, 4), out = array_new(N * C, X);
    Array others[] = {array_new(states, 4), array_new(states, 4), array_new(N * C, X)};
    Array u = array_new(N * C, c.form == CHUNK ? X : 4), final = array_new(states, 4);
    Array pairs = array_new(chunks * 3 * CS * CS, X), dqkv = array_new(3 * N * C, X);
    Array before = array_new(chunks * c.HS * c.HS, X), dbefore = array_new(before.n, X);
    Array dbeta = array_new(N * c.NH, 4), dinitial = array_new(states, 4);
    const Kept kept = {(float *)u.device, (floatX *)u.device, (floatX *)pairs.device,
                       (floatX *)before.device};
    double *refs[5];
    const size_t sizes[] = {N * C, states, 3 * N * C, N * c.NH, states};
    for (int i = 0; i < 5; i++)
        refs[i] = (double *)alloc_zero(sizes[i], 8, "reference");
    draw_inputs(&c, &qkv, &beta, others, 3);
    delta_forward((floatX *)out.device, kept, (float *)final.device, (floatX *)qkv.device,
                  (float *)beta.device, (float *)others[0].device, c.B, c.T, C, c.NH, c.form, 0);
    delta_backward((floatX *)dqkv.device, (float *)dbeta.device, (float *)dinitial.device,
                   (floatX *)dbefore.device, (floatX *)others[2].device,
                   (float *)others[1].device, kept, (float *)final.device, (floatX *)qkv.device,
                   (float *)beta.device, c.B, c.T, C, c.NH, c.form, 0);
    reference(&c, refs[0], refs[1], refs[2], refs[3], refs[4], &qkv, &beta, &others[2], &others[0],
              &others[1]);
    agrees(&c, "out", &out, refs[0], forward);
    agrees(&c, "final", &final, refs[1], forward);
    agrees(&c, "dqkv", &dqkv, refs[2], grad);
    agrees(&c, "dbeta", &dbeta, refs[3], grad);
    agrees(&c, "dinitial", &dinitial, refs[4], grad);
    Array *all[] = {&qkv, &beta, &out, others, others + 1, others + 2, &u, &final, &pairs, &dqkv,
                    &before, &dbefore, &dbeta, &dinitial};
    for (Array *a : all)
        array_free(a);
    for (double *r : refs)
        free(r);
}

// test_form: all cases of a form.
static void test_form(int form)
{
    const size_t lengths[] = {1, 2, 63, 64, 65, 255}, heads[] = {8, 32, 33, 40, 64, 72, 128};
    for (int keys = RANDOM; keys <= ZERO_KEYS; keys++)
        for (int betas = BETA_ANY; betas <= BETA_2; betas++)
            test_case({1, 65, 2, 32, keys, betas, form});
    for (size_t T : lengths)
        test_case({2, T, 3, 32, TWO_KEYS, BETA_ANY, form});
    for (size_t HS : heads)
        if (form == RECURRENT || HS % 8 == 0)
            test_case({1, 70, 2, HS, RANDOM, BETA_ANY, form});
    test_case({1, 1000, 1, 32, RANDOM, BETA_ANY, form});
    test_case({1, 1000, 1, 32, TWO_KEYS, BETA_2, form});
}

int main(void)
{
    cuda_start();
    test_form(RECURRENT);
    test_case({1, 4096, 1, 32, ONE_KEY, BETA_2, RECURRENT});
#ifdef PRECISION_BF16
    test_form(CHUNK);
    test_case({25, 65, 2, 128, RANDOM, BETA_ANY, CHUNK}); // blocks of 4 groups of rows, of 8, of 2
    test_case({50, 2, 2, 128, RANDOM, BETA_ANY, CHUNK});
    test_case({25, 65, 2, 64, RANDOM, BETA_ANY, CHUNK});
#endif
    return test_report();
}
