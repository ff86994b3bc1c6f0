"""Limits that the system enforces: under RLIMIT_AS a model loads and runs, or is refused before memory is taken.

Each case is a process of its own, because a limit can't be lifted again and because running out would kill it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.estimate.admit import AGAIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")

MIB = 1 << 20

CHILD = """
import json, resource, sys
import numpy as np, psutil, rlx
from rlx.errors import MemoryDeficit
path, cache, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
g = rlx.Graph("first")  # imports what a compile needs: the limit is about the model
g.output(rlx.relu(g.input("x", (4,))), "y")
rlx.compile(g, device="cpu", threads=1, cache_dir=cache)
limit = psutil.Process().memory_info().vms + room
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    model = rlx.load(path, device="cpu", threads=1, cache_dir=cache)
    x = np.ones((1024, 4096), np.float32)
    y = model.run([x])[0]
    print(json.dumps({"ran": float(y.sum())}))
except MemoryDeficit as error:
    print(json.dumps({"refused": str(error), "missing": error.missing_bytes, "budget": error.budget_bytes}))
"""


def network(path: Path) -> rlx.Graph:
    """Activations of 1024 x 4096: 16 MiB each, two of them at once."""
    g = rlx.Graph("wide")
    y = g.input("x", (1024, 4096))
    for n in range(4):
        y = rlx.softmax(y * float(n + 2))
    g.output(y.sum(1), "y")
    path.write_text(str(g))
    return g


def child(path: Path, cache: Path, room: int, code: str = CHILD) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(cache), str(room)],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"with room for {room} bytes: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("share, runs", [(0.3, False), (0.9, False), (1.0, True), (1.5, True)])
def test_what_fits_runs_and_what_does_not_is_refused(share: float, runs: bool, tmp_path: Path) -> None:
    """The limit leaves a share of what the estimate says this process still needs: never a crash, never a false yes."""
    path = tmp_path / "wide.rlx"
    found = rlx.estimate(network(path), "cpu", threads=1)
    needs = found.own.peak_bytes + AGAIN  # it has compiled before
    assert found.activation_bytes >= 32 * MIB
    got = child(path, tmp_path / "cache", int(share * needs) + (4 * MIB if runs else 0))  # the interpreter's own arenas
    assert ("ran" in got) == runs, got
    if not runs:
        assert "allowed by address space" in got["refused"]
        assert got["missing"] > 0


def test_a_compiler_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """In a process that has compiled nothing yet, a limit below what LLVM maps gives the deficit, no import error."""
    path = tmp_path / "wide.rlx"
    network(path)
    start = CHILD.index('g = rlx.Graph("first")')
    cold = CHILD[:start] + CHILD[CHILD.index("limit = psutil") :]
    got = child(path, tmp_path / "cache", 64 * MIB, cold)
    assert "'the compiler for cpu'" in got["refused"]
    assert "allowed by address space. Raise the limit" in got["refused"]


def test_the_soft_budget_refuses_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An absolute soft budget from outside holds for compiling, for growing an arena, and for clones."""
    g = rlx.Graph("open")
    g.output(rlx.softmax(g.input("x", (rlx.Dim("n"), 1024))), "y")
    model = rlx.compile(g, device="cpu")
    small = np.ones((4, 1024), np.float32)
    want = model.run([small])[0]
    monkeypatch.setenv("RLX_SOFT_MEMORY_BUDGET_BYTES", "1MiB")
    with pytest.raises(rlx.errors.MemoryDeficit, match="allowed by the soft budget of this process"):
        rlx.compile(g, device="cpu", dims={"n": 65536})
    with pytest.raises(rlx.errors.MemoryDeficit, match="soft budget"):
        model.run([np.ones((8192, 1024), np.float32)])
    assert np.array_equal(model.run([small])[0], want)  # nothing was changed
    with pytest.raises(rlx.errors.MemoryDeficit, match="soft budget"):
        model.clone().run([small])
    assert rlx.compile(g, device="cpu", over_budget="allow").run([small])[0].shape == (4, 1024)
    assert rlx.compile(g, device="cpu", over_budget="warn").run([small])[0].shape == (4, 1024)
    assert "soft budget" in caplog.text
    monkeypatch.setenv("RLX_SOFT_MEMORY_BUDGET_BYTES", "much")
    with pytest.raises(rlx.errors.OptionError, match="RLX_SOFT_MEMORY_BUDGET_BYTES='much'"):
        rlx.compile(g, device="cpu")


def test_a_session_estimates_with_its_options() -> None:
    g = rlx.Graph("g")
    g.output(rlx.relu(g.input("x", (rlx.Dim("n", 1, 64), 16))), "y")
    session = rlx.Session(device="cpu", dims={"n": 8}, threads=1)
    assert session.estimate(g, overhead=0).input_bytes == 8 * 16 * 4
    assert session.estimate(g, overhead=0, dims={"n": 4}).input_bytes == 4 * 16 * 4
