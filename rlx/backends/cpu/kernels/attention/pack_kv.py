"""Keys and values of attention as panels of the matrix product."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import amx_bf16
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels.bf16 import beside
from rlx.backends.cpu.gemm.tile import transpose
from rlx.backends.cpu.kernels.attention.stored_rows import StoredRows, where_of
from rlx.backends.cpu.llvm.builder import Function, Module, constant, vec
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, name_kernel
from rlx.backends.cpu.schedule.arguments import Address, Argument, Arguments, KernelCode, Number, Pointer, Product
from rlx.backends.cpu.schedule.attention import AttentionSchedule
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Expr, Load
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Kernel

__all__ = ["count_words", "counted", "emit_pack", "number_words", "pack", "pair_unit", "row_words", "rows_of"]

WIDTH = AttentionSchedule.WIDTH
I0, I1, I2, _ = out_vars(4)


class PackKvArguments(Arguments):
    """The arguments of the packing kernel; strides as in `row_names`, in bytes."""

    k: Address
    k_b: Number
    k_h: Number
    k_l: Number
    v: Address
    v_b: Number
    v_h: Number
    v_l: Number
    k_panels: Address
    v_panels: Address
    key_heads: Number
    keys: Number
    depth: Number  # words of a row of keys
    value_depth: Number
    count: Address
    count_b: Number
    key_words: Number  # elements that a column of values takes in a panel


def row_names(name: str) -> tuple[str, str, str, str]:
    """The arguments of an operand: its address and its strides of batches, heads and rows, in bytes."""
    return name, f"{name}_b", f"{name}_h", f"{name}_l"


def row_words(name: str, x: Expr | None) -> dict[str, Argument]:
    """What the arguments `row_names` of an operand are; zeros where it is not read."""
    if x is None:
        return dict.fromkeys(row_names(name), 0)
    found = where_of(x)
    assert found is not None
    index, block, size = found.index, found.format.block, found.format.nbytes

    def in_bytes(elements: Size) -> Size:
        return elements * size if block == 1 else elements // block * size

    words = (
        Pointer(found.source, in_bytes(index.constant)),
        *(in_bytes(index.coefs.get(v, 0)) for v in (I0, I1, I2)),
    )
    return dict(zip(row_names(name), words, strict=True))


def rows_of(f: Function, w: Arguments, name: str, b: str, head: str, x: Expr) -> StoredRows:
    """The rows of a batch entry and head of an operand."""
    start, b_step, h_step, step = (getattr(w, i) for i in row_names(name))
    found = where_of(x)
    assert found is not None
    return StoredRows(f.offset(start, f.add(f.mul(b, b_step), f.mul(head, h_step))), step, found.format)


def count_words(anchor: Attention) -> dict[str, Argument]:
    """Where the counts of keys are, and the step from batch entry to batch entry."""
    return number_words(anchor.count, "count")


def number_words(numbers: Expr | None, name: str) -> dict[str, Argument]:
    """Where i64 numbers of batch entries are, and the step from one to the next, as `name` and `name_b`; 0 for none."""
    if numbers is None:
        return {name: 0, f"{name}_b": 0}
    assert isinstance(numbers, Load)
    index = linear_index(numbers.indices, numbers.source.shape)
    return {name: Pointer(numbers.source, 8 * index.constant), f"{name}_b": index.coefs.get(I0, 0)}


def counted(f: Function, anchor: Attention, count: str, step: str, b: str, room: str) -> str:
    """How many keys a batch entry has; `count` and `step` are those of `count_words`."""
    return room if anchor.count is None else f.load("i64", f.gep(count, f.mul(b, step), "i64"))


def emit_pack(kernel: Kernel, target: Target) -> KernelCode:
    """Chunk = a batch and key head: its keys as columns [keys / 16][depth][16], its values [depth / 16][keys][16]."""
    anchor = kernel.anchor
    assert isinstance(anchor, Attention)
    batch, heads, keys, depth = anchor.k_shape
    k_panels, v_panels = (Pointer(store.buffer) for store in kernel.stores)
    unit = pair_unit(anchor, target)
    key_words, depth_words = (AttentionSchedule.words(n, unit) for n in (keys, depth))
    words = PackKvArguments.given(
        **row_words("k", anchor.k),
        **row_words("v", anchor.v),
        k_panels=k_panels,
        v_panels=v_panels,
        key_heads=heads,
        keys=keys,
        depth=depth_words,
        value_depth=anchor.v_shape[3],
        **count_words(anchor),
        key_words=key_words,
    )
    f = gemm.kernel_function(PLACEHOLDER)
    lanes = target.lanes
    w = PackKvArguments.loaded(f)
    b, h = f.div("%chunk", w.key_heads), f.rem("%chunk", w.key_heads)

    def panels(start: str, rows: str, columns: str) -> str:
        count = f.mul(f.div(f.add(columns, WIDTH - 1), WIDTH), f.mul(rows, WIDTH))
        return f.gep(start, f.mul("%chunk", count), "float")

    count = counted(f, anchor, w.count, w.count_b, b, w.keys)
    k, v = rows_of(f, w, "k", b, h, anchor.k), rows_of(f, w, "v", b, h, anchor.v)
    to = panels(w.k_panels, w.depth, w.keys), panels(w.v_panels, w.key_words, w.value_depth)
    pack(f, lanes, (k, v), to, (count, w.depth, w.value_depth, w.key_words), unit)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(words), Product((batch, heads)))


def pair_unit(anchor: Attention, target: Target) -> int:
    """Words of which panels have whole multiples, where operands are multiplied in pairs of bf16; 0: as f32.

    A row of keys is whole pairs, and whole steps of tile registers.
    """
    unit = amx_bf16.STEPS if target.float_tiles else 1
    depth = anchor.q_shape[3]
    rounded = anchor.activations == "bf16" and target.multiplies_bf16
    return unit if rounded and isinstance(depth, int) and depth % (2 * unit) == 0 else 0


def pack(
    f: Function,
    lanes: int,
    rows: tuple[StoredRows, StoredRows],
    to: tuple[str, str],
    sizes: tuple[str, str, str, str],
    unit: int,
) -> None:
    """Packs keys and values; `sizes`: how many there are, words of a key, columns of values, words of one of these."""
    (k, v), (count, depth, value_depth, room) = rows, sizes
    pack_columns(f, lanes, k.in_pairs() if unit else k, to[0], count, depth)
    if unit:
        pack_rows_in_pairs(f, v, to[1], count, value_depth, room, unit)
    else:
        pack_rows(f, lanes, v, to[1], count, value_depth, room)


def pack_columns(f: Function, lanes: int, x: StoredRows, out: str, rows: str, depth: str) -> None:
    """Rows of `depth` become columns of panels [depth][16], zeros where there are no more rows."""

    def panel(first: str, _: list[str]) -> None:
        source, target = x.from_row(f, first), f.gep(out, f.mul(first, depth), "float")
        count = f.min(f.sub(rows, first), WIDTH)

        def square(d: str, _: list[str]) -> None:
            for j in range(0, WIDTH, lanes):
                lines = [x.format.some(f, source.row(f, j + q), d, lanes) for q in range(lanes)]
                for q, value in enumerate(transpose(f, lines)):
                    f.store(value, f.gep(target, f.add(f.mul(f.add(d, q), WIDTH), j), "float"))

        def single(d: str, _: list[str]) -> None:
            def cell(i: str, _: list[str]) -> None:
                value = x.format.some(f, source.row(f, i), d, 1)
                f.store(value, f.gep(target, f.add(f.mul(d, WIDTH), i), "float"))

            def zero(i: str, _: list[str]) -> None:
                f.store(0.0, f.gep(target, f.add(f.mul(d, WIDTH), i), "float"), ty="float")

            f.loop(0, count, 1, [], cell)
            f.loop(count, WIDTH, 1, [], zero)

        whole = f.select(f.cmp("eq", count, WIDTH), f.and_(depth, -lanes), 0, "i64")
        f.loop(0, whole, lanes, [], square)
        f.loop(whole, depth, 1, [], single)

    f.loop(0, rows, WIDTH, [], panel)


def pack_rows_in_pairs(f: Function, x: StoredRows, out: str, rows: str, columns: str, room: str, unit: int) -> None:
    """Rows are cut into panels [room][16] of words, each of two rows below each other, in bf16.

    Zeros stand where there are no more columns or rows, up to a multiple of `unit` words.
    """
    zero = constant(0.0, vec("float", WIDTH))
    pairs = f.lshr(rows, 1)
    filled = f.lshr(f.add(rows, 1), 1)
    words = f.and_(f.add(filled, unit - 1), -unit)

    def panel(first: str, _: list[str]) -> None:
        target = f.gep(out, f.mul(first, room), "float")
        mask = f.mask_below(f.sub(columns, first), WIDTH)

        def line(masked: bool, number: str) -> str:
            p = x.row(f, number)
            if masked:
                return x.format.masked(f, f.offset(p, x.format.at(f, first)), WIDTH, mask)
            return x.format.some(f, p, first, WIDTH)

        def all_rows(masked: bool) -> None:
            def put(word: str, second: str) -> None:
                value = beside(f, line(masked, f.mul(word, 2)), second)
                f.store(value, f.gep(target, f.mul(word, WIDTH), "float"))

            f.loop(0, pairs, 1, [], lambda word, _: put(word, line(masked, f.add(f.mul(word, 2), 1))))
            f.if_(f.cmp("ne", f.and_(rows, 1), 0), lambda: put(pairs, zero))

        whole = f.cmp("ge", f.sub(columns, first), WIDTH)
        f.if_(whole, lambda: all_rows(False), (lambda: all_rows(True)) if x.format.block == 1 else None)
        ty = vec("float", WIDTH)
        f.loop(filled, words, 1, [], lambda i, _: f.store(zero, f.gep(target, f.mul(i, WIDTH), "float"), ty=ty))

    f.loop(0, columns, WIDTH, [], panel)


def pack_rows(f: Function, lanes: int, x: StoredRows, out: str, rows: str, columns: str, room: str) -> None:
    """Rows are cut into panels [room][16], zeros where there are no more columns."""

    def panel(first: str, _: list[str]) -> None:
        target = f.gep(out, f.mul(first, room), "float")
        count = f.sub(columns, first)
        masks = [f.mask_below(f.sub(count, j), lanes) for j in range(0, WIDTH, lanes)]

        def row(masked: bool) -> Callable[[str, list[str]], None]:
            def body(i: str, _: list[str]) -> None:
                p, place = x.row(f, i), f.gep(target, f.mul(i, WIDTH), "float")
                for j, mask in zip(range(0, WIDTH, lanes), masks, strict=True):
                    d = f.add(first, j)
                    if masked:
                        value = x.format.masked(f, f.offset(p, x.format.at(f, d)), lanes, mask)
                    else:
                        value = x.format.some(f, p, d, lanes)
                    f.store(value, f.gep(place, j, "float"))

            return body

        whole = f.cmp("ge", count, WIDTH)
        f.loop(0, f.select(whole, rows, 0, "i64"), 1, [], row(False))
        if x.format.block == 1:
            f.loop(0, f.select(whole, 0, rows, "i64"), 1, [], row(True))

    f.loop(0, columns, WIDTH, [], panel)
