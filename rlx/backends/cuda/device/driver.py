"""The driver of NVIDIA's devices by ctypes: libcuda comes with the driver, and nothing else is needed to launch.

The context is the primary one of the device, which torch, cupy and jax use too. All work goes to one stream.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from threading import RLock
from typing import Any

import numpy as np

from rlx.backends.cuda.device.compiler import compiler
from rlx.backends.cuda.text.maps import Box
from rlx.errors import DeviceUnavailable, ExecutionError, MemoryDeficit
from rlx.forks import restart_in_child
from rlx.ir.graph import Array

__all__ = ["Driver", "driver", "find_driver"]

OUT_OF_MEMORY = 2
NOT_FOUND = 500
CAPABILITY_MAJOR, CAPABILITY_MINOR, PROCESSORS = 75, 76, 16  # CU_DEVICE_ATTRIBUTE_...
RELEASE_THRESHOLD, USED_NOW, USED_MOST = 4, 7, 8  # CU_MEMPOOL_ATTR_...
NON_BLOCKING = 1
THREAD_LOCAL_CAPTURE = 1  # CU_STREAM_CAPTURE_MODE_...
STAGED = 4 << 20  # bytes up to which downloads go through pinned memory
OVERLAPPING = 12030  # CUDA 12.3: graphs know of kernels that start before the one before is done
OLDEST = 12000  # CUDA 12.0: stream-ordered memory, and graphs as they are used here
PLAIN_SHARED = 48 << 10  # bytes of a block's shared memory that need not be asked for
MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_...
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
EXTERNAL = 1  # CU_EVENT_RECORD_...
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAP_TYPES = {"f16": 6, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
SWIZZLE_128, PROMOTED_256 = 3, 3  # CU_TENSOR_MAP_...


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which only the first word of the value is used."""

    _fields_ = (("kind", c_int), ("unused", c_int), ("value", c_int), ("more", c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", c_uint),
    )


class Driver:
    """A device, by its number. Raises `DeviceUnavailable` where there is none, with what is missing."""

    def __init__(self, number: int = 0) -> None:
        try:
            self.library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise DeviceUnavailable("NVIDIA's driver is not there (libcuda.so.1)") from None
        status = self.library.cuInit(0)
        if status:
            raise DeviceUnavailable(f"NVIDIA's driver can't be used: {self.said(status)}")
        version, device = c_int(), c_int()
        self.call("cuDriverGetVersion", byref(version))
        if version.value < OLDEST:
            found = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise DeviceUnavailable(f"NVIDIA's driver is for CUDA {found}: 12.0 and later are used")
        status = self.library.cuDeviceGet(byref(device), number)
        if status:
            raise DeviceUnavailable(f"NVIDIA's driver has no device {number}: {self.said(status)}")
        self.number, self.device, self.version = number, device, version.value
        self.pid = os.getpid()
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode(errors="replace")
        self.capability = (self.attribute(CAPABILITY_MAJOR), self.attribute(CAPABILITY_MINOR))
        self.processors = self.attribute(PROCESSORS)
        self.overlaps = self.capability >= (9, 0) and version.value >= OVERLAPPING
        self.dropped = deque[tuple[str, Any]]()  # what nobody has any more: the function that ends it, and its handle
        self._staging: int | None = None
        self._stream: c_void_p | None = None
        self.restart()
        restart_in_child(self.restart)
        self._context = c_void_p()

    def restart(self) -> None:
        """No thread is at the device: for a new one, and for a forked child."""
        self.lock, self.inside = RLock(), False

    # ---- calls

    def said(self, status: int) -> str:
        """What a status of the driver means."""
        text = c_char_p()
        self.library.cuGetErrorString(status, byref(text))
        return f"{(text.value or b'unknown error').decode(errors='replace')} (status {status})"

    def call(self, function: str, *args: Any) -> None:
        """Raises `ExecutionError` unless the function of the driver gives 0."""
        status = getattr(self.library, function)(*args)
        if status:
            raise ExecutionError(f"CUDA: {function}: {self.said(status)}")

    def attribute(self, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, self.device)
        return value.value

    @property
    def arch(self) -> str:
        """What code is made for: with the features of this very chip where it has such, as Hopper's wgmma."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def stream(self) -> c_void_p:
        """The stream of all work; the first to ask makes the context."""
        if self._stream is None:
            self.call("cuDevicePrimaryCtxRetain", byref(self._context), self.device)
            stream = c_void_p()
            self.call("cuCtxPushCurrent_v2", self._context)
            try:
                self.call("cuStreamCreate", byref(stream), NON_BLOCKING)
                pool, most = c_void_p(), c_ulonglong(2**64 - 1)
                self.call("cuDeviceGetDefaultMemPool", byref(pool), self.device)
                self.call("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, byref(most))
            finally:
                self.call("cuCtxPopCurrent_v2", byref(c_void_p()))
            self._stream = stream
        return self._stream

    @property
    def is_set_up(self) -> bool:
        """Whether there is a context."""
        return self._stream is not None

    def total_bytes(self) -> int:
        """All memory of the device; it needs no context."""
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(total), self.device)
        return total.value

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context and the stream for the block, for one thread at a time.

        Raises `ExecutionError` in a process that was forked off after the context was made.
        """
        if os.getpid() != self.pid:
            raise ExecutionError(
                "CUDA can't be used in a process that was forked after CUDA was used: start it with the method 'spawn'"
            )
        with self.lock:
            if self.inside:  # a block within a block of this thread
                yield
                return
            _ = self.stream
            self.call("cuCtxPushCurrent_v2", self._context)
            self.inside = True
            try:
                yield
            finally:
                self.inside = False
                self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def reclaim(self) -> None:
        """Ends what nobody has any more: not at once, since Python may drop it while launches are captured."""
        for _ in range(len(self.dropped)):
            self.call(*self.dropped.popleft())

    # ---- memory; what follows is called within `current`

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device's memory."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def used_bytes(self, most: bool = False) -> int:
        """Bytes of the device that `allocate` has given: now, or the most since this was last asked."""
        pool, count = c_void_p(), c_ulonglong()
        self.call("cuDeviceGetDefaultMemPool", byref(pool), self.device)
        self.call("cuMemPoolGetAttribute", pool, USED_MOST if most else USED_NOW, byref(count))
        if most:
            self.call("cuMemPoolSetAttribute", pool, USED_MOST, byref(c_ulonglong(0)))
        return count.value

    def allocate(self, count: int) -> int:
        """The address of so many bytes, at a multiple of 256. Raises `MemoryDeficit`."""
        address = c_ulonglong()
        status = self.library.cuMemAllocAsync(byref(address), c_size_t(max(count, 1)), self.stream)
        if status == OUT_OF_MEMORY:
            free = self.free_and_total()[0]
            raise MemoryDeficit(f"device 'cuda' has no {count} bytes left", budget_bytes=free, peak_bytes=count)
        if status:
            raise ExecutionError(f"CUDA: cuMemAllocAsync of {count} bytes: {self.said(status)}")
        return address.value

    def release(self, address: int) -> None:
        self.call("cuMemFreeAsync", c_ulonglong(address), self.stream)

    def upload(self, address: int, array: Array) -> None:
        """Copies the bytes of a compact array to the device; it may change afterwards."""
        if array.nbytes:
            source = c_void_p(array.ctypes.data)
            self.call("cuMemcpyHtoDAsync_v2", c_ulonglong(address), source, c_size_t(array.nbytes), self.stream)

    def upload_pinned(self, address: int, source: int, count: int) -> None:
        """Starts a copy from pinned memory."""
        self.call("cuMemcpyHtoDAsync_v2", c_ulonglong(address), c_void_p(source), c_size_t(count), self.stream)

    def download(self, address: int, count: int) -> Array:
        """Some bytes, once all that was launched is done; few of them by way of pinned memory, which is faster."""
        made = np.empty(count, np.uint8)
        staged, to = 0 < count <= STAGED, int(made.ctypes.data)
        if staged:
            if self._staging is None:
                self._staging = self.pinned(STAGED)
            to = self._staging
        if count:
            self.call("cuMemcpyDtoHAsync_v2", c_void_p(to), c_ulonglong(address), c_size_t(count), self.stream)
        self.synchronize()
        if staged:
            ctypes.memmove(made.ctypes.data, to, count)
        return made

    def download_pinned(self, to: int, address: int, count: int) -> None:
        """Starts a copy to pinned memory."""
        self.call("cuMemcpyDtoHAsync_v2", c_void_p(to), c_ulonglong(address), c_size_t(count), self.stream)

    def copy(self, to: int, source: int, count: int) -> None:
        if count:
            self.call("cuMemcpyDtoDAsync_v2", c_ulonglong(to), c_ulonglong(source), c_size_t(count), self.stream)

    def fill(self, address: int, count: int, byte: int) -> None:
        if count:
            self.call("cuMemsetD8Async", c_ulonglong(address), ctypes.c_ubyte(byte), c_size_t(count), self.stream)

    def pinned(self, count: int) -> int:
        """The address of memory of the host that copies are fast from and to and that kernels reach; see `drop`."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(count), 0)
        assert address.value is not None
        return address.value

    # ---- code

    def compiler_version(self) -> str:
        """The compiler as users know it. Raises `DeviceUnavailable`."""
        return f"NVRTC {compiler().version}"

    def build(self, text: str) -> bytes:
        """Machine code for this device. Raises `CompileError`."""
        return compiler().image(text, self.arch)

    def load(self, image: bytes) -> int:
        """A module of compiled code."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), image)
        assert module.value is not None
        return module.value

    def function(self, module: int, symbol: str) -> Any:
        """A function of a module, None where it has no such."""
        found = c_void_p()
        status = self.library.cuModuleGetFunction(byref(found), c_void_p(module), symbol.encode())
        if status not in (0, NOT_FOUND):
            raise ExecutionError(f"CUDA: cuModuleGetFunction: {self.said(status)}")
        return None if status else found

    def let_share(self, function: Any, count: int) -> None:
        """Launches of the function may ask for so many bytes of shared memory."""
        if count > PLAIN_SHARED:
            self.call("cuFuncSetAttribute", function, MOST_DYNAMIC_SHARED, c_int(count))

    def launch(
        self,
        function: Any,
        blocks: int,
        threads: int,
        words: int,
        maps: Sequence[bytes] = (),
        *,
        shared: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Starts a kernel whose first argument lies at an address of the host, which is read now; maps follow it.

        One that `overlaps` may start before the kernel before it is done, for which it waits itself: see `RLX_WAIT` in
        prelude.cuh.
        """
        held = [ctypes.create_string_buffer(m, len(m)) for m in maps]
        arguments = (c_void_p * (1 + len(held)))(words, *(ctypes.addressof(m) for m in held))
        config = LaunchConfig(blocks, 1, 1, threads, 1, 1, shared, self.stream)
        if overlaps and self.overlaps:
            config.attributes = ctypes.pointer(LaunchAttribute(PROGRAMMATIC_SERIALIZATION, value=1))
            config.count = 1
        self.call("cuLaunchKernelEx", byref(config), function, arguments, None)

    def encode(self, box: Box) -> bytes:
        """The map of a tensor for the copy engine."""
        rank = len(box.sizes)
        made = (ctypes.c_uint8 * (MAP_BYTES + MAP_ALIGNMENT))()
        at = -(-ctypes.addressof(made) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        sizes, pitches = (c_ulonglong * rank)(*box.sizes), (c_ulonglong * (rank - 1))(*box.pitches)
        if box.walk is not None:
            low, high = ((c_int * 2)(*corner) for corner in (box.walk.low, box.walk.high))
            steps = (c_uint * rank)(1, *box.walk.strides, 1)
            self.call("cuTensorMapEncodeIm2col", c_void_p(at), MAP_TYPES[box.dtype], rank, c_void_p(box.address),
                      sizes, pitches, low, high, c_uint(box.box[0]), c_uint(box.box[1]), steps, 0, SWIZZLE_128,
                      PROMOTED_256, 0)  # fmt: skip
            return ctypes.string_at(at, MAP_BYTES)
        boxes, steps = (c_uint * rank)(*box.box), (c_uint * rank)(*(1 for _ in range(rank)))
        self.call("cuTensorMapEncodeTiled", c_void_p(at), MAP_TYPES[box.dtype], rank, c_void_p(box.address), sizes,
                  pitches, boxes, steps, 0, SWIZZLE_128, PROMOTED_256, 0)  # fmt: skip
        return ctypes.string_at(at, MAP_BYTES)

    def synchronize(self) -> None:
        """Waits for all work."""
        self.call("cuStreamSynchronize", self.stream)

    def settle(self) -> None:
        """Waits for the work of others in the context too."""
        self.call("cuCtxSynchronize")

    # ---- graphs

    def begin_capture(self) -> None:
        self.call("cuStreamBeginCapture_v2", self.stream, THREAD_LOCAL_CAPTURE)

    def end_capture(self) -> Any:
        """What was launched since, ready to be launched again as one."""
        graph, made = c_void_p(), c_void_p()
        self.call("cuStreamEndCapture", self.stream, byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", byref(made), graph, c_ulonglong(0))
        finally:
            self.call("cuGraphDestroy", graph)
        return made

    def event(self) -> Any:
        """What marks a place among launches that are captured, and the time at which the device came there."""
        made = c_void_p()
        self.call("cuEventCreate", byref(made), 0)
        return made

    def mark(self, event: Any) -> None:
        """Marks the place after what was captured last."""
        self.call("cuEventRecordWithFlags", event, self.stream, EXTERNAL)

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one event to another, once the device is done."""
        found = c_float()
        self.call("cuEventElapsedTime", byref(found), first, last)
        return found.value / 1e3

    def launch_graph(self, graph: Any) -> None:
        self.call("cuGraphLaunch", graph, self.stream)

    def drop(
        self, *, graph: Any = None, module: int | None = None, pinned: int | None = None, event: Any = None
    ) -> None:
        """Lets go of a graph, a module, pinned memory or an event; any thread may call it at any time."""
        if event is not None:
            self.dropped.append(("cuEventDestroy_v2", event))
        if pinned is not None:
            self.dropped.append(("cuMemFreeHost", c_void_p(pinned)))
        if graph is not None:
            self.dropped.append(("cuGraphExecDestroy", graph))
        if module is not None:
            self.dropped.append(("cuModuleUnload", c_void_p(module)))


chosen: list[Any] = []  # what takes the place of the driver in tests: see tests/backends/cuda


@cache
def _found() -> Driver | DeviceUnavailable:
    try:
        return Driver()
    except (DeviceUnavailable, ExecutionError) as error:
        return error if isinstance(error, DeviceUnavailable) else DeviceUnavailable(str(error))


def find_driver() -> Driver | DeviceUnavailable:
    """The first device, or why there is none."""
    return chosen[-1] if chosen else _found()


def driver() -> Driver:
    """The first device. Raises `DeviceUnavailable`."""
    found = find_driver()
    if isinstance(found, DeviceUnavailable):
        raise found
    return found
