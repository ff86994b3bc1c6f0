"""How ops are vectorised: `batch(inputs, batched)` applies the op to inputs of which some have one more axis in front.

Ops with a formula or a decomposition need no rule: what they are made of has. NotImplemented stands for cases that a
rule leaves to a loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.ir.graph import TensorType, Value
from rlx.ir.shape import Size
from rlx.ops import elementwise as e
from rlx.ops import index as x_
from rlx.ops import layout as m
from rlx.ops import normalize as n
from rlx.ops.base import OPS, Op, apply
from rlx.ops.channel_norm import LpNormalization
from rlx.ops.complex import FromPairs, Pairs
from rlx.ops.contract import MatMul
from rlx.ops.conv import Conv
from rlx.ops.cumulative import CumProd, CumSum, Prefix
from rlx.ops.einsum import Relabel
from rlx.ops.fourier.spectrum import DivideBySize
from rlx.ops.gradients.attach import cast, reshaped, spread
from rlx.ops.gradients.attach import decorator as _decorator
from rlx.ops.mask import Hardmax, OneHot, Shrink, Trilu
from rlx.ops.misc import Again, BitCast, Det, StopGradient, Within
from rlx.ops.pool import _GlobalPool, _Pool
from rlx.ops.reduction import Arg, Reduction, axes_of
from rlx.ops.scatter import ScatterElements, ScatterNd
from rlx.ops.select import TopK
from rlx.ops.space import Col2Im
from rlx.ops.update import DynamicUpdateSlice

__all__ = ["batch"]

batch = _decorator("batch")


def named(*bases: type) -> list[type[Op]]:
    """The ops that are of these classes or derived from them."""
    return [op for op in OPS.values() if issubclass(op, bases) and "batch" not in op.__dict__]


def _front(inputs: Any, batched: Any) -> list[Value]:
    """All inputs with the axis in front, repeated where one does not have it."""
    size = next(v.shape[0] for v, is_batched in zip(inputs, batched, strict=True) if is_batched)
    return [
        v if b else spread(reshaped(v, (1, *v.shape)), (size, *v.shape)) for v, b in zip(inputs, batched, strict=True)
    ]


def aligned(inputs: Any, batched: Any) -> list[Value]:
    """The inputs so that they broadcast: axes of size 1 behind the front one make ranks equal."""
    rank = max(v.rank - b for v, b in zip(inputs, batched, strict=True))
    return [
        reshaped(v, (v.shape[0], *[1] * (rank - v.rank + 1), *v.shape[1:])) if b and v.rank <= rank else v
        for v, b in zip(inputs, batched, strict=True)
    ]


@batch(*named(e.Unary, e.Test, e.Binary, e.Identity, e.Cast, e.Pow, e.Where, Shrink, Again, StopGradient, Within))
def _elementwise(op: Op, inputs: Any, batched: Any) -> Any:
    return apply(op, *aligned(inputs, batched))


@batch(*named(Reduction))
def _reduction(op: Any, inputs: Any, batched: Any) -> Any:
    axes = axes_of(op.axes, inputs[0].rank - 1, op.op_name)
    return apply(replace(op, axes=tuple(d + 1 for d in axes)), inputs[0])


@batch(*named(Arg), n.Softmax, n.LogSoftmax, LpNormalization, Hardmax, CumSum, CumProd, Prefix, TopK)
def _along(op: Any, inputs: Any, batched: Any) -> Any:
    return apply(replace(op, axis=op.axis % (inputs[0].rank - 1) + 1), inputs[0])


@batch(n.LayerNorm, n.RmsNorm)
def _norm(op: Any, inputs: Any, batched: Any) -> Any:
    x, *parameters = inputs
    if any(batched[1:]):
        return NotImplemented
    return apply(replace(op, axis=op.axis % (x.rank - 1) + 1), x, *parameters)


@batch(m.Reshape)
def _reshape(op: m.Reshape, inputs: Any, batched: Any) -> Any:
    return reshaped(inputs[0], (inputs[0].shape[0], *op.shape))


@batch(m.Squeeze, m.Unsqueeze)
def _squeeze(op: Any, inputs: Any, batched: Any) -> Any:
    x = inputs[0]
    row = TensorType(x.shape[1:], x.dtype)
    return reshaped(x, (x.shape[0], *op.infer(row).shape))


@batch(m.Transpose)
def _transpose(op: m.Transpose, inputs: Any, batched: Any) -> Any:
    order = op._order(inputs[0].rank - 1)
    return apply(m.Transpose((0, *(d + 1 for d in order))), inputs[0])


@batch(m.Slice)
def _slice(op: m.Slice, inputs: Any, batched: Any) -> Any:
    x = inputs[0]
    return apply(m.Slice((0, *op.starts), (x.shape[0], *op.sizes), (1, *op.steps)), x)


@batch(m.Pad)
def _pad(op: m.Pad, inputs: Any, batched: Any) -> Any:
    half = len(op.pads) // 2
    return apply(replace(op, pads=(0, *op.pads[:half], 0, *op.pads[half:])), inputs[0])


@batch(m.Concat)
def _concat(op: m.Concat, inputs: Any, batched: Any) -> Any:
    full = _front(inputs, batched)
    return apply(m.Concat(op.axis % (full[0].rank - 1) + 1), *full)


@batch(m.Split)
def _split(op: m.Split, inputs: Any, batched: Any) -> Any:
    return apply(replace(op, axis=op.axis % (inputs[0].rank - 1) + 1), inputs[0])


@batch(m.Expand)
def _expand(op: m.Expand, inputs: Any, batched: Any) -> Any:
    x = inputs[0]
    missing = max(0, len(op.shape) - (x.rank - 1))
    shape = (*[1] * (x.rank - 1 - len(op.shape)), *op.shape)
    return apply(m.Expand((x.shape[0], *shape)), reshaped(x, (x.shape[0], *[1] * missing, *x.shape[1:])))


@batch(Trilu)
def _trilu(op: Any, inputs: Any, batched: Any) -> Any:
    return NotImplemented if any(batched[1:]) else apply(op, *inputs)


@batch(Relabel)
def _relabel(op: Relabel, inputs: Any, batched: Any) -> Any:
    new = max(op.source, default=0) + 1
    return apply(Relabel((new, *op.source), (new, *op.target)), inputs[0])


@batch(MatMul)
def _matmul(op: Op, inputs: Any, batched: Any) -> Any:
    """Vectors become matrices, whose leading axes then align."""
    a, b = inputs
    of_a, of_b = a.rank - batched[0] == 1, b.rank - batched[1] == 1
    a = reshaped(a, (*a.shape[:-1], 1, a.shape[-1])) if of_a else a
    b = reshaped(b, (*b.shape, 1)) if of_b else b
    y = apply(op, *aligned((a, b), batched))
    shape = list(y.shape)
    if of_b:
        del shape[-1]
    if of_a:
        del shape[-1 if of_b else -2]
    return reshaped(y, shape)


def moved(x: Value, source: int, target: int) -> Value:
    """x with one axis at another place."""
    if source == target:
        return x
    order = [d for d in range(x.rank) if d != source]
    order.insert(target, source)
    return apply(m.Transpose(tuple(order)), x)  # type: ignore[no-any-return]


@batch(x_.Gather)
def _gather(op: x_.Gather, inputs: Any, batched: Any) -> Any:
    x, places = inputs
    axis = op.axis % (x.rank - batched[0])
    if not batched[0]:
        return moved(apply(x_.Gather(axis), x, places), axis, 0)
    if not batched[1]:
        return apply(x_.Gather(axis + 1), x, places)
    y = apply(x_.GatherND(1), moved(x, axis + 1, 1), reshaped(places, (*places.shape, 1)))
    count = places.rank - 1  # axes of the places lie behind the front one and belong at `axis`
    order = (0, *range(1 + count, 1 + count + axis), *range(1, 1 + count), *range(1 + count + axis, y.rank))
    return apply(m.Transpose(order), y)


@batch(x_.GatherND)
def _gather_nd(op: x_.GatherND, inputs: Any, batched: Any) -> Any:
    return apply(x_.GatherND(op.batch_dims + 1), *_front(inputs, batched))


@batch(x_.GatherElements, ScatterElements)
def _elements(op: Any, inputs: Any, batched: Any) -> Any:
    full = _front(inputs, batched)
    return apply(replace(op, axis=op.axis % (full[0].rank - 1) + 1), *full)


@batch(ScatterNd)
def _scatter_nd(op: ScatterNd, inputs: Any, batched: Any) -> Any:
    x, places, updates = _front(inputs, batched)
    size = places.shape[0]
    rows = cast(reshaped(apply(m.Iota(size)), (size, *[1] * (places.rank - 1))), places.dtype)
    return apply(op, x, apply(m.Concat(-1), spread(rows, (*places.shape[:-1], 1)), places), updates)


@batch(OneHot)
def _one_hot(op: OneHot, inputs: Any, batched: Any) -> Any:
    if batched[1]:
        return NotImplemented
    return apply(replace(op, axis=op.axis % inputs[0].rank + 1), *inputs)


def _rows(op: Op, x: Value, *more: Value) -> Value:
    """An op on images with the front axis as a part of the batch that they have."""
    merged: tuple[Size, ...] = (x.shape[0] * x.shape[1], *x.shape[2:])
    y = apply(op, reshaped(x, merged), *more)
    return reshaped(y, (*x.shape[:2], *y.shape[1:]))


@batch(Conv)
def _conv(op: Conv, inputs: Any, batched: Any) -> Any:
    """Weights of their own are those of groups of their own."""
    if not any(batched[1:]):
        return _rows(op, *inputs)
    x, w, *bias = _front(inputs, batched)
    count, each = x.shape[:2]
    if not isinstance(count, int):
        return NotImplemented
    rest = x.shape[2:]
    turned = apply(m.Transpose((1, 0, *range(2, x.rank))), x)
    images = reshaped(turned, (each, count * rest[0], *rest[1:]))
    weights = [reshaped(v, (count * v.shape[1], *v.shape[2:])) for v in (w, *bias)]
    y = apply(replace(op, groups=op.groups * count), images, *weights)
    made = reshaped(y, (each, count, w.shape[1], *y.shape[2:]))
    return apply(m.Transpose((1, 0, *range(2, made.rank))), made)


@batch(Det, Pairs, FromPairs, DivideBySize, BitCast)
def _last_axes(op: Op, inputs: Any, batched: Any) -> Any:
    return apply(op, *inputs)


@batch(Col2Im)
def _col2im(op: Col2Im, inputs: Any, batched: Any) -> Any:
    return _rows(op, inputs[0])


@batch(DynamicUpdateSlice)
def _update(op: DynamicUpdateSlice, inputs: Any, batched: Any) -> Any:
    """One place for all slices, or one for each of them."""
    x, rows = _front(inputs[:2], batched[:2]) if any(batched[:2]) else inputs[:2]
    start = inputs[2]
    if start.rank - batched[2] != 0 or not any(batched[:2]):
        return NotImplemented
    return apply(replace(op, axis=op.axis % (x.rank - 1) + 1), x, rows, start)


@batch(*named(_Pool, _GlobalPool))
def _pool(op: Any, inputs: Any, batched: Any) -> Any:
    return NotImplemented if getattr(op, "with_indices", False) else _rows(op, inputs[0])
