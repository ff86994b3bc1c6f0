"""The processor, as the system and not LLVM sees it: what code depends on, and Linux's leave to use tiles of AMX."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

__all__ = ["described", "has_tiles", "identity"]

TILE_FEATURES = {"amx_tile", "amx_bf16", "amx_int8"}  # as Linux spells them; Sapphire Rapids and later have all of them
ARCH_PRCTL = 158  # the system call's number on x86-64
REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM
TILE_DATA = 18  # the state component


@functools.cache
def described() -> dict[str, str]:
    """What Linux says of the first processor, by name; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}


@functools.cache
def has_tiles() -> bool:
    """Whether code of this process may use tiles, which Linux is asked for here, before any such code runs.

    A process has to ask once, for 8 KB of state a thread; those that are forked off have it too, others ask for
    themselves. Once it is given, signal stacks that have no room for that state can't be set any more. Refused by old
    kernels, by filters of system calls, and where a thread has a small signal stack.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64" or sys.maxsize <= 1 << 32:
        return False
    if not set(described().get("flags", "").split()) >= TILE_FEATURES:
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


@functools.cache
def identity() -> str:
    """What code for this machine and process depends on, found without LLVM where the system says it."""
    known = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    said = described()
    if not said:
        from rlx.backends.cpu.jit import host

        return f"{sys.platform} {host().cpu} {host().features} {host().triple}"
    tiles = "with tiles" if has_tiles() else "without tiles"
    return " ".join((sys.platform, platform.machine(), *(said[name] for name in known if name in said), tiles))
