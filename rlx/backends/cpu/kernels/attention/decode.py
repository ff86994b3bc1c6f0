"""The two products of attention for a few query rows; keys and values are read as they are stored, not packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.kernels.attention.stored_rows import StoredRows
from rlx.backends.cpu.llvm.builder import Function, constant, vec
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size

__all__ = [
    "Rows",
    "block_rows",
    "copy_rows",
    "end_streams",
    "row_groups",
    "rows_times_rows",
    "weighted_rows",
    "widened_rows",
    "zero_rows",
]  # fmt: skip

BLOCK = 4096  # elements of rows that are copied, and used by all query rows, at a time: they stay in the first cache
TURN = 64  # elements that a copy moves at once
AHEAD = 8192  # bytes between what is read and what is fetched meanwhile
CACHE_LINE = 64  # bytes
LINE = 16  # elements of a line of the cache

Rows = tuple[str, str]  # address of the first row, and elements from row to row


def row_groups(rows: Size, lanes: int) -> tuple[int, ...]:
    """How many query rows are computed at once: as many as registers hold sums for, then fewer for the rest."""
    most = 2 if lanes == 8 else 4
    return tuple(n for n in (4, 2, 1) if n <= (min(most, max(rows, 1)) if isinstance(rows, int) else most))


def in_groups(f: Function, rows: str, groups: Sequence[int], body: Callable[[str, int], None]) -> None:
    """`body(first, count)` for all rows, by the largest groups that fit."""
    done: str | int = 0
    for count in groups:
        stop = f.add(done, f.and_(f.sub(rows, done), -count)) if count > 1 else rows
        f.loop(done, stop, count, [], lambda i, _, n=count: body(i, n))  # type: ignore[misc]
        done = stop


def rows_times_rows(
    f: Function, lanes: int, a: Rows, b: StoredRows, out: Rows, sizes: tuple[str, str, str], groups: Sequence[int]
) -> None:
    """out[i, j] = a[i] . b[j]; `sizes`: rows of a, rows of b, their elements.

    Some rows of a and some of b at a time: an element of b is converted once for all of these. Each product is summed
    in the lanes of a vector, which are added up in the same tree wherever it is.
    """
    rows, columns, depth = sizes
    vector = f"<{lanes} x float>"
    unit = b.format.unit(lanes)
    whole = f.and_(depth, -unit)
    rest = f.mask_below(f.sub(depth, whole), lanes) if b.format.block == 1 else ""

    def dots(i: str, height: int, width: int) -> Callable[[str, list[str]], None]:
        def body(j: str, _: list[str]) -> None:
            left = [f.gep(a[0], f.mul(f.add(i, q), a[1]), "float") for q in range(height)]
            right = [b.row(f, f.add(j, q)) for q in range(width)]

            def step(d: str, sums: list[str]) -> list[str]:
                x = [[f.load(vector, f.gep(p, f.add(d, u), "float")) for p in left] for u in range(0, unit, lanes)]
                place, found = b.format.at(f, d), list(sums)
                for q, p in enumerate(right):
                    here = f.offset(p, place)
                    f.prefetch(f.offset(here, AHEAD))
                    for values, y in zip(x, b.format.vectors(f, here, lanes), strict=True):
                        for r, value in enumerate(values):
                            found[r * width + q] = f.fma(value, y, found[r * width + q])
                return found

            sums = f.loop(0, whole, unit, [(vector, constant(0.0, vector))] * (height * width), step)

            def tail() -> list[str]:
                x = [f.masked_load(vector, f.gep(p, whole, "float"), rest) for p in left]
                place, found = b.format.at(f, whole), list(sums)
                for q, p in enumerate(right):
                    y = b.format.masked(f, f.offset(p, place), lanes, rest)
                    for r, value in enumerate(x):
                        found[r * width + q] = f.fma(value, y, found[r * width + q])
                return found

            if b.format.block == 1:
                sums = f.if_(f.cmp("lt", whole, depth), tail, lambda: [(vector, s) for s in sums])
            lines = [f.gep(out[0], f.add(f.mul(f.add(i, r), out[1]), j), "float") for r in range(height)]
            if width == 1:
                for line, s in zip(lines, sums, strict=True):
                    f.store(f.reduce(s, f.add), line)
                return
            for n in range(0, height * width, lanes):
                total = lane_sums(f, sums[n : n + lanes], lanes)
                for at in range(0, lanes, min(width, lanes)):
                    r, q = divmod(n + at, width)
                    part = f.shuffle(total, None, range(at, at + width)) if width < lanes else total
                    f.store(part, f.gep(lines[r], q, "float"))

        return body

    def group(i: str, height: int) -> None:
        width = (8 if lanes == 8 else 16) // height
        grouped = f.mul(f.div(columns, width), width)
        f.loop(0, grouped, width, [], dots(i, height, width))
        f.loop(grouped, columns, 1, [], dots(i, height, 1))

    in_groups(f, rows, groups, group)


def lane_sums(f: Function, vectors: Sequence[str], lanes: int) -> str:
    """The sums of the lanes of each of `lanes` vectors, in a vector; halves are added first, as `reduce` does."""
    _, order = _halved(f, [""] * lanes, lanes)
    given = [""] * lanes
    for at, number in enumerate(order):
        given[number] = vectors[at]
    return _halved(f, given, lanes)[0][0]


def _halved(f: Function, vectors: list[str], lanes: int) -> tuple[list[str], list[int]]:
    """One vector of the sums of all, and which vector's each of its lanes is. Of empty texts, only the latter.

    Two vectors become one of the halves of what each holds, low ones plus high ones, until a sum is a lane. From four
    lanes on, what is put together lies in the same 16 bytes of both, as instructions want it.
    """
    held, span = [[n] for n in range(len(vectors))], lanes
    while span > 1:
        pairs, made, order = len(vectors) // 2, [], []
        for n in range(pairs):
            parts = [(side, k) for side in (0, 1) for k in range(lanes // span)]
            if span <= 4:
                parts.sort(key=lambda part: (part[1] * span // 4, part[0]))
            starts = [side * lanes + k * span for side, k in parts]
            low, high = ([s + at + k for s in starts for k in range(span // 2)] for at in (0, span // 2))
            u, v = vectors[n], vectors[n + pairs]
            made.append(f.add(f.shuffle(u, v, low), f.shuffle(u, v, high)) if u else "")
            order.append([held[n + side * pairs][k] for side, k in parts])
        vectors, held, span = made, order, span // 2
    return vectors, held[0]


def weighted_rows(
    f: Function, lanes: int, a: Rows, b: StoredRows, out: Rows, sizes: tuple[str, str, str], groups: Sequence[int]
) -> None:
    """out[i] += the sum over j of a[i, j] * b[j]; `sizes`: rows of a, rows of b, columns of these."""
    rows, count, columns = sizes
    vector = f"<{lanes} x float>"
    unit = b.format.unit(lanes)

    def block(i: str, height: int, units: int, masked: bool) -> Callable[[str, list[str]], None]:
        def body(column: str, _: list[str]) -> None:
            mask = f.mask_below(f.sub(columns, column), lanes) if masked else ""
            weights = [f.gep(a[0], f.mul(f.add(i, r), a[1]), "float") for r in range(height)]
            lines = [f.gep(out[0], f.add(f.mul(f.add(i, r), out[1]), column), "float") for r in range(height)]
            places = [f.gep(line, q * lanes, "float") for line in lines for q in range(units * unit // lanes)]
            starts = [f.masked_load(vector, p, mask) if masked else f.load(vector, p) for p in places]
            first = b.format.at(f, column)

            def step(j: str, sums: list[str]) -> list[str]:
                p = f.offset(b.row(f, j), first)
                for at in range(0, units * unit // b.format.block * b.format.nbytes, CACHE_LINE):
                    f.prefetch(f.offset(p, AHEAD + at))
                if masked:
                    values = [b.format.masked(f, p, lanes, mask)]
                else:
                    parts = (f.offset(p, b.format.at(f, u * unit)) for u in range(units))
                    values = [x for part in parts for x in b.format.vectors(f, part, lanes)]
                found = []
                for r, line in enumerate(weights):
                    weight = f.splat(f.load("float", f.gep(line, j, "float")), lanes)
                    mine = sums[r * len(values) : (r + 1) * len(values)]
                    found += [f.fma(weight, x, s) for x, s in zip(values, mine, strict=True)]
                return found

            sums = f.loop(0, count, 1, [(vector, s) for s in starts], step)
            for place, s in zip(places, sums, strict=True):
                if masked:
                    f.masked_store(s, place, mask)
                else:
                    f.store(s, place)

        return body

    def group(i: str, height: int) -> None:
        several = max(4 * lanes // unit, 1)
        grouped, whole = f.mul(f.div(columns, several * unit), several * unit), f.and_(columns, -unit)
        f.loop(0, grouped, several * unit, [], block(i, height, several, False))
        f.loop(grouped, whole, unit, [], block(i, height, 1, False))
        if b.format.block == 1:
            f.loop(whole, columns, lanes, [], block(i, height, 1, True))

    in_groups(f, rows, groups, group)


def widened_rows(f: Function, lanes: int, source: StoredRows, to: Rows, rows: str, columns: str) -> None:
    """Copies rows of floats as f32."""
    whole = f.and_(columns, -lanes)
    rest = f.mask_below(f.sub(columns, whole), lanes)

    def row(i: str, _: list[str]) -> None:
        p, line = source.row(f, i), f.gep(to[0], f.mul(i, to[1]), "float")
        f.loop(0, whole, lanes, [], lambda d, _: f.store(source.format.some(f, p, d, lanes), f.gep(line, d, "float")))

        def tail() -> None:
            value = source.format.masked(f, f.offset(p, source.format.at(f, whole)), lanes, rest)
            f.masked_store(value, f.gep(line, whole, "float"), rest)

        f.if_(f.cmp("lt", whole, columns), tail)

    f.loop(0, rows, 1, [], row)


def paired_rows(f: Function, lanes: int, source: StoredRows, to: Rows, rows: str, words: str) -> None:
    """Copies rows of so many words, as the source has them."""
    whole = f.and_(words, -lanes)

    def row(i: str, _: list[str]) -> None:
        p, line = source.row(f, i), f.gep(to[0], f.mul(i, to[1]), "float")

        def put(count: int) -> Callable[[str, list[str]], None]:
            ty = vec("float", count)
            return lambda d, _: f.store(source.format.some(f, p, d, count), f.gep(line, d, "float"), ty=ty)

        f.loop(0, whole, lanes, [], put(lanes))
        f.loop(whole, words, 1, [], put(1))

    f.loop(0, rows, 1, [], row)


def zero_rows(f: Function, lanes: int, to: Rows, rows: str, columns: str) -> None:
    """Sets rows of f32 to zeros."""
    vector = f"<{lanes} x float>"
    whole = f.and_(columns, -lanes)
    rest = f.mask_below(f.sub(columns, whole), lanes)

    def row(i: str, _: list[str]) -> None:
        line = f.gep(to[0], f.mul(i, to[1]), "float")
        f.loop(0, whole, lanes, [], lambda d, _: f.store(0.0, f.gep(line, d, "float"), ty=vector))
        f.if_(f.cmp("lt", whole, columns), lambda: f.masked_store(0.0, f.gep(line, whole, "float"), rest, ty=vector))

    f.loop(0, rows, 1, [], row)


def block_rows(f: Function, columns: str) -> str:
    """How many rows of so many columns are a block."""
    return f.max(f.and_(f.div(BLOCK, f.max(columns, 1)), -4), 4)


def copy_rows(
    f: Function,
    lanes: int,
    source: Rows,
    target: Rows,
    part: tuple[str, str],
    block: tuple[str, str],
    streams: str | None,
) -> None:
    """Rows part[0]..part[1] of the target are set to those of the source; what lies a block after them is prefetched.

    `block`: the rows of a block and their columns.

    `streams`: whether they go past the caches (None: never). Then rows of the target start at lines of the cache, and
    `end_streams` comes before others read them.
    """
    vector = f"<{lanes} x float>"
    (first, stop), (height, columns) = part, block
    count = f.max(f.sub(stop, first), 0)
    apart = f.or_(f.cmp("ne", source[1], columns), f.cmp("ne", target[1], columns))
    turns, width = f.select(apart, count, 1, "i64"), f.select(apart, columns, f.mul(count, columns), "i64")
    ahead = f.mul(source[1], height)

    def row(i: str, _: list[str]) -> None:
        at = f.add(first, i)
        x, y = (f.gep(rows[0], f.mul(at, rows[1]), "float") for rows in (source, target))

        def elements(streamed: bool) -> None:
            def move(vectors: int) -> Callable[[str, list[str]], None]:
                def body(d: str, _: list[str]) -> None:
                    for q in range(0, vectors * lanes, LINE):
                        f.prefetch(f.gep(x, f.add(f.add(ahead, d), q), "float"))
                    places = [f.add(d, q * lanes) for q in range(vectors)]
                    values = [f.load(vector, f.gep(x, place, "float")) for place in places]
                    for place, value in zip(places, values, strict=True):
                        (f.stream if streamed else f.store)(value, f.gep(y, place, "float"))

                return body

            long, whole = f.and_(width, -TURN), f.and_(width, -lanes)
            f.loop(0, long, TURN, [], move(TURN // lanes))
            f.loop(long, whole, lanes, [], move(1))

            def tail() -> None:
                mask = f.mask_below(f.sub(width, whole), lanes)
                f.masked_store(f.masked_load(vector, f.gep(x, whole, "float"), mask), f.gep(y, whole, "float"), mask)

            f.if_(f.cmp("lt", whole, width), tail)

        if streams is None:
            elements(False)
        else:
            f.if_(streams, lambda: elements(True), lambda: elements(False))

    f.loop(0, turns, 1, [], row)


def end_streams(f: Function, target: Target) -> None:
    """Orders what was streamed before what this thread stores next, such as that its chunk is done."""
    if target.has("sse"):
        f.call("llvm.x86.sse.sfence", [])
