"""One rule for casts: folded, one by one, in vectors, fused with others, and on every device."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.ir.casting import cast, ends, held
from rlx.ir.dtype import DTYPES, DType
from rlx.kernels.expr import Const
from rlx.kernels.lowering import Lowering
from rlx.ops.base import apply
from rlx.ops.elementwise import Cast, Clip, Neg
from rlx.passes.fold import fold
from rlx.testing.interpret import check_op

F64 = DTYPES["f64"]
REAL = [name for name, dtype in DTYPES.items() if dtype.kind not in "cs"]
WHOLE = [name for name in REAL if DTYPES[name].is_integer]


def edges(dtype: DType) -> Any:
    """The values of a type around the ends of every integer type, beside halves, and what is no number."""
    numbers = {0, 1, -1, 0.5, -0.5, 0.99, -0.99, 1.5, 1e10, -1e10, 1e30, -1e30}
    for name in WHOLE:
        for end in ends(DTYPES[name]):
            numbers |= {end, end + 1, end - 1, end + 0.5, end - 0.5, end * 2, float(end)}
            if dtype.name in ("f32", "f64"):
                kind = dtype.numpy.type
                numbers |= {float(np.nextafter(kind(end), kind(toward))) for toward in (-np.inf, np.inf)}
    if dtype.is_integer:
        low, high = ends(dtype)
        carrier = np.uint64 if dtype.name == "u64" else np.int64
        return np.array(sorted({int(x) for x in numbers if low <= int(x) <= high}), carrier).astype(dtype.numpy)
    if dtype.kind == "b":
        return np.array([False, True])
    special = [np.nan, np.inf, -np.inf, -0.0]
    with np.errstate(all="ignore"):
        return np.array([*special, *sorted(map(float, numbers))]).astype(dtype.numpy)


def as_whole(x: Any, to: DType) -> int:
    """The rule for integers and bool, by Python's exact numbers."""
    number = x if isinstance(x, int) else float(x)
    if to.kind == "b":
        return int(number != 0)
    low, high = ends(to)
    if isinstance(number, int):
        return (number - low) % (1 << to.bits) + low
    if not math.isfinite(number):
        return 0 if math.isnan(number) else high if number > 0 else low
    return min(max(math.trunc(number), low), high)


@pytest.mark.parametrize("source", REAL)
def test_the_rule(source: str) -> None:
    values = edges(DTYPES[source])
    exact = [int(x) if not DTYPES[source].is_float else float(x) for x in values]
    for target in map(DTYPES.get, REAL):
        assert target is not None
        made = cast(values, target)
        assert made.dtype == target.numpy
        assert made.shape == values.shape
        if not target.is_float:
            assert [int(x) for x in made] == [as_whole(x, target) for x in exact], target
        for x in (values[:0], np.asarray(values[0])):
            assert cast(x, target).shape == x.shape


@pytest.mark.parametrize("source", REAL)
def test_folded_casts(source: str) -> None:
    """By the pass that folds, and in a lowering: of an array, and of a number of a kernel."""
    values = edges(DTYPES[source])
    g = rlx.Graph("folded")
    x = g.constant(values)
    for target in REAL:
        g.output(apply(Cast(DTYPES[target]), x), target)
    folded = fold(g)
    for output in folded.outputs:
        assert output.value.kind == "const"
        data: Any = output.value.data
        assert data.tobytes() == cast(values, output.value.dtype).tobytes()
    k = Lowering(())
    for x in values:
        for target in map(DTYPES.get, REAL):
            assert target is not None
            made = k.cast(Const(x.item(), DTYPES[source]), target)
            assert isinstance(made, Const)
            assert np.array([made.value]).astype(target.numpy).tobytes() == cast(x.reshape(1), target).tobytes()


@pytest.mark.parametrize("target", REAL)
def test_the_lowering(target: str) -> None:
    for source in REAL:
        check_op(Cast(DTYPES[target]), edges(DTYPES[source])[:40])


def forms(source: str, least: float) -> tuple[Any, dict[str, Any]]:
    """A graph of casts to all types: of a number of its own, of vectors with a rest, and of what is computed.

    Numbers are 0 or at least `least` in size.
    """
    values, wide = (x[~((x != 0) & (np.abs(x.astype(np.float64)) < least))] for x in map(edges, (DTYPES[source], F64)))
    g = rlx.Graph("forms")
    x = g.input("x", (len(values),), source)
    one = g.input("one", (), source)
    other = g.input("wide", (len(values),), "f64")
    inputs = {"x": values, "one": values[0], "wide": np.resize(wide, len(values))}
    for target in map(DTYPES.get, REAL):
        assert target is not None
        g.output(apply(Cast(target), x), f"many {target}")
        g.output(apply(Cast(target), one), f"one {target}")
        if DTYPES[source].is_float and DTYPES[source].bits >= 16:
            g.output(apply(Cast(target), apply(Neg(), apply(Cast(DTYPES[source]), other))), f"fused {target}")
    return g, inputs


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("source", REAL)
def test_every_device_and_form(source: str, device: str) -> None:
    if device == "xla":
        pytest.importorskip("jax")
    g, inputs = forms(source, 0 if device == "cpu" else 1e-37)  # XLA takes denormals for 0
    expected = run_graph(g, inputs)
    model = rlx.compile(g, device=device)
    for first in range(0, len(inputs["x"]), 5):
        inputs["one"] = inputs["x"][first]
        got = {name: np.asarray(array) for name, array in model(inputs).items()}
        for name, want in (expected | run_graph(g, inputs)).items():
            np.testing.assert_array_equal(got[name].astype(np.float64), want.astype(np.float64), err_msg=name)
            if not DTYPES[name.split()[1]].is_float:
                assert got[name].tobytes() == want.tobytes(), name


@pytest.mark.parametrize("target", ["i8", "u8", "i16", "u16"])
def test_what_is_clipped_to_the_type_needs_no_limits(target: str) -> None:
    """As in quantising: one conversion, whichever of the two limits comes first; NaN gives 0."""
    low, high = ends(DTYPES[target])
    g = rlx.Graph("clipped")
    x = g.input("x", (100,))
    g.output(apply(Cast(DTYPES[target]), apply(Clip(low, high), x)), "y")
    values = np.linspace(2 * low - 3, 2 * high, 100, dtype=np.float32)
    values[::7] = np.nan
    assert np.array_equal(rlx.compile(g, device="cpu")(x=values)["y"], cast(values, DTYPES[target]))


LAST = {  # least, as 2^n
    "f64": -1074, "f32": -149, "f16": -24, "bf16": -133, "f8e4m3": -9, "f8e5m2": -16, "f8e4m3fnuz": -10,
    "f8e5m2fnuz": -17, "f8e8m0": -127, "f4e2m1": -1,
}  # fmt: skip
BITS = {  # of a number, at most
    "f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8e4m3": 4, "f8e5m2": 3, "f8e4m3fnuz": 4, "f8e5m2fnuz": 3, "f8e8m0": 1,
    "f4e2m1": 2,
}  # fmt: skip


def nearest(x: int | float, to: str) -> float:
    """The number of the type that is next to x, of two the even one, by exact arithmetic; infinite beyond the range.

    Of f8e8m0 the upper one of two, and none for what is not above 0.
    """
    if to == "f8e8m0" and x <= 0:
        return math.inf
    size, top = abs(Fraction(x)), Fraction(float(ml_dtypes.finfo(DTYPES[to].numpy).max))
    exponent = max(math.frexp(size)[1], LAST[to] + BITS[to]) if size else 0
    last = Fraction(2) ** (exponent - BITS[to])
    found = round(size / last) * last  # ties go to the even one
    return math.copysign(float(found) if found <= top else math.inf, x)


def near_middles(source: DType, to: str) -> Any:
    """Numbers of the source in and close beside the middles of two neighbours in another type."""
    rng, bits = np.random.default_rng(BITS[to]), BITS[to]
    made: list[int | float] = []
    for exponent in range(bits + 1, 64) if source.is_integer else range(LAST[to], 60, 60 - LAST[to] >> 5):
        odd = int(rng.integers(1 << bits, 1 << bits + 1)) | 1
        if source.is_integer:
            middle = odd << exponent - bits - 1
            made += [middle + beside for beside in (0, 1, -1, 2, -3, 1 << max(exponent - 30, 0))]
        else:
            real = math.ldexp(odd, exponent - 1)
            made += [real, math.nextafter(real, 0), math.nextafter(real, math.inf)]
            made += [real * (1 + sign * 2.0**-k) for k in (13, 25, 26, 27, 40) for sign in (1, -1)]
    if source.is_integer:
        low, high = ends(source)
        return np.array([x for y in made for x in (y, -y) if low <= x <= high], source.numpy)
    with np.errstate(over="ignore"):
        wide = np.array([x for y in made for x in (y, -y)]).astype(source.numpy)
    return wide[np.isfinite(wide)]


@pytest.mark.sample(20)
@pytest.mark.parametrize("device", ["cpu", "xla", "mlx"])
@pytest.mark.parametrize("source", ["f64", "f32", "i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("target", LAST)
def test_to_floats_is_rounded_once(target: str, source: str, device: str) -> None:
    """By the rule, folded, by the lowering, and on devices as vectors, alone, and fused with what computes them."""
    if device != "cpu":
        pytest.importorskip({"xla": "jax", "mlx": "mlx.core"}[device])
    dtype = DTYPES[source]
    values = near_middles(dtype, target)
    want = np.array([nearest(x.item(), target) for x in values])
    values, want = values[np.isfinite(want)], want[np.isfinite(want)]  # not every type has infinity
    if not len(values):
        pytest.skip("no integer of these has a middle of numbers beside it")
    if device != "cpu":
        usual = np.abs(want) > 2.0**-100
        values, want = values[usual], want[usual]
    op = Cast(DTYPES[target])
    g = rlx.Graph("once")
    x, one = g.input("x", (len(values),), source), g.input("one", (), source)
    g.output(apply(op, x), "many")
    g.output(apply(op, one), "one")
    if source[0] != "u":
        g.output(apply(op, apply(Neg(), x)), "fused")
    g.output(apply(op, g.constant(values)), "folded")
    model = rlx.compile(g, device=device)
    for i in range(0, len(values), 1 if device == "cpu" else 50):
        got = {name: np.asarray(y).astype(np.float64) for name, y in model(x=values, one=values[i]).items()}
        assert got["one"] == want[i], values[i]
    np.testing.assert_array_equal(cast(values, DTYPES[target]).astype(np.float64), want)
    np.testing.assert_array_equal(got["folded"], want)
    np.testing.assert_array_equal(got["many"], want)
    if "fused" in got:
        np.testing.assert_array_equal(got["fused"], np.nan * want if target == "f8e8m0" else -want)
    check_op(op, values, rtol=0)


@pytest.mark.parametrize("target", [name for name in LAST if not DTYPES[name].native])
def test_python_numbers_are_rounded_once(target: str) -> None:
    """As constants, as inputs, and as what a pass takes an element to hold; whole numbers too."""
    middle = 1 + 2.0 ** -BITS[target]  # between 1 and the number after it
    for number in (middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), -middle * (1 + 2.0**-40), middle):
        if target == "f8e8m0" and number < 0:
            continue  # it has none
        want = nearest(number, target)
        g = rlx.Graph("numbers")
        x = g.input("x", (2,), target)
        g.output(apply(Cast(F64), x), "x")
        g.output(apply(Cast(F64), g.constant([number, number], dtype=target)), "constant")
        got = rlx.compile(g, device="cpu")(x=[number, number])
        assert got["x"].tolist() == got["constant"].tolist() == [want, want]
        assert held(number, DTYPES[target]) == want
    g = rlx.Graph("whole")
    g.output(apply(Cast(F64), g.constant([2**25 + 2**17 + 1], dtype="bf16")), "y")
    assert rlx.compile(g, device="cpu")()["y"].tolist() == [nearest(2**25 + 2**17 + 1, "bf16")]
