"""A run phase by phase that stops at the first kernel whose results are not finite: `CompileOptions.trap`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.codegen.binding import as_array
from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.native.runner_ir import NAN_TRAPPED, NEXT, PHASE, PHASE_WORDS, STATUS, VALUE
from rlx.backends.cpu.runtime.binding import Binding
from rlx.ir.finite import Reading, bad_elements, is_trappable, trapped
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Kernel

__all__ = ["stepped"]

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int64)

ArrayOf = Callable[[Buffer, Mapping[str, int]], Array]


@usual_arithmetic()
def stepped(block: RunBlock, binding: Binding, array: ArrayOf, inputs: Mapping[Buffer, Array], trap: str) -> int:
    """One run of an acquired block in this thread, chunk by chunk; the status as of `RunBlock.run_acquired`.

    `inputs` are the arrays of this run by buffer. Raises `NanTrapped`.
    """
    walk = _Walk(block, binding, array, inputs, trap)
    block.words[STATUS] = block.words[VALUE] = 0
    index = 0
    while index < len(block.table):
        index = walk.step(index)
        if block.status:
            break
    return block.status


class _Walk:
    def __init__(
        self, block: RunBlock, binding: Binding, array: ArrayOf, inputs: Mapping[Buffer, Array], trap: str
    ) -> None:
        self.block, self.binding, self.array, self.inputs, self.trap = block, binding, array, inputs, trap
        self.kernels = [phase.kernel for phase in binding.table.phases]  # the phase that feeds states has none
        self.before: list[Reading] = []

    def step(self, index: int) -> int:
        """Runs a phase, and gives the number of the next one."""
        function, words, chunks = (int(w) for w in self.block.table[index, : PHASE_WORDS - 1])
        kernel = self.kernels[index] if index < len(self.kernels) else None
        watched = kernel if kernel is not None and kernel.kind != "control" and chunks > 0 else None
        if watched is not None and (index == 0 or self.kernels[index - 1] is not watched):
            self.enter(watched)
        self.block.words[NEXT] = index + 1
        for chunk in range(chunks):
            KERNEL(function)(words, chunk, self.block.address, 0)
            if self.block.status:
                self.block.words[PHASE] = index
                return index
        last = index + 1 >= len(self.kernels) or self.kernels[index + 1] is not kernel
        if watched is not None and last:
            self.leave(watched)
        return int(self.block.words[NEXT])

    def enter(self, kernel: Kernel) -> None:
        """Looks at what the kernel reads, and clears what others left where it writes: it may write only a part."""
        read = [(b, self.contents(b)) for b in kernel.reads() if is_trappable(b.dtype, b.encoding)]
        self.before = [(name_of(b), *bad_elements(a)) for b, a in read]
        for buffer in self.results(kernel):
            array = self.contents(buffer)
            if buffer.base.kind == "arena" and not any(np.may_share_memory(array, a) for _, a in read):
                array[~np.isfinite(array)] = 0

    def leave(self, kernel: Kernel) -> None:
        """Raises `NanTrapped` where a result is not finite."""
        for buffer in self.results(kernel):
            array = self.contents(buffer)
            error = trapped(kernel.label, kernel.name, name_of(buffer), array, self.before, self.trap)
            if error is not None:
                self.block.words[STATUS] = NAN_TRAPPED
                raise error

    def results(self, kernel: Kernel) -> Sequence[Buffer]:
        return [b for b in kernel.writes() if is_trappable(b.dtype, b.encoding)]

    def contents(self, buffer: Buffer) -> Array:
        """The present contents of a buffer; empty where its size is not known yet."""
        rounds = self.binding.table.rounds
        counts = {name: int(self.binding.words[self.binding.table.counters[flow]]) for name, flow in rounds.items()}
        extents = {**self.binding.extents, **counts}
        given = self.inputs.get(buffer.base)
        if given is None:
            return self.array(buffer, extents)
        return as_array(given.reshape(-1).view(np.uint8), buffer, evaluate(buffer.offset, extents), extents)


def name_of(buffer: Buffer) -> str:
    """How a message names a buffer."""
    return buffer.name if buffer.kind == "arena" else f"{buffer.base.kind} {buffer.base.name!r}"
