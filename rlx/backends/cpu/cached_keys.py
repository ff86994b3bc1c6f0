"""Attention for few query rows over a cache that grows: old keys and values, of which the results show a copy, and new.

A model whose cache comes in and goes out as tensors appends the new rows to a copy of the old ones and attends over
that. Here attention copies the old rows as it reads them, block by block, so they are read from memory once. In a
program that moves more than caches hold, copies are stored past them: then their lines are not read before they are
written. The new rows are stored by loops before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rlx.backends.cpu.cuts import MIN_CHUNKS
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, Size
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Expr, Load, Var, const, loads, substitute_vars
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.kernels.tags import FEW, STREAMING
from rlx.records import dataclass, replace

__all__ = ["OldRows", "join", "old_rows"]

LARGE = 64 << 20  # bytes that runs touch of which caches hold little until the next run
F32 = DTYPES["f32"]
AXES = out_vars(4)
KEYS = AXES[2]


@dataclass(frozen=True, eq=False)
class OldRows:
    """The first `count` rows of keys or values are those of `source` (over the axes of attention): `store` copies."""

    store: Store
    source: Load
    count: Size


def join(program: Program) -> None:
    """Has attention for few rows make the copies of old keys and values that it alone reads so far."""
    copies: dict[Buffer, Kernel] = {}  # by what they make: kernels of which nothing was read yet
    tag = STREAMING if _touched(program) >= LARGE else FEW
    run: list[Kernel] = []
    for kernel in program.run:
        if kernel.mark is not None or kernel.extents is not None:
            copies.clear()  # what a branch has made may not be there after it
        makers = _makers(kernel, copies) if kernel.tag == FEW else []
        if makers:
            run = [k for k in run if k not in makers]
            stores = (*kernel.stores, *(store for maker in makers for store in maker.stores))
            nodes = tuple(dict.fromkeys(node for k in (*makers, kernel) for node in k.nodes))
            name = "+".join(dict.fromkeys(k.name for k in (*makers, kernel)))
            kernel = replace(kernel, name=name, stores=stores, nodes=nodes, tag=tag)
        read, written = ({b.base for b in buffers} for buffers in (kernel.reads(), kernel.writes()))
        copies = {
            made: maker
            for made, maker in copies.items()
            if made not in read | written and written.isdisjoint(b.base for b in maker.reads())
        }
        if _is_copy(kernel):
            copies[kernel.stores[0].buffer] = kernel
        run.append(kernel)
    program.run = run


def _touched(program: Program) -> int:
    """The bytes of what runs read and write, as far as its size is fixed."""
    buffers = {b.base for kernel in program.run for b in (*kernel.reads(), *kernel.writes())}
    return sum(b.nbytes({}) for b in buffers if all(isinstance(size, int) for size in b.shape))


def _is_copy(kernel: Kernel) -> bool:
    """Loops that fill one buffer of f32, of which a store may be the copy of a cache."""
    if kernel.anchor is not None or not kernel.stores or kernel.results or kernel.makes:
        return False
    buffers = {store.buffer for store in kernel.stores}
    (buffer, *others) = buffers
    return not others and buffer.root is None and buffer.kind == "arena" and buffer.dtype is F32


def _makers(kernel: Kernel, copies: dict[Buffer, Kernel]) -> list[Kernel]:
    """The kernels among `copies` that attention can do the work of."""
    anchor = cast(Attention, kernel.anchor)
    heads, key_heads = anchor.q_shape[1], anchor.k_shape[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads < MIN_CHUNKS or heads % key_heads:
        return []
    read = [load.source.base for e in kernel.expressions() for load in loads(e)]
    found = []
    for operand, shape in ((anchor.k, anchor.k_shape), (anchor.v, anchor.v_shape)):
        base = cast(Load, operand).source.base
        maker = copies.get(base)
        if maker is not None and read.count(base) == 1 and old_rows(operand, shape, maker.stores) is not None:
            found.append(maker)
    return found


def old_rows(operand: Expr, shape: Shape, stores: Sequence[Store]) -> OldRows | None:
    """The one of the stores that copies the first rows of this operand of attention, of that shape, if there is one."""
    assert isinstance(operand, Load)
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
            fitting = [
                axis for axis in axes if axis[0] == target.coefs.get(v, 0) and (axis[1] is KEYS or axis[2] == size)
            ]
            if size == 1:
                as_read[v] = const(0, I64)
            elif fitting:
                as_read[v] = fitting[0][1]
                count = size if fitting[0][1] is KEYS else count
                axes.remove(fitting[0])
        index = linear_index([substitute_vars(i, as_read) for i in source.indices], source.source.shape)
        whole = len(as_read) == len(store.extents) and all(axis[1] is KEYS for axis in axes)
        if whole and target.is_linear and index.is_linear and index.coefs.get(AXES[3], 0) == 1:
            rows = replace(source, indices=tuple(substitute_vars(i, as_read) for i in source.indices))
            return OldRows(store, rows, count)
    return None
