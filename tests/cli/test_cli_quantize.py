"""`rlx quantize`: what it prints, its JSON, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rlx.cli.main import cli
from rlx.demo import DIGITS, Digits


def run(*args: object) -> Result:
    result = CliRunner().invoke(cli, ["quantize", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """An .npz of pictures of digits."""
    np.savez(tmp_path / "images.npz", allow_pickle=False, image=Digits.load().images[:64])
    return tmp_path / "images.npz"


def test_the_report(inputs: Path, tmp_path: Path) -> None:
    """Weights before and after, the errors of tensors and outputs; the file is there."""
    done = run(DIGITS, tmp_path / "o.onnx", "--type", "int8", "--activations", "u8", "--inputs", inputs)
    assert done.exit_code == 0, done.output
    assert "weights " in done.stdout
    assert "rounding " in done.stdout
    assert "top-1 agrees in " in done.stdout
    assert (tmp_path / "o.onnx").stat().st_size < Path(DIGITS).stat().st_size
    facts = json.loads(run(DIGITS, tmp_path / "o.onnx", "--type", "int8", "--json").stdout)
    rounded = [t for t in facts["tensors"] if t["rms"] is not None]
    assert run(DIGITS, tmp_path / "o.onnx", "--type", "int8", "-v").stdout.count("rounding ") == len(rounded) > 0


def test_a_dry_run(tmp_path: Path) -> None:
    """Nothing is written, and the size is said."""
    done = run(DIGITS, tmp_path / "o.onnx", "--type", "f16", "--dry-run", "--json")
    facts = json.loads(done.stdout)
    assert facts["written"] == 0
    assert 0 < facts["bytes_after"] < facts["bytes_before"]
    assert not (tmp_path / "o.onnx").exists()


def test_exit_statuses(inputs: Path, tmp_path: Path) -> None:
    """1 for what can't be done, 2 for wrong usage; one message, no file."""
    for args, status, message in (
        ((DIGITS, tmp_path / "o.gguf"), 1, "must end in .onnx"),
        ((DIGITS, DIGITS, "--type", "f16"), 1, "is what is read"),
        ((DIGITS, tmp_path / "none" / "o.onnx", "--type", "f16"), 1, "can't be written: there is no folder"),
        ((DIGITS, tmp_path / "o.onnx", "--type", "q7"), 2, "q7"),
        ((DIGITS, tmp_path / "o.onnx", "--tensor", "x"), 2, "PATTERN=TYPE"),
        ((DIGITS, tmp_path / "o.onnx", "--percentile", "20"), 2, "percentile"),
        ((DIGITS, tmp_path / "o.onnx", "--type", "int8", "--activations", "u8"), 1, "needs inputs="),
        ((DIGITS, tmp_path / "o.onnx", "--keep", "nothing"), 1, "no tensor 'nothing'"),
        ((tmp_path / "no.onnx", tmp_path / "o.onnx"), 1, "can't be opened"),
        ((inputs, tmp_path / "o.onnx"), 1, "expected an ONNX, GGUF or safetensors"),
    ):
        done = run(*args)
        assert done.exit_code == status, done.output
        assert message in done.stderr
    assert not (tmp_path / "o.onnx").exists()
