"""Products of few steps whose epilogue is computed in registers, tile by tile, so that C is written once.

Where K is small, storing a block of sums and reading it again for the epilogue costs as much as the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, size_of
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.kernels.loops.analysis import is_costly
from rlx.records import dataclass

__all__ = ["Matrix", "Panels", "Rows", "Windows", "emit_tiles", "suits"]

UNROLLED = 32  # steps of a piece of a window that are written out


@dataclass(frozen=True)
class Panels:
    """Packed weights: the address of the first panel, the elements from panel to panel, the steps of K."""

    b: str
    stride: str
    depth: str

    def pointers(self, f: Function, tile: Tile, panel: str) -> list[str]:
        """The panels of a tile, of which `panel` is the first."""
        out = [panel]
        for _ in range(tile.panels - 1):
            out.append(f.gep(out[-1], self.stride, tile.scalar))
        return out


class Rows(ABC):
    """The rows of A."""

    @abstractmethod
    def at(self, f: Function, tile: Tile, row: str) -> str:
        """Where the elements of a row begin."""

    @abstractmethod
    def sums(self, f: Function, tile: Tile, row: str, count: int, panels: Panels, panel: str, ahead: str) -> list[str]:
        """The sums of `count` rows, row by row, which prefetch from `ahead` on."""


@dataclass(frozen=True)
class Matrix(Rows):
    """Rows `step` elements apart."""

    a: str
    step: str

    def at(self, f: Function, tile: Tile, row: str) -> str:
        return f.gep(self.a, f.mul(row, self.step), tile.scalar)

    def sums(self, f: Function, tile: Tile, row: str, count: int, panels: Panels, panel: str, ahead: str) -> list[str]:
        size = size_of(tile.scalar)
        step = f.mul(self.step, size)
        # three rows to a pointer: pointer, pointer + step, pointer + 2 step are addressing modes
        lines = [self.at(f, tile, row)]
        for _ in range((count - 1) // 3):
            lines.append(f.offset(lines[-1], f.mul(step, 3)))
        double_step = f.mul(step, 2)
        nl = len(lines)
        near = 3 if size * tile.lanes == 64 else 2  # AVX-512 waits for rows of A that are in the second cache

        def steps(unroll: int) -> Callable[[str, list[str]], list[str]]:
            def body(_: str, state: list[str]) -> list[str]:
                ahead, here, acc = state[0], state[1 : 1 + nl + tile.panels], state[1 + nl + tile.panels :]
                if nl > 2:  # LLVM would keep a pointer for each row, most of them in memory
                    here = [f.opaque(p) for p in here]
                for line in range(0, unroll * tile.fetched if unroll > 1 else 0, 64):
                    f.prefetch(f.offset(ahead, line), locality=near)
                rows = [f.offset(here[r // 3], (0, step, double_step)[r % 3]) for r in range(count)]
                acc = _add(f, tile, rows, here[nl:], unroll, acc)
                moved = [f.offset(p, unroll * size * (1 if i < nl else tile.width)) for i, p in enumerate(here)]
                return [f.offset(ahead, unroll * tile.fetched) if unroll > 1 else ahead, *moved, *acc]

            return body

        state = [*(("ptr", p) for p in (ahead, *lines, *panels.pointers(f, tile, panel))), *_zeros(tile, count)]
        done: int | str = 0
        if tile.unroll > 1:
            done = f.and_(panels.depth, -tile.unroll)
            after = f.loop(0, done, tile.unroll, state, steps(tile.unroll))
            state = [(kind, value) for (kind, _), value in zip(state, after, strict=True)]
        return f.loop(done, panels.depth, 1, state, steps(1))[1 + nl + tile.panels :]


@dataclass(frozen=True)
class Windows(Rows):
    """Rows of `pieces` pieces of `run` elements, `step` apart; `offsets` has where each begins."""

    a: str
    offsets: str
    step: str
    pieces: str
    run: str
    known_run: int  # 0: it is not known when code is made

    def at(self, f: Function, tile: Tile, row: str) -> str:
        return f.gep(self.a, f.load("i64", f.gep(self.offsets, row, "i64")), tile.scalar)

    def sums(self, f: Function, tile: Tile, row: str, count: int, panels: Panels, panel: str, ahead: str) -> list[str]:
        starts = [self.at(f, tile, f.add(row, r) if r else row) for r in range(count)]
        unroll = self.known_run if 0 < self.known_run <= UNROLLED and tile.unroll > 1 else tile.unroll
        run: int | str = self.known_run or self.run
        pointers = panels.pointers(f, tile, panel)
        np = len(pointers)

        def piece(_: str, state: list[str]) -> list[str]:
            lines, here, acc = state[:count], state[count : count + np], state[count + np :]

            def steps(many: int) -> Callable[[str, list[str]], list[str]]:
                def body(k: str, acc: list[str]) -> list[str]:
                    places = [f.gep(p, k, tile.scalar) for p in lines]
                    at = [f.gep(p, f.mul(k, tile.width), tile.scalar) for p in here]
                    return _add(f, tile, places, at, many, acc)

                return body

            if unroll == run:
                acc = _add(f, tile, lines, here, unroll, acc)
            else:
                whole = f.and_(self.run, -unroll) if unroll > 1 else "0"
                if unroll > 1:
                    acc = f.loop(0, whole, unroll, [(tile.vector, x) for x in acc], steps(unroll))
                acc = f.loop(whole, self.run, 1, [(tile.vector, x) for x in acc], steps(1))
            lines = [f.gep(p, self.step, tile.scalar) for p in lines]
            return [*lines, *(f.gep(p, f.mul(self.run, tile.width), tile.scalar) for p in here), *acc]

        state = [*(("ptr", p) for p in (*starts, *pointers)), *_zeros(tile, count)]
        return f.loop(0, self.pieces, 1, state, piece)[count + np :]


def _zeros(tile: Tile, count: int) -> list[tuple[str, str]]:
    return [(tile.vector, "zeroinitializer")] * (count * tile.panels * tile.width // tile.lanes)


def _add(f: Function, tile: Tile, rows: list[str], panels: list[str], count: int, acc: list[str]) -> list[str]:
    """Adds `count` steps, whose elements of A are at `rows`, to the sums."""
    size, per_panel = size_of(tile.scalar), tile.width // tile.lanes
    vectors, acc = per_panel * len(panels), list(acc)
    for k in range(count):
        b = [
            f.load(tile.vector, f.offset(panels[j // per_panel], (k * tile.width + j % per_panel * tile.lanes) * size))
            for j in range(vectors)
        ]
        for i, row in enumerate(rows):
            x = f.splat(f.load(tile.scalar, f.offset(row, k * size)), tile.lanes)
            for j in range(vectors):
                total = f.fma(x, b[j], acc[i * vectors + j], tile.vector)
                acc[i * vectors + j] = tile.ordered(f, total) if count > 1 else total
    return acc


def suits(epilogue: Epilogue) -> bool:
    """Whether the epilogue of sums of f32 is worth registers: some, but no function of many operations."""
    simple = not epilogue.plain and not is_costly(epilogue.expr)
    return epilogue.sums.name == "f32" and epilogue.columns_together and simple


def emit_tiles(
    emitter: Emitter,
    epilogue: Epilogue,
    tile: Tile,
    rows: Rows,
    height: int,
    panels: Panels,
    pixels: tuple[str, str],
    first: str,
    columns: str,
    *,
    last: int = 0,
) -> None:
    """Emits the results of the pixels (at least `height`, the rows of a tile) in `columns` channels from `first`.

    Columns are whole groups of panels, or `last` (a multiple of 8) that a single group covers. Rows are numbered from
    the first pixel. The last tile of rows overlaps the one before it. Sums are those of `gemm.gemm_block` for so few
    steps.
    """
    f, width = emitter.f, tile.width
    q0, q1 = pixels
    count, group = f.sub(q1, q0), tile.panels * width
    widths = [min((last or group) - c, tile.lanes) for c in range(0, last or group, tile.lanes)]
    top = Scope(1, None, {})
    emitter.hoist(epilogue.expr, frozenset((epilogue.column, *epilogue.rows)), top)
    touched = [epilogue.destination, *epilogue.streams()]
    fetched = f.mul(f.and_(panels.depth, -tile.unroll), tile.fetched // size_of(tile.scalar))  # elements, by a tile

    def some_panels(n: str, _: list[str]) -> None:
        panel = f.gep(panels.b, f.mul(f.div(n, width), panels.stride), tile.scalar)
        coming = f.gep(panel, f.mul(panels.stride, tile.panels), tile.scalar)
        wanted = f.select(f.cmp("lt", f.add(n, group), columns), f.mul(panels.depth, width), 0)
        shared: list[tuple[str, Scope]] = []
        for j, w in enumerate(widths):
            channel = f.add(f.add(first, n), j * tile.lanes)
            scope = top.inner({epilogue.column: channel}, w, epilogue.column)
            emitter.hoist(epilogue.expr, frozenset(epilogue.rows), scope)
            shared.append((channel, scope))

        def some_rows(i: str, state: list[str]) -> list[str]:
            (done,) = state
            row = f.min(i, f.sub(count, height))
            number = f.add(q0, row)
            places = [epilogue.row(emitter, top, f.add(number, r) if r else number) for r in range(height)]
            for place in places:
                at = place.inner({epilogue.column: shared[0][0]}, widths[0], epilogue.column)
                for x in touched:
                    f.prefetch(emitter.address(x, at), write=x is epilogue.destination)
            # once the coming panel is fetched, or where there is none, it is the next rows of A that are wanted
            below = rows.at(f, tile, f.min(f.add(row, height), f.sub(count, 1)))
            ahead = f.select(f.cmp("lt", done, wanted), f.gep(coming, done, tile.scalar), below, "ptr")
            sums = rows.sums(f, tile, row, height, panels, panel, ahead)
            for r, place in enumerate(places):
                for j, (w, (channel, scope)) in enumerate(zip(widths, shared, strict=True)):
                    value = sums[r * len(shared) + j]
                    value = value if w == tile.lanes else f.shuffle(value, None, list(range(w)))
                    epilogue.put(emitter, place, channel, value, w, scope)
            return [f.add(done, fetched)]

        f.loop(0, count, height, [("i64", 0)], some_rows)

    f.loop(0, columns, group, [], some_panels)
