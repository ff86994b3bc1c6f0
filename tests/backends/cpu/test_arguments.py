"""The arguments of a kernel as a record: what binding puts in an order is what code reads at that place."""

from __future__ import annotations

import re

import pytest

from rlx.backends.cpu.llvm.builder import Function
from rlx.backends.cpu.schedule.arguments import Address, Arguments, Number


class Image(Arguments):
    x: Address
    step: Number


class Window(Image):
    weights: Address
    taps: Number


def read(f: Function) -> list[tuple[str, int]]:
    """The types and the places that a function loads, in order."""
    places = {"%words": 0}
    found = []
    for line in f.lines:
        if made := re.search(r"(%v\d+) = getelementptr inbounds i64, ptr %words, i64 (\d+)", line):
            places[made[1]] = int(made[2])
        elif loaded := re.search(r"load (\w+), ptr (%\w+)", line):
            found.append((loaded[1], places[loaded[2]]))
    return found


@pytest.mark.parametrize("first", [0, 7])
def test_code_reads_each_argument_where_binding_puts_it(first: int) -> None:
    f = Function("f", [("ptr", "words")])
    w = Window.loaded(f, first=first)
    assert Window.given(taps=4, x=1, weights=3, step=2) == [1, 2, 3, 4]
    assert read(f) == [("ptr", first), ("i64", first + 1), ("ptr", first + 2), ("i64", first + 3)]
    assert len({w.x, w.step, w.weights, w.taps}) == 4


def test_one_that_extends_another_has_the_others_places() -> None:
    assert Window.names() == (*Image.names(), "weights", "taps")
    f = Function("f", [("ptr", "words")])
    Window.load(f, "taps")
    f.load("i64", Image.behind(f))
    assert read(f) == [("i64", 3), ("i64", 2)]


@pytest.mark.parametrize("words", [{"x": 1}, {"x": 1, "step": 2, "taps": 3}])
def test_a_record_is_given_whole(words: dict[str, int]) -> None:
    with pytest.raises(TypeError, match=r"Image: .*(step|taps)"):
        Image.given(**words)
