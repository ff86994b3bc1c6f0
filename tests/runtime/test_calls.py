"""The calls of a compiled graph: what goes in, what comes out, and whose memory it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import NameNotFound, OptionError, ShapeError, StaleView

DEVICES = ["cpu", "interp", "reference"]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = np.float32(10) * X[:, ::-1].copy()
W = np.float32([2, 4, 8])


def two_in_two_out(device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("pair")
    n = rlx.Dim("n", 1, 8)
    x, y = g.input("x", (n, 3)), g.input("y", (n, 3))
    w = g.param("w", (3,))
    g.output((x + y) * w, name="sum")
    g.output(x - y, name="difference")
    model = rlx.compile(g, device=device, **options)
    model.set_param("w", W)
    return model


def odd_outputs(device: str, **options: Any) -> rlx.CompiledGraph:
    """Outputs that are leaves, views of leaves, views of results, and one result under two names."""
    g = rlx.Graph("odd")
    x, w = g.input("x", (2, 3)), g.param("w", (3,))
    c = g.constant(np.float32([[1, 2], [3, 4]]))
    h = x * w
    g.output(x, name="input")
    g.output(x.reshape(3, 2), name="input view")
    g.output(w, name="param")
    g.output(w.reshape(3, 1), name="param view")
    g.output(rlx.tanh(w), name="of a param")
    g.output(c, name="constant")
    g.output(c.reshape(4), name="constant view")
    g.output(h, name="result")
    g.output(h, name="again")
    g.output(h.reshape(6), name="result view")
    g.output(rlx.slice(h, starts=(1, 0), sizes=(1, 3), steps=(1, 1)), name="a row of it")
    model = rlx.compile(g, device=device, **options)
    model.set_param("w", W)
    return model


def odd_expected() -> dict[str, np.ndarray[Any, Any]]:
    c, h = np.float32([[1, 2], [3, 4]]), X * W
    return {
        "input": X,
        "input view": X.reshape(3, 2),
        "param": W,
        "param view": W.reshape(3, 1),
        "of a param": np.tanh(W),
        "constant": c,
        "constant view": c.reshape(4),
        "result": h,
        "again": h,
        "result view": h.reshape(6),
        "a row of it": h[1:2],
    }


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_and_outputs_can_be_named_or_counted(device: str) -> None:
    model = two_in_two_out(device)
    wanted = [(X + Y) * W, X - Y]
    calls: list[Callable[[], Any]] = [
        lambda: model.run({"y": Y, "x": X}),
        lambda: model.run([X, Y]),
        lambda: model.run((X, Y)),
        lambda: list(model(X, Y).values()),
        lambda: list(model(X, y=Y).values()),
        lambda: [model({"x": X, "y": Y})["sum"], model(x=X, y=Y)[1]],
        lambda: list(model.run_slots(X, Y)),
        lambda: [model.run_views({"x": X, "y": Y})["sum"], model.run_views([X, Y])[1]],
    ]
    for call in calls:
        for got, want in zip(call(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    assert np.asarray(model.run([X, Y], outputs=["difference"])[0]).tobytes() == wanted[1].tobytes()
    assert [a.shape for a in model.run([X, Y], outputs=["difference", "sum", "sum"])] == [(2, 3)] * 3
    assert list(model(X, Y)) == ["sum", "difference"]


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_views_and_repeats_as_outputs(device: str) -> None:
    """In run, run_views, with out=, and read by row; nothing that comes back is memory of a leaf."""
    model, wanted = odd_outputs(device), odd_expected()
    x = X.copy()
    out = {name: np.full_like(a, 7) for name, a in wanted.items()}
    arrays = [dict(zip(wanted, model.run({"x": x}), strict=True)), dict(zip(wanted, model.run_views([x]), strict=True))]
    returned = model.run({"x": x}, out=out)
    assert all(a is b for a, b in zip(returned, out.values(), strict=True))
    for found in (*arrays, out):
        for name, want in wanted.items():
            np.testing.assert_allclose(found[name], want, rtol=1e-6, err_msg=name)
            assert not np.may_share_memory(found[name], x)
    for name, want in wanted.items():
        np.testing.assert_allclose(
            model.read_output_row(name, -1), want.reshape(-1, want.shape[-1])[-1], rtol=1e-6, err_msg=name
        )
    for fresh in arrays[0].values():
        if isinstance(fresh, np.ndarray):
            fresh[...] = -1  # the caller's own
    for name, got in zip(wanted, model.run({"x": x}), strict=True):
        np.testing.assert_allclose(got, wanted[name], rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(x, X)


def test_views_are_read_only_and_in_the_arena() -> None:
    model = two_in_two_out()
    views = model.run_views([X, Y])
    arena = np.frombuffer(model.arena, np.uint8)
    for view in views:
        assert not view.flags.writeable
        assert np.may_share_memory(view, arena)
    assert views["sum"] is views[0]
    assert model.run_slots(X, Y) is model.run_slots(X, Y)
    with pytest.raises(NameNotFound, match="no output 'total'"):
        views["total"]


def test_results_of_run_stay() -> None:
    model = two_in_two_out()
    first = model.run([X, Y])[0]
    model.run([Y, Y])
    np.testing.assert_array_equal(first, (X + Y) * W)


@pytest.mark.parametrize("device", DEVICES)
def test_out_by_name_and_position(device: str) -> None:
    model = two_in_two_out(device)
    mine = np.zeros((2, 3), np.float32)
    got = model.run([X, Y], out={"difference": mine})
    assert got[1] is mine
    np.testing.assert_array_equal(mine, X - Y)
    np.testing.assert_array_equal(got[0], (X + Y) * W)
    np.testing.assert_array_equal(model.read_output_row("difference", 0), (X - Y)[0])
    assert model.run([X, Y], out=[mine, None], outputs=["sum"])[0] is mine
    np.testing.assert_array_equal(mine, (X + Y) * W)
    views = model.run_views([Y, X])  # a call without `out` is not affected by the one before
    np.testing.assert_array_equal(views[1], Y - X)
    np.testing.assert_array_equal(model.read_output_row("difference", 1), (Y - X)[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["strided", "backwards", "fortran", "misaligned", "interleaved"])
def test_out_of_any_layout(device: str, how: str) -> None:
    model = two_in_two_out(device)
    arrays = {
        "strided": lambda: np.zeros((4, 6), np.float32)[::2, ::2],
        "backwards": lambda: np.zeros((2, 3), np.float32)[::-1, ::-1],
        "fortran": lambda: np.zeros((2, 3), np.float32, order="F"),
        "misaligned": lambda: np.zeros(25, np.uint8)[1:].view(np.float32).reshape(2, 3),
        "interleaved": lambda: np.zeros((2, 3, 2), np.float32)[..., 0],
    }
    first = arrays[how]()
    second = first.base[..., 1] if how == "interleaved" and first.base is not None else arrays[how]()
    model.run([X, Y], out=[first, second])
    np.testing.assert_array_equal(first, (X + Y) * W)
    np.testing.assert_array_equal(second, X - Y)


@pytest.mark.parametrize("device", DEVICES)
def test_out_may_be_an_input(device: str) -> None:
    """The result is as if all inputs had been read before anything was written."""
    model = two_in_two_out(device)
    x, y = X.copy(), Y.copy()
    model.run([x, y], out=[y, x])
    np.testing.assert_array_equal(y, (X + Y) * W)
    np.testing.assert_array_equal(x, X - Y)
    memory = np.zeros(9, np.float32)
    x, out = memory[:6].reshape(2, 3), memory[3:].reshape(2, 3)  # half of it
    x[...] = X
    model.run([x, Y], out={"sum": out})
    np.testing.assert_array_equal(out, (X + Y) * W)


def test_bad_out() -> None:
    model = two_in_two_out()
    mine = np.zeros((2, 3), np.float32)
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"total": mine}, NameNotFound, "no output 'total'"),
        ([mine], ShapeError, "expected 2 arrays, got 1"),
        ([mine, mine], OptionError, "'sum' and 'difference' overlap"),
        ([mine[:1], None], ShapeError, r"'sum': this run needs shape \(2, 3\), got \(1, 3\)"),
        ([mine[:, :2], None], ShapeError, "out for 'sum'"),
        ([mine.astype(np.float64), None], rlx.errors.DTypeError, "out for 'sum'"),
        (mine, OptionError, "in a mapping, or in a list; got ndarray"),
        (3, OptionError, "got int"),
        ([mine.tolist(), None], OptionError, "expected a writable array"),
        ([np.broadcast_to(mine, (2, 3)), None], OptionError, "expected a writable array"),
    ]
    for out, error, text in cases:
        with pytest.raises(error, match=text):
            model.run([X, Y], out=out)
    np.testing.assert_array_equal(mine, 0)
    np.testing.assert_array_equal(model.run([X, Y])[1], X - Y)


def test_arguments_of_a_wrong_kind() -> None:
    """What is no mapping, list, row or count is refused with what was expected."""
    model = two_in_two_out()
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: model.set_params([W]), OptionError, "takes a mapping of names to arrays, got list"),  # type: ignore[arg-type]
        (lambda: model.run([X, Y], outputs=1), OptionError, "a list of names or positions, got 1"),  # type: ignore[arg-type]
        (lambda: model(X, Y)[2], NameNotFound, "no output 2; there are 'sum', 'difference'"),
        (lambda: model.read_output_row("sum", 1.0), OptionError, "a row is an int or a tuple of ints, got 1.0"),  # type: ignore[arg-type]
        (lambda: model.profile([X, Y], repeat=0), OptionError, "repeat=0: expected an int >= 1"),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()
    np.testing.assert_array_equal(model(X, Y)[-1], X - Y)


def test_outputs_fed_back() -> None:
    """A view of the last run as an input is read before the run writes over it."""
    g = rlx.Graph("step")
    x = g.input("x", (4,))
    g.output(rlx.concat(x * 2.0, x + 1.0, axis=0).reshape(2, 4).sum(0), name="y")
    model = rlx.compile(g, device="cpu")
    value = want = np.arange(4, dtype=np.float32)
    for _ in range(4):
        value = model.run_slots(value)[0]
        want = want * 2 + (want + 1)
        np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("device", DEVICES)
def test_read_output_row(device: str) -> None:
    model = two_in_two_out(device)
    with pytest.raises(OptionError, match="no run yet"):
        model.read_output_row("sum", 0)
    model.run_slots(X, Y)
    row = model.read_output_row(1, 1)
    np.testing.assert_array_equal(row, (X - Y)[1])
    if isinstance(row, np.ndarray):
        row[...] = 0  # a copy
    np.testing.assert_array_equal(model.read_output_row("difference", -1), (X - Y)[1])
    with pytest.raises(ShapeError, match="there is no row 2"):
        model.read_output_row("sum", 2)
    with pytest.raises(NameNotFound, match="no output 'total'"):
        model.read_output_row("total", 0)
    with pytest.raises(NameNotFound, match="no output 2"):
        model.read_output_row(2, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_debug_views_go_stale(device: str) -> None:
    model = two_in_two_out(device, debug=True)
    views = model.run_views([X, Y])
    np.testing.assert_array_equal(views["sum"], (X + Y) * W)
    kept = views["difference"]
    model.run([X, Y])
    for use in (lambda: views[0], lambda: views["sum"], lambda: list(views)):
        with pytest.raises(StaleView, match="an earlier run"):
            use()
    fed = model.run_slots(X, X)
    again = model.run_slots(fed[0], Y)  # an input in the arena is read before it is overwritten
    np.testing.assert_array_equal(again[1], 2 * X * W - Y)
    del kept


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_without_kernels_inputs_or_elements(device: str) -> None:
    g = rlx.Graph("constants")
    g.output(g.constant(np.float32(3)), name="scalar")
    g.output(g.constant(np.zeros((2, 0), np.int32)), name="empty")
    model = rlx.compile(g, device=device)
    for results in (model.run({}), model.run([]), list(model.run_slots()), list(model().values())):
        assert results[0].shape == ()
        assert np.asarray(results[0]) == 3
        assert results[1].shape == (2, 0)
        assert results[1].dtype == np.int32

    g = rlx.Graph("empty")
    n = rlx.Dim("n", 0, 4)
    x, s = g.input("x", (n, 3)), g.input("s", ())
    g.output(rlx.softmax(x * s), name="soft")
    g.output(x.sum(), name="total")
    g.output(x @ g.constant(np.ones((3, 2), np.float32)), name="product")
    g.output(s + 1.0, name="next")
    model = rlx.compile(g, device=device)
    for rows in (0, 2, 0):
        x_now = np.ones((rows, 3), np.float32)
        soft, total, product, after = model.run([x_now, np.float32(2)])
        assert soft.shape == (rows, 3)
        assert np.asarray(total) == 3 * rows
        np.testing.assert_array_equal(product, np.full((rows, 2), 3))
        assert after.shape == ()
        assert np.asarray(after) == 3

    g = rlx.Graph("nothing")
    g.input("x", (2,))
    assert rlx.compile(g, device=device).run([np.zeros(2, np.float32)]) == []


def test_profile_and_explain() -> None:
    model = two_in_two_out()
    rows = model.profile([X, Y], repeat=3)
    assert len(rows) == len(model.compilation.program.run)  # type: ignore[union-attr]
    assert all(seconds >= 0 for _, _, seconds in rows)
    for stage in ("summary", "graph", "passes", "dispatch", "fuse", "plan"):
        assert model.explain(stage)
    with pytest.raises(OptionError, match="unknown stage 'all'"):
        model.explain("all")
    assert "manages its memory itself" in two_in_two_out("reference").explain("plan")
    assert two_in_two_out("reference").capabilities.isdisjoint(("arena", "clone", "profile"))
    with pytest.raises(OptionError, match="no arena"):
        _ = two_in_two_out("reference").arena


def test_the_calling_order_of_onnx_runtime_is_told_apart(tmp_path: Path) -> None:
    """`run(None, feeds)`, `run(names, feeds)` and more: one error with how `run` is called, in all that have it."""
    model = two_in_two_out()
    buckets = rlx.Buckets(model.compilation.source, {"n": "pow2"}, device="cpu")
    buckets.set_param("w", W)
    feeds = {"x": X, "y": Y}
    with model.record(tmp_path / "runs.npz") as recorder:
        for run in (model.run, model.clone().run, recorder.run, buckets.run):
            for wrong in (
                (None, feeds),
                (["sum"], feeds),
                (["sum", "difference"], feeds),
                ([X, Y], ["sum"]),
                (X, Y, W),
            ):
                with pytest.raises(OptionError, match=r"all inputs as one argument.*run\(feeds, outputs="):
                    run(*wrong)  # type: ignore[operator]
            with pytest.raises(ShapeError, match="by name in a mapping"):
                run(None)  # type: ignore[operator]
            assert np.array_equal(run(feeds)[0], (X + Y) * W)


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_number_of_inputs(device: str) -> None:
    """Every call says how many are expected, and which, from native code too."""
    model = two_in_two_out(device)
    for _ in range(2):
        for wrong in ((), (X,), (None, {"x": X, "y": Y}, X), (X, Y, X)):
            with pytest.raises(ShapeError, match=r"expected 2 inputs \(x, y\)"):
                model.run_slots(*wrong)
            with pytest.raises(ShapeError, match=r"expected 2 inputs \(x, y\)"):
                model.run_views(list(wrong))
        model.run_slots(X, Y)


def test_out_again_and_again() -> None:
    """From the second call on, arrays that were checked are written the fast way, with the same results and errors."""
    model = two_in_two_out("cpu")
    mine = [np.zeros((2, 3), np.float32) for _ in range(2)]
    for scale in (1, 2, 3):
        given = [X * scale, Y]
        got = model.run(given, out=mine)
        assert [id(a) for a in got] == [id(a) for a in mine]
        np.testing.assert_array_equal(mine, [(X * scale + Y) * W, X * scale - Y])
        np.testing.assert_array_equal(model.read_output_row("sum", 1), ((X * scale + Y) * W)[1])
    wide = np.arange(12, dtype=np.float32).reshape(4, 3)
    with pytest.raises(ShapeError, match="needs shape"):  # of other sizes
        model.run([wide, wide], out=mine)
    np.testing.assert_array_equal(mine[1], X * 3 - Y)
    mine[0].flags.writeable = False
    with pytest.raises(rlx.errors.RlxError):
        model.run([X, Y], out=mine)
    mine[0].flags.writeable = True
    others = [np.zeros((2, 3), np.float32) for _ in range(2)]
    model.run([X, Y], out={"sum": others[0], "difference": others[1]})
    np.testing.assert_array_equal(others, [(X + Y) * W, X - Y])
    np.testing.assert_array_equal(model.run([X, Y], outputs=["difference", "sum"]), [X - Y, (X + Y) * W])


def test_out_and_outputs_go_the_native_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on with any arrays, for the same outputs in the same order, also of other known sizes."""
    g = rlx.Graph("native")
    x = g.input("x", (rlx.Dim("n", 1, 9), 3))
    y = rlx.tanh(x)
    g.output(y, name="y")
    g.output(rlx.exp(y) @ g.constant(W.T), name="z")
    model = rlx.compile(g, device="cpu")
    given = [np.full((n, 3), n / 4, np.float32) for n in (2, 5)]
    every = [model.run([a]) for a in given]
    wanted: list[Any] = [None, ["y"], ["z"], ["z", "y"], [1], ["z", "y", "z"], []]
    arrays = [None, (0,), (1,), (0, 1)]
    for chosen, known in itertools.product(wanted, arrays):
        own = None if known is None else {("y", "z")[n]: np.empty_like(every[0][n]) for n in known}
        model.run([given[0]], outputs=chosen, out=own)
    monkeypatch.setattr(model._executable, "run", None)
    for (size, chosen), known in itertools.product(itertools.product((0, 1), wanted), arrays):
        own = None if known is None else {("y", "z")[n]: np.empty_like(every[size][n]) for n in known}
        got = model.run([given[size]], outputs=chosen, out=own)
        for name, array in zip(["y", "z"] if chosen is None else chosen, got, strict=True):
            number = name if isinstance(name, int) else ("y", "z").index(name)
            np.testing.assert_array_equal(array, every[size][number])
            assert array is own[("y", "z")[number]] if own and known and number in known else array.flags.owndata
        for name, array in (own or {}).items():
            np.testing.assert_array_equal(array, every[size][("y", "z").index(name)])


def test_arrays_of_out_are_checked_in_every_call() -> None:
    """One that is given twice is refused, though each was written before; in another's place it is checked anew."""
    g = rlx.Graph("types")
    x = g.input("x", (4,))
    g.output(x * 2.0, "floats")
    g.output(rlx.cast(x, "i32"), "whole")
    model = rlx.compile(g, device="cpu")
    data = np.float32([1.5, 2.5, 3.5, 4.5])
    floats, whole = np.zeros(4, np.float32), np.zeros(4, np.int32)
    for _ in range(2):
        model.run([data], out=[floats, whole])
        np.testing.assert_array_equal(floats, data * 2)
    with pytest.raises(rlx.errors.RlxError):  # not cast in silence
        model.run([data], out=[whole, floats])
    other = two_in_two_out("cpu")
    first, second = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    for _ in range(2):
        other.run([X, Y], out=[first, second])
    with pytest.raises(OptionError, match="overlap"):
        other.run([X, Y], out=[first, first])
    other.run([X, Y], out=[second, first])
    np.testing.assert_array_equal([second, first], [(X + Y) * W, X - Y])
    both = np.zeros(11, np.float32)
    with pytest.raises(OptionError, match="overlap"):
        other.run([X, Y], out=[both[:6].reshape(2, 3), both[5:].reshape(2, 3)])
    for wrong in (first.astype(np.float64), first[:1], first.T, np.broadcast_to(first[0], (2, 3)), None):
        with pytest.raises(rlx.errors.RlxError):
            other.run([X, Y], out=[second, wrong, wrong] if wrong is None else [second, wrong])
    lying = np.asfortranarray(first)  # not as the native entry takes it
    other.run([X, Y], out=[second, lying])
    np.testing.assert_array_equal(lying, X - Y)


def test_out_by_position_and_by_name() -> None:
    """A mapping may have both; not for one output, and no others."""
    model = two_in_two_out("cpu")
    mine = [np.zeros((2, 3), np.float32) for _ in range(2)]
    for _ in range(2):
        got = model.run([X, Y], out={1: mine[1]})
        assert got[1] is mine[1]
        got = model.run([X, Y], out={"sum": mine[0], 1: mine[1]})
        assert [id(a) for a in got] == [id(a) for a in mine]
        np.testing.assert_array_equal(mine, [(X + Y) * W, X - Y])
        with pytest.raises(OptionError, match="'difference' is given by position and by name"):
            model.run([X, Y], out={"difference": mine[0], 1: mine[1]})
        for wrong in (2, True, "total", -1):
            with pytest.raises(NameNotFound, match="no output"):
                model.run([X, Y], out={wrong: mine[0]})
