"""Recurrent steps on the CPU: all steps of a direction and some rows of the batch in one chunk.

The recurrent weights are packed once, in *groups* of vectors of units: [D, groups, H, panels, gates, lanes], so
that a step reads a group's weights in order, and has all gates of the group's units in registers at its end. Each
gate's sum is one chain of fma over the state, so its bits depend neither on the batch nor on the threads.

Large cells are computed by several threads together: see `team`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from rlx.backends.cpu.kernels.recurrence.cells import (
    MOST_WHOLE,
    ROUNDED,
    STEP,
    activation,
    cut_of,
    product,
    shape_of,
    tile_rows,
    whole_sums,
)
from rlx.backends.cpu.kernels.recurrence.packing import layout
from rlx.backends.cpu.kernels.recurrence.team import Team
from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, Module, constant, vec, void
from rlx.backends.cpu.loops.emitter import ARGS, PLACEHOLDER, STATUS, name_kernel, report
from rlx.backends.cpu.loops.looks import looking_loop
from rlx.backends.cpu.schedule.arguments import Argument, ArgumentTable, Computed, KernelCode, Part, Pointer, once, part
from rlx.backends.cpu.schedule.recurrence import BLOCKS, LINE
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.ir.shape import Size
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.recurrent import Function as Activation
from rlx.ops.recurrent import Recurrence
from rlx.records import dataclass

__all__ = ["accepts", "emit", "layout"]


ALONE = 4  # turns of a member without a team, between looks whether the run goes on


def accepts(node: Node) -> bool:
    """Cells of a fixed size in f32 or f64; where they multiply whole numbers, so small that sums can't overflow."""
    op, (x, r, *extra) = node.op, node.inputs
    assert isinstance(op, Recurrence)
    lengths = [v.dtype.name for name, v in zip(op.optional, extra, strict=True) if name == "lengths"]
    sized = isinstance(r.shape[2], int) and 0 < r.shape[2] <= (MOST_WHOLE if op.round_state else r.shape[2])
    return sized and x.dtype.name in ("f32", "f64") and set(lengths) <= {"i32", "u32"}


# ---- code


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """What clears the counters of the teams, and the recurrence."""
    return _Code(kernel, target).codes()


class _Code:
    """The functions of one recurrence; strides are in elements."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        assert kernel.special is not None
        self.s = s = shape_of(kernel.special, target)
        self.op = op = s.op
        self.ty = "float" if s.dtype.name == "f32" else "double"
        self.name = cast(Literal["f32", "f64"], s.dtype.name)
        self.table = ArgumentTable()
        count = len(s.stages) + s.fours
        operands = kernel.operands
        self.x, self.packed = operands[0], operands[1 : 1 + count]
        self.given = dict(zip(op.optional, operands[1 + count :], strict=True))
        self.every, *self.last = kernel.results[:-2]
        self.state, self.sync = kernel.results[-2:]
        d, b, t, h = op.directions, s.batch, s.steps, s.hidden
        row = d * s.gates * h
        self.x_strides: tuple[Size, Size] = (row, t * row) if op.batch_first else (b * row, row)  # of steps, of rows
        self.y_strides: tuple[Size, Size, Size] = (d * h, h, t * d * h) if op.batch_first else (d * b * h, b * h, h)
        self.last_strides: tuple[Size, Size] = (h, d * h) if op.batch_first else (b * h, h)  # of directions, of rows
        self.cut = once(cut_of(s))

    def codes(self) -> list[KernelCode]:
        main = self.kernel()
        symbol, ir = name_kernel(Module([main]).text())
        words = tuple(self.table.words)
        return [self.clear(), KernelCode(symbol, ir, words, Part(self.cut, "chunks"), ("index",))]

    def clear(self) -> KernelCode:
        """Sets the counters of all teams to zero."""
        f, table = Function(PLACEHOLDER, ARGS), ArgumentTable()
        start = table.load(f, Pointer(self.sync))
        count = table.load(f, part(self.cut, "counters"))
        f.loop(0, count, 1, [], lambda i, _: f.store(0, f.gep(start, i, "i64"), ty="i64"))
        f.ret()
        symbol, ir = name_kernel(Module([f]).text())
        return KernelCode(symbol, ir, tuple(table.words), Part(self.cut, "clears"))

    def word(self, f: Function, word: Argument) -> str:
        return self.table.load(f, word)

    def computed(self, f: Function, field: str) -> str:
        """A number of the cut."""
        return self.table.load(f, self._computed(field))

    def _computed(self, field: str) -> Computed:
        made: dict[str, Computed] = self.__dict__.setdefault("_fields", {})
        if field not in made:
            made[field] = part(self.cut, field)
        return made[field]

    # -- the chunk

    def kernel(self) -> Function:
        """A member of a team, until the end or its turn is over."""
        s = self.s
        f = Function(PLACEHOLDER, ARGS)
        teams, row_blocks, blocks = (self.computed(f, key) for key in ("teams", "row_blocks", "blocks"))
        members, row_chunk, per_block = (self.computed(f, key) for key in ("members", "row_chunk", "block_groups"))
        team = f.rem("%chunk", teams)
        d, row_block = f.div(team, row_blocks), f.rem(team, row_blocks)
        row0 = f.mul(row_block, row_chunk)
        row1 = f.min(f.add(row0, row_chunk), self.word(f, s.batch))
        turns = f.add(f.mul(self.word(f, s.steps), s.turns), 2)
        groups = self.word(f, s.groups)
        functions = self.op.functions()
        steps = [self.block(functions[0], "a")]
        if len(functions) > 1 and functions[1] != functions[0]:
            steps.append(self.block(functions[1], "b"))

        def run(first: str, last: str, turn: str) -> None:
            args = ["%words", "%ctx", d, row0, row1, first, last, turn]
            if len(steps) == 1:
                f.call(steps[0], args)
            else:
                f.if_(f.cmp("eq", d, 0), lambda: void(f.call(steps[0], args)), lambda: void(f.call(steps[1], args)))

        def alone() -> None:
            looking_loop(f, 0, turns, 1, [], lambda turn, _: run("0", groups, turn), ALONE)

        def together() -> None:
            counters = f.gep(self.word(f, Pointer(self.sync)), f.mul(team, (1 + BLOCKS) * LINE), "i64")
            rare = self.computed(f, "rare")
            Team(f, counters, run, turns, groups, blocks, per_block, rare).member(members)

        f.if_(f.cmp("le", members, 1), alone, together)
        f.ret()
        return f

    # -- a block of groups in one turn

    def block(self, functions: list[Activation], suffix: str) -> Function:
        """`(words, ctx, d, row0, row1, group0, group1, turn)`: turn 0 brings the state in, the last takes it out."""
        s = self.s
        args = [("ptr", "words"), ("ptr", "ctx")]
        args += [("i64", n) for n in ("d", "row0", "row1", "group0", "group1", "turn")]
        f = Function(f"{PLACEHOLDER}_{suffix}", args, internal=True, attrs="nounwind noinline")
        steps = self.word(f, s.steps)
        count = s.turns
        last = f.add(f.mul(steps, count), 1)

        def step() -> None:
            at = f.sub("%turn", 1)
            number = f.div(at, count) if count > 1 else at
            if count == 1:
                self.step(f, functions, 0, number, steps)
                return
            f.if_(
                f.cmp("eq", f.rem(at, count), 0),
                lambda: self.round(f, number) if self.op.round_state else self.step(f, functions, 0, number, steps),
                lambda: self.step(f, functions, 0 if self.op.round_state else 1, number, steps),
            )

        f.if_(
            f.cmp("eq", "%turn", 0),
            lambda: self.begin(f, steps),
            lambda: void(f.if_(f.cmp("eq", "%turn", last), lambda: self.end(f, steps), step)),
        )
        f.ret()
        return f

    def plane(self, f: Function, number: str | int, row: str) -> str:
        """The address of a row of one of the vectors kept."""
        s = self.s
        plane, rows = self.word(f, s.op.directions * s.batch), self.word(f, s.batch)
        index = f.add(f.mul(number, plane, "i64"), f.add(f.mul("%d", rows), row))
        return f.gep(self.word(f, Pointer(self.state)), f.mul(index, self.word(f, s.padded)), self.ty)

    def at_last(self, f: Function, buffer: Buffer, row: str) -> str:
        """The address of a row of the first or last state."""
        of_d, of_row = self.last_strides
        index = f.add(f.mul("%d", self.word(f, of_d)), f.mul(row, self.word(f, of_row)))
        return f.gep(self.word(f, Pointer(buffer)), index, self.ty)

    def mask(self, f: Function, unit: str) -> str:
        """The lanes of a group that starts at `unit` which exist."""
        return f.mask_below(f.sub(self.word(f, self.s.hidden), unit), self.s.units, f"i{8 * self.s.dtype.itemsize}")

    def each_group(self, f: Function, body: Callable[[str, str | None], None]) -> None:
        """Runs body(first unit, mask) for each group of the block; the mask is None for whole groups."""
        s = self.s

        def group(g: str, _: list[str]) -> None:
            unit = f.mul(g, s.units)
            if s.padded == s.hidden:
                body(unit, None)
                return
            whole = f.cmp("le", f.add(unit, s.units), self.word(f, s.hidden))
            f.if_(whole, lambda: body(unit, None), lambda: body(unit, self.mask(f, unit)))

        f.loop("%group0", "%group1", 1, [], group)

    def get(self, f: Function, p: str, mask: str | None) -> str:
        v = vec(self.ty, self.s.units)
        return f.load(v, p) if mask is None else f.masked_load(v, p, mask)

    def put(self, f: Function, value: str, p: str, mask: str | None) -> None:
        if mask is None:
            f.store(value, p, ty=vec(self.ty, self.s.units))
        else:
            f.masked_store(value, p, mask, vec(self.ty, self.s.units))

    def kept(self) -> list[tuple[str, int]]:
        """The initial state that goes into each plane."""
        return [("initial_h", 0), ("initial_c", 2)][: 2 if self.op.cell == "lstm" else 1]

    def begin(self, f: Function, steps: str) -> None:
        def row(i: str, _: list[str]) -> None:
            if "lengths" in self.given:
                length = self.length(f, i)
                bad = f.or_(f.cmp("lt", length, 0), f.cmp("gt", length, steps))
                f.if_(bad, lambda: report(f, STATUS["index"], length))
            for name, plane in self.kept():
                target = self.plane(f, plane, i)
                source = self.at_last(f, self.given[name], i) if name in self.given else None

                def copy(unit: str, mask: str | None, source: str | None = source, target: str = target) -> None:
                    value = "zeroinitializer" if source is None else self.get(f, f.gep(source, unit, self.ty), mask)
                    self.put(f, value, f.gep(target, unit, self.ty), None)

                self.each_group(f, copy)

        f.loop("%row0", "%row1", 1, [], row)

    def end(self, f: Function, steps: str) -> None:
        def row(i: str, _: list[str]) -> None:
            for number, buffer in enumerate(self.last):
                source = self.plane(f, 2 if number else f.and_(steps, 1), i)
                target = self.at_last(f, buffer, i)

                def copy(unit: str, mask: str | None, source: str = source, target: str = target) -> None:
                    self.put(f, self.get(f, f.gep(source, unit, self.ty), None), f.gep(target, unit, self.ty), mask)

                self.each_group(f, copy)

        f.loop("%row0", "%row1", 1, [], row)

    def length(self, f: Function, row: str) -> str:
        lengths = self.word(f, Pointer(self.given["lengths"]))
        kind = "sext" if self.given["lengths"].dtype.kind == "i" else "zext"
        return f.cast(kind, f.load("i32", f.gep(lengths, row, "i32")), "i64")

    def time(self, f: Function, number: str, length: str) -> str:
        """The step of x that is taken as the `number`th of a sequence of `length`."""
        if self.op.direction == "forward":
            return number
        back = f.sub(f.sub(length, 1), number)
        return back if self.op.direction == "reverse" else f.select(f.cmp("eq", "%d", 0), number, back)

    def round(self, f: Function, number: str) -> None:
        """Rounds the state of the block's groups to 8 bits over the range of the whole state of the direction.

        Sequences that were over before the step before are no part of it.
        """
        s, ty = self.s, self.ty
        v, old = vec(ty, s.units), f.and_(number, 1)
        zero = constant(0.0, v)

        def row_range(row: str, state: list[str]) -> list[str]:
            own = self.plane(f, old, row)

            def group(g: str, state: list[str]) -> list[str]:
                unit = f.mul(g, s.units)
                p = f.gep(own, unit, ty)
                x = self.get(f, p, None if s.padded == s.hidden else self.mask(f, unit))
                nan = f.select(f.cmp("uno", x, x), x, state[2], v)
                return [f.min(state[0], x, v), f.max(state[1], x, v), nan]

            groups = self.word(f, s.groups)
            if "lengths" in self.given:
                groups = f.select(f.cmp("gt", number, self.length(f, row)), 0, groups)
            return f.loop(0, groups, 1, [(v, x) for x in state], group)

        lows, highs, nans = f.loop("%row0", "%row1", 1, [(v, zero)] * 3, row_range)
        low, high = f.reduce(lows, f.min), f.reduce(highs, f.max)
        step = f.select(f.cmp("eq", low, high), 1.0, f.div(f.sub(high, low), 255.0), ty)
        step = f.add(step, f.reduce(nans, f.add))  # NaN in a state makes it NaN, else that is 0
        nought = f.intrinsic("roundeven", f.max(0.0, f.min(255.0, f.div(f.neg(low), step), ty), ty))
        nought = f.select(f.cmp("ord", nought, nought), nought, 0.0, ty)
        least, most = (f.splat(x, s.units) for x in (f.neg(nought), f.sub(255.0, nought)))
        steps, points = f.splat(step, s.units), f.splat(nought, s.units)
        first = f.cmp("eq", "%group0", 0)

        def keep() -> None:
            place = self.plane(f, STEP, "%row0")
            f.store(step, place)
            f.store(f.cast("fptosi", nought, "i32"), f.gep(place, 1, "i32"))

        f.if_(first, keep)

        def row(i: str, _: list[str]) -> None:
            source, target = self.plane(f, old, i), self.plane(f, ROUNDED, i)

            def group(unit: str, mask: str | None) -> None:
                x = f.intrinsic("roundeven", f.div(self.get(f, f.gep(source, unit, ty), mask), steps))
                x = f.max(least, f.min(most, x, v), v)
                x = f.select(f.cmp("ord", x, x), x, zero)  # infinities over infinities: 0
                if s.fours:
                    whole = f.cast("trunc", f.cast("fptosi", f.add(x, points), "i32"), "i8")
                else:
                    whole = f.cast("fptosi", x, "i16")
                f.store(whole, f.gep(target, unit, s.whole))

            self.each_group(f, group)

        f.loop("%row0", "%row1", 1, [], row)

    def step(self, f: Function, functions: list[Activation], stage: int, number: str, steps: str) -> None:
        """One stage of step `number` for the rows and groups of the block."""
        s, op, ty = self.s, self.op, self.ty
        gates = s.stages[stage]
        old, new = f.and_(number, 1), f.xor(f.and_(number, 1), 1)
        source = 3 if stage else ROUNDED if op.round_state else old  # the plane that is multiplied
        padded, hidden = self.word(f, s.padded), self.word(f, s.hidden)
        depth = self.word(f, s.depth)
        a_group = f.mul(depth, s.units * len(gates) * s.each)
        weights = f.gep(
            self.word(f, Pointer(self.packed[stage])), f.mul(f.mul("%d", self.word(f, s.groups)), a_group), s.weight
        )
        x_step, x_row = (self.word(f, w) for w in self.x_strides)
        y_step, y_d, y_row = (self.word(f, w) for w in self.y_strides)
        x0 = f.gep(self.word(f, Pointer(self.x)), f.mul("%d", f.mul(hidden, s.gates)), ty)
        y0 = f.gep(self.word(f, Pointer(self.every)), f.mul("%d", y_d), ty)

        def at_time(t: str) -> tuple[str, str]:
            return f.gep(x0, f.mul(t, x_step), ty), f.gep(y0, f.mul(t, y_step), ty)

        everywhere = at_time(self.time(f, number, steps))
        most = tile_rows(s, len(gates))
        sums = f.alloca(s.sum, most * len(gates) * s.units)
        kernels = {rows: product(s, len(gates), rows) for rows in range(1, most + 1)}

        def group(unit: str, mask: str | None) -> None:
            r = f.gep(weights, f.mul(f.lshr(unit, s.units.bit_length() - 1), a_group), s.weight)

            def finish(row: str, at: str) -> None:
                place = f.gep(sums, f.mul(at, len(gates) * s.units), s.sum)
                gate_sums = self.gate_sums(f, place, len(gates), hidden, row, unit, mask)
                x, y = everywhere
                alive = None
                if "lengths" in self.given:
                    length = f.min(self.length(f, row), steps)  # longer ones are reported, and computed nonetheless
                    alive = f.cmp("lt", number, length)
                    x, y = at_time(f.select(alive, self.time(f, number, length), number))
                own_x = f.gep(x, f.add(f.mul(row, x_row), unit), ty)
                own_y = f.gep(y, f.add(f.mul(row, y_row), unit), ty)
                inputs = [self.get(f, f.gep(own_x, f.mul(gate, hidden), ty), mask) for gate in gates]
                planes = [f.gep(self.plane(f, n, row), unit, ty) for n in (old, new, *range(2, s.planes))]

                cell = _Cell(self, f, functions, stage, gate_sums, inputs, planes, own_y, unit, mask)
                if alive is None:
                    cell.emit()
                else:
                    f.if_(alive, cell.emit, cell.keep)

            def tile(state: list[str]) -> list[str]:
                (row,) = state
                take = _rows_at_once(f, row, most)
                a = self.plane(f, source, row)

                def call(rows: int) -> None:
                    for panel in range(1 if rows == 1 else s.panels):
                        own_r = f.gep(r, panel * s.lanes * len(gates) * s.each, s.weight)
                        f.call(kernels[rows], [a, padded, own_r, f.gep(sums, panel * s.lanes, s.sum), depth])

                f.switch(take, {rows: (lambda rows=rows: call(rows)) for rows in kernels})  # type: ignore[misc]
                f.loop(0, take, 1, [], lambda at, _: finish(f.add(row, at), at))
                return [f.add(row, take)]

            f.while_([("i64", "%row0")], lambda state: f.cmp("lt", state[0], "%row1"), tile)

        self.each_group(f, group)

    def gate_sums(
        self, f: Function, place: str, gates: int, hidden: str, row: str, unit: str, mask: str | None
    ) -> list[str]:
        """The sums of the gates of a row, which lie at `place`; of whole numbers less what their zero points add."""
        s = self.s
        found = [f.load(vec(s.sum, s.units), f.gep(place, k * s.units, s.sum)) for k in range(gates)]
        if not self.op.round_state:
            return found
        zeros = self.word(f, Pointer(self.given["zero"])) if "zero" in self.given else None
        zeros = zeros and f.gep(zeros, f.add(f.mul("%d", f.mul(hidden, 4)), unit), "i8")
        totals = None
        if s.fours:
            point = f.load("i32", f.gep(self.plane(f, STEP, "%row0"), 1, "i32"))
            every = self.word(f, Pointer(self.packed[-1]))
            totals = f.gep(every, f.add(f.mul("%d", f.mul(hidden, 4)), unit), "i32"), point
        return whole_sums(f, s, found, self.plane(f, ROUNDED, row), zeros, totals, hidden, mask)


def _rows_at_once(f: Function, row: str, most: int) -> str:
    """How many rows from `row` on are taken at once: `most`, but two even parts of what is left if that is less."""
    left = f.sub("%row1", row)
    take: str = f.min(left, most)
    if most > 2:
        even = f.and_(f.cmp("gt", left, most), f.cmp("lt", left, 2 * most))
        take = f.select(even, f.lshr(f.add(left, 1), 1), take)
    return take


@dataclass(frozen=True)
class _Cell:
    """The end of a step for one row and one group of units: the functions of its gates, and its new state.

    `sums` are those of the gates and `inputs` what x adds to them; `planes` are where the row's old and new state lie,
    and what else is kept of it, and `y` where the result does.
    """

    code: _Code
    f: Function
    functions: list[Activation]
    stage: int
    sums: list[str]
    inputs: list[str]
    planes: list[str]
    y: str
    unit: str
    mask: str | None

    def emit(self) -> None:
        """The new state, or in the first of two stages of a GRU what the second one needs."""
        f, op, code = self.f, self.code.op, self.code
        sums = self.sums
        if op.round_state:
            step = f.splat(f.load(code.ty, code.plane(f, STEP, "%row0")), code.s.units)
            sums = [f.mul(a, f.mul(step, self.parameter("scale", n, 4))) for n, a in enumerate(sums)]
        gates = [f.add(a, b) for a, b in zip(sums, self.inputs, strict=True)]
        if op.cell == "rnn":
            h = self.apply(0, gates[0])
        elif op.cell == "lstm":
            h = self.lstm(*gates)
        elif self.stage == 0 and len(code.s.stages) == 2:
            z, reset = self.apply(0, gates[0]), self.apply(0, gates[1])
            code.put(f, z, self.planes[2], None)
            code.put(f, f.mul(reset, code.get(f, self.planes[0], None)), self.planes[3], None)
            return
        else:
            h = self.gru(sums, gates)
        code.put(f, h, self.planes[1], None)
        code.put(f, h, self.y, self.mask)

    def keep(self) -> None:
        """The same for a row whose sequence is over: the state stays, and the result is zeros."""
        if self.stage == len(self.code.s.stages) - 1:
            self.code.put(self.f, self.code.get(self.f, self.planes[0], None), self.planes[1], None)
            self.code.put(self.f, "zeroinitializer", self.y, self.mask)

    def lstm(self, i: str, o: str, forget: str, c: str) -> str:
        f, op, code = self.f, self.code.op, self.code
        cell = code.get(f, self.planes[2], None)
        i = self.apply(0, self.peep(0, cell, i), 0)
        forget = f.sub(1.0, i) if op.input_forget else self.apply(0, self.peep(2, cell, forget), 2)
        cell = self.multiply_add(forget, cell, f.mul(i, self.apply(1, c, 3)))
        code.put(f, cell, self.planes[2], None)
        o = self.apply(0, self.peep(1, cell, o), 1)
        return f.mul(o, self.apply(2, cell))

    def gru(self, sums: list[str], gates: list[str]) -> str:
        f, code = self.f, self.code
        before = code.get(f, self.planes[0], None)
        if code.op.linear_before_reset:
            z, reset = self.apply(0, gates[0]), self.apply(0, gates[1])
            kept = f.add(sums[2], self.parameter("bias", 0, 1)) if "bias" in code.given else sums[2]
            given = f.fma(reset, kept, self.inputs[2])
        else:
            z = code.get(f, self.planes[2], None)
            given = f.add(gates[0], self.parameter("bias", 0, 1)) if "bias" in code.given else gates[0]
        g = self.apply(1, given)
        return f.fma(z, before, f.mul(f.sub(1.0, z), g))

    def parameter(self, name: str, number: int, per_direction: int) -> str:
        """The elements of row `number` of a parameter that has so many rows for each direction."""
        f, code = self.f, self.code
        at = f.add(f.mul("%d", code.word(f, per_direction * code.s.hidden)), self.unit)
        at = f.add(at, f.mul(code.word(f, code.s.hidden), number)) if number else at
        return code.get(f, f.gep(code.word(f, Pointer(code.given[name])), at, code.ty), self.mask)

    def apply(self, number: int, x: str, gate: int | None = None) -> str:
        """A function of the cell; where the state is rounded in f64, and after the bias of the gate."""
        f, code = self.f, self.code
        units = code.s.units
        if not code.op.round_state:
            return activation(f, self.functions[number], x, units, code.name)
        if gate is not None and "bias" in code.given:
            x = f.add(x, self.parameter("bias", gate, 4))
        wide = f.cast("fpext", x, vec("double", units))
        fn = self.functions[number]
        if fn.name == "sigmoid" and not fn.clip:
            made = vmath.sigmoid_of_f32(f, wide, units)
        else:
            made = activation(f, fn, wide, units, "f64")
        return f.cast("fptrunc", made, vec("float", units))

    def multiply_add(self, a: str, b: str, c: str) -> str:
        f = self.f
        return f.add(f.mul(a, b), c) if self.code.op.round_state else f.fma(a, b, c)

    def peep(self, number: int, cell: str, x: str) -> str:
        """A gate with what it sees of the cell."""
        given = "peepholes" in self.code.given
        return self.multiply_add(self.parameter("peepholes", number, 3), cell, x) if given else x
