"""Recurrent nets and control flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cliff_cases.base import MICROSOFT, SIZES, Array, Fixed, Net, Pick, cases, net, scalar


@cases(
    "LSTM",
    "GRU",
    "RNN",
    "DynamicQuantizeLSTM",
    size=(32, 1, 8, 128),
    hidden=[64, 8, 16, 128, 256],
    width=[64, 1, 16, 256],
    batch=[1, 4, 32],
    direction=["forward", "reverse", "bidirectional"],
)
def recurrent(p: Pick) -> Net:
    ways, gates, quantised = (
        1 + (p.direction == "bidirectional"),
        {"GRU": 3, "RNN": 1}.get(p.op, 4),
        p.op.startswith("Dyn"),
    )
    shapes = [(gates * p.hidden, p.width), (gates * p.hidden, p.hidden)]
    x = p.array(p.size, p.batch, p.width)
    attributes = {
        "hidden_size": p.hidden,
        "direction": p.direction,
        "outputs": 2,
        "work": p.size * p.batch * ways * sum(map(prod, shapes)),
    }
    if not quantised:
        return net(p.op, x, *(p.weights(ways, *s, low=-0.2, high=0.2) for s in shapes), **attributes)
    held = [p.weights(ways, s[1], s[0], dtype="i8") for s in shapes]
    scales = [p.weights(ways, low=0.001, high=0.002), Fixed(np.zeros(ways, np.int8))]
    return net(p.op, x, *held, None, None, None, None, None, *scales, *scales, domain=MICROSOFT, **attributes)


def body(
    nodes: Sequence[onnx.NodeProto],
    given: Sequence[tuple[str, int, Sequence[int] | None]],
    made: Sequence[str],
    held: Mapping[str, Array] | None = None,
) -> onnx.GraphProto:
    """A subgraph: its inputs with element types and shapes, and its outputs."""
    constants = [numpy_helper.from_array(a, n) for n, a in (held or {}).items()]
    return helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(*g) for g in given],
        [onnx.ValueInfoProto(name=n) for n in made],
        constants,
    )


F32, BOOL, I64 = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL, onnx.TensorProto.INT64


@cases("Loop", size=(64, 1, 16, 256, 1024, 4096), row=[64, 1, 1024], kind=["carry", "stack", "while", "characters"])
def loop(p: Pick) -> Net:
    node, count = helper.make_node, scalar(p.size, "i64")
    head: list[tuple[str, int, Sequence[int] | None]] = [("i", I64, []), ("c", BOOL, [])]
    if p.kind == "characters":  # one number of a vector in each round, looked up in a table
        nodes = [
            node("Gather", ["text", "i"], ["t"]),
            node("Gather", ["table", "t"], ["row"]),
            node("Add", ["s", "row"], ["o"]),
            node("Identity", ["c"], ["go"]),
        ]
        made = body(nodes, [*head, ("s", F32, [p.row])], ["go", "o", "t"])
        result = Net(
            inputs={"text": p.below(100, p.size)}, constants={"table": p.array(100, p.row)}, work=p.size * p.row
        )
        result.add("Loop", count, scalar(1, "bool"), np.zeros(p.row, np.float32), body=made, outputs=2)
        return result
    nodes = [node("Mul", ["s", "s"], ["q"]), node("Sub", ["q", "s"], ["o"])]
    nodes.append(node("Less", ["i", "most"], ["go"]) if p.kind == "while" else node("Identity", ["c"], ["go"]))
    made = body(
        nodes,
        [*head, ("s", F32, [p.row])],
        ["go", "o", *(["q"] if p.kind == "stack" else [])],
        {"most": np.array(p.size, np.int64)},
    )
    return net(
        "Loop",
        count,
        scalar(1, "bool"),
        p.array(p.row, low=0, high=1),
        body=made,
        outputs=len(made.output) - 1,
        work=p.size * p.row,
    )


@cases("Scan", size=(64, 1, 16, 256, 1024), row=[64, 1, 1024])
def scan(p: Pick) -> Net:
    nodes = [helper.make_node("Mul", ["s", "x"], ["o"]), helper.make_node("Add", ["o", "x"], ["y"])]
    made = body(nodes, [("s", F32, [p.row]), ("x", F32, [p.row])], ["o", "y"])
    return net(
        p.op,
        p.array(p.row),
        p.array(p.size, p.row, low=0.9, high=1.1),
        body=made,
        num_scan_inputs=1,
        outputs=2,
        work=p.size * p.row,
    )


@cases("If", size=SIZES)
def condition(p: Pick) -> Net:
    branches = [body([helper.make_node(op, ["data"], ["o"])], [], ["o"]) for op in ("Neg", "Exp")]
    result = Net(inputs={"data": p.array(p.size)})
    result.add("If", np.array(True), then_branch=branches[0], else_branch=branches[1])
    return result
