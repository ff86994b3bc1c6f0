"""Compiled graphs travel to other processes: by pickle, to processes that are spawned, to pools, loaders and actors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import pickletools
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ModelFormatError

DIGITS = rlx.demo.path("digits")
X = np.load(rlx.demo.path("digits-images"))["images"][:5, None].astype(np.float32)
OPTIONS: dict[str, Any] = {"device": "cpu", "dims": {"batch": (1, 8)}, "threads": 1}


def through(model: rlx.CompiledGraph) -> rlx.CompiledGraph:
    made: rlx.CompiledGraph = pickle.loads(pickle.dumps(model))
    return made


def run(model: rlx.CompiledGraph) -> Any:
    return model.run([X])[0]


def layer() -> rlx.Graph:
    g = rlx.Graph("layer")
    x = g.input("x", (rlx.Dim("n", 1, 8), 20))
    g.output(x @ g.param("w", data=np.random.default_rng(0).standard_normal((20, 20)).astype(np.float32)), "y")
    return g


def test_a_model_of_a_file_travels_as_its_path(tmp_path: Path) -> None:
    path = tmp_path / "digits.onnx"
    shutil.copy(DIGITS, path)
    model = rlx.load(path, **OPTIONS)
    data = pickle.dumps(model)
    assert len(data) < 1000 < path.stat().st_size
    made = pickle.loads(data)
    np.testing.assert_array_equal(run(made), run(model))
    assert (made.inputs, made.outputs, made.device) == (model.inputs, model.outputs, "cpu")
    path.write_bytes(path.read_bytes())
    with pytest.raises(ModelFormatError, match="has changed since"):
        pickle.loads(data)
    path.unlink()
    with pytest.raises(ModelFormatError, match="of a model of this file"):
        pickle.loads(data)


def test_a_graph_travels_with_its_weights() -> None:
    model = rlx.compile(layer(), device="cpu", threads=1)
    x = np.ones((3, 20), np.float32)
    expected = model.run([x])[0]
    np.testing.assert_array_equal(through(model).run([x])[0], expected)
    np.testing.assert_array_equal(through(through(model)).run([x])[0], expected)


@pytest.mark.parametrize("ran", [False, True])
def test_params_that_were_set_travel(ran: bool) -> None:
    """Also where only their packed form is left."""
    models = [rlx.compile(layer(), device="cpu"), rlx.load(DIGITS, **OPTIONS)]
    inputs = [np.ones((3, 20), np.float32), X]
    for model, x in zip(models, inputs, strict=True):
        name = model.params[0].name
        shape = model.params[0].shape
        model.set_param(name, np.full(shape, 0.125, np.float32))
        before = model.run([x])[0] if ran else None
        made = through(model)
        np.testing.assert_array_equal(made.run([x])[0], model.run([x])[0] if before is None else before)


def test_states_bound_inputs_and_feeds_travel() -> None:
    g = rlx.Graph("average")
    mean, x = g.input("mean", (3,)), g.input("x", (3,))
    total = g.state("total", (3,), initial=np.zeros(3, np.float32))
    g.update(total, total + x)
    g.output(mean * 0.5 + x * 0.5, name="next")
    g.output(total * 1.0, name="so_far")
    model = rlx.compile(g, device="cpu")
    model.states.bind("mean", np.zeros(3, np.float32))
    model.states["mean"].feed("next")
    one = {"x": np.ones(3, np.float32)}
    model.run(one)
    made = through(model)
    for _ in range(3):
        for found, expected in zip(made.run(one), model.run(one), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_pickle_names_nothing_but_two_functions() -> None:
    """Whoever loads it needs no class but builtin ones: what is imported is one function of `rlx.runtime.pickled`."""
    for model in (rlx.load(DIGITS, **OPTIONS), rlx.compile(layer(), device="cpu", cache_dir=Path("/tmp/x"))):
        names: list[Any] = []
        strings: list[Any] = []
        for opcode, argument, _ in pickletools.genops(pickle.dumps(model)):
            if "UNICODE" in opcode.name:
                strings.append(argument)
            if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                names.append(tuple(strings[-2:]))
        assert names in ([("rlx.runtime.pickled", "from_file")], [("rlx.runtime.pickled", "from_artifact")])


def test_spawned_processes_take_models() -> None:
    model = rlx.load(DIGITS, **OPTIONS)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        np.testing.assert_array_equal(pool.submit(run, model).result(60), run(model))


@pytest.mark.parametrize("device", ["reference", "interp"])
def test_devices_without_stored_code(device: str) -> None:
    model = rlx.compile(layer(), device=device)
    x = np.ones((2, 20), np.float32)
    made = through(model)
    assert made.device == device
    np.testing.assert_array_equal(made.run([x])[0], model.run([x])[0])


def test_joblib_processes_take_models() -> None:
    joblib = pytest.importorskip("joblib")
    model = rlx.load(DIGITS, **OPTIONS)
    (found,) = joblib.Parallel(2)([joblib.delayed(run)(model)])
    np.testing.assert_array_equal(found, run(model))


class Labels:
    """A data set, as PyTorch's loaders take them, whose rows are made by a model in the worker's process."""

    def __init__(self, model: rlx.CompiledGraph) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> tuple[int, Any]:
        return os.getpid(), self.model.run([X[row : row + 1]])[0][0]


def changed_layer() -> tuple[rlx.CompiledGraph, Any]:
    """A model with a weight that was set after the load, and its result."""
    model = rlx.load(DIGITS, **OPTIONS)
    name, shape = model.params[0].name, model.params[0].shape
    model.set_param(name, np.full(shape, 0.125, np.float32))
    return model, run(model)


def test_spawned_workers_of_a_data_loader_run_models() -> None:
    data = pytest.importorskip("torch.utils.data")
    model, expected = changed_layer()
    loader = data.DataLoader(Labels(model), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    found = list(loader)
    np.testing.assert_array_equal(np.concatenate([rows.numpy() for _, rows in found]), expected)
    workers = {int(pid) for pids, _ in found for pid in pids}
    assert os.getpid() not in workers


def test_pools_of_processes_and_threads_run_models() -> None:
    """`map` sends the model with each call; params that were set travel, and threads share one that waits its turn."""
    model, expected = changed_layer()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        for found in processes.map(run, [model] * 4, timeout=60):
            np.testing.assert_array_equal(found, expected)
    shared = rlx.load(DIGITS, **OPTIONS, busy="wait")
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(run, [shared] * 16, timeout=60):
            np.testing.assert_array_equal(found, run(rlx.load(DIGITS, **OPTIONS)))


@pytest.mark.filterwarnings("ignore")
def test_actors_of_ray_run_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    model, expected = changed_layer()

    class Actor:
        def __init__(self, model: Any) -> None:
            self.model = model

        def run(self, x: Any) -> Any:
            return os.getpid(), self.model.run([x])[0]

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(Actor).remote(model)
        for _ in range(2):
            pid, found = ray.get(actor.run.remote(X), timeout=120)
            np.testing.assert_array_equal(found, expected)
            assert pid != os.getpid()
    finally:
        ray.shutdown()
