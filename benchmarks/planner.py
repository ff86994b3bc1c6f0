"""The planner on the public hard set of google/minimalloc: python benchmarks/planner.py DIR [--visits N].

One line a file: milliseconds until a plan fits the capacity, against those that MiniMalloc published for the same
(Moffitt, ASPLOS 2023, slide 22); then the least height found, its peak-live bound, seconds, and what found it. Every
plan is proved by the independent checker. Exits 1 if a file does not fit its capacity.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

from rlx.errors import MemoryDeficit
from rlx.plan.bound import lower_bound
from rlx.plan.check import check
from rlx.plan.exact import compiled_search
from rlx.plan.interval import Interval, Placement
from rlx.plan.pack import pack

PUBLISHED_MS = {
    "A": 4910, "B": 3661, "C": 637, "D": 2674, "E": 3717, "F": 5358, "G": 1181,
    "H": 1808, "I": 3908, "J": 883, "K": 628,
}  # fmt: skip


def read(path: Path) -> list[Interval]:
    """The buffers of a file with the columns id, lower, upper, size."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [Interval(row["id"], int(row["lower"]), int(row["upper"]), int(row["size"]), 1) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with files NAME.CAPACITY.csv")
    parser.add_argument("--visits", type=int, default=1_000_000_000, help="budget of the exact search, a file")
    parser.add_argument("--quick", action="store_true", help="stop at the first plan that fits")
    parser.add_argument("--only", default="", help="names of the files to run, e.g. ACD")
    arguments = parser.parse_args()
    files = sorted(path for path in arguments.folder.glob("*.csv") if len(path.name.split(".")) == 3)
    files = [path for path in files if not arguments.only or path.name.split(".")[0] in arguments.only]
    if not files:
        parser.error(f"no NAME.CAPACITY.csv in {arguments.folder}")
    began = time.perf_counter()
    compiled_search()
    print(f"search compiled in {time.perf_counter() - began:.1f} s")
    print(
        f"{'file':8}{'buffers':>8}{'capacity':>10}{'ms':>7}{'ms then':>9}"
        f"{'bound':>10}{'least':>10}{'gap %':>7}{'s':>8}  method"
    )
    missed, fitting, total = 0, 0.0, 0.0
    for path in files:
        name, capacity = path.name.split(".")[0], int(path.name.split(".")[1])
        intervals = read(path)
        try:
            quick, fits = timed(intervals, capacity, capacity, arguments.visits)
        except MemoryDeficit as error:
            print(f"{name:8}{len(intervals):>8}{capacity:>10}  {error}")
            missed += 1
            continue
        least, seconds = (quick, fits) if arguments.quick else timed(intervals, capacity, 0, arguments.visits)
        fitting += fits
        total += seconds
        bound = max(lower_bound(intervals, base_alignment=1), least.bound)
        print(
            f"{name:8}{len(intervals):>8}{capacity:>10}{1000 * fits:>7.0f}{PUBLISHED_MS.get(name, '-'):>9}"
            f"{bound:>10}{least.height:>10}{100 * (least.height / bound - 1):>7.2f}{seconds:>8.2f}  {least.method}",
            flush=True,
        )
    print(
        f"{len(files) - missed} of {len(files)} within their capacity, {fitting:.2f} s; the least heights {total:.1f} s"
    )
    return 1 if missed else 0


def timed(intervals: list[Interval], capacity: int, enough: int, visits: int) -> tuple[Placement, float]:
    """A plan of at most `enough` bytes, or else the least that is found, and the seconds that it took."""
    began = time.perf_counter()
    found = pack(intervals, base_alignment=1, capacity=capacity, enough=enough, effort=0.1, search=visits)
    seconds = time.perf_counter() - began
    check(intervals, found.offsets, found.height, base_alignment=1, capacity=capacity)
    return found, seconds


if __name__ == "__main__":
    sys.exit(main())
