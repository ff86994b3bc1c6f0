"""An ONNX file as plain values: `read_model` reads everything but the bytes of tensors.

Field numbers and meanings are those of onnx.proto (IR versions 1 to 14). The domain "ai.onnx" is written "" throughout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from rlx.errors import ModelFormatError
from rlx.importers.onnx import schema
from rlx.importers.onnx.tensor import ELEMENT_TYPES, External, Inline, Source, Sparse, TensorRef, Typed
from rlx.importers.onnx.wire import (
    MAX_DEPTH,
    MAX_DIMS,
    MAX_LIST_BYTES,
    MAX_NODES,
    MAX_SPARSE_BYTES,
    MAX_SPARSE_RATIO,
    MAX_TEXT_BYTES,
    FieldSpan,
    Reader,
    signed64,
)
from rlx.importers.sources import FileSource, Folder, MemorySource, check_location

__all__ = [
    "Attribute",
    "AttributeValue",
    "FunctionProto",
    "GraphProto",
    "ModelFile",
    "NodeProto",
    "TensorRef",
    "ValueInfo",
    "read_model",
]


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Name and type of a value. (ONNX ValueInfoProto, TypeProto)

    `kind` is "tensor", "sparse_tensor", "map", "opaque", "unknown" (no type given), or nests as "sequence(tensor)" and
    "optional(sequence(tensor))"; `elem_type` (TensorProto.DataType, 0 unknown) and `shape` are those of the innermost
    tensor. A size is an int, the name of a symbol, or None where unknown, negative or "?"; `shape` None: rank unknown.
    """

    name: str
    kind: str = "unknown"
    elem_type: int = 0
    shape: tuple[int | str | None, ...] | None = None


AttributeValue = (
    int
    | float
    | bytes
    | TensorRef
    | ValueInfo
    | tuple[int, ...]
    | tuple[float, ...]
    | tuple[bytes, ...]
    | tuple[TensorRef, ...]
    | tuple[ValueInfo, ...]
    | tuple["GraphProto", ...]
    | None
)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of a node. (ONNX AttributeProto)

    `kind` is the name in AttributeProto.AttributeType; `value` an int, float, bytes, TensorRef, GraphProto or ValueInfo
    (TYPE_PROTO), a tuple of those for the plural kinds, None for lists of sparse tensors (not read) and where `ref`
    names the attribute of the enclosing function to take the value from.
    """

    name: str
    kind: str
    value: AttributeValue | GraphProto
    ref: str = ""


@dataclass(frozen=True, slots=True)
class NodeProto:
    """One node; an empty string in `inputs` or `outputs` is an absent optional. (ONNX NodeProto)"""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Attribute]
    overload: str = ""


@dataclass(frozen=True, slots=True)
class GraphProto:
    """A graph or subgraph. (ONNX GraphProto)"""

    name: str
    nodes: tuple[NodeProto, ...]
    initializers: dict[str, TensorRef]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    value_infos: dict[str, ValueInfo]


@dataclass(frozen=True, slots=True)
class FunctionProto:
    """A function local to the model; `attribute_defaults` are attributes with a default. (ONNX FunctionProto)"""

    name: str
    domain: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    attribute_defaults: dict[str, Attribute]
    nodes: tuple[NodeProto, ...]
    opsets: dict[str, int]
    value_infos: dict[str, ValueInfo]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model; `path` is "<bytes>" when given as bytes, `functions` by (domain, name, overload). (ONNX ModelProto)"""

    path: str
    ir_version: int
    producer: str
    producer_version: str
    opsets: dict[str, int]
    graph: GraphProto
    functions: dict[tuple[str, str, str], FunctionProto]
    metadata: dict[str, str]


def read_model(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> ModelFile:
    """Read the ONNX model at a path, or given as bytes, without reading the bytes of its tensors.

    Raises ModelFormatError, naming file, field and offset, for a file that is missing, malformed or beyond the limits
    of `rlx.importers.onnx.wire`.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _Parser(MemorySource(source), None).model()
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a model is a path or bytes, got {type(source).__name__}")
    path = os.fsdecode(os.fspath(source))
    file = FileSource(path)
    try:
        return _Parser(file, Folder(path)).model()
    finally:
        file.close()


# AttributeProto.AttributeType -> its name and the field that holds its value.
_ATTRIBUTE_KINDS = {
    1: ("FLOAT", 2),
    2: ("INT", 3),
    3: ("STRING", 4),
    4: ("TENSOR", 5),
    5: ("GRAPH", 6),
    6: ("FLOATS", 7),
    7: ("INTS", 8),
    8: ("STRINGS", 9),
    9: ("TENSORS", 10),
    10: ("GRAPHS", 11),
    11: ("SPARSE_TENSOR", 22),
    12: ("SPARSE_TENSORS", 23),
    13: ("TYPE_PROTO", 14),
    14: ("TYPE_PROTOS", 15),
}
_KIND_OF_FIELD = {number: (kind, number) for kind, number in _ATTRIBUTE_KINDS.values()}
_MISSING: dict[str, int | float | bytes] = {"FLOAT": 0.0, "INT": 0, "STRING": b""}  # proto3 writers leave zeros out
_SHARED_BYTES = 256
_SHARED_KINDS = frozenset({"FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS"})
_PLURALS = frozenset(kind for kind, _ in _ATTRIBUTE_KINDS.values() if kind.endswith("S"))
_TYPED_FIELDS = {
    4: "float_data",
    5: "int32_data",
    6: "string_data",
    7: "int64_data",
    10: "double_data",
    11: "uint64_data",
}
_LFS = b"version https://git-lfs"


class _Parser:
    """Builds the values of one file; each method parses the message in bytes `start` to `end`."""

    def __init__(self, source: Source, folder: Folder | None) -> None:
        self.source = source
        self.folder = folder
        self.reader = Reader(source)
        self.text = self.reader.text
        # Short messages recur, often a thousand times: they are parsed once, and their (immutable) values shared.
        self.nodes = 0
        self.sparse_bytes = self.dense_bytes = 0  # of sparse tensors: as stored, and as what they stand for
        self._attributes: dict[bytes, Attribute] = {}
        self._types: dict[bytes, ValueInfo] = {}

    def model(self) -> ModelFile:
        self._check_start()
        reader, text = self.reader, self.text
        ir_version, producer, version = 0, "", ""
        opsets: list[tuple[int, int]] = []
        graph: tuple[int, int] | None = None
        functions: dict[tuple[str, str, str], FunctionProto] = {}
        metadata: dict[str, str] = {}
        try:
            fields = reader.scan(0, self.source.size, schema.MODEL)
        except ModelFormatError as error:
            raise ModelFormatError(f"{error}; is it an ONNX model, whole?") from error
        for number, _, start, end, value in fields:
            if number == 1:
                ir_version = signed64(value)
            elif number == 2:
                producer = text(start, end, "ModelProto.producer_name")
            elif number == 3:
                version = text(start, end, "ModelProto.producer_version")
            elif number == 7:
                if graph is not None:
                    reader.fail("ModelProto.graph", start, "a second graph")
                graph = start, end
            elif number == 8:
                opsets.append((start, end))
            elif number == 14:
                key, entry = self.entry(start, end)
                metadata[key] = entry
            else:
                function = self.function(start, end)
                identity = function.domain, function.name, function.overload
                if identity in functions:
                    reader.fail("ModelProto.functions", start, f"function {identity} is defined twice")
                functions[identity] = function
        if graph is None:
            raise ModelFormatError(f"{reader.name}: holds no graph; is it an ONNX model?")
        return ModelFile(
            path=reader.name,
            ir_version=ir_version,
            producer=producer,
            producer_version=version,
            opsets=self.opsets(opsets),
            graph=self.graph(*graph, 0),
            functions=functions,
            metadata=metadata,
        )

    def graph(self, start: int, end: int, depth: int) -> GraphProto:
        reader = self.reader
        if depth > MAX_DEPTH:
            reader.fail("GraphProto", start, f"subgraphs are nested deeper than {MAX_DEPTH}")
        name = ""
        nodes: list[NodeProto] = []
        initializers: dict[str, TensorRef] = {}
        inputs: list[ValueInfo] = []
        outputs: list[ValueInfo] = []
        infos: list[ValueInfo] = []
        for number, _, first, last, _ in reader.scan(start, end, schema.GRAPH):
            if number == 1:
                self.count_node(first)
                nodes.append(self.node(first, last, depth))
            elif number == 2:
                name = self.text(first, last, "GraphProto.name")
            elif number in (5, 15):
                tensor = self.tensor(first, last) if number == 5 else self.sparse(first, last)
                if not tensor.name or tensor.name in initializers:
                    problem = f"{tensor.name!r} is defined twice" if tensor.name else "has no name"
                    reader.fail("GraphProto.initializer", first, problem)
                initializers[tensor.name] = tensor
            else:
                (inputs, outputs, infos)[number - 11].append(self.value_info(first, last))
        return GraphProto(
            name, tuple(nodes), initializers, tuple(inputs), tuple(outputs), {info.name: info for info in infos}
        )

    def count_node(self, start: int) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.reader.fail("NodeProto", start, f"the file has more than the limit of {MAX_NODES} nodes")

    def node(self, start: int, end: int, depth: int) -> NodeProto:
        text = self.text
        name = op_type = domain = overload = ""
        inputs: list[str] = []
        outputs: list[str] = []
        spans: list[tuple[int, int]] = []
        for number, _, first, last, _ in self.reader.scan(start, end, schema.NODE):
            if number == 1:
                inputs.append(text(first, last, "NodeProto.input"))
            elif number == 2:
                outputs.append(text(first, last, "NodeProto.output"))
            elif number == 3:
                name = text(first, last, "NodeProto.name")
            elif number == 4:
                op_type = text(first, last, "NodeProto.op_type")
            elif number == 5:
                spans.append((first, last))
            elif number == 7:
                domain = _domain(text(first, last, "NodeProto.domain"))
            else:
                overload = text(first, last, "NodeProto.overload")
        if not op_type:
            self.reader.fail("NodeProto.op_type", start, f"node {name!r} has none")
        attributes = self.attributes(spans, depth, f"node {name or op_type!r}")
        return NodeProto(name, op_type, domain, tuple(inputs), tuple(outputs), attributes, overload)

    def attributes(self, spans: Iterable[tuple[int, int]], depth: int, owner: str) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {}
        for start, end in spans:
            data = (
                self.reader.read(start, end, _SHARED_BYTES, "AttributeProto") if end - start <= _SHARED_BYTES else b""
            )
            attribute = self._attributes.get(data) or self.attribute(start, end, depth)
            if data and attribute.kind in _SHARED_KINDS:
                self._attributes[data] = attribute
            if not attribute.name or attribute.name in attributes:
                problem = f"{attribute.name!r} is given twice" if attribute.name else "has no name"
                self.reader.fail(f"attribute of {owner}", start, problem)
            attributes[attribute.name] = attribute
        return attributes

    def attribute(self, start: int, end: int, depth: int) -> Attribute:
        reader = self.reader
        name = ref = ""
        kind_number = 0
        values: list[FieldSpan] = []
        for span in reader.scan(start, end, schema.ATTRIBUTE):
            number, _, first, last, value = span
            if number == 1:
                name = self.text(first, last, "AttributeProto.name")
            elif number == 20:
                kind_number = value
            elif number == 21:
                ref = self.text(first, last, "AttributeProto.ref_attr_name")
            else:
                values.append(span)
        if kind_number == 0 and values:  # IR version 1 had no type field
            kind, field = _KIND_OF_FIELD[values[0][0]]
        elif kind_number in _ATTRIBUTE_KINDS:
            kind, field = _ATTRIBUTE_KINDS[kind_number]
        elif kind_number == 0 and ref:
            return Attribute(name, "UNDEFINED", None, ref)
        else:
            reader.fail("AttributeProto.type", start, f"attribute {name!r} has no type that is known ({kind_number})")
        for number, _, first, _, _ in values:
            if number != field:
                problem = (
                    f"attribute {name!r} is of type {kind} and has a value in {schema.ATTRIBUTE.names[number]!r} too"
                )
                reader.fail("AttributeProto", first, problem)
        if ref:
            return Attribute(name, kind, None, ref)
        return Attribute(name, kind, self.attribute_value(name, kind, values, start, depth))

    def attribute_value(
        self, name: str, kind: str, values: list[FieldSpan], start: int, depth: int
    ) -> AttributeValue | GraphProto:
        if kind in _PLURALS:
            return self.attribute_values(kind, values, depth)
        if not values:
            if kind not in _MISSING:
                self.reader.fail("AttributeProto", start, f"attribute {name!r} of type {kind} has no value")
            return _MISSING[kind]
        if kind not in _MISSING and len(values) > 1:
            self.reader.fail("AttributeProto", start, f"attribute {name!r} of type {kind} has {len(values)} values")
        span = values[-1]
        _, _, first, last, bits = span
        if kind == "INT":
            return signed64(bits)
        if kind == "FLOAT":
            return self.reader.floats(span, "AttributeProto.f")[-1]
        if kind == "STRING":
            return self.reader.read(first, last, MAX_LIST_BYTES, "AttributeProto.s")
        if kind == "TENSOR":
            return self.tensor(first, last)
        if kind == "SPARSE_TENSOR":
            return self.sparse(first, last)
        if kind == "GRAPH":
            return self.graph(first, last, depth + 1)
        return self.type(first, last, 0) if kind == "TYPE_PROTO" else None

    def attribute_values(self, kind: str, values: list[FieldSpan], depth: int) -> AttributeValue:
        reader = self.reader
        if kind == "INTS":
            return tuple(reader.all_ints(values, "AttributeProto.ints"))
        if kind == "FLOATS":
            return tuple(item for span in values for item in reader.floats(span, "AttributeProto.floats"))
        spans = [(first, last) for _, _, first, last, _ in values]
        if kind == "STRINGS":
            return tuple(reader.read(first, last, MAX_LIST_BYTES, "AttributeProto.strings") for first, last in spans)
        if kind == "TENSORS":
            return tuple(self.tensor(first, last) for first, last in spans)
        if kind == "GRAPHS":
            return tuple(self.graph(first, last, depth + 1) for first, last in spans)
        return tuple(self.type(first, last, 0) for first, last in spans) if kind == "TYPE_PROTOS" else None

    def tensor(self, start: int, end: int) -> TensorRef:
        reader = self.reader
        name, elem_type, external = "", 0, False
        dims: list[int] = []
        typed: list[FieldSpan] = []
        raw: tuple[int, int] | None = None
        entries: dict[str, str] = {}
        for span in reader.scan(start, end, schema.TENSOR):
            number, _, first, last, value = span
            if number == 1:
                dims += reader.ints(span, "TensorProto.dims", 10 * MAX_DIMS)
            elif number == 2:
                elem_type = value
            elif number == 3:
                reader.fail("TensorProto.segment", first, "tensors in segments are not part of any ONNX release")
            elif number == 8:
                name = self.text(first, last, "TensorProto.name")
            elif number == 9:
                raw = first, last
            elif number == 13:
                key, entry = self.entry(first, last)
                entries[key] = entry
            elif number == 14:
                external = value == 1
            else:
                typed.append(span)
        if len(dims) > MAX_DIMS:
            reader.fail("TensorProto.dims", start, f"tensor {name!r} has more than the limit of {MAX_DIMS} dims")
        if len({span[0] for span in typed}) + (raw is not None and raw[0] < raw[1]) + external > 1:
            reader.fail("TensorProto", start, f"tensor {name!r} has data in more than one place")
        storage: Inline | Typed | External
        if external:
            storage = self.external(name, entries, start)
        elif raw is not None and not typed:
            storage = Inline(self.source, raw[0], raw[1] - raw[0])
        else:
            storage = Typed(self.source, _TYPED_FIELDS[typed[0][0]] if typed else "", tuple(typed))
        tensor = TensorRef(name, tuple(dims), elem_type, storage, reader.name)
        tensor.check()
        return tensor

    def external(self, name: str, entries: dict[str, str], start: int) -> External:
        numbers: dict[str, int | None] = {"offset": 0, "length": None}
        for key in numbers:
            entry = entries.get(key)
            if entry is None:
                continue
            if not (entry.isascii() and entry.isdigit() and len(entry) < 19):
                problem = f"{key} {entry[:40]!r} of tensor {name!r} is no byte count"
                self.reader.fail("TensorProto.external_data", start, problem)
            numbers[key] = int(entry)
        location = entries.get("location", "")
        check_location(location, f"{self.reader.name}: tensor {name!r}")
        return External(self.folder, location, numbers["offset"] or 0, numbers["length"])

    def sparse(self, start: int, end: int) -> TensorRef:
        """A sparse tensor, named by its values, as the dense one that it stands for."""
        parts: dict[int, TensorRef] = {}
        dims: list[int] = []
        for span in self.reader.scan(start, end, schema.SPARSE):
            number, _, first, last, _ = span
            if number == 3:
                dims += self.reader.ints(span, "SparseTensorProto.dims", 10 * MAX_DIMS)
            else:
                parts[number] = self.tensor(first, last)
        if len(parts) < 2 or len(dims) > MAX_DIMS:
            self.reader.fail("SparseTensorProto", start, f"it needs values, indices and at most {MAX_DIMS} dims")
        values, indices = parts[1], parts[2]
        tensor = TensorRef(values.name, tuple(dims), values.elem_type, Sparse(values, indices), self.reader.name)
        tensor.check()
        self.sparse_bytes += values.nbytes + indices.nbytes
        self.dense_bytes += tensor.nbytes
        if self.dense_bytes > MAX_SPARSE_BYTES + MAX_SPARSE_RATIO * self.sparse_bytes:
            limit = f"{MAX_SPARSE_BYTES >> 20} MiB and {MAX_SPARSE_RATIO} times what is stored"
            problem = (
                f"the sparse tensors up to {values.name!r} stand for {self.dense_bytes} bytes, the limit is {limit}"
            )
            self.reader.fail("SparseTensorProto", start, problem)
        return tensor

    def value_info(self, start: int, end: int) -> ValueInfo:
        name = ""
        info = ValueInfo("")
        for number, _, first, last, _ in self.reader.scan(start, end, schema.VALUE_INFO):
            if number == 1:
                name = self.text(first, last, "ValueInfoProto.name")
            else:
                info = self.shared_type(first, last)
        return ValueInfo(name, info.kind, info.elem_type, info.shape)

    def shared_type(self, start: int, end: int) -> ValueInfo:
        if end - start > _SHARED_BYTES:
            return self.type(start, end, 0)
        data = self.reader.read(start, end, _SHARED_BYTES, "TypeProto")
        info = self._types.get(data)
        if info is None:
            info = self._types[data] = self.type(start, end, 0)
        return info

    def type(self, start: int, end: int, depth: int) -> ValueInfo:
        if depth > MAX_DEPTH:
            self.reader.fail("TypeProto", start, f"types are nested deeper than {MAX_DEPTH}")
        info = ValueInfo("")
        for number, _, first, last, _ in self.reader.scan(start, end, schema.TYPE):  # a oneof: the last one counts
            kind = schema.TYPE.names[number].removesuffix("_type")
            if number in (1, 8):
                info = self.tensor_type(first, last, kind)
            elif number in (4, 9):
                inner = ValueInfo("")
                for _, _, a, b, _ in self.reader.scan(first, last, schema.ELEMENT_TYPE):
                    inner = self.type(a, b, depth + 1)
                info = ValueInfo("", f"{kind}({inner.kind})", inner.elem_type, inner.shape)
            else:
                info = ValueInfo("", kind)
        return info

    def tensor_type(self, start: int, end: int, kind: str) -> ValueInfo:
        elem_type = 0
        shape: tuple[int | str | None, ...] | None = None
        for number, _, first, last, value in self.reader.scan(start, end, schema.TENSOR_TYPE):
            if number == 1:
                elem_type = value
                if elem_type and elem_type not in ELEMENT_TYPES:
                    self.reader.fail("TypeProto.Tensor.elem_type", first, f"{elem_type} is unknown")
            else:
                shape = tuple(self.dimension(a, b) for _, _, a, b, _ in self.reader.scan(first, last, schema.SHAPE))
        if shape is not None and len(shape) > MAX_DIMS:
            self.reader.fail(
                "TypeProto.Tensor.shape", start, f"{len(shape)} dims are more than the limit of {MAX_DIMS}"
            )
        return ValueInfo("", kind, elem_type, shape)

    def dimension(self, start: int, end: int) -> int | str | None:
        size: int | str | None = None
        for number, _, first, last, value in self.reader.scan(start, end, schema.DIMENSION):
            size = signed64(value) if number == 1 else self.text(first, last, "TensorShapeProto.dim_param")
        if isinstance(size, int):
            return size if size >= 0 else None
        return None if size in ("", "?") else size

    def function(self, start: int, end: int) -> FunctionProto:
        text = self.text
        name = domain = overload = ""
        names: dict[int, list[str]] = {4: [], 5: [], 6: []}
        nodes: list[NodeProto] = []
        defaults: list[tuple[int, int]] = []
        opsets: list[tuple[int, int]] = []
        infos: list[ValueInfo] = []
        for number, _, first, last, _ in self.reader.scan(start, end, schema.FUNCTION):
            if number == 1:
                name = text(first, last, "FunctionProto.name")
            elif number in names:
                names[number].append(text(first, last, f"FunctionProto.{schema.FUNCTION.names[number]}"))
            elif number == 7:
                self.count_node(first)
                nodes.append(self.node(first, last, 0))
            elif number == 9:
                opsets.append((first, last))
            elif number == 10:
                domain = _domain(text(first, last, "FunctionProto.domain"))
            elif number == 11:
                defaults.append((first, last))
            elif number == 12:
                infos.append(self.value_info(first, last))
            else:
                overload = text(first, last, "FunctionProto.overload")
        return FunctionProto(
            name=name,
            domain=domain,
            overload=overload,
            inputs=tuple(names[4]),
            outputs=tuple(names[5]),
            attributes=tuple(names[6]),
            attribute_defaults=self.attributes(defaults, 0, f"function {name!r}"),
            nodes=tuple(nodes),
            opsets=self.opsets(opsets),
            value_infos={info.name: info for info in infos},
        )

    def opsets(self, spans: Iterable[tuple[int, int]]) -> dict[str, int]:
        opsets: dict[str, int] = {}
        for start, end in spans:
            domain, version = "", 0
            for number, _, first, last, value in self.reader.scan(start, end, schema.OPSET):
                if number == 1:
                    domain = _domain(self.text(first, last, "OperatorSetIdProto.domain"))
                else:
                    version = signed64(value)
            if opsets.setdefault(domain, version) != version:
                problem = f"domain {domain!r} is given versions {opsets[domain]} and {version}"
                self.reader.fail("opset_import", start, problem)
        return opsets

    def entry(self, start: int, end: int) -> tuple[str, str]:
        key = entry = ""
        for number, _, first, last, _ in self.reader.scan(start, end, schema.ENTRY):
            if number == 1:
                key = self.text(first, last, "StringStringEntryProto.key")
            else:
                entry = self.text(first, last, "StringStringEntryProto.value", MAX_TEXT_BYTES)
        return key, entry

    def _check_start(self) -> None:
        if self.source.size == 0:
            raise ModelFormatError(f"{self.reader.name}: is empty; an ONNX model was expected")
        if self.reader.source.read(0, min(self.source.size, len(_LFS))) == _LFS:
            raise ModelFormatError(f"{self.reader.name}: is a Git LFS pointer, not the model; run 'git lfs pull'")


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
