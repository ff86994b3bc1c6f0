"""Softmax that an exporter wrote as exponentials divided by their sum becomes one op.

Proved by structure: the nodes are the op's own formula, with the largest element taken off, over the same axis, so
infinities and NaN come out the same; exponentials without that, which overflow where the op doesn't, stay. Of bf16 only
roundings on the way are lost. Files of f16 keep their nodes: a sum of more than 65504 overflows there.
"""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Shape
from rlx.ops.elementwise import Div, Exp, Sub
from rlx.ops.layout import Expand, Reshape
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceMax, ReduceSum, axes_of, reduced_shape
from rlx.passes.match.patterns import made_by
from rlx.passes.rewrite import Site, rewrite

__all__ = ["raise_softmax"]


def raise_softmax(graph: Graph) -> Graph:
    """exp(x - max(x)) / sum(exp(x - max(x))) over one axis becomes softmax."""
    return rewrite(graph, lambda site: _raised(site) if isinstance(site.op, Div) else None)


def _raised(site: Site) -> Value | None:
    above, below = site.inputs
    exponential = made_by(above, Exp)
    difference = made_by(exponential.inputs[0], Sub) if exponential else None
    if exponential is None or difference is None or above.dtype.name == "f16":
        return None
    x, peak = difference.inputs
    nodes = [exponential, difference]
    by_sum, by_max = _reduced(below, ReduceSum, nodes), _reduced(peak, ReduceMax, nodes)
    if by_sum is None or by_max is None or by_sum.inputs[0] is not above or by_max.inputs[0] is not x:
        return None
    axes = _axes(by_sum)
    if len(axes) != 1 or _axes(by_max) != axes:
        return None
    site.merged.extend(nodes)
    return site.add(Softmax(axes[0]), x)


def _reduced(value: Value, op: type[Any], nodes: list[Node]) -> Node | None:
    """The reduction that the value is, in the shape that broadcasts to what was reduced."""
    mine = []
    while (node := made_by(value, Expand)) is not None:
        mine.append(node)
        value = node.inputs[0]
    shape: Shape = value.shape
    while (node := made_by(value, Reshape)) is not None:
        mine.append(node)
        value = node.inputs[0]
    node = made_by(value, op)
    if node is None or shape != reduced_shape(node.inputs[0].shape, _axes(node), True):
        return None
    nodes.extend((*mine, node))
    return node


def _axes(node: Node) -> tuple[int, ...]:
    op: Any = node.op
    return axes_of(op.axes, node.inputs[0].rank, op.op_name)
