"""A graph on a library: one function for the extents of a run, kept for the next run at these extents."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.array import Array, MemorySpace, Tensor
from rlx.backends.base import Executable, LibraryBackend
from rlx.backends.library.arrays import Arrays, Flat
from rlx.backends.library.precision import multiplies_f32
from rlx.backends.library.trace import Trace, why_not
from rlx.backends.memory import DeviceMemory, host_memory
from rlx.backends.states import StatefulExecutable
from rlx.errors import (
    DeviceUnavailable,
    ExecutionError,
    OptionError,
    RlxError,
    ShapeError,
    UnsupportedNode,
    UnsupportedOp,
)
from rlx.ir.extents import bind_extents, check_guards, check_out, initial_state
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Dim, evaluate, symbols
from rlx.ops.control import If, While
from rlx.options import CompileOptions
from rlx.records import cached_property

if TYPE_CHECKING:
    from rlx.backends.timing import KernelTime

__all__ = ["KEPT", "ArrayBackend", "ArrayExecutable"]

KEPT = 32  # functions of a graph that are kept, of the extents used last
log = logging.getLogger("rlx")


class Function:
    """The graph as a function of its leaves at some extents; `checks` and `failures` are those of its `Trace`."""

    def __init__(self, lib: Arrays, graph: Graph, extents: Mapping[str, int], leaves: Sequence[Value]) -> None:
        self.lib = lib
        self.graph = graph
        self.extents = dict(extents)
        self.leaves = leaves
        self.checks: list[tuple[str, str]] = []
        self.failures: list[RlxError] = []
        self.code: Flat | None = None

    def trace(self, x: Sequence[Any]) -> list[Any]:
        """The outputs, the new states and the error."""
        trace = Trace(self.lib, self.extents, self.checks, self.failures)
        values = trace.run(self.graph, dict(zip(self.leaves, x, strict=True)))
        return [
            *(self.lib.copy(values[o.value]) for o in self.graph.outputs),  # of what may be a leaf or shown twice
            *(values[v] for v in self.graph.updates.values()),
            trace.error,
        ]

    def __call__(self, x: Sequence[Any]) -> list[Any]:
        """The results of `trace` by compiled code. Raises `ExecutionError` for a check that failed."""
        self.failures.clear()
        if self.code is None:
            self.code = self.lib.compile(self.trace, x, pure(self.lib, self.graph))
        *results, error = self.code(x)
        number, shown = self.lib.fetch(error).tolist()
        if self.failures:
            raise self.failures[0]
        self.lib.wait(results)
        if number:
            label, what = self.checks[number - 1]
            raise ExecutionError(f"node {label}: {what}: {shown}")
        return results


def pure(lib: Arrays, graph: Graph) -> bool:
    """Whether a run makes no host call and chooses nothing by the value of an array."""
    return all(
        not isinstance(node.op, If | While)
        and all(pure(lib, region) for region in node.regions)
        and (why_not(lib, node) is None or (node.op.decompose is not None and parts_pure(lib, node)))  # type: ignore[attr-defined]
        for node in graph.nodes
    )


def parts_pure(lib: Arrays, node: Node) -> bool:
    """`pure` for the decomposition of a node."""
    op: Any = node.op
    scratch = Graph("parts")
    op.decompose(scratch, *(scratch.input(f"x{i}", v.shape, v.dtype) for i, v in enumerate(node.inputs)))
    return pure(lib, scratch)


class ArrayExecutable(StatefulExecutable[Tensor]):
    """Holds params and states as arrays of the library; compiles a function for each set of extents, at its first run.

    At most `KEPT` functions are kept. Each compile is an event of the logger "rlx" that says for what and why.
    """

    capabilities = frozenset({"out", "dynamic", "states"})

    def __init__(self, device: str, lib: Arrays, graph: Graph) -> None:
        super().__init__()
        self.device = device
        self.lib = lib
        self.graph = graph
        self.held: dict[str, Any] = {}  # params and states
        self.shapes: dict[str, tuple[int, ...]] = {}  # theirs
        self.functions: OrderedDict[tuple[tuple[str, int], ...], Function] = OrderedDict()
        self.dropped: set[tuple[tuple[str, int], ...]] = set()
        self.most = KEPT
        self.last: list[Any] | None = None
        with lib.session():
            for value in (*graph.params, *graph.states):
                if value.data is not None:
                    self.hold(value, value.data)

    def hold(self, value: Value, array: Tensor) -> None:
        if value.type.encoding is not None:
            shape = tuple(evaluate(s, {}) for s in value.shape)
            array = value.type.encoding.decode(np.asarray(array), shape).astype(value.dtype.numpy)
        self.held[value.name] = self.own(array).held
        self.shapes[value.name] = array.shape

    def session(self) -> AbstractContextManager[object]:
        return self.lib.session()

    def own(self, array: Tensor) -> Array:
        held = self.lib.copy(array.held) if isinstance(array, Array) else self.lib.put(np.asarray(array))
        return self.lib.array(held)

    def get_declared(self, name: str) -> Array:
        if name not in self.held:
            leaf = self.graph.find(name)
            self.hold(leaf, initial_state(leaf))
        return self.lib.array(self.held[name]).copy()

    def set_declared(self, name: str, array: Tensor | None) -> None:
        leaf = self.graph.find(name)
        value: Tensor | None = leaf.data if array is None else array
        if value is not None:
            self.hold(leaf, value)
            return
        self.held.pop(name, None)  # zeros, of the shape that the next run has
        self.shapes.pop(name, None)

    def adopt(self, value: Any) -> Array | None:
        return self.lib.local(value)

    def set_params(self, arrays: Mapping[str, Tensor]) -> None:
        params = {v.name: v for v in self.graph.params}
        with self.taken():
            for name, array in arrays.items():
                self.hold(params[name], array)

    def raw_param(self, name: str) -> Array | None:
        encoded = any(v.name == name and v.type.encoding is not None for v in self.graph.params)
        return None if encoded or name not in self.held else self.lib.array(self.held[name])

    @property
    def results(self) -> Sequence[Array] | None:
        return None if self.last is None else [self.lib.array(x) for x in self.last]

    @usual_arithmetic()
    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None], wanted: Sequence[int]) -> list[Tensor]:
        with self.taken():
            if any(target is not None for target in out):
                check_out(self.graph, self.bind(inputs)[0], out)
            last = self.run_all(inputs)
            for output, target, x in zip(self.graph.outputs, out, last, strict=True):
                if target is not None and target.shape != tuple(x.shape):
                    raise ShapeError(
                        f"out for {output.name!r}: this run needs shape {tuple(x.shape)}, got {target.shape}"
                    )
            for target, x in zip(out, last, strict=True):
                if target is not None:
                    np.copyto(np.asarray(target), self.lib.fetch(x))
            return [self.lib.array(last[i]) if (target := out[i]) is None else target for i in wanted]

    def run_all(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs as arrays of the library, once all of them are there; the states become those after the run."""
        self.last = None
        extents, function = self.bind(inputs)
        leaves = [a.held if isinstance(a, Array) else self.lib.borrow(np.asarray(a)) for a in inputs]
        for value in (*self.graph.params, *self.graph.states):
            if value.name not in self.held:  # a state of zeros
                self.hold(value, np.zeros([evaluate(s, extents) for s in value.shape], value.dtype.numpy))
            leaves.append(self.held[value.name])
        results = function(leaves)
        count = len(self.graph.outputs)
        for name, new in zip(self.graph.updates, results[count:], strict=True):
            self.held[name] = new
        self.last = results[:count]
        self.put_fed([self.lib.array(x) for x in self.last])
        return self.last

    def bind(self, inputs: Sequence[Tensor]) -> tuple[dict[str, int], Function]:
        """The extents of a run and the function for them."""
        shapes = {v.name: a.shape for v, a in zip(self.graph.inputs, inputs, strict=True)}
        encoded = {v.name for v in self.graph.params if v.type.encoding is not None}
        shapes |= {name: shape for name, shape in self.shapes.items() if name not in encoded}
        extents = bind_extents(self.graph, shapes)
        check_guards(self.graph, extents)
        key = tuple(sorted(extents.items()))
        function = self.functions.get(key)
        if function is None:
            self.reserve(extents, 0)
            function = self.functions[key] = self.specialised(key)
            if len(self.functions) > self.most:
                self.dropped.add(self.functions.popitem(last=False)[0])
        self.functions.move_to_end(key)
        return extents, function

    def keep_functions(self, most: int) -> None:
        self.most = most

    def forget_function(self, extents: Mapping[str, int]) -> None:
        for key in [key for key in self.functions if extents.items() <= dict(key).items()]:
            del self.functions[key]

    def specialised(self, key: tuple[tuple[str, int], ...]) -> Function:
        why = "its first run" if not self.functions else "extents not seen before"
        if key in self.dropped:
            why = f"more than {self.most} sets of extents were used since its last run"
        where = ", ".join(f"{name}={n}" for name, n in key)
        log.info("%s: compiles %r%s: %s", self.device, self.graph.name, f" at {where}" if where else "", why)
        leaves = (*self.graph.inputs, *self.graph.params, *self.graph.states)
        return Function(self.lib, self.graph, dict(key), leaves)

    @property
    def slots(self) -> Callable[..., NoReturn]:
        def refuse(*arrays: Any) -> NoReturn:
            raise self.refusal("run_views and run_slots", "use run, which gives fresh arrays")

        return refuse

    @property
    def arena(self) -> Tensor:
        raise self.refusal("arena", f"{self.device} manages its memory itself")

    def clone(self, fresh: bool = False) -> Executable[Tensor]:
        raise self.refusal("clone", "compile the graph again")

    def profile(self, inputs: Sequence[Tensor], repeat: int) -> list[KernelTime]:
        instead = f"{self.device} doesn't tell its kernels apart; policy='needs=profile' chooses a device that does"
        raise self.refusal("profile", instead)

    def refusal(self, what: str, instead: str) -> OptionError:
        return OptionError(f"device {self.device!r} doesn't offer {what}: {instead}; see model.capabilities")


class ArrayBackend(LibraryBackend):
    """A library backend over `Arrays`."""

    capabilities = ArrayExecutable.capabilities
    specialises = True

    @abstractmethod
    def arrays(self) -> Arrays:
        """The library, imported now."""

    @cached_property
    def lib(self) -> Arrays:
        found = self.available()
        if not found.present:
            raise DeviceUnavailable(f"device {self.name!r}: {found.reason}. {found.remedy}")
        lib = self.arrays()
        if not self.on_processor and not multiplies_f32(lib):  # processors have no faster units for f32
            raise DeviceUnavailable(
                f"device {self.name!r}: its library rounds operands of f32 to fewer bits before it multiplies them (to "
                "TF32, say), which precision='f32' does not allow: turn that off in the library's own settings"
            )
        return lib

    @property
    def space(self) -> MemorySpace:
        return self.lib

    def claims(self, node: Node) -> str | None:
        return why_not(self.lib, node)

    def memory(self) -> DeviceMemory:
        return host_memory()

    def build(self, graph: Graph, options: CompileOptions) -> Executable[Any]:
        self.check(graph)
        return self.executable(graph)

    def check(self, graph: Graph) -> None:
        """Raises `UnsupportedOp` for nodes whose data decide a size."""
        known = {
            s.name for v in (*graph.inputs, *graph.params, *graph.states) for size in v.shape for s in symbols(size)
        }
        reason = f"{self.name} needs every size before the run, and its data decide one"
        bad = []
        for node in graph.nodes:
            sizes = [s for v in node.outputs for size in v.shape if isinstance(size, Dim) for s in symbols(size)]
            if any(s.name not in known for s in sizes):
                name = node.provenance[0] if node.provenance else node.outputs[0].name
                bad.append(UnsupportedNode(name, node.op.op_name, reason))
        if bad:
            lines = "".join(f"\n  {n.op} {n.name!r}: {n.reason}" for n in bad)
            raise UnsupportedOp(f"{len(bad)} nodes can't be run on {self.name}:{lines}", bad)

    def executable(self, graph: Graph) -> Executable[Any]:
        return ArrayExecutable(self.name, self.lib, graph)
