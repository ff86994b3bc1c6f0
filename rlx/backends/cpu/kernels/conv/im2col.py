"""Gathers the windows of pixels of an image with channels last, and sums few outputs of them as dot products."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.kernels.conv.geometry import Geometry
from rlx.backends.cpu.llvm.builder import Function, Module, Typed, constant, vec
from rlx.backends.cpu.schedule.arguments import Argument, Routine

__all__ = ["PIECES", "byte_routine", "dots_routine", "planar_routine", "planar_words", "routine", "words"]

PIECES = (4, 8)  # bytes that a row of a window of planes is moved in
ARGUMENTS = [("ptr", "x"), ("ptr", "out"), ("ptr", "words"), ("i64", "p0"), ("i64", "p1"), ("i64", "step")]


class WindowArg(IntEnum):
    """What the gathering reads; strides are in elements."""

    HEIGHT = 0
    WIDTH = 1
    OUT_HEIGHT = 2
    OUT_WIDTH = 3
    X_N = 4
    X_H = 5
    X_W = 6
    STRIDE_H = 7
    STRIDE_W = 8
    DILATION_H = 9
    DILATION_W = 10
    PAD_H = 11
    PAD_W = 12
    KERNEL_H = 13
    RUNS = 14  # pieces that a row of the kernel is gathered in
    TAPS = 15  # columns of a piece, which lie next to each other
    CHANNELS = 16


def words(geo: Geometry) -> list[Argument]:
    """The words in the order of `WindowArg`."""
    joined = geo.dilations[1] == 1 and geo.groups == 1 and geo.x_w == geo.channels
    runs: tuple[Argument, Argument] = (1, geo.kernel[1]) if joined else (geo.kernel[1], 1)
    return [
        geo.height,
        geo.width,
        geo.out_height,
        geo.out_width,
        geo.x_n,
        geo.x_h,
        geo.x_w,
        *geo.strides,
        *geo.dilations,
        *geo.pads,
        geo.kernel[0],
        *runs,
        geo.channels,
    ]


@cache
def routine(tile: gemm.Tile) -> Routine:
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
    w = {i: gemm.load_word(f, i) for i in WindowArg}
    channels, taps, width = w[WindowArg.CHANNELS], w[WindowArg.TAPS], w[WindowArg.WIDTH]
    piece = f.mul(channels, taps)
    run_step = f.mul(w[WindowArg.DILATION_W], taps)

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
        top = f.sub(f.mul(oy, w[WindowArg.STRIDE_H]), w[WindowArg.PAD_H])
        left = f.sub(f.mul(ox, w[WindowArg.STRIDE_W]), w[WindowArg.PAD_W])
        origin = f.gep("%x", f.mul(image, w[WindowArg.X_N]), ty)
        out = f.gep("%out", f.mul(f.sub(p, "%p0"), "%step"), ty)

        def row(k: str, state: list[str]) -> list[str]:
            y = f.add(top, f.mul(k, w[WindowArg.DILATION_H]))
            inside = f.cmp("ult", y, w[WindowArg.HEIGHT])
            line = f.gep(origin, f.mul(y, w[WindowArg.X_H]), ty)

            def run(r: str, state: list[str]) -> list[str]:
                at, place = state
                first = f.max(f.sub(0, at), 0)
                last = f.max(f.min(taps, f.sub(width, at)), 0)
                first = f.select(inside, f.min(first, last), taps)
                last = f.select(inside, last, taps)
                source = f.gep(line, f.mul(f.add(at, first), w[WindowArg.X_W]), ty)
                whole = f.cmp("eq", f.sub(last, first), taps)

                def edge() -> None:
                    clear(place, f.mul(first, channels))
                    copy(source, f.gep(place, f.mul(first, channels), ty), f.mul(f.sub(last, first), channels))
                    clear(f.gep(place, f.mul(last, channels), ty), f.mul(f.sub(taps, last), channels))

                f.if_(whole, lambda: copy(source, place, piece), edge)
                return [f.add(at, run_step), f.gep(place, piece, ty)]

            after = f.loop(0, w[WindowArg.RUNS], 1, [("i64", left), ("ptr", state[0])], run)
            return [after[1]]

        f.loop(0, w[WindowArg.KERNEL_H], 1, [("ptr", out)], row)
        return _next_pixel(f, w[WindowArg.OUT_HEIGHT], w[WindowArg.OUT_WIDTH], image, oy, ox)

    _each_pixel(f, w[WindowArg.OUT_HEIGHT], w[WindowArg.OUT_WIDTH], pixel)
    f.ret()


class PlanarArg(IntEnum):
    """What the gathering of bytes from planes reads; the columns of a row lie next to each other."""

    HEIGHT = 0
    WIDTH = 1
    OUT_HEIGHT = 2
    OUT_WIDTH = 3
    X_N = 4
    X_C = 5
    X_H = 6
    STRIDE_H = 7
    STRIDE_W = 8
    DILATION_H = 9
    PAD_H = 10
    PAD_W = 11


def planar_words(geo: Geometry, x_c: Argument) -> list[Argument]:
    """The words in the order of `PlanarArg`; `x_c` is the step from plane to plane."""
    return [
        geo.height,
        geo.width,
        geo.out_height,
        geo.out_width,
        geo.x_n,
        x_c,
        geo.x_h,
        *geo.strides,
        geo.dilations[0],
        *geo.pads,
    ]


@cache
def planar_routine(channels: int, rows: int, columns: int) -> Routine:
    """Windows of bytes as `byte_routine` makes them, in the order (channel, row, column), from planes.

    A row of a window is moved as a whole, in 4 or 8 bytes, where so many lie in the row of the image: what is moved
    too much is overwritten by the next row.
    """
    f = Function(f"rlx_windows_planes_{channels}x{rows}x{columns}", [*ARGUMENTS, ("i8", "fill")])
    w = {i: gemm.load_word(f, i) for i in PlanarArg}
    piece = next(size for size in PIECES if columns <= size)
    width, height = w[PlanarArg.WIDTH], w[PlanarArg.HEIGHT]
    row_step = f.mul(w[PlanarArg.DILATION_H], w[PlanarArg.X_H])
    last_column = f.sub(width, piece)
    last_row = f.sub(f.sub(height, 1), f.mul(w[PlanarArg.DILATION_H], rows - 1))

    def pixel(p: str, state: list[str]) -> list[str]:
        image, oy, ox = state
        top = f.sub(f.mul(oy, w[PlanarArg.STRIDE_H]), w[PlanarArg.PAD_H])
        left = f.sub(f.mul(ox, w[PlanarArg.STRIDE_W]), w[PlanarArg.PAD_W])
        at = f.add(f.add(f.mul(image, w[PlanarArg.X_N]), f.mul(top, w[PlanarArg.X_H])), left)
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
                plane = f.offset(plane, w[PlanarArg.X_C])

        def edge() -> None:
            def row(number: str, _: list[str]) -> None:
                c, k = f.div(number, rows), f.rem(number, rows)
                line = f.offset(f.offset(origin, f.mul(c, w[PlanarArg.X_C])), f.mul(k, row_step))
                inside = f.cmp("ult", f.add(top, f.mul(k, w[PlanarArg.DILATION_H])), height)
                place = f.offset(out, f.mul(number, columns))

                def single(i: str, _: list[str]) -> None:
                    there = f.and_(inside, f.cmp("ult", f.add(left, i), width), "i1")
                    value = f.if_(there, lambda: [f.load("i8", f.offset(line, i))], lambda: [("i8", "%fill")])
                    f.store(value[0], f.offset(place, i), ty="i8")

                f.loop(0, columns, 1, [], single)

            f.loop(0, channels * rows, 1, [], row)

        f.if_(whole, inner, edge)
        return _next_pixel(f, w[PlanarArg.OUT_HEIGHT], w[PlanarArg.OUT_WIDTH], image, oy, ox)

    _each_pixel(f, w[PlanarArg.OUT_HEIGHT], w[PlanarArg.OUT_WIDTH], pixel)
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
def dots_routine(tile: gemm.Tile) -> Routine:
    """`(ptr a, i64 lda, ptr w, ptr c, i64 ldc, i64 rows, i64 depth, i64 count)`: c[i, j] = a[i] . w[j], count <= 4."""
    function = _dots(tile)
    return Routine(function.name, Module([function]).text())


def _dots(tile: gemm.Tile) -> Function:
    ty, vector, lanes = tile.scalar, tile.vector, tile.lanes
    arguments = [("ptr", "a"), ("i64", "lda"), ("ptr", "w"), ("ptr", "c"), ("i64", "ldc"), ("i64", "rows")]
    f = Function(f"rlx_dots_{tile.dtype}x{lanes}", [*arguments, ("i64", "depth"), ("i64", "count")])
    whole = f.and_("%depth", -lanes)
    rest = f.mask_below(f.sub("%depth", whole), lanes, _mask_type(ty))

    def dots(count: int, rows: int) -> Callable[[str, list[str]], None]:
        def body(row: str, _: list[str]) -> None:
            lines = [f.gep("%a", f.mul(f.add(row, i), "%lda"), ty) for i in range(rows)]
            columns = [f.gep("%w", f.mul("%depth", j), ty) for j in range(count)]

            def add(k: str, sums: list[str], load: Callable[[str], str]) -> list[str]:
                y = [load(f.gep(p, k, ty)) for p in columns]
                found = []
                for i, p in enumerate(lines):
                    x = load(f.gep(p, k, ty))
                    found += [f.fma(x, y[j], sums[i * count + j]) for j in range(count)]
                return found

            zeros: list[Typed] = [(vector, constant(0.0, vector))] * (rows * count)
            sums = f.loop(0, whole, lanes, zeros, lambda k, a: add(k, a, lambda p: f.load(vector, p)))
            sums = add(whole, sums, lambda p: f.masked_load(vector, p, rest))
            for i in range(rows):
                out = f.gep("%c", f.mul(f.add(row, i), "%ldc"), ty)
                for j in range(count):
                    f.store(f.reduce(sums[i * count + j], f.add), f.gep(out, j, ty))

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
