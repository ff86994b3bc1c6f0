"""ONNX ops on signals, regions of images, and random numbers."""

from __future__ import annotations

import zlib

import numpy as np

from rlx.errors import ShapeError
from rlx.importers.onnx.mapping import Mapped, NodeContext, element_dtype, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Shape, Size
from rlx.ops.base import axis_of
from rlx.ops.random import Bernoulli, Multinomial, RandomNormal, RandomUniform
from rlx.ops.roi import MaxRoiPool, RoiAlign, RoiAlignAdaptive
from rlx.ops.signal import Dft, MelWeights, Stft, Window

# ---- signals


@onnx_op("DFT", since=17, static=(1,))
def _dft_17(ctx: NodeContext) -> Mapped:
    return _dft(ctx, ctx.integer("axis", 1))


@onnx_op("DFT", since=20, static=(1, 2))
def _dft_20(ctx: NodeContext) -> Mapped:
    (axis,) = ctx.ints_of(2, "the axis") if ctx.has(2) else (-2,)
    return _dft(ctx, axis)


def _dft(ctx: NodeContext, axis: int) -> Value:
    x = ctx.value()
    length = ctx.sizes(1, "the length")[0] if ctx.has(1) else None
    op = Dft(length, axis_of(axis, x.rank, "DFT"), ctx.flag("inverse"), ctx.flag("onesided"))
    return ctx.add(op, x)


@onnx_op("STFT", since=17, static=(1, 3))
def _stft(ctx: NodeContext) -> Mapped:
    x, window = ctx.value(), ctx.optional(2)
    (step,) = ctx.static(1, "the step").sizes()  # as a size that data decide it would leave the result without a bound
    if ctx.has(3):
        (length,) = ctx.static(3, "the length of frames").sizes()
    elif window is not None:
        length = window.shape[0]
    else:
        raise ShapeError("STFT: neither a window nor the length of frames is given")
    x = ctx.reshape(x, *x.shape, 1) if x.rank == 2 else x
    operands = [x] if window is None else [x, window]
    return ctx.add(Stft(step, length, ctx.flag("onesided", 1)), *operands)


@onnx_op("HannWindow", since=17, static=(0,))
@onnx_op("HammingWindow", since=17, static=(0,))
@onnx_op("BlackmanWindow", since=17, static=(0,))
def _window(ctx: NodeContext) -> Mapped:
    (size,) = ctx.sizes(0, "the size")
    kind = ctx.node.op_type.removesuffix("Window").lower()
    return ctx.add(Window(size, kind, ctx.flag("periodic", 1), element_dtype(ctx.integer("output_datatype", 1))))


@onnx_op("MelWeightMatrix", since=17, static=(0, 1, 2, 3, 4))
def _mel(ctx: NodeContext) -> Mapped:
    bins, length, rate = (ctx.ints_of(i, what)[0] for i, what in enumerate(("the bins", "the length", "the rate")))
    low, high = (ctx.static(i, "the edge").item() for i in (3, 4))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        ctx.fail("the edges must be numbers")
    return ctx.add(MelWeights(bins, length, rate, low, high, element_dtype(ctx.integer("output_datatype", 1))))


# ---- regions


@onnx_op("RoiAlign", since=10)
def _roi_align(ctx: NodeContext) -> Mapped:
    size = ctx.integer("output_height", 1), ctx.integer("output_width", 1)
    scale, mode, samples = ctx.real("spatial_scale", 1.0), ctx.text("mode", "avg"), ctx.integer("sampling_ratio", 0)
    half = ctx.opset >= 16 and ctx.text("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    operands = [ctx.value(i) for i in range(3)]
    if samples > 0:
        return ctx.add(RoiAlign(size, scale, mode, half, samples), *operands)
    return ctx.add(RoiAlignAdaptive(size, scale, mode, half), *operands)


@onnx_op("MaxRoiPool")
def _max_roi_pool(ctx: NodeContext) -> Mapped:
    shape = ctx.ints("pooled_shape")
    if len(shape) != 2:
        raise ShapeError(f"MaxRoiPool: pooled_shape {shape} needs 2 entries")
    return ctx.add(MaxRoiPool((shape[0], shape[1]), ctx.real("spatial_scale", 1.0)), ctx.value(0), ctx.value(1))


# ---- random numbers


def _seed(ctx: NodeContext) -> int:
    """The bits of the seed; a node without one draws by its name, the same in every run."""
    if ctx.given("seed"):
        return int(np.float32(ctx.real("seed")).view(np.uint32))
    ctx.note("has no seed: it draws the same numbers in every run")
    return zlib.crc32(ctx.label.encode())


def _drawn(ctx: NodeContext, shape: Shape, dtype: int) -> Value:
    to = element_dtype(dtype) if dtype else DTYPES["f32"]
    if ctx.node.op_type.startswith("RandomUniform"):
        return ctx.add(RandomUniform(shape, ctx.real("low", 0.0), ctx.real("high", 1.0), to, _seed(ctx)))
    return ctx.add(RandomNormal(shape, ctx.real("mean", 0.0), ctx.real("scale", 1.0), to, _seed(ctx)))


@onnx_op("RandomNormal")
@onnx_op("RandomUniform")
def _random(ctx: NodeContext) -> Mapped:
    shape: tuple[Size, ...] = ctx.ints("shape")
    return _drawn(ctx, shape, ctx.integer("dtype", 1))


@onnx_op("RandomNormalLike")
@onnx_op("RandomUniformLike")
def _random_like(ctx: NodeContext) -> Mapped:
    own = ctx.type()
    if ctx.given("dtype"):
        return _drawn(ctx, own.shape, ctx.integer("dtype"))
    return ctx.cast(_drawn(ctx, own.shape, 0), own.dtype)


@onnx_op("Bernoulli", since=15)
def _bernoulli(ctx: NodeContext) -> Mapped:
    dtype = element_dtype(ctx.integer("dtype")) if ctx.given("dtype") else None
    return ctx.add(Bernoulli(dtype, _seed(ctx)), ctx.value())


@onnx_op("Multinomial", since=7)
def _multinomial(ctx: NodeContext) -> Mapped:
    return ctx.add(
        Multinomial(ctx.integer("sample_size", 1), element_dtype(ctx.integer("dtype", 6)), _seed(ctx)), ctx.value()
    )
