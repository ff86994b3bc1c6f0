"""Products of 8-bit numbers in ONNX files: weights and activations are rounded, as QuantizeLinear says.

    x -> QuantizeLinear -> DequantizeLinear -> Conv -> ...          w (i8) -> DequantizeLinear -> Conv

Products are Conv, Gemm and MatMul with a constant matrix. Their inputs are rounded, and the results of convolutions,
after the activation that may follow. In networks of convolutions all that read a rounded value read it rounded, so
that only its bytes are kept; what only matrix products need rounded (in encoders) stays as it is for sums and norms
beside them. A Relu or Clip whose limits are those of the 8 bits is left out: QuantizeLinear does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from rlx.errors import no_such
from rlx.ir.graph import Array
from rlx.progress import report
from rlx.quantiser.onnx.file import OnnxFile
from rlx.quantiser.ranges import Grid
from rlx.quantiser.report import TensorResult
from rlx.quantiser.rows import Errors
from rlx.records import dataclass

__all__ = ["Product", "fold_norms", "products_of", "round_products", "rounded_values", "sharing"]

FOLLOWED = (  # done in the same kernel as the product before, in floats
    "Relu", "Clip", "LeakyRelu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "Elu", "Gelu", "Softplus", "Mish",
)  # fmt: skip
MOVED = (  # ops whose results are elements of their input
    "MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "DepthToSpace",
    "SpaceToDepth",
)  # fmt: skip
FEWEST = 1e-12  # of the scales of weights


@dataclass(frozen=True)
class Product:
    """Node number `node`, whose matrix has its results along `axis`.

    The bias is input number `place[1]` of node `place[0]`, which may be the sum after a MatMul.
    """

    node: int
    op: str
    data: str
    weight: str
    bias: str
    place: tuple[int, int]
    axis: int


def fold_norms(file: OnnxFile) -> int:
    """Multiplies the factors of BatchNormalization into the convolution before, where nothing else reads that."""
    readers, elsewhere, folded = file.readers(), file.read_elsewhere(), 0
    for node in file.nodes:
        if node.op != "Conv" or node.gone:
            continue
        out = node.outputs[0]
        reading = readers.get(out, [])
        if len(reading) != 1 or out in elsewhere:
            continue
        norm = file.nodes[reading[0][0]]
        if (
            norm.op != "BatchNormalization"
            or len([o for o in norm.outputs if o]) != 1
            or norm.attribute("training_mode")
        ):
            continue
        given = [file.constant(name) for name in (node.inputs[1], *norm.inputs[1:5])]
        bias = file.constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else np.float32(0)
        if bias is None or any(a is None or a.dtype != np.float32 for a in given):
            continue
        weight, scale, shift, mean, variance = (np.asarray(a, np.float64) for a in given)
        factor = scale / np.sqrt(variance + np.float64(norm.attribute("epsilon", 1e-5)))
        made = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
        node.inputs[1:] = [
            file.add_tensor(f"{node.inputs[1]}.folded", made.astype(np.float32)),
            file.add_tensor(f"{node.inputs[1]}.shift", (shift + (bias - mean) * factor).astype(np.float32)),
        ]
        node.outputs[0], norm.gone = norm.outputs[0], True
        folded += 1
    return folded


def products_of(file: OnnxFile, keep: Sequence[str]) -> list[Product]:
    """The products that are made of 8-bit numbers. `keep` are patterns of names of nodes and of their results.

    Raises `NameNotFound` for a pattern that matches no product.
    """
    found: list[Product] = []
    used: set[str] = set()
    names: list[str] = []
    readers, elsewhere = file.readers(), file.read_elsewhere()
    for k, node in enumerate(file.nodes):
        if node.gone or node.op not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 2:
            continue
        weight = file.type_of_constant(node.inputs[1])
        if weight is None or weight[0] != "FLOAT" or node.inputs[0] in file.constants or 0 in weight[1]:
            continue
        rank = len(weight[1])
        if rank not in ((3, 4, 5) if node.op == "Conv" else (2,)):
            continue
        if node.op == "Gemm" and (node.attribute("transA", 0) or node.attribute("alpha", 1.0) != 1.0):
            continue
        bias, place = (node.inputs[2], (k, 2)) if len(node.inputs) > 2 else ("", (k, 2))
        if node.op == "MatMul" and node.outputs[0] not in elsewhere:
            bias, place = _sum_after(file, node.outputs[0], weight[1][1], readers)
        if node.op == "Gemm" and bias and node.attribute("beta", 1.0) != 1.0:
            continue
        own = [n for n in (node.proto.name, *node.outputs) if n]
        names += own
        hits = {p for p in keep if any(fnmatchcase(n, p) for n in own)}
        used |= hits
        if not hits:
            axis = 0 if node.op == "Conv" or node.attribute("transB", 0) else 1
            found.append(Product(k, node.op, node.inputs[0], node.inputs[1], bias, place, axis))
    for pattern in keep:
        if pattern not in used:
            raise no_such("product", pattern, names)
    return found


def _sum_after(
    file: OnnxFile, value: str, size: int, readers: Mapping[str, Sequence[tuple[int, int]]]
) -> tuple[str, tuple[int, int]]:
    """The bias of so many elements that is all that a value is read for, and where; "" where there is none."""
    reading = readers.get(value, [])
    if len(reading) == 1 and file.nodes[reading[0][0]].op == "Add":
        k, i = reading[0]
        bias = file.nodes[k].inputs[1 - i]
        if file.type_of_constant(bias) == ("FLOAT", (size,)):
            return bias, (k, 1 - i)
    return "", (-1, -1)


def rounded_values(file: OnnxFile, products: Sequence[Product]) -> list[str]:
    """The values that are rounded, in the order of the file."""
    readers, elsewhere = file.readers(), file.read_elsewhere()
    found = {p.data for p in products}
    for product in products:
        if product.op != "Conv":
            continue
        value = file.nodes[product.node].outputs[0]
        while value not in elsewhere and len(readers.get(value, [])) == 1:
            k, i = readers[value][0]
            if i or file.nodes[k].op not in FOLLOWED:
                break
            value = file.nodes[k].outputs[0]
        if value in readers and value not in elsewhere:
            found.add(value)
    made = [v.name for v in file.model.graph.inputs]
    made += [o for node in file.nodes for o in node.outputs if not node.gone]
    return [name for name in dict.fromkeys(made) if name in found]


def sharing(file: OnnxFile, values: Sequence[str]) -> dict[str, str]:
    """Values that are elements of another one -> that one: both have one grid, and are rounded once for all."""
    known, found = set(values), dict[str, str]()
    for node in file.nodes:
        if node.op in MOVED and not node.gone and node.inputs and node.outputs[0] in known:
            source = found.get(node.inputs[0], node.inputs[0])
            if source in known:
                found[node.outputs[0]] = source
    return found


def round_products(
    file: OnnxFile, products: Sequence[Product], grids: Mapping[str, Grid], *, per_channel: bool
) -> list[TensorResult]:
    """Puts the roundings into the file; what became of the weights."""
    made: dict[tuple[str, int], str] = {}
    scales: dict[str, Array] = {}
    results: list[TensorResult] = []
    for number, product in enumerate(products):
        report("weights", number / len(products), product.weight)
        grid, key = grids[product.data], (product.weight, product.axis)
        weight, bias = file.constant(product.weight), file.constant(product.bias) if product.bias else None
        assert weight is not None
        if key not in made:
            scale = weight_scales(weight, product.axis if per_channel else None)
            scale = _fitting_bias(scale, bias, grid)
            made[key], result = _round_weight(file, product, weight, scale, per_channel)
            scales[made[key]] = scale
            results.append(result)
        node = file.nodes[product.node]
        node.inputs[1] = made[key]
        if bias is not None and bias.dtype == np.float32 and bias.ndim == 1 and bias.size == weight.shape[product.axis]:
            _round_bias(file, product, bias, grid, scales[made[key]])
    _round_values(file, products, grids)
    return results


def _round_values(file: OnnxFile, products: Sequence[Product], grids: Mapping[str, Grid]) -> None:
    """Lets nodes read the values rounded."""
    readers, elsewhere = file.readers(), file.read_elsewhere()
    producers = {o: k for k, node in enumerate(file.nodes) if not node.gone for o in node.outputs}
    matrix = {p.node for p in products if p.op != "Conv"}
    of_matrices = {p.data for p in products if p.op != "Conv"} - {p.data for p in products if p.op == "Conv"}
    for value, grid in grids.items():
        reading = readers.get(value, [])
        if value in of_matrices and not _of_conv(file, value, producers):
            reading = [(k, i) for k, i in reading if k in matrix and i == 0]
        source = value
        while source in producers and _saturates(file, producers[source], grid):
            before = file.nodes[producers[source]].inputs[0]
            if len(readers[before]) != 1 or source in elsewhere or len(reading) != len(readers[value]):
                break
            file.nodes[producers[source]].gone, source = True, before
        _round_value(file, source, value, grid, reading)


def _of_conv(file: OnnxFile, value: str, producers: Mapping[str, int]) -> bool:
    """Whether a convolution made the value, up to what follows it or moves its elements."""
    while value in producers:
        node = file.nodes[producers[value]]
        if node.op == "Conv":
            return True
        if node.op not in (*FOLLOWED, *MOVED, "GlobalAveragePool", "AveragePool"):
            return False
        value = node.inputs[0]
    return False


def _saturates(file: OnnxFile, k: int, grid: Grid) -> bool:
    """Whether a node only cuts off what the grid cuts off too."""
    node = file.nodes[k]
    low, high = grid.limits
    if node.op == "Relu":
        return grid.zero == low
    if node.op != "Clip":
        return False
    ends = []
    for i, name in enumerate(("min", "max"), 1):
        given = file.constant(node.inputs[i]) if len(node.inputs) > i and node.inputs[i] else None
        if given is None and len(node.inputs) > i and node.inputs[i]:
            return False  # a limit that the run decides
        ends.append(node.attribute(name) if given is None else float(given.reshape(-1)[0]))
    least, most = ((None if e is None else np.rint(np.float32(e) / grid.scale) + grid.zero) for e in ends)
    return (least is None or least <= low) and (most is None or most >= high)


def weight_scales(weight: Array, axis: int | None) -> Array:
    """The scale of each channel (or of all together) with the least squared error of those tried."""
    rows = weight.reshape(1, -1) if axis is None else np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    rows = rows.astype(np.float32)
    largest = np.abs(rows).max(axis=1)
    best, scale = np.full(len(rows), np.inf), largest / 127
    for part in np.linspace(1, 0.8, 11):
        step = np.maximum(largest * part / 127, FEWEST).astype(np.float32)
        q = np.clip(np.rint(rows / step[:, None]), -127, 127)
        error = np.square((rows - q * step[:, None]).astype(np.float64)).sum(axis=1)
        scale, best = np.where(error < best, step, scale), np.minimum(error, best)
    return np.asarray(np.maximum(scale, FEWEST), np.float32)


def _fitting_bias(scale: Array, bias: Array | None, grid: Grid) -> Array:
    """Scales with which the bias fits in 32 bits at the scale of the products."""
    if bias is None or bias.ndim != 1 or (len(scale) > 1 and bias.size != scale.size) or not bias.size:
        return scale
    largest = np.abs(bias).astype(np.float64)
    least = (largest if len(scale) > 1 else largest.max(keepdims=True)) / (float(grid.scale) * (1 << 30))
    return np.asarray(np.maximum(scale, least), np.float32)


def _round_weight(
    file: OnnxFile, product: Product, weight: Array, scale: Array, per_channel: bool
) -> tuple[str, TensorResult]:
    column = scale.reshape([-1 if d == product.axis else 1 for d in range(weight.ndim)]) if per_channel else scale[0]
    q = np.clip(np.rint(weight / column), -127, 127).astype(np.int8)
    errors = Errors()
    errors.add(weight, (q * column).astype(np.float32))
    stored = scale if per_channel else scale[0]
    parts = [
        file.add_tensor(f"{product.weight}.i8", q),
        file.add_tensor(f"{product.weight}.scale", np.asarray(stored, np.float32)),
        file.add_tensor(f"{product.weight}.zero", np.zeros(np.shape(stored), np.int8)),
    ]
    out = file.fresh(f"{product.weight}.rounded")
    axis = {"axis": product.axis} if per_channel else {}
    file.add_node(product.node, "DequantizeLinear", parts, [out], domain=file.own_domain, **axis)
    size = q.nbytes + scale.nbytes + scale.size
    return out, TensorResult(
        product.weight, weight.shape, "f32", "int8", weight.nbytes, size, "", errors.rms, errors.worst
    )


def _round_bias(file: OnnxFile, product: Product, bias: Array, grid: Grid, scale: Array) -> None:
    """The bias in 32 bits, at the scale of the products."""
    step = (np.broadcast_to(scale, bias.shape) * grid.scale).astype(np.float32)
    q = np.clip(np.rint(bias.astype(np.float64) / step), -(1 << 31) + 1, (1 << 31) - 1).astype(np.int32)
    parts = [
        file.add_tensor(f"{product.bias}.i32", q),
        file.add_tensor(f"{product.bias}.scale", step),
        file.add_tensor(f"{product.bias}.zero", np.zeros(bias.shape, np.int32)),
    ]
    out, (node, i) = file.fresh(f"{product.bias}.rounded"), product.place
    file.add_node(node, "DequantizeLinear", parts, [out], domain=file.own_domain, axis=0)
    file.nodes[node].inputs[i] = out


def _round_value(file: OnnxFile, source: str, value: str, grid: Grid, reading: Sequence[tuple[int, int]]) -> None:
    """Lets nodes read `value`, which is made of `source` by what the grid does too, rounded."""
    if not reading:
        return
    scale = file.add_tensor(f"{value}.scale", np.asarray(grid.scale, np.float32))
    zero = file.add_tensor(f"{value}.zero", grid.zero_array())
    first = min(k for k, _ in reading)
    q, back = file.fresh(f"{value}.{grid.dtype}"), file.fresh(f"{value}.rounded")
    file.add_node(first, "QuantizeLinear", [source, scale, zero], [q], domain=file.own_domain)
    file.add_node(first, "DequantizeLinear", [q, scale, zero], [back], domain=file.own_domain)
    for k, i in reading:
        file.nodes[k].inputs[i] = back
