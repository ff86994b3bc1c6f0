"""Tests that need some instructions say so by a marker: where they are missing, these count as skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from targets import pretend

TESTS = Path(__file__).parents[1]
NAMES = ("avx2", "avx512", "vnni", "amx", "amx_f32")


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """The plugin of all tests; another file of that name may be the module `conftest`."""
    path = str(TESTS / "conftest.py")
    return next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "__file__", "") == path)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_skipped(
    name: str, request: pytest.FixtureRequest, conftest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = request.node
    item.add_marker(pytest.mark.needs(name))
    pretend(monkeypatch, vector_bytes=16, features="", tiles=False, float_tiles=False)
    assert conftest.lacking(item) == [name]
    with pytest.raises(pytest.skip.Exception, match=f"needs {name}"):
        conftest.pytest_runtest_setup(item)


def test_samples_are_of_what_can_run(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Case:
        def __init__(self, name: str, *markers: pytest.MarkDecorator) -> None:
            self.nodeid = f"f[{name}]"
            self.markers = [m.mark for m in (*markers, pytest.mark.sample(2))]

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            return next(self.iter_markers(name), None)

        def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
            return (m for m in self.markers if m.name == name)

    monkeypatch.setattr(conftest, "has_instructions", lambda name: False)
    absent = [Case(str(n), pytest.mark.needs("amx")) for n in range(9)]
    here = [Case("a"), Case("b")]
    assert conftest.select_quick([*absent, *here], frozenset(), 0) == set(here)  # type: ignore[arg-type, comparison-overlap]
    assert len(conftest.select_quick(absent, frozenset(), 0)) == 2  # type: ignore[arg-type]


def test_an_unknown_name_is_an_error(conftest: Any) -> None:
    with pytest.raises(pytest.UsageError, match="sse9"):
        conftest.has_instructions("sse9")


def test_no_test_looks_for_instructions_itself() -> None:
    """Neither does it return early where some are missing, nor leave cases out."""
    asks = ("machine().vector_bytes", "machine().tiles", "machine().float_tiles", ".instructions(machine())")
    wrong = []
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    for path in (path for path, text in texts.items() if any(ask in text for ask in asks)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.If):
                leaves = any(ast.unparse(x) == "return" or "pytest.skip" in ast.unparse(x) for x in node.body)
                found = leaves and ast.unparse(node.test)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("skipif"):
                found = ast.unparse(node)
            else:
                continue
            if found and any(ask in found for ask in asks):
                wrong.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    assert not wrong, f"mark them needs(...): {wrong}"
