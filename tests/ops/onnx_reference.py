"""One ONNX node as the onnx package's own reference evaluator computes it, for what ONNX Runtime does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from rlx.ir.graph import Array


def onnx_reference(
    op_type: str, *arrays: Array | None, outputs: int = 1, opset: int = 24, **attributes: Any
) -> list[Array]:
    """The outputs of one node; None is an absent optional input."""
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
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, given)]
