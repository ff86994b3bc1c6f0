"""Keys and values of attention as panels of the matrix product."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.nest import PLACEHOLDER, name_kernel
from rlx.backends.cpu.schedule.arguments import Argument, KernelCode, Pointer
from rlx.backends.cpu.schedule.attention import AttentionSchedule, KeyChunks
from rlx.backends.cpu.target import Target
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Expr, Load
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Kernel

__all__ = ["count_words", "counted", "emit_pack", "pack_columns", "pack_rows", "row_words"]

WIDTH = AttentionSchedule.WIDTH
I0, I1, I2, _ = out_vars(4)


class PackArg(IntEnum):
    """The words of the packing kernel."""

    K = 0
    K_B = 1
    K_H = 2
    K_L = 3
    V = 4
    V_B = 5
    V_H = 6
    V_L = 7
    K_PANELS = 8
    V_PANELS = 9
    KEY_HEADS = 10
    KEYS = 11
    DEPTH = 12
    VALUE_DEPTH = 13
    COUNT = 14
    COUNT_B = 15


def row_words(x: Expr) -> list[Argument]:
    """Address and strides of batches, heads and rows of an operand."""
    assert isinstance(x, Load)
    index = linear_index(x.indices, x.source.shape)
    return [Pointer(x.source, 4 * index.constant), *(index.coefs.get(v, 0) for v in (I0, I1, I2))]


def count_words(anchor: Attention) -> list[Argument]:
    """Where the counts of keys are, and the step from batch entry to batch entry."""
    if anchor.count is None:
        return [0, 0]
    assert isinstance(anchor.count, Load)
    index = linear_index(anchor.count.indices, anchor.count.source.shape)
    return [Pointer(anchor.count.source, 8 * index.constant), index.coefs.get(I0, 0)]


def counted(f: Function, anchor: Attention, word: int, b: str, room: str) -> str:
    """How many keys a batch entry has; `word` is the first of `count_words`."""
    if anchor.count is None:
        return room
    step = gemm.load_word(f, word + 1, "i64")
    return f.load("i64", f.gep(gemm.load_word(f, word, "ptr"), f.mul(b, step), "i64"))


def emit_pack(kernel: Kernel, target: Target) -> KernelCode:
    """Chunk = a batch and key head: its keys as columns [keys / 16][depth][16], its values [depth / 16][keys][16]."""
    anchor = kernel.anchor
    assert isinstance(anchor, Attention)
    batch, heads, keys, depth = anchor.k_shape
    words: list[Argument] = [
        *row_words(anchor.k),
        *row_words(anchor.v),
        *(Pointer(s.buffer) for s in kernel.stores),
        heads,
        keys,
        depth,
        anchor.v_shape[3],
        *count_words(anchor),
    ]
    f = gemm.kernel_function(PLACEHOLDER)
    lanes = target.lanes
    pointers = (PackArg.K, PackArg.V, PackArg.K_PANELS, PackArg.V_PANELS)
    own = [i for i in PackArg if i < PackArg.COUNT]
    w = {i: gemm.load_word(f, i, "ptr" if i in pointers else "i64") for i in own}
    b, h = f.div("%chunk", w[PackArg.KEY_HEADS]), f.rem("%chunk", w[PackArg.KEY_HEADS])

    def matrix(base: PackArg, depth: PackArg, panels: PackArg, columns: PackArg) -> tuple[str, str, str]:
        at = f.add(f.mul(b, w[PackArg(base + 1)]), f.mul(h, w[PackArg(base + 2)]))
        count = f.mul(f.div(f.add(w[columns], WIDTH - 1), WIDTH), f.mul(w[depth], WIDTH))
        out = f.gep(w[panels], f.mul("%chunk", count), "float")
        return f.gep(w[base], at, "float"), w[PackArg(base + 3)], out

    room = w[PackArg.KEYS]
    count = counted(f, anchor, PackArg.COUNT, b, room)
    k, k_step, k_out = matrix(PackArg.K, PackArg.DEPTH, PackArg.K_PANELS, PackArg.KEYS)
    pack_columns(f, lanes, k, k_step, k_out, count, w[PackArg.DEPTH])
    v, v_step, v_out = matrix(PackArg.V, PackArg.KEYS, PackArg.V_PANELS, PackArg.VALUE_DEPTH)
    pack_rows(f, lanes, v, v_step, v_out, count, w[PackArg.VALUE_DEPTH], room)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    chunks = KeyChunks(anchor.q_shape[2], batch, heads)
    return KernelCode(symbol, ir, tuple(words), chunks)


def pack_columns(f: Function, lanes: int, x: str, step: str, out: str, rows: str, depth: str) -> None:
    """Rows of `depth` become columns of panels [depth][16], zeros where there are no more rows."""
    vector = f"<{lanes} x float>"

    def panel(first: str, _: list[str]) -> None:
        source, target = f.gep(x, f.mul(first, step), "float"), f.gep(out, f.mul(first, depth), "float")
        count = f.min(f.sub(rows, first), WIDTH)

        def square(d: str, _: list[str]) -> None:
            for j in range(0, WIDTH, lanes):
                lines = [f.gep(source, f.add(f.mul(step, j + q), d), "float") for q in range(lanes)]
                for q, value in enumerate(gemm.transpose(f, [f.load(vector, p) for p in lines])):
                    f.store(value, f.gep(target, f.add(f.mul(f.add(d, q), WIDTH), j), "float"))

        def single(d: str, _: list[str]) -> None:
            def cell(i: str, _: list[str]) -> None:
                value = f.load("float", f.gep(source, f.add(f.mul(i, step), d), "float"))
                f.store(value, f.gep(target, f.add(f.mul(d, WIDTH), i), "float"))

            def zero(i: str, _: list[str]) -> None:
                f.store(0.0, f.gep(target, f.add(f.mul(d, WIDTH), i), "float"), ty="float")

            f.loop(0, count, 1, [], cell)
            f.loop(count, WIDTH, 1, [], zero)

        whole = f.select(f.cmp("eq", count, WIDTH), f.and_(depth, -lanes), 0, "i64")
        f.loop(0, whole, lanes, [], square)
        f.loop(whole, depth, 1, [], single)

    f.loop(0, rows, WIDTH, [], panel)


def pack_rows(f: Function, lanes: int, x: str, step: str, out: str, rows: str, columns: str, room: str) -> None:
    """Rows are cut into panels [room][16], zeros where there are no more columns."""
    vector = f"<{lanes} x float>"

    def panel(first: str, _: list[str]) -> None:
        target = f.gep(out, f.mul(first, room), "float")
        source = f.gep(x, first, "float")
        count = f.sub(columns, first)
        masks = [f.mask_below(f.sub(count, j), lanes) for j in range(0, WIDTH, lanes)]

        def row(masked: bool) -> Callable[[str, list[str]], None]:
            def body(i: str, _: list[str]) -> None:
                p, place = f.gep(source, f.mul(i, step), "float"), f.gep(target, f.mul(i, WIDTH), "float")
                for j, mask in zip(range(0, WIDTH, lanes), masks, strict=True):
                    at = f.gep(p, j, "float")
                    value = f.masked_load(vector, at, mask) if masked else f.load(vector, at)
                    f.store(value, f.gep(place, j, "float"))

            return body

        whole = f.cmp("ge", count, WIDTH)
        f.loop(0, f.select(whole, rows, 0, "i64"), 1, [], row(False))
        f.loop(0, f.select(whole, 0, rows, "i64"), 1, [], row(True))

    f.loop(0, columns, WIDTH, [], panel)
