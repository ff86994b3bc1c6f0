"""Instructions of AMX: eight tile registers, numbered by constants, of up to 16 rows of 64 bytes.

Code that uses them starts with `configure`, ends with `release` (a thread whose tiles are in use has 8 KB more to save
whenever it is interrupted), and calls nothing in between that configures tiles itself. Only for targets with `tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlx.backends.cpu.llvm.builder import Function, Operand

__all__ = [
    "ROWS", "ROW_BYTES", "bytes_place", "configuration", "configure", "dot", "load", "release", "rows_place", "store",
    "zero",
]  # fmt: skip

TILES = 8
ROWS = 16
ROW_BYTES = 64

# acc[m, n] += sum over k and pairs (bf16 in f32) or quadruples (bytes in i32) of a[m, k, :] * b[k, n, :]
Dot = Literal["tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"]


def configuration() -> list[int]:
    """The 64 bytes that `configure` reads, for whole tiles."""
    data = bytearray(64)
    data[0] = 1  # the palette
    for tile in range(TILES):
        at = bytes_place(tile)
        data[at : at + 2] = ROW_BYTES.to_bytes(2, "little")
        data[rows_place(tile)] = ROWS
    return list(data)


def bytes_place(tile: int) -> int:
    """The place in a configuration of the bytes of a tile's rows, 4 to 64 (i16)."""
    return 16 + 2 * tile


def rows_place(tile: int) -> int:
    """The place in a configuration of the number of a tile's rows, 1 to 16 (i8)."""
    return 48 + tile


def configure(f: Function, p: str | None = None) -> None:
    """Sets the shapes of the tiles, as 64 bytes at `p` say; by default all of them are whole. All become zero."""
    _call(f, "ldtilecfg", [("ptr", p or f.array("rlx_whole_tiles", "i8", configuration()))])


def release(f: Function) -> None:
    """Ends the use of tiles."""
    _call(f, "tilerelease", [])


def zero(f: Function, tile: int) -> None:
    """Sets a tile to zeros."""
    _call(f, "tilezero", [("i8", tile)])


def load(f: Function, tile: int, p: Operand, step: Operand) -> None:
    """Loads the rows of a tile, `step` bytes apart."""
    _call(f, "tileloadd64", [("i8", tile), ("ptr", p), ("i64", step)])


def store(f: Function, tile: int, p: Operand, step: Operand) -> None:
    """Stores the rows of a tile, `step` bytes apart."""
    _call(f, "tilestored64", [("i8", tile), ("ptr", p), ("i64", step)])


def dot(f: Function, name: Dot, total: int, a: int, b: int) -> None:
    """Adds the product of tiles `a` and `b` to `total`; denormals are taken for zeros by that of bf16.

    A row of `a` has 16 pairs of bf16 (quadruples of bytes), neighbours along k; row k of `b` has those of 16 columns.
    """
    _call(f, name, [("i8", total), ("i8", a), ("i8", b)])


def _call(f: Function, name: str, args: Sequence[tuple[str, Operand]]) -> None:
    f.declare(f"llvm.x86.{name}", "void", [f"{ty} immarg" if ty == "i8" else ty for ty, _ in args])
    f.do(f"call void @llvm.x86.{name}({', '.join(f'{ty} {f.value(value, ty)}' for ty, value in args)})")
