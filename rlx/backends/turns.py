"""One thread at a time in a graph that runs on a library."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from rlx.errors import BusyError

__all__ = ["Turns"]


class Turns:
    """A lock that raises `BusyError` where it would wait, unless told to wait."""

    def __init__(self) -> None:
        self.restart()
        _turns.add(self)

    def restart(self) -> None:
        """Nobody has it: for a new one, and for a forked child, where other threads of the parent are not."""
        self.lock = Lock()
        self.holder = 0

    @contextmanager
    def taken(self, waits: bool) -> Iterator[None]:
        """Has it for the block. The thread that has it already (in a signal handler) is never told to wait."""
        if not self.lock.acquire(blocking=False):
            if not waits or self.holder == get_ident():
                raise BusyError(
                    "the compiled graph is running in another thread: compile one for each thread, `sync()` after "
                    "`submit`, or compile with busy='wait'"
                )
            self.lock.acquire()
        self.holder = get_ident()
        try:
            yield
        finally:
            self.holder = 0
            self.lock.release()


_turns: weakref.WeakSet[Turns] = weakref.WeakSet()


def restart_all() -> None:
    for turns in list(_turns):
        turns.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=restart_all)
