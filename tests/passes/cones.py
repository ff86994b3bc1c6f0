"""Random cones: graphs of element-wise nodes over one input, among them every known way to write an activation.

A form may come out changed in one place: a number moved, a limit added, a comparison or its branches turned round. Such
a graph is another function, which no pass may take for the activation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ops.base import OPS
from rlx.ops.elementwise import Binary, Cast, Clip, Div, Exp, Mul, Pow, Reciprocal, Unary

MANTISSA = {"f64": 53, "f32": 24, "f16": 11}
FLOATS, INTEGERS = ("f32", "f32", "f16", "f64"), ("i8", "u8", "i32", "i64", "u16")
KINKS = (-6.0, -3.0, -2.5, -1.0, 0.0, 1.0, 2.5, 3.0, 6.0)
TIES = (0.5, 1.5, 2.5, -0.5, -1.5)
LIMITS = (65504.0, -65504.0, 6.1035e-5, 5.96e-8, 3.4028234663852886e38, -3.4028234663852886e38, 1.1754944e-38, 1e4, 2e4)
USUAL = (1 / 6, 0.2, 0.1, 0.01, math.sqrt(0.5), math.sqrt(2), 0.044715, math.sqrt(2 / math.pi), 1.702, 32768.0)
WHOLE = ("abs", "floor", "ceil", "round", "sign", "neg", "identity", "relu")
CURVES = (
    *("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf", "sigmoid", "atan", "asinh", "atanh"),
    *("softplus", "softsign", "mish", "silu", "gelu", "hard_swish", "elu", "selu", "celu", "leaky_relu"),
    *("hard_sigmoid", "thresholded_relu"),
)
POINTS = 160  # of an input
PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal")


class Cone:
    """A graph being built over the input "x". Change number `change` of those that are possible is made, if any."""

    def __init__(self, rng: random.Random, dtype: str, change: int | None = None) -> None:
        self.rng, self.dtype, self.change = rng, dtype, change
        self.graph = Graph("cone")
        self.x = self.graph.input("x", (POINTS,), dtype)
        self.places = 0  # where something could be changed, so far
        self.numbers: list[float] = []

    def turn(self) -> bool:
        """Whether this place is the one to change."""
        self.places += 1
        return self.change == self.places - 1

    def number(self, value: float) -> Value:
        if self.turn():
            value = value * (1 + self.rng.choice([1e-3, -1e-3])) if value else self.rng.choice([1e-3, -1e-3])
        return self.constant(value)

    def constant(self, value: float) -> Value:
        kind = DTYPES[self.dtype].numpy
        if DTYPES[self.dtype].is_integer:
            info = np.iinfo(kind)
            value = int(min(max(value, info.min), info.max))
        with np.errstate(over="ignore"):
            made = self.graph.constant(np.asarray(value).astype(kind))
        self.numbers.append(float(value))
        return made

    def do(self, name: str, *values: Any, **attributes: Any) -> Value:
        """A node; numbers among its operands are constants. To change it is to limit what it gives."""
        made = [v if isinstance(v, Value) else self.number(v) for v in values]
        result = self.graph.add(OPS[name](**attributes), *made)[0]
        if result.dtype.name == self.dtype and self.turn():
            result = self.graph.add(
                OPS[self.rng.choice(["minimum", "maximum"])](), result, self.constant(any_number(self.rng))
            )[0]
        return result

    def clip(self, value: Value, lo: float | None, hi: float | None) -> Value:
        ends = [n if n is None or not self.turn() else n * 1.001 + 1e-3 for n in (lo, hi)]
        self.numbers += [float(n) for n in ends if n is not None]
        return self.graph.add(Clip(*ends), value)[0]

    def where(self, comparison: str, a: Value, b: float, yes: Any, no: Any) -> Value:
        """where(a comparison b, yes, no); to change it is to swap the branches or to turn the comparison round."""
        cond = self.do(comparison, a, b)
        if self.turn():
            yes, no = no, yes
        if self.turn():
            cond = self.graph.add(OPS["not"](), cond)[0]
        yes, no = (v if isinstance(v, Value) else self.number(v) for v in (yes, no))
        return self.do("where", cond, yes, no)


def _gelu(inner: Callable[[Cone, Value], Value], order: int) -> Callable[[Cone, Value], Value]:
    def build(c: Cone, x: Value) -> Value:
        curve = c.do("add", inner(c, x), 1.0)
        match order:
            case 0:
                return c.do("mul", x, c.do("mul", curve, 0.5))
            case 1:
                return c.do("mul", c.do("mul", x, 0.5), curve)
            case 2:
                return c.do("mul", c.do("mul", x, curve), 0.5)
            case _:
                return c.do("div", c.do("mul", curve, x), 2.0)

    return build


def _erf(c: Cone, x: Value) -> Value:
    way = c.rng.random() < 0.5
    return c.do("erf", c.do("div", x, math.sqrt(2)) if way else c.do("mul", x, math.sqrt(0.5)))


def _tanh(c: Cone, x: Value) -> Value:
    cube = c.do("pow", x, 3.0) if c.rng.random() < 0.5 else c.do("mul", x, c.do("mul", x, x))
    return c.do("tanh", c.do("mul", c.do("add", x, c.do("mul", cube, 0.044715)), math.sqrt(2 / math.pi)))


def _sigmoid(c: Cone, x: Value) -> Value:
    return c.do("reciprocal", c.do("add", c.do("exp", c.do("neg", x)), 1.0))


def _softplus(c: Cone, x: Value) -> Value:
    return c.do("log", c.do("add", c.do("exp", x), 1.0))


def _shifted(c: Cone, x: Value) -> Value:
    return c.clip(c.do("add", x, 3.0), 0.0, 6.0)


def _relu6(c: Cone, x: Value) -> Value:
    return c.do("minimum", c.do("maximum", c.do("add", x, 3.0), 0.0), 6.0)


def _elu(c: Cone, x: Value, limit: bool) -> Value:
    power = c.do("exp", c.do("minimum", x, 0.0) if limit else x)
    return c.do("mul", c.do("sub", power, 1.0), c.rng.choice([1.0, 0.5, 1.7]))


FORMS: dict[str, Callable[[Cone, Value], Value]] = {
    **{f"gelu {i}": _gelu(_erf, i) for i in range(4)},
    **{f"gelu tanh {i}": _gelu(_tanh, i) for i in range(4)},
    "silu": lambda c, x: c.do("mul", x, c.do("sigmoid", x)),
    "silu by division": lambda c, x: c.do("div", x, c.do("add", c.do("exp", c.do("neg", x)), 1.0)),
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "mish": lambda c, x: c.do("mul", x, c.do("tanh", c.do("softplus", x))),
    "mish by log": lambda c, x: c.do("mul", x, c.do("tanh", _softplus(c, x))),
    "softsign": lambda c, x: c.do("div", x, c.do("add", c.do("abs", x), 1.0)),
    "hard sigmoid": lambda c, x: c.do("div", _shifted(c, x), 6.0),
    "hard sigmoid 2": lambda c, x: c.clip(c.do("add", c.do("mul", x, 0.2), 0.5), 0.0, 1.0),
    "hard sigmoid 3": lambda c, x: c.do("mul", _relu6(c, x), 1 / 6),
    "hard swish": lambda c, x: c.do("div", c.do("mul", x, _shifted(c, x)), 6.0),
    "hard swish 2": lambda c, x: c.do("mul", x, c.do("div", _relu6(c, x), 6.0)),
    "hard swish 3": lambda c, x: c.do("mul", c.do("hard_sigmoid", x, alpha=1 / 6, beta=0.5), x),
    "hard swish 4": lambda c, x: c.do("mul", c.do("mul", x, 1 / 6), _shifted(c, x)),
    "leaky relu": lambda c, x: c.do("maximum", x, c.do("mul", x, 0.1)),
    "leaky relu 2": lambda c, x: c.where(c.rng.choice(["greater", "greater_equal"]), x, 0.0, x, c.do("mul", x, 0.1)),
    "leaky relu 3": lambda c, x: c.where(c.rng.choice(["less", "less_equal"]), x, 0.0, c.do("mul", x, 0.1), x),
    "elu": lambda c, x: c.where("greater", x, 0.0, x, _elu(c, x, True)),
    "elu 2": lambda c, x: c.where("greater_equal", x, 0.0, x, _elu(c, x, False)),
    "elu 3": lambda c, x: c.do("add", c.do("relu", x), _elu(c, x, True)),
    "relu": lambda c, x: c.do("maximum", x, 0.0),
    "relu by clip": lambda c, x: c.clip(x, 0.0, math.inf),
    "relu6": lambda c, x: c.clip(x, 0.0, 6.0),
}


def any_number(rng: random.Random) -> float:
    kind = rng.randrange(6)
    match kind:
        case 0:
            return rng.choice([-1, 1]) * 10 ** rng.uniform(-30, 30)
        case 1:
            return rng.choice(TIES)
        case 2:
            return rng.choice(LIMITS)
        case 3:
            return float(rng.randint(-10, 10))
        case 4:
            return rng.choice(KINKS)
    return rng.choice(USUAL)


def random_cone(seed: int) -> Cone:
    """A cone that is a form (as it is or changed in one place), between other nodes or alone, or wholly random."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        return _integer_cone(rng)
    dtype = rng.choice(FLOATS)
    change = None
    kind = rng.choice(["form", "changed", "changed", "random"])
    name = rng.choice(list(FORMS))
    if kind == "changed":
        trial = Cone(random.Random(seed), dtype)
        FORMS[name](trial, trial.x)
        change = rng.randrange(trial.places)
    c = Cone(rng, dtype, change)
    values = [c.x]
    steps = 0 if rng.random() < 0.5 else rng.randint(1, 3)
    _grow(c, values, rng.randint(2, 8) if kind == "random" else steps // 2)
    if kind != "random":
        values.append(FORMS[name](c, values[-1]))
        _grow(c, values, steps - steps // 2)
    c.graph.output(values[-1], "y")
    return c


def _grow(c: Cone, values: list[Value], count: int) -> None:
    """So many random nodes, mostly over the last value."""
    rng = c.rng
    for _ in range(count):
        last = values[-1] if rng.random() < 0.8 else rng.choice(values)
        other: Any = c.constant(any_number(rng)) if rng.random() < 0.7 else rng.choice(values)
        match rng.randrange(8):
            case 0:
                made = c.do(rng.choice(WHOLE), last)
            case 1 | 2:
                made = c.do(rng.choice(CURVES), last)
            case 3:
                ends = sorted((any_number(rng), any_number(rng)))
                made = c.clip(last, *rng.choice([tuple(ends), (ends[0], None), (None, ends[1])]))
            case 4:
                made = c.where(rng.choice(COMPARISONS), last, any_number(rng), rng.choice(values), other)
            case 5:
                made = c.do("pow", last, c.constant(rng.choice([1.0, 2.0, 3.0, -1.0, 0.5, -0.5])))
            case 6:
                to = DTYPES[rng.choice(["f64", "f32", "f16", "i32", "i8", "bool"])]
                last = c.clip(last, -99.0, 99.0) if to.is_integer else last  # within the range of the type
                made = c.graph.add(Cast(DTYPES[c.dtype]), c.graph.add(Cast(to), last)[0])[0]
            case _:
                pair = [last, other] if rng.random() < 0.7 else [other, last]
                made = c.do(rng.choice(PAIRS), *pair)
        values.append(made)


def _integer_cone(rng: random.Random) -> Cone:
    c = Cone(rng, rng.choice(INTEGERS))
    kind = DTYPES[c.dtype].kind
    info = np.iinfo(DTYPES[c.dtype].numpy)
    value = c.x
    for _ in range(rng.randint(1, 6)):
        number = rng.choice([rng.randint(info.min, info.max), rng.randint(-3, 9), info.min, info.max])
        number = max(number, info.min)
        match rng.randrange(7):
            case 0 | 1:
                value = c.do(rng.choice(["add", "sub", "mul", "maximum", "minimum"]), value, c.constant(number))
            case 2:
                value = c.do(rng.choice(["sub", "add", "mul"]), c.constant(number), value)
            case 3:
                value = c.do("div", value, c.constant(number or 1))
            case 4:
                value = c.do(rng.choice(["abs", "sign", *(["neg", "relu"] if kind == "i" else [])]), value)
            case 5:
                exponent = c.graph.constant(np.asarray(rng.choice([1, 2, 3]), rng.choice([np.int64, np.float32])))
                value = c.graph.add(OPS["pow"](), value, exponent)[0]
            case _:
                between = DTYPES[rng.choice(["i64", "i32", "i16", "u8", "f64", "f32", "bool"])]
                value = c.graph.add(Cast(DTYPES[c.dtype]), c.graph.add(Cast(between), value)[0])[0]
    c.graph.output(value, "y")
    return c


# ---- points


def numbers_of(graph: Graph) -> Iterator[float]:
    """Constants and numeric attributes."""
    for value in graph.constants:
        if value.data is not None and value.data.size == 1:
            yield float(value.data.astype(np.float64).item())
    for node in graph.nodes:
        yield from (float(a) for a in node.op.attributes().values() if isinstance(a, int | float))


def points(c: Cone, *graphs: Graph) -> Array:
    """Inputs: special ones, and some around every kink and number of the graphs, their sums, products and quotients."""
    rng = c.rng
    kind = DTYPES[c.dtype].numpy
    if DTYPES[c.dtype].is_integer:
        info = np.iinfo(kind)
        near = [info.min, info.min + 1, info.max, info.max - 1, *range(max(info.min, -9), 10)]
        near += [rng.randint(info.min, info.max) for _ in range(POINTS)]
        return np.array(near[:POINTS], kind)
    reach = np.finfo(kind)
    special = [0.0, -0.0, math.nan, math.inf, -math.inf]
    special += [s * float(v) for v in (reach.smallest_subnormal, reach.tiny, reach.max, 1e-3) for s in (1, -1)]
    own = [n for g in graphs for n in numbers_of(g) if math.isfinite(n)]
    rng.shuffle(own)
    with np.errstate(all="ignore"):
        near = [f(a, b) for a in own[:4] for b in own[:4] for f in (_plus, _minus, _times, _over)]
        rng.shuffle(near)
        spots = [*own, *(-n for n in own), *(1 / n for n in own if n), *near[:20], *KINKS]
        around = [s * (1 + d) + e for s in spots for d, e in ((0, 0), (2e-3, 0), (-2e-3, 0), (0, 5e-4), (0, -5e-4))]
        wide = [rng.choice([-1, 1]) * 10 ** rng.uniform(-30, 30) for _ in range(16)]
        usual = [rng.uniform(-12, 12) for _ in range(40)]
        keep = POINTS - len(special) - len(wide) - len(usual)
        rest = rng.sample(around, keep) if len(around) > keep else around + [rng.uniform(-4, 4)] * (keep - len(around))
        return np.array([*special, *wide, *usual, *rest], np.float64).astype(kind)


def _plus(a: float, b: float) -> float:
    return a + b


def _minus(a: float, b: float) -> float:
    return a - b


def _times(a: float, b: float) -> float:
    return a * b


def _over(a: float, b: float) -> float:
    return a / b if b else 0.0


# ---- evaluation


def widely(graph: Graph, x: Array, noise: np.random.Generator | None = None) -> tuple[Array, Array]:
    """The output with every float held in NumPy's widest type, and where something overflowed even so.

    Nor does it say what comes of dividing by a number that is 0 in its own type: which 0, its rounding decides.

    With noise the input and each result err by up to a rounding in their own type.
    """
    known = {v: _wide(a) for v, a in ((graph.inputs[0], x), *((c, np.asarray(c.data)) for c in graph.constants))}
    over = np.zeros(x.shape, bool)
    with np.errstate(all="ignore"):
        known[graph.inputs[0]] = _rounded(known[graph.inputs[0]], graph.inputs[0], noise)
        for node in graph.nodes:
            args = [known[v] for v in node.inputs]
            y = known[node.outputs[0]] = _rounded(_step(node, args), node.outputs[0], noise)
            if isinstance(node.op, Exp | Mul | Pow):
                over |= np.isinf(y) & np.all([np.isfinite(a) & (a != 0) for a in np.broadcast_arrays(*args)], axis=0)
            if isinstance(node.op, Div | Pow | Reciprocal) and node.outputs[0].dtype.name in MANTISSA:
                below = abs(args[1 if isinstance(node.op, Div) else 0])
                over |= (below != 0) & (below <= float(np.finfo(node.outputs[0].dtype.numpy).smallest_subnormal) / 2)
    return np.broadcast_to(known[graph.outputs[0].value], x.shape), over


def _rounded(y: Array, value: Value, noise: np.random.Generator | None) -> Array:
    """The values, off by up to a unit in the last place of the element type; zeros are exact."""
    if noise is None or value.dtype.name not in MANTISSA:
        return y
    relative, absolute = noise.uniform(-1, 1, (2, *y.shape)).astype(np.longdouble)
    least = np.longdouble(np.finfo(value.dtype.numpy).smallest_subnormal)
    return np.where(y == 0, y, y * (1 + relative * 2.0 ** -MANTISSA[value.dtype.name]) + absolute * least)


def _step(node: Node, args: list[Array]) -> Array:
    op: Any = node.op
    if isinstance(op, Cast) and op.to.is_float:
        return args[0].astype(np.longdouble)
    if isinstance(op, Cast) and args[0].dtype == np.longdouble:
        args = [np.trunc(args[0]).astype(np.float64) if op.to.is_integer else args[0] != 0]
    if isinstance(op, Clip) and node.outputs[0].dtype.is_float:
        kind = node.outputs[0].dtype.numpy
        lo, hi = (None if n is None else float(np.asarray(n).astype(kind)) for n in (op.lo, op.hi))
        return Clip(lo, hi).array(args[0])
    if node.outputs[0].dtype.name in ("f32", "f16"):  # attributes are rounded to the type of arithmetic
        op = replace(op, **{n: float(np.float32(a)) for n, a in op.attributes().items() if isinstance(a, float)})
    if isinstance(op, Pow) and node.outputs[0].dtype.is_float:
        return np.asarray(np.power(*args))
    return _wide(op.array(*args) if isinstance(op, Unary | Binary) else op.reference(*args))


def _wide(a: Array) -> Array:
    a = np.asarray(a)
    return a if a.dtype.kind in "iub" else a.astype(np.longdouble)
