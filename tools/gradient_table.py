"""docs/gradient-rules.md: how each op is differentiated and vectorised.

`python tools/gradient_table.py` writes it; a test checks that it is current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rlx.transform.functions  # noqa: F401 - attaches the rules
from rlx.ops import OPS
from rlx.ops.gradients.engine import CONTROL
from rlx.transform.batched_control import BATCHED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gradient-rules.md"
HEAD = """# Rules for gradients

How each op of rlx is differentiated (see [gradients.md](gradients.md)) and vectorised. Page written by
`python tools/gradient_table.py`.

Rules are in the file of the op's family in `rlx/ops/gradients`, attached to its class by a decorator (`@jvp(Softmax)`);
those that take loops are in `rlx/transform`. `rlx/ops/gradients/__init__.py` says which are where.

| backward | what it means |
|---|---|
| rule | a rule of its own |
| derived | its `jvp` is transposed |
| linear | its transpose |
| formula | written out in ops that have rules |
| decomposed | by its decomposition |
| zero | constant wherever it has a derivative |
| forward only | in `jvp`, not in `grad` |
| none | refused where floats would flow through it; ops of integers, bools, strings and random numbers need none |

`vmap` has a rule, writes the op out in others, or loops over the slices.

| op | backward | vmap |
|---|---|---|
"""


def backward(op: Any) -> str:
    """How cotangents go through an op."""
    if op in CONTROL:
        return "rule" if hasattr(CONTROL[op], "vjp") else "forward only"
    if op.linear == "zero":
        return "zero"
    for what, has in (("rule", op.vjp), ("linear", op.linear), ("derived", op.jvp), ("formula", op.formula)):
        if has:
            return what
    return "decomposed" if op.decompose is not None else "none"


def vectorised(op: Any) -> str:
    """How an op is applied to slices."""
    if op.batch is not None or op in BATCHED:
        return "rule"
    return "written out" if op.formula is not None or op.decompose is not None else "loop"


def rows() -> Iterator[str]:
    """The table, line by line."""
    for name, op in sorted(OPS.items()):
        if op.__module__.startswith("rlx."):
            yield f"| `{name}` | {backward(op)} | {vectorised(op)} |"


def page() -> str:
    """The whole document."""
    return HEAD + "\n".join(rows()) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(list(rows()))} ops\n")


if __name__ == "__main__":
    main()
