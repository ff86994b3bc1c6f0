"""Which build of rlx this is: what stored code depends on besides the machine."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from rlx.lazy_imports import sha256

__all__ = ["build_identity", "source_times"]


@functools.cache
def build_identity() -> str:
    """Version of rlx, its sources by name and size, and the Python whose code objects its functions are."""
    digest = sha256(_sources()[0].encode()).hexdigest()[:16]
    return f"rlx {sys.modules['rlx'].__version__} {digest} {sys.implementation.cache_tag}"


@functools.cache
def source_times() -> str:
    """A hash of when the sources last changed, for what never leaves this machine."""
    return sha256(_sources()[1].encode()).hexdigest()


@functools.cache
def _sources() -> tuple[str, str]:
    """What tells builds apart: relative paths and bytes of all source files; and when these changed.

    Both are empty where the files don't lie in a folder.
    """
    root = str(Path(__file__).parents[1])
    found: list[tuple[str, int, int]] = []
    folders = [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.endswith(".py"):
                        status = entry.stat()
                        found.append((entry.path[len(root) :], status.st_size, status.st_mtime_ns))
                    elif entry.is_dir() and entry.name != "__pycache__":
                        folders.append(entry.path)
        except OSError:
            return "", ""  # in an archive: the version has to do
    found.sort()
    return repr([row[:2] for row in found]), repr([row[2] for row in found])
