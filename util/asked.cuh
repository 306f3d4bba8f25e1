// asked.cuh: heads that make logits only where something is asked. MQAR asks at 16 of 256 positions
// and has 8192 symbols: at C = 64 the logits of all positions would be five times the products of
// two blocks, and most of the memory.
//
// R rows stand for the N positions of a batch: those with a target, in their order, and behind them
// rows of zeros, because R is the same for every batch of training, whose step is recorded once.
#ifndef SEQ_UTIL_ASKED_CUH
#define SEQ_UTIL_ASKED_CUH

#include "warp.cuh"

// where (R): the position of each row, -1: none; inverse (N): the row of each position, -1: none;
// rows (R,C): what the head reads, and then its gradient. All NULL where it reads every position.
typedef struct {
    int *where, *inverse;
    floatX *rows;
} Asked;

// ASKED_TENSORS: rows of the table of Dacts, for B sequences of T positions with `asked` rows each;
// B 0: they do not exist.
#define ASKED_TENSORS(B, asked, T, C) \
    DEVICE("where", int, Dacts, asked.where, B, asked), \
    DEVICE("inverse", int, Dacts, asked.inverse, B, T), \
    DEVICE("asked", floatX, Dacts, asked.rows, B, asked, C)

// asked_each: rows of a sequence, training's and evaluations': as many as can be asked there; 0:
// the head reads every position, where that is less than twice the work, or small.
static inline size_t asked_each(TaskShape shape)
{
    return 2 * shape.asked <= shape.T && shape.V >= 1024 ? shape.asked : 0;
}

// asked_rows: R of a batch of B sequences of T positions.
static inline size_t asked_rows(size_t each, size_t B, size_t T)
{
    return B * (each ? each : T);
}

// asked_or: a's rows or, where the head reads every position, x.
static inline floatX *asked_or(Asked a, floatX *x)
{
    return a.rows ? a.rows : x;
}

// asked_kernel: where (R) and inverse (N) from targets (N), of which at most R are not IGNORE. One
// block of 32 warps, each with a part of the positions, of which it counts the targets first.
static __global__ void __launch_bounds__(WARP * WARP)
    asked_kernel(int *where, int *inverse, const int *targets, int N, int R)
{
    __shared__ int counts[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int part = (N + WARP * WARP - 1) / (WARP * WARP) * WARP;
    const int from = min(warp * part, N), to = min(from + part, N);
    int count = 0, row = 0, all = 0;
#pragma unroll 8
    for (int n = from + lane; n < from + part; n += WARP) // of all lanes as often
        count += __popc(__ballot_sync(~0u, n < to && targets[n] != IGNORE));
    if (lane == 0)
        counts[warp] = count;
    __syncthreads();
    for (int w = 0; w < WARP; w++) {
        row += w < warp ? counts[w] : 0;
        all += counts[w];
    }
#pragma unroll 8
    for (int n = from + lane; n < from + part; n += WARP) {
        const bool here = n < to && targets[n] != IGNORE;
        const unsigned those = __ballot_sync(~0u, here);
        const int r = row + __popc(those & ((1u << lane) - 1));
        if (here)
            where[r] = n;
        if (n < to)
            inverse[n] = here ? r : -1;
        row += __popc(those);
    }
    for (int r = all + threadIdx.x; r < R; r += WARP * WARP)
        where[r] = -1;
}

// asked_move_kernel: a warp a row: out (rows,C) = x[from[row]], 0 where that is -1; C a multiple of
// VEC.
template <int VEC>
static __global__ void asked_move_kernel(floatX *__restrict__ out, const floatX *__restrict__ x,
                                         const int *__restrict__ from, size_t rows, size_t C)
{
    typedef Pack<floatX, VEC> Each;
    const size_t row = row_of_warp();
    if (row >= rows)
        return;
    const int at = from[row];
    for (size_t c = VEC * (threadIdx.x % WARP); c < C; c += VEC * WARP) {
        Each v = {};
        if (at >= 0)
            v = *(const Each *)(x + at * C + c);
        *(Each *)(out + row * C + c) = v;
    }
}

// asked_move: see asked_move_kernel; 16 bytes at a time where rows start at such.
static inline void asked_move(floatX *out, const floatX *x, const int *from, size_t rows, size_t C,
                              cudaStream_t stream)
{
    enum { VEC = 16 / sizeof(floatX) };
    const size_t grid = (rows + ROW_WARPS - 1) / ROW_WARPS;
    if (C % VEC)
        LAUNCH(asked_move_kernel<1>, grid, ROW_WARPS * WARP, 0, stream, out, x, from, rows, C);
    else
        LAUNCH(asked_move_kernel<VEC>, grid, ROW_WARPS * WARP, 0, stream, out, x, from, rows, C);
}

// asked_gather: a's rows (R,C) = x (N,C) where targets (N) are, zeros behind; returns them, or x
// where the head reads every position, and without targets: all of x is asked. N and R < 2^30.
static inline const floatX *asked_gather(Asked a, const floatX *x, const int *targets, size_t N,
                                         size_t R, size_t C, cudaStream_t stream)
{
    if (!a.rows || !targets)
        return x;
    if (std::max(N, R) >= 1 << 30)
        die(EXIT_MEMORY, "a batch of %zu positions, expected fewer than 2^30\nhint: a smaller "
            "--batch-size", N);
    LAUNCH(asked_kernel, 1, WARP * WARP, 0, stream, a.where, a.inverse, targets, (int)N, (int)R);
    asked_move(a.rows, x, a.where, R, C, stream);
    return a.rows;
}

// asked_scatter: dx (N,C) = the gradient in a's rows at their positions, 0 elsewhere; nothing where
// the head reads every position: dx has it.
static inline void asked_scatter(floatX *dx, Asked a, size_t N, size_t C, cudaStream_t stream)
{
    if (a.rows)
        asked_move(dx, a.rows, a.inverse, N, C, stream);
}

#endif
