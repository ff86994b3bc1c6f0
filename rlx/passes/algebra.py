"""Algebra on elements: identities, and chains with constants.

A rule is an identity of numbers and holds for every value of the element type, zeros of either sign, infinities and NaN
included; no limit is dropped, integers wrap. Only rounding may differ: constants are multiplied where nothing between
them can overflow or vanish, and added where their sum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from rlx.ir.casting import held
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import collect_guards
from rlx.ops.activation import Relu
from rlx.ops.elementwise import (
    Abs,
    Add,
    Binary,
    Cast,
    Ceil,
    Clip,
    Div,
    Floor,
    Identity,
    Maximum,
    Minimum,
    Mul,
    Neg,
    Not,
    Pow,
    Reciprocal,
    Round,
    Rsqrt,
    Sign,
    Sqrt,
    Sub,
    Where,
)
from rlx.ops.layout import Expand
from rlx.passes.match.patterns import MANTISSA, is_positive, made_by, uniform
from rlx.passes.rewrite import Site, rewrite_all

__all__ = ["algebra"]


Rule = Callable[[Site], Value | None]


def algebra(graph: Graph) -> Graph:
    """Applies the rules until nothing changes."""
    return rewrite_all(graph, _simplified)


def _simplified(site: Site) -> Value | None:
    """The result of the first rule that applies to the node."""
    for rule in RULES.get(type(site.op), ()):
        made = rule(site)
        if made is not None:
            return made
    return _without_expand(site) if isinstance(site.op, Binary | Pow | Where) else None


def _same(site: Site) -> Value:
    return site.inputs[0]


# ---- constants to the right


def _constant_right(site: Site) -> Value | None:
    a, b = site.inputs
    if uniform(a) is None or uniform(b) is not None:
        return None
    return site.add(site.op, b, a)


def _without_expand(site: Site) -> Value | None:
    """Broadcasting is what these ops do by themselves."""
    op: Any = site.op
    inputs = list(site.inputs)
    for i, value in enumerate(inputs):
        node = made_by(value, Expand)
        if node is None:
            continue
        trial = [*inputs[:i], node.inputs[0], *inputs[i + 1 :]]
        with collect_guards():
            types = op.infer_types([v.type for v in trial])
        if types == tuple(v.type for v in site.node.outputs):
            inputs = trial
    return site.add(op, *inputs) if tuple(inputs) != site.inputs else None


# ---- sums


def _add(site: Site) -> Value | None:
    x, c = site.inputs[0], uniform(site.inputs[1])
    if c is None:
        return None
    if c == 0:  # -0.0 + 0.0 is 0.0
        return x if not x.dtype.is_float or _is_negative(c) or is_positive(x) else None
    inner = made_by(x, Add)
    first = uniform(inner.inputs[1]) if inner else None
    if inner is None or first is None:
        return None
    if x.dtype.is_float and not (first * c > 0 and _sum_is_exact(first, c, x.dtype)):
        return None  # numbers of unlike sign may be there to round
    site.merged.append(inner)
    return site.add(Add(), inner.inputs[0], _number(site, first + c, x))


def _sum_is_exact(a: float, b: float, dtype: DType) -> bool:
    """Whether the sum is a finite number of the element type: else x + (a + b) is not x + a + b where x is near -a."""
    if not math.isfinite(a + b):
        return False
    total = float(held(a + b, dtype))
    return math.isfinite(total) and Fraction(total) == Fraction(a) + Fraction(b)


def _sub(site: Site) -> Value | None:
    x, y = site.inputs
    c = uniform(y)
    if c is not None and c == 0 and not _is_negative(c):
        return x
    if c is not None and (x.dtype.is_float or (x.dtype.kind == "i" and c > np.iinfo(x.dtype.numpy).min)):
        return site.add(Add(), x, _number(site, -c, x))
    zero = uniform(x)
    if zero == 0 and x.dtype.is_float and _is_negative(zero):  # 0.0 - 0.0 is 0.0, not -0.0
        return site.add(Neg(), y)
    return None


def _is_negative(number: Any) -> bool:
    return math.copysign(1, number) < 0


# ---- products


def _mul(site: Site) -> Value | None:
    x, c = site.inputs[0], uniform(site.inputs[1])
    if c is None:
        return None
    return x if c == 1 else _scaled_again(site, x, c)


def _div(site: Site) -> Value | None:
    x, y = site.inputs
    c = uniform(y)
    if c is not None and c == 1:
        return x
    if not x.dtype.is_float:
        return None
    if uniform(x) == 1:
        return site.add(Reciprocal(), y)
    if c is None or c == 0 or not math.isfinite(c):
        return None
    if abs(math.frexp(c)[0]) == 0.5 and _normal(1 / c, x.dtype):  # a power of two: its inverse is exact
        return site.add(Mul(), x, _number(site, 1 / c, x))
    return _scaled_again(site, x, 1 / c)


def _scaled_again(site: Site, x: Value, factor: Any) -> Value | None:
    """(x * c) * factor or (x / c) * factor as one multiplication, unless that would overflow or vanish.

    One that enlarges after one that diminishes stays, as what is between them may have vanished, and the reverse.
    """
    inner = made_by(x, Mul, Div)
    c = uniform(inner.inputs[1]) if inner else None
    if inner is None or c is None:
        return None
    if x.dtype.is_float:
        if not _normal(c, x.dtype):
            return None
        enlarges = abs(c) <= 1 if isinstance(inner.op, Div) else abs(c) >= 1
        diminishes = abs(c) >= 1 if isinstance(inner.op, Div) else abs(c) <= 1
        if not (enlarges and abs(factor) >= 1) and not (diminishes and abs(factor) <= 1):
            return None
        factor = factor / c if isinstance(inner.op, Div) else factor * c
        if not _normal(factor, x.dtype):
            return None
    elif isinstance(inner.op, Div):
        return None
    else:
        factor = factor * c
    site.merged.append(inner)
    return inner.inputs[0] if factor == 1 else site.add(Mul(), inner.inputs[0], _number(site, factor, x))


def _normal(number: float, dtype: DType) -> bool:
    """Whether the number is neither zero, denormal, infinite nor NaN in that type."""
    if dtype.name not in MANTISSA:
        return False
    reach = {"f64": 1022, "f16": 14}.get(dtype.name, 126)
    return 2.0**-reach <= abs(number) <= 2.0**reach


def _number(site: Site, number: Any, like: Value) -> Value:
    """The scalar constant; integers wrap."""
    if like.dtype.is_integer:
        bits = like.dtype.bits
        number = int(number) % (1 << bits)
        if like.dtype.kind == "i" and number >= 1 << (bits - 1):
            number -= 1 << bits
    return site.scalar(number, like)


# ---- powers and roots


def _pow(site: Site) -> Value | None:
    x, e = site.inputs[0], uniform(site.inputs[1])
    if not x.dtype.is_float and not site.inputs[1].dtype.is_integer:
        return None  # computed in f64 and cast back, which doesn't wrap
    if e == 1:
        return x
    if e == 2:
        return site.add(Mul(), x, x)
    if not x.dtype.is_float:
        return None
    if e == -1:
        return site.add(Reciprocal(), x)
    roots: dict[Any, Any] = {0.5: Sqrt(), -0.5: Rsqrt()}
    return site.add(roots[e], x) if e in roots and is_positive(x) else None  # others where x is -0 or -inf


def _reciprocal(site: Site) -> Value | None:
    inner = made_by(site.inputs[0], Sqrt)
    if inner is None:
        return None
    site.merged.append(inner)
    return site.add(Rsqrt(), inner.inputs[0])


# ---- one after the other


def _undone(site: Site, op: type[Any]) -> Value | None:
    inner = made_by(site.inputs[0], op)
    return inner.inputs[0] if inner else None


def _idempotent(site: Site) -> Value | None:
    return site.inputs[0] if made_by(site.inputs[0], type(site.op)) else None


def _cast(site: Site) -> Value | None:
    x = site.inputs[0]
    op = site.op
    assert isinstance(op, Cast)
    if x.dtype is op.to:
        return x
    inner = made_by(x, Cast)
    if inner is None or not _keeps_all(inner.inputs[0].dtype, x.dtype):
        return None
    source = inner.inputs[0]
    if source.dtype.is_integer and x.dtype.is_float and op.to.is_integer and not _keeps_all(source.dtype, op.to):
        return None  # a float out of range saturates, an integer wraps
    site.merged.append(inner)
    return source if source.dtype is op.to else site.add(op, source)


def _keeps_all(a: DType, b: DType) -> bool:
    """Whether every value of type `a` has one of type `b`."""
    if a is b or a.kind == "b":
        return True
    if a.is_float:
        return a.name in MANTISSA and b.name in MANTISSA and (b.bits > a.bits)
    if a.is_integer and b.is_integer:
        return b.bits > a.bits and (a.kind == "u" or b.kind == "i")
    return a.is_integer and b.name in MANTISSA and a.bits <= MANTISSA[b.name] and b.name != "f16"


# ---- limits


def _maximum(site: Site) -> Value | None:
    c = _limit(site.inputs[1])
    if c is None:
        return None
    if _is_zero(c) and site.inputs[0].dtype.kind in "fi":
        return site.add(Relu(), site.inputs[0])
    return site.add(Clip(c, None), site.inputs[0])


def _minimum(site: Site) -> Value | None:
    c = _limit(site.inputs[1])
    return None if c is None else site.add(Clip(None, c), site.inputs[0])


def _limit(value: Value) -> Any:
    number = uniform(value)
    return None if number is None or isinstance(number, bool) or math.isnan(number) else number


def _clip(site: Site) -> Value | None:
    """Two limits as one, where their ranges meet."""
    x = site.inputs[0]
    lo, hi = _range(site.node)
    if lo is None and hi is None:
        return x
    inner = made_by(x, Clip, Relu)
    if inner is None or any(b is not None and math.isnan(b) for b in (lo, hi, *_range(inner))):
        return _plain_clip(site, lo, hi)
    first = _range(inner)
    los = [b for b in (first[0], lo) if b is not None]
    his = [b for b in (first[1], hi) if b is not None]
    lowest, highest = max(los, default=None), min(his, default=None)
    if lowest is not None and highest is not None and lowest > highest:
        return None
    site.merged.append(inner)
    relu = lowest is not None and _is_zero(lowest) and highest is None and x.dtype.kind in "fi"
    return site.add(Relu() if relu else Clip(lowest, highest), inner.inputs[0])


def _plain_clip(site: Site, lo: Any, hi: Any) -> Value | None:
    """clip(x, 0, inf) is relu(x)."""
    if isinstance(site.op, Relu) or hi is not None or not _is_zero(lo) or site.inputs[0].dtype.kind not in "fi":
        return None
    return site.add(Relu(), site.inputs[0])


def _range(node: Node) -> tuple[Any, Any]:
    """The limits, None for one at infinity."""
    if isinstance(node.op, Clip):
        return (None if node.op.lo == -math.inf else node.op.lo), (None if node.op.hi == math.inf else node.op.hi)
    return 0, None


def _is_zero(number: Any) -> bool:
    return bool(number == 0 and not _is_negative(number))


# ---- choices


def _where(site: Site) -> Value | None:
    cond, a, b = site.inputs
    known = uniform(cond)
    if known is not None:
        chosen = a if known else b
    elif a is b:
        chosen = a
    else:
        turned = made_by(cond, Not)
        if turned is None:
            return None
        site.merged.append(turned)
        return site.add(Where(), turned.inputs[0], b, a)
    (out,) = site.node.outputs
    return chosen if chosen.type == out.type else site.add(Expand(out.shape), chosen)


RULES: dict[type[Any], tuple[Rule, ...]] = {
    Identity: (_same,),
    Add: (_constant_right, _add),
    Sub: (_sub,),
    Mul: (_constant_right, _mul),
    Div: (_div,),
    Pow: (_pow,),
    Neg: (lambda site: _undone(site, Neg),),
    Not: (lambda site: _undone(site, Not),),
    Reciprocal: (_reciprocal,),
    Cast: (_cast,),
    Maximum: (_constant_right, _maximum),
    Minimum: (_constant_right, _minimum),
    Clip: (_clip,),
    Relu: (_clip,),
    Abs: (_idempotent,),
    Floor: (_idempotent,),
    Ceil: (_idempotent,),
    Round: (_idempotent,),
    Sign: (_idempotent,),
    Where: (_where,),
}
