"""RunTrace: the kernels of a run with their times, as a file that Chrome's tracing page and Perfetto show."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from rlx.disk import saving
from rlx.records import dataclass

__all__ = ["RunTrace"]


@dataclass(frozen=True)
class RunTrace:
    """Kernels in the order of the program: (kind, name, seconds a run, over all rounds for a kernel in a loop)."""

    model: str
    device: str
    rows: tuple[tuple[str, str, float], ...]

    @classmethod
    def of(cls, model: str, device: str, rows: Sequence[tuple[str, str, float]]) -> RunTrace:
        """A trace of what `CompiledGraph.profile` gives."""
        return cls(model, device, tuple(rows))

    @property
    def seconds(self) -> float:
        """Seconds in kernels."""
        return sum(seconds for *_, seconds in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The Chrome trace-event format: complete events ("X") end to end, in microseconds."""
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": f"{self.model} on {self.device}"}}
        ]
        start = 0.0
        for number, (kind, name, seconds) in enumerate(self.rows):
            took = seconds * 1e6
            events.append(
                {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": took, "pid": 1, "tid": 1}
                | {"args": {"kind": kind, "phase": number}}
            )
            start += took
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON; raises `OptionError` where it can't be written."""
        with saving(path, "trace") as file:
            file.write(json.dumps(self.to_dict()).encode())
