"""A compiled graph on the device: its module, the status of its checks, and launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from rlx.backends.array import Array, MemorySpace, Tensor
from rlx.backends.codegen.arguments import KernelCode
from rlx.backends.codegen.binding import Binding
from rlx.backends.codegen.kernel_facts import tested_names
from rlx.backends.codegen.table import Phase
from rlx.backends.codegen.walked import Held, WalkedCode, WalkedExecutable
from rlx.backends.cuda.device.driver import driver
from rlx.backends.cuda.device.memory import MEMORY, SPACE, CudaMemory
from rlx.backends.cuda.device.module import Modules
from rlx.backends.cuda.device.pinned import Status
from rlx.backends.cuda.device.replay import Replay
from rlx.backends.cuda.device.timed import Timed
from rlx.backends.cuda.repeat import Repeat, repeat_of
from rlx.backends.cuda.text.emitter import STATUS
from rlx.backends.cuda.text.form import Target
from rlx.backends.cuda.text.function import Function, LaunchCode
from rlx.backends.cuda.text.kernels import kernel_texts, module_texts
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.records import dataclass

__all__ = ["Code", "CudaExecutable"]

MAPPED = 16  # bytes: what the copy engine, and threads in wide accesses, read starts at a multiple


@dataclass(eq=False)
class Bound:
    """The binding of the last run, and what it was made for."""

    extents: dict[str, int]
    block: Any
    binding: Binding
    addresses: dict[Buffer, int]  # of what may lie elsewhere in another run
    words: bytes | None = None  # those of the binding and its extents, once it has run
    moved: bool = False  # since then


class Code(WalkedCode):
    """Functions, which are compiled once all kernels are printed."""

    functions: dict[str, Function]

    def __init__(self, graph: Graph, program: Program, options: CompileOptions) -> None:
        self.sites: list[tuple[Kernel, str, str]] = []  # of all checks: the kernel, the kind, the type of what is shown
        device = driver()
        self.target = Target(options.precision, device.capability, device.processors, options.alignment >= MAPPED)
        super().__init__(graph, program, options)
        with SPACE.session():
            self.modules = Modules(module_texts(list(self.functions.values())))
        self.straight = all(phase.code is not None for phase in self.table.phases)  # nothing is the host's to do

    def codes(self, kernel: Kernel) -> Sequence[KernelCode]:
        made = []
        for text in kernel_texts(kernel, self.target):
            made.append(text.code(len(self.sites)))
            self.functions.setdefault(text.function.symbol, text.function)
            self.sites.extend((kernel, *site) for site in text.sites)
        return made


class CudaExecutable(WalkedExecutable):
    """Launches phases one after the other in the stream of the device; the host waits at its own steps and the end."""

    code: Code

    def __init__(self, code: Code) -> None:
        with SPACE.session():
            super().__init__(code)
            self.status = Status()
        self.brought: dict[Buffer, Held] = {}  # memory for inputs that come from the host
        self.last: Bound | None = None
        self.repeat: Repeat | None = None
        self.timed: tuple[bytes, Timed] | None = None  # by the words of its launches
        self.waiting = False  # what was launched last may still stop with an error
        self.replay = Replay()

    def load(self) -> None:
        with SPACE.session():
            super().load()
            driver().synchronize()

    @property
    def memory(self) -> CudaMemory:
        return MEMORY

    @property
    def space(self) -> MemorySpace:
        return SPACE

    def session(self) -> AbstractContextManager[object]:
        return SPACE.session()

    def another(self) -> CudaExecutable:
        return CudaExecutable(self.code)

    def trim(self) -> None:
        with SPACE.session():
            self.take_back()
            self.repeat = self.last = self.timed = None
            self.brought.clear()
            super().trim()
            MEMORY.reclaim()

    def address(self, root: Buffer) -> int:
        return self.status.address if root is STATUS else super().address(root)

    def bring(self, root: Buffer, array: Tensor) -> None:
        if isinstance(array, Array):
            written = {self.block, *(self.places[state].block for state in self.program.states)}
            odd = array.held.address % MAPPED != 0  # as parts of arrays of others may be
            self.places[root] = SPACE.copy(array.held) if odd or array.held.block in written else array.held
            return
        given = np.ascontiguousarray(array)
        at = self.brought.get(root)
        if at is None or at.nbytes < given.nbytes:
            block = MEMORY.allocate(given.nbytes)
            at = self.brought[root] = Held(block, block.address, root.dtype, given.shape)
        MEMORY.write(at.address, given)
        self.places[root] = Held(at.block, at.address, root.dtype, given.shape)

    def take_back(self) -> None:
        """Results of the last run that somebody has leave the arena."""
        if self.repeat is not None:
            self.repeat.take_back()

    def run_all(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None] = ()) -> list[Array]:
        self.outputs = None
        self.take_back()
        return super().run_all(inputs, out)

    def run_fresh(
        self, inputs: Sequence[Any], wanted: tuple[int, ...] | None = None, out: Sequence[Any] | None = None
    ) -> list[Tensor] | None:
        """As runs before, with arrays of the host: see `Repeat`."""
        if self.last is None or wanted is not None or out is not None:
            return None
        with self.taken():
            if self.bound_shapes is None or self.stale or self.fed or self.kept or self.spent is not None:
                return None
            if self.bound_shapes[1] != self.last.extents:  # those of a run that was refused before it was bound
                return None
            again = self.repeat
            if again is None or again.last is not self.last or not again.serves(inputs):
                found = repeat_of(self, inputs)
                if found is None:
                    return None
                self.take_back()
                again = self.repeat = found
            self.settled()
            self.outputs, self.waiting = None, True
            made: list[Tensor] = [*again.run(self, inputs)]
            self.waiting = False
            self.look()
            self.outputs = list(made)
        return made

    def bind(self, extents: Mapping[str, int]) -> Binding:
        """The words for these extents: those of the last run, pointed to where its inputs lie now, if they fit."""
        last = self.last
        if last is None or last.extents != extents or last.block is not self.block or self.code.options.debug:
            self.last = None
            binding = super().bind(extents)
            if not self.program.made and not self.code.table.rounds:
                moving = [root for root in binding.places if root.kind in ("input", "state")]
                self.last = Bound(dict(extents), self.block, binding, {root: self.address(root) for root in moving})
            return binding
        for root, address in last.addresses.items():
            now = self.address(root)
            if now != address:
                last.addresses[root] = now
                last.binding.point(root, now)
                last.moved = True
        return last.binding

    def put(self, root: Buffer, array: Tensor) -> None:
        self.last = None
        super().put(root, array)

    def prepare(self, absent: Set[Buffer] = frozenset()) -> None:
        self.last = None
        super().prepare(absent)

    def walk(self, binding: Binding) -> None:
        """Launches the phases: as one graph from the second run with the same words and extents on, where no step is
        the host's.

        Those of a graph are waited for by `finish`: what follows is done meanwhile.
        """
        self.settled()
        if self.spent is not None and binding.table is self.code.table and self.code.straight:
            self.walk_timed(binding)
        elif binding.table is not self.code.table or not self.code.straight or self.spent is not None:
            super().walk(binding)
        else:
            last = self.last
            if last is None or last.moved or last.words is None:
                # the numbers of blocks, and maps, depend on extents that may be in no word
                words = binding.words.tobytes() + repr(binding.extents).encode()
                if last is not None:
                    last.words, last.moved = words, False
            else:
                words = last.words
            self.replay.run(words, self.launches(binding))
            self.waiting = True
            if self.fed:  # which a run that was stopped does not touch
                self.finish()

    def walk_timed(self, binding: Binding) -> None:
        """A run whose launches are timed."""
        assert self.spent is not None
        phases = binding.table.phases
        words = binding.words.tobytes() + repr(binding.extents).encode()
        if self.timed is None or self.timed[0] != words:
            launches = [partial(self.launch, binding, n, phase, early=False) for n, phase in enumerate(phases)]
            self.timed = words, Timed(launches)
        for number, seconds in enumerate(self.timed[1].run()):
            self.spent[number] += seconds
        self.look()

    def settled(self) -> None:
        """Nothing is left of a run that was interrupted, of which nobody asks any more."""
        if self.waiting:
            self.waiting = False
            driver().synchronize()
            self.status.clear()

    def finish(self) -> None:
        if self.waiting:
            self.waiting = False
            self.wait()

    def launches(self, binding: Binding, after_copy: bool = False) -> Callable[[], None]:
        """What launches all phases and waits for none; `after_copy`: a copy is under way that the first waits for."""

        def submit() -> None:
            for number, phase in enumerate(binding.table.phases):
                self.launch(binding, number, phase, early=number > 0 or not after_copy)

        return submit

    def launch(self, binding: Binding, number: int, phase: Phase, early: bool = True) -> None:
        """Submits a kernel, which may start `early` if it is of the kind that waits for the one before itself."""
        code = phase.code
        assert code is not None
        extents = binding.at_round()
        blocks = code.chunks(extents)
        if not blocks:
            return
        start = time.perf_counter()
        threads = self.code.functions[code.symbol].threads.block(extents)
        first = binding.table.starts[number]
        device, function, maps = driver(), self.code.functions[code.symbol], []
        if isinstance(code, LaunchCode):
            maps = [device.encode(form.at(int(binding.words[first + form.word]), extents)) for form in code.maps]
        words = int(binding.words.ctypes.data) + 8 * first
        handle = self.code.modules.function(code.symbol, function.shared)
        device.launch(
            handle, blocks, threads, words, maps, shared=function.shared, overlaps=early and function.overlaps
        )
        if self.spent is not None and not self.code.straight:
            driver().synchronize()
            self.note(number, start)

    def wait(self) -> None:
        """Waits for the device. Raises the error of the first check that failed."""
        driver().synchronize()
        self.look()

    def look(self) -> None:
        """Raises the error of the first check that failed, once the device is done."""
        failed = self.status.failed()
        if failed is not None:
            site, shown = failed
            self.status.clear()
            kernel, kind, dtype = self.code.sites[site]
            names = tested_names(kernel) or kernel.label
            raise ExecutionError(f"node {names}: {kind}: {_shown(shown, dtype)}")


def _shown(bits: int, dtype: str) -> Any:
    """What a check shows, from the bits that the device left."""
    kind = DTYPES[dtype]
    if kind.is_float and kind.bits >= 32:
        return np.array(bits, np.int64).view(np.float64)[()].astype(kind.numpy)
    return bool(bits) if kind.kind == "b" else np.array(bits, np.int64).astype(kind.numpy)[()]
