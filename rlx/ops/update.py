"""Ops that replace a part of a tensor: where the tensor is a state, they touch nothing but that part."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ExecutionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, max_size, unify
from rlx.ops.base import Op, Work, axis_of, check_same_dtype, register, tensor_bytes
from rlx.ops.index import check_indices

__all__ = ["DynamicUpdateSlice"]


@register
class DynamicUpdateSlice(Op):
    """x with the rows from `start` on along `axis` replaced. (jax.lax.dynamic_update_slice_in_dim, TensorScatter-24)

    x [.., N, ..], rows [.., n, ..] with n <= N, start an integer: one number [], or [B] with one for each entry of axis
    0 of x. Rows that would lie outside (start < 0 or start + n > N) stop the run with `ExecutionError`. With `ring`,
    row i goes to (start + i) modulo N, and only start < 0 or n > N do that.

    Rows of the encoding that x has (`encode`) are put there as blocks, along another axis than the last: then the
    result has it too.
    """

    places = 2
    takes_stored = True
    axis: int = 0
    ring: bool = False

    def infer(self, x: TensorType, rows: TensorType, start: TensorType) -> TensorType:
        check_indices(start, self.op_name)
        check_same_dtype(self, x, rows)
        axis = axis_of(self.axis, x.rank, self.op_name)
        if rows.rank != x.rank:
            raise ShapeError(f"{self.op_name}: the ranks of {x} and of the rows {rows} must be equal")
        for d, (size, given) in enumerate(zip(x.shape, rows.shape, strict=True)):
            whole = max_size(size, given) if d == axis else given
            unify(whole, size, f"{self.op_name}: axis {d} of the rows {rows} in {x}")
        if start.rank > 1 or (start.rank == 1 and axis == 0):
            raise ShapeError(f"{self.op_name}: start is a number, or one for each entry of axis 0; got {start}")
        if start.rank == 1:
            unify(start.shape[0], x.shape[0], f"{self.op_name}: the starts {start} for the entries of {x}")
        as_blocks = x.encoding is rows.encoding and axis != x.rank - 1
        return TensorType(x.shape, x.dtype, x.encoding if as_blocks else None)

    def work(self, *x: TensorType) -> Work:
        whole, rows, start = map(tensor_bytes, x)
        return Work(0, whole + rows + start, whole)

    def reference(self, x: Array, rows: Array, start: Array) -> Array:
        axis, out = self.axis % x.ndim, x.copy()
        count = rows.shape[axis]
        for b, first in enumerate(np.atleast_1d(start).tolist()):
            last = np.iinfo(np.int64).max if self.ring else x.shape[axis] - count
            if not 0 <= first <= last:
                raise ExecutionError(f"{self.op_name}: {count} rows from {first} on lie outside of {x.shape[axis]}")
            entry: Any = (b,) if start.ndim else ()
            places = (first + np.arange(count)) % max(x.shape[axis], 1)
            out[entry][(*(slice(None),) * (axis - len(entry)), places)] = rows[entry]
        return out

    def lower(self, k: Any, x: Any, rows: Any, start: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            at = i[axis] - self._first(k, x.shape[axis], rows.shape[axis], start, i)
            if self.ring:
                at = at % k.size(max_size(x.shape[axis], 1))
            inside = (at >= 0) & (at < k.size(rows.shape[axis]))
            return k.select(inside, rows(*i[:axis], at, *i[axis + 1 :], where=inside), x(*i))

        return k.map(element)

    def lower_in_place(self, k: Any, x: Any, rows: Any, start: Any) -> Any:
        """What is written where x already is in the place of the result."""
        axis = self.axis % x.rank

        def at(*i: Any) -> Any:
            place = i[axis] + self._first(k, x.shape[axis], rows.shape[axis], start, i)
            if self.ring and rows.shape[axis] != 1:
                place = place % k.size(max_size(x.shape[axis], 1))
            return (*i[:axis], place, *i[axis + 1 :])

        return k.written(rows.shape, at, rows)

    def _first(self, k: Any, size: Size, count: Size, start: Any, i: Any) -> Any:
        first = k.cast(start(i[0]) if start.rank else start(), "i64")
        if not self.ring:
            return k.checked_start(first, size, count)
        return k.checked_start(first, np.iinfo(np.int64).max, 0) % k.size(max_size(size, 1))
