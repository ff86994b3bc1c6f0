"""ONNX ops that create, move, choose or convert elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from rlx.errors import ShapeError
from rlx.importers.onnx.dynamic import constant_difference, known_items
from rlx.importers.onnx.mapping import Mapped, NodeContext, UnsupportedError, element_dtype, onnx_op
from rlx.importers.onnx.mappings.loss import training_dropout
from rlx.importers.onnx.symbolic import Item, Ratio, arithmetic, static_array
from rlx.importers.onnx.tensor import STRING
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Value
from rlx.ir.shape import (
    Dim,
    Guard,
    Shape,
    Size,
    bounds,
    broadcast,
    ceildiv,
    exact_div,
    max_size,
    min_size,
    numel,
    same,
    upper,
)
from rlx.ops.base import axis_of
from rlx.ops.elementwise import Add, Div, Equal, Less, Maximum, Minimum, Mul, Sub, Where
from rlx.ops.index import Gather, GatherElements, GatherND
from rlx.ops.layout import (
    Concat,
    Expand,
    Full,
    Iota,
    Pad,
    Reshape,
    SizeOf,
    Slice,
    Split,
    Squeeze,
    Tile,
    Transpose,
    Unsqueeze,
)
from rlx.ops.reduction import ReduceProd
from rlx.ops.select import Arange, range_count

__all__ = [
    "axes_argument",
    "broadcast_shape",
    "flat_shape",
    "permutation",
    "shape_bounds",
    "slice_arguments",
    "split_sizes",
    "target_shape",
]

_FOREVER = 2**31 - 1  # what exporters write for "to the end"
_FAR = 10**9  # what others write; the run checks that the axis does not go on beyond it


# ---- arguments, shared with the ops carried out at import


def axes_argument(ctx: NodeContext, as_input_since: int) -> tuple[int, ...] | None:
    """`axes` as an attribute or, from that opset on, as input 1; None if absent."""
    if ctx.opset < as_input_since:
        return ctx.ints("axes") if ctx.given("axes") else None
    return ctx.ints_of(1, "the axes") if ctx.has(1) else None


def permutation(ctx: NodeContext, rank: int) -> tuple[int, ...]:
    return ctx.ints("perm", tuple(reversed(range(rank))))


def flat_shape(ctx: NodeContext, shape: Shape) -> Shape:
    """[d0 * .. * d(axis - 1), d(axis) * ..]."""
    axis = ctx.integer("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise ShapeError(f"flatten: axis {axis} is outside a tensor of rank {len(shape)}")
    axis = axis + len(shape) if axis < 0 else axis
    return numel(shape[:axis]), numel(shape[axis:])


def broadcast_shape(shape: Shape, target: Sequence[Size]) -> Shape:
    return broadcast(shape, tuple(target), why="expand")


def shape_bounds(ctx: NodeContext, rank: int) -> tuple[int, int]:
    """First and last axis (exclusive) that Shape gives."""
    if ctx.opset < 15:
        return 0, rank
    start, end = ctx.integer("start", 0), ctx.integer("end", rank)
    first, last = (max(0, min(rank, a + rank if a < 0 else a)) for a in (start, end))
    return first, max(first, last)


def target_shape(ctx: NodeContext, shape: Shape) -> Shape:
    """The shape that Reshape asks for, with its 0 and -1 resolved."""
    wanted = ctx.sizes(1, "the shape")
    keep_zero = ctx.opset >= 14 and ctx.flag("allowzero")
    out: list[Size] = []
    for d, size in enumerate(wanted):
        if size == 0 and not keep_zero:
            if d >= len(shape):
                raise ShapeError(f"reshape: entry {d} of {_show(wanted)} copies an axis that {_show(shape)} lacks")
            size = shape[d]
        out.append(size)
    open_axes = [d for d, size in enumerate(out) if size == -1]
    if len(open_axes) > 1:
        raise ShapeError(f"reshape: {_show(wanted)} has more than one -1")
    for d in open_axes:
        out[d] = _remaining(numel(shape), numel([*out[:d], *out[d + 1 :]]), wanted)
    return tuple(out)


def _remaining(total: Size, known: Size, wanted: Sequence[Size]) -> Size:
    exact = exact_div(total, known)
    if exact is not None:
        return exact
    if known == 0:
        raise ShapeError(f"reshape: the -1 of {_show(wanted)} is open, as the other axes have no elements")
    return total // known


def _show(shape: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def split_sizes(ctx: NodeContext, shape: Shape) -> tuple[int, tuple[Size, ...]]:
    """The axis and the sizes of the parts of Split."""
    axis = axis_of(ctx.integer("axis", 0), len(shape), "split")
    parts = len(ctx.node.outputs)
    if ctx.opset < 13 and ctx.given("split"):
        return axis, ctx.ints("split")
    if ctx.opset >= 13 and ctx.has(1):
        return axis, tuple(ctx.sizes(1, "the sizes of the parts"))
    if ctx.opset >= 18:
        parts = ctx.integer("num_outputs", parts)
        if parts != len(ctx.node.outputs):
            ctx.fail(f"num_outputs is {parts}, the node has {len(ctx.node.outputs)} outputs")
        chunk = ceildiv(shape[axis], parts)
        return axis, (*(chunk,) * (parts - 1), shape[axis] - chunk * (parts - 1))
    return axis, (shape[axis] // parts,) * parts


def _is_negative(ctx: NodeContext, size: Size, what: str) -> bool:
    low, high = bounds(size)
    if low is not None and low >= 0:
        return False
    if high is not None and high < 0:
        return True
    raise UnsupportedError(f"{what} is {size}, which may be negative or not; bound its dims so that it is certain")


def _position(ctx: NodeContext, at: Size, extent: Size, least: int, most: Size, what: str) -> Size:
    """A start or end of Slice as least <= position <= most."""
    if isinstance(at, int) and at >= _FOREVER:
        return most
    if isinstance(at, int) and at <= -_FOREVER:
        return least
    if isinstance(at, int) and at >= _FAR and same(min_size(at, most), most) is not False:
        if same(min_size(at, most), most) is None:
            ctx.graph.guards.append(Guard(min_size(at, most), most, f"slice {ctx.label!r}: {what} is that of the axis"))
        return most
    if _is_negative(ctx, at, what):
        return max_size(extent + at, least)
    return min_size(at, most)


def slice_arguments(ctx: NodeContext, shape: Shape) -> tuple[tuple[Size, ...], tuple[Size, ...], tuple[int, ...]]:
    """Starts, sizes and steps for each axis of Slice."""
    if ctx.opset < 10:
        starts: Sequence[Size] = ctx.ints("starts")
        ends: Sequence[Size] = ctx.ints("ends")
        axes, steps = ctx.ints("axes", range(len(starts))), (1,) * len(starts)
    else:
        starts, ends = ctx.sizes(1, "the starts"), ctx.sizes(2, "the ends")
        axes = ctx.ints_of(3, "the axes") if ctx.has(3) else tuple(range(len(starts)))
        steps = ctx.ints_of(4, "the steps") if ctx.has(4) else (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ShapeError(
            f"slice: starts {_show(starts)}, ends {_show(ends)}, axes {axes}, steps {steps} differ in length"
        )
    first: list[Size] = [0] * len(shape)
    sizes = list(shape)
    every = [1] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        d = axis_of(axis, len(shape), "slice")
        if step == 0:
            raise ShapeError(f"slice: the step of axis {d} is 0")
        n = shape[d]
        least, most = (0, n) if step > 0 else (-1, n - 1)
        begin = _position(ctx, start, n, 0, most, "the start")
        stop = _position(ctx, end, n, least, most, "the end")
        length = stop - begin if step > 0 else begin - stop
        if step > 0 and stop == n and isinstance(start, int) and start < 0:
            length = min_size(n, -start)  # n - max(n + start, 0)
        first[d], sizes[d], every[d] = begin, max_size(ceildiv(length, abs(step)), 0), step
    return tuple(first), tuple(sizes), tuple(every)


# ---- sources


@onnx_op("Constant")
def _constant(ctx: NodeContext) -> Mapped:
    if not ctx.node.attributes:
        ctx.fail("it has no value")
    (name,) = ctx.node.attributes
    match name:
        case "value":
            return ctx.tensor("value")
        case "sparse_value":
            return ctx.tensor("sparse_value")
        case "value_float":
            return static_array(ctx.real(name), DTYPES["f32"])
        case "value_floats":
            return static_array(np.array(ctx.floats(name), np.float32))
        case "value_int":
            return static_array(ctx.integer(name))
        case "value_ints":
            return static_array(list(ctx.ints(name)))
        case "value_string":
            return ctx.constant(ctx.text(name), DTYPES["string"])
        case "value_strings":
            return ctx.constant(ctx.texts(name), DTYPES["string"])
    raise UnsupportedError(f"a constant given by {name!r} is not supported")


@onnx_op("ConstantOfShape", since=9, static=(0,))
def _constant_of_shape(ctx: NodeContext) -> Mapped:
    ref = ctx.tensor("value")
    if ref is not None and ref.elem_type == STRING:
        return ctx.add(Expand(tuple(ctx.sizes(0, "the shape"))), ctx.graph.constant(ref.array().reshape(())))
    fill = static_array(0.0, DTYPES["f32"]) if ref is None else static_array(ref.array(), element_dtype(ref.elem_type))
    value = fill.item()
    assert not isinstance(value, Dim | Ratio)
    (made,) = ctx.graph.add(Full(tuple(ctx.sizes(0, "the shape")), value, fill.dtype), provenance=(ctx.label,))
    return made


@onnx_op("Range", since=11, static=(0, 1, 2))
def _range(ctx: NodeContext) -> Mapped:
    known = [k for k in (ctx.known(i) for i in range(3)) if k is not None]
    if len(known) == 3:
        start, limit, step = known
        first, by = start.item(), step.item()
        numbers = [v for v in (first, limit.item(), by) if not isinstance(v, Dim | Ratio)]
        if by == 0 or not all(map(isfinite, numbers)):
            ctx.fail(f"no range goes from {first} to {limit.item()} by {by}")
        whole = start.dtype.is_integer or not isinstance(first, Dim | Ratio)
        if start.concrete and limit.concrete and not isinstance(by, Dim | Ratio):
            size: Size | None = range_count(first, limit.item(), by)  # type: ignore[arg-type]
        else:
            size = _steps(arithmetic("sub", limit, start).item(), by, start.dtype) if whole else None
        if size is not None and not isinstance(by, Dim | Ratio):
            return ctx.add(Iota(size, first, by, start.dtype))  # type: ignore[arg-type]
        if size is not None and isinstance(by, Dim):
            steps = ctx.add(Mul(), ctx.add(Iota(size)), ctx.add(SizeOf(by)))
            return ctx.cast(ctx.add(Add(), steps, ctx.add(SizeOf(first))), start.dtype)  # type: ignore[arg-type]
    operands = [ctx.reshape(ctx.value(i)) for i in range(3)]
    return ctx.add(Arange(ctx.fresh("count", 0, None)), *operands)


def _steps(reach: Item, by: Item, dtype: DType) -> Size | None:
    """How many steps of `by` from 0 stay below `reach`; None where that is no size."""
    if isinstance(by, Dim):
        within = isinstance(reach, int | Dim) and dtype.is_integer and (bounds(by)[0] or 0) > 0
        if not within:
            return None
        whole = exact_div(reach, by)  # type: ignore[arg-type]
        return max_size(-(-reach // by) if whole is None else whole, 0)  # type: ignore[operator]
    if isinstance(by, Ratio) or isinstance(reach, Ratio):
        return None
    if isinstance(reach, Dim):
        return max_size(ceildiv(reach if by > 0 else -reach, abs(int(by))), 0) if by == int(by) else None
    return range_count(0, reach, by)


@onnx_op("Shape")
def _shape(ctx: NodeContext) -> Mapped:
    start, end = shape_bounds(ctx, ctx.type().rank)
    return static_array(list(ctx.type().shape[start:end]))


@onnx_op("Size")
def _size(ctx: NodeContext) -> Mapped:
    return static_array(numel(ctx.type().shape))


# ---- views and moves


@onnx_op("Identity")
def _identity(ctx: NodeContext) -> Mapped:
    found = ctx.sequenced()
    return ctx.value() if found is None else found


@onnx_op("Dropout", since=7)
def _dropout(ctx: NodeContext) -> tuple[Mapped, ...]:
    ctx.ignore("ratio", "seed")
    if ctx.opset >= 12 and ctx.has(2) and ctx.static(2, "training_mode").item():
        return training_dropout(ctx)
    x = ctx.value()
    if not ctx.wants(1):
        return x, None
    return x, ctx.add(Full(x.shape, True, DTYPES["bool"] if ctx.opset >= 10 else x.dtype))


@onnx_op("Reshape", static=(1,))
def _reshape(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    if ctx.known(1) is None:
        return _reshaped(ctx, x, _shape_of_data(ctx, x))
    return _reshaped(ctx, x, target_shape(ctx, x.shape))


def _shape_of_data(ctx: NodeContext, x: Value) -> Shape:
    """The shape that Reshape gets as run-time data: parts known at import stay, 0 and -1 are resolved in the run."""
    wanted = ctx.value(1)
    if wanted.rank != 1 or not isinstance(wanted.shape[0], int):
        ctx.undecided(1, f"the shape, {ctx.name(1)!r}, has an unknown number of elements: it must be known at import")
    known = known_items(wanted)
    keep_zero = ctx.opset >= 14 and ctx.flag("allowzero")
    if all(item is not None for item in known) or not _may_be_special(known):
        sizes = ctx.sizes_of(wanted, "the shape")
    else:
        sizes = ctx.sizes_of(_resolved(ctx, x, wanted, keep_zero), "the shape")
    out: list[Size] = []
    for d, (size, item) in enumerate(zip(sizes, known, strict=True)):
        plain = item is not None and not (isinstance(item, int) and item <= 0)
        out.append(item if plain and item is not None else x.shape[d] if item == 0 and not keep_zero else size)
    open_axes = [d for d, item in enumerate(known) if item == -1]
    if len(open_axes) == 1:
        exact = exact_div(numel(x.shape), numel([*out[: open_axes[0]], *out[open_axes[0] + 1 :]]))
        out[open_axes[0]] = out[open_axes[0]] if exact is None else exact
    return tuple(out)


def _may_be_special(known: Sequence[Size | None]) -> bool:
    """Whether a 0 or -1 may be among the entries; those that were computed from sizes are neither."""
    return any(item is None or (isinstance(item, int) and item <= 0) for item in known)


def _resolved(ctx: NodeContext, x: Value, wanted: Value, keep_zero: bool) -> Value:
    """The entries of a shape with 0 replaced by the size of x and -1 by what is left."""
    i64 = DTYPES["i64"]
    count = wanted.shape[0]
    if not isinstance(count, int):
        ctx.fail("the rank of its result depends on run-time data")
    own = [ctx.add(SizeOf(n)) for n in x.shape[:count]] + [ctx.constant(1, i64)] * (count - x.rank)
    zero, one, rest = (ctx.constant(n, i64) for n in (0, 1, -1))
    if not keep_zero:
        sizes = ctx.add(Concat(0), *(ctx.reshape(n, 1) for n in own))
        wanted = ctx.add(Where(), ctx.add(Equal(), wanted, zero), sizes, wanted)
    is_rest = ctx.add(Equal(), wanted, rest)
    known = ctx.add(ReduceProd((0,), True), ctx.add(Where(), is_rest, one, wanted))
    left = ctx.add(Div(), ctx.add(SizeOf(numel(x.shape))), ctx.add(Maximum(), known, one))
    return ctx.add(Where(), is_rest, left, wanted)


@onnx_op("Flatten")
def _flatten(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    return _reshaped(ctx, x, flat_shape(ctx, x.shape))


def _reshaped(ctx: NodeContext, x: Value, shape: Shape) -> Value:
    return x if x.shape == shape else ctx.add(Reshape(shape), x)


@onnx_op("Squeeze", static=(1,))
def _squeeze(ctx: NodeContext) -> Mapped:
    axes = axes_argument(ctx, 13)
    x = ctx.value()
    open_axes = [d for d, n in enumerate(x.shape) if n != 1 and same(n, 1) is None]
    if axes is None and open_axes:
        size = x.shape[open_axes[0]]
        reason = f"without axes the rank of the result is open: size {size} may be 1 or not"
        raise UnsupportedError(reason, ctx.tensors.deciders_of(size))
    return ctx.add(Squeeze(axes), x)


@onnx_op("Unsqueeze", static=(1,))
def _unsqueeze(ctx: NodeContext) -> Mapped:
    axes = axes_argument(ctx, 13)
    if axes is None:
        ctx.fail("axes are missing")
    return ctx.add(Unsqueeze(axes), ctx.value())


@onnx_op("Transpose")
def _transpose(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    return ctx.add(Transpose(permutation(ctx, x.rank)), x)


@onnx_op("Slice", static=(1, 2, 3, 4))
def _slice(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    if ctx.opset >= 10 and (ctx.known(1) is None or ctx.known(2) is None):
        return _slice_by_data(ctx, x)
    starts, sizes, steps = slice_arguments(ctx, x.shape)
    if sizes == x.shape and all(step == 1 for step in steps):
        return x
    return ctx.add(Slice(starts, sizes, steps), x)


def _slice_by_data(ctx: NodeContext, x: Value) -> Value:
    """Starts and ends that are run-time data: brought into range in the run, then sizes that it decides."""
    i64 = DTYPES["i64"]
    starts, ends = (ctx.cast(ctx.value(i), i64) for i in (1, 2))
    axes = ctx.ints_of(3, "the axes") if ctx.has(3) else tuple(range(x.rank))
    if not ctx.has(3):
        axes, starts, ends = _first_axes(ctx, x, starts, ends)
    steps = ctx.ints_of(4, "the steps") if ctx.has(4) else (1,) * len(axes)
    if same(starts.shape[0], len(axes)) is False or not len(axes) == len(steps):
        raise ShapeError(f"slice: starts {starts.type}, axes {axes} and steps {steps} differ in length")
    first: list[Size] = [0] * x.rank
    sizes, every = list(x.shape), [1] * x.rank
    zero, one = (ctx.constant(n, i64) for n in (0, 1))
    most = constant_difference(ctx.value(1), ctx.value(2))
    for k, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        d = axis_of(axis, x.rank, "slice")
        if step == 0:
            raise ShapeError(f"slice: the step of axis {d} is 0")
        n = ctx.add(SizeOf(x.shape[d]))
        low, high = (zero, n) if step > 0 else (ctx.constant(-1, i64), ctx.add(Sub(), n, one))

        def within(v: Value, low: Value, high: Value, n: Value = n, k: int = k) -> Value:
            at = ctx.reshape(ctx.add(Slice((k,), (1,), (1,)), v))
            at = ctx.add(Where(), ctx.add(Less(), at, zero), ctx.add(Add(), at, n), at)
            return ctx.add(Minimum(), ctx.add(Maximum(), at, low), high)

        begin, end = within(starts, zero, high), within(ends, low, high)
        reach = ctx.add(Sub(), end, begin) if step > 0 else ctx.add(Sub(), begin, end)
        by = ctx.constant(abs(step), i64)
        length = ctx.add(Div(), ctx.add(Add(), reach, ctx.constant(abs(step) - 1, i64)), by)
        length = ctx.add(Maximum(), length, zero)
        begin = ctx.add(Maximum(), begin, zero)
        (first[d],) = ctx.sizes_of(begin, "the start")
        (sizes[d],) = ctx.sizes_of(length, "the size", most if step == 1 and len(axes) == 1 else None)
        every[d] = step
    return ctx.add(Slice(tuple(first), tuple(sizes), tuple(every)), x)


def _first_axes(ctx: NodeContext, x: Value, starts: Value, ends: Value) -> tuple[tuple[int, ...], Value, Value]:
    """The axes of a Slice that names none: as many as there are starts; with starts and ends for just those.

    Where their number depends on the run it is bounded: axes beyond it are taken whole.
    """
    counts = [upper(v.shape[0]) for v in (starts, ends)]
    count = min(x.rank, *(n for n in counts if n is not None))
    axes = tuple(range(count))
    if all(isinstance(v.shape[0], int) for v in (starts, ends)):
        return axes, starts, ends
    wholes = (
        [ctx.constant([0], starts.dtype)] * count,
        [ctx.reshape(ctx.add(SizeOf(n)), 1) for n in x.shape[:count]],
    )
    starts, ends = (
        ctx.add(Slice((0,), (count,), (1,)), ctx.add(Concat(0), v, *whole))
        for v, whole in zip((starts, ends), wholes, strict=True)
    )
    return axes, starts, ends


@onnx_op("Concat")
def _concat(ctx: NodeContext) -> Mapped:
    axis = ctx.integer("axis")
    values = ctx.values()
    return values[0] if len(values) == 1 else ctx.add(Concat(axis), *values)


@onnx_op("Split", static=(1,))
def _split(ctx: NodeContext) -> tuple[Mapped, ...]:
    x = ctx.value()
    axis, sizes = split_sizes(ctx, x.shape)
    return ctx.add_all(Split(axis, sizes), x)


@onnx_op("Expand", since=8, static=(1,))
def _expand(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    target = ctx.sizes(1, "the shape")
    if ctx.known(1) is None:  # where x has a size of its own the data can only repeat it, or give a 1
        own = (1,) * (len(target) - x.rank) + x.shape
        target = [b if a == 1 or b == 1 else a for a, b in zip(own[-len(target) :], target, strict=True)]
    shape = broadcast_shape(x.shape, target)
    return x if shape == x.shape else ctx.add(Expand(shape), x)


@onnx_op("Tile", static=(1,))
def _tile(ctx: NodeContext) -> Mapped:
    return ctx.add(Tile(tuple(ctx.sizes(1, "the repeats"))), ctx.value())


@onnx_op("Pad", static=(1, 2, 3))
def _pad(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    mode = ctx.text("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        ctx.fail(f"mode {mode!r} is not supported")
    if ctx.opset < 11:
        pads: Sequence[Size] = ctx.ints("pads")
        fill: float | int | bool | Dim | Ratio | None = ctx.real("value", 0.0)
        axes = tuple(range(x.rank))
    else:
        pads = ctx.sizes(1, "the pads")
        known = ctx.known(2) if ctx.has(2) else static_array(0)
        fill = None if known is None else known.item()
        axes = ctx.ints_of(3, "the axes") if ctx.has(3) else tuple(range(x.rank))
    if isinstance(fill, Dim | Ratio):
        ctx.fail(f"the fill value {fill} is not a known number")
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"pad: {len(pads)} pads for {len(axes)} axes; expected twice as many")
    every: list[Size] = [0] * (2 * x.rank)
    for i, axis in enumerate(axes):
        d = axis_of(axis, x.rank, "pad")
        every[d], every[d + x.rank] = pads[i], pads[i + len(axes)]
    if all(p == 0 for p in every):
        return x
    if fill is None and mode == "constant":
        inside = ctx.add(Pad(tuple(every), False), ctx.add(Full(x.shape, True, DTYPES["bool"])))
        return ctx.add(Where(), inside, ctx.add(Pad(tuple(every)), x), ctx.reshape(ctx.value(2)))
    return ctx.add(Pad(tuple(every), fill or 0 if x.dtype.is_float else _as_kind(fill or 0, x.dtype), mode), x)


def _as_kind(value: int | float, dtype: DType) -> int | bool:
    return bool(value) if dtype.kind == "b" else int(value)


# ---- choice


@onnx_op("Gather")
def _gather(ctx: NodeContext) -> Mapped:
    return ctx.add(Gather(ctx.integer("axis", 0)), ctx.value(0), ctx.value(1))


@onnx_op("GatherElements", since=11)
def _gather_elements(ctx: NodeContext) -> Mapped:
    return ctx.add(GatherElements(ctx.integer("axis", 0)), ctx.value(0), ctx.value(1))


@onnx_op("GatherND", since=11)
def _gather_nd(ctx: NodeContext) -> Mapped:
    return ctx.add(GatherND(ctx.integer("batch_dims", 0) if ctx.opset >= 12 else 0), ctx.value(0), ctx.value(1))


@onnx_op("Where", since=9)
def _where(ctx: NodeContext) -> Mapped:
    return ctx.add(Where(), ctx.value(0), ctx.value(1), ctx.value(2))
