"""The backward rule of attention: scores are computed again, for long sequences a block of query rows at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops.attention import I64, Attention
from rlx.ops.base import apply
from rlx.ops.elementwise import Identity
from rlx.ops.gradients.attach import cast, is_smooth, reshaped, vjp, zeros
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.engine import open_frame, pull
from rlx.ops.gradients.layout import box
from rlx.ops.layout import Concat, Iota
from rlx.trace.control import scan

BLOCK = 16 << 20  # bytes of scores, from which on they are made in blocks of at most that


@vjp(Attention)
def _attention(op: Attention, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    """No scores are kept from the forward pass; of long sequences a loop makes [B, H, rows, keys] of them."""
    count = _blocks(inputs)
    if count == 1:
        return _pulled(op, list(inputs), cotangents[0])
    return _Loop(op, inputs, cotangents[0]).cotangents(count)


def _blocks(inputs: Any) -> int:
    """How many blocks the query rows are cut into; one where a size is open."""
    q, k = inputs[:2]
    if not all(isinstance(size, int) for size in (*q.shape, *k.shape)):
        return 1
    scores = int(numel(q.shape[:3]) * k.shape[2]) * max(q.dtype.bits, 32) // 8
    blocks: int = max(1, min(-(-scores // BLOCK), q.shape[2]))
    return blocks


def _pulled(op: Attention, inputs: list[Value], ct: Value) -> list[Value | None]:
    """The cotangents of all inputs, by the decomposition."""
    graph = open_frame().graph
    own: list[Value] = [apply(Identity(), v) for v in inputs]  # one may be given twice
    start = len(graph.nodes)
    y = op.decompose(graph, *own)
    return pull(graph.nodes[start:], {y: cast(ct, y.dtype)}, own)


def _rows(x: Value, start: int, count: int) -> Value:
    """Rows of [.., rows, n]."""
    return box(x, [*[0] * (x.rank - 2), start, 0], (*x.shape[:-2], count, x.shape[-1]))


class _Loop:
    """Attention in blocks of rows: which inputs have rows, and which are the same for all blocks.

    The latter's cotangents are sums, which the loop carries.
    """

    def __init__(self, op: Attention, inputs: Any, ct: Value) -> None:
        self.op, self.inputs, self.ct = op, list(inputs), ct
        steps = sum(len(operands) for _, operands in op.split(inputs[3:]).steps)
        masks = [i for i in range(3, 3 + steps) if inputs[i].rank >= 2 and inputs[i].shape[-2] != 1]
        self.apart = [0, *masks]
        self.summed = [i for i, v in enumerate(inputs) if is_smooth(v) and i not in self.apart]
        self.sinks_and_steps = 3 + steps + op.sinks

    def block(self, start: Any, rows: list[Value], ct: Value) -> list[Value]:
        """The cotangents of all smooth inputs by one block, whose first row has the number `start`; zeros for none."""
        op, inputs = self.op, list(self.inputs)
        for i, v in zip(self.apart, rows, strict=True):
            inputs[i] = v
        if op.causal or op.window is not None:
            first = self.first() + start
            if isinstance(first, int):
                first = open_frame().graph.constant(first, "i64")
            end = self.sinks_and_steps
            inputs = [*inputs[:end], first, *inputs[end + op.placed :]]
            op = replace(op, placed=True)
        made = _pulled(op, inputs, ct)
        return [zeros(v) if d is None else d for v, d in zip(inputs, made, strict=True) if is_smooth(v)]

    def first(self) -> Any:
        """The position of the first row of all."""
        given, (rows, keys) = self.op.split(self.inputs[3:]), (v.shape[2] for v in self.inputs[:2])
        if given.place is not None:
            return cast(given.place, I64)
        if given.count is not None:
            return cast(given.count, I64) - rows
        return keys - rows

    def cotangents(self, count: int) -> list[Value | None]:
        """Those of all inputs, by a loop over `count` blocks and one more of the rows that are left."""
        rows = self.inputs[0].shape[2]
        each, left = rows // count, rows % count
        smooth = [i for i, v in enumerate(self.inputs) if is_smooth(v)]
        parts = [self.inputs[i] for i in self.apart]

        def body(carry: Any, row: Any) -> Any:
            number, ct, *own = row
            made = dict(zip(smooth, self.block(number * each, own, ct), strict=True))
            sums = tuple(c + made[i] for c, i in zip(carry, self.summed, strict=True))
            return sums, tuple(made[i] for i in self.apart if i in made)

        begin = tuple(zeros(self.inputs[i]) for i in self.summed)
        cut = [self.cut(v, count, each) for v in (self.ct, *parts)]
        sums, stacked = scan(body, begin, (apply(Iota(count)), *cut))
        found: dict[int, Value] = dict(zip(self.summed, sums, strict=True))
        there = [i for i in self.apart if is_smooth(self.inputs[i])]
        found |= {i: self.joined(v, count * each) for i, v in zip(there, stacked, strict=True)}
        if left:
            last = [_rows(v, count * each, left) for v in (*parts, self.ct)]
            for i, d in zip(smooth, self.block(count * each, last[:-1], last[-1]), strict=True):
                found[i] = found[i] + d if i in self.summed else apply(Concat(d.rank - 2), found[i], d)
        return [found.get(i) for i in range(len(self.inputs))]

    def cut(self, x: Value, count: int, each: int) -> Value:
        """[.., rows, n] as blocks [count, .., each, n]."""
        whole = _rows(x, 0, count * each)
        return moved(reshaped(whole, (*x.shape[:-2], count, each, x.shape[-1])), x.rank - 2, 0)

    def joined(self, x: Value, rows: int) -> Value:
        """The blocks as rows again."""
        back = moved(x, 0, x.rank - 3)
        return reshaped(back, (*x.shape[1:-2], rows, x.shape[-1]))
