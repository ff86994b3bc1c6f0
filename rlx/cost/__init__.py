"""What a graph costs on a device: its IO profile."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "IoProfile": "rlx.cost.io_profile",
    "KernelIo": "rlx.cost.io_profile",
    "profile": "rlx.cost.io_profile",
}

__all__ = ["IoProfile", "KernelIo", "profile"]


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlx.cost' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value
