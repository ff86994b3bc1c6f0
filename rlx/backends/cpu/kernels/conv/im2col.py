"""im2col: gathers windows of an image, its channels last or in planes, as rows that `product` and `int8` multiply.

Where there are few outputs, `dots_routine` sums them as dot products of such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.kernels.conv.geometry import Geometry
from rlx.backends.cpu.llvm.builder import Function, Module, constant, vec
from rlx.backends.cpu.schedule.arguments import Argument, Arguments, Number, Routine

__all__ = ["PIECES", "byte_routine", "dots_routine", "planar_routine", "planar_words", "routine", "words"]

PIECES = (4, 8)  # bytes that a row of a window of planes is moved in
ARGUMENTS = [("ptr", "x"), ("ptr", "out"), ("ptr", "words"), ("i64", "p0"), ("i64", "p1"), ("i64", "step")]


class WindowArguments(Arguments):
    """What the gathering reads; strides are in elements."""

    height: Number
    width: Number
    out_height: Number
    out_width: Number
    x_n: Number
    x_h: Number
    x_w: Number
    stride_h: Number
    stride_w: Number
    dilation_h: Number
    dilation_w: Number
    pad_h: Number
    pad_w: Number
    kernel_h: Number
    runs: Number  # pieces that a row of the kernel is gathered in
    taps: Number  # columns of a piece, which lie next to each other
    channels: Number


def words(geo: Geometry) -> list[Argument]:
    """The words of `WindowArguments`."""
    joined = geo.dilations[1] == 1 and geo.groups == 1 and geo.x_w == geo.channels
    runs, taps = (1, geo.kernel[1]) if joined else (geo.kernel[1], 1)
    return WindowArguments.given(**geo.sizes(WindowArguments), runs=runs, taps=taps)


@cache
def routine(tile: Tile) -> Routine:
    """`(ptr x, ptr out, ptr words, i64 p0, i64 p1, i64 step)`: windows of pixels [p0, p1), `step` elements apart.

    `x` is at the first image's first pixel, at the first channel of the group. Up to a vector after the last window is
    overwritten. Nothing outside the image is read.
    """
    ty, lanes = tile.scalar, tile.lanes
    f = Function(f"rlx_windows_{tile.dtype}x{lanes}", ARGUMENTS)

    def tail(source: str, place: str, count: str) -> None:  # what is stored too much is overwritten by the next piece
        mask = f.mask_below(count, lanes, _mask_type(ty))
        f.store(f.masked_load(tile.vector, source, mask), place)

    _windows(f, ty, lanes, constant(0.0, tile.vector), tail)
    return Routine(f.name, Module([f]).text())


@cache
def byte_routine() -> Routine:
    """The same for elements of a byte; a further argument (i8 fill) is what padding holds."""
    f = Function("rlx_windows_bytes", [*ARGUMENTS, ("i8", "fill")])

    def tail(source: str, place: str, count: str) -> None:
        at = "0"
        for size in (16, 8, 4, 2, 1):
            some = f.cmp("ne", f.and_(count, size, "i64"), 0, "i64")

            def move(size: int = size, at: str = at) -> None:
                f.store(f.load(f"i{8 * size}", f.gep(source, at, "i8"), align=1), f.gep(place, at, "i8"), align=1)

            f.if_(some, move)
            at = f.add(at, f.select(some, size, 0, "i64"), "i64")

    _windows(f, "i8", 32, f.splat("%fill", 32), tail)
    return Routine(f.name, Module([f]).text())


def _windows(f: Function, ty: str, lanes: int, fill: str, tail: Callable[[str, str, str], None]) -> None:
    """Emits the gathering; `tail(source, place, count)` moves less than a vector."""
    vector = vec(ty, lanes)
    w = WindowArguments.loaded(f)
    channels, taps, width = w.channels, w.taps, w.width
    piece = f.mul(channels, taps)
    run_step = f.mul(w.dilation_w, taps)

    def clear(place: str, count: str) -> None:
        f.loop(0, count, lanes, [], lambda i, _: f.store(fill, f.gep(place, i, ty), ty=vector))

    def copy(source: str, place: str, count: str) -> None:
        whole = f.and_(count, -lanes)

        def move(i: str, _: list[str]) -> None:
            f.store(f.load(vector, f.gep(source, i, ty)), f.gep(place, i, ty))

        f.loop(0, whole, lanes, [], move)
        left = f.sub(count, whole)
        f.if_(f.cmp("ne", left, 0), lambda: tail(f.gep(source, whole, ty), f.gep(place, whole, ty), left))

    def pixel(p: str, state: list[str]) -> list[str]:
        image, oy, ox = state
        top = f.sub(f.mul(oy, w.stride_h), w.pad_h)
        left = f.sub(f.mul(ox, w.stride_w), w.pad_w)
        origin = f.gep("%x", f.mul(image, w.x_n), ty)
        out = f.gep("%out", f.mul(f.sub(p, "%p0"), "%step"), ty)

        def row(k: str, state: list[str]) -> list[str]:
            y = f.add(top, f.mul(k, w.dilation_h))
            inside = f.cmp("ult", y, w.height)
            line = f.gep(origin, f.mul(y, w.x_h), ty)

            def run(r: str, state: list[str]) -> list[str]:
                at, place = state
                first = f.max(f.sub(0, at), 0)
                last = f.max(f.min(taps, f.sub(width, at)), 0)
                first = f.select(inside, f.min(first, last), taps)
                last = f.select(inside, last, taps)
                source = f.gep(line, f.mul(f.add(at, first), w.x_w), ty)
                whole = f.cmp("eq", f.sub(last, first), taps)

                def edge() -> None:
                    clear(place, f.mul(first, channels))
                    copy(source, f.gep(place, f.mul(first, channels), ty), f.mul(f.sub(last, first), channels))
                    clear(f.gep(place, f.mul(last, channels), ty), f.mul(f.sub(taps, last), channels))

                f.if_(whole, lambda: copy(source, place, piece), edge)
                return [f.add(at, run_step), f.gep(place, piece, ty)]

            after = f.loop(0, w.runs, 1, [("i64", left), ("ptr", state[0])], run)
            return [after[1]]

        f.loop(0, w.kernel_h, 1, [("ptr", out)], row)
        return _next_pixel(f, w.out_height, w.out_width, image, oy, ox)

    _each_pixel(f, w.out_height, w.out_width, pixel)
    f.ret()


class PlanarArguments(Arguments):
    """What the gathering of bytes from planes reads; the columns of a row lie next to each other."""

    height: Number
    width: Number
    out_height: Number
    out_width: Number
    x_n: Number
    x_c: Number
    x_h: Number
    stride_h: Number
    stride_w: Number
    dilation_h: Number
    pad_h: Number
    pad_w: Number


def planar_words(geo: Geometry, x_c: Argument) -> list[Argument]:
    """The words of `PlanarArguments`; `x_c` is the step from plane to plane."""
    return PlanarArguments.given(**geo.sizes(PlanarArguments), x_c=x_c)


@cache
def planar_routine(channels: int, rows: int, columns: int) -> Routine:
    """Windows of bytes as `byte_routine` makes them, in the order (channel, row, column), from planes.

    A row of a window is moved as a whole, in 4 or 8 bytes, where so many lie in the row of the image: what is moved
    too much is overwritten by the next row.
    """
    f = Function(f"rlx_windows_planes_{channels}x{rows}x{columns}", [*ARGUMENTS, ("i8", "fill")])
    w = PlanarArguments.loaded(f)
    piece = next(size for size in PIECES if columns <= size)
    width, height = w.width, w.height
    row_step = f.mul(w.dilation_h, w.x_h)
    last_column = f.sub(width, piece)
    last_row = f.sub(f.sub(height, 1), f.mul(w.dilation_h, rows - 1))

    def pixel(p: str, state: list[str]) -> list[str]:
        image, oy, ox = state
        top = f.sub(f.mul(oy, w.stride_h), w.pad_h)
        left = f.sub(f.mul(ox, w.stride_w), w.pad_w)
        at = f.add(f.add(f.mul(image, w.x_n), f.mul(top, w.x_h)), left)
        origin = f.offset("%x", at)
        out = f.offset("%out", f.mul(f.sub(p, "%p0"), "%step"))
        whole = f.and_(f.cmp("ge", left, 0), f.cmp("le", left, last_column), "i1")
        whole = f.and_(whole, f.and_(f.cmp("ge", top, 0), f.cmp("le", top, last_row), "i1"), "i1")

        def inner() -> None:
            plane = origin
            for c in range(channels):
                line = plane
                for k in range(rows):
                    value = f.load(f"i{8 * piece}", line, align=1)
                    f.store(value, f.offset(out, (c * rows + k) * columns), align=1)
                    line = f.offset(line, row_step)
                plane = f.offset(plane, w.x_c)

        def edge() -> None:
            def row(number: str, _: list[str]) -> None:
                c, k = f.div(number, rows), f.rem(number, rows)
                line = f.offset(f.offset(origin, f.mul(c, w.x_c)), f.mul(k, row_step))
                inside = f.cmp("ult", f.add(top, f.mul(k, w.dilation_h)), height)
                place = f.offset(out, f.mul(number, columns))

                def single(i: str, _: list[str]) -> None:
                    there = f.and_(inside, f.cmp("ult", f.add(left, i), width), "i1")
                    value = f.if_(there, lambda: [f.load("i8", f.offset(line, i))], lambda: [("i8", "%fill")])
                    f.store(value[0], f.offset(place, i), ty="i8")

                f.loop(0, columns, 1, [], single)

            f.loop(0, channels * rows, 1, [], row)

        f.if_(whole, inner, edge)
        return _next_pixel(f, w.out_height, w.out_width, image, oy, ox)

    _each_pixel(f, w.out_height, w.out_width, pixel)
    f.ret()
    return Routine(f.name, Module([f]).text())


def _next_pixel(f: Function, height: str, width: str, image: str, oy: str, ox: str) -> list[str]:
    ox = f.add(ox, 1)
    wrapped = f.cmp("eq", ox, width)
    oy = f.select(wrapped, f.add(oy, 1), oy)
    below = f.cmp("eq", oy, height)
    return [f.add(image, f.cast("zext", below, "i64")), f.select(below, 0, oy), f.select(wrapped, 0, ox)]


def _each_pixel(f: Function, height: str, width: str, pixel: Callable[[str, list[str]], list[str]]) -> None:
    """Runs `pixel` over pixels [p0, p1) with the image, row and column of each."""
    rest, ox = f.div("%p0", width), f.rem("%p0", width)
    image, oy = f.div(rest, height), f.rem(rest, height)
    f.loop("%p0", "%p1", 1, [("i64", image), ("i64", oy), ("i64", ox)], pixel)


def _mask_type(ty: str) -> str:
    return "i32" if ty == "float" else "i64"


@cache
def dots_routine(tile: Tile) -> Routine:
    """`(ptr a, i64 lda, ptr w, ptr c, i64 ldc, i64 rows, i64 depth, i64 count)`: c[i, j] = a[i] . w[j], count <= 4."""
    function = _dots(tile)
    return Routine(function.name, Module([function]).text())


def _dots(tile: Tile) -> Function:
    ty, vector, lanes = tile.scalar, tile.vector, tile.lanes
    arguments = [("ptr", "a"), ("i64", "lda"), ("ptr", "w"), ("ptr", "c"), ("i64", "ldc"), ("i64", "rows")]
    f = Function(f"rlx_dots_{tile.dtype}x{lanes}", [*arguments, ("i64", "depth"), ("i64", "count")])
    whole = f.and_("%depth", -lanes)
    rest = f.mask_below(f.sub("%depth", whole), lanes, _mask_type(ty))

    def dots(count: int, rows: int) -> Callable[[str, list[str]], None]:
        def body(row: str, _: list[str]) -> None:
            lines = [f.gep("%a", f.mul(f.add(row, i), "%lda"), ty) for i in range(rows)]
            columns = [f.gep("%w", f.mul("%depth", j), ty) for j in range(count)]

            sums = Accumulators(f, tile, rows, count)

            def add(k: str, load: Callable[[str], str]) -> list[str]:
                sums.add(lambda i: load(f.gep(lines[i], k, ty)), lambda j: load(f.gep(columns[j], k, ty)))
                return []

            sums.loop(0, whole, lanes, [], lambda k, _: add(k, lambda p: f.load(vector, p)))
            add(whole, lambda p: f.masked_load(vector, p, rest))
            for i in range(rows):
                out = f.gep("%c", f.mul(f.add(row, i), "%ldc"), ty)
                for j in range(count):
                    f.store(f.reduce(sums.values[i * count + j], f.add), f.gep(out, j, ty))

        return body

    def case(count: int) -> Callable[[], None]:
        def body() -> None:
            rows = 8 // count  # enough sums under way, and few enough for the registers
            grouped = f.sub("%rows", f.rem("%rows", rows))
            f.loop(0, grouped, rows, [], dots(count, rows))
            f.loop(grouped, "%rows", 1, [], dots(count, 1))

        return body

    f.switch("%count", {count: case(count) for count in range(1, 5)})
    f.ret()
    return f
