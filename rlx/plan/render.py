"""A plan for people and tools: totals, a text table and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from rlx.plan.bound import lower_bound, peak_step
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement, round_up
from rlx.records import dataclass

__all__ = [
    "NAME_WIDTH", "Totals", "common_tail", "last_parts", "letters_for", "short_name", "short_names", "show_bytes",
    "to_json", "to_text", "totals",
]  # fmt: skip

NAME_WIDTH = 44  # letters of a name in the table: a line then fits a terminal of 100 columns
_OTHERS = 56  # letters that the other columns take, and the gaps between them


@dataclass(frozen=True)
class Totals:
    """What a plan comes to, in bytes; `gap` is the part of the arena's height above the lower bound (0.05 is 5 %)."""

    buffers: int
    arena: int
    lower_bound: int
    gap: float
    peak_step: int
    unshared: int
    saved: int
    method: str


def totals(intervals: Sequence[Interval], placement: Placement, *, base_alignment: int = DEFAULT_ALIGNMENT) -> Totals:
    """Arena, lower bound, gap, and the bytes saved by sharing against one place for every buffer."""
    bound = lower_bound(intervals, base_alignment=base_alignment)
    unshared = sum(round_up(interval.size, base_alignment) for interval in intervals)
    return Totals(
        buffers=len(intervals),
        arena=placement.height,
        lower_bound=bound,
        gap=placement.height / bound - 1 if bound else 0.0,
        peak_step=peak_step(intervals, base_alignment=base_alignment),
        unshared=unshared,
        saved=max(unshared - placement.height, 0),
        method=placement.method,
    )


def to_text(
    intervals: Sequence[Interval],
    placement: Placement,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    rows: int | None = None,
    letters: int | None = NAME_WIDTH,
    marks: Sequence[str] = (),
) -> str:
    """A table with one line a buffer in schedule order (the `rows` largest only, if given), and the totals.

    Names that are longer than `letters` (None: no limit) are shortened. `marks` says more of each buffer.
    """
    shown = range(len(intervals))
    if rows is not None:
        shown_largest = sorted(shown, key=lambda i: (-intervals[i].size, i))[:rows]
        lines = _table(intervals, placement, shown_largest, letters, marks)
        if len(intervals) > rows:
            lines.append(f"... and {len(intervals) - rows} smaller")
    else:
        lines = _table(intervals, placement, shown, letters, marks)
    sums = totals(intervals, placement, base_alignment=base_alignment)
    lines += [
        "",
        f"arena        {show_bytes(sums.arena)}",
        f"lower bound  {show_bytes(sums.lower_bound)}, reached at step {sums.peak_step}",
        f"gap          {100 * sums.gap:.2f} % ({sums.method})",
        f"unshared     {show_bytes(sums.unshared)} in {sums.buffers} buffers",
        f"saved        {show_bytes(sums.saved)} by sharing",
    ]
    return "\n".join(lines)


def _table(
    intervals: Sequence[Interval],
    placement: Placement,
    shown: Sequence[int],
    letters: int | None,
    marks: Sequence[str],
) -> list[str]:
    names = [interval.name for interval in intervals]
    names = names if letters is None else short_names(names, letters)
    cells = [("buffer", "live", "offset", "size", "align", "")]
    for index in sorted(shown, key=lambda i: (intervals[i].start, i)):
        interval = intervals[index]
        cells.append(
            (
                names[index],
                f"[{interval.start}, {interval.stop})",
                f"{placement.offsets[index]:,}",
                f"{interval.size:,}",
                str(interval.alignment),
                ("" if interval.fixed is None else "fixed") or (marks[index] if marks else ""),
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    return [
        "  ".join(
            text.ljust(width) if column in (0, 5) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def to_json(intervals: Sequence[Interval], placement: Placement, *, base_alignment: int = DEFAULT_ALIGNMENT) -> str:
    """The totals and every buffer as a JSON object with keys `totals` and `buffers`; sizes in bytes."""
    buffers = [
        {**asdict(interval), "offset": offset} for interval, offset in zip(intervals, placement.offsets, strict=True)
    ]
    sums = totals(intervals, placement, base_alignment=base_alignment)
    return json.dumps({"totals": asdict(sums), "buffers": buffers}, indent=1)


def short_name(name: str, width: int) -> str:
    """A name that is longer than `width` letters without its middle: both ends tell names apart."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return name[: max(width - 1 - tail, 0)] + "…" + name[len(name) - tail :]


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Names of at most `width` letters: what most long ones begin with goes first, then what most of them end with.

    Of what is still too long the middle goes.
    """
    found = {name: name for name in names}
    long = [name for name in found if len(name) > width]
    head = common_start(_largest_group(long, r"/?[^/.]*"))
    head = head[: head.rfind("/" if "/" in head else ".") + 1]  # whole parts of a path
    tail = common_tail(long)
    for name in long:
        short = name
        if head and name.startswith(head):
            short = f"…{name[len(head) :]}"
        if tail and len(short) > width and name.endswith(tail) and len(name) > len(head) + len(tail):
            short = f"{short.removesuffix(tail)}…"
        found[name] = short_name(short, width)
    return [found[name] for name in names]


def common_tail(names: Sequence[str]) -> str:
    """What most names end with, in whole words: "_output_0"."""
    tail = common_start([name[::-1] for name in _largest_group(names, r".*?([A-Za-z0-9]*)$")])[::-1]
    return re.sub(r"^[A-Za-z0-9]*", "", tail)


def last_parts(name: str, width: int) -> str:
    """As many of the last parts of a path as fit into `width` letters ("…" takes two), else the start of the last one.

    Empty where less than four letters of it would be left.
    """
    if len(name) <= width:
        return name
    ends = [match.end() for match in re.finditer(r"(?:/|\.(?![0-9]))(?=.)", name)]
    for start in ends:
        if len(name) - start + 2 <= width:
            return f"…{name[start:]}"
    return f"{name[ends[-1] if ends else 0 :][: width - 2]}…" if width >= 6 else ""


def _largest_group(names: Sequence[str], pattern: str) -> list[str]:
    """The names in which a pattern finds the same, if they are most of them."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        match = re.match(pattern, name)
        assert match is not None
        groups.setdefault(match.groups() or (match[0],), []).append(name)
    largest = max(groups.values(), key=len, default=[])
    return largest if len(largest) > max(1, len(names) // 2) else []


def common_start(names: Sequence[str]) -> str:
    """What all names begin with, nothing for no names."""
    first, last = min(names, default=""), max(names, default="")
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def letters_for(columns: int) -> int:
    """The letters of a name for which a table is at most that wide."""
    return max(columns - _OTHERS, NAME_WIDTH // 2)


def show_bytes(count: int) -> str:
    """1,234,567 bytes as `1.18 MiB (1,234,567 B)`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count:,} B" if unit == "B" else f"{value:.2f} {unit} ({count:,} B)"
