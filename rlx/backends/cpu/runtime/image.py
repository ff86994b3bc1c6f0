"""A compiled graph on the CPU as data: tables, objects and arrays, from which it runs again without any compiling.

The tables are the phases, buffers and the plan, as `rlx.backends.cpu.runtime.schema` declares them; kernels are reduced
to what a run needs of them, functions of the extents to their value where that is fixed. After them come tables of the
functions that few runs ask for. `rlx.backends.cpu.runtime.save_image` makes both. Objects are machine code: an image is
trusted like a shared library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlx.backends.base import Image, Restorer
from rlx.backends.codegen.arguments import FEW_THREADS, Extents, thread_count
from rlx.backends.codegen.table import Phase
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.runtime.concurrent_phases import Span
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.runtime.schema import SCHEMA
from rlx.backends.cpu.runtime.shared import Shared
from rlx.backends.memory import DeviceMemory, host_memory
from rlx.boundary import is_out_of_memory
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.dtype import dtype_of
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.shape import Atom, Dim, Guard, dim_of_terms
from rlx.kernels.program import Buffer, Flow, Program
from rlx.options import CompileOptions
from rlx.plan.arena import MemoryPlan, Schedule
from rlx.records import cached_property, dataclass
from rlx.tables import read_tables

__all__ = ["ByThreads", "Constant", "CpuRestorer", "Functions", "Tables", "restore_image"]


@dataclass(frozen=True)
class Constant:
    """A function of the extents that is the same for all."""

    value: int

    def __call__(self, extents: object) -> int:
        return self.value


class Functions:
    """Functions that few runs ask for, as tables that are read when the first is; they hold no arrays."""

    stored = b""

    @cached_property
    def all(self) -> tuple[Callable[[Extents], int], ...]:
        """All of them."""
        return read_tables(self.stored, "(Function)", SCHEMA, _makers((), self))[0]  # type: ignore[no-any-return]


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
    """What is stored."""

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
        functions = Functions()
        tables, end = read_tables(image.tables, "Tables", SCHEMA, _makers(image.arrays, functions))
        functions.stored = image.tables[end:]
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
        shared.watch_tables()
        if tables.plan is not None:
            shared.spans = tables.plan, tables.spans
        return CpuExecutable(shared, tables.schedule, tables.plan), tables.source
    except ModelFormatError:
        raise
    except Exception as error:  # whatever tables of a foreign build may lead to
        if is_out_of_memory(error):
            raise
        raise ModelFormatError(f"the compiled code is damaged or of another version ({error!r})") from error


class CpuRestorer(Restorer):
    """Images of this machine's processor."""

    name = "cpu"

    def target(self) -> str:
        return cpuid.identity()

    def unlike(self, target: str) -> str:
        return cpuid.unlike(target)

    def restore(self, image: Image, options: CompileOptions) -> tuple[CpuExecutable, Graph]:
        return restore_image(image, options)

    def memory(self) -> DeviceMemory:
        return host_memory()


def _makers(arrays: Sequence[Array], functions: Functions) -> dict[str, Callable[..., Any]]:
    """How the records are made that are not what their fields say."""
    return {
        "Array": partial(_array, arrays),
        "ByThreads": lambda few, number: ByThreads(few, functions, number),
        "Dim": _dim,
        "DType": dtype_of,
        "Encoding": encoding_named,
        "Graph": _graph,
        "Node": _node,
    }


def _dim(parts: tuple[Atom | int, ...]) -> Dim:
    """The sum of products that are given one after another, each as its coefficient and its atoms."""
    starts = [at for at, part in enumerate(parts) if isinstance(part, int)]
    terms = [(parts[a + 1 : b], parts[a]) for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
    made = dim_of_terms(terms)  # type: ignore[arg-type]
    if not isinstance(made, Dim) or starts[:1] != [0]:
        raise ModelFormatError(f"the size {made} is none that depends on the run")
    return made


def _array(arrays: Sequence[Array], number: int) -> Array:
    if not 0 <= number < len(arrays):
        raise ModelFormatError(f"there is no array number {number}")
    return arrays[number]


def _node(name: str, attributes: Mapping[str, Any], provenance: tuple[str, ...]) -> Node:
    """A node that a run calls the reference of."""
    import rlx.ops  # noqa: F401  # registers ops
    from rlx.ir.text import make_op

    return Node(make_op(name, attributes), (), (), provenance)


Leaves = Sequence[tuple[str, TensorType]]


def _graph(
    name: str,
    inputs: Leaves,
    params: Leaves,
    states: Leaves,
    outputs: Leaves,
    guards: Sequence[Guard],
    results: Sequence[tuple[str, str, tuple[str, ...]]],
) -> Graph:
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
    for result in results:
        try:
            graph.result(*result)
        except OptionError as error:
            raise ModelFormatError(str(error)) from None
    return graph
