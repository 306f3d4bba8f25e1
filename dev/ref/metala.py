#!/usr/bin/env python3
"""MetaLA and GLA in numpy, float64, the plain way: a reference for train_metala.c and .cu.

A head's memory is a matrix S, keys by values, and nothing is simplified:

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(DK)
    alpha_t = sigmoid(z_t)^(1/tau),  k_t = 1 - alpha_t, or its own (free)
    y_t = o_t + sigmoid((q_t w k_t) v_t);  x += W_out (silu(p) norm_head(y));  x += swiglu(norm(x))

The backward pass differentiates through alpha itself, not through its logarithm, keeps every S_t
and takes what a step hands to the one before it.

    metala.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line
                             per tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    metala.py --golden DIR   write small goldens, one a variant: DIR/KEY-CONV-AUGMENT.safetensors
    metala.py --self-test    the gradients against the complex step, two identities of the memory,
                             and that NaN and wrong numbers are found

Key, heads, convolution, augmentation, scale and tau are in a dump's metadata. The gradients are
written by hand from the equations; the self test and --golden hold every entry against the complex
step Im f(x + ih)/h. What this model has in common with CausalRN (files, options, cross-entropy,
comparing, complex step) is causalrn.py's.
"""
import math
import os
import sys
from collections import namedtuple

import numpy as np

from causalrn import (SelfTest, Trouble, command_line, cross_entropy, dump_check, dump_judge,
                      dump_made, dump_problem, golden_write, sigmoid, silu, silu_derivative,
                      sum_outer)

Variant = namedtuple("Variant", "key conv augment scale heads tau")
CHOICES = {"key": ("tied", "free"), "conv": ("0", "2", "4"), "augment": ("no", "yes"),
           "scale": ("no", "yes")}
NAMES = ("wte", "conv_w", "qv_w", "a_w", "low_w", "up_w", "up_b", "aug_w", "gate_w", "gate_b",
         "out_w", "gu_w", "down_w", "head_w")
ACTS = ("x", "qv", "z", "g", "k", "o", "mid", "logits")


def params_of(v):
    absent = {"conv_w"} if v.conv == "0" else set()
    absent |= {"low_w", "up_w", "up_b"} if v.key == "tied" else set()
    absent |= {"aug_w"} if v.augment == "no" else set()
    return tuple(name for name in NAMES if name not in absent)


# -----------------------------------------------------------------------------
# the pieces. Every forward function also takes complex numbers: see complex_step

def norm(x, eps=1e-8):
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps)


def norm_backward(dy, x, eps=1e-8):
    c = x - x.mean(-1, keepdims=True)
    var = (c * c).mean(-1, keepdims=True) + eps
    dc = dy / np.sqrt(var) - c * (c * dy).mean(-1, keepdims=True) / var ** 1.5
    return dc - dc.mean(-1, keepdims=True)


def convolved(x, weight):
    """sum_w weight[c,w] x_{t-W+1+w}[c]"""
    W, T = weight.shape[1], x.shape[1]
    front = np.concatenate([np.zeros_like(x[:, :1])] * (W - 1) + [x], 1)
    return sum(front[:, w:w + T] * weight[:, w] for w in range(W))


def convolved_backward(du, x, weight):
    W, T = weight.shape[1], x.shape[1]
    front = np.concatenate([np.zeros_like(x[:, :1])] * (W - 1) + [x], 1)
    dfront = np.zeros_like(front)
    for w in range(W):
        dfront[:, w:w + T] += du * weight[:, w]
    dweight = np.stack([(du * front[:, w:w + T]).sum((0, 1)) for w in range(W)], -1)
    return dfront[:, W - 1:], dweight


def heads(x, n):
    """(B,T,C) as (B,T,NH,C/NH)"""
    return x.reshape(*x.shape[:2], n, -1)


def flat(x):
    return x.reshape(*x.shape[:2], -1)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


def read_scale(v, DK):
    return 1 / math.sqrt(DK) if v.scale == "yes" else 1.0


def memory(q, alpha, k, value, v):
    """o (B,T,NH,DV) and every S: S[t] (B,NH,DK,DV) before step t."""
    S, o = [np.zeros(outer(k[:, 0], value[:, 0]).shape, dtype=q.dtype)], []
    for t in range(q.shape[1]):
        S.append(alpha[:, t, :, :, None] * S[t] + outer(k[:, t], value[:, t]))
        o.append((S[-1] * q[:, t, :, :, None]).sum(-2) * read_scale(v, q.shape[-1]))
    return np.stack(o, 1), S


def memory_backward(do, q, alpha, k, value, S, v):
    """dq, dalpha, dk, dvalue"""
    dq, dalpha, dk, dvalue = (np.zeros_like(x) for x in (q, alpha, k, value))
    do, G = do * read_scale(v, q.shape[-1]), np.zeros_like(S[0])
    for t in reversed(range(q.shape[1])):
        G = G + outer(q[:, t], do[:, t])
        dq[:, t] = (S[t + 1] * do[:, t, :, None, :]).sum(-1)
        dk[:, t] = (G * value[:, t, :, None, :]).sum(-1)
        dvalue[:, t] = (G * k[:, t, :, :, None]).sum(-2)
        dalpha[:, t] = (G * S[t]).sum(-1)
        G = alpha[:, t, :, :, None] * G
    return dq, dalpha, dk, dvalue


# -----------------------------------------------------------------------------
# the mixer: one layer from r = norm(x) to what is added to x

def mixer(r, w, v):
    """Everything the layer computes, by name."""
    a = {"r": r}
    if "conv_w" in w:
        a["u"] = convolved(r, w["conv_w"])
    a["xc"] = silu(a["u"]) if "conv_w" in w else r
    C = r.shape[2]
    a["qv"] = a["xc"] @ w["qv_w"].T
    a["p"] = a["xc"] @ w["gate_w"].T + w["gate_b"]
    first = a["xc"] @ w["a_w"].T
    if v.key == "free":
        a["low"] = a["xc"] @ w["low_w"].T
        a["k"], a["z"] = first, a["low"] @ w["up_w"].T + w["up_b"]
    else:
        a["z"] = first
    a["alpha"] = sigmoid(a["z"]) ** (1 / v.tau)
    a["g"] = np.log(a["alpha"])
    if v.key == "tied":
        a["k"] = 1 - a["alpha"]
    K = a["qv"].shape[2] - C
    q, value = heads(a["qv"][..., :K], v.heads), heads(a["qv"][..., K:], v.heads)
    k = heads(a["k"], v.heads)
    o, a["S"] = memory(q, heads(a["alpha"], v.heads), k, value, v)
    a["o"], y = flat(o), o
    if "aug_w" in w:
        a["own"] = (q * w["aug_w"].reshape(v.heads, -1) * k).sum(-1, keepdims=True)
        y = o + sigmoid(a["own"] * value)
    a["y"] = y
    a["n"] = flat(norm(y, 1e-5))
    a["out"] = (silu(a["p"]) * a["n"]) @ w["out_w"].T
    return a


def mixer_backward(dout, a, w, v):
    """dr and the gradients of w: name -> array."""
    g, n = {}, v.heads
    C = a["r"].shape[2]
    K = a["qv"].shape[2] - C
    q, value, k = heads(a["qv"][..., :K], n), heads(a["qv"][..., K:], n), heads(a["k"], n)
    alpha = heads(a["alpha"], n)
    g["out_w"] = sum_outer(dout, silu(a["p"]) * a["n"])
    dc = dout @ w["out_w"]
    dp = dc * a["n"] * silu_derivative(a["p"])
    do = norm_backward(heads(dc * silu(a["p"]), n), a["y"], 1e-5)
    dq, dalpha, dk, dvalue = memory_backward(do, q, alpha, k, value, a["S"], v)
    if "aug_w" in w:
        aug = w["aug_w"].reshape(n, -1)
        r = sigmoid(a["own"] * value)
        slope = do * r * (1 - r)
        down = (slope * value).sum(-1, keepdims=True)
        dvalue += slope * a["own"]
        dq += down * aug * k
        dk += down * q * aug
        g["aug_w"] = (down * q * k).sum((0, 1)).reshape(-1)
    if v.key == "tied":
        dalpha = dalpha - dk
    p = sigmoid(a["z"])
    dz = flat(dalpha) * a["alpha"] / v.tau * (1 - p)
    dfirst = dz if v.key == "tied" else flat(dk)
    dqv = np.concatenate([flat(dq), flat(dvalue)], -1)
    g["qv_w"], g["a_w"] = sum_outer(dqv, a["xc"]), sum_outer(dfirst, a["xc"])
    g["gate_w"], g["gate_b"] = sum_outer(dp, a["xc"]), dp.sum((0, 1))
    dxc = dqv @ w["qv_w"] + dfirst @ w["a_w"] + dp @ w["gate_w"]
    if v.key == "free":
        g["up_w"], g["up_b"] = sum_outer(dz, a["low"]), dz.sum((0, 1))
        dlow = dz @ w["up_w"]
        g["low_w"] = sum_outer(dlow, a["xc"])
        dxc = dxc + dlow @ w["low_w"]
    if "conv_w" not in w:
        return dxc, g
    dr, g["conv_w"] = convolved_backward(dxc * silu_derivative(a["u"]), a["r"], w["conv_w"])
    return dr, g


# -----------------------------------------------------------------------------
# the model

def layer(p, l):
    return {name: p[name][l] for name in p if name not in ("wte", "head_w")}


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x = p["wte"][inputs]
    acts = {name: [] for name in ("qv", "z", "g", "k", "o", "mid", "mixers")}
    acts["x"] = [x]
    for l in range(len(p["qv_w"])):
        w = layer(p, l)
        a = mixer(norm(x), w, v)
        mid = x + a["out"]
        f, e = np.split(norm(mid) @ w["gu_w"].T, 2, -1)
        x = mid + (silu(f) * e) @ w["down_w"].T
        for name in ("qv", "z", "g", "k", "o"):
            acts[name].append(a[name])
        acts["x"].append(x), acts["mid"].append(mid), acts["mixers"].append(a)
    acts = {name: x if name == "mixers" else np.stack(x) for name, x in acts.items()}
    acts["logits"] = norm(acts["x"][-1]) @ p["head_w"].T
    return acts, cross_entropy(acts["logits"], targets)[0]


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    grads = {name: np.zeros_like(p[name]) for name in params_of(v)}
    _, dlogits = cross_entropy(acts["logits"], targets)
    last = acts["x"][-1]
    grads["head_w"] += sum_outer(dlogits, norm(last))
    dx = norm_backward(dlogits @ p["head_w"], last)
    for l in reversed(range(len(p["qv_w"]))):
        w, mid = layer(p, l), acts["mid"][l]
        f, e = np.split(norm(mid) @ w["gu_w"].T, 2, -1)
        grads["down_w"][l] += sum_outer(dx, silu(f) * e)
        dh = dx @ w["down_w"]
        dgu = np.concatenate([dh * e * silu_derivative(f), dh * silu(f)], -1)
        grads["gu_w"][l] += sum_outer(dgu, norm(mid))
        dx = dx + norm_backward(dgu @ w["gu_w"], mid)
        dr, g = mixer_backward(dx, acts["mixers"][l], w, v)
        for name, value in g.items():
            grads[name][l] += value
        dx = dx + norm_backward(dr, acts["x"][l])
    np.add.at(grads["wte"], inputs, dx)
    return grads


# -----------------------------------------------------------------------------
# dumps and goldens

def number(path, metadata, name):
    try:
        return float(metadata.get(name, ""))
    except ValueError:
        raise Trouble(f"{path}: metadata {name} is {metadata.get(name)!r}; expected a number")


def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    dump_check(path, metadata, CHOICES)
    v = Variant(*(metadata[field] for field in CHOICES), int(number(path, metadata, "heads")),
                number(path, metadata, "tau"))
    p, inputs, targets = dump_problem(path, tensors, params_of(v))
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {v}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in params_of(v)}, forward_bound, grad_bound, out)


def small_problem(v, B=2, T=5, C=6, K=None, H=7, L=2, V=7, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    K = K or C // 2 // v.heads * v.heads or v.heads
    shapes = {"wte": (V, C), "conv_w": (L, C, int(v.conv)), "qv_w": (L, K + C, C),
              "a_w": (L, K, C), "low_w": (L, 16, C), "up_w": (L, K, 16), "up_b": (L, K),
              "aug_w": (L, K), "gate_w": (L, C, C), "gate_b": (L, C), "out_w": (L, C, C),
              "gu_w": (L, 2 * H, C), "down_w": (L, C, H), "head_w": (V, C)}
    p = {name: rng.standard_normal(shapes[name]) * (1.0 if name == "wte" else 0.6)
         for name in params_of(v)}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def solve(p, inputs, targets, v):
    return dump_made(forward, backward, params_of(v), ACTS, p, inputs, targets, v)


def metadata_of(v):
    return {"key": v.key, "conv": v.conv, "augment": v.augment, "scale": v.scale,
            "heads": str(v.heads), "tau": repr(v.tau)}


VARIANTS = [("tied", "4", "yes", "yes"), ("tied", "2", "no", "yes"), ("tied", "0", "yes", "no"),
            ("free", "4", "no", "no"), ("free", "2", "yes", "yes"), ("free", "0", "no", "yes")]


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    total = 0
    for i, choices in enumerate(VARIANTS):  # two heads of three values, or two layers
        n = 2 - i % 2
        v = Variant(*choices, n, 16.0 if i < 3 else 2.0)
        problem = small_problem(v, C=2 + 2 * n, K=2 * n, H=5, T=4, L=3 - n)
        path = os.path.join(directory, f"{v.key}-{v.conv}-{v.augment}.safetensors")
        total += golden_write(path, solve(*problem, v),
                              {**metadata_of(v), "key-channels": str(2 * n),
                               "script": "dev/ref/metala.py", "numpy": np.__version__})
    print(f"{total} bytes")


# -----------------------------------------------------------------------------

def self_test():
    test = SelfTest()
    see = test.see
    for choices in VARIANTS:
        for n, tau in ((1, 16.0), (3, 2.0)):
            v = Variant(*choices, n, tau)
            try:
                solve(*small_problem(v, T=4, C=6, L=1, V=5, seed=2), v)
                see(f"{v}: gradients equal the complex step", True)
            except Trouble as e:
                see(str(e), False)
    v = Variant("tied", "0", "no", "no", 1, 16.0)
    rows = np.array([[[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]])
    o = memory(rows, np.ones((1, 3, 1, 2)), rows, np.array([[[[5.0]], [[7.0]], [[1.0]]]]), v)[0]
    see("a memory that keeps all adds up", np.allclose(o[0, :, 0, 0], [5, 7, 14]))
    o = memory(rows, np.array([[[[1.0, 1]], [[1.0, 1]], [[0.0, 1]]]]), rows,
               np.array([[[[5.0]], [[7.0]], [[1.0]]]]), v)[0]
    see("a gate of 0 replaces a row", np.allclose(o[0, 2, 0, 0], 1 + 8))
    x = np.random.default_rng(3).standard_normal((1, 3, 2))
    see("three positions of a convolution of two", np.allclose(
        convolved(x, np.array([[10.0, 100]] * 2))[0, 1:], 10 * x[0, :2] + 100 * x[0, 1:]))
    v = Variant("free", "4", "yes", "yes", 2, 16.0)
    good, meta = solve(*small_problem(v), v), metadata_of(v)
    test.dumps(check_dump, good, meta, "conv_w", "aug_w", "o", "a_w")
    return test.end()


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
