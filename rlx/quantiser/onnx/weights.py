"""Narrower weights in ONNX files; what is computed stays in floats.

f16, bf16     w -> Cast -> what read it before
int8          w (a scale for each result) -> DequantizeLinear -> what read it before
q8_0, q4_0    MatMul and Gemm become MatMulNBits (com.microsoft), in blocks of 32 of the axis that is summed over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from rlx.errors import ModelFormatError, OptionError, no_such
from rlx.importers.onnx.tensor import TensorRef
from rlx.ir.dtype import DTYPES
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array
from rlx.progress import report
from rlx.quantiser.onnx.file import MICROSOFT, OnnxFile
from rlx.quantiser.onnx.static import weight_scales
from rlx.quantiser.report import TensorResult
from rlx.quantiser.rows import Errors
from rlx.quantiser.rules import TINY, Rules, stored_bytes
from rlx.records import dataclass, replace

__all__ = ["ONNX_TYPES", "narrow_weights", "plan_weights"]

ONNX_TYPES = ("f32", "f16", "bf16", "int8", "q8_0", "q4_0")
CASTS = {"f16": 10, "bf16": 16}  # TensorProto.DataType
BLOCKED = {"q8_0": 8, "q4_0": 4}
PRODUCTS = ("MatMul", "Gemm", "Conv")
BLOCK = 32


@dataclass(frozen=True)
class _Role:
    """Where a constant is read.

    `axis`: its axis along the results of products, None where others read it too. `table`: rows of it are looked up.
    `plain`: the products are data * matrix (+ bias) and nothing else. `nodes`: the numbers of those that read it.
    """

    axis: int | None
    table: bool
    plain: bool
    nodes: Sequence[int]


def plan_weights(file: OnnxFile, rules: Rules) -> list[TensorResult]:
    """What each constant of floats becomes. Raises `NameNotFound` for a pattern that matches none."""
    roles, made = _roles(file), []
    named: list[str] = []
    for name, found in file.constants.items():
        if not isinstance(found, TensorRef) or found.element.name != "FLOAT" or name not in roles:
            continue
        named.append(name)
        after, reason = _chosen(name, found.dims, roles[name], rules)
        size = found.size * 4
        made.append(TensorResult(name, found.dims, "f32", after, size, _bytes(after, found.dims, roles[name]), reason))
    for pattern in (*rules.keep, *(p for p, _ in rules.overrides)):
        if not any(fnmatchcase(name, pattern) for name in named):
            raise no_such("tensor", pattern, named)
    return made


def _roles(file: OnnxFile) -> dict[str, _Role]:
    """By the names of initializers and Constant nodes, also past Identity."""
    root: dict[str, str] = {}
    for node in file.nodes:
        if node.op == "Identity" and node.inputs[0] in file.constants:
            root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
    own = set(file.model.graph.initializers) | {n.outputs[0] for n in file.nodes if n.op == "Constant"}
    reading: dict[str, list[tuple[int, int]]] = {name: [] for name in own}
    for name, places in file.readers().items():
        if name in file.constants:
            reading.setdefault(root.get(name, name), []).extend(
                (k, i) for k, i in places if file.nodes[k].op != "Identity"
            )
    elsewhere = file.read_elsewhere()
    found = {}
    for name in own & file.constants.keys():
        places = reading[name]
        axes = {_axis(file, k, i) for k, i in places}
        table = any(file.nodes[k].op == "Gather" and i == 0 for k, i in places)
        known = len(axes) == 1 and name not in elsewhere
        plain = all(_is_plain(file, k) for k, _ in places)
        found[name] = _Role(next(iter(axes)) if known else None, table, plain, [k for k, _ in places])
    return found


def _axis(file: OnnxFile, k: int, i: int) -> int | None:
    node = file.nodes[k]
    if node.op == "Conv" and i == 1:
        return 0
    if node.op == "MatMul" and i == 1:
        kind = file.type_of_constant(node.inputs[1])
        return None if kind is None else len(kind[1]) - 1
    if node.op == "Gemm" and i == 1:
        return 0 if node.attribute("transB", 0) else 1
    if node.op == "Gather" and i == 0 and not node.attribute("axis", 0):
        return 0
    return None


def _is_plain(file: OnnxFile, k: int) -> bool:
    """Whether a node is a product that MatMulNBits and Add compute too."""
    node = file.nodes[k]
    if node.op == "Gemm":
        scaled = node.attribute("alpha", 1.0) != 1 or node.attribute("beta", 1.0) != 1
        return not scaled and not node.attribute("transA", 0)
    return node.op == "MatMul"


def _chosen(name: str, dims: tuple[int, ...], role: _Role, rules: Rules) -> tuple[str, str]:
    if any(fnmatchcase(name, pattern) for pattern in rules.keep):
        return "f32", "kept by its name"
    wanted, why = next(((t, f"by {p}") for p, t in rules.overrides if fnmatchcase(name, p)), (rules.type, ""))
    if not why:
        if len([d for d in dims if d > 1]) < 2:
            return "f32", "one axis"
        if int(np.prod(dims, dtype=np.int64)) < TINY:
            return "f32", f"fewer than {TINY} elements"
        if role.table:
            wanted, why = rules.embeddings or ("f32" if wanted not in CASTS else wanted), "embedding"
    if wanted in ("f32", *CASTS):
        return wanted, why
    if role.axis is None or len(dims) < 2 or (wanted in BLOCKED and role.table):
        return "f32", "no matrix of a product"
    if wanted in BLOCKED:
        if not role.plain:
            return "int8", "its product is more than a matrix product"
        if len(dims) != 2 or dims[1 - role.axis] % BLOCK:
            return "int8", f"no matrix with whole blocks of {BLOCK}"
    return wanted, why


def _bytes(after: str, dims: tuple[int, ...], role: _Role) -> int:
    count = int(np.prod(dims, dtype=np.int64))
    if after == "int8":
        assert role.axis is not None
        return count + 5 * dims[role.axis]
    if after in BLOCKED:
        return count * BLOCKED[after] // 8 + count // BLOCK * 4
    return stored_bytes(after, dims)


def narrow_weights(file: OnnxFile, planned: Sequence[TensorResult]) -> list[TensorResult]:
    """Puts the new weights into the file; the tensors with their errors."""
    roles, done = _roles(file), []
    for number, one in enumerate(planned):
        report("weights", number / len(planned), one.name)
        if one.after == one.before:
            done.append(one)
            continue
        weight = file.constant(one.name)
        assert weight is not None
        if not np.isfinite(weight).all():
            raise ModelFormatError(f"tensor {one.name!r} has an element that is NaN or infinite; keep it as it is")
        errors = Errors()
        if one.after in CASTS:
            back = _cast(file, one, weight)
        elif one.after == "int8":
            back = _int8(file, one, weight, roles[one.name])
        else:
            back = _blocks(file, one, weight, roles[one.name])
        errors.add(weight, back)
        done.append(replace(one, rms=errors.rms, worst=errors.worst))
    return done


def _cast(file: OnnxFile, one: TensorResult, weight: Array) -> Array:
    if one.after == "bf16" and file.opset < 13:
        raise OptionError(f"{file.path}: bf16 is for models of opset 13 and later, it has {file.opset}: take f16")
    with np.errstate(over="ignore"):
        narrow = weight.astype(DTYPES[one.after].numpy)
    back = narrow.astype(np.float32)
    if not np.isfinite(back).all():
        raise OptionError(f"tensor {one.name!r} has elements beyond those of {one.after}: keep it, or take bf16")
    made = file.add_tensor(f"{one.name}.{one.after}", narrow)
    file.add_node(file.take_out(one.name), "Cast", [made], [one.name], to=1)
    return back


def _int8(file: OnnxFile, one: TensorResult, weight: Array, role: _Role) -> Array:
    axis = role.axis
    assert axis is not None
    scale = weight_scales(weight, axis)
    column = scale.reshape([-1 if d == axis else 1 for d in range(weight.ndim)])
    q = np.clip(np.rint(weight / column), -127, 127).astype(np.int8)
    parts = [
        file.add_tensor(f"{one.name}.i8", q),
        file.add_tensor(f"{one.name}.scale", scale),
        file.add_tensor(f"{one.name}.zero", np.zeros(scale.shape, np.int8)),
    ]
    at = file.take_out(one.name)
    file.add_node(at, "DequantizeLinear", parts, [one.name], domain=file.own_domain, axis=axis)
    return (q * column).astype(np.float32)


def _blocks(file: OnnxFile, one: TensorResult, weight: Array, role: _Role) -> Array:
    """Lets products with a matrix take its blocks; those of 4 bits lie as in MatMulNBits, two neighbours in a byte."""
    encoding, bits = ENCODINGS[one.after], BLOCKED[one.after]
    rows = np.ascontiguousarray(weight if role.axis == 0 else weight.T)  # [results, summed]
    n, k = rows.shape
    blocks = encoding.encode(rows).reshape(n, k // BLOCK, encoding.block_bytes)
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
    if bits == 8:
        packed = blocks[..., 2:] ^ 128
    else:
        pairs = blocks[..., 2:]
        q = np.concatenate([pairs & 15, pairs >> 4], axis=-1)
        packed = q[..., ::2] | q[..., 1::2] << 4
    tensors = [
        file.add_tensor(f"{one.name}.{one.after}", np.ascontiguousarray(packed)),
        file.add_tensor(f"{one.name}.scale", scale.reshape(-1)),
    ]
    for at in role.nodes:
        node = file.nodes[at]
        out, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else ""
        made = file.fresh(f"{out}.product") if bias else out
        options: Mapping[str, int] = {"K": k, "N": n, "bits": bits, "block_size": BLOCK}
        file.add_node(at, "MatMulNBits", [node.inputs[0], *tensors], [made], domain=MICROSOFT, **options)
        if bias:
            file.add_node(at, "Add", [made, bias], [out])
        node.gone = True
    back = encoding.decode(blocks, rows.shape)
    return back if role.axis == 0 else back.T
