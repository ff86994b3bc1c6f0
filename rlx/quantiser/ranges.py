"""Ranges of activations: what was seen of a value over all inputs, and the range that its 8 bits are spread over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import ExecutionError
from rlx.ir.graph import Array
from rlx.records import dataclass

__all__ = ["RANGES", "Grid", "Seen", "grid_of"]

RANGES = ("minmax", "percentile", "mse")
BINS = 4096


class Seen:
    """A histogram of the elements of a value; its bins become wider as larger elements come.

    Bin k holds width * (k - BINS) to width * (k + 1 - BINS). `width` is doubled at a time, so that two bins become one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.low = self.high = 0.0
        self.counts = np.zeros(2 * BINS, np.int64)
        self.zeros = 0  # elements that are 0, which every grid has
        self.width = 0.0

    def add(self, array: Array) -> None:
        """Takes in the elements of one run. Raises `ExecutionError` for one that is NaN or infinite."""
        flat = np.asarray(array, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ExecutionError(f"calibration: {self.name!r} is NaN or infinite for one of the inputs")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._reach(max(-low, high))
        flat = flat[flat != 0]
        self.zeros += array.size - flat.size
        if self.width:
            at = np.floor(flat * np.float32(1 / self.width)).astype(np.int64) + BINS
            self.counts += np.bincount(np.clip(at, 0, 2 * BINS - 1), minlength=2 * BINS)

    def _reach(self, largest: float) -> None:
        """Makes bins as wide as elements up to `largest` need."""
        if largest <= np.finfo(np.float32).tiny * BINS:
            return
        if not self.width:
            self.width = largest / BINS
        while largest > self.width * BINS:
            pairs = self.counts.reshape(BINS, 2).sum(axis=1)
            self.counts = np.concatenate([np.zeros(BINS // 2, np.int64), pairs, np.zeros(BINS // 2, np.int64)])
            self.width *= 2

    @property
    def centres(self) -> Array:
        """The middle of each bin."""
        return np.asarray((np.arange(-BINS, BINS) + 0.5) * self.width)


@dataclass(frozen=True)
class Grid:
    """x = scale * (q - zero), q of u8 or i8."""

    scale: np.float32
    zero: int
    dtype: str

    @property
    def limits(self) -> tuple[int, int]:
        """The numbers that q may be."""
        return (0, 255) if self.dtype == "u8" else (-128, 127)

    def zero_array(self) -> Array:
        """The zero point as ONNX holds it."""
        return np.array(self.zero, np.uint8 if self.dtype == "u8" else np.int8)

    def rounded(self, x: Array) -> Array:
        """What elements become."""
        low, high = self.limits
        q = np.clip(np.rint(x / self.scale) + self.zero, low, high)
        return np.asarray((q - self.zero) * self.scale)


def grid_of(seen: Sequence[Seen], dtype: str, ranges: str, percentile: float) -> Grid:
    """The grid for values that share one; for i8 the zero point is 0.

    minmax takes all that was seen, percentile leaves out so few elements at both ends, mse takes the part of the range
    with the least squared error.
    """
    low, high = min(s.low for s in seen), max(s.high for s in seen)
    whole = _grid(low, high, dtype)
    if ranges == "minmax" or not any(s.width for s in seen):
        return whole
    zeros = np.array([sum(s.zeros for s in seen)])
    centres = np.concatenate([np.zeros(1), *(s.centres for s in seen)])
    counts = np.concatenate([zeros, *(s.counts for s in seen)])
    present = counts > 0
    centres, counts = np.clip(centres[present], low, high), counts[present]
    if ranges == "percentile":
        order = np.argsort(centres)
        share = np.cumsum(counts[order]) / counts.sum()
        tail = 1 - percentile / 100
        first, last = np.searchsorted(share, [tail, 1 - tail])
        ends = centres[order]
        return _grid(min(0.0, float(ends[first])), max(0.0, float(ends[min(last, len(ends) - 1)])), dtype)
    best, least = whole, np.inf
    for part in np.linspace(1, 0.2, 81):
        tried = _grid(low * part, high * part, dtype)
        error = float((counts * np.square(centres - tried.rounded(centres))).sum())
        if error < least:
            best, least = tried, error
    return best


def _grid(low: float, high: float, dtype: str) -> Grid:
    """The grid over a range, in which 0 is a number of its own."""
    low, high = min(low, 0.0), max(high, 0.0)
    if dtype == "i8":
        return Grid(_scale(max(-low, high) / 127), 0, dtype)
    scale = _scale((high - low) / 255)
    return Grid(scale, int(np.clip(np.rint(-low / scale), 0, 255)), dtype)


def _scale(step: float) -> np.float32:
    """A step that is normal and not 0."""
    return np.float32(max(step, 1e-20)) if step > 0 else np.float32(1)
