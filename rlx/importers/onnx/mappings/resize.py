"""ONNX ops that resize: by sizes, by factors known at import, by one size over another, or by factors of the data."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np

from rlx.errors import ShapeError
from rlx.importers.onnx.dynamic import known_items
from rlx.importers.onnx.mapping import Mapped, NodeContext, onnx_op
from rlx.importers.onnx.symbolic import Ratio
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Value, const_value
from rlx.ir.shape import Dim, Size, bounds, same
from rlx.ops.base import Op, axis_of
from rlx.ops.dynamic import Extent
from rlx.ops.elementwise import And, Cast, Div, Floor, Greater, Less, Mul, Where
from rlx.ops.interpolate import Interpolate, InterpolateAxis
from rlx.ops.layout import Concat, Reshape, SizeOf, Slice, Squeeze, Unsqueeze
from rlx.ops.resize import ResizeNearest
from rlx.records import dataclass

MOST_SIZES = 1 << 20  # for which a fraction is tried in place of a factor
MOST_ELEMENTS = 2.0**60  # of an axis


@dataclass(frozen=True)
class Quotient:
    """A factor that is one size over another."""

    num: Size
    den: Size


_Scale = float | Ratio | Dim | Quotient | Value


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

    def along(self, axis: int, size: Size) -> Op:
        """What resizes one axis by a factor that it gets as an input."""
        return InterpolateAxis(axis, size, None, *self._filter)

    def op(self, sizes: tuple[Size, ...], scales: tuple[float | None, ...]) -> Op:
        simple = self.coordinate not in ("tf_crop_and_resize", "tf_half_pixel_for_nn")
        if self.mode == "nearest" and simple and not self.antialias:
            return ResizeNearest(sizes, scales, self.coordinate, self.rounding)
        return Interpolate(sizes, scales, *self._filter, self.roi, self.extrapolation)

    @property
    def _filter(self) -> tuple[str, str, str, float, bool, bool]:
        """What both ways of interpolating take, in their order."""
        return self.mode, self.coordinate, self.rounding, self.cubic, self.exclude_outside, self.antialias


def _mode(ctx: NodeContext) -> str:
    mode = ctx.text("mode", "nearest")
    if mode not in ("nearest", "linear", "cubic"):
        ctx.fail(f"mode={mode!r} is not supported")
    return mode


@onnx_op("Upsample", since=7, until=8)
def _upsample_7(ctx: NodeContext) -> Mapped:
    return _scaled(ctx, list(ctx.floats("scales")), _Way(_mode(ctx), "asymmetric", "floor"))


@onnx_op("Upsample", since=9, until=9, static=(1,))
@onnx_op("Resize", since=10, until=10, static=(1,))
def _resize_10(ctx: NodeContext) -> Mapped:
    return _scaled(ctx, _scales(ctx, 1, ctx.value().rank), _Way(_mode(ctx), "asymmetric", "floor"))


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
        return _scaled(ctx, _scales(ctx, 2, len(axes)), way, axes)
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


def _scales(ctx: NodeContext, i: int, count: int) -> list[_Scale]:
    """The factors of `count` axes; a run-time number, or a new size over a size, where they are not known at import."""
    known = ctx.known(i)
    if known is not None:
        return [n if isinstance(n, Ratio | Dim) else float(n) for n in known.items.reshape(-1)]
    scales = ctx.value(i)
    if scales.rank != 1 or not same(scales.shape[0], count):
        ctx.fail(f"the scales are {scales.type}; expected a vector of {count}, one for each axis")
    made: list[_Scale] = []
    for n, found in enumerate(_known_scales(scales)):
        made.append(found if found is not None else ctx.reshape(ctx.add(Slice((n,), (1,), (1,)), scales)))
    return made


def _known_scales(x: Value) -> list[float | Quotient | None]:
    """The elements of a vector of factors as far as they are constants or one size over another."""
    data = const_value(x)
    if data is not None:
        return [float(v) for v in data.reshape(-1)]
    op, inputs = (x.node.op, x.node.inputs) if x.node is not None else (None, ())
    if isinstance(op, Concat):
        return [item for part in inputs for item in _known_scales(part)]
    if isinstance(op, Reshape | Squeeze | Unsqueeze) or (isinstance(op, Cast) and not inputs[0].dtype.is_integer):
        return _known_scales(inputs[0])
    count = int(np.prod([n if isinstance(n, int) else 0 for n in x.shape]))
    if isinstance(op, Div):
        over, under = (_known_sizes(v) for v in inputs)
        if len(over) == len(under) == count:
            return [None if a is None or b is None else Quotient(a, b) for a, b in zip(over, under, strict=True)]
    return [None] * count


def _known_sizes(x: Value) -> list[Size | None]:
    """The elements of a vector of floats that are whole constants or sizes, None for the others."""
    data = const_value(x)
    if data is not None:
        return [int(v) if v == int(v) else None for v in data.reshape(-1)]
    if x.dtype.is_integer or x.node is None:
        return known_items(x) if x.dtype.is_integer else []
    op, inputs = x.node.op, x.node.inputs
    if isinstance(op, Concat):
        return [item for part in inputs for item in _known_sizes(part)]
    return _known_sizes(inputs[0]) if isinstance(op, Reshape | Squeeze | Unsqueeze | Cast) else []


def _scaled(ctx: NodeContext, scales: Sequence[_Scale], way: _Way, axes: Sequence[int] | None = None) -> Value:
    x = ctx.value()
    axes = range(x.rank) if axes is None else axes
    if len(scales) != len(axes):
        raise ShapeError(f"{ctx.node.op_type}: {len(scales)} scales for {len(axes)} axes")
    sizes: list[Size] = list(x.shape)
    factors: list[float | None] = [1.0] * x.rank
    decided: list[tuple[int, Value]] = []
    for axis, scale in zip(axes, scales, strict=True):
        part = way.roi[axis + x.rank] - way.roi[axis] if way.roi else 1.0
        if isinstance(scale, Value):
            decided.append((axis, scale))
        elif isinstance(scale, float):
            sizes[axis], factors[axis] = _scaled_size(ctx, axis, scale * part), scale
        else:
            sizes[axis], factors[axis] = _fitted_size(x.shape[axis], scale), None
    if decided and (way.roi or (x.dtype.is_integer and way.mode != "nearest")):
        ctx.fail(f"scales of the data with {way.coordinate!r} or for {x.dtype} are not supported")
    y = ctx.add(way.op(tuple(sizes), tuple(factors)), x)
    return _by_data(ctx, y, way, decided) if decided else y


def _by_data(ctx: NodeContext, x: Value, way: _Way, decided: Sequence[tuple[int, Value]]) -> Value:
    """x resized along axes whose factors the run decides."""
    dtype = x.dtype
    y = ctx.cast(x, DTYPES["f32" if dtype in (DTYPES["f16"], DTYPES["bf16"], DTYPES["f32"]) else "f64"])
    for axis, scale in decided:
        scale = ctx.cast(scale, DTYPES["f32"])
        y = ctx.add(way.along(axis, _run_time_size(ctx, axis, scale)), y, scale)
    return ctx.cast(y, dtype)


def _run_time_size(ctx: NodeContext, axis: int, scale: Value) -> Size:
    """floor(size * scale) of an axis of the input, in f32 in each run; an error for a scale that gives none."""
    f32 = DTYPES["f32"]
    size = ctx.add(Mul(), ctx.cast(ctx.add(SizeOf(ctx.value().shape[axis])), f32), scale)
    fits = ctx.add(Less(), size, ctx.constant(MOST_ELEMENTS, f32))
    usable = ctx.add(And(), ctx.add(Greater(), scale, ctx.constant(0, f32)), fits)
    whole = ctx.cast(ctx.add(Floor(), ctx.add(Where(), usable, size, ctx.constant(-1, f32))), DTYPES["i64"])
    made = ctx.fresh(f"size{axis}", 0, None)
    wanted = f"the scale of axis {axis} must be above 0 and give fewer than 2^60 elements"
    ctx.add(Extent(made, None, wanted), whole, scale)
    return made


def _scaled_size(ctx: NodeContext, axis: int, scale: float) -> Size:
    """floor(size * scale), in f32 as ONNX has it for sizes up to 2^20; above by the fraction that the scale stands for.

    A scale stands for a fraction (of a denominator up to 1024) that gives the same sizes up to 2^20, or in the bounds
    of the size. One that stands for none is multiplied in f32 whatever the size.
    """
    if not (np.isfinite(scale) and scale >= 0):
        ctx.fail(f"axis {axis} can't be resized by the factor {scale}")
    size = ctx.value().shape[axis]
    exact = Fraction(float(np.float32(scale)))
    if exact.denominator == 1:
        return size * exact.numerator
    low, high = bounds(size)
    if low is not None and low == high and low <= MOST_SIZES:
        return int(_products(low, scale))
    tried = np.arange(low if low and low < MOST_SIZES else 0, min(MOST_SIZES, high or MOST_SIZES) + 1)
    for denominator in (16, 1024):
        near = exact.limit_denominator(denominator)
        if np.array_equal(tried * near.numerator // near.denominator, _products(tried, scale)):
            return size * near.numerator // near.denominator
    return (
        int(_products(size, scale))
        if isinstance(size, int)
        else _run_time_size(ctx, axis, ctx.constant(scale, DTYPES["f32"]))
    )


def _products(sizes: int | Array, scale: float) -> Array:
    return np.asarray(np.floor(np.float32(scale) * np.asarray(sizes, np.float32)))


def _fitted_size(size: Size, scale: Quotient | Ratio | Dim) -> Size:
    """The size times a factor made of sizes: `a` for a / size, whatever f32 makes of that factor."""
    num, den = (scale, 1) if isinstance(scale, Dim) else (scale.num, scale.den)
    return num if same(size, den) else size * num // den


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
    scale = pick(Fraction(a, max(b, 1)) for a, b in pairs)
    out: list[Size] = list(x.shape)
    factors: list[float | None] = [1.0] * x.rank
    for axis, (_, size) in zip(axes, pairs, strict=True):
        whole = floor(scale * size + Fraction(1, 2))
        out[axis], factors[axis] = whole, None if whole == scale * size else float(scale)
    return ctx.add(way.op(tuple(out), tuple(factors)), x)
