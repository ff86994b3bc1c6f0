"""What the convolution kernels share: the sizes of a convolution in two spatial axes, and epilogues over its pixels.

Images have their channels last: those of a pixel lie next to each other, and vectors run along them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import vec
from rlx.backends.cpu.loops.analysis import RESULT
from rlx.backends.cpu.loops.nest import Emitter, Scope, linear_load, merge_loops
from rlx.ir.dtype import DType
from rlx.ir.shape import Size, size_product
from rlx.kernels.affine import Affine, affine, index_expr, linear_index
from rlx.kernels.expr import Acc, Expr, Load, Var, transform, walk
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = ["Finish", "Geometry", "finish_of", "geometry"]

AnySize = TypeVar("AnySize", int, Size)


@dataclass(frozen=True)
class Geometry:
    """A convolution of planes; one with a single spatial axis has height 1.

    Strides `x_*` are in elements; the channels of a pixel are next to each other.
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
    no_pads: bool  # neither before nor after
    out_height: Size
    out_width: Size
    x: Affine
    x_n: Size
    x_h: Size
    x_w: Size

    @property
    def depth(self) -> Size:
        """Products that one result element sums."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> Size:
        """Pixels of all results."""
        return self.batch * self.out_height * self.out_width


def geometry(kernel: Kernel) -> Geometry:
    """The sizes of a convolution kernel."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    rank = len(anchor.x_shape)
    n, _, *space = out_vars(rank)
    x = linear_index(anchor.x.indices, anchor.x.source.shape)
    height, width = _planar(anchor.x_shape[2:], 1)
    out_height, out_width = _planar(store.extents[2:], 1)
    # the stride of an axis of one element is that of a compact image
    x_w = x.coefs.get(space[-1], 0) if width != 1 else anchor.x_shape[1]
    x_h = x.coefs.get(space[0], 0) if rank == 4 and height != 1 else width * x_w
    x_n = x.coefs.get(n, 0) if anchor.x_shape[0] != 1 else height * x_h
    return Geometry(
        anchor.x_shape[0],
        anchor.w_shape[1],
        anchor.w_shape[0] // anchor.groups,
        anchor.groups,
        height,
        width,
        _planar(anchor.w_shape[2:], 1),
        _planar(anchor.strides, 1),
        _planar(anchor.dilations, 1),
        _planar(anchor.pads[: rank - 2], 0),
        all(p == 0 for p in anchor.pads),
        out_height,
        out_width,
        x,
        x_n,
        x_h,
        x_w,
    )


def _planar(values: tuple[AnySize, ...], missing: AnySize) -> tuple[AnySize, AnySize]:
    """The entries for rows and columns of what may be given for columns only."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


@dataclass(frozen=True)
class Finish:
    """The epilogue of a kernel: `expr` over Acc for output (pixel, channel), and where it is stored.

    Pixels are numbered through all images: `space` are the variables that a number is taken apart into.
    """

    expr: Expr
    destination: Load
    channel: Var
    space: tuple[Var, ...]
    extents: tuple[Size, ...]  # of `space`
    sums: DType
    constant: Size  # of the destination, in elements
    pixel_step: Size | None  # from the results of a pixel to those of the next; None if that is no constant
    channels_together: bool

    @property
    def plain(self) -> bool:
        """Whether the sums are the results."""
        return isinstance(self.expr, Acc) and self.destination.dtype is self.sums

    @property
    def in_place(self) -> bool:
        """Whether a result can take the place of its sum in the results' buffer."""
        return self.destination.dtype is self.sums and self.pixel_step is not None and self.channels_together

    def prepare(self, emitter: Emitter) -> None:
        """Loads the words that the epilogue needs; at the start of the kernel."""
        emitter.preload([self.expr, self.destination], list(self.extents))
        for x in walk(self.expr):  # sums change from channel to channel: none is hoisted
            if isinstance(x, Acc):
                emitter.free[x] = RESULT | {self.channel, *self.space}

    def at(self, emitter: Emitter, pixel: str) -> dict[Var, str]:
        """The variables of a pixel by its number."""
        found: dict[Var, str] = {}
        for var, extent in zip(self.space[:0:-1], self.extents[:0:-1], strict=True):
            size = emitter.size(extent)
            found[var] = emitter.f.rem(pixel, size, "i64")
            pixel = emitter.f.div(pixel, size, "i64")
        if self.space:
            found[self.space[0]] = pixel
        return found

    def pixel(self, emitter: Emitter, top: Scope, pixel: str) -> Scope:
        """A scope for the channels of a pixel, with what they share computed."""
        scope = top.inner(self.at(emitter, pixel))
        emitter.hoist(self.expr, frozenset((self.channel,)), scope)
        emitter.hoist(self.destination, frozenset((self.channel,)), scope)
        return scope

    def put(
        self, emitter: Emitter, pixel: Scope, channel: str, value: str, w: int, shared: Scope | None = None
    ) -> None:
        """Computes and stores the results of `w` channels of a pixel from their sums.

        `shared` has what pixels share of these channels.
        """
        here = pixel.inner({self.channel: channel}, w, self.channel if w > 1 else None)
        if shared is not None:
            here.cache.update({key: found for key, found in shared.cache.items() if isinstance(key, Expr)})
        emitter.store(self.destination, self.value(emitter, here, value, w), here)

    def value(self, emitter: Emitter, scope: Scope, value: str, w: int) -> str:
        """Computes `w` results from their sums."""
        emitter.acc = lambda _: (value, w)
        return convert.to_memory(emitter.f, emitter.lanes_of(self.expr, scope), self.destination.dtype, w)

    def rows(self, emitter: Emitter, pixels: tuple[str, str], channels: tuple[str, str], sums: str, step: str) -> None:
        """Emits the epilogue of a block of sums that lie at `sums`, `step` elements from pixel to pixel."""
        f, lanes = emitter.f, emitter.lanes if self.sums.bits == 32 else emitter.lanes // 2
        ty = convert.llvm_type(self.sums)
        top = Scope(1, None, {})
        emitter.hoist(self.expr, frozenset((self.channel, *self.space)), top)
        (p0, p1), (c0, c1) = pixels, channels

        parts, before = [], c0  # of the channels, by the lanes that they are computed in
        for w in (lanes, 8, 1) if lanes == 16 else (lanes, 1):
            end = f.sub(c1, f.rem(f.sub(c1, c0), w), "i64") if w > 1 else c1
            parts.append((before, end, w))
            before = end

        def put(scope: Scope, p: str, c: str, w: int) -> None:
            at = f.add(f.mul(f.sub(p, p0), step), f.sub(c, c0))
            self.put(emitter, scope, c, f.load(vec(ty, w), f.gep(sums, at, ty)), w)

        def one_pixel(p: str, _: list[str]) -> None:
            scope = self.pixel(emitter, top, p)
            for first, end, w in parts:
                f.loop(first, end, w, [], lambda c, _, w=w: put(scope, p, c, w))  # type: ignore[misc]

        def all_pixels(w: int) -> Callable[[str, list[str]], None]:
            def body(c: str, _: list[str]) -> None:
                scope = top.inner({self.channel: c}, w, self.channel if w > 1 else None)
                emitter.hoist(self.expr, frozenset(self.space), scope)
                f.loop(p0, p1, 1, [], lambda p, _: put(scope.inner(self.at(emitter, p)), p, c, w))

            return body

        if self.same_for_pixels(emitter):
            for first, end, w in parts:
                f.loop(first, end, w, [], all_pixels(w))
        else:
            f.loop(p0, p1, 1, [], one_pixel)

    def streams(self) -> list[Load]:
        """What is read next to the sums, element by element, such as a residual."""
        place = {self.channel, *self.space}
        plain = [x for x in walk(self.expr) if isinstance(x, Load) and x.where is None]
        found = {x: set(affine(x.indices[0]).coefs) for x in plain}
        return [x for x, at in found.items() if at <= place and self.channel in at and len(at) > 1]

    def planes(self, emitter: Emitter, pixels: tuple[str, str], channels: int, sums: str, step: str) -> None:
        """Emits the epilogue of a block of sums at `sums`, a channel after the other, `step` elements apart."""
        f, lanes = emitter.f, emitter.lanes if self.sums.bits == 32 else emitter.lanes // 2
        ty, (p0, p1) = convert.llvm_type(self.sums), pixels
        top = Scope(1, None, {})
        emitter.hoist(self.expr, frozenset((self.channel, *self.space)), top)
        along = self.space[0] if len(self.space) == 1 else None

        def put(c: int, plane: Scope, p: str, w: int) -> None:
            here = plane.inner(self.at(emitter, p), w, along if w > 1 else None)
            emitter.acc = lambda _: (f.load(vec(ty, w), f.gep(sums, f.add(f.mul(step, c), f.sub(p, p0)), ty)), w)
            text = convert.to_memory(f, emitter.lanes_of(self.expr, here), self.destination.dtype, w)
            emitter.store(self.destination, text, here)

        for c in range(channels):
            plane = top.inner({self.channel: str(c)})
            emitter.hoist(self.expr, frozenset(self.space), plane)
            whole = f.sub(p1, f.rem(f.sub(p1, p0), lanes), "i64") if along else p0
            f.loop(p0, whole, lanes, [], lambda p, _, c=c, plane=plane: put(c, plane, p, lanes))  # type: ignore[misc]
            f.loop(whole, p1, 1, [], lambda p, _, c=c, plane=plane: put(c, plane, p, 1))  # type: ignore[misc]

    def same_for_pixels(self, emitter: Emitter) -> bool:
        """Whether all that is read but the sums, such as a bias, is the same for all pixels: read once a channel."""
        if len(self.space) != 1:
            return False
        return not any(isinstance(x, Load) and emitter.depends(x) & set(self.space) for x in walk(self.expr))


def finish_of(kernel: Kernel, sums: DType) -> Finish:
    """The epilogue of a convolution; its pixels get one variable where every load walks through them as one."""
    store = kernel.stores[0]
    image, channel, *space = out_vars(len(store.extents))
    expr = transform(store.expr, linear_load)
    index = linear_index(store.index, store.buffer.shape)
    pixel_vars, sizes = [image, *space], [store.extents[0], *store.extents[2:]]
    names, extents, (expr,), target = merge_loops(pixel_vars, sizes, [expr], index_expr(index))
    destination = Load(store.buffer, (target,), store.buffer.dtype)
    together = store.extents[1] == 1 or index.coefs.get(channel, 0) == 1
    step = _pixel_step(index, pixel_vars, sizes)
    if step is None and all(s == 1 for s in sizes):
        step = store.extents[1]
    return Finish(expr, destination, channel, tuple(names), tuple(extents), sums, index.constant, step, together)


def _pixel_step(index: Affine, names: list[Var], sizes: list[Size]) -> Size | None:
    """The step from pixel to pixel of an index that walks through all of them evenly."""
    left = [(v, s) for v, s in zip(names, sizes, strict=True) if s != 1]
    if not left:
        return None
    step = index.coefs.get(left[-1][0], 0)
    for d, (v, _) in enumerate(left):
        if index.coefs.get(v, 0) != step * size_product([s for _, s in left[d + 1 :]]):
            return None
    return step
