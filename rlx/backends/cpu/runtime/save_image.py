"""Making the image of a compiled graph on the CPU: what `rlx.backends.cpu.runtime.image` restores it from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.backends.base import Image
from rlx.backends.codegen.arguments import FEW_THREADS, THREADS, Extents, KernelCode, Routine
from rlx.backends.codegen.kernel_facts import facts_of
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.jit.compile import objects_of
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.runtime.image import ByThreads, Constant, Tables
from rlx.backends.cpu.runtime.schema import SCHEMA
from rlx.errors import OptionError
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.shape import Dim
from rlx.kernels.program import Kernel
from rlx.records import names_of
from rlx.table_writer import write_tables

__all__ = ["image_of"]

FUNCTIONS = SCHEMA.allowed("Function")


def image_of(executable: CpuExecutable, source: Graph) -> Image:
    """The image; weights are packed for it first, if they are all there. `source` is the graph that users see.

    Raises `OptionError` for what can't be stored.
    """
    shared = executable.shared
    if shared.residency.masks:
        raise OptionError("save: some experts are not resident; set_resident_experts(None) packs them all")
    executable.pack()
    bundles = objects_of(shared.addresses)
    of_runs = dict(loader.runtime_objects)  # another thread may bring more
    tables = Tables(
        source,
        shared.graph,
        shared.program,
        shared.prepare,
        shared.run.phases,
        dict(shared.run.marks),
        executable.schedule,
        executable.bounds_plan,
        () if executable.bounds_plan is None else shared.spans_of(executable.bounds_plan),
        {b: a for b, a in shared.memory.items() if b.kind == "prepared"} if shared.prepared else None,
        shared.own_params(),
        [symbols for _, symbols in bundles],
        list(of_runs),
    )
    late: list[Callable[[Extents], int]] = []
    first = _Parts(late)
    written = write_tables(tables, "Tables", SCHEMA, first)
    written += write_tables(tuple(late), "(Function)", SCHEMA, _Parts(None))
    objects = [*(obj for obj, _ in bundles), *of_runs.values()]
    return Image(cpuid.identity(), written, objects, first.arrays)


class _Parts:
    """What stands for a thing in the tables; functions that few runs ask for go to `late`, if that is there."""

    def __init__(self, late: list[Callable[[Extents], int]] | None) -> None:
        self.late = late
        self.arrays: list[Array] = []

    def __call__(self, thing: Any) -> tuple[str, tuple[Any, ...]] | None:
        match thing:
            case Kernel():
                facts = facts_of(thing)
                return "KernelFacts", tuple(getattr(facts, name) for name in SCHEMA.records["KernelFacts"])
            case KernelCode() | Routine():
                values = ("" if name == "ir" else getattr(thing, name) for name in names_of(thing))
                return type(thing).__name__, tuple(values)
            case Dim():
                return "Dim", (tuple(part for atoms, coefficient in thing.terms for part in (coefficient, *atoms)),)
            case DType() | Encoding():
                return "DType" if isinstance(thing, DType) else "Encoding", (thing.name,)
            case Node():
                op: Any = thing.op
                return "Node", (op.op_name, op.attributes(), thing.provenance)
            case Graph():
                return "Graph", _leaves(thing)
            case np.ndarray() if self.late is not None:
                self.arrays.append(thing)
                return "Array", (len(self.arrays) - 1,)
        named = type(thing).__name__ in FUNCTIONS
        return self.function(thing) if named and not isinstance(thing, Constant) else None

    def function(self, function: Any) -> tuple[str, tuple[Any, ...]] | None:
        """A function of the extents by its value where that is fixed."""
        if isinstance(function, ByThreads):
            function = function.function
        value = _fixed(function, {})
        if value is not None:
            return "Constant", (value,)
        few = None if self.late is None else _fixed(function, {THREADS: FEW_THREADS})
        if few is None or self.late is None:
            name = type(function).__name__
            return name, tuple(getattr(function, field) for field in SCHEMA.records[name])
        self.late.append(function)
        return "ByThreads", (few, len(self.late) - 1)


def _fixed(function: Callable[[Extents], int], extents: Extents) -> int | None:
    """What a function gives for all extents that have these, if it does."""
    try:
        value = function(extents)
    except Exception:  # noqa: BLE001  # it depends on others
        return None
    return value if type(value) is int else None


def _leaves(graph: Graph) -> tuple[Any, ...]:
    def listed(values: Sequence[Value]) -> tuple[tuple[str, Any], ...]:
        return tuple((v.name, v.type) for v in values)

    outputs = tuple((o.name, o.value.type) for o in graph.outputs)
    results = tuple((r.name, r.kind, r.outputs) for r in graph.results)
    return graph.name, listed(graph.inputs), listed(graph.params), listed(graph.states), outputs, graph.guards, results
