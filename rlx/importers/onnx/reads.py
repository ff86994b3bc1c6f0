"""What the nodes of a file read: liveness, and the tensors that sizes are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from rlx.importers.onnx.mapping import STATIC_OPS, TRAINING, static_inputs
from rlx.importers.onnx.model import FunctionProto, GraphProto, ModelFile, NodeProto
from rlx.importers.onnx.tensor import text_of

__all__ = ["in_order", "inner_nodes", "live_nodes", "reads", "sources_of_sizes", "subgraphs_of", "without"]

_MAX_CALLS = 32


def subgraphs_of(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The attributes of a node that are graphs, by name."""
    for name, attribute in node.attributes.items():
        if isinstance(attribute.value, GraphProto):
            yield name, attribute.value


def inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    """The nodes of a node's subgraphs, at any depth."""
    for _, graph in subgraphs_of(node):
        for inner in graph.nodes:
            yield inner
            yield from inner_nodes(inner)


def reads(node: NodeProto) -> Iterator[str]:
    """The tensors that a node reads; also those that its subgraphs take from outside, or that a Gradient names."""
    yield from node.inputs
    if (node.domain, node.op_type) == (TRAINING, "Gradient"):
        yield from _named(node)
    for _, graph in subgraphs_of(node):
        own = {i.name for i in graph.inputs}.union(graph.initializers, *(inner.outputs for inner in graph.nodes))
        inside = chain((o.name for o in graph.outputs), *(reads(inner) for inner in graph.nodes))
        yield from (name for name in inside if name not in own)


def _named(node: NodeProto) -> Iterator[str]:
    """The tensors between which a Gradient differentiates."""
    for name in ("xs", "zs", "y"):
        found: Any = node.attributes.get(name)
        if found is not None and found.kind in ("STRING", "STRINGS"):
            yield from map(text_of, [found.value] if found.kind == "STRING" else found.value)


def in_order(nodes: Sequence[NodeProto]) -> Sequence[NodeProto]:
    """The nodes with each after those that make what it reads, as ONNX asks for; converters to f16 do not keep to it.

    Of nodes that read each other one comes first, for whoever looks for its inputs to report.
    """
    makers: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.outputs:
            makers.setdefault(name, i)
    needs = [
        sorted({makers[name] for name in reads(node) if name and name in makers} - {i}) for i, node in enumerate(nodes)
    ]
    if all(j < i for i, others in enumerate(needs) for j in others):
        return nodes
    order: list[int] = []
    state = [0] * len(nodes)  # 1: waits for others, 2: placed
    for first in range(len(nodes)):
        stack = [first]
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            waiting = [j for j in needs[i] if state[j] == 0] if state[i] == 0 else []
            state[i] = 1
            if waiting:
                stack.extend(reversed(waiting))
                continue
            state[i] = 2
            order.append(stack.pop())
    return [nodes[i] for i in order]


def live_nodes(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that the outputs depend on, in order."""
    wanted = set(outputs)
    live = []
    for node in reversed(nodes):
        if any(name and name in wanted for name in node.outputs):
            live.append(node)
            wanted.update(reads(node))
    return live[::-1]


class _Sources:
    """Walks nodes backwards, through subgraphs and functions."""

    def __init__(self, model: ModelFile) -> None:
        self.functions = model.functions
        self.calls: dict[tuple[tuple[str, str, str], frozenset[str]], set[str]] = {}
        self.depth = 0

    def walk(self, nodes: Sequence[NodeProto], opsets: dict[str, int], needed: set[str]) -> set[str]:
        for node in reversed(nodes):
            function = self.functions.get((node.domain, node.op_type, node.overload))
            if function is not None:
                self._call(node, function, opsets, needed)
                continue
            needed.update(static_inputs(node, opsets))
            if node.op_type in STATIC_OPS and node.op_type not in ("Shape", "Size") and needed & set(node.outputs):
                needed.update(node.inputs)
            for _, graph in subgraphs_of(node):
                self.walk(graph.nodes, opsets, needed)
        return needed

    def _call(self, node: NodeProto, function: FunctionProto, opsets: dict[str, int], needed: set[str]) -> None:
        wanted = frozenset(n for n, o in zip(function.outputs, node.outputs, strict=False) if o in needed)
        key = (function.domain, function.name, function.overload), wanted
        if key not in self.calls:
            self.calls[key] = set()  # what a call of itself would find
            if self.depth < _MAX_CALLS:
                self.depth += 1
                self.calls[key] = self.walk(function.nodes, function.opsets or opsets, set(wanted))
                self.depth -= 1
        found = self.calls[key]
        needed.update(actual for formal, actual in zip(function.inputs, node.inputs, strict=False) if formal in found)


def sources_of_sizes(nodes: Sequence[NodeProto], model: ModelFile) -> set[str]:
    """The tensors that inputs which have to be known at import are computed from: initializers there are constants."""
    return _Sources(model).walk(nodes, model.opsets, set())


def without(node: NodeProto, absent: set[str]) -> NodeProto:
    """The node of a function body where inputs that the call leaves out are left out too, in its subgraphs as well."""
    attributes = dict(node.attributes)
    for name, graph in subgraphs_of(node):
        nodes = tuple(without(inner, absent) for inner in graph.nodes)
        attributes[name] = replace(attributes[name], value=replace(graph, nodes=nodes))
    inputs = ["" if name in absent else name for name in node.inputs]
    while inputs and not inputs[-1]:
        inputs.pop()
    return replace(node, inputs=tuple(inputs), attributes=attributes)
