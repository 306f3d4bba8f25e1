#!/usr/bin/env python3
"""GateLoop in numpy, float64, as attention: a reference for train_gateloop.c and .cu.

No state is carried: with L and P the running sums of ln r and theta of each channel c of a head,

    A_lm = sum_c q_lc k_mc D_lmc,  D_lmc = exp(L_lc - L_mc) cos(P_lc - P_mc) for m <= l, else 0
    y_l  = sum_m A_lm v_m

and the backward pass differentiates D. q, k, v, g = u W_qkvg^T + b, alpha, beta = u W_gate^T + b;
x += (silu(g) y) W_out^T, x += gelu(norm(x) W_fc^T + b) W_down^T + b, with norms before (pre) or
after (paper).

    gateloop.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line
                               per tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    gateloop.py --golden DIR   write small goldens: DIR/TRANSITION-WIRING.safetensors
    gateloop.py --maps DUMP    write DUMP.maps.safetensors: maps (L,NH,T,T), the A of every layer
                               and head of a dump's first sequence
    gateloop.py --self-test    the gradients against the complex step, attention against the
                               recurrence, and that NaN and wrong numbers are found

The gradients are written by hand from the equations; the self test and --golden hold every entry
against the complex step Im f(x + ih)/h. What this model has in common with CausalRN (files,
options, cross-entropy, comparing, complex step) is causalrn.py's.
"""
import math
import os
import sys
from collections import namedtuple

import numpy as np

from causalrn import (SelfTest, Trouble, command_line, cross_entropy, dump_check, dump_judge,
                      dump_made, dump_problem, golden_write, read_safetensors, sigmoid, silu,
                      silu_derivative, sum_outer, write_safetensors)

Variant = namedtuple("Variant", "transition wiring proj_bias head_bias head_size gn_groups")
CHOICES = {"transition": ("sep", "sep-relu", "cart", "real-pos", "real-signed", "stable-exp",
                          "fixed", "fixed-real", "ones"),
           "wiring": ("pre", "paper"), "proj-bias": ("no", "yes"), "head-bias": ("no", "yes")}
NUMBERS = ("head-size", "gn-groups")
NAMES = ("wte", "norm1_w", "norm1_b", "qkvg_w", "qkvg_b", "gate_w", "gate_b", "out_w", "norm2_w",
         "norm2_b", "fc_w", "fc_b", "down_w", "down_b", "norm_w", "norm_b", "head_w", "head_b")
GLOBAL = ("wte", "norm_w", "norm_b", "head_w", "head_b")
ACTS = ("x", "qkvg", "a", "y", "z", "mid", "logits")


def params_of(v):
    absent = {name for name, there in (
        ("qkvg_b", v.proj_bias == "yes"), ("head_b", v.head_bias == "yes"),
        ("gate_w", not v.transition.startswith("fixed") and v.transition != "ones"),
        ("gate_b", v.transition != "ones"), ("norm_w", v.wiring == "pre"),
        ("norm_b", v.wiring == "pre")) if not there}
    return tuple(name for name in NAMES if name not in absent)


def parts(v):
    """logits of a transition"""
    return {"ones": 0, "real-pos": 1, "real-signed": 1, "fixed-real": 1}.get(v.transition, 2)


# -----------------------------------------------------------------------------
# the pieces. Every forward function also takes complex numbers: see complex_step

ROOT = math.sqrt(2 / math.pi)


def gelu(x):
    return x / 2 * (1 + np.tanh(ROOT * (x + 0.044715 * x ** 3)))


def gelu_derivative(x):
    t = np.tanh(ROOT * (x + 0.044715 * x ** 3))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * x * x)


def standard(x, eps):
    """(x - mean) / sqrt(var + eps) over the last axis, and 1 / that root"""
    d = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + eps)
    return d * r, r


def standard_backward(dz, x, eps):
    z, r = standard(x, eps)
    return r * (dz - dz.mean(-1, keepdims=True) - z * (dz * z).mean(-1, keepdims=True))


def norm(x, weight, bias):
    return standard(x, 1e-5)[0] * weight + bias


def norm_backward(dy, x, weight):
    """dx, dweight, dbias"""
    z = standard(x, 1e-5)[0]
    return standard_backward(dy * weight, x, 1e-5), (dy * z).sum((0, 1)), dy.sum((0, 1))


def grouped(x, v):
    """(B,T,C) as (B,T,G,C/G)"""
    return x.reshape(*x.shape[:2], v.gn_groups, -1)


def log_transition(logits, v, shape):
    """ln r and theta, each (B,T,C)"""
    C, zero = shape[-1], np.zeros(shape)
    if v.transition == "ones":
        return zero, zero
    a = logits[..., :C]
    b = logits[..., C:] if parts(v) == 2 else zero
    if v.transition == "cart":
        m = np.sqrt(a * a + b * b)
        angle = np.arctan2(b.real, a.real)
        if np.iscomplexobj(m):
            angle = angle + 1j * (a.real * b.imag - b.real * a.imag) / np.abs(m.real) ** 2
        return -np.log(1 + np.exp(-m)), angle
    if v.transition == "real-signed":
        sign = np.where(a.real < 0, -1, 1)
        return -np.log(1 + np.exp(-a * sign)), np.where(a.real < 0, math.pi, 0.0)
    if v.transition == "stable-exp":
        return -np.exp(a), b
    if v.transition.startswith("fixed"):
        a = a + np.log(2.0 ** (1 + 7 * (np.arange(C) + 0.5) / C) - 1)
    if v.transition == "sep-relu":
        b = np.where(b.real > 0, b, 0)
    return -np.log(1 + np.exp(-a)), b


def log_transition_backward(dlog, dangle, logits, v):
    """dlogits (B,T,parts C)"""
    C = dlog.shape[-1]
    a = logits[..., :C]
    if v.transition == "cart":
        b = logits[..., C:]
        m = np.sqrt(a * a + b * b)
        slope = sigmoid(-m) * dlog
        return np.concatenate([slope * a / m - dangle * b / m ** 2,
                               slope * b / m + dangle * a / m ** 2], -1)
    if v.transition == "stable-exp":
        da = -np.exp(a) * dlog
    elif v.transition == "real-signed":
        da = np.sign(a) * sigmoid(-np.abs(a)) * dlog
    else:
        base = np.log(2.0 ** (1 + 7 * (np.arange(C) + 0.5) / C) - 1)
        da = sigmoid(-a - (base if v.transition.startswith("fixed") else 0)) * dlog
    if parts(v) == 1:
        return da
    live = logits[..., C:] > 0 if v.transition == "sep-relu" else 1
    return np.concatenate([da, dangle * live], -1)


def pairs(log_r, angle):
    """exp(L_l - L_m), P_l - P_m (B,T,T,C), the first 0 for m > l"""
    L, P = np.cumsum(log_r, 1), np.cumsum(angle, 1)
    T = L.shape[1]
    causal = np.tril(np.ones((T, T)))[None, :, :, None]
    gap = (L[:, :, None] - L[:, None]) * causal  # mask before exp
    return np.exp(gap) * causal, (P[:, :, None] - P[:, None]) * causal


def heads(x, v):
    """(B,T,C) as (B,T,NH,HS)"""
    return x.reshape(*x.shape[:2], -1, v.head_size)


def attention(q, k, log_r, angle, v):
    """A (B,NH,T,T)"""
    decay, turn = pairs(log_r, angle)
    weights = q[:, :, None] * k[:, None] * decay * np.cos(turn)
    return weights.reshape(*weights.shape[:3], -1, v.head_size).sum(-1).transpose(0, 3, 1, 2)


def mix(qkvg, log_r, angle, v):
    q, k, value, _ = np.split(qkvg, 4, -1)
    A = attention(q, k, log_r, angle, v)
    return np.einsum("bhlm,bmhi->blhi", A, heads(value, v)).reshape(q.shape)


def mix_backward(dy, qkvg, log_r, angle, v):
    """dq, dk, dv, and the gradients of ln r and theta"""
    q, k, value, _ = np.split(qkvg, 4, -1)
    decay, turn = pairs(log_r, angle)
    A = attention(q, k, log_r, angle, v)
    dA = np.einsum("blhi,bmhi->blmh", heads(dy, v), heads(value, v))
    dv = np.einsum("bhlm,blhi->bmhi", A, heads(dy, v)).reshape(q.shape)
    dA = np.repeat(dA, v.head_size, -1)  # of each channel of a head
    dD = dA * q[:, :, None] * k[:, None] * decay
    dq = (dA * k[:, None] * decay * np.cos(turn)).sum(2)
    dk = (dA * q[:, :, None] * decay * np.cos(turn)).sum(1)
    later = []
    for d in (dD * np.cos(turn), -dD * np.sin(turn)):
        sums = d.sum(2) - d.sum(1)  # of L_l, of which ln r_t is part for t <= l
        later.append(np.cumsum(sums[:, ::-1], 1)[:, ::-1])
    return dq, dk, dv, *later


# -----------------------------------------------------------------------------
# the model

def layer(p, l):
    return {name: p[name][l] for name in p if name not in GLOBAL}


def linear(x, p, w, b):
    return x @ p[w].T + p.get(b, 0)


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x, paper = p["wte"][inputs], v.wiring == "paper"
    acts = {name: [] for name in ("u", "qkvg", "gate", "a", "y", "yn", "z", "sum", "mid", "in", "f",
                                  "end")}
    acts["x"] = [x]
    for l in range(len(p["qkvg_w"])):
        w = layer(p, l)
        u = x if paper else norm(x, w["norm1_w"], w["norm1_b"])
        qkvg = linear(u, w, "qkvg_w", "qkvg_b")
        gate = (linear(u, w, "gate_w", "gate_b") if "gate_w" in w
                else np.zeros((*x.shape[:2], parts(v) * x.shape[2])) + w.get("gate_b", 0))
        log_r, angle = log_transition(gate, v, x.shape)
        a = np.concatenate([np.exp(log_r) * np.cos(angle), np.exp(log_r) * np.sin(angle)], -1)
        y = mix(qkvg, log_r, angle, v)
        yn = standard(grouped(y, v), 1e-8)[0].reshape(y.shape) if v.gn_groups else y
        z = silu(np.split(qkvg, 4, -1)[3]) * yn
        total = x + z @ w["out_w"].T
        mid = norm(total, w["norm1_w"], w["norm1_b"]) if paper else total
        inner = mid if paper else norm(mid, w["norm2_w"], w["norm2_b"])
        f = linear(inner, w, "fc_w", "fc_b")
        end = mid + linear(gelu(f), w, "down_w", "down_b")
        x = norm(end, w["norm2_w"], w["norm2_b"]) if paper else end
        for name, value in (("x", x), ("u", u), ("qkvg", qkvg), ("gate", gate), ("a", a), ("y", y),
                            ("yn", yn), ("z", z), ("sum", total), ("mid", mid), ("in", inner),
                            ("f", f), ("end", end)):
            acts[name].append(value)
    acts = {name: np.stack(values) for name, values in acts.items()}
    last = x if paper else norm(x, p["norm_w"], p["norm_b"])
    acts["logits"] = linear(last, p, "head_w", "head_b")
    return acts, cross_entropy(acts["logits"], targets)[0]


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    paper, grads = v.wiring == "paper", {name: np.zeros_like(p[name]) for name in params_of(v)}
    _, dlogits = cross_entropy(acts["logits"], targets)
    x = acts["x"][-1]
    last = x if paper else norm(x, p["norm_w"], p["norm_b"])

    def put(name, value, l=None):
        if name in grads:
            grads[name][... if l is None else l] = value

    def linear_backward(dy, x, w, b, l):
        put(w, sum_outer(dy, x), l)
        put(b, dy.sum((0, 1)), l)
        return dy @ (p[w] if l is None else p[w][l]) if w in p else 0

    def unnorm(dy, x, name, l=None):
        weight = p[name + "_w"] if l is None else p[name + "_w"][l]
        dx, dw, db = norm_backward(dy, x, weight)
        put(name + "_w", dw, l)
        put(name + "_b", db, l)
        return dx

    dx = linear_backward(dlogits, last, "head_w", "head_b", None)
    dx = dx if paper else unnorm(dx, x, "norm")
    for l in reversed(range(len(p["qkvg_w"]))):
        k = {name: acts[name][l] for name in acts if name != "logits"}
        if paper:
            dx = unnorm(dx, k["end"], "norm2", l)
        df = linear_backward(dx, gelu(k["f"]), "down_w", "down_b", l) * gelu_derivative(k["f"])
        d = linear_backward(df, k["in"], "fc_w", "fc_b", l)
        dx = unnorm(dx + d, k["sum"], "norm1", l) if paper else dx + unnorm(d, k["mid"], "norm2", l)
        dz = linear_backward(dx, k["z"], "out_w", None, l)
        g = np.split(k["qkvg"], 4, -1)[3]
        dg, dy = dz * k["yn"] * silu_derivative(g), dz * silu(g)
        if v.gn_groups:
            dy = standard_backward(grouped(dy, v), grouped(k["y"], v), 1e-8).reshape(dy.shape)
        log_r, angle = log_transition(k["gate"], v, dy.shape)
        dq, dk, dv, dlog, dangle = mix_backward(dy, k["qkvg"], log_r, angle, v)
        du = linear_backward(np.concatenate([dq, dk, dv, dg], -1), k["u"], "qkvg_w", "qkvg_b", l)
        if v.transition != "ones":
            dgate = log_transition_backward(dlog, dangle, k["gate"], v)
            put("gate_b", dgate.sum((0, 1)), l)
            if "gate_w" in p:
                put("gate_w", sum_outer(dgate, k["u"]), l)
                du = du + dgate @ p["gate_w"][l]
        dx = dx + (du if paper else unnorm(du, k["x"], "norm1", l))
    np.add.at(grads["wte"], inputs, dx)
    return grads


# -----------------------------------------------------------------------------
# dumps and goldens

def variant_of(path, metadata):
    dump_check(path, metadata, CHOICES)
    for field in NUMBERS:
        if not metadata.get(field, "").isdigit():
            raise Trouble(f"{path}: metadata {field} is {metadata.get(field)!r}; expected a number")
    return Variant(*(metadata[field] for field in CHOICES), *(int(metadata[f]) for f in NUMBERS))


def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    v = variant_of(path, metadata)
    p, inputs, targets = dump_problem(path, tensors, params_of(v))
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {v}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in params_of(v)}, forward_bound, grad_bound, out)


def maps_of(tensors, v):
    """(L,NH,T,T): the surrogate attention of a dump's first sequence, from its qkvg and a."""
    maps = []
    for qkvg, a in zip(tensors["acts.qkvg"], tensors["acts.a"]):
        q, k, _, _ = np.split(qkvg[:1].astype(np.float64), 4, -1)
        re, im = np.split(a[:1].astype(np.float64), 2, -1)
        with np.errstate(divide="ignore"):
            log_r = np.maximum(np.log(np.hypot(re, im)), -1e4)  # ln 0 would make inf - inf
        maps.append(attention(q, k, log_r, np.arctan2(im, re), v)[0])
    return np.stack(maps)


def write_maps(path):
    tensors, metadata = read_safetensors(path)
    v = variant_of(path, metadata)
    for name in ("acts.qkvg", "acts.a"):
        if name not in tensors:
            raise Trouble(f"{path}: no tensor {name}")
    maps = maps_of(tensors, v)
    write_safetensors(path + ".maps.safetensors", {"maps": maps}, metadata)
    print(f"{path}.maps.safetensors: maps {maps.shape}")


def small_problem(v, B=2, T=4, C=4, H=2, L=1, V=4, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    gates = parts(v) * C
    shapes = {"wte": (V, C), "norm1_w": (L, C), "norm1_b": (L, C), "qkvg_w": (L, 4 * C, C),
              "qkvg_b": (L, 4 * C), "gate_w": (L, gates, C), "gate_b": (L, gates),
              "out_w": (L, C, C), "norm2_w": (L, C), "norm2_b": (L, C), "fc_w": (L, H, C),
              "fc_b": (L, H), "down_w": (L, C, H), "down_b": (L, C), "norm_w": (C,),
              "norm_b": (C,), "head_w": (V, C), "head_b": (V,)}
    p = {name: rng.standard_normal(shapes[name]) * (1.0 if name == "wte" else 0.6)
         for name in params_of(v)}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def solve(p, inputs, targets, v):
    return dump_made(forward, backward, params_of(v), ACTS, p, inputs, targets, v)


def metadata_of(v):
    return {"transition": v.transition, "wiring": v.wiring, "proj-bias": v.proj_bias,
            "head-bias": v.head_bias, "head-size": str(v.head_size), "gn-groups": str(v.gn_groups)}


def every_variant():
    """Each transition in both wirings; heads, groups and biases go with them."""
    return [Variant(t, wiring, "no" if i % 2 else "yes", "yes" if wiring == "pre" else "no",
                    (1, 2, 4)[(i + j) % 3], 1 if (i + j) % 2 else 0)
            for j, wiring in enumerate(CHOICES["wiring"])
            for i, t in enumerate(CHOICES["transition"])]


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    every, total = every_variant(), 0
    n = len(CHOICES["transition"])
    for v in [every[i + (n if i % 2 else 0)] for i in range(n)] + [every[n]]:
        path = os.path.join(directory, f"{v.transition}-{v.wiring}.safetensors")
        total += golden_write(path, solve(*small_problem(v, L=2 if v == every[n] else 1), v),
                              {**metadata_of(v), "script": "dev/ref/gateloop.py",
                               "numpy": np.__version__})
    print(f"{total} bytes")


# -----------------------------------------------------------------------------

def recurrence(qkvg, log_r, angle, v):
    """y by the state: S_t = diag(a_t) S_{t-1} + k_t v_t^T, y_t = Re(S_t)^T q_t"""
    q, k, value, _ = (heads(x, v) for x in np.split(qkvg, 4, -1))
    a = heads(np.exp(log_r + 1j * angle), v)
    S, y = 0, []
    for t in range(q.shape[1]):
        S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * value[:, t, :, None, :]
        y.append((q[:, t, :, :, None] * S.real).sum(2))
    return np.stack(y, 1).reshape(qkvg.shape[0], q.shape[1], -1)


def self_test():
    test = SelfTest()
    see = test.see
    rng = np.random.default_rng(3)
    for v in every_variant():
        try:
            solve(*small_problem(v, T=5, L=2, seed=2), v)
            see(f"{v}: gradients equal the complex step", True)
        except Trouble as e:
            see(str(e), False)
        qkvg, gate = rng.standard_normal((2, 40, 32)), rng.standard_normal((2, 40, 8 * parts(v)))
        log_r, angle = log_transition(gate, v, (2, 40, 8))
        see(f"{v}: attention equals the recurrence", np.allclose(
            mix(qkvg, log_r, angle, v), recurrence(qkvg, log_r, angle, v), rtol=0, atol=1e-12))
    v = every_variant()[9]
    good, meta = solve(*small_problem(v), v), metadata_of(v)
    value = heads(np.split(good["acts.qkvg"][0, :1], 4, -1)[2], v)[0]
    see("the maps of a dump give its outputs", np.allclose(
        np.einsum("hlm,mhi->lhi", maps_of(good, v)[0], value).ravel(),
        good["acts.y"][0, 0].ravel(), rtol=0, atol=1e-12))
    test.dumps(check_dump, good, meta, "gate_w", "gate_b", "y", "norm2_b")
    return test.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--maps"] and len(sys.argv) == 3:
        try:
            sys.exit(write_maps(sys.argv[2]))
        except Trouble as e:
            print(f"error: {e}", file=sys.stderr)
            sys.exit(3)
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
