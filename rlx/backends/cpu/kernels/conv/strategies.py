"""Which way a convolution is computed.

Images have their channels last, so a window is a few contiguous pieces, and that of a 1x1 kernel lies in the image as
it is: nothing is moved then. Windows of several pixels are read row by row where they lie; only where that can't be
done (strides of 1x1 kernels, groups, gaps between columns), or where there are tile registers and many outputs, they
are gathered. Depthwise convolutions and those that Winograd's transforms save products in have code of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS, may_be_words
from rlx.backends.cpu.kernels.conv import depthwise, implicit_gemm, pairs, winograd
from rlx.backends.cpu.kernels.conv import int8 as int8_conv
from rlx.backends.cpu.kernels.conv.depthwise import Depthwise
from rlx.backends.cpu.kernels.conv.few_outputs import FewOutputs
from rlx.backends.cpu.kernels.conv.grouped import Grouped
from rlx.backends.cpu.kernels.conv.implicit_gemm import ImplicitGemm
from rlx.backends.cpu.kernels.conv.int8_depthwise import Int8Depthwise
from rlx.backends.cpu.kernels.conv.planar import in_planes, reads_in_place
from rlx.backends.cpu.kernels.conv.pointwise import as_pairs
from rlx.backends.cpu.kernels.conv.product import Im2col, InImage
from rlx.backends.cpu.kernels.conv.weights import is_few
from rlx.backends.cpu.kernels.conv.winograd_forms import FORMS
from rlx.backends.cpu.strategy import CpuStrategy, Setting, computed
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import numel, size_product
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import Cast, Expr, Load, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["BF16", "CONV", "accepts_operand", "layout", "reads_rounded", "unsuited"]

F32 = DTYPES["f32"]
FEW_TAPS = 32  # of a window of one plane
FEW_CHANNELS = 8  # images of fewer channels are brought into this layout pixel row by pixel row

# The first that does not refuse a convolution computes it.
SUMS: tuple[CpuStrategy, ...] = (
    Depthwise("conv.depthwise"),
    Grouped("conv.grouped"),
    FewOutputs("conv.few_outputs"),
    ImplicitGemm("conv.implicit_gemm"),
    InImage("conv.in_image+few", few=True),
    InImage("conv.in_image"),
    Im2col("conv.im2col+few", few=True),
    Im2col("conv.im2col"),
)
CONV: tuple[CpuStrategy, ...] = (
    Int8Depthwise("conv.int8_depthwise"),
    int8_conv.Int8("conv.int8"),
    *map(winograd.Winograd, FORMS),
    *SUMS,
)

# Of operands rounded to bf16 that an instruction multiplies in pairs.
BF16: tuple[CpuStrategy, ...] = (
    ImplicitGemm("conv.implicit_gemm+bf16_pairs", BF16_PAIRS),
    InImage("conv.in_image+bf16_pairs", BF16_PAIRS),
    Im2col("conv.im2col+bf16_pairs", BF16_PAIRS),
)


def unsuited(anchor: Conv, dtype: DType, target: Target) -> str | None:
    """Why no strategy takes a convolution: they take floats and bytes in one to three spatial axes."""
    if dtype.name == "i32" and anchor.x.dtype.name in ("u8", "i8"):
        return int8_conv.unsuited(anchor, target)
    taps = size_product(anchor.w_shape[2:])
    one = anchor.groups == anchor.x_shape[1] == anchor.w_shape[0] == 1 and len(anchor.x_shape) < 5
    if one and isinstance(taps, int) and taps <= FEW_TAPS:
        return "few taps of one plane: a loop nest, whose vectors run along the pixels"
    known = dtype.name in ("f16", "bf16", "f32", "f64") and len(anchor.x_shape) in (3, 4, 5)
    return None if known else f"no kernel has convolutions of {dtype}, or of so many axes"


def accepts_operand(index: Affine) -> bool:
    """Any linear walk will do: what is not in place becomes a copy."""
    return index.is_linear


def reads_rounded(kernel: Kernel, target: Target) -> bool:
    """Whether a convolution whose operands are rounded to bf16 reads an image that is stored so in place."""
    match kernel.anchor:
        case Conv(x=Cast(value=Load() as image)) as anchor if anchor.activations == "bf16":
            n, c, *space = anchor.x_shape
            if not pairs.lies_so(image, (n, *space, c)):
                return False
            if depthwise.suits(anchor):
                return len(space) < 3
            if as_pairs(kernel, target) is not None:
                whole = all(isinstance(size, int) for size in anchor.x_shape)
                return whole and may_be_words(c) and not target.float_tiles
            return pairs.are_many(anchor.w_shape, anchor.groups) and isinstance(c, int) and c % 2 == 0
    return False


def layout(kernel: Kernel, setting: Setting, strategies: Sequence[CpuStrategy] = CONV) -> list[Kernel]:
    """The kernel, computed by the first strategy that takes it, after those that bring its operands into a layout."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    made: list[Kernel] = []
    in_pairs = anchor.activations == "bf16" and pairs.are_many(anchor.w_shape, anchor.groups)
    if anchor.x.dtype.is_float and anchor.x.dtype.bits < 32 and not in_pairs:  # summed in f32
        x = anchor.x if len(anchor.x_shape) < 5 and depthwise.suits(anchor) else Cast(anchor.x, F32)
        anchor = replace(anchor, x=x, w=Cast(anchor.w, F32), activations="")
        kernel = kernel.with_anchor(anchor)
    if len(anchor.x_shape) == 5:
        if not reads_in_place(anchor) and not _channels_together(anchor):
            image, copy = _channels_last(kernel, anchor)  # whose planes are then copied in whole vectors
            made.append(copy)
            kernel = kernel.with_anchor(replace(anchor, x=image))
        made += in_planes(kernel)
        kernel = made.pop()
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    if in_pairs:
        *rounding, kernel = pairs.of_pairs(kernel)
        return [*made, *rounding, *computed(kernel, BF16, setting)]
    planes, copies = kernel, list[Kernel]()
    if not _channels_together(anchor) and not _from_planes(kernel):
        image, copy = _channels_last(kernel, anchor)
        copies.append(copy)
        kernel = kernel.with_anchor(replace(anchor, x=image))
    *before, last = computed(kernel, strategies, setting)
    if copies and isinstance(last.strategy, ImplicitGemm) and implicit_gemm.turns_planes(planes, setting.target):
        *before, turning = computed(planes, (last.strategy,), setting)
        copies, last = [], replace(turning, refused=last.refused)
    made += copies
    strategy = last.strategy
    if isinstance(strategy, winograd.Winograd) and winograd.has_few(kernel, strategy.name, setting.target) is None:
        # runs take the way that a compile for their size would: results have the same bits
        *more, plain = computed(kernel, SUMS, setting)
        assert isinstance(plain.anchor, Conv)
        assert isinstance(plain.anchor.w, Load)
        assert isinstance(plain.strategy, CpuStrategy)
        both = winograd.OrSums(strategy, plain.strategy)
        before = [*more, *before]
        last = replace(last, strategy=both, operands=(plain.anchor.w.source,), refused=(*last.refused, *plain.refused))
    if isinstance(last.strategy, Depthwise) and _in_planes(last.stores[0], setting.target.lanes):
        return [*made, *before, *_turned_after(last)]
    return [*made, *before, last]


def _in_planes(store: Store, lanes: int) -> bool:
    """Whether results are stored in planes, which are worth being put there by squares of `lanes`."""
    names, channels, pixels = out_vars(len(store.extents)), store.extents[1], numel(store.extents[2:])
    if not isinstance(channels, int) or not isinstance(pixels, int) or min(channels, pixels) < lanes:
        return False
    coefs = linear_index(store.index, store.buffer.shape).coefs
    return coefs.get(names[-1], 0) == 1 and coefs.get(names[1], 0) != 1


def _turned_after(kernel: Kernel) -> list[Kernel]:
    """The kernel with results whose channels are together, and the copy of these into planes."""
    store = kernel.stores[0]
    n, c, *space = out_vars(len(store.extents))
    shape = (store.extents[0], *store.extents[2:], store.extents[1])
    kind = "prepared" if store.buffer.kind == "prepared" else "arena"
    made = Buffer(f"{store.buffer.name}.y", kind, shape, store.buffer.dtype)
    copy = replace(store, expr=Load(made, (n, *space, c), made.dtype))
    own = replace(store, buffer=made, index=(n, *space, c))
    return [replace(kernel, stores=(own, *kernel.stores[1:])), Kernel("planes", (copy,), nodes=kernel.nodes)]


def _channels_together(anchor: Conv) -> bool:
    """Whether the image lies in memory with the channels of a pixel next to each other."""
    e = anchor.x
    if not isinstance(e, Load) or e.where is not None:
        return False
    index = linear_index(e.indices, e.source.shape)
    return index.is_linear and (anchor.x_shape[1] == 1 or index.coefs.get(out_vars(2)[1], 0) == 1)


def _from_planes(kernel: Kernel) -> bool:
    """Whether the kernel itself reads an image whose channels are not together."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    if anchor.x.dtype.bits == 8:
        return int8_conv.from_planes(anchor)
    return implicit_gemm.from_planes(kernel) and not is_few(anchor.w_shape[0])


def _channels_last(kernel: Kernel, anchor: Conv) -> tuple[Expr, Kernel]:
    """A copy of the image with channels last, and the load that reads it."""
    shape, dtype = anchor.x_shape, anchor.x.dtype
    n, c, *space = out_vars(len(shape))
    kind = "prepared" if is_static(anchor.x, shape) else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.x", kind, (shape[0], *shape[2:], shape[1]), dtype)
    load = Load(buffer, (n, *space, c), dtype)
    channels = shape[1]
    if isinstance(channels, int) and channels < FEW_CHANNELS:
        store = Store(buffer, shape, (n, *space, c), anchor.x)
    else:
        own = out_vars(len(shape))
        order = dict(zip((n, *space, c), own, strict=True))
        store = Store(buffer, buffer.shape, own, substitute_vars(anchor.x, dict(order)))
    return load, Kernel("channels last", (store,), nodes=kernel.nodes)
