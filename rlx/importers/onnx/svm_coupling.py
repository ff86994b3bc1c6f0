"""Probabilities of several classes from those of each pair, as support vector machines have them.

(Wu, Lin, Weng: Probability Estimates for Multi-class Classification by Pairwise Coupling, 2004, second method; the
limits are those of libsvm: at most max(100, classes) rounds, and none for a row that is within 0.005 / classes.)
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ops.control import While
from rlx.ops.elementwise import Abs, Add, And, Div, Greater, Less, Mul, Neg, Reciprocal, Sub, Where
from rlx.ops.layout import Concat, Expand, Reshape, Slice, Unsqueeze
from rlx.ops.reduction import ReduceMax, ReduceSum

__all__ = ["coupled"]

F32, I64 = DTYPES["f32"], DTYPES["i64"]


class _Maths:
    """Elementwise arithmetic on values of one graph."""

    def __init__(self, graph: Graph, label: str) -> None:
        self.graph = graph
        self.label = label

    def op(self, op: object, *values: Value) -> Value:
        return self.graph.add(op, *values, provenance=(self.label,))[0]  # type: ignore[arg-type]

    def number(self, value: object) -> Value:
        return self.graph.constant(np.asarray(value, np.float32))

    def sum(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.op(Add(), total, value)
        return total

    def product(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.op(Mul(), total, value)
        return total

    def column(self, x: Value, t: int) -> Value:
        """Column t of x [N, k], as [N, 1]."""
        return self.op(Slice((0, t), (x.shape[0], 1), (1, 1)), x)

    def row(self, q: Value, t: int) -> Value:
        """Row t of each matrix of q [N, k, k], as [N, k]."""
        n, k, _ = q.shape
        return self.op(Reshape((n, k)), self.op(Slice((0, t, 0), (n, 1, k), (1, 1, 1)), q))


def coupled(graph: Graph, pairs: Value, classes: int, label: str) -> Value:
    """Probabilities [N, classes] from those of the first of each pair of classes, f32 [N, pairs] in the usual order."""
    m, n = _Maths(graph, label), pairs.shape[0]
    q = _matrix(m, pairs, classes)
    start = m.op(Expand((n, classes)), m.number(1 / classes))
    begin = [graph.constant(0, I64), graph.constant(True), start]
    ask, body = (Graph(f"{label}.{part}") for part in ("cond", "body"))
    types = [v.type for v in (*begin, q)]
    asked = [ask.input(f"in{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    (below,) = ask.add(Less(), asked[0], ask.constant(max(100, classes), I64))
    ask.output(ask.add(And(), below, asked[1])[0], "goes_on")
    given = [body.input(f"in{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    b = _Maths(body, label)
    p, far = _round(b, given[2], given[3], classes)
    body.output(b.op(Add(), given[0], body.constant(1, I64)), "round")
    body.output(far, "far")
    body.output(p, "p")
    return graph.add(While(3), *begin, q, provenance=(label,), regions=[ask, body])[2]


def _matrix(m: _Maths, pairs: Value, k: int) -> Value:
    """Q [N, k, k] of the quadratic form that is to be least: r[t, j] is the probability of t against j."""
    one = m.number(1)
    first = {pair: m.column(pairs, i) for i, pair in enumerate(combinations(range(k), 2))}
    r = {(j, t): m.op(Sub(), one, p) for (t, j), p in first.items()} | first
    rows = []
    for t in range(k):
        others = [j for j in range(k) if j != t]
        squares = m.sum(*(m.product(r[j, t], r[j, t]) for j in others))
        entries = [squares if j == t else m.op(Neg(), m.product(r[j, t], r[t, j])) for j in range(k)]
        rows.append(m.op(Unsqueeze((1,)), m.op(Concat(1), *entries)))
    return m.op(Concat(1), *rows)


def _round(m: _Maths, p: Value, q: Value, k: int) -> tuple[Value, Value]:
    """The probabilities after one round over the classes, and whether any row was still far from the solution."""
    n = p.shape[0]
    before = p
    qp = m.op(ReduceSum((2,), False), m.product(q, m.op(Reshape((n, 1, k)), p)))
    pqp = m.op(ReduceSum((1,), True), m.product(p, qp))
    error = m.op(ReduceMax((1,), True), m.op(Abs(), m.op(Sub(), qp, pqp)))
    far = m.op(Greater(), error, m.number(0.005 / k))
    for t in range(k):
        row, own = m.row(q, t), m.column(qp, t)
        diagonal = m.column(row, t)
        step = m.op(Div(), m.op(Sub(), pqp, own), diagonal)
        shrink = m.op(Reciprocal(), m.sum(step, m.number(1)))
        p = m.product(m.sum(p, m.product(step, m.number(np.eye(k)[t]))), shrink)
        grown = m.product(step, m.sum(m.product(step, diagonal), m.product(own, m.number(2))))
        pqp = m.product(m.sum(pqp, grown), shrink, shrink)
        qp = m.product(m.sum(qp, m.product(step, row)), shrink)
    numbers = m.op(Where(), far, m.number(1), m.number(0))
    any_far = m.op(Greater(), m.op(ReduceMax((0, 1), False), numbers), m.number(0))
    return m.op(Where(), far, p, before), any_far
