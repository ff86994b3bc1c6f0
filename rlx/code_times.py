"""Where the time of making code goes, for who asks: `with noted() as times:` around a compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import thread_time
from typing import TypeVar

from rlx.records import dataclass, field

__all__ = ["CodeTimes", "Emitted", "Module", "noted", "taken", "times"]

T = TypeVar("T")


@dataclass
class Emitted:
    """The text of a kernel: how it is computed, the names of its functions, characters, seconds."""

    how: str
    functions: tuple[str, ...]
    text: int
    seconds: float


@dataclass
class Module:
    """Functions that were compiled together: characters, and seconds of a thread by step."""

    functions: tuple[str, ...]
    text: int
    seconds: dict[str, float] = field(default_factory=dict)  # "parse", "passes", "code"


@dataclass
class CodeTimes:
    """Of one compile. `alike`: kernels that took the text of another; `came`, `kept`: functions whose machine code came
    with rlx or was on disk.
    """

    emitted: list[Emitted] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)
    alike: int = 0
    came: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


_times: ContextVar[CodeTimes | None] = ContextVar("rlx_code_times", default=None)


@contextmanager
def noted() -> Iterator[CodeTimes]:
    """Within the block compiles of this thread note their times in what it gives."""
    made = CodeTimes()
    token = _times.set(made)
    try:
        yield made
    finally:
        _times.reset(token)


def times() -> CodeTimes | None:
    """Where this thread's compile notes its times, None where nobody asks."""
    return _times.get()


def taken(module: Module | None, step: str, work: Callable[[], T]) -> T:
    """Does a step of compiling a module and notes how long this thread worked on it."""
    if module is None:
        return work()
    begun = thread_time()
    try:
        return work()
    finally:
        module.seconds[step] = module.seconds.get(step, 0.0) + thread_time() - begun
