"""What `precision` asks for, written into the ops: products whose activations are rounded to 8 bits say so themselves.

It is no rewrite that keeps results, so it isn't one of `PASSES`: every device, the reference too, is given the graph
after it.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Value
from rlx.ir.shape import numel
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.encoded import Dequantize
from rlx.ops.experts import GroupedMatMul
from rlx.ops.layout import Reshape, Transpose
from rlx.passes.match.patterns import Statics, made_by
from rlx.passes.rewrite import Site, inside_regions, rewrite
from rlx.records import replace

__all__ = ["apply_precision"]


def apply_precision(graph: Graph, precision: str) -> Graph:
    """With "q8", products of f32 with weights of 8 bits or fewer round their activations to 8 bits.

    Such weights are encoded params, or integers of up to 8 bits (params or constants) that the graph makes floats of.
    Activations that a graph dequantises stay what they are, and so do the products of other ops.
    """
    if precision != "q8":
        return graph
    statics = Statics()
    made = rewrite(graph, lambda site: _rounding(site, statics))
    return inside_regions(made, lambda region: apply_precision(region, precision))


def _rounding(site: Site, statics: Statics) -> Value | None:
    op = site.op
    if type(op) not in (MatMul, Gemm, GroupedMatMul) or op.activations:  # type: ignore[attr-defined]
        return None
    a, b = site.inputs[:2]
    if a.dtype.name != "f32" or a.rank < 2 or b.rank < 2 or b not in statics or not _is_narrow(b):
        return None
    made = a
    while (node := made_by(made, Transpose, Reshape)) is not None:
        made = node.inputs[0]
    if made_by(made, Dequantize) is not None:
        return None
    return site.add(replace(op, activations="q8"), *site.inputs)  # type: ignore[type-var]


def _is_narrow(weight: Value) -> bool:
    """Whether the params and constants of its size, or half of it, that it is computed from are of 8 bits or fewer."""
    size, found = numel(weight.shape), False
    seen: set[Value] = set()
    open_ = [weight]
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.node is not None:
            open_.extend(value.node.inputs)
        elif numel(value.shape) == size or numel(value.shape) * 2 == size:  # two numbers of 4 bits in a byte
            narrow = value.type.encoding is not None or (value.dtype.is_integer and value.dtype.bits <= 8)
            if not narrow:
                return False
            found = True
    return found
