"""Loop nests: map, row, reduce and copy kernels as explicit vector code.

A store of a kernel becomes one function. Outer loops run over rows; the loop over the last axis runs in vectors of the
host's width with a scalar tail. Each sub-expression is computed in the outermost loop that it depends on, so the
reductions of a softmax or a layer norm run once a row. A reduction whose elements lie side by side runs in vectors
along its own loop instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu import reductions, scalar
from rlx.backends.cpu.builder import Function, Module
from rlx.backends.cpu.cuts import Grid
from rlx.backends.cpu.emitter import ARGS, PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.interior import drop_tests, index_tests, interior
from rlx.backends.cpu.loops import (
    flatten,
    is_costly,
    linear_load,
    merge_loops,
    merge_reduces,
    rename_reduces,
    total_weight,
    unroll,
    weight,
)
from rlx.backends.cpu.reductions import is_short
from rlx.backends.cpu.tiles import emit_tile, tile_axis
from rlx.backends.cpu.words import Computed, KernelCode, WordTable
from rlx.ir.shape import Size, ceildiv
from rlx.kernels.affine import affine
from rlx.kernels.expr import Expr, Load, Reduce, Var, loads, substitute_vars, transform, walk
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Kernel, Store

__all__ = ["PLACEHOLDER", "Emitter", "Scope", "emit_nest", "linear_load", "merge_loops", "name_kernel"]

LONG = 4096  # elements of a row from which on a scalar rest costs next to nothing


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


def _keep(
    store: Store, emitter: Emitter, expr: Expr, target: Expr, outer: Sequence[Var], last: Var, size: Size
) -> Expr:
    """Computes costly parts that a sum and the stored element share once: the sum stores them in the output row.

    As in a softmax, whose exponentials are summed and then scaled. Returns the expression that reads them back.
    """
    dtype = store.buffer.dtype
    if dtype.name not in ("f32", "f64") or affine(target).coefs.get(last) != 1:
        return expr
    reduces = [x for x in walk(expr) if isinstance(x, Reduce)]
    reduced = {load.source.base for x in reduces for load in loads(x.body)}
    if any(load.source.base.kind in ("arena", "state") and load.source.base not in reduced for load in loads(expr)):
        return expr  # the output may lie on such an operand
    for x in reduces:
        whole = len(x.vars) == 1 and x.extents[0] == size and emitter.depends(x) == frozenset(outer)
        if not whole or x.kind.startswith("arg") or not reductions.side_by_side(emitter, x):
            continue
        var = x.vars[0]
        parts = [p for p in walk(x.body) if p.dtype is dtype and var in emitter.depends(p) and is_costly(p)]
        back = Load(store.buffer, (target,), dtype)
        for part in reversed(parts):  # the largest first
            changed = _replaced(expr, substitute_vars(part, {var: last}), back)
            if changed != expr:
                kept = Load(store.buffer, (substitute_vars(target, {last: var}),), dtype)
                emitter.kept[x] = (part, kept)
                return changed
    return expr


def _replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    return transform(expr, lambda e: new if e == old else None)


def _sharing(expr: Expr, emitter: Emitter, names: Sequence[Var]) -> Var | None:
    """The outer axis whose elements share reductions that differ along the last one, as in a norm over columns."""
    *outer, last = names
    inside = [x for x in walk(expr) if isinstance(x, Reduce) and last in emitter.depends(x) and not is_short(x)]
    found = [v for v in outer if not any(v in emitter.depends(x) for x in inside)]
    return found[-1] if inside and found else None


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
    if last is not None:
        expr = unroll(expr, last, emitter.depends)
    shared = [x for x in walk(expr) if isinstance(x, Reduce) and last is not None and last not in emitter.depends(x)]
    hoisted = bool(shared)
    a_turn, a_row = weight(expr, shared), total_weight(shared)
    if last is not None and hoisted:
        expr = _keep(store, emitter, expr, target, outer, last, last_size)
    over = any(load.source.base is store.buffer.base for load in loads(expr))
    again = not over and not Kernel("", (store,)).in_place_operands()  # elements may be computed twice
    axis = tile_axis(expr, target, names, sizes, lanes) if by_lanes and again else None
    if axis is not None:  # a turn of the row loop is a row of tiles
        at = names.index(axis)
        outer = [*names[:at], *names[at + 1 : -1], axis]
        outer_sizes = [*sizes[:at], *sizes[at + 1 : -1], ceildiv(sizes[at], lanes)]
        a_turn = a_turn * lanes
    turn = _sharing(expr, emitter, names) if by_lanes and again and axis is None and not hoisted else None
    turns: Size = 1
    if turn is not None:  # it becomes the innermost loop: what its elements share is computed once for each vector
        at = names.index(turn)
        turns = sizes[at]
        outer, outer_sizes = [*names[:at], *names[at + 1 : -1]], [*sizes[:at], *sizes[at + 1 : -1]]
        common = [x for x in walk(expr) if isinstance(x, Reduce) and turn not in emitter.depends(x)]
        a_turn = turns * weight(expr, common) + total_weight(common)
    grid = Grid(tuple(outer_sizes), last_size, a_turn, a_row, hoisted)

    destination = Load(store.buffer, (target,), store.buffer.dtype)
    emitter.preload([expr, destination], [*sizes, *outer_sizes, turns])
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

    def put(scope: Scope, value: Expr) -> None:
        if turn is None:
            put_one(scope, value)
            return
        emitter.hoist(value, frozenset((turn,)), scope)
        f.loop(0, emitter.size(turns), 1, [], lambda i, _: put_one(scope.inner({turn: i}), value))

    def put_one(scope: Scope, value: Expr) -> None:
        text = scalar.to_memory(f, emitter.lanes_of(value, scope), store.buffer.dtype, scope.width)
        emitter.store(destination, text, scope)

    tests = (
        {}
        if last is None or hoisted or turn is not None or (isinstance(last_size, int) and last_size < lanes)
        else index_tests(expr, last)
    )
    inside = drop_tests(expr, tests)
    emitter.preload([inside], [])  # its indices are simpler: they may have sizes of their own

    # the elements left over by vectors; None where it is not known or there are no vectors. Chunks are multiples of 64.
    rest = last_size % lanes if isinstance(last_size, int) and last_size >= lanes else None
    small = isinstance(last_size, int) and last_size < LONG

    def whole(scope: Scope, last: Var, rest: int) -> None:
        """A row in vectors alone: the last one overlaps the one before it."""

        def at(i: str) -> Scope:
            return scope.inner({last: i}, lanes, last)

        if rest == 0:
            f.loop(column0, column1, lanes, [], lambda i, _: put(at(i), expr))
            return
        end = f.sub(column1, lanes, "i64")
        if again and not emitter.kept:
            f.loop(column0, column1, lanes, [], lambda i, _: put(at(f.min(i, end)), expr))
            return
        final = at(end)  # before the elements that it reads are written
        emitter.lanes_of(expr, final)
        vectors = f.sub(column1, rest, "i64")
        f.loop(column0, vectors, lanes, [], lambda i, _: put(at(i), expr))
        put(final, expr)

    def tiles(axis: Var, last: Var, indices: list[str]) -> None:
        at = f.min(f.mul(indices[-1], lanes, "i64"), f.sub(emitter.size(sizes[names.index(axis)]), lanes, "i64"))
        scope = top.inner(dict(zip(outer, [*indices[:-1], at], strict=True)))
        emitter.hoist(expr, frozenset((axis, last)), scope)
        emitter.hoist(destination, frozenset((axis, last)), scope)
        end = f.sub(column1, lanes, "i64")

        def turn(i: str, _: list[str]) -> None:
            emit_tile(emitter, expr, axis, last, scope, f.min(i, end), lambda tile: put(tile, expr))

        f.loop(column0, column1, lanes, [], turn)

    def row(indices: list[str]) -> None:
        if axis is not None and last is not None:
            tiles(axis, last, indices)
            return
        scope = top.inner(dict(zip(outer, indices, strict=True)))
        if last is None:
            put(scope, expr)
            return
        inner = frozenset((last,) if turn is None else (last, turn))
        emitter.hoist(expr, inner, scope)
        emitter.hoist(destination, inner, scope)

        def span(start: str, stop: str) -> None:
            vectors = f.sub(stop, f.rem(f.sub(stop, start, "i64"), lanes, "i64"), "i64")
            f.loop(start, vectors, lanes, [], lambda i, _: put(scope.inner({last: i}, lanes, last), expr))
            f.loop(vectors, stop, 1, [], lambda i, _: put(scope.inner({last: i}, 1, None), expr))

        if not tests:
            if rest is None or (rest and not hoisted and not (again and small)):
                span(column0, column1)
            else:
                whole(scope, last, rest)
            return
        low, high = interior(emitter, tests, last, column0, column1, scope)
        high = f.select(f.cmp("lt", f.sub(high, low, "i64"), lanes, "i64"), low, high, "i64")
        if not again:
            high = f.sub(high, f.rem(f.sub(high, low, "i64"), lanes, "i64"), "i64")

        def within() -> None:  # only where there is an interior: without the tests, its row may not be read
            end, area = f.sub(high, lanes, "i64"), scope.inner({})
            emitter.hoist(inside, inner, area)
            f.loop(low, high, lanes, [], lambda i, _: put(area.inner({last: f.min(i, end)}, lanes, last), inside))

        f.if_(f.cmp("lt", low, high, "i64"), within)

        def border(side: str, _: list[str]) -> None:
            left = f.cmp("eq", side, 0, "i64")
            span(f.select(left, column0, high, "i64"), f.select(left, low, column1, "i64"))

        f.loop(0, 2, 1, [], border)

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
