#!/usr/bin/env python3
"""Draw the curves of log.csv files: loss or accuracy against steps or seconds, as PNG and SVG.

    plot.py RUN... --out picture.png       a RUN is a directory with log.csv, or a CSV file
    plot.py RUN... --label A A B --group   one curve per label: the median of its runs (seeds) and a
                                           band from their minimum to their maximum
    plot.py RUN... --panel A A B           a panel for each name
    plot.py RUN... --points hidden --y acc the runs' final accuracy over an option of theirs; --y
                                           first_99: the first training step of accuracy >= 0.99
    plot.py RUN... --table                 print a row for each run; with --out the picture as well
    plot.py RUN --thin 10 --out small.csv  a copy with every 10th training row, for committing
    plot.py FILE... --x tokens --y acc     accuracy by tokens read, files of a trainer's --curve;
                                           with --table best and median of a label's runs
    plot.py TABLE.csv --columns            the second and the third column over the first; a first
                                           column called model: lines, a panel for each other column

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
Y_AXIS = {"loss": "Loss (nats per token)", "acc": "Accuracy", "first_99": "Steps to 99% accuracy"}
X_AXIS = {"step": "Step", "seconds": "Time (s)", "tokens": "Tokens read"}
LENGTHS = "tokens,sequences,accuracy"
OPTION_AXIS = {"string-size": "String size S", "hidden": "Hidden size H"}
# Okabe and Ito's colours, which colour-blind readers tell apart; dashes for more than eight curves
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#999999")
DASHES = ("-", "--", "-.", ":")


class Trouble(Exception):
    """What stops the program: one line. The data are wrong."""
    code = 3


class Misuse(Trouble):
    """The command line is wrong."""
    code = 2


def log_path(run):
    return os.path.join(run, "log.csv") if os.path.isdir(run) else run


def regular(path):
    """Trouble over what is there and no regular file: a pipe would wait."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Trouble(f"{path}: expected a file, got something else of that name")


def read(path):
    """The text of a file."""
    regular(path)
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise Trouble(f"{path}: cannot read it: {getattr(e, 'strerror', None) or e}")


def read_lines(path):
    """The lines of a log: (those up to and with the header, the rows)."""
    lines = read(path).split("\n")
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


def read_lengths(path):
    """(fields of the RESULT line in its comments, rows (tokens, sequences, accuracy)) of a file of
    --curve."""
    lines = read(path).split("\n")
    result = [line for line in lines if line.startswith("# RESULT ")]
    fields = dict(w.split("=", 1) for line in result for w in line.split() if "=" in w)
    body = [line for line in lines if line and not line.startswith("#")]
    if not body or body[0] != LENGTHS:
        raise Trouble(f"{path}: expected the header {LENGTHS}, got {body[0] if body else ''!r}")
    try:
        rows = [tuple(map(finite, line.split(","))) for line in body[1:]]
    except ValueError as e:
        raise Trouble(f"{path}: {e}")
    if not rows or any(len(row) != 3 for row in rows):
        raise Trouble(f"{path}: expected rows of {LENGTHS}")
    return fields, rows


def scaled(accuracy, chance):
    """0 for a guess, 1 for all right."""
    return (accuracy - chance) / (1 - chance)


def length_curve(path, args):
    """The points of a file of --curve: bins of --bin tokens, at the mean of what they hold."""
    bins = {}
    for tokens, sequences, accuracy in read_lengths(path)[1]:
        one = bins.setdefault((tokens - 1) // args.bin, [0, 0, 0])
        for i, x in enumerate((sequences, sequences * tokens, sequences * accuracy)):
            one[i] += x
    ordered = [bins[k] for k in sorted(bins)]
    return ([tokens / n for n, tokens, _ in ordered],
            [scaled(right / n, args.chance) for n, _, right in ordered])


def timed(rows):
    """(row, seconds of training up to and with it) of each row."""
    seconds, last = 0.0, -1
    for row in rows:
        if row["split"] == "train" and math.isfinite(row["ms"]):
            seconds += max(row["step"] - last, 0) * row["ms"] / 1000
            last = row["step"]
        yield row, seconds


def curve(path, args):
    """The points xs, ys of a log that the arguments ask for."""
    if args.x == "tokens":
        return length_curve(path, args)
    xs, ys = [], []
    for row, seconds in timed(read_log(path)):
        if row["split"] == args.split and math.isfinite(row[args.y]):
            xs.append(seconds if args.x == "seconds" else row["step"])
            ys.append(row[args.y])
    if not xs:
        raise Trouble(f"{path}: no {args.y} of split {args.split}")
    return xs, smooth(ys, args.smooth)


def summary(path):
    """What a run came to: its options; steps, first_99 (nan: never), ms (median), seconds of
    training; loss and acc on fresh sequences at its end, nan for a run that stopped before it."""
    head, _ = read_lines(path)
    options = dict(word.split("=", 1) for line in head for word in line.split() if "=" in word)
    rows = list(timed(read_log(path)))
    train = [row for row, _ in rows if row["split"] == "train"]
    if not train:
        raise Trouble(f"{path}: no training row")
    end = rows[-1][0] if rows[-1][0]["split"] == "val" else {"loss": math.nan, "acc": math.nan}
    return {"options": options, "steps": train[-1]["step"] + 1, "loss": end["loss"],
            "acc": end["acc"], "first_99": min((r["step"] for r in train if r["acc"] >= 0.99),
                                               default=math.nan),
            "ms": statistics.median(row["ms"] for row in train), "seconds": rows[-1][1]}


def print_table(args):
    cells = [("curve", "seed", "steps", "first 99%", "loss", "accuracy", "ms/step", "seconds")]
    columns = (("steps", ".0f"), ("first_99", ".0f"), ("loss", ".4f"), ("acc", ".4f"),
               ("ms", ".2f"), ("seconds", ".1f"))
    for label, run in zip(labels(args), args.runs):
        s = summary(log_path(run))
        cells.append((label, s["options"].get("seed", "-"))
                     + tuple(f"{s[k]:{f}}" if math.isfinite(s[k]) else "-" for k, f in columns))
    print_cells(cells, 1)


def print_cells(cells, left):
    """The first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print(*(c.ljust(w) if i < left else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths))))


def score_of(path, args):
    """(score, that of the best constant answer, accuracy after each of --at tokens) of a run."""
    fields, rows = read_lengths(path)
    try:
        score = float(fields["scaled" if args.chance else "accuracy"])
        constant = scaled(float(fields["constant"]), args.chance)
    except (KeyError, ValueError):
        raise Trouble(f"{path}: no RESULT with accuracy, scaled and constant in its comments")
    by_tokens = {tokens: accuracy for tokens, _, accuracy in rows}
    return [score, constant] + [by_tokens.get(float(n), math.nan) for n in args.at]


def print_scores(args):
    """A row for each panel and label, of its runs: scores' best, median and median deviation from
    it; the constant answer's and the accuracies of --at as medians. To --tsv as well."""
    cells = [["task", "model", "runs", "best", "median", "MAD"]
             + ([] if args.chance == 0 else ["constant"])
             + [f"after {n}" for n in args.at] + ["each run"]]
    for panel, labels_of, runs in panels(args):
        named = {}
        for label, run in zip(labels_of, runs):
            named.setdefault(label, []).append(score_of(run, args))
        for label, scores in named.items():
            each, constant, *at = zip(*scores)
            median = statistics.median(each)
            deviation = statistics.median(abs(x - median) for x in each)
            numbers = [max(each), median, deviation]
            numbers += ([] if args.chance == 0 else [statistics.median(constant)])
            numbers += map(statistics.median, at)
            cells.append([panel or "-", label, str(len(each))] + [f"{x:.3f}" for x in numbers]
                         + [" ".join(f"{x:.3f}" for x in each)])
    print_cells(cells, 2)
    if args.tsv:
        write(args.tsv, "".join("\t".join(line) + "\n" for line in cells), args.runs)


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
        raise Misuse(f"--label: expected a name for each of the {len(args.runs)} runs, "
                      f"got {len(args.label)}")
    return args.label or [os.path.basename(os.path.normpath(run)) for run in args.runs]


def panels(args):
    """(name, labels, runs) of each panel; without --panel one of no name."""
    if args.panel and len(args.panel) != len(args.runs):
        raise Misuse(f"--panel: expected a name for each of the {len(args.runs)} runs, "
                      f"got {len(args.panel)}")
    named = {}
    for panel, label, run in zip(args.panel or [None] * len(args.runs), labels(args), args.runs):
        named.setdefault(panel, []).append((label, run))
    return [(panel, *zip(*members)) for panel, members in named.items()]


def groups(labels_of, runs, args):
    """(label, xs, ys, low, high) of each curve to draw; low and high are None without a band."""
    named = {}
    for label, run in zip(labels_of, runs):
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


def option_value(s, args, run):
    text = s["options"].get(args.points)
    try:
        return float(text)
    except (TypeError, ValueError):
        raise Trouble(f"{run}: --points {args.points}: expected a number among its options, "
                      f"got {text}")


def plain(axis):
    """Ticks of a logarithmic axis at 1, 2, 5, 10, ..., without exponents."""
    axis.set_major_locator(axis.get_major_locator().__class__(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")


def draw_points(axes, args):
    """A mark for each run, a line through each label's medians. Runs that never came to 99% stand
    above the line of the steps they had."""
    named, ticks, cap = {}, set(), 0
    for label, run in zip(labels(args), args.runs):
        s = summary(log_path(run))
        x = option_value(s, args, run)
        if args.y != "first_99" and math.isnan(s[args.y]):
            print(f"left out: {run}: no final {args.y}", file=sys.stderr)
            continue
        ticks.add(x)
        cap = max(cap, float(s["options"].get("steps", s["steps"])))
        named.setdefault(label, {}).setdefault(x, []).append(s[args.y])
    if not ticks:
        raise Trouble(f"--points: no run has a final {args.y}")
    missing = any(math.isnan(y) for group in named.values() for ys in group.values() for y in ys)
    above = cap * (1.35 if args.logy else 1.07)
    for n, (label, group) in enumerate(named.items()):
        aside = 2 ** (0.1 * (n - (len(named) - 1) / 2))  # so that curves do not hide each other
        look = {"color": COLOURS[n % len(COLOURS)], "linestyle": "none", "markersize": 4.5}
        seen = [(x * aside, y) for x, ys in group.items() for y in ys if not math.isnan(y)]
        never = {x * aside: (sum(map(math.isnan, ys)), len(ys)) for x, ys in group.items()
                 if any(map(math.isnan, ys))}
        axes.plot(*zip(*seen) if seen else ([], []), marker="o", fillstyle="none", **look)
        axes.plot(list(never), [above] * len(never), marker="^", **look)
        for x, (some, of) in never.items():
            if some < of:
                axes.annotate(f"{some}/{of}", (x, above), xytext=(0, 5), ha="center", fontsize=6,
                              textcoords="offset points", color=look["color"])
        medians = {x: statistics.median(math.inf if math.isnan(y) else y for y in ys)
                   for x, ys in sorted(group.items())}
        axes.plot([x * aside for x in medians],
                  [y if math.isfinite(y) else math.nan for y in medians.values()],
                  color=look["color"], marker="_", markersize=9, linewidth=1.2,
                  label=f"{label} (median of {max(map(len, group.values()))})")
    if missing:
        axes.axhline(cap, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(f"not within {cap:.0f} steps", (0, cap), xytext=(4, 2), fontsize=7,
                      xycoords=("axes fraction", "data"), textcoords="offset points", color="0.35")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
    if args.logy:
        plain(axes.yaxis)
    axes.minorticks_off()
    axes.set_xlim(min(ticks) / 1.4, max(ticks) * 1.4)
    if args.y == "first_99" and not args.logy:
        axes.set_ylim(bottom=0)


def draw_hlines(axes, args):
    for hline in args.hline:
        value, _, label = hline.partition(":")
        try:
            y = finite(value)
        except ValueError:
            raise Misuse(f"--hline: expected VALUE:LABEL, got {hline!r}")
        axes.axhline(y, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(label, (1, y), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", fontsize=8, color="0.35")


def draw_vlines(axes, args):
    for vline in args.vline:
        value, _, label = vline.partition(":")
        try:
            x = finite(value)
        except ValueError:
            raise Misuse(f"--vline: expected VALUE:LABEL, got {vline!r}")
        axes.axvline(x, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(label, (x, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
                      textcoords="offset points", fontsize=8, color="0.35")


def read_columns(path):
    """(names, rows) of a CSV with a header: of each row its label ("" where the first column is x,
    else what is in it), x, and the numbers after it; an empty field is nan."""
    lines = [line.split(",") for line in read(path).split("\n")
             if line and not line.startswith("#")]
    if not lines:
        raise Trouble(f"{path}: expected a header and rows, got nothing")
    names, *rows = lines
    labelled = names[0] in ("model", "curve")
    if len(names) < 2 + labelled or any(len(row) != len(names) for row in rows) or not rows:
        raise Trouble(f"{path}: expected a header of two or more columns, and as many in each row")
    table = []
    for row in rows:
        label, x, *ys = row if labelled else [""] + row
        try:
            x = finite(x)
        except ValueError:  # a name
            pass
        try:
            table.append((label, x, [finite(y) if y else math.nan for y in ys]))
        except ValueError:
            raise Trouble(f"{path}: expected numbers after x, got {','.join(row)}")
    if len({type(x) for _, x, _ in table}) > 1:
        raise Trouble(f"{path}: {names[labelled]}: expected numbers or names, got both")
    return names[labelled:], table


def draw_columns(plt, args):
    """The picture of a CSV of columns: x, logarithmic, and two others, on the left and the right
    axis, both from 0 up; or, where the first is called model, its lines, a panel for each column
    after x, which may be names."""
    if len(args.runs) != 1:
        raise Misuse(f"--columns: expected one file, got {len(args.runs)}")
    names, table = read_columns(args.runs[0])
    if table[0][0]:
        return draw_models(plt, names, table, args)
    if len(names) != 3 or isinstance(table[0][1], str) or \
            any(math.isnan(y) for *_, ys in table for y in ys):
        raise Trouble(f"{args.runs[0]}: expected three columns of numbers, or one called model")
    xs, columns = [x for _, x, _ in table], list(zip(*(ys for _, _, ys in table)))
    figure, left = plt.subplots(figsize=(5.6, 3.5), layout="constrained")
    for axes, name, ys, colour in zip((left, left.twinx()), names[1:], columns, COLOURS):
        axes.plot(xs, ys, color=colour, marker="o", markersize=3, linewidth=1.2)
        axes.set_ylabel(name, color=colour)
        axes.set_ylim(0, 1.25 * max(ys))
        axes.spines["top"].set_visible(False)
    ticks(left, xs)
    left.grid(True, color="0.9", linewidth=0.6)
    left.set_xlabel(names[0])
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    return figure


def ticks(axes, xs):
    """A logarithmic x axis with a tick at each x."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))], fontsize=7)
    axes.minorticks_off()


def draw_models(plt, names, table, args):
    """A panel for each column of numbers, a line in it for each label, over a logarithmic x if all
    are above 0; names stand side by side, the labels' marks beside each other, without lines."""
    n, named = len(names) - 1, isinstance(table[0][1], str)
    figure, axes = plt.subplots(1, n, figsize=((5.6 if named else 4.2) * n ** 0.85, 3.7),
                                squeeze=False, layout="constrained",
                                sharey=args.ylim is not None)
    labels_of, xs = list(dict.fromkeys(row[0] for row in table)), [row[1] for row in table]
    places = {x: i for i, x in enumerate(dict.fromkeys(xs))}
    marked = named or min(xs) > 0
    for column, a in enumerate(axes[0]):
        for i, label in enumerate(labels_of):
            aside = 0.7 * (i + 0.5) / len(labels_of) - 0.35
            points = [(places[x] + aside if named else x, ys[column])
                      for of, x, ys in table if of == label and not math.isnan(ys[column])]
            a.plot(*zip(*points) if points else ([], []), color=COLOURS[i % len(COLOURS)],
                   label=label, marker="osD^vP*Xh"[i % 9] if marked else None, markersize=4,
                   linewidth=1.2,
                   fillstyle="full" if i < len(COLOURS) else "none",
                   linestyle="none" if named else DASHES[i // len(COLOURS) % len(DASHES)])
        if args.logy:
            a.set_yscale("log")
            plain(a.yaxis)
        if args.xlim:
            a.set_xlim(args.xlim)
        if args.ylim:
            a.set_ylim(args.ylim)
        if named:
            a.set_xticks(range(len(places)), places, fontsize=8)
        else:
            if marked:
                ticks(a, xs)
            a.set_xlabel(args.xlabel or names[0])
        a.minorticks_off()
        a.set_title(names[column + 1], fontsize=9)
        a.spines[["top", "right"]].set_visible(False)
        a.grid(True, color="0.9", linewidth=0.6)
        a.set_axisbelow(True)
    if args.ylabel:
        axes[0][0].set_ylabel(args.ylabel)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", fontsize=7,
                  ncols=min(len(labels_of), 2 * n + 1), frameon=False)
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    return figure


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
    parts = panels(args)
    if args.zoom and (args.panel or args.points) or args.points and args.panel:
        raise Misuse("--zoom, --panel, --points: expected one of them")
    if args.x == "tokens" and (args.y != "acc" or args.points):
        raise Misuse("--x tokens: expected --y acc, and no --points")
    if args.y == "first_99" and not args.points:
        raise Misuse("--y first_99: a run has one, it makes no curve; add --points OPTION")
    n = len(parts) + bool(args.zoom)
    figure, axes = plt.subplots(1, n, figsize=(5.6 * n ** 0.75, 3.5), squeeze=False,
                                sharey=bool(args.panel), layout="constrained")
    axes = axes[0]
    for a, (name, labels_of, runs) in zip(axes, parts):
        if args.logy:
            a.set_yscale("log")
        if args.points:
            draw_points(a, args)
        else:
            curves = list(groups(labels_of, runs, args))
            draw_curves(a, curves)
        draw_hlines(a, args)
        draw_vlines(a, args)
        if args.xlim:
            a.set_xlim(args.xlim)
        if args.ylim:
            a.set_ylim(args.ylim)
        a.legend(frameon=False, fontsize=8)
        if name:
            a.set_title(name, fontsize=9)
    if args.zoom:
        draw_zoom(axes[1], curves, args)
    for a in axes:
        a.spines[["top", "right"]].set_visible(False)
        a.grid(True, color="0.9", linewidth=0.6)
        a.set_axisbelow(True)
        a.set_xlabel(args.xlabel or (OPTION_AXIS.get(args.points, args.points) if args.points
                                     else X_AXIS[args.x]))
    split = "" if args.y == "first_99" else "val" if args.points else args.split
    y_axis = Y_AXIS[args.y] + (f", {split}" if split not in ("", "train") else "")
    if args.x == "tokens":
        y_axis = "Scaled accuracy" if args.chance else "Fraction right so far"
    if split == "val_bits" and args.y == "loss":
        y_axis = "Held-out loss (bits per character)"
    y_axis = args.ylabel or y_axis
    axes[0].set_ylabel(y_axis + (f", mean of {args.smooth}" if args.smooth > 1 else ""))
    if args.title:
        figure.suptitle(args.title, fontsize=10)
    return figure


def thin(args):
    """Write a log with every N-th training row, the first, the last, the first of accuracy 0.99,
    and all others (val)."""
    if len(args.runs) != 1:
        raise Misuse(f"--thin: expected one run, got {len(args.runs)}")
    path = log_path(args.runs[0])
    head, rows = read_lines(path)
    logged = read_log(path)
    train = [i for i, row in enumerate(logged) if row["split"] == "train"]
    drop = set(train) - set(train[::args.thin] + train[-1:])
    drop.discard(next((i for i in train if logged[i]["acc"] >= 0.99), None))
    kept = [line for i, line in enumerate(rows) if i not in drop]
    note = f"# thinned by dev/plot.py: {len(kept)} of {len(rows)} rows"
    write(args.out, "\n".join(head[:-1] + [note, head[-1]] + kept) + "\n", [path])
    print(f"{args.out}: {len(kept)} of {len(rows)} rows")


def write(path, text, inputs):
    """The text to a file, which is none of the inputs, by whatever name."""
    if any(os.path.exists(path) and os.path.samefile(path, other) for other in inputs):
        raise Misuse(f"{path}: expected a file of its own to write, got an input")
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
    except OSError as e:
        raise Trouble(f"{path}: cannot write it: {e.strerror}")


def finite(text):
    x = float(text)
    if not math.isfinite(x):
        raise ValueError
    return x


def positive(text):
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {n}")
    return n


def fraction(text):
    x = float(text)
    if not 0 <= x < 1:
        raise argparse.ArgumentTypeError(f"expected 0 to below 1, got {text}")
    return x


class Parser(argparse.ArgumentParser):
    """Errors of usage in the form of all others: an error line, a hint, exit code 2."""

    def error(self, message):
        print(f"error: {message}\nhint: --help shows what there is", file=sys.stderr)
        sys.exit(2)


def parse(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, or a CSV file")
    p.add_argument("--out", metavar="FILE", help="the picture (or the thinned CSV)")
    p.add_argument("--svg", action="store_true", help="also write the picture as FILE.svg")
    p.add_argument("--y", choices=Y_AXIS, default="loss")
    p.add_argument("--x", choices=X_AXIS, default="step")
    p.add_argument("--split", choices=("train", "val", "val_bits"), default="train",
                   help="default: train; val_bits: the loss on text in bits per character")
    p.add_argument("--label", nargs="+", metavar="NAME", help="a name for each run")
    p.add_argument("--panel", nargs="+", metavar="NAME", help="a panel for each run")
    p.add_argument("--points", metavar="OPTION", help="ends of runs over a numeric option")
    p.add_argument("--table", action="store_true", help="print a row for each run")
    p.add_argument("--group", action="store_true", help="draw runs of one label as one curve")
    p.add_argument("--smooth", type=positive, default=1, metavar="N", help="mean of N points")
    p.add_argument("--title")
    p.add_argument("--xlabel", metavar="TEXT", help="what x is, in place of the usual words")
    p.add_argument("--ylabel", metavar="TEXT", help="what y is")
    p.add_argument("--logy", action="store_true", help="logarithmic y axis")
    p.add_argument("--xlim", nargs=2, type=finite, metavar=("A", "B"))
    p.add_argument("--ylim", nargs=2, type=finite, metavar=("A", "B"))
    p.add_argument("--zoom", nargs=2, type=finite, metavar=("X0", "X1"), help="a second panel")
    p.add_argument("--hline", action="append", default=[], metavar="VALUE:LABEL",
                   help="a horizontal line; may be repeated")
    p.add_argument("--vline", action="append", default=[], metavar="VALUE:LABEL",
                   help="a vertical line; may be repeated")
    p.add_argument("--chance", type=fraction, default=0, metavar="C",
                   help="--x tokens: accuracy of a guess, which becomes 0")
    p.add_argument("--bin", type=positive, default=1, metavar="N", help="--x tokens: their width")
    p.add_argument("--at", type=positive, nargs="+", default=[], metavar="N",
                   help="--x tokens --table: accuracies after N tokens as well")
    p.add_argument("--tsv", metavar="FILE", help="--x tokens --table: write it there too")
    p.add_argument("--columns", action="store_true", help="draw the columns of a table")
    p.add_argument("--thin", type=positive, metavar="N", help="write every N-th row instead")
    p.add_argument("--optional", action="store_true", help="without matplotlib, exit 0")
    args = p.parse_args(argv)
    if args.x != "tokens" and (args.tsv or args.at or args.chance or args.bin > 1):
        p.error("--tsv, --at, --chance and --bin are for --x tokens")
    if not args.out and (args.thin or not args.table):
        p.error("the following arguments are required: --out")
    return args


def main(argv):
    args = parse(argv)
    try:
        if args.thin:
            thin(args)
            return 0
        if args.table:
            (print_scores if args.x == "tokens" else print_table)(args)
        if not args.out:
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
        figure = (draw_columns if args.columns else draw)(plt, args)
        for out in [args.out] + ([os.path.splitext(args.out)[0] + ".svg"] if args.svg else []):
            undated = {"Date": None} if out.endswith(".svg") else None  # same curves, same bytes
            try:
                figure.savefig(out, dpi=160, metadata=undated)
            except (OSError, ValueError) as e:
                raise Trouble(f"{out}: cannot write it: {e}")
            print(out)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
