"""Other machines for tests: code is made for them as it is for this one."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.backends import backend_named
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.target import Target
from rlx.records import replace


def cpu() -> CpuBackend:
    """The CPU backend of this process."""
    backend = backend_named("cpu")
    assert isinstance(backend, CpuBackend)
    return backend


def machine(**changes: Any) -> Target:
    """This machine, or one that differs in these fields."""
    return replace(cpu().target, **changes)


def pretend(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Code of this process is made for a machine that differs in these fields."""
    monkeypatch.setattr(cpu(), "_target", machine(**changes))
