"""The reference device: runs a graph node by node with the NumPy definitions of its ops; all devices are held to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.base import Availability, Executable, LibraryBackend, Rates
from rlx.backends.memory import DeviceMemory
from rlx.backends.states import StatefulExecutable
from rlx.errors import ExecutionError, OptionError, RlxError, ShapeError, no_such
from rlx.ir.extents import bind_extents, bind_result, check_guards, check_out, initial_state
from rlx.ir.finite import bad_elements, is_trappable, trapped
from rlx.ir.graph import Array, Graph, Node, TensorType, Value, check_array
from rlx.ir.shape import evaluate, symbols
from rlx.ir.strings import as_result, as_strings
from rlx.ops.base import Op
from rlx.ops.control import Control
from rlx.options import CompileOptions

__all__ = ["ReferenceBackend", "Trace", "bind_leaves", "run_graph", "run_node"]

Trace = Callable[[Node, tuple[Array, ...]], None]


@usual_arithmetic()
def run_graph(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array] | None = None,
    states: dict[str, Array] | None = None,
    *,
    trace: Trace | None = None,
) -> dict[str, Array]:
    """The outputs by name, as fresh arrays.

    A param that is not in `params` has the data it was declared with; encoded leaves are given as stored bytes.
    `states` holds the states by name (missing: their initial value, or zeros) and is updated in place after the run.
    `trace` is called with each node and its results, those of regions too. Raises `NameNotFound`, `OptionError` (a leaf
    without value), `ShapeError` and `DTypeError` for what is given, `ExecutionError` for what happens in the run, among
    it a result that is not of the type its op infers.
    """
    held = {} if states is None else states
    leaves, extents = bind_leaves(graph, inputs, params, held)
    with np.errstate(all="ignore"):
        outputs, updates = _run(graph, leaves, extents, trace)
    for state in graph.states:
        encoding = state.type.encoding
        if encoding is not None and state.name in updates:  # elements that were encoded once: this changes none
            updates[state.name] = encoding.encode(updates[state.name])
    held.update(updates)
    return outputs


def bind_leaves(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array] | None = None,
    states: Mapping[str, Array] | None = None,
) -> tuple[dict[Value, Array], dict[str, int]]:
    """The array of each leaf, decoded, and the extents that their shapes tell; raises as `run_graph`."""
    held = states or {}
    _check_names("input", inputs, graph.inputs)
    _check_names("param", params or {}, graph.params)
    _check_names("state", held, graph.states)
    given = {**(params or {}), **held, **inputs}  # the names of leaves are unique
    leaves: dict[Value, Array] = {}
    for value in (*graph.inputs, *graph.params, *graph.states):
        array = given.get(value.name, value.data)
        if array is not None:
            what = f"{value.kind} {value.name!r}"
            leaves[value] = as_strings(array, what) if value.dtype.kind == "s" else np.asarray(array)
            check_array(what, leaves[value], value.type)
        elif value.kind != "state":
            raise OptionError(f"the {value.kind} {value.name!r} ({value.type}) has no value: give one")
    extents = bind_extents(graph, {v.name: a.shape for v, a in leaves.items() if v.type.encoding is None})
    for state in graph.states:
        if state not in leaves and state.type.encoding is not None:
            leaves[state] = initial_state(state)
        elif state not in leaves:
            leaves[state] = np.zeros(_shape(state.type, extents), state.dtype.numpy)
    for value, array in leaves.items():
        if value.type.encoding is not None:
            leaves[value] = value.type.encoding.decode(array, _shape(value.type, extents)).astype(value.dtype.numpy)
    return leaves, extents


def _check_names(kind: str, given: Mapping[str, Array], leaves: Sequence[Value]) -> None:
    names = [v.name for v in leaves]
    for name in given:
        if name not in names:
            raise no_such(kind, name, names)


def _shape(type: TensorType, extents: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(s, extents) for s in type.shape)


def _known_shape(type: TensorType, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The shape, -1 for a size that the node at hand decides."""
    return tuple(evaluate(s, extents) if all(n.name in extents for n in symbols(s)) else -1 for s in type.shape)


def _run(
    graph: Graph, leaves: Mapping[Value, Array], extents: dict[str, int], trace: Trace | None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs and the new states; `extents` gains the dims that depend on data."""
    waiting = check_guards(graph, extents)
    values = dict(leaves) | {c: c.data for c in graph.constants if c.data is not None}
    readers = Counter(v for node in graph.nodes for v in node.inputs)
    readers.update([*(o.value for o in graph.outputs), *graph.updates.values()])
    for node in graph.nodes:
        results = run_node(node, [values[v] for v in node.inputs], extents, trace)
        if trace is not None:
            trace(node, results)
        values.update(zip(node.outputs, results, strict=True))
        if waiting:
            waiting = check_guards(graph, extents)
        for value in node.inputs:  # a result is freed once its last reader has run
            readers[value] -= 1
            if not readers[value]:
                values.pop(value, None)
    outputs = {o.name: np.array(values[o.value]) for o in graph.outputs}
    return outputs, {name: np.array(values[value]) for name, value in graph.updates.items()}


def run_node(
    node: Node, inputs: Sequence[Array], extents: dict[str, int], trace: Trace | None = None
) -> tuple[Array, ...]:
    """The results of one node; `extents` gains the dims that they decide. Raises as `run_graph`."""
    assert isinstance(node.op, Op)
    try:
        op = node.op.at(extents)
        if isinstance(op, Control):
            shapes = [_known_shape(v.type, extents) for v in node.outputs]
            made = op.run_regions(inputs, node.regions, lambda g, given: _run_region(g, given, extents, trace), shapes)
        else:
            made = op.reference(*inputs)
    except RlxError as error:
        error.args = (f"node {node.label}: {error}",)
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ExecutionError(f"node {node.label}: {error}") from error
    results = tuple(map(as_result, made if isinstance(made, tuple) else (made,)))
    if len(results) != len(node.outputs):
        raise ExecutionError(f"node {node.label}: gave {len(results)} results, its op infers {len(node.outputs)}")
    for value, result in zip(node.outputs, results, strict=True):
        if result.dtype != value.dtype.numpy:
            raise ExecutionError(f"node {node.label}: gave {result.dtype}{list(result.shape)}, inferred {value.type}")
        try:
            bind_result(f"node {node.label}", value.shape, result.shape, extents)
        except ShapeError as error:
            raise ExecutionError(f"{error}: the op infers a wrong type") from error
    return results


def _run_region(
    region: Graph, given: Sequence[Array], extents: Mapping[str, int], trace: Trace | None
) -> tuple[Array, ...]:
    leaves = dict(zip(region.inputs, map(as_result, given), strict=True))
    outputs, _ = _run(region, leaves, dict(extents), trace)
    return tuple(outputs.values())


class ReferenceExecutable(StatefulExecutable[Array]):
    """A graph run by `run_graph`; it holds its params and states."""

    capabilities = frozenset({"out", "slots", "states", "dynamic"})

    def __init__(self, graph: Graph, trap: str = "off") -> None:
        super().__init__()
        self.graph = graph
        self.trap = trap
        self.values: dict[str, Array] = {}
        self.states: dict[str, Array] = {}
        self.outputs: list[Array] | None = None
        self.asked: set[int] | None = None  # the outputs that the last run was asked for, None: all
        self.asked_for: dict[str, tuple[int, ...]] = {}  # the shapes of inputs whose memory was asked for

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        with self.taken():
            self.values.update({name: np.array(a, copy=True) for name, a in arrays.items()})

    def raw_param(self, name: str) -> Array | None:
        return self.values.get(name)

    @property
    def results(self) -> Sequence[Array | None] | None:
        if self.outputs is None or self.asked is None:
            return self.outputs
        return [a if n in self.asked else None for n, a in enumerate(self.outputs)]

    def own(self, array: Array) -> Array:
        return array.copy()

    def get_declared(self, name: str) -> Array:
        if name not in self.states:
            self.states[name] = initial_state(self.graph.find(name))
        return self.states[name].copy()

    def set_declared(self, name: str, array: Array | None) -> None:
        if array is None:
            self.states.pop(name, None)
        else:
            self.states[name] = array.copy()

    def run(self, inputs: Sequence[Array], out: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        with self.taken():
            shapes = {v.name: a.shape for v, a in zip(self.graph.inputs, inputs, strict=True)}
            extents = bind_extents(self.graph, shapes)
            check_guards(self.graph, extents)
            check_out(self.graph, extents, out)
            results = self.run_all(inputs)
        for output, target, result in zip(self.graph.outputs, out, results, strict=True):
            if target is not None and target.shape != result.shape:
                raise ShapeError(f"out for {output.name!r}: this run needs shape {result.shape}, got {target.shape}")
        for number, (target, result) in enumerate(zip(out, results, strict=True)):
            if target is not None:
                target[...] = result
                results[number] = target
        self.asked = {*wanted, *(number for number, target in enumerate(out) if target is not None)}
        return [results[i] for i in wanted]

    def run_all(self, inputs: Sequence[Array]) -> list[Array]:
        names = [v.name for v in self.graph.inputs]
        given = dict(zip(names, inputs, strict=True))
        self.ask(given)
        watch = None if self.trap == "off" else self.watch(given)
        made = run_graph(self.graph, given, self.values, self.states, trace=watch)
        self.outputs, self.asked = list(made.values()), None
        self.put_fed(self.outputs)
        return list(made.values())

    def ask(self, inputs: Mapping[str, Array]) -> None:
        """Asks whether a run at these sizes may have its memory, once for runs of the same sizes."""
        shapes = {name: a.shape for name, a in inputs.items()}
        if shapes != self.asked_for:
            self.reserve(bind_extents(self.graph, shapes), 0)
            self.asked_for = shapes

    def watch(self, inputs: Mapping[str, Array]) -> Trace:
        """Raises `NanTrapped` for the first node that gives what is trapped."""
        given = {**self.values, **self.states, **inputs}
        named = (*self.graph.params, *self.graph.inputs, *self.graph.states)
        arrays = {v: v.data for v in self.graph.constants} | {v: given.get(v.name, v.data) for v in named}
        arrays = {v: a for v, a in arrays.items() if is_trappable(v.dtype, v.type.encoding)}
        found = {v: (f"{v.kind} {v.name!r}", *bad_elements(a)) for v, a in arrays.items() if a is not None}

        def see(node: Node, results: tuple[Array, ...]) -> None:
            before = [found[v] for v in node.inputs if v in found]
            for value, array in zip(node.outputs, results, strict=True):
                if not is_trappable(value.dtype, value.type.encoding):
                    continue
                name = value.name or f"of {node.label}"
                found[value] = (name, *bad_elements(array))
                error = trapped(node.label, node.op.op_name, name, array, before, self.trap)
                if error is not None:
                    raise error

        return see

    @property
    def slots(self) -> Callable[..., object]:
        return self.serving(self._slots)

    def _slots(self, arrays: tuple[Any, ...]) -> object:
        admitted = self.admit(arrays)
        with self.taken():
            return self.wrap(tuple(self.run_all(admitted)))


class ReferenceBackend(LibraryBackend):
    """NumPy, node by node: the oracle and the debugger, on any machine.

    It runs graphs as they were imported: a wrong pass can't make it wrong.
    """

    name = "reference"
    rewrites = False
    precisions = frozenset({"f32", "bf16", "f16", "q8"})
    honours = frozenset({"trap", "debug"})  # there is no arena to fill; views of an earlier run are refused

    @property
    def on_processor(self) -> bool:
        return True

    @property
    def rates(self) -> Rates:
        return Rates(2e10, 5e9, run=2e-5, launch=1e-5)

    def available(self) -> Availability:
        return Availability(True, f"NumPy {np.__version__}, node by node (slow; the oracle)")

    def claims(self, node: Node) -> str | None:
        return None

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, None)

    def build(self, graph: Graph, options: CompileOptions) -> Executable[Any]:
        return ReferenceExecutable(graph, options.trap)
