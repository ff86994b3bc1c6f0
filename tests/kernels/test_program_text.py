"""The printed program says what a kernel computes, unambiguously and at a bearable length."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_targets import Everything

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.kernels.expr import I64, Acc, Apply, Cast, Check, Expr, Load, Reduce, Select, SizeOf, Var, const
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.kernels.text import format_expr, print_program
from rlx.ops import contract, layout
from rlx.ops import elementwise as ew
from rlx.ops.base import apply

F32 = DTYPES["f32"]
I, J = out_vars(2)
X = Buffer("x", "input", (4, 8), F32)
x = Load(X, (I, J), F32)
R = Var("r0")


@pytest.mark.parametrize(
    "expr, text",
    [
        (x + x * 2.0, "x[i0, i1] + x[i0, i1] * 2"),
        ((x + x) * 2.0, "(x[i0, i1] + x[i0, i1]) * 2"),
        (x - (x - x), "x[i0, i1] - (x[i0, i1] - x[i0, i1])"),
        ((x - x) - x, "x[i0, i1] - x[i0, i1] - x[i0, i1]"),
        (-(x + 1.0), "-(x[i0, i1] + 1)"),
        (x * -1.5, "x[i0, i1] * -1.5"),
        (x / (x * x), "x[i0, i1] / (x[i0, i1] * x[i0, i1])"),
        (I * 3 + J // 2 % 5, "i0 * 3 + i1 // 2 % 5"),
        (~((I < 3) & (J >= 2)), "~(i0 < 3 & i1 >= 2)"),
        (Apply("eq", (I < J, J < I), DTYPES["bool"]), "(i0 < i1) == (i1 < i0)"),
        (Select(I < 3, x, const(0, F32)), "select(i0 < 3, x[i0, i1], 0)"),
        (Load(X, (I - 1, J), F32, I >= 1), "x[i0 - 1, i1 | i0 >= 1]"),
        (Cast(x, I64), "i64(x[i0, i1])"),
        (Apply("max", (x, const(0, F32)), F32), "max(x[i0, i1], 0)"),
        (Apply("bitcast", (x,), DTYPES["i32"]), "bitcast_i32(x[i0, i1])"),
        (Reduce("add", (R,), (Dim("n"),), Load(X, (I, R), F32), F32), "sum_{r0<n}(x[i0, r0])"),
        (Reduce("argmax", (R,), (8,), Load(X, (I, R), F32), I64, last=True), "argmax_last_{r0<8}(x[i0, r0])"),
        (SizeOf(Dim("n") * 2 + 1) * I, "(2*n + 1) * i0"),
        (Acc(F32) + x, "acc + x[i0, i1]"),
        (Check(I < 3, I, "index", I), "checked(i0, i0 < 3)"),
        (const(float("-inf"), F32), "-inf"),
        (const(True, DTYPES["bool"]), "True"),
    ],
)  # fmt: skip
def test_expressions(expr: Expr, text: str) -> None:
    assert format_expr(expr) == text


def test_shared_parts_keep_the_text_short() -> None:
    """40 doublings would be 2^40 terms if each use were written out."""
    e: Expr = x
    for _ in range(40):
        e = e * e + e
    y = Buffer("y", "arena", (4, 8), F32)
    text = print_program(Program("p", inputs=[X], run=[Kernel("k", (Store(y, (4, 8), (I, J), e),))]))
    assert len(text) < 4000
    assert "t0 = " in text


def test_program() -> None:
    n = Dim("n", 1, 64, multiple=2)
    g = Graph("mlp")
    a, w = g.input("a", (n, 6)), g.param("w", (6, 5))
    half = g.constant(np.arange(5, dtype=np.float32), name="c")
    h = g.add(contract.MatMul(), a, w, name="h", provenance=["Gemm_0"])[0]
    h = g.add(ew.Add(), h, half, name="y", provenance=["Add_1"])[0]
    g.output(apply(layout.Reshape((n * 5,)), h, name="flat"), "out")
    assert print_program(fuse(g, Everything())) == (
        "program mlp\n"
        "  dim n = 1..64 multiple 2\n"
        "  input    a: f32[n, 6]\n"
        "  param    w: f32[6, 5]\n"
        "  const    c: f32[5]\n"
        "  arena    y: f32[n, 5]\n"
        "  view     flat: f32[5*n] = y + 0 B\n"
        "run\n"
        '  0 contract matmul+add (a f32[n, 6], w f32[6, 5], c f32[5]) -> y f32[n, 5]  from "Gemm_0", "Add_1"\n'
        "    m = n, n = 5, k = 6\n"
        "    a = a[i0, k]\n"
        "    b = w[k, i1]\n"
        "    y[i0, i1] = acc + c[i1]\n"
        "output out = flat\n"
    )


def test_pieces_prepare_and_updates() -> None:
    g = Graph("pieces")
    a, s = g.input("a", (2, 3)), g.state("s", (4, 3))
    w = g.param("w", (2, 3))
    both = apply(layout.Concat(0), apply(ew.Exp(), a), apply(ew.Exp(), w), name="both")
    g.update(s, both)
    text = str(fuse(g, Everything()))
    assert "prepare\n  0 map exp (w f32[2, 3]) -> t f32[2, 3]" in text
    assert "both[i0, i1] over [2, 3] = exp(a[i0, i1])" in text
    assert "both[i0 + 2, i1] over [2, 3] = t[i0, i1]" in text
    assert "update s = both" in text
