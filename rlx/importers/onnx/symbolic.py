"""Small arrays known at import: the sizes that ONNX graphs compute with Shape, Gather, Concat, Mul ...

A `Static` is such an array. Its elements are numbers, sizes (`Dim`) or, in floating-point arrays, sizes over an integer
(`Ratio`), so that a graph's shape arithmetic is carried out once, exactly, for every extent of its dims.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError, RlxError
from rlx.ir import casting
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array
from rlx.ir.shape import Dim, Size, bounds, ceildiv, exact_div, max_size, min_size, same
from rlx.records import dataclass

__all__ = [
    "LIMIT",
    "Item",
    "NotStaticError",
    "Ratio",
    "Static",
    "arithmetic",
    "cast",
    "compare",
    "map_items",
    "reduced",
    "rounded",
    "static_array",
]

LIMIT = 1024  # elements; larger arrays are data
_LARGEST_DENOMINATOR = 1024  # beyond it a factor is not exact: 0.1, say


class NotStaticError(RlxError):
    """The result can't be told at import (a size whose sign is open, an inexact factor): it is run-time data.

    It can be where the values of `inputs` of the model are known.
    """

    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """The exact value num / den of a size and an integer > 1 that does not divide it."""

    num: Dim
    den: int


Item = int | float | bool | Dim | Ratio


@dataclass(frozen=True, eq=False)
class Static:
    """An array of `Item`s with an element type; `items` is a NumPy array of objects."""

    items: Array
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.items.shape
        return shape

    @property
    def concrete(self) -> bool:
        """Whether every element is a number."""
        return not any(isinstance(item, Dim | Ratio) for item in self.items.flat)

    def array(self) -> Array:
        """The numbers of a concrete array, in its element type."""
        wide = DTYPES.get({"i": "i64", "u": "u64", "f": "f64"}.get(self.dtype.kind, ""), self.dtype)
        try:
            if self.dtype.is_integer:
                low, high = casting.ends(self.dtype)
                if not all(low <= item <= high for item in self.items.flat):
                    raise OverflowError
            return casting.cast(self.items.astype(wide.numpy), self.dtype)
        except OverflowError:
            found = ", ".join(map(_text, self.items.flat[:4]))
            raise ModelFormatError(f"numbers computed at import do not fit {self.dtype}: {found}") from None

    def sizes(self) -> list[Size]:
        """The elements as sizes; `NotStaticError` if one is not whole."""
        return [_size(item) for item in self.items.flat]

    def ints(self) -> list[int]:
        """The elements as ints; `NotStaticError` if one depends on the run."""
        return [_int(item) for item in self.items.flat]

    def item(self) -> Item:
        """The only element."""
        found: Item = self.items.reshape(-1)[0]
        return found


def _size(item: Item) -> Size:
    if isinstance(item, Dim):
        return item
    if isinstance(item, Ratio) or item != int(item):
        raise NotStaticError(f"{_text(item)} is not a whole size")
    return int(item)


def _int(item: Item) -> int:
    size = _size(item)
    if isinstance(size, Dim):
        raise NotStaticError(f"{size} depends on the run; fix it with dims")
    return size


def _text(item: Item) -> str:
    return f"({item.num})/{item.den}" if isinstance(item, Ratio) else str(item)


def static_array(value: Any, dtype: DType | None = None) -> Static:
    """A `Static` of numbers or sizes: an array, a list, or one item (of i64 where no type is given)."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        found = dtype_of(value.dtype)
        if not found.native:  # these make no Python numbers
            value = casting.cast(value, DTYPES["f32" if found.is_float else "i8"])
        return Static(value.astype(object), dtype or found)
    shape = np.shape(value) if isinstance(value, np.ndarray) else (len(value),) if isinstance(value, list) else ()
    items = np.empty(shape, object)
    items.reshape(-1)[:] = list(value.flat) if isinstance(value, np.ndarray) else value if shape else [value]
    return Static(items, dtype or DTYPES["i64"])


def map_items(fn: Callable[..., Item], dtype: DType, *arrays: Static) -> Static:
    """Applies a function to each element of arrays that broadcast."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    if int(np.prod(shape, dtype=np.int64)) > LIMIT:
        raise NotStaticError(f"an array of {shape} is larger than {LIMIT} elements")
    out = np.empty(shape, object)
    rows = zip(*(np.broadcast_to(a.items, shape).flat for a in arrays), strict=True)
    out.reshape(-1)[:] = [fn(*row) for row in rows]
    return Static(out, dtype)


# ---- arithmetic


def arithmetic(name: str, a: Static, b: Static) -> Static:
    """`add`, `sub`, `mul`, `div`, `mod`, `min` or `max`, in the element type of both."""

    if a.dtype is not b.dtype:
        raise NotStaticError(f"{name} of {a.dtype} and {b.dtype}")

    def element(x: Item, y: Item) -> Item:
        if isinstance(x, Dim | Ratio) or isinstance(y, Dim | Ratio):
            return _symbolic(name, x, y, a.dtype.is_float)
        return _number(name, x, y, a.dtype)

    return map_items(element, a.dtype, a, b)


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _number(name: str, x: Any, y: Any, dtype: DType) -> Item:
    """The operation as the data would compute it: rounded to, or wrapped in, the element type."""
    if name in ("div", "mod") and not dtype.is_float:
        if y == 0:
            raise NotStaticError("an integer division by zero")
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return int(quotient) if name == "div" else int(x % y)
    if name == "mod":
        raise NotStaticError("a floating-point remainder")
    with np.errstate(all="ignore"):
        to = dtype.numpy.type
        found: Item = np.asarray(_NUMBERS.get(name, np.true_divide)(to(x), to(y))).astype(dtype.numpy).item()
    return found


def _parts(item: Item) -> tuple[Size, int]:
    """Numerator and denominator."""
    if isinstance(item, Ratio):
        return item.num, item.den
    if isinstance(item, Dim):
        return item, 1
    try:
        exact = Fraction(item)
    except (OverflowError, ValueError):  # an infinity, NaN
        raise NotStaticError(f"{item} is not a size") from None
    if exact.denominator > _LARGEST_DENOMINATOR:
        raise NotStaticError(f"the factor {item} is not exact in binary, so the size depends on rounding")
    return exact.numerator, exact.denominator


def _over(num: Size, den: int) -> Item:
    """num / den in its simplest form."""
    exact = exact_div(num, den)
    if exact is not None:
        return exact
    return Ratio(num, den) if isinstance(num, Dim) else num / den


def _symbolic(name: str, x: Item, y: Item, is_float: bool) -> Item:
    (a, p), (b, q) = _parts(x), _parts(y)
    match name:
        case "add":
            return _over(a * q + b * p, p * q)
        case "sub":
            return _over(a * q - b * p, p * q)
        case "mul":
            return _over(a * b, p * q)
        case "min" if p == q == 1:
            return min_size(a, b)
        case "max" if p == q == 1:
            return max_size(a, b)
        case "div" if is_float:
            return _quotient(a * q, b * p)
        case "div" | "mod" if p == q == 1:
            return _whole_division(name, a, b)
    raise NotStaticError(f"{name} of {_text(x)} and {_text(y)}")


def _quotient(num: Size, den: Size) -> Item:
    exact = exact_div(num, den)
    if exact is not None:
        return exact
    if isinstance(den, int) and den != 0:
        return _over(num if den > 0 else -num, abs(den))
    raise NotStaticError(f"the quotient of the sizes {num} and {den}")


def _whole_division(name: str, a: Size, b: Size) -> Item:
    exact = exact_div(a, b)
    if exact is not None:
        return exact if name == "div" else 0
    low, divisor = bounds(a)[0], bounds(b)[0]
    if divisor is None or divisor <= 0 or (name == "div" and (low is None or low < 0)):
        raise NotStaticError(f"the integer {name} of {a} by {b}, whose signs are not known")
    return a // b if name == "div" else a % b


# ---- comparison


def compare(name: str, a: Static, b: Static) -> Static:
    """`eq`, `lt`, `le`, `gt` or `ge` where the bounds of the dims decide it."""
    return map_items(lambda x, y: _compare(name, x, y), DTYPES["bool"], a, b)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _compare(name: str, x: Item, y: Item) -> bool:
    if not isinstance(x, Dim | Ratio) and not isinstance(y, Dim | Ratio):
        return _COMPARISONS[name](x, y)
    (a, p), (b, q) = _parts(x), _parts(y)
    difference = a * q - b * p
    low, high = bounds(difference)
    decided: bool | None
    match name:
        case "eq":
            decided = same(a * q, b * p)
        case "lt":
            decided = _below(low, high, 0)
        case "le":
            decided = _below(low, high, 1)
        case "gt":
            decided = _not(_below(low, high, 1))
        case _:
            decided = _not(_below(low, high, 0))
    if decided is None:
        raise NotStaticError(f"whether {_text(x)} is {name} {_text(y)}")
    return decided


def _below(low: int | None, high: int | None, limit: int) -> bool | None:
    """Whether a value in low..high is < limit."""
    if high is not None and high < limit:
        return True
    return False if low is not None and low >= limit else None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


# ---- conversion


def cast(a: Static, to: DType) -> Static:
    """The elements converted as data would be."""
    return map_items(lambda item: _cast(item, a.dtype, to), to, a)


def _cast(item: Item, old: DType, new: DType) -> Item:
    if isinstance(item, Ratio):
        if new.is_float:
            return item
        low, _ = bounds(item.num)
        if new.kind != "i" or low is None or low < 0:
            raise NotStaticError(f"{_text(item)} as {new}")
        return item.num // item.den
    if isinstance(item, Dim):
        if new.kind == "b" and same(item, 0) is False:
            return True
        if new.bits < 32 or new.kind not in "ifu":
            raise NotStaticError(f"the size {item} as {new}")
        return item
    return static_array(casting.cast(np.asarray(item, old.numpy), new), new).item()


def rounded(a: Static, direction: str) -> Static:
    """`floor`, `ceil` or `round` of each element."""
    return map_items(lambda item: _rounded(item, direction), a.dtype, a)


def _rounded(item: Item, direction: str) -> Item:
    if isinstance(item, Dim):
        return item
    if isinstance(item, Ratio):
        if direction == "round":
            raise NotStaticError(f"{_text(item)} rounded to the nearest")
        return item.num // item.den if direction == "floor" else ceildiv(item.num, item.den)
    found: float = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}[direction](item).item()
    return found


def reduced(a: Static, name: str, axes: Sequence[int], keepdims: bool) -> Static:
    """`mul`, `add`, `min` or `max` over axes."""
    kept = [d for d in range(a.items.ndim) if d not in axes]
    rows = a.items.transpose(*kept, *axes).reshape(*(a.shape[d] for d in kept), -1)
    if rows.shape[-1] == 0:
        raise NotStaticError("a reduction of no elements")
    total = Static(rows[..., 0], a.dtype)
    for i in range(1, rows.shape[-1]):
        total = arithmetic(name, total, Static(rows[..., i], a.dtype))
    shape = [1 if d in axes else n for d, n in enumerate(a.shape) if keepdims or d not in axes]
    return Static(np.asarray(total.items, object).reshape(shape), a.dtype)
