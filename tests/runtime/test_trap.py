"""`trap`: the first kernel that gives NaN or an infinity is named, with whether it made it or passed it on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ExecutionError, NanTrapped
from rlx.ops.control import Scan

Array = np.ndarray[Any, Any]
DEVICES = ["cpu", "reference"]


def ratio(device: str, trap: str = "nan", **options: Any) -> rlx.CompiledGraph:
    """Two products around a division of sums: NaN for rows that are zero."""
    g = rlx.Graph("ratio")
    x, w = g.input("x", (rlx.Dim("n", 1, 8), 16)), g.param("w", (16, 16), data=np.eye(16, dtype=np.float32))
    (h,) = g.add(rlx.ops.OPS["matmul"](), x, w, provenance=["first"])
    (q,) = g.add(rlx.ops.OPS["div"](), h, rlx.reduce_sum(h, axes=[1], keepdims=True), provenance=["quotient"])
    (y,) = g.add(rlx.ops.OPS["matmul"](), q, w, provenance=["last"])
    g.output(y, name="y")
    return rlx.compile(g, device=device, trap=trap, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_culprit(device: str) -> None:
    """Finite inputs: the kernel of the division is named, by every call; good runs equal those without a trap."""
    model, plain = ratio(device), ratio(device, "off")
    good = np.random.default_rng(0).random((5, 16), np.float32)
    bad = good.copy()
    bad[3] = 0
    assert np.isnan(plain.run([bad])[0]).any()
    for call in (lambda: model.run([bad]), lambda: model.run_slots(bad), lambda: model.run_views([bad])):
        with pytest.raises(NanTrapped, match=r"quotient.* 16 NaN and 0 infinite of 80 .*is the culprit") as caught:
            call()
        assert isinstance(caught.value, ExecutionError | FloatingPointError)
        assert caught.value.culprit
        assert "quotient" in caught.value.label
        assert not caught.value.operands
        assert np.array_equal(model.run([good])[0], plain.run([good])[0])


@pytest.mark.parametrize("device", DEVICES)
def test_propagator(device: str) -> None:
    """A NaN that is given comes out of the first kernel that reads it, which names the leaf."""
    model = ratio(device)
    x = np.ones((2, 16), np.float32)
    x[1, 3] = np.nan
    with pytest.raises(NanTrapped, match=r"first.*it propagates what it reads: input 'x' has 1 NaN") as caught:
        model.run([x])
    assert not caught.value.culprit
    assert caught.value.operands == ("input 'x'",)
    model.set_params({"w": np.full((16, 16), np.nan, np.float32)})
    with pytest.raises(NanTrapped, match=r"it propagates"):
        model.run([np.ones((2, 16), np.float32)])


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_are_trapped_when_asked(device: str) -> None:
    """A mask of -inf is no mistake for "nan"; "inf" names the kernel that overflows."""
    g = rlx.Graph("masked")
    x, m = g.input("x", (4, 8)), g.input("m", (4, 8), "bool")
    (low,) = g.add(rlx.ops.OPS["where"](), m, x, g.constant(np.float32(-np.inf)), provenance=["mask"])
    g.output(rlx.softmax(low), name="p")
    g.output(rlx.exp(x), name="e")
    mask = np.ones((4, 8), bool)
    mask[:, 5:] = False
    small, large = np.ones((4, 8), np.float32), np.full((4, 8), 100, np.float32)
    nan, inf = (rlx.compile(g, device=device, trap=trap) for trap in ("nan", "inf"))
    assert np.isfinite(nan.run([small, mask])[0]).all()
    assert np.isinf(nan.run([large, mask])[1]).all()
    with pytest.raises(NanTrapped, match=r"the culprit"):
        inf.run([large, np.ones((4, 8), bool)])
    with pytest.raises(NanTrapped, match=r"(mask|softmax).*culprit"):
        nan.run([small, np.zeros((4, 8), bool)])  # a row without any
    assert np.isfinite(inf.run([small, np.ones((4, 8), bool)])[1]).all()


@pytest.mark.parametrize("debug", [False, True])
def test_what_lies_in_the_arena_is_not_trapped(debug: bool) -> None:
    """Only what a kernel wrote counts: pieces that are not written yet hold what was there before."""
    g = rlx.Graph("pieces")
    x = g.input("x", (3, 8))
    parts = [rlx.reduce_sum(x * float(k), axes=[1], keepdims=True) + x for k in range(4)]
    g.output(rlx.softmax(rlx.concat(*parts, axis=1) @ g.constant(np.ones((32, 32), np.float32))), name="y")
    plain = rlx.compile(g, device="cpu")
    model = rlx.compile(g, device="cpu", trap="inf", debug=debug)
    x_now = np.random.default_rng(1).random((3, 8), np.float32)
    for _ in range(2):
        assert np.array_equal(model.run([x_now])[0], plain.run([x_now])[0])


def test_in_a_loop() -> None:
    """The round of a loop that makes the NaN: rows of results that are not there yet do not count."""
    body = rlx.Graph("body")
    total, x = body.input("total", (4,)), body.input("x", (4,))
    body.output(total - x, "next")
    body.output(rlx.sqrt(total), "row")
    g = rlx.Graph("looped")
    start, steps = g.input("start", (4,)), g.constant(np.ones((5, 4), np.float32))
    made = g.add(Scan(carries=1, scanned=1), start, steps, regions=[body], provenance=["rounds"])
    g.output(made[-1], name="rows")
    model = rlx.compile(g, device="cpu", trap="nan", debug=True)
    assert np.isfinite(model.run([np.full(4, 9, np.float32)])[0]).all()
    with pytest.raises(NanTrapped, match=r"4 NaN and 0 infinite of 4 elements.*culprit"):
        model.run([np.full(4, 2.5, np.float32)])
    assert np.isfinite(model.run([np.full(4, 9, np.float32)])[0]).all()


def test_states_and_feeds() -> None:
    """Runs that are watched update states and feed outputs as others do."""
    made = []
    for trap in ("off", "nan"):
        g = rlx.Graph("average")
        mean, x = g.input("mean", (3,)), g.input("x", (3,))
        g.output(mean * 0.5 + x * 0.5, name="next")
        model = rlx.compile(g, device="cpu", trap=trap)
        model.states.bind("mean", np.zeros(3, np.float32))
        model.states["mean"].feed("next")
        for _ in range(3):
            model.run({"x": np.ones(3, np.float32)})
        made.append(model.states["mean"].read())
    assert np.array_equal(*made)
