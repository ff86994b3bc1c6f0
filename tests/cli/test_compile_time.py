"""`rlx explain --compile-time` says what a first compile did, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlx
from rlx.backends.cpu.jit import compile as jit
from rlx.cli.main import cli
from rlx.code_times import noted

LAYERS = 5


def saved(folder: Path) -> Path:
    """A graph of equal layers as text."""
    graph = rlx.Graph("layers")
    x = graph.input("x", (24, 24))
    for i in range(LAYERS):
        x = rlx.softmax(rlx.matmul(x, graph.input(f"w{i}", (24, 24))))
    graph.output(x)
    path = folder / "layers.rlx"
    path.write_text(str(graph))
    return path


def test_counts_are_of_the_kernels_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is made or like another; each function was compiled or came with rlx, and once."""
    monkeypatch.setattr(jit, "loaded", {})  # code of earlier tests
    asked = ["explain", str(saved(tmp_path)), "--compile-time", "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["kernels"] == len(facts["emitted"]) + facts["alike"]
    assert facts["alike"] >= LAYERS - 1
    own = [name for module in facts["modules"] for name in module["functions"]]
    assert len(own) == len(set(own))
    assert not set(own) & set(facts["came"])
    assert {name for kernel in facts["emitted"] for name in kernel["functions"]} <= {*own, *facts["came"]}
    assert {"read", "passes", "plan", "code"} <= facts["stages"].keys()
    assert all({"parse", "code"} <= module["seconds"].keys() for module in facts["modules"])
    assert str(facts["kernels"]) in facts["text"]


def test_a_second_compile_of_this_process_has_nothing_to_do(tmp_path: Path) -> None:
    """Code that is loaded is neither compiled nor read."""
    graph = rlx.Graph("once")
    graph.output(rlx.tanh(graph.input("x", (31,))))
    first = rlx.compile(graph, device="cpu", cache=False)
    with noted() as times:
        rlx.compile(graph, device="cpu", cache=False)
    assert not times.modules
    assert not times.came
    assert not times.kept
    first.close()
