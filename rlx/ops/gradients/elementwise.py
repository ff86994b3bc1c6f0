"""Rules of the elementwise ops. Where two operands tie, maximum and minimum give half to each, as JAX's do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ops import elementwise as e
from rlx.ops import trigonometry as t
from rlx.ops.base import Op
from rlx.ops.gradients.attach import (
    cast,
    derivative,
    is_smooth,
    jvp,
    linear,
    summed_to,
    transpose,
    vjp,
    without_slope,
    zeros,
)
from rlx.ops.misc import Again, StopGradient, Within
from rlx.ops.random import Bernoulli

Tangents = Sequence[Value | None]

without_slope(e.Sign, e.Floor, e.Ceil, e.Round, StopGradient, Bernoulli)


@linear("each", e.Neg)
def _neg(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return -cotangents[0]


@linear("each", e.Identity, Again, Within)
def _same(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return cotangents[0]


@linear("each", e.Cast)
def _cast(op: e.Cast, inputs: Any, cotangents: Any, i: int) -> Any:
    return cast(cotangents[0], inputs[0].dtype)


derivative(e.Abs)(lambda op, x, y: ops.sign(x))
derivative(e.Exp)(lambda op, x, y: y)
derivative(e.Log)(lambda op, x, y: ops.reciprocal(x))
derivative(e.Sqrt)(lambda op, x, y: 0.5 / y)
derivative(e.Rsqrt)(lambda op, x, y: -0.5 * y / x)
derivative(e.Reciprocal)(lambda op, x, y: -y * y)
derivative(e.Sin)(lambda op, x, y: ops.cos(x))
derivative(e.Cos)(lambda op, x, y: -ops.sin(x))
derivative(e.Tanh)(lambda op, x, y: 1 - y * y)
derivative(e.Erf)(lambda op, x, y: ops.exp(-x * x) * (2 / math.sqrt(math.pi)))
derivative(e.Sigmoid)(lambda op, x, y: y * (1 - y))
derivative(t.Tan)(lambda op, x, y: 1 + y * y)
derivative(t.Asin)(lambda op, x, y: ops.rsqrt(1 - x * x))
derivative(t.Acos)(lambda op, x, y: -ops.rsqrt(1 - x * x))
derivative(t.Atan)(lambda op, x, y: ops.reciprocal(1 + x * x))
derivative(t.Sinh)(lambda op, x, y: ops.cosh(x))
derivative(t.Cosh)(lambda op, x, y: ops.sinh(x))
derivative(t.Asinh)(lambda op, x, y: ops.rsqrt(1 + x * x))
derivative(t.Acosh)(lambda op, x, y: ops.rsqrt((x - 1) * (x + 1)))
derivative(t.Atanh)(lambda op, x, y: ops.reciprocal(1 - x * x))


@derivative(e.Clip)
def _clip(op: e.Clip, x: Value, y: Value) -> Value:
    """1 between the bounds, 0 beyond and at them (jax.lax.clamp)."""
    inside = [ops.greater(x, op.lo)] if op.lo is not None else []
    inside += [ops.less(x, op.hi)] if op.hi is not None else []
    return cast(ops.and_(*inside) if len(inside) == 2 else inside[0], x.dtype) if inside else _ones(x)


def _ones(x: Value) -> Value:
    return zeros(x) + 1


@linear("joint", e.Add)
def _add(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return summed_to(cotangents[0], inputs[i].shape)


@linear("joint", e.Sub)
def _sub(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return summed_to(-cotangents[0] if i else cotangents[0], inputs[i].shape)


@linear("each", e.Mul)
def _mul(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return summed_to(cotangents[0] * inputs[1 - i], inputs[i].shape)


@linear("joint", e.Where)
def _where(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    ct = cotangents[0]
    chosen = (ct, zeros(ct)) if i == 1 else (zeros(ct), ct)
    return summed_to(ops.where(inputs[0], *chosen), inputs[i].shape)


def total(*terms: Value | None) -> Value | None:
    """The sum of the terms that there are."""
    found: Value | None = None
    for term in terms:
        found = term if found is None else found if term is None else found + term
    return found


def _binary(op: type[Op], of_a: Any, of_b: Any) -> None:
    """An op of two inputs by its partial derivatives `of_a(op, a, b, y)` and `of_b`."""
    partial = (of_a, of_b)

    def push(op: Op, inputs: Any, outputs: Any, tangents: Tangents) -> Any:
        return total(*(None if t is None else t * partial[i](op, *inputs, outputs[0]) for i, t in enumerate(tangents)))

    def pull(op: Op, inputs: Any, outputs: Any, cotangents: Any) -> Any:
        return tuple(
            summed_to(cotangents[0] * partial[i](op, *inputs, outputs[0]), x.shape) if is_smooth(x) else None
            for i, x in enumerate(inputs)
        )

    jvp(op)(push)
    vjp(op)(pull)


def _share(x: Value, other: Value, y: Value) -> Value:
    """1 where x alone is the result, half where both are, else 0."""
    alone = ops.where(ops.equal(other, y), zeros(y) + 0.5, _ones(y))
    return ops.where(ops.equal(x, y), alone, zeros(y))  # type: ignore[no-any-return]


for _op in (e.Maximum, e.Minimum):
    _binary(_op, lambda op, a, b, y: _share(a, b, y), lambda op, a, b, y: _share(b, a, y))

_binary(e.Mod, lambda op, a, b, y: _ones(y), lambda op, a, b, y: -ops.round((a - y) / b))


@jvp(e.Div)
def _div_jvp(op: Op, inputs: Any, outputs: Any, tangents: Tangents) -> Any:
    b, (t, u) = inputs[1], tangents
    return total(None if t is None else t / b, None if u is None else -u * (outputs[0] / b))


def _div_transpose(op: Op, inputs: Any, cotangents: Any, i: int) -> Any:
    return summed_to(cotangents[0] / inputs[1], inputs[0].shape)


transpose(e.Div)(_div_transpose)  # of its jvp, which divides tangents


def _pow_base(op: Op, a: Value, b: Value, y: Value) -> Value:
    b = cast(b, a.dtype)
    none = ops.equal(b, 0.0)
    return ops.where(none, 0.0, b * ops.pow(a, ops.where(none, 1.0, b - 1)))  # type: ignore[no-any-return]


def _pow_exponent(op: Op, a: Value, b: Value, y: Value) -> Value:
    return cast(y * ops.log(ops.where(ops.equal(a, 0.0), 1.0, a)), b.dtype)


@jvp(e.Pow)
def _pow(op: Op, inputs: Any, outputs: Any, tangents: Tangents) -> Any:
    (a, b), (t, u), y = inputs, tangents, outputs[0]
    first = None if t is None else t * _pow_base(op, a, b, y)
    second = None if u is None else cast(u * _pow_exponent(op, a, b, y), a.dtype)
    return total(first, second)
