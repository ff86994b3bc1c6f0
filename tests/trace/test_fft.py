"""Complex numbers and Fourier transforms in traced functions: NumPy's results, element types and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, OptionError, ShapeError

Function = Callable[..., Any]

TRANSFORMS: dict[str, Function] = {
    "fft": lambda x, y: np.fft.fft(x),
    "fft of reals": lambda x, y: np.fft.fft(x.real, axis=0),
    "fft of ints": lambda x, y: np.fft.fft(np.arange(8) * 2) + x[0],
    "fft cut off": lambda x, y: np.fft.fft(x, n=5),
    "fft filled up": lambda x, y: np.fft.fft(x, n=11, axis=0),
    "fft forward": lambda x, y: np.fft.fft(x, norm="forward"),
    "ifft": lambda x, y: np.fft.ifft(x),
    "ifft ortho": lambda x, y: np.fft.ifft(x, norm="ortho"),
    "ifft forward": lambda x, y: np.fft.ifft(x, norm="forward"),
    "convolution": lambda x, y: np.fft.ifft(np.fft.fft(x) * np.fft.fft(y)),
    "rfft": lambda x, y: np.fft.rfft(x.real),
    "rfft odd": lambda x, y: np.fft.rfft(x.real, axis=0),
    "irfft": lambda x, y: np.fft.irfft(x),
    "irfft odd": lambda x, y: np.fft.irfft(x, n=9),
    "hfft": lambda x, y: np.fft.hfft(x),
    "ihfft": lambda x, y: np.fft.ihfft(x.imag, norm="ortho"),
    "fft2": lambda x, y: np.fft.fft2(x),
    "ifft2": lambda x, y: np.fft.ifft2(x, s=(4, 9)),
    "fftn": lambda x, y: np.fft.fftn(x, axes=(0,)),
    "ifftn": lambda x, y: np.fft.ifftn(x, norm="ortho"),
    "rfft2": lambda x, y: np.fft.rfft2(x.real, s=(4, 9)),
    "irfft2": lambda x, y: np.fft.irfft2(x),
    "rfftn": lambda x, y: np.fft.rfftn(x.real),
    "irfftn": lambda x, y: np.fft.irfftn(x, norm="ortho"),
    "an axis twice": lambda x, y: np.fft.rfft2(x.real, axes=(1, 1)),
    "fftshift": lambda x, y: np.fft.fftshift(x),
    "ifftshift": lambda x, y: np.fft.ifftshift(x, axes=1),
    "frequencies": lambda x, y: np.fft.fft(x) * np.fft.fftfreq(8),
}
ARITHMETIC: dict[str, Function] = {
    "add": lambda x, y: x + y * 2,
    "sub": lambda x, y: 1 - x,
    "mul": lambda x, y: x * y,
    "mul by 1j": lambda x, y: 1j * x,
    "div": lambda x, y: x / y,
    "div by reals": lambda x, y: x / y.real,
    "reciprocal": lambda x, y: 1j / x + np.reciprocal(y),
    "power": lambda x, y: x**2 + y**0.5 + x**y,
    "matmul": lambda x, y: x @ y.T,
    "abs": lambda x, y: np.abs(x),
    "plus": lambda x, y: +x,
    "var": lambda x, y: np.var(x, axis=0, ddof=1) + np.std(y),
    "norm": lambda x, y: np.linalg.norm(x, axis=1) + np.linalg.norm(y),
    "running sum": lambda x, y: np.cumsum(x, axis=1),
    "without NaN": lambda x, y: np.nansum(np.where(x == y, np.nan, x)) + np.nanmean(np.where(x == y, np.nan, y)),
    "numbers for NaN": lambda x, y: np.nan_to_num(np.where(x == y, np.nan, x)),
    "angle": lambda x, y: np.angle(x) + np.angle(y, deg=True),
    "parts": lambda x, y: x.real + np.imag(y) + x.imag,
    "conj": lambda x, y: np.conj(x) + y.conj(),
    "exp": lambda x, y: np.exp(x),
    "log": lambda x, y: np.log(x),
    "sqrt": lambda x, y: np.sqrt(x),
    "sign": lambda x, y: np.sign(x),
    "equal": lambda x, y: x == y,
    "not equal": lambda x, y: x != y,
    "finite": lambda x, y: np.isfinite(x) & ~np.isnan(y) & ~np.isinf(x),
    "truth": lambda x, y: np.logical_and(x, y) | np.logical_not(x),
    "sum": lambda x, y: x.sum(0) + np.mean(y),
    "vdot": np.vdot,
    "tensordot": lambda x, y: np.tensordot(x, y.T, 1),
    "outer": lambda x, y: np.outer(x[0], y[1]),
    "wider": lambda x, y: x.astype(np.complex128) * np.arange(8),
    "narrower": lambda x, y: x.astype(np.complex64),
    "to reals": lambda x, y: x.astype(np.float32),
    "to bool": lambda x, y: (x - x[0]).astype(bool),
    "from reals": lambda x, y: x.real.astype(np.complex64) + np.float32(2),
    "itself": lambda x, y: x,
}
MOVES: dict[str, Function] = {
    "transpose": lambda x, y: x.T,
    "reshape": lambda x, y: x.reshape(2, -1)[:, ::-1],
    "slice": lambda x, y: x[1:, ::2],
    "index": lambda x, y: x[np.array([0, 2, 0])],
    "take": lambda x, y: np.take(x, [1, 0], 1),
    "concatenate": lambda x, y: np.concatenate([x, y]),
    "stack": lambda x, y: np.stack([x, y], 1),
    "where": lambda x, y: np.where(np.abs(x) > 1, x, y),
    "pad": lambda x, y: np.pad(x, 1, constant_values=3),
    "roll": lambda x, y: np.roll(x, 3, 1),
    "tile": lambda x, y: np.tile(x, 2),
    "broadcast": lambda x, y: np.broadcast_to(x, (2, 5, 8)) + np.zeros((), np.complex64),
    "split": lambda x, y: np.split(x, 2, axis=1)[1],
    "expand": lambda x, y: np.expand_dims(x, 1).squeeze(1),
}


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("name", [*TRANSFORMS, *ARITHMETIC, *MOVES])
def test_as_numpy_has_it(name: str, dtype: type[np.complexfloating[Any, Any]]) -> None:
    """Values, shapes and element types of each function are NumPy's."""
    function = (TRANSFORMS | ARITHMETIC | MOVES)[name]
    rng = np.random.default_rng(0)
    x, y = ((rng.standard_normal((5, 8)) + 1j * rng.standard_normal((5, 8))).astype(dtype) for _ in range(2))
    y[0] = x[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that astype leaves the imaginary part out
        expected = function(x, y)
    got = np.asarray(rlx.jit(function, device="cpu")(x, y))
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    close = 3e-5 if dtype is np.complex64 or name in ("narrower", "to reals", "from reals") else 1e-12
    np.testing.assert_allclose(got, expected, rtol=close, atol=close)


@pytest.mark.parametrize("device", ["cpu", "reference", "interp"])
def test_no_device_is_left_out(device: str) -> None:
    """Parts, products, moves and transforms on each device."""

    def spectrum(x: Any) -> Any:
        return np.abs(np.fft.fft(np.fft.fftshift(x) * 1j)), np.concatenate([x.T, x.T])[1:]

    x = (np.arange(24).reshape(4, 6) * (1 - 2j)).astype(np.complex64)
    for got, expected in zip(rlx.jit(spectrum, device=device)(x), spectrum(x), strict=True):
        assert np.asarray(got).dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_edges_of_division_and_exp() -> None:
    """Zeros, infinities and parts whose squares overflow, as in NumPy; NaN where NumPy has one."""
    numbers = [0, 1, -1j, 1e30 + 1e30j, 1e-30j, np.inf, -np.inf + 2j, complex(0, np.inf), complex(np.nan, 1)]
    a, b = (v.ravel().astype(np.complex64) for v in np.meshgrid(numbers, numbers))
    with np.errstate(all="ignore"):
        quotients, powers = a / b, np.exp(b)
        got = rlx.jit(lambda a, b: (a / b, np.exp(b)), device="cpu")(a, b)
    roots = [complex(3e38, 3e38), 3e38, -3e38, 1e-45, complex(0, np.inf), complex(np.nan, -np.inf), complex(-np.inf, 2)]
    c = np.array(roots, np.complex64)
    np.testing.assert_allclose(rlx.jit(np.sqrt, device="cpu")(c).astype(c.dtype), np.sqrt(c), rtol=1e-5)
    ends = np.array([np.inf, -np.inf, 2], np.complex64)
    np.testing.assert_array_equal(rlx.jit(np.reciprocal, device="cpu")(ends), np.reciprocal(ends))
    finite = np.isfinite(a) & np.isfinite(b)
    np.testing.assert_allclose(np.asarray(got[0])[finite], quotients[finite], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got[1])[np.isfinite(b)], powers[np.isfinite(b)], rtol=1e-5)


def test_states_and_loops_carry_complex_numbers() -> None:
    """A carry of each complex type over the rounds of a loop."""
    for dtype in (np.complex64, np.complex128):

        def turned(x: Any) -> Any:
            return rlx.fori_loop(0, 3, lambda i, v: v * x + 1j, x)

        x = np.array([1 + 1j, 0.5 - 2j], dtype)
        expected = x
        for _ in range(3):
            expected = (expected * x + 1j).astype(dtype)
        np.testing.assert_allclose(rlx.jit(turned, device="cpu")(x), expected, rtol=1e-5)


OF_SEVERAL_AXES: tuple[Function, ...] = (np.fft.fftn, np.fft.ifftn, np.fft.rfftn, np.fft.irfftn)


def test_errors() -> None:
    """What NumPy refuses, and what there is no counterpart of."""
    x = np.ones((2, 4), np.complex64)
    other: Any = "other"
    unhashable: Any = ["ortho"]
    for function, error, text in (
        (np.fft.rfft, DTypeError, "real"),
        (lambda v: np.fft.fft(v, n=0), ShapeError, "one element"),
        (lambda v: np.fft.fft(v, norm=other), OptionError, "backward"),
        (lambda v: np.fft.fft(v, axis=2), ShapeError, "axis 2"),
        (lambda v: np.fft.fft2(v, s=(2,)), ShapeError, "lengths"),
        (lambda v: np.fft.rfftn(v.real, axes=()), ShapeError, "one axis"),
        (lambda v: np.fft.irfft2(v, axes=()), ShapeError, "one axis"),
        (np.prod, DTypeError, "c64"),
        (np.median, DTypeError, "c64"),
        *((lambda v, f=f: f(v.real, s=(2, 2, 2)), ShapeError, "3 lengths .* 2 axes") for f in OF_SEVERAL_AXES),
        (lambda v: np.fft.irfftn(v, axes=()), ShapeError, "one axis"),
        (lambda v: np.fft.hfft(v, norm=unhashable), OptionError, "backward"),
        (lambda v: np.fft.ihfft(v.real, norm=unhashable), OptionError, "backward"),
        (np.floor, DTypeError, "floor"),
        (np.sin, DTypeError, "real or imaginary"),
        (np.sort, DTypeError, "complex|c64"),
    ):
        with pytest.raises(error, match=text):
            rlx.jit(function, device="cpu")(x)
