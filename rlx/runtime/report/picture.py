"""The picture of a program: its kernels in layers, and the tensors that go from one to the next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from html import escape

from rlx import html
from rlx.cost.model import kind_of
from rlx.ir.graph import Graph
from rlx.kernels.program import Program
from rlx.plan.render import short_name
from rlx.records import dataclass

__all__ = ["Box", "boxes_of", "nodes_of", "picture"]

WIDTH, HEIGHT, GAP, LAYER = 190, 38, 26, 84
LETTERS = 24
MOST = 3000  # boxes that are drawn: a larger picture is of no use


@dataclass(frozen=True)
class Box:
    """A kernel or node, or an input or output: its name, kind and facts; what it reads and makes, by key and name."""

    name: str
    kind: str
    facts: str
    reads: tuple[tuple[Hashable, str], ...]
    makes: tuple[tuple[Hashable, str], ...]


def boxes_of(program: Program) -> list[Box]:
    """The kernels of a run, with the inputs, states and outputs; weights are in the facts of their readers."""

    def named(buffer: object) -> tuple[Hashable, str]:
        return buffer.base, f"{buffer.name}: {buffer.dtype}[{', '.join(map(str, buffer.shape))}]"  # type: ignore[attr-defined]

    ends = [*program.inputs, *program.states]
    boxes = [Box(b.name, b.kind, named(b)[1], (), (named(b),)) for b in ends]
    for kernel in program.run:
        fixed = [named(b)[1] for b in kernel.reads() if b.is_fixed]
        facts = [kernel.label, kernel.how, *(f"weights {text}" for text in fixed)]
        facts += [f"makes {named(b)[1]}" for b in kernel.writes()]
        reads = tuple(named(b) for b in kernel.reads() if not b.is_fixed)
        boxes.append(Box(kernel.label, kind_of(kernel), "\n".join(facts), reads, tuple(map(named, kernel.writes()))))
    boxes += [Box(name, "output", named(b)[1], (named(b),), ()) for name, b in program.outputs]
    return boxes


def nodes_of(graph: Graph) -> list[Box]:
    """The nodes of a graph, where the device makes kernels of its own."""
    boxes = [Box(v.name, "input", f"{v.name}: {v.type}", (), ((v, v.name),)) for v in (*graph.inputs, *graph.states)]
    for node in graph.nodes:
        name = node.provenance[0] if node.provenance else node.op.op_name
        reads, makes = (tuple((v, f"{v.name}: {v.type}") for v in vs) for vs in (node.inputs, node.outputs))
        boxes.append(Box(name, node.op.op_name, f"{name}\n{node.op.op_name}", reads, makes))
    return boxes + [Box(o.name, "output", f"{o.name}: {o.value.type}", ((o.value, o.name),), ()) for o in graph.outputs]


def picture(boxes: Sequence[Box], kinds: Sequence[str]) -> str:
    """The drawing, in a frame that can be dragged and zoomed."""
    if len(boxes) > MOST:
        return f"<p>{len(boxes):,} kernels: more than the {MOST:,} that are drawn.</p>"
    edges = list(_edges(boxes))
    places = _places(len(boxes), edges)
    lines = [_edge(places[a], places[b], text) for a, b, text in edges]
    lines += [_drawn(box, place, kinds) for box, place in zip(boxes, places, strict=True)]
    width = max((x for x, _ in places), default=0) + WIDTH + GAP
    height = max((y for _, y in places), default=0) + HEIGHT + GAP
    buttons = "".join(
        f'<button type="button" data-zoom="{act}">{text}</button>'
        for act, text in (("in", "Zoom in"), ("out", "Zoom out"), ("all", "All"), ("start", "Start"))
    )
    find = (
        '<input class="find" type="search" placeholder="find a kernel or tensor" aria-label="find a kernel or tensor">'
    )
    name = "The kernels, top to bottom, and the tensors between them"
    return f'{find}{buttons}<div class="zoom">{html.svg(width, height, name, lines)}</div>'


def _edges(boxes: Sequence[Box]) -> Iterator[tuple[int, int, str]]:
    """(maker, reader, name of the tensor): of what was written several times, the last before the reader counts."""
    maker: dict[Hashable, int] = {}
    for number, box in enumerate(boxes):
        seen = set()
        for key, text in box.reads:
            if key in maker and maker[key] not in seen:
                seen.add(maker[key])
                yield maker[key], number, text
        maker.update((key, number) for key, _ in box.makes)


def _places(count: int, edges: Sequence[tuple[int, int, str]]) -> list[tuple[float, float]]:
    """Left and top of each box: below all that it reads, near the middle of these."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for a, b, _ in edges:
        readers[b].append(a)
    layer, across, taken = [0] * count, [0.0] * count, dict[int, list[int]]()
    for number in range(count):
        layer[number] = max((layer[a] + 1 for a in readers[number]), default=0)
        taken.setdefault(layer[number], []).append(number)
    widest = max(map(len, taken.values()), default=1)
    for depth in sorted(taken):
        members = taken[depth]
        wanted = {
            n: sum(across[a] for a in readers[n]) / len(readers[n]) if readers[n] else widest / 2 for n in members
        }
        members.sort(key=lambda n: (wanted[n], n))
        start = sum(wanted.values()) / len(members) - (len(members) - 1) / 2
        for at, n in enumerate(members):
            across[n] = start + at
    least = min(across, default=0.0)
    return [(GAP + (x - least) * (WIDTH + GAP), GAP + LAYER * y) for x, y in zip(across, layer, strict=True)]


def _edge(a: tuple[float, float], b: tuple[float, float], text: str) -> str:
    x0, y0, x1, y1 = a[0] + WIDTH / 2, a[1] + HEIGHT, b[0] + WIDTH / 2, b[1]
    bend = max(20.0, (y1 - y0) / 2)
    path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    label = ""
    if y1 - y0 < LAYER and abs(x1 - x0) < WIDTH / 2:  # a short, upright one has room for its shape
        label = (
            f'<text class="soft" x="{(x0 + x1) / 2 + 4:.0f}" y="{(y0 + y1) / 2 + 4:.0f}">{escape(_shape(text))}</text>'
        )
    return f'<path class="edge" d="{path}"><title>{escape(text)}</title></path>{label}'


def _shape(text: str) -> str:
    return short_name(text.rpartition(": ")[2], LETTERS)


def _drawn(box: Box, place: tuple[float, float], kinds: Sequence[str]) -> str:
    x, y = place
    end = box.kind in ("input", "output", "state")
    strip = html.colour(box.kind, kinds) if box.kind in kinds else "#8a8f98"
    return (
        f'<g><title>{escape(box.facts)}</title><rect class="node" x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="{HEIGHT // 2 if end else 4}"/>'
        + ("" if end else f'<rect x="{x:.0f}" y="{y:.0f}" width="6" height="{HEIGHT}" fill="{strip}"/>')
        + f'<text x="{x + 12:.0f}" y="{y + 16:.0f}">{escape(short_name(box.name, LETTERS))}</text>'
        f'<text class="soft" x="{x + 12:.0f}" y="{y + 31:.0f}">{escape(short_name(box.kind, LETTERS))}</text></g>'
    )
