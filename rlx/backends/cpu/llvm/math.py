"""Elementary functions as emitters of vector (or scalar) code: no call to a math library is ever made.

An emitter has the signature `(f, x, w, dtype) -> value`: it prints code into `f` for `w` lanes of "f32" or "f64".
Results are within 2 ulp in f32 and 4 ulp in f64 unless an emitter says otherwise, with IEEE results for inf, nan,
signed zeros and subnormal numbers.
Polynomials are minimax fits (`coefficients`); the formulas are in the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rlx.backends.cpu.llvm.builder import Function, constant, size_of, vec, width
from rlx.backends.cpu.llvm.coefficients import EXP2, FORMATS, NORMAL_ODDS, TWO_OVER_PI, DType, Format

__all__ = [
    "BINARY",
    "FUNCTIONS",
    "DType",
    "Emitter",
    "ceil",
    "copysign",
    "cos",
    "erf",
    "exp",
    "exp2",
    "exp_below",
    "expm1",
    "fabs",
    "floor",
    "fmod",
    "log",
    "log1p",
    "normal_cdf",
    "pow_",
    "round_even",
    "rsqrt",
    "sigmoid",
    "sigmoid_of_f32",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]

Emitter = Callable[[Function, str, int, DType], str]

INF = float("inf")
NAN = float("nan")
LOG2E = 1.4426950408889634
PI_2 = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)  # pi/2 as a sum of three f64
TWO_PI = 0.6366197723675814


SCALING_BYTES = 64  # only targets that scale by an instruction (AVX-512) have vectors of so many


def horner(f: Function, x: str, coefficients: tuple[float, ...], ty: str) -> str:
    p = constant(coefficients[-1], ty)
    for c in reversed(coefficients[:-1]):
        p = f.fma(p, x, c, ty)
    return p


def pow2(f: Function, i: str, w: int, fmt: Format) -> str:
    """2^i for integer lanes i whose result is a normal number."""
    bits = f.shl(f.add(i, fmt.bias), fmt.mantissa)
    return f.cast("bitcast", bits, vec(fmt.scalar, w))


def split(f: Function, x: str, w: int, fmt: Format) -> tuple[str, str, str]:
    """x = i ln2 + r with |r| <= ln2 / 2: (integer lanes i, i as floats, r). Two-step subtraction of Cody and Waite."""
    ty, ity = vec(fmt.scalar, w), vec(fmt.integer, w)
    shifted = f.fma(x, LOG2E, fmt.magic, ty)
    i = f.sub(f.cast("bitcast", shifted, ity), f.cast("bitcast", constant(fmt.magic, ty), ity, ty))
    n = f.sub(shifted, fmt.magic)
    r = f.fma(n, -fmt.ln2[0], x, ty)
    return i, n, f.fma(n, -fmt.ln2[1], r, ty)


def reduced_expm1(f: Function, r: str, ty: str, fmt: Format) -> str:
    """e^r - 1 = r + r^2 P(r), of small relative error."""
    return f.fma(f.mul(r, r), horner(f, r, fmt.exp, ty), r, ty)


def exp(f: Function, x: str, w: int, dtype: DType) -> str:
    """e^x = 2^i (1 + r + r^2 P(r)); scaled in two steps so that subnormal results and overflow come out right."""
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    low, high = fmt.exp_range
    clamped = f.max(low, f.min(high, x, ty), ty)  # a nan passes: the second operand is kept
    i, n, r = split(f, clamped, w, fmt)
    return scale(f, f.add(reduced_expm1(f, r, ty, fmt), 1.0), i, n, w, fmt)


def exp_below(f: Function, x: str, w: int) -> str:
    """e^x of f32 lanes x <= 0: half the work of `exp`, within 1.5 ulp where the result is normal, else 0."""
    fmt = FORMATS["f32"]
    ty = vec(fmt.scalar, w)
    i, _, r = split(f, f.max(-88.0, x, ty), w, fmt)  # down to i = -127, whose power of two is 0; a nan passes
    return f.mul(f.add(reduced_expm1(f, r, ty, fmt), 1.0), pow2(f, i, w, fmt))


def exp2(f: Function, x: str, w: int, dtype: DType) -> str:
    """2^x = 2^i e^(ln2 (x - i))."""
    fmt = FORMATS[dtype]
    ty, ity = vec(fmt.scalar, w), vec(fmt.integer, w)
    low, high = fmt.exp_range
    clamped = f.max(round(low * LOG2E) - 1.0, f.min(round(high * LOG2E) + 1.0, x, ty), ty)
    shifted = f.add(clamped, fmt.magic)
    i = f.sub(f.cast("bitcast", shifted, ity), f.cast("bitcast", constant(fmt.magic, ty), ity, ty))
    n = f.sub(shifted, fmt.magic)
    part = f.sub(clamped, n)
    r = f.fma(part, fmt.ln2[0], f.mul(part, fmt.ln2[1]), ty)
    return scale(f, f.add(reduced_expm1(f, r, ty, fmt), 1.0), i, n, w, fmt)


def scale(f: Function, y: str, i: str, n: str, w: int, fmt: Format) -> str:
    """y * 2^i, rounded once, where 2^i itself may be out of range; n is i as floats."""
    if f.vector_bytes == SCALING_BYTES and w * size_of(fmt.scalar) % SCALING_BYTES == 0:
        return _scale_at_once(f, y, n, w, fmt)
    half = f.ashr(i, 1)
    return f.mul(f.mul(y, pow2(f, half, w, fmt)), pow2(f, f.sub(i, half), w, fmt))


def _scale_at_once(f: Function, y: str, n: str, w: int, fmt: Format) -> str:
    """The same by the instruction for it, a vector of 64 bytes at a time."""
    lanes = SCALING_BYTES // size_of(fmt.scalar)
    ty, mask = vec(fmt.scalar, lanes), f"i{lanes}"
    name = f"llvm.x86.avx512.mask.scalef.{'ps' if lanes == 16 else 'pd'}.512"
    f.declare(name, ty, [ty, ty, ty, mask, "i32 immarg"])
    parts = []
    for start in range(0, w, lanes):
        some = list(range(start, start + lanes))
        a, b = (v if w == lanes else f.shuffle(v, None, some) for v in (y, n))
        parts.append(f.op(f"call {ty} @{name}({ty} {a}, {ty} {b}, {ty} {a}, {mask} -1, i32 4)", ty))
    while len(parts) > 1:
        both = 2 * width(f.type_of(parts[0]))
        parts = [f.shuffle(a, b, list(range(both))) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def expm1(f: Function, x: str, w: int, dtype: DType) -> str:
    """e^x - 1 = 2 (2^(i-1) q + (2^(i-1) - 1/2)) with q = e^r - 1, and q itself for i = 0."""
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    clamped = f.max(fmt.expm1_low, f.min(fmt.exp_range[1], x, ty), ty)
    i, _, r = split(f, clamped, w, fmt)
    q = reduced_expm1(f, r, ty, fmt)
    s = pow2(f, f.sub(i, 1), w, fmt)
    y = f.mul(f.fma(s, q, f.sub(s, 0.5)), 2.0)
    return copysign(f, f.select(f.cmp("eq", i, 0), q, y), x)


def tanh(f: Function, x: str, w: int, dtype: DType) -> str:
    """tanh |x| = t / (t + 2) with t = e^(2|x|) - 1: exactly 1 once t + 2 rounds to t. f32: x + x z T(z) below 1/2."""
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    a = fabs(f, x)
    i, _, r = split(f, f.min(fmt.tanh_limit, f.add(a, a), ty), w, fmt)
    s = pow2(f, i, w, fmt)
    t = f.fma(s, reduced_expm1(f, r, ty, fmt), f.sub(s, 1.0), ty)
    y = copysign(f, f.div(t, f.add(t, 2.0)), x)
    if not fmt.tanh:
        return y
    z = f.mul(x, x)
    small = copysign(f, f.fma(f.mul(x, z), horner(f, z, fmt.tanh, ty), x), x)
    return f.select(f.cmp("lt", a, 0.5), small, y)


def sigmoid(f: Function, x: str, w: int, dtype: DType) -> str:
    """1 / (1 + e^-x), as e / (1 + e) with e = e^-|x| for negative x, so that the lower tail keeps its precision.

    One correction of the quotient by its remainder takes in the rounding errors of e and of the division.
    """
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    i, n, r = split(f, f.max(fmt.exp_range[0], f.neg(fabs(f, x)), ty), w, fmt)
    q = reduced_expm1(f, r, ty, fmt)
    y = f.add(q, 1.0)
    e = scale(f, y, i, n, w, fmt)
    e_low = scale(f, f.sub(q, f.sub(y, 1.0)), i, n, w, fmt)
    upper = f.cmp("ge", x, 0.0)
    top = f.select(upper, 1.0, e, ty)
    below = f.add(e, 1.0)
    inverse = f.div(1.0, below)
    quotient = f.mul(top, inverse)
    rest = f.add(f.fma(f.neg(quotient), below, top), f.select(upper, 0.0, e_low, ty))
    return f.fma(rest, inverse, quotient)


def sigmoid_of_f32(f: Function, x: str, w: int) -> str:
    """1 / (1 + e^-x) of lanes of f64 that hold values of f32, for a result that is rounded to f32: within 2^-50.

    Beyond -110 that is 0, so e^-|x| is a normal number, and the sum needs no correction.
    """
    fmt = FORMATS["f64"]
    ty = vec(fmt.scalar, w)
    i, _, r = split(f, f.max(-110.0, f.neg(fabs(f, x)), ty), w, fmt)  # a nan passes: the second operand is kept
    e = f.mul(f.add(reduced_expm1(f, r, ty, fmt), 1.0), pow2(f, i, w, fmt))
    return f.div(f.select(f.cmp("ge", x, 0.0), 1.0, e, ty), f.add(e, 1.0))


def erf(f: Function, x: str, w: int, dtype: DType) -> str:
    """erf x = x + x P(x^2) for small |x|, else 1 - e^G(|x|) with G a fit of log(1 - erf)."""
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    a = f.min(fmt.erf_limit, fabs(f, x), ty)
    small = f.fma(x, horner(f, f.mul(x, x), fmt.erf_small, ty), x, ty)
    i, _, r = split(f, horner(f, a, fmt.erf_large, ty), w, fmt)
    s = f.neg(pow2(f, i, w, fmt))
    large = f.fma(s, reduced_expm1(f, r, ty, fmt), f.add(s, 1.0), ty)
    return f.select(f.cmp("lt", a, fmt.erf_split), small, copysign(f, large, x))


def normal_cdf(f: Function, x: str, w: int, dtype: DType) -> str:
    """Phi(x) = (1 + erf(x / sqrt(2))) / 2, the share of a normal distribution below x.

    f32: 1 / (1 + 2^s) with s a fit of the logarithm of the odds, to 2e-7 in absolute terms; s = 128 makes it 0.
    """
    fmt = FORMATS[dtype]
    ty, ity = vec(fmt.scalar, w), vec(fmt.integer, w)
    if dtype != "f32":
        return f.fma(erf(f, f.mul(x, 0.7071067811865476), w, dtype), 0.5, constant(0.5, ty))
    z = f.min(1024.0, f.mul(x, x), ty)  # no inf - inf in the polynomial
    s = f.mul(f.neg(x), in_pairs(f, z, NORMAL_ODDS, ty))
    s = f.max(-126.0, f.min(128.0, s, ty), ty)  # a nan passes: the second operand is kept
    shifted = f.add(s, fmt.magic)
    part = f.sub(s, f.sub(shifted, fmt.magic))
    power = f.cast("bitcast", in_pairs(f, part, (1.0, *EXP2), ty), ity)
    odds = f.add(power, f.shl(f.cast("bitcast", shifted, ity), fmt.mantissa))  # of `shifted` only the integer stays
    return f.div(1.0, f.add(f.cast("bitcast", odds, ty), 1.0))


def in_pairs(f: Function, x: str, coefficients: tuple[float, ...], ty: str) -> str:
    """A polynomial as an even and an odd one, two chains of operations half as long."""
    square = f.mul(x, x)
    even, odd = (horner(f, square, coefficients[i::2], ty) for i in (0, 1))
    return f.fma(odd, x, even)


def mantissa_exponent(f: Function, x: str, w: int, fmt: Format) -> tuple[str, str]:
    """x = 2^e m with sqrt(1/2) <= m < sqrt(2) for finite x > 0: returns (m - 1, which is exact, and e as a float)."""
    ty, ity = vec(fmt.scalar, w), vec(fmt.integer, w)
    tiny = f.cmp("lt", x, fmt.min_normal)
    normal = f.select(tiny, f.mul(x, 2.0**fmt.denormal_scale), x)
    bits = f.sub(f.cast("bitcast", normal, ity), fmt.sqrt_half)
    e = f.sub(f.ashr(bits, fmt.mantissa), f.select(tiny, fmt.denormal_scale, 0, ity))
    m = f.add(f.and_(bits, (1 << fmt.mantissa) - 1), fmt.sqrt_half)
    exponent = f.add(e, f.cast("bitcast", constant(fmt.magic, ty), ity, ty))  # to float without an i64 conversion
    return f.sub(f.cast("bitcast", m, ty), 1.0), f.sub(f.cast("bitcast", exponent, ty), fmt.magic)


def log(f: Function, x: str, w: int, dtype: DType) -> str:
    """log x = e ln2 + log(1 + u).

    f32: log(1 + u) = u - u^2/2 + u^3 P(u). f64: u - (h - s (h + z L(z))) with h = u^2/2, s = u / (2 + u), z = s^2, from
    log(1 + u) = 2 atanh s.
    """
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    u, e = mantissa_exponent(f, x, w, fmt)
    if dtype == "f32":
        square = f.mul(u, u)
        tail = f.mul(f.mul(u, square), horner(f, u, fmt.log, ty))
        tail = f.fma(square, -0.5, f.fma(e, fmt.ln2[1], tail))
    else:
        s = f.div(u, f.add(u, 2.0))
        z = f.mul(s, s)
        h = f.mul(f.mul(u, 0.5), u)
        tail = f.fma(s, f.fma(z, horner(f, z, fmt.log, ty), h), f.mul(e, fmt.ln2[1]))
        tail = f.sub(tail, h)
    return log_specials(f, x, f.fma(e, fmt.ln2[0], f.add(u, tail)), ty)


def log_specials(f: Function, x: str, y: str, ty: str) -> str:
    """Replaces y where x is nan or inf (x itself), zero (-inf) or negative (nan)."""
    y = f.select(f.cmp("lt", x, INF), y, x, ty)
    y = f.select(f.cmp("eq", x, 0.0), -INF, y, ty)
    return f.select(f.cmp("lt", x, 0.0), NAN, y, ty)


def log1p(f: Function, x: str, w: int, dtype: DType) -> str:
    """log(1 + x) = log u + (x - (u - 1)) / u with u the rounded 1 + x (Kahan)."""
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    u = f.add(x, 1.0)
    # what rounding lost, by the larger of 1 and |x|
    lost = f.select(f.cmp("gt", x, 1.0), f.sub(1.0, f.sub(u, x)), f.sub(x, f.sub(u, 1.0)), ty)
    usable = f.and_(f.cmp("gt", u, 0.0), f.cmp("lt", u, INF))
    fix = f.select(usable, f.div(lost, u), 0.0, ty)
    return copysign(f, f.add(log(f, u, w, dtype), fix), x)


@cache
def large_reduction() -> Function:
    """`(ptr x, ptr r, ptr q, i64 n)`: x = q pi/2 + r for any f64, by Payne and Hanek; q is modulo 4, r is nan for inf.

    Takes 192 bits of 2/pi from where x makes them matter, multiplies by the mantissa, and rounds the 128-bit count of
    quarter turns (2 integer bits). Meant for |x| > 1.
    """
    f = Function(
        "rlx_reduce_large",
        [("ptr", "x"), ("ptr", "r"), ("ptr", "q"), ("i64", "n")],
        shared=True,
        attrs="nounwind noinline",
    )
    table = f.array("rlx_two_over_pi", "i64", [v - (v >> 63 << 64) for v in TWO_OVER_PI])

    def body(i: str, _: list[str]) -> None:
        x = f.load("double", f.gep("%x", i, "double"))
        bits = f.cast("bitcast", x, "i64")
        biased = f.and_(f.lshr(bits, 52), 0x7FF)
        m = f.or_(f.and_(bits, (1 << 52) - 1), 1 << 52)
        first = f.max(f.sub(biased, 1075 - 62), 0)  # bit of the padded table that has weight 2 in the product
        at, shift = f.lshr(first, 6), f.and_(first, 63)
        words = [f.load("i64", f.gep(table, f.min(f.add(at, k), len(TWO_OVER_PI) - 1), "i64")) for k in range(4)]
        a = [f.intrinsic("fshl", words[k], words[k + 1], shift) for k in range(3)]
        wide = [f.mul(f.cast("zext", m, "i128"), f.cast("zext", a[k], "i128")) for k in range(3)]
        turns = f.add(f.add(f.shl(wide[0], 64), wide[1]), f.lshr(wide[2], 64))
        q = f.lshr(f.add(turns, 1 << 125), 126)
        rest = f.sub(turns, f.shl(q, 126))
        negative = f.cmp("lt", rest, 0)
        size = f.select(negative, f.sub(0, rest), rest)
        zeros = f.intrinsic("umin", f.intrinsic("ctlz", size, tail="i1 false"), "100")
        top = f.cast("trunc", f.lshr(f.shl(size, zeros), 65), "i64")
        exponent = f.shl(f.sub(1023 - 61, f.cast("trunc", zeros, "i64")), 52)
        r = f.mul(f.mul(f.cast("sitofp", top, "double"), PI_2[0]), f.cast("bitcast", exponent, "double"))
        down = f.cmp("lt", bits, 0)
        r = f.select(f.xor(negative, down), f.neg(r), r)
        count = f.cast("trunc", q, "i64")
        count = f.and_(f.select(down, f.sub(0, count), count), 3)
        f.store(f.select(f.cmp("eq", biased, 0x7FF), NAN, r), f.gep("%r", i, "double"))
        f.store(count, f.gep("%q", i, "i64"))

    f.loop(0, "%n", 1, [], body)
    f.ret()
    return f


def quadrant(f: Function, x: str, w: int, dtype: DType) -> tuple[str, str]:
    """x = q pi/2 + r with |r| <= pi/4 (a little more is possible): returns (r, integer lanes q).

    In f64 for both dtypes: up to 2^20 by three-step Cody-Waite with fma (the first step is exact), lanes beyond by
    `large_reduction`, which is entered only if there are any.
    """
    fmt = FORMATS[dtype]
    double, long = vec("double", w), vec("i64", w)
    wide = f.cast("fpext", x, "double")
    shifted = f.fma(wide, TWO_PI, FORMATS["f64"].magic)
    n = f.sub(shifted, FORMATS["f64"].magic)
    r = wide
    for part in PI_2:
        r = f.fma(n, -part, r)
    q = f.cast("bitcast", shifted, long)
    large = f.cmp("gt", fabs(f, wide), 2.0**20)
    x_at, r_at, q_at = f.alloca("double", w), f.alloca("double", w), f.alloca("i64", w)

    def slow() -> list[str]:
        f.store(wide, x_at)
        f.call(large_reduction(), [x_at, r_at, q_at, w])
        return [
            f.select(large, f.load(double, r_at), r, double),
            f.select(large, f.load(long, q_at), q, long),
        ]

    r, q = f.if_(any_lane(f, large, w), slow, lambda: [r, q])
    if dtype == "f32":
        r, q = f.cast("fptrunc", r, "float"), f.cast("trunc", q, fmt.integer)
    return r, q


def sin_cos_of(f: Function, r: str, ty: str, fmt: Format) -> tuple[str, str]:
    """sin and cos of |r| <= pi/4: r + r z S(z) and 1 - z/2 + z^2 C(z) with z = r^2."""
    z = f.mul(r, r)
    sine = f.fma(f.mul(r, z), horner(f, z, fmt.sin, ty), r)
    half = f.mul(z, 0.5)
    top = f.sub(1.0, half)
    lost = f.sub(f.sub(1.0, top), half)  # the rounding error of 1 - z/2
    return sine, f.add(top, f.fma(f.mul(z, z), horner(f, z, fmt.cos, ty), lost))


def turned(f: Function, sine: str, cosine: str, q: str, w: int, fmt: Format) -> str:
    """The sine of r + q pi/2."""
    ty, ity = vec(fmt.scalar, w), vec(fmt.integer, w)
    y = f.select(f.cmp("ne", f.and_(q, 1), 0), cosine, sine)
    sign = f.shl(f.and_(q, 2), 8 * size_of(fmt.scalar) - 2)
    return f.cast("bitcast", f.xor(f.cast("bitcast", y, ity), sign), ty)


def sin(f: Function, x: str, w: int, dtype: DType) -> str:
    """sin x by reduction to |r| <= pi/4; exact argument reduction at any size."""
    fmt = FORMATS[dtype]
    r, q = quadrant(f, x, w, dtype)
    sine, cosine = sin_cos_of(f, r, vec(fmt.scalar, w), fmt)
    return f.select(f.cmp("eq", x, 0.0), x, turned(f, sine, cosine, q, w, fmt))  # keeps -0


def cos(f: Function, x: str, w: int, dtype: DType) -> str:
    """cos x = sin(x + pi/2), see `sin`."""
    fmt = FORMATS[dtype]
    r, q = quadrant(f, x, w, dtype)
    sine, cosine = sin_cos_of(f, r, vec(fmt.scalar, w), fmt)
    return turned(f, sine, cosine, f.add(q, 1), w, fmt)


def tan(f: Function, x: str, w: int, dtype: DType) -> str:
    """tan x = sin x / cos x (up to 3 ulp in f32)."""
    fmt = FORMATS[dtype]
    r, q = quadrant(f, x, w, dtype)
    sine, cosine = sin_cos_of(f, r, vec(fmt.scalar, w), fmt)
    odd = f.cmp("ne", f.and_(q, 1), 0)
    y = f.div(f.select(odd, cosine, sine), f.select(odd, f.neg(sine), cosine))
    return f.select(f.cmp("eq", x, 0.0), x, y)


def log_pair(f: Function, x: str, w: int) -> tuple[str, str]:
    """log x for f64 lanes x > 0 as an unevaluated sum (high, low) good to about 2^-60: see `log` for the formula."""
    fmt = FORMATS["f64"]
    ty = vec("double", w)
    u, e = mantissa_exponent(f, x, w, fmt)
    below = f.add(u, 2.0)
    below_low = f.sub(u, f.sub(below, 2.0))
    s = f.div(u, below)
    s_low = f.div(f.sub(f.fma(f.neg(s), below, u), f.mul(s, below_low)), below)
    z = f.mul(s, s)
    b = f.add(s, s)
    b_low = f.fma(f.mul(s, z), horner(f, z, fmt.log, ty), f.add(s_low, s_low))
    a = f.mul(e, fmt.ln2[0])
    a_low = f.fma(e, fmt.ln2[1], f.fma(e, fmt.ln2[0], f.neg(a)))
    total = f.add(a, b)
    rest = f.add(f.add(a_low, b_low), f.sub(b, f.sub(total, a)))
    high = f.add(total, rest)
    return high, f.sub(rest, f.sub(high, total))


def pow_(f: Function, x: str, y: str, w: int, dtype: DType) -> str:
    """x^y = +-e^(y log|x|), computed in f64 with the logarithm as a sum of two; special cases as IEEE pow.

    f32 is within 1 ulp; f64 within 4 ulp for |y log x| up to about 200 and 16 ulp at the ends of the range.
    """
    if dtype == "f32":
        wide = pow_(f, f.cast("fpext", x, "double"), f.cast("fpext", y, "double"), w, "f64")
        return f.cast("fptrunc", wide, "float")
    ty = vec("double", w)
    a = fabs(f, x)
    high, low = log_pair(f, a, w)
    regular = f.and_(f.cmp("gt", a, 0.0), f.cmp("lt", a, INF))
    high, low = log_specials(f, a, high, ty), f.select(regular, low, 0.0, ty)
    p = f.mul(y, high)
    p_low = f.fma(y, low, f.fma(y, high, f.neg(p)))
    p_low = f.select(f.cmp("lt", fabs(f, p), 800.0), p_low, 0.0, ty)
    size = exp(f, p, w, "f64")
    size = f.select(f.cmp("lt", size, INF), f.fma(size, p_low, size), size)
    size = f.select(f.cmp("eq", a, 1.0), f.select(f.cmp("ord", y, y), 1.0, y, ty), size)
    half = f.mul(y, 0.5)
    whole = f.cmp("eq", trunc(f, y), y)
    odd = f.and_(whole, f.cmp("ne", trunc(f, half), half))
    sign_source = f.select(odd, x, 1.0, ty)
    signed = copysign(f, size, sign_source)
    undefined = f.and_(f.and_(f.cmp("lt", x, 0.0), f.cmp("gt", x, -INF)), f.not_(whole))
    result = f.select(undefined, NAN, signed, ty)
    return f.select(f.or_(f.cmp("eq", y, 0.0), f.cmp("eq", x, 1.0)), 1.0, result, ty)


def fmod(f: Function, x: str, y: str, w: int, dtype: DType) -> str:
    """x - y trunc(x / y) with the sign of x, exact for any quotient (C's fmod).

    A step from r to r - n d with n = trunc(r / d), r / d rounded to p bits, is exact. Where r / d < 2^(p-1), n is the
    true quotient or one more: r - n d is smaller than d, and a multiple of the last place of d or, if no larger than r,
    of that of r. Beyond, r / d is whole with an error of half its last place, 2^k: r - n d is a multiple of 2^k times
    the last place of d, of at most p bits. So one step does for quotients below 2^(p-1). Others lose p - 1 bits a step,
    where d is y or, so that r / d stays finite, y times a power of two. What is one step too low gets y once, exactly.
    """
    fmt = FORMATS[dtype]
    ty = vec(fmt.scalar, w)
    scale = 2.0**100 if dtype == "f32" else 2.0**600
    a, b = fabs(f, x), fabs(f, y)

    def step(r: str, d: str, quotient: str) -> str:
        return f.fma(f.neg(trunc(f, quotient)), d, r)

    def more(values: list[str]) -> list[str]:
        (r,) = values
        size, far = fabs(f, r), f.mul(b, scale)
        farther = f.mul(far, scale)
        d = f.select(f.cmp("ge", size, far), f.select(f.cmp("ge", size, farther), farther, far), b)
        return [f.select(f.cmp("ge", size, b), step(r, d, f.div(r, d)), r)]

    quotient = f.div(a, b)
    large = f.cmp("ge", quotient, 2.0**fmt.mantissa)
    first = f.select(f.cmp("lt", quotient, 1.0), a, step(a, b, quotient))  # an infinite y leaves x as it is

    def slow() -> list[str]:
        start = f.select(large, a, first)
        return f.while_([start], lambda r: any_lane(f, f.cmp("ge", fabs(f, r[0]), b), w), more)

    (r,) = f.if_(any_lane(f, large, w), slow, lambda: [first])
    return copysign(f, f.select(f.cmp("lt", r, 0.0), f.add(r, b), r, ty), x)


def any_lane(f: Function, mask: str, w: int) -> str:
    """Whether any lane is set."""
    return mask if w == 1 else f.cmp("ne", f.cast("bitcast", mask, f"i{w}"), 0)


def fabs(f: Function, x: str) -> str:
    """|x|: clears the sign bit."""
    return f.intrinsic("fabs", x)


def copysign(f: Function, x: str, sign: str) -> str:
    """|x| with the sign of `sign`."""
    return f.intrinsic("copysign", x, sign)


def floor(f: Function, x: str) -> str:
    """Largest integer <= x; one instruction (SSE4.1, AVX, NEON), as are the three below."""
    return f.intrinsic("floor", x)


def ceil(f: Function, x: str) -> str:
    """Smallest integer >= x."""
    return f.intrinsic("ceil", x)


def trunc(f: Function, x: str) -> str:
    """x towards zero."""
    return f.intrinsic("trunc", x)


def round_even(f: Function, x: str) -> str:
    """Nearest integer, ties to even."""
    return f.intrinsic("roundeven", x)


def sqrt(f: Function, x: str) -> str:
    """Correctly rounded square root."""
    return f.intrinsic("sqrt", x)


def rsqrt(f: Function, x: str) -> str:
    """1 / sqrt(x) by a square root and a division (1.5 ulp)."""
    return f.div(1.0, sqrt(f, x))


def plain(emit: Callable[[Function, str], str]) -> Emitter:
    """Gives an emitter that needs neither width nor dtype the common signature."""
    return lambda f, x, w, dtype: emit(f, x)


BINARY: dict[str, Callable[[Function, str, str, int, DType], str]] = {"fmod": fmod, "pow": pow_}
FUNCTIONS: dict[str, Emitter] = {
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "tanh": tanh,
    "erf": erf,
    "normal_cdf": normal_cdf,
    "sigmoid": sigmoid,
    "sin": sin,
    "cos": cos,
    "tan": tan,
    "abs": plain(fabs),
    "floor": plain(floor),
    "ceil": plain(ceil),
    "trunc": plain(trunc),
    "round_even": plain(round_even),
    "sqrt": plain(sqrt),
    "rsqrt": plain(rsqrt),
}
