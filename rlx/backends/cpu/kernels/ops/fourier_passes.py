"""The passes of Fourier transforms: functions of one radix, on vectors of real and of imaginary parts.

See `rlx.ops.fourier.plan.FftPass` for what a pass computes. Its elements lie as two arrays of parts (*split*) or, where
it reads or writes what the user sees, as pairs (real, imaginary). An inverse transform is the same with the parts of
what comes in and goes out exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlx.backends.cpu.llvm.builder import Function, constant, element, size_of, vec, width
from rlx.backends.cpu.loops.transpose import transposed
from rlx.ops.fourier.plan import FftPass, unit_roots
from rlx.records import dataclass

__all__ = [
    "PAIRS",
    "SPLIT",
    "SWAPPED",
    "Number",
    "Parts",
    "PassKind",
    "complex_product",
    "joined",
    "parted",
    "pass_function",
]  # fmt: skip

Number = tuple[str, str]  # real and imaginary parts: SSA values, vectors as a rule

SPLIT, PAIRS, SWAPPED = "split", "pairs", "swapped"  # how parts lie; swapped: pairs (imaginary, real)


# ---- numbers


def complex_product(f: Function, x: Number, w: Number) -> Number:
    """x * w."""
    (a, b), (c, d) = x, w
    return f.fma(a, c, f.neg(f.mul(b, d))), f.fma(a, d, f.mul(b, c))


def _sum(f: Function, a: Number, b: Number) -> Number:
    return f.add(a[0], b[0]), f.add(a[1], b[1])


def _difference(f: Function, a: Number, b: Number) -> Number:
    return f.sub(a[0], b[0]), f.sub(a[1], b[1])


def butterfly(f: Function, x: Sequence[Number]) -> list[Number]:
    """The transform of a few numbers."""
    n = len(x)
    if n == 1:
        return list(x)
    if n == 2:
        return [_sum(f, *x), _difference(f, *x)]
    if n == 4:
        (s, d), (t, e) = ((_sum(f, x[i], x[i + 2]), _difference(f, x[i], x[i + 2])) for i in (0, 1))
        turned = (f.add(d[0], e[1]), f.sub(d[1], e[0])), (f.sub(d[0], e[1]), f.add(d[1], e[0]))
        return [_sum(f, s, t), turned[0], _difference(f, s, t), turned[1]]
    first = next((p for p in (2, 3, 5, 7) if n % p == 0), n)
    if first == n:
        return _odd(f, x)
    inner = [butterfly(f, x[i::first]) for i in range(first)]
    second = n // first
    made: list[Number] = [("", "")] * n
    for k in range(second):
        column = [_turned(f, inner[i][k], i * k, n) for i in range(first)]
        for q, value in enumerate(butterfly(f, column)):
            made[k + second * q] = value
    return made


def _turned(f: Function, x: Number, steps: int, n: int) -> Number:
    """x times a constant root of 1."""
    (a, b), eighths = x, 8 * steps
    if steps == 0:
        return x
    if eighths % n:
        w = unit_roots(np.array(steps), n)
        ty = f.type_of(a)
        return complex_product(f, x, (constant(w.real.item(), ty), constant(w.imag.item(), ty)))
    half = math.sqrt(0.5)
    match eighths // n:
        case 1:
            return f.mul(f.add(a, b), half), f.mul(f.sub(b, a), half)
        case 2:
            return b, f.neg(a)
        case 3:
            return f.mul(f.sub(b, a), half), f.neg(f.mul(f.add(a, b), half))
        case _:
            raise AssertionError(f"{steps} steps of {n} in a transform of few numbers")


def _odd(f: Function, x: Sequence[Number]) -> list[Number]:
    """A transform of a prime number: sums and differences of the elements that lie opposite each other."""
    n = len(x)
    half = range(1, n // 2 + 1)
    sums = {j: _sum(f, x[j], x[n - j]) for j in half}
    differences = {j: _difference(f, x[j], x[n - j]) for j in half}
    first = x[0]
    for j in half:
        first = _sum(f, first, sums[j])
    made = [first] * n
    ty = f.type_of(x[0][0])
    for k in half:
        (re, im), turn = x[0], ("", "")
        for j in half:
            root = unit_roots(np.array(j * k), n)
            cos, sin = constant(root.real.item(), ty), constant(-root.imag.item(), ty)
            re, im = f.fma(cos, sums[j][0], re), f.fma(cos, sums[j][1], im)
            d = differences[j]
            if j == 1:
                turn = f.mul(sin, d[0]), f.mul(sin, d[1])
            else:
                turn = f.fma(sin, d[0], turn[0]), f.fma(sin, d[1], turn[1])
        made[k] = f.add(re, turn[1]), f.sub(im, turn[0])
        made[n - k] = f.sub(re, turn[1]), f.add(im, turn[0])
    return made


# ---- memory


@dataclass(frozen=True)
class Parts:
    """Where complex numbers lie: `real` and `imaginary` are arrays, or `real` is one of pairs if `kind` says so."""

    kind: str
    real: str
    imaginary: str = "null"

    @property
    def swapped(self) -> Parts:
        """The same with the parts exchanged."""
        return Parts(self.kind, self.imaginary, self.real)

    def load(self, f: Function, at: str, ty: str) -> Number:
        """As many numbers from place `at` on as the type has lanes."""
        real = element(ty)
        if self.kind == SPLIT:
            return f.load(ty, f.gep(self.real, at, real)), f.load(ty, f.gep(self.imaginary, at, real))
        both = f.load(vec(real, 2 * width(ty)), f.gep(self.real, f.shl(at, 1, "i64"), real))
        first, second = parted(f, both)
        return (second, first) if self.kind == SWAPPED else (first, second)

    def store(self, f: Function, x: Number, at: str) -> None:
        """Puts numbers to place `at` and what follows."""
        real = element(f.type_of(x[0]))
        if self.kind == SPLIT:
            for base, part in zip((self.real, self.imaginary), x, strict=True):
                f.store(part, f.gep(base, at, real))
            return
        both = joined(f, (x[1], x[0]) if self.kind == SWAPPED else x)
        f.store(both, f.gep(self.real, f.shl(at, 1, "i64"), real), align=size_of(real))


def parted(f: Function, pairs: str) -> Number:
    """The real and the imaginary parts of a vector of pairs."""
    w = width(f.type_of(pairs)) // 2
    if w == 1:
        return f.extract(pairs, 0), f.extract(pairs, 1)
    return f.shuffle(pairs, None, range(0, 2 * w, 2)), f.shuffle(pairs, None, range(1, 2 * w, 2))


def joined(f: Function, x: Number) -> str:
    """The vector of pairs of such parts."""
    ty = f.type_of(x[0])
    w = width(ty)
    if w == 1:
        return f.insert(f.insert("poison", x[0], 0, vec(ty, 2)), x[1], 1)
    return f.shuffle(x[0], x[1], [lane for i in range(w) for lane in (i, i + w)])


# ---- passes


@dataclass(frozen=True)
class PassKind:
    """What one function serves: passes of that radix, kinds of memory, and lanes (see `FftPass`)."""

    radix: int
    real: str  # the LLVM type of a part
    lanes: int
    source: str
    target: str
    last: bool  # no factors follow
    scaled: bool  # results are multiplied by the last argument
    stride: int  # of a pass along j, 0 otherwise

    @classmethod
    def of(cls, one: FftPass, real: str, lanes: int, source: str, target: str, scaled: bool) -> PassKind:
        """That of a pass where vectors have so many lanes."""
        room = one.stride * one.rest if one.along else one.stride
        if one.along and one.stride == 1 and one.radix & one.radix - 1 == 0 and one.radix >= FOUR:
            room = min(room, one.radix)
        lanes = min(lanes, 1 << room.bit_length() - 1)
        stride = one.stride if one.along else 0
        return cls(one.radix, real, lanes, source, target, one.rest == 1, scaled, stride)


FOUR = 4
PASS_ARGS = [("ptr", "xr"), ("ptr", "xi"), ("ptr", "yr"), ("ptr", "yi"), ("ptr", "table"), ("i64", "s"), ("i64", "m")]


def pass_function(kind: PassKind) -> Function:
    """The function of a kind: from x to y, with factors at `table`, of stride `s` and rest `m`; then the scale."""
    name = f"pass_{kind.radix}_{kind.lanes}_{kind.source}_{kind.target}_{kind.last:d}{kind.scaled:d}{kind.stride}"
    f = Function(name, [*PASS_ARGS, (kind.real, "scale")], internal=True, attrs="nounwind noinline")
    source, target = Parts(kind.source, "%xr", "%xi"), Parts(kind.target, "%yr", "%yi")
    ty, r, v = vec(kind.real, kind.lanes), kind.radix, kind.lanes
    count = f.mul("%s", "%m", "i64")

    def vectors(room: str, body: Callable[[str], None]) -> None:
        """Runs the body at every place of a vector; the last ones overlap."""
        last = f.sub(room, v, "i64")
        f.loop(0, room, v, [], lambda i, _: body(f.min(i, last, "i64")), runs=True)

    def computed(at: str, factor: Callable[[int], Number]) -> list[Number]:
        x = [source.load(f, f.add(at, f.mul(count, k, "i64"), "i64") if k else at, ty) for k in range(r)]
        made = butterfly(f, x)
        if not kind.last:
            made = [made[0], *(complex_product(f, made[k], factor(k)) for k in range(1, r))]
        if kind.scaled:
            scale = f.splat("%scale", v)
            made = [(f.mul(a, scale), f.mul(b, scale)) for a, b in made]
        return made

    def row(p: str, _: list[str]) -> None:
        """The elements of one p: lanes are q."""
        base = f.gep("%table", f.mul(p, 2 * (r - 1), "i64"), kind.real)

        def factor(part: int) -> str:
            return f.splat(f.load(kind.real, f.gep(base, part, kind.real)), v)

        w = [] if kind.last else [(factor(2 * k), factor(2 * k + 1)) for k in range(r - 1)]
        first, to = f.mul(p, "%s", "i64"), f.mul(f.mul(p, r, "i64"), "%s", "i64")

        def lanes_of_q(q: str) -> None:
            for k, value in enumerate(computed(f.add(first, q, "i64"), lambda k: w[k - 1])):
                at = f.add(to, q, "i64")
                target.store(f, value, f.add(at, f.mul("%s", k, "i64"), "i64") if k else at)

        vectors("%s", lanes_of_q)

    def lanes_of_j(j: str) -> None:
        def factor(k: int) -> Number:
            real = f.add(j, f.mul(count, 2 * (k - 1), "i64"), "i64") if k > 1 else j
            imaginary = f.add(real, count, "i64")
            return f.load(ty, f.gep("%table", real, kind.real)), f.load(ty, f.gep("%table", imaginary, kind.real))

        _store_along(f, kind, target, computed(j, factor), j)

    if kind.stride:
        vectors(count, lanes_of_j)
    else:
        f.loop(0, "%m", 1, [], row, runs=True)
    f.ret()
    return f


def _store_along(f: Function, kind: PassKind, target: Parts, made: list[Number], j: str) -> None:
    """Puts the results of lanes j, j + 1, ... to q + stride (radix p + k), where j = q + stride p."""
    r, s, v = kind.radix, kind.stride, kind.lanes
    if s == 1 and target.kind == SPLIT and v > 1 and r % v == 0:
        first = f.mul(j, r, "i64")
        for block in range(0, r, v):
            for base, part in ((target.real, 0), (target.imaginary, 1)):
                for lane, line in enumerate(transposed(f, [made[block + k][part] for k in range(v)])):
                    f.store(line, f.gep(base, f.add(first, lane * r + block, "i64"), kind.real))
        return
    for lane in range(v):
        one = f.add(j, lane, "i64")
        p = one if s == 1 else f.binary("udiv", one, s, "i64")
        first = f.mul(one, r, "i64") if s == 1 else f.add(one, f.mul(p, s * (r - 1), "i64"), "i64")
        for k, value in enumerate(made):
            at = f.add(first, k * s, "i64")
            target.store(f, (f.extract(value[0], lane), f.extract(value[1], lane)), at)
