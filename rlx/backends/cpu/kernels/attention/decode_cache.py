"""Attention for few query rows over a growing cache: it also makes the copy of old rows that the results show.

A model whose cache comes in and goes out as tensors appends the new rows to a copy of the old ones and attends over
that. Here attention copies the old rows as it reads them, block by block, so they are read from memory once. In a
program that moves more than caches hold, copies are stored past them: then their lines are not read before they are
written. The new rows are stored by loops before. Where the number of query rows is known at the run only, and there are
many, loops copy the old ones too, before keys and values are packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from rlx.backends.cpu.kernels.attention.old_rows import old_rows
from rlx.backends.cpu.kernels.attention.stored_rows import in_place
from rlx.backends.cpu.kernels.attention.strategies import Attend
from rlx.backends.cpu.schedule.base import MIN_CHUNKS
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import Load, loads
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.records import replace

__all__ = ["join"]

LARGE = 64 << 20  # bytes that runs touch of which caches hold little until the next run
F32 = DTYPES["f32"]
AXES = out_vars(4)
KEYS = AXES[2]


def join(program: Program) -> None:
    """Has attention that may be for few rows make the copies of old keys and values that it alone reads so far."""
    if not any(isinstance(k.strategy, Attend) and k.strategy.way.few for k in program.run):
        return
    copies: dict[Buffer, Kernel] = {}  # by what they make: kernels of which nothing was read yet
    streaming = _touched(program) >= LARGE
    run: list[Kernel] = []
    for group in _groups(program.run):
        if any(k.mark is not None or k.extents is not None for k in group):
            copies.clear()  # what a branch has made may not be there after it
        strategy = group[-1].strategy
        makers = _makers(group[-1], copies) if isinstance(strategy, Attend) and strategy.way.few else []
        if makers:
            run = [k for k in run if k not in makers]
            group = (_joined(group, makers, streaming),)
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
        if isinstance(kernel.anchor, Attention) and kernel.packs:
            waiting = (kernel,)
        else:
            yield (*waiting, kernel)
            waiting = ()


def _joined(group: tuple[Kernel, ...], makers: Sequence[Kernel], streaming: bool) -> Kernel:
    """One kernel of attention and those before it: its result, its panels if there are some, and its cache."""
    kernel = group[-1]
    stores = (*kernel.stores, *(store for k in (*group[:-1], *makers) for store in k.stores))
    nodes = tuple(dict.fromkeys(node for k in (*makers, kernel) for node in k.nodes))
    name = "+".join(dict.fromkeys(k.name for k in (*makers, kernel)))
    assert isinstance(kernel.strategy, Attend)
    strategy = kernel.strategy.past_caches() if streaming else kernel.strategy
    return replace(kernel, name=name, stores=stores, nodes=nodes, strategy=strategy)


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
    if anchor.ring or not isinstance(k, Load) or not isinstance(v, Load):  # a ring or blocks are no copies that grow
        return []
    given = (anchor.q, anchor.score, anchor.count, anchor.place, anchor.sinks)
    others = [*given, *(e for store in kernel.stores for e in (store.expr, *store.index))]
    read = {load.source.base for e in others if e is not None for load in loads(e)}
    found = []
    for operand, shape, other in ((k, anchor.k_shape, v), (v, anchor.v_shape, k)):
        base = operand.source.base
        maker = None if base in read or base is other.source.base else copies.get(base)
        if maker is not None and old_rows(operand, shape, maker.stores) is not None:
            found.append(maker)
    return found
