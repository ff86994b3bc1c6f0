"""Complex numbers count as two floats each: what moves them is differentiated part by part.

Arithmetic on them is that of their parts already. The cotangent of a + ib is that of a + i times that of b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.graph import TensorType, Value
from rlx.ops.base import Op, apply
from rlx.ops.complex import FromPairs, ImaginaryPart, MakeComplex, Pairs, RealPart, part_of
from rlx.ops.gradients.attach import linear, reshaped, zeros

__all__ = ["PARTS", "is_complex", "joined", "of_parts", "part", "part_types"]

PARTS: tuple[Op, Op] = (RealPart(), ImaginaryPart())


@linear("each", Pairs)
def _pairs(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return apply(FromPairs(), cotangents[0])


@linear("each", FromPairs)
def _from_pairs(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return apply(Pairs(), cotangents[0])


def is_complex(value: Value | None) -> bool:
    """Whether it is one of complex numbers."""
    return value is not None and value.dtype.kind == "c"


def part(of: Op, values: Sequence[Value | None]) -> list[Value | None]:
    """The values, with those of complex numbers replaced by one part of them."""
    return [apply(of, v) if v is not None and is_complex(v) else v for v in values]


def of_parts(function: Callable[[Value], Value], x: Value) -> Value:
    """The function of x, or of both parts of complex numbers."""
    return apply(MakeComplex(), *(function(apply(p, x)) for p in PARTS)) if is_complex(x) else function(x)


def part_types(values: Sequence[Value], flags: Sequence[bool]) -> list[Value]:
    """The values, with the flagged ones that are complex replaced by ones that stand for the type of their parts."""
    return [
        Value(v.graph, TensorType(v.shape, part_of(v.dtype)), "input", "") if flag and is_complex(v) else v
        for v, flag in zip(values, flags, strict=True)
    ]


def joined(halves: Sequence[Sequence[Value | None]], like: Sequence[Value]) -> list[Value | None]:
    """What was made for real and for imaginary parts, as complex numbers where `like` is complex."""
    made: list[Value | None] = []
    for a, b, v in zip(*halves, like, strict=True):
        if not is_complex(v) or (a is None and b is None):
            made.append(a if b is None else b if a is None else a + b)
            continue
        none = TensorType(v.shape, part_of(v.dtype))
        made.append(apply(MakeComplex(), *(zeros(none) if p is None else reshaped(p, v.shape) for p in (a, b))))
    return made
