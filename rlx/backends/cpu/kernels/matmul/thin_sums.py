"""The sums of products with few rows: an operand of many rows is streamed from memory as it lies, each element once.

    sums[i, j] = sum over k of few[i, k] * many[j, k]

`along`: the elements of `many` that belong to neighbouring j lie side by side, as in x @ W. Rows of k are added, some
at a time, to a strip of sums that stays in L1. `across`: those of neighbouring k do, as in W @ x. As many rows as a
vector has lanes are transposed in registers: lines of more rows might drive each other out of the cache. Where there
are four blocks of k (see below), lanes are a quarter as many rows and four blocks of each, for the same reason.

Where both operands are rounded to bf16 and an instruction multiplies pairs of them, a step is two of k, a word: `along`
two rows of k become one of words, `across` two neighbours are a word, so k is even.

Lanes are always different sums. Each sum is a chain of fma over k in blocks of so many steps, blocks are added up in
order: its bits are those of a product by panels (`gemm.kernel`), and depend on no other row or column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from rlx.backends.cpu.gemm.panels.bf16 import beside
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.kernels.matmul.thin_tiles import emit_tiles
from rlx.backends.cpu.kernels.matmul.thin_types import Types
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, arguments_of, constant, vec, void, width
from rlx.backends.cpu.schedule.arguments import Routine, routines
from rlx.backends.cpu.schedule.matmul import PRODUCT_BLOCK
from rlx.backends.cpu.schedule.thin import STRIDE, STRIP

__all__ = ["routine"]

ARGUMENTS = (
    "ptr many, i64 step, ptr few, i64 few_step, i64 k_step, ptr out, "
    "i64 line, i64 rows, i64 columns, i64 k, i64 block, ptr room"
)
SUMS_ARGUMENTS = "ptr many, i64 step, ptr few, ptr out, i64 line"  # of what adds some steps, across
TOGETHER = 4  # of the few rows whose sums are in registers at once, along
AT_ONCE = {1: 4, 2: 4, 3: 2, 4: 2}  # vectors of a strip, by the rows whose sums are in registers
HELD = 8  # elements of the few rows that are in registers all along a strip
ACROSS = 8  # of the few rows whose sums are in registers at once, across
CHAINS = 8  # of fma that run side by side at most, over all rows: twice as many vectors of sums where rows are few
PIECE = 32  # bytes of each row that are transposed together
AHEAD = 256  # bytes of a row from what is read to what is fetched from memory
LONG = 1024  # bytes of a row, from which on that saves time
WAITING = 2  # of the few rows at most that take less time than reading the others from memory
LINE = 64  # bytes of each row that are added before those after them: a line of the cache


@routines
def routine(types: Types, rows: int | None = None, tile: Tile | None = None, *, along: bool) -> Routine:
    """`(ptr many, i64 step, ptr few, i64 few_step, i64 k_step, ptr out, i64 line, i64 rows, i64 columns, i64 k,
    i64 block, ptr room)`: sums [rows, columns] at `out`, `line` elements from row to row.

    `rows`: how many there are, if that is known. `step` is from k to k of `many` along, from row to row across;
    `few_step` and `k_step` are those of `few`. Across there are at least `LEAST` columns. `room` has rows * k elements,
    and along as many strips of sums; with a `tile`, along, sums are made in such tiles, and it is not used.
    """
    names = "_".join([types.streamed, types.few.name])
    way, together = ("along", TOGETHER) if along else ("across", ACROSS)
    counts = _counts(rows, together)
    kind = f"rlx_thin_{way}_{names}x{types.lanes}"
    name = "_".join([kind, *["tiles"] * (tile is not None), *([] if rows is None else [str(rows)])])
    f = Function(name, arguments_of(ARGUMENTS), attrs="nounwind noinline")
    if tile:
        emit_tiles(f, types, tile, counts, together)
        f.ret()
        return Routine(f.name, Module([f]).text())
    unit = f.mul("%block", types.blocks)
    whole = "0" if along else f.mul(f.div("%k", unit), unit)  # steps of k in units
    copied = f.gep("%room", f.mul("%rows", STRIDE), types.scalar) if along else "%room"
    few = copied
    if types.few is types.sums and types.narrow is None:  # one row may lie in memory as it would be copied
        alone = f.and_(f.and_(f.cmp("eq", "%rows", 1), f.cmp("eq", "%k_step", 1)), f.cmp("eq", whole, 0, "i64"))
        few = f.select(alone, "%few", copied, "ptr")
        f.if_(alone, lambda: None, lambda: _copy(f, types, copied, together, whole))
    else:
        _copy(f, types, copied, together, whole)
    if along:
        _along(f, types, few, counts)
    else:
        _across(f, types, few, counts, whole)
    f.ret()
    return Routine(f.name, Module([f]).text())


def _counts(rows: int | None, together: int) -> list[int]:
    """How many of so many rows, or of any number, may be left when the next ones are taken."""
    if rows is None:
        return list(range(1, together + 1))
    return sorted({min(rows - first, together) for first in range(0, rows, together)})


def _copy(f: Function, types: Types, target: str, together: int, whole: str) -> None:
    """Copies the few rows to `target`, [rows / together, k, together]: the last group has what is left.

    The first `whole` steps, units of `BLOCKS` blocks of k, become [unit, k in block, together, block].
    """
    memory, ty = convert.memory_type(types.few), types.scalar

    def some_rows(first: str, _: list[str]) -> None:
        count = f.min(f.sub("%rows", first), together)
        group = f.gep(target, f.mul(first, "%k"), ty)

        def steps(k0: str, k1: str, line: str, start: str, stride: str) -> None:
            def element(k: str, _: list[str]) -> None:
                if types.pairs:
                    first = f.mul(f.mul(k, 2), "%k_step")
                    two = [f.load(memory, f.gep(line, i, memory)) for i in (first, f.add(first, "%k_step"))]
                    x = f.insert(f.insert("poison", two[0], 0, vec(ty, 2)), two[1], 1, vec(ty, 2))
                    assert types.narrow is not None
                    x = f.cast("bitcast", convert.convert(f, x, types.few, types.narrow, 2), ty)
                else:
                    x = f.load(memory, f.gep(line, f.mul(k, "%k_step"), memory))
                    x = types.widened(f, x, types.few, 1)
                f.store(x, f.gep(start, f.mul(f.sub(k, k0), stride), ty))

            f.loop(k0, k1, 1, [], element)

        def row(i: str, _: list[str]) -> None:
            line = f.gep("%few", f.mul(f.add(first, i), "%few_step"), memory)

            def block(k0: str, _: list[str]) -> None:
                number = f.rem(f.div(k0, "%block"), types.blocks)
                unit = f.gep(group, f.mul(f.sub(k0, f.mul(number, "%block")), count), ty)
                start = f.gep(unit, f.add(f.mul(i, types.blocks), number), ty)
                steps(k0, f.add(k0, "%block"), line, start, f.mul(count, types.blocks))

            if whole != "0":
                f.loop(0, whole, "%block", [], block)
            steps(whole, "%k", line, f.gep(group, f.add(f.mul(whole, count), i), ty), count)

        f.loop(0, count, 1, [], row)

    f.loop(0, "%rows", together, [], some_rows)


# ---- rows of k, one after the other


def _along(f: Function, types: Types, few: str, counts: list[int]) -> None:
    ty, many, lanes = types.scalar, convert.memory_type(types.many), types.lanes
    added = {rows: _add_rows(types, rows) for rows in counts}
    # sums of all rows stay in L1; groups of rows read the same steps again
    wide = f.select(f.cmp("le", "%rows", 2), STRIP, f.select(f.cmp("le", "%rows", TOGETHER), STRIP // 2, STRIP // 4))

    def columns(j0: str, _: list[str]) -> None:
        n = f.min(wide, f.sub("%columns", j0))
        padded = f.and_(f.add(n, lanes - 1), -lanes)
        start = f.gep("%many", j0, many)

        def block(k0: str, _: list[str]) -> None:
            k1 = f.min(f.add(k0, "%block"), "%k")

            def clear(i: str, _: list[str]) -> None:
                p = f.gep("%room", f.mul(i, STRIDE), ty)
                f.loop(
                    0,
                    padded,
                    lanes,
                    [],
                    lambda j, _: f.store(constant(0.0, types.vector), f.gep(p, j, ty), ty=types.vector),
                )

            f.loop(0, "%rows", 1, [], clear)

            def some_steps(k: str, _: list[str]) -> None:
                count = f.min(f.sub(k1, k), types.steps)
                line = f.gep(start, f.mul(f.mul(k, 1 + types.pairs), "%step"), many)

                def group(first: str, _: list[str]) -> None:
                    left = f.min(f.sub("%rows", first), TOGETHER)
                    a = f.gep(few, f.add(f.mul(first, "%k"), f.mul(k, left)), ty)
                    c = f.gep("%room", f.mul(first, STRIDE), ty)

                    def call(rows: int) -> Callable[[], None]:
                        return lambda: void(f.call(added[rows], [line, "%step", a, c, n, count]))

                    f.switch(left, {rows: call(rows) for rows in added})

                f.loop(0, "%rows", TOGETHER, [], group)

            f.loop(k0, k1, types.steps, [], some_steps)

            def put(i: str, _: list[str]) -> None:
                p = f.gep("%room", f.mul(i, STRIDE), ty)
                out = f.gep("%out", f.add(f.mul(i, "%line"), j0), ty)
                _put_row(f, types, p, out, n, f.cmp("eq", k0, 0))

            f.loop(0, "%rows", 1, [], put)

        f.loop(0, f.max("%k", 1), "%block", [], block)

    f.loop(0, "%columns", wide, [], columns)


def _put_row(f: Function, types: Types, source: str, out: str, n: str, first: str) -> None:
    """Sets a row of sums to a block's, or adds those where it is not the first."""
    ty, v, lanes = types.scalar, types.vector, types.lanes
    whole = f.and_(n, -lanes)

    def vector(j: str, _: list[str]) -> None:
        p, x = f.gep(out, j, ty), f.load(v, f.gep(source, j, ty))
        f.store(f.if_(first, lambda: [x], lambda: [f.add(x, f.load(v, p))])[0], p)

    def one(j: str, _: list[str]) -> None:
        p, x = f.gep(out, j, ty), f.load(ty, f.gep(source, j, ty))
        f.store(f.if_(first, lambda: [x], lambda: [f.add(x, f.load(ty, p))])[0], p)

    f.loop(0, whole, lanes, [], vector)
    f.loop(whole, n, 1, [], one)


def _add_rows(types: Types, rows: int) -> Function:
    """`(ptr many, i64 step, ptr few, ptr parts, i64 n, i64 count)`: adds up to `types.steps` steps to a strip."""
    ty, v, lanes, many = types.scalar, types.vector, types.lanes, convert.memory_type(types.many)
    f = Function(
        f"rlx_thin_rows_{types.streamed}x{lanes}_{rows}",
        arguments_of("ptr many, i64 step, ptr few, ptr parts, i64 n, i64 count"),
        shared=True,
        attrs="nounwind noinline",
    )
    whole = f.and_("%n", -lanes)

    def steps(count: int, start: str, few: str) -> None:
        each = 1 + types.pairs  # rows of k of a step
        lines = [f.gep(start, f.mul("%step", u), many) if u else start for u in range(each * count)]

        def of_few(u: int, i: int) -> str:
            return f.splat(f.load(ty, f.gep(few, u * rows + i, ty)), lanes)

        held = [[of_few(u, i) for i in range(rows)] for u in range(count)] if rows * count <= HELD else []

        def vectors(across: int, load: Callable[[str], str], j: str) -> None:
            places = [f.gep(f.gep("%parts", j, ty), i * STRIDE, ty) for i in range(rows)]
            sums = [[f.load(v, f.gep(p, w * lanes, ty)) for w in range(across)] for p in places]
            for u in range(count):
                of_step = [f.gep(line, j, many) for line in lines[u * each : (u + 1) * each]]
                x = [joined([load(f.gep(p, w * lanes, many)) for p in of_step]) for w in range(across)]
                for i in range(rows):
                    a = held[u][i] if held else of_few(u, i)
                    sums[i] = [types.multiply_add(f, a, x[w], sums[i][w]) for w in range(across)]
            for i, p in enumerate(places):
                for w in range(across):
                    f.store(sums[i][w], f.gep(p, w * lanes, ty))

        def joined(rows: list[str]) -> str:
            return beside(f, *rows) if types.pairs else types.widened(f, rows[0], types.many, lanes)

        def plain(p: str) -> str:
            return f.load(vec(many, lanes), p)

        def masked(p: str) -> str:
            mask = f.mask_below(f.sub("%n", whole), lanes, f"i{min(8 * types.many.itemsize, 32)}")
            return f.masked_load(vec(many, lanes), p, mask)

        together = AT_ONCE[rows]
        grouped = f.and_("%n", -lanes * together)
        f.loop(0, grouped, lanes * together, [], lambda j, _: vectors(together, plain, j))
        f.loop(grouped, whole, lanes, [], lambda j, _: vectors(1, plain, j))
        f.if_(f.cmp("lt", whole, "%n"), lambda: vectors(1, masked, whole))

    def one(u: str, _: list[str]) -> None:
        first = f.mul(f.mul(u, 1 + types.pairs), "%step")
        steps(1, f.gep("%many", first, many), f.gep("%few", f.mul(u, rows), ty))

    f.if_(
        f.cmp("eq", "%count", types.steps),
        lambda: steps(types.steps, "%many", "%few"),
        lambda: void(f.loop(0, "%count", 1, [], one)),
    )
    f.ret()
    return f


# ---- rows of the streamed operand, some at once


def _across(f: Function, types: Types, few: str, counts: list[int], whole: str) -> None:
    ty, many = types.scalar, types.step
    left_over = f.or_(f.cmp("lt", whole, "%k"), f.cmp("eq", whole, 0))

    def some_rows(first: str, _: list[str]) -> None:
        left = f.min(f.sub("%rows", first), ACROSS)
        a, out = f.gep(few, f.mul(first, "%k"), ty), f.gep("%out", f.mul(first, "%line"), ty)

        def of_rows(rows: int) -> None:
            height, blocks = _add_blocks(types, rows)
            squares = _add_squares(types, rows)
            end = f.sub("%columns", types.lanes)  # the last rows overlap those before them

            def tile(j: str, _: list[str]) -> None:
                j = f.min(j, end)

                def units(j: str, _: list[str]) -> None:
                    source = f.gep("%many", f.mul(j, "%step"), many)
                    f.call(blocks, [source, "%step", a, f.gep(out, j, ty), "%line", whole, "%block"])

                def rest() -> None:
                    source = f.gep("%many", f.mul(j, "%step"), many)
                    f.call(squares, [source, "%step", a, f.gep(out, j, ty), "%line", whole, "%k", "%block"])

                f.loop(j, f.select(f.cmp("gt", whole, 0), f.add(j, types.lanes), j), height, [], units)
                f.if_(left_over, rest)

            f.loop(0, "%columns", types.lanes, [], tile)

        f.switch(left, {rows: (lambda rows=rows: of_rows(rows)) for rows in counts})  # type: ignore[misc]

    f.loop(0, "%rows", ACROSS, [], some_rows)


def _add_blocks(types: Types, rows: int) -> tuple[int, Function]:
    """`(ptr many, i64 step, ptr few, ptr out, i64 line, i64 k, i64 block)`: sums of so many rows of `many`.

    k is some units of `types.blocks` blocks. A lane of a sum is one row and one block of the unit: lane = row *
    blocks + block. So that only few rows, which may lie in the same sets of the cache, are read at a time.
    """
    ty, v, lanes, blocks, many = types.scalar, types.vector, types.lanes, types.blocks, types.step
    groups = 2 if 2 * rows <= CHAINS and not types.pairs else 1  # of words, two would not stay in L1
    each = lanes // blocks
    height = each * groups
    f = Function(
        f"rlx_thin_blocks_{types.streamed}x{lanes}_{rows}",
        arguments_of(f"{SUMS_ARGUMENTS}, i64 k, i64 block"),
        shared=True,
        attrs="nounwind noinline",
    )
    size = types.step_bytes
    step, unit = f.mul("%step", size), f.mul("%block", blocks)
    square = min(PIECE // types.sums.itemsize, lanes)

    def add(k: str, steps: int, start: str, few: str, following: str, acc: list[str]) -> list[str]:
        """Adds steps k, k + 1, .. of each row and block; whole lines of them fetch as many of the unit that follows."""
        acc, start, few = list(acc), f.gep(start, k, many), f.gep(few, f.mul(k, rows * blocks), ty)
        lines = [_lines(f, f.gep(start, f.mul("%block", b), many), step, height) for b in range(blocks)]
        fetched = _in_turn(f, types, (following, step), k, height, steps) if steps > square else []
        parts = list(product(range(0, steps, square), range(groups)))
        for number, (at, g) in enumerate(parts):
            for p in fetched[number * len(fetched) // len(parts) : (number + 1) * len(fetched) // len(parts)]:
                f.prefetch(p)
            own = [f.gep(lines[b][g * each + r], at, many) for r in range(each) for b in range(blocks)]
            for c, x in enumerate(_square(f, types, own, square)):
                for i in range(rows):
                    y = f.load(vec(ty, blocks), f.gep(few, ((at + c) * rows + i) * blocks, ty))
                    y = f.shuffle(y, y, [lane % blocks for lane in range(lanes)])
                    # else LLVM would make many columns before it uses them, and fetch all at once
                    acc[i * groups + g] = f.keep_order(types.multiply_add(f, y, x, acc[i * groups + g]))
        return acc

    def one_unit(k0: str, _: list[str]) -> None:
        start, few = f.gep("%many", k0, many), f.gep("%few", f.mul(k0, rows), ty)
        last = f.cmp("ge", f.add(k0, unit), "%k")
        below = f.gep("%many", f.mul("%step", height), many)  # the first unit of the rows below
        following = f.select(last, below, f.gep(start, unit, many), "ptr")
        acc, k = [constant(0.0, v)] * (rows * groups), "0"
        for steps in (max(LINE // size, 2 * square), square):
            end = f.and_("%block", -steps)

            def some(k: str, acc: list[str], steps: int = steps) -> list[str]:
                return add(k, steps, start, few, following, acc)

            acc = f.loop(k, end, steps, [(v, x) for x in acc], some)
            k = end
        first = f.cmp("eq", k0, 0)
        for i in range(rows):
            for g in range(groups):
                p = f.gep(f.gep("%out", f.mul("%line", i), ty), g * each, ty)
                _add_parts(f, types, acc[i * groups + g], p, first)

    f.loop(0, "%k", unit, [], one_unit)
    f.ret()
    return height, f


def _in_turn(f: Function, types: Types, unit: tuple[str, str], k: str, rows: int, steps: int) -> list[str]:
    """Lines of a unit (address, bytes from row to row) whose turn it is while `steps` k, .. of another are added.

    Whole rows, one after the other: memory and the second cache are read fastest in their order. Units are added a line
    of each row and block at a time.
    """
    size = types.step_bytes
    count = rows * types.blocks * steps * size // LINE  # lines at a time
    of_row = types.blocks * PRODUCT_BLOCK * size // LINE
    first = f.div(f.mul(k, count), steps)
    row, line = f.div(first, of_row), f.rem(first, of_row)
    found = []
    for r in range(max(count // of_row, 1)):
        start = f.opaque(f.offset(unit[0], f.add(f.mul(f.add(row, r), unit[1]), f.mul(line, LINE))))
        found += [f.offset(start, at * LINE) for at in range(min(count, of_row))]
    return found


def _add_parts(f: Function, types: Types, sums: str, p: str, first: str) -> None:
    """Adds the sums of a unit's blocks, one block after the other, to those at p; `first`: there are none yet."""
    rows = types.lanes // types.blocks
    ty = vec(types.scalar, rows)

    def of_block(b: int) -> str:
        lanes = [r * types.blocks + b for r in range(rows)]
        return f.shuffle(sums, sums, lanes) if rows > 1 else f.extract(sums, b)

    x = of_block(0)
    x = f.if_(first, lambda: [(ty, x)], lambda: [(ty, f.add(f.load(ty, p), x))])[0]
    for b in range(1, types.blocks):
        x = f.add(x, of_block(b))
    f.store(x, p)


def _lines(f: Function, start: str, step: str, rows: int) -> list[str]:
    """The addresses of so many rows, three to a pointer: pointer, + step and + 2 step are addressing modes."""
    pointers = [f.opaque(start)]
    while 3 * len(pointers) < rows:
        pointers.append(f.opaque(f.offset(pointers[-1], f.mul(step, 3))))
    return [f.offset(pointers[r // 3], (0, step, f.mul(step, 2))[r % 3]) for r in range(rows)]


def _add_squares(types: Types, rows: int) -> Function:
    """`(ptr many, i64 step, ptr few, ptr out, i64 line, i64 whole, i64 k, i64 block)`: adds steps from `whole` to k.

    Lanes are rows of `many`.
    """
    ty, v, lanes, many = types.scalar, types.vector, types.lanes, types.step
    f = Function(
        f"rlx_thin_squares_{types.streamed}x{lanes}_{rows}",
        arguments_of(f"{SUMS_ARGUMENTS}, i64 whole, i64 k, i64 block"),
        shared=True,
        attrs="nounwind noinline",
    )
    square, small = (min(size // types.sums.itemsize, lanes) for size in (PIECE, PIECE // 2))
    step = f.mul("%step", types.step_bytes)

    def add(k: str, steps: int, acc: list[str], *, fetch: bool = False) -> list[str]:
        """Adds `steps` steps from k: squares of elements, or one."""
        acc, lines = list(acc), _lines(f, f.gep("%many", k, many), step, lanes)
        if fetch:
            for p in lines:
                f.prefetch(f.offset(p, AHEAD))
        a = f.gep("%few", f.mul(k, rows), ty)
        size = min(steps, square)
        for at in range(0, steps, size):
            own = [f.gep(p, at, many) for p in lines]
            columns = _square(f, types, own, size) if steps > 1 else [_column(f, types, own)]
            for c, x in enumerate(columns):
                for i in range(rows):
                    y = f.splat(f.load(ty, f.gep(a, (at + c) * rows + i, ty)), lanes)
                    acc[i] = types.multiply_add(f, y, x, acc[i])
        return acc

    def block(k0: str, _: list[str]) -> None:
        k1 = f.min(f.add(k0, "%block"), "%k")
        acc, k = [constant(0.0, v)] * rows, k0
        line = LINE // types.sums.itemsize
        ways = [(line, False), *((steps, False) for steps in dict.fromkeys((square, small, 1)))]
        if rows <= WAITING:
            ways.insert(0, (line, True))
        for steps, fetch in ways:
            end = f.add(k, f.and_(f.sub(k1, k), -steps)) if steps > 1 else k1
            if fetch:
                end = f.select(f.cmp("ge", "%k", LONG // types.step_bytes), end, k)
            typed = [(v, x) for x in acc]
            step = partial(add, fetch=fetch)
            acc = f.loop(k, end, steps, typed, lambda at, acc, steps=steps, step=step: step(at, steps, acc))  # type: ignore[misc]
            k = end
        places = [f.gep("%out", f.mul("%line", i), ty) for i in range(rows)]
        first = f.cmp("eq", k0, 0)
        sums = f.if_(first, lambda: acc, lambda: [f.add(x, f.load(v, p)) for x, p in zip(acc, places, strict=True)])
        for x, p in zip(sums, places, strict=True):
            f.store(x, p)

    f.loop("%whole", f.max("%k", 1), "%block", [], block)
    f.ret()
    return f


def _square(f: Function, types: Types, lines: list[str], square: int) -> list[str]:
    """The next `square` elements of each of `lanes` rows, as vectors of the elements of one step each.

    Vectors begin as `square` elements of some rows each. Squares of 16 bytes are transposed within them, then these
    change places between vectors.
    """
    many, lanes = types.step, types.lanes
    small = min(16 // types.sums.itemsize, square)
    each = lanes // (square // small)  # rows whose elements are in the same `small` vectors
    rows = []
    for i in range(square):
        first = i // small * each + i % small
        parts = [f.load(vec(many, square), p) for p in lines[first : first // each * each + each : small]]
        while len(parts) > 1:
            parts = [_joined(f, *pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        rows.append(types.of_steps(f, parts[0]))
    found = [x for at in range(0, square, small) for x in _transposed(f, rows[at : at + small])]
    size = small
    while size < square:
        places = range(0, lanes, 2 * small)
        for i in (i for i in range(square) if not i & size):
            pair = (found[i], found[i | size])
            for odd in (0, 1):
                picks = [side + at + odd * small + e for side in (0, lanes) for at in places for e in range(small)]
                found[i | odd * size] = f.shuffle(*pair, picks)
        size *= 2
    return found


def _transposed(f: Function, rows: list[str]) -> list[str]:
    """In each 16 bytes: the elements of one column of 2 or 4 rows."""
    square = len(rows)
    pairs = [_interleaved(f, a, b, square, 1) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    if square == 2:
        return list(pairs[0])
    (low, high), (more_low, more_high) = pairs
    return [*_interleaved(f, low, more_low, square, 2), *_interleaved(f, high, more_high, square, 2)]


def _joined(f: Function, a: str, b: str) -> str:
    return f.shuffle(a, b, list(range(2 * width(f.type_of(a)))))


def _interleaved(f: Function, a: str, b: str, square: int, size: int) -> tuple[str, str]:
    """In each `square` elements: pieces of the first halves of a and b in turn, and of their second halves."""
    lanes = width(f.type_of(a))
    found = []
    for half in (0, square // 2):
        starts = [base + half + at for base in range(0, lanes, square) for at in range(0, square // 2, size)]
        picks = [side + start + e for start in starts for side in (0, lanes) for e in range(size)]
        found.append(f.shuffle(a, b, picks))
    return found[0], found[1]


def _column(f: Function, types: Types, lines: list[str]) -> str:
    """One element of each of `lanes` rows."""
    many = types.step
    out = "poison"
    for lane, p in enumerate(lines):
        out = f.insert(out, f.load(many, p), lane, vec(many, types.lanes))
    return types.of_steps(f, out)
