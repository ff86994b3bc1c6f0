"""Values of i64 whose elements follow from where they are: constant + sum of (coefficient * place along an axis)."""

from __future__ import annotations

import numpy as np

from rlx.ir.graph import Array, Node, Value
from rlx.ir.shape import Dim, Shape, Size
from rlx.ops.elementwise import Add, Identity, Mul, Sub
from rlx.ops.layout import Concat, Expand, Iota, Reshape, SizeOf, Squeeze, Transpose, Unsqueeze
from rlx.records import dataclass

__all__ = ["Places", "are_coordinates_in_order", "are_in_order", "places"]

LARGEST = 1 << 16  # elements of a constant that are looked at
FARTHEST = 1 << 40  # its elements, either way: no sum of steps leaves 64 bits
DEEPEST = 32  # nodes one after the other


@dataclass(frozen=True)
class Places:
    """constant + sum(steps[d] * place along axis d); a step is 0 where the axis has one element."""

    constant: Size
    steps: tuple[Size, ...]


def are_in_order(value: Value) -> bool:
    """Whether the elements are 0, 1, 2, ... in the order in which they lie, in every run."""
    found = places(value)
    if found is None or found.constant != 0:
        return False
    after: Size = 1
    for step, size in zip(reversed(found.steps), reversed(value.shape), strict=True):
        if size != 1 and step != after:
            return False
        after = after * size
    return True


def are_coordinates_in_order(value: Value, shape: Shape) -> bool:
    """Whether the rows along the last axis are the indices of all elements of that shape in the order in which they
    lie, each index made by itself: concat of places along axes that follow one another.
    """
    match value.node:
        case Node(op=Concat(axis=axis), inputs=parts) if axis % value.rank == value.rank - 1:
            pass
        case _:
            parts = (value,)
    if len(parts) != len(shape) or any(x.shape[-1] != 1 for x in parts):
        return False
    grid, last = value.shape[:-1], -1
    for part, size in zip(parts, shape, strict=True):
        found = places(part)
        if found is None or found.constant != 0:
            return False
        moving = [d for d, step in enumerate(found.steps) if step != 0]
        if not moving and size == 1:
            continue
        if len(moving) != 1 or moving[0] <= last or found.steps[moving[0]] != 1 or grid[moving[0]] != size:
            return False
        if any(n != 1 for n in grid[last + 1 : moving[0]]):
            return False
        last = moving[0]
    return all(n == 1 for n in grid[last + 1 :])


def places(value: Value, known: dict[Value, Places | None] | None = None, depth: int = 0) -> Places | None:
    """The form of a value of i64, None where it has none or that is not seen; `known` are those met on the way."""
    known = {} if known is None else known
    if value not in known:
        known[value] = _found(value, known, depth)
    return known[value]


def _found(value: Value, known: dict[Value, Places | None], depth: int) -> Places | None:
    if value.dtype.name != "i64" or depth > DEEPEST:
        return None
    if value.kind == "const" and value.data is not None:
        return _of_constant(value.data)
    node = value.node
    if node is None:
        return None
    match node.op:
        case Iota(start=int() | Dim() as start, step=int() as step):
            return _made(start, (step,), value.shape)
        case SizeOf(size=size):
            return Places(size, ())
    found = [places(x, known, depth + 1) for x in node.inputs]
    given = [x for x in found if x is not None]
    if len(given) < len(found) or not given:
        return None
    shapes = [x.shape for x in node.inputs]
    match node.op:
        case Identity():
            return given[0]
        case Reshape() | Squeeze() | Unsqueeze():
            return _reshaped(given[0], shapes[0], value.shape)
        case Transpose(perm=perm):
            order = perm or tuple(reversed(range(value.rank)))
            return Places(given[0].constant, tuple(given[0].steps[d] for d in order))
        case Expand():
            return _made(given[0].constant, _aligned(given[0], shapes[0], value.rank), value.shape)
        case Add() | Sub() | Mul():
            a, b = (_aligned(p, s, value.rank) for p, s in zip(given, shapes, strict=True))
            return _combined(node.op, (given[0].constant, a), (given[1].constant, b), value.shape)
    return None


Form = tuple[Size, tuple[Size, ...]]


def _combined(op: object, a: Form, b: Form, shape: Shape) -> Places | None:
    if isinstance(op, Mul):
        if any(step != 0 for step in a[1]):
            a, b = b, a
        if any(step != 0 for step in a[1]):
            return None
        return _made(a[0] * b[0], tuple(a[0] * step for step in b[1]), shape)
    sign = 1 if isinstance(op, Add) else -1
    return _made(a[0] + b[0] * sign, tuple(x + y * sign for x, y in zip(a[1], b[1], strict=True)), shape)


def _made(constant: Size, steps: tuple[Size, ...], shape: Shape) -> Places:
    return Places(constant, tuple(0 if size == 1 else step for step, size in zip(steps, shape, strict=True)))


def _aligned(found: Places, shape: Shape, rank: int) -> tuple[Size, ...]:
    """The steps over the axes of a result that the shape is repeated to; along repeated ones there is none."""
    return (*(0,) * (rank - len(shape)), *found.steps)


def _reshaped(found: Places, before: Shape, after: Shape) -> Places | None:
    """Where only axes of one element come or go."""
    kept = [step for step, size in zip(found.steps, before, strict=True) if size != 1]
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    rest = iter(kept)
    return Places(found.constant, tuple(0 if size == 1 else next(rest) for size in after))


def _of_constant(data: Array) -> Places | None:
    if not 0 < data.size <= LARGEST or not -FARTHEST < data.min() <= data.max() < FARTHEST:
        return None
    first = int(data.flat[0])
    steps = []
    for axis, size in enumerate(data.shape):
        at = [0] * data.ndim
        at[axis] = min(1, size - 1)
        steps.append(int(data[tuple(at)]) - first)
    grid = np.full(data.shape, first, np.int64)
    for axis, step in enumerate(steps):
        grid += step * np.arange(data.shape[axis]).reshape([-1 if d == axis else 1 for d in range(data.ndim)])
    return Places(first, tuple(steps)) if np.array_equal(grid, data) else None
