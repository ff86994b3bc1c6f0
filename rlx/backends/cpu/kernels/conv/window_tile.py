"""The tile of convolutions whose windows are read where they lie, piece by piece."""

from __future__ import annotations

from rlx.backends.cpu.gemm.accumulators import Fetch, Panels, Windows
from rlx.backends.cpu.gemm.tile import HALF, Tile
from rlx.backends.cpu.llvm.builder import Function, arguments_of

__all__ = ["window_tile"]


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
