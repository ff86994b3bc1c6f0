"""EyeLike: rows of zeros, then the element of each that lies on the diagonal."""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame, bits_type
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.kernels.program import Kernel
from rlx.ops.mask import EyeLike

__all__ = ["accepts", "emit"]

CHEAP = 16  # bytes that are cleared in a step of the schedule


def accepts(node: Node) -> bool:
    """Types whose elements are whole bytes."""
    dtype = node.outputs[0].dtype
    return dtype.kind == "b" or dtype.bits >= 8


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A chunk clears some rows."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, EyeLike)
    (out,) = kernel.results
    frame = Frame()
    f, ty, size = frame.f, bits_type(out.dtype), out.dtype.numpy.itemsize
    columns, to = frame.size(out.shape[1]), frame.pointer(out)
    start, stop = frame.rows(out.shape[0], out.shape[1] * size // CHEAP + 1)
    line = f.mul(columns, size, "i64")
    count = f.mul(f.max(f.sub(stop, start, "i64"), 0, "i64"), line, "i64")
    begin = f.offset(to, f.mul(start, line, "i64"))
    frame.clear(begin, count)
    one = int.from_bytes(out.dtype.numpy.type(1).tobytes(), "little")
    first = f.max(start, -op.k, "i64")  # 0 <= row + k < columns
    last = f.min(stop, f.sub(columns, op.k, "i64"), "i64")

    def row(i: str, _: list[str]) -> None:
        place = f.add(f.mul(i, columns, "i64"), f.add(i, op.k, "i64"), "i64")
        frame.put(one, to, place, ty)

    f.loop(first, last, 1, [], row)
    return [frame.finish()]
