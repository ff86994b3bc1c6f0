"""Finds kernels so slow that a size may be a mistake: while one runs, nothing is heard of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod

from rlx.cost.ceilings import Ceilings
from rlx.cost.model import price_kernel
from rlx.errors import RlxError
from rlx.ir.shape import evaluate
from rlx.kernels.expr import Reduce, walk
from rlx.kernels.lowering import Attention, Contract, Conv
from rlx.kernels.program import Kernel, Program

__all__ = ["long_kernels"]

LONG = 10.0  # seconds
FEW = 10**10  # turns of its loops that a kernel makes in less than that


def long_kernels(program: Program, ceilings: Ceilings) -> Iterator[tuple[Kernel, int, float]]:
    """Kernels of a run that are predicted to take more than ten seconds each, even at the lowest sizes.

    With each come the turns of its loops and the seconds. Loops of the graph count as one round, and kernels whose
    sizes data decide are left out.
    """
    extents = {name: max(1, symbol.lo) for name, symbol in program.dims.items()}
    for kernel in program.run:
        with suppress(KeyError, RlxError):
            turns = _turns(kernel, extents)
            if turns > FEW:
                seconds = price_kernel(kernel, ceilings, extents).seconds
                if seconds > LONG:
                    yield kernel, turns, seconds


def _turns(kernel: Kernel, extents: Mapping[str, int]) -> int:
    """At most how often the innermost loops of a kernel turn: quick to count."""
    most = 0
    for store in kernel.stores:
        reduced = [s for x in walk(store.expr) if isinstance(x, Reduce) for s in x.extents]
        most = max(most, prod(evaluate(s, extents) for s in (*store.extents, *reduced)))
    match kernel.anchor:
        case Contract(k=k):
            return most * evaluate(k, extents)
        case Conv(w_shape=shape):
            return most * prod(evaluate(s, extents) for s in shape[1:])
        case Attention(q_shape=q, k_shape=k):
            return most * evaluate(q[3], extents) * evaluate(k[2], extents)
    return most
