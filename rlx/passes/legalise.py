"""Legalise: every node becomes one that the backend runs, by decomposition, or a host call, or is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.base import Op
from rlx.passes.rewrite import copy_leaves, finish
from rlx.records import dataclass

__all__ = ["Dispatch", "legalise"]


@dataclass(frozen=True)
class Dispatch:
    """What became of one node: "native", "decomposed", "host" (a sync point) or "unsupported", and why."""

    node: str
    op: str
    how: str
    why: str


def legalise(graph: Graph, claims: Callable[[Node], str | None]) -> tuple[Graph, list[Dispatch]]:
    """The graph, with its regions, in ops that `claims` returns None for, and the dispatch report.

    A node that is not claimed is decomposed, again and again; one that can't be, but has a reference, becomes a host
    call. Raises `UnsupportedOp` listing every node that is neither.
    """
    report: list[Dispatch] = []
    missing: list[UnsupportedNode] = []
    made = _legal(graph, claims, report, missing)
    if missing:
        lines = "".join(f"\n  {m.op} {m.name!r}: {m.reason}" for m in missing)
        raise UnsupportedOp(f"{len(missing)} nodes can't be run on this device:{lines}", missing)
    return made, report


def _legal(
    graph: Graph,
    claims: Callable[[Node], str | None],
    report: list[Dispatch],
    missing: list[UnsupportedNode],
) -> Graph:
    new, values = copy_leaves(graph)
    for node in graph.nodes:
        outputs = _place(new, node, [values[v] for v in node.inputs], claims, report, missing)
        values.update(zip(node.outputs, outputs, strict=True))
    return finish(graph, new, values)


def _place(
    graph: Graph,
    node: Node,
    inputs: Sequence[Value],
    claims: Callable[[Node], str | None],
    report: list[Dispatch],
    missing: list[UnsupportedNode],
) -> tuple[Value, ...]:
    op: Any = node.op
    name = node.provenance[0] if node.provenance else node.outputs[0].name
    regions = node.regions
    trial = Node(op, tuple(inputs), node.outputs, node.provenance, regions)
    why = claims(trial)
    if why is None:
        regions = tuple(_legal(region, claims, report, missing) for region in regions)
        report.append(Dispatch(name, op.op_name, "native", ""))
    elif op.decompose is not None:
        report.append(Dispatch(name, op.op_name, "decomposed", why))
        return _decompose(graph, node, inputs, claims, report, missing)
    elif isinstance(op, Op) and hasattr(op, "reference") and not node.regions:
        report.append(Dispatch(name, op.op_name, "host", f"{why}: runs as a host call (a sync point)"))
    else:
        report.append(Dispatch(name, op.op_name, "unsupported", why))
        missing.append(UnsupportedNode(name, op.op_name, why))
    return graph.add(op, *inputs, name=node.outputs[0].name, provenance=node.provenance, regions=regions)


def _decompose(
    graph: Graph,
    node: Node,
    inputs: Sequence[Value],
    claims: Callable[[Node], str | None],
    report: list[Dispatch],
    missing: list[UnsupportedNode],
) -> tuple[Value, ...]:
    """Builds the decomposition in a graph of its own, then places its nodes one by one."""
    op: Any = node.op
    scratch = Graph(graph.name)
    stand_ins = []
    for number, value in enumerate(inputs):
        if value.kind == "const":
            assert value.data is not None
            stand_ins.append(scratch.constant(value.data, name=value.name))
        else:
            stand_ins.append(scratch.input(f"x{number}", value.shape, value.dtype))
    made = op.decompose(scratch, *stand_ins)
    results = made if isinstance(made, tuple) else (made,)
    values: dict[Value, Value] = dict(zip(stand_ins, inputs, strict=True))
    for const in scratch.constants:
        if const not in values:
            assert const.data is not None
            values[const] = graph.constant(const.data, name=const.name)
    for part in scratch.nodes:
        part.provenance = part.provenance or node.provenance or tuple(v.name for v in node.outputs[:1] if v.name)
        outputs = _place(graph, part, [values[v] for v in part.inputs], claims, report, missing)
        values.update(zip(part.outputs, outputs, strict=True))
    return tuple(values[v] for v in results)
