"""What no code generator can run, told before any code is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.codegen.binding import FIRST_ROOM, settable
from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Dim, symbols
from rlx.kernels.lowering import lower_node
from rlx.kernels.narrow import unknown_dtype
from rlx.kernels.program import Program
from rlx.ops.control import Control

if TYPE_CHECKING:
    from rlx.backends.base import CodeGenerator

__all__ = ["check_supported", "claim_of_loops"]


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


def claim_of_loops(device: CodeGenerator, node: Node) -> str | None:
    """Why a device whose kernels are all loops and anchors does not compute a node; None where it does."""
    if isinstance(node.op, Control):
        return None
    lowered = lower_node(node)
    if lowered is None:
        return "its op has no lowering"
    if lowered.anchor is not None and lowered.generic is None and not device.accepts_anchor(lowered.anchor, node):
        return "only its decomposition is loops"
    unknown = unknown_dtype(lowered, device.accepts_dtype)
    return None if unknown is None else f"it has no code for {unknown}"
