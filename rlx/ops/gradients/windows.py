"""Rules of pooling. Of equal largest elements of a window the first one gets the gradient, as its index says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx import ops
from rlx.ir.graph import TensorType, Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import apply
from rlx.ops.conv import Conv
from rlx.ops.gradients.attach import formula, jvp, narrowed, reshaped, wide
from rlx.ops.index import Gather
from rlx.ops.layout import Pad
from rlx.ops.pool import AveragePool, GlobalAveragePool, GlobalMaxPool, MaxPool
from rlx.ops.pool_more import GlobalLpPool, LpPool
from rlx.ops.reduction import ReduceMax, ReduceMean, ReduceSum


@jvp(MaxPool)
def _max_pool(op: MaxPool, inputs: Any, outputs: Any, tangents: Any) -> Any:
    x, t = inputs[0], tangents[0]
    places = outputs[1] if op.with_indices else apply(replace(op, with_indices=True), x)[1]
    count = numel(x.shape)
    inside = ops.less(places, size_as_int(count))  # a window may lie in the padding only
    flat = reshaped(t, (count,))
    made = ops.where(inside, apply(Gather(0), flat, ops.where(inside, places, 0)), 0.0)
    return (made, None) if op.with_indices else made


def size_as_int(size: Size) -> Any:
    """A size to compare places with."""
    return size if isinstance(size, int) else ops.size_of(size=size)


def _window_sums(op: Any, x: Value, begins: list[Size], ends: list[Size]) -> Value:
    """The sums of the windows of x [B, 1, spatial..] with zeros (or less) around it."""
    axes = op.axes()
    padded = apply(Pad((0, 0, *begins, 0, 0, *ends)), x)
    ones = ops.full(shape=(1, 1, *op.kernel), value=1, dtype=x.dtype)
    return apply(Conv(tuple(a[1] for a in axes), tuple(a[2] for a in axes)), padded, ones)  # type: ignore[no-any-return]


def _pads(op: Any, x: Value) -> tuple[tuple[Size, ...], list[Size], list[Size]]:
    """The sizes of the result, and the pads with which exactly its windows fit."""
    (out, *_) = op.infer_types([TensorType(x.shape, x.dtype)])
    begins = [axis[3] for axis in op.axes()]
    ends: list[Size] = []
    for n, count, (kernel, stride, dilation, begin, _) in zip(x.shape[2:], out.shape[2:], op.axes(), strict=True):
        ends.append((count - 1) * stride + dilation * (kernel - 1) + 1 - n - begin)
    return out.shape, begins, ends


@formula(AveragePool)
def _average_pool(op: AveragePool, x: Value) -> Value:
    v = wide(x)
    shape, begins, ends = _pads(op, x)
    space = x.shape[2:]
    total = _window_sums(op, reshaped(v, (x.shape[0] * x.shape[1], 1, *space)), begins, ends)
    counted = ops.full(shape=(1, 1, *space), value=1, dtype=v.dtype)
    if op.count_include_pad:
        own = [axis[4] for axis in op.axes()]
        counted = apply(Pad((0, 0, *begins, 0, 0, *own), 1), counted)
        begins, ends = [0] * len(space), [e - o for e, o in zip(ends, own, strict=True)]
    return narrowed(reshaped(total / _window_sums(op, counted, begins, ends), shape), x)


@formula(LpPool)
def _lp_pool(op: LpPool, x: Value) -> Value:
    v = wide(x)
    shape, begins, ends = _pads(op, x)
    powers = ops.abs(v) if op.p == 1 else ops.pow(ops.abs(v), float(op.p))
    total = _window_sums(op, reshaped(powers, (x.shape[0] * x.shape[1], 1, *x.shape[2:])), begins, ends)
    return narrowed(reshaped(total if op.p == 1 else ops.pow(total, 1 / op.p), shape), x)


def _space(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.rank))


@formula(GlobalAveragePool)
def _global_average(op: Any, x: Value) -> Value:
    return apply(ReduceMean(_space(x), True), x)  # type: ignore[no-any-return]


@formula(GlobalMaxPool)
def _global_max(op: Any, x: Value) -> Value:
    return apply(ReduceMax(_space(x), True), x)  # type: ignore[no-any-return]


@formula(GlobalLpPool)
def _global_lp(op: GlobalLpPool, x: Value) -> Value:
    v = wide(x)
    powers = ops.abs(v) if op.p == 1 else ops.pow(ops.abs(v), float(op.p))
    total = apply(ReduceSum(_space(x), True), powers)
    return narrowed(total if op.p == 1 else ops.pow(total, 1 / op.p), x)
