"""Instructions of x86 that multiply whole numbers and add up neighbouring products, in vectors of any width."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.llvm.builder import Function, vec, width

__all__ = ["PAIR_FEATURES", "add_fours", "byte_pair_sums", "pair_sums"]

# by lanes of i32: LLVM's name of the feature that has `pair_sums`
PAIR_FEATURES = {4: "sse2", 8: "avx2", 16: "avx512bw"}
_PAIR_SUMS = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}
_BYTE_PAIR_SUMS = {16: "avx2.pmadd.ub.sw", 32: "avx512.pmaddubs.w.512"}


def add_fours(f: Function, total: str, x: str, y: str, v: str) -> str:
    """`total`, a vector `v` of i32, plus products of fours of bytes, u8 times i8. (VNNI: vpdpbusd)"""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * width(v)}"
    f.declare(name, v, [v, v, v])
    x, y = (f.cast("bitcast", value, v) for value in (x, y))
    return f.op(f"call {v} @{name}({v} {total}, {v} {x}, {v} {y})", v)


def pair_sums(f: Function, x: str, y: str) -> str:
    """Products of pairs of i16, each two neighbours added up in i32: half as many lanes. (pmaddwd)"""
    return _neighbours(f, x, y, "i32", _PAIR_SUMS)


def byte_pair_sums(f: Function, x: str, y: str) -> str:
    """Products of pairs of bytes, u8 times i8, each two neighbours added up in i16, which saturates. (pmaddubsw)"""
    return _neighbours(f, x, y, "i16", _BYTE_PAIR_SUMS)


def _neighbours(f: Function, x: str, y: str, to: str, names: Mapping[int, str]) -> str:
    """The sums of products of each two neighbours, by the instruction that `names` has for so many sums."""
    factors = f.type_of(x, y)
    v = vec(to, width(factors) // 2)
    name = f"llvm.x86.{names[width(v)]}"
    f.declare(name, v, [factors, factors])
    return f.op(f"call {v} @{name}({factors} {x}, {factors} {y})", v)
