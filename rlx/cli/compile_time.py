"""`rlx explain --compile-time`: what a first compile spends its time on."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlx.cli.run import load_model
from rlx.cli.show import table
from rlx.code_times import CodeTimes, noted
from rlx.progress import Progress
from rlx.units import seconds_text

__all__ = ["compile_time", "compile_time_text"]

WHAT = {
    "start": "the process, and imports until here",
    "read": "the model file",
    "passes": "rewriting of the graph",
    "plan": "kernels, their layouts and order",
    "code": "text of the kernels, and LLVM beside that",
    "pack": "what is kept on disk for the next load",
}
SHOWN = 20  # kernels and modules of a table


def compile_time(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Loads a model with an empty cache, which is then deleted, and says where the time went, as JSON values."""
    stages = {"start": since_start()}
    last: list[Progress] = []

    def told(now: Progress) -> None:
        if last:
            stages[last[-1].stage] = stages.get(last[-1].stage, 0.0) + now.seconds - last[-1].seconds
        last.append(now)

    with tempfile.TemporaryDirectory() as folder, noted() as times:
        model = load_model(path, {**options, "cache_dir": folder}, watcher=told)
    how = {name: kernel.how for kernel in times.emitted for name in kernel.functions}
    return {
        "device": model.device,
        "stages": stages,
        "kernels": len(times.emitted) + times.alike,
        "alike": times.alike,
        "emitted": [vars_of(kernel) for kernel in sorted(times.emitted, key=lambda k: -k.seconds)],
        "modules": [
            {**vars_of(module), "kinds": sorted({how.get(name, name) for name in module.functions})}
            for module in sorted(times.modules, key=lambda m: -sum(m.seconds.values()))
        ],
        "came": sorted(times.came),
        "text": compile_time_text(stages, times, how),
    }


def compile_time_text(stages: dict[str, float], times: CodeTimes, how: dict[str, str]) -> str:
    """The same as tables."""
    parts = [table([("stage", "time", "what"), *((n, seconds_text(s), WHAT.get(n, "")) for n, s in stages.items())])]
    steps: Counter[str] = Counter()
    for module in times.modules:
        steps.update(module.seconds)
    emitting = sum(kernel.seconds for kernel in times.emitted)
    parts.append(
        f"{len(times.emitted) + times.alike} kernels: the text of {len(times.emitted)} was made, in "
        f"{seconds_text(emitting)}; {times.alike} are like one of them. "
        f"{len(times.came)} functions came with rlx, {len(times.kept)} were on disk; LLVM compiled "
        f"{sum(len(m.functions) for m in times.modules)} in {len(times.modules)} modules"
        + "".join(f", {step} {seconds_text(s)}" for step, s in steps.items())
        + " of all threads."
    )
    kinds: dict[str, list[float]] = {}
    for kernel in times.emitted:
        row = kinds.setdefault(kernel.how, [0.0, 0, 0])
        row[0], row[1], row[2] = row[0] + kernel.seconds, row[1] + 1, row[2] + kernel.text
    rows = sorted(kinds.items(), key=lambda item: -item[1][0])[:SHOWN]
    parts.append(
        table(
            [
                ("kernels", "made", "text", "time"),
                *((k, f"{n:.0f}", f"{c / 1024:.0f} KiB", seconds_text(s)) for k, (s, n, c) in rows),
            ],
            right=(1, 2, 3),
        )
    )
    slow = sorted(times.modules, key=lambda m: -sum(m.seconds.values()))[:SHOWN]
    if slow:
        lines = [("module of", "functions", "text", *steps)]
        for module in slow:
            named = ", ".join(sorted({how.get(name, name) for name in module.functions}))
            own = tuple(seconds_text(module.seconds.get(step, 0.0)) for step in steps)
            lines.append((named[:60], str(len(module.functions)), f"{module.text / 1024:.0f} KiB", *own))
        parts.append(table(lines, right=tuple(range(1, 3 + len(steps)))))
    return "\n\n".join(parts)


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON values."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(record).items()}


def since_start() -> float:
    """Seconds since this process began, 0 where the system doesn't say."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        began = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    return 0.0
