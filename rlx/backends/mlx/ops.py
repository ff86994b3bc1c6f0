"""What mlx.core has functions for: the scalar functions, and the ops that are more than scalar code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.backends.library.arrays import Arrays, Native, table
from rlx.ir.graph import Node
from rlx.kernels.lowering import accumulator

__all__ = ["SINGLE", "functions", "native", "refusal"]

SINGLE = frozenset(("exp", "sin", "cos", "erf", "normal_cdf", "sigmoid", "tanh", "log", "pow"))  # not as precise as f64

ERF = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(8))


def functions(mx: Any) -> dict[str, Callable[..., Any]]:
    """The scalar functions of expressions."""

    def remainder(a: Any, b: Any) -> Any:
        """With the sign of a; MLX gives it that of b."""
        r = mx.remainder(a, b)
        zero = mx.zeros_like(r)
        return mx.where((r != zero) & ((a < zero) != (b < zero)), r - b, r)

    def fmod(a: Any, b: Any) -> Any:
        """With the sign of a; of numbers that are not negative MLX's own is the same."""
        r = mx.remainder(mx.abs(a), mx.abs(b))
        return mx.where((r == 0) & (a == 0), a, mx.where(a < 0, -r, r))

    def erf(x: Any) -> Any:
        """By its series near 0, where that of MLX is good to 4 digits only."""
        square, total = x * x, mx.zeros_like(x)
        for c in reversed(ERF):
            total = total * square + c
        return mx.where(mx.abs(x) < 0.5, x * total, mx.erf(x))

    def inverted(a: Any) -> Any:
        if a.dtype == mx.bool_:
            return mx.logical_not(a)
        return mx.zeros_like(a) - mx.ones_like(a) - a

    return table(
        mx,
        erf=erf,
        floordiv=lambda a, b: (a - mx.remainder(a, b)) // b,
        fmod=fmod,
        idiv=lambda a, b: (a - remainder(a, b)) // b,
        irem=remainder,
        mod=mx.remainder,
        normal_cdf=lambda x: (1 + erf(x * math.sqrt(0.5))) * 0.5,
        sigmoid=mx.sigmoid,
        sign=lambda a: mx.where(a == a, mx.sign(a), a),
        trunc=mx.trunc,
        xor=lambda a, b: (a != b) if a.dtype == mx.bool_ else a ^ b,
        **{"not": inverted},  # MLX can't export its own
    )


def refusal(node: Node) -> str | None:
    """Why an op of `native`, or one that moves elements, can't be run as it is."""
    if getattr(node.op, "mode", "constant") not in ("constant", "edge"):
        return "MLX has no such padding"
    return None


def native(mx: Any) -> dict[str, Native]:
    """Functions (library, node, check, *arrays) of ops."""

    def cumulative(fn: Callable[..., Any]) -> Native:
        def run(lib: Arrays, node: Node, check: Any, x: Any) -> Any:
            op: Any = node.op
            wide = lib.cast(x, accumulator(node.inputs[0].dtype))
            y = fn(wide, axis=op.axis, reverse=op.reverse, inclusive=not op.exclusive)
            return lib.cast(y, node.outputs[0].dtype)

        return run

    return {"cum_prod": cumulative(mx.cumprod), "cum_sum": cumulative(mx.cumsum)}
