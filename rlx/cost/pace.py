"""How fast the processor is now, by a probe of three small loops.

Where processors are shared their speed changes by a half and more, for seconds at a time, and that of the caches that
cores share does so by itself. The ceilings of a device hold what the probe took when they were measured; what it takes
now tells how much longer everything takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from rlx.records import dataclass

__all__ = ["Pace", "Probe", "median", "present", "probe", "turn"]

KEPT = 2.0  # seconds for which the present speed is taken to stay
SECONDS = 6e-3  # of a probe
CALLS, SUM = 48, 2048  # sums in a turn, and the elements of each: some 30 us
FUNCTIONS, SHORT = 3, 4096  # exponentials, which take as long
LONG = 1 << 20  # elements that are read: beyond the caches of a core, within those that cores share


@dataclass(frozen=True)
class Probe:
    """Seconds of a turn of the probe: `calls` of the interpreter, `arithmetic` on vectors, `memory` read."""

    calls: float
    arithmetic: float
    memory: float


@dataclass(frozen=True)
class Pace:
    """How many times as long as when it was calibrated a device takes now: for calls of the host, for arithmetic, and
    for what moves between the memory and the caches of a core."""

    host: float = 1.0
    kernels: float = 1.0
    memory: float = 1.0

    def __str__(self) -> str:
        parts = f"calls {self.host:.2f}, arithmetic {self.kernels:.2f}, memory {self.memory:.2f}"
        return f"{parts} times as long as when calibrated"


@cache
def _arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, y = rng.random(SUM, np.float32), rng.random(SHORT, np.float32)
    return x, np.empty_like(x), y, np.empty_like(y), rng.random(LONG, np.float32)


def turn() -> Probe:
    """One turn of the probe, some 0.4 ms; what it reads is brought near first, wherever other work has left it."""
    x, x_out, y, y_out, z = _arrays()
    z.max()
    start = time.perf_counter()
    z.max()
    read = time.perf_counter()
    np.exp(y, out=y_out)
    np.add(x, x, out=x_out)
    near = time.perf_counter()
    for _ in range(FUNCTIONS):
        np.exp(y, out=y_out)
    computed = time.perf_counter()
    for _ in range(CALLS):
        np.add(x, x, out=x_out)
    return Probe(time.perf_counter() - computed, computed - near, read - start)


def median(turns: Sequence[Probe]) -> Probe:
    """The medians of turns."""
    return Probe(*(float(np.median([getattr(t, name) for t in turns])) for name in ("calls", "arithmetic", "memory")))


def probe(seconds: float = SECONDS) -> Probe:
    """The speed of the processor now; the first quarter of the time only wakes it up."""
    start = time.perf_counter()
    turns: list[Probe] = []
    while (now := time.perf_counter()) < start + seconds or len(turns) < 3:
        made = turn()
        if now > start + seconds / 4:
            turns.append(made)
    return median(turns)


_last: list[tuple[float, Probe]] = []


def present() -> Probe:
    """The speed of the processor, measured within the last two seconds."""
    now = time.monotonic()
    if not _last or now - _last[-1][0] > KEPT:
        _last[:] = [(now, probe())]
    return _last[-1][1]
