"""Sizes that no input's shape tells: those that data decide in the run, the room for them, and those that users set."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, evaluate, symbols
from rlx.kernels.program import Program

__all__ = ["check_supported", "grows", "room_for", "settable"]

FIRST_ROOM = 16  # for a size that data decide and nothing bounds; a run that needs more starts again with more


def settable(graph: Graph, program: Program) -> frozenset[str]:
    """The dims that no input's shape tells and no node's data decide."""
    told = {s.name for value in graph.inputs for size in value.shape for s in symbols(size)}
    inside = {name for node in graph.nodes for region in node.regions for name in region.dims()}
    return frozenset(graph.dims().keys() - told - program.made.keys() - inside)


def room_for(program: Program, extents: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The most that the sizes which data decide can be at these extents; where nothing says, what `more` has for them.

    `more` is what earlier runs have found that they need.
    """
    found: dict[str, int] = {}
    for name, most in program.made.items():
        symbol = program.dims[name]
        tops = [] if symbol.hi is None else [symbol.hi // symbol.multiple * symbol.multiple]
        if most is not None and all(s.name in extents or s.name in found for s in symbols(most)):
            tops.append(max(evaluate(most, {**extents, **found}), symbol.lo))
        found[name] = min(tops, default=more.get(name, FIRST_ROOM))
    return found


def grows(program: Program) -> bool:
    """Whether a run may find that it needs more room."""
    return any(most is None and program.dims[name].hi is None for name, most in program.made.items())


def check_supported(graph: Graph, program: Program, where: str) -> None:
    """Raises `UnsupportedOp`, which says `where`, for weights and states of open size and sizes that nothing tells."""
    found = []
    for leaf in (*graph.params, *graph.states):
        if any(isinstance(size, Dim) for size in leaf.shape):
            found.append(UnsupportedNode(leaf.name, leaf.kind, f"its shape {leaf.type} is not fixed: give dims"))
    known = {s.name for value in graph.inputs for size in value.shape for s in symbols(size)}
    known |= program.made.keys() | settable(graph, program)
    for node in graph.nodes:
        own = {s.name for value in node.outputs for size in value.shape for s in symbols(size)} - known
        known |= own
        if own:
            why = f"the size {', '.join(sorted(own))} can't be read off an input's shape, and no node decides it"
            found.append(UnsupportedNode(node.label, node.op.op_name, why))
    finite = {name: Dim(name, symbol.lo, symbol.lo + FIRST_ROOM) for name, symbol in program.dims.items()}
    for kernel in program.run if program.made else ():
        for buffer in kernel.writes():
            if buffer.most(finite) is None:
                why = f"the shape ({', '.join(map(str, buffer.shape))}) has no bound by the sizes that data decide"
                found.append(UnsupportedNode(kernel.label, kernel.name, why))
    if found:
        lines = "".join(f"\n  {n.op} {n.name!r}: {n.reason}" for n in found)
        raise UnsupportedOp(f"graph {graph.name!r} can't be run on {where}:{lines}", found)
