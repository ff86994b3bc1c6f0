"""Scans that go through the same carries become one: what both compute in a round is computed once.

Two scans of equally many rounds in the same direction, neither of which needs the other's results, can share rounds: a
body that computes what both do. Their carries i and j are the same if they start as the same value and, where all
carries taken for the same are so before a round, are computed by the same nodes in it (`cse` of both bodies decides):
then they are equal in all rounds, by induction. The scans are joined where that holds for all carries of one of them.

A gradient makes such pairs: one scan gives the results of the forward pass, another one what the backward pass reads.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Symbol, symbols
from rlx.ops.control import Scan
from rlx.passes.cse import cse
from rlx.passes.rewrite import (
    copy_leaves,
    copy_node,
    finish,
    joined,
    made_symbols,
    rounds_of,
    taken_symbols,
    with_rounds,
)
from rlx.records import dataclass

__all__ = ["join_scans"]

Pairs = list[tuple[int, int]]


def join_scans(graph: Graph) -> Graph:
    """Joins pairs of scans until there is none that can be."""
    while True:
        found = _first(graph)
        if found is None:
            return graph
        graph = _with(graph, found)


@dataclass(frozen=True)
class _Joined:
    """One scan in the place of `first` and `second`: its body, inputs, and by output of each of these its own one."""

    first: Node
    second: Node
    op: Scan
    body: Graph
    inputs: tuple[Value, ...]
    of_first: tuple[int, ...]
    of_second: tuple[int, ...]


def _first(graph: Graph) -> _Joined | None:
    scans = [node for node in graph.nodes if isinstance(node.op, Scan) and _is_fixed(node)]
    for n, second in enumerate(scans):
        for first in scans[:n]:
            if _alike(first, second) and first not in _before(graph, second):
                made = _joined(first, second)
                if made is not None:
                    return made
    return None


def _is_fixed(node: Node) -> bool:
    """Whether no round decides a size."""
    known = {s.name for v in node.inputs for size in v.shape for s in symbols(size)}
    return known.issuperset(node.regions[0].dims())


def _alike(a: Node, b: Node) -> bool:
    assert isinstance(a.op, Scan)
    assert isinstance(b.op, Scan)
    few, many = sorted((a.inputs[: a.op.carries], b.inputs[: b.op.carries]), key=len)
    return bool(few) and a.op.reverse == b.op.reverse and rounds_of(a) == rounds_of(b) and set(few) <= set(many)


def _before(graph: Graph, end: Node) -> set[Node]:
    """The nodes that this one needs, for values or for dims that data decide, itself included."""
    found, made, dims = {end}, made_symbols(graph), set[Symbol]()
    for node in reversed(graph.nodes):
        if node in found or not dims.isdisjoint(made[node]):
            found.add(node)
            found.update(v.node for v in node.inputs if v.node is not None)
            dims.update(taken_symbols(node))
    return found


def _joined(first: Node, second: Node) -> _Joined | None:
    """The scan that does what both do; None where the carries of neither are all carries of the other."""
    a, b = first.op, second.op
    assert isinstance(a, Scan)
    assert isinstance(b, Scan)
    same: Pairs = []
    for j in range(b.carries):
        taken = {i for i, _ in same}
        i = next((i for i in range(a.carries) if first.inputs[i] is second.inputs[j] and i not in taken), None)
        if i is not None:
            same.append((i, j))
    if len(same) < min(a.carries, b.carries):
        return None
    both = _Both(first, second, same)
    return both.scan() if all(both.results[0][i] is both.results[1][j] for i, j in same) else None


class _Both:
    """The bodies of two scans as one, with these carries taken for the same.

    Its inputs are the carries, rows and captured values of the first scan, and those of the second that are others.
    """

    def __init__(self, first: Node, second: Node, same: Pairs) -> None:
        self.scans = (first, second)
        graph = Graph(first.regions[0].name)
        partner = {j: i for i, j in same}
        groups: list[list[tuple[Value, Value]]] = [[], [], []]  # of carries, rows, captured: outer value, input
        values: list[dict[Value, Value]] = [{}, {}]
        for which, node in enumerate(self.scans):
            op = node.op
            assert isinstance(op, Scan)
            for i, (outer, inner) in enumerate(zip(node.inputs, node.regions[0].inputs, strict=True)):
                kind = 0 if i < op.carries else 1 if i < op.carries + op.scanned else 2
                there = None
                if kind:
                    there = next((own for v, own in groups[kind] if v is outer), None)
                elif which and i in partner:
                    there = groups[0][partner[i]][1]
                if there is None:
                    there = Value(graph, inner.type, "input", "")
                    groups[kind].append((outer, there))
                values[which][inner] = there
        self.carries, self.rows = len(groups[0]), len(groups[1])
        self.inputs = tuple(outer for group in groups for outer, _ in group)
        graph.inputs = [own for group in groups for _, own in group]
        for i, value in enumerate(graph.inputs):
            value.name = f"in{i}"
        for which, node in enumerate(self.scans):
            results = _copied(graph, node.regions[0], values[which])
            for i, value in enumerate(results):
                graph.output(value, f"{which}.{i}")
        self.partner = partner
        self.graph = cse(graph)
        made = [o.value for o in self.graph.outputs]
        count = len(first.outputs)
        self.results = made[:count], made[count:]

    def scan(self) -> _Joined:
        """The scan that is made of it; equal rows are stacked once."""
        first, second = self.scans
        a, b = first.op, second.op
        assert isinstance(a, Scan)
        assert isinstance(b, Scan)
        of_first, of_second = list(range(a.carries)), []
        carries = list(self.results[0][: a.carries])
        for j, value in enumerate(self.results[1][: b.carries]):
            of_second.append(self.partner.get(j, len(carries)))
            if j not in self.partner:
                carries.append(value)
        rows: list[Value] = []
        for places, results in (of_first, self.results[0][a.carries :]), (of_second, self.results[1][b.carries :]):
            for value in results:
                if value not in rows:
                    rows.append(value)
                places.append(len(carries) + rows.index(value))
        body = self.graph
        body.outputs = []
        for i, value in enumerate((*carries, *rows)):
            body.output(value, f"out{i}")
        rows_in = [v.type for v in self.inputs[self.carries : self.carries + self.rows]]
        op = with_rounds(Scan(len(carries), self.rows, None, a.reverse), rows_in, rounds_of(first))
        return _Joined(first, second, op, body, self.inputs, tuple(of_first), tuple(of_second))


def _copied(graph: Graph, body: Graph, values: dict[Value, Value]) -> list[Value]:
    """The results of a body whose nodes are added to the graph, over what `values` says of its inputs."""
    for const in body.constants:
        copy = Value(graph, const.type, "const", const.name)
        copy.data = const.data
        graph.constants.append(copy)
        values[const] = copy
    for node in body.nodes:
        inputs = [values[v] for v in node.inputs]
        values.update(zip(node.outputs, copy_node(graph, node, inputs), strict=True))
    graph.require(body.guards, ())
    return [values[o.value] for o in body.outputs]


def _with(graph: Graph, made: _Joined) -> Graph:
    """The graph with one scan in the place of two: where the first one was, after what the second one needs."""
    new, values = copy_leaves(graph)
    start = graph.nodes.index(made.first)
    sooner = _before(graph, made.second)
    ahead = [node for node in graph.nodes[start + 1 :] if node in sooner and node is not made.second]
    for node in (*graph.nodes[:start], *ahead, made.first, *graph.nodes[start + 1 :]):
        if node is made.first:
            source = joined(made.first, made.second)
            inputs = [values[v] for v in made.inputs]
            outputs = new.add(made.op, *inputs, provenance=source, regions=[made.body])
            for old, places in ((made.first, made.of_first), (made.second, made.of_second)):
                for value, place in zip(old.outputs, places, strict=True):
                    outputs[place].name = outputs[place].name or value.name
                    values[value] = outputs[place]
        elif node is not made.second and node.outputs[0] not in values:
            values.update(zip(node.outputs, copy_node(new, node, [values[v] for v in node.inputs]), strict=True))
    return finish(graph, new, values)
