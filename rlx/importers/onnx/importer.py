"""ONNX models as graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ModelFormatError, OptionError, ShapeError, UndecidedInputs, UnsupportedOp, no_such
from rlx.importers.onnx.dims import (
    Bound,
    DimsOption,
    input_shapes,
    of_names_and_parts,
    own_names,
    settled,
    unknown_dims,
)
from rlx.importers.onnx.mapping import TAINTED, ListOf, Mapped, StackOf, UnsupportedError, element_dtype
from rlx.importers.onnx.mappings import every  # noqa: F401  # importing it fills the table of ops
from rlx.importers.onnx.model import ModelFile, ValueInfo, read_model
from rlx.importers.onnx.parts import Parts, parted
from rlx.importers.onnx.reads import in_order, live_nodes, sources_of_sizes
from rlx.importers.onnx.region import Region, remove_dead
from rlx.importers.onnx.scope import Import, MissingNode, Run, Scope
from rlx.importers.onnx.symbolic import LIMIT, Static, static_array
from rlx.ir.extents import of_parts
from rlx.ir.given import MOST_ELEMENTS, Formal, Items, Values
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Shape

__all__ = ["Import", "MissingNode", "ModelSource", "check", "import_model", "load"]

KINDS = ("tensor", "sequence(tensor)", "optional(tensor)", "optional(sequence(tensor))")
ModelSource = str | os.PathLike[str] | bytes | bytearray | memoryview


def load(
    source: ModelSource,
    *,
    dims: DimsOption | None = None,
    values: Values | None = None,
    admit: Callable[[str, int], None] = lambda model, nbytes: None,
) -> Graph:
    """The graph of an ONNX model of opset 7 or later, given by path or as bytes; weights are views of the file.

    `dims` fix or bound the sizes that the file leaves open: `{"batch": 4, "seq": (1, 512)}`, or by input,
    `{"x": (1, 3, (32, 960), (32, 960))}`; sizes that nodes produce can be bounded too. Shape arithmetic is carried out
    at import. `values` gives inputs that the graph then has as constants, and what sequences hold: what they decide can
    be no run-time data, and `UndecidedInputs` names those that are left out.

    Raises `UnsupportedOp` listing every node that can't be imported, `ModelFormatError`, `OptionError` and
    `ShapeError`, and what `admit` does: before weights are read, it gets the bytes that must be copied out of the file.
    """
    model = read_model(source)
    admit(model.path, sum(ref.nbytes for ref in model.graph.initializers.values() if ref.is_copied))
    unknown = [
        i.name for i in _true_inputs(model) if i.shape is None and i.kind == "tensor" and i.name not in (dims or {})
    ]
    if unknown:
        names = ", ".join(map(repr, unknown))
        example = f'dims={{"{unknown[0]}": (1, (1, 512))}}'
        raise ShapeError(f"{model.path}: the file does not say the rank of input {names}; give its shape, {example}")
    done = import_model(model, dims=dims, values=values)
    check(done)
    if done.lacking:
        raise ModelFormatError("\n".join(f"{model.path}: tensor {name!r}: {why}" for name, why in done.lacking.items()))
    return done.graph


def check(done: Import) -> None:
    """Raises `UnsupportedOp` with all that is missing, `UndecidedInputs` if no more than that, or `ShapeError`."""
    if done.missing:
        if all(node.inputs for node in done.missing):
            names = list(dict.fromkeys(name for node in done.missing for name in node.inputs))
            error = UndecidedInputs(
                f"{_message(done)}\n  The values of {', '.join(map(repr, names))} decide ranks: rlx.load gives a model "
                "that reads them in each run and compiles once for each value; values= makes constants of them",
                done.missing,
            )
            error.inputs, error.signature = tuple(names), tuple(done.signature)
            raise error
        raise UnsupportedOp(_message(done), done.missing)
    if done.misfits:
        raise ShapeError("; ".join(str(e) for e in done.misfits))


def import_model(
    model: ModelFile, *, dims: DimsOption | None = None, values: Values | None = None, weights: bool = True
) -> Import:
    """Imports as much as can be; params have no data with `weights=False`."""
    inputs = _true_inputs(model)
    for name in values or {}:
        if name not in {info.name for info in inputs}:
            raise no_such("input", name, [info.name for info in inputs], call="values")
    late = of_names_and_parts(inputs, dims or {})
    shapes, others = input_shapes(inputs, {name: bound for name, bound in (dims or {}).items() if name not in late})

    def trial(shapes: Mapping[str, Shape], parts: Parts | None) -> Graph | None:
        done = _imported(model, shapes, others, False, values or {}, parts)
        return None if done.missing or done.misfits else done.graph

    parts = parted(inputs, shapes, own_names(dims), trial)
    if parts is not None and late.keys() <= parts.undivided.keys():
        own = of_parts(late, parts.undivided)
        shapes = parts.shapes({part: settled(part, bound) for part, bound in own.items() if bound is not None})
    elif late:  # there are no such parts, which is told
        shapes, others = input_shapes(inputs, dims)
    result = _imported(model, shapes, others, weights, values or {})
    unused = {name: bound for name, bound in others.items() if name not in result.produced}
    if unused:
        raise unknown_dims(unused, inputs, result.produced)
    return result


def _imported(
    model: ModelFile,
    shapes: Mapping[str, Shape],
    bounds: Mapping[str, Bound],
    weights: bool,
    values: Values,
    parts: Parts | None = None,
) -> Import:
    """Imports a model with inputs of these shapes; `bounds` are those of dims that nodes produce."""
    graph = Graph(model.graph.name or "graph")
    result = Import(model, graph)
    scope = Scope(Run(result, bounds, weights, parts), Region(graph), model.opsets)
    _define_leaves(scope, _true_inputs(model), shapes, values)
    result.unused = scope.walk(model.graph.nodes, [o.name for o in model.graph.outputs])
    made = [_output(scope, info.name) for info in model.graph.outputs if not scope.is_tainted(info.name)]
    if any(kind != "tensor" for _, kind, _ in made):
        for name, kind, outputs in made:
            graph.result(name, kind, outputs)
    remove_dead(graph)
    return result


def _true_inputs(model: ModelFile) -> list[ValueInfo]:
    return [i for i in model.graph.inputs if i.name not in model.graph.initializers]


def _message(done: Import) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for node in done.missing:
        op = f"{node.domain}.{node.op}" if node.domain else node.op
        reasons.setdefault((op, node.reason), []).append(node.name)
    lines = []
    for (op, reason), names in reasons.items():
        shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"  {op} x{len(names)} ({shown}): {reason}")
    count = f"{len(done.missing)} node{'s' * (len(done.missing) > 1)}"
    lines += [f"  Weights ({name!r}): {why}" for name, why in done.lacking.items()]
    return f"{done.model.path}: {count} or inputs can't be imported:\n" + "\n".join(lines)


def _define_leaves(scope: Scope, inputs: list[ValueInfo], shapes: Mapping[str, Shape], values: Values) -> None:
    model = scope.run.model
    refs = model.graph.initializers
    listed = {i.name for i in model.graph.inputs} if model.ir_version >= 4 else set()
    live = live_nodes(in_order(model.graph.nodes), [o.name for o in model.graph.outputs])
    sizes = sources_of_sizes(live, model)
    scope.initialize(refs)
    names = [i.name for i in inputs]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ModelFormatError(f"{model.path}: the graph has two inputs of the name {twice!r}")
    scope.pinned = {n for n in sizes if n in refs and refs[n].size <= LIMIT}
    scope.overridable = frozenset(listed & refs.keys() - scope.pinned)
    for info in inputs:
        try:
            if info.kind not in KINDS:
                raise UnsupportedError(f"an input of kind {info.kind} is not supported")
            formal = Formal(info.name, info.kind, shapes.get(info.name), element_dtype(info.elem_type))
            scope.run.result.signature.append(formal)
            scope.bind(info.name, _input(scope, formal, values))
        except (DTypeError, UnsupportedError) as error:
            needs = getattr(error, "inputs", ())
            scope.run.result.missing.append(MissingNode(info.name, "Input", str(error), inputs=needs))
            scope.bind(info.name, TAINTED)
    scope.run.names.update(scope.graph.dims())
    scope.run.leaves.update(i.name for i in inputs)


def _input(scope: Scope, formal: Formal, values: Values) -> Mapped:
    """What an input is in the graph: a tensor of it, a constant, or the tensors of a sequence, "name.0" and so on."""
    name, given = formal.name, values.get(formal.name)
    if formal.kind == "tensor":
        if formal.shape is None:
            raise UnsupportedError("its rank is not known; give its shape with dims")
        if given is None:
            return scope.graph.input(name, formal.shape, formal.dtype)
        return _constant(formal, given)
    if given is None:
        raise UnsupportedError(f"an input of kind {formal.kind}: a run decides how many tensors it has", [name])
    if not isinstance(given, Items):
        raise OptionError(f"values[{name!r}]: an input of kind {formal.kind} has no single array")
    if given.ranks is None:
        return ListOf((), absent=True)
    if formal.kind == "optional(tensor)":
        return scope.graph.input(name, _shape(formal, given.ranks[0], name), formal.dtype)
    names = [f"{name}.{i}" for i in range(len(given.ranks))]
    shapes = [_shape(formal, rank, item) for rank, item in zip(given.ranks, names, strict=True)]
    return ListOf(tuple(scope.graph.input(n, s, formal.dtype) for n, s in zip(names, shapes, strict=True)))


def _constant(formal: Formal, given: Any) -> Static:
    name, shape = formal.name, formal.shape or ()
    if formal.dtype.kind == "s":
        raise OptionError(f"values[{name!r}]: strings are run-time data and can't be made constants")
    array = np.asarray(given)
    if array.dtype != formal.dtype.numpy:
        try:
            made = array.astype(formal.dtype.numpy)
        except (TypeError, ValueError):
            made = array
        if not isinstance(given, bool | int | float | list | tuple) or not np.array_equal(made, array):
            raise OptionError(f"values[{name!r}]: expected elements of type {formal.dtype}, got {array.dtype}")
        array = made
    if len(shape) != array.ndim or any(isinstance(s, int) and s != n for s, n in zip(shape, array.shape, strict=True)):
        raise ShapeError(f"values[{name!r}]: expected shape ({', '.join(map(str, shape))}), got {array.shape}")
    if array.size > MOST_ELEMENTS:
        raise ShapeError(f"values[{name!r}]: {array.size} elements; at most {MOST_ELEMENTS} become constants")
    return static_array(array, formal.dtype)


def _shape(formal: Formal, rank: int, name: str) -> Shape:
    """The shape of a tensor in a sequence: each has sizes of its own where the file fixes none."""
    said = (None,) * rank if formal.shape is None else formal.shape
    if len(said) != rank:
        raise ShapeError(f"input {name!r}: expected {len(said)} axes, got {rank}")
    return tuple(size if isinstance(size, int) else Dim(f"{name}.{d}") for d, size in enumerate(said))


def _output(scope: Scope, name: str) -> tuple[str, str, list[str]]:
    """Makes a tensor an output, or each item of a sequence, as "name.0" and so on; gives what `Graph.result` takes."""
    items = scope.sequence(name)
    try:
        if items is None:
            scope.graph.output(scope.value(name), name)
            return name, "tensor", [name]
        if isinstance(items, StackOf):
            scope.graph.output(scope.region.pull(items.rows), name)
            return name, "rows", [name]
        assert isinstance(items, ListOf)
        names = [f"{name}.{i}" for i in range(len(items.items))]
        for item, own in zip(items.items, names, strict=True):
            scope.graph.output(scope.item(item), own)
        return name, "absent" if items.absent else "list", names
    except (DTypeError, OptionError, UnsupportedError) as error:
        scope.run.result.missing.append(MissingNode(name, "Output", str(error)))

        return name, "list", []
