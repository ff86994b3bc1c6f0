"""Activations rounded to 8 bits, against the definition in rlx/ir/casting.py computed one block at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, OptionError
from rlx.ir.casting import ACTIVATION_BLOCK, TINY, quantised, rounded_q8
from rlx.ops.contract import Gemm, MatMul

f32 = np.float32


def by_definition(row: list[float]) -> list[float]:
    """A row, rounded by scalars."""
    made = []
    for start in range(0, len(row), 32):
        block = [f32(x) for x in row[start : start + 32]]
        peak = max(abs(x) for x in block)
        for x in block:
            if not all(map(math.isfinite, block)):
                made.append(math.nan)
            elif peak < TINY:
                made.append(0.0)
            else:
                made.append(float(f32(round(float(x * (f32(127) / peak)))) * (peak / f32(127))))
    return made


@pytest.mark.parametrize("depth", [0, 1, 31, 32, 33, 64, 100])
def test_rows_are_rounded_by_the_definition(depth: int) -> None:
    x = np.random.default_rng(depth).standard_normal((3, depth)).astype(f32) * f32(7)
    want = np.array([by_definition(row) for row in x.tolist()], f32).reshape(3, depth)
    assert np.array_equal(rounded_q8(x), want)
    numbers, scales = quantised(x)
    assert numbers.shape == (3, -(-depth // 32), ACTIVATION_BLOCK)
    assert scales.shape == (*numbers.shape[:2], 1)


def test_an_element_is_off_by_half_a_step_at_most() -> None:
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(f32)
    peaks = np.abs(x).reshape(64, 3, 32).max(axis=-1, keepdims=True).astype(np.float64)
    error = np.abs(rounded_q8(x).astype(np.float64) - x).reshape(64, 3, 32)
    assert (error <= peaks / 254 * (1 + 2**-15)).all()


@pytest.mark.parametrize(
    "value, rest",
    [
        (math.nan, math.nan),
        (math.inf, math.nan),
        (-math.inf, math.nan),
        (2.0**-101, 0),
        (1e-45, 0),
        (0, 0),
        (3e38, None),
    ],
)
def test_blocks_with_extreme_elements(value: float, rest: float | None) -> None:
    x = np.zeros((1, 64), f32)
    x[0, 5], x[0, 40] = value, 1
    made = rounded_q8(x)
    assert made[0, 40] == 1
    if rest is None:
        assert made[0, 5] == pytest.approx(value, rel=1e-6)
    else:
        assert np.array_equal(made[0, :32], np.full(32, rest, f32), equal_nan=True)


@pytest.mark.parametrize("op", [MatMul, Gemm])
@pytest.mark.parametrize(
    "activations, dtype, shape, error",
    [("q4", "f32", (3, 64), OptionError), ("q8", "f64", (3, 64), DTypeError), ("q8", "i8", (3, 64), DTypeError)],
)
def test_what_an_op_refuses(op: Any, activations: str, dtype: str, shape: tuple[int, ...], error: Any) -> None:
    g = rlx.Graph("g")
    x, w = g.input("x", shape, dtype), g.param("w", (64, 4), dtype)
    with pytest.raises(error, match=f"activations='{activations}'"):
        g.add(op(activations=activations), x, w)


def test_what_a_product_by_groups_refuses() -> None:
    g = rlx.Graph("g")
    numbers = g.input("numbers", (3,), "i64")
    for activations, dtype, error in (("q4", "f32", OptionError), ("q8", "f64", DTypeError)):
        x, w = g.input(f"x_{dtype}", (3, 64), dtype), g.param(f"w_{dtype}", (2, 64, 4), dtype)
        with pytest.raises(error, match=f"activations='{activations}'"):
            rlx.grouped_matmul(x, w, numbers, activations=activations)


def test_products_say_in_text_what_they_round() -> None:
    g = rlx.Graph("g")
    g.output(g.add(MatMul("q8"), g.input("x", (3, 64)), g.param("w", (64, 4)))[0], "y")
    assert 'activations="q8"' in str(g)
