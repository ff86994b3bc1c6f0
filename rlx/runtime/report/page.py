"""The report of a compiled graph, as a page and as JSON: each part says what it shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rlx import html
from rlx.cost.model import kind_of
from rlx.disk import saving
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array
from rlx.plan.page import map_of
from rlx.runtime.choice import usual_extents
from rlx.runtime.report.charts import MOST, bars, kinds_of, roofline, timeline
from rlx.runtime.report.picture import boxes_of, nodes_of, picture
from rlx.runtime.report.rooflines import Rooflines, rooflines
from rlx.runtime.trace import RunTrace
from rlx.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["report_json", "report_page", "write_report"]

GUESS = '<span class="guess">guess</span>'
PARTS = {
    "kernels": "Kernels", "roofline": "Roofline", "timeline": "Timeline", "memory": "Memory", "map": "Memory map",
    "graph": "Graph", "device": "Device",
}  # fmt: skip


def write_report(
    model: CompiledGraph, path: str | os.PathLike[str], arrays: Sequence[Array] | None, threads: int | None
) -> None:
    """Writes the page of a model at the extents of its inputs, or at the usual ones; see `CompiledGraph.report`."""
    graph = model.compilation.source
    shapes = {} if arrays is None else {s.name: a.shape for s, a in zip(model.inputs, arrays, strict=True)}
    at = usual_extents(graph, bind_extents(graph, shapes))
    found = rooflines(model, arrays, at=at, threads=threads, calibrate=False)
    page = report_page(graph.name, model, found)
    with saving(path, "report") as file:
        file.write(page.encode())


def report_json(model: CompiledGraph, found: Rooflines, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """What the page shows, as JSON values: sizes in bytes, times in seconds."""
    plan, memory, decision = model.plan, model.memory, model.decision
    timed = RunTrace.of(model.compilation.leaves.name, model.device, found.timed)
    return {
        "model": timed.model,
        "assumed": list(assumed),
        **found.to_dict(),
        "timeline": [
            {"kernel": n, "thread": thread, "start": start, "seconds": seconds}
            for n, thread, start, seconds in timed.spans()
        ],
        "memory": None if memory is None else memory.to_dict(),
        "plan": None if plan is None else json.loads(plan.to_json()),
        "decision": None if decision is None else decision.to_dict(),
    }


def report_page(title: str, model: CompiledGraph, found: Rooflines, assumed: Sequence[str] = ()) -> str:
    """The page; it needs no other file. `assumed` lists sizes and inputs that nobody gave."""
    made = {name: "".join(parts) for name, parts in _sections(model, found).items()}
    links = "".join(f'<a href="#{name}">{PARTS[name]}</a>' for name in PARTS if made[name])
    head = f"<h1>{escape(title)}</h1>{_summary(model, found, assumed)}<nav>{links}</nav>"
    return html.page(title, head + "".join(html.section(name, PARTS[name], made[name]) for name in PARTS if made[name]))


def _sections(model: CompiledGraph, found: Rooflines) -> dict[str, Iterator[str]]:
    return {
        "kernels": _kernels(found),
        "roofline": _roofline(found),
        "timeline": _timeline(model, found),
        "memory": _memory(model),
        "map": _map(model),
        "graph": _graph(model, found),
        "device": _device(model),
    }


def _summary(model: CompiledGraph, found: Rooflines, assumed: Sequence[str]) -> str:
    p, io = found.prediction, found.io
    measured = sum(r.measured or 0.0 for r in found.rows)
    sizes = ", ".join(f"{name} = {n}" for name, n in p.at.items())
    pairs: dict[str, object] = {
        "device": io.device,
        "sizes": sizes,
        "assumed, not given": "; ".join(assumed),
        "predicted": f"{seconds_text(p.seconds)} per run; nine of ten between {seconds_text(p.low)} and "
        f"{seconds_text(p.high)} ({_by(p.guessed)})",
        "measured": f"{seconds_text(measured)} in kernels, one after the other" if measured else "",
        "launches": f"{io.launches:,} (without fusion {io.launches_before:,}); sync points {io.syncs:,}",
        "thread barriers": "" if model.joins is None else str(model.joins),
        "moved": f"{bytes_text(io.read_bytes)} read, {bytes_text(io.written_bytes)} written; {io.flops:,} flops",
    }
    note = (
        f"<p>{GUESS} Nobody measured what this device can do: predicted times, ceilings and parts of the roofline are "
        "guesses. <code>rlx calibrate</code> measures it.</p>"
        if p.guessed
        else ""
    )
    return html.facts(pairs) + note


def _by(guessed: bool) -> str:
    return "a guess: the device is not calibrated" if guessed else "by the calibration of the device"


def _kernels(found: Rooflines) -> Iterator[str]:
    rows, kinds = found.rows, kinds_of(found.rows)
    disturbed = sum(r.disturbed for r in rows)
    what = "predicted time of each kernel"
    if any(r.measured for r in rows):
        what = "measured time of each kernel; the upright line is what was predicted"
    cut = f" The {MOST} longest of {len(rows)}." if len(rows) > MOST else ""
    yield f'<p class="soft">The {what}.{cut}</p>'
    if disturbed:
        yield (
            f'<p class="warn">{disturbed} of {len(rows)} kernels are disturbed (?, dashed): other programs had the '
            "processor, and their times may be too long.</p>"
        )
    yield html.legend(kinds)
    yield bars(rows)
    guess = " (guess)" if found.prediction.guessed else ""
    head = (
        "kernel",
        "kind",
        f"predicted{guess}",
        "measured",
        "spread",
        f"of the roofline{guess}",
        "bound by",
        "bytes",
        "flops",
    )
    cells = [
        (
            r.name, r.kind, seconds_text(r.predicted),
            "" if r.measured is None else f"{'? ' if r.disturbed else ''}{seconds_text(r.measured)}",
            "" if r.measured is None else seconds_text(r.spread),
            "" if r.fraction is None else f"{r.fraction:.0%}", r.bound, f"{r.bytes:,}", f"{r.flops:,}",
        )
        for r in rows
    ]  # fmt: skip
    yield f"<details><summary>All {len(rows)} kernels as a table</summary>"
    yield html.table(cells, head, right=(2, 3, 4, 5, 7, 8))
    yield "</details>"


def _roofline(found: Rooflines) -> Iterator[str]:
    guess = f" {GUESS} These ceilings are guesses: a dot above them shows that." if found.ceilings.guessed else ""
    yield (
        '<p class="soft">A dot is a kernel. The lines are what the device can do: the rising ones what memory and '
        "caches deliver, the level one what the arithmetic units do. A dot far below the line has time to gain; left "
        f"of the bend a kernel waits for memory, right of it for arithmetic.{guess}</p>"
    )
    yield html.legend(kinds_of(found.rows))
    yield f'<div class="wide">{roofline(found.rows, found.ceilings)}</div>'


def _timeline(model: CompiledGraph, found: Rooflines) -> Iterator[str]:
    trace = RunTrace.of(model.compilation.leaves.name, model.device, found.timed)
    if not trace.rows:
        return
    kinds = kinds_of(found.rows)
    yield (
        '<p class="soft">The kernels of a run, end to end, and what each thread did of them: a gap in a thread is time '
        "in which it waits for others. Runs that are not timed have kernels side by side where they may. "
        "<code>rlx profile MODEL --trace run.json</code> writes this for ui.perfetto.dev.</p>"
    )
    kind_at = [kind_of(kernel) for kernel in model.compilation.executable.profiled]
    yield f'<div class="wide">{timeline(trace, [*kinds, *(set(kind_at) - set(kinds))], kind_at)}</div>'


def _memory(model: CompiledGraph) -> Iterator[str]:
    predicted = None if model.memory is None else model.memory.predicted
    if predicted is not None:
        yield predicted.to_table()
        memory = model.memory
        assert memory is not None
        if memory.residual is not None:
            yield (
                f"<p>This process was predicted to grow by {bytes_text(memory.predicted_bytes)} and grew by "
                f"{bytes_text(memory.measured)}.</p>"
            )
        return
    needs = model.needs
    if needs is None:
        return
    names = {"params": needs.params, "packed weights": needs.prepared, "constants": needs.constants}
    names |= {"states": needs.states, "activations and outputs": needs.arena or 0}
    yield html.table(
        [(n, bytes_text(b), f"{b:,} B") for n, b in names.items() if b], ("part", "size", ""), right=(1, 2)
    )


def _map(model: CompiledGraph) -> Iterator[str]:
    plan = model.plan
    if plan is not None:
        yield map_of(plan.intervals, plan.placement, base_alignment=plan.alignment, steps=plan.steps, marks=plan.marks)


def _graph(model: CompiledGraph, found: Rooflines) -> Iterator[str]:
    made = model.compilation
    boxes = nodes_of(made.source) if made.program is None else boxes_of(made.program)
    what = "node" if made.program is None else "kernel"
    yield (
        f'<p class="soft">A box is a {what}, a line a tensor; its type and shape are under the pointer. Drag to move; '
        "zoom by the buttons, or by the wheel with Ctrl.</p>"
    )
    yield picture(boxes, kinds_of(found.rows))


def _device(model: CompiledGraph) -> Iterator[str]:
    if model.decision is not None:
        yield model.decision.to_table()
