"""Why a function was traced: what is different from the nearest earlier trace, argument by argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.records import dataclass
from rlx.trace.arguments import Arguments, Leaf

__all__ = ["Trace", "reason_for", "statics"]


@dataclass(frozen=True, eq=False)
class Trace:
    """One trace of a function: why it was made, for which arguments, its graph, and seconds to trace and compile."""

    reason: str
    arguments: tuple[Leaf, ...]
    static: tuple[tuple[str, Any], ...]
    graph: Graph
    seconds: float

    def __str__(self) -> str:
        given = [*map(str, self.arguments), *(f"{name}={value!r}" for name, value in self.static)]
        return f"({', '.join(given)}) in {self.seconds:.3f} s: {self.reason}"


def statics(arguments: Arguments, bound: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The static arguments and their values."""
    return tuple((name, value) for name, value in bound.items() if name in arguments.static)


def reason_for(
    earlier: Sequence[Trace], given: Sequence[Leaf], static: Sequence[tuple[str, Any]], *, again: bool
) -> str:
    """What differs from the earlier trace that is most alike."""
    if not earlier:
        return "the first call"
    if again:
        return "this signature's trace is no longer among those kept"
    found = min((_differences(trace, given, static) for trace in reversed(earlier)), key=len)
    return "; ".join(found) or "the structure of an argument is another (the type of a container, say)"


def _differences(trace: Trace, given: Sequence[Leaf], static: Sequence[tuple[str, Any]]) -> list[str]:
    old, new = ({leaf.path: leaf for leaf in leaves} for leaves in (trace.arguments, given))
    found = [f"{path} is new" for path in new if path not in old]
    found += [f"{path} is gone" for path in old if path not in new]
    for path in (p for p in new if p in old):
        a, b = old[path], new[path]
        if a.type.dtype is not b.type.dtype:
            found.append(f"{path} has the element type {b.type.dtype} instead of {a.type.dtype}")
        if a.type.shape != b.type.shape:
            found.append(f"{path} has the shape {_show(b)} instead of {_show(a)}")
        if a.number != b.number:
            found.append(f"{path} is {'a Python number' if b.number else 'an array'} instead of the other")
    before, now = dict(trace.static), dict(static)
    found += [f"the static argument {name} is {now[name]!r} where there was none" for name in now if name not in before]
    for name, value in before.items():
        if name not in now:
            found.append(f"the static argument {name} is left out instead of {value!r}")
        elif type(value) is not type(now[name]) or value != now[name]:
            found.append(f"the static argument {name} is {now[name]!r} instead of {value!r}")
    return found


def _show(leaf: Leaf) -> str:
    return f"({', '.join(map(str, leaf.type.shape))}{',' if leaf.type.rank == 1 else ''})"
