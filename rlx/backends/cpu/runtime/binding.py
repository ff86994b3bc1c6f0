"""Binding on the CPU: the words of all phases, and the rows that the native runner walks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.codegen import binding
from rlx.backends.codegen.kernel_facts import tested_names
from rlx.backends.codegen.table import Affected
from rlx.backends.cpu.native.entry import Patch
from rlx.backends.cpu.native.runner import HostCall, RunBlock, native
from rlx.backends.cpu.native.runner_ir import ERROR_KINDS, EXTENT, EXTENT_BEYOND_BOUND, HOST_CALL_RAISED
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim
from rlx.kernels.program import Buffer, Kernel
from rlx.records import dataclass, field

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlx.backends.cpu.runtime.concurrent_phases import Job
    from rlx.backends.cpu.runtime.selected_outputs import Selected
    from rlx.ir.graph import Array
    from rlx.plan.arena import MemoryPlan

__all__ = ["Binding", "Bound", "aligned_bytes"]

LARGE_PAGE = 2 << 20
NUMPY_ASKS = 4 << 20  # bytes of arrays from which on NumPy asks the system for large pages
LONG_RUN = 8  # chunks, of some 50 µs at most, from which a run lets other Python threads go on
LONG_RUN_BYTES = 256 << 10  # or of what a phase reads and writes: some 10 µs
LONG_SPECIAL_BYTES = 8 << 10  # the same where a kernel may take far longer for each byte
VALUED = (1, 4)  # index out of range and extent beyond its bound come with the index or extent


def aligned_bytes(count: int, alignment: int = 64, *, sparse: bool = False) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros at an aligned address: artifacts hold them, and nothing of this process where they are never written.

    The system maps large ones in when they are first touched, those of a large page or more in large pages. `sparse`:
    only small parts here and there may be touched, so in pages of the usual size.
    """
    least = 0
    if sparse and count >= LARGE_PAGE:
        memory = mmap.mmap(-1, count + alignment, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # of a kernel without large pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        raw = np.frombuffer(memory, np.uint8)
        start = -raw.ctypes.data % alignment
        return raw[start : start + count]
    if count >= LARGE_PAGE:
        alignment, least = max(alignment, LARGE_PAGE), NUMPY_ASKS
    raw = np.zeros(max(count + alignment, least), np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


class Binding(binding.Binding):
    """A table filled in: `rows` is the phase table, of (function, address of its words, chunks) for each phase.

    Where sizes that data decide change, the run goes on with `rows` as they are in `block`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.current: list[tuple[str, NDArray[np.int64]]] = []  # sizes that data decide, and words of `rlx_extent`
        super().__init__(*args, **options)
        self.block: RunBlock | None = None  # that runs it
        self.hosts: dict[int, HostCall] = {}
        self.rows: list[tuple[int, int, int]] = []
        table, base = self.table, int(self.words.ctypes.data)
        for number, (phase, start) in enumerate(zip(table.phases, table.starts, strict=True)):
            code = phase.code
            if code is None:
                call = self.hosts[number] = HostCall(self.host_call(number, phase.kernel))
                row = self.known_extent(phase.kernel, call) or (call.address, base)
                self.rows.append((*row, self.host_chunks(phase.kernel)))
            else:
                self.rows.append((table.addresses[code.symbol], base + 8 * start, code.chunks(self.known)))

    def known_extent(self, kernel: Kernel, call: HostCall) -> tuple[int, int] | None:
        """The function and words of a phase that makes a number a size: it calls the host where that has changed.

        None where the host has more to do than to take a new size in.
        """
        op: Any = kernel.host.op if kernel.host is not None else None
        if op is None or op.op_name != "extent" or len(kernel.makes) != 1:
            return None
        (symbol,), number = kernel.makes, kernel.operands[0]
        free = isinstance(op.count, Dim) and op.count.symbol == symbol and symbol.multiple == 1 and symbol.lo <= 0
        if not free or number.base.kind != "arena" or number.dtype is not DTYPES["i64"]:
            return None
        if not isinstance(number.offset, int):
            return None
        words = np.array([self.address(number.base) + number.offset, 0, call.address], np.int64)
        self.current.append((symbol.name, words))
        words[EXTENT] = self.extents[symbol.name]
        return native().extent, int(words.ctypes.data)

    def set_extents(self, extents: dict[str, int]) -> None:
        super().set_extents(extents)
        for name, words in self.current:
            words[EXTENT] = extents[name]

    def _resize(self, affected: Affected) -> None:
        super()._resize(affected)
        for number in affected.phases:
            code = self.table.phases[number].code
            if code is not None:
                function, words, _ = self.rows[number]
                self.rows[number] = (function, words, code.chunks(self.known))
                if self.block is not None:
                    self.block.table[number, 2] = self.rows[number][2]

    def patches(self, inputs: Sequence[Buffer]) -> list[Patch]:
        """The words that each run fills in with the addresses of its inputs."""
        base = int(self.words.ctypes.data)
        return [
            (number, base + 8 * word, shift)
            for number, root in enumerate(inputs)
            for word, shift in self.places.get(root, {}).items()
        ]

    def is_long(self) -> bool:
        """Whether runs take so long that other Python threads, and Ctrl-C, can't wait for their end."""
        if sum(count for _, _, count in self.rows) >= LONG_RUN:
            return True
        for phase, (_, _, count) in zip(self.table.phases, self.rows, strict=True):
            if count:
                buffers = (*phase.kernel.reads(), *phase.kernel.writes())
                size = sum(b.nbytes(self.extents) for b in buffers)
                if size >= (LONG_RUN_BYTES if phase.kernel.special is None else LONG_SPECIAL_BYTES):
                    return True
        return False

    def overrun(self, block: RunBlock, status: int) -> binding.Overrun:
        """What a failed run has not enough room for; another error is raised."""
        error = self.error(block, status)
        if isinstance(error, binding.Overrun):
            return error
        raise error

    def error(self, block: RunBlock, status: int) -> Exception:
        """The exception for a nonzero status of the last run; raises what is not an Exception (KeyboardInterrupt)."""
        number = block.failed_phase
        kernel = self.table.phases[number].kernel
        label = kernel.label
        if status & 255 == EXTENT_BEYOND_BOUND and kernel.mark is not None and kernel.mark.flow.count is not None:
            return self.too_many_rounds(kernel.mark.flow.count, label, block.value)
        if status & 255 == HOST_CALL_RAISED:
            call = self.hosts[number]
            cause, call.error = call.error, None
            if isinstance(cause, ExecutionError):
                named = str(cause).startswith("node ") or not kernel.nodes
                return cause if named else ExecutionError(f"node {label}: {cause}")
            if not isinstance(cause, Exception):
                assert cause is not None
                raise cause
            made = ExecutionError(f"node {label}: its host call raised {type(cause).__name__}: {cause}")
            made.__cause__ = cause
            return made
        what = ERROR_KINDS.get(status & 255, f"status {status}")
        shown = f" (value {block.value})" if status & 255 in VALUED else ""
        return ExecutionError(f"node {tested_names(kernel) or label}: {what}{shown}")


@dataclass(eq=False)
class Bound:
    """A binding to the shapes of inputs, with all that the entry needs to run it."""

    binding: Binding
    plan: MemoryPlan
    table: NDArray[np.int64]  # the phases
    jobs: list[Job]  # of phases that run side by side
    releases: bool  # whether its runs let other Python threads go on
    patches: list[Patch]
    arrays: tuple[tuple[Array, ...], ...]  # the outputs, read-only, after a run that leaves the parity even or odd
    results: tuple[Any, ...]  # what `slots` returns for them
    feeds: Array | None = None  # the words of the phase that feeds states
    given: NDArray[np.int64] | None = None  # patches and records of the inputs that each call gives
    records: NDArray[np.int64] | None = None
    fresh: bool = True  # it has not run yet
    selected: dict[tuple[int, ...], Selected] = field(default_factory=dict)  # by the outputs asked for, the latest last
    direct: Selected | int | None = None  # for runs that write large results where the caller gets them; 0: none can
