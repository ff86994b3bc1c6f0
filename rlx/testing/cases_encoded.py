"""Cases with an encoded operand, for every op and encoding, made from the op's other cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlx.ir.encoding import encoding_named
from rlx.ir.shape import Dim
from rlx.ops.base import OPS
from rlx.records import replace
from rlx.testing.cases import cases_of
from rlx.testing.oracle import FLOATS, Case, Operand, case

__all__ = ["encoded_cases", "encoded_symbolic_cases"]


def encoded_cases(name: str, encoding: str) -> list[Case]:
    """Cases of an op at sizes of one and three blocks; each has one encoded operand, every one that can be in turn."""
    b = encoding_named(encoding).block  # many cases have operands of n + 1 or m + 1
    pairs = ((3, b), (b, 3 * b), (b, 5), (3, b - 1), (b - 1, 5))
    return _with_blocks(encoding, [*(c for n, m in pairs for c in cases_of(name, n, m)), *_wide(name, b)])


def encoded_symbolic_cases(name: str, encoding: str) -> list[Case]:
    """The same beside operands that have a dim "n" (sizes of encoded ones are ints)."""
    block, n = encoding_named(encoding).block, Dim("n", 1, 64)
    cases = [*cases_of(name, n, block), *cases_of(name, block, n)]
    return _with_blocks(encoding, [c for c in cases if c.leaf == "input"])


def _wide(name: str, b: int) -> Iterator[Case]:
    """Cases of ops that have no operand of floats with `b` elements in a row in their other cases."""
    match name:
        case "rnn" | "gru" | "lstm":
            gates = {"rnn": 1, "gru": 3, "lstm": 4}[name]
            w, r = Operand((1, gates * b, 2 * b)), Operand((1, gates * b, b))
            yield case(OPS[name](), Operand((3, 2, 2 * b)), w, r)
        case "recurrence":
            yield case(OPS[name](), Operand((3, 2, 4 * b)), Operand((1, 4 * b, b)))
        case "rotary_embedding":
            yield case(OPS[name](), Operand((2, 3, 4, 2 * b)), Operand((2, 4, b)), Operand((2, 4, b)))
        case "mean_variance_normalization":
            yield case(OPS[name](), Operand((2, 3, 4, b)))
        case "det":
            yield case(OPS[name](), Operand((2, b, b), "f64"))


def _with_blocks(encoding: str, cases: Iterable[Case]) -> list[Case]:
    """Encodes operands; keeps one case for each op, operand, rank and order of axes in f32, and one for other types."""
    made: dict[tuple[object, ...], Case] = {}
    for plain in cases:
        for number, found in _encoded(plain, encoding):
            operand = plain.operands[number]
            forms = (plain.op, len(operand.shape), plain.turned) if operand.dtype == "f32" else ()
            made.setdefault((operand.dtype, number, *forms), found)
    return list(made.values())


def _encoded(plain: Case, encoding: str) -> Iterator[tuple[int, Case]]:
    for number, operand in enumerate(plain.operands):
        if _can_be(operand, encoding, plain.turned):
            operands = list(plain.operands)
            operands[number] = replace(operand, encoding=encoding)
            yield number, replace(plain, operands=tuple(operands))


def _can_be(operand: Operand, encoding: str, turned: bool) -> bool:
    shape = operand.shape[::-1] if turned else operand.shape
    fixed = all(isinstance(size, int) and size > 0 for size in shape)
    plain = operand.dtype in FLOATS and operand.data is None and operand.values != "whole"  # which none need hold
    return plain and fixed and bool(shape) and shape[-1] % encoding_named(encoding).block == 0
