"""The functions of a kernel: one for each of its stores."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from rlx.backends.cuda.text.function import Function, Text
from rlx.backends.cuda.text.loops import store_text
from rlx.backends.cuda.text.products import product_text
from rlx.kernels.lowering import Contract, Conv
from rlx.kernels.program import Kernel

__all__ = ["kernel_texts", "module_texts"]

TOGETHER = 16  # light functions of one module


def kernel_texts(kernel: Kernel, precision: str = "f32") -> list[Text]:
    """The functions that make what a kernel stores, with products of f32 in a precision."""
    anchor = kernel.anchor
    if anchor is None:
        return [store_text(store) for store in kernel.stores]
    assert isinstance(anchor, Contract | Conv)
    return [product_text(store, anchor, precision) for store in kernel.stores]


def module_texts(functions: Sequence[Function]) -> list[str]:
    """The texts that are compiled, each by itself, for some functions; sorted, so that equal ones are found again."""
    light = sorted(f.text for f in functions if not f.alone)
    groups = [light[n : n + TOGETHER] for n in range(0, len(light), TOGETHER)]
    groups += [[f.text] for f in functions if f.alone]
    prelude = files(__package__).joinpath("prelude.cuh").read_text(encoding="utf-8")
    return ["\n".join([prelude, *group]) for group in groups]
