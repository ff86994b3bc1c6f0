"""Modules of the device: compiled code that stays loaded as long as somebody has these objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rlx.backends.cuda.device.driver import driver
from rlx.backends.granted import cpu_count
from rlx.errors import RlxError

__all__ = ["Modules"]


class Modules:
    """The functions of some texts, by symbol; the texts are compiled side by side."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.driver = driver()
        self.pid = os.getpid()
        self.handles: list[Any] = []
        self.functions: dict[str, Any] = {}
        if not texts:
            return
        with ThreadPoolExecutor(min(len(texts), cpu_count())) as pool:
            images = list(pool.map(self.driver.build, texts))
        for image in images:
            self.handles.append(self.driver.load(image))

    def function(self, symbol: str) -> Any:
        """What a launch takes."""
        found = self.functions.get(symbol)
        if found is None:
            found = next(f for f in (self.driver.function(h, symbol) for h in self.handles) if f is not None)
            self.functions[symbol] = found
        return found

    def __del__(self) -> None:
        if getattr(self, "handles", None) and self.pid == os.getpid():
            with suppress(RlxError, AttributeError, TypeError), self.driver.current():  # the interpreter may be ending
                for handle in self.handles:
                    self.driver.unload(handle)
