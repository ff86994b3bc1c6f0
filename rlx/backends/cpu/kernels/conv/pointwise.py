"""Convolutions of single pixels from planes to planes, as the matrix products that they are.

    y[n, g, o, p] = sum over c of w[g, o, c] x[n, g, c, p]        p numbers the pixels of a plane

Vectors run along the pixels: neither is the image brought into another layout, nor are the results put into planes.
Sums have the bits of those of `in_image`, which convolutions of open sizes take: each is one chain over the channels.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.operands import DEPTH
from rlx.backends.cpu.kernels.conv import pairs
from rlx.backends.cpu.kernels.conv.weights import is_few, without_denormals
from rlx.backends.cpu.schedule.matmul import PRODUCT_BLOCK
from rlx.backends.cpu.schedule.thin import MOST, are_tiles
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Shape, Size, numel, size_product
from rlx.kernels.affine import Affine, index_expr, linear_index
from rlx.kernels.expr import Expr, Load, Var, const, loads, size_expr, substitute_vars, transform, walk
from rlx.kernels.lowering import Contract, Conv, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Kernel, Store
from rlx.ops.conv import Conv as ConvOp
from rlx.records import replace

__all__ = ["as_pairs", "as_product", "is_pointwise", "may_be_product"]

LEAST = 512  # pixels of a plane: of fewer, rows of results are too short to pay
LEAST_IN_IMAGE = 512  # pixels of pairs that are read in the image
LEAST_THIN = 32  # where the image is not even packed
MOST_PARTS = 8  # of a group's outputs: each reads the group's channels again
PIXEL = Var("pixel")


def as_product(kernel: Kernel) -> Kernel | None:
    """The product that computes a convolution; None where it is none, or where channels lie together."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    space = store.extents[2:]
    if not may_be_product(kernel) or not _of_planes(kernel):
        return None
    x = _flat(anchor.x, space)
    expr = _flat(store.expr, space)
    index = _merged(linear_index(store.index, store.buffer.shape), space)
    if x is None or expr is None or index is None:
        return None
    outputs, channels, pixels = anchor.w_shape[0] // anchor.groups, anchor.w_shape[1], size_product(space)
    parts = _parts(anchor, pixels)
    rows = outputs // parts
    extents: tuple[Size, ...] = (store.extents[0], anchor.groups, parts, rows, pixels)
    image, group, piece, row, pixel = out_vars(5)
    if parts == 1:
        extents = (*extents[:2], *extents[3:])
        image, group, row, pixel = out_vars(4)
    if anchor.groups == 1:
        extents = (extents[0], *extents[2:])
        image, row, pixel = out_vars(3)

    def of_group(number: Expr, count: Size) -> Expr:
        return number if anchor.groups == 1 else group * size_expr(count) + number

    output = of_group(row if parts == 1 else piece * size_expr(rows) + row, outputs)
    taps = out_vars(len(anchor.w_shape))[2:]
    i0, i1 = out_vars(2)
    results: dict[Var, Expr] = {i0: image, i1: output, PIXEL: pixel}
    w = substitute_vars(anchor.w, {i0: output, i1: DEPTH, **dict.fromkeys(taps, const(0, DEPTH.dtype))})
    product = Contract(
        rows,
        pixels,
        channels,
        without_denormals(w) if is_fixed(w) and w.dtype.name == "f32" else w,
        substitute_vars(x, {**results, i1: of_group(DEPTH, channels)}),
    )
    made = Store(store.buffer, extents, _at(store, results), substitute_vars(expr, results))
    return replace(kernel, anchor=product, stores=(made,))


def _parts(anchor: Conv, pixels: Size) -> int:
    """Into how many products the outputs of a group are split, so that each has few rows and no image is packed."""
    outputs, channels = anchor.w_shape[0], anchor.w_shape[1]
    if anchor.groups == 1 or not isinstance(outputs, int) or not isinstance(pixels, int):
        return 1
    outputs //= anchor.groups
    if not are_tiles(MOST, channels, pixels, anchor.x.dtype.itemsize):
        return 1
    fewest = -(-outputs // MOST)
    return next((n for n in range(fewest, MOST_PARTS + 1) if outputs % n == 0), 1)


def as_pairs(kernel: Kernel, target: Target) -> Kernel | None:
    """The product, of rows that are pixels, which computes a convolution of operands rounded to bf16; else None."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    if _stays_in_image(kernel, target):
        return None
    space = store.extents[2:]
    x, expr = _flat(anchor.x, space), _flat(store.expr, space)
    index = _merged(linear_index(store.index, store.buffer.shape), space)
    whole = anchor.groups == 1 and _of_pixels(anchor) and len(kernel.stores) == 1
    if anchor.activations != "bf16" or not whole or x is None or expr is None or index is None:
        return None
    image, pixel, output = out_vars(3)
    i0, i1, *taps = out_vars(len(anchor.w_shape))
    w = substitute_vars(anchor.w, {i0: output, i1: DEPTH, **dict.fromkeys(taps, const(0, DEPTH.dtype))})
    results: dict[Var, Expr] = {i0: image, i1: output, PIXEL: pixel}
    extents = (store.extents[0], size_product(space), anchor.w_shape[0])
    rows = substitute_vars(x, {**results, i1: DEPTH})
    product = Contract(*extents[1:], anchor.w_shape[1], rows, w, activations="bf16")
    made = Store(store.buffer, extents, _at(store, results), substitute_vars(expr, results))
    return replace(kernel, anchor=product, stores=(made,))


def _stays_in_image(kernel: Kernel, target: Target) -> bool:
    """Whether pairs of channels are multiplied where they lie in the image: the bits are those of the product.

    Results of many pixels and few channels are finished in registers then, and may be made row by row for what reads
    them (`fused_depthwise`).
    """
    anchor, space = kernel.anchor, kernel.stores[0].extents[2:]
    assert isinstance(anchor, Conv)
    pixels, channels = size_product(space), anchor.w_shape[1]
    if not isinstance(pixels, int) or not isinstance(channels, int) or len(space) > 2:
        return False
    few = channels % 2 == 0 and channels // 2 <= PRODUCT_BLOCK and pairs.are_many(anchor.w_shape, anchor.groups)
    return few and pixels >= LEAST_IN_IMAGE and not target.float_tiles


def is_pointwise(op: ConvOp, w: Shape) -> bool:
    """Whether a convolution multiplies the channels of each pixel by all weights."""
    return all(size == 1 for size in w[2:]) and op.groups == 1 and not any(op.pads) and {*op.strides} <= {1}


def _of_pixels(anchor: Conv) -> bool:
    """Whether a window is one pixel, and each pixel is the window of one."""
    return all(size == 1 for size in anchor.w_shape[2:]) and {*anchor.strides} <= {1} and not any(anchor.pads)


def _at(store: Store, to: dict[Var, Expr]) -> tuple[Expr, ...]:
    """Where a result is stored: in the first row of a plane, which the number of its pixel may lead beyond."""
    *outer, last = out_vars(len(store.extents))[2:]
    places = {**to, **dict.fromkeys(outer, const(0, DEPTH.dtype)), last: to[PIXEL]}
    return tuple(substitute_vars(i, places) for i in store.index)


def may_be_product(kernel: Kernel) -> bool:
    """Whether a convolution, from planes to planes, is a product of long rows whose sums have the same bits.

    A sum is one chain over no more channels than a block of k has; those of few outputs are made otherwise.
    """
    anchor, space = kernel.anchor, kernel.stores[0].extents[2:]
    assert isinstance(anchor, Conv)
    single = _of_pixels(anchor)
    floats = anchor.x.dtype.is_float and anchor.w.dtype is anchor.x.dtype and anchor.zero is None
    if not single or not floats or len(kernel.stores) > 1 or anchor.activations:
        return False
    if not all(isinstance(size, int) for size in (*space, *anchor.w_shape)):
        return False
    pixels, channels, outputs = size_product(space), anchor.w_shape[1], anchor.w_shape[0] // anchor.groups
    if anchor.groups == 1 and is_few(outputs):
        return False
    thin = anchor.groups > 1 and outputs // _parts(anchor, pixels) <= MOST
    return pixels >= (LEAST_THIN if thin else LEAST) and channels <= PRODUCT_BLOCK


def _of_planes(kernel: Kernel) -> bool:
    """Whether the image and the results lie in planes."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    read = list(loads(anchor.x))
    if len(read) != 1:
        return False
    channel, last = out_vars(2)[1], out_vars(len(store.extents))[-1]
    indices = linear_index(read[0].indices, read[0].source.shape), linear_index(store.index, store.buffer.shape)
    planes = all(i.coefs.get(last, 0) == 1 and i.coefs.get(channel, 0) != 1 for i in indices)
    plain = store.buffer.encoding is None and read[0].source.encoding is None
    return planes and plain and store.buffer.dtype.bits >= 8


def _merged(index: Affine, space: Shape) -> Affine | None:
    """An index into planes by the number of the pixel, in the place of its row and column."""
    *outer, last = out_vars(2 + len(space))[2:]
    step, wanted = index.coefs.get(last, 0), index.coefs.get(last, 0)
    for var, size, inner in zip(reversed(outer), reversed(space[:-1]), reversed(space[1:]), strict=True):
        wanted = wanted * inner
        if size != 1 and index.coefs.get(var, 0) != wanted:
            return None
    coefs = {term: coef for term, coef in index.coefs.items() if term not in (*outer, last)}
    return Affine(index.constant, {**coefs, PIXEL: step} if step != 0 else coefs) if index.is_linear else None


def _flat(e: Expr, space: Shape) -> Expr | None:
    """An expression whose loads read by the number of the pixel; None where it says more of rows and columns."""
    failed: list[Expr] = []

    def place(x: Expr) -> Expr | None:
        if not isinstance(x, Load):
            return None
        index = _merged(linear_index(x.indices, x.source.shape), space)
        if index is None or x.where is not None or x.source.encoding is not None or x.dtype.bits < 8:
            failed.append(x)
            return None
        view = x.source.view((numel(x.source.shape),), x.source.dtype)
        return Load(view, (index_expr(index),), x.dtype)

    made = transform(e, place)
    left = set(out_vars(2 + len(space))[2:]) & set(walk(made))
    return None if failed or left else made
