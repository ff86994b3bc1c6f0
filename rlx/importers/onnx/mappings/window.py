"""ONNX ops that look at windows of their input: convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import ShapeError
from rlx.importers.onnx.mapping import Mapped, NodeContext, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, Size, ceildiv, max_size, numel, same
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import Add, Div, Mul, Sub
from rlx.ops.layout import SizeOf
from rlx.ops.pool import AveragePool, GlobalAveragePool, GlobalMaxPool, MaxPool


def _per_axis(ctx: NodeContext, name: str, count: int, default: int) -> tuple[int, ...]:
    found = ctx.ints(name, (default,) * count)
    if len(found) != count:
        raise ShapeError(f"{ctx.node.op_type}: {name} {found} needs {count} entries")
    return found


def _padding(
    ctx: NodeContext, space: Sequence[Size], kernel: Sequence[Size], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[Size, ...]:
    """Begins and then ends, from `pads` or `auto_pad`."""
    mode = ctx.text("auto_pad", "NOTSET")
    pads = _per_axis(ctx, "pads", 2 * len(space), 0)
    if mode == "NOTSET":
        return pads
    if mode == "VALID":
        return (0,) * len(pads)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        ctx.fail(f"auto_pad={mode!r} is not supported")
    totals = [
        max_size((ceildiv(n, s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(space, kernel, strides, dilations, strict=True)
    ]
    return _halves(totals, mode == "SAME_UPPER")


def _halves(totals: Sequence[Size], more_at_end: bool) -> tuple[Size, ...]:
    low = [total // 2 for total in totals]
    high = [total - half for total, half in zip(totals, low, strict=True)]
    return (*low, *high) if more_at_end else (*high, *low)


def _check_kernel(ctx: NodeContext, w: Value) -> None:
    kernel = ctx.ints("kernel_shape", ())
    if kernel and (
        len(kernel) != w.rank - 2 or any(same(k, n) is False for k, n in zip(kernel, w.shape[2:], strict=True))
    ):
        raise ShapeError(f"{ctx.node.op_type}: kernel_shape {kernel} contradicts the weight {w.type}")


Window = tuple[tuple[int, ...], tuple[int, ...], tuple[Size, ...], int]


def conv_attributes(ctx: NodeContext, x: Value, w: Value) -> Window:
    """Strides, dilations, pads and groups of a convolution."""
    n = x.rank - 2
    strides, dilations = _per_axis(ctx, "strides", n, 1), _per_axis(ctx, "dilations", n, 1)
    _check_kernel(ctx, w)
    pads = _padding(ctx, x.shape[2:], w.shape[2:], strides, dilations)
    return strides, dilations, pads, ctx.integer("group", 1)


@onnx_op("Conv")
def _conv(ctx: NodeContext) -> Mapped:
    x, w = ctx.value(0), ctx.value(1)
    return ctx.add(Conv(*conv_attributes(ctx, x, w)), *ctx.values())


@onnx_op("ConvTranspose")
def _conv_transpose(ctx: NodeContext) -> Mapped:
    x, w = ctx.value(0), ctx.value(1)
    n = x.rank - 2
    strides, dilations = _per_axis(ctx, "strides", n, 1), _per_axis(ctx, "dilations", n, 1)
    extra = _per_axis(ctx, "output_padding", n, 0)
    _check_kernel(ctx, w)
    mode = ctx.text("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        ctx.fail(f"auto_pad={mode!r} is not supported")
    pads = _per_axis(ctx, "pads", 2 * n, 0)
    if mode == "VALID":
        pads = (0,) * (2 * n)
    wanted: Sequence[Size] = ctx.ints("output_shape", ())[-n:]
    if not wanted and mode.startswith("SAME"):
        wanted = [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
    if wanted:
        pads, extra = _fitted(ctx, x, w, wanted, mode)
    return ctx.add(ConvTranspose(strides, dilations, pads, extra, ctx.integer("group", 1)), *ctx.values())


def _fitted(
    ctx: NodeContext, x: Value, w: Value, wanted: Sequence[Size], mode: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pads and output padding that give the wanted spatial shape."""
    n = x.rank - 2
    strides, dilations = _per_axis(ctx, "strides", n, 1), _per_axis(ctx, "dilations", n, 1)
    extra = list(_per_axis(ctx, "output_padding", n, 0))
    totals: list[int] = []
    for i, (size, k, s, d, want) in enumerate(zip(x.shape[2:], w.shape[2:], strides, dilations, wanted, strict=True)):
        total = s * (size - 1) + extra[i] + d * (k - 1) + 1 - want
        if isinstance(total, Dim):
            ctx.fail(f"output_shape {tuple(wanted)} needs pads of {total}, which depend on the run")
        if total < 0:
            extra[i] -= total
        totals.append(max(total, 0))
    pads = tuple(p for p in _halves(totals, mode == "SAME_UPPER") if isinstance(p, int))
    return pads, tuple(extra)


# ---- pooling


def window_attributes(
    ctx: NodeContext, x: Value, dilated_since: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Size, ...], tuple[int, ...]]:
    """Kernel, strides, pads and dilations."""
    kernel = ctx.ints("kernel_shape")
    strides = _per_axis(ctx, "strides", len(kernel), 1)
    dilations = _per_axis(ctx, "dilations", len(kernel), 1) if ctx.opset >= dilated_since else (1,) * len(kernel)
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"{ctx.node.op_type}: kernel_shape {kernel} does not fit {x.type}")
    return kernel, strides, _padding(ctx, x.shape[2:], kernel, strides, dilations), dilations


@onnx_op("MaxPool")
def _max_pool(ctx: NodeContext) -> tuple[Mapped, ...]:
    x = ctx.value()
    window = window_attributes(ctx, x, 10)
    column_major = ctx.opset >= 8 and ctx.flag("storage_order")
    indices = ctx.wants(1)
    ceil_mode = ctx.opset >= 10 and ctx.flag("ceil_mode")
    made = ctx.add_all(MaxPool(*window, ceil_mode, indices), x)
    if not indices or not column_major:
        return made
    return made[0], _column_major(ctx, made[1], x.shape[2:])


def _column_major(ctx: NodeContext, places: Value, space: Sequence[Size]) -> Value:
    """Flat indices into [N, C, *space] as they are where the first spatial axis is the fastest."""
    i64 = DTYPES["i64"]

    def sized(n: Size) -> Value:
        return ctx.add(SizeOf(n))

    whole = sized(numel(space))
    image = ctx.add(Div(), places, whole)
    rest = ctx.add(Sub(), places, ctx.add(Mul(), image, whole))
    total = ctx.add(Mul(), image, whole)
    for d in range(len(space)):
        after = sized(numel(space[d + 1 :]))
        at = ctx.add(Div(), rest, after)
        rest = ctx.add(Sub(), rest, ctx.add(Mul(), at, after))
        step = sized(numel(space[:d])) if d else ctx.constant(1, i64)
        total = ctx.add(Add(), total, ctx.add(Mul(), at, step))
    return total


@onnx_op("AveragePool", since=7)
def _average_pool(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    window = window_attributes(ctx, x, 19)
    ceil_mode = ctx.opset >= 10 and ctx.flag("ceil_mode")
    return ctx.add(AveragePool(*window, ceil_mode, ctx.flag("count_include_pad")), x)


@onnx_op("GlobalAveragePool")
def _global_average_pool(ctx: NodeContext) -> Mapped:
    return ctx.add(GlobalAveragePool(), ctx.value())


@onnx_op("GlobalMaxPool")
def _global_max_pool(ctx: NodeContext) -> Mapped:
    return ctx.add(GlobalMaxPool(), ctx.value())
