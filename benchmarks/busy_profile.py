"""Are profiles right on a busy machine? Each kernel's time beside busy loops, against its time without them.

    python benchmarks/busy_profile.py [MODEL ...] [--loops 4] [--threads 1] [--batch 8]

A kernel is right if its time is within a factor of two of the quiet one. The goal: no unmarked kernel is wrong, and at
least 80 % are unmarked and right. The last column is the plain median over the same number of runs, as it was before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import rlx
from rlx.backends import timing
from rlx.demo import DIGITS
from rlx.runtime.bench import assumed
from rlx.runtime.choice import usual_extents

MOST = 2.0  # times the quiet time


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Processes that never give up their processor."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def medians(model: Any, inputs: Any, runs: int) -> list[float]:
    """The plain way: every run starts as the one before ends, and the median counts."""
    timer: list[timing.Timer] = []
    init = timing.Timer.__init__

    def keep(self: timing.Timer, *args: Any) -> None:
        init(self, *args)
        timer.append(self)

    with mock.patch.object(timing.Timer, "__init__", keep), mock.patch.object(timing.Timer, "start"):
        model.profile(inputs, runs)
    return [float(s) for s in np.median(np.array(timer[0].taken[:runs]), axis=0)]


def row(name: str, quiet: Sequence[timing.KernelTime], loud: Sequence[timing.KernelTime], plain: list[float]) -> str:
    base = [max(r[2], 1e-6) for r in quiet]  # a kernel below a microsecond is the clock's own time
    ratios = [max(r[2], 1e-6) / b for r, b in zip(loud, base, strict=True)]
    right = sum(not r.disturbed and 1 / MOST < x <= MOST for r, x in zip(loud, ratios, strict=True))
    wrong = sum(not r.disturbed and x > MOST for r, x in zip(loud, ratios, strict=True))
    before = [p / b for p, b in zip(plain, base, strict=True)]
    return (
        f"{name:28} {len(loud):5} {right / len(loud):7.1%} {wrong:6} {sum(r.disturbed for r in loud):7} "
        f"{max((x for r, x in zip(loud, ratios, strict=True) if not r.disturbed), default=0):7.2f} "
        f"{sum(x > MOST for x in before):8} {max(before):8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[str(DIGITS)])
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    print(f"{'model':28} {'count':>5} {'right':>7} {'wrong':>6} {'marked':>7} {'most':>7} {'before':>8} {'most':>8}")
    for path in args.models:
        model = rlx.load(path, device="cpu", threads=args.threads)
        graph = model.compilation.source
        at = usual_extents(graph, {n: args.batch for n in graph.dims() if "batch" in n.lower()})
        feeds = list(assumed(graph, at)[0].values())
        model.profile(feeds, args.runs)  # warm
        quiet = model.profile(feeds, args.runs)
        with busy(args.loops):
            loud = model.profile(feeds, args.runs)
            plain = medians(model, feeds, args.runs)
        print(row(path.rpartition("/")[2], quiet, loud, plain), flush=True)


if __name__ == "__main__":
    main()
