"""Fold: nodes of constants become constants, unless that would make them larger.

The numbers are those of the ops' references in the types of the graph, as the reference device computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import RlxError
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.contract import MatMul
from rlx.ops.layout import Transpose
from rlx.passes.match.patterns import Statics
from rlx.passes.rewrite import Site, rewrite

__all__ = ["fold"]

SMALL = 4096  # bytes that a result may take however small its inputs are
LARGE = 64 << 10  # bytes of a matrix from which on it is not copied only to be transposed


def fold(graph: Graph) -> Graph:
    """Computes what depends on constants only, by the ops' references; a result never outgrows its inputs or 4 KiB.

    A large matrix that is transposed for products stays as it is, as one that is a param does: packing transposes it.
    """
    statics, packed = Statics(), _for_products(graph)
    return rewrite(graph, lambda site: None if site.node in packed else _folded(site, statics))


def _for_products(graph: Graph) -> set[Node]:
    """The transposes of large matrices that only products read, on the right."""
    shown = {o.value for o in graph.outputs} | set(graph.updates.values())
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    found = set()
    for node in graph.nodes:
        (made, *_), (read, *_) = node.outputs, (*node.inputs, None)
        if not isinstance(node.op, Transpose) or read is None or read.kind != "const" or made in shown:
            continue
        users = readers.get(made, [])
        if users and (made.type.nbytes() or 0) >= LARGE and all(_is_weight(made, user) for user in users):
            found.add(node)
    return found


def _is_weight(value: Value, user: Node) -> bool:
    return isinstance(user.op, MatMul) and user.inputs[1] is value and user.inputs[0] is not value


def _folded(site: Site, statics: Statics) -> tuple[Value, ...] | None:
    op: Any = site.op
    if site.node.regions or not hasattr(op, "reference") or any(v.kind != "const" for v in site.inputs):
        return None
    if any(v not in statics for v in site.node.outputs):
        return None
    made = sum(v.type.nbytes() or 0 for v in site.node.outputs)
    if made > max(SMALL, sum(v.type.nbytes() or 0 for v in site.inputs)):
        return None
    try:
        with np.errstate(all="ignore"):
            found = op.reference(*(v.data for v in site.inputs))
    except (RlxError, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # left for the run, which reports it
    arrays = found if isinstance(found, tuple) else (found,)
    pairs = zip(arrays, site.node.outputs, strict=True)
    return tuple(site.graph.constant(np.asarray(a), name=v.name) for a, v in pairs)
