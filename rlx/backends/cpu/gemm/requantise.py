"""Requantisation as the last step of a kernel of 8-bit products: recognised in an epilogue, done in registers.

Recognised by its structure, operation by operation and with the limits of the type; of further limits the one below is
no greater than the one above, which `raise_integer` sees to.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, ceildiv
from rlx.kernels.expr import (
    Acc,
    Apply,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Var,
    const,
    guarded,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.loops.analysis import linear_load
from rlx.kernels.lowering import out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass, replace

__all__ = ["Requantised", "found", "layout", "number", "store_finishing"]

ENDS = {"i8": (-128.0, 127.0), "u8": (0.0, 255.0)}
F32, I32, I64 = DTYPES["f32"], DTYPES["i32"], DTYPES["i64"]


@dataclass(frozen=True)
class Requantised:
    """The epilogue saturate(round(f32(sum + bias) * scale + shift) + zero), within [low, high]."""

    scale: Expr
    shift: Expr | None
    bias: Expr | None
    zero: Expr
    low: Expr | None
    high: Expr | None

    @property
    def clamped(self) -> bool:
        """Whether the limits are others than those of the type."""
        return self.low is not None or self.high is not None


def found(kernel: Kernel) -> Requantised | None:
    """What the epilogue is made of, if it is one that the product does and depends on channels only."""
    store = kernel.stores[0]
    if store.buffer.dtype.name not in ("u8", "i8"):
        return None
    q = _taken_apart(store.expr)
    if q is None:
        return None
    channel = out_vars(len(store.extents))[1]
    if not all(e is None or _of_channels(e, channel) for e in (q.scale, q.shift, q.bias)):
        return None
    return q if all(e is None or _of_channels(e, None) for e in (q.zero, q.low, q.high)) else None


def _of_channels(e: Expr, channel: Var | None) -> bool:
    """Whether `prepare` can compute it, from the channel alone."""
    names = {x for x in walk(e) if isinstance(x, Var)}
    return is_fixed(e) and names <= {channel} and not any(isinstance(x, Acc) for x in walk(e))


def _taken_apart(e: Expr) -> Requantised | None:
    low, high = None, None
    while isinstance(e, Apply) and e.fn in ("max", "min") and not e.dtype.is_float:
        value, bound = e.args if any(isinstance(x, Acc) for x in walk(e.args[0])) else e.args[::-1]
        if any(isinstance(x, Acc) for x in walk(bound)) or (low if e.fn == "max" else high) is not None:
            return None
        low, high = (bound, high) if e.fn == "max" else (low, bound)
        e = value
    if not isinstance(e, Cast) or e.dtype.name not in ("u8", "i8"):
        return None
    match e.value:
        case Apply(fn="max", args=(Apply(fn="min", args=(value, Const(value=top))), Const(value=bottom))) if (
            bottom,
            top,
        ) == ENDS[e.dtype.name]:
            zero: Expr = const(0, e.dtype)
            match value:
                case Apply(fn="add", args=(rounded, Cast(value=point))):
                    value, zero = rounded, point
                case Apply(fn="add", args=(rounded, Const(value=number))):
                    assert not isinstance(number, complex)
                    value, zero = rounded, const(int(number), e.dtype)
            return _scaled(value, zero, low, high)
    return None


def _scaled(e: Expr, zero: Expr, low: Expr | None, high: Expr | None) -> Requantised | None:
    if not (isinstance(e, Apply) and e.fn == "round"):
        return None
    e, shift = e.args[0], None
    if isinstance(e, Apply) and e.fn == "add":
        e, shift = e.args
    match e:
        case Apply(fn="mul", args=(Cast(value=total, dtype=wide), scale)) if wide is F32:
            match total:
                case Acc():
                    return Requantised(scale, shift, None, zero, low, high)
                case Apply(fn="add", args=(Acc(), bias)):
                    return Requantised(scale, shift, bias, zero, low, high)
    return None


def layout(kernel: Kernel, groups: int, outputs: Size) -> tuple[list[Kernel], Kernel]:
    """The kernel with the numbers of its requantisation in arrays padded to whole panels, after those that make them.

    `outputs` is the number of channels of a group. A kernel with another epilogue is left as it is.
    """
    q, store = found(kernel), kernel.stores[0]
    if q is None or not isinstance(outputs, int):
        plain = transform(store.expr, _not_stored)
        return [], Kernel(kernel.name, (replace(store, expr=plain),), kernel.anchor, nodes=kernel.nodes)
    panels = ceildiv(outputs, int8_panels.WIDTH)
    place: Expr = out_vars(len(store.extents))[1]
    if groups > 1 and outputs % int8_panels.WIDTH:
        place = place // outputs * (panels * int8_panels.WIDTH) + place % outputs
    made: list[Kernel] = []
    parts: dict[str, Expr] = {}
    for name, value, dtype in (
        ("scale", q.scale, F32),
        ("shift", q.shift or const(0.0, F32), F32),
        ("bias", q.bias, I32),
    ):
        if value is not None:
            array, kernel_of = _padded(kernel, name, value, groups, outputs, panels, dtype)
            parts[name] = Load(array, (place,), dtype)
            made.append(kernel_of)
    expr = _put_together(replace(q, **parts), store.buffer.dtype)
    return made, Kernel(kernel.name, (replace(store, expr=expr),), kernel.anchor, nodes=kernel.nodes)


def _not_stored(e: Expr) -> Expr | None:
    """A number that is rounded to 8 bits and read as a float again is that float."""
    match e:
        case Cast(
            value=Cast(
                value=Apply(
                    fn="max", args=(Apply(fn="min", args=(value, Const(value=top))), Const(value=bottom))
                ) as inner,
                dtype=small,
            )
        ):
            if e.dtype is F32 and inner.dtype is F32 and (bottom, top) == ENDS.get(small.name) and _is_whole(value):
                return inner
    return None


def _is_whole(e: Expr) -> bool:
    match e:
        case Apply(fn="round"):
            return True
        case Apply(fn="add", args=(a, b)):
            return _is_whole(a) and _is_whole(b)
        case Cast(value=v):
            return v.dtype.is_integer
        case Const(value=v):
            return not isinstance(v, complex) and v == int(v)
    return False


def _put_together(q: Requantised, dtype: DType) -> Expr:
    total: Expr = Acc(I32) if q.bias is None else Acc(I32) + q.bias
    assert q.shift is not None
    value = Apply("round", (Cast(total, F32) * q.scale + q.shift,), F32) + Cast(q.zero, F32)
    low, high = ENDS[dtype.name]
    value = Apply("max", (Apply("min", (value, const(high, F32)), F32), const(low, F32)), F32)
    result: Expr = Cast(value, dtype)
    if q.low is not None:
        result = Apply("max", (result, q.low), dtype)
    return result if q.high is None else Apply("min", (result, q.high), dtype)


def _padded(
    kernel: Kernel, name: str, value: Expr, groups: int, outputs: int, panels: Size, dtype: DType
) -> tuple[Buffer, Kernel]:
    """An array of a number for each channel, every group's padded to whole panels."""
    extents: Shape = (groups, panels * int8_panels.WIDTH)
    group, column = out_vars(2)
    channel = out_vars(len(kernel.stores[0].extents))[1]
    element = substitute_vars(value, {channel: group * size_expr(outputs) + column})
    inside = column < size_expr(outputs)
    element = Select(inside, guarded(element, inside), const(0, dtype))
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.{name}", "prepared", (groups * panels * int8_panels.WIDTH,), dtype)
    at = group * size_expr(extents[1]) + column
    return buffer, Kernel(name, (Store(buffer, extents, (at,), element),), nodes=kernel.nodes)


def store_finishing(emitter: Emitter, q: Requantised, top: Scope, at: str, dtype: DType) -> None:
    """Stores `int8_panels.FinishArguments`."""
    f = emitter.f
    place = int8_panels.FinishArguments.place
    for name, e in (("scale", q.scale), ("shift", q.shift), ("bias", q.bias)):
        value = "null"
        if e is not None:
            assert isinstance(e, Load)
            emitter.preload([transform(e, linear_load) or e], [])
            value = emitter.word(e.source)
        f.store(value, place(f, name, at), ty="ptr")
    least, most = (-128, 127) if dtype.name == "i8" else (0, 255)
    low = const(least, I64) if q.low is None else q.low
    high = const(most, I64) if q.high is None else q.high
    for name, end in (("zero", q.zero), ("low", low), ("high", high)):
        f.store(number(emitter, end, top), place(f, name, at), ty="i64")


def number(emitter: Emitter, e: Expr | None, top: Scope) -> str:
    """A single integer (none: 0) as an i64; a constant is a word, so that kernels that differ in it are one."""
    if e is None or isinstance(e, Const):
        words = emitter.table.words
        words.append(0 if e is None or isinstance(e.value, complex) else int(e.value))
        return emitter.f.load("i64", emitter.f.gep("%words", len(words) - 1, "i64"), align=8)
    wide = Cast(transform(e, linear_load), I64)
    emitter.preload([wide], [])
    return emitter.lanes_of(wide, top)
