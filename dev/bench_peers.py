#!/usr/bin/env python3
"""Our trainer and kernels beside PyTorch's, in one run on one card: milliseconds and their ratio.

    bench_peers.py                    every row; what is not built or installed is skipped, visibly
    bench_peers.py --cumsum BIN --logcumsumexp BIN     with the ladders of dev/cumsum/
    bench_peers.py --attention-forward BIN --attention-backward BIN    of dev/attention/
    bench_peers.py --only linear      one of quadratic, linear, cumsum, logcumsumexp, attention
    bench_peers.py --dry-run          what would be run
    bench_peers.py --smoke            tiny sizes, on the CPU where there is no GPU; records nothing
    bench_peers.py --check DUMP...    the model below against a trainer's --dump, fp32, on the CPU

Training step: CausalRN at the paper's size, S=128 B=320 C=H=192 L=12. Ours: the trainer's own ms
column, median after warm-up. PyTorch: the model below, written as its authors describe it (the
pairs are a (B,T,T,H) tensor, in bf16), under torch.compile and bf16 autocast, with fused AdamW and
clipping to norm 1, the whole step in one CUDA graph where it can be captured. If it does not fit in
memory, each block is recomputed in backward; the table says so.

Scans: torch.cumsum and torch.logcumsumexp over T of (B,T,D), fp32, L2 flushed before every call;
ours is the fastest forward kernel of the ladder for that shape.

Attention: torch's scaled_dot_product_attention with its flash and with its cuDNN backend, causal,
bf16, q, k, v (B,NH,T,HS) each by itself, in a CUDA graph, L2 flushed before every call; ours from
qkv (B,T,3C): forward alone, and forward and backward (kernels 8 and 9 of the ladders).

Rows go to dev/results/peers.tsv: date, device, git blob of our .cu, benchmark, result.
"""
import argparse
import csv
import hashlib
import math
import os
import platform
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
Size = namedtuple("Size", "S B C H L")
PAPER, TINY = Size(128, 320, 192, 192, 12), Size(8, 2, 16, 24, 2)
SHAPES = (320, 258, 192), (8, 4096, 1024), (1, 65536, 1024)
TINY_SHAPES = ((2, 18, 16),)
MODELS, SCANS = ("quadratic", "linear"), ("cumsum", "logcumsumexp")
HEADS = (8, 2048, 16, 128), (16, 1024, 12, 64), (320, 258, 1, 192)
TINY_HEADS = ((2, 18, 2, 16),)
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
DIRECTIONS = {"forward": "8", "forward+backward": "9"}  # and the ladder's kernel
BOS, SEP, EOS, LETTER, VOCAB, IGNORE = 0, 1, 2, 3, 29, -1
EPS = 1e-8

# A row of the table. ours, peer: a Measured, or the reason (a string) why there is none.
Row = namedtuple("Row", "work ours peer source")
Measured = namedtuple("Measured", "ms rate how")


class Skip(Exception):
    """Why a number is missing: one line."""


# -----------------------------------------------------------------------------
# the model in PyTorch

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


def forward(p, inputs, targets, mix, recompute=False):
    """(logits, loss) of the parameters p: name -> tensor, those of LAYER -> a list of L."""
    x = p["wte"][inputs] + p["wpe"]
    for layer in zip(*(p[name] for name in LAYER)):
        if recompute:
            x = checkpoint(block, x, layer, mix, use_reentrant=False)
        else:
            x = block(x, layer, mix)
    logits = F.linear(normalize(x), p["head_w"]).float()
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def parameters(size, device):
    """Initial weights as in train_causalrn.c: the same distributions, other numbers."""
    S, _, C, H, L = size

    def normal(std, *shape):
        return (std * torch.randn(shape, device=device)).requires_grad_()

    def zero(n):
        return torch.zeros(n, device=device, requires_grad=True)

    return {"wte": normal(1, VOCAB, C), "wpe": normal(1, 2 * (S + 1), C),
            "right_w": [normal(0.02, H, C) for _ in range(L)],
            "right_b": [zero(H) for _ in range(L)],
            "left_w": [normal(0.02, H, C) for _ in range(L)],
            "out_w": [normal(0.02 / math.sqrt(L), C, H) for _ in range(L)],
            "out_b": [zero(C) for _ in range(L)], "head_w": normal(0.02, VOCAB, C)}


def leaves(p):
    return [t for value in p.values() for t in (value if isinstance(value, list) else [value])]


def copying_batch(size, device):
    """inputs BOS s SEP s, targets ignored over the first string, then s EOS: (B, 2(S+1)) each."""
    letters = torch.randint(LETTER, VOCAB, (size.B, size.S))

    def column(token, width=1):
        return torch.full((size.B, width), token)

    inputs = torch.cat([column(BOS), letters, column(SEP), letters], 1)
    targets = torch.cat([column(IGNORE, size.S + 1), letters, column(EOS)], 1)
    return inputs.to(device), targets.to(device)


def check_dump(path):
    """Logits, loss and gradients against a trainer's dump; returns how many tensors differ."""
    sys.path.insert(0, os.path.join(HERE, "ref"))
    import causalrn  # numpy's reference; here for its reader and its verdicts
    try:
        tensors, metadata = causalrn.read_safetensors(path)
    except causalrn.Trouble as e:
        raise Skip(str(e))
    got = tuple(metadata.get(k) for k in ("model", "prenorm", "postnorm", "activation", "causal"))
    mixes = {("quadratic", "exact", "yes", "exp", "yes"): quadratic,
             ("linear", "approx", "yes", "exp", "yes"): linear}
    if got not in mixes:
        raise Skip(f"{path}: {' '.join(map(str, got))}: expected one of "
                   + "; ".join(map(" ".join, mixes)))
    p = {}
    for name in causalrn.PARAMS:
        value = torch.tensor(tensors[f"params.{name}"], dtype=torch.float32)
        split = [value] if name not in LAYER else list(value)
        split = [t.clone().requires_grad_() for t in split]
        p[name] = split if name in LAYER else split[0]
    inputs, targets = (torch.tensor(tensors[k]).long() for k in ("inputs", "targets"))
    logits, loss = forward(p, inputs, targets, mixes[got])
    loss.backward()
    rows = [("logits", logits.detach().numpy(), tensors["acts.logits"], 1e-5),
            ("loss", loss.detach().reshape(1).numpy(), tensors["loss"], 1e-5)]
    for name, value in p.items():
        grad = torch.stack([t.grad for t in value]) if name in LAYER else value.grad
        rows.append((f"grads.{name}", grad.numpy(), tensors[f"grads.{name}"], 1e-4))
    largest = max(math.sqrt((want.astype(float) ** 2).sum()) for _, _, want, _ in rows[2:])
    failed = 0
    print(f"{path}: {' '.join(got)}")
    for name, value, want, bound in rows:
        scale = largest if name.startswith("grads") else 0
        verdict, relative, error, _ = causalrn.compare(value, want, bound, scale)
        failed += verdict != "ok"
        print(f"  {name:14s} relative L2 {relative:9.3g}  max error {error:9.3g}  {verdict}")
    return failed


# -----------------------------------------------------------------------------
# timing PyTorch

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


def train_peer(args, size, name, device, recompute):
    torch.manual_seed(1)
    torch._dynamo.reset()
    p = parameters(size, device)
    inputs, targets = copying_batch(size, device)
    adam = torch.optim.AdamW(leaves(p), lr=5e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                             fused=True, capturable=device == "cuda")
    mix = {"quadratic": quadratic, "linear": linear}[name]
    compiled = torch.compile(forward, mode=args.mode, dynamic=False)
    last = torch.zeros((), device=device)

    def step():
        adam.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            loss = compiled(p, inputs, targets, mix, recompute)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves(p), 1.0)
        adam.step()
        last.copy_(loss.detach())

    call, how = step, "on the CPU"
    if device == "cuda":
        side = torch.cuda.Stream()  # a capture wants its warm-up off the default stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        call, how = capture(step)
    ms = median_ms(call, args.peer_steps, device)
    if not math.isfinite(last.item()):
        raise Skip(f"PyTorch's loss is {last.item()}")
    how = f"torch {torch.__version__}, compile mode {args.mode}, bf16 autocast, {how}"
    if device == "cuda":
        how += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    if recompute:
        how += ", blocks recomputed in backward (out of memory without)"
    return Measured(ms, tokens_per_s(size, ms), how)


def peer_step(args, size, name):
    device = torch_device(args)
    for recompute in (False, True):
        try:
            return train_peer(args, size, name, device, recompute)
        except torch.OutOfMemoryError:
            pass
        finally:  # the tensors of the failed try are free only here
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    raise Skip("out of memory, with recomputation too")


def peer_scan(args, name, shape):
    device, op = torch_device(args), getattr(torch, name)
    x = torch.randn(shape, device=device)
    out = torch.empty_like(x)
    unrelated = torch.zeros(2**26 if device == "cuda" else 1, device=device)  # 256 MiB
    ms = median_ms(lambda: op(x, 1, out=out), 30, device, lambda: unrelated.sum())
    rate = 8e-6 * x.numel() / ms
    return Measured(ms, f"{rate:.0f} GB/s", f"torch {torch.__version__}, {rate:.0f} GB/s")


def peer_attention(args, direction, shape, backend):
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

    call, how = step, "on the CPU"
    if device == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        call, how = capture(step)
    unrelated = torch.zeros(2**26 if device == "cuda" else 1, device=device)  # 256 MiB
    ms = median_ms(call, 30, device, lambda: unrelated.sum())
    rate = attention_rate(direction, shape, ms)
    return Measured(ms, rate, f"torch {torch.__version__}, {backend}, {how}")


# -----------------------------------------------------------------------------
# running ours

def tokens_per_s(size, ms):
    return f"{2e-3 * (size.S + 1) * size.B / ms:.2f} Mtokens/s"


def program(path, how):
    if not path:
        raise Skip(f"no binary given ({how})")
    if not os.access(path, os.X_OK):
        raise Skip(f"{path} is not built ({how})")
    return path


def run_program(command):
    print("$ " + " ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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


def our_step(args, size, name):
    program(args.trainer, "make cuda, or --trainer BIN")
    with tempfile.TemporaryDirectory() as d:
        run_program(trainer_command(args, size, name) + ["--out", os.path.join(d, "run")])
        with open(os.path.join(d, "run", "log.csv"), encoding="utf-8") as f:
            rows = list(csv.DictReader(line for line in f if not line.startswith("#")))
    times = [float(row["ms"]) for row in rows if row["split"] == "train"]
    times = times[len(times) // 3:]
    if not times:
        raise Skip(f"{args.trainer}: no training row in its log.csv")
    ms = statistics.median(times)
    return Measured(ms, tokens_per_s(size, ms), f"median of {len(times)} steps")


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


def attention_rate(direction, shape, ms):
    """By the usual count: 4 HS operations a pair forward, 10 backward, half the pairs."""
    B, T, NH, HS = shape
    work = (4 if direction == "forward" else 14) * B * NH * HS * T * (T + 1) / 2
    return f"{1e-9 * work / ms:.0f} TFLOP/s"


def attention_binary(args, direction):
    return args.attention_forward if direction == "forward" else args.attention_backward


def attention_command(args, direction):
    return [attention_binary(args, direction) or f"(attention {direction} ladder)", "--time-only",
            "--csv", "--kernel", DIRECTIONS[direction]]


ATTENTION_NAME = re.compile(r"attention \w+ bf16 \((\d+),(\d+),(\d+),(\d+)\)"
                            r" kernel (\d+) \((.*)\)")


def our_attention(args, direction, shape, _):
    program(attention_binary(args, direction),
            "nvcc -DPRECISION_BF16 dev/attention/*.cu, then --attention-forward, -backward BIN")
    if direction not in ladder_output:
        ladder_output[direction] = tried(run_program, attention_command(args, direction))
    if "\t" not in ladder_output[direction]:
        raise Skip(ladder_output[direction])
    for line in ladder_output[direction].split("\n"):
        fields = line.split("\t")
        what = ATTENTION_NAME.fullmatch(fields[3]) if len(fields) == 5 else None
        if what and tuple(map(int, what.groups()[:4])) == shape:
            ms = float(fields[4].split()[0])
            rate = attention_rate(direction, shape, ms)
            return Measured(ms, rate, f"kernel {what[5]} ({what[6]})")
    raise Skip(f"{attention_binary(args, direction)}: no row for {shape}")


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
    for name in SCANS:
        for shape in TINY_SHAPES if args.smoke else SHAPES:
            yield (name, f"{name} forward ({','.join(map(str, shape))})", (args, name, shape),
                   our_scan, peer_scan, ladder_command(args, name), f"dev/cumsum/{name}.cu")
    for shape in TINY_HEADS if args.smoke else HEADS:
        for direction in DIRECTIONS:
            for backend in BACKENDS:
                text = f"attention {direction} ({','.join(map(str, shape))}), torch {backend}"
                yield ("attention", text, (args, direction, shape, backend), our_attention,
                       peer_attention, attention_command(args, direction),
                       "train_gpt2.cu")


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
    """Append the rows of which something was measured."""
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
    print(f"{path}: {len(lines)} rows added")


def main(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=(*MODELS, *SCANS, "attention"), metavar="NAME",
                   help="one kind of row")
    p.add_argument("--trainer", default="./train_causalrn_gpu", metavar="BIN")
    p.add_argument("--cumsum", metavar="BIN", help="the ladder dev/cumsum/cumsum.cu, built")
    p.add_argument("--logcumsumexp", metavar="BIN", help="dev/cumsum/logcumsumexp.cu, built")
    p.add_argument("--attention-forward", metavar="BIN",
                   help="dev/attention/attention_forward.cu, built with -DPRECISION_BF16")
    p.add_argument("--attention-backward", metavar="BIN", help="attention_backward.cu likewise")
    p.add_argument("--steps", type=int, default=60, help="of our trainer; a third is warm-up")
    p.add_argument("--peer-steps", type=int, default=20, help="timed steps of PyTorch's")
    p.add_argument("--mode", default="default", help="of torch.compile, one without CUDA graphs: "
                   "default, max-autotune-no-cudagraphs")
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
    rows = []
    for name, text, arguments, ours, peer, command, source in works(args):
        if args.only not in (None, name):
            continue
        if args.dry_run:
            print(f"{text}\n  ours: {' '.join(command)}\n  peer: {peer.__name__}"
                  f"{arguments[1:]}" + (f", torch.compile mode {args.mode}" if name in MODELS
                                        else f": torch.{name}" if name in SCANS else ""))
            continue
        rows.append(Row(text, tried(ours, *arguments), tried(peer, *arguments), source))
    if args.dry_run:
        return 0
    print(f"{device_name()}, {time.strftime('%Y-%m-%d', time.gmtime())}")
    print_table(rows)
    if not args.smoke:
        record(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
