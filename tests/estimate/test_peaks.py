"""Peaks: a budget means the same bytes wherever it is given, the device's own count once, results count twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from fresh_process import in_fresh_process

import rlx
from rlx.cli.main import cli
from rlx.errors import MemoryDeficit
from rlx.estimate.calibrate import Overhead
from rlx.estimate.memory import MemoryEstimate
from rlx.estimate.system import COMPILED, RESTORED

MIB = 1 << 20


def save_model(path: Path) -> Path:
    """Two products; weights at odd places of the file, so that they are copied out of it."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2)]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w0"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["r"]),
        onnx.helper.make_node("MatMul", ["r", "w1"], ["y"]),
    ]
    leaves = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 256]) for name in "xy"]
    stored = [onnx.numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(weights)]
    graph = onnx.helper.make_graph(nodes, "g", leaves[:1], leaves[1:], stored)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("short", [0, 1])
def test_a_budget_is_the_same_bytes_everywhere(short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fits`, `require`, `rlx.load`, and both commands agree to the byte, compiled here and from the cache."""
    from rlx.estimate import api

    monkeypatch.setattr(api, "overhead_of", lambda device: Overhead(100 * MIB, cached=10 * MIB))
    path = save_model(tmp_path / "m.onnx")
    dims = {"n": (1, 64)}
    found = rlx.estimate(path, "cpu", dims=dims)
    budget = found.own.peak_bytes - short
    assert found.peak_bytes >= 100 * MIB > budget
    assert found.fits(budget) is not short
    flags = [str(path), "--dims", "n=1:64", "--budget", str(budget), "--device", "cpu"]
    for command in (["estimate", *flags], ["run", *flags]):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == short, done.output
    for _ in range(2):  # the second time from the cache
        if short:
            with pytest.raises(MemoryDeficit) as caught:
                rlx.load(path, device="cpu", dims=dims, budget=budget, cache_dir=tmp_path)
            assert caught.value.peak_bytes == found.own.peak_bytes
            with pytest.raises(MemoryDeficit):
                found.require(budget)
            rlx.load(path, device="cpu", dims=dims, cache_dir=tmp_path)
        else:
            rlx.load(path, device="cpu", dims=dims, budget=budget, cache_dir=tmp_path)


def test_both_figures_are_given() -> None:
    """Compiled here, with the compiler and the sources of the code; from the cache, with neither, nor any copies."""
    found = MemoryEstimate(
        "m", "cpu", weight_bytes=50, activation_bytes=7, code_bytes=20, overhead_bytes=1000, loading_copy_bytes=90,
        source_bytes=15, cached_overhead_bytes=100,
    )  # fmt: skip
    assert found.peak_bytes == 1000 + 50 + 20 + 90
    assert found.cached_peak_bytes == 100 + 50 + 7 + 5
    assert found.own.peak_bytes == 50 + 20 + 90
    assert "peak from cache" in str(found)
    assert found.to_dict()["cached_peak_bytes"] == found.cached_peak_bytes


def test_what_a_process_has_is_not_counted_again() -> None:
    """The overhead is that of the first graph compiled; stored code brings no compiler."""
    g = rlx.Graph("small")
    g.output(rlx.relu(g.input("x", (4,))), "y")
    rlx.compile(g, device="cpu")
    assert "cpu" in COMPILED
    model = rlx.compile(g, device="cpu")
    assert model.memory is not None
    assert model.memory.predicted is not None
    assert model.memory.predicted.overhead_bytes == 0
    assert model.memory.predicted_bytes == model.memory.predicted.own.peak_bytes + model.memory.predicted.file_bytes


def test_overhead_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Overhead(100, per_node=1, compiling=50, address=300, address_compiling=70, cached=10)
    monkeypatch.setattr("rlx.estimate.calibrate.COMPILED", set())
    monkeypatch.setattr("rlx.estimate.calibrate.RESTORED", {"cpu"})
    assert whole.left("gpu") == whole
    assert (whole.left("cpu").fixed, whole.left("cpu").cached) == (100, 0)
    monkeypatch.setattr("rlx.estimate.calibrate.COMPILED", {"cpu"})
    left = whole.left("cpu")
    assert (left.fixed, left.compiling, left.address, left.cached, left.per_node) == (0, 0, 0, 0, 1)


def test_stored_code_does_not_count_as_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("small")
    g.output(rlx.relu(g.input("x", (4,))), "y")
    rlx.compile(g, device="cpu").save(tmp_path / "m.rlxart")
    monkeypatch.setattr("rlx.runtime.memory.COMPILED", compiled := set[str]())
    rlx.load(tmp_path / "m.rlxart", device="cpu")
    assert not compiled
    assert "cpu" in RESTORED


def private_bytes() -> int:
    """The resident memory of this process that is no file's."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def measure_loop(rows: int, kind: str) -> list[int]:
    """The most that four runs grow the process by, what was predicted, and the bytes of results, of 4 KiB a row."""
    g = rlx.Graph("results")
    h = rlx.exp(g.input("x", (rows, 1024)))
    g.output(rlx.relu(h), "y")
    if kind == "two":
        g.output(rlx.softmax(h) @ g.constant(np.eye(1024, dtype=np.float32)), "z")
    model = rlx.compile(g, device="cpu", threads=1)
    x = np.zeros((rows, 1024), np.float32)
    before = private_bytes()
    most = 0
    for _ in range(4):
        y = model.run([x])
        most = max(most, private_bytes() - before)
    assert model.memory is not None
    parts = model.memory.parts
    own = sum(parts[name] for name in ("activation", "output", "weight", "workspace"))
    return [most, own, len(y) * y[0].nbytes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("rows", [512, 4096, 10240])
def test_results_in_a_loop_are_counted(rows: int, kind: str) -> None:
    """`y = model.run(x)` has the last results still when it makes the next: 2 to 80 MiB of them, in a fresh process."""
    real, predicted, results = in_fresh_process(measure_loop, rows, kind)
    assert real <= predicted + MIB  # of Python's own
    assert predicted <= real + max(results // 2, 8 * MIB)


def test_a_probe_keeps_nothing_in_the_cache_of_the_user(tmp_path: Path) -> None:
    """On every platform: the folder is named to the process, not by a variable that only some systems look at."""
    users, own = tmp_path / "users", tmp_path / "own"
    users.mkdir()
    code = (
        f"import rlx, numpy\nfrom rlx.disk import cache_folder, keep_in\nkeep_in({str(own)!r})\n"
        "g = rlx.Graph('g')\ng.output(rlx.relu(g.input('x', (4,))), 'y')\nrlx.compile(g, device='cpu')\n"
        "print(cache_folder())"
    )
    names = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME")
    env = {**os.environ, **dict.fromkeys(names, str(users))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == str(own)
    assert list((own / "objects").iterdir())
    assert not [p for p in users.rglob("*") if p.is_file()]
