"""Recurrent layers as native kernels: every cell and switch, sizes around vectors and teams, threads, lengths."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.kernels.recurrence.cells import MOST_WHOLE, Shape, cut_of, shape_of
from rlx.backends.cpu.kernels.recurrence.recurrence import accepts
from rlx.backends.cpu.schedule.recurrence import RecurrenceParts
from rlx.compiler import compile_graph
from rlx.errors import ExecutionError
from rlx.ir.graph import Array, Graph
from rlx.ops.recurrent import ACTIVATIONS, CELLS, Gru, Lstm, Recurrence, Rnn
from rlx.records import replace

LAYERS: dict[str, Any] = {"rnn": Rnn, "gru": Gru, "lstm": Lstm}
PARAMS = ("w", "r", "bias", "peepholes")


def arrays(cell: str, steps: int, batch: int, hidden: int, d: int, dtype: str = "float32") -> dict[str, Array]:
    """Inputs of a layer, batch second, with weights that keep the states tame."""
    rng = np.random.default_rng([steps, batch, hidden, d])
    gates, small = len(CELLS[cell].gates), 0.5 / np.sqrt(hidden)
    made: dict[str, Array] = {
        "x": rng.standard_normal((steps, batch, 5)),
        "w": rng.standard_normal((d, gates * hidden, 5)) / 3,
        "r": rng.standard_normal((d, gates * hidden, hidden)) * small,
        "bias": rng.standard_normal((d, 2 * gates * hidden)),
        "initial_h": rng.standard_normal((d, batch, hidden)),
        "initial_c": rng.standard_normal((d, batch, hidden)),
        "peepholes": rng.standard_normal((d, 3 * hidden)),
    }
    made = {key: a.astype(dtype) for key, a in made.items()}
    return made | {"lengths": rng.integers(0, steps + 1, batch).astype(np.int32)}


def built(op: Any, given: dict[str, Array], *, dynamic: bool = False) -> tuple[Graph, list[str]]:
    """The layer as a graph, and the names of its inputs at run time."""
    g = rlx.Graph("layer")
    steps, batch = rlx.Dim("steps", 0, 600), rlx.Dim("batch", 0, 64)
    x, state = (steps, batch), (given["w"].shape[0], batch)
    if op.batch_first:
        x, state = x[::-1], state[::-1]
    open_shapes: dict[str, Any] = {
        "x": (*x, 5),
        "lengths": (batch,),
        "initial_h": (*state, given["r"].shape[2]),
        "initial_c": (*state, given["r"].shape[2]),
    }
    values = []
    names = ["x", "w", "r", *op.optional]
    for name in names:
        shape = open_shapes.get(name, given[name].shape) if dynamic else given[name].shape
        leaf = g.param if name in PARAMS else g.input
        values.append(leaf(name, shape, dtype=given[name].dtype.name))
    for number, value in enumerate(g.add(op, *values)):
        g.output(value, name=f"out{number}")
    return g, [n for n in names if n not in PARAMS]


def ours(op: Any, given: dict[str, Array], *, dynamic: bool = False, threads: int = 1) -> list[Array]:
    """The layer on the CPU; it must not be a host call."""
    g, inputs = built(op, given, dynamic=dynamic)
    model = rlx.compile(g, device="cpu", threads=threads)
    model.set_params({n: given[n] for n in ("w", "r", *op.optional) if n in PARAMS})
    assert " host " not in model.explain("fuse")
    return model.run({n: given[n] for n in inputs})


def check(op: Any, given: dict[str, Array], tolerance: float = 1e-4, **options: Any) -> list[Array]:
    got = ours(op, given, **options)
    with np.errstate(over="ignore"):  # some activations have no bounds
        wanted = op.reference(*(given[n] for n in ("x", "w", "r", *op.optional)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.sample(12)
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("steps, batch, hidden", [(5, 3, 1), (4, 5, 37), (3, 13, 3)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_switch(cell: str, direction: str, steps: int, batch: int, hidden: int, flag: bool) -> None:
    """All optional inputs, clipping, random activations, both layouts; odd sizes below and above a vector."""
    pick = random.Random(f"{cell} {direction} {steps} {flag}")
    d = 2 if direction == "bidirectional" else 1
    own: dict[str, Any] = {"gru": {"linear_before_reset": flag}, "lstm": {"input_forget": flag}}.get(cell, {})
    usual = CELLS[cell].usual * d
    names = tuple(pick.choice(sorted(ACTIVATIONS)) for _ in usual) if flag else usual
    allowed = pick.choice([CELLS[cell].allowed, (), ("bias",)])
    given = arrays(cell, steps, batch, hidden, d)
    first = pick.random() < 0.5
    if first:
        given |= {key: given[key].swapaxes(0, 1).copy() for key in ("x", "initial_h", "initial_c")}
    op = LAYERS[cell](allowed, direction, names, clip=pick.choice([0.0, 0.7]), batch_first=first, **own)
    check(op, given, 2e-3 if flag else 1e-4, dynamic=pick.random() < 0.5)


@pytest.mark.parametrize("cell", CELLS)
def test_same_bits_for_any_threads_batch_and_kind_of_size(cell: str) -> None:
    """A large cell is computed by a team: rows alone, on one thread, and with open sizes have the same bits."""
    own = {"linear_before_reset": True} if cell == "gru" else {}
    hidden = 520 if cell == "rnn" else 263
    op = LAYERS[cell](("bias", "initial_h"), "bidirectional", **own)
    given = arrays(cell, 30, 4, hidden, 2)
    g, _ = built(op, given)
    node = compile_graph(g, *_cpu()).legal.nodes[-1]
    assert cut(shape_of(node, machine()), 30, 4).members > 1, "no team: the test proves nothing"
    both = check(op, given, threads=2)
    one = ours(op, given, dynamic=True, threads=1)
    row = {**given, "x": given["x"][:, 1:2].copy(), "initial_h": given["initial_h"][:, 1:2].copy()}
    for a, b, c in zip(both, one, ours(op, row), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a[..., 1:2, :], c)


def cut(s: Shape, steps: int, batch: int) -> RecurrenceParts:
    return replace(cut_of(s), steps=steps, batch=batch)({})


def test_long_sequences_let_members_come_back() -> None:
    """Who leaves a team as its turn of a CPU is over comes back by another chunk: longer ones have more."""
    g, _ = built(Lstm(("bias",)), arrays("lstm", 30, 4, 263, 1))
    s = shape_of(compile_graph(g, *_cpu()).legal.nodes[-1], machine())
    short, long = cut(s, 30, 4), cut(s, 3000, 4)
    assert short.members == long.members <= short.entries < long.entries
    assert cut(s, 3000, 48).entries < 1000


def test_members_that_leave_and_come_back() -> None:
    """All leave at every look, but for the last one of a team, in more threads than there are cores and with teams that
    the caller is not in: same bits as in one thread."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# Turns of no time at all, in a process of its own.
LEAVING = """
import signal
import numpy as np
import rlx
from rlx.backends.cpu.native import os_ir
from rlx.backends.cpu.schedule import recurrence
from rlx.backends.cpu.native import runner
from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.pool import pool
from rlx.ops.recurrent import Gru, Lstm
signal.alarm(240)
runner_ir.RUNTIME += " without turns"
os_ir.TURN_NS = -1
recurrence.LOOK = 1e-12
runner.native()
pool.start(workers=5)
rng = np.random.default_rng(0)
for op, gates, d, batch in ((Lstm(("bias",)), 4, 1, 1), (Gru(("bias",), "bidirectional"), 3, 2, 26)):
    g = rlx.Graph("layer")
    shapes = {"x": (150, batch, 8), "w": (d, gates * 160, 8), "r": (d, gates * 160, 160), "bias": (d, 2 * gates * 160)}
    for value in g.add(op, *(g.input(name, shape) for name, shape in shapes.items())):
        g.output(value)
    given = [rng.standard_normal(shape).astype(np.float32) / 8 for shape in shapes.values()]
    expected = rlx.compile(g, device="cpu", threads=1).run(given)
    for threads in (2, 3, 6):
        model = rlx.compile(g, device="cpu", threads=threads)
        for _ in range(10):
            for a, b in zip(model.run(given), expected, strict=True):
                assert np.array_equal(a, b)
"""


def _cpu() -> tuple[Any, Any]:
    from rlx.backends.cpu.backend import CpuBackend
    from rlx.options import CompileOptions

    return CpuBackend(), CompileOptions()


def test_reset_before_the_product_in_a_team() -> None:
    """The two stages of a GRU step, each joined by the team."""
    check(Gru(("bias",), "forward"), arrays("gru", 20, 2, 200, 1), threads=2)


def test_no_steps_no_rows_and_one_step() -> None:
    """Without steps the state comes out as it went in; a single step is what a streaming model runs."""
    op = Lstm(("initial_h", "initial_c"))
    for steps, batch in ((0, 3), (4, 0), (1, 1)):
        check(op, arrays("lstm", steps, batch, 9, 1), dynamic=True)


def test_f64_and_f16() -> None:
    """f64 as it is; f16 computed in f32."""
    check(Lstm(("bias",)), arrays("lstm", 6, 3, 11, 1, "float64"), 1e-12)
    check(Gru(("bias",)), arrays("gru", 6, 3, 11, 1, "float16"), 2e-3)


def test_not_a_number_stays_in_its_row() -> None:
    given = arrays("lstm", 5, 3, 9, 1)
    given["x"][1, 1, 0] = np.nan
    got = ours(Lstm(), given)
    assert np.isnan(got[0][1:, :, 1]).all()
    assert not np.isnan(got[0][:, :, [0, 2]]).any()


def test_a_length_beyond_the_steps_is_an_error() -> None:
    given = arrays("rnn", 5, 3, 9, 1)
    for bad in (-1, 6):
        given["lengths"] = np.array([5, bad, 0], np.int32)
        with pytest.raises(ExecutionError, match=str(bad)):
            ours(Rnn(("lengths",)), given)


EXACT = ("hardsigmoid", "affine", "affine")  # functions that are the same in NumPy


@pytest.mark.parametrize("hidden, zeros", [(7, True), (16, False), (33, True), (300, True), (529, False)])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_a_rounded_state_is_multiplied_exactly(hidden: int, batch: int, zeros: bool) -> None:
    """Bit for bit the reference's, whose sums are exact: the largest weights, odd sizes, infinities and NaN."""
    rng = np.random.default_rng(hidden)
    sizes = (2, 4 * hidden)
    given = {
        "scale": rng.uniform(1e-5, 1e-4, sizes).astype(np.float32),
        "bias": rng.standard_normal(sizes).astype(np.float32),
        "initial_h": rng.uniform(0.5, 1, (2, batch, hidden)).astype(np.float32),
    }
    given |= {"zero": rng.choice(np.array([-128, 127], np.int8), sizes)} if zeros else {}
    r = rng.choice(np.array([-128, 127], np.int8), (*sizes, hidden))
    r[:, :hidden] = 127
    x = rng.standard_normal((3, batch, 8 * hidden)).astype(np.float32)
    op = Recurrence(
        tuple(given), "lstm", "bidirectional", EXACT * 2, (0.2, 1, 1) * 2, (0.5, 0, 0) * 2, round_state=True
    )
    g = Graph("rounded")
    leaves = [g.input("x", x.shape), g.param("r", r.shape, dtype="i8")]
    leaves += [g.param(name, a.shape, dtype="i8" if name == "zero" else "f32") for name, a in given.items()]
    for name, value in zip(("every", "h", "c"), g.add(op, *leaves), strict=True):
        g.output(value, name)
    model = rlx.compile(g, device="cpu", threads=2, cache=False)
    assert "recurrence" in model.explain("kernels")
    for bad in (None, np.inf, np.nan):
        if bad is not None:
            given["initial_h"][0, 0, 0] = bad
        model.set_params({"r": r, **given})
        with np.errstate(all="ignore"):
            want = op.reference(x, r, *given.values())
        for got, expected in zip(model.run([x]), want, strict=True):
            assert np.array_equal(got, expected, equal_nan=True)


def test_cells_whose_sums_might_overflow_are_no_kernel() -> None:
    op = Recurrence(("scale",), "lstm", round_state=True)
    for hidden in (MOST_WHOLE, MOST_WHOLE + 1):
        g = Graph("large")
        n = 4 * hidden
        x, scale = g.input("x", (1, 1, n)), g.input("scale", (1, n))
        node = g.add(op, x, g.input("r", (1, n, hidden), dtype="i8"), scale)[0].node
        assert node is not None
        assert accepts(node) == (hidden == MOST_WHOLE)
