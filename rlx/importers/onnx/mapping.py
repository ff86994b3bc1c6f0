"""The table of ONNX ops, and what a mapping function sees of a node.

`@onnx_op("Softmax", since=13)` makes a function the meaning of that op from opset 13 on, until a later entry of the
same op takes over. It gets a `NodeContext` and returns the values of the node's outputs. `@static_op("Concat")`
functions carry an op out on arrays known at import; they are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from rlx.errors import DTypeError, RlxError, ShapeError
from rlx.importers.onnx.dynamic import sizes_of
from rlx.importers.onnx.model import GraphProto, NodeProto
from rlx.importers.onnx.symbolic import NotStaticError, Static
from rlx.importers.onnx.tensor import ELEMENT_TYPES, TensorRef, text_of
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Graph, Operator, TensorType, Value
from rlx.ir.shape import Size
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Reshape, Transpose
from rlx.records import dataclass, field

__all__ = [
    "DOMAINS",
    "MICROSOFT",
    "ML",
    "NEWEST_OPSET",
    "OLDEST_OPSET",
    "PREVIEW",
    "STATIC_OPS",
    "TAINTED",
    "TRAINING",
    "UNCHANGED",
    "Appending",
    "Link",
    "ListOf",
    "Mapped",
    "NodeContext",
    "Sequenced",
    "StackOf",
    "Tainted",
    "Tensors",
    "UnsupportedError",
    "element_dtype",
    "find_op",
    "onnx_op",
    "op_table",
    "opset_of",
    "run_static",
    "static_inputs",
    "static_op",
]

OLDEST_OPSET, NEWEST_OPSET = 7, 28
ML, MICROSOFT, PREVIEW, TRAINING = "ai.onnx.ml", "com.microsoft", "ai.onnx.preview", "ai.onnx.preview.training"
DOMAINS = {  # oldest and newest version of each
    "": (OLDEST_OPSET, NEWEST_OPSET),
    ML: (1, 5),
    MICROSOFT: (1, 1),
    PREVIEW: (1, 1),
    TRAINING: (1, 1),
}
# Ops of older models that are what they were in the oldest opset, by the opset that last changed them before it.
UNCHANGED = {
    1: "ArgMax ArgMin Constant Conv ConvTranspose DepthToSpace Flatten Gather GlobalAveragePool GlobalMaxPool Hardmax "
    "Identity If LRN LogSoftmax LpNormalization MatMul MaxPool MaxRoiPool Not RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSum ReduceSumSquare Shape Size Slice Softmax Softplus Softsign SpaceToDepth Squeeze TopK "
    "Transpose Unsqueeze",
    2: "GlobalLpPool LpPool Pad Split",
    4: "Concat",
    5: "Reshape",
    6: "Abs Cast Ceil Clip Elu Exp Floor HardSigmoid InstanceNormalization LeakyRelu Log Max Mean Min Neg Reciprocal "
    "Relu Selu Sigmoid Sqrt Sum Tanh Tile",
}


class Tainted:
    """Stands for the outputs of a node whose missing parts have been listed already."""


TAINTED = Tainted()


@dataclass(frozen=True)
class Link:
    """The tensor `name` of another scope: an output of an inlined function or branch."""

    scope: Any
    name: str


@dataclass(frozen=True)
class ListOf:
    """An ONNX sequence, or an optional (of no or one item): its tensors, known one by one at import.

    `absent`: an optional without an element, which one that holds an empty sequence is not.
    """

    items: tuple[Value | Static | TensorRef | Link, ...]
    absent: bool = False


@dataclass(frozen=True)
class StackOf:
    """An ONNX sequence of as many tensors as the run decides: the rows of one tensor."""

    rows: Value


@dataclass(frozen=True)
class Appending:
    """A sequence that a loop carries, as its body knows it: what has been appended in this round."""

    items: tuple[Link, ...]


Sequenced = ListOf | StackOf | Appending
Mapped = Value | Static | TensorRef | Link | Sequenced | Tainted | None  # None: an output that nothing reads
Handler = Callable[["NodeContext"], Mapped | tuple[Mapped, ...]]
H = TypeVar("H", bound=Handler)


class UnsupportedError(RlxError):
    """Why a node can't be imported; it can be where the values of `inputs` of the model are known."""

    def __init__(self, reason: str, inputs: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.inputs = tuple(inputs)


@dataclass(frozen=True)
class Entry:
    """What an op means in opsets `since` to `until` (None: still)."""

    since: int
    until: int | None
    static: tuple[int, ...]  # the inputs that must be known at import
    handler: Handler


_TABLE: dict[tuple[str, str], list[Entry]] = {}  # by domain and name
STATIC_OPS: dict[str, Handler] = {}


def onnx_op(
    name: str, since: int = 1, until: int | None = None, static: tuple[int, ...] = (), domain: str = ""
) -> Callable[[H], H]:
    """Decorator: the function maps op `name` of opsets `since` to `until`.

    Initializers that inputs `static` are computed from are read at import.
    """

    def add(handler: H) -> H:
        entries = _TABLE.setdefault((domain, name), [])
        entries.append(Entry(since, until, static, handler))
        entries.sort(key=lambda e: e.since)
        return handler

    return add


def static_op(*names: str) -> Callable[[H], H]:
    """Decorator: the function carries these ops out on arrays known at import."""

    def add(handler: H) -> H:
        STATIC_OPS.update(dict.fromkeys(names, handler))
        return handler

    return add


def find_op(node: NodeProto, opsets: dict[str, int]) -> Entry:
    """The entry for a node; `UnsupportedError` says why there is none."""
    if node.domain in ("com.microsoft.nchwc", "com.ms.internal.nhwc"):
        raise UnsupportedError(
            f"ops of {node.domain} are what ONNX Runtime made of the model for one machine when it saved it optimised; "
            "give the model from before that"
        )
    if node.domain not in DOMAINS:
        raise UnsupportedError(f"ops of the domain {node.domain!r} are not supported")
    oldest, newest = DOMAINS[node.domain]
    opset = opset_of(node.domain, opsets)
    older = not node.domain and any(node.op_type in ops.split() for since, ops in UNCHANGED.items() if since <= opset)
    if opset > newest or (opset < oldest and not older):
        raise UnsupportedError(f"opset {opset} is outside {oldest} to {newest}; convert the model")
    entries = _TABLE.get((node.domain, node.op_type), [])
    found = [e for e in entries if e.since <= opset]
    if not entries:
        raise UnsupportedError("this op is not supported")
    if not found:
        raise UnsupportedError(f"this op came with opset {entries[0].since}, the model is of opset {opset}")
    until = found[-1].until
    if until is not None and opset > until:
        raise UnsupportedError(f"this op left ONNX after opset {until}, the model is of opset {opset}")
    return found[-1]


def opset_of(domain: str, opsets: dict[str, int]) -> int:
    """The version of a domain; 1 where a model that uses it does not say (as exporters do for com.microsoft)."""
    return opsets.get(domain, 1 if domain else 0)


def static_inputs(node: NodeProto, opsets: dict[str, int]) -> Iterable[str]:
    """Names of the inputs of a node that have to be known at import."""
    try:
        entry = find_op(node, opsets)
    except UnsupportedError:
        return ()
    return [node.inputs[i] for i in entry.static if i < len(node.inputs)]


def element_dtype(elem_type: int) -> DType:
    """The element type for a TensorProto.DataType; `DTypeError` names one that there is no counterpart for."""
    element = ELEMENT_TYPES.get(elem_type)
    if element is None:
        raise DTypeError(f"the element type {elem_type} is not known")
    try:
        return dtype_of(element.dtype)
    except DTypeError:
        raise DTypeError(f"elements of type {element.name} are not supported") from None


class Tensors(Protocol):
    """The tensors of the ONNX graph that exist so far, by name."""

    graph: Graph

    def value(self, name: str) -> Value:
        """The tensor as a graph value; a leaf or constant is made when it is first asked for."""
        ...

    def known(self, name: str) -> Static | None:
        """The elements of a small tensor that is known at import, else None."""
        ...

    def type(self, name: str) -> TensorType: ...

    def sequence(self, name: str) -> Sequenced | None:
        """The items of a sequence or optional, None for a tensor."""
        ...

    def deciders(self, name: str) -> tuple[str, ...]:
        """The inputs of the model that a tensor is computed from, if knowing their values would make it known."""
        ...

    def deciders_of(self, size: Size) -> tuple[str, ...]:
        """The same for a size."""
        ...

    def note(self, text: str) -> None: ...

    def fresh(self, name: str, low: int, high: Size | None) -> Size:
        """A size that a node produces, named after it; bounds that the user gave for that name win."""
        ...


_NO_DEFAULT: Any = object()


@dataclass
class NodeContext:
    """One node, its attributes and inputs. Attributes that a mapping never looks at count as not supported."""

    tensors: Tensors
    node: NodeProto
    opset: int
    label: str
    wanted: frozenset[str]  # tensors that something reads
    seen: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.tensors.graph

    def fail(self, reason: str) -> NoReturn:
        raise UnsupportedError(reason)

    def undecided(self, i: int, reason: str) -> NoReturn:
        """Refuses the node for as long as input i is run-time data."""
        raise UnsupportedError(reason, self.tensors.deciders(self.name(i)))

    def note(self, text: str) -> None:
        """Says something about this node that a user of the graph has to know."""
        self.tensors.note(f"{self.node.op_type} {self.label!r} {text}")

    # ---- inputs

    def has(self, i: int) -> bool:
        """Whether input i is given."""
        return i < len(self.node.inputs) and self.node.inputs[i] != ""

    def name(self, i: int) -> str:
        if not self.has(i):
            self.fail(f"input {i} is missing")
        return self.node.inputs[i]

    def value(self, i: int = 0) -> Value:
        return self.tensors.value(self.name(i))

    def optional(self, i: int) -> Value | None:
        """Input i, or None where it is absent."""
        return self.value(i) if self.has(i) else None

    def sequence(self, i: int = 0) -> ListOf:
        """Input i, which has to be a sequence or an optional."""
        found = self.tensors.sequence(self.name(i))
        if found is None:
            self.fail(f"input {i} ({self.name(i)!r}) is no sequence or optional that is known at import")
        if not isinstance(found, ListOf):
            self.fail(f"the length of the sequence {self.name(i)!r} depends on the run")
        return found

    def sequenced(self, i: int = 0) -> Sequenced | None:
        """Input i if it is a sequence of whatever kind, else None."""
        return self.tensors.sequence(self.name(i))

    def values(self) -> list[Value]:
        """All inputs; absent ones at the end are left out."""
        return [self.value(i) for i in range(len(self.node.inputs)) if i == 0 or self.has(i)]

    def type(self, i: int = 0) -> TensorType:
        return self.tensors.type(self.name(i))

    def known(self, i: int = 0) -> Static | None:
        """Input i if it is small and known at import, else None."""
        return self.tensors.known(self.name(i))

    def static(self, i: int, what: str) -> Static:
        """Input i, which has to be known at import."""
        found = self.tensors.known(self.name(i))
        if found is None:
            self.undecided(i, f"{what}, {self.name(i)!r}, must be known at import, but depends on run-time data")
        return found

    def sizes(self, i: int, what: str) -> list[Size]:
        """The elements of integer input i as sizes; those that are run-time data become dims that the run decides."""
        found = self.tensors.known(self.name(i))
        if found is not None:
            return found.sizes()
        if not all(isinstance(size, int) for size in self.type(i).shape):
            self.undecided(
                i, f"{what}, {self.name(i)!r}, has an unknown number of elements: it must be known at import"
            )
        return self.sizes_of(self.value(i), what)

    def sizes_of(self, x: Value, what: str, most: int | None = None) -> list[Size]:
        """The elements of an integer vector or scalar as sizes, see `sizes`; none is above `most`."""
        return sizes_of(self.graph, x, what, lambda n: self.fresh(f"size{n}", 0, most), self.label)

    def ints_of(self, i: int, what: str) -> tuple[int, ...]:
        try:
            return tuple(self.static(i, what).ints())
        except NotStaticError as error:
            error.inputs = self.tensors.deciders(self.name(i))
            raise

    # ---- outputs

    def wants(self, i: int) -> bool:
        """Whether output i is read by anything."""
        return i < len(self.node.outputs) and self.node.outputs[i] in self.wanted

    def add(self, op: Operator, *inputs: Value) -> Value:
        """The first output of the op applied to values."""
        return self.add_all(op, *inputs)[0]

    def add_all(self, op: Operator, *inputs: Value) -> tuple[Value, ...]:
        return self.graph.add(op, *inputs, provenance=(self.label,))

    def constant(self, value: object, dtype: DType) -> Value:
        with np.errstate(all="ignore"):
            return self.graph.constant(np.asarray(value).astype(dtype.numpy))

    def cast(self, x: Value, dtype: DType) -> Value:
        """x in that element type."""
        return x if x.dtype is dtype else self.add(Cast(dtype), x)

    def reshape(self, x: Value, *shape: Size) -> Value:
        """x in that shape."""
        return x if x.shape == shape else self.add(Reshape(shape), x)

    def transpose(self, x: Value, *perm: int) -> Value:
        """x with its axes in that order."""
        return x if perm == tuple(range(x.rank)) else self.add(Transpose(perm), x)

    def fresh(self, what: str, low: int, high: Size | None) -> Size:
        """A size that this node produces: "<first output>.<what>", from `low` to the largest value of `high`."""
        return self.tensors.fresh(f"{next(o for o in self.node.outputs if o)}.{what}", low, high)

    # ---- attributes

    def _attribute(self, name: str, kind: str, default: Any) -> Any:
        self.seen.add(name)
        found = self.node.attributes.get(name)
        if found is None:
            if default is _NO_DEFAULT:
                self.fail(f"the attribute {name!r} is missing")
            return default
        if found.ref:
            self.fail(f"the attribute {name!r} refers to {found.ref!r} of a function")
        if found.kind != kind:
            self.fail(f"the attribute {name!r} is of type {found.kind}; expected {kind}")
        return found.value

    def integer(self, name: str, default: int = _NO_DEFAULT) -> int:
        found: int = self._attribute(name, "INT", default)
        return found

    def flag(self, name: str, default: int = 0) -> bool:
        return self.integer(name, default) != 0

    def real(self, name: str, default: float = _NO_DEFAULT) -> float:
        found: float = self._attribute(name, "FLOAT", default)
        return found

    def text(self, name: str, default: str = _NO_DEFAULT) -> str:
        return text_of(self._attribute(name, "STRING", default))

    def ints(self, name: str, default: Sequence[int] = _NO_DEFAULT) -> tuple[int, ...]:
        return tuple(self._attribute(name, "INTS", default))

    def floats(self, name: str, default: Sequence[float] = _NO_DEFAULT) -> tuple[float, ...]:
        return tuple(self._attribute(name, "FLOATS", default))

    def texts(self, name: str, default: Sequence[str] = _NO_DEFAULT) -> tuple[str, ...]:
        return tuple(map(text_of, self._attribute(name, "STRINGS", default)))

    def subgraph(self, name: str) -> GraphProto:
        found: GraphProto = self._attribute(name, "GRAPH", _NO_DEFAULT)
        return found

    def tensor(self, name: str) -> TensorRef | None:
        given = self.node.attributes.get(name)
        kind = "SPARSE_TENSOR" if given is not None and given.kind == "SPARSE_TENSOR" else "TENSOR"
        found: TensorRef | None = self._attribute(name, kind, None)
        return found

    def given(self, name: str) -> bool:
        """Whether the attribute is present."""
        return name in self.node.attributes

    def ignore(self, *names: str) -> None:
        """Attributes that have no effect on inference."""
        self.seen.update(names)

    def require(self, name: str, value: int | str) -> None:
        """Reports the node unless the attribute is absent or has this value."""
        found = self.text(name, str(value)) if isinstance(value, str) else self.integer(name, value)
        if found != value:
            self.fail(f"{name}={found!r} is not supported, only {value!r}")

    def check_attributes(self) -> None:
        """Reports attributes that nothing looked at."""
        unknown = sorted(set(self.node.attributes) - self.seen)
        if unknown:
            self.fail(f"the attribute {unknown[0]!r} is not known for this op in opset {self.opset}")


def run_static(ctx: NodeContext) -> Static | tuple[Static, ...] | None:
    """The node carried out at import where all its inputs are known and small, else None."""
    handler = None if ctx.node.domain else STATIC_OPS.get(ctx.node.op_type)
    if handler is None:
        return None
    try:
        return handler(ctx)  # type: ignore[return-value]
    except NotStaticError:
        return None
    except (IndexError, ValueError) as error:
        if isinstance(error, RlxError):
            raise
        raise ShapeError(f"{ctx.node.op_type}: {error}") from error


def op_table() -> Mapping[tuple[str, str], Sequence[Entry]]:
    """What is supported: entries, oldest first, by domain and op."""
    return _TABLE
