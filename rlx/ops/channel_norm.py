"""Normalisations over groups of channels, windows of channels, and by vector norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, bounds, evaluate, exact_div, numel, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, widened
from rlx.ops.reduction import axes_of, full_index

__all__ = ["GroupNorm", "InstanceNorm", "LpNormalization", "Lrn", "MeanVarianceNormalization"]


def _check_channels(op: Op, x: TensorType, **parameters: TensorType) -> None:
    check_kind(op, x, "f")
    if x.rank < 2:
        raise ShapeError(f"{op.op_name}: expected [N, C, ...], got {x}")
    for what, t in parameters.items():
        check_same_dtype(op, x, t)
        if t.rank != 1:
            raise ShapeError(f"{op.op_name}: expected {what} of shape [{x.shape[1]}], got {t}")
        unify(x.shape[1], t.shape[0], f"{op.op_name}: channels of {x} and size of {what}")


@register
class GroupNorm(Op):
    """Normalises over each of `groups` groups of channels (and space) of x [N, C, ...]; then per channel scale, bias.

    (x - mean) / sqrt(variance + epsilon) * scale[c] + bias[c], in f32 for 16-bit floats. (ONNX GroupNormalization-21)
    """

    groups: Size
    epsilon: float = 1e-5

    def infer(self, x: TensorType, scale: TensorType, bias: TensorType) -> TensorType:
        _check_channels(self, x, scale=scale, bias=bias)
        if isinstance(self.groups, int) and self.groups < 1:
            raise OptionError(f"group_norm: groups must be at least 1, got {self.groups}")
        if exact_div(x.shape[1], self.groups) is None:
            raise ShapeError(f"group_norm: the channels of {x} can't be split into {self.groups} groups")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(8, *x)

    def reference(self, x: Array, scale: Array, bias: Array) -> Array:
        wide = widened(x).reshape(x.shape[0], evaluate(self.groups, {}), -1)
        centred = wide - wide.mean(axis=2, keepdims=True)
        variance = np.mean(centred * centred, axis=2, keepdims=True)
        y = (centred / np.sqrt(variance + wide.dtype.type(self.epsilon))).reshape(x.shape)
        column = (-1,) + (1,) * (x.ndim - 2)
        return np.asarray(y * widened(scale).reshape(column) + widened(bias).reshape(column)).astype(x.dtype)

    def lower(self, k: Any, x: Any, scale: Any, bias: Any) -> Any:
        each = exact_div(x.shape[1], self.groups)
        extents = (each, *x.shape[2:])

        def element(n: Any, c: Any, *space: Any) -> Any:
            first = c if each == 1 else c // k.size(each) * k.size(each)

            def over(fn: Any) -> Any:
                def term(r: Any, *at: Any) -> Any:
                    return fn(k.widen(x(n, c if each == 1 else first + r, *at)))

                total = k.reduce("add", extents, term)
                return total / k.cast(k.size(numel(extents)), total.dtype)

            mean = over(lambda v: v)
            variance = over(lambda v: (v - mean) * (v - mean))
            normal = (k.widen(x(n, c, *space)) - mean) / k.call("sqrt", variance + self.epsilon)
            return normal * k.widen(scale(c)) + k.widen(bias(c))

        return k.map(element)


@register
class InstanceNorm(Op):
    """Normalises every channel of x [N, C, ...] over space, then scale[c] and bias[c]. (ONNX InstanceNormalization)"""

    epsilon: float = 1e-5

    def infer(self, x: TensorType, scale: TensorType, bias: TensorType) -> TensorType:
        _check_channels(self, x, scale=scale, bias=bias)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(8, *x)

    def reference(self, x: Array, scale: Array, bias: Array) -> Array:
        return GroupNorm(x.shape[1], self.epsilon).reference(x, scale, bias)

    def decompose(self, g: Graph, x: Value, scale: Value, bias: Value) -> Value:
        return g.add(GroupNorm(x.shape[1], self.epsilon), x, scale, bias)[0]


@register
class Lrn(Op):
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ** beta. (ONNX LRN-13)

    The window of channel c is c - (size - 1) // 2 .. c + size // 2, cut off at the ends.
    """

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def infer(self, x: TensorType) -> TensorType:
        _check_channels(self, x)
        if self.size < 1:
            raise OptionError(f"lrn: size must be at least 1, got {self.size}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        before, after = self.reach(x[0].shape[1])
        return self.elementwise_work(2 * (before + after + 1) + 20, *x)

    def reach(self, channels: Size) -> tuple[int, int]:
        """How many channels before and after its own a window sees at most: no more than there may be."""
        before, after, most = (self.size - 1) // 2, self.size // 2, bounds(channels)[1]
        return (before, after) if most is None else (min(before, max(most - 1, 0)), min(after, max(most - 1, 0)))

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        before, after = self.reach(x.shape[1])
        padded = np.pad(wide * wide, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        total = sum((padded[:, j : j + x.shape[1]] for j in range(before + after + 1)), np.zeros_like(wide))
        kind = wide.dtype.type
        base = kind(self.bias) + kind(self.alpha / self.size) * total
        return np.asarray(wide / np.power(base, kind(self.beta))).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        before, after = self.reach(x.shape[1])

        def element(n: Any, c: Any, *space: Any) -> Any:
            def square(r: Any) -> Any:
                at = c + r - before
                value = k.widen(x(n, at, *space, where=(at >= 0) & (at < k.size(x.shape[1]))))
                return value * value

            base = k.reduce("add", (before + after + 1,), square) * (self.alpha / self.size) + self.bias
            root = k.call("sqrt", base)
            simple = {0.5: lambda: root, 0.75: lambda: root * k.call("sqrt", root), 1.0: lambda: base}.get(self.beta)
            return k.widen(x(n, c, *space)) / (simple() if simple else k.call("pow", base, self.beta))

        return k.map(element)


@register
class MeanVarianceNormalization(Op):
    """(x - mean) / (standard deviation + 1e-9) over `axes`. (ONNX MeanVarianceNormalization-13)"""

    axes: tuple[int, ...] = (0, 2, 3)

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        axes_of(self.axes, x.rank, self.op_name)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(7, *x)

    def reference(self, x: Array) -> Array:
        wide, axes = widened(x), axes_of(self.axes, x.ndim, self.op_name)
        centred = wide - wide.mean(axis=axes, keepdims=True)
        deviation = np.sqrt(np.mean(centred * centred, axis=axes, keepdims=True))
        return np.asarray(centred / (deviation + wide.dtype.type(1e-9))).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axes = axes_of(self.axes, x.rank, self.op_name)
        extents = [x.shape[d] for d in axes]

        def element(*i: Any) -> Any:
            def over(fn: Any) -> Any:
                def term(*r: Any) -> Any:
                    return fn(k.widen(x(*full_index(i, r, axes, x.rank, True))))

                total = k.reduce("add", extents, term) if axes else term()
                return total / k.cast(k.size(numel(extents)), total.dtype)

            mean = over(lambda v: v)
            deviation = k.call("sqrt", over(lambda v: (v - mean) * (v - mean)))
            return (k.widen(x(*i)) - mean) / (deviation + 1e-9)

        return k.map(element)


@register
class LpNormalization(Op):
    """x divided by its 1- or 2-norm along `axis`; where that is 0 the result is 0. (ONNX LpNormalization-22)"""

    axis: int = -1
    p: int = 2

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        axis_of(self.axis, x.rank, self.op_name)
        if self.p not in (1, 2):
            raise OptionError(f"lp_normalization: p must be 1 or 2, got {self.p}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(3, *x)

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        total = np.sum(np.abs(wide) if self.p == 1 else wide * wide, axis=self.axis, keepdims=True)
        norm = total if self.p == 1 else np.sqrt(total)
        return np.where(norm == 0, 0, wide / np.where(norm == 0, 1, norm)).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            def term(j: Any) -> Any:
                value = k.widen(x(*i[:axis], j, *i[axis + 1 :]))
                return k.call("abs", value) if self.p == 1 else value * value

            total = k.reduce("add", (x.shape[axis],), term)
            norm = total if self.p == 1 else k.call("sqrt", total)
            return k.select(k.equal(norm, 0), 0, k.widen(x(*i)) / norm)

        return k.map(element)
