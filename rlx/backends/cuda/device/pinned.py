"""Memory of the host that the device reads and writes: pieces with views, and the status of checks."""

from __future__ import annotations

import ctypes

import numpy as np

from rlx.backends.cuda.device.driver import driver
from rlx.backends.cuda.device.memory import MEMORY, Block
from rlx.ir.graph import Array

__all__ = ["Pinned", "Status"]

WORDS = 4  # of a status: whether a check failed, its number, the bits that it shows, and where the host reads the same


class Pinned:
    """Bytes of pinned memory, given back when nobody has this object; `bytes` is a view, which does not keep it."""

    def __init__(self, count: int) -> None:
        self.driver = driver()
        self.address = self.driver.pinned(max(count, 1))
        self.bytes: Array = np.ctypeslib.as_array((ctypes.c_uint8 * max(count, 1)).from_address(self.address))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.driver.drop(pinned=self.address)


class Status:
    """What the first failed check of a run leaves, on the device and on the host; see `k_fail` in prelude.cuh."""

    def __init__(self) -> None:
        self.block: Block = MEMORY.allocate(8 * WORDS)
        self.pinned = Pinned(8 * WORDS)
        self.seen = self.pinned.bytes.view(np.int64)
        self.clear()

    @property
    def address(self) -> int:
        return self.block.address

    def clear(self) -> None:
        """No check has failed; nothing that was launched is under way."""
        self.seen[:] = 0
        MEMORY.write(self.address, np.array([0, 0, 0, self.pinned.address], np.int64))

    def failed(self) -> tuple[int, int] | None:
        """The number of the check that failed and the bits that it shows, once the device is done."""
        return (int(self.seen[1]), int(self.seen[2])) if self.seen[0] else None
