"""What becomes of sums of products of bytes (see `panels.int8`): stored as they are, or requantised to 8 bits."""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.int8 import WIDTH, FinishArguments, Tile
from rlx.backends.cpu.llvm.builder import Function, constant, vec, width
from rlx.records import dataclass

__all__ = [
    "Finish", "finishing", "limits", "packed", "packed_in_order", "quantised", "rounded", "starting", "store_bytes",
    "store_sums",
]  # fmt: skip

NAMES = {  # by lanes of i32: conversion, packing to i16, to u8, to i8
    16: (
        "llvm.x86.avx512.mask.cvtps2dq.512", "llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packuswb.512",
        "llvm.x86.avx512.packsswb.512",
    ),
    8: ("llvm.x86.avx.cvt.ps2dq.256", "llvm.x86.avx2.packssdw", "llvm.x86.avx2.packuswb", "llvm.x86.avx2.packsswb"),
    4: (
        "llvm.x86.sse2.cvtps2dq", "llvm.x86.sse2.packssdw.128", "llvm.x86.sse2.packuswb.128",
        "llvm.x86.sse2.packsswb.128",
    ),
}  # fmt: skip


def starting(f: Function, tile: Tile, w: str, zero: str, finish: str, column: str) -> list[str]:
    """What sums of the panel at `w` start with: what the zero point takes off, and the bias."""
    size = 4 * tile.by.lanes
    minus = f.splat(f.sub(0, f.cast("trunc", zero, "i32")), tile.by.lanes)
    first = [f.mul(f.load(tile.vector, f.offset(w, size * j)), minus) for j in range(tile.halves)]
    if tile.result == "i32":
        return first
    bias = FinishArguments.load(f, "bias", finish)
    at = f.offset(bias, column)
    return f.if_(
        f.cmp("ne", bias, "null"),
        lambda: [f.add(x, f.load(tile.vector, f.offset(at, size * j))) for j, x in enumerate(first)],
        lambda: first,
    )


def store_sums(f: Function, acc: list[str], c: list[str], n: str) -> None:
    """Stores the first `n` of the sums of a panel, for each of the rows at `c`."""
    halves = len(acc) // len(c)
    lanes = WIDTH // halves

    def full() -> None:
        for r, p in enumerate(c):
            for j in range(halves):
                f.store(acc[halves * r + j], f.offset(p, 4 * lanes * j), align=4)

    def part() -> None:
        masks = [f.mask_below(f.sub(n, lanes * j), lanes, "i32") for j in range(halves)]
        for r, p in enumerate(c):
            for j in range(halves):
                f.masked_store(acc[halves * r + j], f.offset(p, 4 * lanes * j), masks[j])

    f.if_(f.cmp("ge", n, WIDTH), full, part)


@dataclass(frozen=True)
class Finish:
    """The scales, shifts (by vector) and limits of a panel."""

    scales: list[str]
    shifts: list[str]
    ends: list[str]


def finishing(f: Function, tile: Tile, finish: str, column: str) -> Finish:
    """What the words at `finish` say of the panel that starts `column` bytes into arrays of 4-byte numbers."""
    floats = vec("float", tile.by.lanes)
    arrays = [f.offset(FinishArguments.load(f, name, finish), column) for name in ("scale", "shift")]
    scales, shifts = (
        [f.load(floats, f.offset(p, 4 * tile.by.lanes * j), align=4) for j in range(tile.halves)] for p in arrays
    )
    return Finish(scales, shifts, limits(f, finish, tile.clamped, 2 * tile.by.lanes))


def store_bytes(f: Function, tile: Tile, acc: list[str], c: list[str], n: str, finish: Finish) -> None:
    """Stores the first `n` results of a panel, for each of the rows at `c`, given their sums."""
    if tile.by.lanes == 16:
        _store_rows(f, tile, acc, c, n, finish)
        return
    copy = f.alloca("i8", 16 * len(c))
    shorts = [rounded(f, acc[2 * r : 2 * r + 2], finish.scales, finish.shifts, finish.ends) for r in range(len(c))]
    results: list[str] = []
    for r in range(0, len(c), 2):
        results += packed(f, tile.result, shorts[r : r + 2])

    def full() -> None:
        for p, value in zip(c, results, strict=True):
            f.store(value, p, align=1)

    def half() -> None:
        for p, value in zip(c, results, strict=True):
            f.store(f.extract(f.cast("bitcast", value, "<2 x i64>"), 0), p, align=1)

    def part() -> None:
        for r, value in enumerate(results):
            f.store(value, f.offset(copy, 16 * r), align=1)

        def row(r: str, _: list[str]) -> None:
            source, target = f.offset(copy, f.mul(r, 16)), f.offset(c[0], f.mul(r, "%ldc"))
            f.loop(0, n, 1, [], lambda i, _: f.store(f.load("i8", f.offset(source, i)), f.offset(target, i)))

        f.loop(0, len(c), 1, [], row)

    def less() -> None:
        f.if_(f.cmp("eq", n, 8), half, part)

    f.if_(f.cmp("ge", n, WIDTH), full, less)


def _store_rows(f: Function, tile: Tile, acc: list[str], c: list[str], n: str, finish: Finish) -> None:
    """The same with AVX-512, four rows at a time."""
    results: list[str] = []
    for r in range(0, len(c), 4):
        some = acc[r : r + 4]
        found = quantised(f, tile.result, [*some, *some[-1:] * (4 - len(some))], finish)
        results += [f.shuffle(found, None, [4 * q + i for q in range(4)]) for i in range(len(some))]
    rows = [f.cast("bitcast", value, "<16 x i8>") for value in results]

    def full() -> None:
        for p, value in zip(c, rows, strict=True):
            f.store(value, p, align=1)

    def part() -> None:
        mask = f.mask_below(n, WIDTH, "i32")
        for p, value in zip(c, rows, strict=True):
            f.masked_store(value, p, mask)

    f.if_(f.cmp("ge", n, WIDTH), full, part)


def quantised(f: Function, result: str, sums: list[str], finish: Finish) -> str:
    """Results ("u8" or "i8") of four vectors of sums: four lanes of each in turn, in vectors of i32.

    Scaled, shifted, rounded, limited as by `rounded`; scales and shifts are those of all vectors or one for each.
    """
    scales, shifts = (list(x) * (4 // len(x)) for x in (finish.scales, finish.shifts))
    pairs = [rounded(f, sums[i : i + 2], scales[i : i + 2], shifts[i : i + 2], finish.ends) for i in (0, 2)]
    return f.cast("bitcast", to_bytes(f, result, *pairs), f.type_of(sums[0]))


def limits(f: Function, finish: str, clamped: bool, lanes: int = 16) -> list[str]:
    """The zero point and, with `clamped`, the lowest and highest result, in lanes of i16."""
    names = ("zero", "low", "high") if clamped else ("zero",)
    return [f.splat(f.cast("trunc", FinishArguments.load(f, name, finish), "i16"), lanes) for name in names]


def rounded(f: Function, sums: list[str], scales: list[str], shifts: list[str], ends: list[str]) -> str:
    """Results in i16 of two vectors of i32 sums: scaled, shifted, rounded (halves to even), plus zero, limited.

    Four lanes of each vector in turn: of columns 0-3, 8-11, 4-7, 12-15 where they hold columns 0-7 and 8-15.
    """
    v = f.type_of(sums[0])
    lanes = width(v)
    floats, shorts = vec("float", lanes), vec("i16", 2 * lanes)
    convert, to_shorts, *_ = NAMES[lanes]
    more, tail = ([v, "i16", "i32 immarg"], f", {v} zeroinitializer, i16 -1, i32 4") if lanes == 16 else ([], "")
    f.declare(convert, v, [floats, *more])
    f.declare(to_shorts, shorts, [v, v])
    whole = []
    for total, scale, shift in zip(sums, scales, shifts, strict=True):
        value = f.add(f.mul(f.cast("sitofp", total, floats), scale), shift)
        value = f.min(value, constant(65536.0, floats), floats)  # what is below the range of i32 becomes its least
        whole.append(f.op(f"call {v} @{convert}({floats} {value}{tail})", v))
    short = f.op(f"call {shorts} @{to_shorts}({v} {whole[0]}, {v} {whole[1]})", shorts)
    short = f.intrinsic("sadd.sat", short, ends[0], ty=shorts)
    return f.min(f.max(short, ends[1]), ends[2]) if len(ends) > 1 else short


def to_bytes(f: Function, result: str, a: str, b: str) -> str:
    """Two vectors of i16 saturated to "u8" or "i8": 8 lanes of each in turn."""
    shorts = f.type_of(a)
    bytes = vec("i8", 2 * width(shorts))
    name = NAMES[width(shorts) // 2][3 if result == "i8" else 2]
    f.declare(name, bytes, [shorts, shorts])
    return f.op(f"call {bytes} @{name}({shorts} {a}, {shorts} {b})", bytes)


def packed(f: Function, result: str, shorts: list[str]) -> list[str]:
    """One or two vectors of `rounded` as vectors of 16 bytes, columns in order, saturated to "u8" or "i8"."""
    mixed = to_bytes(f, result, shorts[0], shorts[-1])
    order = [4 * q + i for q in (0, 4, 1, 5, 2, 6, 3, 7) for i in range(4)]
    both = f.shuffle(mixed, None, order)
    return [f.shuffle(both, None, list(range(16 * r, 16 * r + 16))) for r in range(len(shorts))]


def packed_in_order(f: Function, result: str, short: str) -> str:
    """16 bytes of a vector of `rounded` whose sums were columns 0-3 and 8-11, 4-7 and 12-15."""
    halves = [f.shuffle(short, None, list(range(8 * h, 8 * h + 8))) for h in range(2)]
    return to_bytes(f, result, *halves)
