"""What a group of element-wise nodes computes, as a formula over one of their inputs in a normal form.

    formula   = sum of terms            {(product, coefficient), ...}
    product   = powers of atoms         {(atom, exponent), ...}, {} for a number
    atom      = ("x",), or a function and its arguments: ("erf", formula), ("clip", formula, lowest, highest), ...

Numbers are exact fractions. Products are multiplied out, so that every order of factors and brackets gives equal sets.
Equal formulas are the same function of real numbers. Nodes that may compute another function of floats have no formula
(`NoFormula`): terms that cancel (a file may use them to round), x / x, x + 0, x * 0, and products with numbers so large
or small that an intermediate result may overflow or become 0. A constant or limit has the value that its element type
holds. No limit and no condition is ever left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from rlx.ir.casting import held
from rlx.ir.graph import Node, Value
from rlx.ops.activation import HardSigmoid, Relu, Softplus
from rlx.ops.elementwise import (
    Abs,
    Add,
    Clip,
    Div,
    Erf,
    Exp,
    Greater,
    GreaterEqual,
    Identity,
    Less,
    LessEqual,
    Log,
    Maximum,
    Minimum,
    Mul,
    Neg,
    Not,
    Pow,
    Reciprocal,
    Sigmoid,
    Sub,
    Tanh,
    Where,
)
from rlx.passes.match.patterns import uniform

__all__ = ["KNOWN_OPS", "Formula", "NoFormula", "alike", "call", "clip", "formula_of", "numbers_in", "x"]

MOST_TERMS = 8
MODERATE = 256  # and its inverse: factors between these are multiplied


class NoFormula(Exception):
    """What the nodes compute has no normal form."""


class Formula(frozenset[Any]):
    """A sum of terms (product, coefficient). Python's operators make new ones; numbers may stand for themselves."""

    __slots__ = ()

    def __add__(self, other: Any) -> Formula:
        return _summed([*self, *_lifted(other)])

    __radd__ = __add__

    def __neg__(self) -> Formula:
        return Formula((p, -c) for p, c in self)

    def __sub__(self, other: Any) -> Formula:
        return self + -_lifted(other)

    def __mul__(self, other: Any) -> Formula:
        return _summed([_multiplied(a, b) for a, b in product(self, _lifted(other))])

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Formula:
        return self * _inverse(_lifted(other))


Term = tuple[frozenset[Any], Fraction]


def _lifted(value: Any) -> Formula:
    """The value as a formula; raises `NoFormula` for 0, infinities, NaN and conditions."""
    if isinstance(value, Formula) and value:
        return value
    if isinstance(value, Formula | tuple) or value == 0 or not math.isfinite(value):
        raise NoFormula
    return Formula([(frozenset(), Fraction(value))])


def _summed(terms: Sequence[Term]) -> Formula:
    total: dict[frozenset[Any], Fraction] = {}
    for factors, c in terms:
        before = total.get(factors)
        if before is not None and (before < 0) != (c < 0):
            raise NoFormula
        total[factors] = c if before is None else before + c
    if not 0 < len(total) <= MOST_TERMS:
        raise NoFormula
    return Formula(total.items())


def _multiplied(a: Term, b: Term) -> Term:
    (p, c), (q, d) = a, b
    if abs(c) != 1 and abs(d) != 1 and not all(1 <= abs(n) * MODERATE <= MODERATE**2 for n in (c, d)):
        raise NoFormula
    powers = dict(p)
    for atom, exponent in q:
        before = powers.get(atom, 0)
        if before * exponent < 0:
            raise NoFormula
        powers[atom] = before + exponent
    return frozenset(powers.items()), c * d


def _inverse(f: Formula) -> Formula:
    if len(f) == 1:
        ((p, c),) = f
        return Formula([(frozenset((atom, -exponent) for atom, exponent in p), 1 / c)])
    power = _one_plus_exp(f)
    return call("sigmoid", -power) if power is not None else Formula([(frozenset([(("sum", f), -1)]), Fraction(1))])


def _one_plus_exp(f: Formula) -> Formula | None:
    """u where the formula is 1 + exp(u)."""
    for factors, _ in f:
        match tuple(factors):
            case ((("exp", Formula() as u), 1),) if f == 1 + call("exp", u):
                return u
    return None


def call(name: str, *arguments: Any) -> Formula:
    """The value of a function as an atom."""
    return Formula([(frozenset([((name, *arguments), 1)]), Fraction(1))])


x = call("x")


def _log(f: Any) -> Formula:
    power = _one_plus_exp(_lifted(f))
    return call("log", f) if power is None else call("softplus", power)


def clip(f: Formula, lo: Fraction | None, hi: Fraction | None) -> Formula:
    """min(max(f, lo), hi), None for no limit. A clip of a clip is one clip, if the two ranges overlap."""
    for factors, c in f:
        match tuple(factors):
            case ((("clip", inner, first, last), 1),) if c == 1 and len(f) == 1:
                least = max((n for n in (first, lo) if n is not None), default=None)
                most = min((n for n in (last, hi) if n is not None), default=None)
                if least is None or most is None or least <= most:
                    return call("clip", inner, least, most)
    return call("clip", f, lo, hi)


# ---- nodes


def formula_of(nodes: Sequence[Node], variable: Value) -> Formula:
    """What the last of the nodes (in order) computes from the variable and numbers. Raises `NoFormula`."""
    known: dict[Value, Any] = {variable: x}
    for node in nodes:
        known[node.outputs[0]] = STEPS[type(node.op)](node, [_argument(v, known) for v in node.inputs])
    found = known[nodes[-1].outputs[0]]
    if not isinstance(found, Formula):
        raise NoFormula
    return found


def _argument(value: Value, known: dict[Value, Any]) -> Any:
    """A formula, a condition (a tuple), or a number that is 0 or not finite."""
    if value in known:
        return known[value]
    number = uniform(value)
    if number is None or isinstance(number, bool):
        raise NoFormula
    return number if number == 0 or not math.isfinite(number) else _lifted(number)


def _called(name: str) -> Callable[[Node, list[Any]], Formula]:
    return lambda node, args: call(name, _lifted(args[0]))


def _compared(name: str, first: int, second: int) -> Callable[[Node, list[Any]], Any]:
    return lambda node, args: (name, args[first], args[second])


def _clipped(node: Node, args: list[Any]) -> Formula:
    op: Any = node.op
    lo, hi = (0, None) if isinstance(op, Relu) else (op.lo, op.hi)
    dtype = node.outputs[0].dtype
    return _limited(_lifted(args[0]), *(None if n is None else float(held(n, dtype)) for n in (lo, hi)))


def _limited(f: Formula, lo: float | None, hi: float | None) -> Formula:
    lo, hi = (None if lo == -math.inf else lo), (None if hi == math.inf else hi)
    if not all(n is None or math.isfinite(n) for n in (lo, hi)):
        raise NoFormula
    ends = [None if n is None else Fraction(n) for n in (lo, hi)]
    return f if ends == [None, None] else clip(f, ends[0], ends[1])


def _extremum(node: Node, args: list[Any]) -> Formula:
    largest = isinstance(node.op, Maximum)
    for value, f in zip(node.inputs, reversed(args), strict=True):
        limit = uniform(value)
        if limit is not None:
            return _limited(_lifted(f), limit, None) if largest else _limited(_lifted(f), None, limit)
    return call("max" if largest else "min", frozenset(map(_lifted, args)))


def _power(node: Node, args: list[Any]) -> Formula:
    f, exponent = _lifted(args[0]), uniform(node.inputs[1])
    match exponent:
        case 1 | 2 | 3:
            return math.prod([f] * int(exponent), start=1)  # type: ignore[return-value]
        case -1:
            return _inverse(f)
    raise NoFormula


def _chosen(node: Node, args: list[Any]) -> Formula:
    cond, a, b = args
    if not isinstance(cond, tuple):
        raise NoFormula
    return call("where", *((cond[1], b, a) if cond[0] == "not" else (cond, a, b)))


def _hard_sigmoid(node: Node, args: list[Any]) -> Formula:
    op: Any = node.op
    kind = np.float64 if node.outputs[0].dtype.bits == 64 else np.float32
    with np.errstate(over="ignore"):
        slope, shift = (float(kind(n)) for n in (op.alpha, op.beta))
    return clip(_lifted(args[0]) * slope + shift, Fraction(0), Fraction(1))


STEPS: dict[type[Any], Callable[[Node, list[Any]], Any]] = {
    Identity: lambda node, args: _lifted(args[0]),
    Add: lambda node, args: _lifted(args[0]) + args[1],
    Sub: lambda node, args: _lifted(args[0]) - args[1],
    Mul: lambda node, args: _lifted(args[0]) * args[1],
    Div: lambda node, args: _lifted(args[0]) / args[1],
    Neg: lambda node, args: -_lifted(args[0]),
    Reciprocal: lambda node, args: _inverse(_lifted(args[0])),
    Pow: _power,
    Exp: _called("exp"),
    Log: lambda node, args: _log(args[0]),
    Erf: _called("erf"),
    Tanh: _called("tanh"),
    Sigmoid: _called("sigmoid"),
    Softplus: _called("softplus"),
    Abs: _called("abs"),
    Relu: _clipped,
    Clip: _clipped,
    Maximum: _extremum,
    Minimum: _extremum,
    HardSigmoid: _hard_sigmoid,
    Greater: _compared("greater", 0, 1),
    GreaterEqual: _compared("greater_equal", 0, 1),
    Less: _compared("greater", 1, 0),
    LessEqual: _compared("greater_equal", 1, 0),
    Not: lambda node, args: ("not", args[0]),
    Where: _chosen,
}
KNOWN_OPS = tuple(STEPS)


# ---- comparing


def alike(found: Any, wanted: Any, slack: Fraction) -> bool:
    """Whether two formulas are the same, except that numbers may be rounded.

    A number of `found` may differ from that of `wanted` by the relative error `slack`; but whole numbers and halves
    must be equal, because every float type holds them exactly.
    """
    if found == wanted:
        return True
    if isinstance(found, Fraction) and isinstance(wanted, Fraction):
        return wanted.denominator > 2 and abs(found - wanted) <= slack * abs(wanted)
    if type(found) is not type(wanted) or not isinstance(found, frozenset | tuple) or len(found) != len(wanted):
        return False
    if isinstance(found, tuple):
        return all(alike(a, b, slack) for a, b in zip(found, wanted, strict=True))
    rest = list(found)
    for item in wanted:
        match = next((i for i, other in enumerate(rest) if alike(other, item, slack)), None)
        if match is None:
            return False
        del rest[match]
    return True


def numbers_in(part: Any) -> Iterator[Fraction]:
    """Every coefficient and limit of a formula."""
    if isinstance(part, Fraction):
        yield part
    elif isinstance(part, frozenset | tuple):
        for inner in part:
            yield from numbers_in(inner)
