"""What this process may really use of the machine's memory: limits, usage, and what is left of the soft budget.

The figures are read once into `MemoryFigures` and everything else is arithmetic on them. What can't be known is None,
and never counts as "fits".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Literal, NoReturn

from rlx.backends.memory import host_memory
from rlx.errors import OptionError
from rlx.estimate.resident import address_bytes
from rlx.options import parse_bytes
from rlx.records import dataclass

__all__ = [
    "ADDRESS_SPACE",
    "COMPILED",
    "RESTORED",
    "UNKNOWN",
    "Answer",
    "Budget",
    "CgroupLevel",
    "MemoryFigures",
    "Unknown",
    "read_figures",
    "soft_budget",
]

DEFAULT_FRACTION = 0.8
FRACTION_VARIABLE = "RLX_SOFT_MEMORY_FRACTION"
BYTES_VARIABLE = "RLX_SOFT_MEMORY_BUDGET_BYTES"
ADDRESS_SPACE = "address space"  # the room that RLIMIT_AS leaves
COMPILED: set[str] = set()  # the devices that something was compiled for in this process
RESTORED: set[str] = set()  # those for which stored code was loaded
NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class Unknown(Enum):
    """The answer where the system doesn't tell; using it as a bool is an error."""

    UNKNOWN = "unknown"

    def __bool__(self) -> NoReturn:
        raise OptionError("whether it fits is unknown: compare with UNKNOWN, or give a budget in bytes")


UNKNOWN: Literal[Unknown.UNKNOWN] = Unknown.UNKNOWN
Answer = bool | Unknown


@dataclass(frozen=True)
class CgroupLevel:
    """Limit (None: none) and usage of one memory control group, in bytes.

    Where there is a limit, usage leaves out file pages that the group can drop.
    """

    limit: int | None
    usage: int


@dataclass(frozen=True)
class MemoryFigures:
    """What the system says, in bytes; None where it doesn't.

    `total`: physical RAM; `available`: what can be had without swapping; `cgroup`: the control groups that this process
    is in; `address_limit` and `address_used`: RLIMIT_AS and the address space in use; `private`: this process's own
    memory without pages of mapped files.
    """

    total: int | None = None
    available: int | None = None
    cgroup: tuple[CgroupLevel, ...] = ()
    address_limit: int | None = None
    address_used: int | None = None
    private: int | None = None

    @property
    def cgroup_limit(self) -> int | None:
        """The lowest limit of the control groups."""
        return min((level.limit for level in self.cgroup if level.limit is not None), default=None)

    @property
    def capacity(self) -> int | None:
        """The smaller of physical RAM and control group limit; None when RAM is not known."""
        return None if self.total is None else min(self.total, self.cgroup_limit or self.total)

    @property
    def rooms(self) -> dict[str, int]:
        """What each known limit still leaves."""
        found = {} if self.available is None else {"available memory": self.available}
        left = [max(0, level.limit - level.usage) for level in self.cgroup if level.limit is not None]
        if left:
            found["control group"] = min(left)
        if self.address_limit is not None and self.address_used is not None:
            found[ADDRESS_SPACE] = max(0, self.address_limit - self.address_used)
        return found

    @property
    def free(self) -> int | None:
        """What the system has free for this process; None unless every limit that applies is known."""
        known = self.available is not None and (self.address_limit is None or self.address_used is not None)
        return min(self.rooms.values()) if known else None


def soft_budget(
    figures: MemoryFigures, *, fraction: float | None = None, budget: int | str | None = None
) -> int | None:
    """Bytes that this process should not pass: an absolute budget, or a fraction (default 0.8) of the capacity.

    The order: arguments, RLX_SOFT_MEMORY_BUDGET_BYTES, RLX_SOFT_MEMORY_FRACTION, default; the variables are read at
    each call. None where the capacity is unknown. Raises `OptionError` for a bad value, also of a variable.
    """
    if budget is not None and fraction is not None:
        raise OptionError(f"budget={budget!r} and fraction={fraction!r}: give one of them")
    if budget is not None:
        return parse_bytes(budget)
    if fraction is None:
        text = os.environ.get(BYTES_VARIABLE)
        if text is not None:
            return _variable_bytes(text)
        fraction = _variable_fraction()
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise OptionError(f"soft memory fraction {fraction!r}: expected a number in (0, 1]")
    if figures.capacity is None:
        return None
    numerator, denominator = float(fraction).as_integer_ratio()
    return figures.capacity * numerator // denominator


def _variable_bytes(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.strip().isdecimal() else text)
    except OptionError:
        raise OptionError(f"{BYTES_VARIABLE}={text!r}: expected bytes, such as 8589934592 or 8GiB") from None


def _variable_fraction() -> float:
    text = os.environ.get(FRACTION_VARIABLE)
    if text is None:
        return DEFAULT_FRACTION
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise OptionError(f"{FRACTION_VARIABLE}={text!r}: expected a number in (0, 1], such as 0.8")
    return value


@dataclass(frozen=True)
class Budget:
    """A soft budget over some figures."""

    figures: MemoryFigures
    soft: int | None

    @staticmethod
    def of_process(*, fraction: float | None = None, budget: int | str | None = None) -> Budget:
        """The budget of this process now; arguments as in `soft_budget`."""
        figures = read_figures()
        return Budget(figures, soft_budget(figures, fraction=fraction, budget=budget))

    @property
    def soft_room(self) -> int | None:
        """Soft budget less own private memory, not below 0."""
        if self.soft is None or self.figures.private is None:
            return None
        return max(0, self.soft - self.figures.private)

    @property
    def headroom(self) -> int | None:
        """The smaller of what the soft budget and what the system leave, in bytes; None where either is unknown."""
        room, free = self.soft_room, self.figures.free
        return None if room is None or free is None else min(room, free)

    def would_exceed(self, nbytes: int) -> Answer:
        """Whether taking that many more bytes would pass the budget or what is free; `UNKNOWN` can't be a bool."""
        known = [*self.figures.rooms.values(), *([] if self.soft_room is None else [self.soft_room])]
        if any(nbytes > room for room in known):
            return True
        return UNKNOWN if self.headroom is None else False


# ---- reading the system


def read_figures() -> MemoryFigures:
    """The figures of this process and machine now."""
    memory = host_memory()
    limit, used = _address_space()
    return MemoryFigures(memory.total, memory.free, tuple(_cgroups()), limit, used, _private())


def _private() -> int | None:
    status = _fields("/proc/self/status")  # Linux, in KiB
    if "RssAnon" in status:
        return 1024 * (status["RssAnon"] + status.get("VmSwap", 0))
    import psutil

    try:
        process = psutil.Process()
        if sys.platform == "win32":
            return int(process.memory_info().private)
        return int(process.memory_full_info().uss)
    except (OSError, AttributeError, psutil.Error):
        return None


def _address_space() -> tuple[int | None, int | None]:
    """RLIMIT_AS (None: none, or no such limit on this system) and the address space in use."""
    if sys.platform == "win32":
        return None, None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None, None
    return soft, address_bytes() or None


def _text(path: str) -> str:
    """What a file of the system says."""
    with open(path, "rb") as file:  # `pathlib` and text files take twice as long
        return file.read().decode(errors="replace")


def _fields(path: str) -> dict[str, int]:
    """The numbers of a file of `name: value` or `name value` lines."""
    found = {}
    try:
        lines = _text(path).splitlines()
    except OSError:
        return {}
    for line in lines:
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdecimal():
            found[parts[0]] = int(parts[1])
    return found


def _cgroups() -> Iterator[CgroupLevel]:
    if sys.platform != "linux":
        return
    try:
        groups, mounts = _text("/proc/self/cgroup"), _text("/proc/self/mountinfo")
    except OSError:
        return
    yield from cgroup_levels(groups, mounts)


def cgroup_levels(groups: str, mounts: str) -> Iterator[CgroupLevel]:
    """The memory control groups named by the texts of /proc/self/cgroup and /proc/self/mountinfo, innermost first."""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if len(before) < 5 or len(after) < 3:
            continue
        second = after[0] == "cgroup2"
        if not second and not (after[0] == "cgroup" and "memory" in after[2].split(",")):
            continue
        root, mount = before[3], before[4]
        yield from _walk(mount, _below(root, _group_path(groups, second)), second)


def _group_path(groups: str, second: bool) -> str:
    for line in groups.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (second and number == "0" and not controllers) or (not second and "memory" in controllers.split(",")):
            return path
    return "/"


def _below(root: str, path: str) -> str:
    """The group's path below the part of the hierarchy that is mounted; a container sees its own group as the root."""
    if root != "/" and (path + "/").startswith(root.rstrip("/") + "/"):
        path = path[len(root.rstrip("/")) :]
    return path.strip("/")


def _walk(mount: str, path: str, second: bool) -> Iterator[CgroupLevel]:
    """The levels from a path below where the hierarchy is mounted, up to there."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not second:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    parts = [part for part in path.split("/") if part]
    for count in range(len(parts), -1, -1):
        level = _level("/".join([mount, *parts[:count]]), *names)
        if level is not None:
            yield level


def _level(folder: str, limit_name: str, usage_name: str, droppable: str) -> CgroupLevel | None:
    try:
        limit_text = _text(f"{folder}/{limit_name}").strip()
        usage = int(_text(f"{folder}/{usage_name}"))
        limit = NO_LIMIT if limit_text == "max" else int(limit_text)
    except (OSError, ValueError):
        return None
    if limit >= NO_LIMIT:
        return CgroupLevel(None, usage)  # the statistics take the system long to make
    return CgroupLevel(limit, max(0, usage - _fields(f"{folder}/memory.stat").get(droppable, 0)))
