"""How fusion reads the operands of attention: keys and values as they are stored, the rest from memory."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Node
from rlx.ir.shape import Shape
from rlx.kernels.expr import Cast, Expr, Load
from rlx.kernels.lowering import Attention
from rlx.records import replace

__all__ = ["place_attention", "without_widening"]


def place_attention(fuser: Any, anchor: Attention, node: Node, absorbed: list[Node]) -> Attention | None:
    """The anchor with operands that the device reads in place; None where it can't. `absorbed` gains nodes taken in."""
    q, k, v = (fuser.operand(anchor, role, getattr(anchor, role), absorbed) for role in "qkv")
    if q is None or k is None or v is None:
        return None
    anchor = replace(anchor, q=q, k=k, v=v)
    if anchor.score is not None:
        score, more = fuser.resolve(anchor.score, node, (*anchor.q_shape[:3], anchor.k_shape[2]))
        absorbed.extend(more)
        anchor = replace(anchor, score=score)
    if anchor.count is not None:
        anchor = replace(anchor, count=fuser.checked_ahead(anchor.count, anchor.q_shape[:1], node))
    if anchor.place is not None:
        anchor = replace(anchor, place=_in_memory(fuser, anchor.place, anchor.q_shape[:1], node))
    if anchor.sinks is not None:
        anchor = replace(anchor, sinks=_in_memory(fuser, anchor.sinks, anchor.q_shape[:2], node))
    return anchor


def _in_memory(fuser: Any, expr: Expr, extents: Shape, node: Node) -> Expr:
    """The expression as the load of an element that lies in memory: computed by a kernel of its own if it is none."""
    expr, _ = fuser.resolve(expr, node, extents)
    if isinstance(expr, Load) and expr.where is None and expr.source.type.encoding is None:
        return expr
    made: Expr = fuser.computed_ahead(expr, extents, node, f"{node.outputs[0].name or 'attention'}.operand")
    return made


def without_widening(anchor: object, role: str, expr: Expr) -> Expr:
    """Keys and values before a cast from narrower floats: attention does that as it reads them."""
    if not isinstance(anchor, Attention) or role not in ("k", "v") or not isinstance(expr, Cast):
        return expr
    x = expr.value
    widens = x.dtype.is_float and expr.dtype.is_float and x.dtype.bits == 16 and expr.dtype.bits > 16
    return x if widens and isinstance(x, Load) else expr
