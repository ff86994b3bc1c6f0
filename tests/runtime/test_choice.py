"""The choice of a device: what it may be, what it says, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import DevicePolicy
from rlx.backends import BACKENDS, BY_NAME, backend_named, choose_backend
from rlx.backends.base import Availability, Backend
from rlx.backends.memory import DeviceMemory
from rlx.cost.ceilings import Ceilings, guess_of
from rlx.cost.pace import Pace, Probe
from rlx.errors import DeviceUnavailable, MemoryDeficit, OptionError, RlxError
from rlx.estimate.calibrate import LEFT_BY_TEXT, PASSING_TEXT, USUAL, Overhead
from rlx.estimate.graph import estimate_graph
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops.base import Op
from rlx.options import CompileOptions
from rlx.runtime import choice, split
from rlx.runtime.policy import VARIABLE


@rlx.register
class ChoiceTestLeft(Op):
    """x + 1, which the device "left" runs."""

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        return np.asarray(x + np.float32(1))


@rlx.register
class ChoiceTestRight(Op):
    """2 x, which the device "right" runs."""

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        return np.asarray(x * np.float32(2))


class Fake(type(backend_named("cpu"))):  # type: ignore[misc]
    """A second and third device, for the tests: the processor under other names."""

    def __init__(self, name: str, refused: str = "", present: bool = True, free: int = 1 << 40) -> None:
        super().__init__()
        self.name = name
        self.refused = refused
        self.present = present
        self.free = free

    def available(self) -> Availability:
        return Availability(self.present, "for tests", "" if self.present else "pip install it")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free, self.free)

    def check(self, legal: Graph) -> None:
        bad = [n for n in legal.nodes if n.op.op_name == self.refused]
        if bad:
            nodes = [rlx.errors.UnsupportedNode(n.label, self.refused, "refused") for n in bad]
            raise rlx.errors.UnsupportedOp("refused", nodes)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """Devices "left", "right" and "absent" beside the others, with ceilings that are given."""
    made = {
        "left": Fake("left", "choice_test_right"),
        "right": Fake("right", "choice_test_left"),
        "absent": Fake("absent", present=False),
    }

    def named(name: str) -> Backend:
        return made[name] if name in made else backend_named(name)

    for name in made:
        monkeypatch.setitem(BACKENDS, name, "")
    for module in ("rlx.runtime.choice", "rlx.runtime.split", "rlx.runtime.auto", "rlx.runtime.bench", "rlx.cost.kept"):
        monkeypatch.setattr(f"{module}.backend_named", named)
    monkeypatch.setattr(choice, "ceilings_of", ceilings)
    monkeypatch.setattr("rlx.runtime.auto.ceilings_of", ceilings)
    gone = Availability(False, "not here", "get it")
    for name in ("xla", "mlx"):
        monkeypatch.setattr(type(backend_named(name)), "available", lambda self: gone)
    return made


def ceilings(device: str, threads: int | None = None, *, measure: bool = True) -> Ceilings:
    """The left starts fast and runs slow, the right the other way round; the processor is slower than both."""
    c = guess_of(backend_named("cpu"), 1)
    change = {"left": (1e-7, 5e10), "right": (1e-3, 5e13), "cpu": (1e-2, 1e9)}.get(device, (1.0, 1e9))
    return Ceilings(device, change[1], ((1.0, change[1]),), change[1], c.launch, change[0], compile=1e-6, error=0.1)


def graph(n: object = 64) -> Graph:
    g = Graph("graph")
    x = g.input("x", (n, 256))  # type: ignore[list-item]
    g.output(rlx.softmax(x @ g.param("w", (256, 256), data=np.eye(256, dtype=np.float32))), "y")
    return g


def both() -> Graph:
    g = Graph("both")
    x = g.input("x", (4,))
    y = rlx.choice_test_left(x)
    g.output(rlx.choice_test_right(y) + 1.0, "z")
    g.output(y, "y")
    return g


def test_the_cheapest_is_chosen_and_the_others_are_priced(fakes: dict[str, Fake]) -> None:
    """A short run goes to what starts fast; every device has a price or an obstacle; nothing is compiled."""
    d = rlx.choose(graph(4), at={})
    assert (d.device, d.chosen.guessed) == ("left", True)
    rows = {c.device: c for c in d.candidates}
    assert set(rows) == set(BACKENDS)
    for name in ("left", "right", "cpu"):
        assert rows[name].seconds
        assert rows[name].fits
    assert "never" in rows["reference"].obstacle
    assert "pip install it" in rows["absent"].obstacle
    for word in ("results are copied out", "left", "right", "us per run", "guess", "never chosen", "pip install it"):
        assert word in str(d)
    assert rlx.choose(graph(1 << 16)).device == "right"


def test_a_device_that_is_used_by_name_only_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it is the only one that is here."""
    for name in BACKENDS.keys() - BY_NAME:
        monkeypatch.setattr(type(backend_named(name)), "available", lambda self: Availability(False, "not here"))
    with pytest.raises(DeviceUnavailable, match="no device can be used here"):
        choose_backend("auto")
    assert choose_backend("reference").name == "reference"


def test_prices_follow_the_present_speed(fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated devices are priced for the speed that a probe finds, once for all, unless the policy fixes it."""
    probed = [Probe(3e-5, 2e-5, 1e-4)]
    monkeypatch.setattr("rlx.cost.ceilings.present", lambda: probed[-1])

    def calibrated(device: str, threads: int | None = None, *, measure: bool = True) -> Ceilings:
        return replace(ceilings(device, threads), probe=(1e-5, 1e-5, 1e-4))

    monkeypatch.setattr(choice, "ceilings_of", calibrated)
    now, fixed = (rlx.choose(graph(4), DevicePolicy(pace=pace)) for pace in ("now", "calibrated"))
    assert (now.chosen.pace, fixed.chosen.pace) == (Pace(3.0, 2.0, 1.0), Pace())
    assert now.chosen.overhead == pytest.approx(3 * fixed.chosen.overhead)
    assert 1 < now.chosen.seconds / fixed.chosen.seconds < 3
    assert "calls 3.00" in str(now)
    assert "times as long" not in str(fixed)
    assert rlx.choose(graph(4), "pace=calibrated").chosen.seconds == fixed.chosen.seconds


def test_the_extent_where_the_choice_turns(fakes: dict[str, Fake]) -> None:
    """A dynamic graph is priced at its bound, and the decision says from which extent on another device wins."""
    policy = DevicePolicy(only=("left", "right"))
    d = rlx.choose(graph(Dim("n", 1, 1 << 16)), policy)
    assert (d.device, d.at) == ("right", {"n": 1 << 16})
    (turn,) = d.turns
    assert turn.device == "right"
    for extent, device in ((turn.extent - 1, "left"), (turn.extent, "right")):
        assert rlx.choose(graph(Dim("n", 1, 1 << 16)), policy, at={"n": extent}).device == device


def test_memory_is_what_the_estimate_says(fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each device the same sum: the model at the bounds, and the device itself unless it is here already."""
    for module in ("rlx.runtime.choice", "rlx.estimate.calibrate"):
        monkeypatch.setattr(f"{module}.COMPILED", {"right"})
    overheads = {"cpu": Overhead(3 << 20), "left": Overhead(2 << 20), "right": Overhead(9 << 20)}
    monkeypatch.setattr(choice, "known_overhead", overheads.__getitem__)
    g = graph(Dim("n", 1, 512))
    rows = {c.device: c for c in rlx.devices_for(g, at={"n": 2})}
    for name, overhead in overheads.items():
        made = estimate_graph(g, Fake(name), CompileOptions(), overhead)
        left = LEFT_BY_TEXT * made.compiler_bytes // PASSING_TEXT  # by the kernels' text, beside what is measured
        assert left > 0
        assert made.overhead_bytes == overhead.fixed + left
        assert rows[name].peak_bytes == made.running_peak_bytes - overhead.fixed - left
        assert rows[name].grows_bytes == rows[name].peak_bytes + (0 if name == "right" else overhead.fixed + left)
        assert rows[name].bounded == ()
    assert rlx.choose(g, "objective=memory", calibrate=False).device == "right"
    assert rlx.choose(g, "objective=memory; deny=right", calibrate=False).device == "left"
    monkeypatch.setattr(choice, "known_overhead", lambda name: USUAL)
    assert rlx.choose(g, "only=left").chosen.bounded == ("code", "overhead")
    overheads["left"] = Overhead(100 << 20)
    monkeypatch.setattr(choice, "known_overhead", lambda name: overheads[name] if name == "left" else USUAL)
    # what differs by less than a guess may be off is a tie
    tied = rlx.choose(g, "objective=memory; deny=right", calibrate=False)
    assert tied.device == "cpu"
    assert "simpler" in tied.reason
    monkeypatch.setattr(choice, "overhead_of", overheads.__getitem__)
    measured = rlx.choose(g, "objective=memory; deny=right")
    assert (measured.device, measured.reason) == ("cpu", "the lowest predicted peak")


def test_policies(fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is denied is out; a chain of preferences is reported; objectives differ; ties go to the first."""
    g = graph(4)
    assert rlx.choose(g, DevicePolicy(deny=("left",))).device == "right"
    assert rlx.choose(g, DevicePolicy(only=("cpu",))).device == "cpu"
    assert rlx.choose(g, DevicePolicy(objective="throughput")).device == "right"
    d = rlx.choose(g, DevicePolicy(prefer=("absent", "cpu")))
    assert d.device == "cpu"
    assert "after absent" in d.reason
    monkeypatch.setattr(choice, "COMPILED", set())
    assert rlx.choose(g, DevicePolicy(objective="memory"), calibrate=False).device == "cpu"


def test_a_budget_keeps_devices_out(fakes: dict[str, Fake]) -> None:
    """By the budget given, and by what a device has free; the deficit is told."""
    fakes["left"].free = 1000
    d = rlx.choose(graph(4))
    left = next(c for c in d.candidates if c.device == "left")
    assert d.device == "right"
    assert left.fits is False
    assert left.deficit_bytes == (left.peak_bytes or 0) - 1000
    assert "more than" in left.obstacle
    with pytest.raises(DeviceUnavailable, match="1,000 B allowed"):
        rlx.choose(graph(4), budget=1000)


def test_no_candidate_says_why_for_each(fakes: dict[str, Fake]) -> None:
    """Absent, denied, unsupported nodes, and whether a split would run it."""
    with pytest.raises(DeviceUnavailable) as raised:
        rlx.choose(both(), DevicePolicy(deny=("cpu",)))
    text = str(raised.value)
    for word in ("cpu: denied", "absent: for tests", "choice_test_right", "choice_test_left", "A split would run it"):
        assert word in text
    with pytest.raises(DeviceUnavailable, match="A split would run it: compile with this policy"):
        rlx.choose(both(), DevicePolicy(deny=("cpu",), split=True))
    g = Graph("neither")
    g.output(rlx.choice_test_left(g.input("x", (4,))), "y")
    for split_too in (False, True):
        with pytest.raises(DeviceUnavailable, match="would not run it either"):
            rlx.choose(g, DevicePolicy(only=("right",), split=split_too))


def test_split_execution(fakes: dict[str, Fake]) -> None:
    """Maximal runs on each device, with the copies between them told; the results are those of the reference."""
    policy = DevicePolicy(deny=("cpu",), split=True)
    parts = split.partition(both(), ["left", "right"])
    assert [(p.device, len(p.graph.nodes)) for p in parts] == [("left", 1), ("right", 2)]
    assert [p.copied_bytes({}) for p in parts] == [0, 16]
    model = rlx.compile(both(), policy=policy)
    assert model.device == "left+right"
    x = np.arange(4, dtype=np.float32)
    out = np.zeros(4, np.float32)
    z, y = model.run([x], out=[out, None])
    assert z is out
    np.testing.assert_array_equal(z, 2 * (x + 1) + 1)
    np.testing.assert_array_equal(y, x + 1)
    with pytest.raises(MemoryDeficit, match="0 B allowed by budget="):
        rlx.compile(both(), policy=policy, budget=0)
    assert model.decision is not None
    assert "1 nodes on left" in model.decision.reason
    assert "16 B" in model.decision.reason
    with pytest.raises(OptionError, match="run_views"):
        model.run_views([x])


def test_split_with_states(fakes: dict[str, Fake]) -> None:
    """States that several parts read go on from run to run; one that is not updated and a failed run keep theirs."""
    g = Graph("states")
    x = g.input("x", (4,))
    total = g.state("total", (4,), initial=np.full(4, 10, np.float32))
    fixed = g.state("fixed", (4,), initial=np.full(4, 3, np.float32))
    last = g.state("last", (4,))
    new = rlx.choice_test_left(x + total)
    g.output(rlx.choice_test_right(new + last) + fixed, "z")
    g.update(total, new)
    g.update(last, x)
    model = rlx.compile(g, policy=DevicePolicy(deny=("cpu",), split=True))
    assert model.device == "left+right"
    one = np.ones(4, np.float32)
    assert model.run([one])[0].tolist() == [2 * (1 + 10 + 1 + 0) + 3] * 4
    with pytest.raises(RlxError):
        model.run([np.ones(3, np.float32)])
    assert model.run([2 * one])[0].tolist() == [2 * (2 + 12 + 1 + 1) + 3] * 4
    assert "states" not in model.capabilities
    g = Graph("dims")
    x, s = g.input("x", (Dim("n", 1, 8),)), g.state("s", (Dim("n", 1, 8),))
    g.update(s, rlx.choice_test_left(x + s))
    g.output(rlx.choice_test_right(s), "y")
    assert not split.would_split(g, ["left", "right"])


def test_a_named_device_is_never_replaced(fakes: dict[str, Fake]) -> None:
    """It is used or refused; a policy beside it is an error."""
    model = rlx.compile(graph(4), device="cpu")
    assert model.device == "cpu"
    assert model.decision is not None
    assert model.decision.reason == "named by the caller"
    with pytest.raises(DeviceUnavailable, match="get it"):
        rlx.compile(graph(4), device="xla")
    with pytest.raises(OptionError, match="policy"):
        rlx.compile(graph(4), device="cpu", policy=DevicePolicy())


def test_auto_compiles_on_what_was_chosen(fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """By argument, session and variable, in this order."""
    assert rlx.compile(graph(4)).device == "left"
    monkeypatch.setenv(VARIABLE, "only=cpu")
    assert rlx.compile(graph(4)).device == "cpu"
    assert rlx.Session(policy="deny=left").compile(graph(4)).device == "right"
    model = rlx.Session(policy="deny=left").compile(graph(4), policy=DevicePolicy(deny=("right", "cpu")))
    assert model.device == "left"
    assert model.decision is not None
    assert model.decision.device == "left"
    monkeypatch.setenv(VARIABLE, "only=gpu")
    with pytest.raises(OptionError, match=VARIABLE):
        rlx.compile(graph(4))


def test_benchmark_times_each_and_keeps_the_winner(
    fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Real runs decide; the second time nothing is run."""
    monkeypatch.setattr("rlx.runtime.bench.cache_folder", lambda: tmp_path)
    policy = DevicePolicy(only=("left", "right"), benchmark=2)
    d = rlx.choose(graph(4), policy)
    times = {c.device: c.measured for c in d.candidates if c.measured is not None}
    assert set(times) == {"left", "right"}
    assert d.device == min(times, key=lambda name: times[name] or 0.0)
    monkeypatch.setattr("rlx.runtime.bench.compile_graph", None)
    assert rlx.choose(graph(4), policy) == d


@pytest.mark.parametrize(
    "make",
    [
        lambda: DevicePolicy(only=("gpu",)),
        lambda: DevicePolicy(prefer=("reference",)),
        lambda: DevicePolicy(benchmark=-1),
        lambda: DevicePolicy(expected_calls=0),
        lambda: DevicePolicy(objective="speed"),
        lambda: DevicePolicy(pace="fast"),
        lambda: DevicePolicy(split=1),  # type: ignore[arg-type]
        lambda: DevicePolicy.parse("only"),
        lambda: DevicePolicy.parse("benchmark=x"),
        lambda: DevicePolicy.parse("split=maybe"),
        lambda: DevicePolicy.parse("fastest=yes"),
    ],
)
def test_bad_policies(make: Callable[[], object]) -> None:
    """Unknown names, devices and numbers are refused."""
    with pytest.raises(OptionError):
        make()
    made = DevicePolicy.parse("only=cpu,xla; deny=xla; benchmark=3; objective=memory; expected_calls=7; split=true")
    assert made == DevicePolicy(("cpu", "xla"), ("xla",), (), 3, "memory", 7, True)


NAMES = ("cpu", "left", "right", "absent")


@settings(max_examples=20)
@given(
    deny=st.sets(st.sampled_from(NAMES)),
    only=st.none() | st.sets(st.sampled_from(NAMES), min_size=1),
    prefer=st.lists(st.sampled_from(NAMES), unique=True),
    objective=st.sampled_from(("latency", "throughput", "memory")),
    budget=st.sampled_from((None, 1000, "1GiB")),
    which=st.sampled_from((lambda: graph(4), both)),
)
def test_the_choice_is_present_allowed_able_and_fits(
    deny: set[str], only: set[str] | None, prefer: list[str], objective: str, budget: Any, which: Callable[[], Graph]
) -> None:
    """Whatever the policy; and where nothing is chosen, no device was all of that."""
    with pytest.MonkeyPatch.context() as patch:
        made = fakes.__wrapped__(patch)  # type: ignore[attr-defined]
        policy = DevicePolicy(tuple(sorted(only)) if only else None, tuple(deny), tuple(prefer), objective=objective)
        allowed = {n for n in NAMES if n not in deny and (only is None or n in only) and n != "absent"}
        if which is both:
            allowed -= {"left", "right"}
        if budget == 1000:
            allowed = set()  # code counts as well
        try:
            d = rlx.choose(which(), policy, budget=budget, calibrate=False)
        except DeviceUnavailable:
            assert not allowed
        else:
            assert d.device in allowed
            assert d.chosen.fits
            assert d.device not in made or which is not both  # those two refuse one of its nodes each
