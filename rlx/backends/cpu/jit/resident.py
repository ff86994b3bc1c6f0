"""What the compiler needs of memory, kept small: pages of LLVM's library, and what its allocator has freed.

Of the library's 160 MB a compilation reads 19, page by page. The system brings 16 pages for each that is touched, which
makes 44 of them, but not where it is told otherwise (`single_pages`). Nobody needs any of them after compiling. Pages
that nobody can write are as they are in the file, so that they can go at any time, and come back when they are touched
(some 4 ms for those of a whole compilation).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time

from rlx.backends.cpu.jit import single_pages

__all__ = ["bring_single_pages", "give_back_library", "give_back_now_and_then"]

EVERY = 0.5  # seconds of compiling after which pages go that are not in use just now
LOAD, DYNAMIC = 1, 2  # kinds of segments
WRITABLE = 2
TEXT_RELOCATIONS, FLAGS, TEXT_RELOCATIONS_FLAG = 22, 30, 4  # of the dynamic section

_last = [0.0]  # when pages went


class Segment(ctypes.Structure):
    """Of an ELF library in memory, 64 bits. (ELF, `Elf64_Phdr`)"""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        *[(name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_bytes", "bytes", "align")],
    )


class Loaded(ctypes.Structure):
    """A library in memory. (dl_iterate_phdr(3), `struct dl_phdr_info`)"""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(Segment)),
        ("count", ctypes.c_uint16),
    )


@functools.cache
def unwritable(path: str) -> tuple[tuple[int, int], ...]:
    """Address and bytes of each part of a loaded library that nobody can write, and the loader has not; () elsewhere
    than on 64-bit Linux.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return ()
    found: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)  # type: ignore[untyped-decorator]
    def each(library: ctypes._Pointer[Loaded], size: int, data: object) -> int:
        loaded = library.contents
        if loaded.name is None or loaded.name.decode(errors="replace") != path:
            return 0
        segments = loaded.segments[: loaded.count]
        if not any(s.kind == DYNAMIC and _changes_text(loaded.base + s.address) for s in segments):
            for s in segments:
                if s.kind == LOAD and not s.flags & WRITABLE:
                    start = loaded.base + s.address
                    end = start + s.bytes
                    start -= start % mmap.PAGESIZE
                    found.append((start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE))
        return 1

    walk = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)
    if walk is not None:
        walk(each, None)
    return tuple(found)


def _changes_text(dynamic: int) -> bool:
    """Whether the loader wrote to segments that are not writable, by the dynamic section at this address."""
    entries = (ctypes.c_int64 * 2 * 256).from_address(dynamic)
    for tag, value in entries:
        if tag == 0:
            break
        if tag == TEXT_RELOCATIONS or (tag == FLAGS and value & TEXT_RELOCATIONS_FLAG):
            return True
    return False


@functools.cache
def bring_single_pages(path: str | None) -> bool:
    """Has the system bring only those pages of a loaded library that are touched, for as long as the process lives.

    Nobody can write there. Returns whether the system does so.
    """
    return path is not None and single_pages.bring_single_pages(unwritable(path))


def give_back_library(path: str | None) -> None:
    """Takes the pages of a loaded library out of this process; those that are used come back."""
    _last[0] = time.monotonic()
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if path is None or advice is None:
        return
    madvise = ctypes.CDLL(None).madvise
    for start, size in unwritable(path):
        madvise(ctypes.c_size_t(start), ctypes.c_size_t(size), advice)


def give_back_now_and_then(path: str | None) -> None:
    """The same, where the last time is a while ago."""
    if time.monotonic() - _last[0] >= EVERY:
        give_back_library(path)
