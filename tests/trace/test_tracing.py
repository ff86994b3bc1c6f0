"""`rlx.jit` equals the same function in NumPy, traces when it must, and refuses what depends on elements."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import OptionError

X = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_trees_and_closures() -> None:
    """Trees go in and out; closed-over arrays are those of the trace, small and large."""
    w, big = np.ones(6, np.float32), np.full((600, 600), 2, np.float32)
    f = rlx.jit(lambda p, k: {"y": (p["a"] + w, None), "z": [p["b"][0] * k + big[0, 0]], "big": big + k}, device="cpu")
    got = f({"a": X, "b": X}, 3.0)
    w[:] = 9
    assert got["y"][1] is None
    np.testing.assert_array_equal(f({"a": X, "b": X}, 3.0)["y"][0], X + 1)
    np.testing.assert_array_equal(got["z"][0], X[0] * 3 + 2)
    np.testing.assert_array_equal(got["big"], big + 3)
    assert [p.type.shape for p in f.lower({"a": X, "b": X}, 3.0).params] == [(600, 600)]


def test_traces_once_for_each_key() -> None:
    """A new shape, type or static value traces again; the same one doesn't."""
    seen: list[Any] = []

    def f(x: Any, n: int) -> Any:
        seen.append(n)
        return x * n

    g = rlx.jit(f, static=["n"], device="cpu")
    for x, n in ((X, 2), (X, 2), (X, 3), (X[:2], 3), (X, 2)):
        np.testing.assert_array_equal(g(x, n), x * n)
    assert seen == [2, 3, 3]


@pytest.mark.parametrize("use", [bool, int, float, np.asarray])
def test_elements_are_not_known(use: Any) -> None:
    """A branch on a traced value is an error that names the way out."""
    with pytest.raises(OptionError, match=r"rlx\.where"):
        rlx.jit(lambda x: use(x) + 1)(X)


@pytest.mark.parametrize(
    "key", [0, -1, slice(None, None, -2), (slice(1, 3), None), (..., 2), (None, 1), [2, 0], (slice(None), [1, 1])]
)
def test_indexing_is_that_of_numpy(key: Any) -> None:
    """Ints, slices, None, ellipsis and integer arrays pick what NumPy picks."""
    np.testing.assert_array_equal(rlx.jit(lambda x: x[key] + 0, device="cpu")(X), X[key])


def test_operators_are_those_of_numpy() -> None:
    """The integer operators round and sign as NumPy's do."""
    i = np.array([-7, -1, 5, 8], np.int32)
    f = rlx.jit(lambda x: [x // 3, x % 3, abs(x), x & 3, x | 1, x ^ 5, ~x, ~(x < 2)], device="cpu")
    for got, want in zip(f(i), [i // 3, i % 3, abs(i), i & 3, i | 1, i ^ 5, ~i, ~(i < 2)], strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(rlx.jit(lambda x: x.T, device="cpu")(X), X.T)


def test_names_and_signatures() -> None:
    """`dir` lists what a user can call, and signatures show inputs and attributes with their defaults."""
    assert {"jit", "softmax", "and_", "while_"} <= set(dir(rlx))
    assert not {"OPS", "cumulative", "register_methods", "Any"} & set(dir(rlx))
    assert str(inspect.signature(rlx.softmax)).startswith("(x, /, *, axis: 'int'")
    for name in dir(rlx.ops):
        if name.removesuffix("_") in rlx.ops.OPS:
            assert inspect.signature(getattr(rlx.ops, name))
            assert getattr(rlx.ops, name).__doc__


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_floor_division_at_the_ends_of_a_type(dtype: Any) -> None:
    """Towards minus infinity as in NumPy, where nothing on the way may wrap."""
    ends = np.iinfo(dtype)
    x = np.array([ends.min, ends.min + 1, 0, 1, ends.max], dtype)
    divisors = [3, 7, ends.max] if dtype is np.uint8 else [3, -3, 7, ends.max, ends.min]
    for d in divisors:
        b = np.array(d, dtype)
        got = rlx.jit(lambda x, b: x // b, device="cpu")(x, b)
        assert np.array_equal(got, x // b), d


def test_an_argument_whose_default_is_a_string_is_static() -> None:
    @rlx.jit(device="cpu")
    def reduced(x: Any, mode: str = "sum", *, how: bytes = b"") -> Any:
        return (x.sum() if mode == "sum" else x.mean()) + (1 if how else 0)

    x = np.float32([[1, 2], [3, 6]])
    assert reduced(x) == 12
    assert reduced(x, "mean") == reduced(x, mode="mean") == 3
    assert reduced(x, how=b"more") == 13
    with pytest.raises(OptionError, match="mode"):
        reduced(x, ["mean"])


class Scaled:
    """An object that is called, with a method."""

    factor = 3.0

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any, shift: float = 1.0) -> Any:
        return x * self.factor + shift


def scaled(x: Any, factor: Any, *, shift: Any = 0.5) -> Any:
    return x * factor + shift


CALLABLES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (np.tanh, (X,)),
    (np.add, (X, X[0])),
    (np.matmul, (X, X.T)),
    (np.divmod, (X, X + 1)),
    (np.isnan, (X,)),
    (np.add.reduce, (X,)),
    (np.sum, (X,)),
    (np.concatenate, ([X, X],)),
    (np.linalg.norm, (X,)),
    (partial(np.sum, axis=1), (X,)),
    (partial(np.add, X), (X,)),
    (partial(scaled, factor=2.0), (X,)),
    (partial(partial(scaled, shift=X), X), (X,)),
    (Scaled(), (X,)),
    (Scaled().method, (X,)),
    (abs, (X,)),
    (sum, (X,)),
    (operator.sub, (X, X)),
    (operator.itemgetter(1), (X,)),
]


@pytest.mark.parametrize("function, args", CALLABLES, ids=lambda x: getattr(x, "__name__", None))
def test_any_callable_can_be_traced(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    got, want = rlx.jit(function, device="cpu")(*args), function(*args)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_function_of_an_op_can_be_traced() -> None:
    softmax = rlx.jit(rlx.softmax, static="axis", device="cpu")
    np.testing.assert_allclose(softmax(X).sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(softmax(X, axis=0).sum(axis=0), 1, rtol=1e-6)


def test_defaults_that_are_left_out_are_no_arguments() -> None:
    """The function has them as they are, and may branch on them; each set of arguments given is a trace."""

    def function(x: Any, scale: Any = 2, negate: bool = False, *, shift: Any = None, how: str = "add") -> Any:
        made = x * scale + (0 if shift is None else shift)
        made = made if how == "add" else made - 1
        return -made if negate else made

    made = rlx.jit(function, device="cpu", static="negate")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}),
        ((X, 3), {}),
        ((X,), {"shift": 3}),
        ((X,), {"how": "less"}),
        ((X,), {"negate": True}),
        ((X, 2, False), {"how": "add", "shift": X}),
    ]
    for args, named in calls:
        np.testing.assert_allclose(made(*args, **named), function(*args, **named))
    assert len(made.traces) == len(calls)
    assert "the static argument how is 'less' where there was none" in made.traces[3].reason
    np.testing.assert_allclose(made(x=X, scale=3), X * 3)
    assert len(made.traces) == len(calls)
    assert [spec.name for spec in made.compile(X).inputs] == ["x"]


def test_what_cannot_be_traced_is_an_error_of_rlx() -> None:
    for function in (max, int, str, print, len, np.vectorize(abs), np.frompyfunc(abs, 1, 1), Scaled):
        with pytest.raises(OptionError):
            rlx.jit(function, device="cpu")(*[] if function is Scaled else [X, X] if function is max else [X])
