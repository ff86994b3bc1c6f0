"""The values that the memory planner works on: buffers as live intervals, and where each of them was put."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import OptionError
from rlx.records import dataclass

__all__ = ["DEFAULT_ALIGNMENT", "Interval", "Placement", "round_up", "validate"]

DEFAULT_ALIGNMENT = 64  # a cache line, and the widest vector register in use


@dataclass(frozen=True)
class Interval:
    """One buffer: `size` bytes, live on the schedule steps [start, stop).

    Its offset is a multiple of `alignment` bytes (a power of two). `fixed` pins it at that offset. `guard` bytes after
    it are kept free while it is live (kernels may read them), unless it is empty. Only intervals of one memory `space`
    can share an arena.
    """

    name: str
    start: int
    stop: int
    size: int
    alignment: int = DEFAULT_ALIGNMENT
    fixed: int | None = None
    guard: int = 0
    space: str = ""

    def room(self, base_alignment: int) -> int:
        """The bytes that it takes in an arena: its size and guard, rounded up; 0 if it is empty."""
        return round_up(self.size + self.guard, base_alignment) if self.size else 0


@dataclass(frozen=True)
class Placement:
    """One byte offset an interval, in their order; `height` is the arena's size and `method` the packer that won.

    No plan of these intervals is lower than `bound`, as far as this was proved.
    """

    offsets: tuple[int, ...]
    height: int
    method: str
    bound: int = 0


def round_up(value: int, alignment: int) -> int:
    """`value` raised to the next multiple of `alignment`."""
    return -(-value // alignment) * alignment


def validate(intervals: Sequence[Interval], base_alignment: int) -> None:
    """Raise `OptionError` for an interval that no packer can place, or an alignment that is not a power of two."""
    if not _is_power_of_two(base_alignment):
        raise OptionError(f"base_alignment must be a power of two, got {base_alignment}")
    for interval in intervals:
        _validate_one(interval, base_alignment)


def _validate_one(interval: Interval, base_alignment: int) -> None:
    name = interval.name
    if interval.stop <= interval.start:
        raise OptionError(
            f"buffer {name!r}: empty live range [{interval.start}, {interval.stop}); a buffer that is written and "
            f"never read is live for one step, [{interval.start}, {interval.start + 1})"
        )
    if interval.size < 0:
        raise OptionError(f"buffer {name!r}: size must be 0 or more bytes, got {interval.size}")
    if interval.guard < 0:
        raise OptionError(f"buffer {name!r}: guard must be 0 or more bytes, got {interval.guard}")
    if not _is_power_of_two(interval.alignment):
        raise OptionError(f"buffer {name!r}: alignment must be a power of two, got {interval.alignment}")
    if interval.fixed is None:
        return
    alignment = max(interval.alignment, base_alignment)
    if interval.fixed < 0 or interval.fixed % alignment:
        raise OptionError(
            f"buffer {name!r}: fixed offset {interval.fixed} must be 0 or more and a multiple of {alignment}; "
            "move it or lower the alignment"
        )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
