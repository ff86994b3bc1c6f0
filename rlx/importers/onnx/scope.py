"""Names and what they stand for while a model is imported: one `Scope` for the graph, each subgraph and function call.

Scopes whose nodes go into one `Graph` share a `Region`. What a region's nodes use of the outside becomes its input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError, OptionError, RlxError, ShapeError, UnsupportedNode
from rlx.importers.onnx.dims import Bound, settled
from rlx.importers.onnx.mapping import (
    TAINTED,
    Appending,
    Link,
    ListOf,
    Mapped,
    NodeContext,
    Sequenced,
    StackOf,
    UnsupportedError,
    element_dtype,
    find_op,
    opset_of,
    run_static,
)
from rlx.importers.onnx.model import Attribute, FunctionProto, GraphProto, ModelFile, NodeProto
from rlx.importers.onnx.parts import Parts
from rlx.importers.onnx.reads import in_order, inner_nodes, live_nodes, reads, without
from rlx.importers.onnx.region import Region
from rlx.importers.onnx.symbolic import LIMIT, NotStaticError, Ratio, Static, static_array
from rlx.importers.onnx.tensor import STRING, TensorRef
from rlx.ir.dtype import DTYPES
from rlx.ir.given import Formal
from rlx.ir.graph import Graph, TensorType, Value
from rlx.ir.mapped import unread
from rlx.ir.shape import Dim, Size, collect_guards, upper
from rlx.ops.elementwise import Cast, Div
from rlx.ops.layout import Concat, Reshape, SizeOf
from rlx.progress import report
from rlx.records import dataclass, field

__all__ = ["Import", "MissingNode", "Run", "Scope", "label_of"]

MAX_CALLS = 32  # functions inside each other
MAX_COPIES = 40_000  # nodes beyond those in the file, when functions and loops are written out


@dataclass(frozen=True)
class MissingNode(UnsupportedNode):
    """A node (or input: op "Input") that can't be imported; `opset` is the version that the model gives its domain."""

    domain: str = ""
    opset: int = 0
    inputs: tuple[str, ...] = ()  # of the model: where their values are known the node is no obstacle


@dataclass
class Import:
    """What came of a model: the graph as far as it goes, and all that is missing.

    `unchecked` counts nodes of supported ops whose inputs come from missing nodes, so that no more is known of them.
    `produced` has the dims that nodes make, with the node.
    """

    model: ModelFile
    graph: Graph
    supported: Counter[str] = field(default_factory=Counter)
    unchecked: int = 0
    unused: int = 0
    missing: list[MissingNode] = field(default_factory=list)
    signature: list[Formal] = field(default_factory=list)  # the inputs of the file
    misfits: list[ShapeError] = field(default_factory=list)  # shapes that contradict each other
    lacking: dict[str, str] = field(default_factory=dict)  # weights whose data can't be read, and why
    produced: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # where the graph gives something else than the file says

    def snapshot(self) -> tuple[Any, ...]:
        """What `restore` needs to undo an attempt."""
        lengths = len(self.missing), len(self.misfits), len(self.notes)
        return self.supported.copy(), self.unchecked, *lengths, dict(self.produced)

    def restore(self, state: tuple[Any, ...]) -> None:
        supported, self.unchecked, missing, misfits, notes, produced = state
        self.supported, self.produced = supported.copy(), dict(produced)
        del self.missing[missing:], self.misfits[misfits:], self.notes[notes:]


class Run:
    """What all scopes of one import share."""

    def __init__(self, result: Import, bounds: Mapping[str, Bound], weights: bool, parts: Parts | None = None) -> None:
        self.parts = parts  # of names of sizes, which learn from a trial
        self.model = result.model
        self.result = result
        self.bounds = bounds  # of produced dims, as the user gave them
        self.weights = weights
        self.placeholders = 0  # constants whose data was not read
        self.nodes = 0
        self.most = MAX_COPIES + sum(1 for nodes in _bodies(self.model) for _ in nodes)
        self.names: set[str] = set()  # of dims
        self.leaves: set[str] = set()  # names of inputs and params
        self.calls: list[tuple[str, str, str]] = []
        self.scopes: list[Scope] = []

    def count(self, label: str) -> None:
        self.nodes += 1
        if self.nodes > self.most:
            raise ModelFormatError(
                f"{self.model.path}: functions and loops written out make more than the limit of {self.most} nodes, at "
                f"node {label[-200:]!r}"
            )

    def fresh(self, name: str, low: int, high: Size | None, label: str) -> Size:
        """A new dim that a node produces."""
        unique, n = name, 1
        while unique in self.names:
            n += 1
            unique = f"{name}.{n}"
        self.names.add(unique)
        self.result.produced[unique] = label
        most = None if high is None else upper(high)
        given = settled(unique, self.bounds[unique]) if unique in self.bounds else Dim(unique, low, most)
        if not isinstance(given, Dim) or given.symbol is None or given.symbol.name != unique:
            raise OptionError(f"dims[{unique!r}]: the node {label!r} decides this size; give it bounds, (lo, hi)")
        return given


class Scope:
    """The tensors that exist so far in a graph, subgraph or function body, and the walk over its nodes."""

    def __init__(
        self,
        run: Run,
        region: Region,
        opsets: dict[str, int],
        outer: Scope | None = None,
        prefix: str = "",
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        self.run = run
        self.region = region
        self.graph = region.graph
        self.opsets = opsets
        self.outer = outer  # where names that are not found here are looked up
        self.prefix = prefix
        self.attributes = attributes  # those of the function call that this is the body of; None outside functions
        self.pinned: set[str] = set()  # initializers that sizes are computed from
        self.made: set[str] = set()  # what the nodes make
        self.overridable: frozenset[str] = frozenset()  # initializers that are inputs too
        self.wanted: frozenset[str] = frozenset()  # tensors that something reads
        self.label = ""  # of the node at hand
        self._values: dict[str, Value] = {}
        self._statics: dict[str, Static] = {}
        self._refs: dict[str, TensorRef] = {}
        self._lists: dict[str, Sequenced] = {}
        self._links: dict[str, Link] = {}
        self._constants: set[str] = set()  # refs that become constants whatever their size
        self._tainted: set[str] = set()  # tensors of missing nodes
        self._pulled: dict[tuple[int, str], Value] = {}
        run.scopes.append(self)

    # ---- names

    def has(self, name: str) -> bool:
        """Whether the name is defined in this very scope."""
        if name in self._values or name in self._links or name in self._statics or name in self._refs:
            return True
        return name in self._lists or name in self._tainted

    def _find(self, name: str) -> tuple[Scope, str] | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope._links:
                link = scope._links[name]
                scope, name = link.scope, link.name
            elif scope.has(name):
                return scope, name
            else:
                scope = scope.outer
        return None

    def exists(self, name: str) -> bool:
        return self._find(name) is not None

    def is_tainted(self, name: str) -> bool:
        found = self._find(name)
        return found is not None and found[1] in found[0]._tainted

    def _owner(self, name: str) -> tuple[Scope, str]:
        found = self._find(name)
        if found is None:
            raise ModelFormatError(f"{self.run.model.path}: there is no tensor {name!r}")
        return found

    def forget(self, nodes: set[int]) -> None:
        """Drops the values that these nodes (by id) made; they are made again when they are asked for."""
        self._values = {name: v for name, v in self._values.items() if v.node is None or id(v.node) not in nodes}
        self._pulled = {key: v for key, v in self._pulled.items() if v.node is None or id(v.node) not in nodes}

    # ---- what mappings see (`Tensors`)

    def value(self, name: str) -> Value:
        owner, own = self._owner(name)
        if owner.region is self.region:
            return owner._own_value(own)
        known = owner._own_known(own)
        if known is None:
            return self.region.pull(owner._own_value(own))
        key = id(owner), own
        if key not in self._pulled:
            self._pulled[key] = self.materialised(known, own)
        return self._pulled[key]

    def known(self, name: str) -> Static | None:
        owner, own = self._owner(name)
        return owner._own_known(own)

    def type(self, name: str) -> TensorType:
        owner, own = self._owner(name)
        if own in owner._values:
            return owner._values[own].type
        if own in owner._statics:
            return TensorType(owner._statics[own].shape, owner._statics[own].dtype)
        if own in owner._refs:
            return TensorType(owner._refs[own].dims, element_dtype(owner._refs[own].elem_type))
        raise UnsupportedError(f"{name!r} is a sequence or optional; a tensor is needed")

    def sequence(self, name: str) -> Sequenced | None:
        owner, own = self._owner(name)
        return owner._lists.get(own)

    def deciders(self, name: str) -> tuple[str, ...]:
        return self.region.deciders(self.value(name))

    def deciders_of(self, size: Size) -> tuple[str, ...]:
        return self.region.deciders(size)

    def note(self, text: str) -> None:
        self.run.result.notes.append(text)

    def fresh(self, name: str, low: int, high: Size | None) -> Size:
        return self.run.fresh(name, low, high, self.label)

    def item(self, item: Value | Static | TensorRef | Link) -> Value:
        """An item of a sequence as a value of this scope's graph."""
        if isinstance(item, Value):
            return self.region.pull(item)
        if isinstance(item, Static):
            return self.materialised(item, "")
        if isinstance(item, TensorRef):
            return self.graph.constant(item.array())
        found: Value = item.scope.value(item.name)
        return self.region.pull(found)

    # ---- tensors of this scope

    def _own_value(self, name: str) -> Value:
        if name in self._lists or name in self._tainted:
            raise UnsupportedError(f"{name!r} is a sequence or optional; a tensor is needed")
        if name not in self._values:
            made = self._leaf(name) if name in self._refs else self.materialised(self._statics[name], name)
            self._values[name] = made
        return self._values[name]

    def _own_known(self, name: str) -> Static | None:
        if name in self._statics:
            return self._statics[name]
        ref = self._refs.get(name)
        if ref is None or ref.size > LIMIT or ref.elem_type == STRING or not self._is_constant(name):
            return None
        found = static_array(ref.array(), element_dtype(ref.elem_type))
        self._statics[name] = found
        return found

    def _leaf(self, name: str) -> Value:
        """An initializer: integers of up to 1024 elements and single numbers are constants, others params.

        The data of a param is a view of the file, aligned or not: whoever loads it copies it once.
        """
        ref = self._refs[name]
        dtype = element_dtype(ref.elem_type)
        if self._is_constant(name):
            return self.graph.constant(self._constant_data(ref), name=name)
        graph = self.region.root.graph
        unique = f"{self.prefix}{name}"
        while unique in self.run.leaves:
            unique += "'"
        self.run.leaves.add(unique)
        lacks = ref.lacks()
        if lacks:
            self.run.result.lacking[ref.name] = lacks
        data = ref.array(aligned=False) if self.run.weights and not lacks else None
        return self.region.pull(graph.param(unique, ref.dims, dtype, data=data))

    def _constant_data(self, ref: TensorRef) -> np.ndarray[Any, np.dtype[Any]]:
        """The data of a constant, a view of the file if it is large; where weights are not wanted, what stands for it.

        Such numbers differ from one constant to the next along the last axis, so that no pass takes two for equal.
        """
        if ref.size <= LIMIT or ref.elem_type == STRING:
            return ref.array()
        if self.run.weights:
            return ref.array(aligned=False)
        self.run.placeholders += 1
        digits = self.run.placeholders.to_bytes(8, "little")
        row = np.resize(np.unpackbits(np.frombuffer(digits, np.uint8)), ref.dims[-1:]).astype(ref.dtype)
        return np.broadcast_to(row, ref.dims) if ref.is_copied else unread(row, ref.dims, aligned=ref.zero_copy)

    def _is_constant(self, name: str) -> bool:
        if name in self._constants or name in self.pinned:
            return True
        return _is_small(self._refs[name]) and name not in self.overridable

    def materialised(self, static: Static, name: str) -> Value:
        """Sizes as a tensor, for an op that computes with them."""
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
        return self.graph.add(op, *values, provenance=(self.label,))[0]

    def initialize(self, refs: Mapping[str, TensorRef], constant: bool = False) -> None:
        """Defines initializers; `constant` ones can't be params."""
        self._refs.update(refs)
        if constant:
            self._constants.update(refs)

    def bind(self, name: str, made: Mapped) -> None:
        """Defines a tensor."""
        if isinstance(made, Static):
            self._statics[name] = made
        elif isinstance(made, TensorRef):
            self._refs[name] = made
            self._constants.add(name)
        elif isinstance(made, ListOf | StackOf | Appending):
            self._lists[name] = made
        elif isinstance(made, Link):
            self._links[name] = made
        elif isinstance(made, Value):
            made.name = made.name or name
            self._values[name] = made
        else:
            self._tainted.add(name)

    # ---- nodes

    def walk(self, nodes: Sequence[NodeProto], outputs: Iterable[str]) -> int:
        """Imports the nodes that the outputs depend on; how many were left out."""
        outputs = tuple(outputs)
        live = live_nodes(in_order(nodes), outputs)
        self.made = {name for node in live for name in node.outputs}
        self.wanted = frozenset(name for node in live for name in reads(node)).union(outputs)
        for number, node in enumerate(live):
            report("read", number / len(live))
            known = len(self.graph.guards), len(self.graph.nodes)
            self._node(node)
            if self.run.parts is not None:
                self.run.parts.learn(self.graph.guards[known[0] :], self.graph.nodes[known[1] :])
        for name in outputs:
            if not self.exists(name):
                raise ModelFormatError(f"{self.run.model.path}: nothing makes the output {name!r}")
        return len(nodes) - len(live)

    def subgraph(self, graph: GraphProto, region: Region, label: str, formal: Mapping[str, Mapped]) -> Scope:
        """Imports a subgraph of a node into `region`, with its inputs bound."""
        child = Scope(self.run, region, self.opsets, self, f"{label}/", self.attributes)
        child.initialize(graph.initializers)
        child.pinned = self.pinned | {n for n, ref in graph.initializers.items() if ref.size <= LIMIT}
        for name, made in formal.items():
            child.bind(name, made)
        child.walk(graph.nodes, [o.name for o in graph.outputs])
        return child

    def _node(self, node: NodeProto) -> None:
        self.label = self.prefix + label_of(node)
        self.run.count(self.label)
        for name in node.inputs:
            if name and not self.exists(name):
                reads = f"{self.run.model.path}: node {self.label!r} reads {name!r}, which"
                if name in self.made:
                    raise ModelFormatError(f"{reads} needs an output of this node first: the nodes are in a cycle")
                raise ModelFormatError(f"{reads} no input, initializer or node before it makes")
        for i, name in enumerate(node.outputs):
            if name and (self.has(name) or name in node.outputs[:i]):
                raise ModelFormatError(f"{self.run.model.path}: node {self.label!r} makes {name!r} a second time")
        try:
            with collect_guards() as guards:  # of shapes that become no node, as where Expand changes nothing
                outputs = self._mapped(self._resolved(node))
            self.graph.require(guards, (self.label,))
        except NotStaticError as error:
            self._missing(node, f"a size can't be told at import: {error}", error.inputs)
        except ModelFormatError:
            raise
        except ShapeError as error:
            self.run.result.misfits.append(error)
            self._taint(node)
        except RlxError as error:
            self._missing(node, str(error).removeprefix(f"node {self.label!r}: "), getattr(error, "inputs", ()))
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            self._missing(node, f"its attributes or inputs make no sense together: {type(error).__name__}: {error}")
        else:
            self._bind_all(node, outputs)

    def _resolved(self, node: NodeProto) -> NodeProto:
        """The node with attributes that refer to the enclosing function's replaced, and those it lacks left out."""
        if self.attributes is None or not any(a.ref for a in node.attributes.values()):
            return node
        found = {
            name: replace(self.attributes[a.ref], name=name) if a.ref else a
            for name, a in node.attributes.items()
            if not a.ref or a.ref in self.attributes
        }
        return replace(node, attributes=found)

    def _mapped(self, node: NodeProto) -> Sequence[Mapped]:
        """The node's outputs; `TAINTED` where its inputs come from missing nodes."""
        function = self.run.model.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            return self._call(node, function)
        entry = find_op(node, self.opsets)
        result = self.run.result
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if any(n and self.is_tainted(n) for n in node.inputs):
            result.unchecked += 1
            result.supported[name] += 1
            return (TAINTED,) * len(node.outputs)
        ctx = NodeContext(self, node, opset_of(node.domain, self.opsets), self.label, self.wanted)
        made: Mapped | Sequence[Mapped] | None = run_static(ctx)
        if made is None:
            made = entry.handler(ctx)
        ctx.check_attributes()
        result.supported[name] += 1
        return made if isinstance(made, tuple) else (made,)

    def _call(self, node: NodeProto, function: FunctionProto) -> Sequence[Mapped]:
        """Inlines a function of the model."""
        key = (function.domain, function.name, function.overload)
        if key in self.run.calls or len(self.run.calls) >= MAX_CALLS:
            raise UnsupportedError(f"functions call each other deeper than {MAX_CALLS}, or themselves")
        missing = [a for a in function.attributes if a not in node.attributes]
        if len(node.inputs) > len(function.inputs) or len(node.outputs) > len(function.outputs):
            counts = f"{len(function.inputs)} inputs and {len(function.outputs)} outputs"
            raise UnsupportedError(f"the function takes {counts}; the node has more")
        self.run.calls.append(key)
        try:
            given = {a: node.attributes[a] for a in function.attributes if a not in missing}
            given |= {a: node.attributes.get(a, default) for a, default in function.attribute_defaults.items()}
            child = Scope(self.run, self.region, function.opsets or self.opsets, None, f"{self.label}/", given)
            child.pinned = self.pinned
            absent = set()
            for i, formal in enumerate(function.inputs):
                actual = node.inputs[i] if i < len(node.inputs) else ""
                if actual:
                    child.bind(formal, Link(self, actual))
                else:
                    absent.add(formal)
            nodes = function.nodes if not absent else [without(inner, absent) for inner in function.nodes]
            wanted = [n for n, o in zip(function.outputs, node.outputs, strict=False) if o in self.wanted]
            child.walk(nodes, wanted)
        finally:
            self.run.calls.pop()
        return tuple(Link(child, n) if n in wanted else None for n in function.outputs)

    def _bind_all(self, node: NodeProto, outputs: Sequence[Mapped]) -> None:
        for i, name in enumerate(node.outputs):
            made = outputs[i] if i < len(outputs) else None
            if not name:
                continue
            if made is not None:
                self.bind(name, made)
            elif name in self.wanted:
                self._missing(node, f"its output {i} ({name!r}) is not supported")
                return

    def _missing(self, node: NodeProto, reason: str, inputs: tuple[str, ...] = ()) -> None:
        missing = self.run.result.missing
        opset = opset_of(node.domain, self.opsets)
        missing.append(MissingNode(self.label, node.op_type, reason, node.domain, opset, inputs))
        for inner in inner_nodes(node):
            try:
                if (inner.domain, inner.op_type, inner.overload) not in self.run.model.functions:
                    find_op(inner, self.opsets)
            except UnsupportedError as error:
                opset = opset_of(inner.domain, self.opsets)
                found = MissingNode(f"{self.label}/{label_of(inner)}", inner.op_type, str(error), inner.domain, opset)
                missing.append(found)
        self._taint(node)

    def _taint(self, node: NodeProto) -> None:
        self._tainted.update(name for name in node.outputs if name and not self.has(name))


def _bodies(model: ModelFile) -> Iterator[Sequence[NodeProto]]:
    """The nodes of the graph and of each function."""
    yield model.graph.nodes
    for function in model.functions.values():
        yield function.nodes


def label_of(node: NodeProto) -> str:
    """The node's name, or what tells it apart where it has none."""
    return node.name or f"{node.op_type}:{next((o for o in node.outputs if o), '?')}"


def _is_small(ref: TensorRef) -> bool:
    dtype = element_dtype(ref.elem_type)
    return ref.size == 1 or dtype.kind == "s" or (dtype.kind in "iub" and ref.size <= LIMIT)
