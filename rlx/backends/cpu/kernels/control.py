"""Control flow as phases: tiny kernels that say which phase comes next, and keep words up to date in loops.

A word that depends on the number of the round is `base + sum(coefficient * counter)`, over the loops that it lies in.
The list of such words of a loop is, for each: its address, that of its base, the number of terms, and the terms as
(coefficient, address of the counter). "loop" and "next" compute all of them anew, so that nothing that a failed run
leaves behind matters.
"""

from __future__ import annotations

from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.emitter import ARGS, PLACEHOLDER, name_kernel
from rlx.backends.cpu.native.runner_ir import EXTENT_BEYOND_BOUND, NEXT, STATUS, VALUE
from rlx.backends.cpu.schedule.arguments import Argument, ArgumentTable, KernelCode, Link, Pointer, Product
from rlx.kernels.program import Mark

__all__ = ["emit_mark"]


def emit_mark(mark: Mark) -> list[KernelCode]:
    """The phase of a mark; an end has none."""
    if mark.part == "end":
        return []
    f, table = Function(PLACEHOLDER, ARGS), ArgumentTable()
    match mark.part:
        case "if":
            assert mark.test is not None
            f.if_(_fails(f, table, Pointer(mark.test)), lambda: _go(f, table, Link(mark.flow, "else")))
        case "else":
            _go(f, table, Link(mark.flow, "end"))
        case "loop":
            _loop(f, table, mark)
        case "while":
            _while(f, table, mark)
        case "next":
            _next(f, table, mark)
    f.ret()
    symbol, text = name_kernel(Module([f]).text())
    return [KernelCode(symbol, text, tuple(table.words), Product(()), notes={"loops": "control flow"})]


def _fails(f: Function, table: ArgumentTable, test: Pointer) -> str:
    return f.cmp("eq", f.load("i8", table.load(f, test)), 0, "i8")


def _go(f: Function, table: ArgumentTable, to: Argument) -> None:
    f.store(table.load(f, to), f.gep("%ctx", NEXT, "i64"), ty="i64")


def _loop(f: Function, table: ArgumentTable, mark: Mark) -> None:
    flow = mark.flow
    f.store(0, table.load(f, Link(flow, "counter")), ty="i64")
    _bring_up_to_date(f, table, mark)
    if flow.trips is not None:
        none = f.cmp("le", table.load(f, flow.trips), 0, "i64")
        f.if_(none, lambda: _go(f, table, Link(flow, "end")))


def _while(f: Function, table: ArgumentTable, mark: Mark) -> None:
    flow = mark.flow
    assert mark.test is not None

    def check_room() -> None:
        if flow.count is None:
            return
        counter, most = f.load("i64", table.load(f, Link(flow, "counter"))), table.load(f, Link(flow, "most"))
        f.if_(f.cmp("ge", counter, most, "i64"), lambda: overrun(counter))

    def overrun(counter: str) -> None:
        f.store(EXTENT_BEYOND_BOUND, f.gep("%ctx", STATUS, "i64"), ty="i64")
        f.store(f.add(counter, 1, "i64"), f.gep("%ctx", VALUE, "i64"), ty="i64")

    f.if_(_fails(f, table, Pointer(mark.test)), lambda: _go(f, table, Link(flow, "end")), check_room)


def _next(f: Function, table: ArgumentTable, mark: Mark) -> None:
    flow = mark.flow
    cell = table.load(f, Link(flow, "counter"))
    after = f.add(f.load("i64", cell), 1, "i64")
    f.store(after, cell, ty="i64")

    def again() -> None:
        _bring_up_to_date(f, table, mark)
        _go(f, table, Link(flow, "start"))

    if flow.trips is None:
        again()
    else:
        f.if_(f.cmp("lt", after, table.load(f, flow.trips), "i64"), again)


def _bring_up_to_date(f: Function, table: ArgumentTable, mark: Mark) -> None:
    """Computes every word that depends on the number of the round."""
    start, length = table.load(f, Link(mark.flow, "updates")), table.load(f, Link(mark.flow, "length"))

    def one(_: str, values: list[str]) -> list[str]:
        (at,) = values
        word, base, terms = (f.load(ty, f.gep(at, n, "i64")) for n, ty in enumerate(("ptr", "ptr", "i64")))

        def term(n: str, sums: list[str]) -> list[str]:
            pair = f.gep(f.gep(at, 3, "i64"), f.shl(n, 1, "i64"), "i64")
            counter = f.load("i64", f.load("ptr", f.gep(pair, 1, "i64")))
            return [f.add(sums[0], f.mul(f.load("i64", pair), counter, "i64"), "i64")]

        (total,) = f.loop(0, terms, 1, [("i64", f.load("i64", base))], term)
        f.store(total, word, ty="i64")
        return [f.gep(f.gep(at, 3, "i64"), f.shl(terms, 1, "i64"), "i64")]

    f.loop(0, length, 1, [("ptr", start)], one)
