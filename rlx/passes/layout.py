"""Layout: transposes, reshapes and other moves of elements are merged, cancelled, or turned into plain reshapes.

Proved from shapes alone: every element of a result is the same element as before, or the same function of it. Only a
convolution whose input was padded with zeros sees them as its own pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Shape, Size, numel
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.conv import Conv, per_axis
from rlx.ops.elementwise import Add, Unary
from rlx.ops.index import Gather, GatherND
from rlx.ops.layout import Concat, Expand, Pad, Reshape, Slice, Split, Squeeze, Tile, Transpose, Unsqueeze
from rlx.ops.reduction import ReduceMax, ReduceMean, ReduceMin, ReduceSum, axes_of
from rlx.passes.match.patterns import Statics, is_sized, made_by
from rlx.passes.match.places import are_coordinates_in_order, are_in_order
from rlx.passes.rewrite import Site, rewrite_all

__all__ = ["layout"]

Rule = Callable[[Site], Value | None]


def layout(graph: Graph) -> Graph:
    """Applies the rules until nothing changes; squeeze and unsqueeze become reshape."""
    return rewrite_all(graph, _simplified)


def _simplified(site: Site) -> Value | None:
    if len(site.node.outputs) == 1 and isinstance(site.op, MOVES) and _moves_nothing(site.node):
        return site.inputs[0]
    rule = RULES.get(type(site.op))
    if rule is not None:
        return rule(site)
    return _reshape_last(site) if isinstance(site.op, Unary) else None


def _moves_nothing(node: Node) -> bool:
    """Whether the result is the (first) input."""
    op: Any = node.op
    x, (out,) = node.inputs[0], node.outputs
    if x.type != out.type:
        return False
    match op:
        case Transpose():
            return _order(op, x.rank) == tuple(range(x.rank))
        case Slice():
            return set(op.starts) <= {0} and all(s == 1 or n == 1 for s, n in zip(op.steps, x.shape, strict=True))
        case Pad():
            return set(op.pads) <= {0}
        case Concat():
            return len(node.inputs) == 1
        case Tile():
            return set(op.repeats) <= {1}
    return True  # reshape, expand, split: the type says it


# ---- reshape


def _as_reshape(site: Site) -> Value | None:
    return site.add(Reshape(site.node.outputs[0].shape), site.inputs[0])


def _reshape(site: Site) -> Value | None:
    inner = made_by(site.inputs[0], Reshape)
    if inner is None:
        return _around_transpose(site)
    site.merged.append(inner)
    return site.add(site.op, inner.inputs[0])


def _around_transpose(site: Site) -> Value | None:
    """reshape(transpose(reshape(x))) that takes axes together, moves them and takes them apart is one transpose."""
    moved = made_by(site.inputs[0], Transpose)
    joined = made_by(moved.inputs[0], Reshape) if moved else None
    if moved is None or joined is None:
        return None
    x, middle = joined.inputs[0], joined.outputs[0]
    groups = _groups(x.shape, middle.shape)
    if groups is None:
        return None
    perm = tuple(axis for d in _order(moved.op, middle.rank) for axis in groups[d])
    if tuple(x.shape[axis] for axis in perm) != site.node.outputs[0].shape:
        return None
    site.merged.extend((joined, moved))
    return site.add(Transpose(perm), x)


def _groups(old: Shape, new: Shape) -> list[list[int]] | None:
    """For each axis of `new` the consecutive axes of `old` that it joins, or None."""
    groups: list[list[int]] = []
    at = 0
    for size in new:
        group: list[int] = []
        while at < len(old) and (not group or numel([old[d] for d in group]) != size):
            group.append(at)
            at += 1
        if not group or numel([old[d] for d in group]) != size:
            return None
        groups.append(group)
    while at < len(old) and old[at] == 1:
        groups[-1].append(at)
        at += 1
    return groups if at == len(old) else None


# ---- transpose, expand, slice


def _order(op: Any, rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank))) if op.perm is None else tuple(axis % rank for axis in op.perm)


def _transpose(site: Site) -> Value | None:
    x = site.inputs[0]
    order = _order(site.op, x.rank)
    kept = [d for d in order if x.shape[d] != 1]
    if kept == sorted(kept):
        return _as_reshape(site)
    inner = made_by(x, Transpose)
    if inner is None:
        return None
    site.merged.append(inner)
    before = _order(inner.op, x.rank)
    perm = tuple(before[d] for d in order)
    return inner.inputs[0] if perm == tuple(range(x.rank)) else site.add(Transpose(perm), inner.inputs[0])


def _expand(site: Site) -> Value | None:
    x, (out,) = site.inputs[0], site.node.outputs
    if numel(x.shape) == numel(out.shape) and x.shape == out.shape[out.rank - x.rank :]:
        return _as_reshape(site)
    inner = made_by(x, Expand)
    if inner is None:
        return None
    site.merged.append(inner)
    return site.add(Expand(out.shape), inner.inputs[0])


def _slice(site: Site) -> Value | None:
    """A slice of a slice is one slice, where all is known."""
    op: Any = site.op
    inner = made_by(site.inputs[0], Slice)
    if inner is None or not is_sized(inner.inputs[0]):
        return None
    first: Any = inner.op
    if not all(isinstance(s, int) for s in (*op.starts, *op.sizes, *first.starts, *first.sizes)):
        return None
    starts = tuple(a + b * step for a, b, step in zip(first.starts, op.starts, first.steps, strict=True))
    steps = tuple(a * b for a, b in zip(first.steps, op.steps, strict=True))
    if 0 in op.sizes:
        return None
    site.merged.append(inner)
    return site.add(Slice(starts, op.sizes, steps), inner.inputs[0])


def _reduce(site: Site) -> Value | None:
    """A reduction over axes of size 1."""
    op: Any = site.op
    x = site.inputs[0]
    axes = axes_of(op.axes, x.rank, op.op_name)
    return _as_reshape(site) if all(x.shape[d] == 1 for d in axes) else None


# ---- pads into convolutions, reshapes behind what fuses with a product


def _conv(site: Site) -> Value | None:
    """Zeros padded to the spatial axes are the convolution's own pads."""
    op: Any = site.op
    padded = made_by(site.inputs[0], Pad)
    if padded is None:
        return None
    pad: Any = padded.op
    x = padded.inputs[0]
    begins, ends = pad.pads[: x.rank], pad.pads[x.rank :]
    plain = pad.mode == "constant" and pad.value == 0
    if not plain or {*begins[:2], *ends[:2]} != {0} or not all(isinstance(p, int) and p >= 0 for p in pad.pads):
        return None
    added: Sequence[Size] = (*begins[2:], *ends[2:])
    own = per_axis(op.pads, len(added), 0, "conv pads")
    pads = tuple(a + b for a, b in zip(own, added, strict=True))
    site.merged.append(padded)
    conv = Conv(strides=op.strides, dilations=op.dilations, pads=pads, groups=op.groups, activations=op.activations)
    return site.add(conv, x, *site.inputs[1:])


def _add(site: Site) -> Value | None:
    """reshape(product) + bias: the bias is added before the reshape, so that it becomes the product's epilogue."""
    value, bias = site.inputs
    node = made_by(value, Reshape)
    if node is None or bias.rank > 1 or bias not in Statics() or not _is_product(site, value):
        return None
    x = node.inputs[0]
    if not x.rank or x.shape[-1] != value.shape[-1] or bias.shape not in ((), (1,), x.shape[-1:]):
        return None
    return _then_reshaped(site, node, site.add(Add(), x, bias))


def _reshape_last(site: Site) -> Value | None:
    node = made_by(site.inputs[0], Reshape)
    if node is None or not _is_product(site, site.inputs[0]):
        return None
    return _then_reshaped(site, node, site.add(site.op, node.inputs[0]))


def _is_product(site: Site, value: Value) -> bool:
    """Whether the value is a matrix product with element-wise ops and reshapes behind it, each with one user."""
    node = value.node
    while node is not None and site.uses[value] == 1:
        if isinstance(node.op, MatMul | Gemm):
            return True
        if not isinstance(node.op, Unary | Add | Reshape):
            return False
        value = node.inputs[0]
        node = value.node
    return False


def _then_reshaped(site: Site, reshape: Node, value: Value) -> Value:
    assert value.node is not None
    value.node.provenance = site.node.provenance
    site.uses[value] = 1
    return site.graph.add(reshape.op, value, provenance=reshape.provenance)[0]


def _gather(site: Site) -> Value | None:
    """Gathering all that there is, in the order in which it lies, moves nothing: the places of a flattened mask."""
    x, indices = site.inputs
    axis = site.op.axis % x.rank  # type: ignore[attr-defined]
    if numel(indices.shape) != x.shape[axis] or not are_in_order(indices):
        return None
    return _as_reshape(site)


def _gather_nd(site: Site) -> Value | None:
    """The same of a mask that is indexed by a grid of its own places."""
    x, indices = site.inputs
    depth = indices.shape[-1]
    if site.op.batch_dims or not are_coordinates_in_order(indices, x.shape[:depth]):  # type: ignore[attr-defined]
        return None
    return _as_reshape(site)


MOVES = (Concat, Expand, Pad, Reshape, Slice, Split, Tile, Transpose)

RULES: dict[type[Any], Rule] = {
    Gather: _gather,
    GatherND: _gather_nd,
    Squeeze: _as_reshape,
    Unsqueeze: _as_reshape,
    Reshape: _reshape,
    Transpose: _transpose,
    Expand: _expand,
    Slice: _slice,
    Conv: _conv,
    Add: _add,
    ReduceSum: _reduce,
    ReduceMean: _reduce,
    ReduceMax: _reduce,
    ReduceMin: _reduce,
}
