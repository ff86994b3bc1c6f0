"""Ops that move elements, as functions of a NumPy-like library (all sizes are ints by now)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from rlx.backends.library.arrays import Arrays, Native
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node, Value
from rlx.ir.shape import Shape, evaluate

__all__ = ["LAYOUT", "shape_of"]

Check = Callable[[Any, Any, str], None]


def shape_of(value: Value) -> tuple[int, ...]:
    """The shape of a value whose sizes are all ints."""
    return tuple(evaluate(s, {}) for s in value.shape)


def _reshape(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    return x.reshape(shape_of(node.outputs[0]))


def _transpose(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    op: Any = node.op
    order = range(len(x.shape))[::-1] if op.perm is None else [axis % len(x.shape) for axis in op.perm]
    return lib.xp.transpose(x, tuple(order))


def _slice(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    op: Any = node.op
    at = []
    for start, size, step in zip(_ints(op.starts), _ints(op.sizes), op.steps, strict=True):
        stop = start + size * step
        at.append(slice(start, stop if stop >= 0 else None, step))
    return x[tuple(at)] if at else x


def _pad(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    op: Any = node.op
    n = len(x.shape)
    begins, ends = _ints(op.pads[:n]), _ints(op.pads[n:])
    added = [(max(0, b), max(0, e)) for b, e in zip(begins, ends, strict=True)]
    if any(pair != (0, 0) for pair in added):
        if op.mode == "constant":
            value = lib.const(op.value, node.inputs[0].dtype, 0)
            x = lib.xp.pad(x, added, constant_values=value)
        else:
            x = lib.xp.pad(x, added, mode=op.mode)
    kept = [slice(max(0, -b), size - max(0, -e)) for b, e, size in zip(begins, ends, x.shape, strict=True)]
    return x[tuple(kept)] if kept else x


def _concat(lib: Arrays, node: Node, check: Check, *x: Any) -> Any:
    op: Any = node.op
    return lib.xp.concatenate(list(x), axis=op.axis)


def _split(lib: Arrays, node: Node, check: Check, x: Any) -> tuple[Any, ...]:
    op: Any = node.op
    axis = op.axis % len(x.shape)
    ends = accumulate(_ints(op.sizes), initial=0)
    return tuple(x[(*[slice(None)] * axis, slice(a, b))] for a, b in pairwise(ends))


def _expand(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    return lib.xp.broadcast_to(x, shape_of(node.outputs[0]))


def _tile(lib: Arrays, node: Node, check: Check, x: Any) -> Any:
    op: Any = node.op
    return lib.xp.tile(x, tuple(_ints(op.repeats)))


def _gather(lib: Arrays, node: Node, check: Check, x: Any, indices: Any) -> Any:
    op: Any = node.op
    axis = op.axis % len(x.shape)
    i64 = DTYPES["i64"]
    rank = len(indices.shape)
    i, n, zero = lib.cast(indices, i64), lib.const(x.shape[axis], i64, rank), lib.const(0, i64, rank)
    wrapped = lib.xp.where(i < zero, i + n, i)
    ok = (wrapped >= zero) & (wrapped < n)
    check(ok, i, "index")
    return lib.take(x, lib.xp.where(ok, wrapped, zero), axis)


def _ints(sizes: Shape) -> list[int]:
    return [int(s) for s in sizes]


LAYOUT: dict[str, Native] = {
    "concat": _concat,
    "expand": _expand,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "tile": _tile,
    "transpose": _transpose,
    "unsqueeze": _reshape,
}
