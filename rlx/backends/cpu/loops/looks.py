"""Code by which long chunks check from time to time whether the run has failed elsewhere or was interrupted: a *look*.

A look costs some 25 ns (it reads the clock), so a loop looks only after many turns, and a short loop never. If the run
has ended, the chunk returns at once: its results are not needed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.llvm.builder import Function, Operand, Typed
from rlx.backends.cpu.native.runner_ir import LOOK
from rlx.ir.shape import Size, upper

__all__ = ["TURNS", "is_long", "look", "look_if", "looking_loop"]

TURNS = 1 << 16  # of some ns each, between two looks
LONG = 1 << 20  # steps from which on a loop of a nest is long


def is_long(steps: Size) -> bool:
    """Whether a loop may take so many steps that Ctrl-C would wait for it."""
    most = steps if isinstance(steps, int) else upper(steps)
    return most is None or most >= LONG


def look(f: Function) -> None:
    """Code that returns from the kernel if the run has ended; its arguments must be `ARGS`."""
    function = f.cast("inttoptr", f.load("i64", f.gep("%ctx", LOOK, "i64")), "ptr")
    ends, goes_on = f.new_label("ends"), f.new_label("on")
    f.branch(f.cmp("ne", f.call(function, ["%ctx", "%worker"], "i64"), 0), ends, goes_on)
    f.label(ends)
    f.ret()
    f.label(goes_on)


def look_if(f: Function, condition: str) -> None:
    """A look, taken only if the condition is true."""
    f.if_(condition, lambda: look(f))


def looking_loop(
    f: Function,
    start: Operand,
    stop: Operand,
    step: int,
    carried: Sequence[Typed],
    body: Callable[[str, list[str]], Sequence[Operand] | None],
    turns: int = TURNS,
) -> list[str]:
    """`Function.loop` with a look after every `turns` turns."""
    types = [f.typed(c)[0] for c in carried]

    def block(i: str, values: list[str]) -> list[str]:
        look_if(f, f.cmp("ne", i, start, "i64"))
        end = f.min(f.add(i, turns * step, "i64"), stop, "i64")
        return f.loop(i, end, step, list(zip(types, values, strict=True)), body, runs=True)

    return f.loop(start, stop, turns * step, carried, block)
