"""Runs that are asked for some outputs only, rows of outputs, and extents that no input tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import ExecutionError, NameNotFound, OptionError, ShapeError

DEVICES = ["cpu", "interp", "reference"]
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def three(device: str) -> rlx.CompiledGraph:
    """Two branches over a common part, and the common part; the last branch stops on a division by zero."""
    g = rlx.Graph("three")
    x, d = g.input("x", (rlx.Dim("n", 1, 4), 3, 4)), g.input("d", (), "i32")
    common = rlx.softmax(x, axis=-1)
    g.output(common, name="common")
    g.output(rlx.exp(common).sum(axes=2, keepdims=True), name="sum")
    g.output(rlx.div(g.constant(np.int32([12, 30])), d), name="quotient")
    return rlx.compile(g, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_by_name_and_position_in_the_order_asked(device: str) -> None:
    model = three(device)
    every = model.run([X, np.int32(3)])
    for chosen in (["sum"], [1], ["quotient", 0], ["sum", "common", "sum"], [], (2, 1, 0)):
        names = [c if isinstance(c, str) else ("common", "sum", "quotient")[c] for c in chosen]
        got = model.run([X, np.int32(3)], outputs=chosen)
        assert len(got) == len(names)
        for name, array in zip(names, got, strict=True):
            want = every[("common", "sum", "quotient").index(name)]
            assert np.asarray(array).tobytes() == np.asarray(want).tobytes()
    for bad in ("total", 3, -1, True, 1.5):
        with pytest.raises(NameNotFound, match="no output"):
            model.run([X, np.int32(3)], outputs=[bad])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="list of names"):
        model.run([X, np.int32(3)], outputs="sum")


def test_what_only_other_outputs_need_is_not_computed() -> None:
    """The branch that divides by zero does not run unless it is asked for; nor is anything left out after that."""
    model = three("cpu")
    for _ in range(2):
        assert model.run([X, np.int32(0)], outputs=["sum"])[0].shape == (2, 3, 1)
        assert model.run([X[:1], np.int32(0)], outputs=[]) == []
        with pytest.raises(ExecutionError, match="division"):
            model.run([X, np.int32(0)])
        with pytest.raises(ExecutionError, match="division"):
            model.run_slots(X, np.int32(0))
        with pytest.raises(ExecutionError, match="division"):
            model.run([X, np.int32(0)], outputs=["quotient", "common"])
        np.testing.assert_array_equal(model.run_slots(X, np.int32(3))[2], [4, 10])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_outputs(device: str) -> None:
    model = three(device)
    common = np.asarray(model.run([X, np.int32(1)])[0])
    for row in (0, 4, -1):
        np.testing.assert_array_equal(model.read_output_row("common", row), common.reshape(6, 4)[row])
    for index in ((1, 2), (0,), (-1, 0, 3), ()):
        np.testing.assert_array_equal(model.read_output_row(0, index), common[index])
    np.testing.assert_array_equal(model.read_output_row("quotient", 0), [12, 30])
    model.run([X[:1], np.int32(1)], outputs=["sum"])  # by the extents of the last run
    assert model.read_output_row("sum", 2).shape == (1,)
    bad_rows: list[Any] = [3, -4, (1, 0), (0, 0, 0, 0)]
    for bad in bad_rows:
        with pytest.raises(ShapeError, match="no row"):
            model.read_output_row("sum", bad)
    with pytest.raises(OptionError, match="did not produce output 'common'"):
        model.read_output_row("common", 0)
    out = np.zeros((1, 3, 4), np.float32)
    model.run([X[:1], np.int32(1)], outputs=["sum"], out={"common": out})
    np.testing.assert_array_equal(model.read_output_row("common", 1), out[0, 1])


def test_a_dim_that_no_input_tells() -> None:
    g = rlx.Graph("count")
    n, m = rlx.Dim("n", 1, 16), rlx.Dim("m", 1, 8)
    x = g.input("x", (m,))
    numbers = g.add(rlx.ops.layout.Iota(n, 0, 1))[0]
    g.output(numbers.cast("f32") * x.sum(), name="y")
    model = rlx.compile(g, device="cpu")
    with pytest.raises(ShapeError, match="'n' is not known: give it to set_extent"):
        model.run([np.ones(2, np.float32)])
    for count in (3, 16, 1):
        model.set_extent("n", count)
        for _ in range(2):
            np.testing.assert_array_equal(model.run_slots(np.ones(2, np.float32))[0], 2 * np.arange(count))
    twin = model.clone()
    model.set_extent("n", None)
    assert len(twin.run([np.ones(1, np.float32)])[0]) == 1
    with pytest.raises(ShapeError, match="set_extent"):
        model.run([np.ones(2, np.float32)])
    with pytest.raises(ExecutionError, match="outside its bounds"):
        model.set_extent("n", 17)
    for wrong in (2.5, "2", True):
        with pytest.raises(OptionError, match="is an int or None"):
            model.set_extent("n", wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="read off the shape of the input 'x'"):
        model.set_extent("m", 2)
    with pytest.raises(NameNotFound, match="no dim 'k'"):
        model.set_extent("k", 2)
