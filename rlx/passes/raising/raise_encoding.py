"""Quantised weights that an exporter wrote as arithmetic become one op that decodes them where they are read.

Proved by structure, bit by bit: integers of 8 bits and their differences are exact in all float types, so the product
with the scale is rounded once, as the op does it. A quotient becomes a product with the inverse, with one rounding
more, where the divisors are constants whose inverses f32 has as normal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import numel
from rlx.ops.elementwise import Cast, Div, Mul, Reciprocal, Sub
from rlx.ops.encoded import Dequantize
from rlx.ops.layout import Expand, Reshape, Transpose
from rlx.passes.match.patterns import Statics, either_way, is_sized, made_by, uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["raise_encoding"]

F32 = DTYPES["f32"]


@dataclass
class _Quantised:
    """cast(data) - zero, seen through transposes and reshapes, which move to the stored integers."""

    data: Value  # the integers, a param or constant
    dtype: Any  # that they are cast to
    moves: list[Node]  # layout ops after the cast, outermost first
    zero: Value | None
    nodes: list[Node]


def raise_encoding(graph: Graph) -> Graph:
    """(cast(q) - zero) * scale, q an 8- or 4-bit param or constant, becomes dequantize(q, scale, zero)."""
    statics = Statics()
    return rewrite(graph, lambda site: _raised(site, statics))


def _raised(site: Site, statics: Statics) -> Value | None:
    for value, scale in _factors(site.node, site.inputs):
        found = _quantised(value)
        if found is not None and scale in statics and is_sized(value):
            made = _dequantized(site, found, value, scale)
            if made is not None:
                site.merged.extend(found.nodes)
                return made
    return None


def _factors(node: Node, inputs: tuple[Value, ...]) -> Iterator[tuple[Value, Value]]:
    if isinstance(node.op, Mul):
        yield from either_way(Node(node.op, inputs))
    elif isinstance(node.op, Div) and _has_inverse(inputs[1]):
        yield inputs[0], inputs[1]


def _has_inverse(divisor: Value) -> bool:
    """Whether the divisor is a constant of normal numbers whose inverses are normal numbers."""
    if divisor.kind != "const" or divisor.data is None or not divisor.dtype.is_float:
        return False
    size = np.abs(divisor.data.astype(np.float64))
    return bool(((size >= 2.0**-126) & (size <= 2.0**126)).all())


def _quantised(value: Value) -> _Quantised | None:
    moves: list[Node] = []
    nodes: list[Node] = []
    zero = None
    while (node := made_by(value, Transpose, Reshape, Sub, Cast)) is not None:
        nodes.append(node)
        if isinstance(node.op, Sub):
            if zero is not None or (moves and numel(node.inputs[1].shape) != 1):
                return None
            zero = node.inputs[1]
        elif isinstance(node.op, Cast):
            data = node.inputs[0]
            small = data.dtype.is_integer and data.dtype.bits <= 8 and data.type.encoding is None
            wide = value.dtype.name in ("f32", "f16", "bf16")
            if data.node is not None or data.kind not in ("param", "const") or not small or not wide:
                return None
            return _Quantised(data, node.op.to, moves, zero, nodes[::-1])
        else:
            moves.append(node)
        value = node.inputs[0]
    return None


def _dequantized(site: Site, q: _Quantised, value: Value, scale: Value) -> Value | None:
    stored = None if q.zero is None else _stored_zero(site, q.zero, q.data)
    if q.zero is not None and stored is None:
        return None
    place = _placed(value, scale)
    if place is None or (stored is not None and not _fits(value, stored, place)):
        return None
    axis, block, shape = place
    data = q.data
    for move in reversed(q.moves):
        data = site.add(move.op, data)
    if isinstance(site.op, Div):
        scale = scale if scale.dtype is F32 else site.add(Cast(F32), scale)  # f16 may not have the inverse
        scale = site.add(Reciprocal(), scale)
    params = [_shaped(site, p, shape) for p in (scale, stored) if p is not None]
    return site.add(Dequantize(axis, block, q.dtype), data, *params)


def _placed(value: Value, scale: Value) -> tuple[int | None, int, tuple[int, ...]] | None:
    """(axis, block, shape of scale) for a scale that broadcasts to the data; None where dequantize has no such form."""
    sizes = [int(s) for s in scale.shape if isinstance(s, int)]
    if scale.rank > value.rank or not is_sized(scale):
        return None
    lead = value.rank - scale.rank
    wide = [1] * lead + sizes
    axes = [d for d, size in enumerate(wide) if size != 1]
    if any(wide[d] != value.shape[d] for d in axes):
        return None
    if len(axes) <= 1:
        return (None, 0, ()) if not axes else (axes[0], 0, (wide[axes[0]],))
    missing = [d for d in range(value.rank) if wide[d] == 1 and value.shape[d] != 1]
    if len(missing) != 1:
        return None
    block = value.shape[missing[0]]
    assert isinstance(block, int)
    return missing[0], block, tuple(wide)


def _fits(value: Value, zero: Value, place: tuple[int | None, int, tuple[int, ...]]) -> bool:
    """Whether the zero is placed like the scale, or is one number."""
    return numel(zero.shape) == 1 or _placed(value, zero) == place


def _stored_zero(site: Site, zero: Value, data: Value) -> Value | None:
    """The zero point in the type of the data, or None when it may not be a value of that type."""
    cast = made_by(zero, Cast)
    if cast is not None and cast.inputs[0].dtype is data.dtype:
        site.merged.append(cast)
        return cast.inputs[0]
    number = uniform(zero)
    if zero.kind == "const" and zero.data is not None and number is None:
        stored = zero.data.astype(data.dtype.numpy)
        return site.graph.constant(stored) if np.array_equal(stored.astype(zero.data.dtype), zero.data) else None
    if number is None or not np.array_equal(np.asarray(number).astype(data.dtype.numpy).astype(np.float64), number):
        return None
    return site.scalar(number, data)


def _shaped(site: Site, p: Value, shape: tuple[int, ...]) -> Value:
    if p.shape == shape:
        return p
    if all(size == 1 for size in p.shape) and shape:
        return site.add(Expand(shape), site.add(Reshape((1,) * len(shape)), p))
    return site.add(Reshape(shape), p)
