"""A compiled graph on the interpreter: its functions, its memory and its queues."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rlx.backends.array import Array, MemorySpace, Tensor
from rlx.backends.codegen.arguments import KernelCode
from rlx.backends.codegen.binding import Binding
from rlx.backends.codegen.table import Phase
from rlx.backends.codegen.walked import Held, WalkedCode, WalkedExecutable
from rlx.backends.interp.kernels import code_of
from rlx.backends.interp.memory import DEVICE_MEMORY, HOST_MEMORY, SPACE, Memory, Queues
from rlx.kernels.program import Buffer, Kernel

__all__ = ["Code", "InterpExecutable"]


class Code(WalkedCode):
    """Functions that NumPy runs, one for each kernel."""

    def codes(self, kernel: Kernel) -> Sequence[KernelCode]:
        made = []
        for number, function in enumerate(code_of(kernel), len(self.functions)):
            made.append(function.code(f"k{number}"))
            self.functions[made[-1].symbol] = function
        return made


class InterpExecutable(WalkedExecutable):
    """Submits the chunks of kernels to queues, as a device that works by itself is told."""

    def __init__(self, code: WalkedCode) -> None:
        super().__init__(code)
        self.queues = Queues()

    @property
    def memory(self) -> Memory:
        return DEVICE_MEMORY

    @property
    def space(self) -> MemorySpace:
        return SPACE

    def another(self) -> InterpExecutable:
        return InterpExecutable(self.code)

    def bring(self, root: Buffer, array: Tensor) -> None:
        """Has an input for a run: where it is if it lies on the device, else as a copy in the memory of the host."""
        if isinstance(array, Array):
            written = {self.block, *(self.places[state].block for state in self.program.states)}
            self.places[root] = SPACE.copy(array.held) if array.held.block in written else array.held
            return
        given = np.asarray(array)
        block = HOST_MEMORY.allocate(given.nbytes)
        HOST_MEMORY.write(block.address, given)
        self.places[root] = Held(block, block.address, root.dtype, given.shape)

    def launch(self, binding: Binding, number: int, phase: Phase) -> None:
        code = phase.code
        assert code is not None
        function, words = self.code.functions[code.symbol], binding.arguments(number)
        chunks = code.chunks(function.extents(words))

        def run() -> None:
            start = time.perf_counter()
            with np.errstate(all="ignore"):
                for chunk in range(chunks):
                    function(words, chunk)
            self.note(number, start)

        self.queues.submit(phase.kernel.queue, run, function.touches(words))

    def wait(self) -> None:
        self.queues.wait()

    def clear(self) -> None:
        self.queues.clear()
