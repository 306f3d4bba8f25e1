#!/usr/bin/env python3
"""Tables of the runs of mqar.sh, mqar_hard.sh and mad.sh: of each model the better rate.

    recall.py RUN.csv... --x channels --y accuracy --tsv FILE --csv FILE
        prints a row for each model, problem and width, and writes it to --tsv: the better rate, and
        medians of all runs at that rate. Better is the higher median of the first word of --y over
        the seeds that all rates have, of equals the one with fewer steps. --csv is what plot.py
        --columns draws: x is the width, with a column for each problem; with --x task x is the
        problem, with a column for each word of --y
    recall.py RUN.csv... --better
        prints only the better rate; the runs are of one model, problem and width

A RUN.csv is a thinned log with the run's RESULT and parameters in its comments, as common.sh writes
them, and its name FIGURE-MODEL.PROBLEM.cWIDTH.RATE-seedN.csv.
"""
import argparse
import os
import re
import statistics
import sys

from plot import Parser, Trouble, finite, print_cells, read, write

NAME = re.compile(r"[^-]+-([^,]+)\.([^.]+)\.c0*(\d+)\.(.+)-seed(\d+)\.csv")
FIELDS = ("accuracy", "macro", "micro", "steps", "parameters", "ms_per_step")
ORDER = ("transformer", "linear-transformer", "causalrn", "linear-causalrn", "deltanet", "gateloop",
         "metala", "gla", "mamba")
MQAR = re.compile(r"t0*(\d+)p(\d+)")


def read_run(path):
    """((model, problem, width), rate, seed, values of FIELDS); values None: the run has no
    RESULT, since it stopped over a number that is not finite."""
    name = NAME.fullmatch(os.path.basename(path))
    if not name:
        raise Trouble(f"{path}: expected a name FIGURE-MODEL.PROBLEM.cWIDTH.RATE-seedN.csv")
    model, problem, width, rate, seed = name.groups()
    comments = [line for line in read(path).split("\n") if line.startswith("# ")]
    key = (model, problem, int(width))
    if not any(line.startswith("# RESULT ") for line in comments):
        if not any(line.startswith("# parameters=") for line in comments):
            raise Trouble(f"{path}: expected the run's RESULT or parameters in its comments")
        return key, rate, int(seed), None
    words = dict(word.split("=", 1) for line in comments
                 if line.startswith(("# RESULT ", "# parameters="))
                 for word in line[2:].split() if "=" in word)
    try:
        return key, rate, int(seed), {field: finite(words[field]) for field in FIELDS}
    except (KeyError, ValueError) as e:
        raise Trouble(f"{path}: expected numbers {', '.join(FIELDS)} in its comments: {e}")


def read_runs(paths):
    """{(model, problem, width): {rate: {seed: values}}}, models in the order of ORDER."""
    found = {}
    for key, rate, seed, values in map(read_run, paths):
        found.setdefault(key, {}).setdefault(rate, {})[seed] = values
    rank = {model: i for i, model in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda of: (rank.get(of[0][0], len(rank)),) + of[0]))


def better(rates, field):
    """The rate with the higher median of a field over the seeds that all rates have."""
    shared = set.intersection(*(set(runs) for runs in rates.values()))
    if not shared:
        raise Trouble("the rates of a model share no seed; expected one at least")

    def merit(rate):
        runs = [rates[rate][seed] for seed in shared if rates[rate][seed]]
        if len(runs) < len(shared):
            return (-1, 0)  # one stopped
        return tuple(statistics.median(sign * run[of] for run in runs)
                     for sign, of in ((1, field), (-1, "steps")))
    return max(rates, key=merit)


def rows_of(found, field):
    """Of each key (key, rate, number of runs, medians of FIELDS, the field of each run); medians
    None: a run stopped."""
    for key, rates in found.items():
        rate = better(rates, field)
        runs = [rates[rate][seed] for seed in sorted(rates[rate])]
        if None in runs:
            yield key, rate, len(runs), None, "stopped"
            continue
        yield (key, rate, len(runs), {of: statistics.median(run[of] for run in runs)
                                      for of in FIELDS},
               " ".join(f"{run[field]:.4f}" for run in runs))


def columns(rows, x, ys):
    """The lines of the table that plot.py draws, each a list of cells."""
    if x == "task":
        words = {"macro": "Accuracy: mean over tokens", "micro": "Accuracy: over all targets",
                 "accuracy": "Accuracy: mean over sequences"}
        keys = list(dict.fromkeys((model, width) for (model, _, width), *_ in rows))
        several = len({width for _, width in keys}) > 1
        yield ["model", "task"] + [words[y] for y in ys]
        for model, width in keys:
            for (of, problem, at), _, _, values, _ in rows:
                if (of, at) == (model, width) and values:
                    yield ([f"{model} C={width}" if several else model, problem]
                           + [f"{values[y]:.4f}" for y in ys])
        return
    problems = sorted({problem for (_, problem, _), *_ in rows})
    titles = [MQAR.sub(r"\2 pairs in \1 tokens", problem) for problem in problems]
    yield ["model", "Channels C"] + titles
    at = {key: values for key, _, _, values, _ in rows}
    for model, width in dict.fromkeys((model, width) for model, _, width in at):
        cells = [at.get((model, problem, width)) for problem in problems]
        yield [model, str(width)] + [f"{cell[ys[0]]:.4f}" if cell else "" for cell in cells]


def table(rows, field):
    """The lines of the table that is printed, each a list of cells."""
    yield ["model", "problem", "C", "rate", "runs", "accuracy", "macro", "micro", "steps",
           "parameters", "ms/step", f"{field} of each"]
    for (model, problem, width), rate, n, values, each in rows:
        numbers = ["-"] * 6 if values is None else [
            f"{values['accuracy']:.4f}", f"{values['macro']:.4f}", f"{values['micro']:.4f}",
            f"{values['steps']:.0f}", f"{values['parameters']:.0f}", f"{values['ms_per_step']:.2f}"]
        yield [model, problem, str(width), rate, str(n)] + numbers + [each]


def main(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN.csv")
    p.add_argument("--x", choices=("channels", "task"), default="channels")
    p.add_argument("--y", default="accuracy", help="words of accuracy, macro, micro")
    p.add_argument("--tsv", metavar="FILE")
    p.add_argument("--csv", metavar="FILE")
    p.add_argument("--better", action="store_true")
    args = p.parse_args(argv)
    ys = args.y.split()
    if not ys or not set(ys) <= {"accuracy", "macro", "micro"}:
        p.error(f"--y: expected words of accuracy, macro, micro, got {args.y!r}")
    try:
        found = read_runs(args.runs)
        if args.better:
            if len(found) != 1:
                raise Trouble(f"--better: expected runs of one model and width, got {len(found)}")
            print(better(*found.values(), ys[0]))
            return 0
        rows = list(rows_of(found, ys[0]))
        cells = list(table(rows, ys[0]))
        print_cells(cells, 2)
        if args.tsv:
            write(args.tsv, "".join("\t".join(line) + "\n" for line in cells), args.runs)
        if args.csv:
            write(args.csv, "".join(",".join(line) + "\n"
                                    for line in columns(rows, args.x, ys)), args.runs)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
