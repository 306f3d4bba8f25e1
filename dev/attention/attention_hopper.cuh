// attention_hopper.cuh: softmax attention with Hopper's wgmma (sm_90a only): a warpgroup of four
// warps multiplies 64 rows in registers by a tile in shared memory, while it goes on with something
// else: the products of the next keys run during the exponentials of these.
#ifndef SEQ_DEV_ATTENTION_HOPPER_CUH
#define SEQ_DEV_ATTENTION_HOPPER_CUH

#include "attention_bench.cuh"

#ifdef PRECISION_BF16
// ---- instructions

// wgmma_fence, wgmma_commit, wgmma_wait: before products that use registers written since the last;
// end of a group of them; until at most PENDING groups are under way.
static __device__ inline void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
static __device__ inline void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
template <int PENDING> static __device__ inline void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

// async_fence: what this thread wrote to shared memory becomes visible to wgmma.
static __device__ inline void async_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// wgmma_tile: what wgmma takes as the address of a tile at p: rows of 128 bytes, 8-row groups 1024
// bytes apart, 16-byte pieces swizzled (see swizzled).
static __device__ inline uint64_t wgmma_tile(const floatX *p)
{
    const uint64_t at = (uint32_t)__cvta_generic_to_shared(p);
    return (at & 0x3ffff) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

// wgmma: c (64x64) = or (add) += a (64x16) b (16x64), bf16 in, fp32 out; a and c as mma has them,
// 16 rows a warp. b: a wgmma_tile whose rows are b's columns or, TRANS, b's rows.
template <int TRANS>
static __device__ inline void wgmma(float c[8][4], uint4 a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,"
        "%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
          "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
          "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
          "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),
          "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add), "n"(TRANS));
}

// wgmma: the same with a (64x16) from shared memory, a wgmma_tile with a's rows.
static __device__ inline void wgmma(float c[8][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,"
        "%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, 1, 1, 0, 0;\n}\n"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
          "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
          "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
          "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),
          "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3])
        : "l"(a), "l"(b), "r"(add));
}

// ---- tiles: [HS/64][ROWS][64], starting at a multiple of 1024 bytes

// swizzled: where columns 8c .. 8c+7 of a row of 64 are: pieces of 16 bytes change places, so that
// neither rows nor columns meet in a bank.
static __device__ inline int swizzled(int row, int c) { return row * 64 + (c ^ row % 8) * 8; }

// swizzled_fetch: tile_fetch for such tiles and a block of 256 threads.
template <int HS, int ROWS>
static __device__ inline void swizzled_fetch(floatX *tile, const floatX *x, int stride, int row,
                                             int T)
{
    const int r = threadIdx.x / 8, c = threadIdx.x % 8;
#pragma unroll
    for (int i = r; i < ROWS; i += 32) {
        const bool inside = row + i < T;
        const floatX *from = x + (size_t)(inside ? row + i : 0) * stride + c * 8;
#pragma unroll
        for (int h = 0; h < HS / 64; h++)
            copy_async(tile + h * ROWS * 64 + swizzled(i, c), from + h * 64, inside);
    }
}

// hopper_bytes: shared memory of a block of attention_hopper_kernel, and to align it.
static size_t hopper_bytes(int HS, int OT)
{
    return (size_t)(128 + 4 * OT) * HS * sizeof(floatX) + 1024;
}

// attention_hopper_kernel: softmax forward of 128 queries, a warpgroup 64 of them, q and p in
// registers. Keys are a step ahead of values: while the tensor cores multiply q by the next
// keys, this step's products become p.
template <int HS, int OT>
static __global__ void __launch_bounds__(256, 1)
    attention_hopper_kernel(floatX *out, float *lse, const floatX *qkv, int T, int C, int NH,
                            int causal)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    enum { TILE = OT * HS };
    extern __shared__ __align__(16) floatX tiles[]; // q [128][HS], keys [2][OT][HS], v likewise
    floatX *own = tiles + (1024 - (uint32_t)__cvta_generic_to_shared(tiles) % 1024) % 1024 / 2;
    floatX *keys = own + 128 * HS, *values = keys + 2 * TILE;
    const int lane = threadIdx.x % WARP, blocks = (T + 127) / 128, head = blockIdx.x / blocks;
    const int first = (blocks - 1 - blockIdx.x % blocks) * 128; // causal: the longest come first
    const int row = first + threadIdx.x / WARP * 16; // of this warp
    const int last = ((causal ? min(first + 128, T) : T) - 1) / OT;
    const floatX *x = qkv + (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    float o[1][HS / 8][4] = {}, s[1][OT / 8][4], next[OT / 8][4], sum[1][2] = {};
    float top[1][2] = {{-INFINITY, -INFINITY}};
    uint4 q[HS / 16];
    const auto dots = [&](float c[OT / 8][4], int j) { // start c = q.k of step j
        const floatX *k = keys + j % 2 * TILE;
#pragma unroll
        for (int n = 0; n < OT / 64; n++)
#pragma unroll
            for (int i = 0; i < HS / 16; i++)
                wgmma<0>(c + 8 * n, q[i],
                         wgmma_tile(k + i / 4 * OT * 64 + n * 64 * 64 + i % 4 * 16), i > 0);
        wgmma_commit();
    };
    swizzled_fetch<HS, 128>(own, x, 3 * C, first, T);
    swizzled_fetch<HS, OT>(keys, x + C, 3 * C, 0, T);
    copy_wait();
    async_fence();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HS / 16; i++)
        q[i] = ldmatrix<0>(own + i / 4 * 128 * 64 +
                           swizzled(row - first + lane % 16, i % 4 * 2 + lane / 16));
    if (last > 0)
        swizzled_fetch<HS, OT>(keys + TILE, x + C, 3 * C, OT, T);
    swizzled_fetch<HS, OT>(values, x + 2 * C, 3 * C, 0, T);
    wgmma_fence();
    dots(s[0], 0);
    wgmma_wait<0>();
    for (int j = 0; j <= last; j++) {
        copy_wait();
        async_fence();
        __syncthreads(); // keys of j + 1, values of j are there; those before them are done with
        if (j + 2 <= last)
            swizzled_fetch<HS, OT>(keys + j % 2 * TILE, x + C, 3 * C, (j + 2) * OT, T);
        if (j < last)
            swizzled_fetch<HS, OT>(values + (j + 1) % 2 * TILE, x + 2 * C, 3 * C, (j + 1) * OT, T);
        wgmma_fence();
        dots(next, j + 1); // after the last: of whatever is there, and for nothing
        if ((j + 1) * OT > T || (causal && (j + 1) * OT > row + 1))
            pairs_mask<1, OT, 0>(s, -INFINITY, row, j * OT, T, causal);
        softmax_step<HS, 1, OT>(s, o, top, sum);
        uint4 p[OT / 16];
#pragma unroll
        for (int i = 0; i < OT / 16; i++)
            p[i] = accumulator_pack(&s[0][2 * i]);
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < HS / 64; h++)
#pragma unroll
            for (int i = 0; i < OT / 16; i++)
                wgmma<1>(o[0] + 8 * h, p[i],
                         wgmma_tile(values + j % 2 * TILE + (h * OT + 16 * i) * 64), 1);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < OT / 2; i++)
            s[0][i / 4][i % 4] = next[i / 4][i % 4];
    }
    __syncthreads(); // the tiles are done with
    forward_store<HS, 0, 1>(out, lse, tiles + threadIdx.x / WARP * 16 * (HS + 8), o, top, sum, head,
                            row, T, T, C, NH);
#endif
}

// attention_hopper: attention_forward for one head size.
template <int HS, int OT>
static void attention_hopper(floatX *out, float *lse, const floatX *qkv, size_t B, size_t T,
                             size_t C, size_t NH, int causal, cudaStream_t stream)
{
    LAUNCH((attention_hopper_kernel<HS, OT>), B * NH * ((T + 127) / 128), 256, hopper_bytes(HS, OT),
           stream, out, lse, qkv, (int)T, (int)C, (int)NH, causal);
}

// hopper_backward_bytes: shared memory of a block of attention_hopper_backward_kernel.
static size_t hopper_backward_bytes(int HS)
{
    return (size_t)(2 * 128 + 4 * 64) * HS * sizeof(floatX) + 2 * 64 * sizeof(float2) + 1024;
}

// row_stats: tile_stats of row `row` of dout and out (T,HS) in global memory, to its four lanes.
template <int HS>
static __device__ inline float2 row_stats(const floatX *dout, const floatX *out, const float *lse,
                                          int C, int row, int T)
{
    float D = 0;
    for (int c = threadIdx.x % 4 * 8; c < HS && row < T; c += 32) {
        const Pack<floatX, 8> x = *(const Pack<floatX, 8> *)(out + (size_t)row * C + c);
        const Pack<floatX, 8> y = *(const Pack<floatX, 8> *)(dout + (size_t)row * C + c);
        for (int i = 0; i < 8; i++)
            D += (float)x.v[i] * (float)y.v[i];
    }
    D += __shfl_xor_sync(~0u, D, 1);
    return {row < T ? LOG2E * lse[row] : 0, D + __shfl_xor_sync(~0u, D, 2)};
}

// attention_hopper_backward_kernel: attention_backward_kernel for 128 rows, a warpgroup 64 of them,
// 64 others at a time. HS 64 or 128.
template <int HS, int SIDE>
static __global__ void __launch_bounds__(256, 1)
    attention_hopper_backward_kernel(floatX *dqkv, float2 *stats, const floatX *dout,
                                     const floatX *out, const float *lse, const floatX *qkv, int T,
                                     int C, int NH, int causal)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    enum { OWN = 128 * HS, OTHER = 64 * HS };
    extern __shared__ __align__(16) floatX tiles[]; // own [2][128][HS], others [2][2][64][HS]
    floatX *own = tiles + (1024 - (uint32_t)__cvta_generic_to_shared(tiles) % 1024) % 1024 / 2;
    floatX *others = own + 2 * OWN;
    float2 *other_stats = (float2 *)(others + 4 * OTHER), own_stats[2];
    const int lane = threadIdx.x % WARP, blocks = (T + 127) / 128, head = blockIdx.x / blocks;
    const int nth = blockIdx.x % blocks, first = (SIDE ? nth : blocks - 1 - nth) * 128;
    const int row = first + threadIdx.x / WARP * 16; // of this warp
    const int begin = SIDE && causal ? first / 64 : 0;
    const int last = ((causal && !SIDE ? min(first + 128, T) : T) - 1) / 64;
    const size_t at = (size_t)(head / NH) * T * 3 * C + head % NH * HS;
    const size_t out_at = (size_t)(head / NH) * T * C + head % NH * HS;
    const floatX *q = qkv + at, *k = q + C, *v = k + C, *g = dout + out_at;
    float dx[HS / 8][4] = {}, dv[SIDE ? HS / 8 : 8][4] = {}, s[2][8][4]; // as in the other kernel
    stats += (size_t)head * T;
    const auto fetch = [=](int j) {
        floatX *to = others + j % 2 * 2 * OTHER;
        swizzled_fetch<HS, 64>(to, SIDE ? q : k, 3 * C, j * 64, T);
        swizzled_fetch<HS, 64>(to + OTHER, SIDE ? g : v, SIDE ? C : 3 * C, j * 64, T);
        const int i = j * 64 + threadIdx.x, inside = i < T;
        if (SIDE && threadIdx.x < 64)
            copy_async(other_stats + j % 2 * 64 + threadIdx.x, stats + (inside ? i : 0), inside);
    };
    swizzled_fetch<HS, 128>(own, SIDE ? k : q, 3 * C, first, T);
    swizzled_fetch<HS, 128>(own + OWN, SIDE ? v : g, SIDE ? 3 * C : C, first, T);
    fetch(begin);
    for (int i = 0; !SIDE && i < 2; i++) {
        const int r = row + 8 * i + lane / 4;
        own_stats[i] = row_stats<HS>(g, out + out_at, lse + (size_t)head * T, C, r, T);
        if (r < T && lane % 4 == 0)
            stats[r] = own_stats[i];
    }
    own += threadIdx.x / 128 * 64 * 64; // this warpgroup's rows
    for (int j = begin; j <= last; j++) {
        const floatX *other = others + j % 2 * 2 * OTHER;
        copy_wait();
        async_fence();
        __syncthreads(); // the others of j are there; nobody reads those of j - 1 any more
        if (j < last)
            fetch(j + 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * HS / 16; i++) { // tile, then column
            const int tile = i / (HS / 16), c = i % (HS / 16);
            wgmma(s[tile], wgmma_tile(own + tile * OWN + c / 4 * 128 * 64 + c % 4 * 16),
                  wgmma_tile(other + tile * OTHER + c / 4 * 64 * 64 + c % 4 * 16), c > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        const bool edge = causal && (SIDE ? j * 64 < row + 16 : (j + 1) * 64 > row);
        backward_step<HS, SIDE, 8>(s[0], s[1], own_stats, other_stats + j % 2 * 64, row, j * 64,
                                      T, causal, edge || (j + 1) * 64 > T || T == 1);
        uint4 p[4], ds[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = accumulator_pack(&s[0][2 * i]);
            ds[i] = accumulator_pack(&s[1][2 * i]);
        }
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < HS / 64; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const floatX *b = other + (64 * h + 16 * i) * 64;
                wgmma<1>(dx + 8 * h, ds[i], wgmma_tile(b), 1);
                if (SIDE)
                    wgmma<1>(dv + 8 * h, p[i], wgmma_tile(b + OTHER), 1);
            }
        wgmma_commit();
        wgmma_wait<0>();
    }
    const float scale = rsqrtf((float)HS);
    floatX *tile = tiles + threadIdx.x / WARP * 16 * (HS + 8);
    __syncthreads(); // the tiles are done with
    tile_store<HS>(dqkv + at + (SIDE ? C : 0), tile, dx, scale, scale, NULL, 3 * C, row, T);
    if (SIDE)
        tile_store<HS>(dqkv + at + 2 * C, tile, (const float(*)[4])dv, 1, 1, NULL, 3 * C, row, T);
#endif
}

// attention_hopper_backward: attention_backward for one head size.
template <int HS>
static void attention_hopper_backward(floatX *dqkv, const floatX *dout, const floatX *out,
                                      const float *lse, const floatX *qkv, float *scratch, size_t B,
                                      size_t T, size_t C, size_t NH, int causal,
                                      cudaStream_t stream)
{
    const size_t grid = B * NH * ((T + 127) / 128), bytes = hopper_backward_bytes(HS);
    LAUNCH((attention_hopper_backward_kernel<HS, 0>), grid, 256, bytes, stream, dqkv,
           (float2 *)scratch, dout, out, lse, qkv, (int)T, (int)C, (int)NH, causal);
    LAUNCH((attention_hopper_backward_kernel<HS, 1>), grid, 256, bytes, stream, dqkv,
           (float2 *)scratch, dout, out, lse, qkv, (int)T, (int)C, (int)NH, causal);
}

// refuse_hopper: refuse_tiled where the GPU has wgmma.
template <int H64, int H128, int H192> static const char *refuse_hopper(const void *problem)
{
    int major;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 9 ? refuse_tiled<H64, H128, H192>(problem) : "not a Hopper GPU";
}
#endif

#endif
