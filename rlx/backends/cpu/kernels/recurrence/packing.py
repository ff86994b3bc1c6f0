"""How the recurrent weights lie in memory: packed once, in the order in which a step reads them."""

from __future__ import annotations

from rlx.backends.cpu.kernels.recurrence.cells import Shape, shape_of
from rlx.backends.cpu.schedule.recurrence import BLOCKS, LINE, TEAM_ROWS
from rlx.backends.cpu.strategy import Setting
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import ceildiv
from rlx.kernels.expr import Cast, Expr, Load, Reduce, Select, Var, const, guarded
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["layout"]

I32 = DTYPES["i32"]


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The kernels that pack the recurrent weights, and the recurrence on them, with its state."""
    node = kernel.special
    assert node is not None
    s = shape_of(node, setting.target)
    x, r, *extra = kernel.operands
    made: list[Kernel] = []
    packed: list[Buffer] = []
    name = kernel.results[0].name
    kind = "prepared" if r.is_fixed else "arena"
    for number, stage in enumerate(s.stages):
        shape = (s.op.directions, s.groups, s.depth, s.panels, len(stage), s.lanes, *[s.each] * (s.each > 1))
        buffer = Buffer(f"{name}.r{number}", kind, shape, r.dtype)
        own = out_vars(len(shape))
        d, group, at, panel, gate, lane = own[:6]
        unit = (group * s.panels + panel) * s.lanes + lane
        depth = at * s.each + own[6] if s.each > 1 else at
        element = Load(r, (d, (gate + stage[0]) * s.hidden + unit, depth), r.dtype)
        inside = unit < s.hidden
        if s.depth * s.each != s.hidden:
            inside = inside & (depth < s.hidden)
        padded = s.padded * s.depth * s.each != s.hidden * s.hidden
        filled = Select(inside, guarded(element, inside), const(0, r.dtype)) if padded else element
        made.append(Kernel("pack r", (Store(buffer, shape, own, filled),), nodes=kernel.nodes))
        packed.append(buffer)
    d_size = s.op.directions
    if s.fours:
        store = _totals(s, Buffer(f"{name}.totals", kind, (d_size, s.gates * s.hidden), I32), r)
        made.append(Kernel("sums of r", (store,), nodes=kernel.nodes))
        packed.append(store.buffer)
    state = Buffer(f"{name}.state", "arena", (s.planes, d_size, s.batch, s.padded), s.dtype)
    sync = Buffer(f"{name}.sync", "arena", (d_size, ceildiv(s.batch, TEAM_ROWS), 1 + BLOCKS, LINE), DTYPES["i64"])
    made.append(replace(kernel, operands=(x, *packed, *extra), results=(*kernel.results, state, sync)))
    return made


def _totals(s: Shape, buffer: Buffer, r: Buffer) -> Store:
    """The sum of the weights of each gate of a unit, from which follows what the zero point of a state takes off."""
    (d, unit), k = out_vars(2), Var("r0")
    element: Expr = Cast(Load(r, (d, unit, k), r.dtype), I32)
    return Store(buffer, buffer.shape, (d, unit), Reduce("add", (k,), (s.hidden,), element, I32))
