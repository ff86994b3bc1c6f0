"""The usual arithmetic of floats, whatever the calling thread has set: to nearest, denormal numbers kept, no traps.

Libraries that are built for speed, or told to, set another one for a thread and leave it so. What rlx computes in
Python and NumPy would then have other bits: constants that are folded, values that are converted, the reference device.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["usual_arithmetic"]

LIBRARIES = (None, "libm.so.6")  # what the process has (macOS, musl), and where glibc keeps them
ROOM = 64  # words, more than any system's `fenv_t` takes


@contextmanager
def usual_arithmetic() -> Iterator[None]:
    """Within the block (or decorated function) this thread has the usual arithmetic; afterwards its own again.

    Costs some 2 µs (two calls of the C library). On Windows, and where no library has the functions, it does nothing;
    runs of the CPU set the register themselves.
    """
    read, write, usual = _calls()
    if read is None:
        yield
        return
    kept = (ctypes.c_uint64 * ROOM)()
    read(kept)
    write(usual)
    try:
        yield
    finally:
        write(kept)


@functools.cache
def _calls() -> tuple[Any, Any, Any]:
    """`fegetenv`, `fesetenv` and the usual environment; None for each where there are none."""
    for name in () if sys.platform == "win32" else LIBRARIES:
        try:
            library = ctypes.PyDLL(name)  # these are too short to let other threads go on
            if sys.platform == "darwin":
                usual: Any = ctypes.byref(ctypes.c_char.in_dll(library, "_FE_DFL_ENV"))
            else:
                usual = ctypes.c_void_p(-1)  # of glibc and musl
            return library.fegetenv, library.fesetenv, usual
        except (OSError, AttributeError, ValueError):  # no such library, function or variable
            continue
    return None, None, None
