"""Runs on the device: memory of its own, states, control flow, errors, DLPack, and one compile for all extents."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph
from rlx.backends.array import Array
from rlx.backends.codegen.packing import Packing
from rlx.backends.cuda.device.driver import Driver
from rlx.backends.cuda.device.memory import MEMORY, SPACE
from rlx.errors import ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim
from rlx.records import replace


def mlp() -> Graph:
    g = Graph("mlp")
    x = g.input("x", (Dim("batch", 1, 64), 6))
    w = g.param("w", data=np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4))
    g.output(rlx.softmax(rlx.relu(x @ w)), name="probs")
    return g


def rows(count: int) -> Any:
    return np.linspace(-2, 2, count * 6, dtype=np.float32).reshape(count, 6)


def test_results_lie_on_the_device_and_own_their_memory() -> None:
    """A result stays as it is when the model runs again, and is an input that nobody copies."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference")
    (first,) = model.run([rows(3)])
    (second,) = model.run([rlx.to_device(rows(5), "cuda")])
    assert (first.device, second.shape) == ("cuda", (5, 4))
    for got, count in ((first, 3), (second, 5)):
        np.testing.assert_allclose(got.numpy(), expected.run([rows(count)])[0], rtol=1e-5)


def test_one_compile_serves_all_extents(device: Any) -> None:
    """Other extents change words: nothing is compiled again."""
    model = rlx.compile(mlp(), device="cuda")
    executable: Any = model.compilation.executable
    module = executable.code.modules
    for count in (1, 64, 7):
        assert model.run([rows(count)])[0].shape == (count, 4)
    assert executable.code.modules is module


def test_repeated_runs_are_one_graph(device: Any) -> None:
    """The third run with the same words repeats the launches of the second; other inputs in other places are right."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference")
    executable: Any = model.compilation.executable
    for count in (3, 3, 3, 5, 5, 3):
        data = rlx.to_device(rows(count) * count, "cuda")
        for _ in range(3):
            made = model.run([data])[0].numpy()
        np.testing.assert_allclose(made, expected.run([data.numpy()])[0], rtol=1e-5)
    assert 1 <= len(executable.replay.graphs) <= 4
    here = [rlx.to_device(rows(3) + n, "cuda") for n in range(3)]
    for n in (0, 1, 2, 1, 1, 1):
        np.testing.assert_allclose(model.run([here[n]])[0].numpy(), expected.run([rows(3) + n])[0], rtol=1e-5)


def test_runs_with_arrays_of_the_host_come_again_as_one_graph() -> None:
    """The graph brings the inputs and, while somebody reads results on the host, these: see cuda/repeat.py."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference")
    executable: Any = model.compilation.executable
    held: list[tuple[Any, Any]] = []
    for turn, count in enumerate((3, 3, 3, 3, 3, 64, 64, 64, 3, 3, 3)):
        data = rows(count) * (turn + 1)
        (made,), (right,) = model.run([data]), expected.run([data])
        held.append((made, right))  # which stays what it is
        if turn % 3:
            np.testing.assert_allclose(made.numpy(), right, rtol=1e-5)
    for made, right in held:
        np.testing.assert_allclose(made.numpy(), right, rtol=1e-5)
    assert set(executable.repeat.graphs) == {False, True}


def test_results_outlive_the_next_run_the_memory_and_the_model() -> None:
    """A result lies in the arena until then, and has memory of its own afterwards, also for other libraries."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference")
    executable: Any = model.compilation.executable
    model.run([rows(3)])
    (lent,) = model.run([rows(3)])
    assert lent.held.block is executable.block
    (part,) = [lent[1:]]
    (shared,) = model.run([rows(3)])
    shared.__dlpack__()
    assert shared.held.block is not executable.block
    (after,) = model.run([rows(3) + 1])
    model.trim()
    (last,) = model.run([rows(3) + 2])
    model.close()
    for made, data in ((lent, rows(3)), (shared, rows(3)), (after, rows(3) + 1), (last, rows(3) + 2)):
        np.testing.assert_allclose(made.numpy(), expected.run([data])[0], rtol=1e-5)
    np.testing.assert_allclose(part.numpy(), expected.run([rows(3)])[0][1:], rtol=1e-5)


def test_inputs_of_the_device_are_never_written() -> None:
    """A run with an array of the host after one with an array of the device has memory of its own for it."""
    model = rlx.compile(mlp(), device="cuda")
    here = rlx.to_device(rows(3), "cuda")
    for data in (here, rows(3) + 1, here, rows(3) + 2, rows(3) + 3, here):
        model.run([data])
    assert np.array_equal(here.numpy(), rows(3))


def test_what_a_repeated_run_may_not_take_for_granted() -> None:
    """Params that are set, other types and orders of inputs, and sizes that no input has: all count in the next run."""
    g = Graph("sizes")
    x, w = g.input("x", (4,)), g.param("w", (4,), data=np.ones(4, np.float32))
    g.output(x * w, "y")
    model = rlx.compile(g, device="cuda")
    ones = np.ones(4, np.float32)
    for _ in range(3):
        assert model.run([ones])[0].numpy().tolist() == [1] * 4
    model.set_params({"w": ones * 5})
    for _ in range(3):
        assert model.run([ones])[0].numpy().tolist() == [5] * 4
    assert model.run([np.arange(8, dtype=np.float32)[::2]])[0].numpy().tolist() == [0, 10, 20, 30]
    with pytest.raises(rlx.errors.RlxError):
        model.run([np.ones(5, np.float32)])
    assert model.run([ones], outputs=["y"])[0].numpy().tolist() == [5] * 4
    out = np.zeros(4, np.float32)
    model.run([ones], out=[out])
    assert out.tolist() == [5] * 4


def test_a_refused_run_of_another_extent_leaves_no_trace() -> None:
    """Runs that come again are those of the last run that was made, not of one that was refused since."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference")
    for made, refused in ((3, 5), (7, 2), (3, 3)):
        for _ in range(3):
            model.run([rows(made)])
        with pytest.raises(ShapeError):
            model.run([rows(refused)], out=[np.empty((9, 4), np.float32)])
        for count in (refused, made, refused, refused):
            got = model.run([rows(count)])[0].numpy()
            np.testing.assert_allclose(got, expected.run([rows(count)])[0], rtol=1e-5)


def test_repeated_runs_of_other_extents_in_the_same_memory() -> None:
    """A batch is in no word of a product's kernel, but the number of its blocks depends on it."""
    g, b = Graph("batch"), Dim("b", 1, 4)
    g.output(g.input("x", (b, 8, 16)) @ g.input("y", (b, 16, 8)), "z")
    model = rlx.compile(g, device="cuda")
    x, y = np.ones((4, 8, 16), np.float32), np.ones((4, 16, 8), np.float32)
    whole = [rlx.to_device(a, "cuda") for a in (x, y)]
    for number, count in enumerate((4, 2, 2, 2, 4, 4, 3)):
        x += 1
        with whole[0].space.session():
            model._executable.memory.write(whole[0].held.address, x)
        held = [replace(a.held, shape=(count, *a.shape[1:])) for a in whole]
        given = [Array(a.space, h, h.shape, a.dtype) for a, h in zip(whole, held, strict=True)]
        assert np.array_equal(model.run(given)[0].numpy(), x[:count] @ y[:count]), number


def test_parts_and_copies() -> None:
    """Parts of arrays are those of NumPy, whether they are one piece of memory or not."""
    data = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    here = rlx.to_device(data, "cuda")
    for part in (np.s_[1], np.s_[1:], np.s_[:, 2], np.s_[..., 1:3], np.s_[0, ::2], np.s_[2, 3, 4], np.s_[1:1]):
        assert np.array_equal(here[part].numpy(), data[part])
    assert np.array_equal(here.copy().numpy(), data)


def test_arrays_at_odd_addresses_are_copied() -> None:
    """DLPack brings them; kernels read several elements at a time, which they could not there."""
    g = Graph("odd")
    g.output(g.input("x", (8, 4)) @ g.input("w", (4, 4)), "y")
    model = rlx.compile(g, device="cuda")
    data, w = np.arange(33, dtype=np.float32), np.eye(4, dtype=np.float32)
    whole = rlx.to_device(data, "cuda")
    held = replace(whole.held, address=whole.held.address + 4, shape=(8, 4))
    part = Array(whole.space, held, (8, 4), whole.dtype)
    assert np.array_equal(model.run([part, w])[0].numpy(), data[1:].reshape(8, 4))
    places = model._executable.places
    assert all(places[root].address % 16 == 0 for root in model._executable.program.inputs)


def test_states_change_in_place() -> None:
    """A state is read and written on the device; a clone has its own."""
    g = Graph("counter")
    x, s = g.input("x", (3,)), g.state("s", (3,))
    total = s + x
    g.update(s, total)
    g.output(total, name="y")
    model = rlx.compile(g, device="cuda")
    for n in (1, 2, 3):
        assert model.run([np.ones(3, np.float32)])[0].numpy().tolist() == [n] * 3
    other = model.clone()
    assert other.run([np.ones(3, np.float32)])[0].numpy().tolist() == [4] * 3
    assert model.run([np.ones(3, np.float32)])[0].numpy().tolist() == [4] * 3


def test_control_flow() -> None:
    counted = rlx.jit(lambda x: rlx.fori_loop(0, 5, lambda i, x: x * 2 + i, x), device="cuda")
    assert np.asarray(counted(np.float32(1))).item() == 32 + 26


def test_a_failed_check_names_its_node_and_the_device_lives() -> None:
    """An index out of range is the same error as elsewhere, and the next run is right."""
    g = Graph("look up")
    g.output(rlx.gather(g.input("table", (4,)), g.input("at", (2,), "i64")), name="y")
    model = rlx.compile(g, device="cuda")
    data = np.arange(4, dtype=np.float32)
    for _ in range(3):
        with pytest.raises(ExecutionError, match="index: 9"):
            model.run([data, np.array([1, 9])])
        for _ in range(3):
            assert model.run([data, np.array([1, 3])])[0].numpy().tolist() == [1, 3]


def test_profile_has_each_kernel() -> None:
    model = rlx.compile(mlp(), device="cuda")
    assert all(row[2] >= 0 for row in model.profile([rows(4)], repeat=2))


def test_dlpack_both_ways(device: Any) -> None:
    """Arrays of torch on the device are read where they are, and ours by torch."""
    if not isinstance(device, Driver):
        pytest.skip("needs an NVIDIA device")
    torch = pytest.importorskip("torch")
    given = torch.arange(18, dtype=torch.float32, device="cuda").reshape(3, 6) / 9
    model = rlx.compile(mlp(), device="cuda")
    (made,) = model.run([given])
    back = torch.from_dlpack(made)
    assert back.device.type == "cuda"
    expected = rlx.compile(mlp(), device="reference").run([given.cpu().numpy()])[0]
    np.testing.assert_allclose(back.cpu().numpy(), expected, rtol=1e-5)
    half = rlx.to_device(np.ones(3, "float16"), "cuda")
    assert torch.from_dlpack(half).dtype == torch.float16
    del made, half
    assert back.sum().item() == pytest.approx(3)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [(7, 5, 3), (33, 72, 40), (130, 256, 192), (1, 40, 100)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_precision_rounds_operands(precision: str, shape: tuple[int, int, int], turned: bool) -> None:
    """Operands are rounded to nearest even, sums kept in f32, whichever of the axes lies along memory."""
    m, k, n = shape
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k) if turned else (k, n), np.float32)
    g = Graph("product")
    x, w = g.input("x", a.shape), g.param("w", data=b)
    g.output(rlx.relu(x @ (rlx.transpose(w, (1, 0)) if turned else w)), "y")
    made = rlx.compile(g, device="cuda", precision=precision).run([a])[0].numpy()
    narrow = DTYPES[precision].numpy
    left, right = (z.astype(narrow).astype(np.float64) for z in (a, b.T if turned else b))
    np.testing.assert_allclose(made, np.maximum(left @ right, 0), rtol=1e-4, atol=1e-4)


def test_clones_in_threads() -> None:
    """Clones share code and weights; runs of several threads, some captured, some not, don't mix."""
    model, expected = rlx.compile(mlp(), device="cuda"), rlx.compile(mlp(), device="reference", busy="wait")

    clones = [model.clone() for _ in range(4)]

    def work(number: int) -> None:
        own = clones[number]
        for turn in range(6):
            data = rows(2 + turn // 3) + number
            np.testing.assert_allclose(own.run([data])[0].numpy(), expected.run([data])[0], rtol=1e-4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def layers(count: int, size: int) -> Graph:
    """Products whose weights take several steps to bring."""
    g = Graph("layers")
    x, rng = g.input("x", (Dim("rows", 1, 8), size)), np.random.default_rng(0)
    for number in range(count):
        x = rlx.relu(x @ g.param(f"w{number}", data=rng.standard_normal((size, size), np.float32)))
    g.output(x + g.param("b", data=np.ones(size, np.float32)), "y")
    return g


def used_bytes(device: Any, most: bool = False) -> int:
    """Of the device, once what nobody has is given back."""
    gc.collect()
    with SPACE.session():
        MEMORY.reclaim()
        return int(device.used_bytes(most))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_memory_of_the_device_is_what_the_estimate_says(
    device: Any, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights come, and while it runs: of weights that are kept in 16 bits the others are gone."""
    monkeypatch.setattr(Packing, "step", 1 << 19)
    graph = layers(6, 256)
    said = rlx.estimate(graph, device="cuda", precision=precision, overhead=0)
    before = used_bytes(device)
    used_bytes(device, most=True)
    model = rlx.compile(graph, device="cuda", precision=precision)
    x = np.ones((8, 256), np.float32)
    for _ in range(4):
        made = model.run([x])
    parts = said.weight_bytes + said.activation_bytes + said.input_bytes + said.output_bytes
    peak, used = used_bytes(device, most=True) - before, used_bytes(device) - before
    assert parts - said.output_bytes <= used <= parts + 4096  # results lie in the arena until the next run
    assert abs(peak - max(parts, said.loading_peak_bytes - said.code_bytes)) <= x.nbytes + 8192
    assert (said.loading_peak_bytes > said.running_peak_bytes) == (precision == "bf16")
    del made


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_weights_that_are_set_again(precision: Any) -> None:
    """One of several, of which nothing is left but what was made of it; a clone keeps what it had."""
    graph = layers(3, 48)
    model, right = rlx.compile(graph, device="cuda", precision=precision), rlx.compile(graph, device="cpu")
    x, w = np.ones((3, 48), np.float32), np.eye(48, dtype=np.float32)
    for turn in range(3):
        other = model.clone()
        before = other.run([x])[0].numpy()
        for changed in (model, right):
            changed.set_param(f"w{turn}", w * (turn + 1))
        for _ in range(3):
            made = model.run([x])[0].numpy()
        np.testing.assert_allclose(made, right.run([x])[0], rtol=1e-5 if precision == "f32" else 3e-2, atol=1e-3)
        assert np.array_equal(other.run([x])[0].numpy(), before)


def test_weights_that_do_not_come_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends at the second of three: what was made of the others stays, though they themselves are gone."""
    model, right = (rlx.compile(layers(3, 48), device=d, precision="bf16") for d in ("cuda", "cpu"))
    x, w = np.ones((3, 48), np.float32), np.eye(48, dtype=np.float32)
    model.run([x])
    executable: Any = model._executable
    put = executable.put

    def refuse(root: Any, array: Any) -> None:
        if root.name == "w1":
            raise rlx.errors.MemoryDeficit("no memory", budget_bytes=0, peak_bytes=1)
        put(root, array)

    monkeypatch.setattr(executable, "put", refuse)
    with pytest.raises(rlx.errors.MemoryDeficit):
        model.set_params({f"w{n}": w for n in range(3)})
    right.set_param("w0", w)
    np.testing.assert_allclose(model.run([x])[0].numpy(), right.run([x])[0], rtol=3e-2, atol=1e-2)


def test_a_large_weight_comes_whole() -> None:
    """Weights beyond the size of the pinned parts are uploaded part by part."""
    count = (40 << 20) // 4 + 3
    data = np.arange(count, dtype=np.float32)
    g = Graph("large")
    g.output(g.input("x", (1,)) + g.param("w", data=data), "y")
    assert np.array_equal(rlx.compile(g, device="cuda").run([np.ones(1, np.float32)])[0].numpy(), data + 1)
