"""One compile serves every length: bit-equal to a compile at that length and for any number of threads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ops.encoded import Dequantize

Array = np.ndarray[Any, Any]
Built = tuple[rlx.Graph, Callable[[int], list[Array]]]  # a graph over the dim "n", and its inputs at a length


def random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def products(hi: int | None) -> Built:
    """A product with n rows, one with n as inner size, and one with n columns."""
    g = rlx.Graph("products")
    n = rlx.Dim("n", 1, hi)
    x, w = g.input("x", (n, 40)), g.param("w", (40, 72), data=random(40, 72))
    y = rlx.relu(x @ w)
    g.output(y, name="rows")
    g.output(x.transpose(1, 0) @ y, name="inner")
    g.output(rlx.softmax(x @ x.transpose(1, 0)), name="columns")
    return g, lambda n: [random(n, 40)]


def convolutions(hi: int | None) -> Built:
    """Strided, depthwise and pointwise over an image of n columns."""
    g = rlx.Graph("convolutions")
    n = rlx.Dim("n", 1, hi)
    x = g.input("x", (1, 3, 20, n * 2 + 6))
    y = rlx.conv(x, g.param("a", (16, 3, 3, 3), data=random(16, 3, 3, 3)), strides=(2, 2), pads=(1, 1, 1, 1))
    y = rlx.conv(rlx.relu(y), g.param("b", (16, 1, 3, 3), data=random(16, 1, 3, 3)), pads=(1, 1, 1, 1), groups=16)
    y = rlx.conv(y, g.param("c", (24, 16, 1, 1), data=random(24, 16, 1, 1)), g.param("d", (24,), data=random(24)))
    g.output(rlx.sigmoid(y), name="y")
    g.output(y.mean((2, 3)), name="mean")
    return g, lambda n: [random(1, 3, 20, 2 * n + 6)]


def byte_weights(hi: int | None) -> Built:
    """n rows by weights of bytes with scales by column, which few rows read as they are."""
    g = rlx.Graph("bytes")
    n = rlx.Dim("n", 1, hi)
    x, w = g.input("x", (n, 96)), g.param("w", (96, 72), dtype="i8", data=(40 * random(96, 72)).astype(np.int8))
    (weights,) = g.add(Dequantize(1), w, g.param("scale", (72,), data=np.abs(random(72)) / 40))
    g.output(x @ weights, name="y")
    return g, lambda n: [random(n, 96)]


def signals(hi: int | None) -> Built:
    """Windows along a line of n: few pixels are summed plainly, more by tiles."""
    g = rlx.Graph("signals")
    n = rlx.Dim("n", 1, hi)
    x = g.input("x", (1, 64, n))
    for window in (3, 5, 7):
        w = g.param(f"w{window}", (72, 64, window), data=random(72, 64, window))
        g.output(rlx.relu(rlx.conv(x, w, pads=(window // 2,) * 2)), name=f"y{window}")
    return g, lambda n: [random(1, 64, n)]


def attention(hi: int | None) -> Built:
    g = rlx.Graph("attention")
    n = rlx.Dim("n", 1, hi)
    q, k, v = (g.input(name, (2, 3, n, 32)) for name in "qkv")
    g.output(rlx.attention(q, k, v), name="y")
    g.output(rlx.attention(q, k, v, causal=True), name="causal")
    return g, lambda n: [random(2, 3, n, 32) for _ in range(3)]


def rows(hi: int | None) -> Built:
    """Normalisation, softmax, and layout changes of n rows; the size of one result is n * n."""
    g = rlx.Graph("rows")
    n = rlx.Dim("n", 1, hi)
    x = g.input("x", (n, 17))
    y = rlx.softmax(rlx.concat(x, rlx.tanh(x), axis=1), axis=0)
    g.output(y.transpose(1, 0), name="y")
    g.output((x.sum(1).reshape(n, 1) * x.max(1).reshape(1, n)).reshape(n * n), name="outer")
    return g, lambda n: [random(n, 17)]


def check_lengths(models: dict[int, rlx.CompiledGraph], fresh: Callable[[int], rlx.CompiledGraph], data: Any) -> None:
    for length in (5, 1, 33, 16, 5, 47):
        inputs = data(length)
        want = [a.tobytes() for a in fresh(length).run(inputs)]
        for threads, model in models.items():
            for call in (model.run, model.run_views):
                got = [np.ascontiguousarray(a).tobytes() for a in call(inputs)]
                assert got == want, f"length {length}, {threads} threads"


@pytest.mark.parametrize("hi", [48, None], ids=["bounded", "unbounded"])
@pytest.mark.parametrize(
    "build", [products, byte_weights, convolutions, signals, attention, rows], ids=lambda f: f.__name__
)
def test_every_length_gives_the_bits_of_its_own_compile(build: Callable[[int | None], Built], hi: int | None) -> None:
    graph, data = build(hi)
    models = {threads: rlx.compile(graph, device="cpu", threads=threads) for threads in (1, 2, 4)}
    check_lengths(models, lambda n: rlx.compile(graph, device="cpu", threads=1, dims={"n": n}), data)
    reference = rlx.compile(graph, device="reference")
    for got, want in zip(models[2].run(data(9)), reference.run(data(9)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.models
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, shapes",
    [
        ("minilm-int8", [(1, 7), (3, 20), (2, 1), (1, 7)]),
        ("ppocrv4-rec", [(1, 3, 48, 40), (2, 3, 48, 104), (1, 3, 48, 40)]),
        ("wakeword-mel", [(1, 1500), (2, 4100), (1, 1500)]),
    ],
)
def test_real_models_at_every_length(
    name: str, shapes: list[tuple[int, ...]], model_path: Callable[[str], Path]
) -> None:
    path = model_path(name)
    models = {threads: rlx.load(path, device="cpu", threads=threads) for threads in (1, 2, 4)}
    specs = models[1].inputs

    @functools.cache
    def fixed(shape: tuple[int, ...]) -> rlx.CompiledGraph:
        return rlx.load(path, device="cpu", threads=1, dims={spec.name: shape for spec in specs})

    for shape in shapes:
        rng = np.random.default_rng(len(shape) + sum(shape))
        inputs: dict[str, Array] = {}
        for spec in specs:
            values = rng.standard_normal(shape) if spec.dtype.is_float else rng.integers(0, 2, shape)
            inputs[spec.name] = values.astype(spec.dtype.numpy)
        want = [a.tobytes() for a in fixed(shape).run(inputs)]
        for threads, model in models.items():
            got = [a.tobytes() for a in model.run(inputs)]
            assert got == want, f"{shape}, {threads} threads"


def test_the_arena_grows_and_old_views_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Growing is an event in the log; views of before keep their memory; shrinking needs no new plan."""
    graph, data = rows(None)
    model = rlx.compile(graph, device="cpu")
    assert model.plan is None
    assert model.needs is not None
    assert model.needs.arena is None
    assert "no plan yet" in model.explain("plan")
    small = model.run_views(data(3))
    kept = [a.copy() for a in small]
    first = model.plan
    with caplog.at_level(logging.INFO, logger="rlx"):
        large = model.run_views(data(300))
    assert "the arena grows" in caplog.text
    assert model.plan is not first
    assert model.plan is not None
    assert len(model.arena) >= model.plan.arena
    for view, copy in zip(small, kept, strict=True):
        np.testing.assert_array_equal(view, copy)
        assert not any(np.may_share_memory(view, other) for other in large)
    grown = model.plan
    for length in (2, 299, 300, 40):
        model.run_slots(*data(length))
        assert model.plan is grown
    assert model.explain("plan").startswith("at n = 300")


def test_a_bounded_graph_has_one_plan() -> None:
    graph, data = rows(48)
    model = rlx.compile(graph, device="cpu")
    plan = model.plan
    assert plan is not None
    assert plan.at == {"n": 48}
    for length in (48, 1, 30):
        model.run(data(length))
        assert model.plan is plan


def test_lengths_that_come_again_are_bound_once() -> None:
    """Alternating between some lengths gives the same cached objects; with very many, results stay right."""
    graph, data = rows(48)
    model = rlx.compile(graph, device="cpu")
    first = {length: model.run_slots(*data(length)) for length in (4, 9, 17)}
    for length, views in first.items():
        assert model.run_slots(*data(length)) is views
    for length in [*range(1, 48), *range(47, 0, -1)]:
        assert model.run_slots(*data(length))[0].shape == (34, length)
    views = model.run_slots(*data(4))
    np.testing.assert_array_equal(views[0], rlx.compile(graph, device="cpu").run(data(4))[0])


def test_extents_that_do_not_fit() -> None:
    g = rlx.Graph("guarded")
    n, m = rlx.Dim("n", 2, 8), rlx.Dim("m", 1, 8)
    x, y, z = g.input("x", (n, 2)), g.input("y", (n,)), g.input("z", (m,))
    g.output(x.sum(1) + y + z, name="sum")  # needs n == m, which only a run can tell
    model = rlx.compile(g, device="cpu")

    def arrays(a: int, b: int, c: int) -> list[Array]:
        return [random(a, 2), random(b), random(c)]

    good = arrays(4, 4, 4)
    want = model.run(good)[0]
    cases: list[tuple[list[Array], type[Exception], str]] = [
        (arrays(9, 9, 8), ExecutionError, r"input 'x': the dim 'n' is 9, outside its bounds 2\.\.8"),
        (arrays(1, 1, 1), ExecutionError, "outside its bounds"),
        (arrays(4, 3, 4), ShapeError, r"input 'y': expected \(n,\) where n = 4, got \(3,\)"),
        (arrays(4, 4, 3), ExecutionError, "n is 4 and m is 3"),
    ]
    for inputs, error, text in cases:
        for call in (model.run, lambda a: model.run_slots(*a), model.run_views):
            with pytest.raises(error, match=text):
                call(inputs)
            np.testing.assert_array_equal(model.run_slots(*good)[0], want)
    for dims, wrong in [({"q": 1}, OptionError), ({"n": 9}, ShapeError), ({"n": "4"}, OptionError)]:
        with pytest.raises(wrong, match="dims"):
            rlx.compile(g, device="cpu", dims=dims)
    fixed = rlx.compile(g, device="cpu", dims={"n": 4, "z": (4,)})
    assert [spec.shape for spec in fixed.inputs] == [(4, 2), (4,), (4,)]
    np.testing.assert_array_equal(fixed.run(good)[0], want)
    with pytest.raises(ShapeError, match="dims"):
        rlx.compile(g, device="cpu", dims={"n": 4, "m": 3})
