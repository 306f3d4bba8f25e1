#!/usr/bin/env python3
"""Keep the copied sections of train_*.c and train_*.cu from drifting apart.

A train file is a sequence of sections. A section opens with a ruler (a line `// ----...`) and a
banner, and runs to the next ruler with a banner. The banner says how it relates to others:

    // [name] Title.                                       private: has no copy anywhere
    // [name] Title.  (shared)                             same text wherever [name] is (shared) in
                                                           files of the same extension
    // [name] Title.  (variant of FILE[name] @HASH: why)   differs on purpose from FILE's section,
                                                           which had HASH when last reviewed
    // [name] Title.  (ports FILE[name])                   CUDA port: same functions and contracts
    // [name] Title.  (shared, ports FILE[name])           both: one port for every .cu

Shared code uses neutral names (Model, Config, model_forward), so nothing is ever renamed and the
comparison is plain text.

    check_copies.py [FILES]              check; exit 1 on any finding
    check_copies.py --list [FILES]       table of the sections with their hashes
    check_copies.py --fix SRC [FILES]    copy SRC's shared sections over those of the other files
    check_copies.py --self-test          see that every kind of finding is found

FILES are by default train_*.c, train_*.cu and util/*.cuh of this repository.
"""
import argparse
import contextlib
import difflib
import hashlib
import io
import os
import re
import sys
import tempfile
from glob import glob

import csource

RELATION = (r"shared|variant of (?P<v_file>[^\s\[]+)\[(?P<v_name>[\w-]+)\] @(?P<pin>\w+): .+"
            r"|(?:shared, )?ports (?P<p_file>[^\s\[]+)\[(?P<p_name>[\w-]+)\]")
BANNER = re.compile(r"// \[(?P<name>[\w-]+)\] (?P<title>[^()]*\S)"
                    rf"(?:\s+\((?P<relation>{RELATION})\))?\s*$")
LIKE_A_BANNER = re.compile(r"// \[[\w-]*\] .*\((shared|variant of|ports)\b")
EXPECTED = ("// [name] Title.  (shared | variant of FILE[name] @HASH: why | ports FILE[name] | "
            "shared, ports FILE[name])")
SHORT = 60  # a function with less code than this many characters may be written twice


class Trouble(Exception):
    """What stops the program: one line."""


class Section:
    """path, line (of the banner, from 1), name, kind, shared, ports, origin (file, name), pin,
    lines."""

    def __init__(self, path, line, banner):
        self.path, self.line, self.name = path, line, banner["name"]
        relation = banner["relation"] or "private"
        self.shared, self.ports = relation.startswith("shared"), bool(banner["p_file"])
        self.kind = "shared+ports" if self.shared and self.ports else relation.split()[0]
        self.origin = (banner["v_file"] or banner["p_file"], banner["v_name"] or banner["p_name"])
        self.pin = banner["pin"]
        self.lines = []

    def key(self):
        """What a shared section has in common with its copies: name and extension of the file."""
        return self.name, os.path.splitext(self.path)[1]

    def where(self):
        return f"{self.path}:{self.line}: [{self.name}]"

    def origin_name(self):
        return f"{self.origin[0]}[{self.origin[1]}]"

    def text(self):
        """What is compared and hashed: all below the banner but trailing and outer blanks."""
        return "\n".join(line.rstrip() for line in self.lines).strip("\n") + "\n"

    def digest(self):
        return hashlib.sha256(self.text().encode()).hexdigest()[:8]

    def functions(self):
        return csource.functions("\n".join(self.lines))


def read_lines(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise Trouble(f"{path}: cannot read it: {getattr(e, 'strerror', None) or e}")


def parse(path):
    """The sections of a file, in order."""
    lines, sections, starts, in_code = read_lines(path), [], [], False
    for i in range(1, len(lines)):
        in_code = in_code or lines[i - 1].startswith("#include")  # not in the file comment any more
        if csource.is_ruler(lines[i - 1]) and lines[i].startswith("// ["):
            banner = BANNER.match(lines[i])
            if not banner:
                raise Trouble(f"{path}:{i + 1}: banner not understood: {lines[i].strip()}; "
                              f"expected {EXPECTED}")
            sections.append(Section(path, i + 1, banner))
            starts.append(i - 1)
        elif in_code and LIKE_A_BANNER.match(lines[i]):
            raise Trouble(f"{path}:{i + 1}: banner without a ruler above it; "
                          "expected a line of // and 20 or more dashes")
    for s, end in zip(sections, starts[1:] + [len(lines)]):
        s.lines = lines[s.line:end]
    return sections


def check_shared(sections):
    """Shared sections of one name have one text in all .c and one in all .cu files."""
    first = {}
    for s in sections:
        if not s.shared:
            continue
        o = first.setdefault(s.key(), s)
        if s.text() != o.text():
            diff = list(difflib.unified_diff(o.text().split("\n"), s.text().split("\n"),
                                             o.path, s.path, n=1, lineterm=""))
            yield "\n    ".join([f"{s.where()} differs from {o.where()}; edit one, then "
                                 "make fix-copies FROM=the file you edited"] + diff[:14])


def check_origins(sections):
    """Variants were reviewed against the present origin; ports have its functions and contracts."""
    by_name = {(os.path.basename(s.path), s.name): s for s in sections}
    for s in sections:
        if s.kind != "variant" and not s.ports:
            continue
        o = by_name.get((os.path.basename(s.origin[0]), s.origin[1]))
        if not o:
            yield f"{s.where()} refers to {s.origin_name()}, which is not in the files checked"
        elif o is s:
            yield f"{s.where()} refers to itself"
        elif s.kind == "variant" and o.digest() != s.pin:
            yield (f"{s.where()} was reviewed against {s.origin_name()} @{s.pin}, "
                   f"which is now @{o.digest()}; take over its change, then write @{o.digest()}")
        elif s.ports:
            mine = {f.name: f for f in s.functions()}
            for f in o.functions():
                if f.name not in mine:
                    yield f"{s.where()} has no {f.name}(), which {s.origin_name()} has"
                elif mine[f.name].contract != f.contract:
                    line = s.line + mine[f.name].first
                    yield (f"{s.path}:{line}: the contract comment of {f.name}() "
                           f"differs from {s.origin_name()}'s; make them one text")


def check_unmarked(sections):
    """No function stands twice, in two files, outside the sections that are marked as copies."""
    seen = {}
    for s in sorted(sections, key=lambda s: (not s.shared, s.ports)):  # shared: the originals
        if s.ports and not s.shared:
            continue
        for f in s.functions():
            o = seen.setdefault(f.code, s)
            ported = o.ports and o.key()[1] != s.key()[1]  # s may be what o ports
            if not s.shared and not ported and o.path != s.path and len(f.code) > SHORT:
                todo = ("take that section" if o.shared
                        else "move both to a (shared) section")
                yield (f"{s.path}:{s.line + f.first}: {f.name}() is identical to the one of "
                       f"{o.where()}; {todo}")


def check_names(sections):
    """A name stands once in a file."""
    seen = {}
    for s in sections:
        o = seen.setdefault((s.path, s.name), s)
        if o is not s:
            yield f"{s.where()} opens twice in this file, first at line {o.line}; rename one"


def check(sections):
    return [finding for rule in (check_names, check_shared, check_origins, check_unmarked)
            for finding in rule(sections)]


def fix(source, files):
    """Copy source's shared sections over those of the other files; returns what was rewritten."""
    good = {s.key(): s for s in parse(source) if s.shared}
    if not good:
        raise Trouble(f"{source}: has no (shared) section to copy")
    done = []
    for path in files:
        if os.path.samefile(path, source):
            continue
        lines, changed = read_lines(path), False
        for s in reversed(parse(path)):
            if not s.shared or s.key() not in good or s.text() == good[s.key()].text():
                continue
            full = [i for i, line in enumerate(s.lines) if line.strip()] or [0, 0]
            lines[s.line + full[0]:s.line + full[-1] + 1] = good[s.key()].text().split("\n")[:-1]
            done.append(f"{s.where()} rewritten from {source}")
            changed = True
        if changed:
            with open(path, "w", encoding="utf-8") as f:
                f.write("\n".join(lines))
    return done


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILES")
    parser.add_argument("--list", action="store_true", help="print a table of the sections")
    parser.add_argument("--fix", metavar="SRC", help="copy SRC's shared sections over the others'")
    parser.add_argument("--self-test", action="store_true", help="see every kind of finding")
    args = parser.parse_args(argv)
    if args.self_test:
        return self_test()
    root = os.path.relpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = args.files or [os.path.normpath(f) for pattern in ("train_*.c*", "util/*.cuh")
                           for f in glob(os.path.join(root, pattern))]
    files = sorted({f for f in files if f.endswith((".c", ".cu", ".cuh"))})
    try:
        if args.fix:
            done = fix(args.fix, files)
            print("\n".join(done or [f"nothing to do: all shared sections are as in {args.fix}"]))
            return 0
        sections = [s for f in files for s in parse(f)]
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if args.list:
        for s in sorted(sections, key=lambda s: (s.name, s.path)):
            print(f"{s.name:12s} {s.kind:12s} {s.digest()} {len(s.lines):5d} lines  "
                  f"{s.path}:{s.line}")
        return 0
    findings = check(sections)
    for finding in findings:
        print(finding)
    if not findings:
        copies = sum(s.kind != "private" for s in sections)
        print(f"copies ok: {copies} sections that are copies, {len(files)} files")
    return 1 if findings else 0


def self_test():
    """Write drifting copies into a temporary directory; see the findings and the fix."""
    failed = []

    def section(banner, body):
        return "// " + "-" * 40 + f"\n// {banner}\n\n{body}\n"

    def see(what, files, *wanted, argv=()):
        """files: name -> text. wanted: words of the findings; none = all is well."""
        with tempfile.TemporaryDirectory() as d:
            paths = [os.path.join(d, f) for f in files]
            for path, text in zip(paths, files.values()):
                with open(path, "w", encoding="utf-8") as f:
                    f.write("// A file.\n#include <math.h>\n\n" + text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                if argv:
                    main([a.replace("DIR", d) for a in argv] + paths)
                rc = main(paths)
        ok = rc == (1 if wanted else 0) and all(w in out.getvalue() for w in wanted)
        if not ok:
            failed.append(what)
        print(f"ok   {what}" if ok else f"FAIL {what}: exit {rc}\n{out.getvalue()}")

    add = ("// add: out (n) += a (n).\nstatic void add(float *out, const float *a, int n)\n"
           "{\n    for (int i = 0; i < n; i++) { out[i] += a[i]; }\n}\n")
    norm = ("// norm: sum of squares of x (n).\nstatic float norm(const float *x, int n)\n"
            "{\n    float s = 0;\n    for (int i = 0; i < n; i++)\n        s += x[i] * x[i];\n"
            "    return s;\n}\n")
    sub = add.replace("+=", "-=")
    pin = hashlib.sha256(add.encode()).hexdigest()[:8]
    private = section("[mix] The layer.", add)
    shared = section("[norm] A norm.  (shared)", norm)
    drift = shared.replace("s += ", "s -= ")
    variant = section(f"[mix] The layer.  (variant of a.c[mix] @{pin}: it is another)", sub)
    port = section("[mix] The layer.  (ports a.c[mix])", add.replace("float", "floatX"))
    both = port.replace("(ports", "(shared, ports")

    see("clean copies", {"a.c": private + shared, "b.c": variant + shared, "c.cu": port})
    see("shared drift", {"a.c": shared, "b.c": drift}, "b.c:5: [norm] differs", "+        s -= x")
    see("stale variant", {"a.c": private.replace("+=", "*="), "b.c": variant},
        f"b.c:5: [mix] was reviewed against a.c[mix] @{pin}, which is now @")
    see("port without a function", {"a.c": private, "b.cu": port.replace("void add", "void sub")},
        "b.cu:5: [mix] has no add(), which a.c[mix] has")
    see("port with another contract", {"a.c": private, "b.cu": port.replace("(n) +=", "(n) =")},
        "b.cu:8: the contract comment of add() differs")
    see("shared ports, and a shared section of that name in a .c", {
        "a.c": private.replace("layer.", "layer.  (shared)"), "b.cu": both, "c.cu": both})
    see("shared ports drift", {"a.c": private, "b.cu": both, "c.cu": both.replace("i++", "++i")},
        "c.cu:5: [mix] differs from", "+    for (int i = 0; i < n; ++i)")
    see("shared ports without a function",
        {"a.c": private, "b.cu": both.replace("void add", "void sub")}, "b.cu:5: [mix] has no add")
    see("shared ports with another contract",
        {"a.c": private, "b.cu": both.replace("(n) +=", "(n) =")}, "b.cu:8: the contract comment")
    see("shared ports of nothing", {"b.cu": both}, "a.c[mix], which is not in the files")
    see("a port that is the same text", {
        "a.c": private, "b.cu": section("[mix] The layer.  (shared, ports a.c[mix])", add)})
    see("private twin of a shared port", {"a.c": private, "b.cu": both, "c.cu": section(
        "[x] X.", add.replace("float", "floatX"))}, "c.cu:8: add() is identical", "take that")
    see("shared in .c and .cu, two texts", {"a.c": shared, "b.c": shared, "c.cu": drift})
    see("shared drift between .cu files", {"a.c": shared, "b.cu": shared, "c.cu": drift},
        "c.cu:5: [norm] differs")
    see("banner with two relations in the wrong order",
        {"a.c": private, "b.cu": port.replace("[mix])", "[mix], shared)")}, "banner not understood")
    see("identical private functions", {"a.c": private, "b.c": private},
        "b.c:8: add() is identical to")
    see("private twin of a shared function", {"a.c": section("[x] X.", norm), "b.c": shared},
        "a.c:8: norm() is identical to", "take that section")
    see("unknown origin", {"a.c": section("[mix] M.  (ports no.c[mix])", add)},
        "a.c:5: [mix] refers to no.c[mix], which is not in the files")
    see("a name twice", {"a.c": shared + section("[norm] N.", add)}, "opens twice")
    see("wrong banner", {"a.c": section("[mix] M. (copied)", add)}, "a.c:5: banner not understood")
    see("banner without ruler", {"a.c": "// [mix] M.  (shared)\n" + add}, "a.c:4: banner without")
    see("--fix", {"a.c": shared, "b.c": drift + private, "c.c": drift}, argv=["--fix", "DIR/a.c"])
    see("--fix of shared ports, which leaves the .c alone", {
        "a.c": private.replace("layer.", "layer.  (shared)"), "b.cu": both,
        "c.cu": both.replace("i++", "++i")}, argv=["--fix", "DIR/b.cu"])
    see("--fix from a file without shared sections", {"a.c": shared, "b.c": drift, "c.c": private},
        "c.c: has no (shared) section", "b.c:5: [norm] differs", argv=["--fix", "DIR/c.c"])
    see("--list", {"a.c": shared}, argv=["--list"])
    print(f"self test: {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
