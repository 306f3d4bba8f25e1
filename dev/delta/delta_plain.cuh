// delta_plain.cuh: the first kernels of the delta rule's ladders: the recurrence, a thread a row or
// a column of S, and chunks as loops over memory. Any type, any head size up to 1024.
#ifndef SEQ_DEV_DELTA_PLAIN_CUH
#define SEQ_DEV_DELTA_PLAIN_CUH

// plain_beta: beta, 2^-40 for 0, so that dbeta can be had from u and dv by dividing.
static __device__ inline float plain_beta(float beta)
{
    return fmaxf(beta, 9.094947e-13f);
}

// ---- the recurrence; SIZE: the head size, S and D in registers, or 0: in global memory

// recurrent_o_kernel: a block a head of a sequence, a thread a row i of S, which needs no other:
// u_i = beta (v_i - S_i.k), S_i += u_i k, o_i = s S_i.q. u is rounded before S takes it, so that
// the backward pass can take it out again. S: initial or zero, in the end S_T.
template <int SIZE>
static __global__ void __launch_bounds__(SIZE ? SIZE : 1024)
    recurrent_o_kernel(floatX *o, floatX *u, float *S, const floatX *q, const floatX *k,
                       const floatX *v, const float *beta, int T, int NH, int hs, int pitch)
{
    const int i = threadIdx.x, b = blockIdx.x / NH, h = blockIdx.x % NH, n = SIZE ? SIZE : hs;
    const float s = rsqrtf((float)hs);
    float *stored = S + ((size_t)blockIdx.x * hs + i) * hs;
    float kept[SIZE ? SIZE : 1], *row = SIZE ? kept : stored;
#pragma unroll
    for (int j = 0; SIZE && j < n; j++)
        kept[j] = stored[j];
    for (int t = 0; t < T; t++) {
        const size_t token = (size_t)b * T + t, at = token * pitch + h * hs;
        float e = (float)v[at + i], out = 0;
#pragma unroll
        for (int j = 0; j < n; j++)
            e -= row[j] * (float)k[at + j];
        const floatX ui = (floatX)(plain_beta(beta[token * NH + h]) * e);
#pragma unroll
        for (int j = 0; j < n; j++) {
            row[j] += (float)ui * (float)k[at + j];
            out += row[j] * (float)q[at + j];
        }
        u[(token * NH + h) * hs + i] = ui;
        o[(token * NH + h) * hs + i] = (floatX)(s * out);
    }
#pragma unroll
    for (int j = 0; SIZE && j < n; j++)
        stored[j] = kept[j];
}

// recurrent_dv_kernel: the same way back for row i of D: D_i += s do_i q, dv_i = beta D_i.k, D_i -=
// dv_i k. D: dfinal or zero, in the end the gradient of S_0.
template <int SIZE>
static __global__ void __launch_bounds__(SIZE ? SIZE : 1024)
    recurrent_dv_kernel(floatX *dv, float *D, const floatX *dout, const floatX *q, const floatX *k,
                        const float *beta, int T, int NH, int hs, int pitch)
{
    const int i = threadIdx.x, b = blockIdx.x / NH, h = blockIdx.x % NH, n = SIZE ? SIZE : hs;
    const float s = rsqrtf((float)hs);
    float *stored = D + ((size_t)blockIdx.x * hs + i) * hs;
    float kept[SIZE ? SIZE : 1], *row = SIZE ? kept : stored;
#pragma unroll
    for (int j = 0; SIZE && j < n; j++)
        kept[j] = stored[j];
    for (int t = T - 1; t >= 0; t--) {
        const size_t token = (size_t)b * T + t, at = token * pitch + h * hs;
        const float g = s * (float)dout[(token * NH + h) * hs + i];
        float du = 0;
#pragma unroll
        for (int j = 0; j < n; j++) {
            row[j] += g * (float)q[at + j];
            du += row[j] * (float)k[at + j];
        }
        const floatX d = (floatX)(plain_beta(beta[token * NH + h]) * du);
        dv[at + i] = d;
#pragma unroll
        for (int j = 0; j < n; j++)
            row[j] -= (float)d * (float)k[at + j];
    }
#pragma unroll
    for (int j = 0; SIZE && j < n; j++)
        stored[j] = kept[j];
}

// recurrent_dqk_kernel: a thread a column j of S and D: dq_j = s S_j.do, dk_j = D_j.u - S'_j.dv, S'
// = S - u k^T the state before; dbeta = dv.u / beta^2 by the first thread.
// S = S_T and D = dfinal or zero, for SIZE 0 both (columns by rows) scratch.
template <int SIZE>
static __global__ void __launch_bounds__(SIZE ? SIZE : 1024)
    recurrent_dqk_kernel(floatX *dq, floatX *dk, float *dbeta, float *S, float *D,
                         const floatX *dout, const floatX *dv, const floatX *u, const floatX *q,
                         const floatX *k, const float *beta, int T, int NH, int hs, int pitch)
{
    const int j = threadIdx.x, b = blockIdx.x / NH, h = blockIdx.x % NH, n = SIZE ? SIZE : hs;
    const float s = rsqrtf((float)hs);
    float kept[2][SIZE ? SIZE : 1];
    const size_t first = (size_t)blockIdx.x * hs * hs + j, step = SIZE ? 1 : hs;
    float *x = SIZE ? kept[0] : S + first, *y = SIZE ? kept[1] : D + first;
#pragma unroll
    for (int i = 0; SIZE && i < n; i++)
        kept[0][i] = S[first + i * hs], kept[1][i] = D[first + i * hs];
    for (int t = T - 1; t >= 0; t--) {
        const size_t token = (size_t)b * T + t, at = token * pitch + h * hs;
        const floatX *g = dout + (token * NH + h) * hs, *ut = u + (token * NH + h) * hs;
        const float qj = (float)q[at + j], kj = (float)k[at + j];
        float dqj = 0, dkj = 0, sum = 0;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float ui = (float)ut[i], di = (float)dv[at + i], gi = s * (float)g[i];
            dqj += x[i * step] * gi;
            x[i * step] -= ui * kj;
            dkj += (y[i * step] + gi * qj) * ui - x[i * step] * di;
            y[i * step] += gi * qj - di * kj;
            sum += ui * di;
        }
        dq[at + j] = (floatX)dqj;
        dk[at + j] = (floatX)dkj;
        const float c = plain_beta(beta[token * NH + h]);
        if (j == 0)
            dbeta[token * NH + h] = sum / c / c;
    }
}

// ---- chunks of 64 as loops, one after the other, everything fp32 and in memory

enum { PLAIN_CS = 64, PLAIN_THREADS = 256 };

// plain_work: floats of scratch a head of `chunks` chunks: six arrays (64,64), four (64,HS), then M
// and P (64,64), N (64,HS) and S (HS,HS) of every chunk.
static __host__ __device__ inline size_t plain_work(size_t hs, size_t chunks)
{
    return PLAIN_CS * (4 * PLAIN_CS + 4 * hs) +
           chunks * (2 * PLAIN_CS * PLAIN_CS + PLAIN_CS * hs + hs * hs);
}

// An operand: element (i,j) at i row + j column.
template <class X> struct Plain {
    const X *x;
    int row, column;
};

// plain: see Plain.
template <class X> static __device__ inline Plain<X> plain(const X *x, int row, int column)
{
    return {x, row, column};
}

// plain_product: out (M,N) = keep out + factor x y by the block, K numbers a sum.
template <class X, class Y>
static __device__ inline void plain_product(float *out, float keep, float factor, Plain<X> x,
                                            Plain<Y> y, int M, int N, int K)
{
    for (int i = threadIdx.x; i < M * N; i += PLAIN_THREADS) {
        float sum = 0;
        for (int k = 0; k < K; k++)
            sum += (float)x.x[(size_t)(i / N) * x.row + k * x.column] *
                   (float)y.x[(size_t)k * y.row + i % N * y.column];
        out[i] = (keep == 0 ? 0 : keep * out[i]) + factor * sum;
    }
    __syncthreads();
}

// plain_lower: x (n,n): what is above the diagonal, and with strict on it, = 0.
static __device__ inline void plain_lower(float *x, int n, int strict)
{
    for (int i = threadIdx.x; i < n * n; i += PLAIN_THREADS)
        if (i % n > i / n - strict)
            x[i] = 0;
    __syncthreads();
}

// plain_inverse: M (n,n) = (I + A)^-1 diag(beta), a thread a column; beta `heads` apart.
static __device__ inline void plain_inverse(float *M, const float *A, const float *beta, int heads,
                                            int n)
{
    for (int c = threadIdx.x; c < n; c += PLAIN_THREADS)
        for (int i = 0; i < n; i++) {
            float sum = i == c ? plain_beta(beta[(size_t)c * heads]) : 0;
            for (int j = 0; j < i; j++)
                sum -= A[i * n + j] * M[j * n + c];
            M[i * n + c] = sum;
        }
    __syncthreads();
}

// plain_store: rows of x (n,hs) to `to`, `stride` apart.
static __device__ inline void plain_store(floatX *to, const float *x, size_t stride, int n, int hs)
{
    for (int i = threadIdx.x; i < n * hs; i += PLAIN_THREADS)
        to[i / hs * stride + i % hs] = (floatX)x[i];
    __syncthreads();
}

// plain_forward_kernel: by chunks, as train_deltanet.cu has the equations, a block a head; S
// (HS,HS): initial or zero, then S_T; work: plain_work a head, kept for the backward pass.
static __global__ void __launch_bounds__(PLAIN_THREADS)
    plain_forward_kernel(floatX *o, float *S, float *work, const floatX *q, const floatX *k,
                         const floatX *v, const float *beta, int T, int NH, int hs, int pitch)
{
    const int chunks = (T + PLAIN_CS - 1) / PLAIN_CS, b = blockIdx.x / NH, h = blockIdx.x % NH;
    float *A = work + blockIdx.x * plain_work(hs, chunks), *O = A + 4 * PLAIN_CS * PLAIN_CS;
    float *E = O + PLAIN_CS * hs, *kept = O + 4 * PLAIN_CS * hs;
    S += (size_t)blockIdx.x * hs * hs;
    for (int c = 0; c < chunks; c++) {
        const int n = min(PLAIN_CS, T - c * PLAIN_CS);
        const size_t token = (size_t)b * T + c * PLAIN_CS, at = token * pitch + h * hs;
        const Plain<floatX> Q = plain(q + at, pitch, 1), K = plain(k + at, pitch, 1);
        const Plain<floatX> KT = plain(k + at, 1, pitch);
        const float *bs = beta + token * NH + h;
        float *M = kept, *P = M + PLAIN_CS * PLAIN_CS, *N = P + PLAIN_CS * PLAIN_CS;
        float *state = N + PLAIN_CS * hs;
        kept = state + hs * hs;
        plain_product(A, 0, 1, K, KT, n, n, hs);
        for (int i = threadIdx.x; i < n * n; i += PLAIN_THREADS)
            A[i] *= plain_beta(bs[(size_t)(i / n) * NH]);
        __syncthreads();
        plain_inverse(M, A, bs, NH, n);
        plain_lower(M, n, 0);
        plain_product(P, 0, 1, Q, KT, n, n, hs);
        plain_lower(P, n, 0);
        for (int i = threadIdx.x; i < hs * hs; i += PLAIN_THREADS)
            state[i] = S[i];
        for (int i = threadIdx.x; i < n * hs; i += PLAIN_THREADS)
            E[i] = (float)v[at + i / hs * (size_t)pitch + i % hs];
        __syncthreads();
        plain_product(E, 1, -1, K, plain(state, 1, hs), n, hs, hs);
        plain_product(N, 0, 1, plain(M, n, 1), plain(E, hs, 1), n, hs, n);
        plain_product(O, 0, rsqrtf((float)hs), Q, plain(state, 1, hs), n, hs, hs);
        plain_product(O, 1, rsqrtf((float)hs), plain(P, n, 1), plain(N, hs, 1), n, hs, n);
        plain_product(S, 1, 1, plain(N, 1, hs), K, hs, hs, n);
        plain_store(o + (token * NH + h) * hs, O, (size_t)NH * hs, n, hs);
    }
}

// plain_backward_kernel: likewise; D (HS,HS): dfinal or zero, then the gradient of S_0.
static __global__ void __launch_bounds__(PLAIN_THREADS)
    plain_backward_kernel(floatX *dq, floatX *dk, floatX *dv, float *dbeta, float *D, float *work,
                          const floatX *dout, const floatX *q, const floatX *k, const float *beta,
                          int T, int NH, int hs, int pitch)
{
    const int chunks = (T + PLAIN_CS - 1) / PLAIN_CS, b = blockIdx.x / NH, h = blockIdx.x % NH;
    const int square = PLAIN_CS * PLAIN_CS;
    const float s = rsqrtf((float)hs);
    float *X = work + blockIdx.x * plain_work(hs, chunks), *F = X + square;
    float *dN = X + 4 * square, *dV = dN + PLAIN_CS * hs, *out = dV + PLAIN_CS * hs;
    float *kept = X + 4 * square + 4 * PLAIN_CS * hs;
    D += (size_t)blockIdx.x * hs * hs;
    for (int c = chunks - 1; c >= 0; c--) {
        const int n = min(PLAIN_CS, T - c * PLAIN_CS);
        const size_t token = (size_t)b * T + c * PLAIN_CS, at = token * pitch + h * hs;
        const Plain<floatX> Q = plain(q + at, pitch, 1), K = plain(k + at, pitch, 1);
        const Plain<floatX> G = plain(dout + (token * NH + h) * hs, NH * hs, 1);
        const float *M = kept + c * (size_t)(2 * square + PLAIN_CS * hs + hs * hs);
        const float *P = M + square, *N = P + square, *S = N + PLAIN_CS * hs;
        plain_product(dN, 0, s, plain(P, 1, n), G, n, hs, n);
        plain_product(dN, 1, 1, K, plain(D, 1, hs), n, hs, hs);
        plain_product(dV, 0, 1, plain(M, 1, n), plain(dN, hs, 1), n, hs, n);
        plain_store(dv + at, dV, pitch, n, hs);
        plain_product(X, 0, s, G, plain(N, 1, hs), n, n, hs);
        plain_lower(X, n, 0);
        plain_product(F, 0, 1, plain(dV, hs, 1), plain(N, 1, hs), n, n, hs);
        for (int i = threadIdx.x; i < n; i += PLAIN_THREADS) {
            const float x = plain_beta(beta[(token + i) * NH + h]);
            dbeta[(token + i) * NH + h] = F[i * n + i] / x / x;
        }
        __syncthreads();
        plain_lower(F, n, 1);
        plain_product(out, 0, 1, plain(X, n, 1), K, n, hs, n);
        plain_product(out, 1, s, G, plain(S, hs, 1), n, hs, hs);
        plain_store(dq + at, out, pitch, n, hs);
        plain_product(out, 0, 1, plain(X, 1, n), Q, n, hs, n);
        plain_product(out, 1, 1, plain(N, hs, 1), plain(D, hs, 1), n, hs, hs);
        plain_product(out, 1, -1, plain(dV, hs, 1), plain(S, hs, 1), n, hs, hs);
        plain_product(out, 1, -1, plain(F, n, 1), K, n, hs, n);
        plain_product(out, 1, -1, plain(F, 1, n), K, n, hs, n);
        plain_store(dk + at, out, pitch, n, hs);
        plain_product(D, 1, s, plain(dout + (token * NH + h) * hs, 1, NH * hs), Q, hs, hs, n);
        plain_product(D, 1, -1, plain(dV, 1, hs), K, hs, hs, n);
    }
}

#endif
