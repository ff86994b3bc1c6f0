"""The map of a plan as one HTML page: boxes of time x address, with a buffer's facts under the pointer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from rlx.plan.bound import live_bytes
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement
from rlx.plan.render import short_name, short_names, show_bytes, totals

__all__ = ["to_html"]

_WIDTH, _HEIGHT, _CURVE, _LEFT = 1100, 520, 110, 90  # of the map, of the curve below it, and of the scale beside them
_TICKS = 8
_LABEL_ROOM = (60, 13)  # a box with at least this room, in points, along and across its name shows it
_LABEL_LETTERS = 16  # names that are longer are shown without what they have in common
_CHARACTER = 7.2  # points that a letter of a name takes

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; max-width: 1240px; padding: 0 16px; }
h1 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
rect.b { stroke: Canvas; stroke-width: .7; }
rect.b:hover, rect.hit { stroke: #000; stroke-width: 2; }
svg text.n { fill: #111; pointer-events: none; paint-order: stroke; stroke: #fff8; stroke-width: 3px; }
#tip { position: fixed; display: none; pointer-events: none; background: #222; color: #fff; padding: 6px 10px;
  border-radius: 4px; font-size: 12px; white-space: pre-line; overflow-wrap: anywhere; max-width: 420px; }
input { font: inherit; padding: 3px 8px; width: 260px; }
"""

_SCRIPT = """
const facts = JSON.parse(document.getElementById('facts').textContent);
const tip = document.getElementById('tip');
const boxes = [...document.querySelectorAll('rect.b')];
document.querySelector('svg').addEventListener('mousemove', e => {
  const box = e.target.closest('rect.b');
  tip.style.display = box ? 'block' : 'none';
  if (!box) return;
  tip.textContent = facts[box.dataset.i];
  const left = Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.left = left + 'px'; tip.style.top = top + 'px';
});
document.querySelector('svg').addEventListener('mouseleave', () => { tip.style.display = 'none'; });
document.querySelector('input').addEventListener('input', e => {
  const word = e.target.value.toLowerCase();
  for (const box of boxes) box.classList.toggle('hit', !!word && facts[box.dataset.i].toLowerCase().includes(word));
});
"""


def to_html(
    intervals: Sequence[Interval],
    placement: Placement,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    steps: Sequence[str] = (),
) -> str:
    """A self-contained page; `steps` names the kernel of each step of the schedule, where known."""
    sums = totals(intervals, placement, base_alignment=base_alignment)
    first = min((interval.start for interval in intervals), default=0)
    last = max((interval.stop for interval in intervals), default=1)
    scale = _Scale(first, last, max(placement.height, 1))
    facts = [_facts(i, o, steps) for i, o in zip(intervals, placement.offsets, strict=True)]
    labels = short_names([interval.name for interval in intervals], _LABEL_LETTERS)
    peak = escape(steps[sums.peak_step]) if sums.peak_step < len(steps) else ""
    placed = [(n, i, o) for n, (i, o) in enumerate(zip(intervals, placement.offsets, strict=True)) if i.size]
    body = [
        *scale.axes(),
        *(scale.box(n, i, o) for n, i, o in placed),
        *scale.marks(sums.peak_step, sums.lower_bound),
        *(scale.label(i, o, labels[n]) for n, i, o in placed),
        scale.curve(live_bytes(intervals, base_alignment=base_alignment)),
    ]
    data = json.dumps(facts).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Memory map</title><style>{_STYLE}</style></head><body>
<h1>Memory map: {show_bytes(sums.arena)}</h1>
<p>Lower bound {show_bytes(sums.lower_bound)} at step {sums.peak_step}{f" ({peak})" if peak else ""}, gap
{100 * sums.gap:.2f} %, {sums.buffers} buffers of {show_bytes(sums.unshared)} together.
Packed by: {escape(sums.method)}.</p>
<p><input type="search" placeholder="find a buffer or kernel" aria-label="find a buffer or kernel"></p>
<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {_HEIGHT + _CURVE + 70}" role="img" aria-label="time to the right, address up">
{chr(10).join(body)}
</svg><div id="tip"></div><script type="application/json" id="facts">{data}</script><script>{_SCRIPT}</script>
</body></html>
"""


def _facts(interval: Interval, offset: int, steps: Sequence[str]) -> str:
    lines = [
        interval.name,
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

    def box(self, number: int, interval: Interval, offset: int) -> str:
        x, y, width, height = self.place(interval, offset)
        return (
            f'<rect class="b" data-i="{number}" x="{x}" y="{y}" width="{width}" height="{height}" '
            f'fill="hsl({number * 137 % 360},55%,68%)"/>'
        )

    def label(self, interval: Interval, offset: int, short: str) -> str:
        """The name of a buffer in its box, along its longer side, where there is room."""
        x, y, width, height = self.place(interval, offset)
        along, across = _LABEL_ROOM
        upright = width < along <= height and width >= across
        if not upright and (width < along or height < across):
            return ""
        room = int(((height if upright else width) - 8) / _CHARACTER)
        name = escape(interval.name if len(interval.name) <= room else short_name(short, room))
        if upright:
            left, bottom = round(x + width / 2 + 4, 2), round(y + height - 4, 2)
            return f'<text class="n" transform="translate({left} {bottom}) rotate(-90)">{name}</text>'
        return f'<text class="n" x="{x + 4}" y="{round(y + height / 2 + 4, 2)}">{name}</text>'

    def axes(self) -> list[str]:
        """The frame, and round numbers of steps and bytes beside it."""
        lines = [f'<rect x="{_LEFT}" y="10" width="{_WIDTH}" height="{_HEIGHT}" fill="#8881"/>']
        lines.append(f'<text x="{_LEFT - 6}" y="{_HEIGHT + 26}" text-anchor="end">step</text>')
        for address in _round_ticks(0, self.height, binary=True):
            y = self.y(address)
            label = show_bytes(address).partition(" (")[0]
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
            lines.append(f'<path d="M{_LEFT} {y}H{_LEFT + _WIDTH}" stroke="#8884"/>')
        for step in _round_ticks(self.first, self.last, binary=False):
            lines.append(f'<text x="{self.x(step)}" y="{_HEIGHT + 26}" text-anchor="middle">{step}</text>')
        return lines

    def marks(self, peak_step: int, bound: int) -> list[str]:
        """The peak step and the lower bound."""
        path = f"M{self.x(peak_step)} 10V{10 + _HEIGHT}M{_LEFT} {self.y(bound)}H{_LEFT + _WIDTH}"
        return [f'<path d="{path}" stroke="#c00" stroke-dasharray="4 3" fill="none" pointer-events="none"/>']

    def curve(self, live: Sequence[tuple[int, int]]) -> str:
        """Bytes live at each step."""
        base = _HEIGHT + 50 + _CURVE
        points = [f"M{_LEFT} {base}"]
        for step, total in live:
            points.append(f"H{self.x(step)}V{round(base - total * _CURVE / self.height, 2)}")
        points.append(f"H{_LEFT + _WIDTH}V{base}Z")
        label = f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">live bytes</text>'
        return f'{label}<path d="{"".join(points)}" fill="#48c8" stroke="#48c"/>'


def _round_ticks(low: int, high: int, *, binary: bool) -> list[int]:
    """At most some eight multiples of a round number in [low, high]."""
    step = 1
    while (high - low) / step > _TICKS:
        step = step * 2 if binary or str(step)[0] in "15" else step * 5 // 2
    return list(range(-(-low // step) * step, high + 1, step))
