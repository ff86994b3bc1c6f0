"""Sessions: a device and options, and the ways from a graph or file to a compiled graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rlx.backends import choose_backend
from rlx.compiler import compile_graph
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.text import parse_graph
from rlx.options import CompileOptions
from rlx.runtime.auto import compile_chosen, named
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.policy import DevicePolicy, policy_of

__all__ = ["FORMATS", "Session", "compile", "load"]

FORMATS: dict[str, str] = {".onnx": "rlx.importers.onnx:load"}  # file ending -> importer: (path, dims=) -> Graph
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
        if chosen.device == "auto":
            return compile_chosen(graph, policy_of(policy if policy is not None else self.policy), chosen)
        if policy is not None:
            raise OptionError(f"policy: the device is named, {chosen.device!r}; a policy is for device='auto'")
        backend = choose_backend(chosen.device)
        made = CompiledGraph(compile_graph(graph, backend, chosen), backend.name, chosen)
        made.decide = lambda: named(graph, backend.name)
        return made

    def load(self, source: Source, *, policy: DevicePolicy | str | None = None, **options: Any) -> CompiledGraph:
        """Reads a model file and compiles it. Raises `ModelFormatError` or `UnsupportedOp` for what it can't read."""
        chosen = self.options.with_options(options)
        if isinstance(source, Graph):
            return self.compile(source, policy=policy, **options)
        graph, settled = import_graph(source, chosen.dims)
        return self.compile(graph, policy=policy, **{**options, "dims": None if settled else chosen.dims})


def import_graph(source: str | os.PathLike[str], dims: Mapping[str, Any] | None) -> tuple[Graph, bool]:
    """A graph from a model file (ONNX, or .rlx for the text form), and whether `dims` are in it already.

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
    return importer(path, dims=dims), True


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
