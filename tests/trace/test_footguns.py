"""What goes wrong with traced functions elsewhere is here an error that names the way out, or harmless."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.jit import load as loader
from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError

X = np.arange(24, dtype=np.float32).reshape(4, 6)
ROWS = {"x": ("rows", None)}


def store(x: Any) -> Any:
    a = np.zeros((4, 6), np.float32)
    a[0] = x[0]
    return a


def write(x: Any) -> Any:
    x[0] = 1
    return x


def add_into(x: Any) -> Any:
    a = np.zeros((4, 6), np.float32)
    a += x
    return a


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x if x.sum() > 0 else -x, r"rlx\.where.*rlx\.cond"),
        (lambda x: x if x[0, 0] and x[0, 1] else -x, r"rlx\.cond"),
        (lambda x: x * float(x.sum()), r"can't become a Python number.*static argument"),
        (lambda x: x * int(x.sum()), "can't become a Python number"),
        (lambda x: x * x.sum().item(), "can't become a Python number"),
        (np.asarray, "or a NumPy array"),
        (lambda x: np.array([x[0], x[1]]), r"np\.stack joins values"),
        (store, r"nor be stored into one.*x\.at\[i\]\.set\(v\)"),
        (write, r"x = x\.at\[key\]\.set\(new\)"),
        (add_into, r"write a = a \+ x"),
        (lambda x: list(range(x.sum().astype(int))), r"loop by rlx\.fori_loop"),
    ],
)
def test_elements_of_a_trace_are_not_known(function: Any, message: str) -> None:
    """Truth, conversion, iteration by elements and writing are refused, with what to use instead."""
    with pytest.raises(OptionError, match=message):
        rlx.jit(function).lower(X)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: [x[i] for i in range(x.shape[0])], r"rlx\.fori_loop\(0, n, \.\.\.\)"),
        (lambda x: x + np.zeros((x.shape[0], 6)), r"rlx\.numpy\.zeros"),
        (lambda x: x if x.shape[0] > 3 else -x, r"whether rows > 3 depends on the run"),
        (lambda x: x if x.shape[0] >= 3 else -x, r"whether rows >= 3 depends on the run"),
        (lambda x: x * int(x.shape[0]), "is decided by each run"),
        (lambda x: [*x], r"loop over rows by rlx\.scan"),
        (lambda x: x.reshape(5, -1), "don't divide"),
    ],
)
def test_sizes_of_dynamic_axes_are_not_known(function: Any, message: str) -> None:
    """Python can't loop over them, nor branch where their bounds don't tell."""
    with pytest.raises((OptionError, ShapeError), match=message):
        rlx.jit(function, dims=ROWS).lower(X)


def test_sizes_that_bounds_tell_are_known() -> None:
    f = rlx.jit(lambda x: x + 1 if x.shape[0] > 0 and x.shape[0] <= 8 else 1 / 0, dims=ROWS | {"rows": (1, 8)})
    assert f.lower(X).outputs


def test_equality_compares_elements() -> None:
    """`==` and `!=` of traced values are NumPy's; with None or text they are Python's."""
    f = rlx.jit(lambda x, y: [x == y, x != 3, x == 0.0, x == np.float32(3), x == None, x == "a"], device="reference")  # noqa: E711
    got = f(X, X.T.reshape(4, 6))
    np.testing.assert_array_equal(got[0], X.T.reshape(4, 6) == X)
    for a, b in zip(got[1:4], (X != 3, X == 0, X == 3), strict=True):
        np.testing.assert_array_equal(a, b)
    assert got[4:] == [False, False]


def test_leaked_values_are_found() -> None:
    """A value kept outside of its function, or outside of its loop body, can't be used later."""
    kept: list[Any] = []
    f = rlx.jit(lambda x: kept.append(x + 1) or x, device="reference")  # type: ignore[func-returns-value]
    f(X)
    for use in (lambda x: x + kept[0], lambda x: np.exp(kept[0]), lambda x: [kept[0], x], lambda x: rlx.tanh(kept[0])):
        with pytest.raises(OptionError, match=r"a function or loop body whose trace is over: return what is needed"):
            rlx.jit(use).lower(X)
    with pytest.raises(OptionError, match="whose trace is over"):
        kept[0] + 1

    def body(i: Any, c: Any) -> Any:
        kept[:] = [c * 2]
        return c

    with pytest.raises(OptionError, match="'body', a function or loop body"):
        rlx.jit(lambda x: rlx.fori_loop(0, 2, body, x) + kept[0]).lower(X)


def test_closures_are_those_of_the_trace() -> None:
    """A changed global, list or array isn't seen by calls that need no new trace; the constant isn't changed either."""
    scale, parts = np.ones(6, np.float32), [1.0]
    f = rlx.jit(lambda x: x * scale + parts[0], device="reference")
    first = f(X)
    scale[:] = 9
    parts[0] = 5.0
    np.testing.assert_array_equal(f(X), first)
    np.testing.assert_array_equal(f(X[:2]), X[:2] * 9 + 5)  # a new trace


def test_closed_over_arrays_are_embedded_once() -> None:
    """However often a function reads one; changed between two uses it is another constant."""
    w = np.full(6, 2.0, np.float32)

    def f(x: Any) -> Any:
        y = (x + w) * w - w
        w[0] += 1
        return y + w

    graph = rlx.jit(f).lower(X)
    assert len([c for c in graph.constants if c.shape == (6,)]) == 2


def test_large_closures_are_shared_by_traces() -> None:
    """Traces for several shapes have one array of a large weight, and the packed weights are shared too."""
    w = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)
    f = rlx.jit(lambda x: x @ w, device="cpu")
    for n in (1, 2):
        np.testing.assert_allclose(f(np.ones((n, 600), np.float32)), np.ones((n, 600)) @ w, rtol=1e-3, atol=1e-3)
    first, second = (trace.graph.params[0].data for trace in f.traces)
    assert first is second


def test_traces_that_are_dropped_leave_nothing() -> None:
    """Once there are as many as are kept, a further one adds no object of rlx: no graph, no code, no array."""
    f = rlx.jit(lambda x, k: x * k + np.full(300_000, k, np.float32)[:6], static="k", device="cpu")
    counts = []
    for stop in (70, 90):
        for k in range(stop - 20 if counts else 0, stop):
            f(X, float(k))
        gc.collect()
        ours = [type(o).__name__ for o in gc.get_objects() if str(type(o).__module__).startswith("rlx.")]
        counts.append((Counter(ours), len(loader.alive), len(f._large)))
    assert counts[0] == counts[1]
    assert len(f.traces) == 64
    assert "traced 90 times" in f.explain()


def test_arguments_are_never_written() -> None:
    x = X.copy()
    f = rlx.jit(lambda x: x.at[0].set(0), device="cpu")
    f(x)
    np.testing.assert_array_equal(x, X)


def test_dims_serve_all_sizes_with_one_trace() -> None:
    """By names, Dims, pairs and axes, of arguments and of leaves, from annotations; results equal those of NumPy."""
    weights = {"w": np.ones((6, 2), np.float32)}

    def f(x: Any, p: Any) -> Any:
        return np.exp(-x) @ p["w"]

    n = rlx.Dim("n", 1, 9)
    for dims in ({"x": ("n", None)}, {"x": {0: n}}, {"x": ((1, 9), 6)}, {"x": {-2: "n"}, "n": (1, 9)}, {"x": [n, 6]}):
        g = rlx.jit(f, dims=dims, device="reference")
        for rows in (4, 1, 9, 4):
            x = np.resize(X, (rows, 6))
            np.testing.assert_allclose(g(x, weights), np.exp(-x) @ weights["w"], rtol=1e-6)
        assert len(g.traces) == 1

    @rlx.jit(device="reference")
    def annotated(x: Annotated[np.ndarray, ("batch", 6)]) -> Any:
        return x.sum(0)

    annotated(X)
    annotated(X[:2])
    assert str(annotated.traces[0].arguments[0]) == "x: f32[batch, 6]"
    tree = rlx.jit(lambda p: p["a"] + p["b"].sum(), dims={"p.a": ("n",)}, device="reference")
    for size in (2, 3):
        tree({"a": X[0, :size], "b": X})
    assert len(tree.traces) == 1


def test_dims_are_checked() -> None:
    f = rlx.jit(lambda x, y: x + y, dims={"x": ("n", None), "y": ("n", None), "n": (2, 4)}, device="cpu")
    with pytest.raises(ExecutionError, match=r"input 'x': the dim 'n' is 1, outside its bounds 2\.\.4"):
        f(X[:1], X[:1])
    with pytest.raises(ShapeError, match=r"input 'y': expected \(n, 6\) where n = 4, got \(3, 6\)"):
        f(X, X[:3])
    with pytest.raises(ShapeError, match="dims names 2 sizes for x, which has 1 axes"):
        f(X[0], X)
    with pytest.raises(OptionError, match="there is no argument or dim 'z'"):
        rlx.jit(lambda x: x, dims={"z": 3})
    with pytest.raises(OptionError, match="expected a size for each axis"):
        rlx.jit(lambda x: x, dims={"x": 3})
    with pytest.raises(ShapeError, match="axis 1 of x is to be 5, got 6"):
        rlx.jit(lambda x: x, dims={"x": (None, 5)}).lower(X)


def test_reasons_of_traces() -> None:
    """Each names the argument and what is different from the nearest earlier trace."""

    @dataclass
    class Both:
        a: Any
        b: Any

    f = rlx.jit(lambda x, p, n: x * n + p.a, static=["n"], device="reference")
    f(X, Both(X, X), 1)
    f(X, Both(X, X), n=1)
    f(X[:2], Both(X[:2], X), 1)
    f(X, Both(X.astype(np.float64), X), 1)
    f(X, Both(X, X), 2)
    f(X, Both(3.0, X), 2)
    reasons = [t.reason for t in f.traces]
    assert reasons[1] == "x has the shape (2, 6) instead of (4, 6); p.a has the shape (2, 6) instead of (4, 6)"
    assert reasons[2] == "p.a has the element type f64 instead of f32"
    assert reasons[3] == "the static argument n is 2 instead of 1"
    assert "p.a is a Python number" in reasons[4]
    text = f.explain()
    assert "traced 5 times" in text
    assert "x: f32[4, 6]" in text
    assert "n=2" in text
    d = rlx.jit(lambda p: p["a"], device="reference")
    d({"a": X})
    e = rlx.jit(lambda p: {"z": p["a"] + 1, "b": p["b"]}, device="reference")
    for p in ({"a": X, "b": X[0]}, {"b": X[0], "a": X}):
        assert list(e(p)) == ["z", "b"]
        np.testing.assert_array_equal(e(p)["z"], X + 1)
        np.testing.assert_array_equal(e(p)["b"], X[0])
    assert len(e.traces) == 1
    d({"a": X, "b": X})
    assert d.traces[1].reason == "p.b is new"


def test_many_traces_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Eight shapes warn once, with the reason and the way out; so does calling jit in a loop."""
    f = rlx.jit(lambda x: x + 1, device="reference")
    for n in range(1, 10):
        f(np.ones(n, np.float32))
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "traced 8 times, lately because x has the shape (8,) instead of (7,); dims= makes axes dynamic" in warned[0]
    caplog.clear()
    for _ in range(9):
        rlx.jit(lambda x: x)
    assert "called 8 times" in caplog.text
    assert "outside the loop" in caplog.text


def test_static_arguments() -> None:
    """By name, position and JAX's spellings; of equal value but another type they are others."""
    for options in ({"static": "n"}, {"static": 1}, {"static_argnums": 1}, {"static_argnames": ("n",)}):
        f = rlx.jit(lambda x, n=2: x * n, device="reference", **options)
        np.testing.assert_array_equal(f(X, 3), X * 3)
        np.testing.assert_array_equal(f(X), X * 2)
        np.testing.assert_array_equal(f(x=X, n=True), X)
        assert len(f.traces) == 3
    with pytest.raises(OptionError, match="no argument 'm' to be static; it has x"):
        rlx.jit(lambda x: x, static="m")
    with pytest.raises(OptionError, match=r"n=\[1\] can't be hashed: pass a tuple"):
        rlx.jit(lambda x, n: x, static="n")(X, [1])
    with pytest.raises(OptionError, match="mode is a str: expected arrays, or name it in static="):
        rlx.jit(lambda x, mode: x)(X, "fast")
    with pytest.raises(TypeError, match="missing a required argument"):
        rlx.jit(lambda x, y: x)(X)


def test_functions_within_functions() -> None:
    """A traced function that calls another takes it in; methods and decorators with options work."""
    inner = rlx.jit(lambda x, n: x * n, static="n", device="reference")

    class Model:
        def __init__(self) -> None:
            self.w = np.float32(3)

        @rlx.jit(static="self", device="reference")
        def __call__(self, x: Any) -> Any:
            return inner(x, 2) + self.w

    model = Model()
    np.testing.assert_array_equal(model(X), X * 2 + 3)
    assert not inner.traces

    def body(i: Any, c: Any) -> Any:
        return inner(c, 2)

    np.testing.assert_array_equal(rlx.jit(lambda x: rlx.fori_loop(0, 3, body, x), device="reference")(X), X * 8)


def test_threads_share_a_function() -> None:
    """Calls from several threads run side by side, on clones, each with its own result."""
    f = rlx.jit(lambda x: np.tanh(x) @ np.ones((6, 6), np.float32), device="cpu")
    want = {k: np.tanh(X * np.float32(k)) @ np.ones((6, 6), np.float32) for k in range(4)}
    wrong: list[int] = []

    def run(k: int) -> None:
        for _ in range(50):
            if not np.allclose(f(X * np.float32(k)), want[k], rtol=1e-5):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(f.traces) == 1


def test_graphs_and_artifacts(tmp_path: Any) -> None:
    """`lower` and `compile` take types in the place of arrays; the result is saved and loaded as any other."""
    f = rlx.jit(lambda x, p: {"y": x @ p["w"]}, device="cpu")
    w = np.ones((6, 2), np.float32)
    described = rlx.TensorType((rlx.Dim("n", 1, 8), 6), "f32")
    model = f.compile(described, {"w": w})
    assert [str(spec) for spec in model.inputs] == ["x: f32[n, 6]", "p.w: f32[6, 2]"]
    model.save(tmp_path / "f.rlxart")
    again = rlx.load(tmp_path / "f.rlxart")
    np.testing.assert_allclose(again.run({"x": X, "p.w": w})[0], X @ w)
    assert f.lower(X, {"w": w}).nodes
    assert not f.traces


def test_errors_of_types_name_the_argument() -> None:
    with pytest.raises(DTypeError, match=r"jit: p\.b: unknown element type"):
        rlx.jit(lambda p: p["a"])({"a": X, "b": np.array(["text"])})
    with pytest.raises(OptionError, match="jit takes a function, got ndarray"):
        rlx.jit(X)
    with pytest.raises(OptionError, match="returns no graph value"):
        rlx.jit(lambda x: 3)(X)
