"""Which strategy computes each kernel: the lists, in the order in which they are tried, and what asks them.

The lists are written down where their strategies are: in `strategies` of `kernels/matmul`, `kernels/conv` and
`kernels/attention`, and in `kernels/registry`.

A kernel is given to the first strategy of its anchor's list that does not refuse it (`computed` of `strategy.py`);
`Kernel.refused` keeps why each before it did. Where an anchor has several lists, as a product has (rounded activations,
bytes, weights that stay in place), `layout` of its `strategies` picks the list. A node that is run as a whole has one
strategy, found by its name in `kernels/registry`. Loops over elements without an anchor have no strategy: there is one
way to compute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.cpu.kernels.attention import strategies as attention
from rlx.backends.cpu.kernels.conv import strategies as conv
from rlx.backends.cpu.kernels.conv.fused_depthwise import FUSED
from rlx.backends.cpu.kernels.conv.pointwise import as_pairs, as_product
from rlx.backends.cpu.kernels.matmul import strategies as matmul
from rlx.backends.cpu.kernels.registry import SPECIALS
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.kernels.lowering import Attention, Contract, Conv
from rlx.kernels.program import Kernel

__all__ = ["STRATEGIES", "laid_out"]

STRATEGIES: Mapping[str, Sequence[CpuStrategy]] = {  # by what they compute, in the order in which they are tried
    "matrix products of bytes": (matmul.INT8,),
    "matrix products of activations rounded to 8 bits": matmul.Q8,
    "matrix products of operands rounded to bf16": matmul.BF16,
    "matrix products": matmul.MATMUL,
    "matrix products of weights that stay where they are": tuple(x for way in matmul.IN_PLACE.values() for x in way),
    "convolutions of operands rounded to bf16": conv.BF16,
    "convolutions": conv.CONV,
    "attention": attention.ATTENTION,
    "convolutions that make the image they read": (FUSED,),
    "ops with code of their own": tuple(SPECIALS.values()),
}


def laid_out(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The kernel with its strategy, after those that bring its operands into a layout."""
    if kernel.special is not None:
        return SPECIALS[kernel.special.op.op_name].layout(kernel, setting)
    match kernel.anchor:
        case Contract():
            return matmul.layout(kernel, setting)
        case Conv():
            product = as_pairs(kernel, setting.target) if kernel.anchor.activations else as_product(kernel)
            return conv.layout(kernel, setting) if product is None else matmul.layout(product, setting)
        case Attention():
            return attention.layout(kernel, setting)
    return [kernel]
