"""A compiled graph on the CPU as data: tables, objects and arrays, from which it runs again without any compiling.

The tables are a pickle of the phases, buffers and the plan; kernels are reduced to what a run needs of them, functions
of the extents to their value where that is fixed. Reading calls only classes and functions of this package. Objects
are machine code: an image is trusted like a shared library.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from rlx.backends.base import DeviceMemory, Image, Restorer, host_memory
from rlx.backends.cpu import cuts, functions, jit
from rlx.backends.cpu.binding import Phase
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.facts import facts_of
from rlx.backends.cpu.shares import FEW_THREADS, thread_count
from rlx.backends.cpu.weights import Shared
from rlx.backends.cpu.words import THREADS, Extents, KernelCode, Routine
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.kernels.program import Buffer, Flow, Kernel, Program
from rlx.options import CompileOptions
from rlx.plan.liveness import Schedule
from rlx.plan.plan import MemoryPlan
from rlx.records import dataclass, names_of

__all__ = ["CpuRestorer", "image_of", "restore_image"]

Runtime = dict[str, bytes]


@dataclass(frozen=True)
class Constant:
    """A function of the extents that is the same for all."""

    value: int

    def __call__(self, extents: object) -> int:
        return self.value


@dataclass(frozen=True)
class ByThreads:
    """A function of the number of threads alone; up to `FEW_THREADS` it need not be asked."""

    few: int
    function: Callable[[Extents], int]

    def __call__(self, extents: Extents) -> int:
        return self.few if thread_count(extents) <= FEW_THREADS else self.function(extents)


@dataclass
class Tables:
    """What is pickled."""

    source: Graph
    graph: Graph
    program: Program
    prepare: tuple[Phase, ...]
    run: tuple[Phase, ...]
    marks: dict[tuple[Flow, str], int]
    schedule: Schedule
    plan: MemoryPlan | None
    prepared: dict[Buffer, Array] | None  # None while params are missing
    params: dict[Buffer, Array]
    kernels: list[dict[str, str]]  # by object: the kernels that it defines, name -> symbol
    runtime: list[str]  # the keys of the objects that follow those of the kernels


def image_of(executable: CpuExecutable, source: Graph) -> Image:
    """The image; weights are packed for it first, if they are all there. `source` is the graph that users see."""
    shared = executable.shared
    if shared.residency.masks:
        raise OptionError("save: some experts are not resident; set_resident_experts(None) packs them all")
    missing = [b for b in shared.program.params if b not in shared.params and not shared.prepared]
    if not missing:
        shared.update()
    bundles = jit.objects_of(shared.addresses)
    tables = Tables(
        source,
        shared.graph,
        shared.program,
        shared.prepare,
        shared.run.phases,
        dict(shared.run.marks),
        executable.schedule,
        executable.bounds_plan,
        {b: a for b, a in shared.memory.items() if b.kind == "prepared"} if shared.prepared else None,
        shared.own_params(),
        [symbols for _, symbols in bundles],
        list(jit.runtime_objects),
    )
    arrays: list[Array] = []
    out = io.BytesIO()
    _Writer(out, arrays).dump(tables)
    objects = [*(obj for obj, _ in bundles), *jit.runtime_objects.values()]
    return Image(jit.cpu_identity(), out.getvalue(), objects, arrays)


def restore_image(image: Image, options: CompileOptions) -> tuple[CpuExecutable, Graph]:
    """The executable of an image, and the leaves of the graph that users see. Raises `ModelFormatError`."""
    try:
        tables = _Reader(io.BytesIO(image.tables), image.arrays).load()
        count = len(tables.kernels)
        jit.runtime_objects.update(zip(tables.runtime, image.objects[count:], strict=True))
        addresses = jit.load_stored(list(zip(image.objects[:count], tables.kernels, strict=True)))
        shared = Shared(
            tables.graph,
            tables.program,
            options,
            tables.prepare,
            tables.run,
            addresses,
            tables.marks,
            tables.prepared,
        )
        shared.params.update(tables.params)
        return CpuExecutable(shared, tables.schedule, tables.plan), tables.source
    except ModelFormatError:
        raise
    except Exception as error:  # whatever a damaged or foreign pickle may lead to
        raise ModelFormatError(f"the compiled code is damaged or of another version ({error!r})") from error


class CpuRestorer(Restorer):
    """Images of this machine's processor."""

    name = "cpu"

    def target(self) -> str:
        return jit.cpu_identity()

    def restore(self, image: Image, options: CompileOptions) -> tuple[CpuExecutable, Graph]:
        return restore_image(image, options)

    def memory(self) -> DeviceMemory:
        return host_memory()


class _Writer(pickle.Pickler):
    def __init__(self, out: io.BytesIO, arrays: list[Array]) -> None:
        super().__init__(out, protocol=5)
        self.arrays = arrays
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not np.ndarray:
            return None
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.arrays)
            self.arrays.append(obj)
        return self.numbers[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case Kernel():
                facts = facts_of(obj)
                return type(facts), _values(facts)
            case KernelCode():
                return KernelCode, (obj.symbol, "", obj.words, obj.chunks, obj.sites, obj.scratch, obj.optimize)
            case Routine():
                return Routine, (obj.symbol, "")
            case Node():
                return Node, (obj.op, (), (), obj.provenance)
            case Graph():
                return _graph, _leaves(obj)
            case FunctionType() | MethodType() | cuts.Part():
                return _reduce_function(obj)
            case ByThreads(few=few, function=function):
                return _by_threads, (few, *_described(function))
        return NotImplemented


def _values(made: Any) -> tuple[Any, ...]:
    return tuple(getattr(made, name) for name in names_of(made))


def _reduce_function(function: Any) -> Any:
    if getattr(sys.modules[function.__module__], getattr(function, "__qualname__", ""), None) is function:
        return NotImplemented  # it has a name
    value = _fixed(function, {})
    if value is not None:
        return Constant, (value,)
    described = _described(function)
    few = _fixed(function, {THREADS: FEW_THREADS})
    return described if few is None or described is NotImplemented else (_by_threads, (few, *described))


def _fixed(function: Callable[..., Any], extents: Extents) -> int | None:
    """What a function gives for all extents that have these, if it does."""
    try:
        value = function(extents)
    except Exception:  # noqa: BLE001  # it is no function of the extents, or depends on others
        return None
    return value if type(value) is int else None


def _described(function: Any) -> Any:
    """What makes a function again, and its arguments."""
    if isinstance(function, cuts.Part):
        return cuts.Part, (function.cut, function.name, function.index)
    if isinstance(function, MethodType):
        return _method, (function.__self__, function.__name__)
    described = functions.describe(function) if isinstance(function, FunctionType) else None
    return NotImplemented if described is None else (functions.restore, described)


def _by_threads(few: int, make: Callable[..., Callable[[Extents], int]], arguments: tuple[Any, ...]) -> ByThreads:
    return ByThreads(few, make(*arguments))


def _method(owner: object, name: str) -> Callable[..., Any]:
    found = getattr(owner, name)
    if not isinstance(found, MethodType) or not type(owner).__module__.startswith("rlx."):
        raise ModelFormatError(f"{type(owner).__name__} has no method {name!r}")
    return found


def _leaves(graph: Graph) -> tuple[Any, ...]:
    def listed(values: Sequence[Value]) -> list[tuple[str, Any]]:
        return [(v.name, v.type) for v in values]

    outputs = [(o.name, o.value.type) for o in graph.outputs]
    return graph.name, listed(graph.inputs), listed(graph.params), listed(graph.states), outputs, graph.guards


def _graph(name: str, inputs: Any, params: Any, states: Any, outputs: Any, guards: Any) -> Graph:
    """A graph of leaves and outputs only."""
    graph = Graph(name)
    for kind, where, rows in (
        ("input", graph.inputs, inputs),
        ("param", graph.params, params),
        ("state", graph.states, states),
    ):
        where.extend(Value(graph, type, kind, leaf) for leaf, type in rows)
    for output, type in outputs:
        graph.output(Value(graph, type, "node", output), output)
    graph.guards.extend(guards)
    return graph


class _Reader(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, arrays: Sequence[Array]) -> None:
        super().__init__(source)
        self.arrays = arrays

    def persistent_load(self, number: Any) -> Array:
        array: Array = self.arrays[number]
        return array

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN or (module.startswith("rlx.") and "." not in name):
            found = super().find_class(module, name)
            if isinstance(found, type | FunctionType) and found.__module__ == module:
                return found
        raise ModelFormatError(f"it holds a {module}.{name}, which has no place there")

    def load(self) -> Tables:
        tables = super().load()
        if not isinstance(tables, Tables):
            raise ModelFormatError("it holds no tables")
        return tables


PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("numpy", "dtype")}
