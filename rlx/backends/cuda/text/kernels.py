"""The functions of a kernel: one for each of its stores."""

from __future__ import annotations

from importlib.resources import files

from rlx.backends.cuda.text.function import Function, Text
from rlx.backends.cuda.text.loops import store_text
from rlx.backends.cuda.text.products import product_text
from rlx.kernels.lowering import Contract, Conv
from rlx.kernels.program import Kernel

__all__ = ["kernel_texts", "module_text"]


def kernel_texts(kernel: Kernel) -> list[Text]:
    """The functions that make what a kernel stores."""
    anchor = kernel.anchor
    if anchor is None:
        return [store_text(store) for store in kernel.stores]
    assert isinstance(anchor, Contract | Conv)
    return [product_text(store, anchor) for store in kernel.stores]


def module_text(functions: list[Function]) -> str:
    """The text that is compiled for some functions."""
    prelude = files(__package__).joinpath("prelude.cuh").read_text(encoding="utf-8")
    return "\n".join([prelude, *(function.text for function in functions)])
