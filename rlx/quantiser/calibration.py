"""What values of an ONNX model hold on given inputs: the model is run with these values as outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import rlx
from rlx.quantiser.inputs import Inputs
from rlx.quantiser.onnx.file import OnnxFile
from rlx.quantiser.ranges import Seen

__all__ = ["observe"]


def observe(file: OnnxFile, values: Sequence[str], inputs: Inputs, threads: int | None) -> dict[str, Seen]:
    """A histogram for each value; of an input of the model, of what is given for it."""
    given_names = {v.name for v in file.model.graph.inputs}
    outputs = {v.name for v in file.model.graph.outputs}
    made = [name for name in values if name not in given_names and name not in outputs]
    model = rlx.load(file.content(made), device="cpu", threads=threads, cache=False)
    seen = {name: Seen(name) for name in values}
    for given in inputs.told("inputs"):
        found = {**given, **model(given)}
        for name, one in seen.items():
            one.add(np.asarray(found[name]))
    return seen
