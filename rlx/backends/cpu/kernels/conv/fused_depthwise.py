"""Two convolutions as one kernel, a few rows at a time: one of few products a sum, and the depthwise one that reads it.

In an inverted residual, or where a net for pictures begins, the image between both is by far the largest tensor. Here a
chunk makes the rows that its next windows need in a ring of rows in scratch, which stays in the caches; the image is
never in memory as a whole. Rows where two strips meet are made twice. Each sum is that of the two kernels alone, in
their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Fetch, Matrix, Panels, Rows, Windows
from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.tile import Tile, tile_of
from rlx.backends.cpu.kernels.conv import depthwise, implicit_gemm
from rlx.backends.cpu.kernels.conv.depthwise import Body, Depthwise, Place, PlaneArguments, chunk_parts, plane_words
from rlx.backends.cpu.kernels.conv.geometry import Geometry, ImplicitGemmArguments, conv_epilogue, geometry
from rlx.backends.cpu.kernels.conv.implicit_gemm import ImplicitGemm
from rlx.backends.cpu.kernels.conv.product import Im2col, in_image
from rlx.backends.cpu.kernels.conv.weights import ConvStrategy, is_few
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Argument,
    ArgumentTable,
    KernelCode,
    Number,
    Part,
    Pointer,
    Scratch,
    ScratchStride,
    once,
    part,
)
from rlx.backends.cpu.schedule.fused_depthwise import FusedDepthwiseSchedule
from rlx.backends.cpu.strategy import Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import Acc, Load, loads, walk
from rlx.kernels.loops.analysis import RESULT, is_costly
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.records import dataclass

__all__ = ["join"]

MOST_DEPTH = 48  # channels of an image that is read once for each block of results' channels
LEAST_BYTES = 512 * 1024  # of an image: smaller ones stay in the caches of a core
F32, BF16 = DTYPES["f32"], DTYPES["bf16"]
WIDTH = 16  # columns of a panel


class FusedDepthwiseArguments(PlaneArguments):
    """The arguments of a kernel of both, before `ImplicitGemmArguments` if it has any; the image is the ring."""

    source: Address  # what the product reads, and its step from pixel to pixel
    source_step: Number
    panels: Address
    depth: Number
    scratch_stride: Number
    offsets: Number  # places in scratch
    copies: Number


# ---- which kernels


def join(program: Program) -> None:
    """Makes one kernel of each convolution to a large image and the depthwise one that alone reads that.

    A depthwise one that stays as it is keeps why among its refusals.
    """
    readers = Counter(b.base for k in (*program.prepare, *program.run) for b in k.reads())
    kept = {b.base for _, b in program.outputs} | {b.base for b in program.updates.values()}
    kept |= {b.base for b in program.copied.values()}
    made: dict[Buffer, Kernel | str] = {}  # by image: what makes it, or why not in a ring
    run: list[Kernel] = []
    for kernel in program.run:
        if kernel.mark is not None or kernel.extents is not None:
            made.clear()  # what a branch has made may not be there after it
        elif isinstance(kernel.anchor, Conv) and isinstance(kernel.strategy, Depthwise):
            maker = _no_window(kernel, kernel.anchor) or _maker(kernel.anchor, made, readers, kept)
            if isinstance(maker, str):
                kernel = replace(kernel, refused=(*kernel.refused, (FUSED.name, maker)))
            else:
                run.remove(maker)
                nodes = (*maker.nodes, *kernel.nodes)
                kernel = replace(kernel, name=f"{maker.name}+{kernel.name}", nodes=nodes, strategy=FUSED, before=maker)
        elif isinstance(kernel.anchor, Conv):
            made[kernel.stores[0].buffer] = _no_image(kernel, kernel.anchor) or kernel
        run.append(kernel)
    program.run = run


def _maker(
    anchor: Conv, made: Mapping[Buffer, Kernel | str], readers: Mapping[Buffer, int], kept: Collection[Buffer]
) -> Kernel | str:
    """What makes the image in the same run, or why it can't be made here."""
    source = cast(Load, anchor.x).source
    if readers[source] > 1 or source in kept:
        return "its image has other readers"
    return made.get(source, "its image is not made by a convolution")


def _no_image(kernel: Kernel, anchor: Conv) -> str | None:
    """Why a kernel makes no rows of an image for another one.

    It may make sums of few products, of windows or of pixels, with an epilogue that is the same for all pixels.
    """
    if not isinstance(kernel.strategy, Im2col | ImplicitGemm) or anchor.groups != 1 or anchor.x.dtype is not F32:
        return "what makes its image is no plain convolution of f32"
    geo, buffer, outputs = geometry(kernel), kernel.stores[0].buffer, anchor.w_shape[0]
    sizes = [*buffer.shape, *anchor.x_shape, geo.depth]
    if not all(isinstance(s, int) for s in sizes):
        return "the size of its image is known at the run only"
    if buffer.root is not None or buffer.dtype not in (F32, BF16) or len(anchor.x_shape) != 4:
        return "its image is no whole buffer of f32 or bf16 with two axes of pixels"
    if cast(int, geo.depth) > MOST_DEPTH:
        return f"an element of its image is a sum of more than {MOST_DEPTH} products"
    if is_few(outputs) or cast(int, outputs) % WIDTH:
        return "its channels are no whole panels"
    if buffer.nbytes({}) * 4 // buffer.dtype.itemsize // max(cast(int, anchor.x_shape[0]), 1) < LEAST_BYTES:
        return "its image is so small that it stays in a cache"
    if any(b.base.kind == "state" for b in kernel.reads()):
        return "what makes its image reads a state"
    if in_image(geo) is None and not _copies_rows(kernel):
        return "what makes its image gathers windows"
    epilogue = conv_epilogue(kernel, F32)
    emitter = Emitter(Function("", []), ArgumentTable(), 1)
    varies = any(isinstance(x, Load) and emitter.depends(x) & set(epilogue.rows) for x in walk(epilogue.expr))
    compact = epilogue.columns_together and epilogue.row_step == outputs and epilogue.constant == 0
    if varies or not compact or is_costly(epilogue.expr):
        return "what happens to its image is costly, or differs from pixel to pixel"
    return None


def _copies_rows(kernel: Kernel) -> bool:
    """Whether windows are those of rows that are copied: of planes, or of words of two channels."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    words = bool(anchor.activations) and not geometry(kernel).no_pads
    return implicit_gemm.suits(kernel) and (words or implicit_gemm.planes_of(kernel) > 0)


def _no_window(kernel: Kernel, anchor: Conv) -> str | None:
    """Why a depthwise convolution doesn't read a compact image, and that by its windows alone."""
    x = anchor.x
    if not isinstance(x, Load) or x.where is not None or x.source.root is not None or len(anchor.x_shape) != 4:
        return "its image is no whole buffer with two axes of pixels"
    if anchor.groups % WIDTH:
        return "its channels are no whole panels"
    if not depthwise.has_few_taps(anchor):
        return "its windows have too many taps to be written out"
    if any(y.source.base is x.source for s in kernel.stores for e in (s.expr, *s.index) for y in loads(e)):
        return "its image has other readers"
    geo = geometry(kernel)
    steps = (geo.x_n, geo.x_h, geo.x_w, geo.x.constant)
    compact = steps == (geo.height * geo.width * geo.groups, geo.width * geo.groups, geo.groups, 0)
    return None if compact else "its image is not compact"


# ---- code


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    """Both with their epilogues, which are computed in registers."""
    anchor, before = kernel.anchor, kernel.before
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert before is not None
    assert isinstance(before.anchor, Conv)
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, F32)
    first, first_epilogue = before.anchor, conv_epilogue(before, F32)
    assert isinstance(first.x, Load)
    assert isinstance(first.w, Load)
    taps = cast(tuple[int, int], geo.kernel)
    reach = (taps[0] - 1) * geo.dilations[0] + 1
    together = _rows_together(taps, geo.strides)
    ring = 1 << ((together - 1) * geo.strides[0] + reach - 1).bit_length()
    sizes = (geo.batch, geo.groups, geo.height, geo.width, geo.out_height, geo.out_width)
    windows = implicit_gemm.cut_of(before, WIDTH, target.rates, in_place=True) if _copies_rows(before) else None
    assert isinstance(before.strategy, Im2col | ImplicitGemm)
    tile = tile_of(F32, target, format=before.strategy.format)
    panels = tile.panels if tile.lanes == WIDTH else 1
    window = (taps[0] * taps[1], reach, geo.strides[0])
    cut = once(FusedDepthwiseSchedule(sizes, geometry(before).depth, *window, ring, panels, target.rates, windows))
    words = _words(anchor, geo, before, cut)
    if windows is not None:
        words += implicit_gemm.words_of(before, once(windows), 0, 0, 0, target)
    table = ArgumentTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    epilogue.prepare(emitter)
    emitter.preload([first_epilogue.expr], [])
    for x in (*walk(epilogue.expr), *walk(first_epilogue.expr)):
        if isinstance(x, Acc):  # of either, whatever the variables of their pixels are
            emitter.free[x] = RESULT | {epilogue.column, *epilogue.rows, *first_epilogue.rows}
    w = FusedDepthwiseArguments.loaded(f)
    lanes, inner = target.lanes, depthwise.inner_columns(geo)
    body = RingBody(f, emitter, epilogue, w, taps, geo.strides, geo.dilations, lanes, inner, F32, before, ring, tile)
    body.emit()
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    sites, scratch = tuple(emitter.sites), part(cut, "scratch")
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), sites, scratch)


def _rows_together(taps: tuple[int, int], strides: tuple[int, int]) -> int:
    """Rows of results that are summed together: with steps of two or more they would take a ring twice as large."""
    return 2 if taps[0] * taps[1] <= depthwise.FEW_TAPS and taps[0] > strides[0] == 1 else 1


def _words(anchor: Conv, geo: Geometry, before: Kernel, cut: Callable[..., object]) -> list[Argument]:
    assert isinstance(before.anchor, Conv)
    assert isinstance(before.anchor.x, Load)
    assert isinstance(before.anchor.w, Load)
    first, x = geometry(before), before.anchor.x
    return plane_words(
        FusedDepthwiseArguments,
        anchor,
        geo,
        cut,
        x=Scratch(),
        x_n=0,
        x_h=part(cut, "line"),
        x_w=part(cut, "block"),
        source=Pointer(x.source, first.x.constant * x.dtype.itemsize),
        source_step=in_image(first) or 0,
        panels=Pointer(before.anchor.w.source),
        depth=first.depth,
        scratch_stride=ScratchStride(),
        offsets=part(cut, "offsets"),
        copies=part(cut, "copies"),
    )


@dataclass(frozen=True)
class RingBody(Body):
    """Emits the code of one chunk, whose image is a ring of `ring` rows of the chunk's channels."""

    w: FusedDepthwiseArguments
    before: Kernel
    ring: int
    tile: Tile

    @property
    def rows(self) -> int:
        return _rows_together(self.kernel, self.strides)

    @property
    def first(self) -> Epilogue:
        """The epilogue of the image."""
        return conv_epilogue(self.before, F32)

    def emit(self) -> None:
        f, w = self.f, self.w
        image, row0, row1, c0, c1 = chunk_parts(f, w)
        top, before = Scope(1, None, {}), Scope(1, None, {})
        channel, space = self.epilogue.column, frozenset((*self.epilogue.rows, *self.first.rows))
        self.emitter.hoist(self.epilogue.expr, space | {channel}, top)
        self.emitter.hoist(self.first.expr, space | {channel}, before)
        own = f.offset(w.x, f.mul("%worker", w.scratch_stride))
        place = Place(top, f.gep(own, f.sub(0, c0), "float"), f.mul(image, w.out_height), c0, c1)
        first_row = f.mul(image, w.height)
        inner0, inner1 = self.inner_rows()

        def some_rows(state: list[str]) -> list[str]:
            oy, made = state
            inside = f.and_(f.cmp("ge", oy, inner0), f.cmp("le", f.add(oy, self.rows), f.min(inner1, row1)))
            count = f.select(inside, self.rows, 1)
            start = f.sub(f.mul(oy, w.stride_h), w.pad_h)
            reach = (self.kernel[0] - 1) * self.dilations[0] + 1
            stop = f.add(start, f.add(f.mul(f.sub(count, 1), w.stride_h), reach))
            y0, y1 = f.max(made, start), f.min(stop, w.height)

            def make(state: list[str]) -> list[str]:
                return [self.make(own, first_row, place, before, state[0], y1, (oy, row1))]

            f.while_([("i64", y0)], lambda s: f.cmp("lt", s[0], y1), make)
            f.if_(inside, lambda: self.line(place, oy, self.rows), lambda: self.line(place, oy, 0))
            return [f.add(oy, count), f.max(made, y1)]

        f.while_([("i64", row0), ("i64", 0)], lambda s: f.cmp("lt", s[0], row1), some_rows)

    def fetch_results(
        self, place: Place, results: tuple[str, str], row: str, height: int, channels: Sequence[str]
    ) -> None:
        """Fetches the places of results while pixels of the image are made: as many as these are there for.

        They are the next rows to be written, and on their way while there is enough to compute.
        """
        f, w = self.f, self.w
        first, stop = (f.mul(f.add(place.first_row, y), w.out_width) for y in results)
        last, apart = f.sub(stop, 1), self.strides[0] * self.strides[1]
        for r in range(0, height, apart):
            number = f.min(f.add(first, f.div(f.add(row, r), apart)), last)
            pixel = place.top.inner(self.epilogue.at(self.emitter, number))
            for c in channels:
                here = pixel.inner({self.epilogue.column: c}, self.lanes, self.epilogue.column)
                f.prefetch(self.emitter.address(self.epilogue.destination, here), write=True)

    def lines(self, place: Place, y0: str, x0: str) -> Callable[[str | int], str]:
        f, w = self.f, self.w
        column = f.gep(place.x, f.mul(x0, w.x_w), "float")

        def line_at(step: str | int) -> str:
            return f.gep(column, f.mul(f.and_(f.add(y0, step), self.ring - 1), w.x_h), "float")

        return line_at

    def rows_of(self, own: str, r0: str, r1: str) -> Rows:
        """What the pixels of rows r0..r1 of all images sum products of; `own` is this worker's scratch."""
        f, w = self.f, self.w
        if not _copies_rows(self.before):
            step = w.source_step
            start = f.mul(f.mul(r0, w.width), step)
            return Matrix.of(f, self.tile, f.gep(w.source, start, "float"), step, w.depth)
        words = FusedDepthwiseArguments.behind(f)
        inner = ImplicitGemmArguments.loaded(f, "lines", "x", words=words)
        offsets, copies = (f.offset(own, i) for i in (w.offsets, w.copies))
        f.call(inner.lines, [inner.x, copies, offsets, words, r0, r1])
        inner = ImplicitGemmArguments.loaded(f, "piece_step", "pieces", "run", words=words)
        known = geometry(self.before).kernel[1] * geometry(self.before).channels
        steps = known if isinstance(known, int) else 0
        return Windows(copies, offsets, inner.piece_step, inner.pieces, inner.run, steps)

    def make(
        self, own: str, first_row: str, place: Place, top: Scope, y: str, stop: str, results: tuple[str, str]
    ) -> str:
        """Makes rows of the image from `y` to `stop` or to the end of the ring; returns the first one not made.

        `results` are the row of results that comes next and the one after the chunk's last.
        """
        f, w = self.f, self.w
        end = f.min(stop, f.add(f.or_(y, self.ring - 1), 1))
        count = f.mul(f.sub(end, y), w.width)
        source = self.rows_of(own, f.add(first_row, y), f.add(first_row, end))
        out = f.gep(place.x, f.mul(f.and_(y, self.ring - 1), w.x_h), "float")
        first, depth = self.first, w.depth
        stride = f.mul(depth, WIDTH)

        def height_of(most: int) -> int:
            return min(most, implicit_gemm.ROWS) if isinstance(source, Windows) else most

        def panels_from(tile: Tile) -> Callable[[str, list[str]], None]:
            """All pixels in the channels of one tile's panels."""

            def body(c: str, _: list[str]) -> None:
                panels = Panels.of(f, tile, f.gep(w.panels, f.mul(c, depth), "float"), stride)
                shared: list[tuple[str, Scope]] = []
                for j in range(tile.panels * WIDTH // tile.lanes):
                    at = f.add(c, j * tile.lanes)
                    scope = top.inner({first.column: at}, tile.lanes, first.column)
                    self.emitter.hoist(first.expr, frozenset(first.rows), scope)
                    shared.append((at, scope))

                def some_pixels(height: int, row: str) -> None:
                    if tile.lanes == WIDTH and self.epilogue.columns_together:
                        self.fetch_results(place, results, row, height, [at for at, _ in shared])
                    ahead = source.at(f, tile, f.min(f.add(row, height), f.sub(count, 1)))
                    sums = source.sums(f, tile, row, height, panels, Fetch(ahead, near)).values
                    for r in range(height):
                        pixel = f.gep(out, f.mul(f.add(row, r), w.x_w), "float")
                        for j, (at, scope) in enumerate(shared):
                            text = first.value(self.emitter, scope.inner({}), sums[r * len(shared) + j], tile.lanes)
                            text = convert.convert(f, text, first.destination.dtype, F32, tile.lanes)
                            f.store(text, f.gep(pixel, at, "float"))

                enough = f.cmp("ge", count, tile.rows)
                tiled = f.select(enough, count, 0)
                # the last one overlaps the one before it
                f.loop(0, tiled, tile.rows, [], lambda i, _: some_pixels(tile.rows, f.min(i, f.sub(count, tile.rows))))
                f.loop(tiled, count, 1, [], lambda i, _: some_pixels(1, i))

            return body

        wide = self.tile
        near = 3 if wide.lanes == WIDTH else 2
        single = replace(wide, rows=height_of(wide.single_rows), panels=1)
        paired = place.c0
        if wide.lanes == WIDTH:  # a panel is one vector: two of them share what is read of the pixels
            paired = f.sub(place.c1, f.and_(f.sub(place.c1, place.c0), WIDTH))
            double = replace(wide, rows=height_of(wide.rows))
            f.loop(place.c0, paired, 2 * WIDTH, [], panels_from(double))
        f.loop(paired, place.c1, WIDTH, [], panels_from(single))
        return end


class FusedDepthwise(ConvStrategy, Step):
    """A depthwise convolution that makes the image it alone reads, row by row; `join` makes one kernel of both."""

    scalars = True


FUSED = FusedDepthwise("conv.fused_depthwise", _emit, packs=False)
