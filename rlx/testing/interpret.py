"""Evaluates the scalar code of `Op.lower` with NumPy, strictly: an independent check of every op on small shapes.

Beyond giving the values, it fails (AssertionError) where a code generator may do anything: a load out of bounds,
operands of mixed types, arithmetic in 16-bit floats, an integer division that is not guarded, or pieces that do not
tile the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.codegen.walked import sizes
from rlx.backends.interp.anchors import anchor_result
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.shape import Shape
from rlx.kernels.loops.evaluate import Evaluator
from rlx.kernels.lowering import (
    Lowered,
    Piece,
    accumulator,
    lower_node,
    out_vars,
)
from rlx.ops.base import Op

__all__ = ["assert_close", "check_op", "interpret", "interpret_decomposed", "interpret_graph", "make_node"]


def _assemble(pieces: Sequence[Piece], t: TensorType, run: Evaluator, acc: Array | None) -> Array:
    out = sizes(t.shape, run.extents)
    result, covered = np.zeros(out, t.dtype.numpy), np.zeros(out, np.int64)
    run.acc = acc
    for piece in pieces:
        shape, offset = sizes(piece.extents, run.extents), sizes(piece.offset, run.extents)
        assert all(p >= 0 and p + n <= size for p, n, size in zip(offset, shape, out, strict=True))
        assert piece.expr.dtype is t.dtype, f"a piece gives {piece.expr.dtype} for {t}"
        box = tuple(slice(p, p + n) for p, n in zip(offset, shape, strict=True))
        result[box] = run.over(piece.expr, shape, out_vars(len(out)))
        covered[box] += 1
    assert (covered == 1).all(), "the pieces do not cover the output exactly once"
    return result


def interpret(
    node: Node, arrays: Sequence[Array], extents: Mapping[str, int] | None = None, *, lowered: Lowered | None = None
) -> tuple[Array, ...]:
    """The outputs of one node from its inputs' arrays: its `lower` evaluated, or else its `decompose`, or `reference`.

    Where an anchor comes with a generic expression, both are computed and must agree. `extents`: the symbols' values.
    """
    extents = extents or {}
    lowered = lowered or lower_node(node)
    if lowered is None:
        assert isinstance(node.op, Op)
        if node.op.decompose is not None:
            return interpret_decomposed(node, arrays, extents)
        found = node.op.at(extents).reference(*arrays)
        return tuple(found) if isinstance(found, tuple) else (np.asarray(found),)
    run = Evaluator(dict(zip(node.inputs, arrays, strict=True)), extents)
    with np.errstate(all="ignore"):
        if lowered.anchor is None:
            made = zip(lowered.outputs, node.outputs, strict=True)
            return tuple(_assemble(pieces, v.type, run, None) for pieces, v in made)
        ((pieces,), (out,)) = lowered.outputs, node.outputs
        acc = anchor_result(lowered.anchor, sizes(out.shape, extents), accumulator(out.dtype), run)
        result = _assemble(pieces, out.type, run, acc)
        if lowered.generic is not None:
            generic = run.over(lowered.generic, result.shape, out_vars(result.ndim))
            assert_close(result, generic, "anchor against its generic expression", None)
        return (result,)


def interpret_graph(graph: Graph, arrays: Sequence[Array], extents: Mapping[str, int] | None = None) -> list[Array]:
    """The outputs of a graph of plain nodes from the arrays of its inputs, node by node."""
    known: dict[Value, Array] = dict(zip(graph.inputs, arrays, strict=True))
    known |= {v: v.data for v in (*graph.constants, *graph.params) if v.data is not None}
    for node in graph.nodes:
        known |= zip(node.outputs, interpret(node, [known[v] for v in node.inputs], extents), strict=True)
    return [known[o.value] for o in graph.outputs]


def interpret_decomposed(
    node: Node, arrays: Sequence[Array], extents: Mapping[str, int] | None = None
) -> tuple[Array, ...]:
    """The outputs of one node by way of its `decompose`, whose results must have the types that `infer` promised."""
    assert isinstance(node.op, Op)
    assert node.op.decompose is not None
    graph = Graph("decomposed")
    inputs = [graph.input(f"x{i}", v.shape, v.dtype) for i, v in enumerate(node.inputs)]
    results = node.op.decompose(graph, *inputs)
    for i, value in enumerate(results if isinstance(results, tuple) else (results,)):
        assert value.type == node.outputs[i].type, f"decomposes to {value.type}, expected {node.outputs[i].type}"
        graph.output(value, f"y{i}")
    return tuple(interpret_graph(graph, arrays, extents))


def make_node(op: Op, *shapes_and_dtypes: tuple[Shape, Any]) -> Node:
    """A node of a fresh graph whose inputs have these (shape, dtype)s."""
    graph = Graph(op.op_name)
    values = [graph.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes_and_dtypes)]
    graph.add(op, *values)
    return graph.nodes[0]


def check_op(
    op: Op,
    *arrays: Array,
    shapes: Sequence[Shape] | None = None,
    extents: Mapping[str, int] | None = None,
    rtol: float | None = None,
) -> tuple[Array, ...]:
    """Checks `infer`, `lower` and `decompose` of an op against its `reference` on these arrays; gives the reference's.

    `shapes` declares the inputs with symbolic sizes whose values are `extents`; without it they are static.
    """
    extents = extents or {}
    declared = shapes if shapes is not None else [a.shape for a in arrays]
    node = make_node(op, *((tuple(s), a.dtype) for s, a in zip(declared, arrays, strict=True)))
    with np.errstate(all="ignore"):
        found = op.at(extents).reference(*arrays)
    expected = tuple(found) if isinstance(found, tuple) else (found,)
    assert len(expected) == len(node.outputs)
    for value, array in zip(node.outputs, expected, strict=True):
        assert dtype_of(array.dtype) is value.dtype, f"reference gives {array.dtype}, infer {value.type}"
        assert np.shape(array) == sizes(value.shape, extents), f"reference gives {array.shape}, infer {value.type}"
    if op.lower is not None:
        for got, want in zip(interpret(node, arrays, extents), expected, strict=True):
            assert_close(got, np.asarray(want), f"{op.op_name}: lower against reference", rtol)
    if op.decompose is not None:
        for got, want in zip(interpret_decomposed(node, arrays, extents), expected, strict=True):
            assert_close(got, np.asarray(want), f"{op.op_name}: decompose against reference", rtol)
    return tuple(np.asarray(a) for a in expected)


TOLERANCES = {
    "f64": 1e-12, "f32": 2e-5, "f16": 4e-3, "bf16": 3e-2, "f8e4m3": 0.2, "f8e4m3fnuz": 0.2, "f8e5m2": 0.4,
    "f8e5m2fnuz": 0.4, "f8e8m0": 1.5, "f4e2m1": 0.8,
}  # fmt: skip


def assert_close(got: Array, want: Array, what: str, rtol: float | None = None) -> None:
    """AssertionError unless type and elements agree, floats within a tolerance of their type."""
    dtype = dtype_of(want.dtype)
    assert dtype_of(got.dtype) is dtype, f"{what}: {got.dtype} and {want.dtype}"
    if dtype.is_float:
        tolerance = TOLERANCES[dtype.name] if rtol is None else rtol
        a, b = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)
