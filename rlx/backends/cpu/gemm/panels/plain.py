"""Packing of B for the matrix product: panels of 64 bytes' width, each laid out [K][width] and padded with zeros."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.kernel import Tile, kernel_function, transpose
from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.llvm.builder import Module, void
from rlx.backends.cpu.loops.looks import looking_loop
from rlx.backends.cpu.schedule.arguments import Address, Arguments, Number

__all__ = ["PackArguments", "pack_b"]


class PackArguments(Arguments):
    """The arguments of a packing kernel; strides are in elements."""

    b: Address
    row_stride: Number
    column_stride: Number
    b_batch: Number
    out: Address
    out_batch: Number
    k: Number
    n: Number
    batch: Number
    panel_chunk: Number


def pack_b(tile: Tile, name: str = "rlx_pack_b", *, short: bool = False) -> Module:
    """A kernel of `PackArguments` that packs B[batch, K, N], of any strides, into panels.

    Chunk = batch * panel_blocks + panel block, PANEL_CHUNK panels each. Unit column or row strides are fast.
    `short`: into those of `f28`.
    """
    ty, v, lanes, width = tile.scalar, tile.vector, tile.lanes, tile.width
    f = kernel_function(name)
    w = PackArguments.loaded(f)
    k, n, per_chunk = w.k, w.n, w.panel_chunk
    row_stride, column_stride = w.row_stride, w.column_stride
    panels = f.div(f.add(n, width - 1), width)
    blocks = f.div(f.sub(f.add(panels, per_chunk), 1), per_chunk)
    batch, first = f.div("%chunk", blocks), f.mul(f.rem("%chunk", blocks), per_chunk)
    b = f.gep(w.b, f.mul(batch, w.b_batch), ty)
    out = f.gep(w.out, f.mul(batch, w.out_batch), ty)

    def panel(p: str, state: list[str]) -> list[str]:
        column = f.mul(p, width)
        count = f.min(f.sub(n, column), width)
        source = f.gep(b, f.mul(column, column_stride), ty)
        target = (
            f.offset(out, f.add(f28.room(f, panels, p, k), f28.begin(f, k)))
            if short
            else f.gep(out, f.mul(column, k), ty)
        )
        whole = f.cmp("eq", count, width)

        def copy_row(i: str, _: list[str]) -> None:
            for j in range(0, width, lanes):
                value = f.load(v, f.gep(f.gep(source, f.mul(i, row_stride), ty), j, ty))
                f.store(value, f.gep(f.gep(target, f.mul(i, width), ty), j, ty))

        def general(i: str, _: list[str]) -> None:
            def cell(j: str, _: list[str]) -> None:
                at = f.add(f.mul(i, row_stride), f.mul(j, column_stride))
                f.store(f.load(ty, f.gep(source, at, ty)), f.gep(target, f.add(f.mul(i, width), j), ty))

            def zero(j: str, _: list[str]) -> None:
                f.store(0.0, f.gep(target, f.add(f.mul(i, width), j), ty), ty=ty)

            f.loop(0, count, 1, [], cell)
            f.loop(count, width, 1, [], zero)

        def square(i: str, _: list[str]) -> None:
            for j in range(0, width, lanes):
                rows = [f.load(v, f.gep(source, f.add(f.mul(column_stride, j + q), i), ty)) for q in range(lanes)]
                for q, value in enumerate(transpose(f, rows)):
                    f.store(value, f.gep(target, f.add(f.mul(f.add(i, q), width), j), ty))

        def by_squares() -> None:
            even = f.and_(k, -lanes)
            looking_loop(f, 0, even, lanes, [], square)
            f.loop(even, k, 1, [], general)

        def each(turn: Callable[[str, list[str]], None]) -> Callable[[], None]:
            return lambda: void(looking_loop(f, 0, k, 1, [], turn))

        whole_rows = f.and_(whole, f.cmp("eq", column_stride, 1))
        whole_columns = f.and_(whole, f.cmp("eq", row_stride, 1))
        f.if_(whole_rows, each(copy_row), lambda: void(f.if_(whole_columns, by_squares, each(general))))
        if not short:
            return []
        f.store(f.sub(f.cast("ptrtoint", state[0], "i64"), f.cast("ptrtoint", out, "i64")), f.gep(out, p, "i64"))
        return [f28.pack_panel(f, lanes, target, state[0], k, count)]

    start = [("ptr", f.offset(out, f28.room(f, panels, first, k)))] if short else []
    f.loop(first, f.min(f.add(first, per_chunk), panels), 1, start, panel)
    f.ret()
    return Module([f])
