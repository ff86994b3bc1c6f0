"""Recurrent cells on the CPU: their sizes, and the code that a step is made of.

The state of a cell that rounds it is multiplied as whole numbers by weights that are i8 in memory: fours of u8,
neighbours along k, where an instruction adds up their products, from whose sums what the zero point of the state is
too much is taken off; else pairs of i16, less the zero point. Sums are i32, which cells of up to `MOST_WHOLE` units
can't overflow.
"""

from __future__ import annotations

from typing import Literal

from rlx.backends.cpu.gemm.accumulators import multiply_add
from rlx.backends.cpu.gemm.panels.int8_layout import instructions
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, constant, size_of, vec
from rlx.backends.cpu.llvm.x86 import add_fours
from rlx.backends.cpu.schedule.recurrence import RecurrenceSchedule
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.shape import Size
from rlx.ops.recurrent import Function as Activation
from rlx.ops.recurrent import Recurrence
from rlx.records import dataclass

__all__ = [
    "MOST_WHOLE",
    "ROUNDED",
    "STEP",
    "Shape",
    "activation",
    "cut_of",
    "product",
    "shape_of",
    "tile_rows",
    "whole_sums",
]

# Planes of a cell that rounds its state: whole numbers, and at the front the size of their step and their zero point.
ROUNDED, STEP = 3, 4
MOST_WHOLE = 32768  # units: of each, at most 255 times the difference of two i8


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
    def depth(self) -> int:
        """Steps along k of a product: units, or pairs or fours of them."""
        return -(-self.hidden // self.each)

    @property
    def each(self) -> int:
        """Weights of a unit for such a step."""
        if not self.op.round_state:
            return 1
        return 4 if self.fours else 2

    @property
    def fours(self) -> bool:
        """Whether a state that is rounded is multiplied by fours of u8."""
        dots = self.target.wide_bytes or (self.target.vector_bytes == 32 and instructions(self.target).dots)
        return self.op.round_state and self.target.x86 and dots

    @property
    def whole(self) -> str:
        """The LLVM type of a whole number of a rounded state."""
        return "i8" if self.fours else "i16"

    @property
    def scalar(self) -> str:
        """The LLVM type of a state."""
        return "float" if self.dtype.name == "f32" else "double"

    @property
    def weight(self) -> str:
        """The LLVM type of a weight in memory."""
        return "i8" if self.op.round_state else self.scalar

    @property
    def sum(self) -> str:
        """The LLVM type of a sum of products."""
        return "i32" if self.op.round_state else self.scalar

    @property
    def turns(self) -> int:
        """The turns of a step: its stages, before them the rounding of the state."""
        return len(self.stages) + self.op.round_state


def cut_of(s: Shape) -> RecurrenceSchedule:
    """How the work of a recurrence is split."""
    at_once = tile_rows(s, len(s.stages[0]))
    sizes = s.gates, s.hidden, s.padded, s.groups, at_once, s.op.directions
    return RecurrenceSchedule(s.steps, s.batch, *sizes, s.op.round_state, s.target.rates)


def tile_rows(s: Shape, gates: int) -> int:
    """Rows of the batch whose sums are in registers at once: AVX-512 has 32 of them."""
    if gates == 4 and s.target.vector_bytes == 64:
        return 6
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

    For one row all panels of a group, else the one that r and out point at. `lda` counts elements of a state.
    """
    v, size, panels = vec(s.sum, s.lanes), size_of(s.scalar), s.panels if rows == 1 else 1
    whole = {1: "", 2: "_whole", 4: "_fours"}[s.each]
    f = Function(
        f"rlx_recur{whole}_{s.dtype.name}x{s.lanes}_{rows}x{gates}x{s.panels}",
        [("ptr", "a"), ("i64", "lda"), ("ptr", "r"), ("ptr", "out"), ("i64", "k")],
        shared=True,
        attrs="nounwind noinline",
    )
    row_step = f.mul("%lda", size)
    vector_bytes = s.lanes * s.each * size_of(s.weight)
    per_k = s.panels * gates * vector_bytes

    def steps(count: int, state: list[str]) -> list[str]:
        pa, pr, acc = state[:rows], state[rows], state[rows + 1 :]
        for k in range(count):
            a = [f.splat(f.load(s.sum, f.offset(p, k * size)), s.lanes) for p in pa]
            for panel in range(panels):
                for gate in range(gates):
                    r = f.offset(pr, k * per_k + (panel * gates + gate) * vector_bytes)
                    r = _pairs(f, s, r) if s.each == 2 else f.load(vec("i8", 4 * s.lanes) if s.each == 4 else v, r)
                    for row in range(rows):
                        number = (row * gates + gate) * panels + panel
                        acc[number] = _multiply_add(f, s, a[row], r, acc[number])
        return [*(f.offset(p, count * size) for p in pa), f.offset(pr, count * per_k), *acc]

    pointers = ["%a"]
    for _ in range(rows - 1):
        pointers.append(f.offset(pointers[-1], row_step))
    state: list[tuple[str, str]] = [("ptr", p) for p in [*pointers, "%r"]]
    state += [(v, "zeroinitializer")] * (rows * gates * panels)
    even = f.and_("%k", -2)
    after = f.loop(0, even, 2, state, lambda _, carried: steps(2, carried))
    state = [(kind, value) for (kind, _), value in zip(state, after, strict=True)]
    acc = f.loop(even, "%k", 1, state, lambda _, carried: steps(1, carried))[rows + 1 :]
    for row in range(rows):
        for gate in range(gates):
            for panel in range(panels):
                place = (row * gates + gate) * s.units + panel * s.lanes
                f.store(acc[(row * gates + gate) * panels + panel], f.gep("%out", place, s.sum))
    f.ret()
    return f


def _pairs(f: Function, s: Shape, p: str) -> str:
    """The pairs of weights at p, of i16."""
    return f.cast("sext", f.load(vec("i8", 2 * s.lanes), p), "i16")


def _multiply_add(f: Function, s: Shape, a: str, r: str, total: str) -> str:
    if not s.op.round_state:
        return f.fma(a, r, total, vec(s.sum, s.lanes))
    if s.fours:
        return add_fours(f, total, a, r, vec(s.sum, s.lanes))
    return multiply_add(f, tile_of(DTYPES["i32"], s.target), a, r, total)


def whole_sums(
    f: Function,
    s: Shape,
    sums: list[str],
    state: str,
    zeros: str | None,
    totals: tuple[str, str] | None,
    hidden: str,
    mask: str | None,
) -> list[str]:
    """The sums of the gates in f32, less what zero points take off: the weights' of a row of the rounded state.

    `totals` of the weights of each unit and the zero point of the state: where its numbers are not less that yet.
    """
    v, bytes = vec("i32", s.units), vec("i8", s.units)
    point = None if totals is None else totals[1]
    if totals is not None:
        splat = f.splat(totals[1], s.units)
        for n, x in enumerate(sums):
            p = f.gep(totals[0], f.mul(hidden, n), "i32") if n else totals[0]
            total = f.load(v, p) if mask is None else f.masked_load(v, p, mask)
            sums[n] = f.sub(x, f.mul(total, splat, v), v)
    if zeros is not None:

        def add(k: str, total: list[str]) -> list[str]:
            x = f.load(vec(s.whole, s.units), f.gep(state, k, s.whole))
            return [f.add(total[0], f.cast("sext" if point is None else "zext", x, "i32"), v)]

        found = f.loop(0, s.padded, s.units, [(v, constant(0, v))], add)
        sum_of = f.reduce(found[0], f.add)
        if point is not None:
            sum_of = f.sub(sum_of, f.mul(point, s.padded, "i32"), "i32")
        total = f.splat(sum_of, s.units)
        for n, x in enumerate(sums):
            p = f.gep(zeros, f.mul(hidden, n), "i8") if n else zeros
            zero = f.load(bytes, p) if mask is None else f.masked_load(bytes, p, mask)
            sums[n] = f.sub(x, f.mul(f.cast("sext", zero, "i32"), total, v), v)
    return [f.cast("sitofp", x, "float") for x in sums]


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
