"""Fits a logistic regression by Newton's method, without ever making the matrix of second derivatives.

usage: python examples/newton.py

Each step solves H step = gradient by conjugate gradients, which needs only products of H with vectors (`rlx.hvp`).
The whole step, its inner loop included, is one compiled program. (Martens 2010)
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx

RNG = np.random.default_rng(0)
POINTS = RNG.standard_normal((500, 20))
ANSWERS = (POINTS @ RNG.standard_normal(20) + RNG.standard_normal(500) > 0).astype(np.float64)


def loss(w: Any) -> Any:
    """The mean cross-entropy, and a little of the weights' length, so that there is one minimum."""
    scores = POINTS @ w
    return np.mean(np.logaddexp(0, scores) - ANSWERS * scores) + 1e-3 * np.sum(w**2)


@rlx.jit
def step(w: Any) -> Any:
    value, slope = rlx.value_and_grad(loss)(w)

    def solve(s: Any) -> Any:
        along = rlx.hvp(loss, (w,), (s["p"],))
        alpha = s["rr"] / (s["p"] @ along)
        r = s["r"] - alpha * along
        rr = r @ r
        return {"x": s["x"] + alpha * s["p"], "r": r, "p": r + rr / s["rr"] * s["p"], "rr": rr, "n": s["n"] + 1}

    start = {"x": w * 0, "r": slope, "p": slope, "rr": slope @ slope, "n": 0}
    found = rlx.while_loop(lambda s: (s["rr"] > 1e-20) & (s["n"] < 50), solve, start)
    return value, w - found["x"], np.sqrt(slope @ slope)


def main() -> None:
    w = np.zeros(20)
    for number in range(7):
        value, w, slope = step(w)
        print(f"step {number}: loss {float(value):.6f}, slope {float(slope):.0e}")
    right = ((POINTS @ w > 0) == (ANSWERS > 0.5)).mean()
    print(f"{right:.1%} of the points on their side")


if __name__ == "__main__":
    main()
