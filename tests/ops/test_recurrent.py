"""Recurrent layers with every attribute against ONNX Runtime; the batch-first layout against onnx's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, ort, values

import rlx
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.recurrent import Gru, Lstm, Rnn

STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 2
CELLS = {"RNN": (Rnn, 1), "GRU": (Gru, 3), "LSTM": (Lstm, 4)}
OPTIONAL = ("bias", "lengths", "initial_h", "initial_c", "peepholes")
OTHER = {  # activations with their alphas and betas
    "RNN": (("Affine",), (0.5,), (0.1,)),
    "GRU": (("HardSigmoid", "Softsign"), (0.3,), (0.4,)),
    "LSTM": (("HardSigmoid", "ScaledTanh", "Relu"), (0.3, 0.7), (0.4, 0.9)),
}


def compare(cell: str, optional: tuple[str, ...], ours: dict[str, Any], theirs: dict[str, Any], run: Any = ort) -> None:
    """One layer both ways."""
    cls, gates = CELLS[cell]
    d = 2 if ours["direction"] == "bidirectional" else 1
    arrays = {
        "x": values((STEPS, BATCH, INPUTS)),
        "w": values((d, gates * HIDDEN, INPUTS), seed=1),
        "r": values((d, gates * HIDDEN, HIDDEN), seed=2),
        "bias": values((d, 2 * gates * HIDDEN), seed=3),
        "lengths": np.array([5, 3, 1], np.int32),
        "initial_h": values((d, BATCH, HIDDEN), seed=4),
        "initial_c": values((d, BATCH, HIDDEN), seed=5),
        "peepholes": values((d, 3 * HIDDEN), seed=6),
    }
    if ours.get("batch_first"):
        arrays |= {key: arrays[key].swapaxes(0, 1).copy() for key in ("x", "initial_h", "initial_c")}
    given = [arrays[key] for key in ("x", "w", "r", *optional)]
    y = check(cls(optional=optional, **ours), *given, static=tuple(range(8)))
    names = OPTIONAL if cell == "LSTM" else OPTIONAL[:3]
    inputs = [arrays["x"], arrays["w"], arrays["r"], *(arrays[n] if n in optional else None for n in names)]
    expected = run(cell, *inputs, outputs=len(y), hidden_size=HIDDEN, **theirs)
    for got, want in zip(y, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_matches_onnx_runtime(cell: str, direction: str) -> None:
    """Any subset of the optional inputs, other activations with parameters, clipping, and each cell's own switch."""
    every = OPTIONAL if cell == "LSTM" else OPTIONAL[:3]
    both = {"direction": direction}
    count = 2 if direction == "bidirectional" else 1
    names, alpha, beta = (part * count for part in OTHER[cell])
    for optional in ((), every[:1], every[1:3], every):
        compare(cell, optional, both, both)
        compare(
            cell, optional, both | {"activations": names, "alpha": alpha, "beta": beta},
            both | {"activations": names, "activation_alpha": alpha, "activation_beta": beta},
        )  # fmt: skip
        compare(cell, optional, both | {"clip": 0.4}, both | {"clip": 0.4})
        own = {"GRU": "linear_before_reset", "LSTM": "input_forget"}.get(cell)
        if own:
            compare(cell, optional, both | {own: True}, both | {own: 1})


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_batch_first(cell: str, direction: str) -> None:
    """The layout that ONNX Runtime does not have."""
    optional = tuple(n for n in (OPTIONAL if cell == "LSTM" else OPTIONAL[:3]) if n != "lengths")
    ours = {"direction": direction, "batch_first": True}
    compare(cell, optional, ours, {"direction": direction, "layout": 1}, onnx_reference)


def test_errors() -> None:
    """Attributes that do not fit, shapes, and lengths beyond the steps."""
    x, w, r = (TensorType(s, DTYPES["f32"]) for s in ((5, 3, 4), (1, 2, 4), (1, 2, 2)))
    with pytest.raises(OptionError, match="direction"):
        Rnn(direction="backward").infer(x, w, r)
    with pytest.raises(OptionError, match="optional"):
        Rnn(optional=("peepholes",)).infer(x, w, r, x)
    with pytest.raises(OptionError, match="activations"):
        Rnn(activations=("Gelu",)).infer(x, w, r)
    with pytest.raises(ShapeError, match="w "):
        Rnn(direction="bidirectional").infer(x, w, r)
    with pytest.raises(ExecutionError, match="length of"):
        Rnn(("lengths",)).reference(values((2, 1, 4)), values((1, 2, 4)), values((1, 2, 2)), np.array([3]))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_backward_steps_begin_at_the_end_of_each_sequence(cell: str, direction: str) -> None:
    """What lies beyond an end is not read, and a sequence of no steps keeps the state that it was given."""
    cls, gates = CELLS[cell]
    d = 2 if direction == "bidirectional" else 1
    names = ("lengths", "initial_h", *(("initial_c",) if cell == "LSTM" else ()))
    x, lengths = values((STEPS, BATCH, INPUTS)), np.array([3, 0, 5], np.int32)
    x[3:, 0] = x[:, 1] = np.nan
    weights = values((d, gates * HIDDEN, INPUTS), seed=1), values((d, gates * HIDDEN, HIDDEN), seed=2)
    states = [values((d, BATCH, HIDDEN), seed=4 + n) for n in range(len(names) - 1)]
    every, *last = check(cls(names, direction), x, *weights, lengths, *states, static=tuple(range(8)))
    assert not every[:, :, 1].any()
    assert not every[3:, :, 0].any()
    assert all(np.array_equal(a[:, 1], b[:, 1]) for a, b in zip(last, states, strict=True))
    assert all(np.isfinite(a).all() for a in last)
    alone, *_ = check(
        cls(names, direction), x[:3, :1], *weights, lengths[:1], *(s[:, :1] for s in states), static=tuple(range(8))
    )
    np.testing.assert_allclose(every[:3, :, :1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_lengths_that_only_a_run_knows_read_nothing_outside(cell: str, direction: str) -> None:
    """Those that don't fit the steps stop the run, however far off; the next run is as before."""
    cls, gates = CELLS[cell]
    d = 2 if direction == "bidirectional" else 1
    g = rlx.Graph("lengths")
    x, lengths = g.input("x", (STEPS, BATCH, INPUTS)), g.input("lengths", (BATCH,), dtype="i32")
    w, r = g.param("w", (d, gates * HIDDEN, INPUTS)), g.param("r", (d, gates * HIDDEN, HIDDEN))
    for n, value in enumerate(g.add(cls(optional=("lengths",), direction=direction), x, w, r, lengths)):
        g.output(value, name=f"y{n}")
    model = rlx.compile(g, device="cpu")
    model.set_params({"w": values(w.shape, seed=1), "r": values(r.shape, seed=2)})

    def run(*lengths: int) -> list[bytes]:
        y = model.run({"x": values((STEPS, BATCH, INPUTS)), "lengths": np.array(lengths, np.int32)})
        return [a.tobytes() for a in y]

    before = run(STEPS, 3, 0)
    for length in (STEPS + 1, 1 << 20, 2**31 - 1, -1, -(1 << 20), -(2**31)):
        with pytest.raises(ExecutionError, match=f"index out of range.*value {length}"):
            run(2, length, 1)
        assert run(STEPS, 3, 0) == before
