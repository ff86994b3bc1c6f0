"""What calls leave behind in memory, judged so that only a leak counts.

A process that ran other tests takes and frees memory by itself: caches of the interpreter fill, threads end, pages
become resident. So what the allocators have given out is counted, not pages, and of a few rounds the second least
growth is judged: what leaks does so in every round, and in the least one others may have freed something.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Growth(NamedTuple):
    """What a round leaves behind: blocks of Python, bytes of the C allocator (0 where it can't be asked)."""

    blocks: int
    native: int


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2 is not None:
    mallinfo2.restype = MallInfo


def native_bytes() -> int:
    """Bytes that the C allocator has given out, small and mapped."""
    if mallinfo2 is None:
        return 0
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """The garbage collector runs only when called, and looks at new objects alone: a large process has many others."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def growth(one_round: Callable[[], object], rounds: int = 5) -> Growth:
    """The second least of what rounds leave behind; what only the garbage collector frees is left behind too."""
    grown = []
    with quiet_collector():
        for _ in range(rounds):
            gc.collect()
            native, blocks = native_bytes(), sys.getallocatedblocks()
            one_round()
            cyclic = gc.collect()  # which empties Python's free lists too
            grown.append(Growth(sys.getallocatedblocks() - blocks + cyclic, native_bytes() - native))
    return Growth(*(sorted(column)[1] for column in zip(*grown, strict=True)))


def traced_growth(one_round: Callable[[], object], rounds: int = 5) -> tuple[int, int]:
    """The second least of the traced bytes that rounds leave behind, and of their peak meanwhile."""
    grown = []
    with quiet_collector():
        for _ in range(rounds):
            gc.collect()
            tracemalloc.start()  # sees NumPy's memory too
            try:
                start = tracemalloc.get_traced_memory()[0]
                one_round()
                now, peak = tracemalloc.get_traced_memory()
                grown.append((now - start, peak - start))
            finally:
                tracemalloc.stop()
    left, peak = (sorted(column)[1] for column in zip(*grown, strict=True))
    return left, peak
