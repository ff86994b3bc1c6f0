"""Buckets: equal to one compile at every size, few compiles, a bound on memory, padding only where it is proved."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import helper
from targets import pretend

import rlx
from rlx.backends import backend_named
from rlx.cost.lowered import Lowered
from rlx.cost.model import Prediction
from rlx.errors import ClosedError, DTypeError, ExecutionError, NameNotFound, OptionError, RlxError, ShapeError
from rlx.importers.onnx import load as load_onnx
from rlx.kernels.independence import mixing
from rlx.ops import cast
from rlx.ops.layout import Iota, SizeOf
from rlx.passes import run_passes
from rlx.runtime import buckets as buckets_module
from rlx.runtime.buckets import CompileEvent

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
W1, W2 = (RNG.standard_normal(shape).astype(np.float32) / 8 for shape in ((24, 48), (48, 24)))


def perceptron(n: Any = None) -> Any:
    """Rows apart: what can be padded along n."""
    g = rlx.Graph("perceptron")
    x = g.input("x", (rlx.Dim("n", 1, 40) if n is None else n, 24))
    h = rlx.layer_norm(rlx.gelu(x @ g.param("w1", data=W1)), g.param("gain", data=np.ones(48, np.float32)))
    g.output(rlx.softmax(h @ g.param("w2", data=W2)), "y")
    g.output(rlx.transpose(h, (1, 0)), "t")
    return g


def mean() -> Any:
    """Rows mixed."""
    g = rlx.Graph("mean")
    g.output(g.input("x", (rlx.Dim("n", 1, 40), 24)).sum(axes=0), "y")
    return g


def data(n: int) -> Array:
    return np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)


def test_every_size_gives_the_bits_of_one_compile() -> None:
    whole = rlx.compile(perceptron(), device="cpu")
    seen: list[CompileEvent] = []
    with rlx.Buckets(perceptron(), {"n": "pow2"}, policy="buckets", device="cpu", on_compile=seen.append) as buckets:
        assert buckets.ladder == {"n": [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 40)]}
        for n in (1, 7, 5, 40, 33, 2, 8, 17):
            for got, want in zip(buckets.run({"x": data(n)}), whole.run({"x": data(n)}), strict=True):
                np.testing.assert_array_equal(got, want)
        assert [event.ranges["n"] for event in seen] == [(1, 1), (5, 8), (33, 40), (2, 2), (17, 32)]
        assert seen == buckets.events
        assert {event.kind for event in seen} == {"range"}
        assert [event.reason for event in seen[:2]] == ["first run at n=1", "first run at n=7"]
        np.testing.assert_array_equal(buckets(data(3))["y"], whole(data(3))["y"])
        (got,) = buckets.run([data(3)], outputs=["y"])
        np.testing.assert_array_equal(got, whole(data(3))["y"])
        assert "first run at n=7" in buckets.explain()


def test_weights_are_held_once() -> None:
    buckets = rlx.Buckets(perceptron(), {"n": [4, 16, 40]}, policy="buckets", device="cpu")
    buckets.warmup()
    assert buckets.registry.nbytes == W1.nbytes + W2.nbytes  # the gain is too small to have a name
    places = []
    for model in buckets._models.values():
        shared = model._executable.shared  # type: ignore[attr-defined]
        places.append({shared.address(b) for b in shared.program.buffers("prepared")})
    assert [len(set(each)) for each in places] == [2, 2, 2]
    assert places[0] == places[1] == places[2], "every rung has packed weights of its own"


def large() -> rlx.Graph:
    """A product that is made with weights of a packing of their own where it has few rows, unless that is forbidden."""
    g = rlx.Graph("large")
    g.output(g.input("x", (rlx.Dim("n", 1, 40), 1024)) @ g.param("w", data=np.ones((1024, 2560), np.float32)), "y")
    return g


@pytest.mark.parametrize(
    "options, shared", [({}, True), pytest.param({"packing": "fast"}, False, marks=pytest.mark.needs("avx2"))]
)
def test_large_weights_are_held_once_too(options: dict[str, Any], shared: bool) -> None:
    """A rung of one row doesn't take the packing that is faster for it alone, unless that is asked for."""
    with rlx.Buckets(large(), {"n": [1, 40]}, policy="buckets", device="cpu", **options) as buckets:
        buckets.warmup()
        every = [model._executable.shared for model in buckets._models.values()]  # type: ignore[attr-defined]
        first, second = ({one.address(b) for b in one.program.buffers("prepared")} for one in every)
    assert (first == second) == shared


@pytest.mark.parametrize("tiles", [False, pytest.param(True, marks=pytest.mark.needs("amx"))])
def test_weights_of_bytes_are_held_once_too(monkeypatch: pytest.MonkeyPatch, tiles: bool) -> None:
    """Also where they would be bytes for few rows and f32 for many."""
    pretend(monkeypatch, float_tiles=tiles)
    g = rlx.Graph("bytes")
    w = g.param("w", data=np.ones((64, 48), np.int8))
    g.output(g.input("x", (rlx.Dim("n", 1, 40), 64)) @ (cast(w, "f32") * 0.5), "y")
    with rlx.Buckets(g, {"n": [1, 40]}, policy="buckets", device="cpu") as buckets:
        buckets.warmup()
        shared = [model._executable.shared for model in buckets._models.values()]  # type: ignore[attr-defined]
        first, second = ({one.address(b) for b in one.program.buffers("prepared")} for one in shared)
        for n in (1, 7):
            assert np.all(buckets.run({"x": np.ones((n, 64), np.float32)})[0] == 32)
    assert first == second


def test_after_warmup_nothing_is_compiled() -> None:
    buckets = rlx.Buckets(perceptron(), {"n": [4, 16, 40]}, policy="buckets", device="cpu")
    assert [e.reason for e in buckets.warmup([{"n": 9}])] == ["warmup"]
    assert len(buckets.warmup()) == 2
    assert buckets.warmup() == []
    before = len(buckets.events)
    for n in (1, 4, 5, 16, 17, 40):
        buckets.run([data(n)])
    assert len(buckets.events) == before == 3


def test_the_rung_used_least_recently_goes_when_the_limit_is_reached() -> None:
    trial = rlx.Buckets(perceptron(), {"n": [4, 16, 40]}, policy="buckets", device="cpu")
    trial.warmup()
    one, two, three = (event.bytes for event in trial.events)
    limit = one + three
    assert one < two < three
    buckets = rlx.Buckets(perceptron(), {"n": [4, 16, 40]}, policy="buckets", device="cpu", limit=limit)
    for n, live in (
        (1, [4]),
        (5, [4, 16]),
        (2, [16, 4]),
        (20, [4, 40]),
        (16, [40, 16] if two + three <= limit else [16]),
    ):
        np.testing.assert_array_equal(buckets.run([data(n)])[0], trial.run([data(n)])[0])
        assert [ranges["n"][1] for ranges in buckets.live] == live
        assert buckets.nbytes <= limit
    assert buckets.events[-1].reason == "it was dropped before at n=16"


def test_the_policy_goes_by_cost() -> None:
    """The CPU's one compile serves every size as fast: buckets would only add compiles."""
    buckets = rlx.Buckets(perceptron(), {"n": "pow2"}, device="cpu")
    assert buckets.policy == "dynamic"
    assert "predicted" in buckets.reason
    for n in (1, 40, 7):
        buckets.run([data(n)])
    assert [(e.kind, e.ranges) for e in buckets.events] == [("dynamic", {"n": (1, 40)})]


@pytest.mark.parametrize(
    "options, short",
    [
        ({}, False),
        ({"packing": "shared"}, False),
        pytest.param({"packing": "fast"}, True, marks=pytest.mark.needs("avx2")),
    ],
)
def test_the_packing_that_is_priced_is_the_one_compiled(
    options: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies: set[str] = set()
    predict = buckets_module.predict_lowered

    def seen(lowered: Lowered, *args: Any, **more: Any) -> Prediction:
        strategies.update(kernel.how for kernel in lowered.program.run)
        return predict(lowered, *args, **more)

    monkeypatch.setattr(buckets_module, "predict_lowered", seen)
    rlx.Buckets(large(), {"n": [1, 40]}, device="cpu", **options).close()
    assert strategies
    assert ("matmul.panels+f28" in strategies) == short


def test_params_reach_every_rung() -> None:
    g = rlx.Graph("scaled")
    g.output(g.input("x", (rlx.Dim("n", 1, 8), 2)) * g.param("w", (2,)), "y")
    buckets = rlx.Buckets(g, {"n": [2, 8]}, policy="buckets", device="cpu")
    for scale in (2.0, 3.0):
        w = np.full(2, scale, np.float32)
        buckets.set_param("w", w)
        w[:] = 99
        for n in (1, 5):
            np.testing.assert_array_equal(buckets.run([np.ones((n, 2), np.float32)])[0], np.full((n, 2), scale))


def test_setting_params_waits_for_a_run_that_has_its_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rung that another thread is about to run isn't closed under it when params can't be set: that run has the old
    values, the next ones too.
    """
    buckets = rlx.Buckets(perceptron(), {"n": [4, 8]}, policy="buckets", device="cpu", busy="wait")
    want = {n: buckets.run([data(n)])[0] for n in (3, 7)}
    has_it, go_on = threading.Event(), threading.Event()
    run, set_params = rlx.CompiledGraph.run, rlx.CompiledGraph.set_params
    results: list[Array] = []

    def late(model: rlx.CompiledGraph, *args: Any, **more: Any) -> Any:
        has_it.set()
        assert go_on.wait(30)
        return run(model, *args, **more)

    calls: list[rlx.CompiledGraph] = []

    def failing(model: rlx.CompiledGraph, *args: Any, **more: Any) -> Any:
        calls.append(model)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return set_params(model, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(rlx.CompiledGraph, "run", late)
        runner = threading.Thread(target=lambda: results.append(buckets.run([data(3)])[0]))
        runner.start()
        assert has_it.wait(30)
        patch.setattr(rlx.CompiledGraph, "set_params", failing)
        params = {p.name: np.zeros(p.shape, np.float32) for p in perceptron().params}
        setter_done = threading.Event()

        def setting() -> None:
            with pytest.raises(MemoryError, match="no memory"):
                buckets.set_params(params)
            setter_done.set()

        setter = threading.Thread(target=setting)
        setter.start()
        assert not setter_done.wait(0.2)  # it waits
        go_on.set()
        runner.join(30)
        setter.join(30)
    assert len(calls) == 2
    np.testing.assert_array_equal(results[0], want[3])
    for n, before in want.items():
        np.testing.assert_array_equal(buckets.run([data(n)])[0], before)


def test_a_callback_may_run_while_params_are_set() -> None:
    """The first compile of `set_params` calls `on_compile`, which runs: it does not wait for itself."""
    seen: list[int] = []
    buckets = rlx.Buckets(
        perceptron(), {"n": [4]}, policy="buckets", device="cpu", on_compile=lambda event: seen.append(1)
    )
    buckets._on_compile = lambda event: seen.append(buckets.run([data(3)])[0].size)
    buckets.set_params({p.name: np.ones(p.shape, np.float32) for p in perceptron().params})
    assert seen[0] > 0


def test_misuse_is_told() -> None:
    g = perceptron()
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"m": [4]}, NameNotFound, "no dim 'm'; there are 'n'"),
        ({"n": [4, 4]}, OptionError, "ascending"),
        ({"n": [41]}, OptionError, "within 1..40"),
        ({"n": [(1, 4), (3, 8)]}, OptionError, "ascending"),
        ({"n": "pow3"}, OptionError, "'pow2'"),
        ({"n": ["4"]}, OptionError, "ascending"),
        ({}, OptionError, "no rung"),
    ]
    for ladder, error, text in bad:
        with pytest.raises(error, match=text):
            rlx.Buckets(g, ladder, device="cpu")
    with pytest.raises(OptionError, match="policy='fast'"):
        rlx.Buckets(g, {"n": "pow2"}, policy="fast", device="cpu")
    buckets = rlx.Buckets(g, {"n": [(2, 4), (8, 16)]}, policy="buckets", device="cpu")
    for n in (1, 5, 17):
        with pytest.raises(ExecutionError, match=r"2\.\.4, 8\.\.16|outside its bounds"):
            buckets.run([data(n)])
    with pytest.raises(ShapeError):
        buckets.run([np.zeros((4, 25), np.float32)])
    with pytest.raises(NameNotFound, match="size of 'n' is missing"):
        buckets.warmup([{}])
    buckets.close()
    with pytest.raises(ClosedError):
        buckets.run([data(4)])
    state = rlx.Graph("state")
    s = state.state("s", (2,))
    state.update(s, s + state.input("x", (rlx.Dim("n", 1, 4), 2)).sum(axes=0))
    with pytest.raises(OptionError, match="has states"):
        rlx.Buckets(state, {"n": [4]}, device="cpu")


# ---- padding


def why(graph: Any) -> str | None:
    return mixing(run_passes(graph), "n")


N = rlx.Dim("n", 1, 16)


def one(build: Any, shape: tuple[Any, ...] = (N, 6), dtype: str = "f32") -> Any:
    g = rlx.Graph("one")
    g.output(build(g, g.input("x", shape, dtype)), "y")
    return g


APART: dict[str, Any] = {
    "chain": lambda: perceptron(N),
    "flattened rows": lambda: one(lambda g, x: rlx.reshape(x, (N * 3, 2)) @ g.param("w", (2, 5)), (N, 3, 2)),
    "split rows": lambda: one(lambda g, x: rlx.reshape(x, (N, 2, 3)).sum(axes=2)),
    "lookup": lambda: one(lambda g, x: rlx.gather(g.param("table", (9, 4)), x), (N,), "i64"),
    "mean of a row": lambda: one(lambda g, x: x - rlx.reduce_mean(x, axes=(1,), keepdims=True)),
    "attention of a batch": lambda: one(lambda g, x: rlx.attention(x, x, x), (N, 2, 5, 8)),
    "convolution of a batch": lambda: one(lambda g, x: rlx.conv(x, g.param("w", (4, 3, 3, 3))), (N, 3, 8, 8)),
    "running sum": lambda: one(lambda g, x: rlx.cum_sum(x, axis=0)),
    "numbered": lambda: one(lambda g, x: x + rlx.reshape(rlx.cast(g.add(Iota(N))[0], "f32"), (N, 1))),
}
MIXED: dict[str, Any] = {
    "sum": (mean, "sums or compares"),
    "softmax": (lambda: one(lambda g, x: rlx.softmax(x, axis=0)), "sums or compares"),
    "product over it": (lambda: one(lambda g, x: rlx.transpose(x, (1, 0)) @ x), "sums or compares"),
    "attention over it": (lambda: one(lambda g, x: rlx.attention(x, x, x), (2, 2, N, 8)), "attends over it"),
    "shifted": (lambda: one(lambda g, x: rlx.concat(g.param("first", (1, 6)), x, axis=0)), "not as a factor"),
    "reversed": (lambda: one(lambda g, x: rlx.slice(x, (N - 1, 0), (N, 6), (-1, 1))), "size itself|other entries"),
    "running sum from the end": (lambda: one(lambda g, x: rlx.cum_sum(x, axis=0, reverse=True)), "sums or compares"),
    "its size": (lambda: one(lambda g, x: x * rlx.cast(g.add(SizeOf(N))[0], "f32")), "size itself"),
    "inner axis": (lambda: one(lambda g, x: rlx.reshape(x, (3 * N,)) * 2.0, (3, N)), "inside another axis"),
    "computed lookup": (lambda: one(lambda g, x: rlx.gather(g.param("t", (9,)), x - 1), (N,), "i64"), "stop the run"),
    "integer division": (lambda: one(lambda g, x: g.constant(np.int64(6)) // x, (N,), "i64"), "stop the run"),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart_are_known(name: str) -> None:
    assert why(APART[name]()) is None


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed_are_known(name: str) -> None:
    build, text = MIXED[name]
    found = why(build())
    assert found is not None
    assert any(part in found for part in text.split("|")), found


@pytest.mark.skipif(not backend_named("xla").available().present, reason="needs jax")
def test_a_specialising_device_is_padded_where_that_is_proved() -> None:
    whole = rlx.compile(perceptron(), device="cpu")
    buckets = rlx.Buckets(perceptron(), {"n": "pow2"}, device="xla")
    assert buckets.policy == "buckets", buckets.reason
    assert len(buckets.warmup()) == 7
    target = np.zeros((7, 24), np.float32)
    for n in (7, 5, 40, 33):
        for got, want in zip(buckets.run({"x": data(n)}), whole.run({"x": data(n)}), strict=True):
            assert type(got) is rlx.Array
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert buckets.run([data(7)], outputs=["y"], out={"y": target})[0] is target
    np.testing.assert_allclose(target, whole(data(7))["y"], rtol=1e-4, atol=1e-5)
    assert len(buckets.events) == 7
    assert len(buckets._shared._executable.functions) == 7  # type: ignore[union-attr, attr-defined]
    exact = rlx.Buckets(mean(), {"n": "pow2"}, policy="buckets", device="xla")
    with pytest.raises(OptionError, match="sums or compares"):
        exact.warmup()
    for n, m in pairwise((3, 4, 3)):
        np.testing.assert_allclose(exact.run([data(n)])[0], data(n).sum(0), rtol=1e-4, atol=1e-5)
        exact.run([data(m)])
    assert [e.kind for e in exact.events] == ["exact", "exact"]


def test_set_params_within_on_compile() -> None:
    """The thread that sets params may set them again where a rung is compiled for that, and run."""
    g = rlx.Graph("t")
    x, w = g.input("x", (rlx.Dim("N", 1, 64), 4)), g.param("w", (4, 4))
    g.output(x @ w, name="o")
    ok, sums = {"w": np.eye(4, dtype=np.float32)}, []

    def again(_: object) -> None:
        if len(buckets.events) == 1:
            buckets.set_params(ok)
            sums.append(float(buckets.run({"x": np.ones((3, 4), np.float32)})[0].sum()))

    buckets = rlx.Buckets(g, {"N": [4, 64]}, device="cpu", policy="buckets", on_compile=again)
    thread = threading.Thread(target=buckets.set_params, args=(ok,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert sums == [12.0]


@pytest.mark.parametrize(
    "value, error", [(np.ma.array(np.eye(4), mask=np.eye(4)), "masked"), ([[1.0], [2.0, 3.0]], "can't make")]
)
def test_params_of_buckets_are_checked_as_those_of_a_graph(value: Any, error: str) -> None:
    g = rlx.Graph("t")
    g.output(g.input("x", (rlx.Dim("N", 1, 64), 4)) @ g.param("w", (4, 4)), name="o")
    buckets = rlx.Buckets(g, {"N": [4, 64]}, device="cpu", policy="buckets")
    with pytest.raises(DTypeError, match=error):
        buckets.set_params({"w": value})
    buckets.set_params({"w": [[float(i == j) for j in range(4)] for i in range(4)]})
    assert buckets.run({"x": np.ones((3, 4), np.float32)})[0].sum() == 12.0


def test_a_ladder_keeps_what_dims_say_of_parts() -> None:
    """A rung is a range of one size: of sizes with one name that differ, what all of them may be."""
    inputs = [helper.make_tensor_value_info(name, 1, ["N", 3]) for name in "ab"]
    outputs = [helper.make_tensor_value_info(name, 1, ["N", 3]) for name in "yz"]
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["b"], ["z"])]
    graph = load_onnx(helper.make_model(helper.make_graph(nodes, "p", inputs, outputs), ir_version=9,
                                        opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())  # fmt: skip
    feed = {"a": np.ones((12, 3), np.float32), "b": np.ones((12, 3), np.float32)}
    buckets = rlx.Buckets(graph, {"N": [4, 8]}, dims={"N (b)": (1, 8)}, device="cpu", policy="buckets")
    with pytest.raises(RlxError, match="N"):
        buckets.run(feed)
    with pytest.raises(OptionError, match="16"):
        rlx.Buckets(graph, {"N": [4, 16]}, dims={"N (b)": (1, 8)}, device="cpu", policy="buckets")
