"""Products of f32 of up to 32 rows by the tile registers of AMX: see `amx_f32`, whose bits these have.

So few rows read each step of B once or twice, so its parts are made right before: beside the products of one step those
of the next one of the two panels, and of the first one of the next two, in a place of two steps that stays in L1. That
takes about as long as the products themselves, at the same time, and both less than the way of the weights from memory,
for which the step after is fetched meanwhile. The rows of A are split once, and up to 16 of them are multiplied by four
panels at a time: the panels on their way displace their parts from L1, so these come from L2 each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cpu.gemm.amx_f32 import (
    ARGUMENTS,
    FLOATS,
    PANEL,
    WORDS,
    any_nonfinite,
    begin_sums,
    begin_tiles,
    copy_square,
    is_small,
    pair_of,
    products_of,
    routine,
    split_rows,
    sums_anew,
    words_of_parts,
)
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, Typed, void
from rlx.backends.cpu.schedule.matmul import TILE_STEP
from rlx.records import dataclass

__all__ = ["block"]

TOGETHER = 2  # panels
PAIRS = TILE_STEP // 2  # of rows of a step
LINE = 4 * 16 * TOGETHER  # bytes of a row of a square of sums


def block(fma: Function, of_b: PanelFormat) -> Function:
    """A block of C of up to 32 rows, two panels at a time; `fma` is the routine for what has to be done anew.

    `room` is for the sums of two panels where C has no place for all of them, for those that are done anew, what is
    seen in two panels, parts of two steps of them, copies of the last steps of this and the next two panels where those
    are not whole, and the parts of A: from K = 64 on it fits into that of `schedule.matmul.tile_room`.
    """
    f = routine("tile_rows", f"{ARGUMENTS}, ptr room")
    _Block(f, fma, of_b).emit()
    return f


@dataclass(frozen=True)
class _BlockOfK:
    """A block of k, as SSA values: `steps` steps, `whole` of them whole and `left` rows of B in the last one if not.

    `start` is at its first row of B, `rest` the bytes of a panel's whole steps. `more`: C is added to; `final`: there
    is no block after it.
    """

    steps: str
    whole: str
    left: str
    start: str
    rest: str
    more: str
    final: str


class _Block:
    """The code of `block`: the functions that it calls, and the places in `room`."""

    def __init__(self, f: Function, fma: Function, of_b: PanelFormat) -> None:
        self.f, self.of_b = f, of_b
        self.check, self.anew, self.copy, self.poison = any_nonfinite(), sums_anew(fma), _copy_step(of_b), _poison()
        self.fetch, self.put, self.first = copy_square("fetch"), copy_square("put"), _first_step(of_b)
        self.depth, _, self.high, twice = begin_tiles(f)
        self.tall = f.cmp("gt", "%rows", self.high)
        self.stored = f.select(self.tall, twice, self.high)  # rows that tiles store
        self.spill, self.sums, self.seen = "%room", f.offset("%room", 4 * PANEL), f.offset("%room", 8 * PANEL)
        self.ring = f.offset(self.seen, 3 * TOGETHER * 64)
        self.copies = f.offset(self.ring, 2 * _step_bytes(of_b))
        self.copied = TOGETHER * TILE_STEP * of_b.f32_step  # bytes of the copies of two panels
        self.parts = f.offset(self.copies, 2 * self.copied)
        self.line = f.shl("%ldc", 2)

    def emit(self) -> None:
        """All of it, a block of k after the other."""
        self.f.loop(0, "%k", self.depth, [], self.some_steps)
        amx.release(self.f)
        self.f.ret()

    def some_steps(self, k0: str, _: list[str]) -> None:
        """A block of k: by four panels where that may be, then by two."""
        f, of_b = self.f, self.of_b
        k = f.min(self.depth, f.sub("%k", k0))
        steps, whole = f.lshr(f.add(k, TILE_STEP - 1), 5), f.lshr(k, 5)
        final, more = f.cmp("ge", f.add(k0, k), "%k"), f.cmp("gt", k0, 0)
        top, start = f.gep("%a", k0, "float"), f.gep("%b", f.shl(k0, 4), of_b.f32_scalar)
        left = f.and_(k, TILE_STEP - 1)
        rest = f.mul(whole, TILE_STEP * of_b.f32_step)
        here = _BlockOfK(steps, whole, left, start, rest, more, final)

        now = self.panels_at(here, 0, 0)
        self.begin(now, top, k)
        in_fours = f.and_(f.xor(self.tall, 1), f.cmp("eq", left, 0))
        fours = f.select(in_fours, f.and_("%columns", -2 * 16 * TOGETHER), 0)
        pointers: list[Typed] = [("ptr", p) for p in (*now[0], *now[1])]
        by_four, by_two = partial(self.four_panels, here), partial(self.two_panels, here)
        state = f.loop(0, fours, 2 * 16 * TOGETHER, [("i64", 0), ("i64", 0), *pointers], by_four)
        after: list[Typed] = [("i64", x) for x in state[:2]]
        after += [("ptr", p) for p in state[2:]]
        f.loop(fours, "%columns", 16 * TOGETHER, after, by_two)

        def check_later(column: str, _: list[str]) -> None:
            width, fits, c = self.square(column)
            f.if_(fits, lambda: self.check_sums(column, width, c, self.line))

        # not at once, when the products are still under way
        f.if_(final, lambda: void(f.loop(0, "%columns", 16 * TOGETHER, [], check_later)))

    def panels_at(
        self, here: _BlockOfK, column: str | int, number: str | int
    ) -> tuple[list[str], list[str], list[str]]:
        """Two panels, the second again the first where there is none; their last steps; and their first ones."""
        f, of_b = self.f, self.of_b
        p0 = f.gep(here.start, f.mul(f.lshr(column, 4, "i64"), "%stride"), of_b.f32_scalar)
        p1 = f.gep(p0, f.select(f.cmp("lt", f.add(column, 16, "i64"), "%columns"), "%stride", 0), of_b.f32_scalar)
        own = f.offset(self.copies, f.mul(f.and_(number, 1, "i64"), self.copied))

        def copy_both() -> None:
            for j, p in enumerate((p0, p1)):
                f.call(self.copy, [f.offset(p, here.rest), here.left, f.offset(own, j * TILE_STEP * of_b.f32_step)])

        f.if_(f.cmp("ne", here.left, 0), copy_both)
        last = [f.offset(own, j * TILE_STEP * of_b.f32_step) for j in range(TOGETHER)]
        some = f.cmp("gt", here.whole, 0)
        return [p0, p1], last, [f.select(some, p, q) for p, q in zip((p0, p1), last, strict=True)]

    def begin(self, now: tuple[list[str], list[str], list[str]], top: str, k: str) -> None:
        """Fetches the first two panels, splits the rows of A from `top` on, and makes the parts of the first step."""
        f = self.f

        def fetch_both(at: str, _: list[str]) -> None:
            for p in now[0]:
                f.prefetch(f.offset(p, at))

        f.loop(0, 2 * TILE_STEP * self.of_b.f32_step, 64, [], fetch_both)
        args = [top, "%lda", "%rows", k, self.parts, self.high]
        f.if_(self.tall, lambda: void(f.call(split_rows(2), args)), lambda: void(f.call(split_rows(1), args)))
        f.call(self.first, [*now[2], self.ring, self.seen])

    def square(self, column: str) -> tuple[str, str, str]:
        """The columns of a square, whether tiles store it in its place, and that."""
        f = self.f
        width = f.min(f.sub("%columns", column), 16 * TOGETHER)
        fits = f.and_(f.cmp("eq", width, 16 * TOGETHER), f.cmp("eq", "%rows", self.stored))
        return width, fits, f.gep("%c", column, "float")

    def check_sums(self, column: str, width: str, target: str, step: str) -> None:
        """Has sums at `target`, `step` bytes from row to row, done anew where tiles could not make them."""
        f = self.f

        def again() -> None:
            panel = f.gep("%b", f.mul(f.lshr(column, 4), "%stride"), self.of_b.f32_scalar)
            f.call(self.anew, ["%a", "%lda", panel, "%stride", target, step, "%rows", width, "%k", self.sums])

        f.if_(f.cmp("ne", f.call(self.check, [target, step, self.stored]), 0), again)

    def two_panels(self, here: _BlockOfK, column: str, state: list[str]) -> list[str]:
        """Two panels; `state` is the place in the ring, the number of the pair, and pointers as of `panels_at`."""
        f, of_b = self.f, self.of_b
        place, number, *pointers = state
        panels, last = pointers[:TOGETHER], pointers[TOGETHER:]
        width, fits, c = self.square(column)
        following = f.add(column, 16 * TOGETHER)
        at = f.select(f.cmp("lt", following, "%columns"), following, column)
        coming = self.panels_at(here, at, f.add(number, 1))
        target, step = f.select(fits, c, self.spill, "ptr"), f.select(fits, self.line, LINE)
        outside = f.xor(fits, 1)
        f.if_(f.and_(outside, here.more), lambda: void(f.call(self.fetch, [c, "%ldc", self.spill, "%rows", width])))
        add = f.cast("zext", here.more, "i64")
        sizes = [place, here.steps, here.whole]
        args = [self.parts, self.ring, *sizes, *panels, *last, *coming[2], target, step, add, self.seen, self.high]
        f.if_(
            self.tall,
            lambda: void(f.call(_steps(2, of_b), args)),
            lambda: void(f.call(_steps(1, of_b), args)),
        )
        f.call(self.poison, [self.seen, target, step, self.stored])

        f.if_(f.and_(here.final, outside), lambda: self.check_sums(column, width, target, step))
        f.if_(outside, lambda: void(f.call(self.put, [c, "%ldc", self.spill, "%rows", width])))
        place = f.xor(place, f.and_(here.steps, 1))
        return [place, f.add(number, 1), *coming[0], *coming[1]]

    def four_panels(self, here: _BlockOfK, column: str, state: list[str]) -> list[str]:
        """Four panels, where there are as many and their last steps are whole; `state` is that of `two_panels`."""
        f, of_b = self.f, self.of_b
        place, number, p0, p1 = state[:4]
        following = f.add(column, 2 * 16 * TOGETHER)
        at = f.select(f.cmp("lt", following, "%columns"), following, column)
        coming = self.panels_at(here, at, f.add(number, 1))
        beyond = f.mul("%stride", TOGETHER)
        panels = [p0, p1, *(f.gep(p, beyond, of_b.f32_scalar) for p in (p0, p1))]
        then = [*coming[2], *(f.gep(p, beyond, of_b.f32_scalar) for p in coming[2])]
        add = f.cast("zext", here.more, "i64")
        c = f.gep("%c", column, "float")
        args = [self.parts, self.ring, place, here.steps, *panels, *then, c, self.line, add, self.seen]
        f.call(_steps_of_four(of_b), args)
        for half in range(2):
            own = f.offset(self.seen, half * 2 * TOGETHER * 64)
            f.call(self.poison, [own, f.offset(c, half * LINE), self.line, self.stored])
        return [place, f.add(number, 1), *coming[0], *coming[1]]


def _step_bytes(of_b: PanelFormat) -> int:
    """Bytes of the parts of a step of two panels."""
    return TOGETHER * of_b.parts * PANEL


def _make(f: Function, of_b: PanelFormat, p: str, out: str, seen: str) -> str:
    """Puts the parts of a pair of rows of a panel at `p`; returns the bits that are seen in it and before."""
    x, y = pair_of(f, of_b, p)
    for part, words in enumerate(words_of_parts(f, x, y, exact=False, parts=of_b.parts, in_order=True)):
        f.store(words, f.offset(out, part * PANEL))
    # in this order, for LLVM would regroup these, and keep what it reads for that on the stack
    return f.keep_order(f.or_(f.or_(seen, x), y))


def _steps(tiles: int, of_b: PanelFormat) -> Function:
    """Sums of one or two tiles by two over some steps, while the parts of the next step are made.

    `a` are the parts of A and `ring` has those of the first step at `place`, 0 or 1. The steps after it are at p0 and
    p1, `whole` of them, then maybe one at l0 and l1; n0 and n1 are what follows on the last. `line` is the bytes from
    row to row of C, `add` whether C is added to. `seen` gets the bits that are seen in all steps of both panels, and
    has behind them those of the first step, then of what follows.
    """
    f = routine(
        f"rows_{tiles}{'_whole' if of_b.parts == 1 else ''}",
        "ptr a, ptr ring, i64 place, i64 steps, i64 whole, ptr p0, ptr p1, ptr l0, ptr l1, ptr n0, ptr n1, "
        "ptr c, i64 line, i64 add, ptr seen, i64 high",
    )
    size, of_step = _step_bytes(of_b), TILE_STEP * of_b.f32_step
    places = [
        (TOGETHER * r + j, f.offset("%c" if r == 0 else f.offset("%c", f.mul("%line", "%high")), 64 * j))
        for r in range(tiles)
        for j in range(TOGETHER)
    ]

    begin_sums(f, places)

    def source(number: str | int, before: list[str]) -> list[str]:
        """Where the step of a number is, from where the one before it is."""
        last, over = f.cmp("eq", number, "%whole", "i64"), f.cmp("eq", number, "%steps", "i64")
        return [
            f.select(over, n, f.select(last, q, f.offset(p, of_step)))
            for p, q, n in zip(before, ("%l0", "%l1"), ("%n0", "%n1"), strict=True)
        ]

    def one_step(step: str, state: list[str]) -> list[str]:
        a, place = state[:2]
        at, seen = state[2 : 2 + TOGETHER], state[2 + TOGETHER : 2 + 2 * TOGETHER]
        b, other = f.offset("%ring", f.mul(place, size)), f.xor(place, 1)
        out = f.offset("%ring", f.mul(other, size))
        ahead = source(f.add(step, 2), at)
        before = list(seen)
        over = f.cmp("eq", f.add(step, 1), "%steps")
        seen = [f.select(over, "zeroinitializer", bits) for bits in seen]

        def make(i: int) -> None:
            # a line of both panels at a time: the way from memory is narrow, and never idle then
            every = 64 * TOGETHER * PAIRS // of_step
            for p in ahead if i % every == 0 else ():
                f.prefetch(f.offset(p, i // every * 64))
            row, j = divmod(i, TOGETHER)
            target = f.offset(out, j * of_b.parts * PANEL + 64 * row)
            seen[j] = _make(f, of_b, f.offset(at[j], of_b.f32_step * row), target, seen[j])

        _multiply(f, of_b, tiles, 0, a, b, [None, None], make)
        return [f.offset(a, 3 * tiles * PANEL), other, *ahead, *seen, *before]

    seen = [(WORDS, f.load(WORDS, f.offset("%seen", 64 * (TOGETHER + j)))) for j in range(TOGETHER)]
    first = source(1, ["%p0", "%p1"])
    state = [("ptr", "%a"), ("i64", "%place"), *(("ptr", p) for p in first), *seen, *seen]
    after = f.loop(0, "%steps", 1, state, one_step, runs=True)[2 + TOGETHER :]
    # the last turn has made parts of what follows
    for j, bits in enumerate([*after[TOGETHER:], *after[:TOGETHER]]):
        f.store(bits, f.offset("%seen", 64 * j))
    for t, p in places:
        amx.store(f, t, p, "%line")
    f.ret()
    return f


def _multiply(
    f: Function,
    of_b: PanelFormat,
    tiles: int,
    first: int,
    a: str,
    b: str,
    in_left: list[int | None],
    make: Callable[[int], None],
) -> None:
    """The products of a step of two panels, whose sums are in tiles from `first` on, and all that is made beside them.

    `in_left` is which part of A is in each of two registers, if those of one tile of rows.
    """
    in_right: int | None = None
    products, made, done = products_of(of_b.parts), TOGETHER * PAIRS, 0
    dots = len(products) * tiles * TOGETHER
    for left, right in products:
        # one tile of rows leaves room for two parts of it: the high one stays
        register = 0 if tiles == 2 or left == 0 else 1
        if in_left[register] != left:
            in_left[register] = left
            for r in range(tiles):
                amx.load(f, 4 + register + r, f.offset(a, (left * tiles + r) * PANEL), 64)
        if in_right != right:
            in_right = right
            for j in range(TOGETHER):
                amx.load(f, 6 + j, f.offset(b, (j * of_b.parts + right) * PANEL), 64)
        for r in range(tiles):
            for j in range(TOGETHER):
                amx.dot(f, "tdpbf16ps", first + TOGETHER * r + j, 4 + register + r, 6 + j)
                done += 1
                for i in range(made * (done - 1) // dots, made * done // dots):
                    make(i)


def _steps_of_four(of_b: PanelFormat) -> Function:
    """Sums of one tile by four over whole steps, while the parts of the next two panels are made.

    Parts of A, which the panels on their way displace from L1, are read for four of them. As `_steps`, but two panels
    of a step after the other two; n0 to n3 follow on the last step. `seen` has the second two panels' last.
    """
    f = routine(
        f"rows_by_four{'_whole' if of_b.parts == 1 else ''}",
        "ptr a, ptr ring, i64 place, i64 steps, ptr p0, ptr p1, ptr p2, ptr p3, ptr n0, ptr n1, ptr n2, ptr n3, "
        "ptr c, i64 line, i64 add, ptr seen",
    )
    size, of_step = _step_bytes(of_b), TILE_STEP * of_b.f32_step
    places = [(t, f.offset("%c", 64 * t)) for t in range(2 * TOGETHER)]
    b = [f.offset("%ring", f.mul(p, size)) for p in ("%place", f.xor("%place", 1))]

    begin_sums(f, places)

    def one_step(step: str, state: list[str]) -> list[str]:
        a, here, seen = state[0], state[1 : 1 + 2 * TOGETHER], state[1 + 2 * TOGETHER : 1 + 4 * TOGETHER]
        last = f.cmp("eq", f.add(step, 1), "%steps")
        ahead = [f.select(last, f"%n{j}", f.offset(p, of_step)) for j, p in enumerate(here)]
        in_left: list[int | None] = [None, None]
        before = seen[:TOGETHER]

        def half(number: int, at: list[str], coming: list[str], first: int) -> None:
            """Products of one half's panels, and the parts of the panels at `at`, the first of which is `first`."""

            def make(i: int) -> None:
                every = 64 * TOGETHER * PAIRS // of_step
                for p in coming if i % every == 0 else ():
                    f.prefetch(f.offset(p, i // every * 64))
                row, j = divmod(i, TOGETHER)
                target = f.offset(b[1 - number], j * of_b.parts * PANEL + 64 * row)
                seen[first + j] = _make(f, of_b, f.offset(at[j], of_b.f32_step * row), target, seen[first + j])

            _multiply(f, of_b, 1, number * TOGETHER, a, b[number], in_left, make)

        half(0, here[TOGETHER:], ahead[:TOGETHER], TOGETHER)
        seen[:TOGETHER] = [f.select(last, "zeroinitializer", bits) for bits in before]
        half(1, ahead[:TOGETHER], ahead[TOGETHER:], 0)
        return [f.offset(a, 3 * PANEL), *ahead, *seen, *before]

    def bits_at(number: int) -> str:
        return f.load(WORDS, f.offset("%seen", 64 * number))

    seen = [*((WORDS, bits_at(TOGETHER + j)) for j in range(TOGETHER)), *[(WORDS, "zeroinitializer")] * TOGETHER]
    state = [("ptr", "%a"), *(("ptr", f"%p{j}") for j in range(2 * TOGETHER)), *seen, *seen[:TOGETHER]]
    after = f.loop(0, "%steps", 1, state, one_step, runs=True)[1 + 2 * TOGETHER :]
    made, rest, done = after[:TOGETHER], after[TOGETHER : 2 * TOGETHER], after[2 * TOGETHER :]
    for j, bits in enumerate([*done, *made, *rest]):
        f.store(bits, f.offset("%seen", 64 * j))
    for t, p in places:
        amx.store(f, t, p, "%line")
    f.ret()
    return f


def _first_step(of_b: PanelFormat) -> Function:
    """The parts of the first step of the first two panels, and the bits that are seen in it."""
    f = routine("first_of_rows", "ptr p0, ptr p1, ptr ring, ptr seen")
    for j, panel in enumerate(("%p0", "%p1")):

        def pair(i: str, state: list[str], j: int = j, panel: str = panel) -> list[str]:
            out = f.offset("%ring", f.add(f.shl(i, 6), j * of_b.parts * PANEL))
            return [_make(f, of_b, f.offset(panel, f.mul(i, of_b.f32_step)), out, state[0])]

        (bits,) = f.loop(0, PAIRS, 1, [(WORDS, "zeroinitializer")], pair)
        f.store(bits, f.offset("%seen", 64 * (TOGETHER + j)))
    f.ret()
    return f


def _copy_step(of_b: PanelFormat) -> Function:
    """A copy of the last step of a panel, which has `left` rows, with zeros in the others."""
    f = routine("copy_step", "ptr p, i64 left, ptr out")
    ty = f"<16 x {of_b.scalar('float')}>"

    def row(i: str, _: list[str]) -> None:
        at = f.mul(i, of_b.f32_step)

        def there() -> list[str]:
            return [f.load(ty, f.offset("%p", at))]

        (numbers,) = f.if_(f.cmp("lt", i, "%left"), there, lambda: [(ty, "zeroinitializer")])
        f.store(numbers, f.offset("%out", at))

    f.loop(0, TILE_STEP, 1, [], row)
    f.ret()
    return f


def _poison() -> Function:
    """Nans in the columns of sums in which B is too small for tiles, as `seen` says."""
    f = routine("poison", "ptr seen, ptr c, i64 line, i64 rows")
    small = [is_small(f, f.load(WORDS, f.offset("%seen", 64 * j))) for j in range(TOGETHER)]
    any_small = f.cmp("ne", f.cast("bitcast", f.or_(small[0], small[1]), "i16"), 0)

    def put() -> None:
        def row(i: str, _: list[str]) -> None:
            for j in range(TOGETHER):
                p = f.offset("%c", f.add(f.mul(i, "%line"), 64 * j))
                f.store(f.select(small[j], f.splat(float("nan"), 16, "float"), f.load(FLOATS, p)), p)

        f.loop(0, "%rows", 1, [], row)

    f.if_(any_small, put)
    f.ret()
    return f
