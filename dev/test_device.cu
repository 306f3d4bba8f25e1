// test_device.cu: what a dump cannot show of the GPU trainers' shared kernels. dev/test_cuda.sh
// builds it with -DPRECISION_BF16 -DTESTING, and expects a last line `ok ...`.
#include "../train_causalrn.cu"

// expect: die unless ok.
static void expect(int ok, const char *what, double got)
{
    if (!ok)
        die(EXIT_FAIL, "%s: got %.9g", what, got);
}

// Weights of one tensor of n elements, all 1, and a copy in bf16, to be updated with gradient g.
typedef struct {
    Weights host;
    Device device;
    float *params, *grads;
    floatX *copy;
} One;

// one_new: see One.
static void one_new(One *o, size_t n, float g)
{
    const Tensor table[] = {{"w", {n}, INIT_ONE, DECAY, 1, 0}};
    memset(o, 0, sizeof *o);
    weights_plan(&o->host, table, 1, sizeof(float));
    weights_alloc(&o->host, NULL, NULL, 1);
    for (size_t i = 0; i < n; i++)
        ((float *)arena_data(&o->host.grads, 0))[i] = g;
    device_start(&o->device, &o->host, &o->params, &o->grads, 1, 1);
    device_weights_up(&o->device, &o->host);
    o->copy = (floatX *)device_new(n * sizeof(floatX), "copy");
    const WeightCopy copy = {o->params, o->copy, n, 0};
    device_pieces(&o->device, &copy, 1);
}

// updates: `steps` updates at rate lr; *master, *low = the last weight and its copy.
static void updates(size_t n, float g, long steps, double lr, double decay, double *master,
                    double *low)
{
    static One o;
    Training t = {};
    one_new(&o, n, g);
    t.beta1 = 0.9;
    t.beta2 = 0.999;
    t.adam_eps = 1e-8;
    t.weight_decay = decay;
    for (long s = 0; s < steps; s++) {
        StepInput in = {lr, 1 / (1 - pow(t.beta1, (double)s + 1)),
                        1 / (1 - pow(t.beta2, (double)s + 1)), 1, 1, 1};
        CUDA_CHECK(cudaMemcpy(o.device.input, &in, sizeof in, cudaMemcpyHostToDevice));
        gradient_norm(o.device.result, &o.device.weights.grads, &o.device.pieces, o.device.input, 0,
                      o.device.stream);
        adamw(&o.device.weights, &t, &o.device.pieces, o.device.input, o.device.result,
              o.device.stream);
        CUDA_CHECK(cudaStreamSynchronize(o.device.stream));
    }
    floatX copy;
    device_weights_down(&o.host, &o.device);
    CUDA_CHECK(cudaMemcpy(&copy, o.copy + n - 1, sizeof copy, cudaMemcpyDeviceToHost));
    *master = ((float *)arena_data(&o.host.params, 0))[n - 1];
    *low = (float)copy;
}

// test_masters: A20: updates of 6e-4 of a weight of 1, each below half a step of bf16, add up, and
// so does weight decay of 1e-5 a step.
static void test_masters(void)
{
    double master, low;
    updates(3000, 0.5f, 100, 6e-4, 0, &master, &low);
    expect(fabs(master - 0.94) < 1e-5, "100 updates of 6e-4: expected a master of 0.94", master);
    expect(fabs(low - 0.94) < 0.004, "100 updates of 6e-4: expected a copy of 0.94", low);
    updates(3000, 0, 1000, 1e-3, 1e-2, &master, &low);
    const double want = pow(1 - 1e-5, 1000);
    expect(fabs(master - want) < 1e-4, "1000 decays of 1e-5: expected 0.99005", master);
}

// fill_kernel: row r of x (N,C) = a row that depends on r % 1001.
static __global__ void fill_kernel(float *x, size_t n, int C)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        x[i] = (float)((i / C % 1001 * 37 + i % C * 11) % 101);
}

// test_large: B09: normalize N rows of C, about 2^31 elements: the last rows are like those at the
// start that have the same numbers.
static void test_large(size_t N, size_t C)
{
    enum { ROWS = 1001 };
    const size_t n = N * C, rows = ROWS * C, first = (N - ROWS) % ROWS * C;
    float *x = (float *)device_new(n * sizeof(float), "x");
    float *rstd = (float *)device_new(N * sizeof(float), "rstd");
    floatX *out = (floatX *)device_new(n * sizeof(floatX), "out");
    floatX *h_start = (floatX *)alloc_zero(2 * rows, sizeof(floatX), "rows");
    floatX *h_end = (floatX *)alloc_zero(rows, sizeof(floatX), "rows");
    double squares = 0;
    CUDA_CHECK(cudaMemset(out, 0xff, n * sizeof(floatX)));
    LAUNCH(fill_kernel, 4096, 256, 0, 0, x, n, (int)C);
    normalize_forward(out, rstd, x, N, C, 0);
    CUDA_CHECK(cudaMemcpy(h_start, out, 2 * rows * sizeof(floatX), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(h_end, out + n - rows, rows * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < rows; i++)
        squares += (double)(float)h_end[i] * (double)(float)h_end[i];
    expect(!memcmp(h_start + first, h_end, rows * sizeof(floatX)),
           "normalize of 2^31 elements: the last rows differ from the first; C", (double)C);
    expect(C == 1 || fabs(squares / (double)rows - 1) < 0.01,
           "normalize of 2^31 elements: expected variance 1", squares / (double)rows);
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(rstd));
    CUDA_CHECK(cudaFree(out));
    free(h_start);
    free(h_end);
}

int main(void)
{
    cuda_start();
    test_masters();
    const size_t two31 = (size_t)1 << 31, pair[][2] = {{two31 - 1, 1}, {two31 / 64, 64},
                                                       {(two31 + 1) / 3, 3}};
    size_t large = 0;
    for (size_t i = 0; i < 3; i++)
        if (cuda_memory_free() > 11 * two31) {
            test_large(pair[i][0], pair[i][1]);
            large++;
        }
    printf("ok masters move in BF16; %zu of 3 arrays of 2^31 elements fitted and were right\n",
           large);
    return 0;
}
