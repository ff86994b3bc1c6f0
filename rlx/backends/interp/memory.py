"""The memory of the device, which only copies reach from outside, and its queues."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

import numpy as np

from rlx.ir.dtype import DType
from rlx.ir.graph import Array
from rlx.records import dataclass

__all__ = ["Memory", "Queues", "Range"]

DEPTH = 256  # commands that a queue holds; the host waits before it submits more
LINE = 64  # bytes that blocks are aligned to, and at least apart
Range = tuple[int, int]  # the first address, and that after the last


class Memory:
    """Blocks of bytes at addresses, which are plain numbers from `first` on."""

    def __init__(self, first: int) -> None:
        self.end = first
        self.starts: list[int] = []
        self.blocks: dict[int, Array] = {}

    def allocate(self, count: int) -> int:
        """The address of a new block."""
        address = self.end
        self.end += (count // LINE + 2) * LINE
        insort(self.starts, address)
        self.blocks[address] = np.zeros(count, np.uint8)
        return address

    def free(self, address: int) -> None:
        """Gives a block back."""
        self.starts.remove(address)
        del self.blocks[address]

    def bytes(self, address: int, count: int) -> Array:
        """Some bytes, which must lie within one block."""
        if not count:
            return np.zeros(0, np.uint8)
        start = self.starts[bisect_right(self.starts, address) - 1]
        block = self.blocks[start]
        assert start <= address <= address + count <= start + len(block), f"{count} bytes at {address} are no memory"
        return block[address - start : address - start + count]

    def array(self, address: int, dtype: DType, shape: Sequence[int]) -> Array:
        """Elements of whole bytes where they lie."""
        return self.bytes(address, math.prod(shape) * dtype.numpy.itemsize).view(dtype.numpy).reshape(shape)

    def read(self, address: int, dtype: DType, shape: Sequence[int]) -> Array:
        """A copy of an array for the host."""
        return self.array(address, dtype, shape).copy()

    def write(self, address: int, dtype: DType, array: Array) -> None:
        """Copies an array of the host to an address."""
        self.array(address, dtype, array.shape)[...] = array


@dataclass(eq=False)
class _Command:
    """What a queue is to do; it waits for so many commands of other queues to be done."""

    run: Callable[[], None]
    touches: Sequence[Range]
    after: dict[int, int]


class Queues:
    """Commands of several queues. Those of a queue run in order, others in any that their memory leaves open.

    Nothing runs before `wait`, or before a queue is full: the host is ahead, as with a device that works by itself.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what waits."""
        self.commands: dict[int, list[_Command]] = {}

    def submit(self, queue: int, run: Callable[[], None], touches: Sequence[Range]) -> None:
        """Adds a command; it runs after the earlier ones of other queues that touch the same bytes."""
        if len(self.commands.get(queue, ())) == DEPTH:
            self.wait()
        after = {}
        for other, commands in self.commands.items():
            shared = (n for n in range(len(commands) - 1, -1, -1) if _meet(commands[n].touches, touches))
            if other != queue and (last := next(shared, None)) is not None:
                after[other] = last + 1
        self.commands.setdefault(queue, []).append(_Command(run, touches, after))

    def wait(self) -> None:
        """Runs all commands. Where one raises, the others are forgotten."""
        waiting, done = self.commands, dict.fromkeys(self.commands, 0)
        self.clear()
        while any(done[queue] < len(commands) for queue, commands in waiting.items()):
            for queue in sorted(waiting, reverse=True):
                for command in waiting[queue][done[queue] :]:
                    if any(done[other] < count for other, count in command.after.items()):
                        break
                    command.run()
                    done[queue] += 1


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(start < stop2 and start2 < stop for start, stop in some for start2, stop2 in others)
