"""Loop nests: map, row, reduce and copy kernels as explicit vector code.

A store of a kernel becomes one function. Outer loops run over rows; the loop over the last axis runs in vectors of the
host's width with a scalar tail. Each sub-expression is computed in the outermost loop that it depends on, so the
reductions of a softmax or a layer norm run once a row. A reduction whose elements lie side by side runs in vectors
along its own loop instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, vec
from rlx.backends.cpu.loops import reductions
from rlx.backends.cpu.loops.emitter import ARGS, PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.loops.interior import drop_tests, index_tests, interior, outside_of
from rlx.backends.cpu.loops.looks import is_long, looking_loop
from rlx.backends.cpu.loops.reductions import is_short
from rlx.backends.cpu.loops.transpose import emit_tile, tile_axis
from rlx.backends.cpu.schedule.arguments import ArgumentTable, KernelCode, Part, once, part
from rlx.backends.cpu.schedule.base import Grid
from rlx.ir.shape import Size, ceildiv
from rlx.kernels.affine import affine
from rlx.kernels.expr import Expr, Load, Reduce, Var, children, loads, substitute_vars, transform, walk
from rlx.kernels.loops.analysis import (
    flatten,
    is_costly,
    merge_loops,
    merge_reduces,
    rename_reduces,
    total_weight,
    unroll,
    weight,
)
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Kernel, Store

__all__ = ["emit_nest"]

FEW_LANES = 4  # that are worth vectors, where rows have no more elements
SHARED = 24  # simple operations that are worth computing once for a whole axis
COPIED = 32 << 10  # bytes of a row from which on the C library copies it faster than vectors do
COPIED_BYTES = 512  # the same where an element is a byte: vectors have no more of them than of wide ones
LONG = 4096  # elements of a row from which on a scalar rest costs next to nothing


def _lanes_last(emitter: Emitter, expr: Expr, last: Var) -> bool:
    """Whether vectors should run along the last output axis rather than along the reductions inside."""
    good = bad = 0
    for x in walk(expr):
        if not isinstance(x, Reduce) or last not in emitter.depends(x) or is_short(x, emitter.lanes):
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
        for costly in reversed(parts):  # the largest first
            changed = _replaced(expr, substitute_vars(costly, {var: last}), back)
            if changed != expr:
                kept = Load(store.buffer, (substitute_vars(target, {last: var}),), dtype)
                emitter.kept[x] = (costly, kept)
                return changed
    return expr


def _replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    return transform(expr, lambda e: new if e == old else None)


def _sharing(expr: Expr, emitter: Emitter, names: Sequence[Var], is_short_row: bool) -> Var | None:
    """The outer axis whose elements share what differs along the last one and takes long to compute.

    That is reductions, as in a norm over columns, or most of the work, as the channels of an image share the places at
    which it is sampled.
    """
    *outer, last = names
    inside = [
        x for x in walk(expr) if isinstance(x, Reduce) and last in emitter.depends(x) and not is_short(x, emitter.lanes)
    ]
    found = [v for v in outer if not any(v in emitter.depends(x) for x in inside)]
    if inside:
        return found[-1] if found else None
    if is_short_row:
        return None
    whole = weight(expr)
    shared = {v: sum(weight(x) for x in _apart(expr, emitter, v, last)) for v in outer}
    most = max(outer, key=lambda v: shared[v], default=None)
    return most if most is not None and shared[most] >= max(SHARED, whole / 2) else None


def _interleaved(emitter: Emitter, expr: Expr, target: Expr, names: Sequence[Var], sizes: Sequence[Size]) -> Var | None:
    """The axis whose elements lie as many apart as the last axis, of few elements, has.

    As of an image whose pixels come from several planes, or of rows that are shorter than a vector and reduced.
    """
    count, form = sizes[-1], affine(target)
    reduces = [x for x in walk(expr) if isinstance(x, Reduce)]
    if form.coefs.get(names[-1]) != 1 or not isinstance(count, int):
        return None
    if not reduces and count not in (2, 4, 8):
        return None
    if reduces and not (1 < count < emitter.lanes and all(_is_of_row(emitter, x, names[-1]) for x in reduces)):
        return None
    return next((name for name in names[:-1] if form.coefs.get(name) == count), None)


def _is_of_row(emitter: Emitter, x: Reduce, last: Var) -> bool:
    """Whether a row shares it and it is written out, in the order of what fills no vector."""
    sizes = [s for s in x.extents if isinstance(s, int)]
    return last not in emitter.depends(x) and len(sizes) == len(x.extents) and 0 < prod(sizes) < emitter.lanes


def _apart(expr: Expr, emitter: Emitter, axis: Var, last: Var) -> set[Expr]:
    """The largest parts of an expression that are the same along the axis, and not along the last one."""
    found: set[Expr] = set()
    stack, seen = [expr], {expr}
    while stack:
        x = stack.pop()
        if axis not in emitter.depends(x) and not isinstance(x, Var):
            if last in emitter.depends(x):
                found.add(x)
            continue
        parts = [t for i in x.indices for t in affine(i).coefs] if isinstance(x, Load) else children(x)
        more = [*parts, *((x.where,) if isinstance(x, Load) and x.where is not None else ())]
        stack.extend(p for p in more if p not in seen)
        seen.update(more)
    return found


def emit_nest(store: Store, lanes: int) -> KernelCode:
    """The code of one store of a loop-nest kernel. `lanes`: f32 elements in a vector register."""
    return _Nest(store, lanes).code()


class _Nest:
    """The loops of one store: `outer` ones over rows, then `last` along a row, in vectors.

    `last` is None where vectors run along reductions. `axis` is the loop that goes by tiles together with `last`, and
    `turn` the one that became the innermost.
    """

    def __init__(self, store: Store, lanes: int) -> None:
        self.store, self.lanes = store, lanes
        self.f, self.table = Function(PLACEHOLDER, ARGS), ArgumentTable()
        self.emitter = emitter = Emitter(self.f, self.table, lanes)
        extents, target, expr = flatten(store)
        emitter.one_load = [type(x) for x in walk(expr) if isinstance(x, Load | Reduce)] == [Load]
        names = list(out_vars(len(extents)))
        names, sizes, (expr,), target = merge_loops(names, list(extents), [expr], target)
        expr = rename_reduces(merge_reduces(expr))
        by_lanes = bool(names) and _lanes_last(emitter, expr, names[-1])
        over = any(load.source.base is store.buffer.base for load in loads(expr))
        # whether elements may be computed twice
        self.again = not over and not Kernel("", (store,)).in_place_operands()
        along = _interleaved(emitter, expr, target, names, sizes) if by_lanes and self.again else None
        self.parts: tuple[Var, int] | None = None
        if along is not None:  # vectors run along that axis, and those of the last one are put between each other
            at, count = names.index(along), sizes[-1]
            assert isinstance(count, int)
            self.parts = (names[-1], count)
            names, sizes = [*names[:at], *names[at + 1 : -1], along], [*sizes[:at], *sizes[at + 1 : -1], sizes[at]]
        outer = names[:-1] if by_lanes else names
        outer_sizes = sizes[: len(outer)]
        last, last_size = (names[-1], sizes[-1]) if by_lanes else (None, 1)
        if last is not None:
            expr = unroll(expr, last, emitter.depends)
        shared = [
            x for x in walk(expr) if isinstance(x, Reduce) and last is not None and last not in emitter.depends(x)
        ]
        self.hoisted = bool(shared)
        if by_lanes and not shared and isinstance(last_size, int) and FEW_LANES <= last_size < lanes:
            self.lanes = emitter.lanes = lanes = 1 << (last_size.bit_length() - 1)  # sums are of a lane each
        a_turn, a_row = weight(expr, shared), total_weight(shared)
        if last is not None and self.hoisted:
            expr = _keep(store, emitter, expr, target, outer, last, last_size)
        self.axis = tile_axis(expr, target, names, sizes, lanes) if by_lanes and self.again else None
        if self.axis is not None:  # a turn of the row loop is a row of tiles
            at = names.index(self.axis)
            outer = [*names[:at], *names[at + 1 : -1], self.axis]
            outer_sizes = [*sizes[:at], *sizes[at + 1 : -1], ceildiv(sizes[at], lanes)]
            a_turn = a_turn * lanes
        simple = by_lanes and self.again and self.axis is None and not self.hoisted and self.parts is None
        a_turn = a_turn * (1 if self.parts is None else self.parts[1])
        short = isinstance(last_size, int) and last_size < self.lanes
        self.turn = _sharing(expr, emitter, names, short) if simple else None
        self.turns: Size = 1
        if self.turn is not None:  # what its elements share is computed once for each vector
            at = names.index(self.turn)
            self.turns = sizes[at]
            outer, outer_sizes = [*names[:at], *names[at + 1 : -1]], [*sizes[:at], *sizes[at + 1 : -1]]
            common = [x for x in walk(expr) if isinstance(x, Reduce) and self.turn not in emitter.depends(x)]
            a_turn = self.turns * weight(expr, common) + total_weight(common)
        self.cut = once(Grid(tuple(outer_sizes), last_size, a_turn, a_row, self.hoisted))
        self.names, self.sizes, self.outer, self.outer_sizes = names, sizes, outer, outer_sizes
        self.last, self.last_size, self.expr = last, last_size, expr
        self.destination = Load(store.buffer, (target,), store.buffer.dtype)
        self.top = Scope(1, None, {})

    def code(self) -> KernelCode:
        f, emitter, last, expr = self.f, self.emitter, self.last, self.expr
        emitter.preload([expr, self.destination], [*self.sizes, *self.outer_sizes, self.turns])
        row0, row1 = self.chunk()
        emitter.hoist(expr, frozenset((*self.names, *self.apart)), self.top)
        short = isinstance(self.last_size, int) and self.last_size < self.lanes
        tested = last is not None and not self.hoisted and self.turn is None and self.parts is None and not short
        self.tests = index_tests(expr, last) if tested and last is not None else {}
        self.inside = drop_tests(expr, self.tests)
        self.outside = outside_of(expr, self.tests) if self.again else None
        emitter.preload(
            [self.inside, *([] if self.outside is None else [self.outside])], []
        )  # its indices are simpler: they may have sizes of their own
        _row_loop(f, emitter, self.outer_sizes, row0, row1, self.row)
        f.ret()
        symbol, ir = name_kernel(Module([f]).text())
        return KernelCode(symbol, ir, tuple(self.table.words), Part(self.cut, "chunks"), tuple(emitter.sites))

    def chunk(self) -> tuple[str, str]:
        """The rows of this chunk; its columns are `column0` to `column1`."""
        f, names = self.f, ("rows", "row_chunk", "columns", "column_chunk", "column_chunks")
        words = [self.table.load(f, part(self.cut, name)) for name in names]
        rows, row_chunk, columns, column_chunk, column_chunks = words
        at_row = f.binary("udiv", "%chunk", column_chunks, "i64")
        at_column = f.binary("urem", "%chunk", column_chunks, "i64")
        row0 = f.mul(at_row, row_chunk, "i64")
        row1 = f.min(f.add(row0, row_chunk, "i64"), rows, "i64")
        self.column0 = f.mul(at_column, column_chunk, "i64")
        self.column1 = f.min(f.add(self.column0, column_chunk, "i64"), columns, "i64")
        return row0, row1

    def row(self, indices: list[str]) -> None:
        """One row of the chunk, or a row of tiles."""
        last, expr, emitter = self.last, self.expr, self.emitter
        if self.axis is not None and last is not None:
            self.tiles(self.axis, last, indices)
            return
        scope = self.top.inner(dict(zip(self.outer, indices, strict=True)))
        if last is None:
            self.put(scope, expr)
            return
        if self.is_copy:
            self.copy(scope, last)
            return
        inner = frozenset((last, *self.apart) if self.turn is None else (last, self.turn))
        emitter.hoist(expr, inner, scope)
        emitter.hoist(self.destination, inner, scope)
        if self.tests:
            self.bordered(scope, last, inner)
            return
        # the elements left over by vectors; None where it is not known or there are none. Chunks are multiples of 64.
        size = self.last_size
        rest = size % self.lanes if isinstance(size, int) and size >= self.lanes else None
        small = isinstance(size, int) and size < LONG
        if rest is None or (rest and not self.hoisted and not (self.again and small)):
            self.span(scope, last, self.column0, self.column1)
        else:
            self.whole(scope, last, rest)

    @property
    def is_copy(self) -> bool:
        """Whether rows are those of another buffer, and long."""
        x, size, last = self.expr, self.last_size, self.last
        if not isinstance(x, Load) or x.where is not None or last is None or self.turn is not None or not self.again:
            return False
        if x.dtype is not self.store.buffer.dtype or x.dtype.bits < 8 or x.source.encoding is not None:
            return False
        together = all(affine(i.indices[0]).coefs.get(last) == 1 for i in (x, self.destination))
        least = COPIED if x.dtype.itemsize > 1 else COPIED_BYTES
        return together and self.parts is None and isinstance(size, int) and size * x.dtype.itemsize >= least

    def copy(self, scope: Scope, last: Var) -> None:
        """The columns of the chunk, of one row, by the C library: it knows how the machine moves so many bytes."""
        f, at = self.f, scope.inner({last: self.column0})
        to, source = (self.emitter.address(x, at) for x in (self.destination, self.expr) if isinstance(x, Load))
        f.memcpy(to, source, f.mul(f.sub(self.column1, self.column0, "i64"), self.destination.dtype.itemsize, "i64"))

    def put(self, scope: Scope, value: Expr) -> None:
        """Stores elements at one place of the row, of all turns."""
        turn = self.turn
        if turn is None:
            self.put_one(scope, value)
            return
        self.emitter.hoist(value, frozenset((turn,)), scope)
        count = self.emitter.size(self.turns)
        self.f.loop(0, count, 1, [], lambda i, _: self.put_one(scope.inner({turn: i}), value))

    @property
    def apart(self) -> tuple[Var, ...]:
        """The variable of the vectors that are put between each other, if there are any."""
        return () if self.parts is None else self.parts[:1]

    def put_one(self, scope: Scope, value: Expr) -> None:
        if self.parts is not None:
            self.put_parts(scope, value, *self.parts)
            return
        text = convert.to_memory(self.f, self.emitter.lanes_of(value, scope), self.store.buffer.dtype, scope.width)
        self.emitter.store(self.destination, text, scope)

    def put_parts(self, scope: Scope, value: Expr, var: Var, count: int) -> None:
        """Stores elements of all parts, those of the first place of each before those of the second."""
        f, dtype, w = self.f, self.store.buffer.dtype, scope.width
        self.emitter.hoist(value, frozenset((var,)), scope)
        places = [scope.inner({var: str(j)}) for j in range(count)]
        parts = [convert.to_memory(f, self.emitter.lanes_of(value, at), dtype, w) for at in places]
        if w == 1 or count not in (2, 4, 8):
            for at, text in zip(places, parts, strict=True):
                self.emitter.store(self.destination, text, at)
            return
        while len(parts) > 1:
            half, size = len(parts) // 2, w * count // len(parts)
            order = [j // 2 + size * (j % 2) for j in range(2 * size)]
            parts = [f.shuffle(a, b, order) for a, b in zip(parts[:half], parts[half:], strict=True)]
        ty = vec(convert.memory_type(dtype), w * count)
        f.store(parts[0], self.emitter.address(self.destination, places[0]), ty=ty)

    def along(self, start: str, stop: str, step: int, body: Callable[[str, list[str]], None]) -> None:
        """A loop along a row, which is long only where it can't be split."""
        loop = looking_loop if self.hoisted and is_long(self.last_size) else Function.loop
        loop(self.f, start, stop, step, [], body)

    def span(self, scope: Scope, last: Var, start: str, stop: str) -> None:
        """Some columns of a row: vectors, then what is left one by one."""
        f, lanes, expr = self.f, self.lanes, self.expr
        vectors = f.sub(stop, f.rem(f.sub(stop, start, "i64"), lanes, "i64"), "i64")
        self.along(start, vectors, lanes, lambda i, _: self.put(scope.inner({last: i}, lanes, last), expr))
        f.loop(vectors, stop, 1, [], lambda i, _: self.put(scope.inner({last: i}, 1, None), expr))

    def whole(self, scope: Scope, last: Var, rest: int) -> None:
        """A row in vectors alone: the last one overlaps the one before it."""
        f, lanes, expr, column0, column1 = self.f, self.lanes, self.expr, self.column0, self.column1

        def at(i: str) -> Scope:
            return scope.inner({last: i}, lanes, last)

        if rest == 0:
            self.along(column0, column1, lanes, lambda i, _: self.put(at(i), expr))
            return
        end = f.sub(column1, lanes, "i64")
        if self.again and not self.emitter.kept:
            self.along(column0, column1, lanes, lambda i, _: self.put(at(f.min(i, end)), expr))
            return
        final = at(end)  # before the elements that it reads are written
        self.emitter.lanes_of(expr, final)
        vectors = f.sub(column1, rest, "i64")
        self.along(column0, vectors, lanes, lambda i, _: self.put(at(i), expr))
        self.put(final, expr)

    def bordered(self, scope: Scope, last: Var, inner: frozenset[Var]) -> None:
        """A row whose expression tests indices: without the tests in its interior, then the columns on both sides."""
        f, lanes, emitter = self.f, self.lanes, self.emitter
        low, high = interior(emitter, self.tests, last, self.column0, self.column1, scope)
        if self.outside is not None:
            self.split(scope, last, inner, low, high, self.outside)
            return
        high = f.select(f.cmp("lt", f.sub(high, low, "i64"), lanes, "i64"), low, high, "i64")
        if not self.again:
            high = f.sub(high, f.rem(f.sub(high, low, "i64"), lanes, "i64"), "i64")

        def within() -> None:  # only where there is an interior: without the tests, its row may not be read
            end, area = f.sub(high, lanes, "i64"), scope.inner({})
            emitter.hoist(self.inside, inner, area)

            def vector(i: str, _: list[str]) -> None:
                self.put(area.inner({last: f.min(i, end)}, lanes, last), self.inside)

            f.loop(low, high, lanes, [], vector)

        f.if_(f.cmp("lt", low, high, "i64"), within)

        def border(side: str, _: list[str]) -> None:
            left = f.cmp("eq", side, 0, "i64")
            start = f.select(left, self.column0, high, "i64")
            self.span(scope, last, start, f.select(left, low, self.column1, "i64"))

        f.loop(0, 2, 1, [], border)

    def split(self, scope: Scope, last: Var, inner: frozenset[Var], low: str, high: str, outside: Expr) -> None:
        """A row that is `outside` before and after [low, high): what vectors of it write too much is written again."""
        f, lanes, emitter = self.f, self.lanes, self.emitter

        def elements(area: Scope, value: Expr, start: str, stop: str, end: str, wide: str) -> None:
            """Vectors that begin no later than `end` where it is `wide` enough for them, else one by one."""
            whole = f.select(wide, stop, start, "i64")
            f.loop(
                start, whole, lanes, [], lambda i, _: self.put(area.inner({last: f.min(i, end)}, lanes, last), value)
            )
            f.loop(whole, stop, 1, [], lambda i, _: self.put(area.inner({last: i}, 1, None), value))

        emitter.hoist(outside, inner, scope)
        end = f.sub(self.column1, lanes, "i64")
        wide = f.cmp("ge", end, self.column0, "i64")
        for start, stop in ((self.column0, low), (high, self.column1)):
            elements(scope, outside, start, stop, end, wide)

        def within() -> None:  # only where there is an interior: without the tests, its row may not be read
            area, end = scope.inner({}), f.sub(high, lanes, "i64")
            emitter.hoist(self.inside, inner, area)
            elements(area, self.inside, low, high, end, f.cmp("ge", end, low, "i64"))

        f.if_(f.cmp("lt", low, high, "i64"), within)

    def tiles(self, axis: Var, last: Var, indices: list[str]) -> None:
        """A row of tiles of `axis` and `last`; the last ones overlap those before them."""
        f, lanes, emitter, expr = self.f, self.lanes, self.emitter, self.expr
        size = emitter.size(self.sizes[self.names.index(axis)])
        at = f.min(f.mul(indices[-1], lanes, "i64"), f.sub(size, lanes, "i64"))
        scope = self.top.inner(dict(zip(self.outer, [*indices[:-1], at], strict=True)))
        emitter.hoist(expr, frozenset((axis, last)), scope)
        emitter.hoist(self.destination, frozenset((axis, last)), scope)
        end = f.sub(self.column1, lanes, "i64")

        def turn(i: str, _: list[str]) -> None:
            emit_tile(emitter, expr, axis, last, scope, f.min(i, end), lambda tile: self.put(tile, expr))

        f.loop(self.column0, self.column1, lanes, [], turn)


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
