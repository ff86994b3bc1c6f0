"""Rules of the ops that resample, unfold and rotate (`RotaryEmbedding`).

They are linear, and written as products or by the places that they read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import apply
from rlx.ops.contract import MatMul
from rlx.ops.fourier.spectrum import DivideBySize
from rlx.ops.gradients.attach import cast, formula, linear, narrowed, reshaped, wide, without_slope, zeros
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.layout import box
from rlx.ops.index import Gather
from rlx.ops.interpolate import InterpolateAxis
from rlx.ops.layout import Concat, Iota, Pad, Slice
from rlx.ops.mask import EyeLike
from rlx.ops.pool_more import MaxUnpool
from rlx.ops.resize import ResizeNearest
from rlx.ops.rotary import RotaryEmbedding
from rlx.ops.scatter import ScatterElements
from rlx.ops.signal import ComplexMul, Frames
from rlx.ops.space import Col2Im

without_slope(EyeLike)


@formula(InterpolateAxis)
def _interpolate(op: InterpolateAxis, x: Value, *decided: Value) -> Value:
    """The product with the matrix that the op makes of the unit vectors; a constant beyond the ends has no slope."""
    axis = op.axis % x.rank
    n = x.shape[axis]
    places = apply(Iota(n))
    unit = cast(ops.equal(reshaped(places, (n, 1)), reshaped(places, (1, n))), x.dtype)
    weights = apply(replace(op, axis=0, extrapolation=0.0), unit, *(ops.stop_gradient(v) for v in decided))
    rows = moved(x, axis, x.rank - 1)
    made = apply(MatMul(), rows, ops.transpose(weights))
    return moved(made, x.rank - 1, axis)


@formula(ResizeNearest)
def _resize(op: ResizeNearest, x: Value) -> Value:
    """Elements at the places that the op takes of their numbers."""
    for d, (n, m) in enumerate(zip(x.shape, op.sizes, strict=True)):
        scales = op.scales[d : d + 1] if op.scales else ()
        x = apply(Gather(d), x, apply(replace(op, sizes=(m,), scales=scales), apply(Iota(n))))
    return x


@linear("each", Col2Im)
def _col2im(op: Col2Im, inputs: Any, cotangents: Any, i: int) -> Value:
    """The windows of the image, tap by tap."""
    x, ct, axes, counts = inputs[0], cotangents[0], op._axes(), op._counts()
    begins, ends = [a[3] for a in axes], [a[4] for a in axes]
    full = apply(Pad((0, 0, *begins, 0, 0, *ends)), ct)
    taps = []
    for tap in product(*(range(k) for k in op.kernel)):
        starts = (0, 0, *(t * a[2] for t, a in zip(tap, axes, strict=True)))
        part = apply(Slice(starts, (*ct.shape[:2], *counts), (1, 1, *(a[1] for a in axes))), full)
        taps.append(reshaped(part, (*ct.shape[:2], 1, numel(counts))))
    return reshaped(apply(Concat(2), *taps), x.shape)


@formula(Frames)
def _frames(op: Frames, x: Value) -> Value:
    pieces: Size = (x.shape[-2] - op.length) // op.step + 1
    starts = apply(Iota(pieces)) * ops.size_of(size=op.step)
    places = reshaped(starts, (pieces, 1)) + apply(Iota(op.length))
    return apply(Gather(x.rank - 2), x, places)  # type: ignore[no-any-return]


@formula(MaxUnpool)
def _max_unpool(op: MaxUnpool, x: Value, places: Value) -> Any:
    sizes = (*x.shape[:2], *op.sizes)
    if op.pooled is not None and op.pooled != op.sizes:
        source = (*x.shape[:2], *op.pooled)
        rest, places, step = places, zeros(places), ops.size_of(size=numel(sizes))
        tail = ops.size_of(size=numel(source))
        for old, new in zip(source, sizes, strict=True):  # digit by digit
            tail, step = ops.div(tail, ops.size_of(size=old)), ops.div(step, ops.size_of(size=new))
            digit = ops.div(rest, tail)
            places, rest = places + digit * step, rest - digit * tail
    count = numel(sizes)
    flat = ops.full(shape=(count,), value=0, dtype=x.dtype)
    length = numel(x.shape)
    made = apply(ScatterElements(0), flat, reshaped(places, (length,)), reshaped(x, (length,)))
    return reshaped(made, sizes)


@linear("each", DivideBySize)
def _divide(op: DivideBySize, inputs: Any, cotangents: Any, i: int) -> Any:
    return apply(op, cotangents[0])


@formula(ComplexMul)
def _complex_mul(op: ComplexMul, a: Value, b: Value) -> Value:
    (ar, ai), (br, bi) = ([_part(v, k) for k in (0, 1)] for v in (a, b))
    parts = [ar * br - ai * bi, ar * bi + ai * br]
    return apply(Concat(parts[0].rank - 1), *parts)  # type: ignore[no-any-return]


def _part(x: Value, k: int) -> Value:
    return box(x, [*[0] * (x.rank - 1), k], (*x.shape[:-1], 1))


@formula(RotaryEmbedding)
def _rotary(op: RotaryEmbedding, x: Value, cos: Value, sin: Value, positions: Value | None = None) -> Value:
    length, width, rotated = op._sizes(x.type)
    half = rotated // 2
    v = wide(x)
    if x.rank == 3:
        v = moved(reshaped(v, (x.shape[0], length, op.heads, width)), 2, 1)
    c, s = (wide(t) if positions is None else apply(Gather(0), wide(t), positions) for t in (cos, sin))
    c, s = (reshaped(t, (t.shape[0], 1, *t.shape[1:])) for t in (c, s))
    lead = v.shape[:-1]
    turned = box(v, [0, 0, 0, 0], (*lead, rotated))
    axis = 4 if op.interleaved else 3
    pairs = reshaped(turned, (*lead, half, 2) if op.interleaved else (*lead, 2, half))
    first, second = (
        reshaped(box(pairs, [k if d == axis else 0 for d in range(5)], _one(pairs, axis)), (*lead, half))
        for k in (0, 1)
    )
    made = [reshaped(t, _one(pairs, axis)) for t in (first * c - second * s, second * c + first * s)]
    y = reshaped(apply(Concat(axis), *made), (*lead, rotated))
    if rotated != width:
        y = apply(Concat(3), y, box(v, [0, 0, 0, rotated], (*lead, width - rotated)))
    return narrowed(y if x.rank == 4 else reshaped(moved(y, 1, 2), x.shape), x)


def _one(x: Value, axis: int) -> tuple[Size, ...]:
    """The shape with one element along an axis."""
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])
