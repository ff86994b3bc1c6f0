"""Operands that the copy engine (TMA) brings into shared memory: boxes of a tensor that lies in memory with pitches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.codegen.arguments import Extents, Pointer
from rlx.backends.cuda.text.emitter import Emitter
from rlx.backends.cuda.text.form import K, Window
from rlx.ir.shape import Size, evaluate, exact_div
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Expr, Load, Var
from rlx.kernels.program import Buffer
from rlx.records import dataclass, field

__all__ = ["LINE", "Box", "MapForm", "Operand", "Walk", "WindowOperand", "operand"]

LINE = 64  # elements of 16 bits that a line of shared memory has: 128 bytes
UNIT = 8  # elements: addresses and pitches are multiples of 16 bytes


@dataclass(frozen=True)
class Box:
    """A map at some extents: elements of 16 bits, sizes and boxes from the innermost axis on, pitches in bytes of all
    but that."""

    address: int
    dtype: str
    sizes: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    walk: Walk | None = None


@dataclass(frozen=True)
class Walk:
    """Windows of an image whose axes are C, W, H, N: where the first begins and the last ends, from the corners of the
    image on, and how far they are apart; a box is so many channels of so many windows. All along W, then H."""

    low: tuple[int, int]
    high: tuple[int, int]
    strides: tuple[int, int]


@dataclass(frozen=True, eq=False)
class MapForm:
    """What a map is made of at any extents: `word` is the number of the word with the address; pitches in elements."""

    word: int
    dtype: str
    sizes: tuple[Size, ...]
    pitches: tuple[Size, ...]
    box: tuple[int, ...]
    walk: Walk | None = None

    def at(self, address: int, extents: Extents) -> Box:
        sizes = tuple(max(evaluate(s, extents), 1) for s in self.sizes)
        return Box(
            address, self.dtype, sizes, tuple(2 * evaluate(p, extents) for p in self.pitches), self.box, self.walk
        )


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand that lies in memory as it is multiplied.

    `by_lines`: neighbours along the axis of the result are neighbours in memory, else neighbours of the depth are;
    `pitch`: elements from one line to the next; `apart`: those between entries of a batch axis, where it has such.
    """

    buffer: Buffer
    dtype: str
    by_lines: bool
    pitch: Size
    start: Size
    apart: Mapping[Var, Size]

    def form(self, emitter: Emitter, size: Size, depth: Size, lines: int, batch: Sequence[tuple[Var, Size]]) -> MapForm:
        """The map; `lines` of the axis of the result, whose size is `size`, are in a tile."""
        word = emitter.table.slot(Pointer(self.buffer, 2 * self.start))
        own = [(v, n) for v, n in batch if v in self.apart]
        inner, outer = (size, depth) if self.by_lines else (depth, size)
        box = (LINE, LINE if self.by_lines else lines, *(1 for _ in own))
        pitches = (self.pitch, *(self.apart[v] for v, _ in own))
        return MapForm(word, self.dtype, (inner, outer, *(n for _, n in own)), pitches, box)

    def prepared(self) -> list[str]:
        """Statements that are needed once a tile."""
        return []

    def copies(self, name: str, to: str, along: str, step: str, lines: int, batch: Sequence[Var]) -> list[str]:
        """Statements that bring a tile of a step of the depth, from `along` on the axis of the result."""
        depth = f"({step}) * {LINE}"
        more = "".join(f", (int){v.name}" for v in batch if v in self.apart)
        if not self.by_lines:
            return [f"tma({to}, &{name}, bar, {depth}, {along}{more});"]
        return [
            f"tma({to} + {8192 * n}, &{name}, bar, {along} + {LINE * n}, {depth}{more});" for n in range(lines // LINE)
        ]


@dataclass(frozen=True, eq=False)
class WindowOperand:
    """Windows of an image, which the copy engine walks: a step of the depth is some channels of one tap."""

    window: Window
    by_lines = False
    apart: Mapping[Var, Size] = field(default_factory=dict)

    @property
    def buffer(self) -> Buffer:
        return self.window.image

    @property
    def dtype(self) -> str:
        return self.window.dtype

    def form(self, emitter: Emitter, size: Size, depth: Size, lines: int, batch: Sequence[tuple[Var, Size]]) -> MapForm:
        w = self.window
        n, height, width, channels = w.shape
        top, left, bottom, right = w.pads
        reach = [(t - 1) * d for t, d in zip(w.taps, w.dilations, strict=True)]
        walk = Walk((-left, -top), (right - reach[1], bottom - reach[0]), (w.strides[1], w.strides[0]))
        word = emitter.table.slot(Pointer(w.image))
        pitches = (channels, width * channels, height * width * channels)
        return MapForm(word, w.dtype, (channels, width, height, n), pitches, (LINE, lines), walk)

    def prepared(self) -> list[str]:
        (high, wide), w = self.window.out, self.window
        return [
            f"const int image0 = m0 / {high * wide}, y0 = m0 / {wide} % {high} * {w.strides[0]} - {w.pads[0]};",
            f"const int x0 = m0 % {wide} * {w.strides[1]} - {w.pads[1]};",
        ]

    def copies(self, name: str, to: str, along: str, step: str, lines: int, batch: Sequence[Var]) -> list[str]:
        w = self.window
        parts, across = w.shape[3] // LINE, w.taps[1]
        right = f"({step}) / {parts} % {across} * {w.dilations[1]}"
        down = f"({step}) / {parts * across} * {w.dilations[0]}"
        return [f"tma_windows({to}, &{name}, bar, ({step}) % {parts} * {LINE}, x0, y0, image0, {right}, {down});"]


def operand(e: Expr, along: Var, batch: Sequence[Var]) -> Operand | None:
    """An operand as the copy engine can bring it, None for one that has to be computed or lies otherwise."""
    inner = e.value if isinstance(e, Cast) and e.value.dtype is e.dtype else e
    if not isinstance(inner, Load) or inner.where is not None or inner.dtype.name not in ("f16", "bf16"):
        return None
    buffer = inner.source
    assert isinstance(buffer, Buffer)
    form = linear_index(inner.indices, buffer.shape)
    if any(term not in (along, K, *batch) for term in form.coefs):
        return None
    coefs = {term: coef for term, coef in form.coefs.items() if isinstance(term, Var)}
    step, line = coefs.pop(K, None), coefs.pop(along, None)
    by_lines = line == 1 and step != 1
    pitch = step if by_lines else line
    if pitch is None or (step if not by_lines else line) != 1:
        return None
    distances = [pitch, form.constant, *coefs.values()]
    if any(exact_div(d, UNIT) is None for d in distances) or exact_div(buffer.offset, 2 * UNIT) is None:
        return None
    return Operand(buffer, inner.dtype.name, by_lines, pitch, form.constant, coefs)
