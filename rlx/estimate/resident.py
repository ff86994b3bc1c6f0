"""The memory of this process: its resident set and address space."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["address_bytes", "forget_peak", "peak_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """The resident set of this process now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def address_bytes() -> int:
    """The address space that this process has mapped now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def forget_peak() -> None:
    """Has the largest resident set counted from now on, where the system can do that. (proc_pid_clear_refs(5))"""
    with suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:
        file.write(b"5")


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))
