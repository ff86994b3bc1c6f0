"""Rules of softmax and the normalisations."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ir.shape import exact_div, numel
from rlx.ops import channel_norm as c
from rlx.ops import normalize as n
from rlx.ops.base import apply
from rlx.ops.gradients.attach import formula, jvp, narrowed, reshaped, summed_to, vjp, wide
from rlx.ops.layout import Pad, Slice
from rlx.ops.reduction import ReduceMean, ReduceSum


def _along(op: Any, x: Value) -> Value:
    return apply(ReduceSum((op.axis,), True), x)  # type: ignore[no-any-return]


@jvp(n.Softmax)
def _softmax_jvp(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    y, t = outputs[0], tangents[0]
    return y * (t - _along(op, y * t))


@vjp(n.Softmax)
def _softmax_vjp(op: Any, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    return (_softmax_jvp(op, inputs, outputs, cotangents),)  # its matrix is symmetric


@jvp(n.LogSoftmax)
def _log_softmax_jvp(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    t = tangents[0]
    return t - _along(op, ops.exp(outputs[0]) * t)


@vjp(n.LogSoftmax)
def _log_softmax_vjp(op: Any, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    ct = cotangents[0]
    return (ct - ops.exp(outputs[0]) * _along(op, ct),)


def _mean(x: Value, axes: tuple[int, ...]) -> Value:
    return apply(ReduceMean(axes, True), x)  # type: ignore[no-any-return]


def _normal(x: Value, axes: tuple[int, ...], epsilon: float) -> Value:
    centred = x - _mean(x, axes)
    return centred * ops.rsqrt(_mean(centred * centred, axes) + epsilon)  # type: ignore[no-any-return]


@formula(n.LayerNorm)
def _layer_norm(op: n.LayerNorm, x: Value, scale: Value, bias: Value | None = None) -> Value:
    v = wide(x)
    y = _normal(v, tuple(range(op.axis % x.rank, x.rank)), op.epsilon) * wide(scale)
    return narrowed(y if bias is None else y + wide(bias), x)


@vjp(n.LayerNorm)
def _layer_norm_vjp(op: n.LayerNorm, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    """With y the normal form and g the cotangent times scale: r (g - mean(g) - y mean(g y)), r = 1 / deviation."""
    x, scale = inputs[:2]
    v, ct, axes = wide(x), wide(cotangents[0]), tuple(range(op.axis % x.rank, x.rank))
    centred = v - _mean(v, axes)
    r = ops.rsqrt(_mean(centred * centred, axes) + op.epsilon)
    y, g = centred * r, ct * wide(scale)
    made = [(g - _mean(g, axes) - y * _mean(g * y, axes)) * r, summed_to(ct * y, scale.shape)]
    return [narrowed(d, x) for d in [*made, *(summed_to(ct, bias.shape) for bias in inputs[2:])]]


@formula(n.RmsNorm)
def _rms_norm(op: n.RmsNorm, x: Value, scale: Value) -> Value:
    v, axes = wide(x), tuple(range(op.axis % x.rank, x.rank))
    return narrowed(v * ops.rsqrt(_mean(v * v, axes) + op.epsilon) * wide(scale), x)


@vjp(n.RmsNorm)
def _rms_norm_vjp(op: n.RmsNorm, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    """r (g - y mean(g y)), as for `LayerNorm`."""
    x, scale = inputs
    v, ct, axes = wide(x), wide(cotangents[0]), tuple(range(op.axis % x.rank, x.rank))
    r = ops.rsqrt(_mean(v * v, axes) + op.epsilon)
    y, g = v * r, ct * wide(scale)
    return [narrowed(d, x) for d in ((g - y * _mean(g * y, axes)) * r, summed_to(ct * y, scale.shape))]


def _column(p: Value, like: Value) -> Value:
    """[C] beside [N, C, ...], in the element type of `like`."""
    return reshaped(narrowed(p, like), (p.shape[0], *[1] * (like.rank - 2)))


@formula(n.BatchNorm)
def _batch_norm(op: n.BatchNorm, x: Value, *parameters: Value) -> Value:
    v = wide(x)
    scale, bias, mean, var = (_column(p, v) for p in parameters)
    return narrowed((v - mean) * (scale * ops.rsqrt(var + op.epsilon)) + bias, x)


@formula(c.GroupNorm)
def _group_norm(op: c.GroupNorm, x: Value, scale: Value, bias: Value) -> Value:
    v = wide(x)
    each = exact_div(x.shape[1], op.groups)
    assert each is not None
    y = _normal(reshaped(v, (x.shape[0], op.groups, each * numel(x.shape[2:]))), (2,), op.epsilon)
    return narrowed(reshaped(y, x.shape) * _column(scale, v) + _column(bias, v), x)


@formula(c.Lrn)
def _lrn(op: c.Lrn, x: Value) -> Value:
    v = wide(x)
    (before, after), rest = op.reach(x.shape[1]), [0] * (x.rank - 2)
    padded = apply(Pad((0, before, *rest, 0, after, *rest)), v * v)
    parts = [apply(Slice((0, j, *rest), x.shape, (1,) * x.rank), padded) for j in range(before + after + 1)]
    base = sum(parts[1:], parts[0]) * (op.alpha / op.size) + op.bias
    return narrowed(v / ops.pow(base, op.beta), x)


@formula(c.MeanVarianceNormalization)
def _mean_variance(op: c.MeanVarianceNormalization, x: Value) -> Value:
    v = wide(x)
    centred = v - _mean(v, op.axes)
    return narrowed(centred / (ops.sqrt(_mean(centred * centred, op.axes)) + 1e-9), x)


@formula(c.LpNormalization)
def _lp(op: c.LpNormalization, x: Value) -> Value:
    v = wide(x)
    total = _along(op, ops.abs(v) if op.p == 1 else v * v)
    none = ops.equal(total, 0.0)
    norm = ops.where(none, 1.0, total)
    return narrowed(ops.where(none, 0.0, v / (norm if op.p == 1 else ops.sqrt(norm))), x)
