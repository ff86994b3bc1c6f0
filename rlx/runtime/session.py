"""Sessions: a device and options, and the ways from a graph or file to a compiled graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rlx.backends import choose_backend
from rlx.compiler import compile_graph
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.text import parse_graph
from rlx.options import CompileOptions
from rlx.runtime.compiled import CompiledGraph

__all__ = ["FORMATS", "Session", "compile", "load"]

FORMATS: dict[str, str] = {".onnx": "rlx.importers.onnx:load"}  # file ending -> importer: (path, dims=) -> Graph

Source = Graph | str | os.PathLike[str]


class Session:
    """Options that several compiles share; the keywords are the fields of `CompileOptions`."""

    def __init__(self, **options: Any) -> None:
        self.options = CompileOptions().with_options(options)

    def compile(self, graph: Graph, **options: Any) -> CompiledGraph:
        """Compiles a graph for the device; keywords override the session's options."""
        if not isinstance(graph, Graph):
            raise OptionError(f"compile takes a Graph, got {type(graph).__name__}; rlx.load takes files")
        chosen = self.options.with_options(options)
        backend = choose_backend(chosen.device)
        return CompiledGraph(compile_graph(graph, backend, chosen), backend.name, chosen)

    def load(self, source: Source, **options: Any) -> CompiledGraph:
        """Reads a model file and compiles it. Raises `ModelFormatError` or `UnsupportedOp` for what it can't read."""
        chosen = self.options.with_options(options)
        return self.compile(import_graph(source), **{**options, "dims": chosen.dims})


def import_graph(source: Source) -> Graph:
    """A graph from a model file, by its ending (.onnx, or .rlx for the text form)."""
    if isinstance(source, Graph):
        return source
    path = Path(source)
    ending = path.suffix.lower()
    if ending == ".rlx":
        try:
            return parse_graph(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{path}: can't be read: {error}") from None
    if ending not in FORMATS:
        raise ModelFormatError(f"{path}: unknown kind of model file; known endings are {', '.join(FORMATS)}, .rlx")
    module, _, name = FORMATS[ending].partition(":")
    importer: Callable[..., Graph] = getattr(import_module(module), name)
    return importer(path)


def compile(graph: Graph, **options: Any) -> CompiledGraph:
    """Compiles a graph: `rlx.Session(**options).compile(graph)`."""
    return Session().compile(graph, **options)


def load(source: Source, **options: Any) -> CompiledGraph:
    """Loads and compiles a model file: `rlx.Session(**options).load(source)`."""
    return Session().load(source, **options)
