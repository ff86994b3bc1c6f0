"""Einstein sums by their decomposition against NumPy and ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.einsum import Einsum, Relabel

SIZES = {"a": 2, "b": 3, "i": 4, "j": 5, "k": 1, "l": 6, "s": 7}
EQUATIONS = (
    "bij,bjl->bil", "ij->ji", "ii->i", "ii->", "iij->j", "ij,jl,ls->is", "i,j->ij", "ij,ij->", "bij->", "aij,bjl->abil",
    "ij,ij->ij", "ik,kj->ij", "i,i", "ij,jl", "ki->ik", "abij,abjl->abil", "ij,i->ij", " bi j , b j l-> b i l",
    "abij,bl,ajs->ils", "ij,l->i", "ba",
)  # fmt: skip
SPREAD = (
    ("...ij,...jk->...ik", ((2, 1, 3, 4), (5, 4, 6))),
    ("i...->...i", ((3, 4, 5),)),
    ("...,...->...", ((2, 1), (3,))),
    ("a...a->...a", ((3, 2, 3),)),
    ("...i,i->...", ((2, 4), (4,))),
    ("i...j,j...->i...", ((2, 3, 4), (4, 1))),
    ("...ij,...jk", ((2, 3, 4), (2, 4, 3))),
    ("ij,ij->ij", ((3, 4), (1, 4))),
)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_letters(equation: str) -> None:
    """Products, sums, diagonals, outer products, three inputs, implicit results, spaces."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    x = [values(tuple(SIZES[c] for c in term), seed=n) for n, term in enumerate(terms)]
    (y,) = check(Einsum(equation), *x)
    np.testing.assert_allclose(y, ort("Einsum", *x, equation=equation)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equation, shapes", SPREAD)
def test_ellipses_and_broadcasting(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Axes without a letter, in any place, broadcast."""
    x = [values(shape, seed=n) for n, shape in enumerate(shapes)]
    np.testing.assert_allclose(check(Einsum(equation), *x)[0], np.einsum(equation, *x), rtol=1e-4, atol=1e-4)


def test_other_types() -> None:
    """Integers exactly, f16 with sums in f32."""
    for dtype in (np.int32, np.float16, np.float64):
        check(Einsum("ij,jl->il"), values((3, 4), dtype), values((4, 5), dtype))


def test_errors() -> None:
    """Equations that do not fit their inputs."""
    x = TensorType((3, 4), DTYPES["f32"])
    for equation, error in (
        ("ij,jk->ik", OptionError),
        ("ij->ik", OptionError),
        ("ij->ii", OptionError),
        ("i1->i", OptionError),
        ("ijk->i", ShapeError),
        ("ii->i", ShapeError),
    ):
        with pytest.raises(error, match="einsum"):
            Einsum(equation).infer(x)
    with pytest.raises(OptionError, match="labels"):
        Relabel((0, 1), (0,)).infer(x)
