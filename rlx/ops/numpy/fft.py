"""NumPy's Fourier transforms (`np.fft`) of graph values; fftfreq and rfftfreq take numbers and are NumPy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from rlx import ops
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, evaluate, symbols
from rlx.ops.base import axis_of
from rlx.ops.complex import part_of
from rlx.ops.layout import SizeOf
from rlx.ops.numpy.complex import is_complex
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import cast, several, value_of, whole

np: Any = numpy  # its types are of arrays, here its functions take graph values

OPPOSITE = {"backward": "forward", None: "forward", "forward": "backward", "ortho": "ortho"}
Axes = Sequence[int] | None


def _number(what: str, a: Any) -> Value:
    """The operand in the type that NumPy transforms it in: f32 or f64, or complex."""
    x = value_of(what, a)
    if is_complex(x) or x.dtype in (DTYPES["f32"], DTYPES["f64"]):
        return x
    return cast(x, "f32" if x.dtype.is_float and x.dtype.bits < 64 else "f64")


def _check_norm(what: str, norm: Any) -> None:
    """Raises `OptionError` unless it is a way to scale that NumPy knows."""
    if norm not in list(OPPOSITE):  # a list: what can't be hashed is compared too
        raise OptionError(f"{what}: norm={norm!r}: expected 'backward', 'ortho' or 'forward'")


def _transformed(
    what: str, a: Any, n: Size | None, axis: int, norm: str | None, *, inverse: bool = False, half: bool = False
) -> Value:
    """One transform along an axis: `half` makes or takes one half of the spectrum of real numbers."""
    x = _number(what, a)
    _check_norm(what, norm)
    if half and not inverse and is_complex(x):
        raise DTypeError(f"{what} takes real numbers, got {x.type}")
    at = axis_of(whole("axis", axis), x.rank, what)
    length = n if n is not None else 2 * (x.shape[at] - 1) if half and inverse else x.shape[at]
    if isinstance(length, int | np.integer) and length < 1:
        raise ShapeError(f"{what}: expected one element at least along axis {axis}, got {length}")
    length = int(length) if isinstance(length, np.integer) else length
    pairs = ops.pairs(x) if is_complex(x) else ops.unsqueeze(x, axes=(-1,))
    made = ops.dft(pairs, length=length, axis=at, inverse=inverse, onesided=half)
    made = ops.squeeze(made, axes=(-1,)) if half and inverse else ops.from_pairs(made)
    wanted = {"backward": inverse, None: inverse, "ortho": None, "forward": not inverse}[norm]
    if wanted is inverse:
        return made  # type: ignore[no-any-return]
    return _scaled(made, length, inverse, ortho=wanted is None)


def _scaled(x: Value, length: Size, inverse: bool, *, ortho: bool) -> Value:
    """A transform that is scaled by 1 / length if it is inverse, scaled otherwise: by the root, or the other way."""
    real = part_of(x.dtype) if is_complex(x) else x.dtype
    if isinstance(length, int) or not symbols(length):
        size = float(evaluate(length, {}))
        power = 0.5 if ortho else 1.0
        return np.multiply(x, np.asarray(size**power if inverse else size**-power, real.numpy))  # type: ignore[no-any-return]
    (count,) = x.graph.add(SizeOf(length))
    factor = cast(count, "f64")
    factor = cast(ops.sqrt(factor) if ortho else factor, real)
    return np.multiply(x, factor) if inverse else np.divide(x, factor)  # type: ignore[no-any-return]


@of(np.fft.fft)
def fft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The transform along an axis."""
    return _transformed("np.fft.fft", a, n, axis, norm)


@of(np.fft.ifft)
def ifft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The inverse transform along an axis."""
    return _transformed("np.fft.ifft", a, n, axis, norm, inverse=True)


@of(np.fft.rfft)
def rfft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The first half of the transform of real numbers."""
    return _transformed("np.fft.rfft", a, n, axis, norm, half=True)


@of(np.fft.irfft)
def irfft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The real numbers that a half of a spectrum is that of."""
    return _transformed("np.fft.irfft", a, n, axis, norm, inverse=True, half=True)


@of(np.fft.hfft)
def hfft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The real spectrum of a signal of which one half is given, the other being its conjugate."""
    _check_norm("np.fft.hfft", norm)
    x = np.conj(_number("np.fft.hfft", a))
    return _transformed("np.fft.hfft", x, n, axis, OPPOSITE[norm], inverse=True, half=True)


@of(np.fft.ihfft)
def ihfft(a: Any, n: Any = None, axis: int = -1, norm: str | None = None, out: None = None) -> Any:
    """The inverse of `hfft`."""
    _check_norm("np.fft.ihfft", norm)
    return np.conj(_transformed("np.fft.ihfft", a, n, axis, OPPOSITE[norm], half=True))


def _axes(what: str, x: Value, s: Any, axes: Any) -> list[tuple[int, Any]]:
    """Each axis that is transformed, and its length; None: as it is."""
    lengths = None if s is None else several(what, s)
    if axes is None:
        if lengths is not None and len(lengths) > x.rank:
            raise ShapeError(f"{what}: {len(lengths)} lengths are given for the {x.rank} axes of {x.type}")
        chosen = tuple(range(x.rank)) if lengths is None else tuple(range(x.rank - len(lengths), x.rank))
    else:
        chosen = tuple(axis_of(whole("axes", d), x.rank, what) for d in several(what, axes))
    if lengths is not None and len(lengths) != len(chosen):
        raise ShapeError(f"{what}: {len(lengths)} lengths are given for {len(chosen)} axes")
    if lengths is not None:  # -1: that of the axis
        lengths = tuple(None if isinstance(n, int) and n == -1 else n for n in lengths)
    found = list(lengths or (None,) * len(chosen))
    for place, d in enumerate(chosen[:-1]):
        if found[place] is None and chosen.count(d) > 1:
            found[place] = x.shape[d]  # that of the operand, whatever the transforms before have made of it
    return list(zip(chosen, found, strict=True))


def _one_axis(what: str, x: Value, s: Any, axes: Any) -> list[tuple[int, Any]]:
    """As `_axes`; `ShapeError` if there is none."""
    chosen = _axes(what, x, s, axes)
    if not chosen:
        raise ShapeError(f"{what}: expected one axis at least, got none for {x.type}")
    return chosen


def _several(what: str, a: Any, s: Any, axes: Any, norm: str | None, inverse: bool) -> Any:
    x = _number(what, a)
    for axis, n in reversed(_axes(what, x, s, axes)):
        x = _transformed(what, x, n, axis, norm, inverse=inverse)
    return x


@of(np.fft.fftn)
def fftn(a: Any, s: Any = None, axes: Axes = None, norm: str | None = None, out: None = None) -> Any:
    """The transform along several axes, all by default."""
    return _several("np.fft.fftn", a, s, axes, norm, False)


@of(np.fft.ifftn)
def ifftn(a: Any, s: Any = None, axes: Axes = None, norm: str | None = None, out: None = None) -> Any:
    """The inverse transform along several axes, all by default."""
    return _several("np.fft.ifftn", a, s, axes, norm, True)


@of(np.fft.fft2)
def fft2(a: Any, s: Any = None, axes: Axes = (-2, -1), norm: str | None = None, out: None = None) -> Any:
    """The transform along two axes."""
    return _several("np.fft.fft2", a, s, axes, norm, False)


@of(np.fft.ifft2)
def ifft2(a: Any, s: Any = None, axes: Axes = (-2, -1), norm: str | None = None, out: None = None) -> Any:
    """The inverse transform along two axes."""
    return _several("np.fft.ifft2", a, s, axes, norm, True)


def _several_real(what: str, a: Any, s: Any, axes: Any, norm: str | None) -> Any:
    x = _number(what, a)
    *rest, (axis, n) = _one_axis(what, x, s, axes)
    x = _transformed(what, x, n, axis, norm, half=True)
    for axis, n in reversed(rest):
        x = _transformed(what, x, n, axis, norm)
    return x


def _several_inverse(what: str, a: Any, s: Any, axes: Any, norm: str | None) -> Any:
    x = _number(what, a)
    *rest, (last, count) = _one_axis(what, x, s, axes)
    for axis, n in rest:
        x = _transformed(what, x, n, axis, norm, inverse=True)
    return _transformed(what, x, count, last, norm, inverse=True, half=True)


@of(np.fft.rfftn)
def rfftn(a: Any, s: Any = None, axes: Axes = None, norm: str | None = None, out: None = None) -> Any:
    """The transform of real numbers along several axes, of which the last has the first half."""
    return _several_real("np.fft.rfftn", a, s, axes, norm)


@of(np.fft.rfft2)
def rfft2(a: Any, s: Any = None, axes: Axes = (-2, -1), norm: str | None = None, out: None = None) -> Any:
    """The transform of real numbers along two axes, of which the last has the first half."""
    return _several_real("np.fft.rfft2", a, s, axes, norm)


@of(np.fft.irfftn)
def irfftn(a: Any, s: Any = None, axes: Axes = None, norm: str | None = None, out: None = None) -> Any:
    """The inverse of `rfftn`."""
    return _several_inverse("np.fft.irfftn", a, s, axes, norm)


@of(np.fft.irfft2)
def irfft2(a: Any, s: Any = None, axes: Axes = (-2, -1), norm: str | None = None, out: None = None) -> Any:
    """The inverse of `rfft2`."""
    return _several_inverse("np.fft.irfft2", a, s, axes, norm)


def _shifted(what: str, x: Any, axes: Any, up: bool) -> Any:
    v = value_of(what, x)
    for axis, _ in _axes(what, v, None, axes):
        half = v.shape[axis] // 2 if up else v.shape[axis] - v.shape[axis] // 2
        ahead = v.shape[axis] - half
        index = [slice(None)] * v.rank
        index[axis] = slice(ahead, None)
        first = v[tuple(index)]
        index[axis] = slice(None, ahead)
        v = np.concatenate([first, v[tuple(index)]], axis=axis)
    return v


@of(np.fft.fftshift)
def fftshift(x: Any, axes: Any = None) -> Any:
    """The zero frequency moved to the middle."""
    return _shifted("np.fft.fftshift", x, axes, True)


@of(np.fft.ifftshift)
def ifftshift(x: Any, axes: Any = None) -> Any:
    """The inverse of `fftshift`."""
    return _shifted("np.fft.ifftshift", x, axes, False)
