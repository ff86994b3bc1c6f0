"""Params: what set_param takes, copies, keeps mapped and gives up, and what it says."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growth import traced_growth

import rlx
from rlx.errors import DTypeError, NameNotFound, ShapeError

DEVICES = ["cpu", "interp", "reference"]
X = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
W = np.random.default_rng(2).standard_normal((64, 48)).astype(np.float32)
B = np.random.default_rng(3).standard_normal(48).astype(np.float32)


def dense(device: str = "cpu", rows: Any = 5, **options: Any) -> rlx.CompiledGraph:
    """w is packed for the matrix product, b is read where it lies, w and s are read together in `prepare`."""
    g = rlx.Graph("dense")
    x, w, b = g.input("x", (rows, 64)), g.param("w", (64, 48)), g.param("b", (48,))
    g.output(x @ w + b, name="y")
    return rlx.compile(g, device=device, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_the_caller_may_change_or_free_the_array(device: str) -> None:
    model = dense(device)
    w, b = W.copy(), B.copy()
    model.set_params({"w": w, "b": b})
    w[...] = b[...] = np.nan
    del w, b
    np.testing.assert_allclose(model.run([X])[0], X @ W + B, rtol=1e-4, atol=1e-4)
    w = 2 * W
    model.set_param("w", w)
    w[...] = np.nan
    np.testing.assert_allclose(model.run([X])[0], X @ (2 * W) + B, rtol=1e-4, atol=1e-4)
    model.set_param("b", np.zeros_like(B))
    np.testing.assert_allclose(model.run_slots(X)[0], X @ (2 * W), rtol=1e-4, atol=1e-4)


def test_any_layout_and_read_only_arrays_are_copied() -> None:
    model = dense()
    w = np.asfortranarray(W)
    w.flags.writeable = False  # but its owner can make it writable again
    model.set_params({"w": w, "b": B[::-1].copy()[::-1]})
    w.flags.writeable = True
    w[...] = np.nan
    np.testing.assert_allclose(model.run([X])[0], X @ W + B, rtol=1e-4, atol=1e-4)
    model.set_params({"w": W.tolist(), "b": memoryview(B)})
    np.testing.assert_allclose(model.run([X])[0], X @ W + B, rtol=1e-4, atol=1e-4)


def test_packed_weights_are_not_kept_twice() -> None:
    """The copy of a param that only its packing reads is freed once it has been packed."""
    g = rlx.Graph("big")
    x, w = g.input("x", (1, 1024)), g.param("w", (1024, 1024))
    g.output(x @ w, name="y")
    model = rlx.compile(g, device="cpu", threads=1)
    x_now = np.ones((1, 1024), np.float32)
    w = np.ones((1024, 1024), np.float32)
    value = itertools.count(1)

    def change() -> None:
        w.fill(next(value))
        model.set_param("w", w)
        assert model.run_slots(x_now)[0][0, 0] == 1024 * w[0, 0]

    assert traced_growth(change)[0] < w.nbytes / 2


def test_mapped_weights_stay_mapped(tmp_path: Path) -> None:
    """A read-only array over a file is read where it lies: no copy, and the mapping lives as long as it is used."""
    path = tmp_path / "weights"
    b = np.arange(1 << 20, dtype=np.float32)
    b.tofile(path)
    g = rlx.Graph("mapped")
    x, p = g.input("x", (1 << 20,)), g.param("b", (1 << 20,))
    g.output((x + p).max(), name="y")
    model = rlx.compile(g, device="cpu")
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    shown = np.frombuffer(mapping, np.float32)
    alive = weakref.ref(mapping)
    model.set_param("b", shown)
    del shown, mapping
    x_now = np.zeros(1 << 20, np.float32)
    assert model.run([x_now])[0] == b.max()
    assert alive() is not None
    with path.open("r+b") as file:  # it is the file that is read, not a copy
        file.seek(0)
        file.write(np.float32(2e9).tobytes())
        file.flush()
        os.fsync(file.fileno())
    assert model.run_slots(x_now)[0] == np.float32(2e9)
    model.set_param("b", b)
    model.run_slots(x_now)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("device", DEVICES)
def test_bad_params(device: str) -> None:
    model = dense(device)
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"v": W}, NameNotFound, "no param 'v'; there are 'w', 'b'"),
        ({"w": W.T}, ShapeError, r"param 'w'.*expected shape \(64, 48\), got \(48, 64\)"),
        ({"w": W.astype(np.float64)}, DTypeError, "param 'w'.*expected elements of type f32, got float64"),
        ({"w": 2 * W, "b": B[:1]}, ShapeError, "param 'b'"),
    ]
    for params, error, text in cases:
        with pytest.raises(error, match=text):
            model.set_params(params)
    with pytest.raises(NameNotFound, match="params have no value yet: 'b', 'w'"):
        model.run([X])
    model.set_param("w", W)
    with pytest.raises(NameNotFound, match="no value yet: 'b'"):
        model.run_slots(X)
    model.set_param("b", B)
    with pytest.raises(ShapeError):
        model.set_params({"w": 2 * W, "b": B[:1]})  # nothing is set when one does not fit
    np.testing.assert_allclose(model.run([X])[0], X @ W + B, rtol=1e-4, atol=1e-4)


def test_setting_a_param_of_a_clone_changes_that_clone_only() -> None:
    """Whether it is set before the first run, after it, or before all params have values; of original and clone."""
    model = dense(rows=rlx.Dim("rows", 1, 64))
    other = model.clone()
    with pytest.raises(NameNotFound, match="no value yet"):
        other.run([X])
    other.set_params({"w": W, "b": B})
    with pytest.raises(NameNotFound, match="no value yet: 'b', 'w'"):
        model.run([X])
    model.set_params({"w": 2 * W})
    third, fourth = other.clone(), other.clone(fresh=True)
    third.set_param("b", 0 * B)  # before any of them has run
    fourth.set_param("w", 3 * W)
    with pytest.raises(NameNotFound, match="no value yet: 'b'"):
        model.run([X])
    model.set_param("b", -B)
    wants = [(model, 2 * W, -B), (other, W, B), (third, W, 0 * B), (fourth, 3 * W, B)]
    for _ in range(2):
        for m, w, b in wants:
            np.testing.assert_allclose(m.run([X])[0], X @ w + b, rtol=1e-4, atol=1e-4)
    fifth = third.clone()
    other.set_param("w", 5 * W)  # what others still read is not written over
    fifth.set_param("w", 7 * W)
    third.set_param("w", 6 * W)
    wants[1:3] = [(other, 5 * W, B), (third, 6 * W, 0 * B)]
    for m, w, b in (*wants, (fifth, 7 * W, 0 * B)):
        np.testing.assert_allclose(m.run_slots(X)[0], X @ w + b, rtol=1e-4, atol=1e-4)


def test_clones_share_what_was_not_set() -> None:
    """Packed weights of clones are the same memory, until one sets the param that they are made of."""
    model = dense()
    model.set_params({"w": W, "b": B})
    other = model.clone()
    other.set_param("b", 0 * B)
    for m in (model, other):
        m.run([X])
    assert prepared(other) == prepared(model)
    other.set_param("w", 2 * W)
    other.run([X])
    assert not prepared(other) & prepared(model)
    assert prepared(other.clone()) == prepared(other)


def prepared(model: Any) -> set[int]:
    """The addresses of packed weights."""
    return {a.ctypes.data for b, a in model._executable.shared.memory.items() if b.kind == "prepared"}


def test_params_given_in_the_graph_and_without_inputs() -> None:
    g = rlx.Graph("given")
    w = g.param("w", (64, 48), data=W)
    b = g.param("b", (48,))
    g.output((w + b).sum(0), name="y")
    model = rlx.compile(g, device="cpu")
    with pytest.raises(NameNotFound, match="no value yet: 'b'"):
        model.run([])
    for scale in (1, 2, 3):  # no input has a shape that could tell of the change
        model.set_param("b", scale * B)
        np.testing.assert_allclose(model.run_slots()[0], (W + scale * B).sum(0), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(model.run([])[0], (W + scale * B).sum(0), rtol=1e-3, atol=1e-3)


def test_a_compiled_graph_can_be_freed() -> None:
    model = dense()
    model.set_params({"w": W, "b": B})
    view = model.run_slots(X)[0]
    want = view.copy()
    alive = weakref.ref(model)
    run = model.run_slots
    del model
    gc.collect()
    np.testing.assert_array_equal(run(X)[0], want)  # the function alone keeps all that it needs
    del run
    gc.collect()
    assert alive() is None
    np.testing.assert_array_equal(view, want)  # a view keeps the arena
