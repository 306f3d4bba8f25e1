#!/usr/bin/env python3
"""A small file of images for tests, as data/images.h reads it; half of them are evaluated on.

    small_images.py OUT HEIGHT WIDTH CHANNELS CLASSES IMAGES

An image is noise, of which one pixel in as many as there are classes is white: its label says
which, so that a model can learn it. Patches differ, as a gradient that is the little they differ by
would be mostly rounding.
"""
import os
import random
import struct
import sys


def main(argv):
    numbers = [int(x) for x in argv[2:] if x.isdigit()]
    if len(argv) != 7 or len(numbers) != 5 or min(numbers) < 1:
        print("error: expected small_images.py OUT HEIGHT WIDTH CHANNELS CLASSES IMAGES",
              file=sys.stderr)
        return 2
    for name, x, low, high in zip(("HEIGHT", "WIDTH", "CHANNELS", "CLASSES", "IMAGES"), numbers,
                                  (1, 1, 1, 2, 2), (1024, 1024, 4, 256, 10 ** 6)):
        if not low <= x <= high:
            print(f"error: {name}: expected {low} to {high}, got {x}", file=sys.stderr)
            return 2
    height, width, channels, classes, n = numbers
    draw = random.Random(1)
    labels = bytes(draw.randrange(classes) for _ in range(n))
    pixels = bytes(255 if i % classes == label else draw.randrange(256) for label in labels
                   for i in range(height * width * channels))
    head = struct.pack("<8s6I2Q8d", b"seqimage", 1, height, width, channels, classes, 0, n - n // 2,
                       n // 2, *[0.5] * 4, *[0.25] * 4)
    try:
        with open(argv[1], "wb") as f:
            f.write(head.ljust(128, b"\0") + labels + pixels)
    except OSError as e:
        print(f"error: {argv[1]}: cannot write it: {e.strerror}", file=sys.stderr)
        return 3
    print(f"{argv[1]}: {os.path.getsize(argv[1])} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
