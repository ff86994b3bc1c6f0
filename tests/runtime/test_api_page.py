"""The API page shows every call: those of the design's table, and all that is public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlx
from rlx.runtime.states import State, States

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
DESIGN = (ROOT / "docs" / "design.md").read_text()
INTERNAL = {"compilation", "decide", "holding"}


def table() -> set[str]:
    """The calls in the first column of the table of `CompiledGraph`."""
    rows = DESIGN.split("`CompiledGraph`:")[1].split("\n\n")[1].splitlines()[2:]
    columns = [re.split(r"(?<!\\)\|", row)[1] for row in rows]
    return {name for column in columns for code in re.findall(r"`([^`]+)`", column) for name in calls(code)}


def calls(code: str) -> list[str]:
    """The names of what is called or read: `.read()` and `run_feed(...)`, but not the arguments."""
    while "(" in code:
        code = re.sub(r"\([^()]*\)", "", code)
    found = re.findall(r"[a-z_]+", re.sub(r"\[[^\]]*\]", "", code).replace("await ", ""))
    return [name for name in found if name != "rlx"]


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")} - set(dir(dict))


def used(name: str) -> bool:
    return re.search(rf"\.{name}\b", CODE) is not None


def test_the_table_is_read() -> None:
    assert {"run", "set_params", "read_output_row", "feed", "submit", "run_many", "report", "save", "load"} <= table()


@pytest.mark.parametrize("name", sorted(table()))
def test_every_call_of_the_design_is_shown(name: str) -> None:
    """Examples run in `tests/test_docs.py`; here: that there is one."""
    assert used(name)


@pytest.mark.parametrize("name", sorted(public(rlx.CompiledGraph) - INTERNAL | public(State) | public(States)))
def test_every_public_call_is_shown(name: str) -> None:
    assert used(name) or name in ("adapters", "set_adapter")  # which docs/weights.md shows
    owner = next(cls for cls in (rlx.CompiledGraph, State, States) if hasattr(cls, name))
    assert getattr(owner, name).__doc__
