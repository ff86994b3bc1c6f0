"""Pictures of the report, the memory map and the documentation, and what a browser finds wrong with them: `make docs`.

They are written to a folder with an index.html that shows all, at desktop width and at 400 points, light and dark. Each
page of the documentation is looked at in both widths for what is cut off or wider than the window, and for errors of
the console; the report and the map also for letters that are too small, on top of others, or too pale. A fault that is
found fails the run. Without chromium nothing is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
from browser import BROWSER, faults, screenshot

import rlx

ROOT = Path(__file__).parents[1]
HEIGHTS = {1200: 4200, 400: 5200}
SHOWN = ("index", "quickstart", "reference")  # of the documentation
AT_ONCE = 12  # pages in one window


def own_pages(folder: Path) -> list[Path]:
    """The report and the map of the demo's network, and of MiniLM where the models were fetched."""
    minilm = ROOT / "models" / "benchmark" / "minilm-b1-s128.onnx"
    made = []
    for source in (Path(rlx.demo.path("digits")), minilm):
        if source.exists():
            model = rlx.load(source, dims={"batch": (1, 64)} if source.stem == "digits" else {}, device="cpu")
            assert model.plan is not None
            report, drawn = (folder / f"{name}-{source.stem}.html" for name in ("report", "map"))
            shapes = [[n if isinstance(n, int) else 64 for n in spec.shape] for spec in model.inputs]
            model.report(report, [np.ones(n, s.dtype.numpy) for n, s in zip(shapes, model.inputs, strict=True)])
            drawn.write_text(model.plan.to_html())
            made += [report, drawn]
    return made


def found_wrong(pages: list[Path], *, dark: bool = False) -> Iterator[str]:
    """A line for each fault of each page, in both widths."""
    for width in HEIGHTS:
        for at in range(0, len(pages), AT_ONCE):
            for page, lines in faults(pages[at : at + AT_ONCE], width, dark=dark).items():
                yield from (f"{page.name}, {width} points, {'dark' if dark else 'light'}: {line}" for line in lines)


def pictures(pages: list[Path], folder: Path) -> list[Path]:
    """Four of each page."""
    made = []
    for page in pages:
        for width, height in HEIGHTS.items():
            for dark in (False, True):
                made.append(folder / f"{page.stem}-{width}{'-dark' if dark else ''}.png")
                screenshot(page, made[-1], width, height, dark=dark)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("docs", type=Path, help="The folder of the documentation's pages.")
    parser.add_argument("output", type=Path, help="The folder of the pictures.")
    given = parser.parse_args()
    if BROWSER is None:
        print("chromium is not installed: no pictures of pages")
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    own, docs = own_pages(given.output), sorted(given.docs.glob("*.html"))
    wrong = [*found_wrong(own + docs), *found_wrong(own, dark=True)]
    made = pictures([*own, *(page for page in docs if page.stem in SHOWN)], given.output)
    shown = "".join(f'<h2>{escape(p.stem)}</h2><img src="{p.name}" loading="lazy" alt="">' for p in made)
    (given.output / "index.html").write_text(f'<!doctype html><meta charset="utf-8"><title>Pictures</title>{shown}')
    print(f"{len(made)} pictures of {len(own)} pages of rlx and of the documentation: {given.output / 'index.html'}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
