"""Memory goes back to the system: what close and trim release is seen in the resident set of the process."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.errors import ClosedError
from rlx.estimate.resident import resident_bytes
from rlx.runtime.memory import give_back

MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read as Linux counts it")


def network(rows: Any, width: int = 1024, layers: int = 8) -> rlx.Graph:
    """Layers of 4 MiB each."""
    g = rlx.Graph("network")
    x = g.input("x", (rows, width))
    for n in range(layers):
        w = np.full((width, width), 1 / width, np.float32)
        x = rlx.relu(x @ g.param(f"w{n}", (width, width), data=w))
    g.output(x, "y")
    return g


def measure_close() -> list[int]:
    """What the resident set grows by, in bytes: with a model that has run, and after it is closed."""
    x = np.ones((2048, 1024), np.float32)
    with rlx.compile(network(2048, layers=1), device="cpu") as first:  # loads the compiler and all code
        first.run_slots(x)
    give_back()
    before = resident_bytes()
    model = rlx.compile(network(2048), device="cpu")
    model.run_slots(x)
    grown = resident_bytes() - before
    model.close()
    left = resident_bytes() - before
    model.close()  # again: nothing happens
    return [grown, left]


@linux
def test_close_gives_weights_and_arena_back() -> None:
    grown, left = in_fresh_process(measure_close)
    assert grown >= 32 * MIB + 8 * MIB
    assert left <= 4 * MIB


def measure_trim() -> list[int]:
    """What the resident set grows by, in bytes: with a long run, and after `trim`; and what `trim` says."""
    model = rlx.compile(network(rlx.Dim("n"), layers=2), device="cpu")
    want = model.run([np.ones((3, 1024), np.float32)])[0]
    model.trim()
    before = resident_bytes()
    model.run_slots(np.ones((16384, 1024), np.float32))
    grown = resident_bytes() - before
    freed = model.trim()
    left = resident_bytes() - before
    assert model.plan is None
    assert np.array_equal(model.run([np.ones((3, 1024), np.float32)])[0], want)
    assert len(model.arena) < MIB
    return [grown, left, freed]


@linux
def test_trim_gives_back_what_a_long_run_took() -> None:
    """The arena of an open dim grows with the longest run; trim lets it go, and the next run is right again."""
    grown, left, freed = in_fresh_process(measure_trim)
    assert grown >= 60 * MIB
    assert freed >= 60 * MIB
    assert left <= 4 * MIB


def test_trim_keeps_the_plan_of_bounded_dims_and_views_that_are_held() -> None:
    model = rlx.compile(network(rlx.Dim("n", 1, 8), 64, 2), device="cpu")
    x = np.ones((4, 64), np.float32)
    views = model.run_views([x])
    want = np.array(views["y"])
    model.trim()
    assert model.plan is not None
    assert np.array_equal(views["y"], want)  # their memory is their own until they are dropped
    assert len(model.arena) == 0
    with pytest.raises(rlx.errors.OptionError, match="no run yet"):
        model.read_output_row(0, 0)
    assert np.array_equal(model.run_slots(x)[0], want)


def test_a_closed_graph_says_so_in_every_call() -> None:
    model = rlx.compile(network(4, 64, 2), device="cpu")
    x = np.ones((4, 64), np.float32)
    slots = model.run_slots
    slots(x)
    model.close()
    assert model.closed
    assert model.inputs[0].shape == (4, 64)  # what it took and gave can still be read
    calls: list[Any] = [
        lambda: model.run([x]), lambda: model(x), lambda: model.run_views([x]), lambda: model.run_slots(x),
        lambda: slots(x), lambda: model.set_param("w0", np.ones((64, 64), np.float32)), model.clone, model.trim,
        lambda: model.plan, lambda: model.arena, lambda: model.profile([x]), lambda: model.read_output_row(0, 0),
        model.explain, lambda: model.capabilities, lambda: model.needs,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError, match="is closed"):
            call()


def test_clones_outlive_the_one_that_is_closed() -> None:
    model = rlx.compile(network(4, 64, 2), device="cpu")
    x = np.ones((4, 64), np.float32)
    want = model.run([x])[0]
    other = model.clone()
    model.close()
    assert np.array_equal(other.run([x])[0], want)
    other.set_param("w0", np.zeros((64, 64), np.float32))
    assert not other.run([x])[0].any()
    other.close()


def test_the_block_closes_it_also_after_an_error() -> None:
    with pytest.raises(RuntimeError), rlx.compile(network(4, 64, 1), device="cpu") as model:
        raise RuntimeError
    assert model.closed
    with rlx.compile(network(4, 64, 1), device="reference") as reference:
        reference.run([np.ones((4, 64), np.float32)])
    with pytest.raises(ClosedError):
        reference.run([np.ones((4, 64), np.float32)])


def test_closing_while_it_runs_is_refused_or_waits_its_turn() -> None:
    """A run in another thread is never pulled the memory from under."""
    model = rlx.compile(network(256, 512, 6), device="cpu", threads=1)
    x = np.ones((256, 512), np.float32)
    want = model.run([x])[0]
    results: list[Any] = []

    def work() -> None:
        try:
            while len(results) < 200:
                results.append(np.array_equal(model.run([x])[0], want))
        except (ClosedError, rlx.errors.BusyError) as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not model.closed:
        try:
            model.close()
        except rlx.errors.BusyError:
            continue
    thread.join()
    assert all(r is True or isinstance(r, ClosedError | rlx.errors.BusyError) for r in results)


def measure_first_run() -> int:
    """Predicted less measured bytes of a model that is large beside everything else."""
    rlx.compile(network(8, 64, 1), device="cpu").run([np.ones((8, 64), np.float32)])
    give_back()
    model = rlx.compile(network(4096, layers=4), device="cpu", threads=1)
    memory = model.memory
    assert memory is not None
    assert memory.predicted is not None
    assert memory.parts["activation"] == memory.predicted.activation_bytes == 2 * 4096 * 1024 * 4
    model.run([np.ones((4096, 1024), np.float32)])
    assert memory.residual is not None
    return memory.residual


@linux
def test_predicted_and_measured_differ_by_little() -> None:
    results = 4096 * 1024 * 4  # two sets of them are predicted, as a loop has, and the first run makes one
    assert -8 * MIB <= in_fresh_process(measure_first_run) - results <= 24 * MIB


def test_predicted_and_measured_are_kept() -> None:
    """From the first run on, and after the graph is closed."""
    model = rlx.compile(network(64, 64, 1), device="cpu")
    memory = model.memory
    assert memory is not None
    assert memory.measured is memory.residual is None
    model.run([np.ones((64, 64), np.float32)])
    first = memory.measured
    assert first is not None
    assert memory.predicted_bytes is not None
    assert memory.residual == memory.predicted_bytes - first
    model.run([np.zeros((64, 64), np.float32)])
    assert memory.measured == first
    assert memory.to_dict()["residual_bytes"] == memory.residual
    assert "residual" in str(memory)
    model.close()
    assert model.memory is not None
    assert (str(model.memory), model.memory.to_dict()) == (str(memory), memory.to_dict())
