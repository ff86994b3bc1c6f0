"""Linux's leave to use the tile registers of AMX, which a process has to ask for once (8 KB of state a thread).

Processes that are forked off have it too, others ask for themselves. Once it is given, signal stacks that have no room
for that state can't be set any more.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

__all__ = ["FEATURES", "tiles_granted"]

FEATURES = ("amx_tile", "amx_bf16", "amx_int8")  # as Linux spells them; Sapphire Rapids and later have all of them
ARCH_PRCTL = 158  # the system call's number on x86-64
REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM
TILE_DATA = 18  # the state component


@functools.cache
def tiles_granted(flags: str) -> bool:
    """Whether this process may use tiles, asked for where `flags` of /proc/cpuinfo say that the processor has them.

    Refused by old kernels, by filters of system calls, and where a thread has a small signal stack.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64" or sys.maxsize <= 1 << 32:
        return False
    if not set(FEATURES) <= set(flags.split()):
        return False
    try:
        return request() == 0
    except (OSError, AttributeError):  # no library of C in this process, or none with that function
        return False


def request() -> int:
    """Asks Linux; 0 where it agrees."""
    syscall = ctypes.CDLL(None).syscall
    syscall.restype, syscall.argtypes = ctypes.c_long, (ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return int(syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))
