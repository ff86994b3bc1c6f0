"""The graph: values in SSA form, the nodes that make them, and the leaves they start from."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.boundary import bounded_class
from rlx.errors import CompileError, DTypeError, NameNotFound, OptionError, RlxError, ShapeError
from rlx.ir.dtype import dtype_of
from rlx.ir.encoding import Encoding
from rlx.ir.mapped import lies_in_file
from rlx.ir.shape import Dim, Guard, Size, Symbol, check_text, collect_guards, symbols
from rlx.ir.value import Array, TensorType, Value, const_value
from rlx.records import dataclass, field

__all__ = [
    "BACKWARD",
    "OPERATORS",
    "Array",
    "Graph",
    "Node",
    "Operator",
    "Output",
    "Result",
    "TensorType",
    "Value",
    "const_value",
    "count_readers",
    "refuse_masked",
]


@runtime_checkable
class Operator(Protocol):
    """What the graph needs of an op: its name, attributes and type rule. (rlx.ops.Op is the full class.)"""

    @property
    def op_name(self) -> str: ...

    def attributes(self) -> dict[str, Any]: ...

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph]) -> tuple[TensorType, ...]: ...


BACKWARD = "gradient of "  # what the provenance of nodes begins with that compute cotangents
MAX_NESTING = 48  # regions within each other
OPERATORS: dict[str, Any] = {}  # op classes by name, filled in by rlx.ops so that the text form can name them


class NumberTooLarge(DTypeError, OverflowError):
    """A number that an element type does not hold."""


@dataclass(eq=False)
class Node:
    """One application of an op. `regions` are closed graphs: whatever they use of the outside is an input here.

    `provenance` names the nodes of the source (the ONNX node names, say) that this node stands for.
    """

    op: Operator
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    provenance: tuple[str, ...] = ()
    regions: tuple[Graph, ...] = ()

    def __repr__(self) -> str:
        return f"<node {self.label}>"

    @property
    def label(self) -> str:
        """How messages name this node: the op and where it came from."""
        source = ", ".join(repr(p) for p in self.provenance[:3]) or repr(self.outputs[0].name if self.outputs else "?")
        return f"{getattr(self.op, 'title', self.op.op_name)} {source}"


@dataclass(frozen=True, eq=False)
class Output:
    """A named result of the graph."""

    name: str
    value: Value


@dataclass(frozen=True)
class Result:
    """What a run gives under a name of the file that the graph is of.

    `kind`: "tensor" is the one output named here, "list" the list of them (an ONNX sequence), "rows" the list of the
    rows of one (a sequence whose length the run decides), "absent" None (an optional without an element).
    """

    name: str
    kind: str
    outputs: tuple[str, ...]


@bounded_class(CompileError)
@dataclass(eq=False)
class Graph:
    """A computation from inputs, params, constants and states to named outputs; nodes are in topological order.

    `became` says of a graph that was made from another one what the values of that one are here; those that nothing
    needed any more are missing. None: it was made from none. `arena_budget` are the bytes that a gradient in a legal
    graph allows for the arena of its program, None where it says nothing.
    """

    name: str = "graph"
    inputs: list[Value] = field(default_factory=list)
    params: list[Value] = field(default_factory=list)
    constants: list[Value] = field(default_factory=list)
    states: list[Value] = field(default_factory=list)
    updates: dict[str, Value] = field(default_factory=dict)  # state name -> its value after the run
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # of a file with sequences or optionals: all that a run gives
    became: dict[Value, Value] | None = field(default=None, repr=False)
    arena_budget: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OptionError(f"the name of a graph is a str, got {self.name!r}")
        check_text("graph", self.name)

    def result(self, name: str, kind: str, outputs: Sequence[str]) -> None:
        """Adds what a run gives under a name; see `Result`. `OptionError` for outputs that there are not."""
        known, counts = {o.name for o in self.outputs}, {"tensor": (1,), "rows": (1,), "absent": (0,)}
        fits = kind == "list" or len(outputs) in counts.get(kind, ())
        if not fits or not known.issuperset(outputs) or any(r.name == name for r in self.results):
            raise OptionError(f"graph {self.name!r}: {name!r} can't be a {kind!r} of the outputs {list(outputs)}")
        check_text(f"graph {self.name!r}", name)
        self.results.append(Result(name, kind, tuple(outputs)))

    # ---- leaves

    def _leaf(self, kind: str, where: list[Value], name: str, type: TensorType) -> Value:
        if not isinstance(name, str):
            raise OptionError(f"graph {self.name!r}: the name of a leaf is a str, got {name!r}")
        check_text(f"graph {self.name!r}", name)
        if not name or any(v.name == name for v in (*self.inputs, *self.params, *self.states)):
            raise OptionError(f"graph {self.name!r}: the name {name!r} is empty or already taken by another leaf")
        if type.dtype.kind == "s" and kind != "input":
            raise DTypeError(f"{kind} {name!r}: strings are inputs, outputs or constants, never a {kind}")
        value = Value(self, type, kind, name)
        where.append(value)
        return value

    def input(self, name: str, shape: Sequence[Size], dtype: object = "f32") -> Value:
        """Declares an input of `shape` (ints and `Dim`s); its array is given at each run."""
        return self._leaf("input", self.inputs, name, _declared(f"input {name!r}", shape, dtype))

    def param(
        self,
        name: str,
        shape: Sequence[Size] | None = None,
        dtype: object = None,
        *,
        data: Array | None = None,
        encoding: str | Encoding | None = None,
    ) -> Value:
        """Declares a parameter: a weight set before the first run (or given here as `data`) and kept between runs.

        `encoding` names a block format of floats; `data` is then the stored bytes (u8). Its shape is made of ints, the
        last a multiple of the block: elsewhere `ShapeError`, and `DTypeError` for other elements.
        """
        _checked_data(f"param {name!r}", data)
        if shape is None:
            if data is None or encoding is not None:
                raise ShapeError(f"param {name!r}: a shape is needed where no plain data is given")
            shape = data.shape
        if dtype is None:
            dtype = "f32" if data is None or encoding is not None else data.dtype
        type = _declared(f"param {name!r}", shape, dtype, encoding)
        if data is not None:
            check_array(f"param {name!r}", data, type)
        value = self._leaf("param", self.params, name, type)
        value.data = data
        return value

    def constant(self, value: object, dtype: object = None, name: str = "") -> Value:
        """A constant array: a copy, read-only, but of what lies in a mapped file, which stays there.

        Floats are rounded to `dtype`, to an infinity beyond its range. Raises `NumberTooLarge` for numbers that an
        integer type doesn't hold exactly, `DTypeError` for what is no array of numbers.
        """
        if isinstance(value, np.ndarray) and dtype is None and lies_in_file(value):
            return self._constant(value, name)
        from rlx.ir.casting import cast, rounds_twice  # here: who loads stored code makes no constants

        wanted = None if dtype is None else dtype_of(dtype)
        refuse_masked("constant", value)
        try:
            with usual_arithmetic():
                if wanted is not None and rounds_twice(wanted):
                    exact = np.asarray(value)
                    exact = exact.astype(np.float64) if exact.dtype == object else exact  # integers beyond i64
                    array = np.array(cast(exact, wanted), order="C")
                else:
                    array = np.array(value, dtype=None if wanted is None else wanted.numpy, order="C")
                if dtype is None and array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
                    array = array.astype(np.float32)  # a Python float is an f32, as in the field
                if wanted is not None and wanted.is_integer and not _equal(array, np.asarray(value)):
                    raise OverflowError(f"elements of {wanted} hold other numbers")
        except OverflowError as error:  # callers that know the op say it better
            raise NumberTooLarge(f"constant: {value!r:.40} does not fit: {error}") from None
        except (TypeError, ValueError) as error:
            raise DTypeError(f"constant: {type(value).__name__} can't be made an array: {error}") from None
        array.flags.writeable = False
        return self._constant(array, name, value)

    def _constant(self, array: Array, name: str, value: object = None) -> Value:
        try:
            held = dtype_of(array.dtype)
        except DTypeError as error:
            what = f"{value!r:.40}" if array.ndim == 0 else f"an array of {array.dtype}"
            raise DTypeError(f"{what} is no operand: {error}") from None
        const = Value(self, TensorType(array.shape, held), "const", name)
        const.data = array
        self.constants.append(const)
        return const

    def state(
        self,
        name: str,
        shape: Sequence[Size],
        dtype: object = "f32",
        *,
        initial: Array | None = None,
        encoding: str | Encoding | None = None,
    ) -> Value:
        """Declares what lives between runs; `initial` defaults to zeros. Give its new value with `update`.

        `encoding` names a block format of floats that runs can make; `initial` is then the stored bytes (u8), and the
        new value is made by `dynamic_update_slice` of rows that `encode` has made.
        """
        type = _declared(f"state {name!r}", shape, dtype, encoding, by_runs=True)
        if type.encoding is not None and not type.encoding.written:
            raise DTypeError(f"state {name!r}: no run makes blocks of {type.encoding.name}: use q8_0 or q4_0")
        _checked_data(f"state {name!r}", initial)
        if initial is not None:
            check_array(f"state {name!r}", initial, type)
        value = self._leaf("state", self.states, name, type)
        value.data = initial
        return value

    def update(self, state: Value, new: Value) -> None:
        """Makes `new` the value of `state` after each run."""
        if not isinstance(state, Value) or not isinstance(new, Value):
            raise OptionError(f"update takes a state and its new value, got {state!r:.40} and {new!r:.40}")
        if state.kind != "state" or state.graph is not self:
            raise OptionError(f"update: {state!r} is not a state of graph {self.name!r}")
        if new.type != state.type:
            way = "; give dynamic_update_slice rows that encode has made" if state.type.encoding is not None else ""
            raise ShapeError(f"update of state {state.name!r}: expected {state.type}, got {new.type}{way}")
        if state.name in self.updates:
            raise OptionError(f"state {state.name!r} already has an update")
        self.updates[state.name] = new

    # ---- nodes

    def add(
        self,
        op: Operator,
        *inputs: Value,
        name: str = "",
        provenance: Iterable[str] = (),
        regions: Sequence[Graph] = (),
    ) -> tuple[Value, ...]:
        """Appends a node and returns its outputs; types are inferred, and the guards that this needs recorded."""
        for value in inputs:
            if not isinstance(value, Value):
                raise OptionError(f"graph {self.name!r}: the inputs of a node are graph values, got {value!r:.40}")
            if value.graph is not self:
                raise OptionError(f"{op.op_name}: {value!r} belongs to another graph ({value.graph.name!r})")
        source = tuple(provenance)
        if regions and _nesting(regions) > MAX_NESTING:
            raise OptionError(f"{op.op_name}: more than {MAX_NESTING} regions within each other")
        try:
            with collect_guards() as guards:
                types = infer_node(op, inputs, regions)
        except RlxError as error:
            if source:
                error.args = (f"node {source[0]!r}: {error}",)
            raise
        self.require(guards, source)
        node = Node(op, tuple(inputs), (), source, tuple(regions))
        names = [name] if len(types) == 1 else [f"{name}.{i}" if name else "" for i in range(len(types))]
        numbered = enumerate(zip(types, names, strict=True))
        node.outputs = tuple(Value(self, t, "node", n, node, i) for i, (t, n) in numbered)
        self.nodes.append(node)
        return node.outputs

    def require(self, guards: Sequence[Guard], source: Sequence[str]) -> None:
        """Adds guards that are new; one says which node needs it."""
        for guard in guards:
            if not any(g.lhs == guard.lhs and g.rhs == guard.rhs for g in self.guards):
                why = f"node {source[0]!r}: {guard.why}" if source else guard.why
                self.guards.append(Guard(guard.lhs, guard.rhs, why))

    def output(self, value: Value, name: str = "") -> None:
        """Makes `value` a result named `name` (default: the value's own name, or `output<i>`)."""
        if not isinstance(value, Value) or not isinstance(name, str):
            raise OptionError(f"output: expected a graph value and a name, got {value!r} and {name!r}")
        check_text(f"graph {self.name!r}", name)
        if value.graph is not self:
            raise OptionError(f"output {name!r}: {value!r} belongs to another graph")
        name = name or value.name or f"output{len(self.outputs)}"
        if any(o.name == name for o in self.outputs):
            raise OptionError(f"graph {self.name!r}: there is already an output named {name!r}")
        self.outputs.append(Output(name, value))

    def __reduce__(self) -> tuple[Any, ...]:
        """By its text, as its nodes refer to each other in chains of any length."""
        from rlx.ir.text import constants_table, print_graph, read_graph

        data = {v.name: v.data for v in (*self.params, *self.states) if v.data is not None}
        ops = {type(node.op): None for node in self._all_nodes()}  # for their modules to be imported there
        return read_graph, (print_graph(self), constants_table(self), data, tuple(ops))

    def _all_nodes(self) -> Iterator[Node]:
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region._all_nodes()

    # ---- queries

    def dims(self) -> dict[str, Symbol]:
        """The symbols of shapes, attributes, guards and regions by name; `ShapeError` if a name has two meanings."""
        found: dict[str, Symbol] = {}
        for symbol in self._symbols():
            known = found.setdefault(symbol.name, symbol)
            if known != symbol:
                raise ShapeError(f"graph {self.name!r}: the dim {symbol.name!r} is declared as {known} and as {symbol}")
        return found

    def _symbols(self) -> Iterator[Symbol]:
        for value in self.values():
            for size in value.shape:
                yield from symbols(size)
        for node in self.nodes:
            for attribute in node.op.attributes().values():
                yield from _attribute_symbols(attribute)
            for region in node.regions:
                yield from region._symbols()
        for guard in self.guards:
            yield from symbols(guard.lhs)
            yield from symbols(guard.rhs)

    def values(self) -> Iterable[Value]:
        """All values: leaves first, then node outputs in order."""
        yield from (*self.inputs, *self.params, *self.states, *self.constants)
        for node in self.nodes:
            yield from node.outputs

    def users(self) -> dict[Value, list[Node]]:
        """For each value the nodes that read it (once for each reading)."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                found.setdefault(value, []).append(node)
        return found

    def find(self, name: str) -> Value:
        """The input, param or state of that name; `NameNotFound` lists what there is."""
        for value in (*self.inputs, *self.params, *self.states):
            if isinstance(name, str) and value.name == name:
                return value
        names = ", ".join(repr(v.name) for v in (*self.inputs, *self.params, *self.states))
        raise NameNotFound(f"graph {self.name!r} has no leaf {name!r}; it has {names or 'none'}")

    def __str__(self) -> str:
        from rlx.ir.text import print_graph

        return print_graph(self)


def infer_node(op: Operator, inputs: Sequence[Value], regions: Sequence[Graph]) -> tuple[TensorType, ...]:
    """The types of what a node gives: by those of its elements, or as they are stored where its op asks for that."""
    stored = getattr(op, "takes_stored", False)
    return op.infer_types([v.type if stored else v.type.decoded for v in inputs], regions)


def _nesting(regions: Sequence[Graph]) -> int:
    """How many of these regions and those in them lie within each other."""
    depth, level = 0, list(regions)
    while level:
        depth, level = depth + 1, [inner for region in level for node in region.nodes for inner in node.regions]
    return depth


def _attribute_symbols(attribute: object) -> Iterator[Symbol]:
    if isinstance(attribute, Dim):
        yield from symbols(attribute)
    elif isinstance(attribute, tuple):
        for item in attribute:
            yield from _attribute_symbols(item)


def _declared(
    what: str, shape: Sequence[Size], dtype: object, encoding: object = None, by_runs: bool = False
) -> TensorType:
    """The type of a leaf; errors name the leaf. `by_runs`: sizes of an encoded one but the last may be dims."""
    try:
        type = TensorType(shape, dtype, encoding)
        if type.encoding is not None:
            _check_encoded(type, type.encoding, by_runs)
    except RlxError as error:
        error.args = (f"{what}: {error}",)
        raise
    return type


def _check_encoded(type: TensorType, encoding: Encoding, by_runs: bool) -> None:
    if not encoding.native:
        raise DTypeError(f"encoding {encoding.name} is decoded when it is loaded: declare f32")
    if not type.dtype.is_float:
        raise DTypeError(f"encoding {encoding.name} stores floating-point elements, not {type.dtype}")
    told = type.shape[-1:] if by_runs else type.shape
    sizes = [size for size in told if isinstance(size, int)]
    if len(sizes) < len(told):
        raise ShapeError(f"encoding {encoding.name}: bytes don't tell the sizes of {type}: give ints")
    encoding.nbytes(sizes)


def _checked_data(what: str, data: Array | None) -> None:
    if data is not None and not isinstance(data, np.ndarray | np.generic):
        raise DTypeError(f"{what}: its value is a NumPy array, got {type(data).__name__}: np.asarray makes one")
    refuse_masked(what, data)


def _equal(made: Array, given: Array) -> bool:
    """Whether an array of integers holds the numbers that it was made of."""
    with np.errstate(invalid="ignore"):
        return given.dtype.kind not in "biuf" or np.array_equal(made.astype(given.dtype), given)


def refuse_masked(what: str, value: object) -> None:
    """Raises `DTypeError` for a masked array, also one in lists: taken as an array it would lose its mask."""
    module = sys.modules.get("numpy.ma")  # slow to import
    masked: Any = getattr(module, "MaskedArray", None)
    if masked is None:
        return
    parts, seen = [value], set[int]()  # lists may hold themselves
    while parts:
        if isinstance(part := parts.pop(), masked):
            raise DTypeError(f"{what}: a masked array: the mask would be lost; give the result of its filled()")
        if isinstance(part, list | tuple) and id(part) not in seen:
            seen.add(id(part))
            parts += (p for p in part if isinstance(p, (masked, list, tuple)))


def check_array(what: str, array: Array, type: TensorType) -> None:
    """Raises `DTypeError` or `ShapeError` unless the array can be the (initial) value of a leaf of that static type."""
    if type.encoding is not None:
        expected = type.nbytes()
        if array.dtype != np.uint8 or array.nbytes != expected:
            raise ShapeError(
                f"{what}: {type} is stored in {expected} bytes (u8); got {array.nbytes} bytes of {array.dtype}"
            )
        return
    if array.dtype != type.dtype.numpy:
        raise DTypeError(f"{what}: expected elements of type {type.dtype}, got {array.dtype}; convert the array first")
    fits = len(array.shape) == len(type.shape) and all(
        isinstance(want, Dim) or want == got for want, got in zip(type.shape, array.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{what}: expected shape ({', '.join(map(str, type.shape))}), got {array.shape}")


def count_readers(graph: Graph) -> Counter[Value]:
    """For each value the nodes that read it (each once), plus one if it is an output or an update."""
    readers = Counter({*(o.value for o in graph.outputs), *graph.updates.values()})
    for node in graph.nodes:
        readers.update(set(node.inputs))
    return readers
