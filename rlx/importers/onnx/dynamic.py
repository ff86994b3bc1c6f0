"""Integers of the data as sizes: what is known of them stays known, the rest become dims that the run decides."""

from __future__ import annotations

from collections.abc import Callable

from rlx.errors import RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value, const_value
from rlx.ir.shape import Size
from rlx.ops.dynamic import Extent
from rlx.ops.elementwise import Add, Cast, Sub
from rlx.ops.layout import Concat, Reshape, SizeOf, Slice, Squeeze, Unsqueeze

__all__ = ["constant_difference", "known_items", "sizes_of"]

_LIMIT = 64  # elements: more are no sizes


def known_items(x: Value) -> list[Size | None]:
    """The elements of an integer vector or scalar as far as they are constants or sizes, None for the others."""
    data = const_value(x)
    if data is not None:
        return [int(v) for v in data.reshape(-1)]
    op = x.node.op if x.node is not None else None
    if isinstance(op, SizeOf):
        return [op.size]
    if x.node is not None and isinstance(op, Concat):
        return [item for part in x.node.inputs for item in known_items(part)]
    if x.node is not None and isinstance(op, Reshape | Squeeze | Unsqueeze | Cast):
        (source,) = x.node.inputs
        if source.dtype.is_integer:
            return known_items(source)
    count = 1
    for size in x.shape:
        if not isinstance(size, int):
            return []
        count *= size
    return [None] * count if count <= _LIMIT else []


def sizes_of(graph: Graph, x: Value, what: str, fresh: Callable[[int], Size], label: str) -> list[Size]:
    """The elements of an integer vector or scalar as sizes; `fresh(n)` makes the dim for element n."""
    if x.rank > 1 or not all(isinstance(s, int) for s in x.shape) or not x.dtype.is_integer:
        raise RlxError(f"{what}, {x.name!r}, has an unknown number of elements: it must be known at import")
    items = known_items(x)
    if not items and x.shape != (0,):
        raise RlxError(f"{what}, {x.name!r}, has more than {_LIMIT} elements of run-time data")
    sizes: list[Size] = []
    for n, item in enumerate(items):
        if item is not None:
            sizes.append(item)
            continue
        element = x
        if x.rank:
            (element,) = graph.add(Slice((n,), (1,), (1,)), x, provenance=(label,))
            (element,) = graph.add(Reshape(()), element, provenance=(label,))
        if element.dtype is not DTYPES["i64"]:
            (element,) = graph.add(Cast(DTYPES["i64"]), element, provenance=(label,))
        size = fresh(n)
        graph.add(Extent(size), element, provenance=(label,))
        sizes.append(size)
    return sizes


def constant_difference(a: Value, b: Value) -> int | None:
    """b - a where that is the same positive number in every run, as each comes of one value by adding constants."""
    (first, more), (second, most) = (_base(v) for v in (a, b))
    return most - more if first is second and most > more else None


def _base(x: Value) -> tuple[Value, int]:
    """The value that x is but for its shape and integer type, and the number that was added to it."""
    added = 0
    while x.node is not None:
        op, inputs = x.node.op, x.node.inputs
        if isinstance(op, Reshape | Squeeze | Unsqueeze | Cast) and inputs[0].dtype.is_integer and x.dtype.bits >= 32:
            x = inputs[0]
            continue
        steps = [data for v in inputs[1:] if (data := const_value(v)) is not None and data.size == 1]
        if not isinstance(op, Add | Sub) or not steps:
            break
        added += int(steps[0].item()) * (1 if isinstance(op, Add) else -1)
        x = inputs[0]
    return x, added
