"""Sums of products in Einstein's notation."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Shape, Size, numel, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Mul
from rlx.ops.layout import Reshape, Unsqueeze
from rlx.ops.reduction import ReduceSum

__all__ = ["Einsum", "Relabel"]


@register
class Relabel(Op):
    """Axes renamed and put in another order, equal ones taken along the diagonal: out[i..] = x[labels of x from i..].

    `source` has a label for each axis of x, `target` each of them once: source (0, 1, 0), target (1, 0) gives
    out[b, a] = x[a, b, a]. (a diagonal and a transpose in one)
    """

    source: tuple[int, ...]
    target: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        if len(self.source) != x.rank:
            raise ShapeError(f"relabel: {len(self.source)} labels for {x}; give one for each axis")
        if len(set(self.target)) != len(self.target) or set(self.target) != set(self.source):
            raise OptionError(f"relabel: the labels {self.target} must be those of {self.source}, each once")
        sizes: dict[int, Size] = {}
        for label, size in zip(self.source, x.shape, strict=True):
            sizes[label] = unify(sizes.get(label, size), size, f"relabel: the axes {label} of {x}")
        return TensorType(tuple(sizes[label] for label in self.target), x.dtype)

    def work(self, *x: TensorType) -> Work:
        out = tensor_bytes(self.infer(*x))
        return Work(0, out, out)

    def reference(self, x: Array) -> Array:
        sizes = dict(zip(self.source, x.shape, strict=True))
        places = np.ix_(*(range(sizes[label]) for label in self.target))
        return np.asarray(x[tuple(places[self.target.index(label)] for label in self.source)])

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: x(*(i[self.target.index(label)] for label in self.source)))


Labels = tuple[int, ...]


def _parse(equation: str, ranks: list[int]) -> tuple[list[Labels], Labels]:
    """The labels of the axes of each operand and of the result: letters by code, axes of an ellipsis from -1 down."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise OptionError(f"einsum: {equation!r} has {len(terms)} terms for {len(ranks)} inputs")
    spread = 0
    operands = []
    for term, rank in zip(terms, ranks, strict=True):
        labels = _labels(equation, term, rank)
        spread = max(spread, -min((n for n in labels if n < 0), default=0))
        operands.append(labels)
    everything = [n for labels in operands for n in labels]
    hidden = tuple(range(-spread, 0))
    if arrow:
        before, dots, after = right.partition("...")
        result = (*_letters(equation, before), *(hidden if dots else ()), *_letters(equation, after))
    else:
        result = (*hidden, *sorted(n for n in set(everything) if n >= 0 and everything.count(n) == 1))
    if len(set(result)) != len(result) or not set(result) <= set(everything):
        raise OptionError(f"einsum: the result of {equation!r} repeats a label or has one that no input has")
    return operands, result


def _letters(equation: str, text: str) -> list[int]:
    if not all(c.isascii() and c.isalpha() for c in text):
        raise OptionError(f"einsum: {equation!r}: labels are the letters a-z and A-Z")
    return [ord(c) for c in text]


def _labels(equation: str, term: str, rank: int) -> Labels:
    before, dots, after = term.partition("...")
    named = len(before) + len(after)
    if named > rank or (named < rank and not dots):
        raise ShapeError(f"einsum: the term {term!r} of {equation!r} has {named} labels for an input of rank {rank}")
    return (*_letters(equation, before), *range(named - rank, 0), *_letters(equation, after))


@register
class Einsum(Op):
    """The sum of products that `equation` states, e.g. "bij,bjk->bik". (ONNX Einsum-12, numpy.einsum)

    Any number of inputs of one type, repeated labels (diagonals), ellipses and an implicit result are understood; axes
    of size 1 broadcast. f16 and bf16 accumulate in f32.
    """

    equation: str

    def _sizes(self, *x: TensorType) -> tuple[list[Labels], Labels, dict[int, Size]]:
        operands, result = _parse(self.equation, [t.rank for t in x])
        sizes: dict[int, Size] = {}
        for labels, t in zip(operands, x, strict=True):
            for label, size in zip(labels, t.shape, strict=True):
                known = sizes.get(label, 1)
                why = f"einsum {self.equation!r}: the label {_name(label)!r} of {t}"
                sizes[label] = size if known == 1 else known if size == 1 else unify(known, size, why)
        return operands, result, sizes

    def infer(self, *x: TensorType) -> TensorType:
        if not x:
            raise ShapeError("einsum: takes 1 or more inputs, 0 given")
        check_kind(self, x[0], "fiu")
        check_same_dtype(self, *x)
        _, result, sizes = self._sizes(*x)
        return TensorType(tuple(sizes[label] for label in result), x[0].dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        _, _, sizes = self._sizes(*x)
        read: Size = 0
        for t in x:
            read = read + tensor_bytes(t)
        return Work(numel(tuple(sizes.values())) * len(x), read, tensor_bytes(out))

    def reference(self, *x: Array) -> Array:
        made = np.einsum(self.equation.replace(" ", ""), *(widened(a) for a in x))
        return np.asarray(made).astype(x[0].dtype)

    def decompose(self, g: Graph, *x: Value) -> Value:
        operands, result, sizes = self._sizes(*(v.type for v in x))
        terms = [_without_ones(g, v, labels, sizes) for v, labels in zip(x, operands, strict=True)]
        value, labels = terms[0]
        for n, (other, other_labels) in enumerate(terms[1:], 2):
            needed = set(result).union(*(later for _, later in terms[n:]))
            value, labels = _product(g, (value, labels), (other, other_labels), needed)
        value, labels = _summed(g, value, labels, set(result))
        missing = [label for label in result if label not in labels]  # of size 1 everywhere
        if missing:
            (value,) = g.add(Unsqueeze(tuple(range(len(missing)))), value)
            labels = (*missing, *labels)
        return _arranged(g, value, labels, result)


def _name(label: int) -> str:
    return chr(label) if label >= 0 else "..."


def _arranged(g: Graph, value: Value, labels: Labels, target: Labels) -> Value:
    return value if labels == target else g.add(Relabel(labels, target), value)[0]


def _without_ones(g: Graph, value: Value, labels: Labels, sizes: dict[int, Size]) -> tuple[Value, Labels]:
    """The operand without the axes of size 1 that broadcast (or that are 1 for all), equal labels as one axis."""
    kept = [d for d, size in enumerate(value.shape) if size != 1]
    if len(kept) != value.rank:
        (value,) = g.add(Reshape(tuple(value.shape[d] for d in kept)), value)
        labels = tuple(labels[d] for d in kept)
    distinct = tuple(dict.fromkeys(labels))
    return _arranged(g, value, labels, distinct), distinct


def _summed(g: Graph, value: Value, labels: Labels, needed: set[int]) -> tuple[Value, Labels]:
    axes = tuple(d for d, label in enumerate(labels) if label not in needed)
    if not axes:
        return value, labels
    return g.add(ReduceSum(axes, False), value)[0], tuple(label for label in labels if label in needed)


def _product(g: Graph, a: tuple[Value, Labels], b: tuple[Value, Labels], needed: set[int]) -> tuple[Value, Labels]:
    """The product of two terms, summed over the labels that nothing after them needs."""
    x, of_x = _summed(g, *a, needed | set(b[1]))
    y, of_y = _summed(g, *b, needed | set(a[1]))
    shared = [label for label in of_x if label in of_y]
    batch = tuple(label for label in shared if label in needed)
    inner = tuple(label for label in shared if label not in needed)
    rows = tuple(label for label in of_x if label not in of_y)
    columns = tuple(label for label in of_y if label not in of_x)
    labels = (*batch, *rows, *columns)
    x = _arranged(g, x, of_x, (*batch, *rows, *inner))
    y = _arranged(g, y, of_y, (*batch, *inner, *columns))
    lead, n = x.shape[: len(batch)], len(batch)
    row_sizes, column_sizes = x.shape[n : n + len(rows)], y.shape[n + len(inner) :]
    if not inner:
        if columns and rows:
            (x,) = g.add(Unsqueeze(tuple(range(n + len(rows), len(labels)))), x)
            (y,) = g.add(Unsqueeze(tuple(range(n, n + len(rows)))), y)
        elif columns:
            (x,) = g.add(Unsqueeze(tuple(range(n, len(labels)))), x)
        elif rows:
            (y,) = g.add(Unsqueeze(tuple(range(n, len(labels)))), y)
        return g.add(Mul(), x, y)[0], labels
    depth = numel(x.shape[n + len(rows) :])
    x = _shaped(g, x, (*lead, numel(row_sizes), depth))
    y = _shaped(g, y, (*lead, depth, numel(column_sizes)))
    (made,) = g.add(MatMul(), x, y)
    return _shaped(g, made, (*lead, *row_sizes, *column_sizes)), labels


def _shaped(g: Graph, value: Value, shape: Shape) -> Value:
    return value if value.shape == shape else g.add(Reshape(shape), value)[0]
