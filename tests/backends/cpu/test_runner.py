"""The walker: order, chunks, errors, interruption, profile, host calls."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from interrupts import interrupt_at
from numpy.typing import NDArray

from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.runner import RunBlock, host_call
from rlx.errors import BusyError, ExecutionError, OptionError

HEAD = "(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {\n"
KERNELS = {
    # adds 1 to element `chunk` of the array in word 0
    "mark": "  %p = load ptr, ptr %words\n  %q = getelementptr i64, ptr %p, i64 %chunk\n  %v = load i64, ptr %q\n"
    "  %n = add i64 %v, 1\n  store i64 %n, ptr %q\n  ret void\n",
    # appends word 1 to the list whose length is its first element
    "log": "  %p = load ptr, ptr %words\n  %t.p = getelementptr i64, ptr %words, i64 1\n  %t = load i64, ptr %t.p\n"
    "  %n = load i64, ptr %p\n  %m = add i64 %n, 1\n  %q = getelementptr i64, ptr %p, i64 %m\n  store i64 %t, ptr %q\n"
    "  store i64 %m, ptr %p\n  ret void\n",
    # chunk 3 fails with kind 1, site 7 and its chunk as value
    "fail": "  %is = icmp eq i64 %chunk, 3\n  br i1 %is, label %bad, label %good\nbad:\n"
    "  %r = cmpxchg ptr %ctx, i64 0, i64 1793 seq_cst monotonic\n  %v.p = getelementptr i64, ptr %ctx, i64 1\n"
    "  store i64 %chunk, ptr %v.p\n  ret void\ngood:\n  ret void\n",
    # jumps to phase word 1 while the counter in word 0 is above 0, and counts down
    "jump": "  %p = load ptr, ptr %words\n  %n = load i64, ptr %p\n  %m = sub i64 %n, 1\n  store i64 %m, ptr %p\n"
    "  %again = icmp sgt i64 %m, 0\n  br i1 %again, label %back, label %on\nback:\n"
    "  %t.p = getelementptr i64, ptr %words, i64 1\n  %t = load i64, ptr %t.p\n"
    "  %next.p = getelementptr i64, ptr %ctx, i64 3\n  store i64 %t, ptr %next.p\n  ret void\non:\n  ret void\n",
    # counts word 0 up by one, word 1 times
    "burn": "entry:\n  %n.p = getelementptr i64, ptr %words, i64 1\n  %n = load i64, ptr %n.p\n  br label %l\nl:\n"
    "  %i = phi i64 [ 0, %entry ], [ %j, %l ]\n  %v = load volatile i64, ptr %words\n  %w = add i64 %v, 1\n"
    "  store volatile i64 %w, ptr %words\n  %j = add i64 %i, 1\n  %c = icmp slt i64 %j, %n\n"
    "  br i1 %c, label %l, label %x\nx:\n  ret void\n",
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, int]:
    return jit.compile_kernels((name, f"define void @{name}{HEAD}{body}}}\n", False) for name, body in KERNELS.items())


def words(*values: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Operand words: arrays stand for their addresses."""
    return np.array([v.ctypes.data if isinstance(v, np.ndarray) else v for v in values], np.int64)


def test_phases_run_in_order(kernels: dict[str, int]) -> None:
    """Each phase runs once, in the table's order, on every run."""
    out = np.zeros(20, np.int64)
    operands = [words(out, 10 + i) for i in range(5)]
    block = RunBlock([(kernels["log"], w.ctypes.data, 1) for w in operands])
    assert block.run() == 0
    assert block.run() == 0
    assert out.tolist()[:11] == [10, *[10, 11, 12, 13, 14] * 2]


def test_an_empty_table_runs() -> None:
    """No phases, no error."""
    assert RunBlock().run() == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [-1, 0, 1, 2, 5, 1000, 65535, 65536, 200_001])
def test_every_chunk_runs_once(kernels: dict[str, int], threads: int, count: int) -> None:
    """Chunks 0..n-1 run exactly once for any n (also beyond what one ticket counts), none for n <= 0."""
    out = np.zeros(max(count, 0) + 1, np.int64)
    operands = words(out)
    block = RunBlock([(kernels["mark"], operands.ctypes.data, count)], threads=threads)
    assert block.run() == 0
    assert out.tolist() == [1] * max(count, 0) + [0]


def test_chunk_counts_can_change_between_runs(kernels: dict[str, int]) -> None:
    """A phase is skipped, run once or in parts as its count says."""
    out = np.zeros(8, np.int64)
    operands = words(out)
    block = RunBlock([(kernels["mark"], operands.ctypes.data, 1)], threads=2)
    for count, total in [(1, 1), (0, 1), (8, 9), (3, 12)]:
        block.set_nchunks(0, count)
        assert block.run() == 0
        assert out.sum() == total


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_stops_the_run(kernels: dict[str, int], threads: int) -> None:
    """Status, value and phase are the failing kernel's, later phases do not run, and the next run starts clean."""
    out = np.zeros(4, np.int64)
    operands = words(out)
    mark = (kernels["mark"], operands.ctypes.data, 1)
    block = RunBlock([mark, (kernels["fail"], 0, 6), mark], threads=threads)
    for runs in (1, 2):
        assert block.run() == runner_ir.INDEX_OUT_OF_RANGE | 7 << 8
        assert (block.status, block.value, block.failed_phase) == (runner_ir.INDEX_OUT_OF_RANGE | 7 << 8, 3, 1)
        assert out[0] == runs
    block.set_nchunks(1, 3)
    assert block.run() == 0
    assert block.status == 0
    assert out[0] == 4


def test_a_control_kernel_chooses_the_next_phase(kernels: dict[str, int]) -> None:
    """Writing NEXT makes loops; the phases between run as often as it says."""
    out, counter = np.zeros(2, np.int64), np.array([5], np.int64)
    body, control = words(out), words(counter, 0)
    block = RunBlock([(kernels["mark"], body.ctypes.data, 2), (kernels["jump"], control.ctypes.data, 1)], threads=2)
    assert block.run() == 0
    assert out.tolist() == [5, 5]


def test_the_profile_adds_up_time_of_each_phase(kernels: dict[str, int]) -> None:
    """A long phase shows more time than a short one; without a profile nothing is written."""
    short, long = words(0, 10), words(0, 1_000_000)
    block = RunBlock([(kernels["burn"], w.ctypes.data, 1) for w in (short, long)])
    block.enable_profile()
    profile = block.profile
    assert profile is not None
    block.run()
    took, used, visits, began = before = block.profiled(2).T
    assert took[1] > took[0] > 0
    assert (used >= 0).all()
    assert visits.tolist() == [1, 1]
    assert began[0] + took[0] <= began[1]
    block.run()
    assert block.profiled(2)[:, 2].tolist() == [2, 2]
    before = profile.copy()
    block.disable_profile()
    block.run()
    np.testing.assert_array_equal(profile, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_profile_tells_threads_apart(kernels: dict[str, int], threads: int) -> None:
    """Every chunk is counted once, by the thread that ran it, and lies within its phase; the results are the same."""
    out = np.zeros(40, np.int64)
    mark, burn = words(out), words(0, 1_000)
    block = RunBlock([(kernels["mark"], mark.ctypes.data, 40), (kernels["burn"], burn.ctypes.data, 1)], threads=threads)
    block.enable_profile()
    assert block.run() == 0
    assert out.tolist() == [1] * 40
    cells, rows = block.threads_apart(2), block.profiled(2)
    assert cells.shape == (2, threads, 6)
    assert cells[:, :, 3].sum(axis=1).tolist() == [40, 0]
    for (took, _, _, began), phase in zip(rows, cells, strict=True):
        for first, last, busy, chunks, used, used_end in phase:
            assert used <= used_end
            assert not chunks or began <= first <= last <= began + took
            assert 0 <= busy <= last - first
    block.set_phases([(kernels["mark"], mark.ctypes.data, 3)])
    assert block.run() == 0
    assert block.threads_apart(1)[0, :, 3].sum() == 3


def test_a_busy_block_is_not_run_again(kernels: dict[str, int]) -> None:
    """A second run of the same block returns at once and leaves the first alone."""
    states: list[int] = []
    inner = host_call(lambda: states.append(block.run()))
    block = RunBlock([(inner.address, 0, 1)])
    assert block.run() == 0
    assert states == [runner_ir.BUSY_STATUS]
    block.acquire()
    with pytest.raises(BusyError):
        block.acquire()
    assert block.run() == runner_ir.BUSY_STATUS
    assert block.run_acquired() == 0
    block.release()
    assert block.run() == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_long_run(kernels: dict[str, int], threads: int) -> None:
    """SIGINT during a run raises KeyboardInterrupt between phases; the block stays usable."""
    count = words(0, 100_000)
    phases = [(kernels["burn"], count.ctypes.data, 1)] * 100_000
    block = RunBlock(phases, threads=threads)

    thread = interrupt_at(count)
    begun = host_call(thread.start)
    block.set_phases([(begun.address, 0, 1), *phases])
    with pytest.raises(KeyboardInterrupt):
        block.run()
    assert 0 < count[0] < 100_000 * 100_000
    block.set_phases(phases[:3])
    assert block.run() == 0


def test_signals_are_left_alone_while_the_gil_is_held(kernels: dict[str, int]) -> None:
    """A run that keeps the GIL ends first; the signal is handled after it."""
    seen: list[int] = []
    count = words(0, 100)
    send = host_call(lambda: signal.raise_signal(signal.SIGUSR1))
    block = RunBlock([(send.address, 0, 1), *[(kernels["burn"], count.ctypes.data, 1)] * 100], release_gil=False)
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(int(count[0])))
    try:
        assert block.run() == 0
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert count[0] == 100 * 100
    assert len(seen) == 1


def test_a_run_releases_the_gil(kernels: dict[str, int]) -> None:
    """Other Python threads go on during a run that releases the GIL."""
    steps = 20_000_000
    count = words(0, steps)
    block = RunBlock([(kernels["burn"], count.ctypes.data, 1)])
    seen = 0
    for _ in range(100):  # on a busy machine this thread may sleep through some of them
        count[0] = 0
        thread = threading.Thread(target=block.run)
        thread.start()
        while thread.is_alive():
            seen += 0 < count[0] < steps
            time.sleep(0)
        if seen:
            return
    pytest.fail("saw nothing of 100 runs")


@pytest.mark.parametrize("release_gil", [False, True])
def test_host_calls_run_in_their_phase(kernels: dict[str, int], release_gil: bool) -> None:
    """A Python callable sees what earlier phases wrote and is seen by later ones, whoever holds the GIL."""
    out = np.zeros(1, np.int64)
    operands = words(out)
    mark = (kernels["mark"], operands.ctypes.data, 1)
    times_ten = host_call(lambda: out.__setitem__(0, out[0] * 10))
    block = RunBlock([mark, (times_ten.address, 0, 1), mark], release_gil=release_gil)
    assert block.run() == 0
    assert out[0] == 11


def test_an_exception_in_a_host_call_stops_the_run(kernels: dict[str, int]) -> None:
    """The status says so, the exception is kept, and raise_error gives it once as the cause."""
    out = np.zeros(1, np.int64)
    operands = words(out)
    broken = host_call(lambda: {}["key"])
    block = RunBlock([(broken.address, 0, 1), (kernels["mark"], operands.ctypes.data, 1)])
    assert block.run() == runner_ir.HOST_CALL_RAISED
    assert block.failed_phase == 0
    assert out[0] == 0
    with pytest.raises(ExecutionError, match="KeyError") as caught:
        broken.raise_error()
    assert isinstance(caught.value.__cause__, KeyError)
    broken.raise_error()


def test_the_state_block_is_aligned_and_has_room_for_the_graph() -> None:
    """User words start after the fixed ones, on the block's own memory; threads below 1 are refused."""
    block = RunBlock(user_words=5)
    assert block.address % 64 == 0
    block.user[:] = 7
    assert block.words[runner_ir.USER_WORDS :].tolist() == [7] * 5
    with pytest.raises(OptionError, match="0"):
        block.threads = 0
