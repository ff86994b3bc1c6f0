"""How the operands of a matrix product are brought into the layouts that its code reads: rows of A, panels of B."""

from __future__ import annotations

from rlx.backends.cpu.schedule.matmul import PANEL_BYTES
from rlx.ir.casting import ends
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, ceildiv, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import (
    I64,
    Acc,
    Apply,
    Cast,
    Const,
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
from rlx.kernels.strategy import Strategy
from rlx.records import replace

__all__ = [
    "COLUMN", "DEPTH", "accumulates_in", "compact", "extents_of", "is_whole", "panels_of", "rows_in_place",
    "scaled_behind",
]  # fmt: skip

F32, F64, I32 = DTYPES["f32"], DTYPES["f64"], DTYPES["i32"]
I8, U8, I16 = DTYPES["i8"], DTYPES["u8"], DTYPES["i16"]
DEPTH = Var("k")
COLUMN = Var("n")


def accumulates_in(anchor: Contract) -> DType:
    """f64 products stay f64; f32, f16 and bf16 are summed in f32, i16 in i32."""
    if anchor.a.dtype is I16:
        return I32
    return F64 if F64 in (anchor.a.dtype, anchor.b.dtype) else F32


def rows_in_place(kernel: Kernel, anchor: Contract, dtype: DType) -> tuple[Expr, list[Kernel]]:
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


def scaled_behind(kernel: Kernel, anchor: Contract) -> Kernel:
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
        case Apply(fn="sub", args=(Cast(value=x) as byte, Const(value=number))):
            low, high = ends(x.dtype) if is_whole(byte) else (0, -1)
            return isinstance(number, float) and number.is_integer() and low <= number <= high
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


def panels_of(
    kernel: Kernel, anchor: Contract, b: Expr, sums: DType, dtype: DType, step: Strategy | None = None
) -> tuple[Expr, Kernel]:
    """B as panels [batch..., ceil(N / width), K, width] of elements of `dtype`, padded with zeros.

    What reads them, and the kernel that packs them: `step` where B lies in memory as matrices, else a loop nest.
    """
    store = kernel.stores[0]
    *batch, _, column = out_vars(len(store.extents))
    zero, width = const(0, I64), PANEL_BYTES // sums.itemsize
    used = [v for v in batch if v in set(walk(b))]
    shape = (*extents_of(used, store.extents), ceildiv(anchor.n, width), anchor.k, width)
    buffer = Buffer(f"{store.buffer.name}.panels", "prepared" if is_static(b, shape) else "arena", shape, dtype)
    own = out_vars(len(shape))
    *outer, panel, depth, lane = own
    n = panel * width + lane
    element = substitute_vars(b, {**dict(zip(used, outer, strict=True)), DEPTH: depth, column: n})
    if not (isinstance(anchor.n, int) and anchor.n % width == 0):
        inside = n < size_expr(anchor.n)
        element = Select(inside, guarded(element, inside), const(0, b.dtype))
    packed = Store(buffer, shape, own, scalar_cast(element, dtype))
    walked = substitute_vars(b, {**dict(zip(used, outer, strict=True)), column: COLUMN})
    read = Load(buffer, (*used, zero, DEPTH, zero), dtype)
    if step and isinstance(walked, Load) and walked.dtype is dtype and _is_matrix(walked, list(outer), shape):
        matrices = replace(anchor, m=1, a=const(0, dtype), b=walked)  # for any number of rows, so products share it
        return read, Kernel("pack b", (packed,), matrices, nodes=kernel.nodes, strategy=step)
    return read, Kernel("pack b", (packed,), nodes=kernel.nodes)


def _is_matrix(b: Load, batch: list[Var], shape: Shape) -> bool:
    """Whether B lies in memory as matrices of any strides, one constant step apart."""
    if b.where is not None:
        return False
    index = linear_index(b.indices, b.source.shape)
    steps = [index.coefs.get(v, 0) for v in batch]
    return index.is_linear and all(
        step == steps[-1] * size_product(shape[d + 1 : len(batch)]) for d, step in enumerate(steps)
    )
