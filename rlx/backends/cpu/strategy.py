"""Strategies of the CPU: each is one way to compute an anchor. `select` names all lists, and says where each stands.

docs/adding-a-strategy.md adds one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.kernels.program import Kernel
from rlx.kernels.strategy import Strategy
from rlx.records import dataclass, replace

__all__ = ["CpuStrategy", "Setting", "Step", "computed"]


@dataclass(frozen=True)
class Setting:
    """What a choice depends on besides the kernel.

    `target` is the machine. `streamed`: the program's weights don't stay in caches between runs. `shared`: packed
    weights have to be the same for any number of rows. `in_place`: products keep no copy of weights.
    """

    target: Target
    streamed: bool
    shared: bool
    in_place: bool = False


class CpuStrategy(Strategy, ABC):
    """One way to compute kernels on the CPU. Its class says in its docstring what it needs and where it comes from.

    `scalars`: its code does not look at the numbers in the arithmetic of stores, and of weights of a convolution, so
    that these can be words.
    """

    scalars: bool = False

    @property
    def summary(self) -> str:
        """What it computes and needs, in a sentence."""
        return " ".join((inspect.getdoc(type(self)) or "").split("\n\n")[0].split())

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        """Why it can't compute the kernel, or why it would lose; None where it takes it.

        A strategy that is chosen is the same for all sizes of a run: results of open and fixed sizes have equal bits.
        """
        return None

    @abstractmethod
    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        """The kernels that bring operands into its layout, and last the kernel that reads those."""

    @abstractmethod
    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        """The code of a kernel that `layout` has made, for a machine: a function for each step."""


class Step(CpuStrategy):
    """A kernel that the layout of a strategy makes besides its own; `packs`: it only packs operands for that."""

    def __init__(
        self, name: str, code: Callable[[Kernel, Target], KernelCode], *, packs: bool = True, scalars: bool = False
    ) -> None:
        super().__init__(name)
        self.scalars = scalars or type(self).scalars
        self.code = code
        self.packs = packs

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return [kernel]

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [self.code(kernel, target)]


def computed(kernel: Kernel, strategies: Sequence[CpuStrategy], setting: Setting) -> list[Kernel]:
    """The kernel, computed by the first strategy that takes it, after those that bring its operands into a layout.

    It keeps the names of those that refused it before, and why.
    """
    refused: list[tuple[str, str]] = []
    for strategy in strategies:
        why = strategy.refuses(kernel, setting)
        if why is None:
            *before, last = strategy.layout(kernel, setting)
            return [*before, replace(last, strategy=strategy, refused=tuple(refused))]
        refused.append((strategy.name, why))
    raise AssertionError(f"no strategy for kernel {kernel.name!r}: {refused}")
