"""The first rows of keys or values, where they are copied from a cache: which store copies them, and from where."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.attention.pack_kv import row_words
from rlx.backends.cpu.kernels.attention.stored_rows import in_place
from rlx.backends.cpu.schedule.arguments import Address, Argument, Arguments, Number
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, Size
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Expr, Load, Var, const, substitute_vars
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Store
from rlx.records import dataclass, replace

__all__ = ["OldRows", "OldRowsArguments", "old_rows", "old_words"]

F32 = DTYPES["f32"]
AXES = out_vars(4)
KEYS = AXES[2]


@dataclass(frozen=True, eq=False)
class OldRows:
    """The first `count` rows of keys or values are those of `source` (over the axes of attention): `store` copies."""

    store: Store
    source: Load
    count: Size


class OldRowsArguments(Arguments):
    """The arguments that say where copied rows of keys, or values, come from; strides are in bytes."""

    rows: Address
    rows_b: Number  # of (batch, head, row) each
    rows_h: Number
    rows_l: Number
    count: Number


def old_words(old: OldRows | None) -> list[Argument]:
    """What `OldRowsArguments` are; zeros where no rows are copied."""
    source, count = (None, 0) if old is None else (old.source, old.count)
    return OldRowsArguments.given(**row_words("rows", source), count=count)


def old_rows(operand: Expr, shape: Shape, stores: Sequence[Store]) -> OldRows | None:
    """The one of the stores that copies the first rows of this operand of attention, of that shape, if there is one."""
    operand = in_place(operand)
    if not isinstance(operand, Load) or operand.dtype is not F32:
        return None
    buffer, place = operand.source, linear_index(operand.indices, operand.source.shape)
    if buffer.offset != 0 or place.constant != 0:
        return None
    for store in stores:
        source, target = store.expr, linear_index(store.index, store.buffer.shape)
        if store.buffer is not buffer.base or not isinstance(source, Load) or source.where is not None:
            continue
        if source.dtype is not F32 or source.source.encoding is not None or target.constant != 0:
            continue
        axes = [(place.coefs.get(v, 0), v, size) for v, size in zip(AXES, shape, strict=True) if size != 1]
        count: Size = 1
        as_read: dict[Var, Expr] = {}
        for v, size in zip(out_vars(len(store.extents)), store.extents, strict=True):
            step = target.coefs.get(v, 0)
            axis = next((axis for axis in axes if axis[0] == step and (axis[1] is KEYS or axis[2] == size)), None)
            if size == 1:
                as_read[v] = const(0, I64)
            elif axis is not None:
                as_read[v] = axis[1]
                count = size if axis[1] is KEYS else count
                axes.remove(axis)
        index = linear_index([substitute_vars(i, as_read) for i in source.indices], source.source.shape)
        whole = len(as_read) == len(store.extents) and all(axis[1] is KEYS for axis in axes)
        if whole and target.is_linear and index.is_linear and index.coefs.get(AXES[3], 0) == 1:
            rows = replace(source, indices=tuple(substitute_vars(i, as_read) for i in source.indices))
            return OldRows(store, rows, count)
    return None
