#!/usr/bin/env python3
"""Mamba in numpy, float64, without a state: a reference for train_mamba.c and .cu.

The trainer carries h from token to token. Here the memory of one number is a triangular matrix of
what every token still holds of every earlier one, and nothing is carried:

    P[t,s] = a_{s+1} ... a_t  (P[t,t] = 1),   a = E or 2 E - 1,   E = exp(dt A)
    y_t = sum_n C_t[n] sum_{s<=t} P[t,s] dt_s B_s[n] x_s + skip x_t

The gradient of a_j takes every product that has it apart: the sum over t >= j > s of P[t,j] dP[t,s]
P[j-1,s], with dP[t,s] = dy_t C_t dt_s B_s x_s.

    mamba.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line
                            per tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    mamba.py --golden DIR   write small goldens, one a variant: DIR/RANGE-WINDOW.safetensors
    mamba.py --self-test    the gradients against the complex step, the matrix against a state that
                            is carried, and that NaN and wrong numbers are found

Range, window, state and rank are in a dump's metadata. The gradients are written by hand from the
equations; the self test and --golden hold every entry against the complex step Im f(x + ih)/h. What
this model has in common with CausalRN (files, options, cross-entropy, comparing, complex step) is
causalrn.py's.
"""
import os
import sys
from collections import namedtuple

import numpy as np

from causalrn import (SelfTest, Trouble, command_line, cross_entropy, dump_check, dump_judge,
                      dump_made, dump_problem, golden_write, sigmoid, silu, silu_derivative,
                      sum_outer)

Variant = namedtuple("Variant", "eigenvalues window state rank hidden")
CHOICES = {"eigenvalues": ("nonneg", "signed")}
NUMBERS = ("window", "state", "rank", "hidden")  # rank and hidden 0: the shapes say it
NAMES = ("wte", "norm_w", "in_w", "conv_w", "conv_b", "x_w", "dt_w", "dt_b", "A_log", "skip",
         "out_w", "head_w")
GLOBAL = ("wte", "head_w")
ACTS = ("x", "u", "dt", "bc", "y", "logits")
EPS = 1e-5


# -----------------------------------------------------------------------------
# the pieces. Every forward function also takes complex numbers: see complex_step

def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def norm_backward(dy, x, weight):
    """dx, dweight"""
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    d = dy * weight
    dx = r * d - x * r ** 3 * (d * x).mean(-1, keepdims=True)
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)


def padded(x, W):
    """x (B,T,H) after W - 1 rows of zeros"""
    return np.concatenate([np.zeros_like(x[:, :1]).repeat(W - 1, 1), x], 1)


def conv(x, weight, bias):
    T, W = x.shape[1], weight.shape[1]
    rows = padded(x, W)
    return bias + sum(rows[:, w:w + T] * weight[:, w] for w in range(W))


def conv_backward(dz, x, weight):
    """dx, dweight, dbias"""
    T, W = x.shape[1], weight.shape[1]
    rows = padded(x, W)
    drows = np.zeros_like(rows)
    for w in range(W):
        drows[:, w:w + T] += dz * weight[:, w]
    dweight = np.stack([(dz * rows[:, w:w + T]).sum((0, 1)) for w in range(W)], -1)
    return drows[:, W - 1:], dweight, dz.sum((0, 1))


def span(v):
    return 2 if v.eigenvalues == "signed" else 1


def kept(dt, A, v):
    """a (B,T,H,S), what each step keeps of each number, and E"""
    E = np.exp(dt[..., None] * A)
    return span(v) * E - (span(v) - 1), E


def products(a):
    """P (B,H,S,T,T): P[..,t,s] = a_{s+1} ... a_t, 0 above the diagonal"""
    a = np.moveaxis(a, 1, -1)
    T = a.shape[-1]
    P = np.zeros((*a.shape, T), dtype=a.dtype)
    for t in range(T):
        P[..., t, t] = 1
        P[..., t, :t] = a[..., t, None] * P[..., t - 1, :t]
    return P


def over_time(x):
    """(B,T,H) or (B,T,S) -> (B,H,1,T), (B,1,S,T) for products"""
    return np.moveaxis(x, 1, -1)


def writes(x, dt, Bt):
    """(B,H,S,T): dt B x"""
    return over_time(dt * x)[:, :, None] * over_time(Bt)[:, None]


def scan(x, dt, bc, A, skip, v):
    Bt, Ct = np.split(bc, 2, -1)
    h = (products(kept(dt, A, v)[0]) @ writes(x, dt, Bt)[..., None])[..., 0]
    return np.moveaxis((h * over_time(Ct)[:, None]).sum(2), -1, 1) + skip * x


def scan_backward(dy, x, dt, bc, A, skip, v):
    """dx, ddt, dbc, dA, dskip"""
    Bt, Ct = np.split(bc, 2, -1)
    a, E = kept(dt, A, v)
    P, w = products(a), writes(x, dt, Bt)
    h = (P @ w[..., None])[..., 0]
    reads = over_time(dy)[:, :, None] * over_time(Ct)[:, None]  # dh by the output alone
    dw = (P.swapaxes(-1, -2) @ reads[..., None])[..., 0]
    da = np.zeros_like(dw)  # entry (j, j - 1) of P^T (reads w^T) P^T
    da[..., 1:] = dw[..., 1:] * h[..., :-1]
    dexp = np.moveaxis(da, -1, 1) * span(v) * E  # by dt A
    dw = np.moveaxis(dw, -1, 1)  # (B,T,H,S)
    by_x = (dw * Bt[:, :, None]).sum(-1)
    ddt = by_x * x + (dexp * A).sum(-1)
    dB = (dw * (dt * x)[..., None]).sum(2)
    dC = (np.moveaxis(h, -1, 1) * dy[..., None]).sum(2)
    return (by_x * dt + skip * dy, ddt, np.concatenate([dB, dC], -1),
            (dexp * dt[..., None]).sum((0, 1)), (dy * x).sum((0, 1)))


# -----------------------------------------------------------------------------
# the model

def layer(p, l):
    return {name: p[name][l] for name in p if name not in GLOBAL}


def ranks(w):
    """R, the rank of dt"""
    return w["dt_w"].shape[1]


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x = p["wte"][inputs]
    acts = {name: [] for name in ("xz", "conv", "u", "rank", "bc", "raw", "dt", "y")}
    acts["x"] = [x]
    for l in range(len(p["in_w"])):
        w = layer(p, l)
        xz = norm(x, w["norm_w"]) @ w["in_w"].T
        first, z = np.split(xz, 2, -1)
        before = conv(first, w["conv_w"], w["conv_b"])
        u = silu(before)
        made = u @ w["x_w"].T
        rank, bc = made[..., :ranks(w)], made[..., ranks(w):]
        raw = rank @ w["dt_w"].T + w["dt_b"]
        dt = np.log1p(np.exp(raw))
        y = scan(u, dt, bc, -np.exp(w["A_log"]), w["skip"], v)
        x = x + (y * silu(z)) @ w["out_w"].T
        for name, value in (("x", x), ("xz", xz), ("conv", before), ("u", u), ("rank", rank),
                            ("bc", bc), ("raw", raw), ("dt", dt), ("y", y)):
            acts[name].append(value)
    acts = {name: np.stack(values) for name, values in acts.items()}
    acts["logits"] = x @ p["head_w"].T
    return acts, cross_entropy(acts["logits"], targets)[0]


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    grads = {name: np.zeros_like(p[name]) for name in NAMES}
    _, dlogits = cross_entropy(acts["logits"], targets)
    grads["head_w"] += sum_outer(dlogits, acts["x"][-1])
    dx = dlogits @ p["head_w"]
    for l in reversed(range(len(p["in_w"]))):
        w, g = layer(p, l), {name: grads[name][l] for name in NAMES if name not in GLOBAL}
        k = {name: acts[name][l] for name in acts if name != "logits"}
        first, z = np.split(k["xz"], 2, -1)
        A = -np.exp(w["A_log"])
        g["out_w"] += sum_outer(dx, k["y"] * silu(z))
        d = dx @ w["out_w"]
        du, ddt, dbc, dA, g["skip"][...] = scan_backward(d * silu(z), k["u"], k["dt"], k["bc"], A,
                                                         w["skip"], v)
        g["A_log"] += dA * A
        draw = ddt * sigmoid(k["raw"])
        g["dt_w"] += sum_outer(draw, k["rank"])
        g["dt_b"] += draw.sum((0, 1))
        dmade = np.concatenate([draw @ w["dt_w"], dbc], -1)
        g["x_w"] += sum_outer(dmade, k["u"])
        du = (du + dmade @ w["x_w"]) * silu_derivative(k["conv"])
        dfirst, g["conv_w"][...], g["conv_b"][...] = conv_backward(du, first, w["conv_w"])
        dxz = np.concatenate([dfirst, d * k["y"] * silu_derivative(z)], -1)
        g["in_w"] += sum_outer(dxz, norm(k["x"], w["norm_w"]))
        d, g["norm_w"][...] = norm_backward(dxz @ w["in_w"], k["x"], w["norm_w"])
        dx = dx + d
    np.add.at(grads["wte"], inputs, dx)
    return grads


# -----------------------------------------------------------------------------
# dumps and goldens

def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    dump_check(path, metadata, CHOICES)
    for field in NUMBERS:
        if not metadata.get(field, "").isdigit():
            raise Trouble(f"{path}: metadata {field} is {metadata.get(field)!r}; expected a number")
    v = Variant(*(metadata[field] for field in CHOICES), *(int(metadata[f]) for f in NUMBERS))
    p, inputs, targets = dump_problem(path, tensors, NAMES)
    L, H, W = p["conv_w"].shape
    R = v.rank or -(-p["wte"].shape[1] // 16)
    wants = {"conv_w": (L, H, v.window), "A_log": (L, H, v.state), "dt_w": (L, H, R),
             "out_w": (L, p["wte"].shape[1], v.hidden or 2 * p["wte"].shape[1])}
    for name, shape in wants.items():
        if p[name].shape != shape:
            raise Trouble(f"{path}: {name} is {p[name].shape}; its options say {shape}")
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {v.eigenvalues}, window {v.window}, state {v.state}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in NAMES}, forward_bound, grad_bound, out)


def small_problem(v, B=2, T=5, C=4, L=2, V=7, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    H, R, S = v.hidden or 2 * C, v.rank or -(-C // 16), v.state
    shapes = {"wte": (V, C), "norm_w": (L, C), "in_w": (L, 2 * H, C), "conv_w": (L, H, v.window),
              "conv_b": (L, H), "x_w": (L, R + 2 * S, H), "dt_w": (L, H, R), "dt_b": (L, H),
              "A_log": (L, H, S), "skip": (L, H), "out_w": (L, C, H), "head_w": (V, C)}
    p = {name: rng.standard_normal(shapes[name]) * (1.0 if name == "wte" else 0.6)
         for name in NAMES}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def solve(p, inputs, targets, v):
    return dump_made(forward, backward, NAMES, ACTS, p, inputs, targets, v)


def every_variant():
    return [Variant(eigenvalues, window, state, rank, hidden)
            for eigenvalues in CHOICES["eigenvalues"]
            for window, state, rank, hidden in ((4, 3, 0, 0), (1, 2, 2, 5))]


def metadata_of(v):
    return {"eigenvalues": v.eigenvalues, **{f: str(getattr(v, f)) for f in NUMBERS}}


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    total = 0
    for v in every_variant():
        path = os.path.join(directory, f"{v.eigenvalues}-{v.window}.safetensors")
        total += golden_write(path, solve(*small_problem(v), v),
                              {**metadata_of(v), "script": "dev/ref/mamba.py",
                               "numpy": np.__version__})
    print(f"{total} bytes")


# -----------------------------------------------------------------------------

def carried(x, dt, bc, A, skip, v):
    """y by a state that is carried: h = a h + dt B x, y = C h + skip x"""
    Bt, Ct = np.split(bc, 2, -1)
    a = kept(dt, A, v)[0]
    h, y = 0, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + (dt * x)[:, t, :, None] * Bt[:, t, None]
        y.append((h * Ct[:, t, None]).sum(-1) + skip * x[:, t])
    return np.stack(y, 1)


def self_test():
    test = SelfTest()
    see = test.see
    rng = np.random.default_rng(3)
    for v in every_variant():
        try:
            solve(*small_problem(v, T=6, L=1, seed=2), v)
            see(f"{v}: gradients equal the complex step", True)
        except Trouble as e:
            see(str(e), False)
        x, raw = rng.standard_normal((2, 2, 40, 5))
        bc, A = rng.standard_normal((2, 40, 6)), -np.exp(rng.standard_normal((5, 3)))
        given = x, np.log1p(np.exp(raw)), bc, A, rng.standard_normal(5), v
        see(f"{v}: matrices equal a state that is carried", np.allclose(
            scan(*given), carried(*given), rtol=0, atol=1e-12))
    x = rng.standard_normal((1, 3, 2))
    see("three positions of a convolution", np.allclose(
        conv(x, np.array([[1.0, 10, 100, 1000]] * 2), 5.0)[0, 2], 5 + x[0].T @ [10.0, 100, 1000]))
    v = every_variant()[2]
    good, meta = solve(*small_problem(v), v), metadata_of(v)
    test.dumps(check_dump, good, meta, "conv_w", "A_log", "y", "dt_b", to=1.0)
    try:
        meta["window"] = "3"
        check_dump("a dump", good, meta, 1e-5, 1e-4, out=lambda line: None)
        see("another window is found", False)
    except Trouble:
        see("another window is found", True)
    return test.end()


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
