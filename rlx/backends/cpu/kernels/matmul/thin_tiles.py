"""Sums of products with few rows that stay in registers all along k, where a few rows of k are read side by side.

    sums[i, j] = sum over k of few[i, k] * many[k, j]        i: up to 4 rows; j: up to 4 vectors of columns

Neither operand is copied, and sums are stored once. Strips of sums (`thin_sums`) read one row of k after the other, as
memory has them; here a row is left after a few vectors and is read again for further rows of sums. The bits are the
same.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.kernels.matmul.thin_types import Types
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, arguments_of, size_of, vec, void

__all__ = ["emit_tiles"]

MOST_VECTORS = 4  # of a row of a tile
ARGUMENTS = (
    "ptr many, i64 step, ptr few, i64 few_step, i64 k_step, ptr out, i64 ldc, i64 n, i64 k, i64 block, i64 vectors"
)


def emit_tiles(f: Function, types: Types, tile: Tile, counts: list[int], together: int) -> None:
    """Emits all sums, of the arguments of `thin_sums.routine`, `together` rows at a time; `counts` may be left of them.

    Vectors of columns that are no two whole tiles make two even ones.
    """
    ty, few, many, lanes = types.scalar, *(convert.memory_type(d) for d in (types.few, types.many)), types.lanes
    most = min((tile.registers - 1) // (max(counts) + 1), MOST_VECTORS)
    tiles = {rows: _tile(types, tile, rows, most) for rows in counts}

    def some_columns(state: list[str]) -> list[str]:
        (j,) = state
        left = f.sub("%columns", j)
        vectors = f.div(f.add(left, lanes - 1), lanes)
        half = f.div(f.add(vectors, 1), 2)
        vectors = f.select(f.cmp("ge", vectors, 2 * most), most, f.select(f.cmp("gt", vectors, most), half, vectors))
        n = f.min(left, f.mul(vectors, lanes))

        def some_rows(first: str, _: list[str]) -> None:
            rows, source = f.gep("%few", f.mul(first, "%few_step"), few), f.gep("%many", j, many)
            operands = [source, "%step", rows, "%few_step", "%k_step"]
            operands += [f.gep("%out", f.add(f.mul(first, "%line"), j), ty), "%line", n, "%k", "%block", vectors]

            def call(count: int) -> Callable[[], None]:
                return lambda: void(f.call(tiles[count], operands))

            f.switch(f.min(f.sub("%rows", first), together), {count: call(count) for count in counts})

        f.loop(0, "%rows", together, [], some_rows)
        return [f.add(j, n)]

    f.while_([("i64", 0)], lambda state: f.cmp("lt", state[0], "%columns"), some_columns)


def _tile(types: Types, tile: Tile, rows: int, most: int) -> Function:
    """`ARGUMENTS`: the sums of so many rows in n columns, which are up to `most` vectors; the last may not be full."""
    ty, few, many, lanes = types.scalar, *(convert.memory_type(d) for d in (types.few, types.many)), types.lanes
    names = "_".join([types.streamed, types.few.name])
    f = Function(
        f"rlx_thin_tile_{names}x{lanes}_{rows}", arguments_of(ARGUMENTS), shared=True, attrs="nounwind noinline"
    )
    out = [f.gep("%out", f.mul("%ldc", i), ty) if i else "%out" for i in range(rows)]
    row_step = f.mul("%few_step", size_of(few))
    row_steps = [f.mul(row_step, i) if i else "0" for i in range(rows)]

    def sums(vectors: int) -> None:
        mask = f.mask_below(f.sub("%n", (vectors - 1) * lanes), lanes, f"i{min(8 * types.many.itemsize, 32)}")

        def block(k0: str, _: list[str]) -> None:
            total = Accumulators(f, tile, rows, vectors)

            def step(_: str, at: list[str]) -> list[str]:
                element, line = at

                def a(i: int) -> str:
                    x = f.load(few, f.offset(element, row_steps[i]) if i else element)
                    return f.splat(types.widened(f, x, types.few, 1), lanes)

                def b(j: int) -> str:
                    p, v = f.gep(line, j * lanes, many), vec(many, lanes)
                    x = f.load(v, p) if j < vectors - 1 else f.masked_load(v, p, mask)
                    return types.widened(f, x, types.many, lanes)

                total.add(a, b)
                return [f.gep(element, "%k_step", few), f.gep(line, "%step", many)]

            starts = [f.gep("%few", f.mul(k0, "%k_step"), few), f.gep("%many", f.mul(k0, "%step"), many)]
            total.loop(k0, f.min(f.add(k0, "%block"), "%k"), 1, starts, step)
            total.put(out, "%n", f.cmp("gt", k0, 0))

        f.loop(0, f.max("%k", 1), "%block", [], block)

    f.switch("%vectors", {count: (lambda count=count: sums(count)) for count in range(1, most + 1)})  # type: ignore[misc]
    f.ret()
    return f
