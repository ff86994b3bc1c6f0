"""What stops a run: the error names the node, and the model works afterwards. Host calls, and what a device lacks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ExecutionError, ShapeError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import TensorType
from rlx.ops.base import Op, register
from rlx.ops.control import If

Array = np.ndarray[Any, Any]
DEVICES = ["cpu", "interp", "reference"]


@register
class SortedPair(Op):
    """The elements in order, and where each was: two results; refuses negative ones. Only `infer` and `reference`."""

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        return x, TensorType(x.shape, dtype_of("i64"))

    def reference(self, x: Array) -> tuple[Array, Array]:
        if (x < 0).any():
            raise ValueError(f"{x.min()} is negative")
        return np.sort(x), np.argsort(x, kind="stable")


@register
class Liar(Op):
    """Infers the shape of x and gives `gives`."""

    gives: str = "shape"

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Any:
        return {"shape": x[:1], "dtype": x.astype(np.float64), "count": (x, x)}[self.gives]


@register
class Interrupted(Op):
    """What Ctrl-C in a host call does."""

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        if x[0] == 0:
            raise KeyboardInterrupt
        return x


def test_bad_index() -> None:
    g = rlx.Graph("lookup")
    table, i = g.param("table", (10, 4), data=np.eye(10, 4, dtype=np.float32)), g.input("i", (3,), "i64")
    (found,) = g.add(rlx.ops.OPS["gather"](axis=0), table, i, provenance=["embed"])  # type: ignore[call-arg]
    g.output(found * 2.0, name="y")
    check_failure(g, [np.int64([0, 1, -1])], [np.int64([0, 10, 1])], "node .*embed", "index out of range")
    check_failure(g, [np.int64([0, 1, -10])], [np.int64([0, -11, 1])], "node .*embed", "index out of range")


@pytest.mark.parametrize("op", ["div", "mod"])
def test_integer_division_by_zero(op: str) -> None:
    g = rlx.Graph("divide")
    a, b = g.input("a", (5,), "i32"), g.input("b", (5,), "i32")
    (y,) = g.add(rlx.ops.OPS[op](), a, b, provenance=["ratio"])
    g.output(y + 1, name="y")
    a_now = np.int32([9, 8, 7, 6, 5])
    check_failure(g, [a_now, np.int32([1, 2, 3, 4, 5])], [a_now, np.int32([1, 2, 0, 4, 5])], "ratio", "by zero")


def check_failure(g: rlx.Graph, good: list[Array], bad: list[Array], *texts: str) -> None:
    """Every kind of call fails with ExecutionError on `bad`, on every device; good runs before and after agree."""
    want = rlx.compile(g, device="reference").run(good)
    for device in DEVICES:
        model = rlx.compile(g, device=device)
        for call in (
            lambda m=model: m.run(bad),
            lambda m=model: m.run_slots(*bad),
            lambda m=model: m.run_views(bad),
            lambda m=model: m.run(bad, out=[np.empty_like(w) for w in want]),
        ):
            for results in (model.run(good), model.run_slots(*good)):
                for a, b in zip(results, want, strict=True):
                    np.testing.assert_array_equal(a, b)
            with pytest.raises(ExecutionError) as caught:
                call()
            for text in texts if device == "cpu" else texts[:1]:
                assert re.search(text, str(caught.value))
        if device == "cpu":
            with pytest.raises(ExecutionError, match="the last run failed"):
                model.read_output_row(0, 0)
        np.testing.assert_array_equal(model.run(good)[0], want[0])


def host_graph() -> rlx.Graph:
    g = rlx.Graph("with host calls")
    x = g.input("x", (rlx.Dim("n", 1, 100),))
    values, order = g.add(SortedPair(), x * 2.0, provenance=["my sort"])
    g.output(values + 1.0, name="values")
    g.output(order, name="order")
    (again,) = (v for v in g.add(SortedPair(), x, provenance=["input sort"])[:1])  # straight from an input
    g.output(again, name="again")
    return g


def test_host_calls() -> None:
    """An op with no more than infer and reference runs everywhere, with several results and any length."""
    g = host_graph()
    model = rlx.compile(g, device="cpu")
    assert re.search(r"host +sorted_pair +my sort: .*sync point", model.explain("dispatch"))
    assert "2 host" in model.explain("dispatch").splitlines()[0]
    for n in (4, 1, 50, 4):
        x = np.random.default_rng(n).random(n, np.float32)
        out = {name: np.zeros(n, dtype) for name, dtype in (("values", "f4"), ("order", "i8"), ("again", "f4"))}
        model.run([x], out=out)
        for results in (model.run([x]), model.run_views([x]), list(out.values())):
            np.testing.assert_array_equal(results[0], np.sort(x * 2) + 1)
            np.testing.assert_array_equal(results[1], np.argsort(x, kind="stable"))
            np.testing.assert_array_equal(results[2], np.sort(x))
    bad = np.float32([1, -2])
    check_failure(g, [np.float32([2, 1])], [bad], "my sort|input sort", r"ValueError: -[24]\.0 is negative")
    with pytest.raises(ExecutionError) as caught:
        model.run([bad])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("gives", ["shape", "dtype", "count"])
def test_a_host_call_that_is_not_as_inferred(gives: str) -> None:
    g = rlx.Graph("liar")
    (y,) = g.add(Liar(gives), g.input("x", (3,)), provenance=["the liar"])
    g.output(y, name="y")
    for device in DEVICES:
        with pytest.raises(ExecutionError, match=r"the liar.*infer"):
            rlx.compile(g, device=device).run([np.zeros(3, np.float32)])


def test_interrupt_in_a_host_call() -> None:
    g = rlx.Graph("interrupted")
    g.output(rlx.ops.interrupted(g.input("x", (2,))) + 1.0, name="y")
    model = rlx.compile(g, device="cpu")
    for _ in range(2):
        for call in (model.run, lambda x: model.run_slots(*x)):
            with pytest.raises(KeyboardInterrupt):
                call([np.zeros(2, np.float32)])
            np.testing.assert_array_equal(call([np.ones(2, np.float32)])[0], 2)


def test_host_calls_on_params_are_prepared_once() -> None:
    """A host call whose operands are params runs when they change, not in each run."""
    calls = []

    original = SortedPair.reference
    g = rlx.Graph("prepared")
    w, x = g.param("w", (3,)), g.input("x", (3,))
    values, _ = g.add(SortedPair(), w, provenance=["weights"])
    g.output(values + x, name="y")
    model = rlx.compile(g, device="cpu")
    try:
        SortedPair.reference = lambda self, v: (calls.append(1), original(self, v))[1]  # type: ignore[assignment]
        x_now = np.zeros(3, np.float32)
        model.set_param("w", [3, 1, 2])
        for _ in range(3):
            np.testing.assert_array_equal(model.run([x_now])[0], [1, 2, 3])
        assert len(calls) == 1
        model.set_param("w", [3, -1, 2])
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"node weights: .*-1.0 is negative"):
                model.run([x_now])
        model.set_param("w", [6, 5, 4])
        np.testing.assert_array_equal(model.run_slots(x_now)[0], [4, 5, 6])
    finally:
        SortedPair.reference = original  # type: ignore[method-assign]


def stateful() -> rlx.Graph:
    g = rlx.Graph("counter")
    x, s = g.input("x", (2,)), g.state("total", (2,))
    g.update(s, s + x)
    g.output(s * 1.0, name="before")
    return g


def branching() -> rlx.Graph:
    g = rlx.Graph("branch")
    c, x = g.input("c", (), "bool"), g.input("x", (2,))
    regions = []
    for scale in (2.0, 3.0):
        region = rlx.Graph("region")
        region.output(region.input("x", (2,)) * scale, name="y")
        regions.append(region)
    (y,) = g.add(If(), c, x, provenance=["the branch"], regions=regions)
    g.output(y, name="y")
    return g


def open_param() -> rlx.Graph:
    g = rlx.Graph("open")
    n = rlx.Dim("n")
    x, w = g.input("x", (n,)), g.param("w", (n,))
    g.output(x + w, name="y")
    return g


def test_a_param_of_open_size_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"param 'w': its shape .* has no upper bound; give dims="):
        rlx.compile(open_param(), device="cpu")


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_states_are_run(device: str) -> None:
    model = rlx.compile(stateful(), device=device)
    x = np.ones(2, np.float32)
    assert [model.run([x])[0][0] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_regions_are_run(device: str) -> None:
    model = rlx.compile(branching(), device=device)
    x = np.ones(2, np.float32)
    assert [model.run([np.bool_(c), x])[0][0] for c in (True, False)] == [2, 3]
