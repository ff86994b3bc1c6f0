"""The register tile of products: sums that stay in registers while a loop over k adds to them.

    sums[i, j] += A[i, k] * B[k, j]        for each step k of the loop; i < rows, j < vectors of columns

`Accumulators` keeps the sums, and nothing else does. It is told how the operands of a step are read: the element of A
of a row, in all lanes, and a vector of B. `Rows` find the elements of A: `Matrix`, rows that lie evenly apart, and
`Windows`, rows in pieces anywhere in an image. Vectors of B come from panels, one load each as their format has it
(`steps`); formats whose steps are not alike (`panels.f28`, `panels.blocks`) have loops of their own around `add`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Operand, Typed, size_of, vec
from rlx.backends.cpu.llvm.x86 import PAIR_FEATURES, pair_sums
from rlx.records import dataclass, replace

__all__ = ["Accumulators", "Fetch", "Matrix", "Panels", "Rows", "Windows", "multiply_add"]

WRITTEN_OUT = 32  # steps of a piece of a window, at most

Read = Callable[[int], str]  # the element of A of a row, in all lanes; or a vector of B


@dataclass(frozen=True)
class Fetch:
    """What is prefetched beside a loop over k: from an address on, into which cache (2: the second; 3: the first).

    `panels` of them are, `stride` bytes apart, and `step` bytes of each in a step of k; 0: as tiles have it.
    """

    start: str
    locality: int = 2
    panels: int = 1
    stride: str = ""
    step: int = 0


class Accumulators:
    """The sums of a tile of C, `rows` x `vectors` registers, which begin at zero, or as `first` has them.

    Each is that of so many `chains`, which take steps in turn until `join`: where sums are few, they wait for no other.
    """

    def __init__(
        self, f: Function, tile: Tile, rows: int, vectors: int, first: list[str] | None = None, chains: int = 1
    ) -> None:
        self.f, self.tile, self.rows, self.vectors, self.chains = f, tile, rows, vectors, chains
        zeros = ["zeroinitializer"] * (rows * vectors)
        self.values = [*(first or zeros), *zeros * (chains - 1)]

    def typed(self) -> list[Typed]:
        return [(self.tile.vector, x) for x in self.values]

    def loop(
        self,
        start: Operand,
        stop: Operand,
        step: Operand,
        pointers: Sequence[str],
        body: Callable[[str, list[str]], list[str]],
        *,
        runs: bool = False,
    ) -> list[str]:
        """A loop over k: `body(k, pointers)` adds a turn's steps and gives the next turn's pointers; the last ones."""
        count = len(pointers)

        def turn(k: str, state: list[str]) -> list[str]:
            self.values = state[count:]
            return [*body(k, state[:count]), *self.values]

        state: list[Typed] = [*(("ptr", p) for p in pointers), *self.typed()]
        after = self.f.loop(start, stop, step, state, turn, runs=runs)
        self.values = after[count:]
        return after[:count]

    def either(
        self, condition: str, then: Callable[[], str | None], otherwise: Callable[[], str | None] | None = None
    ) -> list[str]:
        """Adds steps in one of two ways, each of which may give a pointer; without the second, only on condition."""
        before = self.values

        def by(way: Callable[[], str | None] | None) -> list[Typed]:
            self.values = list(before)
            pointer = way() if way else None
            return [*([] if pointer is None else [("ptr", pointer)]), *self.typed()]

        after = self.f.if_(condition, lambda: by(then), lambda: by(otherwise))
        self.values = after[-len(before) :]
        return after[: -len(before)]

    def join(self) -> None:
        """Makes one chain of all."""
        count = self.rows * self.vectors
        parts = [self.values[at : at + count] for at in range(0, len(self.values), count)]
        self.values, self.chains = [functools.reduce(self.f.add, x) for x in zip(*parts, strict=True)], 1

    def add(self, a: Read, b: Read, *, first: int = 0, count: int = 0, ordered: bool = False, chain: int = 0) -> None:
        """Adds a step: `a(i)` times `b(j)`, for all vectors or `count` of them from number `first` on.

        The fewer of both are held in registers. `ordered` keeps sums of several steps in the order of instructions.
        """
        first += chain * self.rows * self.vectors
        f, tile, rows, vectors = self.f, self.tile, range(self.rows), range(count or self.vectors)

        def sum_of(i: int, j: int, x: str, y: str) -> str:
            at = i * self.vectors + first + j
            self.values[at] = multiply_add(f, tile, x, y, self.values[at])
            return self.values[at]

        if len(rows) < len(vectors):
            held = [a(i) for i in rows]
            for j in vectors:
                y = b(j)
                for i in rows:
                    sum_of(i, j, held[i], y)
            return
        held = [b(j) for j in vectors]
        for i in rows:
            x = a(i)
            for j in vectors:
                total = sum_of(i, j, x, held[j])
                if ordered:
                    self.values[i * self.vectors + first + j] = tile.ordered(f, total)

    def add_scaled(self, sums: Accumulators, scales: Sequence[str]) -> None:
        """Adds other sums, times a vector of scales for each vector of columns."""
        pairs = enumerate(zip(sums.values, self.values, strict=True))
        self.values = [self.f.fma(x, scales[i % self.vectors], total) for i, (x, total) in pairs]

    def add_groups(self, groups: Sequence[tuple[Accumulators, Sequence[str]]], row_scales: Sequence[str]) -> None:
        """Adds sums of whole numbers, each group times scales of vectors of columns, all times a scale of each row.

        A group without scales is the only one.
        """
        f = self.f
        for at, total in enumerate(self.values):
            value = ""
            for sums, scales in groups:
                x = f.cast("sitofp", sums.values[at], self.tile.scalar)
                if not scales:
                    value = x
                elif value:
                    value = f.fma(x, scales[at % self.vectors], value)
                else:
                    value = f.mul(x, scales[at % self.vectors])
            self.values[at] = f.fma(value, row_scales[at // self.vectors], total)

    def steps(self, rows: Sequence[str], panels: Sequence[str], count: int, fetch: Fetch | None) -> None:
        """Adds `count` steps: elements of A lie at `rows`, vectors of B at `panels`."""
        f, tile = self.f, self.tile
        size, per_panel = size_of(tile.a_scalar), tile.width // tile.lanes
        for k in range(0, count, tile.format.depth):
            fetched = (fetch.step if fetch else 0) or tile.fetched
            if fetch and tile.format.fetches and k * fetched % 64 == 0:
                p = f.offset(fetch.start, k * fetched)
                for number in range(fetch.panels):
                    p = f.offset(p, fetch.stride) if number else p
                    f.prefetch(p, locality=fetch.locality)
            places = [
                f.offset(panels[j // per_panel], k * tile.step_bytes + j % per_panel * tile.lanes * tile.column_bytes)
                for j in range(self.vectors)
            ]

            def a(i: int, k: int = k) -> str:
                return tile.format.load_left(f, f.offset(rows[i], k * size), tile.vector)

            def b(j: int, places: list[str] = places) -> str:
                return tile.format.load(f, places[j], tile.vector)

            self.add(a, b, ordered=count > 1, chain=k // tile.format.depth % self.chains)

    def put(self, c_rows: list[str], n: str, added: str | None) -> None:
        """Sets rows of C (`ldc` apart, the argument) to them in columns below `n`, or adds them where `added`."""
        f, tile, acc, vectors = self.f, self.tile, self.values, self.vectors
        ty, v, lanes, size = tile.scalar, tile.vector, tile.lanes, size_of(tile.scalar)
        places = [(i * vectors + j, f.gep(row, j * lanes, ty)) for i, row in enumerate(c_rows) for j in range(vectors)]

        def finish_whole() -> None:
            sums = acc
            if added:
                sums = f.if_(added, lambda: [f.add(acc[at], f.load(v, p)) for at, p in places], lambda: acc)
            for at, p in places:
                f.store(sums[at], p)

        def finish_masked() -> None:
            masks = [f.mask_below(f.sub(n, j * lanes), lanes, f"i{8 * size}") for j in range(vectors)]

            def add_old() -> list[str]:
                return [f.add(acc[at], f.masked_load(v, p, masks[at % vectors])) for at, p in places]

            sums = f.if_(added, add_old, lambda: acc) if added else acc
            for at, p in places:
                f.masked_store(sums[at], p, masks[at % vectors])

        def finish_tail() -> None:
            # through a copy on the stack, so that the masked code is there once and not once a row
            masks = [f.mask_below(f.sub(n, j * lanes), lanes, f"i{8 * size}") for j in range(vectors)]
            copy = f.alloca(v, len(acc))
            for at, value in enumerate(acc):
                f.store(value, f.gep(copy, at * lanes, ty))

            def row(i: str, _: list[str]) -> None:
                source, target = f.gep(copy, f.mul(i, vectors * lanes), ty), f.gep(c_rows[0], f.mul(i, "%ldc"), ty)
                for j in range(vectors):
                    p = f.gep(target, j * lanes, ty)
                    value = f.load(v, f.gep(source, j * lanes, ty))
                    if added:
                        value = f.select(added, f.add(value, f.masked_load(v, p, masks[j])), value)
                    f.masked_store(value, p, masks[j])

            f.loop(0, len(c_rows), 1, [], row)

        # where a mask is a register of its own, a masked store is a store
        f.if_(f.cmp("ge", n, vectors * lanes), finish_whole, finish_masked if lanes * size == 64 else finish_tail)


def multiply_add(f: Function, tile: Tile, a: str, b: str, total: str) -> str:
    """total + a * b, lane by lane: as the format has it, else by fma; of i32 lanes the products of halves are added."""
    own = tile.format.multiply_add(f, tile, a, b, total)
    if own is not None:
        return own
    v, lanes = tile.vector, tile.lanes
    if tile.dtype != "i32":
        return f.fma(a, b, total, v)
    halves = vec("i16", 2 * lanes)
    x, y = f.cast("bitcast", a, halves), f.cast("bitcast", b, halves)
    if tile.target.has(PAIR_FEATURES[lanes]):
        return f.add(total, pair_sums(f, x, y))
    wide = f.mul(f.cast("sext", x, "i32"), f.cast("sext", y, "i32"))
    for parity in (0, 1):
        total = f.add(total, f.shuffle(wide, None, list(range(parity, 2 * lanes, 2))))
    return total


# ---- operands


@dataclass(frozen=True)
class Panels:
    """Panels of B side by side: where each begins, the elements from one to the next, the vectors of a step of them."""

    starts: tuple[str, ...]
    stride: str
    vectors: int

    @staticmethod
    def of(f: Function, tile: Tile, first: str, stride: str, vectors: int = 0) -> Panels:
        """Those from `first` on that have so many vectors, by default as many panels as a tile has."""
        per_panel = tile.width // tile.lanes
        vectors = vectors or per_panel * tile.panels
        starts = [first]
        for _ in range(-(-vectors // per_panel) - 1):
            starts.append(f.gep(starts[-1], stride, tile.b_scalar))
        return Panels(tuple(starts), stride, vectors)


class Rows(ABC):
    """Rows of A, numbered, and how a loop over k walks through some of them."""

    @abstractmethod
    def at(self, f: Function, tile: Tile, row: Operand) -> str:
        """Where the elements of a row begin."""

    @abstractmethod
    def sums(self, f: Function, tile: Tile, row: Operand, count: int, panels: Panels, fetch: Fetch) -> Accumulators:
        """The sums of `count` rows from `row` on over all of k, beside which memory is fetched."""


@dataclass(frozen=True)
class Matrix(Rows):
    """Rows evenly apart, read three to a pointer: pointer, pointer + step, pointer + 2 step are addressing modes."""

    a: str
    step: str  # bytes
    double: str
    depth: str  # elements of a row
    unroll: int  # steps of k that a turn of the loop takes

    @staticmethod
    def of(f: Function, tile: Tile, a: str, step: str, depth: str, unroll: int = 0) -> Matrix:
        """Rows `step` elements apart."""
        size = f.mul(step, size_of(tile.a_scalar))
        return Matrix(a, size, f.mul(size, 2), depth, unroll or tile.unroll)

    def at(self, f: Function, tile: Tile, row: Operand) -> str:
        return self.a if row == 0 else f.offset(self.a, f.mul(row, self.step))

    def lines(self, f: Function, pointers: Sequence[str], count: int) -> list[str]:
        """Where rows are, by the pointers of every third."""
        return [f.offset(pointers[i // 3], (0, self.step, self.double)[i % 3]) for i in range(count)]

    def sums(
        self,
        f: Function,
        tile: Tile,
        row: Operand,
        count: int,
        panels: Panels,
        fetch: Fetch,
        first: list[str] | None = None,
    ) -> Accumulators:
        size, unroll = size_of(tile.a_scalar), self.unroll
        thirds = [self.at(f, tile, row)]
        for _ in range((count - 1) // 3):
            thirds.append(f.offset(thirds[-1], f.mul(self.step, 3)))
        n, total = len(thirds), Accumulators(f, tile, count, panels.vectors, first, tile.chains(count, panels.vectors))

        def turn(steps: int) -> Callable[[str, list[str]], list[str]]:
            def body(_: str, state: list[str]) -> list[str]:
                *at, ahead = state
                fetched = steps * (fetch.step or tile.fetched) if steps == unroll else 0
                if n > 2:  # LLVM would keep a pointer for each row, most of them in memory
                    at = [f.opaque(p) for p in at]
                total.steps(self.lines(f, at, count), at[n:], steps, replace(fetch, start=ahead) if fetched else None)
                moved = [f.offset(p, steps * (size if i < n else tile.step_bytes)) for i, p in enumerate(at)]
                return [*moved, f.offset(ahead, fetched)]

            return body

        pointers, done = [*thirds, *panels.starts, fetch.start], "0"
        if unroll > 1:
            done = f.and_(self.depth, -unroll)
            pointers = total.loop(0, done, unroll, pointers, turn(unroll))
        if tile.format.depth == 1:
            total.loop(done, self.depth, 1, pointers, turn(1))
        total.join()
        return total


@dataclass(frozen=True)
class Windows(Rows):
    """Rows of `pieces` pieces of `run` elements, `step` elements apart; `offsets` has where each row begins."""

    a: str
    offsets: str
    step: str
    pieces: str
    run: str
    known_run: int = 0  # 0: it is not known when code is made
    fetches: bool = False  # whether memory is fetched beside

    def at(self, f: Function, tile: Tile, row: Operand) -> str:
        return f.gep(self.a, f.load("i64", f.gep(self.offsets, row, "i64")), tile.scalar)

    def sums(self, f: Function, tile: Tile, row: Operand, count: int, panels: Panels, fetch: Fetch) -> Accumulators:
        numbers = [row + r if isinstance(row, int) else f.add(row, r) if r else row for r in range(count)]
        starts = [self.at(f, tile, number) for number in numbers]
        size, total = size_of(tile.scalar), Accumulators(f, tile, count, panels.vectors)
        apart = f.mul(panels.stride, size)

        def steps(number: int, rows: list[str], state: list[str]) -> list[str]:
            """Adds so many. Rows take most registers, so panels have one pointer."""
            at, *ahead = state
            beside = [at]
            for _ in panels.starts[1:]:
                beside.append(f.offset(beside[-1], apart))
            fetched = number * tile.fetched if number > 1 else 0
            total.steps(rows, beside, number, Fetch(ahead[0], fetch.locality) if ahead and fetched else None)
            return [f.offset(at, number * tile.width * size), *(f.offset(p, fetched) for p in ahead)]

        def turn(number: int, windows: list[str]) -> Callable[[str, list[str]], list[str]]:
            return lambda k, state: steps(number, [f.gep(p, k, tile.scalar) for p in windows], state)

        whole = f.and_(self.run, -tile.unroll)

        def piece(_: str, state: list[str]) -> list[str]:
            windows, others = state[:count], state[count:]
            if 0 < self.known_run <= WRITTEN_OUT and tile.unroll > 1:
                others = steps(self.known_run, windows, others)
            else:
                others = total.loop(0, whole, tile.unroll, others, turn(tile.unroll, windows))
                others = total.loop(whole, self.run, 1, others, turn(1, windows))
            return [*(f.gep(p, self.step, tile.scalar) for p in windows), *others]

        total.loop(0, self.pieces, 1, [*starts, panels.starts[0], *([fetch.start] if self.fetches else [])], piece)
        return total
