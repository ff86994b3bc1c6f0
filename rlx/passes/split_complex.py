"""Split complex: ops that only move complex numbers move their two parts instead; joins that are split again vanish.

Each element of the result of such an op is an element of an operand or a given number, whatever the values; so the
parts of the result are the op's results of the parts. The rest are inverses of each other, bit for bit. What a branch
or loop is given and gives is pairs.
"""

from __future__ import annotations

from rlx.ir.graph import Graph, Output, Value
from rlx.ops.complex import FromPairs, ImaginaryPart, MakeComplex, Pairs, PartOf, RealPart
from rlx.ops.elementwise import Identity, Where
from rlx.ops.index import Gather, GatherElements, GatherND
from rlx.ops.layout import Concat, Expand, Pad, Reshape, Slice, Split, Squeeze, Tile, Transpose, Unsqueeze
from rlx.ops.scatter import ScatterElements, ScatterNd
from rlx.passes.rewrite import Site, copy_leaves, copy_node, finish, rewrite
from rlx.records import replace

__all__ = ["split_complex"]

MOVES = (
    Concat, Expand, Gather, GatherElements, GatherND, Identity, Pad, Reshape, Slice, Split, Squeeze, Tile, Transpose,
    Unsqueeze, Where,
)  # fmt: skip


def split_complex(graph: Graph) -> Graph:
    """Moves parts in the place of complex numbers, and leaves out what only takes apart what was put together."""
    return rewrite(graph, _replaced)


def _replaced(site: Site) -> Value | tuple[Value, ...] | None:
    op, inputs = site.op, site.inputs
    if site.node.regions:
        return _with_pairs(site)
    match op:
        case PartOf():
            return _part(site, op, inputs[0])
        case Pairs():
            return _operand(inputs[0], FromPairs)
        case FromPairs():
            return _operand(inputs[0], Pairs)
        case MakeComplex():
            real, imaginary = (_operand(v, c) for v, c in zip(inputs, (RealPart, ImaginaryPart), strict=True))
            return real if real is not None and real is imaginary else None
    written = isinstance(op, ScatterElements | ScatterNd) and op.reduction == "none"
    if not (isinstance(op, MOVES) or written) or all(v.dtype.kind != "c" for v in site.node.outputs):
        return None
    moved = []
    for part in (RealPart(), ImaginaryPart()):
        own = replace(op, value=0) if isinstance(op, Pad) and isinstance(part, ImaginaryPart) else op
        operands = [_moved(site, part, v) for v in inputs]
        moved.append(site.graph.add(own, *operands))
    return tuple(site.add(MakeComplex(), *parts) for parts in zip(*moved, strict=True))


def _moved(site: Site, part: PartOf, x: Value) -> Value:
    """What the op is given in the place of an operand: its part if it is complex."""
    if x.dtype.kind != "c":
        return x
    known = _part(site, part, x)
    return site.add(part, x) if known is None else known


def _operand(value: Value, of: type) -> Value | None:
    """The operand of the node that makes the value, where its op is of that class."""
    node = value.node
    return node.inputs[0] if node is not None and type(node.op) is of else None


def _part(site: Site, part: PartOf, x: Value) -> Value | None:
    """A part of x from what x is made of, None where that is not known."""
    node = x.node
    if node is not None and isinstance(node.op, MakeComplex):
        return node.inputs[part.number]
    if node is not None and isinstance(node.op, FromPairs):
        return part.of_pairs(site.graph, node.inputs[0])
    return None


def _with_pairs(site: Site) -> tuple[Value, ...] | None:
    """Control flow over pairs in the place of complex numbers."""
    outputs = site.node.outputs
    if all(v.dtype.kind != "c" for v in (*site.inputs, *outputs)):
        return None
    inputs = [site.add(Pairs(), v) if v.dtype.kind == "c" else v for v in site.inputs]
    made = site.graph.add(site.op, *inputs, regions=[_of_pairs(region) for region in site.node.regions])
    return tuple(site.add(FromPairs(), v) if old.dtype.kind == "c" else v for v, old in zip(made, outputs, strict=True))


def _of_pairs(region: Graph) -> Graph:
    """The region, whose inputs and results are pairs in the place of complex numbers."""
    new, values = copy_leaves(region)
    for i, own in enumerate(new.inputs):
        if own.dtype.kind == "c":
            pairs = Value(new, Pairs().infer(own.type), "input", own.name)
            values[region.inputs[i]] = new.add(FromPairs(), pairs)[0]
            new.inputs[i] = pairs
    for node in region.nodes:
        values.update(zip(node.outputs, copy_node(new, node, [values[v] for v in node.inputs]), strict=True))
    finish(region, new, values)
    for i, output in enumerate(new.outputs):
        if output.value.dtype.kind == "c":
            new.outputs[i] = Output(output.name, new.add(Pairs(), output.value)[0])
    return split_complex(new)
