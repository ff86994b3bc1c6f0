"""What rules are written with: decorators that attach them to ops, and functions that many of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import TensorType, Value
from rlx.ir.shape import Shape, Size
from rlx.ops.base import Op, apply
from rlx.ops.complex import MakeComplex, part_of
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Concat, Expand, Full, Pad, Reshape, SizeOf
from rlx.ops.reduction import ReduceSum

__all__ = [
    "added",
    "cast",
    "decorator",
    "derivative",
    "formula",
    "is_real",
    "is_smooth",
    "jvp",
    "linear",
    "narrowed",
    "reshaped",
    "size_as",
    "spread",
    "summed_to",
    "transpose",
    "vjp",
    "wide",
    "without_slope",
    "zeros",
]

F = TypeVar("F", bound=Callable[..., Any])


def _attach(name: str, rule: Any, ops: Sequence[type[Op]]) -> None:
    for op in ops:
        if name in op.__dict__:
            raise OptionError(f"{op.op_name} already has a rule {name!r}")
        setattr(op, name, rule)


def decorator(name: str) -> Callable[..., Callable[[F], F]]:
    """A decorator that attaches a rule of that name to ops."""

    def attached(*ops: type[Op]) -> Callable[[F], F]:
        def decorate(rule: F) -> F:
            _attach(name, rule, ops)
            return rule

        return decorate

    attached.__name__, attached.__doc__ = name, f"Decorator: the rule `{name}` of these ops (see design.md, section 4)."
    return attached


jvp, vjp, transpose, formula = map(decorator, ("jvp", "vjp", "transpose", "formula"))


def linear(kind: str, *ops: type[Op]) -> Callable[[F], F]:
    """Decorator: the `transpose` of ops that are linear in "each" float input, or in all of them ("joint")."""

    def decorate(rule: F) -> F:
        _attach("transpose", rule, ops)
        _attach("linear", kind, ops)
        return rule

    return decorate


def without_slope(*ops: type[Op]) -> None:
    """These ops are constant wherever they have a derivative: it is zero."""
    _attach("linear", "zero", ops)


def derivative(*ops: type[Op]) -> Callable[[F], F]:
    """Decorator: `rule(op, x, y)` is the derivative of an elementwise op y = op(x)."""

    def decorate(rule: F) -> F:
        def push(op: Op, inputs: Any, outputs: Any, tangents: Any) -> Any:
            return tangents[0] * rule(op, inputs[0], outputs[0])

        _attach("jvp", push, ops)
        _attach("vjp", lambda op, x, y, ct: (ct[0] * rule(op, x[0], y[0]),), ops)
        return rule

    return decorate


# ---- values


def added(a: Value, b: Value) -> Value:
    """a + b. Of boxes in zeros that lie side by side, as slices give, the two joined: no zero is added then."""
    one, other = _box_of(a), _box_of(b)
    if one is not None and other is not None:
        for first, second in ((one, other), (other, one)):
            joined = _side_by_side(first, second)
            if joined is not None:
                return joined
    return a + b


_Box = tuple[Value, tuple[int, ...], tuple[int, ...]]


def _box_of(value: Value) -> _Box | None:
    """The value as elements with so many zeros before and after them along each axis; None if it is none."""
    op = None if value.node is None else value.node.op
    if not isinstance(op, Pad) or op.mode != "constant" or op.value != 0:
        return None
    pads = tuple(pad for pad in op.pads if isinstance(pad, int) and pad >= 0)
    x = value.node.inputs[0]  # type: ignore[union-attr]
    return (x, pads[: x.rank], pads[x.rank :]) if len(pads) == len(op.pads) else None


def _side_by_side(first: _Box, second: _Box) -> Value | None:
    (x, starts, ends), (y, *others) = first, second
    axes = [d for d in range(x.rank) if (starts[d], ends[d]) != (others[0][d], others[1][d])]
    if len(axes) != 1 or others[0][axes[0]] != starts[axes[0]] + x.shape[axes[0]]:
        return None
    (axis,) = axes
    parts = [v for one in (x, y) for v in _parts(one, axis)]
    ends = (*ends[:axis], others[1][axis], *ends[axis + 1 :])
    joined = apply(Concat(axis), *parts)
    return apply(Pad((*starts, *ends)), joined) if any((*starts, *ends)) else joined  # type: ignore[no-any-return]


def _parts(value: Value, axis: int) -> Sequence[Value]:
    node = value.node
    return node.inputs if node is not None and isinstance(node.op, Concat) and node.op.axis == axis else (value,)


def is_smooth(value: Value | TensorType) -> bool:
    """Whether values of the type have derivatives: floats of 16 bits or more, and complex numbers of such."""
    return is_real(value) or value.dtype.kind == "c"


def is_real(value: Value | TensorType) -> bool:
    """Whether they are floats of 16 bits or more, which functions may be differentiated by."""
    return value.dtype.is_float and value.dtype.bits >= 16


def zeros(type: TensorType | Value) -> Value:
    """A tensor of zeros of that shape and element type."""
    if type.dtype.kind == "c":
        part = zeros(TensorType(type.shape, part_of(type.dtype)))
        return apply(MakeComplex(), part, part)  # type: ignore[no-any-return]
    made: Value = apply(Full(type.shape, 0, type.dtype))
    return made


def cast(x: Value, to: DType) -> Value:
    """x in another element type."""
    made: Value = x if x.dtype is to else apply(Cast(to), x)
    return made


def wide(x: Value) -> Value:
    """x in the type that arithmetic on it is done in: f32 for narrower floats."""
    return cast(x, DTYPES["f32"]) if x.dtype.is_float and x.dtype.bits < 32 else x


def narrowed(y: Value, like: Value) -> Value:
    """y in the element type of `like`."""
    return cast(y, like.dtype)


def reshaped(x: Value, shape: Sequence[Size]) -> Value:
    """The same elements under another shape."""
    made: Value = x if x.shape == tuple(shape) else apply(Reshape(tuple(shape)), x)
    return made


def spread(x: Value, shape: Shape) -> Value:
    """x broadcast to the shape."""
    made: Value = x if x.shape == tuple(shape) else apply(Expand(tuple(shape)), x)
    return made


def summed_to(x: Value, shape: Shape) -> Value:
    """The sum of x over the axes along which a tensor of `shape` was broadcast to it: the transpose of broadcasting."""
    lead = x.rank - len(shape)
    axes = [d for d in range(x.rank) if d < lead or (shape[d - lead] == 1 and x.shape[d] != 1)]
    if axes:
        x = apply(ReduceSum(tuple(axes), False), x)
    return reshaped(x, shape)


def size_as(size: Size, like: Value) -> Any:
    """A size as a number to compute with beside `like`."""
    return float(size) if isinstance(size, int) else cast(apply(SizeOf(size)), like.dtype)
