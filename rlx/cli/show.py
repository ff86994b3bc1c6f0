"""What commands print: sizes, times, tables, JSON, and progress on a terminal."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click
import numpy as np

from rlx.cli.schema import VERSION
from rlx.progress import Watcher
from rlx.records import dataclass
from rlx.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph
    from rlx.runtime.memory import ModelMemory

__all__ = [
    "Timing",
    "disturbed_lines",
    "fastest",
    "loading",
    "measure",
    "measured_text",
    "on_terminal",
    "print_json",
    "progress",
    "residual_lines",
    "table",
    "visible",
    "working",
]

BAR_AFTER = 1.0  # seconds that a load takes before its bar is shown


def residual_lines(memory: ModelMemory | None) -> list[str]:
    """What the model was predicted to take and took, as far as both are known."""
    if memory is None or memory.residual is None:
        return []
    off = f"{bytes_text(abs(memory.residual))} {'less' if memory.residual >= 0 else 'more'} than predicted"
    took = "at its peak" if memory.is_peak else "at the end"
    predicted, measured = bytes_text(memory.predicted_bytes), bytes_text(memory.measured)
    return [f"resident  predicted to grow by {predicted}, grew by {measured} {took}: {off}"]


def measured_text(seconds: float | None, disturbed: bool) -> str:
    """A measured time, with a mark where other programs disturbed it; "" for none."""
    return "" if seconds is None else f"{'? ' if disturbed else ''}{seconds_text(seconds)}"


def disturbed_lines(disturbed: Sequence[bool]) -> list[str]:
    """What the mark means, if some kernels have it."""
    if not any(disturbed):
        return []
    said = "other programs had the processor, their times may be too long"
    return [f"disturbed {sum(disturbed)} of {len(disturbed)} kernels (marked ?): {said}"]


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as columns; the first row is the heading. Columns in `right` are set flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object of `rlx.cli.schema` on stdout, with the version of that."""
    click.echo(json.dumps({"schema": VERSION, **_finite(value)}, indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with texts for numbers that JSON lacks: "nan", "inf", "-inf"."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a closed one is None."""
    return stream is not None and stream.isatty()


def visible(text: str) -> str:
    """A model's text for stdout: a terminal gets no control characters, which could do anything to it."""
    if not on_terminal(sys.stdout):
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


@contextmanager
def working(what: str, *, still: bool = False) -> Iterator[None]:
    """Shows what is going on while the block runs, if stderr is a terminal; `still`: without a thread of its own."""
    if not on_terminal(sys.stderr):
        yield
        return
    if still:
        click.echo(f"{what} ...", nl=False, err=True)
        try:
            yield
        finally:
            click.echo("\r\x1b[2K", nl=False, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def loading(what: str) -> Iterator[Watcher | None]:
    """A bar with the percentage of what goes on, as a load, once it has taken a second, if stderr is a terminal.

    Gives the function for `progress=`.
    """
    if not on_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=1.0)
    shown = threading.Timer(BAR_AFTER, bar.start)
    shown.daemon = True
    shown.start()
    try:
        yield lambda event: bar.update(task, completed=event.fraction, description=f"{what}: {event.stage}")
    finally:
        shown.cancel()
        shown.join()
        if bar.live.is_started:
            bar.stop()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar if stderr is a terminal; gives a function that takes how many steps are done."""
    if not on_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@dataclass(frozen=True)
class Timing:
    """Seconds a call: percentiles over samples of `calls` calls each."""

    median: float
    p10: float
    p90: float
    p99: float
    min: float
    samples: int
    calls: int


def fastest(model: CompiledGraph) -> Callable[..., object]:
    """The call that runs with arrays by position: `run_slots`, or `run` where the device has no slots."""
    return model.run_slots if "slots" in model.capabilities else lambda *arrays: model.run(arrays)


def measure(call: Callable[[], object], seconds: float = 1.0) -> Timing:
    """Times a call for about `seconds` after a warm-up; calls too short to time are timed many at once."""
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    for _ in range(min(20, int(seconds / 10 / once))):
        call()
    calls = max(1, int(2e-4 / once))
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 100_000):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) / calls)
    p10, median, p90, p99 = (float(q) for q in np.quantile(taken, (0.1, 0.5, 0.9, 0.99)))
    return Timing(median, p10, p90, p99, min(taken), len(taken), calls)
