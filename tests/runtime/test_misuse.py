"""Wrong arguments to public calls: each is an error of rlx that names the argument, never one from its inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import OptionError, RlxError

X = np.ones((5, 4), np.float32)
WRONG: dict[str, Any] = {
    "none": None,
    "int": -1,
    "float": float("nan"),
    "huge": 2**70,
    "set": {1, 2},
    "nested": [[1], [1, 2]],
    "bytes": b"\x00",
    "zero": "a\0b",
    "empty": "",
    "objects": np.array([None, 1], object),
    "class": int,
    "object": object(),
}


def graph() -> rlx.Graph:
    g = rlx.Graph("layer")
    x = g.input("x", (rlx.Dim("n", 1, 64), 4))
    s = g.state("s", (3,))
    y = rlx.tanh(x @ g.param("w", data=np.ones((4, 3), np.float32)))
    g.update(s, s + y.sum(axes=0))
    g.output(y, name="y")
    return g


@pytest.fixture(scope="module")
def model() -> rlx.CompiledGraph:
    return rlx.compile(graph(), device="cpu", threads=1)


def record(model: rlx.CompiledGraph, path: Any) -> None:
    with model.record(path) as recorder:
        recorder.run([X])


PATHS: dict[str, Callable[[rlx.CompiledGraph, Any], object]] = {
    "save": lambda m, path: m.save(path),
    "states.save": lambda m, path: m.states.save(path),
    "report": lambda m, path: m.report(path),
    "trace": lambda m, path: rlx.RunTrace.of("m", "cpu", ()).save(path),
    "record": record,
    "load": lambda m, path: rlx.load(path),
    "states.load": lambda m, path: m.states.load(path),
    "replay": rlx.replay,
    "estimate": lambda m, path: rlx.estimate(path),
}


@pytest.mark.parametrize("call", PATHS)
def test_a_path_that_is_none_or_a_folder_is_named(model: rlx.CompiledGraph, call: str, tmp_path: Path) -> None:
    for path in (*WRONG.values(), tmp_path, tmp_path / "absent" / "file", tmp_path / ("long" * 100)):
        with pytest.raises(RlxError):
            PATHS[call](model, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["save", "report", "trace", "record"])
def test_targets_are_checked_before_the_work(
    model: rlx.CompiledGraph, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run or made for a file that can't be written."""

    def begun(*args: Any, **options: Any) -> None:
        raise AssertionError("the work was begun")

    for work in ("runtime.artifact._add_graph", "runtime.report.page.write_report", "runtime.replay.Recorder"):
        monkeypatch.setattr(f"rlx.{work}", begun)
    monkeypatch.setattr(rlx.CompiledGraph, "profile", begun)
    for path, why in ((tmp_path, "folder"), (tmp_path / "none" / "page", "there is no folder")):
        with pytest.raises(OptionError, match=f"can't be written: .*{why}"):
            model.trace([X], path) if call == "trace" else PATHS[call](model, path)


@pytest.mark.parametrize("call", ["save", "states.save", "report", "trace", "record"])
def test_writing_keeps_links_and_devices(model: rlx.CompiledGraph, call: str, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    PATHS[call](model, link)
    assert link.is_symlink()
    assert target.stat().st_size > 0
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if call == "trace":  # short enough for a pipe that nobody empties
            PATHS[call](model, pipe)
            assert os.read(reader, 100000).startswith(b"{")
        else:
            with pytest.raises(RlxError, match="can't be written"):
                PATHS[call](model, "/dev/full")
        assert pipe.is_fifo()
    finally:
        os.close(reader)


CALLS: dict[str, Callable[[rlx.CompiledGraph, Any], object]] = {
    "set_param": lambda m, v: m.set_param(v, X),
    "set_param convert": lambda m, v: m.set_param("w", v, convert=True),
    "set_extent": lambda m, v: m.set_extent(v, 3),
    "states": lambda m, v: m.states[v],
    "bind": lambda m, v: m.states.bind(v, X),
    "run_feed": lambda m, v: m.run_feed([X], v, "y"),
    "explain": lambda m, v: m.explain(v),
    "lora": lambda m, v: rlx.lora(v, rank=1),
    "lora rank": lambda m, v: rlx.lora(graph(), rank=v),
    "lora slots": lambda m, v: rlx.lora(graph(), rank=1, slots=v),
    "lora targets": lambda m, v: rlx.lora(graph(), rank=1, targets=v),
    "bind_cache": lambda m, v: rlx.bind_cache(v, 4),
    "transform": lambda m, v: rlx.Session(device="cpu").load(graph(), transform=lambda g: v),
    "graph name": lambda m, v: rlx.Graph(v) if not isinstance(v, str) else rlx.Graph("g").input("x", v),
    "shape": lambda m, v: rlx.Graph("g").input("x", v),
    "encoding": lambda m, v: rlx.Graph("g").param("x", (32,), encoding=0 if v is None else v),
    "data": lambda m, v: rlx.Graph("g").param("x", (2,), data=0 if v is None else v),
    "initial": lambda m, v: rlx.Graph("g").state("x", (2,), initial=0 if v is None else v),
    "row": lambda m, v: m.read_output_row("y", True if isinstance(v, int) else v),
    "half a surrogate pair": lambda m, v: rlx.Graph("\udc80"),
    "such an input": lambda m, v: rlx.Graph("g").input("\udc80", (2,)),
    "such an output": lambda m, v: (g := graph()).output(g.inputs[0], "\udc80"),
    "such a dim": lambda m, v: rlx.Dim("\udc80"),
    "reshape": lambda m, v: graph().inputs[0].reshape(1.5 if isinstance(v, int) else v, 4),
    "sum": lambda m, v: graph().inputs[0].sum(9 if v is None or isinstance(v, int) else v),
    "np.transpose": lambda m, v: np.transpose(graph().inputs[0], 1.5 if isinstance(v, int) or v is None else v),
    "np.squeeze": lambda m, v: np.squeeze(graph().inputs[0], (v,)),
    "np.expand_dims": lambda m, v: np.expand_dims(graph().inputs[0], (9 if isinstance(v, int) else v,)),
    "np.tile": lambda m, v: np.tile(graph().inputs[0], (1, 1.5 if isinstance(v, int) else v)),
    "np.roll": lambda m, v: np.roll(graph().inputs[0], 1.5 if isinstance(v, int) else v, 1),
    "np.cumsum": lambda m, v: np.cumsum(graph().inputs[0], "0" if v is None or isinstance(v, int) else v),
    "top_k": lambda m, v: rlx.top_k(graph().inputs[0], v),
    "transpose": lambda m, v: rlx.transpose(graph().inputs[0], [v]),
    "reduce_sum": lambda m, v: rlx.reduce_sum(graph().inputs[0], axes=[9 if isinstance(v, int) else v]),
    "precision": lambda m, v: rlx.CompileOptions(precision=v),
    "over_budget": lambda m, v: rlx.CompileOptions(over_budget=v),
    "search": lambda m, v: rlx.CompileOptions(search="most" if isinstance(v, int) else v),
    "cache_dir": lambda m, v: rlx.CompileOptions(cache_dir="" if v is None else v),
    "busy": lambda m, v: rlx.CompileOptions(busy=v),
    "trap": lambda m, v: rlx.CompileOptions(trap=v),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_an_error_of_rlx(model: rlx.CompiledGraph, call: str) -> None:
    for wrong in WRONG.values():
        with pytest.raises(RlxError):
            CALLS[call](model, wrong)


TAKES_ARRAYS: dict[str, Callable[[rlx.CompiledGraph, Any], object]] = {
    "run": lambda m, x: m.run([x]),
    "run_views": lambda m, x: m.run_views([x]),
    "run_slots": lambda m, x: m.run_slots(x),
    "call": lambda m, x: m(x=x),
    "submit": lambda m, x: m.submit([x]),
    "profile": lambda m, x: m.profile([x]),
    "in a list": lambda m, x: m.run([[*x]]),
    "set_param": lambda m, x: m.set_param("w", x),
    "convert": lambda m, x: m.set_param("w", x, convert=True),
    "states": lambda m, x: m.states["s"].write(x),
    "registry": lambda m, x: rlx.WeightRegistry().add("w", x),
    "param": lambda m, x: rlx.Graph("g").param("x", data=x),
    "initial": lambda m, x: rlx.Graph("g").state("x", (5, 4), initial=x),
    "constant": lambda m, x: rlx.Graph("g").constant(x),
    "to_dlpack": lambda m, x: rlx.to_dlpack(x),
    "operand": lambda m, x: graph().inputs[0] + x,
    "concatenate": lambda m, x: np.concatenate([graph().inputs[0], x]),
    "jit": lambda m, x: rlx.jit(lambda a: a + 1, device="cpu")(x),
    "jit, in a dict": lambda m, x: rlx.jit(lambda a: a["x"] + 1, device="cpu")({"x": x}),
    "jit, closed over": lambda m, x: rlx.jit(lambda a: a + x, device="cpu")(X),
    "scan": lambda m, x: rlx.jit(lambda a: rlx.scan(lambda c, y: (c + y, c), a, x), device="cpu")(X[0]),
}


@pytest.mark.parametrize("call", TAKES_ARRAYS)
def test_masks_are_refused(model: rlx.CompiledGraph, call: str) -> None:
    model.run_slots(X)  # from now on native code looks first
    with pytest.raises(rlx.errors.DTypeError, match="the mask would be lost"):
        TAKES_ARRAYS[call](model, np.ma.masked_array(X, mask=X > 0))


def test_lists_are_searched_for_masks_however_they_nest(model: rlx.CompiledGraph) -> None:
    masked = np.ma.masked_array(X[0], mask=X[0] > 0)
    own: list[Any] = [[*X[1]]]
    own += [own, own]
    with pytest.raises(rlx.errors.RlxError):
        rlx.Graph("g").constant(own)
    with pytest.raises(rlx.errors.DTypeError, match="the mask would be lost"):
        model.run([[X[0], (1.0, [masked])]])


def test_other_subclasses_of_arrays_are_read_as_arrays(model: rlx.CompiledGraph, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    mapped[...] = X
    (wanted,) = model.run([X], outputs=["y"])
    for x in (mapped, X.view(np.matrix), X.view(np.recarray), X.view(np.dtype(X.dtype, metadata={"unit": "m"}))):
        for made in (model.run([x]), model.run_slots(x), model.run_slots(x)):
            assert type(made[0]) is np.ndarray
            np.testing.assert_array_equal(made[0], wanted)


def test_repeated_memory_is_refused(model: rlx.CompiledGraph) -> None:
    one = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (5, 3), (0, 4), writeable=True)
    with pytest.raises(rlx.errors.OptionError, match="repeats"):
        model.run([X], out={"y": one})
    windows = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (5, 3), (4, 4), writeable=True)
    with pytest.raises(rlx.errors.OptionError, match="repeats"):
        model.run([X], out={"y": windows})
    gaps = np.zeros((10, 6), np.float32)[::-2, ::-2]
    rows = X * np.arange(5, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(model.run([rows], out={"y": gaps})[0], model.run([rows])[0])


def test_the_device_is_what_was_compiled_for(model: rlx.CompiledGraph) -> None:
    with pytest.raises(AttributeError):
        model.device = "reference"  # type: ignore[misc]


def test_states_of_an_endless_device_are_refused(model: rlx.CompiledGraph) -> None:
    with pytest.raises(rlx.errors.ModelFormatError, match="is a device; expected a file"):
        model.states.load("/dev/zero")


def test_a_registry_that_is_none_is_refused() -> None:
    with pytest.raises(rlx.errors.OptionError, match="registry"):
        rlx.compile(graph(), device="cpu", registry={})  # type: ignore[arg-type]
    with pytest.raises(rlx.errors.DTypeError, match="array"):
        rlx.Graph("g").constant([[1], [1, 2]])
