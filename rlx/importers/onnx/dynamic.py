"""Integers of the data as sizes: what is known of them stays known, the rest become dims that the run decides."""

from __future__ import annotations

from collections.abc import Callable

from rlx.errors import RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value, const_value
from rlx.ir.shape import Size
from rlx.ops.dynamic import Extent
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Concat, Reshape, SizeOf, Slice, Squeeze, Unsqueeze

__all__ = ["known_items", "sizes_of"]

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
