"""Running sums and products along an axis: line by line in order, several lines at once.

Lines that lie next to each other in memory are lanes of vectors; of lines along the last axis four are under way at a
time, since each addition waits for the one before it. The order is that of the definition, so results have its bits.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import constant, vec
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.lowering import accumulator
from rlx.kernels.program import Kernel
from rlx.ops.cumulative import CumProd, CumSum

__all__ = ["accepts", "emit"]

TOGETHER = 4  # lines, or vectors of them


def accepts(node: Node) -> bool:
    """Whatever the CPU computes with."""
    return node.inputs[0].dtype.name in convert.LLVM


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A row is a line along the last axis, or a block of neighbouring lines along another."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, CumSum | CumProd)
    frame, (x,), (out,) = Frame(), kernel.operands, kernel.results
    f, dtype, wide = frame.f, x.dtype, accumulator(x.dtype)
    axis = op.axis % len(x.shape)
    before, after = size_product(x.shape[:axis]), size_product(x.shape[axis + 1 :])
    lanes = max(target.vector_bytes // wide.itemsize, 1)
    block = TOGETHER * lanes
    last = after == 1
    blocks = 1 if last else ceildiv(after, block)
    start, stop = frame.rows(before * blocks, x.shape[axis] * (1 if last else TOGETHER))
    n, columns, count = frame.size(x.shape[axis]), frame.size(after), frame.size(blocks)
    source, result = frame.pointer(x), frame.pointer(out)

    def run(places: list[str], step: str, w: int) -> None:
        _run(frame, op, (source, result), (dtype, wide), n, places, step, w)

    def lines(first: str, _: list[str]) -> None:
        run([f.mul(f.add(first, j, "i64"), n, "i64") for j in range(TOGETHER)], "1", 1)

    def a_line(row: str, _: list[str]) -> None:
        run([f.mul(row, n, "i64")], "1", 1)

    def a_block(row: str, _: list[str]) -> None:
        outer, number = f.binary("udiv", row, count, "i64"), f.binary("urem", row, count, "i64")
        base = f.mul(f.mul(outer, n, "i64"), columns, "i64")
        first = f.mul(number, block, "i64")
        end = f.min(f.add(first, block, "i64"), columns, "i64")

        def of_width(w: int, together: int) -> Callable[[str, list[str]], None]:
            def body(c: str, _: list[str]) -> None:
                place = f.add(base, c, "i64")
                run([f.add(place, j * w, "i64") for j in range(together)], columns, w)

            return body

        for w, together in ((lanes, TOGETHER), (lanes, 1), (1, 1)):
            width = w * together
            whole = f.add(first, f.mul(f.binary("udiv", f.sub(end, first, "i64"), width, "i64"), width, "i64"), "i64")
            f.loop(first, whole, width, [], of_width(w, together))
            first = whole

    if last:
        whole = f.sub(stop, f.binary("urem", f.sub(stop, start, "i64"), TOGETHER, "i64"), "i64")
        f.loop(start, whole, TOGETHER, [], lines)
        f.loop(whole, stop, 1, [], a_line)
    else:
        f.loop(start, stop, 1, [], a_block)
    return [frame.finish(optimize=False)]


def _run(
    frame: Frame,
    op: CumSum | CumProd,
    memory: tuple[str, str],
    types: tuple[DType, DType],
    n: str,
    places: list[str],
    step: str,
    w: int,
) -> None:
    """Lines of `n` elements that begin at `places`, `step` from each to the next; `w` neighbours of each too.

    `memory` is where operand and result lie, `types` are those of an element and of what is kept.
    """
    f, (source, result), (dtype, wide) = frame.f, memory, types
    stored, ty = convert.memory_type(dtype), vec(convert.llvm_type(wide), w)
    one = op.kind == "mul"
    unit = constant(float(one) if wide.is_float else int(one), ty)

    def element(i: str, totals: list[str]) -> list[str]:
        at = f.mul(f.sub(f.sub(n, i, "i64"), 1, "i64") if op.reverse else i, step, "i64")
        made = []
        for place, total in zip(places, totals, strict=True):
            here = f.add(place, at, "i64")
            raw = convert.from_memory(f, f.load(vec(stored, w), f.gep(source, here, stored)), dtype, w)
            value = convert.convert(f, raw, dtype, wide, w)
            made.append(f.mul(total, value, ty) if one else f.add(total, value, ty))
            shown = convert.convert(f, total if op.exclusive else made[-1], wide, dtype, w)
            f.store(convert.to_memory(f, shown, dtype, w), f.gep(result, here, stored), ty=vec(stored, w))
        return made

    frame.loop(0, n, [(ty, unit)] * len(places), element)
