"""Scalar functions and conversions of `rlx.kernels.expr` printed as LLVM IR, scalar or vector."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, constant, suffix, vec
from rlx.backends.cpu.llvm.constants import has_nan
from rlx.errors import CompileError
from rlx.ir.casting import ends
from rlx.ir.dtype import DTYPES, DType

__all__ = [
    "apply",
    "convert",
    "convert_within",
    "extreme",
    "from_memory",
    "literal",
    "llvm_type",
    "memory_type",
    "to_memory",
    "zero",
]

LLVM = {
    "f64": "double",
    "f32": "float",
    "f16": "half",
    "bf16": "i16",  # as bits: LLVM calls the C library to move a bfloat on most processors
    "i8": "i8",
    "u8": "i8",
    "i16": "i16",
    "u16": "i16",
    "i32": "i32",
    "u32": "i32",
    "i64": "i64",
    "u64": "i64",
    "bool": "i1",
}
PLAIN = {"add": "add", "sub": "sub", "mul": "mul", "and": "and_", "or": "or_", "xor": "xor"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
ROUNDING = {"floor": "floor", "ceil": "ceil", "round": "roundeven", "trunc": "trunc", "sqrt": "sqrt", "abs": "fabs"}


def llvm_type(dtype: DType) -> str:
    """The LLVM type that a value is computed in."""
    return LLVM[dtype.name]


def memory_type(dtype: DType) -> str:
    """The LLVM type that an element has in memory (a bool is a byte)."""
    return "i8" if dtype.kind == "b" else LLVM[dtype.name]


def literal(value: int | float, dtype: DType, w: int = 1) -> str:
    """The constant text of a value in all lanes."""
    ty = vec(llvm_type(dtype), w)
    if dtype.name == "bf16":
        return constant(int(np.asarray(value, dtype.numpy).view(np.uint16)), ty)
    if dtype.name in ("f16", "f32"):
        with np.errstate(over="ignore"):
            value = float(np.asarray(value, dtype.numpy))  # infinity beyond its range
    return constant(value, ty)


def from_memory(f: Function, value: str, dtype: DType, w: int) -> str:
    """A loaded element as a value."""
    return f.cmp("ne", value, 0, vec("i8", w)) if dtype.kind == "b" else value


def to_memory(f: Function, value: str, dtype: DType, w: int) -> str:
    """A value as it is stored."""
    return f.cast("zext", value, "i8", vec("i1", w)) if dtype.kind == "b" else value


def extreme(kind: str, dtype: DType) -> int | float:
    """The neutral element of "max" or "min"."""
    if dtype.is_float:
        return float("-inf") if kind == "max" else float("inf")
    if dtype.kind == "b":
        return int(kind == "min")
    low, high = ends(dtype)
    return low if kind == "max" else high


def zero(ty: str) -> int | float:
    """0 as a constant of the LLVM scalar type wants it."""
    return 0.0 if ty in ("float", "double", "half") else 0


def apply(f: Function, fn: str, args: list[str], dtype: DType, w: int) -> str:
    """The function `fn` on operands of `dtype` (texts of `w` lanes)."""
    ty = vec(llvm_type(dtype), w)
    a = args[0]
    if fn in PLAIN:
        return str(getattr(f, PLAIN[fn])(a, args[1], ty))
    if fn in COMPARISONS:
        return _compare(f, fn, a, args[1], dtype, ty)
    if fn in ("min", "max"):
        return _extremum(f, fn, a, args[1], dtype, ty)
    if fn == "not":
        return f.xor(a, 1 if dtype.kind == "b" else -1, ty)
    if fn == "bitcast":
        raise CompileError("bitcast is a conversion, not a function")
    if dtype.is_float:
        return _float(f, fn, args, dtype, ty, w)
    return _integer(f, fn, args, dtype, ty, w)


def _compare(f: Function, fn: str, a: str, b: str, dtype: DType, ty: str) -> str:
    unsigned = dtype.kind in "ub" and fn not in ("eq", "ne")
    return f.cmp("u" + fn if unsigned else fn, a, b, ty)


def _extremum(f: Function, fn: str, a: str, b: str, dtype: DType, ty: str) -> str:
    """NaN wins in floats: the comparison is false for NaN and then gives b, so only a NaN in a needs a test."""
    if not dtype.is_float:
        return f.select(_compare(f, "gt" if fn == "max" else "lt", a, b, dtype, ty), a, b, ty)
    if not a.startswith("%"):
        a, b = b, a
    if not b.startswith("%") and not has_nan(b):  # a must be the one that is given when they are unordered
        return f.select(f.cmp("lt" if fn == "max" else "gt", a, b, ty), b, a, ty)
    best = f.select(f.cmp("gt" if fn == "max" else "lt", a, b, ty), a, b, ty)
    return f.select(f.cmp("uno", a, a, ty), a, best, ty)


def _float(f: Function, fn: str, args: list[str], dtype: DType, ty: str, w: int) -> str:
    a = args[0]
    if fn == "div":
        return f.div(a, args[1], ty)
    if fn == "neg":
        return f.op(f"fneg {ty} {a}", ty)
    if fn in ROUNDING:
        return f.intrinsic(ROUNDING[fn], a, ty=ty)
    if fn == "isnan":
        return f.cmp("uno", a, a, ty)
    if fn == "isinf":
        return f.cmp("eq", f.intrinsic("fabs", a, ty=ty), float("inf"), ty)
    if fn == "round_bf16":
        return _round_bf16(f, a, w)
    if fn == "sign":
        zero = constant(0.0, ty)
        one = f.intrinsic("copysign", constant(1.0, ty), a, ty=ty)
        return f.select(f.cmp("one", a, zero, ty), one, a, ty)  # zero and NaN give themselves
    emitter: Any = vmath.BINARY.get(fn) or vmath.FUNCTIONS.get(fn)
    if emitter is None or dtype.name not in ("f32", "f64"):
        raise CompileError(f"the scalar function {fn!r} has no code for {dtype}")
    named = [x if x.startswith("%") else f.op(f"bitcast {ty} {x} to {ty}", ty) for x in args]  # constants get a type
    return str(emitter(f, *named, w, dtype.name))


def _integer(f: Function, fn: str, args: list[str], dtype: DType, ty: str, w: int) -> str:
    a = args[0]
    signed = dtype.kind == "i"
    if fn == "neg":
        return f.sub(0, a, ty)
    if fn == "abs":
        return f.intrinsic("abs", a, ty=ty, tail="i1 false") if signed else a
    if fn == "sign":
        positive = f.cast("zext", f.cmp("gt" if signed else "ugt", a, 0, ty), ty)
        return f.sub(positive, f.cast("zext", f.cmp("lt", a, 0, ty), ty), ty) if signed else positive
    if fn == "shl":
        return f.shl(a, args[1], ty)
    if fn == "shr":
        return f.ashr(a, args[1], ty) if signed else f.lshr(a, args[1], ty)
    if fn == "floordiv" and dtype.name == "i64" and w > 1:
        return _divide_indices(f, a, args[1], w)
    if fn in ("idiv", "irem", "floordiv", "mod"):
        return _divide(f, fn, a, args[1], dtype, w)
    if fn in ("floor", "ceil", "round", "trunc"):
        return a
    if fn == "isnan":
        return constant(0, vec("i1", w))
    raise CompileError(f"the scalar function {fn!r} has no code for {dtype}")


def _divide(f: Function, fn: str, a: str, b: str, dtype: DType, w: int) -> str:
    """Integer quotients and remainders by a divisor that is not 0; lowest / -1 wraps instead of trapping."""
    ty = vec(llvm_type(dtype), w)
    if dtype.kind != "i":
        if w == 1 or dtype.bits > 32:
            return f.binary("udiv" if fn in ("idiv", "floordiv") else "urem", a, b, ty)
        quotient = _quotient(f, a, b, dtype, w)
        return quotient if fn in ("idiv", "floordiv") else f.sub(a, f.mul(quotient, b, ty), ty)
    minus_one = f.cmp("eq", b, -1, ty)
    safe = f.select(minus_one, 1, b, ty)
    exact = f.binary("sdiv", a, safe, ty) if w == 1 or dtype.bits > 32 else _quotient(f, a, safe, dtype, w)
    quotient = f.select(minus_one, f.sub(0, a, ty), exact, ty)
    if fn == "idiv":
        return quotient
    rest = f.sub(a, f.mul(quotient, b, ty), ty)
    if fn == "irem":
        return rest
    differs = f.and_(f.cmp("ne", rest, 0, ty), f.cmp("lt", f.xor(rest, b, ty), 0, ty))
    if fn == "floordiv":
        return f.sub(quotient, f.cast("zext", differs, ty), ty)
    return f.add(rest, f.select(differs, b, 0, ty), ty)


def _quotient(f: Function, a: str, b: str, dtype: DType, w: int) -> str:
    """a / b of up to 32 bits, cut to a whole number, in vectors, which have no integer division: by floats.

    A quotient that is none lies at least 1 / |b| from the next whole number, and its rounding error is less: at most
    |a / b| 2^-53, or 2^-24 where |a| < 2^16.
    """
    ty, real = vec(llvm_type(dtype), w), vec("double" if dtype.bits > 16 else "float", w)
    into, back = ("sitofp", "fptosi") if dtype.kind == "i" else ("uitofp", "fptoui")
    near = f.div(f.cast(into, a, real, ty), f.cast(into, b, real, ty), real)
    return f.cast(back, near, ty, real)


def _divide_indices(f: Function, a: str, b: str, w: int) -> str:
    """floor(a / b) of indices, b > 0, in vectors, which have no integer division: exact below a quotient of 2^49.

    The quotient in f64 is then less than 0.2 off, so the nearest whole number is the result or one more. Whole numbers
    up to 2^51 are the low bits of their sum with 1.5 * 2^52.
    """
    ty, real = vec("i64", w), vec("double", w)
    near = f.div(f.cast("sitofp", a, real, ty), f.cast("sitofp", b, real, ty), real)
    shifted = f.cast("bitcast", f.add(near, 1.5 * 2.0**52, real), ty, real)
    quotient = f.sub(shifted, 0x4338000000000000, ty)
    over = f.cmp("gt", f.mul(quotient, b, ty), a, ty)
    return f.sub(quotient, f.cast("zext", over, ty, vec("i1", w)), ty)


def convert(f: Function, x: str, source: DType, target: DType, w: int) -> str:
    """A numeric conversion by the rule of `rlx.ir.casting`."""
    if source is target:
        return x
    if source.name == "bf16" and not target.is_float:
        return convert(f, _from_bf16(f, x, w), DTYPES["f32"], target, w)
    if target.name == "bf16" and not source.is_float:
        if source.bits == 64:
            x = _sticky(f, x, source, w)
        whole = DTYPES["f64" if source.bits >= 32 else "f32"]  # it holds the integer
        return _float_to_float(f, convert(f, x, source, whole, w), whole, target, w)
    src, dst = vec(llvm_type(source), w), vec(llvm_type(target), w)
    if target.kind == "b":
        zero = constant(0.0 if source.is_float else 0, src)
        return f.cmp("ne", x, zero, src)
    if source.kind == "b":
        return f.cast("uitofp" if target.is_float else "zext", x, dst, src)
    if source.is_float and target.is_float:
        return _float_to_float(f, x, source, target, w)
    if source.is_float:
        wide = DTYPES["f32"]
        if source.bits < 32:
            x, src = _float_to_float(f, x, source, wide, w), vec("float", w)
        return _float_to_int(f, x, src, target, w)
    if target.is_float:
        direct = target.bits >= 32
        via = dst if direct else vec("float", w)
        made = f.cast("sitofp" if source.kind == "i" else "uitofp", x, via, src)
        return made if direct else _float_to_float(f, made, DTYPES["f32"], target, w)
    if source.bits == target.bits:
        return x
    return f.cast("trunc" if source.bits > target.bits else "sext" if source.kind == "i" else "zext", x, dst, src)


def _sticky(f: Function, x: str, source: DType, w: int) -> str:
    """A 64-bit integer as one of 53 bits that rounds alike to few bits: beyond 2^53, bit 11 tells of lower ones."""
    ty = vec("i64", w)
    if source.kind == "i":
        large = f.cmp("ugt", f.add(f.ashr(x, 53, ty), 1, ty), 1, ty)
    else:
        large = f.cmp("ne", f.lshr(x, 53, ty), 0, ty)
    inexact = f.and_(large, f.cmp("ne", f.and_(x, 2047, ty), 0, ty))
    return f.select(inexact, f.or_(f.and_(x, -2048, ty), 2048, ty), x, ty)


def convert_within(f: Function, x: str, target: DType, w: int) -> str:
    """An f32 that is between the ends of an integer type of at most 16 bits, as that; NaN gives 0.

    The instruction gives 0 or the lowest i32 for NaN, whose low bits are 0.
    """
    whole = f.cast("fptosi", x, vec("i32", w), vec("float", w))
    return f.cast("trunc", whole, vec(llvm_type(target), w), vec("i32", w))


def _float_to_int(f: Function, x: str, src: str, target: DType, w: int) -> str:
    """Truncation that saturates; NaN gives 0."""
    dst = vec(llvm_type(target), w)
    low, high = ends(target)
    if target.bits <= 16:  # NaN goes through the limits
        inside = f.max(float(low), f.min(float(high), x, src), src)
        whole = f.cast("fptosi", inside, vec("i32", w), src)
        return f.cast("trunc", whole, dst, vec("i32", w))
    signed = target.kind == "i"
    if target.bits == 32 and w > 1:  # of the intrinsic, LLVM makes code lane by lane
        largest = float(high) if src.endswith("double>") else float(high + 1) - (128.0 if signed else 256.0)
        known = f.select(f.cmp("ord", x, x, src), x, 0.0, src)
        inside = f.max(float(low), f.min(largest, known, src), src)
        whole = f.cast("fptosi" if signed else "fptoui", inside, dst, src)
        return f.select(f.cmp("ge", x, float(high + 1), src), high, whole, dst)
    name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{suffix(dst)}.{suffix(src)}"
    f.declare(name, dst, [src])
    return f.op(f"call {dst} @{name}({src} {x})", dst)


def _float_to_float(f: Function, x: str, source: DType, target: DType, w: int) -> str:
    src, dst = vec(llvm_type(source), w), vec(llvm_type(target), w)
    if source.name == "bf16":
        x, src = _from_bf16(f, x, w), vec("float", w)
        if src == dst:
            return x
    if target.bits > 16:
        return f.cast("fpext" if target.bits > source.bits else "fptrunc", x, dst, src)
    if source.name == "f64":
        x, src = _to_odd(f, x, w), vec("float", w)
    elif source.name == "f16":  # to bf16
        x, src = f.cast("fpext", x, vec("float", w), src), vec("float", w)
    return _to_bf16(f, x, w) if target.name == "bf16" else f.cast("fptrunc", x, dst, src)


def _from_bf16(f: Function, x: str, w: int) -> str:
    """The f32 of a bf16 given as bits: they are its upper half."""
    wide = vec("i32", w)
    return f.cast("bitcast", f.shl(f.cast("zext", x, wide, vec("i16", w)), 16, wide), vec("float", w), wide)


def _to_bf16(f: Function, x: str, w: int) -> str:
    """f32 rounded to the nearest bf16, ties to even, as bits; a NaN stays one."""
    ty, ity = vec("float", w), vec("i32", w)
    bits = f.cast("bitcast", x, ity, ty)
    even = f.and_(f.lshr(bits, 16, ity), 1, ity)
    rounded = f.lshr(f.add(f.add(bits, 0x7FFF, ity), even, ity), 16, ity)
    quiet = f.or_(f.lshr(bits, 16, ity), 0x40, ity)
    picked = f.select(f.cmp("uno", x, x, ty), quiet, rounded, ity)
    return f.cast("trunc", picked, vec("i16", w), ity)


def _round_bf16(f: Function, x: str, w: int) -> str:
    """As `_to_bf16` does, with denormals taken for zeros, by an instruction of AVX512-BF16 where vectors are whole."""
    ty, lanes = vec("float", w), min(w, 16)
    if lanes < 8 or w % lanes:
        small = f.cmp("lt", f.intrinsic("fabs", x, ty=ty), constant(2.0**-126, ty), ty)
        zero = f.intrinsic("copysign", constant(0.0, ty), x, ty=ty)
        return _to_bf16(f, f.select(small, zero, x, ty), w)
    name, part, made = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}", vec("float", lanes), vec("bfloat", lanes)
    f.declare(name, made, [part])
    parts = [x] if w == lanes else [f.shuffle(x, None, list(range(i, i + lanes))) for i in range(0, w, lanes)]
    bits = [f.cast("bitcast", f.op(f"call {made} @{name}({part} {p})", made), vec("i16", lanes), made) for p in parts]
    while len(bits) > 1:
        size = 2 * w // len(bits)
        bits = [f.shuffle(a, b, list(range(size))) for a, b in zip(bits[::2], bits[1::2], strict=True)]
    return bits[0]


def _to_odd(f: Function, x: str, w: int) -> str:
    """f64 -> f32 rounded to odd, so that rounding once more to 16 bits gives what rounding once would have."""
    wide, narrow, bits = vec("double", w), vec("float", w), vec("i32", w)
    near = f.cast("fptrunc", x, narrow, wide)
    back = f.cast("fpext", near, wide, narrow)
    over = f.cmp("gt", f.intrinsic("fabs", back, ty=wide), f.intrinsic("fabs", x, ty=wide), wide)
    raw = f.cast("bitcast", near, bits, narrow)
    down = f.sub(raw, f.cast("zext", over, bits, vec("i1", w)), bits)
    inexact = f.cmp("one", back, x, wide)
    odd = f.or_(down, f.cast("zext", inexact, bits, vec("i1", w)), bits)
    return f.cast("bitcast", odd, narrow, bits)
