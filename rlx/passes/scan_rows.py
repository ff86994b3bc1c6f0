"""Rows of a scan that are there already: of equal stacked results one is kept, and rows passed on are the input's.

Results are equal where the same nodes make them in a round (`cse` of the body decides). What a round passes on of a
scanned input has in row i what that input has in row i, in either direction.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Value
from rlx.ops.control import Scan
from rlx.passes.cse import cse
from rlx.passes.rewrite import Site, rewrite

__all__ = ["scan_rows"]


def scan_rows(graph: Graph) -> Graph:
    """Readers of such results read what is there; `dce` removes them from the scans."""

    def visit(site: Site) -> tuple[Value, ...] | None:
        op = site.op
        if not isinstance(op, Scan):
            return None
        body = cse(site.node.regions[0])
        scanned = body.inputs[op.carries : op.carries + op.scanned]
        there = dict(zip(scanned, site.inputs[op.carries :], strict=False))
        results = [o.value for o in body.outputs][op.carries :]
        if len({*results, *there}) == len(results) + len(there):
            return None
        made = site.graph.add(op, *site.inputs, regions=site.node.regions)
        rows = [there.setdefault(value, row) for value, row in zip(results, made[op.carries :], strict=True)]
        return (*made[: op.carries], *rows)

    return rewrite(graph, visit)
