"""The table of ONNX ops, and what a mapping function sees of a node.

`@onnx_op("Softmax", since=13)` makes a function the meaning of that op from opset 13 on, until a later entry of the
same op takes over. It gets a `NodeContext` and returns the values of the node's outputs. `@static_op("Concat")`
functions carry an op out on arrays known at import; they are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from rlx.errors import DTypeError, RlxError, ShapeError
from rlx.importers.onnx.model import NodeProto
from rlx.importers.onnx.symbolic import NotStaticError, Static
from rlx.importers.onnx.tensor import ELEMENT_TYPES, TensorRef
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Graph, Operator, TensorType, Value
from rlx.ir.shape import Size

__all__ = [
    "NEWEST_OPSET",
    "OLDEST_OPSET",
    "STATIC_OPS",
    "Mapped",
    "NodeContext",
    "Tensors",
    "UnsupportedError",
    "element_dtype",
    "find_op",
    "onnx_op",
    "run_static",
    "static_inputs",
    "static_op",
]

OLDEST_OPSET, NEWEST_OPSET = 7, 28

Mapped = Value | Static | TensorRef | None  # None: an output that nothing reads
Handler = Callable[["NodeContext"], Mapped | tuple[Mapped, ...]]
H = TypeVar("H", bound=Handler)


class UnsupportedError(RlxError):
    """Why a node can't be imported."""


@dataclass(frozen=True)
class Entry:
    """What an op means in opsets `since` to `until` (None: still)."""

    since: int
    until: int | None
    static: tuple[int, ...]  # the inputs that must be known at import
    handler: Handler


_TABLE: dict[str, list[Entry]] = {}
STATIC_OPS: dict[str, Handler] = {}


def onnx_op(name: str, since: int = 1, until: int | None = None, static: tuple[int, ...] = ()) -> Callable[[H], H]:
    """Decorator: the function maps op `name` of opsets `since` to `until`; inputs `static` must be known at import."""

    def add(handler: H) -> H:
        entries = _TABLE.setdefault(name, [])
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
    if node.domain:
        raise UnsupportedError(f"ops of the domain {node.domain!r} are not supported")
    opset = opsets.get("", 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UnsupportedError(f"opset {opset} is outside {OLDEST_OPSET} to {NEWEST_OPSET}; convert the model")
    entries = _TABLE.get(node.op_type, [])
    found = [e for e in entries if e.since <= opset]
    if not entries:
        raise UnsupportedError("this op is not supported")
    if not found:
        raise UnsupportedError(f"this op came with opset {entries[0].since}, the model is of opset {opset}")
    if found[-1].until is not None and opset > found[-1].until:
        raise UnsupportedError(f"this op left ONNX after opset {found[-1].until}, the model is of opset {opset}")
    return found[-1]


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
            self.fail(f"{what}, {self.name(i)!r}, must be known at import, but depends on run-time data")
        return found

    def sizes(self, i: int, what: str) -> list[Size]:
        return self.static(i, what).sizes()

    def ints_of(self, i: int, what: str) -> tuple[int, ...]:
        return tuple(self.static(i, what).ints())

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
        return self.graph.constant(np.asarray(value).astype(dtype.numpy))

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
        found = self._attribute(name, "STRING", default)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)

    def ints(self, name: str, default: Sequence[int] = _NO_DEFAULT) -> tuple[int, ...]:
        return tuple(self._attribute(name, "INTS", default))

    def floats(self, name: str, default: Sequence[float] = _NO_DEFAULT) -> tuple[float, ...]:
        return tuple(self._attribute(name, "FLOATS", default))

    def tensor(self, name: str) -> TensorRef | None:
        found: TensorRef | None = self._attribute(name, "TENSOR", None)
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
    handler = STATIC_OPS.get(ctx.node.op_type)
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
