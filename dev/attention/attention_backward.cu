// attention_backward.cu: dq, dk, dv of softmax attention from dout, out, qkv and each row's log of
// the sum. The equations and every kernel but the naive one and wgmma are in train_gpt2.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o attention_backward dev/attention/attention_backward.cu
//
// ms (TFLOP/s, 10 HS a pair, though 14 are done) at (B,T,NH,HS), causal, L2 flushed; an H200,
// 2026-11-29.
//    version                                    (320,258,1,192) (8,2048,16,128) (16,1024,12,64)
//  1 naive: a block a query, then a key                 53.1 (0.4)
//  2 a warp a query, then a key; FP32's                  8.2 (2.5)    129.1 (2.7)     42.0 (1.5)
//  3 tiles: 16 queries, then keys, a warp, 32 other     0.249 (82)     1.78 (193)    0.394 (164)
//  4 64 others                                          0.319 (64)     1.78 (193)    0.387 (166)
//  5 3 with more blocks a multiprocessor for dq                        1.77 (194)    0.394 (164)
//  6 3 in blocks of 8 warps: a tile serves 128 rows     0.294 (70)     1.92 (179)    0.470 (137)
//  7 4 in blocks of 8 warps                                            1.81 (189)    0.429 (150)
//  8 attention_backward                                 0.249 (82)     1.77 (194)    0.388 (166)
//  9 attention_forward and attention_backward           0.322 (64)     2.24 (154)    0.508 (127)
// 10 wgmma: 64 rows a warpgroup, 64 others                             1.19 (288)    0.358 (180)
// The trainer has 3 or 4, by head size. wgmma (attention_hopper.cuh) is 1.5 times as fast at HS
// 128, 1.08 at the 64 of GPT-2, and for one generation of GPUs: it stays here.
//
// On paper, in clocks of a multiprocessor for 64 x 64 pairs (mma.sync: some 1270 multiplications a
// clock; shared memory: 128 bytes): head size 64: mma 1450, shared memory 1860; 128: 2890, 3730;
// 192: 4340, 7300. At 1755 MHz the three shapes take no less than 0.10, 1.1 and 0.21 ms. From L2
// come 2.1 GB in each of the two kernels at the second shape, in blocks of 8 warps half of that.
#include "attention_hopper.cuh"

#ifdef PRECISION_BF16
static void run_hopper(const void *problem, cudaStream_t stream)
{
    const Attention *x = (const Attention *)problem;
    if (x->C / x->NH == 64)
        attention_hopper_backward<64>(BACKWARD_ARGS(x), stream);
    else
        attention_hopper_backward<128>(BACKWARD_ARGS(x), stream);
    attention_split(x, stream);
}
#endif

static const BenchKernel kernels[] = {
    {1, "naive: a block a row", run_backward_naive<0>, refuse_naive},
    {2, "a warp a row; FP32's", run_backward_general<0>, NULL},
#ifdef PRECISION_BF16
    {3, "tiles, 32 others", run_backward_tiled<4, 32, 33, 22, 22>, refuse_tiled<1, 1, 1>},
    {4, "tiles, 64 others", run_backward_tiled<4, 64, 33, 22, 11>, refuse_tiled<1, 1, 1>},
    {5, "3, more blocks for dq", run_backward_tiled<4, 32, 43, 32, 0>, refuse_tiled<1, 1, 0>},
    {6, "3, 8 warps a block", run_backward_tiled<8, 32, 21, 11, 11>, refuse_tiled<1, 1, 1>},
    {7, "4, 8 warps a block", run_backward_tiled<8, 64, 21, 11, 0>, refuse_tiled<1, 1, 0>},
#endif
    {8, "attention_backward", run_backward_any<0>, NULL},
    {9, "attention_forward + backward", run_both<0>, NULL},
#ifdef PRECISION_BF16
    {10, "wgmma", run_hopper, refuse_hopper<1, 1, 0>},
#endif
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "attention_backward: softmax attention, its own shapes");
    const int n = sizeof kernels / sizeof *kernels;
    return attention_ladder(kernels, n, 1, 0, &bench) ? EXIT_FAIL : 0;
}
