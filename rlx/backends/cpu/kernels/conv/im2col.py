"""im2col: gathers windows of an image, its channels last or in planes, as rows that `product` and `int8` multiply.

Where there are few outputs, `dots_routine` sums them as dot products of such rows. For `implicit_gemm`, which reads
windows where they lie, `lines_routine` copies the rows of images that need it, and says where windows begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.tile import Tile, transpose
from rlx.backends.cpu.kernels.conv.geometry import Geometry, GroupedGemmArguments, ImplicitGemmArguments
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, arguments_of, constant, size_of, vec, void
from rlx.backends.cpu.schedule.arguments import Argument, Arguments, Number, Routine, routines

__all__ = [
    "MOST_PLANES", "PIECES", "byte_routine", "dots_routine", "lines_routine", "planar_routine", "planar_words",
    "routine", "words",
]  # fmt: skip

MOST_PLANES = 4  # whose pixels are as many elements of a vector
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


@routines
def routine(tile: Tile) -> Routine:
    """`(ptr x, ptr out, ptr words, i64 p0, i64 p1, i64 step)`: windows of pixels [p0, p1), `step` elements apart.

    `x` is at the first image's first pixel, at the first channel of the group. It may write up to a vector past
    the last window. Nothing outside the image is read.
    """
    ty, lanes = tile.scalar, tile.lanes
    f = Function(f"rlx_windows_{tile.dtype}x{lanes}", ARGUMENTS)

    def tail(source: str, place: str, count: str) -> None:  # what is stored too much is overwritten by the next piece
        mask = f.mask_below(count, lanes, _mask_type(ty))
        f.store(f.masked_load(tile.vector, source, mask), place)

    _windows(f, ty, lanes, constant(0.0, tile.vector), tail)
    return Routine(f.name, Module([f]).text())


@routines
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


@routines
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


@routines
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


# ---- rows of images, which windows are read from where they lie


@routines
def lines_routine(tile: Tile, planes: int, grouped: bool, vectors: int = 0) -> Routine:
    """What prepares the rows of a kernel's results: see `_Lines`."""
    function = _Lines(tile, planes, grouped, vectors).function()
    return Routine(function.name, Module([function]).text())


class _Lines:
    """`(ptr x, ptr copies, ptr offsets, ptr words, i64 r0, i64 r1)`: what rows r0..r1 of results need.

    With 0 `planes` the channels of a pixel lie together, else there are so many planes. `grouped`: there are more
    channels than are copied, which are in so many `vectors`, if that is known and few.

    Writes the offset of the window of each of their pixels. With copies, these get the rows of the images that the
    windows cover, zeros around them, the rows of an image after those of the one before.
    """

    def __init__(self, tile: Tile, planes: int, grouped: bool, vectors: int) -> None:
        self.tile, self.planes, self.vectors = tile, planes, vectors
        self.ty, self.lanes = tile.scalar, tile.lanes
        arguments = ["ptr x", "ptr copies", "ptr offsets", "ptr words", "i64 r0", "i64 r1"]
        self.turned = grouped and planes > 1
        kind = f"_{planes}" if planes else f"_grouped{vectors or ''}" if grouped else ""
        kind = f"_turned{planes}" if self.turned else kind
        f = Function(f"rlx_lines_{tile.dtype}x{self.lanes}{kind}", arguments_of(", ".join(arguments)))
        self.f = f
        self.w = w = ImplicitGemmArguments.loaded(f)
        channels = w.channels
        self.picked = grouped and not self.turned
        self.apart = GroupedGemmArguments.load(f, "apart") if self.picked else "1"
        self.pixel_step = f.mul(w.stride_w, channels)
        self.copied = f.cmp("ne", w.copied, 0)
        self.zero = constant(0.0, tile.vector)
        # the part of a copied row that the image has, in pixels, then in elements
        self.left = f.max(f.min(w.pad_w, w.padded), 0)
        self.right = f.max(f.min(f.add(w.pad_w, w.width), w.padded), self.left)
        self.pixels, before = f.sub(self.right, self.left), f.sub(self.left, w.pad_w)
        self.skipped = before if planes else f.mul(before, w.x_c if grouped else channels)
        self.first, self.count = f.mul(self.left, channels), f.mul(self.pixels, channels)
        self.whole, self.after = f.mul(w.padded, channels), f.mul(self.right, channels)
        self.down = f.div(f.sub(w.extent_h, 1), f.max(f.sub(w.pieces, 1), 1))  # the dilation of rows

    def function(self) -> Function:
        """All of it, one image after the other."""
        f = self.f
        f.while_(
            [("i64", 0), ("i64", "%r0")],
            lambda state: f.cmp("lt", state[1], "%r1"),
            lambda state: self.image(state[1], state[:1]),
        )
        f.ret()
        return f

    # ---- a row of an image

    def clear(self, place: str, start: str | int, stop: str) -> None:
        """Sets elements start..stop to zero, those beyond in vectors that fit."""
        f, ty, vector = self.f, self.ty, self.tile.vector
        vectors = f.sub(stop, f.and_(f.sub(stop, start), self.lanes - 1))
        f.loop(start, vectors, self.lanes, [], lambda i, _: f.store(self.zero, f.gep(place, i, ty), ty=vector))
        f.loop(vectors, stop, 1, [], lambda i, _: f.store(0.0, f.gep(place, i, ty), ty=ty))

    def copy(self, source: str, place: str) -> None:
        """A row whose pixels have no other channels."""
        f, ty, count = self.f, self.ty, self.count
        vectors = f.and_(count, -self.lanes)

        def move(i: str, _: list[str]) -> None:
            f.store(f.load(self.tile.vector, f.gep(source, i, ty)), f.gep(place, i, ty))

        f.loop(0, vectors, self.lanes, [], move)
        f.loop(
            vectors, count, 1, [], lambda i, _: f.store(f.load(ty, f.gep(source, i, ty)), f.gep(place, i, ty), ty=ty)
        )

    def pick(self, source: str, place: str, some: str, step: str) -> None:
        """The channels of a group of some pixels `step` apart: in vectors, whose excess what comes after covers."""
        f, ty, lanes, channels = self.f, self.ty, self.lanes, self.w.channels

        def vector(p: str, q: str) -> Callable[[Operand, list[str]], None]:
            return lambda c, _: f.store(f.load(self.tile.vector, f.gep(p, c, ty)), f.gep(q, c, ty))

        def pixel(i: str, whole: str, known: Sequence[int] = ()) -> tuple[str, str]:
            p, q = f.gep(source, f.mul(i, step), ty), f.gep(place, f.mul(i, channels), ty)
            for at in known:
                vector(p, q)(at, [])
            if not known:
                f.loop(0, whole, lanes, [], vector(p, q))
            return p, q

        def exact(i: str, _: list[str]) -> None:
            whole = f.and_(channels, -lanes)
            p, q = pixel(i, whole)
            f.loop(whole, channels, 1, [], lambda c, _: f.store(f.load(ty, f.gep(p, c, ty)), f.gep(q, c, ty)))

        covered = f.max(f.sub(some, f.div(f.add(step, lanes - 1), step)), 0)  # what they read too much is in the row
        known = range(0, self.vectors * lanes, lanes)
        f.loop(0, covered, 1, [], lambda i, _: void(pixel(i, channels, known)))
        f.loop(covered, some, 1, [], exact)

    def spread(self, source: str, place: str) -> None:
        """A row in parts of columns that are `apart`, as windows see them together, each with the zeros around it."""
        f, w, ty, apart, channels = self.f, self.w, self.ty, self.apart, self.w.channels
        columns = f.div(w.padded, apart)

        def up(n: str, part: str) -> str:
            """The first column of a part that is no earlier than the n-th of the row."""
            return f.div(f.sub(f.add(n, f.sub(apart, 1)), part), apart)

        def part(number: str, _: list[str]) -> None:
            own = f.gep(place, f.mul(f.mul(number, columns), channels), ty)
            begin, end = up(self.left, number), up(self.right, number)
            skip = f.sub(f.add(number, f.mul(begin, apart)), self.left)
            self.clear(own, 0, f.mul(begin, channels))
            self.pick(
                f.gep(source, f.mul(skip, w.x_c), ty),
                f.gep(own, f.mul(begin, channels), ty),
                f.sub(end, begin),
                f.mul(apart, w.x_c),
            )
            self.clear(own, f.mul(end, channels), f.mul(columns, channels))

        f.loop(0, apart, 1, [], part)

    def gather(self, source: str, place: str) -> None:
        """A row of each plane, so that the channels of a pixel are together."""
        f, ty, planes, lanes = self.f, self.ty, self.planes, self.lanes
        sources = [f.gep(source, f.mul(self.w.x_c, c), ty) for c in range(planes)]
        vector, step = vec(ty, MOST_PLANES), MOST_PLANES
        whole = f.and_(self.pixels, -lanes) if size_of(ty) * lanes == 64 else "0"
        vectors = f.and_(self.pixels, -step)

        def wide(i: str, _: list[str]) -> None:
            """A vector of pixels, where any lanes of two registers are brought together by one instruction."""
            rows = [f.load(self.tile.vector, f.gep(p, i, ty)) for p in sources]
            out = f.gep(place, f.mul(i, planes), ty)
            for n in range(planes):
                places = [divmod(n * lanes + lane, planes) for lane in range(lanes)]  # (pixel, plane)
                merged = rows[0]
                for c in range(1, planes):
                    before = [pixel if c == 1 else lane for lane, (pixel, _) in enumerate(places)]
                    picks = [
                        lanes + pixel if plane == c else before[lane] for lane, (pixel, plane) in enumerate(places)
                    ]
                    merged = f.shuffle(merged, rows[c], picks)
                f.store(merged, f.gep(out, n * lanes, ty))

        def move(i: str, _: list[str]) -> None:
            rows = [f.load(vector, f.gep(p, i, ty)) for p in sources]
            rows += [rows[-1]] * (step - planes)
            out = f.gep(place, f.mul(i, planes), ty)
            for j, row in enumerate(transpose(f, rows)):  # what a pixel has too much the next one covers
                f.store(row, f.gep(out, j * planes, ty))

        def one(i: str, _: list[str]) -> None:
            out = f.gep(place, f.mul(i, planes), ty)
            for c, p in enumerate(sources):
                f.store(f.load(ty, f.gep(p, i, ty)), f.gep(out, c, ty), ty=ty)

        if whole != "0":
            f.loop(0, whole, lanes, [], wide)
        f.loop(whole, vectors, step, [], move)
        f.loop(vectors, self.pixels, 1, [], one)

    def turn(self, source: str, place: str) -> None:
        """A row of each plane of a group, so that the channels of a pixel are together: squares of both.

        The last squares overlap those before them; what fewer pixels than a square has leave of it is not stored.
        """
        f, ty, vector, lanes, planes = self.f, self.ty, self.tile.vector, self.lanes, self.planes
        narrow = f.mask_below(str(planes), lanes, _mask_type(ty)) if planes < lanes else ""
        sources = [f.gep(source, f.mul(self.w.x_c, c), ty) for c in range(planes)]

        def square(i: str, load: Callable[[str], str], put: Callable[[int, Callable[[], None]], None]) -> None:
            for start in (min(c, max(planes - lanes, 0)) for c in range(0, planes, lanes)):
                rows = [load(f.gep(p, i, ty)) for p in sources[start : start + lanes]]
                rows += [self.zero] * (lanes - len(rows))
                for number, pixel in enumerate(transpose(f, rows)):
                    at = f.gep(place, f.add(f.mul(f.add(i, number, "i64"), planes, "i64"), start, "i64"), ty)
                    store = partial(f.masked_store, pixel, at, narrow) if narrow else partial(f.store, pixel, at)
                    put(number, store)

        def whole(i: str, _: list[str]) -> None:
            square(f.min(i, f.sub(self.pixels, lanes)), lambda p: f.load(vector, p), lambda _, store: store())

        def few() -> None:
            mask = f.mask_below(self.pixels, lanes, _mask_type(ty))
            square(
                "0",
                lambda p: f.masked_load(vector, p, mask),
                lambda number, store: void(f.if_(f.cmp("gt", self.pixels, number), store)),
            )

        f.if_(f.cmp("ge", self.pixels, lanes), lambda: void(f.loop(0, self.pixels, lanes, [], whole)), few)

    # ---- the rows of results that lie in one image

    def image(self, r: str, state: list[str]) -> list[str]:
        """Copies what rows of results from r on need of their image, and writes the offsets of their windows."""
        f, w, (base,) = self.f, self.w, state
        number, y0 = f.div(r, w.out_height), f.rem(r, w.out_height)
        rows = f.min(f.sub(w.out_height, y0), f.sub("%r1", r))
        plane = f.mul(number, w.x_n)
        top = f.sub(f.mul(y0, w.stride_h), w.pad_h)
        lines = f.add(f.mul(f.sub(rows, 1), w.stride_h), w.extent_h)

        def line(j: str, _: list[str]) -> None:
            place = f.gep("%copies", f.add(base, f.mul(j, w.copied)), self.ty)
            y = f.add(top, j)

            def source() -> str:
                return f.gep("%x", f.add(plane, f.add(f.mul(y, w.x_h), self.skipped)), self.ty)

            def seen() -> None:
                inside = f.cmp("ult", y, w.height)
                f.if_(inside, lambda: self.copy_row(source, place), lambda: self.clear(place, 0, self.whole))

            # fewer rows than the dilation leave out some between those that their windows see
            f.if_(f.cmp("le", f.rem(j, f.max(self.down, 1)), f.mul(f.sub(rows, 1), w.stride_h)), seen)

        f.if_(self.copied, lambda: void(f.loop(0, lines, 1, [], line)))
        here = f.select(self.copied, base, f.add(plane, f.mul(top, w.x_h)))
        self.offsets(r, rows, here)
        return [f.add(base, f.mul(lines, w.copied)), f.add(r, rows)]

    def copy_row(self, source: Callable[[], str], place: str) -> None:
        """A row of the image with the zeros around it."""
        f = self.f
        if self.picked:
            self.spread(source(), place)
            return
        self.clear(place, 0, self.first)
        copy = self.turn if self.turned else self.gather if self.planes else self.copy
        copy(source(), f.gep(place, self.first, self.ty))
        self.clear(place, self.after, self.whole)

    def offsets(self, r: str, rows: str, here: str) -> None:
        """Writes the offsets of the windows of some rows of results from r on, the first of them `here`."""
        f, w, channels = self.f, self.w, self.w.channels
        row_step = f.mul(w.stride_h, f.select(self.copied, w.copied, w.x_h))
        table = f.gep("%offsets", f.mul(f.sub(r, "%r0"), w.out_width), "i64")

        def row(j: str, _: list[str]) -> None:
            start, places = f.add(here, f.mul(j, row_step)), f.gep(table, f.mul(j, w.out_width), "i64")

            def pixel(i: str, _: list[str]) -> None:
                f.store(f.add(start, f.mul(i, self.pixel_step)), f.gep(places, i, "i64"))

            def apart_pixel(i: str, state: list[str]) -> list[str]:
                part, column = state
                at = f.add(f.mul(part, parts), column)
                f.store(f.add(start, f.mul(at, channels)), f.gep(places, i, "i64"))
                part, column = f.add(part, right_step), f.add(column, down_step)
                over = f.cmp("ge", part, self.apart)
                return [f.sub(part, f.select(over, self.apart, 0)), f.add(column, f.cast("zext", over, "i64"))]

            if self.picked:
                parts = f.div(w.padded, self.apart)
                right_step, down_step = f.rem(w.stride_w, self.apart), f.div(w.stride_w, self.apart)
                f.loop(0, w.out_width, 1, [("i64", 0), ("i64", 0)], apart_pixel)
            else:
                f.loop(0, w.out_width, 1, [], pixel)

        f.loop(0, rows, 1, [], row)
