"""Rules of pooling of regions: products with the weights of elements, or the largest of the values between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Shape, Size
from rlx.ops.base import apply
from rlx.ops.contract import MatMul
from rlx.ops.gradients.attach import cast, formula, narrowed, reshaped, size_as, spread, wide
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.layout import box
from rlx.ops.gradients.products import swapped
from rlx.ops.gradients.sampling import Tap, element
from rlx.ops.index import Gather
from rlx.ops.layout import Iota
from rlx.ops.reduction import ReduceMax, ReduceSum
from rlx.ops.roi import FAR, MaxRoiPool, RoiAlign, RoiAlignAdaptive
from rlx.records import dataclass

I64 = DTYPES["i64"]


@dataclass(frozen=True)
class _Samples:
    """The samples of all bins of all regions along one axis of n elements.

    `places` [R, bins, samples] are kept within 0..n - 1; `inside` says which lie near the image, `there` which are
    samples at all (None: all of them), and `count` [R, 1, 1] or a number how many there are in each bin.
    """

    n: Size
    places: Value
    inside: Value
    there: Value | None
    count: Any

    @property
    def counted(self) -> Value:
        """Which samples have a value of the image."""
        return self.inside if self.there is None else self.inside & self.there


def _column(rois: Value, c: int) -> Value:
    """[R, columns] to [R, 1, 1]."""
    return reshaped(box(rois, [0, c], (rois.shape[0], 1)), (rois.shape[0], 1, 1))


def _samples(op: Any, rois: Value, d: int, n: Size) -> _Samples:
    """Those along axis d of the image: 0 down, 1 to the right."""
    low, step = op._box(_column(rois, 1 - d), _column(rois, 3 - d), op.size[d], ops.maximum)
    starts = low + step * reshaped(cast(apply(Iota(op.size[d])), rois.dtype), (1, op.size[d], 1))
    count: Any
    if isinstance(op, RoiAlign):
        count, there = op.samples, None
        number = cast(apply(Iota(op.samples)), rois.dtype)
        places = starts + (number + 0.5) * step / count
    else:  # no more of them are near the image than this
        most = 2 * n + 12
        each = ops.clip(ops.ceil(ops.where(ops.is_nan(step), 0.0, step)), lo=0.0, hi=2.0**62)
        count = ops.maximum(each, 1.0)
        first = ops.floor((-1 - starts) / ops.where(ops.equal(step, 0.0), 1.0, step / count)) - 2
        many = ops.greater(each, size_as(most, each))
        first = ops.where(many, ops.maximum(ops.minimum(first, each - size_as(most, each)), 0.0), 0.0)
        number = first + cast(apply(Iota(most)), rois.dtype)
        there = ops.less(number, each)
        places = starts + (number + 0.5) * step / count
    last = size_as(n - 1, rois)
    inside = ops.greater_equal(places, -1.0) & ops.less_equal(places, size_as(n, rois))
    kept = ops.maximum(ops.minimum(ops.where(inside, places, 0.0), last), 0.0)
    return _Samples(n, kept, inside, None if there is None else spread(there, kept.shape), count)


@formula(RoiAlign, RoiAlignAdaptive)
def _roi_align(op: Any, x: Value, rois: Value, batch: Value) -> Value:
    """Means over the samples; where their number is open, by the weights of all elements of an axis."""
    v = wide(x)
    axes = [_samples(op, cast(rois, v.dtype), d, n) for d, n in enumerate(x.shape[2:])]
    if op.mode == "avg" and isinstance(op, RoiAlignAdaptive):
        down, right = (_weights(s) for s in axes)
        images = apply(Gather(0), v, batch)
        across = apply(MatMul(), images, swapped(_each_channel(right)))
        return narrowed(apply(MatMul(), _each_channel(down), across), x)
    return narrowed(_by_elements(op, v, axes, batch), x)


def _each_channel(w: Value) -> Value:
    """[R, bins, n] as [R, 1, bins, n]."""
    return reshaped(w, (w.shape[0], 1, *w.shape[1:]))


def _weights(s: _Samples) -> Value:
    """How much each element counts in the mean of a bin: [R, bins, n]."""
    numbers = cast(apply(Iota(s.n)), s.places.dtype)
    near = ops.relu(1 - ops.abs(reshaped(s.places, (*s.places.shape, 1)) - numbers))
    counted = ops.where(reshaped(s.counted, (*s.places.shape, 1)), near, 0.0)
    return apply(ReduceSum((2,), False), counted) / s.count  # type: ignore[no-any-return]


def _corners(s: _Samples, shape: Shape) -> list[Tap]:
    """The two elements around each sample, under a shape; the mask that both share comes with the first axis."""
    p = reshaped(s.places, shape)
    low = ops.floor(p)
    after = ops.minimum(low + 1, size_as(s.n - 1, p))
    part = p - low
    return [(cast(low, I64), 1 - part, None), (cast(after, I64), part, None)]


def _by_elements(op: Any, v: Value, axes: list[_Samples], batch: Value) -> Value:
    """The mean or the largest of the values of all samples: [R, C, *size]."""
    regions, rows = batch.shape[0], [(s.places.shape[1], s.places.shape[2]) for s in axes]
    shapes = [(regions, *rows[0], 1, 1), (regions, 1, 1, *rows[1])]
    lead = (regions, *rows[0], *rows[1])
    number: Tap = (reshaped(ops.cast(batch, I64), (regions, 1, 1, 1, 1)), None, None)
    image = moved(v, 1, 3)
    down, right = (_corners(s, shape) for s, shape in zip(axes, shapes, strict=True))
    inside = _both([s.counted for s in axes], shapes, lead)
    terms = [ops.where(inside, element(image, (number, y, x), lead, 0), 0.0) for y in down for x in right]
    if op.mode == "avg":
        total = apply(ReduceSum((2, 4), False), sum(terms[1:], terms[0]))
        return moved(total / float(op.samples**2), 3, 1)
    largest = terms[0]
    for term in terms[1:]:
        largest = ops.maximum(largest, term)
    if axes[0].there is not None:
        there = _both([s.there for s in axes], shapes, lead)
        largest = ops.where(there, largest, float("-inf"))
        found = apply(ReduceMax((2, 4), False), largest)
        return moved(ops.where(ops.equal(found, float("-inf")), 0.0, found), 3, 1)
    return moved(apply(ReduceMax((2, 4), False), largest), 3, 1)


def _both(flags: list[Any], shapes: Sequence[Shape], lead: Shape) -> Value:
    """Flags of both axes together, for each channel: [*lead, 1]."""
    one, other = (reshaped(f, shape) for f, shape in zip(flags, shapes, strict=True))
    return reshaped(one & other, (*lead, 1))


@formula(MaxRoiPool)
def _max_roi_pool(op: MaxRoiPool, x: Value, rois: Value) -> Value:
    """The largest of each bin, along the rows and then down; equal ones share the gradient. Regions have none."""
    v, r = wide(x), ops.stop_gradient(wide(rois))
    images = apply(Gather(0), v, ops.cast(reshaped(_column(r, 0), (r.shape[0],)), I64))
    down, right = (_bins(op, r, d, n) for d, n in enumerate(x.shape[2:]))
    regions, (h, w), lowest = r.shape[0], x.shape[2:], float("-inf")
    across = ops.where(
        reshaped(right, (regions, 1, 1, op.size[1], w)), reshaped(images, (*images.shape[:3], 1, w)), lowest
    )
    rows = swapped(apply(ReduceMax((4,), False), across))  # [R, C, bins, H]
    both = ops.where(
        reshaped(down, (regions, 1, op.size[0], 1, h)), reshaped(rows, (*rows.shape[:2], 1, *rows.shape[2:])), lowest
    )
    found = apply(ReduceMax((4,), False), both)
    met = [ops.reduce_max(ops.cast(flags, v.dtype), axes=(2,), keepdims=False) for flags in (down, right)]
    any_ = reshaped(met[0], (regions, 1, op.size[0], 1)) * reshaped(met[1], (regions, 1, 1, op.size[1]))
    return narrowed(ops.where(ops.equal(any_, 0.0), 0.0, found), x)


def _bins(op: MaxRoiPool, rois: Value, d: int, n: Size) -> Value:
    """Which elements along an axis of n each bin has: bool [R, bins, n]."""
    ends = []
    for column in (2 - d, 4 - d):
        v = _column(rois, column) * op.scale
        v = ops.where(ops.is_nan(v), 0.0, ops.sign(v) * ops.floor(ops.abs(v) + 0.5))
        ends.append(ops.cast(ops.clip(v, lo=-FAR, hi=FAR), I64))
    low, high = ends
    length = ops.maximum(high - low + 1, 1)
    i = reshaped(apply(Iota(op.size[d])), (1, op.size[d], 1))
    begin = low + ops.div(i * length, op.size[d])
    end = low + ops.div((i + 1) * length + (op.size[d] - 1), op.size[d])
    places = apply(Iota(n))
    return ops.greater_equal(places, begin) & ops.less(places, end)  # type: ignore[no-any-return]
