// scan_ladder.cuh: what scan_real.cu and scan_complex.cu have in common on the host: the table of
// kernels, the reference in double, the cases and what must hold of every kernel.
#ifndef SEQ_DEV_SCAN_LADDER_CUH
#define SEQ_DEV_SCAN_LADDER_CUH

#include "scan.cuh"
#include "../cumsum/cases.cuh"

// ---- the table ----

// Sizes: VEC channels a thread of a 16-byte access of states; RING: of a lane that walks.
template <typename I>
struct Sizes {
    typedef typename Scan<I>::V V;
    enum { VEC = 16 / sizeof(V), RING = sizeof(I) == 2 ? 2 : 1, ROWS = sizeof(V) == 8 ? 8 : 16 };
};

// Of 32 RING channels, and positions: see scan_best.
static const size_t FEW_STRIPS = 96, MANY_STRIPS = 528, LONG_T = 2048;

// scan_walk: walk with U rows in flight; 16 bytes a thread where U > 1 and rows are aligned.
template <typename I, int BACK, int U>
static void scan_walk(const void *problem, cudaStream_t stream)
{
    const Scan<I> *p = (const Scan<I> *)problem;
    if (scan_empty(p))
        return;
    if (U > 1 && scan_wide(p))
        walk<I, Sizes<I>::VEC, U, BACK>(p, stream);
    else
        walk<I, 1, U, BACK>(p, stream);
}

// scan_chunks: chunks, 16 bytes a thread where rows are aligned.
template <typename I, int BACK>
static void scan_chunks(const void *problem, cudaStream_t stream)
{
    const Scan<I> *p = (const Scan<I> *)problem;
    if (scan_empty(p))
        return;
    if (scan_wide(p))
        chunks<I, Sizes<I>::VEC, BACK>(p, stream);
    else
        chunks<I, 1, BACK>(p, stream);
}

// scan_ring: ring with WIDER times the channels a lane; rows must be aligned.
template <typename I, int BACK, int WIDER, int STAGES>
static void scan_ring(const void *problem, cudaStream_t stream)
{
    const Scan<I> *p = (const Scan<I> *)problem;
    if (!scan_empty(p))
        ring<I, WIDER * Sizes<I>::RING, Sizes<I>::ROWS, STAGES, BACK>(p, stream);
}

// scan_tiles: 8 rows a thread forward, 6 backward: what two blocks have registers for.
template <typename I, int BACK, int LX, int ASYNC, int COLUMN>
static void scan_tiles(const void *problem, cudaStream_t stream)
{
    const Scan<I> *p = (const Scan<I> *)problem;
    const int ROWS = BACK ? 6 : 8;
    if (scan_empty(p))
        return;
    if (scan_wide(p))
        tiles<I, Sizes<I>::VEC, LX, ROWS, 2, ASYNC, COLUMN, BACK>(p, stream);
    else
        tiles<I, 1, 32, 2 * ROWS, 2, 0, COLUMN, BACK>(p, stream);
}

// scan_best: a ring where there are columns enough to keep the memory busy, with a shallow one
// where more warps than fit with a deep one; otherwise the chain. Over a long T the warps of a ring
// come to read far apart, and memory slows down: of numbers of 4 bytes the chain, whose tiles go in
// one order, is then faster (scan_real.cu).
template <typename I, int BACK>
static void scan_best(const void *problem, cudaStream_t stream)
{
    const Scan<I> *p = (const Scan<I> *)problem;
    const size_t wide = 32 * Sizes<I>::RING, strips = p->B * ((p->C + wide - 1) / wide);
    if (!scan_wide(p) || strips < FEW_STRIPS)
        scan_tiles<I, BACK, 8, 1, 0>(problem, stream);
    else if (sizeof(I) == 4 && p->T > LONG_T)
        scan_tiles<I, BACK, 16, !BACK, 0>(problem, stream);
    else if (strips > MANY_STRIPS)
        scan_ring<I, BACK, 1, 4>(problem, stream);
    else
        scan_ring<I, BACK, 1, 8>(problem, stream);
}

// not_wide: why a kernel of aligned rows refuses the problem, or NULL.
template <typename I>
static const char *not_wide(const void *problem)
{
    return scan_wide((const Scan<I> *)problem) ? NULL : "rows are not on 16-byte boundaries";
}

// too_long: why the slowest kernels, which would take seconds, refuse the problem, or NULL.
template <typename I>
static const char *too_long(const void *problem)
{
    return ((const Scan<I> *)problem)->T > 20000 ? "a thread a channel is too slow here" : NULL;
}

enum { KERNELS = 11, BEST = 11 };

// The kernels that do the same arithmetic, to the bit.
static const int SERIAL[] = {1, 2, 4, 5, 6};

// scan_table: the kernels of one direction.
template <typename I, int BACK>
static const BenchKernel *scan_table(void)
{
    static const BenchKernel kernels[KERNELS] = {
        {1, "thread a channel", scan_walk<I, BACK, 1>, too_long<I>},
        {2, "16 bytes, 8 rows in flight", scan_walk<I, BACK, 8>, too_long<I>},
        {3, "chunks: reduce, scan, run again", scan_chunks<I, BACK>, NULL},
        {4, "ring: a warp a strip, 8 stages", scan_ring<I, BACK, 1, 8>, not_wide<I>},
        {5, "4 with 4 stages", scan_ring<I, BACK, 1, 4>, not_wide<I>},
        {6, "4 with twice the channels", scan_ring<I, BACK, 2, 8>, not_wide<I>},
        {7, "column: a block a strip, next tile", scan_tiles<I, BACK, 8, 1, 1>, NULL},
        {8, "chain of tiles", scan_tiles<I, BACK, 16, 0, 0>, NULL},
        {9, "8 + next tile in flight", scan_tiles<I, BACK, 16, 1, 0>, NULL},
        {10, "9 with longer, narrower tiles", scan_tiles<I, BACK, 8, 1, 0>, NULL},
        {BEST, "by shape", scan_best<I, BACK>, NULL},
    };
    return kernels;
}

// ---- reference, in double ----

typedef struct {
    double re, im; // im: 0 of real numbers
} Z;

// z_at, z_put: number i of an array of P floats or doubles each.
template <int P, typename E>
static Z z_at(const E *p, size_t i)
{
    const Z z = {p[P * i], P == 2 ? (double)p[P * i + 1] : 0};
    return z;
}

template <int P>
static void z_put(double *p, size_t i, Z z)
{
    p[P * i] = z.re;
    if (P == 2)
        p[P * i + 1] = z.im;
}

// z_mul, z_conj, z_add: product, of real parts alone where P is 1; conjugate; sum.
template <int P>
static Z z_mul(Z a, Z b)
{
    const Z real = {a.re * b.re, 0}, z = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return P == 2 ? z : real;
}

static Z z_conj(Z z)
{
    z.im = -z.im;
    return z;
}

static Z z_add(Z a, Z b)
{
    a.re += b.re, a.im += b.im;
    return a;
}

static const size_t SIDE = 16; // channels that the reference takes side by side: one cache line

// scan_ref_forward: h (B,T,C) =, hT (B,C) =, of numbers of P parts. h0 NULL: 0.
template <int P>
static void scan_ref_forward(double *h, double *hT, const float *a, const float *x,
                             const float *h0, size_t B, size_t T, size_t C)
{
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
        for (size_t c0 = 0; c0 < C; c0 += SIDE) {
            Z s[SIDE];
            const size_t n = C - c0 < SIDE ? C - c0 : SIDE, first = b * C + c0;
            for (size_t k = 0; k < n; k++)
                s[k] = h0 ? z_at<P>(h0, first + k) : Z{0, 0};
            for (size_t t = 0; t < T; t++)
                for (size_t k = 0; k < n; k++) {
                    const size_t i = (b * T + t) * C + c0 + k;
                    s[k] = z_add(z_mul<P>(z_at<P>(a, i), s[k]), z_at<P>(x, i));
                    z_put<P>(h, i, s[k]);
                }
            for (size_t k = 0; k < n; k++)
                z_put<P>(hT, first + k, s[k]);
        }
}

// scan_ref_backward: dx, da (B,T,C) =, dh0 (B,C) =, from h as the kernels get it. h0, dhT NULL: 0.
template <int P>
static void scan_ref_backward(double *dx, double *da, double *dh0, const float *a, const float *h,
                              const float *h0, const float *g, const float *dhT, size_t B,
                              size_t T, size_t C)
{
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
        for (size_t c0 = 0; c0 < C; c0 += SIDE) {
            Z s[SIDE];
            const size_t n = C - c0 < SIDE ? C - c0 : SIDE, first = b * C + c0;
            for (size_t k = 0; k < n; k++)
                s[k] = dhT ? z_at<P>(dhT, first + k) : Z{0, 0};
            for (size_t t = T; t-- > 0;)
                for (size_t k = 0; k < n; k++) {
                    const size_t i = (b * T + t) * C + c0 + k;
                    Z before = {0, 0};
                    if (t || h0)
                        before = t ? z_at<P>(h, i - C) : z_at<P>(h0, first + k);
                    const Z d = z_add(z_at<P>(g, i), s[k]);
                    z_put<P>(dx, i, d);
                    z_put<P>(da, i, z_mul<P>(d, z_conj(before)));
                    s[k] = z_mul<P>(z_conj(z_at<P>(a, i)), d);
                }
            for (size_t k = 0; k < n; k++)
                z_put<P>(dh0, first + k, s[k]);
        }
}

// ---- cases ----

// What gates and inputs are. MIXED: a within the unit circle, some exactly 0 or 1, some 1e-30.
// NEAR_ONE: |a| from 0.999 to 1. FORGET: exp(-0.01), exp(-5) and exp(-50) (case A06). ONES: a = 1,
// the others whole numbers, so that fp32 is exact.
typedef enum { MIXED, NEAR_ONE, FORGET, ONES, VALUES } Values;

typedef struct {
    size_t B, T, C;
    Values values;
    int state;    // with h0, hT, dhT, dh0
    size_t shift; // bytes the arrays lie past alignment
} Form;

enum { A, X, H0, G, DHT, INPUTS, H = INPUTS, HT, DX, DA, DH0, ARRAYS };

// Case: the arrays of a form, inputs filled, and the problem that they are.
template <typename I>
struct Case {
    typedef typename Scan<I>::V V;
    enum { P = sizeof(V) / 4 };
    Form form;
    Array a[ARRAYS];
    BenchBuffer work;
    Scan<I> p;
};

// gate: the P parts of element i of a.
template <int P>
static void gate(float *a, Values values, float u, float turn)
{
    const float forget[] = {-0.01f, -5, -50};
    float size = u < .05f ? 0 : u < .15f ? 1 : u < .2f ? 1e-30f : 2 * u - 1;
    if (values == NEAR_ONE)
        size = 1 - 1e-3f * u;
    if (values == FORGET)
        size = expf(forget[(int)(3 * u)]);
    if (values == ONES)
        size = 1, turn = 0;
    a[0] = P == 2 ? size * cosf(turn) : size;
    if (P == 2)
        a[1] = size * sinf(turn);
}

// case_references: what forward and, from h as the kernels read it, backward should write.
template <typename I>
static void case_references(Case<I> *c)
{
    const int P = Case<I>::P;
    const Form *f = &c->form;
    const float *h0 = f->state ? c->a[H0].h : NULL, *dhT = f->state ? c->a[DHT].h : NULL;
    scan_ref_forward<P>(c->a[H].ref, c->a[HT].ref, c->a[A].h, c->a[X].h, h0, f->B, f->T, f->C);
#pragma omp parallel for
    for (size_t i = 0; i < c->a[H].n; i++)
        c->a[H].h[i] = (float)c->a[H].ref[i];
    scan_ref_backward<P>(c->a[DX].ref, c->a[DA].ref, c->a[DH0].ref, c->a[A].h, c->a[H].h, h0,
                         c->a[G].h, dhT, f->B, f->T, f->C);
}

// case_upload: all inputs; for backward also h.
template <typename I>
static void case_upload(Case<I> *c, int back)
{
    for (int i = 0; i < INPUTS + back; i++)
        array_upload(&c->a[i]);
}

// case_new: allocate and upload a case of this form; its references are still to be computed.
template <typename I>
static Case<I> case_new(const Form *f)
{
    typedef typename Scan<I>::V V;
    const int P = Case<I>::P;
    const size_t n = f->B * f->T * f->C * P, m = f->B * f->C * P;
    const BenchType type = sizeof(I) == 2 ? BENCH_BF16 : BENCH_F32;
    Case<I> c;
    c.form = *f;
    for (int i = 0; i < ARRAYS; i++) {
        const int small = i == H0 || i == DHT || i == HT || i == DH0;
        const int narrow = i == A || i == X || i == DX || i == DA;
        c.a[i] = array_new(small ? m : n, narrow ? type : BENCH_F32, f->shift);
    }
    for (int k = 0; k < INPUTS; k++) {
        const size_t parts = k == A ? P : 1;
#pragma omp parallel for
        for (size_t i = 0; i < c.a[k].n; i += parts) {
            const float u = bench_uniform(7 * f->T + k, i);
            if (k == A)
                gate<P>(c.a[A].h + i, f->values, u, 6.2831853f * bench_uniform(99, i));
            else
                c.a[k].h[i] = f->values == ONES ? floorf(3 * u) - 1 : 2 * u - 1;
        }
    }
    c.work = bench_alloc(scan_work_bytes(f->B, f->T, f->C, sizeof(V)) / 4, BENCH_F32, 0);
    const Scan<I> p = {(V *)c.a[H].d.data, (V *)c.a[HT].d.data, (I *)c.a[DX].d.data,
                       (I *)c.a[DA].d.data, (V *)c.a[DH0].d.data, (const I *)c.a[A].d.data,
                       (const I *)c.a[X].d.data, (const V *)c.a[H0].d.data,
                       (const V *)c.a[G].d.data, (const V *)c.a[DHT].d.data, f->B, f->T, f->C,
                       (char *)c.work.data};
    c.p = p;
    if (!f->state)
        c.p.h0 = c.p.dhT = NULL, c.p.hT = c.p.dh0 = NULL;
    case_upload(&c, 0); // rounds the host's values too
    return c;
}

// case_free: give the memory back.
template <typename I>
static void case_free(Case<I> *c)
{
    arrays_free(c->a, ARRAYS);
    bench_free(&c->work);
}

// case_output: array o, with the bound on its error. ONES: exact, but for what is bf16.
template <typename I>
static BenchOutput case_output(Case<I> *c, int o)
{
    static const char *const names[] = {"h", "hT", "dx", "da", "dh0"};
    const double fine = c->form.values == ONES ? 0 : 1e-5;
    return array_output(names[o - H], &c->a[o], c->a[o].type == BENCH_BF16 ? 4e-3 : fine);
}

// case_bench: `kernels` of one direction on the case.
template <typename I>
static int case_bench(Case<I> *c, int back, const BenchKernel *kernels, const char *what,
                      const BenchOptions *opt)
{
    const Form *f = &c->form;
    const BenchOutput forward[] = {case_output(c, H), case_output(c, HT)};
    const BenchOutput backward[] = {case_output(c, DX), case_output(c, DA), case_output(c, DH0)};
    const size_t in = sizeof(I), state = sizeof(typename Scan<I>::V);
    const size_t bytes = back ? 3 * in + 2 * state : 2 * in + state;
    char name[128];
    snprintf(name, sizeof name, "scan %s (%zu,%zu,%zu) %s%s%s",
             state == 8 ? "complex64" : in == 2 ? "real bf16" : "real fp32", f->B, f->T, f->C,
             back ? "backward" : "forward", f->state ? " with state" : "", what);
    const BenchCase bc = {name, &c->p, kernels, KERNELS, back ? backward : forward,
                          (back ? 2 : 1) + f->state, (double)(f->B * f->T * f->C * bytes), 0,
                          "GB"};
    case_upload(c, back);
    return bench_case(&bc, opt);
}

// run_form: forward and backward of one form, all kernels. Returns the failures.
template <typename I>
static int run_form(const Form *f, const BenchOptions *opt)
{
    Case<I> c = case_new<I>(f);
    case_references(&c);
    int failed = case_bench(&c, 0, scan_table<I, 0>(), "", opt) +
                 case_bench(&c, 1, scan_table<I, 1>(), "", opt) + scratch_spoilt(&c.work);
    case_free(&c);
    return failed;
}

// ---- what must hold of every kernel ----

// can_run: kernel k was asked for and takes the problem.
static int can_run(const BenchKernel *k, const void *problem, const BenchOptions *opt)
{
    return (!opt->kernel || opt->kernel == k->num) && !(k->refuse && k->refuse(problem));
}

// fail: 1, after saying what is wrong with which kernel.
static int fail(const char *what, int back, int kernel, const Form *f)
{
    printf("  FAILED: %s: %s kernel %d, (%zu,%zu,%zu)\n", what, back ? "backward" : "forward",
           kernel, f->B, f->T, f->C);
    return 1;
}

// download: the floats of an array on the device.
static float *download(const Array *a)
{
    float *h = (float *)alloc_zero(a->n, 4, "array on the host");
    CUDA_CHECK(cudaMemcpy(h, a->d.data, a->d.bytes, cudaMemcpyDeviceToHost));
    for (size_t j = a->n; j-- > 0 && a->type == BENCH_BF16;)
        h[j] = __bfloat162float(((const __nv_bfloat16 *)h)[j]);
    return h;
}

// run: kernel k of one direction, once, to its end.
static void run(const BenchKernel *k, const void *problem)
{
    k->fn(problem, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
}

// run_carry: with a = 1, one more in x at time 0 is one more in every h, in hT too; one more in g
// at T-1 is one more in every dx and in dh0. A lost carry is seen wherever it is lost.
template <typename I>
static int run_carry(const Form *form, const BenchOptions *opt)
{
    const size_t row = form->C * Case<I>::P, last = (form->T - 1) * row;
    int failed = 0;
    Case<I> c = case_new<I>(form); // B is 1
    case_references(&c);
    case_upload(&c, 1);
    for (int back = 0; back < 2; back++) {
        const BenchKernel *k = back ? scan_table<I, 1>() : scan_table<I, 0>();
        Array *in = &c.a[back ? G : X], *outs[] = {&c.a[back ? DX : H], &c.a[back ? DH0 : HT]};
        for (int n = 0; n < KERNELS; n++) {
            if (!can_run(&k[n], &c.p, opt))
                continue;
            float *got[2][2];
            for (int more = 0; more < 2; more++) {
                for (size_t j = 0; j < row; j++)
                    in->h[(back ? last : 0) + j] += more ? 1 : 0;
                array_upload(in);
                run(&k[n], &c.p);
                for (int o = 0; o < 2; o++)
                    got[more][o] = download(outs[o]);
            }
            for (size_t j = 0; j < row; j++)
                in->h[(back ? last : 0) + j] -= 1;
            for (int o = 0, bad = 0; o < 2; o++)
                for (size_t j = 0; j < outs[o]->n && !bad; j++)
                    if (outs[o]->type == BENCH_F32 && got[1][o][j] - got[0][o][j] != 1)
                        bad = 1, failed += fail("a carry is lost", back, n + 1, form);
            for (int i = 0; i < 4; i++)
                free(got[i / 2][i % 2]);
        }
        array_upload(in);
    }
    case_free(&c);
    return failed;
}

// dot: sum of x[i] y[i], which for complex numbers is Re sum conj(x) y. *size += sum |x[i] y[i]|.
static double dot(const Array *x, const Array *y, double *size)
{
    float *u = download(x), *v = download(y);
    double sum = 0;
    for (size_t i = 0; i < x->n; i++) {
        sum += (double)u[i] * v[i];
        *size += fabs((double)u[i] * v[i]);
    }
    free(u), free(v);
    return sum;
}

// run_adjoint: Re <g, h> + <dhT, hT> = <dx, x> + <dh0, h0>, of what the kernels themselves give:
// forward is linear in x and h0, and backward its transpose.
template <typename I>
static int run_adjoint(const Form *form, const BenchOptions *opt)
{
    const BenchKernel *forward = scan_table<I, 0>(), *backward = scan_table<I, 1>();
    int failed = 0;
    Case<I> c = case_new<I>(form);
    for (int n = 0; n < KERNELS; n++) {
        double size = 0;
        if (!can_run(&forward[n], &c.p, opt))
            continue;
        run(&forward[n], &c.p);
        run(&backward[n], &c.p);
        const double left = dot(&c.a[G], &c.a[H], &size) + dot(&c.a[DHT], &c.a[HT], &size);
        const double right = dot(&c.a[DX], &c.a[X], &size) + dot(&c.a[DH0], &c.a[H0], &size);
        if (!(fabs(left - right) <= (sizeof(I) == 2 ? 1e-3 : 1e-6) * size))
            failed += fail("the adjoint identity", 1, n + 1, form);
    }
    case_free(&c);
    return failed;
}

// in_two: kernel N of a direction on positions 0 to T/3 and on the rest, the state handed on in hT
// or dh0. B is 1.
template <typename I, int BACK, int N>
static void in_two(const void *problem, cudaStream_t stream)
{
    typedef typename Scan<I>::V V;
    const Scan<I> *p = (const Scan<I> *)problem;
    const size_t cut = p->T / 3, at = cut * p->C;
    Scan<I> first = *p, rest = *p;
    first.T = cut;
    rest.T = p->T - cut;
    rest.h += at, rest.a += at, rest.x += at, rest.g += at, rest.dx += at, rest.da += at;
    rest.h0 = BACK && cut ? (const V *)rest.h - p->C : p->hT;
    first.dhT = p->dh0;
    if (!BACK)
        CUDA_CHECK(cudaMemcpyAsync(p->hT, p->h0, p->C * sizeof(V), cudaMemcpyDeviceToDevice,
                                   stream));
    if (!BACK && cut)
        scan_table<I, BACK>()[N - 1].fn(&first, stream);
    scan_table<I, BACK>()[N - 1].fn(&rest, stream);
    if (BACK)
        scan_table<I, BACK>()[N - 1].fn(&first, stream);
}

// split_table: scan_table with every kernel in two.
template <typename I, int BACK>
static const BenchKernel *split_table(void)
{
    static BenchKernel k[KERNELS];
    static void (*const fn[KERNELS])(const void *, cudaStream_t) = {
        in_two<I, BACK, 1>, in_two<I, BACK, 2>, in_two<I, BACK, 3>, in_two<I, BACK, 4>,
        in_two<I, BACK, 5>, in_two<I, BACK, 6>, in_two<I, BACK, 7>, in_two<I, BACK, 8>,
        in_two<I, BACK, 9>, in_two<I, BACK, 10>, in_two<I, BACK, 11>};
    for (int n = 0; n < KERNELS; n++) {
        k[n] = scan_table<I, BACK>()[n];
        k[n].fn = fn[n];
    }
    return k;
}

// run_split: in two pieces, the state handed over: the same results.
template <typename I>
static int run_split(const Form *form, const BenchOptions *opt)
{
    Case<I> c = case_new<I>(form);
    case_references(&c);
    const int failed = case_bench(&c, 0, split_table<I, 0>(), " in two", opt) +
                       case_bench(&c, 1, split_table<I, 1>(), " in two", opt);
    case_free(&c);
    return failed;
}

// run_serial: kernels that do the same arithmetic give the same bits.
template <typename I>
static int run_serial(const Form *form)
{
    int failed = 0;
    Case<I> c = case_new<I>(form);
    case_references(&c);
    case_upload(&c, 1);
    for (int back = 0; back < 2; back++) {
        const BenchKernel *k = back ? scan_table<I, 1>() : scan_table<I, 0>();
        Array *out = &c.a[back ? DA : H];
        float *first = NULL;
        for (size_t n = 0; n < sizeof SERIAL / sizeof *SERIAL; n++) {
            run(&k[SERIAL[n] - 1], &c.p);
            float *got = download(out);
            if (first && memcmp(first, got, out->n * 4))
                failed += fail("not the bits of kernel 1", back, SERIAL[n], form);
            if (first)
                free(got);
            else
                first = got;
        }
        free(first);
    }
    case_free(&c);
    return failed;
}

// run_skipped: a kernel that leaves out one element, as if a were 1 and x (or g) 0 there, must not
// pass: the comparison sees each of them, in at least one output. Returns the failures.
template <typename I>
static int run_skipped(const Form *form)
{
    const size_t row = form->C * Case<I>::P;
    const size_t times[] = {0, 1, 31, form->T / 2, form->T - 2, form->T - 1};
    int failed = 0;
    Case<I> c = case_new<I>(form);
    case_references(&c);
    for (int back = 0; back < 2; back++)
        for (int n = 0; n < 7; n++) { // the last time with nothing left out
            float *a = c.a[A].h + (n < 6 ? times[n] * row : 0);
            float *x = c.a[back ? G : X].h + (n < 6 ? times[n] * row : 0);
            const float was[] = {a[0], x[0]};
            int ok = 1;
            if (n < 6)
                a[0] = 1, x[0] = 0;
            case_upload(&c, back);
            run((back ? scan_table<I, 1>() : scan_table<I, 0>()) + BEST - 1, &c.p);
            for (int o = back ? DX : H; o < (back ? ARRAYS : DX); o++) {
                const BenchOutput out = case_output(&c, o);
                float *got = download(&c.a[o]);
                ok &= compare(got, 4, out.ref, 8, out.n, out.bound, 0).ok;
                free(got);
            }
            if (ok != (n == 6))
                failed += fail(ok ? "a skipped element is not seen" : "after skipping", back, BEST,
                               form);
            a[0] = was[0], x[0] = was[1];
        }
    case_free(&c);
    return failed;
}

// ---- values that are not finite ----

typedef struct {
    int array;         // which input gets the value
    size_t t;          // at which time, of T = TIMES
    float value;
    float gates, rest; // what a is elsewhere; what x and h0, g and dhT are (-1: as MIXED)
} Special;

enum { TIMES = 600 };

static const Special specials[] = {
    {X, 0, NAN, .5f, -1}, {X, 300, NAN, .5f, -1}, {X, 599, NAN, .5f, -1},
    {A, 0, NAN, .5f, -1}, {A, 257, NAN, .5f, -1}, {X, 5, INFINITY, .5f, -1},
    {X, 311, -INFINITY, -.5f, -1}, {A, 0, INFINITY, .5f, -1}, {A, 130, INFINITY, .5f, -1},
    {A, 130, -INFINITY, 1, -1}, {G, 599, NAN, .5f, -1}, {G, 300, INFINITY, -.5f, -1},
    {G, 0, INFINITY, .5f, -1}, {H0, 0, NAN, .5f, -1}, {H0, 0, INFINITY, .5f, -1},
    {DHT, 0, INFINITY, .5f, -1}, {DHT, 0, NAN, .5f, -1},
    {X, 580, 1, 16, 0}, {G, 19, 1, 16, 0}, // a^64 is infinite, and what it multiplies 0
};

// same_kind: NaN where NaN is expected, the same infinity, or close.
static int same_kind(double got, double want, double bound)
{
    if (isnan(want) || fabs(want) > 3e38)
        return isnan(want) ? isnan(got) : got == (want > 0 ? INFINITY : -INFINITY);
    return fabs(got - want) <= bound * (1 + fabs(want));
}

// run_special: one value in the first channel, of which every kernel must make what the recurrence
// makes, in that channel and in the others, which see nothing of it.
template <typename I>
static int run_special(const Special *s, size_t C, const BenchOptions *opt)
{
    const int P = Case<I>::P;
    const Form form = {2, TIMES, C, MIXED, 1, 0};
    int failed = 0;
    Case<I> c = case_new<I>(&form);
    for (size_t i = 0; i < c.a[A].n; i++)
        c.a[A].h[i] = i % P ? 0 : s->gates;
    for (int k = X; k < INPUTS && s->rest >= 0; k++)
        for (size_t i = 0; i < c.a[k].n; i++)
            c.a[k].h[i] = s->rest;
    c.a[s->array].h[s->t * C * P] = s->value;
    case_upload(&c, 0);
    case_references(&c);
    case_upload(&c, 1);
    for (int back = 0; back < 2; back++)
        for (int n = 0; n < KERNELS; n++) {
            const BenchKernel *k = (back ? scan_table<I, 1>() : scan_table<I, 0>()) + n;
            int bad = 0;
            if (!can_run(k, &c.p, opt))
                continue;
            case_upload(&c, back);
            run(k, &c.p);
            for (int o = back ? DX : H; o < (back ? ARRAYS : DX); o++) {
                float *got = download(&c.a[o]);
                for (size_t i = 0; i < c.a[o].n && !bad; i++)
                    if (!same_kind(got[i], c.a[o].ref[i], sizeof(I) == 2 ? 1e-2 : 1e-4)) {
                        printf("  special %d, output %d: at %zu got %g, expected %g\n",
                               (int)(s - specials), o - H, i, got[i], c.a[o].ref[i]);
                        bad = fail("not what the recurrence gives", back, n + 1, &form);
                    }
                free(got);
            }
            failed += bad;
        }
    case_free(&c);
    return failed;
}

// run_a04: case A04, by hand: a = .5 0 .5 1, x = 1 2 0 -3, g = 1.
template <typename I>
static int run_a04(const BenchOptions *opt)
{
    const float a[] = {.5f, 0, .5f, 1}, x[] = {1, 2, 0, -3}, h[] = {1, 2, 1, -2};
    const float dx[] = {1, 2, 2, 1}, da[] = {0, 2, 4, 1};
    const int P = Case<I>::P;
    const Form form = {1, 4, 8, ONES, 0, 0};
    int failed = 0;
    Case<I> c = case_new<I>(&form);
    for (size_t i = 0; i < c.a[A].n; i++) {
        const size_t t = i / (form.C * P);
        c.a[A].h[i] = i % P ? 0 : a[t];
        c.a[X].h[i] = i % P ? 0 : x[t];
        c.a[G].h[i] = i % P ? 0 : 1;
        c.a[H].ref[i] = i % P ? 0 : h[t];
        c.a[DX].ref[i] = i % P ? 0 : dx[t];
        c.a[DA].ref[i] = i % P ? 0 : da[t];
        c.a[H].h[i] = (float)c.a[H].ref[i];
    }
    failed += case_bench(&c, 0, scan_table<I, 0>(), " A04", opt);
    failed += case_bench(&c, 1, scan_table<I, 1>(), " A04", opt);
    case_free(&c);
    return failed;
}

// run_nothing: T = 0 writes nothing.
template <typename I>
static int run_nothing(void)
{
    const Form form = {2, 3, 8, MIXED, 1, 0};
    int failed = 0;
    Case<I> c = case_new<I>(&form);
    c.p.T = 0;
    for (int n = 0; n < KERNELS; n++) {
        run(scan_table<I, 0>() + n, &c.p);
        run(scan_table<I, 1>() + n, &c.p);
    }
    for (int o = H; o < ARRAYS; o++) {
        uint32_t first;
        CUDA_CHECK(cudaMemcpy(&first, c.a[o].d.data, 4, cudaMemcpyDeviceToHost));
        if (first != 0xffffffffu)
            failed += fail("T = 0 wrote an output", 0, 0, &form);
    }
    case_free(&c);
    return failed;
}

// run_replays: 1000 times the same bits, of the kernel that is chosen and of the chain.
template <typename I>
static int run_replays(void)
{
    const Form form = {2, 4097, 96, MIXED, 1, 0};
    const int numbers[] = {BEST, 8, 10};
    int failed = 0;
    Case<I> c = case_new<I>(&form);
    const BenchOutput out = array_output("h", &c.a[H], 1e-5);
    for (int n = 0; n < 3; n++) {
        const BenchKernel *k = scan_table<I, 0>() + numbers[n] - 1;
        const BenchCase bc = {"replays", &c.p, k, 1, &out, 1, 0, 0, "GB"};
        bench_run(&bc, k);
        const unsigned long long bits = bench_bits(&bc);
        for (int r = 0, bad = 0; r < 1000 && !bad; r++) {
            bench_run(&bc, k);
            if (bench_bits(&bc) != bits)
                bad = 1, failed += fail("a replay differs in its bits", 0, numbers[n], &form);
        }
    }
    case_free(&c);
    return failed;
}

// ---- all of it ----

// run_small: every length that is awkward, narrow and wide channels, all kinds of values, with and
// without states and alignment. Counts the cases and returns the failures.
template <typename I>
static int run_small(int *cases, const BenchOptions *opt)
{
    static const size_t Ts[] = {1, 2, 15, 16, 17, 31, 32, 33, 255, 258, 1000, 4097, 12345, 65536};
    static const size_t Cs[] = {1, 3, 8, 33, 64, 120, 200};
    int failed = 0;
    for (size_t i = 0; i < sizeof Ts / sizeof *Ts; i++)
        for (size_t j = 0; j < sizeof Cs / sizeof *Cs; j++) {
            const size_t B = 1 + (i + j) % 3;
            const Values values = (Values)((i + 2 * j) % VALUES);
            const Form f = {Ts[i] < 12345 ? B : 1, Ts[i], Cs[j], values, (int)((i + j) % 2),
                            (i + j) % 5 == 4 ? sizeof(I) * (8 / sizeof(I)) : 0};
            if (f.T * f.C > 25000 && (f.C != 8 || f.T > 20000) && (f.C > 1 || f.T < 20000))
                continue; // the emulation is slow
            failed += run_form<I>(&f, opt);
            ++*cases;
        }
    const Form wide[] = {{70, 5, 264, MIXED, 1, 0}, {700, 1, 8, NEAR_ONE, 1, 0},
                         {2, 40, 1096, FORGET, 0, 0}};
    for (int i = 0; i < 3; i++, ++*cases)
        failed += run_form<I>(&wide[i], opt);
    return failed;
}

// run_checks: everything that is not timed. Returns the failures.
template <typename I>
static int run_checks(const BenchOptions *opt)
{
    const BenchOptions o = small_options(opt);
    int cases = 0, failed = run_small<I>(&cases, &o);
    for (int odd = 0; odd < 2; odd++) {
        const size_t C = odd ? 3 : 8;
        const Form ones = {1, odd ? 12345u : 4115u, C, ONES, 1, 0};
        const Form near = {2, 1000, C, NEAR_ONE, 1, 0}, one = {1, 1000, C, NEAR_ONE, 1, 0};
        failed += run_carry<I>(&ones, &o) + run_adjoint<I>(&near, &o) + run_split<I>(&one, &o);
        for (size_t i = 0; i < sizeof specials / sizeof *specials; i++)
            failed += run_special<I>(&specials[i], C, &o);
    }
    const Form serial = {2, 300, 72, MIXED, 1, 0}, skipped = {1, 600, 8, NEAR_ONE, 1, 0};
    failed += run_serial<I>(&serial) + run_skipped<I>(&skipped) + run_a04<I>(&o);
    failed += run_nothing<I>();
    if (!opt->check_only)
        failed += run_replays<I>();
    printf("scan: %d small cases, %d failures\n", cases, failed);
    return failed;
}

// scan_main: the shape that was asked for, or all checks, and the shapes that are measured.
template <typename I>
static int scan_main(int argc, char **argv, const char *usage)
{
    static const size_t Ts[] = {1024, 4096, 12345, 16384, 65536};
    const BenchOptions opt = bench_options(argc, argv, usage);
    int failed = 0;
    if (shape_given(&opt)) {
        const Form f = {opt.B ? opt.B : 8, opt.T ? opt.T : 1024, opt.C ? opt.C : 1536, MIXED, 0, 0};
        failed = run_form<I>(&f, &opt);
    } else {
        if (!opt.time_only)
            failed += run_checks<I>(&opt);
        for (int i = 0; i < 5 && !opt.check_only; i++) {
            const Form f = {8, Ts[i], 1536, MIXED, 0, 0};
            BenchOptions o = opt;
            if (Case<I>::P == 2 && f.T > 20000) // 70 GB on the host
                continue;
            if (!o.kernel && f.T > 20000) // it takes the CPU half a minute to check one
                o.kernel = BEST;
            failed += run_form<I>(&f, &o);
        }
        const Form million = {1, 1000003, 1, MIXED, 0, 0}; // case A17: 20 runs, the same bits
        if (!opt.check_only)
            failed += run_form<I>(&million, &opt);
    }
    printf("%d failures\n", failed);
    return failed ? EXIT_FAIL : 0;
}

#endif
