"""How far the outputs of a new model are from those of the old one."""

from __future__ import annotations

import numpy as np

from rlx.ir.graph import Array
from rlx.quantiser.inputs import Inputs
from rlx.quantiser.report import OutputError
from rlx.runtime.compiled import CompiledGraph

__all__ = ["compare"]


class _Sums:
    """Of one output over all inputs."""

    def __init__(self) -> None:
        self.cosine, self.squares, self.wrong, self.same, self.rows = 1.0, 0.0, 0.0, 0, 0
        self.columns = 0

    def add(self, a: Array, b: Array) -> None:
        x, y = (v.astype(np.float64).reshape(-1) for v in (a, b))
        lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
        self.cosine = min(self.cosine, float(x @ y) / lengths if lengths else float((x == y).all()))
        self.squares, self.wrong = self.squares + float(x @ x), self.wrong + float((x - y) @ (x - y))
        self.columns = a.shape[-1] if a.ndim else 1
        if a.ndim and self.columns > 1:
            self.same += int((a.argmax(-1) == b.argmax(-1)).sum())
            self.rows += a.size // self.columns


def compare(old: CompiledGraph, new: CompiledGraph, inputs: Inputs) -> list[OutputError]:
    """Runs both on each set of inputs; an error for each output of floats that is in both."""
    sums: dict[str, _Sums] = {}
    for given in inputs.told("outputs"):
        before = {name: np.array(array) for name, array in old(given).items()}
        after = new(given)
        for name, array in before.items():
            if name in after and array.dtype.kind == "f" and array.size:
                sums.setdefault(name, _Sums()).add(array, np.asarray(after[name]))
    return [
        OutputError(
            name,
            s.cosine,
            float(np.sqrt(s.wrong / s.squares)) if s.squares else 0.0,
            s.same / s.rows if s.rows else None,
            s.rows,
        )
        for name, s in sums.items()
    ]
