"""Importance of columns: the mean squares of what a matrix was multiplied by, in the files of llama.cpp.

Newer files are GGUF with two tensors a matrix, NAME.in_sum2 (sums of squares, a row for each stacked matrix) and
NAME.counts. Older ones are a list: name, number of calls, and sums of squares times calls over counts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlx.disk import saving
from rlx.errors import ModelFormatError
from rlx.importers.gguf import read_gguf
from rlx.importers.sources import FileSource
from rlx.ir.graph import Array
from rlx.quantiser.write_gguf import Typed, pair, write_gguf
from rlx.records import dataclass

__all__ = ["Importance", "read_imatrix", "write_imatrix"]

MAX_ENTRIES, MAX_NAME, MAX_VALUES = 1 << 18, 1 << 10, 1 << 24
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Importance:
    """Of one matrix or stacked ones: sums of squares [matrices, columns], and of how many rows [matrices]."""

    sums: Array
    counts: Array

    @property
    def means(self) -> Array:
        """Mean squares; 1 for a matrix that nothing was multiplied by."""
        counts = self.counts.reshape(-1, 1)
        means = np.divide(self.sums, counts, out=np.ones_like(self.sums), where=counts > 0)
        return means[0] if len(means) == 1 else means


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, Importance]:
    """The importance by names of tensors. Raises `ModelFormatError` for a file that is none, or malformed."""
    source = FileSource(os.fsdecode(os.fspath(path)))
    try:
        is_gguf = source.size >= 4 and source.read(0, 4) == b"GGUF"
        found = _of_gguf(Path(path)) if is_gguf else _of_list(source)
    finally:
        source.close()
    for name, one in found.items():
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in (one.sums, one.counts)):
            raise ModelFormatError(f"{path}: {name!r}: expected finite numbers that are not negative")
    return found


def _of_gguf(path: Path) -> dict[str, Importance]:
    file = read_gguf(path)
    found = {}
    for name, tensor in file.tensors.items():
        if not name.endswith(SUMS):
            continue
        owner = name.removesuffix(SUMS)
        counts = file.tensors.get(owner + COUNTS)
        if counts is None or {tensor.type.name, counts.type.name} != {"f32"}:
            raise ModelFormatError(f"{path}: {owner!r}: expected {SUMS} and {COUNTS} of f32")
        sums = np.array(file.raw(name).view(np.float32)).reshape(-1, tensor.shape[-1] if tensor.shape else 1)
        given = np.array(file.raw(owner + COUNTS).view(np.float32)).reshape(-1)
        if len(given) != len(sums):
            raise ModelFormatError(f"{path}: {owner!r}: {len(given)} counts for {len(sums)} matrices")
        found[owner] = Importance(sums, given)
    if not found:
        raise ModelFormatError(f"{path}: is no importance matrix: it has no tensor that ends in {SUMS}")
    return found


def _of_list(source: FileSource) -> dict[str, Importance]:
    at = 0

    def fail(problem: str) -> NoReturn:
        raise ModelFormatError(f"{source.name}: is no importance matrix of llama.cpp: {problem} at byte {at}")

    def take(size: int) -> bytes:
        nonlocal at
        if size > source.size - at:
            fail(f"{size} bytes wanted, {source.size - at} left")
        data = source.read(at, size)
        at += size
        return data

    def count(most: int, what: str) -> int:
        (value,) = struct.unpack("<i", take(4))
        if not 0 <= value <= most:
            fail(f"{what} is {value}, expected 0 to {most}")
        return int(value)

    found: dict[str, Importance] = {}
    for _ in range(count(MAX_ENTRIES, "the number of entries")):
        name = take(count(MAX_NAME, "the length of a name")).decode("utf-8", errors="replace")
        calls, values = count((1 << 31) - 1, "the number of calls"), count(MAX_VALUES, "the number of values")
        if not values or name in found:
            fail(f"{name!r} has no values, or is there twice")
        sums = np.frombuffer(take(4 * values), "<f4").astype(np.float32)
        found[name] = Importance(sums[None], np.array([max(1, calls)], np.float32))
    return found


def write_imatrix(path: str | os.PathLike[str], found: Mapping[str, Importance], source: str, chunks: int) -> None:
    """Writes a file that llama.cpp reads too, whole or not at all; `source` names what it was made of."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    arrays: list[Any] = []
    for name, one in sorted(found.items()):
        for suffix, array in ((SUMS, one.sums), (COUNTS, one.counts.reshape(-1, 1))):
            tensors[name + suffix] = (array.shape, "f32")
            arrays.append([np.ascontiguousarray(array, np.float32).view(np.uint8).reshape(-1)])
    pairs = [
        pair("general.type", Typed("text", "imatrix")),
        pair("imatrix.datasets", Typed("text", [source])),
        pair("imatrix.chunk_count", Typed("u32", chunks)),
        pair("imatrix.chunk_size", Typed("u32", 512)),
    ]
    with saving(path, "imatrix") as file:
        write_gguf(file, pairs, tensors, arrays)
