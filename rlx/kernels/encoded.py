"""Elements of encoded tensors as expressions over their stored bytes, and such expressions read back.

Kernels load the bytes of an encoded buffer through a view of it, whose elements are bytes: to them encoded data are
arithmetic on u8 like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.encoding import Encoding
from rlx.ir.shape import Shape, numel
from rlx.kernels.affine import row_major
from rlx.kernels.expr import Apply, Const, Expr, Load, Select, const, loads, walk
from rlx.kernels.lowering import Lowering, out_vars
from rlx.kernels.program import Buffer, Store

__all__ = ["bytes_of", "decoded", "element", "encoded_element", "encoded_stores", "rows_of_bytes"]


def bytes_of(buffer: Buffer) -> Buffer:
    """The stored bytes of an encoded buffer, as a view."""
    return _bytes(buffer, (numel(buffer.stored_shape),))


def rows_of_bytes(buffer: Buffer) -> Buffer:
    """The same with the axes of the elements: only the last one is of bytes."""
    return _bytes(buffer, buffer.stored_shape)


def _bytes(buffer: Buffer, shape: Shape) -> Buffer:
    return Buffer(f"{buffer.name}.bytes", buffer.kind, shape, Lowering.byte, None, None, buffer.base, buffer.offset)


def encoded_stores(source: Buffer, op: Any, target: Buffer, at: Callable[..., Sequence[Expr]]) -> tuple[Store, ...]:
    """What stores the elements of `source` in the blocks of `target`, as `op` (encode) says; `at` places a row there.

    The loops are those of the axes before the last, blocks, and bytes.
    """
    assert target.encoding is not None
    stored, encoding, k = rows_of_bytes(target), target.encoding, Lowering(())
    *rows, depth = source.shape
    *row, block, byte = out_vars(len(rows) + 2)

    def element(n: Any) -> Expr:
        made = Load(source, (*row, block * encoding.block + n), source.dtype)
        return made if source.encoding is None else decoded(made, bytes_of(source), source.encoding)

    stores = []
    for start, count, part in op.lower_stored(k, element):
        index = (*at(*row), block * encoding.block_bytes + byte + start)
        stores.append(Store(stored, (*rows, depth // encoding.block, count), index, part(byte)))
    return tuple(stores)


def decoded(load: Load, stored: Buffer, encoding: Encoding) -> Expr:
    """The element that a load of an encoded value names, from its `stored` bytes."""
    flat = Lowering(()).size(0)
    for i, stride in zip(load.indices, row_major(load.source.shape), strict=True):
        flat = flat + i * stride
    k = Lowering(())
    made = k.cast(element(stored, encoding, flat, load.where), load.dtype)
    return made if load.where is None else Select(load.where, made, const(0, load.dtype))


def element(stored: Buffer, encoding: Encoding, number: Expr, where: Expr | None = None) -> Expr:
    """The element of that number, in f32."""
    k = Lowering(())
    made: Expr = encoding.element(k, lambda at: Load(stored, (at,), k.byte, where), number)
    return made


def encoded_element(expr: Expr) -> tuple[Buffer, Encoding, Expr] | None:
    """The stored bytes, their encoding and the number of the element of which `expr` is the value in f32, or None."""
    stored = next((x.source for x in loads(expr)), None)
    encoding = stored.base.encoding if isinstance(stored, Buffer) else None
    if stored is None or encoding is None:
        return None
    for x in walk(expr):
        match x:
            case Apply(fn="floordiv", args=(flat, Const(value=value))) if value == encoding.block:
                found = element(stored, encoding, flat) == expr
                return (stored, encoding, flat) if found else None
    return None
