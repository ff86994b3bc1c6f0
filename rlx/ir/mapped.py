"""Arrays over memory-mapped files, and the file and place that such an array shows."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.boundary import is_out_of_memory
from rlx.errors import MemoryDeficit
from rlx.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PART",
    "FileIdentity",
    "Place",
    "collect_files",
    "copied",
    "copy_to",
    "give_back",
    "identity_of",
    "lies_in_file",
    "map_file",
    "mapping_of",
    "note_file",
    "place_of",
    "read_in_place",
    "same_memory",
    "to_own_pages",
    "unread",
]

PART = 8 << 20  # bytes that are copied at a time
OWN_PAGES = 64 << 10  # bytes of an array from which on a copy of it has pages of its own

FileIdentity = tuple[int, int, int, int]  # device, inode, bytes, nanoseconds of the last change


class MappedFile(mmap.mmap):
    """A mapping that knows its file."""

    path: str
    identity: FileIdentity
    writable: bool  # then what was written is in its pages only


@dataclass(frozen=True)
class Place:
    """Bytes [offset, offset + nbytes) of a file that had this identity when it was mapped."""

    path: str
    identity: FileIdentity
    offset: int
    nbytes: int


def identity_of(status: os.stat_result) -> FileIdentity:
    """What changes when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_collected: ContextVar[dict[str, FileIdentity] | None] = ContextVar("files", default=None)


@contextmanager
def collect_files() -> Iterator[dict[str, FileIdentity]]:
    """Notes the files, by absolute path, that importers read meanwhile."""
    found: dict[str, FileIdentity] = {}
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def note_file(path: str, status: os.stat_result) -> None:
    """Says that a file is read."""
    found = _collected.get()
    if found is not None:
        found[os.path.abspath(path)] = identity_of(status)


def map_file(fd: int, path: str, *, writable: bool = False) -> NDArray[np.uint8]:
    """All bytes of an open file, mapped and not copied; what is written to a `writable` mapping stays in memory."""
    status = os.fstat(fd)
    if status.st_size == 0:
        return np.frombuffer(b"", np.uint8)
    how = {"access": mmap.ACCESS_COPY if writable else mmap.ACCESS_READ}
    if not writable and hasattr(mmap, "MAP_PRIVATE"):  # where it could be shared, Linux lets nobody watch it
        how = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ}
    with enough_memory(status.st_size, f"{path} as a mapped file"):
        memory = MappedFile(fd, status.st_size, **how)
    memory.path, memory.identity, memory.writable = os.path.abspath(path), identity_of(status), writable
    return np.frombuffer(memory, np.uint8)


def mapping_of(array: NDArray[Any]) -> mmap.mmap | None:
    """The mapping that an array's memory belongs to, if it is a mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def place_of(array: NDArray[Any]) -> Place | None:
    """Where a compact read-only array lies in a file that `map_file` mapped, if it does."""
    memory = mapping_of(array)
    if not isinstance(memory, MappedFile) or array.flags.writeable or not array.flags.c_contiguous:
        return None
    start = int(np.frombuffer(memory, np.uint8).ctypes.data)
    return Place(memory.path, memory.identity, int(array.ctypes.data) - start, array.nbytes)


def give_back(arrays: Iterable[NDArray[Any]], *, whole: bool = False) -> None:
    """Takes the pages that these arrays have in mapped files out of this process; who reads them again, gets them anew.

    `whole`: all pages of these files. The system keeps what it has read of a file, so coming back costs some 25 µs a
    MiB. Nothing happens to memory that is no mapped file, and where the system can't do it.
    """
    advice: int | None = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None:
        return
    files: dict[int, mmap.mmap] = {}
    for array in arrays:
        memory = mapping_of(array)
        if not isinstance(memory, MappedFile) or memory.writable or not array.nbytes:
            continue
        if whole:
            files[id(memory)] = memory
            continue
        place = int(array.ctypes.data) - int(np.frombuffer(memory, np.uint8).ctypes.data)
        start = place - place % mmap.PAGESIZE
        memory.madvise(advice, start, min(place + array.nbytes, len(memory)) - start)
    for memory in files.values():
        memory.madvise(advice)


class Unread(mmap.mmap):
    """Stands for bytes of a file that nobody has read. `aligned`: whether kernels could read them where they lie."""

    aligned: bool


def unread(row: NDArray[Any], shape: tuple[int, ...], *, aligned: bool) -> NDArray[Any]:
    """A read-only array that stands for one of the file, and takes no memory: this row, over and over."""
    with enough_memory(row.nbytes, "a row"):
        memory = Unread(-1, max(1, row.nbytes))
    memory.aligned = aligned
    first = np.frombuffer(memory, np.uint8)[: row.nbytes].view(row.dtype)
    first[...] = row
    first.flags.writeable = False
    return np.broadcast_to(first, shape)


def lies_in_file(array: NDArray[Any]) -> bool:
    """Whether it is a compact read-only array of bytes of a mapped file, read or not: not private memory."""
    memory = mapping_of(array)
    if isinstance(memory, Unread):
        return array.strides[:-1] == (0,) * (array.ndim - 1)
    return isinstance(memory, MappedFile) and array.flags.c_contiguous and not array.flags.writeable


def read_in_place(array: NDArray[Any]) -> bool:
    """Whether kernels can read the array where it lies, in a mapped file that nobody writes through it."""
    memory = mapping_of(array)
    if isinstance(memory, Unread):
        return memory.aligned and lies_in_file(array)
    flags = array.flags
    return memory is not None and flags.c_contiguous and flags.aligned and not flags.writeable


@contextmanager
def enough_memory(nbytes: int, what: str) -> Iterator[None]:
    """Raises `MemoryDeficit` where the system refuses the memory that is taken in the block."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryDeficit(
            f"the system gives no {nbytes} bytes for {what}: free memory, or raise the limit of this process"
        ) from error


class OwnPages(mmap.mmap):
    """Memory that is written once, before anyone else sees it; `serial` is never given again in this process."""

    serial: int


_serials = itertools.count()


def to_own_pages(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only, compact copy in pages of its own, which devices keep without copying as they do a mapped file."""
    with enough_memory(array.nbytes, "a weight"):
        memory = OwnPages(-1, max(1, array.nbytes), access=mmap.ACCESS_COPY)
    memory.serial = next(_serials)
    made = np.frombuffer(memory, np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy_to(made, array)
    made.flags.writeable = False
    return made


def copy_to(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copies an array to a compact one of its type and shape; NumPy alone takes misaligned elements one by one.

    What has been read of a mapped file is given back part by part: both are never in memory whole.
    """
    if not source.flags.c_contiguous:
        target[...] = source
        return
    to, of = (array.reshape(-1).view(np.uint8) for array in (target, source))
    for at in range(0, of.size, PART):
        part = of[at : at + PART]
        to[at : at + PART] = part
        if of.size > PART:
            give_back([part])


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """A compact copy; a large one in pages of its own, which the system has back as soon as nobody has it."""
    return np.array(array, order="C") if array.nbytes < OWN_PAGES else to_own_pages(array)


def same_memory(array: NDArray[Any]) -> tuple[object, ...] | None:
    """Equal for arrays over the same unchanging bytes, of a mapped file or of `to_own_pages`; None for all others."""
    place = place_of(array)
    if place is not None:
        return place.identity, place.offset, place.nbytes
    memory = mapping_of(array)
    if not isinstance(memory, OwnPages) or array.flags.writeable or not array.flags.c_contiguous:
        return None
    start = int(np.frombuffer(memory, np.uint8).ctypes.data)
    return memory.serial, int(array.ctypes.data) - start, array.nbytes
