"""Products with weights that stay where they are, as `packing="none"` asks: no copy of them is kept.

    for each few panels of a chunk:
        pack these columns into scratch          as a file has them, [N, K] or [K, N], or in encoded blocks along k
        multiply the chunk's rows by them        by the code of packed panels

The numbers and the code are those of products with packed weights, so results have the same bits. Each run packs anew,
a few columns for all rows of a chunk, which stay in a cache.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.chunk import Product as Chunk
from rlx.backends.cpu.gemm.chunk import ProductArguments
from rlx.backends.cpu.gemm.panels.blocks import EncodedBlocks, blocks_of
from rlx.backends.cpu.gemm.panels.coded import CodedBlocks, CodedPairs
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, accumulates_in
from rlx.backends.cpu.gemm.panels.q8 import Q8Blocks
from rlx.backends.cpu.gemm.panels.q8_codes import COLUMNS, Q8Code
from rlx.backends.cpu.kernels.grouped_panels import computed_in, pack_blocks_routine, pack_routine
from rlx.backends.cpu.kernels.matmul.product import Made, Product, emit_product
from rlx.backends.cpu.schedule.arguments import Address, Argument, KernelCode, Number, Pointer
from rlx.backends.cpu.schedule.matmul import PANEL_BYTES
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Encoding, encoding_named
from rlx.kernels.affine import linear_index
from rlx.kernels.encoded import encoded_element
from rlx.kernels.expr import I64, Cast, Expr, Load, const, loads
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Kernel
from rlx.records import dataclass, replace

__all__ = ["InPlace"]

F32 = DTYPES["f32"]
TOGETHER = 4  # panels that are packed before they are multiplied


class InPlaceArguments(ProductArguments):
    """The arguments of a product whose panels are made by the kernel: `b` is where the weights are."""

    pack: Address  # a routine
    depth: Number  # of the weights, as they are stored
    row: Number  # from k to k, and from column to column, in elements
    column: Number
    room: Number  # where panels are in scratch


@dataclass(frozen=True)
class Weights:
    """Weights as they are stored, elements or the bytes of blocks: `first` is where in bytes, of elements of `load`.

    They are `row` elements from k to k and `column` from column to column.
    """

    load: Load
    first: int
    encoding: Encoding | None
    row: int
    column: int


def weights_of(kernel: Kernel, anchor: Contract) -> Weights | None:
    """Where the weights of a product are, if they are one matrix of a param or constant."""
    b = anchor.b.value if isinstance(anchor.b, Cast) and anchor.activations else anchor.b
    if not isinstance(anchor.k, int) or not isinstance(anchor.n, int) or not is_fixed(b):
        return None
    if encoded_element(b) is not None:
        found = blocks_of(kernel, replace(anchor, b=b))
        if found is None or found.column != anchor.k:
            return None
        first = found.byte(const(0, I64), const(0, I64), const(0, I64))
        return Weights(
            first, found.start // found.encoding.block * found.encoding.block_bytes, found.encoding, 1, anchor.k
        )
    load = b.value if isinstance(b, Cast) else b
    if not isinstance(load, Load) or load.where is not None or load.dtype.name not in ("f16", "bf16", "f32", "f64"):
        return None
    wide = accumulates_in(anchor)
    if computed_in(load.dtype) is not wide or (load is not b and b.dtype is not wide):
        return None  # packing widens elements, and rounds none
    index, column = linear_index(load.indices, load.source.shape), out_vars(len(kernel.stores[0].extents))[-1]
    row, across = (index.coefs.get(v, 0) for v in (DEPTH, column))
    if not index.is_linear or not index.coefs.keys() <= {DEPTH, column} or not isinstance(index.constant, int):
        return None
    if not isinstance(row, int) or not isinstance(across, int):
        return None
    return Weights(load, index.constant * load.dtype.itemsize, None, row, across)


class _Packing(gemm.PanelMaker):
    """Calls the routine that packs columns."""

    arguments = InPlaceArguments
    count = TOGETHER

    def made(self, product: Chunk, done: str, columns: str) -> str:
        f, w, width = product.f, product.w, product.tile.width
        assert isinstance(w, InPlaceArguments)
        first, room = f.add(product.at.n0, done), f.offset(product.own, w.room)
        count = f.div(f.add(columns, width - 1), width)
        sizes = (w.depth, f.sub(w.n, first), w.row, w.column, count, f.mul(first, w.column))
        f.call(w.pack, [w.b, room, *(("i64", size) for size in sizes)])
        return room


class InPlace(Product):
    """Weights that stay where they are, with `packing="none"`: each chunk packs a few columns at a time in scratch."""

    def __init__(self, name: str, format: PanelFormat) -> None:
        super().__init__(name, format)
        self.blocks, self.code = _blocks_of(format)

    @property
    def summary(self) -> str:
        return f"{self.format.summary} With packing='none' each run makes them, of a few columns at a time."

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        found = weights_of(kernel, anchor)
        if found is None:
            return "its weights are no matrix of a param, or no whole rows of blocks"
        if self.blocks is None and anchor.activations:
            return "its operands are rounded"
        if self.blocks is not None and found.encoding is not self.blocks:
            return f"its weights are not {self.format.name}"
        if self.code is not None and self.blocks is not None and self.code.nbytes != self.blocks.block_bytes:
            return "panels leave out bytes of the blocks"
        return super().refuses(kernel, setting)

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        *made, product = self.format.layout(kernel)
        packed = product.anchor
        assert isinstance(packed, Contract)
        panels = {x.source.base for x in loads(packed.b)}
        made = [k for k in made if panels.isdisjoint(b.base for b in k.writes())]
        return [*made, product.with_anchor(replace(packed, b=anchor.b))]

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        assert isinstance(anchor.k, int)
        found = weights_of(kernel, anchor)
        assert found is not None
        load, k = found.load, anchor.k
        if self.blocks is not None:
            pack = pack_blocks_routine(self.blocks, self.code, target)
            panel = k // self.blocks.block * self.blocks.block_bytes * COLUMNS
        else:
            pack = pack_routine(load.dtype if found.encoding is None else F32, target, found.encoding)
            panel = k * PANEL_BYTES
        words: dict[str, Argument] = {"pack": pack, "depth": k, "row": found.row, "column": found.column}
        source = Pointer(load.source, found.first)
        return [emit_product(kernel, self.format, target, Made(_Packing(), TOGETHER * panel, source, words))]

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        return ()


def _blocks_of(format: PanelFormat) -> tuple[Encoding | None, Q8Code | None]:
    """The encoding whose blocks panels of a format keep, and the code that orders their bytes."""
    match format:
        case CodedPairs():
            return _blocks_of(format.of_f32)
        case CodedBlocks():
            return format.encoding, format.whole
        case EncodedBlocks():
            return format.encoding, None
        case Q8Blocks():
            return encoding_named(format.code.name), format.code
    return None, None
