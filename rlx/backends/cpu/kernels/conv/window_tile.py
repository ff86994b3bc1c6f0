"""The register tile of convolutions whose windows are read where they lie, piece by piece."""

from __future__ import annotations

from rlx.backends.cpu.gemm.tile import HALF, Tile, put_tile
from rlx.backends.cpu.llvm.builder import Function, size_of

__all__ = ["window_tile"]


def window_tile(tile: Tile, rows: int, panels: int) -> Function:
    """A tile of results: rows x panels panels over `pieces` pieces of `run` steps; panels 0: half a panel.

    `(ptr a, ptr offsets, i64 step, i64 pieces, i64 run, ptr b, i64 stride, ptr c, i64 ldc, i64 n, i64 add, ptr next)`:
    `step` is from piece to piece, `stride` from panel to panel, `n` the columns of C that exist, `add` whether C is
    added to or set, `next` the memory to prefetch.
    """
    ty, v, lanes, size = tile.scalar, tile.vector, tile.lanes, size_of(tile.scalar)
    per_panel = tile.width // lanes
    vectors = per_panel // 2 if panels == HALF else per_panel * panels
    unroll = tile.unroll
    numbers = ("step", "pieces", "run")
    f = Function(
        f"rlx_direct_{tile.name}_{rows}x{panels or 'half'}",
        [
            ("ptr", "a"),
            ("ptr", "offsets"),
            *(("i64", i) for i in numbers),
            ("ptr", "b"),
            ("i64", "stride"),
            ("ptr", "c"),
            ("i64", "ldc"),
            ("i64", "n"),
            ("i64", "add"),
            ("ptr", "next"),
        ],
        shared=True,
        attrs="nounwind noinline",
    )
    c_rows = ["%c"]
    for _ in range(rows - 1):
        c_rows.append(f.gep(c_rows[-1], "%ldc", ty))
    for row in c_rows:
        f.prefetch(row, write=True)
    starts = [f.gep("%a", f.load("i64", f.gep("%offsets", i, "i64")), ty) for i in range(rows)]
    panel_step = f.mul("%stride", size)
    whole = f.and_("%run", -unroll)

    def steps(count: int, k: str, windows: list[str], state: list[str]) -> list[str]:
        b, ahead, acc = state[0], state[1], state[2:]
        for line in range(0, count * tile.fetched if count > 1 else 0, 64):
            f.prefetch(f.offset(ahead, line), locality=2)
        for i in range(count):
            panel = [b]
            for _ in range(max(panels, 1) - 1):
                panel.append(f.offset(panel[-1], panel_step))
            y = [
                f.load(v, f.offset(panel[j // per_panel], (i * tile.width + j % per_panel * lanes) * size))
                for j in range(vectors)
            ]
            for r in range(rows):
                x = f.splat(f.load(ty, f.offset(f.gep(windows[r], k, ty), i * size)), lanes)
                for j in range(vectors):
                    total = f.fma(x, y[j], acc[r * vectors + j], v)
                    acc[r * vectors + j] = tile.ordered(f, total) if count > 1 else total
        coming = f.offset(ahead, count * tile.fetched) if count > 1 else ahead
        return [f.offset(b, count * tile.width * size), coming, *acc]

    def piece(_: str, state: list[str]) -> list[str]:
        windows, inner = state[:rows], state[rows:]

        def typed(values: list[str]) -> list[tuple[str, str]]:
            return [("ptr", values[0]), ("ptr", values[1]), *((v, x) for x in values[2:])]

        inner = f.loop(0, whole, unroll, typed(inner), lambda k, s: steps(unroll, k, windows, s))
        inner = f.loop(whole, "%run", 1, typed(inner), lambda k, s: steps(1, k, windows, s))
        return [*(f.gep(p, "%step", ty) for p in windows), *inner]

    state: list[tuple[str, str]] = [("ptr", p) for p in (*starts, "%b", "%next")]
    state += [(v, "zeroinitializer")] * (rows * vectors)
    acc = f.loop(0, "%pieces", 1, state, piece)[rows + 2 :]
    put_tile(f, tile, acc, c_rows, "%n", f.cmp("ne", "%add", 0))
    f.ret()
    return f
