"""The verifier: what must hold of every graph, at import and after each pass."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.errors import CompileError, RlxError
from rlx.ir.graph import Graph, Node, Value, check_array, infer_node
from rlx.ir.shape import Size, collect_guards

__all__ = ["verify"]


def verify(graph: Graph) -> None:
    """Raises `CompileError` naming the node and its provenance unless the graph, with its regions, is valid.

    Valid: every input of a node is a leaf of this graph or an output of an earlier node; recorded types are those that
    the op infers; the guards that this needs are recorded; names of leaves and of outputs are unique; updates fit their
    states; regions are closed; each dim has one meaning.
    """
    try:
        graph.dims()
    except RlxError as error:
        raise CompileError(str(error)) from error
    known = _leaves(graph)
    guarded = {frozenset((g.lhs, g.rhs)) for g in graph.guards}
    for node in graph.nodes:
        _check_node(graph, node, known, guarded)
        known.update(node.outputs)
    _check_results(graph, known)


def _fail(graph: Graph, what: str) -> CompileError:
    return CompileError(f"invalid graph {graph.name!r}: {what}")


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _leaves(graph: Graph) -> set[Value]:
    known: set[Value] = set()
    lists = {"input": graph.inputs, "param": graph.params, "state": graph.states, "const": graph.constants}
    for kind, values in lists.items():
        for value in values:
            if value.graph is not graph or value.kind != kind or value.node is not None:
                raise _fail(graph, f"{value!r} is listed as a leaf of kind {kind} but isn't one of this graph")
            if value in known:
                raise _fail(graph, f"{value!r} is listed twice")
            known.add(value)
            if kind != "const" and not value.name:
                raise _fail(graph, f"a leaf of kind {kind} has no name")
            if kind not in ("param", "state") and value.type.encoding is not None:
                raise _fail(graph, f"{value!r} is encoded, and only params and states can be")
            if kind == "const" and value.data is None:
                raise _fail(graph, f"{value!r} has no data")
            if value.data is not None:
                try:
                    check_array(f"{kind} {value.name!r}", value.data, value.type)
                except RlxError as error:
                    raise _fail(graph, str(error)) from error
    name = _twice(v.name for v in (*graph.inputs, *graph.params, *graph.states))
    if name is not None:
        raise _fail(graph, f"two leaves are named {name!r}")
    return known


def _why_unknown(graph: Graph, value: Value) -> str:
    if value in graph.inputs or any(node is value.node for node in graph.nodes):
        return "is not defined before this node"
    return (
        "is not defined before this node, nor after it. A slice of a vmap that is over? Return what is needed later as "
        "a result, and give what the rule of a custom_vjp or custom_jvp reads to its function as an argument"
    )


def _check_node(graph: Graph, node: Node, known: set[Value], guarded: set[frozenset[Size]]) -> None:
    for i, value in enumerate(node.inputs):
        if value.graph is not graph:
            raise _fail(graph, f"node {node.label}: input {i} is {value!r} of another graph ({value.graph.name!r})")
        if value not in known:
            raise _fail(graph, f"node {node.label}: input {i} is {value!r}, which {_why_unknown(graph, value)}")
    for i, value in enumerate(node.outputs):
        if value in known:
            raise _fail(graph, f"node {node.label}: output {i}, {value!r}, is defined twice")
        if value.node is not node or value.index != i or value.graph is not graph or value.kind != "node":
            raise _fail(graph, f"node {node.label}: output {i}, {value!r}, does not point back at its node")
    for region in node.regions:
        if region.params or region.states:
            raise _fail(graph, f"node {node.label}: region {region.name!r} has params or states: make them its inputs")
        try:
            verify(region)
        except CompileError as error:
            raise _fail(graph, f"node {node.label}: {error}") from error
    try:
        with collect_guards() as guards:
            types = infer_node(node.op, node.inputs, node.regions)
    except RlxError as error:
        raise _fail(graph, f"node {node.label}: {error}") from error
    recorded = tuple(v.type for v in node.outputs)
    if recorded != types:
        inferred, found = (", ".join(map(str, t)) or "nothing" for t in (types, recorded))
        raise _fail(graph, f"node {node.label}: gives {inferred}, but its outputs are recorded as {found}")
    for guard in guards:
        if frozenset((guard.lhs, guard.rhs)) not in guarded:
            raise _fail(graph, f"node {node.label}: the guard {guard.lhs} == {guard.rhs} is not recorded")


def _check_results(graph: Graph, known: set[Value]) -> None:
    name = _twice(o.name for o in graph.outputs)
    if name is not None:
        raise _fail(graph, f"two outputs are named {name!r}")
    for output in graph.outputs:
        if not output.name:
            raise _fail(graph, f"the output {output.value!r} has no name")
        if output.value not in known:
            raise _fail(graph, f"output {output.name!r} is {output.value!r}, which this graph does not define")
    states = {s.name: s for s in graph.states}
    for name, value in graph.updates.items():
        if name not in states:
            raise _fail(graph, f"there is an update of {name!r}, which is not a state")
        if value not in known:
            raise _fail(graph, f"the update of {name!r} is {value!r}, which this graph does not define")
        if value.type != states[name].type:
            raise _fail(graph, f"the update of {name!r} is {value.type}, the state {states[name].type}")
