"""What a graph costs on a device: IO profile, cost model, calibration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Ceilings": "rlx.cost.ceilings",
    "IoProfile": "rlx.cost.io_profile",
    "KernelIo": "rlx.cost.io_profile",
    "Pace": "rlx.cost.pace",
    "Prediction": "rlx.cost.model",
    "calibrate": "rlx.cost.measure",
    "ceilings_of": "rlx.cost.kept",
    "predict": "rlx.cost.model",
    "profile": "rlx.cost.io_profile",
}

__all__ = ["Ceilings", "IoProfile", "KernelIo", "Pace", "Prediction", "calibrate", "ceilings_of", "predict", "profile"]


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlx.cost' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value
