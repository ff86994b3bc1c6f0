"""Results have the same bits whatever arithmetic the calling thread has set, and it has that again afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from float_states import STATES, control, on_x86, state

import rlx
from rlx import arithmetic
from rlx.backends.cpu.native.float_state import float_state_ir
from rlx.backends.cpu.native.pool_ir import filled
from rlx.errors import ExecutionError, NanTrapped
from rlx.ir.graph import Array, TensorType
from rlx.ops.base import Op, register

pytestmark = on_x86

F32 = np.float32
RNG = np.random.default_rng(7)
X = (RNG.standard_normal((64, 96)) * np.float32(10.0) ** RNG.integers(-42, 3, (64, 96))).astype(F32)  # some denormal
W = RNG.standard_normal((96, 64)).astype(F32)
HALF = W.astype(np.float16)
TENTHS = np.full(64, 0.1, F32)
NUMBERS = (X[:2] + 0.1).tolist()


class Without:
    """A library that lacks the functions."""


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("found", [None, "libm.so.6", "nowhere"])
def test_where_the_library_lacks_the_functions(
    found: str | None, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for in libm too; without them the arithmetic of the thread stays, and nothing fails."""
    whole = ctypes.PyDLL(None)

    def load(name: str | None) -> object:
        if name is not None and found != name:
            raise OSError(f"{name}: cannot open shared object file")
        return whole if name == found else Without()

    monkeypatch.setattr(arithmetic.ctypes, "PyDLL", load)
    monkeypatch.setattr(arithmetic.sys, "platform", platform)
    arithmetic._calls.cache_clear()
    try:
        there = arithmetic._calls()[0] is not None
        with state(STATES[-1]), arithmetic.usual_arithmetic():
            kept = control()
    finally:
        arithmetic._calls.cache_clear()
    assert there == (found != "nowhere" and platform == "linux")  # of macOS a library here has no usual environment
    assert (kept == control()) == there


@register
class Thirds(Op):
    """A host call whose result depends on the rounding; `spoils` leaves another arithmetic behind."""

    spoils: bool = False

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        made = x / F32(3)
        if self.spoils:
            _set(STATES[-1])
        return made


def _set(value: int) -> None:
    state(value).__enter__()


def network(device: str = "cpu", **options: object) -> rlx.CompiledGraph:
    """Products, sums, exponentials and quotients of normal and denormal numbers; with folded constants."""
    g = rlx.Graph("network")
    x, w = g.input("x", (rlx.Dim("n", 1, 64), 96)), g.param("w", (96, 64))
    scale = g.constant(TENTHS) / 3.0  # folded
    y = rlx.softmax(x @ w * scale) * 1e-38 + rlx.sum(x, axis=1, keepdims=True) / 7.0
    g.output(y, name="y")
    g.output(x * 0.3, name="small")
    model = rlx.compile(g, device=device, **options)
    model.set_params({"w": W})
    return model


def bits(arrays: object) -> list[bytes]:
    return [np.array(a).tobytes() for a in arrays]  # type: ignore[attr-defined]


def everywhere(call: Callable[[], object]) -> None:
    """The call gives the same under every state, and leaves it."""
    want = call()
    for value in STATES:
        with state(value):
            made, left = call(), control()
        assert made == want, f"{value:#x}"
        assert left == value


@pytest.mark.parametrize("threads", [1, 2])
def test_runs(threads: int) -> None:
    """By every call that runs a graph, in this thread and in that of the queue."""
    model = network(threads=threads)
    everywhere(lambda: bits(model.run([X])))
    everywhere(lambda: bits(model.run_slots(X)))
    everywhere(lambda: bits(model.run_views([X[:5]])))
    everywhere(lambda: bits(model.run([X], out=[np.empty((64, 64), F32), np.empty_like(X)])))
    everywhere(lambda: bits(model.submit([X]).result()))
    everywhere(lambda: [bits(made) for made in model.run_many([[X], [X[:7]]])])


def test_compiling_and_packing() -> None:
    """Constants are folded, params converted, and weights packed, as in any other thread."""

    def call() -> list[bytes]:
        model = network(threads=1)
        model.set_param("w", HALF, convert=True)
        return bits(model.run([X]))

    everywhere(call)


def test_other_devices_and_ways() -> None:
    for model in (network("reference"), network(trap="nan"), network(debug=True)):
        everywhere(lambda model=model: bits(model.run([X])))
    everywhere(lambda: bits(network(threads=1).run([NUMBERS])))  # f64 to f32


def test_host_calls() -> None:
    """They have the usual arithmetic too, and what they set ends with them."""
    for spoils in (False, True):
        g = rlx.Graph("host")
        x = g.input("x", (64, 96))
        (y,) = g.add(Thirds(spoils), x * 0.3)
        g.output(y / 7.0 * 1e-38, name="y")
        model = rlx.compile(g, device="cpu", threads=2)
        everywhere(lambda model=model: bits(model.run([X])))


def test_ways_out() -> None:
    """The caller has its own again after an error, an interrupt and a trap; handlers of signals run with it."""
    g = rlx.Graph("divide")
    a, b = g.input("a", (4,), "i32"), g.input("b", (4,), "i32")
    g.output(a // b, name="y")
    model = rlx.compile(g, device="cpu")
    trapping = network(trap="nan")
    for value in STATES:
        with state(value):
            with pytest.raises(ExecutionError):
                model.run([np.ones(4, np.int32), np.zeros(4, np.int32)])
            assert control() == value
            with pytest.raises(ExecutionError):
                model.run_slots(np.ones(4, np.int32), np.zeros(4, np.int32))
            assert control() == value
            with pytest.raises(NanTrapped):
                trapping.run([np.full_like(X, np.nan)])
            assert control() == value


def test_threads_that_were_started_with_another_state() -> None:
    """Workers begin with the state of the thread that starts them: that of the first parallel run."""
    script = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import threading
from float_states import STATES, state
import test_float_state as t
want = None
for value in (STATES[-1], STATES[0], STATES[6]):
    with state(value):
        model = t.network(threads=2)
        for _ in range(12):
            made = t.bits(model.run([t.X]))
            want = want or made
            assert made == want
with state(STATES[0]):
    assert t.bits(t.network(threads=1).run([t.X])) == want
print("same")
"""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script.format(tests=str(here.parent), here=str(here))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "same", done.stderr


def test_another_thread_keeps_its_own() -> None:
    """A run sets the register of its caller alone."""
    model, found = network(threads=2), []
    clone = model.clone()

    def other() -> None:
        with state(STATES[9]):
            for _ in range(20):
                clone.run([X])
                found.append(control())

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(20):
        model.run([X])
        assert control() == STATES[0]
    thread.join()
    assert found == [STATES[9]] * 20


def test_code_for_other_machines() -> None:
    """AArch64 has another register; where there is none that we know, nothing is done."""
    arm, usual = float_state_ir("aarch64")
    assert "llvm.aarch64.set.fpcr" in filled(arm, {**usual, "FLOATS": 6})
    assert "llvm." not in float_state_ir("riscv64")[0]
