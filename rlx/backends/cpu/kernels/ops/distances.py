"""Distances of rows from rows: those of the second matrix, turned, lie beside each other in vectors.

A block of them is turned once and met by every row of the first matrix, several at a time.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import constant, vec
from rlx.backends.cpu.loops.looks import looking_loop
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.ir.shape import ceildiv
from rlx.kernels.program import Kernel
from rlx.ops.contract import PairDistances

__all__ = ["accepts", "emit"]

ROWS = 4  # of the first matrix at a time
VECTORS = 2  # of distances of each
BLOCK = 512  # terms after which a sum is added to the total, so that long ones keep their precision


def accepts(node: Node) -> bool:
    """f32 and f64."""
    return node.inputs[0].dtype.name in ("f32", "f64")


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A chunk has some blocks of the second matrix."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, PairDistances)
    return [_Code(op, kernel, target).code()]


class _Code:
    def __init__(self, op: PairDistances, kernel: Kernel, target: Target) -> None:
        self.frame, self.op = Frame(), op
        a, b = kernel.operands
        (out,) = kernel.results
        self.n, self.k, self.m = a.shape[0], a.shape[1], b.shape[0]
        self.a, self.b, self.out = (self.frame.pointer(x) for x in (a, b, out))
        self.bytes = a.dtype.bits // 8
        self.lanes, self.real = target.vector_bytes // self.bytes, convert.llvm_type(a.dtype)
        self.ty, self.width = vec(self.real, self.lanes), VECTORS * self.lanes

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        blocks = ceildiv(self.m, self.width)
        start, stop = frame.rows(blocks, self.n * self.k // (64 // self.width) + 1)
        turned = frame.scratch(self.k * (self.bytes * self.width))
        n, m = frame.size(self.n), frame.size(self.m)

        def block(number: str, _: list[str]) -> None:
            first = f.mul(number, self.width, "i64")
            count = f.min(f.sub(m, first, "i64"), self.width, "i64")
            self.turn(turned, first, count)
            masks = [f.mask_below(f.sub(count, v * self.lanes, "i64"), self.lanes) for v in range(VECTORS)]

            def rows(i: str, _: list[str]) -> None:
                last = f.sub(n, 1, "i64")  # of too few rows the last one again
                at = [f.min(f.add(i, u, "i64"), last, "i64") for u in range(ROWS)]
                sums = self.sums(turned, at)
                for u, row in enumerate(at):
                    to = f.add(f.mul(row, m, "i64"), first, "i64")
                    for v, mask in enumerate(masks):
                        value = sums[u * VECTORS + v]
                        value = f.intrinsic("sqrt", value) if self.op.root else value
                        place = f.add(to, v * self.lanes, "i64")
                        f.masked_store(value, f.gep(self.out, place, self.real), mask, self.ty)

            looking_loop(f, 0, n, ROWS, [], rows)

        f.loop(start, stop, 1, [], block)
        return frame.finish()

    def turn(self, turned: str, first: str, count: str) -> None:
        """Element j of each row beside the others'; what lies behind the rows is left as it is."""
        frame, f, k = self.frame, self.frame.f, self.frame.size(self.k)

        def row(r: str, _: list[str]) -> None:
            source = f.gep(self.b, f.mul(f.add(first, r, "i64"), k, "i64"), self.real)

            def element(j: str, _: list[str]) -> None:
                to = f.add(f.mul(j, self.width, "i64"), r, "i64")
                frame.put(frame.element(source, j, self.real), turned, to, self.real)

            f.loop(0, k, 1, [], element)

        f.loop(0, count, 1, [], row)

    def sums(self, turned: str, rows: list[str]) -> list[str]:
        """Of squared differences: of each row `VECTORS` vectors."""
        frame, f, ty, k = self.frame, self.frame.f, self.ty, self.frame.size(self.k)
        sources = [f.gep(self.a, f.mul(row, k, "i64"), self.real) for row in rows]
        zeros = [(ty, constant(0.0, ty))] * (ROWS * VECTORS)

        def term(j: str, carried: list[str]) -> list[str]:
            line = f.gep(turned, f.mul(j, self.width, "i64"), self.real)
            others = [f.load(ty, f.gep(line, v * self.lanes, self.real)) for v in range(VECTORS)]
            out: list[str] = []
            for source in sources:
                own = f.splat(frame.element(source, j, self.real), self.lanes, self.real)
                for other in others:
                    apart = f.sub(own, other, ty)
                    out.append(f.fma(apart, apart, carried[len(out)], ty))
            return out

        def part(begin: str, totals: list[str]) -> list[str]:
            found = f.loop(begin, f.min(f.add(begin, BLOCK, "i64"), k, "i64"), 1, zeros, term)
            return [f.add(total, some, ty) for total, some in zip(totals, found, strict=True)]

        return f.loop(0, k, BLOCK, zeros, part)
