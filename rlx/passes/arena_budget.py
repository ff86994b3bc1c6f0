"""The budgets of gradients, taken out of a graph: a number for the program, and no nodes in the way of passes."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.ir.graph import Graph, Value
from rlx.ops.misc import Within
from rlx.passes.rewrite import Site, inside_regions, rewrite

__all__ = ["without_budgets"]


def without_budgets(graph: Graph) -> tuple[Graph, int | None]:
    """The graph and its regions without `Within`, and the least budget of these in bytes; None where there is none."""
    budgets = list(_budgets(graph))
    return (_without(graph), min(budgets)) if budgets else (graph, None)


def _budgets(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        if isinstance(node.op, Within):
            yield node.op.budget
        for region in node.regions:
            yield from _budgets(region)


def _without(graph: Graph) -> Graph:
    return inside_regions(rewrite(graph, _itself), _without)


def _itself(site: Site) -> Value | None:
    return site.inputs[0] if isinstance(site.op, Within) else None
