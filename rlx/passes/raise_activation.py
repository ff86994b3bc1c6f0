"""Activation functions that an exporter wrote as arithmetic become one op.

A group of element-wise nodes that depends on one value and on numbers is a function of one variable. It is evaluated
(in f64, by the ops' own references) on a grid of sample points and compared there with every activation function known
here, so the order in which an exporter wrote the factors doesn't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np

from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ops.activation import (
    Elu,
    Gelu,
    HardSigmoid,
    HardSwish,
    LeakyRelu,
    Mish,
    Relu,
    Silu,
    Softplus,
    Softsign,
)
from rlx.ops.base import Op
from rlx.ops.elementwise import (
    Add,
    Binary,
    Clip,
    Div,
    Exp,
    Maximum,
    Minimum,
    Mul,
    Neg,
    Pow,
    Sigmoid,
    Sub,
    Tanh,
    Unary,
    Where,
)
from rlx.passes.patterns import uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["raise_activation"]

LARGEST = 16  # nodes of one function
ARITHMETIC = (Add, Sub, Mul, Div, Neg)  # these alone give none of the functions
TOLERANCE = 2e-6  # constants in files are rounded to f32
TOLERANCE_F64 = 1e-11
LOST = 1e-15  # what f64 loses to cancellation, relative to 1 + |x|
KINKS = (-6.0, -3.0, -2.5, -1.0, 0.0, 1.0, 2.5, 3.0, 6.0)

Guess = Callable[[Callable[[float], float]], Op]  # from the function's values, the op with the attributes it would have


def _samples() -> Array:
    near = [k + d for k in KINKS for d in (-0.13, -0.011, 0.0, 0.017, 0.19)]
    return np.array([*near, *np.linspace(-12, 12, 25), -1e4, -300.0, -40.0, 40.0, 300.0, 1e4, np.nan])


X = _samples()

FIXED: tuple[Op, ...] = (
    Relu(),
    Silu(),
    HardSwish(),
    Gelu(),
    Gelu(approximate="tanh"),
    Mish(),
    Sigmoid(),
    Tanh(),
    Softplus(),
    Softsign(),
)

GUESSES: tuple[Guess, ...] = (
    lambda f: HardSigmoid(_f32((f(0.01) - f(0)) / 0.01), _f32(f(0))),
    lambda f: LeakyRelu(_f32(-f(-1))),
    lambda f: Elu(_f32(f(-1) / np.expm1(-1))),
)


WHOLE = (Gelu, Silu, HardSwish, Mish, LeakyRelu, Elu, Softsign)  # no part of another function
LIMITING = (Clip, Minimum, Maximum, Relu, HardSigmoid, Where, Exp)  # one of them is in every guessed function
KNOWN = (*(type(op) for op in FIXED), HardSigmoid, LeakyRelu, Elu)


@dataclass
class _Cone:
    """Nodes that compute a function of `x`, in order; the last makes its result."""

    x: Value
    nodes: tuple[Node, ...]


Find = Callable[[_Cone, float], Op | None]


def raise_activation(graph: Graph) -> Graph:
    """Replaces functions of one variable by the activation op that they are."""
    for find in (_fixed, _guessed):  # HardSwish before the HardSigmoid in it
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
    if not _is_scalar_op(site.node) or isinstance(site.op, KNOWN) or not out.dtype.is_float:
        return None
    root = Node(site.op, site.inputs, (out,), site.node.provenance)
    tolerance = TOLERANCE if out.dtype.bits <= 32 else TOLERANCE_F64
    best: tuple[_Cone, Op] | None = None
    for cone in _cones(root, position, variables):
        op = find(cone, tolerance)
        best = best if op is None else (cone, op)
    if best is None:
        return None
    cone, op = best
    site.merged.extend(cone.nodes[:-1])
    return site.add(op, cone.x)


def _is_scalar_op(node: Node) -> bool:
    return isinstance(node.op, Unary | Binary | Pow | Where) and len(node.outputs) == 1


def _cones(root: Node, position: dict[Node, int], variables: dict[Node, set[Value]]) -> Iterator[_Cone]:
    """The groups below the root through which one value alone comes in, smallest first; none of arithmetic alone.

    `variables` remembers which inputs of a node are no numbers.
    """
    nodes, curved = [root], not isinstance(root.op, ARITHMETIC)
    front = {v for v in root.inputs if uniform(v) is None}
    while front and len(nodes) <= LARGEST:
        if curved and len(front) == 1 and len(nodes) > 1:
            (x,) = front
            if x.type == root.outputs[0].type:
                yield _Cone(x, tuple(reversed(nodes)))
        makers = [v.node for v in front if v.node is not None]
        if not makers:
            return
        last = max(makers, key=lambda n: position[n])
        if not _is_scalar_op(last) or isinstance(last.op, WHOLE) or last.outputs[0].shape != root.outputs[0].shape:
            return
        if last not in variables:
            variables[last] = {v for v in last.inputs if uniform(v) is None}
        front = (front - set(last.outputs)) | variables[last]
        nodes.append(last)
        curved = curved or not isinstance(last.op, ARITHMETIC)


def _fixed(cone: _Cone, tolerance: float) -> Op | None:
    with np.errstate(all="ignore"):
        y = _evaluated(cone, X)
        return next((op for op in FIXED if _agree(y, _values(op), tolerance)), None)


def _guessed(cone: _Cone, tolerance: float) -> Op | None:
    if not any(isinstance(node.op, LIMITING) for node in cone.nodes):
        return None

    def f(point: float) -> float:
        return float(_evaluated(cone, np.array([point], np.float64))[0])

    with np.errstate(all="ignore"):
        y = _evaluated(cone, X)
        if not np.isfinite(y[:-1]).all():
            return None
        ops = (guess(f) for guess in GUESSES)
        return next((op for op in ops if op != LeakyRelu(1.0) and _agree(y, _values(op), tolerance)), None)


def _evaluated(cone: _Cone, x: Array) -> Array:
    known: dict[Value, Array] = {cone.x: x}
    for node in cone.nodes:
        op: Any = node.op
        y = op.reference(*(_argument(v, known) for v in node.inputs))
        known[node.outputs[0]] = np.broadcast_to(y, x.shape)
    return known[cone.nodes[-1].outputs[0]]


def _argument(value: Value, known: dict[Value, Array]) -> Array:
    if value in known:
        return known[value]
    number = uniform(value)
    return np.asarray(number, np.float64 if value.dtype.is_float else value.dtype.numpy)


def _agree(y: Array, wanted: Array, tolerance: float) -> bool:
    """Whether the function has the values wanted; points where it overflows don't count.

    Small values must agree as closely as large ones: relu(x) + 1e-6 is no Relu, nor sigmoid(x) limited to 1e-7 a
    Sigmoid. Rounded constants move the tail of a Gelu by about x^2, and the place of a kink.
    """
    if y.dtype != np.float64 or not np.isnan(y[-1]):
        return False
    met = np.isfinite(y)
    near = tolerance * (1 + np.minimum(X * X, 100)) * np.abs(wanted) + LOST * (1 + np.abs(X))
    near = np.where(np.isin(X, KINKS) & (X != 0), near + tolerance / 20, near)
    near = np.minimum(near, tolerance * (1 + np.abs(X)))
    return bool(met.sum() > 0.8 * len(X) and (np.abs(y - wanted) <= near)[met].all())


@cache
def _values(op: Op) -> Array:
    reference: Any = op.reference
    values: Array = reference(X)
    return values


def _f32(number: float) -> float:
    """The nearest value that f32 has: attributes in files are f32."""
    return float(np.float32(number))
