"""What passes share: copying a graph while changing some of its nodes.

What stands for a node has its type, symbolic sizes included; that it has its values is what each pass must prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rlx.ir.casting import cast
from rlx.ir.graph import Graph, Node, Operator, Output, TensorType, Value, count_readers
from rlx.ir.shape import Size, Symbol, symbols
from rlx.ops.control import Scan
from rlx.records import dataclass, field, replace

__all__ = [
    "Site",
    "copy_leaves",
    "copy_node",
    "finish",
    "inside_regions",
    "joined",
    "made_symbols",
    "rewrite",
    "rewrite_all",
    "rounds_of",
    "taken_symbols",
    "track_values",
    "with_rounds",
]

Replacement = Value | tuple[Value, ...] | None


def copy_leaves(
    graph: Graph, typed: Callable[[TensorType], TensorType] = lambda type: type
) -> tuple[Graph, dict[Value, Value]]:
    """A new graph with the same leaves, and the map from old values to new ones; `typed` gives their new types."""
    new = Graph(graph.name)
    values: dict[Value, Value] = {}
    for old_list, new_list in (
        (graph.inputs, new.inputs),
        (graph.params, new.params),
        (graph.states, new.states),
        (graph.constants, new.constants),
    ):
        for value in old_list:
            copy = Value(new, typed(value.type), value.kind, value.name)
            copy.data = value.data
            new_list.append(copy)
            values[value] = copy
    return new, values


def copy_node(new: Graph, node: Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The node appended to the new graph, over new inputs of the same types; `finish` brings the guards."""
    copy = Node(node.op, tuple(inputs), (), node.provenance, node.regions)
    copy.outputs = tuple(Value(new, old.type, "node", old.name, copy, old.index) for old in node.outputs)
    new.nodes.append(copy)
    return copy.outputs


def finish(graph: Graph, new: Graph, values: dict[Value, Value]) -> Graph:
    """Gives the new graph the old one's outputs, results, updates and guards, and what the values became."""
    became = {v: v for v in graph.values()} if graph.became is None else graph.became
    new.became = {first: values[v] for first, v in became.items() if v in values}
    new.outputs = [Output(o.name, values[o.value]) for o in graph.outputs]
    new.results = list(graph.results)
    new.updates = {name: values[v] for name, v in graph.updates.items()}
    known = {(g.lhs, g.rhs) for g in graph.guards}
    new.guards = [*graph.guards, *(g for g in new.guards if (g.lhs, g.rhs) not in known)]
    return new


def track_values(graph: Graph) -> None:
    """Has the graphs that passes make of this one and of its regions say in `became` what each value of it became.

    Without it they say that only of the graph which the first pass was given.
    """
    if graph.became is not None:
        graph.became.update({v: v for v in graph.values()})
    for node in graph.nodes:
        for region in node.regions:
            track_values(region)


def joined(*nodes: Node) -> tuple[str, ...]:
    """The provenances of all the nodes, each source once, in order."""
    return tuple(dict.fromkeys(source for node in nodes for source in node.provenance))


def made_symbols(graph: Graph) -> dict[Node, set[Symbol]]:
    """By node the dims that its results have and neither the graph's leaves nor its own inputs do."""
    leaves = {s for v in (*graph.inputs, *graph.params, *graph.states) for s in _symbols(v.shape)}

    def made(node: Node) -> set[Symbol]:
        own = {s for v in node.outputs for s in _symbols(v.shape)}
        return own - leaves - {s for v in node.inputs for s in _symbols(v.shape)}

    return {node: made(node) for node in graph.nodes}


def taken_symbols(node: Node) -> Iterable[Symbol]:
    """Every dim that running the node takes: of a scan also those that say how many rounds there are."""
    yield from Graph(nodes=[node]).dims().values()
    if isinstance(node.op, Scan):
        yield from symbols(rounds_of(node))


def _symbols(sizes: Iterable[Size]) -> Iterable[Symbol]:
    for size in sizes:
        yield from symbols(size)


@dataclass
class Site:
    """A node about to be copied, and the new graph in which what replaces it is built."""

    graph: Graph  # the new graph
    node: Node  # of the old graph
    inputs: tuple[Value, ...]  # of the new graph
    uses: Counter[Value]  # how many nodes and outputs of the old graph read what each new value stands for
    merged: list[Node] = field(default_factory=list)  # nodes of the new graph that are replaced along with this one

    @property
    def op(self) -> Operator:
        return self.node.op

    def add(self, op: Operator, *inputs: Value) -> Value:
        """Appends a node to the new graph; its first output. Its provenance is that of all the nodes replaced here."""
        return self.graph.add(op, *inputs)[0]

    def scalar(self, number: float, like: Value) -> Value:
        """A constant of rank 0 and the element type of `like`."""
        return self.graph.constant(cast(np.asarray(number), like.dtype))


Rule = Callable[[Site], Replacement]


def rewrite(graph: Graph, fn: Rule) -> Graph:
    """A copy in which `fn` gives the values that stand for a node's outputs; None keeps the node.

    A replacement of another type than the node's is dropped and the node kept. Nodes that nothing needs any more stay;
    `dce` removes them.
    """
    return _rewrite(graph, fn)[0]


def rewrite_all(graph: Graph, fn: Rule, rounds: int = 8) -> Graph:
    """`rewrite` again and again, until nothing changes or after so many rounds."""
    for _ in range(rounds):
        graph, changes = _rewrite(graph, fn)
        if not changes:
            break
    return graph


def _rewrite(graph: Graph, fn: Rule) -> tuple[Graph, int]:
    """The copy, and how many nodes were replaced."""
    new, values = copy_leaves(graph)
    readers = count_readers(graph)
    uses = Counter({value: readers[old] for old, value in values.items()})
    changes = 0
    for node in graph.nodes:
        site = Site(new, node, tuple(values[v] for v in node.inputs), uses)
        outputs = _replaced(site, fn)
        changes += bool(outputs)
        for old, value in zip(node.outputs, outputs or copy_node(new, node, site.inputs), strict=True):
            values[old] = value
            uses[value] += readers[old]
    return finish(graph, new, values), changes


def _replaced(site: Site, fn: Rule) -> tuple[Value, ...]:
    """The values that replace the outputs of the site's node, or () to keep it."""
    new, node = site.graph, site.node
    nodes, constants, guards = len(new.nodes), len(new.constants), len(new.guards)
    made = fn(site)
    outputs = made if isinstance(made, tuple) else () if made is None else (made,)
    if not outputs or [v.type for v in outputs] != [v.type for v in node.outputs]:
        del new.nodes[nodes:], new.constants[constants:], new.guards[guards:]
        return ()
    for added in new.nodes[nodes:]:
        added.provenance = added.provenance or joined(*site.merged, node)
    for old, value in zip(node.outputs, outputs, strict=True):
        value.name = value.name or old.name
    return outputs


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


def rounds_of(node: Node) -> Size:
    """How often a scan runs its body."""
    op = node.op
    assert isinstance(op, Scan)
    return op.rounds([v.type for v in node.inputs[op.carries : op.carries + op.scanned]])


def with_rounds(op: Scan, rows: Sequence[TensorType], rounds: Size) -> Scan:
    """The op over rows of these types, with a length where they do not say how many rounds there are."""
    told = op.length is not None or (len(rows) > 0 and op.rounds(rows) == rounds)
    return op if told else replace(op, length=rounds)
