"""The look of what is shown as HTML: the report page, the memory map, and what notebooks show. No network is used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape

__all__ = [
    "COLOURS",
    "colour",
    "facts",
    "fragment",
    "legend",
    "page",
    "preformatted",
    "section",
    "svg",
    "table",
    "text",
]

LEAST_SCALE = 0.85  # of a picture; where there is less room, it is scrolled
COLOURS = ("#4c78c8", "#d99a1c", "#e0604f", "#4fae9c", "#3f9f55", "#d873a0", "#9363cf", "#6f9bd8", "#98734f", "#8a8f98")

STYLE = """
.rlx { --ink: #1d2127; --soft: #5c6570; --line: #d7dbe0; --panel: #f4f6f8; --mark: #c62828; --link: #2f62b5;
  font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }
.rlx h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere } .rlx h2 { font-size: 17px; margin: 28px 0 6px }
.rlx p { margin: 0 0 10px; max-width: 75em } .rlx .soft { color: var(--soft) } .rlx .warn { color: var(--mark) }
.rlx svg { max-width: 100%; height: auto; display: block }
.rlx svg text { font: 12px system-ui, sans-serif; fill: var(--ink) } .rlx svg .soft { fill: var(--soft) }
.rlx svg .grid { stroke: var(--line); fill: none } .rlx svg .ceiling { stroke: var(--ink); fill: none }
.rlx svg .mark { stroke: var(--mark); fill: none } .rlx svg .tick { fill: var(--ink) }
.rlx svg .frame { fill: var(--panel) } .rlx svg .node { fill: var(--panel); stroke: var(--soft) }
.rlx svg .edge { stroke: var(--soft); fill: none; opacity: .7 }
.rlx svg text.n { fill: #14171a; pointer-events: none }
.rlx svg .b { stroke: #fff8; stroke-width: .7 } .rlx svg .hit { stroke: var(--mark); stroke-width: 3 }
.rlx svg .disturbed { fill-opacity: .35; stroke: var(--mark); stroke-dasharray: 3 2 }
.rlx .wide { overflow-x: auto; max-width: 100% }
.rlx .zoom { border: 1px solid var(--line); height: 520px; touch-action: pan-y }
.rlx .zoom svg { width: 100%; height: 100%; min-width: 0 !important; cursor: grab }
.rlx table { border-collapse: collapse; font-size: 13px; margin: 0 0 10px; color: inherit }
.rlx.rlx th, .rlx.rlx td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; background: none }
.rlx.rlx th.r, .rlx.rlx td.r { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.rlx tr.chosen td { font-weight: 600 } .rlx pre { background: var(--panel); color: inherit; padding: 10px 12px;
  overflow-x: auto; font: 12.5px/1.45 ui-monospace, monospace; margin: 0 0 10px; white-space: pre }
.rlx ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 4px 0 10px }
.rlx .chip { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
.rlx .guess { border: 1px dashed var(--mark); border-radius: 4px; padding: 0 5px; font-size: 12px; color: var(--mark) }
.rlx nav a { color: var(--link); margin-right: 14px; text-decoration: none }
.rlx input, .rlx button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 4px; padding: 3px 9px; margin: 0 4px 8px 0; max-width: 100% }
.rlx-tip { position: fixed; display: none; pointer-events: none; background: #22262b; color: #fff; padding: 6px 10px;
  border-radius: 4px; font: 12px/1.4 system-ui, sans-serif; white-space: pre-line; overflow-wrap: anywhere;
  max-width: min(420px, 90vw); z-index: 9 }
@media (prefers-color-scheme: dark) {
  .rlx { --ink: #e4e7eb; --soft: #9aa4af; --line: #3a414a; --panel: #22272e; --mark: #ff7b72; --link: #79a8f5;
    background: #15181c }
}
"""
PAGE_STYLE = """
:root { color-scheme: light dark } body { margin: 0 } .rlx { padding: 20px max(16px, calc(50vw - 600px)) 60px }
@media (prefers-color-scheme: dark) { html { background: #15181c } }
@media (max-width: 480px) { .rlx { padding: 12px 10px 40px } .rlx.rlx th, .rlx.rlx td { padding: 3px 6px } }
@media (max-width: 480px) { #memory th:nth-child(5), #memory td:nth-child(5) { display: none } }
@media (max-width: 760px) {
  .rlx .wide:has(> svg)::before { content: "Scroll it sideways: it is wider than the window."; color: var(--soft);
    font-size: 12px; position: sticky; left: 0 }
}
@media print { .rlx input, .rlx button { display: none } }
"""

# What has a <title> shows it in a box of its own, at once and on touch; `.find` marks what has the letters in it; a
# picture in `.zoom` is dragged, and zoomed by the wheel with Ctrl or by its buttons.
SCRIPT = """
const tip = document.body.appendChild(Object.assign(document.createElement('div'), {className: 'rlx-tip'}));
for (const t of document.querySelectorAll('.rlx svg title')) { t.parentNode.dataset.tip = t.textContent; t.remove(); }
document.addEventListener('pointermove', show); document.addEventListener('pointerdown', show);
function show(e) {
  const at = e.target.closest && e.target.closest('[data-tip]');
  tip.style.display = at ? 'block' : 'none';
  if (!at) return;
  tip.textContent = at.dataset.tip;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.max(4, Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8)) + 'px';
}
for (const field of document.querySelectorAll('.rlx input.find')) field.addEventListener('input', () => {
  const word = field.value.toLowerCase();
  for (const box of field.closest('section').querySelectorAll('[data-tip]'))
    box.classList.toggle('hit', !!word && box.dataset.tip.toLowerCase().includes(word));
});
for (const frame of document.querySelectorAll('.rlx .zoom')) {
  const svg = frame.querySelector('svg'), all = svg.getAttribute('viewBox').split(' ').map(Number);
  let box = [...all], from = null;
  const set = () => svg.setAttribute('viewBox', box.join(' '));
  const zoom = (by, x, y) => {
    by = Math.max(by, 40 / box[2]);
    box = [x - (x - box[0]) * by, y - (y - box[1]) * by, box[2] * by, box[3] * by]; set();
  };
  const scale = () => Math.max(box[2] / svg.clientWidth, box[3] / svg.clientHeight);
  svg.addEventListener('wheel', e => {
    if (!e.ctrlKey) return;
    e.preventDefault();
    const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
    zoom(e.deltaY < 0 ? 0.8 : 1.25, p.x, p.y);
  }, {passive: false});
  svg.addEventListener('pointerdown', e => {
    from = [e.clientX, e.clientY, ...box]; svg.setPointerCapture(e.pointerId);
  });
  svg.addEventListener('pointermove', e => {
    if (!from) return;
    const k = scale();
    box[0] = from[2] - (e.clientX - from[0]) * k; box[1] = from[3] - (e.clientY - from[1]) * k; set();
  });
  for (const end of ['pointerup', 'pointercancel']) svg.addEventListener(end, () => { from = null; });
  const middle = () => [box[0] + box[2] / 2, box[1] + box[3] / 2];
  const acts = {in: () => zoom(0.7, ...middle()), out: () => zoom(1 / 0.7, ...middle()),
    all: () => { box = [...all]; set(); },
    start: () => {
      const width = Math.max(svg.clientWidth, 360);
      box = [all[0] + (all[2] - width) / 2, all[1], width, width * svg.clientHeight / svg.clientWidth]; set();
    }};
  for (const button of frame.closest('section').querySelectorAll('button[data-zoom]'))
    button.addEventListener('click', acts[button.dataset.zoom]);
  acts.start();
}
"""


def page(title: str, body: str) -> str:
    """A whole document that needs no other file."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{PAGE_STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main class="rlx">{body}</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def fragment(body: str) -> str:
    """What a notebook shows: the same look, no script."""
    return f'<div class="rlx"><style>{STYLE}</style>{body}</div>'


def section(name: str, title: str, *body: str) -> str:
    """A part of the page with its heading; `name` is its anchor."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(body)}</section>'


def table(
    rows: Iterable[Sequence[object]], head: Sequence[str], *, right: Collection[int] = (), chosen: Collection[int] = ()
) -> str:
    """A table of texts, which are escaped; columns in `right` are set flush right, rows in `chosen` stand out."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}{' class=r' if n in right else ''}>{escape(str(c))}</{tag}>" for n, c in enumerate(row))

    lines = [f"<tr>{cells(head, 'th')}</tr>"] if any(head) else []
    lines += [f"<tr{' class=chosen' if n in chosen else ''}>{cells(row, 'td')}</tr>" for n, row in enumerate(rows)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def facts(pairs: Mapping[str, object]) -> str:
    """Names and values, one pair a line; what has no value is left out."""
    return table([(name, value) for name, value in pairs.items() if value not in ("", None)], ("", ""))


def preformatted(text: str) -> str:
    """Text whose line ends count."""
    return f"<pre>{escape(text)}</pre>"


def svg(width: float, height: float, label: str, parts: Iterable[str], *, scaled: bool = True) -> str:
    """A picture of this size with a name for who can't see it. It shrinks no further than its letters can be read.

    One that is not `scaled` is as wide as the window leaves it, up to `width`: its parts are placed by percentages.
    """
    size = (
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" style="min-width:{LEAST_SCALE * width:.0f}px" '
        if scaled
        else f'style="width:100%;max-width:{width:g}px;height:{height:g}px" '
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def colour(kind: str, kinds: Sequence[str]) -> str:
    """The colour of a kind among all of them."""
    return COLOURS[kinds.index(kind) % len(COLOURS)]


def text(what: object) -> str:
    """Text as it stands in a page."""
    return escape(str(what))


def legend(kinds: Sequence[str]) -> str:
    """The legend of colours."""
    items = (f'<li><span class="chip" style="background:{colour(k, kinds)}"></span>{escape(k)}</li>' for k in kinds)
    return f'<ul class="legend">{"".join(items)}</ul>'
