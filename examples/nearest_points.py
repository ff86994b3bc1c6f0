"""A function in NumPy's words as a compiled one: the nearest of some points to each query, for any numbers of both.

usage: python examples/nearest_points.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx


def nearest(points: Any, queries: Any) -> tuple[Any, Any]:
    """points [n, 3], queries [m, 3] -> the number of the nearest point [m] and its distance [m]."""
    squares = np.sum(points**2, axis=1) - 2 * queries @ points.T + np.sum(queries**2, axis=1)[:, None]
    return np.argmin(squares, axis=1), np.sqrt(np.maximum(np.min(squares, axis=1), 0))


def main() -> None:
    compiled = rlx.jit(nearest, dims={"points": ("n", None), "queries": ("m", None), "n": (1, 100_000)}, device="cpu")
    rng = np.random.default_rng(0)
    for n, m in ((5, 2), (1000, 7), (20_000, 1)):
        points, queries = (rng.standard_normal((rows, 3), dtype=np.float32) for rows in (n, m))
        numbers, distances = compiled(points, queries)
        expected, _ = nearest(points, queries)
        same = np.array_equal(numbers, expected)
        print(f"{n} points, {m} queries: {distances[0]:.3f} to the first; as NumPy: {same}")
    print(f"traced {len(compiled.traces)} time for all sizes")


if __name__ == "__main__":
    main()
