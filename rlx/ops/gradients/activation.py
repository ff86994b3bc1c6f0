"""Rules of the activation functions. At a corner they have the slope of JAX's functions of that name."""

from __future__ import annotations

import math
from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ops import activation as a
from rlx.ops.base import Op
from rlx.ops.gradients.attach import cast, derivative, formula, without_slope, zeros
from rlx.ops.mask import Hardmax, Shrink

without_slope(Hardmax)


def _chosen(where: Value, x: Value, yes: Any, no: Any) -> Value:
    """Numbers or values of the type of x, chosen element by element."""
    yes, no = (v if isinstance(v, Value) else zeros(x) + v for v in (yes, no))
    return ops.where(where, yes, no)  # type: ignore[no-any-return]


derivative(a.Relu)(lambda op, x, y: cast(ops.greater(x, 0.0), x.dtype))
derivative(a.LeakyRelu)(lambda op, x, y: _chosen(ops.greater_equal(x, 0.0), x, 1.0, op.alpha))
derivative(a.ThresholdedRelu)(lambda op, x, y: cast(ops.greater(x, op.alpha), x.dtype))
derivative(a.Elu)(lambda op, x, y: _chosen(ops.greater_equal(x, 0.0), x, 1.0, y + op.alpha))
derivative(a.Selu)(lambda op, x, y: _chosen(ops.greater_equal(x, 0.0), x, op.gamma, y + op.gamma * op.alpha))
derivative(a.Celu)(lambda op, x, y: _chosen(ops.greater_equal(x, 0.0), x, 1.0, y / op.alpha + 1))
derivative(a.Softplus)(lambda op, x, y: ops.sigmoid(x))
derivative(Shrink)(lambda op, x, y: cast(ops.greater(ops.abs(x), op.lambd), x.dtype))


@derivative(a.HardSigmoid)
def _hard_sigmoid(op: a.HardSigmoid, x: Value, y: Value) -> Value:
    inside = ops.and_(ops.greater(y, 0.0), ops.less(y, 1.0))
    return _chosen(inside, x, op.alpha, 0.0)


@derivative(a.HardSwish)
def _hard_swish(op: Op, x: Value, y: Value) -> Value:
    outside = _chosen(ops.greater(x, 0.0), x, 1.0, 0.0)
    return _chosen(ops.less(ops.abs(x), 3.0), x, x * (1 / 3) + 0.5, outside)


@derivative(a.Softsign)
def _softsign(op: Op, x: Value, y: Value) -> Value:
    d = 1 + ops.abs(x)
    return ops.reciprocal(d * d)  # type: ignore[no-any-return]


@derivative(a.Mish)
def _mish(op: Op, x: Value, y: Value) -> Value:
    t = ops.tanh(ops.softplus(x))
    return t + x * (1 - t * t) * ops.sigmoid(x)  # type: ignore[no-any-return]


@derivative(a.Silu)
def _silu(op: Op, x: Value, y: Value) -> Value:
    s = ops.sigmoid(x)
    return s * (1 + x * (1 - s))  # type: ignore[no-any-return]


@derivative(a.Gelu)
def _gelu(op: a.Gelu, x: Value, y: Value) -> Value:
    if op.approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = ops.tanh(c * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)  # type: ignore[no-any-return]
    density = ops.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + ops.erf(x * math.sqrt(0.5))) + x * density  # type: ignore[no-any-return]


@formula(a.PRelu)
def _prelu(op: Op, x: Value, slope: Value) -> Value:
    return ops.where(ops.less(x, 0.0), slope * x, x)  # type: ignore[no-any-return]
