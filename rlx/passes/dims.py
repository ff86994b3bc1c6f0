"""Dims given by a user: a name fixes or bounds a symbol everywhere in the graph; sizes change, no element does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import OptionError, ShapeError, unknown_dim
from rlx.ir.extents import of_parts
from rlx.ir.graph import Graph, TensorType
from rlx.ir.shape import Dim, Guard, Size, Symbol, same, substitute
from rlx.ops.base import Op
from rlx.passes.rewrite import copy_leaves, finish
from rlx.units import with_ints

__all__ = ["apply_dims", "dim_values", "with_dims"]


def dim_values(graph: Graph, dims: Mapping[str, Any]) -> dict[str, Size]:
    """What each named symbol becomes: from {"batch": 4, "seq": (1, 512), "x": (1, 3, (32, 960), (32, 960))}."""
    known = graph.dims()
    inputs = {v.name: v for v in graph.inputs}
    values: dict[str, Size] = {}
    for name, spec in of_parts(with_ints(dims), known).items():
        if name in known:
            _put(values, known[name], spec)
        elif name in inputs and isinstance(spec, Mapping):
            raise OptionError(
                f"dims[{name!r}]={spec!r}: by axis a size of a model file is made one of its own; the sizes of a graph "
                f"are named where it is built: give all sizes of the input, or one by its name"
            )
        elif name in inputs and isinstance(spec, Sequence):
            shape = inputs[name].shape
            if len(spec) != len(shape):
                raise ShapeError(f"dims[{name!r}]: the input has rank {len(shape)}, {len(spec)} sizes given")
            for size, one in zip(shape, spec, strict=True):
                _put_size(values, name, size, one)
        else:
            raise unknown_dim(name, known, inputs)
    return values


def _put_size(values: dict[str, Size], name: str, size: Size, spec: Any) -> None:
    if isinstance(size, Dim) and size.symbol is not None:
        _put(values, size.symbol, spec)
    elif spec is not None and spec != size:
        raise ShapeError(f"dims[{name!r}]: the graph has the size {size} where {spec!r} is given")


def _put(values: dict[str, Size], symbol: Symbol, spec: Any) -> None:
    if spec is None:
        return
    new = _size(symbol, spec)
    old = values.get(symbol.name)
    if old is not None and old != new:
        raise OptionError(f"dims: {symbol.name!r} is given as {old} and as {new}")
    values[symbol.name] = new


def _size(symbol: Symbol, spec: Any) -> Size:
    """A size, or a pair (lowest, highest; None: open), within the bounds that the graph has for the symbol."""
    pair = (spec, spec) if isinstance(spec, int) else spec
    match pair:
        case (int(lo), int() | None as hi) if lo >= 0 and not isinstance(spec, bool):
            pass
        case _:
            raise OptionError(f"dims[{symbol.name!r}]={spec!r}: expected a size, or (lowest, highest)")
    top = symbol.hi if hi is None else hi
    if hi is not None and (hi < lo or hi < symbol.lo or (symbol.hi is not None and hi > symbol.hi)):
        bounds = f"{symbol.lo}..{'' if symbol.hi is None else symbol.hi}"
        raise ShapeError(f"dims[{symbol.name!r}]={spec!r}: the graph allows {bounds}, lowest first")
    if lo == top:
        if lo % symbol.multiple:
            raise ShapeError(f"dims[{symbol.name!r}]={spec!r}: must be a multiple of {symbol.multiple}")
        return lo
    return Dim(symbol.name, max(lo, symbol.lo), top, symbol.multiple)


def apply_dims(graph: Graph, dims: Mapping[str, Any] | None) -> Graph:
    """The graph with the symbols that `dims` names fixed or bounded. Raises `OptionError` for unknown names."""
    values = dim_values(graph, dims) if dims else {}
    if not values:
        return graph
    return with_dims(graph, values)


def with_dims(graph: Graph, values: Mapping[str, Size]) -> Graph:
    """The graph with each symbol that is named replaced by a size, in shapes, attributes and guards."""

    def resized(type: TensorType) -> TensorType:
        return TensorType(tuple(substitute(s, values) for s in type.shape), type.dtype, type.encoding)

    new, mapped = copy_leaves(graph, resized)
    for guard in graph.guards:
        lhs, rhs = substitute(guard.lhs, values), substitute(guard.rhs, values)
        if same(lhs, rhs) is False:
            raise ShapeError(f"dims: {guard.why}: {guard.lhs} and {guard.rhs} would be {lhs} and {rhs}")
        if lhs != rhs:
            new.guards.append(Guard(lhs, rhs, guard.why))
    for node in graph.nodes:
        op = node.op.with_sizes(values) if isinstance(node.op, Op) else node.op
        regions = [with_dims(region, values) for region in node.regions]
        outputs = new.add(op, *(mapped[v] for v in node.inputs), provenance=node.provenance, regions=regions)
        for old, value in zip(node.outputs, outputs, strict=True):
            value.name = old.name
            mapped[old] = value
    guards = new.guards
    finished = finish(graph, new, mapped)
    finished.guards = guards  # those of the old graph have other sizes
    return finished
