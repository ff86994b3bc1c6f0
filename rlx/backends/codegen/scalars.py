"""Numbers of the graph in the arithmetic of kernels are words and no immediates: kernels that differ in them are alike.

As the learned factors and summands of a net, of which each layer has its own. Numbers that a bf16 holds stay in the
code, where an instruction may have a short form for them (0, 1, 0.5, 6), and so do those that an op is made of, which
are the same in all layers. The zeros of quantised bytes are such numbers too.

Of the numbers that an op is made of, words are those that nets choose: how many elements a mean is of (`MEAN` or more:
windows of pools keep theirs), what a norm adds to it, and the slope of a leaky relu. One norm is then that of any
width, and code that comes with rlx fits more nets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from rlx.backends.codegen.arguments import Argument, KernelCode, Literal
from rlx.kernels.expr import Apply, Const, Expr, Given, Reduce, Scalar, Select, transform
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["f32_bits", "filled", "without_scalars"]

ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
WHOLE = frozenset({"i8", "u8", "i16"})  # types of the zeros of bytes
MEAN = 65  # elements of a mean that is divided by a word: a division beside so many additions takes no time


def without_scalars(kernel: Kernel) -> tuple[Kernel, tuple[int, ...]]:
    """The kernel with `Scalar`s in the place of numbers, and these as words: their bits."""
    numbers: dict[Const, int] = {}

    def place(e: Expr) -> Expr | None:
        if isinstance(e, Select):
            return with_slope(e)
        return None if not isinstance(e, Apply) or e.fn not in ARITHMETIC else with_words(e, _words_of(e))

    def with_slope(e: Select) -> Expr | None:
        low = e.b
        if not isinstance(low, Apply) or low.fn != "mul" or low.args[0] != e.a:
            return None
        sloped = with_words(low, _is_finite)
        return None if sloped is None else Select(e.cond, e.a, sloped)

    def less_zero(e: Expr) -> Expr | None:
        return None if not isinstance(e, Apply) or e.fn != "sub" else with_words(e, _is_whole)

    def with_words(e: Apply, are_words: Callable[[Const], bool]) -> Expr | None:
        def word(x: Expr) -> Expr:
            if not isinstance(x, Const) or not are_words(x):
                return x
            return Scalar(numbers.setdefault(x, len(numbers)), x.dtype)

        args = tuple(map(word, e.args))
        return None if args == e.args else Apply(e.fn, args, e.dtype)

    def bare(each: Kernel) -> Kernel:
        stores = tuple(replace(store, expr=transform(store.expr, place)) for store in each.stores)
        anchor = each.anchor
        if isinstance(anchor, Conv):  # what a kernel packs: bytes less their zero
            anchor = replace(anchor, w=transform(anchor.w, less_zero))
        before = None if each.before is None else bare(each.before)
        return replace(each, stores=stores, anchor=anchor, before=before)

    made = bare(kernel)
    return (made, tuple(map(_bits, numbers))) if numbers else (kernel, ())


def filled(codes: Sequence[KernelCode], numbers: Sequence[int]) -> list[KernelCode]:
    """The code with these numbers among its words."""
    if not numbers:
        return list(codes)

    def word(each: Argument) -> Argument:
        return numbers[each.number] if isinstance(each, Literal) else each

    return [replace(code, words=tuple(map(word, code.words))) for code in codes]


def _words_of(e: Apply) -> Callable[[Const], bool]:
    """Which numbers among the operands of some arithmetic are words."""
    if e.fn == "div" and _is_sum(e.args[0]):
        return lambda x: _is_finite(x) and isinstance(x.value, float) and x.value >= MEAN
    return _is_finite if e.fn == "add" and _is_mean(e.args[0]) else _is_word


def _is_sum(e: Expr) -> bool:
    return isinstance(e, Reduce) and e.kind == "add"


def _is_mean(e: Expr) -> bool:
    """Whether that is a mean; its number of elements is a word by now."""
    return isinstance(e, Apply) and e.fn == "div" and _is_sum(e.args[0]) and not isinstance(e.args[1], Const)


def _is_word(e: Const) -> bool:
    return isinstance(e, Given) and _is_finite(e) and _bits(e) & 0xFFFF != 0


def _is_finite(e: Const) -> bool:
    return e.dtype.name == "f32" and isinstance(e.value, float) and math.isfinite(e.value)


def _is_whole(e: Const) -> bool:
    return isinstance(e, Given) and e.dtype.name in WHOLE and isinstance(e.value, int) and e.value != 0


def _bits(e: Const) -> int:
    if isinstance(e.value, int):
        return e.value & ((1 << e.dtype.bits) - 1)
    assert isinstance(e.value, float)
    return f32_bits(e.value)


def f32_bits(value: float) -> int:
    """The 32 bits of a number rounded to f32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
