"""Liveness: when each buffer of a program's arena is in use, and which buffers can be one and the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlx.errors import CompileError
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval

__all__ = ["Lifetimes", "Schedule", "Scratch", "bound_extents", "lifetimes", "schedule"]

Scratch = tuple[str, int, int]  # name, step, bytes: working memory of one kernel


@dataclass(frozen=True)
class Schedule:
    """What planning needs of a program, whatever the extents.

    `ranges`: [start, stop) of each root buffer of the arena over the steps of `program.run`, in order of writing;
    `makers`: the kernel that writes it; `operands`: the buffers that die there and whose place it may take; `bounds`:
    every dim at its upper bound, None where a dim or a size has none.
    """

    ranges: dict[Buffer, tuple[int, int]]
    makers: dict[Buffer, Kernel]
    operands: dict[Buffer, tuple[Buffer, ...]]
    bounds: dict[str, int] | None


@dataclass(frozen=True)
class Lifetimes:
    """The intervals to pack; `buffers[i]` are those that interval i holds one after the other (none: scratch)."""

    intervals: tuple[Interval, ...]
    buffers: tuple[tuple[Buffer, ...], ...]


def bound_extents(program: Program) -> dict[str, int] | None:
    """Every dim at its upper bound, or None when a dim or the size of an arena buffer has none."""
    return schedule(program).bounds


def schedule(program: Program) -> Schedule:
    """The live ranges of a program's arena.

    A buffer is live from the kernel that writes it to its last reader (of it or of a view of it); one that an output or
    an update shows, to the end of the run. Raises `CompileError` where a kernel reads what none has written.
    """
    makers: dict[Buffer, Kernel] = {}
    starts: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for step, kernel in enumerate(program.run):
        for buffer in kernel.reads():
            if buffer.base.kind == "arena":
                if buffer.base not in starts:
                    raise CompileError(f"kernel {step} ({kernel.label}) reads {buffer!r} before any kernel writes it")
                last[buffer.base] = step
        for buffer in kernel.writes():
            if buffer.kind != "arena" or buffer.root is not None or buffer in starts:
                raise CompileError(
                    f"kernel {step} ({kernel.label}) writes {buffer!r} ({buffer.kind}): expected an arena buffer that "
                    "is no view and that no kernel has written yet"
                )
            makers[buffer], starts[buffer], last[buffer] = kernel, step, step
    end = len(program.run)
    for buffer in (*(b for _, b in program.outputs), *program.updates.values()):
        if buffer.base.kind == "arena":
            if buffer.base not in starts:
                raise CompileError(f"output {buffer!r} of {program.name!r} is written by no kernel")
            last[buffer.base] = end
    operands = {
        buffer: tuple(b for b in maker.in_place_operands() if b in last and last[b] == starts[buffer])
        for buffer, maker in makers.items()
    }
    ranges = {b: (start, min(last[b] + 1, end)) for b, start in starts.items()}
    return Schedule(ranges, makers, operands, _bounds(program, ranges))


def lifetimes(
    program: Program | Schedule,
    extents: Mapping[str, int],
    *,
    in_place: bool = True,
    alignment: int = DEFAULT_ALIGNMENT,
    extra: Sequence[Scratch] = (),
) -> Lifetimes:
    """The live intervals of the arena, sizes in bytes at `extents`.

    Where these are the upper bounds, a size is the most that it can be within them. With `in_place`, a kernel's result
    takes the place of an operand that it reads last, if the kernel allows that. `extra` is scratch.
    """
    plan = program if isinstance(program, Schedule) else schedule(program)
    at_bounds = plan.bounds is not None and all(extents.get(name) == hi for name, hi in plan.bounds.items())
    sizes = {b: _size(b, extents, at_bounds) for b in plan.ranges}
    chains: dict[Buffer, list[Buffer]] = {}  # by the buffer that the memory holds last
    for buffer in plan.ranges:
        room = [b for b in plan.operands[buffer] if b in chains and sizes[b] == sizes[buffer]] if in_place else []
        chains[buffer] = [*chains.pop(room[0]), buffer] if room else [buffer]
    held = sorted(chains.values(), key=lambda chain: plan.ranges[chain[0]][0])
    intervals = [
        Interval(_chain_name(chain), plan.ranges[chain[0]][0], plan.ranges[chain[-1]][1], sizes[chain[0]], alignment)
        for chain in held
    ]
    scratch = [Interval(name, step, step + 1, size, alignment) for name, step, size in extra]
    return Lifetimes((*intervals, *scratch), (*map(tuple, held), *(() for _ in scratch)))


def _bounds(program: Program, buffers: Mapping[Buffer, object]) -> dict[str, int] | None:
    found: dict[str, int] = {}
    for name, symbol in program.dims.items():
        if symbol.hi is None:
            return None
        found[name] = symbol.hi // symbol.multiple * symbol.multiple
    return None if any(b.bound() is None for b in buffers) else found


def _size(buffer: Buffer, extents: Mapping[str, int], at_bounds: bool) -> int:
    bound = buffer.bound() if at_bounds else None
    return buffer.nbytes(dict(extents)) if bound is None else bound


def _chain_name(chain: Sequence[Buffer]) -> str:
    names = [b.name for b in chain]
    return " > ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 2} more", names[-1]])
