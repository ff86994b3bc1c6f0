"""Rules of the ops that move elements: all are linear, and their transposes move them back."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import TensorType, Value
from rlx.ir.shape import Size
from rlx.ops import layout as m
from rlx.ops.base import apply
from rlx.ops.dynamic import AsShape
from rlx.ops.einsum import Relabel
from rlx.ops.gradients.attach import cast, jvp, linear, reshaped, spread, summed_to, transpose, zeros
from rlx.ops.index import Gather
from rlx.ops.mask import ReverseSequence, Trilu
from rlx.ops.update import DynamicUpdateSlice


@linear("each", m.Reshape, m.Squeeze, m.Unsqueeze)
def _view(op: Any, inputs: Any, cotangents: Any, i: int) -> Value:
    return reshaped(cotangents[0], inputs[0].shape)


@linear("each", AsShape)
def _as_shape(op: AsShape, inputs: Any, cotangents: Any, i: int) -> Value:
    return apply(AsShape(inputs[0].shape), cotangents[0])  # type: ignore[no-any-return]


@linear("each", m.Transpose)
def _transpose(op: m.Transpose, inputs: Any, cotangents: Any, i: int) -> Value:
    order = op._order(inputs[0].rank)
    back = tuple(order.index(d) for d in range(len(order)))
    return apply(m.Transpose(back), cotangents[0])  # type: ignore[no-any-return]


@linear("each", m.Expand)
def _expand(op: Any, inputs: Any, cotangents: Any, i: int) -> Value:
    return summed_to(cotangents[0], inputs[0].shape)


def box(x: Value, starts: list[Size], shape: tuple[Size, ...]) -> Value:
    """The part of x of that shape from `starts` on."""
    return apply(m.Slice(tuple(starts), tuple(shape), (1,) * x.rank), x)  # type: ignore[no-any-return]


@linear("each", m.Slice)
def _slice(op: m.Slice, inputs: Any, cotangents: Any, i: int) -> Value:
    """Each element to where it came from, zeros elsewhere: turned round for a negative step, apart for a long one."""
    x, ct = inputs[0], cotangents[0]
    if any(isinstance(size, int) and size == 0 for size in op.sizes):
        return zeros(x)
    starts, steps, rank = list(op.starts), list(op.steps), x.rank
    turned = [d for d in range(rank) if steps[d] < 0]
    if turned:
        for d in turned:
            starts[d] = starts[d] + (op.sizes[d] - 1) * steps[d]
        first = tuple(op.sizes[d] - 1 if d in turned else 0 for d in range(rank))
        ct = apply(m.Slice(first, op.sizes, tuple(-1 if d in turned else 1 for d in range(rank))), ct)
    apart = tuple(abs(step) for step in steps)
    if any(step > 1 for step in apart):
        ct = spaced(ct, apart)
    ends = [n - start - size for n, start, size in zip(x.shape, starts, ct.shape, strict=True)]
    return apply(m.Pad((*starts, *ends)), ct)  # type: ignore[no-any-return]


def spaced(x: Value, steps: tuple[int, ...]) -> Value:
    """x with step - 1 zeros after each element along each axis."""
    pairs = [(n, 1) if step > 1 else (n,) for n, step in zip(x.shape, steps, strict=True)]
    ends = [(0, step - 1) if step > 1 else (0,) for step in steps]
    split: list[Size] = [size for pair in pairs for size in pair]
    after = [end for pair in ends for end in pair]
    y = apply(m.Pad((*[0] * len(split), *after)), reshaped(x, split))
    return reshaped(y, [n * step for n, step in zip(x.shape, steps, strict=True)])


@jvp(m.Pad)
def _pad_jvp(op: m.Pad, inputs: Any, outputs: Any, tangents: Any) -> Any:
    """Copies at the border are taken by their places, which the same padding of the places gives."""
    x, t = inputs[0], tangents[0]
    if op.mode == "constant":
        return apply(m.Pad(op.pads), t)
    for d in range(x.rank):
        begin, end = op.pads[d], op.pads[d + x.rank]
        if begin != 0 or end != 0:
            t = apply(Gather(d), t, apply(m.Pad((begin, end), 0, op.mode), apply(m.Iota(x.shape[d]))))
    return t


@transpose(m.Pad)
def _pad_transpose(op: m.Pad, inputs: Any, cotangents: Any, i: int) -> Any:
    """Of what its jvp makes: zeros around."""
    return apply(m.Pad(tuple(0 - pad for pad in op.pads)), cotangents[0])


@linear("joint", m.Concat)
def _concat(op: m.Concat, inputs: Any, cotangents: Any, i: int) -> Value:
    ct, axis = cotangents[0], op.axis % inputs[0].rank
    starts: list[Size] = [0] * ct.rank
    for x in inputs[:i]:
        starts[axis] = starts[axis] + x.shape[axis]
    sizes = (*ct.shape[:axis], inputs[i].shape[axis], *ct.shape[axis + 1 :])
    return reshaped(box(ct, starts, sizes), inputs[i].shape)


@linear("each", m.Split)
def _split(op: m.Split, inputs: Any, cotangents: Any, i: int) -> Value:
    types = op.infer(TensorType(inputs[0].shape, inputs[0].dtype))
    parts = [zeros(type) if ct is None else ct for ct, type in zip(cotangents, types, strict=True)]
    return reshaped(apply(m.Concat(op.axis), *parts), inputs[0].shape)


@linear("joint", Trilu, ReverseSequence)
def _again(op: Any, inputs: Any, cotangents: Any, i: int) -> Any:
    """They are their own transposes."""
    return apply(op, cotangents[0], *inputs[1:])


@linear("each", Relabel)
def _relabel(op: Relabel, inputs: Any, cotangents: Any, i: int) -> Value:
    x = inputs[0]
    first = [op.source.index(label) for label in op.source]
    own = tuple(d for d in range(x.rank) if first[d] == d)
    order = tuple(op.target.index(op.source[d]) for d in own)
    ct = apply(m.Transpose(order), cotangents[0])
    if len(own) == x.rank:
        return ct  # type: ignore[no-any-return]
    ct = spread(reshaped(ct, [x.shape[d] if d in own else 1 for d in range(x.rank)]), x.shape)
    for d in range(x.rank):
        if d not in own:
            places = apply(m.Iota(x.shape[d]))
            i_d, i_first = (reshaped(places, (x.shape[d], *[1] * (x.rank - 1 - k))) for k in (d, first[d]))
            ct = ct * cast(ops.equal(i_d, i_first), x.dtype)
    return ct


@linear("joint", DynamicUpdateSlice)
def _update(op: DynamicUpdateSlice, inputs: Any, cotangents: Any, i: int) -> Any:
    x, rows, start = inputs
    ct, axis = cotangents[0], op.axis % x.rank
    if i == 0:
        return apply(op, ct, zeros(rows), start)
    n = rows.shape[axis]
    places, step = ops.cast(start, "i64"), apply(m.Iota(n))
    if start.rank:
        places = reshaped(places, (start.shape[0], *[1] * (x.rank - 1)))
        step = reshaped(step, (n, *[1] * (x.rank - 1 - axis)))
    places = places + step
    places = ops.mod(places, ops.size_of(size=x.shape[axis])) if op.ring else places
    if not start.rank:
        return box(apply(Gather(axis), ct, places), [0] * x.rank, rows.shape)
    return ops.gather_elements(ct, spread(places, rows.shape), axis=axis)
