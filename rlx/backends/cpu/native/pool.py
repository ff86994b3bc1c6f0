"""The thread pool: one a process. What workers do, and where a run waits for them, is native code: see `pool_ir`."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.native.pool_ir import (
    CLOSED,
    NOT_STARTED,
    SHARES,
    SLOT_BYTES,
    SLOT_TABLE,
    SLOTS,
    SPIN_ACTIVE,
    SPIN_ACTIVE_NS,
    SPIN_IDLE,
    SPIN_IDLE_NS,
    START,
    STARTED,
    STATE,
)
from rlx.backends.granted import MAX_THREADS, allowed_cpus, cpu_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Pool", "aligned_words", "pool"]

JOIN_SECONDS = 1.0


def aligned_words(count: int) -> NDArray[np.int64]:
    """Returns `count` zeroed int64 words that start at a multiple of 64 bytes."""
    raw = np.zeros(count + 7, np.int64)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + count]


class Pool:
    """The workers of this process and the memory through which native code talks to them."""

    def __init__(self) -> None:
        self.memory = aligned_words((SLOT_TABLE + SLOTS * SLOT_BYTES) // 8)
        self.address = self.memory.ctypes.data
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.wanted = 0  # workers that were started, or are about to be
        self.worker: Callable[[int], None] | None = None
        self.stop: Callable[[int], None] | None = None
        self.starter = self.start  # keeps alive the object whose address native code calls
        self.memory[START // 8] = id(self.starter)
        self.memory[SPIN_ACTIVE // 8] = self.memory[SPIN_IDLE // 8] = 1000
        # Never freed: a worker may touch it until the process is gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory.base))

    def attach(self, library: Any) -> None:
        """Takes the pool's native functions from a loaded library, which stays loaded for good."""
        library.keep()
        function = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
        self.worker = function(library.address("rlx_worker"))
        self.stop = function(library.address("rlx_stop"))
        pause_ns = measure_pause(function(library.address("rlx_spin")))
        self.memory[SPIN_ACTIVE // 8] = max(1, int(SPIN_ACTIVE_NS / pause_ns))
        self.memory[SPIN_IDLE // 8] = max(1, int(SPIN_IDLE_NS / pause_ns))

    @property
    def state(self) -> int:
        return int(self.memory[STATE // 8])

    def start(self, workers: int | None = None) -> None:
        """Starts the workers, by default one for each CPU but the caller's; the first parallel run does it."""
        with self.lock:
            if self.state != NOT_STARTED or self.worker is None:
                return
            self.memory[STATE // 8] = STARTED
        self.add(spare_cpus() if workers is None else workers)

    def grow(self) -> None:
        """Adds workers for CPUs that the process has been granted since they were started."""
        if self.state == STARTED:
            self.add(spare_cpus())

    def add(self, workers: int) -> None:
        """Starts workers until there are so many."""
        with self.lock:
            first, self.wanted = self.wanted, max(self.wanted, workers)
        for index in range(first + 1, self.wanted + 1):
            thread = threading.Thread(target=self.work, name=f"rlx-worker-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to exit, or there is no memory for a stack: run with fewer
                break
            self.threads.append(thread)

    def work(self) -> None:
        """A worker. It may use the CPUs of the process, not only those of the thread that started it."""
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(0, allowed_cpus())
        assert self.worker is not None
        self.worker(self.address)

    def close(self) -> None:
        """Ends the workers; later runs use their caller only."""
        self.memory[STATE // 8] = CLOSED
        if self.stop is not None:
            self.stop(self.address)
        for thread in self.threads:
            thread.join(JOIN_SECONDS)
        self.threads.clear()

    def reset_after_fork(self) -> None:
        """Forgets the parent's workers and runs; the next parallel run starts workers of this process."""
        self.lock = threading.Lock()
        tickets = self.memory[(SLOT_TABLE + SHARES) // 8 :: SLOT_BYTES // 8]  # of callers: the others follow theirs
        generations = (tickets >> 32) + 1
        self.memory[: SPIN_ACTIVE // 8] = 0
        self.memory[SLOT_TABLE // 8 :] = 0
        tickets[:] = generations << 32
        if self.state == STARTED:
            self.memory[STATE // 8] = NOT_STARTED
        self.threads.clear()
        self.wanted = 0


def spare_cpus() -> int:
    """CPUs that this process may use, without the caller's."""
    return min(MAX_THREADS, cpu_count()) - 1


def measure_pause(spin: Callable[[int], None]) -> float:
    """Returns the nanoseconds of one spin-wait pause, which differ by a factor of ten between CPUs."""
    count = 2000
    spin(count)
    best = min(timed(spin, count) for _ in range(3))
    return max(best / count, 0.1)


def timed(spin: Callable[[int], None], count: int) -> int:
    start = time.perf_counter_ns()
    spin(count)
    return time.perf_counter_ns() - start


pool = Pool()
atexit.register(pool.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.reset_after_fork)
