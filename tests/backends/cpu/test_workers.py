"""Jobs on several threads: their order, errors, and what is dropped."""

from __future__ import annotations

import threading

import pytest

import rlx
from rlx.backends import choose_backend
from rlx.backends.cpu.jit.workers import Crew
from rlx.compiler import compile_graph
from rlx.errors import MemoryDeficit
from rlx.ir.graph import Graph
from rlx.options import CompileOptions


def test_the_largest_job_comes_first() -> None:
    """Alone, the caller does all jobs at the end, by size and then by age."""
    crew, done = Crew(1), list[str]()
    for size, name in ((1, "small"), (3, "large"), (1, "later"), (2, "middle")):
        crew.add(size, lambda name=name: done.append(name))  # type: ignore[misc]
    assert done == []
    crew.finish()
    assert done == ["large", "middle", "small", "later"]


def test_jobs_run_while_more_are_made() -> None:
    """A thread beside the caller does jobs before anybody waits for them, and is gone after the end."""
    crew, done = Crew(2), threading.Event()
    crew.add(1, done.set)
    assert done.wait(60)
    crew.finish()
    assert not any(thread.is_alive() for thread in crew.threads)


def test_the_first_error_is_raised_at_the_end() -> None:
    """What has not begun by then is dropped."""
    crew, done = Crew(1), list[int]()

    def fail() -> None:
        raise ValueError("broken")

    crew.add(2, fail)
    crew.add(1, lambda: done.append(1))
    with pytest.raises(ValueError, match="broken"):
        crew.finish()
    assert done == []


@pytest.mark.parametrize("threads", [1, 3])
def test_a_cancelled_crew_has_no_threads(threads: int) -> None:
    """Jobs that wait are dropped, the one that runs is waited for."""
    crew, began, go, done = Crew(threads), threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        began.set()
        assert go.wait(60)
        done.append(1)

    for _ in range(threads + 2):
        crew.add(1, slow)
    if threads > 1:
        assert began.wait(60)
    go.set()
    crew.cancel()
    assert threads > 1 or done == []
    assert not any(thread.is_alive() for thread in crew.threads)


def test_a_refused_model_leaves_no_compiler_behind() -> None:
    """Code that is made while the question is open is dropped when the answer is no, and can be made again."""
    g = Graph("refused")
    x = g.input("x", (5, 7))
    g.output(x * 2.5 + x, "y")
    backend, options = choose_backend("cpu"), CompileOptions(device="cpu")

    def refuse(*_: object) -> None:
        raise MemoryDeficit("no", budget_bytes=1, peak_bytes=2, parts={}, remedies=())

    with pytest.raises(MemoryDeficit):
        compile_graph(g, backend, options, refuse, early=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "rlx compiler"]
    assert rlx.compile(g, device="cpu") is not None
