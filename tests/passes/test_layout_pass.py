"""Moves of elements are merged or cancelled, and results stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import B, N, checked, node_of, ops, sources

import rlx.ops as o
from rlx.ir.graph import Graph, Value
from rlx.passes.dce import dce
from rlx.passes.layout import layout

RULES: list[tuple[str, Callable[[Value], Value], list[str]]] = [
    ("transpose and back", lambda x: o.transpose(o.transpose(x, (2, 0, 1)), (1, 2, 0)), []),
    ("two transposes", lambda x: o.transpose(o.transpose(x, (2, 0, 1)), (2, 0, 1)), ["transpose"]),
    ("transpose without perm", lambda x: o.transpose(o.transpose(x)), []),
    ("identity transpose", lambda x: o.transpose(x, (0, 1, 2)), []),
    ("unsqueeze, squeeze", lambda x: o.squeeze(o.unsqueeze(x, (1,)), (1,)), []),
    ("unsqueeze", lambda x: o.unsqueeze(x, (1,)), ["reshape"]),
    ("two reshapes", lambda x: o.reshape(o.reshape(x, (N * 12,)), (N, 2, 6)), ["reshape"]),
    ("reshape and back", lambda x: o.reshape(o.reshape(x, (N, 12)), (N, 3, 4)), []),
    ("axes of size 1 move", lambda x: o.transpose(o.unsqueeze(x, (0,)), (1, 0, 2, 3)), ["reshape"]),
    ("expand to the same", lambda x: o.expand(x, (N, 3, 4)), []),
    ("expand by ones", lambda x: o.expand(x, (1, N, 3, 4)), ["reshape"]),
    ("whole slice", lambda x: o.slice(x, (0, 0, 0), (N, 3, 4), (1, 1, 1)), []),
    ("concat of one", lambda x: o.concat(x, axis=1), []),
    ("no pads", lambda x: o.pad(x, (0,) * 6), []),
    ("tile once", lambda x: o.tile(x, (1, 1, 1)), []),
    ("split into one", lambda x: o.split(x, 1, (3,)), []),
    ("sum over one element", lambda x: o.reduce_sum(o.unsqueeze(x, (1,)), (1,), False), []),
    (
        "transpose of joined axes",
        lambda x: o.reshape(o.transpose(o.reshape(o.unsqueeze(x, (0,)), (N, 3, 4)), (0, 2, 1)), (1, N, 4, 3)),
        ["transpose", "reshape"],
    ),
]


@pytest.mark.parametrize("build, expected", [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_rule(build: Callable[[Value], Value], expected: list[str]) -> None:
    g = Graph()
    g.output(build(g.input("x", (N, 3, 4))), "y")
    assert ops(checked(g, layout, dce)) == expected


def test_heads_joined_to_the_batch_and_back_are_one_transpose() -> None:
    g = Graph()
    x = g.input("x", (B, 12, N, 32))
    joined = o.reshape(x, (B * 12, N, 32))
    g.output(o.reshape(o.transpose(joined, (0, 2, 1)), (B, 12, 32, N)), "y")
    after = checked(g, layout, dce)
    assert ops(after) == ["transpose"]
    assert after.nodes[0].op.perm == (0, 1, 3, 2)
    assert sources(after) == sources(g)


def test_axes_that_a_reshape_cuts_are_left() -> None:
    g = Graph()
    x = g.input("x", (4, 6))
    g.output(o.reshape(o.transpose(o.reshape(x, (3, 8)), (1, 0)), (4, 6)), "y")
    assert ops(checked(g, layout, dce)) == ["reshape", "transpose", "reshape"]


@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (-1, -1)])
def test_slice_of_slice(steps: tuple[int, int]) -> None:
    g = Graph()
    x = g.input("x", (12,))
    first = o.slice(x, (10 if steps[0] < 0 else 1,), (5,), (steps[0],))
    g.output(o.slice(first, (4 if steps[1] < 0 else 1,), (3,), (steps[1],)), "y")
    assert ops(checked(g, layout, dce)) == ["slice"]


def test_zeros_padded_before_a_convolution_are_its_pads() -> None:
    g = Graph()
    w = g.param("w", data=np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32))
    padded = o.pad(g.input("x", (1, 3, 8, 8)), (0, 0, 1, 2, 0, 0, 3, 4))
    g.output(o.conv(padded, w, strides=(2, 1), pads=(0, 1, 0, 1)), "y")
    after = checked(g, layout, dce)
    assert ops(after) == ["conv"]
    assert node_of(after, "conv").op.pads == (1, 3, 3, 5)


@pytest.mark.parametrize("pads, value", [((0, 1, 0, 0, 0, 0, 0, 0), 0), ((0, 0, 1, 1, 0, 0, 1, 1), 1.0)])
def test_other_pads_stay_before_a_convolution(pads: tuple[int, ...], value: float) -> None:
    g = Graph()
    w = g.param("w", (2, 3 + pads[1], 3, 3))
    g.output(o.conv(o.pad(g.input("x", (1, 3, 8, 8)), pads, value), w), "y")
    assert ops(checked(g, layout)) == ["pad", "conv"]


def test_bias_and_activation_move_before_the_reshape_of_a_product() -> None:
    g = Graph()
    x, w, b = g.input("x", (N * 6, 8)), g.param("w", (8, 16)), g.param("b", (16,))
    g.output(o.relu(o.reshape(x @ w, (N, 6, 16)) + b), "y")
    assert ops(checked(g, layout, dce)) == ["matmul", "add", "relu", "reshape"]


def test_reshape_that_others_read_stays_where_it_is() -> None:
    g = Graph()
    x, w, b = g.input("x", (N * 6, 8)), g.param("w", (8, 16)), g.param("b", (16,))
    r = o.reshape(x @ w, (N, 6, 16))
    g.output(r + b, "y")
    g.output(r, "z")
    assert ops(checked(g, layout)) == ["matmul", "reshape", "add"]
