"""Weights stored as small integers become dequantize, however the arithmetic was written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import N, arrays_for, checked, node_of, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, Value
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.raising.raise_encoding import raise_encoding

RNG = np.random.default_rng(0)


def weights(shape: tuple[int, ...], dtype: str = "int8") -> Array:
    return RNG.integers(0 if dtype == "uint8" else -100, 100, shape).astype(dtype)


def scales(shape: tuple[int, ...]) -> Array:
    return RNG.uniform(0.5, 1.5, shape).astype(np.float32)


Build = Callable[[Value, Value], Value]  # from the integers and the scale


def DIVIDED(q: Value, s: Value) -> Value:
    return o.cast(q, "f32") / s


FORMS: list[tuple[str, tuple[int, ...], Build, tuple[object, ...]]] = [
    ("one scale", (), lambda q, s: o.cast(q, "f32") * s, (None, 0)),
    ("one scale of rank 1", (1,), lambda q, s: s * o.cast(q, "f32"), (None, 0)),
    ("by row", (6, 1), lambda q, s: o.cast(q, "f32") * s, (0, 0)),
    ("by column", (4,), lambda q, s: o.cast(q, "f32") * s, (1, 0)),
    ("divided", (1, 4), DIVIDED, (1, 0)),
    ("transposed before the scale", (6,), lambda q, s: o.transpose(o.cast(q, "f32"), (1, 0)) * s, (1, 0)),
    ("with a zero point", (4,), lambda q, s: (o.cast(q, "f32") - 3.0) * s, (1, 0)),
    ("zero point, then transposed", (6,), lambda q, s: o.transpose(o.cast(q, "f32") - 3.0, (1, 0)) * s, (1, 0)),
    ("by block", (6, 2, 1), lambda q, s: o.reshape(o.cast(q, "f32"), (6, 2, 2)) * s, (2, 2)),
]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("shape, build, place", [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form(shape: tuple[int, ...], build: Build, place: tuple[object, ...], dtype: str) -> None:
    g = Graph()
    q, s = g.param("q", data=weights((6, 4), dtype)), scales(shape)
    w = build(q, g.param("s", data=s) if build is not DIVIDED else g.constant(s))
    g.output(g.input("x", w.shape) + w, "y")
    after = checked(g, raise_encoding, dce)
    op = node_of(after, "dequantize").op
    assert (op.axis, op.block) == place
    assert "cast" not in ops(after)
    assert not {"sub", "div"} & set(ops(after))
    assert sources(after) >= sources(g) - {"n0"}


def test_zero_point_by_row_in_the_type_of_the_data() -> None:
    g = Graph()
    q, s = g.param("q", data=weights((6, 4), "uint8")), g.param("s", data=scales((6, 1)))
    zero = g.param("zero", data=weights((6, 1), "uint8"))
    g.output((o.cast(q, "f32") - o.cast(zero, "f32")) * s + g.input("x", (4,)), "y")
    assert ops(checked(g, raise_encoding, dce)) == ["reshape", "reshape", "dequantize", "add"]


def test_constants_are_raised_before_they_are_folded() -> None:
    g = Graph()
    w = o.cast(g.constant(weights((64, 64))), "f32") * g.constant(scales((64,)))
    g.output(g.input("x", (N, 64)) @ w, "y")
    after = run_passes(g)
    assert ops(after) == ["dequantize", "matmul"]
    assert sorted(c.dtype.name for c in after.constants) == ["f32", "i8"]


@pytest.mark.parametrize(
    "build",
    [
        lambda g, q, s: o.cast(q, "f64") * o.cast(s, "f64"),  # dequantize computes in f32
        lambda g, q, s: (o.cast(q, "f32") - 0.5) * s,  # not a zero point of the type
        lambda g, q, s: (o.cast(q, "f32") - g.param("z", (4,))) * s,  # may be any number
        lambda g, q, s: o.cast(q, "f32") * g.input("t", (4,)),  # not a weight's scale
        lambda g, q, s: o.cast(g.input("r", (6, 4), "i8"), "f32") * s,  # not a weight
        lambda g, q, s: o.cast(q, "f32") * g.param("m", (6, 4)),  # no scale at all
        lambda g, q, s: o.cast(q, "i32") * g.constant(np.int32(3)),  # integers
        lambda g, q, s: o.cast(q, "f32") / s,  # may be set to what f32 has no inverse of
        lambda g, q, s: o.cast(q, "f32") / g.constant(np.float32(1e-40)),
        lambda g, q, s: o.cast(q, "f32") / g.constant(np.float32(0)),
    ],
)
def test_what_is_not_such_a_weight_stays(build: Callable[[Graph, Value, Value], Value]) -> None:
    g = Graph()
    q, s = g.param("q", data=weights((6, 4))), g.param("s", data=scales((4,)))
    g.output(build(g, q, s), "y")
    assert "dequantize" not in ops(checked(g, raise_encoding))


def test_rows_are_gathered_from_the_stored_integers() -> None:
    """The table stays int8: only what is gathered is decoded."""
    g = Graph()
    table = o.cast(g.param("q", data=weights((1000, 8))), "f32") * g.param("s", data=scales((1000, 1)))
    g.output(o.gather(table, g.input("i", (N,), "i64")), "y")
    after = checked(g, run_passes)
    gather = node_of(after, "gather")
    assert gather.inputs[0].node.op.op_name == "dequantize"
    assert gather.inputs[0].node.inputs[0].kind == "param"


def test_params_can_still_be_set() -> None:
    g = Graph()
    q, s = g.param("q", data=weights((6, 4))), g.param("s", data=scales((4,)))
    g.output(g.input("x", (2, 6)) @ (o.cast(q, "f32") * s), "y")
    inputs, _ = arrays_for(g)
    new = {"q": weights((6, 4)), "s": scales((4,))}
    y = run_graph(run_passes(g), inputs, new)["y"]
    np.testing.assert_allclose(y, run_graph(g, inputs, new)["y"], rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-5, 0.03, 6e4])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_divisors_whose_inverse_their_type_does_not_have(dtype: str, scale: float) -> None:
    """1 / 1e-5 is infinite in f16; weights of 0 stay 0."""
    g = Graph()
    divisor = g.constant(np.asarray(scale, DTYPES[dtype].numpy))
    g.output(o.cast(g.param("q", data=np.arange(-4, 4, dtype=np.int8)), dtype) / divisor, "y")
    after = checked(g, raise_encoding, dce)
    assert "dequantize" in ops(after)
    assert np.isfinite(run_graph(after, {})["y"].astype(np.float32)[4])
