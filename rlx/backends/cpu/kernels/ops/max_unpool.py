"""MaxUnpool: zeros, then each element at its place."""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame, bits_type
from rlx.backends.cpu.schedule.arguments import KernelCode, Product
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.affine import row_major
from rlx.kernels.program import Kernel
from rlx.ops.pool_more import MaxUnpool

__all__ = ["accepts", "emit"]

CLEARED = 1 << 16  # bytes that a chunk clears


def accepts(node: Node) -> bool:
    """Any type: elements are only moved."""
    return isinstance(node.op, MaxUnpool)


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """Two steps; the second goes through the elements in order, so that of equal places the last wins."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, MaxUnpool)
    return [_zeros(kernel), _moves(op, kernel)]


def _zeros(kernel: Kernel) -> KernelCode:
    (out,) = kernel.results
    frame = Frame()
    f, total = frame.f, size_product(out.shape) * out.dtype.numpy.itemsize
    start = f.mul("%chunk", CLEARED, "i64")
    count = f.min(f.sub(frame.size(total), start, "i64"), CLEARED, "i64")
    frame.clear(f.offset(frame.pointer(out), start), count)
    frame.chunks = Product((ceildiv(total, CLEARED),))
    return frame.finish()


def _moves(op: MaxUnpool, kernel: Kernel) -> KernelCode:
    x, indices = kernel.operands
    (out,) = kernel.results
    frame = Frame()
    f, ty = frame.f, bits_type(x.dtype)
    from_, places, to = (frame.pointer(b) for b in (x, indices, out))
    source = out.shape if op.pooled is None else (*out.shape[:2], *op.pooled)
    whole = frame.product(source)
    sizes, strides = [frame.size(s) for s in source], [frame.size(s) for s in row_major(out.shape)]
    bounds = [frame.size(s) for s in out.shape]

    def element(n: str, _: list[str]) -> None:
        index = frame.element(places, n, "i64")
        inside = f.cmp("ult", index, whole, "i64")
        target = index
        if op.pooled is not None:
            rest, target = f.select(inside, index, 0, "i64"), "0"
            for d in reversed(range(len(sizes))):
                size = f.max(sizes[d], 1, "i64")
                at, rest = f.binary("urem", rest, size, "i64"), f.binary("udiv", rest, size, "i64")
                inside = f.and_(inside, f.cmp("lt", at, bounds[d], "i64"), "i1")
                target = f.add(target, f.mul(at, strides[d], "i64"), "i64")
        frame.fail_unless(inside, "index", index)
        f.if_(inside, lambda: frame.put(frame.element(from_, n, ty), to, target, ty))

    frame.loop(0, frame.product(x.shape), [], element)
    return frame.finish()
