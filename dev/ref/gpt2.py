#!/usr/bin/env python3
"""GPT-2, the Transformer and the linear Transformer in numpy, float64, the plain way: a reference
for train_gpt2.c and .cu.

Attention is a table of weights w (T,T) for each head, softmax or linear, and nothing is streamed:

    softmax   w = softmax(q k^T / sqrt(HS)) over the positions seen
    linear    w = phi(q) phi(k)^T over the positions seen, divided by its row sum + 1e-6
    x += (w v) W_proj^T + b;   x += gelu(norm(x) W_fc^T + b) W_out^T + b

    gpt2.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line per
                           tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    gpt2.py --golden DIR   write small goldens: DIR/MODEL-CAUSAL[-images].safetensors
    gpt2.py --self-test    the gradients against the complex step, the linear table against the
                           recurrence, and that NaN and wrong numbers are found

The number of heads is in a dump's metadata. The gradients are written by hand from the equations;
the self test and --golden hold every entry against the complex step Im f(x + ih)/h. What this model
has in common with CausalRN (files, options, normalize, cross-entropy, comparing) is causalrn.py's.
"""
import math
import os
import sys
from collections import namedtuple

import numpy as np

from causalrn import (SelfTest, Trouble, command_line, compare, cross_entropy, density,
                      distribution, dump_check, dump_judge, dump_made, dump_names, dump_problem,
                      golden_write, image_problem, names_of, normalize, normalize_backward, read,
                      read_backward, sum_outer)

Variant = namedtuple("Variant", "model causal heads")
MODELS, CAUSAL = ("gpt2", "transformer", "linear-transformer"), ("yes", "no")
COMMON = ("wte", "wpe", "qkv_w", "proj_w", "fc_w", "fc_b", "out_w", "out_b")
GPT2 = ("ln1_w", "ln1_b", "qkv_b", "proj_b", "ln2_w", "ln2_b", "lnf_w", "lnf_b")
ACTS = ("x", "qkv", "o", "mid", "logits")


def params_of(v, images=False):
    """Names of a model's parameters, but that one of images has others for wte: names_of."""
    return COMMON + (GPT2 if v.model == "gpt2" else ()) + (
        ("head_w",) if v.model != "gpt2" or images else ())


# -----------------------------------------------------------------------------
# the pieces. Every forward function also takes complex numbers: see complex_step

def norm(x, weight, bias):
    """LayerNorm, or without a weight normalize. Returns out, z and 1/deviation."""
    if weight is None:
        z, r = normalize(x)
        return z, z, r
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return centred * r * weight + bias, centred * r, r


def gelu(x, v):
    if v.model == "gpt2":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    return x * distribution(x)


def gelu_derivative(x, v):
    if v.model != "gpt2":
        return distribution(x) + x * density(x)
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (x + 0.044715 * x ** 3))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def phi(x):
    """elu(x) + 1"""
    positive = x.real > 0
    return np.where(positive, x + 1, np.exp(np.where(positive, 0, x)))


def phi_derivative(x):
    return np.exp(np.minimum(x, 0))


def seen(T, v):
    return np.tril(np.ones((T, T))) if v.causal == "yes" else np.ones((T, T))


def heads(x, v):
    """(B,T,C) as (B,NH,T,HS)"""
    B, T, C = x.shape
    return x.reshape(B, T, v.heads, C // v.heads).transpose(0, 2, 1, 3)


def joined(x):
    """(B,NH,T,HS) as (B,T,C)"""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def table(q, k, v):
    """w (B,NH,T,T), and for the linear one the row sums it was divided by."""
    T, HS = q.shape[-2:]
    if v.model == "linear-transformer":
        e = phi(q) @ phi(k).swapaxes(-1, -2) * seen(T, v)
        total = e.sum(-1, keepdims=True) + 1e-6
        return e / total, total
    s = q @ k.swapaxes(-1, -2) / math.sqrt(HS)
    top = np.where(seen(T, v) > 0, s.real, -np.inf).max(-1, keepdims=True)
    e = np.exp(np.where(seen(T, v) > 0, s - top, 0)) * seen(T, v)
    return e / e.sum(-1, keepdims=True), None


def attention(qkv, v):
    q, k, value = (heads(x, v) for x in np.split(qkv, 3, -1))
    return joined(table(q, k, v)[0] @ value)


def attention_backward(do, qkv, v):
    q, k, value = (heads(x, v) for x in np.split(qkv, 3, -1))
    do, (w, total) = heads(do, v), table(q, k, v)
    dw = do @ value.swapaxes(-1, -2)
    centred = dw - (w * dw).sum(-1, keepdims=True)
    if total is not None:
        de = centred / total * seen(q.shape[-2], v)
        dq = de @ phi(k) * phi_derivative(q)
        dk = de.swapaxes(-1, -2) @ phi(q) * phi_derivative(k)
    else:
        ds = w * centred / math.sqrt(q.shape[-1])
        dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    return np.concatenate([joined(x) for x in (dq, dk, w.swapaxes(-1, -2) @ do)], -1)


# -----------------------------------------------------------------------------
# the model

def layer(p, l):
    """Parameters of layer l by name; None for those that the model does not have."""
    names = [n for n in COMMON + GPT2 if n[:3] not in ("wte", "wpe", "lnf")]
    return {name: p[name][l] if name in p else None for name in names}


def plus(x, bias):
    return x if bias is None else x + bias


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x = read(p, inputs)
    acts = {name: [] for name in ("qkv", "o", "mid", "h")}
    acts["x"] = [x]
    for l in range(len(p["qkv_w"])):
        k = layer(p, l)
        qkv = plus(norm(x, k["ln1_w"], k["ln1_b"])[0] @ k["qkv_w"].T, k["qkv_b"])
        o = attention(qkv, v)
        mid = x + plus(o @ k["proj_w"].T, k["proj_b"])
        h = norm(mid, k["ln2_w"], k["ln2_b"])[0] @ k["fc_w"].T + k["fc_b"]
        x = mid + gelu(h, v) @ k["out_w"].T + k["out_b"]
        for name, value in (("x", x), ("qkv", qkv), ("o", o), ("mid", mid), ("h", h)):
            acts[name].append(value)
    acts = {name: np.stack(values) for name, values in acts.items()}
    y = norm(x, p.get("lnf_w"), p.get("lnf_b"))[0]
    acts["logits"] = y @ p["head_w" if "head_w" in p else "wte"].T
    return acts, cross_entropy(acts["logits"], targets)[0]


def norm_backward(g, name, l, dy, x, weight):
    """dx from dy; adds to g's gradients of the norm `name`, of layer l or of none."""
    if weight is None:
        return normalize_backward(dy, *normalize(x))
    _, z, r = norm(x, weight, 0)
    at = ... if l is None else l
    g[name + "_w"][at] += (dy * z).sum((0, 1))
    g[name + "_b"][at] += dy.sum((0, 1))
    return normalize_backward(dy * weight, z, r)


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    g = {name: np.zeros_like(x) for name, x in p.items()}
    _, dlogits = cross_entropy(acts["logits"], targets)
    head = "head_w" if "head_w" in p else "wte"
    last = acts["x"][-1]
    g[head] += sum_outer(dlogits, norm(last, p.get("lnf_w"), p.get("lnf_b"))[0])
    dx = norm_backward(g, "lnf", None, dlogits @ p[head], last, p.get("lnf_w"))
    for l in reversed(range(len(p["qkv_w"]))):
        k = layer(p, l)
        x, mid, h = acts["x"][l], acts["mid"][l], acts["h"][l]
        g["out_w"][l] += sum_outer(dx, gelu(h, v))
        g["out_b"][l] += dx.sum((0, 1))
        dh = dx @ k["out_w"] * gelu_derivative(h, v)
        g["fc_w"][l] += sum_outer(dh, norm(mid, k["ln2_w"], k["ln2_b"])[0])
        g["fc_b"][l] += dh.sum((0, 1))
        dx = dx + norm_backward(g, "ln2", l, dh @ k["fc_w"], mid, k["ln2_w"])
        g["proj_w"][l] += sum_outer(dx, acts["o"][l])
        dqkv = attention_backward(dx @ k["proj_w"], acts["qkv"][l], v)
        g["qkv_w"][l] += sum_outer(dqkv, norm(x, k["ln1_w"], k["ln1_b"])[0])
        if v.model == "gpt2":
            g["proj_b"][l] += dx.sum((0, 1))
            g["qkv_b"][l] += dqkv.sum((0, 1))
        dx = dx + norm_backward(g, "ln1", l, dqkv @ k["qkv_w"], x, k["ln1_w"])
    read_backward(g, dx, inputs)
    return g


# -----------------------------------------------------------------------------
# dumps and goldens

def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    dump_check(path, metadata, {"model": MODELS, "causal": CAUSAL})
    if not metadata.get("heads", "").isdigit():
        raise Trouble(f"{path}: metadata heads is {metadata.get('heads')!r}; expected a number")
    v = Variant(metadata["model"], metadata["causal"], int(metadata["heads"]))
    names = dump_names(tensors, params_of(v, "params.cls" in tensors))
    p, inputs, targets = dump_problem(path, tensors, names)
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {v.model}, {v.heads} heads, causal {v.causal}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in names}, forward_bound, grad_bound, out)


def small_problem(v, B=2, T=5, C=6, L=2, V=7, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    shapes = {"wte": (V, C), "wpe": (T, C), "qkv_w": (L, 3 * C, C), "proj_w": (L, C, C),
              "fc_w": (L, 4 * C, C), "fc_b": (L, 4 * C), "out_w": (L, C, 4 * C), "out_b": (L, C),
              "ln1_w": (L, C), "ln1_b": (L, C), "qkv_b": (L, 3 * C), "proj_b": (L, C),
              "ln2_w": (L, C), "ln2_b": (L, C), "lnf_w": (C,), "lnf_b": (C,), "head_w": (V, C)}
    p = {name: rng.standard_normal(shapes[name]) * (0.5 if name.endswith("_w") else 1.0)
         for name in params_of(v)}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def solve(p, inputs, targets, v):
    names = names_of(params_of(v, "cls" in p), p)
    return dump_made(forward, backward, names, ACTS, p, inputs, targets, v)


def every_variant(n):
    return [Variant(model, causal, n) for model in MODELS for causal in CAUSAL]


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    total = 0
    every = [(v, False) for v in every_variant(2)] + [(Variant("transformer", "no", 2), True)]
    for v, images in every:
        problem = image_problem(*small_problem(v, C=4, L=1)) if images else small_problem(v, C=4)
        name = f"{v.model}-{v.causal}{'-images' * images}.safetensors"
        metadata = {"model": v.model, "causal": v.causal, "heads": str(v.heads),
                    "script": "dev/ref/gpt2.py", "numpy": np.__version__}
        total += golden_write(os.path.join(directory, name),
                              solve(*problem, v), metadata)
    print(f"{total} bytes")


# -----------------------------------------------------------------------------

def recurrence(qkv, v):
    """Linear attention as the state S, z that grows by one position at a time."""
    q, k, value = (heads(x, v) for x in np.split(qkv, 3, -1))
    B, NH, T, HS = q.shape
    out, S, z = np.zeros(q.shape), np.zeros((B, NH, HS, HS)), np.zeros((B, NH, HS))
    for t in range(T):
        f = phi(k[:, :, t])
        S += f[..., None] * value[:, :, t, None, :]
        z += f
        f = phi(q[:, :, t])
        out[:, :, t] = (f[..., None] * S).sum(-2) / ((f * z).sum(-1, keepdims=True) + 1e-6)
    return joined(out)


def self_test():
    test = SelfTest()
    see = test.see
    for v in every_variant(1) + every_variant(3):
        try:
            solve(*small_problem(v, T=3, C=6, L=1, V=5, seed=2), v)
            see(f"{v}: gradients equal the complex step", True)
        except Trouble as e:
            see(str(e), False)
    qkv = np.random.default_rng(3).standard_normal((2, 9, 36))
    v = Variant("linear-transformer", "yes", 3)
    see("the linear table equals the recurrence",
        compare(recurrence(qkv, v), attention(qkv, v), 1e-13)[0] == "ok")
    for v in every_variant(3):
        one = attention(qkv[:, :1], v)
        see(f"{v}: one position gives its value",
            np.allclose(one, qkv[:, :1, 24:], atol=0 if v.model != "linear-transformer" else 1e-4))
    v = Variant("gpt2", "yes", 2)
    good, meta = solve(*small_problem(v), v), {"model": "gpt2", "causal": "yes", "heads": "2"}
    test.dumps(check_dump, good, meta, "wpe", "out_w", "o", "ln1_w")
    good, meta = solve(*image_problem(*small_problem(v)), v), {**meta, "causal": v.causal}
    test.dumps(check_dump, good, meta, "cls", "patch_w", "o", "ln1_w")
    return test.end()


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
