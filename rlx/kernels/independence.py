"""Whether an axis may be made longer than it is: what every element of a graph's values depends on.

An axis is *padded* when it has more entries than count; those that count come first. A graph may be run on padded
inputs and its results cut when every value's first entries are made of first entries alone: told from the lowerings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Dim, Shape, Size, exact_div, size_product, symbols
from rlx.kernels.expr import Check, Expr, Load, Reduce, SizeOf, Var, walk
from rlx.kernels.lowering import Attention, Piece, lower_node, out_vars

__all__ = ["mixing", "padded_axis"]


def padded_axis(shape: Shape, dim: str) -> int | None:
    """The axis whose size is a multiple of the dim, None where no size has it. Raises `ValueError` for other uses."""
    axes = [d for d, size in enumerate(shape) if has_dim(size, dim)]
    if not axes:
        return None
    size = shape[axes[0]]
    symbol = next(s for s in symbols(size) if s.name == dim)
    rest = exact_div(size, Dim(symbol.name, symbol.lo, symbol.hi, symbol.multiple))
    if len(axes) > 1 or rest is None or has_dim(rest, dim):
        raise ValueError(f"({', '.join(map(str, shape))}) has {dim} in more than one axis, or not as a factor")
    return axes[0]


def has_dim(size: Size, dim: str) -> bool:
    return any(s.name == dim for s in symbols(size))


def mixing(graph: Graph, dim: str, trusted: Collection[Node] = ()) -> str | None:
    """Why results at a longer extent of the dim can't be cut to those at a shorter one; None where they can.

    `trusted` nodes are taken to keep entries apart.
    """
    guard = next((g for g in graph.guards if has_dim(g.lhs, dim) or has_dim(g.rhs, dim)), None)
    if guard is not None:
        return f"the equality {guard.lhs} = {guard.rhs} is about it ({guard.why})"
    for value in graph.inputs:
        try:
            padded_axis(value.shape, dim)
        except ValueError as error:
            return f"input {value.name!r}: {error}"
    for node in graph.nodes:
        why = None if node in trusted else _mixes(node, dim, True)
        if why is not None:
            return f"{node.label} {why}"
    return None


def _mixes(node: Node, dim: str, outer: bool) -> str | None:
    """Why an entry of the node's results depends on other entries than its own.

    `outer`: inputs that the node reads are those of users, and not of the parts of a node.
    """
    if dim not in Graph(nodes=[node]).dims() and not any(has_dim(s, dim) for v in node.inputs for s in v.shape):
        return None
    if node.regions:
        return "has a body"
    try:
        axes = {v: padded_axis(v.shape, dim) for v in (*node.inputs, *node.outputs)}
    except ValueError as error:
        return f"makes a shape that {error}"
    op: Any = node.op
    if op.op_name == "reshape":
        return _reshape(node, axes)
    if op.op_name == "prefix" and not op.reverse:
        return None  # what comes before an entry does not depend on added ones
    lowered = lower_node(node)
    if lowered is None:
        return _parts(node, dim)
    if isinstance(lowered.anchor, Attention):
        return _attention(node, lowered.anchor, axes, dim)
    for value, pieces in zip(node.outputs, lowered.outputs, strict=True):
        for piece in pieces:
            expr = lowered.generic if lowered.generic is not None else piece.expr
            why = _piece(piece, value, axes) or _expr(expr, value.shape, axes, dim, outer=outer)
            if why is not None:
                return why
    return None


def _parts(node: Node, dim: str) -> str | None:
    """The same for the decomposition of a node."""
    op: Any = node.op
    if op.op_name in ("cum_sum", "cum_prod") and not op.reverse:
        return None
    if op.decompose is None:
        return "can't be seen through"
    scratch = Graph("parts")
    stand_ins = []
    for number, value in enumerate(node.inputs):
        constant = value.kind == "const" and value.data is not None
        made = scratch.constant(value.data) if constant else scratch.input(f"x{number}", value.shape, value.dtype)
        stand_ins.append(made)
    op.decompose(scratch, *stand_ins)
    return next((why for part in scratch.nodes if (why := _mixes(part, dim, False)) is not None), None)


def _piece(piece: Piece, value: Value, axes: dict[Value, int | None]) -> str | None:
    axis = axes[value]
    if axis is None or (piece.offset[axis] == 0 and piece.extents[axis] == value.shape[axis]):
        return None
    return "puts something behind it"


def _expr(
    expr: Expr,
    shape: Shape,
    axes: dict[Value, int | None],
    dim: str,
    also: Sequence[Var] = (),
    *,
    outer: bool = True,
) -> str | None:
    """Why an element of a result of that shape depends on another entry; `also`: variables that are in bounds."""
    vars = out_vars(len(shape))
    parts = walk(expr)
    if any(isinstance(x, Reduce) and any(has_dim(size, dim) for size in x.extents) for x in parts):
        return "sums or compares over it"
    for x in parts:
        if isinstance(x, SizeOf) and has_dim(x.size, dim):
            return "computes with the size itself"
        if isinstance(x, Check) and not (outer and _safe(x)):
            return "may stop the run with an error that the added entries cause"
        if isinstance(x, Load):
            axis = axes.get(x.source)
            if axis is None:
                continue
            at = x.indices[axis]
            own = any(v == at and size == x.source.shape[axis] for v, size in zip(vars, shape, strict=True))
            if not own and at not in also:
                return "reads other entries than the one that it makes"
    return None


def _safe(check: Check) -> bool:
    """Whether added entries, which are zeros in inputs, pass: indices that come straight from an input."""
    sources = [x.source for x in walk(check) if isinstance(x, Load)]
    plain = all(isinstance(v, Value) and v.kind == "input" for v in sources)
    return check.kind == "index" and bool(sources) and plain


def _reshape(node: Node, axes: dict[Value, int | None]) -> str | None:
    """A padded axis stays one where what lies before it is the same: then added entries stay behind the others."""
    (x,), (y,) = node.inputs, node.outputs
    a, b = axes[x], axes[y]
    if a is None or b is None or size_product(x.shape[:a]) != size_product(y.shape[:b]):
        return "puts it inside another axis"
    return None


def _attention(node: Node, anchor: Attention, axes: dict[Value, int | None], dim: str) -> str | None:
    shape = node.outputs[0].shape
    keys = anchor.k_shape[2]
    q, k, v = node.inputs[:3]
    counted = anchor.count is not None
    if has_dim(keys, dim) and not counted:
        return "attends over it"
    if anchor.ring and has_dim(keys, dim):
        return "has keys at their positions modulo it"
    numbered = anchor.place is None and (anchor.causal or anchor.window is not None)
    if numbered and has_dim(anchor.q_shape[2], dim):
        return "numbers its rows from the last"
    if any(axes[x] not in (None, 0, 2) for x in (q, k, v)) or axes[node.outputs[0]] not in (None, 0, 2):
        return "has it as heads or depth"
    if axes[k] == 0 and axes[q] != 0:
        return "reads other entries than the one that it makes"
    by_entry = node.inputs[len(node.inputs) - counted - (anchor.place is not None) :]
    if any(axes[x] is not None for x in by_entry) and axes[q] != 0:
        return "reads other entries than the one that it makes"
    return None if anchor.score is None else _expr(anchor.score, shape, axes, dim, out_vars(4)[3:] if counted else ())
