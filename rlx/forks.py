"""A fork waits for what rlx is importing in other threads: the child would find those modules locked for ever."""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident
from importlib import _bootstrap
from typing import Any

__all__ = ["finish_imports"]

FOLDER = os.path.join(os.path.dirname(__file__), "")
IMPORTS = "<frozen importlib._bootstrap>"  # where Python has them
LONGEST = 10.0  # seconds that a fork waits


def finish_imports() -> None:
    """Waits until no other thread imports a module for rlx."""
    if not is_importing():
        return
    # an import may log, and for the fork this thread may have the lock of `logging` already
    lock: Any = getattr(sys.modules.get("logging"), "_lock", None)
    held = lock is not None and lock._is_owned()
    if held:
        lock.release()
    deadline = time.monotonic() + LONGEST
    try:
        while is_importing() and time.monotonic() < deadline:
            time.sleep(1e-3)
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=finish_imports)
