"""What a profile makes of the times of several runs: low, confirmed, and marked where other programs disturbed them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from numpy.typing import ArrayLike

from rlx.backends import timing
from rlx.backends.cpu.runtime.profile import WAKES, _waited
from rlx.backends.timing import MANY, MORE, SHORT, SLICE, KernelTime, ThreadSpan, Timer, kernel_times
from rlx.kernels.program import Kernel


def timed(repeat: int, run: Callable[[int], tuple[ArrayLike, ArrayLike]]) -> tuple[list[KernelTime], int]:
    """The rows for runs that give (seconds, waited) by their number, and how many there were."""
    timer = Timer(repeat)
    timer.run(lambda: run(len(timer.taken)))
    kernels = [f"k{n}" for n in range(len(timer.taken[0]))]
    return kernel_times(timer, ["map"] * len(kernels), kernels), len(timer.taken)


def test_one_run_in_which_a_slice_ended_does_not_count() -> None:
    rows, runs = timed(10, lambda n: ([1e-3, 7e-3 if n % 2 else 1e-3], [0, 6e-3 if n % 2 else 0]))
    assert runs == 10
    assert [row[2] for row in rows] == [1e-3, 1e-3]
    assert not any(row.disturbed for row in rows)


def test_runs_go_on_while_a_kernel_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until three runs agree; at most three times as many as were asked for, or more within half a second."""
    rows, runs = timed(5, lambda n: ([1e-3 if n > 6 else 9e-3], [0 if n > 6 else 8e-3]))
    assert runs == 10
    assert (rows[0][2], rows[0].disturbed) == (1e-3, False)
    for tick, most in ((1e-4, MANY), (SHORT, MORE)):
        clock = count(step=tick)
        monkeypatch.setattr(timing.time, "perf_counter", lambda clock=clock: next(clock))
        rows, runs = timed(5, lambda n: ([9e-3, 1e-3], [8e-3, 0]))
        assert runs == 5 * most
        assert [row.disturbed for row in rows] == [True, False]
        assert np.isclose(rows[0][2], 1e-3)  # without its waits: the best that is known


def test_what_says_nothing_against_the_low_quartile() -> None:
    """One run that was shorter than all others, and steps of the clock in times near to those."""
    rows, runs = timed(20, lambda n: ([26e-6 if n == 3 else 36e-6 + n * 1e-8, [3e-7, 7e-7, 5e-7][n % 3]], [0, 0]))
    assert runs == 20
    assert not any(row.disturbed for row in rows)


def test_a_quartile_that_shorter_runs_deny_is_marked() -> None:
    """Half of the quarter of runs that are shorter is far below it."""
    rows, _ = timed(20, lambda n: ([1e-3 if n % 8 == 0 else 3e-3], [0]))
    assert rows[0].disturbed


def waited(row: list[int], *cells: list[int]) -> int:
    """ns without a processor of one kernel with these threads."""
    return int(_waited(np.array([row]), np.array([cells]), [Kernel("k")])[0])


def test_waits_of_threads() -> None:
    """Of one thread all but its own time; of two what is late, between the chunks, and behind the last of them."""
    ms, began = 1_000_000, 50
    alone = [began, began + 3 * ms, 3 * ms, 4, 0, ms]
    assert waited([3 * ms, ms, 1, began], alone) == 2 * ms
    whole = [began, began + ms, ms, 4, 0, ms]
    assert waited([ms, ms, 1, began], whole, whole) <= 0
    assert waited([3 * ms, 3 * ms, 1, began], whole, whole) == 2 * ms - WAKES  # the caller went on long after that
    late = [began + 2 * ms, began + 3 * ms, ms, 4, 0, ms]
    assert waited([3 * ms, 3 * ms, 1, began], whole, late) == 2 * ms - WAKES
    between = [began, began + 3 * ms, ms, 4, 0, ms]
    assert waited([3 * ms, 3 * ms, 1, began], whole, between) == 2 * ms


def test_runs_that_do_not_agree_are_marked() -> None:
    """Nothing waited, but each run took another time."""
    rows, _ = timed(4, lambda n: ([1e-3 * 2**n], [0]))
    assert rows[0].disturbed
    assert rows[0].spread > 0


def test_one_run_is_one_run() -> None:
    rows, runs = timed(1, lambda n: ([2e-3, 2e-3], [0, 1e-3]))
    assert runs == 1
    assert [row.disturbed for row in rows] == [False, True]


def test_starts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each run but the first another part of the last one passes, at most a slice."""
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1e-5
        return clock[0]

    monkeypatch.setattr(timing.time, "perf_counter", tick)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    timer = Timer(8)
    timer.taken = [np.array([1e-3, 1e-3])]
    passed = []
    for number in range(8):
        before = clock[0]
        timer.start(number)
        passed.append(round(1e4 * (clock[0] - before)))
    assert passed[0] == 0
    assert len(set(passed)) == 8
    assert max(passed) <= 21


class BusyProcessor:
    """A clock that other programs run on too: after each slice of ours the `others` have one each.

    A sleep ends in a new slice, as schedulers prefer who has slept.
    """

    def __init__(self, others: int, rng: np.random.Generator) -> None:
        self.now, self.left, self.others, self.rng = 0.0, SLICE, others, rng

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.left = SLICE * self.rng.uniform(0.8, 1.2)

    def work(self, seconds: float) -> tuple[float, float]:
        """(time that passed, time without the processor) in `seconds` of work."""
        waited = 0.0
        while self.others and seconds > self.left:
            self.now, seconds = self.now + self.left, seconds - self.left
            gap = self.others * SLICE * self.rng.uniform(0.5, 1)
            self.now, waited, self.left = self.now + gap, waited + gap, SLICE * self.rng.uniform(0.8, 1.2)
        self.now, self.left = self.now + seconds, self.left - seconds
        return self.now, waited

    def perf_counter(self) -> float:
        self.work(1e-6)
        return self.now


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("others", [0, 1, 4])
def test_profiles_beside_busy_programs(others: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmarked kernels have at most twice their time; four in five are unmarked and within a third of it."""
    rng = np.random.default_rng(seed)
    own = np.concatenate([np.full(5, 0.23e-3), rng.uniform(5e-6, 2e-4, 25), [1.5e-3, 2.5e-3]])
    processor = BusyProcessor(others, rng)
    monkeypatch.setattr(timing, "time", processor)

    def once(number: int) -> tuple[ArrayLike, ArrayLike]:
        rows = []
        for seconds in own * rng.uniform(1, 1.15, len(own)):  # caches that others have used
            before = processor.now
            after, waited = processor.work(float(seconds))
            rows.append((after - before, waited))
        taken, lost = np.transpose(rows)
        return taken, lost

    rows, _ = timed(10, once)
    ratios = np.array([row[2] for row in rows]) / own
    marked = np.array([row.disturbed for row in rows])
    assert (ratios[~marked] <= 2).all()
    assert (~marked & (ratios <= 4 / 3)).mean() >= 0.8
    assert others or not marked.any()
    if others == 4:  # a single run shows what must be left out
        alone = Timer(1)
        alone.run(lambda: once(0))
        assert (alone.taken[0] / own).max() > 2


def test_a_row_is_a_tuple_of_three() -> None:
    row = KernelTime("map", "add", 1e-3, 1e-4, True, (ThreadSpan(0, 0.0, 1e-3, 4),))
    kind, name, seconds = row
    assert (kind, name, seconds) == row == ("map", "add", 1e-3)
    again = pickle.loads(pickle.dumps(row))
    assert (again, again.disturbed, again.threads) == (row, True, row.threads)
    assert row.to_dict() == {"kind": "map", "name": "add", "seconds": 1e-3, "spread": 1e-4, "disturbed": True}
