"""Normalisations: softmax and the layer, root-mean-square and batch norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Shape, broadcast, numel, same, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, widened


@register
class Softmax(Op):
    """Normalised exponential along one axis. (ONNX Softmax-13, jax.nn.softmax)"""

    axis: int = -1

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        axis_of(self.axis, x.rank, self.op_name)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(15, *x)

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        e = np.exp(wide - np.max(wide, axis=self.axis, keepdims=True, initial=-np.inf))
        return np.asarray(e / np.sum(e, axis=self.axis, keepdims=True)).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank
        n = x.shape[axis]

        def element(*i: Any) -> Any:
            def at(j: Any) -> Any:
                return k.widen(x(*i[:axis], j, *i[axis + 1 :]))

            peak = k.reduce("max", (n,), at)
            total = k.reduce("add", (n,), lambda j: k.call("exp", at(j) - peak))
            return k.call("exp", k.widen(x(*i)) - peak) / total

        return k.map(element)


@register
class LogSoftmax(Op):
    """The logarithm of softmax along one axis. (ONNX LogSoftmax-13)"""

    axis: int = -1

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        axis_of(self.axis, x.rank, self.op_name)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(15, *x)

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        low = wide - np.max(wide, axis=self.axis, keepdims=True, initial=-np.inf)
        return np.asarray(low - np.log(np.sum(np.exp(low), axis=self.axis, keepdims=True))).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank
        n = x.shape[axis]

        def element(*i: Any) -> Any:
            def at(j: Any) -> Any:
                return k.widen(x(*i[:axis], j, *i[axis + 1 :]))

            peak = k.reduce("max", (n,), at)
            total = k.reduce("add", (n,), lambda j: k.call("exp", at(j) - peak))
            return k.widen(x(*i)) - peak - k.call("log", total)

        return k.map(element)


def _check_parameter(op: Op, what: str, t: TensorType, x: TensorType, axis: int) -> None:
    """Raises unless `t` has the type of x and broadcasts to its axes from `axis` on."""
    check_same_dtype(op, x, t)
    shape: Shape = x.shape[axis:]
    if t.rank <= len(shape):
        wide = broadcast(t.shape, shape, why=f"{op.op_name}: {what} {t} over the axes from {axis} of {x}")
        if all(same(a, b) is not False for a, b in zip(wide, shape, strict=True)):
            return
    raise ShapeError(f"{op.op_name}: {what} {t} does not broadcast to the axes from {axis} of {x}")


@register
class LayerNorm(Op):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over all axes from `axis` on. (ONNX LayerNormalization)

    `scale` and `bias` broadcast to those axes; the variance is of the population.
    """

    axis: int = -1
    epsilon: float = 1e-5

    def infer(self, x: TensorType, scale: TensorType, bias: TensorType | None = None) -> TensorType:
        check_kind(self, x, "f")
        axis = axis_of(self.axis, x.rank, self.op_name)
        _check_parameter(self, "scale", scale, x, axis)
        if bias is not None:
            _check_parameter(self, "bias", bias, x, axis)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(8, *x)

    def reference(self, x: Array, scale: Array, bias: Array | None = None) -> Array:
        wide, axes = widened(x), tuple(range(self.axis % x.ndim, x.ndim))
        centred = wide - np.mean(wide, axis=axes, keepdims=True)
        variance = np.mean(centred * centred, axis=axes, keepdims=True)
        y = centred / np.sqrt(variance + np.asarray(self.epsilon, wide.dtype)) * widened(scale)
        return np.asarray(y if bias is None else y + widened(bias)).astype(x.dtype)

    def lower(self, k: Any, x: Any, scale: Any, bias: Any = None) -> Any:
        axis = self.axis % x.rank
        extents = x.shape[axis:]

        def element(*i: Any) -> Any:
            def at(*r: Any) -> Any:
                return k.widen(x(*i[:axis], *r))

            total = k.reduce("add", extents, at)
            count = k.cast(k.size(numel(extents)), total.dtype)
            mean = total / count
            variance = k.reduce("add", extents, lambda *r: (at(*r) - mean) * (at(*r) - mean)) / count
            y = (at(*i[axis:]) - mean) * (1 / k.call("sqrt", variance + self.epsilon)) * k.widen(scale.broadcast(*i))
            return y if bias is None else y + k.widen(bias.broadcast(*i))

        return k.map(element)


@register
class RmsNorm(Op):
    """x / sqrt(mean(x * x) + epsilon) * scale over all axes from `axis` on. (ONNX RMSNormalization)"""

    axis: int = -1
    epsilon: float = 1e-5

    def infer(self, x: TensorType, scale: TensorType) -> TensorType:
        check_kind(self, x, "f")
        _check_parameter(self, "scale", scale, x, axis_of(self.axis, x.rank, self.op_name))
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(4, *x)

    def reference(self, x: Array, scale: Array) -> Array:
        wide, axes = widened(x), tuple(range(self.axis % x.ndim, x.ndim))
        square = np.mean(wide * wide, axis=axes, keepdims=True)
        y = wide / np.sqrt(square + np.asarray(self.epsilon, wide.dtype)) * widened(scale)
        return np.asarray(y).astype(x.dtype)

    def lower(self, k: Any, x: Any, scale: Any) -> Any:
        axis = self.axis % x.rank
        extents = x.shape[axis:]

        def element(*i: Any) -> Any:
            def at(*r: Any) -> Any:
                return k.widen(x(*i[:axis], *r))

            total = k.reduce("add", extents, lambda *r: at(*r) * at(*r))
            mean = total / k.cast(k.size(numel(extents)), total.dtype)
            return at(*i[axis:]) * (1 / k.call("sqrt", mean + self.epsilon)) * k.widen(scale.broadcast(*i))

        return k.map(element)


@register
class BatchNorm(Op):
    """(x - mean) / sqrt(var + epsilon) * scale + bias per channel (axis 1), with given statistics.

    The four parameters are [C] of any floating-point types. (ONNX BatchNormalization, inference)
    """

    epsilon: float = 1e-5

    def infer(
        self, x: TensorType, scale: TensorType, bias: TensorType, mean: TensorType, var: TensorType
    ) -> TensorType:
        check_kind(self, x, "f")
        if x.rank < 2:
            raise ShapeError(f"{self.op_name}: expected [N, C, ...], got {x}")
        for what, t in (("scale", scale), ("bias", bias), ("mean", mean), ("var", var)):
            check_kind(self, t, "f", what)
            if t.rank != 1:
                raise ShapeError(f"{self.op_name}: expected {what} of shape [{x.shape[1]}], got {t}")
            unify(x.shape[1], t.shape[0], f"{self.op_name}: channels of {x} and size of {what}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(4, *x)

    def reference(self, x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
        wide = widened(x)
        column = (-1,) + (1,) * (x.ndim - 2)
        s, b, m, v = (p.astype(wide.dtype).reshape(column) for p in (scale, bias, mean, var))
        y = (wide - m) / np.sqrt(v + np.asarray(self.epsilon, wide.dtype)) * s + b
        return np.asarray(y).astype(x.dtype)

    def lower(self, k: Any, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        def element(n: Any, c: Any, *space: Any) -> Any:
            value = k.widen(x(n, c, *space))
            s, b, m, v = (k.cast(p(c), value.dtype) for p in (scale, bias, mean, var))
            return (value - m) * (s / k.call("sqrt", v + self.epsilon)) + b

        return k.map(element)
