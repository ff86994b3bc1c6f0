"""Kernels that have the code of several ways to compute them, of which a run takes one: see `schedule.choice`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rlx.backends.cpu.loops.nest import emit_nest
from rlx.backends.cpu.schedule.arguments import Computed, KernelCode, Product, once
from rlx.backends.cpu.schedule.choice import Choice, Chosen
from rlx.backends.cpu.strategy import CpuStrategy, Step
from rlx.backends.cpu.target import Target
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["alternatives", "emitted", "only_where"]

_once = lru_cache(256)(once)  # many kernels, as of all layers, have equal choices: a binding asks one of them


def where_chosen(code: KernelCode, choice: Choice, way: int) -> KernelCode:
    """The code, launched in runs that take this way."""
    here = _once(choice)
    words = (Computed(Chosen(here, way, w.fn)) if isinstance(w, Computed) else w for w in code.words)
    scratch = code.scratch
    if scratch != 0:
        number = scratch.fn if isinstance(scratch, Computed) else Product((scratch,))
        scratch = Computed(Chosen(here, way, number))
    return replace(code, words=tuple(words), chunks=Chosen(here, way, code.chunks), scratch=scratch)


def alternatives(choice: Choice, *ways: Sequence[KernelCode]) -> list[KernelCode]:
    """The code of a kernel that is computed in one of several ways, given that of each in the order of the choice."""
    return [where_chosen(code, choice, way) for way, codes in enumerate(ways) for code in codes]


def emitted(kernel: Kernel, target: Target) -> list[KernelCode]:
    """The code of a kernel by its strategy; of loops, which have none, a function for each store."""
    if kernel.strategy is None:
        return [emit_nest(store, target.lanes) for store in kernel.stores]
    assert isinstance(kernel.strategy, CpuStrategy)
    return kernel.strategy.emit(kernel, target)


def only_where(kernel: Kernel, name: str, choice: Choice, way: int) -> Kernel:
    """A kernel that packs operands, as a step of that name, which runs that take this way launch."""

    def code(made: Kernel, target: Target) -> KernelCode:
        (found,) = emitted(replace(made, strategy=kernel.strategy), target)
        return where_chosen(found, choice, way)

    return replace(kernel, strategy=Step(name, code))
