"""Convolutions in groups of a few outputs: a vector has the results of a pixel in several groups, a *block*.

    y[o] = sum over taps and j of w[o, j] x[c(o) + j]        c(o) is the first channel of the group of o

The channels of a block are copied together, row by row, as in `implicit_gemm`. For each tap and j the lanes get the
channels of their groups by a shuffle of what is loaded once, so no lane multiplies another group's channels.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.tile import Tile, tile_of
from rlx.backends.cpu.kernels.conv import implicit_gemm
from rlx.backends.cpu.kernels.conv.geometry import Geometry, ImplicitGemmArguments, conv_epilogue, geometry
from rlx.backends.cpu.kernels.conv.weights import PackedWeights, without_denormals
from rlx.backends.cpu.llvm.builder import Function, Module, constant, void
from rlx.backends.cpu.schedule.arguments import KernelCode, Routine, routines
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType
from rlx.ir.shape import size_product
from rlx.kernels.expr import Load, Select, const, guarded, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass, replace

__all__ = ["Grouped"]

PIXELS = 8  # at once
MOST_VECTORS = 4  # that hold the channels of a block


@dataclass(frozen=True)
class Block:
    """Groups whose outputs are in one vector, with their channels and outputs."""

    groups: int
    channels: int  # of a group
    outputs: int

    @property
    def span(self) -> int:
        """Channels of all."""
        return self.groups * self.channels

    @property
    def width(self) -> int:
        """Outputs of all."""
        return self.groups * self.outputs


def _block_of(geo: Geometry, lanes: int) -> Block | str:
    """As many groups as divide all of them and whose outputs fit, or why there are none."""
    channels, outputs = geo.channels, geo.outputs
    if not isinstance(channels, int) or not isinstance(outputs, int) or outputs > lanes // 2:
        return f"it has more than {lanes // 2} outputs a group"
    most = lanes // outputs
    groups = next(n for n in range(most, 0, -1) if geo.groups % n == 0)
    if groups * channels > MOST_VECTORS * lanes:
        return f"the channels of its groups take more than {MOST_VECTORS} vectors"
    return Block(groups, channels, outputs)


class Grouped(PackedWeights):
    """Groups of a few outputs: vectors have those of several groups, whose channels are brought to them by shuffles."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        assert isinstance(kernel.anchor, Conv)
        geo = geometry(kernel)
        if geo.groups == 1:
            return "it has one group"
        found = _block_of(geo, tile_of(kernel.anchor.x.dtype, setting.target).lanes)
        return found if isinstance(found, str) else None

    def packed(self, kernel: Kernel, target: Target) -> tuple[Buffer, Store]:
        """Weights [O, C, *kernel] as [blocks, *kernel, C, lanes]."""
        anchor, geo = kernel.anchor, geometry(kernel)
        assert isinstance(anchor, Conv)
        dtype = anchor.x.dtype
        lanes = tile_of(dtype, target).lanes
        block = _block_of(geo, lanes)
        assert isinstance(block, Block)
        o, c, *taps = out_vars(len(anchor.w_shape))
        shape = (geo.groups // block.groups, *anchor.w_shape[2:], block.channels, lanes)
        own = out_vars(len(shape))
        output = own[0] * block.width + own[-1]
        element = substitute_vars(anchor.w, {**dict(zip(taps, own[1:-2], strict=True)), o: output, c: own[-2]})
        if block.width < lanes:
            inside = own[-1] < block.width
            element = Select(inside, guarded(element, inside), const(0, element.dtype))
        static = is_static(anchor.w, shape)
        buffer = Buffer(f"{kernel.stores[0].buffer.name}.w", "prepared" if static else "arena", shape, dtype)
        return buffer, Store(buffer, shape, own, without_denormals(element) if static else element)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, target)]

    @property
    def measured_as(self) -> str:
        return "conv"


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    """The convolution with its epilogue."""
    anchor, geo = kernel.anchor, geometry(kernel)
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    dtype = anchor.x.dtype
    tile = tile_of(dtype, target)
    block = _block_of(geo, tile.lanes)
    assert isinstance(block, Block)
    # rows are copied: whole vectors of channels are loaded, which may reach beyond a pixel
    sizes = replace(geo, channels=block.span, outputs=block.width, groups=geo.groups // block.groups, no_pads=False)
    in_place = conv_epilogue(kernel, dtype).in_place
    here = implicit_gemm.begin(kernel, tile.lanes, _routine(dtype, target, block), in_place, target, sizes)
    f, w = here.f, here.w
    weights = size_product(anchor.w.source.shape[1:])
    b = f.gep(w.weights, f.mul(here.group, here.emitter.table.load(f, weights), "i64"), tile.scalar)
    first = f.mul(here.group, block.width, "i64")

    def some_pixels(at: str, q0: str, q1: str) -> None:
        c, step = here.epilogue.place(f, (w.out, w.out_step), q0, first, (here.sums, str(tile.lanes)))
        f.call(w.block, [here.a, at, "%words", b, c, ("i64", step), f.sub(q1, q0)])
        here.epilogue.block(here.emitter, (q0, q1), (first, f.add(first, block.width)), c, step)

    return here.parts(some_pixels)


@routines
def _routine(dtype: DType, target: Target, block: Block) -> Routine:
    function = _sums(tile_of(dtype, target), block)
    return Routine(function.name, Module([function]).text())


def _sums(tile: Tile, block: Block) -> Function:
    """Sums of some pixels in one block.

    `(ptr a, ptr offsets, ptr words, ptr b, ptr c, i64 ldc, i64 pixels)`: `offsets` is at the first pixel,
    `b` has the weights of the block, `c` is at the first result, `ldc` elements from pixel to pixel.
    """
    ty, v, lanes = tile.scalar, tile.vector, tile.lanes
    names = [("ptr", "a"), ("ptr", "offsets"), ("ptr", "words"), ("ptr", "b"), ("ptr", "c"), ("i64", "ldc")]
    f = Function(
        f"rlx_grouped_{tile.dtype}x{lanes}_{block.groups}x{block.channels}x{block.outputs}",
        [*names, ("i64", "pixels")],
        attrs="nounwind noinline",
    )
    w = ImplicitGemmArguments.loaded(f, "pieces", "run", "piece_step")

    def window_sums(first: str, count: int) -> None:
        starts = [f.gep("%a", f.load("i64", f.gep("%offsets", f.add(first, i), "i64")), ty) for i in range(count)]

        def piece(_: str, state: list[str]) -> list[str]:
            lines = state[:count]

            def tap(at: str, state: list[str]) -> list[str]:
                b, acc = state[0], list(state[1:])
                y = [f.load(v, f.gep(b, j * lanes, ty)) for j in range(block.channels)]
                for i, line in enumerate(lines):
                    p = f.gep(line, at, ty)
                    parts = [f.load(v, f.gep(p, start, ty)) for start in range(0, block.span, lanes)]
                    for j in range(block.channels):
                        acc[i] = f.fma(_channels(f, parts, block, lanes, j), y[j], acc[i], v)
                return [f.gep(b, block.channels * lanes, ty), *acc]

            typed = [("ptr", state[count]), *((v, x) for x in state[count + 1 :])]
            inner = f.loop(0, w.run, block.span, typed, tap)
            return [*(f.gep(p, w.piece_step, ty) for p in lines), *inner]

        state = [*(("ptr", p) for p in (*starts, "%b")), *[(v, constant(0.0, v))] * count]
        acc = f.loop(0, w.pieces, 1, state, piece)[count + 1 :]
        mask = constant([int(lane < block.width) for lane in range(lanes)], f"<{lanes} x i1>")
        for i, x in enumerate(acc):
            p = f.gep("%c", f.mul("%ldc", f.add(first, i)), ty)
            if block.width == lanes:
                f.store(x, p)
            else:
                f.masked_store(x, p, mask)

    def some(i: str, _: list[str]) -> None:
        window_sums(f.min(i, f.sub("%pixels", PIXELS)), PIXELS)  # the last pixels once more, the same sums

    f.if_(
        f.cmp("ge", "%pixels", PIXELS),
        lambda: void(f.loop(0, "%pixels", PIXELS, [], some)),
        lambda: void(f.loop(0, "%pixels", 1, [], lambda i, _: window_sums(i, 1))),
    )
    f.ret()
    return f


def _channels(f: Function, parts: list[str], block: Block, lanes: int, j: int) -> str:
    """The j-th channel of each lane's group, of a block's channels in vectors."""
    places = [lane // block.outputs * block.channels + j if lane < block.width else -1 for lane in range(lanes)]
    found: list[tuple[str, int]] = []  # what two vectors have, and the first channel after them
    for at in range(0, len(parts), 2):
        base, end = at * lanes, (at + 2) * lanes
        own = [place - base if base <= place < end else -1 for place in places]
        other = parts[at + 1] if at + 1 < len(parts) else None
        if any(p >= 0 for p in own):
            found.append((f.shuffle(parts[at], other, own), end))
    (out, end), *more = found
    for x, _ in more:
        out = f.shuffle(out, x, [lane if places[lane] < end else lanes + lane for lane in range(lanes)])
    return out
