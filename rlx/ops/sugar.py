"""Further operators of graph values, each in terms of ops."""

from __future__ import annotations

from typing import Any

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.base import OPS, functional

__all__ = ["floor_div", "logical"]


def floor_div(a: Any, b: Any) -> Any:
    """The largest integer not above a / b, element by element, in the type of the operands. (numpy.floor_divide)"""
    value = a if isinstance(a, Value) else b
    kind = value.dtype.numpy.kind
    if kind == "u":
        return functional(OPS["div"])(a, b)
    if kind == "i":  # div drops the fraction: one less where there was one and the signs differ
        zero = value.dtype.numpy.type(0)
        differ = functional(OPS["less"])(functional(OPS["bitwise_xor"])(a, b), zero)
        broken = functional(OPS["not_equal"])(functional(OPS["mod"])(a, b), zero)
        less = functional(OPS["cast"])(functional(OPS["and"])(broken, differ), to=value.dtype)
        return functional(OPS["sub"])(functional(OPS["div"])(a, b), less)
    return functional(OPS["floor"])(functional(OPS["div"])(a, b))


def logical(name: str, *values: Any) -> Any:
    """`and`, `or`, `xor`, `not`: of truths for bool values, bit by bit for integers."""
    first = next(v for v in values if isinstance(v, Value))
    return functional(OPS[name if first.dtype is DTYPES["bool"] else f"bitwise_{name}"])(*values)
