"""Operands that the copy engine (TMA) brings into shared memory: boxes of a tensor that lies in memory with pitches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.codegen.arguments import Extents, Pointer
from rlx.backends.cuda.text.emitter import Emitter
from rlx.backends.cuda.text.form import K
from rlx.ir.shape import Size, evaluate, exact_div
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Expr, Load, Var
from rlx.kernels.program import Buffer
from rlx.records import dataclass

__all__ = ["LINE", "Box", "MapForm", "Operand", "operand"]

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


@dataclass(frozen=True, eq=False)
class MapForm:
    """What a map is made of at any extents: `word` is the number of the word with the address; pitches in elements."""

    word: int
    dtype: str
    sizes: tuple[Size, ...]
    pitches: tuple[Size, ...]
    box: tuple[int, ...]

    def at(self, address: int, extents: Extents) -> Box:
        sizes = tuple(max(evaluate(s, extents), 1) for s in self.sizes)
        return Box(address, self.dtype, sizes, tuple(2 * evaluate(p, extents) for p in self.pitches), self.box)


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

    def copies(self, name: str, to: str, place: tuple[str, str], lines: int, batch: Sequence[Var]) -> list[str]:
        """Statements that bring a tile; `place`: where it starts along the axis of the result, and the depth."""
        along, depth = place
        more = "".join(f", (int){v.name}" for v in batch if v in self.apart)
        if not self.by_lines:
            return [f"tma({to}, &{name}, bar, {depth}, {along}{more});"]
        return [f"tma({to} + {8192 * n}, &{name}, bar, {along} + {LINE * n}, {depth}{more});" for n in range(lines // LINE)]


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
