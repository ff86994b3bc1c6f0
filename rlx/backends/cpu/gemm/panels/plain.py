"""Panels of elements of f32 or f64 as they are: 64 bytes wide, each laid out [K][width] and padded with zeros.

This file packs them; `gemm.kernel` multiplies by them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.backends.cpu.gemm.kernel import kernel_function
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import COLUMN, DEPTH
from rlx.backends.cpu.gemm.tile import Tile, tile_of, transpose
from rlx.backends.cpu.llvm.builder import Function, Module, void
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, name_kernel
from rlx.backends.cpu.loops.looks import looking_loop
from rlx.backends.cpu.schedule.arguments import Address, Arguments, KernelCode, Number, Part, Pointer, once, part
from rlx.backends.cpu.schedule.base import PackSchedule
from rlx.backends.cpu.strategy import Step
from rlx.backends.cpu.target import Target
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Load, Var
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel

__all__ = ["PACK", "PLAIN", "PackArguments", "Repacking", "emit_pack", "pack_b"]


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


class Repacking(ABC):
    """What becomes of each panel once it is packed plainly: it is written anew, right after the one before.

    A chunk takes `together` panels; the first of them begins where it would if all had their `room`.
    """

    together: int

    @abstractmethod
    def room(self, f: Function, panels: str, panel: str, k: str) -> str:
        """Bytes before the room of a panel, of so many."""

    @abstractmethod
    def begin(self, f: Function, k: str) -> str:
        """Bytes of the room before the plain panel in it."""

    @abstractmethod
    def write(self, f: Function, lanes: int, source: str, panel: str, k: str, columns: str) -> str:
        """Emits the writing of a panel from where it is plain; gives where the next one begins."""


def pack_b(tile: Tile, name: str = "rlx_pack_b", then: Repacking | None = None) -> Module:
    """A kernel of `PackArguments` that packs B[batch, K, N], of any strides, into panels.

    Chunk = batch * panel_blocks + panel block, `panel_chunk` panels each. Unit column or row strides are fast.
    `then`: what each is then written anew as; where it begins is stored before all, in the order of panels (i64).
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
            f.offset(out, f.add(then.room(f, panels, p, k), then.begin(f, k)))
            if then
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
        if not then:
            return []
        f.store(f.sub(f.cast("ptrtoint", state[0], "i64"), f.cast("ptrtoint", out, "i64")), f.gep(out, p, "i64"))
        return [then.write(f, lanes, target, state[0], k, count)]

    start = [("ptr", f.offset(out, then.room(f, panels, first, k)))] if then else []
    f.loop(first, f.min(f.add(first, per_chunk), panels), 1, start, panel)
    f.ret()
    return Module([f])


def emit_pack(kernel: Kernel, target: Target, then: Repacking | None = None) -> KernelCode:
    """The packing kernel for a B that lies in memory as matrices of the type of its sums."""
    anchor, out = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.b, Load)
    index = linear_index(anchor.b.indices, anchor.b.source.shape)
    tile, used = tile_of(anchor.b.dtype, target), out.shape[:-3]
    depth, width = anchor.k, tile.width
    panels = ceildiv(anchor.n, width)
    batch_step = index.coefs.get(Var(f"i{len(used) - 1}"), 0) if used else 0
    n, count = anchor.n, size_product(used)

    cut = once(PackSchedule(count, panels, depth * width, then.together if then else None))
    words = PackArguments.given(
        b=Pointer(anchor.b.source, index.constant * out.dtype.itemsize),
        row_stride=index.coefs.get(DEPTH, 0),
        column_stride=index.coefs.get(COLUMN, 0),
        b_batch=batch_step,
        out=Pointer(out),
        out_batch=panels * depth * width,
        k=depth,
        n=n,
        batch=count,
        panel_chunk=part(cut, "step"),
    )
    symbol, ir = name_kernel(pack_b(tile, PLACEHOLDER, then).text())
    return KernelCode(symbol, ir, tuple(words), Part(cut, "chunks"))


PACK = Step("matmul.pack", emit_pack)


class Plain(PanelFormat):
    """Rows of A, read where they lie, times B in panels of as many columns as a few vectors have, for any types."""

    pack = PACK


PLAIN = Plain()
