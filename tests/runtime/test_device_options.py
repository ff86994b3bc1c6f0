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
from rlx.compiler import compile_graph
from rlx.demo import DIGITS
from rlx.errors import DeviceUnavailable, NanTrapped, OptionError, StaleView
from rlx.estimate.graph import estimate_graph
from rlx.options import DEVICE_OPTIONS, CompileOptions
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
