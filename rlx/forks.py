"""A lock that another thread holds at a fork is never released in the child: what is done about the locks of rlx.

A fork waits for what rlx is importing in other threads, and for those in an `Undivided` part of code. Other locks,
which may be held for long, are new in the child.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from importlib import _bootstrap
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["Undivided", "finish_imports", "restart_in_child"]

FOLDER = os.path.join(os.path.dirname(__file__), "")
IMPORTS = "<frozen importlib._bootstrap>"  # where Python has them
LONGEST = 10.0  # seconds that a fork waits


def finish_imports() -> None:
    """Waits until no other thread imports a module for rlx."""
    if not is_importing():
        return
    deadline = time.monotonic() + LONGEST
    with logging_allowed():
        while is_importing() and time.monotonic() < deadline:
            time.sleep(1e-3)


@contextmanager
def logging_allowed() -> Iterator[None]:
    """Whom a fork waits for may log: this thread lets go of the lock of `logging`, which it may have for the fork."""
    lock: Any = getattr(sys.modules.get("logging"), "_lock", None)
    held = lock is not None and lock._is_owned()
    if held:
        lock.release()
    try:
        yield
    finally:
        if held:
            lock.acquire()


def is_importing() -> bool:
    """Whether another thread imports a part of rlx, or something that a part of rlx needs.

    An import that is not for rlx may take for ever, as that of a module which is a server and runs graphs.
    """
    # Python has no public word for it: a module is locked before it is in sys.modules, and until it is complete
    locks: dict[str, Any] = getattr(_bootstrap, "_module_locks", {})
    owners = {name: getattr(ref(), "owner", None) for name, ref in list(locks.items())}
    others = {name: owner for name, owner in owners.items() if owner not in (None, get_ident())}
    if not others:
        return False
    frames = sys._current_frames()
    return any(name.partition(".")[0] == "rlx" or imports_for_rlx(frames.get(owner)) for name, owner in others.items())


def imports_for_rlx(frame: Any) -> bool:
    """Whether a function of rlx is among those that have called the innermost import."""
    imports = False
    while frame is not None:
        file = frame.f_code.co_filename
        imports = imports or file == IMPORTS
        if imports and file.startswith(FOLDER):
            return True
        frame = frame.f_back
    return False


class Undivided(ContextDecorator):
    """Code that other threads may be in at once, but not at a fork: it waits until they are out, `LONGEST` at most."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, for signal handlers
        self.changed = threading.Condition(self.lock)
        self.inside: list[int] = []  # threads, each as often as it is in
        self.forks = 0  # that wait for those, which the others wait for
        if hasattr(os, "register_at_fork"):
            # in the parent no Python code: an interrupt that came during the fork would be raised as it begins
            after = self.lock.release
            os.register_at_fork(before=self.begin, after_in_parent=after, after_in_child=self.end_in_child)

    def __enter__(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.forks or get_ident() in self.inside)
            self.inside.append(get_ident())

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.inside.remove(get_ident())
            self.changed.notify_all()

    def begin(self) -> None:
        """Waits; holds the lock from then on, which keeps the others out."""
        self.lock.acquire()
        self.forks += 1
        try:
            with logging_allowed():
                self.changed.wait_for(lambda: set(self.inside) <= {get_ident()}, LONGEST)
        finally:
            self.forks -= 1
            self.changed.notify_all()

    def end_in_child(self) -> None:
        """Of the threads only this one is there."""
        free = getattr(self.lock, "_at_fork_reinit", self.lock.release)  # the same lock: later forks let go of it
        free()
        self.changed = threading.Condition(self.lock)
        self.inside = [thread for thread in self.inside if thread == get_ident()]
        self.forks = 0


_restarted: WeakValueDictionary[tuple[int, str], Any] = WeakValueDictionary()


def restart_in_child(method: Any) -> None:
    """Has every forked child call a method without arguments, which makes new locks, as long as its object lives."""
    _restarted[id(method.__self__), method.__name__] = method.__self__


def restart_all() -> None:
    for (_, name), thing in list(_restarted.items()):
        getattr(thing, name)()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=finish_imports, after_in_child=restart_all)
