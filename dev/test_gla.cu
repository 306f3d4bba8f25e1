// test_gla.cu: what a dump cannot show of train_metala.cu's recurrence, by tokens or by chunks:
// states that come in and go out with their gradients, gates from 0 to -30, one token that forgets
// all; held against the chunks of dev/gla/gla_chunk.h in double. dev/test_cuda.sh builds it with
// -DTESTING, and dev/emulate/test.sh with TRAINER as well: the trainer as prepare.py wrote it.
#ifndef TRAINER
#define TRAINER "../train_metala.cu"
#endif
#include TRAINER
#include "test_arrays.cuh"
namespace plain { // the trainer has functions of these names too
#define GLA_REAL double
#include "gla/gla_chunk.h"
}

// Gates: MetaLA's, z normal, near 8, or -20; HGRN2's, z normal times 3, tau 1; -3 everywhere; 0 or
// -30 everywhere; one token of -30 among those of 0; -30 or 0 at random.
enum { RANDOM, LONG, SHORT, HGRN2, STRONG, NOTHING_FADES, ALL_FADES, ONE_FADES, EITHER, GATES };

typedef struct {
    size_t B, T, NH, DK, DV;
    int gates, stateful, form; // stateful: states come in, and the gradient of what goes out
} Case;

// gate_of: ln alpha of key i of token t, all tokens and heads counted.
static double gate_of(int gates, size_t t, size_t i)
{
    const double x = rand_normal(3, t, i);
    const double z = gates == LONG ? 8 + x : gates == SHORT ? -20 + x : gates == HGRN2 ? 3 * x : x;
    const double g = -log1p(exp(-z)) / (gates == HGRN2 ? 1 : 16);
    switch (gates) {
    case STRONG: return -3;
    case NOTHING_FADES: return 0;
    case ALL_FADES: return -30;
    case ONE_FADES: return t % 50 == 20 ? -30 : 0;
    case EITHER: return x < 0 ? -30 : 0;
    default: return g < -30 ? -30 : g;
    }
}

// draw_inputs: q, k (N,K), v, dout (N,C), two states in `others`, normal, and g (N,K); k is about
// 1 - exp(g) of that unless nothing fades.
static void draw_inputs(const Case *c, Array *g, Array *others, int n)
{
    const size_t K = c->NH * c->DK;
    for (size_t i = 0; i < g->n; i++)
        g->host[i] = gate_of(c->gates, i / K, i % K);
    array_up(g);
    for (int k = 0; k < n; k++) {
        for (size_t i = 0; i < others[k].n; i++)
            others[k].host[i] = rand_normal(1, (uint64_t)k, i);
        for (size_t i = 0; k == 1 && i < g->n && c->gates != NOTHING_FADES; i++)
            others[k].host[i] *= -expm1(g->host[i]) + 1e-3;
        array_up(&others[k]);
    }
}

// Outputs, as numbers of `refs` and of arrays: o, S_T, gradients of q, k, v, g, S_0.
enum { OUT, FINAL, DQ, DK_, DV_, DG, DINITIAL, OUTPUTS };
static const char *const NAMES[] = {"o", "final", "dq", "dk", "dv", "dg", "dinitial"};

// reference: all outputs of all heads, in double; in: q, k, v, dout, initial, dfinal.
static void reference(const Case *c, double **refs, const Array *g, const Array *in)
{
    const size_t T = c->T, DK = c->DK, DV = c->DV, K = c->NH * DK, C = c->NH * DV, size = DK * DV;
    const size_t most = T * (DK > DV ? DK : DV);
    const double scale = 1 / sqrt((double)DK);
    double *x = (double *)alloc_zero(10 * most, 8, "reference");
    for (size_t i = 0; i < c->B * c->NH; i++) {
        const size_t at = i / c->NH * T, h = i % c->NH, keys = at * K + h * DK;
        const size_t values = at * C + h * DV;
        plain::GlaChunk chunk = plain::gla_chunk_make(T, DK, DV, 64);
        const plain::GlaGrads d = {x + 6 * most, x + 7 * most, x + 8 * most, x + 9 * most,
                                   refs[DINITIAL] + i * size};
        head_of(x, in[0].host + keys, K, T, DK, 0);
        head_of(x + most, in[1].host + keys, K, T, DK, 0);
        head_of(x + 2 * most, in[2].host + values, C, T, DV, 0);
        head_of(x + 3 * most, in[3].host + values, C, T, DV, 0);
        head_of(x + 4 * most, g->host + keys, K, T, DK, 0);
        plain::gla_chunk_forward(x + 5 * most, &chunk, x, x + most, x + 4 * most, x + 2 * most,
                                 c->stateful ? in[4].host + i * size : NULL, scale);
        memcpy(refs[FINAL] + i * size, chunk.S + chunk.NC * size, size * 8);
        plain::gla_chunk_backward(d, x + 3 * most, c->stateful ? in[5].host + i * size : NULL,
                                  &chunk, x, x + most, x + 4 * most, x + 2 * most, scale);
        head_of(x + 5 * most, refs[OUT] + values, C, T, DV, 1);
        head_of(d.q, refs[DQ] + keys, K, T, DK, 1);
        head_of(d.k, refs[DK_] + keys, K, T, DK, 1);
        head_of(d.g, refs[DG] + keys, K, T, DK, 1);
        head_of(d.v, refs[DV_] + values, C, T, DV, 1);
        CHECK(chunk.highest <= 0, "an exponent of %g in the reference", chunk.highest);
        plain::gla_chunk_free(&chunk);
    }
    free(x);
}

// test_case: forward and backward of one case.
static void test_case(Case c)
{
    const size_t N = c.B * c.T, K = c.NH * c.DK, C = c.NH * c.DV, X = sizeof(floatX);
    const size_t states = c.B * K * c.DV, chunks = c.B * c.NH * ((c.T + CS - 1) / CS);
    const size_t sizes[] = {N * C, states, N * K, N * K, N * C, N * K, states};
    const GlaShape s = {c.B, c.T, c.NH, c.DK, c.DV, K, K, C, (float)(1 / sqrt((double)c.DK))};
    Array g = array_new(N * K, 4), outs[OUTPUTS];
    Array in[] = {array_new(N * K, X), array_new(N * K, X), array_new(N * C, X),
                  array_new(N * C, X), array_new(states, 4), array_new(states, 4)};
    Array tiles = array_new(chunks * c.DK * c.DV, 4), pairs = array_new(chunks * CS * CS, X);
    Array before = array_new(chunks * c.DK * c.DV, X), after = array_new(before.n, X);
    const GlaKept kept = {(float *)tiles.device, (floatX *)before.device, (floatX *)pairs.device};
    const floatX *q = (floatX *)in[0].device, *k = (floatX *)in[1].device;
    const floatX *v = (floatX *)in[2].device, *dout = (floatX *)in[3].device;
    const float *initial = c.stateful ? (float *)in[4].device : NULL;
    const float *dfinal = c.stateful ? (float *)in[5].device : NULL;
    double *refs[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) {
        refs[i] = (double *)alloc_zero(sizes[i], 8, "reference");
        outs[i] = array_new(sizes[i], i == FINAL || i == DG || i == DINITIAL ? 4 : X);
    }
    draw_inputs(&c, &g, in, 6);
    gla_forward((floatX *)outs[OUT].device, kept, (float *)outs[FINAL].device, q, k,
                (float *)g.device, v, initial, s, c.form, 0);
    gla_backward((floatX *)outs[DQ].device, (floatX *)outs[DK_].device, (float *)outs[DG].device,
                 (floatX *)outs[DV_].device, (float *)outs[DINITIAL].device,
                 (floatX *)after.device, dout, dfinal, kept, (float *)outs[FINAL].device, q, k,
                 (float *)g.device, v, initial, s, c.form, 0);
    reference(&c, refs, &g, in);
    double largest = 0; // norm of a gradient
    for (int i = DQ; i < OUTPUTS; i++)
        largest = fmax(largest, compare(refs[i], 8, refs[i], 8, sizes[i], 0, 0).norm_ref);
    for (int i = 0; i < OUTPUTS; i++) {
        const double forward = X == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
        const double grad = X == 2 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32;
        // where all gates are -30, dg is 1e-13, and by tokens less than what rounding leaves of the
        // row sums of S D; it may be as far off as any other gradient
        const int lost = i == DG && c.gates == ALL_FADES && c.form == RECURRENT;
        array_down(&outs[i]);
        const Comparison e = compare(outs[i].host, 8, refs[i], 8, sizes[i],
                                     i <= FINAL ? forward : grad, lost ? largest : 0);
        CHECK(e.ok, "form %d B=%zu T=%zu NH=%zu DK=%zu DV=%zu, gates %d, states %d: %s: "
              "relative error %.3g, bound %g", c.form, c.B, c.T, c.NH, c.DK, c.DV, c.gates,
              c.stateful, NAMES[i], e.rel_l2, i <= FINAL ? forward : grad);
        free(refs[i]);
        array_free(&outs[i]);
    }
    Array *all[] = {&g,     in,     in + 1, in + 2,  in + 3, in + 4,
                    in + 5, &tiles, &pairs, &before, &after};
    for (Array *a : all)
        array_free(a);
}

// test_form: all cases of a form: gates; lengths; heads of every kernel.
static void test_form(int form)
{
    const size_t lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 255, 258};
    const size_t heads[][2] = {{8, 8}, {16, 40}, {32, 64}, {40, 32}, {64, 64}, {64, 128}, {72, 64},
                               {128, 128}};
    const size_t odd[][2] = {{1, 1}, {5, 3}, {33, 60}, {100, 33}, {65, 256}, {256, 129}};
    for (int gates = RANDOM; gates < GATES; gates++)
        for (int stateful = 0; stateful < 2; stateful++)
            test_case({1, 130, 2, 24, 32, gates, stateful, form});
    for (size_t T : lengths)
        test_case({2, T, 3, 16, 24, HGRN2, 1, form});
    for (const size_t *n : heads)
        test_case({1, 130, 1, n[0], n[1], RANDOM, 1, form});
    for (const size_t *n : odd)
        if (form == RECURRENT)
            test_case({3, 67, 1, n[0], n[1], RANDOM, 1, form});
    test_case({1, 600, 1, 16, 16, LONG, 1, form});
}

int main(void)
{
    cuda_start();
    test_form(RECURRENT);
#ifdef PRECISION_BF16
    test_form(CHUNK);
    test_case({100, 2, 2, 64, 64, RANDOM, 1, CHUNK}); // enough heads for blocks of 64 values, of 32
    test_case({50, 2, 1, 128, 128, RANDOM, 1, CHUNK});
    test_case({101, 2, 1, 32, 64, RANDOM, 1, CHUNK});
#endif
    return test_report();
}
