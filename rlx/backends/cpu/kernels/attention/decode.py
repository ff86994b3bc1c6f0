"""Keys and values of attention as the rows that they are, for a few query rows."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.llvm.builder import Function, constant
from rlx.backends.cpu.target import Target

__all__ = ["Rows", "block_rows", "copy_rows", "end_streams", "rows_times_rows", "weighted_rows"]

BLOCK = 4096  # elements of rows that are copied, and used by all query rows, at a time: they stay in the first cache
TURN = 64  # elements that a copy moves at once
LINE = 16  # elements of a line of the cache

Rows = tuple[str, str]  # address of the first row, and elements from row to row


def rows_times_rows(f: Function, lanes: int, a: Rows, b: Rows, out: Rows, rows: str, columns: str, depth: str) -> None:
    """out[i, j] = a[i] . b[j], four rows of b at a time."""
    vector = f"<{lanes} x float>"
    whole = f.and_(depth, -lanes)
    rest = f.mask_below(f.sub(depth, whole), lanes)

    def dots(i: str, count: int) -> Callable[[str, list[str]], None]:
        def body(j: str, _: list[str]) -> None:
            left = f.gep(a[0], f.mul(i, a[1]), "float")
            right = [f.gep(b[0], f.mul(f.add(j, q), b[1]), "float") for q in range(count)]

            def step(d: str, sums: list[str]) -> list[str]:
                x = f.load(vector, f.gep(left, d, "float"))
                lines = [f.load(vector, f.gep(p, d, "float")) for p in right]
                return [f.fma(x, y, s) for y, s in zip(lines, sums, strict=True)]

            sums = f.loop(0, whole, lanes, [(vector, constant(0.0, vector))] * count, step)

            def tail() -> list[str]:
                x = f.masked_load(vector, f.gep(left, whole, "float"), rest)
                lines = [f.masked_load(vector, f.gep(p, whole, "float"), rest) for p in right]
                return [f.fma(x, y, s) for y, s in zip(lines, sums, strict=True)]

            sums = f.if_(f.cmp("lt", whole, depth), tail, lambda: list(sums))
            line = f.gep(out[0], f.add(f.mul(i, out[1]), j), "float")
            for q, s in enumerate(sums):
                f.store(f.reduce(s, f.add), f.gep(line, q, "float"))

        return body

    def row(i: str, _: list[str]) -> None:
        grouped = f.and_(columns, -4)
        f.loop(0, grouped, 4, [], dots(i, 4))
        f.loop(grouped, columns, 1, [], dots(i, 1))

    f.loop(0, rows, 1, [], row)


def weighted_rows(
    f: Function,
    lanes: int,
    a: Rows,
    b: Rows,
    out: Rows,
    rows: str,
    count: str,
    columns: str,
    more: str,
) -> None:
    """out[i] = the sum over j < count of a[i, j] * b[j], in blocks of four vectors of columns.

    Where `more` is true, the sum goes on from what is in `out`.
    """
    vector = f"<{lanes} x float>"

    def row(i: str, _: list[str]) -> None:
        weights, line = f.gep(a[0], f.mul(i, a[1]), "float"), f.gep(out[0], f.mul(i, out[1]), "float")

        def block(vectors: int, masked: bool) -> Callable[[str, list[str]], None]:
            def body(column: str, _: list[str]) -> None:
                mask = f.mask_below(f.sub(columns, column), lanes) if masked else ""

                places = [f.gep(line, f.add(column, q * lanes), "float") for q in range(vectors)]

                def start(p: str) -> str:
                    before = f.masked_load(vector, p, mask) if masked else f.load(vector, p)
                    return f.select(more, before, constant(0.0, vector), vector)

                def step(j: str, sums: list[str]) -> list[str]:
                    weight = f.splat(f.load("float", f.gep(weights, j, "float")), lanes)
                    p = f.gep(b[0], f.add(f.mul(j, b[1]), column), "float")
                    found = []
                    for q, s in enumerate(sums):
                        at = f.gep(p, q * lanes, "float")
                        x = f.masked_load(vector, at, mask) if masked else f.load(vector, at)
                        found.append(f.fma(weight, x, s))
                    return found

                sums = f.loop(0, count, 1, [(vector, start(p)) for p in places], step)
                for place, s in zip(places, sums, strict=True):
                    if masked:
                        f.masked_store(s, place, mask)
                    else:
                        f.store(s, place)

            return body

        grouped = f.mul(f.div(columns, 4 * lanes), 4 * lanes)
        whole = f.and_(columns, -lanes)
        f.loop(0, grouped, 4 * lanes, [], block(4, False))
        f.loop(grouped, whole, lanes, [], block(1, False))
        f.loop(whole, columns, lanes, [], block(1, True))

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
