"""Rules of quantised tensors: the scale of a decoded one has a slope, its integers have none."""

from __future__ import annotations

from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.base import apply, axis_of
from rlx.ops.encoded import Dequantize
from rlx.ops.gradients.attach import cast, formula, reshaped
from rlx.ops.index import Gather
from rlx.ops.layout import Iota


@formula(Dequantize)
def _dequantize(op: Dequantize, data: Value, scale: Value, zero: Value | None = None) -> Value:
    f32 = DTYPES["f32"]
    value = cast(data, f32)
    if zero is not None:
        value = value - spread_parameter(op, cast(zero, f32), data)
    return cast(value * spread_parameter(op, cast(scale, f32), data), op.to)


def spread_parameter(op: Dequantize, p: Value, data: Value) -> Value:
    """A parameter so that it broadcasts to the data."""
    if op.axis is None:
        return reshaped(p, ())
    axis = axis_of(op.axis, data.rank, op.op_name)
    n = data.shape[axis]
    if not op.block:
        return reshaped(p, [n if d == axis else 1 for d in range(data.rank)])
    return apply(Gather(axis), p, ops.div(apply(Iota(n)), op.block))  # type: ignore[no-any-return]
