"""An independent proof that a plan serves a program: live ranges are read anew from the kernels."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import CompileError
from rlx.kernels.program import Buffer, Kernel, Program, loop_spans
from rlx.plan.plan import MemoryPlan, SharedWeights

__all__ = ["prove"]


def prove(
    program: Program,
    plan: MemoryPlan,
    *,
    guard: int = 0,
    capacity: int | None = None,
    shared: SharedWeights | None = None,
) -> None:
    """Raises `CompileError` unless the plan serves the program at the plan's extents.

    The rules, beyond those of `rlx.plan.check.check` for offsets:
    1. Every arena buffer that a kernel, an output or an update names has a place.
    2. A view lies inside its root.
    3. Offsets are multiples of the plan's alignment, and buffers with their guards end within the arena.
    4. The arena is no larger than the capacity.
    5. Buffers that are in use at one step share no byte, their guards included; but a kernel's single result may lie
       exactly on an operand of the same size that no later kernel reads, where the kernel allows that.
    6. Params lie where the shared weights have them.
    """
    places: dict[Buffer, tuple[int, int]] = {}
    for buffer in dict.fromkeys(_named(program)):
        root = buffer.base
        if root not in plan.offsets:
            if root.kind == "arena":
                raise CompileError(f"memory plan: {root!r} has no place")
            continue
        places[root] = (plan.offsets[root], plan.nbytes(root))
        offset = plan.address(buffer) - plan.offsets[root]
        if buffer is not root and not 0 <= offset <= places[root][1] - plan.nbytes(buffer):
            raise CompileError(f"memory plan: view {buffer!r} does not lie inside its root {root!r}")
    for buffer, (offset, nbytes) in places.items():
        if offset % plan.alignment:
            raise CompileError(f"memory plan: {buffer!r} at {offset} is misaligned, expected {plan.alignment}")
        if offset < 0 or (nbytes and offset + nbytes + guard > plan.arena):
            raise CompileError(f"memory plan: {buffer!r} at {offset} does not lie within the arena of {plan.arena}")
    if capacity is not None and plan.arena > capacity:
        raise CompileError(f"memory plan: the arena of {plan.arena} bytes is above the capacity of {capacity}")
    _prove_apart(program, places, guard)
    for buffer in places if shared is not None else ():
        if (
            buffer.kind == "param"
            and shared is not None
            and shared.offset(buffer, places[buffer][1]) != places[buffer][0]
        ):
            raise CompileError(f"memory plan: shared param {buffer!r} lies elsewhere than in the forward plan")


def _named(program: Program) -> list[Buffer]:
    kernels = [b for kernel in program.run for b in (*kernel.reads(), *kernel.writes())]
    return [*kernels, *(b for _, b in program.outputs), *program.updates.values(), *program.params]


def _prove_apart(program: Program, places: Mapping[Buffer, tuple[int, int]], guard: int) -> None:
    uses: dict[Buffer, list[int]] = {}
    for step, kernel in enumerate(program.run):
        for buffer in (*kernel.reads(), *kernel.writes()):
            uses.setdefault(buffer.base, []).append(step)
    end = len(program.run)
    for buffer in (*(b for _, b in program.outputs), *program.updates.values()):
        uses.setdefault(buffer.base, []).append(end)
    spans = {}
    for buffer in places:
        used = uses.get(buffer, [0])
        whole = buffer.kind != "arena"
        spans[buffer] = (0 if whole else min(used), end if whole and buffer.kind != "input" else max(used))
    for first, final in loop_spans(program.run):  # what is in use on both sides of an end of a loop
        for buffer, (start, stop) in spans.items():
            if start < first <= stop < final:
                spans[buffer] = (start, final)
            elif first < start <= final < stop:
                spans[buffer] = (first, stop)
    ordered = sorted((b for b in places if places[b][1]), key=lambda b: (spans[b], places[b]))
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if spans[other][0] > spans[one][1]:
                break
            under, over = sorted((places[one], places[other]))
            if under[0] + under[1] + guard <= over[0] or _over_operand(program.run, one, other, spans, places):
                continue
            raise CompileError(f"memory plan: {one!r} and {other!r} overlap, and both are in use at {spans[other][0]}")


def _over_operand(
    kernels: list[Kernel],
    one: Buffer,
    other: Buffer,
    spans: Mapping[Buffer, tuple[int, int]],
    places: Mapping[Buffer, tuple[int, int]],
) -> bool:
    step = spans[other][0]
    return (
        spans[one][1] == step < len(kernels)
        and places[one] == places[other]
        and other in kernels[step].writes()
        and one in kernels[step].in_place_operands()
    )
