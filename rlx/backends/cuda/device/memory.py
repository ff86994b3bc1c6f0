"""The memory of the device: blocks of bytes, and the arrays of users that lie there."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rlx.backends.array import MemorySpace
from rlx.backends.codegen.walked import Held
from rlx.backends.cuda.device.dlpack import DEVICE_TYPE, capsule_over, read_capsule
from rlx.backends.cuda.device.driver import driver
from rlx.backends.dlpack import DLPackArray
from rlx.errors import MemoryDeficit
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array as HostArray

__all__ = ["MEMORY", "SPACE", "Block", "CudaMemory", "Lent", "Reading"]

CPU = (1, 0)  # kDLCPU
STAGED = 16 << 20  # bytes of each of the two parts of pinned memory that large arrays go through
LARGE = 1 << 20
ALIGNMENT = 64  # bytes, at least, that an array starts at: kernels read several elements at once


class Block:
    """Bytes of the device that belong to who has this object: given back when nobody has it any more.

    `shared`: another library has had their address, and may still be at work there.
    """

    __slots__ = ("__weakref__", "address", "memory", "owner", "shared", "size")

    def __init__(self, memory: CudaMemory, address: int, size: int, owner: object = None) -> None:
        self.memory, self.address, self.size, self.owner, self.shared = memory, address, size, owner, False

    def __del__(self) -> None:
        if self.owner is None:
            self.memory.given_back.append((self.address, self.shared))


class CudaMemory:
    """Blocks of the first device's memory. Its calls are made within a session of the space."""

    def __init__(self) -> None:
        self.given_back = deque[tuple[int, bool]]()
        self.staging: int | None = None

    def allocate(self, count: int) -> Block:
        """A new block, of any contents. Raises `MemoryDeficit`."""
        device = driver()
        self.reclaim()
        try:
            return Block(self, device.allocate(count), count)
        except MemoryDeficit:
            device.synchronize()
            self.reclaim()
            return Block(self, device.allocate(count), count)

    def reclaim(self) -> None:
        """Gives back what nobody has: not at once, since Python may end a block in the middle of a call."""
        device = driver()
        device.reclaim()
        for _ in range(len(self.given_back)):
            address, shared = self.given_back.popleft()
            if shared:
                device.settle()
            device.release(address)

    def read(self, address: int, count: int) -> HostArray:
        return driver().download(address, count)

    def write(self, address: int, array: HostArray) -> None:
        """Copies an array of the host to an address; large ones through pinned memory."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.nbytes < LARGE:
            driver().upload(address, data)
            return
        device = driver()
        if self.staging is None:
            self.staging = device.pinned(2 * STAGED)
        window = (ctypes.c_uint8 * (2 * STAGED)).from_address(self.staging)
        pinned = np.ctypeslib.as_array(window)
        for number, start in enumerate(range(0, data.nbytes, STAGED)):
            if number % 2 == 0:
                device.synchronize()  # what the parts held before has been copied
            part = data[start : start + STAGED]
            at = number % 2 * STAGED
            pinned[at : at + part.nbytes] = part
            device.upload_pinned(address + start, self.staging + at, part.nbytes)
        device.synchronize()

    def fill(self, address: int, count: int, byte: int) -> None:
        driver().fill(address, count, byte)

    def held_copy(self, array: HostArray) -> Held:
        """The elements in memory of their own."""
        block = self.allocate(array.nbytes)
        self.write(block.address, array)
        return Held(block, block.address, dtype_of(array.dtype), array.shape)


MEMORY = CudaMemory()


class Reading:
    """Whether the host has read a result of some run."""

    __slots__ = ("done",)

    def __init__(self, done: bool) -> None:
        self.done = done


class Lent(Held):
    """A result where its run has left it: in the arena, until the next run has it `settle` elsewhere.

    `mirror` has the same elements in memory of the host, which `pinned` keeps.
    """

    def __init__(self, block: Any, address: int, dtype: DType, shape: tuple[int, ...], reading: Reading) -> None:
        super().__init__(block, address, dtype, shape)
        self.reading = reading
        self.mirror: HostArray | None = None
        self.pinned: object = None

    def settle(self) -> None:
        """Has memory of its own from now on."""
        block = MEMORY.allocate(self.nbytes)
        driver().copy(block.address, self.address, self.nbytes)
        self.block, self.address, self.mirror, self.pinned = block, block.address, None, None

    def read(self) -> HostArray | None:
        """A copy of the elements if the host has them."""
        self.reading.done = True
        return None if self.mirror is None else self.mirror.copy()


class CudaSpace(MemorySpace):
    """What the arrays of the device lie in."""

    device = "cuda"

    def session(self) -> AbstractContextManager[object]:
        return driver().current()

    def put(self, array: HostArray) -> Held:
        return MEMORY.held_copy(array)

    def fetch(self, held: Held) -> HostArray:
        if isinstance(held, Lent) and (made := held.read()) is not None:
            return made
        return driver().download(held.address, held.nbytes).view(held.dtype.numpy).reshape(held.shape)

    def adopt(self, value: Any) -> Held | None:
        """What another library has on the device, without a copy where it is compact; it waits for its work."""
        if not hasattr(value, "__dlpack_device__"):
            return None
        kind, number = (int(n) for n in value.__dlpack_device__())
        device = driver()
        if kind != DEVICE_TYPE or number != device.number:
            return None
        capsule = value.__dlpack__(stream=device.stream.value)
        address, dtype, shape, compact = read_capsule(capsule)
        if dtype is None or not compact:
            return None
        held = Held(Block(MEMORY, address, 0, owner=(value, capsule)), address, dtype, shape)
        return held if address % ALIGNMENT == 0 else self.copy(held)

    def type_of(self, held: Held) -> np.dtype[Any]:
        return held.dtype.numpy

    def copy(self, held: Held) -> Held:
        block = MEMORY.allocate(held.nbytes)
        driver().copy(block.address, held.address, held.nbytes)
        return Held(block, block.address, held.dtype, held.shape)

    def part(self, held: Held, index: tuple[int | slice, ...]) -> Held:
        """Where the part is one piece of memory it is copied on the device, else by way of the host."""
        shape = tuple(len(range(i.start, i.stop, i.step)) for i in index if isinstance(i, slice))
        start = piece(held.shape, index)
        if start is None:
            whole: HostArray = np.ascontiguousarray(self.fetch(held)[index])
            return self.put(np.asarray(whole, held.dtype.numpy).reshape(shape))
        return self.copy(Held(held.block, held.address + start * held.dtype.numpy.itemsize, held.dtype, shape))

    def padded(self, held: Held, shape: tuple[int, ...]) -> Held:
        block = MEMORY.allocate(math.prod(shape) * held.dtype.numpy.itemsize)
        made = Held(block, block.address, held.dtype, shape)
        if held.shape[1:] == shape[1:]:
            driver().fill(block.address, made.nbytes, 0)
            driver().copy(block.address, held.address, held.nbytes)
            return made
        pads = [(0, size - own) for own, size in zip(held.shape, shape, strict=True)]
        return self.put(np.pad(self.fetch(held), pads))

    def export(self, held: Held, options: Mapping[str, Any]) -> Any:
        device = driver()
        place, copy = options.get("dl_device"), options.get("copy")
        if place is not None and tuple(place) == CPU:
            if copy is False:
                raise BufferError("an array on 'cuda' is copied to the host: copy=False can't be had")
            return DLPackArray(self.fetch(held)).__dlpack__(**{**options, "dl_device": None, "copy": None})
        if place is not None and tuple(place) != (DEVICE_TYPE, device.number):
            raise BufferError(f"an array on 'cuda' can't be given to device {tuple(place)}")
        if copy:
            held = self.copy(held)
        elif isinstance(held, Lent):
            held.settle()
        device.synchronize()  # so that a consumer's stream need not wait
        held.block.shared = True
        return capsule_over(held, device.number, options.get("max_version"))

    def place(self, held: Held) -> tuple[int, int]:
        return DEVICE_TYPE, driver().number


SPACE = CudaSpace()


def piece(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> int | None:
    """The number of the first element of a part that is one piece of memory, None for one that is not."""
    start, whole = 0, True
    for axis in range(len(shape) - 1, -1, -1):
        i, stride = index[axis], math.prod(shape[axis + 1 :])
        first, count = (i, 1) if isinstance(i, int) else (i.start, len(range(i.start, i.stop, i.step)))
        if isinstance(i, slice) and i.step != 1 and count > 1:
            return None
        if not whole and count > 1:
            return None
        whole = whole and count == shape[axis]
        start += first * stride
    return start
