#!/usr/bin/env python3
"""rounded.py train_MODEL.c OUT.c: the oracle with the rounding of train_MODEL_gpu.

    python3 dev/rounded.py train_deltanet.c build/rounded_deltanet.c
    gcc -std=gnu11 -O3 -march=native -fno-math-errno -fopenmp-simd -fopenmp -I. \\
        build/rounded_deltanet.c -o build/rounded_deltanet -lm

For all but causalrn. What the GPU's program stores in bf16 is rounded to bf16 as soon as it is
made: the weights that products read, and activations and their gradients but for the residual
stream, beta, u, S, the logits of gates and transitions, Mamba's y and the output's. All arithmetic
stays what it was. GPT-2's stream is rounded. So is that of gateloop's --wiring paper, where norms
make it, but for the embedding, whose copy for products is. For --steps 0 --dump: the weights
themselves are rounded.
"""

import os
import re
import sys

ROUND = """
// near: the bf16 nearest to x, ties to even; what is not finite stays.
static inline float near(float x)
{
    union { float f; uint32_t u; } y = {x};
    y.u = (y.u + 0x7fff + (y.u >> 16 & 1)) & 0xffff0000;
    return isfinite(x) ? y.f : x;
}

// rounded: x (n), NULL for none, = the bf16 nearest to each.
static void rounded(float *x, size_t n)
{
    for (size_t i = 0; i < n && x; i++)
        x[i] = near(x[i]);
}

"""
NARROW = "if (paper) {{ memcpy({0}, u, N * C * sizeof *u); rounded({0}, N * C); u = {0}; }}"
# By model and function: calls, and what stands before and after them, {i} an argument. Of several
# beginnings of a call the longest counts.
MATMUL = {"matmul_forward(": ("", "rounded({0}, {4} * {6});"),
          "matmul_backward(": ("", "rounded({0}, {6} * {7});"),
          "crossentropy(": ("", "rounded({2}, N * m->V);")}
DELTANET = {
    "model_forward": {
        "batch_check(": ("", "".join(f"rounded(all.{name}, {n});" for name, n in (
            ("qkv_w", "L * 3 * C * C"), ("beta_w", "L * NH * C"), ("proj_w", "L * C * C"),
            ("gu_w", "L * 2 * H * C"), ("down_w", "L * C * H"), ("head_w", "m->V * C")))),
        "rmsnorm_forward(": ("", "rounded({0}, {3} * ({4}));"),
        "matmul_forward(": MATMUL["matmul_forward("],
        "activate_forward(": ("", "rounded({0}, N * 3 * C);"),
        "delta_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(k.mid": ("", ""), "matmul_forward(next": ("", ""),
        "swiglu_forward(": ("", "rounded({0}, {2} * {3});"),
        "matmul_forward(acts.logits": ("", ""),
        "crossentropy(": MATMUL["crossentropy("]},
    "model_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "rmsnorm_backward(": ("", "rounded({0}, {5} * ({6}));"),
        "swiglu_backward(": ("", "rounded({0}, 2 * {3} * {4});"),
        "delta_backward(": ("", "rounded({0}, N * 3 * C);"),
        # W_beta's part is still to be added
        "matmul_backward(d.dr, g.qkv_w": ("rounded(dp, N * 3 * C); rounded(d.db, N * NH);", "")}}
GATELOOP = {
    "block_forward": {
        "layernorm_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(": MATMUL["matmul_forward("],
        "matmul_forward(k.qkvg": (NARROW.replace("{0}", "m->dacts.dr"),
                                  "rounded(k.qkvg, N * 4 * C);"),
        "matmul_forward(k.gate": ("", ""),
        "normalize_forward(": ("", "rounded({0}, N * C);"),
        "output_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(sum, k.z": ("", ""),
        "matmul_forward(sum, k.h": ("rounded(k.h, N * F);", "")},
    "head_forward": {"matmul_forward(logits": ("rounded(last, N * m->C);", "")},
    "model_forward": {
        "batch_check(": ("", "".join(f"rounded(m->params.{name}, {n});" for name, n in (
            ("qkvg_w", "m->L * 4 * C * C"), ("qkvg_b", "m->L * 4 * C"),
            ("gate_w", "m->L * m->gates * C"), ("out_w", "m->L * C * C"),
            ("fc_w", "m->L * m->F * C"), ("fc_b", "m->L * m->F"), ("down_w", "m->L * C * m->F"),
            ("head_w", "m->V * C")))),
        "crossentropy(": MATMUL["crossentropy("]},
    "block_backward": {
        "layernorm_backward(": ("", "rounded({0}, N * C);"),
        "matmul_backward(": MATMUL["matmul_backward("],
        "matmul_backward(du, g.fc_w": ("rounded(d.dh, N * F);", "rounded(du, N * C);"),
        "output_backward(": ("", "rounded({0}, N * C * (G > 0));"), # else it stays in registers
        "normalize_backward(": ("", "rounded({0}, N * C);"),
        "gateloop_backward(": ("", "rounded({0}, N * 4 * C);"),
        "gates_backward(": ("", "rounded({0}, N * m->gates);"),
        # the gates' part is still to be added
        "matmul_backward(du, g.qkvg_w": (NARROW.replace("{0}", "d.dy"), ""),
        "matmul_backward(du, g.gate_w": ("", "rounded(du, N * C);")},
    "model_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "layernorm_backward(": ("", "rounded({0}, N * C);")}}
# hidden_kernel, of these widths, takes GELU and its slope of the sum, not of its rounded copy.
FUSED = "if (C != 64 && C != 128 && C != 192) "
GPT2 = {
    "model_forward": {
        # a tied head reads a rounded copy; of images positions come first, then what is added
        "batch_check(": ("", "".join(f"rounded(all.{name}, {n});" for name, n in (
            ("qkv_w", "L * 3 * C * C"), ("qkv_b", "L * 3 * C"), ("proj_w", "L * C * C"),
            ("proj_b", "L * C"), ("fc_w", "L * 4 * C * C"), ("fc_b", "L * 4 * C"),
            ("out_w", "L * 4 * C * C"), ("out_b", "L * C"), ("head_w", "m->V * C"),
            ("patch_w", "C * m->batch.D"))) +
            "rounded(m->batch.patches, N * m->batch.D);"
            "rounded(m->batch.D ? all.wpe : NULL, (T - 1) * C);"),
        "input_forward(": ("", "rounded({0}, N * C);"),
        "norm_forward(": ("", "rounded({0}, {4} * {5});"),
        "matmul_forward(": MATMUL["matmul_forward("],
        "linear_attention_forward(": ("", "rounded({0}, N * C);"),
        "attention_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(k.h": ("", ""),
        "gelu_forward(": (FUSED + "rounded({1}, {2});", "rounded({1}, {2}); rounded({0}, {2});"),
        "matmul_forward(acts.logits": ("rounded(all.head_w ? NULL : all.wte, m->V * C);", ""),
        "crossentropy(": MATMUL["crossentropy("]},
    "model_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "matmul_backward(d.dh": ("", FUSED + "rounded(d.dh, N * 4 * C);"),
        "gelu_backward(": ("", "rounded({0}, {3});"),
        "norm_backward(": ("", "rounded({0}, {6} * {7});"),
        "linear_attention_backward(": ("", "rounded({0}, N * 3 * C);"),
        "attention_backward(": ("", "rounded({0}, N * 3 * C);")}}
WITHOUT = "for (size_t i = 0; i < N * H; i++) k.raw[i]"
MAMBA = {
    "block_forward": {
        "rmsnorm_forward(": ("", "rounded({0}, {3} * ({4}));"),
        "matmul_forward(": MATMUL["matmul_forward("],
        "silu_forward(": ("", "rounded({0}, {2});"),
        # stored without its bias
        "matmul_forward(k.raw": ("", f"{WITHOUT} -= p.dt_b[i % H]; rounded(k.raw, N * H); "
                                     f"{WITHOUT} += p.dt_b[i % H];"),
        "gate_forward(": ("", "rounded({0}, {3} * {4});"),
        "matmul_forward(next": ("", "")},
    "model_forward": {
        "batch_check(": ("", "".join(f"rounded(m->params.{name}, {n});" for name, n in (
            ("in_w", "m->L * 2 * m->H * C"), ("x_w", "m->L * (m->R + 2 * m->S) * m->H"),
            ("dt_w", "m->L * m->H * m->R"), ("out_w", "m->L * C * m->H"),
            ("head_w", "m->V * C")))),
        "matmul_forward(acts.logits": ("rounded({1}, N * C);", ""),
        "crossentropy(": MATMUL["crossentropy("]},
    "block_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "scan_backward(": ("", "rounded(d.du, N * H); rounded(d.dbc, N * 2 * S);"),
        "dt_backward(": ("", "rounded({0}, {3});"),
        "matmul_backward(d.du, g.x_w, ": ("", ""), # B's and C's part is still to be added
        "conv_backward(": ("", "rounded({0}, N * 2 * H);"),
        "rmsnorm_backward(": ("", "rounded({0}, {5} * ({6}));")},
    "model_backward": {"matmul_backward(": MATMUL["matmul_backward("]}}
# What the recurrence gives is rounded before the augmentation's part of dq, dk and dv, which the
# oracle has made before, is added.
ASIDE = ("float *own = (float *)alloc_zero(N * (P + K), sizeof *own, \"own\");"
         "float *own_k = own + N * P;"
         "memcpy(own, d.dqv, N * P * sizeof *own); memset(d.dqv, 0, N * P * sizeof *own);"
         "memcpy(own_k, d.dk, N * K * sizeof *own); memset(d.dk, 0, N * K * sizeof *own);")
ADDED = ("for (size_t i = 0; i < N * P; i++) d.dqv[i] = near(near(d.dqv[i]) + own[i]);"
         "for (size_t i = 0; i < N * K; i++) d.dk[i] = near(d.dk[i]) + own_k[i];"
         "free(own);")
METALA = {
    "block_forward": {
        "normalize_forward(": ("", "rounded({0}, N * C);"),
        "conv_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(": MATMUL["matmul_forward("],
        "matmul_forward(p.low_w ?": ("", "rounded(p.low_w ? k.k : NULL, N * K);"),
        "matmul_forward(k.z": ("", ""),
        "gates_forward(": ("", "rounded(p.low_w ? NULL : k.k, N * K);"),
        "gla_forward(": ("", "rounded({0}, N * C);"),
        "gated_forward(": ("", "rounded({0}, {4} * {5});"),
        "matmul_forward(k.mid": ("", ""), "matmul_forward(next": ("", "")},
    "model_forward": {
        "batch_check(": ("", "".join(f"rounded(m->params.{name}, m->L * {n});" for name, n in (
            ("qv_w", "m->P * C"), ("gate_w", "C * C"), ("gate_b", "C"), ("a_w", "m->K * C"),
            ("low_w", "RANK * C"), ("up_w", "m->K * RANK"), ("out_w", "C * C"),
            ("gu_w", "2 * m->H * C"), ("down_w", "C * m->H"))) +
            "rounded(m->params.head_w, m->V * C);"),
        "normalize_forward(": ("", "rounded({0}, N * C);"),
        "matmul_forward(acts.logits": ("", ""),
        "crossentropy(": MATMUL["crossentropy("]},
    "block_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "gated_backward(d.dgu": ("", "rounded({0}, N * 2 * H);"),
        "gated_backward(d.dp": ("", "rounded({0}, N * C);"), # n's stays in registers
        "normalize_backward(": ("", "rounded({0}, N * C);"),
        "read_backward(": ("", "rounded({0}, N * C);"),
        "gla_backward(": (ASIDE, ADDED),
        "gates_backward(": ("", "rounded({0}, N * K); rounded(p.low_w ? d.dk : NULL, N * K);"),
        # three parts of one product
        "matmul_backward(d.dxc, g.qv_w": ("", ""), "matmul_backward(d.dxc, g.a_w": ("", ""),
        "conv_backward(": ("", "rounded({0}, N * C);")},
    "model_backward": {
        "matmul_backward(": MATMUL["matmul_backward("],
        "normalize_backward(": ("", "rounded({0}, N * C);")}}
MODELS = {"train_deltanet.c": DELTANET, "train_gateloop.c": GATELOOP, "train_gpt2.c": GPT2,
          "train_mamba.c": MAMBA, "train_metala.c": METALA}
# By model and function: what is read as it is stored, and how it stands then.
NORMALIZED = ("(x[i] - mean) * rstd", "near((x[i] - mean) * rstd)")
STORED = {"train_gpt2.c": {
    "normalize_row_backward": NORMALIZED,
    "phi": ("x > 0 ? x + 1 : e", "near(x > 0 ? x + 1 : e)")}, "train_metala.c": {
    "normalize_row_backward": NORMALIZED,
    "read_backward": ("dqv[v + j] = a * e;", "dqv[v + j] = a * near(do_j) * r * (1 - r);")}}
CALL = re.compile(r"(?:m->loss = )?\b(\w+\(([^;]*))\);")


def fail(code, text):
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


def position(text, part, start=0):
    """Where the part stands in the oracle."""
    at = text.find(part, start)
    return at if at >= 0 else fail(3, f"the oracle: expected {part.strip()!r} in it")


def extent(text, function):
    """Where a function of the oracle starts and ends."""
    found = re.search(rf"\nstatic (inline )?(void|float) {function}\([^;]*?\)\n{{", text)
    start = found.start() if found else fail(3, f"the oracle: expected {function}() in it")
    return start, position(text, "\n}\n", start)


def swapped(text, function, old, new):
    """The text with all of `old` in one function as `new`."""
    start, end = extent(text, function)
    position(text[:end], old, start)
    return text[:start] + text[start:end].replace(old, new) + text[end:]


def body(text, function, rules):
    """The text with the calls of one function among roundings."""
    start, end = extent(text, function)
    seen = set()

    def call(match):
        made = re.sub(r"\s+", " ", match[1])
        rule = max((r for r in rules if made.startswith(r)), key=len, default=None)
        if rule is None:
            return match[0]
        seen.add(rule)
        args = made.split("(", 1)[1].split(", ")
        before, after = (part.format(*args) for part in rules[rule])
        return f"{{ {before} {match[0]} {after} }}"

    changed = CALL.sub(call, text[start:end])
    if seen != set(rules):
        fail(3, f"{function}: no call {', '.join(sorted(set(rules) - seen))}; expected one")
    return text[:start] + changed + text[end:]


def main(argv):
    if len(argv) != 3 or not argv[2]:
        fail(2, f"rounded.py: expected two files, train_MODEL.c OUT.c, got {argv[1:]}")
    if os.path.basename(argv[1]) not in MODELS:
        fail(2, f"{argv[1]}: expected an oracle with rules here: {', '.join(MODELS)}")
    if os.path.exists(argv[2]) and os.path.realpath(argv[1]) == os.path.realpath(argv[2]):
        fail(2, f"{argv[2]}: expected a file of its own to write, got the oracle")
    try:
        with open(argv[1], encoding="utf-8") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        fail(3, f"{argv[1]}: cannot read it: {getattr(e, 'strerror', None) or e}")
    model = MODELS[os.path.basename(argv[1])]
    for function, rules in model.items():
        text = body(text, function, rules)
    for function, swap in STORED.get(os.path.basename(argv[1]), {}).items():
        text = swapped(text, function, *swap)
    at = position(text, "// " + "-" * 96) # the first section
    try:
        with open(argv[2], "w", encoding="utf-8") as f:
            f.write(text[:at] + ROUND.lstrip("\n") + text[at:])
    except OSError as e:
        fail(3, f"{argv[2]}: cannot write it: {e.strerror}")


if __name__ == "__main__":
    main(sys.argv)
