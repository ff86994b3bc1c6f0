"""What benchmarks and tools say to wrong arguments, and to --help, before they measure or write anything."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.importers.onnx.mapping import op_table

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
FILES = [path for folder in ("benchmarks", "tools") for path in sorted((ROOT / folder).glob("*.py"))]
SCRIPTS = [path for path in FILES if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", ["arenas", "artifact", "compare", "estimate"])
def test_a_model_that_is_not_there(name: str) -> None:
    """A word that is in no name is an error with the names that there are, not an empty table."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--only", "abacus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    assert "has abacus in its name; there are " in done.stderr
    assert "basic-pitch" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_is_printed_and_nothing_done(script: Path, tmp_path: Path) -> None:
    """--help says what the script is for; no other file of the tree is written, and none where it was called."""
    docs = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert " ".join((ast.get_docstring(ast.parse(script.read_text())) or "none").split())[:40] in " ".join(
        done.stdout.split()
    )
    assert docs == {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}
    assert not list(tmp_path.iterdir())


def test_cliffs_measure_what_they_are_asked_to(tmp_path: Path) -> None:
    """Each point has both times; the report has what is slow, and what jumps beside a neighbour."""
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "cliffs.py"), "--only", "Neg", "--minutes", "0.02"]
    done = subprocess.run([*command, "--json", str(rows)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(rows.read_text())
    assert {row["op"] for row in found} == {"Neg"}
    assert all(row["ours"] > 0 and row["ratio"] > 0 for row in found)
    assert found[0]["peer"] == "onnxruntime"
    usual, slower = ({**found[0], "ours": ours, "theirs": 1e-3, "ratio": 1e-3 / ours} for ours in (1e-3, 4e-3))
    slower["values"] = {**usual["values"], "size": 4 * usual["values"]["size"]}
    rows.write_text(json.dumps([usual, slower]))
    done = subprocess.run([*command, "--read", str(rows)], capture_output=True, text=True, timeout=300, check=True)
    name, size = usual["op"], usual["values"]["size"]
    assert f"| {name} | 1 of 2 points | size {4 * size} | 4 | 1 | onnxruntime | 0.25 | not looked into |" in done.stdout
    assert f"| {name} | size | {size} | {4 * size} | 4.0 | 1.0 |" in done.stdout


def test_every_imported_op_has_cases_of_cliffs() -> None:
    """Or a reason why it has none; nothing has both."""
    program = "from cliff_cases import CASES, LEFT_OUT; print(*CASES, '|', *LEFT_OUT)"
    command = [sys.executable, "-c", program]
    text = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=BENCHMARKS).stdout
    cases, left_out = ({name.rsplit(".", 1)[-1] for name in part.split()} for part in text.split("|"))
    imported = {name for _, name in op_table()}
    assert cases | left_out >= imported
    assert not cases & left_out
