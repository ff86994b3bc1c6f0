"""Passes inside the regions of control flow.

Nothing is rewritten here: a region is a graph of its own, and a pass that keeps its results keeps those of the node.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph, Value
from rlx.passes.rewrite import Site, rewrite

__all__ = ["inside_regions"]


def inside_regions(graph: Graph, one: Callable[[Graph], Graph]) -> Graph:
    """The graph with the pass applied to each region of its nodes."""
    if not any(node.regions for node in graph.nodes):
        return graph

    def visit(site: Site) -> tuple[Value, ...] | None:
        if not site.node.regions:
            return None
        regions = [one(region) for region in site.node.regions]
        return site.graph.add(site.op, *site.inputs, regions=regions)

    return rewrite(graph, visit)
