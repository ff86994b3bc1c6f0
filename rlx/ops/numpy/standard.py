"""The array API standard over graph values: `x.__array_namespace__()`. (https://data-apis.org/array-api/2024.12)

Most of its functions are NumPy's own, which work on graph values. Here is what the standard has beyond them: element
types as values of graphs have them, arrays that are values from the start, and arguments that NumPy lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from rlx import ops
from rlx.boundary import bounded
from rlx.errors import CompileError, OptionError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Value
from rlx.ops.base import axis_of
from rlx.ops.numpy.creation import CREATION
from rlx.ops.numpy.elementwise import astype
from rlx.ops.numpy.linear import norm
from rlx.ops.numpy.reductions import descending, flat_of
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import value_of

np: Any = numpy  # its types are of arrays, here its functions take graph values

__all__ = ["FFT", "LINALG", "MISSING", "NAMESPACE", "VERSION", "Namespace", "namespace"]

VERSION = "2024.12"
DEVICE = "host"  # the only one there is while a function is traced; what it is compiled for is an option of rlx.jit

NAMES = [
    "abs", "acos", "acosh", "add", "all", "any", "argmax", "argmin", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "broadcast_arrays", "broadcast_shapes", "broadcast_to", "ceil", "clip", "concat", "conj", "copysign", "cos",
    "cosh", "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "divide", "equal", "exp", "expand_dims",
    "expm1", "flip", "floor", "floor_divide", "greater", "greater_equal", "hypot", "imag", "isfinite", "isin",
    "isinf", "isnan", "less", "less_equal", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "matmul", "matrix_transpose", "max", "maximum", "mean", "meshgrid",
    "min", "minimum", "moveaxis", "multiply", "negative", "not_equal", "permute_dims", "positive", "pow", "prod",
    "real", "reciprocal", "remainder", "repeat", "reshape", "roll", "round", "searchsorted", "sign", "signbit",
    "sin", "sinh", "sqrt", "square", "squeeze", "stack", "std", "subtract", "sum", "take", "take_along_axis", "tan",
    "tanh", "tensordot", "tile", "tril", "triu", "trunc", "unstack", "var", "vecdot", "where",
]  # fmt: skip
OF_LINALG = [
    "cross", "det", "diagonal", "matmul", "matrix_norm", "matrix_power", "matrix_transpose", "outer", "tensordot",
    "trace", "vecdot", "vector_norm",
]  # fmt: skip
OF_FFT = [
    "fft", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft", "irfftn", "rfft", "rfftn",
]  # fmt: skip
UNKNOWN = "the size of the result depends on the data"
DECOMPOSED = "decompositions of matrices are not there"
MISSING = {  # name -> why
    "nextafter": "not there yet",
    "nonzero": f"{UNKNOWN}: rlx.non_zero takes its count",
    **dict.fromkeys(("unique_all", "unique_counts", "unique_inverse"), f"{UNKNOWN}: rlx.unique takes its count"),
    "unique_values": f"{UNKNOWN}: rlx.unique takes its count",
    **{f"linalg.{name}": DECOMPOSED for name in (
        "cholesky", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matrix_rank", "pinv", "qr", "slogdet", "solve", "svd",
        "svdvals",
    )},
}  # fmt: skip
TYPES = {
    "bool": "bool", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float32": "f32", "float64": "f64", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
KINDS = {
    "bool": "b", "signed integer": "i", "unsigned integer": "u", "integral": "iu", "real floating": "f",
    "complex floating": "c", "numeric": "iufc",
}  # fmt: skip


class Namespace:
    """A module's worth of names; another name is an `AttributeError` that says why it is not there."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        self.__name__ = name
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        inner = f"{self.__name__}.{name}".removeprefix("xp.")
        why = f": {MISSING[inner]}" if inner in MISSING else ""
        raise AttributeError(f"the array API of graph values has no {inner!r}{why}")

    def __dir__(self) -> list[str]:
        return sorted(name for name in self.__dict__ if name != "__name__")

    def __repr__(self) -> str:
        return f"<array API {VERSION} over graph values: {self.__name__}>"


def namespace(x: Value, api_version: str | None = None) -> Namespace:
    """What `x.__array_namespace__()` gives. `OptionError` for a version of the standard later than this one."""
    if api_version is not None and api_version > VERSION:
        raise OptionError(f"array API {api_version} is asked for: graph values follow {VERSION}")
    return NAMESPACE


def _on(device: Any) -> None:
    if device not in (None, DEVICE):
        raise OptionError(f"device={device!r}: a traced value has no device yet: give rlx.jit(device={device!r})")


def _maker(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes arrays: with `device=` and, of asarray, `copy=`; the result is a graph value."""

    def make(*args: Any, device: Any = None, **kwargs: Any) -> Value:
        _on(device)
        if name in ("asarray", "from_dlpack"):
            kwargs.pop("copy", None)  # values never change, so a copy can't be told from what it was made of
        return value_of(name, function(*args, **kwargs))

    make.__name__, make.__doc__ = name, function.__doc__
    return bounded(name, CompileError)(make)


# ---- element types


def _type_of(x: Any) -> DType:
    return x.dtype if isinstance(x, Value) else dtype_of(getattr(x, "dtype", x))


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether a type is of a kind ("real floating"), is a type, or is one of several of these."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str) and kind in KINDS:
        return dtype_of(dtype).kind in KINDS[kind]
    if isinstance(kind, str) and kind not in DTYPES:
        raise OptionError(f"isdtype: kind={kind!r}: expected a type or one of {', '.join(map(repr, KINDS))}")
    return dtype_of(dtype) is dtype_of(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The type that these become together; Python numbers take that of the others where its kind holds them."""
    kinds = [x if isinstance(x, bool | int | float | complex) else _type_of(x).numpy for x in arrays_and_dtypes]
    return dtype_of(np.result_type(*kinds))


def can_cast(from_: Any, to: Any) -> bool:
    """Whether every value of a type, or of an array's, is one of another type."""
    return bool(np.can_cast(_type_of(from_).numpy, dtype_of(to).numpy))


def finfo(type: Any) -> Any:
    """The limits of a floating type: bits, eps, max, min, smallest_normal, dtype."""
    return np.finfo(_type_of(type).numpy)


def iinfo(type: Any) -> Any:
    """The limits of an integer type: bits, max, min, dtype."""
    return np.iinfo(_type_of(type).numpy)


# ---- what NumPy's functions lack


def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """x in an element type: floats to integers truncate, integers wrap."""
    _on(device)
    return astype(x, dtype)


def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """The elements along an axis in order; stable."""
    return _by_order("sort", x, axis, descending)[0]


def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """The i64 indices that sort along an axis; stable."""
    return _by_order("argsort", x, axis, descending)[1]


def _by_order(what: str, x: Any, axis: int, is_descending: bool) -> tuple[Any, Any]:
    if is_descending:
        return descending(what, x, axis)
    return np.sort(value_of(what, x), axis=axis), np.argsort(value_of(what, x), axis=axis)


def _cumulative(what: str, running: Any, neutral: int) -> Callable[..., Any]:
    def cumulative(
        x: Any, /, *, axis: int | None = None, dtype: Any = None, out: None = None, include_initial: bool = False
    ) -> Any:
        flat, at = flat_of(what, x, axis)
        if axis is None and value_of(what, x).rank > 1:
            raise OptionError(f"{what}: expected an axis= for an array of {value_of(what, x).rank} axes")
        made = running(flat, axis=at, dtype=dtype)
        if not include_initial:
            return made
        start = ops.expand(
            value_of(what, np.asarray(neutral, made.dtype.numpy)),
            shape=tuple(1 if i == at else size for i, size in enumerate(made.shape)),
        )
        return np.concatenate([start, made], axis=at)

    cumulative.__name__ = what
    cumulative.__doc__ = (
        "The running sums along an axis, or products; with `include_initial` from the neutral number on."
    )
    return cumulative


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The sums of products along an axis, of complex numbers with the first one's conjugate."""
    a, b = np.broadcast_arrays(value_of("vecdot", x1), value_of("vecdot", x2))
    made = np.conjugate(a) * b
    return np.sum(made, axis=axis) if made.dtype.kind == "c" else np.sum(made, axis=axis, dtype=made.dtype)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """The parts along an axis, whose size is known."""
    value = value_of("unstack", x)
    at = axis_of(axis, value.rank, "unstack")
    size = value.shape[at]
    if not isinstance(size, int):
        raise OptionError(f"unstack: axis {axis} has the open size {size}: how many results there are has to be known")
    return tuple(value[(slice(None),) * at + (i,)] for i in range(size))


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """The norm of the last two axes: "fro", 1, -1, inf or -inf."""
    if ord == "fro":
        return norm(x, "fro", axis=(-2, -1), keepdims=keepdims)
    if ord not in (1, -1, np.inf, -np.inf):
        raise OptionError(f"matrix_norm: ord={ord!r}: expected 'fro', 1, -1, inf or -inf: decompositions are not there")
    sums = np.sum(np.abs(value_of("matrix_norm", x)), axis=-2 if abs(ord) == 1 else -1, keepdims=True)
    return (np.max if ord > 0 else np.min)(sums, axis=(-2, -1), keepdims=keepdims)


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """The norm along an axis, or of all elements, of any order."""
    size = np.abs(value_of("vector_norm", x))
    if ord in (np.inf, -np.inf):
        return (np.max if ord > 0 else np.min)(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return astype(np.count_nonzero(size, axis=axis, keepdims=keepdims), size.dtype)
    sums = np.sum(size if ord == 1 else size * size if ord == 2 else size**ord, axis=axis, keepdims=keepdims)
    return sums if ord == 1 else np.sqrt(sums) if ord == 2 else sums ** (1 / ord)


def matrix_power(x: Any, n: int, /) -> Any:
    """The product of a matrix with itself, n times; n is 0 or more."""
    if not isinstance(n, int) or n < 0:
        raise OptionError(f"matrix_power: n={n!r}: expected an int of 0 or more: inverses are not there")
    value = value_of("matrix_power", x)
    one = value_of("matrix_power", CREATION["eye"](value.shape[-1], dtype=value.dtype))
    made = np.broadcast_to(one, value.shape)
    while n:  # by the binary digits of n
        made = np.matmul(made, value) if n & 1 else made
        n >>= 1
        value = np.matmul(value, value) if n else value
    return made


def _diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """The diagonals of the last two axes."""
    return np.diagonal(value_of("diagonal", x), offset, -2, -1)


def _trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """The sums of the diagonals of the last two axes."""
    return np.trace(value_of("trace", x), offset, -2, -1, dtype)


def _register() -> None:
    """Behind the names that NumPy has for them, from the version on that has them."""
    made = {
        "cumulative_sum": _cumulative("cumulative_sum", np.cumsum, 0),
        "cumulative_prod": _cumulative("cumulative_prod", np.cumprod, 1),
        "vecdot": vecdot, "unstack": unstack, "linalg.matrix_norm": matrix_norm, "linalg.vector_norm": vector_norm,
        "linalg.matrix_power": matrix_power, "linalg.diagonal": _diagonal, "linalg.trace": _trace,
        "linalg.vecdot": vecdot, "linalg.outer": np.outer, "linalg.cross": np.cross, "linalg.matmul": np.matmul,
        "linalg.tensordot": np.tensordot, "linalg.matrix_transpose": np.matrix_transpose,
    }  # fmt: skip
    for name, function in made.items():
        owner = np.linalg if name.startswith("linalg.") else np
        bare = name.removeprefix("linalg.")
        OURS[name] = function
        if (theirs := getattr(owner, bare, None)) is not None and theirs is not function:
            of(theirs)(function)


class Info:
    """What `__array_namespace_info__()` tells."""

    def capabilities(self) -> dict[str, Any]:
        """No result whose size the data decide, so no masks as indices; 64 axes."""
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": 64}

    def default_device(self) -> str:
        return DEVICE

    def devices(self) -> list[str]:
        return [DEVICE]

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        _on(device)
        names = {"real floating": "f64", "complex floating": "c128", "integral": "i64", "indexing": "i64"}
        return {kind: DTYPES[name] for kind, name in names.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        _on(device)
        found = {name: DTYPES[short] for name, short in TYPES.items()}
        return {name: dtype for name, dtype in found.items() if kind is None or isdtype(dtype, kind)}


OURS: dict[str, Any] = {}
_register()
_MAKERS = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")
FFT = Namespace("xp.fft", {
    **{name: getattr(np.fft, name) for name in OF_FFT},
    **{name: _maker(name, getattr(np.fft, name)) for name in ("fftfreq", "rfftfreq")},
})  # fmt: skip
LINALG = Namespace("xp.linalg", {
    name: OURS.get(f"linalg.{name}") or getattr(np.linalg, name) for name in OF_LINALG
})  # fmt: skip
NAMESPACE = Namespace("xp", {
    **{name: OURS.get(name) or getattr(np, name) for name in NAMES},
    **{name: _maker(name, CREATION[name]) for name in _MAKERS},
    **{name: _maker(name, getattr(np, name)) for name in _LIKE},
    "from_dlpack": _maker("from_dlpack", np.from_dlpack),
    **{name: DTYPES[short] for name, short in TYPES.items()},
    **{name: getattr(np, name) for name in ("e", "inf", "nan", "newaxis", "pi")},
    "astype": _astype, "sort": sort, "argsort": argsort, "isdtype": isdtype, "result_type": result_type,
    "can_cast": can_cast, "finfo": finfo, "iinfo": iinfo, "linalg": LINALG, "fft": FFT,
    "__array_namespace_info__": Info, "__array_api_version__": VERSION,
})  # fmt: skip
