"""The memory plan of a program: one arena, and the place of every buffer in it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import NameNotFound, OptionError
from rlx.ir.graph import Value
from rlx.ir.shape import Size, evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement, round_up, validate
from rlx.plan.liveness import Schedule, Scratch, bound_extents, lifetimes, outside_buffers, schedule, size_of
from rlx.records import dataclass, replace

if TYPE_CHECKING:  # what packs and draws plans is imported where it is used: stored plans need none of it
    from rlx.plan.pack import Search
    from rlx.plan.render import Totals

__all__ = ["MemoryPlan", "Row", "SharedWeights", "Slot", "bound_extents", "make_plan", "schedule"]

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


@dataclass(frozen=True)
class Slot:
    """Where a buffer or view lies in the arena, in bytes; `root` is the buffer that owns the memory."""

    offset: int
    nbytes: int
    root: Buffer


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
    schedule: tuple[Kernel, ...] = ()  # the kernels in the order in which they run
    views: tuple[Buffer, ...] = ()
    element_width: int | None = None  # bytes of every element, if it is not that of its type

    def __getitem__(self, value: Buffer | Value | str) -> Slot | Kernel:
        """The place of a buffer, a view or a value of the graph, or the kernel that the value was fused into."""
        if isinstance(value, Buffer):
            if value.base in self.offsets:
                return Slot(self.address(value), self.nbytes(value), value.base)
            raise NameNotFound(f"buffer {value.name!r} ({value.kind}) has no place in this plan")
        name = value if isinstance(value, str) else value.name
        for buffer in (*self.offsets, *self.views):
            if buffer.name == name and buffer.base in self.offsets:
                return self[buffer]
        for kernel in self.schedule:
            if any(name == output.name for node in kernel.nodes for output in node.outputs):
                return kernel
        raise NameNotFound(f"no buffer or value {name!r} in this plan: see plan.table()")

    def nbytes(self, buffer: Buffer) -> int:
        """Bytes of a buffer or view at the extents of the plan."""
        return size_of(buffer, self.at, False, self.element_width)

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return self.placement.height

    @property
    def totals(self) -> Totals:
        """Arena, lower bound, gap and savings of the packed intervals."""
        from rlx.plan import render

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
        offset = evaluate(buffer.offset, self.at if extents is None else extents)
        if self.element_width is not None:
            offset = 8 * offset // buffer.base.dtype.bits * self.element_width
        return self.offsets[buffer.base] + offset

    def verify(self) -> None:
        """Proves the plan again; raises `CompileError` where buffers that are in use together overlap."""
        from rlx.plan.check import check

        check(self.intervals, self.placement.offsets, self.arena, base_alignment=self.alignment)

    def table(self) -> list[Row]:
        """The buffers in the order in which they are written."""
        return list(self.rows)

    def __str__(self) -> str:
        return self.to_text(100)

    def to_text(self, columns: int | None = None) -> str:
        """A table of the buffers and the totals, on lines of that many letters (None: as long as names make them)."""
        from rlx.plan import render

        letters = None if columns is None else render.letters_for(columns)
        text = render.to_text(self.intervals, self.placement, base_alignment=self.alignment, letters=letters)
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
        from rlx.plan import render

        packed: dict[str, Any] = json.loads(
            render.to_json(self.intervals, self.placement, base_alignment=self.alignment)
        )
        packed["totals"]["in_place"] = self.in_place
        rows = [vars(row) for row in self.rows]
        return json.dumps({"at": self.at, "alignment": self.alignment, **packed, "rows": rows}, indent=1)

    def to_tsv(self) -> str:
        """A head line with the totals, then one tab-separated row a buffer, by offset, size and name."""
        rows = sorted(self.rows, key=lambda row: (row.offset, row.nbytes, row.name))
        head = (
            f"arena {self.arena}\tbound {self.lower_bound}\tgap {self.gap:.6f}"
            f"\tunshared {self.totals.unshared + self.in_place}\tsaved {self.saved}"
        )
        lines = [f"{r.offset}\t{r.nbytes}\t{r.name}\t{r.start}\t{r.stop}\t{r.type}\t{r.into}" for r in rows]
        return "\n".join([head, *lines]) + "\n"

    def to_html(self) -> str:
        """The map as a page that shows a buffer's facts under the pointer; it needs no other file."""
        from rlx.plan import page

        labels = [kernel.label for kernel in self.schedule]
        return page.to_html(self.intervals, self.placement, base_alignment=self.alignment, steps=labels)

    def to_svg(self) -> str:
        """A map of the arena over the steps of the run."""
        from rlx.plan import render

        return render.to_svg(self.intervals, self.placement, base_alignment=self.alignment)


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
