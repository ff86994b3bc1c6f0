"""Calibration: the ceilings of a device that is here, from timed runs of small graphs; a few seconds.

Everything is timed in turns, round after round until the time is up, and of each time the middle counts: what is
predicted is a usual run rather than the shortest. The processor may change its speed meanwhile: a turn of a probe
before and after each sample tells, and the sample counts as what it would have taken at the usual speed of the whole
calibration, to which predictions refer.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends import choose_backend
from rlx.backends.base import Backend, Executable, by_position, spec_of
from rlx.compiler import Compilation, compile_graph
from rlx.cost.ceilings import FUNCTIONS, Ceilings, Points, guess_of, nearest
from rlx.cost.lowered import lowered_from
from rlx.cost.model import NEAR, Prediction, predict_lowered
from rlx.cost.pace import Probe, median, probe, turn
from rlx.cost.suite import (
    dense,
    functions,
    heavy,
    links,
    recurrent,
    resident_product,
    resident_stream,
    stream,
    tiny,
    trials,
)
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph
from rlx.options import CompileOptions
from rlx.records import replace

__all__ = ["calibrate"]

log = logging.getLogger("rlx")

SECONDS = 8.0  # what a calibration may take
SLICE = 1.5e-3  # seconds for one sample
VISIT = 20e-3  # seconds of samples of whole runs in one round: other graphs ran before, and threads have to wake up
ROUNDS = 40  # at most
ROUNDS_SHARE = 0.4  # of the time, that stays for them when graphs are compiled
GRID = ((1, 4, 16, 64, 256), (16, 64, 256, 1024), (16, 64, 256, 1024))
SMALL_GRID = ((1, 32, 512), (32, 768), (32, 768))
REMOTE_GRID = ((1, 16, 128, 1024, 4096), (64, 512, 2048), (64, 512, 2048))
LARGE_GRID = ((64, 4096), (512, 4096), (512, 4096))
TYPED = (128, 512, 512)
Parts = tuple[float, float, float]
CALLS, KERNELS, STREAMED, BOTH = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.0)
FIXED = 2.0  # sum of squared changes below which the powers stay near 1
FAR = 30.0  # whole runs don't tell which kernel was wrong: no correction beyond this
LEAST_ERROR = 0.1
FUNCTION_OPS = ("exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "pow", "div", "sqrt")


class _Bench:
    """A compiled graph that can be timed."""

    def __init__(self, graph: Graph, backend: Backend, threads: int | None) -> None:
        start = time.perf_counter()
        own = threads if "threads" in backend.honours else None
        made: Compilation = compile_graph(graph, backend, CompileOptions(device=backend.name, threads=own))
        self.seconds = time.perf_counter() - start
        self.remote = not backend.unified
        self.made = made
        self.executable: Executable[Any] = made.executable
        self.executable.admit = list
        self.executable.wrap = lambda results: results
        self.inputs = tuple(spec_of(v) for v in graph.inputs)
        self.count = len(graph.outputs)
        params = {p.name: p.data for p in graph.params if p.data is not None}
        if params:
            self.executable.set_params(params)
        program = made.program
        self.places: list[list[int]] = []
        if program is not None:
            rows = self.executable.profiled
            self.places = [[i for i, k in enumerate(rows) if k is kernel] for kernel in program.run]

    def once(self, given: dict[str, Array]) -> None:
        """A run as `run` of a compiled graph makes it: inputs by name, fresh outputs."""
        arrays = by_position(self.inputs, given, "input")
        if self.executable.bound_inputs or self.executable.run_fresh(arrays) is None:
            self.executable.run(arrays, [None] * self.count, range(self.count))

    def kernels(self, arrays: Sequence[Array], repeat: int) -> list[float]:
        """Seconds of each kernel of the program, in order."""
        times = [s for *_, s in self.executable.profile(arrays, repeat)]
        return [sum(times[i] for i in rows) for rows in self.places]

    def predicted(self, ceilings: Ceilings, backend: Backend) -> Prediction:
        made = self.made
        lowered = lowered_from(made.source, made.legal, made.dispatch, backend, made.program)
        return predict_lowered(lowered, ceilings)


class _Job:
    """What is timed: whole runs of a graph on some arrays, or each of its kernels.

    `parts` are how far its time goes by calls of the host, by arithmetic and by memory.
    """

    def __init__(
        self, bench: _Bench, arrays: Sequence[Array], by_kernel: bool = False, parts: Parts | None = None
    ) -> None:
        self.bench, self.arrays, self.by_kernel = bench, list(arrays), by_kernel
        self.parts = parts or (KERNELS if by_kernel else BOTH)
        self.given = {spec.name: array for spec, array in zip(bench.inputs, arrays, strict=True)}
        self.calls = 1
        self.early: list[float] = []  # counts only where there was no time for a round
        self.taken: list[tuple[list[float], Probe, Probe]] = []
        self.usual: Probe | None = None
        self.flops = 0  # of its matrix products
        self.power = 1.0  # of the probe's arithmetic, by which its time goes

    def first(self) -> float:
        """Seconds of the first run, in which some devices compile; then finds how many calls fill a slice."""
        start = time.perf_counter()
        self.bench.once(self.given)
        seconds = time.perf_counter() - start
        self.calls = 2
        begun = time.perf_counter()
        self.early = self.time()
        # kernels of a device with memory of its own are a small part of what a run takes, which brings its inputs
        each = (time.perf_counter() - begun) / self.calls if self.bench.remote else sum(self.early)
        self.calls = min(1000, max(1, int(SLICE / max(each, 1e-7))))
        return seconds

    def time(self) -> list[float]:
        if self.by_kernel:
            return self.bench.kernels(self.arrays, self.calls)
        once, given = self.bench.once, self.given
        start = time.perf_counter()
        for _ in range(self.calls):
            once(given)
        return [(time.perf_counter() - start) / self.calls]

    def visit(self, before: Probe, on_processor: bool) -> Probe:
        """The samples of one round; the first of several only warms up. Takes and gives a turn of the probe.

        None between the samples of a device that is not the processor: threads that feed it would fall asleep.
        """
        end = time.perf_counter() + VISIT
        if not self.by_kernel:
            self.time()
        while True:
            sample = self.time()
            after = turn() if on_processor else before
            self.taken.append((sample, before, after))
            before = after
            if self.by_kernel or time.perf_counter() > end:
                return after

    def even(self) -> list[list[float]]:
        """The samples at the usual speed."""
        usual = self.usual
        if usual is None or not self.taken:
            return [row for row, *_ in self.taken] or [self.early]
        found = []
        for row, *around in self.taken:
            now = median(around)
            arithmetic = (usual.arithmetic / now.arithmetic) ** self.power
            ratios = (usual.calls / now.calls, arithmetic, usual.memory / now.memory)
            scale = math.prod(ratio**part for ratio, part in zip(ratios, self.parts, strict=True))
            found.append([seconds * scale for seconds in row])
        return found

    @property
    def raw(self) -> float:
        """Seconds of a run, at whatever speed."""
        return middle([sum(row) for row, *_ in self.taken] or [sum(self.early)])

    @property
    def kernels(self) -> list[float]:
        """Seconds of each kernel."""
        return [middle(column) for column in zip(*self.even(), strict=True)]

    @property
    def seconds(self) -> float:
        """Seconds of a run, or of all kernels."""
        return middle([sum(row) for row in self.even()])


def middle(samples: Sequence[float]) -> float:
    """The mean by logarithms of the middle half of samples: outliers don't count, and of two states both do."""
    ordered = np.sort(np.log(np.maximum(samples, 1e-9)))
    cut = len(ordered) // 4
    return float(np.exp(np.mean(ordered[cut : len(ordered) - cut])))


def take(jobs: Sequence[_Job], end: float, on_processor: bool) -> Probe:
    """Times all jobs in turns until the time is up or there have been enough rounds; the usual speed meanwhile."""
    now = probe()
    for job in itertools.chain.from_iterable(itertools.repeat(jobs, ROUNDS)):
        if time.perf_counter() > end:
            break
        now = job.visit(now, on_processor)
    speeds = [after for job in jobs for *_, after in job.taken] or [now]
    usual = median(speeds)
    for job in jobs:
        job.usual = usual if on_processor else None
    return usual


def follow(jobs: Sequence[_Job], usual: Probe) -> tuple[float, float]:
    """By which powers of the probe's arithmetic times go, those of kernels without products and of the fastest ones.

    Least squares of the changes of each job's samples; the turns before and after a sample are two readings of the same
    speed, so that their product has no part of their noise. Where the speed hardly changed, the powers remain 1.
    """
    levels = [job.raw for job in jobs]
    rates = [job.flops / level for job, level in zip(jobs, levels, strict=True)]
    parts = [rate / (max(rates) or 1.0) for rate in rates]
    squares, products = np.eye(2) * FIXED, np.full(2, FIXED)
    for job, level, part in zip(jobs, levels, parts, strict=True):
        shares = np.array([1 - part, part])
        for row, *around in job.taken:
            before, after = (math.log(p.arithmetic / usual.arithmetic) for p in around)
            change = min(max(math.log(sum(row) / level), -1.0), 1.0)
            if max(abs(before), abs(after)) < 1:
                squares += np.outer(shares, shares) * before * after
                products += shares * change * (before + after) / 2
    few, many = np.clip(np.linalg.solve(squares, products), 0.3, 1.3)
    for job, part in zip(jobs, parts, strict=True):
        job.power = float(few + (many - few) * part)
    return float(few), float(many)


def calibrate(device: str = "cpu", *, threads: int | None = None, seconds: float = SECONDS) -> Ceilings:
    """Measures the ceilings of a device that is here. Raises `DeviceUnavailable` for one that isn't."""
    backend = choose_backend(device)
    count = backend.threads_of(threads)
    log.info("calibrating %s, which takes some %g s; the result is kept", backend.name, seconds)
    end = time.perf_counter() + seconds
    start = guess_of(backend, count)
    measure: type[_Measurement]
    by_kernel = "profile" in _Bench(tiny(), backend, threads).executable.capabilities
    if by_kernel:
        measure = _Kernels if backend.unified else _RemoteKernels
    else:
        measure = _Runs if backend.unified else _Remote
    return measure(backend, threads, start, end).ceilings()


class _Measurement(ABC):
    """What all ways share: jobs that are timed together, then ceilings made of their times."""

    quick = False

    def __init__(self, backend: Backend, threads: int | None, start: Ceilings, end: float) -> None:
        self.backend, self.threads, self.end = backend, threads, end
        self.made = replace(start, unified=backend.unified, guessed=False, corrections={})
        self.rng = np.random.default_rng(0)
        self.jobs: list[_Job] = []
        self.usual: Probe | None = None  # what the probe took meanwhile, on a device that is the processor
        self.rest = ROUNDS_SHARE * (end - time.perf_counter())

    def ceilings(self) -> Ceilings:
        self.tiny = self.job(tiny(), [self.random(16)], parts=CALLS)
        compiled = self.tiny.bench.seconds + self.tiny.first()
        self.outputs = self.job(tiny(4), [self.random(16)], parts=CALLS)
        self.prepare()
        tried = self.prepare_trials()
        cores = self.backend.on_processor
        usual = take(self.jobs, self.end, cores)
        self.usual = usual if cores else None
        self.change(probe=(usual.calls, usual.arithmetic, usual.memory) if cores else ())
        run = self.tiny.seconds
        output = max((self.outputs.seconds - run) / 3, 1e-8)
        self.change(compile=compiled, run=run, output=output)
        self.rates()
        found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for job in tried:
            for kind, *point in self.trial(job):
                found[kind].append(tuple(point))
        corrections = {kind: tuple(sorted(points)) for kind, points in found.items()}
        self.change(corrections=corrections, error=left_out(corrections.values()))
        return self.made

    def change(self, **fields: Any) -> None:
        self.made = replace(self.made, **fields)

    def bench(self, graph: Graph) -> _Bench:
        return _Bench(graph, self.backend, self.threads)

    def job(
        self,
        graph: Graph | _Bench,
        arrays: Sequence[Array],
        by_kernel: bool = False,
        parts: Parts | None = None,
    ) -> _Job:
        """A job more, ready to be timed."""
        made = _Job(graph if isinstance(graph, _Bench) else self.bench(graph), arrays, by_kernel, parts)
        made.first()
        self.jobs.append(made)
        return made

    def random(self, *shape: int) -> Array:
        return self.rng.random(shape, np.float32) + np.float32(0.01)

    def prepare_trials(self) -> list[_Job]:
        """The graphs that correct the prediction of each kind of kernel; fewer where compiling takes the time."""
        made = []
        for graph, arrays in self.trials():
            made.append(self.job(graph, arrays, self.by_kernel))
            if self.end - time.perf_counter() < self.rest:
                break
        return made

    by_kernel = False

    def trials(self) -> Iterable[tuple[Graph, list[Array]]]:
        return trials(self.quick)

    @abstractmethod
    def prepare(self) -> None:
        """Adds the jobs that `rates` needs."""

    @abstractmethod
    def rates(self) -> None:
        """Sets bandwidth, products and so on by the times of those jobs."""

    @abstractmethod
    def trial(self, job: _Job) -> Iterator[tuple[Any, ...]]:
        """(kind, predicted seconds, sizes ..., measured over predicted) of what a trial tells apart."""


def left_out(corrections: Iterable[Points]) -> float:
    """The error of predictions: how far each point is from what the others of its kind say of it."""
    errors = [
        abs(math.log(point[-1] / nearest(tuple(p for p in points if p is not point), point[:-1])))
        for points in corrections
        if len(points) > 1
        for point in points
    ]
    return min(max(float(np.quantile(errors, 0.68)), LEAST_ERROR), 1.0) if errors else 0.5  # few outliers don't count


CALLED = (13, 15, 17, 19)
STREAMS = (10, 12, 14, 16, 18, 20, 22, 24)
COPIES = (12, 14, 16, 18, 20, 22)


class _Kernels(_Measurement):
    """For a device that times its kernels one by one."""

    by_kernel = True
    grid_sizes: tuple[tuple[int, ...], ...] = GRID

    def prepare(self) -> None:
        bench = self.bench(stream())
        self.streams = {}
        for n in (8, *(1 << i for i in STREAMS)):
            self.streams[n] = self.job(bench, [self.random(n)] * 2, True, STREAMED if 12 * n > NEAR else None)
        self.copied = {}
        for n in (1 << i for i in COPIES):
            self.copied[n] = self.job(bench, [self.random(n)] * 2, False, STREAMED if 12 * n > NEAR else None)
        bench = self.bench(functions(FUNCTION_OPS))
        self.called = {n: self.job(bench, [self.random(n), self.random(n)], True) for n in (1 << i for i in CALLED)}
        ms, ks, ns = self.grid_sizes
        self.grid = {}
        for k, n in itertools.product(ks, ns):
            bench = self.bench(dense(self.random(k, n)))
            for m in ms:
                self.grid[m, k, n] = self.job(bench, [self.random(m, k)], True)
                self.grid[m, k, n].flops = 2 * m * k * n
        self.typed = {}
        m, k, n = TYPED
        for name in ("f32", "f64", "f16", "bf16"):
            dtype = DTYPES[name].numpy
            bench = self.bench(dense(self.random(k, n).astype(dtype)))
            self.typed[name] = self.job(bench, [self.random(m, k).astype(dtype)], True)

    def rates(self) -> None:
        if self.usual is not None:
            near = [job for n, job in self.streams.items() if 12 * n <= NEAR]
            self.change(follows=follow([*near, *self.called.values(), *self.grid.values()], self.usual))
        launch = self.streams.pop(8).seconds
        curve = self.curve(launch)
        vector = self.vector(curve)
        self.change(bandwidth=tuple(sorted(curve.items())), vector=vector, launch=launch, step=launch)
        copies = {}
        for n, job in self.copied.items():
            alone = job.seconds - self.streams[n].seconds - self.made.run
            copies[4.0 * n] = 4 * n / max(alone, job.seconds / 10)
        self.change(copies=tuple(sorted(copies.items())))
        self.functions()
        points = [
            (float(m), float(k), float(n), 2.0 * m * k * n / max(job.seconds - launch, job.seconds / 4))
            for (m, k, n), job in self.grid.items()
        ]
        self.change(products=tuple(points), flops=max(p[3] for p in points))
        times = {name: job.seconds for name, job in self.typed.items()}
        self.change(dtypes={name: times["f32"] / seconds for name, seconds in times.items() if name != "f32"})

    def curve(self, launch: float) -> dict[float, float]:
        """Bytes a second by the bytes that a kernel moves."""
        return {12.0 * n: 12 * n / job.seconds for n, job in self.streams.items()}

    def vector(self, curve: Mapping[float, float]) -> float:
        """Sums a second, of vectors that stay near."""
        return curve[12.0 * 1024] / 12

    def functions(self) -> None:
        (elements, first), *larger = self.called.items()
        found = self.function_costs(elements, first)
        worth = sum(found.values()) / len(found)  # sums, of an element of a usual kernel
        gains = [(elements * worth, 1.0)]
        for n, job in larger:
            gains.append((n * worth, max(1.0, first.seconds / elements * n / job.seconds)))
        self.change(gains=tuple(gains))

    def function_costs(self, elements: int, job: _Job) -> dict[str, float]:
        """What functions of so many elements take, in sums; the ceilings then have it."""
        program = job.bench.made.program
        assert program is not None
        made = {b: seconds for k, seconds in zip(program.run, job.kernels, strict=True) for b in k.writes()}
        sums = self.made.vector / elements
        found = {
            name: max(0.3, (made[buffer] - self.made.launch) * sums - 1)  # without load and store
            for name, (_, buffer) in zip(FUNCTION_OPS, program.outputs, strict=True)
        }
        self.change(functions={**FUNCTIONS, **found})
        return found

    def trial(self, job: _Job) -> Iterator[tuple[Any, ...]]:
        launch, costs = self.made.launch, job.bench.predicted(self.made, self.backend).kernels
        job.power = self.made.power(sum(k.flops for k in costs if k.sizes) / job.raw)
        for cost, seconds in zip(costs, job.kernels, strict=True):
            if cost.plain > 0:
                yield cost.kind, cost.plain, *cost.sizes, max(seconds - launch, seconds / 4) / cost.plain


class _RemoteKernels(_Kernels):
    """For one that has memory of its own too: larger sizes, and the rate at which inputs are brought there.

    Elements are computed side by side: small kernels take little but the launch, so rates are those of large ones.
    """

    quick = True
    grid_sizes = REMOTE_GRID

    def curve(self, launch: float) -> dict[float, float]:
        return {12.0 * n: 12 * n / max(job.seconds - launch, job.seconds / 4) for n, job in self.streams.items()}

    def vector(self, curve: Mapping[float, float]) -> float:
        return max(curve.values()) / 12

    def functions(self) -> None:
        found = self.function_costs(*max(self.called.items(), key=lambda pair: pair[0]))
        scale = sum(found.values()) / sum(FUNCTIONS[name] for name in found)
        others = {name: max(cost * scale, 0.3) for name, cost in FUNCTIONS.items() if cost > FUNCTIONS["scattered"]}
        self.change(functions={**FUNCTIONS, **others, **found})

    def rates(self) -> None:
        super().rates()
        self.change(compile=max(self.made.compile, self.backend.rates.compile))  # its code may have been in the cache
        n, job = max(self.copied.items(), key=lambda pair: pair[0])
        alone = job.seconds - self.streams[n].seconds - self.made.run
        self.change(transfer=8 * n / max(alone, job.seconds / 10))


LINKS, HEAVY = 16, 12


class _Runs(_Measurement):
    """For a device that is timed by whole runs."""

    quick = True

    def prepare(self) -> None:
        bench = self.bench(stream())
        self.streams = {n: self.job(bench, [self.random(n)] * 2) for n in (1 << i for i in (17, 20, 22))}
        self.links = self.job(links(LINKS), [self.random(16, 16) * 0])
        self.heavy = self.job(heavy(HEAVY), [self.random(1 << 17)])
        self.grid = {}
        for k, n in itertools.product(*SMALL_GRID[1:]):
            bench = self.bench(dense(self.random(k, n)))
            for m in SMALL_GRID[0]:
                self.grid[m, k, n] = self.job(bench, [self.random(m, k)])
        self.steps = {n: self.job(*recurrent(n)) for n in (8, 72)}

    def rates(self) -> None:
        run = self.made.run
        curve = {12.0 * n: 16 * n / max(job.seconds - run, run / 4) for n, job in self.streams.items()}
        launch = max((self.links.seconds - run) / (LINKS - 1), 1e-7)
        self.change(run=max(run - launch, run / 2))  # the smallest graph has a kernel too
        self.change(bandwidth=tuple(sorted(curve.items())), vector=curve[12.0 * (1 << 17)] / 12, launch=launch)
        sums = (self.heavy.seconds - self.streams[1 << 17].seconds) / (1 << 17) / HEAVY * self.made.vector
        scale = max(sums / FUNCTIONS["tanh"], 0.01)
        self.change(functions={name: max(cost * scale, 0.3) for name, cost in FUNCTIONS.items() if cost >= 4})
        self.change(dtypes={"f64": 0.5})  # half as many in a vector; shorter floats are taken to be computed in f32
        self.products(10)
        self.loop()

    def products(self, part: float) -> None:
        """Rates of products; what the run leaves of a time is at least 1 / part of the run."""
        run = self.made.run
        points = [
            (float(m), float(k), float(n), 2.0 * m * k * n / max(job.seconds - run, run / part))
            for (m, k, n), job in self.grid.items()
        ]
        self.change(products=tuple(points), flops=max(p[3] for p in points))

    def loop(self) -> None:
        """What a step of a loop takes besides its arithmetic: the difference between many and few."""
        (few, short), (many, long) = sorted(self.steps.items())
        step = max((long.seconds - short.seconds) / (many - few), 1e-7)
        self.change(step=step, host=max(short.seconds - few * step - self.made.run, 1e-6))

    def trial(self, job: _Job) -> Iterator[tuple[Any, ...]]:
        prediction = job.bench.predicted(self.made, self.backend)
        seconds = job.seconds - prediction.overhead - prediction.transfers
        total = sum(k.seconds for k in prediction.kernels)
        ratio = min(max(seconds / total, 1 / FAR), FAR)
        largest = max(prediction.kernels, key=lambda k: k.seconds)
        yield largest.kind, largest.plain, *largest.sizes, ratio


class _Remote(_Runs):
    """For a device with memory of its own: what is timed lies in it, so that its rates have no part of the copies.

    Nothing is learned from trials: copies and the run itself differ by more than their kernels take.
    """

    def prepare(self) -> None:
        n = 1 << 22
        self.copied = self.job(stream(), [self.random(n), self.random(n)])
        self.streams = {}
        for n in (1 << 20, 1 << 25):
            self.streams[n] = self.job(resident_stream(self.random(n), self.random(n)), [])
        self.grid = {
            (m, k, n): self.job(resident_product(self.random(m, k), self.random(k, n)), [])
            for m, k, n in itertools.product(*LARGE_GRID)
        }
        self.steps = {n: self.job(*recurrent(n)) for n in (8, 72)}

    def rates(self) -> None:
        run = self.made.run
        self.change(transfer=8 * (1 << 22) / max(self.copied.seconds - run, run / 10))
        curve = {8.0 * n: 8 * n / max(job.seconds - run, run / 20) for n, job in self.streams.items()}
        self.change(bandwidth=tuple(sorted(curve.items())), vector=max(curve.values()) / 8)
        self.products(20)
        self.loop()

    def trials(self) -> Iterable[tuple[Graph, list[Array]]]:
        return ()
