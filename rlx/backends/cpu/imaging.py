"""Making the image of a compiled graph on the CPU: what `rlx.backends.cpu.image` restores it from."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from rlx.backends.base import Image
from rlx.backends.cpu import cuts, functions, loader, processor
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.facts import facts_of
from rlx.backends.cpu.image import FUNCTIONS, ByThreads, Constant, Functions, Tables, graph_of, method, record
from rlx.backends.cpu.jit import objects_of
from rlx.backends.cpu.words import FEW_THREADS, THREADS, Extents, KernelCode, Routine
from rlx.errors import OptionError
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.kernels.program import Kernel
from rlx.records import names_of, replace

__all__ = ["image_of"]


def image_of(executable: CpuExecutable, source: Graph) -> Image:
    """The image; weights are packed for it first, if they are all there. `source` is the graph that users see."""
    shared = executable.shared
    if shared.residency.masks:
        raise OptionError("save: some experts are not resident; set_resident_experts(None) packs them all")
    missing = [b for b in shared.program.params if b not in shared.params and not shared.prepared]
    if not missing:
        shared.update()
    bundles = objects_of(shared.addresses)
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
        list(loader.runtime_objects),
    )
    arrays: list[Array] = []
    late: list[Callable[[Extents], int]] = []
    written = _written(tables, arrays, late) + _written(late, [], None)
    objects = [*(obj for obj, _ in bundles), *loader.runtime_objects.values()]
    return Image(processor.identity(), written, objects, arrays)


def _written(made: object, arrays: list[Array], late: list[Callable[[Extents], int]] | None) -> bytes:
    out = io.BytesIO()
    _Writer(out, arrays, late).dump(made)
    return out.getvalue()


class _Writer(pickle.Pickler):
    """Writes a pickle, with `arrays` beside it; functions that few runs ask for go to `late`, if that is there."""

    def __init__(self, out: io.BytesIO, arrays: list[Array], late: list[Callable[[Extents], int]] | None) -> None:
        super().__init__(out, protocol=5)
        self.arrays, self.late = arrays, late
        self.numbers: dict[int, int] = {}
        self.functions = Functions()

    def persistent_id(self, obj: Any) -> int | None:
        if obj is self.functions:
            return FUNCTIONS
        if type(obj) is not np.ndarray:
            return None
        if self.late is None:
            raise TypeError("a function of the extents holds an array: give it the sizes that it needs instead")
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.arrays)
            self.arrays.append(obj)
        return self.numbers[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case Kernel():
                return _as_record(facts_of(obj))
            case KernelCode() | Routine():
                return _as_record(replace(obj, ir=""))
            case Node():
                return Node, (obj.op, (), (), obj.provenance)
            case Graph():
                return graph_of, _leaves(obj)
            case FunctionType() | MethodType() | cuts.Part() | cuts.Product():
                return self.reduce_function(obj)
            case ByThreads():
                return self.reduce_function(obj.function)
        return NotImplemented

    def reduce_function(self, function: Any) -> Any:
        """A function with a name by that, others by their value where it is fixed, or by what makes them again."""
        if getattr(sys.modules[function.__module__], getattr(function, "__qualname__", ""), None) is function:
            return NotImplemented
        value = _fixed(function, {})
        if value is not None:
            return _as_record(Constant(value))
        few = None if self.late is None else _fixed(function, {THREADS: FEW_THREADS})
        described = _described(function)
        if few is None or self.late is None or described is NotImplemented:
            return described
        self.late.append(function)
        return _as_record(ByThreads(few, self.functions, len(self.late) - 1))


def _as_record(made: Any) -> tuple[Any, ...]:
    return record, (type(made), *(getattr(made, name) for name in names_of(made)))


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
    if isinstance(function, cuts.Product):
        return cuts.Product, (function.sizes,)
    if isinstance(function, MethodType):
        return method, (function.__self__, function.__name__)
    described = functions.describe(function) if isinstance(function, FunctionType) else None
    return NotImplemented if described is None else (functions.restore, described)


def _leaves(graph: Graph) -> tuple[Any, ...]:
    def listed(values: Sequence[Value]) -> list[tuple[str, Any]]:
        return [(v.name, v.type) for v in values]

    outputs = [(o.name, o.value.type) for o in graph.outputs]
    return graph.name, listed(graph.inputs), listed(graph.params), listed(graph.states), outputs, graph.guards
