"""States between runs: values, feeds, bound inputs, clones and files, on every device that has them."""

from __future__ import annotations

import copy
import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growth import growth

import rlx
from rlx.backends import backend_named
from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, ModelFormatError, NameNotFound, OptionError, ShapeError
from rlx.ops.control import If, While

DEVICES = ["cpu", "interp", "reference"]
ANY = [*DEVICES, *(name for name in ("xla", "mlx") if backend_named(name).available().present)]  # without slots too
ONE = np.ones(3, np.float32)


def counter(device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    """total += x; gives the new total and the old one."""
    g = rlx.Graph("counter")
    x, s = g.input("x", (3,)), g.state("total", (3,), initial=np.full(3, 10, np.float32))
    new = s + x
    g.update(s, new)
    g.output(new, name="new")
    g.output(s, name="old")
    return rlx.compile(g, device=device, **options)


def doubler(device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    """y = 2 h + x, with h an input: state comes from outside. And z = 3 h."""
    g = rlx.Graph("doubler")
    n = rlx.Dim("n", 1, 8)
    h, x = g.input("h", (n,)), g.input("x", (n,))
    g.output(h * 2.0 + x, name="y")
    g.output(h * 3.0, name="z")
    return rlx.compile(g, device=device, **options)


@pytest.mark.parametrize("device", ANY)
def test_a_state_is_read_written_and_reset(device: str) -> None:
    model = counter(device)
    state = model.states["total"]
    assert list(model.states) == ["total"]
    assert state.spec.shape == (3,)
    np.testing.assert_array_equal(state.read(), ONE * 10)
    assert [np.asarray(model.run([ONE])[0])[0] for _ in range(2)] == [11, 12]
    kept = state.read()
    mine = np.arange(3, dtype=np.float32)
    state.write(mine)
    mine[:] = 99  # the caller's own again
    np.testing.assert_array_equal(model.run([ONE], outputs=["old"])[0], np.arange(3))
    np.testing.assert_array_equal(kept, ONE * 12)
    state.reset()
    np.testing.assert_array_equal(model.run([ONE])[1], ONE * 10)
    with pytest.raises(DTypeError, match="total"):
        state.write(np.zeros(3))
    with pytest.raises(ShapeError, match="total"):
        state.write(np.zeros(4, np.float32))
    with pytest.raises(NameNotFound, match="no state 'tot'"):
        model.states["tot"]
    np.testing.assert_array_equal(state.read(), ONE * 11)


@pytest.mark.parametrize("device", ANY)
def test_no_outputs_runs_for_the_states_alone(device: str) -> None:
    model = counter(device)
    assert model.run([ONE], outputs=[]) == []
    np.testing.assert_array_equal(model.states["total"].read(), ONE * 11)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bound_input_may_be_left_out(device: str) -> None:
    model = doubler(device)
    held = ONE * 5
    model.states.bind("h", held)
    held[:] = 0  # copied when it was bound
    assert list(model.states) == ["h"]
    calls: list[Callable[[], Any]] = [
        lambda: model.run({"x": ONE})[0],
        lambda: model.run([ONE])[0],
        lambda: model(x=ONE)["y"],
        lambda: model.run_views({"x": ONE})[0],
        lambda: model.run_slots(ONE)[0],
        lambda: model.run_slots(ONE)[0],
    ]
    for call in calls:
        np.testing.assert_array_equal(call(), ONE * 11)
    np.testing.assert_array_equal(model.run({"x": ONE, "h": ONE})[0], ONE * 3)  # for this run only
    np.testing.assert_array_equal(model.run_slots(ONE, ONE)[0], ONE * 3)
    for call in calls:
        np.testing.assert_array_equal(call(), ONE * 11)
    model.states["h"].write(ONE * 6)
    np.testing.assert_array_equal(model.run_slots(ONE)[0], ONE * 13)
    model.states["h"].reset()
    np.testing.assert_array_equal(model.run_slots(ONE)[0], ONE * 11)
    model.states.bind("h", np.ones(4, np.float32))  # another length
    np.testing.assert_array_equal(model.run({"x": np.ones(4, np.float32)})[0], np.full(4, 3))
    model.states.bind("h", None)
    with pytest.raises(NameNotFound, match="'h' is missing"):
        model.run({"x": ONE})
    assert not model.states


def test_what_is_bound_is_checked_when_it_is_bound() -> None:
    model = doubler()
    with pytest.raises(DTypeError, match="'h'"):
        model.states.bind("h", np.zeros(3))
    with pytest.raises(ShapeError, match="'h'"):
        model.states.bind("h", np.zeros((3, 1), np.float32))
    with pytest.raises(ExecutionError, match="outside its bounds"):
        model.states.bind("h", np.zeros(9, np.float32))
    with pytest.raises(NameNotFound, match="no input 'k'"):
        model.states.bind("k", ONE)
    assert not model.states


@pytest.mark.parametrize("device", DEVICES)
def test_a_fed_output_is_the_state_of_the_next_run(device: str) -> None:
    model = doubler(device)
    model.states.bind("h", ONE * 0)
    model.states["h"].feed("y")
    want = ONE * 0
    for call in [lambda: model.run_slots(ONE), lambda: model.run({"x": ONE}), lambda: model.run_views([ONE])] * 3:
        z = want * 3
        want = want * 2 + 1
        made = call()
        np.testing.assert_array_equal(made[0], want)
        np.testing.assert_array_equal(made[1], z)
        np.testing.assert_array_equal(model.states["h"].read(), want)
        np.testing.assert_array_equal(model.read_output_row("y", 0), want)
    mine = np.zeros(3, np.float32)
    want = want * 2 + 1
    assert model.run({"x": ONE}, out={"y": mine})[0] is mine
    np.testing.assert_array_equal(mine, want)
    np.testing.assert_array_equal(model.run({"x": ONE, "h": ONE})[0], ONE * 3)  # given for this run; fed all the same
    np.testing.assert_array_equal(model.run_slots(ONE)[0], ONE * 7)
    assert np.asarray(model.run({"x": ONE}, outputs=["z"])[0])[0] == 21  # y is made for the feed
    np.testing.assert_array_equal(model.states["h"].read(), ONE * 15)
    model.states["h"].write(ONE)
    np.testing.assert_array_equal(model.run_slots(ONE)[0], ONE * 3)
    model.states["h"].feed(None)
    assert [np.asarray(model.run_slots(ONE)[0])[0] for _ in range(2)] == [7, 7]
    model.states["h"].reset()
    assert np.asarray(model.run_slots(ONE)[0])[0] == 1


def test_feeds_hold_over_other_shapes_and_failed_runs() -> None:
    g = rlx.Graph("length")
    n = rlx.Dim("n", 1, 64)
    x, d, h = g.input("x", (n,)), g.input("d", (), "i32"), g.input("h", (2,))
    quotient = rlx.div(g.constant(np.int32(8)), d)
    g.output(h + x.sum() + quotient.cast("f32"), name="y")
    model = rlx.compile(g, device="cpu")
    model.states.bind("h", np.zeros(2, np.float32))
    model.states["h"].feed("y")
    total = 0.0
    for length in (1, 5, 1, 7, 5, 1):
        total += length + 4
        assert model.run_slots(np.ones(length, np.float32), np.int32(2))[0][0] == total
        with pytest.raises(ExecutionError, match="division"):
            model.run_slots(np.ones(length, np.float32), np.int32(0))
        assert model.states["h"].read()[0] == total


def test_two_feeds_views_and_repeats() -> None:
    """An output that is a part of a buffer, or is shown twice, is copied; the others change places."""
    g = rlx.Graph("two")
    a, b, c = (g.input(name, (2, 2)) for name in "abc")
    x = g.input("x", (2, 2))
    both = rlx.tanh(a + x)
    g.output(both, name="a1")
    g.output(rlx.exp(b) * 0.25, name="b1")
    g.output((c + 1.0).reshape(4).reshape(2, 2), name="c1")
    g.output(both.reshape(4), name="flat")
    model, reference = rlx.compile(g, device="cpu"), rlx.compile(g, device="reference")
    for one in (model, reference):
        for name in "abc":
            one.states.bind(name, np.full((2, 2), 0.5, np.float32))
            one.states[name].feed(name + "1")
    rng = np.random.default_rng(2)
    for turn in range(5):
        x_now = rng.standard_normal((2, 2)).astype(np.float32)
        if turn == 3:
            model.states["b"].feed(None)
            reference.states["b"].feed(None)
        for got, want in zip(model.run_slots(x_now), reference.run([x_now]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
        for name in "abc":
            np.testing.assert_allclose(model.states[name].read(), reference.states[name].read(), rtol=1e-6)


def test_what_can_not_be_fed() -> None:
    model = counter()
    with pytest.raises(OptionError, match="updated by the graph"):
        model.states["total"].feed("new")
    model = doubler()
    model.states.bind("h", np.zeros(3, np.float32))
    model.states.bind("x", np.zeros(3, np.float32))
    model.states["h"].feed("y")
    with pytest.raises(OptionError, match="fed to 'h' already"):
        model.states["x"].feed("y")
    with pytest.raises(NameNotFound, match="no output 'w'"):
        model.states["h"].feed("w")
    g = rlx.Graph("types")
    s, t = g.input("s", (3,)), g.input("t", (4,), "i32")
    g.output(s + 1.0, name="u")
    g.output(t + 1, name="v")
    model = rlx.compile(g, device="cpu")
    model.states.bind("s", ONE)
    model.states.bind("t", np.zeros(4, np.int32))
    with pytest.raises(DTypeError, match="'s'"):
        model.states["s"].feed("v")
    with pytest.raises(DTypeError, match="'t'"):
        model.states["t"].feed("u")


def test_run_feed() -> None:
    model = doubler()
    model.states.bind("h", ONE)
    assert [model.run_feed({"x": ONE}, "h", "y")[0] for _ in range(3)] == [3, 7, 15]
    assert model.run({"x": ONE})[0][0] == 31 == model.run({"x": ONE})[0][0]


@pytest.mark.parametrize(
    "duplicate", [lambda m: m.clone(), copy.copy, copy.deepcopy], ids=["clone", "copy", "deepcopy"]
)
def test_a_clone_has_copies_of_states_bound_inputs_and_feeds(duplicate: Any) -> None:
    model = counter()
    model.run([ONE])
    other = duplicate(model)
    assert [model.run([ONE])[0][0] for _ in range(2)] == [12, 13]
    assert other.run([ONE])[0][0] == 12
    assert model.clone(fresh=True).run([ONE])[0][0] == 11
    other.states["total"].reset()
    assert (model.states["total"].read()[0], other.states["total"].read()[0]) == (13, 10)
    fed = doubler()
    fed.states.bind("h", ONE)
    fed.states["h"].feed("y")
    fed.run({"x": ONE})
    twin = duplicate(fed)
    assert [fed.run_slots(ONE)[0][0] for _ in range(2)] == [7, 15]
    assert [twin.run_slots(ONE)[0][0] for _ in range(2)] == [7, 15]
    assert not fed.clone(fresh=True).states


@pytest.mark.parametrize("device", ANY)
def test_states_are_saved_and_loaded(device: str, tmp_path: Path) -> None:
    path = tmp_path / "states"
    g = rlx.Graph("kinds")
    x = g.input("x", (2,), "bf16")
    s = g.state("s", (2,), "bf16")
    e = g.state("empty", (0, 3), "i64")
    g.update(s, s + x)
    g.output(s.cast("f32"), name="y")
    g.output(e, name="e")
    model = rlx.compile(g, device=device)
    bf16 = np.asarray(model.states["s"].read()).dtype
    for _ in range(3):
        model.run([np.ones(2, bf16)])
    model.states.save(path)
    model.run([np.ones(2, bf16)])
    model.states.load(path)
    assert np.asarray(model.states["s"].read()).tolist() == [3, 3]
    bound, other = doubler(device), doubler(device)
    bound.states.bind("h", ONE * 4)
    bound.states.save(path)
    other.states.load(path)
    assert np.asarray(other.run({"x": ONE})[0])[0] == 9
    with pytest.raises(NameNotFound, match="no state 's'"):
        model.states.load(path)
    assert np.asarray(model.states["s"].read()).tolist() == [3, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["states"]


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    model = counter()
    path = tmp_path / "states"
    model.run([ONE])
    model.states.save(path)
    whole = path.read_bytes()
    with pytest.raises(ModelFormatError, match="can't be read"):
        model.states.load(tmp_path / "absent")
    for damaged in (b"", b"PK", whole[:-30], whole[:60], whole.replace(b'"version": 1', b'"version": 7')):
        path.write_bytes(damaged)
        with pytest.raises(ModelFormatError, match="states"):
            model.states.load(path)
    assert model.states["total"].read()[0] == 11


@pytest.mark.parametrize(
    "shape",
    [[-1], [1.0], [True], "1", 1, None, {"0": 1}, [[1]], [1] * 65, [1, 1 << 62, 4], [2], [0], [1, 0], [1 << 70]],
)
def test_shapes_of_a_file_are_not_believed(shape: Any, tmp_path: Path) -> None:
    """Every length is a whole number from 0 on, and their product is that of the entry: else nothing is changed."""
    model = counter()
    path, other = tmp_path / "states", tmp_path / "other"
    model.run([ONE])
    model.states.save(path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        header = json.loads(old.read("rlx-states.json"))
        assert [entry["shape"] for entry in header["states"].values()] == [[3]]
        header["states"]["total"]["shape"] = shape
        new.writestr("rlx-states.json", json.dumps(header))
        new.writestr("0.bin", old.read("0.bin"))
    with pytest.raises(ModelFormatError, match="state 'total'"):
        model.states.load(other)
    assert model.states["total"].read()[0] == 11


def heads(device: str = "cpu") -> tuple[rlx.Graph, rlx.CompiledGraph]:
    """One decoding step of a layer: K and V of 1,024 positions, of which each step writes one."""
    g = rlx.Graph("decode")
    b, h, length, d = 1, 2, 1024, 16
    x, at = g.input("x", (b, h, 1, d)), g.input("at", (), "i64")
    wk, wv = g.param("wk", (d, d)), g.param("wv", (d, d))
    keys, values = g.state("keys", (b, h, length, d)), g.state("values", (b, h, length, d))
    k = rlx.dynamic_update_slice(keys, x @ wk, at, axis=2)
    v = rlx.dynamic_update_slice(values, x @ wv, at, axis=2)
    g.update(keys, k)
    g.update(values, v)
    seen = rlx.less_equal(g.constant(np.arange(length)), at)
    bias = rlx.where(seen, g.constant(np.float32(0)), g.constant(np.float32(-np.inf)))
    g.output(rlx.attention(x, k, v, bias.reshape(1, 1, 1, length)), name="y")
    model = rlx.compile(g, device=device)
    rng = np.random.default_rng(3)
    model.set_params({name: rng.standard_normal((d, d)).astype(np.float32) / 4 for name in ("wk", "wv")})
    return g, model


def test_a_thousand_decoding_steps_touch_their_rows_only_and_allocate_nothing() -> None:
    g, model = heads()
    rng = np.random.default_rng(4)
    weights = {name: rng.standard_normal((16, 16)).astype(np.float32) / 4 for name in ("wk", "wv")}
    model.set_params(weights)
    program = model.compilation.program
    assert program is not None
    assert not program.copied
    writers = [k for k in program.run if any(b.base.kind == "state" for b in k.writes())]
    assert [k.bytes_written({}) for k in writers] == [2 * 16 * 4] * 2  # one row a head, of 1,024
    steps = rng.standard_normal((1000, 1, 2, 1, 16)).astype(np.float32)
    places = [np.array(i, np.int64) for i in range(1000)]
    number, outputs = itertools.count(), {}

    def hundred() -> None:
        for _ in range(100):
            at = next(number)
            result = model.run_slots(steps[at], places[at])
            if at in (3, 500, 999):
                outputs[at] = np.array(result[0])

    hundred()
    blocks, native = growth(hundred, 9)
    assert blocks < 20
    assert native < 1000
    keys, values = (np.zeros((1, 2, 1024, 16), np.float32) for _ in range(2))
    keys[:, :, :1000] = np.concatenate([s @ weights["wk"] for s in steps], axis=2)
    values[:, :, :1000] = np.concatenate([s @ weights["wv"] for s in steps], axis=2)
    np.testing.assert_allclose(model.states["keys"].read(), keys, rtol=1e-5, atol=1e-5)
    assert len(outputs) == 3
    for at, got in outputs.items():
        states = {n: np.where(np.arange(1024)[:, None] < at, a, 0) for n, a in (("keys", keys), ("values", values))}
        want = run_graph(g, {"x": steps[at], "at": places[at]}, weights, states)["y"]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_estimates_plans_and_explain_count_states() -> None:
    _, model = heads()
    size = 2 * 2 * 1024 * 16 * 4
    needs = model.needs
    assert needs is not None
    assert needs.states == size
    assert needs.total >= size
    assert "states" in str(needs)
    assert "keys" in model.explain()
    assert "in place" in model.explain()
    g = rlx.Graph("shift")
    s, x = g.state("s", (4, 2)), g.input("x", (1, 2))
    g.update(s, rlx.concat(rlx.slice(s, starts=(1, 0), sizes=(3, 2), steps=(1, 1)), x, axis=0))
    model = rlx.compile(g, device="cpu")
    assert "copy of 32 B" in model.explain("plan")
    assert rlx.estimate(g, device="cpu").state_bytes == 32


def test_attention_reads_as_many_rows_of_a_state_as_the_data_say() -> None:
    """The length is a number of the run: one compile serves every length, and the cache is read where it lies."""
    g = rlx.Graph("decode")
    b, h, most, d = 1, 2, 64, 16
    n = rlx.Dim("length", 0, most)
    x, at = g.input("x", (b, h, 1, d)), g.input("at", (), "i64")
    rlx.extent(at + g.constant(np.int64(1)), count=n)
    keys, values = g.state("keys", (b, h, most, d)), g.state("values", (b, h, most, d))
    caches = []
    for state, rows in ((keys, x * 2.0), (values, rlx.tanh(x))):
        new = rlx.dynamic_update_slice(state, rows, at, axis=2)
        g.update(state, new)
        caches.append(rlx.slice(new, starts=(0, 0, 0, 0), sizes=(b, h, n, d), steps=(1, 1, 1, 1)))
    g.output(rlx.attention(x, *caches), name="y")
    model = rlx.compile(g, device="cpu")
    program = model.compilation.program
    assert program is not None
    (attention,) = [k for k in program.run if k.kind == "attention"]
    assert {b.base.name for b in attention.reads()} == {"x", "keys", "values"}
    states: dict[str, Any] = {}
    rng = np.random.default_rng(5)
    for place in (0, 1, 2, 3, 63, 7):
        given = {"x": rng.standard_normal((b, h, 1, d)).astype(np.float32), "at": np.array(place)}
        want = run_graph(g, given, states=states)["y"]
        np.testing.assert_allclose(model.run(given)[0], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ExecutionError):
        model.run({**given, "at": np.array(64)})


@pytest.mark.parametrize("device", DEVICES)
def test_states_in_branches_and_loops(device: str) -> None:
    """The new value comes out of a branch, and out of a loop that started from the old one."""
    g = rlx.Graph("flow")
    c, x, s, t = g.input("c", (), "bool"), g.input("x", (3,)), g.state("s", (3,)), g.state("t", (3,))
    regions = []
    for scale in (2.0, 3.0):
        region = rlx.Graph("branch")
        a, b = region.input("s", (3,)), region.input("x", (3,))
        region.output(a * scale + b, name="y")
        regions.append(region)
    (new,) = g.add(If(), c, s, x, regions=regions)
    g.update(s, new)
    cond, body = rlx.Graph("cond"), rlx.Graph("body")
    for region in (cond, body):
        region.input("t", (3,))
    cond.output(rlx.less(cond.inputs[0].max(), cond.constant(np.float32(5))), name="again")
    body.output(body.inputs[0] + 2.0, name="t")
    (last,) = g.add(While(1), t, regions=[cond, body])
    g.update(t, last - 1.0)
    g.output(s + t, name="before")
    model, states = rlx.compile(g, device=device), {}
    for turn in range(4):
        given = {"c": np.bool_(turn % 2), "x": np.full(3, turn, np.float32)}
        want = run_graph(g, given, states=states)
        np.testing.assert_array_equal(model.run(given)[0], want["before"])
        for name in ("s", "t"):
            np.testing.assert_array_equal(model.states[name].read(), states[name])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_each_entry_go_to_its_own_place(device: str) -> None:
    """Starts for each batch entry, over heads whose rows lie side by side: loops over both must not become one."""
    g = rlx.Graph("places")
    x, at = g.input("x", (3, 2, 1, 8)), g.input("at", (3,), "i64")
    keys = g.state("keys", (3, 2, 16, 8))
    g.update(keys, rlx.dynamic_update_slice(keys, x, at, axis=2))
    g.output(x * 2.0, "y")
    model = rlx.compile(g, device=device)
    want = np.zeros((3, 2, 16, 8), np.float32)
    for step, places in enumerate(([1, 2, 0], [3, 15, 7])):
        rows = np.random.default_rng(step).standard_normal((3, 2, 1, 8)).astype(np.float32)
        model.run({"x": rows, "at": np.array(places)})
        for b, place in enumerate(places):
            want[b, :, place] = rows[b, :, 0]
        np.testing.assert_array_equal(model.states["keys"].read(), want)
