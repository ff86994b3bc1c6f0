"""8-bit floats and elements of 2 and 4 bits, in which no device computes: kernels load, store and convert their bytes.

    8-bit floats     byte n holds element n
    2 and 4 bits     packed: a byte holds four elements or two, the first in its lowest bits
                     wide: byte n holds element n, as NumPy has it (its upper bits are 0)

A value of such a type is the byte with its bits meanwhile: what moves elements moves these, and only a conversion looks
at them. A store to packed elements makes whole bytes, all elements of each: no two threads write to one. What is made
in several pieces is stored wide first, and packed by a kernel that follows.

Floats, from the highest bit (f32 holds all of their values):

    f8e4m3      s eeee mmm   exponents less 7;  all ones: NaN, no infinities       (OCP, E4M3FN)
    f8e5m2      s eeeee mm   less 15; infinities and NaN as in f16                  (OCP)
    f8e4m3fnuz  s eeee mmm   less 8;  NaN is 0x80, no infinities and no -0
    f8e5m2fnuz  s eeeee mm   less 16; the same
    f8e8m0      eeeeeeee     2^(e - 127); 255: NaN; no sign and no 0                (OCP, scales of microscaling)
    f4e2m1      s ee m       less 1;  neither NaN nor infinities                    (OCP)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.ir.casting import cast, ends
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
    children,
    const,
    guarded,
    index,
    rebuild,
    size_expr,
    substitute_vars,
    walk,
)
from rlx.kernels.lowering import Lowered, out_vars
from rlx.kernels.program import Buffer, Store
from rlx.records import dataclass

__all__ = ["as_bytes", "byte_store", "has_bytes", "is_narrow", "on_bytes", "opaque_type", "unknown_dtype"]

U8, U16, U32, U64, I8, F16, F32, F64 = (DTYPES[n] for n in ("u8", "u16", "u32", "u64", "i8", "f16", "f32", "f64"))
NAN = 0x7FC00000  # an f32
BYTES = frozenset(n for n, d in DTYPES.items() if d.bits < 8 or (d.bits == 8 and d.is_float))


def is_narrow(dtype: DType) -> bool:
    """Whether elements take less than a byte."""
    return dtype.bits < 8


def as_bytes(dtype: DType) -> bool:
    """Whether kernels load and store elements as the bytes that hold them."""
    return dtype.name in BYTES


def has_bytes(graph: Graph) -> bool:
    """Whether a graph has such values, in its regions too."""
    return any(as_bytes(v.dtype) for v in graph.values()) or any(
        has_bytes(region) for node in graph.nodes for region in node.regions
    )


def unknown_dtype(code: Lowered, accepts: Callable[[DType], bool]) -> DType | None:
    """A type in a node's code that a device can't compute in, though it is given bytes for narrow elements; or None."""
    refused = [d for d in code.dtypes() if not accepts(d)]
    stored = [d for d in refused if as_bytes(d)]
    if len(stored) < len(refused) or not refused:
        return next((d for d in refused if not as_bytes(d)), None)
    if code.anchor is not None or not all(map(accepts, (U8, I8, F32))):
        return stored[0]
    every = (piece.expr for pieces in code.outputs for piece in pieces)
    return next((d for expr in every if (d := opaque_type(expr)) is not None), None)


def opaque_type(expr: Expr) -> DType | None:
    """The type that keeps an expression from being made of bytes, None where nothing does."""
    return next((d for x in walk(expr) if (d := _opaque(x)) is not None), None)


def _opaque(x: Expr) -> DType | None:
    match x:
        case Apply(fn=fn, args=args, dtype=dtype) if fn != "bitcast":
            return next((d for d in (dtype, *(a.dtype for a in args)) if as_bytes(d)), None)
        case Reduce(dtype=dtype) | Acc(dtype=dtype) if as_bytes(dtype):
            return dtype
    return None


# ---- values


def on_bytes(e: Expr, view: Callable[[Buffer], Buffer]) -> Expr:
    """The expression over the bytes of the buffers that it loads such elements from; `view` gives these bytes.

    Where the result is of such a type it is the byte with its bits.
    """
    memo: dict[Expr, Expr] = {}

    def visit(x: Expr) -> Expr:
        if x not in memo:
            kids = children(x)
            new = [visit(kid) for kid in kids]
            memo[x] = _placed(
                x, rebuild(x, new) if any(a is not b for a, b in zip(kids, new, strict=True)) else x, view
            )
        return memo[x]

    return visit(e)


def _placed(x: Expr, over: Expr, view: Callable[[Buffer], Buffer]) -> Expr:
    """What becomes of an expression; `over` is the same one over what has become of its parts."""
    match x, over:
        case Load(source=Buffer() as buffer, dtype=dtype), Load(indices=indices, where=where) if as_bytes(dtype):
            return _bits_of(buffer, view(buffer), indices, where)
        case Const(value=value, dtype=dtype), _ if as_bytes(dtype):
            return const(int(cast(np.asarray(value), dtype).view(np.uint8)) & (1 << dtype.bits) - 1, U8)
        case Cast(value=old, dtype=dtype), Cast(value=value):
            number = _decoded(value, old.dtype) if as_bytes(old.dtype) else value
            if as_bytes(dtype):
                return _encoded(number, dtype)
            return number if number.dtype is dtype else Cast(number, dtype)
        case Apply(fn="bitcast", args=(old,), dtype=dtype), Apply(args=(value,)):
            if as_bytes(old.dtype) or as_bytes(dtype):
                to = U8 if as_bytes(dtype) else dtype
                return value if value.dtype is to else Apply("bitcast", (value,), to)
    return over


def _bits_of(buffer: Buffer, stored: Buffer, indices: Sequence[Expr], where: Expr | None) -> Expr:
    """The bits of an element, in a byte."""
    bits, every = buffer.dtype.bits, (1 << buffer.dtype.bits) - 1
    if not buffer.is_packed:
        byte = Load(stored, tuple(indices), U8, where)
        return byte if bits == 8 else byte & every
    flat: Expr = size_expr(0)
    for i, stride in zip(indices, row_major(buffer.shape), strict=True):
        flat = flat + i * stride
    parts = 8 // bits
    byte = Load(stored, (flat // parts,), U8, where)
    if parts == 2:
        return Select(Apply("eq", (flat % 2, const(0, I64)), BOOL), byte & 15, Apply("shr", (byte, const(4, U8)), U8))
    return Apply("shr", (byte, Cast(flat % parts * bits, U8)), U8) & every


def _decoded(code: Expr, dtype: DType) -> Expr:
    """The value of an element's bits: an f32, or an integer of 8 bits."""
    if dtype.is_float:
        return _decoded_float(code, dtype)
    if dtype.kind == "u":
        return code
    sign = 1 << dtype.bits - 1
    return Cast(code ^ sign, I8) - sign


def _encoded(x: Expr, dtype: DType) -> Expr:
    """The bits of a number converted by the rule of `rlx.ir.casting`."""
    if dtype.is_float:
        return _encoded_float(x, dtype)
    if x.dtype.is_float:
        low, high = ends(dtype)
        wide = Cast(x, F32) if x.dtype.bits < 32 else x
        above = Apply("max", (wide, const(low, wide.dtype)), wide.dtype)
        x = Cast(Apply("min", (above, const(high, wide.dtype)), wide.dtype), I8 if dtype.kind == "i" else U8)
    return (x if x.dtype is U8 else Cast(x, U8)) & (1 << dtype.bits) - 1


# ---- stores


def byte_store(view: Buffer, buffer: Buffer, extents: Shape, at: tuple[Expr, ...], expr: Expr) -> Store:
    """The store of elements, given by their bits, to the bytes `view` of a buffer.

    To packed elements it goes by bytes, and all are written: `extents` are the shape of the buffer, `at` its indices.
    """
    if not buffer.is_packed:
        return Store(view, extents, at, expr)
    (byte,) = out_vars(1)
    count, parts = numel(buffer.shape), 8 // buffer.dtype.bits
    if count == 0:
        return Store(view, view.shape, (byte,), const(0, U8))
    made: Expr | None = None
    for part in range(parts):
        own = _at(expr, buffer.shape, byte * parts + part)
        if part and (not isinstance(count, int) or part >= count % parts > 0):
            inside = byte * parts + part < size_expr(count)
            own = Select(inside, guarded(own, inside), const(0, U8))
        made = own if made is None else made | own * (1 << part * buffer.dtype.bits)
    assert made is not None
    return Store(view, view.shape, (byte,), made)


def _at(expr: Expr, shape: Shape, number: Expr) -> Expr:
    """An expression over the out vars, at the element of that number."""
    values: dict[Var, Expr] = {}
    for axis, (v, stride) in enumerate(zip(out_vars(len(shape)), row_major(shape), strict=True)):
        place = number // index(stride)
        values[v] = place % size_expr(shape[axis]) if axis else place
    return substitute_vars(expr, values)


# ---- floats


@dataclass(frozen=True)
class Format:
    """`mantissa` bits, and what is taken off exponents; the bits of the largest value, of what is above, and of NaN.

    `signed_nan`: NaN has the sign of what it is made of, and 0 too.
    """

    mantissa: int
    bias: int
    largest: int
    beyond: int
    nan: int
    signed_nan: bool


FORMATS = {
    "f8e4m3": Format(3, 7, 0x7E, 0x7F, 0x7F, True),
    "f8e5m2": Format(2, 15, 0x7B, 0x7C, 0x7E, True),
    "f8e4m3fnuz": Format(3, 8, 0x7F, 0x80, 0x80, False),
    "f8e5m2fnuz": Format(2, 16, 0x7F, 0x80, 0x80, False),
}
STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def _decoded_float(code: Expr, dtype: DType) -> Expr:
    """The value, as f32, of the bits (u8) of an element."""
    if dtype.name == "f4e2m1":
        return _from_f4(code)
    if dtype.name == "f8e8m0":
        shifted = Apply("shl", (Cast(code, U32), const(23, U32)), U32)
        least = Select(_equal(code, 0), const(1 << 22, U32), shifted)  # a denormal f32
        return Apply("bitcast", (Select(_equal(code, 255), const(NAN, U32), least),), F32)
    if dtype.name == "f8e5m2":  # the upper half of an f16; NaN has one more bit, so that all are the same
        half = Apply("shl", (Cast(Select((code & 0x7F) > 0x7C, (code & 0x80) | 0x7E, code), U16), const(8, U16)), U16)
        return Cast(Apply("bitcast", (half,), F16), F32)
    made = FORMATS[dtype.name]
    wide = Cast(code, U32)
    size = Apply("shl", (wide & 0x7F, const(23 - made.mantissa, U32)), U32)
    value = Apply("bitcast", (size,), F32) * 2.0 ** (127 - made.bias)  # exponents are put right, denormals too
    nan = _equal(code & 0x7F if made.signed_nan else code, made.nan)
    bits = Select(nan, const(NAN, U32), Apply("bitcast", (value,), U32))
    return Apply("bitcast", (bits | Apply("shl", (wide & 0x80, const(24, U32)), U32),), F32)


def _from_f4(code: Expr) -> Expr:
    exponent, mantissa = Apply("shr", (code, const(1, U8)), U8) & 3, code & 1
    whole = Apply("shl", (mantissa + 2, exponent), U8)  # (2 + m) 2^e, four times what a normal number is
    size = Cast(Select(exponent > 0, whole, mantissa * 2), F32) * 0.25
    return Select(code > 7, -size, size)


def _encoded_float(x: Expr, dtype: DType) -> Expr:
    """The bits (u8) of the element that is nearest to a number of any type."""
    if dtype.name == "f8e8m0":
        return _power_of_two(x)
    wide = x if x.dtype.bits >= 32 and x.dtype.is_float else Cast(x, F32 if x.dtype.is_float else F64)
    raw = DTYPES[f"u{wide.dtype.bits}"]
    bits = Apply("bitcast", (wide,), raw)
    sign = Cast(Apply("shr", (bits, const(wide.dtype.bits - 1, raw)), raw), U8)
    size = Apply("abs", (wide,), wide.dtype)
    nan = Apply("isnan", (wide,), BOOL)
    if dtype.name == "f4e2m1":
        return Select(nan, (sign ^ 1) * 8, _to_f4(size) + sign * 8)  # of NaN what NumPy's cast gives
    made = FORMATS[dtype.name]
    code = Select(nan, const(made.nan, U8), _rounded(size, bits, made))
    if made.signed_nan:
        return code + sign * 128
    return Select((code > 0) & (code < 128), code + sign * 128, code)


def _to_f4(size: Expr) -> Expr:
    code: Expr = const(0, U8)
    for edge, rounds_up in STEPS:
        code = code + Cast(size >= edge if rounds_up else size > edge, U8)
    return code


def _rounded(size: Expr, bits: Expr, made: Format) -> Expr:
    """The bits, without a sign, of a number of that size, whose own bits are given."""
    raw = bits.dtype
    mantissa, bias = (23, 127) if raw is U32 else (52, 1023)
    cut = mantissa - made.mantissa
    bits = bits & (1 << raw.bits - 1) - 1
    even = Apply("shr", (bits, const(cut, raw)), raw) & 1
    nearest = Apply("shr", (bits + ((1 << cut - 1) - 1) + even, const(cut, raw)), raw)
    normal = nearest - (bias - made.bias << made.mantissa)
    held = Select(normal > made.largest, const(made.beyond, raw), normal)
    least = 2.0 ** (1 - made.bias)  # normal; below it elements are that far apart, over 2^mantissa
    steps = Apply("round", (size * (2.0**made.mantissa / least),), size.dtype)
    return Select(size < least, Cast(steps, U8), Cast(held, U8))


def _power_of_two(x: Expr) -> Expr:
    """The bits of the nearest f8e8m0: the upper one in the middle, NaN of what is not above 0 or too large."""
    if x.dtype.is_integer and x.dtype.bits == 64:  # f64 may be in the middle where x is not: a bit tells of lower ones
        lower = Apply("ne", (x & 2047, const(0, x.dtype)), BOOL)
        cut = Apply("shl", (Apply("shr", (x, const(11, x.dtype)), x.dtype), const(11, x.dtype)), x.dtype)
        x = Select(lower & (x > 1 << 53), cut | 1 << 11, x)
    wide = x if x.dtype is F64 else Cast(x, F64)
    half = Apply("bitcast", (wide,), U64) + (1 << 51)
    exponent = Apply("max", (Apply("shr", (half, const(52, U64)), U64), const(1023 - 127, U64)), U64) - (1023 - 127)
    return Select((wide > 0.0) & (exponent < 255), Cast(exponent, U8), const(255, U8))


def _equal(code: Expr, value: int) -> Expr:
    return Apply("eq", (code, const(value, code.dtype)), BOOL)
