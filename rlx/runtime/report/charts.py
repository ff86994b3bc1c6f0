"""The pictures of the report: roofline, a bar for each kernel, a timeline of threads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from rlx import html
from rlx.cost.ceilings import Ceilings
from rlx.plan.render import short_name
from rlx.runtime.report.rooflines import KernelRow
from rlx.runtime.trace import RunTrace
from rlx.units import bytes_text, seconds_text

__all__ = ["MOST", "bars", "kinds_of", "roofline", "timeline", "tip"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 64, 20, 20, 44
MOST = 40  # kernels that are drawn as bars
LETTERS = 30  # of a kernel's name beside its bar
ROW, WIDEST, TAKEN = 18, 760, 80  # points from bar to bar, of the whole picture, and for the time at its right
TRACK, TIMES = 30, 110
LETTER = 6.6  # points that a letter takes, about


def kinds_of(rows: Sequence[KernelRow]) -> list[str]:
    """The kinds of kernels, which have a colour each, those that take longest first."""
    total: dict[str, float] = {}
    for row in rows:
        total[row.kind] = total.get(row.kind, 0.0) + (row.measured or row.predicted)
    return sorted(total, key=lambda kind: -total[kind])


def tip(row: KernelRow) -> str:
    """What is known of a kernel, a fact a line."""
    lines = [f"{row.name} ({row.kind})", f"predicted {seconds_text(row.predicted)}, bound by {row.bound}"]
    if row.measured is not None:
        lines.append(f"measured {seconds_text(row.measured)}, spread {seconds_text(row.spread)}")
    if row.fraction is not None:
        lines.append(f"{row.fraction:.0%} of the roofline")
    if row.disturbed:
        lines.append("disturbed: other programs had the processor, the time may be too long")
    lines.append(f"{bytes_text(row.bytes)} moved, {row.flops:,} flops")
    return "\n".join(lines)


class _Axes:
    """Logarithmic axes: flops per byte to the right, flops per second up."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.low_x, self.high_x = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
        self.low_y, self.high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 0.05)

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - self.low_x) / max(self.high_x - self.low_x, 1)
        up = (math.log10(y) - self.low_y) / max(self.high_y - self.low_y, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    def lines(self) -> Iterator[str]:
        """The grid and its numbers."""
        for e in range(self.low_x, self.high_x + 1):
            x, y = self.place(10.0**e, 10.0**self.low_y)
            yield f'<path class="grid" d="M{x:.1f} {TOP}V{y:.1f}"/>'
            yield f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{10.0**e:g}</text>'
        for e in range(self.low_y, self.high_y + 1):
            x, y = self.place(10.0**self.low_x, 10.0**e)
            yield f'<path class="grid" d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}"/>'
            yield f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**e / 1e9:g}</text>'
        middle = (HEIGHT - BOTTOM) / 2
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">flops per byte moved</text>'
        yield f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">Gflop/s</text>'

    def ceiling(self, rate: float, flops: float, name: str, dash: str) -> str:
        """A roof: rising where bytes bound, with its name along it."""
        low = 10.0**self.low_x
        start = max(low, 10.0**self.low_y / rate)
        knee = min(max(flops / rate, start), 10.0**self.high_x)
        points = [(start, start * rate), (knee, min(knee * rate, flops)), (10.0**self.high_x, flops)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*p) for p in points))
        (x0, y0), (x1, y1) = self.place(*points[0]), self.place(*points[1])
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        x, y = x0 + 0.3 * (x1 - x0), y0 + 0.3 * (y1 - y0)
        return (
            f'<polyline class="ceiling" points="{path}" stroke-dasharray="{dash}"/>'
            f'<text class="roof" transform="translate({x:.1f} {y - 6:.1f}) rotate({angle:.1f})">{escape(name)}</text>'
        )


def _rate(per_second: float) -> str:
    """Billions: 41.6, or 2,010."""
    billions = per_second / 1e9
    return f"{billions:,.0f}" if billions >= 1000 else f"{billions:.3g}"


def roofline(rows: Sequence[KernelRow], c: Ceilings) -> str:
    """Flops per second over flops per byte: measured kernels, else predicted ones, under what the device can do."""
    kinds = kinds_of(rows)
    slow, fast = (pick(rate for _, rate in c.bandwidth) for pick in (min, max))
    points = [(r, r.flops / r.bytes, r.flops / (r.measured or r.predicted)) for r in rows if r.flops and r.bytes]
    axes = _Axes(
        [x for _, x, _ in points] + [0.1, c.flops / slow], [y for *_, y in points] + [c.flops * 1.5, c.flops / 1e3]
    )
    lines = list(axes.lines())
    if fast > slow:
        lines.append(axes.ceiling(fast, c.flops, f"caches: {_rate(fast)} GB/s", "5 4"))
    lines.append(axes.ceiling(slow, c.flops, f"memory: {_rate(slow)} GB/s", "none"))
    x, y = axes.place(10.0**axes.high_x, c.flops)
    label = f"f32 products: {_rate(c.flops)} Gflop/s"
    lines.append(f'<text class="roof" x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end">{label}</text>')
    for row, a, b in points:
        x, y = axes.place(a, b)
        lines.append(
            f'<circle class="b{" disturbed" if row.disturbed else ""}" cx="{x:.1f}" cy="{y:.1f}" r="5" '
            f'fill="{html.colour(row.kind, kinds)}" fill-opacity=".8">'
            f"<title>{escape(tip(row))}\n{_rate(b)} Gflop/s at {a:.3g} flops per byte</title></circle>"
        )
    return html.svg(WIDTH, HEIGHT, "Roofline: flops per second of each kernel over its flops per byte", lines)


def bars(rows: Sequence[KernelRow]) -> str:
    """A bar for each of the longest kernels: its time, and a tick where a measured one was predicted.

    Letters have one size and bars take what the window leaves them, so nothing is cut off in a narrow one.
    """
    kinds = kinds_of(rows)
    ordered = sorted(rows, key=lambda r: -(r.measured or r.predicted))[:MOST]
    if not ordered:
        return "<p>No kernels: nothing is computed.</p>"
    longest = max(max(r.measured or 0.0, r.predicted) for r in ordered)
    names = [short_name(row.name, LETTERS) for row in ordered]
    left = round(LETTER * max(map(len, names))) + 8
    lines = []
    for i, (row, name) in enumerate(zip(ordered, names, strict=True)):
        y, taken = ROW * i + 4, row.measured or row.predicted
        room = f"(100% - {left + TAKEN}px)"
        mark = "? " if row.disturbed else ""
        lines.append(
            f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="b{" disturbed" if row.disturbed else ""}" x="{left}" y="{y}" '
            f'style="width:calc({room} * {taken / longest:.4f})" height="13" '
            f'fill="{html.colour(row.kind, kinds)}"><title>{escape(tip(row))}</title></rect>'
            f'<text x="100%" y="{y + 11}" text-anchor="end">{mark}{seconds_text(taken)}</text>'
        )
        if row.measured is not None:
            at = f"calc({left}px + {room} * {row.predicted / longest:.4f})"
            lines.append(f'<rect class="tick" style="x:{at}" y="{y - 2}" width="1" height="17"/>')
    height, name = ROW * len(ordered) + 8, "Time of each kernel; a tick is what was predicted"
    return html.svg(WIDEST, height, name, lines, scaled=False)


def timeline(trace: RunTrace, kinds: Sequence[str], kind_at: Sequence[str]) -> str:
    """A track of all kernels end to end, and one per thread; `kind_at` is the kind of each row of the trace."""
    total = trace.seconds or 1.0
    scale = (WIDTH - TIMES - RIGHT) / total
    spans = [(n, -1, start, row[2]) for n, (row, start) in enumerate(zip(trace.rows, _starts(trace), strict=True))]
    spans += trace.spans()
    threads = sorted({thread for _, thread, *_ in spans})
    lines = []
    for at, thread in enumerate(threads):
        name = "kernels" if thread < 0 else f"thread {thread}{' (caller)' if not thread else ''}"
        lines.append(f'<text x="{TIMES - 8}" y="{TRACK * at + 19}" text-anchor="end">{name}</text>')
        place = f'x="{TIMES}" y="{TRACK * at + 3}" width="{WIDTH - TIMES - RIGHT}" height="{TRACK - 6}"'
        lines.append(f'<rect class="frame" {place}/>')
    for number, thread, start, seconds in spans:
        kind, name, _ = row = trace.rows[number]
        fact = f"{name}\n{kind}\nfrom {seconds_text(start)}, for {seconds_text(seconds)}"
        lines.append(
            f'<rect class="b{" disturbed" if row.disturbed else ""}" x="{TIMES + scale * start:.2f}" '
            f'y="{TRACK * threads.index(thread) + 4}" width="{max(scale * seconds, 0.3):.2f}" height="{TRACK - 8}" '
            f'fill="{html.colour(kind_at[number], kinds)}"><title>{escape(fact)}</title></rect>'
        )
    bottom = TRACK * len(threads) + 16
    for part in range(5):
        x = TIMES + (WIDTH - TIMES - RIGHT) * part / 4
        anchor = "end" if part == 4 else "middle"
        lines.append(f'<text x="{x:.1f}" y="{bottom}" text-anchor="{anchor}">{seconds_text(total * part / 4)}</text>')
    return html.svg(WIDTH, bottom + 8, "Timeline: when each thread works on which kernel", lines)


def _starts(trace: RunTrace) -> Iterator[float]:
    start = 0.0
    for row in trace.rows:
        yield start
        start += row[2]
