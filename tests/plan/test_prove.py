"""The proof of a program's plan: each of its rules has a test that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import I64, Expr, Load, const
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.plan.plan import MemoryPlan, SharedWeights, make_plan
from rlx.plan.prove import prove

F32 = DTYPES["f32"]


def kernel(target: Buffer, *operands: Buffer, backwards: bool = True) -> Kernel:
    (i,) = out_vars(1)
    at = const(15, I64) - i if backwards else i
    expr: Expr = Load(operands[0], (at,), F32)
    for operand in operands[1:]:
        expr = expr + Load(operand, (at,), F32)
    return Kernel(target.name, (Store(target, (16,), (i,), expr),))


X, W = Buffer("x", "input", (16,), F32), Buffer("w", "param", (16,), F32)
A, B, C, D = (Buffer(name, "arena", (16,), F32) for name in "abcd")
VIEW = Buffer("view", "arena", (8,), F32, root=D, offset=32)
PROGRAM = Program(
    "p",
    inputs=[X],
    params=[W],
    run=[kernel(A, X, W), kernel(B, A), kernel(C, B, backwards=False), kernel(D, A, C)],
    outputs=[("d", D), ("view", VIEW)],
)


def plan_with(**offsets: int) -> MemoryPlan:
    plan = make_plan(PROGRAM, {})
    named = {b.name: b for b in (A, B, C, D)}
    return replace(plan, offsets={**plan.offsets, **{named[name]: offset for name, offset in offsets.items()}})


def test_a_right_plan_passes() -> None:
    plan = make_plan(PROGRAM, {})
    assert plan.offsets[B] == plan.offsets[C]  # c is written over b
    prove(PROGRAM, plan, capacity=plan.arena)
    prove(PROGRAM, make_plan(PROGRAM, {}, guard=8), guard=8)


def test_1_what_is_read_has_a_place() -> None:
    plan = make_plan(PROGRAM, {})
    with pytest.raises(CompileError, match="%c has no place"):
        prove(PROGRAM, replace(plan, offsets={b: o for b, o in plan.offsets.items() if b is not C}))


@pytest.mark.parametrize("offset", [-4, 33])
def test_2_views_lie_inside_their_root(offset: int) -> None:
    beyond = Buffer("beyond", "arena", (8,), F32, root=D, offset=offset)
    with pytest.raises(CompileError, match="%beyond does not lie inside its root %d"):
        prove(replace(PROGRAM, outputs=[("d", D), ("beyond", beyond)]), make_plan(PROGRAM, {}))


def test_3_alignment_and_height() -> None:
    with pytest.raises(CompileError, match="%a at 8 is misaligned"):
        prove(PROGRAM, plan_with(a=8))
    with pytest.raises(CompileError, match="%a at 640 does not lie within"):
        prove(PROGRAM, plan_with(a=640))
    with pytest.raises(CompileError, match="does not lie within"):
        prove(PROGRAM, make_plan(PROGRAM, {}), guard=64)


def test_4_capacity() -> None:
    plan = make_plan(PROGRAM, {})
    with pytest.raises(CompileError, match="above the capacity"):
        prove(PROGRAM, plan, capacity=plan.arena - 1)


def test_5_what_is_in_use_together_is_apart() -> None:
    plan = make_plan(PROGRAM, {})
    with pytest.raises(CompileError, match="%a and %b overlap"):
        prove(PROGRAM, plan_with(a=plan.offsets[B]))


def test_5_guards_are_apart_too() -> None:
    roomy = replace(make_plan(PROGRAM, {}), placement=replace(make_plan(PROGRAM, {}).placement, height=1024))
    with pytest.raises(CompileError, match="overlap"):
        prove(PROGRAM, roomy, guard=64)


def test_5_in_place_only_where_the_kernel_allows_it() -> None:
    """d reads a backwards and last, so it must not lie on it."""
    with pytest.raises(CompileError, match="%a and %d overlap"):
        prove(PROGRAM, plan_with(d=make_plan(PROGRAM, {}).offsets[A]))


def test_5_in_place_only_over_a_last_reader() -> None:
    program = replace(PROGRAM, outputs=[("d", D), ("b", B)])
    with pytest.raises(CompileError, match="%b and %c overlap"):
        prove(program, make_plan(PROGRAM, {}))


def test_6_shared_weights_lie_where_forward_has_them() -> None:
    forward = make_plan(PROGRAM, {}, include=["params"])
    shared = SharedWeights.of(forward)
    prove(PROGRAM, make_plan(PROGRAM, {}, shared=shared), shared=shared)
    moved = make_plan(PROGRAM, {}, include=["params", "constants"])
    high = replace(moved, offsets={b: o + (128 if b is W else 0) for b, o in moved.offsets.items()})
    free = replace(high, placement=replace(high.placement, height=1024))
    with pytest.raises(CompileError, match=r"%w|elsewhere"):
        prove(PROGRAM, free, shared=shared)
