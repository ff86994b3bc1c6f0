"""Matrix products: the code of a kernel, a chunk of rows and panels at a time, and its epilogue on each block.

The product of a block is a routine of `gemm.kernel`, which the kernel calls; `jit.compile` makes machine code of both.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.chunk import ProductArguments, batch_indices, place_of
from rlx.backends.cpu.gemm.epilogue import epilogue_of
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.llvm.builder import Function, size_of
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Argument,
    ArgumentTable,
    Extents,
    KernelCode,
    Part,
    Pointer,
    Routine,
    once,
    part,
)
from rlx.backends.cpu.schedule.matmul import InPlaceSchedule, MatmulSchedule, ProductParts
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.shape import size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Expr, Load
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Kernel, Store
from rlx.records import dataclass, replace

__all__ = ["Made", "Product", "emit_product"]


# ---- code


@dataclass(frozen=True)
class Made:
    """Panels that the kernel makes: by that code, in so many bytes of scratch, of what is at `source`.

    `words` are the arguments beside those of a product with panels.
    """

    maker: gemm.PanelMaker
    nbytes: int
    source: Pointer
    words: dict[str, Argument]


def emit_product(kernel: Kernel, format: PanelFormat, target: Target, made: Made | None = None) -> KernelCode:
    """The product with its epilogue; with `made` B is not packed: the kernel makes panels of it in scratch."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.a, Load)
    store = kernel.stores[0]
    dtype = format.sums(anchor.a.dtype)
    tile = tile_of(dtype, target, format=format.of(dtype if made else anchor.b.dtype))
    vars = out_vars(len(store.extents))
    batch, row, column = vars[:-2], vars[-2], vars[-1]
    a, b = (x and linear_index(x.indices, x.source.shape) for x in (anchor.a, None if made else _panels(anchor)))
    c = linear_index(store.index, store.buffer.shape)
    m, n, k = anchor.m, anchor.n, format.steps(anchor.k)
    epilogue = epilogue_of(store, [row], [m], column, n, dtype)
    to_scratch = not epilogue.in_place
    count = size_product(store.extents[:-2])

    tiles = target.multiplies_by_tiles(dtype.name) and format.by_tiles
    product = MatmulSchedule(m, n, k, count, size_of(tile.scalar), store.extents, to_scratch, target.rates, tiles)
    schedule = format.schedule(product, target)
    cut = once(InPlaceSchedule(schedule, made.nbytes) if made else schedule)
    table = ArgumentTable(_arguments(store, replace(anchor, k=k), cut, gemm.block_routine(tile), made))
    sites: list[str] = []

    def offsets(f: Function, number: str) -> tuple[str, str, str]:
        at = batch_indices(f, table, number, store.extents[:-2])
        steps = ([x.coefs.get(v, 0) if x else 0 for v in batch] for x in (a, b, c))
        return tuple(place_of(f, table, at, own) for own in steps)  # type: ignore[return-value]

    def finish(f: Function, block: gemm.Block) -> None:
        emitter = Emitter(f, table, target.lanes)
        epilogue.prepare(emitter)
        at = batch_indices(f, table, block.at.matrix, store.extents[:-2])
        top = Scope(1, None, dict(zip(batch, at, strict=True)))
        rows, columns = (block.at.r0, block.at.r1), (block.at.n0, block.at.n1)
        epilogue.block(emitter, rows, columns, block.c, block.ldc, top)
        sites.extend(emitter.sites)

    module = gemm.gemm_kernel(
        tile,
        PLACEHOLDER,
        None if epilogue.is_nothing else finish,
        to_scratch=to_scratch,
        batch_offsets=offsets if batch else None,
        panels=made.maker if made else None,
    )
    symbol, ir = name_kernel(module.text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(sites), part(cut, "scratch"))


def _panels(anchor: Contract) -> Load:
    assert isinstance(anchor.b, Load)
    return anchor.b


def _arguments(
    store: Store, anchor: Contract, cut: Callable[[Extents], ProductParts], block: Routine, made: Made | None
) -> list[Argument]:
    """What `ProductArguments` are; where each matrix of a batch lies code finds (`place_of`)."""
    assert isinstance(anchor.a, Load)
    row = out_vars(len(store.extents))[-2]
    a = linear_index(anchor.a.indices, anchor.a.source.shape)
    c = linear_index(store.index, store.buffer.shape)
    arguments = made.maker.arguments if made else ProductArguments
    return arguments.cut_by(
        cut,
        a=Pointer(anchor.a.source, a.constant * anchor.a.dtype.itemsize),
        lda=a.coefs.get(row, 0),
        b=made.source if made else Pointer(_panels(anchor).source),
        c=Pointer(store.buffer, c.constant * store.buffer.dtype.itemsize),
        ldc=c.coefs.get(row, 0),
        m=anchor.m,
        n=anchor.n,
        k=anchor.k,
        block=block,
        **({**made.words, "room": part(cut, "room")} if made else {}),
    )


# ---- strategies


class Product(CpuStrategy):
    """Rows of A, read where they lie, times panels of B in a format of `gemm/panels`."""

    scalars = True

    def __init__(self, name: str, format: PanelFormat) -> None:
        super().__init__(name)
        self.format = format

    @property
    def summary(self) -> str:
        return self.format.summary

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        kernel = self.format.normal(kernel)
        assert isinstance(kernel.anchor, Contract)
        return self.format.refuses(kernel, kernel.anchor, setting)

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return self.format.layout(kernel)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [emit_product(kernel, self.format, target)]

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        assert isinstance(kernel.anchor, Contract)
        return (kernel.anchor.b,)

    def panel_bytes(self, nbytes: int) -> int:
        return self.format.panel_bytes(nbytes)
