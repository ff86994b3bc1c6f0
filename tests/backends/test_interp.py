"""The interpreter of kernels: its memory and queues, every op, control flow, states and data-decided sizes."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_suite import DECIDING, RUN, Some, check_deciding_op, check_op, check_random_graph, check_symbolic_op

import rlx
from rlx.backends import BY_NAME
from rlx.backends.interp.kernels import CHUNK, Grid, grid_of
from rlx.backends.interp.memory import DEPTH, DEVICE_MEMORY, HOST_MEMORY, Memory, Queues
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ops import index, layout
from rlx.ops.misc import BitCast
from rlx.testing.oracle import compare

F32 = DTYPES["f32"]


def numbers(array: Any) -> Any:
    """The elements of what a run gives, as Python's numbers."""
    assert isinstance(array, rlx.Array)
    return array.numpy().tolist()


# ---- everything that the reference runs


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RUN)
def test_op(name: str, some: Some) -> None:
    check_op("interp", name, some)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RUN)
def test_op_of_symbolic_sizes(name: str, some: Some) -> None:
    check_symbolic_op("interp", name, some)


@pytest.mark.parametrize("name", DECIDING)
def test_op_whose_data_decide_a_size(name: str, some: Some) -> None:
    check_deciding_op("interp", name, some)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(600))
def test_random_graphs(seed: int) -> None:
    check_random_graph("interp", seed)


# ---- a memory of its own


def test_memory_is_reached_by_copies_only(tmp_path: Path) -> None:
    """Neither inputs, params nor results of a run share bytes with what the device holds."""
    g = Graph("apart")
    x, w = g.input("x", (4,)), g.param("w", (4,))
    g.output(x + w, "y")
    g.output(x, "same")
    model = rlx.compile(g, device="interp")
    given, weights = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    model.set_params({"w": weights})
    weights[:] = 7
    made, same = model.run([given])
    given[:] = 9
    assert (made.device, made.numpy().tolist(), same.numpy().tolist()) == ("interp", [1, 2, 3, 4], [0, 1, 2, 3])
    assert numbers(model.run([given])[0]) == [10, 10, 10, 10]
    assert (made.numpy().tolist(), same.numpy().tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])
    model.save(tmp_path / "m.rlxart", portable=True)  # with the params that it has on the device
    assert rlx.load(tmp_path / "m.rlxart", device="reference").run([given])[0].tolist() == [10, 10, 10, 10]


def test_inputs_come_by_copies_of_another_queue() -> None:
    """Inputs lie on the host; the kernels that bring them show in the program, with their queue."""
    g = Graph("copies")
    g.output(g.input("x", (Dim("n", 1, 8), 3)) * 2.0, "y")
    model = rlx.compile(g, device="interp")
    text = model.explain("fuse")
    assert "input    x: f32[n, 3] in host" in text
    assert "0 copy bring (x f32[n, 3] in host) -> x.copy f32[n, 3]  queue 1" in text
    assert model.plan is not None
    assert {buffer.space for buffer in model.plan.offsets} == {""}


def test_wild_addresses_are_caught() -> None:
    """Bytes outside of a block, or across two, are no memory."""
    memory = Memory(1000)
    blocks = [memory.allocate(10), memory.allocate(10)]
    first, second = (block.address for block in blocks)
    memory.write(first, np.arange(10, dtype=np.uint8))
    assert memory.array(first + 2, DTYPES["i16"], (2, 2)).tolist() == [[770, 1284], [1798, 2312]]
    assert not memory.bytes(second, 10).any()
    for address, count in ((first + 8, 3), (first + 10, 1), (second - 1, 1), (0, 1)):
        with pytest.raises(AssertionError):
            memory.bytes(address, count)
    del blocks[0]
    third = memory.allocate(3)
    assert memory.blocks.keys() == {second, third.address}
    with pytest.raises(AssertionError):
        memory.bytes(first, 1)


def test_queues_keep_the_order_that_memory_asks_for() -> None:
    """A queue runs in order; another one goes first where it may, and waits where bytes are shared."""
    queues, done = Queues(), list[str]()

    def add(queue: int, name: str, *touches: tuple[int, int]) -> None:
        queues.submit(queue, lambda: done.append(name), touches)

    add(0, "a", (0, 8))
    add(0, "b", (8, 16))
    add(1, "free", (16, 24))
    add(1, "after a", (4, 6))
    add(0, "after free", (20, 21))
    assert done == []
    queues.wait()
    assert sorted(done) == sorted(["a", "b", "free", "after a", "after free"])
    assert done.index("a") < done.index("after a")
    assert done.index("free") < min(done.index("a"), done.index("after free"))
    queues.wait()
    assert len(done) == 5


def test_a_full_queue_makes_the_host_wait() -> None:
    """So what is submitted takes time in proportion, however long a program is."""
    queues, done = Queues(), list[int]()
    for n in range(3 * DEPTH + 5):
        queues.submit(n % 2, lambda n=n: done.append(n), [(n, n + 1)])  # type: ignore[misc]
        assert n - len(done) < 2 * DEPTH
    queues.wait()
    assert sorted(done) == list(range(3 * DEPTH + 5))


# ---- launch geometry


@pytest.mark.parametrize("shape", [(), (7,), (3, 0, 2), (5, 1, 9), (2, 3, 4, 5)])
@pytest.mark.parametrize("limit", [1, 5, 24, 10**6])
def test_boxes_cover_a_grid_once(shape: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every limit, with a part that depends on some axes only and lies in a reduction."""
    monkeypatch.setattr("rlx.backends.interp.kernels.CHUNK", limit)
    grid = Grid(shape, ((tuple(range(len(shape))), ()), (tuple(range(len(shape)))[1:], (3,))))
    covered_times = np.zeros(shape, int)
    for chunk in range(grid({}).chunks):
        start, box = grid.chunk(chunk, {})
        assert int(np.prod(box)) <= limit
        covered_times[tuple(slice(at, at + n) for at, n in zip(start, box, strict=True))] += 1
    assert (covered_times == 1).all()


def test_a_row_is_computed_for_the_axes_that_it_depends_on() -> None:
    """The sum of a softmax counts rows, not elements: else each chunk would compute it anew."""
    g = Graph("softmax")
    g.output(rlx.softmax(g.input("x", (64, 4096))), "y")
    program = rlx.compile(g, device="interp").compilation.program
    assert program is not None
    grid = grid_of(program.run[-1].stores[0])
    assert set(grid.parts) == {((0, 1), ()), ((0,), (4096,))}
    assert grid({}).chunks == -(-64 * 4096 // CHUNK)


# ---- what a model is besides its kernels


def test_states_are_updated_on_the_device() -> None:
    """Declared ones by the graph, others by a feed; both are read, written and reset by copies."""
    g = Graph("state")
    x, total = g.input("x", (3,)), g.state("total", (3,))
    made = total + x
    g.update(total, made)
    g.output(made * 2.0, "y")
    model = rlx.compile(g, device="interp")
    for turn in (1, 2, 3):
        assert numbers(model.run([np.ones(3, np.float32)])[0]) == [2 * turn] * 3
    assert numbers(model.states["total"].read()) == [3, 3, 3]
    model.states["total"].write(np.full(3, 10, np.float32))
    assert numbers(model.run([np.ones(3, np.float32)])[0]) == [22, 22, 22]
    model.states["total"].reset()
    assert numbers(model.run([np.ones(3, np.float32)])[0]) == [2, 2, 2]


def test_an_error_names_the_node_and_leaves_the_model_usable() -> None:
    """An index that data give is checked by the kernel that uses it."""
    g = Graph("gather")
    x, i = g.input("x", (3, 5)), g.input("i", (2,), "i64")
    g.output(g.add(index.Gather(0), x, i, name="culprit")[0], "y")
    model = rlx.compile(g, device="interp")
    for _ in range(2):
        with pytest.raises(ExecutionError, match="node culprit: index: 3"):
            model.run([np.ones((3, 5), np.float32), np.array([0, 3])])
        assert model.run([np.eye(3, 5, dtype=np.float32), np.array([-1, 2])])[0].numpy().argmax(1).tolist() == [2, 2]


def test_kernels_are_printed() -> None:
    """`explain("kernels")` shows what each kernel computes."""
    g = Graph("shown")
    g.output(rlx.relu(g.input("x", (4, 8)) @ g.param("w", (8, 2), data=np.ones((8, 2), np.float32))), "y")
    text = rlx.compile(g, device="interp").explain("kernels")
    assert "contract                     matmul+relu" in text
    assert "a = x.copy[i0, k]" in text


def test_it_is_never_chosen() -> None:
    """By a choice among devices, but by its name."""
    g = Graph("g")
    g.output(g.input("x", (2,)) + 1.0, "y")
    assert "interp" in BY_NAME
    row = next(c for c in rlx.choose(g, calibrate=False).candidates if c.device == "interp")
    assert row.obstacle.startswith("it is never chosen")
    compare(g, {"x": np.ones(2, np.float32)}, device="interp")


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bits_of_any_rank_and_any_layout(shape: tuple[int, ...]) -> None:
    """The same bits as another type, of a scalar too, and of what is broadcast on the way."""
    g = Graph("bits")
    x = g.input("x", shape)
    g.output(g.add(BitCast("i32"), x)[0], "y")
    g.output(g.add(BitCast("u32"), g.add(layout.Expand((2, 3)), x)[0])[0], "wide")
    compare(g, {"x": np.full(shape, -1.5, np.float32)}, device="interp")


# ---- clones, profiles, and the memory that is given back


def counter(size: int = 3) -> rlx.CompiledGraph:
    """Adds x * w to a state; w goes through a kernel of `prepare`."""
    g = Graph("counter")
    x, w = g.input("x", (size,)), g.param("w", (size,), data=np.ones(size, np.float32))
    total = g.state("total", (size,))
    made = total + x * rlx.exp(w)
    g.update(total, made)
    g.output(made, "y")
    return rlx.compile(g, device="interp")


@pytest.mark.parametrize("fresh", [False, True])
def test_clones_share_weights_until_one_sets_them(fresh: bool) -> None:
    """Each has its own states; what one sets, and prepares of it, another does not see."""
    one, x = counter(), np.ones(3, np.float32)
    e = float(np.exp(np.float32(1)))
    one.run([x])
    two = one.clone(fresh=fresh)
    held = [model._executable.places for model in (one, two)]  # type: ignore[attr-defined]
    shared = {root.kind for root in held[0] if held[1].get(root) is held[0][root]}
    assert shared == {"prepared"}  # w itself is not read again
    two.set_param("w", np.zeros(3, np.float32))
    start = 0 if fresh else e
    np.testing.assert_allclose(two.run([x])[0], [start + 1] * 3, rtol=1e-6)
    np.testing.assert_allclose(one.run([x])[0], [2 * e] * 3, rtol=1e-6)
    np.testing.assert_allclose(two.run([x])[0], [start + 2] * 3, rtol=1e-6)


def test_clones_have_kept_inputs_and_feeds() -> None:
    """As they are now; afterwards each goes its own way."""
    g = Graph("fed")
    x, h = g.input("x", (2,)), g.input("h", (2,))
    g.output(x + h, "y")
    one, x_now = rlx.compile(g, device="interp"), np.ones(2, np.float32)
    one.states.bind("h", np.zeros(2, np.float32))
    one.states["h"].feed("y")
    one.run({"x": x_now})
    two = one.clone()
    for turn in (2, 3):
        assert numbers(two.run({"x": x_now})[0]) == [turn, turn]
    assert numbers(one.run({"x": x_now})[0]) == [2, 2]
    two.states["h"].reset()
    assert numbers(two.states["h"].read()) == [0, 0]
    assert numbers(one.states["h"].read()) == [2, 2]


def test_clones_run_in_threads_of_their_own() -> None:
    """Over the same code and weights, in the same memory."""
    model = counter(100)
    clones = [model.clone(fresh=True) for _ in range(4)]
    last: list[Any] = [None] * 4

    def work(n: int) -> None:
        for _ in range(30):
            (last[n],) = clones[n].run([np.full(100, n, np.float32)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for n in range(4):
        np.testing.assert_allclose(last[n], np.full(100, 30 * n * np.exp(np.float32(1))), rtol=1e-5)


def test_a_profile_has_a_row_for_each_phase_and_leaves_states() -> None:
    """The seconds are those of the kernels; states and kept inputs are as they were."""
    model, x = counter(), np.ones(3, np.float32)
    model.run([x])
    before = numbers(model.states["total"].read())
    rows = model.profile([x], repeat=3)
    assert [name for _, name, _ in rows] == [f"{k.name} [{k.label}]" for k in model._executable.profiled]
    assert all(seconds > 0 for *_, seconds in rows)
    assert numbers(model.states["total"].read()) == before
    counted = rlx.jit(lambda x: rlx.fori_loop(0, 5, lambda i, x: x * 2 + i, x), device="interp")
    loop = counted.compile(np.float32(1))
    body = [seconds for kind, _, seconds in loop.profile([np.float32(1)], repeat=1) if kind == "map"]
    assert body
    assert all(seconds > 0 for seconds in body)


def test_memory_is_given_back() -> None:
    """Of inputs, of results that nobody has any more, and of a model that is gone, to the last block."""
    gc.collect()
    DEVICE_MEMORY.allocate(0), HOST_MEMORY.allocate(0)
    count = len(DEVICE_MEMORY.blocks), len(HOST_MEMORY.blocks)
    model, x = counter(), np.ones(3, np.float32)
    made: Any = None
    for _ in range(5):
        made = model.run([x])
        made = model.run(made)
    DEVICE_MEMORY.allocate(0)
    after = len(DEVICE_MEMORY.blocks)
    for _ in range(20):
        made = model.run([x])
        made = model.run(made)
    DEVICE_MEMORY.allocate(0)
    assert len(DEVICE_MEMORY.blocks) == after
    model.close()
    del made, model
    gc.collect()
    DEVICE_MEMORY.allocate(0), HOST_MEMORY.allocate(0)
    assert (len(DEVICE_MEMORY.blocks), len(HOST_MEMORY.blocks)) == count


def test_views_and_the_arena_lie_where_the_run_left_them() -> None:
    """A view can be the next input: it is read before it is overwritten, be it of the arena or of a state."""
    model, x = counter(), np.ones(3, np.float32)
    e = float(np.exp(np.float32(1)))
    (y,) = model.run_slots(x)
    assert isinstance(model.arena, rlx.Array)
    assert (model.arena.dtype, model.arena.shape) == (np.uint8, (model.plan.arena,))  # type: ignore[union-attr]
    np.testing.assert_allclose(model.run_slots(y)[0], [e + e * e] * 3, rtol=1e-6)
