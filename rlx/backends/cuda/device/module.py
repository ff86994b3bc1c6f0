"""Modules of the device: compiled code that stays loaded as long as somebody has these objects."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.backends.cuda.device.driver import driver
from rlx.backends.granted import cpu_count

__all__ = ["Modules"]


class Modules:
    """The functions of some texts, by symbol; the texts are compiled side by side."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.driver = driver()
        self.handles: list[Any] = []
        self.functions: dict[str, Any] = {}
        if not texts:
            return
        with ThreadPoolExecutor(min(len(texts), cpu_count())) as pool:
            images = list(pool.map(self.driver.build, texts))
        for image in images:
            self.handles.append(self.driver.load(image))

    def function(self, symbol: str, shared: int = 0) -> Any:
        """What a launch takes, which asks for so many bytes of shared memory."""
        found = self.functions.get(symbol)
        if found is None:
            found = next(f for f in (self.driver.function(h, symbol) for h in self.handles) if f is not None)
            self.driver.let_share(found, shared)
            self.functions[symbol] = found
        return found

    def __del__(self) -> None:
        for handle in getattr(self, "handles", ()):
            self.driver.drop(module=handle)
