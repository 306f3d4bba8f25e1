#!/usr/bin/env python3
"""CausalRN and BiRN in numpy, float64, the plain way: a reference for train_causalrn.c and .cu.

"An All-MLP Sequence Modeling Architecture That Excels at Copying" (ICML 2024 NGSM workshop).
One block:

    r = normalize(x),  a = r W_right^T + b_right,  b = r W_left^T
    s_u = sum_{v<=u} psi(mu(a_u + b_v))        [eq. 4, 5]; all v when not causal [eq. 6]
    o = normalize(s), or without post norm s_u / (u+1), s_u / T when not causal
    x += o W_out^T + b_out

x is wte[token] + wpe, or of an image's patches W_patch patch + wpe and at the end cls + wpe.
The pair tensor (T,T,H) of each sequence is materialised, and the linear model is computed as what
it is equal to: all pairs. It shares nothing with the C code but this description.

    causalrn.py DUMP...        recompute a trainer's --dump: activations, loss and gradients; a line
                               per tensor, exit 1 beyond the bounds (--bf16: those for BF16)
    causalrn.py --golden DIR   write small goldens, one file per variant:
                               DIR/MODEL-PRENORM-POSTNORM-ACTIVATION-CAUSAL[-images].safetensors
    causalrn.py --self-test    the gradients against the complex step, the linear form against all
                               pairs, and that NaN and wrong numbers are found

The gradients are written by hand from the equations above; the self test and --golden hold every
entry against the complex step Im f(x + ih)/h, which needs the forward pass only, to all digits.
"""
import argparse
import json
import math
import os
import struct
import sys
from collections import namedtuple

import numpy as np

EPS = 1e-8
Variant = namedtuple("Variant", "model prenorm postnorm activation causal")
CHOICES = Variant(("quadratic", "linear"), ("exact", "approx", "none"), ("yes", "no"),
                  ("exp", "relu", "elu", "gelu"), ("yes", "no"))
PARAMS = ("wte", "wpe", "right_w", "right_b", "left_w", "out_w", "out_b", "head_w")
IMAGE = ("patch_w", "cls")  # of a model that reads images, which has no wte
ACTS = ("x", "a", "b", "o", "logits")

# -----------------------------------------------------------------------------
# safetensors: 8 bytes of header length, a JSON header, raw little-endian data

DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}


class Trouble(Exception):
    """What stops the program: one line."""


def read_safetensors(path):
    """(tensors: name -> array, metadata: name -> string) of a file."""
    try:
        with open(path, "rb") as f:
            data = f.read()
        (n,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + n].decode())
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, t in header.items():
            begin, end = t["data_offsets"]
            raw = data[8 + n + begin:8 + n + end]
            tensors[name] = np.frombuffer(raw, DTYPES[t["dtype"]]).reshape(t["shape"])
    except OSError as e:
        raise Trouble(f"{path}: cannot read it: {e.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise Trouble(f"{path}: not a safetensors file with {', '.join(DTYPES)} tensors: "
                      f"{type(e).__name__}: {e}")
    return tensors, metadata


def write_safetensors(path, tensors, metadata):
    header, at = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        dtype = "F64" if x.dtype == np.float64 else "I32"
        header[name] = {"dtype": dtype, "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            f.write(x.astype(DTYPES["F64" if x.dtype == np.float64 else "I32"]).tobytes())


# -----------------------------------------------------------------------------
# the pieces. Every forward function also takes complex numbers: see complex_step

def normalize(x):
    """Over the last axis; biased variance, eps inside the root. Returns z and 1/sqrt(var + eps)."""
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS)
    return centred * r, r


def normalize_backward(dz, z, r):
    return r * (dz - dz.mean(-1, keepdims=True) - z * (dz * z).mean(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def silu_derivative(x):
    p = sigmoid(x)
    return p + x * p * (1 - p)


def density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


real_erf = np.vectorize(math.erf, otypes=[np.float64])


def distribution(x):
    """The normal distribution function. An imaginary part is carried to first order, which is
    all that the complex step needs."""
    p = 0.5 + 0.5 * real_erf(x.real / math.sqrt(2))
    return p + 1j * x.imag * density(x.real) if np.iscomplexobj(x) else p


def psi(z, activation):
    if activation == "exp":
        return np.exp(z)
    if activation == "relu":
        return np.where(z.real > 0, z, 0)
    if activation == "elu":
        return np.where(z.real > 0, z, np.exp(np.where(z.real > 0, 0, z)) - 1)
    return z * distribution(z)  # gelu


def psi_derivative(z, activation):
    if activation == "exp":
        return np.exp(z)
    if activation == "relu":
        return np.where(z > 0, 1.0, 0.0)
    if activation == "elu":
        return np.exp(np.minimum(z, 0))
    return distribution(z) + z * density(z)  # gelu


def row_scale(s):
    """2^k with 2^(k-1) <= max |s| < 2^k for each row; 1 for a row of zeros. No gradient."""
    _, k = np.frexp(np.abs(s.real).max(-1, keepdims=True))
    return np.ldexp(1.0, k)


def pairs(a, b, v):
    """z (T,T,H): the argument of psi for every pair (u, v) of one sequence; its saved 1/sd."""
    if v.prenorm == "exact":
        return normalize(a[:, None, :] + b[None, :, :])
    if v.prenorm == "approx":
        (za, ra), (zb, rb) = normalize(a), normalize(b)
        return za[:, None, :] + zb[None, :, :], (za, ra, zb, rb)
    return a[:, None, :] + b[None, :, :], None


def weights(T, v):
    """(T,T): what each pair weighs in s_u."""
    seen = np.tril(np.ones((T, T))) if v.causal == "yes" else np.ones((T, T))
    return seen if v.postnorm == "yes" else seen / seen.sum(1, keepdims=True)


def mix(a, b, v):
    """o (T,H) of one sequence from its a, b (T,H)."""
    z, _ = pairs(a, b, v)
    s = np.einsum("uv,uvd->ud", weights(len(a), v), psi(z, v.activation))
    return normalize(s / row_scale(s))[0] if v.postnorm == "yes" else s


def mix_backward(do, a, b, v):
    """da, db (T,H) of one sequence from do (T,H)."""
    z, saved = pairs(a, b, v)
    w, ds = weights(len(a), v), do
    if v.postnorm == "yes":
        s = np.einsum("uv,uvd->ud", w, psi(z, v.activation))
        scale = row_scale(s)
        ds = normalize_backward(do, *normalize(s / scale)) / scale
    dz = w[:, :, None] * ds[:, None, :] * psi_derivative(z, v.activation)
    if v.prenorm == "exact":
        dz = normalize_backward(dz, z, saved)
    da, db = dz.sum(1), dz.sum(0)
    if v.prenorm == "approx":
        za, ra, zb, rb = saved
        da, db = normalize_backward(da, za, ra), normalize_backward(db, zb, rb)
    return da, db


# -----------------------------------------------------------------------------
# the model

def names_of(names, p):
    """The parameters `names` of a model of tokens, or as one of images has them, as p does."""
    return tuple(n for n in names if n != "wte") + IMAGE if "cls" in p else tuple(names)


def read(p, inputs):
    """x (B,T,C) of tokens (B,T), or of patches (B,T,D), of which the last stands for <CLS>."""
    if "cls" not in p:
        return p["wte"][inputs] + p["wpe"][:inputs.shape[1]]
    patches = inputs[:, :-1] @ p["patch_w"].T
    cls = np.broadcast_to(p["cls"], (len(inputs), 1, len(p["cls"])))
    return np.concatenate([patches, cls], 1) + p["wpe"][:inputs.shape[1]]


def read_backward(g, dx, inputs):
    """Adds the gradients of what read() takes, from dx (B,T,C)."""
    g["wpe"][:inputs.shape[1]] += dx.sum(0)
    if "cls" not in g:
        np.add.at(g["wte"], inputs, dx)
        return
    g["patch_w"] += np.einsum("btc,btd->cd", dx[:, :-1], inputs[:, :-1])
    g["cls"] += dx[:, -1].sum(0)


def cross_entropy(logits, targets):
    """Mean over the targets >= 0, in nats, 0 if there is none; and its gradient by the logits."""
    kept = targets >= 0
    n = max(kept.sum(), 1)
    e = np.exp(logits - logits.real.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    hit = np.arange(logits.shape[-1]) == targets[..., None]
    loss = -np.log(p[hit]).sum() / n
    return loss, np.where(kept[..., None], p - hit, 0) / n


def forward(p, inputs, targets, v):
    """acts and loss from the parameters p: name -> array."""
    x = read(p, inputs)
    acts = {"x": [x], "a": [], "b": [], "o": []}
    for l in range(len(p["right_w"])):
        r, _ = normalize(x)
        a = r @ p["right_w"][l].T + p["right_b"][l]
        b = r @ p["left_w"][l].T
        o = np.stack([mix(a_t, b_t, v) for a_t, b_t in zip(a, b)])
        x = x + o @ p["out_w"][l].T + p["out_b"][l]
        for name, value in zip("xabo", (x, a, b, o)):
            acts[name].append(value)
    acts = {name: np.stack(values) for name, values in acts.items()}
    acts["logits"] = normalize(x)[0] @ p["head_w"].T
    return acts, cross_entropy(acts["logits"], targets)[0]


def sum_outer(dy, x):
    """Gradient (O,I) of a weight w in y = x w^T, summed over batch and time."""
    return np.einsum("bto,bti->oi", dy, x)


def backward(p, acts, inputs, targets, v):
    """Gradients of the loss: name -> array."""
    g = {name: np.zeros_like(p[name]) for name in names_of(PARAMS, p)}
    _, dlogits = cross_entropy(acts["logits"], targets)
    z, r = normalize(acts["x"][-1])
    g["head_w"] += sum_outer(dlogits, z)
    dx = normalize_backward(dlogits @ p["head_w"], z, r)
    for l in reversed(range(len(p["right_w"]))):
        g["out_w"][l] += sum_outer(dx, acts["o"][l])
        g["out_b"][l] += dx.sum((0, 1))
        do = dx @ p["out_w"][l]
        da, db = map(np.stack, zip(*[mix_backward(do_t, a_t, b_t, v) for do_t, a_t, b_t
                                     in zip(do, acts["a"][l], acts["b"][l])]))
        z, r = normalize(acts["x"][l])
        g["right_w"][l] += sum_outer(da, z)
        g["right_b"][l] += da.sum((0, 1))
        g["left_w"][l] += sum_outer(db, z)
        dx = dx + normalize_backward(da @ p["right_w"][l] + db @ p["left_w"][l], z, r)
    read_backward(g, dx, inputs)
    return g


def complex_step(forward, names, p, inputs, targets, v, h=1e-30):
    """Gradients of the loss from the forward pass alone: Im loss(p + ih e_i) / h, each i."""
    grads = {}
    for name in names:
        grads[name] = np.zeros_like(p[name])
        for i in np.ndindex(p[name].shape):
            moved = p[name].astype(np.complex128)
            moved[i] += 1j * h
            grads[name][i] = forward({**p, name: moved}, inputs, targets, v)[1].imag / h
    return grads


# -----------------------------------------------------------------------------
# comparing

def compare(got, want, bound, largest=0.0):
    """(verdict, relative L2 error, max error, its index): STYLE.md 39. A gradient whose norm is
    below 1e-6 of the largest one's is noise, measured against that. NaN and Inf never pass."""
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}", math.nan, math.nan, ()
    bad = ~(np.isfinite(got) & np.isfinite(want))
    error = np.where(bad, np.inf, np.abs(np.where(bad, 0, got - want)))
    worst = np.unravel_index(error.argmax(), error.shape)
    if bad.any():
        return "not finite", math.nan, math.nan, worst
    norm, off = np.linalg.norm(want.ravel()), np.linalg.norm(error.ravel())
    relative = off / norm if norm else (math.inf if off else 0.0)
    if norm < 1e-6 * largest:
        ok = off <= bound * largest
    else:
        ok = relative <= bound and error[worst] <= 10 * bound * np.abs(want).max()
    return "ok" if ok else "WRONG", relative, error[worst], worst


def dump_check(path, metadata, choices):
    """Refuse a dump whose metadata do not name one of the choices of each field."""
    for field, words in choices.items():
        if metadata.get(field) not in words:
            raise Trouble(f"{path}: metadata {field} is {metadata.get(field)!r}; "
                          f"expected {', '.join(words)}")


def dump_problem(path, tensors, names):
    """Parameters in float64 by name, inputs (tokens, or patches) and targets of a dump."""
    images = ("acts.patches",) if "cls" in names else ()
    for name in (*(f"params.{name}" for name in names), "inputs", "targets", *images):
        if name not in tensors:
            raise Trouble(f"{path}: no tensor {name}")
    p = {name: tensors[f"params.{name}"].astype(np.float64) for name in names}
    inputs, targets, V = tensors["inputs"], tensors["targets"], len(p.get("wte", p.get("head_w")))
    if inputs.min() < 0 or inputs.max() >= V or targets.min() < -1 or targets.max() >= V:
        raise Trouble(f"{path}: a token outside the vocabulary of {V}")
    return p, tensors["acts.patches"].astype(np.float64) if images else inputs, targets


def dump_names(tensors, names):
    """The parameters `names` as the model of a dump has them."""
    return names_of(names, {n[7:] for n in tensors if n.startswith("params.")})


def dump_judge(tensors, acts, loss, grads, forward_bound, grad_bound, out):
    """A line per tensor: a dump's against acts, loss and grads; returns how many fail."""
    largest, failed = max(np.linalg.norm(g.ravel()) for g in grads.values()), 0
    rows = [(f"acts.{name}", want, forward_bound, 0) for name, want in acts.items()]
    rows += [("loss", np.array([loss]), forward_bound, 0)]
    rows += [(f"grads.{name}", want, grad_bound, largest) for name, want in grads.items()]
    for name, want, bound, scale in rows:
        if name in tensors:
            verdict, relative, error, worst = compare(tensors[name], want, bound, scale)
        else:
            verdict, relative, error, worst = "missing", math.nan, math.nan, ()
        failed += verdict != "ok"
        index = "[" + ",".join(map(str, worst)) + "]"
        shape = "(" + ",".join(map(str, want.shape)) + ")"
        out(f"  {name:14s} {shape:18s} relative L2 {relative:9.3g}  max error {error:9.3g} "
            f"at {index:14s} {verdict}")
    return failed


def check_dump(path, tensors, metadata, forward_bound, grad_bound, out=print):
    """Recompute a dump from its parameters and tokens; returns the number of tensors that fail."""
    dump_check(path, metadata, CHOICES._asdict())
    v = Variant(*(metadata[field] for field in Variant._fields))
    names = dump_names(tensors, PARAMS)
    p, inputs, targets = dump_problem(path, tensors, names)
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    out(f"{path}: {' '.join(f'{k}={x}' for k, x in v._asdict().items())}")
    return dump_judge(tensors, {name: acts[name] for name in ACTS}, loss,
                      {name: grads[name] for name in names}, forward_bound, grad_bound, out)


# -----------------------------------------------------------------------------
# goldens: the smallest shapes in which no two axes that could be confused are equal

GOLDENS = ("quadratic-exact-yes-exp-yes", "quadratic-exact-yes-exp-no",
           "quadratic-exact-no-elu-yes", "quadratic-exact-yes-relu-yes",
           "quadratic-approx-yes-gelu-yes", "quadratic-none-yes-elu-yes",
           "linear-approx-yes-exp-yes", "linear-none-yes-exp-no", "linear-approx-no-exp-no",
           "linear-approx-yes-exp-no-images")


def small_problem(B=2, T=5, C=4, H=6, L=2, V=7, seed=1):
    """Parameters of order one, tokens, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    shapes = {"wte": (V, C), "wpe": (T, C), "right_w": (L, H, C), "right_b": (L, H),
              "left_w": (L, H, C), "out_w": (L, C, H), "out_b": (L, C), "head_w": (V, C)}
    p = {name: rng.standard_normal(shape) * (0.5 if name.endswith("_w") else 1.0)
         for name, shape in shapes.items()}
    inputs = rng.integers(0, V, (B, T)).astype(np.int32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 0] = targets[B - 1, T // 2] = -1
    return p, inputs, targets


def image_problem(p, inputs, targets, D=3, seed=2):
    """The same of images: patches of D numbers, of which the last stands for <CLS>, asked there."""
    rng = np.random.default_rng(seed)
    C = p["wpe"].shape[1]
    p = {**p, "patch_w": rng.standard_normal((C, D)), "cls": rng.standard_normal(C)}
    p.setdefault("head_w", p.pop("wte"))  # a head of its own
    patches = rng.standard_normal((*inputs.shape, D)).astype(np.float32).astype(np.float64)
    patches[:, -1] = 0
    targets = np.where(np.arange(inputs.shape[1]) == inputs.shape[1] - 1, inputs, -1)
    return p, patches, targets.astype(np.int32)


def dump_made(forward, backward, names, acts_names, p, inputs, targets, v):
    """All tensors of a dump; refuses when the two ways to the gradients disagree."""
    acts, loss = forward(p, inputs, targets, v)
    grads = backward(p, acts, inputs, targets, v)
    again = complex_step(forward, names, p, inputs, targets, v)
    largest = max(np.linalg.norm(g.ravel()) for g in again.values())
    for name in names:
        verdict, relative, _, _ = compare(grads[name], again[name], 1e-11, largest)
        if verdict != "ok":
            raise Trouble(f"{v}: grads.{name} is {relative:g} off the complex step")
    tensors = {"inputs": inputs if inputs.ndim == 2 else np.zeros_like(targets), "targets": targets}
    tensors.update({f"params.{name}": p[name] for name in names})
    tensors.update({f"acts.{name}": acts[name] for name in acts_names})
    if inputs.ndim == 3:
        tensors["acts.patches"] = inputs
    tensors["loss"] = np.array([loss])
    tensors.update({f"grads.{name}": grads[name] for name in names})
    return tensors


def solve(p, inputs, targets, v):
    return dump_made(forward, backward, names_of(PARAMS, p), ACTS, p, inputs, targets, v)


def golden_write(path, tensors, metadata):
    """Write a golden, say what is in it and return its size."""
    write_safetensors(path, tensors, metadata)
    norms = [np.linalg.norm(x.ravel()) for name, x in tensors.items() if name.startswith("grads.")]
    print(f"{path}: {os.path.getsize(path)} bytes, loss {tensors['loss'][0]:.6f}, "
          f"gradient norms {min(norms):.2g} to {max(norms):.2g}")
    return os.path.getsize(path)


def write_goldens(directory):
    os.makedirs(directory, exist_ok=True)
    total = 0
    for name in GOLDENS:
        v = Variant(*name.removesuffix("-images").split("-"))
        problem = (image_problem(*small_problem(L=1)) if name.endswith("images") else
                   small_problem())
        metadata = {**v._asdict(), "script": "dev/ref/causalrn.py", "numpy": np.__version__}
        total += golden_write(os.path.join(directory, name + ".safetensors"),
                              solve(*problem, v), metadata)
    print(f"{len(GOLDENS)} files, {total} bytes")


# -----------------------------------------------------------------------------

def linear_mix(a, b, v):
    """[eq. 5] The factored sum: exp(a_u) * cumsum_v exp(b_v); what the linear model computes."""
    if v.prenorm == "approx":
        a, b = normalize(a)[0], normalize(b)[0]
    memory, T = np.exp(b), len(a)
    memory = np.cumsum(memory, 0) if v.causal == "yes" else np.tile(memory.sum(0), (T, 1))
    s = np.exp(a) * memory
    if v.postnorm == "yes":
        return normalize(s / row_scale(s))[0]
    return s / (np.arange(1, T + 1)[:, None] if v.causal == "yes" else T)


class SelfTest:
    """Rows of a self test, and how many were not ok."""
    failed = 0

    def see(self, what, ok):
        print(f"{'ok  ' if ok else 'FAIL'} {what}")
        self.failed += not ok

    def dumps(self, check_dump, good, meta, infinite, wrong, missing, other, to=0.0):
        """A right dump passes, each fault is found: an Inf in the gradient of `infinite`, all of
        `wrong`'s 0.1% off, no activation `missing`, parameter `other`'s last number at `to`."""
        def count(changes):
            tensors = {name: x for name, x in {**good, **changes}.items() if x is not None}
            return check_dump("a dump", tensors, meta, 1e-5, 1e-4, out=lambda line: None)

        def spoilt(name, value):
            x = good[name].copy()
            x.flat[-1] = value
            return {name: x}

        see, wrong = self.see, "grads." + wrong
        see("a right dump passes", count({}) == 0)
        see("in float32 too", count({name: x.astype(np.float32) for name, x in good.items()
                                     if name.split(".")[0] in ("acts", "grads")}) == 0)
        see("NaN is found", count(spoilt("acts.logits", np.nan)) == 1)
        see("Inf is found", count(spoilt("grads." + infinite, np.inf)) == 1)
        see("one wrong gradient is found", count({wrong: good[wrong] * 1.001}) == 1)
        see("a wrong loss is found", count({"loss": good["loss"] + 1e-4}) == 1)
        see("a missing tensor is found", count({"acts." + missing: None}) == 1)
        cut = good["acts." + missing][..., :1]
        see("a wrong shape is found", count({"acts." + missing: cut}) == 1)
        see("another parameter is found", count(spoilt("params." + other, to)) > 1)

    def end(self):
        """The exit code."""
        print(f"self test: {self.failed} failed")
        return 1 if self.failed else 0


def self_test():
    test = SelfTest()
    see = test.see
    every = [Variant("quadratic", pre, post, act, causal) for act in CHOICES.activation
             for pre in CHOICES.prenorm for post in CHOICES.postnorm for causal in CHOICES.causal]
    for v in every:
        try:
            solve(*small_problem(T=3, C=3, H=4, V=5, seed=2), v)
            see("-".join(v) + ": gradients equal the complex step", True)
        except Trouble as e:
            see(str(e), False)
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 9, 6))
    for v in every:
        if v.activation == "exp" and v.prenorm != "exact":
            verdict = compare(linear_mix(a, b, v), mix(a, b, v), 1e-13)[0]
            see("-".join(v) + ": the factored sum equals all pairs", verdict == "ok")
    v = Variant("quadratic", "exact", "yes", "exp", "yes")
    see("the first position alone is T=1", (mix(a, b, v)[0] == mix(a[:1], b[:1], v)[0]).all())
    see("a constant row normalizes to 0", not normalize(np.full((1, 4), 1234.5))[0].any())
    scales = row_scale(np.array([[1.0], [-0.5], [3.0], [0.0]]))
    see("2^(k-1) <= row maximum < 2^k, 1 for zeros", (scales == [[2], [1], [4], [1]]).all())
    inputs, p = np.zeros((1, 2), np.int32), small_problem()[0]
    see("all targets ignored: loss 0", forward(p, inputs, inputs - 1, v)[1] == 0)

    good, meta = solve(*small_problem(), v), v._asdict()
    test.dumps(check_dump, good, meta, "wpe", "out_w", "o", "left_w")
    v = v._replace(causal="no")
    good, meta = solve(*image_problem(*small_problem()), v), v._asdict()
    test.dumps(check_dump, good, meta, "cls", "patch_w", "o", "left_w")
    return test.end()


def command_line(argv, doc, self_test, write_goldens, check_dump):
    """What a reference does with its arguments; the exit code."""
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="*", metavar="DUMP", help="a file that --dump wrote")
    parser.add_argument("--bf16", action="store_true", help="the bounds of a BF16 binary")
    parser.add_argument("--golden", metavar="DIR", help="write the goldens there")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args(argv)
    if args.self_test:
        return self_test()
    if not args.dumps and not args.golden:
        parser.error("nothing to do: give a DUMP, --golden DIR or --self-test")
    try:
        if args.golden:
            write_goldens(args.golden)
        bounds = (1e-2, 2e-2) if args.bf16 else (1e-5, 1e-4)
        failed = sum(check_dump(path, *read_safetensors(path), *bounds) for path in args.dumps)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return 3
    if args.dumps:
        print(f"{failed} tensors differ" if failed else "all tensors agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:], __doc__, self_test, write_goldens, check_dump))
