"""Writes the table of docs/array-api.md: which names of the array API standard graph values have.

usage: python tools/array_api_table.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlx.ops.numpy.standard import FFT, LINALG, MISSING, NAMESPACE, VERSION

PAGE = Path(__file__).parents[1] / "docs" / "array-api.md"
FIRST = f"## Names of {VERSION}\n"


def table() -> str:
    """A row for each part of the standard, and one for each name that is missing."""
    rows = [FIRST, "\n| part | names |\n|---|---|\n"]
    own = [name for name in dir(NAMESPACE) if name not in ("linalg", "fft")]
    for part, names in (("", own), ("linalg", dir(LINALG)), ("fft", dir(FFT))):
        rows.append(f"| `xp{part and f'.{part}'}` | {', '.join(f'`{name}`' for name in names)} |\n")
    rows.append("\n| missing | why |\n|---|---|\n")
    rows += [f"| `{name}` | {why} |\n" for name, why in MISSING.items()]
    return "".join(rows)


def written(page: str) -> str:
    """The page with the table in it, which is its last section."""
    return page[: page.index("## Names of ")] + table()


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
