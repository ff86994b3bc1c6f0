"""The extents of a run: what the dims of a graph are, given the shapes of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlx.errors import ExecutionError, ShapeError, no_such
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Guard, Shape, Size, Symbol, evaluate, symbols

__all__ = [
    "UnequalSizes",
    "bind_extents",
    "bind_result",
    "check_all",
    "check_extent",
    "check_guards",
    "check_out",
    "check_shape",
    "initial_state",
    "of_parts",
    "uneven_rows",
]


T = TypeVar("T")


class UnequalSizes(ExecutionError):
    """Sizes that the graph was made for as equal differ in a run: a guard does not hold."""

    def __init__(self, message: str, sizes: tuple[int, int]) -> None:
        super().__init__(message)
        self.sizes = sizes


Solver = Callable[[Dim, int], tuple[Symbol, int] | None]


def of_parts(given: Mapping[str, T], known: Iterable[str]) -> dict[str, T]:
    """What is given by dim, for the parts of each name too: "N (b)" is a part of "N", unless it has an entry itself.

    A model file's name of sizes has parts where the graph doesn't need them to be equal.
    """
    names = list(known)
    found: dict[str, T] = {}
    for name, value in given.items():
        parts = [part for part in names if part.startswith(f"{name} (") and part not in given]
        found |= dict.fromkeys([name] * (name in names or not parts) + parts, value)
    return found


def bind_extents(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The extent of every dim that can be read off the shapes of inputs, params and states (by name).

    A dim is read where it stands alone or in `a * dim + b`; every other size is checked. Raises `NameNotFound` for an
    unknown name, `ShapeError` for a shape that does not fit, `ExecutionError` for an extent beyond its dim's bounds.
    """
    leaves = {v.name: v for v in (*graph.inputs, *graph.params, *graph.states)}
    for name in shapes:
        if name not in leaves:
            raise no_such("leaf", name, leaves)
    extents: dict[str, int] = {}
    pairs = [(f"{leaves[name].kind} {name!r}", leaves[name].shape, tuple(shape)) for name, shape in shapes.items()]
    for what, declared, shape in pairs:
        if len(declared) != len(shape):
            raise ShapeError(f"{what}: expected {_show(declared)} (rank {len(declared)}), got {shape}")
    for solve in (_alone, _linear):
        for what, declared, shape in pairs:
            _bind(what, declared, shape, extents, solve)
    for (what, declared, shape), name in zip(pairs, shapes, strict=True):
        try:
            check_shape(what, declared, shape, extents)
        except ShapeError as error:
            error.args = (f"{error}{_way_out(graph, name, shape, extents)}",)
            raise
    return extents


def check_out(graph: Graph, extents: Mapping[str, int], out: Sequence[Any]) -> None:
    """`ShapeError` for an array to write into (or None) whose shape isn't that of its output at these extents.

    Sizes that the run decides are not looked at: only it knows them.
    """
    for output, target in zip(graph.outputs, out, strict=True):
        if target is None:
            continue
        known = [not isinstance(n, Dim) or all(s.name in extents for s in symbols(n)) for n in output.value.shape]
        shape = tuple(evaluate(n, extents) for n, told in zip(output.value.shape, known, strict=True) if told)
        got = tuple(n for n, told in zip(target.shape, known, strict=False) if told)
        if len(target.shape) != len(known) or got != shape:
            needed = shape if all(known) else _show(output.value.shape)
            raise ShapeError(f"out for {output.name!r}: this run needs shape {needed}, got {tuple(target.shape)}")


def _way_out(graph: Graph, name: str, shape: Sequence[int], extents: Mapping[str, int]) -> str:
    """How a size that has the name of another one, of another extent, can be given a name of its own."""
    for value in graph.inputs:
        for axis, (size, extent) in enumerate(zip(value.shape, shape, strict=False)):
            symbol = size.symbol if isinstance(size, Dim) and value.name == name else None
            if symbol is not None and extents.get(symbol.name, extent) != extent:
                return (
                    f"; where a model file gives one name to sizes that may differ, dims={{{name!r}: {{{axis}: "
                    f"'{symbol.name}2'}}}} gives this one a name of its own, and a node that needs them equal is named"
                )
    return ""


def bind_result(what: str, declared: Shape, shape: Sequence[int], extents: dict[str, int]) -> None:
    """Adds the data-dependent dims that the shape of a node's result tells; raises like `bind_extents`."""
    if len(declared) == len(shape):
        _bind(what, declared, shape, extents, _alone)
    check_shape(what, declared, shape, extents)


def _bind(what: str, declared: Shape, shape: Sequence[int], extents: dict[str, int], solve: Solver) -> None:
    for size, extent in zip(declared, shape, strict=True):
        found = solve(size, extent) if isinstance(size, Dim) else None
        if found is not None and found[0].name not in extents:
            check_extent(found[0], found[1], what)
            extents[found[0].name] = found[1]


def check_extent(symbol: Symbol, extent: int, what: str) -> None:
    """`ExecutionError` unless the extent lies in the symbol's bounds and is one of its multiples."""
    hi = "" if symbol.hi is None else str(symbol.hi)
    if extent < symbol.lo or (symbol.hi is not None and extent > symbol.hi):
        message = f"{what}: the dim {symbol.name!r} is {extent}, outside its bounds {symbol.lo}..{hi}"
        if extent == 0 and symbol.multiple == 1:  # such as the past of a decoder's first step
            message += f"; dims={{{symbol.name!r}: (0, {symbol.hi})}} allows it"
        raise ExecutionError(message)
    if extent % symbol.multiple:
        raise ExecutionError(f"{what}: the dim {symbol.name!r} is {extent}, not a multiple of {symbol.multiple}")


def check_shape(what: str, declared: Shape, shape: Sequence[int], extents: Mapping[str, int]) -> None:
    """`ShapeError` unless the shape is the declared one at these extents; sizes with unknown dims are passed over."""
    known = [evaluate(s, extents) if _known(s, extents) else None for s in declared]
    if len(known) == len(shape) and all(k is None or k == n for k, n in zip(known, shape, strict=True)):
        return
    used = sorted({s.name for size in declared for s in symbols(size)} & extents.keys())
    where = f" where {', '.join(f'{name} = {extents[name]}' for name in used)}" if used else ""
    raise ShapeError(f"{what}: expected {_show(declared)}{where}, got {tuple(shape)}")


def check_guards(graph: Graph, extents: Mapping[str, int]) -> list[Guard]:
    """Raises `ExecutionError` for a guard that does not hold; returns those whose dims are not all known yet."""
    open_guards = [g for g in graph.guards if not (_known(g.lhs, extents) and _known(g.rhs, extents))]
    check_all([g for g in graph.guards if g not in open_guards], extents)
    return open_guards


def initial_state(leaf: Value) -> Array:
    """The value that a state starts with, in stored bytes if it is encoded.

    Raises `ShapeError` where inputs decide its shape.
    """
    if leaf.data is not None:
        return leaf.data
    if any(True for size in leaf.shape for _ in symbols(size)):
        raise ShapeError(
            f"state {leaf.name!r}: its shape {leaf.type} is known once there was a run: write it, or give dims"
        )
    if leaf.type.encoding is not None:
        return np.zeros(leaf.type.nbytes() or 0, np.uint8)
    return np.zeros([evaluate(size, {}) for size in leaf.shape], leaf.dtype.numpy)


def uneven_rows(what: str, before: object, now: object) -> ExecutionError:
    """The error of a loop whose rounds decide sizes of the rows that are stacked, and not the same ones."""
    return ExecutionError(
        f"{what} is {now} in one round of a loop and was {before} in an earlier one; rows that are stacked, also those "
        "that the slices of a vmap make, have one size: pad them to one"
    )


def check_all(guards: Sequence[Guard], extents: Mapping[str, int]) -> None:
    """Raises `ExecutionError` for a guard that does not hold; all their dims must be known."""
    for guard in guards:
        lhs, rhs = evaluate(guard.lhs, extents), evaluate(guard.rhs, extents)
        if lhs != rhs:
            message = f"{guard.why}: {guard.lhs} is {lhs} and {guard.rhs} is {rhs} in this run"
            raise UnequalSizes(message, (lhs, rhs))


def _known(size: Size, extents: Mapping[str, int]) -> bool:
    return all(s.name in extents for s in symbols(size))


def _show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _alone(size: Dim, extent: int) -> tuple[Symbol, int] | None:
    return (size.symbol, extent) if size.symbol else None


def _linear(size: Dim, extent: int) -> tuple[Symbol, int] | None:
    """The symbol and its value where size is a * symbol + b and a divides extent - b."""
    offset = dict(size.terms).get((), 0)
    rest = [(mono, coef) for mono, coef in size.terms if mono]
    if len(rest) != 1:
        return None
    ((mono, coef),) = rest
    if len(mono) != 1 or not isinstance(mono[0], Symbol) or (extent - offset) % coef:
        return None
    return mono[0], (extent - offset) // coef
