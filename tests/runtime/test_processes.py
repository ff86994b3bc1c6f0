"""Ctrl-C, forks and exits in the middle of runs: control comes back, results are right, nothing hangs or crashes.

Each case is a process of its own, which a time limit ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

posix = pytest.mark.skipif(os.name != "posix", reason="signals and forks as POSIX has them")
ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds, after which a process hangs

HEAD = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
import numpy as np
import rlx
from rlx.ops.base import Op, register
from rlx.ops.control import While

def long(rounds=200, **options):
    # some 0.1 s a run of 200 rounds, of two kernels each
    cond, body = rlx.Graph("cond"), rlx.Graph("body")
    for region in (cond, body):
        region.input("n", (), "i64")
        region.input("x", (256, 256))
        region.input("w", (256, 256))
    cond.output(rlx.less(cond.inputs[0], cond.constant(np.array(rounds))))
    n, x, w = body.inputs
    body.output(n + 1)
    body.output(rlx.tanh(x @ w) + 0.01)
    g = rlx.Graph("long")
    w = g.param("w", (256, 256), data=np.eye(256, dtype=np.float32))
    _, y = g.add(While(2), g.constant(np.array(0)), g.input("x", (256, 256)), w, regions=[cond, body])
    g.output(y, name="y")
    return rlx.compile(g, device="cpu", threads=2, **options)

X = np.full((256, 256), 0.5, np.float32)

@register
class HostCall(Op):
    # x, after a call of `inside`

    def infer(self, x):
        return x

    def reference(self, x):
        inside()
        return x

def calling():
    g = rlx.Graph("calling")
    g.output(rlx.ops.host_call(g.input("x", (256, 256)) * 2.0), name="y")
    return rlx.compile(g, device="cpu")

def until(condition):
    while not condition():
        time.sleep(1e-3)

def say(*words):
    print(*words, flush=True)
"""


def run(body: str, *, interrupt_at: str | None = None, first: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `first`, HEAD and the body; sends SIGINT whenever a line says `interrupt_at`."""
    process = subprocess.Popen(
        [sys.executable, "-c", first + HEAD + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = []
    limit = threading.Timer(LIMIT, process.kill)
    limit.start()
    assert process.stdout is not None
    for line in process.stdout if interrupt_at is not None else ():
        lines.append(line)
        if line.strip() == interrupt_at:
            process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    limit.cancel()
    return subprocess.CompletedProcess(process.args, process.returncode, "".join(lines) + out, err)


def check(done: subprocess.CompletedProcess[str], status: int, *says: str) -> None:
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    said = done.stdout.split("\n")
    assert [line for line in said if line in says] == list(says), done.stdout + done.stderr
    assert "Fatal" not in done.stderr, done.stderr


@posix
def test_interrupting_runs() -> None:
    """Ctrl-C ends a direct run before its end, and the graph works as before; so with a call that waits for others."""
    done = run(
        """
model = long()
want = model.run([X])[0]

def interrupted(call):
    try:
        say("now")
        stop = time.monotonic() + 30
        while time.monotonic() < stop:  # the signal comes at any moment
            call()
    except KeyboardInterrupt:
        return
    raise AssertionError("was not interrupted")

for call in (lambda: model.run([X]), lambda: model.run_slots(X), lambda: model.submit([X]).result(), model.sync_all):
    interrupted(call)
    model.sync()
    assert np.array_equal(model.run([X])[0], want)
    assert np.array_equal(model.submit([X]).result()[0], want)
    assert model._queue.free == 4
say("fine")
""".replace("model.sync_all", "lambda: ([model.submit([X]) for _ in range(6)], model.sync())"),
        interrupt_at="now",
    )
    check(done, 0, "now", "now", "now", "now", "fine")


@posix
def test_a_run_is_left_in_the_middle() -> None:
    """Control comes back after the kernel that runs, not after the run, which would take minutes."""
    done = run(
        """
model = long(10**6)
try:
    threading.Timer(0.5, lambda: say("now")).start()
    model.run([X])
except KeyboardInterrupt:
    say("stopped")
other = long()
assert np.isfinite(other.run([X])[0]).all()
""",
        interrupt_at="now",
    )
    check(done, 0, "now", "stopped")


@posix
def test_forks_in_the_middle_of_submitted_runs() -> None:
    """Children run the same graph, by hand and by their own queue; what was queued stays with the parent."""
    done = run(
        """
model = long(20)
counts = rlx.Graph("counts")
n = counts.state("n", (1,))
counts.update(n, n + 1.0)
counts.output(n * 1.0 + counts.input("x", (1,)), name="y")
counter = rlx.compile(counts, device="cpu")
want = model.run([X])[0]
one = np.ones(1, np.float32)

def child(futures, clone):
    for _ in range(2):
        assert np.array_equal(model.run([X])[0], want)
        assert np.array_equal(model.submit([X]).result()[0], want)
    assert [np.array_equal(y, want) for (y,) in model.run_many([[X]] * 3)] == [True] * 3
    assert np.array_equal(clone.submit([X]).result()[0], want)
    assert np.array_equal(model.clone().run([X])[0], want)
    assert len([counter.submit([one]).result() for _ in range(3)]) == 3
    try:
        assert np.array_equal(futures[-1].result()[0], want)  # it was done before
    except rlx.errors.ExecutionError as error:
        assert "submit it here again" in str(error)
    model.close()

clone = model.clone()
for number in range(3):
    futures = [model.submit([X]) for _ in range(4)] + [clone.submit([X]) for _ in range(2)]
    counter.submit([one])
    time.sleep(0.01 * number)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            child(futures, clone)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        sys.exit(0) if number % 2 else os._exit(0)  # both ways out
    for future in futures:
        assert np.array_equal(future.result()[0], want)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
model.sync()
assert counter.run([one])[0][0] == 4
say("fine")
"""
    )
    check(done, 0, "fine")


@posix
@pytest.mark.parametrize("begin", ["model.submit([X])", "threading.Thread(target=model.run, args=([X],)).start()"])
def test_a_fork_while_a_run_imports(tmp_path: Path, begin: str) -> None:
    """The child can import what a run was importing then, a submitted one or that of a thread."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.5)\nvalue = 3\n")
    done = run(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
begun = threading.Event()

def inside():
    begun.set()
    import slow_module

model = calling()
{begin}
begun.wait()
time.sleep(0.1)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    import slow_module
    os._exit(slow_module.value)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
say("fine")
"""
    )
    check(done, 0, "fine")


@posix
@pytest.mark.parametrize(
    "first, call",
    [
        ("model.submit([X]).result()", "model.submit([X]).result()"),
        ("rlx.jit", "rlx.jit(lambda x: np.tanh(x), device='cpu')(X)"),
    ],
)
def test_a_fork_while_a_thread_imports_a_part_of_rlx(first: str, call: str) -> None:
    """Parts are imported with the first use of them: the child can use them too."""
    done = run(
        f"""
model = long(1)
begun = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("rlx.runtime.run_queue", "rlx.trace.jit"):
            begun.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
threading.Thread(target=lambda: {first}).start()
begun.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    {call}
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
say("fine")
"""
    )
    check(done, 0, "fine")


@posix
def test_forks_while_threads_compile(tmp_path: Path, full: bool) -> None:
    """Children compile at once, and call the functions that threads of the parent were tracing and running."""
    done = run(
        f"""
options = {{"device": "cpu", "cache_dir": {str(tmp_path)!r}}}
ended, first = [], threading.Semaphore(0)

def fresh(number):
    # kernels that no cache has, some of which take LLVM long
    g = rlx.Graph("fresh")
    x = y = g.input("x", (16, 16))
    for n in range({10 if full else 3}):
        y = rlx.softmax(rlx.tanh(y * (number + n / 64)) + x)
    g.output(y, name="y")
    return rlx.compile(g, **options)

def compiles(number):
    while not ended:
        fresh(number)
        number += 1
        first.release()

slow = [True]
def function(x):
    if slow:
        time.sleep(0.3)
    for n in range({10 if full else 3}):
        x = np.tanh(x * (3 + len(x) + n / 64)) + x
    return x

traced = rlx.jit(function, **options)
Y = np.ones((2, 4), np.float32)
want = traced(Y)

def calls(number):
    while not ended:
        traced(Y)

def traces(number):
    while not ended:
        traced(np.ones((number, 4), np.float32))
        number += 1

jobs = (compiles, 1), (compiles, 1000), (calls, 0), (traces, 3)
threads = [threading.Thread(target=f, args=(n,), daemon=True) for f, n in jobs]
for thread in threads:
    thread.start()
for _ in range(2):
    first.acquire()
for number in range(5):
    time.sleep(0.03 * number)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        slow.clear()
        fresh(2000 + number)
        assert np.array_equal(traced(Y), want)
        traced(np.ones((5000, 4), np.float32))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
ended.append(True)
for thread in threads:
    thread.join()
say("fine")
"""
    )
    check(done, 0, "fine")


@posix
@pytest.mark.parametrize("late", [False, True])
def test_interrupts_while_the_process_is_forked(late: bool, tmp_path: Path) -> None:
    """Ctrl-C between what is done before a fork and after it, or as that begins: all threads compile as before."""
    # no Python code, and it looks for no signals; what is registered first is the last before a fork
    hook = """
import ctypes, functools, os
os.register_at_fork(before=functools.partial(ctypes.PyDLL(None)["raise"], 2))
"""
    done = run(
        f"""
def fresh(number):
    g = rlx.Graph("fresh")
    g.output(rlx.tanh(g.input("x", (16, 16)) * float(number)), name="y")
    return rlx.compile(g, device="cpu", cache_dir={str(tmp_path)!r})

fresh(1)
{hook if late else ""}
for number in range(3):
    try:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            fresh(20 + number)
            os._exit(3)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        pass
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    thread = threading.Thread(target=fresh, args=(10 + number,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    fresh(30 + number)
say("fine")
""",
        first="" if late else hook,
    )
    check(done, 0, "fine")


@posix
def test_a_fork_does_not_wait_for_an_import_that_runs_graphs(tmp_path: Path) -> None:
    """A module that is a server may be imported for ever."""
    (tmp_path / "server.py").write_text(
        "from __main__ import *\nwhile not ended:\n    model.run([X])\n    begun.set()\n"
    )
    done = run(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
model, ended, begun = long(1), [], threading.Event()
thread = threading.Thread(target=lambda: __import__("server"))
thread.start()
begun.wait()
start = time.monotonic()
pid = os.fork()
if pid == 0:
    os._exit(3)
assert time.monotonic() - start < 9
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
ended.append(True)
thread.join()
say("fine")
"""
    )
    check(done, 0, "fine")


@pytest.mark.parametrize(
    "end, status",
    [("", 0), ("sys.exit(3)", 3), ("raise SystemExit", 0), ("raise LookupError", 1), ("del model", 0)],
    ids=["return", "exit", "raise", "error", "unused"],
)
@pytest.mark.sample(2)
def test_the_interpreter_ends_after_what_was_submitted(end: str, status: int) -> None:
    done = run(
        f"""
model = long(20)
want = model.run([X])[0]
for n in range(4):
    model.submit([X]).add_done_callback(lambda f, n=n: say("done", n, np.array_equal(f.result()[0], want)))
{end}
"""
    )
    check(done, status, *(f"done {n} True" for n in range(4)))


@posix
def test_ctrl_c_that_nobody_catches_ends_after_the_run_that_has_begun() -> None:
    done = run(
        """
model = calling()
inside = lambda: until(lambda: futures[-1].cancelled())
futures = []
for _ in range(4):
    futures.append(model.submit([X]))
    futures[-1].add_done_callback(lambda f: say("cancelled" if f.cancelled() else "done"))
until(futures[0].running)
say("now")
time.sleep(1000)
""",
        interrupt_at="now",
    )
    assert "KeyboardInterrupt" in done.stderr
    check(done, -signal.SIGINT, "now", *["cancelled"] * 3, "done")


@posix
def test_interrupting_the_end() -> None:
    """Ctrl-C while the interpreter waits for submitted runs ends it after the one that has begun."""
    done = run(
        """
model = calling()

def inside():
    until(lambda: model._queue.closed)  # as the interpreter does before it waits
    say("now")
    until(lambda: futures[-1].cancelled())

futures = []
for _ in range(4):
    futures.append(model.submit([X]))
    futures[-1].add_done_callback(lambda f: say("cancelled" if f.cancelled() else "done"))
""",
        interrupt_at="now",
    )
    check(done, 0, "now", *["cancelled"] * 3, "done")


def test_a_daemon_that_never_ends_keeps_nobody() -> None:
    """What waits for its graph at exit is told, and the process ends."""
    done = run(
        """
def inside():
    say("inside")
    begun.set()
    time.sleep(1000)

begun = threading.Event()
model = calling()
threading.Thread(target=lambda: model.run([X]), daemon=True).start()
begun.wait()
model.submit([X]).add_done_callback(lambda f: say(type(f.exception()).__name__))
"""
    )
    check(done, 0, "inside", "BusyError")


def test_threads_that_outlive_the_main_one_get_their_results() -> None:
    """A thread that waits for a future when the main thread returns; daemons in the middle of runs end with it."""
    done = run(
        """
model = long(20)
want = model.run([X])[0]
clones = [model.clone() for _ in range(4)]

def forever(call):
    while True:
        call()

def waits():
    future = model.submit([X])
    time.sleep(0.2)
    later = model.submit([X])
    say(np.array_equal(future.result()[0], want) and np.array_equal(later.result()[0], want))

for call in (
    lambda: clones[0].run([X]), lambda: clones[1].run_slots(X), lambda: clones[2].submit([X]).result(),
    lambda: list(clones[3].run_many([[X]] * 10)),
):
    threading.Thread(target=forever, args=(call,), daemon=True).start()
threading.Thread(target=waits).start()
time.sleep(0.05)
"""
    )
    check(done, 0, "True")
