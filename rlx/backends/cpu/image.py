"""A compiled graph on the CPU as data: tables, objects and arrays, from which it runs again without any compiling.

The tables are a pickle of the phases, buffers and the plan; kernels are reduced to what a run needs of them, functions
of the extents to their value where that is fixed. After it comes a pickle of the functions that few runs ask for.
`rlx.backends.cpu.imaging` makes both. Reading calls only classes and functions of this package. Objects are machine
code: an image is trusted like a shared library.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeVar

from rlx.backends.base import DeviceMemory, Image, Restorer, host_memory
from rlx.backends.cpu import loader, processor
from rlx.backends.cpu.beside import Span
from rlx.backends.cpu.binding import Phase
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.weights import Shared
from rlx.backends.cpu.words import FEW_THREADS, Extents, thread_count
from rlx.errors import ModelFormatError
from rlx.ir.graph import Array, Graph, Value
from rlx.kernels.program import Buffer, Flow, Program
from rlx.options import CompileOptions
from rlx.plan.arena import MemoryPlan, Schedule
from rlx.records import cached_property, dataclass, names_of

__all__ = ["CpuRestorer", "Tables", "restore_image"]

T = TypeVar("T")
FUNCTIONS = -1  # in the place of an array's number: the `Functions` of the image
PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("numpy", "dtype")}


class _Reader(pickle.Unpickler):
    """Reads a pickle that has the image's arrays, and `Functions`, by number."""

    def __init__(self, source: io.BytesIO, arrays: Sequence[Array], functions: Functions) -> None:
        super().__init__(source)
        self.arrays, self.functions = arrays, functions

    def persistent_load(self, number: Any) -> Any:
        return self.functions if number == FUNCTIONS else self.arrays[number]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN or (module.startswith("rlx.") and "." not in name):
            found = super().find_class(module, name)
            if isinstance(found, type | FunctionType) and found.__module__ == module:
                return found
        raise ModelFormatError(f"it holds a {module}.{name}, which has no place there")


@dataclass(frozen=True)
class Constant:
    """A function of the extents that is the same for all."""

    value: int

    def __call__(self, extents: object) -> int:
        return self.value


class Functions:
    """Functions that few runs ask for, as a pickle that is read when the first is; they hold no arrays."""

    stored = b""

    @cached_property
    def all(self) -> list[Callable[[Extents], int]]:
        """All of them."""
        found: list[Callable[[Extents], int]] = _Reader(io.BytesIO(self.stored), (), self).load()
        return found


@dataclass(frozen=True)
class ByThreads:
    """A function of the number of threads alone; up to `FEW_THREADS` it need not be asked."""

    few: int
    functions: Functions
    number: int

    def __call__(self, extents: Extents) -> int:
        return self.few if thread_count(extents) <= FEW_THREADS else self.function(extents)

    @property
    def function(self) -> Callable[[Extents], int]:
        """What is asked for many threads."""
        return self.functions.all[self.number]


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
    spans: tuple[Span, ...]  # of the plan
    prepared: dict[Buffer, Array] | None  # None while params are missing
    params: dict[Buffer, Array]
    kernels: list[dict[str, str]]  # by object: the kernels that it defines, name -> symbol
    runtime: list[str]  # the keys of the objects that follow those of the kernels


def restore_image(image: Image, options: CompileOptions) -> tuple[CpuExecutable, Graph]:
    """The executable of an image, and the leaves of the graph that users see. Raises `ModelFormatError`."""
    try:
        functions, source = Functions(), io.BytesIO(image.tables)
        tables = _Reader(source, image.arrays, functions).load()
        if not isinstance(tables, Tables):
            raise ModelFormatError("it holds no tables")
        functions.stored = source.read()
        count = len(tables.kernels)
        loader.runtime_objects.update(zip(tables.runtime, image.objects[count:], strict=True))
        addresses = loader.load_stored(list(zip(image.objects[:count], tables.kernels, strict=True)))
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
        if tables.plan is not None:
            shared.spans = tables.plan, tables.spans
        return CpuExecutable(shared, tables.schedule, tables.plan), tables.source
    except ModelFormatError:
        raise
    except Exception as error:  # whatever a damaged or foreign pickle may lead to
        raise ModelFormatError(f"the compiled code is damaged or of another version ({error!r})") from error


class CpuRestorer(Restorer):
    """Images of this machine's processor."""

    name = "cpu"

    def target(self) -> str:
        return processor.identity()

    def unlike(self, target: str) -> str:
        return processor.unlike(target)

    def restore(self, image: Image, options: CompileOptions) -> tuple[CpuExecutable, Graph]:
        return restore_image(image, options)

    def memory(self) -> DeviceMemory:
        return host_memory()


def record(cls: type[T], *values: Any) -> T:
    """An object of a dataclass from the values of all its fields."""
    made = object.__new__(cls)  # its own `__init__` would be compiled for these few
    vars(made).update(zip(names_of(cls), values, strict=True))
    return made


def method(owner: object, name: str) -> Callable[..., Any]:
    found = getattr(owner, name)
    if not isinstance(found, MethodType) or not type(owner).__module__.startswith("rlx."):
        raise ModelFormatError(f"{type(owner).__name__} has no method {name!r}")
    return found


def graph_of(name: str, inputs: Any, params: Any, states: Any, outputs: Any, guards: Any) -> Graph:
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
