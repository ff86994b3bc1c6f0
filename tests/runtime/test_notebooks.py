"""What a notebook shows: one look with the report page, well-formed, escaped, and nothing that runs or is fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import html
from rlx.demo import DIGITS


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown(what: Any) -> str:
    text = what._repr_html_()
    assert isinstance(text, str)
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert text.startswith(f'<div class="rlx"><style>{html.STYLE}</style>')
    assert not re.search(r"<script|src=|@import|https?://", text.replace('xmlns="http://', ""))
    return text


@pytest.fixture(scope="module")
def model() -> rlx.CompiledGraph:
    return rlx.load(DIGITS, device="cpu", dims={"batch": 4})


def test_each_shows_what_its_text_says(model: rlx.CompiledGraph) -> None:
    plan, cost = model.plan, model.cost
    decision = rlx.choose(model.compilation.source, calibrate=False)
    estimate = rlx.estimate(DIGITS, device="cpu", dims={"batch": 4})
    known = "a guess" if cost.guessed else "calibration of the device"
    assert plan is not None
    found = {
        "model": (model, ["Compiled graph", "image: f32[4, 1, 8, 8]", "packed weights", ".report("]),
        "plan": (plan, ["Arena ", "<title>", "live bytes", f"{plan.arena:,} B"]),
        "decision": (decision, ["class=chosen", "why not", "reference", "never chosen"]),
        "cost": (cost, ["per run", "bound by", "conv1", known]),
        "estimate": (estimate, ["Memory estimate", "overhead", "running peak", "known as"]),
        "devices": (rlx.devices(), ["available", "cpu", "xla", "class=chosen"]),
        "explain": (model.explain(), ["<pre>", "device   cpu\n"]),
    }  # fmt: skip
    for name, (what, words) in found.items():
        text = shown(what)
        for word in words:
            assert word in text, (name, word)


def test_tables_keep_their_look_in_a_notebook() -> None:
    """Its style has `:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td`, two classes and a tag: ours is as strong."""
    rules = re.findall(r"([^{}]+)\{[^{}]*text-align: (?:left|right)", html.STYLE)
    selectors = [selector.strip() for rule in rules for selector in rule.rpartition("}")[2].split(",")]
    assert len(selectors) == 4
    assert all(selector.startswith(".rlx.rlx ") for selector in selectors)


def test_an_explanation_is_a_str(model: rlx.CompiledGraph) -> None:
    """With all that a str does; names of a model are escaped."""
    text = model.explain("kernels")
    assert isinstance(text, str)
    assert text.splitlines()
    assert type(text + "!") is str
    g = rlx.Graph("<b>bold</b>")
    g.output(g.input("<i>x</i>", (2,)) + 1, "y")
    made = rlx.compile(g, device="cpu")
    for what in (made, made.explain(), made.explain("graph"), made.cost, made.plan):
        assert not re.search(r"<b>bold|<i>x", shown(what))


def test_devices_are_a_list() -> None:
    found = rlx.devices()
    assert isinstance(found, list)
    assert {d.name for d in found} >= {"cpu", "reference", "xla"}


def test_after_a_run_it_tells_of_threads() -> None:
    model = rlx.load(DIGITS, device="cpu", dims={"batch": 64}, threads=2)
    assert "thread barriers" not in shown(model)
    model.run([np.zeros((64, 1, 8, 8), np.float32)])
    assert "thread barriers" in shown(model)
    assert "thread barriers: " in model.explain()
