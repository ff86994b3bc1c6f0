"""Sessions: a device and options, and the ways from a graph or file to a compiled graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from rlx.backends import choose_backend
from rlx.errors import ModelFormatError, OptionError
from rlx.estimate.admit import Admission
from rlx.estimate.api import estimate as estimate_model
from rlx.estimate.memory import MemoryEstimate
from rlx.ir.graph import Graph
from rlx.ir.text import parse_graph
from rlx.options import CompileOptions
from rlx.runtime.auto import compile_chosen, compile_on, named
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.memory import Resident
from rlx.runtime.policy import DevicePolicy, policy_of

__all__ = ["FORMATS", "Session", "compile", "load"]

FORMATS: dict[str, str] = {
    ".onnx": "rlx.importers.onnx:load"
}  # file ending -> importer: (path, dims=, admit=) -> Graph
TEXT = ".rlx"

Source = Graph | str | os.PathLike[str]


class Session:
    """Options that several compiles share; the keywords are the fields of `CompileOptions`."""

    def __init__(self, *, policy: DevicePolicy | str | None = None, **options: Any) -> None:
        self.options = CompileOptions().with_options(options)
        self.policy = policy

    def compile(self, graph: Graph, *, policy: DevicePolicy | str | None = None, **options: Any) -> CompiledGraph:
        """Compiles a graph for the device; keywords override the session's options.

        For the device "auto" `policy` (a DevicePolicy, or its text; default: the session's, else that of
        RLX_DEVICE_POLICY) says how to choose; `decision` of the result tells what was chosen and why.
        """
        if not isinstance(graph, Graph):
            raise OptionError(f"compile takes a Graph, got {type(graph).__name__}; rlx.load takes files")
        chosen = self.options.with_options(options)
        return self._compile(graph, chosen, policy, Resident.read())

    def _compile(self, graph: Graph, chosen: CompileOptions, policy: Any, before: Resident) -> CompiledGraph:
        if chosen.device == "auto":
            return compile_chosen(graph, policy_of(policy if policy is not None else self.policy), chosen, before)
        if policy is not None:
            raise OptionError(f"policy: the device is named, {chosen.device!r}; a policy is for device='auto'")
        made = compile_on(graph, choose_backend(chosen.device), chosen, before)
        made.decide = lambda: named(graph, made.device)
        return made

    def load(self, source: Source, *, policy: DevicePolicy | str | None = None, **options: Any) -> CompiledGraph:
        """Reads a model file and compiles it. Raises `ModelFormatError` or `UnsupportedOp` for what it can't read."""
        chosen = self.options.with_options(options)
        if isinstance(source, Graph):
            return self.compile(source, policy=policy, **options)
        before = Resident.read()
        backend = choose_backend(chosen.device)  # for "auto": the memory that weights are read into is this machine's
        graph, settled = import_graph(source, chosen.dims, admit=Admission(backend, chosen).weights)
        return self._compile(graph, chosen.with_options({"dims": None}) if settled else chosen, policy, before)

    def estimate(self, model: Source, **options: Any) -> MemoryEstimate:
        """What a graph or model file will take in memory, with this session's options; see `rlx.estimate`."""
        own = {f.name: getattr(self.options, f.name) for f in fields(CompileOptions)}
        return estimate_model(model, **{**own, **options})


def import_graph(
    source: str | os.PathLike[str],
    dims: Mapping[str, Any] | None,
    admit: Callable[[str, int], None] = lambda model, nbytes: None,
) -> tuple[Graph, bool]:
    """A graph from a model file (ONNX, or .rlx for the text form), and whether `dims` are in it already.

    `admit` is asked before weights are read: it gets the bytes that must be copied out of the file.

    The ending says what a file is; one with another ending is looked into. Raises `ModelFormatError`.
    """
    if not isinstance(source, str | os.PathLike):
        raise OptionError(f"load takes the path of a model file, got {type(source).__name__}; rlx.compile takes graphs")
    path = Path(source)
    ending = path.suffix.lower()
    try:
        if ending == TEXT:
            return parse_text(path), False
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise ModelFormatError(f"{path}: can't be read: {error.strerror or error}") from None
    if ending not in FORMATS and head[:1] == b"\x08" and 0 < head[-1] < 32:
        ending = ".onnx"  # a protobuf message whose field 1 (of a model: the version of its IR) is a small number
    if ending not in FORMATS:
        known = ", ".join((*FORMATS, TEXT))
        raise ModelFormatError(f"{path}: neither its ending nor its contents are those of a model; known are {known}")
    module, _, name = FORMATS[ending].partition(":")
    importer: Callable[..., Graph] = getattr(import_module(module), name)
    return importer(path, dims=dims, admit=admit), True


def parse_text(path: Path) -> Graph:
    """The graph of a file in the text form."""
    try:
        return parse_graph(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: is not text: {error}") from None
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from None


def compile(graph: Graph, **options: Any) -> CompiledGraph:
    """Compiles a graph: `rlx.Session(**options).compile(graph)`."""
    return Session().compile(graph, **options)


def load(source: Source, **options: Any) -> CompiledGraph:
    """Loads and compiles a model file: `rlx.Session(**options).load(source)`."""
    return Session().load(source, **options)
