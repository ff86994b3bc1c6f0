"""Convolutions as a matrix product of windows and weights, [pixels, K] times [K, O], in blocks of pixels.

Where all windows lie in the image as they are (1x1 kernels), they are read there; else a chunk gathers the windows of
its pixels into its worker's scratch first (`im2col`).
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import amx_bf16
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Matrix
from rlx.backends.cpu.gemm.chunk import row_parts
from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.gemm.tile import Tile, tile_of
from rlx.backends.cpu.kernels.conv import im2col, register_tiles
from rlx.backends.cpu.kernels.conv.geometry import (
    ConvArguments,
    Geometry,
    conv_epilogue,
    gathered,
    geometry,
    window_product,
)
from rlx.backends.cpu.kernels.conv.weights import FEW_OUTPUTS, PackedWeights, is_few
from rlx.backends.cpu.llvm.builder import Module, size_of
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Argument,
    ArgumentTable,
    Extents,
    KernelCode,
    Part,
    Pointer,
    Routine,
    once,
    part,
)
from rlx.backends.cpu.schedule.conv import ConvParts, ConvSchedule, conv_by_tiles
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["Im2col", "InImage", "gathers_for_tiles", "in_image", "last_columns"]

MANY = 1 << 20  # stands for the pixels of an image, and for a size that is not known


def gathers_for_tiles(kernel: Kernel, target: Target) -> bool:
    """Whether windows of several pixels are gathered for tile registers: so many outputs are worth more than that.

    A question of channels only, so that images of known and of unknown size give the same bits.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    geo = geometry(kernel)
    if anchor.activations:
        return in_tiles(geo, target)
    outputs, depth = (s if isinstance(s, int) else MANY for s in (geo.outputs, geo.depth))
    return target.multiplies_by_tiles(anchor.x.dtype.name) and conv_by_tiles(MANY, outputs, depth)


def in_tiles(geo: Geometry, target: Target) -> bool:
    """Whether tile registers multiply windows of pairs of bf16: they take whole steps of k."""
    return target.float_tiles and isinstance(geo.depth, int) and geo.depth % amx_bf16.STEPS == 0


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


def last_columns(outputs: Size, tile: Tile) -> int:
    """Columns after the last whole group of panels that get code of their own, if any: in vectors or halves of them."""
    known = outputs if isinstance(outputs, int) and tile.lanes == tile.width else 0
    last = known % (tile.panels * tile.width)
    return last if last % 8 == 0 else 0


def _emit_product(
    kernel: Kernel, from_window: Size | None, few: bool, target: Target, format: PanelFormat = AS_SUMS
) -> KernelCode:
    """`from_window`: the step from window to window where all lie in the image. `few`: sums are dot products."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    dtype = anchor.x.dtype
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, dtype)
    in_pairs = format is not AS_SUMS
    pairs_by_tiles = in_pairs and in_tiles(geo, target)
    made_for = target if pairs_by_tiles or not in_pairs else replace(target, float_tiles=False)
    wide = tile_of(dtype, made_for, format=format)  # of whole blocks; another one gathers, and finishes in registers
    tile = wide.of_one_panel
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
            epilogue.in_place,
            target.rates,
            target.multiplies_by_tiles(dtype.name) and format.by_tiles and not few,
        )
    )
    block = im2col.dots_routine(tile) if few else gemm.block_routine(wide)
    words = _arguments(anchor, geo, epilogue, cut, block, im2col.routine(tile))
    table = ArgumentTable([*words, *im2col.words(geo)])
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    epilogue.prepare(emitter)
    in_registers = not few and not pairs_by_tiles and register_tiles.suits(epilogue)
    parts = _Parts(emitter, epilogue, tile, geo.outputs, few, in_registers)
    windows = gathered(parts.w, parts.product) if from_window is None else parts.product.in_memory
    row_parts(f, (parts.product.at.r0, parts.product.at.r1), parts.w.part, windows, parts.emit)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = part(cut, "scratch")
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites), scratch)


class _Parts:
    """The code of a part of a chunk's pixels: results by tiles that finish them in registers, others by sums in memory.

    `count` outputs of the chunk, `first` is the number of the first one among those of all groups.
    """

    def __init__(
        self, emitter: Emitter, epilogue: Epilogue, tile: Tile, outputs: Size, few: bool, in_registers: bool
    ) -> None:
        f = emitter.f
        self.f, self.emitter, self.epilogue, self.tile, self.few = f, emitter, epilogue, tile, few
        self.in_registers = in_registers
        self.last = last_columns(outputs, tile) if self.in_registers else 0
        self.w = ConvArguments.loaded(f)
        self.product = window_product(f, self.w, tile)
        self.count = self.product.columns
        self.first = f.add(f.mul(self.product.at.matrix, self.w.n), self.product.at.n0)

    def emit(self, a: str, q0: str, q1: str) -> None:
        """Pixels q0 to q1, whose rows are at `a`."""
        f, tile, w, count, last = self.f, self.tile, self.w, self.count, self.last
        rows = f.sub(q1, q0)
        if not self.in_registers:
            self.by_sums(a, (q0, q1), "0")
            return
        # rather than with a last tile of few rows of its own, the block routine ends with two even ones
        over, together = f.rem(rows, tile.rows), tile.panels * tile.width
        uneven = f.and_(f.cmp("gt", over, 0), f.cmp("le", f.mul(over, 2), tile.rows))
        even = f.sub(rows, f.select(uneven, f.add(over, tile.rows), 0))
        ready = f.and_(f.cmp("le", w.k, w.steps), f.cmp("ge", even, tile.rows))
        whole = f.select(ready, f.mul(f.div(count, together), together), 0)
        narrow = f.select(f.and_(ready, f.cmp("eq", f.sub(count, whole), last)), last, 0) if last else "0"
        done = f.add(whole, narrow)
        middle = f.select(f.cmp("gt", done, 0), f.add(q0, even), q1)
        self.by_tiles(a, (q0, middle), whole, narrow)

        def rest(e: str, _: list[str]) -> None:
            """The columns that are left, then the rows."""
            above = f.cmp("eq", e, 0)
            start, stop = f.select(above, q0, middle), f.select(above, middle, q1)
            column = f.select(above, done, 0)
            here = f.gep(a, f.mul(f.sub(start, q0), w.lda), tile.scalar)
            some = f.and_(f.cmp("lt", column, count), f.cmp("lt", start, stop))
            f.if_(some, lambda: self.by_sums(here, (start, stop), column))

        f.loop(0, 2, 1, [], rest)

    def by_tiles(self, a: str, pixels: tuple[str, str], whole: str, narrow: str) -> None:
        """The results in the first `whole` columns, and in the `narrow` ones after them, in registers."""
        f, tile, w, product, last = self.f, self.tile, self.w, self.product, self.last
        emitter, epilogue, matrix = self.emitter, self.epilogue, Matrix.of(f, tile, a, w.lda, w.k)
        weights = (product.panel(), w.k)
        register_tiles.emit_tiles(emitter, epilogue, tile, matrix, tile.rows, weights, pixels, self.first, whole)
        if last:
            one, weights = replace(tile, panels=-(-last // tile.width)), (product.panel(whole), w.k)
            at = f.add(self.first, whole)
            register_tiles.emit_tiles(emitter, epilogue, one, matrix, tile.rows, weights, pixels, at, narrow, last=last)

    def by_sums(self, a: str, pixels: tuple[str, str], done: str) -> None:
        """The results in the columns from `done`, by a block of sums in memory."""
        f, w, product = self.f, self.w, self.product
        start, left = f.add(self.first, done), f.sub(self.count, done)
        q0, q1 = pixels
        rows = f.sub(q1, q0)
        c, step = product.place(self.epilogue.in_place, q0, done)
        if self.few:
            weights = f.gep(w.b, f.mul(start, w.k), self.tile.scalar)
            f.call(w.block, [a, w.lda, weights, c, step, rows, w.k, left])
        else:
            product.block(a, product.panel(done), (c, step), rows, left)
        self.epilogue.block(self.emitter, (q0, q1), (start, f.add(start, left)), c, step)


def _arguments(
    anchor: Conv,
    geo: Geometry,
    epilogue: Epilogue,
    cut: Callable[[Extents], ConvParts],
    block: Routine,
    windows: Routine,
) -> list[Argument]:
    """What `ConvArguments` are."""
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    return ConvArguments.cut_by(
        cut,
        **geo.sizes(ConvArguments),
        a=Pointer(anchor.x.source, geo.x.constant * anchor.x.dtype.itemsize),
        lda=part(cut, "a_step"),
        b=Pointer(anchor.w.source),
        c=epilogue.out,
        ldc=epilogue.out_step,
        m=geo.pixels,
        n=geo.outputs,
        k=geo.depth,
        part=part(cut, "part"),
        block=block,
        windows=windows,
    )


# ---- strategies


class Im2col(PackedWeights):
    """Any windows, gathered into scratch a block of pixels at a time; of few outputs as dot products."""

    def __init__(self, name: str, format: PanelFormat = AS_SUMS, *, few: bool = False) -> None:
        super().__init__(name)
        self.format = format
        self.few = few

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        few = is_few(geometry(kernel).outputs)
        return None if few or not self.few else f"it has more than {FEW_OUTPUTS} outputs a group"

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit_product(kernel, None, self.few, target, self.format)]

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
        return [_emit_product(kernel, in_image(geometry(kernel)), self.few, target, self.format)]

    @property
    def measured_as(self) -> str:
        return "conv.in_image"
