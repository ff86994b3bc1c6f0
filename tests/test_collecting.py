"""The garbage collector runs seldom within a compile, and as before after it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

import rlx
from rlx.progress import seldom_collected

OBJECTS = seldom_collected.objects


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_it_is_as_before_afterwards() -> None:
    """Also after an error, and when blocks lie within each other."""

    def failing() -> None:
        with seldom_collected:
            assert gc.get_threshold() == (OBJECTS, 10, 10)
            with seldom_collected:
                pass
            assert gc.get_threshold()[0] == OBJECTS
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_thread_ends_it() -> None:
    """A thread that leaves its block leaves that of another alone."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with seldom_collected:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with seldom_collected:
        thread.start()
        assert entered.wait(30)
    assert gc.get_threshold()[0] == OBJECTS
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 5, 5)])
def test_what_the_user_set_stays(own: tuple[int, int, int]) -> None:
    """A collector that is off, or runs even more seldom; and what is set within the block."""
    gc.set_threshold(*own)
    with seldom_collected:
        assert gc.get_threshold() == own
    with seldom_collected:
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_compile_runs_in_such_a_block() -> None:
    """As `progress=` sees it."""
    graph = rlx.Graph("g")
    graph.output(graph.input("x", (4,)) + 1.0)
    seen: list[int] = []
    rlx.compile(graph, device="cpu", cache=False, progress=lambda _: seen.append(gc.get_threshold()[0]))
    assert set(seen) == {OBJECTS}
    assert gc.get_threshold() == (700, 10, 10)
