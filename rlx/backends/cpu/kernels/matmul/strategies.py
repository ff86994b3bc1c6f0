"""Which way a matrix product is computed."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS
from rlx.backends.cpu.gemm.panels.bytes import BYTES
from rlx.backends.cpu.gemm.panels.coded import IN_BLOCKS, PAIRED, SCALED, CodedBlocks
from rlx.backends.cpu.gemm.panels.f28 import F28_PANELS
from rlx.backends.cpu.gemm.panels.narrow import NARROW
from rlx.backends.cpu.gemm.panels.operands import DEPTH
from rlx.backends.cpu.gemm.panels.pairs import PAIRS
from rlx.backends.cpu.gemm.panels.plain import PLAIN
from rlx.backends.cpu.gemm.panels.q8 import Q8_FORMATS, Q8Blocks
from rlx.backends.cpu.kernels.conv import int8 as int8_conv
from rlx.backends.cpu.kernels.conv import strategies as conv
from rlx.backends.cpu.kernels.matmul.in_place import InPlace
from rlx.backends.cpu.kernels.matmul.product import Product
from rlx.backends.cpu.kernels.matmul.thin import Thin, ThinRounded
from rlx.backends.cpu.strategy import CpuStrategy, Setting, computed
from rlx.backends.cpu.target import Target
from rlx.ir.casting import rounded_q8_element
from rlx.ir.dtype import DTYPES, DType
from rlx.kernels.affine import Affine
from rlx.kernels.expr import I64, Expr, Var, const, substitute_vars, walk
from rlx.kernels.lowering import Contract, Lowering, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Kernel, Store
from rlx.records import replace

__all__ = ["BF16", "INT8", "IN_PLACE", "MATMUL", "Q8", "accepts_operand", "layout", "unsuited"]

I8, I16, I32 = DTYPES["i8"], DTYPES["i16"], DTYPES["i32"]


INT8 = int8_conv.Int8("matmul.int8")  # computed as a convolution of one pixel
PANELS = Product("matmul.panels", PLAIN)
Q8: tuple[CpuStrategy, ...] = tuple(Product(f"matmul.q8+{format.code.name}", format) for format in Q8_FORMATS)
BF16_PRODUCT = Product("matmul.bf16_pairs", BF16_PAIRS)
BF16: tuple[CpuStrategy, ...] = (
    ThinRounded("matmul.bf16_thin", BF16_PRODUCT),
    *(Product(f"matmul.bf16_pairs+{format.whole.name}", format) for format in PAIRED),
    BF16_PRODUCT,
)
# Products of anything but bytes: the first that does not refuse computes it.
MATMUL: tuple[CpuStrategy, ...] = (
    Thin("matmul.thin", PANELS),
    Product("matmul.i16_pairs", PAIRS),
    *(Product(f"matmul.panels+{format.name}", format) for format in IN_BLOCKS),
    *(Product(f"matmul.panels+{format.name}", format) for format in SCALED),
    *(Product(f"matmul.panels+{format.name}", format) for format in NARROW),
    Product("matmul.panels+bytes", BYTES),
    Product("matmul.panels+f28", F28_PANELS),
    PANELS,
)


# Products whose weights are not packed, by what activations are rounded to.
IN_PLACE: Mapping[str, tuple[CpuStrategy, ...]] = {
    "q8": tuple(InPlace(f"matmul.in_place+q8_{x.code.name}", x) for x in Q8_FORMATS if isinstance(x, Q8Blocks)),
    "bf16": tuple(InPlace(f"matmul.in_place+{x.name}", x) for x in PAIRED if isinstance(x.of_f32, CodedBlocks)),
    "": (
        *(InPlace(f"matmul.in_place+{x.name}", x) for x in IN_BLOCKS),
        InPlace("matmul.in_place", PLAIN),
    ),
}


def unsuited(anchor: Contract, dtype: DType, target: Target) -> str | None:
    """Why no strategy takes a product: they take floats, accumulated in f32 or f64, i16 in i32, bytes with weights."""
    if anchor.a.dtype.bits == 8 and dtype is I32:
        return int8_conv.unsuited_product(anchor, target)
    operands = {x.dtype for x in (anchor.a, anchor.b)}
    if dtype is I32:
        known = anchor.a.dtype is I16 and anchor.b.dtype in (I16, I8)
    else:
        known = all(d.is_float and d.bits >= 16 for d in {dtype, *operands})
    return None if known else f"no kernel has products of {anchor.a.dtype} and {anchor.b.dtype} in {dtype}"


def accepts_operand(index: Affine) -> bool:
    """Any linear walk will do: what is not in place becomes a compact copy."""
    return index.is_linear


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The kernel, computed by the first strategy that takes it, after those that bring its operands into a layout."""
    assert isinstance(kernel.anchor, Contract)
    if kernel.anchor.a.dtype.bits == 8:
        return conv.layout(int8_conv.as_convolution(kernel), setting, (INT8,))
    kernel = _rows_together(kernel, kernel.anchor)
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    if setting.in_place and is_fixed(anchor.b):
        stays = _in_place(kernel, setting)
        if stays is not None:
            return stays
    own = {"bf16": BF16, "q8": Q8}.get(anchor.activations, ())
    if any(strategy.refuses(kernel, setting) is None for strategy in own):
        return computed(kernel, own, setting)
    if anchor.activations == "q8":
        kernel = _rounded(kernel, anchor)
    elif anchor.activations:  # its elements are casts
        kernel = kernel.with_anchor(replace(anchor, activations=""))
    return computed(kernel, MATMUL, setting)


def _in_place(kernel: Kernel, setting: Setting) -> list[Kernel] | None:
    """The kernel with weights that stay where they are; None where no strategy has them so."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    ways = [(kernel, IN_PLACE.get(anchor.activations, ()))]
    if anchor.activations == "q8":
        ways.append((_rounded(kernel, anchor), IN_PLACE[""]))
    for made, strategies in ways:
        if any(strategy.refuses(made, setting) is None for strategy in strategies):
            return computed(made, strategies, setting)
    return None


def _rounded(kernel: Kernel, anchor: Contract) -> Kernel:
    """The product of activations that loops round to 8 bits, as they are copied."""
    made = rounded_q8_element(Lowering(()), lambda at: substitute_vars(anchor.a, {DEPTH: at}), anchor.k, DEPTH)
    return kernel.with_anchor(replace(anchor, a=made, activations=""))


def _rows_together(kernel: Kernel, anchor: Contract) -> Kernel:
    """Matrices of one row, along one axis, with the same B: as the rows of one matrix, which reads B once."""
    store = kernel.stores[0]
    *batch, row, column = out_vars(len(store.extents))
    wide = [v for v, size in zip(batch, store.extents, strict=False) if size != 1]
    if anchor.m != 1 or len(kernel.stores) > 1 or len(wide) != 1 or set(batch) & set(walk(anchor.b)):
        return kernel
    new_row, new_column = out_vars(2)
    to: dict[Var, Expr] = {**dict.fromkeys([*batch, row], const(0, I64)), wide[0]: new_row, column: new_column}
    extents = (store.extents[batch.index(wide[0])], store.extents[-1])
    index, expr = tuple(substitute_vars(i, to) for i in store.index), substitute_vars(store.expr, to)
    a, b = substitute_vars(anchor.a, to), substitute_vars(anchor.b, to)
    return replace(
        kernel, stores=(Store(store.buffer, extents, index, expr),), anchor=replace(anchor, m=extents[0], a=a, b=b)
    )
