"""Algebraic rules: op lists before and after, results unchanged, and the cases where a rule must not apply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import checked, node_of, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.ir.graph import Graph, Value
from rlx.ops.layout import Full
from rlx.passes.algebra import algebra
from rlx.passes.dce import dce
from rlx.passes.layout import layout
from rlx.passes.match.patterns import is_positive, uniform

RULES: list[tuple[str, Callable[[Value], Value], list[str]]] = [
    ("x + -0", lambda x: x + -0.0, []),
    ("-0 + x", lambda x: -0.0 + x, []),
    ("(|x| + 0) * x", lambda x: (o.abs(x) + 0.0) * x, ["abs", "mul"]),
    ("x - 0", lambda x: x - 0.0, []),
    ("x * 1", lambda x: x * 1.0, []),
    ("x / 1", lambda x: x / 1.0, []),
    ("-0 - x", lambda x: -0.0 - x, ["neg"]),
    ("-(-x)", lambda x: o.neg(-x), []),
    ("x ** 1", lambda x: o.pow(x, 1.0), []),
    ("x ** 2", lambda x: o.pow(x, 2.0), ["mul"]),
    ("|x| ** 0.5", lambda x: o.pow(o.abs(x), 0.5), ["abs", "sqrt"]),
    ("1 / sqrt(|x|)", lambda x: 1.0 / o.sqrt(o.abs(x)), ["abs", "rsqrt"]),
    ("x / 4", lambda x: x / 4.0, ["mul"]),
    ("x * 2 * 3", lambda x: x * 2.0 * 3.0, ["mul"]),
    ("x / 3 / -7", lambda x: x / 3.0 / -7.0, ["mul"]),
    ("x ** -1", lambda x: o.pow(x, -1.0), ["reciprocal"]),
    (
        "(mean of squares + eps) ** -0.5",
        lambda x: o.pow(o.reduce_mean(x * x) + 1e-5, -0.5),
        ["mul", "reduce_mean", "add", "rsqrt"],
    ),
    ("x / 3 / 7", lambda x: x / 3.0 / 7.0, ["mul"]),
    ("2 * (x * 3)", lambda x: 2.0 * (x * 3.0), ["mul"]),
    ("x + 1 + 2", lambda x: x + 1.0 + 2.0, ["add"]),
    ("x - 1 - 2", lambda x: x - 1.0 - 2.0, ["add"]),
    ("identity", lambda x: o.identity(o.identity(x)), []),
    ("cast to its own type", lambda x: o.cast(x, "f32"), []),
    ("cast there and back", lambda x: o.cast(o.cast(x, "f64"), "f32"), []),
    ("max(x, 0)", lambda x: o.maximum(x, 0.0), ["relu"]),
    ("min(max(x, -1), 2)", lambda x: o.minimum(o.maximum(x, -1.0), 2.0), ["clip"]),
    ("clip of clip", lambda x: o.clip(o.clip(x, -1.0, 2.0), 0.0, 1.0), ["clip"]),
    ("relu of clip", lambda x: o.relu(o.clip(x, -1.0, 2.0)), ["clip"]),
    ("relu of relu", lambda x: o.relu(o.relu(x)), ["relu"]),
    ("clip(x, 0, inf)", lambda x: o.clip(x, 0.0, float("inf")), ["relu"]),
    ("x + 0.5 + 0.25", lambda x: x + 0.5 + 0.25, ["add"]),
    ("clip without limits", lambda x: o.clip(x, float("-inf"), float("inf")), []),
    ("where true", lambda x: o.where(x.graph.constant(True), x, x * 2.0), []),
    ("where false", lambda x: o.where(x.graph.constant(np.zeros((3, 4), bool)), x * 2.0, x), []),
    ("where of the same", lambda x: o.where(o.less(x, 0.0), x, x), []),
    ("where not", lambda x: o.where(o.not_(o.less(x, 0.0)), x, x * 3.0), ["less", "mul", "where"]),
    ("add of expand", lambda x: x + o.expand(x.graph.param("w", (4,)), (3, 4)), ["add"]),
]


@pytest.mark.parametrize("build, expected", [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_rule(build: Callable[[Value], Value], expected: list[str]) -> None:
    g = Graph()
    g.output(build(g.input("x", (3, 4))), "y")
    after = checked(g, algebra, dce)
    assert ops(after) == expected
    if len(expected) == 1 and len(g.nodes) > 1 and "where" not in expected and "expand" not in ops(g):
        assert sources(after) == sources(g)


KEPT: list[tuple[str, Callable[[Value], Value]]] = [
    ("x * 0 is NaN for NaN", lambda x: x * 0.0),
    ("-0 + 0 is 0", lambda x: x + 0.0),
    ("-0 - -0 is 0", lambda x: x - -0.0),
    ("0 - 0 is 0, not -0", lambda x: 0.0 - x),
    ("zeros of both signs", lambda x: x + x.graph.constant(np.array([-0.0, 0.0, 0.0, 0.0], np.float32))),
    ("the sum of the constants is infinite", lambda x: x + 3e38 + 3e38),
    ("-0 and -inf have other roots than powers", lambda x: o.pow(x, 0.5)),
    ("x - x is NaN for inf", lambda x: x - x),
    ("x / x is NaN for 0", lambda x: x / x),
    ("x * 4 may overflow", lambda x: x * 4.0 / 8.0),
    ("x / 3 may vanish", lambda x: x / 3.0 * 30.0),
    ("1 / x may vanish", lambda x: o.reciprocal(o.reciprocal(x))),
    ("x + inf - inf is NaN", lambda x: x + float("inf") - float("inf")),
    ("x + big - big rounds", lambda x: x + 12582912.0 - 12582912.0),
    ("x * tiny * tiny vanishes, x * (tiny * tiny) is denormal", lambda x: x * 1e-30 * 1e-10),
    ("x / 3 has no exact inverse", lambda x: x / 3.0),
    ("cast to half loses bits", lambda x: o.cast(o.cast(x, "f16"), "f32")),
    ("ranges that don't meet", lambda x: o.clip(o.clip(x, 0.0, 1.0), 2.0, 3.0)),
    ("a larger constant broadcasts", lambda x: x + x.graph.constant(np.zeros((2, 3, 4), np.float32))),
    ("x + 1 + 1e-10 is not 0 where x is -1", lambda x: o.log(x + 1.0 + 1e-10)),
    ("x + 1e8 + 1 rounds", lambda x: x + 1e8 + 1.0),
    ("max(x, -0) is not relu(x)", lambda x: o.maximum(x, -0.0)),
    ("clip with NaN, then a limit", lambda x: o.clip(o.clip(x, float("nan"), 1.0), 0.0, 2.0)),
    ("a limit with NaN behind it", lambda x: o.clip(o.clip(x, 0.0, 2.0), 1.0, float("nan"))),
    ("limits at the end of the type", lambda x: o.clip(x, -3.4028234663852886e38, 3.4028234663852886e38)),
    ("max with NaN", lambda x: o.maximum(x, float("nan"))),
]


@pytest.mark.parametrize("build", [k[1] for k in KEPT], ids=[k[0] for k in KEPT])
def test_kept(build: Callable[[Value], Value]) -> None:
    g = Graph()
    g.output(build(g.input("x", (3, 4))), "y")
    after = checked(g, algebra, dce)
    assert len(after.nodes) == len(g.nodes)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, -1e-45, 1e-38, 1.5, -2.0], np.float32)


@pytest.mark.parametrize("build", [r[1] for r in RULES] + [k[1] for k in KEPT], ids=[r[0] for r in (*RULES, *KEPT)])
def test_rules_hold_for_zeros_of_both_signs_infinities_and_nan(build: Callable[[Value], Value]) -> None:
    """As the reference evaluates the graph before and after, signs of zeros included; only rounding may differ."""
    g = Graph()
    g.output(build(g.input("x", (3, 4))), "y")
    weights = {v.name: np.ones(4, np.float32) for v in g.params}
    with np.errstate(all="ignore"):
        before, after = (run_graph(graph, {"x": SPECIAL.reshape(3, 4)}, weights)["y"] for graph in (g, dce(algebra(g))))
    np.testing.assert_allclose(after, before, rtol=3e-7, atol=3e-45)
    np.testing.assert_array_equal(np.signbit(after[after == 0]), np.signbit(before[after == 0]))


def test_integer_chains_wrap_and_divisions_stay() -> None:
    g = Graph()
    x = g.input("x", (3,), "i32")
    g.output(x * 70000 * 70000, "product")
    g.output(x + 2000000000 + 2000000000, "total")
    g.output(o.div(x * 3, 2), "quotient")
    after = checked(g, algebra, dce)
    assert ops(after) == ["mul", "add", "mul", "div"]


def test_scalar_params_are_not_constants() -> None:
    g = Graph()
    x, w = g.input("x", (3,)), g.param("w", data=np.ones((), np.float32))
    g.output(x * w, "y")
    assert ops(checked(g, algebra)) == ["mul"]


def test_names_of_results_stay() -> None:
    g = Graph()
    x = g.input("x", (3,))
    g.output(o.mul(o.mul(x, 2.0), 3.0, name="scaled"), "y")
    after = checked(g, algebra, dce)
    assert node_of(after, "mul").outputs[0].name == "scaled"


def test_powers_of_integers_by_floats_stay() -> None:
    """They are computed in f64 and cast back: no wrapping, and no more than 53 bits."""
    g = Graph()
    x = g.input("x", (3,), "i32")
    g.output(o.pow(x, g.constant(np.float32(2))), "square")
    g.output(o.pow(x, g.constant(np.int32(2))), "whole")
    assert ops(checked(g, algebra, dce)) == ["pow", "mul"]


def test_casts_by_way_of_a_float_wrap_nowhere() -> None:
    """-1 as u8 is 255, -1.0 as u8 is what a float out of range gives."""
    g = Graph()
    x, small = g.input("x", (3,), "i32"), g.input("small", (3,), "u8")
    g.output(o.cast(o.cast(x, "f64"), "u8"), "out of range")
    g.output(o.cast(o.cast(small, "f64"), "i32"), "in range")
    g.output(o.cast(o.cast(x, "i64"), "u8"), "wraps")
    assert ops(checked(g, algebra, dce)) == ["cast", "cast", "cast", "cast"]


def test_constants_are_what_their_type_holds() -> None:
    g = Graph()
    assert uniform(g.add(Full((3,), 0.1))[0]) == float(np.float32(0.1))


POSITIVE: list[tuple[str, Callable[[Graph], Value], bool]] = [
    ("|x|", lambda g: o.abs(g.input("x", (3,))), True),
    ("|least integer| wraps", lambda g: o.cast(o.abs(g.input("x", (3,), "i32")), "f32"), False),
    ("bytes", lambda g: o.cast(g.input("x", (3,), "u8"), "f32"), True),
    ("at least 0.5", lambda g: o.clip(g.input("x", (3,)), 0.5, 2.0), True),
    ("at least 0.5, at most -1", lambda g: o.clip(g.input("x", (3,)), 0.5, -1.0), False),
    ("a limit that f16 takes for 0", lambda g: o.clip(g.input("x", (3,), "f16"), 1e-9, None), False),
    ("an infinity as an integer", lambda g: o.cast(o.cast(o.abs(g.input("x", (3,))), "i32"), "f32"), False),
]


@pytest.mark.parametrize("build, expected", [p[1:] for p in POSITIVE], ids=[p[0] for p in POSITIVE])
def test_what_is_known_to_be_positive(build: Callable[[Graph], Value], expected: bool) -> None:
    assert is_positive(build(Graph())) is expected


def test_places_of_hostile_indices_are_found_soon_or_not_at_all() -> None:
    """Sums of a value with itself, one after the other, and constants whose differences leave 64 bits."""
    g = Graph("sums")
    x, i = g.input("x", (4, 3)), g.input("i", (2, 1), "i64")
    for _ in range(31):
        i = i + i
    g.output(o.gather_nd(x, i), "y")
    layout(g)
    g = Graph("far")
    ends = g.constant(np.array([[-(2**63)], [2**63 - 1]]))
    g.output(o.gather_nd(g.input("x", (4, 3)), ends * g.input("i", (2, 1), "i64")), "y")
    layout(g)
    rows = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "i": np.zeros((2, 1), np.int64)}
    np.testing.assert_array_equal(run_graph(g, rows)["y"], rows["x"][:1].repeat(2, 0))
