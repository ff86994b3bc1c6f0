"""Dead code: nodes and constants that nothing needs are left out. No value changes; needs are read off the graph."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Size, Symbol, symbols
from rlx.passes.rewrite import copy_leaves, copy_node, finish

__all__ = ["dce"]


def dce(graph: Graph) -> Graph:
    """Keeps what outputs and updates need; inputs, params and states all stay.

    A node is needed too where its result has a data-dependent dim that a needed node depends on. Guards over dims that
    no node makes any more are dropped: nothing depends on them.
    """
    leaves = {s for v in (*graph.inputs, *graph.params, *graph.states) for s in _symbols(v.shape)}
    made = {node: _made_symbols(node, leaves) for node in graph.nodes}
    live = _live_nodes(graph, made)
    new, values = copy_leaves(graph)
    for node in graph.nodes:
        if node in live:
            values.update(zip(node.outputs, copy_node(new, node, [values[v] for v in node.inputs]), strict=True))
    used = {v for node in new.nodes for v in node.inputs}
    finish(graph, new, values)
    used.update(o.value for o in new.outputs)
    used.update(new.updates.values())
    new.constants = [c for c in new.constants if c in used]
    lost = {s for node in graph.nodes if node not in live for s in made[node]}
    lost -= {s for node in live for s in made[node]}
    new.guards = [g for g in new.guards if lost.isdisjoint((*symbols(g.lhs), *symbols(g.rhs)))]
    return new


def _live_nodes(graph: Graph, made: dict[Node, set[Symbol]]) -> set[Node]:
    needed: set[Value] = {o.value for o in graph.outputs} | set(graph.updates.values())
    dims = {s for v in needed for s in _symbols(v.shape)}
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs) and dims.isdisjoint(made[node]):
            continue
        live.add(node)
        needed.update(node.inputs)
        dims.update(_dims_of(node))
    return live


def _made_symbols(node: Node, leaves: set[Symbol]) -> set[Symbol]:
    """The dims that the node's results have and neither the graph's leaves nor its own inputs do."""
    own = {s for v in node.outputs for s in _symbols(v.shape)}
    return own - leaves - {s for v in node.inputs for s in _symbols(v.shape)}


def _symbols(sizes: Iterable[Size]) -> Iterable[Symbol]:
    for size in sizes:
        yield from symbols(size)


def _dims_of(node: Node) -> Iterable[Symbol]:
    """Every dim that running the node takes."""
    yield from Graph(nodes=[node]).dims().values()
