"""The cost model on ceilings that are given, and what is kept of a calibration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends import BACKENDS, backend_named
from rlx.backends.base import Availability
from rlx.backends.cpu.backend import CpuBackend
from rlx.cost import Ceilings, Pace, ceilings_of, kept, measure, pace, predict
from rlx.cost.ceilings import guess_of
from rlx.cost.lowered import lower
from rlx.cost.pace import Probe
from rlx.cost.suite import trials
from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Size
from rlx.kernels.lowering import Attention
from rlx.kernels.work import kernel_work

PLAIN = Ceilings("elsewhere", flops=1e12, bandwidth=((1.0, 1e11),), vector=1e11, launch=1e-6, run=1e-5, unified=False)


def product(m: object, k: int, n: int) -> Graph:
    g = Graph("product")
    g.output(g.input("x", (m, k)) @ g.input("y", (k, n)), "z")  # type: ignore[list-item]
    return g


def test_larger_of_arithmetic_and_traffic() -> None:
    """A large product is bound by flops, a sum by bytes, a tiny one by its launch; the run adds overhead and copies."""
    big = predict(product(1024, 1024, 1024), replace(PLAIN, products=((1.0, 1.0, 1.0, 1e12),)), fetched=True)
    (kernel,) = big.kernels
    assert kernel.bound == "compute"
    assert kernel.seconds == pytest.approx(2 * 1024**3 / 1e12 + 1e-6)
    assert big.transfers == pytest.approx(3 * 4 * 1024**2 / 1e10)
    assert big.seconds == pytest.approx(kernel.seconds + 1e-5 + big.transfers)
    assert big.low < big.seconds < big.high < big.cost * 10
    g = Graph("sum")
    g.output(g.input("x", (1 << 20,)) + g.input("y", (1 << 20,)), "z")
    (kernel,) = predict(g, PLAIN).kernels
    assert kernel.bound == "traffic"
    assert kernel.seconds == pytest.approx(12 * (1 << 20) / 1e11 + 1e-6)
    g = Graph("tiny")
    g.output(g.input("x", (4,)) + 1.0, "z")
    assert predict(g, PLAIN).kernels[0].bound == "launch"


def test_rates_between_sizes_and_types() -> None:
    """Rates are interpolated by logarithms, level outside the grid, and scaled by type."""
    grid = tuple((m, k, n, m * 1e9) for m in (1.0, 64.0) for k in (8.0, 512.0) for n in (8.0, 512.0))
    c = replace(PLAIN, products=grid, dtypes={"f64": 0.5}, bandwidth=((1e3, 1e11), (1e6, 1e10)))
    assert c.product_rate(8, 64, 64) == pytest.approx(8e9)
    assert c.product_rate(1000, 4, 4) == pytest.approx(64e9)
    assert c.product_rate(8, 64, 64, "f64") == pytest.approx(4e9)
    assert c.bytes_rate(math.sqrt(1e9)) == pytest.approx(math.sqrt(1e21))
    assert (c.bytes_rate(1), c.bytes_rate(1e9)) == pytest.approx((1e11, 1e10))


def test_dynamic_graphs_are_priced_at_extents() -> None:
    """The bound by default; a longer run costs more."""
    g = product(Dim("n", 1, 512), 64, 64)
    assert predict(g, PLAIN).at == {"n": 512}
    assert predict(g, PLAIN, at={"n": 4}).seconds < predict(g, PLAIN).seconds


@pytest.mark.parametrize(
    "field, value",
    [
        ("flops", 0.0),
        ("run", -1.0),
        ("launch", math.nan),
        ("vector", math.inf),
        ("bandwidth", ()),
        ("bandwidth", ((2.0, 1.0), (1.0, 1.0))),
        ("products", ((1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 1.0, 1.0))),
        ("corrections", {"map": ((1.0, 0.0),)}),
    ],
)
def test_ceilings_are_finite_and_above_zero(field: str, value: object) -> None:
    """Anything else is refused, naming the field."""
    with pytest.raises(OptionError, match=field):
        replace(PLAIN, **{field: value})


def test_guesses_are_marked() -> None:
    """And a prediction by them; of a device that there is not, nothing is made up."""
    made = guess_of(backend_named("mlx"), 1)
    assert made.bytes_rate(1e6) == pytest.approx(backend_named("mlx").rates.bytes)
    assert predict(product(8, 8, 8), made).guessed
    with pytest.raises(OptionError, match="unknown device 'cdua'"):
        ceilings_of("cdua", measure=False)


@pytest.mark.parametrize("name", BACKENDS)
def test_guesses_are_what_the_backend_declares(name: str) -> None:
    """Threads count where a device honours them and is the processor; devices that are not here have guesses too."""
    backend = backend_named(name)
    threads = backend.threads_of(4)
    assert threads == (4 if "threads" in backend.honours else backend.threads)
    made = guess_of(backend, threads)
    assert (made.guessed, made.unified, made.merges) == (True, backend.unified, backend.merges)
    assert made.flops == backend.rates.flops * (threads if backend.on_processor else 1)
    assert (made.run, made.launch, made.compile) == (backend.rates.run, backend.rates.launch, backend.rates.compile)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and nothing in memory."""
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kept, "_loaded", {})
    return tmp_path


def test_a_calibration_is_kept_and_done_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are corrupt, partial, of another version or another machine are measured anew."""
    done: list[str] = []

    def fake(device: str, *, threads: int, seconds: float) -> Ceilings:
        done.append(device)
        return replace(guess_of(backend_named(device), threads), guessed=False, corrections={"map": ((1e-6, 2.0),)})

    monkeypatch.setattr(measure, "calibrate", fake)
    first = ceilings_of("cpu", 1)
    assert not first.guessed
    for spoil in (None, "forget", "partial", "key", "value", "empty"):
        (file,) = folder.glob("ceilings-cpu-1.json")
        text = file.read_text()
        kept._loaded.clear()
        facts = json.loads(text)
        if spoil == "partial":
            file.write_text(text[: len(text) // 2])
        elif spoil == "key":
            file.write_text(json.dumps({**facts, "key": [0]}))
        elif spoil == "value":
            file.write_text(json.dumps({**facts, "value": {**facts["value"], "flops": -1}}))
        elif spoil == "empty":
            file.write_text("")
        before = len(done)
        assert ceilings_of("cpu", 1) == first
        assert len(done) - before == (spoil in ("partial", "key", "value", "empty"))
    before = len(done)
    ceilings_of("cpu", 1, renew=True)
    assert len(done) == before + 1
    kept._loaded.clear()
    monkeypatch.setattr(CpuBackend, "available", lambda self: Availability(True, "another machine"))
    assert ceilings_of("cpu", 1, measure=False).guessed


def test_real_runs_refine_a_calibration(folder: Path) -> None:
    """Half of the way by a factor of 4 at most, a bounded number of points, and it is kept."""
    c = replace(guess_of(backend_named("cpu"), 1), guessed=False)
    once = kept.refine(c, {"map": [(1e-5, 4.0)]})
    assert once.correction("map", 1e-5) == pytest.approx(2.0)
    assert kept.refine(c, {"map": [(1e-5, 1e9)]}).correction("map", 1e-5) == pytest.approx(2.0)
    many = kept.refine(c, {"map": [(1e-9 * 3**i, 2.0) for i in range(40)]})
    assert len(many.corrections["map"]) == 24
    kept._loaded.clear()
    assert kept.kept_ceilings("cpu", 1) == many


@pytest.mark.parametrize("device", BACKENDS)
def test_every_device_that_is_here_can_be_timed(device: str) -> None:
    """Also one that can't be told how many threads to take: a calibration always names a number."""
    backend = backend_named(device)
    if not backend.available().present:
        pytest.skip(backend.available().why)
    bench = measure._Bench(measure.tiny(), backend, backend.threads)
    bench.once({spec.name: np.ones([int(n) for n in spec.shape], spec.dtype.numpy) for spec in bench.inputs})


@pytest.mark.slow
def test_calibrating_the_processor() -> None:
    """It measures what it says within its time; a prediction with it is no guess."""
    c = measure.calibrate("cpu", threads=1, seconds=3.0)
    assert not c.guessed
    assert len(c.products) == 80
    assert {"conv", "row", "map", "attention.packed"} <= set(c.corrections)
    assert not rlx.cost.predict(product(16, 16, 16), c).guessed


def test_corrections_of_products_end_where_products_were_measured() -> None:
    """A small product that is slow for reasons of its own says nothing of large ones, which have been measured."""
    grid = tuple((m, k, n, 1e12) for m in (1.0, 1024.0) for k in (64.0, 2048.0) for n in (64.0, 2048.0))
    c = replace(PLAIN, products=grid, corrections={"contract": ((3e-6, 1.0, 20.0, 64.0, 288.0, 14.0),)})
    assert c.correction("contract", 3e-6, (1, 20, 64, 288)) == pytest.approx(14.0, rel=0.01)
    for m, k, n in ((1, 4096, 4096), (1024, 2048, 2048), (4096, 1024, 1024)):
        assert c.correction("contract+relu", 2e-12 * m * k * n, (1, m, k, n)) == pytest.approx(1.0, rel=0.2)
    assert c.correction("row", 1.0, (1, 1)) == 1.0
    place = (2e-12 * 1024 * 2048 * 2048, 1.0, 1024.0, 2048.0, 2048.0)
    for _ in range(12):  # what real runs say of one of them counts there all the same
        c = kept.refine(c, {"contract": [(*place, 4.0 / c.correction("contract", place[0], place[1:]))]})
    assert c.correction("contract", place[0], place[1:]) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("quick", [False, True])
def test_calibration_begins_with_large_kernels(quick: bool) -> None:
    """A calibration that has little time corrects nothing by kernels alone that take less than a microsecond."""
    sizes: dict[str, list[int]] = {}
    for graph, arrays in trials(quick):
        sizes.setdefault(graph.name, []).append(sum(a.size for a in arrays))
    for name in ("rows", "maps", "dense", "attention", "conv"):
        assert sizes[name][0] == max(sizes[name])
    first = [graph.name for graph, _ in trials(quick)][: len(sizes)]
    assert sorted(first) == sorted(sizes)  # one of each kind before the second of any


def test_corrections_go_by_sizes_too() -> None:
    """Between points of a kind the nearest count: kernels that take as long but have other shapes are told apart."""
    points = ((1e-5, 4.0, 1000.0, 2.0), (1e-5, 1000.0, 4.0, 0.5))
    c = replace(PLAIN, corrections={"row": points})
    assert c.correction("row", 1e-5, (4, 1000)) == pytest.approx(2.0, rel=0.01)
    assert c.correction("row", 1e-5, (1000, 4)) == pytest.approx(0.5, rel=0.01)
    assert c.correction("row", 1e-5, (63, 63)) == pytest.approx(1.0, rel=0.01)
    assert c.correction("map", 1e-5, (4, 1000)) == 1.0


def test_kinds_without_points_take_those_of_the_plain_kind() -> None:
    factors = {"matmul.panels": 2.0, "conv": 3.0, "conv plus planes": 4.0, "attention.decode": 5.0}
    own = replace(PLAIN, corrections={kind: ((1e-5, factor),) for kind, factor in factors.items()})
    for kind in ("matmul.panels", "matmul.panels+bytes", "matmul.panels+f28"):
        assert own.correction(kind, 1e-5) == pytest.approx(2.0)
    assert own.correction("conv plus planes", 1e-5) == pytest.approx(4.0)
    assert own.correction("attention.decode+streaming", 1e-5) == pytest.approx(5.0)


def test_outputs_and_their_copies_cost() -> None:
    """Each output adds its own time and its bytes by the curve of copies; without one, by that of bandwidth."""
    g = Graph("two")
    x = g.input("x", (1 << 18,))
    g.output(x + 1.0, "y")
    g.output(x + 2.0, "z")
    c = replace(PLAIN, unified=True, output=1e-6, copies=((1e3, 1e10), (1e7, 1e10)))
    one, both = predict(g, c, outputs=["y"]), predict(g, c)
    assert both.overhead - one.overhead == pytest.approx(1e-6)
    assert (one.transfers, both.transfers) == pytest.approx(((1 << 20) / 1e10, (1 << 21) / 1e10))
    assert predict(g, replace(c, copies=()), outputs=["y"]).transfers == pytest.approx((1 << 21) / 1e11)


def test_the_error_of_a_calibration_leaves_each_point_out() -> None:
    """Points that agree give the least error, a lone one tells nothing, and those that don't agree a large one."""
    agree = ((1e-6, 1.0), (1e-5, 1.0), (1e-4, 1.0))
    assert measure.left_out([agree]) == measure.LEAST_ERROR
    assert measure.left_out([((1e-6, 3.0),)]) == 0.5
    assert measure.left_out([((1e-6, 1.0), (1.1e-6, 2.0))]) == pytest.approx(math.log(2), rel=0.01)


def test_experts_are_read_as_far_as_rows_go_to_them() -> None:
    """Of 16 experts a token reads the 2 that it goes to; grouping rows and packing compute nothing."""
    g = rlx.Graph("experts")
    x, numbers = g.input("x", (rlx.Dim("n", 1, 64), 1, 32)), g.input("numbers", (rlx.Dim("n", 1, 64), 2), "i32")
    g.output(rlx.grouped_matmul(x, g.param("w", (16, 32, 48)), numbers), "y")
    found = {n: rlx.profile(g, "cpu", at={"n": n}).kernels for n in (1, 64)}
    for n, groups in ((1, 2), (64, 16)):
        product = next(k for k in found[n] if k.kind == "grouped_matmul.product")
        assert 4 * 32 * 48 * groups <= product.read_bytes < 4 * 32 * 48 * groups + 4 * n * (32 + 2 * 4) + 2048
        assert sum(k.flops for k in found[n]) == 2 * 2 * n * 32 * 48


def test_doubles_take_twice_the_vectors() -> None:
    """Functions of f64 have half as many elements in a vector; those of f16 are computed in f32."""
    c = replace(PLAIN, vector=1e6, bandwidth=((1.0, 1e15),))
    times = {}
    for dtype in ("f16", "f32", "f64"):
        g = Graph(dtype)
        g.output(rlx.exp(g.input("x", (1000,), dtype)), "y")
        times[dtype] = predict(g, c).kernels[0].compute
    assert times["f64"] == pytest.approx(2 * times["f32"])
    assert times["f16"] >= times["f32"]


# ---- the present speed


def test_predictions_follow_the_pace() -> None:
    """Calls, arithmetic and memory scale their own parts; a device that is not the processor has only calls scaled."""
    g = product(64, 64, 64)
    plain, slow = predict(g, PLAIN), predict(g, PLAIN, pace=Pace(2.0, 3.0, 5.0))
    assert slow.overhead == pytest.approx(2 * plain.overhead)
    assert slow.compile == pytest.approx(2 * plain.compile)
    (before,), (after,) = plain.kernels, slow.kernels
    assert after.compute == pytest.approx(3 * before.compute)
    assert after.seconds == pytest.approx(3 * (before.seconds - PLAIN.launch) + 2 * PLAIN.launch)  # its data are near
    assert after.plain == before.plain
    g = Graph("far")
    g.output(g.input("x", (1 << 22,)) + 1.0, "y")
    (before,), (after,) = (predict(g, PLAIN, pace=p).kernels for p in (Pace(), Pace(2.0, 3.0, 5.0)))
    assert after.traffic == pytest.approx(5 * before.traffic)
    far = replace(PLAIN, follows=(1.0, 0.5), products=((1.0, 1.0, 1.0, 1e12),))
    (before,), (after,) = (predict(product(64, 64, 64), far, pace=p).kernels for p in (Pace(), Pace(1.0, 4.0, 1.0)))
    assert after.compute == pytest.approx(2 * before.compute)  # at full rate products lose less
    now = Probe(2e-5, 6e-5, 4e-4)
    assert replace(PLAIN, probe=(1e-5, 2e-5, 1e-4)).pace(now) == Pace(2.0, pytest.approx(3.0), 4.0)
    assert PLAIN.pace(now) == Pace()


def test_the_probe_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are above 0, and several predictions of a moment go by one probe."""
    monkeypatch.setattr(pace, "_last", [])
    first = pace.present()
    assert min(first.calls, first.arithmetic, first.memory) > 0
    assert pace.present() is first
    monkeypatch.setattr(pace, "KEPT", -1.0)
    assert pace.present() is not first


def test_a_kernel_that_takes_for_ever_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted at the lowest sizes, so that a high bound alone says nothing; usual kernels are not looked at."""

    def compiled(size: Size) -> str:
        caplog.clear()
        g = Graph("sums")
        g.output(rlx.reduce_sum(rlx.expand(g.input("x", (1,)), (size,)), name="endless"), "y")
        rlx.compile(g, device="cpu")
        return "".join(record.message for record in caplog.records)

    assert compiled(1000) == ""
    assert compiled(Dim("n", 1, 2**50)) == ""
    assert "endless alone turns its loops 1.13e+15 times" in compiled(2**50)
    assert "endless" in compiled(Dim("n", 2**50, 2**51))


def test_sums_of_one_value_are_made_one_by_one() -> None:
    """No loop goes along vectors there: it takes as long as reading elements from all over."""

    def scattered(*shape: int, axis: int | None = None) -> int:
        g = Graph("sums")
        x = g.input("x", tuple(n if d != axis and axis is not None else 1 for d, n in enumerate(shape)))
        g.output(rlx.reduce_sum(rlx.expand(x, shape), axes=None if axis is None else (axis,)), "y")
        (kernel,) = lower(g, backend_named("cpu")).program.run
        return kernel_work(kernel, {}).calls.get("scattered", 0)

    assert scattered(4096) == 4096
    assert scattered(64, 64) == 4096
    assert scattered(64, 64, axis=1) == scattered(64, 64, axis=0) == 0


@pytest.mark.parametrize("rows, keys", [(1, 1), (3, 5), (5, 3), (4, 4), (1, 7), (7, 1)])
def test_pairs_of_causal_attention(rows: int, keys: int) -> None:
    """Row i sees the keys up to i + keys - rows; a sum over rows would take as long as the sizes are large."""
    g = Graph("causal")
    q, k, v = (g.input(name, (1, 1, n, 8)) for name, n in (("q", rows), ("k", keys), ("v", keys)))
    g.output(rlx.attention(q, k, v, causal=True), "y")
    pairs = sum(min(max(i + keys - rows + 1, 0), keys) for i in range(rows))
    kernels = [k for k in lower(g, backend_named("cpu")).program.run if isinstance(k.anchor, Attention)]
    assert {kernel_work(k, {}).products for k in kernels} - {0} == {2 * pairs * 16}
