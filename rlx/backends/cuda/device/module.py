"""A module of the device: compiled code that stays loaded as long as somebody has this object."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rlx.backends.cuda.device.driver import driver
from rlx.errors import RlxError

__all__ = ["Module"]


class Module:
    """The functions of a text, by symbol; one without functions is never compiled."""

    def __init__(self, text: str) -> None:
        self.driver = driver()
        self.pid = os.getpid()
        self.handle: Any = self.driver.load(self.driver.build(text)) if text else None
        self.functions: dict[str, Any] = {}

    def function(self, symbol: str) -> Any:
        """What a launch takes."""
        found = self.functions.get(symbol)
        if found is None:
            found = self.functions[symbol] = self.driver.function(self.handle, symbol)
        return found

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None and self.pid == os.getpid():
            with suppress(RlxError, AttributeError, TypeError), self.driver.current():  # the interpreter may be ending
                self.driver.unload(self.handle)
