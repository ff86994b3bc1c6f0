"""Read the lines of text on a page with PP-OCRv4: one network finds text, another reads it.

usage: python examples/read_page.py [PICTURE]

After `rlx fetch ppocrv4-det ppocrv4-rec`; it needs Pillow (the extra image).
Lines must be level, as on a scan. Without a picture it draws a page and reads that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

import rlx

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    sys.exit("this needs Pillow: pip install pillow")

FOUND = 0.3  # of the probability that a pixel is text
HEIGHT = 48  # pixels of a line, as the reader wants it

Boxes = Iterator[tuple[int, int, int, int]]


def draw_page() -> Image.Image:
    page = Image.new("RGB", (640, 320), "white")
    draw = ImageDraw.Draw(page)
    for row, line in enumerate(["Compilers read programs.", "Networks read pages.", "Invoice No. 2026-11"]):
        draw.text((40, 40 + 80 * row), line, fill="black", font=ImageFont.load_default(32))
    return page


def runs(flags: NDArray[np.bool_], gap: int) -> list[tuple[int, int]]:
    """The stretches [start, stop) of what is true; shorter gaps than `gap` do not part them."""
    places = np.flatnonzero(flags)
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > gap) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def lines_of(page: Image.Image, finder: rlx.CompiledGraph) -> Boxes:
    """Boxes (left, top, right, bottom) of lines, from the top down: stretches of rows, cut at wide gaps."""
    width, height = (-(-side // 32) * 32 for side in page.size)
    pixels = np.asarray(page.resize((width, height)), np.float32) / 255
    pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    (probabilities,) = finder.run([pixels.transpose(2, 0, 1)[None].astype(np.float32)])
    text = probabilities[0, 0] > FOUND
    for top, bottom in runs(text.any(axis=1), 2):
        more = (bottom - top) // 2  # the network marks the middle of a line
        for left, right in runs(text[top:bottom].any(axis=0), 3 * (bottom - top)):
            yield max(left - 2 * more, 0), max(top - more, 0), right + 2 * more, bottom + more


def read_line(line: Image.Image, reader: rlx.CompiledGraph, letters: list[str]) -> str:
    """The likeliest letter of each step; equal neighbours are one letter, number 0 parts them (CTC)."""
    pixels = np.asarray(line.resize((max(line.width * HEIGHT // line.height, 1), HEIGHT)), np.float32)
    (steps,) = reader.run([(pixels.transpose(2, 0, 1)[None] / 127.5 - 1)])
    best = steps[0].argmax(axis=1)
    first = np.diff(best, prepend=0) != 0
    return "".join(letters[number] for number in best[first & (best != 0)])


def main() -> None:
    page = Image.open(sys.argv[1]).convert("RGB") if len(sys.argv) > 1 else draw_page()
    finder = rlx.load(rlx.demo.path("ppocrv4-det"), device="cpu")
    source = rlx.demo.path("ppocrv4-rec")
    reader = rlx.load(source, dims={"x": (1, 3, HEIGHT, (8, 4096))}, device="cpu")
    letters = ["", *rlx.metadata(source)["character"].split("\n"), " "]
    for box in lines_of(page, finder):
        print(read_line(page.crop(box), reader, letters))


if __name__ == "__main__":
    try:
        main()
    except rlx.errors.NameNotFound as missing:  # a model is not there yet
        sys.exit(str(missing))
