"""Remainders are exact for every quotient, in bits, of each element type, in every form of code and on every device."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES, DType
from rlx.ops.base import apply
from rlx.ops.elementwise import Div, Mod, Neg
from rlx.passes.fold import fold
from rlx.testing.interpret import check_op

Array = Any
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float and dtype.bits >= 16]
WHOLE = [name for name, dtype in DTYPES.items() if dtype.is_integer and dtype.bits >= 8]


def special(dtype: DType) -> Array:
    """Both signs of zero, of the ends of normal and subnormal numbers, of what lies beside 1 and 3, of inf; and NaN."""
    kind = dtype.numpy.type
    info: Any = ml_dtypes.finfo(dtype.numpy)
    numbers = [0.0, 1.0, 3.0, float(info.max), float(info.tiny), float(info.smallest_subnormal), np.inf, 0.1, 7.5]
    numbers += [float(np.nextafter(kind(x), kind(np.inf))) for x in (1.0, 3.0, info.tiny)]
    return np.array([*numbers, *(-x for x in numbers), np.nan]).astype(dtype.numpy)


def pairs(dtype: DType, n: int) -> tuple[Array, Array]:
    """All pairs of special numbers, and numbers of any bits: so quotients of any size; some are whole, or nearly."""
    some, rng = special(dtype), np.random.default_rng(n)
    x, y = (
        rng.integers(0, 1 << dtype.bits, n, np.uint64).astype(f"u{dtype.bits // 8}").view(dtype.numpy) for _ in "xy"
    )
    with np.errstate(all="ignore"):
        near = (y.astype(np.float64) * rng.integers(1, 1 << 12, n)).astype(dtype.numpy)
        usual = (rng.standard_normal(n) * 50).astype(dtype.numpy)
    a = np.concatenate([np.repeat(some, len(some)), x, near, np.nextafter(near, dtype.numpy.type(0)), usual])
    return a, np.concatenate([np.tile(some, len(some)), y, y, y, usual[::-1]])


def exact(a: float, b: float) -> float:
    """C's fmod of finite numbers by whole ones; zero has the sign of a."""
    x, y = abs(Fraction(a)), abs(Fraction(b))
    return float(np.copysign(float(x - x // y * y), a))


def assert_bits(got: Array, want: Array, a: Array, b: Array, what: str) -> None:
    """Equal bits; of NaN any."""
    unsigned = f"u{want.dtype.itemsize}"
    wrong = (got.view(unsigned) != want.view(unsigned)) & ~(np.isnan(got) & np.isnan(want))
    assert not wrong.any(), (what, a[wrong][:3], b[wrong][:3], got[wrong][:3], want[wrong][:3])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_is_exact(dtype: str) -> None:
    a, b = pairs(DTYPES[dtype], 400)
    with np.errstate(all="ignore"):
        got = np.asarray(Mod(True).reference(a, b))
        fine = np.isfinite(a) & np.isfinite(b) & (b != 0)
        want = np.array([exact(float(x), float(y)) for x, y in zip(a[fine], b[fine], strict=True)])
        assert_bits(got[fine], want.astype(a.dtype), a[fine], b[fine], dtype)
        assert np.isnan(got[~np.isfinite(a) | (b == 0)]).all()
        for fmod, ours in ((True, np.fmod), (False, np.mod)):
            assert_bits(np.asarray(Mod(fmod).reference(a, b)), np.asarray(ours(a, b)), a, b, f"{dtype} {fmod}")


def normal(x: Array) -> Array:
    """Which numbers are not denormal, nor close to being so."""
    with np.errstate(all="ignore"):
        return (x == 0) | ~(np.abs(x) < 4 * ml_dtypes.finfo(x.dtype).tiny)


def forms(dtype: DType, a: Array, b: Array) -> rlx.Graph:
    """Remainders of vectors with a rest, by one number, of what is computed, and of constants."""
    g = rlx.Graph("remainders")
    x, y = (g.input(name, (len(a),), dtype) for name in "xy")
    one = g.input("one", (), dtype)
    for fmod in (False, True):
        g.output(apply(Mod(fmod), x, y), f"many {fmod}")
        g.output(apply(Mod(fmod), one, one), f"one {fmod}")
        g.output(apply(Mod(fmod), x, one), f"by one {fmod}")
        g.output(apply(Mod(fmod), apply(Neg(), x), apply(Neg(), y)), f"fused {fmod}")
        g.output(apply(Mod(fmod), g.constant(a), y), f"of a constant {fmod}")
        g.output(apply(Mod(fmod), g.constant(a), g.constant(b)), f"folded {fmod}")
    return g


@pytest.mark.parametrize("device", ["cpu", "xla", "mlx"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_in_every_form(dtype: str, device: str, request: pytest.FixtureRequest) -> None:
    if device != "cpu":
        pytest.importorskip({"xla": "jax", "mlx": "mlx.core"}[device])
    a, b = pairs(DTYPES[dtype], 20_000 if request.config.getoption("--full") else 500)
    ones = special(DTYPES[dtype])
    if device != "cpu":  # these take denormals for 0
        with np.errstate(all="ignore"):
            usable = normal(a) & normal(b) & normal(np.fmod(a, b))
        a, b, ones = a[usable], b[usable], ones[normal(ones)]
    g = forms(DTYPES[dtype], a, b)
    assert all(o.value.kind == "const" for o in fold(g).outputs if "folded" in o.name)
    model = rlx.compile(g, device=device)
    for one in ones:
        inputs = {"x": a, "y": b, "one": one}
        got = {name: np.asarray(array) for name, array in model(inputs).items()}
        for name, want in run_graph(g, inputs).items():
            by = np.broadcast_to(one, b.shape) if "one" in name else b
            with np.errstate(all="ignore"):
                some = (device == "cpu") | normal(np.fmod(np.broadcast_to(a, by.shape), by)[: want.size])
            made, want, of, by = (x.reshape(-1)[: want.size][some] for x in (got[name], want, a, by))
            assert_bits(made, want, of, by, name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_lowering_of_floats(dtype: str) -> None:
    a, b = pairs(DTYPES[dtype], 100)
    for fmod in (False, True):
        check_op(Mod(fmod), a, b, rtol=0)


@pytest.mark.parametrize("op", [Div(), Mod(), Mod(True)], ids=["div", "mod", "fmod"])
@pytest.mark.parametrize("dtype", WHOLE)
def test_integers_at_the_ends_of_their_type(dtype: str, op: Any) -> None:
    """The least one by -1 wraps (remainder 0), and a zero divisor is an error: in vectors, alone, and by a constant."""
    info = np.iinfo(DTYPES[dtype].numpy)
    numbers = sorted({info.min, info.min + 1, -7, -1, 0, 1, 2, 7, info.max // 2 + 1, info.max - 1, info.max})
    values = np.array([x for x in numbers if x >= info.min], DTYPES[dtype].numpy)
    a, b = np.repeat(values, len(values)), np.tile(values, len(values))
    a, b = a[b != 0], b[b != 0]
    wanted = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        toward_zero = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        wanted.append({Div(): toward_zero, Mod(): x % y, Mod(True): x - toward_zero * y}[op])
    low, bits = info.min, DTYPES[dtype].bits
    want = np.array([(x - low) % (1 << bits) + low for x in wanted], DTYPES[dtype].numpy)
    g = rlx.Graph("integers")
    x, y = g.input("x", (len(a),), dtype), g.input("y", (len(a),), dtype)
    one, other = g.input("one", (), dtype), g.input("other", (), dtype)
    g.output(apply(op, x, y), "many")
    g.output(apply(op, one, other), "one")
    for n, value in enumerate(values[values != 0]):
        g.output(apply(op, x, g.constant(value)), f"constant {n}")
    for device in ("cpu", "reference"):
        model = rlx.compile(g, device=device)
        for i in range(len(a)):
            got = model(x=a, y=b, one=a[i], other=b[i])
            assert got["many"].tobytes() == want.tobytes(), device
            assert got["one"] == want[i], (device, a[i], b[i])
        for n, value in enumerate(values[values != 0]):
            assert got[f"constant {n}"][b == value].tobytes() == want[b == value].tobytes(), (device, value)
        zero = np.where(np.arange(len(b)) == len(b) - 1, 0, b).astype(b.dtype)
        for given in ({"y": zero}, {"other": zero[-1]}):
            with pytest.raises(ExecutionError, match="division"):
                model({"x": a, "y": b, "one": a[0], "other": b[0]} | given)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floor_division_is_that_of_numpy(dtype: str) -> None:
    """`a // b` of traced values, and by a number: where a / b rounds up to a whole number too, and signs of zero."""
    a, b = pairs(DTYPES[dtype], 500)
    model = rlx.jit(lambda x, y: (x // y, np.floor_divide(x, y), x // 0.1, 0.1 // x), device="cpu")
    tenth = a.dtype.type(0.1)
    with np.errstate(all="ignore"):
        want = [np.floor_divide(*x) for x in ((a, b), (a, b), (a, tenth), (tenth, a))]
    for n, (made, x) in enumerate(zip(model(a, b), want, strict=True)):
        assert_bits(np.asarray(made), x, a, b, f"{dtype} {n}")
