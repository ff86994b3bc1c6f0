"""The plan of a program: places of buffers, views and scratch, totals, and its forms for people and tools."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim
from rlx.kernels.expr import I64, Expr, Load, const
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.plan.interval import Placement
from rlx.plan.plan import bound_extents, make_plan, schedule

F32 = DTYPES["f32"]
N = Dim("n", 1, 64)


def chain(length: int = 5) -> Program:
    """b0 -> b1 -> ...: each is the one before, reversed (so never in place); the last but one is kept by a view."""
    x = Buffer("x", "input", (N, 16), F32)
    made = [Buffer(f"b{i}", "arena", (N, 16), F32) for i in range(length)]
    i, j = out_vars(2)
    back: Expr = const(15, I64) - j
    p = Program("chain", inputs=[x], dims={"n": N.symbol} if N.symbol else {})
    for source, target in zip([x, *made], made, strict=False):
        p.run.append(Kernel("flip", (Store(target, target.shape, (i, j), Load(source, (i, back), F32)),)))
    tail = Buffer("tail", "arena", (N, 8), F32, root=made[-2], offset=N * 16 * 4 - N * 8 * 4)
    p.outputs = [("y", made[-1]), ("tail", tail)]
    return p


def map_chain() -> Program:
    p = chain(3)
    for kernel in p.run:
        (store,) = kernel.stores
        assert isinstance(store.expr, Load)
        kernel.stores = (replace(store, expr=replace(store.expr, indices=store.index)),)
    return p


def test_offsets_sharing_and_totals() -> None:
    p = chain()
    plan = make_plan(p, {"n": 4})
    plan.verify()
    assert [b.name for b in plan.offsets] == ["b0", "b1", "b2", "b3", "b4"]
    assert plan.arena == plan.lower_bound == 512
    assert plan.gap == 0
    assert (plan.saved, plan.in_place) == (5 * 256 - 512, 0)
    assert plan.at == {"n": 4}


def test_every_buffer_apart() -> None:
    plan = make_plan(chain(), {"n": 4}, reuse=False)
    assert len(set(plan.offsets.values())) == 5
    assert (plan.arena, plan.saved) == (5 * 256, 0)
    assert make_plan(map_chain(), {"n": 4}, reuse=False).in_place == 0


def test_in_place_counts_as_saved() -> None:
    plan = make_plan(map_chain(), {"n": 4})
    assert [row.into for row in plan.table()] == ["", "b0", ""]  # b1 is shown to the end, so b2 can't take its place
    assert plan.in_place == 256
    assert plan.saved == 3 * 256 - plan.arena == 256


def test_one_plan_at_the_bounds_serves_all_extents() -> None:
    p = chain()
    bounds = bound_extents(p)
    assert bounds == {"n": 64}
    plan = make_plan(p, bounds)
    tail = p.outputs[1][1]
    assert plan.arena == 2 * 64 * 64
    assert plan.address(tail) == plan.offsets[tail.base] + 64 * 32
    assert plan.address(tail, {"n": 3}) == plan.offsets[tail.base] + 3 * 32


def test_a_schedule_is_made_once_for_many_plans() -> None:
    p = map_chain()
    timeline = schedule(p)
    for extents in ({"n": 4}, {"n": 9}, {"n": 64}):
        again, fresh = make_plan(timeline, extents), make_plan(p, extents)
        assert (again.offsets, again.rows, again.intervals) == (fresh.offsets, fresh.rows, fresh.intervals)


def test_scratch_has_its_place_beside_what_is_live() -> None:
    p = chain()
    plan = make_plan(p, {"n": 4}, extra=[("pack", 1, 1000), ("pack", 3, 10), ("sums", 3, 10)])
    plan.verify()
    assert {step: sorted(names) for step, names in plan.scratch.items()} == {1: ["pack"], 3: ["pack", "sums"]}
    b0, b1 = list(plan.offsets)[:2]
    used = sorted([(plan.offsets[b0], 256), (plan.offsets[b1], 256), (plan.scratch[1]["pack"], 1000)])
    assert all(start + size <= later for (start, size), (later, _) in pairwise(used))
    assert plan.arena >= 512 + 1024


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_alignment(alignment: int) -> None:
    plan = make_plan(chain(), {"n": 3}, alignment=alignment)
    assert all(offset % alignment == 0 for offset in plan.offsets.values())
    assert plan.arena == 2 * max(192, alignment)


def test_a_broken_plan_is_found() -> None:
    plan = make_plan(chain(), {"n": 4})
    same = Placement((0,) * len(plan.intervals), plan.arena, "by hand")
    with pytest.raises(CompileError, match="overlap"):
        replace(plan, placement=same).verify()


def test_an_empty_program_has_an_empty_plan() -> None:
    p = Program("empty")
    plan = make_plan(p, {})
    assert (plan.arena, plan.gap, plan.saved, plan.table()) == (0, 0, 0, [])
    assert "arena        0 B" in str(plan)
    json.loads(plan.to_json())
    ET.fromstring(plan.to_svg())


def test_forms() -> None:
    """Text, JSON and SVG all name the buffers; the table has one row each, in order of writing."""
    plan = make_plan(map_chain(), {"n": 4})
    text = str(plan)
    assert text.startswith("at n = 4\n")
    assert "b0 > b1" in text
    assert "in place     256 B in 1 buffers" in text
    tree = json.loads(plan.to_json())
    assert tree["at"] == {"n": 4}
    assert tree["totals"]["in_place"] == 256
    assert [row["name"] for row in tree["rows"]] == ["b0", "b1", "b2"]
    assert tree["rows"][1] == {
        "name": "b1", "type": "f32[n, 16]", "start": 1, "stop": 3, "offset": plan.offsets[list(plan.offsets)[1]],
        "nbytes": 256, "made_by": "flip", "into": "b0",
    }  # fmt: skip
    assert plan.table()[0].stop == 2  # until it has been written over
    assert "b0 &gt; b1" in plan.to_svg()
