"""What runs a table of phases: the state block of a compiled graph, as Python has it, and Python calls as kernels."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlx.arithmetic import usual_arithmetic
from rlx.backends.cpu.native.pool import aligned_words, pool
from rlx.backends.cpu.native.runner_ir import (
    BUSY,
    CELL_WORDS,
    CELLS,
    CHECK_EVERY_NS,
    CHECK_NS,
    CPYTHON,
    HOST_CALL_RAISED,
    LOOK,
    PARALLEL,
    PHASE,
    PHASE_COUNT,
    PHASE_WORDS,
    PHASES,
    POOL,
    PROFILE,
    PROFILE_WORDS,
    RELEASE_GIL,
    STATUS,
    THREAD_STATE,
    THREADS,
    USER_WORDS,
    VALUE,
    Native,
    symbol_address,
)
from rlx.backends.granted import MAX_THREADS
from rlx.errors import BusyError, ExecutionError, OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HostCall", "RunBlock", "host_call"]

BUSY_TEXT = (
    "the compiled graph is running in another thread: use `clone()` for one graph a thread, `sync()` after `submit`, "
    "or compile with busy='wait'"
)
WAIT_SECONDS = 2e-5, 1e-3  # between looks at a block that another thread has: the first, and the longest


@functools.cache
def native() -> Native:
    """The runtime of this process, compiled or loaded at the first use and attached to the pool."""
    loaded = Native()
    pool.attach(loaded.library)
    return loaded


def phase_table(phases: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """The words of phases: (kernel address, words address, nchunks) each."""
    rows = list(phases)
    table = aligned_words(len(rows) * PHASE_WORDS).reshape(-1, PHASE_WORDS)
    if rows:
        table[:, :3] = rows
    return table


def is_parallel(table: NDArray[np.int64]) -> bool:
    """Whether a phase of a table has more than one chunk."""
    return bool((table[:, 2] > 1).any())


blocks: weakref.WeakSet[RunBlock] = weakref.WeakSet()
holders: dict[int, int] = {}  # address of a block that Python code has -> its thread


def thread_state() -> int:
    """Address of this thread's CPython state."""
    return int(_thread_state() or 0)


_thread_state: Callable[[], int | None] = int
if CPYTHON:
    _thread_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))


class RunBlock:
    """The state block and the phase table of one runnable program.

    Addresses never change, except that of the table when `set_phases` is given more phases than before. The owner keeps
    alive what the addresses in the table point to. `user_words` more words follow the fixed ones, see `user`.
    """

    def __init__(
        self,
        phases: Iterable[tuple[int, int, int]] = (),
        *,
        threads: int = 1,
        user_words: int = 0,
        release_gil: bool = True,
    ) -> None:
        self.native = native()
        self.words = aligned_words(USER_WORDS + user_words)
        self.address = self.words.ctypes.data
        self.user = self.words[USER_WORDS:]
        self.profile: NDArray[np.int64] | None = None
        self.cells: NDArray[np.int64] | None = None
        self.words[POOL] = pool.address
        self.words[CHECK_NS] = CHECK_EVERY_NS
        self.words[LOOK] = self.native.look
        self.words[RELEASE_GIL] = release_gil
        self.threads = threads
        self.set_phases(phases)
        blocks.add(self)

    @property
    def threads(self) -> int:
        """Threads that a run may use, the caller among them."""
        return int(self.words[THREADS])

    @threads.setter
    def threads(self, count: int) -> None:
        if count < 1:
            raise OptionError(f"threads must be at least 1, got {count}")
        self.words[THREADS] = min(count, MAX_THREADS)

    @property
    def status(self) -> int:
        """Status word of the last run: 0, or kind | site << 8."""
        return int(self.words[STATUS])

    @property
    def value(self) -> int:
        """The value stored with the status."""
        return int(self.words[VALUE])

    @property
    def failed_phase(self) -> int:
        """Index of the phase that set the status; meaningful only when there is one."""
        return int(self.words[PHASE])

    def set_phases(self, phases: Iterable[tuple[int, int, int]]) -> None:
        """Sets the table: (kernel address, words address, nchunks) for each phase; the profile starts anew."""
        self.use(phase_table(phases))

    def use(self, table: NDArray[np.int64]) -> None:
        """As `set_phases`, for a table that was made before."""
        self.every = table
        self.walk(table)
        if self.profile is not None:
            self.enable_profile()

    def walk(self, table: NDArray[np.int64]) -> None:
        self.table = table
        self.words[PHASES] = table.ctypes.data
        self.words[PHASE_COUNT] = len(table)
        self.note_parallel()

    @contextmanager
    def walking(self, table: NDArray[np.int64]) -> Iterator[None]:
        """Runs inside this walk another table of these phases, of which some are skipped."""
        if table is self.every:
            yield
            return
        self.walk(table)
        try:
            yield
        finally:
            self.walk(self.every)

    def set_nchunks(self, index: int, count: int) -> None:
        """Sets how many chunks a phase has; below 1 the phase is skipped."""
        self.table[index, 2] = count
        self.note_parallel()

    def note_parallel(self) -> None:
        """Says to the walker whether to take a pool slot at once; call it after writing chunk counts into `table`."""
        self.words[PARALLEL] = is_parallel(self.table)

    def enable_profile(self) -> None:
        """Makes runs add up what every phase takes, and what each thread does of those with several chunks."""
        phases = len(self.table)
        self.profile = aligned_words(phases * PROFILE_WORDS).reshape(-1, PROFILE_WORDS)
        self.cells = aligned_words(phases * self.threads * CELL_WORDS).reshape(phases, self.threads, CELL_WORDS)
        bytes_each = self.threads * CELL_WORDS * self.cells.itemsize
        for number, row in enumerate(self.profile):
            row[CELLS] = self.cells.ctypes.data + number * bytes_each
        self.words[PROFILE] = self.profile.ctypes.data

    def profiled(self, phases: int) -> NDArray[np.int64]:
        """[phases, 4] since `enable_profile`, or since the table was last set.

        What each took and the processor time of the caller in it, in ns; its visits; the clock when the first began.
        """
        assert self.profile is not None
        return self.profile[:phases, :4].copy()

    def threads_apart(self, phases: int) -> NDArray[np.int64]:
        """[phases, threads, 6] of phases with several chunks, 0 of others.

        When a thread's first chunk began and its last ended, ns in chunks, how many; processor time at the first two.
        """
        assert self.cells is not None
        return self.cells[:phases, :, :6].copy()

    def disable_profile(self) -> None:
        self.words[PROFILE] = 0
        self.profile = self.cells = None

    def acquire(self, waits: bool = False) -> None:
        """Takes the block, to change or run it. Raises BusyError when another thread has it, unless told to wait.

        The thread that has the block itself (it is in a host call or a signal handler) would wait for ever: it is told.
        """
        if not self.native.acquire(self.address):
            if not waits or self.is_mine():
                raise BusyError(BUSY_TEXT)
            delay, longest = WAIT_SECONDS
            while not self.native.acquire(self.address):
                time.sleep(delay)
                delay = min(2 * delay, longest)
        holders[self.address] = threading.get_ident()

    def release(self) -> None:
        holders.pop(self.address, None)
        self.words[BUSY] = 0

    def is_mine(self) -> bool:
        """Whether this thread is the one that has the block."""
        state = int(self.words[THREAD_STATE])  # set only while the GIL is released, or taken back for a signal handler
        return holders.get(self.address) == threading.get_ident() or (state != 0 and state == thread_state())

    def run(self) -> int:
        """Runs all phases; returns 0, the status of the phase that failed, or BUSY_STATUS.

        Raises nothing but what a signal handler raises.
        """
        if not CPYTHON and self.words[PARALLEL] and self.threads > 1:
            pool.start()
        return self.native.run(self.address)

    def run_acquired(self) -> int:
        """Like `run`, for a block that the caller has acquired."""
        return self.native.go(self.address)


def reset_busy() -> None:
    """In a forked child nobody runs the blocks that other threads ran in the parent, some by another table."""
    holders.clear()
    for block in blocks:
        block.walk(block.every)
        block.words[BUSY] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_busy)


class HostCall:
    """A Python callable as a kernel, for a phase of one chunk: `address` goes into the phase table.

    An exception stops the run with HOST_CALL_RAISED and is kept in `error` until `raise_error`.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.error: BaseException | None = None
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int64)
        self.kernel = kernel(self.call)  # frees its code when it dies, so the owner keeps the HostCall
        self.address = symbol_address(self.kernel)

    def call(self, words: int, chunk: int, ctx: int, worker: int) -> None:
        before = holders.get(ctx, 0)
        holders[ctx] = threading.get_ident()
        try:
            with usual_arithmetic():  # the phases that follow have it whatever the call sets
                self.function()
        except BaseException as error:  # noqa: BLE001  # native code can't pass it on; `raise_error` does
            self.error = error
            status = ctypes.c_int64.from_address(ctx)
            if status.value == 0:
                status.value = HOST_CALL_RAISED
        finally:
            if before:
                holders[ctx] = before
            else:
                del holders[ctx]

    def raise_error(self) -> None:
        """Raises what the last run's call raised: an Exception as cause of an ExecutionError, others as they are."""
        error, self.error = self.error, None
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        raise ExecutionError(f"a host call in the run raised {type(error).__name__}: {error}") from error


def host_call(function: Callable[[], object]) -> HostCall:
    """Returns a HostCall whose `address` is a kernel that calls `function()` with the GIL held."""
    return HostCall(function)
