"""Times of kernels from several runs, on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["KernelTime", "ThreadSpan", "Timer", "kernel_times"]

LOW = 0.25  # the quantile that counts: what disturbs a run only makes it longer
HIGH = 0.75
CONFIRMED = 3  # runs that must be undisturbed, or all where there are fewer
NEAR = 1.3  # times within this ratio of the low quartile confirm it
NEAR_LEAST = 5e-7  # seconds by which short times may differ too: the clocks' own
WAITED = 0.1  # part of its time that a thread may have been without a processor
WAITED_LEAST = 2e-6  # seconds that are never a wait: the clocks' own
SLICE = 4e-3  # seconds for which a scheduler leaves a thread its processor, about
MORE = 3  # times the runs asked for, while kernels are disturbed
SHORT, MANY = 0.5, 12  # of runs that take so many seconds together: so many times
GOLDEN = 0.6180339887498949


class ThreadSpan(NamedTuple):
    """What a thread did of a kernel, from the start of its first chunk to the end of its last, in seconds.

    `start` counts from that of the kernel; thread 0 is the caller. Of a kernel in a loop: the time in all its chunks.
    """

    thread: int
    start: float
    seconds: float
    chunks: int


class KernelTime(tuple[str, str, float]):
    """(kind, name, seconds per run) of a kernel: the low quartile over the undisturbed runs, in all rounds of a loop.

    `spread` is the distance from there to the high quartile, in seconds. `disturbed`: fewer than three runs (or one of
    fewer) agreed or had their processor all the time, so that `seconds` may be too long. `threads` is what each
    thread did in the last run, for a trace.
    """

    spread: float
    disturbed: bool
    threads: tuple[ThreadSpan, ...]

    def __new__(
        cls,
        kind: str,
        name: str,
        seconds: float,
        spread: float = 0.0,
        disturbed: bool = False,
        threads: tuple[ThreadSpan, ...] = (),
    ) -> KernelTime:
        made = super().__new__(cls, (kind, name, seconds))
        made.spread, made.disturbed, made.threads = spread, disturbed, threads
        return made

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the threads."""
        kind, name, seconds = self
        return {"kind": kind, "name": name, "seconds": seconds, "spread": self.spread, "disturbed": self.disturbed}

    def __getnewargs__(self) -> tuple[str, str, float, float, bool, tuple[ThreadSpan, ...]]:
        return (*self, self.spread, self.disturbed, self.threads)


class Timer:
    """Collects what each kernel took, run by run, and says when there were enough runs.

    A scheduler takes the processor away about every 4 ms. A run that starts as the one before ended meets that in the
    same kernel each time; so each run starts after a sleep, which begins a new slice, and another part of a slice.
    """

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self.taken: list[NDArray[np.float64]] = []
        self.waited: list[NDArray[np.float64]] = []

    def run(self, once: Callable[[], tuple[ArrayLike, ArrayLike]]) -> None:
        """Runs `once` as often as is needed; it gives the seconds of each kernel, and how long its threads waited."""
        began = time.perf_counter()
        for number in range(MANY * self.repeat):
            if number >= self.repeat and not (self.repeat >= CONFIRMED and self.disturbed().any()):
                break
            if number >= MORE * self.repeat and time.perf_counter() - began > SHORT:
                break
            self.start(number)
            taken, waited = once()
            self.taken.append(np.asarray(taken, float))
            self.waited.append(np.asarray(waited, float))

    def start(self, number: int) -> None:
        """Lets part of a slice pass, another one each time."""
        if not number:
            return
        time.sleep(1e-4)
        length = min(SLICE, float(self.taken[-1].sum()))
        end = time.perf_counter() + length * (number * GOLDEN % 1.0)
        while time.perf_counter() < end:
            pass

    def clean(self) -> NDArray[np.bool_]:
        """[runs, kernels]: whether the threads had their processors."""
        taken, waited = np.array(self.taken), np.array(self.waited)
        return np.asarray(waited <= np.maximum(WAITED * taken, WAITED_LEAST))

    def disturbed(self) -> NDArray[np.bool_]:
        """[kernels]: too few runs had their processor and agree with the low quartile, or shorter ones deny it."""
        taken = np.sort(np.where(self.clean(), np.array(self.taken), np.inf), axis=0)
        count, kernels = np.isfinite(taken).sum(axis=0), np.arange(taken.shape[1])
        low, lower = (taken[np.maximum(((count - 1) * part).astype(int), 0), kernels] for part in (LOW, LOW / 2))
        near = np.maximum(low * NEAR, low + NEAR_LEAST)
        agree = (taken <= near) & (np.maximum(taken * NEAR, taken + NEAR_LEAST) >= low) & np.isfinite(taken)
        apart = low > np.maximum(lower * NEAR, lower + NEAR_LEAST)
        return np.asarray((agree.sum(axis=0) < min(CONFIRMED, len(taken))) | apart)


def kernel_times(
    timer: Timer, kinds: Sequence[str], names: Sequence[str], threads: Sequence[tuple[ThreadSpan, ...]] = ()
) -> list[KernelTime]:
    """The rows of a profile."""
    taken, waited = np.array(timer.taken), np.array(timer.waited)
    clean, disturbed = timer.clean(), timer.disturbed()
    rows = []
    for n, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        kept = taken[clean[:, n], n]
        # where each run was interrupted: the shortest without its waits, the nearest to what it would take
        low, high = np.quantile(kept, (LOW, HIGH)) if len(kept) else (float((taken - waited)[:, n].min()),) * 2
        spans = threads[n] if threads else ()
        rows.append(KernelTime(kind, name, float(low), float(high - low), bool(disturbed[n]), spans))
    return rows
