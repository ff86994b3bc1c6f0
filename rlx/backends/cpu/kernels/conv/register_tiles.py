"""The tiles of convolutions: of windows that are read where they lie, and with an epilogue in registers.

Where K is small, storing a block of sums and reading it again for the epilogue costs as much as the product: C is
written once.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.accumulators import Fetch, Panels, Rows, Windows
from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.tile import HALF, Tile
from rlx.backends.cpu.llvm.builder import Function, arguments_of, size_of
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.kernels.loops.analysis import is_costly

__all__ = ["emit_tiles", "suits", "window_tile"]


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
    weights: tuple[str, str],
    pixels: tuple[str, str],
    first: str,
    columns: str,
    *,
    last: int = 0,
) -> None:
    """Emits the results of the pixels (at least `height`, the rows of a tile) in `columns` channels from `first`.

    `weights` are the address of the first panel and the steps of k.
    Columns are whole groups of panels, or `last` (a multiple of 8) that a single group covers. Rows are numbered from
    the first pixel. The last tile of rows overlaps the one before it. Sums are those of `gemm.gemm_block` for so few
    steps.
    """
    f, width = emitter.f, tile.width
    (b, depth), (q0, q1) = weights, pixels
    stride = f.mul(depth, width)
    near = 3 if tile.lanes == width else 2  # AVX-512 waits for rows of A that are in the second cache
    count, group = f.sub(q1, q0), tile.panels * width
    widths = [min((last or group) - c, tile.lanes) for c in range(0, last or group, tile.lanes)]
    top = Scope(1, None, {})
    emitter.hoist(epilogue.expr, frozenset((epilogue.column, *epilogue.rows)), top)
    touched = [epilogue.destination, *epilogue.streams()]
    fetched = f.mul(f.and_(depth, -tile.unroll), tile.fetched // size_of(tile.scalar))  # elements, by a tile

    def some_panels(n: str, _: list[str]) -> None:
        panel = f.gep(b, f.mul(f.div(n, width), stride), tile.scalar)
        panels = Panels.of(f, tile, panel, stride)
        coming = f.gep(panel, f.mul(stride, tile.panels), tile.scalar)
        wanted = f.select(f.cmp("lt", f.add(n, group), columns), stride, 0)
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
            sums = rows.sums(f, tile, row, height, panels, Fetch(ahead, near)).values
            for r, place in enumerate(places):
                for j, (w, (channel, scope)) in enumerate(zip(widths, shared, strict=True)):
                    value = sums[r * len(shared) + j]
                    value = value if w == tile.lanes else f.shuffle(value, None, list(range(w)))
                    epilogue.put(emitter, place, channel, value, w, scope)
            return [f.add(done, fetched)]

        f.loop(0, count, height, [("i64", 0)], some_rows)

    f.loop(0, columns, group, [], some_panels)


def window_tile(tile: Tile, rows: int, panels: int) -> Function:
    """A tile of results: rows x panels panels over `pieces` pieces of `run` steps; panels 0: half a panel.

    `(ptr a, ptr offsets, i64 step, i64 pieces, i64 run, ptr b, i64 stride, ptr c, i64 ldc, i64 n, i64 add, ptr next)`:
    `step` is from piece to piece, `stride` from panel to panel, `n` the columns of C that exist, `add` whether C is
    added to or set, `next` the memory to prefetch.
    """
    per_panel = tile.width // tile.lanes
    f = Function(
        f"rlx_direct_{tile.name}_{rows}x{panels or 'half'}",
        arguments_of(
            "ptr a, ptr offsets, i64 step, i64 pieces, i64 run, ptr b, i64 stride, ptr c, i64 ldc, i64 n, i64 add, "
            "ptr next"
        ),
        shared=True,
        attrs="nounwind noinline",
    )
    c_rows = ["%c"]
    for _ in range(rows - 1):
        c_rows.append(f.gep(c_rows[-1], "%ldc", tile.scalar))
    for row in c_rows:
        f.prefetch(row, write=True)
    windows = Windows("%a", "%offsets", "%step", "%pieces", "%run", fetches=True)
    b = Panels.of(f, tile, "%b", "%stride", per_panel // 2 if panels == HALF else per_panel * panels)
    windows.sums(f, tile, 0, rows, b, Fetch("%next")).put(c_rows, "%n", f.cmp("ne", "%add", 0))
    f.ret()
    return f
