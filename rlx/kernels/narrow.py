"""Elements of 4 bits as arithmetic on the bytes that hold them: what kernels load and store are bytes.

    packed:  byte n holds elements 2n (low half) and 2n + 1 (high half)
    wide:    byte n holds element n, as NumPy has it (its high half is 0)

A value of i4 or u4 is one of 8 bits meanwhile, one of f4e2m1 an f32, which hold it exactly; no op computes in them. A
store to packed elements makes whole bytes, both elements of each: no two threads write to one. What is made in several
pieces is stored wide first, and packed by a kernel that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape, numel
from rlx.kernels.affine import row_major
from rlx.kernels.expr import (
    BOOL,
    I64,
    Acc,
    Apply,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Var,
    const,
    guarded,
    index,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Lowered, out_vars
from rlx.kernels.program import Buffer, Store

__all__ = ["has_narrow", "is_narrow", "narrow_store", "on_bytes", "unknown_dtype"]

U8, I8, F32, F64 = (DTYPES[name] for name in ("u8", "i8", "f32", "f64"))
CARRIERS = {"i4": I8, "u4": U8, "f4e2m1": F32}
STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def is_narrow(dtype: DType) -> bool:
    """Whether elements take less than a byte."""
    return dtype.bits < 8


def has_narrow(graph: Graph) -> bool:
    """Whether a graph has such values, in its regions too."""
    return any(is_narrow(v.dtype) for v in graph.values()) or any(
        has_narrow(region) for node in graph.nodes for region in node.regions
    )


def unknown_dtype(code: Lowered, accepts: Callable[[DType], bool]) -> DType | None:
    """A type in a node's code that a device can't compute in, though it is given bytes for 4-bit elements; or None."""
    refused = [d for d in code.dtypes() if not accepts(d)]
    narrow = [d for d in refused if is_narrow(d)]
    if len(narrow) < len(refused) or not refused:
        return next((d for d in refused if not is_narrow(d)), None)
    if code.anchor is not None or not all(accepts(CARRIERS[d.name]) for d in narrow):
        return narrow[0]
    every = (x for pieces in code.outputs for piece in pieces for x in walk(piece.expr))
    return next((d for x in every if (d := _opaque(x)) is not None), None)


def _opaque(x: Expr) -> DType | None:
    """The narrow type that keeps an expression from being made of bytes."""
    match x:
        case Apply(args=args, dtype=dtype):
            return next((d for d in (dtype, *(a.dtype for a in args)) if is_narrow(d)), None)
        case Reduce(dtype=dtype) | Acc(dtype=dtype) if is_narrow(dtype):
            return dtype
    return None


# ---- values


def on_bytes(e: Expr, view: Callable[[Buffer], Buffer]) -> Expr:
    """The expression over the bytes of the buffers that it loads narrow elements from; `view` gives these bytes.

    Where the result is narrow it is the carrier's.
    """

    def place(x: Expr) -> Expr | None:
        match x:
            case Load(source=Buffer() as buffer, indices=indices, dtype=dtype, where=where) if is_narrow(dtype):
                return _decoded(_half(buffer, view(buffer), indices, where), dtype)
            case Const(value=value, dtype=dtype) if is_narrow(dtype):
                return const(value, CARRIERS[dtype.name])
            case Cast(value=value, dtype=dtype) if is_narrow(dtype):
                return _converted(value, dtype)
        return None

    return transform(e, place)


def _half(buffer: Buffer, stored: Buffer, indices: Sequence[Expr], where: Expr | None) -> Expr:
    """The four bits of an element, in a byte."""
    if buffer.wide:
        return Load(stored, tuple(indices), U8, where) & 15
    flat: Expr = size_expr(0)
    for i, stride in zip(indices, row_major(buffer.shape), strict=True):
        flat = flat + i * stride
    byte = Load(stored, (flat // 2,), U8, where)
    return Select(Apply("eq", (flat % 2, const(0, I64)), BOOL), byte & 15, Apply("shr", (byte, const(4, U8)), U8))


def _decoded(half: Expr, dtype: DType) -> Expr:
    """The value of four bits, in the carrier of its type."""
    if dtype.kind == "u":
        return half
    if dtype.kind == "i":
        return Cast(half ^ 8, I8) - 8
    exponent, mantissa = Apply("shr", (half, const(1, U8)), U8) & 3, half & 1
    whole = Apply("shl", (mantissa + 2, exponent), U8)  # (2 + m) 2^e, four times what a normal number is
    size = Cast(Select(exponent > 0, whole, mantissa * 2), F32) * 0.25
    return Select(half > 7, -size, size)


def _converted(x: Expr, dtype: DType) -> Expr:
    """A conversion by the rule of `rlx.ir.casting`, in the carrier."""
    if not dtype.is_integer:
        return _decoded(_encoded_float(x), dtype)
    if x.dtype.is_float:
        low, high = (-8, 7) if dtype.kind == "i" else (0, 15)
        wide = Cast(x, F32) if x.dtype.bits < 32 else x
        above = Apply("max", (wide, const(low, wide.dtype)), wide.dtype)
        bounded = Apply("min", (above, const(high, wide.dtype)), wide.dtype)
        return Cast(bounded, CARRIERS[dtype.name])
    return _decoded(Cast(x, U8) & 15, dtype)


def _encoded_float(x: Expr) -> Expr:
    """The four bits of the nearest f4e2m1, ties to even, the largest beyond; of NaN those that NumPy's cast gives."""
    wide = x if x.dtype.bits >= 32 and x.dtype.is_float else Cast(x, F32 if x.dtype.is_float else F64)
    raw = DTYPES[f"u{wide.dtype.bits}"]
    sign = Cast(Apply("shr", (Apply("bitcast", (wide,), raw), const(wide.dtype.bits - 1, raw)), raw), U8)
    size = Apply("abs", (wide,), wide.dtype)
    code: Expr = const(0, U8)
    for edge, rounds_up in STEPS:
        code = code + Cast(size >= edge if rounds_up else size > edge, U8)
    nan = Apply("isnan", (wide,), BOOL)
    return Select(nan, (sign ^ 1) * 8, code + sign * 8)


def _bits(x: Expr, dtype: DType) -> Expr:
    """The four bits, in a byte, of a value in the carrier of its type."""
    return _encoded_float(x) if dtype.is_float else Cast(x, U8) & 15


# ---- stores


def narrow_store(view: Buffer, buffer: Buffer, extents: Shape, at: tuple[Expr, ...], expr: Expr) -> Store:
    """The store of elements, given in the carrier, to the bytes `view` of a buffer.

    To packed elements it goes by bytes, and all are written: `extents` are the shape of the buffer, `at` its indices.
    """
    half = _bits(expr, buffer.dtype)
    if buffer.wide:
        return Store(view, extents, at, half)
    (byte,) = out_vars(1)
    count = numel(buffer.shape)
    if count == 0:
        return Store(view, view.shape, (byte,), const(0, U8))
    low, high = (_at(half, buffer.shape, byte * 2 + side) for side in (0, 1))
    if not isinstance(count, int) or count % 2:
        inside = byte * 2 + 1 < size_expr(count)
        high = Select(inside, guarded(high, inside), const(0, U8))
    return Store(view, view.shape, (byte,), low | high * 16)


def _at(expr: Expr, shape: Shape, number: Expr) -> Expr:
    """An expression over the out vars, at the element of that number."""
    values: dict[Var, Expr] = {}
    for axis, (v, stride) in enumerate(zip(out_vars(len(shape)), row_major(shape), strict=True)):
        place = number // index(stride)
        values[v] = place % size_expr(shape[axis]) if axis else place
    return substitute_vars(expr, values)
