"""The map of a plan: boxes of time x address, a buffer's facts under the pointer, and the bytes in use over time.

One drawing, as a page, as a part of the report and of notebooks, and as an SVG file.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlx import html
from rlx.plan.bound import live_bytes
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement
from rlx.plan.render import Totals, common_tail, last_parts, show_bytes, totals

__all__ = ["map_of", "to_html", "to_svg"]

_WIDTH, _HEIGHT, _CURVE, _LEFT = 1100, 520, 110, 90  # of the map, of the curve below it, and of the scale beside them
_TICKS = 8
_LABEL_ROOM = (60, 13)  # a box with at least this room, in points, along and across its name shows it
_CHARACTER = 7.2  # points that a letter of a name takes
_FILE_STYLE = (
    "text{font:12px sans-serif;fill:#1d2127}text.n{fill:#14171a}.frame{fill:#f4f6f8}.grid{stroke:#d7dbe0;fill:none}"
    ".mark{stroke:#c62828;fill:none}.b{stroke:#fff;stroke-width:.7}"
)


def to_html(
    intervals: Sequence[Interval],
    placement: Placement,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    steps: Sequence[str] = (),
    marks: Sequence[str] = (),
) -> str:
    """A self-contained page; `steps` names the kernel of each step of the schedule, where known.

    `marks` says more of each interval, see `MemoryPlan.marks`.
    """
    title = f"Memory map: {show_bytes(placement.height)}"
    body = map_of(intervals, placement, base_alignment=base_alignment, steps=steps, marks=marks)
    return html.page("Memory map", f"<h1>{title}</h1><section>{body}</section>")


def map_of(
    intervals: Sequence[Interval],
    placement: Placement,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    steps: Sequence[str] = (),
    search: bool = True,
    marks: Sequence[str] = (),
) -> str:
    """The map with its explanation, as a part of a page; `search`: with the field that finds buffers."""
    sums = totals(intervals, placement, base_alignment=base_alignment)
    peak = f" ({escape(steps[sums.peak_step])})" if sums.peak_step < len(steps) else ""
    hint = "find a buffer or kernel"
    field = f'<input class="find" type="search" placeholder="{hint}" aria-label="{hint}">'
    return f"""<p>Arena {show_bytes(sums.arena)}; lower bound {show_bytes(sums.lower_bound)} at step
{sums.peak_step}{peak}, gap {100 * sums.gap:.2f}&nbsp;%; {sums.buffers} buffers of {show_bytes(sums.unshared)} together.
Packed by: {escape(sums.method)}.</p>
<p class="soft">A box is a buffer: from the step that writes it to the last that reads it, at its addresses. Steps are
kernels in the order of a run. The dashed red lines are the step at which most bytes are in use, and the lower bound:
what any plan needs. Below: the bytes in use at each step; the distance to the top is free.</p>
{field if search else ""}<div class="wide">{_drawing(intervals, placement, base_alignment, steps, sums, marks)}</div>"""


def to_svg(
    intervals: Sequence[Interval],
    placement: Placement,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    steps: Sequence[str] = (),
    marks: Sequence[str] = (),
) -> str:
    """The drawing alone, as a file."""
    sums = totals(intervals, placement, base_alignment=base_alignment)
    drawn = _drawing(intervals, placement, base_alignment, steps, sums, marks)
    return drawn.replace(">", f"><style>{_FILE_STYLE}</style>", 1) + "\n"


def _drawing(
    intervals: Sequence[Interval],
    placement: Placement,
    base_alignment: int,
    steps: Sequence[str],
    sums: Totals,
    marks: Sequence[str],
) -> str:
    first = min((interval.start for interval in intervals), default=0)
    last = max((interval.stop for interval in intervals), default=1)
    scale = _Scale(first, last, max(placement.height, 1))
    tail = common_tail([interval.name for interval in intervals])
    said = [*marks, *[""] * (len(intervals) - len(marks))]
    placed = [(n, i, o) for n, (i, o) in enumerate(zip(intervals, placement.offsets, strict=True)) if i.size]
    body = [
        *scale.axes(),
        *(scale.box(n, i, o, _facts(i, o, steps, said[n])) for n, i, o in placed),
        *scale.marks(sums.peak_step, sums.lower_bound),
        *(scale.label(i, o, tail) for _, i, o in placed),
        scale.curve(live_bytes(intervals, base_alignment=base_alignment)),
    ]
    name = "Memory map: time to the right, address up; below it the bytes in use"
    return html.svg(_LEFT + _WIDTH + 10, _HEIGHT + _CURVE + 70, name, body)


def _facts(interval: Interval, offset: int, steps: Sequence[str], mark: str) -> str:
    lines = [
        interval.name,
        *([mark] if mark else []),
        f"{show_bytes(interval.size)} at {offset:,}",
        f"steps {interval.start} to {interval.stop - 1}",
    ]
    if interval.start < len(steps):
        lines.append(f"made by {steps[interval.start]}")
    if interval.start < interval.stop - 1 < len(steps):
        lines.append(f"last read by {steps[interval.stop - 1]}")
    return "\n".join(lines)


class _Scale:
    """Steps and addresses as points of the drawing."""

    def __init__(self, first: int, last: int, height: int) -> None:
        self.first, self.last, self.height = first, last, height

    def x(self, step: int) -> float:
        return round(_LEFT + (step - self.first) * _WIDTH / (self.last - self.first), 2)

    def y(self, address: int) -> float:
        return round(10 + _HEIGHT - address * _HEIGHT / self.height, 2)

    def place(self, interval: Interval, offset: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of a buffer."""
        x, y = self.x(interval.start), self.y(offset + interval.size)
        return x, y, round(self.x(interval.stop) - x, 2), round(self.y(offset) - y, 2)

    def box(self, number: int, interval: Interval, offset: int, facts: str) -> str:
        x, y, width, height = self.place(interval, offset)
        return (
            f'<rect class="b" x="{x}" y="{y}" width="{width}" height="{height}" '
            f'fill="hsl({number * 137 % 360},55%,68%)"><title>{escape(facts)}</title></rect>'
        )

    def label(self, interval: Interval, offset: int, tail: str) -> str:
        """The name of a buffer in its box, along its longer side, where there is room; most names end with `tail`."""
        x, y, width, height = self.place(interval, offset)
        along, across = _LABEL_ROOM
        upright = width < along <= height and width >= across
        if not upright and (width < along or height < across):
            return ""
        room = int(((height if upright else width) - 8) / _CHARACTER)
        name = escape(
            interval.name if len(interval.name) <= room else last_parts(interval.name.removesuffix(tail), room)
        )
        if upright:
            left, bottom = round(x + width / 2 + 4, 2), round(y + height - 4, 2)
            return f'<text class="n" transform="translate({left} {bottom}) rotate(-90)">{name}</text>'
        return f'<text class="n" x="{x + 4}" y="{round(y + height / 2 + 4, 2)}">{name}</text>'

    def axes(self) -> list[str]:
        """The frame, and round numbers of steps and bytes beside it."""
        lines = [f'<rect x="{_LEFT}" y="10" width="{_WIDTH}" height="{_HEIGHT}" class="frame"/>']
        lines.append(f'<text x="{_LEFT - 14}" y="{_HEIGHT + 26}" text-anchor="end">step</text>')
        for address in _round_ticks(0, self.height, binary=True):
            y = self.y(address)
            label = show_bytes(address).partition(" (")[0]
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
            lines.append(f'<path d="M{_LEFT} {y}H{_LEFT + _WIDTH}" class="grid"/>')
        for step in _round_ticks(self.first, self.last, binary=False):
            lines.append(f'<text x="{self.x(step)}" y="{_HEIGHT + 26}" text-anchor="middle">{step}</text>')
        return lines

    def marks(self, peak_step: int, bound: int) -> list[str]:
        """The peak step and the lower bound."""
        path = f"M{self.x(peak_step)} 10V{10 + _HEIGHT}M{_LEFT} {self.y(bound)}H{_LEFT + _WIDTH}"
        return [f'<path d="{path}" class="mark" stroke-dasharray="4 3" pointer-events="none"/>']

    def curve(self, live: Sequence[tuple[int, int]]) -> str:
        """Bytes live at each step."""
        base = _HEIGHT + 50 + _CURVE
        points = [f"M{_LEFT} {base}"]
        for step, total in live:
            points.append(f"H{self.x(step)}V{round(base - total * _CURVE / self.height, 2)}")
        points.append(f"H{_LEFT + _WIDTH}V{base}Z")
        label = f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">live bytes</text>'
        return f'{label}<path d="{"".join(points)}" fill="#4c78c8" fill-opacity=".5" stroke="#4c78c8"/>'


def _round_ticks(low: int, high: int, *, binary: bool) -> list[int]:
    """At most some eight multiples of a round number in [low, high]."""
    step = 1
    while (high - low) / step > _TICKS:
        step = step * 2 if binary or str(step)[0] in "15" else step * 5 // 2
    return list(range(-(-low // step) * step, high + 1, step))
