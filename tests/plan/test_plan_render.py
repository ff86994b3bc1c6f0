"""The renderers show every buffer, the right totals, and well-formed JSON and SVG."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from rlx.plan.interval import Interval, Placement
from rlx.plan.pack import pack
from rlx.plan.page import to_svg
from rlx.plan.render import common_tail, last_parts, letters_for, short_names, to_json, to_text, totals

INTERVALS = [
    Interval("x<1>", 0, 2, 2048),
    Interval("y", 1, 3, 1024, fixed=2048),
    Interval("z", 2, 4, 2000),
    Interval("none", 0, 4, 0),
]
PLACEMENT = pack(INTERVALS)


def test_totals() -> None:
    sums = totals(INTERVALS, PLACEMENT)
    assert (sums.buffers, sums.arena, sums.lower_bound, sums.gap) == (4, 3072, 3072, 0.0)
    assert (sums.unshared, sums.saved, sums.peak_step) == (5120, 2048, 1)


def test_gap_is_relative_to_the_bound() -> None:
    assert totals(INTERVALS, Placement((0, 2048, 0, 0), 3840, "by hand")).gap == 0.25


def test_text_lists_buffers_and_totals() -> None:
    text = to_text(INTERVALS, PLACEMENT)
    row = next(line for line in text.splitlines() if line.startswith("y"))
    assert row.split() == ["y", "[1,", "3)", "2,048", "1,024", "64", "fixed"]
    assert "arena        3.00 KiB (3,072 B)" in text
    assert "gap          0.00 %" in text
    assert "saved        2.00 KiB (2,048 B) by sharing" in text


def test_text_can_keep_the_largest_only() -> None:
    text = to_text(INTERVALS, PLACEMENT, rows=1)
    assert "x<1>" in text
    assert "z" not in text.split("\n\n")[0].replace("size", "")
    assert "... and 3 smaller" in text


def test_json_round_trips() -> None:
    data = json.loads(to_json(INTERVALS, PLACEMENT))
    assert [entry["offset"] for entry in data["buffers"]] == list(PLACEMENT.offsets)
    assert data["buffers"][1]["fixed"] == 2048
    assert data["totals"]["arena"] == 3072


def test_svg_is_well_formed_and_has_a_titled_box_a_buffer() -> None:
    root = ET.fromstring(to_svg(INTERVALS, PLACEMENT))
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3  # the empty buffer has no box
    assert titles[0].startswith("x<1>\n2.00 KiB")


def test_an_empty_plan_renders() -> None:
    nothing = pack([])
    assert "arena        0 B" in to_text([], nothing)
    ET.fromstring(to_svg([], nothing))
    assert json.loads(to_json([], nothing))["buffers"] == []


def test_long_names_lose_what_they_have_in_common() -> None:
    """They stay distinct: what most begin with goes, then what most end with; short names stay as they are."""
    names = [f"/model/encoder/layer.{i}/attention/query_output_Quantised" for i in range(12)]
    assert short_names(["x", *names], 48) == ["x", *(f"…layer.{i}/attention/query_output_Quantised" for i in range(12))]
    assert short_names(names, 40) == [f"…layer.{i}…" for i in range(12)]
    assert short_names(["z" * 50, *names], 40)[1:] == short_names(names, 40)
    assert short_names(names, 200) == names
    assert all(len(name) <= 12 for name in short_names(names, 12))
    assert short_names(["a" * 50, "b"], 11) == ["aaaaa…aaaaa", "b"]


def test_labels_have_the_last_parts_of_a_path() -> None:
    """As many as fit, else the start of the last one; nothing where that says nothing."""
    name = "/layers.0/attention/LayerNormalization"
    assert last_parts(name, 40) == name
    assert last_parts(name, 30) == "…attention/LayerNormalization"
    assert last_parts(name, 29) == last_parts(name, 20) == "…LayerNormalization"
    assert last_parts(name, 10) == "LayerNor…"
    assert last_parts(name, 5) == ""
    assert last_parts("trailing/", 7) == "trail…"
    assert common_tail(["a/Add_output_0", "b/Mul_output_0", "c/Mul_output_0", "mask"]) == "_output_0"
    assert common_tail([]) == ""


def test_a_table_without_a_limit_has_whole_names() -> None:
    long = Interval("n" * 90, 0, 1, 64)
    placement = Placement((0,), 64, "x", 64)
    assert "n" * 90 in to_text([long], placement, letters=None)
    assert "n" * 90 not in to_text([long], placement)
    assert max(len(line) for line in to_text([long], placement, letters=letters_for(80)).splitlines()[:2]) <= 80
