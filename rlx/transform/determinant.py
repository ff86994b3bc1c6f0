"""The gradient rule of the determinant: an elimination, written out as a scan of its steps."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import apply
from rlx.ops.gradients.attach import formula, narrowed, reshaped, wide
from rlx.ops.index import Gather, GatherND
from rlx.ops.layout import Concat, Iota, Transpose
from rlx.ops.misc import Det
from rlx.trace.control import scan

BOOL, I64 = DTYPES["bool"], DTYPES["i64"]


@formula(Det)
def _det(op: Det, x: Value) -> Value:
    """The sign and product of the pivots of an elimination, the largest element of all as each, but of the last two.

    These stand for the 2x2 matrix that is left when m - 2 rows and columns are gone: its determinant is written out, so
    that nothing divides by them. First derivatives (cofactors) and second ones are then right at matrices of any rank,
    n-th ones at ranks above m - n, as others of lower rank divide by a pivot of zero.
    """
    m, count = x.shape[-1], numel(x.shape[:-2])
    if m == 0:
        return ops.full(shape=x.shape[:-2], value=1, dtype=x.dtype)  # type: ignore[no-any-return]
    a = reshaped(wide(x), (count, m, m))
    numbers = apply(Iota(m))
    unused = ops.full(shape=(count, m), value=1, dtype=BOOL)

    def step(carry: Any, number: Any) -> Any:
        a, rows, columns = carry
        free = reshaped(rows, (count, m, 1)) & reshaped(columns, (count, 1, m))
        size = ops.where(free, ops.abs(ops.stop_gradient(a)), -1.0)
        place = ops.arg_max(reshaped(size, (count, m * m)), axis=1, keepdims=False)
        row = ops.div(place, ops.size_of(size=m))
        column = place - row * ops.size_of(size=m)
        along, down = _rows(a, row), _rows(apply(Transpose((0, 2, 1)), a), column)  # of the pivot: its row, its column
        pivot = reshaped(apply(GatherND(1), along, reshaped(column, (count, 1))), (count, 1, 1))
        ratio = reshaped(down, (count, m, 1)) / ops.where(ops.equal(pivot, 0.0), 1.0, pivot)
        goes_on = ops.less(number, ops.size_of(size=m) - 2)
        left = ops.where(goes_on, a - ratio * reshaped(along, (count, 1, m)), a)
        rows, columns = (
            flags & ops.not_equal(numbers, reshaped(taken, (count, 1)))
            for flags, taken in ((rows, row), (columns, column))
        )
        return (left, rows, columns), (ops.where(goes_on, reshaped(pivot, (count,)), 1.0), row, column)

    (left, _, _), (pivots, rows, columns) = scan(step, (a, unused, unused), numbers)
    swaps = _inversions(rows, m) + _inversions(columns, m)
    sign = 1 - 2 * ops.cast(ops.mod(swaps, 2), a.dtype)
    value = ops.reduce_prod(pivots, axes=(0,), keepdims=False) * _of_two(left, rows, columns, m) * sign
    return narrowed(reshaped(value, x.shape[:-2]), x)


def _of_two(a: Value, rows: Value, columns: Value, m: Size) -> Value:
    """The determinant of what each a[b] has in the last two of rows[:, b] and columns[:, b]; in the last if m is 1."""
    last = ops.size_of(size=m) - 1
    places = [apply(Gather(0), v, n) for n in (ops.maximum(last - 1, 0), last) for v in (rows, columns)]

    def element(row: Value, column: Value) -> Value:
        place = apply(Concat(1), *(reshaped(v, (v.shape[0], 1)) for v in (row, column)))
        return apply(GatherND(1), a, place)  # type: ignore[no-any-return]

    (r, c, s, d) = places
    both = element(r, c) * element(s, d) - element(r, d) * element(s, c)
    return ops.where(ops.equal(last, 0), element(s, d), both)  # type: ignore[no-any-return]


def _rows(a: Value, number: Value) -> Value:
    """Row number[b] of each a[b]: [B, m, m] and [B] to [B, m]."""
    return apply(GatherND(1), a, reshaped(number, (number.shape[0], 1)))  # type: ignore[no-any-return]


def _inversions(order: Value, m: Size) -> Value:
    """How many pairs of each permutation order[:, b] stand the wrong way round: [m, B] to [B]."""
    count = order.shape[1]
    numbers = apply(Iota(m))
    before = ops.less(reshaped(numbers, (m, 1, 1)), reshaped(numbers, (1, m, 1)))
    wrong = ops.greater(reshaped(order, (m, 1, count)), reshaped(order, (1, m, count))) & before
    return ops.reduce_sum(ops.cast(wrong, I64), axes=(0, 1), keepdims=False)  # type: ignore[no-any-return]
