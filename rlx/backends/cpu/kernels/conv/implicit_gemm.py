"""Convolutions of windows of several pixels as matrix products whose rows are read where they lie in the image.

A window is some pieces of `run` contiguous elements, one a row of the kernel, a constant step apart. Where each window
begins is in a table of offsets, so that a tile may hold any pixels: of several rows, or of several images.
Rows of a padded image are copied into the worker's scratch, with zeros around them; others are read in place.
Of a few planes (the colours of a picture), and of the planes of a group, the copies are made with the channels of a
pixel together; of an image in groups a chunk copies the channels of one, and of one whose windows have gaps the columns
that they see together.

A sum is a chain of fma over the pieces in blocks of at most `K_BLOCK` steps, whole lines or even parts of one; blocks
are added up in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Windows
from rlx.backends.cpu.gemm.chunk import chunk_of, row_parts
from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.gemm.tile import HALF, Tile, tile_of
from rlx.backends.cpu.kernels.conv import im2col, register_tiles
from rlx.backends.cpu.kernels.conv.geometry import (
    Geometry,
    GroupedGemmArguments,
    ImplicitGemmArguments,
    conv_epilogue,
    geometry,
)
from rlx.backends.cpu.kernels.conv.product import gathers_for_tiles
from rlx.backends.cpu.kernels.conv.register_tiles import window_tile
from rlx.backends.cpu.kernels.conv.weights import FEW_OUTPUTS, PackedWeights, is_few
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, size_of
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Argument,
    ArgumentTable,
    Extents,
    KernelCode,
    Part,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
    once,
    part,
    routines,
)
from rlx.backends.cpu.schedule.conv import DirectParts, ImplicitGemmSchedule
from rlx.backends.cpu.schedule.matmul import K_BLOCK
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Rates, Target
from rlx.ir.shape import Size, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = ["Begun", "begin", "emit", "from_planes", "suits", "turns_planes"]

ROWS = 8  # of a tile at most: each needs a register for its address
UNROLLED = 4  # vectors of the channels of a group, at most, whose copy is no loop


def suits(kernel: Kernel) -> bool:
    """Windows of several pixels, whose rows are contiguous or few planes, or become so in a copy."""
    geo, anchor = geometry(kernel), kernel.anchor
    assert isinstance(anchor, Conv)
    return geo.kernel != (1, 1) and (picks(anchor) or _rows_together(geo) or from_planes(kernel))


def picks(anchor: Conv) -> bool:
    """Whether chunks copy the channels of a group, or the columns that a window sees, next to each other."""
    return anchor.groups > 1 or (anchor.dilations[-1] != 1 and anchor.w_shape[-1] != 1)


def _rows_together(geo: Geometry) -> bool:
    return geo.x_w == geo.channels and (geo.dilations[1] == 1 or geo.kernel[1] == 1)


def unsuited(kernel: Kernel, target: Target) -> str | None:
    """Why windows are not read where they lie; None where they are."""
    geo = geometry(kernel)
    if geo.kernel == (1, 1):
        return "its windows are single pixels"
    assert isinstance(kernel.anchor, Conv)
    if geo.groups != 1 and target.multiplies_by_tiles("f32") and not kernel.anchor.activations:
        return "it has several groups"
    if not suits(kernel):
        return "the rows of its windows are not contiguous"
    if gathers_for_tiles(kernel, target):
        return "gathered windows are worth tile registers for so many outputs"
    return None


def from_planes(kernel: Kernel) -> bool:
    """Whether it is a convolution of a few planes, each of contiguous rows, by weights that are read once a chunk."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    x, channels, outputs = anchor.x, anchor.x_shape[1], anchor.w_shape[0]
    if not isinstance(x, Load) or x.where is not None or anchor.groups != 1:
        return False
    if x.dtype.name != "f32" or not isinstance(channels, int) or not isinstance(outputs, int):
        return False
    index, taps = linear_index(x.indices, x.source.shape), size_product(anchor.w_shape[2:])
    if not index.is_linear or index.coefs.get(out_vars(len(anchor.x_shape))[-1], 0) != 1 or not isinstance(taps, int):
        return False
    light = 4 * taps * channels * (outputs + 15) <= 2 * ImplicitGemmSchedule.FEW_WEIGHTS
    few = 1 < channels <= im2col.MOST_PLANES and light
    return few and taps > 1 and (anchor.dilations[-1] == 1 or anchor.w_shape[-1] == 1)


def turns_planes(kernel: Kernel, target: Target) -> bool:
    """Whether chunks of a convolution in groups copy their rows from planes, of which a group has enough."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    x, channels = anchor.x, anchor.w_shape[1]
    if not isinstance(x, Load) or x.where is not None or x.source.encoding is not None or anchor.groups == 1:
        return False
    index = linear_index(x.indices, x.source.shape)
    planes = index.is_linear and index.coefs.get(out_vars(len(anchor.x_shape))[-1], 0) == 1
    lanes = target.vector_bytes // x.dtype.itemsize
    enough = isinstance(channels, int) and lanes // 2 <= channels <= UNROLLED * lanes
    return planes and enough and x.dtype is anchor.x.dtype and (anchor.dilations[-1] == 1 or anchor.w_shape[-1] == 1)


@dataclass(frozen=True)
class Begun:
    """A kernel after its first steps: the arguments, and what the rows of results of this chunk need lies ready."""

    f: Function
    emitter: Emitter
    epilogue: Epilogue
    run: Size  # steps of a piece of a window
    w: ImplicitGemmArguments
    cut: Callable[[Extents], DirectParts]
    group: str
    columns: tuple[str, str]  # of this chunk, in its group
    pixels: tuple[str, str]
    a: str  # what the offsets count from
    offsets: str  # of the windows of this chunk's pixels
    sums: str  # room for those of a part

    def parts(self, body: Callable[[str, str, str], None]) -> KernelCode:
        """Emits `body(offsets, first pixel, last)` for one part of the pixels after the other, and ends the kernel."""
        f = self.f

        def offsets(q0: str, _: str) -> str:
            return f.gep(self.offsets, f.sub(q0, self.pixels[0]), "i64")

        row_parts(f, self.pixels, self.w.part, offsets, body)
        f.ret()
        symbol, ir = name_kernel(Module([f]).text())
        words, sites = tuple(self.emitter.table.words), tuple(self.emitter.sites)
        return KernelCode(symbol, ir, words, Part(self.cut, "chunks"), sites, part(self.cut, "ends", 2))


def planes_of(kernel: Kernel) -> int:
    """The number of planes that an image is read from, 0 where the channels of its pixels are together."""
    anchor, geo = kernel.anchor, geometry(kernel)
    assert isinstance(anchor, Conv)
    step = geo.x.coefs.get(out_vars(len(anchor.x_shape))[1], 1)
    return cast(int, geo.channels) if step != 1 else 0


def _in_turn(kernel: Kernel) -> bool:
    """Whether chunks copy their rows from the planes of a group."""
    assert isinstance(kernel.anchor, Conv)
    return picks(kernel.anchor) and planes_of(kernel) > 1


def _in_image(kernel: Kernel, geo: Geometry) -> bool:
    """Whether rows are read in place."""
    assert isinstance(kernel.anchor, Conv)
    return geo.no_pads and not picks(kernel.anchor) and not planes_of(kernel)


def cut_of(
    kernel: Kernel, width: int, rates: Rates, *, in_place: bool, sizes: Geometry | None = None
) -> ImplicitGemmSchedule:
    """How it is split where a block of sums takes `width` columns; `in_place`: that needs no room."""
    anchor, geo = kernel.anchor, sizes or geometry(kernel)
    assert isinstance(anchor, Conv)
    in_image = _in_image(kernel, geo)
    shape = (geo.batch, geo.channels, geo.outputs, geo.out_height, geo.out_width)
    windows, groups = (geo.kernel, geo.strides, geo.dilations[0]), (geo.groups, 1)
    if picks(anchor):
        groups = (geo.groups, geo.dilations[1])
    return ImplicitGemmSchedule(shape, *windows, anchor.x.dtype.itemsize, width, in_image, in_place, rates, *groups)


def words_of(
    kernel: Kernel,
    cut: Callable[[Extents], DirectParts],
    block: Argument,
    out: Argument,
    out_step: Size,
    target: Target,
    sizes: Geometry | None = None,
) -> list[Argument]:
    """What `ImplicitGemmArguments` are."""
    anchor, geo = kernel.anchor, sizes or geometry(kernel)
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    in_image = _in_image(kernel, geo)
    grouped = picks(anchor)
    arguments: type[ImplicitGemmArguments] = GroupedGemmArguments if grouped else ImplicitGemmArguments
    return arguments.given(
        **geo.sizes(arguments),
        x=Pointer(anchor.x.source, geo.x.constant * anchor.x.dtype.itemsize),
        weights=Pointer(anchor.w.source),
        out=out,
        scratch=Scratch(),
        block=block,
        lines=lines_routine(kernel, target, geo.channels),
        extent_h=(geo.kernel[0] - 1) * geo.dilations[0] + 1,
        padded=part(cut, "padded"),
        copied=part(cut, "copied"),
        pieces=geo.kernel[0],
        run=geo.kernel[1] * geo.channels,
        piece_step=geo.x_h * geo.dilations[0] if in_image else part(cut, "piece_step"),
        rows=geo.batch * geo.out_height,
        row_chunk=part(cut, "row_chunk"),
        panel_chunk=part(cut, "panel_chunk"),
        part=part(cut, "part"),
        out_step=out_step,
        scratch_stride=ScratchStride(),
        copies=part(cut, "ends", 0),
        sums=part(cut, "ends", 1),
        group=part(cut, "group"),
        steps=part(cut, "steps"),
        **({"apart": geo.dilations[1]} if grouped else {}),
        x_c=geo.x_w if grouped and not _in_turn(kernel) else geo.x.coefs.get(out_vars(len(anchor.x_shape))[1], 1),
    )


def begin(
    kernel: Kernel, width: int, block: Routine, in_place: bool, target: Target, sizes: Geometry | None = None
) -> Begun:
    """Begins a kernel whose `block` of sums takes `width` columns at once; `in_place`: it needs no room for them.

    `sizes`: those of the convolution, where it is taken as one of other groups.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    geo, epilogue = sizes or geometry(kernel), conv_epilogue(kernel, anchor.x.dtype)
    cut = once(cut_of(kernel, width, target.rates, in_place=in_place, sizes=geo))
    words = words_of(kernel, cut, block, epilogue.out, epilogue.out_step, target, geo)
    table = ArgumentTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    epilogue.prepare(emitter)
    w = ImplicitGemmArguments.loaded(f)
    groups = table.load(f, geo.groups) if geo.groups > 1 else None
    chunk = chunk_of(f, w.rows, w.row_chunk, w.outputs, w.panel_chunk, width, groups=groups)
    r0, r1 = chunk.r0, chunk.r1
    offsets = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
    copies, sums = (f.offset(offsets, i) for i in (w.copies, w.sums))
    x = w.x
    if groups is not None:
        first = f.mul(chunk.matrix, w.channels)
        x = f.gep(x, f.mul(first, w.x_c) if _in_turn(kernel) else first, convert.llvm_type(anchor.x.dtype))
    f.call(w.lines, [x, copies, offsets, "%words", r0, r1])
    a = f.select(f.cmp("ne", w.copied, 0), copies, w.x, "ptr")
    pixels = (f.mul(r0, w.out_width), f.mul(r1, w.out_width))
    run, columns = geo.kernel[1] * geo.channels, (chunk.n0, chunk.n1)
    return Begun(f, emitter, epilogue, run, w, cut, chunk.matrix, columns, pixels, a, offsets, sums)


def emit(kernel: Kernel, target: Target, format: PanelFormat = AS_SUMS) -> KernelCode:
    """The convolution with its epilogue."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    dtype = anchor.x.dtype
    tile = tile_of(dtype, target, format=format).of_one_panel
    here = begin(kernel, tile.width, _block_routine(tile), conv_epilogue(kernel, dtype).in_place, target)
    f, emitter, epilogue, w, a, (n0, n1) = here.f, here.emitter, here.epilogue, here.w, here.a, here.columns
    ty, width, depth = tile.scalar, tile.width, w.depth
    columns = f.mul(w.panel_chunk, width)
    b, c0, c1 = f.gep(w.weights, f.mul(n0, depth), ty), n0, n1
    if anchor.groups > 1:
        panels = f.mul(f.div(f.add(w.outputs, width - 1), width), width)
        b = f.gep(b, f.mul(f.mul(here.group, panels), depth), ty)
        c0, c1 = (f.add(f.mul(here.group, w.outputs), n) for n in (n0, n1))

    def some_pixels(at: str, q0: str, q1: str) -> None:
        if not register_tiles.suits(epilogue):
            sums_of(at, (q0, q1), "0")
            return
        height, together, count = min(tile.rows, ROWS), tile.panels * width, f.sub(n1, n0)
        ready = f.and_(f.cmp("le", depth, K_BLOCK), f.cmp("ge", f.sub(q1, q0), height))
        done = f.select(ready, f.mul(f.div(count, together), together), 0)
        windows = Windows(a, at, w.piece_step, w.pieces, w.run, here.run if isinstance(here.run, int) else 0)
        register_tiles.emit_tiles(emitter, epilogue, tile, windows, height, (b, depth), (q0, q1), c0, done)
        f.if_(f.cmp("lt", done, count), lambda: sums_of(at, (q0, q1), done))

    def sums_of(at: str, pixels: tuple[str, str], done: str) -> None:
        """The results in the columns from `done`, by a block of sums in memory."""
        (q0, q1), start = pixels, f.add(c0, done)
        c, step = epilogue.place(f, (w.out, w.out_step), q0, start, (here.sums, columns))
        panel = f.gep(b, f.mul(done, depth), ty)
        f.call(w.block, [a, at, "%words", panel, c, step, f.sub(q1, q0), f.sub(c1, start)])
        epilogue.block(emitter, (q0, q1), (start, c1), c, step)

    return here.parts(some_pixels)


def lines_routine(kernel: Kernel, target: Target, channels: Size) -> Routine:
    """What prepares the rows of a kernel's results, of pixels of which so many channels are copied."""
    assert isinstance(kernel.anchor, Conv)
    tile, grouped = tile_of(kernel.anchor.x.dtype, target).of_one_panel, picks(kernel.anchor)
    vectors = -(-channels // tile.lanes) if grouped and isinstance(channels, int) else 0
    return im2col.lines_routine(tile, planes_of(kernel), grouped, vectors if vectors <= UNROLLED else 0)


@routines
def _block_routine(tile: Tile) -> Routine:
    block = _block(tile)
    return Routine(block.name, Module([block]).text())


def _block(tile: Tile) -> Function:
    """Sums of some pixels.

    `(ptr a, ptr offsets, ptr words, ptr b, ptr c, i64 ldc, i64 pixels, i64 columns)`: `offsets` is at the first pixel,
    `b` at the first panel, `c` at the first result, `ldc` elements from pixel to pixel.
    """
    ty, width = tile.scalar, tile.width
    names = [("ptr", "a"), ("ptr", "offsets"), ("ptr", "words"), ("ptr", "b"), ("ptr", "c"), ("i64", "ldc")]
    f = Function(f"rlx_direct_{tile.name}", [*names, ("i64", "pixels"), ("i64", "columns")], attrs="nounwind noinline")
    w = ImplicitGemmArguments.loaded(f, "pieces", "run", "piece_step", "group", "steps", "depth")
    full, half = min(tile.rows, ROWS), tile.half_rows
    kernels: dict[tuple[int, int], Function] = {}
    stride = f.mul(w.depth, width)

    def kernel(rows: int, panels: int) -> Function:
        if (rows, panels) not in kernels:
            kernels[rows, panels] = window_tile(tile, rows, panels)
        return kernels[rows, panels]

    def steps(first: str, start: str) -> None:
        pieces = f.min(w.group, f.sub(w.pieces, first))
        run = f.min(w.steps, f.sub(w.run, start))
        done = f.add(f.mul(first, w.run), start)
        more = f.cast("zext", f.cmp("ne", done, 0), "i64")
        a = f.gep("%a", f.add(f.mul(first, w.piece_step), start), ty)
        b = f.gep("%b", f.mul(done, width), ty)

        def rows_of(count: int, height: int, column: str, n: str) -> None:
            panel = f.gep(b, f.mul(f.lshr(column, width.bit_length() - 1), stride), ty)
            next_panel = f.gep(panel, f.mul(stride, max(count, 1)), ty)
            ahead_step = f.mul(f.mul(pieces, f.and_(run, -tile.unroll)), tile.fetched // size_of(ty))

            def take_tile(state: list[str]) -> list[str]:
                row, ahead = state
                left = f.sub("%pixels", row)
                even = f.and_(f.cmp("gt", left, height), f.cmp("lt", left, 2 * height))
                take = f.select(even, f.lshr(f.add(left, 1), 1), f.min(left, height))
                c = f.gep("%c", f.add(f.mul(row, "%ldc"), column), ty)
                places = f.gep("%offsets", row, "i64")
                step = w.piece_step

                def call(rows: int) -> None:
                    operands = [a, places, step, pieces, run, panel, stride, c, "%ldc", n, more, ahead]
                    f.call(kernel(rows, count), operands)

                f.switch(take, {r: (lambda r=r: call(r)) for r in range(1, height + 1)})  # type: ignore[misc]
                return [f.add(row, take), f.gep(ahead, ahead_step, ty)]

            f.while_([("i64", 0), ("ptr", next_panel)], lambda state: f.cmp("lt", state[0], "%pixels"), take_tile)

        def sweep(count: int) -> Callable[[str, list[str]], None]:
            def body(column: str, _: list[str]) -> None:
                n = f.min(f.sub("%columns", column), count * width)
                if count == 1 and half:
                    narrow = f.cmp("le", n, width // 2)
                    f.if_(narrow, lambda: rows_of(HALF, half, column, n), lambda: rows_of(1, full, column, n))
                else:
                    rows_of(count, full, column, n)

            return body

        group = tile.panels * width
        grouped = f.mul(f.div("%columns", group), group) if tile.panels > 1 else "%columns"
        f.loop(0, grouped, group, [], sweep(tile.panels))
        if tile.panels > 1:
            f.loop(grouped, "%columns", width, [], sweep(1))

    def group_of_pieces(first: str, _: list[str]) -> None:
        f.loop(0, w.run, w.steps, [], lambda start, _: steps(first, start))

    f.loop(0, w.pieces, w.group, [], group_of_pieces)
    f.ret()
    return f


class ImplicitGemm(PackedWeights):
    """Windows of several pixels, whose rows are contiguous, or copied so for a group or a dilation: read row by row."""

    def __init__(self, name: str, format: PanelFormat = AS_SUMS) -> None:
        super().__init__(name)
        self.format = format

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        geo = geometry(kernel)
        if geo.groups > 1 and is_few(geo.outputs):
            return f"it has no more than {FEW_OUTPUTS} outputs a group"
        return unsuited(kernel, setting.target)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [emit(kernel, target, self.format)]

    @property
    def measured_as(self) -> str:
        return "conv"
