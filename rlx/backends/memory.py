"""What memory a device has."""

from __future__ import annotations

from contextlib import suppress

from rlx.records import dataclass

__all__ = ["DeviceMemory", "host_memory"]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device's memory; None where that can't be known."""

    free: int | None
    total: int | None


def host_memory() -> DeviceMemory:
    """The memory of this machine; what is free is what can be had without swapping."""
    with suppress(OSError, ValueError):
        with open("/proc/meminfo", "rb") as file:  # psutil says the same, but is slow to import
            rows = (line.split() for line in file)
            kib = {row[0]: int(row[1]) for row in rows if row[0] in (b"MemTotal:", b"MemAvailable:")}
        if len(kib) == 2:
            return DeviceMemory(1024 * kib[b"MemAvailable:"], 1024 * kib[b"MemTotal:"])
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, psutil.Error):
        return DeviceMemory(None, None)
    return DeviceMemory(memory.available, memory.total)  # macOS: unified memory; Windows: physical memory
