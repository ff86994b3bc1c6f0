"""Ops that move, repeat or create elements without arithmetic on their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import (
    Dim,
    Shape,
    Size,
    bounds,
    broadcast,
    ceildiv,
    evaluate,
    exact_div,
    max_size,
    min_size,
    numel,
    unify,
)
from rlx.ops.base import Op, Work, axis_of, register

__all__ = [
    "Concat",
    "Expand",
    "Full",
    "Iota",
    "Pad",
    "Reshape",
    "SizeOf",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
]

PAD_MODES = ("constant", "reflect", "edge", "wrap")


class _Layout(Op):
    """Base of ops that do no arithmetic: their cost is the bytes they move."""

    strings: ClassVar[str] = "moved"
    view: ClassVar[bool] = False  # whether the row-major order of the elements stays as it is

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)


def _shape_text(shape: Sequence[Size]) -> str:
    return f"[{', '.join(str(s) for s in shape)}]"


def _no_more(low: Size, high: Size, why: str) -> None:
    """Requires low <= high: `ShapeError` where it can't hold, a guard where it can't be proved."""
    if isinstance(low, int) and isinstance(high, int) and low > high:
        raise ShapeError(why)
    unify(max_size(low, high), high, why)


def _count_sizes(sizes: Sequence[Size], what: str) -> None:
    why = f"{what} {_shape_text(sizes)} has a negative size"
    for size in sizes:
        _no_more(0, size, why)


def _ints(sizes: Sequence[Size]) -> tuple[int, ...]:
    """Sizes that are ints by the time `reference` runs."""
    return tuple(evaluate(size, {}) for size in sizes)


def _axes_of(axes: Sequence[int], rank: int, op: str) -> tuple[int, ...]:
    """Axes as 0 <= axis < rank, ascending; `ShapeError` when one is outside or named twice."""
    found = tuple(sorted(axis_of(axis, rank, op) for axis in axes))
    if len(set(found)) != len(found):
        raise ShapeError(f"{op}: axes {tuple(axes)} name an axis twice")
    return found


def _check_rank(count: int, x: TensorType, what: str) -> None:
    if count != x.rank:
        raise ShapeError(f"{what} for {count} axes given, {x} has {x.rank}; give one for each axis")


# ---- views


@register
class Reshape(_Layout):
    """The same elements in row-major order under another shape. (ONNX Reshape-21 with sizes resolved, numpy.reshape)"""

    view: ClassVar[bool] = True
    shape: tuple[Size, ...]

    def infer(self, x: TensorType) -> TensorType:
        _count_sizes(self.shape, "reshape: the shape")
        why = f"reshape: {_shape_text(x.shape)} and {_shape_text(self.shape)} must have as many elements"
        unify(numel(x.shape), numel(self.shape), why)
        return TensorType(self.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return x.reshape(_ints(self.shape))

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: x(*_reshaped_indices(k, x.shape, self.shape, i)))


Term = tuple[Any, Size, Size]  # index expression e >= 0, its coefficient, its extent: e * coefficient with e < extent


def _reshaped_indices(k: Any, old: Shape, new: Shape, i: Sequence[Any]) -> list[Any]:
    """Indices into `old` of the element at `i` of `new`.

    Runs of axes with equal products are treated apart, so that divisions appear only where axes really mix.
    """
    at = [k.size(0) for _ in old]
    for old_axes, new_axes in _matching_runs(old, new):
        linear: list[Term] = []
        stride: Size = 1
        for d in reversed(new_axes):
            linear.append((i[d], stride, new[d]))
            stride = stride * new[d]
        stride = 1
        for d in reversed(old_axes):
            digit = _quotient(linear, stride)
            at[d] = _total(k, digit if d == old_axes[0] else _remainder(k, digit, old[d]))
            stride = stride * old[d]
    return at


def _matching_runs(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Splits both shapes into runs of axes with equal products; axes of size 1 are left out."""
    a = [d for d, size in enumerate(old) if size != 1]
    b = [d for d, size in enumerate(new) if size != 1]
    tails: list[tuple[list[int], list[int]]] = []
    if numel(old) != numel(new):  # equal only by a guard: products from the front need not meet, those from the end may
        n = 0
        while n < min(len(a), len(b)) and old[a[-1 - n]] == new[b[-1 - n]]:
            n += 1
        tails = [([a[-1 - m]], [b[-1 - m]]) for m in range(n)]
        a, b = a[: len(a) - n], b[: len(b) - n]
    ends = {numel([new[d] for d in b[:n]]): n for n in range(1, len(b) + 1)}
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    for n in range(1, len(a) + 1):
        m = len(b) if n == len(a) else ends.get(numel([old[d] for d in a[:n]]), 0)
        if m > j:
            runs.append((a[i:n], b[j:m]))
            i, j = n, m
    if i < len(a):  # an empty tensor (or axes that a guard makes 1): no index is ever needed, or it is 0
        runs.append((a[i:], b[j:]))
    return runs + tails


def _split_terms(terms: list[Term], by: Size) -> tuple[list[Term], list[Term]]:
    """The terms whose coefficient is a multiple of `by`, divided by it, and the others."""
    whole: list[Term] = []
    rest: list[Term] = []
    for e, coefficient, extent in terms:
        quotient = exact_div(coefficient, by)
        if quotient is None:
            rest.append((e, coefficient, extent))
        else:
            whole.append((e, quotient, extent))
    return whole, rest


def _largest(terms: list[Term]) -> Size:
    total: Size = 0
    for _, coefficient, extent in terms:
        total = total + coefficient * (extent - 1)
    return total


def _is_below(terms: list[Term], limit: Size) -> bool:
    lo, _ = bounds(limit - 1 - _largest(terms))
    return lo is not None and lo >= 0


def _sum_terms(terms: list[Term]) -> Any:
    total = None
    for e, coefficient, _ in reversed(terms):
        total = e * coefficient if total is None else total + e * coefficient
    return total


def _total(k: Any, terms: list[Term]) -> Any:
    return _sum_terms(terms) if terms else k.size(0)


def _quotient(terms: list[Term], by: Size) -> list[Term]:
    whole, rest = _split_terms(terms, by)
    if rest and not _is_below(rest, by):
        whole.insert(0, (_sum_terms(rest) // by, 1, _largest(rest) // by + 1))
    return whole


def _remainder(k: Any, terms: list[Term], by: Size) -> list[Term]:
    _, rest = _split_terms(terms, by)
    return rest if not rest or _is_below(rest, by) else [(_sum_terms(rest) % k.size(by), 1, by)]


@register
class Squeeze(_Layout):
    """Removes axes of size 1; `axes` None removes every axis whose size is known to be 1. (ONNX Squeeze-21)"""

    view: ClassVar[bool] = True
    axes: tuple[int, ...] | None = None

    def _removed(self, shape: Shape) -> tuple[int, ...]:
        if self.axes is None:
            return tuple(d for d, size in enumerate(shape) if size == 1)
        return _axes_of(self.axes, len(shape), "squeeze")

    def infer(self, x: TensorType) -> TensorType:
        removed = self._removed(x.shape)
        for d in removed:
            unify(x.shape[d], 1, f"squeeze: axis {d} of {x} must have size 1")
        return TensorType(tuple(s for d, s in enumerate(x.shape) if d not in removed), x.dtype)

    def reference(self, x: Array) -> Array:
        return x.reshape([s for d, s in enumerate(x.shape) if d not in self._removed(x.shape)])

    def lower(self, k: Any, x: Any) -> Any:
        removed = self._removed(x.shape)
        kept = [d for d in range(x.rank) if d not in removed]
        return k.map(lambda *i: x(*(0 if d in removed else i[kept.index(d)] for d in range(x.rank))))


@register
class Unsqueeze(_Layout):
    """Inserts axes of size 1 so that they are at `axes` of the result. (ONNX Unsqueeze-21)"""

    view: ClassVar[bool] = True
    axes: tuple[int, ...]

    def _inserted(self, rank: int) -> tuple[int, ...]:
        return _axes_of(self.axes, rank + len(self.axes), "unsqueeze")

    def infer(self, x: TensorType) -> TensorType:
        inserted = self._inserted(x.rank)
        sizes = iter(x.shape)
        shape = tuple(1 if d in inserted else next(sizes) for d in range(x.rank + len(inserted)))
        return TensorType(shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return np.expand_dims(x, self._inserted(x.ndim))

    def lower(self, k: Any, x: Any) -> Any:
        inserted = self._inserted(x.rank)
        return k.map(lambda *i: x(*(e for d, e in enumerate(i) if d not in inserted)))


# ---- moves


@register
class Transpose(_Layout):
    """Axis d of the result is axis perm[d] of x; `perm` None reverses the axes. (ONNX Transpose-21)"""

    perm: tuple[int, ...] | None = None

    def _order(self, rank: int) -> tuple[int, ...]:
        if self.perm is None:
            return tuple(reversed(range(rank)))
        order = tuple(axis_of(axis, rank, "transpose") for axis in self.perm)
        if len(order) != rank or len(set(order)) != rank:
            raise ShapeError(f"transpose: perm {self.perm} is not an order of the {rank} axes of its input")
        return order

    def infer(self, x: TensorType) -> TensorType:
        return TensorType(tuple(x.shape[d] for d in self._order(x.rank)), x.dtype)

    def reference(self, x: Array) -> Array:
        return x.transpose(self._order(x.ndim)).copy()

    def lower(self, k: Any, x: Any) -> Any:
        order = self._order(x.rank)
        return k.map(lambda *i: x(*(i[order.index(d)] for d in range(x.rank))))


@register
class Slice(_Layout):
    """out[i] = x[starts + i * steps], i < sizes, with one entry for each axis of x. (ONNX Slice-13, resolved)

    Steps may be negative, not 0. `ShapeError` where an element outside x would be read.
    """

    starts: tuple[Size, ...]
    sizes: tuple[Size, ...]
    steps: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        for entries in (self.starts, self.sizes, self.steps):
            _check_rank(len(entries), x, "slice: entries")
        _count_sizes(self.sizes, "slice: the result")
        for d, (start, size, step, extent) in enumerate(zip(self.starts, self.sizes, self.steps, x.shape, strict=True)):
            if step == 0:
                raise ShapeError(f"slice: the step of axis {d} is 0; expected a positive or negative step")
            if size != 0:
                _check_slice(start, size, step, extent, f"slice: axis {d} of {x} from {start} by {step}, {size} times")
        return TensorType(self.sizes, x.dtype)

    def work(self, *x: TensorType) -> Work:
        moved = super().work(*x)
        return Work(0, moved.written, moved.written)

    def reference(self, x: Array) -> Array:
        entries = zip(_ints(self.starts), _ints(self.sizes), self.steps, strict=True)
        for d, (start, size, step) in enumerate(entries):
            x = np.take(x, start + step * np.arange(size, dtype=np.int64), axis=d)
        return x

    def lower(self, k: Any, x: Any) -> Any:
        entries = list(zip(self.starts, self.steps, strict=True))
        return k.map(lambda *i: x(*(e * step + start for e, (start, step) in zip(i, entries, strict=True))))


def _check_slice(start: Size, size: Size, step: int, extent: Size, why: str) -> None:
    last = start + (size - 1) * step
    low, high = (start, last) if step > 0 else (last, start)
    reaches_end = size == (ceildiv(extent - start, step) if step > 0 else ceildiv(start + 1, -step))
    if not (reaches_end and step < 0):
        _no_more(0, low, f"{why}: begins before the axis")
    if not (reaches_end and step > 0):
        _no_more(high + 1, extent, f"{why}: goes beyond the axis")


@register
class Pad(_Layout):
    """Adds `pads` (begin of each axis, then end of each axis) elements; negative ones are cut off. (ONNX Pad-21)

    Modes: "constant" adds `value`, "edge" repeats the border, "reflect" mirrors without repeating the border (needs
    pads smaller than the axis), "wrap" continues at the other end.
    """

    strings: ClassVar[str] = "none"
    pads: tuple[Size, ...]
    value: float | int | bool = 0
    mode: str = "constant"

    def infer(self, x: TensorType) -> TensorType:
        if self.mode not in PAD_MODES:
            raise OptionError(f"pad: unknown mode {self.mode!r}; expected one of {', '.join(PAD_MODES)}")
        if len(self.pads) != 2 * x.rank:
            raise ShapeError(f"pad: {len(self.pads)} pads given for {x}; expected {2 * x.rank}, begins and then ends")
        shape = tuple(n + b + e for n, b, e in zip(x.shape, self.pads[: x.rank], self.pads[x.rank :], strict=True))
        _count_sizes(shape, "pad: the result")
        for d, n in enumerate(x.shape):
            for pad in (self.pads[d], self.pads[d + x.rank]):
                _check_border(self.mode, pad, n, f"pad: {pad} of mode {self.mode!r} on axis {d} of {x}")
        return TensorType(shape, x.dtype)

    def reference(self, x: Array) -> Array:
        if not x.ndim:
            return x.copy()
        begins, ends = np.array(_ints(self.pads), np.int64).reshape(2, x.ndim)
        added = np.stack([begins, ends], axis=1).clip(min=0)
        if self.mode == "constant":
            full = np.pad(x, added, constant_values=np.asarray(self.value).astype(x.dtype))
        else:
            full = np.pad(x, added, mode=self.mode)  # type: ignore[call-overload]
        kept = [slice(max(0, -b), n - max(0, -e)) for b, e, n in zip(begins, ends, full.shape, strict=True)]
        return full[tuple(kept)].copy()

    def lower(self, k: Any, x: Any) -> Any:
        begins, ends = self.pads[: x.rank], self.pads[x.rank :]
        if self.mode != "constant":
            axes = list(zip(x.shape, begins, ends, strict=True))
            return k.map(lambda *i: x(*(_border(k, self.mode, e, *axis) for e, axis in zip(i, axes, strict=True))))

        def element(*i: Any) -> Any:
            at = [e - b for e, b in zip(i, begins, strict=True)]
            before = [a >= 0 for a, b in zip(at, begins, strict=True) if _may_be_positive(b)]
            beyond = [a < k.size(n) for a, n, e in zip(at, x.shape, ends, strict=True) if _may_be_positive(e)]
            inside = k.all(*before, *beyond)
            if inside is None:
                return x(*at)
            loaded = x(*at, where=inside)
            return loaded if self.value == 0 else k.select(inside, loaded, k.const(self.value, x.dtype))

        return k.map(element)


def _may_be_positive(pad: Size) -> bool:
    _, hi = bounds(pad)
    return hi is None or hi > 0


def _check_border(mode: str, pad: Size, n: Size, why: str) -> None:
    """Requires that an axis of n has the elements that a pad takes from it."""
    if pad == 0 or mode == "constant":
        return
    if mode == "reflect":
        _no_more(pad + 1, max_size(n, 1), f"{why}: must be smaller than the axis")
    else:
        _no_more(min_size(max_size(pad, 0), 1), n, f"{why}: an empty axis has no elements to repeat")


def _border(k: Any, mode: str, i: Any, n: Size, begin: Size, end: Size) -> Any:
    """The index inside an axis of n that an index of the padded axis stands for."""
    at = i - begin
    before, beyond = _may_be_positive(begin), _may_be_positive(end)
    size = k.size(n)
    if mode == "wrap":
        return at % size if before or beyond else at
    if before:
        at = k.max(at, 0) if mode == "edge" else k.select(at < 0, -at, at)
    if beyond:
        last = k.size(n - 1)
        at = k.min(at, last) if mode == "edge" else k.select(at > last, k.size(2 * n - 2) - at, at)
    return at


@register
class Concat(_Layout):
    """Tensors of one type joined along `axis`; the other axes must agree. (ONNX Concat-13)"""

    axis: int

    def infer(self, *x: TensorType) -> TensorType:
        if not x:
            raise ShapeError("concat: takes 1 or more inputs, 0 given")
        axis = axis_of(self.axis, x[0].rank, "concat")
        shape = list(x[0].shape)
        for other in x[1:]:
            if other.dtype is not x[0].dtype:
                raise DTypeError(f"concat: inputs {x[0]} and {other} differ in dtype; cast one of them")
            if other.rank != x[0].rank:
                raise ShapeError(f"concat: inputs {x[0]} and {other} differ in rank")
            for d, size in enumerate(other.shape):
                if d == axis:
                    shape[d] = shape[d] + size
                else:
                    shape[d] = unify(shape[d], size, f"concat: axis {d} of {x[0]} and {other}")
        return TensorType(tuple(shape), x[0].dtype)

    def reference(self, *x: Array) -> Array:
        return np.concatenate(x, axis=self.axis)

    def lower(self, k: Any, *x: Any) -> Any:
        axis = self.axis % x[0].rank
        boxes = []
        start: Size = 0
        for operand in x:
            extents: list[Size] = list(k.out[0].shape)
            offset: list[Size] = [0] * operand.rank
            extents[axis], offset[axis] = operand.shape[axis], start
            boxes.append((offset, extents, operand))
            start = start + operand.shape[axis]
        return k.pieces(boxes)


@register
class Split(_Layout):
    """Parts of x of the given sizes, one after the other along `axis`; one output each. (ONNX Split-18)"""

    axis: int
    sizes: tuple[Size, ...]

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        axis = axis_of(self.axis, x.rank, "split")
        _count_sizes(self.sizes, "split: the list of sizes")
        total: Size = 0
        for size in self.sizes:
            total = total + size
        unify(total, x.shape[axis], f"split: the sizes {_shape_text(self.sizes)} must add up to axis {axis} of {x}")
        return tuple(TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for size in self.sizes)

    def reference(self, x: Array) -> tuple[Array, ...]:
        ends = np.cumsum(np.array(_ints(self.sizes), np.int64))
        return tuple(part.copy() for part in np.split(x, ends[:-1], axis=self.axis))

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank

        def part(start: Size) -> Any:
            return lambda *i: x(*i[:axis], i[axis] + start, *i[axis + 1 :])

        starts: list[Size] = [0]
        for size in self.sizes[:-1]:
            starts.append(starts[-1] + size)
        return k.map(*(part(start) for start in starts))


# ---- repeats


@register
class Expand(_Layout):
    """x broadcast with `shape` by NumPy's rules. (ONNX Expand-13)"""

    shape: tuple[Size, ...]

    def infer(self, x: TensorType) -> TensorType:
        _count_sizes(self.shape, "expand: the shape")
        why = f"expand: {_shape_text(x.shape)} to {_shape_text(self.shape)}"
        return TensorType(broadcast(x.shape, self.shape, why=why), x.dtype)

    def reference(self, x: Array) -> Array:
        return np.broadcast_to(x, np.broadcast_shapes(x.shape, _ints(self.shape))).copy()

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(x.broadcast)


@register
class Tile(_Layout):
    """x repeated repeats[d] times along each axis d. (ONNX Tile-13, numpy.tile)"""

    repeats: tuple[Size, ...]

    def infer(self, x: TensorType) -> TensorType:
        _check_rank(len(self.repeats), x, "tile: repeats")
        _count_sizes(self.repeats, "tile: the list of repeats")
        return TensorType(tuple(n * r for n, r in zip(x.shape, self.repeats, strict=True)), x.dtype)

    def reference(self, x: Array) -> Array:
        return np.tile(x, _ints(self.repeats))

    def decompose(self, g: Any, x: Any) -> Any:
        """Each axis that is repeated gets one before it, along which x is broadcast: loops then have no division."""
        sizes = zip(x.shape, self.repeats, strict=True)
        spread = [pair for n, r in sizes for pair in ([(n, n * r)] if 1 in (n, r) else [(1, r), (n, n)])]
        y = g.add(Expand(tuple(after for _, after in spread)), *g.add(Reshape(tuple(b for b, _ in spread)), x))
        return g.add(Reshape(self.infer(x.type).shape), *y)[0]


# ---- sources


@register
class Full(_Layout):
    """A tensor of `shape` with every element `value`; no inputs. (ONNX ConstantOfShape-21)"""

    shape: tuple[Size, ...]
    value: float | int | bool = 0
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        _count_sizes(self.shape, "full: the shape")
        if self.dtype.kind == "s":
            raise DTypeError("full: its value is a number, no string; expand a constant")
        return TensorType(self.shape, self.dtype)

    def reference(self) -> Array:
        return np.full(_ints(self.shape), self.value, self.dtype.numpy)

    def lower(self, k: Any) -> Any:
        return k.map(lambda *i: k.const(self.value, self.dtype))


@register
class Iota(_Layout):
    """[start, start + step, ...] with `size` elements; no inputs. (ONNX Range-11 with the count known)"""

    size: Size
    start: Size | float = 0
    step: int | float = 1
    dtype: DType = DTYPES["i64"]

    def infer(self) -> TensorType:
        if not (self.dtype.is_float or self.dtype.is_integer):
            raise DTypeError(f"iota: expected a float or integer dtype, got {self.dtype}")
        if self.dtype.is_integer and (isinstance(self.start, float) or isinstance(self.step, float)):
            raise DTypeError(f"iota: start {self.start} and step {self.step} must be integers for dtype {self.dtype}")
        _count_sizes((self.size,), "iota: the shape")
        return TensorType((self.size,), self.dtype)

    def _arithmetic(self) -> DType:
        """The type the values are computed in."""
        if self.dtype.is_integer:
            return DTYPES["i64"]
        return DTYPES["f64"] if self.dtype.bits == 64 else DTYPES["f32"]

    def reference(self) -> Array:
        dtype = self._arithmetic().numpy
        steps = np.arange(evaluate(self.size, {})).astype(dtype) * dtype.type(self.step)
        return np.asarray(steps + dtype.type(self.start), self.dtype.numpy)

    def lower(self, k: Any) -> Any:
        dtype = self._arithmetic()
        start = k.cast(k.size(self.start), dtype) if isinstance(self.start, Dim) else k.const(self.start, dtype)
        return k.map(lambda i: k.cast(i, dtype) * k.const(self.step, dtype) + start)


@register
class SizeOf(_Layout):
    """A size as an i64 scalar; no inputs. (an entry of ONNX Shape-21, used as data)"""

    size: Size

    def infer(self) -> TensorType:
        return TensorType((), DTYPES["i64"])

    def reference(self) -> Array:
        return np.asarray(self.size, np.int64)

    def lower(self, k: Any) -> Any:
        return k.map(lambda: k.size(self.size))
