"""The epilogue of sums: what is computed of each, and where that is stored, over a block of them in vectors.

A block is [rows, columns]: rows of a matrix, pixels of images (numbered through all of them), or queries of attention.
What the rows share is computed before them, what the columns of a row share before these.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.tile import transpose
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, vec, void
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.backends.cpu.schedule.arguments import Pointer
from rlx.ir.dtype import DType
from rlx.ir.shape import Size, size_product
from rlx.kernels.affine import Affine, affine, index_expr, linear_index
from rlx.kernels.expr import Acc, Expr, Load, Var, transform, walk
from rlx.kernels.loops.analysis import RESULT, is_costly, linear_load, merge_loops
from rlx.kernels.program import Store
from rlx.records import dataclass

__all__ = ["Epilogue", "epilogue_of"]


@dataclass(frozen=True)
class Epilogue:
    """`expr`, over Acc, is the result of the sum at (row, column), `destination` where it is stored.

    The number of a row is taken apart into the variables `rows`, of `extents`.
    """

    expr: Expr
    destination: Load
    column: Var
    rows: tuple[Var, ...]
    extents: tuple[Size, ...]
    sums: DType
    constant: Size  # of the destination, in elements
    row_step: Size | None  # from the results of a row to those of the next; None if that is no constant
    columns_together: bool

    @property
    def plain(self) -> bool:
        """Whether the sums are the results."""
        return isinstance(self.expr, Acc) and self.destination.dtype is self.sums

    @property
    def in_place(self) -> bool:
        """Whether a result can take the place of its sum in the results' buffer."""
        return self.destination.dtype is self.sums and self.row_step is not None and self.columns_together

    @property
    def is_nothing(self) -> bool:
        """Whether sums that lie where results belong are the results."""
        return self.plain and self.in_place

    @property
    def out(self) -> Pointer:
        """The address of the first result."""
        return Pointer(self.destination.source, self.constant * self.destination.dtype.itemsize)

    @property
    def out_step(self) -> Size:
        """Elements from row to row of sums that take the places of their results; else 0."""
        return self.row_step if self.in_place and self.row_step is not None else 0

    def place(self, f: Function, out: tuple[str, str], row: str, column: str, room: tuple[str, str]) -> tuple[str, str]:
        """The address and the step from row to row of a block of sums that starts at (row, column).

        It is in the results, which are at `out`, where sums can take their places, else in `room`: (address, step).
        """
        if not self.in_place:
            return room
        return f.gep(out[0], f.add(f.mul(row, out[1]), column), convert.llvm_type(self.sums)), out[1]

    def prepare(self, emitter: Emitter) -> None:
        """Loads the arguments that it needs; at the start of the kernel."""
        emitter.preload([self.expr, self.destination], list(self.extents))
        for x in walk(self.expr):  # sums change from column to column: none is hoisted
            if isinstance(x, Acc):
                emitter.free[x] = RESULT | {self.column, *self.rows}

    def at(self, emitter: Emitter, row: str) -> dict[Var, str]:
        """The variables of a row by its number."""
        found: dict[Var, str] = {}
        for var, extent in zip(self.rows[:0:-1], self.extents[:0:-1], strict=True):
            size = emitter.size(extent)
            found[var] = emitter.f.rem(row, size, "i64")
            row = emitter.f.div(row, size, "i64")
        if self.rows:
            found[self.rows[0]] = row
        return found

    def row(self, emitter: Emitter, top: Scope, row: str) -> Scope:
        """A scope for the columns of a row, with what they share computed."""
        scope = top.inner(self.at(emitter, row))
        emitter.hoist(self.expr, frozenset((self.column,)), scope)
        emitter.hoist(self.destination, frozenset((self.column,)), scope)
        return scope

    def put(self, emitter: Emitter, row: Scope, column: str, sums: str, w: int, shared: Scope | None = None) -> None:
        """Computes and stores the results of `w` columns of a row from their sums.

        `shared` has what rows share of these columns.
        """
        here = row.inner({self.column: column}, w, self.column if w > 1 else None)
        if shared is not None:
            here.cache.update({key: found for key, found in shared.cache.items() if isinstance(key, Expr)})
        emitter.store(self.destination, self.value(emitter, here, sums, w), here)

    def value(self, emitter: Emitter, scope: Scope, sums: str, w: int) -> str:
        """Computes `w` results from their sums."""
        emitter.acc = lambda _: (sums, w)
        return convert.to_memory(emitter.f, emitter.lanes_of(self.expr, scope), self.destination.dtype, w)

    def widths(self, emitter: Emitter) -> list[int]:
        """The numbers of columns that are computed at once: the first as often as they are there, then the next.

        Functions are long chains of operations that wait for one another: four vectors at a time hide that.
        """
        lanes = emitter.lanes if self.sums.bits == 32 else emitter.lanes // 2
        return [*([4 * lanes] if is_costly(self.expr) else []), lanes, *([8] if lanes == 16 else []), 1]

    def block(
        self,
        emitter: Emitter,
        rows: tuple[str, str],
        columns: tuple[str, str],
        sums: str,
        step: str,
        top: Scope | None = None,
        of_row: Callable[[str], Callable[[str, int], str]] | None = None,
    ) -> None:
        """Emits it over a block of sums that lie at `sums`, `step` elements from row to row.

        `top` has variables that all of them share. `of_row(row)` gives what vectors of the sums of a row become before.
        """
        if self.is_nothing and of_row is None:
            return
        top = top or Scope(1, None, {})
        emitter.hoist(self.expr, frozenset((self.column, *self.rows)), top)
        if self.along is not None and of_row is None:
            self.turned(emitter, rows, columns, sums, step, top)
        else:
            self.by_rows(emitter, rows, columns, sums, step, top, of_row)

    def by_rows(
        self,
        emitter: Emitter,
        rows: tuple[str, str],
        columns: tuple[str, str],
        sums: str,
        step: str,
        top: Scope,
        of_row: Callable[[str], Callable[[str, int], str]] | None = None,
    ) -> None:
        """Emits it in vectors along the columns of each row."""
        f, ty = emitter.f, convert.llvm_type(self.sums)
        (r0, r1), (c0, c1) = rows, columns
        parts, start = [], c0
        for w in self.widths(emitter):
            end = f.sub(c1, f.rem(f.sub(c1, start), w), "i64") if w > 1 else c1
            parts.append((start, end, w))
            start = end

        def one_row(r: str, _: list[str]) -> None:
            scope, line = self.row(emitter, top, r), f.gep(sums, f.mul(f.sub(r, r0), step), ty)
            before = of_row(r) if of_row else None

            def put(c: str, w: int) -> None:
                address = f.gep(line, f.sub(c, c0), ty)
                value = f.load(vec(ty, w), address)
                value = before(value, w) if before else value
                if not self.in_place:
                    self.put(emitter, scope, c, value, w)
                    return
                here = scope.inner({self.column: c}, w, self.column if w > 1 else None)
                f.store(self.value(emitter, here, value, w), address, ty=vec(ty, w))

            for first, end, w in parts:
                f.loop(first, end, w, [], lambda c, _, w=w: put(c, w))  # type: ignore[misc]

        f.loop(r0, r1, 1, [], one_row)

    @property
    def along(self) -> Var | None:
        """The last variable of rows, where the results of such rows lie side by side and those of columns don't."""
        if not self.rows or self.columns_together:
            return None
        return self.rows[-1] if affine(self.destination.indices[0]).coefs.get(self.rows[-1]) == 1 else None

    def turned(
        self,
        emitter: Emitter,
        rows: tuple[str, str],
        columns: tuple[str, str],
        sums: str,
        step: str,
        top: Scope,
    ) -> None:
        """Emits it in vectors along rows whose results lie side by side: squares of sums are transposed before.

        The last square of a line of results overlaps the one before it; fewer rows go one by one.
        """
        f, w, last = emitter.f, emitter.lanes if self.sums.bits == 32 else emitter.lanes // 2, self.along
        one, (r0, r1), (c0, c1) = convert.llvm_type(self.sums), rows, columns
        ty = vec(one, w)
        square = f.alloca(ty, w)

        def line_of(r: str) -> str:
            return f.gep(sums, f.mul(f.sub(r, r0, "i64"), step, "i64"), one)

        def some_columns(r: str, c: str) -> None:
            corner = f.gep(line_of(r), f.sub(c, c0, "i64"), one)
            mask = f.mask_below(f.sub(c1, c, "i64"), w)
            lines = [f.gep(corner, f.mul(step, i, "i64"), one) if i else corner for i in range(w)]
            turned = transpose(f, [f.masked_load(ty, line, mask) for line in lines])
            self.put_columns(emitter, top.inner(self.at(emitter, r)), turned, (c, c1), square)

        def some_rows(state: list[str]) -> list[str]:
            (r,) = state
            left, before = f.sub(r1, r, "i64"), f.sub(r, r0, "i64")
            if len(self.rows) > 1 and last is not None:
                at = self.at(emitter, r)[last]
                left = f.min(left, f.sub(emitter.size(self.extents[-1]), at))
                before = f.min(before, at)
            take = f.min(left, w)
            start = f.sub(f.add(r, take), w)
            f.if_(
                f.cmp("ge", f.add(before, take), w),
                lambda: void(f.loop(c0, c1, w, [], lambda c, _: some_columns(start, c))),
                lambda: self.by_rows(emitter, (r, f.add(r, take)), columns, line_of(r), step, top),
            )
            return [f.add(r, take)]

        f.while_([("i64", r0)], lambda state: f.cmp("lt", state[0], r1, "i64"), some_rows)

    def put_columns(self, emitter: Emitter, top: Scope, sums: list[str], columns: tuple[str, str], room: str) -> None:
        """Stores the columns that there are of a square of sums, vectors along rows whose variables `top` has.

        `room` holds a square.
        """
        f, w, ty, last = emitter.f, len(sums), emitter.f.type_of(sums[0]), self.along
        c, count = columns[0], f.sub(columns[1], columns[0], "i64")

        def put(number: str, value: str) -> None:
            plane = top.inner({self.column: number})
            emitter.hoist(self.expr, frozenset(self.rows), plane)
            here = plane.inner({}, w, last)
            emitter.store(self.destination, self.value(emitter, here, value, w), here)

        def one_by_one() -> None:
            for i, column in enumerate(sums):
                f.store(column, f.gep(room, i, ty), ty=ty)
            some = f.min(count, w, "i64")
            f.loop(0, some, 1, [], lambda j, _: put(f.add(c, j), f.load(ty, f.gep(room, j, ty))))

        def at_once() -> None:
            for j, column in enumerate(sums):
                put(f.add(c, j), column)

        if self.destination.dtype.bits < self.sums.bits and not is_costly(self.expr):  # conversions wait less
            f.if_(f.cmp("ge", count, w), at_once, one_by_one)
        else:
            one_by_one()

    def planes(self, emitter: Emitter, rows: tuple[str, str], columns: int, sums: str, step: str) -> None:
        """Emits it over a block of sums at `sums`, a column after the other, `step` elements apart."""
        f, lanes = emitter.f, emitter.lanes if self.sums.bits == 32 else emitter.lanes // 2
        ty, (r0, r1) = convert.llvm_type(self.sums), rows
        top = Scope(1, None, {})
        emitter.hoist(self.expr, frozenset((self.column, *self.rows)), top)
        along = self.rows[0] if len(self.rows) == 1 and self.row_step is not None else None  # results lie evenly

        def put(c: int, plane: Scope, r: str, w: int) -> None:
            here = plane.inner(self.at(emitter, r), w, along if w > 1 else None)
            value = f.load(vec(ty, w), f.gep(sums, f.add(f.mul(step, c), f.sub(r, r0)), ty))
            emitter.store(self.destination, self.value(emitter, here, value, w), here)

        for c in range(columns):
            plane = top.inner({self.column: str(c)})
            emitter.hoist(self.expr, frozenset(self.rows), plane)
            whole = f.sub(r1, f.rem(f.sub(r1, r0), lanes), "i64") if along else r0
            f.loop(r0, whole, lanes, [], lambda r, _, c=c, plane=plane: put(c, plane, r, lanes))  # type: ignore[misc]
            f.loop(whole, r1, 1, [], lambda r, _, c=c, plane=plane: put(c, plane, r, 1))  # type: ignore[misc]

    def streams(self) -> list[Load]:
        """What is read next to the sums, element by element, such as a residual."""
        place = {self.column, *self.rows}
        plain = [x for x in walk(self.expr) if isinstance(x, Load) and x.where is None]
        found = {x: set(affine(x.indices[0]).coefs) for x in plain}
        return [x for x, at in found.items() if at <= place and self.column in at and len(at) > 1]


def epilogue_of(store: Store, rows: list[Var], sizes: list[Size], column: Var, columns: Size, sums: DType) -> Epilogue:
    """The epilogue of a store, whose rows get one variable where every load walks through them as one."""
    expr = transform(store.expr, linear_load)
    index = linear_index(store.index, store.buffer.shape)
    names, extents, (expr,), place = merge_loops(rows, sizes, [expr], index_expr(index))
    destination = Load(store.buffer, (place,), store.buffer.dtype)
    together = columns == 1 or index.coefs.get(column, 0) == 1
    step = _row_step(index, rows, sizes) if index.is_linear else None
    if step is None and all(s == 1 for s in sizes):
        step = columns
    return Epilogue(expr, destination, column, tuple(names), tuple(extents), sums, index.constant, step, together)


def _row_step(index: Affine, names: list[Var], sizes: list[Size]) -> Size | None:
    """The step from row to row of an index that walks through all of them evenly."""
    left = [(v, s) for v, s in zip(names, sizes, strict=True) if s != 1]
    if not left:
        return None
    step = index.coefs.get(left[-1][0], 0)
    for d, (v, _) in enumerate(left):
        if index.coefs.get(v, 0) != step * size_product([s for _, s in left[d + 1 :]]):
            return None
    return step
