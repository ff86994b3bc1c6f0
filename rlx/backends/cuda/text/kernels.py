"""The functions of a kernel: one for each of its stores."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from rlx.backends.cuda.text.attention import attention_text
from rlx.backends.cuda.text.form import PLAIN, Target
from rlx.backends.cuda.text.function import Function, PartStore, Text, with_twins
from rlx.backends.cuda.text.loops import store_text
from rlx.backends.cuda.text.products import multiplied_as, parts_texts, product_text
from rlx.ir.dtype import DTYPES
from rlx.kernels.lowering import Attention, Contract
from rlx.kernels.program import Kernel

__all__ = ["kernel_texts", "module_texts"]

TOGETHER = 16  # light functions of one module


def kernel_texts(kernel: Kernel, target: Target = PLAIN) -> list[Text]:
    """The functions that make what a kernel stores."""
    anchor, stores = kernel.anchor, with_twins(kernel.stores)
    if anchor is None:
        return [store_text(store) for store in stores]
    if isinstance(anchor, Attention):
        narrow = multiplied_as(anchor, DTYPES["f32"], target.precision)
        return [attention_text(store, anchor, narrow, target) for store in stores]
    if isinstance(anchor, Contract) and any(isinstance(store, PartStore) for store in stores):
        return parts_texts(stores, anchor, target)
    return [product_text(store, anchor, target) for store in stores]


def module_texts(functions: Sequence[Function]) -> list[str]:
    """The texts that are compiled, each by itself, for some functions; sorted, so that equal ones are found again."""
    light = sorted(f.text for f in functions if not f.alone)
    groups = [light[n : n + TOGETHER] for n in range(0, len(light), TOGETHER)]
    groups += [[f.text] for f in functions if f.alone and not f.hopper]
    groups += [[_header("hopper.cuh"), f.text] for f in functions if f.alone and f.hopper]
    prelude = _header("prelude.cuh")
    return ["\n".join([prelude, *group]) for group in groups]


def _header(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
