"""What is read off spectra: log-mel spectrograms, and the peaks of averaged power."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, evaluate, max_size, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Cast, Log, Maximum, Mul
from rlx.ops.layout import Concat, Reshape, Unsqueeze
from rlx.ops.reduction import ReduceMean, ReduceSumSquare
from rlx.ops.select import TopK
from rlx.ops.signal import Dft, Frames, MelWeights, Window

__all__ = ["LogMelSpectrogram", "WelchPeaks"]


def _check_window(op: Op, x: TensorType, window: TensorType | None, length: Size) -> None:
    check_kind(op, x, "f")
    if window is not None:
        check_same_dtype(op, x, window)
        if window.rank != 1:
            raise ShapeError(f"{op.op_name}: expected a window of one axis, got {window}")
        unify(window.shape[0], length, f"{op.op_name}: the window {window} and what it is for")


def _power(g: Graph, frames: Value, window: Value | None) -> Value:
    """[.., n] -> [.., n // 2 + 1], the squared magnitudes of the windowed transform."""
    if window is not None:
        (frames,) = g.add(Mul(), frames, window)
    (pairs,) = g.add(Unsqueeze((-1,)), frames)
    (spectrum,) = g.add(Dft(None, -2, False, True), pairs)
    return g.add(ReduceSumSquare((-1,), False), spectrum)[0]


@register
class LogMelSpectrogram(Op):
    """log(max(mel filters of the power of windowed frames, floor)) of a signal [.., n]: [.., frames, bins].

    Frames of `length` samples, `step` apart, times the window [length] (default: periodic Hann); the filters are those
    of `MelWeights` from `low` to `high` Hz (default: half the sample rate).
    """

    sample_rate: int
    length: int
    step: int
    bins: int
    low: float = 0.0
    high: float | None = None
    floor: float = 1e-10

    @property
    def _filters(self) -> MelWeights:
        high = self.sample_rate / 2 if self.high is None else self.high
        return MelWeights(self.bins, self.length, self.sample_rate, self.low, high)

    def infer(self, x: TensorType, window: TensorType | None = None) -> TensorType:
        _check_window(self, x, window, self.length)
        if x.rank < 1 or not self.floor > 0:
            raise OptionError(f"{self.op_name}: expected a signal [.., n] and a floor > 0, got {x} and {self.floor}")
        self._filters.infer()
        frames = Frames(self.length, self.step).infer(TensorType((*x.shape, 1), x.dtype))
        return TensorType((*x.shape[:-1], frames.shape[-3], self.bins), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(self.length + 20, *x)

    def reference(self, x: Array, window: Array | None = None) -> Array:
        frames = Frames(self.length, self.step).reference(widened(x)[..., None])[..., 0]
        shape = Window(self.length).reference() if window is None else widened(window)
        power = np.abs(np.fft.rfft(frames.astype(np.float64) * shape)) ** 2
        mel = power @ self._filters.reference()
        return np.asarray(np.log(np.maximum(mel, self.floor))).astype(x.dtype)

    def decompose(self, g: Graph, x: Value, window: Value | None = None) -> Value:
        dtype = x.dtype
        if dtype.bits < 32:
            (x,) = g.add(Cast(DTYPES["f32"]), x)
        if window is None:
            window = g.constant(Window(self.length).reference(), dtype=x.dtype)
        elif window.dtype is not x.dtype:
            (window,) = g.add(Cast(x.dtype), window)
        (column,) = g.add(Unsqueeze((-1,)), x)
        (frames,) = g.add(Frames(self.length, self.step), column)
        (frames,) = g.add(Reshape(frames.shape[:-1]), frames)
        power = _power(g, frames, window)
        (mel,) = g.add(MatMul(), power, g.constant(self._filters.reference(), dtype=x.dtype))
        (bounded,) = g.add(Maximum(), mel, g.constant(self.floor, dtype=x.dtype))
        (out,) = g.add(Log(), bounded)
        return out if out.dtype is dtype else g.add(Cast(dtype), out)[0]


@register
class WelchPeaks(Op):
    """The k strongest frequencies of groups of rows x [.., rows, n]: [.., rows / group, k, 2] of (hertz, power).

    The power of a bin is |transform|^2 / n of the windowed row (window [n], default 1), averaged over `group`
    consecutive rows; strongest first, of equal ones the lower frequency. (Welch 1967, without overlap)
    """

    k: int
    group: int
    sample_rate: float = 1.0

    def infer(self, x: TensorType, window: TensorType | None = None) -> TensorType:
        if x.rank < 2 or self.group < 1 or self.k < 0:
            raise OptionError(f"welch_peaks: expected x [.., rows, n], group >= 1, k >= 0; got {x}, {self}")
        _check_window(self, x, window, x.shape[-1])
        bins = x.shape[-1] // 2 + 1
        unify(max_size(bins, self.k), bins, f"welch_peaks: k {self.k} exceeds the {bins} frequencies of {x}")
        groups = x.shape[-2] // self.group
        unify(groups * self.group, x.shape[-2], f"welch_peaks: the rows of {x} are no multiple of {self.group}")
        return TensorType((*x.shape[:-2], groups, self.k, 2), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(20 * self.group, *x)

    def reference(self, x: Array, window: Array | None = None) -> Array:
        n = x.shape[-1]
        rows = widened(x).astype(np.float64) * (1 if window is None else widened(window))
        power = np.abs(np.fft.rfft(rows)) ** 2 / n
        means = power.reshape(*x.shape[:-2], -1, self.group, power.shape[-1]).mean(axis=-2)
        values, places = TopK(self.k).reference(means.astype(widened(x).dtype))
        hertz = places * (self.sample_rate / n)
        return np.stack([hertz, values], -1).astype(x.dtype)

    def decompose(self, g: Graph, x: Value, window: Value | None = None) -> Value:
        dtype, n = x.dtype, x.shape[-1]
        if dtype.bits < 32:
            (x,) = g.add(Cast(DTYPES["f32"]), x)
            if window is not None:
                (window,) = g.add(Cast(DTYPES["f32"]), window)
        power = _power(g, x, window)
        rows, bins = power.shape[-2:]
        (grouped,) = g.add(Reshape((*x.shape[:-2], rows // self.group, self.group, bins)), power)
        (means,) = g.add(ReduceMean((-2,), False), grouped)
        (scaled,) = g.add(DivideBySize(n), means)
        values, places = g.add(TopK(self.k), scaled)
        (hertz,) = g.add(Cast(x.dtype), places)
        (hertz,) = g.add(Mul(), hertz, g.constant(self.sample_rate, dtype=x.dtype))
        (hertz,) = g.add(DivideBySize(n), hertz)
        (first,), (second,) = (g.add(Unsqueeze((-1,)), v) for v in (hertz, values))
        (out,) = g.add(Concat(-1), first, second)
        return out if out.dtype is dtype else g.add(Cast(dtype), out)[0]


@register
class DivideBySize(Op):
    """x divided by a size that may be known at the run only."""

    size: Size

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        return np.asarray(wide / wide.dtype.type(evaluate(self.size, {}))).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            value = k.widen(x(*i))
            return value / k.cast(k.size(self.size), value.dtype)

        return k.map(element)
