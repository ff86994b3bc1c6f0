"""Dead code in a graph that is being imported: what only sizes were taken from."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Symbol, symbols

__all__ = ["remove_dead"]


def remove_dead(graph: Graph) -> None:
    """Drops nodes and constants that nothing reads: those that only sizes were taken from.

    A node stays where it produces a dim that a node or output which stays depends on.
    """
    leaves = {s.name for v in (*graph.inputs, *graph.params, *graph.states) for s in _symbols(v)}
    made: dict[str, Node] = {}
    for node in graph.nodes:
        for symbol in (s for v in node.outputs for s in _symbols(v)):
            if symbol.name not in leaves:
                made.setdefault(symbol.name, node)
    used: set[Value] = {o.value for o in graph.outputs}
    dims = {s.name for v in used for s in _symbols(v)}
    producers: dict[int, set[str]] = {}
    for name, node in made.items():
        producers.setdefault(id(node), set()).add(name)
    kept = []
    for node in reversed(graph.nodes):
        if any(v in used for v in node.outputs) or producers.get(id(node), set()) & dims:
            kept.append(node)
            used.update(node.inputs)
            if made:
                dims.update(Graph(nodes=[node]).dims())
    graph.nodes[:] = kept[::-1]
    graph.constants[:] = [v for v in graph.constants if v in used]
    graph.params[:] = [v for v in graph.params if v in used]
    lost = made.keys() - {name for node in kept for name in producers.get(id(node), ())}
    graph.guards[:] = [g for g in graph.guards if not lost & {s.name for s in (*symbols(g.lhs), *symbols(g.rhs))}]


def _symbols(value: Value) -> Iterable[Symbol]:
    for size in value.shape:
        yield from symbols(size)
