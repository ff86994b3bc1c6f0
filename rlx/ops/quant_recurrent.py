"""Recurrent layers that round what they multiply to 8 bits."""

from __future__ import annotations

import numpy as np

from rlx.ir.graph import Array
from rlx.ops.base import register
from rlx.ops.quant import DynamicQuantizeLinear
from rlx.ops.recurrent import Activation, Lstm

__all__ = ["DynamicQuantizeLstm"]


def _rounded(x: Array) -> Array:
    """x after quantisation to u8 over its whole range, and back."""
    q, scale, zero = DynamicQuantizeLinear().reference(x.astype(np.float32))
    return (q.astype(np.float32) - zero.astype(np.float32)) * scale


@register
class DynamicQuantizeLstm(Lstm):
    """An LSTM whose x, as a whole, and hidden state, at each step, are rounded to 8 bits before the products.

    The range is that of x, or of the state of a direction. Inputs (w and r dequantised), outputs and attributes are
    those of `Lstm`; all are f32. (com.microsoft DynamicQuantizeLSTM)
    """

    optional: tuple[str, ...] = ()
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False
    input_forget: bool = False

    def reference(self, x: Array, w: Array, r: Array, *given: Array) -> tuple[Array, ...]:
        return super().reference(_rounded(x), w, r, *given)

    def _step(
        self, x: Array, state: list[Array], w: Array, r: Array, bias: Array, peepholes: Array, fs: list[Activation]
    ) -> list[Array]:
        return super()._step(x, [_rounded(state[0]), state[1]], w, r, bias, peepholes, fs)
