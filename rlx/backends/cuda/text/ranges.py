"""How large index expressions can be: those that fit are computed in 32 bits, where a GPU is several times as fast."""

from __future__ import annotations

from itertools import product

from rlx.ir.shape import Size, bounds, upper
from rlx.kernels.expr import I64, Apply, Const, Expr, SizeOf, Var, children

__all__ = ["Range", "Ranges", "fits", "size_range"]

Range = tuple[int, int]  # the least and the largest value
LARGEST = (1 << 31) - 1


def fits(found: Range | None) -> bool:
    """Whether all values of a range are numbers of 32 bits."""
    return found is not None and found[0] >= -LARGEST and found[1] <= LARGEST


def size_range(size: Size) -> Range | None:
    """What a size can be."""
    if isinstance(size, int):
        return size, size
    low, high = bounds(size)
    return None if low is None or high is None else (int(low), int(high))


class Ranges:
    """The ranges of expressions of i64 over loop variables, whose sizes are told by `bind`."""

    def __init__(self) -> None:
        self.vars: dict[Var, Range] = {}
        self.bound: set[Var] = set()  # those without a range have no bound
        self.known: dict[Expr, Range | None] = {}

    def bind(self, variable: Var, size: Size, beyond: int = 0) -> None:
        """The variable goes from 0 to below the size, and so many places further."""
        most, before = upper(size), self.vars.get(variable)
        if variable in self.bound and before is None:
            return
        if most is None:
            self.vars.pop(variable, None)
        else:  # loops that have a variable in common may go to different ends
            self.vars[variable] = (0, max(most - 1 + beyond, 0 if before is None else before[1], 0))
        self.bound.add(variable)
        if self.vars.get(variable) != before:
            self.known.clear()

    def of(self, e: Expr) -> Range | None:
        """What an expression can be, None where that is not known."""
        if e not in self.known:
            self.known[e] = self._of(e)
        return self.known[e]

    def narrow(self, e: Expr) -> bool:
        """Whether the expression, and all that it is computed from, fits into 32 bits."""
        return e.dtype is I64 and fits(self.of(e)) and all(map(self.narrow, children(e)))

    def _of(self, e: Expr) -> Range | None:
        match e:
            case Const(value=value):
                return int(value), int(value)  # type: ignore[arg-type]
            case SizeOf(size=size):
                return size_range(size)
            case Var():
                return self.vars.get(e)
            case Apply(fn=fn, args=args) if e.dtype is I64 and fn in ("add", "sub", "mul", "neg", "floordiv", "mod"):
                parts = [self.of(a) for a in args]
                if any(p is None for p in parts):
                    return None
                return combined(fn, [p for p in parts if p is not None])
        return None


def combined(fn: str, parts: list[Range]) -> Range | None:
    """The range of a function of one or two numbers."""
    (low, high), *rest = parts
    if fn == "neg":
        return -high, -low
    ((start, end),) = rest
    match fn:
        case "add":
            return low + start, high + end
        case "sub":
            return low - end, high - start
        case "mul":
            ends = [x * y for x, y in product((low, high), (start, end))]
            return min(ends), max(ends)
        case "floordiv" if start > 0:
            ends = [x // y for x, y in product((low, high), (start, end))]
            return min(ends), max(ends)
        case "mod" if start > 0:
            return 0, end - 1
    return None
