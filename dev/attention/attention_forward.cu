// attention_forward.cu: out_t = sum_u softmax_u(q_t.k_u / sqrt(HS)) v_u and each row's log of the
// sum. The equations and every kernel but the naive one are in attention.cuh.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp
//        [-DPRECISION_BF16] -o attention_forward dev/attention/attention_forward.cu
//
// ms (TFLOP/s, 4 HS a pair) at (B,T,NH,HS), causal, L2 flushed. NOT YET MEASURED.
//    version                            (320,258,1,192)  (8,2048,16,128)  (16,1024,12,64)
//  1 naive: a block a query, its scores in shared memory
//  2 a warp a query, softmax as it goes; FP32's, and any head size's
//  3 tiles: 16 queries a warp, 32 keys at a time
//  4 16 queries, 64 keys
//  5 32 queries, 32 keys: each key and value fetched from shared memory serves two products
//  6 32 queries, 64 keys
//
// On paper, in clocks of a multiprocessor for 64 x 64 pairs of head size 128 (65536 x 64 products
// at some 1270 a clock for mma.sync; 16 exponentials and 128 bytes of shared memory a clock):
// mma 826; exponentials 256; shared memory 1024 (3), 896 (4), 768 (5), 640 (6).
#include "attention_bench.cuh"

static const BenchKernel kernels[] = {
    {1, "naive: a block a query", run_forward_naive<0>, refuse_naive},
    {2, "a warp a query; FP32's", run_forward_general<0>, NULL},
#ifdef PRECISION_BF16
    {3, "tiles, 16 queries a warp, 32 keys", run_forward_tiled<0, 1, 32, 4, 3, 3>,
     refuse_tiled<1, 1, 1>},
    {4, "16 queries, 64 keys", run_forward_tiled<0, 1, 64, 4, 2, 1>, refuse_tiled<1, 1, 1>},
    {5, "32 queries, 32 keys", run_forward_tiled<0, 2, 32, 3, 2, 0>, refuse_tiled<1, 1, 0>},
    {6, "32 queries, 64 keys", run_forward_tiled<0, 2, 64, 3, 2, 0>, refuse_tiled<1, 1, 0>},
    {7, "6, two blocks an SM", run_forward_tiled<0, 2, 64, 2, 0, 0>, refuse_tiled<1, 0, 0>},
#endif
    {8, "attention_forward", run_forward_any<0>, NULL},
};

int main(int argc, char **argv)
{
    const BenchOptions bench =
        bench_options(argc, argv, "attention_forward: softmax attention, its own shapes");
    const int n = sizeof kernels / sizeof *kernels;
    return attention_ladder(kernels, n, 0, 0, &bench) ? EXIT_FAIL : 0;
}
