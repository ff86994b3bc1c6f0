"""Many threads over clones and sessions: results as in a serial run, the lock let go, and memory for arenas only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.errors import BusyError
from rlx.estimate.resident import resident_bytes

Array = np.ndarray[Any, Any]
THREADS = 8
RUNS = 1000


def running_mean(**options: Any) -> rlx.CompiledGraph:
    """tanh(x @ w) + a state that each run moves: what a run gives depends on all before it."""
    g = rlx.Graph("running mean")
    x, w, mean = g.input("x", (rlx.Dim("n", 1, 16), 32)), g.param("w", (32, 32)), g.state("mean", (32,))
    y = rlx.tanh(x @ w) + mean
    g.update(mean, mean * 0.75 + y.mean(axes=0) * 0.25)
    g.output(y, name="y")
    model = rlx.compile(g, device="cpu", **options)
    model.set_param("w", np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32) / 6)
    return model


def inputs(seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, 32)).astype(np.float32) for n in (1, 16, 3, 7, 16)]


def digest(model: rlx.CompiledGraph, seed: int, call: Callable[..., Any]) -> tuple[bytes, bytes]:
    """What RUNS runs give, and the state after them, to the bit."""
    given = inputs(seed)
    total = np.zeros((16, 32), np.float32)
    for number in range(RUNS):
        x = given[number // 50 % len(given)]
        total[: len(x)] = total[: len(x)] * np.float32(0.5) + call(model, x)
    return total.tobytes(), model.states["mean"].read().tobytes()


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model.run([x])[0],
        lambda model, x: model.run_slots(x)[0],
        lambda model, x: model.submit([x]).result()[0],
    ],
    ids=["run", "run_slots", "submit"],
)
@pytest.mark.sample(2)
def test_a_clone_for_each_thread(call: Callable[..., Any], together: Callable[..., None]) -> None:
    """8 threads of 1,000 runs each, on clones that share weights and workers: bit for bit what serial runs give."""
    model = running_mean(threads=2)
    model.run([inputs(0)[0]])
    wants = [digest(model.clone(), seed, call) for seed in range(THREADS)]
    clones = [model.clone() for _ in range(THREADS)]
    got: dict[int, Any] = {}
    together(*(lambda s=s: got.update({s: digest(clones[s], s, call)}) for s in range(THREADS)))  # type: ignore[misc]
    assert [got[seed] for seed in range(THREADS)] == wants


@pytest.mark.parametrize("busy", ["wait", "error"])
def test_all_threads_on_all_clones(busy: str, together: Callable[..., None]) -> None:
    """8 threads take turns on 8 clones, 1,000 runs each: every result is right, or was refused where that was asked."""
    g = rlx.Graph("product")
    x, w = g.input("x", (rlx.Dim("n", 1, 16), 32)), g.param("w", (32, 32), data=np.eye(32, dtype=np.float32))
    g.output(rlx.tanh(x @ w) * 3.0, name="y")
    model = rlx.compile(g, device="cpu", threads=2, busy=busy)
    wants = [[model.run([x])[0] for x in inputs(seed)] for seed in range(THREADS)]
    clones = [model.clone() for _ in range(THREADS)]
    done = [0] * THREADS

    def job(seed: int) -> None:
        given = inputs(seed)
        for number in range(RUNS):
            which = number % len(given)
            try:
                (got,) = clones[(seed + number) % THREADS].run([given[which]])
            except BusyError:
                assert busy == "error"
                continue
            assert np.array_equal(got, wants[seed][which])
            done[seed] += 1

    together(*(lambda s=s: job(s) for s in range(THREADS)))  # type: ignore[misc]
    if busy == "wait":
        assert done == [RUNS] * THREADS
    assert all(done)


def script(code: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_other_threads_go_on_during_a_run() -> None:
    """A run that ends when another Python thread has written to its input, which is read where it lies."""
    script("""
import threading
import numpy as np, rlx
from rlx.ops.control import While

cond, body = rlx.Graph("cond"), rlx.Graph("body")
for region in (cond, body):
    region.input("n", (), "i64")
    region.input("stop", (1,))
cond.output(rlx.less(cond.inputs[1].sum() * 1.0, cond.constant(np.float32(1))))
body.output(body.inputs[0] + 1)
g = rlx.Graph("until")
(rounds,) = g.add(While(1), g.constant(np.array(0)), g.input("stop", (1,)), regions=[cond, body])
g.output(rounds, name="rounds")
model = rlx.compile(g, device="cpu", threads=1)
stop = np.zeros(1, np.float32)
threading.Timer(0.2, lambda: stop.fill(1)).start()
assert model.run([stop])[0] > 0
""")


def measure_sessions() -> list[int]:
    """The bytes of an arena, and what a second session and then a clone grow the resident set by."""
    registry = rlx.WeightRegistry()
    for n in range(8):
        registry.add(f"w{n}", np.full((1024, 1024), 1e-3, np.float32))
    data = np.ones((2048, 1024), np.float32)

    def session() -> rlx.CompiledGraph:
        g = rlx.Graph()
        x = g.input("x", data.shape)
        for n in range(8):
            x = rlx.relu(rlx.matmul(x, g.param(f"w{n}", (1024, 1024))))
        g.output(x)
        return rlx.Session(device="cpu", threads=1, cache=False, registry=registry).compile(g)

    first = session()
    first.run_slots(data)
    sizes = [resident_bytes()]
    second = session()
    second.run_slots(data)
    sizes.append(resident_bytes())
    third = second.clone()
    third.run_slots(data)
    sizes.append(resident_bytes())
    assert first.plan is not None
    return [first.plan.arena, sizes[1] - sizes[0], sizes[2] - sizes[1]]


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read as Linux counts it")
def test_sessions_and_clones_over_one_registry_take_arenas_only() -> None:
    """A second session and a clone over 32 MiB of weights grow the process by their arenas of 16 MiB."""
    arena, second, clone = in_fresh_process(measure_sessions)
    assert arena == 2 * 2048 * 1024 * 4
    for grown in (second, clone):
        assert grown < arena + (4 << 20), "weights are counted again"
