"""Cases of every op for the oracle: attributes, shapes, dtypes and values, over two sizes that may be symbolic.

`cases_of("softmax", 7, 33)` gives cases with sizes around 7 and 33; `cases_of("softmax", Dim("n", 1), Dim("m", 1))` the
same with symbolic sizes. Cases that an op rejects (an argmax over no elements) are left out.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.casting import NARROWED
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim, Shape, Size, bounds
from rlx.ops import contract, control, elementwise, encoded, index, layout, normalize, reduction, resize
from rlx.ops.attention import Attention
from rlx.ops.base import OPS
from rlx.ops.conv import Conv, ConvTranspose, WholeConv
from rlx.testing.cases_more import MORE
from rlx.testing.cases_signal import SIGNAL
from rlx.testing.cases_whole import WHOLE
from rlx.testing.oracle import ALL, FLOATS, INTEGERS, Batch, Case, Cases, Make, Operand, case

__all__ = ["FLOATS", "INTEGERS", "PAIRS", "cases_of", "covered", "fixed_cases", "symbolic_cases"]

# Around the widths of vectors, primes, one, none.
PAIRS = ((1, 1), (7, 9), (8, 15), (16, 17), (3, 33), (2, 100), (0, 5), (5, 0))

SYMBOLIC = {0: ((0, 5), (1, 1), (5, 0), (17, 9)), 1: ((1, 1), (7, 33), (16, 2)), 4: ((4, 4), (17, 33), (8, 5))}


def fixed_cases(name: str) -> list[Case]:
    """The cases of an op at all `PAIRS` of sizes, each once."""
    return list(dict.fromkeys(c for n, m in PAIRS for c in cases_of(name, n, m)))


def cases_of(name: str, n: Size, m: Size) -> list[Case]:
    """The cases of an op for two sizes."""
    return [c for c in _maker(name)(name, n, m) if _accepted(c)]


def symbolic_cases(name: str) -> list[tuple[list[Case], list[dict[str, int]]]]:
    """The cases of an op over dims "n" and "m" with the extents to run them at, by the least size that they take.

    A case is in the first list whose least size asks for no guard, so that one graph of all runs at all its extents.
    """
    made: list[tuple[list[Case], list[dict[str, int]]]] = []
    done: set[str] = set()
    for least, extents in SYMBOLIC.items():
        n, m = Dim("n", least, 64), Dim("m", least, 64)
        cases = []
        for c in cases_of(name, n, m):
            if c.leaf == "input" and str(c) not in done and not Batch([c]).graph.guards:
                cases.append(c)
                done.add(str(c))
        if cases:
            both = case(elementwise.Identity(), Operand((n, m)))  # an input to read the dims off
            made.append(([both, *cases], [{"n": a, "m": b} for a, b in extents]))
    return made


def covered(name: str) -> bool:
    """Whether there are cases for the op: all but control flow, ops of text, and ops registered outside of rlx."""
    module = OPS[name].__module__
    return not issubclass(OPS[name], control.Control) and module.startswith("rlx.ops") and module != "rlx.ops.strings"


def _accepted(c: Case) -> bool:
    try:
        c.op.infer_types([TensorType(o.shape, DTYPES[o.dtype]) for o in c.operands])
    except (ShapeError, DTypeError, OptionError):
        return False
    return True


def _maker(name: str) -> Make:
    cls = OPS[name]
    made = _MAKERS.get(name) or MORE.get(name) or SIGNAL.get(name) or WHOLE.get(name)
    if made is not None:
        return made
    if issubclass(cls, elementwise.Unary | elementwise.Test):
        return _unary
    if issubclass(cls, elementwise.Binary):
        return _binary
    return _reduction if issubclass(cls, reduction.Reduction) else _none


def _none(name: str, n: Size, m: Size) -> Cases:
    yield from ()


def _shapes(n: Size, m: Size) -> tuple[Shape, ...]:
    return ((), (n,), (n, m), (m, n, 2))


# ---- elementwise

_ATTRIBUTES: dict[str, tuple[dict[str, Any], ...]] = {
    "clip": ({"lo": -1, "hi": 2}, {"lo": 0}, {"hi": 3}, {"lo": -0.5, "hi": 0.25}),
    "leaky_relu": ({"alpha": 0.1},),
    "thresholded_relu": ({"alpha": 0.5},),
    "hard_sigmoid": ({"alpha": 0.3, "beta": 0.4},),
    "celu": ({"alpha": 0.7},),
    "gelu": ({}, {"approximate": "tanh"}),
    "mod": ({}, {"fmod": True}),
    "is_inf": ({}, {"detect_negative": False}, {"detect_positive": False}),
}
_POSITIVE = ("log", "sqrt", "rsqrt", "acosh")  # negative arguments give NaN: the "any" cases have those


def _unary(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    for attributes in _ATTRIBUTES.get(name, ({},)):
        op = cls(**attributes)
        for dtype in ALL:
            for shape in _shapes(n, m) if dtype == "f32" else ((n, m),):
                yield case(op, Operand(shape, dtype, "positive" if name in _POSITIVE else "normal"))
            yield case(op, Operand((m,), dtype, "any"))
        yield case(op, Operand((n, m)), turned=True)
        yield case(op, Operand((n, 3)), leaf="param")


def _binary(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    divides = name in ("div", "mod")
    for attributes in _ATTRIBUTES.get(name, ({},)):
        op = cls(**attributes)
        for dtype in ALL:
            left = "normal" if dtype in FLOATS or divides else "ties"
            right = "nonzero" if divides else left
            pairs: tuple[tuple[Shape, Shape], ...] = (((n, m), (n, m)), ((n, m), (m,)))
            if dtype == "f32":
                pairs += (((), ()), ((n,), ()), ((n, 1), (1, m)), ((1, n, 1), (m, 1, 3)), ((n, m), (n, 1)))
            for a, b in pairs:
                yield case(op, Operand(a, dtype, left), Operand(b, dtype, right))
            special = "nonzero" if divides and dtype not in FLOATS else "any"
            yield case(op, Operand((n, m), dtype, "any"), Operand((n, m), dtype, special))
        yield case(op, Operand((n, m)), Operand((n, m), "f32", "nonzero"), turned=True)
        yield case(op, Operand((n, m)), Operand((m,), "f32", "nonzero"), leaf="param")


def _pow(name: str, n: Size, m: Size) -> Cases:
    op = elementwise.Pow()
    for dtype in FLOATS:
        yield case(op, Operand((n, m), dtype, "positive"), Operand((m,), dtype))
        yield case(op, Operand((n, m), dtype), Operand((n, m), "i64", "ties"))
    for dtype in INTEGERS:
        yield case(op, Operand((n, m), dtype, "any"), Operand((n, m), dtype, "whole"))
        yield case(op, Operand((n, m), dtype, "ties"), Operand((m,), dtype, "ties"))
    yield case(op, Operand((n, m), "i32", "whole"), Operand((m,), "f32", "unit"))
    yield case(op, Operand((n, m), "f32", "any"), Operand((n, m), "f32", "ties"))
    yield case(op, Operand((n, m), "f32", "any"), Operand((n, m), "f32", "any"))


def _cast(name: str, n: Size, m: Size) -> Cases:
    for source in ALL:
        for target in ALL:
            yield case(elementwise.Cast(DTYPES[target]), Operand((m,), source, "any"))
            yield case(
                elementwise.Cast(DTYPES[target]), Operand((n, 3), source, "normal" if target in FLOATS else "whole")
            )
    for target in ("i8", "i16", "i32", "i64"):
        yield case(elementwise.Cast(DTYPES[target]), Operand((n, m), "f32", "normal"), turned=True)
    yield case(elementwise.Cast(DTYPES["bool"]), Operand((n, m), "f32", "any"))


def _where(name: str, n: Size, m: Size) -> Cases:
    op = elementwise.Where()
    for dtype in ALL:
        yield case(op, Operand((n, m), "bool"), Operand((n, m), dtype, "any"), Operand((n, m), dtype, "any"))
    yield case(op, Operand((n, 1), "bool"), Operand((m,)), Operand(()))
    yield case(op, Operand((), "bool"), Operand((n, m)), Operand((n, 1)))
    yield case(op, Operand((n, m), "bool"), Operand((n, m)), Operand((n, m)), turned=True)
    yield case(op, Operand((m,), "bool"), Operand((n, 1)), Operand((2, 1, m)), leaf="param")


def _prelu(name: str, n: Size, m: Size) -> Cases:
    op = OPS[name]()
    for dtype in (*FLOATS, "i32", "i64"):
        yield case(op, Operand((n, m), dtype), Operand((m,), dtype))
    yield case(op, Operand((n, m)), Operand((n, 1)))
    yield case(op, Operand((n, m)), Operand(()), turned=True)


# ---- layout


def _identity(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(OPS[name](), Operand((n, m), dtype, "any"))
    yield case(OPS[name](), Operand(()))
    yield case(OPS[name](), Operand((n, m)), turned=True)


def _reshape(name: str, n: Size, m: Size) -> Cases:
    x = Operand((n, m, 6))
    shapes: list[Shape] = [(n * m * 6,), (n * m, 6), (n, m * 6), (n, m, 2, 3), (n, 6, m), (6, m, n), (1, n, m, 6, 1)]
    for shape in shapes:
        yield case(layout.Reshape(shape), x)
        yield case(layout.Reshape(shape), x, turned=True)
    for dtype in ("bool", "f16", "i64"):
        yield case(layout.Reshape((m, 6, n)), Operand((n, m, 6), dtype), turned=True)
    yield case(layout.Reshape((1,)), Operand(()))
    yield case(layout.Reshape(()), Operand((1, 1)))
    yield case(layout.Reshape((3, 2, n)), Operand((6, n)), leaf="param")


def _squeeze(name: str, n: Size, m: Size) -> Cases:
    for turned in (False, True):
        yield case(layout.Squeeze((1, -1)), Operand((n, 1, m, 1)), turned=turned)
    if isinstance(m, int):
        yield case(layout.Squeeze(), Operand((1, m, 1)))
    yield case(layout.Squeeze(), Operand((1,), "bool"))


def _unsqueeze(name: str, n: Size, m: Size) -> Cases:
    for turned in (False, True):
        yield case(layout.Unsqueeze((0, 2, -1)), Operand((n, m)), turned=turned)
    yield case(layout.Unsqueeze((0,)), Operand((), "i16"))


def _transpose(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(layout.Transpose(), Operand((n, m), dtype, "any"))
    for perm in ((0, 2, 1), (2, 0, 1), (1, 0, 2), (2, 1, 0), (0, 1, 2)):
        yield case(layout.Transpose(perm), Operand((n, m, 5)))
        yield case(layout.Transpose(perm), Operand((n, m, 5)), turned=True)
    yield case(layout.Transpose(), Operand(()))


def _slice(name: str, n: Size, m: Size) -> Cases:
    x = Operand((n, m))
    for starts, sizes, steps in (
        ((0, 0), (n, m), (1, 1)),
        ((1, 0), (n - 1, m), (1, 1)),
        ((0, 1), (n, m - 1), (1, 1)),
        ((n - 1, m - 1), (n, m), (-1, -1)),
        ((0, m - 1), (n, (m + 1) // 2), (1, -2)),
        ((0, 0), ((n + 1) // 2, (m + 2) // 3), (2, 3)),
        ((0, 0), (0, m), (1, 1)),
        ((n // 2, 0), (n - n // 2, m), (1, 1)),
    ):
        op = layout.Slice(starts, sizes, steps)
        yield case(op, x)
        yield case(op, x, turned=True)
        yield case(op, Operand((n, m), "bool"))
    yield case(layout.Slice((), (), ()), Operand(()))
    yield case(layout.Slice((n - 1,), (n,), (-1,)), Operand((n,), "f16"), leaf="param")


def _pad(name: str, n: Size, m: Size) -> Cases:
    for mode in layout.PAD_MODES:
        for pads in ((0, 2, 0, 0), (1, 0, 2, 3), (-1, 1, 0, -1), (0, 0, 0, 0), (0, 4, 0, 7)):
            yield case(layout.Pad(pads, 1.5, mode), Operand((n, m)))
        yield case(layout.Pad((1, 1, 1, 1), 0, mode), Operand((n, m)), turned=True)
        for dtype in ("i8", "bool", "f16", "u64"):
            yield case(layout.Pad((1, 1, 0, 2), 1, mode), Operand((n, m), dtype))
    yield case(layout.Pad((0, 1, 0, 0, 1, 2), float("-inf")), Operand((2, n, m)), leaf="param")
    yield case(layout.Pad(()), Operand(()))


def _concat(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f16", "i8", "bool", "i64"):
        yield case(layout.Concat(0), Operand((n, m), dtype), Operand((3, m), dtype))
        yield case(layout.Concat(-1), Operand((n, m), dtype), Operand((n, 0), dtype), Operand((n, 5), dtype))
    for turned in (False, True):
        yield case(layout.Concat(1), Operand((2, n, m)), Operand((2, m, m)), Operand((2, 1, m)), turned=turned)
    yield case(layout.Concat(0), Operand((n,)))
    yield case(layout.Concat(0), Operand((0, m)), Operand((0, m)))
    yield case(layout.Concat(0), Operand((2, 3)), Operand((n, 3)), leaf="param")


def _split(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "bool", "i16"):
        yield case(layout.Split(0, (1, n, 0)), Operand((n + 1, m), dtype))
        yield case(layout.Split(-1, (m, 2)), Operand((n, m + 2), dtype))
    yield case(layout.Split(1, (n, m)), Operand((2, n + m, 3)), turned=True)
    yield case(layout.Split(0, (1, 2)), Operand((3, n)), leaf="param")


def _expand(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "bool", "f16"):
        yield case(layout.Expand((n, m)), Operand((m,), dtype))
        yield case(layout.Expand((2, n, m)), Operand((n, 1), dtype))
    yield case(layout.Expand((n, m)), Operand(()))
    yield case(layout.Expand((n, 1)), Operand((n, m)), turned=True)
    yield case(layout.Expand((n, 3)), Operand((3,)), leaf="param")


def _tile(name: str, n: Size, m: Size) -> Cases:
    for repeats in ((1, 1), (2, 1), (1, 3), (2, 2), (0, 1)):
        yield case(layout.Tile(repeats), Operand((n, m)))
        yield case(layout.Tile(repeats), Operand((n, m), "i8"), turned=True)
    yield case(layout.Tile((n,)), Operand((m,)))
    yield case(layout.Tile(()), Operand(()))


def _full(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(layout.Full((n, m), 1, DTYPES[dtype]))
    for value in (-0.0, 2.5, float("inf"), float("nan")):
        yield case(layout.Full((m,), value))
    yield case(layout.Full(()))


def _iota(name: str, n: Size, m: Size) -> Cases:
    for dtype in (*FLOATS, *INTEGERS):
        yield case(layout.Iota(n, 1, 2, DTYPES[dtype]))
    yield case(layout.Iota(m, 0.5, -0.25, DTYPES["f32"]))
    yield case(layout.Iota(m, n, -3))


def _size_of(name: str, n: Size, m: Size) -> Cases:
    yield case(layout.SizeOf(n * m + 1))
    yield case(layout.SizeOf(n - m))


# ---- data-dependent indices


def _gather(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("i32", "i64", "u32", "u64"):
        yield case(index.Gather(0), Operand((n, m)), Operand((5,), dtype, "index", n))
        yield case(index.Gather(-1), Operand((n, m)), Operand((3, n), dtype, "index", m))
    for element in ALL:
        yield case(index.Gather(1), Operand((2, n, m), element), Operand((17,), "i64", "index", n))
    yield case(index.Gather(0), Operand((n, m)), Operand((), "i64", "index", n))
    yield case(index.Gather(0), Operand((n,)), Operand((m, 2), "i64", "index", n))
    yield case(index.Gather(0), Operand((n, m)), Operand((2, n), "i64", "index", n), turned=True)
    yield case(index.Gather(0), Operand((n, 3)), Operand((0,), "i64", "index", n))
    yield case(index.Gather(0), Operand((n, 3)), Operand((4,), "i64", "index", n), leaf="param")


def _gather_nd(name: str, n: Size, m: Size) -> Cases:
    both = min(n, m) if isinstance(n, int) and isinstance(m, int) else 1
    yield case(index.GatherND(), Operand((n, m)), Operand((5, 1), "i64", "index", n))
    yield case(index.GatherND(), Operand((n, m)), Operand((m, 2), "i64", "index", both))
    yield case(index.GatherND(), Operand((n, m, 3)), Operand((2, 4, 2), "i32", "index", both))
    yield case(index.GatherND(1), Operand((n, m, 3)), Operand((n, 7, 1), "i64", "index", m))
    yield case(index.GatherND(1), Operand((n, m), "f16"), Operand((n, 1), "i64", "index", m))
    yield case(index.GatherND(), Operand((n, m), "bool"), Operand((2,), "i64", "index", both))


def _gather_elements(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(index.GatherElements(0), Operand((n, m), dtype), Operand((4, m), "i64", "index", n))
    yield case(index.GatherElements(-1), Operand((n, m)), Operand((n, 19), "i32", "index", m))
    yield case(index.GatherElements(1), Operand((n, m)), Operand((n, 3), "u32", "index", m), turned=True)


# ---- reductions and normalisations


def _reduction(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    for dtype in (*FLOATS, *INTEGERS):
        kind = _summand(name, dtype)
        for axis in (-1, 0):
            yield case(cls((axis,)), Operand((n, m), dtype, kind))
        if name != "reduce_log_sum":
            yield case(cls((-1,)), Operand((3, m), dtype, "any" if name in ("reduce_max", "reduce_min") else kind))
    kind = _summand(name, "f32")
    for keepdims in (True, False):
        for axes in (None, (), (1,), (0, 2), (0, 1), (1, 2), (0, 1, 2)):
            yield case(cls(axes, keepdims), Operand((n, m, 3), "f32", kind))
        yield case(cls(None, keepdims), Operand(()))
    for axis in (-1, 0):
        yield case(cls((axis,)), Operand((n, m), "f32", kind), turned=True)
    yield case(cls((1,)), Operand((n, 37, 2), "f32", kind), leaf="param")


def _summand(name: str, dtype: str) -> str:
    """Values whose reduction is well conditioned in the type."""
    if name == "reduce_prod":
        return "ties" if dtype in INTEGERS else "whole" if dtype == "f64" else "unit"
    return "positive" if name == "reduce_log_sum" else "normal" if dtype in FLOATS else "any"


def _arg(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    for dtype in (*FLOATS, *INTEGERS):
        for last in (False, True):
            yield case(cls(-1, True, last), Operand((n, m), dtype, "ties"))
            yield case(cls(0, False, last), Operand((n, m), dtype, "any"))
            yield case(cls(-1, False, last), Operand((n, m), dtype, "any"))
    yield case(cls(1), Operand((n, m, 3), "f32", "ties"), turned=True)
    yield case(cls(0, False), Operand((m,), "f32", "any"))


def _softmax(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    for dtype in FLOATS:
        for axis in (-1, 0):
            yield case(cls(axis), Operand((n, m), dtype))
    for axis in (0, 1, 2):
        yield case(cls(axis), Operand((n, m, 3)))
        yield case(cls(axis), Operand((n, 5, m)), turned=True)
    yield case(cls(0), Operand((m,)))
    yield case(cls(), Operand((3, m), "f32", "any"))
    yield case(cls(), Operand((n, 5)), leaf="param")


def _layer_norm(name: str, n: Size, m: Size) -> Cases:
    biased = name == "layer_norm"
    cls: Any = OPS[name]

    def scales(*operands: Operand) -> tuple[Operand, ...]:
        return operands if biased else operands[:1]

    for dtype in FLOATS:
        yield case(cls(-1, 0.1), Operand((n, m), dtype), *scales(Operand((m,), dtype), Operand((m,), dtype)))
    yield case(cls(1, 0.1), Operand((n, m, 3)), *scales(Operand((m, 3)), Operand((3,))))
    yield case(cls(0, 0.1), Operand((n, m)), *scales(Operand((n, 1)), Operand((m,))))
    yield case(cls(-1, 0.1), Operand((n, m)), Operand((m,)))
    yield case(cls(-1, 0.1), Operand((n, m)), *scales(Operand((m,)), Operand((1,))), turned=True)


def _batch_norm(name: str, n: Size, m: Size) -> Cases:
    op = normalize.BatchNorm()
    for dtype in FLOATS:
        four = tuple(Operand((m,), dtype, "positive") for _ in range(4))
        yield case(op, Operand((2, m, n), dtype), *four)
    yield case(op, Operand((n, m)), *(Operand((m,), "f32", "positive") for _ in range(4)))
    yield case(op, Operand((n, m, 3, 2), "f16"), *(Operand((m,), "f32", "positive") for _ in range(4)), turned=True)


# ---- windows


def _pool(name: str, n: Size, m: Size) -> Cases:
    cls: Any = OPS[name]
    extra = ({"with_indices": True},) if name == "max_pool" else ({"count_include_pad": True},)
    dtypes = (*FLOATS, *INTEGERS) if name == "max_pool" else FLOATS
    for more in ({}, *extra):
        for dtype in dtypes:
            yield case(cls((3,), **more), Operand((2, n, m), dtype, "any" if name == "max_pool" else "normal"))
        for ceil in (False, True):
            windows: tuple[dict[str, Any], ...] = (
                {"kernel": (3, 2), "strides": (2, 1), "pads": (1, 0, 1, 1)},
                {"kernel": (2, 3), "strides": (3, 2)},
                {"kernel": (2, 2), "dilations": (2, 3), "pads": (1, 2, 2, 0)},
                {"kernel": (1, 1)},
            )
            for window in windows:
                yield case(cls(**window, **more, ceil_mode=ceil), Operand((1, 3, n, m)))
        yield case(cls((2, 2), (2, 2), **more), Operand((2, 2, n, m)), turned=True)
        yield case(cls((2, 3, 2), pads=(0, 1, 0, 1, 0, 1), **more), Operand((1, 2, 3, n, m)))


def _global_pool(name: str, n: Size, m: Size) -> Cases:
    op = OPS[name]()
    for dtype in FLOATS:
        yield case(op, Operand((2, n, m), dtype, "any" if name == "global_max_pool" else "normal"))
    yield case(op, Operand((2, n, m, 3)))
    yield case(op, Operand((n, 3, 2, m)), turned=True)


def _conv(name: str, n: Size, m: Size) -> Cases:
    for dtype in (*FLOATS, "i32"):
        yield case(Conv(), Operand((2, 3, n), dtype), Operand((4, 3, 3), dtype), Operand((4,), dtype))
        yield case(Conv(pads=(1, 1, 1, 1)), Operand((1, 3, n, m), dtype), Operand((5, 3, 3, 3), dtype))
    for groups, channels, out in ((1, 4, 17), (2, 4, 6), (4, 4, 4), (8, 8, 16)):
        x, w = Operand((1, channels, n, m)), Operand((out, channels // groups, 3, 2))
        yield case(Conv(groups=groups), x, w)
        yield case(Conv((2, 1), (1, 2), (1, 0, 2, 1), groups), x, w, Operand((out,)))
    yield case(Conv(), Operand((2, 7, n, m)), Operand((9, 7, 1, 1)))
    yield case(Conv(), Operand((2, 3, n, m)), Operand((4, 3, 2, 2)), turned=True)
    yield case(Conv(pads=(1,) * 6), Operand((1, 2, 3, n, m)), Operand((3, 2, 3, 3, 3)))
    for activations in NARROWED:
        yield case(Conv(pads=(1, 1, 1, 1), activations=activations), Operand((1, 8, n, m)), Operand((24, 8, 3, 3)))


def _conv_transpose(name: str, n: Size, m: Size) -> Cases:
    n, m = n + 1, m + 1
    for dtype in ("f32", "f64", "i32"):
        yield case(ConvTranspose(), Operand((2, 3, n), dtype), Operand((3, 4, 3), dtype), Operand((4,), dtype))
    yield case(ConvTranspose((2, 2)), Operand((1, 4, n, m)), Operand((4, 3, 2, 2)))
    yield case(ConvTranspose((2, 3), (2, 1), (1, 0, 1, 1), (1, 1), 2), Operand((1, 4, n, m)), Operand((4, 3, 3, 2)))


def _whole_conv(name: str, n: Size, m: Size) -> Cases:
    whole = Operand((32, 32, 3, 3), "f32", "whole")  # as large as those that a transform would take
    yield case(WholeConv(pads=(1, 1, 1, 1)), Operand((1, 32, n, m), "f32", "whole"), whole)
    yield case(WholeConv(strides=(2,)), Operand((2, 3, n), "f32", "whole"), Operand((4, 3, 1), "f32", "whole"))
    yield case(WholeConv(groups=4), Operand((1, 4, n, m), "f32", "whole"), Operand((8, 1, 1, 1), "f32", "whole"))


def _widening_matmul(name: str, n: Size, m: Size) -> Cases:
    def pair(a: tuple[Size, ...], b: tuple[Size, ...]) -> Case:
        return case(OPS[name](), Operand(a, "i16", "any"), Operand(b, "i16", "any"))

    for depth in (1, 2, 7, 16, 385):
        yield pair((n, depth), (depth, m))
        yield pair((m, depth), (depth, 35))
        yield case(OPS[name](), Operand((n, depth), "i16", "any"), Operand((depth, m), "i8", "any"))
    yield pair((n, m), (m, 17))
    yield pair((2, n, m), (m, 5))
    yield pair((2, 1, n, 6), (3, 6, m))
    yield pair((m,), (m, n))
    yield pair((n, m), (m,))


def _matmul(name: str, n: Size, m: Size) -> Cases:
    op = contract.MatMul()
    for dtype in (*FLOATS, "i32", "i8", "u64"):
        yield case(op, Operand((n, m), dtype), Operand((m, 5), dtype))
    vectors, thin = (((m,), (m,)), ((n, m), (m,)), ((m,), (m, n))), (((n, 1), (1, m)), ((1, m), (m, 33)))
    for a, b in (*vectors, *thin, ((2, n, m), (2, m, 17)), ((3, 1, n, m), (2, m, 16)), ((2, n, m), (m, n))):
        for turned in (False, True):
            yield case(op, Operand(a), Operand(b), turned=turned)
    yield case(op, Operand((n, 40)), Operand((40, 24)), leaf="param")
    for a, b in (((n, 1), (1, m)), ((n, 33), (33, m)), ((2, n, 64), (64, 5)), ((2, n, m), (m, 7))):
        yield case(contract.MatMul("q8"), Operand(a), Operand(b), leaf="param")
        for activations in NARROWED:
            yield case(contract.MatMul(activations), Operand(a), Operand(b), turned=activations == "f16")


def _gemm(name: str, n: Size, m: Size) -> Cases:
    for trans_a, trans_b in ((False, False), (True, False), (False, True), (True, True)):
        a, b = Operand((m, n) if trans_a else (n, m)), Operand((7, m) if trans_b else (m, 7))
        for activations in ("", "q8", "bf16"):
            op = contract.Gemm(0.5, 2.0, trans_a, trans_b, activations)
            yield case(op, a, b, Operand((7,)))
        yield case(op, a, b)
    yield case(contract.Gemm(2, 3), Operand((n, m), "i32"), Operand((m, 4), "i32"), Operand((n, 1), "i32"))
    yield case(contract.Gemm(), Operand((n, m), "f16"), Operand((m, 4), "f16"), Operand((n, 4), "f16"))


def _attention(name: str, n: Size, m: Size) -> Cases:
    def three(dtype: str, heads: int, own: int, depth: int) -> tuple[Operand, Operand, Operand]:
        q, key = Operand((2, heads, n, depth), dtype), Operand((2, own, m, depth), dtype)
        return q, key, Operand((2, own, m, 5), dtype)

    for dtype in FLOATS:
        yield case(Attention(), *three(dtype, 2, 2, 8))
    for empty in ("nan", "zero"):
        yield case(Attention(None, True, empty), *three("f32", 4, 2, 16))
        yield case(Attention(0.3, False, empty), *three("f32", 2, 1, 7), Operand((n, m)))
    yield case(Attention(), *three("f32", 2, 2, 8), Operand((2, 1, 1, m), "f64"))
    seen, number, bias = Operand((2, 1, 1, m), "bool"), Operand((1, 1)), Operand((n, m))
    for empty in ("nan", "mended"):
        for dtype in ("f32", "f16"):
            yield case(Attention(0.3, False, empty, steps=("where",)), *three(dtype, 2, 2, 8), seen, number)
        op = Attention(0.3, False, empty, steps=("mul", "where", "add"))
        yield case(op, *three("f32", 4, 2, 8), Operand((4, 1, 1)), Operand((n, m), "bool"), number, bias)
    most = min(bounds(m)[0] or 0, 3)
    for count in (Operand((), "i64", data=(most,)), Operand((2,), "i32", data=(most, 0))):
        yield case(Attention(counted=True), *three("f32", 2, 2, 8), count)
        yield case(Attention(None, True, "zero", True), *three("f32", 4, 2, 8), Operand((n, m)), count)
        op = Attention(None, False, "mended", True, ("where", "add"))
        yield case(op, *three("f32", 4, 2, 8), seen, number, bias, count)


def _resize(name: str, n: Size, m: Size) -> Cases:
    for coordinate in resize.COORDINATES:
        for rounding in resize.ROUNDINGS:
            for sizes in ((2 * n, 3 * m), (n, (m + 1) // 2)):
                yield case(resize.ResizeNearest(sizes, (), coordinate, rounding), Operand((n, m)))
    op = resize.ResizeNearest((2, 2 * n, 2 * m), (1.0, 2.0, 2.0), "asymmetric", "floor")
    for dtype in ("f16", "u8", "f32"):
        yield case(op, Operand((2, n, m), dtype))
    yield case(op, Operand((2, n, m)), turned=True)


def _dequantize(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("i8", "u8", "i32"):
        data = Operand((n, m), dtype)
        yield case(encoded.Dequantize(), data, Operand(()), Operand((), dtype))
        yield case(encoded.Dequantize(1), data, Operand((m,)), Operand((m,), dtype))
        yield case(encoded.Dequantize(0), data, Operand((n,)))
    blocks = (n, (m + 3) // 4)
    yield case(encoded.Dequantize(1, 4), Operand((n, m), "i8"), Operand(blocks), Operand(blocks, "i8"))
    yield case(encoded.Dequantize(None, 0, DTYPES["f16"]), Operand((n, m), "u8"), Operand((1,), "f16"), turned=True)


_MAKERS: dict[str, Make] = {
    **dict.fromkeys(("arg_max", "arg_min"), _arg),
    "attention": _attention,
    "average_pool": _pool,
    "batch_norm": _batch_norm,
    "cast": _cast,
    "concat": _concat,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "dequantize": _dequantize,
    "expand": _expand,
    "full": _full,
    "gather": _gather,
    "gather_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "gemm": _gemm,
    **dict.fromkeys(("global_average_pool", "global_max_pool"), _global_pool),
    **dict.fromkeys(("identity", "stop_gradient", "again"), _identity),
    "within": lambda name, n, m: iter([case(OPS[name](1 << 30), Operand((n, m)))]),  # type: ignore[call-arg]
    "iota": _iota,
    "layer_norm": _layer_norm,
    "log_softmax": _softmax,
    "matmul": _matmul,
    "whole_conv": _whole_conv,
    "widening_matmul": _widening_matmul,
    "max_pool": _pool,
    "pad": _pad,
    "pow": _pow,
    "prelu": _prelu,
    "reshape": _reshape,
    "resize_nearest": _resize,
    "rms_norm": _layer_norm,
    "size_of": _size_of,
    "slice": _slice,
    "softmax": _softmax,
    "split": _split,
    "squeeze": _squeeze,
    "tile": _tile,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "where": _where,
}
