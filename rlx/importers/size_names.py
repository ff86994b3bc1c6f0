"""Names of sizes that are written as expressions of other names, as in `past_sequence_length + sequence_length`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress

from rlx.errors import RlxError
from rlx.ir.shape import Size, bounds

__all__ = ["expressed"]

LONGEST = 200  # characters of a name that is looked at
LARGEST = 1 << 31  # numbers in it


def expressed(name: str, sizes: Mapping[str, Size]) -> Size | None:
    """The size that a name means in terms of others; None for a name that is no sum, difference, product or floor
    division (`//`) of known names and numbers, or could be negative.
    """
    if len(name) > LONGEST or not any(c in name for c in "+*/-"):
        return None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError, RlxError):
        size = _size(ast.parse(name.strip(), mode="eval").body, sizes)
        if size is not None and _at_least(size, 0):
            return size
    return None


def _size(part: ast.expr, sizes: Mapping[str, Size]) -> Size | None:
    match part:
        case ast.Name(id=name):
            return sizes.get(name)
        case ast.Constant(value=int() as number) if not isinstance(number, bool) and number < LARGEST:
            return number
        case ast.BinOp(left=first, op=op, right=second):
            a, b = _size(first, sizes), _size(second, sizes)
            if a is None or b is None:
                return None
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b if _at_least(b, 1) else None
    return None


def _at_least(size: Size, least: int) -> bool:
    lowest = bounds(size)[0]
    return lowest is not None and lowest >= least
