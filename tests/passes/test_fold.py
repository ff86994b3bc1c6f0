"""Folding computes what depends on constants only, and never makes a constant larger."""

from __future__ import annotations

import numpy as np
from pass_checks import N, checked, ops

import rlx.ops as o
from rlx.ir.graph import Graph
from rlx.ops.layout import SizeOf
from rlx.passes.dce import dce
from rlx.passes.fold import fold


def test_chain_of_constants_becomes_one_constant() -> None:
    g = Graph()
    x = g.input("x", (3,))
    c = g.constant([1.0, 2.0, 3.0])
    g.output(x * o.sqrt(c + 1.0), "y")
    after = checked(g, fold, dce)
    assert ops(after) == ["mul"]
    (constant,) = after.constants
    np.testing.assert_allclose(constant.data, np.sqrt([2, 3, 4]))


def test_result_larger_than_its_inputs_stays_an_op() -> None:
    g = Graph()
    g.output(g.input("x", (64, 64)) + o.expand(g.constant(np.ones((64, 1), np.float32)), (64, 64)), "y")
    assert ops(checked(g, fold, dce)) == ["expand", "add"]


def test_small_integers_are_not_unpacked() -> None:
    g = Graph()
    table = g.constant(np.ones((128, 64), np.int8))
    g.output(o.cast(table, "f32") + g.input("x", (64,)), "y")
    assert ops(checked(g, fold, dce)) == ["cast", "add"]


def test_params_and_sizes_of_the_run_are_not_folded() -> None:
    g = Graph()
    w = g.param("w", data=np.ones(3, np.float32))
    g.output(w + 1.0, "y")
    g.output(g.add(SizeOf(N))[0], "n")
    g.output(g.input("x", (N,)), "x")
    assert ops(checked(g, fold)) == ["add", "size_of"]


def test_known_size_is_a_constant() -> None:
    g = Graph()
    g.output(g.add(SizeOf(7))[0] * g.input("x", (), "i64"), "y")
    assert ops(checked(g, fold, dce)) == ["mul"]


def test_what_fails_is_left_for_the_run() -> None:
    g = Graph()
    g.output(o.div(g.constant([1, 2]), g.constant([1, 0])), "y")
    assert ops(fold(g)) == ["div"]
