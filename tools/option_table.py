"""Writes the table of options and devices in docs/devices.md anew: python tools/option_table.py"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlx.backends import BACKENDS, backend_named
from rlx.options import DEVICE_OPTIONS, CompileOptions
from rlx.records import names_of

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
FIRST, LAST = "| option | " + " | ".join(BACKENDS) + " |\n", "\n\n"


def table() -> str:
    """Each option with what each device does about it."""
    rows = [FIRST, "|---" * (len(BACKENDS) + 1) + "|\n"]
    for name in names_of(CompileOptions):
        if name in DEVICE_OPTIONS:
            cells = ["yes" if name in backend_named(device).honours else "refused" for device in BACKENDS]
        else:
            cells = ["yes"] * len(BACKENDS)
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |\n")
    return "".join(rows)


def written(page: str) -> str:
    """The page with the table in it."""
    start = page.index(FIRST)
    return page[:start] + table() + page[page.index(LAST, start) + 1 :]


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
