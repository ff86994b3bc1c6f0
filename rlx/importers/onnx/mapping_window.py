"""ONNX ops that look at windows of their input: convolution, pooling, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rlx.errors import ShapeError
from rlx.importers.onnx.mapping import Mapped, NodeContext, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, Size, ceildiv, max_size, numel, same
from rlx.ops.base import Op, axis_of
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import Add, Div, Mul, Sub
from rlx.ops.interpolate import Interpolate
from rlx.ops.layout import SizeOf
from rlx.ops.pool import AveragePool, GlobalAveragePool, GlobalMaxPool, MaxPool
from rlx.ops.resize import ResizeNearest
from rlx.records import dataclass


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


# ---- resizing


@dataclass(frozen=True)
class _Way:
    """How Resize maps and interpolates: what `ResizeNearest` and `Interpolate` take."""

    mode: str
    coordinate: str
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] = ()
    extrapolation: float = 0.0

    def op(self, sizes: tuple[Size, ...], scales: tuple[float | None, ...]) -> Op:
        simple = self.coordinate not in ("tf_crop_and_resize", "tf_half_pixel_for_nn")
        if self.mode == "nearest" and simple and not self.antialias:
            return ResizeNearest(sizes, scales, self.coordinate, self.rounding)
        return Interpolate(
            sizes,
            scales,
            self.mode,
            self.coordinate,
            self.rounding,
            self.cubic,
            self.exclude_outside,
            self.antialias,
            self.roi,
            self.extrapolation,
        )


def _mode(ctx: NodeContext) -> str:
    mode = ctx.text("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        ctx.fail(f"mode={mode!r} is not supported")
    return mode


@onnx_op("Upsample", since=7, until=8)
def _upsample_7(ctx: NodeContext) -> Mapped:
    return _scaled(ctx, ctx.floats("scales"), _Way(_mode(ctx), "asymmetric", "floor"))


@onnx_op("Upsample", since=9, until=9, static=(1,))
@onnx_op("Resize", since=10, until=10, static=(1,))
def _resize_10(ctx: NodeContext) -> Mapped:
    return _scaled(ctx, _scales(ctx, 1), _Way(_mode(ctx), "asymmetric", "floor"))


@onnx_op("Resize", since=11, static=(1, 2, 3))
def _resize(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    axes = ctx.ints("axes", range(x.rank)) if ctx.opset >= 18 else tuple(range(x.rank))
    axes = tuple(axis_of(axis, x.rank, "resize") for axis in axes)
    coordinate = ctx.text("coordinate_transformation_mode", "half_pixel")
    way = _Way(
        _mode(ctx),
        coordinate,
        ctx.text("nearest_mode", "round_prefer_floor"),
        ctx.real("cubic_coeff_a", -0.75),
        ctx.flag("exclude_outside"),
        ctx.opset >= 18 and ctx.flag("antialias"),
        _region(ctx, x.rank, axes) if coordinate == "tf_crop_and_resize" else (),
        ctx.real("extrapolation_value", 0.0),
    )
    by_sizes = ctx.has(3) and same(ctx.type(3).shape[0], 0) is False
    policy = ctx.text("keep_aspect_ratio_policy", "stretch") if ctx.opset >= 18 else "stretch"
    if not by_sizes:
        if not ctx.has(2):
            ctx.fail("neither scales nor sizes are given")
        return _scaled(ctx, _scales(ctx, 2), way, axes)
    sizes = ctx.sizes(3, "the sizes") if policy == "stretch" else ctx.static(3, "the sizes").sizes()
    if policy != "stretch":
        return _keeping_ratio(ctx, x, axes, sizes, policy, way)
    out = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        out[axis] = size
    return ctx.add(way.op(tuple(out), ()), x)


def _region(ctx: NodeContext, rank: int, axes: Sequence[int]) -> tuple[float, ...]:
    """The region of tf_crop_and_resize for all axes: starts and then ends."""
    given = [float(v) for v in ctx.static(1, "the region").array().reshape(-1)] if ctx.has(1) else []
    if len(given) != 2 * len(axes):
        ctx.fail(f"the region has {len(given)} numbers for {len(axes)} axes; expected twice as many")
    region = [0.0] * rank + [1.0] * rank
    for i, axis in enumerate(axes):
        region[axis], region[axis + rank] = given[i], given[i + len(axes)]
    return tuple(region)


def _scales(ctx: NodeContext, i: int) -> tuple[float, ...]:
    found = ctx.static(i, "the scales")
    if not found.concrete:
        ctx.fail("scales that depend on the run are not supported; fix the dims, or export with sizes")
    return tuple(float(v) for v in found.array().reshape(-1))


def _scaled(ctx: NodeContext, scales: Sequence[float], way: _Way, axes: Sequence[int] | None = None) -> Value:
    x = ctx.value()
    axes = range(x.rank) if axes is None else axes
    if len(scales) != len(axes):
        raise ShapeError(f"{ctx.node.op_type}: scales {tuple(scales)} for {len(axes)} axes")
    sizes: list[Size] = list(x.shape)
    factors: list[float | None] = [1.0] * x.rank
    for axis, scale in zip(axes, scales, strict=True):
        part = way.roi[axis + x.rank] - way.roi[axis] if way.roi else 1.0
        sizes[axis], factors[axis] = _scaled_size(ctx, x.shape[axis], scale * part), scale
    return ctx.add(way.op(tuple(sizes), tuple(factors)), x)


def _scaled_size(ctx: NodeContext, size: Size, scale: float) -> Size:
    """floor(size * scale), in f32 as ONNX has it."""
    if isinstance(size, int):
        return int(np.floor(np.float32(size) * np.float32(scale)))
    exact = Fraction(scale)
    if exact.denominator > 1024:
        ctx.fail(f"the scale {scale} of the dynamic size {size} is not exact in binary; fix the size with dims")
    return size * exact.numerator // exact.denominator


def _keeping_ratio(
    ctx: NodeContext, x: Value, axes: Sequence[int], sizes: Sequence[Size], policy: str, way: _Way
) -> Value:
    pick = {"not_larger": min, "not_smaller": max}.get(policy)
    if pick is None:
        ctx.fail(f"keep_aspect_ratio_policy={policy!r} is not supported")
    old = [x.shape[axis] for axis in axes]
    pairs = [(a, b) for a, b in zip(sizes, old, strict=True) if isinstance(a, int) and isinstance(b, int)]
    if len(pairs) < len(axes):
        ctx.fail(f"keep_aspect_ratio_policy={policy!r} of dynamic sizes is not supported; fix them with dims")
    scale = pick(a / b for a, b in pairs)
    out, factors = list(x.shape), [1.0] * x.rank
    for axis, (_, size) in zip(axes, pairs, strict=True):
        out[axis], factors[axis] = int(np.floor(scale * size + 0.5)), scale
    return ctx.add(way.op(tuple(out), tuple(factors)), x)
