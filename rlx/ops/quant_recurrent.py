"""Recurrent layers that round what they multiply to 8 bits."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, Value
from rlx.ops.base import register
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Cast, Mul, Sub
from rlx.ops.quant import F32, DynamicQuantizeLinear
from rlx.ops.recurrent import Lstm, rounded

__all__ = ["DynamicQuantizeLstm"]

F64 = DTYPES["f64"]


@register
class DynamicQuantizeLstm(Lstm):
    """An LSTM whose x, as a whole, and hidden state, at each step, are rounded to 8 bits before the products.

    The range is that of x, or of the state of a direction. Inputs (w and r dequantised), outputs and attributes are
    those of `Lstm`; all are f32. Products are summed in f64, since an error of a sum can move the next rounding by a
    whole quantum. (com.microsoft DynamicQuantizeLSTM)
    """

    round_state: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "lstm"

    def reference(self, x: Array, w: Array, r: Array, *given: Array) -> tuple[Array, ...]:
        return super().reference(rounded(x), w, r, *given)

    def _projected(self, x: Array, columns: Array) -> Array:
        return (x.astype(np.float64) @ columns.astype(np.float64)).astype(x.dtype)

    def _product(self, g: Graph, x: Value, columns: Value) -> Value:
        wide = [g.add(Cast(F64), v)[0] for v in (x, columns)]
        return g.add(Cast(F32), g.add(MatMul(), *wide)[0])[0]

    def decompose(self, g: Graph, x: Value, w: Value, r: Value, *given: Value) -> tuple[Value, ...]:
        q, scale, zero = g.add(DynamicQuantizeLinear(), x)
        (shifted,) = g.add(Sub(), g.add(Cast(F32), q)[0], g.add(Cast(F32), zero)[0])
        return super().decompose(g, g.add(Mul(), shifted, scale)[0], w, r, *given)
