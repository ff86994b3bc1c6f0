"""The memory of the device, which only copies reach from outside, the arrays in it, and its queues."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from rlx.backends.array import MemorySpace
from rlx.backends.codegen.walked import Held
from rlx.backends.dlpack import DLPackArray
from rlx.forks import restart_in_child
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array as HostArray
from rlx.records import dataclass

__all__ = ["DEVICE_MEMORY", "HOST", "HOST_MEMORY", "SPACE", "Block", "Memory", "Queues", "Range", "memory_at"]

DEPTH = 256  # commands that a queue holds; the host waits before it submits more
CPU, EXTENSION = (1, 0), (12, 0)  # devices as DLPack counts them: kDLCPU, kDLExtDev
LINE = 64  # bytes that blocks are aligned to, and at least apart
Range = tuple[int, int]  # the first address, and that after the last


class Memory:
    """Blocks of bytes at addresses, which are plain numbers from `first` on. Any thread may use it."""

    def __init__(self, first: int) -> None:
        self.end = first
        self.starts: tuple[int, ...] = ()  # made anew when it changes: readers take no lock
        self.blocks: dict[int, HostArray] = {}
        self.given_back = deque[int]()
        self.restart()
        restart_in_child(self.restart)

    def restart(self) -> None:
        """Nobody changes it: for a new one, and for a forked child, where other threads of the parent are not."""
        self.lock = Lock()

    def allocate(self, count: int) -> Block:
        """A new block of zeros."""
        with self.lock:
            self.reclaim()
            address = self.end
            self.end += (count // LINE + 2) * LINE
            self.blocks[address] = np.zeros(count, np.uint8)
            self.starts = (*self.starts, address)
        return Block(self, address)

    def reclaim(self) -> None:
        """Drops the blocks that were given back: not at once, since Python may end a block in the middle of a call."""
        gone = {self.given_back.popleft() for _ in range(len(self.given_back))}
        if gone:
            self.starts = tuple(start for start in self.starts if start not in gone)
            for start in gone:
                del self.blocks[start]

    def bytes(self, address: int, count: int) -> HostArray:
        """Some bytes, which must lie within one block."""
        if not count:
            return np.zeros(0, np.uint8)
        starts = self.starts
        start = starts[bisect_right(starts, address) - 1]
        block = self.blocks[start]
        assert start <= address <= address + count <= start + len(block), f"{count} bytes at {address} are no memory"
        return block[address - start : address - start + count]

    def array(self, address: int, dtype: DType, shape: Sequence[int]) -> HostArray:
        """Elements of whole bytes where they lie."""
        return self.bytes(address, math.prod(shape) * dtype.numpy.itemsize).view(dtype.numpy).reshape(shape)

    def read(self, address: int, count: int) -> HostArray:
        """A copy of some bytes."""
        return self.bytes(address, count).copy()

    def write(self, address: int, array: HostArray) -> None:
        """Copies an array of the host to an address."""
        self.array(address, dtype_of(array.dtype), array.shape)[...] = array

    def fill(self, address: int, count: int, byte: int) -> None:
        """Sets some bytes."""
        self.bytes(address, count).fill(byte)


class Block:
    """Bytes that belong to who has this object: they are given back when nobody has it any more."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: Memory, address: int) -> None:
        self.memory, self.address = memory, address

    def __del__(self) -> None:
        self.memory.given_back.append(self.address)


HOST = "host"  # the space that inputs lie in before a kernel brings them, unless they are arrays of the device
FAR = 1 << 40  # addresses from here on are the host's
DEVICE_MEMORY, HOST_MEMORY = Memory(1 << 20), Memory(FAR)


def memory_at(address: int) -> Memory:
    """The memory that an address lies in."""
    return HOST_MEMORY if address >= FAR else DEVICE_MEMORY


def view(held: Held) -> HostArray:
    """The elements where they lie, for the device itself."""
    memory: Memory = held.block.memory
    return memory.array(held.address, held.dtype, held.shape)


def held_copy(array: HostArray) -> Held:
    """The elements in memory of their own."""
    dtype = dtype_of(array.dtype)
    block = DEVICE_MEMORY.allocate(array.size * dtype.numpy.itemsize)
    DEVICE_MEMORY.write(block.address, array)
    return Held(block, block.address, dtype, array.shape)


class InterpSpace(MemorySpace):
    """What the arrays of the device lie in."""

    device = "interp"

    def put(self, array: HostArray) -> Held:
        return held_copy(array)

    def fetch(self, held: Held) -> HostArray:
        return view(held).copy()

    def type_of(self, held: Held) -> np.dtype[Any]:
        return held.dtype.numpy

    def copy(self, held: Held) -> Held:
        return held_copy(view(held))

    def part(self, held: Held, index: tuple[int | slice, ...]) -> Held:
        return held_copy(np.asarray(view(held)[index], held.dtype.numpy))

    def padded(self, held: Held, shape: tuple[int, ...]) -> Held:
        pads = [(0, size - own) for own, size in zip(held.shape, shape, strict=True)]
        return held_copy(np.pad(view(held), pads))

    def export(self, held: Held, options: Mapping[str, Any]) -> Any:
        """A copy in the host's memory, for who asks for that: no other library can read this memory."""
        if options.get("dl_device") != CPU or options.get("copy") is False:
            raise BufferError("the memory of the interpreter is its own: ask for a copy on the CPU, or take .numpy()")
        return DLPackArray(self.fetch(held)).__dlpack__(**{**options, "dl_device": None, "copy": None})

    def place(self, held: Held) -> tuple[int, int]:
        return EXTENSION


SPACE = InterpSpace()


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
