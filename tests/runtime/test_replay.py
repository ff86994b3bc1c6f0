"""Recording runs and replaying them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.demo import DIGITS
from rlx.errors import ModelFormatError, OptionError


def doubled(dtype: str, factor: float = 2.0) -> rlx.CompiledGraph:
    g = rlx.Graph("doubled")
    x = g.input("x", (rlx.Dim("n", 1, 8),), dtype)
    g.output(x * g.constant(np.array(factor, x.dtype.numpy)), name="y")
    return rlx.compile(g, device="cpu")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_replay(dtype: str, tmp_path: Path) -> None:
    """Equal for the same model, at each shape; a model that computes something else is told by run and output."""
    model, path = doubled(dtype), tmp_path / "runs.npz"
    kind = model.inputs[0].dtype.numpy
    with model.record(path) as recorder:
        for n in (3, 5):
            recorder.run([np.arange(n).astype(kind)])
    assert rlx.replay(model, path) == rlx.replay(doubled(dtype), path)
    assert rlx.replay(model, path).ok
    assert rlx.replay(doubled(dtype, 3.0), path).differing == ((0, "y"), (1, "y"))


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(ModelFormatError, match="not a recording"):
        rlx.replay(doubled("f32"), tmp_path / "text")
    with doubled("f32").record(tmp_path / "empty"):
        pass
    with pytest.raises(OptionError, match="no runs"):
        rlx.replay(doubled("f32"), tmp_path / "empty")


def test_command(tmp_path: Path) -> None:
    model = rlx.load(DIGITS, device="cpu")
    with model.record(tmp_path / "runs.npz") as recorder:
        recorder.run([np.ones((2, 1, 8, 8), np.float32)])
    result = CliRunner().invoke(cli, ["run", str(DIGITS), "--device", "cpu", "--replay", str(tmp_path / "runs.npz")])
    assert result.exit_code == 0, result.output
    assert "0 outputs differ" in result.output
