"""Questions that passes ask about the values of a graph.

An answer holds for every run: it is read off constants, as their element type holds them, and off the ops that make a
value, and says nothing of params, which may be set again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlx.ir.casting import held
from rlx.ir.graph import Array, Node, Value
from rlx.ir.shape import Dim
from rlx.ops.elementwise import Abs, Add, Cast, Clip, Div, Exp, Mul, Pow, Sigmoid, Sqrt
from rlx.ops.layout import Expand, Full, Reshape, SizeOf, Transpose
from rlx.ops.reduction import ReduceMean, ReduceSum, ReduceSumSquare

__all__ = ["MANTISSA", "Statics", "either_way", "is_positive", "is_sized", "made_by", "uniform"]

MANTISSA = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}  # bits, the hidden one included
LARGEST_UNIFORM = 4096  # elements of a constant that are looked at to see whether they are equal


def made_by(value: Value, *ops: type[Any]) -> Node | None:
    """The node that makes the value if it is one of these ops."""
    node = value.node
    return node if node is not None and isinstance(node.op, ops) else None


def uniform(value: Value) -> Any:
    """The number (int, float or bool) that every element of the value is known to be, else None."""
    node = made_by(value, Expand, Reshape, Full)
    if node is not None:
        return held(node.op.value, node.op.dtype) if isinstance(node.op, Full) else uniform(node.inputs[0])
    if value.kind != "const" or value.data is None or not 0 < value.data.size <= LARGEST_UNIFORM:
        return None
    first = value.data.flat[0]
    if not (value.data == first).all() or (first == 0 and _signs_differ(value.data)):
        return None
    return np.asarray(first).item()


def _signs_differ(zeros: Array) -> bool:
    if zeros.dtype.kind in "iub":
        return False
    signs = np.signbit(zeros.astype(np.float32))
    return bool(signs.any() and not signs.all())


def is_positive(value: Value, depth: int = 12) -> bool:
    """Whether every element is known to be NaN or at least 0, and not -0; of integers, only those that can't wrap."""
    number = uniform(value)
    if number is not None:
        return bool(number >= 0 and math.copysign(1, number) > 0)
    node = value.node
    if value.dtype.kind in "ub":
        return True
    if node is None or depth == 0:
        return False
    if not value.dtype.is_float:
        return isinstance(node.op, SizeOf)
    match node.op:
        case Abs() | Exp() | Sigmoid() | ReduceSumSquare():
            return True
        case Mul() if node.inputs[0] is node.inputs[1]:
            return True
        case Pow() if uniform(node.inputs[1]) == 2:
            return True
        case Clip(lo=lo, hi=hi) if lo is not None and lo > 0 and (hi is None or hi >= lo):
            return bool(held(lo, value.dtype) > 0)
        case Add() | Mul() | Div() | Sqrt() | ReduceMean() | ReduceSum() | Expand() | Reshape() | Transpose() | Cast():
            return all(is_positive(v, depth - 1) for v in node.inputs)
    return False


def either_way(node: Node) -> Iterator[tuple[Value, Value]]:
    """The two inputs of a commutative node in both orders."""
    a, b = node.inputs
    yield a, b
    yield b, a


def is_sized(value: Value) -> bool:
    """Whether all sizes of the value are numbers."""
    return all(isinstance(size, int) for size in value.shape)


class Statics:
    """The set of values that depend on params and constants only, which `prepare` can make."""

    def __init__(self) -> None:
        self._known: dict[Value, bool] = {}

    def __contains__(self, value: Value) -> bool:
        waiting = [value]  # no recursion: graphs are deeper than Python's stack
        while waiting:
            made = self._of(waiting[-1])
            if isinstance(made, Value):
                waiting.append(made)
            else:
                waiting.pop()
        return bool(self._of(value))

    def _of(self, value: Value) -> bool | Value:
        """Whether the value is one of them, or the input that is to be known first."""
        node = value.node
        if node is None:
            return value.kind in ("param", "const")
        if value not in self._known:
            fixed = is_sized(value) and not node.regions and not _has_dims(tuple(node.op.attributes().values()))
            for v in node.inputs if fixed else ():
                if v.node is not None and v not in self._known:
                    return v
                if not self._of(v):
                    fixed = False
                    break
            self._known[value] = fixed
        return self._known[value]


def _has_dims(attribute: object) -> bool:
    if isinstance(attribute, tuple):
        return any(_has_dims(a) for a in attribute)
    return isinstance(attribute, Dim)
