"""ONNX models as graphs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.errors import DTypeError, ModelFormatError, RlxError, ShapeError, UnsupportedNode, UnsupportedOp
from rlx.importers.onnx import mapping_math, mapping_shape, mapping_window
from rlx.importers.onnx.dims import DimsOption, input_shapes
from rlx.importers.onnx.mapping import (
    STATIC_OPS,
    Mapped,
    NodeContext,
    UnsupportedError,
    element_dtype,
    find_op,
    run_static,
    static_inputs,
)
from rlx.importers.onnx.model import GraphProto, ModelFile, NodeProto, ValueInfo, read_model
from rlx.importers.onnx.symbolic import LIMIT, NotStaticError, Ratio, Static, static_array
from rlx.importers.onnx.tensor import TensorRef
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType, Value
from rlx.ir.shape import Dim
from rlx.ops.elementwise import Cast, Div
from rlx.ops.layout import Concat, Reshape, SizeOf

__all__ = ["Import", "MissingNode", "ModelSource", "import_model", "load"]

TABLES = (mapping_math, mapping_shape, mapping_window)  # importing them fills the table of ops
ModelSource = str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class MissingNode(UnsupportedNode):
    """A node (or input: op "Input") that can't be imported; `opset` is the version that the model gives its domain."""

    domain: str = ""
    opset: int = 0


@dataclass
class Import:
    """What came of a model: the graph as far as it goes, and all that is missing.

    `unchecked` counts nodes of supported ops whose inputs come from missing nodes, so that no more is known of them.
    """

    model: ModelFile
    graph: Graph
    supported: Counter[str] = field(default_factory=Counter)
    unchecked: int = 0
    unused: int = 0
    missing: list[MissingNode] = field(default_factory=list)
    misfits: list[ShapeError] = field(default_factory=list)  # shapes that contradict each other

    def check(self) -> None:
        """Raises `UnsupportedOp` with all that is missing, or `ShapeError`."""
        if self.missing:
            raise UnsupportedOp(_message(self), self.missing)
        if self.misfits:
            raise ShapeError("; ".join(str(e) for e in self.misfits))


def load(source: ModelSource, *, dims: DimsOption | None = None) -> Graph:
    """The graph of an ONNX model of opset 7 or later, given by path or as bytes; weights are views of the file.

    `dims` fix or bound the sizes that the file leaves open: `{"batch": 4, "seq": (1, 512)}`, or by input,
    `{"x": (1, 3, (32, 960), (32, 960))}`. Shape arithmetic is carried out at import. Raises `UnsupportedOp` listing
    every node that can't be imported, `ModelFormatError`, `OptionError` (dims) and `ShapeError`.
    """
    model = read_model(source)
    unknown = [
        i.name for i in _true_inputs(model) if i.shape is None and i.kind == "tensor" and i.name not in (dims or {})
    ]
    if unknown:
        names = ", ".join(map(repr, unknown))
        example = f'dims={{"{unknown[0]}": (1, (1, 512))}}'
        raise ShapeError(f"{model.path}: the file does not say the rank of input {names}; give its shape, {example}")
    done = import_model(model, dims=dims)
    done.check()
    return done.graph


def import_model(model: ModelFile, *, dims: DimsOption | None = None, weights: bool = True) -> Import:
    """Imports as much as can be; params have no data with `weights=False`."""
    return _Importer(model, dims, weights).run()


def _true_inputs(model: ModelFile) -> list[ValueInfo]:
    return [i for i in model.graph.inputs if i.name not in model.graph.initializers]


def _message(done: Import) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for node in done.missing:
        op = f"{node.domain}.{node.op}" if node.domain else node.op
        reasons.setdefault((op, node.reason), []).append(node.name)
    lines = []
    for (op, reason), names in reasons.items():
        shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"  {op} x{len(names)} ({shown}): {reason}")
    count = f"{len(done.missing)} node{'s' * (len(done.missing) > 1)}"
    return f"{done.model.path}: {count} or inputs can't be imported:\n" + "\n".join(lines)


def label_of(node: NodeProto) -> str:
    """The node's name, or what tells it apart where it has none."""
    return node.name or f"{node.op_type}:{next((o for o in node.outputs if o), '?')}"


class _Importer:
    """The tensors that exist so far, and the walk over the nodes."""

    def __init__(self, model: ModelFile, dims: DimsOption | None, weights: bool) -> None:
        self.model = model
        self.weights = weights
        self.graph = Graph(model.graph.name or "graph")
        self.result = Import(model, self.graph)
        self._values: dict[str, Value] = {}
        self._statics: dict[str, Static] = {}
        self._refs: dict[str, TensorRef] = dict(model.graph.initializers)
        self._constants: set[str] = set()  # refs that become constants whatever their size
        self._tainted: set[str] = set()  # tensors of missing nodes
        self._label = ""  # of the node at hand
        listed = {i.name for i in model.graph.inputs} if model.ir_version >= 4 else set()
        self._live = _live_nodes(model.graph)
        self._pinned = {
            n for n in _sources_of_sizes(self._live, model) if n in self._refs and self._refs[n].size <= LIMIT
        }
        self._overridable = listed & self._refs.keys() - self._pinned
        reads = {name for node in model.graph.nodes for name in _reads(node)}
        self._wanted = frozenset(reads | {o.name for o in model.graph.outputs})
        self._shapes = input_shapes(_true_inputs(model), dims)

    def run(self) -> Import:
        result = self.result
        for info in _true_inputs(self.model):
            self._input(info)
        result.unused = len(self.model.graph.nodes) - len(self._live)
        for node in self._live:
            self._node(node)
        for info in self.model.graph.outputs:
            if not self._exists(info.name):
                raise ModelFormatError(f"{self.model.path}: nothing makes the output {info.name!r}")
            if info.name not in self._tainted:
                self._try_output(info.name)
        _remove_dead(self.graph)
        return result

    def _exists(self, name: str) -> bool:
        return any(name in known for known in (self._values, self._statics, self._refs, self._tainted))

    # ---- leaves

    def _input(self, info: ValueInfo) -> None:
        try:
            if info.kind != "tensor":
                raise UnsupportedError(f"an input of kind {info.kind} is not supported, only tensors")
            if info.name not in self._shapes:
                raise UnsupportedError("its rank is not known; give its shape with dims")
            value = self.graph.input(info.name, self._shapes[info.name], element_dtype(info.elem_type))
            self._values[info.name] = value
        except (DTypeError, UnsupportedError) as error:
            self.result.missing.append(MissingNode(info.name, "Input", str(error)))
            self._tainted.add(info.name)

    def _try_output(self, name: str) -> None:
        try:
            self.graph.output(self.value(name), name)
        except (DTypeError, UnsupportedError) as error:
            self.result.missing.append(MissingNode(name, "Output", str(error)))

    def value(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = self._leaf(name) if name in self._refs else self._materialised(name)
        return self._values[name]

    def _leaf(self, name: str) -> Value:
        """An initializer: integers of up to 1024 elements and single numbers are constants, others params.

        The data of a param is a view of the file, aligned or not: whoever loads it copies it once.
        """
        ref = self._refs[name]
        dtype = element_dtype(ref.elem_type)
        if self._is_constant(name):
            return self.graph.constant(ref.array(), name=name)
        return self.graph.param(name, ref.dims, dtype, data=ref.array(aligned=False) if self.weights else None)

    def _is_constant(self, name: str) -> bool:
        if name in self._constants or name in self._pinned:
            return True
        return _is_small(self._refs[name]) and name not in self._overridable

    def _materialised(self, name: str) -> Value:
        """Sizes as a tensor, for an op that computes with them."""
        static = self._statics[name]
        if static.concrete:
            return self.graph.constant(static.array(), name=name)
        parts = [self._scalar(item, static) for item in static.items.flat]
        if static.shape == ():
            return parts[0]
        rows = [self._add(Reshape((1,)), part) for part in parts]
        flat = rows[0] if len(rows) == 1 else self._add(Concat(0), *rows)
        return flat if flat.shape == static.shape else self._add(Reshape(static.shape), flat)

    def _scalar(self, item: Any, static: Static) -> Value:
        if not isinstance(item, Dim | Ratio):
            return self.graph.constant(static_array(item, static.dtype).array())
        size = self._add(SizeOf(item.num if isinstance(item, Ratio) else item))
        size = size if static.dtype is DTYPES["i64"] else self._add(Cast(static.dtype), size)
        if isinstance(item, Dim):
            return size
        return self._add(Div(), size, self.graph.constant(item.den, static.dtype))

    def _add(self, op: Any, *values: Value) -> Value:
        return self.graph.add(op, *values, provenance=(self._label,))[0]

    # ---- what mappings see (`Tensors`)

    def known(self, name: str) -> Static | None:
        if name in self._statics:
            return self._statics[name]
        ref = self._refs.get(name)
        if ref is None or ref.size > LIMIT:
            return None
        if not self._is_constant(name):
            return None
        found = static_array(ref.array(), element_dtype(ref.elem_type))
        self._statics[name] = found
        return found

    def type(self, name: str) -> TensorType:
        if name in self._values:
            return self._values[name].type
        if name in self._statics:
            return TensorType(self._statics[name].shape, self._statics[name].dtype)
        if name in self._refs:
            return TensorType(self._refs[name].dims, element_dtype(self._refs[name].elem_type))
        return self.value(name).type

    # ---- nodes

    def _node(self, node: NodeProto) -> None:
        self._label = label_of(node)
        for name in node.inputs:
            if name and not self._exists(name):
                raise ModelFormatError(
                    f"{self.model.path}: node {self._label!r} reads {name!r}, which no input, initializer or node "
                    "before it makes"
                )
        for name in node.outputs:
            if name and self._exists(name):
                raise ModelFormatError(f"{self.model.path}: node {self._label!r} makes {name!r} a second time")
        try:
            outputs = self._mapped(node)
        except NotStaticError as error:
            self._missing(node, f"a size can't be told at import: {error}")
        except (UnsupportedError, DTypeError) as error:
            self._missing(node, _plain(error, self._label))
        except ModelFormatError:
            raise
        except ShapeError as error:
            self.result.misfits.append(error)
            self._taint(node)
        except RlxError as error:
            self._missing(node, _plain(error, self._label))
        else:
            self._bind(node, outputs)

    def _mapped(self, node: NodeProto) -> Sequence[Mapped] | None:
        """The node's outputs; None where its inputs come from missing nodes."""
        entry = find_op(node, self.model.opsets)
        if any(name in self._tainted for name in node.inputs):
            self.result.unchecked += 1
            self.result.supported[node.op_type] += 1
            return None
        ctx = NodeContext(self, node, self.model.opsets[""], self._label, self._wanted)
        made: Mapped | Sequence[Mapped] | None = run_static(ctx)
        if made is None:
            made = entry.handler(ctx)
        ctx.check_attributes()
        self.result.supported[node.op_type] += 1
        return made if isinstance(made, tuple) else (made,)

    def _bind(self, node: NodeProto, outputs: Sequence[Mapped] | None) -> None:
        if outputs is None:
            self._taint(node)
            return
        for i, name in enumerate(node.outputs):
            made = outputs[i] if i < len(outputs) else None
            if not name:
                continue
            if isinstance(made, Static):
                self._statics[name] = made
            elif isinstance(made, TensorRef):
                self._refs[name] = made
                self._constants.add(name)
            elif made is not None:
                made.name = made.name or name
                self._values[name] = made
            elif name in self._wanted:
                self._missing(node, f"its output {i} ({name!r}) is not supported")
                return

    def _missing(self, node: NodeProto, reason: str) -> None:
        opset = self.model.opsets.get(node.domain, 0)
        self.result.missing.append(MissingNode(self._label, node.op_type, reason, node.domain, opset))
        for inner in _inner_nodes(node):
            try:
                find_op(inner, self.model.opsets)
            except UnsupportedError as error:
                opset = self.model.opsets.get(inner.domain, 0)
                found = MissingNode(f"{self._label}/{label_of(inner)}", inner.op_type, str(error), inner.domain, opset)
                self.result.missing.append(found)
        self._taint(node)

    def _taint(self, node: NodeProto) -> None:
        self._tainted.update(name for name in node.outputs if name and not self._exists(name))


def _plain(error: RlxError, label: str) -> str:
    return str(error).removeprefix(f"node {label!r}: ")


def _is_small(ref: TensorRef) -> bool:
    dtype = element_dtype(ref.elem_type)
    return ref.size == 1 or (dtype.kind in "iub" and ref.size <= LIMIT)


def _inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    """The nodes of a node's subgraphs, at any depth."""
    for attribute in node.attributes.values():
        graphs = attribute.value if isinstance(attribute.value, tuple) else (attribute.value,)
        for graph in graphs:
            if isinstance(graph, GraphProto):
                for inner in graph.nodes:
                    yield inner
                    yield from _inner_nodes(inner)


def _reads(node: NodeProto) -> Iterator[str]:
    """The tensors that a node reads, those that its subgraphs take from outside among them."""
    yield from node.inputs
    for inner in _inner_nodes(node):
        yield from inner.inputs
    for attribute in node.attributes.values():
        graphs = attribute.value if isinstance(attribute.value, tuple) else (attribute.value,)
        for graph in graphs:
            if isinstance(graph, GraphProto):
                yield from (o.name for o in graph.outputs)


def _live_nodes(graph: GraphProto) -> list[NodeProto]:
    """The nodes that the outputs depend on, in order."""
    wanted = {o.name for o in graph.outputs}
    live = []
    for node in reversed(graph.nodes):
        if any(name and name in wanted for name in node.outputs):
            live.append(node)
            wanted.update(_reads(node))
    return live[::-1]


def _sources_of_sizes(nodes: Sequence[NodeProto], model: ModelFile) -> set[str]:
    """The tensors that inputs which have to be known at import are computed from: initializers there are constants."""
    needed: set[str] = set()
    for node in reversed(nodes):
        needed.update(static_inputs(node, model.opsets))
        if node.op_type in STATIC_OPS and node.op_type not in ("Shape", "Size") and needed & set(node.outputs):
            needed.update(node.inputs)
    return needed


def _remove_dead(graph: Graph) -> None:
    """Drops nodes and constants that nothing reads: those that only sizes were taken from."""
    used: set[Value] = {o.value for o in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if any(v in used for v in node.outputs):
            kept.append(node)
            used.update(node.inputs)
    graph.nodes[:] = kept[::-1]
    graph.constants[:] = [v for v in graph.constants if v in used]
    graph.params[:] = [v for v in graph.params if v in used]
