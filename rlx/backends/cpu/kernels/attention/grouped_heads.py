"""Attention of one query row, where several heads share keys: the heads become rows of one.

Keys and values are then read once for all of them. Each row is computed as it was.
"""

from __future__ import annotations

from rlx.backends.cpu.schedule.base import MIN_CHUNKS
from rlx.kernels.expr import I64, Expr, Var, const, substitute_vars
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["heads_as_rows"]

_, HEAD, ROW, _ = out_vars(4)


def heads_as_rows(kernel: Kernel) -> Kernel:
    """The kernel with as many heads made rows as leave some chunks of work; itself where that is none."""
    anchor = kernel.anchor
    assert isinstance(anchor, Attention)
    (batch, heads, rows, depth), key_heads = anchor.q_shape, anchor.k_shape[1]
    if rows != 1 or not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        return kernel
    alike = heads // key_heads
    count = max((n for n in range(1, alike + 1) if alike % n == 0 and heads // n >= MIN_CHUNKS), default=1)
    if count == 1:
        return kernel
    at: dict[Var, Expr] = {HEAD: HEAD * const(count, I64) + ROW, ROW: const(0, I64)}
    (store,) = kernel.stores
    index = tuple(substitute_vars(i, at) for i in store.index)
    extents = (batch, heads // count, count, store.extents[3])
    made = replace(store, extents=extents, index=index, expr=substitute_vars(store.expr, at))
    q, score, sinks = (x and substitute_vars(x, at) for x in (anchor.q, anchor.score, anchor.sinks))
    assert q is not None
    shape = (batch, heads // count, count, depth)
    # the one row sees every key that there is, causal or not, unless it has a place of its own
    causal = anchor.causal and anchor.place is not None
    anchor = replace(anchor, q=q, score=score, sinks=sinks, q_shape=shape, causal=causal, apart=0)
    return replace(kernel, stores=(made,), anchor=anchor)
