"""A device for machines without one: the same printed text, compiled by g++ and run on the processor.

It stands where `rlx.backends.cuda.device.driver.Driver` does. Memory of the device is memory of the host, and a launch
is done when it returns; the threads of a block that waits at barriers take turns.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from rlx.backends.cuda.text.maps import Box
from rlx.ir.graph import Array

HERE = Path(__file__).parent
LINE = 256
GUARD = 256  # bytes after each block that nothing may write
POISON = 0xA5


class Value:
    """What stands for the handle of a stream."""

    value = 1


class HostDriver:
    """Calls as those of the driver, without a device."""

    number, name, processors, version = 0, "the processor", 132, 13000
    stream = Value()
    is_set_up = True

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        self.capability = capability
        self.blocks: dict[int, tuple[Any, int]] = {}
        self.of_host: set[int] = set()  # the blocks that stand for pinned memory
        self.most = 0
        self.folder = Path(tempfile.mkdtemp(prefix="rlx-cuda-"))
        self.lock = RLock()
        self.launches = 0
        self.captured: list[Any] | None = None
        self.libraries: list[Any] = []

    def __enter__(self) -> HostDriver:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def possible() -> bool:
        """Whether there is a compiler."""
        return shutil.which("g++") is not None

    def compiler_version(self) -> str:
        return "g++"

    @contextmanager
    def current(self) -> Iterator[None]:
        with self.lock:
            yield

    def reclaim(self) -> None:
        return

    # ---- memory

    def total_bytes(self) -> int:
        return 1 << 41

    def free_and_total(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def allocate(self, count: int) -> int:
        raw = (ctypes.c_uint8 * (count + LINE + GUARD)).from_buffer(bytearray(count + LINE + GUARD))
        address = -(-ctypes.addressof(raw) // LINE) * LINE
        ctypes.memset(address, POISON, count + GUARD)
        self.blocks[address] = raw, count
        self.most = max(self.most, self.used_bytes())
        return address

    def used_bytes(self, most: bool = False) -> int:
        """Of the device: those that are there now, or the most that were since this was last asked."""
        used = sum(count for address, (_, count) in self.blocks.items() if address not in self.of_host)
        if not most:
            return used
        most_used, self.most = self.most, used
        return most_used

    def release(self, address: int) -> None:
        _, count = self.blocks.pop(address)
        self.of_host.discard(address)
        assert ctypes.string_at(address + count, GUARD) == bytes([POISON]) * GUARD, "written beyond the end of a block"

    def inside(self, address: int, count: int) -> None:
        """Looks that the bytes lie in a block."""
        if count:
            assert any(at <= address and address + count <= at + size for at, (_, size) in self.blocks.items())

    def upload(self, address: int, array: Array) -> None:
        self.inside(address, array.nbytes)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def upload_pinned(self, address: int, source: int, count: int) -> None:
        self.inside(address, count)
        self.move(address, source, count)

    def download_pinned(self, to: int, address: int, count: int) -> None:
        self.inside(address, count)
        self.inside(to, count)
        self.move(to, address, count)

    def move(self, to: int, source: int, count: int) -> None:
        """Copies, or has a graph copy that is being captured."""
        if self.captured is not None:
            self.captured.append((ctypes.memmove, to, source, count))
        else:
            ctypes.memmove(to, source, count)

    def download(self, address: int, count: int) -> Array:
        self.inside(address, count)
        made = np.empty(count, np.uint8)
        ctypes.memmove(made.ctypes.data, address, count)
        return made

    def copy(self, to: int, source: int, count: int) -> None:
        self.inside(to, count)
        self.inside(source, count)
        ctypes.memmove(to, source, count)

    def fill(self, address: int, count: int, byte: int) -> None:
        self.inside(address, count)
        ctypes.memset(address, byte, count)

    def pinned(self, count: int) -> int:
        before = self.most
        address = self.allocate(count)
        self.of_host.add(address)
        self.most = before
        return address

    # ---- code

    def build(self, text: str) -> bytes:
        """The path of a library, as a module's image."""
        name = sha256(text.encode()).hexdigest()[:16]
        source, made = self.folder / f"{name}.cc", self.folder / f"{name}.so"
        if made.exists():
            return os.fsencode(made)
        text = re.sub(
            r"const (Words<\d+>) w\b", r"const \1& w", re.sub(r"#pragma unroll( \d+)?", "", text)
        )  # by address
        source.write_text((HERE / "host.h").read_text() + text)
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-w", "-shared", "-fPIC"]
        run = subprocess.run(["g++", *flags, "-o", made, source, "-lm"], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[:4000]
        return os.fsencode(made)

    def load(self, image: bytes) -> int:
        self.libraries.append((ctypes.CDLL(os.fsdecode(image)), Path(os.fsdecode(image)).with_suffix(".cc")))
        return len(self.libraries)

    def function(self, module: int, symbol: str) -> Any:
        library, source = self.libraries[module - 1]
        found = re.search(rf"\b{symbol}\(.*?\n}}\n", source.read_text(), re.DOTALL)
        if found is None:
            return None
        waits = re.search("__syncthreads|block_|slices_|dynamic_shared|from_lane", found[0]) is not None
        bound = re.search(
            rf"__launch_bounds__\((\d+)[^)]*\)( __cluster_dims__\((\d+))?[^)]*\)? ?{symbol}\b", source.read_text()
        )
        assert bound is not None
        return library.launch, getattr(library, symbol), int(waits), int(bound[1]), int(bound[3] or 1)

    def let_share(self, function: Any, count: int) -> None:
        assert count <= 227 << 10

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
        launch, kernel, waits, most, cluster = function
        assert 0 < blocks < 1 << 31
        assert blocks % cluster == 0
        assert 0 < threads <= most
        assert threads % 32 == 0
        assert shared <= 227 << 10
        if self.captured is not None:
            held = ctypes.string_at(words, 8 * 512)
            self.captured.append((self.again, function, blocks, threads, held, maps, shared))
            return
        self.launches += 1
        boxes = ctypes.create_string_buffer(b"".join(maps))
        launch(kernel, blocks, threads, ctypes.c_void_p(words), boxes, waits, cluster)

    def encode(self, box: Box) -> bytes:
        """As `Map` in host.h has it; what the driver would refuse is refused."""
        rank = len(box.sizes)
        if box.walk is not None:
            return self.encode_windows(box)
        assert box.address % 16 == 0
        assert all(p % 16 == 0 and 0 < p < 1 << 40 for p in box.pitches)
        assert 2 <= rank <= 5
        assert len(box.pitches) == rank - 1
        assert box.box[0] == 64
        assert all(0 < b <= 256 for b in box.box)
        head = struct.pack("<QI5I", box.address, rank, *box.sizes, *(0 for _ in range(5 - rank)))
        tail = struct.pack(
            "<4Q5H", *box.pitches, *(0 for _ in range(5 - rank)), *box.box, *(0 for _ in range(5 - rank))
        )
        return (head + tail).ljust(128, b"\0")

    def encode_windows(self, box: Box) -> bytes:
        """As `Windows` in host.h has it."""
        walk = box.walk
        assert walk is not None
        assert all(n % 16 == 0 for n in (box.address, *box.pitches))
        assert box.box[0] == 64
        assert all(-128 <= c < 128 for c in (*walk.low, *walk.high))
        assert all(1 <= s <= 8 for s in walk.strides)
        head = struct.pack("<Q4I3Q", box.address, *box.sizes, *box.pitches)
        return (head + struct.pack("<7i", *walk.low, *walk.high, *walk.strides, box.box[1])).ljust(128, b"\0")

    def synchronize(self) -> None:
        return

    def settle(self) -> None:
        return

    # ---- graphs

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        made, self.captured = self.captured, None
        return made

    def event(self) -> list[float]:
        return []

    def mark(self, event: list[float]) -> None:
        assert self.captured is not None
        self.captured.append((lambda: event.append(time.perf_counter()),))

    def between(self, first: list[float], last: list[float]) -> float:
        return last[-1] - first[-1]

    def launch_graph(self, graph: Any) -> None:
        for step, *arguments in graph:
            step(*arguments)

    def again(self, function: Any, blocks: int, threads: int, words: bytes, maps: Sequence[bytes], shared: int) -> None:
        """A launch of a graph."""
        held = ctypes.create_string_buffer(words)
        self.launch(function, blocks, threads, ctypes.addressof(held), maps, shared=shared)

    def drop(
        self, *, graph: Any = None, module: int | None = None, pinned: int | None = None, event: Any = None
    ) -> None:
        if pinned is not None:
            self.release(pinned)
