"""Matrix products with few rows or few columns, of two operands of the run: the large one is read once, as it lies.

Packing it into panels would cost several times what the product does. Sums have the bits of those by panels, so that
kernels for sizes that the run decides may choose between both.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.chunk import batch_indices, place_of
from rlx.backends.cpu.gemm.epilogue import Epilogue, epilogue_of
from rlx.backends.cpu.gemm.kernel import kernel_function
from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS
from rlx.backends.cpu.gemm.panels.operands import DEPTH, accumulates_in, rows_in_place
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.kernels.alternatives import alternatives, only_where
from rlx.backends.cpu.kernels.matmul.product import Product
from rlx.backends.cpu.kernels.matmul.thin_sums import routine
from rlx.backends.cpu.kernels.matmul.thin_types import Types
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Module, vec
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
    Routine,
    Scratch,
    ScratchStride,
    once,
    part,
)
from rlx.backends.cpu.schedule.choice import Choice
from rlx.backends.cpu.schedule.thin import MOST, ThinParts, ThinSchedule, are_tiles, may_be_thin, thin_limits
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType
from rlx.ir.shape import Size, exact_div, size_product
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import I64, Cast, Expr, Load, Var, const, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Kernel, Store
from rlx.records import dataclass, replace

__all__ = ["Thin"]


class ThinArguments(Arguments):
    """The arguments of the kernel; strides are in elements, places in scratch in bytes."""

    many: Address  # the operand that is streamed
    step: Number  # from k to k of it along, from row to row across
    few: Address
    few_step: Number
    k_step: Number  # of the few rows
    out: Address
    line: Number  # from the sums of one of the few rows to the next
    rows: Number
    columns: Number
    k: Number
    block: Number  # steps of k of a sum
    blocks: Number  # of columns
    units: Number
    per_chunk: Number
    scratch: Address
    scratch_stride: Number
    room: Number  # where sums begin in scratch
    sums: Address  # the routine


@dataclass(frozen=True)
class Reading:
    """How an operand lies in memory: `step` from row to row (of B: from column to column), `k_step` along k.

    `narrow` is what its elements are rounded to, if they are; code rounds both operands or none.
    """

    load: Load
    index: Affine
    step: Size
    k_step: Size
    narrow: DType | None = None


def _read(e: Expr, sums: DType, along: Var) -> Reading | None:
    """Elements of floats in memory, maybe converted to the type of the sums, whose index is linear; else None."""
    load = e.value if isinstance(e, Cast) and e.dtype is sums else e
    narrow = load.dtype if isinstance(load, Cast) and load.dtype.bits == 16 else None
    load = load.value if isinstance(load, Cast) and narrow else load
    if not isinstance(load, Load) or load.where is not None or load.dtype.name not in ("f16", "bf16", "f32", "f64"):
        return None
    index = linear_index(load.indices, load.source.shape)
    step, k_step = (index.coefs.get(v, 0) for v in (along, DEPTH))
    return Reading(load, index, step, k_step, narrow) if index.is_linear else None


def _pairs(anchor: Contract, few_rows: bool) -> tuple[Size, Size]:
    """How many of the few there are, and of the others."""
    return (anchor.m, anchor.n) if few_rows else (anchor.n, anchor.m)


def _readings(kernel: Kernel) -> tuple[Reading | None, Reading | None]:
    """How A and B are read where they lie."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    row, column = out_vars(len(kernel.stores[0].extents))[-2:]
    sums = accumulates_in(anchor)
    return _read(anchor.a, sums, row), _read(anchor.b, sums, column)


def _sides(kernel: Kernel) -> dict[bool, bool]:
    """The ways that a run may take, True for few rows and False for few columns, and whether all runs take it."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    a, b = _readings(kernel)
    if a is None or b is None or a.narrow is not b.narrow:
        return {}
    found: dict[bool, bool] = {}
    for few_rows, many in ((True, b), (False, a)):
        fits = may_be_thin(*_pairs(anchor, few_rows))
        if fits is not False and 1 in (many.step, many.k_step):
            found[few_rows] = fits is True
    return {side: True for side, always in found.items() if always} or found


class Thin(CpuStrategy):
    """Up to 12 rows or columns, of operands that a run brings: the large one is read once, where it lies.

    Where the number of both is known at the run only, there is code for panels too.
    """

    scalars = True

    def __init__(self, name: str, panels: Product) -> None:
        super().__init__(name)
        self.by_panels = panels

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        if not accumulates_in(anchor).is_float:
            return "its sums are no floats"
        if is_fixed(anchor.b):
            return "its second operand can be packed before any run"
        if not any(may_be_thin(*_pairs(anchor, side)) is not False for side in (True, False)):
            return f"it has neither up to {MOST} rows nor up to {MOST} columns"
        return None if _sides(_with_rows(kernel)[0]) else "its large operand is no matrix in memory"

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        kernel, copies = self._rows_ready(kernel)
        assert isinstance(kernel.anchor, Contract)
        if any(_sides(kernel).values()):
            return [*copies, kernel]
        *before, product = self.by_panels.layout(kernel, setting)
        packed = product.anchor
        assert isinstance(packed, Contract)
        assert isinstance(packed.a, Load)
        assert isinstance(packed.b, Load)
        choice = _choice(kernel)
        packs = [only_where(k, "matmul.pack", choice, len(choice.ways)) for k in before]
        rows = (packed.a.source,) if packed.a != kernel.anchor.a else ()  # in a layout of their own
        return [*copies, *packs, replace(kernel, operands=(packed.b.source, *rows))]

    def _rows_ready(self, kernel: Kernel) -> tuple[Kernel, list[Kernel]]:
        """The kernel whose A is read as it lies, and what copies it to where it is where it can't be."""
        return _with_rows(kernel)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        thin = [_emit(kernel, few_rows, target) for few_rows in _sides(kernel)]
        if not kernel.operands:
            return thin
        panels, *rows = kernel.operands
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        *batch, row, _ = out_vars(len(kernel.stores[0].extents))
        zero, (of_a, of_b) = const(0, I64), ([v for v in batch if v in set(walk(x))] for x in (anchor.a, anchor.b))
        by_panels = replace(anchor, b=Load(panels, (*of_b, zero, DEPTH, zero), panels.dtype))
        if rows:
            by_panels = replace(by_panels, a=Load(rows[0], (*of_a, row, DEPTH), rows[0].dtype))
        otherwise = self.by_panels.emit(replace(kernel, anchor=by_panels, operands=()), target)
        return alternatives(_choice(kernel), *([code] for code in thin), otherwise)


class ThinRounded(Thin):
    """Up to 12 rows or columns, of operands that a run brings and that are rounded to bf16 as they are read.

    Where the number of both is known at the run only, there is code for panels too, whose sums have the same bits if
    both multiply pairs.
    """

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        if is_fixed(anchor.b):
            return "its second operand can be packed before any run"
        sides = _sides(kernel)
        if not sides or (not any(sides.values()) and setting.target.float_tiles):
            return f"it may have more than {MOST} rows and columns, or lies in no matrices"
        alike = all(_are_pairs(kernel, side, setting.target) for side in sides)
        return None if any(sides.values()) or alike else "its depth may be odd"

    def _rows_ready(self, kernel: Kernel) -> tuple[Kernel, list[Kernel]]:
        return kernel, []  # both layouts round them where they lie


def _with_rows(kernel: Kernel) -> tuple[Kernel, list[Kernel]]:
    """The kernel whose A is read as it lies, and what copies it to where it is where it can't be."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    if any(_sides(kernel).values()):
        return kernel, []
    a, copies = rows_in_place(kernel, anchor, accumulates_in(anchor))
    return kernel.with_anchor(replace(anchor, a=a)), copies


def _choice(kernel: Kernel) -> Choice:
    """Which of the ways `_sides` a run takes; else that by panels."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    return Choice(tuple(thin_limits(*_pairs(anchor, few_rows)) for few_rows in _sides(kernel)))


def _are_pairs(kernel: Kernel, few_rows: bool, target: Target) -> bool:
    """Whether words of two bf16 are multiplied: of operands of f32 that are rounded, with an even depth."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    a, b = _readings(kernel)
    assert a is not None
    assert b is not None
    many = b if few_rows else a
    rounded = target.multiplies_bf16 and a.narrow is not None and a.narrow.name == "bf16"
    floats = all(x.load.dtype.name == "f32" for x in (a, b))
    whole = exact_div(anchor.k, 2) is not None and (many.step == 1 or exact_div(many.step, 2) is not None)
    return rounded and floats and whole


# ---- code


def _emit(kernel: Kernel, few_rows: bool, target: Target) -> KernelCode:
    """The product with its epilogue, by one of the ways."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Contract)
    a, b = _readings(kernel)
    assert a is not None
    assert b is not None
    few, many = (a, b) if few_rows else (b, a)
    sums = accumulates_in(anchor)
    *batch, row, column = out_vars(len(store.extents))
    c = linear_index(store.index, store.buffer.shape)
    epilogue = epilogue_of(store, [row], [anchor.m], column, anchor.n, sums)
    in_place = epilogue.in_place and (few_rows or (anchor.n == 1 and c.coefs.get(row, 0) == 1))
    along = many.step == 1
    types = Types(
        sums, many.load.dtype, few.load.dtype, target.vector_bytes, many.narrow, _are_pairs(kernel, few_rows, target)
    )
    products = size_product(store.extents[:-2])
    k = anchor.k // 2 if types.pairs else anchor.k
    sizes = (*_pairs(anchor, few_rows), k, products, sums.itemsize, types.step_bytes)
    steps = BF16_PAIRS.steps(anchor.k) if types.pairs else k  # as those of panels are cut into blocks
    count = _pairs(anchor, few_rows)[0]
    known = count if isinstance(count, int) else None
    plain = along and many.narrow is None
    in_tiles = plain and known is not None and are_tiles(known, k, many.k_step, types.step_bytes)
    cut = once(ThinSchedule(*sizes, along, not in_place, store.extents, target.rates, steps, in_tiles))
    block = routine(types, known, tile_of(sums, target) if in_tiles else None, along=along)
    results = (store, c, row) if in_place else None
    table = ArgumentTable(_arguments(replace(anchor, k=k), (few, many), few_rows, results, cut, block, types.pairs))
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, target.lanes)
    epilogue.prepare(emitter)
    w = ThinArguments.loaded(f)
    own = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
    ty = convert.llvm_type(sums)
    first = f.mul("%chunk", w.per_chunk)

    def unit(number: str, _: list[str]) -> None:
        matrix, block = f.div(number, w.blocks), f.rem(number, w.blocks)
        j0, j1 = f.div(f.mul(block, w.columns), w.blocks), f.div(f.mul(f.add(block, 1), w.columns), w.blocks)
        at = batch_indices(f, table, matrix, store.extents[:-2])
        starts = [place_of(f, table, at, [x.coefs.get(v, 0) for v in batch]) for x in (few.index, many.index, c)]
        memory = [convert.memory_type(x.load.dtype) for x in (few, many)]
        rows = f.gep(w.few, starts[0], memory[0])
        streamed = f.gep(w.many, f.add(starts[1], j0) if along else starts[1], memory[1])
        if not along:
            streamed = f.gep(streamed, f.mul(j0, w.step), types.step)
        out = f.gep(w.out, f.add(starts[2], j0), ty) if in_place else f.offset(own, w.room)
        sizes = [w.line, w.rows, f.sub(j1, j0), w.k, w.block]
        f.call(w.sums, [streamed, w.step, rows, w.few_step, w.k_step, out, *sizes, own])
        if in_place and epilogue.is_nothing:
            return
        top = Scope(1, None, dict(zip(batch, at, strict=True)))
        if few_rows:
            epilogue.block(emitter, ("0", w.rows), (j0, j1), out, w.line, top)
        else:
            _put_columns(emitter, epilogue, top, w.rows, (j0, j1), (out, w.line))

    f.loop(first, f.min(f.add(first, w.per_chunk), w.units), 1, [], unit)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites), part(cut, "scratch"))


def _arguments(
    anchor: Contract,
    operands: tuple[Reading, Reading],
    few_rows: bool,
    results: tuple[Store, Affine, Var] | None,
    cut: Callable[[Extents], ThinParts],
    block: Routine,
    pairs: bool,
) -> list[Argument]:
    """What `ThinArguments` are, of the few and the others, k in steps. `results`: where sums lie as results do."""
    few, many = operands
    out: Argument = Scratch()
    line: Argument = part(cut, "line")
    if results is not None:
        store, index, row = results
        out = Pointer(store.buffer, index.constant * store.buffer.dtype.itemsize)
        line = index.coefs.get(row, 0)
    return ThinArguments.given(
        many=Pointer(many.load.source, many.index.constant * many.load.dtype.itemsize),
        step=many.k_step if many.step == 1 else many.step // 2 if pairs else many.step,
        few=Pointer(few.load.source, few.index.constant * few.load.dtype.itemsize),
        few_step=few.step,
        k_step=few.k_step,
        out=out,
        line=line,
        rows=anchor.m if few_rows else anchor.n,
        columns=anchor.n if few_rows else anchor.m,
        k=anchor.k,
        block=part(cut, "steps"),
        blocks=part(cut, "blocks"),
        units=part(cut, "units"),
        per_chunk=part(cut, "per_chunk"),
        scratch=Scratch(),
        scratch_stride=ScratchStride(),
        room=part(cut, "room"),
        sums=block,
    )


def _put_columns(
    emitter: Emitter, epilogue: Epilogue, top: Scope, columns: str, rows: tuple[str, str], sums: tuple[str, str]
) -> None:
    """The results of sums that lie column after column, in vectors along the rows: (address, step from column on)."""
    f, ty = emitter.f, convert.llvm_type(epilogue.sums)
    lanes = emitter.lanes * 4 // epilogue.sums.itemsize
    r0, r1 = rows
    emitter.hoist(epilogue.expr, frozenset((epilogue.column, *epilogue.rows)), top)
    along = epilogue.rows[0] if len(epilogue.rows) == 1 and epilogue.row_step is not None else None

    def column(c: str, _: list[str]) -> None:
        here = top.inner({epilogue.column: c})
        emitter.hoist(epilogue.expr, frozenset(epilogue.rows), here)
        line = f.gep(sums[0], f.mul(sums[1], c), ty)

        def put(r: str, w: int) -> None:
            scope = here.inner(epilogue.at(emitter, r), w, along if w > 1 else None)
            value = f.load(vec(ty, w), f.gep(line, f.sub(r, r0), ty))
            emitter.store(epilogue.destination, epilogue.value(emitter, scope, value, w), scope)

        whole = f.sub(r1, f.rem(f.sub(r1, r0), lanes)) if along else r0
        f.loop(r0, whole, lanes, [], lambda r, _: put(r, lanes))
        f.loop(whole, r1, 1, [], lambda r, _: put(r, 1))

    f.loop(0, columns, 1, [], column)
