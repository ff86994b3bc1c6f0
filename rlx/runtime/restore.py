"""A compiled graph from code that was stored: in an artifact, or in the cache of the disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlx.backends import restorer_named
from rlx.backends.base import Executable, Image
from rlx.errors import ModelFormatError, OptionError
from rlx.estimate.stored import StoredAdmission
from rlx.ir.graph import Array, Graph
from rlx.options import CompileOptions
from rlx.records import cached_property
from rlx.runtime.compiled import CompiledGraph, compiled_graph
from rlx.runtime.container import Container
from rlx.runtime.memory import ModelMemory, Resident

if TYPE_CHECKING:
    from rlx.compiler import Stages
    from rlx.runtime.choice import Decision

__all__ = ["CODE_OPTIONS", "StoredCompilation", "array_at", "merged", "restore"]

# the options that the code depends on, besides dims
CODE_OPTIONS = ("precision", "deterministic", "alignment", "search", "reuse", "packing")


class StoredCompilation:
    """A compilation that was stored: the graph is read, and the stages before the code made, when somebody asks.

    What that takes is no part of what the model takes: `memory` leaves it out.
    """

    memory: ModelMemory

    def __init__(
        self, executable: Executable[Any], leaves: Graph, read: Callable[[], Graph], make: Callable[[Graph], Stages]
    ) -> None:
        self.executable = executable
        self.leaves = leaves
        self._read = read
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name not in ("optimised", "legal", "dispatch", "program"):
            raise AttributeError(f"a compilation has no attribute {name!r}")
        return getattr(self.stages, name)

    @cached_property
    def source(self) -> Graph:
        """The graph that was compiled."""
        with self.memory.apart():
            return self._read()

    @cached_property
    def stages(self) -> Stages:
        """All of them."""
        source = self.source
        with self.memory.apart():
            return self._make(source)


def restore(file: Container, chosen: CompileOptions, source: Callable[[], Graph]) -> CompiledGraph:
    """The compiled graph whose code a file holds, with the options that it was made with; `source` gives its graph,
    should somebody ask for it.

    Raises `ModelFormatError`, and `MemoryDeficit` where it does not fit.
    """
    code = file.facts["code"]
    try:
        device = str(code["device"])
        image = _image(file, code)
        unset, figures, name = {str(name) for name in code["unset"]}, dict(code["bytes"]), str(code["model"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelFormatError(f"the description of the code is damaged: {error!r}") from error
    restorer = restorer_named(device)
    if restorer is None:
        raise ModelFormatError(f"there is no stored code for device {device!r}")
    before = Resident.read()

    def read() -> Graph:
        from rlx.passes.dims import apply_dims

        return apply_dims(source(), chosen.dims)

    def make(graph: Graph) -> Stages:
        from rlx.backends import backend_named
        from rlx.compiler import stages_of

        return stages_of(graph, backend_named(device), chosen.with_options({"dims": None}))

    admission = StoredAdmission(restorer, chosen, name, figures, lambda: compilation.stages)
    executable, leaves = restorer.restore(image, chosen)
    compilation = StoredCompilation(executable, leaves, read, make)
    compilation.memory = ModelMemory(admission, before)
    model = compiled_graph(compilation, device, chosen, compilation.memory)
    model._unset.intersection_update(unset)
    model.decide = lambda: _named(source(), device)
    return model


def _named(graph: Graph, device: str) -> Decision:
    from rlx.runtime.auto import named

    return named(graph, device)


def _image(file: Container, code: Mapping[str, Any]) -> Image:
    whole, start = file.sections["objects"], 0
    objects = []
    for size in code["objects"]:
        if type(size) is not int or not 0 <= size <= len(whole) - start:
            raise ModelFormatError("the sizes of the objects don't fit their section")
        objects.append(whole[start : start + size])
        start += size
    arrays = [array_at(file, number) for number in code["arrays"]]
    return Image(str(code["target"]), file.sections["tables"], objects, arrays)


def array_at(file: Container, number: Any) -> Array:
    """An array of a file by its number, as a description of it says; raises `ModelFormatError`."""
    if type(number) is not int or not 0 <= number < len(file.arrays):
        raise ModelFormatError(f"there is no array number {number!r}")
    return file.arrays[number]


def merged(file: Container, options: CompileOptions, given: Collection[str]) -> CompileOptions:
    """The options with those that the artifact was made with where none was `given`, by name."""
    stored = file.facts.get("options")
    if not isinstance(stored, dict):
        return options
    known = {k: v for k, v in stored.items() if k in CODE_OPTIONS and k not in given}
    try:
        return options.with_options(known)
    except OptionError as error:
        raise ModelFormatError(f"the options of the artifact are damaged: {error}") from None
