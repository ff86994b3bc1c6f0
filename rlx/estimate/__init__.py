"""What a model takes in memory, known before it is loaded; the module is called like the function, `rlx.estimate(...)`.

A package hides a function of its name as soon as one of its modules is imported, so it is callable itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`rlx.estimate.api.estimate`."""
        from rlx.estimate.api import estimate

        return estimate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
