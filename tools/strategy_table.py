"""docs/strategies.md: the ways in which the CPU computes each kind of kernel.

`python tools/strategy_table.py` writes it; a test checks that it is current.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from rlx.backends.cpu.kernels.matmul.product import Product
from rlx.backends.cpu.kernels.registry import Special
from rlx.backends.cpu.select import STRATEGIES
from rlx.backends.cpu.strategy import CpuStrategy

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "strategies.md"
HEAD = """# Strategies of the CPU

The ways in which the CPU computes each kind of kernel, in the order in which they are tried: the first that does not
refuse a kernel computes it. `rlx explain MODEL --stage kernels` names the strategy of each kernel of a model, and with
`--why` says why those before it were not taken. Loops over elements without a product, a convolution or attention have
no strategy: they are shown as `map`, `row`, `reduce` or `copy`.

The choice is made when a graph is compiled. Where it would depend on sizes that only a run knows, the kernel holds both
ways (`attention.decode_or_packed`, or two names with a bar between them), and a run takes the one that a compile for
its sizes would: results of open and of fixed sizes have the same bits. What follows a plus sign is a variant;
`+streaming` is one of attention that stores copies of a cache past the processor's caches.

The lists are `kernels/matmul/strategies.py`, `kernels/conv/strategies.py`, `kernels/attention/strategies.py` and
`kernels/registry.py`; `select.py` names them all, and `strategy.computed` asks them. (Paths are below
`rlx/backends/cpu`.) A strategy's `emit` gives a kernel as text of LLVM's IR, of which `jit/compile.py` makes machine
code. All strategies with a panel format
(`matmul.panels`, `matmul.panels+...`, `matmul.q8+...`) have the kernel of `kernels/matmul/product.py` and the loops of
`gemm/kernel.py`: their file is that of the format.

[adding-a-strategy.md](adding-a-strategy.md) adds a strategy, and a panel format: a way to hold the second operand of
products. This page is written by `python tools/strategy_table.py`.
"""


def file_of(strategy: CpuStrategy) -> str:
    """The file that a strategy is in."""
    of: object = strategy.accepts if isinstance(strategy, Special) else type(strategy)
    path = inspect.getsourcefile(type(strategy.format) if isinstance(strategy, Product) else of)  # type: ignore[arg-type]
    return Path(str(path)).relative_to(ROOT / "rlx" / "backends" / "cpu").as_posix()


def rows() -> Iterator[str]:
    """The tables, line by line."""
    for kind, strategies in STRATEGIES.items():
        yield from ("", f"## {kind[:1].upper()}{kind[1:]}", "")
        yield from ("| strategy | what it computes | file |", "|---|---|---|")
        for strategy in strategies:
            yield f"| `{strategy.name}` | {strategy.summary} | `{file_of(strategy)}` |"


def page() -> str:
    """The whole document."""
    return HEAD + "\n".join(rows()) + "\n"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # it takes no arguments but --help
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
