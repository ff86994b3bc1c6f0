"""How a model fares with more to do: several clones at once, and more threads for one run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from rlx.cli.show import fastest
from rlx.ir.graph import Array
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.units import seconds_text

__all__ = ["Crowd", "Scaling", "crowd", "crowd_rows", "scaling_rows", "thread_scaling"]

MOST_SAMPLES = 100_000  # of each clone


@dataclass(frozen=True)
class Crowd:
    """Clones that run at once, each in its own thread: runs a second of all together, and the latency of one in s."""

    clones: int
    runs_per_second: float
    p50: float
    p90: float
    p99: float
    runs: int


@dataclass(frozen=True)
class Scaling:
    """One run at a time with so many threads: latency in s, and how many times faster than with the first number."""

    threads: int
    p50: float
    p90: float
    p99: float
    speedup: float
    runs: int


def crowd(model: CompiledGraph, arrays: Sequence[Array], clones: int, seconds: float) -> Crowd:
    """Runs that many clones for about `seconds`, each as fast as it can."""
    models = [model.clone() for _ in range(clones)]
    taken: list[list[float]] = [[] for _ in models]
    rates: list[float] = []
    failed: list[BaseException] = []
    start_line = threading.Barrier(clones)

    def work(model: CompiledGraph, samples: list[float]) -> None:
        try:
            call = fastest(model)
            call(*arrays)
            start_line.wait()
            start = time.perf_counter()
            while len(samples) < MOST_SAMPLES and (now := time.perf_counter()) < start + seconds:
                call(*arrays)
                samples.append(time.perf_counter() - now)
            rates.append(len(samples) / (time.perf_counter() - start))
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that called
            failed.append(error)
            start_line.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, taken, strict=True)]
    begun: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
    except RuntimeError:  # the system has no more: those that wait for it must not
        start_line.abort()
        raise
    finally:
        for thread in begun:
            thread.join()
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    samples = [s for one in taken for s in one]
    p50, p90, p99 = (float(q) for q in np.quantile(samples, (0.5, 0.9, 0.99)))
    return Crowd(clones, sum(rates), p50, p90, p99, len(samples))


def thread_scaling(
    load: Callable[[int], CompiledGraph], arrays: Sequence[Array], counts: Sequence[int], seconds: float
) -> list[Scaling]:
    """Times one run at a time with each number of threads, in turns, so that all meet the same noise."""
    models = [load(n) for n in counts]
    taken: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds * len(models)
    while models and (len(taken[0]) < 3 or (time.perf_counter() < end and len(taken[0]) < MOST_SAMPLES)):
        for model, samples in zip(models, taken, strict=True):
            call = fastest(model)
            call(*arrays)  # after another model's: wakes its threads and fills the caches
            start = time.perf_counter()
            call(*arrays)
            samples.append(time.perf_counter() - start)
    found = []
    for n, samples in zip(counts, taken, strict=True):
        p50, p90, p99 = (float(q) for q in np.quantile(samples, (0.5, 0.9, 0.99)))
        found.append(Scaling(n, p50, p90, p99, float(np.median(taken[0])) / p50, len(samples)))
    return found


def rate_text(rate: float) -> str:
    """64760.3 -> 64,760."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def crowd_rows(found: Sequence[Crowd]) -> list[tuple[str, ...]]:
    """A table of clones, with its heading."""
    return [
        ("clones", "runs/s", "p50", "p90", "p99", "runs"),
        *(
            (str(c.clones), rate_text(c.runs_per_second), *map(seconds_text, (c.p50, c.p90, c.p99)), str(c.runs))
            for c in found
        ),
    ]


def scaling_rows(found: Sequence[Scaling]) -> list[tuple[str, ...]]:
    """A table of numbers of threads, with its heading."""
    return [
        ("threads", "speed-up", "p50", "p90", "p99", "runs"),
        *((str(s.threads), f"{s.speedup:.2f}", *map(seconds_text, (s.p50, s.p90, s.p99)), str(s.runs)) for s in found),
    ]
