"""Convolutions to few channels: dot products of weights and windows, which are read where they lie in the image.

A product by panels would leave most of its columns empty. Here some pixels at once take the dot product of their window
and the weights of each output, in vectors along the pieces of a window (see `direct`); the sums are kept plane by
plane, so that the epilogue runs in vectors along the pixels.

Filters of a signal (one channel in) are summed in float64: what they let through is often a small part of what they
sum, as in the bands of a spectrum, and a logarithm after them makes much of the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.tile import SCALARS, Tile, tile_of
from rlx.backends.cpu.kernels.conv import implicit_gemm
from rlx.backends.cpu.kernels.conv.geometry import ImplicitGemmArguments, conv_epilogue
from rlx.backends.cpu.kernels.conv.weights import FEW_OUTPUTS, PackedWeights, is_few, packed
from rlx.backends.cpu.llvm.builder import Function, Module, arguments_of, vec, void
from rlx.backends.cpu.schedule.arguments import KernelCode, Routine, routines
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Buffer, Kernel, Store

__all__ = ["emit", "is_few", "suits", "weight_type"]

PIXELS = {1: 8, 2: 4, 3: 4, 4: 2}  # at once, by outputs: enough sums under way, and few enough for the registers


def suits(kernel: Kernel) -> bool:
    """Few outputs of windows whose rows are contiguous."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    return is_few(anchor.w_shape[0]) and implicit_gemm.suits(kernel)


def weight_type(kernel: Kernel) -> DType:
    """What the weights are stored in, and products summed in."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    return DTYPES["f64"] if anchor.w_shape[1] == 1 else anchor.x.dtype


def emit(kernel: Kernel, target: Target) -> KernelCode:
    """The convolution with its epilogue; weights are [O, *window, C]."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert anchor.w.dtype is weight_type(kernel), "the weights are packed for another kernel"
    outputs = cast(int, anchor.w_shape[0])
    dtype, epilogue = anchor.x.dtype, conv_epilogue(kernel, anchor.x.dtype)
    in_place = epilogue.in_place and epilogue.row_step == outputs == 1  # sums lie as results do
    routine = _routine(dtype.name, anchor.w.dtype.name, outputs, target)
    here = implicit_gemm.begin(kernel, FEW_OUTPUTS, routine, in_place, target)
    f, w, ty = here.f, here.w, "float" if dtype.name == "f32" else "double"

    def some_pixels(at: str, q0: str, q1: str) -> None:
        rows = f.sub(q1, q0)
        c = f.gep(w.out, q0, ty) if in_place else here.sums
        f.call(w.block, [here.a, at, "%words", w.weights, c, rows, rows, outputs])
        if not epilogue.plain or not in_place:
            epilogue.planes(here.emitter, (q0, q1), outputs, c, rows)

    return here.parts(some_pixels)


@routines
def _routine(dtype: str, sums: str, outputs: int, target: Target) -> Routine:
    function = _dots(SCALARS[dtype], tile_of(DTYPES[sums], target), outputs)
    return Routine(function.name, Module([function]).text())


def _dots(ty: str, tile: Tile, outputs: int) -> Function:
    """Sums of some pixels, in the type of the tile's: `c[column * ldc + pixel]`.

    `(ptr a, ptr offsets, ptr words, ptr b, ptr c, i64 ldc, i64 pixels, i64 columns)`: `offsets` is at the first pixel,
    `b` has the weights of one output after those of the other, as `sums`; elements of `a` and `c` are `ty`.
    """
    arguments = "ptr a, ptr offsets, ptr words, ptr b, ptr c, i64 ldc, i64 pixels, i64 columns"
    name = f"rlx_dots_{ty}_{tile.scalar}x{tile.lanes}_{outputs}"
    f = Function(name, arguments_of(arguments), attrs="nounwind")
    _Dots(f, ty, tile, outputs).emit()
    f.ret()
    return f


class _Dots:
    """The code of `_dots`."""

    def __init__(self, f: Function, ty: str, tile: Tile, outputs: int) -> None:
        self.f, self.ty, self.tile, self.outputs = f, ty, tile, outputs
        self.w = ImplicitGemmArguments.loaded(f, "pieces", "run", "piece_step", "depth")
        self.together = min(PIXELS[outputs], tile.lanes) if outputs > 1 else PIXELS[1]  # pixels
        self.source = vec(ty, tile.lanes)
        self.whole = f.and_(self.w.run, -tile.lanes)
        mask_type = "i32" if ty == "float" and tile.scalar == "float" else "i64"
        self.rest = f.mask_below(f.sub(self.w.run, self.whole), tile.lanes, mask_type)
        self.some_rest = f.cmp("lt", self.whole, self.w.run)

    def emit(self) -> None:
        """Pixels in groups, or one by one where there are fewer than one has."""
        f, together = self.f, self.together
        f.if_(
            f.cmp("ge", "%pixels", together),
            lambda: void(f.loop(0, "%pixels", together, [], lambda i, _: self.group(i))),
            lambda: void(f.loop(0, "%pixels", 1, [], lambda i, _: self.single(i))),
        )

    def window_sums(self, first: str, count: int) -> list[str]:
        """The sums of `count` pixels, those of one output after those of the other."""
        f, ty, w = self.f, self.ty, self.w
        starts = [f.gep("%a", f.load("i64", f.gep("%offsets", f.add(first, i), "i64")), ty) for i in range(count)]
        total = Accumulators(f, self.tile, self.outputs, count)

        def piece(_: str, state: list[str]) -> list[str]:
            lines, b = state[:count], state[count]
            total.loop(0, self.whole, self.tile.lanes, [], lambda k, _: self.add(total, k, lines, b, f.load))

            def left() -> None:
                self.add(total, self.whole, lines, b, lambda kind, p: f.masked_load(kind, p, self.rest))

            total.either(self.some_rest, left)
            return [*(f.gep(p, w.piece_step, ty) for p in lines), f.gep(b, w.run, self.tile.scalar)]

        total.loop(0, w.pieces, 1, [*starts, "%b"], piece)
        return total.values

    def add(self, total: Accumulators, k: str, lines: list[str], b: str, load: Callable[[str, str], str]) -> list[str]:
        """Adds a vector of steps from k on; `load(type, address)` reads elements of windows and weights."""
        f, ty, sums, vector = self.f, self.ty, self.tile.scalar, self.tile.vector
        columns = [b, *(f.gep(b, f.mul(self.w.depth, j), sums) for j in range(1, self.outputs))]

        def pixel(j: int) -> str:
            x = load(self.source, f.gep(lines[j], k, ty))
            return x if self.source == vector else f.cast("fpext", x, vector)

        total.add(lambda i: load(vector, f.gep(columns[i], k, sums)), pixel)
        return []

    def group(self, i: str) -> None:
        """Some pixels, whose sums are added up across lanes together."""
        f, ty, lanes, together = self.f, self.ty, self.tile.lanes, self.together
        first = f.min(i, f.sub("%pixels", together))  # the last pixels once more, the same sums
        found = self.window_sums(first, together)
        found += [found[-1]] * (-len(found) % lanes)
        totals = [_totals(f, found[n : n + lanes]) for n in range(0, len(found), lanes)]
        if self.tile.scalar != ty:
            totals = [f.cast("fptrunc", x, self.source) for x in totals]
        for j in range(self.outputs):
            c = f.gep("%c", f.add(f.mul("%ldc", j), first), ty)
            for n in range(0, together, lanes):
                at, width = (j * together + n) % lanes, min(together, lanes)
                part = totals[(j * together + n) // lanes]
                piece = part if width == lanes else f.shuffle(part, None, list(range(at, at + width)))
                f.store(piece, f.gep(c, n, ty))

    def single(self, i: str) -> None:
        """One pixel."""
        f, ty = self.f, self.ty
        for j, x in enumerate(self.window_sums(i, 1)):
            total = f.reduce(x, f.add)
            if self.tile.scalar != ty:
                total = f.cast("fptrunc", total, ty)
            f.store(total, f.gep("%c", f.add(f.mul("%ldc", j), i), ty))


def _totals(f: Function, vectors: list[str]) -> str:
    """The sums of the lanes of as many vectors as they have lanes, each in the order of `Function.reduce`."""
    lanes, width = len(vectors), len(vectors)
    while len(vectors) > 1:
        half = width // 2
        low = [s + i for s in range(0, 2 * lanes, width) for i in range(half)]
        high = [i + half for i in low]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [f.add(f.shuffle(a, b, low), f.shuffle(a, b, high)) for a, b in pairs]
        width = half
    return vectors[0]


class FewOutputs(PackedWeights):
    """Few outputs of windows whose rows are contiguous: dot products of windows and weights, along k."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        assert isinstance(kernel.anchor, Conv)
        if not is_few(kernel.anchor.w_shape[0]):
            return f"it has more than {FEW_OUTPUTS} outputs"
        if kernel.anchor.groups > 1:
            return "it has several groups"
        return implicit_gemm.unsuited(kernel, setting.target)

    def packed(self, kernel: Kernel, target: Target) -> tuple[Buffer, Store]:
        return packed(kernel, weight_type(kernel), target)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [emit(kernel, target)]

    @property
    def measured_as(self) -> str:
        return "conv"
