// diff.c: do two safetensors files hold the same numbers, up to rounding?
//
//     gcc -O3 -Wall -Wextra dev/diff.c -o build/diff -lm
//     build/diff cpu.safetensors gpu.safetensors --bf16
//
// This is the CPU-against-GPU test: both write the same batch with --dump, and this compares the
// tensors both have. The first file is the reference. The bounds are those of util/check.h: one for
// tensors whose name starts with "grads.", one for the others; a gradient whose reference norm is
// below 1e-6 of the largest gradient's is noise and only compared with that one. A loss is a
// difference of numbers as large as the logits: it may be off by 2^-23 of the largest logit more,
// fp32's rounding of such a number, which for losses near 0 is all. Integers must be equal.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../util/safetensors.h"
#include <getopt.h>

typedef struct {
    double forward, grad; // bounds of the relative L2 error
    double scale_norm;    // the largest norm of a gradient of the reference
    double loss_error;    // what a loss may be off beside its bound
    int width;            // of the column of names
    int agree, disagree, alone;
} Diff;

static const char help[] =
    "usage: diff REFERENCE OTHER [options]\n"
    "Compare the tensors that both safetensors files have; one line each: name, shape, relative\n"
    "L2 error, largest error, index of the largest error, verdict.\n"
    "  --forward X  bound of the relative L2 error, number >= 0 (default: 1e-5; with --bf16 1e-2)\n"
    "  --grad X     the same for tensors named grads.* (default: 1e-4; with --bf16 2e-2)\n"
    "  --bf16       use the bounds for computations in bf16\n"
    "  --all        a tensor that only one file has is a failure\n"
    "  --help       print this\n"
    "The largest error may be 10 times the bound times the largest value of the reference;\n"
    "acts.losses may be off by 2^-23 times the largest of acts.logits more.\n"
    "Exit code: 0 all agree, 1 some do not or nothing is in common, 2 usage, 3 unreadable file.\n";

// parse_bound: a number >= 0 that is the whole of `text`.
static double parse_bound(const char *option, const char *text)
{
    char *end;
    double x = strtod(text, &end);
    if (end == text || *end || !is_finite_bits(x) || x < 0)
        die(EXIT_USAGE, "%s: bound; expected a number >= 0, got %s", option, text);
    return x;
}

// is_grad: whether a tensor is compared with the bound for gradients.
static int is_grad(const StEntry *e)
{
    return !strncmp(e->name, "grads.", 6);
}

// is_real: whether a tensor holds numbers that are compared up to rounding.
static int is_real(const StEntry *e)
{
    return e->dtype <= ST_F16;
}

// real_size: bytes per element in memory: 8 for F64, 4 for all others, which a float holds exactly.
static size_t real_size(const StEntry *e)
{
    return e->dtype == ST_F64 ? 8 : 4;
}

// load_real: a tensor as an array of real_size elements. To be freed.
static void *load_real(StFile *f, const StEntry *e)
{
    void *x = alloc_zero(st_count(e), real_size(e), e->name);
    st_read_real(f, e, x, real_size(e));
    return x;
}

// load_bytes: a tensor as it lies in the file. To be freed.
static unsigned char *load_bytes(StFile *f, const StEntry *e)
{
    unsigned char *x = (unsigned char *)alloc_zero(e->end - e->begin, 1, e->name);
    st_pread(f, x, e->end - e->begin, f->data + e->begin);
    return x;
}

// format_shape: text (size) = "[2,3]".
static void format_shape(char *text, size_t size, const size_t *shape, int ndim)
{
    size_t k = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < ndim && k < size; i++)
        k += (size_t)snprintf(text + k, size - k, "%s%zu", i ? "," : "", shape[i]);
    if (k < size)
        snprintf(text + k, size - k, "]");
}

// format_index: text (size) = element i of tensor e, as an index of each dimension.
static void format_index(char *text, size_t size, const StEntry *e, size_t i)
{
    size_t index[ST_MAX_DIMS] = {0};
    for (int d = e->ndim - 1; d >= 0; d--) {
        index[d] = i % e->shape[d];
        i /= e->shape[d];
    }
    format_shape(text, size, index, e->ndim);
}

// same_shape: whether two tensors have the same dimensions.
static int same_shape(const StEntry *a, const StEntry *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape);
}

// print_line: one line of the table.
static void print_line(const Diff *d, const char *name, const char *shape, const char *rel_l2,
                       const char *max_err, const char *worst, const char *verdict)
{
    printf("%-*s  %-20s %10s %10s  %-16s %s\n", d->width, name, shape, rel_l2, max_err, worst,
           verdict);
}

// largest_grad_norm: the largest norm of the gradients of f; 0 if it has none. Values that are not
// finite do not count here; the comparison finds them.
static double largest_grad_norm(StFile *f)
{
    double largest = 0;
    for (size_t i = 0; i < f->header.n; i++) {
        const StEntry *e = &f->header.entries[i];
        if (!is_grad(e) || !is_real(e))
            continue;
        void *x = load_real(f, e);
        double norm = compare(x, real_size(e), x, real_size(e), st_count(e), 0, 0).norm_ref;
        largest = norm > largest ? norm : largest;
        free(x);
    }
    return largest;
}

// largest_logit: the largest magnitude in acts.logits of f; 0 if it has none.
static double largest_logit(StFile *f)
{
    const StEntry *e = st_find(f, "acts.logits");
    if (!e || !is_real(e))
        return 0;
    void *x = load_real(f, e);
    double most = compare(x, real_size(e), x, real_size(e), st_count(e), 0, 0).max_ref;
    free(x);
    return most;
}

// losses_agree: whether losses differ by no more than their bound and loss_error allow.
static int losses_agree(const Diff *d, const Comparison *c, size_t n)
{
    return c->finite && c->norm_ref > 0 &&
           c->rel_l2 * c->norm_ref <=
               d->forward * c->norm_ref + d->loss_error * sqrt((double)n) &&
           c->max_err <= MAX_OVER_L2 * d->forward * c->max_ref + d->loss_error;
}

// compare_real: compare tensor r of ref with tensor g of got, print the line; 1 if they agree.
static int compare_real(const Diff *d, StFile *ref, const StEntry *r, StFile *got, const StEntry *g,
                        const char *shape)
{
    void *x = load_real(ref, r), *y = load_real(got, g);
    double bound = is_grad(r) ? d->grad : d->forward;
    Comparison c = compare(y, real_size(g), x, real_size(r), st_count(r), bound,
                           is_grad(r) ? d->scale_norm : 0);
    if (!strcmp(r->name, "acts.losses"))
        c.ok |= losses_agree(d, &c, st_count(r));
    char rel_l2[32], max_err[32], worst[200] = "-";
    snprintf(rel_l2, sizeof rel_l2, "%.3e", c.rel_l2);
    snprintf(max_err, sizeof max_err, "%.3e", c.max_err);
    if (c.max_err > 0)
        format_index(worst, sizeof worst, r, c.worst);
    print_line(d, r->name, shape, rel_l2, max_err, worst,
               c.ok ? "ok" : c.finite ? "DIFFERS" : "DIFFERS: NaN or Inf");
    free(x);
    free(y);
    return c.ok;
}

// compare_exact: the same for integers and other dtypes, byte by byte; the worst index is the first
// that differs. Elements smaller than a byte (F4, F6) are shown by the byte they begin in.
static int compare_exact(const Diff *d, StFile *ref, const StEntry *r, StFile *got,
                         const StEntry *g, const char *shape)
{
    unsigned char *x = load_bytes(ref, r), *y = load_bytes(got, g);
    size_t n = r->end - r->begin, i = 0;
    char worst[200] = "-";
    while (i < n && x[i] == y[i])
        i++;
    if (i < n)
        format_index(worst, sizeof worst, r, i * 8 / st_dtype(r->dtype)->bits);
    print_line(d, r->name, shape, "exact", "-", worst, i == n ? "ok" : "DIFFERS");
    free(x);
    free(y);
    return i == n;
}

// compare_tensor: compare two tensors of the same name, print the line; 1 if they agree.
static int compare_tensor(const Diff *d, StFile *ref, const StEntry *r, StFile *got,
                          const StEntry *g)
{
    char shape[200], verdict[260];
    format_shape(shape, sizeof shape, r->shape, r->ndim);
    if (!same_shape(r, g)) {
        char other[200];
        format_shape(other, sizeof other, g->shape, g->ndim);
        snprintf(verdict, sizeof verdict, "DIFFERS: shape %s", other);
    } else if (is_real(r) && is_real(g)) {
        return compare_real(d, ref, r, got, g, shape);
    } else if (r->dtype == g->dtype) {
        return compare_exact(d, ref, r, got, g, shape);
    } else {
        snprintf(verdict, sizeof verdict, "DIFFERS: dtype %s and %s", st_dtype(r->dtype)->name,
                 st_dtype(g->dtype)->name);
    }
    print_line(d, r->name, shape, "-", "-", "-", verdict);
    return 0;
}

// list_alone: list the tensors of f that the other file lacks.
static void list_alone(Diff *d, const StFile *f, const StFile *other)
{
    char shape[200], verdict[4096];
    for (size_t i = 0; i < f->header.n; i++) {
        const StEntry *e = &f->header.entries[i];
        if (st_find(other, e->name))
            continue;
        format_shape(shape, sizeof shape, e->shape, e->ndim);
        snprintf(verdict, sizeof verdict, "only in %s", f->path);
        print_line(d, e->name, shape, "-", "-", "-", verdict);
        d->alone++;
    }
}

// diff_files: compare and print everything; the exit code.
static int diff_files(Diff *d, StFile *ref, StFile *got)
{
    const StHeader *h[2] = {&ref->header, &got->header};
    d->width = 4;
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < h[k]->n; i++) {
            size_t length = strlen(h[k]->entries[i].name);
            d->width = (int)length > d->width && length < 80 ? (int)length : d->width;
        }
    st_verify(ref);
    st_verify(got);
    d->scale_norm = largest_grad_norm(ref);
    d->loss_error = 0x1p-23 * largest_logit(ref);
    print_line(d, "name", "shape", "rel L2", "max error", "worst index", "verdict");
    for (size_t i = 0; i < ref->header.n; i++) {
        const StEntry *r = &ref->header.entries[i], *g = st_find(got, r->name);
        if (g)
            ++*(compare_tensor(d, ref, r, got, g) ? &d->agree : &d->disagree);
    }
    list_alone(d, ref, got);
    list_alone(d, got, ref);
    printf("%d tensors agree, %d do not, %d in one file only\n", d->agree, d->disagree, d->alone);
    return d->disagree || !d->agree ? EXIT_FAIL : 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"forward", required_argument, NULL, 'f'},
                                            {"grad", required_argument, NULL, 'g'},
                                            {"bf16", no_argument, NULL, 'b'},
                                            {"all", no_argument, NULL, 'a'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    double forward = -1, grad = -1; // not given
    int bf16 = 0, all = 0, c;
    opterr = 0; // our own messages
    while ((c = getopt_long(argc, argv, ":", options, NULL)) != -1) {
        if (c == 'f')
            forward = parse_bound("--forward", optarg);
        else if (c == 'g')
            grad = parse_bound("--grad", optarg);
        else if (c == 'b')
            bf16 = 1;
        else if (c == 'a')
            all = 1;
        else if (c == 'h')
            return fputs(help, stdout) < 0 || fflush(stdout) ? EXIT_FAIL : 0;
        else
            die(EXIT_USAGE, "%s: %s\nhint: --help lists the options", argv[optind - 1],
                c == ':' ? "expected a value, got none"
                         : "unknown option; expected --forward, --grad, --bf16, --all or --help");
    }
    if (argc - optind != 2)
        die(EXIT_USAGE, "diff: expected two files, got %d\nhint: --help says more", argc - optind);
    Diff d = {forward >= 0 ? forward : bf16 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32,
              grad >= 0 ? grad : bf16 ? BOUND_GRAD_BF16 : BOUND_GRAD_FP32, 0, 0, 0, 0, 0, 0};
    StFile *ref = st_open(argv[optind]), *got = st_open(argv[optind + 1]);
    int code = diff_files(&d, ref, got);
    if (all && d.alone)
        code = EXIT_FAIL;
    st_close(ref);
    st_close(got);
    if (fflush(stdout) || ferror(stdout))
        die(EXIT_DATA, "stdout: cannot write: %s", strerror(errno));
    return code;
}
