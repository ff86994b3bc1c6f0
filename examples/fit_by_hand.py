"""Fits a small network to the product of two numbers, by gradient descent written by hand.

usage: python examples/fit_by_hand.py [STEPS]     STEPS defaults to 2000
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import rlx

RNG = np.random.default_rng(0)
POINTS = RNG.uniform(-1, 1, (64, 2)).astype(np.float32)
WANTED = POINTS[:, :1] * POINTS[:, 1:]
SHAPES = ((1.5, (2, 32)), (1.0, (32,)), (0.3, (32, 1)))  # standard deviations too


def loss(layers: list[Any], inputs: Any) -> Any:
    return np.mean((np.tanh(inputs @ layers[0] + layers[1]) @ layers[2] - WANTED) ** 2)


@rlx.jit
def update(layers: list[Any]) -> Any:
    value, slopes = rlx.value_and_grad(loss)(layers, POINTS)
    return value, [w - 0.05 * slope for w, slope in zip(layers, slopes, strict=True)]


def main() -> None:
    layers: Any = [RNG.normal(0, size, shape).astype(np.float32) for size, shape in SHAPES]
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for step in range(steps):
        value, layers = update(layers)
        if step % 500 == 0 or step == steps - 1:
            sys.stdout.write(f"step {step}: loss {float(value):.5f}\n")


if __name__ == "__main__":
    main()
