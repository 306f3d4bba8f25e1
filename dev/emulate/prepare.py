#!/usr/bin/env python3
"""prepare.py FILE.cu OUT: a CUDA source as C++ that g++ compiles behind emulate.h.

Four things in a .cu are not C++ and no macro makes them so:

    asm("mma.sync.x {%0}, {%1};" : "+f"(c) : "r"(a))    becomes    mma_sync_x(c, a);
    extern __shared__ float x[];                        becomes    float *x = ...;
    __shared__ float y[8];                              becomes    static float y[8]; poisoned
    kernel<<<grid, 9>>>(x);                             becomes    EMU_START((kernel), grid, 9)(x);

The first keeps the order of the operands, so that an instruction that emulate.h does not know is an
error of the compiler, with its name. The .cuh files that a ladder includes are put in their place,
once. Lines keep their numbers.
"""

import os
import re
import sys

STRING = r'"(?:[^"\\]|\\.)*"'
ASM = re.compile(r"\basm(?:\s+volatile)?\s*\(")
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
SHARED = re.compile(r"(?<!extern )__shared__ ((?:__align__\(\d+\) )?\w+ (\w+)[^;,]*);")

INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
KERNEL = re.compile(r"\w+\s*$")


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


def kernel_start(text, end):
    """Offset at which the name of the kernel, with its template's arguments, begins that is started
    with the <<< at text[end]."""
    at = len(text[:end].rstrip())
    depth = 0
    while text[at - 1] == ">" or depth:
        at -= 1
        depth += {">": 1, "<": -1}.get(text[at], 0)
    return KERNEL.search(text, 0, at).start()


def started(text):
    """<<< >>> as calls of EMU_START."""
    while (at := text.find("<<<")) >= 0:
        name, end = kernel_start(text, at), text.index(">>>", at)
        start = text[name:at].rstrip()
        lines = "\n" * text.count("\n", name, end)
        text = f"{text[:name]}EMU_START(({start}), {text[at + 3:end]}){lines}{text[end + 3:]}"
    return text


def inlined(path, seen):
    """The text of a file in which every .cuh it includes stands in place of its first #include, and
    other headers are found from the root."""
    def replace(match):
        name = os.path.normpath(os.path.join(os.path.dirname(path), match.group(1)))
        if not name.endswith(".cuh"):
            return f'#include "{name}"'
        if name in seen:
            return ""
        seen.add(name)
        after = text.count("\n", 0, match.end()) + 2
        return f'{inlined(name, seen)}\n#line {after} "{path}"'

    with open(path, encoding="utf-8") as f:
        text = f.read()
    return f'#line 1 "{path}"\n' + INCLUDE.sub(replace, text)


def prepare(text):
    """The whole source."""
    text = started(text)
    out, at = [], 0
    for start in ASM.finditer(text):
        end = closing(text, start.end() - 1)
        lines = text.count("\n", start.start(), end)
        out += [text[at:start.start()], call(text[start.end():end]).replace("\n", " "),
                "\n" * lines]
        at = end + 1
    text = DYNAMIC.sub(r"\1 *\2 = (\1 *)emu_block.dynamic;", "".join(out) + text[at:])
    return SHARED.sub(r"static \1; emu_fresh(&\2, sizeof \2);", text)


def main(argv):
    if len(argv) != 3:
        raise SystemExit("usage: prepare.py FILE.cu OUT")
    text = prepare(inlined(os.path.normpath(argv[1]), set()))
    with open(argv[2], "w", encoding="utf-8") as f:
        f.write(text)


if __name__ == "__main__":
    main(sys.argv)
