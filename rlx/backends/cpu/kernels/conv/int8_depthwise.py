"""Depthwise convolutions of 8-bit images: direct sums in i32, of many channels and some neighbouring pixels at once."""

from __future__ import annotations

from typing import cast

from rlx.backends.cpu.gemm.kernel import kernel_function
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.gemm.requantise import found, number, store_finishing
from rlx.backends.cpu.kernels.conv import int8_depthwise_pairs, int8_depthwise_vnni
from rlx.backends.cpu.kernels.conv.depthwise import has_few_taps, image_words
from rlx.backends.cpu.kernels.conv.geometry import conv_epilogue, geometry
from rlx.backends.cpu.kernels.conv.int8_depthwise_loops import Int8DepthwiseArguments
from rlx.backends.cpu.kernels.conv.weights import ConvStrategy, scaled
from rlx.backends.cpu.llvm.builder import Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.schedule.arguments import ArgumentTable, KernelCode, Pointer, Scratch, ScratchStride
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import ceildiv
from rlx.kernels.expr import Apply, Cast, Expr, Reduce, Var, const, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Buffer, Kernel, Store

__all__ = ["Int8Depthwise", "suits"]

I8, I16, I32 = DTYPES["i8"], DTYPES["i16"], DTYPES["i32"]


def suits(anchor: Conv) -> bool:
    """One channel a group and one output each, at least a vector of them, few taps."""
    return anchor.groups >= int8_depthwise_pairs.CHANNELS and has_few_taps(anchor)


def _weights(kernel: Kernel, target: Target) -> tuple[list[Kernel], tuple[Buffer, ...]]:
    """The kernels that arrange the weights, and add them up for each channel, in the buffer that is returned too."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    o, c, *taps = out_vars(len(anchor.w_shape))
    channels, size = anchor.groups, cast(tuple[int, ...], anchor.w_shape[2:])
    rows, columns = size if len(size) == 2 else (1, size[0])
    kind, name = "prepared" if is_fixed(anchor.w) else "arena", kernel.stores[0].buffer.name

    def weight(channel: Expr, row: Expr, column: Expr) -> Expr:
        at = {o: channel, c: size_expr(0), taps[-1]: column} | ({taps[0]: row} if len(taps) == 2 else {})
        element = substitute_vars(anchor.w, at)
        if element.dtype is I8:
            return element
        low, high = const(-255, I16), const(255, I16)
        return Apply("max", (Apply("min", (element, high), I16), low), I16)

    if int8_panels.instructions(target).dots and anchor.w.dtype is I8:
        packed = int8_depthwise_vnni.pack(f"{name}.w", kind, channels, (rows, columns), weight, target)
    else:
        packed = int8_depthwise_pairs.pack(f"{name}.w", kind, channels, (rows, columns), weight)
    sums = Buffer(f"{name}.sums", kind, (channels,), I32)
    y, x = Var("r0"), Var("r1")
    total = Reduce("add", (y, x), (rows, columns), Cast(weight(out_vars(1)[0], y, x), I32), I32)
    pack = Kernel("pack w", tuple(packed), nodes=kernel.nodes)
    add_up = Kernel("sums of w", (Store(sums, (channels,), out_vars(1), total),), nodes=kernel.nodes)
    return [pack, add_up], (sums,)


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    """The depthwise convolution with its epilogue, which is computed in registers."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, I32)
    kernel_h, kernel_w = cast(tuple[int, int], geo.kernel)
    direct = found(kernel) if epilogue.row_step is not None and epilogue.columns_together else None

    signed = anchor.x.dtype.name == "i8"
    fours = anchor.w.dtype is I8  # the form that the weights were packed in
    wide = int8_depthwise_vnni.widest(target)
    scratch = int8_depthwise_vnni.scratch_bytes(geo.groups, target) if fours else ceildiv(geo.groups, 64) * 64
    words, chunks = image_words(
        Int8DepthwiseArguments,
        anchor,
        geo,
        wide if fours else int8_depthwise_pairs.CHANNELS,
        target.rates,
        sums=Pointer(kernel.operands[0]),
        out=epilogue.out,
        out_step=0 if direct is None or epilogue.row_step is None else epilogue.row_step,
        scratch=Scratch(),
        scratch_stride=ScratchStride(),
    )
    table = ArgumentTable(words)
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    top = Scope(1, None, {})
    if direct is None:
        epilogue.prepare(emitter)
    finishing = f.alloca("i64", len(int8_panels.FinishArguments.names()))
    if direct is not None:
        store_finishing(emitter, direct, top, finishing, store.buffer.dtype)
    fill = f.cast("trunc", number(emitter, anchor.zero, top), "i8")
    w = Int8DepthwiseArguments.loaded(f)
    given = (
        f, emitter, epilogue, w, (kernel_h, kernel_w), geo.strides[1], geo.dilations[1], signed,
        store.buffer.dtype.name if direct is not None else "", direct is not None and direct.bias is not None,
        direct is not None and direct.clamped, fill, finishing, top,
    )  # fmt: skip
    body = (
        int8_depthwise_vnni.Fours(*given, wide, int8_depthwise_vnni.tails(geo.groups, target))
        if fours
        else int8_depthwise_pairs.Pairs(*given)
    )
    body.emit()
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), chunks, tuple(emitter.sites), scratch)


class Int8Depthwise(ConvStrategy):
    """Images of bytes with one channel and one output a group, and few taps: vectors of channels in registers."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Conv)
        if anchor.x.dtype.bits != 8:
            return "its image is not of bytes"
        if anchor.groups < int8_depthwise_pairs.CHANNELS:
            return f"it has fewer than {int8_depthwise_pairs.CHANNELS} groups"
        return None if suits(anchor) else "it is not depthwise, or has too many taps"

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        assert isinstance(kernel.anchor, Conv)
        return scaled(kernel, 1, kernel.anchor.groups, lambda k: _weights(k, setting.target))

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, target)]
