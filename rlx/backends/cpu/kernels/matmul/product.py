"""Matrix products on the CPU: operands brought into the micro-kernels' layout, and the epilogue on each block."""

from __future__ import annotations

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.gemm.panels import plain as packing
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, size_of, vec
from rlx.backends.cpu.loops.analysis import is_costly
from rlx.backends.cpu.loops.nest import PLACEHOLDER, Emitter, Scope, linear_load, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    ArgumentTable,
    KernelCode,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
    once,
)
from rlx.backends.cpu.schedule.base import PackSchedule, Part, part
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import CpuStrategy, Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, ceildiv, size_product
from rlx.kernels.affine import index_expr, linear_index
from rlx.kernels.expr import (
    I64,
    Acc,
    Apply,
    Cast,
    Expr,
    Load,
    Select,
    Var,
    const,
    guarded,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_fixed, is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["DEPTH", "PACK", "Product", "accumulates_in", "compact", "extents_of", "is_whole"]

F32, F64, I32 = DTYPES["f32"], DTYPES["f64"], DTYPES["i32"]
I8, U8, I16 = DTYPES["i8"], DTYPES["u8"], DTYPES["i16"]
DEPTH = Var("k")
COLUMN = Var("n")


def accumulates_in(anchor: Contract) -> DType:
    """f64 products stay f64; f32, f16 and bf16 are summed in f32, i16 in i32."""
    if anchor.a.dtype is I16:
        return I32
    return F64 if F64 in (anchor.a.dtype, anchor.b.dtype) else F32


def _rows_in_place(kernel: Kernel, anchor: Contract, dtype: DType) -> tuple[Expr, list[Kernel]]:
    """A with its rows contiguous, and the kernel that copies it where they do not lie so."""
    a, store = anchor.a, kernel.stores[0]
    if isinstance(a, Load) and a.dtype is dtype and a.where is None:
        index = linear_index(a.indices, a.source.shape)
        if index.is_linear and (index.coefs.get(DEPTH, 0) == 1 or anchor.k == 1):
            return a, []
    *batch, row, _ = out_vars(len(store.extents))
    used = [v for v in batch if v in set(walk(a))]
    extents = [*extents_of(used, store.extents), anchor.m, anchor.k]
    copied, copy = compact(kernel, a, [*used, row, DEPTH], extents, dtype)
    return copied, [copy]


def _scaled_behind(kernel: Kernel, anchor: Contract) -> Kernel:
    """The product with weights of bytes that have a scale by column, which then multiplies the sums instead.

    Sums without the scale overflow where one of 128 |x| K is near 2^128, as of an x of 1e33 over 1000 steps.
    """
    column = out_vars(len(kernel.stores[0].extents))[-1]
    match anchor.b:
        case Apply(fn="mul", args=(value, scale)) if is_whole(value) and _is_of(scale, column):
            behind = tuple(
                replace(s, expr=transform(s.expr, lambda e: e * scale if isinstance(e, Acc) else None))
                for s in kernel.stores
            )
            return replace(kernel, stores=behind).with_anchor(replace(anchor, b=value))
    return kernel


def is_whole(e: Expr) -> bool:
    """Whether it is a byte as a float, or the difference of two of one type: a bf16, as 9 bits wouldn't be."""
    match e:
        case Cast(value=value) if e.dtype is F32:
            return value.dtype in (I8, U8)
        case Apply(fn="sub", args=(Cast(value=x), Cast(value=y)) as both):
            return x.dtype is y.dtype and all(map(is_whole, both))
    return False


def _is_of(scale: Expr, column: Var) -> bool:
    """Whether it is a number of f32 that depends on params and constants and the column only."""
    return is_fixed(scale) and scale.dtype is F32 and {x for x in walk(scale) if isinstance(x, Var)} <= {column}


def extents_of(vars: list[Var], extents: Shape) -> list[Size]:
    return [extents[int(v.name[1:])] for v in vars]


def compact(kernel: Kernel, a: Expr, vars: list[Var], extents: list[Size], dtype: DType) -> tuple[Expr, Kernel]:
    """A copy of the operand with one axis for each variable, and the load that reads it."""
    kind = "prepared" if is_static(a, extents) else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.a", kind, tuple(extents), dtype)
    own = out_vars(len(vars))
    expr = substitute_vars(a, dict(zip(vars, own, strict=True)))
    store = Store(buffer, tuple(extents), own, scalar_cast(expr, dtype))
    return Load(buffer, tuple(vars), dtype), Kernel("copy a", (store,), nodes=kernel.nodes)


def scalar_cast(expr: Expr, dtype: DType) -> Expr:
    """The expression converted to `dtype`."""
    return expr if expr.dtype is dtype else Cast(expr, dtype)


def pack(
    kernel: Kernel,
    anchor: Contract,
    dtype: DType,
    batch: tuple[Var, ...],
    column: Var,
    extents: Shape,
    target: Target,
    *,
    as_bytes: bool,
) -> tuple[Expr, Kernel]:
    """B as panels [batch..., ceil(N / width), K, width], padded with zeros.

    With `as_bytes`, of a B that `is_whole`: as bytes, or as i16 where it is a difference of two.
    """
    b, width = anchor.b, gemm.tile_of(dtype, target).width
    if as_bytes:
        b = b.value if isinstance(b, Cast) else Cast(b, I16)
        dtype = b.dtype
    used = [v for v in batch if v in set(walk(b))]
    shape = (*extents_of(used, extents), ceildiv(anchor.n, width), anchor.k, width)
    buffer = Buffer(
        f"{kernel.stores[0].buffer.name}.panels", "prepared" if is_static(b, shape) else "arena", shape, dtype
    )
    own = out_vars(len(shape))
    *outer, panel, depth, lane = own
    n = panel * width + lane
    element = substitute_vars(b, {**dict(zip(used, outer, strict=True)), DEPTH: depth, column: n})
    if not (isinstance(anchor.n, int) and anchor.n % width == 0):
        inside = n < size_expr(anchor.n)
        element = Select(inside, guarded(element, inside), const(0, b.dtype))
    store = Store(buffer, shape, own, scalar_cast(element, dtype))
    walked = substitute_vars(b, {**dict(zip(used, outer, strict=True)), column: COLUMN})
    simple = (
        not as_bytes and isinstance(walked, Load) and walked.dtype is dtype and _is_matrix(walked, list(outer), shape)
    )
    pack = Kernel(
        "pack b",
        (store,),
        replace(anchor, a=const(0, dtype), b=walked) if simple else None,
        nodes=kernel.nodes,
        strategy=PACK if simple else None,
    )
    zero = const(0, I64)
    return Load(buffer, (*used, zero, DEPTH, zero), dtype), pack


def _is_matrix(b: Load, batch: list[Var], shape: Shape) -> bool:
    """Whether B lies in memory as matrices of any strides, one constant step apart."""
    if b.where is not None:
        return False
    index = linear_index(b.indices, b.source.shape)
    steps = [index.coefs.get(v, 0) for v in batch]
    return index.is_linear and all(
        step == steps[-1] * size_product(shape[d + 1 : len(batch)]) for d, step in enumerate(steps)
    )


# ---- code


def _emit_pack(kernel: Kernel, target: Target) -> KernelCode:
    """The packing kernel for a B that lies in memory as matrices."""
    anchor, out = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.b, Load)
    index = linear_index(anchor.b.indices, anchor.b.source.shape)
    short, used = _is_short(out), out.shape[:-3]
    depth, width = anchor.k, gemm.tile_of(out.dtype, target).width
    panels = ceildiv(anchor.n, width)
    batch_step = index.coefs.get(Var(f"i{len(used) - 1}"), 0) if used else 0
    n, count = anchor.n, size_product(used)

    cut = once(PackSchedule(count, panels, depth * width, f28.TOGETHER if short else None))
    words = packing.PackArguments.given(
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
    symbol, ir = name_kernel(packing.pack_b(gemm.tile_of(out.dtype, target), PLACEHOLDER, short=short).text())
    return KernelCode(symbol, ir, tuple(words), Part(cut, "chunks"))


def _is_short(panels: Buffer) -> bool:
    """Whether panels are shortened ones."""
    return len(panels.shape) == 1


def _emit(kernel: Kernel, strategy: Product, target: Target) -> KernelCode:
    """The product with its epilogue."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.a, Load)
    assert isinstance(anchor.b, Load)
    store = kernel.stores[0]
    dtype = anchor.a.dtype
    tile = gemm.tile_of(dtype, target, stored=strategy.stored(anchor.b, dtype))
    vars = out_vars(len(store.extents))
    batch, row, column = vars[:-2], vars[-2], vars[-1]
    a, b = (linear_index(x.indices, x.source.shape) for x in (anchor.a, anchor.b))
    c = linear_index(store.index, store.buffer.shape)
    expr = transform(store.expr, linear_load)
    plain = isinstance(expr, Acc)
    to_scratch = store.buffer.dtype is not dtype or c.coefs.get(column, 1 if anchor.n == 1 else 0) != 1
    m, n, k = anchor.m, anchor.n, anchor.k
    count = size_product(store.extents[:-2])

    tiles = target.multiplies_by_tiles(dtype.name) and not strategy.short
    product = MatmulSchedule(
        m, n, k, count, size_of(tile.scalar), store.extents, to_scratch, tiles, strategy.short, strategy.of_bytes
    )
    cut = once(strategy.schedule(product, target))
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
        block=strategy.block_routine(tile),
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
        placed=strategy.short,
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


PACK = Step("matmul.pack", _emit_pack)  # a B that lies in memory as matrices


class Product(CpuStrategy):
    """Rows of A, read where they lie, times B in panels of as many columns as a few vectors have, for any types.

    `short` and `of_bytes` say what the panels of a variant hold.
    """

    short = False
    of_bytes = False

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        kernel = self.normal(kernel)
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        a, copies = _rows_in_place(kernel, anchor, accumulates_in(anchor))
        b, pack = self.packed(kernel, anchor, setting.target)
        return [*copies, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

    def normal(self, kernel: Kernel) -> Kernel:
        """The kernel as panels are made of it: in f32 the scale by column of weights of bytes comes after the sums."""
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        # for any number of rows, known or not: results have the same bits
        return _scaled_behind(kernel, anchor) if accumulates_in(anchor) is F32 else kernel

    def packed(self, kernel: Kernel, anchor: Contract, target: Target) -> tuple[Expr, Kernel]:
        """What reads B in panels, and the kernel that packs them."""
        vars = out_vars(len(kernel.stores[0].extents))
        dtype, extents = accumulates_in(anchor), kernel.stores[0].extents
        return pack(kernel, anchor, dtype, vars[:-2], vars[-1], extents, target, as_bytes=self.of_bytes)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [_emit(kernel, self, target)]

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        assert isinstance(kernel.anchor, Contract)
        return (kernel.anchor.b,)

    def stored(self, b: Expr, dtype: DType) -> str:
        """What panels hold where it is not what sums are kept in."""
        return "" if b.dtype is dtype else b.dtype.name

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        """How the work is cut into chunks."""
        return product

    def block_routine(self, tile: gemm.Tile) -> Routine:
        """The function that computes a block of sums."""
        return gemm.block_routine(tile)
