"""The register tile of matrix products: its shape for a machine.

A tile is rows x panels of sums (`gemm.accumulators`), which a loop over k adds to; `gemm.kernel` makes blocks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.llvm.builder import Function, size_of, vec
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType as Element
from rlx.records import cached_property, dataclass, replace

__all__ = ["HALF", "OPERANDS", "SCALARS", "Tile", "tile_of", "transpose"]

DType = Literal["f32", "f64", "i32"]
SCALARS = {"f32": "float", "f64": "double", "i32": "i32"}
OPERANDS = [("ptr", "a"), ("i64", "lda"), ("ptr", "b"), ("i64", "stride"), ("ptr", "c"), ("i64", "ldc")]
HALF = 0  # stands for half a panel, in counts of panels


@dataclass(frozen=True)
class Tile:
    """The register tile: `rows` x `panels` panels of accumulators, of `lanes` elements a register of the target."""

    dtype: DType
    target: Target
    registers: int
    rows: int
    panels: int
    format: PanelFormat = AS_SUMS  # of the panels of B

    @cached_property
    def lanes(self) -> int:
        return self.target.vector_bytes // size_of(self.scalar)

    @property
    def name(self) -> str:
        """What tells it from other tiles in the names of functions."""
        return f"{self.dtype}{self.format.name and '_' + self.format.name}x{self.lanes}"

    @property
    def b_scalar(self) -> str:
        """The type of an element of B in memory."""
        return self.format.scalar(self.scalar)

    @property
    def a_scalar(self) -> str:
        """The type of an element of A in memory."""
        return self.format.left(self.scalar)

    @property
    def c_scalar(self) -> str:
        """The type of an element of C in memory."""
        return self.format.result(self.scalar)

    @property
    def column_bytes(self) -> int:
        """Bytes from column to column of a panel."""
        return self.format.column_bytes(self.scalar)

    @cached_property
    def scalar(self) -> str:
        return SCALARS[self.dtype]

    @cached_property
    def vector(self) -> str:
        return vec(self.scalar, self.lanes)

    @cached_property
    def width(self) -> int:
        """Columns of a panel."""
        return 64 // size_of(self.scalar)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of a panel, on average."""
        return self.format.step_bytes(self.scalar)

    @property
    def unroll(self) -> int:
        """Steps of k a turn of the loop. LLVM regroups sums of integers of several steps until they spill."""
        return self.format.turn or (1 if self.dtype == "i32" else 4)

    def ordered(self, f: Function, x: str) -> str:
        """A sum in an unrolled loop, computed before what is below is read: LLVM would spill 512-bit tiles else."""
        return f.keep_order(x) if self.lanes * size_of(self.scalar) == 64 else x

    def unroll_of(self, rows: int, vectors: int) -> int:
        """Steps of k a turn of the loop of a tile: twice as many where all registers are in use."""
        return (
            2 * self.unroll
            if not self.format.turn and self.unroll > 1 and rows * vectors >= 12 and self.registers == 16
            else self.unroll
        )

    def chains(self, rows: int, vectors: int) -> int:
        """Chains of each sum of a tile: two of integers, which may be added up in any order, where they are few."""
        steps = self.unroll // self.format.depth
        return 2 if self.dtype == "i32" and steps > 1 and rows * vectors <= 4 else 1

    @property
    def fetched(self) -> int:
        """Bytes of the panels to come that a tile prefetches each step of k."""
        return self.step_bytes if self.lanes * size_of(self.scalar) == 64 else self.step_bytes // 4

    @property
    def fetches(self) -> int:
        """Tiles that prefetch a panel."""
        return self.step_bytes // self.fetched

    @property
    def single_rows(self) -> int:
        """Rows of a tile of one panel."""
        return min((self.registers - 1) // (self.width // self.lanes) - 1, 12)

    @property
    def triple_rows(self) -> int:
        """Rows of a tile of three panels of one vector each; 0 where none is used. Integers need registers besides."""
        needed = 4 if self.dtype == "i32" else 1
        wide = self.panels == 2 and self.lanes == self.width and not self.format.few_shapes
        return (self.registers - needed) // 3 - 1 if wide else 0

    @property
    def of_one_panel(self) -> Tile:
        """For AVX2 the tile of one panel, for kernels that hold its B vectors; for others, the same."""
        one = self.lanes * size_of(self.scalar) == 32
        return replace(self, rows=self.single_rows, panels=1) if one else self

    @property
    def half_rows(self) -> int:
        """Rows of a tile of half a panel; 0 where a panel is a single vector."""
        vectors = self.width // self.lanes // 2 if not self.format.few_shapes else 0
        return min((self.registers - 1) // vectors - 1, 12) if vectors else 0

    def heights(self, panels: int) -> Sequence[int]:
        """The rows that tiles of so many panels (or of `HALF` a one) may have, 1 first."""
        most = {HALF: self.half_rows, self.panels: self.rows, 1: self.single_rows}.get(panels, self.triple_rows)
        if self.format.few_shapes and panels != self.panels:
            return [rows for rows in (1, 2, 4, 8) if rows <= most]
        return range(1, most + 1)

    def panels_for(self, rows: int) -> int:
        """Panels that a tile of few rows takes at once, so that enough fma chains are under way."""
        if self.format.few_shapes:
            return 1
        vectors = self.width // self.lanes
        # a single row needs no register for B: it is an operand in memory
        panels, held = (4, 1) if rows == 1 else (2, 2 * vectors + 1)
        if panels >= self.panels and rows * panels * vectors + held <= self.registers and rows <= 2:
            return panels
        return self.panels


def tile_of(dtype: Element, target: Target, registers: int = 0, *, format: PanelFormat | None = None) -> Tile:
    """Chooses the tile for sums in a type, by the width of vectors and a register count (0: 32 for AVX-512, else 16).

    Accumulators, the operands that a step holds (the vectors of B or the splats of A, whichever are fewer) and one more
    never exceed the registers. Floats in AVX2 take 3 x 32: 7 loads for 12 products, where 6 x 16 needs 8. In AVX-512
    the 14 rows divide the 49 and 196 pixels of many nets for pictures well.
    """
    vector_bytes, name = target.vector_bytes, cast(DType, dtype.name)
    format = format or AS_SUMS
    registers = registers or (32 if vector_bytes == 64 else 16 - format.spare)
    tile = Tile(name, target, registers, 0, 2 if vector_bytes == 64 else 1, format)
    if vector_bytes == 32 and registers == 16 and name != "i32":  # products of integers need a register of their own
        return replace(tile, rows=3, panels=2)
    most = {"i32": 8 if format.few_shapes else 12}.get(name, 14)
    return replace(tile, rows=min((registers - 1) // (tile.panels * 64 // vector_bytes) - 1, most))


def transpose(f: Function, rows: list[str]) -> list[str]:
    """Transposes a square of vectors by swapping off-diagonal blocks of halving size."""
    w, step = len(rows), len(rows) // 2
    while step:
        low = [j if j & step == 0 else w + j - step for j in range(w)]
        high = [j + step if j & step == 0 else w + j for j in range(w)]
        out = list(rows)
        for i in range(w):
            if i & step == 0:
                out[i] = f.shuffle(rows[i], rows[i + step], low)
                out[i + step] = f.shuffle(rows[i], rows[i + step], high)
        rows, step = out, step // 2
    return rows
