"""Rules of reductions and running sums. An extremum that several elements have gives each an equal share, as in JAX."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ir.shape import Size, numel
from rlx.ops import reduction as r
from rlx.ops.base import apply
from rlx.ops.cumulative import CumProd, CumSum, Prefix
from rlx.ops.gradients.attach import cast, formula, jvp, linear, reshaped, size_as, spread
from rlx.ops.layout import Iota, Transpose


def _axes(op: Any, x: Value) -> tuple[int, ...]:
    return r.axes_of(op.axes, x.rank, op.op_name)


def _kept(op: Any, y: Value, x: Value) -> Value:
    """A result with its reduced axes back, of size 1."""
    return reshaped(y, r.reduced_shape(x.shape, _axes(op, x), True))


def _count(op: Any, x: Value) -> Size:
    return numel([x.shape[d] for d in _axes(op, x)])


def _sum(op: Any, x: Value) -> Value:
    """The sum over the axes that `op` reduces."""
    return apply(r.ReduceSum(op.axes, op.keepdims), x)  # type: ignore[no-any-return]


@linear("each", r.ReduceSum)
def _sum_transpose(op: Any, inputs: Any, cotangents: Any, i: int) -> Value:
    return spread(_kept(op, cotangents[0], inputs[0]), inputs[0].shape)


@linear("each", r.ReduceMean)
def _mean_transpose(op: Any, inputs: Any, cotangents: Any, i: int) -> Value:
    ct = cotangents[0] / size_as(_count(op, inputs[0]), cotangents[0])
    return spread(_kept(op, ct, inputs[0]), inputs[0].shape)


@jvp(r.ReduceMax, r.ReduceMin)
def _extremum(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    x = inputs[0]
    hit = cast(ops.equal(x, _kept(op, outputs[0], x)), x.dtype)
    return _sum(op, tangents[0] * hit) / _sum(op, hit)


@jvp(r.ReduceL1)
def _l1(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    return _sum(op, tangents[0] * ops.sign(inputs[0]))


@jvp(r.ReduceSumSquare)
def _sum_square(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    return _sum(op, tangents[0] * inputs[0]) * 2


@jvp(r.ReduceL2)
def _l2(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    return _sum(op, tangents[0] * inputs[0]) / outputs[0]


@jvp(r.ReduceLogSum)
def _log_sum(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    return _sum(op, tangents[0]) / _sum(op, inputs[0])


@jvp(r.ReduceLogSumExp)
def _log_sum_exp(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    x = inputs[0]
    return _sum(op, tangents[0] * ops.exp(x - _kept(op, outputs[0], x)))


@jvp(r.ReduceProd)
def _prod(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    """The product of the others, of those before and those after it, so that a zero is no case of its own."""
    x, axes = inputs[0], _axes(op, inputs[0])
    if not axes:
        return tangents[0]
    kept = tuple(d for d in range(x.rank) if d not in axes)
    shape = (*(x.shape[d] for d in kept), _count(op, x))
    flat, t = (reshaped(apply(Transpose((*kept, *axes)), v), shape) for v in (x, tangents[0]))
    axis = len(kept)
    before, after = (apply(CumProd(axis, True, reverse), flat) for reverse in (False, True))
    return reshaped(apply(r.ReduceSum((axis,), False), t * before * after), outputs[0].shape)


@linear("each", CumSum)
def _cum_sum(op: CumSum, inputs: Any, cotangents: Any, i: int) -> Value:
    return apply(CumSum(op.axis, op.exclusive, not op.reverse), cotangents[0])  # type: ignore[no-any-return]


@formula(CumProd)
def _cum_prod(op: CumProd, x: Value) -> Value:
    """Products of rows of a square of factors, those that don't count being 1: it costs the square of the axis."""
    axis = op.axis % x.rank
    n = x.shape[axis]
    i, j = (reshaped(apply(Iota(n)), (n, *[1] * k)) for k in (x.rank - axis, x.rank - axis - 1))
    if op.reverse:
        i, j = j, i
    counted = ops.less(j, i) if op.exclusive else ops.less_equal(j, i)
    factors = reshaped(x, (*x.shape[:axis], 1, *x.shape[axis:]))
    square = ops.where(counted, factors, 1.0)
    return apply(r.ReduceProd((axis + 1,), False), square)  # type: ignore[no-any-return]


@formula(Prefix)
def _prefix(op: Prefix, x: Value) -> Value:
    whole = CumSum if op.kind == "add" else CumProd
    return apply(whole(op.axis, op.exclusive, op.reverse), x)  # type: ignore[no-any-return]
