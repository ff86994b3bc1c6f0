"""Convolutions in three spatial axes, computed as ones in two: the planes of a window become more channels.

    y[n, o, d, h, w] = sum x[n, c, d s + t e - p, ..] w[o, c, t, ..]      over c, t and the window in h and w
                     = sum x'[n D + d, (t, c), ..] w'[o, (t, c), ..]      x' holds each plane once for each t

Planes beyond the image are zeros. What such a convolution reads is copied as often as its window is deep.
"""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.kernels.expr import I64, Expr, Load, Select, Var, const, guarded, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["in_planes"]


def in_planes(kernel: Kernel) -> list[Kernel]:
    """The convolution of planes that computes one in three axes, after what copies planes and orders weights."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    batch, channels, depth, height, width = anchor.x_shape
    outputs, own, taps, *window = anchor.w_shape
    planes, name = store.extents[2], store.buffer.name
    stride, dilation, pad = anchor.strides[0], anchor.dilations[0], anchor.pads[0]

    n, d, y, x, g, t, c = at = out_vars(7)
    i0, i1, i2, i3, i4 = out_vars(5)
    source = d * stride + t * dilation - size_expr(pad)
    inside = (source >= 0) & (source < size_expr(depth))
    pixel = substitute_vars(anchor.x, {i0: n, i1: g * size_expr(own) + c, i2: source, i3: y, i4: x})
    pixel = Select(inside, guarded(pixel, inside), const(0, pixel.dtype))
    shape = (batch, planes, height, width, anchor.groups, taps, own)
    images = _copy(f"{name}.planes", shape, pixel, is_static(anchor.x, anchor.x_shape))

    o, tap, c_own, *rest = order = out_vars(5)
    weight = substitute_vars(anchor.w, {i0: o, i1: c_own, i2: tap, i3: rest[0], i4: rest[1]})
    weights = _copy(f"{name}.ordered", (outputs, taps, own, *window), weight, is_static(anchor.w, anchor.w_shape))

    x_shape: tuple[Size, ...] = (batch * planes, channels * taps, height, width)
    w_shape: tuple[Size, ...] = (outputs, own * taps, *window)
    plane, channel, row, column = out_vars(4)
    anchor = replace(
        anchor,
        x=Load(
            images.view((x_shape[0], height, width, x_shape[1]), pixel.dtype),
            (plane, row, column, channel),
            pixel.dtype,
        ),
        w=Load(weights.view(w_shape, weight.dtype), out_vars(4), weight.dtype),
        x_shape=x_shape,
        w_shape=w_shape,
        strides=anchor.strides[1:],
        dilations=anchor.dilations[1:],
        pads=(*anchor.pads[1:3], *anchor.pads[4:]),
    )
    copies = [
        Kernel(what, (Store(b, b.shape, variables, element),), nodes=kernel.nodes)
        for what, b, variables, element in (("planes", images, at, pixel), ("order w", weights, order, weight))
    ]
    return [*copies, replace(kernel, anchor=anchor, stores=(_of_planes(store, batch, planes),))]


def _of_planes(store: Store, batch: Size, planes: Size) -> Store:
    """The store of results [N, O, D, H, W], as one of [N D, O, H, W]."""
    number, channel, row, column = out_vars(4)
    n, d = (const(0, I64), number) if batch == 1 else (number // size_expr(planes), number % size_expr(planes))
    to: dict[Var, Expr] = dict(zip(out_vars(5), (n, channel, d, row, column), strict=True))
    extents = (batch * planes, store.extents[1], *store.extents[3:])
    index, expr = tuple(substitute_vars(i, to) for i in store.index), substitute_vars(store.expr, to)
    return Store(store.buffer, extents, index, expr)


def _copy(name: str, shape: tuple[Size, ...], element: Expr, static: bool) -> Buffer:
    return Buffer(name, "prepared" if static else "arena", shape, element.dtype)
