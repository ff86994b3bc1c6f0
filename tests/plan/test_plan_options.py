"""What a plan can be told, and what can be asked of it, on graphs worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fusion_targets import Loops

import rlx
from rlx.errors import MemoryDeficit, NameNotFound, OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.kernels.expr import I64, Expr, Load, const
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.ops import elementwise as ew
from rlx.ops.base import apply
from rlx.plan.check import check
from rlx.plan.interval import Interval
from rlx.plan.pack import pack, pack_spaces
from rlx.plan.plan import SharedWeights, Slot, make_plan
from rlx.plan.prove import prove

F32, F16, F64 = DTYPES["f32"], DTYPES["f16"], DTYPES["f64"]


def kernel(target: Buffer, *operands: Buffer) -> Kernel:
    """Reads backwards, so that nothing is in place."""
    (i,) = out_vars(1)
    loads = [Load(b, (const(0, I64) - i,), b.dtype) for b in operands]
    expr: Expr = loads[0]
    for load in loads[1:]:
        expr = expr + load
    return Kernel(target.name, (Store(target, target.shape, (i,), expr),))


def network(widths: tuple[int, ...] = (32, 48), dtype: Any = F32) -> Program:
    """x, then one kernel a weight: y_n = f(y_n-1, w_n)."""
    x = Buffer("x", "input", (16,), dtype)
    weights = [Buffer(f"w{n}", "param", (width,), dtype) for n, width in enumerate(widths)]
    made = [Buffer(f"y{n}", "arena", (16,), dtype) for n in range(len(widths))]
    run = [kernel(y, before, w) for y, before, w in zip(made, [x, *made], weights, strict=False)]
    return Program("net", inputs=[x], params=weights, run=run, outputs=[("y", made[-1])])


def places(program: Program, **options: Any) -> dict[str, int]:
    plan = make_plan(program, {}, **options)
    prove(program, plan, guard=options.get("guard", 0))
    return {b.name: offset for b, offset in plan.offsets.items()}


def test_weights_lie_below_everything_and_inputs_share() -> None:
    assert places(network()) == {"y0": 0, "y1": 64}
    assert places(network(), include=["params"]) == {"w0": 0, "w1": 128, "y0": 320, "y1": 384}
    with_inputs = places(network(), include=["params", "inputs"])
    assert with_inputs["x"] == with_inputs["y1"]  # x dies with its only reader
    with pytest.raises(OptionError, match="include='weights': expected some of inputs, params"):
        places(network(), include=["weights"])


def test_a_guard_counts_in_the_arena_and_not_in_sizes() -> None:
    plan = make_plan(network(), {}, guard=4)
    assert plan.arena == 2 * 128
    assert [row.nbytes for row in plan.table()] == [64, 64]
    assert plan.totals.unshared == 2 * 64
    assert plan.saved == 0
    check(plan.intervals, plan.placement.offsets, plan.arena)
    assert pack([Interval("none", 0, 1, 0, guard=100)]).height == 0
    with pytest.raises(OptionError, match="'x': guard must be 0 or more"):
        pack([Interval("x", 0, 1, 8, guard=-1)])


def test_a_uniform_element_width_scales_views_too() -> None:
    program = network(dtype=F16)
    last = program.outputs[0][1]
    tail = Buffer("tail", "arena", (4,), F16, root=last, offset=24)
    program.outputs.append(("tail", tail))
    plan = make_plan(program, {}, element_width=4)
    assert plan["tail"] == Slot(plan.offsets[last] + 48, 16, last)
    assert make_plan(program, {})["tail"] == Slot(make_plan(program, {}).offsets[last] + 24, 8, last)
    prove(program, plan)
    with pytest.raises(OptionError, match="'y0' of f64 does not fit the element_width of 4 bytes"):
        make_plan(network(dtype=F64), {}, element_width=4)


@pytest.mark.parametrize("dtype, nbytes", [("f32", 4), ("f16", 2)])
def test_a_chain_of_views_is_one_offset(dtype: str, nbytes: int) -> None:
    """Reshape, slice of rows, cast to the same type, reshape, slice: 8 rows of n, then 1 of 4 n, is 12 n elements."""
    g = rlx.Graph("views")
    n = rlx.Dim("n", 1, 8)
    whole = g.add(ew.Exp(), g.input("x", (8, 4, n), DTYPES[dtype]))[0]
    rows = rlx.slice(rlx.reshape(whole, shape=(32, n)), starts=(8, 0), sizes=(16, n), steps=(1, 1))
    again = rlx.reshape(rlx.cast(rows, to=DTYPES[dtype]), shape=(4, 4, n))
    g.output(rlx.slice(again, starts=(1, 0, 0), sizes=(2, 4, n), steps=(1, 1, 1)), "part")
    g.output(whole, "whole")
    program = rlx.compile(g, device="cpu").compilation.program
    assert program is not None
    root = program.run[0].writes()[0]
    for width in (None, 4):
        item = nbytes if width is None else width
        plan = make_plan(program, {"n": 5}, element_width=width)
        (view,) = plan.views
        assert plan[view] == Slot(plan.offsets[root] + 12 * 5 * item, 2 * 4 * 5 * item, root)
        assert plan[root] == Slot(plan.offsets[root], 8 * 4 * 5 * item, root)
        prove(program, plan)


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(OptionError, match="power of two"):
        make_plan(network(), {}, alignment=alignment)


def test_capacity_counts_what_is_included() -> None:
    assert make_plan(network(), {}, include=["params"], capacity=448).arena == 448
    with pytest.raises(MemoryDeficit, match="1 short"):
        make_plan(network(), {}, include=["params"], capacity=447)


def test_forward_and_backward_agree_on_shared_weights() -> None:
    forward = network()
    shared = SharedWeights.of(make_plan(forward, {}, include=["params"]))
    backward = network((32, 48))
    backward.params.reverse()
    part = Buffer("part", "param", (8,), F32, root=backward.params[0], offset=32)
    backward.run[0] = kernel(backward.run[0].writes()[0], part, backward.params[1])
    plan = make_plan(backward, {}, shared=shared)
    prove(backward, plan, shared=shared)
    assert {b.name: o for b, o in plan.offsets.items() if b.kind == "param"} == {"w0": 0, "w1": 128}
    assert plan.address(part) == 128 + 32
    assert min(o for b, o in plan.offsets.items() if b.kind == "arena") >= 320


def test_a_shared_weight_that_differs_is_refused() -> None:
    shared = SharedWeights.of(make_plan(network(), {}, include=["params"]))
    with pytest.raises(OptionError, match="no param 'w2'"):
        make_plan(network((32, 48, 8)), {}, shared=shared)
    with pytest.raises(OptionError, match=r"'w1' is 192 bytes of f32 .* and 256 bytes of f32"):
        make_plan(network((32, 64)), {}, shared=shared)
    with pytest.raises(OptionError, match=r"'w0' is 128 bytes of f32 .* and 64 bytes of f16"):
        make_plan(network(dtype=F16), {}, shared=shared)


def test_each_memory_space_has_its_own_arena() -> None:
    fast = [Interval(f"f{n}", n, n + 2, 64, space="fast") for n in range(3)]
    slow = [Interval("s", 0, 4, 640, space="slow")]
    found = pack_spaces([fast[0], *slow, *fast[1:]], capacities={"fast": 128})
    assert {space: placement.height for space, placement in found.items()} == {"fast": 128, "slow": 640}
    check(fast, found["fast"].offsets, 128)
    with pytest.raises(MemoryDeficit, match="capacity is 64"):
        pack_spaces([*fast, *slow], capacities={"fast": 64})
    with pytest.raises(OptionError, match="pack_spaces"):
        pack([*fast, *slow])


def test_the_text_table() -> None:
    plan = make_plan(network((32, 48, 8)), {}, include=["params"])
    head, *rows = plan.to_tsv().splitlines()
    assert head == "arena 512\tbound 512\tgap 0.000000\tunshared 576\tsaved 64"
    cells = [row.split("\t") for row in rows]
    keys = [(int(offset), int(nbytes), name) for offset, nbytes, name, *_ in cells]
    assert keys == sorted(keys)
    assert cells[-1][:3] == ["448", "64", "y1"]


def test_zero_sizes_have_a_row_and_take_no_room() -> None:
    n = Dim("n", 0, 8)
    empty, full = Buffer("empty", "arena", (n,), F32), Buffer("full", "arena", (16,), F32)
    x = Buffer("x", "input", (16,), F32)
    p = Program("p", inputs=[x], run=[kernel(empty, x), kernel(full, x)], outputs=[("a", empty), ("b", full)])
    p.dims = {"n": n.symbol} if n.symbol else {}
    plan = make_plan(p, {"n": 0}, guard=16)
    assert [(row.name, row.nbytes) for row in plan.table()] == [("empty", 0), ("full", 64)]
    assert plan.arena == 128


def test_looking_values_up() -> None:
    """The plan of a program knows buffers and their names."""
    graph = Graph("g")
    x = graph.input("x", (4, 8))
    inner = apply(ew.Exp(), x)
    graph.output(apply(ew.Neg(), inner), "y")
    program = fuse(graph, Loops())
    plan = make_plan(program, {})
    (only,) = plan.schedule
    (target,) = only.writes()
    with pytest.raises(NameNotFound, match="also knows values"):
        plan[inner]
    assert plan[target] == plan[target.name] == Slot(0, 128, target)
    with pytest.raises(NameNotFound, match="'nothing'"):
        plan["nothing"]
    with pytest.raises(NameNotFound, match=r"'x' \(input\) has no place"):
        plan[program.inputs[0]]


def test_rules_on_capacity_and_guards_of_the_checker() -> None:
    from rlx.errors import CompileError

    guarded = [Interval("a", 0, 2, 64, guard=8), Interval("b", 0, 2, 64)]
    check(guarded, (0, 128), 192, capacity=192)
    with pytest.raises(CompileError, match=r"'a' \[0, 72\) and 'b' \[64, 128\) overlap"):
        check(guarded, (0, 64), 192)
    with pytest.raises(CompileError, match="capacity of 191"):
        check(guarded, (0, 128), 192, capacity=191)
    with pytest.raises(CompileError, match="ends at 72, beyond"):
        check([replace(guarded[0])], (0,), 64)
