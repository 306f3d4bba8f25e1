#!/usr/bin/env python3
"""prepare.py FILE.cu OUT: a CUDA source as C++ that g++ compiles behind emulate.h.

Four things in a .cu are not C++ and no macro makes them so:

    asm("mma.sync.x {%0}, {%1};" : "+f"(c) : "r"(a))    becomes    mma_sync_x(c, a);
    extern __shared__ float x[];                        becomes    float *x = ...;
    __shared__ float y[8];                              becomes    static float y[8]; poisoned
    x_kernel<<<1, 32, 0, stream>>>(y);                  becomes    LAUNCH(x_kernel, 1, 32, ..., y);

The first keeps the order of the operands, so that an instruction that emulate.h does not know is an
error of the compiler, with its name. Lines keep their numbers. A .cu or .cuh that is included with
"" stands in the place of its #include, once.
"""

import os
import re
import sys

STRING = r'"(?:[^"\\]|\\.)*"'
ASM = re.compile(r"\basm(?:\s+volatile)?\s*\(")
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
BARE = re.compile(r"(\w+)<<<([^,>]+), ([^,>]+)(?:, ([^,>]+), ([^,>]+))?>>>\(")
INCLUDE = re.compile(r'^#include "([^"]+\.cuh?)"$', re.M)
SHARED = re.compile(r"(?<!extern )__shared__ ((?:__align__\(\d+\) )?\w+ (\w+)[^;,]*);")


def closing(text, at):
    """Offset of the parenthesis that closes the one at text[at]; strings are passed over."""
    depth = 0
    for token in re.compile(STRING + r"|[()]").finditer(text, at):
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    raise SystemExit(f"error: a parenthesis is not closed: {text[at:at + 60]!r}")


def operands(text):
    """The expressions of `"=f"(x), "r"(y.z)`, in order."""
    found, at = [], 0
    for start in re.compile(STRING + r"\s*\(").finditer(text):
        if start.start() < at:
            continue
        at = closing(text, start.end() - 1)
        found.append(text[start.end():at])
    return found


def call(body):
    """The statement for what stands between the parentheses of asm()."""
    template = re.match(rf"(?:\s*{STRING})+", body).group()
    values = operands(body[len(template):])
    text = "".join(part[1:-1] for part in re.findall(STRING, template)).strip().rstrip(";")
    name, _, arguments = text.partition(" ")
    if ";" in text:
        raise SystemExit(f"error: more than one instruction in asm: {text}")
    arguments = re.sub(r"[\[\]{}]", "", arguments)
    arguments = re.sub(r"%(\d+)", lambda m: values[int(m.group(1))], arguments)
    return f"{name.replace('.', '_')}({arguments})"


def prepare(text):
    """The whole source."""
    out, at = [], 0
    for start in ASM.finditer(text):
        end = closing(text, start.end() - 1)
        lines = text.count("\n", start.start(), end)
        out += [text[at:start.start()], call(text[start.end():end]).replace("\n", " "),
                "\n" * lines]
        at = end + 1
    text = DYNAMIC.sub(r"\1 *\2 = (\1 *)emu_block.dynamic;", "".join(out) + text[at:])
    text = BARE.sub(lambda m: f"LAUNCH({m[1]}, {m[2]}, {m[3]}, {m[4] or 0}, {m[5] or 0}, ", text)
    return SHARED.sub(r"static \1; emu_fresh(&\2, sizeof \2);", text)


def read(path, seen):
    """The source of a file, with that of the .cu and .cuh that it includes; seen: those so far."""
    seen.add(os.path.realpath(path))
    with open(path, encoding="utf-8") as f:
        text = f.read()

    def include(match):
        inside = os.path.join(os.path.dirname(path), match[1])
        if os.path.realpath(inside) in seen:
            return ""
        line = text.count("\n", 0, match.end()) + 2
        return f'{read(inside, seen)}\n#line {line} "{path}"'

    return f'#line 1 "{path}"\n{INCLUDE.sub(include, text)}'


def main(argv):
    if len(argv) != 3:
        raise SystemExit("usage: prepare.py FILE.cu OUT")
    with open(argv[2], "w", encoding="utf-8") as f:
        f.write(prepare(read(argv[1], set())))


if __name__ == "__main__":
    main(sys.argv)
