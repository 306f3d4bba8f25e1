// test_asked.cu: what a dump cannot show of heads that make logits where something is asked alone
// (util/asked.cuh): batches with fewer targets than rows, none, odd sizes; and cross-entropy over
// such rows. dev/test_cuda.sh builds it with -DTESTING, and dev/emulate/test.sh with TRAINER as
// well: the trainer as prepare.py wrote it.
#ifndef TRAINER
#define TRAINER "../train_mamba.cu"
#endif
#include TRAINER
#include "test_arrays.cuh"

// Of R rows a batch has so many targets; at the ends: the first and the last position alone.
enum { NOTHING, ENDS, FEWER, FULL, FILLINGS };

// ints_new: n ints on the device: those of the host, NULL: what no index is.
static int *ints_new(const int *host, size_t n)
{
    int *device = (int *)device_new(n * sizeof(int), "ints");
    CUDA_CHECK(cudaMemset(device, 0x77, n * sizeof(int)));
    if (host)
        CUDA_CHECK(cudaMemcpy(device, host, n * sizeof(int), cudaMemcpyHostToDevice));
    return device;
}

// ints_differ: the first of n ints on the device that is not the host's; n: none.
static size_t ints_differ(const int *device, const int *host, size_t n)
{
    int *got = (int *)alloc_zero(n, sizeof(int), "ints");
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(got, device, n * sizeof(int), cudaMemcpyDeviceToHost));
    size_t i = 0;
    while (i < n && got[i] == host[i])
        i++;
    free(got);
    return i;
}

// draw_targets: targets (N) of V symbols, as `filling` says, and what where (R), inverse (N) are.
static void draw_targets(int *targets, int *where, int *inverse, size_t N, size_t R, size_t V,
                         int filling)
{
    const size_t counts[] = {0, std::min(R, (size_t)2), R / 2, R};
    size_t left = std::min(counts[filling], N), row = 0;
    for (size_t n = 0; n < N; n++) { // each position has the chance that is left to it
        const bool ends = filling == ENDS && (n == 0 || n == N - 1) && row < R;
        const bool here = filling == ENDS ? ends : rand_below(5, n, 0, (uint32_t)(N - n)) < left;
        targets[n] = here ? (int)rand_below(6, n, 0, (uint32_t)V) : IGNORE;
        inverse[n] = here ? (int)row : -1;
        if (here)
            where[row++] = (int)n;
        left -= here && filling != ENDS;
    }
    for (; row < R; row++)
        where[row] = -1;
}

// test_case: N positions, R rows, C channels, V symbols; all results but cross-entropy's are exact.
static void test_case(size_t N, size_t R, size_t C, size_t V, int filling)
{
    const size_t X = sizeof(floatX), pitch = (V + 31) / 32 * 32;
    const double unit = 0.125, bound = X == 2 ? BOUND_FORWARD_BF16 : BOUND_FORWARD_FP32;
    int *targets = (int *)alloc_zero(N, sizeof(int), "targets");
    int *where = (int *)alloc_zero(R, sizeof(int), "where");
    int *inverse = (int *)alloc_zero(N, sizeof(int), "inverse");
    int *said = (int *)alloc_zero(N, sizeof(int), "predictions");
    draw_targets(targets, where, inverse, N, R, V, filling);
    Array x = array_new(N * C, X), rows = array_new(R * C, X), dx = array_new(N * C, X);
    Array logits = array_new(R * pitch, 4), dlogits = array_new(R * pitch, X);
    Array losses = array_new(N, 4);
    Array *draws[] = {&x, &logits};
    for (Array *a : draws) {
        for (size_t i = 0; i < a->n; i++)
            a->host[i] = rand_normal(7, a == &x, i);
        array_up(a);
    }
    int *d_targets = ints_new(targets, N), *predictions = ints_new(NULL, N);
    const Asked a = {ints_new(NULL, R), ints_new(NULL, N), (floatX *)rows.device};
    const StepInput step = {.unit = unit, .first = 1};
    StepInput *input = (StepInput *)device_new(sizeof step, "input");
    StepResult *result = (StepResult *)device_new(sizeof *result, "result"), got;
    CUDA_CHECK(cudaMemcpy(input, &step, sizeof step, cudaMemcpyHostToDevice));
    asked_gather(a, (floatX *)x.device, d_targets, N, R, C, 0);
    asked_scatter((floatX *)dx.device, a, N, C, 0);
    crossentropy((float *)losses.device, predictions, (floatX *)dlogits.device, result,
                 (float *)logits.device, d_targets, a.where, input, N, R, V, pitch, 0);
    double *moved = (double *)alloc_zero(R * C, 8, "rows"), loss = 0;
    double *back = (double *)alloc_zero(N * C, 8, "dx"), *nats = (double *)alloc_zero(N, 8, "loss");
    double *d = (double *)alloc_zero(R * pitch, 8, "dlogits");
    for (size_t r = 0; r < R; r++) {
        const double *row = logits.host + r * pitch;
        double sum = 0;
        if (where[r] < 0)
            continue;
        const size_t n = (size_t)where[r];
        for (size_t c = 0; c < C; c++)
            moved[r * C + c] = back[n * C + c] = x.host[n * C + c];
        for (size_t v = 0; v < V; v++) {
            sum += exp(row[v]);
            said[n] = row[v] > row[said[n]] ? (int)v : said[n];
        }
        for (size_t v = 0; v < V; v++)
            d[r * pitch + v] = unit * (exp(row[v]) / sum - ((int)v == targets[n]));
        loss += unit * (nats[n] = log(sum) - row[targets[n]]);
    }
    CUDA_CHECK(cudaMemcpy(&got, result, sizeof got, cudaMemcpyDeviceToHost));
    const size_t bad[] = {ints_differ(a.where, where, R), ints_differ(a.inverse, inverse, N),
                          ints_differ(predictions, said, N)};
    const int ok[] = {bad[0] == R, bad[1] == N, bad[2] == N, array_compare(&rows, moved, 0).ok,
                      array_compare(&dx, back, 0).ok,
                      array_compare(&losses, nats, BOUND_FORWARD_FP32).ok,
                      array_compare(&dlogits, d, bound).ok, fabs(got.loss - loss) <= 1e-6 * loss};
    const char *const names[] = {"where", "inverse", "predictions", "rows", "dx", "losses",
                                 "dlogits", "loss"};
    for (int i = 0; i < 8; i++)
        CHECK(ok[i], "N=%zu R=%zu C=%zu V=%zu, filling %d: %s%s", N, R, C, V, filling, names[i],
              i < 3 ? " as indices" : "");
    Array *all[] = {&x, &rows, &dx, &logits, &dlogits, &losses};
    for (Array *array : all)
        array_free(array);
    void *device[] = {d_targets, predictions, a.where, a.inverse, input, result};
    for (void *p : device)
        CUDA_CHECK(cudaFree(p));
    void *host[] = {targets, where, inverse, said, moved, back, nats, d};
    for (void *p : host)
        free(p);
}

// test_shapes: where a head reads what is asked alone.
static void test_shapes(void)
{
    TaskShape shape = {.T = 32, .V = 1024, .eval_T = 8, .asked = 16};
    CHECK(asked_each(shape) == 16 && asked_rows(16, 3, 32) == 48, "half of the positions");
    shape.asked = 17;
    CHECK(asked_each(shape) == 0 && asked_rows(0, 3, 32) == 96, "more than half of them");
    shape.asked = 1, shape.V = 1023;
    CHECK(asked_each(shape) == 0, "few symbols");
    shape.asked = 0, shape.V = 1024;
    CHECK(asked_each(shape) == 0, "a task that asks everywhere");
}

int main(void)
{
    cuda_start();
    test_shapes();
    for (int filling = NOTHING; filling < FILLINGS; filling++) {
        for (size_t N : {1, 2, 31, 32, 33, 1000, 1024, 1025, 4097})
            test_case(N, (N + 5) / 6, 33, 40, filling);
        for (size_t C : {1, 4, 8, 64, 72, 260})
            test_case(96, 13, C, 1024, filling);
        test_case(96, 13, 64, 5001, filling);
    }
    return test_report();
}
