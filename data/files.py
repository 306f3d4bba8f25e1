"""What the converters of data/ share: one way to fail, to read and to write."""
import argparse
import contextlib
import os
import stat
import sys


class Trouble(Exception):
    """What stops the program: one line, and the exit code."""

    def __init__(self, text, code=3):
        super().__init__(text)
        self.code = code


def opened(path):
    """A regular file, open for reading; a pipe must not wait."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            what = "a directory" if os.path.isdir(path) else "something else of that name"
            raise Trouble(f"{path}: cannot read: expected a file, got {what}")
        return open(path, "rb")
    except OSError as e:
        raise Trouble(f"{path}: cannot read: {e.strerror}")


def read(path):
    """What is in a regular file."""
    with opened(path) as f:
        return f.read()


def not_an_input(path, inputs):
    """Trouble if the file to write is one of the inputs, by whatever name."""
    for other in inputs:
        with contextlib.suppress(OSError):
            if os.path.samefile(path, other):
                raise Trouble(f"{path}: expected a file of its own to write, got the input {other}",
                              2)


@contextlib.contextmanager
def replacing(path):
    """A file to write that takes the name `path` when all is written, and not before."""
    part = f"{path}.part-{os.getpid()}"
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise Trouble(f"{path}: cannot write: expected a new name or a regular file, got something "
                      "else of that name")
    try:
        with open(part, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        raise Trouble(f"{path}: cannot write: {e.strerror}")
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


class Parser(argparse.ArgumentParser):
    """Errors of usage in the form of all others: an error line, a hint, exit code 2."""

    def error(self, message):
        print(f"error: {message}\nhint: --help shows what there is", file=sys.stderr)
        sys.exit(2)
