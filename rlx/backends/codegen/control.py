"""Control flow over the table of phases: the phase that comes after a mark, told by the host.

A device whose own code walks the table does the same there, as the CPU's kernels of marks do. A word that depends on
the number of a round is `base + sum(coefficient * counter)` over the loops that it lies in; "loop" and "next" compute
all of them anew, so nothing that a failed run leaves behind matters.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.codegen.binding import Binding
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Flow, Mark

__all__ = ["next_phase"]


def next_phase(binding: Binding, number: int, mark: Mark, holds: Callable[[Buffer], bool], label: str) -> int:
    """The phase that comes after the mark, which is phase `number`; counters and words of loops are brought up to date.

    `holds` reads a bool scalar from the device: the test of an "if" or a "while". Raises `Overrun` and
    `ExecutionError` where there is no room for another round of a loop; `label` names it.
    """
    marks, flow = binding.table.marks, mark.flow
    match mark.part:
        case "if":
            assert mark.test is not None
            return number + 1 if holds(mark.test) else marks[flow, "else"]
        case "else":
            return marks[flow, "end"]
        case "loop":
            _count(binding, flow, 0)
            return marks[flow, "end"] if _trips(binding, flow) == 0 else number + 1
        case "while":
            assert mark.test is not None
            if not holds(mark.test):
                return marks[flow, "end"]
            rounds = int(binding.words[binding.table.counters[flow]])
            if flow.count is not None and rounds >= binding.room[flow.count.name]:
                raise binding.too_many_rounds(flow.count, label, rounds + 1)
            return number + 1
        case "next":
            rounds = int(binding.words[binding.table.counters[flow]]) + 1
            _count(binding, flow, rounds)
            trips = _trips(binding, flow)
            return marks[flow, "start"] if trips is None or rounds < trips else number + 1
    raise AssertionError(f"no phase for the mark {mark.part!r}")


def _trips(binding: Binding, flow: Flow) -> int | None:
    return None if flow.trips is None else max(evaluate(flow.trips, binding.at_round()), 0)


def _count(binding: Binding, flow: Flow, rounds: int) -> None:
    """Sets the number of the round, and every word that depends on it."""
    words = binding.words
    words[binding.table.counters[flow]] = rounds
    for word, base, terms in binding.table.updates[flow]:
        words[word] = words[base] + sum(words[coefficient] * words[counter] for coefficient, counter in terms)
