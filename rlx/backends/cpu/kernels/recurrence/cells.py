"""Recurrent cells on the CPU: their sizes, and the code that a step is made of."""

from __future__ import annotations

from typing import Literal

from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.backends.cpu.schedule.recurrence import RecurrenceSchedule
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ir.shape import Size
from rlx.ops.recurrent import Function as Activation
from rlx.ops.recurrent import Recurrence
from rlx.records import dataclass

__all__ = ["ROUNDED", "STEP", "Shape", "activation", "cut_of", "product", "shape_of", "tile_rows"]

ROUNDED, STEP = 3, 4  # planes of a cell that rounds its state: whole numbers, and at the front the size of their step


@dataclass(frozen=True)
class Shape:
    """The sizes of a recurrence for a machine, and the layout of its weights."""

    op: Recurrence
    dtype: DType
    steps: Size
    batch: Size
    hidden: int
    target: Target

    @property
    def lanes(self) -> int:
        return self.target.vector_bytes // self.dtype.itemsize

    @property
    def gates(self) -> int:
        return len(self.op.spec.gates)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The gates that are computed together; a GRU that resets the state before the product needs a second stage."""
        if self.op.cell == "gru" and not self.op.linear_before_reset:
            return ((0, 1), (2,))
        return (tuple(range(self.gates)),)

    @property
    def panels(self) -> int:
        """Vectors of units in a group: enough chains of fma for one row."""
        return 2 if len(self.stages[0]) > 2 else 4

    @property
    def units(self) -> int:
        """Units in a group."""
        return self.panels * self.lanes

    @property
    def groups(self) -> int:
        return -(-self.hidden // self.units)

    @property
    def padded(self) -> int:
        """The units of a state as it is kept between steps."""
        return self.groups * self.units

    @property
    def planes(self) -> int:
        """Vectors kept for a row: two states in turn, and the cell, or the update gate and the state after reset."""
        if self.op.round_state:
            return STEP + 1
        return {"lstm": 3, "rnn": 2}.get(self.op.cell, 2 if self.op.linear_before_reset else 4)

    @property
    def turns(self) -> int:
        """The turns of a step: its stages, before them the rounding of the state."""
        return len(self.stages) + self.op.round_state


def cut_of(s: Shape) -> RecurrenceSchedule:
    """How the work of a recurrence is split."""
    at_once = tile_rows(len(s.stages[0]))
    sizes = s.gates, s.hidden, s.padded, s.groups, at_once, s.op.directions
    return RecurrenceSchedule(s.steps, s.batch, *sizes, s.op.round_state)


def tile_rows(gates: int) -> int:
    """Rows of the batch whose sums are in registers at once."""
    return {4: 3, 3: 4, 2: 6, 1: 8}[gates]


def shape_of(node: Node, target: Target) -> Shape:
    """The sizes of a recurrence node."""
    op = node.op
    assert isinstance(op, Recurrence)
    x, r = node.inputs[0], node.inputs[1]
    steps, batch = (x.shape[1], x.shape[0]) if op.batch_first else (x.shape[0], x.shape[1])
    hidden = r.shape[2]
    assert isinstance(hidden, int)
    return Shape(op, x.dtype, steps, batch, hidden, target)


def product(s: Shape, gates: int, rows: int) -> Function:
    """`(ptr a, i64 lda, ptr r, ptr out, i64 k)`: the gates' sums of some rows of the state, out [rows, gates, units].

    For one row all panels of a group, else the one that r and out point at.
    """
    ty = "float" if s.dtype.name == "f32" else "double"
    v, size, panels = vec(ty, s.lanes), s.dtype.itemsize, s.panels if rows == 1 else 1
    f = Function(
        f"rlx_recur_{s.dtype.name}x{s.lanes}_{rows}x{gates}x{s.panels}",
        [("ptr", "a"), ("i64", "lda"), ("ptr", "r"), ("ptr", "out"), ("i64", "k")],
        shared=True,
        attrs="nounwind noinline",
    )
    row_step = f.mul("%lda", size)
    per_k = s.units * gates * size

    def steps(count: int, state: list[str]) -> list[str]:
        pa, pr, acc = state[:rows], state[rows], state[rows + 1 :]
        for k in range(count):
            a = [f.splat(f.load(ty, f.offset(p, k * size)), s.lanes) for p in pa]
            for panel in range(panels):
                for gate in range(gates):
                    at = k * per_k + (panel * gates + gate) * s.lanes * size
                    r = f.load(v, f.offset(pr, at))
                    for row in range(rows):
                        number = (row * gates + gate) * panels + panel
                        acc[number] = f.fma(a[row], r, acc[number], v)
        return [*(f.offset(p, count * size) for p in pa), f.offset(pr, count * per_k), *acc]

    pointers = ["%a"]
    for _ in range(rows - 1):
        pointers.append(f.offset(pointers[-1], row_step))
    state: list[tuple[str, str]] = [("ptr", p) for p in [*pointers, "%r"]]
    state += [(v, "zeroinitializer")] * (rows * gates * panels)
    whole = f.and_("%k", -2)
    after = f.loop(0, whole, 2, state, lambda _, carried: steps(2, carried))
    state = [(kind, value) for (kind, _), value in zip(state, after, strict=True)]
    acc = f.loop(whole, "%k", 1, state, lambda _, carried: steps(1, carried))[rows + 1 :]
    for row in range(rows):
        for gate in range(gates):
            for panel in range(panels):
                place = (row * gates + gate) * s.units + panel * s.lanes
                f.store(acc[(row * gates + gate) * panels + panel], f.gep("%out", place, ty))
    f.ret()
    return f


def activation(f: Function, fn: Activation, x: str, w: int, dtype: Literal["f32", "f64"]) -> str:
    """The code of an activation of `w` lanes; NaN passes through all of them."""
    ty = f.type_of(x)
    a, b = fn.alpha or 0.0, fn.beta or 0.0
    if fn.clip:
        x = f.max(-fn.clip, f.min(fn.clip, x, ty), ty)
    match fn.name:
        case "relu":
            return f.max(0.0, x, ty)
        case "tanh":
            return vmath.tanh(f, x, w, dtype)
        case "sigmoid":
            return vmath.sigmoid(f, x, w, dtype)
        case "affine":
            return f.fma(x, a, b, ty)
        case "leakyrelu":
            return f.select(f.cmp("lt", x, 0.0), f.mul(x, a), x)
        case "thresholdedrelu":
            return f.select(f.cmp("lt", x, a), 0.0, x, ty)
        case "scaledtanh":
            return f.mul(vmath.tanh(f, f.mul(x, b), w, dtype), a)
        case "hardsigmoid":
            return f.max(0.0, f.min(1.0, f.fma(x, a, b, ty), ty), ty)
        case "elu":
            below = f.min(0.0, x, ty)
            return f.select(f.cmp("lt", x, 0.0), f.mul(vmath.expm1(f, below, w, dtype), a), x)
        case "softsign":
            return f.div(x, f.add(vmath.fabs(f, x), 1.0))
        case _:
            rest = vmath.log1p(f, vmath.exp(f, f.neg(vmath.fabs(f, x)), w, dtype), w, dtype)
            return f.add(f.max(0.0, x, ty), rest)
