"""Artifacts: a compiled graph in one file, which loads without importing, compiling or LLVM.

An artifact holds the graph with its weights, from which any machine can compile it again, and, unless it is portable,
the code, tables and packed weights for the machine that made it. It is trusted like a shared library: its checksums
find damage, but who can write the file can run code in the process that loads it. Take portable ones from strangers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.backends import restorer_named
from rlx.backends.base import Executable, Image
from rlx.disk import path_of
from rlx.errors import ModelFormatError, OptionError
from rlx.estimate.stored import StoredAdmission
from rlx.ir.graph import Array, Graph
from rlx.ir.mapped import place_of
from rlx.lean import log
from rlx.options import CompileOptions
from rlx.runtime.build import build_identity
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import Container, read_container, write_container
from rlx.runtime.memory import ModelMemory, Resident

if TYPE_CHECKING:
    from rlx.compiler import Stages
    from rlx.runtime.choice import Decision

__all__ = ["StoredCompilation", "load_artifact", "restore", "save_artifact", "store"]

Compile = Callable[[Graph, CompileOptions], CompiledGraph]

CODE_OPTIONS = (
    "precision",
    "deterministic",
    "alignment",
    "search",
    "reuse",
)  # the options that the code depends on, and dims


class StoredCompilation:
    """A compilation that was stored: the graph is read, and the stages before the code made, when somebody asks.

    What that takes is no part of what the model takes: `memory` leaves it out.
    """

    memory: ModelMemory

    def __init__(
        self, executable: Executable, leaves: Graph, read: Callable[[], Graph], make: Callable[[Graph], Stages]
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


class Stored:
    """What is written: facts, sections, and numbered arrays, one that is there twice under one number."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self.sections: dict[str, bytes] = {}
        self.arrays: list[Array] = []
        self.numbers: dict[tuple[Any, ...], int] = {}

    def add(self, array: Array) -> int:
        """The number of an array."""
        key = (int(array.ctypes.data), array.dtype.name, array.shape, array.strides)
        if key not in self.numbers:
            self.numbers[key] = len(self.arrays)
            self.arrays.append(array)
        return self.numbers[key]

    def write(self, path: str | os.PathLike[str], *, external: bool, hashed: bool) -> int:
        """Writes the file and returns its bytes; `external` arrays stay in the mapped file where they lie."""
        where = {i: place for i, array in enumerate(self.arrays) if external and (place := place_of(array))}
        return write_container(path, Container(self.facts, self.sections, self.arrays), where, hashed)


def store(model: CompiledGraph, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> int:
    """Writes the code of a compiled graph, without the graph, for the cache; returns the bytes of the file.

    Params that are used as they lie in a mapped file stay there.
    """
    stored = Stored(facts)
    _add_code(stored, model)
    return stored.write(path, external=True, hashed=False)


def save_artifact(
    model: CompiledGraph, path: str | os.PathLike[str], *, portable: bool = False, external: bool = False
) -> None:
    """Writes a compiled graph to one file; see `CompiledGraph.save`."""
    name = path_of(path, "save")
    stored = Stored({})
    _add_graph(stored, model, portable)
    if not portable:
        _add_code(stored, model)
    try:
        stored.write(name, external=external, hashed=True)
    except OSError as error:
        raise OptionError(f"{name}: can't be written: {error.strerror or error}") from None


def _add_graph(stored: Stored, model: CompiledGraph, portable: bool) -> None:
    from rlx.ir.text import constants_table, print_graph

    graph = model.compilation.source
    values: dict[str, int] = {}  # of params, and initial ones of states
    lost = []
    for value in graph.params:
        array = model._executable.raw_param(value.name)
        if array is None:
            array = model.adapters.value_of(value.name) if value.name in model._changed else value.data
        if array is not None:
            values[value.name] = stored.add(array)
        elif value.name not in model._unset:
            lost.append(value.name)
    if lost and portable:
        raise OptionError(
            f"save(portable=True): only packed weights are left of {', '.join(map(repr, lost[:8]))}: "
            "give them to set_params again and save before the next run"
        )
    for state in graph.states:
        if state.data is not None:
            values[state.name] = stored.add(state.data)
    stored.sections["graph"] = print_graph(graph).encode()
    constants = {key: stored.add(array) for key, array in constants_table(graph).items()}
    options = {name: getattr(model._options, name) for name in CODE_OPTIONS}
    stored.facts |= {"graph": {"values": values, "constants": constants, "lost": lost}, "options": options}
    stored.facts["build"] = build_identity()
    stored.facts["adapters"] = []
    for name, slot, scale, own in model.adapters.table():
        pairs = {target: [stored.add(a), stored.add(b)] for target, (a, b) in own.items()}
        stored.facts["adapters"].append({"name": name, "slot": slot, "scale": scale, "pairs": pairs})


def _add_code(stored: Stored, model: CompiledGraph) -> None:
    compilation = model.compilation
    image = model._executable.image(compilation.leaves)
    stored.facts["code"] = {
        "device": model.device,
        "target": image.target,
        "build": build_identity(),
        "objects": [len(obj) for obj in image.objects],
        "arrays": [stored.add(array) for array in image.arrays],
        "unset": sorted(model._unset),
        "model": compilation.leaves.name,
        "bytes": {} if model.memory is None else model.memory.figures(),
    }
    stored.sections["tables"] = image.tables
    stored.sections["objects"] = b"".join(image.objects)


def load_artifact(path: str | os.PathLike[str], options: CompileOptions, compile: Compile) -> CompiledGraph:
    """A compiled graph from an artifact, compiled again where the file has no code for this machine and these options.

    Raises `ModelFormatError`.
    """
    file = read_container(path)
    name = os.fspath(path)
    why = _unfit(file, options)
    if why is None:
        try:
            return _with_adapters(restore(file, options, lambda: _graph(file, name)), file, name)
        except ModelFormatError as error:
            why = str(error)
    facts = file.facts.get("graph")
    if not isinstance(facts, dict):
        raise ModelFormatError(f"{name}: {why}, and the artifact has no graph to compile again")
    lost = facts.get("lost")
    if lost:
        names = ", ".join(map(repr, lost[:8]))
        raise ModelFormatError(
            f"{name}: {why}, and it can't be compiled again: the artifact has only packed weights for {names}; "
            "save it with portable=True where these are still there"
        )
    say = log.info if "code" not in file.facts else log.warning
    say("%s: %s: compiling it again", name, why)
    return _with_adapters(compile(_graph(file, name), _merged(file, options)), file, name)


def _with_adapters(model: CompiledGraph, file: Container, name: str) -> CompiledGraph:
    """The model with the adapters that it was saved with, whose weights are in its params."""
    try:
        table = []
        for entry in file.facts.get("adapters", ()):
            pairs = {str(target): (_at(file, a), _at(file, b)) for target, (a, b) in entry["pairs"].items()}
            table.append((str(entry["name"]), int(entry["slot"]), float(entry["scale"]), pairs))
        model.adapters.restore(table)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelFormatError(f"{name}: the table of adapters is damaged: {error!r}") from error
    return model


def restore(file: Container, options: CompileOptions, source: Callable[[], Graph]) -> CompiledGraph:
    """The compiled graph whose code a file holds; `source` gives its graph, should somebody ask for it.

    Raises `ModelFormatError`, and `MemoryDeficit` where it does not fit.
    """
    code = file.facts["code"]
    chosen = _merged(file, options)
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
    model = CompiledGraph(compilation, device, chosen, compilation.memory)
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
    arrays = [_at(file, number) for number in code["arrays"]]
    return Image(str(code["target"]), file.sections["tables"], objects, arrays)


def _at(file: Container, number: Any) -> Array:
    if type(number) is not int or not 0 <= number < len(file.arrays):
        raise ModelFormatError(f"there is no array number {number!r}")
    return file.arrays[number]


def _unfit(file: Container, options: CompileOptions) -> str | None:
    """Why the code of a file can't be used here and with these options, None where it can."""
    code = file.facts.get("code")
    if not isinstance(code, dict):
        return "the artifact is portable"
    device = code.get("device")
    if options.device not in ("auto", device):
        return f"its code is for device {device!r}, and {options.device!r} is asked for"
    if code.get("build") != build_identity():
        return f"its code was made by {code.get('build')!r}, this is {build_identity()!r}"
    restorer = restorer_named(str(device))
    if restorer is None or restorer.target() != code.get("target"):
        return "its code is for another processor"
    if options.dims:
        return "other dims are asked for"
    stored = file.facts.get("options", {})
    default = CompileOptions()
    for name in CODE_OPTIONS:
        asked = getattr(options, name)
        if asked not in (getattr(default, name), stored.get(name)):
            return f"its code was made with {name}={stored.get(name)!r}, and {asked!r} is asked for"
    return None


def _merged(file: Container, options: CompileOptions) -> CompileOptions:
    """The options with those that the artifact was made with where nothing else was asked for."""
    stored = file.facts.get("options")
    if not isinstance(stored, dict):
        return options
    default = CompileOptions()
    known = {k: v for k, v in stored.items() if k in CODE_OPTIONS and getattr(options, k) == getattr(default, k)}
    return options.with_options(known)


def _graph(file: Container, name: str) -> Graph:
    """The graph that the file holds, with the values of its params."""
    import rlx.ops  # noqa: F401  # the text names ops
    from rlx.ir.text import parse_graph

    try:
        facts = file.facts["graph"]
        constants = {str(key): _at(file, number) for key, number in facts["constants"].items()}
        graph = parse_graph(file.sections["graph"].decode(), constants)
        leaves = {v.name: v for v in (*graph.params, *graph.states)}
        for leaf, number in facts["values"].items():
            data = _at(file, number)
            data.flags.writeable = False
            leaves[leaf].data = data
    except ModelFormatError as error:
        raise ModelFormatError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFormatError(f"{name}: the graph of the artifact is damaged: {error!r}") from error
    return graph
