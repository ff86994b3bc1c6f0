"""What the benchmarks say to wrong arguments, before they measure anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["arenas", "artifact", "compare", "estimate"])
def test_a_model_that_is_not_there(name: str) -> None:
    """A word that is in no name is an error with the names that there are, not an empty table."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--only", "abacus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    assert "has abacus in its name; there are " in done.stderr
    assert "basic-pitch" in done.stderr
