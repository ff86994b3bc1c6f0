"""The memory plan of a program: one arena, and the place of every buffer in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Program
from rlx.plan import render
from rlx.plan.check import check
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement, round_up
from rlx.plan.liveness import Schedule, Scratch, bound_extents, lifetimes, schedule
from rlx.plan.pack import pack
from rlx.plan.render import Totals

__all__ = ["MemoryPlan", "Row", "bound_extents", "make_plan", "schedule"]

_MOST_CHECKED = 2000  # intervals up to which a plan is always proved


@dataclass(frozen=True)
class Row:
    """One buffer of a plan as tables show it; `into` names the operand that it is written over, if any."""

    name: str
    type: str
    start: int
    stop: int
    offset: int
    nbytes: int
    made_by: str
    into: str


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Byte offsets into an arena for the buffers of a program's `run`, made for the extents `at` (bounds or actual).

    `offsets` has root buffers only (`address` also takes views); `scratch[step][name]` are offsets of working memory.
    """

    at: dict[str, int]
    alignment: int
    offsets: dict[Buffer, int]
    scratch: dict[int, dict[str, int]]
    intervals: tuple[Interval, ...]
    placement: Placement
    held: tuple[tuple[Buffer, ...], ...]  # by interval: the buffers in it, each written over the one before
    rows: tuple[Row, ...]

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return self.placement.height

    @property
    def totals(self) -> Totals:
        """Arena, lower bound, gap and savings of the packed intervals."""
        return render.totals(self.intervals, self.placement, base_alignment=self.alignment)

    @property
    def lower_bound(self) -> int:
        """The bytes that any plan with these intervals needs."""
        return self.totals.lower_bound

    @property
    def gap(self) -> float:
        """How far the arena is above the lower bound (0.05 is 5 %)."""
        return self.totals.gap

    @property
    def in_place(self) -> int:
        """Bytes of the buffers that are written over an operand."""
        return sum(round_up(row.nbytes, self.alignment) for row in self.rows if row.into)

    @property
    def saved(self) -> int:
        """Bytes saved by sharing and in place, against a place of its own for every buffer."""
        return self.totals.saved + self.in_place

    def address(self, buffer: Buffer, extents: Mapping[str, int] | None = None) -> int:
        """The byte offset of an arena buffer or a view of one, at the run's extents (default: those of the plan)."""
        return self.offsets[buffer.base] + evaluate(buffer.offset, self.at if extents is None else extents)

    def verify(self) -> None:
        """Proves the plan again; raises `CompileError` where buffers that are in use together overlap."""
        check(self.intervals, self.placement.offsets, self.arena, base_alignment=self.alignment)

    def table(self) -> list[Row]:
        """The buffers in the order in which they are written."""
        return list(self.rows)

    def __str__(self) -> str:
        text = render.to_text(self.intervals, self.placement, base_alignment=self.alignment)
        at = ", ".join(f"{name} = {value}" for name, value in self.at.items())
        count = sum(bool(row.into) for row in self.rows)
        return "\n".join(
            [
                *([f"at {at}"] if at else []),
                text,
                f"in place     {self.in_place:,} B in {count} buffers written over an operand",
            ]
        )

    def to_json(self) -> str:
        """The plan as a JSON object: `at`, `alignment`, `totals`, `buffers` (as packed) and `rows` (one a buffer)."""
        packed: dict[str, Any] = json.loads(
            render.to_json(self.intervals, self.placement, base_alignment=self.alignment)
        )
        packed["totals"]["in_place"] = self.in_place
        rows = [vars(row) for row in self.rows]
        return json.dumps({"at": self.at, "alignment": self.alignment, **packed, "rows": rows}, indent=1)

    def to_svg(self) -> str:
        """A map of the arena over the steps of the run."""
        return render.to_svg(self.intervals, self.placement, base_alignment=self.alignment)


def make_plan(
    program: Program | Schedule,
    extents: Mapping[str, int],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    reuse: bool = True,
    extra: Sequence[Scratch] = (),
    verify: bool = True,
) -> MemoryPlan:
    """Plans the arena of `program.run` at `extents` (those of `bound_extents` make a plan that serves every run).

    `reuse=False` gives every buffer memory of its own. `extra` lists scratch as (name, step, bytes). `verify` proves
    the plan, unless it is so large that this would be slow. To plan again and again, give the program's `schedule`,
    which is most of the work.
    """
    timeline = program if isinstance(program, Schedule) else schedule(program)
    lives = lifetimes(timeline, extents, in_place=reuse, alignment=alignment, extra=extra)
    placement = pack(lives.intervals, base_alignment=alignment, reuse=reuse)
    offsets: dict[Buffer, int] = {}
    scratch: dict[int, dict[str, int]] = {}
    for interval, buffers, offset in zip(lives.intervals, lives.buffers, placement.offsets, strict=True):
        offsets.update(dict.fromkeys(buffers, offset))
        if not buffers:
            scratch.setdefault(interval.start, {})[interval.name] = offset
    rows = _rows(timeline, lives.intervals, lives.buffers, offsets)
    plan = MemoryPlan(
        dict(extents), alignment, offsets, scratch, lives.intervals, placement, lives.buffers, tuple(rows)
    )
    if verify and len(plan.intervals) < _MOST_CHECKED:
        plan.verify()
    return plan


def _rows(
    timeline: Schedule,
    intervals: Sequence[Interval],
    held: Sequence[tuple[Buffer, ...]],
    offsets: Mapping[Buffer, int],
) -> list[Row]:
    rows = []
    for interval, chain in zip(intervals, held, strict=True):
        for n, buffer in enumerate(chain):
            start, stop = timeline.ranges[buffer]
            rows.append(
                Row(
                    name=buffer.name,
                    type=f"{buffer.dtype}[{', '.join(map(str, buffer.shape))}]",
                    start=start,
                    stop=stop,
                    offset=offsets[buffer],
                    nbytes=interval.size,
                    made_by=timeline.makers[buffer].label,
                    into=chain[n - 1].name if n else "",
                )
            )
    return sorted(rows, key=lambda row: row.start)
