"""An ONNX file that is edited: nodes and tensors are taken over byte for byte but for those that change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlx.disk import saving
from rlx.errors import ModelFormatError, OptionError
from rlx.importers.onnx.model import ModelFile, NodeProto, TensorRef, read_model
from rlx.importers.onnx.tensor import External, Sparse
from rlx.importers.sources import FileSource
from rlx.ir.dtype import pack
from rlx.ir.graph import Array
from rlx.quantiser.onnx.wire import (
    fields_of,
    made_node,
    made_tensor,
    message,
    number_field,
    tensor_head,
    with_values,
)

__all__ = ["MICROSOFT", "OnnxFile", "save"]

MICROSOFT = "com.microsoft"
MOST_INLINE = (1 << 31) - (1 << 24)  # bytes of one protobuf message, with room for what is not tensors
# fields of GraphProto and ModelProto
NODE, INITIALIZER, INPUT, OUTPUT, QUANTIZATION = 1, 5, 11, 12, 14
IR_VERSION, GRAPH, OPSET = 1, 7, 8


class _Node:
    """A node as the file has it, its inputs and outputs as they are now, and whether it is left out."""

    def __init__(self, proto: NodeProto, data: memoryview) -> None:
        self.proto, self.data, self.gone = proto, data, False
        self.inputs, self.outputs = list(proto.inputs), list(proto.outputs)

    @property
    def op(self) -> str:
        """The name of its op, with the domain where that is not ONNX's own."""
        return f"{self.proto.domain}.{self.proto.op_type}" if self.proto.domain else self.proto.op_type

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        found = self.proto.attributes.get(name)
        return default if found is None else found.value

    def content(self) -> bytes:
        """The node as it is written."""
        return with_values(self.data, self.inputs, self.outputs)


class OnnxFile:
    """A model whose top graph is edited: `constants` by the names of their values, `nodes` with their bytes.

    What is added gets names that nothing has. Raises `ModelFormatError` for a file that is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelFile = read_model(path)
        source = FileSource(os.fspath(path))
        try:
            self.data = memoryview(source.view().data)
        finally:
            source.close()
        self.opset = self.model.opsets.get("", self.model.opsets.get("ai.onnx", 0))
        self.own_domain = "" if self.opset >= 13 else MICROSOFT
        graph = self._graph_bytes()
        self.fields = [(number, whole[at:], whole) for number, at, whole in fields_of(graph)]
        raw = [payload for number, payload, _ in self.fields if number == NODE]
        self.nodes = [_Node(proto, data) for proto, data in zip(self.model.graph.nodes, raw, strict=True)]
        self.before: dict[int, list[bytes]] = {}  # nodes that are put before one
        self._made_inputs: dict[int, list[str]] = {}  # what these read
        self.dropped: set[str] = set()  # initializers that are left out
        self.tensors: dict[str, Array] = {}  # new initializers
        self.names = self._all_names()
        self.constants = self._constants()

    def _graph_bytes(self) -> memoryview:
        graphs = [whole[at:] for number, at, whole in fields_of(self.data) if number == GRAPH]
        if len(graphs) != 1:
            raise ModelFormatError(f"{self.path}: expected one graph, got {len(graphs)}")
        return graphs[0]

    def _all_names(self) -> set[str]:
        graph = self.model.graph
        names = {n for node in graph.nodes for n in (*node.inputs, *node.outputs, node.name)}
        return names | {v.name for v in (*graph.inputs, *graph.outputs)} | set(graph.initializers)

    def _constants(self) -> dict[str, TensorRef | Array]:
        """Initializers, Constant nodes, and what Identity makes of them; not what is stored sparse."""
        given = self.model.graph.initializers.items()
        found: dict[str, TensorRef | Array] = {n: ref for n, ref in given if not isinstance(ref.storage, Sparse)}
        for node in self.model.graph.nodes:
            if node.op_type == "Constant" and not node.domain:
                value = node.attributes.get("value")
                if value is not None and isinstance(value.value, TensorRef):
                    found[node.outputs[0]] = value.value
            elif node.op_type == "Identity" and not node.domain and node.inputs[0] in found:
                found[node.outputs[0]] = found[node.inputs[0]]
        return found

    def constant(self, name: str) -> Array | None:
        """The elements of a constant, None where a value is none, or not of numbers that NumPy has."""
        found = self.constants.get(name)
        return found.array() if isinstance(found, TensorRef) else found

    def type_of_constant(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Element type and shape of a constant, without reading it."""
        found = self.constants.get(name)
        if found is None:
            return None
        return (found.element.name, found.dims) if isinstance(found, TensorRef) else ("FLOAT", found.shape)

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        made, n = name, 1
        while made in self.names:
            made, n = f"{name}_{n}", n + 1
        self.names.add(made)
        return made

    def readers(self) -> dict[str, list[tuple[int, int]]]:
        """(node, input) of all that read a value in the top graph."""
        found: dict[str, list[tuple[int, int]]] = {}
        for k, node in enumerate(self.nodes):
            for i, name in enumerate(node.inputs if not node.gone else ()):
                found.setdefault(name, []).append((k, i))
        return found

    def read_elsewhere(self) -> set[str]:
        """Outputs of the model, and values that graphs within nodes may read, as far as names tell."""
        found = {v.name for v in self.model.graph.outputs}

        def walk(value: Any) -> None:
            if hasattr(value, "nodes"):
                for node in value.nodes:
                    found.update(node.inputs)
                    for attribute in node.attributes.values():
                        walk(attribute.value)
                found.update(v.name for v in value.outputs)
            elif isinstance(value, tuple):
                for item in value:
                    walk(item)

        for node in self.nodes:
            for attribute in node.proto.attributes.values():
                walk(attribute.value)
        return found

    # ---- edits

    def add_tensor(self, name: str, array: Array) -> str:
        """A new initializer under a fresh name."""
        made = self.fresh(name)
        self.tensors[made] = self.constants[made] = array
        return made

    def add_node(self, at: int, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """A new node before node number `at`."""
        domain = attributes.pop("domain", "")
        name = self.fresh(f"{outputs[0]}/{op}")
        self._made_inputs.setdefault(at, []).extend(inputs)
        self.before.setdefault(at, []).append(made_node(op, inputs, outputs, name, domain, **attributes))

    def take_out(self, name: str) -> int:
        """Leaves out what gives a constant its value; the number of the node before which it is to be made then."""
        if name in self.model.graph.initializers:
            self.dropped.add(name)
            return 0
        k = next(k for k, node in enumerate(self.nodes) if name in node.outputs and not node.gone)
        self.nodes[k].gone = True
        return k

    def drop_unused(self) -> None:
        """Leaves out constants that nothing reads any more."""
        read = self.read_elsewhere() | {n for nodes in self._made_inputs.values() for n in nodes}
        for node in reversed(self.nodes):
            if node.op in ("Constant", "Identity") and not read.intersection(node.outputs):
                node.gone = node.gone or node.outputs[0] in self.constants
            if not node.gone:
                read.update(node.inputs)
        self.dropped.update(n for n in self.model.graph.initializers if n not in read)
        self.tensors = {n: a for n, a in self.tensors.items() if n in read}

    # ---- writing

    def content(self, extra_outputs: Sequence[str] = ()) -> bytes:
        """The whole file; external tensors are taken in. `extra_outputs` are values that become outputs too."""
        for node in self.nodes:
            self._check_inside(node)
        graph = b"".join(self._graph_parts(extra_outputs))
        made = []
        for number, _, whole in fields_of(self.data):
            if number == GRAPH:
                made.append(message(GRAPH, graph))
            elif number == IR_VERSION:
                made.append(number_field(IR_VERSION, max(self.model.ir_version, 4)))
            else:
                made.append(bytes(whole))
        if MICROSOFT not in self.model.opsets and self._uses_microsoft():
            made.append(message(OPSET, message(1, MICROSOFT.encode()) + number_field(2, 1)))
        return b"".join(made)

    def _check_inside(self, node: _Node) -> None:
        """Refuses external data within nodes: its place is told from the folder of the file."""

        def outside(value: Any) -> bool:
            if isinstance(value, TensorRef):
                return isinstance(value.storage, External)
            if isinstance(value, tuple):
                return any(map(outside, value))
            if not hasattr(value, "nodes"):
                return False
            inner = [a.value for n in value.nodes for a in n.attributes.values()]
            return any(map(outside, [*value.initializers.values(), *inner]))

        if not node.gone and any(outside(a.value) for a in node.proto.attributes.values()):
            raise OptionError(
                f"{self.path}: node {node.proto.name!r} has a tensor in another file, which is not supported within "
                "nodes: save the model with all its tensors in it"
            )

    def _uses_microsoft(self) -> bool:
        mark = message(7, MICROSOFT.encode())
        return any(node.endswith(mark) for nodes in self.before.values() for node in nodes)

    def _graph_parts(self, extra_outputs: Sequence[str]) -> Iterator[bytes]:
        k = 0
        for number, payload, whole in self.fields:
            if number == NODE:
                yield from (message(NODE, node) for node in self.before.get(k, ()))
                node = self.nodes[k]
                if not node.gone:
                    yield message(NODE, node.content())
                k += 1
            elif number == INITIALIZER:
                yield from self._initializer(payload, whole)
            elif number == INPUT and self._name_of(payload, 1) in self.dropped:
                continue  # older files have initializers as inputs too
            elif number != QUANTIZATION:
                yield bytes(whole)
        yield from (message(OUTPUT, message(1, name.encode())) for name in extra_outputs)
        yield from (message(INITIALIZER, made_tensor(name, array)) for name, array in self.tensors.items())

    def _initializer(self, payload: memoryview, whole: memoryview) -> Iterator[bytes]:
        name = self._name_of(payload, 8)
        ref = self.model.graph.initializers[name]
        if name in self.dropped:
            return
        if isinstance(ref.storage, External):
            head = tensor_head(name, ref.dims, ref.elem_type)
            yield message(INITIALIZER, head + message(9, _packed(ref.array(aligned=False), ref)))
        else:
            yield bytes(whole)

    @staticmethod
    def _name_of(payload: memoryview, number: int) -> str:
        found = [bytes(whole[at:]) for n, at, whole in fields_of(payload) if n == number]
        return found[-1].decode() if found else ""


def _packed(data: Array, ref: TensorRef) -> bytes:
    """The elements as raw_data has them."""
    if ref.element.bits < 8:
        return pack(data.reshape(-1)).tobytes()
    return data.tobytes()


def save(path: Path, data: bytes) -> int:
    """Writes a file whole or not at all; protobuf reads no message of 2 GiB."""
    if len(data) > MOST_INLINE:
        raise OptionError(f"{path}: {len(data)} bytes are more than an ONNX file can hold: take a narrower type")
    with saving(path, "quantize") as file:
        file.write(data)
    return len(data)
