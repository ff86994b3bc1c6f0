"""Products of f32 by the tile registers of AMX, which multiply bf16 and add up in f32.

A number is the sum of three bf16, exactly: x = high + middle + low. Of the nine products of the parts of two numbers
six are made: high * high, high * middle, middle * high, middle * middle, high * low and low * high; what is left out
is below 2^-22 of the product. Each element of C is one chain of sums, step by step of `STEP` along k, and depends on K
only: neither on M, nor on chunks, threads or blocks of k. With finite operands its error is at most

    (K + 8) 2^-24 sum |a| |b|  +  K 2^-60 max |a| max |b|  +  K 2^-123

(the largest of its row of A and column of B), and like that of a chain of fma some 2^-24 sum |a| |b| in practice. The
last term is for products and sums below 2^-126, which tiles take for zeros: results above 1e-26 or so never see it.

What tiles can't do is done anew by fma, element by element: where a sum is infinite or not a number, which operands
that are lead to, and where all of a row of A or column of B is below `SMALL` but not zero, for tiles take denormals
for zeros and low parts of smaller numbers are. The latter get a nan among their parts, so that one look at each sum
once it leaves the tiles finds all of them; it costs some 1 % where K is a few hundred.

Where all of B are whole numbers of up to 8 bits, as weights of bytes that are scaled behind the product, they are bf16
as they are, and three products are enough.

Rows of A are split before they are used. Tiles have the fewest rows with which they are equally many, for each row of
a tile takes its time, whether there is one of A for it or not: 49 rows are four tiles of 13. The weights stay in the
panels that other routines read; the parts of the next two are made while the tiles compute with those of the current
ones, by instructions that have nothing to do meanwhile, in the order in which they lie in memory, so that their way
from there is hidden as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, arguments_of, void
from rlx.backends.cpu.schedule.matmul import (
    PRODUCT_BLOCK,
    TILE_BLOCK,
    TILE_PART,
    TILE_ROWS,
    TILE_SPARE,
    TILE_STEP,
    TILE_STEP_BYTES,
)
from rlx.records import dataclass

__all__ = [
    "ARGUMENTS", "FLOATS", "HIGH", "PANEL", "WORDS", "any_nonfinite", "begin_sums", "begin_tiles", "block",
    "copy_square", "is_small", "pair_of", "products_of", "routine",
    "split_rows", "sums_anew", "tile_shapes", "with_tiles", "words_of_parts",
]  # fmt: skip

ARGUMENTS = "ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 rows, i64 columns, i64 k"
WORDS, FLOATS = "<16 x i32>", "<16 x float>"
HIGH = 0xFFFF0000 - (1 << 32)  # the bits of a float that are a bf16
SMALL = 0x60000000  # a float with one of these bits is at least 2^-63
POISON = 0x7FC07FC0  # two nans
PANEL = 1024  # bytes of a tile: 16 rows of 64
AHEAD = 4096  # bytes of a panel by which it is fetched before its parts are made
SHARES = (16, 8, 4, 2, 1)  # pairs of rows of both panels whose parts are made in a step


def with_tiles(fma: Function, block: Function, few: Function | None = None) -> Function:
    """The block routine `fma` (see `gemm.gemm_block`) of f32, which computes by tiles where `most` is 0.

    `copy` then is room of `schedule.matmul.tile_room(rows, k)` bytes. `block` is the function that computes by tiles,
    and `few` that for up to `TILE_ROWS` rows over two steps of k or more, if there is one for them.

    This is no choice between kernels (`schedule.choice`): the rows of a block differ within a run, from part to part of
    a chunk, and `most` comes with the cut into chunks, which a binding makes. Two comparisons a block, which takes 20
    us or more, cost less than a second kernel for each product of an open size: its epilogue would be compiled twice.
    """
    arguments = arguments_of(f"{ARGUMENTS}, i64 most, ptr copy")
    f = Function(f"{fma.name}_tiles", arguments, attrs="nounwind noinline")
    names = [f"%{name}" for _, name in arguments_of(ARGUMENTS)]
    tiles = f.and_(f.cmp("eq", "%most", 0), f.cmp("gt", "%k", 0))
    most = f.select(f.cmp("eq", "%most", 0), PRODUCT_BLOCK, "%most")

    def many_rows() -> None:
        f.call(block, [*names, "%copy"])

    def by_tiles() -> None:
        if few is None:
            many_rows()
        else:
            suits = f.and_(f.cmp("le", "%rows", TILE_ROWS), f.cmp("ge", "%k", 2 * TILE_STEP))
            f.if_(suits, lambda: void(f.call(few, [*names, "%copy"])), many_rows)

    f.if_(tiles, by_tiles, lambda: void(f.call(fma, [*names, most, "%copy"])))
    f.ret()
    return f


def pair_of(f: Function, of_b: PanelFormat, p: str) -> tuple[str, str]:
    """A step of a panel and the one 16 after it, which share words of parts."""
    return of_b.words(f, p), of_b.words(f, f.offset(p, 16 * of_b.f32_step))


def routine(name: str, arguments: str, result: str = "void", *, cold: bool = False) -> Function:
    """A function for this module alone; `cold` for what is seldom called."""
    attrs = "nounwind noinline cold" if cold else "nounwind noinline"
    return Function(f"rlx_{name}", arguments_of(arguments), result, internal=True, attrs=attrs)


def begin_tiles(f: Function) -> tuple[str, str, str, str]:
    """Steps of k at a time, bands of two tiles, and the rows of one and of two tiles, for which it configures them."""
    blocks = f.div(f.add("%k", TILE_BLOCK - 1), TILE_BLOCK)
    steps = f.and_(f.add(f.div(f.sub(f.add("%k", blocks), 1), blocks), TILE_STEP - 1), -TILE_STEP)
    bands = f.lshr(f.add("%rows", TILE_ROWS - 1), 5)
    tiles = f.lshr(f.add("%rows", amx.ROWS - 1), 4)
    high = f.div(f.sub(f.add("%rows", tiles), 1), tiles)
    amx.configure(f, f.offset(tile_shapes(f), f.shl(f.sub(high, 1), 6)))
    return steps, bands, high, f.shl(high, 1)


def block(fma: Function, of_b: PanelFormat) -> Function:
    """A block of C by tiles, in squares of up to 32 x 32: two panels at a time, all bands of rows for each."""
    f = routine("tile_block", f"{ARGUMENTS}, ptr room")
    _Block(f, fma, of_b).emit()
    return f


@dataclass(frozen=True)
class _Columns:
    """Two panels, as SSA values: their first column, how many they have, and the places of parts.

    `here` are their parts, made already. Beside their products the first `wanted` pairs of rows of the panels p0 and
    p1, which come next, become parts at `there`.
    """

    first: str
    width: str
    here: str
    there: str
    p0: str
    p1: str
    wanted: str


@dataclass(frozen=True)
class _BlockOfK:
    """A block of k, as SSA values: its `steps`, and whether C is added to (`more`), and there is none after it."""

    steps: str
    more: str
    add: str  # the same as an i64
    final: str


class _Block:
    """The code of `block`: the functions that it calls, and the places in `room`."""

    def __init__(self, f: Function, fma: Function, of_b: PanelFormat) -> None:
        self.f, self.of_b = f, of_b
        self.split, self.begin, self.finish = split_rows(), _parts_of_panels(of_b), _finish_panels(of_b)
        self.check, self.again = any_nonfinite(), sums_anew(fma)
        self.squares = {(share, tall): _square(share, tall, of_b) for share in SHARES for tall in (True, False)}
        self.fetch, self.put = copy_square("fetch"), copy_square("put")
        self.depth, self.bands, self.high, self.twice = begin_tiles(f)
        size = f.mul(f.lshr(self.depth, 5), TILE_STEP_BYTES)  # of the parts of 32 rows, or of two panels
        self.spill, self.sums, self.seen = "%room", f.offset("%room", 4 * PANEL), f.offset("%room", 8 * PANEL)
        self.first = f.offset("%room", TILE_SPARE)
        self.second = f.offset(self.first, size)
        self.parts = f.offset(self.second, size)
        self.line = f.shl("%ldc", 2)
        self.share = f.div(f.add(self.bands, 15), self.bands)  # pairs a step, at least

    def emit(self) -> None:
        """All of it, a block of k after the other."""
        self.f.loop(0, "%k", self.depth, [], self.some_steps)
        amx.release(self.f)
        self.f.ret()

    def two_panels(self, column: str | int, k0: str) -> tuple[str, str]:
        """Where they go on at step k0; the second is the first again where there is none."""
        f, scalar = self.f, self.of_b.f32_scalar
        place = f.gep("%b", f.add(f.mul(f.lshr(column, 4, "i64"), "%stride"), f.shl(k0, 4)), scalar)
        there = f.cmp("lt", f.add(column, 16, "i64"), "%columns")
        return place, f.gep(place, f.select(there, "%stride", 0), scalar)

    def some_steps(self, k0: str, _: list[str]) -> None:
        """A block of k: the rows of A and the first two panels are split, then there are products."""
        f = self.f
        k = f.min(self.depth, f.sub("%k", k0))
        steps, pairs = f.lshr(f.add(k, TILE_STEP - 1), 5), f.shl(f.lshr(k, 5), 4)
        final, more = f.cmp("ge", f.add(k0, k), "%k"), f.cmp("gt", k0, 0)
        block_of_k = _BlockOfK(steps, more, f.cast("zext", more, "i64"), final)
        p0, p1 = self.two_panels(0, k0)
        f.call(self.split, [f.gep("%a", k0, "float"), "%lda", "%rows", k, self.parts, self.high])
        f.call(self.begin, [p0, p1, self.first, pairs, self.seen])
        f.call(self.finish, [p0, p1, self.first, k, self.seen])

        def columns(column: str, state: list[str]) -> list[str]:
            here, there = state
            following = f.add(column, 32)
            coming = f.cmp("lt", following, "%columns")
            p0, p1 = self.two_panels(following, k0)
            wanted = f.select(coming, pairs, 0)
            width = f.min(f.sub("%columns", column), 32)
            for i in range(2):
                f.store("zeroinitializer", f.offset(self.seen, 64 * i), ty=WORDS)
            own = _Columns(column, width, here, there, p0, p1, wanted)
            band = partial(self.band, block_of_k, own)
            f.loop(0, self.bands, 1, [("i64", 0)], band, runs=True)
            f.if_(coming, lambda: void(f.call(self.finish, [p0, p1, there, k, self.seen])))
            return [there, here]

        f.loop(0, "%columns", 32, [("ptr", self.first), ("ptr", self.second)], columns)

    def band(self, block_of_k: _BlockOfK, columns: _Columns, number: str, state: list[str]) -> list[str]:
        """A square: a band of rows by two panels; `state` is how many pairs have their parts."""
        f = self.f
        (done,) = state
        row = f.mul(number, self.twice)
        height = f.min(f.sub("%rows", row), self.twice)
        tall = f.cmp("gt", height, self.high)
        stored = f.select(tall, self.twice, self.high)
        whole = f.and_(f.cmp("eq", columns.width, 32), f.cmp("eq", height, stored))
        c = f.gep("%c", f.add(f.mul(row, "%ldc"), columns.first), "float")
        target, step = f.select(whole, c, self.spill, "ptr"), f.select(whole, self.line, 128)
        outside = f.xor(whole, 1)
        copied = [c, "%ldc", self.spill, height, columns.width]
        f.if_(f.and_(outside, block_of_k.more), lambda: void(f.call(self.fetch, copied)))
        a = f.offset(self.parts, f.mul(number, f.mul(block_of_k.steps, TILE_STEP_BYTES)))
        sums = [a, columns.here, block_of_k.steps, target, step, block_of_k.add]
        made = [columns.p0, columns.p1, columns.there, done, columns.wanted, self.seen, self.high]

        def by(pairs: int) -> Callable[[], None]:
            tall_one, low_one = (self.squares[pairs, is_tall] for is_tall in (True, False))
            args = [*sums, *made]
            return lambda: void(f.if_(tall, lambda: void(f.call(tall_one, args)), lambda: void(f.call(low_one, args))))

        taken = _choose(f, self.share, by)

        def is_done() -> None:
            bad = f.call(self.check, [target, step, stored])

            def anew() -> None:
                top = f.gep("%a", f.mul(row, "%lda"), "float")
                panel = f.gep("%b", f.mul(f.lshr(columns.first, 4), "%stride"), self.of_b.f32_scalar)
                args = [top, "%lda", panel, "%stride", target, step, height, columns.width, "%k", self.sums]
                f.call(self.again, args)

            f.if_(f.cmp("ne", bad, 0), anew)

        f.if_(block_of_k.final, is_done)
        f.if_(outside, lambda: void(f.call(self.put, copied)))
        return [f.add(done, f.mul(block_of_k.steps, taken))]


def _choose(f: Function, share: str, by: Callable[[int], Callable[[], None]]) -> str:
    """Runs the code for the fewest of `SHARES` that are at least `share`, and tells how many they are."""
    taken: str = f.select(f.cmp("le", share, SHARES[1]), SHARES[1], SHARES[0])
    for count in SHARES[2:]:
        taken = f.select(f.cmp("le", share, count), count, taken)
    f.switch(taken, {count: by(count) for count in SHARES})
    return taken


def begin_sums(f: Function, places: Sequence[tuple[int, str]]) -> None:
    """Sums in tiles, of which each has its place in C, begin there where `%add` says so, else at zero."""

    def load() -> None:
        for t, p in places:
            amx.load(f, t, p, "%line")

    def clear() -> None:
        for t, _ in places:
            amx.zero(f, t)

    f.if_(f.cmp("ne", "%add", 0), load, clear)


def products_of(parts: int) -> tuple[tuple[int, int], ...]:
    """The parts of A and of B, of which there are three or one, that are multiplied, in the order of sums."""
    # small ones first, and so that one pair of tiles stays from each to the next
    return ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)) if parts == 3 else ((2, 0), (1, 0), (0, 0))


def _square(share: int, tall: bool, of_b: PanelFormat) -> Function:
    """Sums of two tiles by two (one by two unless `tall`) over some steps, while parts are made for the next ones.

    `a` and `b` are parts, `line` is the bytes from row to row of C, `add` whether C is added to; of the `wanted` pairs
    of rows of the panels p0 and p1 `done` have their parts, and those of the next `share` a step are put to `out`.
    A tile of them has `high` rows.
    """
    f = routine(
        f"square_{share}{'' if tall else '_low'}",
        "ptr a, ptr b, i64 steps, ptr c, i64 line, i64 add, ptr p0, ptr p1, ptr out, i64 done, i64 wanted, ptr seen, "
        "i64 high",
    )
    products = products_of(of_b.parts)
    rows = (0, 1) if tall else (0,)
    below = f.offset("%c", f.mul("%line", "%high"))
    places = [(2 * r + j, f.offset("%c" if r == 0 else below, 64 * j)) for r in rows for j in (0, 1)]

    begin_sums(f, places)

    def making(_: str, state: list[str]) -> list[str]:
        a, b, done, *seen = state
        source, target = _pair(f, of_b, done, "%out")
        panels = [f.offset(p, source) for p in ("%p0", "%p1")]

        def make(i: int) -> None:
            for j, p in enumerate(panels):
                at = f.offset(p, of_b.f32_step * i)
                # the other half comes by itself, and more would take the places of lines on their way to the tiles
                f.prefetch(f.offset(at, AHEAD), locality=2)
                x, y = pair_of(f, of_b, at)
                out = f.offset(target, PANEL * j + 64 * i)
                seen[j] = _parts(f, x, y, out, seen[j], exact=False, parts=of_b.parts)

        _multiply(f, products, rows, a, b, share, make)
        return [f.offset(a, TILE_STEP_BYTES), f.offset(b, TILE_STEP_BYTES), f.add(done, share), *seen]

    def plain(_: str, state: list[str]) -> list[str]:
        _multiply(f, products, rows, state[0], state[1])
        return [f.offset(p, TILE_STEP_BYTES) for p in state]

    busy = f.max(f.min(f.div(f.sub("%wanted", "%done"), share), "%steps"), 0)
    seen = [(WORDS, f.load(WORDS, f.offset("%seen", 64 * j))) for j in (0, 1)]
    a, b, _, *after = f.loop(0, busy, 1, [("ptr", "%a"), ("ptr", "%b"), ("i64", "%done"), *seen], making)
    for j in (0, 1):
        f.store(after[j], f.offset("%seen", 64 * j))
    f.loop(busy, "%steps", 1, [("ptr", a), ("ptr", b)], plain)
    for t, p in places:
        amx.store(f, t, p, "%line")
    f.ret()
    return f


def _multiply(
    f: Function,
    products: Sequence[tuple[int, int]],
    rows: Sequence[int],
    a: str,
    b: str,
    count: int = 0,
    make: Callable[[int], None] = void,
) -> None:
    """The products of a step of a square, between which `make` emits what is numbered from 0 to `count`."""
    before = (-1, -1)
    for number, (left, right) in enumerate(products):
        if left != before[0]:
            for r in rows:
                amx.load(f, 4 + r, f.offset(a, left * TILE_PART + r * PANEL), 64)
        if right != before[1]:
            for j in (0, 1):
                amx.load(f, 6 + j, f.offset(b, right * TILE_PART + j * PANEL), 64)
        before = left, right
        for r in rows:
            for j in (0, 1):
                amx.dot(f, "tdpbf16ps", 2 * r + j, 4 + r, 6 + j)
        for i in range(count * number // len(products), count * (number + 1) // len(products)):
            make(i)


def _parts(
    f: Function, x: str, y: str, out: str, seen: str, *, exact: bool, parts: int = 3, apart: int = TILE_PART
) -> str:
    """Puts the parts of two vectors of f32 to `out`; returns what bits are seen in any of them."""
    seen = f.or_(f.or_(seen, x), y)
    for part, words in enumerate(words_of_parts(f, x, y, exact=exact, parts=parts)):
        f.store(words, f.offset(out, part * apart))
    return seen


def words_of_parts(
    f: Function, x: str, y: str, *, exact: bool, parts: int = 3, in_order: bool = False
) -> Iterator[str]:
    """Emits the parts of two vectors of f32 (as words), lane by lane the first in the lower half of a word.

    `exact` rounds to the nearest, which is somewhat better and slower than to cut off. With `in_order` LLVM keeps two
    instructions for the last part, of which it would make a shuffle that takes longer.
    """
    for part in range(parts):
        # the low part needs no rounding: it has no more bits, or is a denormal
        high = [f.and_(f.add(v, 0x8000) if exact and part < 2 else v, HIGH) for v in (x, y)]
        low = f.lshr(high[0], 16)
        yield f.or_(f.keep_order(low) if in_order and part == parts - 1 else low, high[1])
        if part < parts - 1:
            x, y = (
                f.cast("bitcast", f.sub(f.cast("bitcast", v, FLOATS), f.cast("bitcast", h, FLOATS)), WORDS)
                for v, h in zip((x, y), high, strict=True)
            )


def _pair(f: Function, of_b: PanelFormat, number: str, out: str) -> tuple[str, str]:
    """Where a pair of rows starts in a panel, in bytes, and the address of its parts."""
    step, row = f.lshr(number, 4), f.and_(number, 15)
    # a step is 32 rows, each of its pairs one of the first 16
    source = f.mul(f.add(number, f.shl(step, 4)), of_b.f32_step)
    return source, f.offset(out, f.add(f.mul(step, TILE_STEP_BYTES), f.shl(row, 6)))


def is_small(f: Function, seen: str) -> str:
    """Whether the bits that are seen in some numbers say that all are below 2^-63, and not all are zeros."""
    bits = f.and_(seen, 0x7FFFFFFF)
    return f.and_(f.cmp("ne", bits, 0), f.cmp("eq", f.and_(bits, SMALL), 0))


def tile_shapes(f: Function) -> str:
    """Configurations of tiles, one for each number of rows of those of A and C."""
    shapes = []
    for high in range(1, amx.ROWS + 1):
        shape = amx.configuration()
        for tile in range(6):
            shape[amx.rows_place(tile)] = high
        shapes += shape
    return f.array("rlx_tiles_of_rows", "i8", shapes)


def split_rows(tiles: int = 2) -> Function:
    """The parts of rows of A, as `_square` reads them: of two tiles of `high` rows one step of k after the other.

    A step that is not whole ends with zeros; beyond the last row that comes again. Of one tile, if there is no other.
    """
    f = routine("split_rows" if tiles == 2 else "split_tile", "ptr a, i64 lda, i64 rows, i64 k, ptr out, i64 high")
    part = tiles * PANEL
    step, together = 3 * part, 4
    whole = f.and_("%k", -TILE_STEP)
    size = f.mul(f.lshr(f.add("%k", TILE_STEP - 1), 5), TILE_STEP_BYTES)
    last = f.sub("%rows", 1)

    def a_tile(row: str, state: list[str]) -> list[str]:
        out, other = state
        f.loop(0, "%high", together, [], lambda i, _: some_rows(f.add(row, i), f.offset(out, f.shl(i, 6))), runs=True)
        return [other, f.offset(out, size)]

    def some_rows(row: str, out: str) -> None:
        lines = [f.gep("%a", f.mul(f.min(f.add(row, i), last), "%lda"), "float") for i in range(together)]

        def one_step(k: str, state: list[str]) -> list[str]:
            target, *seen = state
            for i, line in enumerate(lines):
                p = f.gep(line, k, "float")
                x, y = (f.load(WORDS, q) for q in (p, f.offset(p, 64)))
                seen[i] = _parts(f, x, y, f.offset(target, 64 * i), seen[i], exact=True, apart=part)
            return [f.offset(target, step), *seen]

        none = [(WORDS, "zeroinitializer")] * together
        target, *seen = f.loop(0, whole, TILE_STEP, [("ptr", out), *none], one_step)

        def rest() -> list[str]:
            left = f.sub("%k", whole)
            masks = [f.mask_below(f.sub(left, 16 * i), 16) for i in (0, 1)]
            found = []
            for i, line in enumerate(lines):
                p = f.gep(line, whole, "float")
                x, y = (f.masked_load(WORDS, f.offset(p, 64 * j), masks[j]) for j in (0, 1))
                found.append(_parts(f, x, y, f.offset(target, 64 * i), seen[i], exact=True, apart=part))
            return found

        seen = f.if_(f.cmp("lt", whole, "%k"), rest, lambda: list(seen))
        for i, bits in enumerate(seen):
            f.if_(is_small(f, f.reduce(bits, f.or_)), lambda i=i: f.store(POISON, f.offset(out, 64 * i), ty="i32"))  # type: ignore[misc]

    f.loop(0, "%rows", "%high", [("ptr", "%out"), ("ptr", f.offset("%out", PANEL))], a_tile)
    f.ret()
    return f


def _parts_of_panels(of_b: PanelFormat) -> Function:
    """The parts of whole steps of the first two panels, which no tiles are computed beside."""
    f = routine("split_panels", "ptr p0, ptr p1, ptr out, i64 pairs, ptr seen")

    def pair(done: str, seen: list[str]) -> list[str]:
        source, target = _pair(f, of_b, done, "%out")
        for j, p in enumerate(("%p0", "%p1")):
            x, y = pair_of(f, of_b, f.offset(p, source))
            seen[j] = _parts(f, x, y, f.offset(target, PANEL * j), seen[j], exact=False, parts=of_b.parts)
        return seen

    for j, bits in enumerate(f.loop(0, "%pairs", 1, [(WORDS, "zeroinitializer")] * 2, pair)):
        f.store(bits, f.offset("%seen", 64 * j))
    f.ret()
    return f


def _finish_panels(of_b: PanelFormat) -> Function:
    """The last step of two panels, where it is not whole, and nans in the columns that are too small."""
    f = routine("finish_panels", "ptr p0, ptr p1, ptr out, i64 k, ptr seen")
    whole = f.and_("%k", -TILE_STEP)
    left = f.sub("%k", whole)
    out = f.offset("%out", f.mul(f.lshr("%k", 5), TILE_STEP_BYTES))

    def last_step() -> None:
        for j, p in enumerate(("%p0", "%p1")):
            source = f.gep(p, f.shl(whole, 4), of_b.f32_scalar)

            def pair(i: str, state: list[str], source: str = source, j: int = j) -> list[str]:
                at = f.offset(source, f.mul(i, of_b.f32_step))

                def row(number: str, q: str) -> str:
                    there = f.cmp("lt", number, left)
                    return f.if_(there, lambda: [of_b.words(f, q)], lambda: [(WORDS, "zeroinitializer")])[0]

                x, y = row(i, at), row(f.add(i, 16), f.offset(at, 16 * of_b.f32_step))
                target = f.offset(out, f.add(f.shl(i, 6), PANEL * j))
                return [_parts(f, x, y, target, state[0], exact=False, parts=of_b.parts)]

            place = f.offset("%seen", 64 * j)
            (bits,) = f.loop(0, 16, 1, [(WORDS, f.load(WORDS, place))], pair)
            f.store(bits, place)

    f.if_(f.cmp("gt", left, 0), last_step)
    for j in (0, 1):
        small = is_small(f, f.load(WORDS, f.offset("%seen", 64 * j)))
        place = f.offset("%out", PANEL * j)
        f.store(f.select(small, f.splat(POISON, 16, "i32"), f.load(WORDS, place)), place)
    f.ret()
    return f


def any_nonfinite() -> Function:
    """Whether any number in 32 columns of one row or more is infinite or a nan; 0 if not."""
    f = routine("any_nonfinite", "ptr c, i64 line, i64 rows", "i32")

    def two_rows(row: str, state: list[str]) -> list[str]:
        p, sums = state[0], state[1:]
        below = f.offset(p, f.select(f.cmp("lt", f.add(row, 1), "%rows"), "%line", 0))
        for i in range(4):
            x = f.load(FLOATS, f.offset(p if i < 2 else below, 64 * (i % 2)))
            sums[i] = f.fma(x, 0.0, sums[i])  # a nan where x is infinite or one
        return [f.offset(below, "%line"), *sums]

    sums = f.loop(0, "%rows", 2, [("ptr", "%c"), *[(FLOATS, "zeroinitializer")] * 4], two_rows, runs=True)[1:]
    total = f.add(f.add(sums[0], sums[1]), f.add(sums[2], sums[3]))
    bad = f.cast("bitcast", f.cmp("uno", total, 0.0), "i16")
    f.ret(f.cast("zext", bad, "i32"))
    return f


def sums_anew(fma: Function) -> Function:
    """Sums that are not finite are computed anew by fma; `line` is the bytes from row to row of C."""
    f = routine("again", f"{ARGUMENTS.replace('ldc', 'line')}, ptr sums", cold=True)
    sizes = ["%rows", "%columns", "%k"]
    f.call(fma, ["%a", "%lda", "%b", "%stride", "%sums", 32, *sizes, ("i64", PRODUCT_BLOCK), ("ptr", "null")])

    def row(i: str, _: list[str]) -> None:
        for j in (0, 1):
            old, new = f.offset("%c", f.add(f.mul(i, "%line"), 64 * j)), f.offset("%sums", f.add(f.shl(i, 7), 64 * j))
            x = f.load(FLOATS, old)
            finite = f.cmp("lt", f.intrinsic("fabs", x), float("inf"))
            f.store(f.select(finite, x, f.load(FLOATS, new)), old)

    f.loop(0, "%rows", 1, [], row)
    f.ret()
    return f


def copy_square(name: str) -> Function:
    """Between C and a square of 32 x 32: "fetch" what is there, or "put" it back."""
    f = routine(f"square_{name}", "ptr c, i64 ldc, ptr square, i64 rows, i64 columns")
    masks = [f.mask_below(f.sub("%columns", 16 * j), 16) for j in (0, 1)]

    def row(i: str, _: list[str]) -> None:
        line, own = f.gep("%c", f.mul(i, "%ldc"), "float"), f.offset("%square", f.shl(i, 7))
        for j in (0, 1):
            p, q = f.offset(line, 64 * j), f.offset(own, 64 * j)
            if name == "fetch":
                f.store(f.masked_load(FLOATS, p, masks[j]), q)
            else:
                f.masked_store(f.load(FLOATS, q), p, masks[j])

    f.loop(0, "%rows", 1, [], row)
    f.ret()
    return f
