"""Legalise: every node becomes one that the backend runs, by decomposition, or a host call, or is reported.

It decides by types and attributes, never by values; that a decomposition is the op is its op's business (and tests').
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.base import Op
from rlx.ops.misc import Within
from rlx.passes.rewrite import Site, copy_leaves, finish, inside_regions, rewrite
from rlx.records import dataclass

__all__ = ["Dispatch", "legalise", "without_budgets"]


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
    work = _Legaliser(claims)
    made = work.legal(graph)
    if work.missing:
        lines = "".join(f"\n  {m.op} {m.name!r}: {m.reason}" for m in work.missing)
        raise UnsupportedOp(f"{len(work.missing)} nodes can't be run on this device:{lines}", work.missing)
    return made, work.report


class _Legaliser:
    """What became of the nodes so far."""

    def __init__(self, claims: Callable[[Node], str | None]) -> None:
        self.claims = claims
        self.report: list[Dispatch] = []
        self.missing: list[UnsupportedNode] = []

    def legal(self, graph: Graph) -> Graph:
        new, values = copy_leaves(graph)
        for node in graph.nodes:
            outputs = self.place(new, node, [values[v] for v in node.inputs])
            values.update(zip(node.outputs, outputs, strict=True))
        return finish(graph, new, values)

    def place(self, graph: Graph, node: Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """Appends the node, or what it is decomposed into, to the new graph."""
        op: Any = node.op
        name = node.provenance[0] if node.provenance else node.outputs[0].name
        regions = node.regions
        why = self.claims(Node(op, tuple(inputs), node.outputs, node.provenance, regions))
        if why is None:
            regions = tuple(map(self.legal, regions))
            self.report.append(Dispatch(name, op.op_name, "native", ""))
        elif op.decompose is not None:
            self.report.append(Dispatch(name, op.op_name, "decomposed", why))
            return self.decompose(graph, node, inputs)
        elif isinstance(op, Op) and hasattr(op, "reference") and not regions:
            self.report.append(Dispatch(name, op.title, "host", f"{why}: runs as a host call (a sync point)"))
        else:
            self.report.append(Dispatch(name, op.op_name, "unsupported", why))
            self.missing.append(UnsupportedNode(name, op.op_name, why))
        return graph.add(op, *inputs, name=node.outputs[0].name, provenance=node.provenance, regions=regions)

    def decompose(self, graph: Graph, node: Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
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
            outputs = self.place(graph, part, [values[v] for v in part.inputs])
            values.update(zip(part.outputs, outputs, strict=True))
        return tuple(values[v] for v in results)


def without_budgets(graph: Graph) -> tuple[Graph, int | None]:
    """The graph and its regions without `Within`, and the least budget of these in bytes; None where there is none.

    It comes before the passes, so that no mark is in their way.
    """
    budgets = list(_budgets(graph))
    return (_without(graph), min(budgets)) if budgets else (graph, None)


def _budgets(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        if isinstance(node.op, Within):
            yield node.op.budget
        for region in node.regions:
            yield from _budgets(region)


def _without(graph: Graph) -> Graph:
    return inside_regions(rewrite(graph, _itself), _without)


def _itself(site: Site) -> Value | None:
    return site.inputs[0] if isinstance(site.op, Within) else None
