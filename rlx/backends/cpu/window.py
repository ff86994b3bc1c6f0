"""What the convolution kernels share: the sizes of a convolution in two spatial axes, and epilogues over its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from rlx.backends.cpu import scalar
from rlx.backends.cpu.builder import vec
from rlx.backends.cpu.nest import Emitter, Scope, linear_load, merge_loops
from rlx.ir.dtype import DType
from rlx.ir.shape import Size, size_product
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import Acc, Expr, Load, Var, size_expr, transform, walk
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Kernel

__all__ = ["Finish", "Geometry", "affine_expr", "finish_of", "geometry"]

AnySize = TypeVar("AnySize", int, Size)


@dataclass(frozen=True)
class Geometry:
    """A convolution of planes; one with a single spatial axis has height 1, and so has one of a single column.

    Strides `x_*` are in elements.
    """

    batch: Size
    channels: Size  # of the input, in one group
    outputs: Size  # of one group
    groups: int
    height: Size
    width: Size
    kernel: tuple[Size, Size]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[Size, Size]  # before the first row and column
    out_height: Size
    out_width: Size
    x: Affine
    x_n: Size
    x_c: Size
    x_h: Size
    out: Affine
    out_n: Size
    out_o: Size

    @property
    def depth(self) -> Size:
        """Products that one result element sums."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> Size:
        return self.out_height * self.out_width


def geometry(kernel: Kernel) -> Geometry:
    """The sizes of a convolution kernel."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    rank = len(anchor.x_shape)
    n, c, *space = out_vars(rank)
    flat = rank == 3
    x = linear_index(anchor.x.indices, anchor.x.source.shape)
    out = linear_index(store.index, store.buffer.shape)

    space_shape, window, out_space = anchor.x_shape[2:], anchor.w_shape[2:], store.extents[2:]
    strides, dilations, pads = anchor.strides, anchor.dilations, anchor.pads[: rank - 2]
    # one column of pixels is one row of them: vectors run along the pixels
    tall = not flat and x.coefs.get(space[0], 0) == 1 and all(s[1] == 1 for s in (space_shape, window, out_space))
    if tall and pads[1] == 0:
        space_shape, window, out_space, pads = space_shape[:1], window[:1], out_space[:1], pads[:1]
        strides, dilations = strides[:1], dilations[:1]
    height, width = _planar(space_shape, 1)
    out_height, out_width = _planar(out_space, 1)
    return Geometry(
        anchor.x_shape[0],
        anchor.w_shape[1],
        _per_group(anchor),
        anchor.groups,
        height,
        width,
        _planar(window, 1),
        _planar(strides, 1),
        _planar(dilations, 1),
        _planar(pads, 0),
        out_height,
        out_width,
        x,
        x.coefs.get(n, 0),
        x.coefs.get(c, 0),
        0 if len(space_shape) == 1 else x.coefs.get(space[0], 0),
        out,
        size_product(store.extents[1:]),
        size_product(store.extents[2:]),
    )


def _planar(values: tuple[AnySize, ...], missing: AnySize) -> tuple[AnySize, AnySize]:
    """The entries for rows and columns of what may be given for columns only."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def _per_group(anchor: Conv) -> Size:
    return anchor.w_shape[0] // anchor.groups


@dataclass(frozen=True)
class Finish:
    """The epilogue of a kernel: `expr` over Acc for output (image, channel, pixel), and where it is stored."""

    expr: Expr
    destination: Load
    image: Var
    channel: Var
    space: tuple[Var, ...]  # one variable for the pixel's number, or its row and column
    row_width: Size
    sums: DType

    @property
    def plain(self) -> bool:
        """Whether the sums are the results."""
        return isinstance(self.expr, Acc) and self.destination.dtype is self.sums

    @property
    def in_place(self) -> bool:
        """Whether a result can take the place of its sum."""
        return self.destination.dtype is self.sums

    def channel_only(self, emitter: Emitter) -> bool:
        """Whether all pixels of a channel are treated alike."""
        space = frozenset(self.space)
        return not any(isinstance(x, Load | Var) and emitter.depends(x) & space for x in walk(self.expr))

    def prepare(self, emitter: Emitter) -> None:
        """Loads the words that the epilogue needs; at the start of the kernel."""
        emitter.preload([self.expr, self.destination], [self.row_width])

    def settle(self, emitter: Emitter) -> None:
        """Makes the sums count as changing from pixel to pixel, so that none is hoisted."""
        for x in walk(self.expr):
            if isinstance(x, Acc):
                emitter.free[x] = frozenset(self.space[-1:])

    def pixels(self, emitter: Emitter, scope: Scope, start: str, stop: str, sums: str) -> None:
        """Emits the epilogue of pixels [start, stop) of one channel, whose sums lie at `sums`."""
        f = emitter.f
        ty = scalar.llvm_type(self.sums)
        if len(self.space) == 1:
            self._span(emitter, scope, start, stop, sums)
            return
        width = emitter.size(self.row_width)

        def row(state: list[str]) -> list[str]:
            (at,) = state
            first = f.rem(at, width, "i64")
            last = f.min(width, f.add(first, f.sub(stop, at, "i64"), "i64"), "i64")
            inner = scope.inner({self.space[0]: f.div(at, width, "i64")})
            self._span(emitter, inner, first, last, f.gep(sums, f.sub(at, start, "i64"), ty))
            return [f.add(at, f.sub(last, first, "i64"), "i64")]

        f.while_([("i64", start)], lambda s: f.cmp("lt", s[0], stop, "i64"), row)

    def _span(self, emitter: Emitter, scope: Scope, start: str, stop: str, sums: str) -> None:
        f, lanes, column = emitter.f, emitter.lanes, self.space[-1]
        ty = scalar.llvm_type(self.sums)
        emitter.hoist(self.expr, frozenset((column,)), scope)
        if not self.in_place:
            emitter.hoist(self.destination, frozenset((column,)), scope)

        def put(at: str, w: int) -> None:
            here = scope.inner({column: at}, w, column if w > 1 else None)
            address = f.gep(sums, f.sub(at, start, "i64"), ty)
            emitter.acc = lambda _: (f.load(vec(ty, w), address), w)
            text = scalar.to_memory(f, emitter.lanes_of(self.expr, here), self.destination.dtype, w)
            if self.in_place:
                f.store(text, address, ty=vec(ty, w))
            else:
                emitter.store(self.destination, text, here)

        whole = f.sub(stop, f.rem(f.sub(stop, start, "i64"), lanes, "i64"), "i64")
        f.loop(start, whole, lanes, [], lambda i, _: put(i, lanes))
        f.loop(whole, stop, 1, [], lambda i, _: put(i, 1))


def finish_of(kernel: Kernel, sums: DType) -> Finish:
    """The epilogue of a convolution; its pixels get one variable where every load walks through them as one."""
    store = kernel.stores[0]
    image, channel, *space = out_vars(len(store.extents))
    expr = transform(store.expr, linear_load)
    target = affine_expr(linear_index(store.index, store.buffer.shape))
    names, _, (expr,), target = merge_loops(space, list(store.extents[2:]), [expr], target)
    destination = Load(store.buffer, (target,), store.buffer.dtype)
    left = tuple(names) or (space[-1],)  # a single pixel: its variable is used by nothing
    if len(left) == 1:
        return Finish(expr, destination, image, channel, left, 1, sums)
    return Finish(expr, destination, image, channel, left, store.extents[-1], sums)


def affine_expr(a: Affine) -> Expr:
    """A linear form as an index expression."""
    total: Expr = size_expr(a.constant)
    for term, coef in a.coefs.items():
        total = total + term * size_expr(coef)
    return total
