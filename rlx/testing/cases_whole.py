"""Cases of ops that need operands which fit together, or that belong to no family."""

from __future__ import annotations

import math
from typing import Any

from rlx.ir.shape import Size
from rlx.ops.base import OPS
from rlx.testing.oracle import ALL, FLOATS, Cases, Make, Operand, case

__all__ = ["WHOLE"]


def _op(name: str, *attributes: Any) -> Any:
    return OPS[name](*attributes)


def _bit_cast(name: str, n: Size, m: Size) -> Cases:
    for source, to in (("f32", "i32"), ("i32", "f32"), ("f64", "u64"), ("bf16", "u16"), ("i8", "u8"), ("u16", "f16")):
        yield case(_op(name, to), Operand((n, m), source, "any"))
    yield case(_op(name, "u8"), Operand((n, m), "bool"))
    yield case(_op(name, "i32"), Operand((n, m), "f32"), turned=True)


def _det(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name), Operand((n, 3, 3), dtype, "whole" if dtype in ("f16", "bf16") else "normal"))
    yield case(_op(name), Operand((5, 5), "f64"))
    yield case(_op(name), Operand((m, 1, 2, 2), "f32", "ties"))
    yield case(_op(name), Operand((m, 0, 0), "f64"))


def _tree_ensemble(name: str, n: Size, m: Size) -> Cases:
    """Two trees: a leaf, and x[1] <= 0.5 ? 1 : (x[0] > 0 ? 2 : 4), some of them for the second target."""
    for dtype in ("f32", "f64"):
        tables = (
            Operand((6,), "i32", data=(1, 0, 0, 0, 0, 0)),
            Operand((6,), dtype, data=(0.5, 0.0, 0.0, 0.0, 0.0, 0.0)),
            Operand((6,), "u8", data=(1, 4, 0, 0, 0, 0)),
            Operand((6,), "i32", data=(2, 3, 0, 0, 0, 0)),
            Operand((6,), "i32", data=(1, 4, 0, 0, 0, 0)),
            Operand((6,), "bool", data=(1, 0, 0, 0, 0, 0)),
            Operand((2,), "i32", data=(0, 5)),
            Operand((7,), "i32", data=(0, 0, 0, 1, 2, 3, 5)),
            Operand((5,), "i32", data=(0, 1, 0, 1, 0)),
            Operand((5,), dtype, data=(1.0, 2.0, 4.0, 8.0, 16.0)),
        )
        for aggregate in ("sum", "average", "min", "max"):
            yield case(_op(name, 2, 2, aggregate), Operand((n, 3), dtype, "any"), *tables)


def _places(name: str, n: Size, m: Size) -> Cases:
    """Cases where all is found: what lies beyond is not defined."""
    if name == "non_zero_places":
        for dtype in ALL[:-1]:
            yield case(_op(name), Operand((n, 2, m), dtype, "nonzero"))
        return
    limits = (Operand((), "i64", data=(10**6,)), Operand((), data=(1.0,)), Operand((), data=(-99.0,)))
    for center in (False, True):
        yield case(_op(name, center), Operand((2, m, 4), "f32", "unit"), Operand((2, n, m), "f32", "ties"), *limits)


def _ngram_counts(name: str, n: Size, m: Size) -> Cases:
    """The n-grams 0, 2, 0 1, 2 0 and 2 2 1 in items of 0 to 3, one of which leads nowhere."""
    first, items, feature = (0, 2, 3, 5, 5, 5, 6, 6), (0, 2, 1, 0, 2, 1), (-1, 1, 0, 2, 5, -1, 3)
    tables = [Operand((len(t),), "i64", data=t) for t in (first, items, feature)]
    for shortest, longest, skips in ((1, 1, 0), (1, 3, 0), (2, 3, 2), (2, 2, 1), (3, 2, 0)):
        op = _op(name, 6, shortest, longest, skips)
        yield case(op, Operand((n, m), "i64", "index", 3), *tables)
        yield case(op, Operand((12,), "i64", data=(2, 2, 1, 0, 1, 2, 0, 3, 2, 2, 0, 1)), *tables)


def _pair_distances(name: str, n: Size, m: Size) -> Cases:
    for root in (False, True):
        for dtype in FLOATS:
            yield case(_op(name, root), Operand((n, 7), dtype), Operand((m, 7), dtype))
            yield case(_op(name, root), Operand((3, m), dtype), Operand((40, m), dtype), turned=dtype == "f32")
    yield case(_op(name), Operand((2, 1200)), Operand((n, 1200)))


def _search_sorted(name: str, n: Size, m: Size) -> Cases:
    for dtype in (*FLOATS, "i32", "u8", "i64"):
        rows = Operand((3, 6), dtype, data=(*range(6), 0, 0, 2, 2, 2, 9, *[4] * 6))
        yield case(_op(name), rows, Operand((3, n), dtype, "ties"))
        yield case(_op(name), Operand((m, 1), dtype, "ties"), Operand((m, n), dtype, "ties"), turned=dtype == "f32")


def _unique_places(name: str, n: Size, m: Size) -> Cases:
    """Cases where all rows are distinct: what lies beyond is not defined."""
    for ordered in (False, True):
        for dtype in ALL[:-1]:
            yield case(_op(name, ordered), Operand((7, 1), dtype, data=(5, 0, 3, 1, 100, 2, 4)))
            rows = (3, 1, 0, 3, 0, 3, 1, 3, 0, 0, 1, 1)
            yield case(_op(name, ordered, "apart"), Operand((6, 2), dtype, data=rows), turned=dtype == "f32")
        yield case(_op(name, ordered), Operand((2, 1), "bool", data=(1, 0)))
        yield case(_op(name, ordered), Operand((1, m)))
        values = (math.inf, math.nan, -math.inf, -0.0, math.nan, 1.0)
        yield case(_op(name, ordered, "apart"), Operand((3, 2), data=values))
        yield case(_op(name, ordered), Operand((5, 1), data=values[:4] + values[5:]))


def _grouped_matmul(name: str, n: Size, m: Size) -> Cases:
    """Rows of one expert and of several, in order and not, by weights that are packed and by ones that are given."""
    for dtype in FLOATS:
        numbers = Operand((n,), "i64", "index", 5)
        yield case(_op(name), Operand((n, 19), dtype), Operand((5, 19, 33), dtype, param=True), numbers)
        yield case(_op(name), Operand((n, m), dtype), Operand((5, m, 9), dtype), numbers)
        shared = Operand((n, 2), "i32", "index", 3)
        yield case(_op(name, True), Operand((n, 1, 24), dtype), Operand((3, 16, 24), dtype, param=True), shared)
    for rounded in (_op(name, False, "q8"), _op(name, True, "q8")):
        matrices = Operand((5, 33, 70) if rounded.transposed else (5, 70, 33), "f32", "unit", param=True)
        yield case(rounded, Operand((n, 70), "f32", "unit"), matrices, Operand((n,), "i64", "index", 5))
        yield case(rounded, Operand((n, 1, 70), "f32", "unit"), matrices, Operand((n, 2), "i32", "index", 5))
    yield case(_op(name), Operand((2, n, 3, 4)), Operand((m, 4, 1)), Operand((2, n, 3), "i32", "index", m))
    yield case(
        _op(name, True),
        Operand((n, 400), "f32", "unit"),
        Operand((2, m, 400), "f32", "unit"),
        Operand((n,), "i32", "index", 2),
        turned=True,
    )


def _encode(name: str, n: Size, m: Size) -> Cases:
    for encoding in ("q8_0", "q4_0"):
        for dtype in ("f32", "f16", "bf16"):
            yield case(_op(name, encoding), Operand((n, 64), dtype))
        yield case(_op(name, encoding), Operand((2, m, 32), "f32", "ties"))


WHOLE: dict[str, Make] = {
    "bit_cast": _bit_cast,
    "det": _det,
    "encode": _encode,
    "grouped_matmul": _grouped_matmul,
    "non_max_places": _places,
    "non_zero_places": _places,
    "ngram_counts": _ngram_counts,
    "pair_distances": _pair_distances,
    "search_sorted": _search_sorted,
    "tree_ensemble": _tree_ensemble,
    "unique_places": _unique_places,
}
