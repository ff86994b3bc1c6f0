"""Sizes: their algebra agrees with integers, bounds contain every value, and what is claimed to be provable is."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.shape import (
    Dim,
    Size,
    bounds,
    broadcast,
    ceildiv,
    collect_guards,
    dim_of_terms,
    divides,
    evaluate,
    exact_div,
    format_size,
    max_size,
    min_size,
    same,
    size_product,
    substitute,
    symbols,
    unify,
)
from rlx.kernels.affine import row_major

DIMS = [Dim("a", 0, 9), Dim("b", 1, 7), Dim("c", 4, 32, multiple=4), Dim("d", 2)]
EXTENTS = st.fixed_dictionaries(
    {
        "a": st.integers(0, 9),
        "b": st.integers(1, 7),
        "c": st.sampled_from(range(4, 33, 4)),
        "d": st.integers(2, 40),
    }
)
Pair = tuple[Size, Any]  # a size, and the same computation on integers as a function of the extents


def _leaves() -> st.SearchStrategy[Pair]:
    dims = st.sampled_from(DIMS).map(lambda d: (d, lambda e, name=str(d): e[name]))
    return dims | st.integers(-6, 6).map(lambda i: (i, lambda e: i))


def _combined(parts: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    def binary(kind: str, x: Pair, y: Pair) -> Pair:
        (p, f), (q, g) = x, y
        match kind:
            case "+":
                return p + q, lambda e: f(e) + g(e)
            case "-":
                return p - q, lambda e: f(e) - g(e)
            case "*":
                return p * q, lambda e: f(e) * g(e)
            case "min":
                return min_size(p, q), lambda e: min(f(e), g(e))
            case _:
                return max_size(p, q), lambda e: max(f(e), g(e))

    def division(kind: str, x: Pair, den: int) -> Pair:
        p, f = x
        match kind:
            case "//":
                return p // den, lambda e: f(e) // den
            case "%":
                return p % den, lambda e: f(e) % den
            case _:
                return ceildiv(p, den), lambda e: -(-f(e) // den)

    kinds = st.sampled_from(["+", "-", "*", "min", "max"])
    return st.builds(binary, kinds, parts, parts) | st.builds(
        division, st.sampled_from(["//", "%", "ceil"]), parts, st.integers(1, 6)
    )


PAIRS = st.recursive(_leaves(), _combined, max_leaves=8)


@given(PAIRS, EXTENTS)
def test_algebra_agrees_with_integers(pair: Pair, extents: dict[str, int]) -> None:
    """A size built by any operations evaluates to what the operations give on integers."""
    size, expected = pair
    assert evaluate(size, extents) == expected(extents)


@given(PAIRS, EXTENTS)
def test_bounds_contain_every_value(pair: Pair, extents: dict[str, int]) -> None:
    """No extents within the bounds of the symbols lead outside the bounds of a size."""
    lo, hi = bounds(pair[0])
    value = evaluate(pair[0], extents)
    assert lo is None or lo <= value
    assert hi is None or value <= hi


@given(PAIRS, PAIRS, EXTENTS)
def test_same_is_never_wrong(p: Pair, q: Pair, extents: dict[str, int]) -> None:
    """`same` says True or False only where every run agrees."""
    verdict = same(p[0], q[0])
    assert verdict is None or verdict == (evaluate(p[0], extents) == evaluate(q[0], extents))


@given(PAIRS, PAIRS, EXTENTS)
def test_exact_division_is_exact(p: Pair, q: Pair, extents: dict[str, int]) -> None:
    """Where exact_div gives a quotient, quotient * divisor is the size; `divides` holds at every extent."""
    num, den = p[0] * q[0], q[0]
    divisor = evaluate(den, extents)
    assume(divisor != 0)
    for numerator in (num, p[0]):
        quotient = exact_div(numerator, den)
        if quotient is not None:
            assert evaluate(quotient, extents) * divisor == evaluate(numerator, extents)
        if divides(den, numerator):
            assert evaluate(numerator, extents) % divisor == 0


@given(PAIRS, PAIRS, EXTENTS)
def test_division_by_a_size(p: Pair, q: Pair, extents: dict[str, int]) -> None:
    """Floor division by a size, simplified or not, is floor division, and its bounds hold."""
    for den in (q[0], DIMS[3], DIMS[1] + 2):
        divisor = evaluate(den, extents)
        if divisor == 0 or isinstance(den, int):
            continue
        quotient = p[0] // den
        assert evaluate(quotient, extents) == evaluate(p[0], extents) // divisor
        lo, hi = bounds(quotient)
        assert lo is None or lo <= evaluate(p[0], extents) // divisor
        assert hi is None or evaluate(p[0], extents) // divisor <= hi


@given(PAIRS, EXTENTS)
def test_substitution_evaluates(pair: Pair, extents: dict[str, int]) -> None:
    """Replacing symbols by sizes and evaluating is evaluating with their values."""
    size = pair[0]
    assert substitute(size, extents) == evaluate(size, extents)
    shifted = substitute(size, {"a": DIMS[1] + 1})
    assert "a" not in {s.name for s in symbols(shifted)}
    assert evaluate(shifted, extents) == evaluate(size, {**extents, "a": extents["b"] + 1})


@given(PAIRS, PAIRS)
def test_equal_sizes_are_equal_objects(p: Pair, q: Pair) -> None:
    """Sums and products don't depend on order, and differences cancel."""
    a, b = p[0], q[0]
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) - b == a
    assert hash(a * b) == hash(b * a)
    assert min_size(a, b) == min_size(b, a)


def test_simplifications() -> None:
    """Forms that shape arithmetic leaves behind come back to the symbol."""
    n = Dim("n", 1, 64)
    assert (n * 6) // 3 == n * 2
    assert (n + n * 4 + 3) // 5 == n + 3 // 5
    assert (n // 2) // 3 == n // 6
    assert (n * n + n) // (n + 1) == n
    assert (n * 4) % 2 == 0
    assert min_size(n, 64) == n
    assert max_size(n, 1, n) == n
    assert min_size(n, min_size(10, 5)) == min_size(5, n)
    assert exact_div(0, n) == 0
    assert exact_div(n, 2) is None


def test_bounds_of_quotients() -> None:
    """The smallest numerator over the largest divisor, and the reverse; signs count."""
    d = Dim("d", 2, 5)
    assert bounds(Dim("n", 10, 20) // d) == (2, 10)
    assert bounds((Dim("n", 10, 20) - 30) // d) == (-10, -2)
    assert bounds(Dim("n", 10, 20) // Dim("d", 2)) == (0, 10)
    assert bounds(Dim("n") // (d - 5)) == (None, None)


def test_bounds_of_multiples() -> None:
    """Bounds of a symbol are themselves multiples."""
    assert bounds(Dim("n", 3, 30, multiple=8)) == (8, 24)
    assert divides(8, Dim("n", 3, 30, multiple=8) * Dim("m"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dim(""),
        lambda: Dim("n", 5, 4),
        lambda: Dim("n", -1),
        lambda: Dim("n", multiple=0),
        lambda: Dim("n", 1, 5, multiple=8),
    ],
)
def test_impossible_dims_are_refused(make: Any) -> None:
    """A Dim that no extent could satisfy is an OptionError."""
    with pytest.raises(OptionError, match="Dim"):
        make()


def test_misuse_is_an_error() -> None:
    """No truth value, no division by zero, no evaluation without the extents."""
    n = Dim("n")
    with pytest.raises(ShapeError, match="not known before the run"):
        bool(n)
    with pytest.raises(ShapeError, match="positive divisor"):
        n // 0
    with pytest.raises(ExecutionError, match="'n' is not known"):
        evaluate(n + 1, {})
    with pytest.raises(ExecutionError, match="which is 0"):
        evaluate(5 // Dim("z", 0), {"z": 0})
    with pytest.raises(TypeError):
        n + 1.5


def test_unify_guards() -> None:
    """What can't be proved becomes a guard, what is certain does not, what can't be is an error."""
    n, m = Dim("n", 1, 9), Dim("m", 1, 9)
    with collect_guards() as guards:
        assert unify(n, n, "same") == n
        assert unify(n, m, "depth") == n
        assert unify(n + 1, 4, "fixed") == 4
    assert [(g.lhs, g.rhs, g.why) for g in guards] == [(n, m, "depth"), (n + 1, 4, "fixed")]
    with pytest.raises(ShapeError, match="depth: n and 10 differ"):
        unify(n, 10, "depth")


def test_broadcast() -> None:
    """NumPy's rules, with guards where sizes may differ."""
    n, m = Dim("n", 1, 9), Dim("m", 1, 9)
    assert broadcast((n, 1), (3,)) == (n, 3)
    assert broadcast((), (n,)) == (n,)
    with collect_guards() as guards:
        broadcast((n,), (m,))
    assert len(guards) == 1
    with pytest.raises(ShapeError):
        broadcast((2,), (3,))


def test_text_of_odd_names() -> None:
    """Names that are no plain words stand in backquotes, so that the text of a size is unambiguous."""
    assert format_size(Dim("batch size") * 2 + 1) == "2*`batch size` + 1"
    assert format_size(Dim("min")) == "`min`"
    assert format_size(Dim("f32")) == "`f32`"
    assert format_size(Dim("a`b")) == "`a\\u0060b`"


def test_pickling_across_processes() -> None:
    """A size pickled by another process (with other string hashes) equals the one made here."""
    code = (
        "import pickle,sys; from rlx.ir.shape import Dim; n=Dim('n',1,8); sys.stdout.buffer.write(pickle.dumps(n//2+n))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    n = Dim("n", 1, 8)
    assert pickle.loads(made) == n // 2 + n
    assert {n // 2 + n: 1}[pickle.loads(made)] == 1


@pytest.mark.parametrize("number", [0, 1, -1, 7, True])
def test_a_product_with_an_integer_has_the_terms_of_the_sum_of_products(number: int) -> None:
    """It is made without sorting, so its form must be the canonical one all the same."""
    a, b = Dim("a", 0, 9), Dim("b", 0, 9)
    size = 3 * a * b + a // 2 - 2 * b + 5
    assert isinstance(size, Dim)
    terms = {mono: coef * number for mono, coef in size.terms}
    expected = dim_of_terms(terms.items())
    assert size * number == number * size == expected
    assert str(size * number) == str(expected)
    assert evaluate(size * number, {"a": 7, "b": 4}) == number * evaluate(size, {"a": 7, "b": 4})


def test_a_sum_with_zero_and_a_product_with_one_make_no_new_size() -> None:
    size = Dim("a") * Dim("b") + 5
    assert all(made is size for made in (size + 0, 0 + size, size * 1, size - 0))


def test_strides_of_a_shape_are_products_of_the_sizes_behind() -> None:
    a, b = Dim("a"), Dim("b")
    for shape in ((), (a,), (2, a, 3, b), (0, a, 1), (a, b, a)):
        assert row_major(shape) == tuple(size_product(shape[d + 1 :]) for d in range(len(shape)))
