"""A graph that is being imported: what it takes from the graph around it, and what in it is dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlx.ir.graph import Graph, Node, TensorType, Value
from rlx.ir.shape import Dim, Size, Symbol, symbols
from rlx.ops.layout import SizeOf

__all__ = ["Region", "remove_dead"]


class Region:
    """A graph being built, and the values it takes from the graph around it."""

    def __init__(self, graph: Graph, outer: Region | None = None) -> None:
        self.graph = graph
        self.outer = outer
        self.captures: dict[Value, Value] = {}  # of the graph around -> of this one

    @property
    def root(self) -> Region:
        return self if self.outer is None else self.outer.root

    def pull(self, value: Value) -> Value:
        """The value, which may belong to a graph around this one, as one of this graph."""
        if value.graph is self.graph:
            return value
        assert self.outer is not None
        value = self.outer.pull(value)
        if value not in self.captures:
            if value.kind == "const":
                self.captures[value] = self.graph.constant(value.data, name=value.name)
            else:
                self.captures[value] = self.input(value.name or "captured", value.type)
        return self.captures[value]

    def origin(self, value: Value) -> Value:
        """The value of a graph around that a captured one stands for; others as they are."""
        for outer, inner in self.captures.items():
            if inner is value and self.outer is not None:
                return self.outer.origin(outer)
        return value

    def input(self, name: str, type: TensorType) -> Value:
        taken = {v.name for v in self.graph.inputs}
        unique, n = name, 1
        while unique in taken:
            n += 1
            unique = f"{name}.{n}"
        return self.graph.input(unique, type.shape, type.dtype)

    def deciders(self, *of: Value | Size) -> tuple[str, ...]:
        """The inputs of the model that values or sizes in this graph are computed from, if knowing those would do.

        None where they depend on params, on sizes of inputs, on what a loop carries, or on inputs of several axes.
        """
        regions = {region.graph: region for region in self._around()}
        found: dict[str, None] = {}
        waiting, seen = list(of), set(of)
        while waiting:
            at = waiting.pop()
            more: list[Value | Size] = []
            if isinstance(at, Dim):
                for symbol in symbols(at):
                    made = next(filter(None, (_producer(graph, symbol) for graph in regions)), None)
                    if made is None:
                        return ()
                    more += made.inputs
            elif isinstance(at, Value) and at.node is not None:
                more += [at.node.op.size] if isinstance(at.node.op, SizeOf) else at.node.inputs
            elif isinstance(at, Value) and at.kind == "input":
                region = regions[at.graph]
                more += [outer for outer, inner in region.captures.items() if inner is at]
                if region.outer is None and at.rank <= 1 and at.dtype.kind != "s":
                    found[at.name] = None
                elif not more:
                    return ()
            elif isinstance(at, Value) and at.kind != "const":
                return ()
            waiting += [v for v in more if v not in seen]
            seen.update(more)
        return tuple(found)

    def _around(self) -> Iterator[Region]:
        region: Region | None = self
        while region is not None:
            yield region
            region = region.outer

    def captured(self) -> list[Value]:
        """The values of the graph around that this graph's nodes use; unused inputs and nodes are dropped."""
        remove_dead(self.graph)
        used = {v for node in self.graph.nodes for v in node.inputs} | {o.value for o in self.graph.outputs}
        return [outer for outer, inner in self.captures.items() if inner in used and inner.kind == "input"]

    def close(self, formal: Sequence[Value], captured: Sequence[Value]) -> Graph:
        """The graph with its inputs in order: `formal`, then one for each captured value."""
        rest = []
        for value in captured:
            inner = self.captures.get(value)
            rest.append(inner if inner is not None else self.input(value.name or "captured", value.type))
        self.graph.inputs[:] = [*formal, *rest]
        return self.graph


def _producer(graph: Graph, symbol: Symbol) -> Node | None:
    """The node that decides a size; None for one of an input."""
    for node in graph.nodes:
        if any(symbol in _symbols(v) for v in node.outputs) and not any(symbol in _symbols(v) for v in node.inputs):
            return node
    return None


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
