"""Dead code: nodes and constants that nothing needs are left out. No value changes; needs are read off the graph.

Of scans that are needed in part, what remains is what their results need that are: rows that nobody reads go, carries
that only feed themselves, and inputs that no round reads.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Symbol, symbols
from rlx.ops.control import Scan
from rlx.passes.rewrite import copy_leaves, copy_node, finish, made_symbols, rounds_of, taken_symbols, with_rounds
from rlx.records import dataclass, replace

__all__ = ["dce"]


def dce(graph: Graph) -> Graph:
    """Keeps what outputs and updates need; inputs, params and states all stay.

    A node is needed too where its result has a data-dependent dim that a needed node depends on. Guards over dims that
    no node makes any more are dropped: nothing depends on them.
    """
    made = made_symbols(graph)
    live = _live_nodes(graph, made)
    new, values = copy_leaves(graph)
    for node in graph.nodes:
        part = live.get(node)
        if part is not None:
            _add_part(new, node, part, values)
        elif node in live:
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


@dataclass(frozen=True)
class _Part:
    """The inputs and outputs of a scan, by number, that what is needed of it reads and makes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _live_nodes(graph: Graph, made: dict[Node, set[Symbol]]) -> dict[Node, _Part | None]:
    """The nodes that are needed, and of scans which part is; None: the whole node."""
    needed: set[Value] = {o.value for o in graph.outputs} | set(graph.updates.values())
    dims = {s for v in needed for size in v.shape for s in symbols(size)}
    live: dict[Node, _Part | None] = {}
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs) and dims.isdisjoint(made[node]):
            continue
        part = live[node] = None if made[node] or not isinstance(node.op, Scan) else _part(node, needed)
        needed.update(node.inputs if part is None else (node.inputs[i] for i in part.inputs))
        dims.update(taken_symbols(node))
    return live


def _part(node: Node, needed: set[Value]) -> _Part | None:
    """What is needed of a scan: with a carry also what makes it in a round. None: all of it."""
    (body,), carries = node.regions, node.op.carries  # type: ignore[attr-defined]
    outputs, made = {i for i, v in enumerate(node.outputs) if v in needed}, made_symbols(body)
    while True:
        chosen = replace(body, outputs=[o for i, o in enumerate(body.outputs) if i in outputs])
        live = _live_nodes(chosen, made)
        read = {o.value for o in chosen.outputs}
        for inner, part in live.items():
            read.update(inner.inputs if part is None else (inner.inputs[i] for i in part.inputs))
        more = {i for i in range(carries) if body.inputs[i] in read} - outputs
        if not more:
            break
        outputs |= more
    inputs = [i for i, v in enumerate(body.inputs) if (i in outputs if i < carries else v in read)]
    if len(inputs) == len(node.inputs) and len(outputs) == len(node.outputs):
        return None
    return _Part(tuple(inputs), tuple(sorted(outputs)))


def _add_part(new: Graph, node: Node, part: _Part, values: dict[Value, Value]) -> None:
    """Adds the part of a scan; `values` learns its outputs."""
    (body,), op = node.regions, node.op
    assert isinstance(op, Scan)
    small = dce(replace(body, outputs=[body.outputs[i] for i in part.outputs]))
    small.inputs = [small.inputs[i] for i in part.inputs]
    carries = sum(i < op.carries for i in part.outputs)
    ends = op.carries + op.scanned
    rows = [node.inputs[i].type for i in part.inputs if op.carries <= i < ends]
    made = new.add(
        with_rounds(replace(op, carries=carries, scanned=len(rows)), rows, rounds_of(node)),
        *(values[node.inputs[i]] for i in part.inputs),
        provenance=node.provenance,
        regions=[small],
    )
    for i, value in zip(part.outputs, made, strict=True):
        value.name = node.outputs[i].name
        values[node.outputs[i]] = value
