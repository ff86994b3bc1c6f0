"""The panels of experts, and the routines that pack a matrix: as those of any product, or of encoded blocks.

Encoded experts whose blocks lie along the depth stay encoded. A panel has the blocks of 16 columns and takes what the
encoding takes: a row of bytes below the other (`gemm.panels.block_formats`), or ordered by fields
(`gemm.panels.q8_codes`). They are decoded in registers, or two panels at a time to scratch, as in other products with
such weights. How a row is computed does not depend on the rows of its group: no more of them are decoded for than fit
into registers.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.blocks import ENCODED, EncodedBlocks, has_code
from rlx.backends.cpu.gemm.panels.coded import IN_BLOCKS, CodedBlocks
from rlx.backends.cpu.gemm.panels.q8 import Q8Blocks
from rlx.backends.cpu.gemm.panels.q8_codes import CODES, Field, Q8Code
from rlx.backends.cpu.gemm.tile import tile_of, transpose
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, arguments_of, vec, void, width
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.loops.encoded_elements import Decoder
from rlx.backends.cpu.schedule.arguments import ArgumentTable, Routine, routines
from rlx.backends.cpu.schedule.matmul import WIDTH
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Node
from rlx.ir.shape import Size, ceildiv
from rlx.kernels.expr import I64, Expr, Load, Var, const
from rlx.kernels.lowering import Lowering
from rlx.kernels.program import Buffer
from rlx.ops.experts import GroupedMatMul
from rlx.records import dataclass

__all__ = ["ExpertPanels", "computed_in", "pack_blocks_routine", "pack_routine", "panels_of"]

F32, F64, U8 = DTYPES["f32"], DTYPES["f64"], DTYPES["u8"]
TOGETHER, AHEAD = 8, 8  # panels that are packed together, and rows that are fetched ahead
ROW, LANE = Var("row"), Var("lane")


def computed_in(dtype: DType) -> DType:
    """The type of sums and panels."""
    return F64 if dtype is F64 else F32


ARGUMENTS = "ptr b, ptr out, i64 k, i64 n, i64 row, i64 column, i64 count, i64 start"  # of what packs a matrix


# ---- matrices of numbers


@routines
def pack_routine(dtype: DType, target: Target, encoding: Encoding | None = None) -> Routine:
    """Packs `count` panels of a matrix `b` of any strides, of `row` and `column` elements, to `out`.

    `n` are the columns from element number `start` on. The last axis of an encoded matrix is whole blocks, so vectors
    of elements are part of one.
    """
    f = Function(PLACEHOLDER, arguments_of(ARGUMENTS))
    _Packing(f, dtype, target, encoding).emit()
    f.ret()
    return Routine(*name_kernel(Module([f]).text()))


class _Packing:
    """The code of `pack_routine`."""

    def __init__(self, f: Function, dtype: DType, target: Target, encoding: Encoding | None) -> None:
        self.f, self.dtype, self.wide = f, dtype, computed_in(dtype)
        tile = tile_of(self.wide, target)
        self.memory, self.ty, self.lanes, self.width = convert.memory_type(dtype), tile.scalar, tile.lanes, tile.width
        self.decoder = None if encoding is None else Decoder(f, encoding, dtype, "%b", tile.lanes)
        self.area = f.mul("%k", tile.width)  # elements of a panel

    def emit(self) -> None:
        """All panels: whole ones of rows that lie together side by side, the others one by one."""
        f = self.f
        whole = f.select(f.cmp("eq", "%column", 1), f.min(f.div("%n", self.width), "%count"), 0, "i64")
        f.loop(0, whole, TOGETHER, [], lambda first, _: self.side_by_side(first, f.min(f.add(first, TOGETHER), whole)))
        f.loop(whole, "%count", 1, [], lambda p, _: self.panel(p))

    def read(self, number: str, w: int) -> str:
        """`w` elements from one of that number on, in the type of the sums."""
        f, memory = self.f, self.memory
        if self.decoder is not None:
            raw = self.decoder.elements(number, w)
        else:
            address = f.gep("%b", number, memory)
            raw = convert.from_memory(f, f.load(vec(memory, w) if w > 1 else memory, address), self.dtype, w)
        return convert.convert(f, raw, self.dtype, self.wide, w)

    def panel(self, p: str) -> None:
        """A panel of any strides: by squares that are turned in registers where columns lie together."""
        f, ty, lanes, width = self.f, self.ty, self.lanes, self.width
        first = f.mul(p, width)
        source, out = f.add("%start", f.mul(first, "%column")), f.gep("%out", f.mul(first, "%k"), ty)
        left = f.min(f.sub("%n", first), width)

        def at(i: str, j: str | int) -> str:
            return f.add(source, f.add(f.mul(i, "%row"), f.mul(j, "%column")))

        def cell(i: str, j: str | int) -> str:
            return f.gep(out, f.add(f.mul(i, width), j), ty)

        def one_by_one(i: str, _: list[str]) -> None:
            f.loop(0, left, 1, [], lambda j, _: f.store(self.read(at(i, j), 1), cell(i, j)))
            f.loop(left, width, 1, [], lambda j, _: f.store(0.0, cell(i, j), ty=ty))

        def square(i: str, _: list[str]) -> None:
            for j in range(0, width, lanes):
                turned = transpose(f, [self.read(at(i, j + q), lanes) for q in range(lanes)])
                for q, value in enumerate(turned):
                    f.store(value, cell(f.add(i, q), j))

        def squares() -> None:
            even = f.and_("%k", -lanes)
            f.loop(0, even, lanes, [], square)
            f.loop(even, "%k", 1, [], one_by_one)

        across = f.and_(f.cmp("eq", left, width), f.cmp("eq", "%row", 1))
        f.if_(across, squares, lambda: void(f.loop(0, "%k", 1, [], one_by_one)))

    def side_by_side(self, first: str, stop: str) -> None:
        """Whole panels of a matrix whose rows lie together: a row of several, so that much is read in turn."""
        f, ty, width = self.f, self.ty, self.width

        def row(i: str, _: list[str]) -> None:
            source = f.add("%start", f.mul(i, "%row"))
            out = f.gep("%out", f.mul(i, width), ty)

            def part(p: str, _: list[str]) -> None:
                own, to = f.add(source, f.mul(p, width)), f.gep(out, f.mul(p, self.area), ty)
                if self.decoder is None:
                    f.prefetch(f.gep("%b", f.add(own, f.mul("%row", AHEAD)), self.memory), locality=0)
                for j in range(0, width, self.lanes):
                    f.store(self.read(f.add(own, j), self.lanes), f.gep(to, j, ty))

            f.loop(first, stop, 1, [], part)

        f.loop(0, "%k", 1, [], row)


# ---- encoded blocks


@dataclass(frozen=True)
class ExpertPanels:
    """The panels of a product's weights, in that format: as the `code` has them, or bytes as they are stored."""

    format: EncodedBlocks | Q8Blocks
    encoding: Encoding
    code: Q8Code | None

    @property
    def rounded(self) -> bool:
        """Whether they are multiplied by rows that are rounded to 8 bits."""
        return isinstance(self.format, Q8Blocks)

    @property
    def decodes(self) -> bool:
        """Whether two panels at a time are decoded to scratch."""
        return isinstance(self.format, EncodedBlocks) and self.format.decodes

    def few(self, target: Target) -> int:
        """Rows up to which they are decoded in registers all the same."""
        return self.format.few(target) if isinstance(self.format, EncodedBlocks) else 0

    def shape(self, experts: Size, depth: Size, columns: Size) -> tuple[Size, ...]:
        """Of the panels of all experts, in bytes."""
        assert isinstance(depth, int)
        return experts, ceildiv(columns, WIDTH), depth // self.encoding.block, self.encoding.block_bytes, WIDTH

    def routine(self, target: Target) -> Routine:
        """Makes panels of a matrix [n, k]: as `pack_routine`, whose arguments it has."""
        return pack_blocks_routine(self.encoding, self.code, target)


def panels_of(node: Node, target: Target) -> ExpertPanels | None:
    """The panels of a product's weights; None where these are not encoded, or decoded before.

    A code orders panels only if it keeps all bytes of the blocks: experts that leave memory are made of them again.
    """
    encoding, op = node.inputs[1].type.encoding, node.op
    assert isinstance(op, GroupedMatMul)
    depth = node.inputs[1].shape[2]
    if encoding is None or not op.transposed or node.inputs[0].dtype is F64 or not has_code(target) or depth == 0:
        return None
    code = CODES.get(encoding.name)
    code = code if code is not None and code.nbytes == encoding.block_bytes else None
    if op.activations:
        return None if code is None else ExpertPanels(Q8Blocks(code), encoding, code)
    found = next((form for form in (ENCODED if code is None else IN_BLOCKS) if form.encoding is encoding), None)
    return None if found is None else ExpertPanels(found, encoding, code if isinstance(found, CodedBlocks) else None)


@routines
def pack_blocks_routine(encoding: Encoding, code: Q8Code | None, target: Target) -> Routine:
    """Makes panels of a matrix [n, k] of encoded blocks: as `pack_routine`, whose arguments it has."""
    f = Function(PLACEHOLDER, arguments_of(ARGUMENTS))
    size, steps = encoding.block_bytes, encoding.block
    blocks = f.div("%k", steps)
    line = f.mul(blocks, size)  # bytes of a row of the matrix, which is a column of panels
    first = f.offset("%b", f.mul(f.div("%start", steps), size))
    room = f.alloca("i8", size * WIDTH) if code is not None else ""
    fields = _Fields(f, code, room, size, target) if code is not None else None

    def panel(p: str, _: list[str]) -> None:
        source = f.offset(first, f.mul(f.mul(p, WIDTH), line))
        to = f.offset("%out", f.mul(f.mul(p, line), WIDTH))
        left = f.min(f.sub("%n", f.mul(p, WIDTH)), WIDTH)

        def block(number: str, _: list[str]) -> None:
            own, out = f.offset(source, f.mul(number, size)), f.offset(to, f.mul(number, size * WIDTH))
            _rows_of_bytes(f, own, room or out, line, left, size)
            if fields is not None:
                fields.put(out)

        f.loop(0, blocks, 1, [], block)

    f.loop(0, "%count", 1, [], panel)
    f.ret()
    return Routine(*name_kernel(Module([f]).text()))


def _rows_of_bytes(f: Function, source: str, out: str, line: str, left: str, size: int) -> None:
    """Emits rows of 16 bytes: byte number r of the blocks of all columns, `line` bytes apart; zeros after `left`."""

    def vectors() -> None:
        lines = [f.offset(source, f.mul(line, j)) for j in range(WIDTH)]
        for at in dict.fromkeys([*range(0, size - WIDTH + 1, WIDTH), size - WIDTH]):
            rows = [f.load(f"<{WIDTH} x i8>", f.offset(p, at)) for p in lines]
            for q, value in enumerate(transpose(f, rows)):
                f.store(value, f.offset(out, (at + q) * WIDTH))

    def row(number: str, _: list[str]) -> None:
        to = f.offset(out, f.mul(number, WIDTH))

        def byte(j: str, _: list[str]) -> None:
            f.store(f.load("i8", f.offset(source, f.add(f.mul(line, j), number))), f.offset(to, j))

        f.loop(0, left, 1, [], byte)
        f.loop(left, WIDTH, 1, [], lambda j, _: f.store(0, f.offset(to, j), ty="i8"))

    def by_bytes() -> None:
        f.loop(0, size, 1, [], row)

    if size < WIDTH:
        by_bytes()
    else:
        f.if_(f.cmp("eq", left, WIDTH), vectors, by_bytes)


class _Fields:
    """Emits the fields of a code from a block of 16 columns, whose bytes lie in rows at `rows`."""

    def __init__(self, f: Function, code: Q8Code, rows: str, size: int, target: Target) -> None:
        self.f, self.code = f, code
        self.stored = Buffer("rows", "param", (size * WIDTH,), U8)
        self.emitter = Emitter(f, ArgumentTable(), target.lanes)
        self.emitter.loaded[self.stored] = rows

    def byte(self, number: Expr | int) -> Expr:
        """A byte of the blocks, of all columns."""
        at = const(number, I64) if isinstance(number, int) else number
        return Load(self.stored, (at * WIDTH + LANE,), U8)

    def put(self, out: str) -> None:
        """Stores all fields of the block at `out`."""
        for start, own, in_body in self.code.places.values():
            self.put_field(own, self.f.offset(out, WIDTH * start), own.rows // (self.code.turns if in_body else 1))

    def put_field(self, own: Field, out: str, rows: int) -> None:
        """Stores a field that has so many rows a turn, the first of them at `out`."""
        f, k = self.f, Lowering(())
        elements = [own.element(k, self.byte, ROW, const(j, I64)) for j in range(own.width)]

        def row(number: str, _: list[str]) -> None:
            scope = Scope(WIDTH, LANE, {ROW: number, LANE: "0"})
            columns = [self.emitter.lanes_of(x, scope) for x in elements]
            turn = f.mul(f.div(number, rows), WIDTH * self.code.turn_bytes)
            f.store(_interleaved(f, columns), f.offset(out, f.add(turn, f.mul(f.rem(number, rows), WIDTH * own.width))))

        f.loop(0, own.rows, 1, [], row)


def _interleaved(f: Function, columns: list[str]) -> str:
    """Vectors as one: the first lane of each, then the second of each, and so on."""
    while len(columns) > 1:
        half, lanes = len(columns) // 2, width(f.type_of(columns[0]))
        order = [place for lane in range(lanes) for place in (lane, lanes + lane)]
        columns = [f.shuffle(a, b, order) for a, b in zip(columns[:half], columns[half:], strict=True)]
    return columns[0]
