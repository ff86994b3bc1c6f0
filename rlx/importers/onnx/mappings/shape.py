"""ONNX ops carried out at import on small known arrays: the shape arithmetic of a graph."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.importers.onnx.mapping import NodeContext, static_op
from rlx.importers.onnx.mappings.layout import (
    axes_argument,
    broadcast_shape,
    flat_shape,
    permutation,
    shape_bounds,
    slice_arguments,
    split_sizes,
    target_shape,
)
from rlx.importers.onnx.mappings.quant import cast_target
from rlx.importers.onnx.symbolic import (
    LIMIT,
    NotStaticError,
    Static,
    arithmetic,
    cast,
    compare,
    map_items,
    reduced,
    rounded,
    static_array,
)
from rlx.importers.onnx.tensor import STRING
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim, Size, numel
from rlx.ops.base import axis_of

BOOL, I64 = DTYPES["bool"], DTYPES["i64"]


def _known(ctx: NodeContext, i: int = 0) -> Static:
    found = ctx.known(i)
    if found is None:
        raise NotStaticError(f"{ctx.name(i)!r} is data")
    return found


def _all_known(ctx: NodeContext) -> list[Static]:
    return [_known(ctx, i) for i in range(len(ctx.node.inputs))]


def _whole(shape: tuple[Size, ...]) -> tuple[int, ...]:
    """A shape of ints, small enough to be worked out here."""
    if any(isinstance(s, Dim) for s in shape) or math.prod(s for s in shape if isinstance(s, int)) > LIMIT:
        raise NotStaticError(f"an array of shape {shape}")
    return tuple(s for s in shape if isinstance(s, int))


# ---- sizes


@static_op("Shape")
def _shape(ctx: NodeContext) -> Static:
    start, end = shape_bounds(ctx, ctx.type().rank)
    return static_array(list(ctx.type().shape[start:end]))


@static_op("Size")
def _size(ctx: NodeContext) -> Static:
    return static_array(numel(ctx.type().shape))


# ---- layout


def _like(x: Static, items: Any) -> Static:
    return Static(np.asarray(items, object), x.dtype)


@static_op("Identity")
def _identity(ctx: NodeContext) -> Static:
    return _known(ctx)


@static_op("Reshape")
def _reshape(ctx: NodeContext) -> Static:
    x = _known(ctx)
    return _like(x, x.items.reshape(_whole(target_shape(ctx, x.shape))))


@static_op("Flatten")
def _flatten(ctx: NodeContext) -> Static:
    x = _known(ctx)
    return _like(x, x.items.reshape(_whole(flat_shape(ctx, x.shape))))


@static_op("Squeeze")
def _squeeze(ctx: NodeContext) -> Static:
    x = _known(ctx)
    axes = axes_argument(ctx, 13)
    chosen = (
        [d for d, n in enumerate(x.shape) if n == 1]
        if axes is None
        else [axis_of(a, x.items.ndim, "squeeze") for a in axes]
    )
    if any(x.shape[d] != 1 for d in chosen):
        raise NotStaticError("squeeze of an axis that is not 1")
    return _like(x, x.items.reshape([n for d, n in enumerate(x.shape) if d not in chosen]))


@static_op("Unsqueeze")
def _unsqueeze(ctx: NodeContext) -> Static:
    x = _known(ctx)
    axes = axes_argument(ctx, 13) or ()
    rank = x.items.ndim + len(axes)
    return _like(x, np.expand_dims(x.items, tuple(axis_of(a, rank, "unsqueeze") for a in axes)))


@static_op("Transpose")
def _transpose(ctx: NodeContext) -> Static:
    x = _known(ctx)
    return _like(x, x.items.transpose(permutation(ctx, x.items.ndim)))


@static_op("Concat")
def _concat(ctx: NodeContext) -> Static:
    parts = _all_known(ctx)
    if sum(p.items.size for p in parts) > LIMIT:
        raise NotStaticError("a large array")
    return _like(parts[0], np.concatenate([p.items for p in parts], axis=ctx.integer("axis")))


@static_op("Split")
def _split(ctx: NodeContext) -> tuple[Static, ...]:
    x = _known(ctx)
    axis, sizes = split_sizes(ctx, x.shape)
    ends = np.cumsum(list(_whole((*sizes, 1))[:-1]))
    return tuple(_like(x, part) for part in np.split(x.items, ends[:-1], axis=axis))


@static_op("Slice")
def _slice(ctx: NodeContext) -> Static:
    x = _known(ctx)
    starts, sizes, steps = slice_arguments(ctx, x.shape)
    taken = []
    for start, size, step in zip(_ints(starts), _ints(sizes), steps, strict=True):
        stop = start + step * size
        taken.append(slice(start, stop if stop >= 0 else None, step) if size else slice(0))
    return _like(x, x.items[tuple(taken)])


def _ints(sizes: tuple[Size, ...]) -> list[int]:
    if any(isinstance(s, Dim) for s in sizes):
        raise NotStaticError("a slice whose bounds depend on the run")
    return [s for s in sizes if isinstance(s, int)]


@static_op("Gather")
def _gather(ctx: NodeContext) -> Static:
    x, indices = _known(ctx), _known(ctx, 1)
    axis = axis_of(ctx.integer("axis", 0), x.items.ndim, "gather")
    at = np.array(indices.ints(), np.int64).reshape(indices.shape)
    n = x.shape[axis]
    if at.size and (at.min() < -n or at.max() >= n):
        raise NotStaticError("an index outside the array")
    return _like(x, np.take(x.items, at, axis=axis))


@static_op("Expand")
def _expand(ctx: NodeContext) -> Static:
    x = _known(ctx)
    return _like(x, np.broadcast_to(x.items, _whole(broadcast_shape(x.shape, ctx.sizes(1, "the shape")))))


@static_op("Tile")
def _tile(ctx: NodeContext) -> Static:
    x, repeats = _known(ctx), ctx.ints_of(1, "the repeats")
    if x.items.size * math.prod(repeats) > LIMIT:
        raise NotStaticError("a large array")
    return _like(x, np.tile(x.items, repeats))


@static_op("ConstantOfShape")
def _constant_of_shape(ctx: NodeContext) -> Static:
    shape = _whole(tuple(_known(ctx).sizes()))
    ref = ctx.tensor("value")
    if ref is not None and ref.elem_type == STRING:
        raise NotStaticError("text")
    fill = static_array(0.0, DTYPES["f32"]) if ref is None else static_array(ref.array())
    return _like(fill, np.broadcast_to(fill.items.reshape(()), shape))


@static_op("Range")
def _range(ctx: NodeContext) -> Static:
    start, limit, step = _all_known(ctx)
    if not start.dtype.is_integer:
        raise NotStaticError("a range of floats")
    numbers = range(start.ints()[0], limit.ints()[0], step.ints()[0])
    if len(numbers) > LIMIT:
        raise NotStaticError("a large array")
    return static_array(list(numbers), start.dtype)


# ---- arithmetic


@static_op("Add", "Sub", "Mul", "Div")
def _arithmetic(ctx: NodeContext) -> Static:
    a, b = _all_known(ctx)
    return arithmetic(ctx.node.op_type.lower(), a, b)


@static_op("Mod")
def _mod(ctx: NodeContext) -> Static:
    a, b = _all_known(ctx)
    if ctx.flag("fmod"):
        raise NotStaticError("fmod")
    return arithmetic("mod", a, b)


@static_op("Min", "Max", "Sum")
def _fold(ctx: NodeContext) -> Static:
    total, *rest = _all_known(ctx)
    for other in rest:
        total = arithmetic({"Min": "min", "Max": "max", "Sum": "add"}[ctx.node.op_type], total, other)
    return total


@static_op("Neg")
def _neg(ctx: NodeContext) -> Static:
    x = _known(ctx)
    return arithmetic("sub", _like(x, np.zeros((), object)), x) if x.dtype.is_integer else _float_neg(x)


def _float_neg(x: Static) -> Static:
    return arithmetic("mul", x, static_array(-1.0, x.dtype))


@static_op("Floor", "Ceil", "Round")
def _round(ctx: NodeContext) -> Static:
    return rounded(_known(ctx), ctx.node.op_type.lower())


@static_op("Cast", "CastLike")
def _cast(ctx: NodeContext) -> Static:
    target = cast_target(ctx) if ctx.node.op_type == "Cast" else ctx.type(1).dtype
    if target.kind == "s":
        raise NotStaticError("text")
    if target.bits < 16 and target.is_float:
        raise NotStaticError("a narrow float")
    made = cast(_known(ctx), target)
    ctx.ignore("saturate", "round_mode")  # of narrow floats; ONNX Runtime writes them at every Cast
    return made


@static_op("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(ctx: NodeContext) -> Static:
    x = _known(ctx)
    axes = axes_argument(ctx, 13 if ctx.node.op_type == "ReduceSum" else 18)
    if ctx.flag("noop_with_empty_axes") or x.dtype.kind not in "iu":
        raise NotStaticError("not an ordinary reduction of sizes")
    chosen = range(x.items.ndim) if not axes else [axis_of(a, x.items.ndim, "reduce") for a in axes]
    name = {"Prod": "mul", "Sum": "add", "Max": "max", "Min": "min"}[ctx.node.op_type[6:]]
    return reduced(x, name, list(chosen), ctx.flag("keepdims", 1))


# ---- logic

_COMPARE = {"Equal": "eq", "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge"}


@static_op(*_COMPARE)
def _compare(ctx: NodeContext) -> Static:
    return compare(_COMPARE[ctx.node.op_type], *_all_known(ctx))


@static_op("And", "Or", "Xor")
def _logic(ctx: NodeContext) -> Static:
    fn = {"And": lambda a, b: a and b, "Or": lambda a, b: a or b, "Xor": lambda a, b: a != b}[ctx.node.op_type]
    return map_items(fn, BOOL, *_all_known(ctx))


@static_op("Not")
def _logical_not(ctx: NodeContext) -> Static:
    return map_items(lambda a: not a, BOOL, _known(ctx))


@static_op("Where")
def _where(ctx: NodeContext) -> Static:
    condition, a, b = _all_known(ctx)
    return map_items(lambda c, x, y: x if c else y, a.dtype, condition, a, b)
