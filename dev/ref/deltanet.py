#!/usr/bin/env python3
"""DeltaNet in numpy, float64, the plain way: a reference for train_deltanet.c and .cu.

Each step of a head multiplies its memory by a matrix and adds to it, and nothing is simplified:

    S_t = S_{t-1} M_t + beta_t v_t k_t^T,  M_t = I - beta_t k_t k_t^T,  o_t = S_t q_t / sqrt(HS)
    x += z W_proj^T, z = norm(o) by head;   x += (silu(g) y) W_down^T, [g, y] = norm(x) W_gu^T

The backward pass keeps every S_t and differentiates through M_t.

    deltanet.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line
                               per tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    deltanet.py --golden DIR   write small goldens, one a variant: DIR/RANGE-CONV.safetensors
    deltanet.py --self-test    the gradients against the complex step, two identities of the delta
                               rule, and that NaN and wrong numbers are found

Range, heads and convolution are in a dump's metadata. The gradients are written by hand from the
equations; the self test and --golden hold every entry against the complex step Im f(x + ih)/h. What
this model has in common with CausalRN (files, options, cross-entropy, comparing, complex step) is
causalrn.py's.
"""
import math
import os
import sys
from collections import namedtuple

import numpy as np

from causalrn import (SelfTest, Trouble, command_line, cross_entropy, dump_check, dump_judge,
                      dump_made, dump_problem, golden_write, sigmoid, silu, silu_derivative,
                      sum_outer)

Variant = namedtuple("Variant", "eigenvalues conv qk_silu heads")
CHOICES = {"eigenvalues": ("nonneg", "signed"), "conv": ("no", "yes"), "qk-silu": ("no", "yes")}
NAMES = ("wte", "norm1_w", "qkv_w", "beta_w", "conv_w", "norm_o_w", "proj_w", "norm2_w", "gu_w",
         "down_w", "norm_w", "head_w")
ACTS = ("x", "qkv", "beta", "o", "mid", "logits")
EPS = 1e-6


def params_of(v):
    return tuple(name for name in NAMES if name != "conv_w" or v.conv == "yes")


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


def shifted(x, steps):
    """x (B,T,C) `steps` positions later, zeros before."""
    out = np.zeros_like(x)
    T = x.shape[1]
    if steps < T:
        out[:, steps:] = x[:, :T - steps]
    return out


def earlier(x, steps):
    """the transpose of shifted"""
    return shifted(x[:, ::-1], steps)[:, ::-1]


def conv(x, weight):
    return sum(shifted(x, 3 - w) * weight[:, w] for w in range(4))


def conv_backward(dz, x, weight):
    dx = sum(earlier(dz, 3 - w) * weight[:, w] for w in range(4))
    return dx, np.stack([(dz * shifted(x, 3 - w)).sum((0, 1)) for w in range(4)], -1)


def heads(x, v):
    """(B,T,C) as (B,T,NH,HS)"""
    return x.reshape(*x.shape[:2], v.heads, x.shape[2] // v.heads)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)


def unit_backward(dy, x):
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)
    return r * dy - x * r ** 3 * (x * dy).sum(-1, keepdims=True)


def active(v, C):
    """1 for the channels of q, k, v that SiLU is applied to."""
    everywhere = v.conv == "yes" or v.qk_silu == "yes"
    return np.concatenate([np.full(2 * C, float(everywhere)), np.ones(C)])


def activate(z, v):
    """q, k, v (B,T,3C) from what the convolution gives."""
    on = active(v, z.shape[2] // 3)
    a = on * silu(z) + (1 - on) * z
    q, k, value = np.split(a, 3, -1)
    return np.concatenate([unit(heads(q, v)).reshape(q.shape), unit(heads(k, v)).reshape(k.shape),
                           value], -1)


def activate_backward(d, z, v):
    on = active(v, z.shape[2] // 3)
    a = on * silu(z) + (1 - on) * z
    parts = [unit_backward(heads(y, v), heads(x, v)).reshape(x.shape)
             for y, x in zip(np.split(d, 3, -1)[:2], np.split(a, 3, -1)[:2])]
    da = np.concatenate(parts + [np.split(d, 3, -1)[2]], -1)
    return da * (on * silu_derivative(z) + 1 - on)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


def times(M, x):
    return (M @ x[..., None])[..., 0]


def transitions(k, beta):
    return np.eye(k.shape[-1]) - beta[..., None, None] * outer(k, k)


def delta(qkv, beta, v):
    """o (B,T,C) and every S: S[t] (B,NH,HS,HS) before step t."""
    q, k, value = (heads(x, v) for x in np.split(qkv, 3, -1))
    B, T, NH, HS = q.shape
    M, write = transitions(k, beta), beta[..., None, None] * outer(value, k)
    S, o = [np.zeros((B, NH, HS, HS), dtype=qkv.dtype)], []
    for t in range(T):
        S.append(S[t] @ M[:, t] + write[:, t])
        o.append(times(S[-1], q[:, t]) / math.sqrt(HS))
    return np.stack(o, 1).reshape(B, T, NH * HS), S


def delta_backward(do, qkv, beta, v):
    q, k, value = (heads(x, v) for x in np.split(qkv, 3, -1))
    do, HS = heads(do, v) / math.sqrt(q.shape[-1]), q.shape[-1]
    S, M = delta(qkv, beta, v)[1], transitions(k, beta)
    dq, dk, dv, dbeta = (np.zeros_like(x) for x in (q, k, value, beta))
    G = np.zeros_like(S[0])
    for t in reversed(range(q.shape[1])):
        G = G + outer(do[:, t], q[:, t])
        b, k_t, v_t = beta[:, t, :, None], k[:, t], value[:, t]
        dM = S[t].swapaxes(-1, -2) @ G
        dq[:, t] = times(S[t + 1].swapaxes(-1, -2), do[:, t])
        dv[:, t] = b * times(G, k_t)
        dk[:, t] = b * times(G.swapaxes(-1, -2), v_t) - b * times(dM + dM.swapaxes(-1, -2), k_t)
        dbeta[:, t] = (v_t * times(G, k_t)).sum(-1) - (k_t * times(dM, k_t)).sum(-1)
        G = G @ M[:, t]
    B, T, NH = beta.shape
    return np.concatenate([x.reshape(B, T, NH * HS) for x in (dq, dk, dv)], -1), dbeta


# -----------------------------------------------------------------------------
# the model

def layer(p, l):
    return {name: p[name][l] for name in p if name not in ("wte", "norm_w", "head_w")}


def largest_beta(v):
    return 2 if v.eigenvalues == "signed" else 1


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x = p["wte"][inputs]
    acts = {name: [] for name in ("p", "z", "qkv", "beta", "o", "mid", "gu")}
    acts["x"] = [x]
    for l in range(len(p["qkv_w"])):
        w = layer(p, l)
        r = norm(x, w["norm1_w"])
        before = r @ w["qkv_w"].T
        z = conv(before, w["conv_w"]) if "conv_w" in w else before
        beta = largest_beta(v) * sigmoid(r @ w["beta_w"].T)
        qkv = activate(z, v)
        o = delta(qkv, beta, v)[0]
        mid = x + norm(heads(o, v), w["norm_o_w"]).reshape(o.shape) @ w["proj_w"].T
        gu = norm(mid, w["norm2_w"]) @ w["gu_w"].T
        g, y = np.split(gu, 2, -1)
        x = mid + (silu(g) * y) @ w["down_w"].T
        for name, value in (("x", x), ("p", before), ("z", z), ("qkv", qkv), ("beta", beta),
                            ("o", o), ("mid", mid), ("gu", gu)):
            acts[name].append(value)
    acts = {name: np.stack(values) for name, values in acts.items()}
    acts["logits"] = norm(x, p["norm_w"]) @ p["head_w"].T
    return acts, cross_entropy(acts["logits"], targets)[0]


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    grads = {name: np.zeros_like(p[name]) for name in params_of(v)}
    _, dlogits = cross_entropy(acts["logits"], targets)
    last = acts["x"][-1]
    grads["head_w"] += sum_outer(dlogits, norm(last, p["norm_w"]))
    dx, grads["norm_w"][...] = norm_backward(dlogits @ p["head_w"], last, p["norm_w"])
    for l in reversed(range(len(p["qkv_w"]))):
        w = layer(p, l)
        x, mid, o, z, beta = (acts[name][l] for name in ("x", "mid", "o", "z", "beta"))
        g, y = np.split(acts["gu"][l], 2, -1)
        grads["down_w"][l] += sum_outer(dx, silu(g) * y)
        dh = dx @ w["down_w"]
        dgu = np.concatenate([dh * y * silu_derivative(g), dh * silu(g)], -1)
        grads["gu_w"][l] += sum_outer(dgu, norm(mid, w["norm2_w"]))
        d, grads["norm2_w"][l] = norm_backward(dgu @ w["gu_w"], mid, w["norm2_w"])
        dx = dx + d
        grads["proj_w"][l] += sum_outer(dx, norm(heads(o, v), w["norm_o_w"]).reshape(o.shape))
        do, grads["norm_o_w"][l] = norm_backward(heads(dx @ w["proj_w"], v), heads(o, v),
                                                 w["norm_o_w"])
        dqkv, dbeta = delta_backward(do.reshape(o.shape), acts["qkv"][l], beta, v)
        dz = activate_backward(dqkv, z, v)
        if "conv_w" in w:
            dz, grads["conv_w"][l] = conv_backward(dz, acts["p"][l], w["conv_w"])
        db = dbeta * beta * (1 - beta / largest_beta(v))
        r = norm(x, w["norm1_w"])
        grads["qkv_w"][l] += sum_outer(dz, r)
        grads["beta_w"][l] += sum_outer(db, r)
        d, grads["norm1_w"][l] = norm_backward(dz @ w["qkv_w"] + db @ w["beta_w"], x, w["norm1_w"])
        dx = dx + d
    np.add.at(grads["wte"], inputs, dx)
    return grads


# -----------------------------------------------------------------------------
# dumps and goldens

def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    dump_check(path, metadata, CHOICES)
    if not metadata.get("heads", "").isdigit():
        raise Trouble(f"{path}: metadata heads is {metadata.get('heads')!r}; expected a number")
    v = Variant(*(metadata[field] for field in CHOICES), int(metadata["heads"]))
    p, inputs, targets = dump_problem(path, tensors, params_of(v))
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {v.eigenvalues}, {v.heads} heads, convolution {v.conv}, SiLU {v.qk_silu}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in params_of(v)}, forward_bound, grad_bound, out)


def small_problem(v, B=2, T=5, C=6, H=7, L=2, V=7, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    shapes = {"wte": (V, C), "norm1_w": (L, C), "qkv_w": (L, 3 * C, C), "beta_w": (L, v.heads, C),
              "conv_w": (L, 3 * C, 4), "norm_o_w": (L, C // v.heads), "proj_w": (L, C, C),
              "norm2_w": (L, C), "gu_w": (L, 2 * H, C), "down_w": (L, C, H), "norm_w": (C,),
              "head_w": (V, C)}
    p = {name: rng.standard_normal(shapes[name]) * (1.0 if name == "wte" else 0.6)
         for name in params_of(v)}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def solve(p, inputs, targets, v):
    return dump_made(forward, backward, params_of(v), ACTS, p, inputs, targets, v)


def every_variant(n):
    return [Variant(eigenvalues, conv, qk_silu, n) for eigenvalues in CHOICES["eigenvalues"]
            for conv, qk_silu in (("yes", "no"), ("no", "no"), ("no", "yes"))]


def metadata_of(v):
    return {"eigenvalues": v.eigenvalues, "conv": v.conv, "qk-silu": v.qk_silu,
            "heads": str(v.heads)}


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    total = 0
    for v in every_variant(2):
        kind = "conv" if v.conv == "yes" else "silu" if v.qk_silu == "yes" else "plain"
        path = os.path.join(directory, f"{v.eigenvalues}-{kind}.safetensors")
        total += golden_write(path, solve(*small_problem(v, C=4), v),
                              {**metadata_of(v), "script": "dev/ref/deltanet.py",
                               "numpy": np.__version__})
    print(f"{total} bytes")


# -----------------------------------------------------------------------------

def self_test():
    test = SelfTest()
    see = test.see
    for v in every_variant(1) + every_variant(3):
        try:
            solve(*small_problem(v, T=4, C=6, L=1, V=5, seed=2), v)
            see(f"{v}: gradients equal the complex step", True)
        except Trouble as e:
            see(str(e), False)
    v = Variant("signed", "yes", "no", 1)
    e0, e1, zero = np.eye(4)[0], np.eye(4)[1], np.zeros(4)
    row = [np.concatenate(x) for x in ((zero, e0, e1), (e0, e0, zero), (e0, e0, zero))]
    o = delta(np.array([row]), np.array([[[1.0], [2.0], [2.0]]]), v)[0]
    see("a value is written, reflected, and reflected back",
        np.allclose(o[0], np.array([zero, -e1, e1]) / 2, atol=1e-15))
    x = np.random.default_rng(3).standard_normal((1, 3, 2))
    see("three positions of a convolution", np.allclose(
        conv(x, np.array([[1.0, 10, 100, 1000]] * 2))[0, 2], x[0].T @ [10.0, 100, 1000]))
    v = Variant("signed", "yes", "no", 2)
    good, meta = solve(*small_problem(v), v), metadata_of(v)
    test.dumps(check_dump, good, meta, "conv_w", "beta_w", "o", "norm_o_w")
    return test.end()


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
