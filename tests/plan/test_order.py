"""Reordering kernels lowers the peak where it can, keeps what every output is, and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fusion_targets import Loops

from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Graph
from rlx.kernels.expr import I64, Expr, Load, const
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import lower_node, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.passes.legalise import legalise
from rlx.plan.order import _WORK, _Work, peak_of, reorder
from rlx.plan.plan import make_plan
from rlx.plan.prove import prove
from rlx.testing.graphs import random_graph
from rlx.testing.program import run_program

F32 = DTYPES["f32"]


def lowered(graph: Graph) -> Program:
    legal, _ = legalise(graph, lambda node: None if lower_node(node) is not None else "no lowering")
    return fuse(legal, Loops())


def made(name: str, size: int, operands: Sequence[Buffer]) -> tuple[Buffer, Kernel]:
    """A kernel that adds the first elements of its operands; never in place."""
    target = Buffer(name, "arena", (size,), F32)
    (i,) = out_vars(1)
    zero = const(0, I64)
    expr: Expr = Load(operands[0], (zero,), F32)
    for operand in operands[1:]:
        expr = expr + Load(operand, (zero,), F32)
    return target, Kernel(name, (Store(target, (size,), (i,), expr),))


def branches(count: int, size: int) -> Program:
    """All large branches are made first, then shrunk one by one, then added: better to shrink each at once."""
    x = Buffer("x", "input", (16,), F32)
    large = [made(f"large{n}", size, [x]) for n in range(count)]
    small = [made(f"small{n}", 16, [buffer]) for n, (buffer, _) in enumerate(large)]
    total = made("total", 16, [buffer for buffer, _ in small])
    p = Program("branches", inputs=[x], outputs=[("total", total[0])])
    p.run = [kernel for _, kernel in (*large, *small, total)]
    return p


def test_branches_are_finished_one_by_one() -> None:
    p = branches(6, 4096)
    q = reorder(p, {})
    assert peak_of(p, {}) >= 6 * 4 * 4096
    assert peak_of(q, {}) <= 4 * 4096 + 7 * 64
    assert sorted(k.name for k in q.run) == sorted(k.name for k in p.run)
    assert [k.name for k in p.run][:2] == ["large0", "large1"]  # the program given is left as it was
    assert all(q.run[n].name == k.name.replace("small", "large") for n, k in enumerate(q.run[1:]) if "small" in k.name)


def test_a_program_that_can_not_be_lower_is_returned() -> None:
    x = Buffer("x", "input", (16,), F32)
    a, first = made("a", 100, [x])
    b, second = made("b", 100, [a])
    c, third = made("c", 100, [b])
    p = Program("chain", inputs=[x], outputs=[("c", c)], run=[first, second, third])
    assert reorder(p, {}) is p


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    x = Buffer("x", "input", (16,), F32)
    pool, kernels = [x], []
    for n in range(rng.randrange(3, 24)):
        operands = rng.sample(pool, min(len(pool), rng.randrange(1, 4)))
        buffer, kernel = made(f"b{n}", rng.choice([1, 16, 400]), operands)
        pool.append(buffer)
        kernels.append(kernel)
    outputs = [(b.name, b) for b in rng.sample(pool[1:], min(len(pool) - 1, 3))]
    return Program("random", inputs=[x], outputs=outputs, run=kernels)


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sample(25)
def test_random_programs(seed: int) -> None:
    """Never a higher peak, the same results bit for bit in a planned arena, and the same order every time."""
    p = random_program(seed)
    q = reorder(p, {})
    assert peak_of(q, {}) <= peak_of(p, {})
    assert [k.name for k in q.run] == [k.name for k in reorder(p, {}).run]
    plan = make_plan(q, {})
    prove(q, plan)
    x = np.arange(16, dtype=np.float32)
    expected, got = run_program(p, {"x": x}), run_program(q, {"x": x}, plan=plan)
    assert all(np.array_equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sample(6)
def test_random_graphs(seed: int) -> None:
    graph, make_inputs = random_graph(seed)
    program = lowered(graph)
    inputs = make_inputs(1)
    extents = bind_extents(graph, {name: array.shape for name, array in inputs.items()})
    q = reorder(program, extents)
    plan = make_plan(q, extents)
    prove(q, plan)
    params = {value.name: value.data for value in graph.params if value.data is not None}
    got = run_program(q, inputs, extents, params=params, plan=plan)
    for name, expected in run_graph(graph, inputs).items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)


def test_copies_to_outputs_come_early_in_a_program_too_long_for_the_search() -> None:
    """Each layer's product is shown in part: it ends with the layer, and not with the copies at the end of the run."""
    g = Graph("shown")
    x = g.input("x", (64, 64))
    for layer in range(16):
        wide = x @ g.param(f"w{layer}", (64, 192))
        g.output(wide[:, 64:128], f"part{layer}")
        x = wide[:, :64] + x
    g.output(x, "y")
    program = lowered(g)
    assert peak_of(reorder(program, {}), {}) < 0.75 * peak_of(program, {})


def backward(count: int) -> Program:
    """Layers whose gradients are read by two chains each, one of two kernels that starts with what was made before all.

    All chains to outputs come at the end, as fusion leaves them; gradients then live until there.
    """
    x = Buffer("x", "input", (16,), F32)
    forward = [made("f0", 40_000, [x])]
    for n in range(1, count):
        forward.append(made(f"f{n}", 40_000, [forward[-1][0]]))
    gradients = [made(f"g{count - 1}", 40_000, [forward[-1][0]])]
    for n in reversed(range(count - 1)):
        gradients.append(made(f"g{n}", 40_000, [gradients[-1][0], forward[n][0]]))
    ends: list[tuple[Buffer, Kernel]] = []
    for n, (f, _), (g, _) in zip(reversed(range(count)), reversed(forward), gradients, strict=True):
        copied = made(f"copy{n}", 44_000, [f])
        ends += [made(f"sum{n}", 16, [g]), copied, made(f"weight{n}", 160, [copied[0], g])]
    outputs = [(b.name, b) for b, _ in ends if not b.name.startswith("copy")]
    kernels = [kernel for _, kernel in (*forward, *gradients, *ends)]
    return Program("backward", inputs=[x], outputs=outputs, run=kernels)


def test_chains_to_outputs_come_as_a_whole_right_behind_what_they_read_last() -> None:
    """Not where the first of their kernels could run: in the forward pass, which would keep copies of all of it."""
    p = backward(12)
    work = _Work(p, {})
    order = [p.run[number].name for number in work.early()]
    for n in range(12):
        assert order.index(f"weight{n}") - order.index(f"g{n}") <= 3
        assert order.index(f"copy{n}") > order.index(f"g{n}")
    assert work.far(work.early()) <= work.far(range(len(p.run)))
    assert peak_of(reorder(p, {}), {}) <= 0.6 * peak_of(p, {})


def test_what_is_made_in_between_puts_a_result_out_of_the_cache() -> None:
    x = Buffer("x", "input", (16,), F32)
    first = made("first", 1000, [x])
    for size, far in ((16, 1), (200_000, 2)):
        others = [made(f"other{n}", size, [x]) for n in range(3)]
        last = made("last", 16, [first[0]])
        p = Program("p", inputs=[x], outputs=[("y", last[0])], run=[k for _, k in (first, *others[:1], last)])
        assert _Work(p, {}).far(range(3)) == far


# ---- how the search grows with a program


def side_by_side(count: int) -> Program:
    """Chains of ten kernels, whose first kernels come first: so many can come next all along."""
    x = Buffer("x", "input", (16,), F32)
    rows, ends = [[made(f"c{n}_0", 16, [x]) for n in range(count // 10)]], []
    for step in range(1, 10):
        rows.append([made(f"c{n}_{step}", 16 * (1 + (7 * n + step) % 5), [b]) for n, (b, _) in enumerate(rows[-1])])
    ends = [(buffer.name, buffer) for buffer, _ in rows[-1]]
    return Program("chains", inputs=[x], outputs=ends, run=[kernel for row in rows for _, kernel in row])


def wide(count: int) -> Program:
    """Half of the kernels make operands, of many sizes, that the other half takes in one by one."""
    x = Buffer("x", "input", (16,), F32)
    makers = [made(f"a{n}", 16 * (1 + n % 97), [x]) for n in range(count // 2)]
    total, sums = x, []
    for n, (buffer, _) in enumerate(makers):
        total, kernel = made(f"s{n}", 64, [total, buffer])
        sums.append(kernel)
    return Program("wide", inputs=[x], outputs=[("y", total)], run=[*(kernel for _, kernel in makers), *sums])


def long(count: int) -> Program:
    """Layers, each of which reads some of the last twelve results."""
    rng = random.Random(0)
    x = Buffer("x", "input", (16,), F32)
    pool, kernels = [x], []
    for n in range(count):
        operands = rng.sample(pool[-12:], min(len(pool), rng.randrange(1, 4)))
        buffer, kernel = made(f"b{n}", rng.choice([1, 16, 400, 4096]), operands)
        pool.append(buffer)
        kernels.append(kernel)
    return Program("long", inputs=[x], outputs=[("y", pool[-1])], run=kernels)


@pytest.mark.parametrize("build", [side_by_side, wide, long])
def test_the_search_takes_work_in_proportion_to_a_program(build: Callable[[int], Program]) -> None:
    """The partial orders looked at, and the entries copied with those kept, for each kernel of a longer program."""
    looked, carried = {}, {}
    for count in (500, 1000, 4000):
        work = _Work(build(count), {})
        assert sorted(work.search()) == list(range(count))
        looked[count], carried[count] = work.looked, work.carried
    assert looked[500] <= looked[1000] <= max(_WORK, 66 * 1000)
    assert looked[4000] <= max(_WORK, 66 * 4000)
    assert carried[4000] <= 4 * max(carried[1000], 10_000)


def test_a_long_program_gets_an_order_of_its_own() -> None:
    """Operands are made when they are taken in, however many could be made first."""
    program = wide(1000)
    assert peak_of(reorder(program, {}), {}) < 0.8 * peak_of(program, {})


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.sample(25)
def test_what_the_search_says_of_an_order_is_so(seed: int) -> None:
    """The sizes that it keeps up to date kernel by kernel are those of the orders that it compares."""
    program = random_program(seed)
    work = _Work(program, {})
    order = work.search()
    before = [set(earlier) for earlier in work.before]
    assert all(before[number] <= set(order[:place]) for place, number in enumerate(order))
    partial, live = work.start(), 0
    for place, number in enumerate(order):
        score = next(score for score in work.following(partial) if score[-1] == number)
        partial = work.run(partial, score, 0)
        ran = order[: place + 1]
        live = sum(
            size
            for buffer, size in enumerate(work.sizes)
            if any(buffer in work.made[n] for n in ran)
            and (work.readers[buffer][0] > sum(buffer in work.read[n] for n in ran))
        )
        assert partial.live == live
        assert sorted(partial.ready) == [n for n in range(len(before)) if n not in ran and before[n] <= set(ran)]
    assert partial.broken - 1 == work.breaks(order)
