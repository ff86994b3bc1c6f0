"""Artifacts: a compiled graph in one file, which loads without importing, compiling or LLVM.

An artifact holds the graph with its weights, from which any machine can compile it again, and, unless it is portable,
the code, tables and packed weights for the machine that made it. That code is trusted like a shared library: checksums
find damage, but who can write the file can run code in the process that loads it. The graph and its weights are taken
as those of any model file: nothing in them is believed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlx.backends import restorer_named
from rlx.disk import target_of
from rlx.errors import ModelFormatError, OptionError, RlxError
from rlx.ir.graph import Array, Graph, check_array
from rlx.ir.mapped import place_of
from rlx.ir.strings import as_strings
from rlx.lazy_imports import log
from rlx.options import DEVICE_OPTIONS, CompileOptions
from rlx.runtime.arrays import on_device
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import Container, build_identity, read_container, write_container
from rlx.runtime.restore import CODE_OPTIONS, array_at, merged, restore

__all__ = ["load_artifact", "save_artifact", "store"]

Compile = Callable[[Graph, CompileOptions], CompiledGraph]


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
    name = target_of(path, "save")  # before the work
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
        array: Any = model._executable.raw_param(value.name)
        if array is None:
            array = model.adapters.value_of(value.name) if value.name in model._changed else value.data
        if array is not None:
            values[value.name] = stored.add(array.numpy() if on_device(array) else array)
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
    table = constants_table(graph)
    constants = {key: stored.add(array) for key, array in table.items() if array.dtype.kind != "T"}
    strings = {key: array.tolist() for key, array in table.items() if array.dtype.kind == "T"}
    if strings:
        stored.sections["strings"] = json.dumps(strings).encode()
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


def load_artifact(
    path: str | os.PathLike[str],
    options: CompileOptions,
    given: Collection[str],
    compile: Compile,
    portable_only: bool = False,
) -> CompiledGraph:
    """A compiled graph from an artifact, compiled again where the file has no code for this machine and these options.

    Options of code that are not `given`, by name, are those that the artifact was made with. With `portable_only` it is
    always compiled again, and code in the file is not looked at. Raises `ModelFormatError`.
    """
    file = read_container(path)
    name = os.fspath(path)
    why = (
        "portable_only leaves its code alone"
        if portable_only and "code" in file.facts
        else _unfit(file, options, given)
    )
    chosen = merged(file, options, given)
    if why is None:
        try:
            return _with_adapters(restore(file, chosen, lambda: _graph(file, name)), file, name)
        except ModelFormatError as error:
            why = str(error)
    facts = file.facts.get("graph")
    if not isinstance(facts, dict):
        raise ModelFormatError(f"{name}: {why}, and the artifact has no graph to compile again")
    lost = facts.get("lost")
    if lost:
        names = ", ".join(map(repr, lost[:8] if isinstance(lost, list) else [lost]))
        raise ModelFormatError(
            f"{name}: {why}, and it can't be compiled again: the artifact has only packed weights for {names}; "
            "save it with portable=True where these are still there"
        )
    say = log.info if portable_only or "code" not in file.facts else log.warning
    say("%s: %s: compiling it again", name, why)
    return _with_adapters(compile(_graph(file, name), _honoured(chosen, options)), file, name)


def _honoured(chosen: CompileOptions, asked: CompileOptions) -> CompileOptions:
    """The options of an artifact for another device: those that it does not honour are left as they were asked for."""
    if asked.device == "auto":
        return chosen
    from rlx.backends import backend_named

    honours = backend_named(asked.device).honours
    return chosen.with_options({name: getattr(asked, name) for name in DEVICE_OPTIONS if name not in honours})


def _with_adapters(model: CompiledGraph, file: Container, name: str) -> CompiledGraph:
    """The model with the adapters that it was saved with, whose weights are in its params."""
    try:
        table = []
        for entry in file.facts.get("adapters", ()):
            pairs = {str(target): (array_at(file, a), array_at(file, b)) for target, (a, b) in entry["pairs"].items()}
            table.append((str(entry["name"]), int(entry["slot"]), float(entry["scale"]), pairs))
        if table:
            model.adapters.restore(table)
    except (RlxError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelFormatError(f"{name}: the table of adapters is damaged: {error!r}") from error
    return model


def _unfit(file: Container, options: CompileOptions, given: Collection[str]) -> str | None:
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
    if restorer is None:
        return f"its code is for device {device!r}, of which none is stored"
    if restorer.target() != code.get("target"):
        return f"its code is for {restorer.unlike(str(code.get('target')))}"
    if options.dims:
        return "other dims are asked for"
    stored = file.facts.get("options", {})
    for name in CODE_OPTIONS:
        asked = getattr(options, name)
        if name in given and asked != stored.get(name):
            return f"its code was made with {name}={stored.get(name)!r}, and {asked!r} is asked for"
    return None


def _graph(file: Container, name: str) -> Graph:
    """The graph that the file holds, with the values of its params."""
    import rlx.ops  # noqa: F401  # the text names ops
    from rlx.ir.text import parse_graph

    try:
        facts = file.facts["graph"]
        constants = {str(key): array_at(file, number) for key, number in facts["constants"].items()}
        strings = json.loads(file.sections.get("strings", b"{}"))
        constants |= {str(key): as_strings(texts, f"constant {key}") for key, texts in strings.items()}
        graph = parse_graph(file.sections["graph"].decode(), constants)
        leaves = {v.name: v for v in (*graph.params, *graph.states)}
        for leaf, number in facts["values"].items():
            data, value = array_at(file, number), leaves[leaf]
            check_array(f"{value.kind} {leaf!r}", data, value.type)
            data.flags.writeable = False
            value.data = data
    except RlxError as error:
        raise ModelFormatError(f"{name}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelFormatError(f"{name}: the graph of the artifact is damaged: {error!r}") from error
    return graph
