"""Convolutions as a matrix product of windows and weights, [pixels, K] times [K, O], in blocks of pixels.

Where all windows lie in the image as they are (1x1 kernels), they are read there; else a chunk gathers the windows of
its pixels into its worker's scratch first.
"""

from __future__ import annotations

from enum import IntEnum

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.kernels.conv import im2col, register_tiles
from rlx.backends.cpu.kernels.conv.geometry import Geometry, finish_of, geometry
from rlx.backends.cpu.kernels.conv.weights import FEW_OUTPUTS, PackedWeights, is_few
from rlx.backends.cpu.llvm.builder import Module, size_of
from rlx.backends.cpu.loops.nest import PLACEHOLDER, Emitter, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Argument,
    ArgumentTable,
    KernelCode,
    Pointer,
    Scratch,
    ScratchStride,
    once,
)
from rlx.backends.cpu.schedule.base import Part, part
from rlx.backends.cpu.schedule.conv import ConvSchedule, conv_by_tiles
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["Im2col", "InImage", "gathers_for_tiles", "in_image", "last_columns"]

MANY = 1 << 20  # stands for the pixels of an image, and for a size that is not known


class ConvArg(IntEnum):
    """The words of a product; strides are in elements."""

    X = 0
    A_STEP = 1  # from window to window, in the image or in scratch
    WEIGHTS = 2
    CHANNELS = 3  # of a group
    OUTPUTS = 4  # of a group
    DEPTH = 5
    GROUPS = 6
    PIXELS = 7
    PIXEL_CHUNK = 8
    PANEL_CHUNK = 9
    OUT = 10
    OUT_STEP = 11  # from pixel to pixel
    SCRATCH = 12
    SCRATCH_STRIDE = 13  # bytes
    SUMS = 14  # where a block of sums starts in scratch, in bytes
    COPY = 15  # where a copy of a block of A starts in scratch, in bytes; negative: it is read in place
    STEPS = 16  # of k in a block, at most; 0: by tiles, which use the room for a copy
    PART = 17  # pixels
    BLOCK = 18  # routines
    WINDOWS = 19
    FIRST = 20  # of the words of `windows`


def gathers_for_tiles(kernel: Kernel, target: Target) -> bool:
    """Whether windows of several pixels are gathered for tile registers: so many outputs are worth more than that.

    A question of channels only, so that images of known and of unknown size give the same bits.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    geo = geometry(kernel)
    outputs, depth = (s if isinstance(s, int) else MANY for s in (geo.outputs, geo.depth))
    return target.multiplies_by_tiles(anchor.x.dtype.name) and conv_by_tiles(MANY, outputs, depth)


def in_image(geo: Geometry) -> Size | None:
    """The step from window to window where all of them lie in the image as they are, else None."""
    if not geo.no_pads:
        return None
    even = geo.x_h == geo.width * geo.x_w and geo.x_n == geo.height * geo.x_h
    if geo.kernel == (1, 1) and geo.strides == (1, 1) and even:
        return geo.x_w
    # a window of several pixels of the only row
    lone = geo.batch == 1 and geo.height == 1 and geo.kernel[0] == 1 and geo.dilations[1] == 1
    if lone and geo.groups == 1 and geo.x_w == geo.channels:
        return geo.strides[1] * geo.x_w
    return None


def last_columns(outputs: Size, tile: gemm.Tile) -> int:
    """Columns after the last whole group of panels that get code of their own, if any: in vectors or halves of them."""
    known = outputs if isinstance(outputs, int) and tile.lanes == tile.width else 0
    last = known % (tile.panels * tile.width)
    return last if last % 8 == 0 else 0


def _emit_product(kernel: Kernel, from_window: Size | None, few: bool, target: Target) -> KernelCode:
    """`from_window`: the step from window to window where all lie in the image. `few`: sums are dot products."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    dtype = anchor.x.dtype
    wide = gemm.tile_of(dtype, target)  # of whole blocks; windows are gathered, and finished in registers, by another
    tile = wide.of_one_panel
    geo, finish = geometry(kernel), finish_of(kernel, dtype)
    in_registers = not few and register_tiles.suits(finish)
    together = tile.panels * tile.width
    last = last_columns(geo.outputs, tile) if in_registers else 0

    cut = once(
        ConvSchedule(
            geo.outputs,
            geo.depth,
            geo.pixels,
            geo.groups,
            size_of(tile.scalar),
            tile.width,
            tile.rows,
            from_window,
            finish.in_place,
            target.multiplies_by_tiles(dtype.name) and not few,
        )
    )
    words: list[Argument] = [
        Pointer(anchor.x.source, geo.x.constant * dtype.itemsize),
        part(cut, "a_step"),
        Pointer(anchor.w.source),
        geo.channels,
        geo.outputs,
        geo.depth,
        geo.groups,
        geo.pixels,
        part(cut, "pixel_chunk"),
        part(cut, "panel_chunk"),
        Pointer(store.buffer, finish.constant * store.buffer.dtype.itemsize),
        finish.pixel_step if finish.in_place and finish.pixel_step is not None else 0,
        Scratch(),
        ScratchStride(),
        part(cut, "sums"),
        part(cut, "copy"),
        part(cut, "steps"),
        part(cut, "part"),
        im2col.dots_routine(tile) if few else gemm.block_routine(wide),
        im2col.routine(tile),
        *im2col.words(geo),
    ]
    table = ArgumentTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    if not finish.plain or not finish.in_place:
        finish.prepare(emitter)
    ty, width = tile.scalar, tile.width
    pointers = (ConvArg.X, ConvArg.WEIGHTS, ConvArg.OUT, ConvArg.SCRATCH, ConvArg.BLOCK, ConvArg.WINDOWS)
    w = {i: gemm.load_word(f, i, "ptr" if i in pointers else "i64") for i in ConvArg if i != ConvArg.FIRST}
    outputs, depth, pixels = w[ConvArg.OUTPUTS], w[ConvArg.DEPTH], w[ConvArg.PIXELS]
    columns = f.mul(w[ConvArg.PANEL_CHUNK], width)
    panel_blocks = f.div(f.sub(f.add(outputs, columns), 1), columns)
    rest, panel_block = f.div("%chunk", panel_blocks), f.rem("%chunk", panel_blocks)
    block, group = f.div(rest, w[ConvArg.GROUPS]), f.rem(rest, w[ConvArg.GROUPS])
    p0 = f.mul(block, w[ConvArg.PIXEL_CHUNK])
    p1 = f.min(f.add(p0, w[ConvArg.PIXEL_CHUNK]), pixels)
    n0, n1 = gemm.share(f, panel_block, panel_blocks, outputs, width)
    own = f.offset(w[ConvArg.SCRATCH], f.mul("%worker", w[ConvArg.SCRATCH_STRIDE]))
    x = f.gep(w[ConvArg.X], f.mul(group, w[ConvArg.CHANNELS]), ty)
    first = f.add(f.mul(group, outputs), n0)  # of the output channels
    count = f.sub(n1, n0)

    def some_pixels(q0: str, _: list[str]) -> None:
        q1 = f.min(f.add(q0, w[ConvArg.PART]), p1)
        if from_window is None:
            f.call(w[ConvArg.WINDOWS], [x, own, f.gep("%words", int(ConvArg.FIRST), "i64"), q0, q1, w[ConvArg.A_STEP]])
            a = own
        else:
            a = f.gep(x, f.mul(q0, w[ConvArg.A_STEP]), ty)
        rows = f.sub(q1, q0)
        if not in_registers:
            sums_of(a, (q0, q1), "0")
            return
        # rather than with a last tile of few rows of its own, the block routine ends with two even ones
        over = f.rem(rows, tile.rows)
        uneven = f.and_(f.cmp("gt", over, 0), f.cmp("le", f.mul(over, 2), tile.rows))
        even = f.sub(rows, f.select(uneven, f.add(over, tile.rows), 0))
        ready = f.and_(f.cmp("le", depth, w[ConvArg.STEPS]), f.cmp("ge", even, tile.rows))
        whole = f.select(ready, f.mul(f.div(count, together), together), 0)
        narrow = f.select(f.and_(ready, f.cmp("eq", f.sub(count, whole), last)), last, 0) if last else "0"
        done = f.add(whole, narrow)
        middle = f.select(f.cmp("gt", done, 0), f.add(q0, even), q1)
        matrix, block, stride = register_tiles.Matrix(a, w[ConvArg.A_STEP]), (q0, middle), f.mul(depth, width)
        panels = register_tiles.Panels(panel_at(n0), stride, depth)
        register_tiles.emit_tiles(emitter, finish, tile, matrix, tile.rows, panels, block, first, whole)
        if last:
            one, panels = replace(tile, panels=-(-last // width)), replace(panels, b=panel_at(f.add(n0, whole)))
            at = f.add(first, whole)
            register_tiles.emit_tiles(emitter, finish, one, matrix, tile.rows, panels, block, at, narrow, last=last)

        def rest(e: str, _: list[str]) -> None:
            """The columns that are left, then the rows."""
            above = f.cmp("eq", e, 0)
            start, stop = f.select(above, q0, middle), f.select(above, middle, q1)
            column = f.select(above, done, 0)
            here = f.gep(a, f.mul(f.sub(start, q0), w[ConvArg.A_STEP]), ty)
            some = f.and_(f.cmp("lt", column, count), f.cmp("lt", start, stop))
            f.if_(some, lambda: sums_of(here, (start, stop), column))

        f.loop(0, 2, 1, [], rest)

    def panel_at(column: str) -> str:
        panels = f.div(f.add(outputs, width - 1), width)
        panel = f.add(f.mul(group, panels), f.div(column, width))
        return f.gep(w[ConvArg.WEIGHTS], f.mul(panel, f.mul(depth, width)), ty)

    def sums_of(a: str, pixels: tuple[str, str], done: str) -> None:
        """The results in the columns from `done`, by a block of sums in memory."""
        start, left = f.add(first, done), f.sub(count, done)
        q0, q1 = pixels
        rows = f.sub(q1, q0)
        if finish.in_place:
            step = w[ConvArg.OUT_STEP]
            c = f.gep(w[ConvArg.OUT], f.add(f.mul(q0, step), start), ty)
        else:
            step, c = columns, f.offset(own, w[ConvArg.SUMS])
        if few:
            at = f.gep(w[ConvArg.WEIGHTS], f.mul(start, depth), ty)
            f.call(w[ConvArg.BLOCK], [a, w[ConvArg.A_STEP], at, c, step, rows, depth, left])
        else:
            at = panel_at(f.add(n0, done))
            copy = f.select(f.cmp("ge", w[ConvArg.COPY], 0), f.offset(own, w[ConvArg.COPY]), "null", "ptr")
            f.call(
                w[ConvArg.BLOCK],
                [a, w[ConvArg.A_STEP], at, f.mul(depth, width), c, step, rows, left, depth, w[ConvArg.STEPS], copy],
            )
        if not finish.plain or not finish.in_place:
            finish.rows(emitter, (q0, q1), (start, f.add(start, left)), c, step)

    f.loop(p0, p1, w[ConvArg.PART], [], some_pixels)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = part(cut, "scratch")
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites), scratch)


# ---- strategies


class Im2col(PackedWeights):
    """Any windows, gathered into scratch a block of pixels at a time; of few outputs as dot products."""

    def __init__(self, name: str, *, few: bool = False) -> None:
        super().__init__(name)
        self.few = few

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        few = is_few(geometry(kernel).outputs)
        return None if few or not self.few else f"it has more than {FEW_OUTPUTS} outputs a group"

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit_product(kernel, None, self.few, target)]

    @property
    def measured_as(self) -> str:
        return "conv"


class InImage(Im2col):
    """1x1 windows, and others that lie in the image as they are: pixels times weights, or dot products."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        if in_image(geometry(kernel)) is None:
            return "its windows do not lie in the image as they are"
        return super().refuses(kernel, setting)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit_product(kernel, in_image(geometry(kernel)), self.few, target)]

    @property
    def measured_as(self) -> str:
        return "conv.in_image"
