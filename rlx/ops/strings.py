"""Ops on strings. None has code on any device: the host carries them out, on strings of the dictionary of the run.

What a normal form, a token or a number is, is as ONNX says, and ONNX Runtime where that is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.ir.regex import compile_pattern
from rlx.ir.shape import Size, broadcast, max_size, numel, unify
from rlx.ir.strings import as_result, check_text, dictionary
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, op_named, register, tensor_bytes
from rlx.ops.select import Produced

__all__ = [
    "FindKeys",
    "NgramCounts",
    "NumberToString",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "StringStep",
    "StringToNumber",
    "Tokenizer",
    "numbered",
]

STRING, I64, I32, F32, BOOL = (DTYPES[name] for name in ("string", "i64", "i32", "f32", "bool"))
CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def numbered(t: TensorType) -> TensorType:
    """The type of the numbers that stand for strings; other types as they are."""
    return TensorType(t.shape, I32) if t.dtype is STRING else t


def _strings(texts: Iterable[str], shape: Sequence[int]) -> Array:
    return np.array(list(texts), STRING.numpy).reshape(tuple(shape))


def _work(op: Op, *x: TensorType) -> Work:
    """Some hundred operations a string."""
    out = op.infer_types(x)
    count = sum((numel(t.shape) for t in (*x, *out) if t.dtype is STRING), start=0)
    read, written = (sum((tensor_bytes(t) for t in types), start=0) for types in (x, out))
    return Work(count * 100, read, written)


class _OnHost(Op):
    strings: ClassVar[str] = "read"

    def work(self, *x: TensorType) -> Work:
        return _work(self, *x)


class _Sized(Produced):
    """Base of those whose strings decide a size, `count`."""

    strings: ClassVar[str] = "read"

    def work(self, *x: TensorType) -> Work:
        return _work(self, *x)


@register
class StringStep(Produced):
    """The op named `step`, which reads or makes strings, on their numbers; `texts` says which inputs stand for strings.

    The first input is the key of the run's dictionary. It is what a graph is given for such an op before any device
    sees it (`passes/number_strings.py`).
    """

    step: str
    given: tuple[tuple[str, Any], ...]
    texts: tuple[bool, ...]
    count: Size = 0

    @property
    def op(self) -> Op:
        """The op itself."""
        made: Op = op_named(self.step)(**dict(self.given))
        return made

    @property
    def title(self) -> str:
        return self.step

    def _types(self, x: Sequence[TensorType]) -> list[TensorType]:
        return [TensorType(t.shape, STRING) if text else t for t, text in zip(x, self.texts, strict=True)]

    def infer(self, key: TensorType, *x: TensorType) -> tuple[TensorType, ...]:
        if key.dtype is not I64 or key.rank:
            raise DTypeError(f"{self.step}: the key of a dictionary is i64[], got {key}")
        return tuple(map(numbered, self.op.infer_types(self._types(x))))

    def most(self, *x: TensorType) -> Size | None:
        op = self.op
        return op.most(*self._types(x[1:])) if isinstance(op, Produced) else None

    def work(self, *x: TensorType) -> Work:
        return self.op.work(*self._types(x[1:]))

    def reference(self, key: Array, *x: Array) -> tuple[Array, ...]:
        held = dictionary(int(key))
        given = [held.decode(a) if text else a for a, text in zip(x, self.texts, strict=True)]
        made = self.op.reference(*given)
        results = made if isinstance(made, tuple) else (made,)
        return tuple(held.encode(r) if r.dtype == STRING.numpy else r for r in map(as_result, results))


# ---- text to text


@register
class StringNormalizer(_Sized):
    """Strings in another case, without stop words; a single "" if none is left. (ONNX StringNormalizer)

    `case` is "NONE", "LOWER" or "UPPER". Stop words, which only strings [C] or [1, C] can lose, are compared as they
    are or, unless `case_sensitive`, in lower case.
    """

    count: Size = 0  # with stop words
    case: str = "NONE"
    stopwords: tuple[str, ...] = ()
    case_sensitive: bool = False

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "s")
        if self.case not in CASES:
            raise OptionError(f"string_normalizer: case {self.case!r} is none of {', '.join(CASES)}")
        if not self.stopwords:
            return x
        if x.rank not in (1, 2):
            raise ShapeError(f"string_normalizer: stop words are taken out of strings [C] or [1, C], got {x}")
        if x.rank == 2:
            unify(x.shape[0], 1, f"string_normalizer: stop words are taken out of one row, got {x}")
        return TensorType((*x.shape[:-1], self.count), STRING)

    def most(self, *x: TensorType) -> Size | None:
        return max_size(numel(x[0].shape), 1)

    def reference(self, x: Array) -> Array:
        texts, change = x.reshape(-1).tolist(), CASES[self.case]
        if not self.stopwords:
            return _strings(map(change, texts), x.shape)
        form: Callable[[str], str] = str if self.case_sensitive else str.lower
        stop = set(map(form, self.stopwords))
        kept = [change(t) for t in texts if form(t) not in stop] or [""]
        return _strings(kept, (*x.shape[:-1], len(kept)))


@register
class StringConcat(_OnHost):
    """The strings of a, each followed by that of b; the two broadcast. (ONNX StringConcat)"""

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, a, "s")
        check_same_dtype(self, a, b)
        return TensorType(broadcast(a.shape, b.shape, why=f"string_concat of {a} and {b}"), STRING)

    def reference(self, a: Array, b: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        check_text(int(np.strings.str_len(a).sum() + np.strings.str_len(b).sum()), "string_concat")
        return _strings((s + t for s, t in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True)), a.shape)


@register
class StringSplit(_Sized):
    """The parts of each string [..., count], filled up with "", and how many it has, i64. (ONNX StringSplit)

    Parts lie between `delimiter`s or, where that is "", between stretches of white space. At most `most_splits` times
    a string is split; None: as often as can be.
    """

    count: Size
    delimiter: str = ""
    most_splits: int | None = None

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        check_kind(self, x, "s")
        return TensorType((*x.shape, self.count), STRING), TensorType(x.shape, I64)

    def most(self, *x: TensorType) -> Size | None:
        return None if self.most_splits is None else self.most_splits + 1

    def reference(self, x: Array) -> tuple[Array, Array]:
        limit = -1 if self.most_splits is None else self.most_splits
        rows = [t.split(self.delimiter or None, limit) if t else [] for t in x.reshape(-1).tolist()]
        return _filled(rows, "", x.shape), np.array([len(row) for row in rows], np.int64).reshape(x.shape)


def _filled(rows: Sequence[Sequence[str]], pad: str, shape: Sequence[int]) -> Array:
    """Rows of strings as an array [..., longest]."""
    width = max(map(len, rows), default=0)
    return _strings((t for row in rows for t in (*row, *[pad] * (width - len(row)))), (*shape, width))


@register
class Tokenizer(_Sized):
    """The tokens of each string of x [C] or [N, C], filled up with `pad`: [..., count]. (com.microsoft Tokenizer)

    They are what `expression` matches, or what lies between `separators`, patterns that are tried in their order; a
    single "" as separator makes each character a token. Tokens of fewer than `shortest` characters are left out. With
    `mark`, "\\x02" comes before the tokens of a string and "\\x03" after them.
    """

    count: Size
    pad: str
    expression: str = ""
    separators: tuple[str, ...] = ()
    shortest: int = 1
    mark: bool = False

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "s")
        if x.rank not in (1, 2):
            raise ShapeError(f"tokenizer: expected strings [C] or [N, C], got {x}")
        if bool(self.expression) == bool(self.separators):
            raise OptionError("tokenizer: give either an expression or separators")
        for pattern in (self.expression, *self.separators):
            compile_pattern(pattern)
        return TensorType((*x.shape, self.count), STRING)

    def reference(self, x: Array) -> Array:
        rows = [[t for t in self._tokens(text) if len(t) >= self.shortest] for text in x.reshape(-1).tolist()]
        if self.mark:
            rows = [["\x02", *row, "\x03"] for row in rows]
        return _filled(rows, self.pad, x.shape)

    def _tokens(self, text: str) -> list[str]:
        if self.expression:
            return [text[a:b] for a, b in compile_pattern(self.expression).find(text)]
        if self.separators == ("",):
            return list(text)
        parts = [text]
        for separator in self.separators:
            parts = [part for whole in parts for part in _between(whole, separator)]
        return parts


def _between(text: str, separator: str) -> list[str]:
    parts, start = [], 0
    for a, b in compile_pattern(separator).find(text):
        parts.append(text[start:a])
        start = b
    return [*parts, text[start:]]


# ---- text to numbers and back


@register
class RegexFullMatch(_OnHost):
    """Whether `pattern`, of RE2's syntax, matches each string as a whole: bool. (ONNX RegexFullMatch)"""

    pattern: str

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "s")
        compile_pattern(self.pattern)
        return TensorType(x.shape, BOOL)

    def reference(self, x: Array) -> Array:
        match = compile_pattern(self.pattern).fullmatch
        return np.array([match(t) for t in x.reshape(-1).tolist()], bool).reshape(x.shape)


@register
class StringToNumber(_OnHost):
    """The number that each string writes, as elements of type `to`. (ONNX Cast)

    A string that is none stops the run with an `ExecutionError`. Integers are written in digits, floats plainly, with
    an exponent, or as NaN, INF and -INF in any case.
    """

    to: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "s")
        if self.to.kind not in "fiub" or self.to.bits < 8:
            raise DTypeError(f"string_to_number: strings can't be read as {self.to}")
        return TensorType(x.shape, self.to)

    def reference(self, x: Array) -> Array:
        return np.array([self._number(t) for t in x.reshape(-1).tolist()], self.to.numpy).reshape(x.shape)

    def _number(self, text: str) -> Any:
        try:
            if "_" in text:
                raise ValueError
            if self.to.is_float:
                return np.float64(text).astype(self.to.numpy)
            number = int(text)
            return bool(number) if self.to.kind == "b" else np.array(number, self.to.numpy)
        except (ValueError, OverflowError):
            raise ExecutionError(f"string_to_number: {text!r:.80} is no number of type {self.to}") from None


@register
class NumberToString(_OnHost):
    """Each number as text: floats in up to 8 digits (f64: 17), plainly or with an exponent, NaN, INF. (ONNX Cast)"""

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiub")
        return TensorType(x.shape, STRING)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(100, *x)

    def reference(self, x: Array) -> Array:
        if x.dtype == np.bool_ or not dtype_of(x.dtype).is_float:
            return _strings((str(int(v)) for v in x.reshape(-1)), x.shape)
        digits = 17 if x.dtype == np.float64 else 8
        return _strings((_float_text(float(v), digits) for v in x.reshape(-1)), x.shape)


def _float_text(number: float, digits: int) -> str:
    if number != number:
        return "NaN"
    if number in (np.inf, -np.inf):
        return "INF" if number > 0 else "-INF"
    return f"{number:.{digits}g}"


# ---- by equality: on strings or on their numbers alike


def _alike(op: Op, x: TensorType, keys: TensorType, what: str) -> None:
    check_same_dtype(op, x, keys)
    if keys.rank != 1:
        raise ShapeError(f"{op.op_name}: expected {what} of one axis, got {keys}")


@register
class FindKeys(Op):
    """For each element of x the place of the first of `keys` [K] that equals it, i64; K where none does.

    NaN equals NaN.
    """

    strings: ClassVar[str] = "moved"

    def infer(self, x: TensorType, keys: TensorType) -> TensorType:
        _alike(self, x, keys, "keys")
        check_kind(self, x, "fiubs")
        return TensorType(x.shape, I64)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(20, *x)

    def reference(self, x: Array, keys: Array) -> Array:
        sorted_keys, places = np.unique(keys, return_index=True)  # NaN is one key, the last
        if not len(keys):
            return np.zeros(x.shape, np.int64)
        at = np.minimum(np.searchsorted(sorted_keys, x), len(sorted_keys) - 1)
        near = sorted_keys[at]
        same = near == x
        if dtype_of(x.dtype).is_float:
            same |= np.isnan(near) & np.isnan(x)
        return np.where(same, places[at], len(keys)).astype(np.int64)


@register
class NgramCounts(Op):
    """How often n-grams occur in x [C] or [N, C], as features f32 [F] or [N, F]. (ONNX TfIdfVectorizer, mode TF)

    The n-grams are a tree: the children of node n are the nodes `first`[n] + 1 to `first`[n + 1], of which node e + 1
    is reached by the item `items`[e], and those of a node ascend; node 0 is the root. `feature` has for each node the
    feature of the n-gram that ends there, or -1. All are i64. Of the n-grams with n from `shortest` to `longest`, items
    apart by 1 to `skips` + 1 count (for n = 1 only once).
    """

    features: int
    shortest: int = 1
    longest: int = 1
    skips: int = 0

    def infer(self, x: TensorType, first: TensorType, items: TensorType, feature: TensorType) -> TensorType:
        for t in (x, first, items, feature):
            if t.dtype is not I64 or (t is not x and t.rank != 1):
                raise DTypeError(f"ngram_counts: expected i64, and tables of one axis, got {t}")
        if x.rank not in (1, 2):
            raise ShapeError(f"ngram_counts: expected x [C] or [N, C], got {x}")
        if not 0 <= self.skips < 64 or self.longest > 16:
            raise OptionError(f"ngram_counts: skips {self.skips} must be below 64, n {self.longest} at most 16")
        unify(first.shape[0], items.shape[0] + 2, f"ngram_counts: {first} and the items {items}")
        unify(feature.shape[0], items.shape[0] + 1, f"ngram_counts: {feature} and the items {items}")
        return TensorType((*x.shape[:-1], self.features), F32)

    def work(self, *x: TensorType) -> Work:
        grams = numel(x[0].shape) * self.longest * (self.skips + 1)
        read = sum((tensor_bytes(t) for t in x), start=0)
        return Work(grams * 20, read, tensor_bytes(self.infer_types(x)[0]))

    def reference(self, x: Array, first: Array, items: Array, feature: Array) -> Array:
        out = np.zeros((numel(x.shape[:-1]), self.features), np.float32)
        children = [
            dict(zip(items[a:b].tolist(), range(a + 1, b + 1), strict=True)) for a, b in pairwise(first.tolist())
        ]
        for row, line in zip(x.reshape(len(out), -1).tolist(), out, strict=True):
            for step in range(1, self.skips + 2):
                for start in range(len(row)):
                    node: int | None = 0
                    for n, item in enumerate(row[start::step][: self.longest], 1):
                        node = children[node or 0].get(item)
                        if node is None:
                            break
                        at = int(feature[node])
                        if n >= self.shortest and (n > 1 or step == 1) and at >= 0:
                            if at >= self.features:
                                raise ExecutionError(f"ngram_counts: {at} is none of {self.features} features")
                            line[at] += 1
        return out.reshape(*x.shape[:-1], self.features)
