"""Rows of activations rounded to 8 bits, as products of whole numbers read them.

A record of 64 bytes (see `rounded_rows`) has at

    0   q, 32 bytes with a sign      32  d, f32      36  -(sum of q 0..15), i32      40  -(q 16..31)      44  -(all)
    48  d times those three sums, f32

`rlx.ir.casting` says what q and d are.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.rounded_rows import Rounding
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.ir.casting import PEAK, TINY

__all__ = ["ROUND", "ROW_SCALE", "SCALED_SUMS", "SUMS"]

ROW_SCALE, SUMS, SCALED_SUMS = 32, 36, 48  # bytes of a record where its scale and its sums begin


def _record(f: Function, parts: list[str], lanes: int, out: str) -> None:
    """Writes the record of a block, of which `parts` are the elements."""
    words = vec("i32", lanes)
    sizes = [f.and_(f.cast("bitcast", x, words), 0x7FFFFFFF) for x in parts]  # in the order of the magnitudes
    while len(sizes) > 1:
        sizes = [f.max(x, y) for x, y in zip(sizes[::2], sizes[1::2], strict=True)]
    bits = f.reduce(sizes[0], f.max)
    peak = f.cast("bitcast", bits, "float")
    finite = f.cmp("lt", bits, 0x7F800000)
    used = f.and_(finite, f.cmp("ge", peak, TINY))
    inverse = f.select(used, f.div(float(PEAK), peak), 0.0)
    scale = f.select(used, f.div(peak, float(PEAK)), f.select(finite, 0.0, float("nan"), "float"))
    by, sums = f.splat(inverse, lanes), []
    for i, x in enumerate(parts):
        safe = f.select(used, x, "zeroinitializer")
        q = f.cast("fptosi", f.intrinsic("rint", f.mul(safe, by)), "i32")
        f.store(f.cast("trunc", q, "i8"), f.offset(out, i * lanes))
        sums.append(q)
    f.store(scale, f.offset(out, ROW_SCALE))
    half = len(sums) // 2
    totals = [f.reduce(_sum(f, x), f.add) for x in (sums[:half], sums[half:])]
    for i, x in enumerate((*totals, f.add(*totals))):
        less = f.sub(0, x)
        f.store(less, f.offset(out, SUMS + 4 * i))
        f.store(f.mul(scale, f.cast("sitofp", less, "float")), f.offset(out, SCALED_SUMS + 4 * i))


def _sum(f: Function, vectors: list[str]) -> str:
    """Their sum, lane by lane."""
    total = vectors[0]
    for x in vectors[1:]:
        total = f.add(total, x)
    return total


ROUND = Rounding("matmul.round_rows", "q8", _record)
