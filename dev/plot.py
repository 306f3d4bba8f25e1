#!/usr/bin/env python3
"""Draw the curves of log.csv files: loss or accuracy against steps or seconds, as PNG and SVG.

    plot.py RUN... --out picture.png       a RUN is a directory with log.csv, or a CSV file
    plot.py RUN... --label A A B --group   one curve per label: the median of its runs (seeds) and a
                                           band from their minimum to their maximum
    plot.py RUN --thin 10 --out small.csv  a copy with every 10th training row, for committing

A log is `#` lines (configuration), the header step,split,loss,acc,lr,grad_norm,ms,tokens_per_s, and
rows. `--x seconds` adds up the ms of the training steps; where a log has no row for a step, the ms
of the next row that it has stand for it.
"""
import argparse
import bisect
import math
import os
import statistics
import sys

HEADER = "step,split,loss,acc,lr,grad_norm,ms,tokens_per_s"
COLUMNS = HEADER.split(",")
Y_AXIS = {"loss": "Loss (nats per token)", "acc": "Accuracy"}
X_AXIS = {"step": "Step", "seconds": "Time (s)"}
# Okabe and Ito's colours, which colour-blind readers tell apart; dashes for more than eight curves
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#999999")
DASHES = ("-", "--", "-.", ":")


class Trouble(Exception):
    """What stops the program: one line."""


def log_path(run):
    return os.path.join(run, "log.csv") if os.path.isdir(run) else run


def read_lines(path):
    """The lines of a log: (those up to and with the header, the rows)."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise Trouble(f"{path}: cannot read it: {getattr(e, 'strerror', None) or e}")
    if lines and lines[-1] == "":
        lines.pop()
    n = 0
    while n < len(lines) and lines[n].startswith("#"):
        n += 1
    if n == len(lines):
        raise Trouble(f"{path}: empty; expected the header {HEADER}")
    if lines[n] != HEADER:
        raise Trouble(f"{path}:{n + 1}: expected the header {HEADER}, got {lines[n]!r}")
    if n + 1 == len(lines):
        raise Trouble(f"{path}: no row below the header; has the run made a step?")
    return lines[:n + 1], lines[n + 1:]


def read_log(path):
    """The rows of a log: a dictionary column -> value each, split a string, the others numbers."""
    head, lines = read_lines(path)
    rows = []
    for n, line in enumerate(lines, len(head) + 1):
        fields = line.split(",")
        if len(fields) != len(COLUMNS):
            raise Trouble(f"{path}:{n}: expected {len(COLUMNS)} fields, got {len(fields)}")
        row = dict(zip(COLUMNS, fields))
        for name in COLUMNS:
            try:
                if name != "split":  # what a row does not know, say acc, may be left empty
                    row[name] = float(row[name]) if row[name] else math.nan
            except ValueError:
                raise Trouble(f"{path}:{n}: {name}: expected a number, got {row[name]!r}")
        if not math.isfinite(row["step"]):
            raise Trouble(f"{path}:{n}: step: expected a number, got {fields[0]!r}")
        rows.append(row)
    return rows


def curve(path, args):
    """The points xs, ys of a log that the arguments ask for."""
    xs, ys, seconds, last = [], [], 0.0, -1
    for row in read_log(path):
        if row["split"] == "train" and math.isfinite(row["ms"]):
            seconds += max(row["step"] - last, 0) * row["ms"] / 1000
            last = row["step"]
        if row["split"] == args.split and math.isfinite(row[args.y]):
            xs.append(seconds if args.x == "seconds" else row["step"])
            ys.append(row[args.y])
    if not xs:
        raise Trouble(f"{path}: no {args.y} of split {args.split}")
    return xs, smooth(ys, args.smooth)


def smooth(ys, n):
    """The mean of the up to n values that end at each."""
    return [statistics.fmean(ys[max(0, i + 1 - n):i + 1]) for i in range(len(ys))] if n > 1 else ys


def value_at(xs, ys, x):
    """The curve's value at x between its ends, on straight lines between its points."""
    i = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1) if len(xs) > 1 else 0
    if i == 0 or xs[i] == xs[i - 1]:
        return ys[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def band(curves):
    """xs, median, minimum and maximum of curves, over the range of x that all of them have."""
    low, high = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = sorted({x for xs, _ in curves for x in xs if low <= x <= high})
    if not grid:
        raise Trouble("runs of one label share no range of x, so they have no median; drop --group")
    values = [[value_at(xs, ys, x) for xs, ys in curves] for x in grid]
    return [grid] + [list(map(f, values)) for f in (statistics.median, min, max)]


def labels(args):
    """A label for each run: those given, or the runs' names."""
    if args.label and len(args.label) != len(args.runs):
        raise Trouble(f"--label: expected a name for each of the {len(args.runs)} runs, "
                      f"got {len(args.label)}")
    return args.label or [os.path.basename(os.path.normpath(run)) for run in args.runs]


def groups(args):
    """(label, xs, ys, low, high) of each curve to draw; low and high are None without a band."""
    named = {}
    for label, run in zip(labels(args), args.runs):
        named.setdefault(label, []).append(curve(log_path(run), args))
    for label, curves in named.items():
        if args.group and len(curves) > 1:
            yield [f"{label} (median of {len(curves)})"] + band(curves)
        else:
            for n, (xs, ys) in enumerate(curves):
                yield (label if n == 0 else None), xs, ys, None, None


def draw_curves(axes, curves):
    index = -1
    for label, xs, ys, low, high in curves:
        index += label is not None
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.2, label=label,
                  marker="o" if len(xs) == 1 else None, markersize=3)
        if low:
            axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def draw_hlines(axes, args):
    for hline in args.hline:
        value, _, label = hline.partition(":")
        try:
            y = float(value)
        except ValueError:
            raise Trouble(f"--hline: expected VALUE:LABEL, got {hline!r}")
        axes.axhline(y, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(label, (1, y), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", fontsize=8, color="0.35")


def draw_zoom(axes, curves, args):
    """A second panel with the curves between the two x of --zoom, fitted to what is seen there."""
    x0, x1 = args.zoom
    seen = [y for _, xs, ys, low, high in curves
            for x, *some in zip(xs, ys, low or ys, high or ys) if x0 <= x <= x1 for y in some]
    if not seen:
        raise Trouble(f"--zoom: no point between {x0:g} and {x1:g}")
    draw_curves(axes, curves)
    if args.logy:
        axes.set_yscale("log")
    margin = 0.05 * (max(seen) - min(seen)) or 0.01
    axes.set_xlim(x0, x1)
    if not args.logy:
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
    axes.set_title(f"{X_AXIS[args.x].split(' (')[0]} {x0:g} to {x1:g}", fontsize=9)


def draw(plt, args):
    curves = list(groups(args))
    panels = 2 if args.zoom else 1
    figure, axes = plt.subplots(1, panels, figsize=(5.6 * panels ** 0.75, 3.5), squeeze=False,
                                layout="constrained")
    main_axes = axes[0][0]
    draw_curves(main_axes, curves)
    draw_hlines(main_axes, args)
    if args.zoom:
        draw_zoom(axes[0][1], curves, args)
    if args.logy:
        main_axes.set_yscale("log")
    if args.xlim:
        main_axes.set_xlim(args.xlim)
    if args.ylim:
        main_axes.set_ylim(args.ylim)
    for a in axes[0]:
        a.spines[["top", "right"]].set_visible(False)
        a.grid(True, color="0.9", linewidth=0.6)
        a.set_axisbelow(True)
        a.set_xlabel(X_AXIS[args.x])
    y_axis = Y_AXIS[args.y] + (f", {args.split}" if args.split != "train" else "")
    main_axes.set_ylabel(y_axis + (f", mean of {args.smooth}" if args.smooth > 1 else ""))
    main_axes.legend(frameon=False, fontsize=8)
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    return figure


def thin(args):
    """Write a log with its first, its last, every N-th training row and all others (val)."""
    if len(args.runs) != 1:
        raise Trouble(f"--thin: expected one run, got {len(args.runs)}")
    path = log_path(args.runs[0])
    if os.path.exists(args.out) and os.path.samefile(path, args.out):
        raise Trouble(f"--out: {args.out} is the log itself; give another name")
    head, rows = read_lines(path)
    kept, trained = [], 0
    for i, (line, row) in enumerate(zip(rows, read_log(path))):
        train = row["split"] == "train"
        if not train or trained % args.thin == 0 or i in (0, len(rows) - 1):
            kept.append(line)
        trained += train
    note = f"# thinned by dev/plot.py: {len(kept)} of {len(rows)} rows"
    write(args.out, "\n".join(head[:-1] + [note, head[-1]] + kept) + "\n")
    print(f"{args.out}: {len(kept)} of {len(rows)} rows")


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
    except OSError as e:
        raise Trouble(f"{path}: cannot write it: {e.strerror}")


def positive(text):
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {n}")
    return n


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, or a CSV file")
    p.add_argument("--out", required=True, metavar="FILE", help="the picture (or the thinned CSV)")
    p.add_argument("--svg", action="store_true", help="also write the picture as FILE.svg")
    p.add_argument("--y", choices=Y_AXIS, default="loss")
    p.add_argument("--x", choices=X_AXIS, default="step")
    p.add_argument("--split", choices=("train", "val"), default="train", help="default: train")
    p.add_argument("--label", nargs="+", metavar="NAME", help="a name for each run")
    p.add_argument("--group", action="store_true", help="draw runs of one label as one curve")
    p.add_argument("--smooth", type=positive, default=1, metavar="N", help="mean of N points")
    p.add_argument("--title")
    p.add_argument("--logy", action="store_true", help="logarithmic y axis")
    p.add_argument("--xlim", nargs=2, type=float, metavar=("A", "B"))
    p.add_argument("--ylim", nargs=2, type=float, metavar=("A", "B"))
    p.add_argument("--zoom", nargs=2, type=float, metavar=("X0", "X1"), help="a second panel")
    p.add_argument("--hline", action="append", default=[], metavar="VALUE:LABEL",
                   help="a horizontal line; may be repeated")
    p.add_argument("--thin", type=positive, metavar="N", help="write every N-th row instead")
    p.add_argument("--optional", action="store_true", help="without matplotlib, exit 0")
    return p.parse_args(argv)


def main(argv):
    args = parse(argv)
    try:
        if args.thin:
            thin(args)
            return 0
        try:
            import matplotlib
        except ImportError:
            print("no picture: matplotlib is missing; pip install matplotlib", file=sys.stderr)
            return 0 if args.optional else 1
        matplotlib.use("Agg")
        matplotlib.rcParams.update({"font.size": 9, "axes.xmargin": 0.01,
                                    "svg.hashsalt": "seq.c", "svg.fonttype": "none"})
        import matplotlib.pyplot as plt
        figure = draw(plt, args)
        for out in [args.out] + ([os.path.splitext(args.out)[0] + ".svg"] if args.svg else []):
            undated = {"Date": None} if out.endswith(".svg") else None  # same curves, same bytes
            try:
                figure.savefig(out, dpi=160, metadata=undated)
            except (OSError, ValueError) as e:
                raise Trouble(f"{out}: cannot write it: {e}")
            print(out)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
