"""Planning the memory of a program: one arena, and a place for every buffer in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rlx.errors import OptionError
from rlx.ir.shape import Size
from rlx.kernels.program import Buffer, Program
from rlx.plan.arena import MemoryPlan, Row, Schedule, Slot
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement, round_up, validate
from rlx.plan.liveness import Scratch, bound_extents, lifetimes, outside_buffers, schedule
from rlx.records import dataclass, replace

if TYPE_CHECKING:
    from rlx.plan.pack import Search

__all__ = ["MemoryPlan", "Row", "SharedWeights", "Slot", "bound_extents", "make_plan", "schedule"]

_MOST_CHECKED = 2000  # intervals up to which a plan is always proved


@dataclass(frozen=True)
class SharedWeights:
    """The places of a forward plan's params, by name, for plans whose params are the same memory."""

    slots: Mapping[str, Slot]

    @staticmethod
    def of(plan: MemoryPlan) -> SharedWeights:
        """Those of a plan made with `include=["params"]`."""
        params = [b for b in plan.offsets if b.kind == "param"]
        return SharedWeights({b.name: Slot(plan.offsets[b], plan.nbytes(b), b) for b in params})

    def offset(self, buffer: Buffer, nbytes: int) -> int:
        """The offset of a param of another program; `OptionError` where the forward plan has no such one."""
        slot = self.slots.get(buffer.name)
        if slot is None:
            raise OptionError(f"shared weights: the forward plan has no param {buffer.name!r}, only {list(self.slots)}")
        if (slot.nbytes, slot.root.dtype) != (nbytes, buffer.dtype):
            raise OptionError(
                f"shared weights: param {buffer.name!r} is {slot.nbytes} bytes of {slot.root.dtype} in the forward "
                f"plan and {nbytes} bytes of {buffer.dtype} here: expected the same"
            )
        return slot.offset

    @property
    def end(self) -> int:
        """The first byte beyond all slots."""
        return max((slot.offset + slot.nbytes for slot in self.slots.values()), default=0)


def make_plan(
    program: Program | Schedule,
    extents: Mapping[str, int],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    reuse: bool = True,
    extra: Sequence[Scratch] = (),
    verify: bool = True,
    guard: int = 0,
    include: Collection[str] = (),
    element_width: int | None = None,
    shared: SharedWeights | None = None,
    capacity: int | None = None,
    search: Search = "auto",
    spread: Mapping[str, Size] | None = None,
) -> MemoryPlan:
    """Plans the arena of `program.run` at `extents` (those of `bound_extents` make a plan that serves every run).

    `reuse=False` gives every buffer memory of its own. `extra` lists scratch as (name, step, bytes). `verify` proves
    the plan, unless it is so large that this would be slow. To plan again and again, give the program's `schedule`,
    which is most of the work. `guard`, `include`, `element_width` and `spread` are those of `lifetimes`, `capacity` and
    `search` those of `pack`. What is included and lives for the whole run lies below everything else; with `shared`,
    params are included and lie where the forward plan has them.
    """
    validate((), alignment)
    timeline = program if isinstance(program, Schedule) else schedule(program)
    if shared is not None:
        include = {*include, "params"}
    lives = lifetimes(
        timeline,
        extents,
        in_place=reuse,
        alignment=alignment,
        extra=extra,
        guard=guard,
        element_width=element_width,
        include=include,
        spread=spread,
    )
    intervals = _pin_weights(lives.intervals, lives.buffers, set(outside_buffers(timeline, include)), alignment, shared)
    placement = _pack_above(intervals, alignment, reuse, capacity, search, 0 if shared is None else shared.end)
    offsets: dict[Buffer, int] = {}
    scratch: dict[int, dict[str, int]] = {}
    for interval, buffers, offset in zip(intervals, lives.buffers, placement.offsets, strict=True):
        offsets.update(dict.fromkeys(buffers, offset))
        if not buffers:
            scratch.setdefault(interval.start, {})[interval.name] = offset
    rows = tuple(_rows(timeline, intervals, lives.buffers, offsets))
    plan = MemoryPlan(
        dict(extents),
        alignment,
        offsets,
        scratch,
        intervals,
        placement,
        lives.buffers,
        rows,
        timeline.kernels,
        timeline.views,
        element_width,
    )
    if verify and len(plan.intervals) < _MOST_CHECKED:
        plan.verify()
    return plan


def _pin_weights(
    intervals: Sequence[Interval],
    held: Sequence[tuple[Buffer, ...]],
    outside: Collection[Buffer],
    alignment: int,
    shared: SharedWeights | None,
) -> tuple[Interval, ...]:
    """Fixes what lives for the whole run at the bottom of the arena, shared params first."""
    end = 0 if shared is None else shared.end
    pinned = []
    for interval, buffers in zip(intervals, held, strict=True):
        fixed = None
        if buffers and buffers[0] in outside and buffers[0].kind != "input":
            if shared is not None and buffers[0].kind == "param":
                fixed = shared.offset(buffers[0], interval.size)
            else:
                fixed = round_up(end, alignment)
                end = fixed + interval.room(alignment)
        pinned.append(replace(interval, fixed=fixed))
    return tuple(pinned)


def _pack_above(
    intervals: Sequence[Interval], alignment: int, reuse: bool, capacity: int | None, search: Search, reserved: int
) -> Placement:
    """Packs what is free above what is fixed: as good as any plan, since that lives for the whole run."""
    from rlx.plan.pack import pack

    ends = [i.fixed + i.room(alignment) for i in intervals if i.fixed is not None]
    floor = round_up(max([reserved, *ends]), alignment)
    packed = pack(
        [i for i in intervals if i.fixed is None],
        base_alignment=alignment,
        reuse=reuse,
        capacity=None if capacity is None else capacity - floor,
        search=search,
    )
    free = iter(packed.offsets)
    offsets = tuple(next(free) + floor if i.fixed is None else i.fixed for i in intervals)
    return Placement(offsets, packed.height + floor, packed.method, packed.bound + floor)


def _rows(
    timeline: Schedule,
    intervals: Sequence[Interval],
    held: Sequence[tuple[Buffer, ...]],
    offsets: Mapping[Buffer, int],
) -> list[Row]:
    rows = []
    for interval, chain in zip(intervals, held, strict=True):
        for n, buffer in enumerate(chain):
            start, stop = timeline.ranges.get(buffer) or timeline.outside[buffer]
            rows.append(
                Row(
                    name=buffer.name,
                    type=f"{buffer.dtype}[{', '.join(map(str, buffer.shape))}]",
                    start=start,
                    stop=stop,
                    offset=offsets[buffer],
                    nbytes=interval.size,
                    made_by=timeline.makers[buffer].label if buffer in timeline.makers else buffer.kind,
                    into=chain[n - 1].name if n else "",
                )
            )
    return sorted(rows, key=lambda row: row.start)
