"""Functions over integers give as machine code what Python gives; what can't be translated is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlx.errors import CompileError
from rlx.plan.native import compile_functions

SHIFT = 3


class Lists(NamedTuple):
    a: list[int]
    b: list[int]


def difference_and_sum(x: int, y: int) -> tuple[int, int]:
    return x - y, x + y


def arithmetic(s: Lists, x: int, y: int) -> int:
    s.a[0] = x * y - (x & 0xFF) + (-y ^ x)
    s.a[1] += len(s.b) // 2 + (s.b[1] >> SHIFT)
    s.a[2] = s.a[3] = min(x, y, 7) + 1000 * max(x, y)
    less, more = difference_and_sum(x, y)
    s.b[0], s.b[2] = more, less
    return (x < y) + 2 * (x == y) + 4 * (not x) + (8 if x <= y else 16)


def quotients(s: Lists, x: int, y: int) -> int:
    best, at = 1e30, -1
    for index in range(len(s.a)):
        score = s.a[index] / (index + 1) + 0.25
        if score < best:
            best, at = score, index
    if best > 3 * x or -best > y / 2:
        return at
    return -1 - at


def control(s: Lists, x: int, y: int) -> int:
    steps = total = 0
    while True:
        steps += 1
        if steps > 20:
            break
        if steps & 1:
            continue
        for inner in range(steps, 2 * steps):
            if inner >= len(s.a) or s.a[inner] < 0:  # the second part would read beyond the end
                break
            total += s.a[inner]
        else_way = x > 0 and y > 0 and not (x > y)
        if else_way:
            total -= steps
        elif x < 0 or y < 0:
            total += 3
        else:
            return total
    return total * 2 + steps


def last_of_loop(s: Lists, x: int, y: int) -> int:
    last = -1
    for number in range(x & 7):
        last = number
        number += y
    return last


def fill(s: Lists, value: int) -> None:
    if value < 0:
        return
    for index in range(len(s.a)):
        s.a[index] = value


def calls_one_without_a_result(s: Lists, x: int, y: int) -> int:
    fill(s, x)
    return s.a[-1 + len(s.a)] + y


@pytest.mark.parametrize(
    "function", [arithmetic, quotients, control, last_of_loop, calls_one_without_a_result], ids=lambda f: f.__name__
)
def test_machine_code_and_python_agree(function: Callable[..., int]) -> None:
    """Results and arrays, on random numbers of both signs."""
    compiled = compile_functions([difference_and_sum, fill, function], Lists._fields)
    rng = random.Random(5)
    for _ in range(300):
        lists = Lists([rng.randrange(-99, 99) for _ in range(12)], [rng.randrange(-99, 99) for _ in range(5)])
        arrays = [np.array(column, np.int64) for column in lists]
        x, y = rng.randrange(-40, 40), rng.randrange(-40, 40)
        assert compiled(arrays, x, y) == function(lists, x, y)
        assert [array.tolist() for array in arrays] == list(lists)


def uses_a_list(s: Lists) -> int:
    return sum([1, 2])


def uses_a_slice(s: Lists) -> int:
    return s.a[1:2]  # type: ignore[return-value]


def uses_an_unknown_field(s: Lists) -> int:
    return s.c[0]  # type: ignore[attr-defined, no-any-return]


def uses_a_remainder(s: Lists) -> int:
    return len(s.a) % 2


def compares_in_a_chain(s: Lists) -> int:
    return 1 if 0 < s.a[0] < 9 else 2


def goes_by_steps(s: Lists) -> int:
    for i in range(0, 9, 2):
        s.a[i] = i
    return 0


def handles_errors(s: Lists) -> int:
    try:
        return 1
    finally:
        pass


@pytest.mark.parametrize(
    "function, what",
    [
        (uses_a_list, r"sum\(\[1, 2\]\)"),
        (uses_a_slice, "1:2"),
        (uses_an_unknown_field, r"s\.c"),
        (uses_a_remainder, "%"),
        (compares_in_a_chain, "0 < "),
        (goes_by_steps, "range"),
        (handles_errors, "try"),
    ],
)
def test_what_is_not_translated_is_named(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(CompileError, match=rf"test_native\.py:\d+: .*{what}"):
        compile_functions([function], Lists._fields)


def test_wrapping_is_that_of_64_bits() -> None:
    compiled = compile_functions([difference_and_sum, arithmetic], Lists._fields)
    arrays: Sequence[Any] = [np.zeros(12, np.int64), np.zeros(5, np.int64)]
    compiled(arrays, 2**62, 2**62)
    assert arrays[1][0] == -(2**63)
