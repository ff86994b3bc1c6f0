"""Elements of encoded tensors as expressions over their stored bytes, and such expressions read back."""

from __future__ import annotations

from rlx.kernels.affine import row_major
from rlx.kernels.expr import Apply, Const, Expr, Load, Select, const, loads, walk
from rlx.kernels.lowering import Lowering
from rlx.kernels.program import Buffer

__all__ = ["decoded", "encoded_element"]


def decoded(load: Load, buffer: Buffer) -> Expr:
    """The element that a load of an encoded value names, from the bytes in its buffer."""
    flat = Lowering(()).size(0)
    for i, stride in zip(load.indices, row_major(buffer.shape), strict=True):
        flat = flat + i * stride
    k = Lowering(())
    element = k.cast(_element(buffer, flat, load.where), load.dtype)
    return element if load.where is None else Select(load.where, element, const(0, load.dtype))


def _element(buffer: Buffer, flat: Expr, where: Expr | None = None) -> Expr:
    assert buffer.encoding is not None
    k = Lowering(())
    element: Expr = buffer.encoding.element(k, lambda at: Load(buffer, (at,), k.byte, where), flat)
    return element


def encoded_element(expr: Expr) -> tuple[Buffer, Expr] | None:
    """The encoded buffer, and the number of the element there, of which `expr` is the value in f32; None if of none."""
    buffer = next((x.source for x in loads(expr)), None)
    if not isinstance(buffer, Buffer) or buffer.encoding is None:
        return None
    block = buffer.encoding.block
    for x in walk(expr):
        match x:
            case Apply(fn="floordiv", args=(flat, Const(value=value))) if value == block:
                return (buffer, flat) if _element(buffer, flat) == expr else None
    return None
