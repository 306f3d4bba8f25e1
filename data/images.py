#!/usr/bin/env python3
"""Images in the formats they are published in to the flat file that --images reads.

    images.py idx OUT --train IMAGES LABELS --test IMAGES LABELS     (Fashion-)MNIST, gzip or plain
    images.py cifar10 OUT --train data_batch_1.bin ... --test test_batch.bin
    images.py npz OUT --train part0.npz ... --test part5.npz         CIFAR-5m
    images.py show FILE                                              what a flat file holds
    images.py --self-test

IDX: 0x803, n, height, width (big-endian), pixels; 0x801, n, labels. CIFAR-10: records of a label
and 3 planes of 32 x 32. npz: X (n, height, width, channels) of uint8, Y (n) of whole numbers.
OUT is what data/images.h describes: a header, the labels and pixels of --train, then of --test.
--mean and --deviation are what the pixels are standardised by, of x/255, a number for each channel;
without them they are measured over --train. Files are read in pieces: they may be larger than the
memory. OUT takes a new name or replaces a regular file, never an input, and only when all is
written. Nothing is downloaded; Python is all that is needed.
"""
import argparse
import ast
import collections
import contextlib
import gzip
import io
import math
import os
import re
import signal
import struct
import sys
import tempfile
import zipfile
import zlib

from files import Parser, Trouble, not_an_input, opened, replacing

MAGIC, HEADER, SIDE, CHANNELS = b"seqimage", 128, 1024, 4
LAYOUT = "<8s6I2Q4d4d16x"
PIECE = 1 << 20  # bytes of pixels read at once
LONGEST = 1 << 16  # bytes of an array's header
BROKEN = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError,
          ValueError)

# Some images: their number, (height, width, channels), and a function that yields labels, which are
# a sequence, and pixels, which are bytes, piece by piece.
Part = collections.namedtuple("Part", "path n shape pieces")


@contextlib.contextmanager
def reading(path):
    """What the libraries raise over a broken file, as one line."""
    try:
        yield
    except BROKEN as e:
        raise Trouble(f"{path}: cannot read: {e}")


def take(f, n, path, what):
    """The next n bytes."""
    with reading(path):
        data = f.read(n)
    if len(data) != n:
        raise Trouble(f"{path}: {what}: expected {n} bytes more, got {len(data)}\n"
                      "hint: the file is cut off, or damaged")
    return data


def at_end(f, path):
    """Nothing follows; this is also where gzip compares its checksum."""
    with reading(path):
        if f.read(1):
            raise Trouble(f"{path}: expected its end, got more bytes than its header says")


def check_shape(path, n, shape):
    """Trouble unless there are images, and of a shape (height, width, channels) that is allowed."""
    height, width, channels = shape
    if n < 1:
        raise Trouble(f"{path}: expected at least one image, got none")
    if not (1 <= height <= SIDE and 1 <= width <= SIDE and 1 <= channels <= CHANNELS):
        raise Trouble(f"{path}: expected images of 1 to {SIDE} x 1 to {SIDE} x 1 to {CHANNELS}, "
                      f"got {height} x {width} x {channels}")


def counts(n, size):
    """n as a sum of numbers of images of `size` bytes that are read at once."""
    most = max(1, PIECE // size)
    return [most] * (n // most) + ([n % most] if n % most else [])


@contextlib.contextmanager
def idx(path, magic, dims):
    """An IDX file behind its header, and the sizes in that."""
    with opened(path) as f:
        packed = f.read(2) == b"\x1f\x8b"
        f.seek(0)
        g = gzip.GzipFile(fileobj=f) if packed else f
        got, = struct.unpack(">I", take(g, 4, path, "header"))
        if got != magic:
            raise Trouble(f"{path}: expected an IDX file that begins with {magic:#010x}, got "
                          f"{got:#010x}")
        sizes = struct.unpack(f">{dims}I", take(g, 4 * dims, path, "header"))
        body = os.fstat(f.fileno()).st_size - 4 - 4 * dims
        if not packed and math.prod(sizes) != body:
            raise Trouble(f"{path}: its header says {' x '.join(map(str, sizes))} bytes, the file "
                          f"has {body}")
        yield g, sizes


def idx_part(images, labels):
    """The Part of two IDX files."""
    with idx(images, 0x803, 3) as (_, (n, height, width)), idx(labels, 0x801, 1) as (_, (m,)):
        check_shape(images, n, (height, width, 1))
        if m != n:
            raise Trouble(f"{labels}: expected {n} labels for the images of {images}, got {m}")

    def pieces():
        with idx(images, 0x803, 3) as (f, _), idx(labels, 0x801, 1) as (g, _):
            for k in counts(n, height * width):
                yield take(g, k, labels, "labels"), take(f, k * height * width, images, "pixels")
            at_end(f, images)
            at_end(g, labels)

    return Part(images, n, (height, width, 1), pieces)


def cifar10_part(path):
    """The Part of a file of CIFAR-10, planes taken apart into pixels."""
    plane = 32 * 32
    record = 1 + 3 * plane
    with opened(path) as f:
        size = os.fstat(f.fileno()).st_size
    if not size or size % record:
        raise Trouble(f"{path}: expected records of {record} bytes, got {size} bytes")

    def pieces():
        with opened(path) as f:
            for k in counts(size // record, record):
                data, pixels = take(f, k * record, path, "records"), bytearray(k * 3 * plane)
                for i in range(k):
                    for c in range(3):
                        at = i * record + 1 + c * plane
                        pixels[i * 3 * plane + c:(i + 1) * 3 * plane:3] = data[at:at + plane]
                yield data[::record], pixels
            at_end(f, path)

    return Part(path, size // record, (32, 32, 3), pieces)


@contextlib.contextmanager
def npy(path, name):
    """An array of an npz file behind its header, its type and shape."""
    with opened(path) as f, contextlib.ExitStack() as stack:
        with reading(path):
            z = stack.enter_context(zipfile.ZipFile(f))
            if name not in z.namelist():
                raise Trouble(f"{path}: expected an array {name}, got {', '.join(z.namelist())}")
            g = stack.enter_context(z.open(name))
        where = f"{path}: {name}"
        start = take(g, 8, where, "header")
        if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
            raise Trouble(f"{where}: expected an array of NumPy's format, version 1 to 3")
        size = "<H" if start[6] == 1 else "<I"
        length, = struct.unpack(size, take(g, struct.calcsize(size), where, "header"))
        if length > LONGEST:
            raise Trouble(f"{where}: expected a header of at most {LONGEST} bytes, got {length}")
        try:
            header = ast.literal_eval(take(g, length, where, "header").decode("latin-1").strip())
            dtype, shape, fortran = (header[k] for k in ("descr", "shape", "fortran_order"))
            bytes_each = int(re.fullmatch(r"[<>|=][iu]([1248])", dtype).group(1))
            if fortran or not all(type(x) is int and x >= 0 for x in shape):
                raise ValueError
        except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, MemoryError,
                RecursionError):
            raise Trouble(f"{where}: expected an array of whole numbers in C order")
        wanted = 8 + struct.calcsize(size) + length + bytes_each * math.prod(shape)
        if z.getinfo(name).file_size != wanted:
            raise Trouble(f"{where}: its header says {' x '.join(map(str, shape))} of {bytes_each} "
                          f"bytes, {wanted} in all; got {z.getinfo(name).file_size}")
        yield g, dtype, shape


def npz_part(path):
    """The Part of an npz file with X and Y."""
    with npy(path, "X.npy") as (_, dtype, shape):
        if dtype not in ("|u1", "<u1", ">u1", "=u1") or len(shape) != 4:
            raise Trouble(f"{path}: X.npy: expected (n, height, width, channels) of uint8, got "
                          f"{shape} of {dtype}")
        check_shape(path, shape[0], shape[1:])
    with npy(path, "Y.npy") as (_, dtype, labels):
        if labels != shape[:1]:
            raise Trouble(f"{path}: Y.npy: expected {shape[:1]} labels, got {labels}")
    order = dtype[0].replace("|", "=")
    code = "bhiq"["1248".index(dtype[2])]
    code = code.upper() if dtype[1] == "u" else code

    def pieces():
        with npy(path, "X.npy") as (f, _, _), npy(path, "Y.npy") as (g, _, _):
            for k in counts(shape[0], math.prod(shape[1:])):
                labels = take(g, k * int(dtype[2]), f"{path}: Y.npy", "labels")
                yield (struct.unpack(f"{order}{k}{code}", labels),
                       take(f, k * math.prod(shape[1:]), f"{path}: X.npy", "pixels"))

    return Part(path, shape[0], tuple(shape[1:]), pieces)


def measured(histograms):
    """Mean and deviation of x/255 by channel, from how often each x is there."""
    means, deviations = [], []
    for c, histogram in enumerate(histograms):
        n = sum(histogram.values())
        mean = sum(x * k for x, k in histogram.items()) / 255 / n
        means.append(mean)
        deviations.append(math.sqrt(sum((x / 255 - mean) ** 2 * k
                                        for x, k in histogram.items()) / n))
        if deviations[c] < 1e-4:
            raise Trouble(f"channel {c} is {mean * 255:g} everywhere, so its deviation is 0\n"
                          "hint: give --mean and --deviation")
    return means, deviations


def convert(out, train, test, classes, mean, deviation):
    """Write Parts to the flat file `out`; mean and deviation None: measured over `train`."""
    shape, labels = train[0].shape, bytearray()
    channels = shape[2]
    for part in train + test:
        if part.shape != shape:
            raise Trouble(f"{part.path}: expected images of {shape} as in {train[0].path}, got "
                          f"{part.shape}")
    if mean and not len(mean) == len(deviation) == channels:
        raise Trouble(f"--mean, --deviation: expected {channels} numbers each, one for a channel, "
                      f"got {len(mean)} and {len(deviation)}", 2)
    n = [sum(part.n for part in parts) for parts in (train, test)]
    histograms = [collections.Counter() for _ in range(channels)]
    with replacing(out) as f:
        f.seek(HEADER + sum(n))
        for i, part in enumerate(train + test):
            first = len(labels)
            for some, pixels in part.pieces():
                if not 0 <= min(some) <= max(some) < classes:
                    at = next(k for k, label in enumerate(some) if not 0 <= label < classes)
                    raise Trouble(f"{part.path}: label {len(labels) - first + at} is {some[at]}; "
                                  f"expected 0 to {classes - 1}\nhint: --classes N")
                labels += bytes(some)
                f.write(pixels)
                for c in range(channels if i < len(train) and not mean else 0):
                    histograms[c].update(pixels[c::channels])
        if not mean:
            mean, deviation = measured(histograms)
        fill = [0.0] * (CHANNELS - channels)
        f.seek(0)
        f.write(struct.pack(LAYOUT, MAGIC, 1, *shape, classes, 0, *n, *mean, *fill, *deviation,
                            *fill) + labels)


def show(path):
    """One line about a flat file; what is checked is what data/images.h checks."""
    with opened(path) as f:
        size = os.fstat(f.fileno()).st_size
        data = f.read(HEADER)
        if len(data) < HEADER or data[:8] != MAGIC:
            raise Trouble(f"{path}: expected a file of images, which begins with {MAGIC.decode()}")
        _, version, height, width, channels, classes, _, train, test, *numbers = \
            struct.unpack(LAYOUT, data)
        check_shape(path, min(train, test), (height, width, channels))
        wanted = HEADER + (train + test) * (1 + height * width * channels)
        if version != 1 or size != wanted:
            raise Trouble(f"{path}: its header says version {version}, {train} + {test} images of "
                          f"{height} x {width} x {channels}, {wanted} bytes; got {size} bytes")
        labels = f.read(train + test)
        if not 2 <= classes <= 256:
            raise Trouble(f"{path}: expected 2 to 256 classes, got {classes}")
        if max(labels) >= classes:
            raise Trouble(f"{path}: expected labels from 0 to {classes - 1}, got {max(labels)}")
        for c in range(channels):
            if not (0 <= numbers[c] <= 1 and 1e-4 <= numbers[CHANNELS + c] <= 1):
                raise Trouble(f"{path}: channel {c}: expected a mean of 0 to 1 and a deviation of "
                              f"0.0001 to 1, got {numbers[c]:g} and {numbers[CHANNELS + c]:g}")
    mean, deviation = (" ".join(f"{x:.4f}" for x in numbers[at:at + channels])
                       for at in (0, CHANNELS))
    return (f"{path}: {train} images to train on, {test} to evaluate on, {height} x {width} x "
            f"{channels}, {len(set(labels))} of {classes} classes; mean {mean}, deviation "
            f"{deviation}")


def some_bytes(n, salt):
    """Bytes that follow no pattern of rows or channels."""
    return bytes((i * i * 7 + i * 31 + salt * 97 + (i >> 5)) % 251 for i in range(n))


def to_npy(descr, shape, data, fortran=False):
    """An array in NumPy's format, version 1."""
    header = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode()
    header += b" " * ((54 - len(header)) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def to_npz(**members):
    """An npz file of arrays by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name + ".npy", data)
    return out.getvalue()


class Tests:
    """Files of every format in a temporary directory: what is written, and what is refused."""

    def __init__(self, directory):
        self.directory, self.failed, self.passed = directory, 0, 0
        self.out = os.path.join(directory, "out")

    def see(self, what, ok):
        print(("ok   " if ok else "FAIL ") + what)
        self.failed += not ok
        self.passed += bool(ok)

    def put(self, name, data):
        path = os.path.join(self.directory, name)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def run(self, *args):
        with contextlib.redirect_stderr(io.StringIO()) as err, \
                contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                return main([*args]), err.getvalue() or out.getvalue()
            except SystemExit as e:
                return e.code, err.getvalue()

    def ends(self, what, code, words, *args):
        """It ends with this code and an error of at most two lines; OUT and the folder stay."""
        before = sorted(os.listdir(self.directory)), self.content()
        got, text = self.run(*args)
        lines = text.split("\n")
        form = lines[0].startswith("error: ") and lines[-1] == "" and (
            len(lines) == 2 or (len(lines) == 3 and lines[1].startswith("hint: ")))
        self.see(f"{what}: {got}, {lines[0]}", got == code and form and words in text and
                 before == (sorted(os.listdir(self.directory)), self.content()))

    def content(self):
        if not os.path.exists(self.out):
            return None
        with open(self.out, "rb") as f:
            return f.read()

    def written(self, what, args, shape, n, labels, pixels, numbers):
        """The file is header, labels and pixels, byte for byte."""
        code, text = self.run(*args)
        head = MAGIC + struct.pack("<6I2Q", 1, *shape, 10, 0, *n)
        got = self.content() or b""
        self.see(f"{what}: {text.strip()}", code == 0 and got[:48] == head and
                 got[112:128] == bytes(16) and got[128:] == labels + pixels and
                 len(got) >= 112 and
                 all(abs(a - b) < 1e-12 for a, b in zip(struct.unpack("<8d", got[48:112]),
                                                        numbers)))
        self.see(f"{what}, shown", self.run("show", self.out)[0] == 0)

    def idx(self):
        """Returns arguments that convert IDX files, for tests of other things."""
        pixels, labels = some_bytes(5 * 12, 1), bytes([3, 1, 4, 1, 5])
        images = struct.pack(">4I", 0x803, 5, 3, 4) + pixels
        names = struct.pack(">2I", 0x801, 5) + labels
        paths = [self.put("i", images), self.put("l", names)]
        packed = [self.put("i.gz", gzip.compress(images)), self.put("l.gz", gzip.compress(names))]
        mean = sum(pixels) / 60 / 255
        deviation = math.sqrt(sum((x / 255 - mean) ** 2 for x in pixels) / 60)
        numbers = [mean, 0, 0, 0, deviation, 0, 0, 0]
        for train, test in ((paths, packed), (packed, paths)):
            self.written("IDX", ("idx", self.out, "--train", *train, "--test", *test), (3, 4, 1),
                         (5, 5), labels * 2, pixels * 2, numbers)

        def bad(what, words, image_data, label_data, code=3):
            self.ends(what, code, words, "idx", self.out, "--train", *paths, "--test",
                      self.put("bad-i", image_data), self.put("bad-l", label_data))

        for what, pack, less, more in (
                ("plain", bytes, "its header says", "its header says"),
                ("gzip", gzip.compress, "bytes more, got", "expected its end")):
            bad(f"{what}: a byte less", less, pack(images[:-1]), names)
            bad(f"{what}: a byte more", more, pack(images + b"x"), names)
            bad(f"{what}: labels cut off", less, images, pack(names[:-1]))
            bad(f"{what}: labels and more", more, images, pack(names + b"x"))
            bad(f"{what}: a header cut off", "bad-i: header: expected 12", pack(images[:9]), names)
            bad(f"{what}: 2^32 - 1 images", "bad-", pack(images[:4] + b"\xff" * 4 + images[8:]),
                pack(names[:4] + b"\xff" * 4 + names[8:]))
            bad(f"{what}: no images", "at least one image", pack(images[:4] + bytes(4) +
                images[8:16]), pack(names[:4] + bytes(4)))
            bad(f"{what}: no rows", "got 0 x 4 x 1", pack(images[:8] + bytes(4) + images[12:16]),
                names)
            bad(f"{what}: labels as images", "begins with 0x00000803, got 0x00000801", pack(names),
                names)
            bad(f"{what}: other byte order", "got 0x03080000", pack(images[3::-1] + images[4:]),
                names)
            bad(f"{what}: fewer labels", "expected 5 labels", images, pack(names[:4] +
                struct.pack(">I", 4) + labels[:4]))
        bad("nothing", "header: expected 4 bytes", b"", names)
        whole = gzip.compress(images)
        bad("a gzip file cut off", "cannot read", whole[:-9], names)
        bad("a wrong checksum", "cannot read", whole[:-8] + bytes(4) + whole[-4:], names)
        bad("gzip of nothing it knows", "cannot read", whole[:10] + b"\xff" * 20, names)
        bad("a label of 10", "bad-i: label 2 is 10; expected 0 to 9", images,
            names[:10] + b"\x0a" + names[11:])
        wide = struct.pack(">4I", 0x803, 5, 4, 3) + pixels
        bad("other shapes", "expected images of (3, 4, 1)", wide, names)
        even = [self.put("even", images[:16] + b"\x80" * 60), paths[1]]
        both = ("idx", self.out, "--train", *even, "--test", *paths)
        self.ends("all of one grey", 3, "channel 0 is 128 everywhere", *both)
        self.written("numbers given", both + ("--mean", ".25", "--deviation", ".5"), (3, 4, 1),
                     (5, 5), labels * 2, b"\x80" * 60 + pixels, [.25, 0, 0, 0, .5, 0, 0, 0])
        return both

    def cifar10(self):
        pixels, labels = some_bytes(3 * 3072, 2), bytes([9, 0, 7])
        planes = [b"".join(pixels[i * 3072 + c:(i + 1) * 3072:3] for c in range(3))
                  for i in range(3)]
        data = b"".join(bytes([label]) + p for label, p in zip(labels, planes))
        a, b = self.put("a.bin", data[:2 * 3073]), self.put("b.bin", data[2 * 3073:])
        numbers = [.4914, .4822, .4465, 0, .2023, .1994, .2010, 0]
        given = ("--mean", ".4914", ".4822", ".4465", "--deviation", ".2023", ".1994", ".2010")
        self.written("CIFAR-10", ("cifar10", self.out, "--train", a, "--test", b, *given),
                     (32, 32, 3), (2, 1), labels, pixels, numbers)
        self.written("CIFAR-10 of two files", ("cifar10", self.out, "--train", a, b, "--test", b,
                     *given), (32, 32, 3), (3, 1), labels + labels[2:], pixels + pixels[6144:],
                     numbers)
        first = [[x / 255 for x in pixels[c:2 * 3072:3]] for c in range(3)]
        mean = [sum(xs) / 2048 for xs in first]
        spread = [math.sqrt(sum((x - m) ** 2 for x in xs) / 2048) for xs, m in zip(first, mean)]
        self.written("CIFAR-10, measured", ("cifar10", self.out, "--train", a, "--test", b),
                     (32, 32, 3), (2, 1), labels, pixels, [*mean, 0, *spread, 0])
        for what, bad in (("a byte less", data[:-1]), ("a byte more", data + b"x"),
                          ("nothing", b""), ("gzip", gzip.compress(data))):
            self.ends(f"CIFAR-10: {what}", 3, "expected records of 3073 bytes", "cifar10", self.out,
                      "--train", a, "--test", self.put("bad.bin", bad))
        self.ends("CIFAR-10: a label of 10", 3, "label 1 is 10", "cifar10", self.out, "--train", a,
                  "--test", self.put("bad.bin", data[:3073] + b"\x0a" + data[3074:6146]))
        self.ends("two numbers for three channels", 2, "expected 3 numbers each", "cifar10",
                  self.out, "--train", a, "--test", b, "--mean", "0", "0", "--deviation", "1", "1")

    def npz(self):
        pixels, labels = some_bytes(4 * 30, 3), bytes([1, 2, 3, 4])
        x = to_npy("|u1", (4, 2, 5, 3), pixels)
        given = ("--mean", "0", ".5", "1", "--deviation", "1", ".5", ".1")
        numbers = [0, .5, 1, 0, 1, .5, .1, 0]
        files = {"whole": to_npz(X=x, Y=to_npy("<i8", (4,), struct.pack("<4q", *labels)))}
        for descr, code in (("|u1", "4B"), ("<u2", "<4H"), (">i4", ">4i"), (">u8", ">4Q")):
            files[descr[1:]] = to_npz(X=x, Y=to_npy(descr, (4,), struct.pack(code, *labels)))
        with contextlib.suppress(ImportError):
            import numpy
            arrays = {"X": numpy.frombuffer(pixels, numpy.uint8).reshape(4, 2, 5, 3),
                      "Y": numpy.frombuffer(labels, numpy.uint8).astype(int)}
            for save in (numpy.savez, numpy.savez_compressed):
                out = io.BytesIO()
                save(out, **arrays)
                files[save.__name__] = out.getvalue()
        for name, data in files.items():
            path = self.put(name, data)
            self.written(f"npz, {name}", ("npz", self.out, "--train", path, "--test", path, *given),
                         (2, 5, 3), (4, 4), labels * 2, pixels * 2, numbers)
        whole, y = self.put("whole", files["whole"]), to_npy("|u1", (4,), labels)

        def bad(what, words, data):
            self.ends(f"npz: {what}", 3, words, "npz", self.out, "--train", whole, "--test",
                      self.put("bad.npz", data), *given)

        bad("a byte less", "X.npy: its header says 4 x 2 x 5 x 3", to_npz(X=x[:-1], Y=y))
        bad("a byte more", "X.npy: its header says", to_npz(X=x + b"x", Y=y))
        bad("a label less", "Y.npy: its header says 4 of 1", to_npz(X=x, Y=y[:-1]))
        bad("fewer labels", "expected (4,) labels, got (3,)", to_npz(X=x, Y=to_npy("|u1", (3,),
            labels[:3])))
        bad("2^62 images", "its header says", to_npz(X=to_npy("|u1", (1 << 62, 2, 5, 3), pixels),
            Y=y))
        bad("a negative size", "in C order", to_npz(X=to_npy("|u1", (-4, 2, 5, 3), pixels), Y=y))
        bad("no images", "at least one image", to_npz(X=to_npy("|u1", (0, 2, 5, 3), b""), Y=y))
        bad("three dimensions", "expected (n, height", to_npz(X=to_npy("|u1", (4, 10, 3), pixels),
            Y=y))
        bad("planes first", "got 3 x 2 x 5", to_npz(X=to_npy("|u1", (4, 3, 2, 5), pixels), Y=y))
        bad("images of real numbers", "whole numbers", to_npz(X=to_npy("<f4", (1, 2, 5, 3), pixels),
            Y=y))
        bad("images of int8", "of uint8, got", to_npz(X=to_npy("|i1", (4, 2, 5, 3), pixels), Y=y))
        bad("Fortran order", "in C order", to_npz(X=to_npy("|u1", (4, 2, 5, 3), pixels, True), Y=y))
        bad("objects", "whole numbers", to_npz(X=x, Y=to_npy("|O", (4,), labels)))
        bad("a label of -1", "label 3 is -1", to_npz(X=x, Y=to_npy("|i1", (4,), b"\1\2\3\xff")))
        bad("no labels", "expected an array Y.npy, got X.npy", to_npz(X=x))
        bad("other names", "expected an array X.npy", to_npz(images=x, labels=y))
        bad("no array", "NumPy's format", to_npz(X=pixels, Y=y))
        bad("an array's header cut off", "header: expected", to_npz(X=x[:20], Y=y))
        bad("a program in a header", "in C order", to_npz(X=b"\x93NUMPY\1\0\x0b\0exec('a=1')",
            Y=y))
        bad("no zip file", "cannot read", b"PK\3\4 and nothing else")
        bad("nothing", "cannot read", b"")
        bad("cut off", "cannot read", files["whole"][:-30])
        stored = io.BytesIO()
        with zipfile.ZipFile(stored, "w") as z:
            z.writestr("X.npy", x)
            z.writestr("Y.npy", y)
        data = bytearray(stored.getvalue())
        data[data.index(pixels[:8])] ^= 1
        bad("a flipped bit", "cannot read: Bad CRC-32", bytes(data))

    def others(self, both):
        fifo = os.path.join(self.directory, "fifo")
        os.mkfifo(fifo)
        a = os.path.join(self.directory, "a.bin")
        self.ends("no file", 3, "absent: cannot read: No such file", "cifar10", self.out, "--train",
                  os.path.join(self.directory, "absent"), "--test", a)
        self.ends("a pipe", 3, "expected a file", "cifar10", self.out, "--train", fifo, "--test", a)
        self.ends("a directory", 3, "got a directory", "cifar10", self.out, "--train",
                  self.directory, "--test", a)
        self.ends("an output that is an input", 2, "got the input", "cifar10", a, "--train", a,
                  "--test", a)
        self.ends("an output that is a pipe", 3, "regular file", "cifar10", fifo, "--train", a,
                  "--test", a, "--mean", "0", "0", "0", "--deviation", "1", "1", "1")
        self.ends("an output nowhere", 3, "cannot write", "cifar10", os.path.join(self.directory,
                  "absent", "x"), "--train", a, "--test", a)
        self.ends("no test", 2, "expected", "cifar10", self.out, "--train", a)
        self.ends("three files of IDX", 2, "IMAGES LABELS", *both[:5], both[4], *both[5:])
        self.ends("a mean only", 2, "both", *both, "--mean", ".5")
        for mean, deviation in (("nan", "1"), ("-1", "1"), ("1.5", "1"), ("0", "0"), ("0", "inf")):
            self.ends(f"mean {mean}, deviation {deviation}", 2, "expected", *both, f"--mean={mean}",
                      f"--deviation={deviation}")
        for classes in ("1", "257", "ten"):
            self.ends(f"{classes} classes", 2, "--classes", *both, "--classes", classes)
        self.ends("five classes", 3, "label 4 is 5; expected 0 to 4", *both, "--classes", "5")
        self.ends("no such work", 2, "invalid choice", "gif", self.out)
        whole = self.content()
        for what, data in (("cut off", whole[:-1]), ("and more", whole + b"x"), ("empty", b""),
                           ("a wrong label", whole[:128] + b"\x0a" + whole[129:]),
                           ("no test images", whole[:40] + bytes(8) + whole[48:]),
                           ("version 2", whole[:8] + b"\2" + whole[9:]),
                           ("one class", whole[:24] + b"\1" + whole[25:]),
                           ("257 classes", whole[:25] + b"\1" + whole[26:]),
                           ("a mean of nan", whole[:48] + struct.pack("<d", math.nan) + whole[56:]),
                           ("a deviation of 0", whole[:80] + bytes(8) + whole[88:])):
            self.ends(f"show: {what}", 3, "flat", "show", self.put("flat", data))


def self_test():
    """Round trips and refusals, in one piece and in many; numpy's own files if it is installed."""
    global PIECE
    passed = failed = 0
    for PIECE in (PIECE, 64):
        with tempfile.TemporaryDirectory() as directory:
            tests = Tests(directory)
            both = tests.idx()
            tests.cifar10()
            tests.npz()
            tests.others(both)
            passed, failed = passed + tests.passed, failed + tests.failed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def numbers(parser, args):
    """--mean and --deviation, both or none, in the ranges that data/images.h reads."""
    if (args.mean is None) != (args.deviation is None):
        parser.error("--mean, --deviation: expected both or none")
    for name, low, values in (("--mean", 0, args.mean), ("--deviation", 1e-4, args.deviation)):
        for x in values or ():
            if not low <= x <= 1:
                parser.error(f"{name}: expected numbers from {low:g} to 1, got {x:g}")


def main(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("idx", "cifar10", "npz", "show"))
    parser.add_argument("out", nargs="?", metavar="FILE")
    parser.add_argument("--train", nargs="+", metavar="FILE")
    parser.add_argument("--test", nargs="+", metavar="FILE")
    parser.add_argument("--classes", type=int, default=10, metavar="N", help="2 to 256 [10]")
    parser.add_argument("--mean", nargs="+", type=float, metavar="X")
    parser.add_argument("--deviation", nargs="+", type=float, metavar="X")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args(argv)
    numbers(parser, args)
    try:
        if args.self_test:
            return self_test()
        if args.what == "show" and args.out and not args.train and not args.test:
            print(show(args.out))
            return 0
        if args.what in (None, "show") or not (args.out and args.train and args.test):
            parser.error("expected WHAT OUT --train FILES --test FILES, or show FILE")
        if not 2 <= args.classes <= 256:
            parser.error(f"--classes: expected 2 to 256, got {args.classes}")
        not_an_input(args.out, args.train + args.test)
        if args.what == "idx":
            if len(args.train) != 2 or len(args.test) != 2:
                parser.error("idx: expected --train IMAGES LABELS and --test IMAGES LABELS")
            parts = [[idx_part(*args.train)], [idx_part(*args.test)]]
        else:
            one = cifar10_part if args.what == "cifar10" else npz_part
            parts = [[one(path) for path in paths] for paths in (args.train, args.test)]
        convert(args.out, *parts, args.classes, args.mean, args.deviation)
        print(show(args.out))
    except Trouble as e:
        print(f"error: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no half of a file is left
    sys.exit(main(sys.argv[1:]))
