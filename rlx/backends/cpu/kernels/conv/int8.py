"""Convolutions of 8-bit images in i32, as products of windows and weights packed in fours; results may be 8-bit too.

Images have their channels last. Windows of whole pixels that lie in the image as they are, eights of channels, are read
in place; others are gathered. Where what is done to the sums is a requantisation, the product does it in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm import requantise
from rlx.backends.cpu.gemm.chunk import row_parts
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.gemm.panels.int8 import int8_tile
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.kernels.conv import im2col, int8_depthwise
from rlx.backends.cpu.kernels.conv.geometry import (
    ConvArguments,
    Geometry,
    conv_epilogue,
    gathered,
    geometry,
    window_product,
)
from rlx.backends.cpu.kernels.conv.weights import ConvStrategy, scaled
from rlx.backends.cpu.llvm.builder import Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
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
    Product,
    once,
    part,
)
from rlx.backends.cpu.schedule.conv import ConvParts
from rlx.backends.cpu.schedule.int8 import Int8Schedule
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Shape, Size, ceildiv, evaluate
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Expr, Load, Var, const, loads, substitute_vars, transform
from rlx.kernels.loops.analysis import linear_load
from rlx.kernels.lowering import Contract, Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = [
    "MOST_PLANES", "Int8", "as_convolution", "from_planes", "has_planes", "spare_bytes", "unsuited", "unsuited_product",
]  # fmt: skip

F32, I32, I64, U8 = DTYPES["f32"], DTYPES["i32"], DTYPES["i64"], DTYPES["u8"]
MOST_PLANES = 4  # of an image that is read plane by plane
FEW_ROWS = 32  # of a window, of all channels


class Int8Arguments(ConvArguments):
    """Those of a product of bytes; `k` is whole steps."""

    spare: Number  # bytes of the further fours of a panel
    places: Number  # bytes that their places take of these
    all_panels: Number  # of all groups


class PackArguments(Arguments):
    """The arguments of the packing of weights."""

    out: Address
    spare: Number  # bytes of the further fours of a panel
    panels: Number  # of a group
    outputs: Number  # of a group
    depth: Number
    channels: Number  # of a group
    octets: Number  # of k
    places: Number  # bytes of the places of further fours
    columns: Number  # of a window
    all_panels: Number


def has_planes(anchor: Conv) -> bool:
    """Whether the image is of bytes and few channels, which are read from planes."""
    channels = anchor.x_shape[1]
    return anchor.x.dtype.bits == 8 and isinstance(channels, int) and channels <= MOST_PLANES


def unsuited(anchor: Conv, target: Target) -> str | None:
    """Why a convolution of 8-bit images can't be computed of bytes: it is then one of floats or of i32."""
    if not int8_panels.available(target):
        return "this machine has no instructions for bytes"
    if len(anchor.x_shape) not in (3, 4):
        return "its image has neither one nor two axes of pixels"
    if any(size == 0 for size in anchor.w_shape[1:]):
        return "its windows are empty"
    if anchor.groups > 1 and anchor.w_shape[1] == 1 and not int8_depthwise.suits(anchor):
        return "it is depthwise, of too few channels or too many taps for vectors of bytes"
    return None


# ---- products


def unsuited_product(anchor: Contract, target: Target) -> str | None:
    """The same of a product of bytes."""
    if not int8_panels.available(target):
        return "this machine has no instructions for bytes"
    if not all(_is_weight(x.source) for x in loads(anchor.b)):
        return "its second operand is no weight, which is packed before the run"
    few_axes = isinstance(anchor.a, Load) and len(anchor.a.indices) <= 4 and anchor.k != 0
    return None if few_axes else "its first operand has more than four axes, or no columns"


def _is_weight(value: Value) -> bool:
    """Whether it depends on params and constants only."""
    pending, seen = [value], {value}
    while pending:
        v = pending.pop()
        if v.node is None:
            if v.kind not in ("param", "const"):
                return False
            continue
        fresh = [x for x in v.node.inputs if x not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return True


def as_convolution(kernel: Kernel) -> Kernel:
    """A product as a convolution of one pixel: rows are pixels, what a and b share are channels."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Contract)
    *batch, row, column = out_vars(len(store.extents))
    image: list[Size] = [1] if not batch else list(store.extents[: len(batch)])
    space = (*image[1:], anchor.m)
    extents = (image[0], anchor.n, *space)
    vars = out_vars(len(extents))
    renamed: dict[Var, Expr] = {row: vars[-1], column: vars[1]}
    renamed.update(zip(batch, (vars[0], *vars[2:-1]), strict=False))
    x = substitute_vars(anchor.a, {**renamed, Var("k"): vars[1]})
    w = substitute_vars(anchor.b, {column: vars[0], Var("k"): vars[1]})
    ones, taps = (1,) * len(space), (1,) * len(space)
    conv = Conv(
        x, w, (image[0], anchor.k, *space), (anchor.n, anchor.k, *taps), ones, ones, (0,) * (2 * len(space)), 1, True,
        anchor.zero,
    )  # fmt: skip
    index = tuple(substitute_vars(i, renamed) for i in store.index)
    made = Store(store.buffer, extents, index, substitute_vars(store.expr, renamed))
    return Kernel(kernel.name, (made,), conv, nodes=kernel.nodes)


# ---- layout


def from_planes(anchor: Conv) -> bool:
    """Whether windows are gathered from an image whose columns, not channels, lie next to each other."""
    e, channels, (*rows, columns) = anchor.x, anchor.x_shape[1], anchor.w_shape[2:]
    sizes = [channels, columns, *rows]
    if not all(isinstance(size, int) for size in sizes) or anchor.groups > 1 or anchor.dilations[-1] != 1:
        return False
    few = 1 < channels <= MOST_PLANES and channels * prod(rows) <= FEW_ROWS
    short = columns <= im2col.PIECES[-1]
    if not few or not short or not isinstance(e, Load) or e.where is not None:
        return False
    index = linear_index(e.indices, e.source.shape)
    vars = out_vars(len(anchor.x_shape))
    return index.is_linear and index.coefs.get(vars[-1], 0) == 1 and index.coefs.get(vars[1], 0) != 1


def _static(anchor: Conv) -> tuple[int, int, int]:
    """Channels, rows and columns of a window."""
    size = (*anchor.w_shape[1:2], *([1] if len(anchor.w_shape) == 3 else []), *anchor.w_shape[2:])
    channels, rows, columns = (evaluate(s, {}) for s in size)
    return channels, rows, columns


def _packed(kernel: Kernel, target: Target) -> Kernel:
    """The kernel that packs the weights in panels."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    outputs = anchor.w_shape[0] // anchor.groups
    panel = int8_panels.panel_bytes(_depth(anchor), anchor.w.dtype.name == "i8", target)
    shape: Shape = (anchor.groups, ceildiv(outputs, int8_panels.WIDTH), panel)
    fixed = is_static(anchor.w, shape)
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.w", "prepared" if fixed else "arena", shape, U8)
    store = Store(buffer, shape, out_vars(3), const(0, U8))
    only = replace(anchor, x=const(0, anchor.x.dtype), zero=None)
    strategy = PLANES if from_planes(anchor) else WEIGHTS
    return Kernel("pack bytes", (store,), only, nodes=kernel.nodes, strategy=strategy)


def spare_bytes(kernel: Kernel, target: Target) -> int:
    """The bytes that a kernel which packs weights keeps for further fours: most weights need none, and don't fill it.

    They are 1.6 times the weights' own: what the hardest weights need is only known once they are read.
    """
    if kernel.strategy not in (WEIGHTS, PLANES):
        return 0
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    groups, panels, _ = kernel.stores[0].buffer.shape
    return evaluate(groups * panels * int8_panels.spare_bytes(_depth(anchor), anchor.w.dtype.name == "i8", target), {})


def _depth(anchor: Conv) -> Size:
    depth: Size = anchor.w_shape[1]
    for size in anchor.w_shape[2:]:
        depth = depth * size
    return depth


# ---- code


def _emit_weights(kernel: Kernel, target: Target) -> KernelCode:
    """Packs the weights; chunk = group * panels + panel."""
    anchor, buffer = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Conv)
    narrow = anchor.w.dtype.name == "i8"
    depth = _depth(anchor)
    groups, panels, _ = buffer.shape
    words = PackArguments.given(
        out=Pointer(buffer),
        spare=int8_panels.spare_bytes(depth, narrow, target),
        panels=panels,
        outputs=anchor.w_shape[0] // anchor.groups,
        depth=depth,
        channels=anchor.w_shape[1],
        octets=ceildiv(depth, int8_panels.DEPTH),
        places=int8_panels.places_bytes(depth, narrow, target),
        columns=anchor.w_shape[-1],
        all_panels=groups * panels,
    )
    table = ArgumentTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    expr = Cast(transform(anchor.w, linear_load), I32)
    emitter = Emitter(f, table, target.lanes)
    emitter.preload([expr], [])
    w = PackArguments.loaded(f)
    per_plane = f.div(w.depth, w.channels)
    group, panel = f.div("%chunk", w.panels), f.rem("%chunk", w.panels)
    o, c, *taps = out_vars(len(anchor.w_shape))

    def element(k: str, lane: str) -> str:
        column = f.add(f.mul(panel, int8_panels.WIDTH), lane)

        def load() -> list[str]:
            if kernel.strategy is PLANES:
                tap, channel = f.rem(k, per_plane), f.div(k, per_plane)
            else:
                tap, channel = f.div(k, w.channels), f.rem(k, w.channels)
            at = {o: f.add(f.mul(group, w.outputs), column), c: channel, taps[-1]: f.rem(tap, w.columns)}
            if len(taps) == 2:
                at[taps[0]] = f.div(tap, w.columns)
            return [emitter.lanes_of(expr, Scope(1, None, at))]

        inside = f.and_(f.cmp("lt", k, w.depth), f.cmp("lt", column, w.outputs), "i1")
        return f.if_(inside, load, lambda: [("i32", 0)])[0]

    step = f.add(f.mul(w.octets, 128), int8_panels.HEAD)
    more = f.offset(w.out, f.add(f.mul(w.all_panels, step), f.mul("%chunk", w.spare)))
    int8_panels.pack_panel(f, target, f.offset(w.out, f.mul("%chunk", step)), more, w.octets, w.places, element)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), Product((groups, panels)), tuple(emitter.sites))


def _in_image(geo: Geometry) -> Size | None:
    """The step from window to window where all of them lie in the image as they are, in whole eights; else None."""
    if not geo.no_pads or not isinstance(geo.depth, int) or geo.depth % int8_panels.DEPTH:
        return None
    even = geo.x_h == geo.width * geo.x_w and geo.x_n == geo.height * geo.x_h
    if geo.kernel == (1, 1) and geo.strides == (1, 1) and even:
        return geo.x_w
    return None


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    """The convolution with its epilogue."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    assert isinstance(anchor.w, Load)
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, I32)
    signed = anchor.x.dtype.name == "i8"
    in_image = None if from_planes(anchor) else _in_image(geo)
    direct = epilogue.row_step is not None and epilogue.columns_together
    fused = requantise.found(kernel) if direct else None
    clamped = fused is not None and fused.clamped
    by, stores = int8_panels.instructions(target), "i32" if fused is None else store.buffer.dtype.name
    narrow = anchor.w.source.shape[2] == int8_panels.panel_bytes(geo.depth, True, target)
    rest = int8_panels.further(narrow, target) > 0
    tile = int8_tile(target, by, signed=signed, stores=stores, clamped=clamped, rest=rest)
    direct = direct and (fused is not None or epilogue.plain)

    deep = ceildiv(geo.depth, int8_panels.DEPTH) * int8_panels.DEPTH
    cut = once(
        Int8Schedule(
            geo.outputs, deep, geo.pixels, geo.groups, by.rows, int8_panels.WIDTH, in_image, direct, target.rates
        )
    )
    step = epilogue.row_step if direct and epilogue.row_step is not None else 0
    table = ArgumentTable(_product_words(anchor, geo, tile, cut, epilogue.out, step, target))
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    if not direct:
        epilogue.prepare(emitter)
    w = Int8Arguments.loaded(f)

    top = Scope(1, None, {})
    ends = f.alloca("i64", len(int8_panels.EndArguments.names()))
    if fused is not None:
        requantise.store_finishing(emitter, fused, top, ends, store.buffer.dtype)
    shift = requantise.number(emitter, anchor.zero, top)
    fill = f.cast("trunc", shift, "i8")
    if signed:
        shift = f.add(shift, 128, "i64")
    product = window_product(f, w, tile, even_panels=False)
    at, count = product.at, product.columns
    first = f.add(f.mul(at.matrix, w.n), at.n0)  # of its outputs, of those of all groups
    panels = f.div(f.add(w.n, tile.width - 1), tile.width)
    panel = f.add(f.mul(at.matrix, panels), at.panel)
    behind = f.offset(w.b, f.add(f.mul(w.all_panels, product.stride), f.mul(panel, w.spare)))
    begin = {"point": shift, "more": behind, "spare": w.spare, "places": w.places}
    begin["column"] = f.mul(panel, 4 * int8_panels.WIDTH)
    for name, value in begin.items():
        f.store(value, int8_panels.EndArguments.place(f, name, ends))
    weights = f.offset(product.panel(), int8_panels.HEAD)

    def of_part(a: str, q0: str, q1: str) -> None:
        c, step = product.place(direct, q0)
        product.block(a, weights, (c, step), f.sub(q1, q0), count, ends)
        if not direct:
            epilogue.block(emitter, (q0, q1), (first, f.add(first, count)), c, step)

    windows = gathered(w, product, [("i8", fill)]) if in_image is None else product.in_memory
    row_parts(f, (at.r0, at.r1), w.part, windows, of_part)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = part(cut, "scratch")
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites), scratch)


def _product_words(
    anchor: Conv,
    geo: Geometry,
    tile: Tile,
    cut: Callable[[Extents], ConvParts],
    out: Pointer,
    out_step: Size,
    target: Target,
) -> list[Argument]:
    """The words of `Int8Arguments` and of `windows`; `out_step` is from pixel to pixel, of results stored in place."""
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    weights, planes = anchor.w.source, from_planes(anchor)
    narrow = weights.shape[2] == int8_panels.panel_bytes(geo.depth, True, target)
    depth = ceildiv(geo.depth, int8_panels.DEPTH) * int8_panels.DEPTH
    words = Int8Arguments.cut_by(
        cut,
        **geo.sizes(Int8Arguments),
        a=Pointer(anchor.x.source, geo.x.constant),
        lda=part(cut, "a_step"),
        b=Pointer(weights),
        c=out,
        ldc=out_step,
        m=geo.pixels,
        n=geo.outputs,
        k=depth,
        part=part(cut, "part"),
        all_panels=geo.groups * ceildiv(geo.outputs, int8_panels.WIDTH),
        spare=int8_panels.spare_bytes(geo.depth, narrow, target),
        places=int8_panels.places_bytes(geo.depth, narrow, target),
        block=gemm.block_routine(tile),
        windows=im2col.planar_routine(*_static(anchor)) if planes else im2col.byte_routine(),
    )
    return words + (im2col.planar_words(geo, geo.x.coefs.get(out_vars(2)[1], 0)) if planes else im2col.words(geo))


# ---- strategies


class Int8(ConvStrategy):
    """Bytes: windows that do not lie in the image as they are, are gathered first; sums in i32, by four along k."""

    scalars = True

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        assert isinstance(kernel.anchor, Conv)
        return None if kernel.anchor.x.dtype.bits == 8 else "its image is not of bytes"

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Conv)
        return scaled(
            kernel, anchor.groups, anchor.w_shape[0] // anchor.groups, lambda k: ([_packed(k, setting.target)], ())
        )

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, target)]


WEIGHTS = Step("conv.int8_pack", _emit_weights, scalars=True)
PLANES = Step("conv.int8_pack+planes", _emit_weights, scalars=True)  # for windows that are gathered from planes
