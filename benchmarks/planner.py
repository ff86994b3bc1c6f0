"""The planner on the public hard set of google/minimalloc: python benchmarks/planner.py DIR [--visits N].

One line a file: arena height against its capacity and peak-live bound, what found it, seconds, and the milliseconds
that MiniMalloc published (Moffitt, ASPLOS 2023, slide 22). Every plan is proved by the independent checker. Exits 1 if
a file does not fit its capacity.
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
from rlx.plan.exact import compiled_search, improve
from rlx.plan.greedy import Problem
from rlx.plan.interval import Interval
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
    parser.add_argument("--only", default="", help="names of the files to run, e.g. ACD")
    arguments = parser.parse_args()
    files = sorted(path for path in arguments.folder.glob("*.csv") if len(path.name.split(".")) == 3)
    files = [path for path in files if not arguments.only or path.name.split(".")[0] in arguments.only]
    if not files:
        parser.error(f"no NAME.CAPACITY.csv in {arguments.folder}")
    began = time.perf_counter()
    compiled = compiled_search() is not None
    warm_up()
    print(f"numba {'compiled in' if compiled else 'missing after'} {time.perf_counter() - began:.1f} s")
    print(
        f"{'file':8}{'buffers':>8}{'capacity':>10}{'bound':>10}{'height':>10}{'gap %':>7}{'s':>8}{'ms then':>9}  method"
    )
    missed, total = 0, 0.0
    for path in files:
        name, capacity = path.name.split(".")[0], int(path.name.split(".")[1])
        intervals = read(path)
        began = time.perf_counter()
        try:
            placement = pack(intervals, base_alignment=1, capacity=capacity, effort=0.1, search=arguments.visits)
        except MemoryDeficit as error:
            print(f"{name:8}{len(intervals):>8}{capacity:>10}  {error}")
            missed += 1
            continue
        seconds = time.perf_counter() - began
        total += seconds
        check(intervals, placement.offsets, placement.height, base_alignment=1, capacity=capacity)
        bound = max(lower_bound(intervals, base_alignment=1), placement.bound)
        print(
            f"{name:8}{len(intervals):>8}{capacity:>10}{bound:>10}{placement.height:>10}"
            f"{100 * (placement.height / bound - 1):>7.2f}{seconds:>8.2f}{PUBLISHED_MS.get(name, '-'):>9}"
            f"  {placement.method}",
            flush=True,
        )
    print(f"{len(files) - missed} of {len(files)} within their capacity, {total:.1f} s")
    return 1 if missed else 0


def warm_up() -> None:
    """Has the search compiled, or loaded: two buffers that meet in one step."""
    improve(Problem([0, 0], [1, 1], [1, 1], [1, 1], [-1, -1]), 3, 2, 1000)


if __name__ == "__main__":
    sys.exit(main())
