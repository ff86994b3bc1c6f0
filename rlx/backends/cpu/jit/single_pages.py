"""Memory of files of which the system brings only those pages that are touched, not 16 or 512 for each.

It brings no large pages where it is advised not to, and no pages around where a mapping is watched by userfaultfd. Such
mappings are watched here for writes that go on as if nobody watched, so that nothing else changes: a page costs its
0.3 us more often.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterable

__all__ = ["bring_single_pages"]

# userfaultfd(2) and <linux/userfaultfd.h>
WATCH = {"x86_64": 323, "aarch64": 282}  # numbers of the system call
OF_USER_CODE = 1  # UFFD_USER_MODE_ONLY, which needs no privilege
BEGIN, REGISTER = 0xC018AA3F, 0xC020AA00  # UFFDIO_API, UFFDIO_REGISTER
API, WRITES_GO_ON = 0xAA, 1 << 15  # UFFD_FEATURE_WP_ASYNC: of any mapping, since Linux 6.7
WRITES = 1 << 1  # UFFDIO_REGISTER_MODE_WP

_watches: dict[int, int | None] = {}  # the file descriptor of this process, by its number: a forked child needs its own


def bring_single_pages(ranges: Iterable[tuple[int, int]]) -> bool:
    """Has the system bring only those pages of mapped memory that are touched, as long as it is mapped.

    `ranges`: address and bytes of each; what shares a page with one belongs to it. Returns whether the system does so:
    it does not before Linux 6.7 and under filters of system calls, and all is as usual then.
    """
    page = mmap.PAGESIZE
    spans = [(start - start % page, -(-(start + size) // page) * page) for start, size in ranges]
    if not spans:
        return False
    watch = _watch()
    if watch is None:
        return False
    from fcntl import ioctl

    madvise, advice = ctypes.CDLL(None).madvise, mmap.MADV_NOHUGEPAGE
    try:
        for start, end in spans:
            madvise(ctypes.c_size_t(start), ctypes.c_size_t(end - start), advice)  # without effect where there are none
            ioctl(watch, REGISTER, struct.pack("QQQQ", start, end - start, WRITES, 0))
    except OSError:
        return False
    return True


def _watch() -> int | None:
    """The watch of this process, which lives as long as it does; None where the system has none such."""
    process = os.getpid()
    if process not in _watches:
        _watches.clear()
        _watches[process] = _new_watch()
    return _watches[process]


def _new_watch() -> int | None:
    number = WATCH.get(platform.machine())
    if number is None:
        return None
    from fcntl import ioctl

    watch = int(ctypes.CDLL(None).syscall(number, os.O_CLOEXEC | OF_USER_CODE))
    if watch < 0:
        return None
    try:
        ioctl(watch, BEGIN, struct.pack("QQQ", API, WRITES_GO_ON, 0))
    except OSError:
        os.close(watch)
        return None
    return watch
