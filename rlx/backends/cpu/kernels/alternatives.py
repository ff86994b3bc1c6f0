"""Kernels that work for one of several ways to compute another one: only runs that take it launch them."""

from __future__ import annotations

from rlx.backends.cpu.loops.nest import emit_nest
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.schedule.choice import Choice, where_chosen
from rlx.backends.cpu.strategy import CpuStrategy, Step
from rlx.backends.cpu.target import Target
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["emitted", "only_where"]


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
