"""Rules of the ops that read or write elements at places given by data: one is the transpose of the other."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops import index as x_
from rlx.ops import scatter as s
from rlx.ops.base import Op, apply
from rlx.ops.gradients.attach import formula, is_smooth, jvp, linear, reshaped, spread, transpose, zeros
from rlx.ops.layout import Concat, Iota, Transpose
from rlx.ops.mask import OneHot
from rlx.ops.select import TopK


@linear("joint", x_.Gather)
def _gather(op: x_.Gather, inputs: Any, cotangents: Any, i: int) -> Value:
    """Rows are added up where they came from, the axis that is chosen from in front."""
    x, places = inputs
    ct, axis, n = cotangents[0], op.axis % x.rank, places.rank
    order = (*range(axis, axis + n), *range(axis), *range(axis + n, ct.rank))
    ct = ct if axis == 0 else apply(Transpose(order), ct)
    rows = (x.shape[axis], *x.shape[:axis], *x.shape[axis + 1 :])
    into = ops.full(shape=rows, value=0, dtype=x.dtype)
    made = apply(s.ScatterNd("add"), into, reshaped(places, (*places.shape, 1)), ct)
    return made if axis == 0 else apply(Transpose((*range(1, axis + 1), 0, *range(axis + 1, x.rank))), made)  # type: ignore[no-any-return]


@linear("joint", x_.GatherND)
def _gather_nd(op: x_.GatherND, inputs: Any, cotangents: Any, i: int) -> Value:
    x, places = inputs
    batch, lead = op.batch_dims, places.shape[:-1]
    numbers = []
    for d in range(batch):
        count = ops.cast(apply(Iota(lead[d])), places.dtype)
        numbers.append(spread(reshaped(count, (lead[d], *[1] * (len(lead) - d))), (*lead, 1)))
    full = apply(Concat(-1), *numbers, places) if numbers else places
    return apply(s.ScatterNd("add"), zeros(x), full, cotangents[0])  # type: ignore[no-any-return]


@linear("joint", x_.GatherElements)
def _gather_elements(op: x_.GatherElements, inputs: Any, cotangents: Any, i: int) -> Value:
    return apply(s.ScatterElements(op.axis, "add"), zeros(inputs[0]), inputs[1], cotangents[0])  # type: ignore[no-any-return]


def _read(op: Op, x: Value, places: Value) -> Value:
    """What is at the places that a scatter writes to."""
    back: Op = x_.GatherElements(op.axis) if isinstance(op, s.ScatterElements) else x_.GatherND()
    return apply(back, x, places)  # type: ignore[no-any-return]


@jvp(s.ScatterElements, s.ScatterNd)
def _scattered(op: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
    """Sums as they are; of updates that replace, the last one of a place counts, found by scattering their numbers."""
    x, places, updates = inputs
    t, u = (zeros(v) if dv is None else dv for v, dv in ((x, tangents[0]), (updates, tangents[2])))
    if op.reduction == "add":
        return apply(op, t, places, u)
    if op.reduction != "none":
        return NotImplemented
    add = type(op)(**(op.attributes() | {"reduction": "add"}))
    gone = apply(op, t, places, zeros(updates))
    if tangents[2] is None:
        return gone
    lead = updates.shape if isinstance(op, s.ScatterElements) else places.shape[:-1]
    numbers = reshaped(apply(Iota(numel(lead))), lead)
    if isinstance(op, s.ScatterElements):
        board = ops.full(shape=x.shape, value=0, dtype="i64")
        last = ops.equal(_read(op, apply(op, board, places, numbers), places), numbers)
    else:
        board = ops.full(shape=x.shape[: places.shape[-1]], value=0, dtype="i64")
        last = ops.equal(_read(op, apply(op, board, places, numbers), places), numbers)
        last = reshaped(last, (*lead, *[1] * (updates.rank - len(lead))))
    return apply(add, gone, places, ops.where(last, u, zeros(u)))


@transpose(s.ScatterElements, s.ScatterNd)
def _scatter_transpose(op: Any, inputs: Any, cotangents: Any, i: int) -> Any:
    """Of what the jvp is made of: sums, and zeros put in the place of elements."""
    if i == 0 and op.reduction == "none":
        return apply(op, cotangents[0], inputs[1], zeros(inputs[2]))
    return cotangents[0] if i == 0 else _read(op, cotangents[0], inputs[1])


@jvp(TopK)
def _top_k(op: TopK, inputs: Any, outputs: Any, tangents: Any) -> Any:
    return ops.gather_elements(tangents[0], outputs[1], axis=op.axis), None


@formula(OneHot)
def _one_hot(op: OneHot, places: Value, values: Value) -> Value:
    on = apply(op, places, ops.cast(apply(Iota(2)), "bool"))
    off, hit = (ops.gather(values, ops.cast(apply(Iota(1, k)), "i64"), axis=0) for k in (0, 1))
    assert is_smooth(values)
    return ops.where(on, reshaped(hit, ()), reshaped(off, ()))  # type: ignore[no-any-return]
