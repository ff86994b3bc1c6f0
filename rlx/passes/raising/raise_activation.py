"""Activation functions that an exporter wrote as arithmetic become one op.

A group of element-wise nodes that depends on one value and on numbers is a function of one variable. Its formula, in
the normal form of `formula`, is compared with those of the activation functions in the tables below: a proof by
structure, in which no limit, threshold or kink can get lost. Numbers must be those of the table, or within two units
in the last place of the element type where a file can't hold them or has folded several into one.

So the op is the same function of all real numbers, and of infinities and NaN too. It differs in rounding only, where
that of a step of the file counts as such: a result that such a step rounds to zero may have its sign or its small
value, and where exp(x), x * 6 or a like step overflows before the function does, the op has the function's value
(log(1 + exp(x)) in f16 is infinite from 11.1 on, softplus(x) is x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.activation import (
    Elu,
    Gelu,
    HardSigmoid,
    HardSwish,
    LeakyRelu,
    Mish,
    Silu,
    Softplus,
    Softsign,
)
from rlx.ops.base import Op
from rlx.ops.elementwise import Add, Div, Mul, Neg, Sigmoid, Sub
from rlx.passes.match.formula import KNOWN_OPS, Formula, NoFormula, alike, call, clip, formula_of, numbers_in, x
from rlx.passes.match.patterns import MANTISSA, uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["raise_activation"]

LARGEST = 16  # nodes of one function
ARITHMETIC = (Add, Sub, Mul, Div, Neg)  # these alone give none of the functions
DONE = (HardSigmoid, Sigmoid, Softplus)  # ops that formulas know and that are activations already

ZERO, HALF, ONE, SIXTH = Fraction(0), Fraction(1, 2), Fraction(1), Fraction(1, 6)
ROOT_HALF, ROOT_2_PI = Fraction(math.sqrt(0.5)), Fraction(math.sqrt(2 / math.pi))
CUBIC = Fraction(0.044715)

FORMS: tuple[tuple[Op, Formula], ...] = (
    (Sigmoid(), call("sigmoid", x)),  # also of 1 / (1 + exp(-x)), by the normal form
    (Softplus(), call("softplus", x)),  # also of log(1 + exp(x))
    (Silu(), x * call("sigmoid", x)),
    (Mish(), x * call("tanh", call("softplus", x))),
    (Gelu(), x * HALF * (1 + call("erf", x * ROOT_HALF))),
    (Gelu("tanh"), x * HALF * (1 + call("tanh", (x + x * x * x * CUBIC) * ROOT_2_PI))),
    (Softsign(), x / (1 + call("abs", x))),
    (HardSwish(), x * clip(x + 3, ZERO, Fraction(6)) * SIXTH),
    (HardSwish(), x * clip(x * SIXTH + HALF, ZERO, ONE)),
)

LINEAR, NUMBER = dict(x).popitem()[0], frozenset[Any]()  # the products of a * x and of b
ABOVE, NOT_BELOW = ("greater", x, 0), ("greater_equal", x, 0)
BELOW, NOT_ABOVE = ("greater", 0, x), ("greater_equal", 0, x)


def _leaky(a: Fraction) -> Iterator[Formula]:
    """x where x >= 0, else a * x; where 0 is multiplied by `a` too, this must not turn its sign."""
    yield call("where", NOT_BELOW, x, x * a)
    yield call("where", BELOW, x * a, x)
    if a > 0:
        yield call("where", ABOVE, x, x * a)
        yield call("where", NOT_ABOVE, x * a, x)
    if 0 < a < 1:
        yield call("max", frozenset([x, x * a]))


def _elu(a: Fraction) -> Iterator[Formula]:
    """x where x >= 0, else a * (exp(x) - 1).

    Of -0 that is -0; forms that ask for x > 0, or add what is above 0, make 0 of it, and stay as they are.
    """
    negative = clip(x, None, ZERO)
    for power in (call("exp", x), call("exp", negative)):
        below = power * a - a
        yield call("where", NOT_BELOW, x, below)
        yield call("where", BELOW, below, x)


FAMILIES: tuple[tuple[type[Any], Callable[[Fraction], Iterator[Formula]]], ...] = ((LeakyRelu, _leaky), (Elu, _elu))


@lru_cache(256)
def _members(number: Fraction, dtype: DType) -> dict[Formula, Op]:
    """The functions of `FAMILIES` with that number, by their formulas."""
    return {form: family(_attribute(number, dtype)) for family, forms in FAMILIES for form in forms(number)}


Find = Callable[[Formula, DType], Op | None]


@dataclass
class _Cone:
    """Nodes that compute a function of `x`, in order; the last makes its result."""

    x: Value
    nodes: tuple[Node, ...]


def raise_activation(graph: Graph) -> Graph:
    """Replaces functions of one variable by the activation op that they are."""
    for find in (_named, _hard_sigmoid):  # HardSwish before the HardSigmoid in it
        graph = _replaced(graph, find)
    return graph


def _replaced(graph: Graph, find: Find) -> Graph:
    position: dict[Node, int] = {}
    variables: dict[Node, set[Value]] = {}

    def visit(site: Site) -> Value | None:
        added = list(takewhile(lambda n: n not in position, reversed(site.graph.nodes)))
        for node in reversed(added):
            position[node] = len(position)
        return _raised(site, position, variables, find)

    return rewrite(graph, visit)


def _raised(site: Site, position: dict[Node, int], variables: dict[Node, set[Value]], find: Find) -> Value | None:
    (out,) = site.node.outputs[:1]
    if not isinstance(site.op, KNOWN_OPS) or isinstance(site.op, DONE) or out.dtype.name not in MANTISSA:
        return None
    root = Node(site.op, site.inputs, (out,), site.node.provenance)
    best: tuple[_Cone, Op] | None = None
    for cone in _cones(root, position, variables):
        op = _found(cone, out.dtype, find)
        best = best if op is None else (cone, op)
    if best is None:
        return None
    cone, op = best
    site.merged.extend(cone.nodes[:-1])
    return site.add(op, cone.x)


def _cones(root: Node, position: dict[Node, int], variables: dict[Node, set[Value]]) -> Iterator[_Cone]:
    """The groups below the root through which one value alone comes in, smallest first; none of arithmetic alone.

    None has an op twice that is not arithmetic, as no function of the tables has. `variables` remembers which inputs of
    a node are no numbers.
    """
    nodes, curved = [root], set[type[Any]]() if isinstance(root.op, ARITHMETIC) else {type(root.op)}
    front = {v for v in root.inputs if uniform(v) is None}
    while front and len(nodes) <= LARGEST:
        if curved and len(front) == 1 and len(nodes) > 1:
            (entry,) = front
            if entry.type == root.outputs[0].type:
                yield _Cone(entry, tuple(reversed(nodes)))
        makers = [v.node for v in front if v.node is not None]
        if not makers:
            return
        last = max(makers, key=lambda n: position[n])
        if not isinstance(last.op, KNOWN_OPS) or last.outputs[0].shape != root.outputs[0].shape:
            return
        if last not in variables:
            variables[last] = {v for v in last.inputs if uniform(v) is None}
        front = (front - set(last.outputs)) | variables[last]
        nodes.append(last)
        if not isinstance(last.op, ARITHMETIC):
            if type(last.op) in curved:
                return
            curved.add(type(last.op))


def _found(cone: _Cone, dtype: DType, find: Find) -> Op | None:
    try:
        return find(formula_of(cone.nodes, cone.x), dtype)
    except NoFormula:
        return None


def _slack(dtype: DType) -> Fraction:
    """Two units in the last place of a number just above a power of two, relative to it."""
    return Fraction(4, 2 ** MANTISSA[dtype.name])


def _named(found: Formula, dtype: DType) -> Op | None:
    """The function of `FORMS` or `FAMILIES` that has this formula; a family's number is one of the formula's."""
    for op, form in FORMS:
        if alike(found, form, _slack(dtype)):
            return op
    members = (_members(number, dtype) for number in set(numbers_in(found)) if _attribute(number, dtype))
    return next((by_form[found] for by_form in members if found in by_form), None)


def _hard_sigmoid(found: Formula, dtype: DType) -> Op | None:
    """c * clip(a * x + b, 0, 1 / c) where 0 < b <= 1 / c: the op, c a x + c b, cancels no more than the file does."""
    for factors, c in found:
        match tuple(factors):
            case ((("clip", line, 0, Fraction() as top), 1),) if len(found) == 1 and top > 0:
                terms = dict(line)
                a, b = terms.get(LINEAR, ZERO), terms.get(NUMBER, ZERO)
                slope, shift = _attribute(a * c, dtype), _attribute(b * c, dtype)
                if len(terms) == 2 and slope and 0 < shift <= 1 and alike(c, 1 / top, _slack(dtype)):
                    return HardSigmoid(slope, shift)
    return None


def _attribute(number: Fraction, dtype: DType) -> float:
    """The number in the type that the op computes in; 0 where it is beyond what that holds with all its bits."""
    wide = dtype.bits == 64
    reach = 2 ** (1022 if wide else 126)
    if not 1 <= abs(number) * reach <= reach**2:
        return 0.0
    return float(number if wide else np.float32(float(number)))
