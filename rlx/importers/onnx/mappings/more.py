"""ONNX ops that scatter, sort, select by data, mask, and move between channels and space."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rlx.errors import ShapeError
from rlx.importers.onnx.mapping import Mapped, NodeContext, element_dtype, onnx_op
from rlx.importers.onnx.mappings.window import window_attributes
from rlx.install import install_extra
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, numel, unify
from rlx.ops import bitwise, channel_norm, mask, pool_more, space, trigonometry
from rlx.ops.base import Op, axis_of
from rlx.ops.cumulative import CumProd, CumSum
from rlx.ops.einsum import Einsum
from rlx.ops.elementwise import Less, Where
from rlx.ops.layout import Expand, Full, Reshape
from rlx.ops.misc import BitCast, DecodeImage, Det
from rlx.ops.rotary import RotaryEmbedding
from rlx.ops.sample import AffineGrid, DeformConv, GridSample
from rlx.ops.scatter import ScatterElements, ScatterNd
from rlx.ops.select import Compress, NonMaxSuppression, NonZero, TopK, Unique

I64 = DTYPES["i64"]

_SAME: dict[tuple[str, int], type[Op]] = {
    ("Acos", 7): trigonometry.Acos,
    ("Acosh", 9): trigonometry.Acosh,
    ("Asin", 7): trigonometry.Asin,
    ("Asinh", 9): trigonometry.Asinh,
    ("Atan", 7): trigonometry.Atan,
    ("Atanh", 9): trigonometry.Atanh,
    ("BitwiseAnd", 18): bitwise.BitwiseAnd,
    ("BitwiseNot", 18): bitwise.BitwiseNot,
    ("BitwiseOr", 18): bitwise.BitwiseOr,
    ("BitwiseXor", 18): bitwise.BitwiseXor,
    ("Cosh", 9): trigonometry.Cosh,
    ("Sinh", 9): trigonometry.Sinh,
    ("Tan", 7): trigonometry.Tan,
}


def _same(op: type[Op]) -> Any:
    return lambda ctx: ctx.add(op(), *ctx.values())


for (_name, _since), _op in _SAME.items():
    onnx_op(_name, since=_since)(_same(_op))


@onnx_op("BitShift", since=11)
def _bit_shift(ctx: NodeContext) -> Mapped:
    direction = ctx.text("direction")
    if direction not in ("LEFT", "RIGHT"):
        ctx.fail(f"direction={direction!r} is not LEFT or RIGHT")
    a, b = ctx.value(0), ctx.value(1)
    if a.dtype.kind == "u":
        return ctx.add(bitwise.BitShift(direction == "RIGHT"), a, b)
    unsigned = DTYPES["u" + a.dtype.name[1:]]
    amount = ctx.cast(b, unsigned)
    if direction == "LEFT":  # the bits are those of unsigned numbers
        return ctx.cast(ctx.add(bitwise.BitShift(False), ctx.cast(a, unsigned), amount), a.dtype)
    negative = ctx.add(Less(), a, ctx.constant(0, a.dtype))  # to the right the sign stays: ~(~a >> b)
    size = ctx.add(Where(), negative, ctx.add(bitwise.BitwiseNot(), a), a)
    moved = ctx.cast(ctx.add(bitwise.BitShift(True), ctx.cast(size, unsigned), amount), a.dtype)
    return ctx.add(Where(), negative, ctx.add(bitwise.BitwiseNot(), moved), moved)


# ---- writing to positions


@onnx_op("Scatter", since=9, until=10)
@onnx_op("ScatterElements", since=11)
def _scatter_elements(ctx: NodeContext) -> Mapped:
    reduction = ctx.text("reduction", "none") if ctx.opset >= 16 else "none"
    return ctx.add(ScatterElements(ctx.integer("axis", 0), reduction), *(ctx.value(i) for i in range(3)))


@onnx_op("Scatter", since=11, until=11)
def _scatter(ctx: NodeContext) -> Mapped:
    """Left in the standard as deprecated."""
    return _scatter_elements(ctx)


@onnx_op("ScatterND", since=11)
def _scatter_nd(ctx: NodeContext) -> Mapped:
    reduction = ctx.text("reduction", "none") if ctx.opset >= 16 else "none"
    return ctx.add(ScatterNd(reduction), *(ctx.value(i) for i in range(3)))


# ---- sorting and choosing by data


@onnx_op("TopK", since=1, until=9)
def _top_k_1(ctx: NodeContext) -> tuple[Mapped, ...]:
    return ctx.add_all(TopK(ctx.integer("k"), ctx.integer("axis", -1)), ctx.value())


@onnx_op("TopK", since=10, static=(1,))
def _top_k(ctx: NodeContext) -> tuple[Mapped, ...]:
    (k,) = ctx.sizes(1, "k")
    largest = True
    if ctx.opset >= 11:
        largest = ctx.flag("largest", 1)
        ctx.ignore("sorted")  # sorted is a right answer for either
    return ctx.add_all(TopK(k, ctx.integer("axis", -1), largest), ctx.value())


@onnx_op("NonZero", since=9)
def _non_zero(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    if x.rank == 0:
        ctx.fail("a scalar input is not supported")
    return ctx.add(NonZero(ctx.fresh("count", 0, numel(x.shape))), x)


@onnx_op("Compress", since=9)
def _compress(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    axis = axis_of(ctx.integer("axis"), x.rank, "compress") if ctx.given("axis") else None
    ctx.ignore("axis")
    most = numel(x.shape) if axis is None else x.shape[axis]
    return ctx.add(Compress(ctx.fresh("count", 0, most), axis), x, ctx.value(1))


@onnx_op("Unique", since=11)
def _unique(ctx: NodeContext) -> tuple[Mapped, ...]:
    x = ctx.value()
    axis = axis_of(ctx.integer("axis"), x.rank, "unique") if ctx.given("axis") else None
    ctx.ignore("axis")
    most = numel(x.shape) if axis is None else x.shape[axis]
    return ctx.add_all(Unique(ctx.fresh("count", 0, most), axis, ctx.flag("sorted", 1)), x)


@onnx_op("NonMaxSuppression", since=10)
def _non_max_suppression(ctx: NodeContext) -> Mapped:
    boxes, scores = ctx.value(0), ctx.value(1)
    limit = ctx.value(2) if ctx.has(2) else ctx.constant(0, I64)
    thresholds = [ctx.optional(i) for i in (3, 4)]
    operands = [boxes, scores, limit]
    if thresholds[0] is not None or thresholds[1] is not None:
        operands.append(thresholds[0] if thresholds[0] is not None else ctx.constant(0, DTYPES["f32"]))
    if thresholds[1] is not None:
        operands.append(thresholds[1])
    most: Size = numel(scores.shape)
    known = ctx.known(2) if ctx.has(2) else None
    if known is not None and known.concrete and known.ints()[0] >= 0:
        most = scores.shape[0] * scores.shape[1] * known.ints()[0]
    return ctx.add(NonMaxSuppression(ctx.fresh("count", 0, most), ctx.flag("center_point_box")), *operands)


@onnx_op("CumSum", since=11, static=(1,))
@onnx_op("CumProd", since=26, static=(1,))
def _cumulative(ctx: NodeContext) -> Mapped:
    op = CumSum if ctx.node.op_type == "CumSum" else CumProd
    (axis,) = ctx.ints_of(1, "the axis")
    return ctx.add(op(axis, ctx.flag("exclusive"), ctx.flag("reverse")), ctx.value())


# ---- masks


@onnx_op("Trilu", since=14)
def _trilu(ctx: NodeContext) -> Mapped:
    shift = [ctx.reshape(ctx.value(1))] if ctx.has(1) else []
    return ctx.add(mask.Trilu(ctx.flag("upper", 1)), ctx.value(), *shift)


@onnx_op("EyeLike", since=9)
def _eye_like(ctx: NodeContext) -> Mapped:
    dtype = element_dtype(ctx.integer("dtype")) if ctx.given("dtype") else None
    return ctx.add(mask.EyeLike(ctx.integer("k", 0), dtype), ctx.value())


@onnx_op("OneHot", since=9, static=(1,))
def _one_hot(ctx: NodeContext) -> Mapped:
    known = ctx.known(1)
    if known is not None:
        (depth,) = known.sizes()
    else:
        (depth,) = ctx.sizes_of(ctx.cast(ctx.value(1), I64), "the depth")
    return ctx.add(mask.OneHot(depth, ctx.integer("axis", -1)), ctx.value(0), ctx.value(2))


@onnx_op("Hardmax", since=1)
def _hardmax_1(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    axis = axis_of(ctx.integer("axis", 1), x.rank, "Hardmax")
    flat = ctx.add(Reshape((*x.shape[:axis], numel(x.shape[axis:]))), x)
    return ctx.add(Reshape(x.shape), ctx.add(mask.Hardmax(-1), flat))


@onnx_op("Hardmax", since=13)
def _hardmax(ctx: NodeContext) -> Mapped:
    return ctx.add(mask.Hardmax(ctx.integer("axis", -1)), ctx.value())


@onnx_op("Shrink", since=9)
def _shrink(ctx: NodeContext) -> Mapped:
    return ctx.add(mask.Shrink(ctx.real("lambd", 0.5), ctx.real("bias", 0.0)), ctx.value())


@onnx_op("ReverseSequence", since=10)
def _reverse_sequence(ctx: NodeContext) -> Mapped:
    op = mask.ReverseSequence(ctx.integer("batch_axis", 1), ctx.integer("time_axis", 0))
    return ctx.add(op, ctx.value(0), ctx.value(1))


# ---- space


@onnx_op("DepthToSpace")
def _depth_to_space(ctx: NodeContext) -> Mapped:
    return ctx.add(space.DepthToSpace(ctx.integer("blocksize"), ctx.text("mode", "DCR")), ctx.value())


@onnx_op("SpaceToDepth")
def _space_to_depth(ctx: NodeContext) -> Mapped:
    block, mode = ctx.integer("blocksize"), ctx.text("mode", "DCR") if ctx.opset >= 28 else "DCR"
    x = ctx.value()
    y = ctx.add(space.SpaceToDepth(block), x)
    if mode == "DCR":
        return y
    n, c, h, w = y.shape
    each = x.shape[1]
    parts = ctx.transpose(ctx.reshape(y, n, block, block, each, h, w), 0, 3, 1, 2, 4, 5)
    return ctx.reshape(parts, n, c, h, w)


@onnx_op("CenterCropPad", since=18, static=(1,))
def _center_crop_pad(ctx: NodeContext) -> Mapped:
    axes = ctx.ints("axes") if ctx.given("axes") else None
    return ctx.add(space.CenterCropPad(tuple(ctx.sizes(1, "the shape")), axes), ctx.value())


@onnx_op("Col2Im", since=18, static=(1, 2))
def _col2im(ctx: NodeContext) -> Mapped:
    kernel = ctx.ints_of(2, "the shape of blocks")
    n = len(kernel)
    strides, dilations = ctx.ints("strides", (1,) * n), ctx.ints("dilations", (1,) * n)
    image = tuple(ctx.sizes(1, "the shape of the image"))
    return ctx.add(space.Col2Im(image, kernel, strides, dilations, ctx.ints("pads", (0,) * 2 * n)), ctx.value())


# ---- pooling and sampling


@onnx_op("LpPool", since=2)
def _lp_pool(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    window = window_attributes(ctx, x, 18)
    ceil_mode = ctx.opset >= 18 and ctx.flag("ceil_mode")
    return ctx.add(pool_more.LpPool(*window, ceil_mode, ctx.integer("p", 2)), x)


@onnx_op("GlobalLpPool", since=2)
def _global_lp_pool(ctx: NodeContext) -> Mapped:
    return ctx.add(pool_more.GlobalLpPool(ctx.integer("p", 2)), ctx.value())


@onnx_op("MaxUnpool", since=9, static=(2,))
def _max_unpool(ctx: NodeContext) -> Mapped:
    x, places = ctx.value(0), ctx.value(1)
    kernel = ctx.ints("kernel_shape")
    n = len(kernel)
    strides, pads = ctx.ints("strides", (1,) * n), ctx.ints("pads", (0,) * 2 * n)
    if x.rank != n + 2 or len(strides) != n or len(pads) != 2 * n:
        raise ShapeError(f"MaxUnpool: kernel_shape {kernel}, strides {strides} and pads {pads} do not fit {x.type}")
    own = tuple(
        (size - 1) * s - pads[i] - pads[i + n] + k
        for i, (size, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    )
    if not ctx.has(2):
        return ctx.add(pool_more.MaxUnpool(own), x, places)
    wanted = tuple(ctx.sizes(2, "the shape of the result"))
    if len(wanted) != x.rank:
        raise ShapeError(f"MaxUnpool: the shape {wanted} of the result is none of rank {x.rank}")
    for axis in range(2):
        unify(wanted[axis], x.shape[axis], f"MaxUnpool: axis {axis} of the result and of {x.type}")
    return ctx.add(pool_more.MaxUnpool(wanted[2:], own), x, places)


@onnx_op("GridSample", since=16)
def _grid_sample(ctx: NodeContext) -> Mapped:
    mode = ctx.text("mode", "linear" if ctx.opset >= 20 else "bilinear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    op = GridSample(mode, ctx.text("padding_mode", "zeros"), ctx.flag("align_corners"))
    return ctx.add(op, ctx.value(0), ctx.value(1))


@onnx_op("AffineGrid", since=20, static=(1,))
def _affine_grid(ctx: NodeContext) -> Mapped:
    size = tuple(ctx.sizes(1, "the size"))[2:]
    return ctx.add(AffineGrid(size, ctx.flag("align_corners")), ctx.value())


@onnx_op("DeformConv", since=19)
def _deform_conv(ctx: NodeContext) -> Mapped:
    x, w, offset = (ctx.value(i) for i in range(3))
    n = x.rank - 2
    ctx.ignore("kernel_shape")
    strides, dilations = ctx.ints("strides", (1,) * n), ctx.ints("dilations", (1,) * n)
    groups = ctx.integer("group", 1), ctx.integer("offset_group", 1)
    op = DeformConv(strides, dilations, ctx.ints("pads", (0,) * 2 * n), *groups)
    bias, scale = ctx.optional(3), ctx.optional(4)
    operands = [x, w, offset]
    if bias is None and scale is not None:
        channels = w.shape[0]
        bias = ctx.add(Full((channels,), 0, x.dtype))
    operands += [v for v in (bias, scale) if v is not None]
    return ctx.add(op, *operands)


# ---- norms, sums of products, positions


@onnx_op("BitCast", since=26)
def _bit_cast(ctx: NodeContext) -> Mapped:
    return ctx.add(BitCast(element_dtype(ctx.integer("to"))), ctx.value())


@onnx_op("Det", since=11)
def _det(ctx: NodeContext) -> Mapped:
    return ctx.add(Det(), ctx.value())


@onnx_op("InstanceNormalization", since=6)
def _instance_norm(ctx: NodeContext) -> Mapped:
    return ctx.add(channel_norm.InstanceNorm(ctx.real("epsilon", 1e-5)), *(ctx.value(i) for i in range(3)))


@onnx_op("GroupNormalization", since=18)
def _group_norm(ctx: NodeContext) -> Mapped:
    x, scale, bias = (ctx.value(i) for i in range(3))
    groups = ctx.integer("num_groups")
    op = channel_norm.GroupNorm(groups, ctx.real("epsilon", 1e-5))
    if ctx.opset >= 21:
        ctx.require("stash_type", 1)
        return ctx.add(op, x, scale, bias)
    spread = [_for_each_channel(ctx, v, groups, x.shape[1]) for v in (scale, bias)]  # one for each group then
    return ctx.add(op, x, *spread)


def _for_each_channel(ctx: NodeContext, v: Value, groups: int, channels: Size) -> Value:
    return ctx.reshape(ctx.add(Expand((groups, channels // groups)), ctx.reshape(v, groups, 1)), channels)


@onnx_op("LRN")
def _lrn(ctx: NodeContext) -> Mapped:
    op = channel_norm.Lrn(ctx.integer("size"), ctx.real("alpha", 1e-4), ctx.real("beta", 0.75), ctx.real("bias", 1.0))
    return ctx.add(op, ctx.value())


@onnx_op("MeanVarianceNormalization", since=9)
def _mean_variance(ctx: NodeContext) -> Mapped:
    return ctx.add(channel_norm.MeanVarianceNormalization(ctx.ints("axes", (0, 2, 3))), ctx.value())


@onnx_op("LpNormalization")
def _lp_norm(ctx: NodeContext) -> Mapped:
    return ctx.add(channel_norm.LpNormalization(ctx.integer("axis", -1), ctx.integer("p", 2)), ctx.value())


@onnx_op("Einsum", since=12)
def _einsum(ctx: NodeContext) -> Mapped:
    return ctx.add(Einsum(ctx.text("equation")), *ctx.values())


@onnx_op("RotaryEmbedding", since=23)
def _rotary(ctx: NodeContext) -> Mapped:
    heads, dim = ctx.integer("num_heads", 0), ctx.integer("rotary_embedding_dim", 0)
    return ctx.add(RotaryEmbedding(ctx.flag("interleaved"), heads, dim), *ctx.values())


@onnx_op("ImageDecoder", since=20)
def _image_decoder(ctx: NodeContext) -> Mapped:
    """The pixels as they lie in the file, in the shape that their own sizes give."""
    if find_spec("PIL") is None:
        ctx.fail(f"images are decoded by Pillow, which is missing: {install_extra('image')}")
    pixels = ctx.text("pixel_format", "RGB")
    flat, size = ctx.add_all(DecodeImage(ctx.fresh("count", 0, None), pixels), ctx.value())
    height, width = ctx.sizes_of(size, "the size of the image")
    return ctx.reshape(flat, height, width, 1 if pixels == "Grayscale" else 3)
