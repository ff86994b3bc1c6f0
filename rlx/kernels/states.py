"""Which states a run may update in place, and the order of nodes that this takes.

An update is written over the old value when every reader of that comes before it: readers get an edge to the node that
makes the new value, and nodes are sorted by these edges. A state whose edges would close a circle (something reads both
its old and its new value) is updated through a copy instead. A chain of ops that each replace a part of the one before
(`lower_in_place`) has several versions of the state, which all lie in its memory one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import symbols
from rlx.records import dataclass

__all__ = ["Version", "last_readers", "order_states"]


@dataclass(frozen=True)
class Version:
    """A value that is written over the one before it in the memory of `state`."""

    state: Value
    before: Value


def order_states(graph: Graph) -> tuple[list[Node], dict[Value, Version]]:
    """The nodes in an order in which states can be updated in place, and the values that are written over a state."""
    readers = graph.users()
    edges: dict[Node, set[Node]] = {}  # node -> those that must come before it, beside those that it reads
    versions: dict[Value, Version] = {}
    order = graph.nodes
    for state in graph.states:
        chain = _chain(graph, state, versions)
        more = {node: set(before) for node, before in edges.items()}
        for version, old in chain.items():
            maker = version.node
            assert maker is not None
            more.setdefault(maker, set()).update(n for n in readers.get(old, ()) if n is not maker)
        found = _sorted(graph.nodes, more) if chain else None
        if found is not None:
            order, edges = found, more
            versions |= {version: Version(state, old) for version, old in chain.items()}
    return order, versions


def _chain(graph: Graph, state: Value, taken: Mapping[Value, Version]) -> dict[Value, Value]:
    """The new value of a state and the parts that it is made of: each with the version that it is written over."""
    new = graph.updates.get(state.name)
    found: list[Value] = []
    while new is not None and new.node is not None and new not in taken:
        found.append(new)
        old = new.node.inputs[0] if new.node.inputs else None
        if old is None or getattr(new.node.op, "lower_in_place", None) is None:
            break
        if old is state:
            return dict(zip(reversed(found), (state, *reversed(found)), strict=False))
        new = old
    return {found[0]: state} if found else {}


def _sorted(nodes: Sequence[Node], edges: Mapping[Node, set[Node]]) -> list[Node] | None:
    """The nodes with those that they need first, otherwise in their order; None where that goes round in a circle."""
    place = {node: number for number, node in enumerate(nodes)}
    makers = _dim_makers(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for number, node in enumerate(nodes):
        needed = {place[v.node] for v in node.inputs if v.node is not None}
        needed |= {place[earlier] for earlier in edges.get(node, ())}
        if makers:
            needed |= {makers[name] for name in Graph(nodes=[node]).dims() if makers.get(name, number) != number}
        waiting[number] = len(needed)
        for earlier in needed:
            after[earlier].append(number)
    ready = [number for number, count in enumerate(waiting) if not count]
    heapify(ready)
    made = []
    while ready:
        number = heappop(ready)
        made.append(nodes[number])
        for later in after[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heappush(ready, later)
    return made if len(made) == len(nodes) else None


def _dim_makers(nodes: Sequence[Node]) -> dict[str, int]:
    """The node whose data decide a dim, by the dim's name: the first that has it, where no leaf does."""
    found: dict[str, int] = {}
    leaves = {v for node in nodes for v in node.inputs if v.node is None}
    known = {s.name for v in leaves for size in v.shape for s in symbols(size)}
    for number, node in enumerate(nodes):
        for name in {s.name for v in node.outputs for size in v.shape for s in symbols(size)} - known:
            found.setdefault(name, number)
    return found


def last_readers(graph: Graph, order: Sequence[Node]) -> dict[Value, int]:
    """For each value the number of the last node that reads it, beyond all where it is an output or an update."""
    found = {value: number for number, node in enumerate(order) for value in node.inputs}
    kept = [o.value for o in graph.outputs]
    kept += [v for name, v in graph.updates.items() if v.name != name or v.kind != "state"]
    return found | dict.fromkeys(kept, len(order))
