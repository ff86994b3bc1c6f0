"""The heap of the C library."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

__all__ = ["give_back_heap"]


def give_back_heap() -> None:
    """Has the C library give the memory back that is free in its heaps, where it can."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # other C libraries than glibc have no such call
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
