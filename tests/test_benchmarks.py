"""What benchmarks and tools say to wrong arguments, and to --help, before they measure or write anything."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = [path for folder in ("benchmarks", "tools") for path in sorted((ROOT / folder).glob("*.py"))]


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
