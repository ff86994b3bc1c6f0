"""Phases side by side: which may run so, which do, and that nothing but the time changes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.codegen.table import Phase
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.native.runner_ir import JOB, STATUS
from rlx.backends.cpu.runtime import concurrent_phases
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.runtime.nan_trap import KERNEL
from rlx.backends.cpu.schedule.arguments import Scratch, ScratchStride
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, NanTrapped
from rlx.ir.graph import Array, Graph
from rlx.kernels.program import Buffer
from rlx.plan.arena import MemoryPlan
from rlx.records import replace
from rlx.testing.graphs import random_graph
from rlx.testing.oracle import compare_results, tolerances

Some = Callable[[Sequence[int], int], list[int]]  # as in tests/conftest.py
THREADS = [1, 2, 3, 5]
RNG = np.random.default_rng(5)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape, np.float32)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may run side by side does."""
    monkeypatch.setattr(concurrent_phases, "LEAST_SAVED", -1e12)
    monkeypatch.setattr(concurrent_phases, "LEAST_ALONE", -1e12)


def compiled(graph: Graph, threads: int = 2, **options: Any) -> rlx.CompiledGraph:
    return rlx.compile(graph, device="cpu", threads=threads, **options)


def executable(model: rlx.CompiledGraph) -> CpuExecutable:
    found = model._executable
    assert isinstance(found, CpuExecutable)
    return found


def groups(model: rlx.CompiledGraph) -> list[list[str]]:
    """The names of the kernels of each job, after a run."""
    made = executable(model)
    assert made.bound is not None
    return [
        [phase.kernel.name for phase in made.shared.run.phases[job.first : job.first + job.count]]
        for job in made.bound.jobs
    ]


def one_by_one(model: rlx.CompiledGraph) -> None:
    """Has the next runs at the present shapes go phase by phase."""
    bound = executable(model).bound
    assert bound is not None
    bound.table[:, JOB] = 0


def projections(width: int = 256, rows: int = 32, count: int = 3) -> Graph:
    """Products of one operand, as for queries, keys and values."""
    g = Graph("projections")
    x = g.input("x", (rows, width))
    for n in range(count):
        g.output(x @ g.param(f"w{n}", (width, width), data=normal(width, width)), name=f"y{n}")
    return g


# ---- the walker

CHUNK = """define void @beside_note(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
  %p = load ptr, ptr %words
  %q = getelementptr i64, ptr %p, i64 %chunk
  %v = load i64, ptr %q
  %n = add i64 %v, 1
  store i64 %n, ptr %q
  ret void
}
"""


@pytest.fixture(scope="module")
def note() -> int:
    """A kernel that adds 1 to element `chunk` of the array in its word."""
    return jit.compile_kernels([("beside_note", CHUNK, False)])["beside_note"]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("counts", [(1, 1), (4, 4, 4), (1, 7, 0, 2), (1,) * 9, (300, 1, 20)])
@pytest.mark.parametrize("profiled", [False, True])
def test_the_walker_runs_each_chunk_of_a_job_once(
    note: int, counts: tuple[int, ...], threads: int, profiled: bool
) -> None:
    """And what comes before and after it, in every run, also where phases are timed one by one."""
    seen = [np.zeros(max(n, 1), np.int64) for n in (1, *counts, 3)]
    operands = [np.array([a.ctypes.data], np.int64) for a in seen]
    rows = [(note, int(w.ctypes.data), n) for w, n in zip(operands, (1, *counts, 3), strict=True)]
    block = RunBlock(rows, threads=threads)
    order = concurrent_phases._in_shares(counts, [0] * len(counts), threads)
    assert sorted(order) == [(n, chunk) for n, count in enumerate(counts) for chunk in range(count)]
    job = np.array([len(counts), len(order), *(w for n, c in order for w in (*rows[1 + n][:2], c))], np.int64)
    block.table[1, JOB] = job.ctypes.data
    if profiled:
        block.enable_profile()
    for runs in (1, 2, 3):
        assert block.run() == 0
        for array, count in zip(seen, (1, *counts, 3), strict=True):
            assert array.tolist() == [runs if n < count else 0 for n in range(len(array))]
    if profiled:
        assert (block.profiled(len(rows))[:, 0] > 0).all()


@pytest.mark.parametrize("threads", [2, 3, 4, 5])
def test_a_thread_has_its_share_of_every_phase(threads: int) -> None:
    counts = [threads, 2 * threads, 4 * threads]
    order = concurrent_phases._in_shares(counts, [0, 0, 0], threads)
    for thread in range(threads):
        share = order[thread * len(order) // threads : (thread + 1) * len(order) // threads]
        assert sorted(share) == [
            (n, chunk)
            for n, count in enumerate(counts)
            for chunk in range(thread * count // threads, (thread + 1) * count // threads)
        ]


def test_threads_begin_with_the_longest() -> None:
    """Of phases of one chunk each."""
    assert [n for n, _ in concurrent_phases._in_shares([1, 1, 1], [5, 1, 9], 2)] == [2, 0, 1]
    assert [n for n, _ in concurrent_phases._in_shares([1, 1, 1, 1], [1, 2, 9, 8], 2)] == [2, 0, 3, 1]


# ---- which may


def test_products_of_one_operand_run_side_by_side() -> None:
    model = compiled(projections())
    model({"x": normal(32, 256)})
    assert groups(model) == [["matmul", "matmul", "matmul"]]
    joins = model.joins
    assert joins is not None
    assert (joins.serial - joins.made, joins.beside, joins.groups) == (2, 3, 1)
    assert str(joins) in model.explain()


def test_what_reads_a_result_runs_after_it() -> None:
    g = Graph("chain")
    y = g.input("x", (64, 256))
    for n in range(4):
        y = y @ g.param(f"w{n}", (256, 256), data=normal(256, 256))
    g.output(y, name="y")
    model = compiled(g)
    model({"x": normal(64, 256)})
    assert groups(model) == []


@pytest.mark.parametrize("reuse", [True, False])
def test_what_takes_the_place_of_an_operand_runs_after_its_reader(reuse: bool) -> None:
    """The second branch begins in the memory that the first is done with: only without reuse are they apart."""
    g = Graph("reuse")
    x = g.input("x", (64, 512))
    w = [g.param(f"w{n}", (512, 512), data=normal(512, 512)) for n in range(4)]
    first = (x @ w[0]) @ w[1]
    second = (x @ w[2]) @ w[3]
    g.output(rlx.reduce_sum(first, axes=1), name="a")
    g.output(rlx.reduce_sum(second, axes=1), name="b")
    made = executable(compiled(g, reuse=reuse))
    assert made.plan is not None
    check_spans(made, made.plan)


def check_spans(made: CpuExecutable, plan: MemoryPlan) -> int:
    """No kernel of a span writes a byte that another one touches; gives the number of pairs that were looked at."""

    def bytes_of(buffers: tuple[Buffer, ...]) -> list[tuple[object, int, int]]:
        found: list[tuple[object, int, int]] = []
        for buffer in buffers:
            if buffer.base.kind == "arena":
                start = plan.address(buffer)
                found.append(("arena", start, start + plan.nbytes(buffer)))
            else:
                found.append((buffer.base, 0, 1))
        return found

    def touched(phase: Phase) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
        kernel = phase.kernel
        own = [other for other in phases if other.kernel is kernel]
        if phase.piece:
            kernel = replace(kernel, stores=(kernel.stores[own.index(phase)],))
        return kernel.reads(), kernel.writes()

    pairs, phases = 0, made.shared.run.phases
    for first, count in made.shared.spans_of(plan):
        inside = phases[first : first + count]
        assert all(p.code is not None and not p.code.sites and p.kernel.mark is None for p in inside)
        for a, b in permutations(inside, 2):
            if a.kernel is b.kernel:
                assert a.piece
                continue
            pairs += 1
            (_, written), (other_read, other_written) = touched(a), touched(b)
            for what, start, stop in bytes_of(written):
                for other, low, high in bytes_of((*other_read, *other_written)):
                    assert what != other or stop <= low or high <= start
    return pairs


def test_spans_of_random_graphs_share_no_memory(some: Some) -> None:
    pairs = 0
    for seed in some(range(60), 10):
        graph, make_inputs = random_graph(seed, 20, dtypes=("f32", "i32"), sizes=(1, 2, 3, 8, 17))
        model = compiled(graph)
        model(make_inputs(1))
        made = executable(model)
        assert made.plan is not None
        pairs += check_spans(made, made.plan)
    assert pairs > 50


def test_what_can_fail_runs_alone(eager: None) -> None:
    """So the first error in the order of phases is the one that is raised."""
    g = Graph("failing")
    x, at = g.input("x", (32, 256)), g.input("at", (8,), "i64")
    found = [x @ g.param(f"w{n}", (256, 256), data=normal(256, 256)) for n in range(2)]
    found += [rlx.gather(x, at, axis=0), rlx.gather(rlx.exp(x), at, axis=0)]
    for n, value in enumerate(found):
        g.output(value, name=f"y{n}")
    model = compiled(g)
    inputs = {"x": normal(32, 256), "at": np.arange(8)}
    model(inputs)
    assert ["matmul", "matmul"] in groups(model)
    assert not any("gather" in name for names in groups(model) for name in names)
    with pytest.raises(ExecutionError, match="index out of range"):
        model({**inputs, "at": np.arange(8) + 30})
    compare_results(run_graph(g, inputs), dict(model(inputs)), tolerances(g))


def test_control_flow_is_never_crossed(eager: None) -> None:
    """Both branches of an If have products that would run beside those before and after it."""
    g = Graph("flow")
    x, flag = g.input("x", (32, 256)), g.input("flag", (), "bool")
    w = [g.param(f"w{n}", (256, 256), data=normal(256, 256)) for n in range(6)]

    def both(a: rlx.Value, b: rlx.Value) -> rlx.Value:
        return rlx.softmax(a) - rlx.softmax(b)

    before = both(x @ w[0], x @ w[1])
    inside = rlx.cond(flag, lambda: both(x @ w[2], x @ w[3]), lambda: both(x @ w[3], x @ w[2]))
    after = both(x @ w[4], x @ w[5])
    g.output(before + inside + after, name="y")
    model = compiled(g)
    for given in (True, False):
        inputs = {"x": normal(32, 256), "flag": np.array(given)}
        compare_results(run_graph(g, inputs), dict(model(inputs)), tolerances(g))
    made = executable(model)
    assert made.bound is not None
    assert made.bound.jobs
    check_spans(made, made.bound.plan)


# ---- that what is known of a phase is all it touches


def stateful() -> Graph:
    """States that are read, written as a whole, and updated in place, one of them by what attention reads."""
    g = Graph("stateful")
    x = g.input("x", (1, 4, 2, 16))
    total, cache = g.state("total", (1, 4, 2, 16)), g.input("old", (1, 4, rlx.Dim("past", 0, 30), 16))
    new = total + rlx.tanh(x)
    g.update(total, new)
    keys = rlx.concat(cache, x * 2.0, axis=2)
    g.output(keys, name="keys")
    g.output(rlx.attention(rlx.relu(x), keys, keys) + new, name="y")
    made: Graph = rlx.bind_cache(g, 32, {"old": "keys"})
    return made


def graphs(seeds: Iterable[int]) -> Iterator[tuple[Graph, dict[str, Array]]]:
    yield branches(), {"x": normal(1, 8, 28, 28)}
    yield projections(), {"x": normal(32, 256)}
    yield stateful(), {"x": normal(1, 4, 2, 16)}
    for seed in seeds:
        graph, make_inputs = random_graph(seed, 20, dtypes=("f32", "i32", "bool"), sizes=(1, 2, 3, 8, 17, 33))
        yield graph, make_inputs(2)


def test_phases_touch_what_they_are_known_to_touch(some: Some) -> None:
    """Each changes no byte of the arena and of states but what `beside` takes it to write, and reads no others."""
    count, seeds = 0, some(range(40), 7)
    for graph, inputs in graphs(seeds):
        model = compiled(graph)
        for _ in range(2):
            model(inputs)
            count += check_phases(executable(model), [inputs[spec.name] for spec in model.inputs])
    assert count > 7 * len(seeds)


def check_phases(made: CpuExecutable, inputs: list[Array]) -> int:
    """Runs phase by phase, each from three contents of the memory that it has nothing to do with."""
    with made.held():
        ready = made.compact(inputs)
        bound, block = made.bind(ready), made.block
        for number, word, shift in bound.patches:
            ctypes.c_int64.from_address(word).value = ready[number].ctypes.data + shift
        memory: dict[object, Array] = {None: made.memory}
        memory |= {root: made.states.current(root).reshape(-1).view(np.uint8) for root in made.states.memory}
        known, phases, checked = concurrent_phases._Memory(bound.plan), made.shared.run.phases, 0
        block.words[STATUS] = 0
        for index, phase in enumerate(phases):
            function, words, chunks = (int(w) for w in bound.table[index, :3])
            touched = known.touched(phase)
            before = {key: array.copy() for key, array in memory.items()}
            results = []
            for fill in (None, 0x00, 0xFF) if touched is not None else (None,):
                for key, array in memory.items():
                    array[:] = before[key]
                    if touched is not None and fill is not None:
                        array[~within(key, array.size, [*touched[0], *touched[1]])] = fill
                filled = {key: array.copy() for key, array in memory.items()}
                for chunk in range(chunks):
                    KERNEL(function)(words, chunk, block.address, 0)
                assert block.status == 0
                if touched is not None:
                    checked += 1
                    for key, array in memory.items():
                        inside = within(key, array.size, touched[1])
                        np.testing.assert_array_equal(array[~inside], filled[key][~inside], phase.kernel.name)
                    results.append([array[within(k, array.size, touched[1])].copy() for k, array in memory.items()])
            for other in results[1:]:
                for a, b in zip(results[0], other, strict=True):
                    np.testing.assert_array_equal(a, b, phase.kernel.name)
            if touched is not None:
                for key, array in memory.items():
                    outside = ~within(key, array.size, touched[1])
                    array[outside] = before[key][outside]
    return checked


def within(memory: object, size: int, ranges: list[tuple[object, int, int]]) -> Array:
    """Which bytes of a memory are in some of the ranges."""
    found = np.zeros(size, np.bool_)
    for what, start, stop in ranges:
        if what is memory:
            found[start:stop] = True
    return found


# ---- that nothing else changes


@pytest.mark.usefixtures("eager")
@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(400))
def test_random_graphs_keep_their_bits(seed: int) -> None:
    """With any number of threads, and phase by phase."""
    sizes = (1, 2, 3, 5, 7, 33) if seed % 2 else (1, 4, 9, 16, 64, 70)
    graph, make_inputs = random_graph(seed, 20, dtypes=("f32", "f64", "i32", "bool"), sizes=sizes)
    inputs = make_inputs(3)
    expected = {name: a.copy() for name, a in compiled(graph, 1)(inputs).items()}
    for threads in (2, 3, 5):
        model = compiled(graph, threads)
        for _ in range(3):
            same(expected, model(inputs), seed)
        one_by_one(model)
        same(expected, model(inputs), seed)


def same(expected: dict[str, Array], results: Any, what: object = None) -> None:
    for name, array in results.items():
        assert array.tobytes() == expected[name].tobytes(), (what, name)


def branches() -> Graph:
    """Branches of convolutions whose scratch is of different sizes, products, pieces of a result, and heads."""
    g = Graph("branches")
    x = rlx.relu(rlx.conv(g.input("x", (1, 8, 28, 28)), g.param("stem", (16, 8, 1, 1), data=normal(16, 8, 1, 1))))
    ways = []
    for n, (size, stride) in enumerate([(1, 1), (3, 1), (5, 1), (3, 2)]):
        w = g.param(f"w{n}", (24, 16, size, size), data=normal(24, 16, size, size))
        ways.append(rlx.conv(x, w, pads=(size // 2,) * 4, strides=(stride, stride)))
    joined = rlx.concat(*[rlx.relu(way) for way in ways[:3]], axis=1)
    g.output(joined, name="joined")
    pooled = rlx.reshape(rlx.reduce_mean(joined, axes=(2, 3)), (1, 72))
    for n in range(3):
        g.output(rlx.tanh(pooled @ g.param(f"h{n}", (72, 40), data=normal(72, 40))), name=f"head{n}")
    g.output(ways[3], name="down")
    return g


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("threads", THREADS)
def test_branches_keep_their_bits(threads: int) -> None:
    """`run`, views, `out=`, some outputs only, clones, profiles."""
    g, x = branches(), normal(1, 8, 28, 28)
    expected = {name: a.copy() for name, a in compiled(g, 1)({"x": x}).items()}
    compare_results(run_graph(g, {"x": x}), expected, tolerances(g))
    model = compiled(g, threads)
    same(expected, model({"x": x}))
    assert bool(groups(model)) == (threads > 1)
    names = list(expected)
    same(expected, dict(zip(names, model.run_views([x]), strict=True)))
    same(expected, dict(zip(names, model.clone().run([x]), strict=True)))
    out = {name: np.empty_like(a) for name, a in expected.items()}
    model.run([x], out=out)
    same(expected, out)
    bound = executable(model).bound
    assert bound is not None
    before = bound.table.copy()
    for some in ([names[0]], [names[1], names[-1]], [names[-1]]):
        same(expected, dict(zip(some, model.run([x], outputs=some), strict=True)))
        np.testing.assert_array_equal(bound.table, before)
    assert len(model.profile([x], repeat=2)) == len(bound.table)
    assert all(seconds > 0 for _, _, seconds in model.profile([x], repeat=2))
    same(expected, model({"x": x}))


@pytest.mark.usefixtures("eager")
def test_no_two_workers_share_scratch() -> None:
    """A worker has the same memory in every phase, and it is enough for each."""
    model = compiled(branches(), 3)
    model({"x": normal(1, 8, 28, 28)})
    made = executable(model)
    assert made.bound is not None
    table, binding = made.shared.run, made.bound.binding
    (start,) = {int(binding.words[n]) for n in table.scratch}
    (stride,) = {int(binding.words[n]) for n in table.strides}
    codes = [phase.code for phase in table.phases if phase.code is not None and Scratch() in phase.code.words]
    sizes = {code.scratch_bytes(binding.known) for code in codes}
    assert len(sizes) > 2
    assert stride == max(sizes)
    assert start == made.scratch.ctypes.data
    assert 3 * stride <= made.scratch.nbytes
    assert ["conv", "conv+relu", "conv+relu", "conv+relu"] in groups(model)
    assert all(ScratchStride() in code.words for code in codes)


@pytest.mark.usefixtures("eager")
def test_a_nan_is_trapped_where_it_arises() -> None:
    """Runs that are watched go phase by phase."""
    g = Graph("nan")
    x = g.input("x", (32, 256))
    w = [g.param(f"w{n}", (256, 256), data=normal(256, 256)) for n in range(3)]
    parts = [x @ w[0], rlx.log(x) @ w[1], x @ w[2]]
    for n, part in enumerate(parts):
        g.output(part, name=f"y{n}")
    model = compiled(g, trap="nan")
    model({"x": np.abs(normal(32, 256)) + 1})
    with pytest.raises(NanTrapped, match="log"):
        model({"x": -np.abs(normal(32, 256)) - 1})


@pytest.mark.usefixtures("eager")
def test_sizes_that_change_from_run_to_run() -> None:
    """Without a bound the plan is made anew, and what may run side by side by it."""
    g = Graph("open")
    x = g.input("x", (rlx.Dim("rows", 1, None), 64))
    w = [g.param(f"w{n}", (64, 64), data=normal(64, 64)) for n in range(4)]
    first, second = (x @ w[0]) @ w[1], (x @ w[2]) @ w[3]
    g.output(rlx.concat(first, second, rlx.exp(x), axis=0), name="y")
    model, plain = compiled(g, 3), compiled(g, 1)
    for rows in (3, 200, 17, 1000, 1, 3):
        inputs = {"x": normal(rows, 64)}
        same(dict(plain(inputs)), model(inputs), rows)
        made = executable(model)
        assert made.bound is not None
        check_spans(made, made.bound.plan)


@pytest.mark.usefixtures("eager")
def test_several_python_threads_at_once() -> None:
    g = branches()
    inputs = [normal(1, 8, 28, 28) for _ in range(4)]
    single = compiled(g, 1)
    expected = [{name: a.copy() for name, a in single({"x": x}).items()} for x in inputs]
    model = compiled(g, 3)
    errors: list[BaseException] = []

    def work(own: rlx.CompiledGraph, number: int) -> None:
        try:
            for _ in range(30):
                same(expected[number], own({"x": inputs[number]}))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    workers = [threading.Thread(target=work, args=(model.clone(), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


def test_an_artifact_keeps_its_groups(tmp_path: Path) -> None:
    """As it keeps the costs that they are chosen by; another number of threads chooses for itself."""
    model, x = compiled(projections()), normal(32, 256)
    expected = {name: a.copy() for name, a in model({"x": x}).items()}
    model.save(tmp_path / "model.rlxart")
    for threads in (2, 3):
        other = rlx.load(tmp_path / "model.rlxart", device="cpu", threads=threads)
        same(expected, other({"x": x}))
        assert groups(other) == groups(model)
    alone = rlx.load(tmp_path / "model.rlxart", device="cpu", threads=1)
    same(expected, alone({"x": x}))
    assert groups(alone) == []
    assert alone.joins is None


def test_tiny_phases_stay_one_by_one() -> None:
    """They take less time than workers take to join."""
    g = Graph("tiny")
    x = g.input("x", (1, 16))
    for n in range(6):
        g.output(rlx.tanh(x @ g.param(f"w{n}", (16, 16), data=normal(16, 16))), name=f"y{n}")
    model = compiled(g)
    model({"x": normal(1, 16)})
    assert executable(model).shared.spans_of(executable(model).plan)  # type: ignore[arg-type]
    assert groups(model) == []
