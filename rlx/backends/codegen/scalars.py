"""Numbers of the graph in the arithmetic of kernels are words and no immediates: kernels that differ in them are alike.

As the learned factors and summands of a net, of which each layer has its own. Numbers that a bf16 holds stay in the
code, where an instruction may have a short form for them (0, 1, 0.5, 6), and so do those that an op is made of, which
are the same in all layers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from rlx.backends.codegen.arguments import Argument, KernelCode, Literal
from rlx.kernels.expr import Apply, Const, Expr, Given, Scalar, transform
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["filled", "without_scalars"]

ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def without_scalars(kernel: Kernel) -> tuple[Kernel, tuple[int, ...]]:
    """The kernel with `Scalar`s in the place of numbers, and these as words: their bits."""
    numbers: dict[Const, int] = {}

    def place(e: Expr) -> Expr | None:
        if not isinstance(e, Apply) or e.fn not in ARITHMETIC or not any(map(_is_word, e.args)):
            return None
        return Apply(e.fn, tuple(map(scalar, e.args)), e.dtype)

    def scalar(e: Expr) -> Expr:
        if not isinstance(e, Given) or not _is_word(e):
            return e
        return Scalar(numbers.setdefault(e, len(numbers)), e.dtype)

    def bare(each: Kernel) -> Kernel:
        stores = tuple(replace(store, expr=transform(store.expr, place)) for store in each.stores)
        return replace(each, stores=stores, before=None if each.before is None else bare(each.before))

    made = bare(kernel)
    return (made, tuple(map(_bits, numbers))) if numbers else (kernel, ())


def filled(codes: Sequence[KernelCode], numbers: Sequence[int]) -> list[KernelCode]:
    """The code with these numbers among its words."""
    if not numbers:
        return list(codes)

    def word(each: Argument) -> Argument:
        return numbers[each.number] if isinstance(each, Literal) else each

    return [replace(code, words=tuple(map(word, code.words))) for code in codes]


def _is_word(e: Expr) -> bool:
    if not isinstance(e, Given) or e.dtype.name != "f32" or not isinstance(e.value, float):
        return False
    return math.isfinite(e.value) and _bits(e) & 0xFFFF != 0


def _bits(e: Const) -> int:
    return int(struct.unpack("<I", struct.pack("<f", e.value))[0])
