"""What kept measurements hold for, found without modules that are slow to load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import rlx
from rlx.machine import machine_facts


def test_packages_come_with_their_versions() -> None:
    found = machine_facts(("rlx", "numpy", "llvmlite", "ml_dtypes", "no_such_package"))
    for package in ("numpy", "llvmlite", "ml_dtypes"):
        assert any(fact.startswith(f"{package}-{version(package)}.") for fact in found), found
    assert any(fact.startswith("rlx-") for fact in found)
    assert not any("no_such" in fact for fact in found)


def test_a_package_without_a_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that lies on the path; and an upgrade changes what is told."""
    (tmp_path / "lying").mkdir()
    (tmp_path / "lying" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert machine_facts(("lying",))[-1] == "lying"
    (tmp_path / "lying-1.5.dist-info").mkdir()
    assert machine_facts(("lying",))[-1].startswith("lying-1.5")
    (tmp_path / "apart").mkdir()  # without __init__.py
    assert machine_facts(("apart",))[-1] == "apart"
    monkeypatch.setitem(sys.modules, "odd", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert isinstance(machine_facts(("odd",)), list)


LOAD = """
import sys
import numpy, rlx
rlx.load(sys.argv[1], device="cpu", cache_dir=sys.argv[2])
print(*sys.modules)
"""


def test_a_first_load_does_without_what_it_needs_not(tmp_path: Path) -> None:
    """Some MB of modules: for versions of packages, for processes, for element types that the model has not."""
    command = [sys.executable, "-c", LOAD, str(rlx.demo.path("digits")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    there = set(done.stdout.split())
    assert "llvmlite" in there
    assert not {"importlib.metadata", "email", "subprocess", "socket", "logging", "ml_dtypes", "psutil"} & there
