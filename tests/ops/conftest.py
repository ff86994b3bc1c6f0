"""Which tests of ops also execute the kernels of the op."""

from __future__ import annotations

import random

import ops_oracle
import pytest

SHARE = 0.3  # of the tests of a quick run


@pytest.fixture(autouse=True)
def kernels_too(full: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by --seed; all with --full."""
    chosen = full or random.Random(f"{request.config.option.seed} {request.node.nodeid}").random() < SHARE
    monkeypatch.setattr(ops_oracle, "kernels_too", chosen)
