"""The report: well-formed, complete, self-contained, and as a browser shows it, light, dark and narrow."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import BROWSER, evaluated, faults, screenshot, texts
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.cost import kept
from rlx.demo import DIGITS

needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of the digits, and its figures."""
    folder = tmp_path_factory.mktemp("report")
    path = folder / "page.html"
    with pytest.MonkeyPatch.context() as patch:  # no calibration of the machine is read
        patch.setattr(kept, "cache_folder", lambda: folder / "cache")
        patch.setattr(kept, "_loaded", {})
        args = ["report", str(DIGITS), "--guess", "--device", "cpu", "--dims", "batch=4", "-o", str(path), "--json"]
        done = CliRunner().invoke(cli, [*args, "--threads", "2"])
    assert done.exit_code == 0, done.output
    return path, json.loads(done.stdout)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_whole_and_explains_itself(made: tuple[Path, dict[str, Any]]) -> None:
    """Every part is there with its explanation, legend and labels; guesses say so; nothing comes from elsewhere."""
    text = made[0].read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.ids == ["kernels", "roofline", "timeline", "memory", "map", "graph", "device"]
    assert not re.search(r'src=|@import|url\(|href="[^#]|https?://', text.replace('xmlns="http://', ""))
    for word in (
        "assumed, not given", "f32 products: ", "memory: ", "flops per byte moved", 'class="legend"', "(a guess",
        "thread 0 (caller)", "live bytes", "A box is a buffer", "A box is a kernel", "packed weights", "overhead",
        "named by the caller", "thread barriers", 'class="guess"',
    ):  # fmt: skip
        assert word in text, word
    assert not re.search(r"e\+\d+ G", text), "rates are written out"
    charts = [ET.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(charts) == 5


def test_every_kernel_is_in_every_chart(made: tuple[Path, dict[str, Any]]) -> None:
    path, facts = made
    text = path.read_text(encoding="utf-8")
    space = "{http://www.w3.org/2000/svg}"
    bars, roof, line, boxes, graph = (ET.fromstring(c) for c in re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    count = len(facts["kernels"])
    assert count == 7
    for kind in ("b", "tick"):  # a measured time, and the predicted one
        assert len([r for r in bars.findall(f"{space}rect") if kind in r.get("class", "").split()]) == count
    assert len(roof.findall(f"{space}circle")) == sum(bool(k["flops"]) for k in facts["kernels"])
    spans = [r for r in line.findall(f"{space}rect") if r.get("class", "").startswith("b")]
    assert len(spans) == count + len(facts["timeline"])
    assert len([r for r in boxes.findall(f"{space}rect") if r.get("class") == "b"]) == len(
        [b for b in facts["plan"]["buffers"] if b["size"]]
    )
    assert len(graph.findall(f"{space}g")) == count + 2  # and the input and the output


def test_the_figures_as_json(made: tuple[Path, dict[str, Any]]) -> None:
    facts = made[1]
    assert facts["device"] == "cpu"
    assert facts["assumed"]
    assert facts["prediction"]["guessed"] is True
    assert facts["decision"]["device"] == "cpu"
    assert facts["plan"]["totals"]["arena"] > 0
    assert {"measured", "spread", "disturbed", "fraction"} <= set(facts["kernels"][0])
    assert all(0 <= span["thread"] < 2 for span in facts["timeline"])


def test_what_must_be_given(tmp_path: Path) -> None:
    """A page or JSON; a browser only for a page."""
    for args in ([], ["--open"], ["--json", "--open"]):
        done = CliRunner().invoke(cli, ["report", str(DIGITS), *args])
        assert done.exit_code == 2
        assert "-o PAGE.html" in done.output


def test_it_opens_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    path = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", str(DIGITS), "--guess", "--device", "cpu", "-o", str(path), "--open"])
    assert done.exit_code == 0, done.output
    assert opened == [path.as_uri()]


def test_a_device_without_kernels_of_ours(tmp_path: Path) -> None:
    """Its page has the graph's nodes, and no timeline or map."""
    model = rlx.load(DIGITS, device="reference")
    model.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "A box is a node" in text
    assert 'id="timeline"' not in text
    assert 'id="map"' not in text
    assert "predicted time of each kernel." in text
    assert 'class="tick"' not in text, "a bar of a prediction has no mark where it was predicted"


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 400])
def test_as_a_browser_shows_it(made: tuple[Path, dict[str, Any]], tmp_path: Path, dark: bool, width: int) -> None:
    """The ground is light or dark as the system is, text stands out from it, and the margin at the right is empty."""
    pixels = screenshot(made[0], tmp_path / "page.png", width, 4000, dark=dark).astype(int)
    ground = pixels[0, 0].mean()
    assert ground < 60 if dark else ground > 240
    top = pixels[:600].mean(axis=2)
    assert np.abs(top - ground).max() > 150
    right = np.abs(pixels[:, -6:].mean(axis=2) - ground)
    assert (right < 30).all()


WRONG = """<!doctype html><body style="margin:0"><main class="rlx">
<p style="width:1500px;color:#aaa;background:#fff">pale</p>
<svg role="img" viewBox="0 0 100 50" width="100"><text x="90" y="20" style="font:12px sans-serif">outside</text>
<text x="2" y="20" style="font:12px sans-serif">one</text><text x="6" y="22" style="font:12px sans-serif">two</text>
<text x="2" y="40" style="font:4px sans-serif">small</text></svg>
<script>console.error("oh"); nothing_of_this_name();</script></main></body>"""


@needs_browser
def test_a_browser_finds_what_is_wrong(tmp_path: Path) -> None:
    """Each kind of fault that the tests below look for; a page without any is left out."""
    wrong, right = tmp_path / "wrong.html", tmp_path / "right.html"
    wrong.write_text(WRONG)
    right.write_text(
        '<!doctype html><main class="rlx"><p>A text.</p><svg role="img"><text y="20">a</text></svg></main>'
    )
    found = faults([wrong, right], 1200)
    assert list(found) == [wrong]
    text = "\n".join(found[wrong])
    for part in (
        "the page is 1500 points wide", 'p "pale" ends at 1500', 'p "pale" has contrast 2.3',
        'text "outside" is cut off', 'text "one" is on text "two"', 'text "small" is too small', 'console: "oh"',
        "nothing_of_this_name is not defined",
    ):  # fmt: skip
        assert part in text
    assert len(found[wrong]) == 8, text


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Report and map of a network of 120 kernels with long names, several side by side."""
    g = rlx.Graph("encoder")
    x = g.input("tokens", (16, 96))
    for layer in range(20):
        where = f"/encoder/layers.{layer}"
        w = g.constant(np.full((96, 96), 0.01, np.float32))
        names = [f"{where}/attention/part.{n}/Activation_output_0" for n in range(3)]
        a, b, c = (rlx.relu(x @ w + n, name=name) for n, name in enumerate(names))
        x = rlx.softmax(a + b * c, name=f"{where}/norm/LayerNormalization_output_0") + x
    g.output(x, "states")
    model = rlx.compile(g, device="cpu", threads=2)
    folder = tmp_path_factory.mktemp("deep")
    model.report(folder / "report.html")
    assert model.plan is not None
    (folder / "map.html").write_text(model.plan.to_html())
    return [folder / "report.html", folder / "map.html"]


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_finds_no_fault(made: tuple[Path, dict[str, Any]], deep: list[Path], dark: bool, width: int) -> None:
    """Nothing is wider than the window, all labels can be read, texts stand out, scripts run without an error."""
    assert not faults([made[0], *deep], width, dark=dark)


@needs_browser
def test_narrow_windows_show_each_time_and_say_what_is_scrolled(made: tuple[Path, dict[str, Any]]) -> None:
    """Bars shrink, their letters do not; a picture that can't shrink is said to go on beyond the window."""
    probe = (
        "const bars = document.querySelector('#kernels svg'), out = {}; out.bars = bars.getBoundingClientRect().right;"
        "out.times = [...bars.querySelectorAll('text')].map(t => t.getBoundingClientRect().right);"
        "const edges = [...bars.querySelectorAll('rect')].map(r => r.getBoundingClientRect());"
        "out.room = Math.max(...edges.map(r => r.right)) - Math.min(...edges.map(r => r.left));"
        "out.said = [...document.querySelectorAll('.wide')].filter(w => w.querySelector(':scope > svg')).map("
        "w => getComputedStyle(w, '::before').content.includes('sideways'));"
        "out.spare = getComputedStyle(document.querySelector('#memory td:nth-child(5)')).display;"
    )
    for width, narrow in ((400, True), (1200, False)):
        found = json.loads(evaluated(made[0], probe, width))
        assert max(found["times"]) <= found["bars"] + 1 <= width
        assert found["room"] > 60
        assert found["said"] == [narrow] * 3, "the roofline, the timeline and the map"
        assert (found["spare"] == "none") == narrow


@needs_browser
def test_scripts_run(made: tuple[Path, dict[str, Any]]) -> None:
    """Titles are moved to where the pointer shows them; the graph begins at a size that can be read."""
    document = texts(made[0])
    assert document.count("data-tip=") > 30
    assert "<title>" not in document.partition("</head>")[2]
    box = re.search(r'class="zoom"><svg[^>]*viewBox="([^"]*)"', document)
    assert box is not None
    assert 300 < float(box[1].split()[2]) < 1300
