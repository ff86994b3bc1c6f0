"""Activation functions: composites of scalar functions, lowered as one expression each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import broadcast, same
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, widened
from rlx.ops.elementwise import Unary, erf, sigmoid


def _expm1(k: Any, x: Any) -> Any:
    """exp(x) - 1 for x <= 0, accurate near 0: with t = tanh(x / 2) it is 2t / (1 - t), where nothing cancels."""
    t = k.call("tanh", x * 0.5)
    return (t + t) / (1 - t)


def _log1p(k: Any, u: Any) -> Any:
    """log(1 + u) for 0 <= u <= 1: the rounding of w = 1 + u is undone by the factor u / (w - 1)."""
    w = u + 1
    return k.select(k.equal(w, 1), u, k.call("log", w) * (u / (w - 1)))


@register
class Relu(Unary):
    """max(x, 0); NaN stays NaN. (ONNX Relu)"""

    kinds = "fi"

    def array(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, 0))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.max(x, 0)


@register
class LeakyRelu(Unary):
    """x where x >= 0, else alpha * x. (ONNX LeakyRelu)"""

    flops = 2
    alpha: float = 0.01

    def array(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * x)

    def scalar(self, k: Any, x: Any) -> Any:
        return k.select(x >= 0, x, x * self.alpha)


@register
class ThresholdedRelu(Unary):
    """x where x > alpha, else 0. (ONNX ThresholdedRelu)"""

    alpha: float = 1.0

    def array(self, x: Array) -> Array:
        return np.where(x > self.alpha, x, 0)

    def scalar(self, k: Any, x: Any) -> Any:
        return k.select(x > self.alpha, x, 0)


@register
class HardSigmoid(Unary):
    """alpha * x + beta, limited to 0 .. 1. (ONNX HardSigmoid)"""

    flops = 4
    alpha: float = 0.2
    beta: float = 0.5

    def array(self, x: Array) -> Array:
        return np.clip(self.alpha * x + self.beta, 0, 1)

    def scalar(self, k: Any, x: Any) -> Any:
        return k.max(k.min(x * self.alpha + self.beta, 1), 0)


@register
class HardSwish(Unary):
    """x times x / 6 + 1/2 limited to 0 .. 1. (ONNX HardSwish)"""

    flops = 5

    def array(self, x: Array) -> Array:
        return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))

    def scalar(self, k: Any, x: Any) -> Any:
        return x * k.max(k.min(x * (1 / 6) + 0.5, 1), 0)


@register
class Elu(Unary):
    """x where x >= 0, else alpha * (exp(x) - 1). (ONNX Elu)"""

    flops = 16
    alpha: float = 1.0

    def array(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * np.expm1(np.minimum(x, 0)))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.select(x >= 0, x, _expm1(k, k.min(x, 0)) * self.alpha)


@register
class Selu(Unary):
    """gamma * x where x >= 0, else gamma * alpha * (exp(x) - 1). (ONNX Selu)"""

    flops = 17
    alpha: float = 1.67326319217681884765625
    gamma: float = 1.05070102214813232421875

    def array(self, x: Array) -> Array:
        return np.where(x >= 0, self.gamma * x, self.gamma * self.alpha * np.expm1(np.minimum(x, 0)))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.select(x >= 0, x * self.gamma, _expm1(k, k.min(x, 0)) * (self.gamma * self.alpha))


@register
class Celu(Unary):
    """x where x >= 0, else alpha * (exp(x / alpha) - 1), for alpha > 0. (ONNX Celu)"""

    flops = 17
    alpha: float = 1.0

    def infer(self, x: TensorType) -> TensorType:
        if not self.alpha > 0:
            raise OptionError(f"celu: expected alpha > 0, got {self.alpha}")
        return super().infer(x)

    def array(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * np.expm1(np.minimum(x, 0) / self.alpha))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.select(x >= 0, x, _expm1(k, k.min(x, 0) / self.alpha) * self.alpha)


@register
class Softplus(Unary):
    """log(1 + exp(x)). (ONNX Softplus)"""

    flops = 26

    def array(self, x: Array) -> Array:
        return np.asarray(np.logaddexp(x, np.zeros((), x.dtype)))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.max(x, 0) + _log1p(k, k.call("exp", -k.call("abs", x)))


@register
class Softsign(Unary):
    """x / (1 + |x|). (ONNX Softsign)"""

    flops = 3

    def array(self, x: Array) -> Array:
        return np.asarray(x / (1 + np.abs(x)))

    def scalar(self, k: Any, x: Any) -> Any:
        return x / (k.call("abs", x) + 1)


@register
class Mish(Unary):
    """x * tanh(log(1 + exp(x))). (ONNX Mish)"""

    flops = 20

    def array(self, x: Array) -> Array:
        return np.asarray(x * np.tanh(np.logaddexp(x, np.zeros((), x.dtype))))

    def scalar(self, k: Any, x: Any) -> Any:
        # tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2); in u = e^-|x| neither side overflows
        u = k.call("exp", -k.call("abs", x))
        positive = x > 0
        top = k.select(positive, u + u + 1, u * (u + 2))
        return x * (top / (top + k.select(positive, u * u * 2, 2.0)))


@register
class Silu(Unary):
    """x * sigmoid(x), also called Swish. (jax.nn.silu)"""

    flops = 13

    def array(self, x: Array) -> Array:
        return np.asarray(x * sigmoid(x))

    def scalar(self, k: Any, x: Any) -> Any:
        return x / (k.call("exp", -x) + 1)


@register
class Gelu(Unary):
    """x / 2 * (1 + erf(x / sqrt(2))), or with approximate="tanh" its approximation. (ONNX Gelu)"""

    flops = 16
    approximate: str = "none"

    def infer(self, x: TensorType) -> TensorType:
        if self.approximate not in ("none", "tanh"):
            raise OptionError(f'gelu: approximate is "none" or "tanh", got {self.approximate!r}')
        return super().infer(x)

    def array(self, x: Array) -> Array:
        if self.approximate == "tanh":
            return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
        return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))

    def scalar(self, k: Any, x: Any) -> Any:
        if self.approximate == "tanh":
            c = -2 * math.sqrt(2 / math.pi)  # (1 + tanh(y)) / 2 = 1 / (1 + e^(-2y))
            return x / (k.call("exp", x * (x * x * (0.044715 * c) + c)) + 1)
        return x * k.call("normal_cdf", x)


@register
class PRelu(Op):
    """x where x >= 0, else slope * x; `slope` broadcasts to the shape of x. (ONNX PRelu)"""

    def infer(self, x: TensorType, slope: TensorType) -> TensorType:
        check_kind(self, x, "fi")
        check_same_dtype(self, x, slope)
        shape = broadcast(x.shape, slope.shape, why=f"prelu of {x} with slope {slope}")
        if len(shape) != x.rank or any(same(a, b) is False for a, b in zip(shape, x.shape, strict=True)):
            raise ShapeError(f"prelu: the slope {slope} does not broadcast to the shape of {x}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2, *x)

    def reference(self, x: Array, slope: Array) -> Array:
        wide = widened(x)
        return np.where(wide < 0, widened(slope) * wide, wide).astype(x.dtype)

    def lower(self, k: Any, x: Any, slope: Any) -> Any:
        def element(*i: Any) -> Any:
            value = k.widen(x(*i))
            return k.select(value < 0, k.widen(slope.broadcast(*i)) * value, value)

        return k.map(element)
