"""Sizes known before a run: integers, or expressions over named, bounded symbols.

A size is an `int` or a `Dim`. A `Dim` is kept in one canonical form, a sum of integer multiples of products of atoms
(symbols, floor divisions, minima and maxima), so that two sizes that are algebraically equal compare equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import gcd, prod
from typing import Any

from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.undecided import Undecided
from rlx.records import dataclass
from rlx.units import with_ints

__all__ = [
    "Atom",
    "Dim",
    "Guard",
    "Shape",
    "Size",
    "Symbol",
    "bounds",
    "broadcast",
    "ceildiv",
    "check_text",
    "collect_guards",
    "dim_of_terms",
    "divides",
    "evaluate",
    "exact_div",
    "format_size",
    "format_symbol",
    "max_size",
    "min_size",
    "never_positive",
    "numel",
    "same",
    "size_product",
    "substitute",
    "symbols",
    "unify",
    "upper",
    "usual_size",
]


_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_NAMES = frozenset({"floordiv", "min", "max", "none", "true", "false", "nan", "inf"})


@dataclass(frozen=True)
class Symbol:
    """A named size with bounds lo <= n <= hi (`hi` None: unbounded) that is a multiple of `multiple`."""

    name: str
    lo: int = 1
    hi: int | None = None
    multiple: int = 1


MAX_NESTED = 100  # divisions and extrema within each other in one size
USUAL = 128  # the size at which a dim without an upper bound is looked at


def usual_size(symbol: Symbol) -> int:
    """A size to plan and price a dim at: its upper bound; without one, 128 or the least above that it can be."""
    multiple = symbol.multiple
    if symbol.hi is not None:
        return symbol.hi // multiple * multiple or multiple
    return -(-max(symbol.lo, USUAL) // multiple) * multiple


@dataclass(frozen=True)
class FloorDiv:
    """floor(num / den), not reducible to smaller terms."""

    num: Size
    den: Size


@dataclass(frozen=True)
class Extremum:
    """The smallest ("min") or largest ("max") of `args`."""

    kind: str
    args: tuple[Size, ...]


Atom = Symbol | FloorDiv | Extremum
Monomial = tuple[Atom, ...]


def check_text(what: str, name: str) -> None:
    """Raises `OptionError` for a name that no text can hold: with half of a surrogate pair."""
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise OptionError(f"{what}: the name {name!r} is no Unicode text")


class Dim(Undecided):
    """A symbolic size: `Dim("batch", 1, 64)` is a symbol, and arithmetic on it gives further sizes.

    Supports `+ - * // %` with ints and other Dims. `lo` and `hi` (None: unbounded) limit the symbol; `multiple` states
    that it is always a multiple of that integer.
    """

    __slots__ = ("_hash", "_nested", "_text", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, name: str, lo: int = 1, hi: int | None = None, multiple: int = 1) -> None:
        lo, hi, multiple = with_ints((lo, hi, multiple))
        if not isinstance(name, str) or not all(type(n) is int for n in (lo, multiple, 0 if hi is None else hi)):
            raise OptionError(f"Dim({name!r}, {lo!r}, {hi!r}, multiple={multiple!r}): expected a name and ints")
        check_text(f"Dim({name!r})", name)
        if not name or lo < 0 or multiple < 1 or (hi is not None and hi < lo):
            raise OptionError(f"Dim({name!r}, {lo}, {hi}, {multiple}): expected a name, 0 <= lo <= hi, multiple >= 1")
        if hi is not None and -(-lo // multiple) * multiple > hi:
            raise OptionError(f"Dim({name!r}): there is no multiple of {multiple} from {lo} to {hi}")
        self.terms = (((Symbol(name, lo, hi, multiple),), 1),)
        self._nested = 0  # divisions and extrema within each other
        self._hash = hash(self.terms)
        self._text: str | None = None

    @staticmethod
    def _of(terms: Mapping[Monomial, int]) -> Size:
        kept = {m: c for m, c in terms.items() if c}
        if not kept:
            return 0
        if len(kept) == 1 and () in kept:
            return kept[()]
        nested = max((_nested(atom) for mono in kept for atom in mono), default=0)
        if nested > MAX_NESTED:
            raise ShapeError(
                f"a size is the result of more than {MAX_NESTED} divisions, minima and maxima of each other: give the "
                "dims that it depends on fixed sizes (dims=)"
            )
        ordered = sorted(kept.items(), key=_term_key) if len(kept) > 1 else kept.items()
        return Dim._in_order(tuple(ordered), nested)

    @property
    def symbol(self) -> Symbol | None:
        """The symbol that this size is, or None for a compound expression."""
        if len(self.terms) == 1:
            (mono, coef) = self.terms[0]
            if coef == 1 and len(mono) == 1 and isinstance(mono[0], Symbol):
                return mono[0]
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return dim_of_terms, (self.terms,)  # not the hash: those of strings differ from process to process

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def _limits(self) -> Bounds:
        return bounds(self)

    def __add__(self, other: Any) -> Size:
        if not isinstance(other, int | Dim):
            number: Size = self._number("add", self, other)
            return number
        if type(other) is int and other == 0:
            return self
        total = dict(self.terms)
        for mono, coef in _terms(other):
            total[mono] = total.get(mono, 0) + coef
        return Dim._of(total)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self._times(-1)

    def _times(self, number: int) -> Size:
        """The product with an integer: the same terms in the same order, so nothing is sorted."""
        if number == 1:
            return self
        if number == 0:
            return 0
        return Dim._in_order(tuple((mono, coef * number) for mono, coef in self.terms), self._nested)

    @staticmethod
    def _in_order(terms: tuple[tuple[Monomial, int], ...], nested: int) -> Dim:
        """The size of terms that are in canonical form."""
        dim = object.__new__(Dim)
        dim._nested = nested
        dim.terms = terms
        dim._hash = hash(terms)
        dim._text = None
        return dim

    def __sub__(self, other: Size) -> Size:
        return self + (-other)

    def __rsub__(self, other: Size) -> Size:
        return (-self) + other

    def __mul__(self, other: Any) -> Size:
        if not isinstance(other, int | Dim):
            number: Size = self._number("multiply", self, other)
            return number
        if not isinstance(other, Dim):
            return self._times(int(other))
        total: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                mono = tuple(sorted(m1 + m2, key=_atom_key))
                total[mono] = total.get(mono, 0) + c1 * c2
        return Dim._of(total)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return _floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return _floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return self - other * _floordiv(self, other)

    def __rmod__(self, other: int) -> Size:
        return other - self * _floordiv(other, self)

    def __str__(self) -> str:
        return format_size(self)

    def __repr__(self) -> str:
        return f"Dim({format_size(self)})"

    def __bool__(self) -> bool:
        raise ShapeError(f"the truth of the symbolic size {self} is not known before the run: compare with bounds()")


def dim_of_terms(terms: Iterable[tuple[Monomial, int]]) -> Size:
    """The size that is the sum of these products, each with its coefficient."""
    return Dim._of(dict(terms))


Size = int | Dim
Shape = tuple[Size, ...]


def _nested(atom: Atom) -> int:
    """How many divisions and extrema lie within each other."""
    if isinstance(atom, Symbol):
        return 0
    within = (atom.num, atom.den) if isinstance(atom, FloorDiv) else atom.args
    return 1 + max(size._nested if isinstance(size, Dim) else 0 for size in within)


def _terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    return size.terms if isinstance(size, Dim) else (((), size),)


def _atom_key(atom: Atom) -> str:
    return format_atom(atom)


def _term_key(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    return (-len(term[0]), [_atom_key(a) for a in term[0]])


@lru_cache(4096)  # bounded: names come from files
def format_symbol(name: str) -> str:
    """The name of a symbol as sizes show it: in backquotes unless it is a plain word that means nothing else there."""
    if _PLAIN_NAME.fullmatch(name) and name not in _RESERVED_NAMES and name not in DTYPES:
        return name
    return "`" + json.dumps(name)[1:-1].replace("`", "\\u0060") + "`"


def format_atom(atom: Atom) -> str:
    """The text of one atom; symbols print by name alone (their bounds are declared with the graph)."""
    match atom:
        case Symbol(name=name):
            return format_symbol(name)
        case FloorDiv(num=num, den=den):
            return f"floordiv({format_size(num)}, {format_size(den)})"
        case Extremum(kind=kind, args=args):
            return f"{kind}({', '.join(map(format_size, args))})"


def format_size(size: Size) -> str:
    """The text of a size, as the graph printer writes it and its parser reads it."""
    if isinstance(size, int):
        return str(size)
    if size._text is None:
        size._text = _format_terms(size)
    return size._text


def _format_terms(size: Dim) -> str:
    parts: list[str] = []
    for mono, coef in size.terms:
        factors = [format_atom(a) for a in mono]
        if abs(coef) != 1 or not factors:
            factors.insert(0, str(abs(coef)))
        sign = ("-" if coef < 0 else "") if not parts else (" - " if coef < 0 else " + ")
        parts.append(sign + "*".join(factors))
    return "".join(parts)


def _atom_multiple(atom: Atom) -> int:
    return atom.multiple if isinstance(atom, Symbol) else 1


def _content(mono: Monomial, coef: int) -> int:
    """An integer that the term is always a multiple of."""
    return abs(coef) * prod(_atom_multiple(a) for a in mono)


def _divide_term(mono: Monomial, coef: int, by_mono: Monomial, by_coef: int) -> tuple[Monomial, int] | None:
    if coef % by_coef:
        return None
    rest = list(mono)
    for atom in by_mono:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest), coef // by_coef


def exact_div(num: Size, den: Size) -> Size | None:
    """num / den when the division leaves no remainder for every value of the symbols, else None."""
    if isinstance(num, int) and isinstance(den, int):
        return num // den if den and num % den == 0 else None
    if num == den:
        return 1
    if num == 0:
        return 0
    terms = list(_terms(den))
    if len(terms) != 1:
        return _polynomial_div(num, den)
    (by_mono, by_coef) = terms[0]
    if by_coef == 0:
        return None
    total: dict[Monomial, int] = {}
    for mono, coef in _terms(num):
        quotient = _divide_term(mono, coef, by_mono, by_coef)
        if quotient is None:
            return None
        total[quotient[0]] = total.get(quotient[0], 0) + quotient[1]
    return Dim._of(total)


def _polynomial_div(num: Size, den: Size) -> Size | None:
    """Long division of polynomials by the leading term; None unless it comes out even."""
    lead_mono, lead_coef = next(iter(_terms(den)))
    quotient: Size = 0
    rest: Size = num
    for _ in range(16):
        if rest == 0:
            return quotient
        if not isinstance(rest, Dim):
            return None
        step = _divide_term(*rest.terms[0], lead_mono, lead_coef)
        if step is None:
            return None
        part = Dim._of({step[0]: step[1]})
        quotient = quotient + part
        rest = rest - part * den
    return None


def divides(den: Size, num: Size) -> bool:
    """Whether `num` is provably a multiple of `den`."""
    if exact_div(num, den) is not None:
        return True
    return isinstance(den, int) and den != 0 and all(_content(m, c) % den == 0 for m, c in _terms(num))


def _floordiv(num: Size, den: Size) -> Size:
    if isinstance(num, int) and isinstance(den, int):
        return num // den
    if den == 1:
        return num
    exact = exact_div(num, den)
    if exact is not None:
        return exact
    if isinstance(den, int):
        if den <= 0:
            raise ShapeError(f"floor division of the size {num} by {den}: expected a positive divisor")
        whole: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for mono, coef in _terms(num):
            q, r = divmod(coef, den)
            if q:
                whole[mono] = q
            if r:
                rest[mono] = r
        left = Dim._of(rest)
        lo, hi = bounds(left)
        base = Dim._of(whole)
        if lo is not None and hi is not None and lo // den == hi // den:
            return base + lo // den
        common = gcd(den, *(c for _, c in _terms(left)))
        if common > 1 and isinstance(left, Dim):
            left, den = Dim._of({m: c // common for m, c in left.terms}), den // common
            if den == 1:
                return base + left
        if isinstance(left, Dim) and len(left.terms) == 1:
            ((mono, coef),) = left.terms
            if coef == 1 and len(mono) == 1 and isinstance(mono[0], FloorDiv) and isinstance(mono[0].den, int):
                inner = mono[0]
                return base + _floordiv(inner.num, inner.den * den)
        return base + Dim._of({(FloorDiv(left, den),): 1})
    return Dim._of({(FloorDiv(num, den),): 1})


def ceildiv(num: Size, den: int) -> Size:
    """Ceiling of num / den for den > 0."""
    return (num + (den - 1)) // den


def _extremum(kind: str, args: Sequence[Size]) -> Size:
    if all(type(arg) is int for arg in args):
        return min(args) if kind == "min" else max(args)
    flat: list[Size] = []
    for arg in args:
        atom = arg.terms[0][0][0] if isinstance(arg, Dim) and len(arg.terms) == 1 and arg.terms[0][0] else None
        nested = isinstance(atom, Extremum) and atom.kind == kind and arg == Dim._of({(atom,): 1})
        flat.extend(atom.args if nested and isinstance(atom, Extremum) else [arg])
    kept: list[Size] = []
    for arg in flat:
        if not any(_dominates(kind, other, arg) for other in kept):
            kept = [other for other in kept if not _dominates(kind, arg, other)]
            kept.append(arg)
    if len(kept) == 1:
        return kept[0]
    return Dim._of({(Extremum(kind, tuple(sorted(kept, key=format_size))),): 1})


def _dominates(kind: str, a: Size, b: Size) -> bool:
    """Whether extremum(a, b) is always a."""
    lo, hi = bounds(a - b)
    return (hi is not None and hi <= 0) if kind == "min" else (lo is not None and lo >= 0)


def min_size(*args: Size) -> Size:
    """The smallest of the sizes."""
    return _extremum("min", args)


def max_size(*args: Size) -> Size:
    """The largest of the sizes."""
    return _extremum("max", args)


Bounds = tuple[int | None, int | None]


def _mul_bounds(a: Bounds, b: Bounds) -> Bounds:
    if None not in a and None not in b:
        corners = [x * y for x in a for y in b if x is not None and y is not None]
        return min(corners), max(corners)
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]
    return None, None


def _atom_bounds(atom: Atom) -> Bounds:
    match atom:
        case Symbol(lo=lo, hi=hi, multiple=m):
            return -(-lo // m) * m, None if hi is None else hi // m * m
        case FloorDiv(num=num, den=den):
            (nlo, nhi), (dlo, dhi) = bounds(num), bounds(den)
            if dlo is None or dlo <= 0:
                return None, None
            low = None if nlo is None else (nlo // dlo if nlo < 0 else (0 if dhi is None else nlo // dhi))
            high = None if nhi is None else (nhi // dlo if nhi >= 0 else (-1 if dhi is None else nhi // dhi))
            return low, high
        case Extremum(kind=kind, args=args):
            los, his = zip(*(bounds(a) for a in args), strict=True)
            if kind == "min":
                known = [h for h in his if h is not None]
                return None if None in los else min(los), min(known) if known else None
            known = [x for x in los if x is not None]
            return max(known) if known else None, None if None in his else max(his)


def bounds(size: Size) -> Bounds:
    """Interval [lo, hi] that the size always lies in (None: no bound known on that side)."""
    if isinstance(size, int):
        return size, size
    lo: int | None = 0
    hi: int | None = 0
    for mono, coef in size.terms:
        term: Bounds = (1, 1)
        for atom in mono:
            term = _mul_bounds(term, _atom_bounds(atom))
        ends = [None if t is None else t * coef for t in term]
        tlo, thi = ends if coef >= 0 else reversed(ends)
        lo = None if lo is None or tlo is None else lo + tlo
        hi = None if hi is None or thi is None else hi + thi
    return lo, hi


def upper(size: Size) -> int | None:
    """The largest value of the size, or None when it is unbounded."""
    return bounds(size)[1]


def same(a: Size, b: Size) -> bool | None:
    """Whether two sizes are equal: True or False when that is certain, None when it depends on the run."""
    if a == b:
        return True
    d = a - b
    return False if never_positive(d + 1) or never_positive(1 - d) else None


def never_positive(size: Size) -> bool:
    """Whether the size is at most 0 for certain; also where a minimum or maximum in it tells so by its parts."""
    hi = upper(size)
    if isinstance(size, int) or (hi is not None and hi <= 0):
        return hi is not None and hi <= 0
    for mono, coef in size.terms:
        if len(mono) == 1 and isinstance(mono[0], Extremum):
            rest = size - coef * Dim._of({mono: 1})
            enough = any if (mono[0].kind == "min") == (coef > 0) else all
            if enough((most := upper(rest + coef * arg)) is not None and most <= 0 for arg in mono[0].args):
                return True
    return False


def symbols(size: Size) -> Iterator[Symbol]:
    """The symbols that the size depends on (with repeats)."""
    for mono, _ in _terms(size):
        for atom in mono:
            match atom:
                case Symbol():
                    yield atom
                case FloorDiv(num=num, den=den):
                    yield from symbols(num)
                    yield from symbols(den)
                case Extremum(args=args):
                    for arg in args:
                        yield from symbols(arg)


def _map_atoms(size: Size, fn: Callable[[Atom], Size]) -> Size:
    total: Size = 0
    for mono, coef in _terms(size):
        term: Size = coef
        for atom in mono:
            term = term * fn(atom)
        total = total + term
    return total


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """The size with each symbol named in `values` replaced."""
    if isinstance(size, int):
        return size

    def replace(atom: Atom) -> Size:
        match atom:
            case Symbol(name=name):
                return values[name] if name in values else Dim._of({(atom,): 1})
            case FloorDiv(num=num, den=den):
                return _floordiv(substitute(num, values), substitute(den, values))
            case Extremum(kind=kind, args=args):
                return _extremum(kind, [substitute(a, values) for a in args])

    return _map_atoms(size, replace)


def evaluate(size: Size, extents: Mapping[str, int]) -> int:
    """The value of the size for given extents of its symbols; `ExecutionError` if one is missing."""
    if isinstance(size, int):
        return size
    total = 0
    for mono, coef in size.terms:
        term = coef
        for atom in mono:
            match atom:
                case Symbol(name=name):
                    if name not in extents:
                        raise ExecutionError(
                            f"the extent of {name!r} is not known: it can't be read off an input's shape"
                        )
                    term *= extents[name]
                case FloorDiv(num=num, den=den):
                    divisor = evaluate(den, extents)
                    if divisor == 0:
                        raise ExecutionError(f"the size {size} divides by {den}, which is 0 in this run")
                    term *= evaluate(num, extents) // divisor
                case Extremum(kind=kind, args=args):
                    values = [evaluate(a, extents) for a in args]
                    term *= min(values) if kind == "min" else max(values)
        total += term
    return total


def size_product(sizes: Iterable[Size]) -> Size:
    """The product of sizes (1 for none)."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def numel(shape: Sequence[Size]) -> Size:
    """Number of elements of a shape."""
    return size_product(shape)


@dataclass(frozen=True)
class Guard:
    """An equality that could not be proved from the bounds: checked when a run starts."""

    lhs: Size
    rhs: Size
    why: str


_sink: ContextVar[list[Guard] | None] = ContextVar("rlx_guards", default=None)


@contextmanager
def collect_guards() -> Iterator[list[Guard]]:
    """Collects the guards that `unify` adds while the context is open."""
    guards: list[Guard] = []
    token = _sink.set(guards)
    try:
        yield guards
    finally:
        _sink.reset(token)


def unify(a: Size, b: Size, why: str) -> Size:
    """The common size of two that must be equal; a guard where that can't be proved, `ShapeError` where it can't be."""
    equal = same(a, b)
    if equal is False:
        raise ShapeError(f"{why}: {a} and {b} differ")
    if equal is None:
        guards = _sink.get()
        if guards is not None:
            guards.append(Guard(a, b, why))
    if isinstance(a, int) or (isinstance(a, Dim) and a.symbol and not isinstance(b, int)):
        return a
    return b


def broadcast(*shapes: Sequence[Size], why: str = "broadcast") -> Shape:
    """The NumPy broadcast of shapes. Of two sizes neither of which is known to be 1, equality is required."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Size] = []
    for axis in range(-rank, 0):
        size: Size = 1
        for shape in shapes:
            if len(shape) < -axis or shape[axis] == 1:
                continue
            size = shape[axis] if size == 1 else unify(size, shape[axis], why)
        out.append(size)
    return tuple(out)
