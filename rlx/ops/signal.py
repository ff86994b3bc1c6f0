"""Discrete Fourier transforms, windows, mel filters and spectrograms; complex numbers are pairs in the last axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, broadcast, evaluate, max_size, min_size, unify, upper
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Cast, Mul
from rlx.ops.layout import Pad, Reshape, Slice, Transpose, Unsqueeze

__all__ = [
    "ComplexMul",
    "Dft",
    "DftAtRun",
    "DftGeometry",
    "DftTable",
    "Frames",
    "MelWeights",
    "Roots",
    "Stft",
    "Window",
]

F64 = DTYPES["f64"]
WINDOWS = {
    "hann": (0.5, -0.5, 0.0),
    "hamming": (25 / 46, -21 / 46, 0.0),
    "blackman": (0.42, -0.5, 0.08),
}
DIRECT = 512  # longest transform done as one matrix product


# ---- tables


@register
class Window(Op):
    """A "hann", "hamming" or "blackman" window of `size` elements; no inputs. (ONNX HannWindow-17 and kin)

    `periodic`: the period is the size, else one less (symmetric).
    """

    size: Size
    kind: str = "hann"
    periodic: bool = True
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        if self.kind not in WINDOWS:
            raise OptionError(f"window: kind {self.kind!r} is not one of {', '.join(WINDOWS)}")
        out = TensorType((self.size,), self.dtype)
        check_kind(self, out, "fiu", "result")
        unify(max_size(self.size, 0), self.size, f"window: the size {self.size} is negative")
        return out

    def _period(self) -> Size:
        return max_size(self.size if self.periodic else self.size - 1, 1)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(25, *x)

    def reference(self) -> Array:
        a, b, c = WINDOWS[self.kind]
        angle = np.arange(evaluate(self.size, {})) * (2 * math.pi / evaluate(self._period(), {}))
        return np.asarray(a + b * np.cos(angle) + c * np.cos(2 * angle)).astype(self.dtype.numpy)

    def lower(self, k: Any) -> Any:
        a, b, c = WINDOWS[self.kind]

        def element(i: Any) -> Any:
            angle = k.cast(i, F64) * (2 * math.pi / k.cast(k.size(self._period()), F64))
            first = a + b * k.call("cos", angle)
            return first if c == 0 else first + c * k.call("cos", 2 * angle)

        return k.map(element)


def _circle(k: Any, steps: Any, length: Size) -> Any:
    """The angle of `steps` parts of a circle of `length` parts, exact in the number of turns."""
    return k.cast(steps % k.size(length), F64) * (2 * math.pi / k.cast(k.size(length), F64))


@register
class Roots(Op):
    """exp(sign 2 pi i r c / length) as [rows, columns, 2]; no inputs. (the factors between two steps of an FFT)"""

    rows: Size
    columns: Size
    length: Size
    inverse: bool = False
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        out = TensorType((self.rows, self.columns, 2), self.dtype)
        check_kind(self, out, "f", "result")
        return out

    def reference(self) -> Array:
        rows, columns, length = (evaluate(n, {}) for n in (self.rows, self.columns, self.length))
        steps = np.arange(rows)[:, None] * np.arange(columns) % length
        angle = steps * (2 * math.pi / length)
        return np.stack([np.cos(angle), np.sin(angle) if self.inverse else -np.sin(angle)], -1).astype(self.dtype.numpy)

    def lower(self, k: Any) -> Any:
        def element(r: Any, c: Any, part: Any) -> Any:
            angle = _circle(k, r * c, self.length)
            sine = k.call("sin", angle)
            return k.select(k.equal(part, 0), k.call("cos", angle), sine if self.inverse else -sine)

        return k.map(element)


@register
class DftTable(Op):
    """The matrix [rows * parts, columns * results] of a transform of `length`; no inputs.

    Row (t, part) and column (f, result): what the real or imaginary part at t adds to that at f. `parts` 1: real in;
    `results` 1: real out from one half of a symmetric spectrum. `inverse` divides by the length.
    """

    rows: Size
    columns: Size
    length: Size
    parts: int = 2
    results: int = 2
    inverse: bool = False
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        out = TensorType((self.rows * self.parts, self.columns * self.results), self.dtype)
        check_kind(self, out, "f", "result")
        return out

    def reference(self) -> Array:
        rows, columns, length = (evaluate(n, {}) for n in (self.rows, self.columns, self.length))
        angle = (np.arange(rows)[:, None] * np.arange(columns) % length) * (2 * math.pi / length)
        cos, sin = np.cos(angle), np.sin(angle) if self.inverse else -np.sin(angle)
        table = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], 1)  # [t, part, f, result]
        if self.results == 1:
            t = np.arange(rows)
            table = table * np.where((t == 0) | (2 * t == length), 1, 2)[:, None, None, None]
        table = table[:, : self.parts, :, : self.results] / (length if self.inverse else 1)
        return np.ascontiguousarray(table.reshape(rows * self.parts, columns * self.results)).astype(self.dtype.numpy)

    def lower(self, k: Any) -> Any:
        def element(r: Any, c: Any) -> Any:
            t, part, f, result = r // self.parts, r % self.parts, c // self.results, c % self.results
            angle = _circle(k, t * f, self.length)
            sin = k.call("sin", angle) if self.inverse else -k.call("sin", angle)
            crossed = k.select(k.equal(part, 0), sin, -sin)
            value = k.select(k.equal(part, result), k.call("cos", angle), crossed)
            if self.results == 1:
                once = k.equal(t, 0) | k.equal(t * 2, k.size(self.length))
                value = k.select(once, value, value * 2)
            return value / k.cast(k.size(self.length), F64) if self.inverse else value

        return k.map(element)


@register
class MelWeights(Op):
    """Triangular filters [dft_length // 2 + 1, bins] between `low` and `high` Hz; no inputs. (ONNX MelWeightMatrix-17)

    Their corners are spaced evenly on the mel scale, 2595 log10(1 + f / 700), and moved to whole frequency bins.
    """

    bins: int
    dft_length: int
    sample_rate: int
    low: float
    high: float
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        if self.bins < 0 or self.dft_length < 1 or self.sample_rate < 1 or not 0 <= self.low <= self.high:
            raise OptionError(
                f"mel_weights: expected bins >= 0, positive dft_length and sample_rate, 0 <= low <= high; got "
                f"{self.bins}, {self.dft_length}, {self.sample_rate}, {self.low}, {self.high}"
            )
        if self.high > self.sample_rate / 2 + 1e-6:
            raise OptionError(f"mel_weights: high {self.high} is above half the sample rate {self.sample_rate}")
        return TensorType((self.dft_length // 2 + 1, self.bins), self.dtype)

    def reference(self) -> Array:
        low, high = (2595 * math.log10(1 + f / 700) for f in (self.low, self.high))
        mel = low + np.arange(self.bins + 2) * ((high - low) / (self.bins + 2))
        hertz = 700 * (10 ** (mel / 2595) - 1)
        hertz[0] = self.low  # exactly: it may be that of a bin, where a rounding error would give the one before
        corners = ((self.dft_length + 1) * hertz // self.sample_rate).astype(np.int64)
        out = np.zeros((self.dft_length // 2 + 1, self.bins))
        f = np.arange(len(out))
        for n, (left, centre, right) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
            if left == centre:
                out[centre, n] = 1
            else:
                rising = (f >= left) & (f <= centre)
                out[rising, n] = (f[rising] - left) / (centre - left)
            falling = (f >= centre) & (f < right)
            out[falling, n] = (right - f[falling]) / max(right - centre, 1)
        return out.astype(self.dtype.numpy)

    def decompose(self, g: Graph) -> Value:
        return g.constant(self.reference())


# ---- transforms


def _check_pairs(op: Op, x: TensorType, what: str = "input") -> None:
    check_kind(op, x, "f", what)
    if x.rank < 1 or x.shape[-1] not in (1, 2):
        raise ShapeError(f"{op.op_name}: the last axis of the {what} {x} must hold 1 (real) or 2 (complex) parts")


@register
class ComplexMul(Op):
    """The product of complex numbers, (real, imaginary) in the last axis; the other axes broadcast."""

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_same_dtype(self, a, b)
        for t in (a, b):
            _check_pairs(self, t)
            unify(t.shape[-1], 2, f"complex_mul: {t} is not complex")
        return TensorType((*broadcast(a.shape[:-1], b.shape[:-1], why=f"complex_mul of {a} and {b}"), 2), a.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(3, *x)

    def reference(self, a: Array, b: Array) -> Array:
        (ar, ai), (br, bi) = (np.moveaxis(widened(v), -1, 0) for v in (a, b))
        return np.stack([ar * br - ai * bi, ar * bi + ai * br], -1).astype(a.dtype)

    def lower(self, k: Any, a: Any, b: Any) -> Any:
        def element(*i: Any) -> Any:
            (ar, ai), (br, bi) = ([k.widen(v.broadcast(*i[:-1], k.size(part))) for part in (0, 1)] for v in (a, b))
            return k.select(k.equal(i[-1], 0), ar * br - ai * bi, ar * bi + ai * br)

        return k.map(element)


class DftGeometry(NamedTuple):
    """The axis and length of a transform, elements that it reads along the axis and makes, and parts of the result."""

    axis: int
    length: Size
    used: Size
    made: Size
    parts: int


class _Transform(Op):
    """Base of the two transforms, see `Dft`."""

    length: Size | None
    axis: int
    inverse: bool
    onesided: bool

    def geometry(self, x: TensorType) -> DftGeometry:
        """Which axis of x is transformed, and what of it."""
        axis = axis_of(self.axis, x.rank, self.op_name)
        if axis == x.rank - 1:
            raise ShapeError(f"dft: axis {axis} of {x} holds the real and imaginary parts")
        n = x.shape[axis]
        length = self.length if self.length is not None else 2 * (n - 1) if self.inverse and self.onesided else n
        if self.inverse and self.onesided:
            return DftGeometry(axis, length, min_size(n, length // 2 + 1), length, 1)
        return DftGeometry(axis, length, min_size(n, length), length // 2 + 1 if self.onesided else length, 2)

    def infer(self, x: TensorType) -> TensorType:
        _check_pairs(self, x)
        axis, length, _, out, parts = self.geometry(x)
        unify(max_size(length, 1), length, f"dft: the length {length} of axis {axis} of {x} must be positive")
        if self.onesided and not self.inverse:
            unify(x.shape[-1], 1, f"dft: onesided needs a real signal, {x} is complex")
        return TensorType((*x.shape[:axis], out, *x.shape[axis + 1 : -1], parts), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        length = self.geometry(x[0]).length
        depth = 10 * max(length.bit_length(), 1) if isinstance(length, int) else length * 2
        return self.elementwise_work(depth, *x) if out.rank else Work(0, 0, 0)

    def reference(self, x: Array) -> Array:
        axis, length, _, out, _ = self.geometry(TensorType(x.shape, DTYPES["f32"]))
        wide = widened(x).astype(np.float64)
        signal = wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]
        n = evaluate(length, {})
        if self.inverse and self.onesided:
            return np.fft.irfft(signal, n, axis)[..., None].astype(x.dtype)
        made = np.fft.ifft(signal, n, axis) if self.inverse else np.fft.fft(signal, n, axis)
        made = np.take(made, np.arange(evaluate(out, {})), axis=axis)
        return np.stack([made.real, made.imag], -1).astype(x.dtype)


@register
class DftAtRun(_Transform):
    """A `Dft` of a length that only a run tells, which the host computes: a table for it would take its square."""

    length: Size | None = None
    axis: int = -2
    inverse: bool = False
    onesided: bool = False


@register
class Dft(_Transform):
    """The discrete Fourier transform along `axis` of x [.., 1 or 2] (real or complex). (ONNX DFT-20)

    `length` (None: the size of the axis) cuts x off or adds zeros. `onesided` keeps the length // 2 + 1 frequencies of
    a real signal; with `inverse` it takes them and gives a real signal (length None: 2 (n - 1)). Where a device has
    no code for it, long ones of known length are done in steps of about its square root, short ones as one product with
    a matrix, and those of a length that only a run tells by NumPy.
    """

    length: Size | None = None
    axis: int = -2
    inverse: bool = False
    onesided: bool = False

    def decompose(self, g: Graph, x: Value) -> Value:
        axis, length, used, out, results = self.geometry(x.type)
        if x.dtype.bits < 32:
            (wide,) = g.add(Cast(DTYPES["f32"]), x)
            return g.add(Cast(x.dtype), g.add(self, wide)[0])[0]
        most = upper(length)
        if most is None or (not isinstance(length, int) and most > DIRECT):
            return g.add(DftAtRun(self.length, self.axis, self.inverse, self.onesided), x)[0]
        rank, parts = x.rank, x.shape[-1]
        order = (*(d for d in range(rank - 1) if d != axis), axis, rank - 1)
        y = x if axis == rank - 2 else g.add(Transpose(order), x)[0]
        if used != y.shape[-2]:
            sizes = (*y.shape[:-2], used, parts)
            (y,) = g.add(Slice((0,) * rank, sizes, (1,) * rank), y)
        first = _divisor(length) if results == 2 else 1
        if first > 1 and isinstance(length, int):
            y = self._in_steps(g, y, length, first, out)
        else:
            assert isinstance(parts, int)
            lead = y.shape[:-2]
            (flat,) = g.add(Reshape((*lead, used * parts)), y)
            (table,) = g.add(DftTable(used, out, length, parts, results, self.inverse, x.dtype))
            (y,) = g.add(MatMul(), flat, table)
            (y,) = g.add(Reshape((*lead, out, results)), y)
        if axis == rank - 2:
            return y
        back = [order.index(d) for d in range(rank)]
        return g.add(Transpose(tuple(back)), y)[0]

    def _in_steps(self, g: Graph, y: Value, length: int, first: int, out: Size) -> Value:
        """Cooley and Tukey: transforms of `first`, factors, transforms of length / first, and the digits swapped."""
        *lead, used, parts = y.shape
        rank, second = len(lead), length // first
        if used != length:
            (y,) = g.add(Pad((*(0,) * (rank + 2), *(0,) * rank, length - used, 0)), y)
        (y,) = g.add(Reshape((*lead, first, second, parts)), y)
        (y,) = g.add(Dft(None, -3, self.inverse), y)
        (roots,) = g.add(Roots(first, second, length, self.inverse, y.dtype))
        (y,) = g.add(ComplexMul(), y, roots)
        (y,) = g.add(Dft(None, -2, self.inverse), y)
        (y,) = g.add(Transpose((*range(rank), rank + 1, rank, rank + 2)), y)
        (y,) = g.add(Reshape((*lead, length, 2)), y)
        if out == length:
            return y
        return g.add(Slice((0,) * (rank + 2), (*lead, out, 2), (1,) * (rank + 2)), y)[0]


def _divisor(length: Size) -> int:
    """The divisor nearest to the square root from below, or 1 where the transform is best done at once."""
    if not isinstance(length, int) or length <= DIRECT:
        return 1
    return next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)


@register
class Frames(Op):
    """Overlapping pieces of `length` elements of the second last axis, `step` apart.

    [.., n, c] -> [.., pieces, length, c]; what is left at the end is left out.
    """

    length: Size
    step: Size

    def infer(self, x: TensorType) -> TensorType:
        if x.rank < 2:
            raise ShapeError(f"frames: expected x [.., n, c], got {x}")
        for what, size in (("length", self.length), ("step", self.step)):
            unify(max_size(size, 1), size, f"frames: the {what} {size} must be positive")
        n = x.shape[-2]
        unify(max_size(n, self.length), n, f"frames: pieces of {self.length} are longer than {x}")
        return TensorType((*x.shape[:-2], (n - self.length) // self.step + 1, self.length, x.shape[-1]), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def reference(self, x: Array) -> Array:
        length, step = (evaluate(n, {}) for n in (self.length, self.step))
        starts = np.arange(0, x.shape[-2] - length + 1, step)
        return np.take(x, starts[:, None] + np.arange(length), axis=-2)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: x(*i[:-3], i[-3] * k.size(self.step) + i[-2], i[-1]))


@register
class Stft(Op):
    """Transforms of windowed frames of a signal [B, n, 1 or 2]: [B, frames, frequencies, 2]. (ONNX STFT-17)

    Frames of `length`, `step` apart, are multiplied by the window [length] (default 1); `onesided` keeps the
    length // 2 + 1 frequencies of a real signal.
    """

    step: Size
    length: Size
    onesided: bool = True

    def infer(self, x: TensorType, window: TensorType | None = None) -> TensorType:
        _check_pairs(self, x)
        if x.rank != 3:
            raise ShapeError(f"stft: expected a signal [B, n, 1 or 2], got {x}")
        if window is not None:
            check_same_dtype(self, x, window)
            if window.rank != 1:
                raise DTypeError(f"stft: expected a window of one axis, got {window}")
            unify(window.shape[0], self.length, f"stft: the window {window} and the length of a frame")
        return Dft(None, -2, False, self.onesided).infer(Frames(self.length, self.step).infer(x))

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        return Work(Dft().work(out).flops, tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array, window: Array | None = None) -> Array:
        frames = widened(Frames(self.length, self.step).reference(x))
        if window is not None:
            frames = frames * widened(window)[:, None]
        return Dft(None, -2, False, self.onesided).reference(frames).astype(x.dtype)

    def decompose(self, g: Graph, x: Value, window: Value | None = None) -> Value:
        (frames,) = g.add(Frames(self.length, self.step), x)
        if window is not None:
            (column,) = g.add(Unsqueeze((1,)), window)
            (frames,) = g.add(Mul(), frames, column)
        return g.add(Dft(None, -2, False, self.onesided), frames)[0]
