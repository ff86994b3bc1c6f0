"""Vector math: errors in ulp against wider arithmetic, special values, and scalar code equal to vector code."""

import ctypes
import functools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from rlx.backends.cpu.jit.compile import compile_object, host
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, Module, vec

DTYPES = {"f32": np.float32, "f64": np.float64}
SCALARS = {"f32": "float", "f64": "double"}
EXACT = {
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round_even": np.rint,
    "sqrt": np.sqrt,
}
# (f32, f64) limits in ulp
LIMITS = {
    "exp": (1.0, 1.5),
    "exp2": (1.0, 1.5),
    "expm1": (1.5, 2.5),
    "log": (1.0, 1.0),
    "log1p": (2.0, 2.0),
    "tanh": (2.0, 3.0),
    "erf": (1.5, 2.0),
    "sigmoid": (2.0, 2.0),
    "sin": (2.0, 3.0),
    "cos": (2.0, 3.0),
    "tan": (3.0, 4.0),
    "rsqrt": (1.5, 1.5),
}
PI = Fraction(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
    "32823066470938446095505822317253594081284811174502841027019385211055596446229489549303819644288109756659334461284"
    "75648233786783165271201909145648566923460348610454326648213393607260249141273724587006606315588174881520920962829"
    "25409171536436789259036001133053054882046652138414695194151160943305727036575959195309218611738193261179310511854"
)
INF, NAN = math.inf, math.nan
SPECIALS = {
    "exp": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0), (1000.0, INF), (-1000.0, 0)],
    "exp2": [(0.0, 1), (INF, INF), (-INF, 0), (3.0, 8), (-1.0, 0.5), (5000.0, INF), (-5000.0, 0)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1), (1000.0, INF), (-1000.0, -1)],
    "log": [(0.0, -INF), (-0.0, -INF), (1.0, 0), (INF, INF), (-INF, NAN), (-1.0, NAN)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (-1.0, -INF), (INF, INF), (-2.0, NAN), (-INF, NAN)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (25.0, 1), (-25.0, -1)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (6.5, 1), (-6.5, -1)],
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (INF, 1), (-INF, 0), (50.0, 1), (-1000.0, 0)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN)],
    "cos": [(0.0, 1), (-0.0, 1), (INF, NAN), (-INF, NAN)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN)],
    "rsqrt": [(4.0, 0.5), (0.0, INF), (-0.0, -INF), (INF, 0), (-1.0, NAN)],
}


def widths(dtype):
    return (1, host().vector_bytes // np.dtype(DTYPES[dtype]).itemsize)


@functools.cache
def library():
    """Every function in scalar and in vector code, one object."""
    functions = []
    for dtype, ty in SCALARS.items():
        for w in widths(dtype):
            for name, emit in vmath.FUNCTIONS.items():
                f = Function(f"{name}_{dtype}_{w}", [("ptr", "x"), ("ptr", "z"), ("ptr", "y"), ("i64", "n")])
                f.loop(
                    0,
                    "%n",
                    w,
                    [],
                    functools.partial(turn, f, ty, w, lambda f, x, z, w, d, e=emit: e(f, x, w, d), dtype),
                )
                f.ret()
                functions.append(f)
            if dtype == "f32":
                f = Function(f"exp_below_{dtype}_{w}", [("ptr", "x"), ("ptr", "z"), ("ptr", "y"), ("i64", "n")])
                below = functools.partial(turn, f, ty, w, lambda f, x, z, w, d: vmath.exp_below(f, x, w), dtype)
                f.loop(0, "%n", w, [], below)
                f.ret()
                functions.append(f)
            else:
                f = Function(f"sigmoid_of_f32_{dtype}_{w}", [("ptr", "x"), ("ptr", "z"), ("ptr", "y"), ("i64", "n")])
                of_f32 = functools.partial(turn, f, ty, w, lambda f, x, z, w, d: vmath.sigmoid_of_f32(f, x, w), dtype)
                f.loop(0, "%n", w, [], of_f32)
                f.ret()
                functions.append(f)
            for name, emit in vmath.BINARY.items():
                f = Function(f"{name}_{dtype}_{w}", [("ptr", "x"), ("ptr", "z"), ("ptr", "y"), ("i64", "n")])
                f.loop(0, "%n", w, [], functools.partial(turn, f, ty, w, emit, dtype))
                f.ret()
                functions.append(f)
    return load_object(compile_object(Module(functions).text(), optimize=False))


def turn(f, ty, w, emit, dtype, i, _):
    x, z = (f.load(vec(ty, w), f.gep(p, i, ty)) for p in ("%x", "%z"))
    f.store(emit(f, x, z, w, dtype), f.gep("%y", i, ty))


def run(name, x, z=None, *, scalar=False):
    """Applies a function to an array of any length."""
    dtype = "f32" if x.dtype == np.float32 else "f64"
    w = widths(dtype)[0 if scalar else 1]
    padded = np.concatenate([x, np.zeros(-len(x) % w, x.dtype)])
    other = padded if z is None else np.concatenate([z, np.zeros(-len(x) % w, x.dtype)])
    out = np.empty_like(padded)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(library().address(f"{name}_{dtype}_{w}"))
    call(padded.ctypes.data, other.ctypes.data, out.ctypes.data, len(padded))
    return out[: len(x)]


def inputs(name, dtype):
    """A dense grid and random values over what matters for the function, tails and subnormals included."""
    rng = np.random.default_rng(1)
    n = 20_000
    top = 87.0 if dtype == "f32" else 700.0
    parts = [rng.normal(size=n), rng.normal(size=n) * 30, 1 + rng.normal(size=n) * 1e-3, np.linspace(-12, 12, n)]
    parts += [np.exp(rng.uniform(-top, top, n)), -np.exp(rng.uniform(-top, top, n)), rng.uniform(-1.3, 1.1, n) * top]
    parts += [
        np.exp(rng.uniform(-1.18 * top, -0.98 * top, n // 4)) if dtype == "f32" else rng.uniform(0, 1e-310, n // 4)
    ]
    x = np.concatenate(parts).astype(DTYPES[dtype])
    if dtype == "f64" and name in ("sin", "cos", "tan"):
        x = x[np.abs(x) < 1e5]  # the reference loses bits beyond; large arguments have their own test
    if name == "erf":
        x = x[:: 10 if dtype == "f64" else 3]
    return x


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def erf_series(x):
    """erf by its power series in fixed point of 240 bits, for f64."""
    if not abs(x) < 6:
        return np.longdouble(math.erf(x))
    if abs(x) < 1e-20:
        return np.longdouble(x) * (2 / np.sqrt(np.longdouble("3.14159265358979323846264338")))
    scale = 1 << 240
    z = int(Fraction(x) * scale)
    square, term, total, k = z * z // scale, z, 0, 0
    while abs(term) > 1:
        total += term // (2 * k + 1)
        k += 1
        term = -term * square // scale // k
    pi_root = Fraction(
        11283791670955125738961589031215451716881012586579977136881714434212849368829868289734873204042147, 10**97
    )
    value = Fraction(total, scale) * pi_root
    high = float(value)
    return np.longdouble(high) + np.longdouble(float(value - Fraction(high)))


def reference(name, x):
    wide = x.astype(np.float64 if x.dtype == np.float32 else np.longdouble)
    if name == "erf":
        if x.dtype == np.float64:
            return np.array([erf_series(float(v)) for v in x])
        return np.array([math.erf(v) for v in wide])
    own = {"sigmoid": sigmoid, "rsqrt": lambda v: 1 / np.sqrt(v), **EXACT}
    return own.get(name, getattr(np, name, None))(wide)


def ulps(got, exact):
    """Errors in units of the last place of the exact value; values that are not finite must agree."""
    limits = np.finfo(got.dtype)
    rounded = exact.astype(got.dtype)
    finite = np.isfinite(rounded) & np.isfinite(got)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    _, exponent = np.frexp(exact[finite])
    unit = np.ldexp(np.ones_like(exact[finite]), np.maximum(exponent - 1, limits.minexp) - limits.nmant)
    return np.abs(got[finite].astype(exact.dtype) - exact[finite]) / unit


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIMITS)
def test_error(name, dtype):
    x = inputs(name, dtype)
    assert ulps(run(name, x), reference(name, x)).max() <= LIMITS[name][dtype == "f64"]


def test_the_exponential_of_what_is_not_above_zero():
    """As `exp` is where the result is a normal number; nothing is left of smaller ones, as of masked scores."""
    x = -np.abs(inputs("exp", "f32"))
    x = x[x > -87.3]
    assert ulps(run("exp_below", x), reference("exp", x)).max() <= 1.5
    ends = np.array([0.0, -0.0, -89.0, -1e30, -INF, NAN], np.float32)
    np.testing.assert_array_equal(run("exp_below", ends), np.array([1, 1, 0, 0, 0, NAN], np.float32))


def test_the_sigmoid_of_f32_in_f64():
    """Rounded to f32 it is what the exact sigmoid rounds to, but where that lies in the middle of two to 2^-50."""
    x = inputs("sigmoid", "f32").astype(np.float64)
    x = np.concatenate([x, np.linspace(-120, 120, 9999, dtype=np.float32).astype(np.float64)])
    exact = np.where(x < 0, np.exp(x.astype(np.longdouble)), 1) / (1 + np.exp(-np.abs(x.astype(np.longdouble))))
    got = run("sigmoid_of_f32", x)
    normal = exact > 1e-46
    assert np.abs(got / exact - 1)[normal].max() <= 2.0**-50
    np.testing.assert_array_equal(got.astype(np.float32), exact.astype(np.float32))
    ends = np.array([0.0, -0.0, 3e38, -3e38, INF, -INF, NAN])
    np.testing.assert_array_equal(run("sigmoid_of_f32", ends).astype(np.float32), [0.5, 0.5, 1, 0, 1, 0, NAN])


@pytest.mark.parametrize("dtype, limit", [("f32", 2e-7), ("f64", 3e-16)])
def test_the_normal_distribution(dtype, limit):
    """An absolute error: products with it (gelu) need no more; its tails are 0 and 1, however far out."""
    x = inputs("normal_cdf", dtype)[::3]
    exact = np.array([math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.astype(np.float64)])
    assert np.abs(run("normal_cdf", x) - exact).max() <= limit
    tails = np.array([-INF, -3e38, -30.0, 0.0, -0.0, 30.0, 3e38, INF, NAN], DTYPES[dtype])
    np.testing.assert_array_equal(run("normal_cdf", tails), np.array([0, 0, 0, 0.5, 0.5, 1, 1, 1, NAN], tails.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_exact_functions(name, dtype):
    x = np.concatenate([inputs(name, dtype), np.array([0.5, 1.5, 2.5, -0.5, -0.0, INF, -INF, NAN], DTYPES[dtype])])
    got, want = run(name, x), EXACT[name](x)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECIALS)
def test_special_values(name, dtype):
    """Also nan, in the company of ordinary lanes; the sign of zero counts."""
    x = np.array([*(x for x, _ in SPECIALS[name]), NAN, 0.75], DTYPES[dtype])
    want = np.array([*(y for _, y in SPECIALS[name]), NAN], DTYPES[dtype])
    for scalar in (True, False):
        got = run(name, x, scalar=scalar)[:-1]
        np.testing.assert_array_equal(got, want)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", vmath.FUNCTIONS)
def test_scalar_code_gives_the_bits_of_vector_code(name, dtype):
    x = np.concatenate([inputs(name, dtype)[::7], np.array([0, -0.0, INF, NAN], DTYPES[dtype])])
    np.testing.assert_array_equal(run(name, x), run(name, x, scalar=True))


def test_subnormal_results_of_exp():
    x = np.linspace(-103.9, -87.4, 4001).astype(np.float32)
    got = run("exp", x)
    assert (got > 0).all()
    assert ulps(got, np.exp(x.astype(np.float64))).max() <= 1


def test_tanh_saturates_at_one_and_never_beyond():
    x = np.linspace(8, 20, 10_001).astype(np.float32)
    got = run("tanh", x)
    assert (got <= 1).all()
    assert (got[x > 9.1] == 1).all()


def reduced(x):
    """sin and cos of huge arguments: reduction by pi in exact integers, for f32 or f64 values."""
    half_pi = PI / 2
    turns = round(Fraction(x) / half_pi)
    return float(Fraction(x) - turns * half_pi), turns % 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_arguments(name, dtype):
    """Beyond the fast reduction, up to the largest float; among them lanes of ordinary size."""
    rng = np.random.default_rng(3)
    top = 38.5 if dtype == "f32" else 308.0
    x = (10.0 ** rng.uniform(4, top, 1000) * rng.choice([-1, 1], 1000)).astype(DTYPES[dtype])
    x[::5] = rng.normal(size=200)
    x[-1] = np.finfo(DTYPES[dtype]).max
    x = x[np.isfinite(x)]
    parts = [reduced(float(v)) for v in x]
    r, q = np.array([p[0] for p in parts]), np.array([p[1] for p in parts])
    q = q + (name == "cos")
    want = np.where(q % 2 == 0, np.sin(r), np.cos(r)) * np.where(q % 4 >= 2, -1, 1)
    assert ulps(run(name, x), want).max() <= (2 if dtype == "f32" else 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pow(dtype):
    rng = np.random.default_rng(4)
    x = np.concatenate([np.exp(rng.normal(size=5000)), np.exp(rng.uniform(-30, 30, 5000)), -rng.uniform(0, 9, 2000)])
    y = np.concatenate([rng.normal(size=5000) * 5, rng.uniform(-2, 2, 5000), rng.integers(-9, 9, 2000)])
    x, y = x.astype(DTYPES[dtype]), y.astype(DTYPES[dtype])
    wide = np.float64 if dtype == "f32" else np.longdouble
    assert ulps(run("pow", x, y), np.power(x.astype(wide), y.astype(wide))).max() <= (1 if dtype == "f32" else 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pow_special_values(dtype):
    values = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 3.0, -3.0, 2.5, -2.5, INF, -INF, NAN, 1e30, -1e30]
    x, y = (v.ravel().astype(DTYPES[dtype]) for v in np.meshgrid(values, values))
    got, want = run("pow", x, y), np.power(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


def test_no_library_is_called():
    """The code calls intrinsics and its own helper only, and loads although the loader resolves no math library."""
    f = Function("all", [("ptr", "x")])
    for emit in vmath.FUNCTIONS.values():
        for dtype, ty in SCALARS.items():
            f.store(emit(f, f.load(vec(ty, 4), "%x"), 4, dtype), "%x")
    f.ret()
    text = Module([f]).text()
    assert {name for name in re.findall(r"call [^@]*@([\w.]+)", text) if not name.startswith("llvm.")} == {
        "rlx_reduce_large"
    }
    assert load_object(compile_object(text, optimize=False)).address("all")
