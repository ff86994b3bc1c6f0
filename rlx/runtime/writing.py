"""Entries of the disk cache are written beside the program, which has its first answer sooner by what that takes.

A writer begins when the model has run once: not before, as the first run needs the processors. Where none comes soon it
begins without. Python waits for it at the end of a process; who closes the model, or loads the same file with the same
options again, waits for it too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlx.arithmetic import usual_arithmetic
from rlx.forks import restart_in_child
from rlx.heap import give_back_heap
from rlx.lazy_imports import log

__all__ = ["Writer"]

PATIENCE = 1.0  # seconds that a writer waits for the first run
LOOK = 0.05  # seconds after which it looks whether the program has come to its end


class Writer:
    """Calls `write`, which makes an entry, once: in a thread of its own, or at once where the system has none."""

    def __init__(self, entry: Path, write: Callable[[], None]) -> None:
        self.entry, self.write = entry, write
        self.begin = threading.Event()
        self.thread = threading.Thread(target=self._work, name="rlx cache")
        restart_in_child(self._leave_to_parent)
        try:
            self.thread.start()
        except RuntimeError:  # no thread to be had, or Python is ending
            self.begin.set()
            self._work()

    def _work(self) -> None:
        main, end = threading.main_thread(), time.monotonic() + PATIENCE
        while not self.begin.wait(LOOK) and main.is_alive() and time.monotonic() < end:
            pass
        try:
            with usual_arithmetic():
                self.write()
        except Exception as error:  # noqa: BLE001  # of which nothing depends but the next start
            log.warning("%s: not written to the cache: %r", self.entry, error)
        finally:
            del self.write  # and with it the model
            give_back_heap()

    def _leave_to_parent(self) -> None:
        """In a forked child, which has no such thread: the lock of the event may have been held, and is for ever."""
        self.begin = threading.Event()
        vars(self).pop("write", None)

    def finish(self) -> None:
        """Has it begin, and waits until the entry is there."""
        self.begin.set()
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join()
