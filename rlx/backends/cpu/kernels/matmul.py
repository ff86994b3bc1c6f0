"""Matrix products on the CPU: operands brought into the micro-kernels' layout, and the epilogue on each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels import block_formats, f28
from rlx.backends.cpu.gemm.panels import blocks as block_panels
from rlx.backends.cpu.gemm.panels import plain as packing
from rlx.backends.cpu.jit.compile import host
from rlx.backends.cpu.kernels.conv import conv
from rlx.backends.cpu.kernels.conv import int8 as int8_conv
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, size_of, vec
from rlx.backends.cpu.loops.analysis import is_costly
from rlx.backends.cpu.loops.nest import PLACEHOLDER, Emitter, Scope, linear_load, name_kernel
from rlx.backends.cpu.schedule.arguments import KernelCode, Pointer, Scratch, ScratchStride, Word, WordTable, once
from rlx.backends.cpu.schedule.base import PackCut, Part, part
from rlx.backends.cpu.schedule.matmul import ProductCut
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, ceildiv, evaluate, size_product, upper
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import (
    I64,
    Acc,
    Apply,
    Cast,
    Expr,
    Load,
    Select,
    SizeOf,
    Var,
    const,
    guarded,
    loads,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.kernels.tags import BLOCKS, GEMM, GEMM_OF_BYTES, GEMM_OF_SHORT, PACK
from rlx.records import replace

__all__ = ["accepts", "accepts_operand", "emit", "emit_pack", "layout"]

F32, F64, I32 = DTYPES["f32"], DTYPES["f64"], DTYPES["i32"]
I8, U8, I16 = DTYPES["i8"], DTYPES["u8"], DTYPES["i16"]
DEPTH = Var("k")
COLUMN = Var("n")


def accepts(anchor: Contract, dtype: DType) -> bool:
    """Products of floats that are accumulated in f32 or f64, of i16 in i32, and of bytes with weights."""
    if anchor.a.dtype.bits == 8 and dtype is I32:
        return int8_conv.accepts_product(anchor)
    operands = {x.dtype for x in (anchor.a, anchor.b)}
    if dtype is I32:
        return anchor.a.dtype is I16 and anchor.b.dtype in (I16, I8)
    return dtype.is_float and dtype.bits >= 16 and all(d.is_float and d.bits >= 16 for d in operands)


def accepts_operand(index: Affine) -> bool:
    """Any linear walk will do: what is not in place becomes a compact copy."""
    return index.is_linear


def accumulates_in(anchor: Contract) -> DType:
    """f64 products stay f64; f32, f16 and bf16 are summed in f32, i16 in i32."""
    if anchor.a.dtype is I16:
        return I32
    return F64 if F64 in (anchor.a.dtype, anchor.b.dtype) else F32


def layout(kernel: Kernel, *, short: bool, shared: bool) -> list[Kernel]:
    """The kernel preceded by those that pack B into panels and, where A can't be read in place, copy A.

    `short`: panels may be those of `short_panels`. `shared`: they are the same for any number of rows.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    if anchor.a.dtype.bits == 8:
        return conv.layout(int8_conv.as_convolution(kernel))
    kernel = _rows_together(kernel, anchor)
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    dtype = accumulates_in(anchor)
    blocks = block_panels.find(anchor.b, anchor.n, anchor.k, DEPTH, out_vars(len(kernel.stores[0].extents))[-1])
    if dtype is F32 and blocks is None:  # for any number of rows, known or not: results have the same bits
        kernel = _scaled_behind(kernel, anchor)
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
    as_bytes = dtype is F32 and blocks is None and _is_whole(anchor.b) and _reads_bytes(anchor.m, shared=shared)
    store = kernel.stores[0]
    vars = out_vars(len(store.extents))
    batch, row, column = vars[:-2], vars[-2], vars[-1]
    made: list[Kernel] = []
    if dtype is I32:
        return _paired(kernel, anchor)
    a = anchor.a
    in_place = isinstance(a, Load) and a.dtype is dtype and a.where is None
    if in_place:
        assert isinstance(a, Load)
        index = linear_index(a.indices, a.source.shape)
        in_place = (index.is_linear and index.coefs.get(DEPTH, 0) == 1) or (anchor.k == 1 and index.is_linear)
    if not in_place:
        used = [v for v in batch if v in set(walk(a))]
        a, copy = _compact(kernel, a, [*used, row, DEPTH], [*_extents(used, store.extents), anchor.m, anchor.k], dtype)
        made.append(copy)
    if blocks is not None and dtype is F32:
        panels, pack = _pack_blocks(kernel, anchor, blocks)
        return [*made, pack, replace_kernel(kernel, replace(anchor, a=a, b=panels), BLOCKS + blocks.code.name)]
    panels, pack = _pack(kernel, anchor, dtype, batch, column, store.extents, as_bytes=as_bytes)
    tag = GEMM_OF_BYTES if as_bytes else GEMM
    if short and dtype is F32 and _can_be_short(pack) and f28.suits(anchor.m, anchor.n, anchor.k):
        panels, pack = _shortened(panels, pack)
        tag = GEMM_OF_SHORT
    made.append(pack)
    made.append(replace_kernel(kernel, replace(anchor, a=a, b=panels), tag))
    return made


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


def _reads_bytes(m: Size, *, shared: bool) -> bool:
    """Whether weights of bytes stay bytes in products of m rows: tiles take them as they are, few rows await memory."""
    most = upper(m)
    few = f28.most_rows(host().vector_bytes, f28.LARGE)
    return gemm.has_tiles("f32") or (not shared and most is not None and most <= few)


def _scaled_behind(kernel: Kernel, anchor: Contract) -> Kernel:
    """The product with weights of bytes that have a scale by column, which then multiplies the sums instead.

    Sums without the scale overflow where one of 128 |x| K is near 2^128, as of an x of 1e33 over 1000 steps.
    """
    column = out_vars(len(kernel.stores[0].extents))[-1]
    match anchor.b:
        case Apply(fn="mul", args=(value, scale)) if _is_whole(value) and _is_of(scale, column):
            behind = tuple(
                replace(s, expr=transform(s.expr, lambda e: e * scale if isinstance(e, Acc) else None))
                for s in kernel.stores
            )
            return replace_kernel(replace(kernel, stores=behind), replace(anchor, b=value))
    return kernel


def _is_whole(e: Expr) -> bool:
    """Whether it is a byte as a float, or the difference of two of one type: a bf16, as 9 bits wouldn't be."""
    match e:
        case Cast(value=value) if e.dtype is F32:
            return value.dtype in (I8, U8)
        case Apply(fn="sub", args=(Cast(value=x), Cast(value=y)) as both):
            return x.dtype is y.dtype and all(map(_is_whole, both))
    return False


def _is_of(scale: Expr, column: Var) -> bool:
    """Whether it is a number of f32 that depends on params and constants and the column only."""
    fixed = all(x.source.kind in ("param", "const", "prepared") for x in loads(scale))
    return fixed and scale.dtype is F32 and {x for x in walk(scale) if isinstance(x, Var)} <= {column}


def _paired(kernel: Kernel, anchor: Contract) -> list[Kernel]:
    """A product of i16 with i16 or i8, whose operands are read as pairs of neighbours along k."""
    store = kernel.stores[0]
    *batch, row, column = out_vars(len(store.extents))
    pairs, made = ceildiv(anchor.k, 2), []
    a = anchor.a
    even = isinstance(anchor.k, int) and anchor.k % 2 == 0
    if not (even and _has_pairs(a, anchor.k)):
        used = [v for v in batch if v in set(walk(a))]
        inside = size_expr(anchor.k) > DEPTH
        padded = a if even else Select(inside, guarded(a, inside), const(0, I16))
        extents = [*_extents(used, store.extents), anchor.m, pairs * 2]
        a, copy = _compact(kernel, padded, [*used, row, DEPTH], extents, I16)
        made.append(copy)
    assert isinstance(a, Load)
    source = a.source
    view = _view(source, (*source.shape[:-1], pairs), I32)
    width = _tile(I32).width
    b = anchor.b
    used = [v for v in batch if v in set(walk(b))]
    shape = (*_extents(used, store.extents), ceildiv(anchor.n, width), pairs, width)
    buffer = Buffer(f"{store.buffer.name}.panels", "prepared" if is_static(b, shape) else "arena", (*shape, 2), b.dtype)
    *outer, panel, depth, lane, half = own = out_vars(len(shape) + 1)
    n, k = panel * width + lane, depth * 2 + half
    element = substitute_vars(b, {**dict(zip(used, outer, strict=True)), DEPTH: k, column: n})
    inside = (n < size_expr(anchor.n)) & (k < size_expr(anchor.k))
    element = Select(inside, guarded(element, inside), const(0, b.dtype))
    made.append(Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes))
    panels = _view(buffer, shape, I32 if b.dtype is I16 else I16)
    zero = const(0, I64)
    left, right = Load(view, (*a.indices[:-1], DEPTH), I32), Load(panels, (*used, zero, DEPTH, zero), panels.dtype)
    made.append(replace_kernel(kernel, replace(anchor, a=left, b=right, k=pairs)))
    return made


def _has_pairs(a: Expr, k: Size) -> bool:
    """Whether each row is one of the k elements of the last axis of a buffer."""
    if not isinstance(a, Load) or a.where is not None or a.indices[-1] != DEPTH or a.source.shape[-1] != k:
        return False
    return DEPTH not in {x for i in a.indices[:-1] for x in walk(i)}


def _view(source: Buffer, shape: Shape, dtype: DType) -> Buffer:
    """Pairs of elements as elements of twice the size."""
    return Buffer(f"{source.name}.pairs", source.kind, shape, dtype, None, None, source.base, source.offset)


def replace_kernel(kernel: Kernel, anchor: Contract, tag: str = GEMM) -> Kernel:
    """The kernel with another anchor."""
    return Kernel(kernel.name, kernel.stores, anchor, nodes=kernel.nodes, tag=tag)


def _extents(vars: list[Var], extents: Shape) -> list[Size]:
    return [extents[int(v.name[1:])] for v in vars]


def _compact(kernel: Kernel, a: Expr, vars: list[Var], extents: list[Size], dtype: DType) -> tuple[Expr, Kernel]:
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


def is_static(e: Expr, shape: Sequence[Size]) -> bool:
    """Whether a copy of this shape reads params, constants and prepared buffers only, and no size of a run."""
    fixed = all(isinstance(size, int) for size in shape) and not any(isinstance(x, SizeOf) for x in walk(e))
    return fixed and all(x.source.kind in ("param", "const", "prepared") for x in walk(e) if isinstance(x, Load))


def _pack(
    kernel: Kernel,
    anchor: Contract,
    dtype: DType,
    batch: tuple[Var, ...],
    column: Var,
    extents: Shape,
    *,
    as_bytes: bool,
) -> tuple[Expr, Kernel]:
    """B as panels [batch..., ceil(N / width), K, width], padded with zeros.

    With `as_bytes`, of a B that `_is_whole`: as bytes, or as i16 where it is a difference of two.
    """
    b, width = anchor.b, _tile(dtype).width
    if as_bytes:
        b = b.value if isinstance(b, Cast) else Cast(b, I16)
        dtype = b.dtype
    used = [v for v in batch if v in set(walk(b))]
    shape = (*_extents(used, extents), ceildiv(anchor.n, width), anchor.k, width)
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
        tag=PACK,
    )
    zero = const(0, I64)
    return Load(buffer, (*used, zero, DEPTH, zero), dtype), pack


def _pack_blocks(kernel: Kernel, anchor: Contract, blocks: block_panels.Blocks) -> tuple[Expr, Kernel]:
    """B as the blocks that it is stored in, those of 16 columns together."""
    n = evaluate(anchor.n, {})
    buffer = blocks.panels(f"{kernel.stores[0].buffer.name}.panels", n, evaluate(anchor.k, {}))
    panel, block, row, lane = own = out_vars(4)
    column = panel * buffer.shape[-1] + lane
    element: Expr = blocks.byte(column, block, row)
    if n % evaluate(buffer.shape[-1], {}):
        inside = column < size_expr(n)
        element = Select(inside, guarded(element, inside), const(0, element.dtype))
    pack = Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes, tag=PACK)
    return Load(buffer, (const(0, I64),) * 4, buffer.dtype), pack


def _can_be_short(pack: Kernel) -> bool:
    """Whether it packs one matrix of weights as it lies in memory."""
    buffer = pack.stores[0].buffer
    return pack.anchor is not None and buffer.kind == "prepared" and len(buffer.shape) == 3


def _shortened(panels: Expr, pack: Kernel) -> tuple[Expr, Kernel]:
    """The same panels, shortened."""
    assert isinstance(pack.anchor, Contract)
    plain = pack.stores[0].buffer
    shape = (f28.elements(evaluate(pack.anchor.k, {}), evaluate(pack.anchor.n, {})),)
    buffer = Buffer(plain.name, plain.kind, shape, F32)
    store = Store(buffer, shape, out_vars(1), const(0, F32))
    return Load(buffer, (DEPTH,), F32), replace(pack, stores=(store,))


def _is_matrix(b: Load, batch: list[Var], shape: Shape) -> bool:
    """Whether B lies in memory as matrices of any strides, one constant step apart."""
    if b.where is not None:
        return False
    index = linear_index(b.indices, b.source.shape)
    steps = [index.coefs.get(v, 0) for v in batch]
    return index.is_linear and all(
        step == steps[-1] * size_product(shape[d + 1 : len(batch)]) for d, step in enumerate(steps)
    )


def _tile(dtype: DType, *, stored: str = "") -> gemm.Tile:
    return gemm.tile_for(cast(gemm.DType, dtype.name), host().vector_bytes, stored=stored)


# ---- code


def emit_pack(kernel: Kernel) -> KernelCode:
    """The packing kernel for a B that lies in memory as matrices."""
    anchor, out = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.b, Load)
    index = linear_index(anchor.b.indices, anchor.b.source.shape)
    short, used = _is_short(out), out.shape[:-3]
    depth, width = anchor.k, _tile(out.dtype).width
    panels = ceildiv(anchor.n, width)
    batch_step = index.coefs.get(Var(f"i{len(used) - 1}"), 0) if used else 0
    n, count = anchor.n, size_product(used)

    cut = once(PackCut(count, panels, depth * width, f28.TOGETHER if short else None))
    words: list[Word] = [
        Pointer(anchor.b.source, index.constant * out.dtype.itemsize),
        index.coefs.get(DEPTH, 0),
        index.coefs.get(COLUMN, 0),
        batch_step,
        Pointer(out),
        panels * depth * width,
        depth,
        n,
        count,
        part(cut, "step"),
    ]
    symbol, ir = name_kernel(packing.pack_b(_tile(out.dtype), PLACEHOLDER, short=short).text())
    return KernelCode(symbol, ir, tuple(words), Part(cut, "chunks"))


def _is_short(panels: Buffer) -> bool:
    """Whether panels are shortened ones."""
    return len(panels.shape) == 1


def emit(kernel: Kernel) -> KernelCode:
    """The product with its epilogue."""
    anchor = kernel.anchor
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.a, Load)
    assert isinstance(anchor.b, Load)
    store = kernel.stores[0]
    dtype = anchor.a.dtype
    blocks = kernel.tag.startswith(BLOCKS)
    stored = "" if anchor.b.dtype is dtype else anchor.b.dtype.name
    tile = _tile(dtype, stored=kernel.tag.removeprefix(BLOCKS) if blocks else stored)
    vars = out_vars(len(store.extents))
    batch, row, column = vars[:-2], vars[-2], vars[-1]
    a, b = (linear_index(x.indices, x.source.shape) for x in (anchor.a, anchor.b))
    c = linear_index(store.index, store.buffer.shape)
    expr = transform(store.expr, linear_load)
    plain = isinstance(expr, Acc)
    to_scratch = store.buffer.dtype is not dtype or c.coefs.get(column, 1 if anchor.n == 1 else 0) != 1
    m, n, k = anchor.m, anchor.n, anchor.k
    count = size_product(store.extents[:-2])

    short = kernel.tag == GEMM_OF_SHORT
    tiles = gemm.has_tiles(dtype.name) and not short
    whole = kernel.tag == GEMM_OF_BYTES
    product = ProductCut(m, n, k, count, size_of(tile.scalar), store.extents, to_scratch, tiles, short, whole)
    if blocks:
        code = block_formats.CODES[tile.stored]
        product = replace(product, few=block_panels.few_rows(host().vector_bytes), tiles_from=code.tiles_from)
    cut = once(product)
    words: list[Word] = [
        Pointer(anchor.a.source, a.constant * dtype.itemsize),
        a.coefs.get(row, 0),
        0,
        Pointer(anchor.b.source),
        0,
        Pointer(store.buffer, c.constant * store.buffer.dtype.itemsize),
        c.coefs.get(row, 0),
        0,
        m,
        n,
        k,
        count,
        part(cut, "row_chunk"),
        part(cut, "panel_chunk"),
        Scratch(),
        ScratchStride(),
        part(cut, "copy_bytes"),
        part(cut, "steps"),
        (f28 if short else block_panels if blocks else gemm).block_routine(tile),
    ]
    table = WordTable(words)
    sites: list[str] = []

    def offsets(f: Function, number: str) -> tuple[str, str, str]:
        at = _batch_indices(f, table, number, store.extents[:-2])
        return tuple(_dot(f, table, at, [x.coefs.get(v, 0) for v in batch]) for x in (a, b, c))  # type: ignore[return-value]

    def epilogue(f: Function, block: gemm.Block) -> None:
        emitter = Emitter(f, table, host().vector_bytes // 4)
        destination = Load(store.buffer, (as_index(c),), store.buffer.dtype)
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
        placed=short,
    )
    symbol, ir = name_kernel(module.text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(sites), part(cut, "scratch"))


def as_index(a: Affine) -> Expr:
    """A linear form as an index expression."""
    total: Expr = size_expr(a.constant)
    for term, coef in a.coefs.items():
        total = total + term * size_expr(coef)
    return total


def _batch_indices(f: Function, table: WordTable, number: str, extents: Shape) -> list[str]:
    """The index along each batch axis of matrix `number`."""
    out: list[str] = []
    for size in reversed(extents[1:]):
        extent = table.load(f, size)
        out.insert(0, f.binary("urem", number, extent, "i64"))
        number = f.binary("udiv", number, extent, "i64")
    return [number, *out] if extents else []


def _dot(f: Function, table: WordTable, at: list[str], strides: list[Size]) -> str:
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
