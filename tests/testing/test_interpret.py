"""The interpreter of lowered code refuses what a code generator may not be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.kernels.lowering import Lowered, Lowering, Operand
from rlx.ops.elementwise import Identity
from rlx.testing.interpret import interpret, make_node

Body = Callable[[Lowering, Operand], Lowered]


def run(body: Body, x: np.ndarray) -> np.ndarray:
    """Evaluates a lowering over one input whose result has the input's type."""
    node = make_node(Identity(), (x.shape, x.dtype))
    lowered = body(Lowering((node.outputs[0].type,)), Operand(node.inputs[0]))
    return interpret(node, [x], lowered=lowered)[0]


X = np.arange(4, dtype=np.float32)


def test_where_reads_nothing_outside() -> None:
    """A shifted load is fine where `where` guards it, and gives 0 outside."""
    got = run(lambda k, x: k.map(lambda i: x(i - 1, where=i >= 1)), X)
    np.testing.assert_array_equal(got, [0, 0, 1, 2])


def pieces_with_gap(k: Lowering, x: Operand) -> Lowered:
    return k.pieces([((0,), (3,), x)])


WRONG: dict[str, tuple[Body, Any, str]] = {
    "out of bounds": (lambda k, x: k.map(lambda i: x(i + 1)), X, "out of bounds"),
    "unused branch out of bounds": (lambda k, x: k.map(lambda i: k.select(i < 3, x(i + 1), 0)), X, "out of bounds"),
    "16-bit arithmetic": (lambda k, x: k.map(lambda i: x(i) + x(i)), X.astype(np.float16), "widen"),
    "division by 0": (lambda k, x: k.map(lambda i: k.call("idiv", x(i), x(i))), X.astype(np.int32), "idiv by 0"),
    "overflowing division": (
        lambda k, x: k.map(lambda i: k.call("irem", x(i), -1)),
        np.array([-128], np.int8),
        "overf",
    ),
    "mixed types": (lambda k, x: k.map(lambda i: k.call("add", x(i), i)), X, "add of"),
    "integer exp": (lambda k, x: k.map(lambda i: k.call("exp", x(i))), X.astype(np.int32), "exp of int32"),
    "unknown function": (lambda k, x: k.map(lambda i: k.call("frobnicate", x(i))), X, "frobnicate"),
    "wrong result type": (lambda k, x: k.map(lambda i: k.call("isnan", x(i), dtype=DTYPES["f32"])), X, "declared"),
    "gap": (pieces_with_gap, X, "exactly once"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_refused(name: str) -> None:
    body, x, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        run(body, x)


def test_checks_stop_the_run() -> None:
    """A failed index check raises what a run raises, and shows the index."""

    def shifted(k: Lowering, x: Operand) -> Lowered:
        return k.map(lambda i: x(k.checked_index(i + 1, 4)))

    with pytest.raises(ExecutionError, match="index: 4"):
        run(shifted, X)
