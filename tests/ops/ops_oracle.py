"""What the op tests share: checks with fixed and with symbolic sizes, and the results of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnxruntime

import rlx
from rlx.errors import NameNotFound, OptionError
from rlx.ir.graph import Array, Node
from rlx.ir.shape import Dim, Size, evaluate
from rlx.ops.base import Op
from rlx.testing.interpret import assert_close, check_op, make_node

kernels_too = True  # whether `check` also executes kernels: tests/ops/conftest.py


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Array:
    """Random values: normal ones for floats, all of -9..9 (or 0..9) for integers."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iub":
        return rng.integers(0 if dtype.kind == "u" else -9, 10, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def check(op: Op, *arrays: Array, static: tuple[int, ...] = (), symbolic: Op | None = None) -> tuple[Array, ...]:
    """Checks an op against its reference with fixed sizes and then with a symbol for each distinct size.

    `static`: inputs that keep fixed sizes; `symbolic`: the op to use there (with sizes given by `sym`). Also that the
    guards which the symbols ask for hold. Gives the reference's results.
    """
    expected = check_op(op, *arrays)
    shapes = [a.shape if n in static else tuple(map(sym, a.shape)) for n, a in enumerate(arrays)]
    extents = {f"s{n}": n for a in arrays for n in a.shape}
    check_op(symbolic or op, *arrays, shapes=shapes, extents=extents)
    node = make_node(symbolic or op, *((shape, a.dtype) for shape, a in zip(shapes, arrays, strict=True)))
    for guard in node.outputs[0].graph.guards:
        assert evaluate(guard.lhs, extents) == evaluate(guard.rhs, extents), guard
    if kernels_too:
        check_kernels(node, arrays, expected, extents)
    return expected


def check_kernels(node: Node, arrays: Sequence[Array], expected: Sequence[Array], extents: Mapping[str, int]) -> None:
    """Checks the kernels of an op, executed by the device "interp", against the results of its reference."""
    graph = node.outputs[0].graph
    for number, value in enumerate(node.outputs):
        graph.output(value, f"y{number}")
    model = rlx.compile(graph, device="interp")
    for name in graph.dims():
        with suppress(OptionError, NameNotFound):
            model.set_extent(name, extents[name])
    for number, (got, want) in enumerate(zip(model.run(list(arrays)), expected, strict=True)):
        assert_close(got.numpy(), np.asarray(want), f"{node.op.op_name}: output {number} of its kernels")


def sym(n: int) -> Size:
    """A symbol that stands for the size n in `check` (1 stays 1)."""
    return 1 if n == 1 else Dim(f"s{n}", min(n, 1))


def ort(op_type: str, *arrays: Array | None, outputs: int = 1, opset: int = 22, **attributes: Any) -> list[Array]:
    """The outputs of one ONNX node as ONNX Runtime computes them; None is an absent optional input."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
    results = [f"y{i}" for i in range(outputs)]
    node = onnx.helper.make_node(op_type, names, results, **attributes)
    given = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in given.items()
    ]
    declared = [onnx.helper.make_empty_tensor_value_info(n) for n in results]
    graph = onnx.helper.make_graph([node], "one", inputs, declared)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, given)]
