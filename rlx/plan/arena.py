"""The memory plan of a program as it is kept: the arena, the place of every buffer in it, and what planning needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlx.errors import NameNotFound, OptionError
from rlx.ir.graph import Value
from rlx.ir.shape import Size, evaluate, numel
from rlx.kernels.program import Buffer, Kernel
from rlx.plan.interval import Interval, Placement, round_up
from rlx.records import dataclass, field, replace

if TYPE_CHECKING:  # what draws plans is imported where it is used: stored plans need none of it
    from rlx.plan.render import Totals

__all__ = ["MemoryPlan", "Row", "Schedule", "Slot", "size_of"]


@dataclass(frozen=True)
class Schedule:
    """What planning needs of a program, whatever the extents.

    `ranges`: [start, stop) of each root buffer of the arena over the steps of `program.run`, in order of writing;
    `makers`: the kernel that writes it; `operands`: the buffers that die there and whose place it may take; `bounds`:
    every dim at its upper bound, None where a dim or a size has none. `outside`: the ranges of what lives elsewhere
    (inputs to their last reader, all others for the whole run); `views`: the views that kernels and outputs use.
    """

    ranges: dict[Buffer, tuple[int, int]]
    makers: dict[Buffer, Kernel]
    operands: dict[Buffer, tuple[Buffer, ...]]
    bounds: dict[str, int] | None
    kernels: tuple[Kernel, ...]
    outside: dict[Buffer, tuple[int, int]]
    views: tuple[Buffer, ...]


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
    find: Callable[[Value | str], Buffer | None] | None = field(default=None, repr=False)  # `Places.find`, to look up

    def __getitem__(self, value: Buffer | Value | str) -> Slot:
        """The place of a buffer, a view, or of a value or output of the graph that was compiled, also by name.

        Raises `NameNotFound` for what is nowhere in the arena, with the reason.
        """
        if isinstance(value, Buffer):
            if value.base in self.offsets:
                return Slot(self.address(value), self.nbytes(value), value.base)
            raise NameNotFound(f"buffer {value.name!r} ({value.kind}) has no place in this plan")
        if self.find is not None:
            found = self.find(value)
            if found is not None:
                return self._slot(found)
        elif isinstance(value, Value):
            raise NameNotFound("the plan of a program knows buffers and their names; model.plan also knows values")
        for buffer in (*self.offsets, *self.views):
            if buffer.name == value and buffer.base in self.offsets:
                return self[buffer]
        raise NameNotFound(f"no buffer or value {value!r} in this plan: see plan.table()")

    def _slot(self, buffer: Buffer) -> Slot:
        """The place of a buffer of the same program before kernels got their layouts."""
        base = buffer.base
        if base.kind != "arena":
            raise NameNotFound(f"buffer {buffer.name!r} ({base.kind}) has no place in this plan: it lies elsewhere")
        count = evaluate(numel(base.shape), self.at)
        for own in self.offsets:
            if own.name == base.name and own.dtype == base.dtype and evaluate(numel(own.shape), self.at) == count:
                return self[own if buffer is base else replace(buffer, root=own)]
        raise NameNotFound(f"buffer {buffer.name!r} is never in memory as a whole: its reader makes it part by part")

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
    def marks(self) -> tuple[str, ...]:
        """By interval, in a gradient: "kept for backward", "again" of what kernels make that run again, or ""."""
        from rlx.plan.again import kept_for_backward, made_again

        said = dict.fromkeys(kept_for_backward(self.schedule), "kept for backward")
        said |= dict.fromkeys(made_again(self.schedule), "again")
        return tuple(next((said[b] for b in buffers if b in said), "") for buffers in self.held)

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
        text = render.to_text(
            self.intervals, self.placement, base_alignment=self.alignment, letters=letters, marks=self.marks
        )
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

        return page.to_html(
            self.intervals, self.placement, base_alignment=self.alignment, steps=self.steps, marks=self.marks
        )

    def to_svg(self) -> str:
        """The map as a picture."""
        from rlx.plan import page

        return page.to_svg(
            self.intervals, self.placement, base_alignment=self.alignment, steps=self.steps, marks=self.marks
        )

    @property
    def steps(self) -> list[str]:
        """The names of the kernels in the order of a run."""
        return [kernel.label for kernel in self.schedule]

    def _repr_html_(self) -> str:
        from rlx import html
        from rlx.plan import page

        body = page.map_of(
            self.intervals,
            self.placement,
            base_alignment=self.alignment,
            steps=self.steps,
            search=False,
            marks=self.marks,
        )
        return html.fragment(body)


def size_of(
    buffer: Buffer,
    extents: Mapping[str, int],
    at_bounds: bool,
    element_width: int | None = None,
    spread: Mapping[str, Size] | None = None,
) -> int:
    """Bytes of a buffer; the most that they can be where the extents are the bounds, or over the range of `spread`."""
    if element_width is not None:
        if buffer.encoding is not None or buffer.dtype.bits > 8 * element_width:
            raise OptionError(
                f"buffer {buffer.name!r} of {buffer.encoding or buffer.dtype} does not fit the element_width of "
                f"{element_width} bytes: widen it, or plan without one"
            )
        count = numel([evaluate(size, extents) for size in buffer.shape])
        assert isinstance(count, int)
        return count * element_width
    bound = buffer.bound() if at_bounds else buffer.most({**extents, **spread}) if spread else None
    return buffer.nbytes(dict(extents)) if bound is None else bound
