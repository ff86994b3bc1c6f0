"""Pools of large windows become pools along one axis after another, and long maxima ones of two taps each.

Proved by structure. A window is a box, so its maximum is that of the maxima of its rows, and the number of its elements
that count is the product of those along each axis: the mean of means of rows. The p-norm of a window is that of the
p-norms of its rows. (Means and norms round once more for each axis.)
Of `k` elements in a row the maximum is that of two runs of 2^j < k elements that overlap, and that of a run of 2^j
elements the maximum of two of half as many: with -inf for padding, log2(k) maxima of two take the place of k - 1.
"""

from __future__ import annotations

import math

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Size
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Pad
from rlx.ops.pool import AveragePool, MaxPool, lowest
from rlx.ops.pool_more import LpPool
from rlx.passes.rewrite import Site, rewrite
from rlx.records import replace

__all__ = ["split_pools"]

Pool = MaxPool | AveragePool | LpPool

FEW = 16  # taps of a window that are taken at once
LONG = 9  # taps of a row, for each step of the window, from which on maxima are made of runs


def split_pools(graph: Graph) -> Graph:
    """Splits pools whose windows have many taps; those that also give places stay."""
    return rewrite(graph, _split)


def _split(site: Site) -> Value | None:
    op = site.op
    if not isinstance(op, Pool) or math.prod(op.kernel) < FEW:
        return None
    if isinstance(op, MaxPool) and op.with_indices:
        return None
    (x,) = site.inputs
    long = [d for d, (k, step, *_) in enumerate(op.axes()) if k // step >= LONG]
    if sum(k > 1 for k in op.kernel) < 2 and not (long and isinstance(op, MaxPool)):
        return None
    dtype = x.dtype
    if not isinstance(op, MaxPool) and dtype.bits < 32:  # sums, means and norms of rows are not rounded to 16 bits
        x = site.add(Cast(DTYPES["f32"]), x)
    for d in reversed(range(len(op.kernel))):  # along rows first, whose elements lie together
        if op.kernel[d] > 1 or op.axes()[d][1:] != (1, 1, 0, 0):
            x = _of_runs(site, op, d, x) if isinstance(op, MaxPool) and d in long else site.add(_along(op, d), x)
    return x if x.dtype is dtype else site.add(Cast(dtype), x)


def _along(op: Pool, axis: int) -> Pool:
    """The pool along one axis."""
    n = len(op.kernel)
    kernel, stride, dilation, begin, end = op.axes()[axis]
    pads: list[Size] = [0] * (2 * n)
    pads[axis], pads[axis + n] = begin, end
    return replace(
        op,
        kernel=_only(axis, n, kernel),
        strides=_only(axis, n, stride),
        dilations=_only(axis, n, dilation),
        pads=tuple(pads),
    )


def _only(axis: int, count: int, value: int) -> tuple[int, ...]:
    """The value on one axis, 1 on the others."""
    return tuple(value if d == axis else 1 for d in range(count))


def _of_runs(site: Site, op: MaxPool, axis: int, x: Value) -> Value:
    """The maximum along an axis, of runs of twice as many elements in each step."""
    n = len(op.kernel)
    kernel, stride, dilation, begin, _ = op.axes()[axis]
    count = site.node.outputs[0].shape[axis + 2]
    needed = (count - 1) * stride + (kernel - 1) * dilation + 1  # elements that the windows of this axis cover
    pads: list[Size] = [0] * (2 * x.rank)
    pads[axis + 2], pads[axis + 2 + x.rank] = begin, needed - begin - x.shape[axis + 2]
    x = site.add(Pad(tuple(pads), lowest(x.dtype)), x)

    def pair(apart: int, step: int) -> MaxPool:
        return MaxPool(kernel=_only(axis, n, 2), strides=_only(axis, n, step), dilations=_only(axis, n, apart))

    run = 1
    while 2 * run < kernel:
        x = site.add(pair(run * dilation, 1), x)
        run *= 2
    return site.add(pair((kernel - run) * dilation, stride), x)
