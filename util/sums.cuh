// sums.cuh: sums over many rows in an order that nothing changes: of losses, of slices, of
// columns, of rows by token. No float is added atomically: the shape alone cuts a sum into parts,
// and these are added in their order, so that the same call gives the same bits.
#ifndef SEQ_UTIL_SUMS_CUH
#define SEQ_UTIL_SUMS_CUH

#include "warp.cuh"

// loss_kernel: result->loss = (after the first batch of an update: +=) the sum of losses (N) times
// step->unit, in one block.
static __global__ void loss_kernel(StepResult *result, const float *losses, const StepInput *step,
                                   size_t N)
{
    double sum = 0;
#pragma unroll 8
    for (size_t n = threadIdx.x; n < N; n += blockDim.x)
        sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        result->loss = (step->first ? 0 : result->loss) + sum * step->unit;
}

// ---- slices and columns

// Sums over all N rows are made in slices of them, and these then added in their order. Columns
// have COLUMN_SLICES, as many as an H200 has multiprocessors.
enum { SLICES = 16, SLICE_THREADS = 256, SLICES_MOST = 1 << 24, MATRICES_MOST = 1 << 22 };
enum { COLUMN_SLICES = 132, BIAS_WARPS = 16 };

// slices_of: into how many equal slices a sum over N rows of matrices of `size` elements is cut: a
// power of two to SLICES, as long as all fit MATRICES_MOST elements, 256 tiles of 128 x 128: more
// only have more to write and to read again.
static inline size_t slices_of(size_t N, size_t size)
{
    size_t n = 1;
    while (n < SLICES && N % (2 * n) == 0 && 2 * n * size <= MATRICES_MOST)
        n *= 2;
    return n;
}

// A sum over slices: out += the sum over slices of partial (slices,n), in order; out has n elements
// in parts of `part`, whose starts are `step` apart; step 0: the first part alone. rest_out (rest)
// += the same of (rest_slices,rest), which follows partial. n + rest < 2^32: a division of 64 bits
// takes longer than the sum.
typedef struct {
    float *out, *rest_out;
    const float *partial;
    size_t n, rest, part, step;
    int slices, rest_slices;
} SlicesSum;

// slices_element: element i of a sum, if it has as many. SLICES loads are under way at a time, also
// where there are no more slices: a loop over `count` alone would wait for each.
static __device__ inline void slices_element(SlicesSum s, uint32_t i)
{
    const uint32_t part = (uint32_t)s.part;
    const int count = i < s.n ? s.slices : s.rest_slices;
    const size_t pitch = i < s.n ? s.n : s.rest;
    float sum = 0;
    if (i >= s.n + s.rest || (i < s.n && i >= part && !s.step))
        return;
    const float *partial = s.partial + (i < s.n ? i : s.slices * s.n + i - s.n);
    for (int first = 0; first < count; first += SLICES) {
        float each[SLICES];
#pragma unroll
        for (int k = 0; k < SLICES; k++)
            each[k] = first + k < count ? partial[(first + k) * pitch] : 0;
#pragma unroll
        for (int k = 0; k < SLICES; k++)
            sum += each[k];
    }
    *(i < s.n ? s.out + i / part * s.step + i % part : s.rest_out + i - s.n) += sum;
}

// slices_sum_kernel: see SlicesSum.
static __global__ void slices_sum_kernel(float *out, float *rest_out, const float *partial,
                                         int slices, size_t n, int rest_slices, size_t rest,
                                         size_t part, size_t step)
{
    slices_element({out, rest_out, partial, n, rest, part, step, slices, rest_slices},
                   blockIdx.x * blockDim.x + threadIdx.x);
}

// Sums that wait to be made by one launch: block first[k] is the first of sum k.
enum { SLICES_WAITING = 8 };
typedef struct {
    SlicesSum sums[SLICES_WAITING];
    unsigned first[SLICES_WAITING + 1];
} SlicesTable;
static struct {
    SlicesTable table;
    int wait, count;
} slices_waiting;

// slices_table_kernel: all sums of a table.
static __global__ void slices_table_kernel(const SlicesTable table)
{
    int k = 0;
    while (blockIdx.x >= table.first[k + 1])
        k++;
    slices_element(table.sums[k],
                   (blockIdx.x - table.first[k]) * SLICE_THREADS + threadIdx.x);
}

// slices_wait: until slices_flush, slices_sum only takes down what is to be added up, at most
// SLICES_WAITING sums: no two have a place in their `out` or their partial sums in common.
static inline void slices_wait(void)
{
    slices_waiting.wait = 1;
}

// slices_flush: make the sums that wait; from here on none does.
static inline void slices_flush(cudaStream_t stream)
{
    const int count = slices_waiting.count;
    if (count)
        LAUNCH(slices_table_kernel, slices_waiting.table.first[count], SLICE_THREADS, 0, stream,
               slices_waiting.table);
    slices_waiting.wait = slices_waiting.count = 0;
}

// slices_sum: see SlicesSum, or slices_wait.
static inline void slices_sum(float *out, float *rest_out, const float *partial, size_t slices,
                              size_t n, size_t rest_slices, size_t rest, size_t part, size_t step,
                              cudaStream_t stream)
{
    const size_t grid = (n + rest + SLICE_THREADS - 1) / SLICE_THREADS;
    SlicesTable *table = &slices_waiting.table;
    if (n + rest > UINT32_MAX - SLICE_THREADS)
        die(EXIT_FAIL, "slices_sum: %zu elements, expected fewer than 2^32", n + rest);
    if (!slices_waiting.wait) {
        LAUNCH(slices_sum_kernel, grid, SLICE_THREADS, 0, stream, out, rest_out, partial,
               (int)slices, n, (int)rest_slices, rest, part, step);
        return;
    }
    const int k = slices_waiting.count++;
    if (k == SLICES_WAITING || table->first[k] + grid > INT_MAX)
        die(EXIT_FAIL, "slices_sum: more sums wait than the table of %d has room for",
            (int)SLICES_WAITING);
    table->sums[k] = {out, rest_out, partial, n, rest, part, step, (int)slices, (int)rest_slices};
    table->first[k + 1] = table->first[k] + (unsigned)grid;
}

// slice_rows: how many of N rows are in this block's slice, from *first on. Blocks of one slice are
// COLUMN_SLICES apart.
static __device__ inline int slice_rows(size_t *first, size_t N)
{
    const size_t K = (N + COLUMN_SLICES - 1) / COLUMN_SLICES;
    *first = blockIdx.x % COLUMN_SLICES * K;
    return *first < N ? (int)min(K, N - *first) : 0;
}

// columns_sum: the row of this block's slice in partial (COLUMN_SLICES,OC) = what its WARPS warps
// have of each column, summed; a lane has o .. o+VEC-1.
template <int VEC, int WARPS>
static __device__ inline void columns_sum(float *partial, const float sum[VEC], int o, int OC)
{
    __shared__ float sums[WARPS][WARP * VEC];
    const int lane = threadIdx.x % WARP, first = o - lane * VEC;
    __syncthreads(); // sums may still be read from the call before
    for (int i = 0; i < VEC; i++)
        sums[threadIdx.x / WARP][lane * VEC + i] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WARP * VEC && first + i < OC; i += WARPS * WARP) {
        float total = 0;
        for (int k = 0; k < WARPS; k++)
            total += sums[k][i];
        partial[(size_t)(blockIdx.x % COLUMN_SLICES) * OC + first + i] = total;
    }
}

// bias_slices_kernel: partial (COLUMN_SLICES,OC) = column sums of each slice of x (N,OC), rows
// `pitch` apart. A warp takes a row of 32 VEC columns.
template <int VEC>
static __global__ void bias_slices_kernel(float *partial, const floatX *__restrict__ x, size_t N,
                                          int OC, size_t pitch)
{
    const int o = (blockIdx.x / COLUMN_SLICES * WARP + threadIdx.x % WARP) * VEC;
    size_t first;
    const int rows = slice_rows(&first, N);
    float sum[VEC] = {};
    x += first * pitch + (o < OC ? o : 0);
#pragma unroll 8
    for (int k = threadIdx.x / WARP; k < rows; k += BIAS_WARPS) {
        const Pack<floatX, VEC> v = *(const Pack<floatX, VEC> *)(x + k * pitch);
        for (int i = 0; i < VEC; i++)
            sum[i] += (float)v.v[i];
    }
    columns_sum<VEC, BIAS_WARPS>(partial, sum, o, OC);
}

// bias_slices: see bias_slices_kernel; eight columns a lane where rows are aligned for it.
static inline void bias_slices(float *partial, const floatX *x, size_t N, size_t OC, size_t pitch,
                               cudaStream_t stream)
{
    const size_t vec = (OC | pitch) % 8 || (uintptr_t)x % (8 * sizeof(floatX)) ? 1 : 8;
    const size_t grid = (OC + WARP * vec - 1) / (WARP * vec) * COLUMN_SLICES;
    if (vec == 8)
        LAUNCH(bias_slices_kernel<8>, grid, BIAS_WARPS * WARP, 0, stream, partial, x, N, (int)OC,
               pitch);
    else
        LAUNCH(bias_slices_kernel<1>, grid, BIAS_WARPS * WARP, 0, stream, partial, x, N, (int)OC,
               pitch);
}

// batch_sums_kernel: see batch_sums; a thread owns an element.
static __global__ void batch_sums_kernel(float *out, const floatX *x, size_t B, size_t n)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    float sum = 0;
    if (i >= n)
        return;
#pragma unroll 8
    for (size_t b = 0; b < B; b++)
        sum += (float)x[b * n + i];
    out[i] += sum;
}

// batch_sums: out (n) += the sum over the batch of x (B,n).
static inline void batch_sums(float *out, const floatX *x, size_t B, size_t n, cudaStream_t stream)
{
    LAUNCH(batch_sums_kernel, (n + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0, stream,
           out, x, B, n);
}

// ---- rows by token

// Vocabularies of up to TOKENS_SHARED tokens have their sums in shared memory, in at most
// TOKEN_SLICES slices of the rows.
enum { TOKENS_SHARED = 384, TOKEN_SLICES = 512, TOKEN_CHANNELS = 4 };

// token_slices: in how many slices of tokens token_sums works where V is small, else 0.
static inline size_t token_slices(size_t V, size_t C)
{
    size_t n = TOKEN_SLICES;
    while (n > 1 && n * V * C > SLICES_MOST)
        n /= 2;
    return V <= TOKENS_SHARED ? n : 0;
}

// token_scratch: elements of scratch that token_sums needs.
static inline size_t token_scratch(size_t N, size_t V, size_t C)
{
    return V <= TOKENS_SHARED ? token_slices(V, C) * V * C : N + (N + WARP - 1) / WARP * C;
}

// token_slices_kernel: a warp takes a slice of tokens and 32 channels, a lane one channel: partial
// (slices,V,C) = the slice's sums of x by token. They are made in shared memory (V,32).
static __global__ void token_slices_kernel(float *partial, const floatX *__restrict__ x,
                                           const int *__restrict__ tokens, size_t N, int V, int C,
                                           int slices)
{
    extern __shared__ float sums[];
    const int lane = threadIdx.x, slice = blockIdx.x % slices;
    const int c = blockIdx.x / slices * WARP + lane;
    const size_t size = (N + slices - 1) / slices, end = min((slice + 1) * size, N);
    if (c >= C)
        return;
    for (int v = 0; v < V; v++)
        sums[v * WARP + lane] = 0;
#pragma unroll 8
    for (size_t n = slice * size; n < end; n++)
        sums[tokens[n] * WARP + lane] += (float)x[n * C + c];
    for (int v = 0; v < V; v++)
        partial[((size_t)slice * V + v) * C + c] = sums[v * WARP + lane];
}

// token_order_kernel: order (N) = the positions sorted by token, those of one token in their order.
// A thread has one and counts what comes before it.
static __global__ void token_order_kernel(int *order, const int *tokens, size_t N)
{
    __shared__ __align__(16) int tile[SLICE_THREADS];
    const size_t first = blockIdx.x * (size_t)SLICE_THREADS, n = first + threadIdx.x;
    int less = 0, token = tokens[min(n, N - 1)];
    for (size_t m = 0; m < N; m += SLICE_THREADS) {
        __syncthreads(); // the tile may still be read
        tile[threadIdx.x] = m + threadIdx.x < N ? tokens[m + threadIdx.x] : INT_MAX;
        __syncthreads();
#pragma unroll 32
        for (int i = 0; i < SLICE_THREADS; i++)
            less += tile[i] < token + (m < first);
        for (int i = 0; m == first && i < (int)threadIdx.x; i++)
            less += tile[i] == token;
    }
    if (n < N)
        order[less] = (int)n;
}

// token_sums_kernel: a warp a part, WARP places of `order`, and 32 TOKEN_CHANNELS channels: out +=
// the sum of x over each run of a token that begins in the part, as far as it goes there; heads
// (parts,C) = that of a run that began before. So a token that is everywhere, as a filler is, does
// not leave all work to one warp.
static __global__ void token_sums_kernel(float *out, float *heads, const floatX *__restrict__ x,
                                         const int *__restrict__ tokens,
                                         const int *__restrict__ order, size_t N, int C, int groups)
{
    enum { DEEP = 8 }; // rows under way at once
    const size_t part = row_of_warp() / groups, first = part * WARP;
    const int lane = threadIdx.x % WARP;
    const int c0 = row_of_warp() % groups * WARP * TOKEN_CHANNELS + lane;
    float sum[TOKEN_CHANNELS] = {}, y[DEEP][TOKEN_CHANNELS];
    if (first >= N)
        return;
    const int n = (int)min((size_t)WARP, N - first);
    const int row = order[first + min(lane, n - 1)], token = tokens[row];
    const int before = first ? tokens[order[first - 1]] : -1;
    for (int j = 0; j < n; j += DEEP) {
#pragma unroll
        for (int k = 0; k < DEEP; k++) {
            const floatX *from = x + (size_t)__shfl_sync(~0u, row, j + k) * C + c0;
            for (int i = 0; i < TOKEN_CHANNELS; i++)
                y[k][i] = c0 + WARP * i < C ? (float)from[WARP * i] : 0;
        }
#pragma unroll
        for (int k = 0; k < DEEP; k++) {
            const int here = __shfl_sync(~0u, token, j + k);
            const int next = __shfl_sync(~0u, token, min(j + k + 1, WARP - 1));
            if (j + k >= n)
                continue;
            for (int i = 0; i < TOKEN_CHANNELS; i++)
                sum[i] += y[k][i];
            if (j + k + 1 < n && next == here)
                continue;
            float *to = here == before ? heads + part * C : out + (size_t)here * C;
            for (int i = 0; i < TOKEN_CHANNELS && c0 + WARP * i < C; i++) {
                to[c0 + WARP * i] = sum[i] + (here == before ? 0 : to[c0 + WARP * i]);
                sum[i] = 0;
            }
        }
    }
}

// token_heads_kernel: a warp a part but the first, and 32 channels: where a run goes on for the
// first time, out += its heads, of this part and those after it, in order.
static __global__ void token_heads_kernel(float *out, const float *__restrict__ heads,
                                          const int *__restrict__ tokens,
                                          const int *__restrict__ order, size_t N, int C,
                                          int groups)
{
    const size_t part = row_of_warp() / groups + 1, parts = (N + WARP - 1) / WARP;
    const int lane = threadIdx.x % WARP, c = row_of_warp() % groups * WARP + lane;
    float sum = 0;
    if (part >= parts)
        return;
    const int token = tokens[order[part * WARP]];
    if (tokens[order[part * WARP - 1]] != token ||
        (part > 1 && tokens[order[(part - 1) * WARP - 1]] == token))
        return;
    size_t end = part;
    for (int count = WARP; count == WARP; end += count) {
        const bool same = end + lane < parts && tokens[order[(end + lane) * WARP]] == token;
        const unsigned others = ~__ballot_sync(~0u, same);
        count = others ? __ffs(others) - 1 : WARP;
    }
    if (c >= C)
        return;
#pragma unroll 16
    for (size_t p = part; p < end; p++)
        sum += heads[p * C + c];
    out[(size_t)token * C + c] += sum;
}

// token_sums: out (V,C) += the rows of x (N,C) by their tokens (N). Threads own channels, and the
// rows of a token are added in an order that N and the tokens give, so that repeated tokens neither
// race nor change a sum. With a large vocabulary they are sorted first, in N^2 comparisons. partial
// (token_scratch): scratch.
static inline void token_sums(float *out, float *partial, const floatX *x, const int *tokens,
                              size_t N, size_t V, size_t C, cudaStream_t stream)
{
    const size_t slices = token_slices(V, C), parts = (N + WARP - 1) / WARP;
    const size_t groups = (C + WARP * TOKEN_CHANNELS - 1) / (WARP * TOKEN_CHANNELS);
    const size_t warps = (C + WARP - 1) / WARP;
    int *order = (int *)partial;
    float *heads = partial + N;
    if (slices) {
        LAUNCH(token_slices_kernel, warps * slices, WARP, V * WARP * sizeof(float), stream, partial,
               x, tokens, N, (int)V, (int)C, (int)slices);
        slices_sum(out, NULL, partial, slices, V * C, 0, 0, V * C, 0, stream);
        return;
    }
    LAUNCH(token_order_kernel, (N + SLICE_THREADS - 1) / SLICE_THREADS, SLICE_THREADS, 0, stream,
           order, tokens, N);
    LAUNCH(token_sums_kernel, (parts * groups + ROW_WARPS - 1) / ROW_WARPS, ROW_WARPS * WARP, 0,
           stream, out, heads, x, tokens, (const int *)order, N, (int)C, (int)groups);
    if (parts > 1)
        LAUNCH(token_heads_kernel, ((parts - 1) * warps + ROW_WARPS - 1) / ROW_WARPS,
               ROW_WARPS * WARP, 0, stream, out, (const float *)heads, tokens, (const int *)order,
               N, (int)C, (int)warps);
}

#endif
