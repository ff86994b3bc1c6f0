"""How far a long call is: its stages report it, and the function that was given as `progress=` is told."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from rlx.errors import OptionError
from rlx.records import dataclass

__all__ = ["STAGES", "Progress", "Watcher", "report", "reported", "reporting", "seldom_collected"]

F = TypeVar("F", bound=Callable[..., Any])

# the stages of a load or compile, in order: about what share of the whole each takes
STAGES = {"read": 0.1, "passes": 0.15, "plan": 0.15, "code": 0.45, "pack": 0.15}
LEAST = 0.005  # by how much the fraction grows between two events of a stage


@dataclass(frozen=True)
class Progress:
    """What the function given as `progress=` is called with.

    `stage` is what is going on, and `item` what of it, where that has a name. At the end `stage` is once "done".

    A load or compile: "read" (the file), "passes" (rewriting the graph), "plan" (kernels and their order), "code"
    (machine code), "pack" (weights, where the result is kept on disk). What was compiled before comes from the disk,
    without the stages between. `rlx.quantize`: "inputs" (where they are given: `item` is
    the set), "weights" (`item`: a tensor), "outputs" (of both models, compared). `perplexity`: "tokens".

    `fraction` is about how much of the whole is done, from 0 to 1: it never falls, and is 1 for "done" only. `seconds`
    have passed since the call.
    """

    stage: str
    fraction: float
    seconds: float
    item: str = ""

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction:.0%}"


Watcher = Callable[[Progress], object]


class _Reporter:
    """One call that is watched."""

    def __init__(self, watcher: Watcher, stages: Mapping[str, float]) -> None:
        self.watcher = watcher
        self.stages = dict(stages)
        self.order = {stage: number for number, stage in enumerate(stages)}
        self.begun = time.perf_counter()
        self.error: BaseException | None = None  # that it raised
        self.number, self.fraction = -1, 0.0

    def __call__(self, stage: str, part: float, item: str = "") -> None:
        number = self.order.get(stage)
        if number is None:  # of a load within a call that has other stages
            return
        before = sum(list(self.stages.values())[:number])
        fraction = max(self.fraction, before + self.stages[stage] * min(part, 0.99))
        if number > self.number or (number == self.number and fraction >= self.fraction + LEAST):
            self.number = number
            self.tell(stage, fraction, item)

    def tell(self, stage: str, fraction: float, item: str = "") -> None:
        self.fraction = fraction
        try:
            self.watcher(Progress(stage, fraction, time.perf_counter() - self.begun, item))
        except BaseException as error:
            self.error = error
            raise


_reporter: ContextVar[_Reporter | None] = ContextVar("rlx_progress", default=None)


@contextmanager
def reporting(watcher: Watcher | None, stages: Mapping[str, float] = STAGES) -> Iterator[None]:
    """Within the block `watcher` is told what this thread reports; None leaves it as it is around.

    `stages` are those that are told, in order, with about the share of the whole that each takes; their sum is 1. What
    the function raises ends the call.
    """
    if watcher is None:
        yield
        return
    if not callable(watcher):
        raise OptionError(f"progress={watcher!r:.80}: expected a function that is called with rlx.progress.Progress")
    reporter = _Reporter(watcher, stages)
    token = _reporter.set(reporter)
    try:
        reporter(next(iter(stages)), 0.0)
        yield
    finally:
        _reporter.reset(token)
    if reporter.error is not None:  # something took it for an error of its own, as of a disk
        raise reporter.error
    reporter.tell("done", 1.0)


class SeldomCollected:
    """Blocks in which Python's garbage collector runs after more new objects: it took 5 to 10 % of a compile.

    For the whole process, until the last thread has left its block. What others set meanwhile stays, and a collector
    that is off stays off.
    """

    def __init__(self, objects: int = 20_000) -> None:
        self.objects = objects  # at least, between two collections; 700 is usual
        self.lock = threading.Lock()
        self.inside = 0  # blocks that threads are in
        self.before = self.during = gc.get_threshold()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                first, *others = self.before = gc.get_threshold()
                self.during = (max(first, self.objects) if first else first, others[0], others[1])
                gc.set_threshold(*self.during)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and gc.get_threshold() == self.during:
                gc.set_threshold(*self.before)


seldom_collected = SeldomCollected()


def report(stage: str, part: float = 0.0, item: str = "") -> None:
    """That `part` (0 to 1) of a stage is done, and `item` is next. A stage that comes again is not told."""
    reporter = _reporter.get()
    if reporter is not None:
        reporter(stage, part, item)


def reported(function: F) -> F:
    """Decorator of long calls: the function that one is given as `progress` is told what it reports."""

    @wraps(function)
    def inside(*args: Any, progress: Watcher | None = None, **named: Any) -> Any:
        with seldom_collected, reporting(progress):
            return function(*args, **named)

    return inside  # type: ignore[return-value]
