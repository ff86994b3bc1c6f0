"""What an ONNX file needs, said before anything of it is computed or its weights are read."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.importers.onnx.dims import DimsOption
from rlx.importers.onnx.importer import Import, MissingNode, ModelSource, import_model
from rlx.importers.onnx.model import ModelFile, read_model
from rlx.importers.onnx.reads import inner_nodes, subgraphs_of
from rlx.importers.onnx.tensor import TensorRef
from rlx.ir.shape import Dim, format_symbol
from rlx.records import dataclass

__all__ = ["DTypeCount", "Preflight", "preflight"]


@dataclass(frozen=True)
class DTypeCount:
    """How many weight tensors have an element type, and their bytes as stored."""

    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Preflight:
    """Whether a model can be imported, and what it holds.

    `supported` counts the nodes of each op type that can be imported; of these `unchecked` depend on missing nodes, so
    that only their op type could be checked. `unused` nodes lead to no output. `dynamic` gives for each open size the
    inputs and axes where it stands, or the node that makes it; `notes` say where the graph gives something else than
    the file says; `weights` has all initializers and Constant nodes, those of subgraphs too, by element type.
    """

    path: str
    producer: str
    opsets: dict[str, int]
    nodes: int
    supported: dict[str, int]
    unchecked: int
    unused: int
    missing: tuple[MissingNode, ...]
    misfits: tuple[str, ...]
    dynamic: dict[str, tuple[str, ...]]
    weights: dict[str, DTypeCount]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether `load` would give a graph."""
        return not self.missing and not self.misfits

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(count.nbytes for count in self.weights.values())

    def __str__(self) -> str:
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        ops = ", ".join(f"{op} {count}" for op, count in sorted(self.supported.items()))
        weights = ", ".join(f"{name} {c.tensors} ({c.nbytes:,} bytes)" for name, c in self.weights.items())
        dims = "; ".join(f"{format_symbol(name)}: {', '.join(where)}" for name, where in self.dynamic.items())
        lines = [
            f"{self.path}: {'can be imported' if self.ok else 'can not be imported'}",
            f"opsets    {opsets}",
            f"nodes     {self.nodes}, {self.unused} unused",
            f"supported {sum(self.supported.values())}: {ops or 'none'}",
            f"weights   {weights or 'none'}; {self.weight_bytes:,} bytes in all",
            f"dynamic   {dims or 'none'}",
        ]
        if self.unchecked:
            lines.append(f"unchecked {self.unchecked} nodes that depend on missing ones")
        lines += [f"missing   {_named(node)}: {node.reason}" for node in self.missing]
        lines += [f"misfit    {text}" for text in self.misfits]
        lines += [f"note      {text}" for text in self.notes]
        return "\n".join(lines)


def _named(node: MissingNode) -> str:
    op = f"{node.domain}.{node.op}" if node.domain else node.op
    return f"{op} {node.name!r}" + (f" (opset {node.opset})" if node.opset else "")


def preflight(source: ModelSource, *, dims: DimsOption | None = None) -> Preflight:
    """Says whether a model (path or bytes) can be imported with `dims`, and all that stands in the way.

    Reads no weights. Raises `ModelFormatError` for a file that is malformed, `OptionError` and `ShapeError` for dims
    that do not fit it.
    """
    return _summary(import_model(read_model(source), dims=dims, weights=False))


def _summary(done: Import) -> Preflight:
    model = done.model
    weights: dict[str, DTypeCount] = {}
    for ref in _tensors(model):
        name = ref.element.name
        old = weights.get(name, DTypeCount(0, 0))
        weights[name] = DTypeCount(old.tensors + 1, old.nbytes + ref.nbytes)
    dynamic: dict[str, list[str]] = {}
    for value in done.graph.inputs:
        for axis, size in enumerate(value.shape):
            if isinstance(size, Dim) and size.symbol:
                dynamic.setdefault(size.symbol.name, []).append(f"{value.name}[{axis}]")
    for name, label in done.produced.items():
        dynamic.setdefault(name, []).append(f"made by {label}")
    return Preflight(
        path=model.path,
        producer=f"{model.producer} {model.producer_version}".strip(),
        opsets=model.opsets,
        nodes=len(model.graph.nodes),
        supported=dict(done.supported),
        unchecked=done.unchecked,
        unused=done.unused,
        missing=(*done.missing, *(MissingNode(name, "Weights", why) for name, why in done.lacking.items())),
        misfits=tuple(str(e) for e in done.misfits),
        dynamic={name: tuple(where) for name, where in dynamic.items()},
        weights=weights,
        notes=tuple(dict.fromkeys(done.notes)),
    )


def _tensors(model: ModelFile) -> Iterator[TensorRef]:
    """All tensors of the file: initializers, and the tensors that are attributes."""
    yield from model.graph.initializers.values()
    bodies = [model.graph.nodes, *(function.nodes for function in model.functions.values())]
    for node in (node for nodes in bodies for outer in nodes for node in (outer, *inner_nodes(outer))):
        yield from (a.value for a in node.attributes.values() if isinstance(a.value, TensorRef))
        for _, graph in subgraphs_of(node):
            yield from graph.initializers.values()
