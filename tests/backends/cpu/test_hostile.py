"""The CPU against the reference on values that no model should be fed with, in all operands of every op.

Kernels run with every buffer against pages that can't be touched, so in a process of their own: this file as a script,
with op names. A run that the reference refuses must be refused by a compiled graph, in words that name the node.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.reference import run_graph
from rlx.compiler import lower_graph
from rlx.errors import ExecutionError
from rlx.ir.graph import Array
from rlx.ops.base import OPS
from rlx.ops.select import Produced
from rlx.passes import run_passes
from rlx.passes.legalise import legalise
from rlx.testing.cases import cases_of, covered
from rlx.testing.guarded import GuardedRun
from rlx.testing.hostile import FLAVOURS, compare_hostile, hostile
from rlx.testing.oracle import Batch, Case

# Not those whose results are undefined beyond a count, for rows that don't ascend, or as long as a number says, nor
# casts and attention, whose own tests have every edge.
LEFT_OUT = (
    "arange", "attention", "cast", "extent", "non_max_places", "non_zero_places", "search_sorted", "unique_places",
)  # fmt: skip
UNORDERED = ("welch_peaks",)  # which of the peaks of a spectrum of NaN are the highest, nothing says
NAMES = [n for n in sorted(OPS) if covered(n) and n not in LEFT_OUT]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_agrees_with_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    """Every kind of hostile value in up to 6 cases of an op (40 in a full run)."""
    command = [sys.executable, "-u", "-X", "faulthandler", str(Path(__file__))]
    count = 40 if request.config.option.full else 6
    ended = subprocess.run(
        [*command, name, str(request.config.option.seed), str(count)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"


# ---- in the other process

Run = Callable[..., dict[str, Array]]


class Cases:
    """Some cases of an op, filled with hostile values; kernels are made once for each set of cases."""

    def __init__(self, name: str, seed: int, count: int) -> None:
        known = list(dict.fromkeys([*cases_of(name, 7, 9), *cases_of(name, 3, 33)]))
        self.name, self.seed = name, seed
        self.produced = issubclass(OPS[name], Produced)  # host calls whose results have sizes of their own
        self.cases = random.Random(f"{seed} {name}").sample(known, min(count, len(known)))
        self.runs: dict[tuple[Case, ...], tuple[Batch, Run]] = {}

    def refused(self, one: Case, flavour: str) -> str | None:
        """The reference's words, where it refuses the values."""
        batch = Batch([one])
        try:
            run_graph(batch.graph, *batch.arrays(self.seed, None, hostile(flavour, self.name)))
        except ExecutionError as error:
            return str(error)
        return None

    def run(self, cases: tuple[Case, ...]) -> tuple[Batch, Run]:
        if cases not in self.runs:
            backend, batch = CpuBackend(), Batch(cases)
            if self.produced:
                model = rlx.compile(batch.graph, device="cpu", threads=1)
                self.runs[cases] = (batch, lambda arrays, at_end: dict(model(arrays)))
            else:
                legal, _ = legalise(run_passes(batch.graph), backend.claims)
                self.runs[cases] = (batch, GuardedRun(lower_graph(legal, backend), backend.emit_kernel))
        return self.runs[cases]

    def check(self, flavour: str) -> list[str]:
        """What is wrong."""
        wrong = []
        words = {one: self.refused(one, flavour) for one in self.cases}
        agreed = tuple(one for one in self.cases if words[one] is None)
        together = self.compare(agreed, flavour) if len(agreed) == len(self.cases) and not self.produced else None
        wrong += (
            together if together is not None else [w for one in agreed for w in self.compare((one,), flavour) or []]
        )
        for one in self.cases:
            if words[one] is not None:
                wrong += self.refuse(one, flavour, str(words[one]))
        return wrong

    def arrays(self, batch: Batch, flavour: str) -> tuple[dict[str, Array], dict[str, Array]]:
        """Inputs and params. Weights over padding are finite: a product with padding may be computed or left out.

        Operands of products of bf16 have no denormals: processors take them for zeros, and infinity * 0 is NaN.
        """
        made = batch.arrays(self.seed, None, hostile(flavour, self.name))
        for number, one in enumerate(batch.cases):
            if getattr(one.op, "activations", "") == "bf16":
                for array in (
                    array for arrays in made for key, array in arrays.items() if key.startswith(f"c{number}.")
                ):
                    array[np.abs(array) < np.finfo(np.float32).tiny] = 0
            if self.name == "conv" and any(one.op.pads):
                for arrays in made:
                    weights = arrays.get(f"c{number}.x1")
                    if weights is not None:
                        weights[~np.isfinite(weights)] = 1
        return made

    def compare(self, cases: tuple[Case, ...], flavour: str) -> list[str] | None:
        """What differs; None where the reference refuses the values of one among several cases."""
        batch, run = self.run(cases)
        inputs, params = self.arrays(batch, flavour)
        wrong: list[str] = []
        try:
            expected = run_graph(batch.graph, inputs, params)
        except ExecutionError:
            return None
        for at_end in (True, False):
            try:
                got = run({**inputs, **params}, at_end=at_end)
            except ExecutionError as error:
                return [f"{flavour}: the reference runs {batch.labels}: {error}"]
            for key, array in expected.items():
                try:
                    label = f"{flavour}: {batch.labels[key]}"
                    if self.name in UNORDERED and flavour not in ("negative", "huge"):
                        continue
                    compare_hostile(self.name, label, got[key], array, batch.allowed[key])
                except AssertionError as error:
                    wrong.append(str(error))
        return wrong

    def refuse(self, one: Case, flavour: str, words: str) -> list[str]:
        batch, run = self.run((one,))
        inputs, params = batch.arrays(self.seed, None, hostile(flavour, self.name))
        for at_end in (True, False):
            try:
                run({**inputs, **params}, at_end=at_end)
                return [f"{flavour}: kernels run {one}, the reference: {words}"]
            except ExecutionError:
                pass
        model = rlx.compile(batch.graph, device="cpu", threads=1)
        model.set_params(params)
        try:
            model(inputs)
        except ExecutionError as error:
            return [] if "node" in str(error) else [f"{flavour}: no node is named: {error}"]
        return [f"{flavour}: the CPU runs {one}, the reference: {words}"]


def main(name: str, seed: str, count: str) -> None:
    cases = Cases(name, int(seed), int(count))
    wrong = []
    for flavour in FLAVOURS:
        sys.stdout.write(f"{name} {flavour}\n")
        wrong += cases.check(flavour)
    if wrong:
        sys.exit("\n".join(dict.fromkeys(wrong)))


if __name__ == "__main__":
    main(*sys.argv[1:])
