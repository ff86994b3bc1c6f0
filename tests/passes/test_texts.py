"""What each pass makes of small graphs, as text: the graph that goes in, and the one that comes out.

The cases of a pass are in `texts`, in a file with the name of its module. A case is a line with a sentence after "# ",
the text of a graph, and after a line "->" the text of what the pass makes of it, without what nothing needs any more;
or the word "unchanged".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pass_checks import arrays_for, assert_same_results

import rlx.passes
from rlx.ir.graph import Graph, Node
from rlx.ir.text import parse_graph, print_graph
from rlx.ir.verify import verify
from rlx.passes import PASSES
from rlx.passes.cse import cse
from rlx.passes.dce import dce
from rlx.passes.dims import apply_dims
from rlx.passes.legalise import legalise
from rlx.passes.lora import lora
from rlx.passes.number_strings import number_strings
from rlx.passes.precision import apply_precision
from rlx.passes.rewrite import inside_regions

TEXTS = Path(__file__).parent / "texts"
HELPERS = {"__init__"}  # modules that are no passes


def claims(node: Node) -> str | None:
    return "not here" if node.op.op_name in ("gemm", "softmax") else None


REWRITES: dict[str, Callable[[Graph], Graph]] = {
    **dict(PASSES),
    "dims": lambda graph: apply_dims(graph, {name: size for name, size in SIZES.items() if name in graph.dims()}),
    "legalise": lambda graph: legalise(graph, claims)[0],
    "number_strings": number_strings,
    "lora": lambda graph: lora(graph, rank=2, targets="w*"),
    "rewrite": lambda graph: inside_regions(graph, cse),
    "precision": lambda graph: apply_precision(graph, "q8"),
}
SIZES = {"n": 4, "m": (1, 8)}


def cases() -> list[object]:
    found = []
    for path in sorted(TEXTS.glob("*.txt")):
        for text in re.split(r"^# ", path.read_text(), flags=re.MULTILINE)[1:]:
            title, _, rest = text.partition("\n")
            before, _, after = rest.partition("->\n")
            found.append(pytest.param(path.stem, before, after, id=f"{path.stem}: {title}"))
    return found


@pytest.mark.parametrize("name, before, after", cases())
def test_text_in_text_out(name: str, before: str, after: str) -> None:
    graph = parse_graph(before)
    verify(graph)
    assert print_graph(graph) == before
    made = REWRITES[name](graph)
    assert print_graph(graph) == before, "a pass changed its argument"
    verify(made)
    if name in dict(PASSES):
        assert_same_results(graph, made, *arrays_for(graph))
    wanted = before if after == "unchanged\n" else after
    assert print_graph(made if name == "dce" else dce(made)) == wanted


def test_each_pass_has_cases_of_both_kinds() -> None:
    """Of what it changes, and of what it leaves alone."""
    changed: dict[str, set[bool]] = {}
    for case in cases():
        name, _, after = case.values  # type: ignore[attr-defined]
        changed.setdefault(name, set()).add(after != "unchanged\n")
    folder = Path(rlx.passes.__file__).parent
    modules = {path.stem for where in (folder, folder / "raising") for path in where.glob("*.py")}
    assert changed.keys() == modules - HELPERS == REWRITES.keys()
    changed.pop("lora")  # which raises where it finds nothing to change
    assert not [name for name, kinds in changed.items() if kinds != {True, False}]
