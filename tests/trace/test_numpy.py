"""A function of NumPy's functions gives under `rlx.jit` what it gives on arrays: values, shapes and element types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ops.numpy import FUNCTIONS
from rlx.ops.numpy.elementwise import UFUNCS
from rlx.ops.numpy.registry import name_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 6)).astype(np.float32)
Y = RNG.standard_normal((4, 6)).astype(np.float32)
V = RNG.standard_normal(6).astype(np.float32)
W = RNG.standard_normal((6, 3)).astype(np.float32)
C = RNG.standard_normal((2, 3, 4)).astype(np.float32)
I = RNG.integers(-9, 9, (4, 6)).astype(np.int32)
J = np.where(I == 0, 3, I)
U = RNG.integers(0, 250, (4, 6)).astype(np.uint8)
B = X > 0
N = np.array([1.0, np.nan, -np.inf, np.inf, 0.0, -2.5], np.float32)


def check(function: Callable[..., Any], *arrays: Any) -> None:
    """The function of graph values equals that of arrays."""
    with np.errstate(all="ignore"):
        expected = function(*arrays)
    got = rlx.jit(function, device="reference")(*arrays)
    pairs = list(zip(got, expected, strict=True)) if isinstance(expected, list | tuple) else [(got, expected)]
    for a, b in pairs:
        b = np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-12 if b.dtype == np.float64 else 3e-5, atol=2e-6)
        else:
            np.testing.assert_array_equal(a, b)


UNARY = [
    np.negative, np.positive, np.absolute, np.fabs, np.sign, np.square, np.exp, np.exp2, np.expm1, np.sin, np.cos,
    np.tan, np.arctan, np.sinh, np.cosh, np.tanh, np.arcsinh, np.cbrt, np.deg2rad, np.rad2deg, np.radians, np.degrees,
    np.floor, np.ceil, np.rint, np.trunc, np.isnan, np.isinf, np.isfinite, np.signbit, np.logical_not, np.conjugate,
]  # fmt: skip
POSITIVE = [np.log, np.log2, np.log10, np.log1p, np.sqrt, np.reciprocal]
WITHIN_ONE = [np.arcsin, np.arccos, np.arctanh]
BINARY = [
    np.add, np.subtract, np.multiply, np.divide, np.floor_divide, np.remainder, np.fmod, np.maximum, np.minimum,
    np.fmax, np.fmin, np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.logical_and,
    np.logical_or, np.logical_xor, np.arctan2, np.hypot, np.logaddexp, np.copysign, np.heaviside,
]  # fmt: skip
OF_INTEGERS = [np.bitwise_and, np.bitwise_or, np.bitwise_xor]


def test_ufuncs_of_floats() -> None:
    """Every ufunc there is, in one function for each number of inputs."""
    positive = np.abs(X) + np.float32(0.1)
    check(lambda x: [f(x) for f in UNARY], X)
    check(lambda x: [f(x) for f in POSITIVE], positive)
    check(lambda x: [f(x) for f in WITHIN_ONE] + [np.arccosh(x + 2)], np.tanh(X))
    check(lambda x, y: [f(x, y) for f in BINARY], X, Y)
    check(lambda x, y: [np.power(x, y), np.float_power(x, y), *np.divmod(x, y)], positive, Y)
    check(lambda x: [np.isnan(x), np.isfinite(x), np.nan_to_num(x), np.fmax(x, 0), np.maximum(x, 0), np.sign(x)], N)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32)
    check(lambda a: [np.arctan2(a[:, None], a), np.hypot(a[:, None], a), np.logaddexp(a[:, None], a)], special)
    tested = {*UNARY, *POSITIVE, *WITHIN_ONE, *BINARY, *OF_INTEGERS, np.arccosh, np.power, np.float_power, np.invert}
    assert set(UFUNCS) - tested == {np.left_shift, np.right_shift, np.matmul}


def test_integers_are_rounded_to_integers() -> None:
    x = np.array([[15, -25], [7, 12345]])
    for decimals in (0, 2, -1, -3):
        check(lambda a, decimals=decimals: np.round(a, decimals), x)


def test_composites_keep_their_accuracy_when_compiled() -> None:
    """Small and large arguments, whose errors cancel only as long as no pass reorders what they are made of."""
    x = np.array([1e-8, 1e-6, -1e-7, 0.5, 3, 0, 1e10, np.inf, -0.999999, -1.0], np.float32)

    def f(x: Any) -> Any:
        return [np.log1p(x), np.expm1(x), np.hypot(x, x), np.arctan2(x, -x), np.floor_divide(x, np.float32(0.3))]

    with np.errstate(all="ignore"):
        expected = f(x)
    for a, b in zip(rlx.jit(f, device="cpu")(x), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


def test_ufuncs_of_integers_and_bools() -> None:
    """Integers are rounded, widened and shifted as NumPy does; bools are numbers where NumPy says so."""
    exact = [f for f in BINARY if f not in (np.divide, np.arctan2, np.hypot, np.logaddexp, np.copysign, np.heaviside)]
    check(lambda x, y: [f(x, y) for f in (*exact, np.divide, *OF_INTEGERS)], I, J)
    check(lambda x: [np.exp(x), np.sqrt(np.abs(x)), np.floor(x), ~x, x << 2, x >> 2, -x, abs(x), np.invert(x)], I)
    check(lambda x: [x >> 3, x << 1, ~x, x + x], U)
    check(lambda b: [b + b, b * b, b | b, b ^ b, ~b, np.maximum(b, ~b), np.sum(b), b.any(), b.all(0), b > ~b], B)


def test_element_types_follow_numpy() -> None:
    """Python numbers take the type of what they meet, arrays of other types are promoted, arguments too."""
    check(
        lambda x, i: [x + 1, x * 2.5, i + 1, i * 0.5, i / 2, 2 ** i.clip(0, 5), x + i, x < i, i // 2, 7 % (i + 20)],
        X,
        I,
    )
    check(lambda u, i: [u + i, u * 3, np.maximum(u, i), np.where(u > 9, u, i), np.concatenate([u, i])], U, I)
    check(lambda x, d: [x + d, np.array([1, 2, 3, 4, 5, 6], np.int16) * x], X, X.astype(np.float64))
    f = rlx.jit(lambda x, k: [x * k, k + 1, x.sum() / k], device="cpu")
    assert [a.dtype.name for a in f(X, 3)] == ["float32", "int64", "float32"]
    assert [a.dtype.name for a in f(I, 0.5)] == ["float64", "float64", "float64"]
    with pytest.raises(DTypeError, match=r"np\.add: the number 300 does not fit the element type u8"):
        rlx.jit(lambda u: u + 300)(U)
    with pytest.raises(DTypeError, match="boolean subtract"):
        rlx.jit(lambda b: b - b)(B)


def test_widening_to_f64_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The NumPy rule by which one f64 scalar makes everything f64 is followed, and logged with its line."""
    rlx.jit(lambda x: x * np.sqrt(2.0), device="cpu").lower(X)
    assert "np.multiply of float32, float64 gives float64" in caplog.text
    assert "test_numpy.py" in caplog.text


REDUCTIONS = [np.sum, np.prod, np.mean, np.max, np.min, np.var, np.std, np.ptp]


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), ()])
def test_reductions(axis: Any) -> None:
    """An int, several axes, or none given; axes kept or not."""
    check(lambda x: [f(x, axis=axis) for f in REDUCTIONS] + [f(x, axis=axis, keepdims=True) for f in REDUCTIONS], C)


def test_searches_sums_and_sorts() -> None:
    """Along an axis or of the flat array."""
    check(lambda x: [np.argmax(x), np.argmin(x, axis=1), np.argmax(x, axis=0, keepdims=True), x.argmax(-1)], X)
    check(lambda x: [np.cumsum(x), np.cumsum(x, axis=1), np.cumprod(x, axis=0), np.diff(x), np.diff(x, 2, axis=0)], X)
    check(lambda x: [np.sort(x), np.sort(x, axis=None), np.argsort(x, axis=0), x.argsort(), np.median(x, axis=0)], X)
    check(lambda x: [np.sort(x), np.argsort(x), np.median(x), np.nansum(x), np.nanmax(x[:2]), np.nanmin(x)], N)
    check(lambda i: [np.sum(i), np.prod(i, axis=0), np.mean(i, axis=1), np.cumsum(i, axis=1), i.max(), np.var(i)], I)
    check(lambda x, w: [np.average(x, axis=0), np.average(x, weights=w, axis=1), np.count_nonzero(x > 0, axis=1)], X, V)
    check(lambda x: [np.nanmean(x[:2]), np.trapezoid(x, dx=0.5), np.trapezoid(x, x=x), np.add.reduce(x)], N[[0, 4, 5]])
    check(lambda x: [np.add.accumulate(x), np.maximum.reduce(x, axis=1), np.subtract.outer(x[0], x[1])], X)
    check(lambda x, y: [np.isclose(x, y), np.allclose(x, x), np.array_equal(x, x)], X, Y)


def test_shapes() -> None:
    """Axes moved, added, dropped, repeated and turned."""
    check(lambda x: [x.reshape(3, -1), x.reshape((8, 3)), np.reshape(x, -1), x.ravel(), x.T, x.transpose(1, 0)], X)
    check(
        lambda c: [np.transpose(c, (1, 0, 2)), np.swapaxes(c, 0, 2), np.moveaxis(c, 0, -1), c.mT, np.permute_dims(c)], C
    )
    check(lambda c: [np.expand_dims(c, (0, 2)), np.squeeze(c[:1]), c[:1].squeeze(0), np.atleast_2d(c[0, 0])], C)
    check(
        lambda v: [np.broadcast_to(v, (3, 6)), np.repeat(v, 2), np.tile(v, (2, 2)), v.repeat(3), np.atleast_1d(v[0])], V
    )
    check(lambda c: [np.repeat(c, 2, axis=1), np.tile(c, 2), np.flip(c), np.flip(c, 1), np.fliplr(c), np.flipud(c)], C)
    check(
        lambda x: [
            np.roll(x, 2),
            np.roll(x, -1, axis=1),
            np.roll(x, (1, 2), (0, 1)),
            *(np.rot90(x, k) for k in range(4)),
        ],
        X,
    )
    check(lambda x: [np.pad(x, 1), np.pad(x, ((1, 2), (0, 1)), mode="edge"), np.pad(x, 2, mode="reflect")], X)
    check(lambda x: [np.take(x, [0, 2], axis=1), np.take(x, 7), np.take(x, [9, -9], axis=0, mode="clip")], X)
    check(lambda x, i: [np.take_along_axis(x, i, axis=1), np.diagonal(x), np.trace(x, 1), np.diagonal(x, -1)], X, I % 6)
    check(lambda c: [np.shape(c)[0] * c, np.ndim(c) + c, np.size(c) * c, c * len(c), c.copy(), np.round(c, 1)], C)
    check(lambda c: [c.shape[0] * c, c.ndim + c, c / c.size, c.sum() / c.size], C)


def test_joining_and_products() -> None:
    """Several arrays in, one out; one in, several out."""
    check(
        lambda x, y: [
            np.concatenate([x, y]),
            np.concatenate((x, y), axis=None),
            np.stack([x, y], 1),
            np.vstack([x, y]),
        ],
        X,
        Y,
    )
    check(
        lambda x, y: [np.hstack([x, y]), np.column_stack([x[:, 0], y]), np.append(x, y), np.hstack([x[0], y[0]])], X, Y
    )
    check(lambda x: [*np.split(x, 2), *np.split(x, [1, 3]), *np.split(x, 3, axis=1), *np.array_split(x, 3)], X)
    check(
        lambda x, v: [*np.broadcast_arrays(x, v), *np.meshgrid(x[0], v[:2]), *np.meshgrid(v[:2], v, indexing="ij")],
        X,
        V,
    )
    check(
        lambda x, w, v: [x @ w, np.dot(x, v), np.dot(v, v), np.einsum("ij,jk->k", x, w), np.inner(x, x), v @ w], X, W, V
    )
    check(lambda c, v: [np.tensordot(c, c, 2) if False else np.tensordot(c, c, ([0, 1], [0, 1])), np.outer(v, v)], C, V)
    check(lambda v: [np.vdot(v, v), np.cross(v[:3], v[3:]), np.diag(v), np.diag(v, 1), np.linalg.norm(v)], V)
    check(lambda x: [np.tril(x), np.triu(x, 1), np.linalg.norm(x, axis=1), np.linalg.norm(x, np.inf, 0), np.diag(x)], X)
    check(lambda x: [np.linalg.norm(x, 1, axis=0), np.linalg.det(x[:, :4]), np.zeros_like(x), np.full_like(x, 2)], X)
    check(
        lambda x, y: [
            np.where(x > y, x, y),
            np.where(x > 0, x, 0),
            np.clip(x, -1, 1),
            x.clip(max=0),
            np.clip(x, y, None),
        ],
        X,
        Y,
    )
    check(lambda x: [np.ones_like(x, dtype=np.int8), np.empty_like(x) * 0, x.astype(int), x.astype("f2"), np.fix(x)], X)


def test_numerical_functions() -> None:
    """Quantiles, interpolation, searches, convolutions, polynomials and choices."""
    shares = [0.0, 0.3, 1.0]
    check(lambda x: [np.quantile(x, 0.25), np.quantile(x, shares, axis=1), np.percentile(x, 40, axis=0)], X)
    check(lambda x: [np.quantile(x, 0.5, axis=1, keepdims=True), np.percentile(x, shares), np.quantile(x, 0.5)], X)
    check(lambda v: [np.searchsorted(np.sort(v), v), np.searchsorted(np.sort(v), v[:2], side="right")], V)
    grid = np.array([-2.0, -0.5, 0.1, 1.5])
    check(lambda x: [np.interp(x, grid, grid**2), np.interp(x, grid, grid, left=9.0)], X)
    check(lambda v: [np.convolve(v, v[:3], m) for m in ("full", "same", "valid")] + [np.convolve(v[:2], v)], V)
    check(lambda v: [np.convolve(v, v[:4], m) for m in ("full", "same", "valid")], V)
    check(lambda x: [np.polyval([1.0, -2.0, 3.0], x), np.sinc(x), np.gradient(x, axis=1), np.gradient(x, axis=0)], X)
    check(lambda x, y: np.select([x > 1, x > 0], [x, y], 7.0), X, Y)
    check(lambda i: [np.isin(i, [1, 2, -3]), np.isin(i, [1], invert=True)], I)
    check(
        lambda x, w: [np.kron(x[:2, :2], w[:2]), np.kron(x[0], w[0]), np.dstack([x, x]), np.dstack([x[0], x[1]])], X, W
    )


KEYS: list[Any] = [
    0, -1, slice(None, None, -2), (slice(1, 3), None), (..., 2), (None, 1), [1, 0], (slice(None), [1, 1]), (1, 2, 3),
    (0, slice(None), [1, 3]), ([0, 1], [2, 0]), ([0, 1], slice(None), [1, 3]), (slice(None), [0, 2], [1, 3]),
    ([[0], [1]], [[0, 2]]), (None, [0, 1], 1), (slice(None), 1, [0, 1]), (..., None, 1), slice(5, 1),
    (1, ..., slice(-2, None)), (slice(None), np.array([True, False, True])), np.array([True, False]),
    (slice(None), slice(None), -1), np.array(1), ([], ), (slice(0, 2), [1, 2], slice(None, None, 2)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_indexing(key: Any) -> None:
    """Basic and advanced indexing, and the same elements changed by `at`."""
    check(lambda c: c[key] + 0, C)
    for name, change in (("set", lambda a, v: v), ("add", np.add), ("multiply", np.multiply), ("min", np.minimum)):
        expected = C.copy()
        expected[key] = change(expected[key], np.float32(0.25))
        got = rlx.jit(lambda c, name: getattr(c.at[key], name)(0.25), static="name", device="reference")(C, name)
        if name in ("set", "min"):  # the others combine all where a key names an element twice
            np.testing.assert_array_equal(got, expected)


def test_indexing_by_values() -> None:
    """Indices that the run decides: numbers, arrays, several at once, and windows from a place on."""
    i = np.array([3, 0, -2], np.int32)
    check(lambda x, i: [x[i], x[i[0]], x[:, i], x[i[0], i[1]], x[i, i], x[i[1] + np.arange(2)]], X, i)
    check(lambda x, n: x[n] + x[-1], X, 2)
    got = rlx.jit(
        lambda x, i: [x.at[i[1]].set(x[1]), x.at[i].add(1), x.at[:, i[2]].set(7), x.at[i[:1], 1:3].max(9)], device="cpu"
    )(X, i)
    expected = [X.copy() for _ in range(4)]
    expected[0][0], expected[1][i], expected[2][:, -2], expected[3][i[:1], 1:3] = X[1], X[i] + 1, 7, 9
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    twice = rlx.jit(lambda x: [x.at[[1, 1]].add(1), x.at[x > 0].set(0), x.at[0].apply(np.exp)], device="cpu")(X)
    np.testing.assert_allclose(twice[0][1], X[1] + 2, rtol=1e-6)
    np.testing.assert_array_equal(twice[1], np.where(X > 0, 0, X))
    np.testing.assert_allclose(twice[2], np.concatenate([np.exp(X[:1]), X[1:]]), rtol=1e-6)


def test_dynamic_sizes() -> None:
    """One trace slices, reshapes and counts at any size, as NumPy does at each."""
    keys: list[Any] = [slice(2), slice(-2, None), slice(None, -1), slice(None, None, -1), slice(None, None, 2)]
    keys += [slice(1, 4), -1, 0, slice(-3, -1), slice(4, None, -2)]

    def f(x: Any) -> Any:
        n = x.shape[0]
        parts = [x[k] + 0 for k in keys] + [x.reshape(-1), x.sum(0) / n, x.mean(0), x * n, x[n - 1], np.roll(x, 1, 0)]
        return [*parts, x.at[0].set(0), x.at[1:].add(1), np.concatenate([x, x]), np.zeros_like(x), np.sort(x, 0)]

    g = rlx.jit(f, dims={"x": ("n", None)}, device="cpu")
    for n in (1, 2, 5, 9):
        x = RNG.standard_normal((n, 3)).astype(np.float32)
        want = f_numpy(f, x)
        for a, b in zip(g(x), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(g.traces) == 1


def f_numpy(f: Any, x: Any) -> Any:
    """The function on an array: with `at` as ndarray has none."""

    class WithAt(np.ndarray):
        @property
        def at(self) -> Any:
            outer = self

            class Change:
                def __getitem__(self, key: Any) -> Any:
                    def change(fn: Any) -> Any:
                        made = np.array(outer)
                        made[key] = fn(made[key])
                        return made

                    class Place:
                        set = staticmethod(lambda v: change(lambda old: v))
                        add = staticmethod(lambda v: change(lambda old: old + v))

                    return Place()

            return Change()

    return [np.asarray(part) for part in f(x.view(WithAt))]


def test_arrays_of_dynamic_sizes() -> None:
    """`rlx.numpy` makes arrays of sizes that runs decide, and is NumPy otherwise."""
    import rlx.numpy as rnp

    def f(x: Any) -> Any:
        n = x.shape[0]
        made = [
            rnp.zeros((n, 2)),
            rnp.ones(n, np.int8),
            rnp.arange(n),
            rnp.arange(1, n, 2),
            rnp.eye(n),
            rnp.full((n,), 2.5),
        ]
        return [*made, rnp.linspace(0, 1, n), rnp.array([x[0], 3.0]), rnp.sum(x), rnp.arange(n, 0, -1)]

    g = rlx.jit(f, dims={"x": ("n",)}, device="cpu")
    for n in (1, 4):
        x = np.arange(n, dtype=np.float32)
        want = [np.zeros((n, 2)), np.ones(n, np.int8), np.arange(n), np.arange(1, n, 2), np.eye(n), np.full(n, 2.5)]
        want += [np.linspace(0, 1, n), np.array([x[0], 3.0]).astype(np.float32), x.sum(), np.arange(n, 0, -1)]
        for a, b in zip(g(x), want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b)
    assert rnp.pi == np.pi
    np.testing.assert_array_equal(rnp.zeros(3), np.zeros(3))
    assert rlx.concatenate is np.concatenate


def test_hand_built_graphs_stay_strict() -> None:
    """NumPy's functions work on the values of a graph built by hand too, where no element type is changed."""
    g = rlx.Graph()
    x, d = g.input("x", (2, 3)), g.input("d", (3,), "f64")
    assert np.exp(x).dtype is x.dtype
    assert np.sum(x, axis=1).shape == (2,)
    assert (np.ones(3, np.float32) + x).shape == (2, 3)
    assert (x == d) is False
    with pytest.raises(DTypeError, match="cast one of them"):
        np.add(x, d)


@pytest.mark.parametrize(
    "function, message",
    [
        (np.linalg.inv, r"np\.linalg\.inv has no counterpart for graph values: rlx has no solver"),
        (np.unique, r"rlx\.unique\(x, count="),
        (np.nonzero, r"rlx\.non_zero\(x, count="),
        (lambda x: np.where(x > 0), r"rlx\.non_zero takes their count"),
        (lambda x: x[x > 0], r"use np\.where\(mask, x, other\)"),
        (lambda x: np.sum(x, where=x > 0), r"np\.sum of graph values: .*'where'"),
        (lambda x: np.exp(x, out=np.zeros((4, 6), np.float32)), r"write a = a \+ x"),
        (lambda x: np.reshape(x, (6, 4), order="F"), "only the row-major order"),
        (lambda x: x[x[0, 0].astype(int) : 3], r"x\[i \+ np\.arange\(n\)\]"),
        (lambda x: x.sort(), r"np\.sort\(x\)"),
        (lambda x: np.linalg.norm(x, 2, axis=(0, 1)), "only Frobenius"),
        (lambda x: np.repeat(x, [1, 2, 3, 4], axis=0), "expected one number"),
    ],
)
def test_what_is_not_there_says_so(function: Any, message: str) -> None:
    """An error names the function and the way out."""
    with pytest.raises(OptionError, match=message):
        rlx.jit(function)(X)


def test_indexing_errors() -> None:
    for key, kind in ((4, IndexError), ((0, 0, 0), ShapeError), ([9], IndexError), ((..., ...), OptionError)):
        with pytest.raises(kind):
            rlx.jit(lambda x: x[key], device="reference").lower(X)  # noqa: B023  # called at once
    with pytest.raises(DTypeError, match=r"0\.5 does not fit"):
        rlx.jit(lambda i: i.at[0].set(0.5))(I)


def test_every_function_is_documented_and_tested() -> None:
    """Each of NumPy's functions that is there says in a sentence what it does."""
    page = (Path(__file__).parents[2] / "docs" / "functions.md").read_text()
    listed = re.search(r"These functions of NumPy are there: (.*?)\.\n\n", page, re.DOTALL)
    assert listed
    names = sorted({name_of(function).removeprefix("np.") for function in FUNCTIONS})
    assert re.sub(r"\s+", " ", listed[1]).split(", ") == names
    for function, ours in FUNCTIONS.items():
        assert isinstance(function, np.ufunc) or ours.__doc__ or ours.__name__.startswith("_"), function
