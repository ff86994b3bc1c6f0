"""An op of one's own: the Snake activation, x + sin(a x)^2 / a. (Ziyin et al. 2020)

usage: python examples/custom_op.py

`reference` defines it, `lower` makes code of it, `formula` its gradient. docs/adding-an-op.md explains each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx
from rlx.testing.oracle import Case, Operand, check


@rlx.register
class Snake(rlx.Op):
    """x + sin(a x)^2 / a for an f32 or f64 tensor of any shape."""

    a: float = 1.0

    def infer(self, x: rlx.TensorType) -> rlx.TensorType:
        if not x.dtype.is_float:
            raise rlx.errors.DTypeError(f"snake: expected floats, got {x}")
        return x

    def reference(self, x: Any) -> Any:
        return (x + np.sin(self.a * x) ** 2 / self.a).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            value = k.widen(x(*i))
            wave = k.call("sin", value * self.a)
            return value + wave * wave / self.a

        return k.map(element)

    def formula(self, x: Any) -> Any:
        return x + rlx.sin(x * self.a) ** 2 / self.a


def main() -> None:
    shape = (rlx.Dim("n", 1, 100), 5)
    cases = [Case(Snake(a), (Operand(shape, dtype),)) for a in (1.0, 4.0) for dtype in ("f32", "f64")]
    print(f"{check(cases, device='cpu', extents=({'n': 1}, {'n': 33}))} results agree with the definition")

    layer = rlx.jit(lambda x, w: rlx.ops.snake(x @ w, a=2.0), device="cpu")
    x, w = np.ones((4, 8), np.float32), np.full((8, 2), 0.1, np.float32)
    print(f"code of its own: {'host' not in layer.compile(x, w).explain('dispatch')}")
    slope = rlx.grad(lambda v: np.sum(rlx.ops.snake(v, a=2.0)))(np.array([0.5]))
    print(f"slope at 0.5: {slope[0]:.4f} (1 + sin 2 = {1 + np.sin(2 * 2 * 0.5):.4f})")


if __name__ == "__main__":
    main()
