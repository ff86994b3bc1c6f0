"""Passes on against passes off, over 20,000 random cones of element-wise nodes (`cones.py`).

Both graphs run by the reference in their own type, and with every float in NumPy's widest: there what is left of a
difference is a wrong function, or comes from rounded numbers. The tolerance is what rounding does: the spread of
results when each node errs by a rounding of its own type, times `FACTOR`. What ONNX can say is held to onnx's own
evaluator too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from cones import MANTISSA, Cone, points, random_cone, widely
from onnx.reference import ReferenceEvaluator

from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph
from rlx.ir.verify import verify
from rlx.ops.elementwise import Cast, Clip
from rlx.passes import run_passes

BLOCK = 100
FACTOR = 8.0
TRIALS = 6


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", range(200))
def test_passes_keep_what_cones_compute(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        check(seed)


def check(seed: int) -> None:
    cone = random_cone(seed)
    after = run_passes(cone.graph)
    verify(after)
    x = points(cone, cone.graph, after)
    text = f"cone {seed}\n{cone.graph}\nafter the passes\n{after}"
    plain, passed = (run_graph(g, {"x": x})["y"] for g in (cone.graph, after))
    if DTYPES[cone.dtype].is_integer:
        np.testing.assert_array_equal(passed, plain, err_msg=text)
        return
    allowed = Allowed(cone, x)
    wide, over = widely(after, x)
    allowed.over |= over
    allowed.hold(wide, [allowed.exact, plain], f"in NumPy's widest type: {text}")
    with np.errstate(over="ignore"):
        function = allowed.exact.astype(plain.dtype)
    allowed.hold(passed, [plain, function], text)  # where a step overflows in its type, the function's value too
    theirs = by_onnx(cone.graph, x)
    if theirs is not None:
        allowed.hold(np.where(np.isfinite(theirs), theirs, plain), [wide, plain], f"as onnx evaluates it: {text}")


class Allowed:
    """What rounding may change at each point."""

    def __init__(self, cone: Cone, x: Array) -> None:
        self.cone, self.x = cone, x
        self.exact, self.over = widely(cone.graph, x)
        self.rng = np.random.default_rng(0)
        self.tiny = float(np.finfo(DTYPES[cone.dtype].numpy).smallest_subnormal)
        self.trials: list[Array] = []
        self.more(TRIALS)

    def more(self, count: int) -> None:
        self.trials += [widely(self.cone.graph, self.x, self.rng)[0] for _ in range(count)]

    def misses(self, found: Array, wanted: list[Array]) -> Array:
        with np.errstate(all="ignore"):
            spread = np.max([np.nan_to_num(abs(t - self.exact), nan=0) for t in self.trials], axis=0)
            hits = [self.near(found, w, spread) for w in wanted] + [self.near(found, t, 0) for t in self.trials]
        return np.flatnonzero(~np.any(hits, axis=0) & ~self.over)

    def near(self, a: Array, b: Array, spread: Array | float) -> Array:
        rounding = np.nan_to_num(abs(b), posinf=0) * 2.0 ** -MANTISSA[self.cone.dtype] + 4 * self.tiny
        return np.asarray((abs(a - b) <= FACTOR * (rounding + spread)) | (a == b) | (np.isnan(a) & np.isnan(b)))

    def hold(self, found: Array, wanted: list[Array], text: str) -> None:
        """Fails where what is found is none of what is wanted; at a jump more trials see both of its sides."""
        found, wanted = found.astype(np.longdouble), [w.astype(np.longdouble) for w in wanted]
        if self.misses(found, wanted).size:
            self.more(64)
        bad = self.misses(found, wanted)
        if bad.size:
            at = bad[0]
            values = " or ".join(repr(float(w[at])) for w in wanted)
            pytest.fail(
                f"{text}\nx = {float(self.x[at])!r}: {float(found[at])!r} instead of {values} ({bad.size} points)"
            )


# ---- as ONNX says it

SAME = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "maximum": "Max",
    "minimum": "Min",
    "pow": "Pow",
    "less": "Less",
    "less_equal": "LessOrEqual",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "where": "Where",
    "not": "Not",
    "neg": "Neg",
    "abs": "Abs",
    "sign": "Sign",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "tanh": "Tanh",
    "erf": "Erf",
    "sigmoid": "Sigmoid",
    "floor": "Floor",
    "ceil": "Ceil",
    "round": "Round",
    "identity": "Identity",
    "relu": "Relu",
    "sin": "Sin",
    "cos": "Cos",
    "atan": "Atan",
    "asinh": "Asinh",
    "atanh": "Atanh",
    "softplus": "Softplus",
    "softsign": "Softsign",
    "elu": "Elu",
    "leaky_relu": "LeakyRelu",
    "hard_sigmoid": "HardSigmoid",
}

F32_ONLY = ("erf", "leaky_relu", "elu", "hard_sigmoid")  # in onnx's evaluator, or by the type of attributes


def by_onnx(graph: Graph, x: Array) -> Array | None:
    """The output as onnx's evaluator computes the graph in f64, or None where it has an op that ONNX has not."""
    names = {value: f"v{i}" for i, value in enumerate([*graph.inputs, *graph.constants])}
    fixed = [
        onnx.numpy_helper.from_array(np.asarray(c.data).astype(np.float64), names[c])
        for c in graph.constants
        if c.data is not None
    ]
    nodes = []
    for node in graph.nodes:
        (out,) = node.outputs
        names[out] = f"v{len(names)}"
        inputs = [names[v] for v in node.inputs]
        attributes: dict[str, Any] = {}
        match node.op:
            case Cast():
                return None
            case Clip(lo=lo, hi=hi):
                kind = out.dtype.numpy
                with np.errstate(over="ignore"):
                    ends = [None if n is None else np.asarray(n).astype(kind).astype(np.float64) for n in (lo, hi)]
                inputs += ["" if e is None else f"{names[out]}.{i}" for i, e in enumerate(ends)]
                fixed += [onnx.numpy_helper.from_array(e, inputs[1 + i]) for i, e in enumerate(ends) if e is not None]
                op_type = "Clip"
            case op if op.op_name in SAME and not (out.dtype.name == "f64" and op.op_name in F32_ONLY):
                op_type, attributes = SAME[op.op_name], op.attributes()
            case _:
                return None
        nodes.append(onnx.helper.make_node(op_type, inputs, [names[out]], **attributes))
    kind = onnx.TensorProto.DOUBLE
    ends_of = [onnx.helper.make_tensor_value_info(n, kind, None) for n in ("v0", names[graph.outputs[0].value])]
    made = onnx.helper.make_graph(nodes, "cone", ends_of[:1], ends_of[1:], fixed)
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    with np.errstate(all="ignore"):
        (y,) = ReferenceEvaluator(model).run(None, {"v0": x.astype(np.float64)})
    return np.broadcast_to(np.asarray(y, np.float64), x.shape)
