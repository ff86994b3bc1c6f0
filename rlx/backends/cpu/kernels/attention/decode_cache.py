"""Attention for few query rows over a cache that grows: old keys and values, of which the results show a copy, and new.

A model whose cache comes in and goes out as tensors appends the new rows to a copy of the old ones and attends over
that. Here attention copies the old rows as it reads them, block by block, so they are read from memory once. In a
program that moves more than caches hold, copies are stored past them: then their lines are not read before they are
written. The new rows are stored by loops before. Where the number of query rows is known at the run only, and there are
many, loops copy the old ones too, before keys and values are packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from rlx.backends.cpu.schedule.base import MIN_CHUNKS
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, Size
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Expr, Load, Select, Var, const, loads, substitute_vars
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.kernels.tags import EITHER, FEW, PACK, STREAMING
from rlx.records import dataclass, replace

__all__ = ["OldRows", "in_place", "join", "old_rows"]

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
    """Has attention that may be for few rows make the copies of old keys and values that it alone reads so far."""
    copies: dict[Buffer, Kernel] = {}  # by what they make: kernels of which nothing was read yet
    suffix = STREAMING if _touched(program) >= LARGE else ""
    run: list[Kernel] = []
    for group in _groups(program.run):
        if any(k.mark is not None or k.extents is not None for k in group):
            copies.clear()  # what a branch has made may not be there after it
        makers = _makers(group[-1], copies) if group[-1].tag in (FEW, EITHER) else []
        if makers:
            run = [k for k in run if k not in makers]
            group = (_joined(group, makers, suffix),)
        for kernel in group:
            read, written = ({b.base for b in buffers} for buffers in (kernel.reads(), kernel.writes()))
            copies = {
                made: maker
                for made, maker in copies.items()
                if made not in read | written and written.isdisjoint(b.base for b in maker.reads())
            }
            if _is_copy(kernel):
                copies[kernel.stores[0].buffer] = kernel
        run.extend(group)
    program.run = run


def _groups(kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, ...]]:
    """The kernels one by one, but attention together with what packs for it."""
    waiting: tuple[Kernel, ...] = ()
    for kernel in kernels:
        if kernel.tag == PACK and isinstance(kernel.anchor, Attention):
            waiting = (kernel,)
        else:
            yield (*waiting, kernel)
            waiting = ()


def _joined(group: tuple[Kernel, ...], makers: Sequence[Kernel], suffix: str) -> Kernel:
    """One kernel of attention and those before it: its result, its panels if there are some, and its cache."""
    kernel = group[-1]
    stores = (*kernel.stores, *(store for k in (*group[:-1], *makers) for store in k.stores))
    nodes = tuple(dict.fromkeys(node for k in (*makers, kernel) for node in k.nodes))
    name = "+".join(dict.fromkeys(k.name for k in (*makers, kernel)))
    return replace(kernel, name=name, stores=stores, nodes=nodes, tag=kernel.tag + suffix)


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
    k, v = in_place(anchor.k), in_place(anchor.v)
    others = [anchor.q, anchor.score, anchor.count, *(e for store in kernel.stores for e in (store.expr, *store.index))]
    read = {load.source.base for e in others if e is not None for load in loads(e)}
    found = []
    for operand, shape, other in ((k, anchor.k_shape, v), (v, anchor.v_shape, k)):
        base = operand.source.base
        maker = None if base in read or base is other.source.base else copies.get(base)
        if maker is not None and old_rows(operand, shape, maker.stores) is not None:
            found.append(maker)
    return found


def in_place(operand: Expr) -> Load:
    """How few rows read keys or values: as they are."""
    operand = operand.a if isinstance(operand, Select) else operand
    assert isinstance(operand, Load)
    return operand


def old_rows(operand: Load, shape: Shape, stores: Sequence[Store]) -> OldRows | None:
    """The one of the stores that copies the first rows of this operand of attention, of that shape, if there is one."""
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
