"""Just enough of a C reader for dev/check_copies.py and dev/check_style.py.

It reads the dialect that STYLE.md allows, not all of C: functions at file scope (or inside
extern "C"), braces that balance whichever way the preprocessor goes, no raw strings.
"""
import re

TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
RULER = re.compile(r"// -{20,}\s*$")
NOT_A_NAME = {"__attribute__", "__align__", "alignas", "if", "for", "while", "switch"}


def _spaces(match):
    return re.sub(r"[^\n]", " ", match.group())


def blank(text):
    """text with comments, strings and characters made blanks: every offset and line stays."""
    return TOKEN.sub(_spaces, text)


def without_comments(text):
    """text with comments replaced by blanks; strings stay."""
    return TOKEN.sub(lambda m: m.group() if m.group()[0] in "\"'" else _spaces(m), text)


def is_ruler(line):
    return RULER.match(line) is not None


class Function:
    """A function definition: name, header (its declarator), first and last line (from 1), contract
    (the // lines directly above it), code (without comments and white space)."""

    def __init__(self, name, header, first, last, lines):
        self.name, self.header, self.first, self.last = name, header, first, last
        top = first - 1
        while top > 0 and lines[top - 1].startswith("//") and not is_ruler(lines[top - 1]):
            top -= 1
        if top > 0 and is_ruler(lines[top - 1]):
            top += 1  # what follows a ruler is the section's banner, not a contract
        self.contract = "\n".join(lines[top:first - 1])
        body = without_comments("\n".join(lines[first - 1:last]))
        self.code = re.sub(r"\s+", "", body)


def _name(header):
    """The function's name if header declares a function, else None."""
    h = re.sub(r"\s*\b(const|noexcept)\s*$", "", header.rstrip())
    if not h.endswith(")") or "=" in re.sub(r"<[^<>]*>|\([^()]*\)", "", h):
        return None
    depth = 0
    for i in range(len(h) - 1, -1, -1):
        depth += (h[i] == ")") - (h[i] == "(")
        if depth == 0:
            word = re.search(r"(\w+)\s*$", h[:i])
            return word.group(1) if word and word.group(1) not in NOT_A_NAME else None
    return None


def functions(text):
    """The function definitions of a piece of C or CUDA, in order."""
    lines = text.split("\n")
    code = DIRECTIVE.sub(_spaces, blank(text))
    found, depth, start, open_function = [], 0, 0, None
    transparent = 0  # open braces of extern "C" and namespaces
    for m in re.finditer(r"[{};]", code):
        c, at = m.group(), m.start()
        if c == "{":
            if depth == 0:
                header = code[start:at]
                if re.fullmatch(r"\s*(extern|namespace\s+\w*)\s*", header):
                    transparent, start = transparent + 1, at + 1
                    continue
                name = _name(header)
                begin = start + len(header) - len(header.lstrip())
                open_function = name and (name, header, code.count("\n", 0, begin) + 1)
            depth += 1
        elif c == "}":
            if depth == 0:
                transparent = max(0, transparent - 1)
            elif depth == 1 and open_function:
                last = code.count("\n", 0, at) + 1
                found.append(Function(*open_function, last, lines))
                open_function = None
            depth = max(0, depth - 1)
        if depth == 0:
            start = at + 1
    return found
