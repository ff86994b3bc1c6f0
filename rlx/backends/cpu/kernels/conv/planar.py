"""Convolutions in three spatial axes, computed as ones in two: the planes of a window become more channels.

    y[n, o, d, h, w] = sum x[n, c, d s + t e - p, ..] w[o, c, t, ..]      over c, t and the window in h and w
                     = sum x'[n D + d, (t, c), ..] w'[o, (t, c), ..]      x' holds each plane once for each t

Planes beyond the image are zeros. What such a convolution reads is copied as often as its window is deep, unless one
index says which plane it is: of one image of one channel, x'[d, t, ..] = x[d s + t e - p, ..] is read where it lies.
"""

from __future__ import annotations

from typing import cast

from rlx.ir.shape import Size
from rlx.kernels.expr import I64, Expr, Load, Select, Var, const, guarded, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["in_planes", "reads_in_place"]


def reads_in_place(anchor: Conv) -> bool:
    """Whether one index of x says which plane is read, so that no plane is copied more than once."""
    return anchor.x_shape[0] == 1 and 1 in (anchor.x_shape[1], anchor.w_shape[2])


def in_planes(kernel: Kernel) -> list[Kernel]:
    """The convolution of planes that computes one in three axes, after what copies planes and orders weights."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    batch, planes, (outputs, own, taps, *window) = anchor.x_shape[0], store.extents[2], anchor.w_shape
    image, copies = _padded(kernel, anchor) if reads_in_place(anchor) else _repeated(kernel, anchor, planes)
    i0, i1, i2, i3, i4 = out_vars(5)
    o, tap, c_own, *rest = out_vars(5)
    weight = substitute_vars(anchor.w, {i0: o, i1: c_own, i2: tap, i3: rest[0], i4: rest[1]})
    static = is_static(anchor.w, anchor.w_shape)
    copies.append(_copy(kernel, "order w", "ordered", (outputs, taps, own, *window), weight, static))
    w_shape: tuple[Size, ...] = (outputs, own * taps, *window)
    anchor = replace(
        anchor,
        x=image,
        w=Load(copies[-1].stores[0].buffer.view(w_shape, weight.dtype), out_vars(4), weight.dtype),
        x_shape=(batch * planes, anchor.x_shape[1] * taps, *anchor.x_shape[3:]),
        w_shape=w_shape,
        strides=anchor.strides[1:],
        dilations=anchor.dilations[1:],
        pads=(*anchor.pads[1:3], *anchor.pads[4:]),
    )
    return [*copies, replace(kernel, anchor=anchor, stores=(_of_planes(store, batch, planes),))]


def _padded(kernel: Kernel, anchor: Conv) -> tuple[Expr, list[Kernel]]:
    """The image where it is read in place: x itself, or a copy with planes of zeros around it."""
    _, channels, depth, height, width = anchor.x_shape
    i0, i1, i2, i3, i4 = out_vars(5)
    number, channel, row, column = out_vars(4)
    before, after = anchor.pads[0], anchor.pads[3]
    plane, own = number * anchor.strides[0], cast(Expr, channel)
    if channels == 1:
        plane, own = plane + channel * anchor.dilations[0], const(0, I64)
    if before == 0 == after:
        return substitute_vars(anchor.x, {i0: const(0, I64), i1: own, i2: plane, i3: row, i4: column}), []
    c, p, y, x = out_vars(4)
    source = p - size_expr(before)
    element = substitute_vars(anchor.x, {i0: const(0, I64), i1: c, i2: source, i3: y, i4: x})
    element = _inside(element, source, depth)
    shape = (channels, depth + before + after, height, width)
    copy = _copy(kernel, "pad planes", "padded", shape, element, is_static(anchor.x, anchor.x_shape))
    return Load(copy.stores[0].buffer, (own, plane, row, column), element.dtype), [copy]


def _repeated(kernel: Kernel, anchor: Conv, planes: Size) -> tuple[Expr, list[Kernel]]:
    """The image as a copy that holds each plane once for each tap of a window in depth."""
    batch, channels, depth, height, width = anchor.x_shape
    own, taps = anchor.w_shape[1:3]
    before, after = anchor.pads[0], anchor.pads[3]
    n, d, y, x, g, t, c = out_vars(7)
    i0, i1, i2, i3, i4 = out_vars(5)
    source = d * anchor.strides[0] + t * anchor.dilations[0] - size_expr(before)
    element = substitute_vars(anchor.x, {i0: n, i1: g * size_expr(own) + c, i2: source, i3: y, i4: x})
    if not before == 0 == after:
        element = _inside(element, source, depth)
    shape = (batch, planes, height, width, anchor.groups, taps, own)
    copy = _copy(kernel, "planes", "planes", shape, element, is_static(anchor.x, anchor.x_shape))
    images = copy.stores[0].buffer.view((batch * planes, height, width, channels * taps), element.dtype)
    plane, channel, row, column = out_vars(4)
    return Load(images, (plane, row, column, channel), element.dtype), [copy]


def _inside(element: Expr, plane: Expr, depth: Size) -> Expr:
    """The element of a plane of the image, 0 beyond it."""
    inside = (plane >= 0) & (plane < size_expr(depth))
    return Select(inside, guarded(element, inside), const(0, element.dtype))


def _of_planes(store: Store, batch: Size, planes: Size) -> Store:
    """The store of results [N, O, D, H, W], as one of [N D, O, H, W]."""
    number, channel, row, column = out_vars(4)
    n, d = (const(0, I64), number) if batch == 1 else (number // size_expr(planes), number % size_expr(planes))
    to: dict[Var, Expr] = dict(zip(out_vars(5), (n, channel, d, row, column), strict=True))
    extents = (batch * planes, store.extents[1], *store.extents[3:])
    index, expr = tuple(substitute_vars(i, to) for i in store.index), substitute_vars(store.expr, to)
    return Store(store.buffer, extents, index, expr)


def _copy(kernel: Kernel, what: str, suffix: str, shape: tuple[Size, ...], element: Expr, static: bool) -> Kernel:
    """A kernel that makes a buffer of that shape, whose element at (i0, i1, ...) is given."""
    kind = "prepared" if static else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.{suffix}", kind, shape, element.dtype)
    return Kernel(what, (Store(buffer, shape, out_vars(len(shape)), element),), nodes=kernel.nodes)
