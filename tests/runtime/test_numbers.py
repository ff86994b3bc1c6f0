"""Numbers of NumPy, which sizes often are, are taken wherever an option takes those of Python; bools aren't."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.errors import OptionError
from rlx.models.sampling import Sampling
from rlx.units import as_int, as_number, with_ints

DIGITS = rlx.demo.path("digits")
X = np.ones(3, np.float32)
NUMBERS = {"budget": 10**9, "threads": 1, "alignment": 128, "search": 1000, "queue": 2}


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.array])
def test_integers_of_every_kind(kind: Any) -> None:
    assert as_int(kind(7)) == 7
    assert type(as_int(kind(7))) is int
    assert as_number(kind(7)) == 7
    assert with_ints({"x": (kind(1), [None, kind(2)], "n")}) == {"x": (1, [None, 2], "n")}


def test_axes_of_a_mapping() -> None:
    assert [type(key) for key in with_ints({np.int64(3): 1.5, "x": 1})] == [int, str]


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float32(1), "1", None, np.ones(1, np.int64), b"1"])
def test_what_is_no_integer(value: Any) -> None:
    assert as_int(value) is None
    kept = with_ints(value)
    assert kept is value


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), np.array(True), "1", np.array("1"), None, 1j, np.ones(2), b"1"]
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_number(value: Any) -> None:
    assert as_number(value) is None


def test_numbers_of_narrow_types() -> None:
    assert as_number(np.float16(0.5)) == as_number(ml_dtypes.bfloat16(0.5)) == 0.5


OTHERS = [
    np.array(True),
    np.array("1"),
    np.complex64(1 + 2j),
    np.datetime64(3, "s"),
    np.timedelta64(5),
    np.array(True, object),
    np.void(b"1234"),
]


class Truth:
    """A bool of a library whose bools are indices, as those of torch are."""

    dtype = "torch.bool"

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize("value", [*OTHERS, Truth()], ids=lambda value: type(value).__name__)
def test_what_only_converts_to_a_number(value: Any) -> None:
    """Bools, texts, times and complex numbers of array libraries are none, though Python converts them."""
    assert as_int(value) is None
    assert as_number(value) is None


@pytest.mark.parametrize("name", NUMBERS)
def test_options_are_pythons_numbers_afterwards(name: str) -> None:
    made = rlx.CompileOptions().with_options({name: np.int64(NUMBERS[name])})
    assert made == rlx.CompileOptions().with_options({name: NUMBERS[name]})
    assert type(getattr(made, name)) is int
    for wrong in (True, np.bool_(True), 1.5, np.float64(2)):
        with pytest.raises(OptionError, match=name):
            rlx.CompileOptions().with_options({name: wrong})


def test_sizes_of_loads_and_estimates() -> None:
    two, hi = np.int64(2), np.int32(4)
    given: list[Any] = [two, (two, hi), [np.uint8(1), hi]]
    for dims in given:
        plain = rlx.load(DIGITS, device="cpu", dims={"batch": with_ints(dims)})
        model = rlx.load(DIGITS, device="cpu", dims={"batch": dims})
        assert [str(spec) for spec in model.inputs] == [str(spec) for spec in plain.inputs]
    whole = rlx.load(DIGITS, device="cpu", dims={"image": (two, np.int64(1), np.int64(8), 8)})
    assert whole.inputs[0].shape == (2, 1, 8, 8)
    named = rlx.load(DIGITS, device="cpu", dims={"image": {np.int64(0): "n"}, "n": two})
    assert named.inputs[0].shape == (2, 1, 8, 8)
    assert rlx.estimate(DIGITS, dims={"batch": two}, budget=np.int64(10**9)).peak_bytes > 0


def graph(n: Any) -> rlx.Graph:
    g = rlx.Graph("g")
    g.output(rlx.tanh(g.input("x", (n, np.int64(3)))), "y")
    return g


def squares(a: Any, b: Any) -> Any:
    return rlx.reduce_sum(a * b, keepdims=False)


ONE = np.int64(1)
CALLS: dict[str, Callable[[], Any]] = {
    "Dim": lambda: rlx.Dim("n", ONE, np.int64(8), multiple=ONE).terms,
    "choose(at=)": lambda: rlx.choose(graph(rlx.Dim("n")), at={"n": np.int64(5)}, calibrate=False).at,
    "profile": lambda: len(rlx.compile(graph(4), device="cpu").profile([np.ones((4, 3), np.float32)], repeat=ONE)),
    "DevicePolicy": lambda: rlx.DevicePolicy(benchmark=ONE, expected_calls=ONE),
    "variants": lambda: rlx.load(DIGITS, device="cpu", variants=ONE).device,
    "Buckets": lambda: rlx.Buckets(graph(rlx.Dim("n", 1, 8)), {"n": [np.int64(4), np.int64(8)]}, device="cpu").ladder,
    "grad": lambda: rlx.grad(squares, argnums=ONE)(X, X * 2).tolist(),
    "grad of several": lambda: [g.tolist() for g in rlx.grad(squares, argnums=np.array([1, 0]))(X, X * 2)],
    "jacfwd": lambda: rlx.jacfwd(lambda a, b: a * b, argnums=ONE)(X, X).tolist(),
    "jacrev": lambda: rlx.jacrev(lambda a, b: a * b, argnums=ONE)(X, X).tolist(),
    "vmap": lambda: rlx.vmap(lambda a: a.sum(), in_axes=np.int64(0), out_axes=np.int64(0))(np.ones((2, 3))).tolist(),
    "static_argnums": lambda: rlx.jit(lambda a, n: a * n, static_argnums=ONE)(X, 3).tolist(),
    "jit(dims=)": lambda: rlx.jit(lambda a: a * 2, dims={"a": {ONE * 0: "n"}, "n": (ONE, np.int64(9))})(X).tolist(),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_take_numbers(name: str) -> None:
    """With NumPy's numbers they give what they give with Python's."""
    code = CALLS[name].__code__
    own = {"ONE": 1}
    plain = type(CALLS[name])(code, {**globals(), **own, "np": _Plain()})
    assert CALLS[name]() == plain()


class _Plain:
    """numpy, whose integers are Python's."""

    int64 = int

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def test_sampling() -> None:
    made = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7))  # type: ignore[arg-type]
    assert made == Sampling(temperature=0.5, top_k=3, seed=7)
    assert all(not isinstance(value, np.generic) for value in dataclasses.asdict(made).values())
    for wrong in ({"top_k": 1.0}, {"top_k": True}, {"temperature": "1"}, {"seed": np.bool_(True)}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Sampling(**wrong)  # type: ignore[arg-type]
