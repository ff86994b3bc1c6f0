"""An ONNX model from file to file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rlx
from rlx.errors import OptionError
from rlx.quantiser.accuracy import compare
from rlx.quantiser.calibration import observe
from rlx.quantiser.inputs import Inputs, sets_of
from rlx.quantiser.onnx.file import OnnxFile, save
from rlx.quantiser.onnx.static import Product, fold_norms, products_of, round_products, rounded_values, sharing
from rlx.quantiser.onnx.weights import narrow_weights, plan_weights
from rlx.quantiser.ranges import Grid, grid_of
from rlx.quantiser.report import OutputError, Quantized, TensorResult
from rlx.quantiser.rules import Rules

if TYPE_CHECKING:
    from rlx.quantiser.api import Wishes

__all__ = ["quantize_onnx"]


def quantize_onnx(path: Path, goal: Path, rules: Rules, wishes: Wishes) -> Quantized:
    """See `rlx.quantize`."""
    file = OnnxFile(path)
    names = [v.name for v in file.model.graph.inputs if v.name not in file.model.graph.initializers]
    sets = None if wishes.inputs is None else sets_of(wishes.inputs, names)
    if wishes.activations is not None:
        assert sets is not None
        results, rounded = _static(file, sets, wishes)
    else:
        results, rounded = plan_weights(file, rules), 0
        if not wishes.dry_run:
            results = narrow_weights(file, results)
    before, after = (sum(getattr(t, f"bytes_{when}") for t in results) for when in ("before", "after"))
    if wishes.dry_run:
        return Quantized(str(path), "", rules.type, results, before, after, activations=rounded)
    file.drop_unused()
    data = file.content()
    outputs = _compared(path, data, sets, wishes) if sets is not None else []
    size = save(goal, data)
    return Quantized(str(path), str(goal), rules.type, results, before, after, size, outputs, rounded)


def _static(file: OnnxFile, sets: Inputs, wishes: Wishes) -> tuple[list[TensorResult], int]:
    fold_norms(file)
    products = products_of(file, wishes.keep)
    if not products:
        raise OptionError(f"{file.path}: has no Conv, Gemm or MatMul with a constant matrix of f32: nothing to round")
    values = rounded_values(file, products)
    if wishes.dry_run:
        return _planned(file, products), len(values)
    seen = observe(file, values, sets, wishes.threads)
    shared = sharing(file, values)
    groups: dict[str, list[str]] = {}
    for value in values:
        groups.setdefault(shared.get(value, value), []).append(value)
    grids: dict[str, Grid] = {}
    assert wishes.activations is not None
    for group in groups.values():
        grid = grid_of([seen[v] for v in group], wishes.activations, wishes.ranges, wishes.percentile)
        grids |= dict.fromkeys(group, grid)
    ordered: Mapping[str, Grid] = {value: grids[value] for value in values}
    return round_products(file, products, ordered, per_channel=wishes.per_channel), len(values)


def _planned(file: OnnxFile, products: Sequence[Product]) -> list[TensorResult]:
    found = {}
    for product in products:
        kind = file.type_of_constant(product.weight)
        assert kind is not None
        count = 1
        for size in kind[1]:
            count *= size
        more = 5 * kind[1][product.axis]
        found[product.weight] = TensorResult(product.weight, kind[1], "f32", "int8", 4 * count, count + more)
    return list(found.values())


def _compared(path: Path, data: bytes, sets: Inputs, wishes: Wishes) -> list[OutputError]:
    """Both models on the inputs; the new one from a file of its own, as it is not written yet."""
    old = rlx.load(path, device="cpu", threads=wishes.threads)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.onnx"
        save(made, data)
        return compare(old, rlx.load(made, device="cpu", threads=wishes.threads, cache=False), sets)
