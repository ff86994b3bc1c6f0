"""Products of bytes as products of panels: a multiplication is a dot product of bytes that lie together along k.

    C[M, N] = (A[M, K] - point) @ W[K, N]        in i32, exact for all values; then C as it is, or requantised to bytes

Four bytes of a row and of each column are one multiplication with VNNI, eight with AVX2, whose sums of pairs are added
up in 16 bits first. Panels are those of `int8_layout`, and a block is given the first step of its first one, after the
head. Sums are exact, so they may be added up in any order: K is one block, and few sums are two chains each.
"""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.gemm import amx_int8
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.int8_ends import Int8Ends
from rlx.backends.cpu.gemm.panels.format import Ends, PanelFormat
from rlx.backends.cpu.gemm.panels.int8_layout import DEPTH, HEAD, WIDTH, Instructions
from rlx.backends.cpu.gemm.tile import Tile, tile_of
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, Module, constant, vec, void
from rlx.backends.cpu.llvm.x86 import add_fours, byte_pair_sums, pair_sums
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.records import replace

__all__ = ["Int8", "int8_tile"]

SHORTS, BYTES = "<16 x i16>", "<32 x i8>"


class Int8(PanelFormat):
    """Rows of u8, or of i8 (`signed`), times weights of bytes.

    `stores`: "i32" for the sums, or "u8" and "i8", scaled, shifted, rounded, saturated; `clamped` to limits of their
    own. `rest`: panels may have further fours. A multiplication is computed `by` these instructions.
    """

    stored = "i8"
    turn = DEPTH
    few_shapes = True
    fetches = False  # measured: panels of bytes are short, and a product of one row reads them in order
    arguments = (("ptr", "ends"),)

    def __init__(self, by: Instructions, *, signed: bool, stores: str, clamped: bool, rest: bool) -> None:
        self.by, self.signed, self.stores, self.clamped, self.rest = by, signed, stores, clamped, rest
        kind = f"{stores}{'_clamped' if clamped else ''}{'_rest' if rest else ''}"
        self.name = f"{'i8' if signed else 'u8'}_{kind}_{by.name}"
        self.depth = 4 if by.dots else DEPTH
        self.spare = 0 if by.dots else 4

    def left(self, sums: str) -> str:
        return "i8"

    def result(self, sums: str) -> str:
        return "i32" if self.stores == "i32" else "i8"

    def column_bytes(self, sums: str) -> int:
        return 4

    def step_bytes(self, sums: str) -> int:
        return WIDTH

    def panel(self, f: Function, k: str, sums: str) -> str:
        return f.add(f.mul(k, WIDTH), HEAD)

    def load_left(self, f: Function, p: str, v: str) -> str:
        low = self.four(f, p)
        return low if self.by.dots else f.shuffle(low, self.four(f, f.offset(p, 4)), list(range(8 * self.by.lanes)))

    def load(self, f: Function, p: str, v: str) -> str:
        bytes = vec("i8", 4 * self.by.lanes)
        low = f.load(bytes, p)
        return low if self.by.dots else f.shuffle(low, f.load(bytes, f.offset(p, 64)), list(range(8 * self.by.lanes)))

    def multiply_add(self, f: Function, tile: Tile, a: str, b: str, total: str) -> str:
        if self.by.dots:
            return self.add_four(f, a, b, total)
        fours = [[f.shuffle(x, None, list(range(32 * i, 32 * i + 32))) for x in (a, b)] for i in range(2)]
        low, high = (byte_pair_sums(f, *four) for four in fours)  # panels hold weights whose sums fit in 16 bits
        return f.add(total, pair_sums(f, f.add(low, high), constant(1, SHORTS)))

    def four(self, f: Function, p: str) -> str:
        """Four elements of A, as u8, for each sum of a vector."""
        four = f.splat(f.load("i32", p, align=1), self.by.lanes)
        bytes = f.cast("bitcast", four, vec("i8", 4 * self.by.lanes))
        return f.xor(bytes, -128) if self.signed else bytes

    def add_four(self, f: Function, a: str, b: str, total: str) -> str:
        """`total` plus the products of fours."""
        if self.by.dots:
            return add_fours(f, total, a, b, vec("i32", self.by.lanes))
        return f.add(total, pair_sums(f, byte_pair_sums(f, a, b), constant(1, SHORTS)))

    def ends(self, f: Function, tile: Tile, rows: int, vectors: int) -> Ends:
        return Int8Ends(f, self, tile, rows, vectors)

    def block_routine(self, tile: Tile) -> Routine | None:
        """Where there are tile registers, they compute blocks of 16 rows and more."""
        if not self.by.tiles:
            return None
        arguments = [*gemm.BLOCK_ARGUMENTS, *self.arguments]
        vectors, tiles = gemm.gemm_block(tile, internal=True), amx_int8.block(self, arguments)
        f = Function(f"{vectors.name}_tiles", arguments, attrs="nounwind noinline")
        given = [f"%{name}" for _, name in arguments]
        enough = f.cmp("ge", "%rows", amx.ROWS)
        f.if_(enough, lambda: void(f.call(tiles, given)), lambda: void(f.call(vectors, given)))
        f.ret()
        return Routine(f.name, Module([f]).text())


format_of = cache(Int8)  # one for each kind, so that their routines are made once


def int8_tile(target: Target, by: Instructions, *, signed: bool, stores: str, clamped: bool, rest: bool) -> Tile:
    """The register tile of products of bytes, see `Int8`."""
    format = format_of(by, signed=signed, stores=stores, clamped=clamped, rest=rest)
    return tile_of(DTYPES["i32"], replace(target, vector_bytes=4 * by.lanes), format=format)
