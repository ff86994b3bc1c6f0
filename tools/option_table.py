"""Writes the tables of options and precisions in docs/devices.md anew: python tools/option_table.py"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlx.backends import BACKENDS, backend_named
from rlx.options import DEVICE_OPTIONS, PRECISIONS, CompileOptions
from rlx.records import names_of

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
DEVICES = " | ".join(BACKENDS)
FIRST, LAST = f"| option | {DEVICES} |\n", "\n\n"
PRECISION = f"| precision | storage | multiply | accumulate | {DEVICES} |\n"


def table() -> str:
    """Each option with what each device does about it."""
    rows = [FIRST, "|---" * (len(BACKENDS) + 1) + "|\n"]
    for name in names_of(CompileOptions):
        if name in DEVICE_OPTIONS:
            cells = ["yes" if name in backend_named(device).honours else "refused" for device in BACKENDS]
        elif name == "precision":
            held = [[p for p in PRECISIONS if p in backend_named(device).precisions] for device in BACKENDS]
            cells = [", ".join(f"`{p}`" for p in names) for names in held]
        else:
            cells = ["yes"] * len(BACKENDS)
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |\n")
    return "".join(rows)


def precisions() -> str:
    """The types of each precision, and which devices compute in them."""
    rows = [PRECISION, "|---" * (len(BACKENDS) + 4) + "|\n"]
    for name, types in PRECISIONS.items():
        cells = ["yes" if name in backend_named(device).precisions else "refused" for device in BACKENDS]
        rows.append(" | ".join((f"| `{name}`", *types, *cells)) + " |\n")
    return "".join(rows)


def written(page: str) -> str:
    """The page with the tables in it."""
    for first, made in ((FIRST, table()), (PRECISION, precisions())):
        start = page.index(first[: first.index("|", 1) + 1])  # its columns may have changed
        page = page[:start] + made + page[page.index(LAST, start) + 1 :]
    return page


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
