#!/usr/bin/env python3
"""What a trained GateLoop does with its sequences: pictures of a trainer's --dump, through tables.

    gateloop_maps.py transitions DUMP --mark TOKEN --csv TABLE.csv
        the transitions a of every layer, token and channel: shares of a grid of the complex plane,
        of |a| and of the angle; the mean |a| at each distance from the tokens of number TOKEN,
        places beyond another of them left out
    gateloop_maps.py attention DUMP --mark TOKEN --csv TABLE.csv [--tokens 64]
        surrogate attention maps of the first tokens of the sequence with the most TOKENs there: the
        mean |A| over channels, and A of the channel that looks furthest back; held against the y of
        the dump, which they must give
    gateloop_maps.py draw TABLE.csv... --label NAME... --out PICTURE.png [--svg] [--optional]

A table has rows what,layer,x,y,value; heads have one channel. Needs numpy, to draw matplotlib.
"""
import argparse
import math
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ref"))
from causalrn import Trouble, read_safetensors  # noqa: E402
from gateloop import maps_of, variant_of  # noqa: E402

HEADER = "what,layer,x,y,value"
CELLS, BINS, BEFORE, AFTER = 80, 50, 8, 24
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")


def dumped(path):
    """(tensors, metadata) of a dump of a GateLoop with its activations."""
    tensors, metadata = read_safetensors(path)
    for name in ("inputs", "acts.qkvg", "acts.a", "acts.y"):
        if name not in tensors:
            raise Trouble(f"{path}: no tensor {name}; expected a --dump of train_gateloop")
    if metadata.get("head-size") != "1":
        raise Trouble(f"{path}: expected --head-size 1, got {metadata.get('head-size')}")
    return tensors, metadata


def shares(what, layer, values, bins, low, high):
    """Rows of the density of values between low and high."""
    density, edges = np.histogram(values, bins, (low, high), density=True)
    return [(what, layer, x, "", v) for x, v in zip((edges[1:] + edges[:-1]) / 2, density)]


def around(layer, r, marks):
    """Rows of the mean of r (B,T) by the distance from a mark (B,T), no other mark between."""
    sums, counts = np.zeros(BEFORE + AFTER + 1), np.zeros(BEFORE + AFTER + 1)
    for b, at in np.argwhere(marks):
        for step in (-1, 1):
            for off in range(0, BEFORE + 1) if step < 0 else range(1, AFTER + 1):
                t = at + step * off
                if not 0 <= t < r.shape[1] or off and marks[b, t]:
                    break
                sums[BEFORE + step * off] += r[b, t]
                counts[BEFORE + step * off] += 1
    return [("around", layer, i - BEFORE, "", s / n)
            for i, (s, n) in enumerate(zip(sums, counts)) if n]


def transitions(args):
    tensors, _ = dumped(args.dump)
    rows, marks = [], tensors["inputs"] == args.mark
    for layer, a in enumerate(tensors["acts.a"].astype(np.float64)):
        re, im = np.split(a, 2, -1)
        grid, edges, _ = np.histogram2d(re.ravel(), im.ravel(), CELLS, [[-1.0001, 1.0001]] * 2)
        middles = (edges[1:] + edges[:-1]) / 2
        rows += [("plane", layer, middles[i], middles[j], grid[i, j] / re.size)
                 for i, j in np.argwhere(grid)]
        r, angle = np.hypot(re, im), np.arctan2(im, re)
        rows += shares("size", layer, r.ravel(), BINS, 0, 1.000001)
        rows += shares("angle", layer, angle[r > 0].ravel(), BINS, -math.pi - 1e-6, math.pi + 1e-6)
        rows += around(layer, r.mean(-1), marks)
    return rows


def attention(args):
    tensors, metadata = dumped(args.dump)
    N = min(args.tokens, tensors["inputs"].shape[1])
    b = int((tensors["inputs"][:, :N] == args.mark).sum(1).argmax())
    part = {name: tensors[name][:, b:b + 1, :N] for name in ("acts.qkvg", "acts.a", "acts.y")}
    rows = [("mark", "", t, "", 1) for t in np.flatnonzero(tensors["inputs"][b, :N] == args.mark)]
    back = np.maximum(np.arange(N)[:, None] - np.arange(N), 0)
    for layer, A in enumerate(maps_of(part, variant_of(args.dump, metadata))):
        v = np.split(part["acts.qkvg"][layer, 0].astype(np.float64), 4, -1)[2]
        y = part["acts.y"][layer, 0]
        error = np.linalg.norm(np.einsum("clm,mc->lc", A, v) - y) / max(np.linalg.norm(y), 1e-30)
        print(f"{args.dump}: layer {layer}: the maps give y to {error:.2g}")
        if not error < args.bound:
            raise Trouble(f"{args.dump}: layer {layer}: its maps do not give its y: {error:.3g}, "
                          f"expected below {args.bound:g}")
        size = np.abs(A)
        far = int(((size * back).sum((1, 2)) / np.maximum(size.sum((1, 2)), 1e-30)).argmax())
        for what, map_of in (("mean", size.mean(0)), (f"channel {far}", A[far])):
            least = 1e-3 * np.abs(map_of).max()
            rows += [(what, layer, m, l, map_of[l, m]) for l in range(N) for m in range(l + 1)
                     if abs(map_of[l, m]) > least]
    return rows


def number(x):
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def table_lines(path):
    """The rows of a table, as text, after its header; of another file Trouble."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = [line for line in f.read().split("\n") if line and not line.startswith("#")]
    except OSError as e:
        raise Trouble(f"{path}: cannot read it: {e.strerror}")
    except UnicodeDecodeError:
        lines = []
    if not lines or lines[0] != HEADER:
        raise Trouble(f"{path}: expected a table with the header {HEADER}")
    return lines[1:]


def write_table(path, rows, dump):
    if os.path.isfile(path) and os.path.getsize(path):
        table_lines(path)  # an older table may go, no other file
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write(f"# {os.path.basename(os.path.dirname(dump)) or dump}\n{HEADER}\n")
            f.writelines(",".join(map(number, row)) + "\n" for row in rows)
    except OSError as e:
        raise Trouble(f"{path}: cannot write it: {e.strerror}")
    print(f"{path}: {len(rows)} rows")


def read_table(path):
    """{(what, layer): array (n,3) of x, y, value}, what in the order of the file."""
    found = {}
    try:
        for line in table_lines(path):
            what, layer, *numbers = line.split(",")
            x, y, value = (float(n) if n else 0.0 for n in numbers)
            if not all(map(math.isfinite, (x, y, value))):
                raise ValueError("expected finite numbers")
            if what == "plane" and not (abs(x) <= 1 and abs(y) <= 1 and value > 0):
                raise ValueError("expected a share above 0 of a cell within -1 to 1")
            found.setdefault((what, int(layer) if layer else -1), []).append((x, y, value))
    except ValueError as e:
        raise Trouble(f"{path}: {line!r}: {e}")
    if not any(what in ("plane", "mean") for what, _ in found):
        raise Trouble(f"{path}: expected rows \"plane\" or \"mean\", got none")
    return {key: np.array(rows) for key, rows in found.items()}


def draw_plane(axes, rows, plt):
    grid = np.full((CELLS, CELLS), np.nan)
    for x, y, value in rows:
        i, j = (int((c + 1.0001) / 2.0002 * CELLS) for c in (x, y))
        grid[j, i] = math.log10(value)
    axes.imshow(grid, origin="lower", extent=(-1, 1, -1, 1), cmap="viridis", vmin=-5, vmax=-1,
                interpolation="nearest")
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.5", linewidth=0.8))
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), xticks=(-1, 0, 1), yticks=(-1, 0, 1))


def draw_transitions(plt, tables, labels, marks):
    """A row for each table: the plane of its first and last layer, and lines by layer."""
    figure, grid = plt.subplots(len(tables), 5, figsize=(13, 2.7 * len(tables)), squeeze=False,
                                layout="constrained")
    for axes, table, label, mark in zip(grid, tables, labels, marks):
        layers = sorted({layer for what, layer in table if what == "plane"})
        for a, layer in zip(axes, (layers[0], layers[-1])):
            draw_plane(a, table["plane", layer], plt)
            a.set_title(f"layer {layer + 1}", fontsize=9)
        axes[0].set_ylabel(label)
        for a, what, x, y in zip(axes[2:], ("size", "angle", "around"),
                                 ("|a|", "angle of a", f"tokens after {mark}"),
                                 ("density", "density", "mean |a|")):
            for n, layer in enumerate(layers):
                rows = table.get((what, layer))
                if rows is not None:
                    a.plot(rows[:, 0], rows[:, 2], color=COLOURS[n % len(COLOURS)], linewidth=1.1,
                           label=f"layer {layer + 1}")
            a.set(xlabel=x, ylabel=y)
            a.set_yscale("linear" if what == "around" else "log")
            a.grid(True, color="0.9", linewidth=0.6)
            a.spines[["top", "right"]].set_visible(False)
        axes[4].axvline(0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
        axes[2].legend(frameon=False, fontsize=7)
    return figure


def draw_attention(plt, tables, labels, marks):
    """A row for each table: of its first and last layer the mean |A|, and a channel's A."""
    figure, grid = plt.subplots(len(tables), 4, figsize=(13, 3.3 * len(tables)), squeeze=False,
                                layout="constrained")
    for axes, table, label, mark in zip(grid, tables, labels, marks):
        layers = sorted({layer for what, layer in table if what == "mean"})
        keys = [key for layer in (layers[0], layers[-1]) for key in table if key[1] == layer]
        for a, (what, layer) in zip(axes, keys):
            rows = table[what, layer]
            N = int(max(t[:, 1].max() for (w, _), t in table.items() if w != "mark")) + 1
            values = np.full((N, N), np.nan)
            values[rows[:, 1].astype(int), rows[:, 0].astype(int)] = rows[:, 2]
            most = np.nanmax(np.abs(values))
            mean = what == "mean"
            image = a.imshow(np.log10(values / most) if mean else values / most,
                             cmap="viridis" if mean else "RdBu_r", vmin=-3 if mean else -1,
                             vmax=0 if mean else 1, interpolation="nearest")
            figure.colorbar(image, ax=a, shrink=0.8)
            for t, _, _ in table.get(("mark", -1), ()):
                a.axvline(t, color="0.6", linewidth=0.5)
                a.axhline(t, color="0.6", linewidth=0.5)
            a.set_title(f"layer {layer + 1}: " + ("log10 mean |A|" if mean else f"A, {what}")
                        + " / largest", fontsize=9)
            a.set_xlabel(f"reads token (lines: {mark})", fontsize=8)
        axes[0].set_ylabel(f"{label}\nat token")
    return figure


def picture(args, drawn):
    """The figure drawn(pyplot) in the files that --out and --svg name; without matplotlib none.
    Returns the exit code."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is missing; pip install matplotlib", file=sys.stderr)
        return 0 if args.optional else 1
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 8, "svg.hashsalt": "seq.c", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt
    figure = drawn(plt)
    for out in [args.out] + ([os.path.splitext(args.out)[0] + ".svg"] if args.svg else []):
        try:
            figure.savefig(out, dpi=160, metadata={"Date": None} if out.endswith("svg") else None)
        except OSError as e:
            raise Trouble(f"{out}: cannot write it: {e.strerror}")
        except ValueError as e:  # an ending that names no format
            raise Trouble(f"{out}: {e}")
        print(out)
    return 0


def draw(args):
    tables = [read_table(path) for path in args.dump]
    for name in ("label", "marks"):
        if len(getattr(args, name)) != len(tables):
            raise Trouble(f"--{name}: expected {len(tables)} names, one a table")
    kinds = {any(what == "plane" for what, _ in table) for table in tables}
    if len(kinds) != 1:
        raise Trouble("draw: expected tables of one kind")
    draw_kind = draw_transitions if kinds == {True} else draw_attention
    return picture(args, lambda plt: draw_kind(plt, tables, args.label, args.marks))


def main(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = p.add_subparsers(dest="kind", required=True)
    for kind in ("transitions", "attention"):
        one = kinds.add_parser(kind)
        one.add_argument("dump")
        one.add_argument("--mark", type=int, required=True, metavar="TOKEN")
        one.add_argument("--csv", required=True, metavar="FILE")
        if kind == "attention":
            one.add_argument("--tokens", type=int, default=64, metavar="N")
            one.add_argument("--bound", type=float, default=1e-4, help="on the error of y, 1e-4")
    one = kinds.add_parser("draw")
    one.add_argument("dump", nargs="+", metavar="TABLE")
    one.add_argument("--label", nargs="+", default=[])
    one.add_argument("--marks", nargs="+", default=[], help="what the marked token is, one a table")
    one.add_argument("--out", required=True)
    one.add_argument("--svg", action="store_true")
    one.add_argument("--optional", action="store_true", help="without matplotlib, exit 0")
    args = p.parse_args(argv)
    if args.kind == "attention" and args.tokens < 1:
        p.error(f"--tokens: expected at least 1, got {args.tokens}")
    try:
        if args.kind == "draw":
            return draw(args)
        write_table(args.csv, {"transitions": transitions, "attention": attention}[args.kind](args),
                    args.dump)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
