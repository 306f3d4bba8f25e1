#!/usr/bin/env python3
"""Check what STYLE.md asks and a program can see: budgets, order of sections, numerics, launches.

    check_style.py [--root DIR]    check the repository; exit 1 on any finding
    check_style.py --self-test     see every rule fire

A finding is one line, `file:line: what; do what`. The number in a comment below is STYLE.md's.
"""
import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from glob import glob

import csource

C_FILES = ("train_*.c", "train_*.cu", "test_*.c", "util/*.h", "util/*.cuh", "data/*.h",
           "dev/*.c", "dev/*.h", "dev/*.cu*", "dev/*/*.c", "dev/*/*.h", "dev/*/*.cu*")
OTHER_FILES = ("Makefile", ".ci/run", "*.sh", "*.py", "data/*.py", "data/*.sh", "dev/*.py",
               "dev/*/*.py", "dev/*/*.sh")

COLUMNS = 100
FILE_COMMENT = 60
MIX_BY_LINE = 120
FUNCTION, MAIN, KERNEL = 100, 120, 160
ORDER = ("mix", "layers", "optimizer", "model", "train", "main")

LIBM = ("acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 "
        "expm1 fabs fdim floor fma fmax fmin fmod frexp hypot ldexp lgamma log log10 log1p log2 "
        "logb lrint lround modf nearbyint nextafter pow remainder rint round scalbn sin sinh sqrt "
        "tan tanh tgamma trunc")
LIBM_FLOAT = re.compile(r"\b(" + "|".join(f"{name}f" for name in LIBM.split()) + r")\s*\(")
FLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
                           r"|0[xX][\da-fA-F.]+[pP][+-]?\d+)[fF]\b")
BANNED = {"fseek": "use fseeko", "ftell": "use ftello", "atoi": "use the range-checked options.h",
          "atof": "use the range-checked options.h"}
BANNED_CALL = re.compile(r"\b(" + "|".join(BANNED) + r")\s*\(")
FAST_MATH = re.compile(r"-Ofast\b|-ffast-math\b|-?-use_fast_math\b")
LAUNCH = re.compile(r"(?<!<)<<<(?!<)")
CHECK_NAME = re.compile(r"\w*(?:CHECK|check)\w*")


class Source:
    """A C or CUDA file: text, lines, code (text with comments and strings blanked), functions."""

    def __init__(self, path, text):
        self.path, self.text = path, text
        self.lines = text.split("\n")
        self.code = csource.blank(text)
        self.functions = csource.functions(text)
        self.cuda = path.endswith((".cu", ".cuh"))
        self.train = os.path.basename(path).startswith("train_") and "/" not in path
        self.header = path.startswith(("util/", "data/"))

    def line_of(self, offset):
        return self.text.count("\n", 0, offset) + 1


def line_budget(path):
    """STYLE.md 2: how many lines a file may have; None = any number."""
    model = re.sub(r"^(train|test)_|\.cu?$", "", os.path.basename(path))
    if path == "Makefile":
        return 150
    if path.startswith(("util/", "data/")) and path.endswith((".h", ".cuh")):
        return 500
    if path.endswith(".cu"):
        return 2700 if model in ("gpt2", "deltanet", "metala") else 2200
    if path.endswith(".c"):
        return 1300 if model == "gpt2" else 1200
    return None


def check_text(path, text):
    """2: lines, columns, tabs, blanks at the end of a line, the final newline."""
    lines = text.split("\n")
    count, budget = text.count("\n"), line_budget(path)
    if budget and count > budget:
        yield budget + 1, (f"{count} lines, budget {budget}; simplify, "
                           "or move an experiment to dev/")
    if not text.endswith("\n"):
        yield len(lines), "no newline at the end of the file; add one"
    elif text.endswith("\n\n"):
        yield len(lines) - 1, "blank lines at the end of the file; remove them"
    for n, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            yield n, f"{len(line)} columns; break the line at {COLUMNS}"
        if "\t" in line and (path != "Makefile" or "\t" in line.lstrip("\t")):
            yield n, "a tab; use 4 spaces"
        if line != line.rstrip():
            yield n, "blanks at the end of the line; remove them"


def check_makefile(path, text):
    """17: the flags that delete NaN checks."""
    if path != "Makefile":
        return
    for n, line in enumerate(text.split("\n"), 1):
        flag = FAST_MATH.search(line.split("#")[0])
        if flag:
            yield n, f"{flag.group()} deletes NaN checks; use -O3 -fno-math-errno -fopenmp-simd"


def check_functions(src):
    """2: length of functions. 10: a contract comment above each."""
    for f in src.functions:
        what, budget = "function", FUNCTION
        if "__global__" in f.header:
            what, budget = "kernel", KERNEL
        elif f.name == "main":
            budget = MAIN
        length = f.last - f.first + 1
        if length > budget:
            yield f.first, f"{what} {f.name} has {length} lines, budget {budget}; split it"
        if (src.train or src.header) and not f.contract:
            yield f.first, (f"{f.name}() has no comment directly above; "
                            f"write `// {f.name}: what, from what`")


def check_file_comment(src):
    """4: a file opens with a comment of at most 60 lines."""
    end = 0
    while end < len(src.lines) and src.lines[end].startswith("//"):
        end += 1
    if end == 0:
        yield 1, "no file comment; say in // lines what the file is and does"
    elif end > FILE_COMMENT:
        yield FILE_COMMENT + 1, f"file comment of {end} lines, budget {FILE_COMMENT}; shorten it"


def check_sections(src):
    """3: [mix], [layers], [model], [main] in this order; [mix] early."""
    if not src.train:
        return
    at = {}
    for n, (ruler, line) in enumerate(zip(src.lines, src.lines[1:]), 2):
        banner = re.match(r"// \[([\w-]+)\]", line)
        if banner and csource.is_ruler(ruler):
            at.setdefault(banner.group(1), n)
    last = None
    for name in ORDER:
        if name not in at and name == "optimizer" and src.cuda:
            continue  # one for all .cu: util/optimizer.cuh
        if name not in at:
            yield 1, f"no section [{name}]; open it with a ruler and `// [{name}] Title.`"
            continue
        if last and at[name] < at[last]:
            yield at[name], f"[{name}] stands before [{last}] (line {at[last]}); move it below"
        last = name
    if not src.cuda and at.get("mix", 0) > MIX_BY_LINE:
        yield at["mix"], f"[mix] opens after line {MIX_BY_LINE}; move what is above it further down"


def check_double(src):
    """38: an oracle whose `float` can be made `double` has nothing that says float in its name."""
    if not src.train or src.cuda:
        return
    why = "is float in the double build too; write"
    for m in LIBM_FLOAT.finditer(src.code):
        yield src.line_of(m.start()), f"{m.group(1)}() {why} {m.group(1)[:-1]}()"
    for m in FLOAT_LITERAL.finditer(src.code):
        yield src.line_of(m.start()), f"{m.group()} {why} {m.group(1)}"


def closing(code, at):
    """Offset of the parenthesis that closes the one at code[at]."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    return len(code)


def check_files(src):
    """16, 22: 64-bit offsets, checked numbers; files are opened in binary."""
    for m in BANNED_CALL.finditer(src.code):
        yield src.line_of(m.start()), f"{m.group(1)}() loses range or errors; {BANNED[m.group(1)]}"
    for m in re.finditer(r"\bfopen\s*\(", src.code):
        end = closing(src.code, m.end() - 1)
        first, last = src.line_of(m.start()), src.line_of(end)
        modes = re.findall(r"\"([rwabx+t]*)\"", src.text[src.code.rfind(",", m.end(), end):end])
        excused = any("// text" in line for line in src.lines[first - 1:last])
        if not excused and any("b" not in mode for mode in modes):
            yield first, 'fopen of text; add "b" to the mode, or `// text` to the line'


def check_launches(src):
    """27: every launch is followed by a check within three lines, or stands inside one."""
    if not src.cuda:
        return
    for m in LAUNCH.finditer(src.code):
        begin = max(src.code.rfind(c, 0, m.start()) for c in ";{}")
        end = src.code.find(";", m.start())
        end = len(src.code) if end < 0 else end
        after = "\n".join(src.code[end:].split("\n")[:4])
        if not CHECK_NAME.search(src.code[begin + 1:m.start()] + "\n" + after):
            yield src.line_of(m.start()), ("launch without a check within 3 lines; "
                                           "check cudaGetLastError()")


SOURCE_RULES = (check_functions, check_file_comment, check_sections, check_double, check_files,
                check_launches)


def check(root):
    """All findings as (path, line, text), and the number of files read."""
    findings, count = [], 0
    for patterns in (C_FILES, OTHER_FILES):
        for path in sorted({p for pattern in patterns for p in glob(os.path.join(root, pattern))}):
            name = os.path.relpath(path, root).replace(os.sep, "/")
            count += 1
            try:
                with open(path, encoding="utf-8", newline="") as f:
                    text = f.read()
            except UnicodeDecodeError:
                findings.append((name, 1, "not UTF-8; convert it"))
                continue
            rules = [check_text(name, text), check_makefile(name, text)]
            if patterns is C_FILES:
                src = Source(name, text)
                rules += [rule(src) for rule in SOURCE_RULES]
            findings += [(name, line, what) for rule in rules for line, what in rule]
    return sorted(findings), count


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--root", default=os.path.dirname(here), help="default: this repository")
    parser.add_argument("--self-test", action="store_true", help="see every rule fire")
    args = parser.parse_args(argv)
    if args.self_test:
        return self_test()
    findings, count = check(args.root)
    for path, line, what in findings:
        print(f"{path}:{line}: {what}")
    if findings:
        print(f"style: {len(findings)} findings in {count} files")
        return 1
    print(f"style ok: {count} files")
    return 0


def self_test():
    """Break one rule at a time in a temporary directory: that rule fires, and no other."""
    failed = []

    def see(what, path, text, *wanted):
        """The findings for one file are exactly `wanted`, each a `line: start of the text`."""
        with tempfile.TemporaryDirectory() as d:
            full = os.path.join(d, path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "w", encoding="utf-8", newline="") as f:
                f.write(text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                rc = main(["--root", d])
        got = [line[len(path) + 1:] for line in out.getvalue().split("\n")[:-2]]
        ok = (rc == (1 if wanted else 0) and len(got) == len(wanted)
              and all(g.startswith(w) for g, w in zip(got, wanted)))
        if not ok:
            failed.append(what)
        print(f"ok   {what!r}" if ok else f"FAIL {what!r}: wanted {wanted}, got\n{out.getvalue()}")

    def banner(name):
        return "// " + "-" * 30 + f"\n// [{name}] Title.\n\n"

    def function(head, lines):
        empty = lines - 3 - head.count("\n")
        return f"// f: of a given length.\n{head}\n{{\n" + "    ;\n" * empty + "}\n"

    top = "// A file.\n#include <math.h>\n"
    names = ("layers", "optimizer", "model", "train", "main")
    tail = "".join(banner(name) for name in names) + "// end\n"
    sections = banner("mix") + tail
    c, cu, h = "train_x.c", "train_x.cu", "util/x.h"

    see("a clean .c", c, top + sections)
    see("a clean .cu", cu, top + sections)
    see("a clean header", h, top + "// f: 1.\nstatic inline int f(void) { return 1; }\n")
    for path, budget in (("train_gpt2.c", 1300), (c, 1200), ("test_x.c", 1200), (cu, 2200),
                         ("train_metala.cu", 2700), (h, 500), ("util/x.cuh", 500),
                         ("Makefile", 150)):
        text = top + sections
        pad = budget - text.count("\n")
        see(f"{path} at its budget", path, text + "//\n" * pad)
        see(f"{path} over its budget", path, text + "//\n" * (pad + 1),
            f"{budget + 1}: {budget + 1} lines, budget {budget}")
    for head, budget in (("static void f(int a)", 100), ("int main(int n, char **v)", 120),
                         ("__global__ void __launch_bounds__(64) f(int a)", 160),
                         ("SEQ_PRINTF(1, 2)\nstatic void f(int a,\n              int b)", 100)):
        see(f"`{head[:12]}...` at its budget", h, top + function(head, budget))
        see(f"`{head[:12]}...` over its budget", h, top + function(head, budget + 1), "4: ")
    see("101 columns", h, top + "//" + "x" * 99 + "\n", "3: 101 columns")
    see("a tab", h, top + "\tint x;\n", "3: a tab")
    see("a tab in a Makefile", "Makefile", "all:\n\techo\n")
    see("trailing blank", h, top + "int x; \n", "3: blanks")
    see("carriage return", h, top + "int x;\r\n", "3: blanks")
    see("no final newline", h, top + "int x;", "3: no newline")
    see("blank last line", h, top + "\n", "3: blank lines at the end")
    see("no file comment", h, "#include <math.h>\n", "1: no file comment")
    see("file comment of 61 lines", h, "//\n" * 61, "61: file comment of 61")
    see("a .cu without [optimizer]", cu, top + sections.replace(banner("optimizer"), ""))
    see("a .c without [optimizer]", c, top + sections.replace(banner("optimizer"), ""),
        "1: no section [optimizer]")
    see("no [mix]", c, top + tail, "1: no section [mix]")
    early = ("model", "mix", *names[:2], *names[3:])
    see("[model] first", c, top + "".join(map(banner, early)) + "//\n",
        "4: [model] stands before [optimizer]")
    see("[mix] after line 120", c, top + "//\n" * 117 + sections, "121: [mix] opens after line 120")
    see("[model] first in a .cu", cu, top + "".join(map(banner, early)) + "//\n",
        "4: [model] stands before [optimizer]")
    see("no contract comment", c, top + sections + "\nint f(void) { }\n", "23: f() has no")
    see("a banner is no contract", c, top + sections.replace("\n\n", "\nint f(void) {}\n", 1),
        "5: f() has no")
    body = top + sections + "// f: 1.\nstatic int f(void)\n{\n    %s\n}\n"
    for code, what in (("y = expf(x);", "expf() is float"), ("y = sqrtf (x);", "sqrtf() is float"),
                       ("y = 1.0f;", "1.0f is float"), ("y = 1e-8F;", "1e-8F is float"),
                       ("y = .5f;", ".5f is float"), ("y = 2.f;", "2.f is float"),
                       ("fseek(f, 0, 0);", "fseek()"), ("n = ftell(f);", "ftell()"),
                       ("n = atoi(s);", "atoi()"), ("n = atof(s);", "atof()"),
                       ('f = fopen(a(b, c), "r");', "fopen of text"),
                       ('f = fopen(s,\n "w+");', "fopen of text")):
        see(code, c, body % code, f"25: {what}")
    for code in ("y = exp(x) + 0x1f + a1f + 1.0;  // expf(1.0f)", 'puts("expf(1.0f) fseek(");',
                 "fseeko(f, 0, 0);", 'f = fopen(s, "rb");', "f = fopen(s, mode);",
                 'f = fopen(s, "r");  // text', "a = printf(s);"):
        see(code, c, body % code)
    for flag in ("-Ofast", "-ffast-math", "--use_fast_math"):
        see(flag, "Makefile", f"CFLAGS = -O3 {flag}  # fast\n", f"1: {flag} deletes")
    see("a flag in a comment", "Makefile", "CFLAGS = -O3  # never -Ofast\n")
    launch = top + "// f: 1.\nvoid f(void)\n{\n    k<<<1, 2>>>(a,\n        b);%s\n}\n"
    see("launch, check in the third line", "dev/k.cu", launch % "\n\n\n    CUDA_CHECK(e());")
    see("launch, check in the fourth line", "dev/k.cu", launch % "\n\n\n\n    cuda_check(x);",
        "6: launch")
    see("launch inside a check", "dev/k.cu", top + "void f(void) { CHECK((k<<<1, 2>>>(a))); }\n")
    see("launch without a check", "dev/k.cuh", launch % "  // check", "6: launch")
    print(f"self test: {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
