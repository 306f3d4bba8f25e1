// gla_plain.cuh: the first kernels of the ladders of gated linear attention: the recurrence, a
// thread a column or a row of S, and chunks as loops over memory. Any type, DK and DV to 1024.
#ifndef SEQ_DEV_GLA_PLAIN_CUH
#define SEQ_DEV_GLA_PLAIN_CUH

// Dimensions and scale: q, k, g (B,T,NH,DK), v, out (B,T,NH,DV), a block a head of a sequence.
typedef struct {
    int T, NH, DK, DV;
    float scale;
} Plain;

// plain_gate: exp(g) x, as x + expm1(g) x where exp(g) is nearly 1 and rounding it would count.
static __device__ inline float plain_gate(float g, float x)
{
    return g > -0.7f ? x + expm1f(g) * x : expf(g) * x;
}

// ---- the recurrence; SIZE: DK or DV rounded up, S in registers, or 0: in global memory

// recurrent_value_kernel: a thread a column of S, which needs no other: out = O, from read = q,
// write = k, x = v. BACK: of D, from the last token: out = dV, from read = k, write = q, x = dout.
// S (DK,DV): initial or zero, then S_T or dS_0.
template <int SIZE, int BACK>
static __global__ void __launch_bounds__(SIZE ? 128 : 1024)
recurrent_value_kernel(floatX *out, float *S, const floatX *read, const floatX *write,
                       const float *g, const floatX *x, Plain d)
{
    __shared__ float shared[3][1024];
    const int j = threadIdx.x, h = blockIdx.x % d.NH;
    float kept[SIZE ? SIZE : 1];
    S += (size_t)blockIdx.x * d.DK * d.DV + j;
#pragma unroll
    for (int i = 0; i < SIZE; i++)
        kept[i] = i < d.DK && j < d.DV ? S[(size_t)i * d.DV] : 0;
    for (int n = 0; n < d.T; n++) {
        const size_t t = BACK ? d.T - 1 - n : n;
        const size_t at = ((blockIdx.x / d.NH) * (size_t)d.T + t) * d.NH + h;
        for (int i = j; i < d.DK; i += blockDim.x) {
            shared[0][i] = (BACK ? 1 : d.scale) * (float)read[at * d.DK + i];
            shared[1][i] = (BACK ? d.scale : 1) * (float)write[at * d.DK + i];
            shared[2][i] = g[at * d.DK + i];
        }
        __syncthreads();
        const float x_j = j < d.DV ? (float)x[at * d.DV + j] : 0;
        float sum = 0;
        const auto step = [&](float s, int i) { // of S_ij
            const float next = (BACK ? s : plain_gate(shared[2][i], s)) + shared[1][i] * x_j;
            sum += shared[0][i] * next;
            return BACK ? plain_gate(shared[2][i], next) : next;
        };
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (i < d.DK)
                kept[i] = step(kept[i], i);
        for (int i = 0; !SIZE && j < d.DV && i < d.DK; i++)
            S[(size_t)i * d.DV] = step(S[(size_t)i * d.DV], i);
        if (j < d.DV)
            out[at * d.DV + j] = (floatX)sum;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++)
        if (i < d.DK && j < d.DV)
            S[(size_t)i * d.DV] = kept[i];
}

// recurrent_key_kernel: a thread a row of S: dx = dQ, dots = q dQ', dQ' without the token's own
// part, from mine = q, keys = k, xr = dout, xw = v. BACK: of D, from the last token: dx = dK, dg =
// the sum of dots - k dK' so far, with mine = k, keys = q, xr = v, xw = dout; final: S_T. S: as
// above.
template <int SIZE, int BACK>
static __global__ void __launch_bounds__(SIZE ? 128 : 1024)
recurrent_key_kernel(floatX *dx, float *dg, float *dots, float *S, const floatX *mine,
                     const floatX *keys, const floatX *xr, const floatX *xw, const float *g,
                     const float *final, Plain d)
{
    __shared__ float shared[2][1024];
    const int i = threadIdx.x, h = blockIdx.x % d.NH;
    const size_t row = ((size_t)blockIdx.x * d.DK + i) * d.DV;
    float kept[SIZE ? SIZE : 1], run = 0;
    S += row;
    for (int j = 0; BACK && i < d.DK && j < d.DV; j++)
        run += final[row + j] * S[j]; // row sums of S_T D_T
#pragma unroll
    for (int j = 0; j < SIZE; j++)
        kept[j] = j < d.DV && i < d.DK ? S[j] : 0;
    for (int n = 0; n < d.T; n++) {
        const size_t t = BACK ? d.T - 1 - n : n;
        const size_t at = ((blockIdx.x / d.NH) * (size_t)d.T + t) * d.NH + h;
        for (int j = i; j < d.DV; j += blockDim.x) {
            shared[0][j] = (BACK ? 1 : d.scale) * (float)xr[at * d.DV + j];
            shared[1][j] = (BACK ? d.scale : 1) * (float)xw[at * d.DV + j];
        }
        __syncthreads();
        if (i < d.DK) {
            const float g_i = g[at * d.DK + i], key = (float)keys[at * d.DK + i];
            float before = 0, own = 0; // what S holds of earlier tokens; this token's
            const auto step = [&](float s, int j) { // of S_ij
                s = BACK ? s : plain_gate(g_i, s);
                before += s * shared[0][j];
                own += shared[1][j] * shared[0][j];
                s += key * shared[1][j];
                return BACK ? plain_gate(g_i, s) : s;
            };
#pragma unroll
            for (int j = 0; j < SIZE; j++)
                if (j < d.DV)
                    kept[j] = step(kept[j], j);
            for (int j = 0; !SIZE && j < d.DV; j++)
                S[j] = step(S[j], j);
            const float dot = (float)mine[at * d.DK + i] * before;
            dx[at * d.DK + i] = (floatX)(before + own * key);
            if (BACK)
                dg[at * d.DK + i] = run += dots[at * d.DK + i] - dot;
            else
                dots[at * d.DK + i] = dot;
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < SIZE; j++)
        if (j < d.DV && i < d.DK)
            S[j] = kept[j];
}

// ---- chunks of 64 as loops, one after the other, everything fp32 and in memory

enum { PLAIN_CS = 64, PLAIN_THREADS = 256 };
#define PLAIN_LEAST -30.0f // what g is clamped at, so that no sum of them is -inf

// plain_work: floats of scratch a head: A, dA (64,64), b, fq, fk, dQ', dK' (64,DK), R (DK), then S
// before every chunk and S_T.
static __host__ __device__ inline size_t plain_work(int T, int DK, int DV)
{
    const size_t chunks = (T + PLAIN_CS - 1) / PLAIN_CS;
    return 2 * PLAIN_CS * PLAIN_CS + (5 * PLAIN_CS + 1) * (size_t)DK + (chunks + 1) * DK * DV;
}

// A chunk of a head: its tokens n, where keys and values start, how far apart tokens are.
typedef struct {
    int n, keys, values;
    size_t key, value;
    float *A, *dA, *b, *fq, *fk, *dq, *dk, *R, *S;
} PlainChunk;

// plain_chunk: chunk c of the block's head.
static __device__ inline PlainChunk plain_chunk(float *work, int c, Plain d)
{
    const size_t t0 = (blockIdx.x / d.NH) * (size_t)d.T + c * PLAIN_CS;
    const size_t token = t0 * d.NH + blockIdx.x % d.NH;
    PlainChunk x = {min(PLAIN_CS, d.T - c * PLAIN_CS), d.NH * d.DK, d.NH * d.DV};
    x.key = token * d.DK, x.value = token * d.DV;
    x.A = work + blockIdx.x * plain_work(d.T, d.DK, d.DV), x.dA = x.A + PLAIN_CS * PLAIN_CS;
    x.b = x.dA + PLAIN_CS * PLAIN_CS, x.fq = x.b + PLAIN_CS * d.DK, x.fk = x.fq + PLAIN_CS * d.DK;
    x.dq = x.fk + PLAIN_CS * d.DK, x.dk = x.dq + PLAIN_CS * d.DK, x.R = x.dk + PLAIN_CS * d.DK;
    x.S = x.R + d.DK + (size_t)c * d.DK * d.DV;
    return x;
}

// plain_gates: b, the sums of g; fq = s q exp(b), fk = k exp(b_C - b); A_tu for u <= t, else 0.
static __device__ inline void plain_gates(PlainChunk x, const floatX *q, const floatX *k,
                                          const float *g, Plain d)
{
    q += x.key, k += x.key, g += x.key;
    for (int i = threadIdx.x; i < d.DK; i += PLAIN_THREADS) {
        float sum = 0;
        for (int t = 0; t < x.n; t++) {
            const float g_i = g[(size_t)t * x.keys + i];
            x.b[t * d.DK + i] = sum += g_i < PLAIN_LEAST ? PLAIN_LEAST : g_i;
        }
        for (int t = 0; t < x.n; t++) {
            const float b = x.b[t * d.DK + i];
            x.fq[t * d.DK + i] = d.scale * (float)q[(size_t)t * x.keys + i] * expf(b);
            x.fk[t * d.DK + i] = (float)k[(size_t)t * x.keys + i] * expf(sum - b);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < x.n * x.n; e += PLAIN_THREADS) {
        const int t = e / x.n, u = e % x.n;
        float sum = 0;
        for (int i = 0; u <= t && i < d.DK; i++)
            sum += (float)q[(size_t)t * x.keys + i] * (float)k[(size_t)u * x.keys + i] *
                   expf(x.b[t * d.DK + i] - x.b[u * d.DK + i]);
        x.A[e] = d.scale * sum;
    }
    __syncthreads();
}

// plain_next: to = exp(b_C) from + f^T x, (DK,DV), of a chunk; f (n,DK), x (n,DV).
static __device__ inline void plain_next(float *to, const float *from, const float *f,
                                         const floatX *x, PlainChunk c, Plain d)
{
    for (int e = threadIdx.x; e < d.DK * d.DV; e += PLAIN_THREADS) {
        const int i = e / d.DV, j = e % d.DV;
        float sum = expf(c.b[(c.n - 1) * d.DK + i]) * from[e];
        for (int t = 0; t < c.n; t++)
            sum += f[t * d.DK + i] * (float)x[c.value + (size_t)t * c.values + j];
        to[e] = sum;
    }
    __syncthreads();
}

// plain_forward_kernel: out, S_T = final (NULL: not asked for), and S before every chunk in work.
static __global__ void __launch_bounds__(PLAIN_THREADS)
plain_forward_kernel(floatX *out, float *final, float *work, const floatX *q, const floatX *k,
                     const float *g, const floatX *v, const float *initial, Plain d)
{
    const int chunks = (d.T + PLAIN_CS - 1) / PLAIN_CS, size = d.DK * d.DV;
    for (int e = threadIdx.x; e < size; e += PLAIN_THREADS)
        plain_chunk(work, 0, d).S[e] = initial ? initial[blockIdx.x * (size_t)size + e] : 0;
    __syncthreads();
    for (int c = 0; c < chunks; c++) {
        const PlainChunk x = plain_chunk(work, c, d);
        plain_gates(x, q, k, g, d);
        for (int e = threadIdx.x; e < x.n * d.DV; e += PLAIN_THREADS) {
            const int t = e / d.DV, j = e % d.DV;
            float sum = 0;
            for (int i = 0; i < d.DK; i++)
                sum += x.fq[t * d.DK + i] * x.S[i * d.DV + j];
            for (int u = 0; u <= t; u++)
                sum += x.A[t * x.n + u] * (float)v[x.value + (size_t)u * x.values + j];
            out[x.value + (size_t)t * x.values + j] = (floatX)sum;
        }
        plain_next(x.S + size, x.S, x.fk, v, x, d);
    }
    for (int e = threadIdx.x; final && e < size; e += PLAIN_THREADS)
        final[blockIdx.x * (size_t)size + e] = plain_chunk(work, chunks, d).S[e];
}

// plain_keys: dQ', dK' (n,DK) of a chunk, without the pairs t = u, R, and from these dQ, dK, dg.
static __device__ inline void plain_keys(floatX *dq, floatX *dk, float *dg, PlainChunk x,
                                         const float *D, const floatX *q, const floatX *k,
                                         const float *g, const floatX *v, const floatX *dout,
                                         Plain d)
{
    for (int e = threadIdx.x; e < x.n * d.DK; e += PLAIN_THREADS) {
        const int t = e / d.DK, i = e % d.DK;
        const size_t at = x.key + (size_t)t * x.keys + i, row = x.value + (size_t)t * x.values;
        const float own = x.dA[t * x.n + t], b = x.b[e];
        float from_S = 0, from_D = 0, before = 0, behind = 0;
        for (int j = 0; j < d.DV; j++) {
            from_S += x.S[i * d.DV + j] * (float)dout[row + j];
            from_D += D[i * d.DV + j] * (float)v[row + j];
        }
        for (int u = 0; u < t; u++)
            before += x.dA[t * x.n + u] * (float)k[x.key + (size_t)u * x.keys + i] *
                      expf(b - x.b[u * d.DK + i]);
        for (int u = t + 1; u < x.n; u++)
            behind += x.dA[u * x.n + t] * (float)q[x.key + (size_t)u * x.keys + i] *
                      expf(x.b[u * d.DK + i] - b);
        x.dq[e] = before + d.scale * expf(b) * from_S;
        x.dk[e] = behind + expf(x.b[(x.n - 1) * d.DK + i] - b) * from_D;
        dq[at] = (floatX)(x.dq[e] + own * (float)k[at]);
        dk[at] = (floatX)(x.dk[e] + own * (float)q[at]);
    }
    for (int i = threadIdx.x; i < d.DK; i += PLAIN_THREADS) {
        x.R[i] = 0;
        for (int j = 0; j < d.DV; j++)
            x.R[i] += x.S[d.DK * d.DV + i * d.DV + j] * D[i * d.DV + j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d.DK; i += PLAIN_THREADS)
        for (int t = x.n - 1; t >= 0; t--) {
            const size_t at = x.key + (size_t)t * x.keys + i;
            x.R[i] += (float)q[at] * x.dq[t * d.DK + i] - (float)k[at] * x.dk[t * d.DK + i];
            dg[at] = g[at] < PLAIN_LEAST ? 0 : x.R[i];
        }
    __syncthreads();
}

// plain_backward_kernel: from the forward's work; D (DK,DV): dfinal or zero, then dS_0.
static __global__ void __launch_bounds__(PLAIN_THREADS)
plain_backward_kernel(floatX *dq, floatX *dk, float *dg, floatX *dv, float *D, float *work,
                      const floatX *dout, const floatX *q, const floatX *k, const float *g,
                      const floatX *v, Plain d)
{
    D += blockIdx.x * (size_t)d.DK * d.DV;
    for (int c = (d.T + PLAIN_CS - 1) / PLAIN_CS - 1; c >= 0; c--) {
        const PlainChunk x = plain_chunk(work, c, d);
        plain_gates(x, q, k, g, d);
        for (int e = threadIdx.x; e < x.n * x.n; e += PLAIN_THREADS) {
            const size_t t = x.value + (size_t)(e / x.n) * x.values;
            const size_t u = x.value + (size_t)(e % x.n) * x.values;
            float sum = 0;
            for (int j = 0; j < d.DV; j++)
                sum += (float)dout[t + j] * (float)v[u + j];
            x.dA[e] = d.scale * sum;
        }
        for (int e = threadIdx.x; e < x.n * d.DV; e += PLAIN_THREADS) {
            const int u = e / d.DV, j = e % d.DV;
            float sum = 0;
            for (int i = 0; i < d.DK; i++)
                sum += x.fk[u * d.DK + i] * D[i * d.DV + j];
            for (int t = u; t < x.n; t++)
                sum += x.A[t * x.n + u] * (float)dout[x.value + (size_t)t * x.values + j];
            dv[x.value + (size_t)u * x.values + j] = (floatX)sum;
        }
        __syncthreads();
        plain_keys(dq, dk, dg, x, D, q, k, g, v, dout, d);
        plain_next(D, D, x.fq, dout, x, d);
    }
}

#endif
