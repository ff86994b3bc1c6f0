"""Writes to places given by data: a copy of what is written into (none where it is in place already), then the updates.

What one place gets comes in the order of the updates, whatever the number of threads: a chunk takes lines (or parts of
slices) that no other chunk writes to, and all of their updates. Sums and products of 16-bit floats are kept in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.kernels.frame import Frame, bits_type
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.schedule.arguments import KernelCode, Product, once, part
from rlx.backends.cpu.schedule.base import LineSchedule
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.shape import Shape, Size, ceildiv, size_product
from rlx.kernels.affine import row_major
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.scatter import ScatterElements, ScatterNd

__all__ = ["accepts", "emit"]

F32 = DTYPES["f32"]
COPIED = 1 << 16  # bytes that a chunk copies
ROWS = 1024  # of one width, between looks whether the run goes on

Plan = tuple[
    Size, Size, Size, Callable[[str, str], None]
]  # lines, inner and times of a `LineSchedule`; what emits rows


def accepts(node: Node) -> bool:
    """Moves of any type; combinations of those that the CPU computes with."""
    op = node.op
    assert isinstance(op, ScatterElements | ScatterNd)
    return op.reduction == "none" or node.inputs[0].dtype.name in convert.LLVM


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """Two steps, or one where sums have another type than the result."""
    assert kernel.special is not None
    op, x = kernel.special.op, kernel.operands[0]
    assert isinstance(op, ScatterElements | ScatterNd)
    if op.reduction in ("add", "mul") and x.dtype.is_float and x.dtype.bits < 32:
        return [_in_wide(op, kernel)]
    return [_copy(x, kernel.results[0]), _updates(op, kernel)]


def _copy(source: Buffer, target: Buffer) -> KernelCode:
    frame = Frame()
    f = frame.f
    total = size_product(source.shape) * source.dtype.numpy.itemsize
    start = f.mul("%chunk", COPIED, "i64")
    count = f.min(f.sub(frame.size(total), start, "i64"), COPIED, "i64")
    from_, to = frame.pointer(source), frame.pointer(target)

    def move() -> None:
        f.memcpy(f.offset(to, start), f.offset(from_, start), count)

    f.if_(f.cmp("ne", from_, to, "ptr"), move)
    frame.chunks = Product((ceildiv(total, COPIED),))
    return frame.finish()


def _updates(op: ScatterElements | ScatterNd, kernel: Kernel) -> KernelCode:
    frame = Frame()
    code = _Code(frame, op, kernel, frame.pointer(kernel.results[0]), kernel.operands[0].dtype)
    start, stop = frame.rows_of(code.cut, part(code.cut, "rows"))
    code.emit(start, stop)
    return frame.finish()


def _in_wide(op: ScatterElements | ScatterNd, kernel: Kernel) -> KernelCode:
    """All in one chunk: x as f32 in scratch, the updates, and the result rounded."""
    frame, x, out = Frame(), kernel.operands[0], kernel.results[0]
    f, count, ty = frame.f, size_product(x.shape), convert.memory_type(x.dtype)
    wide = frame.scratch(4 * count)
    source, target = frame.pointer(x), frame.pointer(out)

    def widen(i: str, _: list[str]) -> None:
        frame.put(convert.convert(f, frame.element(source, i, ty), x.dtype, F32, 1), wide, i, "float")

    def narrow(i: str, _: list[str]) -> None:
        frame.put(convert.convert(f, frame.element(wide, i, "float"), F32, x.dtype, 1), target, i, ty)

    frame.loop(0, frame.size(count), [], widen)
    code = _Code(frame, op, kernel, wide, F32)
    code.emit("0", frame.word(part(code.cut, "rows")))
    frame.loop(0, frame.size(count), [], narrow)
    return frame.finish()


class _Code:
    """The loops over updates, into elements of `dtype` at `out`; a row is what one chunk at least takes."""

    def __init__(self, frame: Frame, op: ScatterElements | ScatterNd, kernel: Kernel, out: str, dtype: DType) -> None:
        self.frame, self.op, self.out, self.dtype = frame, op, out, dtype
        self.x, self.indices, self.updates = kernel.operands
        moved = op.reduction == "none"
        self.given = bits_type(self.x.dtype) if moved else convert.memory_type(self.x.dtype)
        self.kept = self.given if moved else convert.memory_type(dtype)
        lines, self.inner, times, self.emit = (
            self.plan_elements(op) if isinstance(op, ScatterElements) else self.plan_slices()
        )
        self.cut = once(LineSchedule(lines, self.inner, times))

    # ---- elements

    def plan_elements(self, op: ScatterElements) -> Plan:
        axis = op.axis % len(self.x.shape)
        shape = self.indices.shape
        whole = shape[axis + 1 :] == self.x.shape[axis + 1 :]  # then the axes after it are one
        outer = [d for d in range(len(shape)) if d < axis or (d > axis and not whole)]
        inner = size_product(shape[axis + 1 :]) if whole else 1
        lines = size_product([shape[d] for d in outer])

        def loops(start: str, stop: str) -> None:
            self.element_loops(axis, outer, start, stop)

        return lines, inner, shape[axis], loops

    def element_loops(self, axis: int, outer: Sequence[int], start: str, stop: str) -> None:
        frame, f = self.frame, self.frame.f
        shape, given, own = self.indices.shape, row_major(self.indices.shape), row_major(self.x.shape)
        indices, updates = frame.pointer(self.indices), frame.pointer(self.updates)
        size, turns = frame.size(self.x.shape[axis]), frame.size(shape[axis])
        step, own_step = frame.size(given[axis]), frame.size(own[axis])

        def row(line: str, first: str, last: str) -> None:
            at = self.unravelled(line, [shape[d] for d in outer])
            base = self.dot(at, [given[d] for d in outer])
            own_base = self.dot(at, [own[d] for d in outer])

            def turn(j: str, _: list[str]) -> None:
                source = f.add(base, f.mul(j, step, "i64"), "i64")

                def element(i: str, _: list[str]) -> None:
                    place = f.add(source, i, "i64")
                    index = frame.axis_index(self.index(indices, place), size)
                    target = f.add(f.add(own_base, i, "i64"), f.mul(index, own_step, "i64"), "i64")
                    value = frame.element(updates, place, self.given)
                    f.if_(f.cmp("ge", index, 0, "i64"), lambda: self.combine(target, value))

                f.loop(first, last, 1, [], element)

            frame.loop(0, turns, [], turn, ROWS)

        self.row_loop(start, stop, row)

    # ---- slices

    def plan_slices(self) -> Plan:
        depth = self.indices.shape[-1]
        assert isinstance(depth, int)
        tuples = size_product(self.indices.shape[:-1])

        def loops(start: str, stop: str) -> None:
            self.slice_loops(depth, tuples, start, stop)

        return 1, size_product(self.x.shape[depth:]), tuples, loops

    def slice_loops(self, depth: int, tuples: Size, start: str, stop: str) -> None:
        frame, f = self.frame, self.frame.f
        strides = [frame.size(s) for s in row_major(self.x.shape)[:depth]]
        sizes = [frame.size(s) for s in self.x.shape[:depth]]
        indices, updates, inner = frame.pointer(self.indices), frame.pointer(self.updates), frame.size(self.inner)

        def row(_: str, first: str, last: str) -> None:
            def turn(j: str, _: list[str]) -> None:
                base, fine = "0", "true"
                for d, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
                    place = f.add(f.mul(j, depth, "i64"), d, "i64")
                    index = frame.axis_index(self.index(indices, place), size)
                    fine = f.and_(fine, f.cmp("ge", index, 0, "i64"), "i1")
                    base = f.add(base, f.mul(index, stride, "i64"), "i64")
                source = f.mul(j, inner, "i64")
                f.if_(fine, lambda: self.combine_all(base, updates, source, first, last))

            frame.loop(0, frame.size(tuples), [], turn, ROWS)

        self.row_loop(start, stop, row)

    def combine_all(self, base: str, updates: str, source: str, first: str, last: str) -> None:
        frame, f = self.frame, self.frame.f
        if self.op.reduction == "none":
            to = f.gep(self.out, f.add(base, first, "i64"), self.kept)
            from_ = f.gep(updates, f.add(source, first, "i64"), self.given)
            width = self.x.dtype.numpy.itemsize
            frame.f.memcpy(to, from_, f.mul(f.sub(last, first, "i64"), width, "i64"))
            return

        def element(i: str, _: list[str]) -> None:
            value = frame.element(updates, f.add(source, i, "i64"), self.given)
            self.combine(f.add(base, i, "i64"), value)

        f.loop(first, last, 1, [], element)

    # ---- what both need

    def row_loop(self, start: str, stop: str, row: Callable[[str, str, str], None]) -> None:
        """Calls `row` with the number of a line and the part of its inner elements, for each row."""
        frame, f = self.frame, self.frame.f
        inner, width = frame.size(self.inner), frame.word(part(self.cut, "width"))
        blocks = f.binary("udiv", f.sub(f.add(inner, width, "i64"), 1, "i64"), width, "i64")

        def turn(r: str, _: list[str]) -> None:
            first = f.mul(f.binary("urem", r, blocks, "i64"), width, "i64")
            row(f.binary("udiv", r, blocks, "i64"), first, f.min(f.add(first, width, "i64"), inner, "i64"))

        f.loop(start, stop, 1, [], turn)

    def unravelled(self, number: str, shape: Shape | list[Size]) -> list[str]:
        f = self.frame.f
        at: list[str] = []
        for size in reversed(shape[1:]):
            text = self.frame.size(size)
            at.insert(0, f.binary("urem", number, text, "i64"))
            number = f.binary("udiv", number, text, "i64")
        return [number, *at] if shape else []

    def dot(self, at: Sequence[str], strides: Sequence[Size]) -> str:
        f, total = self.frame.f, "0"
        for i, stride in zip(at, strides, strict=True):
            total = f.add(total, f.mul(i, self.frame.size(stride), "i64"), "i64")
        return total

    def index(self, indices: str, place: str) -> str:
        dtype = self.indices.dtype
        return convert.convert(
            self.frame.f, self.frame.element(indices, place, convert.memory_type(dtype)), dtype, DTYPES["i64"], 1
        )

    def combine(self, at: str, value: str) -> None:
        """The element at a place with an update, given as it lies in memory."""
        frame, f = self.frame, self.frame.f
        if self.op.reduction == "none":
            frame.put(value, self.out, at, self.kept)
            return
        dtype = F32 if self.dtype.is_float and self.dtype.bits < 32 else self.dtype
        old = convert.convert(f, frame.element(self.out, at, self.kept), self.dtype, dtype, 1)
        new = convert.convert(f, value, self.x.dtype, dtype, 1)
        made = convert.apply(f, self.op.reduction, [old, new], dtype, 1)
        frame.put(convert.convert(f, made, dtype, self.dtype, 1), self.out, at, self.kept)
