"""When two graphs are the same: a hash of what a graph computes, and equality of everything a text form keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from rlx.errors import CompileError
from rlx.ir.graph import Graph, Node, TensorType, Value
from rlx.ir.literal import content_hash, format_attribute
from rlx.ir.shape import Dim, Size, Symbol, format_size, substitute, symbols

__all__ = ["equal_with", "fingerprint", "graphs_equal"]

FORMAT = "rlx graph 1"
_FEW = 1024  # elements of a constant


def fingerprint(graph: Graph) -> str:
    """SHA-256 (hex) of the graph's canonical form.

    It covers ops, attributes, types, dims with their bounds, leaves and outputs (order and names), constant elements
    and guards. It does not cover provenance, names of values that are neither leaf nor output, the graph's name, the
    order of nodes beyond their dependencies, nodes that no output or update needs, the data of params (identified by
    their own hashes) and the initial values of states.
    """
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in _Canonical(graph).records]
    return sha256("".join(lines).encode()).hexdigest()


class _Canonical:
    """One JSON record a leaf, node and result; values are numbered as a walk from the results finishes them."""

    def __init__(self, graph: Graph) -> None:
        self.records: list[Any] = [FORMAT]
        self._graph = graph
        self._dims: dict[str, Symbol] = {}
        self._numbers: dict[Value, int] = {}
        for value in (*graph.inputs, *graph.params, *graph.states):
            self._number(value)
            self.records.append([value.kind, value.name, self._type(value.type)])
        for value in (*(o.value for o in graph.outputs), *(v for _, v in sorted(graph.updates.items()))):
            self._visit(value)
        self.records += [["output", o.name, self._numbers[o.value]] for o in graph.outputs]
        self.records += [["update", name, self._numbers[value]] for name, value in sorted(graph.updates.items())]
        self.records += sorted(["guard", self._size(g.lhs), self._size(g.rhs)] for g in graph.guards)
        self.records += [["dim", name, s.lo, s.hi, s.multiple] for name, s in sorted(self._dims.items())]

    def _number(self, value: Value) -> None:
        self._numbers[value] = len(self._numbers)

    def _visit(self, root: Value) -> None:
        """Numbers what `root` needs, inputs before the nodes that read them."""
        stack = [root]
        while stack:
            value = stack[-1]
            if value in self._numbers:
                stack.pop()
                continue
            missing = [v for v in value.node.inputs if v not in self._numbers] if value.node else []
            if missing:
                stack += reversed(missing)
                continue
            if value.node is not None:
                for made in value.node.outputs:
                    self._number(made)
                self.records.append(self._node(value.node))
            elif value.kind == "const" and value.data is not None:
                self._number(value)
                self.records.append(["const", self._type(value.type), content_hash(value.data)])
            if value not in self._numbers:
                raise CompileError(f"graph {self._graph.name!r}: {value!r} is not one of its leaves: verify the graph")

    def _node(self, node: Node) -> list[Any]:
        attributes = [[name, self._attribute(value)] for name, value in sorted(node.op.attributes().items())]
        return [
            node.op.op_name,
            attributes,
            [self._numbers[v] for v in node.inputs],
            [self._type(v.type) for v in node.outputs],
            [fingerprint(region) for region in node.regions],
        ]

    def _type(self, type: TensorType) -> list[Any]:
        encoding = type.encoding.name if type.encoding else None
        return [type.dtype.name, encoding, [self._size(s) for s in type.shape]]

    def _size(self, size: Size) -> str:
        self._dims |= {s.name: s for s in symbols(size)}
        return format_size(size)

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._attribute(v) for v in value]
        if isinstance(value, Dim):
            return self._size(value)
        if isinstance(value, float) and value.is_integer() and str(value) != "-0.0":
            value = int(value)  # alpha=1 and alpha=1.0 are one attribute
        return format_attribute(value)


def graphs_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs are the same node by node, in order, with their leaves, results, guards and provenance.

    Not compared: names of values that are neither leaf nor output, data of params, initial values of states.
    """
    return _described(a) == _described(b)


def equal_with(a: Graph, b: Graph, sizes: Mapping[str, Size]) -> bool:
    """Whether `a` with the named symbols replaced by sizes has the nodes, types and guards of `b`.

    Guards count as a set without those that hold by themselves; constants of more than 1024 elements aren't compared.
    """
    return _described(a, sizes) == _described(b, {})


def _described(graph: Graph, sizes: Mapping[str, Size] | None = None) -> list[Any]:
    def resized(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(resized, value))
        return substitute(value, sizes) if sizes and isinstance(value, Dim) else value

    def typed(type: TensorType) -> TensorType:
        return TensorType(resized(type.shape), type.dtype, type.encoding) if sizes else type

    loose = sizes is not None
    numbers = {value: i for i, value in enumerate(graph.values())}
    leaves = [(v.kind, v.name, typed(v.type)) for v in (*graph.inputs, *graph.params, *graph.states)]
    constants = [
        (v.type, None if v.data is None or (loose and v.data.size > _FEW) else content_hash(v.data))
        for v in graph.constants
    ]
    nodes = [
        (
            type(node.op),
            {name: format_attribute(resized(value)) for name, value in node.op.attributes().items()},
            [numbers.get(v, -1) for v in node.inputs],
            [typed(v.type) for v in node.outputs],
            node.provenance,
            [_described(region, sizes) for region in node.regions],
        )
        for node in graph.nodes
    ]
    outputs = [(o.name, numbers.get(o.value, -1)) for o in graph.outputs]
    updates = {name: numbers.get(v, -1) for name, v in graph.updates.items()}
    found = [graph.name, leaves, constants, nodes, outputs, updates]
    if loose:
        pairs = {frozenset((resized(g.lhs), resized(g.rhs))) for g in graph.guards}
        return [*found, {pair for pair in pairs if len(pair) > 1}]
    return [*found, graph.dims(), graph.guards]
