"""Running sums and products along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import ceildiv, upper
from rlx.ops.base import Op, Work, axis_of, check_kind, register, widened
from rlx.ops.elementwise import Add, Cast, Mul
from rlx.ops.layout import Pad, Reshape, Slice, Unsqueeze
from rlx.ops.reduction import ReduceProd, ReduceSum

__all__ = ["CumProd", "CumSum", "Prefix"]

BLOCK = 64
KINDS: dict[str, Any] = {"add": np.cumsum, "mul": np.cumprod}


def _cumulated(kind: str, x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
    """The running `kind` in the type of x; exclusive: without the element itself."""
    x = np.flip(x, axis) if reverse else x
    y: Any = KINDS[kind](x, axis=axis, dtype=x.dtype)
    if exclusive:
        y = np.roll(y, 1, axis=axis)
        y[(slice(None),) * axis + (slice(0, 1),)] = 1 if kind == "mul" else 0
    return np.ascontiguousarray(np.flip(y, axis) if reverse else y)


@register
class Prefix(Op):
    """For each element of a short axis the sum ("add") or product ("mul") of it and those before.

    `exclusive` leaves the element itself out, `reverse` takes those after it. It costs the square of the axis: `CumSum`
    splits a long one.
    """

    axis: int
    kind: str = "add"
    exclusive: bool = False
    reverse: bool = False

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        axis_of(self.axis, x.rank, self.op_name)
        if self.kind not in KINDS:
            raise OptionError(f"prefix: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(x[0].shape[self.axis], *x)

    def reference(self, x: Array) -> Array:
        return _cumulated(self.kind, widened(x), self.axis % x.ndim, self.exclusive, self.reverse).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            def term(j: Any) -> Any:
                here = i[axis]
                first, second = (here, j) if self.reverse else (j, here)
                counted = first < second if self.exclusive else first <= second
                return k.select(counted, k.widen(x(*i[:axis], j, *i[axis + 1 :])), 1 if self.kind == "mul" else 0)

            return k.reduce(self.kind, (x.shape[axis],), term)

        return k.map(element)


class _Cumulative(Op):
    """Base of the running sum and product, see `CumSum`."""

    kind: ClassVar[str]
    combine: ClassVar[Callable[[], Op]]
    whole: ClassVar[Callable[..., Op]]

    axis: int
    exclusive: bool
    reverse: bool

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        axis_of(self.axis, x.rank, self.op_name)
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return _cumulated(self.kind, widened(x), self.axis % x.ndim, self.exclusive, self.reverse).astype(x.dtype)

    def decompose(self, g: Graph, x: Value) -> Value:
        dtype = x.dtype
        if dtype.is_float and dtype.bits < 32:
            (x,) = g.add(Cast(DTYPES["f32"]), x)
        y = self._blocks(g, x, self.axis % x.rank, self.exclusive, 3)
        return y if y.dtype is dtype else g.add(Cast(dtype), y)[0]

    def _blocks(self, g: Graph, x: Value, axis: int, exclusive: bool, levels: int) -> Value:
        """Runs within blocks, then adds to each the run over the blocks before: n * BLOCK instead of n * n steps."""
        n = x.shape[axis]
        bound = upper(n)
        if levels == 1 or (bound is not None and bound <= BLOCK):
            return g.add(Prefix(axis, self.kind, exclusive, self.reverse), x)[0]
        blocks = ceildiv(n, BLOCK)
        ends = [blocks * BLOCK - n if d == axis else 0 for d in range(x.rank)]
        (padded,) = g.add(Pad((*[0] * x.rank, *ends), 1 if self.kind == "mul" else 0), x)
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        (rows,) = g.add(Reshape((*before, blocks, BLOCK, *after)), padded)
        (within,) = g.add(Prefix(axis + 1, self.kind, exclusive, self.reverse), rows)
        (totals,) = g.add(type(self).whole((axis + 1,), False), rows)
        carried = self._blocks(g, totals, axis, True, levels - 1)
        (carried,) = g.add(Unsqueeze((axis + 1,)), carried)
        (full,) = g.add(type(self).combine(), within, carried)
        (flat,) = g.add(Reshape((*before, blocks * BLOCK, *after)), full)
        return g.add(Slice((0,) * x.rank, x.shape, (1,) * x.rank), flat)[0]


@register
class CumSum(_Cumulative):
    """The running sum along `axis`; `exclusive` leaves the element itself out, `reverse` starts at the end.

    Integers wrap; 16-bit floats accumulate in f32. (ONNX CumSum-14)
    """

    kind, combine, whole = "add", Add, ReduceSum

    axis: int = 0
    exclusive: bool = False
    reverse: bool = False


@register
class CumProd(_Cumulative):
    """The running product along `axis`, see `CumSum`. (ONNX CumProd-26)"""

    kind, combine, whole = "mul", Mul, ReduceProd

    axis: int = 0
    exclusive: bool = False
    reverse: bool = False
