#!/usr/bin/env python3
"""Where the eigenvalues of Mamba's steps lie: the numbers a that multiply its states.

    mamba_eigenvalues.py DUMP... --label NAME... --csv TABLE.csv
        of each --dump of train_mamba the density of a between -1 and 1, by layer, over all
        tokens, channels and states; a is made from the dump's dt and A_log, and its last states
        are made again with it: they must be the dump's. Prints shares by layer, of a below 0 among
        them. plot.py --columns draws the table. Needs numpy.
"""
import argparse
import os
import re
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ref"))
from causalrn import Trouble, read_safetensors  # noqa: E402
import plot  # noqa: E402

BINS = 80
NEEDED = ("params.A_log", "acts.dt", "acts.bc", "acts.u", "acts.h")


def dumped(path):
    """(tensors, whether a is in [-1,1]) of a dump of Mamba with its activations."""
    plot.regular(path)
    tensors, metadata = read_safetensors(path)
    kind = metadata.get("eigenvalues")
    if any(name not in tensors for name in NEEDED) or kind not in ("nonneg", "signed") or \
            metadata.get("architecture") != "mamba":
        raise Trouble(f"{path}: expected a --dump of train_mamba with {', '.join(NEEDED)}")
    shapes = [tensors[name].shape for name in NEEDED]
    if [len(shape) for shape in shapes] != [3, 4, 4, 4, 4]:
        raise Trouble(f"{path}: expected tensors of 3, 4, 4, 4, 4 dimensions: {', '.join(NEEDED)}")
    (L, H, S), (_, B, T, _) = shapes[:2]
    want = [(L, H, S), (L, B, T, H), (L, B, T, 2 * S), (L, B, T, H), (L, B, S, H)]
    if shapes != want or 0 in (L, H, S, B, T):
        raise Trouble(f"{path}: expected the shapes of one model and batch, got "
                      f"{', '.join(f'{name} {shape}' for name, shape in zip(NEEDED, shapes))}")
    return tensors, kind == "signed"


def layer_counts(tensors, layer, signed):
    """(counts of a in BINS between -1 and 1, relative error of the last states) of a layer."""
    A = -np.exp(tensors["params.A_log"][layer].astype(np.float64)).T  # (S,H)
    dt, bc, u = (tensors[name][layer].astype(np.float64)
                 for name in ("acts.dt", "acts.bc", "acts.u"))
    S, counts = A.shape[0], np.zeros(BINS)
    h = np.zeros((dt.shape[0],) + A.shape)
    for t in range(dt.shape[1]):
        step = dt[:, t, None, :]
        a = np.exp(step * A)
        a = 2 * a - 1 if signed else a
        counts += np.histogram(a, BINS, (-1, 1))[0]
        h = a * h + step * bc[:, t, :S, None] * u[:, t, None, :]
    want = tensors["acts.h"][layer]
    return counts, np.linalg.norm(h - want) / max(np.linalg.norm(want), 1e-30)


def densities(path, label, bound):
    """An array (layers, BINS) of densities; prints a line for each layer."""
    tensors, signed = dumped(path)
    found = []
    for layer in range(len(tensors["acts.dt"])):
        counts, error = layer_counts(tensors, layer, signed)
        if not error < bound:
            raise Trouble(f"{path}: layer {layer + 1}: its eigenvalues do not give its last "
                          f"states: {error:.3g}, expected below {bound:g}")
        share = counts / counts.sum()
        cut = [share[:BINS * k // 20].sum() for k in (1, 10, 19)]
        print(f"RESULT eigenvalues=\"{label}\" layer={layer + 1} below_-0.9={cut[0]:.4f} "
              f"below_0={cut[1]:.4f} above_0.9={1 - cut[2]:.4f} states_to={error:.1e}")
        found.append(share * BINS / 2)
    return np.array(found)


def main(argv):
    p = plot.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dumps", nargs="+", metavar="DUMP")
    p.add_argument("--label", nargs="+", required=True, metavar="NAME")
    p.add_argument("--csv", required=True, metavar="FILE")
    p.add_argument("--bound", type=float, default=1e-4, help="on the error of states, 1e-4")
    args = p.parse_args(argv)
    if len(args.label) != len(args.dumps) or re.search('[,"\n]', "".join(args.label)):
        p.error(f"--label: expected {len(args.dumps)} names without commas, quotes and line ends")
    if not 0 < args.bound < 1:
        p.error(f"--bound: expected a number between 0 and 1, got {args.bound:g}")
    try:
        tables = [densities(path, label, args.bound)
                  for path, label in zip(args.dumps, args.label)]
        layers = {len(table) for table in tables}
        if len(layers) != 1:
            raise Trouble("expected dumps with the same number of layers, got "
                          f"{' and '.join(map(str, sorted(layers)))}")
        lines = ["model,Eigenvalue," + ",".join(f"layer {n + 1}" for n in range(layers.pop()))]
        for label, table in zip(args.label, tables):
            for i, row in enumerate(table.T):
                x = (2 * i + 1) / BINS - 1
                lines.append(f"{label},{x:.6g}," + ",".join(f"{y:.4g}" if y else "" for y in row))
        plot.write(args.csv, "\n".join(lines) + "\n", args.dumps)
    except (Trouble, plot.Trouble) as e:
        print(f"error: {e}", file=sys.stderr)
        return getattr(e, "code", 3)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
