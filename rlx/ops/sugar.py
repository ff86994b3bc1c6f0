"""Further operators of graph values, each in terms of ops."""

from __future__ import annotations

from typing import Any

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Value
from rlx.ops.base import OPS, functional

__all__ = ["floor_div", "logical"]

F32 = DTYPES["f32"]


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
    return _float_floor_div(a, b, value.dtype)


def _float_floor_div(a: Any, b: Any, dtype: DType) -> Any:
    """As NumPy: the quotient without the rest is whole but for rounding, so rounding a / b up is no matter."""
    add, div, equal, greater, mod, mul, sub, where = (
        functional(OPS[name]) for name in ("add", "div", "equal", "greater", "mod", "mul", "sub", "where")
    )
    if dtype.bits < 32:
        wide = functional(OPS["cast"])
        a, b = (wide(x, to=F32) if isinstance(x, Value) else float(dtype.numpy.type(x)) for x in (a, b))
        return wide(_float_floor_div(a, b, F32), to=dtype)
    quotient = div(a, b)
    if not isinstance(b, Value) and b == 0:
        return quotient
    rest = mod(a, b, fmod=True)
    near = div(sub(a, rest), b)
    near = where(equal(mod(a, b), rest), near, sub(near, 1))  # one less where the signs differ
    whole = functional(OPS["floor"])(near)
    whole = where(greater(sub(near, whole), 0.5), add(whole, 1), whole)
    whole = where(equal(near, 0), mul(quotient, 0), whole)  # with the quotient's sign
    return where(equal(b, 0), quotient, whole) if isinstance(b, Value) else whole


def logical(name: str, *values: Any) -> Any:
    """`and`, `or`, `xor`, `not`: of truths for bool values, bit by bit for integers."""
    first = next(v for v in values if isinstance(v, Value))
    return functional(OPS[name if first.dtype is DTYPES["bool"] else f"bitwise_{name}"])(*values)
