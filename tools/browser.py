"""Pages as a real browser, Debian's chromium, shows them: pictures, and what can be found wrong without looking."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["BROWSER", "evaluated", "faults", "screenshot", "texts"]

BROWSER = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=3000",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0",
)  # fmt: skip
SMALLEST = 9  # points of a letter's line that can be read
CONTRAST = 4.5  # of text to its ground, as WCAG 2 has it for level AA

# Of each page in a frame: what is wider than the frame and can't be scrolled to, letters in pictures that are cut off,
# too small, or on top of others, and texts that do not stand out from their ground. A picture in `.zoom` is left out.
PROBE = """
function colour(text) {
  const [r, g, b, a] = (text.match(/[\\d.]+/g) || []).map(Number);
  return {rgb: [r, g, b], a: a === undefined ? 1 : a};
}
function light(rgb) {
  const [r, g, b] = rgb.map(v => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(node, view) {
  for (let n = node; n; n = n.parentElement) {
    const c = colour(view.getComputedStyle(n).backgroundColor);
    if (c.a > 0.99) return c.rgb;
  }
  return [255, 255, 255];
}
function probe(frame) {
  const doc = frame.contentDocument, view = frame.contentWindow, wide = frame.clientWidth, found = [];
  const name = n => `${n.tagName.toLowerCase()} ${JSON.stringify((n.textContent || '').trim().slice(0, 40))}`;
  if (doc.documentElement.scrollWidth > wide) found.push(`the page is ${doc.documentElement.scrollWidth} points wide`);
  for (const n of doc.body.querySelectorAll('*')) {
    const r = n.getBoundingClientRect();
    if (r.right <= wide + 1 || !r.width || !r.height || r.left >= wide) continue;
    let inside = false;
    for (let p = n.parentElement; p && !inside; p = p.parentElement)
      inside = view.getComputedStyle(p).overflowX !== 'visible';
    if (!inside) found.push(`${name(n)} ends at ${Math.round(r.right)}`);
  }
  for (const svg of doc.querySelectorAll('main svg[role=img]')) {
    if (svg.closest('.zoom')) continue;
    const all = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')];
    const boxes = texts.map(t => t.getBoundingClientRect());
    texts.forEach((t, i) => {
      const b = boxes[i];
      if (!b.width || !b.height) found.push(`${name(t)} is not visible`);
      else if (b.left < all.left - 1 || b.right > all.right + 1 || b.top < all.top - 1 || b.bottom > all.bottom + 1)
        found.push(`${name(t)} is cut off`);
      else if (Math.min(b.width, b.height) < SMALLEST && t.textContent.length > 1)
        found.push(`${name(t)} is too small`);
      if (t.hasAttribute('transform')) return;
      for (let j = i + 1; j < texts.length; j++) {
        const c = boxes[j];
        if (!texts[j].hasAttribute('transform') && Math.min(b.right, c.right) - Math.max(b.left, c.left) > 1 &&
            Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top) > 3) found.push(`${name(t)} is on ${name(texts[j])}`);
      }
    });
  }
  for (const n of doc.querySelectorAll('main.rlx *, main.rlx svg text')) {
    const own = [...n.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
    if (!own || n.closest('.zoom') || n.matches('title, desc, script, style')) continue;
    const style = view.getComputedStyle(n), drawn = n.tagName === 'text';
    if (drawn && n.classList.contains('n')) continue;
    const a = light(colour(drawn ? style.fill : style.color).rgb), b = light(ground(n, view));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < CONTRAST) found.push(`${name(n)} has contrast ${ratio.toFixed(1)}`);
  }
  return found;
}
addEventListener('load', () => setTimeout(() => {
  const out = [...document.querySelectorAll('iframe')].map(probe);
  const answer = Object.assign(document.createElement('pre'), {id: 'found', textContent: JSON.stringify(out)});
  document.body.replaceChildren(answer);
}, 300));
"""


def screenshot(
    page: Path, path: Path, width: int = 1200, height: int = 3000, *, dark: bool = False
) -> NDArray[np.uint8]:
    """The page as pixels [height, width, 3], also kept at `path`. It is in a frame: windows have 500 points or more."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        start = _framed([page], Path(folder), width, height)
        size = f"--window-size={max(width, 500)},{height}"
        _browse([*_colours(dark), size, f"--screenshot={path}", start.as_uri()])
    picture = Image.open(path).convert("RGB").crop((0, 0, width, height))
    picture.save(path, optimize=True)
    return np.asarray(picture)


def texts(page: Path) -> str:
    """The document after its scripts have run."""
    return _browse(["--dump-dom", page.absolute().as_uri()])[0]


def evaluated(page: Path, script: str, width: int = 1200) -> str:
    """What a script of the page puts into `out`, in a window of this width, as JSON."""
    finder = f"""addEventListener('load', () => setTimeout(() => {{
  const frame = document.querySelector('iframe');
  const out = frame.contentWindow.eval({json.dumps(script + " JSON.stringify(out);")});
  document.body.replaceChildren(Object.assign(document.createElement('pre'), {{id: 'found', textContent: out}}));
}}, 300));"""
    with tempfile.TemporaryDirectory() as folder:
        start = _framed([page], Path(folder), width, 2000, finder)
        return _answer(*_browse([f"--window-size={max(width, 500)},2000", "--dump-dom", start.as_uri()]))


def faults(pages: Sequence[Path], width: int = 1200, *, dark: bool = False) -> dict[Path, list[str]]:
    """What is wrong with each page in a window of this width; a page without faults is left out.

    A message of the console (an error of a script, a file that is missing) counts for all pages: it is under the first.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = _framed(pages, Path(folder), width, 2000, PROBE)
        document, said = _browse(
            [*_colours(dark), f"--window-size={max(width, 500)},2000", "--dump-dom", start.as_uri()]
        )
    found = dict(zip(pages, json.loads(_answer(document, said)), strict=True))
    found[pages[0]] += [f"console: {text}" for text in re.findall(r"CONSOLE[^\]]*\] (.*)", said)]
    return {page: texts for page, texts in found.items() if texts}


def _answer(document: str, said: str) -> str:
    """What a script left in the document that the browser printed."""
    answer = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
    if answer is None:
        raise RuntimeError(f"the browser gave no answer: {said[-500:]}")
    return unescape(answer[1])


def _framed(pages: Sequence[Path], folder: Path, width: int, height: int, script: str = "") -> Path:
    """A page with a frame of this size for each page."""
    size = f"border:0;display:block;width:{width}px;height:{height}px"
    frames = "".join(f'<iframe src="{page.absolute().as_uri()}" style="{size}"></iframe>' for page in pages)
    values = f"const SMALLEST = {SMALLEST}, CONTRAST = {CONTRAST};"
    path = folder / "frames.html"
    path.write_text(f'<body style="margin:0">{frames}' + (f"<script>{values}{script}</script>" if script else ""))
    return path


def _colours(dark: bool) -> list[str]:
    return ["--blink-settings=preferredColorScheme=0"] if dark else []


def _browse(arguments: Sequence[str]) -> tuple[str, str]:
    """What the browser prints, and what it says of its work."""
    if BROWSER is None:
        raise RuntimeError("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr
