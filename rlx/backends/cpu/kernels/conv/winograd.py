"""Convolutions with fewer products: Winograd's F(4x4, 3x3) and F(2x2, 3x3), and F(m, r) along one axis.

A tile of m x m results comes from (m + 2)^2 products instead of 9 m^2: tiles of the image and the weights are
transformed, one matrix product [tiles, C] x [C, O] is made for each of the (m + 2)^2 positions, and its results are
transformed back. Images have their channels last, so transforms run in vectors of channels. Windows of r pixels of one
row or column take m + r - 1 products for m results: F(4, 3), F(4, 5) and F(2, 7).
With normal inputs and 256 channels the largest error in f32, relative to the largest result, is 6e-7 for F(2x2), 5e-6
for F(4x4), 2e-6 for F(4, 3), 3e-6 for F(4, 5) and F(2, 7); plain sums have 4e-7 to 7e-7. The usual points 0, 1, -1, 2,
-2 would give three times the error of those used here.
An infinity or nan in the image spoils the results of its whole tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.chunk import chunk_of
from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.tile import Tile, tile_of
from rlx.backends.cpu.kernels.alternatives import alternatives
from rlx.backends.cpu.kernels.conv.geometry import conv_epilogue, geometry
from rlx.backends.cpu.kernels.conv.weights import ConvStrategy, with_weights
from rlx.backends.cpu.kernels.conv.winograd_forms import (
    F4X4,
    FORMS,
    WEIGHTS,
    Form,
    Matrix,
    combine,
    transforms,
    weights_of,
    window,
)
from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Argument,
    Arguments,
    ArgumentTable,
    Extents,
    KernelCode,
    Number,
    Part,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
    once,
    part,
    routines,
)
from rlx.backends.cpu.schedule.choice import Choice, Limit
from rlx.backends.cpu.schedule.matmul import K_BLOCK
from rlx.backends.cpu.schedule.winograd import WinogradParts, WinogradSchedule
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size, bounds
from rlx.kernels.expr import Load, const
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store

__all__ = ["OrSums", "Winograd", "choose", "fastest", "few_pixels", "has_few", "possible"]

MIN_CHANNELS = 16  # a whole vector of any machine: the transforms overlap the last one with the one before
WIDTH = WinogradSchedule.WIDTH
# Transformed by F(4x4) these would be four times as many bytes, read for few pixels. The widest vectors compute twice
# as fast as others, and wait for memory as long.
MANY_WEIGHTS, MANY_FOR_WIDE = 512 * 384, 256 * 256
A_PRODUCT = 8  # steps of a sum that the start and the end of a product cost


class WinogradArguments(Arguments):
    """The arguments of a kernel; strides and steps are in elements, places in scratch in bytes."""

    x: Address
    x_n: Number
    x_h: Number
    x_w: Number
    height: Number
    width: Number
    channels: Number
    pad_h: Number
    pad_w: Number
    out_height: Number
    out_width: Number
    weights: Address
    outputs: Number
    out: Address
    out_step: Number  # from pixel to pixel
    tiles_h: Number
    tiles_w: Number
    tiles: Number  # of all images
    tile_chunk: Number
    panel_chunk: Number
    lda: Number  # from tile to tile of the transformed image
    ldc: Number  # from tile to tile of the products
    column_step: Number  # from position to position of the transformed image
    product_step: Number  # and of the products
    scratch: Address
    scratch_stride: Number
    columns: Number  # places in scratch, after a pixel of zeros
    products: Number
    sums: Number
    block: Address  # routines
    input: Address
    output: Address


def unsuited(kernel: Kernel) -> str | None:
    """Why no form can compute a convolution; None where one can."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    reasons = {
        "it is not of f32": anchor.x.dtype.name != "f32",
        "its sums have to be exact": anchor.exact,
        "it has strides": {*anchor.strides} != {1},
        "its windows are dilated": {*anchor.dilations} != {1},
        "its pads are negative, or known at the run only": any(not isinstance(p, int) or p < 0 for p in anchor.pads),
        f"it has fewer than {MIN_CHANNELS} channels or outputs a group, or as many as the run says": any(
            not isinstance(s, int) or s < MIN_CHANNELS for s in _sizes(anchor)
        ),
        "its weights do not lie in memory as f32, f16 or bf16": weights_of(anchor) is None,
        f"its windows are {'x'.join(map(str, anchor.w_shape[2:]))}": all(f.r != window(anchor) for f in FORMS.values()),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _sizes(anchor: Conv) -> tuple[Size, Size]:
    """Outputs and channels of a group."""
    return anchor.w_shape[0] // anchor.groups, anchor.w_shape[1]


def _is_fixed(anchor: Conv) -> bool:
    """Whether the weights are transformed once, before any run."""
    found = weights_of(anchor)
    return found is not None and found[0].source.is_fixed


def possible(kernel: Kernel) -> list[str]:
    """The names of the forms that can compute a convolution."""
    assert isinstance(kernel.anchor, Conv)
    if unsuited(kernel) is not None:
        return []
    return [name for name, form in FORMS.items() if form.r == window(kernel.anchor)]


def choose(kernel: Kernel, target: Target) -> str:
    """The name of the form that is thought to be fastest for more than `few_pixels`, "" for none; by channels only.

    So neither the size of an image nor whether it is known changes bits, even where small images of weights that each
    run transforms would be faster by smaller tiles.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    names = possible(kernel)
    if not names:
        return ""
    outputs, channels = _sizes(anchor)
    assert isinstance(outputs, int)
    assert isinstance(channels, int)
    return fastest(names, outputs, channels, target)


def fastest(names: Sequence[str], outputs: int, channels: int, target: Target) -> str:
    """The one of these forms that takes the fewest operations for such sizes of a group, "" if plain sums do."""
    panels = -(-outputs // (WIDTH // 2)) / 2

    def cycles(form: Form) -> float:
        """Of one result pixel."""
        moved = form.cycles * (channels + outputs)
        return (form.positions * (channels + A_PRODUCT) * panels + moved) / prod(form.m)

    costs = {name: cycles(FORMS[name]) for name in names}
    if channels * outputs >= (MANY_FOR_WIDE if target.vector_bytes == 64 else MANY_WEIGHTS):
        costs.pop(F4X4, None)
    best = min(costs, key=lambda name: costs[name])
    return best if costs[best] < prod(FORMS[best].r) * channels * panels else ""


def few_pixels(name: str, target: Target) -> int:
    """Up to how many result pixels of an image plain sums take less time: those of one tile, for windows of a line.

    They read half of the weights and make hardly more products, which the widest vectors do faster than they read.
    """
    form = FORMS[name]
    return prod(form.m) if 1 in form.m and target.vector_bytes == 64 else 0


def has_few(kernel: Kernel, name: str, target: Target) -> bool | None:
    """Whether a convolution has so few pixels; None where that is known at the run only."""
    geo = geometry(kernel)
    most, (low, high) = few_pixels(name, target), bounds(geo.out_height * geo.out_width)
    if most == 0 or (low is not None and low > most):
        return False
    return True if high is not None and high <= most else None


def _layout(kernel: Kernel, name: str) -> list[Kernel]:
    """The kernel that transforms the weights, and the convolution that reads them."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    outputs, channels = _sizes(anchor)
    assert isinstance(outputs, int)
    shape = (FORMS[name].positions, anchor.groups * -(-outputs // WIDTH), channels, WIDTH)
    kind = "prepared" if _is_fixed(anchor) else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.winograd", kind, shape, anchor.x.dtype)
    vars = out_vars(4)
    store = Store(buffer, shape, vars, const(0, buffer.dtype))
    packed = replace(anchor, x=const(0, buffer.dtype))
    weights = Kernel("winograd weights", (store,), packed, nodes=kernel.nodes, strategy=WEIGHTS)
    return [weights, with_weights(kernel, buffer)]


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    """The convolution with its epilogue."""
    anchor, form = kernel.anchor, form_of(kernel)
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, anchor.x.dtype)
    tile = tile_of(anchor.x.dtype, target)
    sizes = (geo.batch, geo.channels, geo.outputs, geo.out_height, geo.out_width)
    kept = 0 if epilogue.in_place else tiles_beside(epilogue, form)
    cut = once(WinogradSchedule(form.m, form.n, sizes, kept, target.rates, geo.groups))
    table = ArgumentTable(_words(kernel, cut, tile, epilogue))
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, tile.lanes)
    epilogue.prepare(emitter)
    chunk = _Chunk.begin(f, form, table.load(f, geo.groups) if geo.groups > 1 else None)
    _transform_images(f, chunk)
    _multiply(f, chunk, tile)
    _transform_back(f, chunk, epilogue, emitter)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = part(cut, "ends", 3)
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites), scratch)


def _words(kernel: Kernel, cut: Callable[[Extents], WinogradParts], tile: Tile, epilogue: Epilogue) -> list[Argument]:
    """What `WinogradArguments` are."""
    anchor, form = kernel.anchor, form_of(kernel)
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    assert isinstance(anchor.w, Load)
    geo = geometry(kernel)
    return WinogradArguments.given(
        **geo.sizes(WinogradArguments),
        x=Pointer(anchor.x.source, geo.x.constant * 4),
        weights=Pointer(anchor.w.source),
        out=epilogue.out,
        out_step=epilogue.out_step,
        tiles_h=part(cut, "tiles_h"),
        tiles_w=part(cut, "tiles_w"),
        tiles=part(cut, "tiles"),
        tile_chunk=part(cut, "tile_chunk"),
        panel_chunk=part(cut, "panel_chunk"),
        lda=part(cut, "lda"),
        ldc=part(cut, "ldc"),
        column_step=part(cut, "column_step"),
        product_step=part(cut, "product_step"),
        scratch=Scratch(),
        scratch_stride=ScratchStride(),
        columns=part(cut, "ends", 0),
        products=part(cut, "ends", 1),
        sums=part(cut, "ends", 2),
        block=gemm.block_routine(tile),
        input=_routine("input", form, tile),
        output=_routine("output", form, tile),
    )


@dataclass(frozen=True)
class _Chunk:
    """A chunk's values in the code: arguments, tiles `t0` to `t1`, outputs `n0` to `n1`, and its places in scratch.

    Outputs are counted through all groups; `x` is the image from the group's first channel on.
    """

    form: Form
    w: WinogradArguments
    x: str
    weights: str  # of the first position
    step: str  # from position to position of them
    columns: str  # outputs of a chunk but the last
    t0: str
    t1: str
    n0: str
    n1: str
    zeros: str  # a pixel of zeros
    made: str  # the transformed image
    products: str
    sums: str  # results that can't be made where they belong

    @staticmethod
    def begin(f: Function, form: Form, groups: str | None) -> _Chunk:
        w = WinogradArguments.loaded(f)
        at = chunk_of(f, w.tiles, w.tile_chunk, w.outputs, w.panel_chunk, WIDTH, groups=groups, even_rows=True)
        panels = f.div(f.add(w.outputs, WIDTH - 1), WIDTH)
        panel = f.mul(w.channels, WIDTH)
        weights = f.gep(w.weights, f.mul(at.n0, w.channels), "float")
        x, n0, n1 = w.x, at.n0, at.n1
        if groups is not None:
            weights = f.gep(weights, f.mul(f.mul(at.matrix, panels), panel), "float")
            x, first = f.gep(x, f.mul(at.matrix, w.channels), "float"), f.mul(at.matrix, w.outputs)
            n0, n1, panels = f.add(first, n0), f.add(first, n1), f.mul(panels, groups)
        zeros = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        f.loop(0, w.channels, 1, [], lambda c, _: f.store(0.0, f.gep(zeros, c, "float"), ty="float"))
        made, products, sums = (f.offset(zeros, i) for i in (w.columns, w.products, w.sums))
        step = f.mul(panels, panel)
        return _Chunk(form, w, x, weights, step, at.room, at.r0, at.r1, n0, n1, zeros, made, products, sums)

    def place(self, f: Function, t: str) -> tuple[str, str, str]:
        """Image, first row and first column of a tile's results."""
        rest, across = f.div(t, self.w.tiles_w), f.rem(t, self.w.tiles_w)
        image, down = f.div(rest, self.w.tiles_h), f.rem(rest, self.w.tiles_h)
        return image, f.mul(down, self.form.m[0]), f.mul(across, self.form.m[1])


def _transform_images(f: Function, chunk: _Chunk) -> None:
    """All channels of a chunk's tiles to the transformed image."""
    w = chunk.w

    def turn(t: str, _: list[str]) -> None:
        image, oy, ox = chunk.place(f, t)
        x = f.gep(chunk.x, f.mul(image, w.x_n), "float")
        out = f.gep(chunk.made, f.mul(f.sub(t, chunk.t0), w.lda), "float")
        top, left = f.sub(oy, w.pad_h), f.sub(ox, w.pad_w)
        f.call(w.input, [x, chunk.zeros, out, "%words", top, left])

    f.loop(chunk.t0, chunk.t1, 1, [], turn)


def _multiply(f: Function, chunk: _Chunk, tile: Tile) -> None:
    """Each position's product of the transformed image with its weights."""
    w, depth = chunk.w, chunk.w.channels
    panel = f.mul(depth, WIDTH)
    rows, count = f.sub(chunk.t1, chunk.t0), f.sub(chunk.n1, chunk.n0)
    whole = WIDTH // 2 if tile.half_rows else WIDTH  # there is room for whole tiles, and no masks are needed
    columns = f.and_(f.add(count, whole - 1), -whole)

    def position(i: str, _: list[str]) -> None:
        a = f.gep(chunk.made, f.mul(i, w.column_step), "float")
        b = f.gep(chunk.weights, f.mul(i, chunk.step), "float")
        c = f.gep(chunk.products, f.mul(i, w.product_step), "float")
        sizes = (rows, columns, depth, ("i64", K_BLOCK))
        f.call(w.block, [a, w.lda, b, panel, c, w.ldc, *sizes, "null"])

    f.loop(0, chunk.form.positions, 1, [], position)


def _transform_back(f: Function, chunk: _Chunk, epilogue: Epilogue, emitter: Emitter) -> None:
    """The products to pixels, with the epilogue."""
    w, form = chunk.w, chunk.form
    count = f.sub(chunk.n1, chunk.n0)

    side = tiles_beside(epilogue, form)

    def turn(state: list[str]) -> list[str]:
        (t,) = state
        image, oy, ox = chunk.place(f, t)
        rows = f.min(f.sub(w.out_height, oy), form.m[0])
        line = f.mul(f.add(f.mul(image, w.out_height), oy), w.out_width)
        first = f.add(line, ox)
        many = f.min(f.sub(chunk.t1, t), f.min(f.sub(w.tiles_w, f.div(ox, form.m[1])), side)) if side > 1 else 1
        target, step = epilogue.place(f, (w.out, w.out_step), first, chunk.n0, (chunk.sums, chunk.columns))
        line_step = f.mul(step, w.out_width if epilogue.in_place else side * form.m[1])

        def one(i: str, _: list[str]) -> None:
            source = f.gep(chunk.products, f.mul(f.add(f.sub(t, chunk.t0), i), w.ldc), "float")
            pixel = f.mul(i, form.m[1])
            cols = f.min(f.sub(w.out_width, f.add(ox, pixel)), form.m[1])
            place = f.gep(target, f.mul(pixel, step), "float")
            f.call(w.output, [source, place, "%words", step, line_step, count, rows, cols])

        f.loop(0, many, 1, [], one)
        cols = f.min(f.sub(w.out_width, ox), f.mul(many, form.m[1]))

        def row(r: str, _: list[str]) -> None:
            p = f.add(first, f.mul(r, w.out_width))
            at = f.gep(target, f.mul(r, line_step), "float")
            epilogue.block(emitter, (p, f.add(p, cols)), (chunk.n0, chunk.n1), at, step)

        if not epilogue.is_nothing:
            f.loop(0, rows, 1, [], row)
        return [f.add(t, many)]

    f.while_([("i64", chunk.t0)], lambda state: f.cmp("lt", state[0], chunk.t1), turn)


def tiles_beside(epilogue: Epilogue, form: Form) -> int:
    """How many tiles of a row are finished together: a line of the cache, where results are put into planes."""
    return 1 if epilogue.along is None else max(WIDTH // form.m[1], 1)


@routines
def _routine(which: str, form: Form, tile: Tile) -> Routine:
    function = (_input if which == "input" else _output)(form, tile)
    return Routine(function.name, Module([function]).text())


def _name(which: str, form: Form, tile: Tile) -> str:
    sizes = "_".join(f"{m}_{r}" for m, r in zip(form.m, form.r, strict=True))
    return f"rlx_winograd_{which}_{sizes}x{tile.lanes}"


def _both_ways(
    f: Function,
    matrices: tuple[Matrix, Matrix],
    room: str,
    vector: str,
    load: Callable[[int, int], str],
    put: Callable[[int, int, str], None],
) -> None:
    """Transforms a tile by a matrix down and one across; the values between them are kept at `room`."""
    down, across = matrices
    rows, columns, made = len(down[0]), len(across[0]), len(across)
    lines = [[load(r, j) for j in range(columns)] for r in range(rows)] if 1 in (rows, columns) else []
    if rows == 1:
        for j, value in enumerate(combine(f, across, lines[0], vector)):
            put(0, j, value)
        return
    if columns == 1:
        for i, value in enumerate(combine(f, down, [line[0] for line in lines], vector)):
            put(i, 0, value)
        return
    for r in range(rows):
        for j, value in enumerate(combine(f, across, [load(r, j) for j in range(columns)], vector)):
            f.store(value, f.gep(room, r * made + j, vector))
    for j in range(made):
        d = [f.load(vector, f.gep(room, r * made + j, vector)) for r in range(rows)]
        for i, value in enumerate(combine(f, down, d, vector)):
            put(i, j, value)


def _input(form: Form, tile: Tile) -> Function:
    """Transforms all channels of one tile of an image: position i goes to out + i * column_step.

    `(ptr x, ptr zeros, ptr out, ptr words, i64 top, i64 left)`: `x` is the image, `zeros` a pixel for those outside.
    """
    lanes, (high, wide), vector = tile.lanes, form.n, tile.vector
    names = ("x", "zeros", "out", "words")
    f = Function(_name("input", form, tile), [*(("ptr", i) for i in names), ("i64", "top"), ("i64", "left")])
    w = WinogradArguments.loaded(f)
    room = f.alloca(vector, form.positions)
    pixels = f.alloca("ptr", form.positions)
    down, across = (transforms(m, r)[2] for m, r in zip(form.m, form.r, strict=True))
    last = f.sub(w.channels, lanes)

    def channels(load: Callable[[int, int, str], str]) -> None:
        def turn(c: str, _: list[str]) -> None:
            at = f.min(c, last)
            out = f.gep("%out", at, "float")

            def put(i: int, j: int, value: str) -> None:
                f.store(value, f.gep(out, f.mul(w.column_step, i * wide + j), "float"))

            _both_ways(f, (down, across), room, vector, lambda r, j: load(r, j, at), put)

        f.loop(0, w.channels, lanes, [], turn)

    rows = [f.gep("%x", f.mul(f.add("%top", r), w.x_h), "float") for r in range(high)]
    columns = [f.mul(f.add("%left", j), w.x_w) for j in range(wide)]

    def inside() -> None:
        channels(lambda r, j, c: f.load(vector, f.gep(rows[r], f.add(columns[j], c), "float")))

    def border() -> None:
        for r in range(high):
            for j in range(wide):
                y = f.cmp("ult", f.add("%top", r), w.height)
                x = f.cmp("ult", f.add("%left", j), w.width)
                p = f.select(f.and_(y, x), f.gep(rows[r], columns[j], "float"), "%zeros", "ptr")
                f.store(p, f.gep(pixels, r * wide + j, "ptr"))
        channels(lambda r, j, c: f.load(vector, f.gep(f.load("ptr", f.gep(pixels, r * wide + j, "ptr")), c, "float")))

    begins = f.and_(f.cmp("ge", "%top", 0), f.cmp("ge", "%left", 0))
    below, beside = f.add("%top", high), f.add("%left", wide)
    ends = f.and_(f.cmp("le", below, w.height), f.cmp("le", beside, w.width))
    f.if_(f.and_(begins, ends), inside, border)
    f.ret()
    return f


def _output(form: Form, tile: Tile) -> Function:
    """Transforms `count` outputs of one tile back and stores its pixels.

    `(ptr products, ptr target, ptr words, i64 step, i64 line_step, i64 count, i64 rows, i64 cols)`: pixels are `step`
    elements apart in a row, rows `line_step`; only the first `rows` x `cols` of them exist.
    """
    lanes, vector, (_, wide) = tile.lanes, tile.vector, form.n
    numbers = ("step", "line_step", "count", "rows", "cols")
    f = Function(
        _name("output", form, tile),
        [("ptr", "products"), ("ptr", "target"), ("ptr", "words"), *(("i64", i) for i in numbers)],
    )
    step = WinogradArguments.load(f, "product_step")
    room = f.alloca(vector, form.positions)
    down, across = (transforms(m, r)[0] for m, r in zip(form.m, form.r, strict=True))
    last = f.sub("%count", lanes)
    whole = f.and_(f.cmp("eq", "%rows", form.m[0]), f.cmp("eq", "%cols", form.m[1]))

    def outputs(put: Callable[[int, int, str, str], None]) -> None:
        def turn(o: str, _: list[str]) -> None:
            at = f.min(o, last)
            source = f.gep("%products", at, "float")

            def load(i: int, j: int) -> str:
                return f.load(vector, f.gep(source, f.mul(step, i * wide + j), "float"))

            def store(i: int, j: int, value: str) -> None:
                place = f.add(f.add(f.mul("%line_step", i), f.mul("%step", j)), at)
                put(i, j, value, f.gep("%target", place, "float"))

            _both_ways(f, (down, across), room, vector, load, store)

        f.loop(0, "%count", lanes, [], turn)

    def some(i: int, j: int, value: str, place: str) -> None:
        exists = f.and_(f.cmp("lt", i, "%rows"), f.cmp("lt", j, "%cols"))
        f.if_(exists, lambda: f.store(value, place))

    f.if_(whole, lambda: outputs(lambda _i, _j, value, place: f.store(value, place)), lambda: outputs(some))
    f.ret()
    return f


class Winograd(ConvStrategy):
    """One form of F(m, r): transforms save products.

    Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; the matrices are those of Toom and Cook.
    """

    scalars = True

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def summary(self) -> str:
        (m, n), (r, s) = self.form.m, self.form.r
        return (
            f"Windows of {r}x{s} in f32 with steps of 1, {MIN_CHANNELS} channels a group or more: tiles of {m}x{n}"
            f" results by transforms, with {self.form.positions} products in the place of {m * n * r * s}."
        )

    @property
    def measured_as(self) -> str:
        return self.name.partition("+")[0]

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        if self.name not in possible(kernel):
            assert isinstance(kernel.anchor, Conv)
            return unsuited(kernel) or f"its windows are {'x'.join(map(str, kernel.anchor.w_shape[2:]))}"
        chosen = choose(kernel, setting.target)
        if chosen != self.name:
            return f"{chosen} takes less time" if chosen else "its transforms take longer than the products they save"
        most = few_pixels(chosen, setting.target)
        return f"it has at most {most} pixels" if has_few(kernel, chosen, setting.target) else None

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return _layout(kernel, self.name)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, target)]


class OrSums(Winograd):
    """By transforms or, for few pixels, by the sums of another strategy: which, a run's sizes decide."""

    def __init__(self, winograd: Winograd, sums: CpuStrategy) -> None:
        super().__init__(f"{winograd.name}|{sums.name}")
        self.winograd, self.sums = winograd, sums

    @property
    def form(self) -> Form:
        return self.winograd.form

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        most, geo = few_pixels(self.winograd.name, target), geometry(kernel)
        (packed,) = kernel.operands
        choice = Choice(((Limit(geo.out_height * geo.out_width, most=most),),))
        return alternatives(choice, self.sums.emit(with_weights(kernel, packed), target), super().emit(kernel, target))


def form_of(kernel: Kernel) -> Form:
    """The form by which a kernel is computed."""
    assert isinstance(kernel.strategy, Winograd)
    return kernel.strategy.form
