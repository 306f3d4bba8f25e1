#!/usr/bin/env python3
"""Plain text to GPT-2 tokens for --task text --vocab gpt2, and back.

    gpt2_tokens.py encode TEXT OUT.bin --table FILE [--end-of-text]
    gpt2_tokens.py decode IN.bin TEXT --table FILE
    gpt2_tokens.py table OUT --table FILE       the id-to-bytes table that --tokenizer reads
    gpt2_tokens.py --self-test [--table FILE]

FILE says which bytes each token is, and is one of two: gpt2.tiktoken (a line per token: base64 of
its bytes, its number) or gpt2_tokenizer.bin (256 uint32: 20240328, 2, number of tokens, the end of
a text; then for each token its length in one byte and its bytes). Nothing is downloaded. Encoding
needs `pip install tiktoken`; decoding and tables need Python only.

OUT.bin is 256 int32 (20240520, 1, number of tokens, zeros) and the tokens as uint16, all
little-endian: what data/text.h and llm.c read. --end-of-text puts <|endoftext|> before the text.
A text must be UTF-8; it is encoded in pieces that end at blanks, so it may be larger than the
memory. What is written takes a new name or replaces a regular file, never an input.
"""
import argparse
import array
import base64
import binascii
import contextlib
import io
import os
import struct
import sys
import tempfile

from files import Parser, Trouble, not_an_input, opened, read, replacing

MAGIC, TABLE_MAGIC, HEADER = 20240520, 20240328, 1024
V, END = 50257, 50256
END_TEXT = b"<|endoftext|>"
# Where GPT-2 cuts a text: endings, letters, digits, marks; white space, its last goes to the next.
PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECE = 1 << 20  # bytes of text encoded at once


def read_table(path):
    """The bytes of every token, in order, from either kind of file."""
    words, number = read_words(path), {}
    for i, word in enumerate(words):
        if not 0 < len(word) < 256:
            raise Trouble(f"{path}: token {i}: expected 1 to 255 bytes, got {len(word)}")
        if number.setdefault(word, i) != i:
            raise Trouble(f"{path}: tokens {number[word]} and {i} are the same bytes")
    return words


def read_words(path):
    data = read(path)
    if len(data) >= HEADER and struct.unpack("<I", data[:4])[0] == TABLE_MAGIC:
        version, n, end = struct.unpack("<3I", data[4:16])
        words, at = [], HEADER
        while at < len(data) and len(words) < n:
            word = data[at + 1:at + 1 + data[at]]
            if len(word) < data[at]:
                break
            words.append(word)
            at += 1 + data[at]
        if version != 2 or n != V or end != END or at != len(data) or len(words) != n:
            raise Trouble(f"{path}: expected version 2, {V} tokens, {END} the end of a text; got "
                          f"version {version}, {n}, {end}, of which the file holds {len(words)}")
        return words
    ranks = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            if int(rank) in ranks:
                raise Trouble(f"{path}:{number}: token {int(rank)} is there twice")
            ranks[int(rank)] = base64.b64decode(word, validate=True)
        except (ValueError, binascii.Error):
            raise Trouble(f"{path}:{number}: expected base64 and a number, or a file that begins "
                          f"with {TABLE_MAGIC}")
    if sorted(ranks) != list(range(END)):
        raise Trouble(f"{path}: expected tokens 0 to {END - 1}, got {len(ranks)} lines")
    return [ranks[i] for i in range(END)] + [END_TEXT]


def write_table(path, words):
    with replacing(path) as f:
        f.write(struct.pack("<256I", TABLE_MAGIC, 2, len(words), END, *[0] * 252))
        for word in words:
            f.write(bytes([len(word)]) + word)


def encoder(words):
    """A function from text to tokens."""
    try:
        import tiktoken
    except ImportError:
        raise Trouble("tiktoken is missing\nhint: pip install tiktoken")
    return tiktoken.Encoding(name="gpt2", pat_str=PATTERN, special_tokens={},
                             mergeable_ranks={w: i for i, w in enumerate(words[:END])}
                             ).encode_ordinary


def pieces(f, path, size):
    """The text of f in pieces of about `size` bytes. A piece ends where a blank follows what is
    none: no token goes over such a place, so the tokens are those of the whole text."""
    def blank_before(i):
        start = i - 1
        while start > max(0, i - 4) and rest[start] & 0xc0 == 0x80:
            start -= 1
        return rest[start:i].decode("utf-8", "replace").isspace()

    rest, at = bytearray(), 0
    while True:
        more = f.read(size)
        seen = max(1, len(rest))  # what was searched before has no such place
        rest += more
        cut = len(rest)
        if more:
            cut = next((i for i in range(len(rest) - 1, seen - 1, -1)
                        if rest[i] in b" \n\r\t" and not blank_before(i)), 0)
        try:
            text = rest[:cut].decode("utf-8")
        except UnicodeDecodeError as e:
            raise Trouble(f"{path}: byte {at + e.start} is not UTF-8\nhint: iconv converts texts")
        yield text
        del rest[:cut]
        at += cut
        if not more:
            return


def to_uint16(tokens):
    """Tokens as little-endian bytes; what does not fit is refused, not cut."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 16:
        raise Trouble(f"token {max(tokens)} does not fit 16 bits")
    data = array.array("H", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def encode(text_path, out_path, words, end_of_text=False, size=PIECE):
    """Returns (bytes of text, tokens)."""
    to_tokens, n = encoder(words), 0
    with opened(text_path) as f, replacing(out_path) as out:
        out.write(bytes(HEADER))
        if end_of_text:
            out.write(to_uint16([END]))
            n = 1
        if f.read(3) != b"\xef\xbb\xbf":  # a byte order mark is no text
            f.seek(0)
        for text in pieces(f, text_path, size):
            tokens = to_tokens(text)
            out.write(to_uint16(tokens))
            n += len(tokens)
        if n == 0:
            raise Trouble(f"{text_path}: expected a text, got an empty file")
        if n >= 1 << 31:
            raise Trouble(f"{text_path}: {n} tokens; the format counts up to 2^31 - 1\n"
                          "hint: split the text")
        out.seek(0)
        out.write(struct.pack("<256i", MAGIC, 1, n, *[0] * 253))
        return f.tell(), n


def read_tokens(path):
    data = read(path)
    if len(data) < HEADER or struct.unpack("<i", data[:4])[0] != MAGIC:
        raise Trouble(f"{path}: expected a file of tokens, which begins with {MAGIC}")
    version, n = struct.unpack("<2i", data[4:12])
    if version != 1 or n < 0 or len(data) != HEADER + 2 * n:
        raise Trouble(f"{path}: expected version 1 and {HEADER} + 2 x tokens bytes, got version "
                      f"{version}, {n} tokens, {len(data)} bytes")
    if n == 0:
        raise Trouble(f"{path}: expected at least one token, its header says 0")
    tokens = array.array("H", data[HEADER:])
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def decode(tokens_path, text_path, words):
    tokens = read_tokens(tokens_path)
    for i, token in enumerate(tokens):
        if token >= len(words):
            raise Trouble(f"{tokens_path}: token {i} is {token}; expected at most {len(words) - 1}")
    with replacing(text_path) as f:
        f.write(b"".join(words[token] for token in tokens))
    return len(tokens)


def self_test(table):
    """Round trips and refusals; what needs tiktoken or the real table is skipped without them."""
    failed = []

    def see(what, ok):
        print(("ok   " if ok else "FAIL ") + what)
        if not ok:
            failed.append(what)

    def refused(what, words, f, *args):
        try:
            f(*args)
            see(what + ": refused", False)
        except Trouble as e:
            see(f"{what}: {e}".split("\n")[0], words in str(e))

    with tempfile.TemporaryDirectory() as d:
        def put(name, data):
            with open(os.path.join(d, name), "wb") as f:
                f.write(data)
            return os.path.join(d, name)

        words = [bytes([i]) for i in range(256)] + [b"%04x" % i for i in range(256, END)]
        words.append(END_TEXT)
        lines = b"".join(base64.b64encode(w) + b" %d\n" % i for i, w in enumerate(words[:END]))
        write_table(os.path.join(d, "table"), words)
        see("two kinds of table", read_table(os.path.join(d, "table")) == words ==
            read_table(put("tiktoken", lines)))
        data = read(os.path.join(d, "table"))
        refused("table cut off", "of which the file holds", read_table, put("t", data[:-1]))
        refused("table of version 1", "got version 1", read_table,
                put("t", data[:4] + b"\1" + data[5:]))
        refused("text as a table", ":1: expected base64", read_table, put("t", b"no table"))
        refused("a table with a line less", "got 50255 lines", read_table,
                put("t", lines[lines.index(b"\n") + 1:]))
        refused("no table", "cannot read", read_table, os.path.join(d, "absent"))
        line = lines.split(b"\n")
        refused("a token twice", ":257: token 255 is there twice", read_table,
                put("t", b"\n".join(line[:256] + [base64.b64encode(b"once more") + b" 255"]
                                    + line[256:])))
        refused("two tokens of the same bytes", "tokens 65 and 66 are the same", read_table,
                put("t", b"\n".join(line[:66] + [line[65].split()[0] + b" 66"] + line[67:])))
        refused("a token of no byte", "token 0: expected 1 to 255 bytes, got 0", read_table,
                put("t", data[:HEADER] + b"\0" + data[HEADER + 2:]))
        long = base64.b64encode(b"x" * 300) + b" 300"
        refused("a token of 300 bytes", "token 300: expected 1 to 255 bytes, got 300", read_table,
                put("t", b"\n".join(line[:300] + [long] + line[301:])))
        head = struct.pack("<256i", MAGIC, 1, 3, *[0] * 253)
        path = put("a.bin", head + struct.pack("<3H", 72, 256, END))
        decode(path, os.path.join(d, "a.txt"), words)
        see("decode", read(os.path.join(d, "a.txt")) == b"H0100" + END_TEXT)
        refused("token >= V", "token 1 is 50257", decode,
                put("b.bin", head + struct.pack("<3H", 72, V, 1)), "x", words)
        refused("tokens cut off", "got version 1, 3 tokens, 1028 bytes", read_tokens,
                put("b.bin", head + bytes(4)))
        refused("tokens of version 2", "version 2", read_tokens,
                put("b.bin", head[:4] + b"\2" + head[5:] + bytes(6)))
        refused("no tokens", "at least one token", read_tokens,
                put("b.bin", head[:8] + bytes(1016)))
        refused("text as tokens", "begins with", read_tokens, put("b.bin", b"text"))
        refused("a token of 17 bits", "does not fit", to_uint16, [1, 65536])
        text = ("It's  what\n\n we'll see:\t 100 %, \r\n\n \n caf\u00e9 \u00a0\u3000x \U0001f600"
                "<|endoftext|>don't \n  ").encode() * 30
        for size in (1, 7, 64, PIECE):
            parts = list(pieces(io.BytesIO(text), "text", size))
            see(f"pieces of {size}", "".join(parts).encode() == text and
                (size > 64 or len(parts) > 30))
        chinese = ("\u6587\u5b57\n" * 20 + "\u3000\n\u00a0 ").encode() * 20
        parts = list(pieces(io.BytesIO(chinese), "text", 64))
        see("pieces of Chinese", "".join(parts).encode() == chinese and
            max(map(len, parts)) < 128 and not any(p[-1:].isspace() for p in parts[:-1]))

        def run(*args):
            with contextlib.redirect_stderr(io.StringIO()) as err, \
                    contextlib.redirect_stdout(io.StringIO()):
                try:
                    return main([*args]), err.getvalue()
                except SystemExit as e:
                    return e.code, err.getvalue()

        def ends(what, code, words, *args):
            got = run(*args)
            see(f"{what}: {got}", got[0] == code and got[1].startswith("error: ") and
                words in got[1])

        file, one = os.path.join(d, "table"), put("one.bin", head + bytes(6))
        link, fifo = os.path.join(d, "link"), os.path.join(d, "fifo")
        os.symlink(one, link)
        os.mkfifo(fifo)
        before = read(one), read(file)
        for target in (one, link, file):
            ends("an output that is an input", 2, "got the input", "decode", one, target,
                 "--table", file)
        ends("a table over itself", 2, "got the input", "table", file, "--table", file)
        ends("a text over itself", 2, "got the input", "encode", one, one, "--table", file)
        os.remove(link)
        os.symlink(os.path.join(d, "a.txt"), link)
        for target in (link, fifo, os.devnull, d):
            ends("an output that is no file", 3, "regular file", "decode", one, target, "--table",
                 file)
        ends("a pipe as input", 3, "expected a file", "decode", fifo, "x", "--table", file)
        ends("a device as a table", 3, "expected a file", "table", "x", "--table", os.devnull)
        ends("no table named", 2, "expected encode", "decode", one, "x")
        ends("no such work", 2, "invalid choice", "encoed", one, "x")
        see("the inputs are unchanged", before == (read(one), read(file)))
        refused("Latin-1", "byte 103 is not UTF-8", list,
                pieces(io.BytesIO(b"a" * 100 + b"caf\xe9 "), "text", 10))
        try:
            encoder(words)
        except Trouble as e:
            print(f"SKIP encoding: {e}".split("\n")[0])
            table = None
        if table:
            words = read_table(table)
            whole = encoder(words)(text.decode())
            for size in (1, 7, 64, PIECE):
                _, n = encode(put("e.txt", b"\xef\xbb\xbf" + text), os.path.join(d, "e.bin"), words,
                              True, size)
                tokens = list(read_tokens(os.path.join(d, "e.bin")))
                see(f"encoded in pieces of {size}", n == len(tokens) and tokens == [END] + whole)
            decode(os.path.join(d, "e.bin"), os.path.join(d, "e2.txt"), words)
            see("decoded again", read(os.path.join(d, "e2.txt")) == END_TEXT + text)
            see("a known sentence", encoder(words)("Hello, world! I'm 10:") ==
                [15496, 11, 995, 0, 314, 1101, 838, 25])
            refused("an empty text", "empty file", encode, put("e.txt", b""), path, words)
            see("what was there stays", list(read_tokens(path)) == [72, 256, END])
            refused("a directory", "cannot read", encode, d, path, words)
            refused("an output nowhere", "cannot write", encode, put("e.txt", b"x"),
                    os.path.join(d, "absent", "x"), words)
    print(f"self test: {len(failed)} failed")
    return 1 if failed else 0


def main(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("encode", "decode", "table"))
    parser.add_argument("paths", nargs="*", metavar="FILE")
    parser.add_argument("--table", metavar="FILE", help="gpt2.tiktoken or gpt2_tokenizer.bin")
    parser.add_argument("--end-of-text", action="store_true", help="begin with <|endoftext|>")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args(argv)
    try:
        if args.self_test:
            return self_test(args.table)
        wanted = {"encode": 2, "decode": 2, "table": 1}.get(args.what)
        if wanted is None or len(args.paths) != wanted or not args.table:
            parser.error("expected encode TEXT OUT.bin, decode IN.bin TEXT or table OUT, and "
                         "--table FILE")
        not_an_input(args.paths[-1], args.paths[:-1] + [args.table])
        words = read_table(args.table)
        if args.what == "table":
            write_table(args.paths[0], words)
        elif args.what == "decode":
            print(f"{args.paths[1]}: {decode(*args.paths, words)} tokens decoded")
        else:
            size, n = encode(*args.paths, words, args.end_of_text)
            print(f"{args.paths[1]}: {size} bytes in {n} tokens")
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
