#!/usr/bin/env python3
"""What a trained BiRN looks at: how strongly each patch of an image reaches <CLS>; with pictures.

    birn_maps.py DUMP --csv TABLE.csv [--block 6]
        of a --dump of train_causalrn --task images, for each image of its batch and each patch v:
            heat_v = | exp(mu(a_CLS) + mu(b_v)) |  over channels, as a share of the sum over patches
        a and b those of the block, the last if there are fewer, mu normalize. The same exp(a + b),
        summed over all v and normalized, must give the o of <CLS> that the dump has.
    birn_maps.py TABLE.csv --out PICTURE.png [--svg] [--optional] [--title TEXT]

A table has rows image,label,row,column,heat,pixels... Needs numpy, to draw matplotlib.
"""
import argparse
import math
import os
import re
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ref"))
from causalrn import Trouble, read_safetensors  # noqa: E402
import plot  # noqa: E402

HEADER = "image,label,row,column,heat"
NEEDED = ("targets", "acts.patches", "acts.a", "acts.b", "acts.o")
MARK = re.compile(r"# block=(\d+) patch=(\d+) channels=(\d+)$")


def normalize(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-8)


def dumped(path):
    """(tensors, side of a patch) of a dump of a BiRN that has seen images."""
    plot.regular(path)
    tensors, metadata = read_safetensors(path)
    if any(name not in tensors for name in NEEDED) or metadata.get("causal") != "no" or \
            metadata.get("prenorm") != "approx":
        raise Trouble(f"{path}: expected a --dump of train_causalrn --task images --model linear "
                      f"--causal no, with {', '.join(NEEDED)}")
    batch, patches, a, b, o = (tensors[name].shape for name in NEEDED)
    if len(a) != 4 or not a == b == o or not a[1:3] == patches[:2] == batch or batch[1] < 2 or \
            0 in a:
        raise Trouble(f"{path}: expected the shapes of one model and batch, got "
                      f"{', '.join(f'{name} {tensors[name].shape}' for name in NEEDED)}")
    return tensors, int(metadata["patch"])


def heats(tensors, layer, bound):
    """(B,P): of each patch the norm of what it adds to <CLS>'s sum, in shares of all of them."""
    a, b, o = (tensors[f"acts.{name}"][layer].astype(np.float64) for name in "abo")
    a, b = normalize(a[:, -1:]), normalize(b)
    added = np.exp(a + b)  # (B,T,H)
    want = o[:, -1]
    error = np.linalg.norm(normalize(added.mean(1)) - want) / max(np.linalg.norm(want), 1e-30)
    print(f"block {layer + 1}: what the tokens add gives <CLS>'s o to {error:.2g}")
    if not error < bound:
        raise Trouble(f"block {layer + 1}: what the tokens add does not give <CLS>'s o: "
                      f"{error:.3g}, expected below {bound:g}")
    heat = np.linalg.norm(added[:, :-1], axis=-1)
    return heat / heat.sum(1, keepdims=True)


def table(args):
    """The lines of the table of a dump."""
    tensors, patch = dumped(args.input)
    patches, L = tensors["acts.patches"][:, :-1], len(tensors["acts.a"])
    B, P, D = patches.shape
    side, channels, layer = math.isqrt(P), D // patch**2, min(args.block, L) - 1
    if side * side != P or channels * patch**2 != D:
        raise Trouble(f"{args.input}: expected square images, got {P} patches of {D} numbers")
    heat, labels = heats(tensors, layer, args.bound), tensors["targets"][:, -1]
    lines = [f"# block={layer + 1} patch={patch} channels={channels}", HEADER]
    for i in range(B):
        lines += [",".join([str(i), str(labels[i]), *map(str, divmod(v, side)),
                            f"{heat[i, v]:.4g}", *(f"{x:.3g}" for x in patches[i, v])])
                  for v in range(P)]
    return lines


def write_table(path, lines, dump):
    if os.path.exists(path) and os.path.samefile(path, dump):
        raise plot.Misuse(f"--csv {path}: expected a file of its own, got the dump")
    if os.path.exists(path):
        read_table(path)  # an older table may go, no other file
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(lines) + "\n")
    except OSError as e:
        raise Trouble(f"{path}: cannot write it: {e.strerror}")
    print(f"{path}: {len(lines) - 2} rows")


def read_table(path):
    """(block, images [(label, picture (side,side,channels), heat (rows,rows))]) of a table."""
    lines = plot.read(path).split("\n")
    mark = MARK.match(lines[0])
    if not mark or lines[1:2] != [HEADER]:
        raise Trouble(f"{path}: expected a table with the header {HEADER}")
    block, patch, channels = map(int, mark.groups())
    try:
        rows = np.array([[float(x) for x in line.split(",")] for line in lines[2:] if line])
        count = int(rows[:, 0].max()) + 1
        side = math.isqrt(len(rows) // count)
        rows = rows.reshape(count, side, side, 5 + patch**2 * channels)
    except (ValueError, IndexError) as e:
        raise Trouble(f"{path}: {e}")
    if not np.isfinite(rows).all():
        raise Trouble(f"{path}: expected finite numbers")
    pixels = rows[..., 5:].reshape(count, side, side, patch, patch, channels)
    pixels = pixels.transpose(0, 1, 3, 2, 4, 5).reshape(count, side * patch, side * patch, channels)
    low, high = (f(pixels, axis=(0, 1, 2)) for f in (np.min, np.max))
    pixels = (pixels - low) / np.maximum(high - low, 1e-30)
    return block, [(int(rows[i, 0, 0, 1]), pixels[i], rows[i, :, :, 4]) for i in range(count)]


def draw(plt, args):
    """Pairs of an image and its heat, four pairs a row."""
    block, images = read_table(args.input)
    wide = 2 * min(len(images), 4)
    high = (2 * len(images) + wide - 1) // wide
    figure, axes = plt.subplots(high, wide, figsize=(wide * 1.1, high * 1.25 + 0.5),
                                squeeze=False, layout="constrained")
    for cell in axes.flat:
        cell.set_axis_off()
    for i, (label, image, heat) in enumerate(images):
        left, right = axes[2 * i // wide][2 * i % wide:2 * i % wide + 2]
        if image.shape[2] == 3:
            left.imshow(image)
        else:
            left.imshow(image[..., 0], cmap="gray")
        left.set_title(f"class {label}", fontsize=7)
        right.imshow(heat, cmap="inferno")
        right.set_title(f"to {heat.max() * heat.size:.1f} x mean", fontsize=7)
    figure.suptitle(f"{args.title}\nblock {block}" if args.title else f"block {block}", fontsize=9)
    return figure


def save(args):
    try:
        import matplotlib
    except ImportError:
        read_table(args.input)
        print("no picture: matplotlib is missing; pip install matplotlib", file=sys.stderr)
        return 0 if args.optional else 1
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "seq.c", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt
    figure = draw(plt, args)
    for out in [args.out] + ([os.path.splitext(args.out)[0] + ".svg"] if args.svg else []):
        if os.path.exists(out) and os.path.samefile(out, args.input):
            raise plot.Misuse(f"--out {out}: expected a file of its own, got the table")
        try:
            figure.savefig(out, dpi=160, metadata={"Date": None} if out.endswith(".svg") else None)
        except (OSError, ValueError) as e:
            raise Trouble(f"{out}: cannot write it: {e}")
        print(out)
    return 0


def main(argv):
    p = plot.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("input", metavar="DUMP|TABLE.csv")
    p.add_argument("--csv", metavar="FILE", help="the table of a dump")
    p.add_argument("--block", type=plot.positive, default=6, metavar="N", help="default: 6")
    p.add_argument("--bound", type=plot.finite, default=1e-3, help="of <CLS>'s o, relative")
    p.add_argument("--out", metavar="FILE", help="the picture of a table")
    p.add_argument("--svg", action="store_true", help="also write the picture as FILE.svg")
    p.add_argument("--optional", action="store_true", help="without matplotlib, exit 0")
    p.add_argument("--title")
    args = p.parse_args(argv)
    if bool(args.csv) == bool(args.out):
        p.error("expected --csv or --out")
    try:
        if args.out:
            return save(args)
        write_table(args.csv, table(args), args.input)
    except (Trouble, plot.Trouble) as e:
        print(f"error: {e}", file=sys.stderr)
        return getattr(e, "code", 3)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
