"""Expressions: what is equal, and how much of two expressions is compared to find out."""

from __future__ import annotations

from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import Apply, Expr, Scalar, Var

F32 = DTYPES["f32"]


def doubled(levels: int, inner: Expr) -> Expr:
    """2^levels ways lead to the inner expression."""
    for _ in range(levels):
        inner = Apply("add", (inner, inner), F32)
    return inner


def test_expressions_built_alike_are_equal_however_much_they_share() -> None:
    first, second = (doubled(100, Scalar(0, F32)) for _ in range(2))
    assert first is not second
    assert first == second
    assert first == doubled(100, Scalar(0, F32))
    assert first != doubled(100, Scalar(1, F32))


def test_equality_of_parts_says_nothing_of_others() -> None:
    a, b, c = Var("i0"), Var("i0"), Var("i1")
    assert a == b
    assert Apply("add", (a, c), F32) == Apply("add", (b, Var("i1")), F32)
    assert Apply("add", (a, c), F32) != Apply("add", (c, b), F32)
    assert b != c
