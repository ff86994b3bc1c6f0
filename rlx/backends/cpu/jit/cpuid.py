"""The processor, as the system and not LLVM sees it: what code depends on, and Linux's leave to use tiles of AMX."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["described", "has_tiles", "identity", "name", "unlike"]

WITH, WITHOUT = "with tiles", "without tiles"  # how an identity ends
VECTORS = ("amx", "avx", "fma", "f16c", "asimd", "sve")  # how the features that matter most start
SHOWN = 8  # of them, at most, are named where two processors differ

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
        from rlx.backends.cpu.jit.compile import host

        here = host()
        return f"{sys.platform} {here.cpu} {here.features} {here.triple}"
    tiles = WITH if has_tiles() else WITHOUT
    return " ".join((sys.platform, platform.machine(), *(said[name] for name in known if name in said), tiles))


def unlike(other: str) -> str:
    """What the machine and process of another identity are, told by what this one is not or may not."""
    here = identity()
    if other.removesuffix(WITHOUT) == here.removesuffix(WITH):
        return "a process without leave to use tile registers (AMX), which this one has"
    if other.removesuffix(WITH) == here.removesuffix(WITHOUT):
        return "a process with leave to use tile registers (AMX), which Linux has not given to this one"
    theirs, ours = (text.removesuffix(WITH).removesuffix(WITHOUT).split() for text in (other, here))
    sides = (("with", theirs, ours), ("without", ours, theirs))
    differ = [f"{word} {shown}" for word, own, others in sides if (shown := _listed(own, others))]
    return " ".join(["another processor", ", ".join(differ)]).rstrip()


def _listed(words: Sequence[str], others: Collection[str]) -> str:
    """The words that are not among the others; those on vectors stand for all."""
    more = [word for word in words if word not in others]
    told = [word for word in more if word.startswith(VECTORS)] or more
    return " ".join(told[:SHOWN]) + (f" and {len(told) - SHOWN} more" if len(told) > SHOWN else "")


def vendor() -> str:
    """The vendor of the processor as x86 names it, "" where the system does not say."""
    return described().get("vendor_id", "")


def name() -> str:
    """What its vendor calls it, "" where the system does not say."""
    return " ".join(described().get("model name", "").split())
