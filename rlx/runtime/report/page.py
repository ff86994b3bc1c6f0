"""The HTML report of a compiled graph: roofline chart, a bar for each kernel, the arena, the decision; one file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape

from rlx.disk import saving
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array
from rlx.plan.arena import MemoryPlan
from rlx.plan.render import short_name
from rlx.runtime.choice import Decision, usual_extents
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.report.rooflines import KernelRow, Rooflines, rooflines
from rlx.units import seconds_text

__all__ = ["report_page", "write_report"]

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 360, 70, 40
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222;
  background: #fff }
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #333 }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto } h1, h2 { font-weight: 600 }
table { border-collapse: collapse } td, th { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
"""
MOST = 40  # kernels that are drawn as bars
LETTERS = 28  # of a kernel's name beside its bar


def write_report(
    model: CompiledGraph, path: str | os.PathLike[str], arrays: Sequence[Array] | None, threads: int | None
) -> None:
    """Writes the page of a model at the extents of its inputs, or at the usual ones; see `CompiledGraph.report`."""
    graph = model.compilation.source
    shapes = {} if arrays is None else {s.name: a.shape for s, a in zip(model.inputs, arrays, strict=True)}
    at = usual_extents(graph, bind_extents(graph, shapes))
    found = rooflines(model, arrays, at=at, threads=threads, calibrate=False)
    page = report_page(graph.name, found, model.plan, model.decision)
    with saving(path, "report") as file:
        file.write(page.encode())


def report_page(title: str, found: Rooflines, plan: MemoryPlan | None, decision: Decision | None) -> str:
    """The page as HTML that needs nothing else."""
    p, io = found.prediction, found.io
    how = "a guess" if p.guessed else "calibrated"
    facts = (
        f"On {escape(io.device)}: {_time(p.seconds)} a run predicted ({_time(p.low)} to {_time(p.high)}, {how}); "
        f"{io.launches:,} launches ({io.launches_before:,} without fusion), {io.syncs:,} sync points, "
        f"{io.read_bytes + io.written_bytes:,} B moved, {io.flops:,} flops."
    )
    parts = [
        f"<h1>{escape(title)}</h1><p>{facts}</p>",
        "<h2>Roofline</h2>",
        _roofline(found),
        "<h2>Kernels</h2>",
        _bars(found.rows),
        _table(found.rows),
    ]
    if plan is not None:
        parts += ["<h2>Memory</h2>", plan.to_svg()]
    if decision is not None:
        parts += ["<h2>Device</h2>", f"<pre>{escape(str(decision))}</pre>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _time(seconds: float) -> str:
    return seconds_text(seconds).replace("us", "µs")


def _roofline(found: Rooflines) -> str:
    """Flops a second over flops a byte, both logarithmic; measured kernels, else predicted ones."""
    c = found.ceilings
    slow = min(rate for _, rate in c.bandwidth)
    fast = max(rate for _, rate in c.bandwidth)
    points = [(r, r.flops / r.bytes, r.flops / (r.measured or r.predicted)) for r in found.rows if r.flops and r.bytes]
    xs = [x for _, x, _ in points] + [0.1, c.flops / slow]
    ys = [y for *_, y in points] + [c.flops, c.flops / 1e3]
    low_x, high_x = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
    low_y, high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / max(high_x - low_x, 1)
        up = (math.log10(y) - low_y) / max(high_y - low_y, 1)
        return LEFT + across * (WIDTH - LEFT - 20), (HEIGHT - BOTTOM) - up * (HEIGHT - BOTTOM - 15)

    lines = []
    for e in range(low_x, high_x + 1):
        x, y = place(10.0**e, 10.0**low_y)
        lines.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{10.0**e:g}</text>')
    for e in range(low_y, high_y + 1):
        x, y = place(10.0**low_x, 10.0**e)
        lines.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="#eee"/>')
        lines.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**e / 1e9:g}</text>')
    for rate, dash in ((fast, "4 3"), (slow, "none")):
        corners = [(10.0**low_x, 10.0**low_x * rate), (c.flops / rate, c.flops), (10.0**high_x, c.flops)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, max(y, 10.0**low_y)) for x, y in corners))
        lines.append(f'<polyline points="{path}" fill="none" stroke="#444" stroke-dasharray="{dash}"/>')
    for row, x, y in points:
        at_x, at_y = place(x, y)
        text = escape(f"{row.name} ({row.kind}): {y / 1e9:.3g} Gflop/s at {x:.3g} flops a byte")
        colour = _colour(row, found.rows)
        lines.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="{colour}" fill-opacity="0.75"><title>{text}</title>'
            "</circle>"
        )
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">flops a byte</text>')
    middle = (HEIGHT - BOTTOM) / 2
    lines.append(f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">Gflop/s</text>')
    label = "Roofline: flops a second of each kernel over its flops a byte"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(lines)}</svg>'


def _colour(row: KernelRow, rows: tuple[KernelRow, ...]) -> str:
    kinds = list(dict.fromkeys(r.kind for r in rows))
    return COLOURS[kinds.index(row.kind) % len(COLOURS)]


def _bars(rows: tuple[KernelRow, ...]) -> str:
    """A bar for each of the longest kernels: measured (or predicted) time, a tick where it was predicted."""
    ordered = sorted(rows, key=lambda r: -(r.measured or r.predicted))[:MOST]
    if not ordered:
        return "<p>No kernels: nothing is computed.</p>"
    longest = max(max(r.measured or 0.0, r.predicted) for r in ordered)
    lines = []
    for i, row in enumerate(ordered):
        y, taken = 18 * i + 4, row.measured or row.predicted
        width = 420 * taken / longest
        tick = 220 + 420 * row.predicted / longest
        label = escape(short_name(row.name, LETTERS))
        lines.append(f'<text x="214" y="{y + 10}" text-anchor="end">{label}</text>')
        lines.append(f'<rect x="220" y="{y}" width="{width:.1f}" height="12" fill="{_colour(row, rows)}"/>')
        lines.append(f'<line x1="{tick:.1f}" y1="{y - 2}" x2="{tick:.1f}" y2="{y + 14}" stroke="#000"/>')
        lines.append(f'<text x="{max(226 + width, tick + 6):.1f}" y="{y + 10}">{_time(taken)}</text>')
    height = 18 * len(ordered) + 8
    label = "Time of each kernel; the tick is what was predicted"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(lines)}</svg>'


def _table(rows: tuple[KernelRow, ...]) -> str:
    lines = ["<tr><th>kernel<th>kind<th>predicted<th>measured<th>of the roofline<th>bytes<th>flops</tr>"]
    for r in rows:
        measured = "" if r.measured is None else _time(r.measured)
        fraction = "" if r.fraction is None else f"{r.fraction:.0%}"
        cells = (escape(r.name), escape(r.kind), _time(r.predicted), measured, fraction, f"{r.bytes:,}", f"{r.flops:,}")
        lines.append("<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
