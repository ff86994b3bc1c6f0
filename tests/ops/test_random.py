"""Random ops: the generator's published numbers, lowered and reference bits alike, and the distributions."""

from __future__ import annotations

import numpy as np
import pytest
from ops_oracle import check

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.ops.random import Bernoulli, Multinomial, RandomNormal, RandomUniform, threefry
from rlx.testing.interpret import check_op


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    """The test vectors that the authors publish with Random123."""
    words = threefry(key, *(np.array(c, np.uint32) for c in counter))
    assert tuple(int(w) for w in words) == expected


@pytest.mark.parametrize("name", ["f32", "f64", "f16"])
def test_uniform_and_normal(name: str) -> None:
    """Moments within five standard errors, every value in range, other numbers for another seed or step."""
    n = 20000
    (u,) = check_op(RandomUniform((n,), -1.0, 3.0, DTYPES[name], 1 << 40 | 5))
    assert u.min() >= -1
    assert u.max() <= 3
    assert abs(u.astype(np.float64).mean() - 1) < 5 * 4 / np.sqrt(12 * n)
    (z,) = check_op(RandomNormal((n,), 1.0, 3.0, DTYPES[name], 7))
    assert abs(z.astype(np.float64).mean() - 1) < 5 * 3 / np.sqrt(n)
    assert abs(z.astype(np.float64).std() - 3) < 5 * 3 / np.sqrt(2 * n)
    others = [RandomNormal((n,), 1.0, 3.0, DTYPES[name], seed).reference() for seed in (7, 8, 7 + (1 << 32))]
    others.append(check_op(RandomNormal((n,), 1.0, 3.0, DTYPES[name], 7), np.array(1))[0])
    np.testing.assert_array_equal(others[0], z)
    for other in others[1:]:
        assert abs(np.corrcoef(z.astype(np.float64), other.astype(np.float64))[0, 1]) < 0.05


def test_the_place_alone_counts() -> None:
    """A shape known at the run only gives the same numbers in row-major order."""
    m = Dim("m")
    (flat,) = check_op(RandomUniform((12,), seed=3))
    (square,) = check_op(RandomUniform((m, 4), seed=3), extents={"m": 3})
    np.testing.assert_array_equal(square.ravel(), flat)


def test_bernoulli() -> None:
    """Frequencies are the probabilities; 0 and 1 are certain."""
    p = np.repeat(np.array([0, 0.3, 1], np.float32), 4000).reshape(3, 4000)
    (y,) = check(Bernoulli(seed=5), p)
    assert y.dtype == np.float32
    assert y[0].sum() == 0
    assert y[2].sum() == 4000
    assert abs(y[1].mean() - 0.3) < 5 * np.sqrt(0.21 / 4000)
    assert check(Bernoulli(DTYPES["bool"]), p, np.array([2]))[0].dtype == np.bool_


def test_multinomial() -> None:
    """Frequencies follow unnormalised log-probabilities."""
    x = np.log(np.array([[1, 2, 7], [5, 5, 1e-9]], np.float32))
    (y,) = check(Multinomial(4000, DTYPES["i64"], 1), x)
    share = np.stack([np.bincount(row, minlength=3) for row in y]) / 4000
    np.testing.assert_allclose(share, [[0.1, 0.2, 0.7], [0.5, 0.5, 0]], atol=0.04)
    check_op(Multinomial(Dim("m")), x, np.array(9), shapes=[(2, 3), ()], extents={"m": 4})


def test_errors() -> None:
    """Types and shapes that do not fit."""
    with pytest.raises(DTypeError, match="random_uniform"):
        RandomUniform((2,), dtype=DTYPES["i32"]).infer()
    with pytest.raises(ShapeError, match="step"):
        RandomNormal((2,)).infer(TensorType((2,), DTYPES["i64"]))
    with pytest.raises(ShapeError, match="B, C"):
        Multinomial().infer(TensorType((2,), DTYPES["f32"]))
    with pytest.raises(DTypeError, match="i32 or i64"):
        Multinomial(1, DTYPES["f32"]).infer(TensorType((2, 3), DTYPES["f32"]))
