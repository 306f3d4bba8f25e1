#!/usr/bin/env python3
"""What <CLS> reads of an image: heat maps of a BiRN beside its images, from a trainer's --dump.

    ./train_causalrn OPTIONS OF THE RUN --batch-size 8 --load CHECKPOINT --steps 0 --dump DUMP
    birn_maps.py DUMP --csv TABLE.csv [--out PICTURE.png] [--svg] [--layers 6] [--images 8]

In every layer, with a at <CLS> and b at every patch as the layer's pair norm leaves them, the heat
of patch v is the norm over channels of psi(mu(a_cls + b_v)), divided by its sum over the patches
[CausalRN paper, Fig. 8]. What the heat is made of, summed over all positions and normalised, must
be the layer's output at <CLS> in the dump. A table has rows what,layer,x,y,value: what is imageN
(pixels, no layer, a channel after another in y) or heatN, N from 0; layers count from 0. --layers
draws these, which count from 1: by default the last. Needs numpy, to draw matplotlib.
"""
import argparse
import math
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ref"))
from causalrn import (CHOICES, Trouble, Variant, dump_check, normalize, psi,  # noqa: E402
                      read_safetensors)
from gateloop_maps import picture, write_table  # noqa: E402


class Usage(Trouble):
    """An option that does not fit the dump."""


def dumped(path):
    """(tensors, variant, patch) of a dump of a BiRN that reads images."""
    tensors, metadata = read_safetensors(path)
    for name in ("acts.patches", "acts.a", "acts.b", "acts.o", "targets"):
        if name not in tensors:
            raise Trouble(f"{path}: no tensor {name}; expected a --dump of train_causalrn with "
                          "--task images")
    dump_check(path, metadata, {**CHOICES._asdict(), "causal": ("no",)})
    p, D = metadata.get("patch", ""), tensors["acts.patches"].shape[-1]
    if not p.isdigit() or not int(p) or D % int(p) ** 2:
        raise Trouble(f"{path}: metadata patch is {p!r}; expected a side of patches of {D} numbers")
    return tensors, Variant(*(metadata[field] for field in Variant._fields)), int(p)


def psi_of_cls(a, b, v):
    """psi (T,H) of the pairs of <CLS>, the last position, with all positions of an image."""
    if v.prenorm == "exact":
        return psi(normalize(a[-1] + b)[0], v.activation)
    if v.prenorm == "approx":
        return psi(normalize(a[-1])[0] + normalize(b)[0], v.activation)
    return psi(a[-1] + b, v.activation)


def heat_of(path, tensors, v, layer, image, bound):
    """The share (P) of every patch, and how far off the layer's output at <CLS> its parts are, of
    1; Trouble if that is not below the bound."""
    a, b, o = (tensors[name][layer, image].astype(np.float64)
               for name in ("acts.a", "acts.b", "acts.o"))
    e = psi_of_cls(a, b, v)
    got = normalize(e.sum(0) / np.abs(e.sum(0)).max())[0] if v.postnorm == "yes" else e.mean(0)
    error = np.linalg.norm(got - o[-1]) / max(np.linalg.norm(o[-1]), 1e-30)
    if not error < bound:
        raise Trouble(f"{path}: layer {layer + 1}, image {image}: the pairs of <CLS> do not give "
                      f"its o: {error:.3g}, expected below {bound:g}")
    heat = np.linalg.norm(e[:-1], axis=1)
    return heat / heat.sum(), error


def image_of(patches, p, rows):
    """An image (H,W,channels) from its patches (P,D), brought to 0 to 1."""
    columns, channels = len(patches) // rows, patches.shape[1] // (p * p)
    x = patches.reshape(rows, columns, p, p, channels).transpose(0, 2, 1, 3, 4)
    x = x.reshape(rows * p, columns * p, channels).astype(np.float64)
    return (x - x.min()) / max(x.max() - x.min(), 1e-30)


def grid_rows(args, P):
    """Rows of the grid of P patches."""
    rows = args.rows or math.isqrt(P)
    if P % rows or (not args.rows and rows * rows != P):
        what = f"do not make {rows} rows" if args.rows else "are no square"
        raise Usage(f"{args.dump}: {P} patches {what}; expected --rows, the rows of patches of "
                    "an image")
    return rows


def grid(values):
    """x, y and value of every cell of a matrix."""
    return [(x, y, value) for y, row in enumerate(values) for x, value in enumerate(row)]


def draw(plt, pictures, heats, layers, labels):
    """A column for each image: the image, and under it the heat of each layer."""
    figure, cells = plt.subplots(1 + len(layers), len(pictures), squeeze=False,
                                 figsize=(1.3 * len(pictures) + 0.4, 1.4 * (1 + len(layers))),
                                 layout="constrained")
    for n, image in enumerate(pictures):
        shown = image if image.shape[2] in (3, 4) else image[:, :, 0]
        cells[0][n].imshow(shown, cmap="gray", interpolation="nearest")
        cells[0][n].set_title(f"class {labels[n]}", fontsize=8)
        for axes, layer in zip(cells[1:, n], layers):
            axes.imshow(heats[n, layer], cmap="viridis", interpolation="nearest")
            axes.set_ylabel(f"layer {layer + 1}" if n == 0 else "")
        for axes in cells[:, n]:
            axes.set(xticks=[], yticks=[])
    return figure


def maps(args):
    tensors, v, p = dumped(args.dump)
    L, B = tensors["acts.a"].shape[:2]
    layers = [n - 1 for n in args.layers] if args.layers else [L - 1]
    if not all(0 <= layer < L for layer in layers):
        raise Usage(f"--layers: expected some of 1 to {L}")
    if args.images and args.images > B:
        raise Usage(f"--images {args.images}: {args.dump} has {B}; expected no more")
    rows = grid_rows(args, tensors["acts.patches"].shape[1] - 1)
    table, pictures, heats, worst = [], [], {}, 0
    for n in range(args.images or min(8, B)):
        pictures.append(image_of(tensors["acts.patches"][n, :-1], p, rows))
        flat = np.concatenate(pictures[n].transpose(2, 0, 1))
        table += [(f"image{n}", "", *cell) for cell in grid(flat)]
        for layer in range(L):
            heat, error = heat_of(args.dump, tensors, v, layer, n, args.bound)
            worst = max(worst, error)
            heats[n, layer] = heat.reshape(rows, -1)
            table += [(f"heat{n}", layer, *cell) for cell in grid(heats[n, layer])]
    print(f"{args.dump}: the pairs of <CLS> give its output to {worst:.2g}")
    write_table(args.csv, table, args.dump)
    labels = tensors["targets"][:, -1]
    if not args.out:
        return 0
    return picture(args, lambda plt: draw(plt, pictures, heats, layers, labels))


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump")
    parser.add_argument("--csv", required=True, metavar="FILE")
    parser.add_argument("--out", metavar="PICTURE")
    parser.add_argument("--svg", action="store_true", help="draw one beside it")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="to draw [the last]")
    parser.add_argument("--images", type=int, metavar="N", help="of the batch [8, or all]")
    parser.add_argument("--rows", type=int, metavar="N",
                        help="of patches, where an image is no square")
    parser.add_argument("--bound", type=float, default=1e-2, help="on the error of o, 1e-2")
    parser.add_argument("--optional", action="store_true", help="without matplotlib, exit 0")
    args = parser.parse_args(argv)
    for name in ("images", "rows"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if not 0 < args.bound < math.inf:
        parser.error(f"--bound: expected a number above 0, got {args.bound}")
    if args.out and not os.path.splitext(args.out)[1]:
        args.out += ".png"
    try:
        return maps(args)
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, Usage) else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
