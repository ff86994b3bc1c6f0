"""Loop nests: map, row, reduce and copy kernels as explicit vector code.

A store of a kernel becomes one function. Outer loops run over rows; the loop over the last axis runs in vectors of the
host's width with a scalar tail. Each sub-expression is computed in the outermost loop that it depends on, so the
reductions of a softmax or a layer norm run once a row. A reduction whose elements lie side by side runs in vectors
along its own loop instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu import scalar
from rlx.backends.cpu.builder import Function, Module
from rlx.backends.cpu.emitter import ARGS, PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.loops import Grid, flatten, linear_load, merge_loops, merge_reduces, rename_reduces, weight
from rlx.backends.cpu.reductions import is_short
from rlx.backends.cpu.words import Computed, KernelCode, WordTable
from rlx.ir.shape import Size
from rlx.kernels.affine import affine
from rlx.kernels.expr import Expr, Load, Reduce, Var, walk
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Store

__all__ = ["PLACEHOLDER", "Emitter", "Scope", "emit_nest", "linear_load", "merge_loops", "name_kernel"]


def _lanes_last(emitter: Emitter, expr: Expr, target: Expr, last: Var) -> bool:
    """Whether vectors should run along the last output axis rather than along the reductions inside."""
    good = bad = 0
    for x in walk(expr):
        if not isinstance(x, Reduce) or last not in emitter.depends(x) or is_short(x):
            continue
        for load in walk(x.body):
            if isinstance(load, Load):
                form = affine(load.indices[0])
                step, along = form.coefs.get(last, 0), form.coefs.get(x.vars[-1], 0) if x.vars else 0
                good += step in (0, 1)
                bad += step not in (0, 1) and along == 1
    return bad == 0 or good > bad


def emit_nest(store: Store, lanes: int) -> KernelCode:
    """The code of one store of a loop-nest kernel. `lanes`: f32 elements in a vector register."""
    extents, target, expr = flatten(store)
    names = list(out_vars(len(extents)))
    names, sizes, (expr,), target = merge_loops(names, list(extents), [expr], target)
    expr = rename_reduces(merge_reduces(expr))
    f = Function(PLACEHOLDER, ARGS)
    table = WordTable()
    emitter = Emitter(f, table, lanes)
    by_lanes = bool(names) and _lanes_last(emitter, expr, target, names[-1])
    outer = names[:-1] if by_lanes else names
    outer_sizes = sizes[: len(outer)]
    last, last_size = (names[-1], sizes[-1]) if by_lanes else (None, 1)
    hoisted = last is not None and any(isinstance(x, Reduce) and last not in emitter.depends(x) for x in walk(expr))
    grid = Grid(tuple(outer_sizes), last_size, weight(expr), hoisted)

    destination = Load(store.buffer, (target,), store.buffer.dtype)
    emitter.preload([expr, destination], sizes)
    words = [table.load(f, Computed(fn)) for fn in (grid.rows, grid.row_chunk, grid.columns, grid.column_chunk)]
    rows, row_chunk, columns, column_chunk = words
    column_chunks = table.load(f, Computed(grid.column_chunks))
    at_row = f.binary("udiv", "%chunk", column_chunks, "i64")
    at_column = f.binary("urem", "%chunk", column_chunks, "i64")
    row0 = f.mul(at_row, row_chunk, "i64")
    row1 = f.min(f.add(row0, row_chunk, "i64"), rows, "i64")
    column0 = f.mul(at_column, column_chunk, "i64")
    column1 = f.min(f.add(column0, column_chunk, "i64"), columns, "i64")

    top = Scope(1, None, {})
    emitter.hoist(expr, frozenset(names), top)

    def put(scope: Scope) -> None:
        value = emitter.lanes_of(expr, scope)
        w = scope.width
        text = scalar.to_memory(f, value, store.buffer.dtype, w)
        emitter.store(destination, text, scope)

    def row(indices: list[str]) -> None:
        scope = top.inner(dict(zip(outer, indices, strict=True)))
        if last is None:
            put(scope)
            return
        inner = frozenset((last,))
        emitter.hoist(expr, inner, scope)
        emitter.hoist(destination, inner, scope)
        vectors = f.sub(column1, f.rem(f.sub(column1, column0, "i64"), lanes, "i64"), "i64")
        f.loop(column0, vectors, lanes, [], lambda i, _: put(scope.inner({last: i}, lanes, last)))
        f.loop(vectors, column1, 1, [], lambda i, _: put(scope.inner({last: i}, 1, None)))

    _row_loop(f, emitter, outer_sizes, row0, row1, row)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), grid.chunks, tuple(emitter.sites))


def _row_loop(
    f: Function, emitter: Emitter, sizes: Sequence[Size], start: str, stop: str, row: Callable[[list[str]], None]
) -> None:
    """Runs `row` for each row number in [start, stop) with the indices of the outer loops (an odometer)."""
    if len(sizes) <= 1:
        f.loop(start, stop, 1, [], lambda i, _: row([i] if sizes else []))
        return
    first: list[str] = []
    rest = start
    for size in reversed(sizes[1:]):
        text = emitter.size(size)
        first.insert(0, f.binary("urem", rest, text, "i64"))
        rest = f.binary("udiv", rest, text, "i64")
    first.insert(0, rest)

    def turn(_: str, indices: list[str]) -> list[str]:
        row(indices)
        after = list(indices)
        carry = "1"
        for d in range(len(sizes) - 1, 0, -1):
            bumped = f.add(indices[d], carry, "i64")
            wrapped = f.cmp("eq", bumped, emitter.size(sizes[d]), "i64")
            after[d] = f.select(wrapped, 0, bumped, "i64")
            carry = f.cast("zext", wrapped, "i64", "i1")
        after[0] = f.add(indices[0], carry, "i64")
        return after

    f.loop(start, stop, 1, [("i64", i) for i in first], turn)
