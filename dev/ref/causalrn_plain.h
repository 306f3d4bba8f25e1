// causalrn_plain.h: the layer of CausalRN and BiRN as the paper writes it, in double: every pair on
// its own is normalized, activated and summed, and differentiated step by step. Slow; what the
// faster forms are held against. Included after train_causalrn.c (Mix), dev/testing_model.h (take)
// and dev/test_layers.h (plain_normalize).  [CausalRN eq. 4-6]
#ifndef SEQ_DEV_CAUSALRN_PLAIN_H
#define SEQ_DEV_CAUSALRN_PLAIN_H

// plain_psi: the activation and its derivative.
static inline double plain_psi(int activation, double z, double *slope)
{
    double below = erfc(-z / sqrt(2.0)) / 2; // the normal distribution function
    switch (activation) {
    case EXP: *slope = exp(z); return exp(z);
    case RELU: *slope = z > 0; return z > 0 ? z : 0;
    case ELU: *slope = z > 0 ? 1 : exp(z); return z > 0 ? z : exp(z) - 1;
    default: *slope = below + z * exp(-z * z / 2) / sqrt(2 * acos(-1.0)); return z * below;
    }
}

// plain_row_scale: 2^-k with 2^(k-1) <= max |s| < 2^k over s (n); 1 for zeros.
static inline double plain_row_scale(const double *s, size_t n)
{
    double max = 0, scale = 1;
    for (size_t i = 0; i < n; i++)
        max = fabs(s[i]) > max ? fabs(s[i]) : max;
    for (; max * scale >= 1; scale /= 2)
        ;
    for (; max > 0 && max * scale < 0.5; scale *= 2)
        ;
    return scale;
}

// plain_mix: one sequence: out (T,H), da (T,H), db (T,H) = from a, b, dout (T,H).
static inline void plain_mix(double *out, double *da, double *db, const double *a, const double *b,
                             const double *dout, size_t T, size_t H, Mix mix)
{
    double *za = copy_of(a, T * H * sizeof *a), *zb = copy_of(b, T * H * sizeof *b);
    double *ra = take(T * sizeof *ra), *rb = take(T * sizeof *rb), *r = take(T * sizeof *r);
    double *pairs = take(T * H * sizeof *pairs), *s = take(H * sizeof *s), slope;
    double *ds = take(H * sizeof *ds), *dz = take(H * sizeof *dz);
    memset(da, 0, T * H * sizeof *da);
    memset(db, 0, T * H * sizeof *db);
    for (size_t t = 0; t < T && mix.prenorm == APPROX; t++) {
        ra[t] = plain_normalize(za + t * H, a + t * H, H);
        rb[t] = plain_normalize(zb + t * H, b + t * H, H);
    }
    for (size_t u = 0; u < T; u++) {
        size_t n = mix.causal ? u + 1 : T;
        memset(s, 0, H * sizeof *s);
        for (size_t v = 0; v < n; v++) {
            double *z = pairs + v * H;
            for (size_t h = 0; h < H; h++)
                z[h] = za[u * H + h] + zb[v * H + h];
            r[v] = mix.prenorm == EXACT ? plain_normalize(z, z, H) : 1;
            for (size_t h = 0; h < H; h++)
                s[h] += plain_psi(mix.activation, z[h], &slope);
        }
        double *o = out + u * H, scale = mix.postnorm ? plain_row_scale(s, H) : 1 / (double)n;
        for (size_t h = 0; h < H; h++)
            o[h] = s[h] * scale;
        memcpy(ds, dout + u * H, H * sizeof *ds);
        if (mix.postnorm) {
            double rstd = plain_normalize(o, o, H);
            plain_normalize_backward(ds, ds, o, rstd, H);
        }
        for (size_t v = 0; v < n; v++) {
            for (size_t h = 0; h < H; h++) {
                plain_psi(mix.activation, pairs[v * H + h], &slope);
                dz[h] = ds[h] * scale * slope;
            }
            if (mix.prenorm == EXACT)
                plain_normalize_backward(dz, dz, pairs + v * H, r[v], H);
            for (size_t h = 0; h < H; h++) {
                da[u * H + h] += dz[h];
                db[v * H + h] += dz[h];
            }
        }
    }
    for (size_t t = 0; t < T && mix.prenorm == APPROX; t++) {
        plain_normalize_backward(da + t * H, da + t * H, za + t * H, ra[t], H);
        plain_normalize_backward(db + t * H, db + t * H, zb + t * H, rb[t], H);
    }
}

#endif
