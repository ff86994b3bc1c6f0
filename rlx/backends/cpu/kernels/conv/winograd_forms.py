"""The forms of Winograd's algorithm: sizes of tile and window, their matrices, and the transform of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, name_kernel
from rlx.backends.cpu.schedule.arguments import Address, Arguments, KernelCode, Number, Pointer, Product
from rlx.backends.cpu.schedule.winograd import WinogradSchedule
from rlx.backends.cpu.strategy import Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Load
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Kernel

__all__ = ["F4X4", "FORMS", "WEIGHTS", "Form", "Matrix", "combine", "transforms", "weights_of", "window"]

WIDTH = WinogradSchedule.WIDTH
LANES = 16  # outputs whose weights are transformed together
PARTS = WIDTH // LANES  # of a panel

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Form:
    """Tiles of `m` results for windows of `r` pixels, down and across; `cycles` for a channel of a tile, one way."""

    m: tuple[int, int]
    r: tuple[int, int]
    cycles: float

    @property
    def n(self) -> tuple[int, int]:
        """Positions of a tile."""
        return self.m[0] + self.r[0] - 1, self.m[1] + self.r[1] - 1

    @property
    def positions(self) -> int:
        return self.n[0] * self.n[1]


def _lines(m: int, r: int, cycles: float) -> dict[str, Form]:
    """Windows of one column and of one row."""
    return {
        f"conv.winograd_lines+f{m}x1_{r}x1": Form((m, 1), (r, 1), cycles),
        f"conv.winograd_lines+f1x{m}_1x{r}": Form((1, m), (1, r), cycles),
    }


F4X4 = "conv.winograd_f4x4_3x3"
FORMS = {  # by the name of the strategy
    "conv.winograd_f2x2_3x3": Form((2, 2), (3, 3), 5.0),
    F4X4: Form((4, 4), (3, 3), 14.0),
    **_lines(4, 3, 2.0),
    **_lines(4, 5, 3.0),
    **_lines(2, 7, 3.0),
}


@cache
def transforms(m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    """The matrices (A, G, B) of F(m, r) by Toom and Cook: y = A [(G g) * (B d)], m + r - 1 inputs d, r weights g."""
    points = [Fraction(p) for p in (0, 1, -1, Fraction(1, 2), -2, 2, Fraction(-1, 2))[: m + r - 2]]

    def product(roots: Sequence[Fraction]) -> list[Fraction]:
        found = [Fraction(1)]
        for root in roots:
            shifted = [Fraction(0), *found]
            found = [s - root * c for s, c in zip(shifted, [*found, Fraction(0)], strict=True)]
        return found

    a = tuple(tuple([p**i for p in points] + [Fraction(i == m - 1)]) for i in range(m))
    g, b = [], []
    for j, p in enumerate(points):
        others = points[:j] + points[j + 1 :]
        scale = Fraction(1)
        for q in others:
            scale *= p - q
        lead = abs(next(c for c in product(others) if c))  # a coefficient of 1 needs no multiplication
        g.append(tuple(p**i / scale * lead for i in range(r)))
        b.append(tuple([c / lead for c in product(others)] + [Fraction(0)]))
    g.append(tuple(Fraction(i == r - 1) for i in range(r)))
    b.append(tuple(product(points)))
    return a, tuple(g), tuple(b)


def window(anchor: Conv) -> Shape:
    """Rows and columns of a window."""
    return anchor.w_shape[2:] if len(anchor.w_shape) == 4 else (1, *anchor.w_shape[2:])


def weights_of(anchor: Conv) -> tuple[Load, DType] | None:
    """Weights that lie in memory as floats, maybe shorter ones than the sums are made of; what they are rounded to."""
    w = anchor.w.value if isinstance(anchor.w, Cast) else anchor.w
    narrow, w = w.dtype, w.value if isinstance(w, Cast) else w
    known = {w.dtype.name, narrow.name} <= {"f16", "bf16", "f32"}
    if not isinstance(w, Load) or w.where is not None or not known:
        return None
    return (w, narrow) if linear_index(w.indices, w.source.shape).is_linear else None


def combine(f: Function, matrix: Matrix, values: list[str], ty: str) -> list[str]:
    """The matrix times a column of values."""
    found = []
    for line in matrix:
        terms = sorted(((c, x) for c, x in zip(line, values, strict=True) if c), key=lambda t: t[0] != 1)
        (c, x), *rest = terms
        total = x if c == 1 else f.mul(x, float(c), ty)
        for c, x in rest:
            if abs(c) == 1:
                total = f.add(total, x, ty) if c == 1 else f.sub(total, x, ty)
            else:
                total = f.fma(x, float(c), total, ty)
        found.append(total)
    return found


# ---- weights


class WeightsArguments(Arguments):
    """The arguments of the weights' transform; steps are in elements."""

    w: Address
    out: Address
    channels: Number
    outputs: Number
    position_step: Number
    o_step: Number
    panels: Number  # of a group
    c_step: Number
    row_step: Number
    column_step: Number


def _emit_weights(kernel: Kernel, target: Target) -> KernelCode:
    """The weights' transform: [position, panel, channel, output], computed in f64 and rounded once.

    A chunk is `LANES` outputs of a panel; panels of a group after those of the one before.
    Outputs beyond the last are zeros.
    """
    anchor, buffer = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Conv)
    found = weights_of(anchor)
    assert found is not None
    stored, narrow = found
    wide = f"<{LANES} x double>"
    dtype, memory = stored.dtype, convert.memory_type(stored.dtype)
    positions, panels, channels, _ = buffer.shape
    rank = len(anchor.w_shape)
    form = next(form for form in FORMS.values() if form.r == window(anchor) and form.positions == positions)
    down, across = (transforms(m, r)[1] for m, r in zip(form.m, form.r, strict=True))
    index = linear_index(stored.indices, stored.source.shape)
    o, c, *taps = (index.coefs.get(v, 0) for v in out_vars(rank))
    words = WeightsArguments.given(
        w=Pointer(stored.source, index.constant * dtype.itemsize),
        out=Pointer(buffer),
        channels=channels,
        outputs=anchor.w_shape[0] // anchor.groups,
        panels=panels // anchor.groups,
        position_step=panels * channels * WIDTH,
        o_step=o,
        c_step=c,
        row_step=taps[0] if rank == 4 else 0,
        column_step=taps[-1],
    )
    f = gemm.kernel_function(PLACEHOLDER)
    w = WeightsArguments.loaded(f)
    panel, first = f.div("%chunk", PARTS), f.mul(f.rem("%chunk", PARTS), LANES)
    group = f.div(panel, w.panels)
    output = f.add(f.mul(f.rem(panel, w.panels), WIDTH), first)  # in its group
    last = f.sub(w.outputs, 1)
    lanes = [f.add(output, i) for i in range(LANES)]
    rows = [f.mul(f.add(f.mul(group, w.outputs), f.min(lane, last)), w.o_step) for lane in lanes]
    starts = [f.gep(w.w, row, memory) for row in rows]
    out = f.gep(w.out, f.add(f.mul(f.mul(panel, w.channels), WIDTH), first), "float")
    exists = "poison"
    for i, lane in enumerate(lanes):
        exists = f.insert(exists, f.cmp("lt", lane, w.outputs), i, f"<{LANES} x i1>")

    def channel(c: str, _: list[str]) -> None:
        at = f.mul(c, w.c_step)

        def tap(i: int, j: int) -> str:
            place = f.add(at, f.add(f.mul(w.row_step, i), f.mul(w.column_step, j)))
            x = "poison"
            for lane, start in enumerate(starts):
                one = f.load(memory, f.gep(start, place, memory))
                x = f.insert(x, one, lane, f"<{LANES} x {memory}>")
            return convert.convert(f, convert.convert(f, x, dtype, narrow, LANES), narrow, DTYPES["f64"], LANES)

        half = [combine(f, across, [tap(i, j) for j in range(form.r[1])], wide) for i in range(form.r[0])]
        made = [combine(f, down, [line[j] for line in half], wide) for j in range(form.n[1])]
        for i in range(form.positions):
            value = f.cast("fptrunc", made[i % form.n[1]][i // form.n[1]], "float")
            kept = f.select(exists, value, f.splat(0.0, LANES, "float"))
            f.store(kept, f.gep(out, f.add(f.mul(w.position_step, i), f.mul(c, WIDTH)), "float"))

    f.loop(0, w.channels, 1, [], channel)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(words), Product((panels, PARTS)))


WEIGHTS = Step("conv.winograd_weights", _emit_weights)
