"""Fold: nodes of constants become constants, unless that would make them larger.

The numbers are those of the ops' references in the types of the graph, as the reference device computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import RlxError
from rlx.ir.graph import Graph, Value
from rlx.passes.patterns import Statics
from rlx.passes.rewrite import Site, rewrite

__all__ = ["fold"]

SMALL = 4096  # bytes that a result may take however small its inputs are


def fold(graph: Graph) -> Graph:
    """Computes what depends on constants only, by the ops' references; a result never outgrows its inputs or 4 KiB."""
    statics = Statics()
    return rewrite(graph, lambda site: _folded(site, statics))


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
