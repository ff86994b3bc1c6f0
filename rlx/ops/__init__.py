"""The ops, and for each a function of the same name that adds it to a graph: `rlx.ops.softmax(x, axis=-1)`.

Names that are keywords of Python get an underscore: `and_`, `or_`, `not_`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from rlx.ir.undecided import NUMBERS
from rlx.ir.value import register_methods
from rlx.ops import (
    activation,
    bitwise,
    channel_norm,
    complex,
    contract,
    control,
    cumulative,
    dynamic,
    elementwise,
    encoded,
    experts,
    index,
    layout,
    mask,
    misc,
    ml,
    normalize,
    places,
    pool,
    pool_more,
    quant,
    random,
    recurrent,
    reduction,
    resize,
    roi,
    rotary,
    sample,
    scatter,
    select,
    signal,
    space,
    strings,
    trigonometry,
    update,
)
from rlx.ops import attention as _attention
from rlx.ops import conv as _conv
from rlx.ops import einsum as _einsum
from rlx.ops import interpolate as _interpolate
from rlx.ops.base import OPS, Op, functional, op_named, register
from rlx.ops.fourier import plan as fourier_plan
from rlx.ops.fourier import spectrum
from rlx.ops.sugar import floor_div, logical

__all__ = [
    "OPS",
    "Op",
    "activation",
    "bitwise",
    "channel_norm",
    "complex",
    "contract",
    "control",
    "cumulative",
    "dynamic",
    "elementwise",
    "encoded",
    "experts",
    "fourier_plan",
    "functional",
    "index",
    "layout",
    "mask",
    "misc",
    "ml",
    "normalize",
    "op_named",
    "places",
    "pool",
    "pool_more",
    "quant",
    "random",
    "recurrent",
    "reduction",
    "register",
    "resize",
    "roi",
    "rotary",
    "sample",
    "scatter",
    "select",
    "signal",
    "space",
    "spectrum",
    "strings",
    "trigonometry",
    "update",
]

# these modules have the name of an op: here the name means the function
attention: Callable[..., Any] = functional(_attention.Attention)
conv: Callable[..., Any] = functional(_conv.Conv)
einsum: Callable[..., Any] = functional(_einsum.Einsum)
interpolate: Callable[..., Any] = functional(_interpolate.Interpolate)


def __getattr__(name: str) -> Callable[..., Any]:
    op_name = name.removesuffix("_")
    if op_name not in OPS:
        raise AttributeError(f"rlx.ops has no op {name!r}; it has {', '.join(sorted(OPS))}")
    made = globals()[name] = functional(OPS[op_name])
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *(name + "_" if name in ("and", "not", "or") else name for name in OPS)})


def _shaped(cls: type[Op]) -> Callable[..., Any]:
    def method(x: Any, *arguments: Any) -> Any:
        whole = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], tuple | list) else arguments
        return functional(cls)(x, whole) if whole else functional(cls)(x)

    method.__doc__ = cls.__doc__
    return method


def _load_numpy() -> None:
    import_module("rlx.ops.numpy")


_SAME_NAME = (
    "add", "sub", "mul", "div", "mod", "pow", "matmul", "neg", "less", "less_equal", "greater", "greater_equal",
    "equal", "not_equal", "exp", "log", "sqrt", "tanh", "abs", "sigmoid", "relu", "softmax", "cast", "unsqueeze",
)  # fmt: skip


def _of_sizes(name: str, inputs: tuple[Any, ...]) -> Any:
    """A ufunc of sizes and numbers: exact where it is one of sizes, else a graph value."""
    from rlx.ops.numpy.types import sizes_or_values

    return sizes_or_values(name, inputs)


NUMBERS.append(_of_sizes)

# in graphs built by hand; rlx.ops.numpy has NumPy's operators and methods, among them those of traced functions
register_methods(
    {name: functional(OPS[name]) for name in _SAME_NAME}
    | {"expand": _shaped(layout.Expand), "floor_div": floor_div}
    | {name: partial(logical, name) for name in ("and", "or", "xor", "not")},
    more=_load_numpy,
)
