"""Liveness: when each buffer of a program's arena is in use, and which buffers can be one and the same memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rlx.errors import CompileError, OptionError
from rlx.ir.shape import Size
from rlx.kernels.program import Buffer, Kernel, Program, loop_spans
from rlx.plan.arena import Schedule, size_of
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval
from rlx.records import dataclass

__all__ = [
    "Lifetimes", "Scratch", "bound_extents", "lifetimes", "outside_buffers", "schedule",
]  # fmt: skip

_KINDS = {
    "inputs": "input", "params": "param", "constants": "const", "states": "state", "prepared": "prepared",
}  # fmt: skip

Scratch = tuple[str, int, int]  # name, step, bytes: working memory of one kernel


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

    A buffer is live from the first kernel that writes it to its last reader (of it or of a view of it); one that an
    output or an update shows, to the end of the run; one that is in use on both sides of an end of a loop, through all
    of the loop. The two branches of an If come one after the other, so their own buffers never meet. Raises
    `CompileError` where a kernel reads what none has written.
    """
    makers: dict[Buffer, Kernel] = {}
    starts: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    flows = any(
        kernel.mark is not None for kernel in program.run
    )  # then carries and results are written more than once
    for step, kernel in enumerate(program.run):
        for buffer in kernel.reads():
            if buffer.base.kind == "arena":
                if buffer.base not in starts:
                    raise CompileError(f"kernel {step} ({kernel.label}) reads {buffer!r} before any kernel writes it")
                last[buffer.base] = step
        for buffer in kernel.writes():
            if buffer.base.kind == "state":
                continue
            part = buffer.is_part
            if buffer.kind != "arena" or ((part or buffer.base in starts) and not flows):
                raise CompileError(
                    f"kernel {step} ({kernel.label}) writes {buffer!r} ({buffer.kind}): expected an arena buffer that "
                    "is no view and that no kernel has written yet"
                )
            makers.setdefault(buffer.base, kernel)
            starts.setdefault(buffer.base, step)
            last[buffer.base] = step
    end = len(program.run)
    for buffer in (*(b for _, b in program.outputs), *program.updates.values()):
        if buffer.base.kind == "arena":
            if buffer.base not in starts:
                raise CompileError(f"output {buffer!r} of {program.name!r} is written by no kernel")
            last[buffer.base] = end
    for first, final in loop_spans(program.run):
        for buffer, start in starts.items():
            if start < first <= last[buffer] < final:
                last[buffer] = final
            elif first < start <= final < last[buffer]:
                starts[buffer] = first
    operands = {
        buffer: tuple(b for b in maker.in_place_operands() if b in last and last[b] == starts[buffer])
        for buffer, maker in makers.items()
    }
    ranges = {b: (start, min(last[b] + 1, end)) for b, start in starts.items()}
    views = tuple(b for b in dict.fromkeys(program.touched()) if b.root is not None)
    return Schedule(
        ranges, makers, operands, _bounds(program, ranges), tuple(program.run), _outside(program, end), views
    )


def lifetimes(
    program: Program | Schedule,
    extents: Mapping[str, int],
    *,
    in_place: bool = True,
    alignment: int = DEFAULT_ALIGNMENT,
    extra: Sequence[Scratch] = (),
    guard: int = 0,
    element_width: int | None = None,
    include: Collection[str] = (),
    spread: Mapping[str, Size] | None = None,
) -> Lifetimes:
    """The live intervals of the arena, sizes in bytes at `extents`.

    Where these are the upper bounds, a size is the most that it can be within them. With `in_place`, a kernel's result
    takes the place of an operand that it reads last, if the kernel allows that. `extra` is scratch. `guard` bytes
    after each buffer are kept free. `element_width` makes every element that many bytes, whatever its type. `include`
    adds the "inputs", "params", "constants", "states" or "prepared" weights of the program to the arena.
    Sizes in `spread` vary within bounds: every buffer gets the most that it can be.
    """
    plan = program if isinstance(program, Schedule) else schedule(program)
    at_bounds = plan.bounds is not None and all(extents.get(name) == hi for name, hi in plan.bounds.items())
    added = outside_buffers(plan, include)
    sizes = {b: size_of(b, extents, at_bounds, element_width, spread) for b in (*added, *plan.ranges)}
    ranges = {**plan.ranges, **{b: plan.outside[b] for b in added}}
    chains: dict[Buffer, list[Buffer]] = {b: [b] for b in added}  # by the buffer that the memory holds last
    for buffer in plan.ranges:
        room = [b for b in plan.operands[buffer] if b in chains and sizes[b] == sizes[buffer]] if in_place else []
        chains[buffer] = [*chains.pop(room[0]), buffer] if room else [buffer]
    held = sorted(chains.values(), key=lambda chain: ranges[chain[0]][0])
    intervals = [
        Interval(
            _chain_name(chain),
            ranges[chain[0]][0],
            ranges[chain[-1]][1],
            sizes[chain[0]],
            alignment,
            guard=guard,
            space=chain[0].space,
        )
        for chain in held
    ]
    scratch = [Interval(name, step, step + 1, size, alignment) for name, step, size in extra]
    return Lifetimes((*intervals, *scratch), (*map(tuple, held), *(() for _ in scratch)))


def outside_buffers(plan: Schedule, include: Collection[str]) -> list[Buffer]:
    """The buffers of the kinds that `include` names, in order of first use; `OptionError` for an unknown kind."""
    unknown = [name for name in include if name not in _KINDS]
    if unknown:
        raise OptionError(f"include={unknown[0]!r}: expected some of {', '.join(_KINDS)}")
    kinds = {_KINDS[name] for name in include}
    return [buffer for buffer in plan.outside if buffer.kind in kinds]


def _bounds(program: Program, buffers: Mapping[Buffer, object]) -> dict[str, int] | None:
    found: dict[str, int] = {}
    for name, symbol in program.dims.items():
        if symbol.hi is None:
            return None
        found[name] = symbol.hi // symbol.multiple * symbol.multiple
    return None if any(b.bound() is None for b in buffers) else found


def _outside(program: Program, end: int) -> dict[Buffer, tuple[int, int]]:
    """The live ranges of what has its memory elsewhere: an input to its last reader, all others for the whole run."""
    shown = {b.base for b in (*(b for _, b in program.outputs), *program.updates.values())}
    last = {b.base: step for step, kernel in enumerate(program.run) for b in kernel.reads()}
    for first, final in loop_spans(program.run):
        last.update({b: final for b, step in last.items() if first <= step < final})
    found = dict.fromkeys([*program.inputs, *program.params, *program.states, *program.constants])
    found.update(dict.fromkeys(program.buffers("prepared")))
    whole = max(end, 1)
    return {b: (0, whole if b.kind != "input" or b in shown else last.get(b, 0) + 1) for b in found}


def _chain_name(chain: Sequence[Buffer]) -> str:
    names = [b.name for b in chain]
    return " > ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 2} more", names[-1]])
