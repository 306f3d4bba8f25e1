// train_mamba.c: Mamba on the CPU, with eigenvalues in [0,1] or [-1,1].
//
// "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752) and
// "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537). Each
// channel has S numbers of memory. A token decides how long a step dt of its own lasts; in a step
// every number decays at a rate of its own, learned, and adds what the token writes:
//
//   h_t[s] = a_t[s] h_{t-1}[s] + dt_t B_t[s] x_t,   y_t = sum_s C_t[s] h_t[s] + skip x_t
//   a_t[s] = E or 2 E - 1,   E = exp(dt_t A[s]),  A = -exp(A_log)
//
// The eigenvalues of a step are the numbers a_t[s]. With --eigenvalues nonneg, a = E, none is
// negative, and no such model finds the parity of long strings in finite precision (Theorem 1 of
// 2411.12537). With signed, a = 2 E - 1: a long step changes the sign of what is remembered.
//
//   x, z    = W_in norm(u)              u: the block's input, N(0,1) embeddings at first
//   x       = SiLU(conv(x) + bias)      conv causal, --window 4 positions, each channel for itself
//   r, B, C = W_x x                     B, C: S numbers each that all channels of a token share
//   dt      = softplus(W_dt r + bias)
//   u      += W_out (y SiLU(z))
// norm is RMSNorm, eps 1e-5; none at the end. No MLP, positions, dropout; the head is not tied. At
// the start A_log[s] = ln s, s from 1 to S; skip = 1; the bias of dt such that its softplus is
// log-uniform between 1e-3 and 1e-1. These three do not decay, all else does.
//
// Letters: C channels (the papers' D); H = 2 C inside a block; S numbers of state a channel (N); R
// the rank of dt (C / 16 rounded up); W the window; bc the equations' B_t and C_t; B sequences of T
// positions, N = B T, NT tiles of TILE positions; V symbols, L layers; D are decoded at once.
// Sections: [mix] the scan; [block] convolution, SiLU, norm; [layers] matrix product, ...;
// [optimizer] AdamW; [model] tensors, forward, backward, decoding; [train] the loop; [main] start.
//
//   ./train_mamba       parity of 3 to 24 tokens, 2 CPU cores, 25 s: 0.997 on lengths 25 to 80
//   ./train_mamba --eigenvalues nonneg    the same: 0.52, chance
//
// Differences from the papers: what dt writes is dt B x, as in the code that both publish, not the
// exact integral; warm-up starts at lr/warmup, not 0; fp32 throughout. The state is stored S by H.

#include "data/tasks.h" // and with it check, log, options, rng, tensors, threads, training
#include <tgmath.h>
#ifdef REAL_IS_DOUBLE // the tests build this file a second time in double precision
#define float double
#endif
#pragma GCC diagnostic ignored "-Wunused-function" // [layers] has more than this model needs

// From [layers]:
static inline float exp_ps(float x);

// ------------------------------------------------------------------------------------------------
// [mix] The selective scan: S numbers of state for each channel, one token at a time.

#define ARCHITECTURE "mamba"
#define EIGENVALUES "nonneg|signed"
enum { NONNEG, SIGNED, TILE = 16 }; // range is 1, 2; positions between saved states
static const float MOST_LOG = 44; // what a larger A_log counts as

// scan_step: one token: next (S,H) = a h + dt B x, a = range exp(dt A) - (range - 1); y (H) = sum_s
// C next + skip x; of the token x, dt (H), bc (2S): B, then C. A (S,H), skip (H). next may be h.
static inline void scan_step(float *y, float *next, const float *h, const float *x, const float *dt,
                             const float *bc, const float *A, const float *skip, size_t H, size_t S,
                             float range)
{
    for (size_t c = 0; c < H; c++)
        y[c] = skip[c] * x[c];
    for (size_t s = 0; s < S; s++) {
        const float B_s = bc[s], C_s = bc[S + s], rest = range - 1;
        const float *A_s = A + s * H, *h_s = h + s * H;
        float *next_s = next + s * H;
#pragma omp simd
        for (size_t c = 0; c < H; c++) {
            const float a = range * exp_ps(dt[c] * A_s[c]) - rest;
            next_s[c] = a * h_s[c] + dt[c] * x[c] * B_s;
            y[c] += C_s * next_s[c];
        }
    }
}

// scan_forward: y (B,T,H) = sum_s C_t h_t + skip x_t, h_t = a_t h_{t-1} + dt_t B_t x_t, of x, dt
// (B,T,H), bc (B,T,2S), A (S,H) and skip (H), see scan_step; range 1: a in [0,1], 2: in [-1,1].
// Before the first token h is initial (B,S,H), NULL: 0; final (B,S,H) = the last, may alias
// initial; tiles (B,NT,S,H) = that before every TILE-th token, NULL: not asked for.
static void scan_forward(float *y, float *tiles, float *final, const float *x, const float *dt,
                         const float *bc, const float *initial, const float *A, const float *skip,
                         size_t B, size_t T, size_t H, size_t S, float range)
{
    const size_t size = S * H, bytes = size * sizeof *y, NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < B; b++) { // threads own sequences
        float *h = final + b * size;
        initial ? memmove(h, initial + b * size, bytes) : memset(h, 0, bytes);
        for (size_t t = 0, bt = b * T; t < T; t++, bt++) {
            if (tiles && t % TILE == 0)
                memcpy(tiles + (b * NT + t / TILE) * size, h, bytes);
            scan_step(y + bt * H, h, h, x + bt * H, dt + bt * H, bc + bt * 2 * S, A, skip, H, S,
                      range);
        }
    }
}

// scan_step_backward: dx, ddt (H), dbc (2S) =, dA (S,H) += from dy (H) and G (S,H), what later
// tokens pass to h, which becomes what passes to h (S,H), the memory before the token. With g = G +
// C dy, and w = range E h g, the part of the gradient that goes through the exponent dt A:
//   dC = dy . h_t,  dB = g . dt x,  dx = dt sum_s B g + skip dy,  ddt = x sum_s B g + sum_s A w,
//   dA += dt w,  G = a g
static inline void scan_step_backward(float *dx, float *ddt, float *dbc, float *dA, float *G,
                                      const float *dy, const float *h, const float *x,
                                      const float *dt, const float *bc, const float *A,
                                      const float *skip, size_t H, size_t S, float range)
{
    memset(dx, 0, H * sizeof *dx), memset(ddt, 0, H * sizeof *ddt);
    for (size_t s = 0; s < S; s++) {
        const float B_s = bc[s], C_s = bc[S + s], rest = range - 1;
        const float *A_s = A + s * H, *h_s = h + s * H;
        float *G_s = G + s * H, *dA_s = dA + s * H, dB = 0, dC = 0;
#pragma omp simd reduction(+ : dB, dC)
        for (size_t c = 0; c < H; c++) {
            const float E = range * exp_ps(dt[c] * A_s[c]), a = E - rest, in = dt[c] * x[c];
            const float g = G_s[c] + C_s * dy[c], w = E * h_s[c] * g;
            dC += dy[c] * (a * h_s[c] + in * B_s);
            dB += g * in;
            dx[c] += B_s * g;
            ddt[c] += A_s[c] * w;
            dA_s[c] += dt[c] * w;
            G_s[c] = a * g;
        }
        dbc[s] = dB, dbc[S + s] = dC;
    }
#pragma omp simd
    for (size_t c = 0; c < H; c++) {
        const float sum = dx[c];
        dx[c] = dt[c] * sum + skip[c] * dy[c];
        ddt[c] += x[c] * sum;
    }
}

// add_products: sum (H) += the sums over n of x y, rows of x (N,H) and y (N,H), NULL: 1; in double,
// threads own channels.
static void add_products(float *sum, const float *x, const float *y, size_t N, size_t H)
{
    enum { STRIP = 16 };
#pragma omp parallel for if (N * H > 65536)
    for (size_t c0 = 0; c0 < H; c0 += STRIP) {
        const size_t end = H - c0 < STRIP ? H : c0 + STRIP;
        double total[STRIP] = {0};
        for (size_t n = 0; n < N; n++)
            for (size_t c = c0; c < end; c++)
                total[c - c0] += y ? x[n * H + c] * y[n * H + c] : x[n * H + c];
        for (size_t c = c0; c < end; c++)
            sum[c] += total[c - c0];
    }
}

// scan_work: elements of scratch a thread needs: the states of a tile, and G.
static size_t scan_work(size_t H, size_t S)
{
    return ((TILE + 1) * S * H + 15) / 16 * 16;
}

// scan_backward: dx, ddt (B,T,H), dbc (B,T,2S) =; dA (B,S,H) = the gradient of A by sequence; dskip
// (H) +=; dinitial (B,S,H) = (NULL: not asked for), from dy (B,T,H), dfinal (B,S,H), the gradient
// of final (NULL: 0), and the forward's tiles, x, dt, bc, A, skip; work (threads, scan_work) is
// scratch. The states of a tile are computed again from the first: nothing is divided by a.
static void scan_backward(float *dx, float *ddt, float *dbc, float *dinitial, float *dA,
                          float *dskip, const float *dy, const float *dfinal, const float *tiles,
                          const float *x, const float *dt, const float *bc, const float *A,
                          const float *skip, float *work, size_t B, size_t T, size_t H, size_t S,
                          float range)
{
    const size_t size = S * H, bytes = size * sizeof *work, NT = (T + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < B; b++) {
        float *h = work + threads_index() * scan_work(H, S), *G = h + TILE * size;
        dfinal ? memcpy(G, dfinal + b * size, bytes) : memset(G, 0, bytes);
        memset(dA + b * size, 0, bytes);
        for (size_t tile = NT; tile-- > 0;) {
            const size_t first = b * T + tile * TILE, n = tile + 1 < NT ? TILE : T - tile * TILE;
            memcpy(h, tiles + (b * NT + tile) * size, bytes);
            for (size_t i = 0, bt = first; i + 1 < n; i++, bt++) // outputs: to where dx will be
                scan_step(dx + bt * H, h + (i + 1) * size, h + i * size, x + bt * H, dt + bt * H,
                          bc + bt * 2 * S, A, skip, H, S, range);
            for (size_t i = n; i-- > 0;) {
                const size_t bt = first + i, c = bt * H, s = bt * 2 * S;
                scan_step_backward(dx + c, ddt + c, dbc + s, dA + b * size, G, dy + c, h + i * size,
                                   x + c, dt + c, bc + s, A, skip, H, S, range);
            }
        }
        if (dinitial)
            memcpy(dinitial + b * size, G, bytes);
    }
    add_products(dskip, dy, x, B * T, H);
}

// rates_forward: A (S,H) = -exp(A_log (H,S)); A_log above 44 counts as 44, where a step of 1e-17
// forgets all: so A and its products are finite, and a step of 0 changes nothing.
static void rates_forward(float *A, const float *A_log, size_t H, size_t S)
{
    for (size_t i = 0; i < H * S; i++)
        A[i % S * H + i / S] = -exp_ps(A_log[i] > MOST_LOG ? MOST_LOG : A_log[i]);
}

// rates_backward: dA_log (H,S) += A times the sum over b of dA (B,S,H), which it overwrites, in
// double; 0 where A_log is above 44; from the forward's A and A_log.
static void rates_backward(float *dA_log, float *dA, const float *A, const float *A_log, size_t B,
                           size_t H, size_t S)
{
    add_products(dA, dA + S * H, NULL, B - 1, S * H); // all onto the first
    for (size_t i = 0; i < H * S; i++) {
        const size_t at = i % S * H + i / S;
        dA_log[i] += A_log[i] > MOST_LOG ? 0 : A[at] * dA[at];
    }
}

// softplus: log(1 + exp(x)) = max(x, 0) + log(1 + e), e = exp(-|x|), with the logarithm as a series
// that compilers vectorise: 2 artanh(z), z = e / (2 + e) <= 1/3. Relative error < 5e-7; x itself
// from 17 on, exp(x) below -17, 0 below -87.7, NaN stays.
static inline float softplus(float x)
{
    const float e = exp_ps(x > 0 ? -x : x), most = x > 0 ? x : 0;
#ifdef REAL_IS_DOUBLE
    return most + log1p(e);
#else
    const float z = e / (2 + e), q = z * z, c3 = 1.0 / 3, c5 = 0.2, c7 = 1.0 / 7, c9 = 1.0 / 9;
    const float c11 = 1.0 / 11, c13 = 1.0 / 13, c15 = 1.0 / 15;
    const float high = c9 + q * (c11 + q * (c13 + q * c15));
    return most + 2 * z * (1 + q * (c3 + q * (c5 + q * (c7 + q * high))));
#endif
}

// sigmoid: 1 / (1 + exp(-x)), the slope of softplus; 0 and 1 far out.
static inline float sigmoid(float x)
{
    return 1 / (1 + exp_ps(-x));
}

// dt_forward: dt (n) = softplus(raw (n)). dt may alias raw.
static void dt_forward(float *dt, const float *raw, size_t n)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++)
        dt[i] = softplus(raw[i]);
}

// dt_backward: draw (n) = ddt (n) sigmoid(raw (n)). draw may alias ddt.
static void dt_backward(float *draw, const float *ddt, const float *raw, size_t n)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++)
        draw[i] = ddt[i] * sigmoid(raw[i]);
}

// ------------------------------------------------------------------------------------------------
// [block] Convolution, gate, norm.  (variant of train_deltanet.c[block] @a3fa8878: bias, no MLP)

enum { WINDOW_MOST = 16 }; // of positions the convolution may see

// conv_row: the row of x (B,T,2H), its first H numbers, `past` positions before row i, or of what
// stands `before` (B,W-1,H) a sequence; NULL: zeros.
static inline const float *conv_row(const float *x, const float *before, size_t i, size_t past,
                                    size_t T, size_t H, size_t W)
{
    const size_t t = i % T;
    return t >= past ? x + (i - past) * 2 * H
           : before  ? before + (i / T * (W - 1) + W - 1 + t - past) * H
                     : NULL;
}

// conv_forward: out (B,T,H) = bias[c] + sum_w weight[c,w] x_{t-W+1+w}[c], weight (H,W), bias (H), x
// the first half of each row (B,T,2H), and what stands before it (B,W-1,H), NULL: zeros.
static void conv_forward(float *out, const float *x, const float *before, const float *weight,
                         const float *bias, size_t B, size_t T, size_t H, size_t W)
{
#pragma omp parallel for if (B * T * H > 65536)
    for (size_t i = 0; i < B * T; i++) {
        memcpy(out + i * H, bias, H * sizeof *out);
        for (size_t w = 0; w < W; w++) {
            const float *row = conv_row(x, before, i, W - 1 - w, T, H, W);
            for (size_t c = 0; row && c < H; c++)
                out[i * H + c] += weight[c * W + w] * row[c];
        }
    }
}

// conv_backward: dx, the first half of each row (B,T,2H), =, dbefore (B,W-1,H) = (NULL: not asked
// for), dweight (H,W), dbias (H) += from dout (B,T,H) and the forward's x, before and weight. Sums
// over B and T are in double; threads own channels there.
static void conv_backward(float *dx, float *dbefore, float *dweight, float *dbias,
                          const float *dout, const float *x, const float *before,
                          const float *weight, size_t B, size_t T, size_t H, size_t W)
{
    enum { STRIP = 16 };
    const size_t past = dbefore ? W - 1 : 0, rows = T + past;
#pragma omp parallel for if (B * T * H > 65536)
    for (size_t i = 0; i < B * rows; i++) { // row `at` of x with W - 1 rows in front of it
        const size_t b = i / rows, at = i % rows + W - 1 - past;
        float *d = at < W - 1 ? dbefore + (b * (W - 1) + at) * H
                              : dx + (b * T + at - W + 1) * 2 * H;
        memset(d, 0, H * sizeof *d);
        for (size_t w = 0; w < W; w++) // out_t reads row t + w
            if (at >= w && at - w < T)
                for (size_t c = 0; c < H; c++)
                    d[c] += weight[c * W + w] * dout[(b * T + at - w) * H + c];
    }
#pragma omp parallel for if (B * T * H > 65536)
    for (size_t c0 = 0; c0 < H; c0 += STRIP) {
        double sum[WINDOW_MOST][STRIP] = {{0}};
        const size_t strip = H - c0 < STRIP ? H - c0 : STRIP;
        for (size_t i = 0; i < B * T; i++)
            for (size_t w = 0; w < W; w++) {
                const float *row = conv_row(x, before, i, W - 1 - w, T, H, W);
                for (size_t c = 0; row && c < strip; c++)
                    sum[w][c] += dout[i * H + c0 + c] * row[c0 + c];
            }
        for (size_t c = 0; c < strip; c++)
            for (size_t w = 0; w < W; w++)
                dweight[(c0 + c) * W + w] += sum[w][c];
    }
    add_products(dbias, dout, NULL, B * T, H);
}

// silu_forward: out (n) = x sigmoid(x), x (n).
static void silu_forward(float *out, const float *x, size_t n)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * sigmoid(x[i]);
}

// silu_backward: dx (n) = dout (n) SiLU'(x (n)), p + x p (1 - p) for p = sigmoid(x). dx may alias
// dout.
static void silu_backward(float *dx, const float *dout, const float *x, size_t n)
{
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) {
        const float p = sigmoid(x[i]);
        dx[i] = dout[i] * (p + x[i] * p * (1 - p));
    }
}

// gate_forward: out (N,H) = y SiLU(z), y (N,H), z at H of xz (N,2H). out may alias y.
static void gate_forward(float *out, const float *y, const float *xz, size_t N, size_t H)
{
#pragma omp parallel for if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t c = 0; c < H; c++) {
            const float z = xz[n * 2 * H + H + c];
            out[n * H + c] = y[n * H + c] * (z * sigmoid(z));
        }
}

// gate_backward: dy (N,H) =, z's half of dxz (N,2H) = from dout (N,H) and the forward's y, xz. dy
// may alias dout.
static void gate_backward(float *dy, float *dxz, const float *dout, const float *y, const float *xz,
                          size_t N, size_t H)
{
#pragma omp parallel for if (N * H > 65536)
    for (size_t n = 0; n < N; n++)
#pragma omp simd
        for (size_t c = 0; c < H; c++) {
            const float z = xz[n * 2 * H + H + c], p = sigmoid(z), d = dout[n * H + c];
            dxz[n * 2 * H + H + c] = d * y[n * H + c] * (p + z * p * (1 - p));
            dy[n * H + c] = d * (z * p);
        }
}

// over_rms: 1 / sqrt(mean of squares of x (C) + 1e-5), in double.
static float over_rms(const float *x, size_t C)
{
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (size_t c = 0; c < C; c++)
        squares += (double)x[c] * x[c];
    return 1 / sqrt(squares / (double)C + 1e-5);
}

// rmsnorm_forward: out (N,C) = weight x / sqrt(mean(x^2) + 1e-5), rows of x (N,C), weight (C).
static void rmsnorm_forward(float *out, const float *x, const float *weight, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        const float r = over_rms(x + n * C, C);
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = x[n * C + c] * r * weight[c];
    }
}

// rmsnorm_backward: dx (N,C) +=, dweight (C) += from dout (N,C), which it overwrites, and the
// forward's x and weight. With r the row's factor and d = dout weight:
//   dx = r (d - x r^2 mean(d x)),  dweight = sum_n dout x r, in double; threads own channels there
static void rmsnorm_backward(float *dx, float *dweight, float *dout, const float *x,
                             const float *weight, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++) {
        const float *x_n = x + n * C, r = over_rms(x_n, C);
        float *dout_n = dout + n * C, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++)
            sum += dout_n[c] * weight[c] * x_n[c] * r;
        sum /= C;
        for (size_t c = 0; c < C; c++) {
            dx[n * C + c] += r * (dout_n[c] * weight[c] - x_n[c] * r * sum);
            dout_n[c] *= x_n[c] * r;
        }
    }
    add_products(dweight, dout, NULL, N, C);
}

// ------------------------------------------------------------------------------------------------
// [layers] What every architecture here is made of.  (shared)

// exp_ps: exp(x) as a polynomial, which compilers vectorise (they do not vectorise libm's): with k
// the rounded x/ln 2 and f = x - k ln 2, exp(x) = 2^k p(f), p of degree 6. Relative error < 2e-7
// from -87 to 88; 0 below -87.7, inf above 88.38, NaN stays. In double precision: libm's.
static inline float exp_ps(float x)
{
#ifdef REAL_IS_DOUBLE
    return exp(x);
#else
    const float lowest = -88, highest = 89, log2_e = 1.44269504088896341, rounder = 3 << 22;
    const float ln2_high = 0.693359375, ln2_low = -2.12194440054690583e-4;
    const float c2 = 0.5000000008982932, c3 = 0.1666657684599401, c4 = 0.04166652455270952;
    const float c5 = 0.008363202971578512, c6 = 0.0013928201930897837;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    float shifted = x * log2_e + rounder; // its low mantissa bits are now the integer k
    float k = shifted - rounder, f = x - k * ln2_high - k * ln2_low, scale;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23; // k = -127 makes 0, k = 128 makes inf
    memcpy(&scale, &bits, sizeof scale);
    return scale * (1 + f * (1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6))))));
#endif
}

// The matrix product works on tiles of MR rows by two vectors of columns that stay in registers, on
// panels of MC x KC of x that stay in the L2 cache and NR x KC of y that stay in the L1.
#ifdef __AVX512F__
enum { VECTOR_BYTES = 64, MR = 12 };
#else
enum { VECTOR_BYTES = 32, MR = 6 };
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
enum { VECTOR = VECTOR_BYTES / sizeof(float), NR = 2 * VECTOR, MC = 96, KC = 256, NC = 8 * NR };

// gemm_tile: tile (MR,NR) = x^T y of packed panels x (K,MR), y (K,NR).
static inline void gemm_tile(float *restrict tile, const float *restrict x, const float *restrict y,
                             size_t K)
{
    Vector sum[MR][2];
    memset(sum, 0, sizeof sum);
    for (size_t k = 0; k < K; k++) {
        Vector y0 = ((const Vector *)(y + k * NR))[0], y1 = ((const Vector *)(y + k * NR))[1];
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            sum[i][0] += x[k * MR + i] * y0;
            sum[i][1] += x[k * MR + i] * y1;
        }
    }
    memcpy(tile, sum, sizeof sum);
}

// gemm_pack: to (ceil(n/width) panels of (K,width)) = x (n,K) read with strides, padded with zeros.
static inline void gemm_pack(float *to, const float *x, size_t row, size_t col, size_t n, size_t K,
                             size_t width)
{
    for (size_t i0 = 0; i0 < n; i0 += width, to += width * K)
        if (col == 1) // read along the contiguous side of x
            for (size_t i = 0; i < width; i++)
                for (size_t k = 0; k < K; k++)
                    to[k * width + i] = i0 + i < n ? x[(i0 + i) * row + k] : 0;
        else
            for (size_t k = 0; k < K; k++)
                for (size_t i = 0; i < width; i++)
                    to[k * width + i] = i0 + i < n ? x[(i0 + i) * row + k * col] : 0;
}

// gemm: out (M,N) = or, with accumulate, += x (M,K) y (K,N). x[m,k] is at m * x_row + k * x_col and
// y[k,n] at k * y_row + n * y_col: either may be a transpose. Threads own tiles of out, and a sum
// over K has one order, so their number does not matter.
static void gemm(float *out, const float *x, size_t x_row, size_t x_col, const float *y,
                 size_t y_row, size_t y_col, size_t M, size_t N, size_t K, int accumulate)
{
    size_t m_blocks = (M + MC - 1) / MC, n_blocks = (N + NC - 1) / NC;
#pragma omp parallel for schedule(static) if (M * N * K > 1 << 20)
    for (size_t block = 0; block < m_blocks * n_blocks; block++) {
        _Alignas(64) float xs[MC * KC], ys[NR * KC], tile[MR * NR];
        size_t m0 = block / n_blocks * MC, m1 = m0 + MC < M ? m0 + MC : M;
        size_t n0 = block % n_blocks * NC, n1 = n0 + NC < N ? n0 + NC : N;
        for (size_t k0 = 0; k0 < K; k0 += KC) {
            size_t k_size = K - k0 < KC ? K - k0 : KC;
            int add = accumulate || k0;
            gemm_pack(xs, x + m0 * x_row + k0 * x_col, x_row, x_col, m1 - m0, k_size, MR);
            for (size_t n = n0; n < n1; n += NR) {
                size_t cols = n1 - n < NR ? n1 - n : NR;
                gemm_pack(ys, y + k0 * y_row + n * y_col, y_col, y_row, cols, k_size, NR);
                for (size_t m = m0; m < m1; m += MR) {
                    size_t rows = m1 - m < MR ? m1 - m : MR;
                    gemm_tile(tile, xs + (m - m0) * k_size, ys, k_size);
                    for (size_t i = 0; i < rows; i++)
                        for (size_t j = 0; j < cols; j++) {
                            float *o = out + (m + i) * N + n + j;
                            *o = add ? *o + tile[i * NR + j] : tile[i * NR + j];
                        }
                }
            }
        }
    }
}

// matmul_forward: out (N,OC) = (accumulate: +=) inp (N,C) weight (OC,C)^T + bias (OC), NULL: none.
static void matmul_forward(float *out, const float *inp, const float *weight, const float *bias,
                           size_t N, size_t C, size_t OC, int accumulate)
{
    gemm(out, inp, C, 1, weight, 1, C, N, OC, C, accumulate);
#pragma omp parallel for if (N * OC > 65536)
    for (size_t n = 0; n < N; n++)
        for (size_t o = 0; bias && o < OC; o++)
            out[n * OC + o] += bias[o];
}

// matmul_backward: dinp (N,C) = or, with accumulate, += dout (N,OC) weight; dweight (OC,C) +=
// dout^T inp; dbias (OC), NULL for none, += column sums of dout, in double.
static void matmul_backward(float *dinp, float *dweight, float *dbias, const float *dout,
                            const float *inp, const float *weight, size_t N, size_t C, size_t OC,
                            int accumulate)
{
    gemm(dinp, dout, OC, 1, weight, C, 1, N, C, OC, accumulate);
    gemm(dweight, dout, 1, OC, inp, C, 1, OC, C, N, 1);
    enum { STRIP = 32 };
    for (size_t o0 = 0; dbias && o0 < OC; o0 += STRIP) {
        size_t strip = OC - o0 < STRIP ? OC - o0 : STRIP;
        double sum[STRIP] = {0};
        for (size_t n = 0; n < N; n++)
            for (size_t o = 0; o < strip; o++)
                sum[o] += dout[n * OC + o0 + o];
        for (size_t o = 0; o < strip; o++)
            dbias[o0 + o] += sum[o];
    }
}

// row_moments: mean and biased variance of x (n), summed in double: one value of 1e4 must not drown
// the others. The mean is taken about x[0], so that a constant row has variance exactly 0.
static void row_moments(const float *x, size_t n, float *mean, float *var)
{
    double sum = 0, squares = 0, first = x[0];
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i] - first;
    const float m = first + sum / (double)n;
#pragma omp simd reduction(+ : squares)
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - m) * (x[i] - m);
    *mean = m;
    *var = squares / (double)n;
}

// normalize_row: out (n) = (x - mean) / sqrt(var + 1e-8), biased variance. out may alias x.
static void normalize_row(float *out, const float *x, size_t n)
{
    const float eps = 1e-8;
    float mean, var;
    row_moments(x, n, &mean, &var);
    float rstd = 1 / sqrt(var + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = (x[i] - mean) * rstd;
}

// normalize_row_backward: dx (n) = or, with accumulate, += rstd (dout - mean(dout) - z mean(dout
// z)), z = normalize(x). dx may alias dout.
static void normalize_row_backward(float *dx, const float *dout, const float *x, size_t n,
                                   int accumulate)
{
    const float eps = 1e-8;
    float mean, var, sum = 0, sum_z = 0;
    row_moments(x, n, &mean, &var);
    float rstd = 1 / sqrt(var + eps);
#pragma omp simd reduction(+ : sum, sum_z)
    for (size_t i = 0; i < n; i++) {
        sum += dout[i];
        sum_z += dout[i] * (x[i] - mean) * rstd;
    }
    for (size_t i = 0; i < n; i++) {
        float d = rstd * (dout[i] - sum / n - (x[i] - mean) * rstd * (sum_z / n));
        dx[i] = accumulate ? dx[i] + d : d;
    }
}

// normalize_forward: out (N,C) = normalize_row of every row of x (N,C).
static void normalize_forward(float *out, const float *x, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
        normalize_row(out + n * C, x + n * C, C);
}

// normalize_backward: dx (N,C) += from dout (N,C) and the forward's x (N,C).
static void normalize_backward(float *dx, const float *dout, const float *x, size_t N, size_t C)
{
#pragma omp parallel for if (N * C > 65536)
    for (size_t n = 0; n < N; n++)
        normalize_row_backward(dx + n * C, dout + n * C, x + n * C, C, 1);
}

// embed_forward: out (B,T,C) = wte[token] + wpe[t]; tokens (B,T), wte (V,C), wpe (T,C).
static void embed_forward(float *out, const int *tokens, const float *wte, const float *wpe,
                          size_t B, size_t T, size_t C)
{
#pragma omp parallel for if (B * T * C > 65536)
    for (size_t i = 0; i < B * T; i++)
        for (size_t c = 0; c < C; c++)
            out[i * C + c] = wte[(size_t)tokens[i] * C + c] + (wpe ? wpe[i % T * C + c] : 0);
}

// embed_backward: dwte (V,C) +=, dwpe (T,C) += from dout (B,T,C). Threads own channels, not tokens,
// so that repeated tokens neither race nor change the order of a sum.
static void embed_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, size_t B,
                           size_t T, size_t C)
{
    enum { STRIP = 16 };
#pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += STRIP)
        for (size_t i = 0; i < B * T; i++)
            for (size_t c = c0; c < C && c < c0 + STRIP; c++) {
                dwte[(size_t)tokens[i] * C + c] += dout[i * C + c];
                if (dwpe) // a model may have no positions
                    dwpe[i % T * C + c] += dout[i * C + c];
            }
}

// argmax: index of the largest of x (n), the lowest of equals.
static int argmax(const float *x, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return (int)best;
}

// crossentropy: losses (N) = -log softmax(logits)[target] in nats, 0 where the target is IGNORE;
// predictions (N) = argmax; dlogits (N,V) = the mean loss's gradient (softmax - onehot) / count;
// logits (N,V), targets (N). Returns the mean over the targets that count, 0 if none does.
static double crossentropy(float *losses, int *predictions, float *dlogits, const float *logits,
                           const int *targets, size_t N, size_t V)
{
    double total = 0, count = 0;
    for (size_t n = 0; n < N; n++)
        count += targets[n] != IGNORE;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const float *x = logits + n * V;
        float *dx = dlogits + n * V;
        int target = targets[n], top = predictions[n] = argmax(x, V);
        double sum = 0;
        for (size_t i = 0; i < V; i++)
            sum += dx[i] = exp_ps(x[i] - x[top]);
        losses[n] = target == IGNORE ? 0 : log(sum) + x[top] - x[target];
        const float scale = target == IGNORE ? 0 : 1 / (sum * count);
        for (size_t i = 0; i < V; i++)
            dx[i] *= scale;
        if (target != IGNORE)
            dx[target] -= 1 / count;
    }
    for (size_t n = 0; n < N; n++)
        total += losses[n];
    return count > 0 ? total / count : 0;
}

// ------------------------------------------------------------------------------------------------
// [optimizer] Gradient norm, AdamW.  (shared)

// gradient_norm: root of the sum of squares over all tensors, in double.
static double gradient_norm(const Arena *grads)
{
    double sum = 0;
    for (int k = 0; k < grads->n; k++) {
        const float *g = arena_data(grads, k);
        size_t n = tensor_size(&grads->table[k]);
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < n; i++)
            sum += (double)g[i] * g[i];
    }
    return sqrt(sum);
}

// adamw: one update of every tensor; gradients are first multiplied by grad_scale (clipping):
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  n = step + 1,
//   p -= lr lr_scale ((m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps) + weight_decay p)
// Moments below 1e-37, next to the denormals, which are slow, become 0.  [arXiv 1711.05101]
static void adamw(Weights *w, const Training *t, double lr, double grad_scale, long step)
{
    const float beta1 = t->beta1, beta2 = t->beta2, rest1 = 1 - t->beta1, rest2 = 1 - t->beta2;
    const float over_c1 = 1 / (1 - pow(t->beta1, (double)step + 1)), eps = t->adam_eps;
    const float over_c2 = 1 / (1 - pow(t->beta2, (double)step + 1)), s = grad_scale, tiny = 1e-37;
    for (int k = 0; k < w->params.n; k++) {
        const Tensor *row = &w->params.table[k];
        const float rate = lr * row->lr_scale, decay = row->decay ? t->weight_decay : 0;
        const float *g = arena_data(&w->grads, k);
        float *p = arena_data(&w->params, k), *m = arena_data(&w->m, k), *v = arena_data(&w->v, k);
        size_t n = tensor_size(row);
#pragma omp parallel for simd if (n > 65536)
        for (size_t i = 0; i < n; i++) {
            float g_i = s * g[i];
            float m_i = beta1 * m[i] + rest1 * g_i, v_i = beta2 * v[i] + rest2 * g_i * g_i;
            m[i] = m_i = fabs(m_i) < tiny ? 0 : m_i;
            v[i] = v_i = v_i < tiny ? 0 : v_i;
            p[i] -= rate * (m_i * over_c1 / (sqrt(v_i * over_c2) + eps) + decay * p[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// [model] Tensors, forward, backward, decoding.

typedef struct {
    int eigenvalues, layers, channels, hidden, state, rank, window, task;
    TaskOptions task_options;
    Training training;
} Config;

typedef struct {
    float *wte, *norm_w, *in_w, *conv_w, *conv_b, *x_w, *dt_w, *dt_b, *A_log, *skip, *out_w;
    float *head_w;
} Params;

typedef struct {
    float *x, *r, *xz, *conv, *u, *rank, *bc, *raw, *dt, *A, *tiles, *h, *y, *g;
    float *logits, *losses;
} Acts;

// Gradients of one layer's activations, used again by every layer, and scratch.
typedef struct {
    float *dx, *dr, *dxz, *du, *drank, *dbc, *ddt, *dA, *dy, *dlogits, *work;
} Dacts;

typedef struct { float *h, *window; } State; // while decoding: scan, last inputs of the convolution

typedef struct {
    Config config;
    const Task *task;
    size_t B, T, V, C, H, S, R, W, L, decode_B;
    float range; // 1, 2: a = range E - (range - 1)
    Weights weights;
    Params params, grads;
    Acts acts;
    Dacts dacts;
    State state;
    Arena acts_arena, dacts_arena, state_arena;
    Batch batch;
    double loss; // nats, mean over the supervised positions of the batch
} Model;

// model_name: the word for this configuration in RESULT lines and run directories.
static const char *model_name(const Config *c)
{
    static char word[16];
    option_word(EIGENVALUES, c->eigenvalues, word, sizeof word);
    return word;
}

#define ROWS(table) table, sizeof(table) / sizeof *(table), sizeof(float)

// params_plan: the table of parameters. All decay but what makes a step: A_log, skip and the bias
// of dt. Steps start between 1e-3 and 1e-1, above the papers' floor of 1e-4.
static void params_plan(Model *m)
{
    const size_t L = m->L, C = m->C, V = m->V, H = m->H, S = m->S, R = m->R, W = m->W;
    const double c = 1 / sqrt((double)C), h = 1 / sqrt((double)H), r = 1 / sqrt((double)R);
    const double w = 1 / sqrt((double)W);
    const Tensor params[] = {
        {"wte", {V, C}, INIT_NORMAL(1), DECAY, 1, offsetof(Params, wte)},
        {"norm_w", {L, C}, INIT_ONE, DECAY, 1, offsetof(Params, norm_w)},
        {"in_w", {L, 2 * H, C}, INIT_UNIFORM(c), DECAY, 1, offsetof(Params, in_w)},
        {"conv_w", {L, H, W}, INIT_UNIFORM(w), DECAY, 1, offsetof(Params, conv_w)},
        {"conv_b", {L, H}, INIT_UNIFORM(w), DECAY, 1, offsetof(Params, conv_b)},
        {"x_w", {L, R + 2 * S, H}, INIT_UNIFORM(h), DECAY, 1, offsetof(Params, x_w)},
        {"dt_w", {L, H, R}, INIT_UNIFORM(r), DECAY, 1, offsetof(Params, dt_w)},
        {"dt_b", {L, H}, INIT_STEP(1e-3, 1e-1), NO_DECAY, 1, offsetof(Params, dt_b)},
        {"A_log", {L, H, S}, INIT_LOG_COUNT, NO_DECAY, 1, offsetof(Params, A_log)},
        {"skip", {L, H}, INIT_ONE, NO_DECAY, 1, offsetof(Params, skip)},
        {"out_w", {L, C, H}, INIT_UNIFORM(h), DECAY, 1, offsetof(Params, out_w)},
        {"head_w", {V, C}, INIT_UNIFORM(c), DECAY, 1, offsetof(Params, head_w)},
    };
    weights_plan(&m->weights, ROWS(params));
}

// model_plan: sizes and tables for a configuration, no memory. The task decides T and V.
static void model_plan(Model *m, const Config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config, m->task = &TASKS[config->task];
    const TaskShape shape = m->task->shape(&config->task_options);
    const size_t B = m->B = (size_t)config->training.batch_size, L = m->L = (size_t)config->layers;
    const size_t T = m->T = shape.T, V = m->V = shape.V, C = m->C = (size_t)config->channels;
    const size_t H = m->H = config->hidden ? (size_t)config->hidden : 2 * C;
    const size_t S = m->S = (size_t)config->state, W = m->W = (size_t)config->window;
    const size_t R = m->R = config->rank ? (size_t)config->rank : (C + 15) / 16;
    const size_t D = m->decode_B = B < 32 ? B : 32, NT = B * T / TILE + B;
    m->range = 1 + config->eigenvalues;
    const Tensor acts[] = { // x[0] is the embedding; see block_forward
        ACTIVATION("x", Acts, x, L + 1, B, T, C), ACTIVATION("r", Acts, r, L, B, T, C),
        ACTIVATION("xz", Acts, xz, L, B, T, 2 * H), ACTIVATION("conv", Acts, conv, L, B, T, H),
        ACTIVATION("u", Acts, u, L, B, T, H), ACTIVATION("rank", Acts, rank, L, B, T, R),
        ACTIVATION("bc", Acts, bc, L, B, T, 2 * S), ACTIVATION("raw", Acts, raw, L, B, T, H),
        ACTIVATION("dt", Acts, dt, L, B, T, H), ACTIVATION("A", Acts, A, L, S, H),
        ACTIVATION("tiles", Acts, tiles, L, NT, S, H), // for any B, T of as many tokens
        ACTIVATION("h", Acts, h, L, B, S, H), ACTIVATION("y", Acts, y, L, B, T, H),
        ACTIVATION("g", Acts, g, L, B, T, H), ACTIVATION("logits", Acts, logits, B, T, V),
        ACTIVATION("losses", Acts, losses, B, T),
    };
    const Tensor dacts[] = {
        ACTIVATION("dx", Dacts, dx, B, T, C), ACTIVATION("dr", Dacts, dr, B, T, C),
        ACTIVATION("dxz", Dacts, dxz, B, T, 2 * H), ACTIVATION("du", Dacts, du, B, T, H),
        ACTIVATION("drank", Dacts, drank, B, T, R), ACTIVATION("dbc", Dacts, dbc, B, T, 2 * S),
        ACTIVATION("ddt", Dacts, ddt, B, T, H), ACTIVATION("dA", Dacts, dA, B, S, H),
        ACTIVATION("dy", Dacts, dy, B, T, H), ACTIVATION("dlogits", Dacts, dlogits, B, T, V),
        ACTIVATION("work", Dacts, work, threads_count(), scan_work(H, S)),
    };
    const Tensor state[] = {ACTIVATION("h", State, h, L, D, S, H),
                            ACTIVATION("window", State, window, W > 1 ? L : 0, D, W - 1, H)};
    params_plan(m);
    arena_plan(&m->acts_arena, "activations", ROWS(acts));
    arena_plan(&m->dacts_arena, "activation gradients", ROWS(dacts));
    arena_plan(&m->state_arena, "decoding state", ROWS(state));
}

// model_flops: floating-point operations of one update: per token 6 a weight but the embedding's,
// and 40 S a channel and layer in the scan, 10 of them forward; an exponential counts as one.
static double model_flops(const Model *m)
{
    const size_t tokens = (size_t)m->config.training.accumulate * m->B * m->T;
    return (double)tokens * (6 * (double)arena_elements(&m->weights.params, "wte") +
                             40 * (double)(m->L * m->H * m->S));
}

// layer_acts: the activations of layer l.
static Acts layer_acts(const Model *m, size_t l)
{
    const size_t n = l * m->B * m->T, C = n * m->C, H = n * m->H, row = m->S * m->H;
    const Acts *a = &m->acts;
    return (Acts){.x = a->x + C, .r = a->r + C, .xz = a->xz + 2 * H, .conv = a->conv + H,
                  .u = a->u + H, .rank = a->rank + n * m->R, .bc = a->bc + n * 2 * m->S,
                  .raw = a->raw + H, .dt = a->dt + H, .A = a->A + l * row,
                  .tiles = a->tiles + l * (m->B * m->T / TILE + m->B) * row,
                  .h = a->h + l * m->B * row, .y = a->y + H, .g = a->g + H};
}

// layer_params: the parameters of layer l, or their gradients.
static Params layer_params(const Model *m, const Params *p, size_t l)
{
    const size_t C = l * m->C, H = l * m->H;
    return (Params){.norm_w = p->norm_w + C, .in_w = p->in_w + 2 * H * m->C,
                    .conv_w = p->conv_w + H * m->W, .conv_b = p->conv_b + H,
                    .x_w = p->x_w + H * (m->R + 2 * m->S), .dt_w = p->dt_w + H * m->R,
                    .dt_b = p->dt_b + H, .A_log = p->A_log + H * m->S, .skip = p->skip + H,
                    .out_w = p->out_w + C * m->H};
}

// block_forward: next (B,T,C), may be k.x, = the block of k.x; fills the layer's activations
// k. The scan starts from `initial` (B,S,H), which may be k.h, where it leaves the last state; the
// convolution from `window` (B,W-1,H). NULL: from zeros.
static void block_forward(const Model *m, Acts k, Params p, float *next, const float *initial,
                          const float *window, size_t B, size_t T)
{
    const size_t N = B * T, C = m->C, H = m->H, S = m->S, R = m->R;
    rmsnorm_forward(k.r, k.x, p.norm_w, N, C);
    matmul_forward(k.xz, k.r, p.in_w, NULL, N, C, 2 * H, 0);
    conv_forward(k.conv, k.xz, window, p.conv_w, p.conv_b, B, T, H, m->W);
    silu_forward(k.u, k.conv, N * H);
    matmul_forward(k.rank, k.u, p.x_w, NULL, N, H, R, 0);
    matmul_forward(k.bc, k.u, p.x_w + R * H, NULL, N, H, 2 * S, 0);
    matmul_forward(k.raw, k.rank, p.dt_w, p.dt_b, N, R, H, 0);
    dt_forward(k.dt, k.raw, N * H);
    rates_forward(k.A, p.A_log, H, S);
    scan_forward(k.y, k.tiles, k.h, k.u, k.dt, k.bc, initial, k.A, p.skip, B, T, H, S, m->range);
    gate_forward(k.g, k.y, k.xz, N, H);
    if (next != k.x)
        memcpy(next, k.x, N * C * sizeof *next);
    matmul_forward(next, k.g, p.out_w, NULL, N, H, C, 1);
}

// model_forward: fills acts, loss and the batch's predictions from its inputs and targets.
static void model_forward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Acts acts = m->acts;
    batch_check(&m->batch, m->V);
    embed_forward(acts.x, m->batch.inputs, m->params.wte, NULL, m->B, m->T, C);
    for (size_t l = 0; l < m->L; l++)
        block_forward(m, layer_acts(m, l), layer_params(m, &m->params, l),
                      acts.x + (l + 1) * N * C, NULL, NULL, m->B, m->T);
    matmul_forward(acts.logits, acts.x + m->L * N * C, m->params.head_w, NULL, N, C, m->V, 0);
    m->loss = crossentropy(acts.losses, m->batch.predictions, m->dacts.dlogits, acts.logits,
                           m->batch.targets, N, m->V);
}

// block_backward: dx (B,T,C), the gradient of what block_forward gives, becomes that of k.x; the
// layer's gradients g +=.
static void block_backward(const Model *m, Acts k, Params p, Params g, float *dx)
{
    const size_t B = m->B, T = m->T, N = B * T, C = m->C, H = m->H, S = m->S, R = m->R;
    const Dacts d = m->dacts;
    matmul_backward(d.dy, g.out_w, NULL, dx, k.g, p.out_w, N, H, C, 0);
    gate_backward(d.dy, d.dxz, d.dy, k.y, k.xz, N, H);
    scan_backward(d.du, d.ddt, d.dbc, NULL, d.dA, g.skip, d.dy, NULL, k.tiles, k.u, k.dt, k.bc,
                  k.A, p.skip, d.work, B, T, H, S, m->range);
    rates_backward(g.A_log, d.dA, k.A, p.A_log, B, H, S);
    dt_backward(d.ddt, d.ddt, k.raw, N * H);
    matmul_backward(d.drank, g.dt_w, g.dt_b, d.ddt, k.rank, p.dt_w, N, R, H, 0);
    matmul_backward(d.du, g.x_w, NULL, d.drank, k.u, p.x_w, N, H, R, 1);
    matmul_backward(d.du, g.x_w + R * H, NULL, d.dbc, k.u, p.x_w + R * H, N, H, 2 * S, 1);
    silu_backward(d.du, d.du, k.conv, N * H);
    conv_backward(d.dxz, NULL, g.conv_w, g.conv_b, d.du, k.xz, NULL, p.conv_w, B, T, H, m->W);
    matmul_backward(d.dr, g.in_w, NULL, d.dxz, k.r, p.in_w, N, C, 2 * H, 0);
    rmsnorm_backward(dx, g.norm_w, d.dr, k.x, p.norm_w, N, C);
}

// model_backward: grads += the gradient of loss, for the batch model_forward has just seen.
static void model_backward(Model *m)
{
    const size_t N = m->B * m->T, C = m->C;
    const Dacts d = m->dacts;
    matmul_backward(d.dx, m->grads.head_w, NULL, d.dlogits, m->acts.x + m->L * N * C,
                    m->params.head_w, N, C, m->V, 0);
    for (size_t l = m->L; l-- > 0;)
        block_backward(m, layer_acts(m, l), layer_params(m, &m->params, l),
                       layer_params(m, &m->grads, l), d.dx);
    embed_backward(m->grads.wte, NULL, d.dx, m->batch.inputs, m->B, m->T, C);
}

// model_decode: logits (D,V) of position t for tokens (D), D <= decode_B, after positions 0..t-1;
// t = 0 starts anew. Overwrites dacts. The memory does not grow: there is no last position.
static const float *model_decode(Model *m, const int *tokens, size_t t, size_t D)
{
    const size_t C = m->C, H = m->H, W = m->W, row = m->S * H;
    const Dacts d = m->dacts;
    Acts k = {.x = d.dx, .r = d.dr, .xz = d.dxz, .conv = d.dy, .u = d.du, .rank = d.drank,
              .bc = d.dbc, .raw = d.ddt, .dt = d.ddt, .A = d.dA, .y = d.dy, .g = d.dy};
    if (t == 0)
        arena_fill(&m->state_arena, 0);
    embed_forward(d.dx, tokens, m->params.wte, NULL, D, 1, C);
    for (size_t l = 0; l < m->L; l++) {
        float *window = W > 1 ? m->state.window + l * m->decode_B * (W - 1) * H : NULL;
        k.h = m->state.h + l * m->decode_B * row;
        block_forward(m, k, layer_params(m, &m->params, l), d.dx, k.h, window, D, 1);
        for (size_t i = 0; window && i < D; i++, window += (W - 1) * H) { // the oldest goes
            memmove(window, window + H, (W - 2) * H * sizeof *window);
            memcpy(window + (W - 2) * H, k.xz + i * 2 * H, H * sizeof *window);
        }
    }
    matmul_forward(d.dlogits, d.dx, m->params.head_w, NULL, D, C, m->V, 0);
    return d.dlogits;
}

// ------------------------------------------------------------------------------------------------
// [train] The loop: memory, batches, updates, evaluation, checkpoints.  (shared)

// model_bytes: what model_alloc will allocate, but for the batch's tokens.
static size_t model_bytes(const Model *m)
{
    return 4 * m->weights.params.bytes + m->acts_arena.bytes + m->dacts_arena.bytes +
           m->state_arena.bytes;
}

// model_alloc: allocate a planned model and draw its initial weights from the seed.
static void model_alloc(Model *m)
{
    arena_alloc(&m->acts_arena, &m->acts);
    arena_alloc(&m->dacts_arena, &m->dacts);
    arena_alloc(&m->state_arena, &m->state);
    batch_alloc(&m->batch, m->B, m->T);
    weights_alloc(&m->weights, &m->params, &m->grads, m->config.training.seed);
}

// model_free: give everything back.
static void model_free(Model *m)
{
    weights_free(&m->weights);
    arena_free(&m->acts_arena);
    arena_free(&m->dacts_arena);
    arena_free(&m->state_arena);
    batch_free(&m->batch);
}

// model_zero_grad: clear the gradients of the parameters.
static void model_zero_grad(Model *m)
{
    arena_fill(&m->weights.grads, 0);
}

// load_batch: inputs, targets = batch `number` of STREAM_TRAIN or STREAM_EVAL, of its own B and T.
static void load_batch(Model *m, uint64_t stream, long number)
{
    const Config *c = &m->config;
    task_batch(m->task, &c->task_options, c->training.seed, stream, number, &m->batch);
    m->B = m->batch.B, m->T = m->batch.T;
}

// forward_backward: gradients of update `step`, from its batches; dies when a loss is not finite.
static Update forward_backward(Model *m, long step)
{
    Update u = {0};
    const int n = m->config.training.accumulate;
    model_zero_grad(m);
    for (int i = 0; i < n; i++) {
        load_batch(m, STREAM_TRAIN, step * n + i);
        model_forward(m);
        training_stop_if_bad("loss", m->loss, step, &m->weights, &m->acts_arena);
        update_add(&u, &m->weights.grads, m->loss, task_score(m->task, &m->batch, m->B),
                   batch_targets(&m->batch));
        model_backward(m);
    }
    update_end(&u, &m->weights.grads);
    arenas_check(&m->weights.grads, &m->acts_arena, &m->dacts_arena);
    return u;
}

// train_step: update `step`; row = what is logged. Loss and accuracy are before the update.
static void train_step(Model *m, long step, LogRow *row)
{
    const Training *t = &m->config.training;
    double start = seconds_now();
    const Update u = forward_backward(m, step);
    double norm = gradient_norm(&m->weights.grads), lr = learning_rate(t, step);
    training_stop_if_bad("gradient norm", norm, step, &m->weights, &m->acts_arena);
    adamw(&m->weights, t, lr, t->grad_clip > 0 ? fmin(1, t->grad_clip / norm) : 1, step);
    *row = log_train_row(step, u.loss, u.acc, lr, norm, seconds_now() - start, u.n * m->B * m->T);
}

// evaluate: loss and accuracy on sequences never trained on, each prediction given the true past.
static LogRow evaluate(Model *m, long step)
{
    Evaluation sum = {0};
    const TaskOptions *options = &m->config.task_options;
    for (long i = 0; i < task_eval_batches(m->task, options, m->batch.rows); i++) {
        load_batch(m, STREAM_EVAL, i);
        model_forward(m);
        training_stop_if_bad("loss on fresh sequences", m->loss, step, &m->weights, &m->acts_arena);
        evaluation_add(&sum, m->task, options, &m->batch, m->loss);
    }
    return evaluation_row(&sum, step);
}

// decode: said (D,n) = the token chosen at each position when the model reads the first `given`
// tokens of inputs (D,n) and then what it said. Returns n, or how far it came when interrupted.
static size_t decode(Model *m, int *said, const int *inputs, size_t given, size_t n, size_t D,
                     Sampler sampler)
{
    int *tokens = alloc_zero(D, sizeof(int), "tokens");
    size_t t = 0;
    for (; t < n && !*training_interrupted(); t++) {
        for (size_t i = 0; i < D; i++)
            tokens[i] = t < given ? inputs[i * n + t] : said[i * n + t - 1];
        const float *logits = model_decode(m, tokens, t, D), *x = logits;
        for (size_t i = 0; i < D; i++, x += m->V)
            said[i * n + t] = sampler_choose(&sampler, x, sizeof(float), m->V, i, t);
    }
    free(tokens);
    return t;
}

// greedy: accuracy on decode_B sequences when the model reads what it said; -1 if interrupted.
static double greedy(Model *m)
{
    size_t prompt = m->task->shape(&m->config.task_options).prompt;
    decode(m, m->batch.predictions, m->batch.inputs, prompt, m->T, m->decode_B, (Sampler){0});
    return *training_interrupted() ? -1 : task_score(m->task, &m->batch, m->decode_B);
}

// train: take an allocated model through its configuration until the steps are done, --stop-at is
// reached or Ctrl-C is pressed; evaluate, save and print RESULT.
static void train(Model *m, const Options *options)
{
    const Training *t = &m->config.training;
    const char *task = m->task->name, *model = model_name(&m->config);
    Log log;
    LogRow row = {0}, val = {0};
    char checkpoint[LOG_PATH];
    training_load(t, &m->weights, options, ARCHITECTURE);
    if (t->dump) {
        forward_backward(m, 0);
        dump_write(t->dump, m->batch.inputs, m->batch.targets, m->B, m->T, m->loss, &m->weights,
                   &m->acts_arena, options, ARCHITECTURE);
        if (t->steps == 0)
            return;
    }
    long step = training_start(&log, checkpoint, t, &m->weights, options, ARCHITECTURE, task,
                               model, "CPU");
    for (;; step++) {
        int last = training_over(t, &log, step);
        if (last || (t->eval_every && step && step % t->eval_every == 0)) {
            val = evaluate(m, step);
            log_eval(&log, &val);
        }
        if (log.csv && (last || (log.steps && t->save_every && step % t->save_every == 0)))
            checkpoint_save(checkpoint, &m->weights, options, ARCHITECTURE, step);
        if (last)
            break;
        train_step(m, step, &row);
        log_step(&log, &row, t->steps, (step + 1) % t->print_every == 0);
    }
    const TaskOptions *o = &m->config.task_options;
    TaskShape s = m->task->shape(o);
    double own = m->decode_B && s.prompt < m->T ? greedy(m) : -1;
    if (own >= 0)
        task_show(m->task, o, m->batch.inputs, m->batch.predictions);
    if (o->sample && !*training_interrupted())
        task_show_sample(m->task, o, decode(m, o->said, o->read, o->prompt_n, o->read_n, 1,
                                            task_sampler(o, t->seed)));
    training_result(&log, task, model, s.size_name, s.size, &val, own, log_ms_per_step(&log));
    log_close(&log);
}

// ------------------------------------------------------------------------------------------------
// [main] Options, presets, start.

#define PAPER "--channels 128 "
#define ANSWERS PAPER "--batch-size 256 --lr 1e-3 --lr-min 1e-6 --eval-batches 211 "
#define PARITY_RUN ANSWERS "--task parity --layers 2 --steps 20000 --warmup 2000 --grad-clip 0"
#define MODULAR_RUN ANSWERS "--layers 3 --steps 100000 --warmup 10000 --weight-decay 0.1 --task "
#define WORDS PAPER "--layers 5 --batch-size 512 --steps 60000 --lr 1e-4 --schedule constant " \
    "--warmup 0 --weight-decay 0.01 --eval-batches 30 --task "
static const Preset PRESETS[] = {
    {"small", "--max-length 24 --eval-min-length 25 --eval-max-length 80 --eval-batches 32",
     "parity, short"},
    {"main", "--task copying --string-size 6 --lr 4e-3 --steps 600", "6 letters on two cores"},
    {"parity", PARITY_RUN, "Table 3, at the authors' batch of 256 and 20000 steps"},
    {"modular", MODULAR_RUN "modular", "Table 3, at a batch of 256; the paper's is 1024"},
    {"brackets", MODULAR_RUN "brackets", "Table 3, at a batch of 256"},
    {"s5-swaps", WORDS "s5 --elements swaps", "Fig. 4; the paper takes 312500 steps"},
    {"z60", WORDS "z60", "Fig. 8"},
    {NULL, NULL, NULL},
};

// config_options: the command line that fills c.
static void config_options(Options *options, Config *c)
{
    const Option rows[] = {
        {"eigenvalues", OPT_CHOICE, &c->eigenvalues, "signed", 0, 0, EIGENVALUES, DEFINES_MODEL,
         "of a step: in [0,1] or [-1,1]"},
        {"layers", OPT_INT, &c->layers, "2", 1, 1024, "L", DEFINES_MODEL, "blocks"},
        {"channels", OPT_INT, &c->channels, "64", 1, 1 << 16, "C", DEFINES_MODEL, "of the stream"},
        {"hidden", OPT_INT, &c->hidden, "0", 0, 1 << 20, "H", DEFINES_MODEL, "inside, 0 = 2 C"},
        {"state", OPT_INT, &c->state, "16", 1, 1 << 16, "S", DEFINES_MODEL, "of a channel"},
        {"rank", OPT_INT, &c->rank, "0", 0, 1 << 16, "R", DEFINES_MODEL, "of dt, 0 = C / 16"},
        {"window", OPT_INT, &c->window, "4", 1, WINDOW_MOST, "W", DEFINES_MODEL, "of conv"},
    };
    task_options(options, &c->task, &c->task_options);
    options_add(options, rows, sizeof rows / sizeof *rows);
    training_options(options, &c->training);
    options_default(options, "task", "parity");
    options_default(options, "lr", "2e-3");
    options_default(options, "steps", "1000");
}

// config_check: die over combinations that make no sense, with the reason.
static void config_check(const Config *c)
{
    const int H = c->hidden ? c->hidden : 2 * c->channels;
    if (c->rank > H)
        die(EXIT_USAGE, "--rank %d: expected at most the %d channels inside a block", c->rank, H);
}

static Config config;

// preset_cost: the cost of the preset just applied to config, for --help.
static void preset_cost(char *text, size_t size)
{
    static Model m;
    config_check(&config);
    model_plan(&m, &config);
    snprintf(text, size, "%.3g MB, %.3g FLOPs an update", 1e-6 * model_bytes(&m), model_flops(&m));
}

#ifndef TESTING
// main: parse, plan, print what it will cost, train.
int main(int argc, char **argv)
{
    static Model model;
    static Options options;
    training_begin();
    config_options(&options, &config);
    options_parse(&options, PRESETS, argc, argv,
                  "train_mamba: Mamba on the CPU. Without options: a small parity.", preset_cost);
    config_check(&config);
    training_check(&config.training);
    threads_set(config.training.threads);
    task_open(&TASKS[config.task], &config.task_options, &config.training, &options, 0);
    model_plan(&model, &config);
    options_print(stdout, "", &options);
    training_print(model_name(&config), &model.weights, "wte", model_flops(&model),
                   model.B * model.T * (size_t)config.training.accumulate, model_bytes(&model));
    model_alloc(&model);
    train(&model, &options);
    model_free(&model);
    return training_end();
}
#endif
