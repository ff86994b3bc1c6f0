"""Rules of the ops that sample images at computed places: sums of elements, each with a weight that has a slope."""

from __future__ import annotations

from itertools import product

from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Shape, Size, exact_div, numel
from rlx.ops.base import apply
from rlx.ops.contract import MatMul
from rlx.ops.gradients.attach import cast, formula, narrowed, reshaped, size_as, spread, wide
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.layout import box
from rlx.ops.gradients.products import swapped
from rlx.ops.index import GatherND
from rlx.ops.interpolate import cubic_weight
from rlx.ops.layout import Concat, Iota
from rlx.ops.sample import CUBIC, TAPS, AffineGrid, DeformSample, GridSample


@formula(AffineGrid)
def _affine_grid(op: AffineGrid, theta: Value) -> Value:
    """The product with the grid of the identity."""
    r, v = len(op.size), wide(theta)
    rows, columns = (reshaped(apply(Iota(n)), shape) for n, shape in ((r, (1, r, 1)), (r + 1, (1, 1, r + 1))))
    places = reshaped(apply(op, cast(ops.equal(rows, columns), v.dtype)), (numel(op.size), r))
    turned, shift = box(v, [0, 0, 0], (theta.shape[0], r, r)), box(v, [0, 0, r], (theta.shape[0], r, 1))
    made = apply(MatMul(), places, swapped(turned)) + swapped(shift)
    return narrowed(reshaped(made, (theta.shape[0], *op.size, r)), theta)


@formula(GridSample)
def _grid_sample(op: GridSample, x: Value, grid: Value) -> Value:
    v, sizes, lead = wide(x), x.shape[2:], grid.shape[:-1]
    g, r = cast(grid, v.dtype), len(sizes)
    columns = [reshaped(box(g, [*[0] * (r + 1), r - 1 - d], (*lead, 1)), lead) for d in range(r)]
    taps = [
        [_tap(op, tap, p, n) for tap in TAPS[op.mode]]
        for p, n in ((_place(op, column, n), n) for column, n in zip(columns, sizes, strict=True))
    ]
    y = between(moved(v, 1, v.rank - 1), taps, lead, 1)
    return narrowed(moved(y, x.rank - 1, 1), x)


Tap = tuple[Value, Value | None, Value | None]  # index into an axis, weight (None: 1), whether it is meant (None: yes)


def between(image: Value, taps: list[list[Tap]], lead: Shape, batch: int) -> Value:
    """The sum over the taps of each axis of weight times element: image [*batch, in.., C] to [*lead, C]."""
    terms = [element(image, chosen, lead, batch) for chosen in product(*taps)]
    return sum(terms[1:], terms[0])


def element(image: Value, chosen: tuple[Tap, ...], lead: Shape, batch: int) -> Value:
    """The element at one tap of each axis, times its weights; 0 where it is not meant."""
    at = apply(Concat(len(lead)), *(reshaped(spread(index, lead), (*lead, 1)) for index, _, _ in chosen))
    value = apply(GatherND(batch), image, at)
    for _, weight, inside in chosen:
        value = value if inside is None else ops.where(reshaped(spread(inside, lead), (*lead, 1)), value, 0.0)
        value = value if weight is None else value * reshaped(spread(weight, lead), (*lead, 1))
    return value  # type: ignore[no-any-return]


@formula(DeformSample)
def _deform_sample(op: DeformSample, x: Value, offset: Value, mask: Value | None = None) -> Value:
    """Each tap is a place between elements, as one of `GridSample`."""
    v, groups, each = wide(x), op.offset_groups, exact_div(x.shape[1], op.offset_groups)
    assert each is not None  # `infer` has seen to that
    lead = (x.shape[0], groups, *op.kernel, *offset.shape[2:])
    shifts = reshaped(cast(offset, v.dtype), (*lead[:4], 2, *lead[4:]))
    taps = []
    for d, n in enumerate(x.shape[2:]):
        own = [reshaped(apply(Iota(lead[k])), [lead[k] if i == k else 1 for i in range(6)]) for k in (2 + d, 4 + d)]
        base = own[0] * op.dilations[d] + own[1] * op.strides[d] - op.pads[d]
        shift = reshaped(box(shifts, [d if k == 4 else 0 for k in range(7)], (*lead[:4], 1, *lead[4:])), lead)
        taps.append([_tap(GridSample(), tap, shift + cast(base, v.dtype), n) for tap in TAPS["linear"]])
    image = moved(reshaped(v, (x.shape[0], groups, each, *x.shape[2:])), 2, 4)
    y = between(image, taps, lead, 2)
    if mask is not None:
        y = y * reshaped(cast(mask, v.dtype), (*lead, 1))
    return moved(y, 6, 2)


def _place(op: GridSample, g: Value, n: Size) -> Value:
    """-1..1 as a place among n elements, see `GridSample`."""
    last = size_as(n - 1, g)
    p: Value = (g + 1) / 2 * last if op.align_corners else ((g + 1) * size_as(n, g) - 1) / 2
    p = ops.round(p) if op.mode == "nearest" else p
    if op.mode == "cubic" or op.padding == "zeros":
        return p
    return ops.maximum(ops.minimum(p, last), 0.0) if op.padding == "border" else _reflected(op, p, n)


def _reflected(op: GridSample, p: Value, n: Size) -> Value:
    low, length = (0.0, n - 1) if op.align_corners else (-0.5, n)
    if length == 0:
        return p * 0.0
    reach = size_as(length, p)
    alone = None if isinstance(length, int) else ops.equal(reach, 0.0)
    reach = reach if alone is None else ops.where(alone, 1.0, reach)
    distance = ops.abs(p - low)
    rest = distance - ops.floor(distance / (2 * reach)) * (2 * reach)
    folded: Value = ops.where(ops.greater(rest, reach), 2 * reach - rest, rest) + low
    return folded if alone is None else ops.where(alone, 0.0, folded)


def _tap(op: GridSample, tap: int, p: Value, n: Size) -> Tap:
    """What a tap of a place p among n elements reads."""
    at, weight = ops.floor(p) + float(tap), None
    if op.mode != "nearest":
        distance = ops.abs(at - p)
        weight = 1 - distance if op.mode == "linear" else cubic_weight(distance, CUBIC, ops.where)
    if op.mode == "cubic" and op.padding == "reflection":
        at = _reflected(op, at, n)
    at, last = ops.where(ops.is_nan(at), 0.0, at), size_as(n - 1, p)
    inside = None
    if op.padding == "zeros":
        inside = ops.where(ops.less(at, 0.0), ops.less(last, at), ops.less_equal(at, last))
    return cast(ops.maximum(ops.minimum(at, last), 0.0), DTYPES["i64"]), weight, inside
