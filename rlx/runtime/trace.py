"""RunTrace: the kernels of a run with their times, as a file that Chrome's tracing page and Perfetto show."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from rlx.backends.timing import KernelTime
from rlx.disk import saving
from rlx.records import dataclass

__all__ = ["RunTrace"]


@dataclass(frozen=True)
class RunTrace:
    """Kernels in the order of the program: (kind, name, seconds per run, over all rounds for a kernel in a loop).

    `rows` are those of `CompiledGraph.profile`, which know what each thread did.
    """

    model: str
    device: str
    rows: tuple[KernelTime, ...]

    @classmethod
    def of(cls, model: str, device: str, rows: Sequence[KernelTime]) -> RunTrace:
        """A trace of what `CompiledGraph.profile` gives."""
        return cls(model, device, tuple(rows))

    @property
    def seconds(self) -> float:
        """Seconds in kernels."""
        return sum(seconds for *_, seconds in self.rows)

    def spans(self) -> list[tuple[int, int, float, float]]:
        """(number of the kernel, thread, start, seconds), kernels end to end; thread 0 is the caller.

        What threads did is of one more run: where a kernel took longer there, it is scaled to the time of its row.
        """
        found, start = [], 0.0
        for number, row in enumerate(self.rows):
            end = max((span.start + span.seconds for span in row.threads), default=0.0)
            scale = min(1.0, row[2] / end) if end else 0.0
            for span in row.threads:
                found.append((number, span.thread, start + scale * span.start, scale * span.seconds))
            start += row[2]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The Chrome trace-event format, in microseconds: a track of all kernels end to end, and one per thread."""
        tracks = {0: "kernels"} | {t + 1: f"thread {t}{' (caller)' if not t else ''}" for _, t, *_ in self.spans()}
        events: list[dict[str, Any]] = [_named("process_name", 0, f"{self.model} on {self.device}")]
        events += [_named("thread_name", track, name) for track, name in sorted(tracks.items())]
        start = 0.0
        for number, row in enumerate(self.rows):
            events.append(self._event(number, 0, start, row[2]))
            start += row[2]
        events += [self._event(number, thread + 1, begin, took) for number, thread, begin, took in self.spans()]
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def _event(self, number: int, track: int, start: float, seconds: float) -> dict[str, Any]:
        kind, name, _ = row = self.rows[number]
        args: dict[str, Any] = {"kind": kind, "phase": number, "disturbed": row.disturbed}
        for span in row.threads:
            if span.thread + 1 == track:
                args["chunks"] = span.chunks
        times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
        return {"name": name, "cat": kind, "ph": "X", **times, "pid": 1, "tid": track, "args": args}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON; raises `OptionError` where it can't be written."""
        with saving(path, "trace") as file:
            file.write(json.dumps(self.to_dict()).encode())


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
