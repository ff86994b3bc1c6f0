"""What passes share: copying a graph while changing some of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.graph import Graph, Node, Output, Value

__all__ = ["copy_leaves", "copy_node", "finish", "rewrite"]

Replacement = Value | tuple[Value, ...] | None


def copy_leaves(graph: Graph) -> tuple[Graph, dict[Value, Value]]:
    """A new graph with the same leaves, and the map from old values to new ones."""
    new = Graph(graph.name)
    values: dict[Value, Value] = {}
    for old_list, new_list in (
        (graph.inputs, new.inputs),
        (graph.params, new.params),
        (graph.states, new.states),
        (graph.constants, new.constants),
    ):
        for value in old_list:
            copy = Value(new, value.type, value.kind, value.name)
            copy.data = value.data
            new_list.append(copy)
            values[value] = copy
    return new, values


def copy_node(new: Graph, node: Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The node appended to the new graph, over new inputs."""
    outputs = new.add(node.op, *inputs, provenance=node.provenance, regions=node.regions)
    for old, value in zip(node.outputs, outputs, strict=True):
        value.name = old.name
    return outputs


def finish(graph: Graph, new: Graph, values: dict[Value, Value]) -> Graph:
    """Gives the new graph the old one's outputs, updates and guards."""
    new.outputs = [Output(o.name, values[o.value]) for o in graph.outputs]
    new.updates = {name: values[v] for name, v in graph.updates.items()}
    new.guards.extend(g for g in graph.guards if g not in new.guards)
    return new


def rewrite(graph: Graph, fn: Callable[[Graph, Node, tuple[Value, ...]], Replacement]) -> Graph:
    """A copy in which `fn(new graph, node, new inputs)` gives the values that stand for a node's outputs.

    None keeps the node. Nodes that nothing needs any more stay; `dce` removes them.
    """
    new, values = copy_leaves(graph)
    for node in graph.nodes:
        inputs = tuple(values[v] for v in node.inputs)
        made = fn(new, node, inputs)
        outputs = copy_node(new, node, inputs) if made is None else made if isinstance(made, tuple) else (made,)
        values.update(zip(node.outputs, outputs, strict=True))
    return finish(graph, new, values)
