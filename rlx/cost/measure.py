"""Calibration: the ceilings of a device that is here, from timed runs of small graphs; a few seconds.

A time is taken again until its best samples agree, within what is left of the time; one of the shortest counts, since
what disturbs a run only ever makes it longer.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.backends import choose_backend
from rlx.backends.base import Backend, Executable
from rlx.compiler import Compilation, compile_graph
from rlx.cost.ceilings import FUNCTIONS, Ceilings, Curve, guess
from rlx.cost.lowered import lowered_from
from rlx.cost.model import Prediction, predict_lowered
from rlx.cost.suite import functions, products, recurrent, resident_product, resident_stream, stream, tiny, trials
from rlx.ir.graph import Array, Graph
from rlx.options import CompileOptions

__all__ = ["calibrate", "curve_of", "sample"]

log = logging.getLogger("rlx")

SECONDS = 8.0  # what a calibration may take
GRID = ((1, 4, 16, 64, 256), (16, 64, 256, 1024), (16, 64, 256, 1024))
SMALL_GRID = ((1, 32, 512), (64, 768), (64, 768))
FAR = 5.0  # whole runs don't tell which kernel was wrong: no correction beyond this
LARGE_GRID = ((64, 4096), (512, 4096), (512, 4096))
FUNCTION_OPS = ("exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "pow", "div", "sqrt")


def sample(call: Callable[[], float], seconds: float, least: int = 6) -> float:
    """A time: of many samples one of the shortest. Taken until the three best agree within 3 %, or the time is up."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < end:
        taken.append(call())
        best = sorted(taken)
        if len(taken) >= least and best[2] <= 1.03 * best[0]:
            break
    return sorted(taken)[len(taken) // 6]


class _Bench:
    """A compiled graph that can be timed."""

    def __init__(self, graph: Graph, backend: Backend, threads: int | None) -> None:
        start = time.perf_counter()
        made: Compilation = compile_graph(graph, backend, CompileOptions(device=backend.name, threads=threads))
        self.seconds = time.perf_counter() - start
        self.made = made
        self.executable: Executable = made.executable
        self.executable.admit = list
        self.executable.wrap = lambda results: results
        self.count = len(graph.outputs)
        params = {p.name: p.data for p in graph.params if p.data is not None}
        if params:
            self.executable.set_params(params)

    def first(self, arrays: Sequence[Array]) -> float:
        """Seconds of a run at extents that are new."""
        start = time.perf_counter()
        self.once(arrays)
        return time.perf_counter() - start

    def once(self, arrays: Sequence[Array]) -> None:
        """A run as `run` of a compiled graph makes it."""
        if self.executable.run_fresh(arrays) is None:
            self.executable.run(arrays, [None] * self.count, range(self.count))

    def run(self, arrays: Sequence[Array], seconds: float) -> float:
        """Seconds of a run."""
        self.first(arrays)
        calls = max(1, int(1e-4 / max(self.first(arrays), 1e-7)))

        def timed() -> float:
            start = time.perf_counter()
            for _ in range(calls):
                self.once(arrays)
            return (time.perf_counter() - start) / calls

        return sample(timed, seconds)

    def kernels(self, arrays: Sequence[Array], seconds: float) -> list[float]:
        """Seconds of each kernel of the program, in order."""
        program = self.made.program
        assert program is not None
        places = {kernel: [i for i, k in enumerate(self.executable.profiled) if k is kernel] for kernel in program.run}
        rows = self.executable.profile(arrays, 1)
        repeat = max(1, int(2e-4 / max(sum(s for *_, s in rows), 1e-7)))
        taken: list[list[float]] = []

        def once() -> float:
            times = [s for *_, s in self.executable.profile(arrays, repeat)]
            taken.append([sum(times[i] for i in places[kernel]) for kernel in program.run])
            return sum(taken[-1])

        sample(once, seconds)
        return [float(t) for t in np.quantile(np.array(taken), 1 / 6, axis=0)]

    def predicted(self, ceilings: Ceilings, backend: Backend) -> Prediction:
        made = self.made
        lowered = lowered_from(made.source, made.legal, made.dispatch, backend, made.program)
        return predict_lowered(lowered, ceilings)


def calibrate(device: str = "cpu", *, threads: int | None = None, seconds: float = SECONDS) -> Ceilings:
    """Measures the ceilings of a device that is here. Raises `DeviceUnavailable` for one that isn't."""
    backend = choose_backend(device)
    count = threads or backend.threads
    log.info("calibrating %s, which takes some %g s; the result is kept", backend.name, seconds)
    end = time.perf_counter() + seconds
    start = guess(backend.name, threads=count)
    by_kernel = "profile" in _Bench(tiny(), backend, threads).executable.capabilities
    measure = _Kernels if by_kernel else _Runs if backend.unified else _Remote
    return measure(backend, threads, start, end).ceilings()


def curve_of(points: Sequence[tuple[float, float]], parts: int = 4) -> Curve:
    """Points (seconds, ratio) as a curve of at most so many: the median of each part."""
    ordered = sorted(points)
    bins = np.array_split(np.arange(len(ordered)), min(parts, len(ordered)))
    curve: dict[float, float] = {}
    for part in bins:
        seconds, ratios = zip(*(ordered[i] for i in part), strict=True)
        curve[float(np.median(seconds))] = float(np.median(ratios))
    return tuple(sorted(curve.items()))


class _Measurement(ABC):
    """What both ways share: the run itself, and corrections from trials."""

    quick = False
    share = 0.02  # of the time, for one measurement

    def __init__(self, backend: Backend, threads: int | None, start: Ceilings, end: float) -> None:
        self.backend, self.threads, self.end = backend, threads, end
        self.made = replace(start, unified=backend.unified)
        self.rng = np.random.default_rng(0)
        self.budget = (end - time.perf_counter()) * self.share

    def ceilings(self) -> Ceilings:
        self.change(guessed=False, corrections={}, **self.run_and_compile())
        self.rates()
        errors: list[float] = []
        corrections: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for graph, arrays in self.trials():
            if time.perf_counter() > self.end and corrections:
                break
            for kind, seconds, ratio in self.trial(graph, arrays):
                corrections[kind].append((seconds, ratio))
        self.change(corrections={kind: curve_of(points) for kind, points in corrections.items()})
        for kind, points in corrections.items():
            errors += [math.log(r / self.made.correction(kind, s)) for s, r in points]
        spread = float(np.quantile(np.abs(errors), 0.68)) if errors else 0.3  # a few outliers don't count
        self.change(error=min(max(1.2 * spread, 0.08), 1.0))
        return self.made

    def change(self, **fields: Any) -> None:
        self.made = replace(self.made, **fields)

    def bench(self, graph: Graph) -> _Bench:
        return _Bench(graph, self.backend, self.threads)

    def random(self, *shape: int) -> Array:
        return self.rng.random(shape, np.float32) + np.float32(0.01)

    def run_and_compile(self) -> Mapping[str, float]:
        bench = self.bench(tiny())
        x = [self.random(16)]
        first = bench.first(x)
        return {"run": bench.run(x, 2 * self.budget), "compile": bench.seconds + first}

    @abstractmethod
    def rates(self) -> None:
        """Measures bandwidth and products."""

    def trials(self) -> Iterable[tuple[Graph, list[Array]]]:
        """The graphs that correct the prediction of each kind of kernel, with their inputs."""
        return trials(self.quick)

    @abstractmethod
    def trial(self, graph: Graph, arrays: Sequence[Array]) -> list[tuple[str, float, float]]:
        """Times a graph: (kind, predicted seconds, measured over predicted) of what it can tell apart."""


class _Kernels(_Measurement):
    """For a device that times its kernels one by one."""

    share = 0.015

    def rates(self) -> None:
        bench = self.bench(stream())
        curve = {}
        for log2 in (10, 13, 16, 18, 20, 22, 24):
            n = 1 << log2
            arrays = [self.random(n), self.random(n)]
            curve[12.0 * n] = 12 * n / sum(bench.kernels(arrays, self.budget))
        small = [self.random(8), self.random(8)]
        launch = sum(bench.kernels(small, self.budget))
        vector = curve[12.0 * 1024] / 12
        self.change(bandwidth=tuple(sorted(curve.items())), vector=vector, launch=launch, step=launch)
        self.functions(vector)
        self.products()

    def functions(self, vector: float) -> None:
        names = FUNCTION_OPS
        n = 1 << 13
        bench = self.bench(functions(names))
        times = bench.kernels([self.random(n), self.random(n)], 2 * self.budget)
        program = bench.made.program
        assert program is not None
        made = {buffer: seconds for k, seconds in zip(program.run, times, strict=True) for buffer in k.writes()}
        found = {
            name: max(0.3, (made[buffer] - self.made.launch) * vector / n - 1)  # without load and store
            for name, (_, buffer) in zip(names, program.outputs, strict=True)
        }
        self.change(functions={**FUNCTIONS, **found})

    def products(self) -> None:
        bench = self.bench(products())
        points = []
        for m, k, n in itertools.product(*GRID):
            seconds = bench.kernels([self.random(m, k), self.random(k, n)], self.budget / 2)[-1]  # after packing
            points.append(
                (float(m), float(k), float(n), 2.0 * m * k * n / max(seconds - self.made.launch, seconds / 4))
            )
        self.change(products=tuple(points), flops=max(p[3] for p in points))

    def trial(self, graph: Graph, arrays: Sequence[Array]) -> list[tuple[str, float, float]]:
        bench = self.bench(graph)
        times = bench.kernels(arrays, self.budget)
        found = []
        for cost, seconds in zip(bench.predicted(self.made, self.backend).kernels, times, strict=True):
            own, guessed = max(seconds - self.made.launch, seconds / 4), cost.seconds - self.made.launch
            if guessed > 0:
                found.append((cost.kind, guessed, own / guessed))
        return found


class _Runs(_Measurement):
    """For a device that is timed by whole runs."""

    quick = True
    share = 0.015

    def rates(self) -> None:
        run = self.made.run
        curve = {}
        bench = self.bench(stream())
        for log2 in (14, 20, 23):
            n = 1 << log2
            seconds = bench.run([self.random(n), self.random(n)], self.budget) - run
            curve[12.0 * n] = 16 * n / max(seconds, run / 4)
        self.change(bandwidth=tuple(sorted(curve.items())), vector=curve[12.0 * (1 << 20)] / 6)
        bench = self.bench(products())
        points = []
        for m, k, n in itertools.product(*SMALL_GRID):
            seconds = bench.run([self.random(m, k), self.random(k, n)], self.budget) - run
            points.append((float(m), float(k), float(n), 2.0 * m * k * n / max(seconds, run / 10)))
        self.change(products=tuple(points), flops=max(p[3] for p in points))
        self.loop()

    def loop(self) -> None:
        """What a step of a loop takes besides its arithmetic: the difference between many and few."""
        few, many = 8, 72
        times = []
        for steps in (few, many):
            graph, arrays = recurrent(steps)
            times.append(self.bench(graph).run(arrays, self.budget))
        self.change(step=max((times[1] - times[0]) / (many - few), self.made.launch))

    def trial(self, graph: Graph, arrays: Sequence[Array]) -> list[tuple[str, float, float]]:
        bench = self.bench(graph)
        prediction = bench.predicted(self.made, self.backend)
        seconds = bench.run(arrays, self.budget) - prediction.overhead - prediction.transfers
        total = sum(k.seconds for k in prediction.kernels)
        ratio = min(max(seconds / total, 1 / FAR), FAR)
        largest = max(prediction.kernels, key=lambda k: k.seconds)
        return [(largest.kind, largest.seconds, ratio)]


class _Remote(_Runs):
    """For a device with memory of its own: what is timed lies in it, so that its rates have no part of the copies.

    Nothing is learned from trials: copies and the run itself differ by more than their kernels take.
    """

    def rates(self) -> None:
        run = self.made.run
        n = 1 << 22
        seconds = self.bench(stream()).run([self.random(n), self.random(n)], self.budget) - run
        self.change(transfer=12 * n / max(seconds, run / 10))
        curve = {}
        for log2 in (20, 25):
            n = 1 << log2
            seconds = self.bench(resident_stream(self.random(n), self.random(n))).run([], self.budget) - run
            curve[8.0 * n] = 8 * n / max(seconds, run / 20)
        self.change(bandwidth=tuple(sorted(curve.items())), vector=max(curve.values()) / 8)
        points = []
        for m, k, n in itertools.product(*LARGE_GRID):
            seconds = self.bench(resident_product(self.random(m, k), self.random(k, n))).run([], self.budget) - run
            points.append((float(m), float(k), float(n), 2.0 * m * k * n / max(seconds, run / 20)))
        self.change(products=tuple(points), flops=max(p[3] for p in points))
        self.loop()

    def trials(self) -> Iterable[tuple[Graph, list[Array]]]:
        return ()
