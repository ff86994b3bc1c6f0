"""Budgets: arithmetic on injected figures, the order of their sources, and control groups read from sample files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.errors import OptionError
from rlx.estimate.system import (
    UNKNOWN,
    Budget,
    CgroupLevel,
    MemoryFigures,
    cgroup_levels,
    read_figures,
    soft_budget,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_SOFT_MEMORY_FRACTION", raising=False)
    monkeypatch.delenv("RLX_SOFT_MEMORY_BUDGET_BYTES", raising=False)


def figures(**changes: object) -> MemoryFigures:
    known: dict[str, object] = {"total": 10 * GIB, "available": 6 * GIB, "private": GIB, **changes}
    return MemoryFigures(**known)  # type: ignore[arg-type]


def test_fraction_is_of_the_smaller_of_ram_and_control_group_rounded_down() -> None:
    assert soft_budget(figures(total=1001)) == 800
    assert soft_budget(figures(total=1001, cgroup=(CgroupLevel(11, 0), CgroupLevel(None, 5)))) == 8
    assert soft_budget(figures(total=1001), fraction=1) == 1001
    assert soft_budget(figures(total=3), fraction=0.5) == 1
    assert soft_budget(figures(total=None)) is None


def test_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, bytes variable, fraction variable, default; variables are read at use."""
    seen = figures(total=1000)
    assert soft_budget(seen) == 800
    monkeypatch.setenv("RLX_SOFT_MEMORY_FRACTION", "0.5")
    assert soft_budget(seen) == 500
    monkeypatch.setenv("RLX_SOFT_MEMORY_BUDGET_BYTES", "123")
    assert soft_budget(seen) == 123
    monkeypatch.setenv("RLX_SOFT_MEMORY_BUDGET_BYTES", "2KiB")
    assert soft_budget(seen) == 2048
    assert soft_budget(seen, fraction=0.25) == 250
    assert soft_budget(seen, budget="1KB") == 1000


@pytest.mark.parametrize("value", ["", "0", "-1", "1.01", "nan", "much"])
def test_bad_fraction_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RLX_SOFT_MEMORY_FRACTION", value)
    with pytest.raises(OptionError, match="RLX_SOFT_MEMORY_FRACTION"):
        soft_budget(figures())


@pytest.mark.parametrize("value", ["", "-1", "8XiB", "much"])
def test_bad_bytes_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RLX_SOFT_MEMORY_BUDGET_BYTES", value)
    with pytest.raises(OptionError, match="RLX_SOFT_MEMORY_BUDGET_BYTES"):
        soft_budget(figures())


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, True, float("nan")])
def test_bad_fraction(fraction: float) -> None:
    with pytest.raises(OptionError, match="fraction"):
        soft_budget(figures(), fraction=fraction)
    with pytest.raises(OptionError, match="give one of them"):
        soft_budget(figures(), fraction=0.5, budget=1)


def test_headroom_is_the_smaller_of_soft_room_and_free() -> None:
    assert Budget(figures(private=100), 1000).headroom == 900
    assert Budget(figures(private=2000), 1000).headroom == 0
    assert Budget(figures(available=50), 10 * GIB).headroom == 50
    assert Budget(figures(cgroup=(CgroupLevel(100, 30), CgroupLevel(80, 45))), 10 * GIB).headroom == 35
    assert Budget(figures(address_limit=90, address_used=60), 10 * GIB).headroom == 30


def test_would_exceed_only_above_the_headroom() -> None:
    budget = Budget(figures(private=100), 1000)
    assert budget.would_exceed(900) is False
    assert budget.would_exceed(901) is True


@pytest.mark.parametrize(
    "unknown", [{"available": None}, {"private": None}, {"address_limit": 2000, "address_used": None}]
)
def test_unknown_is_never_fits_and_no_bool(unknown: dict[str, object]) -> None:
    budget = Budget(figures(**{"private": 100, **unknown}), 1000)
    assert budget.headroom is None
    answer = budget.would_exceed(1)
    assert answer is UNKNOWN
    with pytest.raises(OptionError, match="unknown"):
        bool(answer)


def test_what_is_known_can_still_say_no() -> None:
    budget = Budget(figures(available=None, private=100), 1000)
    assert budget.would_exceed(901) is True
    assert Budget(figures(available=None), None).would_exceed(1) is UNKNOWN


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def test_cgroup_v2_walks_up_and_leaves_out_droppable_files(tmp_path: Path) -> None:
    outer = group(
        tmp_path / "a", memory__max="1000\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 50\n"
    )
    group(outer / "b", memory__max="max\n", memory__current="300\n", memory__stat="inactive_file 0\n")
    mounts = f"30 20 0:26 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw\n"
    assert list(cgroup_levels("0::/a/b\n", mounts)) == [CgroupLevel(None, 300), CgroupLevel(1000, 650)]


def test_cgroup_v1_of_a_container_whose_group_is_the_mounted_root(tmp_path: Path) -> None:
    group(
        tmp_path,
        memory__limit_in_bytes="500",
        memory__usage_in_bytes="400",
        memory__stat="total_inactive_file 100\n",
    )
    groups = "9:cpu:/docker/x\n4:memory:/docker/x\n0::/\n"
    mounts = (
        f"31 20 0:27 /docker/x {tmp_path} ro - cgroup cgroup rw,memory\n40 20 0:9 / /none rw - cgroup cgroup rw,cpu\n"
    )
    assert list(cgroup_levels(groups, mounts)) == [CgroupLevel(500, 300)]


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    group(tmp_path, memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5", memory__stat="")
    mounts = f"31 20 0:27 / {tmp_path} ro - cgroup cgroup rw,memory\n"
    assert list(cgroup_levels("4:memory:/gone\n", mounts)) == [CgroupLevel(None, 5)]


def test_this_machine_is_known() -> None:
    seen = read_figures()
    assert seen.total is not None
    assert seen.available is not None
    assert seen.private is not None
    assert 0 < seen.available <= seen.total
    assert 1 << 20 < seen.private < seen.total
