"""Calibration and choice, on a device whose kernels take times that a formula gives: predictions must find it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from host_driver import HostDriver

import rlx
from rlx import Graph
from rlx.backends.cuda.device import driver as drivers
from rlx.backends.cuda.device.driver import Driver
from rlx.backends.cuda.executable import CudaExecutable
from rlx.cost import kept, measure
from rlx.cost.ceilings import Ceilings
from rlx.kernels.work import kernel_work

LAUNCH, BYTES, FLOPS = 1.1e-6, 2e12, 2e13


class Idle(HostDriver):
    """A device that does nothing."""

    def build(self, text: str) -> bytes:
        return b""

    def load(self, image: bytes) -> int:
        return 1

    def function(self, module: int, symbol: str) -> Any:
        return symbol

    def launch(self, *arguments: Any, **named: Any) -> None:
        return

    def encode(self, box: Any) -> bytes:
        return bytes(128)


def kernel_seconds(executable: Any, inputs: Sequence[Any]) -> list[float]:
    """What each kernel of a run takes."""
    extents, found = dict(executable.extents_of([a.shape for a in inputs])), []
    for kernel in executable.profiled:
        work = kernel_work(kernel, extents)
        found.append(LAUNCH + max((work.read + work.written) / BYTES, work.flops / FLOPS))
    return found


@pytest.fixture(scope="module")
def calibrated(device: object) -> Iterator[Ceilings]:
    if isinstance(device, Driver):
        pytest.skip("the real device has times of its own")

    def profile(self: Any, inputs: Sequence[Any], repeat: int) -> list[Any]:
        return [("", "", seconds) for seconds in kernel_seconds(self, inputs)]

    with Idle((9, 0)) as idle, pytest.MonkeyPatch.context() as patch:
        assert isinstance(device, HostDriver)
        idle.blocks, idle.of_host = device.blocks, device.of_host  # that takes back what is left of it
        drivers.chosen.append(idle)
        patch.setattr(CudaExecutable, "profile", profile)
        made = measure.calibrate("cuda", seconds=4)
        patch.setitem(kept._loaded, ("cuda", 1), made)
        yield made
        drivers.chosen.remove(idle)


def network(rows: int, sizes: Sequence[int]) -> Graph:
    g, rng = Graph("network"), np.random.default_rng(0)
    x = g.input("x", (rows, sizes[0]))
    for number, (k, n) in enumerate(pairwise(sizes)):
        x = rlx.gelu(x @ g.param(f"w{number}", data=rng.standard_normal((k, n), np.float32)))
    g.output(rlx.softmax(x), "y")
    return g


def test_what_is_measured(calibrated: Ceilings) -> None:
    """The launch, and rates near those of the formula; nothing of it is a guess."""
    assert not calibrated.guessed
    assert not calibrated.unified
    assert calibrated.launch == pytest.approx(LAUNCH, rel=0.2)
    assert max(rate for _, rate in calibrated.bandwidth) == pytest.approx(BYTES, rel=0.2)
    assert calibrated.vector == pytest.approx(BYTES / 12, rel=0.2)
    assert calibrated.flops == pytest.approx(FLOPS, rel=0.2)
    assert "row" in calibrated.corrections


@pytest.mark.parametrize("rows", [1, 40, 700, 6000])
@pytest.mark.parametrize("sizes", [(48, 96), (300, 1200, 300), (1500, 3000, 800)], ids=str)
def test_predictions_follow_the_formula(calibrated: Ceilings, rows: int, sizes: tuple[int, ...]) -> None:
    """For sizes between those that were calibrated, whose rates differ by far, and beyond them."""
    graph = network(rows, sizes)
    model = rlx.compile(graph, device="cuda")
    truth = sum(kernel_seconds(model._executable, [np.zeros((rows, sizes[0]), np.float32)]))
    said = sum(kernel.seconds for kernel in rlx.cost.predict(graph, calibrated).kernels)
    assert 0.5 < said / truth < 2.5


def test_auto_chooses_by_it(calibrated: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few sums stay on the processor, large products do not."""
    policy = rlx.DevicePolicy(only=("cpu", "cuda"), pace="calibrated")
    small, large = Graph("small"), network(4096, (4096, 4096))
    small.output(small.input("x", (16,)) + 1.0, "y")
    assert rlx.choose(small, policy, calibrate=False).device == "cpu"
    monkeypatch.setattr(Idle, "is_set_up", False)
    monkeypatch.setattr(Idle, "free_and_total", lambda self: pytest.fail("a choice sets no device up"))
    decision = rlx.choose(large, policy, calibrate=False)
    assert next(c.budget_bytes for c in decision.candidates if c.device == "cuda") == 1 << 41
    assert decision.device == "cuda"
    assert not decision.chosen.guessed
