"""Every option on every device: it has an effect, or a compile that names the device is refused; auto goes by it."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends import BACKENDS, backend_named, check_options
from rlx.backends.base import CAPABILITIES, Availability, Backend
from rlx.backends.library.precision import multiplies_f32
from rlx.compiler import compile_graph
from rlx.demo import DIGITS
from rlx.errors import DeviceUnavailable, NanTrapped, OptionError, StaleView
from rlx.estimate.graph import estimate_graph
from rlx.ir.dtype import DTYPES
from rlx.ops.conv import Conv
from rlx.options import DEVICE_OPTIONS, PRECISIONS, CompileOptions
from rlx.records import names_of
from rlx.runtime.auto import compile_chosen
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.memory import Resident
from rlx.runtime.policy import DevicePolicy

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import option_table

OTHER: dict[str, Any] = {  # a value beside the default
    "threads": 1, "alignment": 256, "search": "off", "reuse": False, "packing": "shared", "trap": "nan", "debug": True,
}  # fmt: skip


def graph() -> rlx.Graph:
    """softmax(log(x) @ w) over rows, and the products with themselves."""
    g = rlx.Graph("g")
    w = g.param("w", data=np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16))
    h = rlx.log(g.input("x", (32, 16))) @ w
    for _ in range(4):
        h = rlx.softmax(h @ w)
    g.output(h, "y")
    return g


def traps(model: CompiledGraph, plain: CompiledGraph) -> bool:
    bad = {"x": np.full((32, 16), -1, np.float32)}
    plain.run(bad)
    with pytest.raises(NanTrapped):
        model.run(bad)
    return True


def refuses_stale_views(model: CompiledGraph, plain: CompiledGraph) -> bool:
    x = np.ones((32, 16), np.float32)
    for made in (model, plain):
        first = made.run_views([x])
        made.run_views([x])
        if made is plain:
            _ = first["y"]
        else:
            with pytest.raises(StaleView):
                _ = first["y"]
    return True


EFFECT: dict[str, Callable[[Any, Any], bool]] = {
    "threads": lambda model, plain: model.compilation.executable.shared.threads == 1,
    "alignment": lambda model, plain: {offset % 256 for offset in model.plan.offsets.values()} == {0},
    "reuse": lambda model, plain: model.plan.arena > plain.plan.arena and model.plan.totals.saved == 0,
    "trap": traps,
    "debug": refuses_stale_views,
}
TOLD = {"search": "rlx.plan.plan.make_plan", "packing": "rlx.backends.cpu.backend.CpuBackend.layout"}


def test_the_tables_are_whole() -> None:
    """Every option of a device is tried here, devices declare no others, and each capability has a name."""
    assert set(OTHER) == {*EFFECT, *TOLD} == set(DEVICE_OPTIONS)
    for name in BACKENDS:
        assert backend_named(name).honours <= set(DEVICE_OPTIONS)
        assert backend_named(name).capabilities <= set(CAPABILITIES)
    for name in names_of(CompileOptions):
        found = CompileOptions(**{name: OTHER[name]} if name in OTHER else {}).of_device()
        assert found == ({name: OTHER[name]} if name in OTHER else {})


def test_the_page_has_the_table_of_the_code() -> None:
    """Run `python tools/option_table.py` after a change."""
    page = option_table.PAGE.read_text()
    assert option_table.written(page) == page


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("option", DEVICE_OPTIONS)
def test_an_option_is_honoured_or_refused(device: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compile, load, estimate and Session, whether or not the device is here; what is honoured has its effect."""
    backend, given = backend_named(device), {option: OTHER[option]}
    options = CompileOptions(device=device, **given)
    if option in backend.honours:
        check_options(backend, options)
        if not backend.available().present:
            return
        plain = rlx.compile(graph(), device=device)
        if option in EFFECT:
            assert EFFECT[option](rlx.compile(graph(), device=device, **given), plain)
            return
        calls: list[tuple[Any, ...]] = []  # of what plans or lays out the program
        where, _, name = TOLD[option].rpartition(".")
        known = pkgutil.resolve_name(TOLD[option])

        def told(*args: Any, **keywords: Any) -> Any:
            calls.append((*args, *keywords.values()))
            return known(*args, **keywords)

        monkeypatch.setattr(pkgutil.resolve_name(where), name, told)
        rlx.compile(graph(), device=device, **given)
        assert calls
        assert all(OTHER[option] in [a for a in call if isinstance(a, str)] for call in calls)
        return
    shown = f"device '{device}' can't honour {option}={OTHER[option]!r}: leave it out, name a device that can"
    ways = [
        lambda: check_options(backend, options),
        lambda: compile_graph(graph(), backend, options),
        lambda: estimate_graph(graph(), backend, options, None),  # type: ignore[arg-type]
    ]
    if backend.available().present:
        ways += [
            lambda: rlx.compile(graph(), device=device, **given),
            lambda: rlx.Session(device=device, **given).load(graph()),
            lambda: rlx.load(DIGITS, device=device, **given),
            lambda: rlx.Session(device=device, **given).estimate(DIGITS, dims={"batch": 1}),
        ]
    for way in ways:
        with pytest.raises(OptionError) as caught:
            way()
        assert shown in str(caught.value)
        assert "'cpu'" in str(caught.value)
        assert "device='auto'" in str(caught.value)


# ---- precision


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_honoured_or_refused(device: str, precision: str) -> None:
    """By compile, load, estimate, Session and choice; where no device honours it, no other is named."""
    backend, options = backend_named(device), CompileOptions(device=device, precision=precision)
    able = [name for name in BACKENDS if precision in backend_named(name).precisions]
    here = backend.available().present
    if device in able:
        check_options(backend, options)
        assert not here or rlx.compile(graph(), device=device, precision=precision).device == device
        return
    ways = [
        lambda: check_options(backend, options),
        lambda: compile_graph(graph(), backend, options),
        lambda: estimate_graph(graph(), backend, options, None),  # type: ignore[arg-type]
    ]
    if here:
        ways += [
            lambda: rlx.compile(graph(), device=device, precision=precision),
            lambda: rlx.Session(device=device, precision=precision).load(graph()),
            lambda: rlx.load(DIGITS, device=device, precision=precision),
            lambda: rlx.Session(device=device, precision=precision).estimate(DIGITS, dims={"batch": 1}),
        ]
    for way in ways:
        with pytest.raises(OptionError) as caught:
            way()
        assert f"device '{device}' can't honour precision='{precision}': leave it out" in str(caught.value)
        assert ("no device honours all of the options" in str(caught.value)) == (not able)
        assert all(f"'{name}'" in str(caught.value) for name in able)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_auto_goes_by_the_precision(precision: str, deaf: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes in another one is not chosen, and the decision says why."""
    monkeypatch.setattr(deaf, "precisions", frozenset(PRECISIONS) - {precision})
    with pytest.raises(DeviceUnavailable, match=f"deaf: it can't honour precision='{precision}'"):
        rlx.choose(graph(), DevicePolicy(only=("deaf",)), calibrate=False, precision=precision)
    assert not DevicePolicy().unfit(backend_named("cpu"), CompileOptions())


def test_precisions_are_types_and_f32_is_everywhere() -> None:
    for name, (storage, multiply, accumulate) in PRECISIONS.items():
        assert storage == "f32" == accumulate  # declared types stay
        assert multiply == name
        assert multiply == "q8" or DTYPES[multiply].is_float
    for device in BACKENDS:
        assert "f32" in backend_named(device).precisions <= set(PRECISIONS)


def products(dtype: str, close: float) -> tuple[rlx.Graph, dict[str, Any], dict[str, Any]]:
    """Contractions of every kind, inputs for them, and their results by f64.

    Elements are close to the next number of fewer bits on one side, so that rounding operands shows in every sum.
    """
    rng = np.random.default_rng(0)
    g, inputs, want = rlx.Graph("products"), {}, {}
    made = DTYPES[dtype].numpy

    def operand(name: str, *shape: int) -> tuple[Any, Any]:
        array = ((1 + rng.integers(0, 2, shape)) * (1 + close)).astype(made)
        inputs[name] = array
        return g.input(name, shape, dtype), array.astype(np.float64)

    for name, a, b in (
        ("one row", (1, 256), (256, 64)),
        ("rows", (7, 256), (256, 64)),
        ("square", (96, 128), (128, 96)),
        ("batch", (3, 40, 64), (3, 64, 40)),
        ("vector", (300,), (300, 5)),
    ):
        (x, x_wide), (y, y_wide) = operand(f"{name} a", *a), operand(f"{name} b", *b)
        g.output(x @ y, name)
        want[name] = x_wide @ y_wide
    for name, shape, window, groups in (
        ("pixels", (1, 64, 8, 8), (32, 64, 1, 1), 1),
        ("window", (1, 32, 12, 12), (32, 32, 5, 5), 1),  # no transforms: their sums of integers are not exact
        ("depthwise", (1, 16, 9, 9), (16, 1, 3, 3), 16),
        ("grouped", (2, 16, 9, 9), (16, 4, 3, 3), 4),
        ("signal", (2, 8, 30), (4, 8, 5), 1),
    ):
        (x, x_wide), (w, w_wide) = operand(f"{name} x", *shape), operand(f"{name} w", *window)
        g.output(rlx.conv(x, w, groups=groups), name)
        want[name] = Conv(groups=groups).reference(x_wide, w_wide)
    return g, inputs, want


@pytest.mark.parametrize("device", BACKENDS)
def test_f32_is_multiplied_and_accumulated_in_f32(device: str) -> None:
    """Operands of fewer bits (TF32, bf16) would be 2^-12 off in every product: 50 times what is allowed here."""
    if not backend_named(device).available().present:
        pytest.skip(backend_named(device).available().why)
    g, inputs, want = products("f32", 2.0**-12)
    for given in ({}, {"precision": "f32"}):
        for name, got in rlx.compile(g, device=device, **given)(inputs).items():  # type: ignore[arg-type]
            np.testing.assert_allclose(np.asarray(got), want[name], rtol=5e-6, err_msg=name)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_types_below_32_bits_are_accumulated_in_f32(dtype: str, device: str) -> None:
    """And rounded once: their own sums would stand still after as many ones as they have bits for."""
    if not backend_named(device).available().present:
        pytest.skip(backend_named(device).available().why)
    g, inputs, want = products(dtype, 0.0)
    for name, got in rlx.compile(g, device=device)(inputs).items():
        once = want[name].astype(np.float32).astype(DTYPES[dtype].numpy)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), once.astype(np.float64), err_msg=name)


@pytest.mark.parametrize("device", ["xla", "mlx"])
@pytest.mark.parametrize("narrow", ["bf16", "f16"])
@pytest.mark.parametrize("what", ["matmul", "conv"])
def test_a_library_that_multiplies_in_less_is_refused(
    what: str, narrow: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPUs may, by settings that no call overrides; it is found out when the device is first used."""
    backend: Any = backend_named(device)
    if not backend.available().present:
        pytest.skip(backend.available().why)
    lib: Any = backend.arrays()
    assert multiplies_f32(lib)
    known = getattr(lib, what)

    def less(a: Any, b: Any, *more: Any) -> Any:
        return known(lib.cast(lib.cast(a, DTYPES[narrow]), DTYPES["f32"]), b, *more)

    monkeypatch.setattr(lib, what, less)
    assert not multiplies_f32(lib)
    other = type(backend)()
    monkeypatch.setattr(type(backend), "on_processor", False)
    monkeypatch.setattr(other, "arrays", lambda: lib)
    with pytest.raises(DeviceUnavailable, match=f"'{device}'.*precision='f32' does not allow"):
        _ = other.lib


def test_an_artifact_brings_a_device_only_what_it_honours(tmp_path: Path) -> None:
    """The options that it was made with are those of its code; another device compiles it again without them."""
    g = rlx.Graph("double")
    g.output(g.input("x", (3,)) * 2.0, "y")
    rlx.compile(g, device="cpu", packing="shared", alignment=128).save(tmp_path / "m.rlxart")
    for device in ("reference", "cpu"):
        model = rlx.load(tmp_path / "m.rlxart", device=device)
        assert model.run([np.ones(3, np.float32)])[0].tolist() == [2, 2, 2]
    with pytest.raises(OptionError, match="alignment"):
        rlx.load(tmp_path / "m.rlxart", device="reference", alignment=256)


def test_a_report_that_can_not_be_timed_is_refused(tmp_path: Path) -> None:
    model = rlx.compile(graph(), device="reference")
    with pytest.raises(OptionError, match="report: device 'reference' can't time its kernels: leave inputs= out"):
        model.report(tmp_path / "page.html", [np.ones((32, 16), np.float32)])
    model.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A device that is here, runs everything, and honours and offers nothing; the first to be looked at."""

    class Deaf(type(backend_named("reference"))):  # type: ignore[misc]
        name = "deaf"
        honours = frozenset()
        capabilities = frozenset({"out"})

        def available(self) -> Availability:
            return Availability(True, "for tests")

    devices = {"deaf": "", **BACKENDS}
    made: Backend = Deaf()
    for module in ("rlx.backends", "rlx.runtime.choice", "rlx.runtime.auto", "rlx.runtime.policy"):
        monkeypatch.setattr(f"{module}.BACKENDS", devices)
        if module != "rlx.runtime.policy":
            monkeypatch.setattr(f"{module}.backend_named", lambda name: made if name == "deaf" else backend_named(name))
    return made


@pytest.mark.parametrize("option", DEVICE_OPTIONS)
def test_auto_goes_by_the_option(option: str, deaf: Backend) -> None:
    """A device that would ignore it is not chosen, and the decision says why; where no other is left, that is said."""
    given = {option: OTHER[option]}
    decision = rlx.choose(graph(), calibrate=False, **given)
    assert decision.device == "cpu"
    obstacles = {c.device: c.obstacle for c in decision.candidates}
    assert obstacles["deaf"] == f"it can't honour {option}={OTHER[option]!r}"
    assert not DevicePolicy().unfit(deaf, CompileOptions())
    policy = DevicePolicy(deny=("xla", "mlx"))
    made = compile_chosen(graph(), policy, CompileOptions(**given), Resident.read())
    assert made.device == "cpu"
    assert made.decision is not None
    assert obstacles["deaf"] in str(made.decision)
    with pytest.raises(DeviceUnavailable, match="deaf: it can't honour"):
        rlx.choose(graph(), DevicePolicy(only=("deaf",)), calibrate=False, **given)


def test_auto_goes_by_what_is_needed(deaf: Backend) -> None:
    """`needs` of a policy keeps out devices that lack a capability; unknown ones are named."""
    decision = rlx.choose(graph(), DevicePolicy(needs=("profile", "clone")), calibrate=False)
    assert decision.device == "cpu"
    assert "deaf      it does not offer what is needed: profile, clone" in str(decision)
    assert DevicePolicy.parse("needs=profile,clone") == DevicePolicy(needs=("profile", "clone"))
    with pytest.raises(OptionError, match="needs='profil': unknown capability; known are arena, clone"):
        DevicePolicy(needs="profil")  # type: ignore[arg-type]
