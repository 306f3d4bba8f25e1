#!/usr/bin/env python3
"""Our trainer and kernels beside PyTorch's, in one run on one card: milliseconds and their ratio.

    bench_peers.py                    every row; what is not built or installed is skipped, visibly
    bench_peers.py --cumsum BIN --logcumsumexp BIN     with the ladders of dev/cumsum/
    bench_peers.py --attention-forward BIN --attention-backward BIN    of dev/attention/
    bench_peers.py --scan-real BIN --scan-complex BIN    of dev/scan/
    bench_peers.py --only linear gpt2     some of quadratic, linear, transformer,
                                      linear-transformer, gpt2, cumsum, logcumsumexp, scan,
                                      attention, delta, gla, deltanet-length
    bench_peers.py --delta-forward BIN --delta-backward BIN     with the ladders of dev/delta/
    bench_peers.py --gla-forward BIN --gla-backward BIN     with those of dev/gla/
    bench_peers.py --only gateloop    a step of train_gateloop beside two scans
    bench_peers.py --only linear-768 decode-768     Linear CausalRN on text, C=768 H=3072 L=12
    bench_peers.py --dry-run          what would be run
    bench_peers.py --smoke            tiny sizes, on the CPU where there is no GPU; records nothing
    bench_peers.py --check DUMP...    the model below against a trainer's --dump, fp32, on the CPU

Training step: CausalRN at the paper's size, S=128 B=320 C=H=192 L=12. Ours: the trainer's own ms
column, median after warm-up. PyTorch: the model below, written as its authors describe it (the
pairs are a (B,T,T,H) tensor, in bf16), under torch.compile and bf16 autocast, with fused AdamW and
clipping to norm 1, the whole step in one CUDA graph where it can be captured. If it does not fit in
memory, each block is recomputed in backward; the table says so.

The Transformer, the Linear Transformer and GPT-2 124M in the same manner: S=128 B=320 C=192 NH=1
L=12, and B=32 T=1024 C=768 NH=12 L=12, a batch an update, random tokens. Softmax attention is
scaled_dot_product_attention with the backend it chooses, or --sdpa; linear attention is over all
pairs of positions, T x T in bf16. PyTorch's GPT-2 has its symbols padded to 50304, and the padding
counts as symbols. MFU: 6 operations a weight and token (wpe and biases not counted) and 12 L C T/2,
against the rate of a bf16 matrix product of 8192^3 in the same run.

Scans: torch.cumsum and torch.logcumsumexp over T of (B,T,D), fp32, L2 flushed before every call;
ours is the fastest forward kernel of the ladder for that shape.

First-order scans, h_t = a_t h_{t-1} + x_t: accelerated-scan's, real fp32 its warp kernel (CUDA,
compiled when it is imported; only T = 2^5 to 2^16), complex64 the one in Triton, T contiguous as
they have it, (B,C,T), their kernels alone, L2 flushed before every call. Ours is the kernel that
the ladder chooses for (B,T,C); forward and backward is the sum of the two.

Attention: torch's scaled_dot_product_attention with its flash and with its cuDNN backend, causal,
bf16, q, k, v (B,NH,T,HS) each by itself, in a CUDA graph, L2 flushed before every call; ours from
qkv (B,T,3C): forward alone, and forward and backward, with the trainer's kernels and with wgmma.

The delta rule: flash-linear-attention's chunk_delta_rule, bf16, q and k of unit length, in a CUDA
graph, L2 flushed before every call. Ours is the fastest bf16 kernel of the ladder for that shape;
forward and backward is a kernel of that name. The rate counts q, k, v, out, beta and their
gradients, each moved once. Of fla only the package fla-core is needed (and of its needs einops and
packaging, beside PyTorch and Triton).

Gated linear attention: its chunk_gla likewise, gates fp32, ln sigmoid(z) / 16 with z around 0, k =
1 - exp(g), which is MetaLA's. --fla-configs N: fla chooses only among the first N configurations of
each kernel, as its search for the backward kernels takes long; rows say so.

deltanet-length: dev/figures/deltanet_length.sh, a step of train_deltanet at the longest T beside
the shortest, B T constant; there is no peer.

gateloop: C=512 L=12 F=2048 T=1024 B=32 V=256, random bytes, sep, pre; PyTorch's model has the state
as two fp32 numbers. Its scan is torch's associative_scan (pointwise where there is a GPU), with the
backward recurrence as a second scan, or differentiated by PyTorch; or accelerated-scan's complex
one, which wants (B,C,T). Of the ways to put a scan into the compiled step the first that works is
timed; the table says which, and why not an earlier one. --check compares it with a dump.

linear-768: Linear CausalRN, V=256 T=256 B=320 C=768 H=3072 L=12, random bytes. PyTorch's sums over
T are torch.cumsum's (fp32), or products with a triangle of ones (tensor cores, rounded to bf16).
Neither is in logs, as ours are: its numbers can overflow, which those of first weights do not.

decode-768: one sequence at that size, sampled at temperature 0.7: milliseconds a character. Ours:
--sample of the trainer, with random weights; the time of 6000 characters is the difference between
runs of 7000 and 1000, the median of three. PyTorch: both matrices on r as one, compiled, with the
drawing of the next token in one CUDA graph; its tokens stay on the GPU, ours are read by the host.

Rows go to dev/results/peers.tsv: date, device, git blob of our .cu, benchmark, result.
"""
import argparse
import array
import contextlib
import csv
import functools
import hashlib
import itertools
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple

try:
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint
except ImportError:
    torch = None

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
START = time.perf_counter()
Size = namedtuple("Size", "S B C H L")
PAPER, TINY = Size(128, 320, 192, 192, 12), Size(8, 2, 16, 24, 2)
GptSize = namedtuple("GptSize", "V T B C NH L")
COPY, TINY_COPY = GptSize(29, 258, 320, 192, 1, 12), GptSize(29, 18, 2, 16, 2, 2)
GPT2, TINY_GPT2 = GptSize(50257, 1024, 32, 768, 12, 12), GptSize(50257, 16, 2, 16, 2, 2)
GateSize = namedtuple("GateSize", "V T B C F L")
GATELOOP, TINY_GATELOOP = GateSize(256, 1024, 32, 512, 2048, 12), GateSize(256, 16, 2, 16, 24, 2)
TextSize = namedtuple("TextSize", "V T B C H L")
WIDE, TINY_WIDE = TextSize(256, 256, 320, 768, 3072, 12), TextSize(256, 16, 2, 16, 24, 2)
SAMPLES, TINY_SAMPLES = (1000, 7000), (10, 60)  # characters
SUMS = ("cumsum", "triangle")
SHAPES = (320, 258, 192), (8, 4096, 1024), (1, 65536, 1024)
TINY_SHAPES = ((2, 18, 16),)
FIRST_ORDER = tuple((8, T, 1536) for T in (1024, 4096, 12345, 16384, 65536))
MODELS, SCANS = ("quadratic", "linear"), ("cumsum", "logcumsumexp")
GPTS = ("transformer", "linear-transformer", "gpt2")
GPT2_STEPS, GPT2_MAGIC, GPT2_PAD = 12, 20240520, 128
HEADS = (8, 2048, 16, 128), (16, 1024, 12, 64), (320, 258, 1, 192)
TINY_HEADS = ((2, 18, 2, 16),)
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
DIRECTIONS = ("forward", "forward+backward")
DELTA = (8, 2048, 16, 128), (1, 16384, 16, 128), (32, 512, 16, 64), (8, 2048, 32, 64)
TINY_DELTA = ((2, 18, 2, 16),)
GLA = (8, 2048, 16, 128, 128), (1, 16384, 16, 128, 128), (32, 512, 16, 64, 64)
TINY_GLA = ((2, 18, 2, 16, 8),)
BOS, SEP, EOS, LETTER, VOCAB, IGNORE = 0, 1, 2, 3, 29, -1
EPS = 1e-8

# A row of the table. ours, peer: a Measured, or the reason (a string) why there is none.
Row = namedtuple("Row", "work ours peer source")
Measured = namedtuple("Measured", "ms rate how")

# A model to train. p: name -> tensor, a list of L of a layer's, None where the model has none.
Problem = namedtuple("Problem", "p forward mix inputs targets groups betas")


class Skip(Exception):
    """Why a number is missing: one line."""


# -----------------------------------------------------------------------------
# the models in PyTorch: CausalRN

LAYER = ("right_w", "right_b", "left_w", "out_w", "out_b")


def normalize(x):
    """Over the last axis; biased variance, nothing learned."""
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + EPS)


def positions(a):
    """(T,1): how many positions each one sums."""
    return torch.arange(1, a.shape[1] + 1, device=a.device)[:, None]


def quadratic(a, b):
    """[eq. 4] exact pre-activation norm. The pairs have the type of a and b, sums are fp32."""
    pairs = torch.exp(normalize(a[:, :, None] + b[:, None]))
    seen = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=a.device).tril()
    s = torch.where(seen[:, :, None], pairs, 0).sum(2, dtype=torch.float32)
    return s / positions(a)


def linear(a, b):
    """[eq. 5] approximate pre-activation norm: the sum factors."""
    a, b = normalize(a.float()), normalize(b.float())
    return torch.exp(a) * torch.cumsum(torch.exp(b), 1) / positions(a)


def block(x, layer, mix):
    right_w, right_b, left_w, out_w, out_b = layer
    r = normalize(x)
    a, b = F.linear(r, right_w, right_b), F.linear(r, left_w)
    with torch.autocast(x.device.type, enabled=False):  # it would make the pairs fp32
        o = normalize(mix(a, b))
    return x + F.linear(o, out_w, out_b)


def through(x, layers, block_of, mix, recompute):
    """x after every layer; with recompute a block's activations are not kept for backward."""
    for layer in layers:
        if recompute:
            x = checkpoint(block_of, x, layer, mix, use_reentrant=False)
        else:
            x = block_of(x, layer, mix)
    return x


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def forward(p, inputs, targets, mix, recompute=False):
    """(logits, loss) of the parameters p, see Problem."""
    x = p["wte"][inputs] + p["wpe"]
    x = through(x, zip(*(p[name] for name in LAYER)), block, mix, recompute)
    logits = F.linear(normalize(x), p["head_w"]).float()
    return logits, cross_entropy(logits, targets)


def fillers(device):
    """(normal(std, *shape), constant(value, n)): tensors to be trained."""
    def normal(std, *shape):
        return (std * torch.randn(shape, device=device)).requires_grad_()

    def constant(value, n):
        return torch.full((n,), float(value), device=device, requires_grad=True)

    return normal, constant


def parameters(size, device):
    """Initial weights as in train_causalrn.c: the same distributions, other numbers. size: a
    TextSize."""
    V, T, _, C, H, L = size
    normal, constant = fillers(device)
    return {"wte": normal(1, V, C), "wpe": normal(1, T, C),
            "right_w": [normal(0.02, H, C) for _ in range(L)],
            "right_b": [constant(0, H) for _ in range(L)],
            "left_w": [normal(0.02, H, C) for _ in range(L)],
            "out_w": [normal(0.02 / math.sqrt(L), C, H) for _ in range(L)],
            "out_b": [constant(0, C) for _ in range(L)], "head_w": normal(0.02, V, C)}


def leaves(p):
    every = [t for value in p.values() for t in (value if isinstance(value, list) else [value])]
    return [t for t in every if t is not None]


def copying_batch(S, B, device):
    """inputs BOS s SEP s, targets ignored over the first string, then s EOS: (B, 2(S+1)) each."""
    letters = torch.randint(LETTER, VOCAB, (B, S))

    def column(token, width=1):
        return torch.full((B, width), token)

    inputs = torch.cat([column(BOS), letters, column(SEP), letters], 1)
    targets = torch.cat([column(IGNORE, S + 1), letters, column(EOS)], 1)
    return inputs.to(device), targets.to(device)


def causalrn(size, name, device):
    p = parameters(TextSize(VOCAB, 2 * (size.S + 1), *size[1:]), device)
    return Problem(p, forward, {"quadratic": quadratic, "linear": linear}[name],
                   *copying_batch(size.S, size.B, device), [{"params": leaves(p)}], (0.9, 0.999))


def triangle(a, b):
    """linear, its sums over T as a matrix product, whose result is rounded to bf16."""
    a, b = normalize(a.float()), normalize(b.float())
    T = a.shape[1]
    seen = torch.ones(T, T, dtype=torch.bfloat16, device=a.device).tril()
    return torch.exp(a) * (seen @ torch.exp(b).bfloat16()).float() / positions(a)


def text_batch(size, device):
    """Random tokens: inputs, and one later targets."""
    tokens = torch.randint(size.V, (size.B, size.T + 1)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def causalrn_text(size, sums, device):
    p = parameters(size, device)
    return Problem(p, forward, {"cumsum": linear, "triangle": triangle}[sums],
                   *text_batch(size, device), [{"params": leaves(p)}], (0.9, 0.999))


def decoder(size, device):
    """A function that reads a token and leaves the next one, drawn at temperature 0.7, in its
    place: sums over the past are a state of H numbers a layer. Returns it and the token."""
    p, H = parameters(size, device), size.H
    with torch.no_grad():
        both_w = [torch.cat(w).bfloat16() for w in zip(p["right_w"], p["left_w"])]
        out_w, head_w = [w.bfloat16() for w in p["out_w"]], p["head_w"].bfloat16()
    wte, wpe, right_b, out_b = (p[name] for name in ("wte", "wpe", "right_b", "out_b"))
    sums = [torch.zeros(1, H, device=device) for _ in both_w]
    token, t = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))

    def logits_of():
        x = wte[token] + wpe[t]
        for l, w in enumerate(both_w):
            a, b = F.linear(normalize(x).bfloat16(), w).float().split(H, 1)
            sums[l] += torch.exp(normalize(b))
            s = torch.exp(normalize(a + right_b[l])) * sums[l]  # the norm undoes 1/(t+1)
            x = x + F.linear(normalize(s).bfloat16(), out_w[l]).float() + out_b[l]
        return F.linear(normalize(x).bfloat16(), head_w).float()

    compiled = torch.compile(logits_of, dynamic=False)

    @torch.no_grad()
    def say():
        p_next = torch.softmax(compiled() / 0.7, 1)
        token.copy_((p_next / torch.empty_like(p_next).exponential_()).argmax(1))
        t.copy_((t + 1) % size.T)

    return say, token


# -----------------------------------------------------------------------------
# the models in PyTorch: GPT-2 and the Transformers

GPT_LAYER = ("ln1_w", "ln1_b", "qkv_w", "qkv_b", "proj_w", "proj_b", "ln2_w", "ln2_b", "fc_w",
             "fc_b", "out_w", "out_b")
GPT_PARAMS = ("wte", "wpe", *GPT_LAYER, "lnf_w", "lnf_b", "head_w")


def norm(x, weight, bias):
    """LayerNorm, or where nothing is learned normalize."""
    return normalize(x) if weight is None else F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def softmax_attention(q, k, v):
    """out_t = sum_u exp(s_tu) v_u / sum_u exp(s_tu), s_tu = q_t . k_u / sqrt(HS), u <= t."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def phi(x):
    """elu(x) + 1; below 0 it is exp(x) as such, (exp(x) - 1) + 1 would lose its digits."""
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def linear_attention(q, k, v):
    """out_t = sum_u s_tu v_u / (sum_u s_tu + 1e-6), s_tu = phi(q_t) . phi(k_u), u <= t."""
    s = (phi(q) @ phi(k).transpose(-1, -2)).tril()
    return s @ v / (s.sum(-1, keepdim=True, dtype=torch.float32) + 1e-6)


def gpt_block(x, layer, mix):
    """mix: the attention and its number of heads. Learned norms are gpt2's, so is tanh's gelu."""
    ln1_w, ln1_b, qkv_w, qkv_b, proj_w, proj_b, ln2_w, ln2_b, fc_w, fc_b, out_w, out_b = layer
    attention, NH = mix
    B, T, C = x.shape
    qkv = F.linear(norm(x, ln1_w, ln1_b), qkv_w, qkv_b)
    o = attention(*qkv.view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4))
    x = x + F.linear(o.transpose(1, 2).reshape(B, T, C), proj_w, proj_b)
    h = F.linear(norm(x, ln2_w, ln2_b), fc_w, fc_b)
    g = F.gelu(h, approximate="none" if ln1_w is None else "tanh")
    return x + F.linear(g, out_w, out_b)


def gpt_forward(p, inputs, targets, mix, recompute=False):
    """(logits, loss) of the parameters p, see Problem."""
    x = F.embedding(inputs, p["wte"]) + p["wpe"]
    x = through(x, zip(*(p[name] for name in GPT_LAYER)), gpt_block, mix, recompute)
    head = p["wte"] if p["head_w"] is None else p["head_w"]
    logits = F.linear(norm(x, p["lnf_w"], p["lnf_b"]), head).float()
    return logits, cross_entropy(logits, targets)


def gpt_mix(name, NH):
    return linear_attention if name == "linear-transformer" else softmax_attention, NH


def gpt_parameters(size, name, device):
    """Initial weights as in train_gpt2.c: the same distributions, other numbers."""
    V, T, _, C, _, L = size
    gpt2 = name == "gpt2"
    V = (V + GPT2_PAD - 1) // GPT2_PAD * GPT2_PAD if gpt2 else V
    normal, constant = fillers(device)

    def matrices(std, *shape):
        return [normal(std, *shape) for _ in range(L)]

    def vectors(value, n, exist=True):
        return [constant(value, n) if exist else None for _ in range(L)]

    embed_std, out_std = 0.02 if gpt2 else 1, 0.02 / math.sqrt(2 * L)
    return {"wte": normal(embed_std, V, C), "wpe": normal(embed_std, T, C),
            "ln1_w": vectors(1, C, gpt2), "ln1_b": vectors(0, C, gpt2),
            "qkv_w": matrices(0.02, 3 * C, C), "qkv_b": vectors(0, 3 * C, gpt2),
            "proj_w": matrices(out_std, C, C), "proj_b": vectors(0, C, gpt2),
            "ln2_w": vectors(1, C, gpt2), "ln2_b": vectors(0, C, gpt2),
            "fc_w": matrices(0.02, 4 * C, C), "fc_b": vectors(0, 4 * C),
            "out_w": matrices(out_std, C, 4 * C), "out_b": vectors(0, C),
            "lnf_w": constant(1, C) if gpt2 else None, "lnf_b": constant(0, C) if gpt2 else None,
            "head_w": None if gpt2 else normal(0.02, V, C)}


def gpt(size, name, device):
    p = gpt_parameters(size, name, device)
    if name == "gpt2":
        batch, betas = text_batch(size, device), (0.9, 0.95)
    else:
        batch, betas = copying_batch(size.T // 2 - 1, size.B, device), (0.9, 0.999)
    groups = [{"params": [t for t in leaves(p) if t.dim() > 1],
               "weight_decay": 0.1 if name == "gpt2" else 0},
              {"params": [t for t in leaves(p) if t.dim() == 1]}]
    return Problem(p, gpt_forward, gpt_mix(name, size.NH), *batch, groups, betas)


# -----------------------------------------------------------------------------
# the models in PyTorch: GateLoop

GATE_LAYER = ("norm1_w", "norm1_b", "qkvg_w", "qkvg_b", "gate_w", "gate_b", "out_w", "norm2_w",
              "norm2_b", "fc_w", "fc_b", "down_w", "down_b")
GATE_PARAMS = ("wte", *GATE_LAYER, "norm_w", "norm_b", "head_w", "head_b")


def combine(left, right):
    """(a, x) after (b, y), complex numbers as two: (b a, b x + y)."""
    a, a_im, x, x_im = left
    b, b_im, y, y_im = right
    return (b * a - b_im * a_im, b * a_im + b_im * a,
            b * x - b_im * x_im + y, b * x_im + b_im * x + y_im)


def torch_scan(a, a_im, x, x_im, reverse=False):
    """(Re h, Im h), h_t = a_t h_{t-1} + x_t over axis 1, from 0; reverse: from the end."""
    from torch._higher_order_ops.associative_scan import associative_scan
    mode = "pointwise" if x.is_cuda else "generic"
    return associative_scan(combine, (a, a_im, x, x_im), dim=1, reverse=reverse,
                            combine_mode=mode)[2:]


if torch is not None:
    class ScanWithBackward(torch.autograd.Function):
        """torch_scan of x real, whose backward is the reverse scan of conj(a_{t+1})."""
        @staticmethod
        def forward(ctx, a, a_im, x):
            h, h_im = torch_scan(a, a_im, x, torch.zeros_like(x))
            ctx.save_for_backward(a, a_im, h, h_im)
            return h

        @staticmethod
        def backward(ctx, dh):
            a, a_im, h, h_im = ctx.saved_tensors
            dh = dh.contiguous()
            after, after_im = (F.pad(z[:, 1:], (0, 0, 0, 1)) for z in (a, a_im))
            G, G_im = torch_scan(after, -after_im, dh, torch.zeros_like(dh), reverse=True)
            before, before_im = (F.pad(z[:, :-1], (0, 0, 1, 0)) for z in (h, h_im))
            return G * before + G_im * before_im, G_im * before - G * before_im, G


def scan_backward(a, a_im, x):
    return ScanWithBackward.apply(a, a_im, x)


def scan_autograd(a, a_im, x):
    return torch_scan(a, a_im, x, torch.zeros_like(x))[0]


def scan_accelerated(a, a_im, x):
    from accelerated_scan.complex import scan
    a = torch.complex(a, a_im).transpose(1, 2).contiguous()
    return scan(a, x.transpose(1, 2).contiguous()).real.transpose(1, 2)


def outside(scan):
    """The scan called from the compiled step, not compiled with it."""
    return torch.compiler.disable(scan)


def gate_ways(scan):
    """(how, mix) of a peer's scan, in the order in which they are tried."""
    if scan == "accelerated-scan":
        return [("in the graph", scan_accelerated),
                ("outside the graph", outside(scan_accelerated))]
    return [("backward a scan too", scan_backward), ("differentiated by PyTorch", scan_autograd),
            ("backward a scan too, outside the graph", outside(scan_backward))]


def gate_block(x, layer, scan):
    (norm1_w, norm1_b, qkvg_w, qkvg_b, gate_w, gate_b, out_w, norm2_w, norm2_b, fc_w, fc_b, down_w,
     down_b) = layer
    u = norm(x, norm1_w, norm1_b)
    q, k, v, g = F.linear(u, qkvg_w, qkvg_b).chunk(4, -1)
    alpha, beta = F.linear(u, gate_w, gate_b).float().chunk(2, -1)
    r = torch.sigmoid(alpha)
    h = scan(r * torch.cos(beta), r * torch.sin(beta), k.float() * v.float())
    x = x + F.linear(F.silu(g) * (q * h), out_w)
    m = F.gelu(F.linear(norm(x, norm2_w, norm2_b), fc_w, fc_b), approximate="tanh")
    return x + F.linear(m, down_w, down_b)


def gate_forward(p, inputs, targets, mix, recompute=False):
    """(logits, loss) of the parameters p, see Problem."""
    x = F.embedding(inputs, p["wte"])
    x = through(x, zip(*(p[name] for name in GATE_LAYER)), gate_block, mix, recompute)
    logits = F.linear(norm(x, p["norm_w"], p["norm_b"]), p["head_w"], p["head_b"]).float()
    return logits, cross_entropy(logits, targets)


def gateloop(mix, size, _, device):
    """Initial weights as in train_gateloop.c: the same distributions, other numbers."""
    V, _, _, C, H, L = size
    normal, constant = fillers(device)
    shapes = {"norm1_w": 1, "norm1_b": 0, "qkvg_w": (4 * C, C), "qkvg_b": 0, "gate_w": (2 * C, C),
              "gate_b": 0, "out_w": (C, C), "norm2_w": 1, "norm2_b": 0, "fc_w": (H, C), "fc_b": 0,
              "down_w": (C, H), "down_b": 0}
    sizes = {"qkvg_b": 4 * C, "gate_b": 2 * C, "fc_b": H}
    p = {name: [normal(shape[1] ** -0.5, *shape) if isinstance(shape, tuple)
                else constant(shape, sizes.get(name, C)) for _ in range(L)]
         for name, shape in shapes.items()}
    p |= {"wte": normal(1, V, C), "norm_w": constant(1, C), "norm_b": constant(0, C),
          "head_w": normal(C ** -0.5, V, C), "head_b": constant(0, V)}
    groups = [{"params": [t for t in leaves(p) if t.dim() > 1], "weight_decay": 0.05},
              {"params": [t for t in leaves(p) if t.dim() == 1]}]
    return Problem(p, gate_forward, mix, *text_batch(size, device), groups, (0.9, 0.98))


# -----------------------------------------------------------------------------
# against a trainer's dump


def dumped_model(path, metadata):
    """(forward, mix, names of parameters, those of a layer, what it is) for a dump."""
    got = tuple(metadata.get(k) for k in ("model", "prenorm", "postnorm", "activation", "causal"))
    mixes = {("quadratic", "exact", "yes", "exp", "yes"): quadratic,
             ("linear", "approx", "yes", "exp", "yes"): linear}
    if got in mixes:
        names = ("wte", "wpe", *LAYER, "head_w")
        return forward, mixes[got], names, LAYER, " ".join(got)
    if got[0] in GPTS and got[-1] == "yes":
        mix = gpt_mix(got[0], int(metadata["heads"]))
        return gpt_forward, mix, GPT_PARAMS, GPT_LAYER, got[0]
    gate = tuple(metadata.get(k) for k in ("transition", "wiring", "head-size", "gn-groups"))
    if gate == ("sep", "pre", "1", "0"):
        return gate_forward, scan_backward, GATE_PARAMS, GATE_LAYER, "gateloop sep pre"
    raise Skip(f"{path}: {' '.join(map(str, got))}: expected one of "
               + "; ".join([*map(" ".join, mixes), *(f"{name}, causal" for name in GPTS),
                            "gateloop sep pre, heads of 1"]))


def check_dump(path):
    """Logits, loss and gradients against a trainer's dump; returns how many tensors differ."""
    sys.path.insert(0, os.path.join(HERE, "ref"))
    import causalrn  # numpy's reference; here for its reader and its verdicts
    try:
        tensors, metadata = causalrn.read_safetensors(path)
    except causalrn.Trouble as e:
        raise Skip(str(e))
    forward_of, mix, names, of_layer, what = dumped_model(path, metadata)
    unknown = {k[7:] for k in tensors if k.startswith("params.")} - set(names)
    if unknown:
        raise Skip(f"{path}: {what} has no {' '.join(sorted(unknown))}")
    p, L = {}, int(metadata["layers"])
    for name in names:
        value = tensors.get(f"params.{name}")
        split = [None] * L if value is None else list(torch.tensor(value, dtype=torch.float32)) \
            if name in of_layer else [torch.tensor(value, dtype=torch.float32)]
        split = [t if t is None else t.clone().requires_grad_() for t in split]
        p[name] = split if name in of_layer else split[0]
    inputs, targets = (torch.tensor(tensors[k]).long() for k in ("inputs", "targets"))
    logits, loss = forward_of(p, inputs, targets, mix)
    loss.backward()
    rows = [("logits", logits.detach().numpy(), tensors["acts.logits"], 1e-5),
            ("loss", loss.detach().reshape(1).numpy(), tensors["loss"], 1e-5)]
    for name, value in p.items():
        if not leaves({name: value}):
            continue
        grad = torch.stack([t.grad for t in value]) if name in of_layer else value.grad
        rows.append((f"grads.{name}", grad.numpy(), tensors[f"grads.{name}"], 1e-4))
    largest = max(math.sqrt((want.astype(float) ** 2).sum()) for _, _, want, _ in rows[2:])
    failed = 0
    print(f"{path}: {what}")
    for name, value, want, bound in rows:
        scale = largest if name.startswith("grads") else 0
        verdict, relative, error, _ = causalrn.compare(value, want, bound, scale)
        failed += verdict != "ok"
        print(f"  {name:14s} relative L2 {relative:9.3g}  max error {error:9.3g}  {verdict}")
    return failed


# -----------------------------------------------------------------------------
# timing PyTorch

def progress(text):
    print(f"[{time.perf_counter() - START:.0f} s] {text}", file=sys.stderr, flush=True)


def torch_device(args):
    if torch is None:
        raise Skip("PyTorch is not installed")
    if not torch.cuda.is_available() and not args.smoke:
        raise Skip("PyTorch sees no GPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_ms(call, reps, device, flush=None):
    """Median of `reps` calls after 3 to warm up; flush runs before each, untimed."""
    times = []
    for i in range(-3, reps):
        if flush:
            flush()
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            ms = start.elapsed_time(stop)
        else:
            before = time.perf_counter()
            call()
            ms = 1e3 * (time.perf_counter() - before)
        if i >= 0:
            times.append(ms)
    return statistics.median(times)


def flushed_ms(call, device):
    """Median of 30 calls; before each other data, 256 MiB, take the place of its own in L2."""
    unrelated = torch.zeros(2**26 if device == "cuda" else 1, device=device)
    return median_ms(call, 30, device, lambda: unrelated.sum())


def capture(step):
    """(call, its name): the step as one CUDA graph, or as it is where that fails."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay, "one CUDA graph"
    except RuntimeError as e:
        traceback.print_exc()
        torch.cuda.synchronize()
        return step, f"no CUDA graph: {first_line(e)}"


def warm_capture(step):
    """capture, after three steps off the default stream, as a capture wants them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return capture(step)


def captured_ms(step, device):
    """(flushed_ms of a step, how it was taken)"""
    call, how = warm_capture(step) if device == "cuda" else (step, "on the CPU")
    return flushed_ms(call, device), how


def sdpa(args):
    """Where softmax attention's backend is chosen: PyTorch's own choice, or --sdpa's if it can."""
    if args.sdpa == "default":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    order = [args.sdpa, *(name for name in BACKENDS if name != args.sdpa)]
    return sdpa_kernel([getattr(SDPBackend, BACKENDS[name]) for name in order], set_priority=True)


def train_peer(args, problem, size, name, device, recompute):
    """(ms of a step, how it was taken)"""
    torch.manual_seed(1)
    torch._dynamo.reset()
    p, forward_of, mix, inputs, targets, groups, betas = problem(size, name, device)
    adam = torch.optim.AdamW(groups, lr=5e-4, betas=betas, eps=1e-8, weight_decay=0,
                             fused=True, capturable=device == "cuda")
    last = torch.zeros((), device=device)

    def loss_of():  # the logits are no output: nothing asks for them in fp32
        return forward_of(p, inputs, targets, mix, recompute)[1]

    compiled = torch.compile(loss_of, mode=args.mode, dynamic=False)

    def step():
        adam.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False), sdpa(args):
            loss = compiled()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves(p), 1.0)
        adam.step()
        last.copy_(loss.detach())

    progress(f"{name}: PyTorch compiles its step")
    call, how = step, "on the CPU"
    if device == "cuda":
        call, how = warm_capture(step)
    else:
        step()
    progress(f"{name}: PyTorch's steps, {how}")
    ms = median_ms(call, args.peer_steps, device)
    if not math.isfinite(last.item()):
        raise Skip(f"PyTorch's loss is {last.item()}")
    how = f"torch {torch.__version__}, compile mode {args.mode}, bf16 autocast, {how}"
    if device == "cuda":
        how += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    if recompute:
        how += ", blocks recomputed in backward (out of memory without)"
    return ms, how


def peer_training(args, problem, size, name):
    """train_peer, once more with recomputation where memory does not suffice."""
    device = torch_device(args)
    for recompute in (False, True):
        try:
            return train_peer(args, problem, size, name, device, recompute)
        except torch.OutOfMemoryError:
            pass
        finally:  # the tensors of the failed try are free only here
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    raise Skip("out of memory, with recomputation too")


def peer_step(args, size, name):
    ms, how = peer_training(args, causalrn, size, name)
    return Measured(ms, tokens_per_s(size, ms), how)


def text_rate(size, ms):
    return f"{1e-3 * size.T * size.B / ms:.2f} Mtokens/s"


def peer_wide(args, size, sums):
    ms, how = peer_training(args, causalrn_text, size, sums)
    return Measured(ms, text_rate(size, ms), f"{how}, {sums}")


def peer_decode(args, size, _):
    device, together = torch_device(args), 4 if args.smoke else 100
    torch.manual_seed(1)
    torch._dynamo.reset()
    say, token = decoder(size, device)
    progress("decode: PyTorch compiles its step")
    call, how = warm_capture(say) if device == "cuda" else (say, "on the CPU")

    def some():
        for _ in range(together):
            call()

    ms = median_ms(some, 10, device) / together
    if not 0 <= token.item() < size.V:
        raise Skip(f"PyTorch says token {token.item()}")
    return Measured(ms, f"{1e3 / ms:.0f} characters/s", f"torch {torch.__version__}, bf16, {how}")


def peer_gpt(args, size, name):
    ms, how = peer_training(args, gpt, size, name)
    rate, of = gpt_rate(args, size, name, ms)
    if name != "linear-transformer":
        how += f", SDPA {args.sdpa}"
    return Measured(ms, rate, how + of)


def peer_gateloop(args, size, scan):
    """The first way to use the scan that works."""
    device, failed = torch_device(args), []
    if scan == "accelerated-scan":
        if device != "cuda":
            raise Skip("accelerated-scan's complex scan wants a GPU")
        try:
            import accelerated_scan.complex  # noqa: F401
        except ImportError as e:
            raise Skip(f"no accelerated-scan with a complex scan: {first_line(e)}")
    for how, mix in gate_ways(scan):
        try:
            ms, note = peer_training(args, functools.partial(gateloop, mix), size, "gateloop")
            return Measured(ms, text_rate(size, ms),
                            "; ".join([f"{note}, {scan} {how}", *failed]))
        except Exception as e:  # of PyTorch's compiler, or memory: the next way
            traceback.print_exc()
            failed.append(f"not {how}: {first_line(e)}")
    raise Skip("; ".join(failed))


matmul_rates = {}  # n -> operations a ms of a bf16 product of n^3


def matmul_rate(args):
    """Of 8192^3, which is MFU's 100%."""
    device, n = torch_device(args), 256 if args.smoke else 8192
    if n not in matmul_rates:
        x, y = (torch.randn((n, n), device=device).bfloat16() for _ in range(2))
        out = torch.empty_like(x)
        matmul_rates[n] = 2 * n**3 / median_ms(lambda: torch.matmul(x, y, out=out), 10, device)
    return matmul_rates[n]


def peer_scan(args, name, shape):
    device, op = torch_device(args), getattr(torch, name)
    x = torch.randn(shape, device=device)
    out = torch.empty_like(x)
    ms = flushed_ms(lambda: op(x, 1, out=out), device)
    rate = 8e-6 * x.numel() / ms
    return Measured(ms, f"{rate:.0f} GB/s", f"torch {torch.__version__}, {rate:.0f} GB/s")


def accelerated_scan(kind, T):
    """(forward(a, x, h), backward(a, h, g, da, dx)) of accelerated-scan on (B,C,T), or Skip."""
    if kind == "real" and (T & (T - 1) or not 32 <= T <= 65536):
        raise Skip(f"accelerated-scan's CUDA kernel takes powers of 2 from 32 to 65536, not {T}")
    try:
        from accelerated_scan import complex as in_triton
        if kind == "real":
            from accelerated_scan import warp
    except Exception as e:  # it compiles when it is imported
        raise Skip(f"no accelerated-scan: {first_line(e)}")
    if kind == "real":
        return lambda a, x, h: warp.warpscan_forward(a, x, h, False), warp.warpscan_backward

    def launch(kernel, a, *others):
        kernel[a.shape[:2]](*map(torch.view_as_real, (a, *others)), seqlen=a.shape[2],
                            enable_fp_fusion=False)

    def forward(a, x, h):
        launch(in_triton.forward_scan, a, x, h)

    def backward(a, h, g, da, dx):
        launch(in_triton.backward_scan, a, h, g, dx, da)

    return forward, backward


def plain_scan():
    """The same by its definition, for --smoke where there is no GPU."""
    def forward(a, x, h):
        h[..., 0] = x[..., 0]
        for t in range(1, a.shape[2]):
            h[..., t] = a[..., t] * h[..., t - 1] + x[..., t]

    def backward(a, h, g, da, dx):
        dx.copy_(g)
        for t in range(a.shape[2] - 1, 0, -1):
            da[..., t] = dx[..., t] * h[..., t - 1].conj()
            dx[..., t - 1] += a[..., t].conj() * dx[..., t]
        da[..., 0] = 0

    return forward, backward


def first_order_rate(kind, direction, shape, ms):
    streams = 3 if direction == "forward" else 8  # backward: a, h, g, da, dx
    moved = streams * math.prod(shape) * (4 if kind == "real" else 8)
    return f"{1e-6 * moved / ms:.0f} GB/s"


def scan_error(kind, forward, backward, device):
    """Of both against their definition on a small example, relative; a test that they are called
    as they want to be."""
    dtype = torch.float32 if kind == "real" else torch.complex64
    a, x, g = (torch.rand((2, 4, 64), device=device, dtype=dtype) - 0.5 for _ in range(3))
    sides = []
    for f, b in ((forward, backward), plain_scan()):
        h, da, dx = (torch.empty_like(a) for _ in range(3))
        f(a, x, h)
        b(a, h, g, da, dx)
        sides.append(torch.cat([h, da[..., 1:], dx], 2))
    return float((sides[0] - sides[1]).norm() / sides[1].norm())


def peer_first_order(args, kind, direction, shape):
    device = torch_device(args)
    forward, backward = accelerated_scan(kind, shape[1]) if device == "cuda" else plain_scan()
    error = scan_error(kind, forward, backward, device)
    if not error < 1e-5:
        raise Skip(f"accelerated-scan is {error:.1e} off its definition")
    dtype = torch.float32 if kind == "real" else torch.complex64
    B, T, C = shape
    a, x, g = (torch.rand((B, C, T), device=device, dtype=dtype) for _ in range(3))
    h, da, dx = (torch.empty_like(a) for _ in range(3))
    a.mul_(0.7)  # |a| < 1, of complex numbers too

    def step():
        forward(a, x, h)
        if direction != "forward":
            backward(a, h, g, da, dx)

    ms = flushed_ms(step, device)
    what = "accelerated-scan (B,C,T)" if device == "cuda" else "on the CPU"
    return Measured(ms, first_order_rate(kind, direction, shape, ms),
                    f"{what}, {error:.1e} off, torch {torch.__version__}")


def peer_attention(args, direction, shape, backend, _):
    device = torch_device(args)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    B, T, NH, HS = shape
    q, k, v, dout = (torch.randn((B, NH, T, HS), device=device, dtype=torch.bfloat16)
                     for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(direction != "forward")

    def step():
        with sdpa_kernel([getattr(SDPBackend, BACKENDS[backend])]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if direction != "forward":
            torch.autograd.grad(out, (q, k, v), dout)

    ms, how = captured_ms(step, device)
    rate = attention_rate(direction, shape, ms)
    return Measured(ms, rate, f"torch {torch.__version__}, {backend}, {how}")


def fla_few(args):
    """Before fla is imported: of each kernel that Triton tunes only --fla-configs configurations
    remain."""
    import triton
    if args.fla_configs and not hasattr(triton, "autotune_all"):
        triton.autotune_all = triton.autotune
        triton.autotune = lambda configs, *rest, **more: triton.autotune_all(
            configs[:args.fla_configs], *rest, **more)


def delta_rule(args):
    """fla's chunk_delta_rule, or Skip."""
    try:
        fla_few(args)
        from fla.ops.delta_rule import chunk_delta_rule
        return chunk_delta_rule
    except Exception as e:  # it imports much, of many versions
        raise Skip(f"no flash-linear-attention (fla-core): {first_line(e)}")


def delta_recurrent(q, k, v, beta):
    """The definition, for --smoke where fla has no kernels."""
    B, T, NH, HS = q.shape
    S, out = q.new_zeros(B, NH, HS, HS), []
    for t in range(T):
        error = v[:, t] - torch.einsum("bhij,bhj->bhi", S, k[:, t])
        S = S + torch.einsum("bh,bhi,bhj->bhij", beta[:, t], error, k[:, t])
        out.append(torch.einsum("bhij,bhj->bhi", S, q[:, t]) / math.sqrt(HS))
    return torch.stack(out, 1), None


def peer_delta(args, direction, shape):
    device = torch_device(args)
    rule = delta_rule(args) if device == "cuda" else delta_recurrent
    B, T, NH, HS = shape
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(shape, device=device) for _ in range(4))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = 2 * torch.rand((B, T, NH), device=device)
    q, k, v, dout, beta = (x.bfloat16() for x in (q, k, v, dout, beta))
    inputs = q, k, v, beta
    for x in inputs:
        x.requires_grad_(direction != "forward")

    def step():
        out, _ = rule(*inputs)
        if direction != "forward":
            torch.autograd.grad(out, inputs, dout)

    progress(f"delta {direction} {shape}: fla tunes its kernels")
    ms, how = captured_ms(step, device)
    return Measured(ms, delta_rate(direction, shape, ms), fla_version(args) + how)


def fla_version(args):
    """How a row says what was measured: fla, if it was, how far it searched, and PyTorch."""
    fla = sys.modules.get("fla")
    few = f", {args.fla_configs} configurations" if args.fla_configs else ""
    return (f"fla {fla.__version__}{few}, " if fla else "") + f"torch {torch.__version__}, "


def gated_attention(args):
    """fla's chunk_gla, or Skip."""
    try:
        fla_few(args)
        from fla.ops.gla import chunk_gla
        return chunk_gla
    except Exception as e:
        raise Skip(f"no flash-linear-attention (fla-core): {first_line(e)}")


def gated_recurrent(q, k, v, g):
    """The definition, for --smoke where fla has no kernels."""
    B, T, NH, DK = q.shape
    S, out = q.new_zeros(B, NH, DK, v.shape[3]), []
    for t in range(T):
        S = g[:, t, :, :, None].exp() * S + torch.einsum("bhi,bhj->bhij", k[:, t], v[:, t])
        out.append(torch.einsum("bhij,bhi->bhj", S, q[:, t].to(S.dtype)) / math.sqrt(DK))
    return torch.stack(out, 1), None


def peer_gla(args, direction, shape):
    device = torch_device(args)
    attention = gated_attention(args) if device == "cuda" else gated_recurrent
    B, T, NH, DK, DV = shape
    torch.manual_seed(1)
    q, z = (torch.randn((B, T, NH, DK), device=device) for _ in range(2))
    v, dout = (torch.randn((B, T, NH, DV), device=device) for _ in range(2))
    g = F.logsigmoid(z) / 16
    q, k, v, dout = (x.bfloat16() for x in (q, -torch.expm1(g), v, dout))
    inputs = q, k, v, g
    for x in inputs:
        x.requires_grad_(direction != "forward")

    def step():
        out, _ = attention(*inputs)
        if direction != "forward":
            torch.autograd.grad(out, inputs, dout.to(out.dtype))

    progress(f"gla {direction} {shape}: fla tunes its kernels")
    ms, how = captured_ms(step, device)
    return Measured(ms, gla_rate(direction, shape, ms), fla_version(args) + how)


# -----------------------------------------------------------------------------
# running ours

def tokens_per_s(size, ms):
    return f"{2e-3 * (size.S + 1) * size.B / ms:.2f} Mtokens/s"


def gpt_rate(args, size, name, ms):
    """(tokens/s and of gpt2 MFU, what MFU is relative to)"""
    V, T, B, C, _, L = size
    tokens = B * T
    if name != "gpt2":
        return f"{1e-3 * tokens / ms:.2f} Mtokens/s", ""
    rate = f"{tokens / ms:.0f} ktokens/s"
    try:
        peak = matmul_rate(args)
    except Skip as e:
        return rate, f", no MFU: {e}"
    work = tokens * (6 * (12 * L * C * C + V * C) + 12 * L * C * T / 2)
    return (f"{rate}, MFU {100 * work / ms / peak:.1f}%",
            f", matrix product {1e-9 * peak:.3g} TFLOP/s")


def program(path, how):
    if not path:
        raise Skip(f"no binary given ({how})")
    if not os.access(path, os.X_OK):
        raise Skip(f"{path} is not built ({how})")
    return path


def run_program(command):
    print("$ " + " ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              check=False)
    except OSError as e:
        raise Skip(f"{command[0]}: {e.strerror}")
    if done.returncode:
        lines = (done.stderr + done.stdout).split("\n")
        why = [line.strip() for line in lines if "error:" in line or "FAILED" in line]
        raise Skip(f"{command[0]} ended with {done.returncode}: {why[0] if why else lines[0]}")
    return done.stdout


def trainer_command(args, size, name):
    command = [args.trainer, "--preset", "copy-s128", "--model", name, "--steps", str(args.steps),
               "--save-every", "0"]
    if size != PAPER:
        names = ("string-size", "batch-size", "channels", "hidden", "layers")
        command += [word for k, v in zip(names, size) for word in (f"--{k}", str(v))]
    return command


def trained(command, d):
    """(median ms of its steps, how it was taken) of a trainer that runs in directory d."""
    run_program(command + ["--out", os.path.join(d, "run")])
    with open(os.path.join(d, "run", "log.csv"), encoding="utf-8") as f:
        rows = list(csv.DictReader(line for line in f if not line.startswith("#")))
    times = [float(row["ms"]) for row in rows if row["split"] == "train"]
    times = times[len(times) // 3:]
    if not times:
        raise Skip(f"{command[0]}: no training row in its log.csv")
    return statistics.median(times), f"median of {len(times)} steps"


def our_step(args, size, name):
    program(args.trainer, "make cuda, or --trainer BIN")
    with tempfile.TemporaryDirectory() as d:
        ms, how = trained(trainer_command(args, size, name), d)
    return Measured(ms, tokens_per_s(size, ms), how)


def gpt_command(args, size, name, text="TOKENS.bin"):
    command = [args.gpt2_trainer, "--preset"]
    if name == "gpt2":
        command += ["gpt2", "--task", "text", "--vocab", "gpt2", "--text", text, "--batch-size",
                    str(size.B), "--accumulate", "1", "--eval-batches", "1", "--steps",
                    str(min(args.steps, GPT2_STEPS))]
        length = ["--context", str(size.T)]
    else:
        command += ["copy-s128", "--model", name, "--steps", str(args.steps)]
        length = ["--string-size", str(size.T // 2 - 1), "--batch-size", str(size.B)]
    if size not in (COPY, GPT2):
        command += [*length, "--channels", str(size.C), "--heads", str(size.NH), "--layers",
                    str(size.L)]
    return command + ["--save-every", "0"]


def write_tokens(path, n=2**20):
    """A file of n random GPT-2 tokens, in the layout of data/gpt2_tokens.py."""
    draw = random.Random(1)
    header = array.array("i", [GPT2_MAGIC, 1, n] + [0] * 253)
    tokens = array.array("H", (draw.randrange(GPT2.V) for _ in range(n)))
    if sys.byteorder == "big":
        header.byteswap()
        tokens.byteswap()
    with open(path, "wb") as f:
        f.write(header.tobytes() + tokens.tobytes())


def our_gpt(args, size, name):
    program(args.gpt2_trainer, "make cuda, or --gpt2-trainer BIN")
    with tempfile.TemporaryDirectory() as d:
        text = os.path.join(d, "random.bin")
        if name == "gpt2":
            write_tokens(text)
        ms, how = trained(gpt_command(args, size, name, text), d)
    rate, of = gpt_rate(args, size, name, ms)
    return Measured(ms, rate, how + of)


def gate_command(args, size, text="RANDOM.txt"):
    command = [args.gateloop_trainer, "--task", "text", "--vocab", "bytes", "--text", text,
               "--lr", "1e-3", "--eval-batches", "1", "--steps", str(args.steps), "--save-every",
               "0", "--warmup", "0"]
    names = ("context", "batch-size", "channels", "hidden", "layers")
    return command + [word for k, v in zip(names, size[1:]) for word in (f"--{k}", str(v))]


def random_text(directory, n=2**20):
    """A file of n random bytes."""
    path = os.path.join(directory, "random.txt")
    with open(path, "wb") as f:
        f.write(random.Random(1).randbytes(n))
    return path


def our_gateloop(args, size, _):
    program(args.gateloop_trainer, "make cuda, or --gateloop-trainer BIN")
    with tempfile.TemporaryDirectory() as d:
        ms, how = trained(gate_command(args, size, random_text(d)), d)
    return Measured(ms, text_rate(size, ms), how)


def wide_command(args, size, *others):
    sizes = zip(("context", "batch-size", "channels", "hidden", "layers"), size[1:])
    return [args.trainer, "--task", "text", "--vocab", "bytes", "--model", "linear",
            *(word for k, v in sizes for word in (f"--{k}", str(v))), *others]


def wide_step_command(args, size, text="RANDOM.txt"):
    return wide_command(args, size, "--text", text, "--lr", "5e-4", "--warmup", "0", "--steps",
                        str(args.steps), "--eval-batches", "1", "--save-every", "0")


wide_output = []  # what trained returned, once for both rows


def our_wide(args, size, _):
    program(args.trainer, "make cuda, or --trainer BIN")
    if not wide_output:
        with tempfile.TemporaryDirectory() as d:
            wide_output.append(trained(wide_step_command(args, size, random_text(d)), d))
    ms, how = wide_output[0]
    return Measured(ms, text_rate(size, ms), how)


def decode_command(args, size, samples):
    return wide_command(args, size, "--steps", "0", "--temperature", "0.7", "--sample",
                        str(samples))


def our_decode(args, size, samples):
    program(args.trainer, "make cuda, or --trainer BIN")
    differences = []
    for _ in range(3):
        seconds = []
        for n in samples:
            start = time.perf_counter()
            run_program(decode_command(args, size, n))
            seconds.append(time.perf_counter() - start)
        differences.append(seconds[1] - seconds[0])
    n, seconds = samples[1] - samples[0], statistics.median(differences)
    if seconds <= 0:
        raise Skip(f"{n} characters more took {seconds:.3f} s")
    return Measured(1e3 * seconds / n, f"{n / seconds:.0f} characters/s",
                    f"{n} characters, median of 3")


def ladder_command(args, name):
    return [getattr(args, name) or f"({name} ladder)", "--time-only", "--csv"]


LADDER_NAME = re.compile(r"(\w+) \((\d+),(\d+),(\d+)\) forward kernel (\d+) \((.*)\)")
LADDER_RESULT = re.compile(r"([\d.]+) ms median, .* ([\d.]+) GB/s, ([\d.]+)% of copy")
ladder_output = {}  # a ladder runs once for all its shapes: its output, or the reason for none


def our_scan(args, name, shape):
    program(getattr(args, name), f"nvcc dev/cumsum/{name}.cu, then --{name} BIN")
    if name not in ladder_output:
        ladder_output[name] = tried(run_program, ladder_command(args, name))
    if "\t" not in ladder_output[name]:
        raise Skip(ladder_output[name])
    found = []
    for line in ladder_output[name].split("\n"):
        fields = line.split("\t")
        if len(fields) != 5:
            continue
        what, result = LADDER_NAME.fullmatch(fields[3]), LADDER_RESULT.match(fields[4])
        if what and result and what[1] == name and tuple(map(int, what.groups()[1:4])) == shape:
            rate = f"{float(result[2]):.0f} GB/s, {float(result[3]):.0f}% of copy"
            found.append(Measured(float(result[1]), rate, f"kernel {what[5]} ({what[6]})"))
    if not found:
        raise Skip(f"{getattr(args, name)}: no row for {shape}")
    return min(found)


def first_order_command(args, kind, shape):
    """The kernel that the ladder chooses by shape is its last."""
    binary = getattr(args, f"scan_{kind}") or f"(scan {kind} ladder)"
    B, T, C = map(str, shape)
    return [binary, "--time-only", "--csv", "--kernel", "11", "--B", B, "--T", T, "--C", C]


FIRST_ORDER_NAME = re.compile(r"scan \S+(?: fp32)? \((\d+),(\d+),(\d+)\) (\w+)"
                              r" kernel \d+ \(.*\)")


def our_first_order(args, kind, direction, shape):
    program(getattr(args, f"scan_{kind}"), f"nvcc dev/scan/scan_{kind}.cu, then --scan-{kind} BIN")
    command = tuple(first_order_command(args, kind, shape))
    if command not in ladder_output:
        ladder_output[command] = tried(run_program, list(command))
    if "\t" not in ladder_output[command]:
        raise Skip(ladder_output[command])
    found = {}
    for line in ladder_output[command].split("\n"):
        fields = line.split("\t")
        what = FIRST_ORDER_NAME.fullmatch(fields[3]) if len(fields) == 5 else None
        result = LADDER_RESULT.match(fields[4]) if what else None
        if result and tuple(map(int, what.groups()[:3])) == shape:
            found[what[4]] = float(result[1]), f"{float(result[3]):.0f}% of copy"
    needed = direction.split("+")
    if not all(name in found for name in needed):
        raise Skip(f"{command[0]}: no row for {direction} {shape}")
    ms = sum(found[name][0] for name in needed)
    return Measured(ms, first_order_rate(kind, direction, shape, ms) + ", "
                    + " and ".join(found[name][1] for name in needed), "kernel 11 (by shape)")


def attention_rate(direction, shape, ms):
    """By the usual count: 4 HS operations a pair forward, 10 backward, half the pairs."""
    B, T, NH, HS = shape
    work = (4 if direction == "forward" else 14) * B * NH * HS * T * (T + 1) / 2
    return f"{1e-9 * work / ms:.0f} TFLOP/s"


def attention_commands(args, direction, version):
    """What to run and to add up: the ladders' kernels 8 and 9 are the trainer's, 10 has wgmma."""
    forward = args.attention_forward or "(attention forward ladder)"
    backward = args.attention_backward or "(attention backward ladder)"
    kernels = {("forward", "trainer"): [(forward, "8")],
               ("forward", "wgmma"): [(forward, "10")],
               ("forward+backward", "trainer"): [(backward, "9")],
               ("forward+backward", "wgmma"): [(forward, "10"), (backward, "10")]}
    return [(binary, "--time-only", "--csv", "--kernel", kernel)
            for binary, kernel in kernels[direction, version]]


ATTENTION_NAME = re.compile(r"attention \w+ bf16 \((\d+),(\d+),(\d+),(\d+)\)"
                            r" kernel (\d+) \((.*)\)")


def ladder_attention(command, shape):
    """(ms, kernel) of the ladder's only kernel at the shape."""
    if command not in ladder_output:
        ladder_output[command] = tried(run_program, command)
    if "\t" not in ladder_output[command]:
        raise Skip(ladder_output[command])
    for line in ladder_output[command].split("\n"):
        fields = line.split("\t")
        what = ATTENTION_NAME.fullmatch(fields[3]) if len(fields) == 5 else None
        if what and tuple(map(int, what.groups()[:4])) == shape:
            return float(fields[4].split()[0]), f"kernel {what[5]} ({what[6]})"
    raise Skip(f"{command[0]}: no row for {shape}")


def our_attention(args, direction, shape, _, version):
    for binary in (args.attention_forward, args.attention_backward):
        program(binary, "nvcc -DPRECISION_BF16 dev/attention/*.cu, then --attention-forward, "
                "-backward BIN")
    parts = [ladder_attention(command, shape)
             for command in attention_commands(args, direction, version)]
    ms = sum(part[0] for part in parts)
    return Measured(ms, attention_rate(direction, shape, ms), ", ".join(part[1] for part in parts))


def delta_rate(direction, shape, ms):
    B, T, NH, HS = shape
    arrays = 4 if direction == "forward" else 11  # in bf16; beta and its gradient in fp32
    moved = B * T * NH * (2 * arrays * HS + (4 if direction == "forward" else 12))
    return f"{1e-6 * moved / ms:.0f} GB/s"


def gla_rate(direction, shape, ms):
    B, T, NH, DK, DV = shape  # q, k, v, out, and their gradients, in bf16; g and dg in fp32
    bytes_ = 8 * DK + 4 * DV if direction == "forward" else 24 * DK + 10 * DV
    return f"{1e-6 * B * T * NH * bytes_ / ms:.0f} GB/s"


def op_binary(args, op, direction):
    return getattr(args, f"{op}_{'forward' if direction == 'forward' else 'backward'}")


# the kernels of a ladder that can be its fastest: the others take most of its time
OP_KERNELS = {("delta", "forward"): (4,), ("delta", "forward+backward"): (5,),
              ("gla", "forward"): (5, 7), ("gla", "forward+backward"): (8, 9)}


def op_commands(args, op, direction):
    """The ladder of an operation, delta or gla, once for each of its fast kernels."""
    binary = op_binary(args, op, direction) or f"({op} {direction} ladder)"
    return [[binary, "--time-only", "--csv", "--kernel", str(kernel)]
            for kernel in OP_KERNELS[op, direction]]


DELTA_SHAPE = re.compile(r"B\D{0,2}(\d+)\W+T\D{0,2}(\d+)\W+NH\D{0,2}(\d+)\W+HS\D{0,2}(\d+)"
                         r"|\((\d+)[,x ]+(\d+)[,x ]+(\d+)[,x ]+(\d+)(?:[,x ]+(\d+))?\)")
DELTA_MS = re.compile(r"([\d.]+) ms|\t([\d.]+(?:e-?\d+)?)\s*$")


def op_rows(text, shape):
    """(ms, name) of the bf16 kernels that have the shape; rows are `name, shape, ms`, or those of
    bench_row (dev/bench.cuh)."""
    found = []
    for line in text.split("\n"):
        what, ms = DELTA_SHAPE.search(line), DELTA_MS.search(line)
        if "\t" not in line or not what or not ms or "fp32" in line:
            continue
        if tuple(int(n) for n in what.groups() if n) == shape:
            fields = line.split("\t")
            found.append((float(ms[1] or ms[2]), fields[3 if len(fields) == 5 else 0]))
    return found


def op_ladder(args, op, direction, shape):
    """(ms, name) of the ladder's fast kernels for the shape, or Skip."""
    binary = program(op_binary(args, op, direction), f"nvcc -DPRECISION_BF16 dev/{op}/*.cu, then "
                     f"--{op}-forward, --{op}-backward BIN")
    key = f"{op} {direction}"
    if key not in ladder_output:
        ladder_output[key] = "\n".join(tried(run_program, command)
                                       for command in op_commands(args, op, direction))
    if "\t" not in ladder_output[key]:
        raise Skip(ladder_output[key])
    rows = op_rows(ladder_output[key], shape)
    if not rows:
        raise Skip(f"{binary}: no row for {shape}")
    return rows


def our_delta(args, direction, shape):
    ms, how = min(op_ladder(args, "delta", direction, shape))
    return Measured(ms, delta_rate(direction, shape, ms), how)


def our_gla(args, direction, shape):
    ms, how = min(op_ladder(args, "gla", direction, shape))
    return Measured(ms, gla_rate(direction, shape, ms), how)


LENGTH = re.compile(r"^RESULT T=(\d+) ms=(\S+) times=(\S+) MiB=(\S+) times_memory=(\S+)$", re.M)


def length_command(args):
    tiny = ["TOKENS=256", "SIZES=64 128", "STEPS=3", f"FIGURES={tempfile.gettempdir()}",
            "EXTRA=--channels 16"] if args.smoke else []
    return ["env", f"TRAINER={args.deltanet_trainer}", *tiny, "bash",
            os.path.join(HERE, "figures", "deltanet_length.sh")]


def our_length(args):
    program(args.deltanet_trainer, "make cuda, or --deltanet-trainer BIN")
    result = LENGTH.search(run_program(length_command(args)))
    if not result:
        raise Skip("dev/figures/deltanet_length.sh: no RESULT with two lengths")
    T, ms, times, memory, times_memory = result.groups()
    return Measured(float(ms), f"{memory} MiB", f"at T={T}; {float(times):.3f} of the time and "
                    f"{float(times_memory):.3f} of the memory at the shortest")


def peer_length(_):
    raise Skip("no peer: the claim is that time and memory are linear in T")


# -----------------------------------------------------------------------------
# rows, table, record

def first_line(e):
    lines = str(e).strip().split("\n")
    return f"{type(e).__name__}: {lines[0]}" if lines[0] else type(e).__name__


def tried(measure, *arguments):
    """What it measures, or the reason why it does not."""
    try:
        return measure(*arguments)
    except Skip as e:
        return str(e)
    except Exception as e:  # whatever PyTorch's compiler raises costs a row, not the run
        traceback.print_exc()
        return first_line(e)


def works(args):
    """(name, text, arguments, ours, peer, command, our source) of each row that was asked for."""
    size = TINY if args.smoke else PAPER
    text = "S={} B={} C={} H={} L={}".format(*size)
    for name in MODELS:
        yield (name, f"{name} CausalRN step {text}", (args, size, name), our_step, peer_step,
               trainer_command(args, size, name), "train_causalrn.cu")
    for name, sizes in zip(GPTS, ((COPY, TINY_COPY), (COPY, TINY_COPY), (GPT2, TINY_GPT2))):
        size = sizes[args.smoke]
        text = "V={} T={} B={} C={} NH={} L={}".format(*size)
        yield (name, f"{name} step {text}", (args, size, name), our_gpt, peer_gpt,
               gpt_command(args, size, name), "train_gpt2.cu")
    for name in SCANS:
        for shape in TINY_SHAPES if args.smoke else SHAPES:
            yield (name, f"{name} forward ({','.join(map(str, shape))})", (args, name, shape),
                   our_scan, peer_scan, ladder_command(args, name), f"dev/cumsum/{name}.cu")
    for kind in ("real", "complex"):
        for shape in TINY_SHAPES if args.smoke else FIRST_ORDER:
            if kind == "complex" and shape[1] > 20000:  # the ladder's reference takes 70 GB
                continue
            for direction in DIRECTIONS:
                text = f"scan {kind} {direction} ({','.join(map(str, shape))})"
                yield ("scan", text, (args, kind, direction, shape), our_first_order,
                       peer_first_order, first_order_command(args, kind, shape),
                       "dev/scan/scan.cuh")
    for shape in TINY_HEADS if args.smoke else HEADS:
        for direction in DIRECTIONS:
            for backend, version in itertools.product(BACKENDS, ("trainer", "wgmma")):
                text = (f"attention {direction} ({','.join(map(str, shape))}), {version}, "
                        f"torch {backend}")
                yield ("attention", text, (args, direction, shape, backend, version),
                       our_attention, peer_attention,
                       attention_commands(args, direction, version)[-1], "train_gpt2.cu"
                       if version == "trainer" else "dev/attention/attention_hopper.cuh")
    size = TINY_WIDE if args.smoke else WIDE
    text = "V={} T={} B={} C={} H={} L={}".format(*size)
    for sums in SUMS:
        yield ("linear-768", f"linear CausalRN step {text}, {sums}", (args, size, sums), our_wide,
               peer_wide, wide_step_command(args, size), "train_causalrn.cu")
    samples = TINY_SAMPLES if args.smoke else SAMPLES
    size = size._replace(T=samples[1], B=1)
    yield ("decode-768", "linear CausalRN, a character C={} H={} L={}".format(*size[3:]),
           (args, size, samples), our_decode, peer_decode,
           decode_command(args, size, samples[1]), "train_causalrn.cu")
    yield from delta_works(args)
    size = TINY_GATELOOP if args.smoke else GATELOOP
    text = "V={} T={} B={} C={} F={} L={}".format(*size)
    for scan in ("associative_scan", "accelerated-scan"):
        yield ("gateloop", f"gateloop step {text}, {scan}", (args, size, scan), our_gateloop,
               peer_gateloop, gate_command(args, size), "train_gateloop.cu")


def delta_works(args):
    """The same of the delta rule, gated linear attention and DeltaNet."""
    for shape in TINY_DELTA if args.smoke else DELTA:
        for direction in DIRECTIONS:
            yield ("delta", f"delta rule {direction} bf16 ({','.join(map(str, shape))})",
                   (args, direction, shape), our_delta, peer_delta,
                   op_commands(args, "delta", direction)[-1],
                   f"dev/delta/delta_{direction.split('+')[-1]}.cu")
    for shape in TINY_GLA if args.smoke else GLA:
        for direction in DIRECTIONS:
            yield ("gla", f"gated linear attention {direction} bf16 ({','.join(map(str, shape))})",
                   (args, direction, shape), our_gla, peer_gla,
                   op_commands(args, "gla", direction)[-1],
                   f"dev/gla/gla_{direction.split('+')[-1]}.cu")
    yield ("deltanet-length", "train_deltanet step, B T constant", (args,), our_length, peer_length,
           length_command(args), "train_deltanet.cu")


def blob(path):
    """git hash-object of a source, - where there is none."""
    try:
        with open(os.path.join(ROOT, path), "rb") as f:
            data = f.read()
    except OSError:
        return "-"
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def device_name():
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.split("\n")[0] or platform.machine()
    except OSError:
        return platform.machine()


def ratio(row):
    both = isinstance(row.ours, Measured) and isinstance(row.peer, Measured)
    return f"{row.peer.ms / row.ours.ms:.2f}" if both else "-"


def print_table(rows):
    cells = [("work", "ours ms", "peer ms", "ratio", "ours", "peer")]
    for row in rows:
        sides = [side if isinstance(side, Measured) else None for side in (row.ours, row.peer)]
        cells.append((row.work, *(f"{side.ms:.3f}" if side else "skipped" for side in sides),
                      ratio(row), *(side.rate if side else "-" for side in sides)))
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(cell.rjust(w) if 0 < i < 4 else cell.ljust(w)
                        for i, (cell, w) in enumerate(zip(line, widths))).rstrip())
    notes = {}  # rows that share a note share a line
    for row in rows:
        for who, side in (("ours", row.ours), ("peer", row.peer)):
            note = side.how if isinstance(side, Measured) else f"skipped: {side}"
            notes.setdefault((who, note), []).append(row.work)
    for (who, note), names in notes.items():
        print(f"{who}: {note}\n    " + "; ".join(names))


def record(path, rows):
    """Append the rows of which something was measured; how many."""
    lines, date, device = [], time.strftime("%Y-%m-%d", time.gmtime()), device_name()
    for row in rows:
        sides = []
        for who, side in (("ours", row.ours), ("peer", row.peer)):
            sides.append(f"{who} {side.ms:.4f} ms, {side.rate} ({side.how})"
                         if isinstance(side, Measured) else f"{who} skipped: {side}")
        if isinstance(row.ours, Measured) or isinstance(row.peer, Measured):
            result = "; ".join(sides + [f"ratio {ratio(row)}"]).replace("\t", " ")
            lines.append("\t".join((date, device, blob(row.source), row.work, result)) + "\n")
    if lines:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a", encoding="utf-8", newline="\n") as f:
            f.writelines(lines)
    return len(lines)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", metavar="NAME", help="these kinds of rows",
                   choices=(*MODELS, *GPTS, *SCANS, "scan", "attention", "delta", "gla",
                            "deltanet-length", "gateloop", "linear-768", "decode-768"))
    p.add_argument("--trainer", default="./train_causalrn_gpu", metavar="BIN")
    p.add_argument("--gpt2-trainer", default="./train_gpt2_gpu", metavar="BIN")
    p.add_argument("--cumsum", metavar="BIN", help="the ladder dev/cumsum/cumsum.cu, built")
    p.add_argument("--logcumsumexp", metavar="BIN", help="dev/cumsum/logcumsumexp.cu, built")
    p.add_argument("--scan-real", metavar="BIN", help="dev/scan/scan_real.cu, built, in fp32")
    p.add_argument("--scan-complex", metavar="BIN", help="dev/scan/scan_complex.cu, built")
    p.add_argument("--attention-forward", metavar="BIN",
                   help="dev/attention/attention_forward.cu, built with -DPRECISION_BF16")
    p.add_argument("--attention-backward", metavar="BIN", help="attention_backward.cu likewise")
    p.add_argument("--delta-forward", metavar="BIN",
                   help="dev/delta/delta_forward.cu, built with -DPRECISION_BF16")
    p.add_argument("--delta-backward", metavar="BIN", help="delta_backward.cu likewise")
    p.add_argument("--gla-forward", metavar="BIN",
                   help="dev/gla/gla_forward.cu, built with -DPRECISION_BF16")
    p.add_argument("--gla-backward", metavar="BIN", help="gla_backward.cu likewise")
    p.add_argument("--fla-configs", type=int, default=0, metavar="N",
                   help="fla tunes each kernel among its first N configurations (0: all)")
    p.add_argument("--deltanet-trainer", default="./train_deltanet_gpu", metavar="BIN")
    p.add_argument("--gateloop-trainer", default="./train_gateloop_gpu", metavar="BIN")
    p.add_argument("--steps", type=int, default=60, help="of our trainer, of gpt2 at most "
                   f"{GPT2_STEPS}; a third is warm-up")
    p.add_argument("--peer-steps", type=int, default=10, help="timed steps of PyTorch's")
    p.add_argument("--mode", default="default", help="of torch.compile, one without CUDA graphs: "
                   "default, max-autotune-no-cudagraphs")
    p.add_argument("--sdpa", choices=("default", *BACKENDS), default="default", help="the backend "
                   "that the Transformer's and GPT-2's attention tries first: %(choices)s")
    p.add_argument("--results", default=os.path.join(HERE, "results", "peers.tsv"), metavar="FILE")
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--smoke", action="store_true")
    p.add_argument("--check", nargs="+", metavar="DUMP")
    args = p.parse_args(argv)
    if args.check:
        if torch is None:
            print("error: --check: PyTorch is not installed", file=sys.stderr)
            return 1
        try:
            failed = sum(map(check_dump, args.check))
        except Skip as e:
            print(f"error: {e}", file=sys.stderr)
            return 3
        print(f"{failed} tensors differ" if failed else "all tensors agree")
        return 1 if failed else 0
    rows, added = [], 0
    for name, text, arguments, ours, peer, command, source in works(args):
        if args.only and name not in args.only:
            continue
        if args.dry_run:
            compiled = name in (*MODELS, *GPTS, "gateloop", "linear-768", "decode-768")
            print(f"{text}\n  ours: {' '.join(command)}\n  peer: {peer.__name__}"
                  f"{arguments[1:]}" + (f", torch.compile mode {args.mode}" if compiled
                                        else f": torch.{name}" if name in SCANS else ""))
            continue
        rows.append(Row(text, tried(ours, *arguments), tried(peer, *arguments), source))
        added += 0 if args.smoke else record(args.results, rows[-1:])  # now: a run can be cut
    if args.dry_run:
        return 0
    print(f"{device_name()}, {time.strftime('%Y-%m-%d', time.gmtime())}")
    print_table(rows)
    if not args.smoke:
        print(f"{args.results}: {added} rows added")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
