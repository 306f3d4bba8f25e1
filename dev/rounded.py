#!/usr/bin/env python3
"""rounded.py train_deltanet.c OUT.c: the oracle with the rounding of train_deltanet_gpu.

    python3 dev/rounded.py train_deltanet.c build/rounded_deltanet.c
    gcc -std=gnu11 -O3 -march=native -fno-math-errno -fopenmp-simd -fopenmp -I. \\
        build/rounded_deltanet.c -o build/rounded_deltanet -lm

What the GPU's program stores in bf16 is rounded to bf16 as soon as it is made: the weights that
products read, and activations and their gradients but for the residual stream, beta, u, S and the
logits. All arithmetic stays what it was. For --steps 0 --dump: the weights themselves are rounded.
"""

import re
import sys

ROUND = """
// rounded: x (n) = the nearest bf16, ties to even; what is not finite stays.
static void rounded(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        union { float f; uint32_t u; } y = {x[i]};
        y.u = (y.u + 0x7fff + (y.u >> 16 & 1)) & 0xffff0000;
        x[i] = isfinite(x[i]) ? y.f : x[i];
    }
}

"""
WEIGHTS = {"qkv_w": "L * 3 * C * C", "beta_w": "L * NH * C", "proj_w": "L * C * C",
           "gu_w": "L * 2 * H * C", "down_w": "L * C * H", "head_w": "m->V * C"}
# A call's output and its size, from its arguments.
FORWARD = {"rmsnorm_forward": ("{0}", "{3} * ({4})"), "matmul_forward": ("{0}", "{4} * {6}"),
           "activate_forward": ("{0}", "N * 3 * C"), "delta_forward": ("{0}", "N * C"),
           "swiglu_forward": ("{0}", "{2} * {3}"),
           "crossentropy": ("m->dacts.dlogits", "N * m->V")}
BACKWARD = {"rmsnorm_backward": ("{0}", "{5} * ({6})"), "matmul_backward": ("{0}", "{6} * {7}"),
            "swiglu_backward": ("{0}", "2 * {3} * {4}"), "delta_backward": ("{0}", "N * 3 * C")}
CALL = re.compile(r"(?:m->loss = )?\b(\w+)\(([^;]*)\);")


def call(match, outputs):
    """A call of model_forward or model_backward, and the rounding of what it has made."""
    name, args = match[1], re.sub(r"\s+", " ", match[2]).split(", ")
    if name == "batch_check":
        return match[0] + "".join(f"rounded(all.{w}, {n});" for w, n in WEIGHTS.items())
    if name == "matmul_backward" and args[5] == "p.qkv_w": # W_beta's part is still to be added
        return "rounded(dp, N * 3 * C); rounded(d.db, N * NH); " + match[0]
    residual = name == "matmul_forward" and args[-1] == "1"
    if name not in outputs or residual or args[0] == "acts.logits":
        return match[0]
    out, size = (part.format(*args) for part in outputs[name])
    return f"{{ {match[0]} rounded({out}, {size}); }}"


def body(text, function, outputs):
    """The text with the calls of one function followed by roundings."""
    start = text.index(f"static void {function}(Model *m)\n")
    end = text.index("\n}\n", start)
    for name in outputs:
        if f"{name}(" not in text[start:end]:
            raise SystemExit(f"error: {function}: no call of {name}; expected one")
    return text[:start] + CALL.sub(lambda m: call(m, outputs), text[start:end]) + text[end:]


def main(argv):
    if len(argv) != 3:
        raise SystemExit("usage: rounded.py train_deltanet.c OUT.c")
    with open(argv[1], encoding="utf-8") as f:
        text = f.read()
    text = body(body(text, "model_forward", FORWARD), "model_backward", BACKWARD)
    at = text.index("// model_forward: ")
    with open(argv[2], "w", encoding="utf-8") as f:
        f.write(text[:at] + ROUND.lstrip("\n") + text[at:])


if __name__ == "__main__":
    main(sys.argv)
