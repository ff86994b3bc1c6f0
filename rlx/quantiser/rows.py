"""Tensors as bytes of another type, some rows at a time: a tensor may be larger than the memory that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError, OptionError, ShapeError
from rlx.importers.stored import Stored
from rlx.ir.dtype import DTYPES, pack
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array

__all__ = ["Errors", "Part", "converted_rows"]

STEP = 1 << 20  # elements that are converted at a time

Part = tuple[Array, int, int]  # f32 elements [rows, columns], and the numbers of their first row and of the row after


class Errors:
    """Sums over the elements of a tensor."""

    def __init__(self) -> None:
        self.squares = self.wrong = self.worst = 0.0

    def add(self, before: Array, after: Array) -> None:
        """Takes in elements before and after rounding."""
        difference = before.astype(np.float64) - after
        self.squares += float(np.vdot(before, before.astype(np.float64)))
        self.wrong += float(np.vdot(difference, difference))
        self.worst = max(self.worst, float(np.abs(difference).max(initial=0)))

    @property
    def rms(self) -> float:
        """The relative rms error; 0 of a tensor of zeros."""
        return float(np.sqrt(self.wrong / self.squares)) if self.squares else 0.0


def converted_rows(
    name: str,
    stored: Stored,
    wanted: str,
    pool: ThreadPoolExecutor,
    *,
    importance: Array | None = None,
    changed: Callable[[Array], Array] | None = None,
    errors: Errors | None = None,
) -> Iterator[Array]:
    """The bytes (u8) of a tensor as type `wanted`, part by part in order; `errors` takes in what rounding changed.

    `importance` is [columns] or, for stacked matrices, [matrices, columns]. `changed` makes of all elements, in f32 and
    as the file has them, those that the type of `stored` is of. Raises `ModelFormatError` for elements that are no
    numbers, `OptionError` for those that are too large.
    """
    shape = tuple(int(s) for s in stored.type.shape if isinstance(s, int))
    if changed is None and wanted == (stored.encoding or stored.type.dtype.name):
        yield from _copied(stored)
        return
    if 0 in shape:
        return
    columns = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1
    if changed is None:
        read = _reader(name, stored, shape)
    else:
        flat = np.ascontiguousarray(changed(np.asarray(stored.read(), np.float32))).reshape(rows, columns)

        def read(a: int, b: int) -> Array:
            return flat[a:b]

    weights = _weights(name, importance, rows, columns)
    step = max(1, STEP // max(1, columns))

    def convert(start: int) -> tuple[Array, Array, Array | None]:
        part = read(start, min(rows, start + step))
        return part, *_as_type(name, part, wanted, weights, start)

    for part, made, back in _in_order(pool, convert, range(0, rows, step)):
        if errors is not None and back is not None:
            errors.add(part, back)
        yield made


def _copied(stored: Stored) -> Iterator[Array]:
    flat = stored.read().reshape(-1)
    if stored.encoding is None and stored.type.dtype.bits < 8:
        flat = pack(flat)
    step = 16 * STEP
    for start in range(0, flat.size, step):
        part = np.ascontiguousarray(flat[start : start + step])
        yield part.view(np.uint8)


def _reader(name: str, stored: Stored, shape: Sequence[int]) -> Callable[[int, int], Array]:
    """A function that gives rows a to b in f32."""
    data, columns = stored.read(), shape[-1] if shape else 1
    if stored.encoding is None:
        flat = data.reshape(-1, columns)
        return lambda a, b: np.asarray(flat[a:b], np.float32)
    encoding = ENCODINGS.get(stored.encoding)
    if encoding is None:
        raise ModelFormatError(f"tensor {name!r}: blocks of {stored.encoding} can't be decoded")
    size = encoding.nbytes((columns,))
    return lambda a, b: encoding.decode(data.reshape(-1)[a * size : b * size], (b - a, columns))


def _weights(name: str, importance: Array | None, rows: int, columns: int) -> Callable[[int, int], Iterator[Any]]:
    """A function that gives, for rows a to b, runs of rows with the importance of their columns."""
    if importance is None:
        return lambda a, b: iter([(a, b, None)])
    each = importance.reshape(-1, importance.shape[-1])
    if each.shape[1] != columns or rows % len(each):
        raise ShapeError(
            f"importance of {name!r}: expected numbers for {columns} columns, got {list(importance.shape)} "
            f"for {rows} rows"
        )
    per = rows // len(each)

    def runs(a: int, b: int) -> Iterator[Any]:
        while a < b:
            end = min(b, (a // per + 1) * per)
            yield a, end, each[a // per]
            a = end

    return runs


def _as_type(
    name: str, part: Array, wanted: str, weights: Callable[[int, int], Iterator[Any]], start: int
) -> tuple[Array, Array | None]:
    """The bytes of some rows, and the elements that they stand for."""
    if not np.isfinite(part).all():
        raise ModelFormatError(f"tensor {name!r} has an element that is NaN or infinite; keep it as it is, or mend it")
    encoding = ENCODINGS.get(wanted)
    if encoding is None:
        dtype = DTYPES[wanted].numpy
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(part.astype(dtype))
        back = narrow.astype(np.float32)
        if not np.isfinite(back).all():
            raise OptionError(f"tensor {name!r} has elements beyond those of {wanted}: keep it, or take bf16")
        return narrow.view(np.uint8).reshape(-1), back
    runs = weights(start, start + len(part))
    made = np.concatenate([encoding.encode(part[a - start : b - start], one) for a, b, one in runs])
    return made, encoding.decode(made, part.shape)


def _in_order(pool: ThreadPoolExecutor, work: Callable[[int], Any], starts: range) -> Iterator[Any]:
    """Results of `work`, as many computed ahead as there are threads."""
    ahead: deque[Future[Any]] = deque()
    try:
        for start in starts:
            ahead.append(pool.submit(work, start))
            if len(ahead) > 2 * pool._max_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        for one in ahead:
            one.cancel()
