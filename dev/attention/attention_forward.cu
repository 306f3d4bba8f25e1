// attention_forward.cu: out_t = sum_u softmax_u(q_t.k_u / sqrt(HS)) v_u and each row's log of the
// sum. The equations and every kernel but the naive one and wgmma are in train_gpt2.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o attention_forward dev/attention/attention_forward.cu
//
// ms (TFLOP/s, 4 HS a pair) at (B,T,NH,HS), causal, L2 flushed; an H200, 2026-11-29.
//    version                                    (320,258,1,192) (8,2048,16,128) (16,1024,12,64)
//  1 naive: a block a query, its scores stored         9.2 (0.9)
//  2 a warp a query, softmax as it goes; FP32's          4.2 (2.0)     44.8 (3.1)     22.2 (1.2)
//  3 tiles: 16 queries a warp, 32 keys at a time       0.076 (107)    0.587 (234)    0.135 (190)
//  4 16 queries, 64 keys                                0.105 (78)    0.588 (234)    0.128 (201)
//  5 32 queries, 32 keys: a fetch serves 2 products                   0.472 (292)    0.121 (213)
//  6 32 queries, 64 keys                                              0.477 (288)    0.121 (214)
//  7 6 with fewer blocks an SM and no spills                                         0.125 (207)
//  8 attention_forward                                 0.076 (108)    0.470 (292)    0.121 (212)
//  9 3 in blocks of 6 warps: 258 = 96+96+66            0.076 (108)
// 10 wgmma: 64 queries a warpgroup, 64 keys             0.090 (91)    0.429 (320)    0.166 (156)
// 11 wgmma, 128 keys                                                                 0.154 (167)
// The trainer has 3 or 5, by head size. wgmma (attention_hopper.cuh) gains 9% at HS 128 and
// loses elsewhere: it stays here.
//
// On paper, in clocks of a multiprocessor for 64 x 64 pairs of head size 128 (mma.sync: some 1270
// multiplications a clock; 16 exponentials; 128 bytes of shared memory):
// mma 826; exponentials 256; shared memory 1280 (3), 1152 (4), 768 (5), 640 (6). At 1755 MHz the
// three shapes take no less than 0.03, 0.24 and 0.05 ms.
#include "attention_hopper.cuh"

#ifdef PRECISION_BF16
template <int OT64, int OT128, int OT192>
static void run_hopper(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    if (x->C / x->NH == 64)
        attention_hopper<64, OT64>(FORWARD_ARGS(x), stream);
    else if (x->C / x->NH == 128)
        attention_hopper<128, OT128>(FORWARD_ARGS(x), stream);
    else
        attention_hopper<192, OT192>(FORWARD_ARGS(x), stream);
}
#endif

static const BenchKernel kernels[] = {
    {1, "naive: a block a query", run_forward_naive<0>, refuse_naive},
    {2, "a warp a query; FP32's", run_forward_general<0>, NULL},
#ifdef PRECISION_BF16
    {3, "tiles, 16 queries a warp, 32 keys", run_forward_tiled<4, 1, 32, 4, 3, 3>,
     refuse_tiled<1, 1, 1>},
    {4, "16 queries, 64 keys", run_forward_tiled<4, 1, 64, 4, 2, 1>, refuse_tiled<1, 1, 1>},
    {5, "32 queries, 32 keys", run_forward_tiled<4, 2, 32, 3, 2, 0>, refuse_tiled<1, 1, 0>},
    {6, "32 queries, 64 keys", run_forward_tiled<4, 2, 64, 3, 2, 0>, refuse_tiled<1, 1, 0>},
    {7, "6, two blocks an SM", run_forward_tiled<4, 2, 64, 2, 0, 0>, refuse_tiled<1, 0, 0>},
#endif
    {8, "attention_forward", run_forward_any<0>, NULL},
#ifdef PRECISION_BF16
    {9, "3, 6 warps a block", run_forward_tiled<6, 1, 32, 0, 0, 2>, refuse_tiled<0, 0, 1>},
    {10, "wgmma, 64 keys", run_hopper<64, 64, 64>, refuse_hopper<1, 1, 1>},
    {11, "wgmma, 128 keys", run_hopper<128, 64, 64>, refuse_hopper<1, 0, 0>},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "attention_forward: softmax attention, its own shapes");
    const int n = sizeof kernels / sizeof *kernels;
    return attention_ladder(kernels, n, 0, 0, &bench) ? EXIT_FAIL : 0;
}
