"""Derivatives through complex numbers, which count as two floats each, and through determinants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError
from rlx.testing.derivatives import differences

X = np.random.default_rng(5).standard_normal(8)


def moved(x: Any) -> Any:
    """What moves complex numbers: slices, gathers, transposes, joins."""
    z = np.concatenate([x + 1j * x**3, 1j * x + 2])[np.array([3, 5, 5, 9])]
    return np.sum(np.angle(z)) + np.sum(np.abs(np.exp(1j * x + x * x)[::2].reshape(2, 2).T @ np.ones((2, 1))))


def looped(x: Any) -> Any:
    """Complex carries and rows."""
    last, rows = rlx.scan(lambda c, r: (c * (r + 1j), c), 1j * x[0] + 1.0, x)
    return np.real(last) * np.sum(np.imag(rows)) * np.sum(np.imag(np.where(x > 0, x * 1j, x * 2j + 1)))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "power": lambda x: np.sum(np.abs(np.fft.fft(x)) ** 2),
    "product": lambda x: np.sum(np.real((x + 1j * x * x) * (x - 2j))),
    "back": lambda x: np.sum(np.abs(np.fft.ifft(np.fft.fft(x) * np.exp(1j * x)))),
    "branch": lambda x: np.sum(np.abs(rlx.cond(x[0] > 0, lambda: x * 1j + x, lambda: 2j * x))),
    "moved": moved,
    "looped": looped,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_numbers_inside_of_a_function(name: str) -> None:
    """Gradients against differences, forwards against backwards, second derivatives, slices."""
    f = FUNCTIONS[name]
    slope = rlx.grad(f)(X)
    np.testing.assert_allclose(slope, differences(f, X), rtol=1e-6, atol=1e-6)
    assert np.allclose(rlx.jvp(f, (X,), (X,))[1], slope @ X)
    assert np.allclose(rlx.hessian(f)(X), rlx.jacrev(rlx.grad(f))(X))
    assert np.allclose(rlx.vmap(rlx.grad(f))(np.stack([2 * X, X]))[1], slope)


def test_complex_arguments_and_results_are_refused() -> None:
    """By complex numbers nothing is differentiated."""
    with pytest.raises(DTypeError, match=r"argument 0 is c128\[8\], and only floats have derivatives"):
        rlx.grad(lambda z: np.sum(np.real(z)))(X + 0j)
    with pytest.raises(DTypeError, match=r"vjp: result is c128\[8\]: return the real and imaginary parts"):
        rlx.jit(lambda x: rlx.vjp(lambda v: v * 1j, x)[0])(X)


def cofactors(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = np.zeros_like(a)
    for i, j in np.ndindex(a.shape):
        made[i, j] = (-1) ** (i + j) * np.linalg.det(np.delete(np.delete(a, i, 0), j, 1))
    return made


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_determinants(m: int) -> None:
    """The gradient is the matrix of cofactors, of singular matrices too; batches, and a size that a run tells."""
    rng = np.random.default_rng(m)
    whole, thin = rng.standard_normal((m, m)), rng.standard_normal((m, m - 1))
    slope = rlx.jit(rlx.grad(rlx.det), dims={"x": ("m", "m")})
    for a in (whole, thin @ rng.standard_normal((m - 1, m)), whole[::-1], np.diag(np.arange(m) * 1.0)):
        np.testing.assert_allclose(slope(a), cofactors(a), rtol=1e-9, atol=1e-9)
    many = rng.standard_normal((2, 3, m, m))
    found = rlx.grad(lambda a: np.sum(rlx.det(a)))(many)
    np.testing.assert_allclose(found[1, 2], cofactors(many[1, 2]), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(rlx.vmap(rlx.vmap(rlx.grad(rlx.det)))(many), found)
    second = rlx.hessian(rlx.det)(whole)
    np.testing.assert_allclose(second, rlx.jacrev(rlx.grad(rlx.det))(whole), rtol=1e-8, atol=1e-8)


def second_cofactors(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The second derivatives of a determinant: by two elements, the signed determinant of what is left."""
    m = len(a)
    made = np.zeros((m, m, m, m))
    for i, j, k, n in np.ndindex(made.shape):
        if i != k and j != n:
            rest = np.delete(np.delete(a, [i, k], 0), [j, n], 1)
            sign = (-1) ** (i + j + k + n) * (-1 if (i < k) != (j < n) else 1)
            made[i, j, k, n] = sign * np.linalg.det(rest)
    return made


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_second_derivatives_of_determinants_of_any_rank(m: int) -> None:
    rng = np.random.default_rng(m)
    hessian = rlx.jit(rlx.hessian(rlx.det), dims={"x": ("m", "m")})
    for rank in range(m + 1):
        a = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, m))
        np.testing.assert_allclose(hessian(a), second_cofactors(a), rtol=1e-8, atol=1e-8, err_msg=f"rank {rank}")
        exact = np.round(a * 0)
        exact[:rank, :rank] = np.eye(rank)
        np.testing.assert_allclose(hessian(exact), second_cofactors(exact), atol=1e-12)


def test_scales_of_integers() -> None:
    """Decoded integers: by the scale, for one, one of each row, and one of each block."""
    data = np.arange(24, dtype=np.int8).reshape(4, 6)
    for scale, options in (
        (np.ones(1), {}),
        (np.ones(4), {"axis": 0}),
        (np.ones((4, 3)), {"axis": 1, "block": 2}),
    ):
        zero = np.full(scale.shape, 3, np.int8)
        slope = rlx.grad(lambda s, z=zero, o=options: np.sum(rlx.dequantize(data, s, z, to="f64", **o)))(scale)
        parts = {0: (data - 3.0).sum(keepdims=True)[0], 1: (data - 3.0).sum(1)}
        wanted = (data - 3.0).reshape(4, 3, 2).sum(2) if scale.ndim == 2 else parts[len(options)]
        np.testing.assert_allclose(slope, wanted.reshape(scale.shape))


@pytest.mark.parametrize("options", [{}, {"axis": 1}, {"axis": 1, "block": 2}, {"to": "u4"}])
def test_rounding_that_gradients_go_straight_through(options: dict[str, Any]) -> None:
    """fake_quantize is a pair of ops; its gradient is 1 within range and 0 beyond, in both modes and in slices."""
    x = np.linspace(-1.6, 1.4, 24).reshape(4, 6)
    shapes = {(): (1,), ("axis",): (6,), ("axis", "block"): (4, 3), ("to",): (1,)}
    scale = np.full(shapes[tuple(options)], 0.01 if "to" not in options else 0.1)
    zero = np.full(scale.shape, 3, np.int8) if "to" not in options else None

    def f(x: Any) -> Any:
        return rlx.fake_quantize(x, scale, zero, **options)

    plain = {"to": "i8", **options}
    given = () if zero is None else (zero,)
    shape = {k: v for k, v in plain.items() if k != "to"}
    wanted = rlx.jit(
        lambda x: rlx.dequantize(rlx.ops.quantize(x, scale, *given, **plain), scale, *given, to="f64", **shape)
    )(x)
    assert np.array_equal(rlx.jit(f)(x), wanted)
    low, high = (0, 15) if zero is None else (-131, 124)
    number = np.rint(x / (0.1 if zero is None else 0.01))
    inside = (number >= low) & (number <= high)
    assert 0 < inside.sum() < inside.size
    assert np.array_equal(rlx.grad(lambda x: np.sum(f(x) * 3.0))(x), inside * 3.0)
    assert np.array_equal(rlx.jvp(f, (x,), (x,))[1], inside * x)
    if "axis" not in options:
        assert np.array_equal(rlx.vmap(rlx.grad(lambda r: np.sum(f(r))))(x), inside)


def test_scales_of_rounding() -> None:
    """A number is one; each slice may have one; and what lies within range is found in f32 for narrower floats."""
    x = np.float32([-1.4, -1.28, 0.5, 1.27, 1.4])
    assert np.array_equal(rlx.fake_quantize(x, 0.01), rlx.fake_quantize(x, np.float32(0.01)))

    def each(x: Any) -> Any:
        return np.sum(rlx.vmap(rlx.fake_quantize)(x, np.full(5, 0.01, np.float32)))

    assert np.array_equal(rlx.grad(each)(x), [0, 1, 1, 1, 0])
    halves = np.array([-10, 3], np.float16)
    slope = rlx.grad(lambda x: np.sum(rlx.fake_quantize(x, 1.0, np.uint16(65534), to="u16")))(halves)
    assert np.array_equal(slope, [1, 0])
