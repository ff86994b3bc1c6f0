"""The array API standard over graph values, each function beside array-api-strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_table
import numpy as np
import pytest

import rlx
from rlx.errors import OptionError
from rlx.ops.numpy import standard

RNG = np.random.default_rng(0)
F = RNG.standard_normal((3, 4))
G = RNG.standard_normal((3, 4)).astype(np.float32)
P = np.abs(F) + 0.5
UNIT = np.tanh(F)
I = RNG.integers(-5, 6, (3, 4))
J = RNG.integers(1, 5, (3, 4)).astype(np.int32)
B = I > 0
C = F + 1j * P
SQUARE = RNG.standard_normal((2, 3, 3))

Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]


def one(name: str, *arrays: Any, **named: Any) -> Calls:
    """A call for each array."""
    return [(lambda xp, x: getattr(xp, name)(x, **named), (array,)) for array in arrays]


def two(name: str, *pairs: tuple[Any, Any], **named: Any) -> Calls:
    return [(lambda xp, x, y: getattr(xp, name)(x, y, **named), pair) for pair in pairs]


def inner(part: str, name: str, *arrays: Any, **named: Any) -> Calls:
    """A call of a function of xp.linalg or xp.fft."""
    return [(lambda xp, *x: getattr(getattr(xp, part), name)(*x, **named), arrays)]


FLOATS = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "exp",
    "expm1",
    "floor",
    "negative",
    "positive",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
]
CASES: dict[str, Calls] = {
    **{name: one(name, P, G[:1] * 0 + 1) for name in FLOATS},
    **{name: one(name, UNIT) for name in ("acos", "asin", "atan", "atanh", "asinh", "reciprocal")},
    **{name: one(name, P) for name in ("log", "log10", "log1p", "log2")},
    "acosh": one("acosh", P + 1),
    **{name: one(name, F * [1, np.inf, np.nan, 0]) for name in ("isfinite", "isinf", "isnan")},
    **{
        name: two(name, (F, P), (G, G[0]))
        for name in (
            "add",
            "subtract",
            "multiply",
            "divide",
            "maximum",
            "minimum",
            "hypot",
            "atan2",
            "logaddexp",
            "copysign",
            "equal",
            "not_equal",
            "less",
            "less_equal",
            "greater",
            "greater_equal",
        )
    },
    "pow": two("pow", (P, F), (J, J)),
    "remainder": two("remainder", (F, P), (I, J.astype(np.int64))),
    "floor_divide": two("floor_divide", (F, P), (I, J.astype(np.int64))),
    **{
        f"bitwise_{name}": two(f"bitwise_{name}", (I, I.T[:4, :3].T), *extra)
        for name, extra in (("and", [(B, ~B)]), ("or", [(B, ~B)]), ("xor", [(B, B)]))
    },
    "bitwise_left_shift": two("bitwise_left_shift", (I, J.astype(np.int64))),
    "bitwise_right_shift": two("bitwise_right_shift", (I, J.astype(np.int64))),
    "bitwise_invert": one("bitwise_invert", I, B),
    **{f"logical_{name}": two(f"logical_{name}", (B, B[::-1])) for name in ("and", "or", "xor")},
    "logical_not": one("logical_not", B),
    **{name: one(name, C) for name in ("conj", "real", "imag")},
    "round": one("round", F * 3, I),
    "clip": one("clip", F, I, min=-1, max=1),
    **{
        name: [*one(name, F, G, axis=1), *one(name, F, keepdims=True), *one(name, I, axis=0)]
        for name in ("max", "min", "prod", "sum", "argmax", "argmin", "count_nonzero")
    },
    **{name: [*one(name, F, axis=0), *one(name, F, axis=(0, 1)), *one(name, G)] for name in ("mean",)},
    **{name: [*one(name, F, axis=1, correction=1), *one(name, G)] for name in ("std", "var")},
    **{name: [*one(name, B, axis=0), *one(name, I)] for name in ("all", "any")},
    **{
        name: [*one(name, F, axis=1), *one(name, I, axis=0, include_initial=True), *one(name, F[0])]
        for name in ("cumulative_sum", "cumulative_prod")
    },
    **{
        name: [*one(name, F), *one(name, I, axis=0, descending=True), *one(name, G, axis=1, descending=True)]
        for name in ("sort", "argsort")
    },
    "diff": [*one("diff", F, axis=0), *one("diff", I, n=2)],
    "searchsorted": two("searchsorted", (np.sort(F[0]), F[1]), (np.sort(F[0]), F[0]), side="right"),
    "isin": two("isin", (I, J.astype(np.int64))),
    "where": [(lambda xp, b, x, y: xp.where(b, x, y), (B, F, P)), (lambda xp, b, x: xp.where(b, x, 0.0), (B, G))],
    "matmul": two("matmul", (F, P.T), (SQUARE, SQUARE[0]), (I, I.T), (F[0], F[1])),
    "matrix_transpose": one("matrix_transpose", SQUARE),
    "tensordot": [*two("tensordot", (F, P), axes=2), *two("tensordot", (F, P), axes=((1,), (1,)))],
    "vecdot": two("vecdot", (F, P), (C, C * 1j), (F, P[0])),
    "broadcast_arrays": [(lambda xp, x, y: xp.broadcast_arrays(x, y), (F, G[0]))],
    "broadcast_shapes": [(lambda xp, x: xp.zeros(xp.broadcast_shapes(x.shape, (5, 1, 1))), (F,))],
    "broadcast_to": one("broadcast_to", F, shape=(2, 3, 4)),
    "concat": [
        (lambda xp, x, y: xp.concat([x, y], axis=1), (F, P)),
        (lambda xp, x, y: xp.concat((x, y), axis=None), (F, P)),
    ],
    "stack": [(lambda xp, x, y: xp.stack([x, y], axis=-1), (F, P))],
    "unstack": one("unstack", F, axis=1),
    "expand_dims": one("expand_dims", F, axis=1),
    "squeeze": one("squeeze", F[:1], axis=0),
    "flip": [*one("flip", F), *one("flip", F, axis=1)],
    "moveaxis": [(lambda xp, x: xp.moveaxis(x, 0, -1), (SQUARE,))],
    "permute_dims": one("permute_dims", SQUARE, axes=(2, 0, 1)),
    "repeat": [(lambda xp, x: xp.repeat(x, 3, axis=1), (F,)), (lambda xp, x: xp.repeat(x, 2), (I,))],
    "reshape": one("reshape", F, shape=(2, -1)),
    "roll": [*one("roll", F, shift=5), *one("roll", F, shift=(1, -1), axis=(0, 1))],
    "tile": [(lambda xp, x: xp.tile(x, (2, 1, 3)), (F,))],
    "take": [(lambda xp, x, i: xp.take(x, i, axis=1), (F, np.array([3, 0, 0])))],
    "take_along_axis": [(lambda xp, x, i: xp.take_along_axis(x, i, axis=1), (F, np.array([[3, 0], [1, 1], [2, 2]])))],
    **{name: [*one(name, F, k=1), *one(name, SQUARE)] for name in ("tril", "triu")},
    "meshgrid": [(lambda xp, x, y: xp.meshgrid(x, y, indexing="ij"), (F[0], F[1]))],
    # making arrays
    "arange": [(lambda xp, x: x + xp.arange(1, 9, 2, dtype=xp.float64), (F,))],
    "asarray": [
        (lambda xp, x: xp.asarray([1.5, 2.5, 3, 4], dtype=x.dtype, device=x.device) * x, (G,)),
        (lambda xp, x: xp.asarray(x, copy=True), (G,)),
    ],
    "empty": [(lambda xp, x: xp.empty((2, 3)).shape[0] * x, (F,))],
    "empty_like": [(lambda xp, x: xp.empty_like(x).shape[1] * x, (F,))],
    "eye": [(lambda xp, x: xp.eye(3, 4, k=1, dtype=x.dtype) + x, (G,))],
    "full": [(lambda xp, x: xp.full((3, 1), 2.5) + x, (F,))],
    "full_like": one("full_like", F, I, fill_value=3),
    "linspace": [(lambda xp, x: xp.linspace(0, 1, 4, endpoint=False) + x, (F,))],
    "ones": [(lambda xp, x: xp.ones((3, 4), dtype=xp.int32, device=x.device), (F,))],
    "ones_like": one("ones_like", F, G),
    "zeros": [(lambda xp, x: xp.zeros(x.shape), (F,))],
    "zeros_like": one("zeros_like", F, I),
    "from_dlpack": [(lambda xp, x: x, (F,))],
    # types
    "astype": [
        (lambda xp, x: xp.astype(x, xp.int32), (F * 5,)),
        (lambda xp, x: xp.astype(x, xp.float32, copy=False), (I,)),
    ],
    "isdtype": [
        (
            lambda xp, x: (
                xp.ones(2)
                * [
                    xp.isdtype(x.dtype, k)
                    for k in (
                        "bool",
                        "integral",
                        "signed integer",
                        "unsigned integer",
                        "real floating",
                        "complex floating",
                        "numeric",
                    )
                ].count(True)
                + 10 * xp.isdtype(x.dtype, (xp.float32, "bool"))
            ),
            (array,),
        )
        for array in (F, G, J, B, C)
    ],
    "result_type": [(lambda xp, x, y: xp.zeros(2, dtype=xp.result_type(x, y.dtype)), pair) for pair in ((F, G), (J, I))]
    + [(lambda xp, x: xp.zeros(2, dtype=xp.result_type(x, 1.5)), (G,))],
    "can_cast": [(lambda xp, x: xp.ones(1) * int(xp.can_cast(x, xp.float32)), (array,)) for array in (F, G)]
    + [
        (lambda xp, x: xp.ones(1) * int(xp.can_cast(x.dtype, xp.int64)) + 2 * int(xp.can_cast(xp.int64, x.dtype)), (J,))
    ],
    "finfo": [(lambda xp, x: xp.finfo(x.dtype).eps + x, (F,))],
    "iinfo": [(lambda xp, x: x * 0 + xp.iinfo(x.dtype).max, (J,))],
    **{name: [(lambda xp, x, name=name: xp.asarray([1, 0], dtype=getattr(xp, name)), (F,))] for name in standard.TYPES},
    **{name: [(lambda xp, x, name=name: x * 0 + getattr(xp, name), (F,))] for name in ("e", "inf", "nan", "pi")},
    "newaxis": [(lambda xp, x: x[:, xp.newaxis, :], (F,))],
    # linalg and fft
    "linalg.cross": inner("linalg", "cross", SQUARE[0], SQUARE[1]),
    "linalg.det": inner("linalg", "det", SQUARE),
    "linalg.diagonal": [*inner("linalg", "diagonal", SQUARE, offset=1), *inner("linalg", "diagonal", F)],
    "linalg.matmul": inner("linalg", "matmul", F, P.T),
    "linalg.matrix_norm": [
        *inner("linalg", "matrix_norm", SQUARE),
        *inner("linalg", "matrix_norm", F, ord=1, keepdims=True),
        *inner("linalg", "matrix_norm", F, ord=-np.inf),
    ],
    "linalg.matrix_power": [
        (lambda xp, x: xp.linalg.matrix_power(x, 5), (SQUARE,)),
        (lambda xp, x: xp.linalg.matrix_power(x, 0), (F.T @ F,)),
    ],
    "linalg.matrix_transpose": inner("linalg", "matrix_transpose", SQUARE),
    "linalg.outer": inner("linalg", "outer", F[0], P[1]),
    "linalg.tensordot": inner("linalg", "tensordot", F, P, axes=2),
    "linalg.trace": inner("linalg", "trace", SQUARE, offset=-1),
    "linalg.vecdot": inner("linalg", "vecdot", F, P),
    "linalg.vector_norm": [
        *inner("linalg", "vector_norm", F),
        *inner("linalg", "vector_norm", SQUARE, axis=(0, 2), keepdims=True),
        *inner("linalg", "vector_norm", F, axis=1, ord=3),
        *inner("linalg", "vector_norm", G, ord=np.inf),
        *inner("linalg", "vector_norm", C, ord=1),
        *inner("linalg", "vector_norm", F, ord=0),
    ],
    **{f"fft.{name}": inner("fft", name, C) for name in ("fft", "ifft", "fftn", "ifftn", "hfft", "irfft", "irfftn")},
    **{f"fft.{name}": inner("fft", name, F) for name in ("rfft", "rfftn", "ihfft", "fftshift", "ifftshift")},
    **{
        f"fft.{name}": [(lambda xp, x, name=name: getattr(xp.fft, name)(4, d=0.5) + x[0, 0], (F,))]
        for name in ("fftfreq", "rfftfreq")
    },
}


def leaves(tree: Any) -> list[Any]:
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, list | tuple) else [tree]


@pytest.mark.parametrize("name", CASES)
def test_as_array_api_strict(name: str) -> None:
    """Values, shapes and element types are those of array-api-strict."""
    strict = pytest.importorskip("array_api_strict")
    for call, arrays in CASES[name]:
        expected = leaves(call(strict, *map(strict.asarray, arrays)))
        traced = rlx.jit(lambda *x, call=call: call(x[0].__array_namespace__(), *x), device="reference")
        found = leaves(traced(*arrays))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == np.asarray(theirs).dtype
            if "empty" not in name:
                np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-12)


def names() -> set[str]:
    """Every name that graph values have of the standard."""
    inside = {f"{part}.{n}" for part in ("linalg", "fft") for n in dir(getattr(standard.NAMESPACE, part))}
    own = {n for n in dir(standard.NAMESPACE) if not n.startswith("_")} - {"linalg", "fft"}
    return own | inside


def test_every_name_is_tried() -> None:
    assert names() == set(CASES)


def test_every_name_of_the_standard_is_there_or_said_to_be_missing() -> None:
    strict = pytest.importorskip("array_api_strict")
    theirs = {n for n in strict.__all__ if not n.startswith("_") and "strict" not in n.lower()} - {
        "Device",
        "linalg",
        "fft",
    }
    theirs |= {f"linalg.{n}" for n in strict.linalg.__all__} | {f"fft.{n}" for n in strict.fft.__all__}
    assert theirs <= names() | set(standard.MISSING)
    assert not names() & set(standard.MISSING)


def test_what_is_missing_says_why() -> None:
    def f(x: Any) -> Any:
        xp = x.__array_namespace__(api_version="2023.12")
        for name, why in (("nonzero", "rlx.non_zero"), ("unique_all", "rlx.unique"), ("frobnicate", "no 'frobnicate'")):
            with pytest.raises(AttributeError, match=why):
                getattr(xp, name)
        with pytest.raises(AttributeError, match="decompositions"):
            _ = xp.linalg.svd
        with pytest.raises(OptionError, match=r"2024\.12"):
            x.__array_namespace__(api_version="2199.12")
        with pytest.raises(OptionError, match="device"):
            xp.zeros(3, device="gpu")
        info = xp.__array_namespace_info__()
        assert info.capabilities()["boolean indexing"] is False
        assert info.default_dtypes()["real floating"] == xp.float64
        assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
        assert x.dtype == xp.float64
        return x

    rlx.jit(f, device="reference")(F)


def test_the_table_is_current() -> None:
    page = array_api_table.PAGE.read_text()
    assert array_api_table.written(page) == page, "python tools/array_api_table.py"
