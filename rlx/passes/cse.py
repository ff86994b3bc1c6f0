"""Common subexpressions: nodes that compute the same become one.

The same op with the same attributes over the same values is meant, bit for bit; of commutative ops in either order.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Value
from rlx.ir.literal import content_hash, format_attribute
from rlx.ops.elementwise import Add, And, Equal, Maximum, Minimum, Mul, NotEqual, Or, Xor
from rlx.passes.rewrite import Site, copy_node, joined, rewrite

__all__ = ["cse"]

COMMUTATIVE = (Add, And, Equal, Maximum, Minimum, Mul, NotEqual, Or, Xor)
LARGEST_HASHED = 1 << 20  # bytes of a constant that are compared by content; larger ones by the array they share

Key = tuple[object, ...]


def cse(graph: Graph) -> Graph:
    """Keeps the first of equal constants and of equal nodes over the same values, under the provenance of all."""
    seen: dict[Key, tuple[Value, ...]] = {}
    constants: dict[Key, Value] = {}

    def visit(site: Site) -> tuple[Value, ...] | None:
        if site.node.regions:
            return None
        inputs = tuple(constants.setdefault(_content(v), v) if v.kind == "const" else v for v in site.inputs)
        ids = [id(v) for v in inputs]
        if isinstance(site.op, COMMUTATIVE):
            ids.sort()
        attributes = site.op.attributes().items()
        key = (site.op.op_name, *((name, format_attribute(value)) for name, value in attributes), *ids)
        if key in seen:
            first = seen[key][0].node
            assert first is not None
            first.provenance = joined(first, site.node)
        else:
            seen[key] = copy_node(site.graph, site.node, inputs)
        return seen[key]

    return rewrite(graph, visit)


def _content(value: Value) -> Key:
    assert value.data is not None
    by_content = value.data.nbytes <= LARGEST_HASHED
    return (value.type, content_hash(value.data) if by_content else id(value.data))
