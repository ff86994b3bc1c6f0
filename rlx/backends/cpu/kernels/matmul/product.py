"""Matrix products: the code of a kernel, a chunk of rows and panels at a time, and its epilogue on each block."""

from __future__ import annotations

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, size_of, vec
from rlx.backends.cpu.loops.analysis import is_costly
from rlx.backends.cpu.loops.nest import PLACEHOLDER, Emitter, Scope, linear_load, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    ArgumentTable,
    KernelCode,
    Pointer,
    Scratch,
    ScratchStride,
    once,
)
from rlx.backends.cpu.schedule.base import Part, part
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, size_product
from rlx.kernels.affine import index_expr, linear_index
from rlx.kernels.expr import (
    Acc,
    Expr,
    Load,
    Var,
    transform,
)
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Kernel

__all__ = ["Product"]

F32, F64, I32 = DTYPES["f32"], DTYPES["f64"], DTYPES["i32"]
I8, U8, I16 = DTYPES["i8"], DTYPES["u8"], DTYPES["i16"]
DEPTH = Var("k")
COLUMN = Var("n")


# ---- code


def _emit(kernel: Kernel, format: PanelFormat, target: Target) -> KernelCode:
    """The product with its epilogue."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.a, Load)
    assert isinstance(anchor.b, Load)
    store = kernel.stores[0]
    dtype = anchor.a.dtype
    tile = gemm.tile_of(dtype, target, format=format.of(anchor.b.dtype))
    vars = out_vars(len(store.extents))
    batch, row, column = vars[:-2], vars[-2], vars[-1]
    a, b = (linear_index(x.indices, x.source.shape) for x in (anchor.a, anchor.b))
    c = linear_index(store.index, store.buffer.shape)
    expr = transform(store.expr, linear_load)
    plain = isinstance(expr, Acc)
    to_scratch = store.buffer.dtype is not dtype or c.coefs.get(column, 1 if anchor.n == 1 else 0) != 1
    m, n, k = anchor.m, anchor.n, anchor.k
    count = size_product(store.extents[:-2])

    tiles = target.multiplies_by_tiles(dtype.name) and format.by_tiles
    product = MatmulSchedule(m, n, k, count, size_of(tile.scalar), store.extents, to_scratch, tiles)
    cut = once(format.schedule(product, target))
    words = gemm.GemmArguments.given(
        a=Pointer(anchor.a.source, a.constant * dtype.itemsize),
        lda=a.coefs.get(row, 0),
        a_batch=0,
        b=Pointer(anchor.b.source),
        b_batch=0,
        c=Pointer(store.buffer, c.constant * store.buffer.dtype.itemsize),
        ldc=c.coefs.get(row, 0),
        c_batch=0,
        m=m,
        n=n,
        k=k,
        batch=count,
        row_chunk=part(cut, "row_chunk"),
        panel_chunk=part(cut, "panel_chunk"),
        scratch=Scratch(),
        scratch_stride=ScratchStride(),
        copy_bytes=part(cut, "copy_bytes"),
        steps=part(cut, "steps"),
        block=gemm.block_routine(tile),
    )
    table = ArgumentTable(words)
    sites: list[str] = []

    def offsets(f: Function, number: str) -> tuple[str, str, str]:
        at = _batch_indices(f, table, number, store.extents[:-2])
        return tuple(_dot(f, table, at, [x.coefs.get(v, 0) for v in batch]) for x in (a, b, c))  # type: ignore[return-value]

    def epilogue(f: Function, block: gemm.Block) -> None:
        emitter = Emitter(f, table, target.lanes)
        destination = Load(store.buffer, (index_expr(c),), store.buffer.dtype)
        emitter.preload([expr, destination], store.extents)
        at = _batch_indices(f, table, block.batch, store.extents[:-2])
        run_block(emitter, expr, destination, dict(zip(batch, at, strict=True)), row, column, block, to_scratch, dtype)
        sites.extend(emitter.sites)

    module = gemm.gemm_kernel(
        tile,
        PLACEHOLDER,
        None if plain and not to_scratch else epilogue,
        to_scratch=to_scratch,
        batch_offsets=offsets if batch else None,
    )
    symbol, ir = name_kernel(module.text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(sites), part(cut, "scratch"))


def _batch_indices(f: Function, table: ArgumentTable, number: str, extents: Shape) -> list[str]:
    """The index along each batch axis of matrix `number`."""
    out: list[str] = []
    for size in reversed(extents[1:]):
        extent = table.load(f, size)
        out.insert(0, f.binary("urem", number, extent, "i64"))
        number = f.binary("udiv", number, extent, "i64")
    return [number, *out] if extents else []


def _dot(f: Function, table: ArgumentTable, at: list[str], strides: list[Size]) -> str:
    total = "0"
    for i, stride in zip(at, strides, strict=True):
        if stride != 0:
            total = f.add(total, f.mul(i, table.load(f, stride), "i64"), "i64")
    return total


def run_block(
    emitter: Emitter,
    expr: Expr,
    destination: Load,
    batch: dict[Var, str],
    row: Var,
    column: Var,
    block: gemm.Block,
    to_scratch: bool,
    dtype: DType,
) -> None:
    """Emits the epilogue over a finished block of sums at `block.c`, in vectors along its columns."""
    f, lanes = emitter.f, emitter.lanes
    ty = convert.llvm_type(dtype)
    top = Scope(1, None, batch)
    emitter.hoist(expr, frozenset((row, column)), top)

    def one_row(m: str, _: list[str]) -> None:
        scope = top.inner({row: m})
        sums = f.gep(block.c, f.mul(f.sub(m, block.m0, "i64"), block.ldc, "i64"), ty)
        emitter.hoist(expr, frozenset((column,)), scope)
        emitter.hoist(destination, frozenset((column,)), scope)

        def put(n: str, w: int) -> None:
            at = scope.inner({column: n}, w, column if w > 1 else None)
            address = f.gep(sums, f.sub(n, block.n0, "i64"), ty)
            emitter.acc = lambda _: (f.load(vec(ty, w), address), w)
            value = emitter.lanes_of(expr, at)
            text = convert.to_memory(f, value, destination.dtype, w)
            if to_scratch:
                emitter.store(destination, text, at)
            else:
                f.store(text, address, ty=vec(ty, w))

        # functions are long chains of operations that wait for one another: four vectors at a time hide that
        at = block.n0
        for w in (4 * lanes, lanes, 1) if is_costly(expr) else (lanes, 1):
            whole = f.sub(block.n1, f.rem(f.sub(block.n1, at, "i64"), w, "i64"), "i64")
            f.loop(at, whole, w, [], lambda n, _, w=w: put(n, w))  # type: ignore[misc]
            at = whole

    f.loop(block.m0, block.m1, 1, [], one_row)


# ---- strategies


class Product(CpuStrategy):
    """Rows of A, read where they lie, times panels of B in a format of `gemm/panels`."""

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
        return self.format.layout(kernel, setting.target)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, self.format, target)]

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        assert isinstance(kernel.anchor, Contract)
        return (kernel.anchor.b,)

    def panel_bytes(self, nbytes: int) -> int:
        return self.format.panel_bytes(nbytes)
