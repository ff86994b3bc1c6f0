"""Inputs of NumPy's functions as graph values of one element type, by NumPy's rules (NEP 50)."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OptionError
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.frames import Frame, current, frame_of, number_type, weakest
from rlx.ir.graph import Graph, Value, refuse_masked
from rlx.ir.shape import Dim
from rlx.ops.complex import as_type
from rlx.ops.elementwise import Cast
from rlx.ops.layout import SizeOf
from rlx.ops.numpy.registry import FUNCTIONS

__all__ = ["cast", "is_number", "lift", "resolved", "traced", "unite", "value_of"]

_LOG = logging.getLogger("rlx")
Kind = Any  # a NumPy dtype, or the Python type of a number


def traced() -> bool:
    """Whether a function is being traced: element types then follow NumPy's rules, else none is changed."""
    return current() is not None


def is_number(x: Any) -> bool:
    """Whether it stands for a Python number, which takes the element type of what it meets."""
    return (isinstance(x, int | float | complex) and not isinstance(x, np.generic)) or isinstance(x, Dim) or is_weak(x)


def is_weak(x: Any) -> bool:
    return isinstance(x, Value) and x.weak


def cast(x: Value, to: Any) -> Value:
    """x in an element type."""
    wanted = dtype_of(to)
    if x.dtype is wanted:
        return x
    return as_type(x, wanted) if "c" in (x.dtype.kind, wanted.kind) else x.graph.add(Cast(wanted), x)[0]


def lift(what: str, inputs: Sequence[Any]) -> list[Value]:
    """The inputs as values of the innermost graph, in their own types; numbers as i64, f64, c128 or bool."""
    graph, frame = frame_of([x for x in inputs if isinstance(x, Value)], what)
    return [_value(what, graph, frame, x) for x in inputs]


def whole(what: str, x: Any) -> int:
    """An int that a user gives, of Python or NumPy; raises `OptionError` for anything else, and truncates nothing."""
    try:
        return operator.index(x)
    except TypeError:
        raise OptionError(f"{what}: expected an int, got {x!r}") from None


def several(what: str, x: Any) -> tuple[Any, ...]:
    """One or more ints or sizes that a user gives, as a tuple; raises `OptionError` for what can't be gone through."""
    if isinstance(x, int | np.integer | Dim):
        return (x,)
    try:
        if not isinstance(x, str | bytes):
            return tuple(x)
    except TypeError:
        pass
    raise OptionError(f"{what}: expected an int, or several, got {x!r}")


def value_of(what: str, x: Any) -> Value:
    """One input as a value."""
    return lift(what, [x])[0]


def _value(what: str, graph: Graph, frame: Frame | None, x: Any, to: DType | None = None) -> Value:
    if isinstance(x, Value):
        own = x if frame is None else frame.own(x)
        return own if to is None else cast(own, to)
    if isinstance(x, Dim):
        (size,) = graph.add(SizeOf(x))
        size.weak = to is None
        return size if to is None else cast(size, to)
    add = graph.constant if frame is None else frame.array
    if is_number(x):
        try:
            made = add(x, to or number_type(x))
        except OverflowError:
            raise DTypeError(
                f"{what}: the number {x} does not fit the element type {to}; cast the array first"
            ) from None
        made.weak = to is None
        return made
    if isinstance(x, list | tuple) and any(isinstance(part, Value | Dim) for part in x):
        return _value(what, graph, frame, np.stack(lift(what, x)), to)
    refuse_masked(what, x)
    array = np.asarray(x)
    if array.dtype == object:
        raise OptionError(f"{what}: {type(x).__name__} is no array")
    return cast(add(array), to) if to is not None else add(array)


def kind_of(x: Any) -> Kind:
    """What NumPy's rules ask of an input: its dtype, or the type of a Python number."""
    if isinstance(x, Dim):
        return int
    if is_weak(x):
        return {"f": float, "i": int, "c": complex}.get(x.dtype.kind, x.dtype.numpy)
    if isinstance(x, Value):
        return x.dtype.numpy
    if is_number(x):
        return np.dtype(np.bool_) if isinstance(x, bool) else type(x)
    return (
        np.asarray(x).dtype if not isinstance(x, list | tuple) else kind_of(np.stack(x) if _holds(x) else np.asarray(x))
    )


def _holds(x: Sequence[Any]) -> bool:
    return any(isinstance(part, Value | Dim) for part in x)


def kinds_of(inputs: Sequence[Any]) -> list[Kind]:
    """The kinds of inputs; a Python number beside floats is one of them (bf16 too, where NumPy would widen)."""
    kinds = [kind_of(x) for x in inputs]
    if all(isinstance(k, type) for k in kinds):
        return [np.dtype(k) for k in kinds]
    if any(k is complex or np.dtype(k).kind == "c" for k in kinds):
        return kinds
    floats = [k for k in kinds if not isinstance(k, type) and (k.kind == "f" or k.type.__module__ == "ml_dtypes")]
    if not floats:
        return kinds
    widest = np.result_type(*floats)
    return [widest if isinstance(k, type) else k for k in kinds]


def resolved(ufunc: Any, inputs: Sequence[Any]) -> tuple[list[Value], np.dtype[Any]]:
    """The inputs in the types that the ufunc computes them in, and the type of its (first) result."""
    what = f"np.{ufunc.__name__}"
    if not traced():
        values = [x for x in inputs if isinstance(x, Value)]
        graph, _ = frame_of(values, what)
        like = weakest(values)
        made = [
            _value(what, graph, None, x, like if is_number(x) and not isinstance(x, bool) else None) for x in inputs
        ]
        return made, made[0].dtype.numpy
    kinds = kinds_of(inputs)
    if ufunc is np.matmul:  # which has no loop of its own for bf16 and the like
        values = unite(what, inputs)
        return values, values[0].dtype.numpy
    try:
        types = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))
    except TypeError as error:
        raise DTypeError(f"{what}: {error}") from None
    _note(what, kinds, types[ufunc.nin])
    return _as(what, inputs, types[: ufunc.nin]), types[ufunc.nin]


def unite(what: str, inputs: Sequence[Any]) -> list[Value]:
    """The inputs in one element type."""
    if not traced():
        values = [x for x in inputs if isinstance(x, Value)]
        graph, _ = frame_of(values, what)
        return [_value(what, graph, None, x, weakest(values) if is_number(x) else None) for x in inputs]
    kinds = kinds_of(inputs)
    try:
        to = np.result_type(*(k(0) if isinstance(k, type) else k for k in kinds))
    except TypeError as error:
        raise DTypeError(f"{what}: {error}") from None
    _note(what, kinds, to)
    return _as(what, inputs, [to] * len(inputs))


def _as(what: str, inputs: Sequence[Any], types: Sequence[Any]) -> list[Value]:
    graph, frame = frame_of([x for x in inputs if isinstance(x, Value)], what)
    return [_value(what, graph, frame, x, dtype_of(t)) for x, t in zip(inputs, types, strict=True)]


EXACT = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "floor_divide": operator.floordiv,
    "remainder": operator.mod,
}  # fmt: skip


def sizes_or_values(name: str, inputs: Sequence[Any]) -> Any:
    """A ufunc by name on sizes and numbers: a size where all are whole, else a value of the graph being traced."""
    if name in EXACT and all(isinstance(x, int | np.integer | Dim) for x in inputs):
        return EXACT[name](*(int(x) if isinstance(x, np.integer) else x for x in inputs))
    return FUNCTIONS[getattr(np, name)](*inputs) if traced() else NotImplemented


def _note(what: str, kinds: Sequence[Kind], result: Any) -> None:
    """Says where narrower floats are widened to f64, as NumPy does: often a slip."""
    narrow = any(not isinstance(k, type) and k.kind == "f" and k.itemsize < 8 for k in kinds)
    if not narrow or result != np.float64:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").split(".")[0] in ("rlx", "numpy"):
        frame = frame.f_back
    shown = ", ".join(k.__name__ if isinstance(k, type) else str(k) for k in kinds)
    _LOG.warning(
        "jit: %s of %s gives float64, as in NumPy (%s:%d): cast the wider operand to stay narrow",
        what,
        shown,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
