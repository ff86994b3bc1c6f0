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
from click.testing import CliRunner
from screenshots import needs_browser, screenshot, texts

import rlx
from rlx.cli.main import cli
from rlx.cost import kept
from rlx.demo import DIGITS


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
    charts = [ET.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(charts) == 5


def test_every_kernel_is_in_every_chart(made: tuple[Path, dict[str, Any]]) -> None:
    path, facts = made
    text = path.read_text(encoding="utf-8")
    space = "{http://www.w3.org/2000/svg}"
    bars, roof, line, boxes, graph = (ET.fromstring(c) for c in re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    count = len(facts["kernels"])
    assert count == 7
    assert len(bars.findall(f"{space}rect")) == count
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


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 400])
def test_as_a_browser_shows_it(made: tuple[Path, dict[str, Any]], tmp_path: Path, dark: bool, width: int) -> None:
    """The ground is light or dark as the system is, text stands out from it, and nothing is wider than the window."""
    pixels = screenshot(made[0], tmp_path / "page.png", width, 4000, dark=dark).astype(int)
    ground = pixels[0, 0].mean()
    assert ground < 60 if dark else ground > 240
    top = pixels[:600].mean(axis=2)
    assert np.abs(top - ground).max() > 150
    right = np.abs(pixels[:, -6:].mean(axis=2) - ground)
    assert (right < 30).all()  # the margin at the right is empty


@needs_browser
def test_scripts_run(made: tuple[Path, dict[str, Any]]) -> None:
    """Titles are moved to where the pointer shows them; the graph begins at a size that can be read."""
    document = texts(made[0])
    assert document.count("data-tip=") > 30
    assert "<title>" not in document.partition("</head>")[2]
    box = re.search(r'class="zoom"><svg[^>]*viewBox="([^"]*)"', document)
    assert box is not None
    assert 100 < float(box[1].split()[2]) < 1300
