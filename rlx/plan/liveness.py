"""Liveness: when each buffer of a program's arena is in use, and which buffers can be one and the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlx.errors import CompileError
from rlx.kernels.program import Buffer, Program
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval

__all__ = ["Lifetimes", "Scratch", "bound_extents", "lifetimes"]

Scratch = tuple[str, int, int]  # name, step, bytes: working memory of one kernel


@dataclass(frozen=True)
class Lifetimes:
    """The intervals to pack; `buffers[i]` are those that interval i holds one after the other (none: scratch)."""

    intervals: tuple[Interval, ...]
    buffers: tuple[tuple[Buffer, ...], ...]


@dataclass
class _Range:
    first: int
    stop: int


def bound_extents(program: Program) -> dict[str, int] | None:
    """Every dim at its upper bound, or None when a dim or the size of an arena buffer has none."""
    found: dict[str, int] = {}
    for name, symbol in program.dims.items():
        if symbol.hi is None:
            return None
        found[name] = symbol.hi // symbol.multiple * symbol.multiple
    return None if any(b.bound() is None for b in program.buffers("arena")) else found


def lifetimes(
    program: Program,
    extents: Mapping[str, int],
    *,
    in_place: bool = True,
    alignment: int = DEFAULT_ALIGNMENT,
    extra: Sequence[Scratch] = (),
) -> Lifetimes:
    """The live intervals of the arena over the steps of `program.run`, sizes in bytes at `extents`.

    A buffer is live from the kernel that writes it to its last reader, one that an output or an update shows to the end
    of the run. Where `extents` are the upper bounds, a size is the most that it can be within them. With `in_place`, a
    kernel's result takes the place of an operand that it reads last, if the kernel allows that. `extra` is scratch.
    Raises `CompileError` where a kernel reads what none has written.
    """
    ranges, dying = _ranges(program)
    at_bounds = _is_bound(extents, bound_extents(program))
    sizes = {b: _size(b, extents, at_bounds) for b in ranges}
    chains: dict[Buffer, list[Buffer]] = {}  # by the buffer that the memory holds last
    for step, kernel in enumerate(program.run):
        allowed = {b.base for b in kernel.in_place_operands()} if in_place and dying[step] else set()
        for buffer in kernel.writes():
            room = [b for b in dying[step] if b in allowed and sizes[b] == sizes[buffer] and b in chains]
            chains[buffer] = [*chains.pop(room[0]), buffer] if room else [buffer]
    held = sorted(chains.values(), key=lambda chain: ranges[chain[0]].first)
    intervals = [
        Interval(_chain_name(chain), ranges[chain[0]].first, ranges[chain[-1]].stop, sizes[chain[0]], alignment)
        for chain in held
    ]
    scratch = [Interval(name, step, step + 1, size, alignment) for name, step, size in extra]
    return Lifetimes((*intervals, *scratch), (*map(tuple, held), *(() for _ in scratch)))


def _ranges(program: Program) -> tuple[dict[Buffer, _Range], list[list[Buffer]]]:
    """The live range of each root buffer of the arena, and for each step the buffers that it reads last."""
    ranges: dict[Buffer, _Range] = {}
    for step, kernel in enumerate(program.run):
        for buffer in kernel.reads():
            if buffer.base.kind == "arena":
                if buffer.base not in ranges:
                    raise CompileError(f"kernel {step} ({kernel.label}) reads {buffer!r} before any kernel writes it")
                ranges[buffer.base].stop = step + 1
        for buffer in kernel.writes():
            if buffer.kind != "arena" or buffer.root is not None or buffer in ranges:
                raise CompileError(
                    f"kernel {step} ({kernel.label}) writes {buffer!r} ({buffer.kind}): expected an arena buffer that "
                    "is no view and that no kernel has written yet"
                )
            ranges[buffer] = _Range(step, step + 1)
    for buffer in (*(b for _, b in program.outputs), *program.updates.values()):
        if buffer.base.kind == "arena":
            if buffer.base not in ranges:
                raise CompileError(f"output {buffer!r} of {program.name!r} is written by no kernel")
            ranges[buffer.base].stop = len(program.run) + 1  # read once all kernels have run
    dying: list[list[Buffer]] = [[] for _ in program.run]
    for buffer, r in ranges.items():
        if r.stop <= len(program.run) and r.stop - 1 > r.first:
            dying[r.stop - 1].append(buffer)
        r.stop = min(r.stop, len(program.run))
    return ranges, dying


def _is_bound(extents: Mapping[str, int], bounds: Mapping[str, int] | None) -> bool:
    return bounds is not None and all(extents.get(name) == hi for name, hi in bounds.items())


def _size(buffer: Buffer, extents: Mapping[str, int], at_bounds: bool) -> int:
    bound = buffer.bound() if at_bounds else None
    return buffer.nbytes(dict(extents)) if bound is None else bound


def _chain_name(chain: Sequence[Buffer]) -> str:
    names = [b.name for b in chain]
    return " > ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 2} more", names[-1]])
