"""The thread pool: many runs at once, forks, exit, more threads than cores, and counting cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rlx.backends import granted
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.native import pool_ir
from rlx.backends.cpu.native.pool import aligned_words, pool
from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.native.runner_ir import runtime_ir

# out[base + chunk] += 1 and seen[worker] += 1 without atomics: wrong if two threads had one worker id at once
KERNEL = """
define void @tally(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
  %out = load ptr, ptr %words
  %seen.p = getelementptr ptr, ptr %words, i64 1
  %seen = load ptr, ptr %seen.p
  %o = getelementptr i64, ptr %out, i64 %chunk
  %a = load i64, ptr %o
  %b = add i64 %a, 1
  store i64 %b, ptr %o
  %w = getelementptr [8 x i64], ptr %seen, i64 %worker
  %c = load volatile i64, ptr %w
  %d = add i64 %c, 1
  store volatile i64 %d, ptr %w
  ret void
}
"""

# For scripts run in a process of their own: `tally` and a block of `phases` phases that counts into `out`.
PRELUDE = f"""
import os, sys, threading, signal
import numpy as np
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.native import runner
from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.pool import pool
from rlx.backends.cpu.native.runner import RunBlock
signal.alarm(100)
tally = jit.compile_kernels([("tally", '''{KERNEL}''', False)])["tally"]
def make(threads, chunks, phases):
    out, seen = np.zeros(chunks, np.int64), np.zeros((64, 8), np.int64)
    words = np.array([out.ctypes.data, seen.ctypes.data], np.int64)
    block = RunBlock([(tally, words.ctypes.data, chunks)] * phases, threads=threads)
    block.keep = (tally, words, out, seen)
    return block, out, seen
"""


def script(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120, check=False
    )


class Work:
    """A block of parallel phases and the counters that its kernel keeps."""

    def __init__(self, threads: int, chunks: int, phases: int) -> None:
        tally = jit.compile_kernels([("tally", KERNEL, False)])["tally"]
        self.out = np.zeros(chunks, np.int64)
        self.seen = np.zeros((granted.MAX_THREADS, 8), np.int64)
        self.words = np.array([self.out.ctypes.data, self.seen.ctypes.data], np.int64)
        self.block = RunBlock([(tally, self.words.ctypes.data, chunks)] * phases, threads=threads)

    def check(self, expected: int) -> None:
        """Every chunk ran `expected` times, and each counted for one worker below the thread limit."""
        assert set(self.out.tolist()) == {expected}
        assert self.seen[:, 0].sum() == expected * len(self.out)
        assert not self.seen[self.block.threads :].any()


def test_blocks_run_at_once_in_several_threads() -> None:
    """Four Python threads with blocks of their own, parallel phases in all of them: nothing hangs, nothing is lost."""
    works = [Work(threads=2 + i % 2, chunks=3 + i, phases=20) for i in range(4)]
    statuses: list[int] = []

    def loop(work: Work) -> None:
        statuses.extend(work.block.run() for _ in range(500))

    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert statuses == [0] * 2000
    for work in works:
        work.check(500 * 20)


def test_more_workers_than_cores() -> None:
    """With 5 workers on any machine and blocks of 2, 4 and 8 threads at once, worker ids stay unique and in range."""
    done = script("""
runner.native()
pool.start(workers=5)
works = [make(t, 13, 10) for t in (2, 4, 8)]
threads = [threading.Thread(target=lambda b=b: [b.run() for _ in range(300)]) for b, _, _ in works]
for t in threads: t.start()
for t in threads: t.join()
for (block, out, seen), t in zip(works, (2, 4, 8)):
    assert set(out.tolist()) == {3000}, out
    assert seen[:, 0].sum() == 13 * 3000, seen[:, 0]
    assert not seen[t:].any()
assert len(pool.threads) == 5
""")
    assert done.returncode == 0, done.stderr


def test_many_workers_that_fall_asleep() -> None:
    """More workers than a futex has bits for, which sleep between runs of few and of many threads: nothing is lost."""
    done = script("""
import time
runner.native()
pool.start(workers=40)
works = [make(t, c, 5) for t, c in ((2, 7), (33, 20), (64, 200), (5, 5))]
for _ in range(40):
    for block, out, seen in works:
        assert block.run() == 0
        time.sleep(0.0005)
for block, out, seen in works:
    assert set(out.tolist()) == {200}
    assert seen[:, 0].sum() == 200 * len(out)
    assert not seen[block.threads:].any()
""")
    assert done.returncode == 0, done.stderr


# out[chunk] = worker, some ten microseconds later
OWNER = """
define void @owner(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %loop ]
  call void asm sideeffect "", "~{memory}"()
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, 20000
  br i1 %more, label %loop, label %end
end:
  %out = load ptr, ptr %words
  %o = getelementptr i64, ptr %out, i64 %chunk
  store i64 %worker, ptr %o
  ret void
}
"""


# waits until as many chunks have begun as all runs have threads
MEET = """
define void @meet(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
entry:
  %count = load ptr, ptr %words
  %all.p = getelementptr i64, ptr %words, i64 1
  %all = load i64, ptr %all.p
  %before = atomicrmw add ptr %count, i64 1 seq_cst
  br label %loop
loop:
  %begun = load atomic i64, ptr %count seq_cst, align 8
  %met = icmp sge i64 %begun, %all
  br i1 %met, label %end, label %loop
end:
  ret void
}
"""


@pytest.mark.parametrize("runs, threads", [(1, 8), (2, 4), (3, 2), (4, 2)])
def test_runs_side_by_side_have_workers_each(runs: int, threads: int) -> None:
    """Workers that sleep are woken for a run although another one has as many as that needs, while there are CPUs."""
    done = script(f"""
import time
runner.native()
pool.start(workers=7)
meet = jit.compile_kernels([("meet", '''{MEET}''', False)])["meet"]
count = np.zeros(1, np.int64)
words = np.array([count.ctypes.data, {runs * threads}], np.int64)
blocks = [RunBlock([(meet, words.ctypes.data, {threads})], threads={threads}) for _ in range({runs})]
for _ in range(5):
    time.sleep(0.02)  # all fall asleep
    count[:] = 0
    callers = [threading.Thread(target=block.run) for block in blocks]
    for caller in callers: caller.start()
    for caller in callers: caller.join()  # never ends, if a chunk has nobody to run it
""")
    assert done.returncode == 0, done.stderr


def test_each_thread_has_its_share() -> None:
    """A worker that comes in time computes its own chunks: as many as the caller, at the end of the phase."""
    done = script(f"""
runner.native()
pool.start(workers=1)
owner = jit.compile_kernels([("owner", '''{OWNER}''', False)])["owner"]
out = np.zeros(8, np.int64)
words = np.array([out.ctypes.data], np.int64)
block = RunBlock([(owner, words.ctypes.data, 8)] * 3, threads=2)
while out.tolist() != [0, 0, 0, 0, 1, 1, 1, 1]:
    assert block.run() == 0
""")
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_to_look_for() -> None:
    """After a run no share has its mark of unclaimed chunks, which would keep workers awake for ever."""
    done = script("""
from rlx.backends.cpu.native.pool_ir import LEFT, SLOT_BYTES, SLOT_TABLE
runner.native()
pool.start(workers=3)
for threads, chunks in ((2, 2), (4, 4), (16, 16), (16, 5)):
    block, out, seen = make(threads, chunks, 20)
    for _ in range(3000):
        assert block.run() == 0
        assert not pool.memory[(SLOT_TABLE + LEFT) // 8 :: SLOT_BYTES // 8].any()
""")
    assert done.returncode == 0, done.stderr


def test_more_runs_than_slots() -> None:
    """Runs that find every slot taken are done by their caller alone."""
    work = Work(threads=2, chunks=4, phases=3)
    active = pool.memory[pool_ir.ACTIVE // 8 :][:1]
    assert work.block.run() == 0
    assert active[0] == 0
    active[0] = -1
    try:
        assert work.block.run() == 0
    finally:
        active[0] = 0
    work.check(6)
    assert work.block.run() == 0
    work.check(9)


def test_one_thread_leaves_the_pool_alone() -> None:
    """A run of one thread starts no workers, however many chunks it has."""
    done = script("""
block, out, seen = make(1, 100, 3)
assert block.run() == 0 and set(out.tolist()) == {3}
assert pool.state == 0 and not pool.threads
""")
    assert done.returncode == 0, done.stderr


def test_workers_help() -> None:
    """With long chunks on two threads, the worker does some of them."""
    done = script("""
runner.native()
pool.start(workers=1)
block, out, seen = make(2, 1000, 50)
while not seen[1, 0]:
    assert block.run() == 0
""")
    assert done.returncode == 0, done.stderr


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    """After forks, also beside a running block, the child runs old and new blocks in parallel."""
    done = script("""
def child(*blocks):
    for block in blocks:
        for _ in range(50):
            assert block.run() == 0
    assert pool.state == 1
    assert all(t.is_alive() for t in pool.threads)
    fresh, out, _ = make(2, 8, 5)
    assert fresh.run() == 0 and set(out.tolist()) == {5}
def fork(*blocks):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            child(*blocks)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
one, out, _ = make(2, 8, 20)
fork(one)
assert one.run() == 0
fork(one)
two, _, _ = make(2, 8, 2000)
stop = threading.Event()
def loop():
    while not stop.is_set():
        assert two.run() == 0
beside = threading.Thread(target=loop)
beside.start()
for _ in range(5):
    fork(one, two)
stop.set()
beside.join()
assert one.run() == 0 and set(out.tolist()) == {40}
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(3)", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGINT)"],
    ids=["return", "exit", "raise", "sigint"],
)
def test_exit_neither_hangs_nor_crashes(ending: str) -> None:
    """A process with workers, and with a daemon thread in the middle of a run, ends with its own status."""
    done = script(f"""
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
block, _, _ = make(2, 64, 20000)
threading.Thread(target=lambda: [block.run() for _ in range(10**6)], daemon=True).start()
other, _, _ = make(2, 64, 20)
for _ in range(100): assert other.run() == 0
{ending}
""")
    assert done.returncode == (3 if ending else 0), done.stderr
    assert not done.stderr


def test_after_close_runs_use_their_caller() -> None:
    """A closed pool ends its workers and starts no new ones."""
    done = script("""
block, out, seen = make(2, 8, 3)
assert block.run() == 0
threads = list(pool.threads)
pool.close()
assert not any(t.is_alive() for t in threads)
assert block.run() == 0 and set(out.tolist()) == {6} and pool.state == 2 and not pool.threads
""")
    assert done.returncode == 0, done.stderr


def test_the_portable_variant_works() -> None:
    """Without a futex, sleeping workers poll: same results, and they still help."""
    done = script("""
portable = runner_ir.Native(futex=False)
pool.attach(portable.library)
runner.native = lambda: portable
pool.start(workers=2)
block, out, seen = make(3, 100, 20)
runs = 0
while runs < 200 or not seen[1:, 0].any():
    assert block.run() == 0
    runs += 1
assert set(out.tolist()) == {20 * runs}
""")
    assert done.returncode == 0, done.stderr
    assert "syscall" not in runtime_ir(futex=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", ["%epoch = load", "%s0 = atomicrmw", "%stop2 = load", "%active2 = load", "%stay = or"])
def test_a_worker_that_is_slow_to_fall_asleep_is_woken(step: str) -> None:
    """Stopped for a millisecond after any step of that, while runs begin and end, it still takes part in later ones."""
    done = script(
        f"""
import ctypes, random, time
plain, step = runner_ir.runtime_ir, {step!r}
"""
        """
def slow(**options):
    lines = plain(**options).splitlines()
    place, = [i for i, line in enumerate(lines) if line.strip().startswith(step)]
    return "\\n".join([*lines[:place + 1], "  call void @rlx_spin(i64 " + str(count) + ")", *lines[place + 1:]])
spins = 100_000
runner.native()
start = time.perf_counter()
ctypes.CFUNCTYPE(None, ctypes.c_size_t)(runner.native().library.address("rlx_spin"))(spins)
count = int(spins * 1e-3 / (time.perf_counter() - start))
runner_ir.runtime_ir = slow
runner_ir.RUNTIME += step
delayed = runner_ir.Native()
pool.attach(delayed.library)
runner.native = lambda: delayed
pool.start(workers=1)
short, _, _ = make(2, 2, 1)
long, _, seen = make(2, 64, 300)
random.seed(0)
for turn in range(20):
    for _ in range(20):
        time.sleep(random.uniform(0, 2e-3))
        assert short.run() == 0
    time.sleep(0.01)
    before = seen[1, 0]
    while seen[1, 0] == before:  # for ever, if it has been forgotten
        assert long.run() == 0
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_a_worker_leaves_the_callers_cpu() -> None:
    """A worker that sits on the CPU of the caller moves to another one, and may use the same CPUs as before."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    done = script("""
cpus = os.sched_getaffinity(0)
first = min(cpus)
runner.native()
pool.start(workers=1)
worker = pool.threads[0].native_id
def cpu():
    return int(open(f"/proc/self/task/{worker}/stat").read().rsplit(")", 1)[1].split()[36])
block, out, seen = make(2, 100, 20)
os.sched_setaffinity(0, {first})
runs = moves = 0
while moves < 5:
    os.sched_setaffinity(worker, {first})
    os.sched_setaffinity(worker, cpus)
    helped = seen[1, 0]
    while seen[1, 0] == helped:
        assert block.run() == 0
        runs += 1
    for _ in range(100):
        assert block.run() == 0
        runs += 1
    moves += cpu() != first
    while os.sched_getaffinity(worker) != cpus:  # it may be about to set them back
        pass
assert set(out.tolist()) == {20 * runs}
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_workers_have_the_cpus_of_the_process() -> None:
    """A thread that keeps itself to one CPU and runs first gets as many workers as others, on the CPUs of the process;
    and where the process itself had one only, workers come when it is granted more."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    done = script("""
from rlx.backends.cpu.native.pool import spare_cpus
cpus = os.sched_getaffinity(0)
def first():
    os.sched_setaffinity(0, {min(cpus)})
    block, out, seen = make(2, 50, 10)
    assert block.run() == 0
thread = threading.Thread(target=first)
thread.start()
thread.join()
assert len(pool.threads) == spare_cpus()
for worker in pool.threads:
    while os.sched_getaffinity(worker.native_id) != cpus:  # it is about to set them
        pass
if os.fork() == 0:
    os.sched_setaffinity(0, {min(cpus)})
    block, out, seen = make(2, 50, 10)
    assert block.run() == 0
    alone = len(pool.threads)
    os.sched_setaffinity(0, cpus)
    pool.grow()
    os._exit(0 if alone == 0 and len(pool.threads) == spare_cpus() else 1)
assert os.wait()[1] == 0
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_a_caller_that_changes_its_cpu() -> None:
    """With bounds of time at which it moves after every chunk: all chunks run once, and its CPUs stay the same."""
    done = script("""
from rlx.backends import granted
from rlx.backends.cpu.native import os_ir
os_ir.TURN_NS, os_ir.LOST_NS, os_ir.STAY_NS = -1, -1, -1
cpus = os.sched_getaffinity(0)
block, out, seen = make(2, 50, 10)
for mask in (cpus, {min(cpus)}):
    os.sched_setaffinity(0, mask)
    for _ in range(20):
        assert block.run() == 0
        assert os.sched_getaffinity(0) == mask
assert set(out.tolist()) == {10 * 40}
""")
    assert done.returncode == 0, done.stderr


# The pool's functions by themselves, on memory of the test's own, words of 8 bytes: `state` and in it the first `slot`.
PROBE = """
import ctypes, time
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.native import pool_ir
from rlx.backends.cpu.native.pool import aligned_words
def probe(arguments, call):
    ir = runner_ir.runtime_ir() + f"define void @probe({arguments}) {{ call void {call} ret void }}"
    library = loader.build(f"probe {call}", lambda: ir, symbols=runner_ir.runtime_symbols())
    types = [ctypes.c_int64 if a.startswith("i64") else ctypes.c_size_t for a in arguments.split(", ")]
    return ctypes.CFUNCTYPE(None, *types)(library.keep().address("probe"))
state = aligned_words((pool_ir.SLOT_TABLE + pool_ir.SLOT_BYTES) // 8)
slot = state[pool_ir.SLOT_TABLE // 8 :]
def thread_of(worker):
    start = pool_ir.SHARES + worker * pool_ir.SHARE_BYTES + pool_ir.THREAD
    return slot[start // 8 :].view(np.int32)[:1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_caller_fetches_workers_that_stand_still() -> None:
    """Looks at workers of which one runs and one does not: that one is marked, and keeps its CPUs."""
    done = script(
        PROBE
        + """
look = probe("ptr %pool, ptr %slot, i64 %t", "@look_after(ptr %pool, ptr %slot, i64 %t)")
end = threading.Event()
spin = ctypes.CFUNCTYPE(None, ctypes.c_int64)(runner.native().library.address("rlx_spin"))
still = threading.Thread(target=end.wait)
runs = threading.Thread(target=lambda: [spin(10000) for _ in iter(end.is_set, True)])
cpus = os.sched_getaffinity(0)
for worker, thread in ((1, still), (2, runs)):
    thread.start()
    thread_of(worker)[:] = thread.native_id
clock = time.pthread_getcpuclockid(runs.ident)
def looks(t):
    before = time.clock_gettime_ns(clock)
    while time.clock_gettime_ns(clock) == before:
        pass
    look(state.ctypes.data, slot.ctypes.data, t)
    assert thread_of(2)[0] == runs.native_id
    return thread_of(1)[0] < 0
t = 10**9
assert not looks(t)  # nobody works for the run
slot[pool_ir.TAKEN // 8] = 0b110
state[pool_ir.MOVING // 8] = 1
for _ in range(5):  # another one is being moved
    t += 10**9
    assert not looks(t)
state[pool_ir.MOVING // 8] = 0
assert not looks(t + 1)  # too soon
while not looks(t := t + 10**9):  # it may still be about to sleep
    pass
assert thread_of(1)[0] == -still.native_id
assert os.sched_getaffinity(still.native_id) == cpus
assert not state[pool_ir.MOVING // 8]
os.sched_setaffinity(0, {min(cpus)})
os.sched_setaffinity(still.native_id, {max(cpus)})
thread_of(1)[:] = still.native_id
while not looks(t := t + 10**9):
    pass
assert os.sched_getaffinity(still.native_id) == {max(cpus)}
thread_of(1)[:] = 2**22 + 1  # there is no such thread
for _ in range(5):
    assert not looks(t := t + 10**9)
end.set()
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_caller_does_not_flee_from_its_worker() -> None:
    """Who lost its CPU to a worker of its own stays there, and moves the next time."""
    done = script(
        PROBE
        + """
change = probe("ptr %slot", "@change_cpu(ptr %slot)")
slot[pool_ir.MET // 8] = 1
change(slot.ctypes.data)
assert not slot[pool_ir.MET // 8] and not slot[pool_ir.CALLER_MOVED // 8]
change(slot.ctypes.data)
assert slot[pool_ir.CALLER_MOVED // 8]
"""
    )
    assert done.returncode == 0, done.stderr


# The same some ten milliseconds later: longer than a system lets a thread run if another waits
LATE = OWNER.replace("@owner", "@late").replace("20000", "30000000")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_worker_stopped_inside_a_chunk_goes_on_beside_the_caller() -> None:
    """With a stranger on the worker's CPU, until the worker has met its caller: every chunk is done, CPUs stay."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    done = script(f"""
import subprocess
from rlx.backends.cpu.native.pool_ir import MET, SLOT_TABLE
runner.native()
pool.start(workers=1)
cpus = os.sched_getaffinity(0)
late = jit.compile_kernels([("late", '''{LATE}''', False)])["late"]
out = np.zeros(2, np.int64)
words = np.array([out.ctypes.data], np.int64)
block = RunBlock([(late, words.ctypes.data, 2)] * 5, threads=2)
here = {{min(cpus)}}
os.sched_setaffinity(0, here)
busy = "import os, sys\\nos.sched_setaffinity(0, {{int(sys.argv[1])}})\\nwhile True: pass"
strangers = [subprocess.Popen([sys.executable, "-c", busy, str(cpu)]) for cpu in cpus - here]
try:
    while not pool.memory[(SLOT_TABLE + MET) // 8]:
        out[:] = -1
        assert block.run() == 0
        assert set(out.tolist()) <= {{0, 1}}
finally:
    for stranger in strangers:
        stranger.kill()
        stranger.wait()
assert os.sched_getaffinity(0) == here
worker = pool.threads[0].native_id
while os.sched_getaffinity(worker) != cpus:  # it may be about to set them back
    pass
""")
    assert done.returncode == 0, done.stderr


def test_words_are_aligned_and_zero() -> None:
    """Blocks start at cache lines, so that what threads write apart stays apart."""
    for count in (1, 3, 8, 100):
        array = aligned_words(count)
        assert array.ctypes.data % 64 == 0
        assert array.tolist() == [0] * count


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n3:memory:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
    ids=["v2-max", "v2", "v2-parent", "v2-container", "v1", "v1-none", "nothing"],
)
def test_cpu_count_obeys_the_cgroup(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """The quota of the process's group or any above it cuts the affinity's count, to no less than 1."""
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert granted.cgroup_quota(tmp_path) == quota
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert granted.cpu_count(tmp_path) == max(1, min(affinity, int(quota) if quota is not None else affinity))
