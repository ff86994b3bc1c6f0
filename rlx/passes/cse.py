"""Common subexpressions: nodes that compute the same become one.

The same op with the same attributes, and the very same regions, over the same values is meant, bit for bit; of
commutative ops in either order. What an op gives back as it is, is the op's input.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Value
from rlx.ir.literal import content_hash, end_bytes, format_attribute, same_bytes
from rlx.ops.elementwise import Add, And, Equal, Identity, Maximum, Minimum, Mul, NotEqual, Or, Xor
from rlx.passes.rewrite import Site, copy_node, joined, rewrite

__all__ = ["cse"]

COMMUTATIVE = (Add, And, Equal, Maximum, Minimum, Mul, NotEqual, Or, Xor)
LARGEST_HASHED = (
    1 << 20
)  # bytes of a constant that is told by a hash; larger ones are compared where their ends are equal

Key = tuple[object, ...]


def cse(graph: Graph) -> Graph:
    """Keeps the first of equal constants and of equal nodes over the same values, under the provenance of all."""
    seen: dict[Key, tuple[Value, ...]] = {}
    constants: dict[Key, list[Value]] = {}

    def visit(site: Site) -> tuple[Value, ...] | None:
        if isinstance(site.op, Identity):
            return site.inputs
        inputs = tuple(_first(v, constants) if v.kind == "const" else v for v in site.inputs)
        ids = [id(v) for v in inputs]
        if isinstance(site.op, COMMUTATIVE):
            ids.sort()
        attributes = site.op.attributes().items()
        key = (
            site.op.op_name,
            *((name, format_attribute(value)) for name, value in attributes),
            *ids,
            *map(id, site.node.regions),
        )
        if key in seen:
            first = seen[key][0].node
            assert first is not None
            first.provenance = joined(first, site.node)
        else:
            seen[key] = copy_node(site.graph, site.node, inputs)
        return seen[key]

    return rewrite(graph, visit)


def _first(value: Value, constants: dict[Key, list[Value]]) -> Value:
    """The first constant that is equal to this one."""
    data = value.data
    assert data is not None
    if data.nbytes <= LARGEST_HASHED:
        return constants.setdefault((value.type, content_hash(data)), [value])[0]
    if not data.flags.c_contiguous or data.dtype.hasobject:
        return constants.setdefault((value.type, id(data)), [value])[0]
    alike = constants.setdefault((value.type, end_bytes(data)), [])
    for other in alike:
        assert other.data is not None
        if same_bytes(data, other.data):
            return other
    alike.append(value)
    return value
